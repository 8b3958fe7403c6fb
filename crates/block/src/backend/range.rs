//! What every medium asks of a request before it does anything.

use base::{Blame, Limits, Operation, Outcome, Request, Segment};

use crate::MediumError;

/// Most segments in a request of 1 MiB: 256 pages and the one that an unaligned start adds.
pub(crate) const SEGMENTS_MAX: u16 = 257;

/// The segments of a request that a medium with these limits can carry out, or how to answer it.
///
/// The blocks exist, the operation does, and the memory of a request that moves data is as long as
/// its blocks. Whether the memory exists is found out by touching it.
#[inline]
pub(crate) fn check<'a>(
    limits: &Limits,
    request: &Request,
    segments: &'a [Segment],
) -> Result<&'a [Segment], Outcome> {
    if !limits.support.has(request.operation) {
        return Err(Outcome::INVALID_OPCODE);
    }
    check_blocks(limits, request)?;
    match request.operation {
        Operation::Read | Operation::Write | Operation::Compare => {
            check_data(limits, request, segments, 1)
        }
        // The expected bytes and the new ones.
        Operation::CompareAndWrite => check_data(limits, request, segments, 2),
        _ => Ok(&[]),
    }
}

/// Whether the blocks of a request exist. Those of a flush do: it has none.
pub(crate) fn check_blocks(limits: &Limits, request: &Request) -> Result<(), Outcome> {
    if request.operation == Operation::Flush {
        return Ok(());
    }
    let fits = |first: u64| {
        let end = first.checked_add(u64::from(request.blocks));
        end.is_some_and(|end| end <= limits.block_count)
    };
    let source = request.operation != Operation::Copy || fits(request.operand);
    if fits(request.lba) && source { Ok(()) } else { Err(Outcome::LBA_OUT_OF_RANGE) }
}

/// Memory `times` as long as the blocks.
fn check_data<'a>(
    limits: &Limits,
    request: &Request,
    segments: &'a [Segment],
    times: u64,
) -> Result<&'a [Segment], Outcome> {
    let first = request.segment_first as usize;
    let own = segments.get(first..first + usize::from(request.segment_count));
    let own = own.ok_or(Outcome::INVALID_FIELD)?;
    let len_bytes: u64 = own.iter().map(|segment| u64::from(segment.len_bytes)).sum();
    let good = request.blocks <= limits.request_blocks_max
        && request.segment_count <= limits.segments_max
        && request.metadata_count == 0
        && len_bytes == times * u64::from(request.blocks) * u64::from(limits.block_size);
    if good { Ok(own) } else { Err(Outcome::INVALID_FIELD) }
}

/// Refuses blocks that no NVMe namespace could have, worded for whoever asked for them.
pub(crate) fn check_geometry(
    name: &str,
    block_size: u32,
    block_count: u64,
) -> Result<(), MediumError> {
    if !block_size.is_power_of_two() || !(512..=65_536).contains(&block_size) {
        return Err(MediumError::new(
            Blame::Caller,
            format!(
                "{name}: block size is {block_size}, expected a power of two from 512 to 65536"
            ),
        ));
    }
    if block_count == 0 {
        return Err(MediumError::new(
            Blame::Caller,
            format!("{name}: size is 0 blocks, expected at least 1"),
        ));
    }
    Ok(())
}
