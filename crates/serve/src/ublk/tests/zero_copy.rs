//! Zero copy: request buffers of the kernel are passed to the device, or copied if it rejects them.

use tenmil_base::{IoCompletion, IoStatus, Operation};
use tenmil_wire::ublk::IoOp;

use super::super::tags::UblkStats;
use super::tag_table::TagTest;
use super::{io_descriptor, test_disk};

#[test]
fn zero_copy_request_uses_the_registered_buffer_of_its_tag() {
    let (mut session, kernel_buffers) = TagTest::with_zero_copy();
    session.kernel.set_copies_fail(true);
    let each = test_disk().io_bytes_max();
    for (tag, op) in [(3, IoOp::Write), (5, IoOp::Read)] {
        session.kernel.deliver_request(tag, io_descriptor(op, 8, 2), &[7; 1024]);
        session.receive();
        let (requests, segments) = session.tags.pending_requests();
        let [request] = requests else { panic!("{requests:?}") };
        assert_eq!((request.token, request.lba, request.blocks), (u64::from(tag), 8, 2));
        let segment = segments[request.segment_first as usize];
        assert_eq!(segment, kernel_buffers.slice(u32::from(tag) * each, 1024).unwrap());
        let part = session.regions.kernel_buffer(segment).unwrap();
        assert_eq!((part.request, part.byte, part.len_bytes), (tag, 0, 1024));
        session.tags.record_submitted(1);
        assert_eq!(session.tags.in_flight_requests(), 1);
        let completion =
            IoCompletion { token: u64::from(tag), status: IoStatus::SUCCESS, result: 0 };
        session.handle_completion(completion);
        assert_eq!(session.kernel.take_committed_results(), [(tag, 1024)]);
        assert_eq!(session.tags.in_flight_requests(), 0);
    }
    let expected = UblkStats { succeeded: 2, failed: 0, zero_copy_bytes: 2048, copied_bytes: 0 };
    assert_eq!(session.tags.completed_stats(), expected);
    assert_eq!(session.tags.next_error(), None);
}

#[test]
fn requests_without_data_need_no_buffer() {
    let (mut session, _) = TagTest::with_zero_copy();
    for op in [IoOp::Discard, IoOp::WriteZeroes] {
        assert_eq!(session.run_one_request(io_descriptor(op, 10, 4), &[]), 0, "{op:?}");
    }
    assert_eq!(session.run_one_request(io_descriptor(IoOp::Flush, 0, 0), &[]), 0);
    let expected = UblkStats { succeeded: 3, ..UblkStats::default() };
    assert_eq!(session.tags.completed_stats(), expected);
}

/// The RAM device of the session rejects zero-copy buffers.
#[test]
fn rejected_zero_copy_requests_are_copied_and_repeated_rejections_disable_zero_copy() {
    let (mut session, kernel_buffers) = TagTest::with_zero_copy();
    let rejections = 16;
    for round in 0..20_u8 {
        let op = if round % 2 == 0 { IoOp::Write } else { IoOp::Read };
        let data = [round / 2; 512];
        assert_eq!(
            session.run_one_request(io_descriptor(op, u64::from(round / 2), 1), &data),
            512,
            "round {round}"
        );
        assert_eq!(session.kernel.data(3), data, "round {round}");
        let events = session.tags.next_error();
        match round + 1 {
            1 => assert!(events.unwrap().contains("write of 512 bytes without a copy")),
            count if count == rejections => {
                assert!(events.unwrap().contains("16 zero-copy requests were rejected"));
            }
            _ => assert_eq!(events, None, "round {round}"),
        }
        session.kernel.deliver_request(1, io_descriptor(IoOp::Read, 0, 1), &[]);
        session.receive();
        let (requests, segments) = session.tags.pending_requests();
        let place = segments[requests[0].segment_first as usize];
        assert_eq!(place.region == kernel_buffers.region, round + 1 < rejections, "round {round}");
        session.tags.record_submitted(1);
        session.handle_completion(IoCompletion { token: 1, status: IoStatus::SUCCESS, result: 0 });
        assert_eq!(session.kernel.take_committed_results(), [(1, 512)]);
    }
    let done = session.tags.completed_stats();
    assert_eq!((done.succeeded, done.failed, done.copied_bytes), (40, 0, 25 * 512));
    assert_eq!(done.zero_copy_bytes, 15 * 512);
}

#[test]
fn error_that_also_fails_with_copy_is_reported_once() {
    let (mut session, _) = TagTest::with_zero_copy();
    for operation in [IoOp::Read, IoOp::Write] {
        session.kernel.deliver_request(2, io_descriptor(operation, 0, 1), &[1; 512]);
        session.receive();
        for refused in [true, false] {
            let (requests, _) = session.tags.pending_requests();
            assert_eq!(requests.len(), 1);
            assert!(matches!(requests[0].operation, Operation::Read | Operation::Write));
            session.tags.record_submitted(1);
            assert!(
                session.kernel.take_committed_results().is_empty(),
                "no result is committed yet: {refused}"
            );
            let status = IoStatus::CAPACITY_EXCEEDED;
            session.handle_completion(IoCompletion { token: 2, status, result: 0 });
        }
        assert_eq!(session.kernel.take_committed_results(), [(2, -28)]);
    }
    let expected = UblkStats { failed: 2, ..UblkStats::default() };
    assert_eq!(session.tags.completed_stats(), expected);
}

#[test]
fn retried_copy_is_counted_as_copied() {
    let done = UblkStats { succeeded: 3, failed: 0, zero_copy_bytes: 100, copied_bytes: 7 };
    assert_eq!(done.move_to_copied(0), done);
    assert_eq!(
        done.move_to_copied(30),
        UblkStats { zero_copy_bytes: 70, copied_bytes: 37, ..done }
    );
    let expected = UblkStats { zero_copy_bytes: 0, copied_bytes: 107, ..done };
    assert_eq!(done.move_to_copied(300), expected, "some of it was asked for twice");
}

/// A path error of a network device is not a rejection of zero-copy buffers.
#[test]
fn removed_device_is_not_retried_with_copy() {
    let (mut session, kernel_buffers) = TagTest::with_zero_copy();
    for round in 0..20 {
        session.kernel.deliver_request(2, io_descriptor(IoOp::Write, 0, 1), &[1; 512]);
        session.receive();
        let (requests, segments) = session.tags.pending_requests();
        assert_eq!(
            segments[requests[0].segment_first as usize].region, kernel_buffers.region,
            "{round}"
        );
        session.tags.record_submitted(1);
        session.handle_completion(IoCompletion {
            token: 2,
            status: IoStatus::PATH_ERROR,
            result: 0,
        });
        assert_eq!(session.kernel.take_committed_results(), [(2, -67)]);
    }
    assert_eq!(session.tags.next_error(), None);
}
