//! Thick volumes: reservations are kept, in a pool that is full otherwise.

#![expect(clippy::unwrap_used, reason = "a test may")]

mod rig;

use rig::compare::account;
use rig::{Rig, check, new_store};
use tenmil_base::Random;
use tenmil_volume::format::{Page, PageBody};
use tenmil_volume::{
    DeviceAction, Finding, PoolError, PoolRequest, PoolResponse, PoolUsage, SpaceUsage, VolumeInfo,
    VolumeOp,
};

fn rig(blocks: u64, seed: u64) -> Rig {
    Rig::plain(new_store(blocks), blocks, Random::new(seed)).unwrap()
}

fn change(rig: &mut Rig, change: VolumeOp) -> Result<VolumeInfo, PoolError> {
    match rig.ask(PoolRequest::Change(change))? {
        PoolResponse::Volume(info) => Ok(info),
        other => panic!("{other:?}"),
    }
}

fn thin(rig: &mut Rig, name: &str, blocks: u64, unit: u64) -> VolumeInfo {
    let (name, checksums) = (name.into(), false);
    change(rig, VolumeOp::Create { name, blocks, unit, uuid: 1, checksums }).unwrap()
}

fn create(rig: &mut Rig, name: &str, blocks: u64, unit: u64) -> Result<VolumeInfo, PoolError> {
    change(rig, VolumeOp::CreateThick { name: name.into(), blocks, unit, uuid: 2 })
}

/// A thick volume with all of its blocks in exclusive clusters.
fn thick(rig: &mut Rig, name: &str, blocks: u64, unit: u64) -> VolumeInfo {
    create(rig, name, blocks, unit).unwrap();
    rig.inflate(name).unwrap()
}

fn snapshot(rig: &mut Rig, volume: &str, name: &str) {
    let (volume, name) = (volume.into(), name.into());
    change(rig, VolumeOp::Snapshot { volume, name, uuid: 3 }).unwrap();
}

fn delete(rig: &mut Rig, name: &str) {
    rig.ask(PoolRequest::Change(VolumeOp::Delete { name: name.into(), orphan: true })).unwrap();
    rig.ask(PoolRequest::Flush).unwrap();
}

fn write(rig: &mut Rig, volume: u64, block: u64, blocks: u64, value: u64) -> bool {
    let token = rig.submit_write(volume, block, blocks, value);
    rig.settle();
    match rig.responses.remove(&token).unwrap() {
        Ok(_) => true,
        Err(PoolError::NoSpace { .. }) => false,
        Err(error) => panic!("{error}"),
    }
}

fn usage(rig: &mut Rig) -> PoolUsage {
    rig.ask(PoolRequest::Flush).unwrap();
    match rig.ask(PoolRequest::Usage).unwrap() {
        PoolResponse::Usage(usage) => usage,
        other => panic!("{other:?}"),
    }
}

/// Creates thin volumes that use all unreserved space, down to the last block, and fragment the space map
/// as far as possible.
fn fill(rig: &mut Rig) {
    let [coarse, fine] =
        [("coarse", 16), ("fine", 1)].map(|(name, unit)| thin(rig, name, 1 << 20, unit));
    let full = |rig: &mut Rig, volume: u64, step: u64| {
        (0..)
            .step_by(usize::try_from(step).unwrap())
            .find(|at| !write(rig, volume, *at, 1, 5))
            .unwrap()
    };
    full(rig, coarse.id, 16);
    let end = full(rig, fine.id, 2);
    for block in (0..end).step_by(6) {
        let trim = rig.ask(PoolRequest::Trim { volume: fine.id, block, blocks: 1 });
        assert!(matches!(trim, Ok(_) | Err(PoolError::NoSpace { .. })));
    }
    rig.ask(PoolRequest::Flush).unwrap();
    // Far from its other blocks, so that no runs merge.
    assert!((1 << 18..1 << 19).any(|at| !write(rig, fine.id, 2 * at, 1, 5)));
    let snapshot = |number: u64| VolumeOp::Snapshot {
        volume: "coarse".into(),
        name: format!("coarse {number}"),
        uuid: 3,
    };
    assert!((0..1000).any(|number| change(rig, snapshot(number)).is_err()));
}

/// Writes every block of a volume separately, in any order, many at a time: all must succeed.
fn write_all(rig: &mut Rig, info: &VolumeInfo, value: impl Fn(u64) -> u64, at_once: usize) {
    let mut left: Vec<u64> = (0..info.blocks).collect();
    while !left.is_empty() {
        let mut tokens = Vec::new();
        for _ in 0..at_once.min(left.len()) {
            let index = usize::try_from(rig.random.below(left.len() as u64)).unwrap();
            let block = left.swap_remove(index);
            tokens.push((block, rig.submit_write(info.id, block, 1, value(block))));
        }
        rig.settle();
        for (block, token) in tokens {
            rig.buffers.remove(&token);
            let response = rig.responses.remove(&token).unwrap();
            assert_eq!(response, Ok(PoolResponse::Done), "block {block}, {} left", left.len());
        }
    }
}

fn expect(rig: &mut Rig, info: &VolumeInfo, value: impl Fn(u64) -> u64) {
    for (block, found) in (0..).zip(rig.read(info.id, 0, info.blocks).unwrap()) {
        assert_eq!(found, [value(block); 8], "block {block} of `{}`", info.name);
    }
}

fn expect_clean(rig: &mut Rig) {
    rig.ask(PoolRequest::Flush).unwrap();
    rig.ask(PoolRequest::Flush).unwrap();
    let report = check(&rig.store, rig.disk.image());
    assert_eq!(report.findings, []);
    for counted in report.accounts {
        assert_eq!(account(rig, &counted.name), counted.account, "`{}`", counted.name);
    }
}

#[test]
fn every_block_is_written_first_in_a_store_that_is_full_of_something_else() {
    for (seed, (blocks, size, unit, at_once)) in (1..).zip([
        (4096, 1500, 16, 1),
        (4096, 1500, 16, 256),
        (8192, 5000, 4, 64),
        (4096, 2000, 1, 256),
    ]) {
        let mut rig = rig(blocks, seed);
        let info = thick(&mut rig, "v", size, unit);
        let room = account(&mut rig, "v");
        assert_eq!((room.used, room.shared, room.reserved, room.missing), (0, 0, size, 0));
        fill(&mut rig);
        let before = usage(&mut rig);
        assert!(before.free < before.kept + before.provisioned + unit, "{before:?}");
        expect(&mut rig, &info, |_| 0);
        write_all(&mut rig, &info, |block| block + 1, at_once);
        assert_eq!(account(&mut rig, "v").reserved, 0);
        expect(&mut rig, &info, |block| block + 1);
        // Every other block is trimmed, so that no map can be longer, and written again.
        for block in (0..size).step_by(2) {
            rig.ask(PoolRequest::Trim { volume: info.id, block, blocks: 1 }).unwrap();
        }
        expect(&mut rig, &info, |block| if block % 2 == 0 { 0 } else { block + 1 });
        assert_eq!(account(&mut rig, "v").reserved, size.div_ceil(2));
        expect_clean(&mut rig);
        write_all(&mut rig, &info, |block| block + 7, at_once);
        expect(&mut rig, &info, |block| block + 7);
        expect_clean(&mut rig);
        let Ok(PoolResponse::Volumes(all)) = rig.ask(PoolRequest::List) else { panic!() };
        all.iter().for_each(|info| delete(&mut rig, &info.name));
        let after = usage(&mut rig);
        // The space map may keep one node.
        assert!(after.provisioned == 0 && after.used <= 1, "all came back: {after:?}");
    }
}

#[test]
fn the_longest_map_there_is_has_room_while_a_read_goes_on_for_ever() {
    const BLOCKS: u64 = 1 << 14;
    let mut rig = rig(BLOCKS, 2);
    let info = thick(&mut rig, "v", 14_900, 16);
    fill(&mut rig);
    let Ok(PoolResponse::Volume(other)) = rig.ask(PoolRequest::Find("coarse".into())) else {
        panic!()
    };
    let slow = rig.submit(PoolRequest::Read { volume: other.id, block: 0, blocks: 1 });
    rig.holds_data = true;
    rig.settle();
    let [DeviceAction::ReadData { io, .. }] = *rig.under_way() else { panic!() };
    rig.held.push(io);
    rig.holds_data = false;
    // A leaf is split when it is full, and the blocks before the split are never written again.
    for first in [0, 1] {
        for block in (first..info.blocks).step_by(2) {
            assert!(write(&mut rig, info.id, block, 1, block + 1), "block {block}");
            if block % 50 == 0 {
                rig.ask(PoolRequest::Flush).unwrap();
            }
        }
    }
    expect(&mut rig, &info, |block| block + 1);
    rig.held.clear();
    rig.settle();
    assert!(rig.responses.remove(&slow).unwrap().is_ok());
    expect_clean(&mut rig);
}

#[test]
fn what_has_no_room_is_refused_before_anything_is_taken() {
    let mut rig = rig(4096, 1);
    let before = usage(&mut rig);
    let error = create(&mut rig, "v", 4000, 16).unwrap_err();
    let PoolError::NoSpaceForThick { name, wanted, free } = error else { panic!("{error}") };
    assert_eq!(name, "v");
    assert!(wanted > 4000 && free < 4000, "{wanted} of {free}");
    let after = usage(&mut rig);
    assert_eq!((after.used, after.provisioned), (before.used, before.provisioned));
    // All space reported as free can be allocated.
    let most = (1..free).rev().find(|blocks| create(&mut rig, "v", *blocks, 16).is_ok()).unwrap();
    assert!(most + 80 > free, "{most} of {free}");
    rig.inflate("v").unwrap();
    thin(&mut rig, "other", 4000, 16);
    let refused = rig.inflate("other").unwrap_err();
    assert!(matches!(refused, PoolError::NoSpaceForThick { .. }), "{refused}");
    let Ok(PoolResponse::Volume(other)) = rig.ask(PoolRequest::Find("other".into())) else {
        panic!()
    };
    assert!(!other.is_thick && other.spare == 0);
    expect_clean(&mut rig);
}

#[test]
fn a_thin_volume_and_a_clone_become_thick_and_keep_what_they_hold() {
    for unit in [16, 4, 1] {
        let mut rig = rig(1 << 14, 7);
        let base = thin(&mut rig, "base", 1000, unit);
        for block in (0..900).step_by(5) {
            write(&mut rig, base.id, block, 3, block + 1);
        }
        snapshot(&mut rig, "base", "s");
        let from = "s".into();
        let clone = VolumeOp::Clone { from, name: "c".into(), uuid: 4 };
        let clone = change(&mut rig, clone).unwrap();
        write(&mut rig, clone.id, 11, 20, 7777);
        let held: Vec<[u64; 8]> = rig.read(clone.id, 0, 1000).unwrap();
        let was = rig.read(base.id, 0, 1000).unwrap();
        rig.inflate("c").unwrap();
        let room = account(&mut rig, "c");
        assert_eq!((room.shared, room.used + room.reserved, room.missing), (0, 1000, 0));
        assert_eq!(rig.read(clone.id, 0, 1000).unwrap(), held);
        expect_clean(&mut rig);
        // Repeated: it is thick already, and nothing is written.
        let writes = rig.disk.writes;
        rig.inflate("c").unwrap();
        assert_eq!(rig.disk.writes, writes);
        fill(&mut rig);
        write_all(&mut rig, &clone, |block| block + 100_000, 32);
        expect(&mut rig, &clone, |block| block + 100_000);
        assert_eq!(rig.read(base.id, 0, 1000).unwrap(), was, "nobody else has noticed");
        expect_clean(&mut rig);
    }
}

#[test]
fn a_snapshot_takes_the_promise_back_and_inflating_again_restores_it() {
    let mut rig = rig(1 << 13, 3);
    let info = thick(&mut rig, "v", 1000, 16);
    write_all(&mut rig, &info, |block| block + 1, 64);
    rig.ask(PoolRequest::Trim { volume: info.id, block: 500, blocks: 100 }).unwrap();
    assert_eq!(account(&mut rig, "v").reserved, 100);
    snapshot(&mut rig, "v", "s");
    let room = account(&mut rig, "v");
    assert_eq!((room.used, room.shared, room.reserved), (900, 900, 0));
    assert_eq!(room.missing, 1008, "whole units");
    let before = usage(&mut rig).used;
    assert!(write(&mut rig, info.id, 0, 1, 9));
    assert!(usage(&mut rig).used >= before + 16, "a new unit");
    rig.inflate("v").unwrap();
    let room = account(&mut rig, "v");
    assert_eq!((room.used, room.shared, room.reserved), (901 - 1, 0, 100));
    fill(&mut rig);
    write_all(&mut rig, &info, |block| block + 2000, 64);
    let Ok(PoolResponse::Volume(kept)) = rig.ask(PoolRequest::Find("s".into())) else { panic!() };
    expect(&mut rig, &kept, |block| if (500..600).contains(&block) { 0 } else { block + 1 });
    expect_clean(&mut rig);
    // Blocks exclusive to the snapshot are freed, and the volume is intact without it.
    delete(&mut rig, "s");
    let room = account(&mut rig, "v");
    assert_eq!((room.used, room.shared, room.reserved, room.missing), (1000, 0, 0, 0));
    expect_clean(&mut rig);
}

#[test]
fn a_thick_volume_grows_with_its_promise_or_not_at_all_and_gives_back() {
    let mut rig = rig(4096, 3);
    let info = thick(&mut rig, "v", 1001, 16);
    let blocks = |name: &str, blocks| VolumeOp::Resize { name: name.into(), blocks };
    let refused = change(&mut rig, blocks("v", 9000)).unwrap_err();
    assert!(matches!(refused, PoolError::NoSpaceForThick { .. }), "{refused}");
    change(&mut rig, blocks("v", 2000)).unwrap();
    let room = account(&mut rig, "v");
    assert_eq!((room.reserved, room.missing), (1001, 992));
    rig.inflate("v").unwrap();
    assert_eq!(account(&mut rig, "v").reserved, 2000);
    let large = usage(&mut rig);
    change(&mut rig, blocks("v", 500)).unwrap();
    rig.ask(PoolRequest::Flush).unwrap();
    let small = usage(&mut rig);
    assert!(small.used + 1480 <= large.used && small.provisioned < large.provisioned);
    assert_eq!(account(&mut rig, "v").reserved, 500);
    fill(&mut rig);
    write_all(&mut rig, &VolumeInfo { blocks: 500, ..info }, |_| 4, 64);
    expect_clean(&mut rig);
}

#[test]
fn a_snapshot_and_checksums_are_no_ground_for_a_promise() {
    let mut rig = rig(4096, 3);
    let create =
        VolumeOp::Create { name: "sums".into(), blocks: 10, unit: 1, uuid: 1, checksums: true };
    change(&mut rig, create).unwrap();
    let refused = rig.inflate("sums").unwrap_err();
    assert_eq!(refused, PoolError::ThickChecksums("sums".into()));
    assert!(refused.hint().is_some() && refused.to_string().contains("sums"));
    thick(&mut rig, "v", 100, 4);
    snapshot(&mut rig, "v", "s");
    assert_eq!(rig.inflate("s").unwrap_err(), PoolError::ReadOnly("s".into()));
    // A volume that becomes a snapshot has no reservation any more.
    let provisioned = usage(&mut rig).provisioned;
    change(&mut rig, VolumeOp::ConvertToSnapshot { name: "v".into(), to: "t".into(), uuid: 9 })
        .unwrap();
    assert!(provisioned > 0 && usage(&mut rig).provisioned == 0);
    expect_clean(&mut rig);
}

#[test]
fn a_large_thick_volume_is_made_in_few_steps_and_has_one_run() {
    const TIB: u64 = 1 << 28;
    let mut rig = rig(2 * TIB, 3);
    let writes = rig.disk.writes;
    let info = thick(&mut rig, "v", TIB, 16);
    rig.ask(PoolRequest::Flush).unwrap();
    assert!(rig.disk.writes - writes < 200, "{} blocks written", rig.disk.writes - writes);
    assert_eq!(account(&mut rig, "v").reserved, TIB);
    assert!(write(&mut rig, info.id, 12_345_678, 3, 8));
    assert_eq!(account(&mut rig, "v").reserved, TIB - 3);
    let SpaceUsage { unique, .. } = account(&mut rig, "v");
    assert!(unique <= TIB + 8, "{} blocks of metadata", unique - TIB);
    expect_clean(&mut rig);
}

#[test]
fn a_check_names_wrong_numbers_of_thick_volumes() {
    let mut rig = rig(4096, 3);
    thick(&mut rig, "v", 100, 4);
    rig.ask(PoolRequest::Flush).unwrap();
    let (uuid, image) = (rig.store.uuid(), rig.disk.image().clone());
    let broken = |edit: &dyn Fn(&mut PageBody)| {
        let mut image = image.clone();
        for (at, block) in &mut image {
            if let Ok(mut page) = Page::decode(block, uuid, *at) {
                edit(&mut page.body);
                *block = (*page.encode(uuid, *at)).into();
            }
        }
        let rig = Rig::plain(image, 4096, Random::new(1)).unwrap();
        check(&rig.store, rig.disk.image()).findings
    };
    let what = |findings: Vec<Finding>| match findings[..] {
        [Finding::Number { what, .. }] => what,
        _ => panic!("{findings:?}"),
    };
    assert_eq!(broken(&|_| {}), []);
    let found = broken(&|body| {
        if let PageBody::Superblock(superblock, ..) = body {
            superblock.provisioned += 1;
        }
    });
    assert_eq!(what(found), "promised blocks");
    let found = broken(&|body| {
        if let PageBody::Superblock(superblock, ..) = body {
            superblock.incompatible = 0;
        }
    });
    assert_eq!(what(found), "bit of spare runs");
    let found = broken(&|body| {
        if let PageBody::Volume(volume) = body {
            volume.spare += 1;
        }
    });
    assert_eq!(what(found), "spare blocks");
}
