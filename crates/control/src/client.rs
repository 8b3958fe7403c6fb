//! The asking half on a socket. Every wait has a limit.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;

use base::{Instant, Span};
use host::Clock;
use host::local_socket::{Connection, Received};
use serde_json::{Map, Value};

use crate::refusal::{Code, Refusal};
use crate::reply::{Replies, Reply};
use crate::request::{Id, Request};

/// A connection to a running process.
#[derive(Debug)]
pub struct Client {
    connection: Connection,
    replies: Replies,
    /// Events that came while an answer was waited for.
    events: VecDeque<Value>,
    clock: Clock,
    last_id: u64,
}

impl Client {
    /// Connects to the process that listens at `path`.
    pub fn connect(path: &Path, patience: Span) -> Result<Self, Refusal> {
        let connection = Connection::connect(path, patience).map_err(|error| {
            let shown = path.display();
            match error.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => Refusal::caller(
                    Code::NoProcess,
                    format!("connect {shown}: no process listens there"),
                ),
                io::ErrorKind::WouldBlock => Refusal::peer(
                    Code::TooSlow,
                    format!("connect {shown}: not accepted within {patience}"),
                ),
                _ => Refusal::machine(Code::NotDone, format!("connect {shown}: {error}")),
            }
        })?;
        Ok(Self {
            connection,
            replies: Replies::new(),
            events: VecDeque::new(),
            clock: crate::event::clock(),
            last_id: 0,
        })
    }

    /// Calls a method by its name in a request and waits for its answer, but not longer than
    /// `patience`. Events that come meanwhile are kept.
    pub fn call(
        &mut self,
        method: &str,
        parameters: Map<String, Value>,
        patience: Span,
    ) -> Result<Value, Refusal> {
        self.call_with(method, parameters, &[], patience)
    }

    /// The same, with a descriptor beside it, or none.
    pub fn call_with(
        &mut self,
        method: &str,
        parameters: Map<String, Value>,
        files: &[BorrowedFd<'_>],
        patience: Span,
    ) -> Result<Value, Refusal> {
        let end = self.clock.now().after(patience);
        self.last_id += 1;
        let id = Id::Number(self.last_id);
        let request = Request { id, method: method.to_owned(), parameters };
        self.send(&request.to_line(), files, end)?;
        loop {
            match self.next(end)? {
                Some(Reply::Event(event)) => self.events.push_back(event),
                // One without an id is about the connection, and so about this too.
                Some(Reply::Answer { id, result }) if id.is_none_or(|id| id == self.last_id) => {
                    return result;
                }
                // The answer to a call that was given up.
                Some(Reply::Answer { .. }) => {}
                None => {
                    let message = format!("{method}: no answer within {patience}");
                    return Err(Refusal::peer(Code::TooSlow, message));
                }
            }
        }
    }

    /// The next event, if one comes within `patience`. For events to come, `events` is called
    /// first.
    pub fn next_event(&mut self, patience: Span) -> Result<Option<Value>, Refusal> {
        if let Some(event) = self.events.pop_front() {
            return Ok(Some(event));
        }
        let end = self.clock.now().after(patience);
        loop {
            match self.next(end)? {
                Some(Reply::Event(event)) => return Ok(Some(event)),
                Some(Reply::Answer { id: None, result }) => {
                    result?;
                }
                Some(Reply::Answer { .. }) => {}
                None => return Ok(None),
            }
        }
    }

    fn send(
        &mut self,
        line: &[u8],
        mut files: &[BorrowedFd<'_>],
        end: Instant,
    ) -> Result<(), Refusal> {
        let mut rest = line;
        while !rest.is_empty() {
            let sent = match self.connection.send_files(rest, files) {
                Ok(sent) => sent,
                Err(error) => return Err(self.last_word().unwrap_or_else(|| gone(&error))),
            };
            rest = &rest[sent..];
            files = if sent > 0 { &[] } else { files };
            if sent == 0 && !self.wait(Connection::wait_to_send, end)? {
                return Err(Refusal::peer(Code::TooSlow, "send: it takes nothing any more"));
            }
        }
        Ok(())
    }

    /// What the other side said before it closed, if that was why.
    fn last_word(&mut self) -> Option<Refusal> {
        loop {
            match self.next(self.clock.now()).ok()?? {
                Reply::Answer { id: None, result } => return result.err(),
                Reply::Answer { .. } | Reply::Event(_) => {}
            }
        }
    }

    /// The next reply, or `None` when the time has come.
    fn next(&mut self, end: Instant) -> Result<Option<Reply>, Refusal> {
        let mut bytes = [0; 16 << 10];
        loop {
            if let Some(reply) = self.replies.next_reply() {
                return Ok(Some(reply));
            }
            match self.connection.receive(&mut bytes).map_err(|error| gone(&error))? {
                Received::Bytes(count) => self.replies.receive(&bytes[..count])?,
                Received::End => return Err(gone(&io::ErrorKind::UnexpectedEof.into())),
                Received::Nothing if !self.wait(Connection::wait_to_receive, end)? => {
                    return Ok(None);
                }
                Received::Nothing => {}
            }
        }
    }

    /// Waits, and says whether it is worth looking again before `end`.
    fn wait(
        &self,
        wait: fn(&Connection, Span) -> io::Result<bool>,
        end: Instant,
    ) -> Result<bool, Refusal> {
        let left = end.since(self.clock.now());
        let ready = wait(&self.connection, left).map_err(|error| gone(&error))?;
        Ok(ready || self.clock.now() < end)
    }
}

fn gone(error: &io::Error) -> Refusal {
    match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe => {
            Refusal::peer(Code::Gone, "the process closed the connection")
        }
        _ => Refusal::peer(Code::Gone, format!("the connection broke: {error}")),
    }
}
