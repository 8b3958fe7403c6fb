//! Random work on a store and on the model of it, and cuts of the power at any moment.

use base::Random;
use tenmil_volume::devices::{Devices, Other};
use tenmil_volume::{Account, Answer, Ask, Change, Parent, StoreError, VolumeInfo};

use super::disk::{Cut, Image};
use super::model::{Model, Volume};
use super::{Rig, check, new_store};

/// A store, what it should hold, and what is done to both.
pub struct World {
    pub rig: Rig,
    pub model: Model,
    /// Blocks on the first device.
    pub blocks: u64,
    random: Random,
    time: u64,
    next_value: u64,
    /// The power is cut once in so many steps; never if it is zero.
    pub cut_every: u64,
    pub cuts: u64,
    pub operations: u64,
    pub refused_for_room: u64,
    /// How many of a hundred operations are changes of volumes.
    pub changes: u64,
    /// Blocks in the largest volume.
    pub size_max: u64,
    /// After so many operations the room of all volumes is compared.
    pub account_every: u64,
    /// Whether blocks were copied, so that what holds the same does not lie in the same place.
    has_copied: bool,
    next_account: u64,
    /// Whether devices come, and grow, up to so many blocks in all.
    pub grows_to: u64,
    /// How often they did.
    pub grown: u64,
    /// What the store lies on for certain, and what it may lie on.
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

    /// Some reads, writes, trims and flushes at once, or one change.
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

    /// What is said of the room of each volume is what the model says: who writes a block gives it a
    /// value that no other write has, so what two volumes have in one place they share.
    fn account(&mut self) {
        let Ok(Answer::Volumes(infos)) = self.rig.ask(Ask::List) else { panic!("no list") };
        for info in &infos {
            let found = account(&mut self.rig, &info.name);
            let (mapped, shared) = self.model.room(&info.name);
            let own = mapped - shared;
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
        let token = self.rig.submit(Ask::Change(change.clone()));
        while self.rig.step() {
            self.maybe_cut(after.as_ref().ok());
        }
        let answer = self.rig.answers.remove(&token).expect("an answer");
        match (answer, after) {
            (Ok(_), Ok(after)) => self.model = after,
            (Err(StoreError::NoSpace { .. } | StoreError::NoRoomForThick { .. }), Ok(_))
                if !matches!(change, Change::Delete { .. }) =>
            {
                self.refused_for_room += 1;
            }
            (Err(found), Err(expected)) => assert_eq!(found, expected, "{change:?}"),
            (found, expected) => panic!("{change:?}: {found:?}, expected {expected:?}"),
        }
    }

    /// A device comes, or one that is there has grown; or it is called otherwise.
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
                let other = Other { uuid: self.random.draw().into(), uri: "ram:1m".into() };
                devices.add(other, 1 + more);
            }
            _ => devices.gain(pick, devices.needs(pick) + more),
        }
        self.operations += 1;
        self.grown += 1;
        self.blocks = devices.needs(0);
        self.rig.disk.runs = devices.runs().map(|(begin, run)| (begin, run.device)).collect();
        self.next_devices = devices.clone();
        let token = self.rig.submit(Ask::Grow(devices.clone()));
        while self.rig.step() {
            self.maybe_cut(None);
        }
        let answer = self.rig.answers.remove(&token).expect("an answer");
        assert_eq!(answer, Ok(Answer::Done), "{devices:?}");
        assert_eq!(*self.rig.store.devices(), devices);
        self.devices = devices;
        // What had been counted as full has room now, and said twice it is there.
        let again = self.rig.ask(Ask::Grow(self.devices.clone()));
        assert_eq!(again, Ok(Answer::Done));
    }

    /// Makes a volume thick, and has all of it lie in units of its own.
    fn inflate(&mut self) {
        let names: Vec<&String> = self.model.volumes.keys().collect();
        let name = names[usize::try_from(self.random.below(names.len() as u64)).unwrap()].clone();
        self.operations += 1;
        let after = self.model.thick(&name);
        let token = self.rig.submit(Ask::Thicken(name.clone()));
        while self.rig.step() {
            self.maybe_cut(after.as_ref().ok());
        }
        let info = match (self.rig.answers.remove(&token).expect("an answer"), after) {
            (Ok(Answer::Volume(info)), Ok(after)) => {
                // If it was so already, nothing has been made to survive.
                if !self.model.volumes[&name].is_thick {
                    self.model = after;
                }
                info
            }
            (Err(StoreError::NoSpace { .. } | StoreError::NoRoomForThick { .. }), Ok(_)) => {
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
        self.rig.ask(Ask::Thicken(name.clone())).unwrap();
        let found = account(&mut self.rig, &name);
        assert_eq!(found.own(), info.blocks, "{found:?}");
        assert_eq!(found.missing, 0);
    }

    /// Copies into a volume what its parent has, or some of it.
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
            let token = self.rig.submit(Ask::Fill { volume, blocks });
            self.rig.buffers.get_mut(&token).unwrap().resize(40, super::disk::stamped(7));
            while self.rig.step() {
                self.maybe_cut(None);
            }
            self.rig.buffers.remove(&token);
            let has_failed = !std::mem::take(&mut self.rig.fails_parent);
            match self.rig.answers.remove(&token).expect("an answer") {
                Ok(Answer::Filled(to)) => {
                    let reach = &mut self.model.volumes.get_mut(name).unwrap().reach;
                    assert!(to < *reach, "it goes on");
                    *reach = to;
                }
                Err(StoreError::NoSpace { .. }) => {
                    self.refused_for_room += 1;
                    return;
                }
                Err(StoreError::Device { .. }) if has_failed => return,
                other => panic!("{other:?}"),
            }
        }
    }

    /// A stretch of a thick volume is to be its own. Where it ends; nothing if there was no room.
    fn own(&mut self, volume: u64, block: u64) -> Option<u64> {
        let blocks = 16 << self.random.below(3);
        let token = self.rig.submit(Ask::Own { volume, block, blocks });
        while self.rig.step() {
            self.maybe_cut(None);
        }
        self.judge_own(token)
    }

    fn judge_own(&mut self, token: u64) -> Option<u64> {
        self.has_copied = true;
        self.rig.buffers.remove(&token);
        match self.rig.answers.remove(&token).expect("an answer") {
            Ok(Answer::Owned(to)) => Some(to),
            Err(StoreError::NoSpace { .. }) => {
                self.refused_for_room += 1;
                None
            }
            Err(StoreError::Device { .. }) => None,
            other => panic!("{other:?}"),
        }
    }

    fn draw_change(&mut self) -> Change {
        let mut pick = || NAMES[usize::try_from(self.random.below(12)).unwrap()].to_owned();
        let (one, two) = (pick(), pick());
        let blocks = 1 + self.random.below(self.size_max);
        let uuid = u128::from(self.random.draw());
        match self.random.below(19) {
            0..=2 => {
                let (name, unit) = (one, 1 << self.random.below(5));
                if self.random.chance(1, 3) {
                    return Change::CreateThick { name, blocks, unit, uuid };
                }
                let checksums = self.random.chance(1, 2);
                if self.random.chance(1, 2) {
                    let blocks = 1 + self.random.below(self.size_max);
                    let (uri, block_bytes) = ("ram:1m".into(), 512);
                    let parent = Parent { uri, blocks, block_bytes, uuid, print: 5 };
                    return Change::CreateOver { name, blocks, unit, uuid, checksums, parent };
                }
                Change::Create { name, blocks, unit, uuid, checksums }
            }
            3..=6 => Change::Snapshot { volume: one, name: two, uuid },
            7..=8 => Change::Clone { from: one, name: two, uuid },
            9..=11 => Change::Delete { name: one, orphan: self.random.chance(1, 2) },
            12 => Change::Rename { name: one, to: two },
            13..=14 => Change::Resize { name: one, blocks },
            16 => Change::Decouple { name: one },
            17 => {
                let low = self.random.below(101);
                let percent = [low, low + self.random.below(101 - low)];
                Change::Thresholds { percent: percent.map(|one| u8::try_from(one).unwrap()) }
            }
            15 => Change::Seal { name: one, to: two, uuid },
            _ => Change::Revert { volume: one, snapshot: two },
        }
    }

    fn batch(&mut self) {
        let began = self.time;
        let mut tokens = Vec::new();
        let mut busy: Vec<(String, u64, u64)> = Vec::new();
        for _ in 0..=self.random.below(8) {
            self.operations += 1;
            if self.random.chance(1, 12) {
                tokens.push((self.rig.submit(Ask::Flush), Work::Flush));
                continue;
            }
            let Some((name, first, blocks)) = self.draw_range(&busy) else { continue };
            let volume = &self.model.volumes[&name];
            if volume.is_thick && volume.reach == 0 && self.random.chance(1, 10) {
                let (volume, blocks) = (self.number(&name), 32);
                let ask = Ask::Own { volume, block: first, blocks };
                tokens.push((self.rig.submit(ask), Work::Own));
                continue;
            }
            busy.push((name.clone(), first, blocks));
            tokens.push(self.submit_io(name, first, blocks));
        }
        while self.rig.step() {
            self.maybe_cut(None);
        }
        for (token, work) in tokens {
            let answer = self.rig.answers.remove(&token).expect("an answer");
            self.judge(token, work, answer, began);
        }
    }

    fn draw_range(&mut self, busy: &[(String, u64, u64)]) -> Option<(String, u64, u64)> {
        let names: Vec<&String> = self.model.volumes.keys().collect();
        let name = names[usize::try_from(self.random.below(names.len() as u64)).unwrap()].clone();
        let size = self.model.volumes[&name].cells.len() as u64;
        let first = self.random.below(size);
        let most = if self.random.chance(1, 8) { size } else { 12 };
        let blocks = 1 + self.random.below(most.min(size - first));
        let meets = |(other, start, count): &(String, u64, u64)| {
            *other == name && *start < first + blocks && first < start + count
        };
        (!busy.iter().any(meets)).then_some((name, first, blocks))
    }

    fn submit_io(&mut self, name: String, block: u64, blocks: u64) -> (u64, Work) {
        let volume = self.number(&name);
        let is_read_only = self.model.volumes[&name].is_read_only;
        let at = |first: u64| usize::try_from(first).unwrap();
        let range = at(block)..at(block + blocks);
        let kind = self.random.below(10);
        if kind < 3 || is_read_only {
            return (self.rig.submit(Ask::Read { volume, block, blocks }), Work::Read(name, block));
        }
        self.time += 1;
        let value = if kind == 3 { 0 } else { self.next_value };
        self.next_value += 1;
        for cell in &mut self.model.volumes.get_mut(&name).unwrap().cells[range] {
            cell.values.push((self.time, value));
        }
        let token = if kind == 3 {
            self.rig.submit(Ask::Trim { volume, block, blocks })
        } else {
            if self.random.chance(1, 200) {
                self.rig.fails_writes = true;
            }
            self.rig.submit_write(volume, block, blocks, value)
        };
        (token, Work::Write(name, block, blocks))
    }

    fn judge(&mut self, token: u64, work: Work, answer: Result<Answer, StoreError>, began: u64) {
        let data = self.rig.buffers.remove(&token);
        match (work, answer) {
            (Work::Flush, Ok(_)) => self.model.collapse(began),
            (Work::Own, answer) => {
                self.rig.answers.insert(token, answer);
                self.judge_own(token);
            }
            (Work::Read(name, first), Ok(_)) => {
                let cells = &self.model.volumes[&name].cells[usize::try_from(first).unwrap()..];
                for (cell, block) in cells.iter().zip(data.unwrap()) {
                    let values = super::disk::values(&block);
                    assert_eq!(values, [cell.value(); 8], "`{name}` from block {first} on");
                }
            }
            (Work::Write(..), Ok(_)) => {}
            (Work::Write(name, first, blocks), Err(error)) => {
                let is_full = matches!(error, StoreError::NoSpace { .. });
                assert!(is_full || matches!(error, StoreError::Device { .. }), "{error}");
                self.refused_for_room += u64::from(is_full);
                self.look_again(&name, first, blocks);
            }
            (_, Err(error)) => panic!("{error}"),
        }
    }

    /// A write that was refused may have been done in part: what is there now stays.
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
        match self.rig.ask(Ask::Find(name.into())) {
            Ok(Answer::Volume(info)) => info.id,
            other => panic!("{other:?}"),
        }
    }

    /// Compares everything: every block, every count.
    pub fn compare(&mut self) {
        self.rig.ask(Ask::Flush).unwrap();
        self.rig.settle();
        self.rig.ask(Ask::Flush).unwrap();
        self.model.collapse(u64::MAX);
        let report = check(&self.rig.store, self.rig.disk.image());
        assert_eq!(report.findings, [], "the check is clean");
        let Ok(Answer::Usage(usage)) = self.rig.ask(Ask::Usage) else { panic!("no usage") };
        assert_eq!(usage.used, report.used);
        assert_eq!(report.accounts.len() as u64, report.volumes);
        for counted in &report.accounts {
            assert_eq!(account(&mut self.rig, &counted.name), counted.account, "{counted:?}");
        }
        compare(&mut self.rig, &self.model).unwrap();
        self.compare_parents();
        compare_differences(&mut self.rig, &self.model);
    }

    /// How far parents reach, and that what is neither theirs nor zero is mapped.
    fn compare_parents(&mut self) {
        let Ok(Answer::Volumes(infos)) = self.rig.ask(Ask::List) else { panic!("no list") };
        for info in infos {
            let expected = &self.model.volumes[&info.name];
            assert_eq!((info.reach, info.mapped), (expected.reach, expected.mapped()), "{info:?}");
            let found = self.rig.ask(Ask::Parent { volume: info.id });
            let Ok(Answer::Parent(found)) = found else { panic!("{found:?}") };
            let is_right = |parent: &Parent| parent.uri == "ram:1m" && parent.print == 5;
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

    /// Opens what is left after a loss of power, and compares it with what must be there.
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

    /// What came back takes writes and changes as ever.
    fn go_on(&mut self, rig: &mut Rig, after: Option<&Model>) -> Result<(), String> {
        let mut models: Vec<Model> =
            [Some(&self.model), after].into_iter().flatten().cloned().collect();
        let Ok(Answer::Volumes(volumes)) = rig.ask(Ask::List) else { return Err("no list".into()) };
        for info in volumes.iter().filter(|info| !info.is_read_only).take(3) {
            let block = self.random.below(info.blocks);
            let token = rig.submit_write(info.id, block, 1, 77);
            for volume in models.iter_mut().filter_map(|model| model.volumes.get_mut(&info.name)) {
                let cell = volume.cells.get_mut(usize::try_from(block).unwrap());
                cell.into_iter().for_each(|cell| cell.values.push((u64::MAX, 77)));
            }
            rig.settle();
            if rig.answers.remove(&token).expect("an answer").is_ok() {
                let found = rig.read(info.id, block, 1).map_err(|error| error.to_string())?;
                if found != [[77; 8]] {
                    return Err(format!("`{}` block {block}: {found:?} after a write", info.name));
                }
            }
        }
        self.cut_again(rig, &models)?;
        if let Some(info) = volumes.first() {
            let change = Change::Delete { name: info.name.clone(), orphan: true };
            rig.ask(Ask::Change(change)).map_err(|error| error.to_string())?;
        }
        rig.ask(Ask::Flush).map_err(|error| error.to_string())?;
        let report = check(&rig.store, rig.disk.image());
        if report.findings.is_empty() {
            Ok(())
        } else {
            Err(format!("later: {:?}", report.findings))
        }
    }
}

impl World {
    /// The power is lost before what came back has been flushed by anybody but the store itself.
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

enum Work {
    Flush,
    Own,
    Read(String, u64),
    Write(String, u64, u64),
}

/// What a store says of the room of a volume.
pub fn account(rig: &mut Rig, name: &str) -> Account {
    match rig.ask(Ask::Account(name.into())) {
        Ok(Answer::Account(account)) => account,
        other => panic!("{other:?}"),
    }
}

/// Compares all volumes of a store with the model.
pub fn compare(rig: &mut Rig, model: &Model) -> Result<(), String> {
    let Ok(Answer::Usage(usage)) = rig.ask(Ask::Usage) else { return Err("no usage".into()) };
    if usage.thresholds != model.thresholds {
        return Err(format!("{:?}, expected {:?}", usage.thresholds, model.thresholds));
    }
    let Ok(Answer::Volumes(found)) = rig.ask(Ask::List) else { return Err("no list".into()) };
    let mut names: Vec<&String> = found.iter().map(|info| &info.name).collect();
    names.sort();
    if !names.iter().copied().eq(model.volumes.keys()) {
        return Err(format!("found {names:?}, expected {:?}", model.volumes.keys()));
    }
    for info in &found {
        let expected = &model.volumes[&info.name];
        compare_volume(rig, info, expected).map_err(|error| format!("`{}`: {error}", info.name))?;
    }
    Ok(())
}

/// What a volume has that another does not is told, and what is told of holes is true.
fn compare_differences(rig: &mut Rig, model: &Model) {
    let Ok(Answer::Volumes(infos)) = rig.ask(Ask::List) else { panic!("no list") };
    for (index, info) in infos.iter().enumerate() {
        let base = index.checked_sub(1).map(|before| &infos[before]);
        let base = base.filter(|base| base.id == info.origin || base.origin == info.origin);
        let cells = |info: &VolumeInfo| &model.volumes[&info.name].cells;
        let value = |cells: &[super::model::Cell], block: u64| {
            cells.get(usize::try_from(block).unwrap()).map_or(0, super::model::Cell::value)
        };
        let old = base.map(cells).map_or(&[][..], |cells| cells);
        let mut at = 0;
        for (first, blocks, is_mapped) in differences(rig, base.map_or(0, |base| base.id), info.id)
        {
            for block in at..first {
                let (now, then) = (value(cells(info), block), value(old, block));
                assert_eq!(now, then, "`{}` block {block} is said to be the same", info.name);
            }
            for block in first..first + blocks {
                assert_eq!(value(cells(info), block) != 0, is_mapped, "`{}` {block}", info.name);
            }
            at = first + blocks;
        }
        for block in at..info.blocks {
            assert_eq!(value(cells(info), block), value(old, block), "`{}` {block}", info.name);
        }
    }
}

/// Blocks of a volume that differ from those of another: first, how many, and whether they are read from
/// somewhere.
pub fn differences(rig: &mut Rig, base: u64, volume: u64) -> Vec<(u64, u64, bool)> {
    let (mut at, mut found) = (0, Vec::new());
    loop {
        let answer = rig.ask(Ask::Difference { volume, base, block: at }).unwrap();
        let Answer::Changed { block, blocks, is_mapped, is_parents } = answer else {
            panic!("{answer:?}")
        };
        if blocks == 0 {
            return found;
        }
        assert!(block >= at, "{block} after {at}");
        found.push((block, blocks, is_mapped || is_parents));
        at = block + blocks;
    }
}

fn compare_volume(rig: &mut Rig, info: &VolumeInfo, expected: &Volume) -> Result<(), String> {
    let size = expected.cells.len() as u64;
    let is_alike = (info.is_read_only, info.is_thick) == (expected.is_read_only, expected.is_thick);
    if info.blocks != size || !is_alike {
        return Err(format!("{info:?}, expected {size} blocks"));
    }
    let is_certain = expected.cells.iter().all(|cell| cell.values.len() == 1);
    // What is copied from a parent may be there, and the reach that says so not yet.
    let written = Volume { reach: info.reach.max(expected.reach), ..expected.clone() }.mapped();
    let most = if info.reach.max(expected.reach) > 0 { u64::MAX } else { written };
    if is_certain && !(written..=most).contains(&info.mapped) {
        return Err(format!("{} blocks mapped, expected {written} to {most}", info.mapped));
    }
    let found = rig.read(info.id, 0, size).map_err(|error| error.to_string())?;
    for (block, (values, cell)) in found.iter().zip(&expected.cells).enumerate() {
        if !values.iter().all(|value| cell.may_be(*value)) {
            return Err(format!("block {block}: {values:?}, expected one of {:?}", cell.values));
        }
    }
    Ok(())
}
