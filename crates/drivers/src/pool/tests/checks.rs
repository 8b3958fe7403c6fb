//! Checks of all metadata of an open pool.

use std::os::unix::fs::FileExt;

use tenmil_base::IoStatus;

use super::{PoolFixture, VolumeOp};
use crate::pool::{OpenPool, PoolCheckResult, VolumeRef, check_closed_pool};

fn create_volume(open: &OpenPool, name: &str) {
    let name = name.to_owned();
    open.execute_volume_op(VolumeOp::Create {
        name,
        blocks: 4000,
        unit: 1,
        uuid: 7,
        checksums: false,
    })
    .unwrap();
}

fn delete_volume(open: &OpenPool, name: &str) {
    open.execute_volume_op(VolumeOp::Delete { name: name.to_owned(), orphan: false }).unwrap();
}

/// A pool with a volume whose map is large, and snapshots that share parts of it.
fn pool_with_volumes(size: &str) -> PoolFixture {
    let bench = PoolFixture::new(size);
    bench.open_pool().execute_volume_op(VolumeOp::Thresholds { percent: [90, 95] }).unwrap();
    create_volume(&bench.open_pool(), "v");
    for round in 1..=3 {
        write_every_third_block(&bench, "v", round);
        let name = format!("s{round}");
        bench
            .open_pool()
            .execute_volume_op(VolumeOp::Snapshot { volume: "v".into(), name, uuid: 3 })
            .unwrap();
    }
    bench
}

/// Writes about every third block.
fn write_every_third_block(bench: &PoolFixture, name: &str, round: u8) {
    let opened = bench.open_volume(name).unwrap();
    let mut hand = bench.volume_client(&*opened.medium, 0);
    for part in 0..400 {
        hand.write(part * 7 + u64::from(round), 1, round);
    }
    assert_eq!(hand.run_request(tenmil_base::Operation::Flush, 0, 0), IoStatus::SUCCESS);
}

fn found_nothing(checked: &PoolCheckResult) -> bool {
    checked.damaged.is_empty() && checked.report.findings.is_empty()
}

#[test]
fn check_sees_the_state_at_its_start() {
    let bench = pool_with_volumes("16m");
    let (open, opener) = (bench.open_pool(), bench.opener());
    let (generation, before) = (open.generation(), open.pool_usage().unwrap().unwrap());
    let mut looks = 0;
    let checked = open
        .check(&opener, &mut |(done, whole)| {
            assert!(done <= whole);
            looks += 1;
            if looks <= 20 {
                let name = format!("n{looks}");
                create_volume(&open, &name);
                write_every_third_block(&bench, &name, 4);
                delete_volume(&open, &name);
            }
            true
        })
        .unwrap();
    assert!(found_nothing(&checked), "{:?} {:?}", checked.damaged, checked.report.findings);
    assert_eq!((checked.generation, checked.report.volumes), (generation, 4));
    assert!(looks > 10 && open.generation() > generation + 10, "{looks}");
    assert!(open.wait_for_reclaim(tenmil_base::Span::from_secs(30)));
    let after = open.check(&opener, &mut |_| true).unwrap();
    assert!(found_nothing(&after) && after.generation > generation);
    // Nothing is pinned any more.
    let now = open.pool_usage().unwrap().unwrap();
    assert!(now.free + 64 >= before.free, "{now:?} {before:?}");
    let (there, name) = (after.report, open.name());
    let uuid = open.uuid();
    drop(open);
    let place = VolumeRef::pool_on(&bench.device_uri().parse().unwrap());
    let closed = check_closed_pool(&bench.opener(), &place).unwrap();
    assert_eq!((closed.name, closed.uuid), (name, uuid));
    assert_eq!((closed.report.accounts, closed.report.volumes), (there.accounts, there.volumes));
}

#[test]
fn interrupted_check_releases_its_pin() {
    let bench = pool_with_volumes("8m");
    let (open, opener) = (bench.open_pool(), bench.opener());
    let free = || open.pool_usage().unwrap().unwrap().free;
    let mut room = 0;
    let refused = open.check(&opener, &mut |_| {
        for _ in 0..12 {
            let change = |name: &str| VolumeOp::Rename { name: name.into(), to: "w".into() };
            open.execute_volume_op(change("v")).unwrap();
            let back = VolumeOp::Rename { name: "w".into(), to: "v".into() };
            open.execute_volume_op(back).unwrap();
        }
        room = free();
        true
    });
    let refused = refused.unwrap_err();
    assert!(
        refused.to_string().contains("no free space besides the blocks that the check pins"),
        "{refused}"
    );
    assert!(refused.hint().is_some() && free() > room, "{} {room}", free());
    let stopped = open.check(&opener, &mut |_| false).unwrap_err();
    assert!(stopped.to_string().contains("it was interrupted"), "{stopped}");
    assert!(found_nothing(&open.check(&opener, &mut |_| true).unwrap()));
}

#[test]
fn online_check_finds_the_same_corruption_as_offline() {
    let bench = pool_with_volumes("16m");
    let open = bench.open_pool();
    let path = bench.directory.path().join("pool");
    let file = std::fs::File::options().read(true).write(true).open(&path).unwrap();
    let generation = open.generation();
    let place = 4096 * (generation % 2);
    let mut byte = [0];
    let mut turn = |at: u64| {
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    };
    turn(place + 100);
    let found = open.check(&bench.opener(), &mut |_| true).unwrap();
    assert_eq!(found.damaged.len(), 1, "{:?}", found.damaged);
    assert!(found.report.findings.is_empty());
    turn(place + 100);
    // All metadata except the superblocks.
    let blocks = file.metadata().unwrap().len() / 4096;
    let mut magic = [0; 8];
    for block in 2..blocks - 2 {
        file.read_exact_at(&mut magic, block * 4096 + 8).unwrap();
        if magic == tenmil_volume::format::MAGIC {
            turn(block * 4096 + 100);
        }
    }
    let found = open.check(&bench.opener(), &mut |_| true).unwrap();
    assert!(!found.report.findings.is_empty() && found.damaged.is_empty());
    drop(open);
    let place = VolumeRef::pool_on(&bench.device_uri().parse().unwrap());
    let closed = check_closed_pool(&bench.opener(), &place).unwrap();
    assert_eq!((found.generation, found.report.findings), (generation, closed.report.findings));
}
