//! Loads of all reactors and threads for a balancer: without names and poller details, since there
//! may be thousands of threads.

use tenmil_base::{Instant, Span};
use tenmil_linux::CpuList;

use super::counters::{ReactorCounters, ThreadCounters};
use super::{ReactorId, ThreadId};

/// Loads of all reactors and threads at one moment.
#[derive(Clone, Debug)]
pub(crate) struct LoadSnapshot {
    pub(crate) at: Instant,
    pub(crate) reactors: Vec<ReactorUsage>,
    /// Threads, by number.
    pub(crate) threads: Vec<ThreadUsage>,
}

/// Busy time of a reactor.
#[derive(Clone, Debug)]
pub(crate) struct ReactorUsage {
    pub(crate) id: ReactorId,
    pub(crate) core: u32,
    pub(crate) busy: Span,
}

/// Busy time of a thread, and its placement constraints.
#[derive(Clone, Debug)]
pub(crate) struct ThreadUsage {
    pub(crate) id: ThreadId,
    pub(crate) home: ReactorId,
    pub(crate) mask: Option<CpuList>,
    pub(crate) node: Option<u32>,
    pub(crate) busy: Span,
    pub(crate) migrations: u64,
    /// Whether one of its pollers is pinned.
    pub(crate) is_pinned: bool,
}

impl LoadSnapshot {
    /// Usage of a thread.
    pub(crate) fn usage_of_thread(&self, id: ThreadId) -> Option<&ThreadUsage> {
        let at = self.threads.binary_search_by_key(&id, |thread| thread.id).ok()?;
        self.threads.get(at)
    }
}

impl ReactorUsage {
    pub(super) fn from_counters(id: ReactorId, record: &ReactorCounters) -> Self {
        Self { id, core: record.core, busy: Span { ns: record.busy_ns.get() } }
    }
}

impl ThreadUsage {
    pub(super) fn from_counters(record: &ThreadCounters) -> Self {
        Self {
            id: record.id,
            home: record.current_reactor(),
            mask: record.lock_mask().clone(),
            node: record.node,
            busy: Span { ns: record.busy_ns.get() },
            migrations: record.migrations.get(),
            is_pinned: record.lock_pollers().iter().any(|poller| poller.pinned.is_some()),
        }
    }
}
