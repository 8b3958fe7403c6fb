//! Arming a queue pair's interrupt before its thread sleeps, without losing a wake-up.

use crate::queue_pair::{QueuePair, Transport};

/// Whether a thread may sleep on a queue pair's interrupt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArmResult {
    /// Nothing is pending; any later completion signals the vector.
    Armed,
    /// A completion is pending, and its signal may have been cleared: poll once more.
    Pending,
}

/// Prepares for sleeping: clears past signals with `clear` (reading the eventfd of the vector), and then
/// checks the ring once more.
///
/// In the opposite order, a completion between check and clearing would be lost: its signal is cleared,
/// and the ring is not checked again.
pub fn arm_interrupt<T: Transport>(queue: &mut QueuePair<T>, clear: impl FnOnce()) -> ArmResult {
    clear();
    if queue.arm() { ArmResult::Armed } else { ArmResult::Pending }
}
