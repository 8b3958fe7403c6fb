//! Concurrency: transfers in flight while volumes change.

use crate::fixture::{PoolFixture, check_pool, new_pool_image, open_read_only};
use tenmil_base::Random;
use tenmil_volume::{
    DeviceAction, PoolError, PoolRequest, PoolResponse, SnapshotMember, VolumeInfo, VolumeOp,
};

const BLOCKS: u64 = 2048;

fn empty_pool_fixture() -> PoolFixture {
    PoolFixture::with_normal_trees(new_pool_image(BLOCKS), BLOCKS, Random::new(4)).unwrap()
}

fn execute_change(rig: &mut PoolFixture, change: VolumeOp) -> VolumeInfo {
    match rig.run_request(PoolRequest::Change(change)).unwrap() {
        PoolResponse::Volume(info) => info,
        other => panic!("{other:?}"),
    }
}

fn create_volume(rig: &mut PoolFixture, name: &str, blocks: u64) -> VolumeInfo {
    execute_change(
        rig,
        VolumeOp::Create { name: name.into(), blocks, unit: 16, uuid: 1, checksums: false },
    )
}

fn write_and_wait(rig: &mut PoolFixture, volume: u64, block: u64, blocks: u64, value: u64) {
    let token = rig.submit_write(volume, block, blocks, value);
    rig.run_until_idle();
    assert_eq!(rig.responses.remove(&token), Some(Ok(PoolResponse::Done)));
}

fn snapshot_request(volume: &str, name: &str) -> PoolRequest {
    PoolRequest::Change(VolumeOp::Snapshot { volume: volume.into(), name: name.into(), uuid: 2 })
}

#[test]
fn snapshot_waits_for_earlier_writes_and_delays_later_ones() {
    let mut rig = empty_pool_fixture();
    let info = create_volume(&mut rig, "v", 64);
    write_and_wait(&mut rig, info.id, 0, 64, 1);
    rig.holds_data = true;
    let before = rig.submit_write(info.id, 3, 1, 2);
    rig.run_until_idle();
    let taken = rig.submit(snapshot_request("v", "s"));
    rig.run_until_idle();
    let behind = rig.submit_write(info.id, 3, 1, 3);
    rig.run_until_idle();
    assert!(rig.responses.is_empty(), "{:?}", rig.responses);
    assert_eq!(rig.in_flight().len(), 1, "the first write alone is under way");
    rig.holds_data = false;
    rig.run_until_idle();
    for token in [before, taken, behind] {
        assert!(rig.responses.remove(&token).unwrap().is_ok());
    }
    let PoolResponse::Volume(kept) = rig.run_request(PoolRequest::Find("s".into())).unwrap() else {
        panic!()
    };
    assert_eq!(rig.read_blocks(kept.id, 3, 1).unwrap(), [[2; 8]]);
    assert_eq!(rig.read_blocks(info.id, 3, 1).unwrap(), [[3; 8]]);
}

#[test]
fn snapshots_of_several_volumes_have_one_point_in_time() {
    let mut rig = empty_pool_fixture();
    let volumes = ["a", "b"].map(|name| create_volume(&mut rig, name, 64));
    for volume in &volumes {
        write_and_wait(&mut rig, volume.id, 0, 64, 1);
    }
    rig.holds_data = true;
    let before = rig.submit_write(volumes[0].id, 3, 1, 2);
    rig.run_until_idle();
    let member = |volume: &str, name: &str| SnapshotMember {
        volume: volume.into(),
        name: name.into(),
        uuid: 2,
    };
    let members = vec![member("a", "s"), member("b", "t")];
    let taken = rig.submit(PoolRequest::Change(VolumeOp::Snapshots { members }));
    rig.run_until_idle();
    // A write to the volume that has none in flight waits, too: it is later than the first one.
    let behind = rig.submit_write(volumes[1].id, 3, 1, 3);
    rig.run_until_idle();
    assert!(rig.responses.is_empty(), "{:?}", rig.responses);
    assert_eq!(rig.in_flight().len(), 1, "the first write alone is under way");
    rig.holds_data = false;
    rig.run_until_idle();
    for token in [before, taken, behind] {
        assert!(rig.responses.remove(&token).unwrap().is_ok());
    }
    let mut read = |name: &str| {
        let found = rig.run_request(PoolRequest::Find(name.into())).unwrap();
        let PoolResponse::Volume(info) = found else { panic!("{found:?}") };
        rig.read_blocks(info.id, 3, 1).unwrap()[0][0]
    };
    assert_eq!([read("s"), read("t"), read("a"), read("b")], [2, 1, 2, 3]);
}

#[test]
fn snapshots_of_several_volumes_are_all_made_or_none() {
    let mut rig = empty_pool_fixture();
    for name in ["a", "b"] {
        create_volume(&mut rig, name, 64);
    }
    let member = |volume: &str, name: &str| SnapshotMember {
        volume: volume.into(),
        name: name.into(),
        uuid: 2,
    };
    let mut snapshots = |members: Vec<SnapshotMember>| {
        rig.run_request(PoolRequest::Change(VolumeOp::Snapshots { members }))
    };
    for second in [member("none", "t"), member("b", "s"), member("b", "a")] {
        assert!(snapshots(vec![member("a", "s"), second]).is_err());
    }
    assert!(snapshots(vec![member("a", "s"), member("b", "t")]).is_ok(), "no name was taken");
}

#[test]
fn blocks_being_read_are_not_reallocated() {
    let mut rig = empty_pool_fixture();
    let (one, two) = (create_volume(&mut rig, "one", 600), create_volume(&mut rig, "two", 1500));
    write_and_wait(&mut rig, one.id, 0, 600, 1);
    rig.run_request(PoolRequest::Flush).unwrap();
    rig.holds_data = true;
    let token = rig.submit(PoolRequest::Read { volume: one.id, block: 0, blocks: 600 });
    rig.run_until_idle();
    rig.holds_data = false;
    let held: Vec<(u64, u64)> = rig.in_flight().iter().filter_map(transfer_range).collect();
    assert!(!held.is_empty());
    rig.holds_data = true;
    rig.run_request(PoolRequest::Trim { volume: one.id, block: 0, blocks: 600 }).unwrap();
    for _ in 0..4 {
        rig.run_request(PoolRequest::Flush).unwrap();
    }
    for block in (0..1500).step_by(100) {
        rig.submit_write(two.id, block, 100, 9);
        rig.run_until_idle();
    }
    let written: Vec<(u64, u64)> = rig.in_flight().iter().filter_map(transfer_range).collect();
    assert!(written.len() > held.len(), "some writes have found room elsewhere");
    for (at, blocks) in &written[held.len()..] {
        let meets = |(other, count): &(u64, u64)| *at < other + count && *other < at + blocks;
        assert!(!held.iter().any(meets), "{at} is still being read");
    }
    rig.holds_data = false;
    rig.run_until_idle();
    assert!(rig.responses.remove(&token).unwrap().is_ok());
    let data = rig.buffers.remove(&token).unwrap();
    assert!(
        data.iter().all(|block| crate::fixture::fake_disk::sector_values(block) == [1; 8]),
        "what was there"
    );
    rig.run_request(PoolRequest::Flush).unwrap();
    assert_eq!(check_pool(&rig.store, rig.disk.image()).findings, []);
}

fn transfer_range(action: &DeviceAction) -> Option<(u64, u64)> {
    match action {
        DeviceAction::ReadData { at, blocks, .. } | DeviceAction::WriteData { at, blocks, .. } => {
            Some((*at, *blocks))
        }
        _ => None,
    }
}

/// A volume with two written clusters and a clone of it, both durable.
fn create_volume_and_clone(rig: &mut PoolFixture) -> (VolumeInfo, VolumeInfo) {
    let one = create_volume(rig, "one", 32);
    write_and_wait(rig, one.id, 0, 32, 1);
    let clone = VolumeOp::Clone { from: "one".into(), name: "two".into(), uuid: 3 };
    let two = execute_change(rig, clone);
    (one, two)
}

/// Contents of the volume `two` after a power loss now, with all completed writes on the device.
fn read_two_after_power_loss(rig: &mut PoolFixture) -> Vec<[u64; 8]> {
    let image = rig
        .disk
        .image_after_power_loss(crate::fixture::fake_disk::PowerLoss::AsSeen, &mut Random::new(1));
    let mut again = PoolFixture::with_normal_trees(image, BLOCKS, Random::new(1)).unwrap();
    let PoolResponse::Volume(info) = again.run_request(PoolRequest::Find("two".into())).unwrap()
    else {
        panic!()
    };
    again.read_blocks(info.id, 0, info.blocks).unwrap()
}

#[test]
fn blocks_trimmed_by_a_clone_are_not_overwritten_until_durable() {
    let mut rig = empty_pool_fixture();
    let (one, two) = create_volume_and_clone(&mut rig);
    rig.run_request(PoolRequest::Trim { volume: two.id, block: 0, blocks: 32 }).unwrap();
    write_and_wait(&mut rig, one.id, 0, 20, 2);
    assert_eq!(read_two_after_power_loss(&mut rig), [[1; 8]; 32], "the trim was never flushed");
}

#[test]
fn blocks_of_a_deleted_clone_are_not_overwritten_until_durable() {
    let mut rig = empty_pool_fixture();
    let (one, _) = create_volume_and_clone(&mut rig);
    rig.holds_flushes = true;
    let delete = VolumeOp::Delete { name: "two".into(), orphan: false };
    let token = rig.submit(PoolRequest::Change(delete));
    rig.run_until_idle();
    // The first of these makes the map's node exclusive to the volume; the second finds it exclusive.
    write_and_wait(&mut rig, one.id, 3, 1, 2);
    write_and_wait(&mut rig, one.id, 19, 1, 3);
    assert_eq!(
        read_two_after_power_loss(&mut rig),
        [[1; 8]; 32],
        "the deletion was never answered"
    );
    assert!(!rig.responses.contains_key(&token));
}

#[test]
fn volume_truncated_and_grown_reads_zeroes_after_the_truncation_point() {
    let mut rig = empty_pool_fixture();
    let info = create_volume(&mut rig, "v", 64);
    write_and_wait(&mut rig, info.id, 0, 64, 1);
    let resize = |blocks| PoolRequest::Change(VolumeOp::Resize { name: "v".into(), blocks });
    let read = PoolRequest::Read { volume: info.id, block: 0, blocks: 64 };
    let tokens = [rig.submit(resize(10)), rig.submit(resize(64)), rig.submit(read)];
    rig.run_until_idle();
    for token in tokens {
        assert!(rig.responses.remove(&token).unwrap().is_ok());
    }
    let found = rig.buffers.remove(&tokens[2]).unwrap();
    for (block, data) in found.iter().enumerate() {
        assert_eq!(
            crate::fixture::fake_disk::sector_values(data),
            [u64::from(block < 10); 8],
            "block {block}"
        );
    }
    let PoolResponse::Volume(info) = rig.run_request(PoolRequest::Find("v".into())).unwrap() else {
        panic!()
    };
    assert_eq!((info.blocks, info.mapped), (64, 10));
}

#[test]
fn flush_of_an_unchanged_pool_reaches_the_device() {
    let mut rig = empty_pool_fixture();
    let info = create_volume(&mut rig, "v", 16);
    write_and_wait(&mut rig, info.id, 0, 16, 1);
    rig.run_request(PoolRequest::Flush).unwrap();
    let generation = rig.store.generation();
    write_and_wait(&mut rig, info.id, 0, 16, 2);
    rig.run_request(PoolRequest::Flush).unwrap();
    assert_eq!(rig.store.generation(), generation, "in place: no commit");
    let image = rig
        .disk
        .image_after_power_loss(crate::fixture::fake_disk::PowerLoss::Nothing, &mut Random::new(1));
    let mut again = PoolFixture::new(image, BLOCKS, Random::new(1)).unwrap();
    assert_eq!(again.read_blocks(info.id, 0, 16).unwrap(), [[2; 8]; 16]);
}

/// Keeps everything in flight until the test resumes it.
fn hold_all_io(rig: &mut PoolFixture) {
    rig.holds_data = true;
    rig.run_until_idle();
    rig.holds_data = false;
    let io = |action: &DeviceAction| match action {
        DeviceAction::ReadData { io, .. } | DeviceAction::WriteData { io, .. } => Some(*io),
        _ => None,
    };
    rig.held = rig.in_flight().iter().filter_map(io).collect();
}

#[test]
fn first_commit_flushes_what_a_killed_process_left_unflushed() {
    let mut rig = empty_pool_fixture();
    let (one, two) = create_volume_and_clone(&mut rig);
    rig.run_request(PoolRequest::Trim { volume: two.id, block: 0, blocks: 32 }).unwrap();
    rig.submit(PoolRequest::Flush);
    while open_read_only(rig.disk.image(), BLOCKS).unwrap().store.generation()
        == rig.store.generation()
    {
        assert!(rig.execute_random_action(), "the commit comes to its superblock");
    }
    let image = rig.disk.image().clone();
    let mut again = PoolFixture::with_normal_trees(image.clone(), BLOCKS, Random::new(1)).unwrap();
    again.disk = rig.disk.after_writer_killed(image);
    write_and_wait(&mut again, one.id, 0, 20, 2);
    for seed in 0..200 {
        let image = again.disk.image_after_power_loss(
            crate::fixture::fake_disk::PowerLoss::Random,
            &mut Random::new(seed),
        );
        let mut last = PoolFixture::with_normal_trees(image, BLOCKS, Random::new(1)).unwrap();
        for found in last.read_blocks(two.id, 0, 32).unwrap() {
            assert!(found == [0; 8] || found == [1; 8], "{found:?} is the other volume's");
        }
    }
}

#[test]
fn pages_of_an_abandoned_transaction_are_not_reused() {
    let mut rig = empty_pool_fixture();
    create_volume(&mut rig, "v", 64);
    let generation = rig.store.generation();
    let mut again =
        PoolFixture::with_normal_trees(rig.disk.image().clone(), BLOCKS, Random::new(1)).unwrap();
    assert_eq!(again.store.generation(), generation, "nothing is written before it must be");
    let read = again.run_request(PoolRequest::List).unwrap();
    assert_eq!((again.store.generation(), again.disk.writes), (generation, 0), "{read:?}");
    create_volume(&mut again, "w", 64);
    // One generation is skipped, and the pool is taken over from its owner: both slots name the new
    // owner.
    assert_eq!(again.store.generation(), generation + 3);
}

#[test]
fn cluster_being_read_is_not_overwritten_by_its_new_owner() {
    let mut rig = empty_pool_fixture();
    let (one, two) = create_volume_and_clone(&mut rig);
    let token = rig.submit(PoolRequest::Read { volume: two.id, block: 0, blocks: 16 });
    hold_all_io(&mut rig);
    write_and_wait(&mut rig, two.id, 0, 16, 5);
    rig.run_request(PoolRequest::Flush).unwrap();
    rig.run_request(PoolRequest::Flush).unwrap();
    write_and_wait(&mut rig, one.id, 0, 16, 2);
    rig.held.clear();
    rig.run_until_idle();
    assert!(rig.responses.remove(&token).unwrap().is_ok());
    let data = rig.buffers.remove(&token).unwrap();
    assert!(
        data.iter().all(|block| crate::fixture::fake_disk::sector_values(block) == [1; 8]),
        "what the clone held"
    );
    write_and_wait(&mut rig, one.id, 0, 32, 3);
    let used = |rig: &mut PoolFixture| match rig.run_request(PoolRequest::Usage).unwrap() {
        PoolResponse::Usage(usage) => usage.used,
        other => panic!("{other:?}"),
    };
    rig.run_request(PoolRequest::Flush).unwrap();
    let before = used(&mut rig);
    write_and_wait(&mut rig, one.id, 0, 32, 4);
    rig.run_request(PoolRequest::Flush).unwrap();
    assert_eq!(used(&mut rig), before, "once the read has ended, writes are in place again");
}

#[test]
fn waiting_change_quiesces_the_volume_that_has_the_name_now() {
    let mut rig = empty_pool_fixture();
    let (a, c) = (create_volume(&mut rig, "a", 16), create_volume(&mut rig, "c", 16));
    write_and_wait(&mut rig, a.id, 0, 16, 1);
    write_and_wait(&mut rig, c.id, 0, 16, 3);
    rig.submit_write(a.id, 0, 16, 2);
    hold_all_io(&mut rig);
    let to_a = rig.held.clone();
    let taken = rig.submit(snapshot_request("a", "s"));
    rig.run_until_idle();
    for (name, to) in [("a", "b"), ("c", "a")] {
        execute_change(&mut rig, VolumeOp::Rename { name: name.into(), to: to.into() });
    }
    rig.submit_write(c.id, 0, 16, 4);
    hold_all_io(&mut rig);
    rig.held.retain(|io| !to_a.contains(io));
    rig.run_until_idle();
    assert!(!rig.responses.contains_key(&taken), "a write to what is called `a` now is under way");
    rig.held.clear();
    rig.run_until_idle();
    let PoolResponse::Volume(kept) = rig.responses.remove(&taken).unwrap().unwrap() else {
        panic!()
    };
    assert_eq!(kept.origin, c.id);
    write_and_wait(&mut rig, a.id, 0, 1, 7);
    assert_eq!(rig.read_blocks(kept.id, 0, 16).unwrap(), [[4; 8]; 16]);
}

#[test]
fn pool_stops_when_a_flush_fails_without_changes() {
    let mut rig = empty_pool_fixture();
    let info = create_volume(&mut rig, "v", 16);
    write_and_wait(&mut rig, info.id, 0, 16, 1);
    rig.run_request(PoolRequest::Flush).unwrap();
    write_and_wait(&mut rig, info.id, 0, 16, 2);
    rig.fails_flushes = true;
    assert!(matches!(rig.run_request(PoolRequest::Flush), Err(PoolError::Device { .. })));
    assert_eq!(
        rig.run_request(PoolRequest::Flush),
        Err(PoolError::ReadOnlyAfterError),
        "what was lost stays lost"
    );
    assert_eq!(
        rig.read_blocks(info.id, 0, 1),
        Err(PoolError::ReadInterrupted),
        "the device may have blocks from before, of any volume"
    );
}

#[test]
fn stopped_pool_issues_no_io() {
    let mut rig = empty_pool_fixture();
    let info = create_volume(&mut rig, "v", 64);
    rig.holds_flushes = true;
    let mut tokens = Vec::new();
    for block in [0, 32] {
        write_and_wait(&mut rig, info.id, block, 16, 1);
        tokens.push(rig.submit(PoolRequest::Flush));
        rig.run_until_idle();
    }
    (rig.holds_flushes, rig.fails_flushes) = (false, true);
    rig.run_until_idle();
    for token in tokens {
        assert!(matches!(rig.responses.remove(&token), Some(Err(_))));
    }
    assert!(rig.store.is_idle());
}

#[test]
fn cluster_with_a_failed_write_is_not_allocated() {
    let mut rig = empty_pool_fixture();
    let info = create_volume(&mut rig, "v", 64);
    write_and_wait(&mut rig, info.id, 0, 16, 1);
    let free = |rig: &mut PoolFixture| match rig.run_request(PoolRequest::Usage).unwrap() {
        PoolResponse::Usage(usage) => usage.free,
        other => panic!("{other:?}"),
    };
    let before = free(&mut rig);
    rig.fails_writes = true;
    let token = rig.submit_write(info.id, 16, 16, 1);
    rig.run_until_idle();
    assert!(matches!(rig.responses.remove(&token), Some(Err(PoolError::Device { .. }))));
    assert_eq!(free(&mut rig), before - 16, "the write may still come to pass");
    write_and_wait(&mut rig, info.id, 16, 16, 2);
    assert_eq!(rig.read_blocks(info.id, 16, 16).unwrap(), [[2; 8]; 16]);
}

#[test]
fn late_completed_failed_write_does_not_overwrite_newer_data() {
    for other_ends_first in [true, false] {
        let mut rig = empty_pool_fixture();
        let info = create_volume(&mut rig, "v", 64);
        let other = rig.submit_write(info.id, 0, 4, 1);
        hold_all_io(&mut rig);
        let others = rig.held.clone();
        let failing = rig.submit_write(info.id, 4, 4, 2);
        hold_all_io(&mut rig);
        if other_ends_first {
            rig.held.retain(|io| !others.contains(io));
            rig.run_until_idle();
            assert_eq!(rig.responses.remove(&other), Some(Ok(PoolResponse::Done)));
        }
        (rig.held, rig.fails_late) = (others, true);
        rig.run_until_idle();
        assert!(matches!(rig.responses.remove(&failing), Some(Err(PoolError::Device { .. }))));
        write_and_wait(&mut rig, info.id, 4, 4, 3);
        write_and_wait(&mut rig, info.id, 8, 2, 4);
        rig.complete_failed_writes_late();
        rig.held.clear();
        rig.run_until_idle();
        let [old, new, last] = [(0, 4), (4, 4), (8, 2)]
            .map(|(block, blocks)| rig.read_blocks(info.id, block, blocks).unwrap());
        assert_eq!((old, new, last), (vec![[1; 8]; 4], vec![[3; 8]; 4], vec![[4; 8]; 2]));
        rig.run_request(PoolRequest::Flush).unwrap();
        assert_eq!(check_pool(&rig.store, rig.disk.image()).findings, []);
    }
}

#[test]
fn blocks_with_a_failed_in_place_write_are_not_reallocated() {
    let mut rig = empty_pool_fixture();
    let (one, two) = (create_volume(&mut rig, "one", 600), create_volume(&mut rig, "two", 1800));
    write_and_wait(&mut rig, one.id, 0, 600, 1);
    rig.run_request(PoolRequest::Flush).unwrap();
    rig.fails_late = true;
    let token = rig.submit_write(one.id, 0, 600, 2);
    rig.run_until_idle();
    assert!(matches!(rig.responses.remove(&token), Some(Err(PoolError::Device { .. }))));
    rig.run_request(PoolRequest::Trim { volume: one.id, block: 0, blocks: 600 }).unwrap();
    for _ in 0..3 {
        rig.run_request(PoolRequest::Flush).unwrap();
    }
    let fill = |rig: &mut PoolFixture| -> Vec<u64> {
        (0..1800)
            .step_by(100)
            .filter(|block| {
                let token = rig.submit_write(two.id, *block, 100, 9);
                rig.run_until_idle();
                rig.responses.remove(&token).unwrap().is_ok()
            })
            .collect()
    };
    let written = fill(&mut rig);
    assert!(written.len() > 3 && written.len() < 18, "there is room for some: {written:?}");
    // Space freed behind them restarts the search.
    rig.run_request(PoolRequest::Trim { volume: two.id, block: 0, blocks: 400 }).unwrap();
    for _ in 0..3 {
        rig.run_request(PoolRequest::Flush).unwrap();
    }
    let written = fill(&mut rig);
    assert!(written.len() > 3 && written.len() < 18, "and for some again: {written:?}");
    rig.complete_failed_writes_late();
    for block in written {
        assert_eq!(rig.read_blocks(two.id, block, 100).unwrap(), [[9; 8]; 100], "from {block} on");
    }
    rig.run_request(PoolRequest::Flush).unwrap();
    assert_eq!(check_pool(&rig.store, rig.disk.image()).findings, []);
    let mut again =
        PoolFixture::with_normal_trees(rig.disk.image().clone(), BLOCKS, Random::new(1)).unwrap();
    assert!(fill(&mut again).len() == 18, "once it is opened anew they are free");
}

#[test]
fn blocks_of_a_cached_run_are_not_reallocated() {
    let mut rig = empty_pool_fixture();
    let (one, two) = (create_volume(&mut rig, "one", 600), create_volume(&mut rig, "two", 1500));
    write_and_wait(&mut rig, one.id, 0, 600, 1);
    rig.run_request(PoolRequest::Flush).unwrap();
    let run = rig.store.mapped_run(one.id, 300).unwrap();
    assert_eq!((run.block, run.blocks), (0, 600));
    assert_eq!(rig.store.next_invalidated_volume(), None);
    rig.store.set_oldest_direct_read(rig.store.open_generation());
    rig.run_request(PoolRequest::Trim { volume: one.id, block: 0, blocks: 600 }).unwrap();
    assert_eq!(rig.store.next_invalidated_volume(), Some(one.id));
    assert_eq!(
        (rig.store.next_invalidated_volume(), rig.store.mapped_run(one.id, 300)),
        (None, None)
    );
    let fill = |rig: &mut PoolFixture| {
        let writes: Vec<u64> =
            (0..1500).step_by(100).map(|block| rig.submit_write(two.id, block, 100, 9)).collect();
        rig.run_request(PoolRequest::Flush).unwrap();
        writes.iter().filter(|token| rig.responses.remove(token).unwrap().is_err()).count()
    };
    assert!(fill(&mut rig) > 0, "the room of the trimmed blocks is missing");
    for at in run.at..run.at + run.blocks {
        assert_eq!(
            crate::fixture::fake_disk::sector_values(&rig.disk.read(at)),
            [1; 8],
            "block {at}"
        );
    }
    rig.store.set_oldest_direct_read(u64::MAX);
    assert_eq!(fill(&mut rig), 0, "and is there when the read has ended");
    assert_eq!(check_pool(&rig.store, rig.disk.image()).findings, []);
}

#[test]
fn remapped_volumes_are_reported_exactly_when_blocks_move() {
    let mut rig = empty_pool_fixture();
    let v = create_volume(&mut rig, "v", 256);
    let said = |rig: &mut PoolFixture| {
        std::iter::from_fn(|| rig.store.next_invalidated_volume()).collect::<Vec<_>>()
    };
    write_and_wait(&mut rig, v.id, 0, 64, 1);
    write_and_wait(&mut rig, v.id, 8, 8, 2);
    write_and_wait(&mut rig, v.id, 64, 64, 1);
    rig.run_request(snapshot_request("v", "s")).unwrap();
    assert_eq!(said(&mut rig), [], "first writes, writes in place, a snapshot");
    write_and_wait(&mut rig, v.id, 8, 1, 3);
    assert_eq!(said(&mut rig), [v.id], "a write after a snapshot");
    rig.run_request(PoolRequest::Trim { volume: v.id, block: 200, blocks: 50 }).unwrap();
    assert_eq!(said(&mut rig), [], "nothing was mapped there");
    let steps = [
        VolumeOp::Resize { name: "v".into(), blocks: 100 },
        VolumeOp::Rollback { volume: "v".into(), snapshot: "s".into() },
        VolumeOp::Delete { name: "v".into(), orphan: true },
    ];
    for step in steps {
        rig.run_request(PoolRequest::Change(step.clone())).unwrap();
        assert!(said(&mut rig).contains(&v.id), "{step:?}");
    }
}

#[test]
fn failed_metadata_write_stops_the_pool_without_losing_durable_state() {
    for failing in 0..20 {
        let mut rig = empty_pool_fixture();
        let info = create_volume(&mut rig, "v", 256);
        write_and_wait(&mut rig, info.id, 0, 64, 1);
        rig.run_request(PoolRequest::Flush).unwrap();
        rig.fails_pages = Some(failing);
        let writes: Vec<u64> =
            (0..8).map(|part| rig.submit_write(info.id, 64 + part * 16, 16, 2)).collect();
        let changes = [
            snapshot_request("v", "s"),
            PoolRequest::Flush,
            snapshot_request("v", "t"),
            PoolRequest::Flush,
        ];
        let responses: Vec<_> = changes.into_iter().map(|ask| rig.run_request(ask)).collect();
        assert!(writes.iter().all(|token| rig.responses.contains_key(token)), "all are answered");
        if rig.fails_pages.is_some() {
            assert!(failing > 5 && responses.iter().all(Result::is_ok), "{failing}: {responses:?}");
            return;
        }
        let failed = responses.iter().position(Result::is_err).unwrap();
        assert!(matches!(responses[failed], Err(PoolError::Device { .. })), "{responses:?}");
        assert!(
            responses[failed + 1..].iter().all(|one| *one == Err(PoolError::ReadOnlyAfterError))
        );
        assert_eq!(rig.read_blocks(info.id, 63, 1).unwrap(), [[1; 8]], "it is still read from");
        assert!(rig.store.is_idle());
        let again = open_read_only(rig.disk.image(), BLOCKS).unwrap();
        assert_eq!(check_pool(&again.store, rig.disk.image()).findings, [], "{failing}");
        let mut rig =
            PoolFixture::with_normal_trees(rig.disk.image().clone(), BLOCKS, Random::new(4))
                .unwrap();
        for (name, response) in [("s", &responses[0]), ("t", &responses[2])] {
            let found = rig.run_request(PoolRequest::Find(name.into())).is_ok();
            assert!(found || response.is_err(), "{failing}: {name} was answered");
        }
        assert_eq!(rig.read_blocks(info.id, 0, 64).unwrap(), [[1; 8]; 64], "{failing}");
    }
    panic!("there is no end of pages");
}

#[test]
fn extent_query_matches_the_map() {
    let mut rig = empty_pool_fixture();
    let info = create_volume(&mut rig, "v", 256);
    write_and_wait(&mut rig, info.id, 10, 20, 1);
    for (block, blocks, is_mapped) in
        [(0, 10, false), (10, 20, true), (29, 1, true), (30, 226, false), (256, 0, false)]
    {
        let found = rig.run_request(PoolRequest::Extent { volume: info.id, block });
        let Ok(PoolResponse::Extent { blocks: alike, at, .. }) = found else { panic!("{found:?}") };
        assert_eq!((alike, at.is_some()), (blocks, is_mapped), "{block}");
    }
}

#[test]
fn flush_of_an_unchanged_pool_writes_nothing() {
    let mut rig = empty_pool_fixture();
    create_volume(&mut rig, "v", 64);
    let mut again =
        PoolFixture::with_normal_trees(rig.disk.image().clone(), BLOCKS, Random::new(4)).unwrap();
    again.holds_flushes = true;
    let token = again.submit(PoolRequest::Flush);
    again.run_until_idle();
    assert!(!again.responses.contains_key(&token), "the device is flushed all the same");
    again.holds_flushes = false;
    again.run_until_idle();
    assert_eq!(
        (again.responses.remove(&token), again.disk.writes),
        (Some(Ok(PoolResponse::Done)), 0)
    );
}
