//! Random work on a pool and on its model, and power loss at any moment.

use std::collections::BTreeMap;

use tenmil_base::Random;
use tenmil_volume::devices::{Devices, SecondaryDevice};
use tenmil_volume::{ParentInfo, PoolError, PoolRequest, PoolResponse, VolumeOp};

use super::compare::{account, compare, compare_differences};
use super::disk::{Cut, Image};
use super::model::{BlockRange, Model, Volume};
use super::{Rig, check, new_store};

/// A pool, its expected contents, and the operations on both.
pub struct World {
    pub rig: Rig,
    pub model: Model,
    /// Number of blocks on the first device.
    pub blocks: u64,
    random: Random,
    time: u64,
    next_value: u64,
    /// Average number of steps between power losses; zero for none.
    pub cut_every: u64,
    pub cuts: u64,
    pub operations: u64,
    pub refused_for_room: u64,
    /// Average number of steps after which the device loses unflushed writes and continues; zero for
    /// none.
    pub loses_every: u64,
    pub losses: u64,
    /// It has lost writes since the pool was last compared with the model.
    is_unsure: bool,
    /// Percentage of operations that change volumes.
    pub changes: u64,
    /// Number of blocks in the largest volume.
    pub size_max: u64,
    /// Number of operations after which the space usage of all volumes is compared.
    pub account_every: u64,
    /// Whether blocks were copied, so that equal contents may be in different places.
    has_copied: bool,
    next_account: u64,
    /// Maximum number of blocks to which devices grow or are added.
    pub grows_to: u64,
    /// Number of times they did.
    pub grown: u64,
    /// The devices of the pool for certain, and the possible ones.
    devices: Devices,
    next_devices: Devices,
}

const NAMES: [&str; 12] = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"];

impl World {
    pub fn new(blocks: u64, seed: u64) -> Self {
        let mut random = Random::new(seed);
        let rig = Rig::new(new_store(blocks), blocks, random.fork()).unwrap();
        Self {
            rig,
            model: Model::new(),
            blocks,
            random,
            time: 1,
            next_value: 1,
            cut_every: 0,
            cuts: 0,
            loses_every: 0,
            losses: 0,
            is_unsure: false,
            operations: 0,
            refused_for_room: 0,
            changes: 10,
            size_max: 160,
            account_every: 1,
            has_copied: false,
            next_account: 0,
            grows_to: 0,
            grown: 0,
            devices: Devices::one(blocks),
            next_devices: Devices::one(blocks),
        }
    }

    /// Several concurrent reads, writes, trims and flushes, or one change.
    pub fn work(&mut self) {
        if self.grows_to > self.devices.blocks() && self.random.chance(1, 30) {
            self.grow();
        } else if self.random.chance(self.changes, 100) || self.model.volumes.is_empty() {
            self.change();
        } else if self.random.chance(1, 40) {
            self.inflate();
        } else if self.random.chance(1, 40) {
            self.fill();
        } else {
            self.batch();
        }
        if self.cut_every == 0 && self.operations >= self.next_account {
            self.account();
            self.next_account = self.operations + self.account_every;
        }
    }

    /// Compares the space usage of each volume with the model. Every write has a unique value, so blocks
    /// with equal contents at the same position are shared.
    fn account(&mut self) {
        let Ok(PoolResponse::Volumes(infos)) = self.rig.ask(PoolRequest::List) else {
            panic!("no list")
        };
        for info in &infos {
            let found = account(&mut self.rig, &info.name);
            let (mapped, shared) = self.model.room(&info.name);
            let own = mapped - shared;
            if self.losses > 0 && info.reach > 0 {
                // Blocks copied from its parent may be present, while the overlap that excludes them was
                // lost.
                continue;
            }
            assert_eq!(found.used, mapped, "`{}`", info.name);
            if self.refused_for_room == 0 && info.unit == 1 && !self.has_copied {
                assert_eq!(found.shared, shared, "`{}`", info.name);
            }
            let is_alike = found.shared >= shared || self.has_copied;
            assert!(is_alike, "`{}`: {found:?}, expected {shared}", info.name);
            assert!(found.unique > own.min(mapped - found.shared), "`{}`: {found:?}", info.name);
        }
    }

    fn change(&mut self) {
        let change = self.draw_change();
        self.operations += 1;
        let after = self.model.after(&change);
        let token = self.rig.submit(PoolRequest::Change(change.clone()));
        while self.rig.step() {
            self.maybe_cut(after.as_ref().ok());
            self.maybe_lose();
        }
        let response = self.rig.responses.remove(&token).expect("an answer");
        if self.is_unsure {
            if response.is_ok() {
                self.model = after.clone().unwrap();
            }
            return self.reconcile(after.ok());
        }
        match (response, after) {
            (Ok(_), Ok(after)) => self.model = after,
            (Err(PoolError::NoSpace { .. } | PoolError::NoSpaceForThick { .. }), after)
                if !matches!(change, VolumeOp::Delete { .. })
                    && (after.is_ok() || self.losses > 0) =>
            {
                self.refused_for_room += 1;
            }
            (Err(found), Err(expected)) => assert_eq!(found, expected, "{change:?}"),
            (found, expected) => panic!("{change:?}: {found:?}, expected {expected:?}"),
        }
    }

    /// Adds a device, grows one, or renames one.
    fn grow(&mut self) {
        let mut devices = self.devices.clone();
        let more = match self.random.below(3) {
            0 => 1 + self.random.below(3),
            _ => 1 + self.random.below(200),
        };
        let count = devices.count() as u64;
        let pick = u32::try_from(self.random.below(count)).unwrap();
        match self.random.below(4) {
            0 if count > 1 => devices.others[0].uri = format!("ram:{more}m"),
            0 | 1 if count < 4 => {
                let other =
                    SecondaryDevice { uuid: self.random.next_u64().into(), uri: "ram:1m".into() };
                devices.add(other, 1 + more);
            }
            _ => devices.gain(pick, devices.needs(pick) + more),
        }
        self.operations += 1;
        self.grown += 1;
        self.blocks = devices.needs(0);
        self.rig.disk.runs = devices.runs().map(|(begin, run)| (begin, run.device)).collect();
        self.next_devices = devices.clone();
        let token = self.rig.submit(PoolRequest::Grow(devices.clone()));
        while self.rig.step() {
            self.maybe_cut(None);
        }
        let response = self.rig.responses.remove(&token).expect("an answer");
        assert_eq!(response, Ok(PoolResponse::Done), "{devices:?}");
        assert_eq!(*self.rig.store.devices(), devices);
        self.devices = devices;
        // The pool that was full has space now, and a repeated request changes nothing.
        let again = self.rig.ask(PoolRequest::Grow(self.devices.clone()));
        assert_eq!(again, Ok(PoolResponse::Done));
    }

    /// Makes a volume thick, with all of its blocks in exclusive clusters.
    fn inflate(&mut self) {
        let names: Vec<&String> = self.model.volumes.keys().collect();
        let name = names[usize::try_from(self.random.below(names.len() as u64)).unwrap()].clone();
        self.operations += 1;
        let after = self.model.thick(&name);
        let token = self.rig.submit(PoolRequest::ReserveThick(name.clone()));
        while self.rig.step() {
            self.maybe_cut(after.as_ref().ok());
        }
        let info = match (self.rig.responses.remove(&token).expect("an answer"), after) {
            (Ok(PoolResponse::Volume(info)), Ok(after)) => {
                // If it was so already, nothing has become durable.
                if !self.model.volumes[&name].is_thick {
                    self.model = after;
                }
                info
            }
            (Err(PoolError::NoSpace { .. } | PoolError::NoSpaceForThick { .. }), Ok(_)) => {
                self.refused_for_room += 1;
                return;
            }
            (Err(found), Err(expected)) => return assert_eq!(found, expected, "`{name}`"),
            (found, expected) => panic!("`{name}`: {found:?}, expected {expected:?}"),
        };
        assert!(info.is_thick);
        let mut block = 0;
        while block < info.blocks {
            let Some(to) = self.own(info.id, block) else { return };
            assert!(to > block, "it goes on");
            block = to;
        }
        self.rig.ask(PoolRequest::ReserveThick(name.clone())).unwrap();
        let found = account(&mut self.rig, &name);
        assert_eq!(found.own(), info.blocks, "{found:?}");
        assert_eq!(found.missing, 0);
    }

    /// Copies some or all blocks of the parent into a volume.
    fn fill(&mut self) {
        let may = |volume: &&Volume| volume.reach > 0 && !volume.is_read_only;
        let names = self.model.volumes.iter().filter(|(_, volume)| may(volume));
        let names: Vec<String> = names.map(|(name, _)| name.clone()).collect();
        let Some(name) = names.get(usize::try_from(self.random.below(12)).unwrap()) else { return };
        self.operations += 1;
        self.has_copied = true;
        let (volume, blocks) = (self.number(name), 1 + self.random.below(40));
        while self.model.volumes[name].reach > 0 && !self.random.chance(1, 20) {
            self.rig.fails_parent = self.random.chance(1, 50);
            let token = self.rig.submit(PoolRequest::CopyFromParent { volume, blocks });
            self.rig.buffers.get_mut(&token).unwrap().resize(40, super::disk::stamped(7));
            while self.rig.step() {
                self.maybe_cut(None);
            }
            self.rig.buffers.remove(&token);
            let has_failed = !std::mem::take(&mut self.rig.fails_parent);
            match self.rig.responses.remove(&token).expect("an answer") {
                Ok(PoolResponse::Filled(to)) => {
                    let reach = &mut self.model.volumes.get_mut(name).unwrap().reach;
                    assert!(to < *reach, "it goes on");
                    *reach = to;
                }
                Err(PoolError::NoSpace { .. }) => {
                    self.refused_for_room += 1;
                    return;
                }
                Err(PoolError::Device { .. }) if has_failed => return,
                other => panic!("{other:?}"),
            }
        }
    }

    /// Makes a stretch of a thick volume exclusive. Returns its end, or `None` if there was no space.
    fn own(&mut self, volume: u64, block: u64) -> Option<u64> {
        let blocks = 16 << self.random.below(3);
        let token = self.rig.submit(PoolRequest::MakeExclusive { volume, block, blocks });
        while self.rig.step() {
            self.maybe_cut(None);
        }
        self.judge_own(token)
    }

    fn judge_own(&mut self, token: u64) -> Option<u64> {
        self.has_copied = true;
        self.rig.buffers.remove(&token);
        match self.rig.responses.remove(&token).expect("an answer") {
            Ok(PoolResponse::Owned(to)) => Some(to),
            Err(PoolError::NoSpace { .. }) => {
                self.refused_for_room += 1;
                None
            }
            Err(PoolError::Device { .. }) => None,
            other => panic!("{other:?}"),
        }
    }

    fn draw_change(&mut self) -> VolumeOp {
        let mut pick = || NAMES[usize::try_from(self.random.below(12)).unwrap()].to_owned();
        let (one, two) = (pick(), pick());
        let blocks = 1 + self.random.below(self.size_max);
        let uuid = u128::from(self.random.next_u64());
        match self.random.below(19) {
            0..=2 => {
                let (name, unit) = (one, 1 << self.random.below(5));
                if self.random.chance(1, 3) {
                    return VolumeOp::CreateThick { name, blocks, unit, uuid };
                }
                let checksums = self.random.chance(1, 2);
                if self.random.chance(1, 2) {
                    let blocks = 1 + self.random.below(self.size_max);
                    let (uri, block_bytes) = ("ram:1m".into(), 512);
                    let parent = ParentInfo { uri, blocks, block_bytes, uuid, print: 5 };
                    return VolumeOp::CreateOver { name, blocks, unit, uuid, checksums, parent };
                }
                VolumeOp::Create { name, blocks, unit, uuid, checksums }
            }
            3..=6 => VolumeOp::Snapshot { volume: one, name: two, uuid },
            7..=8 => VolumeOp::Clone { from: one, name: two, uuid },
            9..=11 => VolumeOp::Delete { name: one, orphan: self.random.chance(1, 2) },
            12 => VolumeOp::Rename { name: one, to: two },
            13..=14 => VolumeOp::Resize { name: one, blocks },
            16 => VolumeOp::Decouple { name: one },
            17 => {
                let low = self.random.below(101);
                let percent = [low, low + self.random.below(101 - low)];
                VolumeOp::Thresholds { percent: percent.map(|one| u8::try_from(one).unwrap()) }
            }
            15 => VolumeOp::ConvertToSnapshot { name: one, to: two, uuid },
            _ => VolumeOp::Rollback { volume: one, snapshot: two },
        }
    }

    /// Reads, writes, trims and flushes that are submitted while others are in flight: with any number of
    /// steps between two submissions, so that each of them meets every state of a commit.
    fn batch(&mut self) {
        let ids = self.numbers();
        let mut under_way = Vec::new();
        for _ in 0..=self.random.below(8) {
            self.operations += 1;
            self.submit_one(&ids, &mut under_way);
            for _ in 0..self.random.below(7) {
                if !self.step(&mut under_way) {
                    break;
                }
            }
        }
        while self.step(&mut under_way) {}
        assert_eq!(under_way.len(), 0, "everything is answered");
        if self.is_unsure {
            self.reconcile(None);
        }
    }

    fn submit_one(&mut self, ids: &BTreeMap<String, u64>, under_way: &mut Vec<(u64, Work)>) {
        if self.random.chance(1, 6) {
            let unanswered = under_way.iter().filter_map(|(_, work)| match work {
                Work::Write(range, time) => Some((range.clone(), *time)),
                _ => None,
            });
            let work = Work::Flush { time: self.time, unanswered: unanswered.collect() };
            under_way.push((self.rig.submit(PoolRequest::Flush), work));
            return;
        }
        let Some(range) = self.draw_range(under_way) else { return };
        let (name, first, _) = &range;
        let (id, volume) = (ids[name], &self.model.volumes[name]);
        if volume.is_thick && volume.reach == 0 && self.random.chance(1, 10) {
            let ask = PoolRequest::MakeExclusive { volume: id, block: *first, blocks: 32 };
            under_way.push((self.rig.submit(ask), Work::Own));
            return;
        }
        under_way.push(self.submit_io(id, range));
    }

    /// Executes one action of the pool, and checks the completions that follow. False if none is in
    /// flight.
    fn step(&mut self, under_way: &mut Vec<(u64, Work)>) -> bool {
        let did = self.rig.step();
        while let Some(index) =
            under_way.iter().position(|(token, _)| self.rig.responses.contains_key(token))
        {
            let (token, work) = under_way.remove(index);
            let response = self.rig.responses.remove(&token).expect("an answer");
            self.judge(token, work, response);
        }
        if did {
            self.maybe_cut(None);
            self.maybe_lose();
        }
        did
    }

    /// Numbers of all volumes.
    fn numbers(&mut self) -> BTreeMap<String, u64> {
        let Ok(PoolResponse::Volumes(infos)) = self.rig.ask(PoolRequest::List) else {
            panic!("no list")
        };
        infos.into_iter().map(|info| (info.name, info.id)).collect()
    }

    /// Blocks that no operation in flight reads or writes.
    fn draw_range(&mut self, under_way: &[(u64, Work)]) -> Option<BlockRange> {
        let names: Vec<&String> = self.model.volumes.keys().collect();
        let name = names[usize::try_from(self.random.below(names.len() as u64)).unwrap()].clone();
        let size = self.model.volumes[&name].cells.len() as u64;
        let first = self.random.below(size);
        let most = if self.random.chance(1, 8) { size } else { 12 };
        let blocks = 1 + self.random.below(most.min(size - first));
        let meets = |(_, work): &(u64, Work)| match work {
            Work::Read((other, start, count)) | Work::Write((other, start, count), _) => {
                *other == name && *start < first + blocks && first < start + count
            }
            Work::Flush { .. } | Work::Own => false,
        };
        (!under_way.iter().any(meets)).then_some((name, first, blocks))
    }

    fn submit_io(&mut self, volume: u64, range: BlockRange) -> (u64, Work) {
        let (name, block, blocks) = (&range.0, range.1, range.2);
        let is_read_only = self.model.volumes[name].is_read_only;
        let at = |first: u64| usize::try_from(first).unwrap();
        let cells = at(block)..at(block + blocks);
        let kind = self.random.below(10);
        if kind < 3 || is_read_only {
            return (
                self.rig.submit(PoolRequest::Read { volume, block, blocks }),
                Work::Read(range),
            );
        }
        self.time += 1;
        let value = if kind == 3 { 0 } else { self.next_value };
        self.next_value += 1;
        for cell in &mut self.model.volumes.get_mut(name).unwrap().cells[cells] {
            cell.values.push((self.time, value));
        }
        let token = if kind == 3 {
            self.rig.submit(PoolRequest::Trim { volume, block, blocks })
        } else {
            if self.random.chance(1, 200) {
                self.rig.fails_writes = true;
            }
            self.rig.submit_write(volume, block, blocks, value)
        };
        (token, Work::Write(range, self.time))
    }

    fn judge(&mut self, token: u64, work: Work, response: Result<PoolResponse, PoolError>) {
        let data = self.rig.buffers.remove(&token);
        match (work, response) {
            // The contents are compared once the pool has recovered.
            (work, _) if self.is_unsure => {
                if let Work::Write(..) = work {
                    self.time += 1;
                }
            }
            (Work::Flush { time, unanswered }, Ok(_)) => {
                self.model.collapse_but(time, &unanswered);
            }
            (Work::Own, response) => {
                self.rig.responses.insert(token, response);
                self.judge_own(token);
            }
            (Work::Read((name, first, _)), Ok(_)) => {
                let cells = &self.model.volumes[&name].cells[usize::try_from(first).unwrap()..];
                for (cell, block) in cells.iter().zip(data.unwrap()) {
                    let values = super::disk::values(&block);
                    assert_eq!(values, [cell.value(); 8], "`{name}` from block {first} on");
                }
            }
            (Work::Write(..), Ok(_)) => {}
            (Work::Write((name, first, blocks), _), Err(error)) => {
                let is_full = matches!(error, PoolError::NoSpace { .. });
                assert!(is_full || matches!(error, PoolError::Device { .. }), "{error}");
                self.refused_for_room += u64::from(is_full);
                self.look_again(&name, first, blocks);
            }
            (_, Err(error)) => panic!("{error}"),
        }
    }

    /// A rejected write may have been done in part: the model takes over the present contents.
    fn look_again(&mut self, name: &str, first: u64, blocks: u64) {
        let id = self.number(name);
        let found = self.rig.read(id, first, blocks).unwrap();
        let at = usize::try_from(first).unwrap();
        let volume = self.model.volumes.get_mut(name).unwrap();
        for (cell, values) in volume.cells[at..].iter_mut().zip(found) {
            assert!(cell.may_be(values[0]) && values == [values[0]; 8], "{values:?}");
            self.time += 1;
            cell.values.push((self.time, values[0]));
        }
    }

    fn number(&mut self, name: &str) -> u64 {
        match self.rig.ask(PoolRequest::Find(name.into())) {
            Ok(PoolResponse::Volume(info)) => info.id,
            other => panic!("{other:?}"),
        }
    }

    /// Compares every block and every count.
    pub fn compare(&mut self) {
        self.rig.ask(PoolRequest::Flush).unwrap();
        self.rig.settle();
        self.rig.ask(PoolRequest::Flush).unwrap();
        self.model.collapse(u64::MAX);
        let report = check(&self.rig.store, self.rig.disk.image());
        assert_eq!(report.findings, [], "the check is clean");
        let Ok(PoolResponse::Usage(usage)) = self.rig.ask(PoolRequest::Usage) else {
            panic!("no usage")
        };
        assert_eq!(usage.used, report.used);
        assert_eq!(report.accounts.len() as u64, report.volumes);
        for counted in &report.accounts {
            assert_eq!(account(&mut self.rig, &counted.name), counted.account, "{counted:?}");
        }
        compare(&mut self.rig, &self.model).unwrap();
        self.compare_parents();
        compare_differences(&mut self.rig, &self.model);
    }

    /// Compares the overlaps with parents, and that all blocks that are neither the parent's nor zero are
    /// mapped.
    fn compare_parents(&mut self) {
        let Ok(PoolResponse::Volumes(infos)) = self.rig.ask(PoolRequest::List) else {
            panic!("no list")
        };
        for info in infos {
            let expected = &self.model.volumes[&info.name];
            assert_eq!(info.reach, expected.reach, "{info:?}");
            let is_unsure = self.losses > 0 && info.reach > 0;
            assert!(is_unsure || info.mapped == expected.mapped(), "{info:?}");
            let found = self.rig.ask(PoolRequest::Parent { volume: info.id });
            let Ok(PoolResponse::Parent(found)) = found else { panic!("{found:?}") };
            let is_right = |parent: &ParentInfo| parent.uri == "ram:1m" && parent.print == 5;
            assert_eq!(found.is_some_and(|parent| is_right(&parent)), info.reach > 0, "{info:?}");
        }
    }

    fn maybe_cut(&mut self, after: Option<&Model>) {
        if self.cut_every > 0 && self.random.below(self.cut_every) == 0 {
            let cut = match self.random.below(6) {
                0 => Cut::AsSeen,
                1 => Cut::Nothing,
                _ => Cut::Random,
            };
            let image = self.rig.disk.cut(cut, &mut self.random);
            self.cuts += 1;
            let found = self.come_back(image, after);
            found.unwrap_or_else(|error| {
                panic!("{cut:?} after {} writes: {error}", self.rig.disk.writes)
            });
        }
    }

    /// Opens the pool after a power loss, and compares it with its expected contents.
    fn come_back(&mut self, image: Image, after: Option<&Model>) -> Result<(), String> {
        let disk = self.rig.disk.unflushed(image.clone());
        let mut rig =
            Rig::new(image, self.blocks, self.random.fork()).map_err(|e| e.to_string())?;
        rig.disk = disk;
        if ![&self.devices, &self.next_devices].contains(&rig.store.devices()) {
            return Err(format!("{:?}, expected {:?}", rig.store.devices(), self.devices));
        }
        let report = check(&rig.store, rig.disk.image());
        if !report.findings.is_empty() {
            return Err(format!("check: {:?}", report.findings));
        }
        compare(&mut rig, &self.model).or_else(|error| match after {
            Some(after) => compare(&mut rig, after).map_err(|other| format!("{error}; or {other}")),
            None => Err(error),
        })?;
        self.go_on(&mut rig, after)
    }

    /// Checks that the pool accepts writes and changes afterwards.
    fn go_on(&mut self, rig: &mut Rig, after: Option<&Model>) -> Result<(), String> {
        let mut models: Vec<Model> =
            [Some(&self.model), after].into_iter().flatten().cloned().collect();
        let Ok(PoolResponse::Volumes(volumes)) = rig.ask(PoolRequest::List) else {
            return Err("no list".into());
        };
        for info in volumes.iter().filter(|info| !info.is_read_only).take(3) {
            let block = self.random.below(info.blocks);
            let token = rig.submit_write(info.id, block, 1, 77);
            for volume in models.iter_mut().filter_map(|model| model.volumes.get_mut(&info.name)) {
                let cell = volume.cells.get_mut(usize::try_from(block).unwrap());
                cell.into_iter().for_each(|cell| cell.values.push((u64::MAX, 77)));
            }
            rig.settle();
            if rig.responses.remove(&token).expect("an answer").is_ok() {
                let found = rig.read(info.id, block, 1).map_err(|error| error.to_string())?;
                if found != [[77; 8]] {
                    return Err(format!("`{}` block {block}: {found:?} after a write", info.name));
                }
            }
        }
        self.cut_again(rig, &models)?;
        if let Some(info) = volumes.first() {
            let change = VolumeOp::Delete { name: info.name.clone(), orphan: true };
            rig.ask(PoolRequest::Change(change)).map_err(|error| error.to_string())?;
        }
        rig.ask(PoolRequest::Flush).map_err(|error| error.to_string())?;
        let report = check(&rig.store, rig.disk.image());
        if report.findings.is_empty() {
            Ok(())
        } else {
            Err(format!("later: {:?}", report.findings))
        }
    }
}

impl World {
    fn maybe_lose(&mut self) {
        if self.loses_every > 0 && self.random.below(self.loses_every) == 0 {
            self.rig.disk.lose(&mut self.random);
            (self.is_unsure, self.losses) = (true, self.losses + 1);
        }
    }

    /// The device has lost writes: only the next flush fails. The pool has everything flushed and
    /// completed, any subset of the rest, and continues.
    fn reconcile(&mut self, after: Option<Model>) {
        let before = self.rig.store.losses();
        if self.rig.disk.has_lost {
            let error = self.rig.ask(PoolRequest::Flush).unwrap_err();
            assert_eq!(self.rig.store.losses(), before + 1, "{error}");
        }
        assert!(!self.rig.store.is_stopped(), "{:?}", self.rig.store.stopped_by());
        let report = check(&self.rig.store, self.rig.disk.image());
        assert_eq!(report.findings, [], "the check is clean");
        if let Err(error) = compare(&mut self.rig, &self.model) {
            let after = after.unwrap_or_else(|| panic!("{error}"));
            compare(&mut self.rig, &after).unwrap_or_else(|other| panic!("{error}; or {other}"));
            self.model = after;
        }
        self.is_unsure = false;
        let names: Vec<String> = self.model.volumes.keys().cloned().collect();
        for name in names {
            let blocks = self.model.volumes[&name].cells.len() as u64;
            self.mend(&name, blocks);
        }
        self.rig.ask(PoolRequest::Flush).expect("the pool goes on");
        self.model.collapse(u64::MAX);
    }

    /// The model takes over the present contents; a torn block is rewritten.
    fn mend(&mut self, name: &str, blocks: u64) {
        let info = match self.rig.ask(PoolRequest::Find(name.into())) {
            Ok(PoolResponse::Volume(info)) => info,
            other => panic!("{other:?}"),
        };
        let id = info.id;
        self.model.volumes.get_mut(name).unwrap().reach = info.reach;
        let found = self.rig.read(id, 0, blocks).unwrap();
        for (block, values) in (0..).zip(found) {
            let is_torn = values != [values[0]; 8];
            let value = if is_torn { self.next_value } else { values[0] };
            self.time += 1;
            let cells = &mut self.model.volumes.get_mut(name).unwrap().cells;
            cells[usize::try_from(block).unwrap()].values.push((self.time, value));
            if is_torn {
                self.next_value += 1;
                let token = self.rig.submit_write(id, block, 1, value);
                self.rig.settle();
                self.rig.responses.remove(&token).unwrap().expect("a write after the recovery");
            }
        }
    }

    /// Power loss again, before any flush except those of the pool itself.
    fn cut_again(&mut self, rig: &Rig, models: &[Model]) -> Result<(), String> {
        let cut = if self.random.chance(1, 3) { Cut::Nothing } else { Cut::Random };
        let image = rig.disk.cut(cut, &mut self.random);
        let mut last =
            Rig::new(image, self.blocks, self.random.fork()).map_err(|e| e.to_string())?;
        let report = check(&last.store, last.disk.image());
        if !report.findings.is_empty() {
            return Err(format!("check after a second cut: {:?}", report.findings));
        }
        let mut errors = Vec::new();
        for model in models {
            match compare(&mut last, model) {
                Ok(()) => return Ok(()),
                Err(error) => errors.push(error),
            }
        }
        Err(format!("after a second cut: {}", errors.join("; or ")))
    }
}

/// Operation in flight.
enum Work {
    /// Writes up to this time are durable once it completes, except for those that were incomplete then.
    Flush {
        time: u64,
        unanswered: Vec<(BlockRange, u64)>,
    },
    Own,
    Read(BlockRange),
    /// A write or a trim, and the time of its submission.
    Write(BlockRange, u64),
}
