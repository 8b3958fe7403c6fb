//! Peers that stop in the middle of an exchange.

use tenmil_base::{Instant, Span};
use tenmil_wire::tcp::{CapsuleCmd, H2CData, IcReq, IcResp, PduFraming};
use tenmil_wire::{Command, sgl::Descriptor};

use super::test_pair::{ControllerEndpoint, HostEndpoint};
use crate::{CloseReason, Connection, ControllerConfig, HostConfig, Timeouts};

const PLAIN: PduFraming = PduFraming { header_digest: false, data_digest: false, alignment: 0 };

fn instant_at_ms(ms: u64) -> Instant {
    Instant::default().after(Span::from_ms(ms))
}

fn short_timeouts() -> Timeouts {
    Timeouts { connect: Span::from_ms(100), pdu: Span::from_ms(50), close: Span::from_ms(20) }
}

fn controller_endpoint() -> ControllerEndpoint {
    ControllerEndpoint::new(ControllerConfig {
        timeouts: short_timeouts(),
        ..ControllerConfig::default()
    })
}

#[test]
fn a_peer_that_sends_no_ic_pdu_times_out() {
    let mut endpoint =
        HostEndpoint::new(HostConfig { timeouts: short_timeouts(), ..HostConfig::default() });
    assert_eq!(endpoint.connection.deadline(), instant_at_ms(100));
    endpoint.handle_deadline(instant_at_ms(99));
    assert_eq!(endpoint.close_reason(), None);
    endpoint.handle_deadline(instant_at_ms(100));
    assert_eq!(
        (endpoint.close_reason(), endpoint.connection.is_closed()),
        (Some(CloseReason::ConnectTimeout), true)
    );
    endpoint.handle_deadline(instant_at_ms(200));
    endpoint.handle_eof();
    assert_eq!(endpoint.log.len(), 1, "the end is reported once");
    let mut endpoint = controller_endpoint();
    endpoint.handle_deadline(instant_at_ms(100));
    assert_eq!(endpoint.close_reason(), Some(CloseReason::ConnectTimeout));
}

/// A byte now and then does not extend the deadline, neither before nor after the connection opens.
#[test]
fn single_bytes_of_a_header_do_not_extend_its_deadline() {
    let request = IcReq::new(0, false, false, 0);
    let mut endpoint = controller_endpoint();
    for (ms, byte) in (10..60).step_by(10).zip(request.as_bytes()) {
        endpoint.receive(instant_at_ms(ms), &[*byte]);
        assert_eq!(
            endpoint.connection.deadline(),
            instant_at_ms(60),
            "counted from the first byte"
        );
    }
    endpoint.handle_deadline(instant_at_ms(60));
    assert_eq!(endpoint.close_reason(), Some(CloseReason::ConnectTimeout));

    let mut endpoint = controller_endpoint();
    endpoint.receive(instant_at_ms(0), request.as_bytes());
    assert_eq!(endpoint.connection.deadline(), Instant::NEVER, "an idle host may be silent");
    for ms in (200..240).step_by(10) {
        endpoint.receive(instant_at_ms(ms), &[4]);
        assert_eq!(endpoint.connection.deadline(), instant_at_ms(250));
    }
    endpoint.handle_deadline(instant_at_ms(250));
    assert_eq!(
        (endpoint.close_reason(), endpoint.connection.is_closed()),
        (Some(CloseReason::PduTimeout), true)
    );
}

#[test]
fn each_data_fragment_extends_the_pdu_deadline() {
    let mut endpoint = controller_endpoint();
    endpoint.receive(instant_at_ms(0), IcReq::new(0, false, false, 0).as_bytes());
    let write = Command::new(1).with_sgl1(Descriptor::transport_data_block(64));
    endpoint.receive(instant_at_ms(0), CapsuleCmd::new(PLAIN, &write, 0).as_bytes());
    endpoint.send(usize::MAX);
    endpoint.receive(instant_at_ms(0), H2CData::new(PLAIN, (0, 0), 0, 64, true).as_bytes());
    for step in 0..10 {
        endpoint.receive(instant_at_ms(step * 40), &[0; 4]);
        assert_eq!(endpoint.connection.deadline(), instant_at_ms(step * 40 + 50));
        endpoint.handle_deadline(instant_at_ms(step * 40 + 39));
    }
    assert_eq!(endpoint.close_reason(), None);
    endpoint.receive(instant_at_ms(400), &[]);
    assert_eq!(
        endpoint.connection.deadline(),
        instant_at_ms(410),
        "an empty receive does not extend the deadline"
    );
    endpoint.handle_deadline(instant_at_ms(410));
    assert_eq!(endpoint.close_reason(), Some(CloseReason::PduTimeout));
}

/// A socket of a terminated connection does not stay open.
#[test]
fn a_peer_that_ignores_a_term_req_is_closed() {
    let mut endpoint = controller_endpoint();
    endpoint.receive(instant_at_ms(5), &[0xff; 8]);
    assert!(!endpoint.connection.is_write_closed(), "the TermReq is unsent");
    endpoint.send(usize::MAX);
    assert!(endpoint.connection.is_write_closed() && !endpoint.connection.is_closed());
    assert_eq!(endpoint.connection.deadline(), instant_at_ms(25));
    endpoint.receive(instant_at_ms(20), &[0; 1000]);
    assert_eq!(
        endpoint.connection.deadline(),
        instant_at_ms(25),
        "received bytes do not extend the deadline"
    );
    endpoint.handle_deadline(instant_at_ms(25));
    assert!(endpoint.connection.is_closed());
    assert_eq!(endpoint.log.len(), 1, "the end is reported once");
}

#[test]
fn an_open_connection_has_no_deadline_between_pdus() {
    let mut endpoint =
        HostEndpoint::new(HostConfig { timeouts: short_timeouts(), ..HostConfig::default() });
    let response = IcResp::new(0, false, false, 4096);
    endpoint.receive(instant_at_ms(1), &response.as_bytes()[..127]);
    assert_eq!(endpoint.connection.deadline(), instant_at_ms(51));
    endpoint.receive(instant_at_ms(2), &response.as_bytes()[127..]);
    assert_eq!(endpoint.connection.deadline(), Instant::NEVER);
}
