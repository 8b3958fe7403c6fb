//! Comparison of source and target after a copy.

use std::ops::Range;

use tenmil_base::{BlockExtent, ExtentKind, Instant, IoCompletion, IoStatus, Operation, Segment};
use tenmil_dma::Region;

use super::CopyDevices;
use super::byte_channel::{ByteRequest, CopyChannels};
use super::copy_loop::CopyOrComparison;
use super::copy_result::{CompareResult, CopyAbort, CopySide, CopyStats};
use super::request_sizes::CopyRequestSizes;

/// Comparison in progress. Ranges known to be zeroes on both devices are not read, and unreadable
/// ranges are skipped.
pub(super) struct CopyComparison<'a> {
    devices: &'a CopyDevices,
    geometry: CopyRequestSizes,
    /// Unreadable ranges, extended to whole units.
    lost: Vec<Range<u64>>,
    sides: CopyChannels,
    completions: Vec<(CopySide, IoCompletion)>,
    pairs: Box<[ComparePair]>,
    _memory: Region,
    next: u64,
    comparison: CompareResult,
    ending: Option<CopyAbort>,
}

/// The same range of both devices, being read.
struct ComparePair {
    at: u64,
    len: u64,
    source: Segment,
    target: Segment,
    /// Reads in flight.
    awaited: u8,
}

/// Maximum number of zero ranges skipped per step.
const HOLES_MAX: usize = 64;

impl<'a> CopyComparison<'a> {
    pub(super) fn new(
        devices: &'a CopyDevices,
        geometry: CopyRequestSizes,
        tally: &CopyStats,
    ) -> Result<Self, String> {
        let sides = CopyChannels::open(&*devices.source, &*devices.target)?;
        let chunk = usize::try_from(geometry.chunk).unwrap_or(usize::MAX);
        let len_bytes = chunk.saturating_mul(2 * geometry.depth);
        let memory =
            devices.regions.allocate_region(len_bytes).map_err(|error| error.to_string())?;
        let part = |index: usize| Segment {
            region: memory.id(),
            offset: index as u64 * geometry.chunk,
            len_bytes: u32::try_from(geometry.chunk).unwrap_or(u32::MAX),
        };
        let pair = |index: usize| ComparePair {
            at: 0,
            len: 0,
            source: part(2 * index),
            target: part(2 * index + 1),
            awaited: 0,
        };
        // A unit that is unreadable in part is skipped as a whole.
        let whole =
            |range: &Range<u64>| geometry.round_down(range.start)..geometry.round_up(range.end);
        Ok(Self {
            geometry,
            lost: tally.lost.iter().map(whole).collect(),
            sides,
            completions: Vec::new(),
            pairs: (0..geometry.depth).map(pair).collect(),
            _memory: memory,
            next: 0,
            comparison: CompareResult { block: geometry.unit, ..CompareResult::default() },
            ending: None,
            devices,
        })
    }

    /// The result, and the reason for an early end.
    pub(super) fn into_result(self) -> (CompareResult, Option<CopyAbort>) {
        (self.comparison, self.ending)
    }

    fn start_pairs(&mut self) -> bool {
        let before = self.next;
        for _ in 0..HOLES_MAX {
            if self.ending.is_some() || self.next >= self.geometry.size {
                break;
            }
            let Some(index) = self.pairs.iter().position(|pair| pair.awaited == 0) else { break };
            let at = self.next;
            let lost = self.lost.iter().find(|range| range.end > at);
            match lost {
                Some(lost) if lost.start <= at => self.next = lost.end,
                _ => {
                    let until = lost.map_or(self.geometry.size, |lost| lost.start);
                    self.skip_zeroes_or_read_range(index, until);
                }
            }
        }
        self.next != before
    }

    /// Skips zeroes of both devices, or reads the next range up to `until`.
    fn skip_zeroes_or_read_range(&mut self, index: usize, until: u64) {
        let (geometry, at) = (self.geometry, self.next);
        let zeroes = self.common_zeroes_end(at).min(until);
        if zeroes > at {
            self.comparison.compared += zeroes - at;
            self.next = zeroes;
            return;
        }
        let len = (until - at).min(geometry.chunk);
        self.next = at + len;
        let pair = &mut self.pairs[index];
        (pair.at, pair.len, pair.awaited) = (at, len, 2);
        let (token, operation) = (index as u64, Operation::Read);
        let memory = subsegment(pair.source, 0, len);
        let ask = ByteRequest { token, operation, at, len_bytes: len, memory };
        self.sides.source.submit(&ask);
        let in_target = geometry.round_up_to_target_block(len);
        let memory = subsegment(pair.target, 0, in_target);
        self.sides.target.submit(&ByteRequest { len_bytes: in_target, memory, ..ask });
    }

    /// End of the range from `at` that both devices report as zeroes, in whole units; `at` if there is
    /// none.
    fn common_zeroes_end(&self, at: u64) -> u64 {
        let until = |extent: Result<BlockExtent, String>, block: u64| match extent {
            Ok(BlockExtent { blocks, kind: ExtentKind::Zeroes | ExtentKind::Hole }) => {
                at.saturating_add(blocks.saturating_mul(block))
            }
            _ => at,
        };
        let CopyRequestSizes { source_block, target_block, .. } = self.geometry;
        let source = until(
            self.devices.source.block_status(at / source_block).map_err(|error| error.to_string()),
            source_block,
        );
        let target = until(
            self.devices.target.block_status(at / target_block).map_err(|error| error.to_string()),
            target_block,
        );
        self.geometry.round_down(source.min(target)).max(at)
    }

    fn handle_read(&mut self, which: CopySide, index: usize, status: IoStatus) {
        let pair = &mut self.pairs[index];
        pair.awaited -= 1;
        if !status.is_success() {
            let (range, operation) = (pair.at..pair.at + pair.len, Operation::Read);
            self.ending.get_or_insert(CopyAbort::Failed { side: which, operation, range, status });
        } else if pair.awaited == 0 && self.ending.is_none() {
            self.compare_pair(index);
        }
    }

    fn compare_pair(&mut self, index: usize) {
        let ComparePair { at, len, source, target, .. } = self.pairs[index];
        let regions = &self.devices.regions;
        let same = |skip: u64, len: u64| {
            regions
                .segments_equal(subsegment(source, skip, len), subsegment(target, skip, len))
                .unwrap_or(false)
        };
        self.comparison.compared += len;
        if same(0, len) {
            return;
        }
        let unit = self.geometry.unit;
        for skip in (0..len).step_by(usize::try_from(unit).unwrap_or(usize::MAX)) {
            if !same(skip, unit.min(len - skip)) {
                self.comparison.different += 1;
                let place = at + skip;
                let first = self.comparison.first.map_or(place, |first| first.min(place));
                self.comparison.first = Some(first);
            }
        }
    }
}

impl CopyOrComparison for CopyComparison<'_> {
    fn advance(&mut self, now: Instant) -> bool {
        let begun = self.start_pairs();
        let mut completions = std::mem::take(&mut self.completions);
        let moved = self.sides.poll(now, &mut completions);
        for (which, IoCompletion { token, status, .. }) in completions.drain(..) {
            if let Ok(index) = usize::try_from(token)
                && index < self.pairs.len()
            {
                self.handle_read(which, index, status);
            }
        }
        self.completions = completions;
        begun || moved
    }

    fn stop_submitting(&mut self) {
        if self.next < self.geometry.size {
            self.ending.get_or_insert(CopyAbort::Interrupted);
        }
    }

    fn is_finished(&self) -> bool {
        let is_begun = self.next >= self.geometry.size || self.ending.is_some();
        is_begun && self.pairs.iter().all(|pair| pair.awaited == 0)
    }

    fn done_and_total_bytes(&self) -> (u64, u64) {
        let awaited = self.pairs.iter().filter(|pair| pair.awaited > 0);
        (awaited.map(|pair| pair.at).min().unwrap_or(self.next), self.geometry.size)
    }

    fn channels(&mut self) -> &mut CopyChannels {
        &mut self.sides
    }
}

/// Part of a buffer, within its bounds.
fn subsegment(buffer: Segment, skip: u64, len: u64) -> Segment {
    let part = u32::try_from(skip).ok().zip(u32::try_from(len).ok());
    part.and_then(|(skip, len)| buffer.slice(skip, len)).unwrap_or_default()
}
