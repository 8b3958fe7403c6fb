//! Walks a whole store and compares everything with everything. It changes nothing.
//!
//! Every block of metadata is read once, however many trees it belongs to. Memory grows with the
//! metadata: an entry for each block of it and each run of data.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;

use base::Outcome;

use crate::account::{Account, Own, uses};
use crate::error::{Damage, Flaw};
use crate::format::{
    Block, Body, Kind, Page, Pointer, Record, Superblock, VolumeBody, features, flags, hash,
    unpadded,
};
use crate::ranges::{Deltas, Place, RangeSet};
use crate::store::Store;
use crate::tree::{ALL, Tree, child_bounds};

/// A check under way. None of the store's metadata may be written over meanwhile.
#[derive(Debug)]
pub struct Check {
    store: u128,
    superblock: Superblock,
    to_visit: Vec<Visit>,
    /// Every block of metadata, and how often it is pointed to.
    references: BTreeMap<u64, i64>,
    /// How often each unit of data is used.
    data: Deltas,
    /// What the space map says.
    recorded: Vec<Record>,
    /// Nodes of volumes' trees, by address.
    nodes: BTreeMap<u64, Node>,
    /// Volumes that are to be cut.
    cuts: BTreeSet<u64>,
    volumes: BTreeMap<u64, VolumeBody>,
    names: BTreeMap<u64, u64>,
    findings: Vec<Finding>,
    /// Whether some map has holes.
    has_holes: bool,
}

/// What a check has found to be wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// A block of metadata; what is under it has not been seen, so counts are not compared.
    Damaged(Damage),
    /// Blocks are counted otherwise than they are used.
    Count {
        /// The first of them.
        first: u64,
        /// How many.
        blocks: u64,
        /// How much too high the count is; below zero, how much too low.
        excess: i64,
    },
    /// A block of metadata lies where data lie.
    Overlap(u64),
    /// A map sends blocks to places that are not in step with the volume's units, or parts a unit.
    Alignment {
        /// The volume.
        volume: u64,
        /// The first block of the run, or of the part.
        block: u64,
    },
    /// A number is not what it should be.
    Number {
        /// Which one.
        what: &'static str,
        /// The volume; zero if it is a number of the store.
        volume: u64,
        /// What is written down.
        recorded: u64,
        /// What was counted.
        counted: u64,
    },
    /// A name leads to no volume of that name, or a volume is not found by its name.
    Name(u64),
}

/// What a check has seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// What is wrong.
    pub findings: Vec<Finding>,
    /// Volumes, snapshots included.
    pub volumes: u64,
    /// Blocks of metadata, superblocks not included.
    pub metadata: u64,
    /// Blocks with a count, superblocks not included.
    pub used: u64,
    /// The room of each volume, in the order in which they were made; none if there is damage.
    pub accounts: Vec<Counted>,
}

/// The room of a volume, as a check has counted it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counted {
    /// Its number.
    pub volume: u64,
    /// Its name.
    pub name: String,
    /// Its room.
    pub account: Account,
}

/// What is mapped under a node.
#[derive(Clone, Copy, Debug, Default)]
struct Sum {
    /// Blocks that are written.
    mapped: u64,
    /// Blocks that are spare.
    spare: u64,
    /// Where the last run ends.
    end: u64,
}

/// A node of a volume's tree.
#[derive(Debug)]
struct Node {
    /// A leaf of a map, with its runs.
    leaf: Option<Page>,
    children: Vec<u64>,
}

/// A block that is to be read.
#[derive(Clone, Debug)]
struct Visit {
    at: Pointer,
    tree: Tree,
    level: Option<u8>,
    bounds: Range<u64>,
}

impl Check {
    /// A check of what the last durable superblock of a store leads to.
    pub fn of(store: &Store) -> Self {
        let (id, superblock) = store.durable();
        let mut check = Self {
            store: id,
            superblock,
            to_visit: Vec::new(),
            references: BTreeMap::new(),
            data: Deltas::default(),
            recorded: Vec::new(),
            nodes: BTreeMap::new(),
            cuts: BTreeSet::new(),
            volumes: BTreeMap::new(),
            names: BTreeMap::new(),
            findings: Vec::new(),
            has_holes: false,
        };
        let roots = [
            (Kind::Space, superblock.space),
            (Kind::Names, superblock.names),
            (Kind::Work, superblock.work),
            (Kind::Catalogue, superblock.catalogue),
        ];
        for (kind, at) in roots {
            check.visit(Visit { at, tree: Tree::of_store(kind), level: None, bounds: ALL });
        }
        check
    }

    /// How many blocks are known to be left to be read.
    pub fn left(&self) -> usize {
        self.to_visit.len()
    }

    /// The next block that has to be read; `None` once that was all.
    pub fn next_read(&self) -> Option<u64> {
        self.to_visit.last().map(|visit| visit.at.address)
    }

    /// The block that was to be read has been, or not.
    pub fn handle_read(&mut self, bytes: Result<&Block, Outcome>) {
        let Some(visit) = self.to_visit.pop() else { return };
        let address = visit.at.address;
        let page = bytes
            .map_err(|outcome| Damage::at(address, Flaw::Unread(outcome)))
            .and_then(|bytes| Page::decode(bytes, self.store, address))
            .and_then(|page| visit.check(page));
        match page {
            Ok(page) => self.take_in(&visit, &page),
            Err(damage) => {
                let (kind, owner) = (Some(visit.tree.kind), visit.tree.owner);
                self.findings.push(Finding::Damaged(Damage { kind, owner, ..damage }));
            }
        }
    }

    /// Notes one more reference to a block, and has it read if that is the first one.
    fn visit(&mut self, visit: Visit) {
        let address = visit.at.address;
        if visit.at.is_none() {
            return;
        }
        if !self.superblock.room().contains(&address) {
            let (kind, owner) = (Some(visit.tree.kind), visit.tree.owner);
            let damage = Damage { address, kind, owner, flaw: Flaw::Bounds };
            return self.findings.push(Finding::Damaged(damage));
        }
        let references = self.references.entry(address).or_default();
        *references += 1;
        if *references == 1 {
            self.to_visit.push(visit);
        }
    }

    fn take_in(&mut self, visit: &Visit, page: &Page) {
        let Body::Node { level, records } = &page.body else {
            if let Body::Volume(body) = &page.body {
                self.take_in_volume(visit, body);
            }
            return;
        };
        if visit.tree.may_share() {
            let is_leaf = *level == 0 && visit.tree.kind == Kind::Map;
            let below = |line: &Record| (*level > 0).then_some(line.value);
            let children = records.iter().filter_map(below).collect();
            let leaf = is_leaf.then(|| page.clone());
            self.nodes.insert(visit.at.address, Node { leaf, children });
        }
        for (index, record) in records.iter().enumerate() {
            if *level > 0 {
                if index > 0 && record.key % visit.tree.unit != 0 {
                    let (volume, block) = (visit.tree.owner, record.key);
                    self.findings.push(Finding::Alignment { volume, block });
                }
                let bounds = child_bounds(records, index, &visit.bounds);
                let level = Some(level - 1);
                self.visit(Visit { at: record.child(), tree: visit.tree, level, bounds });
            } else {
                self.take_in_line(visit, record);
            }
        }
    }

    fn take_in_line(&mut self, visit: &Visit, line: &Record) {
        match visit.tree.kind {
            Kind::Space => self.recorded.push(*line),
            Kind::Map => {
                let units = visit.tree.units_of(line);
                let room = self.superblock.room();
                let blocks = units.end.saturating_sub(units.start);
                let is_inside = line.is_hole() || room.holds(units.start, blocks);
                self.has_holes |= line.is_hole();
                if line.key % visit.tree.unit != line.place() % visit.tree.unit || !is_inside {
                    let (volume, block) = (visit.tree.owner, line.key);
                    self.findings.push(Finding::Alignment { volume, block });
                }
                self.data.add(units, 1);
            }
            Kind::Names => drop(self.names.insert(line.key, line.value)),
            Kind::Sums => {}
            Kind::Work if line.value == 0 => drop(self.cuts.insert(line.key)),
            _ => {
                let tree = Tree { owner: line.key, ..Tree::of_store(Kind::Volume) };
                self.visit(Visit { at: line.child(), tree, level: None, bounds: ALL });
            }
        }
    }

    fn take_in_volume(&mut self, visit: &Visit, body: &VolumeBody) {
        if body.id != visit.tree.owner {
            let (address, kind) = (visit.at.address, Some(Kind::Volume));
            let damage = Damage { address, kind, owner: visit.tree.owner, flaw: Flaw::Bounds };
            return self.findings.push(Finding::Damaged(damage));
        }
        self.volumes.insert(body.id, *body);
        self.visit(Visit { at: body.map, tree: body.tree(), level: None, bounds: ALL });
        self.visit(Visit { at: body.sums, tree: body.sums_tree(), level: None, bounds: ALL });
        let tree = Tree { owner: body.id, ..Tree::of_store(Kind::Parent) };
        self.visit(Visit { at: body.parent, tree, level: None, bounds: ALL });
    }

    /// What was found, once everything was read.
    pub fn finish(mut self) -> Report {
        let is_whole = self.findings.is_empty();
        let used = self.recorded.iter().map(|run| run.extra).sum();
        let mut accounts = Vec::new();
        if is_whole {
            accounts = self.accounts();
            self.compare_counts();
            self.compare_mapped();
            self.compare_names();
            self.compare_promises();
            self.compare("used blocks", 0, self.superblock.used, used);
        }
        let live = self.volumes.values().filter(|body| !body.has(flags::DOOMED)).count() as u64;
        if is_whole {
            self.compare("volumes", 0, self.superblock.volumes, live);
        }
        let metadata = self.references.len() as u64;
        Report { findings: self.findings, volumes: live, metadata, used, accounts }
    }

    /// The room of every volume, from what all of them refer to.
    fn accounts(&self) -> Vec<Counted> {
        let live = self.volumes.values().filter(|body| !body.has(flags::DOOMED));
        let counted = |body: &VolumeBody| Counted {
            volume: body.id,
            name: unpadded(&body.name),
            account: self.account(body),
        };
        live.map(counted).collect()
    }

    fn account(&self, body: &VolumeBody) -> Account {
        let is_one = |count: &i64| *count == 1;
        let own_parent = self.references.get(&body.parent.address).is_some_and(is_one);
        let (mut unique, mut own) = (1 + u64::from(own_parent), Own::default());
        let mut left = vec![body.map.address, body.sums.address];
        while let Some(address) = left.pop() {
            let Some(node) = self.nodes.get(&address) else { continue };
            if self.references.get(&address).is_some_and(|references| *references > 1) {
                continue;
            }
            unique += 1;
            left.extend(&node.children);
            let Some(leaf) = &node.leaf else { continue };
            let set = self.own_units(&uses(&body.tree(), leaf));
            unique += set.blocks();
            own.add(&body.tree(), &set, leaf);
        }
        own.account(body, unique)
    }

    /// Units that are referred to by what this says, and by nothing else.
    fn own_units(&self, uses: &Deltas) -> RangeSet {
        let mut own = RangeSet::default();
        for (range, uses) in uses.iter() {
            let mut at = range.start;
            while at < range.end {
                let Place::Taken(end) = self.data.look(at) else { break };
                if self.data.at(at) == uses {
                    own.insert(at..end.min(range.end));
                }
                at = end;
            }
        }
        own
    }

    fn compare(&mut self, what: &'static str, volume: u64, recorded: u64, counted: u64) {
        if recorded != counted {
            self.findings.push(Finding::Number { what, volume, recorded, counted });
        }
    }

    fn compare_counts(&mut self) {
        for (&address, &count) in &self.references {
            if self.data.at(address) != 0 {
                self.findings.push(Finding::Overlap(address));
            }
            self.data.add(address..address + 1, count);
        }
        for run in &self.recorded {
            let count = i64::try_from(run.value).unwrap_or(i64::MAX);
            self.data.add(run.key..run.key + run.extra, -count);
        }
        for (range, missing) in self.data.iter().filter(|(_, missing)| *missing != 0) {
            let (first, blocks) = (range.start, range.end - range.start);
            self.findings.push(Finding::Count { first, blocks, excess: -missing });
        }
    }

    /// Adds up what is mapped under each root; a node that several trees share is added up once.
    fn compare_mapped(&mut self) {
        let mut sums: BTreeMap<u64, Sum> = BTreeMap::new();
        let volumes: Vec<VolumeBody> = self.volumes.values().copied().collect();
        for body in volumes.iter().filter(|body| !body.has(flags::DOOMED)) {
            let Sum { mapped, spare, end } = match body.map.is_none() {
                true => Sum::default(),
                false => self.sum(body.map.address, &mut sums),
            };
            self.compare("mapped blocks", body.id, body.mapped, mapped);
            self.compare("spare blocks", body.id, body.spare, spare);
            if body.cut == u64::MAX && end > body.blocks {
                self.compare("end of what is mapped", body.id, body.blocks, end);
            }
            let is_cut = u64::from(body.cut != u64::MAX);
            let on_list = u64::from(self.cuts.contains(&body.id));
            // A line that is left over is taken away when it is come upon.
            if is_cut > on_list {
                self.compare("lines of the work list", body.id, on_list, is_cut);
            }
            let children = volumes.iter().filter(|other| other.origin == body.id);
            let children = children.filter(|other| !other.has(flags::DOOMED)).count() as u64;
            self.compare("children", body.id, body.children, children);
        }
    }

    /// What is mapped under a node. The recursion goes as deep as the tree is high: every level is one
    /// less than the one above.
    fn sum(&self, address: u64, sums: &mut BTreeMap<u64, Sum>) -> Sum {
        if let Some(sum) = sums.get(&address) {
            return *sum;
        }
        let Some(Node { leaf, children }) = self.nodes.get(&address) else { return Sum::default() };
        let runs = leaf.as_ref().map_or(&[][..], Page::records);
        let mut sum =
            Sum { end: runs.last().map_or(0, |run| run.key + run.extra), ..Sum::default() };
        for run in runs.iter().filter(|run| !run.is_hole()) {
            *(if run.is_spare() { &mut sum.spare } else { &mut sum.mapped }) += run.extra;
        }
        for child in children {
            let Sum { mapped, spare, end } = self.sum(*child, sums);
            // A crafted store may have a child so often that no number holds the sum.
            sum.mapped = sum.mapped.saturating_add(mapped);
            sum.spare = sum.spare.saturating_add(spare);
            sum.end = sum.end.max(end);
        }
        sums.insert(address, sum);
        sum
    }

    /// Adds up what is kept for thick volumes, and looks whether who does not know of spare runs, or of
    /// parents, is kept out.
    fn compare_promises(&mut self) {
        let promised = self.volumes.values().map(VolumeBody::promise);
        let promised = promised.fold(0, u64::saturating_add);
        self.compare("promised blocks", 0, self.superblock.promised, promised);
        let is_thick = |body: &&VolumeBody| body.spare > 0 || body.has(flags::THICK);
        let has_spare = u64::from(self.volumes.values().filter(is_thick).count() > 0);
        let is_said = u64::from(self.superblock.incompatible & features::SPARE != 0);
        if has_spare > is_said {
            self.compare("bit of spare runs", 0, is_said, has_spare);
        }
        let has_parent = self.volumes.values().any(|body| body.reach > 0);
        let has_parents = u64::from(has_parent || self.has_holes);
        let is_said = u64::from(self.superblock.incompatible & features::PARENTS != 0);
        if has_parents > is_said {
            self.compare("bit of parents", 0, is_said, has_parents);
        }
    }

    fn compare_names(&mut self) {
        for body in self.volumes.values().filter(|body| !body.has(flags::DOOMED)) {
            let key = hash(unpadded(&body.name).as_bytes());
            if self.names.remove(&key) != Some(body.id) {
                self.findings.push(Finding::Name(body.id));
            }
        }
        self.findings.extend(self.names.values().map(|id| Finding::Name(*id)));
    }
}

impl Visit {
    /// Compares a block with what points to it.
    fn check(&self, page: Page) -> Result<Page, Damage> {
        let damage = |flaw| Damage::at(self.at.address, flaw);
        let (found, expected) = (page.generation, self.at.generation);
        if page.kind != self.tree.kind || self.level.is_some_and(|level| level != page.level()) {
            return Err(damage(Flaw::Kind { found: page.kind, level: page.level() }));
        }
        if found != expected {
            return Err(damage(Flaw::Generation { found, expected }));
        }
        let end = |record: &Record| match page.level() {
            0 => self.tree.kind.end(record).unwrap_or(u64::MAX),
            _ => record.key + 1,
        };
        let records = page.records();
        let begins = records.first().is_none_or(|record| record.key >= self.bounds.start);
        let ends = records.last().is_none_or(|record| end(record) <= self.bounds.end);
        if begins && ends { Ok(page) } else { Err(damage(Flaw::Bounds)) }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Damaged(damage) => write!(out, "{damage}"),
            Self::Count { first, blocks, excess } => write!(
                out,
                "space map: the count of {blocks} blocks from block {first} on is off by {excess}"
            ),
            Self::Overlap(address) => {
                write!(
                    out,
                    "block {address}: it holds metadata, and a volume's map has it for data"
                )
            }
            Self::Alignment { volume, block } => {
                write!(out, "map of volume {volume}: block {block} is out of step with the units")
            }
            Self::Number { what, volume, recorded, counted } => {
                write!(out, "volume {volume}: {what}: {recorded} on record, {counted} counted")
            }
            Self::Name(id) => write!(out, "volume {id}: its name and the tree of names disagree"),
        }
    }
}
