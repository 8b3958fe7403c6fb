//! Volumes that are made thick while they are in use.

use tenmil_base::{IoStatus, Operation};
use tenmil_linux::NamedThread;

use super::{PoolFixture, VolumeOp, VolumeTestChannel};

fn snapshot(bench: &PoolFixture, name: &str) {
    let (volume, name) = ("a".into(), name.into());
    bench.open_pool().execute_volume_op(VolumeOp::Snapshot { volume, name, uuid: 1 }).unwrap();
}

#[test]
fn volume_is_inflated_under_load() {
    let bench = PoolFixture::new("160m");
    bench.create_volume("a", 4096);
    let opened = bench.open_volume("a").unwrap();
    let mut hand = bench.volume_client(&*opened.medium, 0);
    (0..16).for_each(|part| hand.write(part * 256, 32, 1));
    snapshot(&bench, "s");
    let write = |number: u32| {
        let mut hand = bench.volume_client(&*opened.medium, number);
        let body = move |stop: &tenmil_linux::StopFlag| {
            let mut round = 1;
            while !stop.is_stopped() {
                round = if round == 200 { 2 } else { round + 1 };
                let first = u64::from(number) * 1024;
                hand.write(first + u64::from(round) * 4, 8, round);
                assert_eq!(hand.read(first + u64::from(round) * 4, 8), [round; 8]);
                assert_eq!(
                    hand.run_request(Operation::Deallocate, first + 1000, 8),
                    IoStatus::SUCCESS
                );
            }
            round
        };
        NamedThread::spawn("writer", None, body).unwrap()
    };
    let writers: Vec<NamedThread<u8>> = (0..3).map(write).collect();
    let store = bench.open_pool();
    for round in 0..4 {
        let inflated = store.inflate(&bench.opener(), "a", None, &mut |_| true).unwrap();
        assert!(inflated.info.is_thick && !inflated.was_there);
        snapshot(&bench, &format!("s{round}"));
    }
    for (number, writer) in (0_u64..).zip(writers) {
        let round = writer.stop();
        let first = number * 1024 + u64::from(round) * 4;
        assert_eq!(bench.volume_client(&*opened.medium, 4).read(first, 8), [round; 8]);
    }
    let snapshot = bench.open_volume("s").unwrap();
    let mut kept = bench.volume_client(&*snapshot.medium, 5);
    for part in 0..16 {
        assert_eq!(kept.read(part * 256, 32), [1; 32], "the snapshot is what it was");
        assert_eq!(kept.read(part * 256 + 32, 32), [0; 32]);
    }
    store.inflate(&bench.opener(), "a", None, &mut |_| true).unwrap();
    assert_eq!(store.volume_usage("a").unwrap().exclusive_blocks(), 4096);
    assert!(
        store
            .inflate(&bench.opener(), "a", None, &mut |_| panic!("there is nothing to do"))
            .unwrap()
            .was_there
    );
    drop((hand, kept, store, opened, snapshot));
    assert!(bench.check_finds_nothing());
}

#[test]
fn interrupted_inflate_resumes_and_keeps_its_reservation() {
    let bench = PoolFixture::new("16m");
    bench.create_volume("a", 1024);
    bench.create_volume("full", 1 << 20);
    let opened = bench.open_volume("a").unwrap();
    let mut hand = bench.volume_client(&*opened.medium, 0);
    (0..8).for_each(|part| hand.write(part * 32, 32, 7));
    snapshot(&bench, "s");
    let store = bench.open_pool();
    let mut steps = 0;
    let error = store
        .inflate(&bench.opener(), "a", None, &mut |_| std::mem::replace(&mut steps, 1) > 0)
        .unwrap_err();
    assert!(error.to_string().contains("repeat it to resume"), "{error}");
    let others = bench.open_volume("full").unwrap();
    let mut other: VolumeTestChannel = bench.volume_client(&*others.medium, 1);
    let mut at = 0;
    while other.run_request(Operation::Write, at, 16) == IoStatus::SUCCESS {
        at += 16;
    }
    store.inflate(&bench.opener(), "a", None, &mut |_| true).unwrap();
    (0..1024).for_each(|block| hand.write(block * 389 % 1024, 1, 9));
    (0..32).for_each(|part| assert_eq!(hand.read(part * 32, 32), [9; 32]));
    drop((hand, other, store, opened, others));
    assert!(bench.check_finds_nothing());
}
