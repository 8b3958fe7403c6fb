//! What goes down the stack and what comes back up.
//!
//! A [`Request`] is plain data: it names memory by [`Segment`](crate::Segment)s in a table that its
//! submitter keeps, and owns none of it. The submitter keeps the right to that memory away from
//! everyone else until the [`Answer`] with the same token has come back, which happens exactly once.

use core::fmt;

/// What to do with some blocks.
///
/// ```text
///   0        8      16        24        28       32         34         36      37      38..40
///   | token  | lba  | operand | segment | blocks | segments | metadata | oper. | flags |
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Request {
    /// Returned with the answer, unread.
    pub token: u64,
    /// First block.
    pub lba: u64,
    /// What the operation needs beyond a range: the first source block of a copy. Else zero.
    pub operand: u64,
    /// Index of the first data segment in the table that is handed over with the batch.
    pub segment_first: u32,
    /// How many blocks.
    pub blocks: u32,
    /// How many data segments follow from there. Metadata segments come right after them.
    pub segment_count: u16,
    /// How many metadata segments.
    pub metadata_count: u16,
    /// What to do.
    pub operation: Operation,
    /// How.
    pub flags: Flags,
}

const _: () = assert!(size_of::<Request>() == 40, "as drawn, with two bytes of padding at the end");

impl Request {
    /// A flush with token zero: what is in a place that will hold a request.
    pub const NOTHING: Self = Self {
        token: 0,
        lba: 0,
        operand: 0,
        segment_first: 0,
        blocks: 0,
        segment_count: 0,
        metadata_count: 0,
        operation: Operation::Flush,
        flags: Flags::NONE,
    };
}

/// What a backend can be asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Operation {
    /// Device to memory.
    Read,
    /// Memory to device.
    Write,
    /// Every write answered before this was submitted survives a power cut once this is answered.
    Flush,
    /// The blocks are no longer needed; what they read as afterwards is up to the device.
    Deallocate,
    /// The blocks read as zeroes afterwards.
    WriteZeroes,
    /// Memory and device hold the same bytes, or the answer is [`Outcome::COMPARE_FAILURE`].
    Compare,
    /// Reads of these blocks fail until they are written again.
    WriteUncorrectable,
    /// The blocks can be read; no data moves.
    Verify,
    /// Device to device: `operand` is the first source block.
    Copy,
    /// If the device holds the expected bytes, it holds the new ones afterwards, and nothing comes
    /// between the two; else nothing changes and the answer is [`Outcome::COMPARE_FAILURE`]. The
    /// segments hold first the expected bytes, then the new ones, each as long as the blocks.
    CompareAndWrite,
}

impl Operation {
    /// Every operation there is, in the order of their numbers.
    pub const ALL: [Self; 10] = [
        Self::Read,
        Self::Write,
        Self::Flush,
        Self::Deallocate,
        Self::WriteZeroes,
        Self::Compare,
        Self::WriteUncorrectable,
        Self::Verify,
        Self::Copy,
        Self::CompareAndWrite,
    ];

    /// The operation in words, as it appears in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
            Self::Deallocate => "deallocate",
            Self::WriteZeroes => "write-zeroes",
            Self::Compare => "compare",
            Self::WriteUncorrectable => "write-uncorrectable",
            Self::Verify => "verify",
            Self::Copy => "copy",
            Self::CompareAndWrite => "compare-and-write",
        }
    }
}

/// How to do it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Flags(pub u8);

impl Flags {
    /// Nothing special.
    pub const NONE: Self = Self(0);
    /// Force unit access: the data is on stable media when this is answered.
    pub const FUA: Self = Self(1);
    /// Of write zeroes: the blocks may be deallocated, as long as they read as zeroes.
    pub const DEALLOCATE: Self = Self(2);
    /// Limited retry: fail early rather than try hard.
    pub const LIMITED_RETRY: Self = Self(4);
    /// The submitter polls for the answer and never sleeps for it. Means something to the block
    /// layer, which may have queues for such requests, and to nobody below it.
    pub const POLLED: Self = Self(8);

    /// Whether every flag of `other` is set.
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Both sets of flags.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// How a request ended: the fifteen-bit status field of an NVMe completion, without the phase.
///
/// The whole stack answers in NVMe's words, so nothing is lost on the way from a device to a
/// program or from a backend to a guest. The full tables are in `wire::Status`; here are only the
/// few that backends make up themselves.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Outcome(pub u16);

impl Outcome {
    /// Done.
    pub const SUCCESS: Self = Self(0);
    /// The operation is not one this device has (generic 01h).
    pub const INVALID_OPCODE: Self = Self(0x01);
    /// A field of the request is not acceptable (generic 02h).
    pub const INVALID_FIELD: Self = Self(0x02);
    /// The memory could not be reached (generic 04h).
    pub const DATA_TRANSFER_ERROR: Self = Self(0x04);
    /// The device had an error of its own (generic 06h).
    pub const INTERNAL_ERROR: Self = Self(0x06);
    /// Given up on request (generic 07h).
    pub const ABORTED: Self = Self(0x07);
    /// There is no such device, or no longer (generic 0Bh).
    pub const NO_DEVICE: Self = Self(0x0b);
    /// The blocks may be read and not changed (generic 20h).
    pub const WRITE_PROTECTED: Self = Self(0x20);
    /// It was not begun, and may be submitted again (generic 21h, command interrupted).
    pub const INTERRUPTED: Self = Self(0x21);
    /// Blocks past the end of the device (generic 80h).
    pub const LBA_OUT_OF_RANGE: Self = Self(0x80);
    /// The medium has no room for the blocks (generic 81h).
    pub const CAPACITY_EXCEEDED: Self = Self(0x81);
    /// Another host has reserved the device, or another process owns it (generic 83h).
    pub const RESERVATION_CONFLICT: Self = Self(0x83);
    /// The medium could not take the data (media 80h).
    pub const WRITE_FAULT: Self = Self(0x280);
    /// The medium has lost the data (media 81h).
    pub const UNRECOVERED_READ: Self = Self(0x281);
    /// The bytes differ (media 85h).
    pub const COMPARE_FAILURE: Self = Self(0x285);
    /// The path to the device failed; the data may be fine (path 70h, host pathing error).
    pub const PATH_ERROR: Self = Self(0x370);
    /// The host gave up on it, and the device can no longer touch the memory (path 71h).
    pub const ABORTED_BY_HOST: Self = Self(0x371);

    /// Whether it was done.
    #[inline]
    pub const fn is_success(self) -> bool {
        self.0 == 0
    }

    /// Whether it is a Reservation Conflict, with or without Do Not Retry.
    pub const fn is_conflict(self) -> bool {
        self.0 & 0x7ff == Self::RESERVATION_CONFLICT.0
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without Command Retry Delay, More and Do Not Retry (NVM Express Base 2.1, figure 100).
        let code = self.0 & 0x7ff;
        let name = match Self(code) {
            Self::SUCCESS => return out.write_str("Successful Completion"),
            Self::INVALID_OPCODE => "Invalid Command Opcode",
            Self::INVALID_FIELD => "Invalid Field in Command",
            Self::DATA_TRANSFER_ERROR => "Data Transfer Error",
            Self::INTERNAL_ERROR => "Internal Error",
            Self::ABORTED => "Command Abort Requested",
            Self::NO_DEVICE => "Invalid Namespace or Format",
            Self::WRITE_PROTECTED => "Namespace is Write Protected",
            Self::INTERRUPTED => "Command Interrupted",
            Self::LBA_OUT_OF_RANGE => "LBA Out of Range",
            Self::CAPACITY_EXCEEDED => "Capacity Exceeded",
            Self::RESERVATION_CONFLICT => "Reservation Conflict",
            Self::WRITE_FAULT => "Write Fault",
            Self::UNRECOVERED_READ => "Unrecovered Read Error",
            Self::COMPARE_FAILURE => "Compare Failure",
            Self::PATH_ERROR => "Host Pathing Error",
            Self::ABORTED_BY_HOST => "Command Aborted By Host",
            _ => return write!(out, "NVMe status {code:x}h"),
        };
        write!(out, "{name} (NVMe status {code:x}h)")
    }
}

/// In words as well, so that no message tells a bare number.
impl fmt::Debug for Outcome {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, out)
    }
}

/// The answer to one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The token of the request.
    pub token: u64,
    /// How it ended.
    pub outcome: Outcome,
    /// What a command returns beside its outcome (dword 0 of the completion).
    pub result: u32,
}

/// Answers, in a place the caller owns. Bounded: a turn does bounded work.
#[derive(Debug)]
pub struct Answers {
    places: Box<[Answer]>,
    count: usize,
}

impl Answers {
    /// An empty place for at most `capacity` answers. Allocates here and never again.
    pub fn with_capacity(capacity: usize) -> Self {
        let nothing = Answer { token: 0, outcome: Outcome::SUCCESS, result: 0 };
        Self { places: vec![nothing; capacity].into_boxed_slice(), count: 0 }
    }

    /// Room left. A backend stops polling when it is zero.
    #[inline]
    pub fn room(&self) -> usize {
        self.places.len() - self.count
    }

    /// How many there are.
    #[inline]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there is none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Appends an answer.
    ///
    /// # Panics
    ///
    /// If there is no [`room`](Self::room).
    #[inline]
    pub fn push(&mut self, answer: Answer) {
        assert!(self.count < self.places.len(), "a backend looks at room() before it pushes");
        self.places[self.count] = answer;
        self.count += 1;
    }

    /// Appends answers that lie ready: one check for all of them.
    ///
    /// # Panics
    ///
    /// If there is no [`room`](Self::room) for them all.
    #[inline]
    pub fn append(&mut self, answers: &[Answer]) {
        if let [Answer { token, outcome, result }] = *answers {
            // One is not worth the call that copies many. Field by field: it may have been written
            // so just now, and to load it as a whole would wait for these stores.
            return self.push(Answer { token, outcome, result });
        }
        assert!(answers.len() <= self.room(), "a backend looks at room() before it appends");
        self.places[self.count..][..answers.len()].copy_from_slice(answers);
        self.count += answers.len();
    }

    /// Lets `fill` write answers into the places that are left, first one first, and say how many
    /// it wrote: for whoever has answers in a loop and wants to count them in a register.
    ///
    /// # Panics
    ///
    /// If it says more than there are places.
    #[inline]
    pub fn fill(&mut self, fill: impl FnOnce(&mut [Answer]) -> usize) -> usize {
        let count = fill(&mut self.places[self.count..]);
        assert!(count <= self.room(), "more answers than places");
        self.count += count;
        count
    }

    /// The answers, oldest first.
    #[inline]
    pub fn as_slice(&self) -> &[Answer] {
        &self.places[..self.count]
    }

    /// The answers after the first `skip`, to be put into other words: a layer that gave what it
    /// took other tokens gives the old ones back here.
    #[inline]
    pub fn after_mut(&mut self, skip: usize) -> &mut [Answer] {
        &mut self.places[skip..self.count]
    }

    /// Goes through the answers from number `first` on, oldest first, and takes out those which
    /// `take` claims for itself: for whoever sits between a backend and its caller, and has sent
    /// requests of its own. The others it may put into other words. Returns how many were taken out.
    #[inline]
    pub fn sift(&mut self, first: usize, mut take: impl FnMut(&mut Answer) -> bool) -> usize {
        let mut kept = first;
        for index in first..self.count {
            let mut answer = self.places[index];
            if !take(&mut answer) {
                self.places[kept] = answer;
                kept += 1;
            }
        }
        let taken = self.count.saturating_sub(kept);
        self.count -= taken;
        taken
    }

    /// Forgets the answers.
    #[inline]
    pub fn clear(&mut self) {
        self.count = 0;
    }

    /// Takes the answers out, oldest first, leaving the place empty.
    pub fn drain(&mut self) -> impl Iterator<Item = Answer> + '_ {
        let count = core::mem::take(&mut self.count);
        self.places[..count].iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::{Answer, Answers, Flags, Operation, Outcome};

    #[test]
    fn an_outcome_is_told_in_words_however_it_is_printed() {
        for outcome in [Outcome::WRITE_FAULT, Outcome(0x4280)] {
            assert_eq!(format!("{outcome}"), "Write Fault (NVMe status 280h)");
            assert_eq!(format!("{outcome:?}"), "Write Fault (NVMe status 280h)");
        }
        assert_eq!(format!("{:?}", Outcome(0x1c2)), "NVMe status 1c2h");
    }

    #[test]
    fn answers_are_bounded_and_come_out_oldest_first() {
        let mut answers = Answers::with_capacity(2);
        for token in [7, 8] {
            answers.push(Answer { token, outcome: Outcome::SUCCESS, result: 0 });
        }
        assert_eq!(answers.room(), 0);
        assert_eq!(answers.drain().map(|answer| answer.token).collect::<Vec<_>>(), [7, 8]);
        assert_eq!(answers.room(), 2);
    }

    #[test]
    fn answers_that_are_taken_out_leave_no_gap() {
        let mut answers = Answers::with_capacity(6);
        for token in 0..6 {
            answers.push(Answer { token, outcome: Outcome::SUCCESS, result: 0 });
        }
        assert_eq!(answers.sift(2, |answer| answer.token % 2 == 0), 2);
        let left: Vec<u64> = answers.as_slice().iter().map(|answer| answer.token).collect();
        assert_eq!((left, answers.room()), (vec![0, 1, 3, 5], 2));
        assert_eq!(answers.sift(4, |_| true), 0);
    }

    #[test]
    #[should_panic(expected = "room()")]
    fn appending_past_the_room_is_our_own_mistake() {
        let one = Answer { token: 0, outcome: Outcome::SUCCESS, result: 0 };
        let mut answers = Answers::with_capacity(3);
        answers.append(&[one, one]);
        answers.append(&[one]);
        assert_eq!(answers.room(), 0);
        answers.append(&[]);
        answers.append(&[one]);
    }

    #[test]
    fn places_are_filled_in_their_order_and_counted() {
        let answer = |token| Answer { token, outcome: Outcome::SUCCESS, result: 0 };
        let mut answers = Answers::with_capacity(3);
        answers.push(answer(1));
        let written = answers.fill(|places| {
            assert_eq!(places.len(), 2);
            places[0] = answer(2);
            1
        });
        assert_eq!((written, answers.as_slice()), (1, &[answer(1), answer(2)][..]));
        assert_eq!(answers.room(), 1);
    }

    #[test]
    #[should_panic(expected = "more answers than places")]
    fn filling_more_places_than_there_are_is_our_own_mistake() {
        Answers::with_capacity(1).fill(|places| places.len() + 1);
    }

    #[test]
    #[should_panic(expected = "room()")]
    fn pushing_past_the_room_is_our_own_mistake() {
        Answers::with_capacity(0).push(Answer { token: 0, outcome: Outcome::SUCCESS, result: 0 });
    }

    #[test]
    fn every_operation_is_in_the_list_at_its_number() {
        for (index, operation) in Operation::ALL.into_iter().enumerate() {
            assert_eq!(operation as usize, index);
        }
    }

    #[test]
    fn flags_combine_and_are_found_again() {
        let both = Flags::FUA.and(Flags::DEALLOCATE);
        assert!(both.has(Flags::FUA) && both.has(Flags::DEALLOCATE));
        assert!(!both.has(Flags::LIMITED_RETRY));
        assert!(!Flags::FUA.has(both));
    }
}
