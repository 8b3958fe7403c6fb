//! The seam every block device stands behind.

use crate::request::Operation;
use crate::{Answers, Instant, Request, Reservations, Segment, WakeSource};

/// A block device as seen by one thread: the one trait that backends implement, and the one dynamic
/// call on the way of an I/O. Both of its hot calls take batches, so its price is paid per batch.
///
/// A backend may answer in any order and many turns later. It answers every request it has taken
/// exactly once, and until it has, it may touch the memory that the request names.
///
/// To drop a backend gives up what it has not answered: nobody learns how that ended, and once the
/// drop has returned, nothing touches the memory that those requests name. Where others work on them,
/// a device or another thread, the drop waits until they have stopped.
pub trait Backend: Send {
    /// Geometry and limits. Constant until an event says otherwise.
    fn limits(&self) -> &Limits;

    /// Takes requests off the front of `requests`, and returns how many it took. Fewer than all
    /// means that it is full: the rest are the caller's again, unread. One that is full without owing
    /// an answer makes room in calls of this: nobody has to poll it.
    ///
    /// `segments` is the table into which the requests' segment numbers point; it is only read
    /// during the call.
    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize;

    /// Makes what was submitted visible to whoever works on it: doorbells, system calls. Once per
    /// turn, or at once by a caller to whom latency matters most.
    fn flush(&mut self) {}

    /// Does a bounded amount of work and appends what has ended. Returns how many that were.
    fn poll(&mut self, now: Instant, answers: &mut Answers) -> usize;

    /// How often it has rung a doorbell, if it has any.
    fn doorbells(&self) -> DoorbellCounts {
        DoorbellCounts::default()
    }

    /// When this backend wants to be polled even if nothing happens and its wake source is silent:
    /// a deadline of its own, or [`Instant::NEVER`].
    fn wake_at(&self) -> Instant {
        Instant::NEVER
    }

    /// What wakes a thread that sleeps while this backend owes an answer. Constant for as long as
    /// the backend lives.
    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::Nothing
    }

    /// Whether the kernel of this machine does all the work, on processors that it would have to
    /// share with one who looks for answers: then a thread with nothing else to do sleeps at once
    /// rather than after a spell of looking. Constant for as long as the backend lives. A backend
    /// that stands on others says so if all of them do.
    fn is_done_by_kernel(&self) -> bool {
        false
    }

    /// Gets ready for a sleep of its thread: makes everything submitted visible, has the wake source
    /// signal from now on, and looks once more. True if there is an answer to be polled, or one may
    /// come that wakes nobody: then the thread must not sleep. False if whatever comes from now on
    /// wakes it.
    ///
    /// Without a wake source of its own a backend keeps its thread awake.
    fn arm(&mut self) -> bool {
        true
    }

    /// The thread is awake again and polls: the wake source need not signal. Also called if `arm`
    /// was and the thread has not slept.
    fn disarm(&mut self) {}

    /// Ends the client of this channel. What was taken and not begun does not begin any more, and until
    /// the writes in flight are answered, no channel to the same blocks begins a request that overlaps
    /// one of them: a client that gets no answer to a write would otherwise see it land over what is
    /// written later. The caller submits nothing more, and polls until everything is answered.
    ///
    /// Only a device that knows all channels to its blocks can do that; all others do nothing.
    fn fence_writes(&mut self) {}

    /// How often the device is known to have lost completed writes: a count of the device, which no
    /// channel lags behind once it has failed a flush for a loss, or has read what a device is left with that
    /// it was connected to anew. Zero if it does not count them. Asked after each poll: it takes no lock.
    fn losses(&self) -> u64 {
        0
    }

    /// The owner of this channel has made good what was lost in the first `count` losses, as
    /// [`losses`](Self::losses) counts them: no flush fails for these any more, of those under way and of
    /// those that come. It fails for all later ones. A device that does not count does nothing.
    fn heed_losses(&mut self, count: u64) {
        let _ = count;
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
    fn acknowledge_losses(&mut self) -> Result<(), String> {
        Ok(())
    }
}

impl<B: Backend + ?Sized> Backend for Box<B> {
    fn limits(&self) -> &Limits {
        (**self).limits()
    }

    #[inline]
    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        (**self).submit(now, requests, segments)
    }

    #[inline]
    fn flush(&mut self) {
        (**self).flush();
    }

    #[inline]
    fn poll(&mut self, now: Instant, answers: &mut Answers) -> usize {
        (**self).poll(now, answers)
    }

    fn doorbells(&self) -> DoorbellCounts {
        (**self).doorbells()
    }

    fn wake_at(&self) -> Instant {
        (**self).wake_at()
    }

    fn wake_source(&self) -> WakeSource<'_> {
        (**self).wake_source()
    }

    fn is_done_by_kernel(&self) -> bool {
        (**self).is_done_by_kernel()
    }

    fn arm(&mut self) -> bool {
        (**self).arm()
    }

    fn disarm(&mut self) {
        (**self).disarm();
    }

    fn fence_writes(&mut self) {
        (**self).fence_writes();
    }

    fn losses(&self) -> u64 {
        (**self).losses()
    }

    fn heed_losses(&mut self, count: u64) {
        (**self).heed_losses(count);
    }

    fn acknowledge_losses(&mut self) -> Result<(), String> {
        (**self).acknowledge_losses()
    }
}

/// How often doorbells were rung.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DoorbellCounts {
    /// Submission doorbells.
    pub submission: u64,
    /// Completion doorbells.
    pub completion: u64,
    /// How many of both were written to a register; shadows in memory spare the others.
    pub registers: u64,
    /// Commands that were stored into a controller memory buffer, so that no fetch of them crosses
    /// the bus after the doorbell.
    pub cmb_commands: u64,
}

impl DoorbellCounts {
    /// Those of two.
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

/// Where backends come from: one medium, and a channel to it for every thread that wants one.
pub trait Medium: Send + Sync {
    /// Geometry and limits of every channel.
    fn limits(&self) -> Limits;
    /// Opens a channel: a backend of its own over the same blocks. The error says, in a line, what
    /// was found and what was expected.
    fn channel(&self) -> Result<Box<dyn Backend>, String>;

    /// How many channels may be open at once: queue pairs, connections.
    fn channels_max(&self) -> u32 {
        u32::MAX
    }

    /// Why nothing that it is asked will ever succeed any more, in a line; none while it may.
    fn lost(&self) -> Option<String> {
        None
    }

    /// The name by which the device itself is known: the same for every opener and by every path, and no
    /// other device's; none if it has none. Of an NVMe namespace its UUID, NGUID or EUI-64, else the
    /// controller's serial number with the namespace's identifier.
    fn identity(&self) -> Option<String> {
        None
    }

    /// Reservations of the namespace that this device is, if they can exclude other hosts from writing: for a
    /// device that is a whole namespace, and not for one that stands on others.
    fn reservations(&self) -> Option<&dyn Reservations> {
        None
    }

    /// What the blocks from `lba` on hold, as far as that is known without reading them. May block:
    /// never called on the way of an I/O.
    ///
    /// # Errors
    ///
    /// What was found and what was expected, in a line.
    fn extent(&self, lba: u64) -> Result<Extent, String> {
        let blocks = self.limits().block_count.saturating_sub(lba);
        Ok(Extent { blocks, holds: Holds::Data })
    }

    /// How many blocks there are now: more than before, if somebody else has made it longer, and then
    /// all channels go by it. May block: never called on the way of an I/O.
    ///
    /// # Errors
    ///
    /// What was found and what was expected, in a line.
    fn notice_size(&self) -> Result<u64, String> {
        Ok(self.limits().block_count)
    }

    /// Whether its channels take reads and writes whose memory was lent to this process but lies
    /// outside of it, and what that memory must be aligned to. Then nothing on the way of such a
    /// request may look at its data.
    ///
    /// # Errors
    ///
    /// Why they do not, in a line.
    fn takes_lent(&self) -> Result<u32, String> {
        Err("it works on data in memory of this process, expected a file, a block device or an SSD \
             behind a network"
            .into())
    }

    /// Whether [`resize`](Self::resize) may do what it is asked.
    fn is_resizable(&self) -> bool {
        false
    }

    /// Makes it `block_count` blocks long, durably: what lies past a new end is lost, and what lies
    /// between an old end and a new one reads as zeroes. From then on all channels go by it. May
    /// block: never called on the way of an I/O.
    ///
    /// # Errors
    ///
    /// What was found and what was expected, in a line; then it is as long as it was.
    fn resize(&self, block_count: u64) -> Result<(), String> {
        Err(format!(
            "a size of {block_count} blocks was asked for, expected the {} that it has: it cannot \
             change its size",
            self.limits().block_count
        ))
    }
}

/// Blocks that are alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// How many there are; zero only past the end.
    pub blocks: u64,
    /// What they hold.
    pub holds: Holds,
}

/// What blocks hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holds {
    /// Whatever a read returns.
    Data,
    /// Zeroes, and they take room.
    Zeroes,
    /// Zeroes, and they take no room.
    Hole,
}

/// What a backend can do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes in a logical block; a power of two.
    pub block_size: u32,
    /// Metadata bytes that go with each block, in segments of their own. Zero means none.
    pub metadata_size: u16,
    /// Blocks on the device.
    pub block_count: u64,
    /// Blocks in the largest request that moves data.
    pub request_blocks_max: u32,
    /// Segments in the largest request.
    pub segments_max: u16,
    /// Requests should not cross multiples of this many blocks. Zero means no such boundary.
    pub optimal_boundary_blocks: u32,
    /// Blocks that are written all or not at all, whatever happens to the power.
    pub atomic_write_blocks: u32,
    /// Requests that may be outstanding.
    pub depth_max: u32,
    /// What an answered write is worth.
    pub durability: Durability,
    /// Which operations there are.
    pub support: Support,
}

/// What an answered write is worth when the power fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// It is on stable media.
    Stable,
    /// It is in a volatile cache until a flush.
    VolatileCache,
    /// Nothing survives, flush or not: the medium itself is memory.
    None,
}

/// A set of operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Support(u16);

impl Support {
    /// The set that holds just these.
    pub const fn of(operations: &[Operation]) -> Self {
        let mut bits = 0;
        let mut index = 0;
        while index < operations.len() {
            bits |= 1 << operations[index] as u16;
            index += 1;
        }
        Self(bits)
    }

    /// The set without those that are in `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// The set as bits: that of an operation is `1 << operation as u16`.
    pub const fn bits(self) -> u16 {
        self.0
    }

    /// The set with `operation` in it.
    #[must_use]
    pub const fn with(self, operation: Operation) -> Self {
        Self(self.0 | 1 << operation as u16)
    }

    /// Whether `operation` is in the set.
    #[inline]
    pub const fn has(self, operation: Operation) -> bool {
        self.0 & (1 << operation as u16) != 0
    }

    /// What is in both sets: what a device can do that stands on two.
    #[must_use]
    pub const fn common(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }
}

impl Durability {
    /// What is promised where one of two may have to keep it.
    #[must_use]
    pub const fn weaker(self, other: Self) -> Self {
        match (self, other) {
            (Self::None, _) | (_, Self::None) => Self::None,
            (Self::VolatileCache, _) | (_, Self::VolatileCache) => Self::VolatileCache,
            (Self::Stable, Self::Stable) => Self::Stable,
        }
    }

    /// The promise in words, as it appears in descriptions.
    pub const fn describe(self) -> &'static str {
        match self {
            Self::Stable => "an answered write is stable",
            Self::VolatileCache => "an answered write is in a volatile cache until a flush",
            Self::None => "nothing survives",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Durability, Support};
    use crate::Operation;

    #[test]
    fn a_set_holds_what_was_put_in_and_nothing_else() {
        let set = Support::of(&[Operation::Read, Operation::Copy]);
        for operation in Operation::ALL {
            let expected = matches!(operation, Operation::Read | Operation::Copy);
            assert_eq!(set.has(operation), expected, "{operation:?}");
            assert_eq!(set.bits() >> operation as u16 & 1 == 1, expected);
            assert!(set.with(operation).has(operation));
        }
        let less = set.without(Support::of(&[Operation::Copy, Operation::Write]));
        assert_eq!(less, Support::of(&[Operation::Read]));
    }

    #[test]
    fn two_sets_share_what_is_in_both() {
        let left = Support::of(&[Operation::Read, Operation::Write, Operation::Copy]);
        let right = Support::of(&[Operation::Read, Operation::Copy, Operation::Flush]);
        let common = Support::of(&[Operation::Read, Operation::Copy]);
        assert_eq!(left.common(right), common);
    }

    #[test]
    fn a_promise_is_as_good_as_the_weaker_of_two() {
        let promises = [Durability::None, Durability::VolatileCache, Durability::Stable];
        for (index, left) in promises.into_iter().enumerate() {
            for (other, right) in promises.into_iter().enumerate() {
                assert_eq!(left.weaker(right), promises[index.min(other)]);
            }
        }
    }
}
