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
fn asked(count: u16, flow_control: bool) -> ControllerConnection {
    let mut end = ControllerConnection::new(ControllerConfig::default(), NOW);
    let mut events = EventQueue::with_capacity(1024);
    end.receive(NOW, IcReq::new(0, false, false, 0).as_bytes(), &mut events);
    end.connected(QueueKind::Io { entries: 129, flow_control });
    end.fill(&NoDigest);
    let len = len_of(end.pieces());
    end.sent(len, &mut events);
    let framing = PduFraming::default();
    let mut reads = Vec::new();
    for cid in 0..count {
        let read = Command::new(2).with_cid(cid).with_nsid(1).with_cdw12(7);
        let read = read.with_sgl1(Descriptor::transport(BYTES));
        reads.extend(CapsuleCmd::new(framing, &read, 0).as_bytes());
    }
    assert_eq!(end.receive(NOW, &reads, &mut events), reads.len());
    let commands = events.as_slice().iter();
    let count_of =
        commands.filter(|event| matches!(event, ControllerEvent::Command { .. })).count();
    assert_eq!(count_of, usize::from(count));
    end
}

fn len_of(pieces: &[SendPiece]) -> usize {
    let len = |piece: &SendPiece| match *piece {
        SendPiece::Headers { len_bytes, .. } | SendPiece::Payload { len_bytes, .. } => {
            len_bytes as usize
        }
    };
    pieces.iter().map(len).sum()
}

fn complete(end: &mut ControllerConnection, tags: impl Iterator<Item = u16>) {
    for tag in tags {
        end.complete(tag, BYTES, Completion::new(0, Status::SUCCESS)).unwrap();
    }
}

/// Headers and data of one command are 24 and 4096 bytes, and 24 of a response.
#[test]
fn responses_to_a_full_queue_leave_in_one_send() {
    for (flow_control, each, count) in [(false, 24 + 4096, 128), (true, 24 + 4096 + 24, 97)] {
        let mut end = asked(count, flow_control);
        complete(&mut end, 0..count);
        assert!(!end.has_more(), "nothing waits for another send");
        let pieces = end.pieces();
        assert_eq!(len_of(pieces), each * usize::from(count));
        let SendPiece::Headers { at, len_bytes: 24 } = pieces[0] else { panic!("{pieces:?}") };
        let header = &end.headers()[at as usize..][..24];
        let data = C2HData::from_bytes(header.first_chunk().unwrap());
        assert_eq!((data.cccid(), data.datao(), data.datal()), (0, 0, BYTES));
        assert_eq!((data.last(), data.success()), (true, !flow_control));
        if flow_control {
            let SendPiece::Headers { at, .. } = pieces[2] else { panic!("{pieces:?}") };
            let header = &end.headers()[at as usize..][..24];
            let response = CapsuleResp::from_bytes(header.first_chunk().unwrap()).completion();
            assert_eq!((response.cid(), response.sqhd()), (0, count));
            assert_eq!(response.status(), Status::SUCCESS);
        }
    }
}

/// What finds no space waits, and follows in order.
#[test]
fn what_finds_no_space_in_the_queue_follows_when_something_was_sent() {
    let mut end = asked(128, true);
    complete(&mut end, 0..128);
    let (mut released, mut sends) = (Vec::new(), 0);
    while released.len() < 128 {
        end.fill(&NoDigest);
        // Some bytes at a time, so that the list goes round.
        let count = len_of(end.pieces()).min(100_000);
        assert!(count > 0);
        end.sent_each(count, |tag| released.push(tag));
        sends += 1;
    }
    assert!(sends > 3, "{sends}");
    assert_eq!(released, (0..128).collect::<Vec<_>>());
    assert!(end.pieces().is_empty() && !end.has_more() && end.outstanding().next().is_none());
}

#[test]
fn a_command_is_completed_once_and_only_with_data_that_it_has() {
    let mut end = asked(2, false);
    let success = Completion::new(0, Status::SUCCESS);
    assert!(end.complete(0, BYTES + 4, success).is_err());
    assert!(end.complete(5, BYTES, success).is_err(), "there is no such command");
    assert!(end.pieces().is_empty());
    end.complete(0, BYTES, success).unwrap();
    assert!(end.complete(0, BYTES, success).is_err() && end.complete(0, 0, success).is_err());
    // A result needs a response to carry it.
    end.complete(1, BYTES, success.with_dw0(7)).unwrap();
    assert_eq!(len_of(end.pieces()), 2 * (24 + 4096) + 24);
}

/// Reads that follow one another reuse slots and memory: the list of ends does not grow.
#[test]
fn a_list_of_ends_is_no_longer_than_the_queue_is_deep() {
    let mut end = asked(128, false);
    let mut events = EventQueue::with_capacity(8);
    let read = Command::new(2).with_nsid(1).with_sgl1(Descriptor::transport(BYTES));
    let capsule = CapsuleCmd::new(PduFraming::default(), &read, 0);
    for completed in 0..2000_u16 {
        let mut released = Vec::new();
        complete(&mut end, core::iter::once(completed % 128));
        // Never all of it, so that the list is never empty.
        end.sent_each(len_of(end.pieces()).saturating_sub(8), |tag| released.push(tag));
        for tag in released {
            events.clear();
            end.receive(NOW, capsule.as_bytes(), &mut events);
            assert!(matches!(
                events.as_slice(),
                [ControllerEvent::Command { tag: new, .. }] if *new == tag
            ));
        }
    }
    assert!(end.ends_capacity() <= 128);
}
