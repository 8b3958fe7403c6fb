//! A tree, as much of it as can be read.

use std::ops::Range;

use base::Outcome;

use crate::devices::Room;
use crate::error::{Damage, Flaw};
use crate::format::{Block, Kind, Page, Pointer, Record};
use crate::tree::{ALL, Tree, child_bounds};

/// A walk under way.
#[derive(Debug)]
pub struct Walk {
    store: u128,
    room: Room,
    tree: Tree,
    to_visit: Vec<Visit>,
    records: Vec<Record>,
    lost: Vec<Lost>,
}

/// Keys of which nothing is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lost {
    /// The keys.
    pub keys: Range<u64>,
    /// The block that would say.
    pub damage: Damage,
}

/// A node that is to be read.
#[derive(Debug)]
struct Visit {
    at: Pointer,
    level: Option<u8>,
    bounds: Range<u64>,
}

impl Walk {
    pub(super) fn new(store: u128, room: &Room, tree: Tree, root: Pointer) -> Self {
        let mut walk = Self {
            store,
            room: room.clone(),
            tree,
            to_visit: Vec::new(),
            records: Vec::new(),
            lost: Vec::new(),
        };
        walk.visit(Visit { at: root, level: None, bounds: ALL });
        walk
    }

    fn visit(&mut self, visit: Visit) {
        let address = visit.at.address;
        if visit.at.is_none() {
            return;
        }
        if self.room.contains(&address) {
            self.to_visit.push(visit);
        } else {
            self.lose(visit.bounds, Damage::at(address, Flaw::Bounds));
        }
    }

    fn lose(&mut self, keys: Range<u64>, damage: Damage) {
        let (kind, owner) = (Some(self.tree.kind), self.tree.owner);
        self.lost.push(Lost { keys, damage: Damage { kind, owner, ..damage } });
    }

    /// The next block that has to be read; `None` once that was all.
    pub fn next_read(&self) -> Option<u64> {
        self.to_visit.last().map(|visit| visit.at.address)
    }

    /// The block that was to be read has been, or not.
    pub fn handle_read(&mut self, bytes: Result<&Block, Outcome>) {
        let Some(Visit { at, level, bounds }) = self.to_visit.pop() else { return };
        let page = bytes
            .map_err(|outcome| Damage::at(at.address, Flaw::Unread(outcome)))
            .and_then(|bytes| Page::decode(bytes, self.store, at.address))
            .and_then(|page| self.check(page, at, level, &bounds));
        match page {
            Err(damage) => self.lose(bounds, damage),
            Ok(page) if page.level() == 0 => {
                // What is spare reads as zeroes, as if nothing were mapped there; so does a hole, but
                // where nothing is mapped the parent may be read.
                let is_written = |line: &&Record| page.kind != Kind::Map || !line.is_spare();
                self.records.extend(page.records().iter().filter(is_written));
            }
            Ok(page) => {
                // The last one that is put there is the next to be read.
                for index in (0..page.records().len()).rev() {
                    let bounds = child_bounds(page.records(), index, &bounds);
                    let (at, level) = (page.records()[index].child(), Some(page.level() - 1));
                    self.visit(Visit { at, level, bounds });
                }
            }
        }
    }

    fn check(
        &self,
        page: Page,
        at: Pointer,
        level: Option<u8>,
        bounds: &Range<u64>,
    ) -> Result<Page, Damage> {
        let damage = |flaw| Damage::at(at.address, flaw);
        let (found, expected) = (page.generation, at.generation);
        if page.kind != self.tree.kind || level.is_some_and(|level| level != page.level()) {
            return Err(damage(Flaw::Kind { found: page.kind, level: page.level() }));
        }
        if found != expected {
            return Err(damage(Flaw::Generation { found, expected }));
        }
        let end = |record: &Record| match page.level() {
            0 => self.tree.kind.end(record).unwrap_or(u64::MAX),
            _ => record.key + 1,
        };
        let is_inside = |record: &Record| record.key >= bounds.start && end(record) <= bounds.end;
        let is_right = page.records().iter().all(is_inside) && page.stays_in(&self.room);
        if is_right { Ok(page) } else { Err(damage(Flaw::Bounds)) }
    }

    /// What was found, by ascending keys, and what was not.
    pub fn finish(self) -> (Vec<Record>, Vec<Lost>) {
        (self.records, self.lost)
    }
}
