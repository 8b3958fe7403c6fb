//! Block requests and their completions.
//!
//! A [`Request`] is plain data: it names memory by [`Segment`](crate::Segment)s in a table of its
//! submitter, and owns none of it. The submitter gives that memory to nothing else until the
//! [`IoCompletion`] with the same token has arrived, which happens exactly once.

use core::fmt;

/// Request to a block device.
///
/// ```text
///   0        8      16        24        28       32         34         36      37      38..40
///   | token  | lba  | operand | segment | blocks | segments | metadata | oper. | flags |
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Request {
    /// Opaque value returned in the completion.
    pub token: u64,
    /// First block.
    pub lba: u64,
    /// Additional operand: the first source block of a copy, else zero.
    pub operand: u64,
    /// Index of the first data segment in the table submitted with the batch.
    pub segment_first: u32,
    /// Number of blocks.
    pub blocks: u32,
    /// Number of data segments. Metadata segments follow them directly.
    pub segment_count: u16,
    /// Number of metadata segments.
    pub metadata_count: u16,
    /// Operation.
    pub operation: Operation,
    /// Flags.
    pub flags: RequestFlags,
}

const _: () = assert!(size_of::<Request>() == 40, "as drawn, with two bytes of padding at the end");

impl Request {
    /// Placeholder: a flush with token zero.
    pub const PLACEHOLDER: Self = Self {
        token: 0,
        lba: 0,
        operand: 0,
        segment_first: 0,
        blocks: 0,
        segment_count: 0,
        metadata_count: 0,
        operation: Operation::Flush,
        flags: RequestFlags::NONE,
    };
}

/// Operation of a block device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Operation {
    /// Device to memory.
    Read,
    /// Memory to device.
    Write,
    /// Makes every write that completed before this was submitted persistent.
    Flush,
    /// The blocks are no longer needed; their later content is up to the device.
    Deallocate,
    /// The blocks read as zeroes afterwards.
    WriteZeroes,
    /// Compares memory and device; a difference completes with [`IoStatus::COMPARE_FAILURE`].
    Compare,
    /// Reads of these blocks fail until they are written again.
    WriteUncorrectable,
    /// Checks that the blocks can be read, without a data transfer.
    Verify,
    /// Device to device: `operand` is the first source block.
    Copy,
    /// Atomic compare and write: if the device holds the expected bytes, they are replaced by the
    /// new ones; otherwise nothing changes and the status is [`IoStatus::COMPARE_FAILURE`]. The
    /// segments contain first the expected bytes, then the new ones, each as long as the blocks.
    CompareAndWrite,
}

impl Operation {
    /// All operations, in numerical order.
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

    /// Name of the operation, for reports.
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

/// Flags of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RequestFlags(pub u8);

impl RequestFlags {
    /// No flags.
    pub const NONE: Self = Self(0);
    /// Force unit access: at completion the data is on stable media.
    pub const FUA: Self = Self(1);
    /// For write zeroes: the blocks may be deallocated, as long as they read as zeroes.
    pub const DEALLOCATE: Self = Self(2);
    /// Limited retry: fail early rather than retry.
    pub const LIMITED_RETRY: Self = Self(4);
    /// The submitter polls for the completion and never sleeps for it. Used by the block layer,
    /// which may have queues for such requests; ignored below it.
    pub const POLLED: Self = Self(8);
    /// For a read of a device that reports holes [at reads](crate::HoleReporting::AtReads): if all
    /// its blocks are unallocated, it may leave the memory unchanged and complete with the result
    /// [`IoCompletion::HOLE`]. A device that sends parts of requests to others removes the flag.
    pub const HOLES: Self = Self(16);
    /// For a read of a device with [medium memory](crate::BlockDevice::medium_memory): it may leave
    /// the memory of the request unchanged and complete with the result [`IoCompletion::IN_PLACE`];
    /// the data are then in the medium's memory. A device that sends parts of requests to others
    /// removes the flag.
    pub const IN_PLACE: Self = Self(32);

    /// Whether every flag of `other` is set.
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Union of both sets of flags.
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// These flags without those of `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }
}

/// Completion status of a request: the 15-bit status field of an NVMe completion, without the
/// phase.
///
/// All layers use NVMe status codes, so no information is lost between a device and a program, or
/// between a block device and a remote host. `tenmil_wire::Status` contains the complete tables; here are
/// only the codes that block devices generate themselves.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct IoStatus(pub u16);

impl IoStatus {
    /// Success.
    pub const SUCCESS: Self = Self(0);
    /// Unsupported operation (generic 01h).
    pub const INVALID_OPCODE: Self = Self(0x01);
    /// Invalid field in the request (generic 02h).
    pub const INVALID_FIELD: Self = Self(0x02);
    /// The memory is not accessible (generic 04h).
    pub const DATA_TRANSFER_ERROR: Self = Self(0x04);
    /// Internal error of the device (generic 06h).
    pub const INTERNAL_ERROR: Self = Self(0x06);
    /// Aborted on request (generic 07h).
    pub const ABORTED: Self = Self(0x07);
    /// The device does not exist, or no longer (generic 0Bh).
    pub const NO_DEVICE: Self = Self(0x0b);
    /// The blocks are read-only (generic 20h).
    pub const WRITE_PROTECTED: Self = Self(0x20);
    /// Not started, and may be submitted again (generic 21h, command interrupted).
    pub const INTERRUPTED: Self = Self(0x21);
    /// Blocks past the end of the device (generic 80h).
    pub const LBA_OUT_OF_RANGE: Self = Self(0x80);
    /// No free capacity for the blocks (generic 81h).
    pub const CAPACITY_EXCEEDED: Self = Self(0x81);
    /// Another host has reserved the device, or another process owns it (generic 83h).
    pub const RESERVATION_CONFLICT: Self = Self(0x83);
    /// The medium could not store the data (media 80h).
    pub const WRITE_FAULT: Self = Self(0x280);
    /// The medium has lost the data (media 81h).
    pub const UNRECOVERED_READ: Self = Self(0x281);
    /// The bytes differ (media 85h).
    pub const COMPARE_FAILURE: Self = Self(0x285);
    /// The path to the device failed; the data may be intact (path 70h, host pathing error).
    pub const PATH_ERROR: Self = Self(0x370);
    /// Aborted by the host; the device can no longer access the memory (path 71h).
    pub const ABORTED_BY_HOST: Self = Self(0x371);

    /// Whether it is success.
    #[inline]
    pub const fn is_success(self) -> bool {
        self.0 == 0
    }

    /// Whether it is a Reservation Conflict, with or without Do Not Retry.
    pub const fn is_conflict(self) -> bool {
        self.0 & 0x7ff == Self::RESERVATION_CONFLICT.0
    }
}

impl fmt::Display for IoStatus {
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

/// Includes the name, so that no message contains a bare number.
impl fmt::Debug for IoStatus {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, out)
    }
}

/// Completion of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoCompletion {
    /// Token of the request.
    pub token: u64,
    /// Status.
    pub status: IoStatus,
    /// Command-specific result (dword 0 of the completion).
    pub result: u32,
}

impl IoCompletion {
    /// Result of a read with [`RequestFlags::HOLES`]: its blocks read as zeroes, and the memory is
    /// unchanged.
    pub const HOLE: u32 = 1;
    /// Result of a read with [`RequestFlags::IN_PLACE`]: its data are in the [medium's
    /// memory](crate::BlockDevice::medium_memory), and the memory of the request is unchanged.
    pub const IN_PLACE: u32 = 2;
}

/// Bounded array of completions, owned by the caller.
#[derive(Debug)]
pub struct CompletionBatch {
    entries: Box<[IoCompletion]>,
    count: usize,
}

impl CompletionBatch {
    /// Creates an empty batch for at most `capacity` completions. Allocates only here.
    #[inline]
    pub fn with_capacity(capacity: usize) -> Self {
        let nothing = IoCompletion { token: 0, status: IoStatus::SUCCESS, result: 0 };
        Self { entries: vec![nothing; capacity].into_boxed_slice(), count: 0 }
    }

    /// Number of free entries. A channel stops polling when it is zero.
    #[inline]
    pub fn remaining(&self) -> usize {
        self.entries.len() - self.count
    }

    /// Number of completions.
    #[inline]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are no completions.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Appends a completion.
    ///
    /// # Panics
    ///
    /// If no entry is [free](Self::remaining).
    #[inline]
    pub fn push(&mut self, answer: IoCompletion) {
        assert!(self.count < self.entries.len(), "a backend checks room() before it pushes");
        self.entries[self.count] = answer;
        self.count += 1;
    }

    /// Appends several completions with a single check.
    ///
    /// # Panics
    ///
    /// If fewer entries are [free](Self::remaining).
    #[inline]
    pub fn append(&mut self, answers: &[IoCompletion]) {
        if let [IoCompletion { token, status: outcome, result }] = *answers {
            // A single one is not worth the call for a bulk copy. Field by field: loading it as a
            // whole right after it was written so would wait for these stores (failed store
            // forwarding).
            return self.push(IoCompletion { token, status: outcome, result });
        }
        assert!(answers.len() <= self.remaining(), "a backend checks room() before it appends");
        self.entries[self.count..][..answers.len()].copy_from_slice(answers);
        self.count += answers.len();
    }

    /// Lets `fill` write completions into the free entries, in order, and return their number: for
    /// loops that keep the count in a register.
    ///
    /// # Panics
    ///
    /// If it returns more than the number of free entries.
    #[inline]
    pub fn fill_with(&mut self, fill: impl FnOnce(&mut [IoCompletion]) -> usize) -> usize {
        let count = fill(&mut self.entries[self.count..]);
        assert!(count <= self.remaining(), "more completions than free slots");
        self.count += count;
        count
    }

    /// The completions, oldest first.
    #[inline]
    pub fn as_slice(&self) -> &[IoCompletion] {
        &self.entries[..self.count]
    }

    /// The completions after the first `skip`, for translation: a layer that replaced tokens
    /// restores them here.
    #[inline]
    pub fn tail_mut(&mut self, skip: usize) -> &mut [IoCompletion] {
        &mut self.entries[skip..self.count]
    }

    /// Visits the completions from index `first` on, oldest first, and removes those for which
    /// `take` returns true: for a layer that has submitted requests of its own. `take` may modify
    /// the others. Returns the number removed.
    #[inline]
    pub fn remove_if(
        &mut self,
        first: usize,
        mut take: impl FnMut(&mut IoCompletion) -> bool,
    ) -> usize {
        let mut kept = first;
        for index in first..self.count {
            let mut answer = self.entries[index];
            if !take(&mut answer) {
                self.entries[kept] = answer;
                kept += 1;
            }
        }
        let taken = self.count.saturating_sub(kept);
        self.count -= taken;
        taken
    }

    /// Removes all completions.
    #[inline]
    pub fn clear(&mut self) {
        self.count = 0;
    }

    /// Removes and returns the completions, oldest first.
    pub fn drain(&mut self) -> impl Iterator<Item = IoCompletion> + '_ {
        let count = core::mem::take(&mut self.count);
        self.entries[..count].iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::{CompletionBatch, IoCompletion, IoStatus, Operation, RequestFlags};

    #[test]
    fn io_status_is_printed_as_text() {
        for outcome in [IoStatus::WRITE_FAULT, IoStatus(0x4280)] {
            assert_eq!(format!("{outcome}"), "Write Fault (NVMe status 280h)");
            assert_eq!(format!("{outcome:?}"), "Write Fault (NVMe status 280h)");
        }
        assert_eq!(format!("{:?}", IoStatus(0x1c2)), "NVMe status 1c2h");
    }

    #[test]
    fn completion_batch_is_bounded_and_in_order() {
        let mut answers = CompletionBatch::with_capacity(2);
        for token in [7, 8] {
            answers.push(IoCompletion { token, status: IoStatus::SUCCESS, result: 0 });
        }
        assert_eq!(answers.remaining(), 0);
        assert_eq!(answers.drain().map(|answer| answer.token).collect::<Vec<_>>(), [7, 8]);
        assert_eq!(answers.remaining(), 2);
    }

    #[test]
    fn extracted_completions_leave_no_gap() {
        let mut answers = CompletionBatch::with_capacity(6);
        for token in 0..6 {
            answers.push(IoCompletion { token, status: IoStatus::SUCCESS, result: 0 });
        }
        assert_eq!(answers.remove_if(2, |answer| answer.token % 2 == 0), 2);
        let left: Vec<u64> = answers.as_slice().iter().map(|answer| answer.token).collect();
        assert_eq!((left, answers.remaining()), (vec![0, 1, 3, 5], 2));
        assert_eq!(answers.remove_if(4, |_| true), 0);
    }

    #[test]
    #[should_panic(expected = "room()")]
    fn appending_beyond_the_capacity_panics() {
        let one = IoCompletion { token: 0, status: IoStatus::SUCCESS, result: 0 };
        let mut answers = CompletionBatch::with_capacity(3);
        answers.append(&[one, one]);
        answers.append(&[one]);
        assert_eq!(answers.remaining(), 0);
        answers.append(&[]);
        answers.append(&[one]);
    }

    #[test]
    fn filled_entries_are_in_order_and_counted() {
        let answer = |token| IoCompletion { token, status: IoStatus::SUCCESS, result: 0 };
        let mut answers = CompletionBatch::with_capacity(3);
        answers.push(answer(1));
        let written = answers.fill_with(|places| {
            assert_eq!(places.len(), 2);
            places[0] = answer(2);
            1
        });
        assert_eq!((written, answers.as_slice()), (1, &[answer(1), answer(2)][..]));
        assert_eq!(answers.remaining(), 1);
    }

    #[test]
    #[should_panic(expected = "more completions than free slots")]
    fn filling_beyond_the_capacity_panics() {
        CompletionBatch::with_capacity(1).fill_with(|places| places.len() + 1);
    }

    #[test]
    #[should_panic(expected = "room()")]
    fn pushing_beyond_the_capacity_panics() {
        CompletionBatch::with_capacity(0).push(IoCompletion {
            token: 0,
            status: IoStatus::SUCCESS,
            result: 0,
        });
    }

    #[test]
    fn operation_list_is_indexed_by_operation_number() {
        for (index, operation) in Operation::ALL.into_iter().enumerate() {
            assert_eq!(operation as usize, index);
        }
    }

    #[test]
    fn request_flags_are_a_bit_set() {
        let both = RequestFlags::FUA.union(RequestFlags::DEALLOCATE);
        assert!(both.has(RequestFlags::FUA) && both.has(RequestFlags::DEALLOCATE));
        assert!(!both.has(RequestFlags::LIMITED_RETRY));
        assert!(!RequestFlags::FUA.has(both));
    }
}
