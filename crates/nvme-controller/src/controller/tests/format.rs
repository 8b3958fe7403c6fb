//! Format NVM: its results, its progress, and the commands that it rejects.

use tenmil_base::{Durability, Operation};
use tenmil_wire::admin::{DeviceSelfTest, FormatNvm, SecureErase, SelfTestCode, SetFeatures};
use tenmil_wire::feature::Feature;
use tenmil_wire::{Status, TypedCommand};

use super::bench::{BLOCKS, Bench, EVERYTHING, Shelf, ended};
use crate::controller::interface::AdminOutcome;
use crate::controller::{AnaState, ControllerConfig};

fn format(nsid: u32, index: u8) -> FormatNvm {
    FormatNvm { nsid, ..FormatNvm::default() }.with_format(index)
}

fn begin(bench: &mut Bench, command: FormatNvm) {
    let step = bench.step(&command.to_command().with_cid(77), &[]).0;
    assert_eq!(step, AdminOutcome::Deferred);
}

/// Block size as a power of two, number of blocks, and the status of rejected commands.
fn seen(bench: &Bench, nsid: u32) -> (u8, u64, Option<Status>) {
    let reader = bench.controller.namespaces().reader();
    let namespace = reader.get().get(nsid).unwrap().clone();
    (namespace.block_shift, namespace.block_count, namespace.unavailable)
}

#[test]
fn a_format_erases_every_block_flushes_and_changes_the_block_size() {
    for (index, shift, blocks) in [(0, 9, BLOCKS), (1, 12, BLOCKS / 8)] {
        for ses in [SecureErase::None, SecureErase::UserData] {
            let mut bench = Bench::new();
            begin(&mut bench, FormatNvm { ses, ..format(1, index) });
            assert_eq!(bench.wait(), (77, Ok(0)));
            assert_eq!(seen(&bench, 1), (shift, blocks, None));
            assert_eq!((bench.shelves[0].unerased(), bench.shelves[0].flushes()), (0, 1));
        }
    }
}

#[test]
fn while_a_format_runs_the_namespace_cannot_be_used() {
    let mut bench = Bench::over(vec![Shelf::new(), Shelf::new()]);
    begin(&mut bench, format(1, 0));
    assert_eq!(seen(&bench, 1).2, Some(Status::FORMAT_IN_PROGRESS));
    assert_eq!(seen(&bench, 2).2, None);
    bench.turns(3);
    assert!(bench.shelves[0].unerased() > 0, "it takes more than three turns");
    assert_eq!(bench.run(format(2, 0)), Err(Status::FORMAT_IN_PROGRESS));
    let test = DeviceSelfTest { nsid: 1, stc: SelfTestCode::Short, ..DeviceSelfTest::default() };
    assert_eq!(bench.run(test), Err(Status::FORMAT_IN_PROGRESS));
    assert_eq!(bench.wait().1, Ok(0));
    assert_eq!((bench.shelves[0].unerased(), bench.shelves[1].unerased()), (0, 2048));
}

#[test]
fn all_ones_formats_every_namespace() {
    let mut bench = Bench::over(vec![Shelf::new(), Shelf::new()]);
    begin(&mut bench, format(u32::MAX, 1));
    assert_eq!(bench.wait(), (77, Ok(0)));
    for nsid in [1, 2] {
        assert_eq!(seen(&bench, nsid).0, 12);
    }
    assert!(bench.shelves.iter().all(|shelf| shelf.unerased() == 0));
}

#[test]
fn every_field_that_cannot_be_is_refused() {
    let cases = [
        (format(0, 0), Status::INVALID_NAMESPACE_OR_FORMAT),
        (format(1025, 0), Status::INVALID_NAMESPACE_OR_FORMAT),
        (format(2, 0), Status::INVALID_FIELD),
        (format(1, 2), Status::INVALID_FORMAT),
        (format(1, 63), Status::INVALID_FORMAT),
        (FormatNvm { pi: 1, ..format(1, 0) }, Status::INVALID_FORMAT),
        (FormatNvm { mset: true, ..format(1, 0) }, Status::INVALID_FORMAT),
        (FormatNvm { ses: SecureErase::Cryptographic, ..format(1, 0) }, Status::INVALID_FIELD),
        (FormatNvm { ses: SecureErase::Reserved(3), ..format(1, 0) }, Status::INVALID_FIELD),
    ];
    let mut bench = Bench::new();
    for (format, status) in cases {
        assert_eq!(bench.run(format), Err(status), "{format:?}");
    }
    assert_eq!((bench.shelves[0].unerased(), seen(&bench, 1).2), (2048, None));
}

#[test]
fn one_that_cannot_be_formatted_stops_all_of_them() {
    let large = Shelf::with(4096, &EVERYTHING, Durability::Persistent);
    let mut bench = Bench::over(vec![Shelf::new(), large]);
    assert_eq!(bench.run(format(u32::MAX, 1)), Err(Status::INVALID_FORMAT));
    assert_eq!(bench.shelves[0].unerased(), 2048);
    assert_eq!(seen(&bench, 1).2, None);
}

#[test]
fn what_is_protected_or_out_of_reach_is_not_formatted() {
    let mut bench = Bench::with(
        vec![Shelf::new()],
        |config| config.ana_groups = 1,
        ControllerConfig::default(),
    );
    let protect = |state| SetFeatures {
        nsid: 1,
        fid: Feature::NamespaceWriteProtection.code(),
        cdw11: state,
        ..SetFeatures::default()
    };
    bench.run(protect(1)).unwrap();
    assert_eq!(bench.run(format(1, 0)), Err(Status::NAMESPACE_WRITE_PROTECTED));
    bench.run(protect(0)).unwrap();
    for (state, status) in [
        (AnaState::Inaccessible, Status::ANA_INACCESSIBLE),
        (AnaState::PersistentLoss, Status::ANA_PERSISTENT_LOSS),
        (AnaState::Change, Status::ANA_TRANSITION),
    ] {
        bench.subsystem.set_ana_state(1, 1, state);
        assert_eq!(bench.run(format(1, 0)), Err(status));
        assert_eq!(seen(&bench, 1).2, Some(status));
    }
    bench.subsystem.set_ana_state(1, 1, AnaState::NonOptimized);
    begin(&mut bench, format(1, 0));
}

#[test]
fn a_medium_that_fails_fails_the_format_and_frees_the_namespaces() {
    let mut bench = Bench::over(vec![Shelf::new(), Shelf::new()]);
    bench.shelves[1].fail_at(1000);
    begin(&mut bench, format(u32::MAX, 1));
    let (cid, end) = bench.wait();
    assert_eq!((cid, end), (77, Err(Status::UNRECOVERED_READ_ERROR)));
    for nsid in [1, 2] {
        assert_eq!(seen(&bench, nsid), (9, BLOCKS, None), "as it was");
    }
}

#[test]
fn a_reset_leaves_the_format_running_but_answers_nobody() {
    let mut bench = Bench::new();
    begin(&mut bench, format(1, 1));
    bench.controller.reset(bench.now);
    assert_eq!(seen(&bench, 1).2, Some(Status::FORMAT_IN_PROGRESS));
    bench.turns(1000);
    assert_eq!(bench.controller.next_deferred_completion(), None);
    assert_eq!(seen(&bench, 1), (12, BLOCKS / 8, None));
}

#[test]
fn a_controller_that_goes_away_gives_its_format_up() {
    let bench = Bench::new();
    let mut other = bench.second(2);
    let command = format(1, 1).to_command();
    let step = super::bench::step(&mut other, bench.now, &command, &[]).0;
    assert_eq!(step, AdminOutcome::Deferred);
    assert_eq!(seen(&bench, 1).2, Some(Status::FORMAT_IN_PROGRESS));
    drop(other);
    assert_eq!(seen(&bench, 1), (9, BLOCKS, None));
}

#[test]
fn without_write_zeroes_there_is_no_format() {
    let shelf = Shelf::with(512, &[Operation::Read, Operation::Write], Durability::Persistent);
    let mut bench = Bench::over(vec![shelf]);
    let step = bench.step(&format(1, 0).to_command(), &[]).0;
    assert_eq!(ended(step), Err(Status::INVALID_OPCODE));
}
