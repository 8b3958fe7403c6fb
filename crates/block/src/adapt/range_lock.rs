//! Range lock: short-term exclusive access to a range of blocks.

use std::ops::Range;

/// Prevents other channels from changing a range of blocks while one request compares and then writes it.
///
/// An adapted channel holds at most one range at a time and releases it when its request completes.
/// Dropping the lock releases the range.
pub trait RangeLock: Send {
    /// Requests `blocks`. Returns true once they are locked; until then the channel calls again at every
    /// poll and keeps its thread awake. It calls when none of its own requests are in flight.
    fn acquire(&mut self, blocks: Range<u64>) -> bool;

    /// Releases the locked range.
    fn release(&mut self, blocks: Range<u64>);
}

/// For a device with one channel: the channel itself serializes its requests.
impl RangeLock for () {
    fn acquire(&mut self, _: Range<u64>) -> bool {
        true
    }

    fn release(&mut self, _: Range<u64>) {}
}
