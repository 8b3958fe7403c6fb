//! Fast path: commands that need exactly one request, from the ring to the block device and back.

use core::sync::atomic::Ordering;

use tenmil_base::{
    AccessFault, AccessId, CompletionBatch, CompletionEntry, HostMemory, Instant, IoCompletion,
    Operation, Request, RequestFlags, SIMPLE_IO_WORDS, Segment,
};
use tenmil_wire::{Command, IoOpcode, Status};

use super::namespace_table::{FAST_READ, FAST_WRITE, FastPathNamespace};
use super::slot::{Slot, State};
use super::{Queue, QueueEvent, TICKET_FETCH, TICKET_POST};
use crate::controller::interface::InvalidDoorbell;

/// Bits of dword 12 supported by the fast path: NLB, FUA and LR (NVM 1.1 §3.3.4, §3.3.6).
const CDW12_FAST: u32 = 0xc000_ffff;

impl<H: HostMemory> Queue<H> {
    /// Fetches commands from every submission queue in turn, except for the namespace `barred`. Returns
    /// their number.
    #[inline(always)]
    pub(super) fn fetch(&mut self, now: Instant, barred: Option<u32>) -> u32 {
        // An independent flag that orders no other memory access.
        let is_write_through = self.is_write_through.load(Ordering::Relaxed);
        self.write_flags = if is_write_through { RequestFlags::FUA } else { RequestFlags::NONE };
        let mut taken = 0;
        for index in 0..self.submissions.len() {
            if self.held.is_some() && !self.resume(now, barred) {
                break;
            }
            if self.pair.is_some() {
                break;
            }
            taken += self.fetch_from(now, index, barred);
        }
        taken
    }

    #[inline(always)]
    fn fetch_from(&mut self, now: Instant, index: usize, barred: Option<u32>) -> u32 {
        let queue = &mut self.submissions[index];
        let (waiting, invalid) = queue.read_doorbell(&self.doorbells);
        let is_open = waiting > 0 && !queue.is_closing;
        if invalid.is_some() {
            self.write(QueueEvent::InvalidDoorbell(InvalidDoorbell::Value));
        }
        if !is_open {
            return 0;
        }
        let mut left = self.fetch_budget(waiting.min(self.burst));
        let granted = left;
        while left > 0 {
            let next = match barred {
                None => self.next_slow(index, &mut left),
                Some(_) => self.next_single(index, &mut left),
            };
            let Some(command) = next else { break };
            if barred == Some(command.nsid()) {
                self.held = Some((index, command));
                break;
            }
            if !self.start_command(now, index, command) {
                break;
            }
        }
        granted - left
    }

    /// Number of the `wanted` commands that may be fetched: each needs a slot and a completion entry.
    #[inline]
    pub(super) fn fetch_budget(&mut self, wanted: u32) -> u32 {
        let (taken, room) = (self.slots.taken(), self.slots.room());
        let mut places = self.completion.room() as usize - taken;
        if places < wanted as usize {
            if self.completion.read_doorbell(&self.doorbells).is_some() {
                self.write(QueueEvent::InvalidDoorbell(InvalidDoorbell::Value));
            }
            places = self.completion.room() as usize - taken;
        }
        wanted.min(u32::try_from(room.min(places)).unwrap_or(wanted))
    }

    /// Starts commands until one is not supported by the fast path, and returns that one. Returns `None`
    /// when `left` or the ring is exhausted.
    fn next_slow(&mut self, index: usize, left: &mut u32) -> Option<Command> {
        let queue = &mut self.submissions[index];
        if !queue.is_shared() || queue.first.is_some() {
            return self.next_single(index, left);
        }
        let first = queue.take();
        *left -= 1;
        let mut words = self.heard(first)?;
        loop {
            words = match self.begin_run(index, left, words) {
                RunStop::Over(next) => next?,
                RunStop::NotBegun => return Some(Command(words)),
            };
        }
    }

    /// Starts the command in `words` and the following ones of its kind: same operation, block count,
    /// namespace and flags, and data in the same direct window. The lookups are done once for the whole
    /// run.
    #[inline(never)]
    fn begin_run(&mut self, index: usize, left: &mut u32, words: [u64; 8]) -> RunStop {
        let nsid = high32(words[0]);
        let Some(entry) = self.directory.entry(nsid).copied() else { return RunStop::NotBegun };
        let Some(run) = CommandRun::of(&words, &entry, self.page_bytes, self.write_flags) else {
            return RunStop::NotBegun;
        };
        let Some(channel) = self.directory.channel(entry.channel) else { return RunStop::NotBegun };
        let mut plain = [0; 4];
        for (place, word) in plain.iter_mut().zip(SIMPLE_IO_WORDS) {
            *place = words[word];
        }
        let Ok(Some(segment)) = self.host.resolve(plain[1], run.len_bytes) else {
            return RunStop::NotBegun;
        };
        if !run.has(plain) || self.slots.room() == 0 {
            return RunStop::NotBegun;
        }
        let window = self.host.direct_window(run.len_bytes);
        let slot = run.slot.for_submission(low16(index as u64));
        let (mut taking, mut gathering) = (self.slots.take_many(), channel.gather_many(run.like));
        let mut begin = |[word, _, lba, _]: [u64; 4], segment| {
            let token = taking.take(slot.of(lba, low16(word >> 16)));
            token.map(|token| gathering.put(token.into(), lba << run.medium_shift, segment))
        };
        // From here on, every accepted command has a slot and a batched request.
        begin(plain, segment);
        let queue = &mut self.submissions[index];
        queue.in_flight += 1;
        let (count, taken) = queue.take_run(*left, |plain| {
            let segment = window.and_then(|window| window.at(plain[1]));
            segment.is_some_and(|segment| run.has(plain) && begin(plain, segment).is_some())
        });
        taking.finish(count + 1);
        gathering.finish(count + 1);
        let (class, bytes) = (run.class(), u64::from(run.len_bytes) * u64::from(count + 1));
        self.traffic.add(class, count + 1, bytes);
        let next = self.heard(taken).flatten();
        *left -= count + u32::from(next.is_some());
        RunStop::Over(next)
    }

    /// Unwraps the result of a ring read; breaks the queue down and returns `None` if the ring is not
    /// accessible.
    #[inline]
    fn heard<T>(&mut self, result: Result<T, AccessFault>) -> Option<T> {
        result.map_err(|fault| self.break_down(fault)).ok()
    }

    /// Fetches one command without the fast path.
    #[cold]
    fn next_single(&mut self, index: usize, left: &mut u32) -> Option<Command> {
        let queue = &mut self.submissions[index];
        let taken = if queue.is_shared() {
            queue.take().map(Some)
        } else {
            let ticket = AccessId(TICKET_FETCH | u32::from(queue.id));
            let was_open = queue.is_fetching();
            let taken = queue.take_remote(&mut self.host, ticket);
            self.ring_accesses += u32::from(queue.is_fetching() && !was_open);
            taken
        };
        match taken {
            Ok(Some(words)) => {
                *left -= 1;
                Some(Command(words))
            }
            Ok(None) => None,
            Err(fault) => {
                self.break_down(fault);
                None
            }
        }
    }

    /// Submits the batched requests of all channels.
    #[inline]
    pub(super) fn submit(&mut self, now: Instant) {
        for channel in self.directory.channels() {
            channel.submit(now);
        }
    }

    /// Handles completions of the block devices. Returns whether there were any.
    pub(super) fn poll(&mut self, now: Instant) -> bool {
        if self.answers.remaining() == 0 {
            self.make_answers();
        }
        let mut has_answers = false;
        for index in 0..self.directory.channel_count() {
            let Some(channel) = self.directory.channel(index) else { continue };
            channel.poll(now, &mut self.answers);
            let count = self.answers.as_slice().len();
            if count > 0 {
                has_answers = true;
                self.completion.prefetch(u32::try_from(count).unwrap_or(u32::MAX));
                self.take_answers(now);
            }
        }
        has_answers
    }

    /// Allocates the completion batch at first use.
    #[cold]
    fn make_answers(&mut self) {
        self.answers = CompletionBatch::with_capacity(self.slots.count());
    }

    fn take_answers(&mut self, now: Instant) {
        let answers = core::mem::replace(&mut self.answers, CompletionBatch::with_capacity(0));
        let mut left = answers.as_slice();
        while !left.is_empty() {
            left = self.end_fast(left);
            let Some((answer, more)) = left.split_first() else { break };
            left = more;
            // A completion for an unknown token is an error of the block device and is ignored.
            let Some(slot) = self.slots.get(answer.token) else { continue };
            match slot.state() {
                State::Fast => {
                    let status = Status(answer.status.0);
                    self.complete(low16(answer.token), status, answer.result);
                }
                _ => self.answered(now, slot.area, answer.status),
            }
        }
        self.answers = answers;
        self.answers.clear();
    }

    /// Completes successful fast-path commands, up to the first completion that is anything else.
    #[inline(never)]
    fn end_fast<'a>(&mut self, answers: &'a [IoCompletion]) -> &'a [IoCompletion] {
        let [queue] = self.submissions.as_mut_slice() else { return answers };
        if self.is_stopping || !self.completion.is_shared() {
            return answers;
        }
        // Every entry has the same SQHD and SQID; only identifier and result differ.
        let mut releasing = self.slots.release_many();
        let same = u64::from(queue.head() & 0xffff) | u64::from(queue.id) << 16;
        let (count, posted) = self.completion.post(answers, |answer| {
            if !answer.status.is_success() {
                return None;
            }
            let cid = releasing.release(answer.token)?;
            Some([answer.result.into(), same | u64::from(cid) << 32])
        });
        let (ended, left) = answers.split_at(count);
        let count = u32::try_from(ended.len()).unwrap_or(u32::MAX);
        releasing.finish(count);
        queue.in_flight -= count;
        self.posted += count;
        if let Err(fault) = posted {
            self.break_down(fault);
        }
        left
    }

    /// Completes a command. Its completion entry was reserved when it was fetched.
    pub(super) fn complete(&mut self, index: u16, status: Status, result: u32) {
        if let Some(entry) = self.retire(index, status, result) {
            let stored = self.completion.store(&mut self.host, AccessId(TICKET_POST), entry);
            self.stored(stored);
        }
    }

    /// Frees the slot of a completed command. Returns the completion entry, or `None` if the queue is
    /// stopping.
    #[inline]
    fn retire(&mut self, index: u16, status: Status, result: u32) -> Option<CompletionEntry> {
        let slot = self.slots.release(index);
        if !status.is_success() && slot.opcode() == IoOpcode::Flush.code() {
            self.directory.flush_failed(slot.channel());
        }
        let queue = &mut self.submissions[usize::from(slot.submission())];
        queue.in_flight -= 1;
        if self.is_stopping {
            return None;
        }
        let (head, sqid) = (queue.head(), u64::from(queue.id));
        if !status.is_success() {
            self.report(slot, status);
        }
        let (cid, status) = (u64::from(slot.cid()), u64::from(status.0));
        let second = u64::from(head & 0xffff) | sqid << 16 | cid << 32 | status << 49;
        Some([result.into(), second])
    }
}

/// End of a run of commands.
enum RunStop {
    /// Exhausted, or stopped before this command, which is fetched and of another kind.
    Over(Option<[u64; 8]>),
    /// Not started: its first command is not supported.
    NotBegun,
}

/// Consecutive commands of one kind: each lies in one page and needs one request.
#[derive(Clone, Copy)]
struct CommandRun {
    /// Opcode and namespace, with zeroes for FUSE, PSDT and the identifier.
    word: u64,
    cdw12: u32,
    len_bytes: u32,
    /// Highest first block at which the blocks are in range.
    lba_max: u64,
    /// Mask of the page offset, and highest offset at which the data fits in the page.
    page_mask: u64,
    offset_max: u64,
    medium_shift: u8,
    /// Template of their slots, without block and identifier.
    slot: Slot,
    /// Template of their requests, without token, block and segment.
    like: Request,
}

const CID: u64 = 0xffff_0000;
const NLB: u32 = 0xffff;

impl CommandRun {
    /// Classifies the command in `words`. Returns `None` unless it is a read or write that the namespace
    /// permits and that may lie in one page.
    #[inline]
    fn of(
        words: &[u64; 8],
        entry: &FastPathNamespace,
        page_bytes: u64,
        write_flags: RequestFlags,
    ) -> Option<Self> {
        // One comparison covers the opcode and requires zeroes in FUSE, PSDT and the bits between.
        let (operation, forced) = match low16(words[0]) {
            opcode if opcode == u16::from(FAST_READ) => (Operation::Read, RequestFlags::NONE),
            opcode if opcode == u16::from(FAST_WRITE) => (Operation::Write, write_flags),
            _ => return None,
        };
        let ([opcode, ..], cdw12) = (words[0].to_le_bytes(), low32(words[6]));
        let blocks = (cdw12 & NLB) + 1;
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
            medium_shift: entry.medium_shift,
            slot: Slot::new(0, 0, entry.channel, 0, opcode).in_state(State::Fast),
            like: Request {
                blocks: blocks << entry.medium_shift,
                segment_count: 1,
                operation,
                flags: flags(cdw12).union(forced),
                ..Request::PLACEHOLDER
            },
        })
    }

    /// Whether the command with these words belongs to the run.
    #[inline(always)]
    fn has(&self, [word, prp1, lba, cdw12]: [u64; 4]) -> bool {
        word & !CID == self.word
            && low32(cdw12) == self.cdw12
            && lba <= self.lba_max
            && prp1 & self.page_mask <= self.offset_max
            && prp1 & 3 == 0
    }

    /// Index in [`TrafficCounters`](super::TrafficCounters).
    fn class(&self) -> usize {
        usize::from(self.like.operation != Operation::Write) + 1
    }
}

/// Converts FUA and LR, bits 30 and 31 of dword 12.
#[inline]
pub(super) fn flags(cdw12: u32) -> RequestFlags {
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
const fn low16(word: u64) -> u16 {
    word as u16
}

#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the low bits are the field")]
const fn low32(word: u64) -> u32 {
    word as u32
}

#[inline]
const fn high32(word: u64) -> u32 {
    low32(word >> 32)
}
