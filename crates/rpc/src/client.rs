//! Client side of the control socket. Every wait has a timeout.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;

use serde_json::{Map, Value};
use tenmil_base::{Instant, Span};
use tenmil_linux::Clock;
use tenmil_linux::local_socket::{LocalConnection, RecvResult};

use crate::error::{ErrorCode, RpcError};
use crate::reply_parser::{Reply, ReplyParser};
use crate::request::{Request, RequestId};

/// Connection to a running process.
#[derive(Debug)]
pub struct RpcClient {
    connection: LocalConnection,
    replies: ReplyParser,
    /// Events received while waiting for a response.
    events: VecDeque<Value>,
    clock: Clock,
    last_id: u64,
}

impl RpcClient {
    /// Connects to the process that listens at `path`.
    pub fn connect(path: &Path, time_limit: Span) -> Result<Self, RpcError> {
        let connection = LocalConnection::connect(path, time_limit).map_err(|error| {
            let shown = path.display();
            match error.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => RpcError::usage(
                    ErrorCode::NoProcess,
                    format!("connect {shown}: no process listens there"),
                ),
                io::ErrorKind::WouldBlock => RpcError::remote(
                    ErrorCode::Timeout,
                    format!("connect {shown}: not accepted within {time_limit}"),
                ),
                _ => RpcError::environment(ErrorCode::Failed, format!("connect {shown}: {error}")),
            }
        })?;
        Ok(Self {
            connection,
            replies: ReplyParser::new(),
            events: VecDeque::new(),
            clock: crate::event::event_clock(),
            last_id: 0,
        })
    }

    /// Calls a method and waits for its response, at most for `time_limit`. Events that arrive
    /// meanwhile are queued.
    pub fn call_method(
        &mut self,
        method: &str,
        parameters: Map<String, Value>,
        time_limit: Span,
    ) -> Result<Value, RpcError> {
        self.call_with_files(method, parameters, &[], time_limit)
    }

    /// Calls a method with file descriptors attached.
    pub fn call_with_files(
        &mut self,
        method: &str,
        parameters: Map<String, Value>,
        files: &[BorrowedFd<'_>],
        time_limit: Span,
    ) -> Result<Value, RpcError> {
        let end = self.clock.now().after(time_limit);
        self.last_id += 1;
        let id = RequestId::Number(self.last_id);
        let request = Request { id, method: method.to_owned(), parameters };
        self.send(&request.to_line(), files, end)?;
        loop {
            match self.next_reply(end)? {
                Some(Reply::Event(event)) => self.events.push_back(event),
                // An error without an id concerns the connection, and so this request too.
                Some(Reply::Response { id, result }) if id.is_none_or(|id| id == self.last_id) => {
                    return result;
                }
                // Response to a call that timed out.
                Some(Reply::Response { .. }) => {}
                None => {
                    let message = format!("{method}: no response within {time_limit}");
                    return Err(RpcError::remote(ErrorCode::Timeout, message));
                }
            }
        }
    }

    /// Returns the next event that arrives within `time_limit`. Requires a call of `events` first.
    pub fn next_event(&mut self, time_limit: Span) -> Result<Option<Value>, RpcError> {
        if let Some(event) = self.events.pop_front() {
            return Ok(Some(event));
        }
        let end = self.clock.now().after(time_limit);
        loop {
            match self.next_reply(end)? {
                Some(Reply::Event(event)) => return Ok(Some(event)),
                Some(Reply::Response { id: None, result }) => {
                    result?;
                }
                Some(Reply::Response { .. }) => {}
                None => return Ok(None),
            }
        }
    }

    fn send(
        &mut self,
        line: &[u8],
        mut files: &[BorrowedFd<'_>],
        end: Instant,
    ) -> Result<(), RpcError> {
        let mut rest = line;
        while !rest.is_empty() {
            let sent = match self.connection.send_files(rest, files) {
                Ok(sent) => sent,
                Err(error) => {
                    return Err(self
                        .final_error()
                        .unwrap_or_else(|| connection_closed_error(&error)));
                }
            };
            rest = &rest[sent..];
            files = if sent > 0 { &[] } else { files };
            if sent == 0 && !self.wait_until_ready(LocalConnection::wait_to_send, end)? {
                return Err(RpcError::remote(
                    ErrorCode::Timeout,
                    "send: it takes nothing any more",
                ));
            }
        }
        Ok(())
    }

    /// Error that the server sent before it closed the connection, if any.
    fn final_error(&mut self) -> Option<RpcError> {
        loop {
            match self.next_reply(self.clock.now()).ok()?? {
                Reply::Response { id: None, result } => return result.err(),
                Reply::Response { .. } | Reply::Event(_) => {}
            }
        }
    }

    /// Next response or event, or `None` at the deadline.
    fn next_reply(&mut self, end: Instant) -> Result<Option<Reply>, RpcError> {
        let mut bytes = [0; 16 << 10];
        loop {
            if let Some(reply) = self.replies.next_reply() {
                return Ok(Some(reply));
            }
            match self
                .connection
                .receive(&mut bytes)
                .map_err(|error| connection_closed_error(&error))?
            {
                RecvResult::Bytes(count) => self.replies.receive(&bytes[..count])?,
                RecvResult::Eof => {
                    return Err(connection_closed_error(&io::ErrorKind::UnexpectedEof.into()));
                }
                RecvResult::WouldBlock
                    if !self.wait_until_ready(LocalConnection::wait_to_receive, end)? =>
                {
                    return Ok(None);
                }
                RecvResult::WouldBlock => {}
            }
        }
    }

    /// Waits for the socket. Returns whether to try again before `end`.
    fn wait_until_ready(
        &self,
        wait: fn(&LocalConnection, Span) -> io::Result<bool>,
        end: Instant,
    ) -> Result<bool, RpcError> {
        let left = end.since(self.clock.now());
        let ready =
            wait(&self.connection, left).map_err(|error| connection_closed_error(&error))?;
        Ok(ready || self.clock.now() < end)
    }
}

fn connection_closed_error(error: &io::Error) -> RpcError {
    match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe => {
            RpcError::remote(ErrorCode::ConnectionClosed, "the process closed the connection")
        }
        _ => {
            RpcError::remote(ErrorCode::ConnectionClosed, format!("the connection broke: {error}"))
        }
    }
}
