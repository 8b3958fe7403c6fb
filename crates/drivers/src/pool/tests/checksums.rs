//! Volumes with checksums on devices that corrupt data.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;

use tenmil_base::{IoStatus, Memory, Operation, Random};
use tenmil_volume::{PoolRequest, PoolResponse};

use super::{PAGE, PoolFixture};
use crate::pool::{DamageCause, DamagedRun, VolumeOp, VolumeRef, VolumeScrubReport, rescue_pool};

const BLOCKS: u64 = 400;

/// A pool with a volume with checksums, a snapshot of it, and a volume without checksums.
fn checksummed_pool() -> PoolFixture {
    let bench = PoolFixture::new("32m");
    let of = |name: &str, checksums| VolumeOp::Create {
        name: name.into(),
        blocks: BLOCKS,
        unit: 4,
        uuid: 7,
        checksums,
    };
    bench.open_pool().execute_volume_op(of("v", true)).unwrap();
    bench.open_pool().execute_volume_op(of("plain", false)).unwrap();
    for name in ["v", "plain"] {
        write(&bench, name, 0..10, 1);
    }
    let change = VolumeOp::Snapshot { volume: "v".into(), name: "s".into(), uuid: 8 };
    bench.open_pool().execute_volume_op(change).unwrap();
    write(&bench, "v", 3..5, 2);
    bench
}

/// Writes every second group of 30 blocks.
fn write(bench: &PoolFixture, name: &str, parts: std::ops::Range<u64>, byte: u8) {
    let opened = bench.open_volume(name).unwrap();
    let mut hand = bench.volume_client(&*opened.medium, 0);
    parts.for_each(|part| hand.write(part * 40, 30, byte));
}

fn pool_block_of(bench: &PoolFixture, name: &str, block: u64) -> Option<u64> {
    let open = bench.open_pool();
    let volume = open.find_volume(name).unwrap().id;
    match open.request_and_wait(PoolRequest::Extent { volume, block }).unwrap() {
        PoolResponse::Extent { at, .. } => at,
        other => panic!("{other:?}"),
    }
}

/// Flips a bit of a block. The pool is closed.
fn flip_bit(bench: &PoolFixture, at: u64, bit: u64) {
    let path = bench.directory.path().join("pool");
    let file = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let (offset, mut byte) = (at * u64::from(PAGE) + bit / 8, [0]);
    file.read_exact_at(&mut byte, offset).unwrap();
    file.write_all_at(&[byte[0] ^ 1 << (bit % 8)], offset).unwrap();
}

fn scrub(bench: &PoolFixture) -> Vec<VolumeScrubReport> {
    bench.open_pool().scrub(None, &mut |_| true).unwrap()
}

#[test]
fn corrupt_block_fails_with_its_location() {
    let bench = checksummed_pool();
    assert!(scrub(&bench).iter().all(|volume| volume.bad.is_empty()));
    let at = pool_block_of(&bench, "v", 41).unwrap();
    flip_bit(&bench, at, 12_345);
    let opened = bench.open_volume("v").unwrap();
    let mut hand = bench.volume_client(&*opened.medium, 0);
    hand.regions.fill(hand.memory, 0xee).unwrap();
    for (first, blocks) in [(41, 1), (30, 32)] {
        assert_eq!(hand.run_request(Operation::Read, first, blocks), IoStatus::UNRECOVERED_READ);
        assert_eq!(hand.run_request(Operation::Verify, first, blocks), IoStatus::UNRECOVERED_READ);
    }
    let mut seen = [0; PAGE as usize];
    hand.regions.load(hand.memory.slice(0, PAGE).unwrap(), &mut seen).unwrap();
    assert_eq!(seen, [0xee; PAGE as usize], "a failed read returns no data");
    assert_eq!(hand.read(42, 2), [1, 1]);

    let found = scrub(&bench);
    let shared_with = vec!["s".to_owned()];
    let bad = DamagedRun { block: 41, blocks: 1, at, cause: DamageCause::Checksum, shared_with };
    let bads: Vec<(&str, &[DamagedRun])> =
        found.iter().map(|one| (one.info.name.as_str(), &one.bad[..])).collect();
    assert_eq!(bads, [("v", &[bad][..]), ("plain", &[]), ("s", &[])]);
    let blocks: Vec<u64> = found.iter().map(|one| one.blocks).collect();
    assert_eq!(blocks, [300, 300, 60], "each block is read once");
    // Rewritten blocks are intact again; the snapshot has its old blocks.
    hand.write(41, 1, 9);
    assert_eq!(hand.read(41, 1), [9]);
    let found = scrub(&bench);
    let bads: Vec<usize> = found.iter().map(|one| one.bad.len()).collect();
    assert_eq!(bads, [0, 0, 1]);
}

#[test]
fn scrub_finds_every_corrupt_block() {
    let (bench, mut random) = (checksummed_pool(), Random::new(5));
    let mapped = |name| {
        let places = (0..BLOCKS).map(|block| (block, pool_block_of(&bench, name, block)));
        places.filter_map(|(block, at)| Some((at?, block))).collect::<BTreeMap<u64, u64>>()
    };
    let (of_v, of_s) = (mapped("v"), mapped("s"));
    let mut hurt: BTreeMap<u64, u64> = BTreeMap::new();
    for _ in 0..120 {
        let all: Vec<(&u64, &u64)> = of_v.iter().chain(&of_s).collect();
        let (at, block) = all[usize::try_from(random.below(all.len() as u64)).unwrap()];
        if hurt.insert(*at, *block).is_none() {
            flip_bit(&bench, *at, random.below(8 * 4096));
        }
    }
    let mut found = BTreeMap::new();
    for volume in scrub(&bench) {
        for bad in volume.bad {
            assert_eq!(bad.cause, DamageCause::Checksum);
            let (other, name) = if volume.info.name == "v" { (&of_s, "s") } else { (&of_v, "v") };
            let is_shared = other.contains_key(&bad.at);
            assert_eq!(bad.shared_with == [name], is_shared, "{bad:?}");
            found.extend((0..bad.blocks).map(|index| (bad.at + index, bad.block + index)));
        }
    }
    assert_eq!(found, hurt);
}

#[test]
fn scrub_reports_no_false_damage_under_load() {
    type Act = fn(&PoolFixture);
    fn change_volume(bench: &PoolFixture, change: VolumeOp) {
        bench.open_pool().execute_volume_op(change).unwrap();
    }
    fn delete_volume(bench: &PoolFixture, name: &str) {
        change_volume(bench, VolumeOp::Delete { name: name.into(), orphan: true });
    }
    fn resize_volume(bench: &PoolFixture, name: &str, blocks: u64) {
        change_volume(bench, VolumeOp::Resize { name: name.into(), blocks });
    }
    let acts: [(&str, Act); 8] = [
        ("the volume goes that is being read", |bench| delete_volume(bench, "v")),
        ("a volume goes before its turn", |bench| delete_volume(bench, "plain")),
        ("a snapshot goes", |bench| delete_volume(bench, "s")),
        ("what others were made from goes", |bench| {
            delete_volume(bench, "v");
            delete_volume(bench, "s");
        }),
        ("its end goes", |bench| resize_volume(bench, "v", 50)),
        ("it grows and is written there", |bench| {
            resize_volume(bench, "v", 800);
            let opened = bench.open_volume("v").unwrap();
            bench.volume_client(&*opened.medium, 2).write(500, 30, 4);
        }),
        ("it is written and trimmed", |bench| {
            let opened = bench.open_volume("v").unwrap();
            let mut hand = bench.volume_client(&*opened.medium, 2);
            (0..10).for_each(|part| hand.write(part * 40 + 10, 30, 6));
            assert_eq!(hand.run_request(Operation::Deallocate, 200, 150), IoStatus::SUCCESS);
        }),
        ("it is snapshot and taken back", |bench| {
            let of = |name: &str| (String::from("v"), String::from(name));
            let (volume, name) = of("t");
            change_volume(bench, VolumeOp::Snapshot { volume, name, uuid: 3 });
            let (volume, snapshot) = of("s");
            change_volume(bench, VolumeOp::Rollback { volume, snapshot });
        }),
    ];
    for (what, act) in acts {
        // After the first step, and in the middle of a run that is read in two parts.
        for at in [1, 10] {
            let bench = checksummed_pool();
            write(&bench, "v", 9..10, 1);
            let opened = bench.open_volume("v").unwrap();
            bench.volume_client(&*opened.medium, 0).write(390, 10, 1);
            drop(opened);
            let mut steps = 0;
            let found = bench.open_pool().scrub(None, &mut |(done, size)| {
                assert!(done <= size);
                steps += 1;
                if steps == at {
                    act(&bench);
                }
                true
            });
            let found = found.unwrap();
            assert!(steps > at, "{what}");
            let bad: Vec<&VolumeScrubReport> =
                found.iter().filter(|one| one.bad_blocks > 0).collect();
            assert!(bad.is_empty(), "{what} at step {at}: {bad:?}");
            assert!(bench.check_finds_nothing(), "{what}");
        }
    }
}

#[test]
fn scrub_yields_to_foreground_io_for_a_bounded_time() {
    let bench = checksummed_pool();
    let (opened, store) = (bench.open_volume("plain").unwrap(), bench.open_pool());
    let mut hand = bench.volume_client(&*opened.medium, 0);
    assert_eq!(store.wait_for_foreground_idle(super::super::scrub::BACKGROUND_WAIT_MAX), u32::MAX);
    for operation in [Operation::Read, Operation::Write] {
        // The first read gives the channel the mapping; a second read bypasses the pool thread.
        assert_eq!(hand.run_request(Operation::Read, 0, 1), IoStatus::SUCCESS);
        hand.submit(operation, 0, 1);
        let began = bench.clock.now();
        assert_eq!(
            store.wait_for_foreground_idle(super::super::scrub::BACKGROUND_WAIT_MAX),
            super::super::scrub::BACKGROUND_BLOCKS
        );
        assert!(bench.clock.now().since(began) >= super::super::scrub::BACKGROUND_WAIT_MAX);
        assert_eq!(hand.poll_for_status(), IoStatus::SUCCESS);
        assert_eq!(
            store.wait_for_foreground_idle(super::super::scrub::BACKGROUND_WAIT_MAX),
            u32::MAX,
            "{operation:?}"
        );
    }
}

#[test]
fn checksummed_data_uses_bounce_memory() {
    let bench = checksummed_pool();
    let opened = bench.open_volume("v").unwrap();
    assert_eq!(opened.medium.limits().request_blocks_max, 32);
    let mut hand = bench.volume_client(&*opened.medium, 0);
    assert_eq!(hand.read(20, 32), [&[1; 10][..], &[0; 10], &[1; 12]].concat());
    // Holes and data, with and without matching contents.
    hand.write(28, 4, 0);
    hand.write(30, 2, 0);
    assert_eq!(hand.run_request(Operation::Deallocate, 30, 2), IoStatus::SUCCESS);
    hand.regions.fill(hand.memory, 0).unwrap();
    assert_eq!(hand.run_request(Operation::Compare, 28, 8), IoStatus::SUCCESS);
    assert_eq!(hand.run_request(Operation::Compare, 27, 8), IoStatus::COMPARE_FAILURE);
    assert_eq!(hand.run_request(Operation::Verify, 0, 32), IoStatus::SUCCESS);
    assert_eq!(hand.run_request(Operation::WriteZeroes, 0, 1), IoStatus::SUCCESS);
    assert_eq!(hand.read(0, 2), [0, 1]);

    // The caller changes its memory during the write.
    hand.regions.fill(hand.memory, 5).unwrap();
    hand.submit(Operation::Write, 100, 20);
    hand.regions.fill(hand.memory, 6).unwrap();
    assert_eq!(hand.poll_for_status(), IoStatus::SUCCESS);
    assert_eq!(hand.read(100, 20), [5; 20]);
    drop((hand, opened));
    assert!(bench.check_finds_nothing());
    assert!(scrub(&bench).iter().all(|volume| volume.bad.is_empty()));
}

#[test]
fn received_snapshot_has_checksums_and_corrupt_data_is_not_sent() {
    let (bench, target) = (checksummed_pool(), PoolFixture::new("32m"));
    let mut stream = Vec::new();
    bench.open_pool().send_stream(&bench.opener(), None, "s", &mut stream, &mut |_| true).unwrap();
    let received = target.open_pool().receive_stream("s", &mut &stream[..], &mut |_| true).unwrap();
    assert!(
        received.info.has_checksums && target.open_pool().find_volume("s").unwrap().has_checksums
    );
    flip_bit(&target, pool_block_of(&target, "s", 300).unwrap(), 1);
    assert_eq!(scrub(&target)[0].bad.len(), 1);
    let error = target
        .open_pool()
        .send_stream(&target.opener(), None, "s", &mut Vec::new(), &mut |_| true)
        .unwrap_err();
    assert!(error.to_string().contains("volume `s`: read"), "{error}");
    assert_eq!(error.category(), tenmil_base::ErrorCategory::Remote);
}

#[test]
fn rescue_omits_corrupt_blocks() {
    let (bench, target) = (checksummed_pool(), PoolFixture::new("32m"));
    flip_bit(&bench, pool_block_of(&bench, "v", 41).unwrap(), 7);
    flip_bit(&bench, pool_block_of(&bench, "s", 130).unwrap(), 8);
    let from = VolumeRef::pool_on(&bench.device_uri().parse().unwrap());
    let saved =
        rescue_pool(&target.opener(), (&from, &[]), &target.open_pool(), &mut |_| true).unwrap();
    let lost: Vec<(&str, u64)> =
        saved.volumes.iter().map(|one| (one.info.name.as_str(), one.lost_blocks)).collect();
    assert_eq!(lost, [("v", 1), ("plain", 0), ("s", 2)]);
    assert!(target.open_pool().find_volume("v").unwrap().has_checksums);
    assert!(!target.open_pool().find_volume("plain").unwrap().has_checksums);
    assert!(scrub(&target).iter().all(|volume| volume.bad.is_empty()));
}

/// A volume that does not fit does not fail the others, and leaves its space to them.
#[test]
fn rescue_skips_a_volume_without_space() {
    let (bench, small) = (PoolFixture::new("32m"), PoolFixture::new("8m"));
    for (name, parts) in [("first", 0..2), ("large", 0..100), ("last", 0..3)] {
        bench.create_volume(name, 4000);
        write(&bench, name, parts, 3);
    }
    let from = VolumeRef::pool_on(&bench.device_uri().parse().unwrap());
    let saved =
        rescue_pool(&small.opener(), (&from, &[]), &small.open_pool(), &mut |_| true).unwrap();
    let ends: Vec<(&str, bool)> =
        saved.volumes.iter().map(|one| (one.info.name.as_str(), one.failed.is_some())).collect();
    assert_eq!(ends, [("first", false), ("large", true), ("last", false)]);
    let large = &saved.volumes[1];
    assert_eq!(large.lost_blocks, large.info.mapped);
    assert!(large.failed.as_ref().unwrap().contains("space"), "{:?}", large.failed);
    let names: Vec<String> =
        small.open_pool().list_volumes().unwrap().into_iter().map(|volume| volume.name).collect();
    assert_eq!(names, ["first", "last"]);
    let seen =
        rescue_pool(&small.opener(), (&from, &[]), &small.open_pool(), &mut |(done, _)| done < 1);
    assert!(seen.unwrap_err().to_string().contains("interrupt"), "the others are not tried then");
}
