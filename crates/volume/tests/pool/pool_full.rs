//! A full pool: the requests that it rejects, and that it always has space for frees.

use crate::fixture::{PoolFixture, check_pool, new_pool_image};
use tenmil_base::Random;
use tenmil_volume::format::{BlockKind, Page};
use tenmil_volume::{CapacityState, PoolError, PoolRequest, PoolResponse, VolumeInfo, VolumeOp};

fn execute_change(rig: &mut PoolFixture, change: VolumeOp) -> VolumeInfo {
    match rig.run_request(PoolRequest::Change(change)).unwrap() {
        PoolResponse::Volume(info) => info,
        other => panic!("{other:?}"),
    }
}

fn create_volume(rig: &mut PoolFixture, name: &str, blocks: u64, unit: u64) -> VolumeInfo {
    execute_change(
        rig,
        VolumeOp::Create { name: name.into(), blocks, unit, uuid: 1, checksums: false },
    )
}

fn create_clone(rig: &mut PoolFixture, from: &str, name: &str) -> VolumeInfo {
    execute_change(rig, VolumeOp::Clone { from: from.into(), name: name.into(), uuid: 3 })
}

fn delete_volume(rig: &mut PoolFixture, name: &str) {
    let change = VolumeOp::Delete { name: name.into(), orphan: true };
    let token = rig.submit(PoolRequest::Change(change));
    run_until_idle(rig);
    assert_eq!(rig.responses.remove(&token), Some(Ok(PoolResponse::Done)), "`{name}`");
}

fn write_and_wait(
    rig: &mut PoolFixture,
    volume: u64,
    block: u64,
    blocks: u64,
) -> Result<PoolResponse, PoolError> {
    let token = rig.submit_write(volume, block, blocks, 1);
    run_until_idle(rig);
    rig.responses.remove(&token).unwrap()
}

/// Whether the request succeeded; otherwise there was no space.
fn had_space(response: Result<PoolResponse, PoolError>) -> bool {
    match response {
        Ok(_) => true,
        Err(PoolError::NoSpace { .. }) => false,
        Err(error) => panic!("{error}"),
    }
}

/// Runs until idle, which must be soon.
fn run_until_idle(rig: &mut PoolFixture) {
    let steps = (0..20_000).take_while(|_| rig.execute_random_action()).count();
    assert!(steps < 20_000, "there is no end to it");
}

/// Checks that freed blocks are available, and the pool is consistent.
fn assert_space_is_freed(rig: &mut PoolFixture, volume: u64) {
    rig.run_request(PoolRequest::Flush).unwrap();
    assert!(rig.store.is_idle());
    rig.run_request(PoolRequest::Flush).unwrap();
    assert_eq!(check_pool(&rig.store, rig.disk.image()).findings, []);
    assert_eq!(write_and_wait(rig, volume, 0, 16), Ok(PoolResponse::Done));
}

/// Notices about capacity.
fn drain_capacity_notices(rig: &mut PoolFixture) -> Vec<CapacityState> {
    std::iter::from_fn(|| rig.store.next_notice()).map(|notice| notice.fill).collect()
}

#[test]
fn capacity_notice_is_issued_once_before_the_pool_is_full() {
    let mut rig =
        PoolFixture::with_normal_trees(new_pool_image(4096), 4096, Random::new(4)).unwrap();
    let (one, mut reported_values) = (create_volume(&mut rig, "one", 8192, 16), Vec::new());
    let mut at = 0;
    while had_space(write_and_wait(&mut rig, one.id, at, 16)) {
        at += 16;
        reported_values.extend(drain_capacity_notices(&mut rig).into_iter().map(|fill| (fill, at)));
    }
    let [(CapacityState::Above(80), low), (CapacityState::Above(95), high)] = reported_values[..]
    else {
        panic!("{reported_values:?}")
    };
    assert!(low * 100 / at >= 78 && low * 100 / at <= 81, "{low} of {at}");
    assert!(high * 100 / at >= 93 && high < at, "{high} of {at}");
    assert_eq!(drain_capacity_notices(&mut rig), [CapacityState::Full]);
    assert!(!had_space(write_and_wait(&mut rig, one.id, at, 16)));
    assert_eq!(drain_capacity_notices(&mut rig), []);
    for block in (0..at).step_by(16) {
        assert_eq!(rig.read_blocks(one.id, block, 16).unwrap(), [[1; 8]; 16], "nothing is lost");
    }

    let image = rig.disk.image().clone();
    let mut again = PoolFixture::with_normal_trees(image, 4096, Random::new(4)).unwrap();
    assert_eq!(
        drain_capacity_notices(&mut again),
        [CapacityState::Above(95)],
        "it is reported when the pool is opened"
    );
    let percent = [50, 0];
    again.run_request(PoolRequest::Change(VolumeOp::Thresholds { percent })).unwrap();
    assert_eq!(drain_capacity_notices(&mut again), [], "it is above the only one, as it was");
    delete_volume(&mut again, "one");
    again.run_request(PoolRequest::Flush).unwrap();
    assert_eq!(drain_capacity_notices(&mut again), [CapacityState::Below(50)]);
    for percent in [[101, 0], [90, 80], [0, 101]] {
        let error =
            again.run_request(PoolRequest::Change(VolumeOp::Thresholds { percent })).unwrap_err();
        assert_eq!(error, PoolError::BadThresholds(percent));
    }
}

#[test]
fn full_pool_rejects_a_trim_that_copies_but_allows_delete() {
    let mut rig =
        PoolFixture::with_normal_trees(new_pool_image(2048), 2048, Random::new(4)).unwrap();
    let one = create_volume(&mut rig, "one", 700, 1);
    for block in (0..700).step_by(2) {
        write_and_wait(&mut rig, one.id, block, 1).unwrap();
    }
    let clones: Vec<VolumeInfo> =
        (0..100).map(|number| create_clone(&mut rig, "one", &format!("clone {number}"))).collect();
    let filler = create_volume(&mut rig, "filler", 4096, 16);
    let written =
        (0..4096).step_by(16).filter(|at| had_space(write_and_wait(&mut rig, filler.id, *at, 16)));
    assert!(written.count() < 150, "the pool is full");
    let mut refused = 0;
    let places = clones.iter().flat_map(|clone| [0, 300, 600].map(|block| (clone.id, block)));
    for (volume, block) in places {
        refused +=
            u64::from(!had_space(rig.run_request(PoolRequest::Trim { volume, block, blocks: 1 })));
    }
    assert!((1..300).contains(&refused), "{refused} trims were refused");
    for clone in &clones {
        delete_volume(&mut rig, &clone.name);
    }
    assert_space_is_freed(&mut rig, filler.id);
}

#[test]
fn partly_shared_volume_is_deleted_with_little_free_space() {
    let mut rig =
        PoolFixture::with_normal_trees(new_pool_image(4096), 4096, Random::new(4)).unwrap();
    rig.store = rig.store.with_node_records_max(16);
    let one = create_volume(&mut rig, "one", 3000, 1);
    for block in (0..3000).step_by(100) {
        write_and_wait(&mut rig, one.id, block, 100).unwrap();
    }
    let two = create_clone(&mut rig, "one", "two");
    let filler = create_volume(&mut rig, "filler", 4096, 1);
    let mut at = 0;
    while had_space(write_and_wait(&mut rig, filler.id, at, 1)) {
        at += 1;
    }
    let volume = two.id;
    let trims = (0..3000).step_by(2);
    let done = trims.filter(|at| {
        had_space(rig.run_request(PoolRequest::Trim { volume, block: *at, blocks: 1 }))
    });
    let done = done.count();
    assert!((300..1500).contains(&done), "{done} trims had room");
    delete_volume(&mut rig, "one");
    assert_space_is_freed(&mut rig, filler.id);
}

#[test]
fn fragmented_pool_is_searched_once_for_a_missing_cluster() {
    const BLOCKS: u64 = 8192;
    let mut rig =
        PoolFixture::with_normal_trees(new_pool_image(BLOCKS), BLOCKS, Random::new(4)).unwrap();
    let fine = create_volume(&mut rig, "fine", BLOCKS, 1);
    let mut at = 0;
    while had_space(write_and_wait(&mut rig, fine.id, at, 1)) {
        at += 1;
    }
    for block in (0..at).step_by(2) {
        rig.run_request(PoolRequest::Trim { volume: fine.id, block, blocks: 1 }).unwrap();
    }
    let coarse = create_volume(&mut rig, "coarse", 1600, 16);
    rig.run_request(PoolRequest::Flush).unwrap();
    rig.run_request(PoolRequest::Flush).unwrap();
    let image = rig.disk.image().clone();
    let mut rig = PoolFixture::with_normal_trees(image, BLOCKS, Random::new(4)).unwrap();
    let mut block = 0;
    while had_space(write_and_wait(&mut rig, coarse.id, block, 16)) {
        block += 16;
    }
    let before = rig.reads;
    for _ in 0..20 {
        let error = write_and_wait(&mut rig, coarse.id, block, 16).unwrap_err();
        assert!(error.to_string().contains("in one piece"), "{error}");
    }
    assert_eq!(rig.reads, before);
    assert_eq!(
        write_and_wait(&mut rig, fine.id, 0, 1),
        Ok(PoolResponse::Done),
        "single blocks there are"
    );
}

#[test]
fn corrupt_deleted_volume_does_not_block_other_frees() {
    let mut rig =
        PoolFixture::with_normal_trees(new_pool_image(2048), 2048, Random::new(4)).unwrap();
    let volumes = ["one", "two", "three"].map(|name| create_volume(&mut rig, name, 160, 16));
    for volume in &volumes {
        write_and_wait(&mut rig, volume.id, 0, 160).unwrap();
    }
    rig.run_request(PoolRequest::Flush).unwrap();
    let mut image = rig.disk.image().clone();
    let uuid = rig.store.uuid();
    for (at, block) in &mut image {
        let page = Page::decode(block, uuid, *at);
        if page.is_ok_and(|page| page.kind == BlockKind::Map && page.owner == volumes[0].id) {
            *block = crate::fixture::fake_disk::stamped_block(9);
        }
    }
    let mut rig = PoolFixture::with_normal_trees(image, 2048, Random::new(4)).unwrap();
    let free = |rig: &mut PoolFixture| match rig.run_request(PoolRequest::Usage).unwrap() {
        PoolResponse::Usage(usage) => usage.free,
        other => panic!("{other:?}"),
    };
    let before = free(&mut rig);
    delete_volume(&mut rig, "one");
    delete_volume(&mut rig, "two");
    for _ in 0..3 {
        rig.run_request(PoolRequest::Flush).unwrap();
    }
    assert!(rig.store.is_idle());
    let gained = free(&mut rig).saturating_sub(before);
    assert!((60..160).contains(&gained), "{gained} blocks came back");
}
