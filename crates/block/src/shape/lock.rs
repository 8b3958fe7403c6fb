//! Holding a range of blocks against everyone else for a moment.

use std::ops::Range;

/// Keeps others from changing a range of blocks while one request looks at it and then changes it.
///
/// A shaper holds at most one range at a time and gives it back once the request that wanted it is
/// answered. Dropping the lock gives back what it holds.
pub trait RangeLock: Send {
    /// Asks for `blocks`. True once they are held; until then the shaper asks again at every poll
    /// and keeps its thread awake. It asks when nothing of its own channel is under way.
    fn acquire(&mut self, blocks: Range<u64>) -> bool;

    /// Gives back what was held.
    fn release(&mut self, blocks: Range<u64>);
}

/// There is one channel, and the shaper itself keeps its own requests apart.
impl RangeLock for () {
    fn acquire(&mut self, _: Range<u64>) -> bool {
        true
    }

    fn release(&mut self, _: Range<u64>) {}
}
