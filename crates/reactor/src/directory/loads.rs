//! What a balancer wants to know of all reactors and threads: no names, and nothing of pollers that
//! would have to be copied. There may be thousands.

use base::{Instant, Span};
use host::Cores;

use super::record::{ReactorRecord, ThreadRecord};
use super::{ReactorId, ThreadId};

/// Loads of all reactors and all threads, as of one moment.
#[derive(Clone, Debug)]
pub(crate) struct Loads {
    pub(crate) at: Instant,
    pub(crate) reactors: Vec<ReactorTime>,
    /// By number.
    pub(crate) threads: Vec<ThreadTime>,
}

/// What one reactor has done.
#[derive(Clone, Debug)]
pub(crate) struct ReactorTime {
    pub(crate) id: ReactorId,
    pub(crate) core: u32,
    pub(crate) busy: Span,
}

/// What one thread has done, and where it may be.
#[derive(Clone, Debug)]
pub(crate) struct ThreadTime {
    pub(crate) id: ThreadId,
    pub(crate) home: ReactorId,
    pub(crate) mask: Option<Cores>,
    pub(crate) node: Option<u32>,
    pub(crate) busy: Span,
    pub(crate) moves: u64,
    /// Whether one of its pollers cannot leave its reactor.
    pub(crate) is_tied: bool,
}

impl Loads {
    /// What was known of a thread.
    pub(crate) fn thread(&self, id: ThreadId) -> Option<&ThreadTime> {
        let at = self.threads.binary_search_by_key(&id, |thread| thread.id).ok()?;
        self.threads.get(at)
    }
}

impl ReactorTime {
    pub(super) fn of(id: ReactorId, record: &ReactorRecord) -> Self {
        Self { id, core: record.core, busy: Span { ns: record.busy_ns.get() } }
    }
}

impl ThreadTime {
    pub(super) fn of(record: &ThreadRecord) -> Self {
        Self {
            id: record.id,
            home: record.home(),
            mask: record.mask().clone(),
            node: record.node,
            busy: Span { ns: record.busy_ns.get() },
            moves: record.moves.get(),
            is_tied: record.pollers().iter().any(|poller| poller.tied.is_some()),
        }
    }
}
