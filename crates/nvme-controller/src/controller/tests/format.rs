//! Format NVM: its results, its progress, and the commands that it rejects.

use tenmil_base::{Durability, Operation};
use tenmil_wire::admin::{DeviceSelfTest, FormatNvm, SecureErase, SelfTestCode, SetFeatures};
use tenmil_wire::feature::Feature;
use tenmil_wire::{Status, TypedCommand};

use super::fixture::{BLOCKS, ControllerFixture, EVERYTHING, FakeBlockDevice, completed_result};
use crate::controller::transport_interface::AdminOutcome;
use crate::controller::{AnaState, ControllerConfig};

fn format_command(nsid: u32, index: u8) -> FormatNvm {
    FormatNvm { nsid, ..FormatNvm::default() }.with_lba_format_index(index)
}

fn submit_format(bench: &mut ControllerFixture, command: FormatNvm) {
    let step = bench.submit(&command.to_command().with_cid(77), &[]).0;
    assert_eq!(step, AdminOutcome::Deferred);
}

/// Block size as a power of two, number of blocks, and the status of rejected commands.
fn namespace_shift_count_and_status(
    bench: &ControllerFixture,
    nsid: u32,
) -> (u8, u64, Option<Status>) {
    let reader = bench.controller.namespaces().reader();
    let namespace = reader.get().get(nsid).unwrap().clone();
    (namespace.block_shift, namespace.block_count, namespace.unavailable)
}

#[test]
fn format_erases_flushes_and_changes_the_block_size() {
    for (index, shift, blocks) in [(0, 9, BLOCKS), (1, 12, BLOCKS / 8)] {
        for ses in [SecureErase::None, SecureErase::UserData] {
            let mut bench = ControllerFixture::new();
            submit_format(&mut bench, FormatNvm { ses, ..format_command(1, index) });
            assert_eq!(bench.poll_until_deferred_completion(), (77, Ok(0)));
            assert_eq!(namespace_shift_count_and_status(&bench, 1), (shift, blocks, None));
            assert_eq!((bench.shelves[0].nonzero_blocks(), bench.shelves[0].flush_count()), (0, 1));
        }
    }
}

#[test]
fn namespace_is_rejected_during_format() {
    let mut bench =
        ControllerFixture::with_devices(vec![FakeBlockDevice::new(), FakeBlockDevice::new()]);
    submit_format(&mut bench, format_command(1, 0));
    assert_eq!(namespace_shift_count_and_status(&bench, 1).2, Some(Status::FORMAT_IN_PROGRESS));
    assert_eq!(namespace_shift_count_and_status(&bench, 2).2, None);
    bench.poll_times(3);
    assert!(bench.shelves[0].nonzero_blocks() > 0, "it takes more than three turns");
    assert_eq!(bench.run_without_data(format_command(2, 0)), Err(Status::FORMAT_IN_PROGRESS));
    let test = DeviceSelfTest { nsid: 1, stc: SelfTestCode::Short, ..DeviceSelfTest::default() };
    assert_eq!(bench.run_without_data(test), Err(Status::FORMAT_IN_PROGRESS));
    assert_eq!(bench.poll_until_deferred_completion().1, Ok(0));
    assert_eq!((bench.shelves[0].nonzero_blocks(), bench.shelves[1].nonzero_blocks()), (0, 2048));
}

#[test]
fn broadcast_nsid_formats_every_namespace() {
    let mut bench =
        ControllerFixture::with_devices(vec![FakeBlockDevice::new(), FakeBlockDevice::new()]);
    submit_format(&mut bench, format_command(u32::MAX, 1));
    assert_eq!(bench.poll_until_deferred_completion(), (77, Ok(0)));
    for nsid in [1, 2] {
        assert_eq!(namespace_shift_count_and_status(&bench, nsid).0, 12);
    }
    assert!(bench.shelves.iter().all(|shelf| shelf.nonzero_blocks() == 0));
}

#[test]
fn invalid_format_fields_are_rejected() {
    let cases = [
        (format_command(0, 0), Status::INVALID_NAMESPACE_OR_FORMAT),
        (format_command(1025, 0), Status::INVALID_NAMESPACE_OR_FORMAT),
        (format_command(2, 0), Status::INVALID_FIELD),
        (format_command(1, 2), Status::INVALID_FORMAT),
        (format_command(1, 63), Status::INVALID_FORMAT),
        (FormatNvm { pi: 1, ..format_command(1, 0) }, Status::INVALID_FORMAT),
        (FormatNvm { mset: true, ..format_command(1, 0) }, Status::INVALID_FORMAT),
        (
            FormatNvm { ses: SecureErase::Cryptographic, ..format_command(1, 0) },
            Status::INVALID_FIELD,
        ),
        (
            FormatNvm { ses: SecureErase::Reserved(3), ..format_command(1, 0) },
            Status::INVALID_FIELD,
        ),
    ];
    let mut bench = ControllerFixture::new();
    for (format, status) in cases {
        assert_eq!(bench.run_without_data(format), Err(status), "{format:?}");
    }
    assert_eq!(
        (bench.shelves[0].nonzero_blocks(), namespace_shift_count_and_status(&bench, 1).2),
        (2048, None)
    );
}

#[test]
fn one_unformattable_namespace_rejects_a_broadcast_format() {
    let large = FakeBlockDevice::with_block_size(4096, &EVERYTHING, Durability::Persistent);
    let mut bench = ControllerFixture::with_devices(vec![FakeBlockDevice::new(), large]);
    assert_eq!(bench.run_without_data(format_command(u32::MAX, 1)), Err(Status::INVALID_FORMAT));
    assert_eq!(bench.shelves[0].nonzero_blocks(), 2048);
    assert_eq!(namespace_shift_count_and_status(&bench, 1).2, None);
}

#[test]
fn write_protected_or_reserved_namespace_is_not_formatted() {
    let mut bench = ControllerFixture::with_config(
        vec![FakeBlockDevice::new()],
        |config| config.ana_groups = 1,
        ControllerConfig::default(),
    );
    let protect = |state| SetFeatures {
        nsid: 1,
        fid: Feature::NamespaceWriteProtection.code(),
        cdw11: state,
        ..SetFeatures::default()
    };
    bench.run_without_data(protect(1)).unwrap();
    assert_eq!(
        bench.run_without_data(format_command(1, 0)),
        Err(Status::NAMESPACE_WRITE_PROTECTED)
    );
    bench.run_without_data(protect(0)).unwrap();
    for (state, status) in [
        (AnaState::Inaccessible, Status::ANA_INACCESSIBLE),
        (AnaState::PersistentLoss, Status::ANA_PERSISTENT_LOSS),
        (AnaState::Change, Status::ANA_TRANSITION),
    ] {
        bench.subsystem.set_ana_state(1, 1, state);
        assert_eq!(bench.run_without_data(format_command(1, 0)), Err(status));
        assert_eq!(namespace_shift_count_and_status(&bench, 1).2, Some(status));
    }
    bench.subsystem.set_ana_state(1, 1, AnaState::NonOptimized);
    submit_format(&mut bench, format_command(1, 0));
}

#[test]
fn device_error_fails_the_format_and_releases_the_namespaces() {
    let mut bench =
        ControllerFixture::with_devices(vec![FakeBlockDevice::new(), FakeBlockDevice::new()]);
    bench.shelves[1].fail_request_at(1000);
    submit_format(&mut bench, format_command(u32::MAX, 1));
    let (cid, end) = bench.poll_until_deferred_completion();
    assert_eq!((cid, end), (77, Err(Status::UNRECOVERED_READ_ERROR)));
    for nsid in [1, 2] {
        assert_eq!(namespace_shift_count_and_status(&bench, nsid), (9, BLOCKS, None), "as it was");
    }
}

#[test]
fn reset_continues_the_format_without_a_completion() {
    let mut bench = ControllerFixture::new();
    submit_format(&mut bench, format_command(1, 1));
    bench.controller.reset(bench.now);
    assert_eq!(namespace_shift_count_and_status(&bench, 1).2, Some(Status::FORMAT_IN_PROGRESS));
    bench.poll_times(1000);
    assert_eq!(bench.controller.next_deferred_completion(), None);
    assert_eq!(namespace_shift_count_and_status(&bench, 1), (12, BLOCKS / 8, None));
}

#[test]
fn removed_controller_abandons_its_format() {
    let bench = ControllerFixture::new();
    let mut other = bench.open_second_controller(2);
    let command = format_command(1, 1).to_command();
    let step = super::fixture::submit_to_controller(&mut other, bench.now, &command, &[]).0;
    assert_eq!(step, AdminOutcome::Deferred);
    assert_eq!(namespace_shift_count_and_status(&bench, 1).2, Some(Status::FORMAT_IN_PROGRESS));
    drop(other);
    assert_eq!(namespace_shift_count_and_status(&bench, 1), (9, BLOCKS, None));
}

#[test]
fn format_requires_write_zeroes_support() {
    let shelf = FakeBlockDevice::with_block_size(
        512,
        &[Operation::Read, Operation::Write],
        Durability::Persistent,
    );
    let mut bench = ControllerFixture::with_devices(vec![shelf]);
    let step = bench.submit(&format_command(1, 0).to_command(), &[]).0;
    assert_eq!(completed_result(step), Err(Status::INVALID_OPCODE));
}
