//! Transport of a queue pair: how commands reach the controller, and how completions come back.
//!
//! | transport | commands | completions | attached to |
//! |---|---|---|---|
//! | [`RingTransport`](super::RingTransport) | stored into a ring, announced by a doorbell | polled from a ring, by phase bits | nothing: the rings are allocated with it |
//! | NVMe/TCP | queued as capsules, sent by `flush` | received from the connection | a connection, another one after each reset |
//!
//! Everything else is the same for all of them: slots, deadlines, states, splitting, error injection.

use tenmil_base::{DoorbellStats, Instant, IoCompletion, Segment};
use tenmil_wire::Command;

use super::{QueuePair, SplitTracker};
use crate::data_pointer::{BuiltDataPointer, DataPointerError, SegmentListCursor};
use crate::namespace_queue::NamespaceView;

/// Carries the commands of one queue pair to its controller, and the completions back.
pub trait Transport: Sized {
    /// Builder of the data pointers of a namespace's commands.
    type Pointers: DataPointers;
    /// What the controller creates for each run of the queue: a connection.
    /// [`Infallible`](core::convert::Infallible) if nothing is.
    type Attachment: Send;

    /// Creates the builder for a namespace, for `depth` commands in flight. `None` if there is no memory
    /// left for its lists.
    fn create_data_pointers(&self, view: &NamespaceView, depth: u32) -> Option<Self::Pointers>;

    /// Maximum commands in flight.
    fn depth(&self) -> u16;

    /// Whether each command is sent at once: the owner flushes after each of them.
    #[inline]
    fn is_eager(&self) -> bool {
        false
    }

    /// Queues the results of `make` for `items`. Stops when `make` returns `None`. Returns the number
    /// queued. A command has its identifier; its data are those of the pointer.
    fn submit_each<I>(
        &mut self,
        items: &[I],
        make: impl FnMut(&I) -> Option<(Command, PointerOf<Self>)>,
    ) -> usize;

    /// Queues one command. A pointer with a list refers to `lists`.
    fn submit(
        &mut self,
        command: Command,
        pointer: PointerOf<Self>,
        lists: Option<&mut Self::Pointers>,
    );

    /// Makes all queued commands visible to the controller. `in_flight` counts them, too.
    fn flush(&mut self, in_flight: u32);

    /// Receives completions into `places`, and returns their number.
    fn receive_completions<P: SplitTracker>(
        pair: &mut QueuePair<Self>,
        now: Instant,
        places: &mut [IoCompletion],
        parents: &mut P,
    ) -> usize;

    /// Prepares for sleeping. Returns whether a completion has arrived, if `takes` them.
    fn arm(&mut self, takes: bool) -> bool;

    /// The queue runs, over `attachment`.
    fn attach(&mut self, attachment: Self::Attachment);

    /// From now on nothing is sent, and a connection is closed: a reset or the deletion begins.
    fn stop_sending(&mut self);

    /// The controller can no longer access memory: commands that are queued or in flight are dropped, and
    /// both directions start empty. [`stop_sending`](Self::stop_sending) may not have come before.
    fn drop_outstanding(&mut self);

    /// Statistics of its doorbells, of which `commands` were submitted in total.
    fn doorbell_stats(&self, commands: u64) -> DoorbellStats;
}

/// Builds data pointers: what a command of this transport carries for its data.
pub trait DataPointers {
    /// A data pointer. By default that of a command without data, or with a pointer of its own.
    type Pointer: Copy + Default;

    /// Prepared form of [`pointer_to_contiguous`](Self::pointer_to_contiguous), for many segments within a page and with the
    /// region and length of `like`. Returns `None` for others.
    fn contiguous_run(&self, like: Segment) -> impl Fn(Segment) -> Option<Self::Pointer>;

    /// Pointer to one segment. `None` if it needs a list, or cannot be described.
    fn pointer_to_contiguous(&self, segment: Segment) -> Option<Self::Pointer>;

    /// Builds a pointer to `len_max` bytes from `cursor` on, or to as many of them as one command can
    /// transfer, in multiples of `granule`, of which `len_max` is one. A list belongs to slot `index`.
    fn build(
        &mut self,
        index: usize,
        cursor: SegmentListCursor<'_>,
        len_max: u32,
        granule: u32,
    ) -> Result<BuiltDataPointer<Self::Pointer>, DataPointerError>;

    /// Stores `bytes` in memory of slot `index`, and returns a pointer to them.
    fn store_data(&self, index: usize, bytes: &[u8]) -> Result<Self::Pointer, DataPointerError>;

    /// Address of metadata (MPTR) from `cursor` on, and how many of `len_max` bytes it covers.
    fn metadata_address(
        &self,
        cursor: SegmentListCursor<'_>,
        len_max: u32,
    ) -> Result<(u64, u32), DataPointerError>;

    /// Bytes that one command can always transfer, whatever the layout of its memory.
    fn transfer_bytes_max(&self) -> u32;

    /// Frees the memory of lists. No command that refers to it may be in flight.
    fn release(&self);
}

/// What a transport is attached to.
pub type AttachmentOf<T> = <T as Transport>::Attachment;

/// Data pointer of a transport's commands.
pub type PointerOf<T> = <<T as Transport>::Pointers as DataPointers>::Pointer;
