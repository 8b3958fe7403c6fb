//! Slow requests of an export's clients.

use std::sync::Arc;

use tenmil_base::UtcTime;
use tenmil_wire::nbd::Command;

use super::transmission::SlowRequest;
use crate::slow_io::{ExportSlowIo, SlowIo, SlowIoSource};

/// Appends a request of a client to the log of its export.
pub(super) fn append_request(
    slow_io: &ExportSlowIo,
    source: &Arc<SlowIoSource>,
    slow: SlowRequest,
) {
    let SlowRequest { header, error, received_at, stages, .. } = slow;
    slow_io.append(SlowIo {
        source: Arc::clone(source),
        operation: operation_name(header.command),
        namespace: None,
        start: (header.command != Command::FLUSH).then_some(header.offset),
        len_bytes: header.len_bytes.into(),
        id: header.cookie,
        error,
        received_at,
        stages,
        ended_at: UtcTime { unix_us: 0 },
    });
}

fn operation_name(command: Command) -> &'static str {
    match command {
        Command::READ => "read",
        Command::WRITE => "write",
        Command::FLUSH => "flush",
        Command::TRIM => "trim",
        Command::WRITE_ZEROES => "write zeroes",
        Command::BLOCK_STATUS => "block status",
        Command::CACHE => "cache",
        Command::RESIZE => "resize",
        _ => "request",
    }
}
