//! Reading both sides back and comparing them.

use std::ops::Range;

use base::{Answer, Extent, Holds, Instant, Operation, Outcome, Segment};
use dma::Region;

use super::Devices;
use super::drive::Work;
use super::geometry::Geometry;
use super::outcome::{Comparison, Ending, Tally, Which};
use super::side::{Ask, Sides};

/// A comparison under way. What both sides know to be zeroes is not read, and what could not be
/// copied is left out.
pub(super) struct Check<'a> {
    devices: &'a Devices,
    geometry: Geometry,
    /// What could not be copied, in whole units.
    lost: Vec<Range<u64>>,
    sides: Sides,
    answers: Vec<(Which, Answer)>,
    pairs: Box<[Pair]>,
    _memory: Region,
    next: u64,
    comparison: Comparison,
    ending: Option<Ending>,
}

/// The same range of both, on its way.
struct Pair {
    at: u64,
    len: u64,
    source: Segment,
    target: Segment,
    /// Reads that are not answered.
    awaited: u8,
}

/// Ranges of zeroes that are gone past in one turn.
const HOLES_MAX: usize = 64;

impl<'a> Check<'a> {
    pub(super) fn new(
        devices: &'a Devices,
        geometry: Geometry,
        tally: &Tally,
    ) -> Result<Self, String> {
        let sides = Sides::open(&*devices.source, &*devices.target)?;
        let chunk = usize::try_from(geometry.chunk).unwrap_or(usize::MAX);
        let len_bytes = chunk.saturating_mul(2 * geometry.depth);
        let memory = devices.regions.allocate(len_bytes).map_err(|error| error.to_string())?;
        let part = |index: usize| Segment {
            region: memory.id(),
            offset: index as u64 * geometry.chunk,
            len_bytes: u32::try_from(geometry.chunk).unwrap_or(u32::MAX),
        };
        let pair = |index: usize| Pair {
            at: 0,
            len: 0,
            source: part(2 * index),
            target: part(2 * index + 1),
            awaited: 0,
        };
        let whole = |range: &Range<u64>| geometry.floor(range.start)..geometry.ceiling(range.end);
        Ok(Self {
            geometry,
            lost: tally.lost.iter().map(whole).collect(),
            sides,
            answers: Vec::new(),
            pairs: (0..geometry.depth).map(pair).collect(),
            _memory: memory,
            next: 0,
            comparison: Comparison { block: geometry.unit, ..Comparison::default() },
            ending: None,
            devices,
        })
    }

    /// What was found, and why it ended if that was early.
    pub(super) fn end(self) -> (Comparison, Option<Ending>) {
        (self.comparison, self.ending)
    }

    fn begin(&mut self) -> bool {
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
                    self.compare_from(index, until);
                }
            }
        }
        self.next != before
    }

    /// Goes past zeroes of both sides, or reads what is next, no further than `until`.
    fn compare_from(&mut self, index: usize, until: u64) {
        let (geometry, at) = (self.geometry, self.next);
        let zeroes = self.zeroes(at).min(until);
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
        let memory = slice(pair.source, 0, len);
        let ask = Ask { token, operation, at, len_bytes: len, memory };
        self.sides.source.ask(&ask);
        let in_target = geometry.in_target(len);
        let memory = slice(pair.target, 0, in_target);
        self.sides.target.ask(&Ask { len_bytes: in_target, memory, ..ask });
    }

    /// Up to where both sides know that they hold zeroes, in whole units; `at` if one does not.
    fn zeroes(&self, at: u64) -> u64 {
        let until = |extent: Result<Extent, String>, block: u64| match extent {
            Ok(Extent { blocks, holds: Holds::Zeroes | Holds::Hole }) => {
                at.saturating_add(blocks.saturating_mul(block))
            }
            _ => at,
        };
        let Geometry { source_block, target_block, .. } = self.geometry;
        let source = until(self.devices.source.extent(at / source_block), source_block);
        let target = until(self.devices.target.extent(at / target_block), target_block);
        self.geometry.floor(source.min(target)).max(at)
    }

    fn after_read(&mut self, which: Which, index: usize, outcome: Outcome) {
        let pair = &mut self.pairs[index];
        pair.awaited -= 1;
        if !outcome.is_success() {
            let (range, operation) = (pair.at..pair.at + pair.len, Operation::Read);
            self.ending.get_or_insert(Ending::Failed { side: which, operation, range, outcome });
        } else if pair.awaited == 0 && self.ending.is_none() {
            self.compare(index);
        }
    }

    fn compare(&mut self, index: usize) {
        let Pair { at, len, source, target, .. } = self.pairs[index];
        let regions = &self.devices.regions;
        let same = |skip: u64, len: u64| {
            regions.equal(slice(source, skip, len), slice(target, skip, len)).unwrap_or(false)
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

impl Work for Check<'_> {
    fn step(&mut self, now: Instant) -> bool {
        let begun = self.begin();
        let mut answers = std::mem::take(&mut self.answers);
        let moved = self.sides.turn(now, &mut answers);
        for (which, Answer { token, outcome, .. }) in answers.drain(..) {
            if let Ok(index) = usize::try_from(token)
                && index < self.pairs.len()
            {
                self.after_read(which, index, outcome);
            }
        }
        self.answers = answers;
        begun || moved
    }

    fn stop(&mut self) {
        if self.next < self.geometry.size {
            self.ending.get_or_insert(Ending::Interrupted);
        }
    }

    fn is_over(&self) -> bool {
        let is_begun = self.next >= self.geometry.size || self.ending.is_some();
        is_begun && self.pairs.iter().all(|pair| pair.awaited == 0)
    }

    fn progress(&self) -> (u64, u64) {
        let awaited = self.pairs.iter().filter(|pair| pair.awaited > 0);
        (awaited.map(|pair| pair.at).min().unwrap_or(self.next), self.geometry.size)
    }

    fn sides(&mut self) -> &mut Sides {
        &mut self.sides
    }
}

/// A part of a buffer, which is never longer than that.
fn slice(buffer: Segment, skip: u64, len: u64) -> Segment {
    let part = u32::try_from(skip).ok().zip(u32::try_from(len).ok());
    part.and_then(|(skip, len)| buffer.slice(skip, len)).unwrap_or_default()
}
