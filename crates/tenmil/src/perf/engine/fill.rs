//! Writing a device once from end to end, so that what is read afterwards lies there.

use base::{Answers, Flags, Medium, Operation, Request, Segment};
use dma::{Backing, Mapping, Regions};
use host::Clock;

use crate::Refused;

/// Segments of a request at most: of one page each, all the same page.
const PAGES_MAX: u32 = 256;
const PAGE: u32 = 4096;

/// Writes every block of `medium`, whose name is `name`.
pub(super) fn fill(
    name: &str,
    medium: &dyn Medium,
    regions: &Regions,
    clock: &Clock,
) -> Result<(), Refused> {
    let refuse = |found: &dyn std::fmt::Display| Refused::machine(format!("fill {name}: {found}"));
    let limits = medium.limits();
    let mapping = Mapping::new(PAGE.max(limits.block_size) as usize, Backing::Private);
    let page = regions.add(mapping.map_err(|error| refuse(&error))?);
    let page = page.map_err(|error| refuse(&error))?;
    let page = Segment { len_bytes: PAGE.max(limits.block_size), ..page };
    let page_blocks = page.len_bytes / limits.block_size;
    let pages = (limits.request_blocks_max / page_blocks).min(PAGES_MAX);
    let pages = pages.min(limits.segments_max.into()).max(1);
    let segments = vec![page; pages as usize];
    let mut channel = medium.channel().map_err(|found| refuse(&found))?;
    let mut answers = Answers::with_capacity(1);
    let mut lba = 0;
    while lba < limits.block_count {
        let left = limits.block_count - lba;
        let blocks = u64::from(pages * page_blocks).min(left);
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        // The last blocks of a device that ends within a page are written by themselves.
        let blocks = if blocks < page_blocks { blocks } else { blocks - blocks % page_blocks };
        let request = Request {
            token: lba,
            lba,
            operand: 0,
            segment_first: 0,
            blocks,
            segment_count: u16::try_from(blocks.div_ceil(page_blocks)).unwrap_or(u16::MAX),
            metadata_count: 0,
            operation: Operation::Write,
            flags: Flags::NONE,
        };
        let last = [Segment { len_bytes: blocks * limits.block_size, ..page }];
        let own = if blocks < page_blocks { &last[..] } else { &segments[..] };
        while channel.submit(clock.now(), &[request], own) == 0 {
            channel.poll(clock.now(), &mut answers);
            answers.clear();
        }
        channel.flush();
        while channel.poll(clock.now(), &mut answers) == 0 {
            std::hint::spin_loop();
        }
        if let Some(answer) = answers.drain().find(|answer| !answer.outcome.is_success()) {
            let status = wire::Status(answer.outcome.0);
            return Err(Refused::peer(format!("fill {name}: blocks from {lba} on: {status}")));
        }
        lba += u64::from(blocks);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use base::Holds;
    use block::Opener;
    use dma::Regions;
    use host::Clock;

    use super::fill;

    #[test]
    fn every_block_has_been_written_even_the_last_ones() {
        for uri in ["ram:?size=1m&block=4k", "ram:1537k?block=512", "ram:64k?block=64k"] {
            let (regions, clock) = (Regions::new(4), Clock::start());
            let opener = Opener { regions: &regions, clock, seed: 1, more: &[] };
            let opened = opener.open(&uri.parse().unwrap()).unwrap();
            fill(uri, &*opened.medium, &regions, &clock).unwrap();
            let extent = opened.medium.extent(0).unwrap();
            assert_eq!(extent.holds, Holds::Data, "{uri}");
            assert_eq!(extent.blocks, opened.medium.limits().block_count, "{uri}");
        }
    }
}
