//! Device Self-test: its results, what ends it, and the log.

use tenmil_base::{Durability, Operation};
use tenmil_wire::admin::{
    AsynchronousEventRequest, DeviceSelfTest, FormatNvm, GetLogPage, SelfTestCode,
};
use tenmil_wire::log::LogPage;
use tenmil_wire::log::self_test::{SelfTestOutcome, SelfTestPage, SelfTestResult};
use tenmil_wire::{Layout, Status, TypedCommand};

use super::fixture::{BLOCKS, ControllerFixture, FakeBlockDevice};

fn self_test_command(stc: SelfTestCode, nsid: u32) -> DeviceSelfTest {
    DeviceSelfTest { nsid, stc, dstp: 0 }
}

fn self_test_page(bench: &mut ControllerFixture) -> SelfTestPage {
    let bytes = bench.run_for_data(GetLogPage::new(LogPage::SelfTest.code(), 564)).unwrap();
    SelfTestPage::parse(&bytes).unwrap()
}

fn newest_result(bench: &mut ControllerFixture) -> SelfTestResult {
    self_test_page(bench).results().next().unwrap()
}

#[test]
fn self_test_of_a_healthy_device_passes() {
    for code in [SelfTestCode::Short, SelfTestCode::Extended] {
        for nsid in [0, 1, u32::MAX] {
            let mut bench = ControllerFixture::new();
            bench.run_without_data(self_test_command(code, nsid)).unwrap();
            assert_eq!(self_test_page(&mut bench).current_code(), code);
            bench.poll_times(200);
            let result = newest_result(&mut bench);
            assert_eq!((result.outcome(), result.code()), (SelfTestOutcome::Passed, code));
            assert_eq!(result.valid(), 0);
            assert_eq!(self_test_page(&mut bench).current_code(), SelfTestCode::None);
        }
    }
}

#[test]
fn short_self_test_reads_both_ends_and_extended_reads_all() {
    let middle = BLOCKS / 2;
    for (code, lba, found) in [
        (SelfTestCode::Short, middle, false),
        (SelfTestCode::Short, 0, true),
        (SelfTestCode::Short, BLOCKS - 1, true),
        (SelfTestCode::Extended, middle, true),
    ] {
        let mut bench = ControllerFixture::new();
        bench.shelves[0].fail_request_at(lba);
        bench.submit(&AsynchronousEventRequest {}.to_command(), &[]);
        bench.run_without_data(self_test_command(code, 1)).unwrap();
        bench.poll_times(200);
        let result = newest_result(&mut bench);
        let failed = result.outcome() == SelfTestOutcome::FailedSegment;
        assert_eq!(failed, found, "{code:?} {lba}");
        assert_eq!(
            bench.controller.next_async_event_dword0().is_some(),
            found,
            "a failure is an event"
        );
        if found {
            assert_eq!((result.nsid(), result.sct(), result.sc()), (1, 2, 0x81));
            let request = result.flba()..result.flba() + 64;
            assert!(request.contains(&lba), "the request that failed begins at {}", result.flba());
            assert_eq!(result.valid(), 0b1111);
        }
    }
}

#[test]
fn only_one_self_test_runs_and_can_be_aborted() {
    let mut bench = ControllerFixture::new();
    bench.run_without_data(self_test_command(SelfTestCode::Extended, 1)).unwrap();
    bench.poll_times(10);
    let percent = self_test_page(&mut bench).completion_percent();
    assert!((1..100).contains(&percent), "{percent} %");
    let second = bench.run_without_data(self_test_command(SelfTestCode::Short, 1));
    assert_eq!(second, Err(Status::SELF_TEST_IN_PROGRESS));
    bench.run_without_data(self_test_command(SelfTestCode::Abort, 0)).unwrap();
    assert_eq!(newest_result(&mut bench).outcome(), SelfTestOutcome::AbortedByCommand);
    bench.run_without_data(self_test_command(SelfTestCode::Abort, 0)).unwrap();
    assert_eq!(self_test_page(&mut bench).results().count(), 1, "nothing ran");
}

#[test]
fn reset_aborts_a_short_self_test_only() {
    for (code, results) in [(SelfTestCode::Short, true), (SelfTestCode::Extended, false)] {
        let mut bench = ControllerFixture::new();
        bench.run_without_data(self_test_command(code, 1)).unwrap();
        bench.controller.reset(bench.now);
        let running = self_test_page(&mut bench).current_code() != SelfTestCode::None;
        assert_eq!(running, !results);
        bench.poll_times(200);
        let expected =
            if results { SelfTestOutcome::AbortedByReset } else { SelfTestOutcome::Passed };
        assert_eq!(newest_result(&mut bench).outcome(), expected);
    }
}

#[test]
fn format_aborts_the_self_test_of_its_namespace() {
    for (tested, expected) in [(1, 1), (u32::MAX, 1), (2, 0), (0, 0)] {
        let mut bench =
            ControllerFixture::with_devices(vec![FakeBlockDevice::new(), FakeBlockDevice::new()]);
        bench.run_without_data(self_test_command(SelfTestCode::Extended, tested)).unwrap();
        bench.submit(&FormatNvm { nsid: 1, ..FormatNvm::default() }.to_command(), &[]);
        let ended = self_test_page(&mut bench)
            .results()
            .filter(|result| result.outcome() == SelfTestOutcome::AbortedByFormat)
            .count();
        assert_eq!(ended, expected, "{tested:#x}");
    }
}

#[test]
fn removing_a_namespace_aborts_its_self_test() {
    let mut bench =
        ControllerFixture::with_devices(vec![FakeBlockDevice::new(), FakeBlockDevice::new()]);
    bench.run_without_data(self_test_command(SelfTestCode::Extended, u32::MAX)).unwrap();
    bench.poll_times(3);
    bench.subsystem.remove_namespace(2);
    bench.poll_times(500);
    assert_eq!(newest_result(&mut bench).outcome(), SelfTestOutcome::AbortedByRemoval);
}

#[test]
fn last_twenty_self_test_results_are_kept() {
    let mut bench = ControllerFixture::new();
    for _ in 0..25 {
        bench.run_without_data(self_test_command(SelfTestCode::Short, 0)).unwrap();
        bench.poll_times(2);
    }
    bench.run_without_data(self_test_command(SelfTestCode::Extended, 0)).unwrap();
    bench.poll_times(2);
    let page = self_test_page(&mut bench);
    assert_eq!(page.results().count(), 20);
    let codes: Vec<_> = page.results().map(|result| result.code()).take(2).collect();
    assert_eq!(codes, [SelfTestCode::Extended, SelfTestCode::Short]);
}

#[test]
fn invalid_self_test_code_or_namespace_is_rejected() {
    let mut bench = ControllerFixture::new();
    for code in [0, 3, 4, 0xe] {
        let code = SelfTestCode::from_code(code);
        assert_eq!(
            bench.run_without_data(self_test_command(code, 0)),
            Err(Status::INVALID_FIELD),
            "{code:?}"
        );
    }
    assert_eq!(
        bench.run_without_data(self_test_command(SelfTestCode::Short, 2)),
        Err(Status::INVALID_FIELD)
    );
    let beyond = bench.run_without_data(self_test_command(SelfTestCode::Short, 1025));
    assert_eq!(beyond, Err(Status::INVALID_NAMESPACE_OR_FORMAT));
}

#[test]
fn self_test_flushes_a_device_without_verify() {
    let shelf = FakeBlockDevice::with_block_size(
        512,
        &[Operation::Read, Operation::Flush],
        Durability::Persistent,
    );
    let mut bench = ControllerFixture::with_devices(vec![shelf]);
    bench.run_without_data(self_test_command(SelfTestCode::Extended, 1)).unwrap();
    bench.poll_times(10);
    assert_eq!(newest_result(&mut bench).outcome(), SelfTestOutcome::Passed);
    assert_eq!(bench.shelves[0].flush_count(), 1);
}
