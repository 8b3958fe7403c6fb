//! gRPC server for unary calls: HTTP/2 over a Unix socket.
//!
//! ```text
//!   POST /csi.v1.SERVICE/METHOD ─▶ HEADERS, DATA: | 0 | length (4, big-endian) | message |
//!                                  HEADERS, DATA: the same, HEADERS: grpc-status, grpc-message
//! ```
//!
//! Each call runs on a thread of its own for as long as it takes; a caller that gives up does not end it, and
//! finds it completed when it calls again.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use h2::RecvStream;
use h2::server::SendResponse;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::status::{Code, Status};

/// What executes calls.
pub(crate) trait CallHandler: Send + Sync {
    /// Executes the call with this path. It may block.
    fn call(&self, path: &str, message: &[u8]) -> Result<Vec<u8>, Status>;
}

/// Longest message.
const MESSAGE_LEN_MAX: usize = 4 << 20;
/// Length of the prefix of a message: compression flag and length.
pub(crate) const PREFIX_LEN: usize = 5;
const CONNECTIONS_MAX: usize = 32;
const STREAMS_MAX: u32 = 64;
const HEADERS_LEN_MAX: u32 = 16 << 10;
/// Time limit for the handshake of a connection, and for the message of a call.
const RECEIVE_TIME_MAX: Duration = Duration::from_secs(10);
/// Pause after a connection could not be accepted.
const ACCEPT_RETRY_INTERVAL: Duration = Duration::from_millis(100);

/// Serves connections for as long as it is polled.
pub(crate) async fn serve_grpc(listener: UnixListener, handler: Arc<dyn CallHandler>) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        match listener.accept().await {
            Ok((stream, _)) => {
                let handler = Arc::clone(&handler);
                tokio::spawn(async move {
                    serve_connection(stream, handler).await;
                    drop(place);
                });
            }
            Err(error) => {
                eprintln!("accept a connection: {error}");
                tokio::time::sleep(ACCEPT_RETRY_INTERVAL).await;
            }
        }
    }
}

/// Binds the socket at `path`; a socket there without a listening process is replaced.
pub(crate) fn bind_socket(path: &std::path::Path) -> io::Result<UnixListener> {
    match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            if std::os::unix::net::UnixStream::connect(path).is_ok() {
                return Err(error);
            }
            std::fs::remove_file(path)?;
            UnixListener::bind(path)
        }
        bound => bound,
    }
}

async fn serve_connection(stream: UnixStream, handler: Arc<dyn CallHandler>) {
    let mut builder = h2::server::Builder::new();
    builder.max_concurrent_streams(STREAMS_MAX).max_header_list_size(HEADERS_LEN_MAX);
    let Ok(Ok(mut connection)) = timeout(RECEIVE_TIME_MAX, builder.handshake(stream)).await else {
        return;
    };
    while let Some(Ok((request, respond))) = connection.accept().await {
        tokio::spawn(serve_call(request, respond, Arc::clone(&handler)));
    }
}

async fn serve_call(
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
    handler: Arc<dyn CallHandler>,
) {
    let is_grpc = request
        .headers()
        .get(http::header::CONTENT_TYPE)
        .is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"));
    if !is_grpc {
        let mut refusal = Response::new(());
        *refusal.status_mut() = StatusCode::UNSUPPORTED_MEDIA_TYPE;
        // The caller may have disconnected.
        let _ = respond.send_response(refusal, true);
        return;
    }
    let path = request.uri().path().to_owned();
    let received = timeout(RECEIVE_TIME_MAX, receive_message(request.into_body())).await;
    let late = || Status::new(Code::DeadlineExceeded, format!("{path}: no message in time"));
    let result = match received.unwrap_or_else(|_| Err(late())) {
        Ok(message) => {
            let called = path.clone();
            let run = move || handler.call(&called, &message);
            let ended = tokio::task::spawn_blocking(run).await;
            ended.unwrap_or_else(|_| Err(Status::internal(format!("{path}: bug of the driver"))))
        }
        Err(status) => Err(status),
    };
    if let Err(status) = &result {
        eprintln!("{path}: {status}");
    }
    // As above.
    let _ = send_result(&mut respond, result);
}

/// Receives the only message of a call.
async fn receive_message(mut body: RecvStream) -> Result<Bytes, Status> {
    let mut received = BytesMut::new();
    while let Some(part) = body.data().await {
        let part = part.map_err(|error| Status::unavailable(format!("request: {error}")))?;
        if received.len() + part.len() > PREFIX_LEN + MESSAGE_LEN_MAX {
            let text = format!("request: longer than {MESSAGE_LEN_MAX} bytes");
            return Err(Status::new(Code::ResourceExhausted, text));
        }
        let released = body.flow_control().release_capacity(part.len());
        released.map_err(|error| Status::internal(format!("request: {error}")))?;
        received.extend_from_slice(&part);
    }
    parse_message(received.freeze())
}

pub(crate) fn parse_message(mut body: Bytes) -> Result<Bytes, Status> {
    let (Some([compression, length @ ..]), found) = (body.first_chunk::<PREFIX_LEN>(), body.len())
    else {
        return Err(Status::invalid_argument("request: no message, expected one"));
    };
    if *compression != 0 {
        let text = "request: compressed message, expected one without compression";
        return Err(Status::new(Code::Unimplemented, text));
    }
    let expected = PREFIX_LEN as u64 + u64::from(u32::from_be_bytes(*length));
    if found as u64 != expected {
        let text = format!("request: {found} bytes, expected one message of {expected}");
        return Err(Status::invalid_argument(text));
    }
    Ok(body.split_off(PREFIX_LEN))
}

fn send_result(
    respond: &mut SendResponse<Bytes>,
    result: Result<Vec<u8>, Status>,
) -> Result<(), h2::Error> {
    let mut response = Response::new(());
    let kind = HeaderValue::from_static("application/grpc");
    response.headers_mut().insert(http::header::CONTENT_TYPE, kind);
    match result {
        Ok(message) => {
            let mut stream = respond.send_response(response, false)?;
            let mut body = BytesMut::with_capacity(PREFIX_LEN + message.len());
            body.put_u8(0);
            body.put_u32(u32::try_from(message.len()).unwrap_or(u32::MAX));
            body.put_slice(&message);
            stream.send_data(body.freeze(), false)?;
            let mut trailers = HeaderMap::new();
            trailers.insert("grpc-status", HeaderValue::from_static("0"));
            stream.send_trailers(trailers)
        }
        Err(Status { code, message }) => {
            let headers = response.headers_mut();
            headers.insert("grpc-status", HeaderValue::from(code as u16));
            if let Ok(message) = HeaderValue::try_from(percent_encode(&message)) {
                headers.insert("grpc-message", message);
            }
            respond.send_response(response, true).map(|_| ())
        }
    }
}

/// Encoding of `grpc-message`.
fn percent_encode(text: &str) -> String {
    let encode = |byte: u8| match byte {
        b' '..=b'~' if byte != b'%' => char::from(byte).to_string(),
        _ => format!("%{byte:02X}"),
    };
    text.bytes().map(encode).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use bytes::{Bytes, BytesMut};
    use http::{HeaderMap, Request};
    use tokio::net::UnixStream;

    use super::{CallHandler, bind_socket, parse_message, percent_encode, serve_grpc};
    use crate::status::{Code, Status};

    /// Returns a long message, refuses, or panics.
    struct Echo;

    impl CallHandler for Echo {
        fn call(&self, path: &str, message: &[u8]) -> Result<Vec<u8>, Status> {
            match path {
                "/long" => Ok(vec![message[0]; 200_000]),
                "/bug" => panic!("a bug that was put in"),
                _ => Err(Status::not_found("`ä`: 100 %")),
            }
        }
    }

    /// Response headers, data and trailers of a call.
    async fn call(path: &Path, method: &str, body: &[u8]) -> (HeaderMap, usize, HeaderMap) {
        let stream = UnixStream::connect(path).await.unwrap();
        let (client, connection) = h2::client::handshake(stream).await.unwrap();
        tokio::spawn(connection);
        let mut client = client.ready().await.unwrap();
        let uri = format!("http://localhost{method}");
        let request = Request::post(uri).header("content-type", "application/grpc").body(());
        let (response, mut stream) = client.send_request(request.unwrap(), false).unwrap();
        let mut message = BytesMut::from(&[0][..]);
        message.extend_from_slice(&u32::try_from(body.len()).unwrap().to_be_bytes());
        message.extend_from_slice(body);
        stream.send_data(message.freeze(), true).unwrap();
        let (head, mut body) = response.await.unwrap().into_parts();
        let mut len = 0;
        while let Some(part) = body.data().await {
            let part = part.unwrap();
            len += part.len();
            body.flow_control().release_capacity(part.len()).unwrap();
        }
        let trailers = body.trailers().await.unwrap().unwrap_or_default();
        (head.headers, len, trailers)
    }

    #[test]
    fn calls_have_a_message_longer_than_the_window_or_a_status() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("csi.sock");
            let listener = bind_socket(&path).unwrap();
            tokio::spawn(serve_grpc(listener, Arc::new(Echo)));
            let (_, len, trailers) = call(&path, "/long", b"x").await;
            assert_eq!((len, trailers["grpc-status"].as_bytes()), (200_005, &b"0"[..]));
            let (headers, len, _) = call(&path, "/other", b"x").await;
            assert_eq!((len, headers["grpc-status"].as_bytes()), (0, &b"5"[..]));
            assert_eq!(headers["grpc-message"].as_bytes(), b"`%C3%A4`: 100 %25");
            let (headers, _, _) = call(&path, "/bug", b"x").await;
            assert_eq!(headers["grpc-status"].as_bytes(), b"13");
        });
    }

    #[test]
    fn socket_of_a_process_that_has_ended_is_replaced_and_no_other() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("csi.sock");
            let first = bind_socket(&path).unwrap();
            assert!(bind_socket(&path).is_err());
            drop(first);
            assert!(bind_socket(&path).is_ok());
        });
    }

    #[test]
    fn message_that_is_cut_compressed_or_followed_by_another_is_refused() {
        let code =
            |bytes: &'static [u8]| parse_message(Bytes::from_static(bytes)).unwrap_err().code;
        assert_eq!(parse_message(Bytes::from_static(&[0, 0, 0, 0, 1, 7])), Ok(vec![7].into()));
        assert_eq!(code(&[0, 0, 0, 0]), Code::InvalidArgument);
        assert_eq!(code(&[0, 0, 0, 0, 2, 7]), Code::InvalidArgument);
        assert_eq!(code(&[0, 0, 0, 0, 1, 7, 0]), Code::InvalidArgument);
        assert_eq!(code(&[1, 0, 0, 0, 1, 7]), Code::Unimplemented);
        assert_eq!(percent_encode("a\nb"), "a%0Ab");
    }
}
