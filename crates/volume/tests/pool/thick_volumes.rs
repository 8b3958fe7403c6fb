//! Thick volumes: reservations are kept, in a pool that is full otherwise.

use crate::fixture::model_comparison::volume_usage;
use crate::fixture::{PoolFixture, check_pool, new_pool_image};
use tenmil_base::Random;
use tenmil_volume::format::{Page, PageBody};
use tenmil_volume::{
    CheckFinding, DeviceAction, PoolError, PoolRequest, PoolResponse, PoolUsage, SpaceUsage,
    VolumeInfo, VolumeOp,
};

fn empty_pool_fixture(blocks: u64, seed: u64) -> PoolFixture {
    PoolFixture::with_normal_trees(new_pool_image(blocks), blocks, Random::new(seed)).unwrap()
}

fn execute_change(rig: &mut PoolFixture, change: VolumeOp) -> Result<VolumeInfo, PoolError> {
    match rig.run_request(PoolRequest::Change(change))? {
        PoolResponse::Volume(info) => Ok(info),
        other => panic!("{other:?}"),
    }
}

fn create_thin_volume(rig: &mut PoolFixture, name: &str, blocks: u64, unit: u64) -> VolumeInfo {
    let (name, checksums) = (name.into(), false);
    execute_change(rig, VolumeOp::Create { name, blocks, unit, uuid: 1, checksums }).unwrap()
}

fn create_thick_volume(
    rig: &mut PoolFixture,
    name: &str,
    blocks: u64,
    unit: u64,
) -> Result<VolumeInfo, PoolError> {
    execute_change(rig, VolumeOp::CreateThick { name: name.into(), blocks, unit, uuid: 2 })
}

/// A thick volume with all of its blocks in exclusive clusters.
fn create_inflated_volume(rig: &mut PoolFixture, name: &str, blocks: u64, unit: u64) -> VolumeInfo {
    create_thick_volume(rig, name, blocks, unit).unwrap();
    rig.make_volume_thick(name).unwrap()
}

fn create_snapshot(rig: &mut PoolFixture, volume: &str, name: &str) {
    let (volume, name) = (volume.into(), name.into());
    execute_change(rig, VolumeOp::Snapshot { volume, name, uuid: 3 }).unwrap();
}

fn delete_volume(rig: &mut PoolFixture, name: &str) {
    rig.run_request(PoolRequest::Change(VolumeOp::Delete { name: name.into(), orphan: true }))
        .unwrap();
    rig.run_request(PoolRequest::Flush).unwrap();
}

fn try_write(rig: &mut PoolFixture, volume: u64, block: u64, blocks: u64, value: u64) -> bool {
    let token = rig.submit_write(volume, block, blocks, value);
    rig.run_until_idle();
    match rig.responses.remove(&token).unwrap() {
        Ok(_) => true,
        Err(PoolError::NoSpace { .. }) => false,
        Err(error) => panic!("{error}"),
    }
}

fn flush_and_read_usage(rig: &mut PoolFixture) -> PoolUsage {
    rig.run_request(PoolRequest::Flush).unwrap();
    match rig.run_request(PoolRequest::Usage).unwrap() {
        PoolResponse::Usage(usage) => usage,
        other => panic!("{other:?}"),
    }
}

/// Creates thin volumes that use all unreserved space, down to the last block, and fragment the space map
/// as far as possible.
fn fill_pool(rig: &mut PoolFixture) {
    let [coarse, fine] = [("coarse", 16), ("fine", 1)]
        .map(|(name, unit)| create_thin_volume(rig, name, 1 << 20, unit));
    let full = |rig: &mut PoolFixture, volume: u64, step: u64| {
        (0..)
            .step_by(usize::try_from(step).unwrap())
            .find(|at| !try_write(rig, volume, *at, 1, 5))
            .unwrap()
    };
    full(rig, coarse.id, 16);
    let end = full(rig, fine.id, 2);
    for block in (0..end).step_by(6) {
        let trim = rig.run_request(PoolRequest::Trim { volume: fine.id, block, blocks: 1 });
        assert!(matches!(trim, Ok(_) | Err(PoolError::NoSpace { .. })));
    }
    rig.run_request(PoolRequest::Flush).unwrap();
    // Far from its other blocks, so that no runs merge.
    assert!((1 << 18..1 << 19).any(|at| !try_write(rig, fine.id, 2 * at, 1, 5)));
    let snapshot = |number: u64| VolumeOp::Snapshot {
        volume: "coarse".into(),
        name: format!("coarse {number}"),
        uuid: 3,
    };
    assert!((0..1000).any(|number| execute_change(rig, snapshot(number)).is_err()));
}

/// Writes every block of a volume separately, in any order, many at a time: all must succeed.
fn write_all(rig: &mut PoolFixture, info: &VolumeInfo, value: impl Fn(u64) -> u64, at_once: usize) {
    let mut left: Vec<u64> = (0..info.blocks).collect();
    while !left.is_empty() {
        let mut tokens = Vec::new();
        for _ in 0..at_once.min(left.len()) {
            let index = usize::try_from(rig.random.below(left.len() as u64)).unwrap();
            let block = left.swap_remove(index);
            tokens.push((block, rig.submit_write(info.id, block, 1, value(block))));
        }
        rig.run_until_idle();
        for (block, token) in tokens {
            rig.buffers.remove(&token);
            let response = rig.responses.remove(&token).unwrap();
            assert_eq!(response, Ok(PoolResponse::Done), "block {block}, {} left", left.len());
        }
    }
}

fn assert_contents(rig: &mut PoolFixture, info: &VolumeInfo, value: impl Fn(u64) -> u64) {
    for (block, found) in (0..).zip(rig.read_blocks(info.id, 0, info.blocks).unwrap()) {
        assert_eq!(found, [value(block); 8], "block {block} of `{}`", info.name);
    }
}

fn assert_pool_consistent(rig: &mut PoolFixture) {
    rig.run_request(PoolRequest::Flush).unwrap();
    rig.run_request(PoolRequest::Flush).unwrap();
    let report = check_pool(&rig.store, rig.disk.image());
    assert_eq!(report.findings, []);
    for counted in report.accounts {
        assert_eq!(volume_usage(rig, &counted.name), counted.volume_usage, "`{}`", counted.name);
    }
}

#[test]
fn thick_volume_is_writable_in_a_full_pool() {
    for (seed, (blocks, size, unit, at_once)) in (1..).zip([
        (4096, 1500, 16, 1),
        (4096, 1500, 16, 256),
        (8192, 5000, 4, 64),
        (4096, 2000, 1, 256),
    ]) {
        let mut rig = empty_pool_fixture(blocks, seed);
        let info = create_inflated_volume(&mut rig, "v", size, unit);
        let room = volume_usage(&mut rig, "v");
        assert_eq!((room.used, room.shared, room.reserved, room.missing), (0, 0, size, 0));
        fill_pool(&mut rig);
        let before = flush_and_read_usage(&mut rig);
        assert!(before.free < before.kept + before.provisioned + unit, "{before:?}");
        assert_contents(&mut rig, &info, |_| 0);
        write_all(&mut rig, &info, |block| block + 1, at_once);
        assert_eq!(volume_usage(&mut rig, "v").reserved, 0);
        assert_contents(&mut rig, &info, |block| block + 1);
        // Every other block is trimmed, so that no map can be longer, and written again.
        for block in (0..size).step_by(2) {
            rig.run_request(PoolRequest::Trim { volume: info.id, block, blocks: 1 }).unwrap();
        }
        assert_contents(&mut rig, &info, |block| if block % 2 == 0 { 0 } else { block + 1 });
        assert_eq!(volume_usage(&mut rig, "v").reserved, size.div_ceil(2));
        assert_pool_consistent(&mut rig);
        write_all(&mut rig, &info, |block| block + 7, at_once);
        assert_contents(&mut rig, &info, |block| block + 7);
        assert_pool_consistent(&mut rig);
        let Ok(PoolResponse::Volumes(all)) = rig.run_request(PoolRequest::List) else { panic!() };
        all.iter().for_each(|info| delete_volume(&mut rig, &info.name));
        let after = flush_and_read_usage(&mut rig);
        // The space map may keep one node.
        assert!(after.provisioned == 0 && after.used <= 1, "all came back: {after:?}");
    }
}

#[test]
fn largest_thick_map_fits_while_a_read_pins_metadata() {
    const BLOCKS: u64 = 1 << 14;
    let mut rig = empty_pool_fixture(BLOCKS, 2);
    let info = create_inflated_volume(&mut rig, "v", 14_900, 16);
    fill_pool(&mut rig);
    let Ok(PoolResponse::Volume(other)) = rig.run_request(PoolRequest::Find("coarse".into()))
    else {
        panic!()
    };
    let slow = rig.submit(PoolRequest::Read { volume: other.id, block: 0, blocks: 1 });
    rig.holds_data = true;
    rig.run_until_idle();
    let [DeviceAction::ReadData { io, .. }] = *rig.in_flight() else { panic!() };
    rig.held.push(io);
    rig.holds_data = false;
    // A leaf is split when it is full, and the blocks before the split are never written again.
    for first in [0, 1] {
        for block in (first..info.blocks).step_by(2) {
            assert!(try_write(&mut rig, info.id, block, 1, block + 1), "block {block}");
            if block % 50 == 0 {
                rig.run_request(PoolRequest::Flush).unwrap();
            }
        }
    }
    assert_contents(&mut rig, &info, |block| block + 1);
    rig.held.clear();
    rig.run_until_idle();
    assert!(rig.responses.remove(&slow).unwrap().is_ok());
    assert_pool_consistent(&mut rig);
}

#[test]
fn thick_volume_without_space_is_rejected_without_changes() {
    let mut rig = empty_pool_fixture(4096, 1);
    let before = flush_and_read_usage(&mut rig);
    let error = create_thick_volume(&mut rig, "v", 4000, 16).unwrap_err();
    let PoolError::NoSpaceForThick { name, wanted, free } = error else { panic!("{error}") };
    assert_eq!(name, "v");
    assert!(wanted > 4000 && free < 4000, "{wanted} of {free}");
    let after = flush_and_read_usage(&mut rig);
    assert_eq!((after.used, after.provisioned), (before.used, before.provisioned));
    // All space reported as free can be allocated.
    let most = (1..free)
        .rev()
        .find(|blocks| create_thick_volume(&mut rig, "v", *blocks, 16).is_ok())
        .unwrap();
    assert!(most + 80 > free, "{most} of {free}");
    rig.make_volume_thick("v").unwrap();
    create_thin_volume(&mut rig, "other", 4000, 16);
    let refused = rig.make_volume_thick("other").unwrap_err();
    assert!(matches!(refused, PoolError::NoSpaceForThick { .. }), "{refused}");
    let Ok(PoolResponse::Volume(other)) = rig.run_request(PoolRequest::Find("other".into())) else {
        panic!()
    };
    assert!(!other.is_thick && other.spare == 0);
    assert_pool_consistent(&mut rig);
}

#[test]
fn thin_volume_and_clone_become_thick_and_keep_their_contents() {
    for unit in [16, 4, 1] {
        let mut rig = empty_pool_fixture(1 << 14, 7);
        let base = create_thin_volume(&mut rig, "base", 1000, unit);
        for block in (0..900).step_by(5) {
            try_write(&mut rig, base.id, block, 3, block + 1);
        }
        create_snapshot(&mut rig, "base", "s");
        let from = "s".into();
        let clone = VolumeOp::Clone { from, name: "c".into(), uuid: 4 };
        let clone = execute_change(&mut rig, clone).unwrap();
        try_write(&mut rig, clone.id, 11, 20, 7777);
        let held: Vec<[u64; 8]> = rig.read_blocks(clone.id, 0, 1000).unwrap();
        let was = rig.read_blocks(base.id, 0, 1000).unwrap();
        rig.make_volume_thick("c").unwrap();
        let room = volume_usage(&mut rig, "c");
        assert_eq!((room.shared, room.used + room.reserved, room.missing), (0, 1000, 0));
        assert_eq!(rig.read_blocks(clone.id, 0, 1000).unwrap(), held);
        assert_pool_consistent(&mut rig);
        // Repeated: it is thick already, and nothing is written.
        let writes = rig.disk.writes;
        rig.make_volume_thick("c").unwrap();
        assert_eq!(rig.disk.writes, writes);
        fill_pool(&mut rig);
        write_all(&mut rig, &clone, |block| block + 100_000, 32);
        assert_contents(&mut rig, &clone, |block| block + 100_000);
        assert_eq!(rig.read_blocks(base.id, 0, 1000).unwrap(), was, "other volumes are unchanged");
        assert_pool_consistent(&mut rig);
    }
}

#[test]
fn snapshot_reduces_the_reservation_and_inflate_restores_it() {
    let mut rig = empty_pool_fixture(1 << 13, 3);
    let info = create_inflated_volume(&mut rig, "v", 1000, 16);
    write_all(&mut rig, &info, |block| block + 1, 64);
    rig.run_request(PoolRequest::Trim { volume: info.id, block: 500, blocks: 100 }).unwrap();
    assert_eq!(volume_usage(&mut rig, "v").reserved, 100);
    create_snapshot(&mut rig, "v", "s");
    let room = volume_usage(&mut rig, "v");
    assert_eq!((room.used, room.shared, room.reserved), (900, 900, 0));
    assert_eq!(room.missing, 1008, "whole units");
    let before = flush_and_read_usage(&mut rig).used;
    assert!(try_write(&mut rig, info.id, 0, 1, 9));
    assert!(flush_and_read_usage(&mut rig).used >= before + 16, "a new unit");
    rig.make_volume_thick("v").unwrap();
    let room = volume_usage(&mut rig, "v");
    assert_eq!((room.used, room.shared, room.reserved), (901 - 1, 0, 100));
    fill_pool(&mut rig);
    write_all(&mut rig, &info, |block| block + 2000, 64);
    let Ok(PoolResponse::Volume(kept)) = rig.run_request(PoolRequest::Find("s".into())) else {
        panic!()
    };
    assert_contents(
        &mut rig,
        &kept,
        |block| if (500..600).contains(&block) { 0 } else { block + 1 },
    );
    assert_pool_consistent(&mut rig);
    // Blocks exclusive to the snapshot are freed, and the volume is intact without it.
    delete_volume(&mut rig, "s");
    let room = volume_usage(&mut rig, "v");
    assert_eq!((room.used, room.shared, room.reserved, room.missing), (1000, 0, 0, 0));
    assert_pool_consistent(&mut rig);
}

#[test]
fn thick_resize_changes_the_reservation_or_fails() {
    let mut rig = empty_pool_fixture(4096, 3);
    let info = create_inflated_volume(&mut rig, "v", 1001, 16);
    let blocks = |name: &str, blocks| VolumeOp::Resize { name: name.into(), blocks };
    let refused = execute_change(&mut rig, blocks("v", 9000)).unwrap_err();
    assert!(matches!(refused, PoolError::NoSpaceForThick { .. }), "{refused}");
    execute_change(&mut rig, blocks("v", 2000)).unwrap();
    let room = volume_usage(&mut rig, "v");
    assert_eq!((room.reserved, room.missing), (1001, 992));
    rig.make_volume_thick("v").unwrap();
    assert_eq!(volume_usage(&mut rig, "v").reserved, 2000);
    let large = flush_and_read_usage(&mut rig);
    execute_change(&mut rig, blocks("v", 500)).unwrap();
    rig.run_request(PoolRequest::Flush).unwrap();
    let small = flush_and_read_usage(&mut rig);
    assert!(small.used + 1480 <= large.used && small.provisioned < large.provisioned);
    assert_eq!(volume_usage(&mut rig, "v").reserved, 500);
    fill_pool(&mut rig);
    write_all(&mut rig, &VolumeInfo { blocks: 500, ..info }, |_| 4, 64);
    assert_pool_consistent(&mut rig);
}

#[test]
fn snapshots_and_checksummed_volumes_have_no_reservation() {
    let mut rig = empty_pool_fixture(4096, 3);
    let create =
        VolumeOp::Create { name: "sums".into(), blocks: 10, unit: 1, uuid: 1, checksums: true };
    execute_change(&mut rig, create).unwrap();
    let refused = rig.make_volume_thick("sums").unwrap_err();
    assert_eq!(refused, PoolError::ThickChecksums("sums".into()));
    assert!(refused.hint().is_some() && refused.to_string().contains("sums"));
    create_inflated_volume(&mut rig, "v", 100, 4);
    create_snapshot(&mut rig, "v", "s");
    assert_eq!(rig.make_volume_thick("s").unwrap_err(), PoolError::ReadOnly("s".into()));
    // A volume that becomes a snapshot has no reservation any more.
    let provisioned = flush_and_read_usage(&mut rig).provisioned;
    execute_change(
        &mut rig,
        VolumeOp::ConvertToSnapshot { name: "v".into(), to: "t".into(), uuid: 9 },
    )
    .unwrap();
    assert!(provisioned > 0 && flush_and_read_usage(&mut rig).provisioned == 0);
    assert_pool_consistent(&mut rig);
}

#[test]
fn large_thick_volume_is_created_in_few_steps_as_one_run() {
    const TIB: u64 = 1 << 28;
    let mut rig = empty_pool_fixture(2 * TIB, 3);
    let writes = rig.disk.writes;
    let info = create_inflated_volume(&mut rig, "v", TIB, 16);
    rig.run_request(PoolRequest::Flush).unwrap();
    assert!(rig.disk.writes - writes < 200, "{} blocks written", rig.disk.writes - writes);
    assert_eq!(volume_usage(&mut rig, "v").reserved, TIB);
    assert!(try_write(&mut rig, info.id, 12_345_678, 3, 8));
    assert_eq!(volume_usage(&mut rig, "v").reserved, TIB - 3);
    let SpaceUsage { unique, .. } = volume_usage(&mut rig, "v");
    assert!(unique <= TIB + 8, "{} blocks of metadata", unique - TIB);
    assert_pool_consistent(&mut rig);
}

#[test]
fn check_reports_wrong_thick_volume_counts() {
    let mut rig = empty_pool_fixture(4096, 3);
    create_inflated_volume(&mut rig, "v", 100, 4);
    rig.run_request(PoolRequest::Flush).unwrap();
    let (uuid, image) = (rig.store.uuid(), rig.disk.image().clone());
    let broken = |edit: &dyn Fn(&mut PageBody)| {
        let mut image = image.clone();
        for (at, block) in &mut image {
            if let Ok(mut page) = Page::decode(block, uuid, *at) {
                edit(&mut page.body);
                *block = (*page.encode(uuid, *at)).into();
            }
        }
        let rig = PoolFixture::with_normal_trees(image, 4096, Random::new(1)).unwrap();
        check_pool(&rig.store, rig.disk.image()).findings
    };
    let what = |findings: Vec<CheckFinding>| match findings[..] {
        [CheckFinding::Number { what, .. }] => what,
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
