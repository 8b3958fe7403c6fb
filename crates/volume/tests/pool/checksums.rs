//! Data with checksums: every corruption by a device is detected, and nothing else is reported.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::fixture::PoolFixture;
use crate::fixture::fake_disk::stamped_block;
use tenmil_base::Random;
use tenmil_volume::{PoolError, PoolRequest, PoolResponse, VolumeInfo, VolumeOp};

const BLOCKS: u64 = 1 << 14;
const SIZE: u64 = 300;
const VOLUMES: u64 = 4;

/// Volumes with checksums that share some of their blocks, and their contents.
struct ChecksumFixture {
    rig: PoolFixture,
    random: Random,
    infos: Vec<VolumeInfo>,
    values: BTreeMap<(u64, u64), u64>,
    next_value: u64,
}

fn create_op(name: &str, unit: u64, checksums: bool) -> VolumeOp {
    VolumeOp::Create { name: name.into(), blocks: SIZE, unit, uuid: 1, checksums }
}

fn execute_change(rig: &mut PoolFixture, change: VolumeOp) -> VolumeInfo {
    match rig.run_request(PoolRequest::Change(change)) {
        Ok(PoolResponse::Volume(info)) => info,
        other => panic!("{other:?}"),
    }
}

impl ChecksumFixture {
    fn new(unit: u64) -> Self {
        let image = crate::fixture::new_pool_image(BLOCKS);
        let mut rig = PoolFixture::with_normal_trees(image, BLOCKS, Random::new(unit)).unwrap();
        let info = execute_change(&mut rig, create_op("a", unit, true));
        assert!(info.has_checksums);
        let (values, random) = (BTreeMap::new(), Random::new(7 + unit));
        let mut bench = Self { rig, random, infos: vec![info], values, next_value: 1 };
        (0..SIZE / 2).for_each(|_| bench.write_random_block(0));
        for (from, name) in [("a", "b"), ("b", "c"), ("a", "d")] {
            let (from, name) = (from.to_owned(), name.to_owned());
            let clone = execute_change(&mut bench.rig, VolumeOp::Clone { from, name, uuid: 1 });
            assert!(clone.has_checksums, "as what it was made from");
            let of = bench.infos.iter().find(|info| info.id == clone.origin).unwrap().id;
            let same: Vec<_> =
                bench.values.range((of, 0)..(of, SIZE)).map(|((_, at), it)| (*at, *it)).collect();
            bench.values.extend(same.into_iter().map(|(at, it)| ((clone.id, at), it)));
            bench.infos.push(clone);
            (0..40).for_each(|_| bench.write_random_block(bench.infos.len() - 1));
        }
        bench
    }

    fn write_random_block(&mut self, index: usize) {
        let block = self.random.below(SIZE);
        self.write(self.infos[index].id, block);
    }

    fn write(&mut self, volume: u64, block: u64) {
        self.next_value += 1;
        let token = self.rig.submit_write(volume, block, 1, self.next_value);
        self.rig.run_until_idle();
        self.rig.responses.remove(&token).unwrap().unwrap();
        self.values.insert((volume, block), self.next_value);
    }

    /// Place of every block.
    fn block_addresses(&mut self) -> BTreeMap<(u64, u64), u64> {
        let mut places = BTreeMap::new();
        for info in self.infos.clone() {
            for block in 0..info.blocks {
                let extent =
                    self.rig.run_request(PoolRequest::Extent { volume: info.id, block }).unwrap();
                let PoolResponse::Extent { at, .. } = extent else { panic!("{extent:?}") };
                places.extend(at.map(|at| ((info.id, block), at)));
            }
        }
        places
    }

    /// Reads every block, and returns the corrupt ones; all others have their expected contents.
    fn read_corrupt_blocks(&mut self, places: &BTreeMap<(u64, u64), u64>) -> BTreeSet<(u64, u64)> {
        let mut damaged = BTreeSet::new();
        for info in self.infos.clone() {
            for block in 0..info.blocks {
                let key = (info.id, block);
                match self.rig.read_blocks(info.id, block, 1) {
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
    fn corrupt_random_block(&mut self, hurt: &BTreeSet<u64>) -> Vec<u64> {
        let places = self.block_addresses();
        let whole: Vec<_> = places.into_iter().filter(|(_, at)| !hurt.contains(at)).collect();
        let pick =
            |random: &mut Random| whole[usize::try_from(random.below(whole.len() as u64)).unwrap()];
        let ((volume, block), at) = pick(&mut self.random);
        match self.random.below(3) {
            0 => {
                let mut bytes = *self.rig.disk.read(at);
                let bit = self.random.below(4096 * 8);
                bytes[usize::try_from(bit / 8).unwrap()] ^= 1 << (bit % 8);
                self.rig.disk.replace_block(at, Arc::new(bytes));
                vec![at]
            }
            1 => {
                self.rig.loses_writes = true;
                self.write(volume, block);
                vec![self.address_of(volume, block)]
            }
            _ => {
                // Overwrites a block of some volume, possibly the intended one.
                let (_, victim) = pick(&mut self.random);
                self.rig.astray = Some(victim);
                self.write(volume, block);
                vec![self.address_of(volume, block), victim]
            }
        }
    }

    fn address_of(&mut self, volume: u64, block: u64) -> u64 {
        let extent = self.rig.run_request(PoolRequest::Extent { volume, block }).unwrap();
        let PoolResponse::Extent { at: Some(at), .. } = extent else { panic!("{extent:?}") };
        at
    }

    /// Restores the expected contents.
    fn restore_contents(&mut self, places: &BTreeMap<(u64, u64), u64>, hurt: &BTreeSet<u64>) {
        for (key, at) in places.iter().filter(|(_, at)| hurt.contains(at)) {
            self.rig.disk.replace_block(*at, stamped_block(self.values[key]));
        }
    }
}

/// Corrupts this number of blocks, and verifies all of them after every few.
fn corrupt_and_verify(damages: usize, unit: u64) {
    let mut bench = ChecksumFixture::new(unit);
    let mut done = 0;
    while done < damages {
        let mut hurt = BTreeSet::new();
        for _ in 0..50 {
            let now = bench.corrupt_random_block(&hurt);
            hurt.extend(now);
            done += 1;
        }
        let places = bench.block_addresses();
        let of_hurt = |(key, at): (&(u64, u64), &u64)| hurt.contains(at).then_some(*key);
        let expected: BTreeSet<_> = places.iter().filter_map(of_hurt).collect();
        assert_eq!(bench.read_corrupt_blocks(&places), expected, "all of them, and no other");
        bench.restore_contents(&places, &hurt);
        assert_eq!(bench.read_corrupt_blocks(&places), BTreeSet::new());
    }
    let report = crate::fixture::check_pool(&bench.rig.store, bench.rig.disk.image());
    assert_eq!(report.findings, []);
}

#[test]
fn bit_flips_lost_and_misdirected_writes_are_detected() {
    [1, 16].into_iter().for_each(|unit| corrupt_and_verify(300, unit));
}

#[test]
#[ignore = "10 000 of them: run it with --release"]
fn ten_thousand_corruptions_are_detected() {
    [1, 2, 4, 8, 16].into_iter().for_each(|unit| corrupt_and_verify(2_000, unit));
}

#[test]
fn concurrent_writes_of_the_same_blocks_have_valid_checksums() {
    for unit in [1, 4, 16] {
        let mut bench = ChecksumFixture::new(unit);
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
            bench.rig.run_until_idle();
            for token in tokens {
                assert_eq!(bench.rig.responses.remove(&token), Some(Ok(PoolResponse::Done)));
            }
        }
        let report = crate::fixture::check_pool(&bench.rig.store, bench.rig.disk.image());
        assert_eq!(report.findings, []);
    }
}

#[test]
fn late_completed_failed_write_does_not_corrupt_checksums() {
    let mut bench = ChecksumFixture::new(16);
    let volume = bench.infos[0].id;
    for block in 0..SIZE {
        bench.write(volume, block);
        bench.rig.run_request(PoolRequest::Flush).unwrap();
        bench.rig.fails_writes = true;
        let token = bench.rig.submit_write(volume, block, 1, 77);
        bench.rig.run_until_idle();
        let failed = bench.rig.responses.remove(&token).unwrap();
        assert!(matches!(failed, Err(PoolError::Device { .. })), "{failed:?}");
        let at = bench.rig.failed_at.take().unwrap();
        bench.write(volume, block);
        bench.rig.run_request(PoolRequest::Flush).unwrap();
        bench.write(volume, block);
        // The late write reaches the device.
        bench.rig.disk.replace_block(at, stamped_block(77));
        let expected = bench.values[&(volume, block)];
        assert_eq!(
            bench.rig.read_blocks(volume, block, 1),
            Ok(vec![[expected; 8]]),
            "block {block}"
        );
    }
}

#[test]
fn trim_truncate_and_delete_remove_checksums() {
    let mut rig = PoolFixture::with_normal_trees(
        crate::fixture::new_pool_image(BLOCKS),
        BLOCKS,
        Random::new(3),
    )
    .unwrap();
    let used = |rig: &mut PoolFixture| {
        rig.run_request(PoolRequest::Flush).unwrap();
        rig.run_until_idle();
        rig.run_request(PoolRequest::Flush).unwrap();
        let Ok(PoolResponse::Usage(usage)) = rig.run_request(PoolRequest::Usage) else {
            panic!("no usage")
        };
        usage.used
    };
    let keeper = execute_change(&mut rig, create_op("keeper", 1, false));
    let before = used(&mut rig);
    let info = execute_change(&mut rig, create_op("v", 1, true));
    let empty = used(&mut rig);
    for round in 0..3 {
        let token = rig.submit_write(info.id, 1, SIZE - 2, 5);
        rig.run_until_idle();
        rig.responses.remove(&token).unwrap().unwrap();
        assert!(used(&mut rig) >= empty + SIZE - 2 + 2, "blocks, a map and checksums");
        match round {
            0 => (0..SIZE).for_each(|block| {
                let blocks = 1;
                rig.run_request(PoolRequest::Trim { volume: info.id, block, blocks }).unwrap();
            }),
            1 => drop(
                rig.run_request(PoolRequest::Trim { volume: info.id, block: 0, blocks: SIZE })
                    .unwrap(),
            ),
            _ => {
                let name = || "v".to_owned();
                execute_change(&mut rig, VolumeOp::Resize { name: name(), blocks: 1 });
                execute_change(&mut rig, VolumeOp::Resize { name: name(), blocks: SIZE });
            }
        }
        assert_eq!(used(&mut rig), empty, "round {round}");
    }
    let token = rig.submit_write(info.id, 0, SIZE, 5);
    rig.run_until_idle();
    rig.responses.remove(&token).unwrap().unwrap();
    rig.run_request(PoolRequest::Change(VolumeOp::Delete { name: "v".into(), orphan: false }))
        .unwrap();
    assert_eq!(used(&mut rig), before);
    assert!(!keeper.has_checksums);
}
