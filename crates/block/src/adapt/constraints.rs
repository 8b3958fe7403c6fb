//! Rules of adaptation: which requests fit unchanged, and which limits the adapted channel offers.

use tenmil_base::{IoStatus, Limits, Operation, OperationSet, Request, RequestFlags, Segment};

use super::{AdaptationOptions, DeallocateEmulation, FuaMode, MemoryAlignment};
use crate::internal_token::OWN_FIRST;

/// Properties of the device below that decide which requests can pass unchanged.
#[derive(Clone, Debug)]
pub(super) struct DeviceConstraints {
    pub(super) block_size: u32,
    pub(super) metadata_size: u16,
    pub(super) blocks_max: u32,
    pub(super) segments_max: u16,
    /// Zero means no boundary.
    pub(super) boundary: u32,
    /// A write of up to so many blocks must not be split for its segments or alignment.
    pub(super) atomic_blocks: u32,
    pub(super) alignment: MemoryAlignment,
    pub(super) force: FuaMode,
    pub(super) deallocate: DeallocateEmulation,
    /// Operations that the device below supports.
    pub(super) native: OperationSet,
}

/// How a request that does not fit is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AdaptationPlan {
    /// Unchanged, under an internal token.
    Whole,
    /// In parts, through a buffer where the memory is unaligned.
    Parts,
    /// By writing zeroes.
    Zeroes,
    /// By reading blocks into a buffer; a compare also compares them.
    Fetch,
    /// By reading blocks into a buffer and writing them from there.
    Copy,
    /// By reading and comparing, then writing.
    CompareAndWrite,
}

/// Whether an operation changes blocks.
pub(super) const fn changes_blocks(operation: Operation) -> bool {
    !matches!(
        operation,
        Operation::Read | Operation::Flush | Operation::Compare | Operation::Verify
    )
}

/// How many times the memory of a request holds its blocks.
const fn data_copies_in_memory(operation: Operation) -> u64 {
    match operation {
        Operation::Read | Operation::Write | Operation::Compare => 1,
        Operation::CompareAndWrite => 2,
        _ => 0,
    }
}

impl DeviceConstraints {
    pub(super) fn new(below: &Limits, options: &AdaptationOptions, chunk_blocks: u32) -> Self {
        let boundary = below.optimal_boundary_blocks;
        let atomic_blocks = below.atomic_write_blocks.min(below.request_blocks_max);
        let atomic_blocks = atomic_blocks.min(chunk_blocks);
        Self {
            block_size: below.block_size,
            metadata_size: below.metadata_size,
            blocks_max: below.request_blocks_max.max(1),
            segments_max: below.segments_max.max(1),
            boundary,
            atomic_blocks: if boundary > 0 { 1 } else { atomic_blocks },
            alignment: options.alignment,
            force: options.force,
            deallocate: options.deallocate,
            native: below.operations,
        }
    }

    /// The limits of the adapted channel.
    pub(super) fn limits_above(&self, below: &Limits, options: &AdaptationOptions) -> Limits {
        let mut support = self.native;
        let (reads, writes) = (self.native.has(Operation::Read), self.native.has(Operation::Write));
        // Emulation that reads into a buffer has no memory for metadata.
        if self.metadata_size == 0 {
            for (emulated, can) in [
                (Operation::Compare, reads),
                (Operation::Verify, reads),
                (Operation::WriteZeroes, writes),
                (Operation::Copy, reads && writes),
                (Operation::CompareAndWrite, reads && writes),
            ] {
                support = if can { support.with(emulated) } else { support };
            }
        }
        if self.deallocate == DeallocateEmulation::Ignore {
            support = support.with(Operation::Deallocate);
        }
        Limits {
            request_blocks_max: u32::MAX,
            segments_max: options.segments_max.max(self.segments_max),
            optimal_boundary_blocks: 0,
            atomic_write_blocks: self.atomic_blocks,
            operations: support,
            ..below.clone()
        }
    }

    /// The number of leading requests that pass unchanged.
    #[inline]
    pub(super) fn passing_count(&self, requests: &[Request], segments: &[Segment]) -> usize {
        let mut count = 0;
        while let Some(request) = requests.get(count)
            && self.passes_unchanged(request, segments)
        {
            count += self.count_like_first(request, &requests[count..]).max(1);
        }
        count
    }

    /// The number of leading reads and writes that differ from `first`, which passes, in nothing
    /// relevant. Most batches are of one kind, so a request then costs a few comparisons.
    #[inline]
    fn count_like_first(&self, first: &Request, requests: &[Request]) -> usize {
        if !self.alignment.is_any() || operation_and_flags(first) > Operation::Write as u16 {
            return 0;
        }
        let likeness = packed_length_fields(first);
        let plain = |request: &Request| {
            packed_length_fields(request) == likeness
                && operation_and_flags(request) <= Operation::Write as u16
                && request.token < OWN_FIRST
        };
        match self.boundary {
            0 => {
                let (chunks, _) = requests.as_chunks();
                let alike = |chunk: &&[Request; CHUNK]| are_plain_and_alike(chunk, likeness);
                let whole = chunks.iter().take_while(alike).count() * CHUNK;
                whole + requests[whole..].iter().take_while(|request| plain(request)).count()
            }
            boundary if boundary.is_power_of_two() => {
                let mask = u64::from(boundary - 1);
                let last = u64::from(boundary.saturating_sub(first.blocks));
                let inside = |request: &&Request| plain(request) && request.lba & mask <= last;
                requests.iter().take_while(inside).count()
            }
            _ => 0,
        }
    }

    /// Whether a request can go below unchanged: it fits, or the channel below would reject it in any
    /// case.
    pub(super) fn passes_unchanged(&self, request: &Request, segments: &[Segment]) -> bool {
        let Request { operation, token, blocks, .. } = *request;
        if token >= OWN_FIRST || !self.native.has(operation) || self.must_emulate_fua(request) {
            return false;
        }
        if data_copies_in_memory(operation) == 0 {
            return true;
        }
        blocks <= self.blocks_max
            && blocks <= self.blocks_to_boundary(request.lba)
            && request.segment_count <= self.segments_max
            && (self.alignment.is_any()
                || request_segments(request, segments).is_none_or(|own| {
                    own.iter().all(|segment| self.alignment.is_aligned(*segment))
                }))
    }

    /// Whether FUA of this request is emulated by a flush.
    pub(super) fn must_emulate_fua(&self, request: &Request) -> bool {
        self.force == FuaMode::Flush
            && request.flags.has(RequestFlags::FUA)
            && !matches!(request.operation, Operation::Flush | Operation::Deallocate)
    }

    /// Blocks from `lba` to the next boundary.
    pub(super) fn blocks_to_boundary(&self, lba: u64) -> u32 {
        match u64::from(self.boundary) {
            0 => u32::MAX,
            boundary => u32::try_from(boundary - lba % boundary).unwrap_or(u32::MAX),
        }
    }

    /// Blocks from the last boundary before `end` to `end`.
    pub(super) fn blocks_since_boundary(&self, end: u64) -> u32 {
        match u64::from(self.boundary) {
            0 => u32::MAX,
            boundary => u32::try_from((end - 1) % boundary + 1).unwrap_or(u32::MAX),
        }
    }

    /// The plan of a request that does not fit, and its memory, data first; or the status to complete it
    /// with at once.
    pub(super) fn plan_request<'a>(
        &self,
        above: &Limits,
        request: &Request,
        segments: &'a [Segment],
    ) -> Result<(AdaptationPlan, &'a [Segment]), IoStatus> {
        let Request { operation, blocks, .. } = *request;
        if !above.operations.has(operation) {
            return Err(IoStatus::INVALID_OPCODE);
        }
        if operation == Operation::Flush {
            return Ok((AdaptationPlan::Whole, &[]));
        }
        let fits = |first: u64| {
            let end = first.checked_add(u64::from(blocks));
            end.is_some_and(|end| end <= above.block_count)
        };
        if !fits(request.lba) || (operation == Operation::Copy && !fits(request.operand)) {
            return Err(IoStatus::LBA_OUT_OF_RANGE);
        }
        let native = self.native.has(operation);
        let plan = match operation {
            Operation::Read | Operation::Write => AdaptationPlan::Parts,
            Operation::Compare if native => AdaptationPlan::Parts,
            Operation::CompareAndWrite if native && self.fits_as_one_request(request, segments) => {
                AdaptationPlan::Whole
            }
            // A compare-and-write with metadata cannot be emulated.
            Operation::CompareAndWrite if self.metadata_size > 0 => {
                return Err(IoStatus::INVALID_FIELD);
            }
            Operation::CompareAndWrite => AdaptationPlan::CompareAndWrite,
            _ if native => AdaptationPlan::Whole,
            Operation::WriteZeroes => AdaptationPlan::Zeroes,
            Operation::Compare | Operation::Verify => AdaptationPlan::Fetch,
            Operation::Copy => AdaptationPlan::Copy,
            // A deallocate without effect is valid.
            _ => return Err(IoStatus::SUCCESS),
        };
        Ok((plan, self.valid_data_segments(above, request, segments)?))
    }

    fn fits_as_one_request(&self, request: &Request, segments: &[Segment]) -> bool {
        let plain = Request { token: 0, flags: RequestFlags::NONE, ..*request };
        self.passes_unchanged(&plain, segments)
    }

    fn valid_data_segments<'a>(
        &self,
        above: &Limits,
        request: &Request,
        segments: &'a [Segment],
    ) -> Result<&'a [Segment], IoStatus> {
        let times = data_copies_in_memory(request.operation);
        if times == 0 {
            return Ok(&[]);
        }
        let own = request_segments(request, segments).ok_or(IoStatus::INVALID_FIELD)?;
        let (data, metadata) = own.split_at(usize::from(request.segment_count));
        let len_bytes = |list: &[Segment]| -> u64 {
            list.iter().map(|segment| u64::from(segment.len_bytes)).sum()
        };
        let wanted = |unit: u32| times * u64::from(request.blocks) * u64::from(unit);
        let good = request.segment_count <= above.segments_max
            && request.metadata_count <= above.segments_max
            && len_bytes(data) == wanted(self.block_size)
            && len_bytes(metadata) == wanted(self.metadata_size.into());
        if good { Ok(own) } else { Err(IoStatus::INVALID_FIELD) }
    }
}

/// The segments of a request, data first.
fn request_segments<'a>(request: &Request, segments: &'a [Segment]) -> Option<&'a [Segment]> {
    let count = usize::from(request.segment_count) + usize::from(request.metadata_count);
    segments.get(request.segment_first as usize..)?.get(..count)
}

/// Requests checked at once: a batch of 128 costs 11 instructions a request one by one, and 7 by eights.
const CHUNK: usize = 8;

/// Whether a few requests are all plain reads and writes of one kind. May return false for certain pairs
/// of tokens that combine to an internal one.
#[inline]
fn are_plain_and_alike(requests: &[Request; CHUNK], likeness: u64) -> bool {
    let (mut tokens, mut kinds) = (0, 0);
    for request in requests {
        tokens |= request.token;
        kinds |= operation_and_flags(request);
    }
    tokens < OWN_FIRST
        && kinds <= Operation::Write as u16
        && requests.iter().all(|request| packed_length_fields(request) == likeness)
}

/// Operation and flags in one word: a plain read or write is at most [`Operation::Write`].
#[inline]
fn operation_and_flags(request: &Request) -> u16 {
    u16::from(request.operation as u8) | u16::from(request.flags.0) << 8
}

/// The length fields of a request in one word, as they are in memory.
#[inline]
fn packed_length_fields(request: &Request) -> u64 {
    u64::from(request.blocks)
        | u64::from(request.segment_count) << 32
        | u64::from(request.metadata_count) << 48
}

#[cfg(test)]
mod tests {
    use tenmil_base::{Operation, OperationSet, Random, Request, RequestFlags};

    use super::DeviceConstraints;
    use crate::adapt::tests::scripted_channel::{limits, request};
    use crate::adapt::{AdaptationOptions, FuaMode};

    /// A batch of one kind with a few deviating requests.
    fn random_batch(random: &mut Random) -> Vec<Request> {
        let blocks = u32::try_from(random.below(5) + 1).unwrap();
        let different = random.below(4);
        (0..random.below(40))
            .map(|token| {
                let lba = random.below(20) * 6;
                let mut one = request(Operation::Read, token, lba, blocks);
                one.segment_count = 1;
                if random.below(20) >= different {
                    return one;
                }
                match random.below(7) {
                    0 => one.token = u64::MAX - token,
                    1 => one.flags = RequestFlags::FUA,
                    2 => one.blocks = 9,
                    3 => one.segment_count = 3,
                    4 => one.operation = Operation::Verify,
                    5 => one.operation = Operation::Flush,
                    _ => one.operation = Operation::Write,
                }
                one
            })
            .collect()
    }

    #[test]
    fn batch_passes_as_far_as_each_request_passes_alone() {
        let mut random = Random::new(1);
        let (mut all, mut some) = (0, 0);
        for _ in 0..5_000 {
            let mut below = limits();
            below.optimal_boundary_blocks = [0, 4, 8, 6][usize::try_from(random.below(4)).unwrap()];
            below.operations = OperationSet::from_operations(&[
                Operation::Read,
                Operation::Write,
                Operation::Flush,
            ]);
            let force = FuaMode::Flush;
            let options = AdaptationOptions { force, ..AdaptationOptions::default() };
            let rules = DeviceConstraints::new(&below, &options, 8);
            let requests = random_batch(&mut random);
            let alone =
                requests.iter().take_while(|request| rules.passes_unchanged(request, &[])).count();
            assert_eq!(rules.passing_count(&requests, &[]), alone, "{below:?} {requests:?}");
            all += usize::from(alone == requests.len());
            some += usize::from(alone > 8 && alone < requests.len());
        }
        assert!(all > 500 && some > 500, "{all} {some}");
    }
}
