//! Kernel that issues invalid requests and completes commands that it does not have.

use tenmil_base::{IoCompletion, IoStatus, Limits, Operation, OperationSet, Random};
use tenmil_wire::ublk::queue::{RES_ABORT, RES_OK};
use tenmil_wire::ublk::{IoDescriptor, IoFlags, IoOp};

use super::super::disk::UblkDisk;
use super::tag_table::{DEPTH, TagTest};
use super::{BLOCKS, device_limits, io_descriptor, random_byte, test_disk};

#[test]
fn invalid_kernel_request_is_rejected_before_the_device() {
    let (invalid, unknown) = (-22, -95);
    let mut session = TagTest::new();
    for op in [IoOp::Read, IoOp::Write, IoOp::Discard, IoOp::WriteZeroes] {
        for (first, sectors) in [
            (0, 0),
            (BLOCKS, 0),
            (BLOCKS, 1),
            (BLOCKS - 1, 2),
            (u64::MAX, 1),
            (u64::MAX - 1, 4),
            (1 << 63, 8),
            (0, u32::MAX),
        ] {
            let result = session.run_one_request(io_descriptor(op, first, sectors), &[0; 512]);
            assert_eq!(result, invalid, "{op:?} {first} {sectors}");
        }
    }
    for op in [IoOp::Read, IoOp::Write] {
        assert_eq!(
            session.run_one_request(io_descriptor(op, 0, 65), &[]),
            invalid,
            "longer than was told"
        );
    }
    for number in (0..=255).filter(|number| !matches!(number, 0..=3 | 5)) {
        assert_eq!(
            session.run_one_request(io_descriptor(IoOp::Other(number), 0, 1), &[]),
            unknown,
            "{number}"
        );
    }
    assert!(session.tags.pending_requests().0.is_empty());
    assert_eq!(session.tags.completed_stats().succeeded, 0);
    assert_eq!(
        session.run_one_request(io_descriptor(IoOp::Read, BLOCKS - 64, 64), &[]),
        64 * 512,
        "as good as ever"
    );
}

#[test]
fn partial_block_requests_are_rejected() {
    let limits = Limits { block_size: 4096, block_count: 512, ..device_limits() };
    let disk = UblkDisk::new(limits, false).unwrap();
    for (first, sectors) in [(0, 1), (4, 4), (8, 12), (7, 8)] {
        assert_eq!(
            disk.validate_request(&io_descriptor(IoOp::Write, first, sectors)),
            Err(22),
            "{first} {sectors}"
        );
    }
    let request = disk.validate_request(&io_descriptor(IoOp::Write, 8, 16)).unwrap();
    assert_eq!((request.lba, request.blocks, request.len_bytes), (1, 2, 8192));
    assert_eq!(disk.validate_request(&io_descriptor(IoOp::Read, 4096, 8)), Err(22), "past the end");
}

#[test]
fn read_only_or_unsupported_operations_are_rejected() {
    let disk = UblkDisk::new(device_limits(), true).unwrap();
    for op in [IoOp::Write, IoOp::Discard, IoOp::WriteZeroes] {
        assert_eq!(disk.validate_request(&io_descriptor(op, 0, 1)), Err(30), "{op:?}");
    }
    assert!(disk.validate_request(&io_descriptor(IoOp::Read, 0, 1)).is_ok());
    let support = OperationSet::from_operations(&[Operation::Read, Operation::Write]);
    let plain = UblkDisk::new(Limits { operations: support, ..device_limits() }, false).unwrap();
    for op in [IoOp::Flush, IoOp::Discard, IoOp::WriteZeroes] {
        assert_eq!(plain.validate_request(&io_descriptor(op, 0, 1)), Err(95), "{op:?}");
    }
}

#[test]
fn invalid_tags_are_reported_and_ignored() {
    let mut session = TagTest::new();
    for tag in [u64::from(DEPTH), 1 << 16, u64::MAX] {
        for result in [RES_OK, RES_ABORT, 1, -22] {
            session.kernel.complete_command(tag, result);
            session.receive();
            let events = session.tags.next_error().unwrap();
            assert!(events.contains(&format!("tag {tag}")), "{events}");
            assert_eq!(session.tags.next_error(), None, "once");
        }
    }
    // A request with this tag is outstanding: neither a new request nor an abort is valid.
    session.kernel.deliver_request(2, io_descriptor(IoOp::Read, 0, 1), &[]);
    session.receive();
    for result in [RES_OK, RES_ABORT] {
        session.kernel.complete_command(2, result);
        session.receive();
        assert!(session.tags.next_error().unwrap().contains("tag 2"));
    }
    while session.kernel.take_committed_results() != [(2, 512)] {
        session.run_until_idle();
    }
    assert!(!session.tags.is_stopped_by_kernel());
}

#[test]
fn an_unexpected_completion_is_reported_and_ignored() {
    let mut session = TagTest::new();
    for token in [0, 5, 8, u64::MAX] {
        session.handle_completion(IoCompletion { token, status: IoStatus::SUCCESS, result: 0 });
        assert!(session.tags.next_error().unwrap().contains("not in flight"));
        assert!(session.kernel.take_committed_results().is_empty());
    }
}

#[test]
fn queue_ends_when_the_kernel_has_aborted_every_tag() {
    let mut session = TagTest::new();
    session.kernel.deliver_request(4, io_descriptor(IoOp::Read, 0, 1), &[]);
    session.receive();
    session.kernel.abort_all_tags();
    session.receive();
    assert!(!session.tags.is_stopped_by_kernel(), "one is under way");
    while session.kernel.take_committed_results() != [(4, 512)] {
        session.run_until_idle();
    }
    session.kernel.abort_all_tags();
    session.receive();
    assert!(session.tags.is_stopped_by_kernel());
    assert_eq!(session.tags.next_error(), None, "all of that is as it should be");
}

#[test]
fn rejected_kernel_command_is_reported() {
    let mut session = TagTest::new();
    session.kernel.complete_command(1, -16);
    session.receive();
    assert!(session.tags.next_error().unwrap().contains("tag 1: -16"));
    session.kernel.complete_command(2, 1);
    session.receive();
    assert!(session.tags.next_error().is_some(), "there is no second way to arrive");
}

#[test]
fn random_descriptor_is_rejected_or_lies_inside_the_disk() {
    let disk = test_disk();
    let mut random = Random::new(7);
    let mut admitted = 0;
    for _ in 0..200_000 {
        let mut bytes = [0; IoDescriptor::BYTES];
        bytes.iter_mut().for_each(|byte| *byte = random_byte(&mut random));
        // Most descriptors are almost valid.
        if random.below(4) > 0 {
            bytes[0] %= 6;
            bytes[5..8].fill(0);
            bytes[10..16].fill(0);
        }
        let Ok(request) = disk.validate_request(&IoDescriptor::from_bytes(&bytes)) else {
            continue;
        };
        admitted += 1;
        assert!(request.lba + u64::from(request.blocks) <= BLOCKS, "{request:?}");
        assert!(request.len_bytes <= disk.io_bytes_max(), "{request:?}");
        assert_eq!(request.blocks == 0, request.operation == Operation::Flush);
    }
    assert!(admitted > 1000, "{admitted} were sensible");
}

#[test]
fn device_unusable_as_disk_is_rejected_with_the_expected_limits() {
    for (limits, found) in [
        (Limits { metadata_size: 8, ..device_limits() }, "8 bytes of metadata"),
        (Limits { block_size: 8192, ..device_limits() }, "8192 bytes"),
        (Limits { block_count: 0, ..device_limits() }, "no blocks"),
        (Limits { request_blocks_max: 7, ..device_limits() }, "3584 bytes at most"),
    ] {
        let refused = UblkDisk::new(limits, false).unwrap_err();
        assert!(refused.text.contains(found) && refused.text.contains("expected"), "{refused}");
    }
}

#[test]
fn disk_parameters_match_the_device_limits() {
    use tenmil_base::Durability;
    use tenmil_wire::ublk::DiskAttributes;
    let events = test_disk().parameters();
    assert_eq!(events.attributes, DiskAttributes::VOLATILE_CACHE.union(DiskAttributes::FUA));
    assert_eq!((events.sectors, events.block_shift, events.physical_shift), (BLOCKS, 9, 12));
    assert_eq!(events.sectors_max, 64, "what the medium takes at once, in whole pages");
    let discard = events.discard.unwrap();
    assert_eq!((discard.granularity, discard.zero_sectors_max), (512, 64));
    assert!(discard.discard_sectors_max > 64);
    let of = |durability| UblkDisk::new(Limits { durability, ..device_limits() }, false).unwrap();
    assert_eq!(of(Durability::Persistent).parameters().attributes, DiskAttributes::NONE);
    assert_eq!(of(Durability::NonPersistent).parameters().attributes, DiskAttributes::NONE);
    assert!(
        of(Durability::Persistent).is_persistent_across_processes()
            && !of(Durability::NonPersistent).is_persistent_across_processes()
    );
    let read_only = UblkDisk::new(device_limits(), true).unwrap().parameters();
    assert!(read_only.attributes.has(DiskAttributes::READ_ONLY) && read_only.discard.is_none());
    assert_eq!(IoFlags::FUA, IoFlags(1 << 13), "UBLK_IO_F_FUA");
}
