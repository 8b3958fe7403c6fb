//! Threshold and count of slow requests of one export.

use std::sync::atomic::{AtomicU64, Ordering};

use tenmil_base::Span;

use super::{SlowIo, SlowIoLog};

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

    /// Whether requests are logged.
    #[inline]
    pub(crate) fn is_on(&self) -> bool {
        self.threshold_ns() != OFF
    }

    #[inline]
    pub(crate) fn threshold_ns(&self) -> u64 {
        self.threshold_ns.load(Ordering::Relaxed)
    }

    /// Counts and appends a request.
    pub(crate) fn append(&self, slow: SlowIo) {
        self.count.fetch_add(1, Ordering::Relaxed);
        self.log.append(slow);
    }
}
