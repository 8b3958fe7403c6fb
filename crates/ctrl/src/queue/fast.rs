//! The way of a command that needs nothing but one request: from the ring to the medium and back.

use base::{
    Answer, Answers, CompletionEntry, Fault, Flags, HostMemory, Instant, Operation, Request,
    Segment, Ticket,
};
use wire::{Command, Status};

use super::channel::Channel;
use super::directory::{Directory, Entry, FAST_READ, FAST_WRITE};
use super::slot::{Slot, Slots, State};
use super::{Letter, Queue, TICKET_FETCH, TICKET_POST};
use crate::controller::contract::InvalidDoorbell;

/// Bits of dword 12 that the fast path understands: NLB, FUA and LR (NVM 1.1 §3.3.4, §3.3.6).
const CDW12_FAST: u32 = 0xc000_ffff;

impl<H: HostMemory> Queue<H> {
    /// Takes commands from every submission queue in turn. Returns how many.
    #[inline]
    pub(super) fn fetch(&mut self, now: Instant) -> u32 {
        self.write_flags = if self.siblings.is_write_through() { Flags::FUA } else { Flags::NONE };
        let mut taken = 0;
        for index in 0..self.submissions.len() {
            if self.held.is_some() && !self.resume(now) {
                break;
            }
            if self.pair.is_some() {
                break;
            }
            taken += self.fetch_from(now, index);
        }
        taken
    }

    #[inline]
    fn fetch_from(&mut self, now: Instant, index: usize) -> u32 {
        let queue = &mut self.submissions[index];
        let (waiting, invalid) = queue.look(&self.doorbells);
        let is_open = waiting > 0 && !queue.is_closing;
        if invalid.is_some() {
            self.write(Letter::InvalidDoorbell(InvalidDoorbell::Value));
        }
        if !is_open {
            return 0;
        }
        let mut left = self.permits(waiting.min(self.burst));
        let granted = left;
        while left > 0 {
            let Some(command) = self.next_slow(index, &mut left) else { break };
            if !self.admit(now, index, command) {
                break;
            }
        }
        granted - left
    }

    /// How many of `wanted` commands may be taken: each needs a slot, and a place to be answered in.
    #[inline]
    pub(super) fn permits(&mut self, wanted: u32) -> u32 {
        let (taken, room) = (self.slots.taken(), self.slots.room());
        let mut places = self.completion.room() as usize - taken;
        if places < wanted as usize {
            if self.completion.look(&self.doorbells).is_some() {
                self.write(Letter::InvalidDoorbell(InvalidDoorbell::Value));
            }
            places = self.completion.room() as usize - taken;
        }
        wanted.min(u32::try_from(room.min(places)).unwrap_or(wanted))
    }

    /// Begins commands until there is one that the fast path does not understand. `None` if `left`
    /// has run out, or the ring has.
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
                RunEnd::Over(next) => next?,
                RunEnd::NotBegun => return Some(Command(words)),
            };
        }
    }

    /// Begins the command in `words` and those after it that are of its kind: the same operation
    /// on the same namespace, with the same flags. What that means is looked up once for all.
    #[inline(never)]
    fn begin_run(&mut self, index: usize, left: &mut u32, words: [u64; 8]) -> RunEnd {
        let write_flags = self.write_flags;
        let Some(mut run) = Run::of(&words, &mut self.directory, write_flags) else {
            return RunEnd::NotBegun;
        };
        run.page_bytes = self.page_bytes;
        run.slot = run.slot.for_submission(low16(index as u64));
        let (slots, host) = (&mut self.slots, &mut self.host);
        if !run.begin(&words, slots, host) {
            return RunEnd::NotBegun;
        }
        let queue = &mut self.submissions[index];
        queue.in_flight += 1;
        let taken = queue.take_run(*left, |words| run.begin(words, slots, host));
        let (is_write, bytes) = (run.operation == Operation::Write, run.bytes);
        let taken = taken.map(|(count, next)| {
            *left -= count + u32::from(next.is_some());
            self.traffic.add(usize::from(!is_write) + 1, count + 1, bytes);
            next
        });
        RunEnd::Over(self.heard(taken).flatten())
    }

    /// What came of reading a ring; `None` if it is not there any more.
    #[inline]
    fn heard<T>(&mut self, result: Result<T, Fault>) -> Option<T> {
        result.map_err(|fault| self.break_down(fault)).ok()
    }

    /// Takes one command with no shortcut.
    #[cold]
    fn next_single(&mut self, index: usize, left: &mut u32) -> Option<Command> {
        let queue = &mut self.submissions[index];
        let taken = if queue.is_shared() {
            queue.take().map(Some)
        } else {
            let ticket = Ticket(TICKET_FETCH | u32::from(queue.id));
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

    /// Hands gathered requests to the media.
    #[inline]
    pub(super) fn submit(&mut self, now: Instant) {
        for channel in self.directory.channels() {
            channel.submit(now);
        }
    }

    /// Takes the media's answers. True if there were any.
    pub(super) fn poll(&mut self, now: Instant) -> bool {
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

    fn take_answers(&mut self, now: Instant) {
        let answers = core::mem::replace(&mut self.answers, Answers::with_capacity(0));
        let mut left = answers.as_slice();
        while !left.is_empty() {
            left = self.end_fast(left);
            let Some((answer, more)) = left.split_first() else { break };
            left = more;
            // An answer to nothing is the medium's mistake, and stays its own.
            let Some(slot) = self.slots.get(answer.token) else { continue };
            match slot.state() {
                State::Fast => {
                    let status = Status(answer.outcome.0);
                    self.complete(low16(answer.token), status, answer.result);
                }
                _ => self.answered(now, slot.area, answer.outcome),
            }
        }
        self.answers = answers;
        self.answers.clear();
    }

    /// Ends commands of the fast path that went well, up to the first that is something else.
    #[inline(never)]
    fn end_fast<'a>(&mut self, answers: &'a [Answer]) -> &'a [Answer] {
        let [queue] = self.submissions.as_mut_slice() else { return answers };
        if self.is_stopping || !self.completion.is_shared() {
            return answers;
        }
        let slots = &mut self.slots;
        let same = u64::from(queue.head() & 0xffff) | u64::from(queue.id) << 16;
        let mut left = answers.iter();
        let posted = self.completion.post(|| {
            let answer = left.as_slice().first().filter(|answer| answer.outcome.is_success())?;
            let cid = slots.release_fast(answer.token)?;
            left.next();
            Some([answer.result.into(), same | u64::from(cid) << 32])
        });
        let left = left.as_slice();
        let count = u32::try_from(answers.len() - left.len()).unwrap_or(u32::MAX);
        queue.in_flight -= count;
        self.posted += count;
        if let Err(fault) = posted {
            self.break_down(fault);
        }
        left
    }

    /// Ends a command: its place in the completion queue was reserved when it was taken.
    pub(super) fn complete(&mut self, index: u16, status: Status, result: u32) {
        if let Some(entry) = self.retire(index, status, result) {
            let stored = self.completion.store(&mut self.host, Ticket(TICKET_POST), entry);
            self.stored(stored);
        }
    }

    /// Frees the slot of a command that has ended. What is to be told of it, if the host still
    /// listens.
    #[inline]
    fn retire(&mut self, index: u16, status: Status, result: u32) -> Option<CompletionEntry> {
        let slot = self.slots.release(index);
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

/// How a run of commands ended.
enum RunEnd {
    /// With the last there was, or before this one, which is taken and of another kind.
    Over(Option<[u64; 8]>),
    /// Before it had begun: its first command is not simple.
    NotBegun,
}

/// What commands of one kind have in common.
struct Run<'a> {
    /// Opcode and namespace, with zeroes for FUSE, PSDT and the identifier.
    word: u64,
    /// Dword 12 without the number of blocks.
    dword: u32,
    entry: Entry,
    channel: &'a mut Channel,
    operation: Operation,
    flags: Flags,
    /// Their slots, but for block and identifier.
    slot: Slot,
    page_bytes: u64,
    /// Bytes moved so far.
    bytes: u64,
}

const CID: u64 = 0xffff_0000;
const NLB: u32 = 0xffff;

impl<'a> Run<'a> {
    /// The kind of the command in `words`, if it may be a simple one: a read or write that the
    /// namespace allows.
    #[inline]
    fn of(words: &[u64; 8], directory: &'a mut Directory, write_flags: Flags) -> Option<Self> {
        // Opcode, and zeroes for FUSE, PSDT and what lies between: one comparison.
        let (operation, forced) = match low16(words[0]) {
            opcode if opcode == u16::from(FAST_READ) => (Operation::Read, Flags::NONE),
            opcode if opcode == u16::from(FAST_WRITE) => (Operation::Write, write_flags),
            _ => return None,
        };
        let [opcode, ..] = words[0].to_le_bytes();
        let entry = *directory.entry(high32(words[0]))?;
        let dword = low32(words[6]);
        if entry.rights & opcode == 0 || dword & !CDW12_FAST != 0 {
            return None;
        }
        Some(Self {
            word: words[0] & !CID,
            dword: dword & !NLB,
            entry,
            channel: directory.channel(entry.channel)?,
            operation,
            flags: flags(dword).and(forced),
            slot: Slot::new(0, 0, entry.channel, 0, opcode).in_state(State::Fast),
            page_bytes: 0,
            bytes: 0,
        })
    }

    /// Begins a command that is of this kind, lies in one page, and needs no more than one request.
    /// False, with nothing done, if it is anything else or anything is wrong with it.
    #[inline(always)]
    fn begin<H: HostMemory>(&mut self, words: &[u64; 8], slots: &mut Slots, host: &mut H) -> bool {
        let (dword, lba, prp1) = (low32(words[6]), words[5], words[3]);
        if words[0] & !CID != self.word || dword & !NLB != self.dword {
            return false;
        }
        let blocks = (dword & NLB) + 1;
        let left = self.entry.block_count.checked_sub(lba);
        let is_inside = left.is_some_and(|left| u64::from(blocks) <= left);
        let len_bytes = u64::from(blocks) << self.entry.block_shift;
        let end = (prp1 & (self.page_bytes - 1)) + len_bytes;
        if !is_inside || blocks > self.entry.blocks_max || end > self.page_bytes || prp1 & 3 != 0 {
            return false;
        }
        let Ok(Some(segment)) = host.reach(prp1, low32(len_bytes)) else { return false };
        let Some(token) = slots.take(self.slot.of(lba, low16(words[0] >> 16))) else {
            return false;
        };
        let request = Request {
            token: token.into(),
            lba: lba << self.entry.medium_shift,
            operand: 0,
            blocks: blocks << self.entry.medium_shift,
            segment_first: 0,
            segment_count: 1,
            metadata_count: 0,
            operation: self.operation,
            flags: self.flags,
        };
        self.channel.gather(request, segment);
        self.bytes += len_bytes;
        true
    }
}

/// FUA and LR, bits 30 and 31 of dword 12.
#[inline]
pub(super) fn flags(cdw12: u32) -> Flags {
    let [.., top] = cdw12.to_le_bytes();
    Flags((top >> 6 & 1) | (top >> 7 & 1) << 2)
}

const _: () = assert!(Flags::FUA.0 == 1 && Flags::LIMITED_RETRY.0 == 4, "as shifted above");

/// A segment for a request that has none.
pub(super) const NO_SEGMENT: Segment =
    Segment { region: base::RegionId(0), offset: 0, len_bytes: 0 };

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
