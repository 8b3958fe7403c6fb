//! Pools on devices that lose writes, or fail temporarily, and continue.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tenmil_base::{IoStatus, Operation};

use super::super::page_io::BlockingPageIo;
use super::super::subscribe_stops;
use super::PoolFixture;
use crate::file::failing_sync_file::FailingSyncFileType;
use crate::{FaultControl, FaultRule};
use tenmil_block::{OpenedDevice, Opener};

fn open_volume_over_fault(bench: &PoolFixture, name: &str) -> OpenedDevice {
    let uri = format!("volume:[fault:[{}]]/{name}", bench.device_uri());
    bench.opener().open(&uri.parse().unwrap()).unwrap()
}

/// Injects faults below a volume.
fn set_fault_rules(opened: &OpenedDevice, rules: &str) {
    let handle = opened.handles.iter().find_map(|control| control.downcast::<FaultControl>());
    handle.unwrap().set_rules(FaultRule::parse_all(rules).unwrap());
}

#[test]
fn loss_fails_one_flush_per_channel_and_the_pool_continues() {
    let bench = PoolFixture::new("16m");
    bench.create_volume("v", 500);
    let opened = open_volume_over_fault(&bench, "v");
    let mut hands: Vec<_> =
        (0..3).map(|number| bench.volume_client(&*opened.medium, number)).collect();
    for (first, hand) in (0..).zip(&mut hands) {
        hand.write(first * 32, 32, 1);
        assert_eq!(hand.run_request(Operation::Flush, 0, 0), IoStatus::SUCCESS);
        hand.write(first * 32 + 200, 32, 2);
    }
    for round in 0..3 {
        set_fault_rules(&opened, "error:flushx1");
        for hand in &mut hands {
            assert_eq!(
                hand.run_request(Operation::Flush, 0, 0),
                IoStatus::WRITE_FAULT,
                "round {round}"
            );
            assert_eq!(
                hand.run_request(Operation::Flush, 0, 0),
                IoStatus::SUCCESS,
                "round {round}"
            );
        }
        for (first, hand) in (0..).zip(&mut hands) {
            assert_eq!(hand.read(first * 32, 32), [1; 32]);
            hand.write(first * 32 + 200, 32, 3);
        }
        let mut late = bench.volume_client(&*opened.medium, 3);
        assert_eq!(
            late.run_request(Operation::Flush, 0, 0),
            IoStatus::SUCCESS,
            "it came after the loss"
        );
        for (first, hand) in (0..).zip(&mut hands) {
            assert_eq!(hand.read(first * 32 + 200, 32), [3; 32], "round {round}");
        }
    }
    bench.snapshot("v", "s");
    drop((hands, opened));
    assert!(bench.check_finds_nothing());
}

#[test]
fn path_errors_are_retried_transparently() {
    let bench = PoolFixture::new("16m");
    bench.create_volume("v", 500);
    let opened = open_volume_over_fault(&bench, "v");
    let mut hand = bench.volume_client(&*opened.medium, 0);
    hand.write(0, 32, 1);
    set_fault_rules(&opened, "error-path:flushx2");
    assert_eq!(hand.run_request(Operation::Flush, 0, 0), IoStatus::SUCCESS);
    hand.write(64, 32, 1);
    set_fault_rules(&opened, "error-internal:flushx1");
    assert_eq!(hand.run_request(Operation::Flush, 0, 0), IoStatus::SUCCESS);
    // A new part of the map, so that pages are written.
    for block in (100..400).step_by(50) {
        hand.write(block, 16, 1);
    }
    set_fault_rules(&opened, "error-path:write@0-300x2");
    assert_eq!(hand.run_request(Operation::Flush, 0, 0), IoStatus::SUCCESS);
    assert_eq!(bench.open_pool().shared.write_loss_count(), 0);
    drop((hand, opened));
    assert!(bench.check_finds_nothing());
}

#[test]
fn pool_recovers_after_a_long_device_outage() {
    let bench = PoolFixture::new("16m");
    bench.create_volume("v", 500);
    let opened = open_volume_over_fault(&bench, "v");
    let mut hand = bench.volume_client(&*opened.medium, 0);
    hand.write(0, 32, 1);
    assert_eq!(hand.run_request(Operation::Flush, 0, 0), IoStatus::SUCCESS);
    hand.write(64, 32, 1);
    set_fault_rules(&opened, "error-path:any");
    let store = bench.open_pool();
    assert_eq!((store.stop_reason(), store.write_loss_count()), (None, 0));
    assert_ne!(hand.run_request(Operation::Flush, 0, 0), IoStatus::SUCCESS);
    assert!(store.stop_reason().is_some());
    set_fault_rules(&opened, "error-path:anyx0");
    let until = bench.clock.now().after(tenmil_base::Span::from_secs(60));
    while hand.run_request(Operation::Write, 64, 32) != IoStatus::SUCCESS {
        assert!(bench.clock.now() < until, "it goes on");
        tenmil_linux::named_thread::yield_cpu();
    }
    if hand.run_request(Operation::Flush, 0, 0) != IoStatus::SUCCESS {
        assert_eq!(hand.run_request(Operation::Flush, 0, 0), IoStatus::SUCCESS, "one flush fails");
    }
    assert_eq!(hand.read(0, 32), [1; 32]);
    assert_eq!(store.stop_reason(), None);
    assert!(store.write_loss_count() > 0);
    drop((hand, opened, store));
    assert!(bench.check_finds_nothing());
}

#[test]
fn pool_recovers_without_client_io() {
    let bench = PoolFixture::new("16m");
    bench.create_volume("v", 500);
    let opened = open_volume_over_fault(&bench, "v");
    let mut hand = bench.volume_client(&*opened.medium, 0);
    hand.write(0, 32, 1);
    set_fault_rules(&opened, "error-path:any");
    assert_ne!(hand.run_request(Operation::Flush, 0, 0), IoStatus::SUCCESS);
    let store = bench.open_pool();
    // Until the attempt that follows at once has failed as well.
    let until = bench.clock.now().after(tenmil_base::Span::from_secs(60));
    let wait_for = |is_so: &dyn Fn() -> bool| {
        while !is_so() {
            assert!(bench.clock.now() < until, "{:?}", store.stop_reason());
            tenmil_linux::named_thread::yield_cpu();
        }
    };
    wait_for(&|| {
        let state = store.shared.lock();
        state.store.is_stopped() && !state.store.is_recovering()
    });
    set_fault_rules(&opened, "error-path:anyx0");
    wait_for(&|| store.stop_reason().is_none());
    assert_eq!(hand.read(0, 32).len(), 32);
}

/// A volume on a file whose flushes can be made to fail.
fn open_volume_on_failing_file(
    bench: &PoolFixture,
    kind: &FailingSyncFileType,
    fields: &str,
) -> OpenedDevice {
    let opener =
        Opener { kinds: &crate::tests::device_types_with(&[("failing", kind)]), ..bench.opener() };
    let path = bench.directory.path().join("pool");
    let uri = format!("volume:[failing:{}{fields}]/v", path.display());
    opener.open(&uri.parse().unwrap()).unwrap()
}

#[test]
fn pool_on_a_file_continues_after_a_failed_fsync() {
    let bench = PoolFixture::new("16m");
    bench.create_volume("v", 500);
    let kind = FailingSyncFileType::default();
    let opened = open_volume_on_failing_file(&bench, &kind, "");
    let mut hands: Vec<_> =
        (0..3).map(|number| bench.volume_client(&*opened.medium, number)).collect();
    for (first, hand) in (0..).zip(&mut hands) {
        hand.write(first * 32, 32, 1);
        assert_eq!(hand.run_request(Operation::Flush, 0, 0), IoStatus::SUCCESS);
        hand.write(first * 32 + 200, 32, 2);
    }
    for round in 0..3 {
        kind.fail_next_syncs(1);
        for hand in &mut hands {
            assert_eq!(
                hand.run_request(Operation::Flush, 0, 0),
                IoStatus::WRITE_FAULT,
                "round {round}"
            );
            assert_eq!(
                hand.run_request(Operation::Flush, 0, 0),
                IoStatus::SUCCESS,
                "round {round}"
            );
        }
        for (first, hand) in (0..).zip(&mut hands) {
            assert_eq!(hand.read(first * 32, 32), [1; 32]);
            hand.write(first * 32 + 200, 32, 3);
        }
    }
    drop((hands, opened));
    assert!(bench.check_finds_nothing());
}

#[test]
fn pool_on_a_file_continues_once_fsync_succeeds() {
    let bench = PoolFixture::new("16m");
    bench.create_volume("v", 500);
    let kind = FailingSyncFileType::default();
    let opened = open_volume_on_failing_file(&bench, &kind, "");
    let mut hand = bench.volume_client(&*opened.medium, 0);
    hand.write(0, 32, 1);
    assert_eq!(hand.run_request(Operation::Flush, 0, 0), IoStatus::SUCCESS);
    hand.write(64, 32, 1);
    kind.fail_next_syncs(4);
    let until = bench.clock.now().after(tenmil_base::Span::from_secs(60));
    while hand.run_request(Operation::Write, 64, 32) != IoStatus::SUCCESS
        || hand.run_request(Operation::Flush, 0, 0) != IoStatus::SUCCESS
    {
        assert!(bench.clock.now() < until, "it goes on");
        tenmil_linux::named_thread::yield_cpu();
    }
    assert_eq!(hand.read(0, 32), [1; 32]);
    drop((hand, opened));
    assert!(bench.check_finds_nothing());
}

#[test]
fn buffered_file_pool_stays_stopped_with_a_hint() {
    let bench = PoolFixture::new("16m");
    bench.create_volume("v", 500);
    let kind = FailingSyncFileType::default();
    let opened = open_volume_on_failing_file(&bench, &kind, "?direct=no");
    let opener =
        Opener { kinds: &crate::tests::device_types_with(&[("failing", &kind)]), ..bench.opener() };
    let path = bench.directory.path().join("pool");
    let place = format!("failing:{}?direct=no", path.display()).parse().unwrap();
    let store = super::OpenPool::open(&opener, &super::VolumeRef::pool_on(&place)).unwrap();
    let reports = Arc::new(AtomicU32::new(0));
    for _ in 0..2 {
        let (reports, path) = (Arc::clone(&reports), path.to_string_lossy().into_owned());
        subscribe_stops(move |stop| {
            let is_why = stop.to_string().contains("fix: open it without direct=no");
            if is_why && stop.device.contains(&path) {
                reports.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    let mut hand = bench.volume_client(&*opened.medium, 0);
    hand.write(0, 32, 1);
    kind.fail_next_syncs(1);
    for _ in 0..3 {
        assert_ne!(hand.run_request(Operation::Flush, 0, 0), IoStatus::SUCCESS);
    }
    assert_ne!(hand.run_request(Operation::Write, 64, 32), IoStatus::SUCCESS);
    let said = store.stop_reason().unwrap();
    assert!(said.contains("fix: open it without direct=no"), "{said}");
    let until = bench.clock.now().after(tenmil_base::Span::from_secs(60));
    while reports.load(Ordering::Relaxed) < 2 {
        assert!(bench.clock.now() < until, "the reason is reported to every subscriber");
        tenmil_linux::named_thread::yield_cpu();
    }
    drop((hand, opened, store));
    assert!(bench.check_finds_nothing());
}

#[test]
fn unresponsive_device_gets_no_further_page_reads() {
    let bench = PoolFixture::new("16m");
    let uri: tenmil_block::uri::Uri = format!("fault:[{}]", bench.device_uri()).parse().unwrap();
    let opened = bench.opener().open(&uri).unwrap();
    let geometry = super::super::PageGeometry::from_limits(&uri, &opened.medium.limits()).unwrap();
    let mut raw =
        BlockingPageIo::open(&bench.regions, &bench.clock, &*opened.medium, &geometry).unwrap();
    let mut page = [0; 4096];
    raw.read(0, &mut page).unwrap();
    set_fault_rules(&opened, "hang:readx1");
    raw.time_limit = tenmil_base::Span::from_ms(1);
    assert_eq!(raw.read(1, &mut page), Err(IoStatus::ABORTED));
    // What it answers late is not taken for the answer to another request.
    raw.time_limit = tenmil_base::Span::from_secs(60);
    set_fault_rules(&opened, "");
    for at in 0..3 {
        assert_eq!(raw.read(at, &mut page), Err(IoStatus::ABORTED));
    }
    assert_eq!(raw.flush(), Err(IoStatus::ABORTED));
}
