//! The fragmentation of the stream does not affect the result.

use tenmil_base::Instant;

use super::rig::{ControllerSide, HostSide, Pair, Seen};
use crate::{
    Connection, ControllerConfig, DataDirection, DigestMode, HostConfig, QueueKind, SuccessPolicy,
};

const NOW: Instant = Instant { ns: 0 };

fn configs(digests: bool, alignment: u8) -> (HostConfig, ControllerConfig) {
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
        success: SuccessPolicy::Always,
        ..ControllerConfig::default()
    };
    (host, controller)
}

/// Submits the commands of the session all at once: one without data, two reads, and one write of
/// each kind.
fn submit(side: &mut HostSide) {
    side.submit(0, DataDirection::None, 0);
    side.submit(2, DataDirection::ToHost(16), 1);
    side.submit(1, DataDirection::FromHost(32), 2);
    side.submit(1, DataDirection::FromHost(200), 3);
    side.submit(2, DataDirection::ToHost(220), 4);
}

/// Recorded session, and the number of bytes that the host sends without waiting for an R2T.
fn recorded(digests: bool, alignment: u8) -> (Pair, usize) {
    let (host, controller) = configs(digests, alignment);
    let mut pair = Pair::open(host, controller);
    pair.controller.end.connected(QueueKind::Io { entries: 8, flow_control: true });
    submit(&mut pair.host);
    let flight = pair.host.take(usize::MAX);
    pair.controller.give(NOW, &flight);
    pair.up.extend(flight);
    let unasked = pair.up.len();
    pair.run(&mut |_| usize::MAX);
    assert_eq!(pair.host.done().len(), 5, "{:?}", pair.host.log);
    (pair, unasked)
}

/// Host in the state at which the recording began.
fn fresh_host(config: HostConfig) -> HostSide {
    let mut side = HostSide::new(config);
    side.take(usize::MAX);
    side
}

/// Passes the recorded bytes to a host, fragmented at `cuts`, and returns its events. The commands
/// are submitted when the connection opens.
fn replay_host(
    config: HostConfig,
    bytes: &[u8],
    cuts: &[usize],
    is_direct: bool,
) -> Vec<(u16, Seen)> {
    let mut side = fresh_host(config);
    side.is_direct = is_direct;
    let mut submitted = false;
    let mut from = 0;
    let opening = [128];
    let mut ends: Vec<usize> = cuts.iter().copied().chain(opening).chain([bytes.len()]).collect();
    ends.sort_unstable();
    for to in ends {
        side.give(NOW, &bytes[from..to]);
        from = to;
        if side.end.is_open() && !submitted {
            submit(&mut side);
            submitted = true;
        }
        side.take(usize::MAX);
    }
    // `Done` of a write also depends on the transmission of its last byte, so only the order per
    // command is compared.
    by_command(side.log)
}

/// Passes the recorded bytes to a controller, fragmented at `cuts`, and returns its events.
/// Solicited data are passed after their R2T. Nothing is sent, so that no tag is reused.
fn replay_controller(
    config: ControllerConfig,
    (bytes, unasked): (&[u8], usize),
    cuts: &[usize],
    is_direct: bool,
) -> Vec<(u16, Seen)> {
    let mut side = ControllerSide::new(config);
    side.is_direct = is_direct;
    let mut ends: Vec<usize> = cuts.iter().copied().chain([unasked, bytes.len()]).collect();
    ends.sort_unstable();
    let mut from = 0;
    for to in ends {
        side.give(NOW, &bytes[from..to]);
        from = to;
        side.end.fill(&side.memory);
    }
    by_command(side.log)
}

/// Events sorted by command, because the time of a command's release depends on the embedding code.
fn by_command(log: Vec<(u16, Seen)>) -> Vec<(u16, Seen)> {
    let mut log: Vec<_> = log.into_iter().filter(|(_, seen)| *seen != Seen::Released).collect();
    log.sort_by_key(|(tag, _)| *tag);
    let mut merged: Vec<(u16, Seen)> = Vec::new();
    for (tag, seen) in log {
        if let (
            Some((last, Seen::Data { offset, len_bytes })),
            Seen::Data { offset: next, len_bytes: more },
        ) = (merged.last_mut(), &seen)
            && (*last, *offset + *len_bytes) == (tag, *next)
        {
            *len_bytes += more;
        } else {
            merged.push((tag, seen));
        }
    }
    merged
}

#[test]
fn every_cut_of_a_session_leads_to_the_same_events_at_both_ends() {
    for (digests, alignment) in [(false, 0), (true, 0), (false, 7), (true, 31)] {
        let (host, controller) = configs(digests, alignment);
        let (Pair { up, down, .. }, unasked) = recorded(digests, alignment);
        for is_direct in [false, true] {
            let expected = replay_host(host, &down, &[], is_direct);
            assert!(expected.len() >= 8, "{expected:?}");
            for cut in 0..=down.len() {
                let seen = replay_host(host, &down, &[cut], is_direct);
                assert_eq!(seen, expected, "host, cut at {cut}");
            }
            let expected = replay_controller(controller, (&up, unasked), &[], is_direct);
            assert!(expected.len() >= 8, "{expected:?}");
            for cut in 0..=up.len() {
                let seen = replay_controller(controller, (&up, unasked), &[cut], is_direct);
                assert_eq!(seen, expected, "controller, cut at {cut}");
            }
        }
    }
}

/// If received bytes are consumed as far as requested, all data can be received directly into their
/// buffers.
#[test]
fn who_takes_what_comes_before_data_has_all_data_go_straight() {
    for (header_digest, alignment) in [(false, 0), (true, 0), (false, 7), (true, 31)] {
        let (mut host, controller) = configs(false, alignment);
        host.header_digest = if header_digest { DigestMode::Required } else { DigestMode::Off };
        let mut pair = Pair::open(host, controller);
        pair.controller.end.connected(QueueKind::Io { entries: 8, flow_control: true });
        submit(&mut pair.host);
        pair.run(&mut |_| usize::MAX);
        let mut side = fresh_host(host);
        side.is_direct = true;
        side.give(NOW, &pair.down[..128]);
        submit(&mut side);
        side.take(usize::MAX);
        let (mut at, mut straight, mut pieces) = (128, 0, 0);
        while at < pair.down.len() {
            let rest = pair.down.len() - at;
            let count = match side.end.direct_placement().filter(|_| side.inbox.is_empty()) {
                Some(place) => {
                    straight += place.len_bytes;
                    place.len_bytes as usize
                }
                None => side.end.before_data(side.inbox.len()),
            };
            assert!((1..=rest).contains(&count), "{count} of {rest}");
            side.give(NOW, &pair.down[at..at + count]);
            side.take(usize::MAX);
            (at, pieces) = (at + count, pieces + 1);
        }
        assert_eq!((side.done().len(), straight), (5, 16 + 220), "in {pieces} pieces");
        assert_eq!(by_command(side.log), by_command(pair.host.log));
    }
}

/// With digests no data are received directly, and consumption need not stop before them.
#[test]
fn what_cannot_go_straight_is_taken_as_it_comes() {
    let (Pair { down, .. }, _) = recorded(true, 0);
    let mut side = fresh_host(configs(true, 0).0);
    side.give(NOW, &down[..128]);
    submit(&mut side);
    side.take(usize::MAX);
    assert_eq!(side.end.before_data(0), 24 + 4, "what comes may be a header");
    let mut at = 128;
    let mut has_been_within = false;
    while at < down.len() {
        let count = side.end.before_data(side.inbox.len());
        has_been_within |= count == usize::MAX;
        let count = count.min(down.len() - at).min(50);
        side.give(NOW, &down[at..at + count]);
        side.take(usize::MAX);
        at += count;
    }
    assert!(has_been_within && side.done().len() == 5);
}

#[test]
fn two_cuts_and_bytes_one_by_one_lead_to_the_same_events() {
    let (host, controller) = configs(true, 1);
    let (Pair { up, down, .. }, unasked) = recorded(true, 1);
    let expected = (
        replay_host(host, &down, &[], false),
        replay_controller(controller, (&up, unasked), &[], false),
    );
    // All pairs of cuts from the last byte of the ICReq or ICResp on, over the length of two short
    // PDUs.
    for first in 127..230 {
        for second in first..230 {
            assert_eq!(replay_host(host, &down, &[first, second], false), expected.0);
            assert_eq!(
                replay_controller(controller, (&up, unasked), &[first, second], false),
                expected.1
            );
        }
    }
    let each: Vec<usize> = (0..down.len()).collect();
    assert_eq!(replay_host(host, &down, &each, true), expected.0);
    let each: Vec<usize> = (0..up.len()).collect();
    assert_eq!(replay_controller(controller, (&up, unasked), &each, true), expected.1);
}

/// The stream ends at every byte: the end is reported once, as closed at a PDU boundary and as cut
/// elsewhere.
#[test]
fn a_stream_that_ends_anywhere_is_told_as_closed_or_cut() {
    let (host, controller) = configs(true, 0);
    let (Pair { up, down, .. }, unasked) = recorded(true, 0);
    let boundaries = |bytes: &[u8]| {
        let mut at = 0;
        let mut all = vec![0];
        while at < bytes.len() {
            at += u32::from_le_bytes(bytes[at + 4..at + 8].try_into().unwrap()) as usize;
            all.push(at);
        }
        all
    };
    let between = boundaries(&down);
    for end in 0..=down.len() {
        let mut side = fresh_host(host);
        side.give(NOW, &down[..end.min(128)]);
        if side.end.is_open() {
            submit(&mut side);
            side.take(usize::MAX);
            side.give(NOW, &down[128..end]);
            side.take(usize::MAX);
        }
        side.receive_end();
        let expected = if between.contains(&end) {
            crate::CloseReason::Closed
        } else {
            crate::CloseReason::TruncatedPdu
        };
        assert_eq!(side.cause(), Some(expected), "host, at {end}");
        assert!(side.end.is_closed());
        let ended = side.done().len();
        let submitted = if end >= 128 { 5 } else { 0 };
        assert_eq!(side.end.outstanding().count() + ended, submitted, "nothing is lost");
    }
    let between = boundaries(&up);
    for end in 0..=up.len() {
        let mut side = ControllerSide::new(controller);
        side.give(NOW, &up[..end.min(unasked)]);
        side.end.fill(&side.memory);
        side.give(NOW, &up[end.min(unasked)..end]);
        side.receive_end();
        let expected = if between.contains(&end) {
            crate::CloseReason::Closed
        } else {
            crate::CloseReason::TruncatedPdu
        };
        assert_eq!(side.cause(), Some(expected), "controller, at {end}");
        assert!(side.end.is_closed() && side.end.deadline() == Instant::NEVER);
    }
}
