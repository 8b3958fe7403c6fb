//! Consistency check: reads all metadata of a pool and compares all redundant information. Read-only.
//!
//! Every metadata block is read once, in however many trees it is. Memory use grows with the metadata:
//! one entry for each metadata block and for each run of data.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;

use tenmil_base::IoStatus;

use crate::error::{Corruption, CorruptionKind};
use crate::format::{
    Block, BlockKind, Page, PageBody, Pointer, Record, Superblock, VolumeBody, decode_name,
    features, flags, hash_name,
};
use crate::pool::Pool;
use crate::ranges::{RangeLookup, RangeSet, RefcountDeltas};
use crate::space_usage::{ExclusiveUsage, SpaceUsage, cluster_references};
use crate::tree::{ALL, TreeDescriptor, child_bounds};

/// Check in progress. No metadata of the pool may be overwritten meanwhile.
#[derive(Debug)]
pub struct ConsistencyCheck {
    store: u128,
    superblock: Superblock,
    to_visit: Vec<PendingNode>,
    /// Every metadata block, with the number of references to it.
    references: BTreeMap<u64, i64>,
    /// Number of references to each data cluster.
    data: RefcountDeltas,
    /// Contents of the space map.
    recorded: Vec<Record>,
    /// Nodes of the volumes' trees, by address.
    nodes: BTreeMap<u64, VolumeTreeNode>,
    /// Volumes with a pending truncation.
    cuts: BTreeSet<u64>,
    volumes: BTreeMap<u64, VolumeBody>,
    names: BTreeMap<u64, u64>,
    findings: Vec<CheckFinding>,
    /// Whether a map has holes.
    has_holes: bool,
}

/// Inconsistency found by a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CheckFinding {
    /// Damaged metadata block. The blocks below it were not read, so counts are not compared.
    Damaged(Corruption),
    /// Reference counts differ from the references.
    Count {
        /// First block.
        first: u64,
        /// Number of blocks.
        blocks: u64,
        /// Excess of the count; negative if it is too low.
        excess: i64,
    },
    /// A metadata block is also used for data.
    Overlap(u64),
    /// A map refers to blocks that are not aligned to the volume's clusters, or splits a cluster.
    Alignment {
        /// Volume number.
        volume: u64,
        /// First block of the run, or of the part.
        block: u64,
    },
    /// A stored number is wrong.
    Number {
        /// Name of the number.
        what: &'static str,
        /// Volume number; zero for a number of the pool.
        volume: u64,
        /// Stored value.
        recorded: u64,
        /// Counted value.
        counted: u64,
    },
    /// A name refers to no volume with that name, or a volume is missing under its name.
    Name(u64),
}

/// Result of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckReport {
    /// Inconsistencies.
    pub findings: Vec<CheckFinding>,
    /// Number of volumes, including snapshots.
    pub volumes: u64,
    /// Number of metadata blocks, without superblocks.
    pub metadata: u64,
    /// Number of blocks with a reference count, without superblocks.
    pub used: u64,
    /// Space usage of each volume, in the order of their creation; empty if metadata is damaged.
    pub accounts: Vec<CountedUsage>,
}

/// Space usage of a volume, as counted by a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CountedUsage {
    /// Volume number.
    pub volume: u64,
    /// Volume name.
    pub name: String,
    /// Space usage.
    pub volume_usage: SpaceUsage,
}

/// Blocks mapped below a node.
#[derive(Clone, Copy, Debug, Default)]
struct SubtreeSum {
    /// Written blocks.
    mapped: u64,
    /// Unwritten blocks.
    spare: u64,
    /// End of the last run.
    end: u64,
}

/// Node of a volume's tree.
#[derive(Debug)]
struct VolumeTreeNode {
    /// Leaf of a map, with its runs.
    leaf: Option<Page>,
    children: Vec<u64>,
}

/// Block still to be read.
#[derive(Clone, Debug)]
struct PendingNode {
    at: Pointer,
    tree: TreeDescriptor,
    level: Option<u8>,
    bounds: Range<u64>,
}

impl ConsistencyCheck {
    /// Starts a check of everything reachable from the last durable superblock of a pool.
    pub fn of_pool(store: &Pool) -> Self {
        let (id, superblock) = store.uuid_and_durable_superblock();
        let mut check = Self {
            store: id,
            superblock,
            to_visit: Vec::new(),
            references: BTreeMap::new(),
            data: RefcountDeltas::default(),
            recorded: Vec::new(),
            nodes: BTreeMap::new(),
            cuts: BTreeSet::new(),
            volumes: BTreeMap::new(),
            names: BTreeMap::new(),
            findings: Vec::new(),
            has_holes: false,
        };
        let roots = [
            (BlockKind::SpaceMap, superblock.space),
            (BlockKind::Names, superblock.names),
            (BlockKind::DeferredFrees, superblock.work),
            (BlockKind::Catalog, superblock.catalogue),
        ];
        for (kind, at) in roots {
            check.queue_node(PendingNode {
                at,
                tree: TreeDescriptor::pool_tree(kind),
                level: None,
                bounds: ALL,
            });
        }
        check
    }

    /// Number of blocks known to be still unread.
    pub fn unread_blocks(&self) -> usize {
        self.to_visit.len()
    }

    /// Next block to read; `None` when the check is complete.
    pub fn next_read(&self) -> Option<u64> {
        self.to_visit.last().map(|visit| visit.at.address)
    }

    /// Handles the result of the read.
    pub fn handle_read(&mut self, bytes: Result<&Block, IoStatus>) {
        let Some(visit) = self.to_visit.pop() else { return };
        let address = visit.at.address;
        let page = bytes
            .map_err(|status| Corruption::at_address(address, CorruptionKind::ReadError(status)))
            .and_then(|bytes| Page::decode(bytes, self.store, address))
            .and_then(|page| visit.check_page(page));
        match page {
            Ok(page) => self.process_page(&visit, &page),
            Err(damage) => {
                let (kind, owner) = (Some(visit.tree.kind), visit.tree.owner);
                self.findings.push(CheckFinding::Damaged(Corruption { kind, owner, ..damage }));
            }
        }
    }

    /// Counts a reference to a block, and schedules the block for reading at the first one.
    fn queue_node(&mut self, visit: PendingNode) {
        let address = visit.at.address;
        if visit.at.is_null() {
            return;
        }
        if !self.superblock.data_area().contains(&address) {
            let (kind, owner) = (Some(visit.tree.kind), visit.tree.owner);
            let damage = Corruption { address, kind, owner, flaw: CorruptionKind::Bounds };
            return self.findings.push(CheckFinding::Damaged(damage));
        }
        let references = self.references.entry(address).or_default();
        *references += 1;
        if *references == 1 {
            self.to_visit.push(visit);
        }
    }

    fn process_page(&mut self, visit: &PendingNode, page: &Page) {
        let PageBody::Node { level, records } = &page.body else {
            if let PageBody::Volume(body) = &page.body {
                self.process_volume(visit, body);
            }
            return;
        };
        if visit.tree.can_share_nodes() {
            let is_leaf = *level == 0 && visit.tree.kind == BlockKind::Map;
            let below = |line: &Record| (*level > 0).then_some(line.value);
            let children = records.iter().filter_map(below).collect();
            let leaf = is_leaf.then(|| page.clone());
            self.nodes.insert(visit.at.address, VolumeTreeNode { leaf, children });
        }
        for (index, record) in records.iter().enumerate() {
            if *level > 0 {
                if index > 0 && record.key % visit.tree.unit != 0 {
                    let (volume, block) = (visit.tree.owner, record.key);
                    self.findings.push(CheckFinding::Alignment { volume, block });
                }
                let bounds = child_bounds(records, index, &visit.bounds);
                let level = Some(level - 1);
                self.queue_node(PendingNode {
                    at: record.child(),
                    tree: visit.tree,
                    level,
                    bounds,
                });
            } else {
                self.process_record(visit, record);
            }
        }
    }

    fn process_record(&mut self, visit: &PendingNode, line: &Record) {
        match visit.tree.kind {
            BlockKind::SpaceMap => self.recorded.push(*line),
            BlockKind::Map => {
                let units = visit.tree.occupied_clusters(line);
                let room = self.superblock.data_area();
                let blocks = units.end.saturating_sub(units.start);
                let is_inside = line.is_hole() || room.contains_range(units.start, blocks);
                self.has_holes |= line.is_hole();
                if line.key % visit.tree.unit != line.first_address() % visit.tree.unit
                    || !is_inside
                {
                    let (volume, block) = (visit.tree.owner, line.key);
                    self.findings.push(CheckFinding::Alignment { volume, block });
                }
                self.data.add_delta(units, 1);
            }
            BlockKind::Names => drop(self.names.insert(line.key, line.value)),
            BlockKind::Checksums => {}
            BlockKind::DeferredFrees if line.value == 0 => drop(self.cuts.insert(line.key)),
            _ => {
                let tree = TreeDescriptor {
                    owner: line.key,
                    ..TreeDescriptor::pool_tree(BlockKind::Volume)
                };
                self.queue_node(PendingNode { at: line.child(), tree, level: None, bounds: ALL });
            }
        }
    }

    fn process_volume(&mut self, visit: &PendingNode, body: &VolumeBody) {
        if body.id != visit.tree.owner {
            let (address, kind) = (visit.at.address, Some(BlockKind::Volume));
            let damage =
                Corruption { address, kind, owner: visit.tree.owner, flaw: CorruptionKind::Bounds };
            return self.findings.push(CheckFinding::Damaged(damage));
        }
        self.volumes.insert(body.id, *body);
        self.queue_node(PendingNode {
            at: body.map,
            tree: body.map_tree(),
            level: None,
            bounds: ALL,
        });
        self.queue_node(PendingNode {
            at: body.sums,
            tree: body.checksum_tree(),
            level: None,
            bounds: ALL,
        });
        let tree =
            TreeDescriptor { owner: body.id, ..TreeDescriptor::pool_tree(BlockKind::Parent) };
        self.queue_node(PendingNode { at: body.parent, tree, level: None, bounds: ALL });
    }

    /// Result of the check, after everything was read.
    pub fn into_report(mut self) -> CheckReport {
        let is_whole = self.findings.is_empty();
        let used = self.recorded.iter().map(|run| run.extra).sum();
        let mut volume_usages = Vec::new();
        if is_whole {
            volume_usages = self.counted_usages();
            self.compare_refcounts();
            self.compare_mapped_blocks();
            self.compare_names();
            self.compare_reservations();
            self.compare_number("used blocks", 0, self.superblock.used, used);
        }
        let live =
            self.volumes.values().filter(|body| !body.has_flag(flags::DOOMED)).count() as u64;
        if is_whole {
            self.compare_number("volumes", 0, self.superblock.volumes, live);
        }
        let metadata = self.references.len() as u64;
        CheckReport {
            findings: self.findings,
            volumes: live,
            metadata,
            used,
            accounts: volume_usages,
        }
    }

    /// Space usage of every volume, from the references of all volumes.
    fn counted_usages(&self) -> Vec<CountedUsage> {
        let live = self.volumes.values().filter(|body| !body.has_flag(flags::DOOMED));
        let counted = |body: &VolumeBody| CountedUsage {
            volume: body.id,
            name: decode_name(&body.name),
            volume_usage: self.count_usage(body),
        };
        live.map(counted).collect()
    }

    fn count_usage(&self, body: &VolumeBody) -> SpaceUsage {
        let is_one = |count: &i64| *count == 1;
        let own_parent = self.references.get(&body.parent.address).is_some_and(is_one);
        let (mut unique, mut own) = (1 + u64::from(own_parent), ExclusiveUsage::default());
        let mut left = vec![body.map.address, body.sums.address];
        while let Some(address) = left.pop() {
            let Some(node) = self.nodes.get(&address) else { continue };
            if self.references.get(&address).is_some_and(|references| *references > 1) {
                continue;
            }
            unique += 1;
            left.extend(&node.children);
            let Some(leaf) = &node.leaf else { continue };
            let set = self.exclusive_clusters(&cluster_references(&body.map_tree(), leaf));
            unique += set.blocks();
            own.add(&body.map_tree(), &set, leaf);
        }
        own.space_usage(body, unique)
    }

    /// Clusters referenced by `uses` and by nothing else.
    fn exclusive_clusters(&self, uses: &RefcountDeltas) -> RangeSet {
        let mut own = RangeSet::default();
        for (range, uses) in uses.iter() {
            let mut at = range.start;
            while at < range.end {
                let RangeLookup::Taken(end) = self.data.lookup(at) else { break };
                if self.data.at(at) == uses {
                    own.insert(at..end.min(range.end));
                }
                at = end;
            }
        }
        own
    }

    fn compare_number(&mut self, what: &'static str, volume: u64, recorded: u64, counted: u64) {
        if recorded != counted {
            self.findings.push(CheckFinding::Number { what, volume, recorded, counted });
        }
    }

    fn compare_refcounts(&mut self) {
        for (&address, &count) in &self.references {
            if self.data.at(address) != 0 {
                self.findings.push(CheckFinding::Overlap(address));
            }
            self.data.add_delta(address..address + 1, count);
        }
        for run in &self.recorded {
            let count = i64::try_from(run.value).unwrap_or(i64::MAX);
            self.data.add_delta(run.key..run.key + run.extra, -count);
        }
        for (range, missing) in self.data.iter().filter(|(_, missing)| *missing != 0) {
            let (first, blocks) = (range.start, range.end - range.start);
            self.findings.push(CheckFinding::Count { first, blocks, excess: -missing });
        }
    }

    /// Compares the mapped blocks of each root; a node shared by several trees is summed once.
    fn compare_mapped_blocks(&mut self) {
        let mut sums: BTreeMap<u64, SubtreeSum> = BTreeMap::new();
        let volumes: Vec<VolumeBody> = self.volumes.values().copied().collect();
        for body in volumes.iter().filter(|body| !body.has_flag(flags::DOOMED)) {
            let SubtreeSum { mapped, spare, end } = match body.map.is_null() {
                true => SubtreeSum::default(),
                false => self.sum_mapped_blocks(body.map.address, &mut sums),
            };
            self.compare_number("mapped blocks", body.id, body.mapped, mapped);
            self.compare_number("spare blocks", body.id, body.spare, spare);
            if body.cut == u64::MAX && end > body.blocks {
                self.compare_number("end of what is mapped", body.id, body.blocks, end);
            }
            let is_cut = u64::from(body.cut != u64::MAX);
            let on_list = u64::from(self.cuts.contains(&body.id));
            // A superfluous entry is removed when deferred freeing finds it.
            if is_cut > on_list {
                self.compare_number("lines of the work list", body.id, on_list, is_cut);
            }
            let children = volumes.iter().filter(|other| other.origin == body.id);
            let children = children.filter(|other| !other.has_flag(flags::DOOMED)).count() as u64;
            self.compare_number("children", body.id, body.children, children);
        }
    }

    /// Blocks mapped below a node. The recursion depth is the height of the tree: every level is one less
    /// than the one above.
    fn sum_mapped_blocks(&self, address: u64, sums: &mut BTreeMap<u64, SubtreeSum>) -> SubtreeSum {
        if let Some(sum) = sums.get(&address) {
            return *sum;
        }
        let Some(VolumeTreeNode { leaf, children }) = self.nodes.get(&address) else {
            return SubtreeSum::default();
        };
        let runs = leaf.as_ref().map_or(&[][..], Page::records);
        let mut sum = SubtreeSum {
            end: runs.last().map_or(0, |run| run.key + run.extra),
            ..SubtreeSum::default()
        };
        for run in runs.iter().filter(|run| !run.is_hole()) {
            *(if run.is_unwritten() { &mut sum.spare } else { &mut sum.mapped }) += run.extra;
        }
        for child in children {
            let SubtreeSum { mapped, spare, end } = self.sum_mapped_blocks(*child, sums);
            // A crafted pool may repeat a child so often that the sum overflows.
            sum.mapped = sum.mapped.saturating_add(mapped);
            sum.spare = sum.spare.saturating_add(spare);
            sum.end = sum.end.max(end);
        }
        sums.insert(address, sum);
        sum
    }

    /// Compares the reservation for thick volumes, and checks that the feature bits for unwritten runs
    /// and parents keep programs out that do not support them.
    fn compare_reservations(&mut self) {
        let provisioned = self.volumes.values().map(VolumeBody::reserved_blocks);
        let provisioned = provisioned.fold(0, u64::saturating_add);
        self.compare_number("promised blocks", 0, self.superblock.provisioned, provisioned);
        let is_thick = |body: &&VolumeBody| body.spare > 0 || body.has_flag(flags::THICK);
        let has_spare = u64::from(self.volumes.values().filter(is_thick).count() > 0);
        let is_said = u64::from(self.superblock.incompatible & features::UNWRITTEN != 0);
        if has_spare > is_said {
            self.compare_number("bit of spare runs", 0, is_said, has_spare);
        }
        let has_parent = self.volumes.values().any(|body| body.reach > 0);
        let has_parents = u64::from(has_parent || self.has_holes);
        let is_said = u64::from(self.superblock.incompatible & features::PARENTS != 0);
        if has_parents > is_said {
            self.compare_number("bit of parents", 0, is_said, has_parents);
        }
    }

    fn compare_names(&mut self) {
        for body in self.volumes.values().filter(|body| !body.has_flag(flags::DOOMED)) {
            let key = hash_name(decode_name(&body.name).as_bytes());
            if self.names.remove(&key) != Some(body.id) {
                self.findings.push(CheckFinding::Name(body.id));
            }
        }
        self.findings.extend(self.names.values().map(|id| CheckFinding::Name(*id)));
    }
}

impl PendingNode {
    /// Compares a block with the reference to it.
    fn check_page(&self, page: Page) -> Result<Page, Corruption> {
        let damage = |flaw| Corruption::at_address(self.at.address, flaw);
        let (found, expected) = (page.generation, self.at.generation);
        if page.kind != self.tree.kind || self.level.is_some_and(|level| level != page.level()) {
            return Err(damage(CorruptionKind::Kind { found: page.kind, level: page.level() }));
        }
        if found != expected {
            return Err(damage(CorruptionKind::Generation { found, expected }));
        }
        let end = |record: &Record| match page.level() {
            0 => self.tree.kind.record_end_key(record).unwrap_or(u64::MAX),
            _ => record.key + 1,
        };
        let records = page.records();
        let begins = records.first().is_none_or(|record| record.key >= self.bounds.start);
        let ends = records.last().is_none_or(|record| end(record) <= self.bounds.end);
        if begins && ends { Ok(page) } else { Err(damage(CorruptionKind::Bounds)) }
    }
}

impl fmt::Display for CheckFinding {
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
