//! Rings in memory as the transport of a queue pair, with two doorbells.
//!
//! ```text
//!              tail -> .------------.  doorbell, once per flush
//!    submit ---------> | submission | ---------------------------> controller
//!                      '------------'                                  |
//!                      .------------.                                  |
//!    complete <------- | completion | <--------------------------------'
//!              head -> '------------'  doorbell, once per poll or later
//! ```

use core::convert::Infallible;
use core::sync::atomic::{Ordering, fence};

use tenmil_base::{
    CompletionEntry, CompletionRing, Dma, Doorbell, DoorbellStats, Instant, IoCompletion, IoStatus,
    Span, SubmissionRing,
};
use tenmil_wire::Command;

use super::{PointerOf, QueueDoorbell, QueueMemory, QueuePair, SplitTracker, Transport};
use crate::data_pointer::{ListPool, Pointer};
use crate::fast_path_options::{CompletionDoorbell, FastPathOptions};
use crate::namespace_queue::NamespaceView;
use crate::queue_link::QueueLinkEnd;
use crate::slot_table::{CompleteCursor, InvalidCompletion};

/// A submission ring and a completion ring, with their doorbells.
pub struct RingTransport<D: Dma, B: Doorbell> {
    submission: D::Submission,
    tail: u32,
    /// Last tail written to the doorbell.
    rung_tail: u32,
    submission_depth: u32,

    completion: D::Completion,
    head: u32,
    phase: bool,
    completion_depth: u32,
    /// Completion entries consumed since the last doorbell write.
    unrung: u32,
    /// Last submission head reported by the controller.
    fetched: u32,
    techniques: FastPathOptions,

    submission_rings: u64,
    completion_rings: u64,
    submission_doorbell: QueueDoorbell<D, B>,
    completion_doorbell: QueueDoorbell<D, B>,
    dma: D,
    memory: QueueMemory,
}

/// Parts of a queue pair over rings.
#[derive(Debug)]
pub struct QueueSetup<D, B> {
    /// The two rings.
    pub memory: QueueMemory,
    /// Tail doorbell of the submission queue.
    pub submission_doorbell: QueueDoorbell<D, B>,
    /// Head doorbell of the completion queue.
    pub completion_doorbell: QueueDoorbell<D, B>,
    /// Queue side of the link to the controller.
    pub link: QueueLinkEnd<Infallible>,
    /// Command timeout, after which a command is aborted.
    pub timeout: Span,
    /// Fast-path switches.
    pub techniques: FastPathOptions,
}

impl<D: Dma, B: Doorbell> QueuePair<RingTransport<D, B>> {
    /// Creates a queue pair over zeroed rings; rings in device memory are zeroed here. It submits nothing
    /// before its controller has set it to `Running`.
    pub fn new(dma: &D, setup: QueueSetup<D, B>) -> Self {
        let QueueSetup { memory, submission_doorbell, completion_doorbell, link, .. } = setup;
        let doorbells = [submission_doorbell, completion_doorbell];
        Self::with_transport(
            RingTransport::new(dma, memory, doorbells, setup.techniques),
            link,
            setup.timeout,
        )
    }

    /// Replaces the doorbell registers by the results of `wrap`: for a model of the path between host and
    /// register. It is generic, so it costs nothing where it is not used.
    pub fn map_registers<C: Doorbell>(
        self,
        mut wrap: impl FnMut(B) -> C,
    ) -> QueuePair<RingTransport<D, C>> {
        self.map_transport(|rings| RingTransport {
            submission_doorbell: rings.submission_doorbell.map(&mut wrap),
            completion_doorbell: rings.completion_doorbell.map(&mut wrap),
            submission: rings.submission,
            tail: rings.tail,
            rung_tail: rings.rung_tail,
            submission_depth: rings.submission_depth,
            completion: rings.completion,
            head: rings.head,
            phase: rings.phase,
            completion_depth: rings.completion_depth,
            unrung: rings.unrung,
            fetched: rings.fetched,
            techniques: rings.techniques,
            submission_rings: rings.submission_rings,
            completion_rings: rings.completion_rings,
            dma: rings.dma,
            memory: rings.memory,
        })
    }

    /// Consumes completion entries, writes completions into `places` and returns their number.
    #[inline(always)]
    fn take_completions<P: SplitTracker>(
        &mut self,
        places: &mut [IoCompletion],
        parents: &mut P,
    ) -> usize {
        let rings = &mut self.transport;
        // Most polls find nothing, and must be cheap.
        if rings.completion.load(rings.head, rings.phase).is_none() {
            rings.write_completion_doorbell_if_due();
            return 0;
        }
        let before = rings.unrung;
        let (mut written, mut last) = (0, 0);
        // Each entry yields at most one completion; the limit also bounds the loop for an endless stream
        // of invalid entries.
        let mut limit = places.len().min(rings.completion_depth as usize);
        while written < limit {
            let taken = if self.transport.techniques.completion_doorbell == CompletionDoorbell::Each
            {
                self.consume_one(&mut places[written], &mut last)
            } else {
                self.consume_simple(&mut places[written..limit], &mut last)
            };
            written += taken.plain;
            match taken.end {
                ScanEnd::Empty => break,
                ScanEnd::BatchFull => {}
                ScanEnd::NeedsSlowPath(entry) => {
                    match self.complete_slow_path(completion_fields(&entry), parents) {
                        Some(answer) => {
                            places[written] = answer;
                            written += 1;
                        }
                        None => limit -= 1,
                    }
                }
            }
        }
        if self.transport.unrung == before {
            self.transport.write_completion_doorbell_if_due();
        } else if let Err(invalid_completion) = self.transport.record_submission_head(last) {
            self.report_invalid_completion(invalid_completion);
        }
        written
    }

    /// Consumes completions of commands without flags, up to the end of the ring. Stores the second half
    /// of the last entry in `last`.
    ///
    /// Not inlined: the separate loop keeps all its values in registers.
    #[inline(never)]
    #[expect(clippy::cast_possible_truncation, reason = "no more than the ring has entries")]
    fn consume_simple(&mut self, places: &mut [IoCompletion], last: &mut u64) -> RingScan {
        let mut slots = self.slots.complete_cursor();
        let rings = &mut self.transport;
        let run = places.len().min((rings.completion_depth - rings.head) as usize);
        let (head, phase) = (rings.head, rings.phase);
        let mut unusual = None;
        let plain =
            rings.completion.load_entries(head, phase, &mut places[..run], |entry, place| {
                let is_simple = complete_simple_entry(&mut slots, &entry, place);
                if !is_simple {
                    unusual = Some(entry);
                }
                is_simple
            });
        slots.finish(plain);
        let count = plain as u32 + u32::from(unusual.is_some());
        if let Some(entry) =
            count.checked_sub(1).and_then(|last| rings.completion.load(head + last, phase))
        {
            *last = entry[1];
        }
        rings.advance_completion_head(count);
        let end = match unusual {
            Some(entry) => ScanEnd::NeedsSlowPath(entry),
            None if plain == run => ScanEnd::BatchFull,
            None => ScanEnd::Empty,
        };
        RingScan { plain, end }
    }

    /// Consumes one completion and writes the doorbell.
    fn consume_one(&mut self, place: &mut IoCompletion, last: &mut u64) -> RingScan {
        let before = self.transport.unrung;
        let taken = self.consume_simple(core::slice::from_mut(place), last);
        if self.transport.unrung != before {
            self.transport.write_completion_doorbell();
        }
        taken
    }
}

impl<D: Dma, B: Doorbell> RingTransport<D, B> {
    /// Rings in zeroed memory, empty; those in device memory are zeroed here. The doorbells are those of
    /// the submission queue and of the completion queue.
    pub(crate) fn new(
        dma: &D,
        memory: QueueMemory,
        [submission_doorbell, completion_doorbell]: [QueueDoorbell<D, B>; 2],
        techniques: FastPathOptions,
    ) -> Self {
        let QueueMemory { submission_depth, completion_depth, .. } = memory;
        let mut rings = Self {
            submission: dma.submission_ring(memory.submission, submission_depth),
            tail: 0,
            rung_tail: 0,
            submission_depth,
            completion: dma.completion_ring(memory.completion, completion_depth),
            head: 0,
            phase: true,
            completion_depth,
            unrung: 0,
            fetched: 0,
            techniques,
            submission_rings: 0,
            completion_rings: 0,
            submission_doorbell,
            completion_doorbell,
            dma: dma.clone(),
            memory,
        };
        if memory.is_in_device {
            rings.zero_submission_ring();
        }
        rings
    }

    /// Memory of the rings, which the controller frees.
    pub fn memory(&self) -> QueueMemory {
        self.memory
    }

    #[cfg(test)]
    pub(crate) fn dma(&self) -> &D {
        &self.dma
    }

    /// Zeroes the submission ring with the store instruction of its memory, which device memory may
    /// require.
    fn zero_submission_ring(&mut self) {
        for index in 0..self.submission_depth {
            self.submission.store(index, &[0; 8]);
        }
    }

    /// Writes the submission doorbell. The controller can post as many completions as there are commands
    /// in flight. If it might find fewer free entries than that, the completion doorbell is written
    /// before the new commands are announced.
    ///
    /// Both doorbells are written consecutively: they share a cache line that an emulated controller
    /// polls, and two separate writes would cost it two misses.
    fn write_submission_doorbell(&mut self, in_flight: u32) {
        let is_due =
            self.unrung > 0 && self.techniques.completion_doorbell == CompletionDoorbell::Poll;
        if is_due || self.unrung + in_flight >= self.completion_depth {
            self.write_completion_doorbell();
        }
        self.submission.order_before_doorbell();
        self.submission_doorbell.ring(self.tail);
        self.rung_tail = self.tail;
        self.submission_rings += 1;
    }

    /// Writes the completion doorbell if it is still due, because nothing was submitted since the entries
    /// were consumed.
    #[inline(always)]
    fn write_completion_doorbell_if_due(&mut self) {
        if self.unrung > 0 && self.techniques.completion_doorbell == CompletionDoorbell::Poll {
            self.write_completion_doorbell();
        }
    }

    #[inline(always)]
    fn advance_completion_head(&mut self, count: u32) {
        self.head += count;
        self.unrung += count;
        if self.head >= self.completion_depth {
            self.head = 0;
            self.phase = !self.phase;
        }
    }

    /// Checks the submission head (SQHD): it must be between its previous value and the tail. Only the
    /// last completion of a poll is checked.
    #[inline(always)]
    fn record_submission_head(&mut self, second_half: u64) -> Result<(), InvalidCompletion> {
        let depth = self.submission_depth;
        let before = ring_distance(self.fetched, self.tail, depth);
        let head = low_half(second_half);
        let fetched = u32::from(head);
        if fetched >= depth || ring_distance(fetched, self.tail, depth) > before {
            return Err(InvalidCompletion::SubmissionHead { head });
        }
        self.fetched = fetched;
        Ok(())
    }

    #[inline]
    fn write_completion_doorbell(&mut self) {
        self.completion_doorbell.ring(self.head);
        self.unrung = 0;
        self.completion_rings += 1;
    }
}

impl<D: Dma, B: Doorbell> Transport for RingTransport<D, B> {
    type Pointers = ListPool<D>;
    type Attachment = Infallible;

    fn create_data_pointers(&self, view: &NamespaceView, depth: u32) -> Option<ListPool<D>> {
        let NamespaceView { transfer_bytes_max, page_bytes, sgl, .. } = *view;
        let transfer_bytes_max =
            if transfer_bytes_max == 0 { u32::MAX } else { transfer_bytes_max };
        ListPool::allocate(&self.dma, depth, transfer_bytes_max, page_bytes, sgl)
    }

    fn depth(&self) -> u16 {
        self.memory.in_flight_max()
    }

    #[inline]
    fn is_eager(&self) -> bool {
        !self.techniques.doorbell_batching
    }

    #[inline(always)]
    fn submit_each<I>(
        &mut self,
        items: &[I],
        mut make: impl FnMut(&I) -> Option<(Command, PointerOf<Self>)>,
    ) -> usize {
        let mut count = 0;
        loop {
            let room = (self.submission_depth - self.tail) as usize;
            let run = &items[count..];
            let run = &run[..run.len().min(room)];
            let stored = self.submission.store_built_commands(self.tail, run, |item| {
                let (command, pointer) = make(item)?;
                Some(pointer.store_in(command).0)
            });
            count += stored;
            self.tail = advance_index(self.tail, entry_count_u32(stored), self.submission_depth);
            if stored < room || count == items.len() {
                return count;
            }
        }
    }

    #[inline(always)]
    fn submit(&mut self, command: Command, pointer: Pointer, _: Option<&mut ListPool<D>>) {
        let (index, next) = (self.tail, self.tail + 1);
        self.tail = if next == self.submission_depth { 0 } else { next };
        self.submission.store(index, &pointer.store_in(command).0);
    }

    #[inline]
    fn flush(&mut self, in_flight: u32) {
        if self.tail != self.rung_tail {
            self.write_submission_doorbell(in_flight);
        }
    }

    #[inline(always)]
    fn receive_completions<P: SplitTracker>(
        pair: &mut QueuePair<Self>,
        _: Instant,
        places: &mut [IoCompletion],
        parents: &mut P,
    ) -> usize {
        pair.take_completions(places, parents)
    }

    fn arm(&mut self, takes: bool) -> bool {
        if self.unrung > 0 {
            self.write_completion_doorbell();
        }
        // The controller posts an entry and then checks whether to interrupt; the host enables interrupts
        // and then checks for an entry. With a barrier between, one of them sees the other.
        fence(Ordering::SeqCst);
        takes && self.completion.load(self.head, self.phase).is_some()
    }

    fn attach(&mut self, attachment: Infallible) {
        match attachment {}
    }

    fn stop_sending(&mut self) {
        // Nothing that the doorbells have not announced yet will be announced.
        (self.rung_tail, self.unrung) = (self.tail, 0);
    }

    fn drop_outstanding(&mut self) {
        let memory = self.memory;
        self.dma
            .fill(memory.completion, 0)
            .expect("the completion ring lies in memory of the driver");
        if memory.is_in_device {
            self.zero_submission_ring();
        } else {
            let filled = self.dma.fill(memory.submission, 0);
            filled.expect("the submission ring lies in memory of the driver");
        }
        (self.tail, self.rung_tail, self.fetched) = (0, 0, 0);
        (self.head, self.phase, self.unrung) = (0, true, 0);
        self.submission_doorbell.reset_to_zero();
        self.completion_doorbell.reset_to_zero();
    }

    fn doorbell_stats(&self, commands: u64) -> DoorbellStats {
        let submission_writes =
            self.submission_doorbell.register_write_count(self.submission_rings);
        let completion_writes =
            self.completion_doorbell.register_write_count(self.completion_rings);
        DoorbellStats {
            submission: self.submission_rings,
            completion: self.completion_rings,
            registers: submission_writes + completion_writes,
            cmb_commands: if self.memory.is_in_device { commands } else { 0 },
        }
    }
}

/// Converts a count of entries, of which no ring has more than 32 bits.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "a ring has at most 65 536 entries")]
const fn entry_count_u32(count: usize) -> u32 {
    count as u32
}

/// Progress of a scan of the ring.
struct RingScan {
    /// Completions written for commands without flags.
    plain: usize,
    end: ScanEnd,
}

/// Reason why the scan stopped.
enum ScanEnd {
    /// The ring has no further entries.
    Empty,
    /// No space for completions is left, or the end of the ring is reached.
    BatchFull,
    /// This entry needs the slow path.
    NeedsSlowPath(CompletionEntry),
}

/// Completes a command without flags; returns false, without effect, if it has flags. The fields are
/// stored individually: a completion assembled elsewhere and copied would stall on its parts.
#[inline(always)]
fn complete_simple_entry(
    slots: &mut CompleteCursor<'_>,
    entry: &CompletionEntry,
    place: &mut IoCompletion,
) -> bool {
    let Some(token) = slots.complete_simple(dword3_in(entry)) else { return false };
    place.token = token;
    place.status = status_in(entry);
    place.result = result_in(entry);
    true
}

/// Fields of a completion in the two halves in which it is loaded (Base 2.1 §4.2.1).
///
/// ```text
///   first   DW1 63:32 | DW0 31:0
///   second  status 63:49 | phase 48 | CID 47:32 | SQID 31:16 | SQHD 15:0
/// ```
#[inline]
const fn completion_fields(entry: &CompletionEntry) -> (u16, IoStatus, u32) {
    (low_half(entry[1] >> 32), status_in(entry), result_in(entry))
}

#[inline]
const fn dword3_in(entry: &CompletionEntry) -> u32 {
    (entry[1] >> 32) as u32
}

#[inline]
const fn status_in(entry: &CompletionEntry) -> IoStatus {
    IoStatus(low_half(entry[1] >> 49))
}

#[inline]
#[expect(clippy::cast_possible_truncation, reason = "dword 0 is the low half")]
const fn result_in(entry: &CompletionEntry) -> u32 {
    entry[0] as u32
}

#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the low bits are what is wanted")]
const fn low_half(bits: u64) -> u16 {
    bits as u16
}

/// `index` advanced by `count`, which is less than `depth`.
#[inline]
const fn advance_index(index: u32, count: u32, depth: u32) -> u32 {
    let next = index + count;
    if next < depth { next } else { next - depth }
}

/// Number of entries from `from` to `to` in a ring.
#[inline]
const fn ring_distance(from: u32, to: u32, depth: u32) -> u32 {
    let ahead = to.wrapping_sub(from);
    if to < from { ahead.wrapping_add(depth) } else { ahead }
}
