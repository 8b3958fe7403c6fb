//! Client side of the control socket. Every wait has a timeout.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;

use serde_json::{Map, Value};
use tenmil_base::{Instant, Span};
use tenmil_linux::Clock;
use tenmil_linux::local_socket::{Connection, RecvResult};

use crate::error::{Code, RpcError};
use crate::reply::{Reply, ReplyParser};
use crate::request::{Id, Request};

/// Connection to a running process.
#[derive(Debug)]
pub struct Client {
    connection: Connection,
    replies: ReplyParser,
    /// Events received while waiting for a response.
    events: VecDeque<Value>,
    clock: Clock,
    last_id: u64,
}

impl Client {
    /// Connects to the process that listens at `path`.
    pub fn connect(path: &Path, time_limit: Span) -> Result<Self, RpcError> {
        let connection = Connection::connect(path, time_limit).map_err(|error| {
            let shown = path.display();
            match error.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => RpcError::caller(
                    Code::NoProcess,
                    format!("connect {shown}: no process listens there"),
                ),
                io::ErrorKind::WouldBlock => RpcError::peer(
                    Code::Timeout,
                    format!("connect {shown}: not accepted within {time_limit}"),
                ),
                _ => RpcError::machine(Code::Failed, format!("connect {shown}: {error}")),
            }
        })?;
        Ok(Self {
            connection,
            replies: ReplyParser::new(),
            events: VecDeque::new(),
            clock: crate::event::clock(),
            last_id: 0,
        })
    }

    /// Calls a method and waits for its response, at most for `time_limit`. Events that arrive
    /// meanwhile are queued.
    pub fn call(
        &mut self,
        method: &str,
        parameters: Map<String, Value>,
        time_limit: Span,
    ) -> Result<Value, RpcError> {
        self.call_with(method, parameters, &[], time_limit)
    }

    /// Calls a method with file descriptors attached.
    pub fn call_with(
        &mut self,
        method: &str,
        parameters: Map<String, Value>,
        files: &[BorrowedFd<'_>],
        time_limit: Span,
    ) -> Result<Value, RpcError> {
        let end = self.clock.now().after(time_limit);
        self.last_id += 1;
        let id = Id::Number(self.last_id);
        let request = Request { id, method: method.to_owned(), parameters };
        self.send(&request.to_line(), files, end)?;
        loop {
            match self.next(end)? {
                Some(Reply::Event(event)) => self.events.push_back(event),
                // An error without an id concerns the connection, and so this request too.
                Some(Reply::Response { id, result }) if id.is_none_or(|id| id == self.last_id) => {
                    return result;
                }
                // Response to a call that timed out.
                Some(Reply::Response { .. }) => {}
                None => {
                    let message = format!("{method}: no response within {time_limit}");
                    return Err(RpcError::peer(Code::Timeout, message));
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
            match self.next(end)? {
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
                Err(error) => return Err(self.last_word().unwrap_or_else(|| gone(&error))),
            };
            rest = &rest[sent..];
            files = if sent > 0 { &[] } else { files };
            if sent == 0 && !self.wait(Connection::wait_to_send, end)? {
                return Err(RpcError::peer(Code::Timeout, "send: it takes nothing any more"));
            }
        }
        Ok(())
    }

    /// Error that the server sent before it closed the connection, if any.
    fn last_word(&mut self) -> Option<RpcError> {
        loop {
            match self.next(self.clock.now()).ok()?? {
                Reply::Response { id: None, result } => return result.err(),
                Reply::Response { .. } | Reply::Event(_) => {}
            }
        }
    }

    /// Next response or event, or `None` at the deadline.
    fn next(&mut self, end: Instant) -> Result<Option<Reply>, RpcError> {
        let mut bytes = [0; 16 << 10];
        loop {
            if let Some(reply) = self.replies.next_reply() {
                return Ok(Some(reply));
            }
            match self.connection.receive(&mut bytes).map_err(|error| gone(&error))? {
                RecvResult::Bytes(count) => self.replies.receive(&bytes[..count])?,
                RecvResult::Eof => return Err(gone(&io::ErrorKind::UnexpectedEof.into())),
                RecvResult::WouldBlock if !self.wait(Connection::wait_to_receive, end)? => {
                    return Ok(None);
                }
                RecvResult::WouldBlock => {}
            }
        }
    }

    /// Waits for the socket. Returns whether to try again before `end`.
    fn wait(
        &self,
        wait: fn(&Connection, Span) -> io::Result<bool>,
        end: Instant,
    ) -> Result<bool, RpcError> {
        let left = end.since(self.clock.now());
        let ready = wait(&self.connection, left).map_err(|error| gone(&error))?;
        Ok(ready || self.clock.now() < end)
    }
}

fn gone(error: &io::Error) -> RpcError {
    match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe => {
            RpcError::peer(Code::ConnectionClosed, "the process closed the connection")
        }
        _ => RpcError::peer(Code::ConnectionClosed, format!("the connection broke: {error}")),
    }
}
