//! Wrong digests: fatal for a header; for data, the command fails (§3.5).

use tenmil_base::Instant;
use tenmil_wire::Status;
use tenmil_wire::tcp::FatalError;

use super::test_pair::{ConnectedPair, SessionEvent, closed_by_protocol_error};
use crate::{ControllerConfig, DataDirection, DigestMode, HostConfig, SuccessFlagPolicy};

const NOW: Instant = Instant { ns: 0 };

fn connected_pair(success: SuccessFlagPolicy) -> ConnectedPair {
    let host = HostConfig {
        depth: 4,
        in_capsule_bytes: 64,
        header_digest: DigestMode::Required,
        data_digest: DigestMode::Required,
        ..HostConfig::default()
    };
    let controller = ControllerConfig { depth: 4, success, ..ControllerConfig::default() };
    ConnectedPair::open(host, controller)
}

/// Passes bytes to the controller with one bit of the byte `at` positions from the end inverted.
fn deliver_to_controller_with_inverted_bit(pair: &mut ConnectedPair, at: usize) {
    let mut bytes = pair.host.send(usize::MAX);
    let len = bytes.len();
    bytes[len - 1 - at] ^= 4;
    pair.controller.receive(NOW, &bytes);
}

#[test]
fn a_read_with_a_wrong_data_digest_fails_and_the_connection_stays_open() {
    for success in [SuccessFlagPolicy::Never, SuccessFlagPolicy::Always] {
        // The data, and the digest itself.
        for at in [4, 67, 0, 3] {
            let mut pair = connected_pair(success);
            pair.host.submit(2, DataDirection::ToHost(64), 1);
            let bytes = pair.host.send(usize::MAX);
            pair.controller.receive(NOW, &bytes);
            let mut bytes = pair.controller.send(usize::MAX);
            let response = if success == SuccessFlagPolicy::Never { 28 } else { 0 };
            let placement = bytes.len() - 1 - response - at;
            bytes[placement] ^= 4;
            pair.host.receive(NOW, &bytes);
            assert_eq!(pair.host.completions(), [(Status::TRANSIENT_TRANSPORT_ERROR, 64)]);
            pair.host.submit(2, DataDirection::ToHost(64), 2);
            pair.exchange_until_idle(&mut |_| usize::MAX);
            assert_eq!(pair.host.completions()[1..], [(Status::SUCCESS, 64)]);
        }
    }
}

#[test]
fn a_write_with_a_wrong_data_digest_fails_and_the_connection_stays_open() {
    for len in [64, 256] {
        let mut pair = connected_pair(SuccessFlagPolicy::Never);
        pair.host.submit(1, DataDirection::FromHost(len), 1);
        if len > 64 {
            let bytes = pair.host.send(usize::MAX);
            pair.controller.receive(NOW, &bytes);
            let bytes = pair.controller.send(usize::MAX);
            pair.host.receive(NOW, &bytes);
        }
        deliver_to_controller_with_inverted_bit(&mut pair, 4);
        pair.exchange_until_idle(&mut |_| usize::MAX);
        // The owner has completed the command with success, which the connection has replaced.
        assert!(
            pair.controller.log.contains(&(0, SessionEvent::DataComplete { is_intact: false }))
        );
        assert_eq!(pair.host.completions(), [(Status::TRANSIENT_TRANSPORT_ERROR, 0)]);
        pair.host.submit(1, DataDirection::FromHost(len), 2);
        pair.exchange_until_idle(&mut |_| usize::MAX);
        assert_eq!(pair.host.completions()[1..], [(Status::SUCCESS, 0)]);
        assert_eq!((pair.host.close_reason(), pair.controller.close_reason()), (None, None));
    }
}

#[test]
fn an_error_status_is_kept_when_a_data_digest_is_wrong() {
    let mut pair = connected_pair(SuccessFlagPolicy::Never);
    pair.controller.owner.behavior.status = Status::WRITE_FAULT;
    pair.host.submit(1, DataDirection::FromHost(64), 1);
    deliver_to_controller_with_inverted_bit(&mut pair, 4);
    pair.exchange_until_idle(&mut |_| usize::MAX);
    assert_eq!(pair.host.completions(), [(Status::WRITE_FAULT, 0)]);
}

#[test]
fn every_inverted_header_bit_closes_the_connection() {
    for bit in 0..76 * 8 {
        let mut pair = connected_pair(SuccessFlagPolicy::Never);
        pair.host.submit(0, DataDirection::None, 1);
        let mut bytes = pair.host.send(usize::MAX);
        assert_eq!(bytes.len(), 76);
        bytes[bit / 8] ^= 1 << (bit % 8);
        pair.controller.receive(NOW, &bytes);
        pair.controller.receive(NOW, &[0; 128]);
        let found = u32::from_le_bytes(bytes[72..].try_into().unwrap());
        let close_reason = pair.controller.close_reason();
        if bit < 8 {
            // Another PDU type has another length or the wrong direction.
            assert!(close_reason.is_some(), "bit {bit}");
        } else {
            assert_eq!(
                close_reason,
                closed_by_protocol_error(FatalError::header_digest_error(found)),
                "bit {bit}"
            );
        }
    }
}
