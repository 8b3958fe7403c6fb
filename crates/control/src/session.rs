//! The serving half of one connection: bytes in, bytes out, and time as an argument.
//!
//! Everything it holds has a limit. Where a client sends more than is answered, it takes no more
//! ([`Session::room`]); where it reads less than is answered, it answers no more; and where neither
//! helps, because events keep coming or nothing moves any more, the connection ends.

use std::os::fd::OwnedFd;

use base::{Instant, Span};
use serde_json::{Value, json};

use crate::event::{Event, SET};
use crate::later::Pending;
use crate::method::{Method, Table, Verb};
use crate::passed::Passed;
use crate::refusal::{Code, Refusal};
use crate::request::{Answered, Id, Request, Unread, answer_line};
use crate::state::State;

/// The serving half of one connection.
#[derive(Debug)]
pub struct Session {
    limits: Limits,
    /// Who is at the other end, for events.
    client: String,
    input: Vec<u8>,
    /// What lies before this in `input` has been answered.
    begin: usize,
    /// Between `begin` and this there is no end of a line.
    searched: usize,
    output: Vec<u8>,
    sent: usize,
    follows: bool,
    /// Since when the last line of the input has been without an end.
    unfinished: Option<Instant>,
    /// When something last moved, in either direction.
    moved: Instant,
    /// What came beside a line.
    passed: Passed,
    /// What is being done for the last line that was read. Until it is, no other line is.
    waited_for: Option<WaitedFor>,
    ending: Option<Ending>,
}

/// A request whose answer comes later.
#[derive(Debug)]
struct WaitedFor {
    id: Id,
    method: &'static Method,
    pending: Pending,
    /// What is announced when it has changed something.
    changed: Option<Event>,
}

/// What a connection may cost.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// The longest line, with its end.
    pub line_len_max: usize,
    /// With so many bytes unsent, no more requests are answered.
    pub unsent_soft_max: usize,
    /// With so many bytes unsent, an event cuts the connection off.
    pub unsent_max: usize,
    /// How long a line may take from its first byte to its end.
    pub line_patience: Span,
    /// How long bytes may lie unsent without any being taken.
    pub send_patience: Span,
    /// How long a connection may be silent that follows no events.
    pub idle_patience: Span,
}

/// Why a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The client wants no more, and has everything it asked for when the output is empty.
    Wanted,
    /// The client was told why, and has read it when the output is empty.
    Told,
    /// The client does not read: nothing more is sent.
    CutOff,
}

/// What methods are answered from.
#[derive(Clone, Copy, Debug)]
pub struct Served<'a> {
    /// The methods.
    pub table: &'a Table,
    /// What they answer from.
    pub state: &'a State,
}

/// What [`Session::step`] did.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Nothing: there is no whole line, or no room for its answer.
    Nothing,
    /// It answered a line.
    Answered,
    /// It answered a line that changed something, which is to be announced.
    Changed(Event),
}

impl Limits {
    /// What a server allows.
    pub const USUAL: Self = Self {
        line_len_max: 64 << 10,
        unsent_soft_max: 256 << 10,
        unsent_max: 1 << 20,
        line_patience: Span::from_secs(10),
        send_patience: Span::from_secs(10),
        idle_patience: Span::from_secs(600),
    };
}

impl Session {
    /// A connection of `client`, who is named in events.
    pub fn new(now: Instant, client: impl Into<String>, limits: Limits) -> Self {
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
            moved: now,
            passed: Passed::default(),
            waited_for: None,
            ending: None,
        }
    }

    /// How many bytes it would take now.
    pub fn room(&self) -> usize {
        let held = self.input.len() - self.begin;
        if self.waits() || self.ending.is_some() { 0 } else { self.limits.line_len_max - held }
    }

    /// Takes what the client sent: no more than there is room for. The rest is not looked at, and
    /// how much was taken is returned.
    pub fn receive(&mut self, now: Instant, bytes: &[u8]) -> usize {
        let taken = &bytes[..bytes.len().min(self.room())];
        self.input.drain(..self.begin);
        self.searched -= self.begin;
        self.begin = 0;
        self.input.extend_from_slice(taken);
        if !taken.is_empty() {
            self.moved = now;
        }
        self.unfinished = match taken.iter().rposition(|byte| *byte == b'\n') {
            Some(end) if end + 1 == taken.len() => None,
            Some(_) => Some(now),
            None if taken.is_empty() => self.unfinished,
            None => self.unfinished.or(Some(now)),
        };
        taken.len()
    }

    /// Takes a descriptor that the client has sent, in place of one that nobody has taken.
    pub fn pass(&mut self, file: OwnedFd) {
        self.passed.put(file);
    }

    /// The client will send no more. What it has sent is answered, and the last line counts even
    /// without an end.
    pub fn receive_end(&mut self) {
        if self.input.len() > self.begin && self.input.last() != Some(&b'\n') {
            self.input.push(b'\n');
        }
        self.unfinished = None;
        self.ending.get_or_insert(Ending::Wanted);
    }

    /// Answers one line, if there is a whole one and room for its answer.
    pub fn step(&mut self, served: Served<'_>) -> Step {
        if self.stops() || self.waits() {
            return Step::Nothing;
        }
        if self.waited_for.is_some() {
            return self.look_for_answer();
        }
        let Some(length) = self.input[self.searched..].iter().position(|byte| *byte == b'\n')
        else {
            self.searched = self.input.len();
            if self.input.len() - self.begin >= self.limits.line_len_max {
                self.refuse_length();
            }
            return Step::Nothing;
        };
        let end = self.searched + length;
        let line = self.begin..end;
        (self.begin, self.searched) = (end + 1, end + 1);
        if self.input[line.clone()].iter().all(u8::is_ascii_whitespace) {
            return Step::Answered;
        }
        match Request::read(&self.input[line]) {
            Ok(request) => self.answer(&request, served),
            Err(Unread { id, refusal }) => {
                self.put(&answer_line(&id, &Err(refusal)));
                Step::Answered
            }
        }
    }

    /// Whether [`step`](Self::step) would do something.
    pub fn can_step(&self) -> bool {
        let is_there = match &self.waited_for {
            Some(waited_for) => waited_for.pending.is_there(),
            None => self.input[self.searched..].contains(&b'\n'),
        };
        !self.stops() && !self.waits() && is_there
    }

    /// Tells an event, if the client follows them. Cuts the client off if it does not read them.
    pub fn tell(&mut self, line: &[u8]) {
        if !self.follows || self.ending.is_some() {
            return;
        }
        if self.to_send().len() + line.len() > self.limits.unsent_max {
            self.ending = Some(Ending::CutOff);
        } else {
            self.put(line);
        }
    }

    /// Refuses the client with the reason, and ends.
    pub fn refuse(&mut self, refusal: Refusal) {
        self.put(&answer_line(&Id::None, &Err(refusal)));
        self.unfinished = None;
        self.ending = Some(Ending::Told);
    }

    /// What is to be sent.
    pub fn to_send(&self) -> &[u8] {
        &self.output[self.sent..]
    }

    /// So many bytes of it were sent.
    pub fn sent(&mut self, now: Instant, count: usize) {
        self.sent += count;
        if count > 0 {
            self.moved = now;
        }
        if self.sent == self.output.len() {
            self.sent = 0;
            self.output.clear();
            // What one large answer needed is not kept for ever.
            self.output.shrink_to(self.limits.line_len_max);
        }
    }

    /// When [`expire`](Self::expire) wants to be called.
    pub fn deadline(&self) -> Instant {
        let line = self.unfinished.map(|since| since.after(self.limits.line_patience));
        let rest = if !self.to_send().is_empty() {
            Some(self.moved.after(self.limits.send_patience))
        } else {
            let is_silent = !self.follows && self.waited_for.is_none();
            is_silent.then(|| self.moved.after(self.limits.idle_patience))
        };
        line.into_iter().chain(rest).min().unwrap_or(Instant::NEVER)
    }

    /// Ends the connection if its time has come.
    pub fn expire(&mut self, now: Instant) {
        if now < self.deadline() {
            return;
        }
        if !self.to_send().is_empty() && self.moved.after(self.limits.send_patience) <= now {
            self.ending = Some(Ending::CutOff);
        } else if self.ending.is_none() {
            let Limits { line_patience, idle_patience, .. } = self.limits;
            let message = match self.unfinished {
                Some(_) => {
                    format!("request: not ended after {line_patience}, expected a whole line")
                }
                None => format!("connection: silent for {idle_patience}, expected a request"),
            };
            self.refuse(Refusal::caller(Code::TooSlow, message));
            self.moved = now;
        }
    }

    /// Why the connection is over, once everything that is still to be sent has been.
    pub fn is_over(&self) -> Option<Ending> {
        let unanswered = self.waited_for.is_some() || self.input[self.begin..].contains(&b'\n');
        match self.ending? {
            Ending::CutOff => Some(Ending::CutOff),
            Ending::Told => self.to_send().is_empty().then_some(Ending::Told),
            Ending::Wanted => (self.to_send().is_empty() && !unanswered).then_some(Ending::Wanted),
        }
    }

    fn answer(&mut self, request: &Request, served: Served<'_>) -> Step {
        let Served { table, state } = served;
        let (verb, result) = match request.answer(table, state, &self.passed) {
            Ok((method, Answered::Now(answer))) => (Some(method.verb), Ok(answer)),
            Ok((method, Answered::Later(pending))) => {
                let changed = (method.verb == Verb::Set).then(|| self.changed(request));
                let id = request.id.clone();
                self.waited_for = Some(WaitedFor { id, method, pending, changed });
                return self.look_for_answer();
            }
            Err(refusal) => (None, Err(refusal)),
        };
        self.put(&answer_line(&request.id, &result));
        match verb {
            Some(Verb::Set) => Step::Changed(self.changed(request)),
            Some(Verb::Follow) => {
                self.follows = true;
                Step::Answered
            }
            _ => Step::Answered,
        }
    }

    /// Answers what was asked last, if that is done by now.
    fn look_for_answer(&mut self) -> Step {
        let Some(waited_for) = self.waited_for.take() else { return Step::Nothing };
        let Some(result) = waited_for.pending.take() else {
            self.waited_for = Some(waited_for);
            return Step::Nothing;
        };
        let WaitedFor { id, method, changed, .. } = waited_for;
        if let Ok(answer) = &result {
            debug_assert_eq!(method.answer.check(answer), Ok(()), "{}", method.typed_name());
        }
        self.put(&answer_line(&id, &result));
        changed.filter(|_| result.is_ok()).map_or(Step::Answered, Step::Changed)
    }

    fn changed(&self, request: &Request) -> Event {
        let parameters = Value::from(request.parameters.clone());
        let (client, method) = (&self.client, &request.method);
        Event {
            kind: SET,
            text: format!("{client} called {method} with {parameters}"),
            about: json!({ "client": client, "method": method, "parameters": parameters }),
        }
    }

    fn refuse_length(&mut self) {
        let most = self.limits.line_len_max;
        self.refuse(Refusal::caller(
            Code::LineTooLong,
            format!("request: no end of a line in {most} bytes, expected a shorter line"),
        ));
    }

    /// Whether no more lines are answered, ever.
    fn stops(&self) -> bool {
        matches!(self.ending, Some(Ending::Told | Ending::CutOff))
    }

    /// Whether no more lines are answered until the client has read some answers.
    fn waits(&self) -> bool {
        self.to_send().len() >= self.limits.unsent_soft_max
    }

    fn put(&mut self, line: &[u8]) {
        self.output.drain(..self.sent);
        self.sent = 0;
        self.output.extend_from_slice(line);
    }
}

#[cfg(test)]
mod tests;
