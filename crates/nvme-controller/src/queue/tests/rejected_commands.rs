//! Every rejected command has its status, is reported for the error log, and accesses no block.

use std::sync::Arc;

use tenmil_base::{Operation, OperationSet};
use tenmil_wire::sgl::Descriptor;
use tenmil_wire::{Command, DataPointer, Fuse, IoOpcode, Status};

use super::fixture::{
    BLOCKS, COPIED, DATA, FixtureConfig, LATER, QueueFixture, SHARED, TRANSFER_MAX, fixture_ram,
    io_command,
};
use crate::fuzz::block_device::FakeDevice;
use crate::namespace::{NamespaceSnapshot, Reservation, ReservationKind};
use crate::queue::QueueEvent;

fn default_fixture() -> QueueFixture {
    let ram = fixture_ram();
    QueueFixture::new(&FixtureConfig::default(), &ram, FakeDevice::new(&ram, BLOCKS))
}

/// Commands with exactly one error, and their status.
fn invalid_commands() -> Vec<(&'static str, Command, Status)> {
    use IoOpcode::{Compare, Copy, DatasetManagement, Flush, Read, Verify, Write, WriteZeroes};
    let dnr = Status::with_dnr;
    let field = dnr(Status::INVALID_FIELD);
    let range = dnr(Status::LBA_OUT_OF_RANGE);
    let offset = dnr(Status::PRP_OFFSET_INVALID);
    let protection = dnr(Status::INVALID_PROTECTION_INFORMATION);
    let namespace = dnr(Status::INVALID_NAMESPACE_OR_FORMAT);
    let limit = dnr(Status::COMMAND_SIZE_LIMIT_EXCEEDED);
    let sgl = |first| io_command(Read, 0, 1).with_psdt(DataPointer::Sgl).with_sgl1(first);
    let last = BLOCKS - 1;
    vec![
        ("opcode", Command::new(0x7e).with_nsid(1), dnr(Status::INVALID_OPCODE)),
        ("opcode of no command here", Command::new(0x18).with_nsid(1), dnr(Status::INVALID_OPCODE)),
        ("namespace 0", io_command(Read, 0, 1).with_nsid(0), namespace),
        ("namespace past the last", io_command(Read, 0, 1).with_nsid(5), namespace),
        ("namespace not attached", io_command(Read, 0, 1).with_nsid(3), field),
        ("all namespaces", io_command(Read, 0, 1).with_nsid(u32::MAX), namespace),
        ("flush of none", Command::new(Flush.code()), namespace),
        ("fuse", io_command(Read, 0, 1).with_fuse(Fuse::Reserved), field),
        ("psdt", io_command(Read, 0, 1).with_psdt(DataPointer::Reserved), field),
        ("metadata sgl", io_command(Read, 0, 1).with_psdt(DataPointer::SglAndMetadataSgl), field),
        ("read past the end", io_command(Read, last, 2), range),
        ("write past the end", io_command(Write, BLOCKS, 1), range),
        ("read past all", io_command(Read, u64::MAX, 1), range),
        ("compare past the end", io_command(Compare, last, 2), range),
        ("verify past the end", io_command(Verify, last, 2), range),
        ("zeroes past the end", io_command(WriteZeroes, last, 2), range),
        ("uncorrectable past the end", io_command(IoOpcode::WriteUncorrectable, last, 2), range),
        ("larger than MDTS", io_command(Read, 0, TRANSFER_MAX / 512 + 1), field),
        ("pract", io_command(Read, 0, 1).with_cdw12(1 << 29), protection),
        ("pract of zeroes", io_command(WriteZeroes, 0, 1).with_cdw12(1 << 29), protection),
        ("directive", io_command(Write, 0, 1).with_cdw12(1 << 20), field),
        ("prp1", io_command(Read, 0, 1).with_prp(DATA + 2, 0), offset),
        ("prp1 of a write", io_command(Write, 0, 1).with_prp(DATA + 1, 0), offset),
        ("prp2", io_command(Read, 0, 16).with_prp(DATA, DATA + 0x1008), offset),
        ("prp list", io_command(Read, 0, 32).with_prp(DATA, DATA + 0x1004), offset),
        ("prp nowhere", io_command(Read, 0, 1).with_prp(1 << 40, 0), Status::DATA_TRANSFER_ERROR),
        (
            "second prp nowhere",
            io_command(Write, 0, 16).with_prp(DATA, 1 << 40),
            Status::DATA_TRANSFER_ERROR,
        ),
        (
            "list nowhere",
            io_command(Read, 0, 32).with_prp(DATA, 1 << 40),
            Status::DATA_TRANSFER_ERROR,
        ),
        (
            "sgl type",
            sgl(Descriptor::transport_data_block(512)),
            dnr(Status::SGL_DESCRIPTOR_TYPE_INVALID),
        ),
        (
            "sgl length",
            sgl(Descriptor::data_block(DATA, 511)),
            dnr(Status::DATA_SGL_LENGTH_INVALID),
        ),
        (
            "sgl segment",
            sgl(Descriptor::segment(DATA, 8)),
            dnr(Status::INVALID_SGL_SEGMENT_DESCRIPTOR),
        ),
        ("sgl nowhere", sgl(Descriptor::last_segment(1 << 40, 16)), Status::DATA_TRANSFER_ERROR),
        (
            "ranges nowhere",
            io_command(DatasetManagement, 0, 1).with_prp(1 << 40, 0),
            Status::DATA_TRANSFER_ERROR,
        ),
        ("copy format", io_command(Copy, 0, 1).with_cdw12(2 << 8), field),
        ("copy of too many ranges", io_command(Copy, 0, 1).with_cdw12(4), limit),
        ("copy with pract", io_command(Copy, 0, 1).with_cdw12(1 << 15), protection),
    ]
}

#[test]
fn every_invalid_field_has_its_status_and_no_effect() {
    for behavior in [SHARED, COPIED, LATER] {
        for (what, command, expected) in invalid_commands() {
            let ram = fixture_ram();
            let setup = FixtureConfig { behavior, ..FixtureConfig::default() };
            let mut rig = QueueFixture::new(&setup, &ram, FakeDevice::new(&ram, BLOCKS));
            rig.poll();
            let status = rig.run_for_status(command);
            assert_eq!(status, expected, "{what}");
            assert!(rig.device.contents().log.is_empty(), "{what}: the medium was not asked");
            let Some(QueueEvent::Error(report)) = rig.events.pop() else {
                panic!("{what}: no report")
            };
            assert_eq!((report.status, report.opcode), (expected, command.opcode()), "{what}");
            assert_eq!(report.sqid, 1);
            rig.run_successfully(io_command(IoOpcode::Read, 0, 1));
        }
    }
}

#[test]
fn copy_ranges_are_checked_before_the_first_block_is_copied() {
    let dnr = Status::with_dnr;
    type Sources = &'static [(u64, u16)];
    let cases: [(&str, u64, Sources, Status); 8] = [
        ("source past the end", 0, &[(50, 1), (BLOCKS - 1, 2)], dnr(Status::LBA_OUT_OF_RANGE)),
        ("source past all", 0, &[(u64::MAX, 1)], dnr(Status::LBA_OUT_OF_RANGE)),
        ("destination past the end", BLOCKS - 2, &[(0, 3)], dnr(Status::LBA_OUT_OF_RANGE)),
        ("range too long", 100, &[(0, 17)], dnr(Status::COMMAND_SIZE_LIMIT_EXCEEDED)),
        (
            "all too long",
            200,
            &[(0, 16), (20, 16), (40, 9)],
            dnr(Status::COMMAND_SIZE_LIMIT_EXCEEDED),
        ),
        ("overlap", 10, &[(30, 4), (11, 1)], dnr(Status::OVERLAPPING_IO_RANGE)),
        ("overlap by the last block", 10, &[(8, 3)], dnr(Status::OVERLAPPING_IO_RANGE)),
        ("overlap by the first block", 10, &[(30, 4), (14, 1)], dnr(Status::OVERLAPPING_IO_RANGE)),
    ];
    for (what, to, ranges, expected) in cases {
        let mut rig = default_fixture();
        for (index, (lba, blocks)) in ranges.iter().enumerate() {
            let at = DATA + index as u64 * 32;
            rig.write_host_memory(at + 8, &lba.to_le_bytes());
            rig.write_host_memory(at + 16, &(blocks - 1).to_le_bytes());
        }
        let count = u32::try_from(ranges.len()).unwrap();
        let status = rig.run_for_status(io_command(IoOpcode::Copy, to, 1).with_cdw12(count - 1));
        assert_eq!(status, expected, "{what}");
        assert!(rig.device.contents().log.is_empty(), "{what}");
    }
}

#[test]
fn copy_adjacent_to_its_source_does_not_overlap() {
    for (to, from) in [(10, 9), (10, 11)] {
        let mut rig = default_fixture();
        rig.write_host_memory(DATA + 8, &u64::to_le_bytes(from));
        rig.run_successfully(io_command(IoOpcode::Copy, to, 1).with_cdw12(0));
    }
}

#[test]
fn dataset_ranges_are_checked_before_the_first_is_deallocated() {
    let mut rig = default_fixture();
    rig.write_host_memory(DATA + 4, &1_u32.to_le_bytes());
    rig.write_host_memory(DATA + 16 + 4, &2_u32.to_le_bytes());
    rig.write_host_memory(DATA + 16 + 8, &(BLOCKS - 1).to_le_bytes());
    let command =
        io_command(IoOpcode::DatasetManagement, 0, 1).with_cdw10(1).with_cdw11(4).with_cdw12(0);
    assert_eq!(rig.run_for_status(command), Status::LBA_OUT_OF_RANGE.with_dnr());
    assert!(rig.device.contents().log.is_empty());
}

#[test]
fn reservation_decides_which_hosts_read_and_write() {
    use IoOpcode::{
        Compare, Copy, DatasetManagement, Flush, Read, Verify, Write, WriteUncorrectable,
        WriteZeroes,
    };
    let reads = [Read, Compare, Verify];
    let writes = [Write, WriteZeroes, WriteUncorrectable, DatasetManagement, Copy];
    let command = |opcode| match opcode {
        Flush => Command::new(0).with_nsid(1),
        Copy => io_command(Copy, 100, 1).with_cdw12(0),
        DatasetManagement => io_command(DatasetManagement, 0, 1).with_cdw12(0),
        opcode => io_command(opcode, 0, 1),
    };
    let mut rig = default_fixture();
    rig.change_namespace(|namespace| namespace.is_write_protected = true);
    for opcode in writes {
        let status = rig.run_for_status(command(opcode));
        assert_eq!(status, Status::NAMESPACE_WRITE_PROTECTED.with_dnr(), "{opcode}");
    }
    for opcode in reads.into_iter().chain([Flush]) {
        rig.run_successfully(command(opcode));
    }
    // A retry does not give access to an excluded host.
    let conflict = Status::RESERVATION_CONFLICT.with_dnr();
    let stranger = |kind| Some(Reservation { kind, is_holder: false, is_registrant: false });
    rig.change_namespace(|namespace| {
        namespace.reservation = stranger(ReservationKind::WriteExclusive)
    });
    for opcode in writes.into_iter().chain([Flush]) {
        assert_eq!(rig.run_for_status(command(opcode)), conflict, "{opcode}");
    }
    for opcode in reads {
        rig.run_successfully(command(opcode));
    }
    rig.change_namespace(|namespace| {
        namespace.reservation = stranger(ReservationKind::ExclusiveAccess)
    });
    for opcode in writes.into_iter().chain(reads).chain([Flush]) {
        assert_eq!(rig.run_for_status(command(opcode)), conflict, "{opcode}");
    }
    rig.change_namespace(|namespace| namespace.unavailable = Some(Status::FORMAT_IN_PROGRESS));
    assert_eq!(rig.run_for_status(io_command(Read, 0, 1)), Status::FORMAT_IN_PROGRESS);
    rig.change_namespace(|_| {});
    rig.run_successfully(io_command(Write, 0, 1));
}

#[test]
fn namespace_change_applies_at_the_next_poll_and_begun_commands_finish() {
    let ram = fixture_ram();
    let device = FakeDevice::new(&ram, BLOCKS);
    let mut rig = QueueFixture::new(&FixtureConfig::default(), &ram, device);
    rig.device.contents().is_stuck = true;
    let begun = [
        rig.push_command(io_command(IoOpcode::Write, 0, 1)),
        rig.push_command(io_command(IoOpcode::Write, 0, 16)),
    ];
    rig.ring_submission_doorbell();
    rig.poll();
    rig.change_namespace(|namespace| namespace.block_count = 4);
    rig.push_command(io_command(IoOpcode::Read, 4, 1));
    rig.ring_submission_doorbell();
    let refused = rig.collect_completions(1)[0];
    assert_eq!(refused.status(), Status::LBA_OUT_OF_RANGE.with_dnr());
    // Removed, while two commands are still in its block device.
    rig.published.publish(Arc::new(NamespaceSnapshot::new(4)));
    assert_eq!(
        rig.run_for_status(io_command(IoOpcode::Read, 0, 1)),
        Status::INVALID_FIELD.with_dnr()
    );
    rig.device.contents().is_stuck = false;
    assert_eq!(rig.device.open_channel_count(), 1, "two commands still need it");
    let finished = rig.collect_completions(2);
    rig.poll();
    assert_eq!(rig.device.open_channel_count(), 0, "no queue has one");
    assert!(finished.iter().all(|completion| completion.status().is_success()));
    assert!(begun.iter().all(|cid| finished.iter().any(|completion| completion.cid() == *cid)));
}

#[test]
fn operations_that_the_device_lacks_are_rejected() {
    let ram = fixture_ram();
    let device = FakeDevice::new(&ram, BLOCKS).with_limits(|limits| {
        limits.operations = OperationSet::from_operations(&[Operation::Flush])
    });
    let mut rig = QueueFixture::new(&FixtureConfig::default(), &ram, device);
    for opcode in IoOpcode::ALL.iter().copied().filter(|opcode| {
        use IoOpcode::{Compare, Copy, Read, Verify, Write, WriteUncorrectable, WriteZeroes};
        matches!(opcode, Compare | Copy | Read | Verify | Write | WriteUncorrectable | WriteZeroes)
    }) {
        assert_eq!(
            rig.run_for_status(io_command(opcode, 0, 1)),
            Status::INVALID_OPCODE.with_dnr(),
            "{opcode}"
        );
    }
}

#[test]
fn namespaces_with_metadata_or_smaller_blocks_than_the_device_are_rejected() {
    let mut rig = default_fixture();
    rig.change_namespace(|namespace| namespace.metadata_size = 8);
    let refused = Status::INVALID_NAMESPACE_OR_FORMAT.with_dnr();
    assert_eq!(rig.run_for_status(io_command(IoOpcode::Read, 0, 1)), refused);
    rig.change_namespace(|namespace| namespace.block_shift = 8);
    assert_eq!(rig.run_for_status(io_command(IoOpcode::Read, 0, 1)), refused);
}

#[test]
fn inaccessible_data_without_a_bounce_buffer_is_a_data_transfer_error() {
    let ram = fixture_ram();
    let setup = FixtureConfig { behavior: COPIED, buffers: 0, ..FixtureConfig::default() };
    let mut rig = QueueFixture::new(&setup, &ram, FakeDevice::new(&ram, BLOCKS));
    assert_eq!(rig.run_for_status(io_command(IoOpcode::Read, 0, 1)), Status::DATA_TRANSFER_ERROR);
}
