//! Requests that are under way, kept so that they can be sent again after a connection was lost.
//!
//! ```text
//!   submit ──▶ slot: the request as it came, its segments ──▶ queue pair, under the slot's number
//!   answer ◀── its own token again ◀──────────────────────────┘  or: aborted by a reset ──▶ again
//! ```

use std::collections::VecDeque;

use base::{Operation, Request, Segment};

/// The requests.
#[derive(Debug)]
pub(crate) struct Kept {
    slots: Box<[Slot]>,
    /// The segments of those that have more than one.
    lists: Box<[Vec<Segment>]>,
    free: Vec<u32>,
    /// Slots to be sent again.
    again: VecDeque<u32>,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    request: Request,
    segment: Segment,
    /// How often it has been sent.
    sends: u8,
}

/// What was ended so often by a reset may well be its cause: it is not sent once more.
const SENDS_MAX: u8 = 3;

impl Kept {
    /// Room for `depth` requests.
    pub(crate) fn new(depth: u32) -> Self {
        let slot = Slot { request: Request::NOTHING, segment: Segment::default(), sends: 0 };
        Self {
            slots: vec![slot; depth as usize].into(),
            lists: (0..depth).map(|_| Vec::new()).collect(),
            free: (0..depth).rev().collect(),
            again: VecDeque::with_capacity(depth as usize),
        }
    }

    /// Keeps a request, and returns it under the number of its slot. `None` if there is no room.
    #[inline]
    pub(crate) fn keep(&mut self, request: &Request, segments: &[Segment]) -> Option<Request> {
        let first = request.segment_first as usize;
        let count = usize::from(request.segment_count) + usize::from(request.metadata_count);
        let index = self.free.pop()?;
        let slot = &mut self.slots[index as usize];
        slot.request = *request;
        slot.sends = 1;
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
        self.slots[index as usize].request.token
    }

    /// The request in `slot` is to be sent again, if it may be, and has not been often enough. False
    /// if not.
    pub(crate) fn send_again(&mut self, slot: u64) -> bool {
        let index = index_of(slot);
        let slot = &mut self.slots[index as usize];
        let may = slot.sends < SENDS_MAX && may_be_repeated(&slot.request);
        if may {
            slot.sends += 1;
            self.again.push_back(index);
        }
        may
    }

    pub(crate) fn has_again(&self) -> bool {
        !self.again.is_empty()
    }

    /// The next request that is to be sent again, under the number of its slot, and its segments.
    pub(crate) fn next_again(&self) -> Option<(Request, &[Segment])> {
        let index = *self.again.front()?;
        let Slot { request, segment, .. } = &self.slots[index as usize];
        let count = usize::from(request.segment_count) + usize::from(request.metadata_count);
        let segments = match count {
            0 | 1 => core::slice::from_ref(segment),
            _ => &self.lists[index as usize],
        };
        Some((Request { token: index.into(), segment_first: 0, ..*request }, segments))
    }

    /// The next one has been sent, or is given up: its slot.
    pub(crate) fn pop_again(&mut self) -> Option<u64> {
        self.again.pop_front().map(u64::from)
    }
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

#[cfg(test)]
mod tests {
    use base::{Operation, Request, Segment};

    use super::{Kept, may_be_repeated};

    fn request(token: u64, first: u32, count: u16) -> Request {
        Request { token, segment_first: first, segment_count: count, ..Request::NOTHING }
    }

    #[test]
    fn what_is_sent_again_is_what_was_kept() {
        let mut kept = Kept::new(2);
        let table: Vec<Segment> =
            (0..5).map(|at| Segment { offset: at, ..Segment::default() }).collect();
        let one = kept.keep(&request(70, 3, 1), &table).unwrap();
        let three = kept.keep(&request(71, 1, 3), &table).unwrap();
        assert_eq!(kept.keep(&request(72, 0, 0), &table), None, "there are two places");
        assert!(kept.send_again(three.token) && kept.send_again(one.token));
        for (expected, token, slot) in [(&table[1..4], 71, three), (&table[3..4], 70, one)] {
            let (again, segments) = kept.next_again().unwrap();
            assert_eq!((again.token, again.segment_first), (slot.token, 0));
            assert_eq!(segments, expected);
            assert_eq!(kept.pop_again(), Some(slot.token));
            assert_eq!(kept.forget(slot.token), token);
        }
        assert!(!kept.has_again() && kept.free.len() == 2);
    }

    #[test]
    fn only_what_does_the_same_twice_is_repeated() {
        for operation in Operation::ALL {
            let request =
                Request { operation, lba: 100, operand: 200, blocks: 100, ..Request::NOTHING };
            assert_eq!(may_be_repeated(&request), operation != Operation::CompareAndWrite);
            let overlapping = Request { operand: 199, ..request };
            let copies = matches!(operation, Operation::Copy | Operation::CompareAndWrite);
            assert_eq!(may_be_repeated(&overlapping), !copies, "{operation:?}");
        }
    }
}
