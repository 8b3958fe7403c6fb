//! Checks common to the requests of all devices.

use tenmil_base::{ErrorCategory, IoStatus, Limits, Operation, Request, Segment};

use tenmil_base::Error;

/// Maximum number of segments in a request of 1 MiB: 256 pages and one more for an unaligned start.
pub(crate) const SEGMENTS_MAX: u16 = 257;

/// The segments of a valid request, or the status to complete it with.
///
/// Checks that the operation is supported, the blocks exist, and the memory of a request with data is as
/// long as its blocks. Whether the memory itself exists is checked on access.
#[inline]
pub(crate) fn valid_request_segments<'a>(
    limits: &Limits,
    request: &Request,
    segments: &'a [Segment],
) -> Result<&'a [Segment], IoStatus> {
    if !limits.operations.has(request.operation) {
        return Err(IoStatus::INVALID_OPCODE);
    }
    validate_block_range(limits, request)?;
    match request.operation {
        Operation::Read | Operation::Write | Operation::Compare => {
            valid_data_segments(limits, request, segments, 1)
        }
        // The expected data and the new data.
        Operation::CompareAndWrite => valid_data_segments(limits, request, segments, 2),
        _ => Ok(&[]),
    }
}

/// Whether the blocks of a request exist. A flush has none.
pub(crate) fn validate_block_range(limits: &Limits, request: &Request) -> Result<(), IoStatus> {
    if request.operation == Operation::Flush {
        return Ok(());
    }
    let fits = |first: u64| {
        let end = first.checked_add(u64::from(request.blocks));
        end.is_some_and(|end| end <= limits.block_count)
    };
    let source = request.operation != Operation::Copy || fits(request.operand);
    if fits(request.lba) && source { Ok(()) } else { Err(IoStatus::LBA_OUT_OF_RANGE) }
}

/// Checks that the memory is `times` as long as the blocks.
fn valid_data_segments<'a>(
    limits: &Limits,
    request: &Request,
    segments: &'a [Segment],
    times: u64,
) -> Result<&'a [Segment], IoStatus> {
    let first = request.segment_first as usize;
    let own = segments.get(first..first + usize::from(request.segment_count));
    let own = own.ok_or(IoStatus::INVALID_FIELD)?;
    let len_bytes: u64 = own.iter().map(|segment| u64::from(segment.len_bytes)).sum();
    let good = request.blocks <= limits.request_blocks_max
        && request.segment_count <= limits.segments_max
        && request.metadata_count == 0
        && len_bytes == times * u64::from(request.blocks) * u64::from(limits.block_size);
    if good { Ok(own) } else { Err(IoStatus::INVALID_FIELD) }
}

/// Rejects a geometry that no NVMe namespace could have, with a message for the user.
pub(crate) fn validate_geometry(
    name: &str,
    block_size: u32,
    block_count: u64,
) -> Result<(), Error> {
    if !block_size.is_power_of_two() || !(512..=65_536).contains(&block_size) {
        return Err(Error::new(
            ErrorCategory::Usage,
            format!(
                "{name}: block size is {block_size}, expected a power of two from 512 to 65536"
            ),
        ));
    }
    if block_count == 0 {
        return Err(Error::new(
            ErrorCategory::Usage,
            format!("{name}: size is 0 blocks, expected at least 1"),
        ));
    }
    Ok(())
}
