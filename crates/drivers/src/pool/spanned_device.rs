//! Combines the devices of a pool: its pages run through them end to end.
//!
//! ```text
//!   pages of the pool:    0            begin          begin            ...   BLOCKS_MAX
//!                         | first leg   | second leg   | third leg, open end        | first leg again
//!   pages of a device:    0             at             at
//! ```
//!
//! Addresses past the maximum size of a pool do not belong to it: the channel of a volume with a parent
//! uses them for the parent, and they go to the first leg. The last run has an open end, so that growth
//! of its device needs no notification.

use std::sync::Arc;

use tenmil_base::{BlockDevice, ChannelGroup, Error, IoChannel, Limits};
use tenmil_volume::format::BLOCKS_MAX;

use super::PAGE_BYTES;
use crate::multi_leg_channel::{BlockLayout, MultiLegChannel, common_leg_limits};

/// Several devices as one.
pub(super) struct SpannedDevice {
    legs: Vec<PoolDeviceSpan>,
    limits: Limits,
}

/// Pool pages that are contiguous on one device.
#[derive(Clone)]
pub(super) struct PoolDeviceSpan {
    pub(super) medium: Arc<dyn BlockDevice>,
    /// The first of them in the pool, and its location on the device.
    pub(super) begin: u64,
    pub(super) at: u64,
}

/// Maps pool blocks to devices.
#[derive(Clone, Debug)]
pub(super) struct SpanMap {
    runs: Vec<PageRun>,
    /// Blocks in a page, in units of the requests.
    per_page: u64,
}

/// Contiguous pages on a leg.
#[derive(Clone, Copy, Debug)]
struct PageRun {
    begin: u64,
    end: u64,
    at: u64,
    per_page: u64,
}

impl SpannedDevice {
    /// Combines legs in ascending order of pages.
    pub(super) fn new(legs: Vec<PoolDeviceSpan>, pages: u64) -> Self {
        let own: Vec<Limits> = legs.iter().map(|leg| leg.medium.limits()).collect();
        let block_size = own.first().map_or(PAGE_BYTES, |first| first.block_size);
        let common = common_leg_limits(
            &own.iter().map(|one| limits_in_blocks(one, block_size)).collect::<Vec<_>>(),
        );
        let limits = common.unwrap_or_else(|| own[0].clone());
        let block_count = pages * u64::from(PAGE_BYTES / block_size);
        // A write across two devices is torn if only one of them has executed it.
        let limits = Limits { block_size, block_count, atomic_write_blocks: 1, ..limits };
        Self { legs, limits }
    }
}

/// The limits of a device in blocks of another size.
fn limits_in_blocks(limits: &Limits, block_size: u32) -> Limits {
    let bytes = |blocks: u32| blocks.saturating_mul(limits.block_size);
    Limits {
        request_blocks_max: bytes(limits.request_blocks_max) / block_size,
        atomic_write_blocks: (bytes(limits.atomic_write_blocks) / block_size).max(1),
        optimal_boundary_blocks: 0,
        ..limits.clone()
    }
}

impl BlockDevice for SpannedDevice {
    fn limits(&self) -> Limits {
        self.limits.clone()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let legs = self.legs.iter().map(|leg| leg.medium.channel());
        let legs = ChannelGroup::open_together(|| legs.collect::<Result<_, _>>())?;
        let spans = SpanMap::from_spans(&self.legs, self.limits.block_size);
        Ok(Box::new(MultiLegChannel::new(legs, spans, limits_with_unbounded_size(&self.limits))?))
    }

    fn channels_max(&self) -> u32 {
        self.legs.iter().map(|leg| leg.medium.channels_max()).min().unwrap_or(0)
    }

    fn failure_reason(&self) -> Option<String> {
        self.legs.iter().find_map(|leg| leg.medium.failure_reason())
    }
}

/// The limits without a size, for channels that are not notified of growth. Requests are within the pool.
pub(super) fn limits_with_unbounded_size(limits: &Limits) -> Limits {
    Limits { block_count: u64::MAX, optimal_boundary_blocks: 0, ..limits.clone() }
}

impl SpanMap {
    /// The map over these legs, for requests in blocks of `block_size`.
    pub(super) fn from_spans(legs: &[PoolDeviceSpan], block_size: u32) -> Self {
        let ends = legs.iter().skip(1).map(|leg| leg.begin).chain([BLOCKS_MAX]);
        let run = |(leg, end): (&PoolDeviceSpan, u64)| {
            let per_page = u64::from(PAGE_BYTES / leg.medium.limits().block_size);
            PageRun { begin: leg.begin, end, at: leg.at, per_page }
        };
        let runs = legs.iter().zip(ends).map(run).collect();
        Self { runs, per_page: u64::from(PAGE_BYTES / block_size) }
    }

    /// The map of one more leg behind a leg with all previous pages in blocks of `block_size`.
    pub(super) fn with_previous_and(leg: &PoolDeviceSpan, block_size: u32) -> Self {
        let per_page = u64::from(PAGE_BYTES / block_size);
        let theirs = u64::from(PAGE_BYTES / leg.medium.limits().block_size);
        let before = PageRun { begin: 0, end: leg.begin, at: 0, per_page };
        let own = PageRun { begin: leg.begin, end: BLOCKS_MAX, at: leg.at, per_page: theirs };
        Self { runs: vec![before, own], per_page }
    }
}

impl BlockLayout for SpanMap {
    const MARK: u64 = 1 << 62;

    fn leg_of_block(&self, lba: u64) -> (usize, u64) {
        let page = lba / self.per_page;
        let found = self.runs.iter().position(|run| (run.begin..run.end).contains(&page));
        found.map_or((0, u64::MAX), |index| (index, self.runs[index].end * self.per_page - lba))
    }

    fn range_on_leg(&self, leg: usize, lba: u64, blocks: u32) -> (u64, u32) {
        let (page, pages) = (lba / self.per_page, u64::from(blocks) / self.per_page);
        if page >= BLOCKS_MAX {
            return (lba, if leg == 0 { blocks } else { 0 });
        }
        let PageRun { begin, end, at, per_page } = self.runs[leg];
        let (first, last) = (page.max(begin), (page + pages).min(end));
        let count = last.saturating_sub(first) * per_page;
        // A part has at most as many blocks as a request of pages.
        ((first.saturating_sub(begin) + at) * per_page, u32::try_from(count).unwrap_or(u32::MAX))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tenmil_base::{
        BlockDevice, CompletionBatch, Instant, IoChannel, IoStatus, Memory, Operation, Request,
        RequestFlags, Segment,
    };
    use tenmil_dma::RegionTable;
    use tenmil_volume::format::BLOCKS_MAX;

    use super::super::missing_device::MissingDevice;
    use super::{PoolDeviceSpan, SpanMap, SpannedDevice, limits_with_unbounded_size};
    use crate::RamDevice;
    use crate::conformance::PartialAcceptDevice;
    use crate::multi_leg_channel::{BlockLayout, MultiLegChannel};

    fn device_span(medium: &Arc<RamDevice>, begin: u64, at: u64) -> PoolDeviceSpan {
        let medium: Arc<dyn BlockDevice> = medium.clone();
        PoolDeviceSpan { medium, begin, at }
    }

    /// Transfers a run of pages, and returns the status.
    fn transfer_pages(
        channel: &mut dyn IoChannel,
        operation: Operation,
        page: u64,
        memory: Segment,
    ) -> IoStatus {
        let request = Request {
            token: 9,
            lba: page * 4,
            blocks: memory.len_bytes / 1024,
            segment_count: 1,
            operation,
            flags: RequestFlags::NONE,
            ..Request::PLACEHOLDER
        };
        let mut completions = CompletionBatch::with_capacity(4);
        assert_eq!(channel.submit(Instant::default(), &[request], &[memory]), 1);
        for _ in 0..100 {
            channel.flush_submissions();
            if channel.poll(Instant::default(), &mut completions) > 0 {
                assert_eq!(completions.as_slice()[0].token, 9);
                return completions.as_slice()[0].status;
            }
        }
        panic!("{operation:?} is answered");
    }

    #[test]
    fn span_map_handles_different_block_sizes() {
        let regions = RegionTable::new(8);
        let memory = regions.allocate_region(64 << 10).unwrap();
        let rams: Vec<Arc<RamDevice>> = [1024, 512, 4096]
            .map(|block| {
                Arc::new(RamDevice::new(&regions, block, u64::from(40 * 4096 / block)).unwrap())
            })
            .into();
        let legs = vec![
            device_span(&rams[0], 0, 0),
            device_span(&rams[1], 10, 1),
            device_span(&rams[2], 15, 30),
        ];
        let legs = [legs, vec![device_span(&rams[0], 20, 10)]].concat();
        let spanned = SpannedDevice::new(legs, 40);
        assert_eq!(spanned.limits().block_count, 160);
        let mut channel = spanned.channel().unwrap();
        // Each page contains its number; all are written at once, across every device boundary.
        for page in 0..16 {
            let location =
                memory.segment().slice(u32::try_from(page * 4096).unwrap(), 4096).unwrap();
            regions.fill(location, u8::try_from(page + 5).unwrap()).unwrap();
        }
        let all = memory.segment().slice(0, 16 * 4096).unwrap();
        assert_eq!(transfer_pages(&mut *channel, Operation::Write, 7, all), IoStatus::SUCCESS);
        let expected =
            [(0_usize, 7_u64..10, 0_i64), (1, 10..15, 9), (2, 15..20, -15), (0, 20..23, 10)];
        for (device, pages, off) in expected {
            let block = rams[device].limits().block_size;
            for page in pages {
                let at = page.checked_add_signed(-off).unwrap();
                let mut own = rams[device].channel().unwrap();
                let location = memory.segment().slice(0, 4096).unwrap();
                regions.fill(location, 0xee).unwrap();
                let request = Request {
                    lba: at * u64::from(4096 / block),
                    blocks: 4096 / block,
                    segment_count: 1,
                    operation: Operation::Read,
                    ..Request::PLACEHOLDER
                };
                own.submit(Instant::default(), &[request], &[location]);
                own.poll(Instant::default(), &mut CompletionBatch::with_capacity(1));
                let mut found = [0; 4096];
                regions.load(location, &mut found).unwrap();
                let value = u8::try_from(page - 7 + 5).unwrap();
                assert!(found.iter().all(|byte| *byte == value), "page {page}");
            }
        }
        regions.fill(all, 0).unwrap();
        assert_eq!(transfer_pages(&mut *channel, Operation::Read, 7, all), IoStatus::SUCCESS);
        let mut found = vec![0; 16 * 4096];
        regions.load(all, &mut found).unwrap();
        for (page, bytes) in (5..).zip(found.chunks(4096)) {
            assert!(bytes.iter().all(|byte| *byte == page), "{page}");
        }
    }

    #[test]
    fn adding_a_span_keeps_requests_in_flight() {
        let regions = RegionTable::new(8);
        let memory = regions.allocate_region(64 << 10).unwrap();
        let rams = [4096, 512].map(|block| {
            Arc::new(RamDevice::new(&regions, block, u64::from(20 * 4096 / block)).unwrap())
        });
        let block_size = rams[0].limits().block_size;
        let request = |token, lba, blocks, operation| Request {
            token,
            lba,
            blocks,
            segment_count: u16::from(operation != Operation::Flush),
            operation,
            ..Request::PLACEHOLDER
        };
        let page = memory.segment().slice(0, 4096).unwrap();
        let mut old: Box<dyn IoChannel> =
            PartialAcceptDevice::new(rams[0].clone(), 7).channel().unwrap();
        let mut owed = 0;
        for token in 0..3 {
            let one = request(token, token, 1, Operation::Write);
            owed += old.submit(Instant::default(), &[one], &[page]);
        }
        let more = device_span(&rams[1], 20, 0);
        let legs = vec![
            MissingDevice(rams[0].limits()).channel().unwrap(),
            more.medium.channel().unwrap(),
        ];
        let limits = limits_with_unbounded_size(&rams[0].limits());
        let spans = SpanMap::with_previous_and(&more, block_size);
        let mut both = MultiLegChannel::new(legs, spans, limits).unwrap();
        both.replace_first_channel(old, owed);
        let two = memory.segment().slice(0, 8192).unwrap();
        let across = request(0, 19, 2, Operation::Write);
        let far = request(2, 30, 1, Operation::Write);
        let flush = request(1, 0, 0, Operation::Flush);
        let mut completions = CompletionBatch::with_capacity(16);
        let mut taken = 0;
        let mut turns = 0;
        while completions.as_slice().len() < owed + 3 {
            let left = &[(across, two), (far, page), (flush, page)][taken..];
            if let Some((request, memory)) = left.first() {
                taken += both.submit(Instant::default(), &[*request], &[*memory]);
            }
            both.flush_submissions();
            both.poll(Instant::default(), &mut completions);
            turns += 1;
            assert!(turns < 10_000, "{completions:?}");
        }
        assert!(
            completions.as_slice().iter().all(|completion| completion.status == IoStatus::SUCCESS)
        );
        let mut tokens: Vec<u64> =
            completions.as_slice().iter().map(|completion| completion.token).collect();
        tokens.sort_unstable();
        let mut expected: Vec<u64> = (0..owed as u64).chain([0, 1, 2]).collect();
        expected.sort_unstable();
        assert_eq!(tokens, expected);
        assert_eq!(
            SpanMap::with_previous_and(&more, block_size).range_on_leg(0, BLOCKS_MAX + 3, 1),
            (BLOCKS_MAX + 3, 1)
        );
    }
}
