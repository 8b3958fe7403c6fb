//! Concurrency while a volume is made thick, and the state of one that was interrupted.

use crate::fixture::model_comparison::volume_usage;
use crate::fixture::{PoolFixture, check_pool, new_pool_image};
use tenmil_base::Random;
use tenmil_volume::{
    DeviceAction, PoolError, PoolRequest, PoolResponse, PoolUsage, VolumeInfo, VolumeOp,
};

const BLOCKS: u64 = 4096;

/// A volume of 64 blocks that contain 1, fully shared with a snapshot, to be made thick.
fn shared_volume_fixture() -> (PoolFixture, VolumeInfo) {
    let mut rig =
        PoolFixture::with_normal_trees(new_pool_image(BLOCKS), BLOCKS, Random::new(4)).unwrap();
    let create =
        VolumeOp::Create { name: "v".into(), blocks: 64, unit: 16, uuid: 1, checksums: false };
    let PoolResponse::Volume(info) = rig.run_request(PoolRequest::Change(create)).unwrap() else {
        panic!()
    };
    write_and_wait(&mut rig, info.id, 0, 64, 1);
    rig.run_request(snapshot_request("s")).unwrap();
    rig.run_request(PoolRequest::ReserveThick("v".into())).unwrap();
    (rig, info)
}

fn snapshot_request(name: &str) -> PoolRequest {
    PoolRequest::Change(VolumeOp::Snapshot { volume: "v".into(), name: name.into(), uuid: 2 })
}

fn make_exclusive_request(volume: u64, block: u64) -> PoolRequest {
    PoolRequest::MakeExclusive { volume, block, blocks: 32 }
}

fn write_and_wait(rig: &mut PoolFixture, volume: u64, block: u64, blocks: u64, value: u64) {
    let token = rig.submit_write(volume, block, blocks, value);
    rig.run_until_idle();
    assert_eq!(rig.responses.remove(&token), Some(Ok(PoolResponse::Done)));
}

fn flush_and_read_usage(rig: &mut PoolFixture) -> PoolUsage {
    rig.run_request(PoolRequest::Flush).unwrap();
    match rig.run_request(PoolRequest::Usage).unwrap() {
        PoolResponse::Usage(usage) => usage,
        other => panic!("{other:?}"),
    }
}

fn assert_snapshot_unchanged(rig: &mut PoolFixture) {
    let PoolResponse::Volume(kept) = rig.run_request(PoolRequest::Find("s".into())).unwrap() else {
        panic!()
    };
    assert_eq!(
        rig.read_blocks(kept.id, 0, 64).unwrap(),
        [[1; 8]; 64],
        "the snapshot is what it was"
    );
    rig.run_request(PoolRequest::Flush).unwrap();
    assert_eq!(check_pool(&rig.store, rig.disk.image()).findings, []);
}

#[test]
fn write_waits_for_a_cluster_copy_and_is_not_overwritten() {
    for stage in 0..2 {
        let (mut rig, info) = shared_volume_fixture();
        rig.holds_data = true;
        let copy = rig.submit(make_exclusive_request(info.id, 0));
        rig.run_until_idle();
        if stage == 1 {
            // It has been read, and is being written.
            rig.holds_data = false;
            assert!(rig.execute_random_action());
            rig.holds_data = true;
            rig.run_until_idle();
            assert!(matches!(rig.in_flight(), [DeviceAction::WriteData { .. }]));
        }
        let writes = [3, 40].map(|block| rig.submit_write(info.id, block, 1, 2));
        let taken = rig.submit(snapshot_request("t"));
        rig.run_until_idle();
        assert!(rig.responses.is_empty(), "both wait, and so does a snapshot: {:?}", rig.responses);
        assert_eq!(rig.in_flight().len(), 1, "{:?}", rig.in_flight());
        rig.holds_data = false;
        rig.run_until_idle();
        assert_eq!(rig.responses.remove(&copy), Some(Ok(PoolResponse::Owned(32))));
        for token in writes.into_iter().chain([taken]) {
            assert!(rig.responses.remove(&token).unwrap().is_ok());
        }
        let expected: Vec<[u64; 8]> =
            (0..64).map(|block| [if [3, 40].contains(&block) { 2 } else { 1 }; 8]).collect();
        assert_eq!(rig.read_blocks(info.id, 0, 64).unwrap(), expected);
        assert_snapshot_unchanged(&mut rig);
    }
}

#[test]
fn trimmed_cluster_under_copy_reads_as_zeroes() {
    let (mut rig, info) = shared_volume_fixture();
    rig.holds_data = true;
    let copy = rig.submit(make_exclusive_request(info.id, 0));
    rig.run_until_idle();
    let trim = rig.submit(PoolRequest::Trim { volume: info.id, block: 10, blocks: 10 });
    rig.run_until_idle();
    assert_eq!(rig.responses.remove(&trim), Some(Ok(PoolResponse::Done)), "it waits for nothing");
    rig.holds_data = false;
    rig.run_until_idle();
    assert!(rig.responses.remove(&copy).unwrap().is_ok());
    rig.make_volume_thick("v").unwrap();
    let expected: Vec<[u64; 8]> =
        (0..64).map(|block| [u64::from(!(10..20).contains(&block)); 8]).collect();
    assert_eq!(rig.read_blocks(info.id, 0, 64).unwrap(), expected);
    let room = volume_usage(&mut rig, "v");
    assert_eq!((room.used, room.shared, room.reserved, room.missing), (54, 0, 10, 0));
    assert_snapshot_unchanged(&mut rig);
}

#[test]
fn failed_cluster_copy_changes_nothing() {
    let (mut rig, info) = shared_volume_fixture();
    for fails_late in [false, true] {
        let before = flush_and_read_usage(&mut rig).free;
        (rig.fails_writes, rig.fails_late) = (!fails_late, fails_late);
        let error = rig.run_request(make_exclusive_request(info.id, 0)).unwrap_err();
        assert!(matches!(error, PoolError::Device { what, .. } if what.contains("copies")));
        assert_eq!(volume_usage(&mut rig, "v").shared, 64);
        let (after, bad) = (flush_and_read_usage(&mut rig).free, 32);
        assert_eq!(after, before - bad, "the blocks of the copy are not allocated again");
    }
    rig.make_volume_thick("v").unwrap();
    write_and_wait(&mut rig, info.id, 0, 64, 5);
    rig.complete_failed_writes_late();
    assert_eq!(rig.read_blocks(info.id, 0, 64).unwrap(), [[5; 8]; 64], "it meets nothing newer");
    assert_eq!(volume_usage(&mut rig, "v").shared, 0);
    assert_snapshot_unchanged(&mut rig);
}

#[test]
fn interrupted_inflate_keeps_its_reservation_and_resumes() {
    let (mut rig, info) = shared_volume_fixture();
    let owed = flush_and_read_usage(&mut rig).provisioned;
    assert_eq!(rig.run_request(make_exclusive_request(info.id, 0)), Ok(PoolResponse::Owned(32)));
    let half = flush_and_read_usage(&mut rig).provisioned;
    assert_eq!(owed - half, 32, "two of four units have been given");
    let mut again =
        PoolFixture::with_normal_trees(rig.disk.image().clone(), BLOCKS, Random::new(1)).unwrap();
    assert_eq!(flush_and_read_usage(&mut again).provisioned, half);
    let room = volume_usage(&mut again, "v");
    assert_eq!((room.used, room.shared, room.missing), (64, 32, 32));
    // Reserved space that is not yet allocated is unavailable to others.
    let create =
        VolumeOp::Create { name: "w".into(), blocks: 8192, unit: 16, uuid: 1, checksums: false };
    let PoolResponse::Volume(other) = again.run_request(PoolRequest::Change(create)).unwrap()
    else {
        panic!()
    };
    let mut block = 0;
    loop {
        let token = again.submit_write(other.id, block, 16, 9);
        again.run_until_idle();
        if again.responses.remove(&token).unwrap().is_err() {
            break;
        }
        block += 16;
    }
    again.make_volume_thick("v").unwrap();
    assert_eq!(volume_usage(&mut again, "v").exclusive_blocks(), 64);
    let before = again.disk.writes;
    again.make_volume_thick("v").unwrap();
    assert_eq!(again.disk.writes, before, "it is so already");
    assert_snapshot_unchanged(&mut again);
}

#[test]
fn moved_clusters_invalidate_cached_runs() {
    let (mut rig, info) = shared_volume_fixture();
    while rig.store.next_invalidated_volume().is_some() {}
    let before = rig.store.mapped_run(info.id, 3).unwrap();
    rig.run_request(make_exclusive_request(info.id, 0)).unwrap();
    assert_eq!(rig.store.next_invalidated_volume(), Some(info.id));
    let after = rig.store.mapped_run(info.id, 3).unwrap();
    assert_ne!(before.at + (3 - before.block), after.at + (3 - after.block));
    rig.run_request(PoolRequest::Trim { volume: info.id, block: 3, blocks: 1 }).unwrap();
    assert_eq!(rig.store.next_invalidated_volume(), Some(info.id));
    assert_eq!(rig.store.mapped_run(info.id, 3), None, "a discarded block has no mapping");
    assert!(rig.store.mapped_run(info.id, 4).is_some());
    write_and_wait(&mut rig, info.id, 3, 1, 6);
    assert_eq!(rig.store.next_invalidated_volume(), None, "its run was not cached");
}
