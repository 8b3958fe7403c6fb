//! Fast path: commands that need exactly one request, to the block device and back.

use tenmil_base::{
    CompletionBatch, DirectAccessWindow, HostMemory, Instant, IoCompletion, IoCounters, Operation,
    Request, RequestFlags, SIMPLE_IO_WORDS, Segment,
};
use tenmil_wire::{Command, Status};

use super::Executor;
use super::channel::RequestBatchBuilder;
use super::completion_counter::{CompletionCounter, CountReleases, NotCounted, StartTime};
use super::namespace_table::{FAST_READ, FAST_WRITE, FastPathNamespace};
use super::slot_table::{AllocCursor, Slot, SlotState, SlotTable};

/// Bits of dword 12 supported by the fast path: NLB, FUA and LR (NVM 1.1 §3.3.4, §3.3.6).
const CDW12_FAST: u32 = 0xc000_ffff;

/// Smallest read whose data may stay in the medium's memory. Below it, the copy costs less than what a
/// completion of its own does.
pub(super) const IN_PLACE_BYTES_MIN: u32 = 16 << 10;

/// Run of commands that are being begun: same operation, block count, namespace and flags, and data in the
/// same direct window. The lookups are done once for the whole run.
pub(crate) struct FastPathRun<'a> {
    kind: FastPathKind,
    slot: Slot,
    window: Option<DirectAccessWindow>,
    slot_alloc: AllocCursor<'a>,
    batch: RequestBatchBuilder<'a>,
    /// Counters of commands that begin; `None` if those that complete are counted.
    begun: Option<&'a IoCounters>,
}

impl<H: HostMemory> Executor<H> {
    /// Whether commands may begin as a run: no half of a fused pair waits, and no namespace is barred.
    #[inline(always)]
    pub fn can_begin_run(&self) -> bool {
        self.blocked_nsid.is_none() && self.paused == 0
    }

    /// Begins the command in `words`, if it is of the fast path, and then those of its kind that `follow`
    /// passes to [`FastPathRun::begin_command`]; it returns their number, and something for the caller. There must
    /// be [`free_count`](Self::free_count) for all, and they [`can_begin_run`](Self::can_begin_run).
    #[inline(always)]
    pub(crate) fn begin_run<R>(
        &mut self,
        stream: u16,
        words: &[u64; 8],
        follow: impl FnOnce(&mut FastPathRun<'_>) -> (u32, R),
    ) -> Option<(u32, R)> {
        let nsid = high_32_bits(words[0]);
        let entry = self.namespace_table.fast_path_entry(nsid).copied()?;
        let kind = FastPathKind::classify(
            words,
            &entry,
            self.page_bytes,
            (self.write_flags, self.iteration_start),
        )?;
        let channel = self.namespace_table.channel(entry.channel)?;
        let mut simple_words = [0; 4];
        for (place, word) in simple_words.iter_mut().zip(SIMPLE_IO_WORDS) {
            *place = words[word];
        }
        let Ok(Some(segment)) = self.host.resolve(simple_words[1], kind.len_bytes) else {
            return None;
        };
        if !kind.matches(simple_words) || self.slots.free_count() == 0 {
            return None;
        }
        let window = self.host.direct_access_window(kind.len_bytes);
        let slot = kind.slot.with_stream(stream);
        let (batch, begun) = channel.start_batch(kind.template);
        let slot_alloc = self.slots.allocate_cursor();
        let mut run = FastPathRun { kind, slot, window, slot_alloc, batch, begun };
        // From here on, every accepted command has a slot and a batched request.
        run.add_command(simple_words, segment);
        let (count, rest) = follow(&mut run);
        run.finish(count + 1);
        Some((count + 1, rest))
    }

    /// Begins the commands at the front of `commands` that are of the fast path and alike. Returns their
    /// number. There must be [`free_count`](Self::free_count) for all, and no half of a fused pair may wait:
    /// see [`can_begin_run`](Self::can_begin_run).
    #[inline]
    pub fn begin_segment_commands<'a>(
        &mut self,
        stream: u16,
        mut commands: impl Iterator<Item = (u16, &'a Command, Segment)>,
    ) -> usize {
        let Some((id, command, segment)) = commands.next() else { return 0 };
        let mut words = command.0;
        let word = words[0] & !CID;
        words[0] &= !PSDT;
        let Some(entry) = self.namespace_table.fast_path_entry(command.nsid()).copied() else {
            return 0;
        };
        let kind = FastPathKind::classify(
            &words,
            &entry,
            u64::MAX,
            (self.write_flags, self.iteration_start),
        );
        let Some(mut kind) = kind.filter(|kind| kind.len_bytes == segment.len_bytes) else {
            return 0;
        };
        let Some(channel) = self.namespace_table.channel(entry.channel) else { return 0 };
        kind.word = word;
        if kind.len_bytes >= self.in_place_bytes_min && channel.medium.is_some() {
            kind.permit_in_place(entry.block_shift);
        }
        let slot = kind.slot.with_stream(stream);
        let (batch, begun) = channel.start_batch(kind.template);
        let (window, slot_alloc) = (None, self.slots.allocate_cursor());
        let mut run = FastPathRun { kind, slot, window, slot_alloc, batch, begun };
        let mut count = 0;
        let mut next = Some((id, command, segment));
        while let Some((id, command, segment)) = next {
            let Command([word, _, _, _, _, lba, cdw12, _]) = *command;
            let is_alike = segment.len_bytes == run.kind.len_bytes
                && run.kind.matches([word, 0, lba, cdw12])
                && run.add_command([u64::from(id) << 16, 0, lba, 0], segment);
            if !is_alike {
                break;
            }
            count += 1;
            next = commands.next();
        }
        run.finish(count);
        count as usize
    }

    /// Submits the batched requests of all channels.
    #[inline]
    pub fn submit_all_channels(&mut self, now: Instant) {
        for channel in self.namespace_table.channels() {
            channel.submit(now);
        }
    }

    /// Handles completions of the block devices. Returns whether there were any. `post_fast_path_completions` is called with
    /// completions: it releases the commands of as many as it can finish itself, successful ones of
    /// the fast path, and returns their number. The following one then becomes a finished command.
    #[inline(always)]
    pub(crate) fn poll(
        &mut self,
        now: Instant,
        mut end_run: impl FnMut(&mut SlotTable, Option<CompletionCounter<'_>>, &[IoCompletion]) -> u32,
    ) -> bool {
        if self.completions.remaining() == 0 {
            self.allocate_completions();
        }
        let mut has_completions = false;
        for index in 0..self.namespace_table.channel_count() {
            let Some(channel) = self.namespace_table.channel(index) else { continue };
            channel.poll(now, &mut self.completions);
            if !self.completions.as_slice().is_empty() {
                has_completions = true;
                self.handle_completions(now, index, &mut end_run);
            }
        }
        has_completions
    }

    /// Handles completions of the block devices, and calls `finish` with the identifier of each
    /// successful command of the fast path whose dword 0 is 0. Returns whether there were completions;
    /// other commands that they finish are in [`take_finished_commands`](Self::take_finished_commands).
    #[inline(always)]
    pub fn poll_fast_path(&mut self, now: Instant, mut finish: impl FnMut(u16)) -> bool {
        self.poll(now, |slots, counter, completions| match counter {
            Some(counter) => release_plain(slots, counter.runs(), completions, &mut finish),
            None => release_plain(slots, NotCounted, completions, &mut finish),
        })
    }

    /// Allocates the completion batch at first use.
    #[cold]
    fn allocate_completions(&mut self) {
        self.completions = CompletionBatch::with_capacity(self.slots.count());
    }

    fn handle_completions(
        &mut self,
        now: Instant,
        channel: u16,
        end_run: &mut impl FnMut(&mut SlotTable, Option<CompletionCounter<'_>>, &[IoCompletion]) -> u32,
    ) {
        let mut at = 0;
        loop {
            if !self.is_stopping && at < self.completions.as_slice().len() {
                let counter = self.namespace_table.completion_counter(channel, StartTime::new(now));
                let completions = &self.completions.as_slice()[at..];
                at += end_run(&mut self.slots, counter, completions) as usize;
            }
            let Some(completion) = self.completions.as_slice().get(at).copied() else { break };
            self.handle_completion(now, completion);
            at += 1;
        }
        self.completions.clear();
    }

    /// Handles one completion. One for an unknown token is an error of the block device and is ignored.
    #[inline(never)]
    fn handle_completion(&mut self, now: Instant, completion: IoCompletion) {
        let Some(slot) = self.slots.get(completion.token) else { return };
        match slot.state() {
            SlotState::Fast if slot.context() != 0 => {
                self.complete_in_place_read(*slot, completion)
            }
            SlotState::Fast => {
                let status = Status(completion.status.0);
                self.complete_command(low_16_bits(completion.token), status, completion.result);
            }
            _ => self.handle_request_completion(now, slot.context(), completion.status),
        }
    }

    /// Completes a read whose request has the flag [`RequestFlags::IN_PLACE`]: the result of the request is
    /// not dword 0 of the command.
    fn complete_in_place_read(&mut self, slot: Slot, completion: IoCompletion) {
        let mut status = Status(completion.status.0);
        let mut medium = None;
        if status.is_success() && completion.result == IoCompletion::IN_PLACE {
            let memory = self.namespace_table.medium_memory(slot.channel());
            medium = memory.map(|memory| memory.at_byte(slot.lba << slot.context()));
            if medium.is_none() {
                status = Status::INTERNAL_ERROR;
            }
        }
        self.complete_command(low_16_bits(completion.token), status, 0);
        if let Some(finished) = self.finished.last_mut() {
            finished.medium = medium;
        }
    }
}

/// Frees the slots of the plain completions at the front, and calls `finish` with the identifier of each.
/// Returns their number.
#[inline(always)]
fn release_plain<C: CountReleases>(
    slots: &mut SlotTable,
    counting: C,
    completions: &[IoCompletion],
    finish: &mut impl FnMut(u16),
) -> u32 {
    let mut releasing = slots.release_cursor(counting);
    let mut count = 0;
    // One comparison for both.
    let is_plain =
        |completion: &&IoCompletion| u32::from(completion.status.0) | completion.result == 0;
    for completion in completions.iter().take_while(is_plain) {
        let Some(id) = releasing.release(completion.token) else { break };
        finish(id);
        count += 1;
    }
    releasing.finish(count);
    count
}

impl FastPathRun<'_> {
    /// Begins the command with these words, if it belongs to the run. Returns whether it does.
    #[inline(always)]
    pub(crate) fn begin_command(&mut self, simple_words: [u64; 4]) -> bool {
        let segment = self.window.and_then(|window| window.piece_at(simple_words[1]));
        segment.is_some_and(|segment| {
            self.kind.matches(simple_words) && self.add_command(simple_words, segment)
        })
    }

    #[inline(always)]
    fn add_command(&mut self, [word, _, lba, _]: [u64; 4], segment: Segment) -> bool {
        let Some(token) =
            self.slot_alloc.allocate(self.slot.with_lba_and_id(lba, low_16_bits(word >> 16)))
        else {
            return false;
        };
        self.batch.add_request(token.into(), lba << self.kind.device_shift, segment);
        true
    }

    /// Ends the run, in which `count` commands were begun.
    #[inline(always)]
    fn finish(self, count: u32) {
        let Self { kind, slot_alloc, batch, begun, .. } = self;
        slot_alloc.finish(count);
        batch.finish(count);
        if let Some(counters) = begun {
            let bytes = u64::from(kind.len_bytes) * u64::from(count);
            counters.count_success(kind.template.operation as usize, count.into(), bytes, 0);
        }
    }
}

/// What the commands of a run have in common: each lies in one page and needs one request.
#[derive(Clone, Copy)]
struct FastPathKind {
    /// Opcode and namespace, with zeroes for FUSE, PSDT and the identifier.
    word: u64,
    cdw12: u32,
    len_bytes: u32,
    /// Highest first block at which the blocks are in range.
    lba_max: u64,
    /// Mask of the page offset, and highest offset at which the data fits in the page.
    page_mask: u64,
    offset_max: u64,
    device_shift: u8,
    /// Template of their slots, without block and identifier.
    slot: Slot,
    /// Template of their requests, without token, block and segment.
    template: Request,
}

const CID: u64 = 0xffff_0000;
/// PSDT and the reserved bits beside it.
const PSDT: u64 = 0xfc00;
const NLB: u32 = 0xffff;

impl FastPathKind {
    /// Classifies the command in `words`. Returns `None` unless it is a read or write that the namespace
    /// permits and that may lie in one page.
    #[inline]
    fn classify(
        words: &[u64; 8],
        entry: &FastPathNamespace,
        page_bytes: u64,
        (write_flags, started): (RequestFlags, StartTime),
    ) -> Option<Self> {
        // One comparison covers the opcode and requires zeroes in FUSE, PSDT and the bits between.
        let (operation, forced) = match low_16_bits(words[0]) {
            opcode if opcode == u16::from(FAST_READ) => (Operation::Read, RequestFlags::NONE),
            opcode if opcode == u16::from(FAST_WRITE) => (Operation::Write, write_flags),
            _ => return None,
        };
        let ([opcode, ..], cdw12) = (words[0].to_le_bytes(), low_32_bits(words[6]));
        let blocks = (cdw12 & NLB) + 1;
        let last_block = low_16_bits(cdw12.into());
        let is_allowed = entry.rights & opcode != 0 && cdw12 & !CDW12_FAST == 0;
        if !is_allowed || blocks > entry.blocks_max {
            return None;
        }
        let len_bytes = u64::from(blocks) << entry.block_shift;
        Some(Self {
            word: words[0] & !CID,
            cdw12,
            len_bytes: u32::try_from(len_bytes).ok()?,
            lba_max: entry.block_count.checked_sub(blocks.into())?,
            page_mask: page_bytes - 1,
            offset_max: page_bytes.checked_sub(len_bytes)?,
            device_shift: entry.device_shift,
            slot: Slot::new(0, 0, entry.channel, 0, opcode)
                .with_state(SlotState::Fast)
                .with_blocks_and_start(last_block, started),
            template: Request {
                blocks: blocks << entry.device_shift,
                segment_count: 1,
                operation,
                flags: fua_and_lr_flags(cdw12).union(forced),
                ..Request::PLACEHOLDER
            },
        })
    }

    /// Whether the command with these words belongs to the run.
    #[inline(always)]
    fn matches(&self, [word, prp1, lba, cdw12]: [u64; 4]) -> bool {
        word & !CID == self.word
            && low_32_bits(cdw12) == self.cdw12
            && lba <= self.lba_max
            && prp1 & self.page_mask <= self.offset_max
            && prp1 & 3 == 0
    }

    /// Sets the flag with which the data of a read may stay in the medium's memory.
    #[cold]
    fn permit_in_place(&mut self, block_shift: u8) {
        if self.template.operation == Operation::Read {
            self.template.flags = self.template.flags.union(RequestFlags::IN_PLACE);
            self.slot.set_context(block_shift.into());
        }
    }
}

/// Converts FUA and LR, bits 30 and 31 of dword 12.
#[inline]
pub(super) fn fua_and_lr_flags(cdw12: u32) -> RequestFlags {
    let [.., top] = cdw12.to_le_bytes();
    RequestFlags((top >> 6 & 1) | (top >> 7 & 1) << 2)
}

const _: () =
    assert!(RequestFlags::FUA.0 == 1 && RequestFlags::LIMITED_RETRY.0 == 4, "as shifted above");

/// Segment for a request that has none.
pub(super) const NO_SEGMENT: Segment =
    Segment { region: tenmil_base::RegionId(0), offset: 0, len_bytes: 0 };

#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the low bits are the field")]
pub(crate) const fn low_16_bits(word: u64) -> u16 {
    word as u16
}

#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the low bits are the field")]
const fn low_32_bits(word: u64) -> u32 {
    word as u32
}

#[inline]
const fn high_32_bits(word: u64) -> u32 {
    low_32_bits(word >> 32)
}
