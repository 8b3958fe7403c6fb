//! Digests that are wrong: fatal for a header, the command's end for data (§3.5).

use base::Instant;
use wire::Status;
use wire::tcp::Refusal;

use super::rig::{Pair, Seen, refused};
use crate::{ControllerConfig, Data, DigestUse, HostConfig, SuccessFlag};

const NOW: Instant = Instant { ns: 0 };

fn pair(success: SuccessFlag) -> Pair {
    let host = HostConfig {
        depth: 4,
        in_capsule_bytes: 64,
        header_digest: DigestUse::Required,
        data_digest: DigestUse::Required,
        ..HostConfig::default()
    };
    let controller = ControllerConfig { depth: 4, success, ..ControllerConfig::default() };
    Pair::open(host, controller)
}

/// Carries bytes to the controller with one bit of byte `at` from the end wrong.
fn up(pair: &mut Pair, at: usize) {
    let mut bytes = pair.host.take(usize::MAX);
    let len = bytes.len();
    bytes[len - 1 - at] ^= 4;
    pair.controller.give(NOW, &bytes);
}

#[test]
fn a_read_whose_data_come_damaged_is_to_be_tried_again_and_the_connection_stays() {
    for success in [SuccessFlag::Never, SuccessFlag::Always] {
        // The data, and the digest itself.
        for at in [4, 67, 0, 3] {
            let mut pair = pair(success);
            pair.host.submit(2, Data::ToHost(64), 1);
            let bytes = pair.host.take(usize::MAX);
            pair.controller.give(NOW, &bytes);
            let mut bytes = pair.controller.take(usize::MAX);
            let response = if success == SuccessFlag::Never { 28 } else { 0 };
            let place = bytes.len() - 1 - response - at;
            bytes[place] ^= 4;
            pair.host.give(NOW, &bytes);
            assert_eq!(pair.host.done(), [(Status::TRANSIENT_TRANSPORT_ERROR, 64)]);
            pair.host.submit(2, Data::ToHost(64), 2);
            pair.run(&mut |_| usize::MAX);
            assert_eq!(pair.host.done()[1..], [(Status::SUCCESS, 64)]);
        }
    }
}

#[test]
fn a_write_whose_data_come_damaged_is_to_be_tried_again_and_the_connection_stays() {
    for len in [64, 256] {
        let mut pair = pair(SuccessFlag::Never);
        pair.host.submit(1, Data::FromHost(len), 1);
        if len > 64 {
            let bytes = pair.host.take(usize::MAX);
            pair.controller.give(NOW, &bytes);
            let bytes = pair.controller.take(usize::MAX);
            pair.host.give(NOW, &bytes);
        }
        up(&mut pair, 4);
        pair.run(&mut |_| usize::MAX);
        // The owner has finished it with a success, which it was not.
        assert!(pair.controller.log.contains(&(0, Seen::Arrived { is_intact: false })));
        assert_eq!(pair.host.done(), [(Status::TRANSIENT_TRANSPORT_ERROR, 0)]);
        pair.host.submit(1, Data::FromHost(len), 2);
        pair.run(&mut |_| usize::MAX);
        assert_eq!(pair.host.done()[1..], [(Status::SUCCESS, 0)]);
        assert_eq!((pair.host.cause(), pair.controller.cause()), (None, None));
    }
}

#[test]
fn a_failure_of_the_command_itself_is_not_hidden_by_damaged_data() {
    let mut pair = pair(SuccessFlag::Never);
    pair.controller.owner.manner.status = Status::WRITE_FAULT;
    pair.host.submit(1, Data::FromHost(64), 1);
    up(&mut pair, 4);
    pair.run(&mut |_| usize::MAX);
    assert_eq!(pair.host.done(), [(Status::WRITE_FAULT, 0)]);
}

#[test]
fn every_bit_of_a_header_is_guarded() {
    for bit in 0..76 * 8 {
        let mut pair = pair(SuccessFlag::Never);
        pair.host.submit(0, Data::None, 1);
        let mut bytes = pair.host.take(usize::MAX);
        assert_eq!(bytes.len(), 76);
        bytes[bit / 8] ^= 1 << (bit % 8);
        pair.controller.give(NOW, &bytes);
        pair.controller.give(NOW, &[0; 128]);
        let found = u32::from_le_bytes(bytes[72..].try_into().unwrap());
        let cause = pair.controller.cause();
        if bit < 8 {
            // Another type: another length, or a direction that is wrong.
            assert!(cause.is_some(), "bit {bit}");
        } else {
            assert_eq!(cause, refused(Refusal::digest(found)), "bit {bit}");
        }
    }
}
