//! Responses of one iteration: queued when a command is completed, and sent together.

use tenmil_base::Instant;
use tenmil_wire::sgl::Descriptor;
use tenmil_wire::tcp::{C2HData, CapsuleCmd, CapsuleResp, IcReq, PduFraming};
use tenmil_wire::{Command, Completion, Status};

use crate::{
    Connection, ControllerConfig, ControllerConnection, ControllerEvent, EventQueue, NoDigest,
    QueueKind, SendPiece,
};

const NOW: Instant = Instant { ns: 1 };
const BYTES: u32 = 4096;

/// A controller that has received `count` reads.
fn controller_with_reads(count: u16, flow_control: bool) -> ControllerConnection {
    let mut connection = ControllerConnection::new(ControllerConfig::default(), NOW);
    let mut events = EventQueue::with_capacity(1024);
    connection.receive(NOW, IcReq::new(0, false, false, 0).as_bytes(), &mut events);
    connection.set_queue_kind(QueueKind::Io { entries: 129, flow_control });
    connection.fill_send_queue(&NoDigest);
    let len = len_of(connection.send_pieces());
    connection.record_sent(len, &mut events);
    let framing = PduFraming::default();
    let mut reads = Vec::new();
    for cid in 0..count {
        let read = Command::new(2).with_cid(cid).with_nsid(1).with_cdw12(7);
        let read = read.with_sgl1(Descriptor::transport_data_block(BYTES));
        reads.extend(CapsuleCmd::new(framing, &read, 0).as_bytes());
    }
    assert_eq!(connection.receive(NOW, &reads, &mut events), reads.len());
    let commands = events.as_slice().iter();
    let command_count =
        commands.filter(|event| matches!(event, ControllerEvent::Command { .. })).count();
    assert_eq!(command_count, usize::from(count));
    connection
}

fn len_of(pieces: &[SendPiece]) -> usize {
    let len = |piece: &SendPiece| match *piece {
        SendPiece::Headers { len_bytes, .. } | SendPiece::Payload { len_bytes, .. } => {
            len_bytes as usize
        }
    };
    pieces.iter().map(len).sum()
}

fn complete(connection: &mut ControllerConnection, tags: impl Iterator<Item = u16>) {
    for tag in tags {
        connection.complete(tag, BYTES, Completion::new(0, Status::SUCCESS)).unwrap();
    }
}

/// Headers and data of one command are 24 and 4096 bytes, and 24 of a response.
#[test]
fn responses_to_a_full_queue_are_sent_at_once() {
    for (flow_control, each, count) in [(false, 24 + 4096, 128), (true, 24 + 4096 + 24, 97)] {
        let mut connection = controller_with_reads(count, flow_control);
        complete(&mut connection, 0..count);
        assert!(!connection.has_more(), "all responses are in the send queue");
        let pieces = connection.send_pieces();
        assert_eq!(len_of(pieces), each * usize::from(count));
        let SendPiece::Headers { at, len_bytes: 24 } = pieces[0] else { panic!("{pieces:?}") };
        let header = &connection.header_bytes()[at as usize..][..24];
        let data = C2HData::from_bytes(header.first_chunk().unwrap());
        assert_eq!((data.cccid(), data.datao(), data.datal()), (0, 0, BYTES));
        assert_eq!((data.last(), data.success()), (true, !flow_control));
        if flow_control {
            let SendPiece::Headers { at, .. } = pieces[2] else { panic!("{pieces:?}") };
            let header = &connection.header_bytes()[at as usize..][..24];
            let response = CapsuleResp::from_bytes(header.first_chunk().unwrap()).completion();
            assert_eq!((response.cid(), response.sqhd()), (0, count));
            assert_eq!(response.status(), Status::SUCCESS);
        }
    }
}

/// The queued PDUs: whether each is a response (or data), and its command identifier.
fn queued_pdus(connection: &ControllerConnection) -> Vec<(bool, u16)> {
    let pieces = connection.send_pieces().iter();
    let headers = pieces.filter_map(|piece| match *piece {
        SendPiece::Headers { at, len_bytes } => {
            Some(&connection.header_bytes()[at as usize..][..len_bytes as usize])
        }
        SendPiece::Payload { .. } => None,
    });
    let pdus = headers.flat_map(|bytes| bytes.chunks(24)).map(|pdu| {
        // PDU type 05h is a response, 07h data.
        let is_response = pdu[0] == 5;
        let bytes = pdu.first_chunk().unwrap();
        let response = CapsuleResp::from_bytes(bytes).completion().cid();
        (is_response, if is_response { response } else { C2HData::from_bytes(bytes).cccid() })
    });
    pdus.collect()
}

/// A controller that has completed three batches of `count` reads and has sent two of them.
fn controller_after_batches(count: u16) -> ControllerConnection {
    let mut connection = controller_with_reads(count * 3, true);
    for first in [0, count, 2 * count] {
        let sent = len_of(connection.send_pieces());
        connection.record_sent_each(sent, |_| {});
        complete(&mut connection, first..first + count);
        connection.fill_send_queue(&NoDigest);
    }
    connection
}

#[test]
fn responses_of_large_batches_are_sent_behind_all_data() {
    for (count, is_deferred) in [(1, false), (19, false), (20, true), (32, true)] {
        let connection = controller_after_batches(count);
        let tags = 2 * count..3 * count;
        let expected: Vec<(bool, u16)> = if is_deferred {
            tags.clone().map(|cid| (false, cid)).chain(tags.map(|cid| (true, cid))).collect()
        } else {
            tags.flat_map(|cid| [(false, cid), (true, cid)]).collect()
        };
        assert_eq!(queued_pdus(&connection), expected, "batches of {count}");
    }
}

#[test]
fn deferred_responses_beyond_the_send_queue_are_sent_once_each() {
    let mut connection = controller_after_batches(25);
    let mut events = EventQueue::with_capacity(1024);
    let len = len_of(connection.send_pieces());
    connection.record_sent_each(len, |_| {});
    let framing = PduFraming::default();
    let mut tags = Vec::new();
    for cid in 0..128 {
        let read = Command::new(2).with_cid(cid).with_nsid(1).with_cdw12(7);
        let read = read.with_sgl1(Descriptor::transport_data_block(BYTES));
        events.clear();
        connection.receive(NOW, CapsuleCmd::new(framing, &read, 0).as_bytes(), &mut events);
        let [ControllerEvent::Command { tag, .. }] = *events.as_slice() else { panic!("{cid}") };
        tags.push(tag);
    }
    complete(&mut connection, tags.iter().copied());
    let (mut sent_tags, mut responses) = (Vec::new(), Vec::new());
    while sent_tags.len() < 128 {
        connection.fill_send_queue(&NoDigest);
        let queued = queued_pdus(&connection).into_iter().filter(|(is_response, _)| *is_response);
        responses.extend(queued.map(|(_, cid)| cid));
        let len = len_of(connection.send_pieces());
        assert!(len > 0, "{} of 128 are sent", sent_tags.len());
        connection.record_sent_each(len, |tag| sent_tags.push(tag));
    }
    responses.sort_unstable();
    assert_eq!(responses, (0..128).collect::<Vec<_>>());
    assert!(connection.send_pieces().is_empty() && connection.outstanding_tags().next().is_none());
}

#[test]
fn responses_beyond_the_send_queue_follow_in_order() {
    let mut connection = controller_with_reads(128, true);
    complete(&mut connection, 0..128);
    let (mut sent_tags, mut sends) = (Vec::new(), 0);
    while sent_tags.len() < 128 {
        connection.fill_send_queue(&NoDigest);
        // Some bytes at a time, so that the header ring wraps.
        let count = len_of(connection.send_pieces()).min(100_000);
        assert!(count > 0);
        connection.record_sent_each(count, |tag| sent_tags.push(tag));
        sends += 1;
    }
    assert!(sends > 3, "{sends}");
    assert_eq!(sent_tags, (0..128).collect::<Vec<_>>());
    assert!(
        connection.send_pieces().is_empty()
            && !connection.has_more()
            && connection.outstanding_tags().next().is_none()
    );
}

#[test]
fn a_command_is_completed_once_with_at_most_its_data() {
    let mut connection = controller_with_reads(2, false);
    let success = Completion::new(0, Status::SUCCESS);
    assert!(connection.complete(0, BYTES + 4, success).is_err());
    assert!(connection.complete(5, BYTES, success).is_err(), "tag 5 is free");
    assert!(connection.send_pieces().is_empty());
    connection.complete(0, BYTES, success).unwrap();
    assert!(
        connection.complete(0, BYTES, success).is_err()
            && connection.complete(0, 0, success).is_err()
    );
    // A result needs a response to carry it.
    connection.complete(1, BYTES, success.with_dw0(7)).unwrap();
    assert_eq!(len_of(connection.send_pieces()), 2 * (24 + 4096) + 24);
}

/// Reads that follow one another reuse slots and memory: the list of ends does not grow.
#[test]
fn the_list_of_response_ends_is_bounded_by_the_depth() {
    let mut connection = controller_with_reads(128, false);
    let mut events = EventQueue::with_capacity(8);
    let read = Command::new(2).with_nsid(1).with_sgl1(Descriptor::transport_data_block(BYTES));
    let capsule = CapsuleCmd::new(PduFraming::default(), &read, 0);
    for completed in 0..2000_u16 {
        let mut sent_tags = Vec::new();
        complete(&mut connection, core::iter::once(completed % 128));
        // Never all of it, so that the list is never empty.
        connection.record_sent_each(len_of(connection.send_pieces()).saturating_sub(8), |tag| {
            sent_tags.push(tag)
        });
        for tag in sent_tags {
            events.clear();
            connection.receive(NOW, capsule.as_bytes(), &mut events);
            assert!(matches!(
                events.as_slice(),
                [ControllerEvent::Command { tag: new, .. }] if *new == tag
            ));
        }
    }
    assert!(connection.response_ends_capacity() <= 128);
}
