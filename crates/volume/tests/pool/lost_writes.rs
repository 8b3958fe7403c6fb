//! The device loses unflushed writes and continues, at any moment, and so does the pool.

use crate::fixture::pool_with_model::PoolWithModel;
use crate::fixture::{PoolFixture, check_pool, new_pool_image, open_read_only};
use tenmil_base::Random;
use tenmil_volume::{PoolError, PoolRequest, PoolResponse, VolumeOp};

const BLOCKS: u64 = 2048;

/// A pool with an empty volume, and its number.
fn pool_with_empty_volume() -> (PoolFixture, u64) {
    let mut rig =
        PoolFixture::with_normal_trees(new_pool_image(BLOCKS), BLOCKS, Random::new(4)).unwrap();
    let (name, uuid) = ("v".into(), 1);
    let create = VolumeOp::Create { name, blocks: 64, unit: 16, uuid, checksums: false };
    let PoolResponse::Volume(info) = rig.run_request(PoolRequest::Change(create)).unwrap() else {
        panic!("not created")
    };
    (rig, info.id)
}

fn write_cluster(rig: &mut PoolFixture, volume: u64, block: u64, value: u64) {
    let token = rig.submit_write(volume, block, 16, value);
    rig.run_until_idle();
    assert_eq!(rig.responses.remove(&token), Some(Ok(PoolResponse::Done)));
}

#[test]
fn pool_continues_after_its_device_loses_unflushed_writes() {
    let mut losses = 0;
    for seed in 1..=8 {
        let mut world = PoolWithModel::new(if seed % 2 == 0 { 3000 } else { 4096 }, seed);
        (world.loses_every, world.rig.recovers) = (40, true);
        world.changes = 10 + seed % 3 * 15;
        while world.operations < 1500 {
            world.run_random_operation();
        }
        world.compare_contents();
        losses += world.losses;
    }
    assert!(losses > 300, "only {losses} losses");
}

#[test]
fn no_read_starts_after_a_commit_flush_that_lost_writes() {
    for flushes in 0..3 {
        let (mut rig, volume) = pool_with_empty_volume();
        write_cluster(&mut rig, volume, 0, 1);
        rig.run_request(PoolRequest::Flush).unwrap();
        write_cluster(&mut rig, volume, 16, 2);
        // A commit flushes its pages, and then its superblock.
        rig.holds_flushes = true;
        let token = rig.submit(PoolRequest::Flush);
        rig.run_until_idle();
        for _ in 0..flushes {
            rig.holds_flushes = false;
            rig.execute_random_action();
            rig.holds_flushes = true;
            rig.run_until_idle();
        }
        (rig.holds_flushes, rig.fails_flushes) = (false, true);
        rig.run_until_idle();
        match rig.responses.remove(&token).unwrap() {
            Err(PoolError::Device { .. }) => {
                assert_eq!(rig.read_blocks(volume, 0, 1), Err(PoolError::ReadInterrupted));
            }
            response => assert!(flushes > 1 && response.is_ok(), "{response:?}"),
        }
    }
}

#[test]
fn pool_does_not_continue_from_an_older_commit() {
    let (mut rig, volume) = pool_with_empty_volume();
    write_cluster(&mut rig, volume, 0, 1);
    rig.run_request(PoolRequest::Flush).unwrap();
    let older = rig.disk.image().clone();
    write_cluster(&mut rig, volume, 16, 2);
    rig.run_request(PoolRequest::Flush).unwrap();
    write_cluster(&mut rig, volume, 32, 3);
    rig.fails_flushes = true;
    assert!(matches!(rig.run_request(PoolRequest::Flush), Err(PoolError::Device { .. })));
    older.iter().for_each(|(at, block)| rig.disk.replace_block(*at, block.clone()));
    assert!(rig.store.start_recovery());
    rig.run_until_idle();
    let why = rig.store.stop_reason().cloned();
    assert!(matches!(why, Some(PoolError::WentBack { .. })), "{why:?}");
    assert_eq!(rig.run_request(PoolRequest::Flush).err(), why);
}

#[test]
fn late_completed_page_write_hits_no_block_in_use() {
    let later = [(16, 3), (32, 4), (48, 5)];
    for (failing, commits) in (0..3).flat_map(|failing| (1..=3).map(move |count| (failing, count)))
    {
        let (mut rig, volume) = pool_with_empty_volume();
        write_cluster(&mut rig, volume, 0, 1);
        rig.run_request(PoolRequest::Flush).unwrap();
        (rig.recovers, rig.fails_pages) = (true, Some(failing));
        write_cluster(&mut rig, volume, 16, 2);
        let flush = rig.run_request(PoolRequest::Flush);
        assert!(matches!(flush, Err(PoolError::Device { .. })), "write {failing}: {flush:?}");
        for (block, value) in &later[..commits] {
            write_cluster(&mut rig, volume, *block, *value);
            rig.run_request(PoolRequest::Flush).unwrap();
        }
        rig.complete_failed_writes_late();
        let image = rig.disk.image().clone();
        let again = open_read_only(&image, BLOCKS).unwrap();
        let found = check_pool(&again.store, &image).findings;
        assert_eq!(found, [], "write {failing}, {commits} commits");
        let mut again = PoolFixture::with_normal_trees(image, BLOCKS, Random::new(1)).unwrap();
        for (block, value) in [(0, 1)].iter().chain(&later[..commits]) {
            let found = again.read_blocks(volume, *block, 16).unwrap();
            assert_eq!(found, [[*value; 8]; 16], "write {failing}, {commits} commits");
        }
    }
}

#[test]
fn durable_state_is_reread_after_cached_run_reads_end() {
    let (mut rig, volume) = pool_with_empty_volume();
    write_cluster(&mut rig, volume, 0, 1);
    rig.run_request(PoolRequest::Flush).unwrap();
    // A client reads by a run that it has kept; the pool does not execute this read.
    rig.store.mapped_run(volume, 0).unwrap();
    rig.store.set_oldest_direct_read(rig.store.open_generation());
    write_cluster(&mut rig, volume, 16, 2);
    rig.fails_flushes = true;
    assert!(matches!(rig.run_request(PoolRequest::Flush), Err(PoolError::Device { .. })));
    let before = rig.slot_reads;
    assert!(rig.store.start_recovery());
    rig.run_until_idle();
    assert!(rig.store.is_recovering() && !rig.store.is_rereading());
    assert_eq!(rig.slot_reads, before, "the superblocks are not read during the read");
    rig.store.set_oldest_direct_read(u64::MAX);
    rig.run_until_idle();
    assert_eq!(rig.slot_reads, before + 1, "and are once it has ended");
    assert!(!rig.store.is_recovering() && !rig.store.is_stopped());
    assert_eq!(rig.read_blocks(volume, 0, 16).unwrap(), [[1; 8]; 16]);
}

#[test]
fn durable_state_is_reread_once_metadata_is_unpinned() {
    let (mut rig, volume) = pool_with_empty_volume();
    write_cluster(&mut rig, volume, 0, 1);
    rig.run_request(PoolRequest::Flush).unwrap();
    let pinned = rig.store.pinned_read_only_pool().generation();
    write_cluster(&mut rig, volume, 16, 2);
    rig.fails_flushes = true;
    assert!(matches!(rig.run_request(PoolRequest::Flush), Err(PoolError::Device { .. })));
    let before = rig.slot_reads;
    assert!(rig.store.start_recovery());
    rig.run_until_idle();
    assert_eq!((rig.slot_reads, rig.store.is_recovering()), (before, true));
    rig.store.unpin_metadata(pinned);
    rig.run_until_idle();
    assert_eq!((rig.slot_reads, rig.store.is_stopped()), (before + 1, false));
}
