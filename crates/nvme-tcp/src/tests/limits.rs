//! Full tables, early completions, and all limits.

use std::ops::Range;

use tenmil_base::Instant;
use tenmil_wire::sgl::Descriptor;
use tenmil_wire::tcp::{C2HData, CapsuleCmd, CapsuleResp, IcReq, IcResp, PduFraming, R2t, crc32c};
use tenmil_wire::{Command, Completion, DataPointer, Status};

use super::test_pair::{
    ConnectedPair, ControllerEndpoint, ControllerOwnerBehavior, HostEndpoint, SessionEvent,
    pattern_bytes, random_fragments,
};
use crate::{
    CannotSubmit, CloseReason, Connection, ControllerConfig, DataDirection, DataTransfer,
    DigestMode, EventQueue, HostConfig, HostEvent, NegotiatedParams, NoDigest, QueueKind,
    SendPiece, SuccessFlagPolicy,
};

const NOW: Instant = Instant { ns: 0 };
const PLAIN: PduFraming = PduFraming { header_digest: false, data_digest: false, alignment: 0 };

fn pair_with_depth(depth: u16) -> ConnectedPair {
    let host = HostConfig { depth, in_capsule_bytes: 64, ..HostConfig::default() };
    ConnectedPair::open(host, ControllerConfig { depth, ..ControllerConfig::default() })
}

#[test]
fn a_full_host_rejects_a_command_until_one_completes() {
    let mut pair = pair_with_depth(3);
    for command_number in 0..3 {
        pair.host.submit(2, DataDirection::ToHost(64), command_number);
    }
    assert_eq!(pair.host.try_submit(2, DataDirection::ToHost(64), 3), None);
    let rejected = pair.host.connection.submit(&Command::new(0), DataDirection::None, &NoDigest);
    assert_eq!(rejected, Err(CannotSubmit));
    pair.exchange_until_idle(&mut |_| usize::MAX);
    assert_eq!(pair.host.connection.free_tags(), 3);
    pair.host.submit(2, DataDirection::ToHost(64), 3);
}

#[test]
fn a_complete_body_without_event_space_requests_no_bytes() {
    let mut pair = pair_with_depth(2);
    let tag = pair.host.submit(2, DataDirection::ToHost(8192), 0);
    pair.host.send(usize::MAX);
    let pdu = C2HData::new(PLAIN, tag, 0, 8192, (true, true));
    let mut events = EventQueue::with_capacity(3);
    let end = &mut pair.host.connection;
    assert_eq!(end.receive(NOW, pdu.as_bytes(), &mut events), pdu.as_bytes().len());
    assert_eq!(end.next_direct_placement().map(|placement| placement.len_bytes), Some(8192));
    while events.remaining_capacity() > 0 {
        events.push(HostEvent::Open(NegotiatedParams::default()));
    }
    end.received_direct(NOW, 8192, &mut events);
    assert_eq!(
        end.next_direct_placement(),
        None,
        "a receive call for zero bytes returns zero, like the end of the stream"
    );
    // One entry is reserved for the event of the end.
    let mut ended = ConnectedPair::open(HostConfig::default(), ControllerConfig::default());
    ended.host.connection.handle_eof(0, &mut events);
    assert_eq!(events.as_slice().last(), Some(&HostEvent::Ended(CloseReason::Closed)));
    events.clear();
    end.receive(NOW, &[], &mut events);
    assert!(matches!(events.as_slice(), [HostEvent::Completed { .. }]), "{events:?}");
}

#[test]
fn the_last_data_pdu_carries_last_pdu_before_the_status_is_known() {
    let mut pair = pair_with_depth(2);
    pair.controller.owner.behavior.completes_nothing = true;
    pair.host.submit(2, DataDirection::ToHost(8192), 0);
    pair.exchange_until_idle(&mut |_| usize::MAX);
    let end = &mut pair.controller.connection;
    let tag = end.outstanding_tags().next().unwrap();
    for (len_bytes, is_last) in [(4096, false), (4096, true)] {
        end.send_data(tag, len_bytes).unwrap();
        end.fill_send_queue(&NoDigest);
        let Some(SendPiece::Headers { at, .. }) = end.send_pieces().first().copied() else {
            panic!("a header comes first")
        };
        let flags = end.header_bytes()[at as usize + 1];
        // LAST_PDU without SUCCESS.
        assert_eq!(flags & 0b1100, if is_last { 0b0100 } else { 0 });
        let sent = end.send_pieces().iter().map(|piece| match piece {
            SendPiece::Headers { len_bytes, .. } | SendPiece::Payload { len_bytes, .. } => {
                *len_bytes
            }
        });
        let sent = sent.sum::<u32>() as usize;
        end.record_sent(sent, &mut EventQueue::with_capacity(3));
    }
}

#[test]
fn commands_carry_the_identifiers_chosen_by_the_caller() {
    let config = HostConfig { cid_mask: 0x7f, ..HostConfig::default() };
    let mut pair = ConnectedPair::open(config, ControllerConfig::default());
    for tag in [127, 0, 64, 127] {
        // The bits above the tag belong to the caller, and are on the wire.
        let (cid, read) = (tag | 0x180, Command::new(2).with_cid(9));
        pair.host.memory.0.insert(tag, vec![0; 64]);
        pair.host
            .connection
            .submit_with_cid(cid, &read, DataDirection::ToHost(64), &NoDigest)
            .unwrap();
        assert_eq!(pair.host.connection.outstanding_tags().collect::<Vec<_>>(), [tag]);
        pair.exchange_until_idle(&mut |_| usize::MAX);
        assert_eq!(
            pair.host.connection.outstanding_tags().count(),
            0,
            "completed under its identifier"
        );
    }
}

/// For example an identifier of the slot's last command: a late response does not complete the next one.
#[test]
fn an_identifier_that_is_not_outstanding_is_rejected_even_if_its_slot_is_in_use() {
    let (used, other) = (0x085, 0x005);
    for digest in [DigestMode::Off, DigestMode::Required] {
        let has_digest = digest == DigestMode::Required;
        let framing = PduFraming { header_digest: has_digest, ..PLAIN };
        for kind in 0..3 {
            let config =
                HostConfig { cid_mask: 0x7f, header_digest: digest, ..HostConfig::default() };
            let mut endpoint = HostEndpoint::new(config);
            endpoint.send(usize::MAX);
            endpoint.receive(NOW, IcResp::new(0, has_digest, false, 4096).as_bytes());
            let (opcode, data) = match kind {
                2 => (1, DataDirection::FromHost(64)),
                _ => (2, DataDirection::ToHost(64)),
            };
            let command = Command::new(opcode);
            endpoint.connection.submit_with_cid(used, &command, data, &NoDigest).unwrap();
            endpoint.send(usize::MAX);
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
            endpoint.receive(NOW, &bytes);
            assert!(!endpoint.connection.is_open(), "kind {kind}, {digest:?}");
        }
    }
}

#[test]
#[should_panic(expected = "command identifier 3 is outstanding")]
fn an_outstanding_identifier_cannot_be_submitted_again() {
    let config = HostConfig { cid_mask: 0x7f, ..HostConfig::default() };
    let mut pair = ConnectedPair::open(config, ControllerConfig::default());
    let mut submit = || {
        pair.host.connection.submit_with_cid(3, &Command::new(0), DataDirection::None, &NoDigest)
    };
    assert_eq!(submit(), Ok(()));
    let _ = submit();
}

#[test]
fn nothing_is_submitted_before_the_connection_is_open() {
    let mut endpoint = HostEndpoint::new(HostConfig::default());
    assert_eq!(endpoint.try_submit(0, DataDirection::None, 0), None);
    assert_eq!(endpoint.connection.send_pieces(), [SendPiece::Headers { at: 0, len_bytes: 128 }]);
}

/// Controller with two slots that has received these commands.
fn full_controller(cids: Range<u16>) -> ControllerEndpoint {
    let mut endpoint =
        ControllerEndpoint::new(ControllerConfig { depth: 2, ..ControllerConfig::default() });
    endpoint.receive(NOW, IcReq::new(0, false, false, 0).as_bytes());
    endpoint.send(usize::MAX);
    endpoint.owner.behavior.completes_nothing = true;
    for cid in cids {
        endpoint.receive(NOW, CapsuleCmd::new(PLAIN, &Command::new(0).with_cid(cid), 0).as_bytes());
    }
    assert!(endpoint.connection.is_command_table_full());
    endpoint
}

/// A command that arrives while the table is full stays in the stream, and is accepted after a
/// release.
#[test]
fn a_full_controller_leaves_further_commands_in_the_stream() {
    let mut endpoint = full_controller(0..4);
    assert_eq!((endpoint.unconsumed.len(), endpoint.close_reason()), (144, None));
    assert_eq!(endpoint.connection.deadline(), Instant::NEVER, "the host has violated nothing");
    endpoint.connection.complete(0, 0, Completion::new(0, Status::SUCCESS)).unwrap();
    assert_eq!(endpoint.send(usize::MAX).len(), 24);
    endpoint.receive(NOW, &[]);
    assert_eq!(endpoint.unconsumed.len(), 72);
    let commands =
        endpoint.log.iter().filter(|(_, entry)| matches!(entry, SessionEvent::Command { .. }));
    assert_eq!(commands.count(), 3);
}

#[test]
fn a_dropped_command_sends_no_response_and_frees_its_tag() {
    let mut endpoint = full_controller(7..10);
    endpoint.connection.drop_command(0).unwrap();
    endpoint.receive(NOW, &[]);
    assert_eq!(
        (endpoint.unconsumed.len(), endpoint.send(usize::MAX).len()),
        (0, 0),
        "the third command is accepted"
    );
    endpoint.connection.complete(0, 0, Completion::new(0, Status::SUCCESS)).unwrap();
    let response = CapsuleResp::new(PLAIN, &Completion::new(9, Status::SUCCESS).with_sqhd(3));
    assert_eq!(endpoint.send(usize::MAX), response.as_bytes());
    assert_eq!(endpoint.connection.outstanding_tags().collect::<Vec<_>>(), [1]);
}

/// A further command is a violation only if every command in the table waits for data: not if
/// commands did so earlier, and not if the owner will complete one of them.
#[test]
fn a_full_controller_closes_only_if_every_command_awaits_host_data() {
    // An earlier write: with all data, completed while its R2T was outstanding, and completed before.
    for early_completion in 0..3 {
        let config = ControllerConfig { depth: 2, ..ControllerConfig::default() };
        let mut pair =
            ConnectedPair::open(HostConfig { depth: 2, ..HostConfig::default() }, config);
        pair.controller.owner.behavior = ControllerOwnerBehavior {
            completes_early: early_completion == 1,
            completes_nothing: early_completion == 2,
            ..ControllerOwnerBehavior::default()
        };
        pair.host.submit(1, DataDirection::FromHost(64), 0);
        let capsule = pair.host.send(usize::MAX);
        pair.controller.receive(NOW, &capsule);
        if early_completion == 2 {
            pair.controller.connection.complete(0, 0, Completion::new(0, Status::SUCCESS)).unwrap();
        }
        pair.exchange_until_idle(&mut |_| usize::MAX);
        assert_eq!(pair.host.completions().len(), 1);
        let endpoint = &mut pair.controller;
        endpoint.owner.behavior = ControllerOwnerBehavior {
            completes_nothing: true,
            ..ControllerOwnerBehavior::default()
        };
        let write = Command::new(1).with_sgl1(Descriptor::transport_data_block(64));
        endpoint.receive(NOW, CapsuleCmd::new(PLAIN, &write.with_cid(8), 0).as_bytes());
        endpoint.connection.fill_send_queue(&endpoint.memory);
        for cid in 9..11 {
            endpoint
                .receive(NOW, CapsuleCmd::new(PLAIN, &Command::new(0).with_cid(cid), 0).as_bytes());
        }
        assert!(endpoint.connection.is_command_table_full());
        assert_eq!(
            (endpoint.close_reason(), endpoint.unconsumed.len()),
            (None, 72),
            "the last one waits"
        );
    }
}

/// The response and the transmission of the data can end in any order.
#[test]
fn a_write_completed_before_it_was_sent_is_reported_after_sending() {
    let mut endpoint =
        HostEndpoint::new(HostConfig { in_capsule_bytes: 64, ..HostConfig::default() });
    endpoint.send(usize::MAX);
    endpoint.receive(NOW, IcResp::new(0, false, false, 4096).as_bytes());
    let tag = endpoint.submit(1, DataDirection::FromHost(64), 5);
    endpoint.send(100);
    let response = CapsuleResp::new(PLAIN, &Completion::new(tag, Status::WRITE_FAULT));
    endpoint.receive(NOW, response.as_bytes());
    assert!(endpoint.completions().is_empty() && endpoint.connection.outstanding_tags().eq([tag]));
    endpoint.send(35);
    assert!(endpoint.completions().is_empty(), "a byte is unsent");
    endpoint.send(1);
    assert_eq!(endpoint.completions(), [(Status::WRITE_FAULT, 0)]);
    assert_eq!(endpoint.connection.outstanding_tags().count(), 0);
}

/// The rest of the solicited data is not sent after the response.
#[test]
fn a_write_that_fails_early_sends_no_further_data() {
    let config = HostConfig { depth: 64, ..HostConfig::default() };
    let mut endpoint = HostEndpoint::new(config);
    endpoint.send(usize::MAX);
    endpoint.receive(NOW, IcResp::new(0, false, false, 4096).as_bytes());
    let tag = endpoint.submit(1, DataDirection::FromHost(1 << 20), 5);
    endpoint.send(usize::MAX);
    let all = R2t::new(PLAIN, (tag, 3), 0, 1 << 20);
    endpoint.receive(NOW, all.as_bytes());
    let first = endpoint.send(usize::MAX).len();
    assert_eq!(first, 64 * (24 + 4096), "256 KiB are queued at a time");
    assert!(endpoint.connection.has_more());
    let response = CapsuleResp::new(PLAIN, &Completion::new(tag, Status::WRITE_FAULT));
    endpoint.receive(NOW, response.as_bytes());
    assert_eq!(endpoint.completions(), [(Status::WRITE_FAULT, 0)]);
    assert!(endpoint.send(usize::MAX).is_empty() && !endpoint.connection.has_more());
    // The tag can be used for another command.
    endpoint.submit(1, DataDirection::FromHost(4096), 6);
    endpoint.send(usize::MAX);
    endpoint.receive(NOW, R2t::new(PLAIN, (tag, 3), 0, 4096).as_bytes());
    assert_eq!(endpoint.send(usize::MAX).len(), 24 + 4096);
}

/// Reuse of a tag that is still in the list of commands with data to send.
#[test]
fn a_reused_tag_is_in_the_send_list_once() {
    let mut endpoint = HostEndpoint::new(HostConfig { depth: 1, ..HostConfig::default() });
    endpoint.send(usize::MAX);
    endpoint.receive(NOW, IcResp::new(0, false, false, 4096).as_bytes());
    for command_number in 0..3 {
        let tag = endpoint.submit(1, DataDirection::FromHost(4096), command_number);
        endpoint.connection.record_sent(72, &mut EventQueue::with_capacity(4));
        endpoint.receive(NOW, R2t::new(PLAIN, (tag, command_number), 0, 4096).as_bytes());
        let response = CapsuleResp::new(PLAIN, &Completion::new(tag, Status::WRITE_FAULT));
        endpoint.receive(NOW, response.as_bytes());
        assert_eq!(endpoint.completions().len(), usize::from(command_number) + 1);
    }
    let tag = endpoint.submit(1, DataDirection::FromHost(4096), 3);
    endpoint.receive(NOW, R2t::new(PLAIN, (tag, 3), 0, 4096).as_bytes());
    assert_eq!(endpoint.send(usize::MAX).len(), 72 + 24 + 4096, "the command and its data, once");
    assert!(!endpoint.connection.has_more());
}

/// A command that is completed early: its response waits for the data of its R2T.
#[test]
fn the_response_to_an_early_completion_waits_for_requested_data() {
    for len in [64, 8192, 100_000] {
        for seed in 0..8 {
            let mut pair = pair_with_depth(8);
            pair.controller.owner.behavior = ControllerOwnerBehavior {
                completes_early: true,
                status: Status::ABORT_REQUESTED,
                ..ControllerOwnerBehavior::default()
            };
            for command_number in 0..4 {
                pair.host.submit(1, DataDirection::FromHost(len), command_number);
            }
            pair.exchange_until_idle(&mut random_fragments(seed));
            assert_eq!(
                pair.host.completions(),
                vec![(Status::ABORT_REQUESTED, 0); 4],
                "{len} bytes"
            );
            assert_eq!((pair.host.close_reason(), pair.controller.close_reason()), (None, None));
            let has_data = pair
                .controller
                .log
                .iter()
                .any(|(_, entry)| matches!(entry, SessionEvent::Data { .. }));
            assert!(!has_data, "data of a completed command are not reported");
            assert_eq!(pair.controller.connection.outstanding_tags().count(), 0);
        }
    }
}

/// A successful read whose data are incomplete is an error.
#[test]
fn a_successful_read_with_missing_data_is_a_data_transfer_error() {
    let all = [(true, 32), (false, 32), (false, 0)].into_iter();
    for ((success, len), is_fragmented) in all.flat_map(|it| [(it, true), (it, false)]) {
        let mut endpoint = HostEndpoint::new(HostConfig::default());
        endpoint.send(usize::MAX);
        endpoint.receive(NOW, IcResp::new(0, false, false, 4096).as_bytes());
        let tag = endpoint.submit(2, DataDirection::ToHost(64), 5);
        endpoint.send(usize::MAX);
        if len > 0 {
            let mut bytes = C2HData::new(PLAIN, tag, 0, len, (true, success)).as_bytes().to_vec();
            if is_fragmented {
                endpoint.receive(NOW, &bytes);
                bytes.clear();
            }
            bytes.resize(bytes.len() + len as usize, 0);
            endpoint.receive(NOW, &bytes);
        }
        if !success {
            let response = CapsuleResp::new(PLAIN, &Completion::new(tag, Status::SUCCESS));
            endpoint.receive(NOW, response.as_bytes());
        }
        assert_eq!(endpoint.completions(), [(Status::DATA_TRANSFER_ERROR, len)]);
    }
}

#[test]
fn sqhd_counts_commands_modulo_the_queue_size() {
    let mut endpoint = ControllerEndpoint::new(ControllerConfig::default());
    endpoint.receive(NOW, IcReq::new(0, false, false, 0).as_bytes());
    endpoint.send(usize::MAX);
    endpoint.connection.set_queue_kind(QueueKind::Io { entries: 3, flow_control: true });
    let heads: Vec<u8> = (0..7)
        .map(|cid| {
            endpoint
                .receive(NOW, CapsuleCmd::new(PLAIN, &Command::new(0).with_cid(cid), 0).as_bytes());
            endpoint.send(usize::MAX)[16]
        })
        .collect();
    assert_eq!(heads, [1, 2, 0, 1, 2, 0, 1]);
}

/// The three ways to complete a read, with SQ flow control and without.
#[test]
fn success_replaces_a_response_only_where_allowed() {
    for (success, flow_control, expected) in [
        (SuccessFlagPolicy::Never, true, false),
        (SuccessFlagPolicy::Never, false, false),
        (SuccessFlagPolicy::WithoutFlowControl, true, false),
        (SuccessFlagPolicy::WithoutFlowControl, false, true),
        (SuccessFlagPolicy::Always, true, true),
        (SuccessFlagPolicy::Always, false, true),
    ] {
        // A result in dword 0, a failure, and incomplete data need a response in each case.
        for (completion, len, is_allowed) in [
            (Completion::new(0, Status::SUCCESS), 64, true),
            (Completion::new(0, Status::SUCCESS).with_dw0(1), 64, false),
            (Completion::new(0, Status::SUCCESS).with_dw1(1), 64, false),
            (Completion::new(0, Status::UNRECOVERED_READ_ERROR), 64, false),
            (Completion::new(0, Status::SUCCESS), 32, false),
        ] {
            let mut endpoint = ControllerEndpoint::new(ControllerConfig {
                success,
                ..ControllerConfig::default()
            });
            endpoint.receive(NOW, IcReq::new(0, false, false, 0).as_bytes());
            endpoint.send(usize::MAX);
            endpoint.connection.set_queue_kind(QueueKind::Io { entries: 3, flow_control });
            endpoint.owner.behavior.completes_nothing = true;
            let read = Command::new(2).with_sgl1(Descriptor::transport_data_block(64));
            endpoint.receive(NOW, CapsuleCmd::new(PLAIN, &read, 0).as_bytes());
            endpoint.connection.complete(0, len, completion).unwrap();
            let sent = endpoint.send(usize::MAX);
            let has_success_flag = expected && is_allowed;
            assert_eq!(
                sent[1],
                if has_success_flag { 12 } else { 4 },
                "{success:?} {flow_control}"
            );
            assert_eq!(sent.len(), 24 + len as usize + if has_success_flag { 0 } else { 24 });
        }
    }
}

/// Valid SGLs, and the status of a command with an invalid SGL (§3.3.2).
#[test]
fn an_invalid_sgl_is_reported_with_the_command() {
    let config = ControllerConfig { transfer_bytes_max: 4096, ..ControllerConfig::default() };
    let write = Command::new(1);
    let zero = Descriptor([0, 0]);
    let prp = |command: Command| command.with_psdt(DataPointer::Prp);
    for (command, in_capsule, expected) in [
        (Command::new(0).with_sgl1(zero), 0, Ok(DataTransfer::None)),
        (prp(Command::new(0)), 0, Ok(DataTransfer::None)),
        (Command::new(0), 8, Err(Status::DATA_SGL_LENGTH_INVALID)),
        (
            write.with_sgl1(Descriptor::transport_data_block(4096)),
            0,
            Ok(DataTransfer::FromHost(4096)),
        ),
        (
            Command::new(2).with_sgl1(Descriptor::transport_data_block(4096)),
            0,
            Ok(DataTransfer::ToHost(4096)),
        ),
        (write.with_sgl1(Descriptor::transport_data_block(0)), 0, Ok(DataTransfer::None)),
        // Set Features without data: some hosts leave the SGL zero.
        (write.with_sgl1(zero), 0, Ok(DataTransfer::None)),
        (prp(Command::new(9).with_sgl1(zero)), 0, Ok(DataTransfer::None)),
        (Command::new(2).with_sgl1(Descriptor::data_block(0x1000, 0)), 0, Ok(DataTransfer::None)),
        (write.with_sgl1(zero), 8, Err(Status::SGL_DESCRIPTOR_TYPE_INVALID)),
        (
            write.with_sgl1(Descriptor::transport_data_block(4100)),
            0,
            Err(Status::DATA_SGL_LENGTH_INVALID),
        ),
        (
            write.with_sgl1(Descriptor::transport_data_block(u32::MAX)),
            0,
            Err(Status::DATA_SGL_LENGTH_INVALID),
        ),
        (
            write.with_sgl1(Descriptor::transport_data_block(6)),
            0,
            Err(Status::SGL_DATA_BLOCK_GRANULARITY_INVALID),
        ),
        (
            write.with_sgl1(Descriptor::transport_data_block(8)),
            8,
            Err(Status::DATA_SGL_LENGTH_INVALID),
        ),
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
        (
            Command::new(3).with_sgl1(Descriptor::transport_data_block(8)),
            0,
            Err(Status::INVALID_FIELD),
        ),
        (prp(write.with_sgl1(Descriptor::transport_data_block(8))), 0, Err(Status::INVALID_FIELD)),
        // FCTYPE determines the direction of Fabrics commands: Connect, and Property Get.
        (
            prp(Command::new(0x7f).with_nsid(1).with_sgl1(Descriptor::in_capsule(0, 8))),
            8,
            Ok(DataTransfer::InCapsule(8)),
        ),
        (Command::new(0x7f).with_nsid(4), 0, Ok(DataTransfer::None)),
    ] {
        let mut endpoint = ControllerEndpoint::new(config);
        endpoint.receive(NOW, IcReq::new(0, false, false, 0).as_bytes());
        endpoint.send(usize::MAX);
        endpoint.owner.behavior.completes_nothing = true;
        let capsule = CapsuleCmd::new(PLAIN, &command, in_capsule);
        endpoint.receive(NOW, capsule.as_bytes());
        endpoint.receive(NOW, &pattern_bytes(0, in_capsule));
        assert_eq!(
            endpoint.log[1],
            (0, SessionEvent::Command { cid: 0, data: expected }),
            "{command:?}"
        );
        if expected.is_err() {
            assert_eq!(
                endpoint.log.len(),
                2,
                "in-capsule data of an invalid command are discarded"
            );
            assert_eq!(endpoint.send(usize::MAX).len(), 24, "a response is sent");
        }
    }
}

/// The send budget is 256 KiB by default.
#[test]
fn a_command_waits_for_at_most_the_send_budget() {
    for budget in [None, Some(32 << 10)] {
        let mut endpoint = HostEndpoint::new(HostConfig { depth: 4, ..HostConfig::default() });
        if let Some(bytes) = budget {
            endpoint.connection.set_send_budget(bytes);
        }
        endpoint.send(usize::MAX);
        endpoint.receive(NOW, IcResp::new(0, false, false, 1 << 20).as_bytes());
        let long_write = endpoint.submit(1, DataDirection::FromHost(4 << 20), 1);
        endpoint.send(usize::MAX);
        endpoint.receive(NOW, R2t::new(PLAIN, (long_write, 0), 0, 4 << 20).as_bytes());
        endpoint.send(1);
        endpoint.submit(2, DataDirection::ToHost(512), 2);
        let queued: u64 = endpoint.connection.send_pieces().iter().map(piece_len).sum();
        let limit = u64::from(budget.unwrap_or(256 << 10));
        assert!(queued <= limit + 2 * 72 && queued > limit - 4096, "{queued} of {limit} bytes");
    }
}

fn piece_len(piece: &SendPiece) -> u64 {
    match *piece {
        SendPiece::Headers { len_bytes, .. } | SendPiece::Payload { len_bytes, .. } => {
            len_bytes.into()
        }
    }
}

/// Tables are allocated once, and the queued bytes stay within the stated limit.
#[test]
fn memory_of_an_idle_connection_is_within_its_bound() {
    let host = HostConfig::default().memory_bytes();
    let controller = ControllerConfig::default().memory_bytes();
    assert!(host < 48 << 10, "{host}");
    assert!(controller < 24 << 10, "{controller}");
    let deep = ControllerConfig { depth: 1024, ..ControllerConfig::default() };
    assert!(deep.memory_bytes() < 128 << 10, "{}", deep.memory_bytes());
    assert_eq!(deep.unsolicited_bytes_max(), 8 << 20);
}
