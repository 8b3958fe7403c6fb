//! Task of a connection: HTTP by hyper, with time limits and bounds.

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use hyper::body::{Body, Incoming};
use hyper::header::{ACCEPT, CACHE_CONTROL, CONTENT_TYPE, HeaderName, HeaderValue};
use hyper::rt::{Sleep, Timer};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};

use super::ServerState;
use super::admission::{ConnectionState, Peer};
use super::control_stream::{ControlSocket, ControlStream, HandshakeEnd};
use super::event_stream::EventQueue;
use super::reply_body::{ReplyBody, RequestGuard};
use super::request_checks::{RequestHead, check_request_head};
use crate::api::{ApiReply, ApiRequest, ApiResponse, DeferredResponse};
use crate::error::{ErrorCode, RpcError};

/// Longest head of a request.
const HEAD_MAX: usize = 32 << 10;
/// Longest body of a request: a configuration file is one.
pub(super) const BODY_MAX: usize = 2 << 20;
/// Largest number of bytes of all bodies that are being received.
const BODIES_MAX: usize = 16 << 20;
/// Time limit for the head of a request, from the end of the previous one.
pub(super) const HEAD_TIMEOUT: Duration = Duration::from_secs(30);
/// Time limit for a TLS handshake.
pub(super) const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit for the body of a request.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// Headers of every response. The page has scripts and styles of this server only, is in no frame, and
/// assigns no markup.
const COMMON_HEADERS: [(HeaderName, &str); 5] = [
    (
        hyper::header::CONTENT_SECURITY_POLICY,
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; \
         connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
         require-trusted-types-for 'script'",
    ),
    (hyper::header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (hyper::header::REFERRER_POLICY, "no-referrer"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    (CACHE_CONTROL, "no-store"),
];
const EVENT_STREAM: &str = "text/event-stream";

/// Serves a connection until it is closed by either side.
pub(super) async fn serve_connection(
    server: Rc<ServerState>,
    connection: Rc<ConnectionState>,
    mut stream: ControlStream,
) {
    let _entry = ConnectionEntry { server: Rc::clone(&server), state: Rc::clone(&connection) };
    match complete_handshake(&mut stream, &connection).await {
        Ok(()) => {}
        Err(HandshakeEnd::PlainHttp) => {
            let text = "request: it is HTTP without TLS, expected https:// at this port";
            return reject_connection(
                stream.socket(),
                &RpcError::usage(ErrorCode::NotAllowed, text),
            );
        }
        // It concerns this client alone, which was sent an alert if there is one.
        Err(HandshakeEnd::Failed) => return,
    }
    let service = service_fn(|request| {
        let (server, connection) = (Rc::clone(&server), Rc::clone(&connection));
        async move { Ok::<_, Infallible>(respond(&server, connection, request).await) }
    });
    let serving = http1::Builder::new()
        .timer(RuntimeTimer)
        .header_read_timeout(HEAD_TIMEOUT)
        .max_buf_size(HEAD_MAX)
        .serve_connection(stream, service);
    let (mut serving, mut closed) = (pin!(serving), pin!(connection.close.notified()));
    let mut finish = pin!(connection.finish.notified());
    let mut is_finishing = false;
    poll_fn(|context| {
        if closed.as_mut().poll(context).is_ready() {
            return Poll::Ready(());
        }
        if !is_finishing && finish.as_mut().poll(context).is_ready() {
            is_finishing = true;
            serving.as_mut().graceful_shutdown();
        }
        // An error concerns this client alone, which has gone or violated the protocol.
        serving.as_mut().poll(context).map(drop)
    })
    .await;
}

/// Completes the TLS handshake, if the connection has TLS. Its time is limited, and it gives way to other
/// connections as one that waits for a request does.
async fn complete_handshake(
    stream: &mut ControlStream,
    connection: &ConnectionState,
) -> Result<(), HandshakeEnd> {
    let mut closed = pin!(connection.close.notified());
    let mut late = pin!(tokio::time::sleep(HANDSHAKE_TIMEOUT));
    poll_fn(|context| {
        if let Poll::Ready(result) = stream.poll_handshake(context) {
            return Poll::Ready(result);
        }
        let is_over = closed.as_mut().poll(context).is_ready();
        if is_over || late.as_mut().poll(context).is_ready() {
            return Poll::Ready(Err(HandshakeEnd::Failed));
        }
        Poll::Pending
    })
    .await
}

/// Sends an error to a client that is not admitted, if that is possible without blocking.
pub(super) fn reject_connection(socket: &ControlSocket, refusal: &RpcError) {
    let response = ApiResponse::error(refusal);
    let status = StatusCode::from_u16(response.status).unwrap_or_default();
    let mut bytes = format!(
        "HTTP/1.1 {status}\r\ncontent-type: {}\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
        response.content_type,
        response.body.len()
    )
    .into_bytes();
    bytes.extend_from_slice(&response.body);
    // The client may have gone.
    let _ = socket.send(&bytes);
}

/// Connection in the server's list.
struct ConnectionEntry {
    server: Rc<ServerState>,
    state: Rc<ConnectionState>,
}

impl Drop for ConnectionEntry {
    fn drop(&mut self) {
        self.server.connections.remove(&self.state);
    }
}

async fn respond(
    server: &ServerState,
    connection: Rc<ConnectionState>,
    request: Request<Incoming>,
) -> Response<ReplyBody> {
    let guard = RequestGuard::new(Rc::clone(&connection));
    let reply = match answer_request(server, &connection, request).await {
        Ok(reply) => reply,
        Err(refusal) => ApiReply::Now(ApiResponse::error(&refusal)),
    };
    let response = match reply {
        ApiReply::Now(response) => response,
        ApiReply::Later(deferred) => await_deferred_response(server, deferred).await,
        ApiReply::Events(kinds) => {
            let queue = Rc::new(EventQueue::new(kinds));
            connection.subscribe(Rc::clone(&queue));
            return http_response(200, EVENT_STREAM, ReplyBody::events(queue, guard));
        }
    };
    if let Some(event) = &response.changed {
        server.broadcast(event);
    }
    let body = ReplyBody::whole(response.body, guard);
    let mut sent = http_response(response.status, response.content_type, body);
    for (name, value) in response.headers {
        if let Ok(value) = HeaderValue::from_str(&value) {
            sent.headers_mut().insert(name, value);
        }
    }
    sent
}

async fn answer_request(
    server: &ServerState,
    connection: &ConnectionState,
    request: Request<Incoming>,
) -> Result<ApiReply, RpcError> {
    let (head, body) = request.into_parts();
    let (verb, path) = (head.method.as_str(), head.uri.path());
    let security = match connection.peer {
        Peer::Process(_) => None,
        Peer::Tcp { security, .. } => Some(security),
    };
    let checked = RequestHead { verb, path, headers: &head.headers, security };
    check_request_head(checked, server.token.as_ref())?;
    let mut memory = BodyMemory { server, reserved: 0 };
    let body = read_body(body, &mut memory).await?;
    let (query, client) = (head.uri.query().unwrap_or_default(), connection.client_text());
    let accept = head.headers.get(ACCEPT).and_then(|value| value.to_str().ok());
    let accept = accept.unwrap_or_default();
    let (body, client, passed) = (body.as_slice(), client.as_str(), &connection.passed);
    Ok(server.api.answer(ApiRequest { verb, path, query, accept, body, client, passed }))
}

/// Memory reserved for the body of a request.
struct BodyMemory<'a> {
    server: &'a ServerState,
    reserved: usize,
}

impl BodyMemory<'_> {
    fn reserve(&mut self, len: usize) -> Result<(), RpcError> {
        let all = self.server.body_bytes.get() + len;
        if all > BODIES_MAX {
            let text =
                format!("request: bodies of {BODIES_MAX} bytes are being received, expected fewer");
            return Err(RpcError::environment(ErrorCode::Busy, text));
        }
        self.server.body_bytes.set(all);
        self.reserved += len;
        Ok(())
    }
}

impl Drop for BodyMemory<'_> {
    fn drop(&mut self) {
        self.server.body_bytes.set(self.server.body_bytes.get() - self.reserved);
    }
}

/// Receives the body of a request.
async fn read_body(body: Incoming, memory: &mut BodyMemory<'_>) -> Result<Vec<u8>, RpcError> {
    let too_large = || {
        let text = format!("request: body of more than {BODY_MAX} bytes, expected a shorter one");
        RpcError::usage(ErrorCode::TooLarge, text)
    };
    if body.is_end_stream() {
        return Ok(Vec::new());
    }
    if body.size_hint().lower() > BODY_MAX as u64 {
        return Err(too_large());
    }
    let (mut body, mut bytes) = (pin!(body), Vec::new());
    let mut timeout = pin!(tokio::time::sleep(BODY_TIMEOUT));
    poll_fn(|context| {
        loop {
            let Poll::Ready(frame) = body.as_mut().poll_frame(context) else {
                let seconds = BODY_TIMEOUT.as_secs();
                let text = format!("request: body not ended after {seconds} s, expected all of it");
                let late = RpcError::usage(ErrorCode::Timeout, text);
                return timeout.as_mut().poll(context).map(|()| Err(late));
            };
            let frame = match frame {
                None => return Poll::Ready(Ok(std::mem::take(&mut bytes))),
                Some(Err(error)) => {
                    let text = format!("request: body: {error}, expected all of it");
                    return Poll::Ready(Err(RpcError::usage(ErrorCode::NotARequest, text)));
                }
                Some(Ok(frame)) => frame,
            };
            // Trailers are ignored.
            let Ok(data) = frame.into_data() else { continue };
            if bytes.len() + data.len() > BODY_MAX {
                return Poll::Ready(Err(too_large()));
            }
            if let Err(refusal) = memory.reserve(data.len()) {
                return Poll::Ready(Err(refusal));
            }
            bytes.extend_from_slice(&data);
        }
    })
    .await
}

/// Waits until another thread has completed the reply. Other connections are served meanwhile.
async fn await_deferred_response(server: &ServerState, deferred: DeferredResponse) -> ApiResponse {
    loop {
        let mut notified = pin!(server.replies.notified());
        // From here on no notification is missed.
        notified.as_mut().enable();
        if let Some(result) = deferred.pending.take_result() {
            return deferred.finish(result);
        }
        notified.await;
    }
}

fn http_response(status: u16, content_type: &'static str, body: ReplyBody) -> Response<ReplyBody> {
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or_default();
    let headers = response.headers_mut();
    for (name, value) in COMMON_HEADERS {
        headers.insert(name, HeaderValue::from_static(value));
    }
    headers.insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

/// Timer of the runtime, for hyper.
#[derive(Clone, Copy, Debug)]
struct RuntimeTimer;

struct RuntimeSleep(Pin<Box<tokio::time::Sleep>>);

impl Timer for RuntimeTimer {
    fn sleep(&self, duration: Duration) -> Pin<Box<dyn Sleep>> {
        Box::pin(RuntimeSleep(Box::pin(tokio::time::sleep(duration))))
    }

    fn sleep_until(&self, deadline: Instant) -> Pin<Box<dyn Sleep>> {
        Box::pin(RuntimeSleep(Box::pin(tokio::time::sleep_until(deadline.into()))))
    }

    fn now(&self) -> Instant {
        tokio::time::Instant::now().into()
    }
}

impl Future for RuntimeSleep {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        self.get_mut().0.as_mut().poll(context)
    }
}

impl Sleep for RuntimeSleep {}
