//! Client side of the control API, over a Unix socket or TCP. Every wait has a timeout.
//!
//! Requests are sent one after the other on one connection, which is opened again if the process has
//! closed it meanwhile. Events have a connection of their own.

mod connection;
mod endpoint;

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::LazyLock;

use serde_json::{Map, Value, json};
use tenmil_base::{Instant, Span};
use tenmil_linux::Clock;
use tenmil_linux::local_socket::RecvResult;

use self::connection::ClientConnection;
pub use self::endpoint::{ControlEndpoint, HttpCredentials};
use crate::error::{ErrorCode, RpcError, quote_untrusted};
use crate::http_response::{EventStreamParser, ResponseHead, ResponseParser};
use crate::method::{MethodKind, MethodRegistry};
use crate::methods::TABLE;
use crate::route::{EncodedRequest, RouteTable};
use crate::strict_json;

/// Connection to a running process.
#[derive(Debug)]
pub struct RpcClient {
    endpoint: ControlEndpoint,
    routes: Routes,
    /// Connection without a request in progress.
    connection: Option<ClientConnection>,
    events: Option<Box<EventConnection>>,
    clock: Clock,
}

/// Routes of the methods that a client may call.
#[derive(Debug)]
enum Routes {
    /// Of all methods of the program.
    Program,
    /// Of another table.
    Own(Box<RouteTable>),
}

/// Connection that receives events.
#[derive(Debug)]
struct EventConnection {
    connection: ClientConnection,
    response: ResponseParser,
    stream: EventStreamParser,
    events: VecDeque<Value>,
}

static PROGRAM_ROUTES: LazyLock<RouteTable> = LazyLock::new(|| RouteTable::new(&TABLE));

impl RpcClient {
    /// Connects to the process that listens at `path`.
    pub fn connect(path: &Path, time_limit: Span) -> Result<Self, RpcError> {
        Self::connect_to(&ControlEndpoint::Socket(path.to_owned()), time_limit)
    }

    /// Connects to the process at `endpoint`.
    pub fn connect_to(endpoint: &ControlEndpoint, time_limit: Span) -> Result<Self, RpcError> {
        let clock = crate::event::event_clock();
        let connection = ClientConnection::connect(endpoint, clock, clock.now().after(time_limit))?;
        Ok(Self {
            endpoint: endpoint.clone(),
            routes: Routes::Program,
            connection: Some(connection),
            events: None,
            clock,
        })
    }

    /// Calls methods of another table than the program's.
    #[must_use]
    pub fn with_table(mut self, table: &'static MethodRegistry) -> Self {
        self.routes = Routes::Own(Box::new(RouteTable::new(table)));
        self
    }

    /// Calls a method, by its name in [`MethodRegistry::find`], and waits for its response, at most for
    /// `time_limit`.
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
        let routes = self.routes();
        let found = routes.table().find(method)?;
        let request = routes.encode(found, parameters)?;
        let late = || {
            let message = format!("{method}: no response within {time_limit}");
            RpcError::remote(ErrorCode::Timeout, message)
        };
        if found.verb == MethodKind::Subscribe {
            return self.subscribe(&request, end, late);
        }
        let bytes = request_bytes(&request, &self.endpoint);
        let (mut connection, is_idle) = self.idle_connection(end)?;
        let mut answered = self.exchange(&mut connection, &bytes, files, end);
        // The process may close an idle connection while a request is on its way. Reads are repeated.
        if found.verb == MethodKind::Get
            && is_idle
            && matches!(&answered, Err(error) if error.code == ErrorCode::ConnectionClosed)
        {
            connection = self.reconnect(end)?;
            answered = self.exchange(&mut connection, &bytes, files, end);
        }
        let Some(mut response) = answered.map_err(|error| self.endpoint.explain(error))? else {
            return Err(late());
        };
        let Some(ResponseHead { status, closes }) = response.head().cloned() else {
            return Err(late());
        };
        if !closes {
            self.connection = Some(connection);
        }
        parse_result(status, &response.take_body())
    }

    /// Returns the next event that arrives within `time_limit`. Requires a call of `events` first.
    pub fn next_event(&mut self, time_limit: Span) -> Result<Option<Value>, RpcError> {
        let Some(subscribed) = &mut self.events else { return Ok(None) };
        let end = self.clock.now().after(time_limit);
        loop {
            if let Some(event) = subscribed.events.pop_front() {
                return Ok(Some(event));
            }
            let body = subscribed.response.take_body();
            subscribed.stream.receive(&body, &mut subscribed.events)?;
            if !subscribed.events.is_empty() {
                continue;
            }
            if subscribed.response.is_complete() {
                return Err(connection_closed_error(&io::ErrorKind::UnexpectedEof.into()));
            }
            let EventConnection { connection, response, .. } = &mut **subscribed;
            if !receive_some(connection, response, self.clock, end)? {
                return Ok(None);
            }
        }
    }

    fn routes(&self) -> &RouteTable {
        match &self.routes {
            Routes::Program => &PROGRAM_ROUTES,
            Routes::Own(routes) => routes,
        }
    }

    /// Opens the stream of events. It is open when the head of the response arrives.
    fn subscribe(
        &mut self,
        request: &EncodedRequest,
        end: Instant,
        late: impl Fn() -> RpcError,
    ) -> Result<Value, RpcError> {
        let mut connection = self.reconnect(end)?;
        let mut exchange = Exchange::new(&mut connection, self.clock, end);
        exchange.send(&request_bytes(request, &self.endpoint), &[])?;
        let has_begun = |response: &ResponseParser| match response.head() {
            Some(head) => head.status == 200 || response.is_complete(),
            None => false,
        };
        if !exchange.receive_until(has_begun)? {
            return Err(late());
        }
        let mut response = exchange.response;
        match response.head() {
            Some(head) if head.status != 200 => {
                let status = head.status;
                parse_result(status, &response.take_body())
            }
            _ => {
                let (stream, events) = (EventStreamParser::default(), VecDeque::new());
                let subscribed = EventConnection { connection, response, stream, events };
                self.events = Some(Box::new(subscribed));
                Ok(json!({}))
            }
        }
    }

    /// Sends a request and receives the whole response; `None` if it is late.
    fn exchange(
        &self,
        connection: &mut ClientConnection,
        request: &[u8],
        files: &[BorrowedFd<'_>],
        end: Instant,
    ) -> Result<Option<ResponseParser>, RpcError> {
        let mut exchange = Exchange::new(connection, self.clock, end);
        exchange.send(request, files)?;
        let is_complete = exchange.receive_until(ResponseParser::is_complete)?;
        Ok(is_complete.then_some(exchange.response))
    }

    /// The connection, and true; or a new one and false, if the process has closed it meanwhile.
    fn idle_connection(&mut self, end: Instant) -> Result<(ClientConnection, bool), RpcError> {
        if let Some(mut connection) = self.connection.take()
            && matches!(connection.receive(&mut [0]), Ok(RecvResult::WouldBlock))
        {
            return Ok((connection, true));
        }
        Ok((self.reconnect(end)?, false))
    }

    /// A further connection. If nothing listens any more, the process that did has ended.
    fn reconnect(&self, end: Instant) -> Result<ClientConnection, RpcError> {
        let connected = ClientConnection::connect(&self.endpoint, self.clock, end);
        connected.map_err(|error| match error.code {
            ErrorCode::NoProcess => connection_closed_error(&io::ErrorKind::UnexpectedEof.into()),
            _ => error,
        })
    }
}

/// Request and response on a connection.
struct Exchange<'a> {
    connection: &'a mut ClientConnection,
    response: ResponseParser,
    clock: Clock,
    end: Instant,
}

impl<'a> Exchange<'a> {
    fn new(connection: &'a mut ClientConnection, clock: Clock, end: Instant) -> Self {
        Self { connection, response: ResponseParser::default(), clock, end }
    }

    fn send(&mut self, bytes: &[u8], mut files: &[BorrowedFd<'_>]) -> Result<(), RpcError> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let sent = match self.connection.send_files(rest, files) {
                Ok(sent) => sent,
                Err(error) => return self.final_error(&error),
            };
            rest = &rest[sent..];
            files = if sent > 0 { &[] } else { files };
            if sent == 0 {
                self.wait_to_send()?;
            }
        }
        loop {
            match self.connection.flush() {
                Ok(true) => return Ok(()),
                Ok(false) => self.wait_to_send()?,
                Err(error) => return self.final_error(&error),
            }
        }
    }

    fn wait_to_send(&self) -> Result<(), RpcError> {
        let wait = ClientConnection::wait_to_send;
        if wait_until_ready(self.connection, wait, self.clock, self.end)? {
            return Ok(());
        }
        Err(RpcError::remote(ErrorCode::Timeout, "send: it takes nothing any more"))
    }

    /// Error that the server sent before it closed the connection, or else `error`.
    fn final_error(&mut self, error: &io::Error) -> Result<(), RpcError> {
        self.end = self.clock.now();
        if let Ok(true) = self.receive_until(ResponseParser::is_complete)
            && let Some(status) = self.response.head().map(|head| head.status)
        {
            parse_result(status, &self.response.take_body())?;
        }
        Err(connection_closed_error(error))
    }

    /// Receives until `is_enough`. Returns false at the deadline.
    fn receive_until(
        &mut self,
        is_enough: impl Fn(&ResponseParser) -> bool,
    ) -> Result<bool, RpcError> {
        while !is_enough(&self.response) {
            if !receive_some(self.connection, &mut self.response, self.clock, self.end)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// Receives once. Returns false at the deadline.
fn receive_some(
    connection: &mut ClientConnection,
    response: &mut ResponseParser,
    clock: Clock,
    end: Instant,
) -> Result<bool, RpcError> {
    let mut bytes = [0; 16 << 10];
    let received = connection.receive(&mut bytes);
    match received.map_err(|error| connection_closed_error(&error))? {
        RecvResult::Bytes(count) => response.receive(&bytes[..count])?,
        RecvResult::Eof if response.handle_stream_end() => {}
        RecvResult::Eof => {
            return Err(connection_closed_error(&io::ErrorKind::UnexpectedEof.into()));
        }
        RecvResult::WouldBlock => {
            return wait_until_ready(connection, ClientConnection::wait_to_receive, clock, end);
        }
    }
    Ok(true)
}

/// Waits for the socket. Returns whether to try again before `end`.
fn wait_until_ready(
    connection: &ClientConnection,
    wait: fn(&ClientConnection, Span) -> io::Result<bool>,
    clock: Clock,
    end: Instant,
) -> Result<bool, RpcError> {
    let left = end.since(clock.now());
    let ready = wait(connection, left).map_err(|error| connection_closed_error(&error))?;
    Ok(ready || clock.now() < end)
}

/// Bytes of a request.
fn request_bytes(request: &EncodedRequest, endpoint: &ControlEndpoint) -> Vec<u8> {
    let EncodedRequest { verb, target, body } = request;
    let mut head = format!("{} {target} HTTP/1.1\r\n{}", verb.name(), endpoint.headers());
    if let Some(body) = body {
        head += &format!("content-type: application/json\r\ncontent-length: {}\r\n", body.len());
    }
    head += "\r\n";
    let mut bytes = head.into_bytes();
    bytes.extend_from_slice(body.as_deref().unwrap_or_default());
    bytes
}

/// Result of a method, or its error.
fn parse_result(status: u16, body: &[u8]) -> Result<Value, RpcError> {
    let parsed = strict_json::parse_json(body);
    match parsed {
        Ok(value) if (200..300).contains(&status) => Ok(value),
        Ok(value) => match value.get("error").and_then(RpcError::from_json) {
            Some(refusal) => Err(refusal),
            None => Err(unexpected_response(status, body)),
        },
        Err(_) => Err(unexpected_response(status, body)),
    }
}

fn unexpected_response(status: u16, body: &[u8]) -> RpcError {
    let shown = quote_untrusted(&String::from_utf8_lossy(&body[..body.len().min(200)]));
    let text = format!("response: status {status} with {shown}, expected JSON");
    RpcError::remote(ErrorCode::NotJson, text)
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
