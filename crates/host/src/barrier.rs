//! A memory barrier of two unlike halves: one that is paid by those who ring often, and one that is
//! paid by the one who sleeps now and then.
//!
//! Two threads that each store one word and then load the other's must not both miss: that takes a
//! full barrier between store and load, on both sides. `membarrier(2)` runs one on every processor
//! that runs a thread of this process, so a sleeper can pay for everybody, about a microsecond, and
//! the others only have to keep the compiler from swapping the two.

use std::sync::atomic::{Ordering, compiler_fence, fence};

use rustix::thread::{MembarrierCommand, membarrier};

/// How the two halves are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Barrier {
    /// The sleeper asks the kernel; the others pay nothing.
    Expedited,
    /// The kernel refuses that: a full fence on both sides.
    Fences,
}

impl Barrier {
    /// The cheaper barrier, if the kernel grants it to this process.
    pub(crate) fn detect() -> Self {
        match membarrier(MembarrierCommand::RegisterPrivateExpedited) {
            Ok(()) => Self::Expedited,
            Err(_) => Self::Fences,
        }
    }

    /// The half of those who store, then look whether somebody sleeps.
    #[inline]
    pub(crate) fn light(self) {
        match self {
            Self::Expedited => compiler_fence(Ordering::SeqCst),
            Self::Fences => fence(Ordering::SeqCst),
        }
    }

    /// The half of the one who says that it sleeps, then looks for what was stored. False if the
    /// kernel refused this time: then nothing is ordered.
    #[must_use]
    pub(crate) fn heavy(self) -> bool {
        match self {
            Self::Expedited => membarrier(MembarrierCommand::PrivateExpedited).is_ok(),
            Self::Fences => {
                fence(Ordering::SeqCst);
                true
            }
        }
    }
}
