//! Slow-I/O log of an export.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tenmil_base::Span;
use tenmil_wire::nbd::Command;

use super::transmission::SlowRequest;
use crate::slow_io::{SlowIo, SlowIoLog, SlowIoSource};

/// Slow requests of an export, and the time from which they are.
#[derive(Debug)]
pub struct ExportSlowIo {
    threshold_ns: AtomicU64,
    count: AtomicU64,
    log: SlowIoLog,
}

/// No request takes that long.
const OFF: u64 = u64::MAX;

impl Default for ExportSlowIo {
    fn default() -> Self {
        let (threshold_ns, count) = (AtomicU64::new(OFF), AtomicU64::new(0));
        Self { threshold_ns, count, log: SlowIoLog::default() }
    }
}

impl ExportSlowIo {
    /// Time from which a request is logged; `None`: none is.
    #[must_use]
    pub fn threshold(&self) -> Option<Span> {
        let ns = self.threshold_ns();
        (ns != OFF).then_some(Span { ns })
    }

    /// Changes the time from which a request is logged.
    pub fn set_threshold(&self, threshold: Option<Span>) {
        self.threshold_ns.store(threshold.map_or(OFF, |threshold| threshold.ns), Ordering::Relaxed);
    }

    /// Number of slow requests.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// The log.
    #[must_use]
    pub fn log(&self) -> &SlowIoLog {
        &self.log
    }

    #[inline]
    pub(super) fn threshold_ns(&self) -> u64 {
        self.threshold_ns.load(Ordering::Relaxed)
    }

    /// Appends a request of a client.
    pub(super) fn append(&self, source: &Arc<SlowIoSource>, slow: SlowRequest) {
        self.count.fetch_add(1, Ordering::Relaxed);
        let SlowRequest { header, error, received_at, stages, .. } = slow;
        self.log.append(SlowIo {
            source: Arc::clone(source),
            operation: operation_name(header.command),
            namespace: None,
            start: (header.command != Command::FLUSH).then_some(header.offset),
            len_bytes: header.len_bytes.into(),
            id: header.cookie,
            error,
            received_at,
            stages,
        });
    }
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
