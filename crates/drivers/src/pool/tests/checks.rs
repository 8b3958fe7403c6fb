//! Checks of all metadata of an open pool.

use std::os::unix::fs::FileExt;

use tenmil_base::IoStatus;

use super::{Bench, VolumeOp};
use crate::pool::{OpenPool, PoolCheckResult, VolumeRef, check};

fn make(open: &OpenPool, name: &str) {
    let name = name.to_owned();
    open.change(VolumeOp::Create { name, blocks: 4000, unit: 1, uuid: 7, checksums: false })
        .unwrap();
}

fn delete(open: &OpenPool, name: &str) {
    open.change(VolumeOp::Delete { name: name.to_owned(), orphan: false }).unwrap();
}

/// A pool with a volume whose map is large, and snapshots that share parts of it.
fn bench(size: &str) -> Bench {
    let bench = Bench::new(size);
    bench.store().change(VolumeOp::Thresholds { percent: [90, 95] }).unwrap();
    make(&bench.store(), "v");
    for round in 1..=3 {
        write(&bench, "v", round);
        let name = format!("s{round}");
        bench.store().change(VolumeOp::Snapshot { volume: "v".into(), name, uuid: 3 }).unwrap();
    }
    bench
}

/// Writes about every third block.
fn write(bench: &Bench, name: &str, round: u8) {
    let opened = bench.open(name).unwrap();
    let mut hand = bench.hand(&*opened.medium, 0);
    for part in 0..400 {
        hand.write(part * 7 + u64::from(round), 1, round);
    }
    assert_eq!(hand.run(tenmil_base::Operation::Flush, 0, 0), IoStatus::SUCCESS);
}

fn is_clean(checked: &PoolCheckResult) -> bool {
    checked.damaged.is_empty() && checked.report.findings.is_empty()
}

#[test]
fn a_check_sees_the_state_that_it_began_with_whatever_is_written_meanwhile() {
    let bench = bench("16m");
    let (open, opener) = (bench.store(), bench.opener());
    let (generation, before) = (open.generation(), open.usage().unwrap().unwrap());
    let mut looks = 0;
    let checked = open
        .check(&opener, &mut |(done, whole)| {
            assert!(done <= whole);
            looks += 1;
            if looks <= 20 {
                let name = format!("n{looks}");
                make(&open, &name);
                write(&bench, &name, 4);
                delete(&open, &name);
            }
            true
        })
        .unwrap();
    assert!(is_clean(&checked), "{:?} {:?}", checked.damaged, checked.report.findings);
    assert_eq!((checked.generation, checked.report.volumes), (generation, 4));
    assert!(looks > 10 && open.generation() > generation + 10, "{looks}");
    assert!(open.wait_for_reclaim(tenmil_base::Span::from_secs(30)));
    let after = open.check(&opener, &mut |_| true).unwrap();
    assert!(is_clean(&after) && after.generation > generation);
    // Nothing is pinned any more.
    let now = open.usage().unwrap().unwrap();
    assert!(now.free + 64 >= before.free, "{now:?} {before:?}");
    let (there, name) = (after.report, open.name());
    let uuid = open.uuid();
    drop(open);
    let place = VolumeRef::on(&bench.device().parse().unwrap());
    let closed = check(&bench.opener(), &place).unwrap();
    assert_eq!((closed.name, closed.uuid), (name, uuid));
    assert_eq!((closed.report.accounts, closed.report.volumes), (there.accounts, there.volumes));
}

#[test]
fn a_check_that_is_stopped_or_needs_the_last_room_gives_back_what_it_held() {
    let bench = bench("8m");
    let (open, opener) = (bench.store(), bench.opener());
    let free = || open.usage().unwrap().unwrap().free;
    let mut room = 0;
    let refused = open.check(&opener, &mut |_| {
        for _ in 0..12 {
            let change = |name: &str| VolumeOp::Rename { name: name.into(), to: "w".into() };
            open.change(change("v")).unwrap();
            let back = VolumeOp::Rename { name: "w".into(), to: "v".into() };
            open.change(back).unwrap();
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
    assert!(is_clean(&open.check(&opener, &mut |_| true).unwrap()));
}

#[test]
fn damage_is_found_while_the_store_is_open_and_is_that_which_is_found_when_it_is_not() {
    let bench = bench("16m");
    let open = bench.store();
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
    let place = VolumeRef::on(&bench.device().parse().unwrap());
    let closed = check(&bench.opener(), &place).unwrap();
    assert_eq!((found.generation, found.report.findings), (generation, closed.report.findings));
}
