//! Zero copy: request buffers of the kernel are passed to the device, or copied if it rejects them.

use tenmil_base::{IoCompletion, IoStatus, Operation};
use tenmil_wire::ublk::IoOp;

use super::super::tags::UblkStats;
use super::session::Session;
use super::{descriptor, disk};

#[test]
fn the_medium_is_given_the_place_of_the_tag_and_nothing_is_copied() {
    let (mut session, kernel_buffers) = Session::zero_copy();
    session.kernel.refuse_copies(true);
    let each = disk().io_bytes_max();
    for (tag, op) in [(3, IoOp::Write), (5, IoOp::Read)] {
        session.kernel.request(tag, descriptor(op, 8, 2), &[7; 1024]);
        session.receive();
        let (requests, segments) = session.tags.requests();
        let [request] = requests else { panic!("{requests:?}") };
        assert_eq!((request.random_token, request.lba, request.blocks), (u64::from(tag), 8, 2));
        let segment = segments[request.segment_first as usize];
        assert_eq!(segment, kernel_buffers.slice(u32::from(tag) * each, 1024).unwrap());
        let part = session.regions.kernel_buffer(segment).unwrap();
        assert_eq!((part.request, part.byte, part.len_bytes), (tag, 0, 1024));
        session.tags.accepted(1);
        assert_eq!(session.tags.in_flight(), 1);
        let completion =
            IoCompletion { token: u64::from(tag), status: IoStatus::SUCCESS, result: 0 };
        session.handle_completion(completion);
        assert_eq!(session.kernel.results(), [(tag, 1024)]);
        assert_eq!(session.tags.in_flight(), 0);
    }
    let expected = UblkStats { succeeded: 2, failed: 0, zero_copy_bytes: 2048, copied_bytes: 0 };
    assert_eq!(session.tags.done(), expected);
    assert_eq!(session.tags.next_error(), None);
}

#[test]
fn requests_without_data_need_no_buffer() {
    let (mut session, _) = Session::zero_copy();
    for op in [IoOp::Discard, IoOp::WriteZeroes] {
        assert_eq!(session.one(descriptor(op, 10, 4), &[]), 0, "{op:?}");
    }
    assert_eq!(session.one(descriptor(IoOp::Flush, 0, 0), &[]), 0);
    let expected = UblkStats { succeeded: 3, ..UblkStats::default() };
    assert_eq!(session.tags.done(), expected);
}

/// The RAM device of the session rejects zero-copy buffers.
#[test]
fn rejected_zero_copy_requests_are_copied_and_repeated_rejections_disable_zero_copy() {
    let (mut session, kernel_buffers) = Session::zero_copy();
    let rejections = 16;
    for round in 0..20_u8 {
        let op = if round % 2 == 0 { IoOp::Write } else { IoOp::Read };
        let data = [round / 2; 512];
        assert_eq!(
            session.one(descriptor(op, u64::from(round / 2), 1), &data),
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
        session.kernel.request(1, descriptor(IoOp::Read, 0, 1), &[]);
        session.receive();
        let (requests, segments) = session.tags.requests();
        let place = segments[requests[0].segment_first as usize];
        assert_eq!(place.region == kernel_buffers.region, round + 1 < rejections, "round {round}");
        session.tags.accepted(1);
        session.handle_completion(IoCompletion { token: 1, status: IoStatus::SUCCESS, result: 0 });
        assert_eq!(session.kernel.results(), [(1, 512)]);
    }
    let done = session.tags.done();
    assert_eq!((done.succeeded, done.failed, done.copied_bytes), (40, 0, 25 * 512));
    assert_eq!(done.zero_copy_bytes, 15 * 512);
}

#[test]
fn an_error_that_is_one_either_way_is_told_once_as_without() {
    let (mut session, _) = Session::zero_copy();
    for operation in [IoOp::Read, IoOp::Write] {
        session.kernel.request(2, descriptor(operation, 0, 1), &[1; 512]);
        session.receive();
        for refused in [true, false] {
            let (requests, _) = session.tags.requests();
            assert_eq!(requests.len(), 1);
            assert!(matches!(requests[0].operation, Operation::Read | Operation::Write));
            session.tags.accepted(1);
            assert!(session.kernel.results().is_empty(), "nobody has heard of it: {refused}");
            let status = IoStatus::CAPACITY_EXCEEDED;
            session.handle_completion(IoCompletion { token: 2, status, result: 0 });
        }
        assert_eq!(session.kernel.results(), [(2, -28)]);
    }
    let expected = UblkStats { failed: 2, ..UblkStats::default() };
    assert_eq!(session.tags.done(), expected);
}

#[test]
fn what_was_copied_after_all_went_the_other_way() {
    let done = UblkStats { succeeded: 3, failed: 0, zero_copy_bytes: 100, copied_bytes: 7 };
    assert_eq!(done.with_copied(0), done);
    assert_eq!(done.with_copied(30), UblkStats { zero_copy_bytes: 70, copied_bytes: 37, ..done });
    let expected = UblkStats { zero_copy_bytes: 0, copied_bytes: 107, ..done };
    assert_eq!(done.with_copied(300), expected, "some of it was asked for twice");
}

/// A path error of a network device is not a rejection of zero-copy buffers.
#[test]
fn a_device_that_is_out_of_reach_is_not_asked_for_copies() {
    let (mut session, kernel_buffers) = Session::zero_copy();
    for round in 0..20 {
        session.kernel.request(2, descriptor(IoOp::Write, 0, 1), &[1; 512]);
        session.receive();
        let (requests, segments) = session.tags.requests();
        assert_eq!(
            segments[requests[0].segment_first as usize].region, kernel_buffers.region,
            "{round}"
        );
        session.tags.accepted(1);
        session.handle_completion(IoCompletion {
            token: 2,
            status: IoStatus::PATH_ERROR,
            result: 0,
        });
        assert_eq!(session.kernel.results(), [(2, -67)]);
    }
    assert_eq!(session.tags.next_error(), None);
}
