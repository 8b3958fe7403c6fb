//! Rejected requests, and size limits.

use crate::fixture::model_comparison::volume_usage;
use crate::fixture::{
    PoolFixture, allow_claim_over_owner, check_pool, new_pool_image, open_read_only, owner,
};
use tenmil_base::Random;
use tenmil_volume::{
    PoolConfig, PoolError, PoolOpening, PoolRequest, PoolResponse, SpaceUsage, VolumeInfo, VolumeOp,
};

const TIB: u64 = 1 << 28;

fn pool_fixture(blocks: u64) -> PoolFixture {
    PoolFixture::new(new_pool_image(blocks), blocks, Random::new(9)).unwrap()
}

fn create_volume(rig: &mut PoolFixture, name: &str, blocks: u64) -> VolumeInfo {
    let change =
        VolumeOp::Create { name: name.into(), blocks, unit: 16, uuid: 1, checksums: false };
    match rig.run_request(PoolRequest::Change(change)).unwrap() {
        PoolResponse::Volume(info) => info,
        other => panic!("{other:?}"),
    }
}

fn create_snapshot(
    rig: &mut PoolFixture,
    volume: &str,
    name: &str,
) -> Result<PoolResponse, PoolError> {
    let (volume, name) = (volume.into(), name.into());
    rig.run_request(PoolRequest::Change(VolumeOp::Snapshot { volume, name, uuid: 2 }))
}

fn create_clone(rig: &mut PoolFixture, from: &str, name: &str) {
    let change = VolumeOp::Clone { from: from.into(), name: name.into(), uuid: 3 };
    rig.run_request(PoolRequest::Change(change)).unwrap();
}

fn write_and_wait(rig: &mut PoolFixture, volume: u64, block: u64, blocks: u64, value: u64) {
    let token = rig.submit_write(volume, block, blocks, value);
    rig.run_until_idle();
    assert_eq!(rig.responses.remove(&token), Some(Ok(PoolResponse::Done)));
}

/// Space usage of a volume that is not thick.
fn thin_usage(used: u64, shared: u64, unique: u64, missing: u64) -> SpaceUsage {
    SpaceUsage { used, shared, unique, reserved: 0, missing }
}

fn flush_and_read_used_blocks(rig: &mut PoolFixture) -> u64 {
    rig.run_request(PoolRequest::Flush).unwrap();
    rig.run_until_idle();
    rig.run_request(PoolRequest::Flush).unwrap();
    match rig.run_request(PoolRequest::Usage).unwrap() {
        PoolResponse::Usage(usage) => usage.used,
        other => panic!("{other:?}"),
    }
}

#[test]
fn pool_with_a_thousand_volumes_opens_with_four_reads() {
    let mut rig = pool_fixture(TIB);
    for number in 0..1000 {
        let info = create_volume(&mut rig, &format!("volume {number}"), TIB);
        write_and_wait(&mut rig, info.id, number * 1000, 3, number + 1);
    }
    rig.run_request(PoolRequest::Flush).unwrap();
    let opened = open_read_only(rig.disk.image(), TIB).unwrap();
    assert_eq!(opened.damaged, []);
    assert_eq!(check_pool(&opened.store, rig.disk.image()).findings, []);
    let mut again = PoolFixture::new(rig.disk.image().clone(), TIB, Random::new(1)).unwrap();
    let PoolResponse::Volume(info) =
        again.run_request(PoolRequest::Find("volume 777".into())).unwrap()
    else {
        panic!()
    };
    assert_eq!(again.read_blocks(info.id, 777_000, 3).unwrap(), [[778; 8]; 3]);
    let most = again.store.memory_bytes();
    assert!(most < 64 << 10, "{most} bytes of metadata were needed to get there");
}

#[test]
fn sequential_volume_has_one_run_and_trim_frees_it() {
    let mut rig = pool_fixture(1 << 16);
    let empty = flush_and_read_used_blocks(&mut rig);
    let info = create_volume(&mut rig, "v", 20_000);
    for block in (0..20_000).step_by(100) {
        write_and_wait(&mut rig, info.id, block, 100, block + 1);
    }
    let full = flush_and_read_used_blocks(&mut rig);
    assert!(full - empty < 20_000 + 16, "{} blocks of metadata", full - empty - 20_000);
    rig.run_request(PoolRequest::Trim { volume: info.id, block: 0, blocks: 20_000 }).unwrap();
    let trimmed = flush_and_read_used_blocks(&mut rig);
    assert!(trimmed - empty < 8, "{trimmed} blocks are used after the trim, {empty} before all");
    assert_eq!(check_pool(&rig.store, rig.disk.image()).findings, []);
}

#[test]
fn write_after_a_snapshot_allocates_one_cluster() {
    let mut rig = pool_fixture(1 << 14);
    let info = create_volume(&mut rig, "v", 64);
    write_and_wait(&mut rig, info.id, 0, 64, 1);
    create_snapshot(&mut rig, "v", "s").unwrap();
    assert_eq!(volume_usage(&mut rig, "v"), thin_usage(64, 64, 1, 64));
    let before = rig.disk.writes;
    write_and_wait(&mut rig, info.id, 17, 1, 2);
    assert_eq!(rig.disk.writes - before, 1, "one block was written, and none was copied");
    write_and_wait(&mut rig, info.id, 19, 1, 3);
    // Both are in one cluster, and the map has a leaf.
    assert_eq!(volume_usage(&mut rig, "v"), thin_usage(64, 62, 1 + 1 + 16, 48));
    assert_eq!(volume_usage(&mut rig, "s"), thin_usage(64, 64, 1 + 1, 64));
    let values: Vec<u64> =
        rig.read_blocks(info.id, 16, 5).unwrap().iter().map(|block| block[0]).collect();
    assert_eq!(values, [1, 2, 1, 3, 1]);
    let change = VolumeOp::Delete { name: "s".into(), orphan: false };
    rig.run_request(PoolRequest::Change(change)).unwrap();
    rig.run_request(PoolRequest::Flush).unwrap();
    // All is exclusive again, and one cluster of the volume is in two clusters of the pool.
    assert_eq!(volume_usage(&mut rig, "v"), thin_usage(64, 0, 1 + 1 + 80, 0));
}

#[test]
fn unique_usage_equals_the_space_freed_by_delete() {
    for (checksums, unit) in [(false, 16), (true, 16), (false, 1), (true, 4)] {
        let mut rig =
            PoolFixture::with_normal_trees(new_pool_image(1 << 14), 1 << 14, Random::new(3))
                .unwrap();
        let change = VolumeOp::Create { name: "v".into(), blocks: 4000, unit, uuid: 1, checksums };
        let Ok(PoolResponse::Volume(v)) = rig.run_request(PoolRequest::Change(change)) else {
            panic!()
        };
        for block in (0..1000).step_by(10) {
            write_and_wait(&mut rig, v.id, block, 7, block + 1);
        }
        create_snapshot(&mut rig, "v", "s").unwrap();
        create_clone(&mut rig, "s", "c");
        let Ok(PoolResponse::Volume(c)) = rig.run_request(PoolRequest::Find("c".into())) else {
            panic!()
        };
        for block in (0..300).step_by(20) {
            write_and_wait(&mut rig, v.id, block, 2, 9);
            write_and_wait(&mut rig, c.id, block + 600, 3, 8);
        }
        for name in ["v", "c"] {
            let before = flush_and_read_used_blocks(&mut rig);
            let unique = volume_usage(&mut rig, name).unique;
            let change = VolumeOp::Delete { name: name.into(), orphan: true };
            rig.run_request(PoolRequest::Change(change)).unwrap();
            assert_eq!(
                flush_and_read_used_blocks(&mut rig) + unique,
                before,
                "`{name}`, {checksums}, {unit}"
            );
            assert!(unique > 30, "{unique}");
        }
    }
}

#[test]
fn clone_usage_does_not_read_the_whole_map() {
    const BLOCKS: u64 = 1 << 15;
    let mut rig =
        PoolFixture::with_normal_trees(new_pool_image(BLOCKS), BLOCKS, Random::new(3)).unwrap();
    let fine =
        VolumeOp::Create { name: "v".into(), blocks: 8000, unit: 1, uuid: 1, checksums: false };
    let PoolResponse::Volume(fine) = rig.run_request(PoolRequest::Change(fine)).unwrap() else {
        panic!()
    };
    for block in (0..8000).step_by(2) {
        write_and_wait(&mut rig, fine.id, block, 1, 1);
    }
    create_clone(&mut rig, "v", "c");
    let Ok(PoolResponse::Volume(c)) = rig.run_request(PoolRequest::Find("c".into())) else {
        panic!()
    };
    write_and_wait(&mut rig, c.id, 4000, 1, 2);
    rig.run_request(PoolRequest::Flush).unwrap();
    let image = rig.disk.image().clone();
    let mut cold = PoolFixture::with_normal_trees(image, BLOCKS, Random::new(3)).unwrap();
    let found = volume_usage(&mut cold, "c");
    assert_eq!(found, thin_usage(4000, 3999, 1 + 2 + 1, 7999));
    assert!(cold.reads < 12, "{} blocks were read", cold.reads);
    let report = check_pool(&cold.store, cold.disk.image());
    assert!(report.metadata > 40, "{report:?}");
    assert_eq!(report.accounts[1].volume_usage, found);
}

#[test]
fn random_writes_after_a_snapshot_have_low_write_amplification() {
    const SIZE: u64 = 1 << 16;
    const WRITES: u64 = 4096;
    let mut rig =
        PoolFixture::with_normal_trees(new_pool_image(1 << 19), 1 << 19, Random::new(3)).unwrap();
    let info = create_volume(&mut rig, "v", SIZE);
    for block in (0..SIZE).step_by(256) {
        write_and_wait(&mut rig, info.id, block, 256, 1);
    }
    create_snapshot(&mut rig, "v", "s").unwrap();
    let mut random = Random::new(7);
    let before = rig.disk.writes;
    for number in 0..WRITES {
        write_and_wait(&mut rig, info.id, random.below(SIZE), 1, 2);
        if number % 256 == 255 {
            rig.run_request(PoolRequest::Flush).unwrap();
        }
    }
    let written = rig.disk.writes - before;
    assert!(written * 2 < WRITES * 5, "{written} blocks for {WRITES}");
    println!("{written} blocks written for {WRITES}");
}

#[test]
fn snapshot_cost_is_independent_of_size() {
    let mut costs = Vec::new();
    for blocks in [64, 1 << 20] {
        let mut rig = pool_fixture(1 << 22);
        let info = create_volume(&mut rig, "v", blocks);
        for block in (0..blocks).step_by(usize::try_from(blocks / 32).unwrap()) {
            write_and_wait(&mut rig, info.id, block, 1, 5);
        }
        rig.run_request(PoolRequest::Flush).unwrap();
        let before = rig.disk.writes;
        create_snapshot(&mut rig, "v", "s").unwrap();
        costs.push(rig.disk.writes - before);
    }
    assert_eq!(costs[0], costs[1], "blocks written");
    assert!(costs[0] < 12, "{costs:?}");
}

#[test]
fn chain_of_64_snapshots_keeps_each_content() {
    let mut rig = pool_fixture(1 << 14);
    let info = create_volume(&mut rig, "v", 64);
    for number in 0..64 {
        write_and_wait(&mut rig, info.id, number, 1, number + 1);
        create_snapshot(&mut rig, "v", &format!("s{number}")).unwrap();
    }
    for number in [0, 31, 63] {
        let PoolResponse::Volume(info) =
            rig.run_request(PoolRequest::Find(format!("s{number}"))).unwrap()
        else {
            panic!()
        };
        let found = rig.read_blocks(info.id, 0, 64).unwrap();
        for (block, values) in (0..).zip(found) {
            assert_eq!(values, [if block <= number { block + 1 } else { 0 }; 8]);
        }
    }
    for number in 0..64 {
        let change = VolumeOp::Delete { name: format!("s{number}"), orphan: false };
        rig.run_request(PoolRequest::Change(change)).unwrap();
    }
    flush_and_read_used_blocks(&mut rig);
    assert!(rig.store.is_idle());
    let report = check_pool(&rig.store, rig.disk.image());
    assert_eq!((report.findings, report.volumes), (vec![], 1));
    // Each of its four clusters was written once after every snapshot except the first.
    assert!(report.used < 64 * 16 + 64, "{} blocks are used", report.used);
}

#[test]
fn names_sizes_and_devices_beyond_the_limits_are_refused() {
    let mut rig = pool_fixture(1024);
    let info = create_volume(&mut rig, "v", 10);
    let mut refusal = |ask: PoolRequest| rig.run_request(ask).unwrap_err().to_string();
    let create = |name: &str, blocks, unit| {
        PoolRequest::Change(VolumeOp::Create {
            name: name.into(),
            blocks,
            unit,
            uuid: 1,
            checksums: false,
        })
    };
    assert_eq!(refusal(create("v", 1, 1)), "volume `v`: the name is in use");
    assert_eq!(refusal(create("", 1, 1)), "volume ``: not a name");
    assert_eq!(refusal(create("a\nb", 1, 1)), "volume `a\\nb`: not a name");
    assert_eq!(refusal(create("a\u{202e}b", 1, 1)), "volume `a\\u{202e}b`: not a name");
    assert_eq!(refusal(create(&"x".repeat(129), 1, 1)).len(), 129 + "volume ``: not a name".len());
    assert_eq!(refusal(create("w", 0, 1)), "volume `w`: it cannot have 0 blocks of 4 KiB");
    assert_eq!(refusal(create("w", 1, 3)), "a unit cannot have 3 blocks of 4 KiB");
    assert_eq!(refusal(create("w", 1, 32)), "a unit cannot have 32 blocks of 4 KiB");
    assert_eq!(refusal(PoolRequest::Find("w".into())), "volume `w`: there is none");
    let outside = PoolRequest::Read { volume: info.id, block: 9, blocks: 2 };
    assert_eq!(
        refusal(outside),
        "volume `v`: 2 blocks from block 9 on, expected an end at 10 at most"
    );
    let wrapping = PoolRequest::Write { volume: info.id, block: u64::MAX, blocks: 2 };
    assert!(refusal(wrapping).starts_with("volume `v`: 2 blocks from"));
    let new = |blocks, name: &str| PoolConfig { name: name.into(), uuid: 1, blocks }.create_steps();
    assert!(matches!(new(511, "s"), Err(PoolError::DeviceTooSmall { blocks: 511, needed: 512 })));
    assert!(matches!(new((1 << 48) + 1, "s"), Err(PoolError::DeviceTooLarge { .. })));
    assert!(matches!(new(512, ""), Err(PoolError::BadName(_))));
}

#[test]
fn snapshot_is_read_only_and_not_deleted_while_it_has_clones() {
    let mut rig = pool_fixture(2048);
    create_volume(&mut rig, "v", 10);
    let PoolResponse::Volume(snap) = create_snapshot(&mut rig, "v", "s").unwrap() else { panic!() };
    let write = PoolRequest::Write { volume: snap.id, block: 0, blocks: 1 };
    assert_eq!(rig.run_request(write), Err(PoolError::ReadOnly("s".into())));
    let clone = VolumeOp::Clone { from: "s".into(), name: "c".into(), uuid: 3 };
    rig.run_request(PoolRequest::Change(clone)).unwrap();
    let delete = |orphan| PoolRequest::Change(VolumeOp::Delete { name: "s".into(), orphan });
    let error = rig.run_request(delete(false)).unwrap_err();
    assert_eq!(error.to_string(), "delete `s`: 1 volumes were made from it");
    assert!(error.hint().unwrap().starts_with("delete those first"));
    let decouple = |name: &str| PoolRequest::Change(VolumeOp::Decouple { name: name.into() });
    assert_eq!(rig.run_request(decouple("s")), Err(PoolError::ReadOnly("s".into())));
    for _ in 0..2 {
        let Ok(PoolResponse::Volume(alone)) = rig.run_request(decouple("c")) else {
            panic!("refused")
        };
        assert_eq!((alone.name.as_str(), alone.origin), ("c", 0));
    }
    rig.run_request(delete(false)).unwrap();
    assert_eq!(rig.run_request(delete(true)), Err(PoolError::NoVolume("s".into())));
    flush_and_read_used_blocks(&mut rig);
    assert_eq!(check_pool(&rig.store, rig.disk.image()).findings, []);
}

#[test]
fn resized_device_and_stale_superblocks_are_detected() {
    let image = new_pool_image(1024);
    assert_eq!(open_read_only(&image, 4096).unwrap().damaged, [], "the old end is looked at");
    assert!(matches!(
        open_read_only(&image, 1000),
        Err(PoolError::DeviceTooSmall { blocks: 1000, needed: 1024 })
    ));
    let mut two = image.clone();
    for step in (PoolConfig { name: "x".into(), uuid: 99, blocks: 1024 }).create_steps().unwrap() {
        if let tenmil_volume::CreateStep::Write { at, bytes } = step
            && at > 2
        {
            two.insert(at, (*bytes).into());
        }
    }
    assert!(matches!(open_read_only(&two, 1024), Err(PoolError::MixedSuperblocks { .. })));
}

#[test]
fn run_split_into_more_pieces_than_a_leaf_holds() {
    let mut rig =
        PoolFixture::with_normal_trees(new_pool_image(1 << 14), 1 << 14, Random::new(3)).unwrap();
    let info = create_volume(&mut rig, "v", 1000);
    write_and_wait(&mut rig, info.id, 0, 1000, 1);
    for block in (1..1000).step_by(2) {
        rig.run_request(PoolRequest::Trim { volume: info.id, block, blocks: 1 }).unwrap();
    }
    rig.run_request(PoolRequest::Flush).unwrap();
    assert_eq!(check_pool(&rig.store, rig.disk.image()).findings, []);
    let mut again =
        PoolFixture::with_normal_trees(rig.disk.image().clone(), 1 << 14, Random::new(1)).unwrap();
    for (block, values) in (0..).zip(again.read_blocks(info.id, 0, 1000).unwrap()) {
        assert_eq!(values, [1 - block % 2; 8], "block {block}");
    }
}

#[test]
fn a_write_of_no_blocks_changes_nothing() {
    let mut rig = pool_fixture(1024);
    let info = create_volume(&mut rig, "v", 10);
    rig.run_request(PoolRequest::Flush).unwrap();
    let before = rig.disk.writes;
    for block in [0, 5, 10] {
        write_and_wait(&mut rig, info.id, block, 0, 1);
    }
    rig.run_request(PoolRequest::Flush).unwrap();
    assert_eq!(rig.disk.writes, before);
    assert_eq!(check_pool(&rig.store, rig.disk.image()).findings, []);
}

#[test]
fn free_space_search_reads_each_leaf_once() {
    const BLOCKS: u64 = 20_000;
    let mut rig =
        PoolFixture::with_normal_trees(new_pool_image(BLOCKS), BLOCKS, Random::new(3)).unwrap();
    rig.store = rig.store.with_node_records_max(4);
    let fine =
        VolumeOp::Create { name: "fine".into(), blocks: 3000, unit: 1, uuid: 1, checksums: false };
    let PoolResponse::Volume(fine) = rig.run_request(PoolRequest::Change(fine)).unwrap() else {
        panic!()
    };
    for block in (0..3000).step_by(500) {
        write_and_wait(&mut rig, fine.id, block, 500, 1);
    }
    for block in (0..3000).step_by(2) {
        rig.run_request(PoolRequest::Trim { volume: fine.id, block, blocks: 1 }).unwrap();
    }
    let coarse = create_volume(&mut rig, "coarse", 16);
    let mut opening = PoolOpening::new(BLOCKS, 0).for_writing(owner(7));
    while let Some(at) = opening.next_read() {
        opening.handle_read(Ok(&rig.disk.read(at)));
    }
    let mut again =
        PoolFixture::with_normal_trees(rig.disk.image().clone(), BLOCKS, Random::new(1)).unwrap();
    again.store = allow_claim_over_owner(opening.finish().unwrap().store.with_node_records_max(4));
    let token = again.submit_write(coarse.id, 0, 16, 1);
    let steps = (0..8000).take_while(|_| again.execute_random_action()).count();
    assert_eq!(again.responses.remove(&token), Some(Ok(PoolResponse::Done)), "after {steps} steps");
    assert!(steps > 500, "{steps} steps: there were few leaves to read");
}

#[test]
fn write_planning_works_with_more_leaves_than_the_cache() {
    const BLOCKS: u64 = 1 << 14;
    let mut rig =
        PoolFixture::with_normal_trees(new_pool_image(BLOCKS), BLOCKS, Random::new(3)).unwrap();
    rig.store = rig.store.with_node_records_max(4);
    let fine =
        VolumeOp::Create { name: "fine".into(), blocks: 1000, unit: 1, uuid: 1, checksums: false };
    let PoolResponse::Volume(fine) = rig.run_request(PoolRequest::Change(fine)).unwrap() else {
        panic!()
    };
    for block in (0..1000).step_by(2).chain((1..1000).step_by(2)) {
        write_and_wait(&mut rig, fine.id, block, 1, 1);
    }
    rig.run_request(PoolRequest::Flush).unwrap();
    let mut opening = PoolOpening::new(BLOCKS, 0).for_writing(owner(7));
    while let Some(at) = opening.next_read() {
        opening.handle_read(Ok(&rig.disk.read(at)));
    }
    let mut again =
        PoolFixture::with_normal_trees(rig.disk.image().clone(), BLOCKS, Random::new(1)).unwrap();
    again.store = allow_claim_over_owner(opening.finish().unwrap().store.with_node_records_max(4));
    let token = again.submit_write(fine.id, 0, 1000, 2);
    let steps = (0..8000).take_while(|_| again.execute_random_action()).count();
    assert_eq!(again.responses.remove(&token), Some(Ok(PoolResponse::Done)), "after {steps} steps");
    again.run_request(PoolRequest::Flush).unwrap();
    let most = again.store.memory_bytes();
    assert!(most <= 128 * 4096, "{most} bytes are still there");
}

#[test]
fn usage_scan_stays_within_the_cache_budget() {
    const BLOCKS: u64 = 1 << 14;
    let mut rig =
        PoolFixture::with_normal_trees(new_pool_image(BLOCKS), BLOCKS, Random::new(3)).unwrap();
    rig.store = rig.store.with_node_records_max(4);
    let fine =
        VolumeOp::Create { name: "fine".into(), blocks: 1000, unit: 1, uuid: 1, checksums: true };
    let PoolResponse::Volume(fine) = rig.run_request(PoolRequest::Change(fine)).unwrap() else {
        panic!()
    };
    for block in (0..1000).step_by(2).chain((1..1000).step_by(2)) {
        write_and_wait(&mut rig, fine.id, block, 1, 1);
    }
    rig.run_request(PoolRequest::Flush).unwrap();
    let mut opening = PoolOpening::new(BLOCKS, 0).for_writing(owner(7));
    while let Some(at) = opening.next_read() {
        opening.handle_read(Ok(&rig.disk.read(at)));
    }
    let mut again =
        PoolFixture::with_normal_trees(rig.disk.image().clone(), BLOCKS, Random::new(1)).unwrap();
    again.store = allow_claim_over_owner(opening.finish().unwrap().store.with_node_records_max(4));
    let (token, mut most) = (again.submit(PoolRequest::SpaceUsage("fine".into())), 0);
    while again.execute_random_action() {
        most = most.max(again.store.memory_bytes());
    }
    let found = again.responses.remove(&token);
    let Some(Ok(PoolResponse::Account(SpaceUsage { used: 1000, shared: 0, unique, .. }))) = found
    else {
        panic!("{found:?}")
    };
    assert!(unique > 1400, "{unique}: the trees have many nodes");
    assert!(most <= (128 + 16) * 4096, "{most} bytes were needed");
}
