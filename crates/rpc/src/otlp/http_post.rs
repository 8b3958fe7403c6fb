//! One HTTP/1.1 POST on a connection of its own, with time limits.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::timeout;

use super::{OtlpEndpoint, OtlpSignal};

/// Time limit of a request, from the connect to the status.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit of a connect to one address.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// Largest head of a response.
const HEAD_BYTES_MAX: usize = 16 << 10;
const HEADERS_MAX: usize = 64;

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PostError {
    /// What happened.
    pub(super) reason: String,
    /// Whether the same request may succeed later.
    pub(super) is_temporary: bool,
}

/// Sends a JSON document, and waits for the status of the response.
pub(super) async fn post(
    endpoint: &OtlpEndpoint,
    addresses: &[SocketAddr],
    signal: OtlpSignal,
    body: &str,
) -> Result<(), PostError> {
    let temporary = |reason: String| PostError { reason, is_temporary: true };
    let request = async {
        let stream = connect(addresses).await.map_err(|error| temporary(error.to_string()))?;
        let head = format!(
            "POST {} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\
             User-Agent: tenmil/{}\r\nConnection: close\r\n\r\n",
            endpoint.path_of(signal),
            endpoint.authority(),
            body.len(),
            env!("CARGO_PKG_VERSION"),
        );
        send(&stream, head.as_bytes()).await.map_err(|error| temporary(error.to_string()))?;
        send(&stream, body.as_bytes()).await.map_err(|error| temporary(error.to_string()))?;
        let status = receive_status(&stream).await.map_err(temporary)?;
        match status {
            200..=299 => Ok(()),
            // What the protocol lists as worth a retry (OTLP 1.x, "OTLP/HTTP Response").
            429 | 502..=504 => Err(temporary(format!("HTTP status {status}"))),
            _ => Err(PostError { reason: format!("HTTP status {status}"), is_temporary: false }),
        }
    };
    match timeout(REQUEST_TIMEOUT, request).await {
        Ok(done) => done,
        Err(_) => Err(temporary(format!("no response after {} s", REQUEST_TIMEOUT.as_secs()))),
    }
}

/// Connects to the first address that accepts.
async fn connect(addresses: &[SocketAddr]) -> io::Result<TcpStream> {
    let mut last = io::Error::new(io::ErrorKind::AddrNotAvailable, "its name has no address");
    for address in addresses {
        match timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => return Ok(stream),
            Ok(Err(error)) => last = error,
            Err(_) => last = io::ErrorKind::TimedOut.into(),
        }
    }
    Err(last)
}

async fn send(stream: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        stream.writable().await?;
        match stream.try_write(bytes) {
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Status of the response. Its body is not read.
async fn receive_status(stream: &TcpStream) -> Result<u16, String> {
    let mut head = Vec::new();
    loop {
        stream.readable().await.map_err(|error| error.to_string())?;
        let mut bytes = [0; 4096];
        match stream.try_read(&mut bytes) {
            Ok(0) => return Err("the connection was closed without a response".to_owned()),
            Ok(count) => head.extend_from_slice(&bytes[..count]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            Err(error) => return Err(error.to_string()),
        }
        let mut headers = [httparse::EMPTY_HEADER; HEADERS_MAX];
        let mut response = httparse::Response::new(&mut headers);
        match response.parse(&head) {
            // An interim response is followed by the final one.
            Ok(httparse::Status::Complete(len)) if response.code.is_some_and(|code| code < 200) => {
                head.drain(..len);
            }
            Ok(httparse::Status::Complete(_)) => {
                return response.code.ok_or_else(|| "a response without a status".to_owned());
            }
            Ok(httparse::Status::Partial) if head.len() > HEAD_BYTES_MAX => {
                return Err(format!("headers of more than {HEAD_BYTES_MAX} bytes"));
            }
            Ok(httparse::Status::Partial) => {}
            Err(why) => return Err(format!("no HTTP response: {why}")),
        }
    }
}
