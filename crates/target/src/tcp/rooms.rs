//! The commands of a connection, and where the data of each lie.
//!
//! ```text
//!   Command ─┬─ no data ───────────────────────────────────────────▶ ready
//!            ├─ data to the host ─── a buffer, or a place in line ──▶ ready
//!            ├─ data from the host ─ a buffer, or a place in line ─ R2T ─ all has come ─▶ ready
//!            └─ data in the capsule ─ a buffer, or the socket waits ───── all has come ─▶ ready
//! ```
//!
//! Halves of a fused pair go together: see [`pairs`].

mod pairs;

use std::collections::VecDeque;
use std::ops::Range;

use base::{Instant, Memory, NoSuchMemory, Segment};
use tcp::{CommandData, Controller, NotPossible, Payloads, Place};
use wire::tcp::Crc32c;
use wire::{Command, Completion, Fuse, Status};

use super::memory::{Budget, Buffer, OWN_BYTES, Purse, Standing, iova_of};
use pairs::{First, Half};

/// The commands and their memory.
#[derive(Debug)]
pub(super) struct Rooms {
    /// As many as were ever used at a time.
    slots: Vec<Slot>,
    purse: Purse,
    /// Commands that wait for a buffer, oldest first.
    waiting: VecDeque<u16>,
    /// Data that come unasked found no room, and their stream waits.
    is_stuck: bool,
    /// Commands whose data come, and second halves that have to.
    coming: u32,
    share: Share,
    first: Option<First>,
    /// What was asked of the connection's end and is not possible: a mistake of ours.
    fault: Option<Fault>,
}

/// What was not possible, and for which command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Fault {
    pub(super) tag: u16,
    pub(super) command: Command,
    pub(super) why: NotPossible,
}

/// What the commands of a connection may have of the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Share {
    /// The connection's own pages and no more: nobody knows whether its host may have any.
    Own,
    /// Its own pages first.
    OwnFirst,
    /// Everything that others leave.
    Common,
}

/// One command, under its tag.
#[derive(Debug)]
struct Slot {
    command: Command,
    buffer: Option<Buffer>,
    len_bytes: u32,
    way: Way,
    step: Step,
    /// When its host was asked for its data.
    asked_at: Instant,
    /// How often in a row its answer was found untaken while others waited for memory.
    found_untaken: u8,
    /// Its data come in its capsule. Known of halves of fused pairs alone.
    is_unasked: bool,
}

/// What a look at answers came to whose memory is everybody's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Untaken {
    /// There are none.
    Nothing,
    /// There are some.
    Some,
    /// One of them was found so often.
    TooLong,
}

/// Which way its data go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    None,
    FromHost,
    ToHost,
}

/// What a command waits for. It alone decides what is done with the command: what is in the host's
/// own words is looked at when the command comes, and never again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Free,
    /// All that it needs is there.
    Ready,
    /// It was finished, and its answer is on its way.
    Answered,
    /// It was finished while its data came, and its answer goes out behind them.
    Draining,
    /// It waits for a buffer.
    AwaitingBuffer,
    /// Its data come.
    AwaitingData,
    /// It is half of a fused pair that has not begun.
    Half(Half),
}

/// What became of a command that has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Opened {
    /// It can begin.
    Ready,
    /// It can begin later.
    Later,
    /// There is no room for data that come unasked: nothing more is to be read.
    NoRoom,
}

/// Places that are made at a time.
const GROWTH: usize = 4;
/// Bytes of data whose digest is computed at a time.
const DIGEST_BYTES: u32 = 4096;

impl Rooms {
    pub(super) fn new(purse: Purse) -> Self {
        Self {
            slots: Vec::new(),
            purse,
            waiting: VecDeque::new(),
            is_stuck: false,
            coming: 0,
            share: Share::Own,
            first: None,
            fault: None,
        }
    }

    /// A command has come. Nothing is kept of it if there is [no room](Opened::NoRoom).
    #[inline]
    pub(super) fn open(
        &mut self,
        end: &mut Controller,
        (tag, now): (u16, Instant),
        command: Command,
        data: CommandData,
    ) -> Opened {
        let (way, len_bytes) = match data {
            CommandData::None => (Way::None, 0),
            CommandData::InCapsule(len) | CommandData::FromHost(len) => (Way::FromHost, len),
            CommandData::ToHost(len) => (Way::ToHost, len),
        };
        let is_unasked = matches!(data, CommandData::InCapsule(_));
        if (command.fuse() != Fuse::Normal || self.first.is_some())
            && let Some(opened) = self.open_half(end, (tag, now), &command, &data)
        {
            return opened;
        }
        *self.place(tag) =
            Slot { command, len_bytes, way, step: Step::Ready, asked_at: now, ..Slot::FREE };
        if len_bytes == 0 {
            return Opened::Ready;
        }
        if self.share == Share::Own && len_bytes > OWN_BYTES {
            let completion = Completion::new(0, Status::DATA_SGL_LENGTH_INVALID.with_dnr());
            self.finish(end, tag, 0, completion);
            return Opened::Later;
        }
        let is_small = self.share != Share::Common;
        let own = if is_small { self.purse.take_own(len_bytes) } else { None };
        let may_take = self.share != Share::Own && (self.waiting.is_empty() || is_unasked);
        let buffer = own.or_else(|| if may_take { self.purse.take(len_bytes) } else { None });
        let buffer = match buffer {
            None if is_unasked => self.purse.take_own(len_bytes),
            buffer => buffer,
        };
        let slot = &mut self.slots[usize::from(tag)];
        match (buffer, is_unasked) {
            (Some(buffer), _) => {
                slot.buffer = Some(buffer);
                if is_unasked {
                    self.is_stuck = false;
                }
                self.leave_line();
                self.placed(end, (tag, now), is_unasked)
            }
            (None, true) => {
                slot.step = Step::Free;
                self.is_stuck = true;
                Opened::NoRoom
            }
            (None, false) => {
                slot.step = Step::AwaitingBuffer;
                self.waiting.push_back(tag);
                Opened::Later
            }
        }
    }

    /// The place for a command that comes.
    #[inline]
    fn place(&mut self, tag: u16) -> &mut Slot {
        let index = usize::from(tag);
        if index >= self.slots.len() {
            self.grow(index);
        }
        &mut self.slots[index]
    }

    /// Tags that were free the longest are used last, so an idle connection has few places.
    #[cold]
    fn grow(&mut self, index: usize) {
        let count = (index + 1).next_multiple_of(GROWTH);
        self.slots.reserve_exact(count - self.slots.len());
        self.slots.resize_with(count, || Slot::FREE);
    }

    /// A buffer for who is first of those that wait.
    fn take(&mut self, len_bytes: u32) -> Option<Buffer> {
        match self.share {
            Share::Common => self.purse.take(len_bytes),
            Share::OwnFirst => {
                let own = self.purse.take_own(len_bytes);
                own.or_else(|| self.purse.take(len_bytes))
            }
            Share::Own => self.purse.take_own(len_bytes),
        }
    }

    /// Its host is known now, and may have so much.
    pub(super) fn admit(&mut self, share: Share, (host, standing): (&str, Standing)) {
        self.share = share;
        self.purse.bind(host, standing);
    }

    /// Whether something waits for the connection's own pages, which are there.
    pub(super) fn can_go_on(&self) -> bool {
        self.share == Share::Own
            && (self.is_stuck || !self.waiting.is_empty())
            && self.purse.has_own()
    }

    /// A command has a buffer.
    #[inline]
    fn placed(
        &mut self,
        end: &mut Controller,
        (tag, now): (u16, Instant),
        is_unasked: bool,
    ) -> Opened {
        let slot = &mut self.slots[usize::from(tag)];
        if slot.way == Way::ToHost {
            slot.step = Step::Ready;
            return Opened::Ready;
        }
        slot.step = Step::AwaitingData;
        slot.asked_at = now;
        self.coming += 1;
        if !is_unasked {
            let granted = end.grant(tag, slot.len_bytes);
            self.note(tag, granted);
        }
        Opened::Later
    }

    /// The next command that has waited long enough and can begin.
    pub(super) fn next_ready(&mut self, end: &mut Controller, now: Instant) -> Option<u16> {
        while let Some(&tag) = self.waiting.front() {
            let slot = &self.slots[usize::from(tag)];
            let len_bytes = match slot.step {
                Step::Ready => {
                    self.waiting.pop_front();
                    return Some(tag);
                }
                Step::AwaitingBuffer => slot.len_bytes,
                Step::Half(_) => OWN_BYTES,
                Step::Free | Step::Answered | Step::Draining | Step::AwaitingData => {
                    self.waiting.pop_front();
                    continue;
                }
            };
            let is_half = slot.step != Step::AwaitingBuffer;
            #[cfg(test)]
            let len_bytes = if self.is_taken_for_half(tag) { OWN_BYTES } else { len_bytes };
            let buffer = self.take(len_bytes)?;
            self.waiting.pop_front();
            self.leave_line();
            if is_half {
                self.first_placed(end, (tag, now), buffer);
                continue;
            }
            self.slots[usize::from(tag)].buffer = Some(buffer);
            if self.placed(end, (tag, now), false) == Opened::Ready {
                return Some(tag);
            }
        }
        None
    }

    /// Whether commands wait for a buffer.
    #[inline]
    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Whether a host owes data.
    #[inline]
    pub(super) fn is_owed(&self) -> bool {
        self.coming > 0
    }

    /// Since when the host has owed data for the longest, and for how many commands since then.
    pub(super) fn owed_since(&self) -> Option<(Instant, usize)> {
        let is_coming = |slot: &&Slot| slot.step.is_owed();
        let first = self.first.as_ref().map(|first| &self.slots[usize::from(first.tag)]);
        let coming = self.slots.iter().filter(is_coming).chain(first);
        let asked_at = coming.clone().map(|slot| slot.asked_at).min()?;
        let count = coming.filter(|slot| slot.asked_at == asked_at).count();
        Some((asked_at, count))
    }

    /// Looks at answers that are on their way. One that has been there at so many looks, with others
    /// waiting for memory at each, was there for too long.
    #[cold]
    pub(super) fn untaken(&mut self, looks_max: u8) -> Untaken {
        let is_wanted = self.purse.is_missed();
        let mut found = Untaken::Nothing;
        for slot in &mut self.slots {
            let is_everybodys = slot.buffer.as_ref().is_some_and(|buffer| !buffer.is_own());
            if slot.step != Step::Answered || !is_everybodys {
                continue;
            }
            slot.found_untaken = if is_wanted { slot.found_untaken + 1 } else { 0 };
            if slot.found_untaken > looks_max {
                return Untaken::TooLong;
            }
            found = Untaken::Some;
        }
        found
    }

    /// Bytes have come for a command. Passed over if it has been answered.
    #[inline]
    pub(super) fn store(&self, place: Place, bytes: &[u8]) -> Result<(), NoSuchMemory> {
        match self.segment(place) {
            Some(segment) => self.purse.budget().regions().store(segment, bytes),
            None => Ok(()),
        }
    }

    /// Where bytes of a command that has not been answered, or whose answer is on its way, lie. None
    /// if there are not so many, or no buffer.
    #[inline]
    pub(super) fn segment(&self, place: Place) -> Option<Segment> {
        let slot = self.slots.get(usize::from(place.tag))?;
        let whole = slot.buffer.as_ref()?.segment(self.purse.budget(), slot.len_bytes)?;
        whole.slice(place.offset, place.len_bytes)
    }

    /// Where the first `len_bytes` of a command's buffer lie.
    pub(super) fn front_of(&self, tag: u16, len_bytes: u32) -> Option<Segment> {
        self.segment(Place { tag, offset: 0, len_bytes })
    }

    /// All data of a command have come, as they were sent or not. Whether it can begin, or end.
    #[inline]
    pub(super) fn arrived(&mut self, end: &mut Controller, tag: u16, is_intact: bool) -> bool {
        let slot = &mut self.slots[usize::from(tag)];
        let is_due = slot.step == Step::AwaitingData;
        if is_due {
            slot.step = Step::Ready;
            self.coming -= 1;
        } else {
            self.half_arrived(end, tag, is_intact);
        }
        is_due
    }

    #[inline]
    pub(super) fn command(&self, tag: u16) -> &Command {
        &self.slots[usize::from(tag)].command
    }

    /// Where a queue finds the data of a command; an address that reaches nothing if it has none.
    #[inline]
    pub(super) fn iova(&self, tag: u16) -> u64 {
        let slot = &self.slots[usize::from(tag)];
        slot.buffer.as_ref().and_then(|buffer| iova_of(buffer, slot.len_bytes)).unwrap_or(0)
    }

    /// Bytes of its data, and which way they go.
    #[inline]
    pub(super) fn data(&self, tag: u16) -> (Way, u32) {
        let slot = &self.slots[usize::from(tag)];
        (slot.way, slot.len_bytes)
    }

    /// Whether a command has all it needs and has not been answered.
    #[inline]
    pub(super) fn is_ready(&self, tag: u16) -> bool {
        self.slots.get(usize::from(tag)).is_some_and(|slot| slot.step == Step::Ready)
    }

    /// The command that the host calls `cid`, if it has not been answered: its tag, and whether it
    /// may have begun.
    pub(super) fn find(&self, cid: u16) -> Option<(u16, bool)> {
        let is_it = |slot: &Slot| {
            !matches!(slot.step, Step::Free | Step::Answered | Step::Draining)
                && slot.command.cid() == cid
        };
        let (tag, slot) = (0..).zip(&self.slots).find(|(_, slot)| is_it(slot))?;
        Some((tag, slot.step == Step::Ready))
    }

    /// Ends a command; `len_bytes` of its data go to the host.
    #[inline]
    pub(super) fn finish(
        &mut self,
        end: &mut Controller,
        tag: u16,
        len_bytes: u32,
        completion: Completion,
    ) {
        let step = self.slots[usize::from(tag)].step;
        if matches!(step, Step::AwaitingBuffer | Step::Half(_)) {
            self.leave_others(end, tag);
        }
        let slot = &mut self.slots[usize::from(tag)];
        // What is still coming may be on its way to there until its answer is sent.
        let is_coming = slot.step == Step::AwaitingData;
        slot.step = if is_coming { Step::Draining } else { Step::Answered };
        if len_bytes == 0
            && !is_coming
            && let Some(buffer) = slot.buffer.take()
        {
            self.purse.give(buffer);
        }
        let finished = end.finish(tag, len_bytes, completion);
        self.note(tag, finished);
    }

    /// Remembers what was not possible, the first of it.
    #[inline]
    fn note(&mut self, tag: u16, done: Result<(), NotPossible>) {
        if let Err(why) = done {
            let command = self.slots[usize::from(tag)].command;
            self.fault.get_or_insert(Fault { tag, command, why });
        }
    }

    /// What was not possible. Its connection cannot go on.
    #[inline]
    pub(super) fn fault(&self) -> Option<Fault> {
        self.fault
    }

    /// A command that was begun is never answered: a reset has ended it.
    pub(super) fn forget(&mut self, end: &mut Controller, tag: u16) {
        self.release(tag);
        let forgotten = end.forget(tag);
        self.note(tag, forgotten);
    }

    /// Ends a command that has no place here: it was refused as it came.
    pub(super) fn refuse(
        &mut self,
        end: &mut Controller,
        tag: u16,
        command: Command,
        status: Status,
    ) {
        self.miss_second(end);
        *self.place(tag) = Slot { command, step: Step::Answered, ..Slot::FREE };
        let finished = end.finish(tag, 0, Completion::new(0, status));
        self.note(tag, finished);
    }

    /// Nothing of a command is left to send.
    #[inline]
    pub(super) fn release(&mut self, tag: u16) {
        let Some(slot) = self.slots.get_mut(usize::from(tag)) else { return };
        self.coming -= u32::from(slot.step.is_owed());
        slot.step = Step::Free;
        if let Some(buffer) = slot.buffer.take() {
            self.purse.give(buffer);
        }
    }

    /// A command ends that waits for a buffer, or for the other half of its pair.
    #[cold]
    fn leave_others(&mut self, end: &mut Controller, tag: u16) {
        self.waiting.retain(|waiting| *waiting != tag);
        self.leave_line();
        self.part(end, tag);
    }

    /// Who wants nothing any more does not stand in the way of others.
    #[inline]
    fn leave_line(&mut self) {
        if self.waiting.is_empty() && !self.is_stuck {
            self.purse.stop_waiting();
        }
    }

    /// Nothing more begins: what waits for memory never gets any, and what is idle goes back.
    pub(super) fn forsake(&mut self) {
        for tag in core::mem::take(&mut self.waiting) {
            self.slots[usize::from(tag)].step = Step::Free;
        }
        self.is_stuck = false;
        self.forsake_first();
        self.purse.stop_waiting();
        self.purse.tidy();
    }

    /// The stream is closed: nobody fills buffers any more but the queue, which may work on those of
    /// commands that have begun, and nobody reads them, unless answers are still read. All others go
    /// back.
    pub(super) fn give_back(&mut self, answers_are_read: bool) {
        self.forsake();
        for tag in (0_u16..).take(self.slots.len()) {
            let step = self.slots[usize::from(tag)].step;
            let is_read = answers_are_read && matches!(step, Step::Answered | Step::Draining);
            if !self.is_ready(tag) && !is_read {
                self.release(tag);
            }
        }
    }

    /// Nobody ever gets the buffers of answers again, since somebody may read them for ever. Bytes in
    /// them.
    pub(super) fn keep_answers(&mut self) -> u64 {
        let is_read = |slot: &&mut Slot| matches!(slot.step, Step::Answered | Step::Draining);
        self.slots.iter_mut().filter(is_read).map(Slot::abandon).sum()
    }

    /// Nobody ever gets the buffers of commands again that a queue has begun and not ended, since its
    /// medium may work on them for ever; all others go back.
    pub(super) fn abandon_begun(&mut self) {
        self.give_back(false);
        self.slots.iter_mut().for_each(|slot| _ = slot.abandon());
    }

    /// Everything goes back: the connection is over, and nobody works on any of it.
    pub(super) fn clear(&mut self) {
        for tag in (0_u16..).take(self.slots.len()) {
            self.release(tag);
        }
        self.give_back(false);
    }

    /// Gives back what is idle if somebody waits for it.
    #[inline]
    pub(super) fn share(&mut self) {
        if self.purse.is_wanted() {
            self.purse.tidy();
        }
    }

    /// Every block of memory that it has, used or not.
    pub(super) fn each_block(&self, put: &mut dyn FnMut(Range<u32>)) {
        let used = self.slots.iter().filter_map(|slot| slot.buffer.as_ref());
        let lower = self.first.as_ref().and_then(First::lower);
        used.chain(lower).chain(self.purse.idle()).for_each(|buffer| put(buffer.pages()));
    }

    /// Whether other hosts wait for what its commands have.
    pub(super) fn is_missed(&self) -> bool {
        self.purse.is_missed()
    }

    pub(super) fn purse(&mut self) -> &mut Purse {
        &mut self.purse
    }

    pub(super) fn budget(&self) -> &Budget {
        self.purse.budget()
    }
}

impl Slot {
    const FREE: Self = Self {
        command: Command([0; 8]),
        buffer: None,
        len_bytes: 0,
        way: Way::None,
        step: Step::Free,
        asked_at: Instant::NEVER,
        found_untaken: 0,
        is_unasked: false,
    };

    /// Nobody ever uses its buffer again. How many bytes those are.
    fn abandon(&mut self) -> u64 {
        let Some(buffer) = self.buffer.take() else { return 0 };
        let len_bytes = buffer.len_bytes();
        buffer.abandon();
        len_bytes
    }
}

impl Step {
    /// Whether the host owes data that it was asked for, or sends unasked.
    #[inline]
    fn is_owed(self) -> bool {
        match self {
            Self::AwaitingData | Self::Draining => true,
            Self::Half(half) => half.awaits_data(),
            Self::Free | Self::Ready | Self::Answered | Self::AwaitingBuffer => false,
        }
    }
}

impl Payloads for Rooms {
    fn digest(&self, tag: u16, offset: u32, len_bytes: u32) -> u32 {
        let mut digest = Crc32c::new();
        let mut bytes = [0; DIGEST_BYTES as usize];
        let end = offset + len_bytes;
        let mut at = offset;
        while at < end {
            let count = (end - at).min(DIGEST_BYTES);
            let into = &mut bytes[..count as usize];
            if let Some(segment) = self.segment(Place { tag, offset: at, len_bytes: count }) {
                // A buffer lies in a region that lives as long as its budget.
                let _ = self.purse.budget().regions().load(segment, into);
            }
            digest.update(into);
            at += count;
        }
        digest.value()
    }
}
