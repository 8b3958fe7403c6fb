//! All combinations of the negotiable parameters.

use tenmil_base::Random;
use tenmil_wire::Status;

use super::rig::{Manner, Pair, Seen, drawn, pattern};
use crate::{
    Connection, ControllerConfig, DataDirection, DigestMode, HostConfig, QueueKind, SuccessPolicy,
};

const SUCCESS: [SuccessPolicy; 3] =
    [SuccessPolicy::Never, SuccessPolicy::WithoutFlowControl, SuccessPolicy::Always];

fn using(digest: bool) -> DigestMode {
    if digest { DigestMode::Required } else { DigestMode::Off }
}

/// Runs reads, writes and commands without data of each size, and compares every byte.
fn exercise(host: HostConfig, controller: ControllerConfig, manner: Manner, seed: u64) {
    let what = || format!("{host:?} {controller:?} {manner:?}, seed {seed}");
    let mut pair = Pair::open(host, controller);
    pair.controller.owner.manner = manner;
    let flow_control = seed & 1 == 0;
    pair.controller.end.connected(QueueKind::Io { entries: 8, flow_control });
    let sizes = [4, 64, 4096, 5000, 12_288, 20_000];
    for (number, len) in (1..).zip(sizes) {
        let (read, write) = (DataDirection::ToHost(len), DataDirection::FromHost(len));
        let before = pair.host.log.len();
        let tags = [
            pair.host.submit(2, read, number),
            pair.host.submit(1, write, number),
            pair.host.submit(0, DataDirection::None, number),
        ];
        pair.run(&mut drawn(seed));
        let mut expected: Vec<_> = tags
            .into_iter()
            .zip([(len, pattern(number, len)), (0, pattern(number, len)), (0, vec![])])
            .collect();
        expected.sort();
        let mut done: Vec<_> = pair.host.log[before..]
            .iter()
            .filter_map(|(tag, seen)| match seen {
                Seen::Done { status, moved_bytes, bytes } => {
                    assert_eq!(*status, Status::SUCCESS, "{}", what());
                    Some((*tag, (*moved_bytes, bytes.clone())))
                }
                _ => None,
            })
            .collect();
        done.sort();
        assert!(done == expected, "{} bytes: {}", len, what());
    }
    assert_eq!((pair.host.cause(), pair.controller.cause()), (None, None), "{}", what());
    assert_eq!(pair.controller.end.outstanding().count(), 0, "{}", what());
    assert_eq!(pair.host.end.room(), usize::from(host.depth), "{}", what());
}

fn pair_of(digests: u8, alignment: u8, in_capsule: u32) -> (HostConfig, ControllerConfig) {
    let host = HostConfig {
        depth: 8,
        in_capsule_bytes: in_capsule,
        hpda: alignment,
        header_digest: using(digests & 1 != 0),
        data_digest: using(digests & 2 != 0),
        ..HostConfig::default()
    };
    let controller = ControllerConfig {
        depth: 8,
        in_capsule_bytes: in_capsule,
        cpda: alignment,
        h2c_bytes_max: 4096,
        ..ControllerConfig::default()
    };
    (host, controller)
}

#[test]
fn every_digest_with_every_alignment_in_capsules_and_without() {
    for digests in 0..4 {
        for alignment in 0..=31 {
            for in_capsule in [0, 4096] {
                let (host, controller) = pair_of(digests, alignment, in_capsule);
                let controller = ControllerConfig { cpda: 31 - alignment, ..controller };
                exercise(host, controller, Manner::default(), u64::from(alignment));
            }
        }
    }
}

#[test]
fn every_number_of_outstanding_r2ts_with_every_limit_of_data() {
    for host_r2ts in 1..=5 {
        for own_r2ts in 1..=4 {
            for h2c_bytes_max in [4096, 4100, 8192, 1 << 20] {
                for r2t_bytes_max in [512, 4096, 1 << 20] {
                    let (host, controller) = pair_of(host_r2ts & 3, 0, 0);
                    let host = HostConfig { r2ts_max: host_r2ts, ..host };
                    let controller = ControllerConfig {
                        h2c_bytes_max,
                        r2t_bytes_max,
                        r2ts_max: own_r2ts,
                        ..controller
                    };
                    exercise(host, controller, Manner::default(), u64::from(r2t_bytes_max));
                }
            }
        }
    }
}

/// The embedding code has one small buffer, through which all data pass.
#[test]
fn every_command_comes_through_with_one_small_buffer() {
    for bytes in [4, 512, 4096, 8192] {
        for digests in 0..4 {
            for success in SUCCESS {
                let (host, controller) = pair_of(digests, 3, 0);
                let controller = ControllerConfig { success, c2h_bytes_max: 1000, ..controller };
                let manner = Manner { grant_bytes: bytes, reply_bytes: bytes, ..Manner::default() };
                exercise(host, controller, manner, u64::from(bytes));
            }
        }
    }
}

#[test]
fn drawn_sessions_over_drawn_connections_lose_nothing() {
    let mut random = Random::new(0x7c9);
    for seed in 0..300 {
        let mut draw = |bound: u64| random.below(bound);
        #[expect(clippy::cast_possible_truncation, reason = "drawn below a bound")]
        let (digests, alignment) = (draw(4) as u8, draw(32) as u8);
        let in_capsule = [0, 64, 4096, 8192][usize::try_from(draw(4)).unwrap()];
        let (host, controller) = pair_of(digests, alignment, in_capsule);
        #[expect(clippy::cast_possible_truncation, reason = "drawn below a bound")]
        let (r2ts, own, r2t, c2h) =
            (draw(4) as u8 + 1, draw(4) as u8 + 1, draw(9000) as u32, draw(9000) as u32);
        let host = HostConfig { r2ts_max: r2ts, ..host };
        let controller = ControllerConfig {
            r2ts_max: own,
            r2t_bytes_max: r2t,
            c2h_bytes_max: c2h,
            success: SUCCESS[usize::try_from(draw(3)).unwrap()],
            ..controller
        };
        #[expect(clippy::cast_possible_truncation, reason = "drawn below a bound")]
        let manner = Manner {
            grant_bytes: (draw(5000) as u32 + 1) * 4,
            reply_bytes: (draw(5000) as u32 + 1) * 4,
            ..Manner::default()
        };
        exercise(host, controller, manner, seed);
    }
}
