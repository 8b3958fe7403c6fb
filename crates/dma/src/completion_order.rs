//! Memory order of the two halves of a completion entry.
//!
//! ```text
//!   controller   store the first half ── store the second, which has the phase: release
//!   driver       load the second half ── the phase is new: barrier ── load the first
//! ```
//!
//! `crates/dma/tests/orders` checks this file in a model checker.

use tenmil_base::CompletionEntry;

use super::barrier::{DeviceKind, load_barrier};
use super::sync::{AtomicU64, Ordering};

/// Phase tag in the second half.
pub(crate) const PHASE: u64 = 1 << 48;

/// Stores a completion.
#[inline(always)]
pub(crate) fn store_completion(first: &AtomicU64, second: &AtomicU64, entry: CompletionEntry) {
    first.store(entry[0], Ordering::Relaxed);
    // Pairs with the driver's load barrier after it has seen the phase.
    second.store(entry[1], Ordering::Release);
}

/// Loads a completion, if its phase tag is `wanted`.
#[inline(always)]
pub(crate) fn load_completion_if_new(
    first: &AtomicU64,
    second: &AtomicU64,
    wanted: u64,
    kind: DeviceKind,
) -> Option<CompletionEntry> {
    let second = second.load(Ordering::Relaxed);
    if second & PHASE != wanted {
        return None;
    }
    // Pairs with the controller's release store of the second half: the first half is visible now.
    load_barrier(kind);
    Some([first.load(Ordering::Relaxed), second])
}
