//! All combinations of the negotiable parameters.

use tenmil_base::Random;
use tenmil_wire::Status;

use super::test_pair::{
    ConnectedPair, ControllerOwnerBehavior, SessionEvent, pattern_bytes, random_fragments,
};
use crate::{
    Connection, ControllerConfig, DataDirection, DigestMode, HostConfig, QueueKind,
    SuccessFlagPolicy,
};

const SUCCESS: [SuccessFlagPolicy; 3] =
    [SuccessFlagPolicy::Never, SuccessFlagPolicy::WithoutFlowControl, SuccessFlagPolicy::Always];

fn digest_mode(digest: bool) -> DigestMode {
    if digest { DigestMode::Required } else { DigestMode::Off }
}

/// Runs reads, writes and commands without data of each size, and compares every byte.
fn run_commands(
    host: HostConfig,
    controller: ControllerConfig,
    behavior: ControllerOwnerBehavior,
    seed: u64,
) {
    let context = || format!("{host:?} {controller:?} {behavior:?}, seed {seed}");
    let mut pair = ConnectedPair::open(host, controller);
    pair.controller.owner.behavior = behavior;
    let flow_control = seed & 1 == 0;
    pair.controller.connection.set_queue_kind(QueueKind::Io { entries: 8, flow_control });
    let sizes = [4, 64, 4096, 5000, 12_288, 20_000];
    for (command_number, len) in (1..).zip(sizes) {
        let (read, write) = (DataDirection::ToHost(len), DataDirection::FromHost(len));
        // One command of each kind at a time, in fragments of random sizes.
        let before = pair.host.log.len();
        let tags = [
            pair.host.submit(2, read, command_number),
            pair.host.submit(1, write, command_number),
            pair.host.submit(0, DataDirection::None, command_number),
        ];
        pair.exchange_until_idle(&mut random_fragments(seed));
        let mut expected: Vec<_> = tags
            .into_iter()
            .zip([
                (len, pattern_bytes(command_number, len)),
                (0, pattern_bytes(command_number, len)),
                (0, vec![]),
            ])
            .collect();
        expected.sort();
        let mut completed: Vec<_> = pair.host.log[before..]
            .iter()
            .filter_map(|(tag, entry)| match entry {
                SessionEvent::Completed { status, transferred_bytes, bytes } => {
                    assert_eq!(*status, Status::SUCCESS, "{}", context());
                    Some((*tag, (*transferred_bytes, bytes.clone())))
                }
                _ => None,
            })
            .collect();
        completed.sort();
        assert!(completed == expected, "{} bytes: {}", len, context());
    }
    assert_eq!(
        (pair.host.close_reason(), pair.controller.close_reason()),
        (None, None),
        "{}",
        context()
    );
    assert_eq!(pair.controller.connection.outstanding_tags().count(), 0, "{}", context());
    assert_eq!(pair.host.connection.free_tags(), usize::from(host.depth), "{}", context());
}

fn connection_configs(
    digests: u8,
    alignment: u8,
    in_capsule: u32,
) -> (HostConfig, ControllerConfig) {
    let host = HostConfig {
        depth: 8,
        in_capsule_bytes: in_capsule,
        hpda: alignment,
        header_digest: digest_mode(digests & 1 != 0),
        data_digest: digest_mode(digests & 2 != 0),
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
fn every_digest_works_with_every_alignment_and_in_capsule_size() {
    for digests in 0..4 {
        for alignment in 0..=31 {
            for in_capsule in [0, 4096] {
                let (host, controller) = connection_configs(digests, alignment, in_capsule);
                let controller = ControllerConfig { cpda: 31 - alignment, ..controller };
                run_commands(
                    host,
                    controller,
                    ControllerOwnerBehavior::default(),
                    u64::from(alignment),
                );
            }
        }
    }
}

#[test]
fn every_number_of_outstanding_r2ts_works_with_every_data_limit() {
    for host_r2ts in 1..=5 {
        for controller_r2ts in 1..=4 {
            for h2c_bytes_max in [4096, 4100, 8192, 1 << 20] {
                for r2t_bytes_max in [512, 4096, 1 << 20] {
                    let (host, controller) = connection_configs(host_r2ts & 3, 0, 0);
                    let host = HostConfig { r2ts_max: host_r2ts, ..host };
                    let controller = ControllerConfig {
                        h2c_bytes_max,
                        r2t_bytes_max,
                        r2ts_max: controller_r2ts,
                        ..controller
                    };
                    run_commands(
                        host,
                        controller,
                        ControllerOwnerBehavior::default(),
                        u64::from(r2t_bytes_max),
                    );
                }
            }
        }
    }
}

/// The owner has one small buffer for all data.
#[test]
fn every_command_completes_with_one_small_buffer() {
    for bytes in [4, 512, 4096, 8192] {
        for digests in 0..4 {
            for success in SUCCESS {
                let (host, controller) = connection_configs(digests, 3, 0);
                let controller = ControllerConfig { success, c2h_bytes_max: 1000, ..controller };
                let behavior = ControllerOwnerBehavior {
                    request_bytes_max: bytes,
                    send_bytes_max: bytes,
                    ..ControllerOwnerBehavior::default()
                };
                run_commands(host, controller, behavior, u64::from(bytes));
            }
        }
    }
}

#[test]
fn random_sessions_transfer_all_data() {
    let mut random = Random::new(0x7c9);
    for seed in 0..300 {
        let mut draw = |bound: u64| random.below(bound);
        #[expect(clippy::cast_possible_truncation, reason = "drawn below a bound")]
        let (digests, alignment) = (draw(4) as u8, draw(32) as u8);
        let in_capsule = [0, 64, 4096, 8192][usize::try_from(draw(4)).unwrap()];
        let (host, controller) = connection_configs(digests, alignment, in_capsule);
        #[expect(clippy::cast_possible_truncation, reason = "drawn below a bound")]
        let (r2ts, r2ts_of_controller, r2t, c2h) =
            (draw(4) as u8 + 1, draw(4) as u8 + 1, draw(9000) as u32, draw(9000) as u32);
        let host = HostConfig { r2ts_max: r2ts, ..host };
        let controller = ControllerConfig {
            r2ts_max: r2ts_of_controller,
            r2t_bytes_max: r2t,
            c2h_bytes_max: c2h,
            success: SUCCESS[usize::try_from(draw(3)).unwrap()],
            ..controller
        };
        #[expect(clippy::cast_possible_truncation, reason = "drawn below a bound")]
        let behavior = ControllerOwnerBehavior {
            request_bytes_max: (draw(5000) as u32 + 1) * 4,
            send_bytes_max: (draw(5000) as u32 + 1) * 4,
            ..ControllerOwnerBehavior::default()
        };
        run_commands(host, controller, behavior, seed);
    }
}
