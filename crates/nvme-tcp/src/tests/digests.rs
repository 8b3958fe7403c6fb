//! Wrong digests: fatal for a header; for data, the command fails (§3.5).

use tenmil_base::Instant;
use tenmil_wire::Status;
use tenmil_wire::tcp::FatalError;

use super::rig::{Pair, Seen, refused};
use crate::{ControllerConfig, DataDirection, DigestMode, HostConfig, SuccessPolicy};

const NOW: Instant = Instant { ns: 0 };

fn pair(success: SuccessPolicy) -> Pair {
    let host = HostConfig {
        depth: 4,
        in_capsule_bytes: 64,
        header_digest: DigestMode::Required,
        data_digest: DigestMode::Required,
        ..HostConfig::default()
    };
    let controller = ControllerConfig { depth: 4, success, ..ControllerConfig::default() };
    Pair::open(host, controller)
}

/// Passes bytes to the controller with one bit of the byte `at` positions from the end inverted.
fn up(pair: &mut Pair, at: usize) {
    let mut bytes = pair.host.take(usize::MAX);
    let len = bytes.len();
    bytes[len - 1 - at] ^= 4;
    pair.controller.give(NOW, &bytes);
}

#[test]
fn a_read_whose_data_come_damaged_is_to_be_tried_again_and_the_connection_stays() {
    for success in [SuccessPolicy::Never, SuccessPolicy::Always] {
        // The data, and the digest itself.
        for at in [4, 67, 0, 3] {
            let mut pair = pair(success);
            pair.host.submit(2, DataDirection::ToHost(64), 1);
            let bytes = pair.host.take(usize::MAX);
            pair.controller.give(NOW, &bytes);
            let mut bytes = pair.controller.take(usize::MAX);
            let response = if success == SuccessPolicy::Never { 28 } else { 0 };
            let place = bytes.len() - 1 - response - at;
            bytes[place] ^= 4;
            pair.host.give(NOW, &bytes);
            assert_eq!(pair.host.done(), [(Status::TRANSIENT_TRANSPORT_ERROR, 64)]);
            pair.host.submit(2, DataDirection::ToHost(64), 2);
            pair.run(&mut |_| usize::MAX);
            assert_eq!(pair.host.done()[1..], [(Status::SUCCESS, 64)]);
        }
    }
}

#[test]
fn a_write_whose_data_come_damaged_is_to_be_tried_again_and_the_connection_stays() {
    for len in [64, 256] {
        let mut pair = pair(SuccessPolicy::Never);
        pair.host.submit(1, DataDirection::FromHost(len), 1);
        if len > 64 {
            let bytes = pair.host.take(usize::MAX);
            pair.controller.give(NOW, &bytes);
            let bytes = pair.controller.take(usize::MAX);
            pair.host.give(NOW, &bytes);
        }
        up(&mut pair, 4);
        pair.run(&mut |_| usize::MAX);
        // The embedding code has finished the command with success, which the connection has
        // replaced.
        assert!(pair.controller.log.contains(&(0, Seen::Arrived { is_intact: false })));
        assert_eq!(pair.host.done(), [(Status::TRANSIENT_TRANSPORT_ERROR, 0)]);
        pair.host.submit(1, DataDirection::FromHost(len), 2);
        pair.run(&mut |_| usize::MAX);
        assert_eq!(pair.host.done()[1..], [(Status::SUCCESS, 0)]);
        assert_eq!((pair.host.cause(), pair.controller.cause()), (None, None));
    }
}

#[test]
fn a_failure_of_the_command_itself_is_not_hidden_by_damaged_data() {
    let mut pair = pair(SuccessPolicy::Never);
    pair.controller.owner.manner.status = Status::WRITE_FAULT;
    pair.host.submit(1, DataDirection::FromHost(64), 1);
    up(&mut pair, 4);
    pair.run(&mut |_| usize::MAX);
    assert_eq!(pair.host.done(), [(Status::WRITE_FAULT, 0)]);
}

#[test]
fn every_bit_of_a_header_is_guarded() {
    for bit in 0..76 * 8 {
        let mut pair = pair(SuccessPolicy::Never);
        pair.host.submit(0, DataDirection::None, 1);
        let mut bytes = pair.host.take(usize::MAX);
        assert_eq!(bytes.len(), 76);
        bytes[bit / 8] ^= 1 << (bit % 8);
        pair.controller.give(NOW, &bytes);
        pair.controller.give(NOW, &[0; 128]);
        let found = u32::from_le_bytes(bytes[72..].try_into().unwrap());
        let cause = pair.controller.cause();
        if bit < 8 {
            // Another PDU type has another length or the wrong direction.
            assert!(cause.is_some(), "bit {bit}");
        } else {
            assert_eq!(cause, refused(FatalError::digest(found)), "bit {bit}");
        }
    }
}
