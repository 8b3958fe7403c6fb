//! Latest known size of a remote namespace.
//!
//! The admin thread of the controller learns of a resize, and all block devices above the namespace
//! have to be notified. That happens on a thread of its own, because a block device may hold a lock for
//! a caller that waits for the admin thread.

use std::sync::atomic::{AtomicU64, Ordering};

use tenmil_base::Limits;
use tenmil_linux::NamedThread;

/// Largest size in blocks that the controller reported since the namespace was opened, or 0.
#[derive(Debug, Default)]
pub(crate) struct SizeWatch(AtomicU64);

impl SizeWatch {
    /// Records a size reported by the controller.
    pub(crate) fn set_size(&self, blocks: u64) {
        if self.0.fetch_max(blocks, Ordering::Relaxed) < blocks {
            let tell = |_: &tenmil_linux::StopFlag| {
                tenmil_block::refresh_sizes();
            };
            // If no thread can be started, the devices are notified with the next resize.
            if let Ok(thread) = NamedThread::spawn("sizes", None, tell) {
                // The thread ends by itself and is not joined.
                std::mem::forget(thread);
            }
        }
    }

    /// The limits at open, with the latest size.
    pub(crate) fn limits(&self, opened: &Limits) -> Limits {
        Limits { block_count: self.block_count(opened), ..opened.clone() }
    }

    /// The latest size in blocks. A namespace that shrinks keeps its size here: the controller rejects
    /// commands beyond its new end.
    pub(crate) fn block_count(&self, opened: &Limits) -> u64 {
        self.0.load(Ordering::Relaxed).max(opened.block_count)
    }
}
