//! Full tables, early completions, and all limits.

use std::ops::Range;

use tenmil_base::Instant;
use tenmil_wire::sgl::Descriptor;
use tenmil_wire::tcp::{C2HData, CapsuleCmd, CapsuleResp, IcReq, IcResp, PduFraming, R2t, crc32c};
use tenmil_wire::{Command, Completion, DataPointer, Status};

use super::rig::{ControllerSide, HostSide, Manner, Pair, Seen, drawn, pattern};
use crate::{
    CloseReason, Connection, ControllerConfig, DataDirection, DataTransfer, DigestMode, EventQueue,
    HostConfig, HostEvent, NegotiatedParams, NoDigest, QueueFull, QueueKind, SendPiece,
    SuccessPolicy,
};

const NOW: Instant = Instant { ns: 0 };
const PLAIN: PduFraming = PduFraming { header_digest: false, data_digest: false, alignment: 0 };

fn pair(depth: u16) -> Pair {
    let host = HostConfig { depth, in_capsule_bytes: 64, ..HostConfig::default() };
    Pair::open(host, ControllerConfig { depth, ..ControllerConfig::default() })
}

#[test]
fn a_full_table_refuses_a_command_and_takes_it_when_one_has_ended() {
    let mut pair = pair(3);
    for number in 0..3 {
        pair.host.submit(2, DataDirection::ToHost(64), number);
    }
    assert_eq!(pair.host.try_submit(2, DataDirection::ToHost(64), 3), None);
    let more = pair.host.end.submit(&Command::new(0), DataDirection::None, &NoDigest);
    assert_eq!(more, Err(QueueFull));
    pair.run(&mut |_| usize::MAX);
    assert_eq!(pair.host.end.room(), 3);
    pair.host.submit(2, DataDirection::ToHost(64), 3);
}

#[test]
fn a_body_that_is_whole_and_not_yet_told_of_asks_for_no_bytes() {
    let mut pair = pair(2);
    let tag = pair.host.submit(2, DataDirection::ToHost(8192), 0);
    pair.host.take(usize::MAX);
    let pdu = C2HData::new(PLAIN, tag, 0, 8192, (true, true));
    let mut events = EventQueue::with_capacity(3);
    let end = &mut pair.host.end;
    assert_eq!(end.receive(NOW, pdu.as_bytes(), &mut events), pdu.as_bytes().len());
    assert_eq!(end.direct_placement().map(|place| place.len_bytes), Some(8192));
    while events.room() > 0 {
        events.push(HostEvent::Open(NegotiatedParams::default()));
    }
    end.received_direct(NOW, 8192, &mut events);
    assert_eq!(
        end.direct_placement(),
        None,
        "a socket that is asked for nothing says that it has ended"
    );
    // One place is reserved for the event of the end.
    let mut ended = Pair::open(HostConfig::default(), ControllerConfig::default());
    ended.host.end.receive_end(0, &mut events);
    assert_eq!(events.as_slice().last(), Some(&HostEvent::Ended(CloseReason::Closed)));
    events.clear();
    end.receive(NOW, &[], &mut events);
    assert!(matches!(events.as_slice(), [HostEvent::Completed { .. }]), "{events:?}");
}

#[test]
fn the_last_data_say_that_they_are_the_last_before_the_answer_is_known() {
    let mut pair = pair(2);
    pair.controller.owner.manner.is_idle = true;
    pair.host.submit(2, DataDirection::ToHost(8192), 0);
    pair.run(&mut |_| usize::MAX);
    let end = &mut pair.controller.end;
    let tag = end.outstanding().next().unwrap();
    for (len_bytes, is_last) in [(4096, false), (4096, true)] {
        end.send_data(tag, len_bytes).unwrap();
        end.fill(&NoDigest);
        let Some(SendPiece::Headers { at, .. }) = end.pieces().first().copied() else {
            panic!("a header comes first")
        };
        let flags = end.headers()[at as usize + 1];
        // LAST_PDU without SUCCESS.
        assert_eq!(flags & 0b1100, if is_last { 0b0100 } else { 0 });
        let sent = end.pieces().iter().map(|piece| match piece {
            SendPiece::Headers { len_bytes, .. } | SendPiece::Payload { len_bytes, .. } => {
                *len_bytes
            }
        });
        let sent = sent.sum::<u32>() as usize;
        end.sent(sent, &mut EventQueue::with_capacity(3));
    }
}

#[test]
fn a_caller_that_has_numbers_of_its_own_names_its_commands_by_them() {
    let config = HostConfig { cid_mask: 0x7f, ..HostConfig::default() };
    let mut pair = Pair::open(config, ControllerConfig::default());
    for tag in [127, 0, 64, 127] {
        // The bits above the tag belong to the caller, and are on the wire.
        let (cid, read) = (tag | 0x180, Command::new(2).with_cid(9));
        pair.host.memory.0.insert(tag, vec![0; 64]);
        pair.host.end.submit_as(cid, &read, DataDirection::ToHost(64), &NoDigest).unwrap();
        assert_eq!(pair.host.end.outstanding().collect::<Vec<_>>(), [tag]);
        pair.run(&mut |_| usize::MAX);
        assert_eq!(pair.host.end.outstanding().count(), 0, "answered under its number");
    }
}

/// Of the slot's last command, for instance: a late response does not end the next one.
#[test]
fn an_identifier_that_is_not_outstanding_is_rejected_though_its_slot_is_in_use() {
    let (used, other) = (0x085, 0x005);
    for digest in [DigestMode::Off, DigestMode::Required] {
        let has_digest = digest == DigestMode::Required;
        let framing = PduFraming { header_digest: has_digest, ..PLAIN };
        for kind in 0..3 {
            let config =
                HostConfig { cid_mask: 0x7f, header_digest: digest, ..HostConfig::default() };
            let mut side = HostSide::new(config);
            side.take(usize::MAX);
            side.give(NOW, IcResp::new(0, has_digest, false, 4096).as_bytes());
            let (opcode, data) = match kind {
                2 => (1, DataDirection::FromHost(64)),
                _ => (2, DataDirection::ToHost(64)),
            };
            let command = Command::new(opcode);
            side.end.submit_as(used, &command, data, &NoDigest).unwrap();
            side.take(usize::MAX);
            let mut bytes = match kind {
                0 => C2HData::new(framing, other, 0, 64, (true, true)).as_bytes().to_vec(),
                1 => CapsuleResp::new(framing, &Completion::new(other, Status::SUCCESS))
                    .as_bytes()
                    .to_vec(),
                _ => R2t::new(framing, (other, 0), 0, 64).as_bytes().to_vec(),
            };
            if has_digest {
                bytes.extend(crc32c(&bytes).to_le_bytes());
            }
            if kind == 0 {
                bytes.extend([0; 64]);
            }
            side.give(NOW, &bytes);
            assert!(!side.end.is_open(), "kind {kind}, {digest:?}");
        }
    }
}

#[test]
#[should_panic(expected = "identifier 3 is not for the caller to choose")]
fn a_number_that_is_out_is_not_given_again() {
    let config = HostConfig { cid_mask: 0x7f, ..HostConfig::default() };
    let mut pair = Pair::open(config, ControllerConfig::default());
    let mut submit =
        || pair.host.end.submit_as(3, &Command::new(0), DataDirection::None, &NoDigest);
    assert_eq!(submit(), Ok(()));
    let _ = submit();
}

#[test]
fn before_the_connection_is_open_nothing_is_submitted() {
    let mut side = HostSide::new(HostConfig::default());
    assert_eq!(side.try_submit(0, DataDirection::None, 0), None);
    assert_eq!(side.end.pieces(), [SendPiece::Headers { at: 0, len_bytes: 128 }]);
}

/// Controller with room for two commands that has received these commands.
fn full(cids: Range<u16>) -> ControllerSide {
    let mut side =
        ControllerSide::new(ControllerConfig { depth: 2, ..ControllerConfig::default() });
    side.give(NOW, IcReq::new(0, false, false, 0).as_bytes());
    side.take(usize::MAX);
    side.owner.manner.is_idle = true;
    for cid in cids {
        side.give(NOW, CapsuleCmd::new(PLAIN, &Command::new(0).with_cid(cid), 0).as_bytes());
    }
    assert!(side.end.is_full());
    side
}

/// A command that arrives while the table is full stays in the stream, and is accepted after a
/// release.
#[test]
fn a_full_controller_takes_no_command_and_loses_none() {
    let mut side = full(0..4);
    assert_eq!((side.inbox.len(), side.cause()), (144, None));
    assert_eq!(side.end.deadline(), Instant::NEVER, "the host is not to category");
    side.end.complete(0, 0, Completion::new(0, Status::SUCCESS)).unwrap();
    assert_eq!(side.take(usize::MAX).len(), 24);
    side.give(NOW, &[]);
    assert_eq!(side.inbox.len(), 72);
    let commands = side.log.iter().filter(|(_, seen)| matches!(seen, Seen::Command { .. }));
    assert_eq!(commands.count(), 3);
}

#[test]
fn a_command_that_is_forgotten_is_not_answered_and_makes_room_for_another() {
    let mut side = full(7..10);
    side.end.drop_command(0).unwrap();
    side.give(NOW, &[]);
    assert_eq!((side.inbox.len(), side.take(usize::MAX).len()), (0, 0), "the third is taken");
    side.end.complete(0, 0, Completion::new(0, Status::SUCCESS)).unwrap();
    let answer = CapsuleResp::new(PLAIN, &Completion::new(9, Status::SUCCESS).with_sqhd(3));
    assert_eq!(side.take(usize::MAX), answer.as_bytes());
    assert_eq!(side.end.outstanding().collect::<Vec<_>>(), [1]);
}

/// A further command is a violation only if every command in the table waits for data: not if
/// commands did so earlier, and not if the embedding code will finish one of them.
#[test]
fn a_full_controller_waits_for_its_owner_as_long_as_it_can() {
    // An earlier write: with all data, finished while its R2T was outstanding, and finished before.
    for way in 0..3 {
        let config = ControllerConfig { depth: 2, ..ControllerConfig::default() };
        let mut pair = Pair::open(HostConfig { depth: 2, ..HostConfig::default() }, config);
        pair.controller.owner.manner =
            Manner { is_rash: way == 1, is_idle: way == 2, ..Manner::default() };
        pair.host.submit(1, DataDirection::FromHost(64), 0);
        let capsule = pair.host.take(usize::MAX);
        pair.controller.give(NOW, &capsule);
        if way == 2 {
            pair.controller.end.complete(0, 0, Completion::new(0, Status::SUCCESS)).unwrap();
        }
        pair.run(&mut |_| usize::MAX);
        assert_eq!(pair.host.done().len(), 1);
        let side = &mut pair.controller;
        side.owner.manner = Manner { is_idle: true, ..Manner::default() };
        let write = Command::new(1).with_sgl1(Descriptor::transport(64));
        side.give(NOW, CapsuleCmd::new(PLAIN, &write.with_cid(8), 0).as_bytes());
        side.end.fill(&side.memory);
        for cid in 9..11 {
            side.give(NOW, CapsuleCmd::new(PLAIN, &Command::new(0).with_cid(cid), 0).as_bytes());
        }
        assert!(side.end.is_full());
        assert_eq!((side.cause(), side.inbox.len()), (None, 72), "the last one waits");
    }
}

/// The response and the transmission of the data can end in any order.
#[test]
fn a_write_that_is_answered_before_it_was_sent_ends_when_it_was() {
    let mut side = HostSide::new(HostConfig { in_capsule_bytes: 64, ..HostConfig::default() });
    side.take(usize::MAX);
    side.give(NOW, IcResp::new(0, false, false, 4096).as_bytes());
    let tag = side.submit(1, DataDirection::FromHost(64), 5);
    side.take(100);
    let answer = CapsuleResp::new(PLAIN, &Completion::new(tag, Status::WRITE_FAULT));
    side.give(NOW, answer.as_bytes());
    assert!(side.done().is_empty() && side.end.outstanding().eq([tag]));
    side.take(35);
    assert!(side.done().is_empty(), "a byte is left");
    side.take(1);
    assert_eq!(side.done(), [(Status::WRITE_FAULT, 0)]);
    assert_eq!(side.end.outstanding().count(), 0);
}

/// The rest of the solicited data is not sent after the response.
#[test]
fn a_write_that_fails_early_sends_no_further_data() {
    let config = HostConfig { depth: 64, ..HostConfig::default() };
    let mut side = HostSide::new(config);
    side.take(usize::MAX);
    side.give(NOW, IcResp::new(0, false, false, 4096).as_bytes());
    let tag = side.submit(1, DataDirection::FromHost(1 << 20), 5);
    side.take(usize::MAX);
    let all = R2t::new(PLAIN, (tag, 3), 0, 1 << 20);
    side.give(NOW, all.as_bytes());
    let first = side.take(usize::MAX).len();
    assert_eq!(first, 64 * (24 + 4096), "256 KiB are queued at a time");
    assert!(side.end.has_more());
    let answer = CapsuleResp::new(PLAIN, &Completion::new(tag, Status::WRITE_FAULT));
    side.give(NOW, answer.as_bytes());
    assert_eq!(side.done(), [(Status::WRITE_FAULT, 0)]);
    assert!(side.take(usize::MAX).is_empty() && !side.end.has_more());
    // The tag can be used for another command.
    side.submit(1, DataDirection::FromHost(4096), 6);
    side.take(usize::MAX);
    side.give(NOW, R2t::new(PLAIN, (tag, 3), 0, 4096).as_bytes());
    assert_eq!(side.take(usize::MAX).len(), 24 + 4096);
}

/// Reuse of a tag that is still in the list of commands with data to send.
#[test]
fn a_tag_is_in_the_list_of_those_with_data_once_whatever_it_was_before() {
    let mut side = HostSide::new(HostConfig { depth: 1, ..HostConfig::default() });
    side.take(usize::MAX);
    side.give(NOW, IcResp::new(0, false, false, 4096).as_bytes());
    for number in 0..3 {
        let tag = side.submit(1, DataDirection::FromHost(4096), number);
        side.end.sent(72, &mut EventQueue::with_capacity(4));
        side.give(NOW, R2t::new(PLAIN, (tag, number), 0, 4096).as_bytes());
        let answer = CapsuleResp::new(PLAIN, &Completion::new(tag, Status::WRITE_FAULT));
        side.give(NOW, answer.as_bytes());
        assert_eq!(side.done().len(), usize::from(number) + 1);
    }
    let tag = side.submit(1, DataDirection::FromHost(4096), 3);
    side.give(NOW, R2t::new(PLAIN, (tag, 3), 0, 4096).as_bytes());
    assert_eq!(side.take(usize::MAX).len(), 72 + 24 + 4096, "the command and its data, once");
    assert!(!side.end.has_more());
}

/// A command that is finished early: its response waits for the solicited data.
#[test]
fn a_command_that_is_finished_early_is_answered_when_no_data_are_on_their_way() {
    for len in [64, 8192, 100_000] {
        for seed in 0..8 {
            let mut pair = pair(8);
            pair.controller.owner.manner =
                Manner { is_rash: true, status: Status::ABORT_REQUESTED, ..Manner::default() };
            for number in 0..4 {
                pair.host.submit(1, DataDirection::FromHost(len), number);
            }
            pair.run(&mut drawn(seed));
            assert_eq!(pair.host.done(), vec![(Status::ABORT_REQUESTED, 0); 4], "{len} bytes");
            assert_eq!((pair.host.cause(), pair.controller.cause()), (None, None));
            let came =
                pair.controller.log.iter().any(|(_, seen)| matches!(seen, Seen::Data { .. }));
            assert!(!came, "nobody wants them");
            assert_eq!(pair.controller.end.outstanding().count(), 0);
        }
    }
}

/// A successful read whose data are incomplete is an error.
#[test]
fn a_success_without_all_data_is_none() {
    let all = [(true, 32), (false, 32), (false, 0)].into_iter();
    for ((success, len), is_cut) in all.flat_map(|it| [(it, true), (it, false)]) {
        let mut side = HostSide::new(HostConfig::default());
        side.take(usize::MAX);
        side.give(NOW, IcResp::new(0, false, false, 4096).as_bytes());
        let tag = side.submit(2, DataDirection::ToHost(64), 5);
        side.take(usize::MAX);
        if len > 0 {
            let mut bytes = C2HData::new(PLAIN, tag, 0, len, (true, success)).as_bytes().to_vec();
            if is_cut {
                side.give(NOW, &bytes);
                bytes.clear();
            }
            bytes.resize(bytes.len() + len as usize, 0);
            side.give(NOW, &bytes);
        }
        if !success {
            let answer = CapsuleResp::new(PLAIN, &Completion::new(tag, Status::SUCCESS));
            side.give(NOW, answer.as_bytes());
        }
        assert_eq!(side.done(), [(Status::DATA_TRANSFER_ERROR, len)]);
    }
}

#[test]
fn sqhd_counts_the_commands_and_goes_round_with_the_queue() {
    let mut side = ControllerSide::new(ControllerConfig::default());
    side.give(NOW, IcReq::new(0, false, false, 0).as_bytes());
    side.take(usize::MAX);
    side.end.connected(QueueKind::Io { entries: 3, flow_control: true });
    let heads: Vec<u8> = (0..7)
        .map(|cid| {
            side.give(NOW, CapsuleCmd::new(PLAIN, &Command::new(0).with_cid(cid), 0).as_bytes());
            side.take(usize::MAX)[16]
        })
        .collect();
    assert_eq!(heads, [1, 2, 0, 1, 2, 0, 1]);
}

/// The three ways to complete a read, with SQ flow control and without.
#[test]
fn success_takes_the_place_of_a_response_only_where_it_may() {
    for (success, flow_control, expected) in [
        (SuccessPolicy::Never, true, false),
        (SuccessPolicy::Never, false, false),
        (SuccessPolicy::WithoutFlowControl, true, false),
        (SuccessPolicy::WithoutFlowControl, false, true),
        (SuccessPolicy::Always, true, true),
        (SuccessPolicy::Always, false, true),
    ] {
        // A result in dword 0, a failure, and incomplete data need a response in each case.
        for (completion, len, may) in [
            (Completion::new(0, Status::SUCCESS), 64, true),
            (Completion::new(0, Status::SUCCESS).with_dw0(1), 64, false),
            (Completion::new(0, Status::SUCCESS).with_dw1(1), 64, false),
            (Completion::new(0, Status::UNRECOVERED_READ_ERROR), 64, false),
            (Completion::new(0, Status::SUCCESS), 32, false),
        ] {
            let mut side =
                ControllerSide::new(ControllerConfig { success, ..ControllerConfig::default() });
            side.give(NOW, IcReq::new(0, false, false, 0).as_bytes());
            side.take(usize::MAX);
            side.end.connected(QueueKind::Io { entries: 3, flow_control });
            side.owner.manner.is_idle = true;
            let read = Command::new(2).with_sgl1(Descriptor::transport(64));
            side.give(NOW, CapsuleCmd::new(PLAIN, &read, 0).as_bytes());
            side.end.complete(0, len, completion).unwrap();
            let sent = side.take(usize::MAX);
            let says = expected && may;
            assert_eq!(sent[1], if says { 12 } else { 4 }, "{success:?} {flow_control}");
            assert_eq!(sent.len(), 24 + len as usize + if says { 0 } else { 24 });
        }
    }
}

/// Valid SGLs, and the status of a command with an invalid SGL (§3.3.2).
#[test]
fn sgls_are_classified_before_anybody_makes_room() {
    let config = ControllerConfig { transfer_bytes_max: 4096, ..ControllerConfig::default() };
    let write = Command::new(1);
    let zero = Descriptor([0, 0]);
    let prp = |command: Command| command.with_psdt(DataPointer::Prp);
    for (command, in_capsule, expected) in [
        (Command::new(0).with_sgl1(zero), 0, Ok(DataTransfer::None)),
        (prp(Command::new(0)), 0, Ok(DataTransfer::None)),
        (Command::new(0), 8, Err(Status::DATA_SGL_LENGTH_INVALID)),
        (write.with_sgl1(Descriptor::transport(4096)), 0, Ok(DataTransfer::FromHost(4096))),
        (Command::new(2).with_sgl1(Descriptor::transport(4096)), 0, Ok(DataTransfer::ToHost(4096))),
        (write.with_sgl1(Descriptor::transport(0)), 0, Ok(DataTransfer::None)),
        // Set Features without data: some hosts leave the SGL zero.
        (write.with_sgl1(zero), 0, Ok(DataTransfer::None)),
        (prp(Command::new(9).with_sgl1(zero)), 0, Ok(DataTransfer::None)),
        (Command::new(2).with_sgl1(Descriptor::data_block(0x1000, 0)), 0, Ok(DataTransfer::None)),
        (write.with_sgl1(zero), 8, Err(Status::SGL_DESCRIPTOR_TYPE_INVALID)),
        (write.with_sgl1(Descriptor::transport(4100)), 0, Err(Status::DATA_SGL_LENGTH_INVALID)),
        (write.with_sgl1(Descriptor::transport(u32::MAX)), 0, Err(Status::DATA_SGL_LENGTH_INVALID)),
        (
            write.with_sgl1(Descriptor::transport(6)),
            0,
            Err(Status::SGL_DATA_BLOCK_GRANULARITY_INVALID),
        ),
        (write.with_sgl1(Descriptor::transport(8)), 8, Err(Status::DATA_SGL_LENGTH_INVALID)),
        (write.with_sgl1(Descriptor::in_capsule(0, 8)), 8, Ok(DataTransfer::InCapsule(8))),
        (write.with_sgl1(Descriptor::in_capsule(0, 0)), 0, Ok(DataTransfer::None)),
        (write.with_sgl1(Descriptor::in_capsule(0, 8)), 0, Err(Status::DATA_SGL_LENGTH_INVALID)),
        (write.with_sgl1(Descriptor::in_capsule(0, 4)), 8, Err(Status::DATA_SGL_LENGTH_INVALID)),
        (write.with_sgl1(Descriptor::in_capsule(4, 4)), 8, Err(Status::SGL_OFFSET_INVALID)),
        (
            Command::new(2).with_sgl1(Descriptor::in_capsule(0, 8)),
            8,
            Err(Status::SGL_DESCRIPTOR_TYPE_INVALID),
        ),
        (
            write.with_sgl1(Descriptor::data_block(0, 8)),
            0,
            Err(Status::SGL_DESCRIPTOR_TYPE_INVALID),
        ),
        (write.with_sgl1(Descriptor::bit_bucket(8)), 0, Err(Status::SGL_DESCRIPTOR_TYPE_INVALID)),
        (Command::new(3).with_sgl1(Descriptor::transport(8)), 0, Err(Status::INVALID_FIELD)),
        (prp(write.with_sgl1(Descriptor::transport(8))), 0, Err(Status::INVALID_FIELD)),
        // FCTYPE determines the direction of Fabrics commands: Connect, and Property Get.
        (
            prp(Command::new(0x7f).with_nsid(1).with_sgl1(Descriptor::in_capsule(0, 8))),
            8,
            Ok(DataTransfer::InCapsule(8)),
        ),
        (Command::new(0x7f).with_nsid(4), 0, Ok(DataTransfer::None)),
    ] {
        let mut side = ControllerSide::new(config);
        side.give(NOW, IcReq::new(0, false, false, 0).as_bytes());
        side.take(usize::MAX);
        side.owner.manner.is_idle = true;
        let capsule = CapsuleCmd::new(PLAIN, &command, in_capsule);
        side.give(NOW, capsule.as_bytes());
        side.give(NOW, &pattern(0, in_capsule));
        assert_eq!(side.log[1], (0, Seen::Command { cid: 0, data: expected }), "{command:?}");
        if expected.is_err() {
            assert_eq!(side.log.len(), 2, "what came with it is passed over");
            assert_eq!(side.take(usize::MAX).len(), 24, "and it is answered");
        }
    }
}

/// A command waits for at most one portion of another command's data: 256 KiB by default.
#[test]
fn a_short_command_overtakes_a_long_write() {
    for portion in [None, Some(32 << 10)] {
        let mut side = HostSide::new(HostConfig { depth: 4, ..HostConfig::default() });
        if let Some(bytes) = portion {
            side.end.set_send_budget(bytes);
        }
        side.take(usize::MAX);
        side.give(NOW, IcResp::new(0, false, false, 1 << 20).as_bytes());
        let long = side.submit(1, DataDirection::FromHost(4 << 20), 1);
        side.take(usize::MAX);
        side.give(NOW, R2t::new(PLAIN, (long, 0), 0, 4 << 20).as_bytes());
        side.take(1);
        side.submit(2, DataDirection::ToHost(512), 2);
        let queued: u64 = side.end.pieces().iter().map(len_of).sum();
        let most = u64::from(portion.unwrap_or(256 << 10));
        assert!(queued <= most + 2 * 72 && queued > most - 4096, "{queued} of {most} bytes");
    }
}

fn len_of(piece: &SendPiece) -> u64 {
    match *piece {
        SendPiece::Headers { len_bytes, .. } | SendPiece::Payload { len_bytes, .. } => {
            len_bytes.into()
        }
    }
}

/// Tables are allocated once, and the queued bytes stay within the stated limit.
#[test]
fn an_idle_connection_costs_what_it_says() {
    let host = HostConfig::default().memory_bytes();
    let controller = ControllerConfig::default().memory_bytes();
    assert!(host < 48 << 10, "{host}");
    assert!(controller < 24 << 10, "{controller}");
    let deep = ControllerConfig { depth: 1024, ..ControllerConfig::default() };
    assert!(deep.memory_bytes() < 128 << 10, "{}", deep.memory_bytes());
    assert_eq!(deep.unsolicited_bytes_max(), 8 << 20);
}
