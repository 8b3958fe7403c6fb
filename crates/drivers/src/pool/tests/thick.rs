//! Volumes that are made thick while they are in use.

use tenmil_base::{IoStatus, Operation};
use tenmil_linux::NamedThread;

use super::{Bench, Hand, VolumeOp};

fn snapshot(bench: &Bench, name: &str) {
    let (volume, name) = ("a".into(), name.into());
    bench.store().change(VolumeOp::Snapshot { volume, name, uuid: 1 }).unwrap();
}

#[test]
fn a_volume_becomes_thick_while_others_write_to_it_and_loses_nothing() {
    let bench = Bench::new("160m");
    bench.create("a", 4096);
    let opened = bench.open("a").unwrap();
    let mut hand = bench.hand(&*opened.medium, 0);
    (0..16).for_each(|part| hand.write(part * 256, 32, 1));
    snapshot(&bench, "s");
    let write = |number: u32| {
        let mut hand = bench.hand(&*opened.medium, number);
        let body = move |stop: &tenmil_linux::StopFlag| {
            let mut round = 1;
            while !stop.is_stopped() {
                round = if round == 200 { 2 } else { round + 1 };
                let first = u64::from(number) * 1024;
                hand.write(first + u64::from(round) * 4, 8, round);
                assert_eq!(hand.read(first + u64::from(round) * 4, 8), [round; 8]);
                assert_eq!(hand.run(Operation::Deallocate, first + 1000, 8), IoStatus::SUCCESS);
            }
            round
        };
        NamedThread::spawn("writer", None, body).unwrap()
    };
    let writers: Vec<NamedThread<u8>> = (0..3).map(write).collect();
    let store = bench.store();
    for round in 0..4 {
        let inflated = store.inflate(&bench.opener(), "a", None, &mut |_| true).unwrap();
        assert!(inflated.info.is_thick && !inflated.was_there);
        snapshot(&bench, &format!("s{round}"));
    }
    for (number, writer) in (0_u64..).zip(writers) {
        let round = writer.stop();
        let first = number * 1024 + u64::from(round) * 4;
        assert_eq!(bench.hand(&*opened.medium, 4).read(first, 8), [round; 8]);
    }
    let snapshot = bench.open("s").unwrap();
    let mut kept = bench.hand(&*snapshot.medium, 5);
    for part in 0..16 {
        assert_eq!(kept.read(part * 256, 32), [1; 32], "the snapshot is what it was");
        assert_eq!(kept.read(part * 256 + 32, 32), [0; 32]);
    }
    store.inflate(&bench.opener(), "a", None, &mut |_| true).unwrap();
    assert_eq!(store.account("a").unwrap().own(), 4096);
    assert!(
        store
            .inflate(&bench.opener(), "a", None, &mut |_| panic!("there is nothing to do"))
            .unwrap()
            .was_there
    );
    drop((hand, kept, store, opened, snapshot));
    assert!(bench.is_clean());
}

#[test]
fn one_that_is_interrupted_goes_on_and_keeps_room_in_a_full_store() {
    let bench = Bench::new("16m");
    bench.create("a", 1024);
    bench.create("full", 1 << 20);
    let opened = bench.open("a").unwrap();
    let mut hand = bench.hand(&*opened.medium, 0);
    (0..8).for_each(|part| hand.write(part * 32, 32, 7));
    snapshot(&bench, "s");
    let store = bench.store();
    let mut steps = 0;
    let error = store
        .inflate(&bench.opener(), "a", None, &mut |_| std::mem::replace(&mut steps, 1) > 0)
        .unwrap_err();
    assert!(error.to_string().contains("repeat it to resume"), "{error}");
    let others = bench.open("full").unwrap();
    let mut other: Hand = bench.hand(&*others.medium, 1);
    let mut at = 0;
    while other.run(Operation::Write, at, 16) == IoStatus::SUCCESS {
        at += 16;
    }
    store.inflate(&bench.opener(), "a", None, &mut |_| true).unwrap();
    (0..1024).for_each(|block| hand.write(block * 389 % 1024, 1, 9));
    (0..32).for_each(|part| assert_eq!(hand.read(part * 32, 32), [9; 32]));
    drop((hand, other, store, opened, others));
    assert!(bench.is_clean());
}
