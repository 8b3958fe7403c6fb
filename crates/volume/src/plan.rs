//! From blocks of a volume to blocks of the store, for reading and for writing.
//!
//! A unit of the store serves one unit of a volume, block by block: what is the third block of one
//! is the third of the other. So if nobody else refers to a unit of the store, the places in it that
//! nothing is mapped to are free for the blocks of just this unit of just this volume; and after a
//! snapshot, the blocks that are written go to a new unit while the map sends reads of the others to
//! the old one. Nothing is copied.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::books::{Books, Stop};
use crate::edit::Gain;
use crate::format::{Record, VolumeBody, flags};
use crate::sums::GROUP_BLOCKS;
use crate::tree::{Leaf, Tree};

/// Blocks of a volume that lie together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// The first one.
    pub(crate) block: u64,
    /// How many.
    pub(crate) blocks: u64,
    /// Where they are read from.
    pub(crate) from: Source,
}

/// Where blocks of a volume are read from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// Nowhere: they read as zeroes.
    Nothing,
    /// The store, from this block on.
    Store(u64),
    /// The volume's parent, from the same block on.
    Parent,
}

/// Blocks of a volume that are written together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    /// The first one.
    pub(crate) block: u64,
    /// How many.
    pub(crate) blocks: u64,
    /// Where they go.
    pub(crate) at: u64,
    /// Whether the map has to be told.
    pub(crate) is_new: bool,
}

/// Units of the store that have been set aside, and to which data are on their way: by volume, unit
/// of the volume, and their first block.
pub(crate) type Pending = BTreeMap<(u64, u64, u64), Grant>;

/// A unit of the store that has been set aside for a unit of a volume.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grant {
    /// Writes that are on their way to it.
    pub(crate) users: u32,
    /// Whether the map refers to it.
    pub(crate) is_mapped: bool,
    /// A bit for each block that may not be written to: one is on its way there, or it was in use.
    pub(crate) taken: u32,
}

/// Where a unit of a volume is to be written.
pub(crate) enum Home {
    /// To this unit of the store; and where its blocks lie now.
    Here(u64, Vec<Record>),
    /// It needs a unit.
    Nowhere,
}

impl Books {
    /// Where blocks of a volume lie.
    pub(crate) fn plan_read(
        &mut self,
        body: &VolumeBody,
        range: Range<u64>,
    ) -> Result<Vec<Piece>, Stop> {
        let (tree, mut at, mut pieces) = (body.tree(), range.start, Vec::new());
        while at < range.end {
            let run = self.next_run(&tree, body.map, at)?.filter(|run| run.key < range.end);
            let start = run.map_or(range.end, |run| run.key.max(at));
            if start > at {
                pieces.extend(unmapped(body, at..start));
            }
            let Some(run) = run else { break };
            let end = (run.key + run.extra).min(range.end);
            let from = match run.is_written() {
                true => Source::Store(run.place() + (start - run.key)),
                false => Source::Nothing,
            };
            pieces.push(Piece { block: start, blocks: end - start, from });
            at = end;
        }
        Ok(pieces)
    }

    /// Where blocks of a volume are to be written. Units that are missing are set aside, and `mine`
    /// lists those that this write uses, with their first blocks; it does so also if the plan stops
    /// half way.
    pub(crate) fn plan_write(
        &mut self,
        body: &VolumeBody,
        range: &Range<u64>,
        pending: &mut Pending,
        mine: &mut Vec<(u64, u64)>,
    ) -> Result<Vec<Segment>, Stop> {
        let (tree, unit) = (body.tree(), body.unit());
        let numbers = range.start / unit..range.end.div_ceil(unit);
        let blocks_of = |number: u64| part(number, unit, range);
        let mut leaf: Option<Leaf> = None;
        let mut homes = Vec::new();
        for number in numbers.clone() {
            let start = number * unit;
            let part = blocks_of(number).start - start..blocks_of(number).end - start;
            let wanted = bits(&blocks_of(number), unit);
            let mut grants = pending.range_mut((body.id, number, 0)..=(body.id, number, u64::MAX));
            let grant = grants.find(|((_, _, at), grant)| {
                let is_free = !tree.keeps || grant.taken & wanted == 0;
                let is_mine = tree.keeps && mine.contains(&(number, *at));
                let goes_to = at + part.start..at + part.end;
                (is_free && !self.space.is_spoilt(&goes_to)) || is_mine
            });
            if let Some((&(_, _, at), grant)) = grant {
                if !mine.contains(&(number, at)) {
                    grant.users += 1;
                    grant.taken |= wanted;
                    mine.push((number, at));
                }
                homes.push(Home::Here(at, Vec::new()));
                continue;
            }
            if leaf.as_ref().is_none_or(|leaf| !leaf.bounds.contains(&start)) {
                leaf = self.leaf_and_sharing(&tree, body.map, start, true)?;
            }
            if !tree.keeps {
                homes.push(self.home(&tree, leaf.as_ref(), start, &blocks_of(number))?);
                continue;
            }
            let is_given = |at| pending.contains_key(&(body.id, number, at));
            let home = self.other_home(&tree, leaf.as_ref(), (start, &part), is_given)?;
            homes.push(home.map_or(Home::Nowhere, |(at, grant)| {
                pending.insert((body.id, number, at), grant);
                mine.push((number, at));
                Home::Here(at, Vec::new())
            }));
        }
        self.settle(body, range, &mut homes, pending, mine)?;
        let mut segments = Vec::new();
        for (number, home) in numbers.zip(&homes) {
            if let Home::Here(at, runs) = home {
                push(
                    &mut segments,
                    segment(blocks_of(number), at + blocks_of(number).start % unit, runs),
                );
            }
        }
        Ok(segments)
    }

    /// Sets units aside for those that have no home, together as far as there is room together.
    fn settle(
        &mut self,
        body: &VolumeBody,
        range: &Range<u64>,
        homes: &mut [Home],
        pending: &mut Pending,
        mine: &mut Vec<(u64, u64)>,
    ) -> Result<(), Stop> {
        let (unit, mut index) = (body.unit(), 0);
        while index < homes.len() {
            let missing = homes[index..].iter().take_while(|home| matches!(home, Home::Nowhere));
            let missing = missing.count();
            if missing == 0 {
                index += 1;
                continue;
            }
            let found = self.take_units(unit, missing as u64, body.owed)?;
            for at in (found.start..found.end).step_by(step(unit)) {
                let number = range.start / unit + index as u64;
                let taken = bits(&part(number, unit, range), unit);
                let grant = Grant { users: 1, is_mapped: false, taken };
                pending.insert((body.id, number, at), grant);
                mine.push((number, at));
                homes[index] = Home::Here(at, Vec::new());
                index += 1;
            }
        }
        Ok(())
    }

    /// The unit of the store that this volume alone uses for one of its units, if there is one: the
    /// one in which the blocks lie that are to be written, if possible.
    pub(crate) fn home(
        &mut self,
        tree: &Tree,
        leaf: Option<&Leaf>,
        start: u64,
        blocks: &Range<u64>,
    ) -> Result<Home, Stop> {
        let Some(leaf) = leaf.filter(|leaf| !leaf.is_shared) else { return Ok(Home::Nowhere) };
        let records = leaf.page.records();
        let from = records.partition_point(|run| run.key + run.extra <= start);
        let to = records.partition_point(|run| run.key < start + tree.unit);
        let runs = &records[from.min(to)..to];
        let lying = || runs.iter().filter(|run| !run.is_hole());
        // A run that began before the unit lies so that the unit begins `start - key` behind it.
        let place = |run: &Record| (run.place() + start).wrapping_sub(run.key);
        let touches = |run: &Record| run.key < blocks.end && run.key + run.extra > blocks.start;
        let (near, far): (Vec<&Record>, Vec<&Record>) = lying().partition(|run| touches(run));
        for run in near.into_iter().chain(far) {
            let at = place(run);
            let uses = lying().filter(|other| place(other) == at).count() as u64;
            let goes_to = at + (blocks.start - start)..at + (blocks.end - start);
            // Where a write has failed that nothing is mapped to, it may come to pass late.
            let is_spoilt = self.space.is_spoilt(&goes_to) && !lie(runs, blocks, goes_to.start);
            if self.count(at)? == uses && !self.space.is_lowered(at) && !is_spoilt {
                return Ok(Home::Here(at, runs.to_vec()));
            }
        }
        Ok(Home::Nowhere)
    }

    /// The unit of the store that this volume alone uses for one of its units, that nobody writes to,
    /// and in which the places for a part of it are in nobody's map, nor in what may come back after a
    /// loss of power.
    fn other_home(
        &mut self,
        tree: &Tree,
        leaf: Option<&Leaf>,
        (start, part): (u64, &Range<u64>),
        is_given: impl Fn(u64) -> bool,
    ) -> Result<Option<(u64, Grant)>, Stop> {
        let Some(leaf) = leaf.filter(|leaf| !leaf.is_shared) else { return Ok(None) };
        let records = leaf.page.records();
        let from = records.partition_point(|run| run.key + run.extra <= start);
        let to = records.partition_point(|run| run.key < start + tree.unit);
        let runs = &records[from.min(to)..to];
        let place = |run: &Record| (run.value + start).wrapping_sub(run.key);
        let wanted = bits(part, tree.unit);
        let lying = runs.iter().filter(|run| !run.is_hole());
        for at in lying.map(place).filter(|at| !is_given(*at)) {
            let own = || runs.iter().filter(|run| place(run) == at);
            let cut =
                |run: &Record| run.key.max(start)..(run.key + run.extra).min(start + tree.unit);
            let mapped = own().fold(0, |taken, run| taken | bits(&cut(run), tree.unit));
            let left = (0..tree.unit).filter(|place| self.space.is_vacated(at + place));
            let taken = left.fold(mapped, |taken, place| taken | 1 << place);
            let is_own = self.count(at)? == own().count() as u64 && !self.space.is_lowered(at);
            let is_spoilt = self.space.is_spoilt(&(at + part.start..at + part.end));
            if is_own && taken & wanted == 0 && !is_spoilt {
                let grant = Grant { users: 1, is_mapped: true, taken: taken | wanted };
                return Ok(Some((at, grant)));
            }
        }
        Ok(None)
    }

    /// Has the map say where a part of a segment lies, as far as one leaf goes, and enters the
    /// checksums of that, if there are any. Returns where it stopped.
    pub(crate) fn map_segment(
        &mut self,
        id: u64,
        segment: &Segment,
        sums: &[u32],
    ) -> Result<u64, Stop> {
        let mut body = self.expect_volume(id)?;
        let most = if body.tree().keeps { GROUP_BLOCKS * self.half() } else { u64::MAX };
        let range = segment.block..segment.block + segment.blocks.min(most);
        let line = Record { key: segment.block, value: segment.at, extra: segment.blocks };
        let tree = body.tree();
        let (end, gain) = self.splice(&tree, &mut body.map, range, Some(line))?;
        body.take_in(gain);
        if body.tree().keeps {
            let count = usize::try_from(end - segment.block).unwrap_or(usize::MAX);
            self.put_sums(&mut body, segment.block, sums.get(..count).unwrap_or(sums))?;
        }
        if u64::try_from(gain.mapped) != Ok(end - segment.block) {
            self.remapped.insert(id);
        }
        self.put_volume(&body)?;
        Ok(end)
    }

    /// Takes blocks out of a volume's map, as far as one leaf goes; those of a thick volume become
    /// spare, and those where its parent would be read else a hole. Returns where it stopped.
    pub(crate) fn unmap(&mut self, id: u64, range: &Range<u64>) -> Result<u64, Stop> {
        let mut body = self.expect_volume(id)?;
        let (map, sums, tree) = (body.map, body.sums, body.tree());
        let end = if tree.keeps { self.sums_end(&body, range)? } else { range.end };
        let range = range.start..end;
        let (end, gain) = if range.start < body.reach {
            let range = range.start..range.end.min(body.reach);
            self.punch(&tree, &mut body.map, &range)?
        } else if body.has(flags::THICK) {
            self.make_spare(&tree, &mut body.map, &range)?
        } else {
            self.clear(&tree, &mut body.map, &range, false)?
        };
        body.take_in(gain);
        if tree.keeps {
            self.forget_sums(&mut body, &(range.start..end))?;
        }
        if (body.map, body.sums) != (map, sums) || gain != Gain::default() {
            self.remapped.insert(id);
            self.put_volume(&body)?;
        }
        Ok(end)
    }

    /// Whether the first that is mapped from a key on is in a leaf that others keep.
    pub(crate) fn is_shared_from(&mut self, id: u64, key: u64) -> Result<bool, Stop> {
        let body = self.expect_volume(id)?;
        let tree = body.tree();
        let Some(run) = self.next_run(&tree, body.map, key)? else { return Ok(false) };
        let leaf = self.leaf_and_sharing(&tree, body.map, run.key.max(key), true)?;
        Ok(leaf.is_some_and(|leaf| leaf.is_shared))
    }
}

/// Blocks of a volume that its map does not have.
fn unmapped(body: &VolumeBody, range: Range<u64>) -> impl Iterator<Item = Piece> {
    let middle = body.reach.clamp(range.start, range.end);
    let parts = [(range.start..middle, Source::Parent), (middle..range.end, Source::Nothing)];
    let piece = |(part, from): (Range<u64>, Source)| {
        let (block, blocks) = (part.start, part.end - part.start);
        (blocks > 0).then_some(Piece { block, blocks, from })
    };
    parts.into_iter().filter_map(piece)
}

/// One unit's part of a write: new to the map, unless a run has the blocks there already.
fn segment(blocks: Range<u64>, at: u64, runs: &[Record]) -> Segment {
    let is_new = !has(runs, &blocks, at);
    Segment { block: blocks.start, blocks: blocks.end - blocks.start, at, is_new }
}

/// Whether one of the runs says that these blocks lie there.
fn has(runs: &[Record], blocks: &Range<u64>, at: u64) -> bool {
    let holds = |run: &Record| {
        run.key <= blocks.start
            && run.key + run.extra >= blocks.end
            && run.value + (blocks.start - run.key) == at
    };
    runs.iter().any(holds)
}

/// Whether these blocks lie there, written or spare.
fn lie(runs: &[Record], blocks: &Range<u64>, at: u64) -> bool {
    let common = |run: &Record| {
        let (start, end) = (run.key.max(blocks.start), (run.key + run.extra).min(blocks.end));
        let is_there = !run.is_hole() && run.place() + blocks.start == at + run.key;
        if is_there { end.saturating_sub(start) } else { 0 }
    };
    runs.iter().map(common).sum::<u64>() == blocks.end - blocks.start
}

/// The blocks of a range that are in a unit.
pub(crate) fn part(number: u64, unit: u64, range: &Range<u64>) -> Range<u64> {
    (number * unit).max(range.start)..((number + 1) * unit).min(range.end)
}

/// A bit for each of some blocks of a unit.
fn bits(blocks: &Range<u64>, unit: u64) -> u32 {
    let (first, count) = (blocks.start % unit, blocks.end - blocks.start);
    ((1_u32 << count) - 1) << first
}

fn step(unit: u64) -> usize {
    usize::try_from(unit).unwrap_or(1)
}

/// Adds a segment, or makes the last one longer.
fn push(segments: &mut Vec<Segment>, next: Segment) {
    if let Some(last) = segments.last_mut()
        && last.is_new == next.is_new
        && last.at + last.blocks == next.at
        && last.block + last.blocks == next.block
    {
        last.blocks += next.blocks;
    } else {
        segments.push(next);
    }
}
