//! Peers that stop in the middle of an exchange.

use tenmil_base::{Instant, Span};
use tenmil_wire::tcp::{CapsuleCmd, H2CData, IcReq, IcResp, PduFraming};
use tenmil_wire::{Command, sgl::Descriptor};

use super::rig::{ControllerSide, HostSide};
use crate::{CloseReason, Connection, ControllerConfig, HostConfig, Timeouts};

const PLAIN: PduFraming = PduFraming { header_digest: false, data_digest: false, alignment: 0 };

fn at(ms: u64) -> Instant {
    Instant::default().after(Span::from_ms(ms))
}

fn time_limit() -> Timeouts {
    Timeouts { opening: Span::from_ms(100), unit: Span::from_ms(50), linger: Span::from_ms(20) }
}

fn controller() -> ControllerSide {
    ControllerSide::new(ControllerConfig {
        time_limit: time_limit(),
        ..ControllerConfig::default()
    })
}

#[test]
fn a_peer_that_does_not_open_is_given_up() {
    let mut side = HostSide::new(HostConfig { time_limit: time_limit(), ..HostConfig::default() });
    assert_eq!(side.end.deadline(), at(100));
    side.expired(at(99));
    assert_eq!(side.cause(), None);
    side.expired(at(100));
    assert_eq!((side.cause(), side.end.is_closed()), (Some(CloseReason::ConnectTimeout), true));
    side.expired(at(200));
    side.receive_end();
    assert_eq!(side.log.len(), 1, "its end is told once");
    let mut side = controller();
    side.expired(at(100));
    assert_eq!(side.cause(), Some(CloseReason::ConnectTimeout));
}

/// A byte now and then does not extend the deadline, neither before nor after the connection opens.
#[test]
fn a_header_that_never_ends_is_given_up_however_it_drips() {
    let request = IcReq::new(0, false, false, 0);
    let mut side = controller();
    for (ms, byte) in (10..60).step_by(10).zip(request.as_bytes()) {
        side.give(at(ms), &[*byte]);
        assert_eq!(side.end.deadline(), at(60), "from the first byte on");
    }
    side.expired(at(60));
    assert_eq!(side.cause(), Some(CloseReason::ConnectTimeout));

    let mut side = controller();
    side.give(at(0), request.as_bytes());
    assert_eq!(side.end.deadline(), Instant::NEVER, "an idle host may be silent");
    for ms in (200..240).step_by(10) {
        side.give(at(ms), &[4]);
        assert_eq!(side.end.deadline(), at(250));
    }
    side.expired(at(250));
    assert_eq!((side.cause(), side.end.is_closed()), (Some(CloseReason::PduTimeout), true));
}

#[test]
fn data_that_go_on_are_waited_for_and_data_that_stop_are_not() {
    let mut side = controller();
    side.give(at(0), IcReq::new(0, false, false, 0).as_bytes());
    let write = Command::new(1).with_sgl1(Descriptor::transport(64));
    side.give(at(0), CapsuleCmd::new(PLAIN, &write, 0).as_bytes());
    side.take(usize::MAX);
    side.give(at(0), H2CData::new(PLAIN, (0, 0), 0, 64, true).as_bytes());
    for step in 0..10 {
        side.give(at(step * 40), &[0; 4]);
        assert_eq!(side.end.deadline(), at(step * 40 + 50));
        side.expired(at(step * 40 + 39));
    }
    assert_eq!(side.cause(), None);
    side.give(at(400), &[]);
    assert_eq!(side.end.deadline(), at(410), "no data are no progress");
    side.expired(at(410));
    assert_eq!(side.cause(), Some(CloseReason::PduTimeout));
}

/// A socket of a terminated connection does not stay open.
#[test]
fn a_peer_that_does_not_close_is_closed() {
    let mut side = controller();
    side.give(at(5), &[0xff; 8]);
    assert!(!side.end.is_write_closed(), "it is still to be told");
    side.take(usize::MAX);
    assert!(side.end.is_write_closed() && !side.end.is_closed());
    assert_eq!(side.end.deadline(), at(25));
    side.give(at(20), &[0; 1000]);
    assert_eq!(side.end.deadline(), at(25), "what it says does not count");
    side.expired(at(25));
    assert!(side.end.is_closed());
    assert_eq!(side.log.len(), 1, "its end is told once");
}

#[test]
fn an_open_connection_has_no_deadline_between_units() {
    let mut side = HostSide::new(HostConfig { time_limit: time_limit(), ..HostConfig::default() });
    let response = IcResp::new(0, false, false, 4096);
    side.give(at(1), &response.as_bytes()[..127]);
    assert_eq!(side.end.deadline(), at(51));
    side.give(at(2), &response.as_bytes()[127..]);
    assert_eq!(side.end.deadline(), Instant::NEVER);
}
