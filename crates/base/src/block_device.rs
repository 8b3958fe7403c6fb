//! Block device interface: [`BlockDevice`], and [`IoChannel`] per thread.

use core::any::Any;
use std::sync::Arc;

use crate::Error;
use crate::request::Operation;
use crate::{
    ChannelWakeup, CompletionBatch, Instant, RegionId, Request, ReservationControl, Segment,
};

/// Channel of one thread to a block device: the trait that block devices implement, and the only
/// dynamic call on the I/O path. Both hot calls process batches, so its cost is paid per batch.
/// (SPDK: `spdk_io_channel`.)
///
/// A stacked channel returns the channel that it is stacked on from [`below`](ChannelWakeup::below),
/// and implements what it changes: all other calls are forwarded, except
/// [`fence_writes`](Self::fence_writes), because a request that it holds back would still start.
///
/// Requests may complete in any order, many iterations later. Every accepted request completes
/// exactly once, and until then the memory that it names may be accessed.
///
/// Dropping a channel abandons its outstanding requests: their results are lost, and once the drop
/// has returned, their memory is not accessed any more. Where a device or another thread works on
/// them, the drop waits until that has stopped.
pub trait IoChannel: ChannelWakeup + Send {
    /// Geometry and limits. Constant until an event announces a change.
    fn limits(&self) -> &Limits;

    /// Submits requests from the front of `requests`, and returns how many were accepted. Fewer
    /// than all means that the channel is full: the rest stays with the caller, unread. A channel
    /// that is full without an outstanding request frees entries in calls of this function: it need
    /// not be polled.
    ///
    /// The requests' segment numbers are indexes into `segments`, which is read only during the
    /// call.
    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize;

    /// Makes submitted requests visible to the device: doorbells, system calls. Called once per
    /// iteration, or at once by a caller that needs minimum latency.
    fn flush_submissions(&mut self) {
        if let Some(below) = self.below_mut() {
            below.flush_submissions();
        }
    }

    /// Does a bounded amount of work and appends completions. Returns their number.
    fn poll(&mut self, now: Instant, answers: &mut CompletionBatch) -> usize;

    /// Doorbell write counters, zero if it has no doorbells.
    fn doorbell_stats(&self) -> DoorbellStats {
        self.below().map_or_else(DoorbellStats::default, |below| below.doorbell_stats())
    }

    /// Fences the writes of this channel's client, which is disconnected.
    ///
    /// Accepted requests that have not started never start, and until the writes in flight have
    /// completed, no channel to the same blocks starts a request that overlaps one of them:
    /// otherwise a write whose completion the client never saw could land on top of later writes.
    /// The caller submits nothing more, and polls until everything has completed.
    ///
    /// Only a device that knows all channels to its blocks can do this; others do nothing.
    fn fence_writes(&mut self) {}

    /// Number of times that the device is known to have lost completed writes. Counted per device;
    /// a channel that has failed a flush for a loss, or has read from a controller that was connected
    /// after the loss, returns at least that count. Zero if the device does not count losses. Called
    /// after each poll: takes no lock.
    fn known_write_loss_count(&self) -> u64 {
        self.below().map_or(0, |below| below.known_write_loss_count())
    }

    /// Acknowledges the first `count` losses, as counted by [`known_write_loss_count`](Self::known_write_loss_count), after the
    /// owner of this channel has repaired them: no current or later flush fails because of these.
    /// Flushes fail for all later losses. Does nothing for a device that does not count.
    fn ack_repaired_write_losses(&mut self, count: u64) {
        if let Some(below) = self.below_mut() {
            below.ack_repaired_write_losses(count);
        }
    }

    /// The owner of this channel gives up all that was completed and not flushed, on whichever channel,
    /// and goes on from what reads return from now on. A device that fails every flush once it has lost
    /// writes fails no flush of this channel for the losses so far, other than those under way. A device
    /// whose losses are over with one failed flush does nothing.
    ///
    /// # Errors
    ///
    /// Why reads may return what is not on the medium, what was expected, and what to do: then nothing was
    /// acknowledged.
    fn accept_write_losses(&mut self) -> Result<(), Error> {
        self.below_mut().map_or(Ok(()), |below| below.accept_write_losses())
    }
}

impl IoChannel for Box<dyn IoChannel + '_> {
    fn limits(&self) -> &Limits {
        (**self).limits()
    }

    #[inline]
    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        (**self).submit(now, requests, segments)
    }

    #[inline]
    fn flush_submissions(&mut self) {
        (**self).flush_submissions();
    }

    #[inline]
    fn poll(&mut self, now: Instant, answers: &mut CompletionBatch) -> usize {
        (**self).poll(now, answers)
    }

    fn fence_writes(&mut self) {
        (**self).fence_writes();
    }
}

impl ChannelWakeup for Box<dyn IoChannel + '_> {
    fn below(&self) -> Option<&dyn IoChannel> {
        Some(&**self)
    }

    fn below_mut(&mut self) -> Option<&mut dyn IoChannel> {
        Some(&mut **self)
    }
}

/// Doorbell write counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DoorbellStats {
    /// Submission doorbells.
    pub submission: u64,
    /// Completion doorbells.
    pub completion: u64,
    /// Writes of both kinds to a register; shadow doorbells in memory avoid the others.
    pub registers: u64,
    /// Commands stored into a controller memory buffer, so that they are not fetched across the bus
    /// after the doorbell.
    pub cmb_commands: u64,
}

impl DoorbellStats {
    /// Sum of both.
    #[must_use]
    pub fn plus(self, other: Self) -> Self {
        Self {
            submission: self.submission + other.submission,
            completion: self.completion + other.completion,
            registers: self.registers + other.registers,
            cmb_commands: self.cmb_commands + other.cmb_commands,
        }
    }
}

/// Block device shared by threads; opens an I/O channel for each.
pub trait BlockDevice: Send + Sync {
    /// Geometry and limits of every channel.
    fn limits(&self) -> Limits;
    /// Opens a channel to the same blocks. The error is one line: what was found and what was
    /// expected.
    fn channel(&self) -> Result<Box<dyn IoChannel>, Error>;

    /// Maximum number of open channels: queue pairs, connections.
    fn channels_max(&self) -> u32 {
        u32::MAX
    }

    /// Reason why the device has failed for good, in one line; `None` while it may succeed.
    fn failure_reason(&self) -> Option<String> {
        None
    }

    /// Persistent unique identity of the device: the same for every opener and path; `None` if it
    /// has none. For an NVMe namespace its UUID, NGUID or EUI-64, else the controller's serial
    /// number with the namespace identifier.
    fn identity(&self) -> Option<String> {
        None
    }

    /// Reservations of the namespace that this device is, if they can exclude other hosts from writing: for a
    /// device that is a whole namespace, and not for one that stands on others.
    fn reservations(&self) -> Option<&dyn ReservationControl> {
        None
    }

    /// What the blocks from `lba` on hold, as far as that is known without reading them. May block:
    /// never called on the way of an I/O.
    ///
    /// # Errors
    ///
    /// What was found and what was expected, in one line.
    fn block_status(&self, lba: u64) -> Result<BlockExtent, Error> {
        let blocks = self.limits().block_count.saturating_sub(lba);
        Ok(BlockExtent { blocks, kind: ExtentKind::Data })
    }

    /// Which reads tell that their blocks are unallocated, instead of writing zeroes to memory.
    fn hole_reporting(&self) -> HoleReporting {
        HoleReporting::Never
    }

    /// Memory in which the device has its blocks, if submitters may read them there. Only reads of
    /// such a device may have the flag [`RequestFlags::IN_PLACE`](crate::RequestFlags::IN_PLACE).
    fn medium_memory(&self) -> Option<MediumMemory> {
        None
    }

    /// Re-reads the number of blocks: larger than before if the device was extended elsewhere,
    /// which then applies to all channels. May block: never called on the I/O path.
    ///
    /// # Errors
    ///
    /// What was found and what was expected, in one line.
    fn refresh_size(&self) -> Result<u64, Error> {
        Ok(self.limits().block_count)
    }

    /// Whether its channels accept reads and writes on kernel-owned memory (ublk zero copy), which
    /// has no address in this process, and the required alignment. No layer may access the data of
    /// such a request.
    ///
    /// # Errors
    ///
    /// Reason why they do not, in one line.
    fn supports_kernel_buffers(&self) -> Result<u32, Error> {
        Err(Error::usage(
            "it works on data in memory of this process, expected a file, a block device or an SSD \
             behind a network",
        ))
    }

    /// Whether [`resize`](Self::resize) is supported.
    fn is_resizable(&self) -> bool {
        false
    }

    /// Changes the size to `block_count` blocks, durably: blocks past a new end are lost, and
    /// blocks between an old end and a new one read as zeroes. Applies to all channels. May block:
    /// never called on the I/O path.
    ///
    /// # Errors
    ///
    /// What was found and what was expected, in one line; the size is then unchanged.
    fn resize(&self, block_count: u64) -> Result<(), Error> {
        Err(Error::usage(format!(
            "a size of {block_count} blocks was requested, expected the {} that it has: it cannot \
             change its size",
            self.limits().block_count
        )))
    }
}

/// Which reads tell that their blocks are unallocated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HoleReporting {
    /// None.
    #[default]
    Never,
    /// Reads with [`RequestFlags::HOLES`](crate::RequestFlags::HOLES), by their completion.
    AtReads,
    /// No block is ever allocated: each successful read is of a hole, and leaves the memory
    /// unchanged.
    Everywhere,
}

/// Memory of a medium: block `b` of the device is at `offset + b * block_size`.
///
/// The bytes change whenever the blocks are written, also while they are read: a block that is written
/// at the same time may be read as a mix of old and new bytes.
#[derive(Clone, Debug)]
pub struct MediumMemory {
    /// Region in the table that requests refer to.
    pub region: RegionId,
    /// Offset of the first block in the region.
    pub offset: u64,
    /// Keeps the region: it is neither freed nor reused while a clone exists, even if the device
    /// has been dropped.
    pub guard: MediumGuard,
}

/// Reference that keeps the memory of a medium.
pub type MediumGuard = Arc<dyn Any + Send + Sync>;

impl MediumMemory {
    /// The memory from `skip_bytes` on.
    #[must_use]
    pub fn at_byte(&self, skip_bytes: u64) -> Self {
        Self { offset: self.offset + skip_bytes, ..self.clone() }
    }
}

/// Run of blocks in one allocation state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockExtent {
    /// Number of blocks; zero only past the end.
    pub blocks: u64,
    /// Allocation state.
    pub kind: ExtentKind,
}

/// Allocation state of blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentKind {
    /// Data.
    Data,
    /// Zeroes, allocated.
    Zeroes,
    /// Zeroes, not allocated.
    Hole,
}

/// Geometry and limits of a block device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Logical block size in bytes; a power of two.
    pub block_size: u32,
    /// Metadata bytes per block, in separate segments. Zero means none.
    pub metadata_size: u16,
    /// Capacity in blocks.
    pub block_count: u64,
    /// Blocks in the largest data request.
    pub request_blocks_max: u32,
    /// Segments in the largest request.
    pub segments_max: u16,
    /// Boundary in blocks that requests should not cross. Zero means none.
    pub optimal_boundary_blocks: u32,
    /// Blocks that are written atomically with respect to power failure.
    pub atomic_write_blocks: u32,
    /// Maximum number of outstanding requests.
    pub depth_max: u32,
    /// Durability of completed writes.
    pub durability: Durability,
    /// Supported operations.
    pub operations: OperationSet,
}

/// Durability of a completed write at a power failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// On stable media.
    Persistent,
    /// In a volatile cache until a flush.
    VolatileCache,
    /// Nothing survives, flushed or not: the medium is memory.
    NonPersistent,
}

/// Bit set of operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OperationSet(u16);

impl OperationSet {
    /// Set of these operations.
    pub const fn from_operations(operations: &[Operation]) -> Self {
        let mut bits = 0;
        let mut index = 0;
        while index < operations.len() {
            bits |= 1 << operations[index] as u16;
            index += 1;
        }
        Self(bits)
    }

    /// Difference: this set without those in `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// The set as bits: that of an operation is `1 << operation as u16`.
    pub const fn bits(self) -> u16 {
        self.0
    }

    /// The set with `operation` added.
    #[must_use]
    pub const fn with(self, operation: Operation) -> Self {
        Self(self.0 | 1 << operation as u16)
    }

    /// Whether `operation` is in the set.
    #[inline]
    pub const fn has(self, operation: Operation) -> bool {
        self.0 & (1 << operation as u16) != 0
    }

    /// Intersection: the operations of a device stacked on two others.
    #[must_use]
    pub const fn intersection(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

impl Durability {
    /// The weaker of two, for a device stacked on two others.
    #[must_use]
    pub const fn weaker(self, other: Self) -> Self {
        match (self, other) {
            (Self::NonPersistent, _) | (_, Self::NonPersistent) => Self::NonPersistent,
            (Self::VolatileCache, _) | (_, Self::VolatileCache) => Self::VolatileCache,
            (Self::Persistent, Self::Persistent) => Self::Persistent,
        }
    }

    /// Description for messages.
    pub const fn describe(self) -> &'static str {
        match self {
            Self::Persistent => "completed writes are persistent",
            Self::VolatileCache => "completed writes are in a volatile cache until a flush",
            Self::NonPersistent => "volatile, lost when the process exits",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Durability, OperationSet};
    use crate::Operation;

    #[test]
    fn operation_set_has_only_the_listed_operations() {
        let set = OperationSet::from_operations(&[Operation::Read, Operation::Copy]);
        for operation in Operation::ALL {
            let expected = matches!(operation, Operation::Read | Operation::Copy);
            assert_eq!(set.has(operation), expected, "{operation:?}");
            assert_eq!(set.bits() >> operation as u16 & 1 == 1, expected);
            assert!(set.with(operation).has(operation));
        }
        let less = set.without(OperationSet::from_operations(&[Operation::Copy, Operation::Write]));
        assert_eq!(less, OperationSet::from_operations(&[Operation::Read]));
    }

    #[test]
    fn intersection_has_the_operations_of_both_sets() {
        let left =
            OperationSet::from_operations(&[Operation::Read, Operation::Write, Operation::Copy]);
        let right =
            OperationSet::from_operations(&[Operation::Read, Operation::Copy, Operation::Flush]);
        let common = OperationSet::from_operations(&[Operation::Read, Operation::Copy]);
        assert_eq!(left.intersection(right), common);
    }

    #[test]
    fn durability_of_two_devices_is_the_weaker_one() {
        let promises =
            [Durability::NonPersistent, Durability::VolatileCache, Durability::Persistent];
        for (index, left) in promises.into_iter().enumerate() {
            for (other, right) in promises.into_iter().enumerate() {
                assert_eq!(left.weaker(right), promises[index.min(other)]);
            }
        }
    }
}
