//! Requests that are under way, kept so that they can be sent again after a connection was lost.
//!
//! ```text
//!   submit ──▶ slot: the request as it came, its segments ──▶ queue pair, under the slot's number
//!   answer ◀── its own token again ◀──────────────────────────┘  or: aborted by a reset ──▶ again
//! ```
//!
//! What is sent again without end may be what breaks the peer each time, so somebody has to find out
//! which request that is. A reset that others have caused says nothing about a request. Whose own
//! connection broke under it is a suspect, and goes alone from then on: if it breaks again, it is known
//! who did it.

use std::collections::VecDeque;

use base::{Flags, Instant, Operation, Request, Segment, Span};

/// The requests.
#[derive(Debug)]
pub(crate) struct Kept {
    slots: Box<[Slot]>,
    /// The segments of those that have more than one.
    lists: Box<[Vec<Segment>]>,
    free: Vec<u32>,
    /// Slots to be sent again.
    again: VecDeque<u32>,
    /// A suspect that has been sent, alone.
    probe: Option<u32>,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    request: Request,
    segment: Segment,
    /// When it was sent, in [ticks](TICK_BITS).
    sent_tick: u32,
    /// Counts the times that it went elsewhere and an answer is still to come from where it was.
    attempt: u16,
    /// Where it has been sent, if there is a choice.
    path: u8,
    /// Resets that it has caused, times that it was turned away, and whether it is a suspect.
    record: u8,
}

const _: () = assert!(size_of::<Slot>() == 64, "a line of the cache");

/// Whether a connection has broken by itself, and what was on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Broken {
    No,
    UnderMany,
    UnderOne,
}

/// A connection that has gone, as it was when that was noticed: what comes to light later, while the
/// old controller comes to rest, is nobody's fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Cut {
    pub(crate) at: Instant,
    pub(crate) broken: Broken,
}

/// How something that was sent has ended without an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// Others had it reset.
    Innocent,
    /// The connection broke that it was on, and others with it.
    Suspect,
    /// It was alone on the connection that broke, or had missed its deadline.
    Guilty,
}

/// What has caused so many resets is not sent once more.
const GUILT_MAX: u8 = 3;
/// Where a record counts that, and where it counts how often a path has turned the request away.
const GUILT: u8 = 0x03;
const TURN: u8 = 0x04;
const TURNS: u8 = 0x7c;
const SUSPECT: u8 = 0x80;

/// No path.
const NOWHERE: u8 = u8::MAX;

/// Where the attempt stands in a token, above the slot.
const ATTEMPT_SHIFT: u32 = 32;

/// A tick is a bit more than a second.
const TICK_BITS: u32 = 30;

impl Kept {
    /// Room for `depth` requests.
    pub(crate) fn new(depth: u32) -> Self {
        let slot = Slot {
            request: Request::NOTHING,
            segment: Segment::default(),
            sent_tick: 0,
            attempt: 0,
            path: NOWHERE,
            record: 0,
        };
        Self {
            slots: vec![slot; depth as usize].into(),
            lists: (0..depth).map(|_| Vec::new()).collect(),
            free: (0..depth).rev().collect(),
            again: VecDeque::with_capacity(depth as usize),
            probe: None,
        }
    }

    /// Keeps a request, and returns it under the number of its slot. `None` if there is no room.
    #[inline]
    pub(crate) fn keep(
        &mut self,
        now: Instant,
        request: &Request,
        segments: &[Segment],
    ) -> Option<Request> {
        let first = request.segment_first as usize;
        let count = usize::from(request.segment_count) + usize::from(request.metadata_count);
        let index = self.free.pop()?;
        let slot = &mut self.slots[index as usize];
        slot.request = *request;
        slot.sent_tick = tick_of(now);
        slot.record = 0;
        match count {
            0 => {}
            // A number past the table is refused by whoever gets the request next.
            1 => slot.segment = segments.get(first).copied().unwrap_or_default(),
            _ => {
                let list = &mut self.lists[index as usize];
                list.clear();
                list.extend(segments.iter().skip(first).take(count));
            }
        }
        Some(Request { token: index.into(), ..*request })
    }

    /// The request in `slot` has been answered, or was not sent after all. Its own token.
    #[inline]
    pub(crate) fn forget(&mut self, slot: u64) -> u64 {
        let index = index_of(slot);
        self.free.push(index);
        let slot = &mut self.slots[index as usize];
        slot.path = NOWHERE;
        slot.request.token
    }

    /// Whether there is nothing that was not answered.
    pub(crate) fn is_empty(&self) -> bool {
        self.slots.len() == self.free.len()
    }

    /// How many have been sent and not answered.
    pub(crate) fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len() - self.again.len()
    }

    /// How the request in `slot` has ended with its connection, which had `limit` to be answered.
    pub(crate) fn ending(&self, cut: Cut, slot: u64, limit: Span) -> Ending {
        let index = index_of(slot);
        let age = tick_of(cut.at).wrapping_sub(self.slots[index as usize].sent_tick);
        let is_overdue = u64::from(age) << TICK_BITS >= limit.ns;
        match cut.broken {
            Broken::UnderOne => Ending::Guilty,
            Broken::UnderMany if self.probe == Some(index) => Ending::Guilty,
            Broken::UnderMany => Ending::Suspect,
            Broken::No => {
                if is_overdue {
                    Ending::Guilty
                } else {
                    Ending::Innocent
                }
            }
        }
    }

    /// The request in `slot` is to be sent again, if it may be, and has not done harm often enough.
    /// False if not.
    pub(crate) fn send_again(&mut self, slot: u64, ending: Ending) -> bool {
        let index = index_of(slot);
        self.end_probe(index);
        let slot = &mut self.slots[index as usize];
        match ending {
            Ending::Innocent => {}
            Ending::Suspect => slot.record |= SUSPECT,
            Ending::Guilty => slot.record = (slot.record | SUSPECT) + 1,
        }
        let may = slot.record & GUILT < GUILT_MAX && may_be_repeated(&slot.request);
        slot.path = NOWHERE;
        if may {
            self.again.push_back(index);
        }
        may
    }

    /// Whether nothing new is to be sent: something is to be sent again first, or a suspect is out.
    #[inline]
    pub(crate) fn is_cautious(&self) -> bool {
        !self.again.is_empty() || self.probe.is_some()
    }

    /// The request in `slot` was answered: if it was a suspect, it was no harm.
    pub(crate) fn acquit(&mut self, slot: u64) {
        self.end_probe(index_of(slot));
    }

    fn end_probe(&mut self, index: u32) {
        self.probe = self.probe.filter(|probe| *probe != index);
    }

    /// The next request that is to be sent again, under the token it goes by, and its segments.
    /// `in_flight` others are where it would go: a suspect waits for them, and others for it.
    pub(crate) fn next_again(&self, in_flight: usize) -> Option<(Request, &[Segment])> {
        let index = *self.again.front()?;
        let Slot { request, segment, record, attempt, .. } = &self.slots[index as usize];
        if self.probe.is_some() || record & SUSPECT != 0 && in_flight > 0 {
            return None;
        }
        let count = usize::from(request.segment_count) + usize::from(request.metadata_count);
        let segments = match count {
            0 | 1 => core::slice::from_ref(segment),
            _ => &self.lists[index as usize],
        };
        let token = u64::from(index) | u64::from(*attempt) << ATTEMPT_SHIFT;
        Some((Request { token, segment_first: 0, ..*request }, segments))
    }

    /// The next one has been sent to `path`, which answers for it from now on.
    pub(crate) fn sent_again(&mut self, now: Instant, path: usize) {
        let Some(index) = self.again.pop_front() else { return };
        let slot = &mut self.slots[index as usize];
        slot.path = u8::try_from(path).unwrap_or(NOWHERE);
        slot.sent_tick = tick_of(now);
        if slot.record & SUSPECT != 0 {
            self.probe = Some(index);
        }
    }

    /// The next one is given up: its slot.
    pub(crate) fn give_up(&mut self) -> Option<u64> {
        self.again.pop_front().map(u64::from)
    }

    /// The request in `slot` goes to `path`: the token it goes by there.
    #[inline]
    pub(crate) fn send_to(&mut self, slot: u64, path: usize) -> u64 {
        let slot_of = &mut self.slots[index_of(slot) as usize];
        slot_of.path = u8::try_from(path).unwrap_or(NOWHERE);
        slot | u64::from(slot_of.attempt) << ATTEMPT_SHIFT
    }

    /// Whether whoever has sent the request with this token still waits for the answer to it.
    #[inline]
    pub(crate) fn is_awaited(&self, token: u64) -> bool {
        u64::from(self.slots[index_of(token) as usize].attempt) == token >> ATTEMPT_SHIFT
    }

    /// The request in `slot` has not been sent after all, or was answered by somebody who has not
    /// done it: it is sent later.
    pub(crate) fn hold(&mut self, slot: u64) {
        let index = index_of(slot);
        self.end_probe(index);
        self.slots[index as usize].path = NOWHERE;
        self.again.push_back(index);
    }

    /// The request in `slot` was answered by a path that has not done it: it is to be sent again, if
    /// it may be, and has not been turned away often enough. False if not.
    pub(crate) fn turn_away(&mut self, slot: u64, is_undone: bool) -> bool {
        self.acquit(slot);
        let of = &mut self.slots[index_of(slot) as usize];
        // Of a copy that was split, other parts may have been done.
        let is_undone = is_undone && of.request.operation != Operation::Copy;
        let may = of.record & TURNS < TURNS && (is_undone || may_be_repeated(&of.request));
        if may {
            of.record += TURN;
            self.hold(slot);
        }
        may
    }

    /// What was sent to `path`, has not been answered, and `may` go elsewhere without an answer is to
    /// be sent again. `cut` says how the path has ended, and `limit` how long each had. Returns how
    /// many there are, whose answers nobody waits for any more, and those that are not to be sent once
    /// more. A suspect that was there holds nobody up any longer.
    pub(crate) fn leave(
        &mut self,
        path: usize,
        cut: Cut,
        limit: Span,
        may: impl Fn(Operation) -> bool,
    ) -> (u32, Vec<u64>) {
        let (mut count, mut guilty) = (0, Vec::new());
        for index in 0..u32::try_from(self.slots.len()).unwrap_or(u32::MAX) {
            let slot = &self.slots[index as usize];
            if usize::from(slot.path) != path {
                continue;
            }
            if !may(slot.request.operation) {
                self.end_probe(index);
                continue;
            }
            let ending = self.ending(cut, index.into(), limit);
            let slot = &mut self.slots[index as usize];
            slot.attempt = slot.attempt.wrapping_add(1);
            count += 1;
            if !self.send_again(index.into(), ending) {
                guilty.push(index.into());
            }
        }
        (count, guilty)
    }

    /// The slot of what is to be sent again next.
    pub(crate) fn first_again(&self) -> Option<u64> {
        self.again.front().map(|index| u64::from(*index))
    }

    /// Whether what the request in `slot` has changed may lie in a volatile cache.
    #[inline]
    pub(crate) fn is_volatile(&self, slot: u64) -> bool {
        let Request { operation, flags, .. } = self.slots[index_of(slot) as usize].request;
        changes(operation) && !flags.has(Flags::FUA)
    }

    /// Whether anything is to be sent again.
    pub(crate) fn has_again(&self) -> bool {
        !self.again.is_empty()
    }
}

/// Whether what was answered may be in a volatile cache now.
#[inline]
const fn changes(operation: Operation) -> bool {
    !matches!(
        operation,
        Operation::Read | Operation::Flush | Operation::Verify | Operation::Compare
    )
}

/// Whether a request does the same when it is done twice, the first time perhaps in part.
fn may_be_repeated(request: &Request) -> bool {
    match request.operation {
        // The first time may have overwritten what the second would copy.
        Operation::Copy => request.lba.abs_diff(request.operand) >= u64::from(request.blocks),
        Operation::CompareAndWrite => false,
        _ => true,
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the tokens are our own")]
#[inline]
const fn index_of(slot: u64) -> u32 {
    slot as u32
}

#[expect(clippy::cast_possible_truncation, reason = "ticks wrap after a century")]
#[inline]
const fn tick_of(now: Instant) -> u32 {
    (now.ns >> TICK_BITS) as u32
}

#[cfg(test)]
mod tests;
