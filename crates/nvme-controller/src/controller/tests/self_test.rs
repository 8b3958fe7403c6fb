//! Device Self-test: its results, what ends it, and the log.

use tenmil_base::{Durability, Operation};
use tenmil_wire::admin::{
    AsynchronousEventRequest, DeviceSelfTest, FormatNvm, GetLogPage, SelfTestCode,
};
use tenmil_wire::log::LogPage;
use tenmil_wire::log::self_test::{SelfTestOutcome, SelfTestPage, SelfTestResult};
use tenmil_wire::{Layout, Status, TypedCommand};

use super::bench::{BLOCKS, Bench, Shelf};

fn start(stc: SelfTestCode, nsid: u32) -> DeviceSelfTest {
    DeviceSelfTest { nsid, stc, dstp: 0 }
}

fn page(bench: &mut Bench) -> SelfTestPage {
    let bytes = bench.get(GetLogPage::new(LogPage::SelfTest.code(), 564)).unwrap();
    SelfTestPage::parse(&bytes).unwrap()
}

fn newest(bench: &mut Bench) -> SelfTestResult {
    page(bench).results().next().unwrap()
}

#[test]
fn a_test_of_a_medium_that_is_well_passes() {
    for code in [SelfTestCode::Short, SelfTestCode::Extended] {
        for nsid in [0, 1, u32::MAX] {
            let mut bench = Bench::new();
            bench.run(start(code, nsid)).unwrap();
            assert_eq!(page(&mut bench).current_code(), code);
            bench.turns(200);
            let result = newest(&mut bench);
            assert_eq!((result.outcome(), result.code()), (SelfTestOutcome::Passed, code));
            assert_eq!(result.valid(), 0);
            assert_eq!(page(&mut bench).current_code(), SelfTestCode::None);
        }
    }
}

#[test]
fn a_short_test_reads_the_ends_and_an_extended_one_everything() {
    let middle = BLOCKS / 2;
    for (code, lba, found) in [
        (SelfTestCode::Short, middle, false),
        (SelfTestCode::Short, 0, true),
        (SelfTestCode::Short, BLOCKS - 1, true),
        (SelfTestCode::Extended, middle, true),
    ] {
        let mut bench = Bench::new();
        bench.shelves[0].fail_at(lba);
        bench.step(&AsynchronousEventRequest {}.to_command(), &[]);
        bench.run(start(code, 1)).unwrap();
        bench.turns(200);
        let result = newest(&mut bench);
        let failed = result.outcome() == SelfTestOutcome::FailedSegment;
        assert_eq!(failed, found, "{code:?} {lba}");
        assert_eq!(bench.controller.next_event().is_some(), found, "a failure is an event");
        if found {
            assert_eq!((result.nsid(), result.sct(), result.sc()), (1, 2, 0x81));
            let request = result.flba()..result.flba() + 64;
            assert!(request.contains(&lba), "the request that failed begins at {}", result.flba());
            assert_eq!(result.valid(), 0b1111);
        }
    }
}

#[test]
fn only_one_test_runs_and_a_command_ends_it() {
    let mut bench = Bench::new();
    bench.run(start(SelfTestCode::Extended, 1)).unwrap();
    bench.turns(10);
    let percent = page(&mut bench).completion_percent();
    assert!((1..100).contains(&percent), "{percent} %");
    let second = bench.run(start(SelfTestCode::Short, 1));
    assert_eq!(second, Err(Status::SELF_TEST_IN_PROGRESS));
    bench.run(start(SelfTestCode::Abort, 0)).unwrap();
    assert_eq!(newest(&mut bench).outcome(), SelfTestOutcome::AbortedByCommand);
    bench.run(start(SelfTestCode::Abort, 0)).unwrap();
    assert_eq!(page(&mut bench).results().count(), 1, "nothing ran");
}

#[test]
fn a_reset_ends_a_short_test_and_not_an_extended_one() {
    for (code, results) in [(SelfTestCode::Short, true), (SelfTestCode::Extended, false)] {
        let mut bench = Bench::new();
        bench.run(start(code, 1)).unwrap();
        bench.controller.reset(bench.now);
        let running = page(&mut bench).current_code() != SelfTestCode::None;
        assert_eq!(running, !results);
        bench.turns(200);
        let expected =
            if results { SelfTestOutcome::AbortedByReset } else { SelfTestOutcome::Passed };
        assert_eq!(newest(&mut bench).outcome(), expected);
    }
}

#[test]
fn a_format_ends_the_test_of_its_namespace() {
    for (tested, expected) in [(1, 1), (u32::MAX, 1), (2, 0), (0, 0)] {
        let mut bench = Bench::over(vec![Shelf::new(), Shelf::new()]);
        bench.run(start(SelfTestCode::Extended, tested)).unwrap();
        bench.step(&FormatNvm { nsid: 1, ..FormatNvm::default() }.to_command(), &[]);
        let ended = page(&mut bench)
            .results()
            .filter(|result| result.outcome() == SelfTestOutcome::AbortedByFormat)
            .count();
        assert_eq!(ended, expected, "{tested:#x}");
    }
}

#[test]
fn a_namespace_that_is_removed_ends_its_test() {
    let mut bench = Bench::over(vec![Shelf::new(), Shelf::new()]);
    bench.run(start(SelfTestCode::Extended, u32::MAX)).unwrap();
    bench.turns(3);
    bench.subsystem.remove_namespace(2);
    bench.turns(500);
    assert_eq!(newest(&mut bench).outcome(), SelfTestOutcome::AbortedByRemoval);
}

#[test]
fn the_last_twenty_results_are_kept() {
    let mut bench = Bench::new();
    for _ in 0..25 {
        bench.run(start(SelfTestCode::Short, 0)).unwrap();
        bench.turns(2);
    }
    bench.run(start(SelfTestCode::Extended, 0)).unwrap();
    bench.turns(2);
    let page = page(&mut bench);
    assert_eq!(page.results().count(), 20);
    let codes: Vec<_> = page.results().map(|result| result.code()).take(2).collect();
    assert_eq!(codes, [SelfTestCode::Extended, SelfTestCode::Short]);
}

#[test]
fn codes_and_namespaces_that_are_not_there_are_refused() {
    let mut bench = Bench::new();
    for code in [0, 3, 4, 0xe] {
        let code = SelfTestCode::from_code(code);
        assert_eq!(bench.run(start(code, 0)), Err(Status::INVALID_FIELD), "{code:?}");
    }
    assert_eq!(bench.run(start(SelfTestCode::Short, 2)), Err(Status::INVALID_FIELD));
    let beyond = bench.run(start(SelfTestCode::Short, 1025));
    assert_eq!(beyond, Err(Status::INVALID_NAMESPACE_OR_FORMAT));
}

#[test]
fn a_medium_that_cannot_verify_is_flushed() {
    let shelf = Shelf::with(512, &[Operation::Read, Operation::Flush], Durability::Persistent);
    let mut bench = Bench::over(vec![shelf]);
    bench.run(start(SelfTestCode::Extended, 1)).unwrap();
    bench.turns(10);
    assert_eq!(newest(&mut bench).outcome(), SelfTestOutcome::Passed);
    assert_eq!(bench.shelves[0].flushes(), 1);
}
