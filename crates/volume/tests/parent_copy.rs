//! Reads from a parent, and copies from it during writes, trims and reads.

#![expect(clippy::unwrap_used, reason = "a test may")]

mod rig;

use rig::model::parent_value;
use rig::{Rig, check, new_store};
use tenmil_base::Random;
use tenmil_volume::{
    DeviceAction, ParentInfo, PoolError, PoolRequest, PoolResponse, VolumeInfo, VolumeOp,
};

const BLOCKS: u64 = 4096;

fn parent(uri: &str) -> ParentInfo {
    ParentInfo { uri: uri.into(), blocks: 48, block_bytes: 512, uuid: 0, print: 5 }
}

fn over(name: &str, blocks: u64, parent: ParentInfo) -> VolumeOp {
    VolumeOp::CreateOver { name: name.into(), blocks, unit: 4, uuid: 1, checksums: false, parent }
}

fn volume() -> (Rig, VolumeInfo) {
    let mut rig = Rig::plain(new_store(BLOCKS), BLOCKS, Random::new(3)).unwrap();
    let made = rig.ask(PoolRequest::Change(over("v", 64, parent("ram:1m")))).unwrap();
    let PoolResponse::Volume(info) = made else { panic!("{made:?}") };
    assert_eq!((info.reach, info.mapped), (48, 0));
    (rig, info)
}

const fn is_parents(action: &DeviceAction) -> bool {
    matches!(action, DeviceAction::ReadParent { .. })
}

fn expected(block: u64) -> [u64; 8] {
    [if block < 48 { parent_value(block) } else { 0 }; 8]
}

fn info(rig: &mut Rig) -> VolumeInfo {
    match rig.ask(PoolRequest::Find("v".into())) {
        Ok(PoolResponse::Volume(info)) => info,
        other => panic!("{other:?}"),
    }
}

#[test]
fn who_writes_or_trims_what_is_being_copied_waits_and_has_the_last_word() {
    let (mut rig, info) = volume();
    let volume = info.id;
    let fill = rig.submit(PoolRequest::CopyFromParent { volume, blocks: 40 });
    while !rig.under_way().iter().any(is_parents) {
        rig.begin();
        assert!(rig.under_way().iter().any(is_parents) || rig.step(), "it comes to that");
    }
    let trim = rig.submit(PoolRequest::Trim { volume, block: 20, blocks: 6 });
    let write = rig.submit_write(volume, 30, 2, 7);
    let read = rig.submit(PoolRequest::Read { volume, block: 10, blocks: 30 });
    rig.settle();
    assert_eq!(rig.responses.remove(&fill), Some(Ok(PoolResponse::Filled(8))));
    for token in [trim, write, read] {
        assert_eq!(rig.responses.remove(&token), Some(Ok(PoolResponse::Done)));
    }
    let found = rig.read(volume, 0, 64).unwrap();
    for (block, found) in (0..).zip(found) {
        let expected = match block {
            20..26 => [0; 8],
            30..32 => [7; 8],
            _ => expected(block),
        };
        assert_eq!(found, expected, "block {block}");
    }
}

#[test]
fn a_parent_that_does_not_answer_costs_one_read_and_a_fill_goes_on_where_it_was() {
    let (mut rig, info) = volume();
    let volume = info.id;
    rig.fails_parent = true;
    let error = rig.read(volume, 0, 4).unwrap_err();
    assert!(matches!(error, PoolError::Device { .. }), "{error}");
    assert_eq!(rig.read(volume, 0, 4).unwrap(), (0..4).map(expected).collect::<Vec<_>>());
    let fill = || PoolRequest::CopyFromParent { volume, blocks: 16 };
    assert_eq!(rig.ask(fill()), Ok(PoolResponse::Filled(32)));
    rig.fails_parent = true;
    let error = rig.ask(fill()).unwrap_err();
    assert!(error.to_string().contains("read blocks of a volume's parent"), "{error}");
    assert_eq!((self::info(&mut rig).reach, self::info(&mut rig).mapped), (32, 16), "data");
    rig.ask(PoolRequest::Flush).unwrap();

    // After a kill, the next instance continues from the durable state.
    let mut rig = Rig::plain(rig.disk.image().clone(), BLOCKS, Random::new(4)).unwrap();
    assert_eq!(rig.ask(fill()), Ok(PoolResponse::Filled(16)));
    assert!(matches!(rig.ask(PoolRequest::Parent { volume }), Ok(PoolResponse::Parent(Some(_)))));
    assert_eq!(rig.ask(fill()), Ok(PoolResponse::Filled(0)));
    assert_eq!(rig.ask(PoolRequest::Parent { volume }), Ok(PoolResponse::Parent(None)));
    assert_eq!(rig.ask(fill()), Ok(PoolResponse::Filled(0)), "there is nothing to do");
    rig.ask(PoolRequest::Flush).unwrap();
    let info = self::info(&mut rig);
    assert_eq!((info.reach, info.mapped), (0, 32), "a hole takes no room");
    assert_eq!(rig.read(volume, 0, 64).unwrap(), (0..64).map(expected).collect::<Vec<_>>());
    assert_eq!(check(&rig.store, rig.disk.image()).findings, []);
}

#[test]
fn what_a_volume_gains_after_it_was_cut_is_not_the_parents() {
    let (mut rig, info) = volume();
    for blocks in [20, 64] {
        let name = "v".into();
        rig.ask(PoolRequest::Change(VolumeOp::Resize { name, blocks })).unwrap();
    }
    let found = rig.read(info.id, 0, 64).unwrap();
    for (block, found) in (0..).zip(found) {
        assert_eq!(found, if block < 20 { expected(block) } else { [0; 8] }, "block {block}");
    }
}

#[test]
fn what_is_no_parent_is_refused_and_nothing_is_made() {
    let (mut rig, _) = volume();
    for wrong in [
        parent(""),
        parent("a\nb"),
        parent(&"x".repeat(2049)),
        ParentInfo { blocks: 0, ..parent("ram:1m") },
        ParentInfo { block_bytes: 8192, ..parent("ram:1m") },
        ParentInfo { block_bytes: 513, ..parent("ram:1m") },
    ] {
        let error = rig.ask(PoolRequest::Change(over("w", 64, wrong.clone()))).unwrap_err();
        assert_eq!(error, PoolError::BadParent { uri: wrong.uri });
        assert!(error.hint().unwrap().contains("2048 bytes at most"));
    }
    rig.ask(PoolRequest::Change(over("w", 64, parent(&"x".repeat(2048))))).unwrap();
    let error = rig.ask(PoolRequest::ReserveThick("v".into())).unwrap_err();
    assert_eq!(error, PoolError::HasParent("v".into()));
    rig.ask(PoolRequest::Flush).unwrap();
    assert_eq!(check(&rig.store, rig.disk.image()).findings, []);
}
