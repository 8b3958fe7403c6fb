//! Walk of a tree, as far as it is readable.

use std::ops::Range;

use tenmil_base::IoStatus;

use crate::device_table::DataArea;
use crate::error::{Corruption, CorruptionKind};
use crate::format::{Block, BlockKind, Page, Pointer, Record};
use crate::tree::{ALL, TreeDescriptor, child_bounds};

/// Walk in progress.
#[derive(Debug)]
pub struct TreeWalk {
    store: u128,
    room: DataArea,
    tree: TreeDescriptor,
    to_visit: Vec<NodeVisit>,
    records: Vec<Record>,
    lost: Vec<LostRange>,
}

/// Range of keys without readable records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LostRange {
    /// The keys.
    pub keys: Range<u64>,
    /// Corruption of the block that would contain them.
    pub damage: Corruption,
}

/// Node to be read.
#[derive(Debug)]
struct NodeVisit {
    at: Pointer,
    level: Option<u8>,
    bounds: Range<u64>,
}

impl TreeWalk {
    pub(super) fn new(store: u128, room: &DataArea, tree: TreeDescriptor, root: Pointer) -> Self {
        let mut walk = Self {
            store,
            room: room.clone(),
            tree,
            to_visit: Vec::new(),
            records: Vec::new(),
            lost: Vec::new(),
        };
        walk.queue_node(NodeVisit { at: root, level: None, bounds: ALL });
        walk
    }

    fn queue_node(&mut self, visit: NodeVisit) {
        let address = visit.at.address;
        if visit.at.is_null() {
            return;
        }
        if self.room.contains(&address) {
            self.to_visit.push(visit);
        } else {
            self.record_lost_range(
                visit.bounds,
                Corruption::at_address(address, CorruptionKind::Bounds),
            );
        }
    }

    fn record_lost_range(&mut self, keys: Range<u64>, damage: Corruption) {
        let (kind, owner) = (Some(self.tree.kind), self.tree.owner);
        self.lost.push(LostRange { keys, damage: Corruption { kind, owner, ..damage } });
    }

    /// The next block to read, or `None` once all have been read.
    pub fn next_read(&self) -> Option<u64> {
        self.to_visit.last().map(|visit| visit.at.address)
    }

    /// Handles the result of the requested read.
    pub fn handle_read(&mut self, bytes: Result<&Block, IoStatus>) {
        let Some(NodeVisit { at, level, bounds }) = self.to_visit.pop() else { return };
        let page = bytes
            .map_err(|status| Corruption::at_address(at.address, CorruptionKind::ReadError(status)))
            .and_then(|bytes| Page::decode(bytes, self.store, at.address))
            .and_then(|page| self.check_node(page, at, level, &bounds));
        match page {
            Err(damage) => self.record_lost_range(bounds, damage),
            Ok(page) if page.level() == 0 => {
                // Unwritten blocks read as zeroes, as if they were unmapped. So does a hole, but unmapped
                // blocks may be read from the parent, so holes are kept.
                let is_written =
                    |line: &&Record| page.kind != BlockKind::Map || !line.is_unwritten();
                self.records.extend(page.records().iter().filter(is_written));
            }
            Ok(page) => {
                // The last one pushed is read next.
                for index in (0..page.records().len()).rev() {
                    let bounds = child_bounds(page.records(), index, &bounds);
                    let (at, level) = (page.records()[index].child(), Some(page.level() - 1));
                    self.queue_node(NodeVisit { at, level, bounds });
                }
            }
        }
    }

    fn check_node(
        &self,
        page: Page,
        at: Pointer,
        level: Option<u8>,
        bounds: &Range<u64>,
    ) -> Result<Page, Corruption> {
        let damage = |flaw| Corruption::at_address(at.address, flaw);
        let (found, expected) = (page.generation, at.generation);
        if page.kind != self.tree.kind || level.is_some_and(|level| level != page.level()) {
            return Err(damage(CorruptionKind::Kind { found: page.kind, level: page.level() }));
        }
        if found != expected {
            return Err(damage(CorruptionKind::Generation { found, expected }));
        }
        let end = |record: &Record| match page.level() {
            0 => self.tree.kind.record_end_key(record).unwrap_or(u64::MAX),
            _ => record.key + 1,
        };
        let is_inside = |record: &Record| record.key >= bounds.start && end(record) <= bounds.end;
        let is_right = page.records().iter().all(is_inside) && page.are_records_within(&self.room);
        if is_right { Ok(page) } else { Err(damage(CorruptionKind::Bounds)) }
    }

    /// Records in ascending order of keys, and lost ranges.
    pub fn into_records_and_lost_ranges(self) -> (Vec<Record>, Vec<LostRange>) {
        (self.records, self.lost)
    }
}
