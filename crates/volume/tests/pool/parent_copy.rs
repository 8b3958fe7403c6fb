//! Reads from a parent, and copies from it during writes, trims and reads.

use crate::fixture::pool_model::parent_value;
use crate::fixture::{PoolFixture, check_pool, new_pool_image};
use tenmil_base::Random;
use tenmil_volume::{
    DeviceAction, ParentInfo, PoolError, PoolRequest, PoolResponse, VolumeInfo, VolumeOp,
};

const BLOCKS: u64 = 4096;

fn parent_info(uri: &str) -> ParentInfo {
    ParentInfo { uri: uri.into(), blocks: 48, block_bytes: 512, uuid: 0, print: 5 }
}

fn create_over_op(name: &str, blocks: u64, parent: ParentInfo) -> VolumeOp {
    VolumeOp::CreateOver { name: name.into(), blocks, unit: 4, uuid: 1, checksums: false, parent }
}

fn pool_with_child_volume() -> (PoolFixture, VolumeInfo) {
    let mut rig =
        PoolFixture::with_normal_trees(new_pool_image(BLOCKS), BLOCKS, Random::new(3)).unwrap();
    let made = rig
        .run_request(PoolRequest::Change(create_over_op("v", 64, parent_info("ram:1m"))))
        .unwrap();
    let PoolResponse::Volume(info) = made else { panic!("{made:?}") };
    assert_eq!((info.reach, info.mapped), (48, 0));
    (rig, info)
}

const fn is_parent_read(action: &DeviceAction) -> bool {
    matches!(action, DeviceAction::ReadParent { .. })
}

fn expected_sectors(block: u64) -> [u64; 8] {
    [if block < 48 { parent_value(block) } else { 0 }; 8]
}

fn volume_info(rig: &mut PoolFixture) -> VolumeInfo {
    match rig.run_request(PoolRequest::Find("v".into())) {
        Ok(PoolResponse::Volume(info)) => info,
        other => panic!("{other:?}"),
    }
}

#[test]
fn writes_and_trims_wait_for_the_parent_copy_and_win() {
    let (mut rig, info) = pool_with_child_volume();
    let volume = info.id;
    let fill = rig.submit(PoolRequest::CopyFromParent { volume, blocks: 40 });
    while !rig.in_flight().iter().any(is_parent_read) {
        rig.start_pool_actions();
        assert!(
            rig.in_flight().iter().any(is_parent_read) || rig.execute_random_action(),
            "it comes to that"
        );
    }
    let trim = rig.submit(PoolRequest::Trim { volume, block: 20, blocks: 6 });
    let write = rig.submit_write(volume, 30, 2, 7);
    let read = rig.submit(PoolRequest::Read { volume, block: 10, blocks: 30 });
    rig.run_until_idle();
    assert_eq!(rig.responses.remove(&fill), Some(Ok(PoolResponse::Filled(8))));
    for token in [trim, write, read] {
        assert_eq!(rig.responses.remove(&token), Some(Ok(PoolResponse::Done)));
    }
    let found = rig.read_blocks(volume, 0, 64).unwrap();
    for (block, found) in (0..).zip(found) {
        let expected = match block {
            20..26 => [0; 8],
            30..32 => [7; 8],
            _ => expected_sectors(block),
        };
        assert_eq!(found, expected, "block {block}");
    }
}

#[test]
fn parent_read_error_interrupts_the_copy_which_resumes() {
    let (mut rig, info) = pool_with_child_volume();
    let volume = info.id;
    rig.fails_parent = true;
    let error = rig.read_blocks(volume, 0, 4).unwrap_err();
    assert!(matches!(error, PoolError::Device { .. }), "{error}");
    assert_eq!(
        rig.read_blocks(volume, 0, 4).unwrap(),
        (0..4).map(expected_sectors).collect::<Vec<_>>()
    );
    let fill = || PoolRequest::CopyFromParent { volume, blocks: 16 };
    assert_eq!(rig.run_request(fill()), Ok(PoolResponse::Filled(32)));
    rig.fails_parent = true;
    let error = rig.run_request(fill()).unwrap_err();
    assert!(error.to_string().contains("read blocks of a volume's parent"), "{error}");
    assert_eq!((volume_info(&mut rig).reach, volume_info(&mut rig).mapped), (32, 16), "data");
    rig.run_request(PoolRequest::Flush).unwrap();

    // After a kill, the next instance continues from the durable state.
    let mut rig =
        PoolFixture::with_normal_trees(rig.disk.image().clone(), BLOCKS, Random::new(4)).unwrap();
    assert_eq!(rig.run_request(fill()), Ok(PoolResponse::Filled(16)));
    assert!(matches!(
        rig.run_request(PoolRequest::Parent { volume }),
        Ok(PoolResponse::Parent(Some(_)))
    ));
    assert_eq!(rig.run_request(fill()), Ok(PoolResponse::Filled(0)));
    assert_eq!(rig.run_request(PoolRequest::Parent { volume }), Ok(PoolResponse::Parent(None)));
    assert_eq!(rig.run_request(fill()), Ok(PoolResponse::Filled(0)), "there is nothing to do");
    rig.run_request(PoolRequest::Flush).unwrap();
    let info = volume_info(&mut rig);
    assert_eq!((info.reach, info.mapped), (0, 32), "a hole takes no room");
    assert_eq!(
        rig.read_blocks(volume, 0, 64).unwrap(),
        (0..64).map(expected_sectors).collect::<Vec<_>>()
    );
    assert_eq!(check_pool(&rig.store, rig.disk.image()).findings, []);
}

#[test]
fn volume_grown_after_truncation_does_not_read_the_parent() {
    let (mut rig, info) = pool_with_child_volume();
    for blocks in [20, 64] {
        let name = "v".into();
        rig.run_request(PoolRequest::Change(VolumeOp::Resize { name, blocks })).unwrap();
    }
    let found = rig.read_blocks(info.id, 0, 64).unwrap();
    for (block, found) in (0..).zip(found) {
        assert_eq!(
            found,
            if block < 20 { expected_sectors(block) } else { [0; 8] },
            "block {block}"
        );
    }
}

#[test]
fn invalid_parent_is_rejected_without_changes() {
    let (mut rig, _) = pool_with_child_volume();
    for wrong in [
        parent_info(""),
        parent_info("a\nb"),
        parent_info(&"x".repeat(2049)),
        ParentInfo { blocks: 0, ..parent_info("ram:1m") },
        ParentInfo { block_bytes: 8192, ..parent_info("ram:1m") },
        ParentInfo { block_bytes: 513, ..parent_info("ram:1m") },
    ] {
        let error = rig
            .run_request(PoolRequest::Change(create_over_op("w", 64, wrong.clone())))
            .unwrap_err();
        assert_eq!(error, PoolError::BadParent { uri: wrong.uri });
        assert!(error.hint().unwrap().contains("2048 bytes at most"));
    }
    rig.run_request(PoolRequest::Change(create_over_op("w", 64, parent_info(&"x".repeat(2048)))))
        .unwrap();
    let error = rig.run_request(PoolRequest::ReserveThick("v".into())).unwrap_err();
    assert_eq!(error, PoolError::HasParent("v".into()));
    rig.run_request(PoolRequest::Flush).unwrap();
    assert_eq!(check_pool(&rig.store, rig.disk.image()).findings, []);
}
