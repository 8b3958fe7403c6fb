//! How long a namespace of somebody else's controller is by now.
//!
//! Its controller says so to the thread that tends it, and all block devices over it are to know. They
//! are told by a thread of its own: one of them may be waited for by somebody who waits for the thread
//! that tends.

use std::sync::atomic::{AtomicU64, Ordering};

use base::Limits;
use host::Thread;

/// As many blocks as it was ever said to have, if it has grown since it was opened.
#[derive(Debug, Default)]
pub(crate) struct Growth(AtomicU64);

impl Growth {
    /// Its controller says that it has so many blocks.
    pub(crate) fn has_now(&self, blocks: u64) {
        if self.0.fetch_max(blocks, Ordering::Relaxed) < blocks {
            let tell = |_: &host::Stop| {
                block::notice_sizes();
            };
            // Without a thread they notice with whatever grows next.
            if let Ok(thread) = Thread::spawn("sizes", None, tell) {
                // It ends by itself, and nobody waits for it.
                std::mem::forget(thread);
            }
        }
    }

    /// What it is like by now.
    pub(crate) fn limits(&self, opened: &Limits) -> Limits {
        Limits { block_count: self.block_count(opened), ..opened.clone() }
    }

    /// Who was told that it has fewer blocks keeps his end: what lies behind the new one is refused by
    /// the controller.
    pub(crate) fn block_count(&self, opened: &Limits) -> u64 {
        self.0.load(Ordering::Relaxed).max(opened.block_count)
    }
}
