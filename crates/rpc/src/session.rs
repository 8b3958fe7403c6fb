//! Server side of one connection: a protocol state machine with time as an argument.
//!
//! All of its memory is bounded. If a client sends faster than requests are processed, receiving stops
//! ([`Session::receive_capacity_bytes`]). If it reads slower than responses are produced, processing stops. If events still
//! accumulate or nothing moves any more, the connection is closed.

use std::os::fd::OwnedFd;

use serde_json::{Value, json};
use tenmil_base::{Instant, Span};

use crate::deferred_reply::PendingReply;
use crate::error::{ErrorCode, RpcError};
use crate::event::{Event, SET};
use crate::method::{Method, MethodKind, MethodRegistry};
use crate::passed_fd::PassedFd;
use crate::process_parts::ProcessParts;
use crate::request::{DispatchResult, InvalidRequest, Request, RequestId, response_line};

/// Session of a connected client.
#[derive(Debug)]
pub struct Session {
    limits: SessionLimits,
    /// Description of the client, for events.
    client: String,
    input: Vec<u8>,
    /// Offset in `input` up to which everything was processed.
    begin: usize,
    /// Offset up to which no newline was found after `begin`.
    searched: usize,
    output: Vec<u8>,
    sent: usize,
    follows: bool,
    /// Time since which the last input line has been incomplete.
    unfinished: Option<Instant>,
    /// Time of the last progress in either direction.
    last_progress: Instant,
    /// File descriptor attached to a request.
    passed: PassedFd,
    /// Deferred response of the last request. No other line is processed until it is available.
    waited_for: Option<AwaitedReply>,
    ending: Option<CloseReason>,
}

/// Request with a deferred response.
#[derive(Debug)]
struct AwaitedReply {
    id: RequestId,
    method: &'static Method,
    pending: PendingReply,
    /// Event to emit if it succeeds.
    changed: Option<Event>,
}

/// Resource limits of a connection.
#[derive(Clone, Copy, Debug)]
pub struct SessionLimits {
    /// Longest line, including its terminator.
    pub line_len_max: usize,
    /// Number of unsent bytes at which no more requests are processed.
    pub unsent_soft_max: usize,
    /// Number of unsent bytes at which an event closes the connection.
    pub unsent_max: usize,
    /// Time limit from the first byte of a line to its end.
    pub line_timeout: Span,
    /// Time limit for unsent bytes without progress.
    pub send_timeout: Span,
    /// Time limit for a silent connection that has no subscription.
    pub idle_timeout: Span,
}

/// Why a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseReason {
    /// The client closed the stream; remaining responses are still sent.
    ClientClosed,
    /// The client was rejected; the error is still sent.
    Rejected,
    /// The client does not read: nothing more is sent.
    SlowReader,
}

/// What requests are dispatched to.
#[derive(Clone, Copy, Debug)]
pub struct ServerContext<'a> {
    /// Method table.
    pub table: &'a MethodRegistry,
    /// State of the process.
    pub state: &'a ProcessParts,
}

/// Result of [`Session::process_line`].
#[derive(Clone, Debug, PartialEq)]
pub enum LineResult {
    /// Nothing: no complete line, or no space for a response.
    Nothing,
    /// A line was processed.
    Replied,
    /// A line was processed that changed something; the event is to be emitted.
    Changed(Event),
}

impl SessionLimits {
    /// Limits of the server.
    pub const USUAL: Self = Self {
        line_len_max: 64 << 10,
        unsent_soft_max: 256 << 10,
        unsent_max: 1 << 20,
        line_timeout: Span::from_secs(10),
        send_timeout: Span::from_secs(10),
        idle_timeout: Span::from_secs(600),
    };
}

impl Session {
    /// Creates a session for `client`, the description used in events.
    pub fn new(now: Instant, client: impl Into<String>, limits: SessionLimits) -> Self {
        Self {
            limits,
            client: client.into(),
            input: Vec::new(),
            begin: 0,
            searched: 0,
            output: Vec::new(),
            sent: 0,
            follows: false,
            unfinished: None,
            last_progress: now,
            passed: PassedFd::default(),
            waited_for: None,
            ending: None,
        }
    }

    /// Number of bytes that can be received now.
    pub fn receive_capacity_bytes(&self) -> usize {
        let held = self.input.len() - self.begin;
        if self.is_output_full() || self.ending.is_some() {
            0
        } else {
            self.limits.line_len_max - held
        }
    }

    /// Receives bytes, as far as there is space; returns the number consumed.
    pub fn receive(&mut self, now: Instant, bytes: &[u8]) -> usize {
        let taken = &bytes[..bytes.len().min(self.receive_capacity_bytes())];
        self.input.drain(..self.begin);
        self.searched -= self.begin;
        self.begin = 0;
        self.input.extend_from_slice(taken);
        if !taken.is_empty() {
            self.last_progress = now;
        }
        self.unfinished = match taken.iter().rposition(|byte| *byte == b'\n') {
            Some(end) if end + 1 == taken.len() => None,
            Some(_) => Some(now),
            None if taken.is_empty() => self.unfinished,
            None => self.unfinished.or(Some(now)),
        };
        taken.len()
    }

    /// Stores a received file descriptor, replacing one that was not consumed.
    pub fn store_received_fd(&mut self, file: OwnedFd) {
        self.passed.store_fd(file);
    }

    /// Handles the end of the stream. Everything received is still processed; the last line may lack
    /// its terminator.
    pub fn handle_stream_end(&mut self) {
        if self.input.len() > self.begin && self.input.last() != Some(&b'\n') {
            self.input.push(b'\n');
        }
        self.unfinished = None;
        self.ending.get_or_insert(CloseReason::ClientClosed);
    }

    /// Processes one line, if one is complete and there is space for the response.
    pub fn process_line(&mut self, served: ServerContext<'_>) -> LineResult {
        if self.has_stopped_processing() || self.is_output_full() {
            return LineResult::Nothing;
        }
        if self.waited_for.is_some() {
            return self.queue_deferred_response();
        }
        let Some(length) = self.input[self.searched..].iter().position(|byte| *byte == b'\n')
        else {
            self.searched = self.input.len();
            if self.input.len() - self.begin >= self.limits.line_len_max {
                self.reject_long_line();
            }
            return LineResult::Nothing;
        };
        let end = self.searched + length;
        let line = self.begin..end;
        (self.begin, self.searched) = (end + 1, end + 1);
        if self.input[line.clone()].iter().all(u8::is_ascii_whitespace) {
            return LineResult::Replied;
        }
        match Request::parse_line(&self.input[line]) {
            Ok(request) => self.dispatch_and_queue_reply(&request, served),
            Err(InvalidRequest { id, refusal }) => {
                self.queue_line(&response_line(&id, &Err(refusal)));
                LineResult::Replied
            }
        }
    }

    /// Whether [`process_line`](Self::process_line) would make progress.
    pub fn can_process_line(&self) -> bool {
        let is_there = match &self.waited_for {
            Some(waited_for) => waited_for.pending.is_available(),
            None => self.input[self.searched..].contains(&b'\n'),
        };
        !self.has_stopped_processing() && !self.is_output_full() && is_there
    }

    /// Queues an event if the client has subscribed. Closes the connection if the client does not
    /// read.
    pub fn queue_event(&mut self, line: &[u8]) {
        if !self.follows || self.ending.is_some() {
            return;
        }
        if self.unsent_bytes().len() + line.len() > self.limits.unsent_max {
            self.ending = Some(CloseReason::SlowReader);
        } else {
            self.queue_line(line);
        }
    }

    /// Rejects the client with an error and closes the connection.
    pub fn reject_client(&mut self, refusal: RpcError) {
        self.queue_line(&response_line(&RequestId::None, &Err(refusal)));
        self.unfinished = None;
        self.ending = Some(CloseReason::Rejected);
    }

    /// Bytes to send.
    pub fn unsent_bytes(&self) -> &[u8] {
        &self.output[self.sent..]
    }

    /// Records that `count` bytes were sent.
    pub fn record_sent(&mut self, now: Instant, count: usize) {
        self.sent += count;
        if count > 0 {
            self.last_progress = now;
        }
        if self.sent == self.output.len() {
            self.sent = 0;
            self.output.clear();
            // Memory for a single large response is not kept.
            self.output.shrink_to(self.limits.line_len_max);
        }
    }

    /// Time at which [`close_if_timed_out`](Self::close_if_timed_out) must be called.
    pub fn deadline(&self) -> Instant {
        let line = self.unfinished.map(|since| since.after(self.limits.line_timeout));
        let rest = if !self.unsent_bytes().is_empty() {
            Some(self.last_progress.after(self.limits.send_timeout))
        } else {
            let is_silent = !self.follows && self.waited_for.is_none();
            is_silent.then(|| self.last_progress.after(self.limits.idle_timeout))
        };
        line.into_iter().chain(rest).min().unwrap_or(Instant::NEVER)
    }

    /// Closes the connection if a time limit was exceeded.
    pub fn close_if_timed_out(&mut self, now: Instant) {
        if now < self.deadline() {
            return;
        }
        if !self.unsent_bytes().is_empty()
            && self.last_progress.after(self.limits.send_timeout) <= now
        {
            self.ending = Some(CloseReason::SlowReader);
        } else if self.ending.is_none() {
            let SessionLimits { line_timeout, idle_timeout, .. } = self.limits;
            let message = match self.unfinished {
                Some(_) => {
                    format!("request: not ended after {line_timeout}, expected a whole line")
                }
                None => format!("connection: silent for {idle_timeout}, expected a request"),
            };
            self.reject_client(RpcError::usage(ErrorCode::Timeout, message));
            self.last_progress = now;
        }
    }

    /// Why the connection has ended, once everything that remains has been sent.
    pub fn close_reason(&self) -> Option<CloseReason> {
        let unanswered = self.waited_for.is_some() || self.input[self.begin..].contains(&b'\n');
        match self.ending? {
            CloseReason::SlowReader => Some(CloseReason::SlowReader),
            CloseReason::Rejected => {
                self.unsent_bytes().is_empty().then_some(CloseReason::Rejected)
            }
            CloseReason::ClientClosed => {
                (self.unsent_bytes().is_empty() && !unanswered).then_some(CloseReason::ClientClosed)
            }
        }
    }

    fn dispatch_and_queue_reply(
        &mut self,
        request: &Request,
        served: ServerContext<'_>,
    ) -> LineResult {
        let ServerContext { table, state } = served;
        let (verb, result) = match request.dispatch(table, state, &self.passed) {
            Ok((method, DispatchResult::Now(answer))) => (Some(method.verb), Ok(answer)),
            Ok((method, DispatchResult::Later(pending))) => {
                let changed =
                    method.verb.is_change().then(|| self.method_called_event(request));
                let id = request.id.clone();
                self.waited_for = Some(AwaitedReply { id, method, pending, changed });
                return self.queue_deferred_response();
            }
            Err(refusal) => (None, Err(refusal)),
        };
        self.queue_line(&response_line(&request.id, &result));
        match verb {
            Some(verb) if verb.is_change() => {
                LineResult::Changed(self.method_called_event(request))
            }
            Some(MethodKind::Subscribe) => {
                self.follows = true;
                LineResult::Replied
            }
            _ => LineResult::Replied,
        }
    }

    /// Sends the deferred response, if it is available.
    fn queue_deferred_response(&mut self) -> LineResult {
        let Some(waited_for) = self.waited_for.take() else { return LineResult::Nothing };
        let Some(result) = waited_for.pending.take_result() else {
            self.waited_for = Some(waited_for);
            return LineResult::Nothing;
        };
        let AwaitedReply { id, method, changed, .. } = waited_for;
        if let Ok(answer) = &result {
            debug_assert_eq!(
                method.answer.check_value(answer),
                Ok(()),
                "{}",
                method.command_line_name()
            );
        }
        self.queue_line(&response_line(&id, &result));
        changed.filter(|_| result.is_ok()).map_or(LineResult::Replied, LineResult::Changed)
    }

    fn method_called_event(&self, request: &Request) -> Event {
        let parameters = Value::from(request.parameters.clone());
        let (client, method) = (&self.client, &request.method);
        Event {
            kind: SET,
            text: format!("{client} called {method} with {parameters}"),
            about: json!({ "client": client, "method": method, "parameters": parameters }),
        }
    }

    fn reject_long_line(&mut self) {
        let most = self.limits.line_len_max;
        self.reject_client(RpcError::usage(
            ErrorCode::LineTooLong,
            format!("request: no end of a line in {most} bytes, expected a shorter line"),
        ));
    }

    /// Whether no more lines are ever processed.
    fn has_stopped_processing(&self) -> bool {
        matches!(self.ending, Some(CloseReason::Rejected | CloseReason::SlowReader))
    }

    /// Whether processing waits for the client to read.
    fn is_output_full(&self) -> bool {
        self.unsent_bytes().len() >= self.limits.unsent_soft_max
    }

    fn queue_line(&mut self, line: &[u8]) {
        self.output.drain(..self.sent);
        self.sent = 0;
        self.output.extend_from_slice(line);
    }
}

#[cfg(test)]
mod tests;
