//! The fragmentation of the stream does not affect the result.

use tenmil_base::Instant;

use super::test_pair::{ConnectedPair, ControllerEndpoint, HostEndpoint, SessionEvent};
use crate::{
    Connection, ControllerConfig, DataDirection, DigestMode, HostConfig, QueueKind,
    SuccessFlagPolicy,
};

const NOW: Instant = Instant { ns: 0 };

fn connection_configs(digests: bool, alignment: u8) -> (HostConfig, ControllerConfig) {
    let using = if digests { DigestMode::Required } else { DigestMode::Off };
    let host = HostConfig {
        depth: 8,
        in_capsule_bytes: 64,
        hpda: alignment,
        header_digest: using,
        data_digest: using,
        r2ts_max: 4,
        ..HostConfig::default()
    };
    let controller = ControllerConfig {
        depth: 8,
        in_capsule_bytes: 64,
        cpda: alignment,
        r2ts_max: 4,
        r2t_bytes_max: 64,
        c2h_bytes_max: 100,
        success: SuccessFlagPolicy::Always,
        ..ControllerConfig::default()
    };
    (host, controller)
}

/// Submits the commands of the session all at once: one without data, two reads, and one write of
/// each kind.
fn submit_sample_commands(endpoint: &mut HostEndpoint) {
    endpoint.submit(0, DataDirection::None, 0);
    endpoint.submit(2, DataDirection::ToHost(16), 1);
    endpoint.submit(1, DataDirection::FromHost(32), 2);
    endpoint.submit(1, DataDirection::FromHost(200), 3);
    endpoint.submit(2, DataDirection::ToHost(220), 4);
}

/// Recorded session, and the number of bytes that the host sends without waiting for an R2T.
fn record_session(digests: bool, alignment: u8) -> (ConnectedPair, usize) {
    let (host, controller) = connection_configs(digests, alignment);
    let mut pair = ConnectedPair::open(host, controller);
    pair.controller.connection.set_queue_kind(QueueKind::Io { entries: 8, flow_control: true });
    submit_sample_commands(&mut pair.host);
    let request_bytes = pair.host.send(usize::MAX);
    pair.controller.receive(NOW, &request_bytes);
    pair.to_controller.extend(request_bytes);
    let unsolicited = pair.to_controller.len();
    pair.exchange_until_idle(&mut |_| usize::MAX);
    assert_eq!(pair.host.completions().len(), 5, "{:?}", pair.host.log);
    (pair, unsolicited)
}

/// Host in the state at which the recording began.
fn host_after_sending_ic_req(config: HostConfig) -> HostEndpoint {
    let mut endpoint = HostEndpoint::new(config);
    endpoint.send(usize::MAX);
    endpoint
}

/// Passes the recorded bytes to a host, fragmented at `cut_offsets`, and returns its events. The commands
/// are submitted when the connection opens.
fn replay_host(
    config: HostConfig,
    bytes: &[u8],
    cut_offsets: &[usize],
    is_direct: bool,
) -> Vec<(u16, SessionEvent)> {
    let mut endpoint = host_after_sending_ic_req(config);
    endpoint.is_direct = is_direct;
    let mut submitted = false;
    let mut begin = 0;
    let opening = [128];
    let mut ends: Vec<usize> =
        cut_offsets.iter().copied().chain(opening).chain([bytes.len()]).collect();
    ends.sort_unstable();
    for to in ends {
        endpoint.receive(NOW, &bytes[begin..to]);
        begin = to;
        if endpoint.connection.is_open() && !submitted {
            submit_sample_commands(&mut endpoint);
            submitted = true;
        }
        endpoint.send(usize::MAX);
    }
    // `Completed` of a write also depends on the transmission of its last byte, so only the order per
    // command is compared.
    sorted_by_command(endpoint.log)
}

/// Passes the recorded bytes to a controller, fragmented at `cut_offsets`, and returns its events.
/// Solicited data are passed after their R2T. Nothing is sent, so that no tag is reused.
fn replay_controller(
    config: ControllerConfig,
    (bytes, unsolicited): (&[u8], usize),
    cut_offsets: &[usize],
    is_direct: bool,
) -> Vec<(u16, SessionEvent)> {
    let mut endpoint = ControllerEndpoint::new(config);
    endpoint.is_direct = is_direct;
    let mut ends: Vec<usize> =
        cut_offsets.iter().copied().chain([unsolicited, bytes.len()]).collect();
    ends.sort_unstable();
    let mut begin = 0;
    for to in ends {
        endpoint.receive(NOW, &bytes[begin..to]);
        begin = to;
        endpoint.connection.fill_send_queue(&endpoint.memory);
    }
    sorted_by_command(endpoint.log)
}

/// Events sorted by command, because the time of a command's release depends on the owner.
fn sorted_by_command(log: Vec<(u16, SessionEvent)>) -> Vec<(u16, SessionEvent)> {
    let mut log: Vec<_> =
        log.into_iter().filter(|(_, events)| *events != SessionEvent::Sent).collect();
    log.sort_by_key(|(tag, _)| *tag);
    let mut merged: Vec<(u16, SessionEvent)> = Vec::new();
    for (tag, events) in log {
        if let (
            Some((last, SessionEvent::Data { offset, len_bytes })),
            SessionEvent::Data { offset: next, len_bytes: more },
        ) = (merged.last_mut(), &events)
            && (*last, *offset + *len_bytes) == (tag, *next)
        {
            *len_bytes += more;
        } else {
            merged.push((tag, events));
        }
    }
    merged
}

#[test]
fn every_fragmentation_in_two_gives_the_same_events_at_both_ends() {
    for (digests, alignment) in [(false, 0), (true, 0), (false, 7), (true, 31)] {
        let (host, controller) = connection_configs(digests, alignment);
        let (ConnectedPair { to_controller, to_host, .. }, unsolicited) =
            record_session(digests, alignment);
        for is_direct in [false, true] {
            let expected = replay_host(host, &to_host, &[], is_direct);
            assert!(expected.len() >= 8, "{expected:?}");
            for cut in 0..=to_host.len() {
                let events = replay_host(host, &to_host, &[cut], is_direct);
                assert_eq!(events, expected, "host, cut at {cut}");
            }
            let expected =
                replay_controller(controller, (&to_controller, unsolicited), &[], is_direct);
            assert!(expected.len() >= 8, "{expected:?}");
            for cut in 0..=to_controller.len() {
                let events =
                    replay_controller(controller, (&to_controller, unsolicited), &[cut], is_direct);
                assert_eq!(events, expected, "controller, cut at {cut}");
            }
        }
    }
}

/// If received bytes are consumed as far as requested, all data can be received directly into their
/// buffers.
#[test]
fn all_data_are_received_directly_if_headers_are_received_separately() {
    for (header_digest, alignment) in [(false, 0), (true, 0), (false, 7), (true, 31)] {
        let (mut host, controller) = connection_configs(false, alignment);
        host.header_digest = if header_digest { DigestMode::Required } else { DigestMode::Off };
        let mut pair = ConnectedPair::open(host, controller);
        pair.controller.connection.set_queue_kind(QueueKind::Io { entries: 8, flow_control: true });
        submit_sample_commands(&mut pair.host);
        pair.exchange_until_idle(&mut |_| usize::MAX);
        let mut endpoint = host_after_sending_ic_req(host);
        endpoint.is_direct = true;
        endpoint.receive(NOW, &pair.to_host[..128]);
        submit_sample_commands(&mut endpoint);
        endpoint.send(usize::MAX);
        let (mut at, mut direct_bytes, mut pieces) = (128, 0, 0);
        while at < pair.to_host.len() {
            let rest = pair.to_host.len() - at;
            let count = match endpoint
                .connection
                .next_direct_placement()
                .filter(|_| endpoint.unconsumed.is_empty())
            {
                Some(placement) => {
                    direct_bytes += placement.len_bytes;
                    placement.len_bytes as usize
                }
                None => endpoint.connection.receivable_bytes_before_data(endpoint.unconsumed.len()),
            };
            assert!((1..=rest).contains(&count), "{count} of {rest}");
            endpoint.receive(NOW, &pair.to_host[at..at + count]);
            endpoint.send(usize::MAX);
            (at, pieces) = (at + count, pieces + 1);
        }
        assert_eq!(
            (endpoint.completions().len(), direct_bytes),
            (5, 16 + 220),
            "in {pieces} pieces"
        );
        assert_eq!(sorted_by_command(endpoint.log), sorted_by_command(pair.host.log));
    }
}

/// With digests no data are received directly, and consumption need not stop before them.
#[test]
fn data_with_a_digest_are_received_with_headers() {
    let (ConnectedPair { to_host, .. }, _) = record_session(true, 0);
    let mut endpoint = host_after_sending_ic_req(connection_configs(true, 0).0);
    endpoint.receive(NOW, &to_host[..128]);
    submit_sample_commands(&mut endpoint);
    endpoint.send(usize::MAX);
    assert_eq!(
        endpoint.connection.receivable_bytes_before_data(0),
        24 + 4,
        "the next bytes may be a header"
    );
    let mut at = 128;
    let mut was_inside_pdu = false;
    while at < to_host.len() {
        let count = endpoint.connection.receivable_bytes_before_data(endpoint.unconsumed.len());
        was_inside_pdu |= count > 24 + 4;
        let count = count.min(to_host.len() - at).min(50);
        endpoint.receive(NOW, &to_host[at..at + count]);
        endpoint.send(usize::MAX);
        at += count;
    }
    assert!(was_inside_pdu && endpoint.completions().len() == 5);
}

#[test]
fn three_fragments_and_single_bytes_give_the_same_events() {
    let (host, controller) = connection_configs(true, 1);
    let (ConnectedPair { to_controller, to_host, .. }, unsolicited) = record_session(true, 1);
    let expected = (
        replay_host(host, &to_host, &[], false),
        replay_controller(controller, (&to_controller, unsolicited), &[], false),
    );
    // All pairs of cuts from the last byte of the ICReq or ICResp on, over the length of two short
    // PDUs.
    for first in 127..230 {
        for second in first..230 {
            assert_eq!(replay_host(host, &to_host, &[first, second], false), expected.0);
            assert_eq!(
                replay_controller(
                    controller,
                    (&to_controller, unsolicited),
                    &[first, second],
                    false
                ),
                expected.1
            );
        }
    }
    let each: Vec<usize> = (0..to_host.len()).collect();
    assert_eq!(replay_host(host, &to_host, &each, true), expected.0);
    let each: Vec<usize> = (0..to_controller.len()).collect();
    assert_eq!(
        replay_controller(controller, (&to_controller, unsolicited), &each, true),
        expected.1
    );
}

/// The stream ends at every byte: the end is reported once, as closed at a PDU boundary and as cut
/// elsewhere.
#[test]
fn a_stream_that_ends_within_a_pdu_is_reported_as_truncated() {
    let (host, controller) = connection_configs(true, 0);
    let (ConnectedPair { to_controller, to_host, .. }, unsolicited) = record_session(true, 0);
    let boundaries = |bytes: &[u8]| {
        let mut at = 0;
        let mut all = vec![0];
        while at < bytes.len() {
            at += u32::from_le_bytes(bytes[at + 4..at + 8].try_into().unwrap()) as usize;
            all.push(at);
        }
        all
    };
    // The end of the stream is regular only between two PDUs.
    let pdu_ends = boundaries(&to_host);
    for end in 0..=to_host.len() {
        let mut endpoint = host_after_sending_ic_req(host);
        endpoint.receive(NOW, &to_host[..end.min(128)]);
        if endpoint.connection.is_open() {
            submit_sample_commands(&mut endpoint);
            endpoint.send(usize::MAX);
            endpoint.receive(NOW, &to_host[128..end]);
            endpoint.send(usize::MAX);
        }
        endpoint.handle_eof();
        let expected = if pdu_ends.contains(&end) {
            crate::CloseReason::Closed
        } else {
            crate::CloseReason::TruncatedPdu
        };
        assert_eq!(endpoint.close_reason(), Some(expected), "host, at {end}");
        assert!(endpoint.connection.is_closed());
        let completed = endpoint.completions().len();
        let submitted = if end >= 128 { 5 } else { 0 };
        assert_eq!(
            endpoint.connection.outstanding_tags().count() + completed,
            submitted,
            "every command is completed or outstanding"
        );
    }
    let pdu_ends = boundaries(&to_controller);
    for end in 0..=to_controller.len() {
        let mut endpoint = ControllerEndpoint::new(controller);
        endpoint.receive(NOW, &to_controller[..end.min(unsolicited)]);
        endpoint.connection.fill_send_queue(&endpoint.memory);
        endpoint.receive(NOW, &to_controller[end.min(unsolicited)..end]);
        endpoint.handle_eof();
        let expected = if pdu_ends.contains(&end) {
            crate::CloseReason::Closed
        } else {
            crate::CloseReason::TruncatedPdu
        };
        assert_eq!(endpoint.close_reason(), Some(expected), "controller, at {end}");
        assert!(
            endpoint.connection.is_closed() && endpoint.connection.deadline() == Instant::NEVER
        );
    }
}
