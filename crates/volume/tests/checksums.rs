//! Data with checksums: every corruption by a device is detected, and nothing else is reported.

#![expect(clippy::unwrap_used, reason = "a test may")]

mod rig;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use rig::Rig;
use rig::disk::stamped;
use tenmil_base::Random;
use tenmil_volume::{PoolError, PoolRequest, PoolResponse, VolumeInfo, VolumeOp};

const BLOCKS: u64 = 1 << 14;
const SIZE: u64 = 300;
const VOLUMES: u64 = 4;

/// Volumes with checksums that share some of their blocks, and their contents.
struct Bench {
    rig: Rig,
    random: Random,
    infos: Vec<VolumeInfo>,
    values: BTreeMap<(u64, u64), u64>,
    next_value: u64,
}

fn create(name: &str, unit: u64, checksums: bool) -> VolumeOp {
    VolumeOp::Create { name: name.into(), blocks: SIZE, unit, uuid: 1, checksums }
}

fn change(rig: &mut Rig, change: VolumeOp) -> VolumeInfo {
    match rig.ask(PoolRequest::Change(change)) {
        Ok(PoolResponse::Volume(info)) => info,
        other => panic!("{other:?}"),
    }
}

impl Bench {
    fn new(unit: u64) -> Self {
        let image = rig::new_store(BLOCKS);
        let mut rig = Rig::plain(image, BLOCKS, Random::new(unit)).unwrap();
        let info = change(&mut rig, create("a", unit, true));
        assert!(info.has_checksums);
        let (values, random) = (BTreeMap::new(), Random::new(7 + unit));
        let mut bench = Self { rig, random, infos: vec![info], values, next_value: 1 };
        (0..SIZE / 2).for_each(|_| bench.write_somewhere(0));
        for (from, name) in [("a", "b"), ("b", "c"), ("a", "d")] {
            let (from, name) = (from.to_owned(), name.to_owned());
            let clone = change(&mut bench.rig, VolumeOp::Clone { from, name, uuid: 1 });
            assert!(clone.has_checksums, "as what it was made from");
            let of = bench.infos.iter().find(|info| info.id == clone.origin).unwrap().id;
            let same: Vec<_> =
                bench.values.range((of, 0)..(of, SIZE)).map(|((_, at), it)| (*at, *it)).collect();
            bench.values.extend(same.into_iter().map(|(at, it)| ((clone.id, at), it)));
            bench.infos.push(clone);
            (0..40).for_each(|_| bench.write_somewhere(bench.infos.len() - 1));
        }
        bench
    }

    fn write_somewhere(&mut self, index: usize) {
        let block = self.random.below(SIZE);
        self.write(self.infos[index].id, block);
    }

    fn write(&mut self, volume: u64, block: u64) {
        self.next_value += 1;
        let token = self.rig.submit_write(volume, block, 1, self.next_value);
        self.rig.settle();
        self.rig.responses.remove(&token).unwrap().unwrap();
        self.values.insert((volume, block), self.next_value);
    }

    /// Place of every block.
    fn places(&mut self) -> BTreeMap<(u64, u64), u64> {
        let mut places = BTreeMap::new();
        for info in self.infos.clone() {
            for block in 0..info.blocks {
                let extent = self.rig.ask(PoolRequest::Extent { volume: info.id, block }).unwrap();
                let PoolResponse::Extent { at, .. } = extent else { panic!("{extent:?}") };
                places.extend(at.map(|at| ((info.id, block), at)));
            }
        }
        places
    }

    /// Reads every block, and returns the corrupt ones; all others have their expected contents.
    fn scrub(&mut self, places: &BTreeMap<(u64, u64), u64>) -> BTreeSet<(u64, u64)> {
        let mut damaged = BTreeSet::new();
        for info in self.infos.clone() {
            for block in 0..info.blocks {
                let key = (info.id, block);
                match self.rig.read(info.id, block, 1) {
                    Ok(found) => {
                        let expected = self.values.get(&key).copied().unwrap_or(0);
                        assert_eq!(found, [[expected; 8]], "{key:?}");
                    }
                    Err(error) => {
                        let (name, at) = (info.name.clone(), places[&key]);
                        let expected = PoolError::Corrupt { name, block, blocks: 1, at };
                        assert_eq!(error, expected);
                        assert_eq!(error.status(), tenmil_base::IoStatus::UNRECOVERED_READ);
                        damaged.insert(key);
                    }
                }
            }
        }
        damaged
    }

    /// Corrupts an intact block. Returns the corrupt places, each with its expected contents.
    fn damage(&mut self, hurt: &BTreeSet<u64>) -> Vec<u64> {
        let places = self.places();
        let whole: Vec<_> = places.into_iter().filter(|(_, at)| !hurt.contains(at)).collect();
        let pick =
            |random: &mut Random| whole[usize::try_from(random.below(whole.len() as u64)).unwrap()];
        let ((volume, block), at) = pick(&mut self.random);
        match self.random.below(3) {
            0 => {
                let mut bytes = *self.rig.disk.read(at);
                let bit = self.random.below(4096 * 8);
                bytes[usize::try_from(bit / 8).unwrap()] ^= 1 << (bit % 8);
                self.rig.disk.put(at, Arc::new(bytes));
                vec![at]
            }
            1 => {
                self.rig.loses_writes = true;
                self.write(volume, block);
                vec![self.place_of(volume, block)]
            }
            _ => {
                // Overwrites a block of some volume, possibly the intended one.
                let (_, victim) = pick(&mut self.random);
                self.rig.astray = Some(victim);
                self.write(volume, block);
                vec![self.place_of(volume, block), victim]
            }
        }
    }

    fn place_of(&mut self, volume: u64, block: u64) -> u64 {
        let extent = self.rig.ask(PoolRequest::Extent { volume, block }).unwrap();
        let PoolResponse::Extent { at: Some(at), .. } = extent else { panic!("{extent:?}") };
        at
    }

    /// Restores the expected contents.
    fn mend(&mut self, places: &BTreeMap<(u64, u64), u64>, hurt: &BTreeSet<u64>) {
        for (key, at) in places.iter().filter(|(_, at)| hurt.contains(at)) {
            self.rig.disk.put(*at, stamped(self.values[key]));
        }
    }
}

/// Corrupts this number of blocks, and verifies all of them after every few.
fn run(damages: usize, unit: u64) {
    let mut bench = Bench::new(unit);
    let mut done = 0;
    while done < damages {
        let mut hurt = BTreeSet::new();
        for _ in 0..50 {
            let now = bench.damage(&hurt);
            hurt.extend(now);
            done += 1;
        }
        let places = bench.places();
        let of_hurt = |(key, at): (&(u64, u64), &u64)| hurt.contains(at).then_some(*key);
        let expected: BTreeSet<_> = places.iter().filter_map(of_hurt).collect();
        assert_eq!(bench.scrub(&places), expected, "all of them, and no other");
        bench.mend(&places, &hurt);
        assert_eq!(bench.scrub(&places), BTreeSet::new());
    }
    let report = rig::check(&bench.rig.store, bench.rig.disk.image());
    assert_eq!(report.findings, []);
}

#[test]
fn flips_and_lost_and_misdirected_writes_are_all_noticed_and_nothing_else_is() {
    [1, 16].into_iter().for_each(|unit| run(300, unit));
}

#[test]
#[ignore = "10 000 of them: run it with --release"]
fn ten_thousand_flips_and_lost_and_misdirected_writes_are_all_noticed() {
    [1, 2, 4, 8, 16].into_iter().for_each(|unit| run(2_000, unit));
}

#[test]
fn writes_of_the_same_blocks_at_once_leave_blocks_that_have_their_checksums() {
    for unit in [1, 4, 16] {
        let mut bench = Bench::new(unit);
        for _ in 0..300 {
            let mut tokens = Vec::new();
            for _ in 0..6 {
                let volume = bench.infos[usize::try_from(bench.random.below(VOLUMES)).unwrap()].id;
                let (block, blocks) = (bench.random.below(20), 1 + bench.random.below(20));
                let ask = match bench.random.below(4) {
                    0 => bench.rig.submit(PoolRequest::Read { volume, block, blocks }),
                    1 => bench.rig.submit(PoolRequest::Trim { volume, block, blocks }),
                    _ => bench.rig.submit_write(volume, block, blocks, 1 + bench.random.below(9)),
                };
                tokens.push(ask);
            }
            bench.rig.settle();
            for token in tokens {
                assert_eq!(bench.rig.responses.remove(&token), Some(Ok(PoolResponse::Done)));
            }
        }
        let report = rig::check(&bench.rig.store, bench.rig.disk.image());
        assert_eq!(report.findings, []);
    }
}

#[test]
fn a_write_that_failed_and_comes_to_pass_later_does_no_harm() {
    let mut bench = Bench::new(16);
    let volume = bench.infos[0].id;
    for block in 0..SIZE {
        bench.write(volume, block);
        bench.rig.ask(PoolRequest::Flush).unwrap();
        bench.rig.fails_writes = true;
        let token = bench.rig.submit_write(volume, block, 1, 77);
        bench.rig.settle();
        let failed = bench.rig.responses.remove(&token).unwrap();
        assert!(matches!(failed, Err(PoolError::Device { .. })), "{failed:?}");
        let at = bench.rig.failed_at.take().unwrap();
        bench.write(volume, block);
        bench.rig.ask(PoolRequest::Flush).unwrap();
        bench.write(volume, block);
        // The late write reaches the device.
        bench.rig.disk.put(at, stamped(77));
        let expected = bench.values[&(volume, block)];
        assert_eq!(bench.rig.read(volume, block, 1), Ok(vec![[expected; 8]]), "block {block}");
    }
}

#[test]
fn what_is_trimmed_cut_and_deleted_takes_its_checksums_along() {
    let mut rig = Rig::plain(rig::new_store(BLOCKS), BLOCKS, Random::new(3)).unwrap();
    let used = |rig: &mut Rig| {
        rig.ask(PoolRequest::Flush).unwrap();
        rig.settle();
        rig.ask(PoolRequest::Flush).unwrap();
        let Ok(PoolResponse::Usage(usage)) = rig.ask(PoolRequest::Usage) else {
            panic!("no usage")
        };
        usage.used
    };
    let keeper = change(&mut rig, create("keeper", 1, false));
    let before = used(&mut rig);
    let info = change(&mut rig, create("v", 1, true));
    let empty = used(&mut rig);
    for round in 0..3 {
        let token = rig.submit_write(info.id, 1, SIZE - 2, 5);
        rig.settle();
        rig.responses.remove(&token).unwrap().unwrap();
        assert!(used(&mut rig) >= empty + SIZE - 2 + 2, "blocks, a map and checksums");
        match round {
            0 => (0..SIZE).for_each(|block| {
                let blocks = 1;
                rig.ask(PoolRequest::Trim { volume: info.id, block, blocks }).unwrap();
            }),
            1 => drop(
                rig.ask(PoolRequest::Trim { volume: info.id, block: 0, blocks: SIZE }).unwrap(),
            ),
            _ => {
                let name = || "v".to_owned();
                change(&mut rig, VolumeOp::Resize { name: name(), blocks: 1 });
                change(&mut rig, VolumeOp::Resize { name: name(), blocks: SIZE });
            }
        }
        assert_eq!(used(&mut rig), empty, "round {round}");
    }
    let token = rig.submit_write(info.id, 0, SIZE, 5);
    rig.settle();
    rig.responses.remove(&token).unwrap().unwrap();
    rig.ask(PoolRequest::Change(VolumeOp::Delete { name: "v".into(), orphan: false })).unwrap();
    assert_eq!(used(&mut rig), before);
    assert!(!keeper.has_checksums);
}
