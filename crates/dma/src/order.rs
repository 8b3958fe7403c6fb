//! The two halves of a completion, and in which order they are stored and loaded.
//!
//! ```text
//!   controller   store the first half ── store the second, which has the phase: release
//!   driver       load the second half ── the phase is new: barrier ── load the first
//! ```
//!
//! `crates/dma/tests/orders` has this file under a model checker.

use base::CompletionEntry;

use super::barrier::{DeviceKind, load_barrier};
use super::sync::{AtomicU64, Ordering};

/// Where the phase is in the second half.
pub(crate) const PHASE: u64 = 1 << 48;

/// Stores a completion.
#[inline(always)]
pub(crate) fn store(first: &AtomicU64, second: &AtomicU64, entry: CompletionEntry) {
    first.store(entry[0], Ordering::Relaxed);
    // Pairs with the driver's barrier after it has seen the phase.
    second.store(entry[1], Ordering::Release);
}

/// Loads a completion, if it carries `wanted` at the place of the phase.
#[inline(always)]
pub(crate) fn load(
    first: &AtomicU64,
    second: &AtomicU64,
    wanted: u64,
    kind: DeviceKind,
) -> Option<CompletionEntry> {
    let second = second.load(Ordering::Relaxed);
    if second & PHASE != wanted {
        return None;
    }
    // Pairs with the controller's release of the second half: the first is in memory by now.
    load_barrier(kind);
    Some([first.load(Ordering::Relaxed), second])
}
