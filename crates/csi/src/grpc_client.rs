//! gRPC client for one unary call over a Unix socket.

use std::path::Path;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use http::{HeaderMap, Request};
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::grpc::{PREFIX_LEN, parse_message};
use crate::status::{Code, Status};

/// Time limit for a call.
const CALL_TIME_MAX: Duration = Duration::from_secs(120);

/// Calls `SERVICE/METHOD` of the driver at `socket`.
pub(crate) fn call(socket: &Path, method: &str, message: &[u8]) -> Result<Vec<u8>, Status> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Status::internal(format!("runtime: {error}")))?;
    runtime.block_on(async {
        let called = timeout(CALL_TIME_MAX, call_unary(socket, method, message)).await;
        called.unwrap_or_else(|_| Err(Status::new(Code::DeadlineExceeded, "no response in time")))
    })
}

async fn call_unary(socket: &Path, method: &str, message: &[u8]) -> Result<Vec<u8>, Status> {
    let stream = UnixStream::connect(socket).await.map_err(lost)?;
    let (client, connection) = h2::client::handshake(stream).await.map_err(lost)?;
    tokio::spawn(connection);
    let mut client = client.ready().await.map_err(lost)?;
    let request = Request::post(format!("http://localhost/csi.v1.{method}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(())
        .map_err(|error| Status::internal(format!("{method}: {error}")))?;
    let (response, mut stream) = client.send_request(request, false).map_err(lost)?;
    let mut body = BytesMut::with_capacity(PREFIX_LEN + message.len());
    body.put_u8(0);
    body.put_u32(u32::try_from(message.len()).unwrap_or(u32::MAX));
    body.put_slice(message);
    stream.send_data(body.freeze(), true).map_err(lost)?;
    let (head, mut body) = response.await.map_err(lost)?.into_parts();
    let mut received = BytesMut::new();
    while let Some(part) = body.data().await {
        let part: Bytes = part.map_err(lost)?;
        body.flow_control().release_capacity(part.len()).map_err(lost)?;
        received.extend_from_slice(&part);
    }
    let trailers = body.trailers().await.map_err(lost)?;
    check_status(&trailers.unwrap_or(head.headers))?;
    parse_message(received.freeze()).map(|message| message.to_vec())
}

fn check_status(headers: &HeaderMap) -> Result<(), Status> {
    let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
    let code = text("grpc-status").and_then(|code| code.parse().ok());
    match code.and_then(Code::from_number) {
        _ if code == Some(0) => Ok(()),
        Some(code) => Err(Status::new(code, text("grpc-message").unwrap_or_default())),
        None => Err(Status::internal("response without a status")),
    }
}

/// Error of a connection: the driver has ended, or has not begun.
fn lost(error: impl std::fmt::Display) -> Status {
    Status::unavailable(format!("driver: {error}"))
}
