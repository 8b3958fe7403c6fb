//! All invalid field values, at their limits, at both ends: the rows of [`RULES`] that the
//! connection enforces.

use std::collections::BTreeSet;

use tenmil_base::Instant;
use tenmil_wire::sgl::Descriptor;
use tenmil_wire::tcp::validation_rules::{CheckedBy, RULES};
use tenmil_wire::tcp::{
    C2HData, CapsuleCmd, CapsuleResp, FatalError, FatalStatus, H2CData, IcReq, IcResp, PduFraming,
    PduType, R2t, crc32c,
};
use tenmil_wire::{Command, Completion, Status};

use super::rig::{ControllerSide, HostSide, Owned, Side, refused};
use crate::{CloseReason, Connection, ControllerConfig, DataDirection, DigestMode, HostConfig};

const NOW: Instant = Instant { ns: 0 };
const PLAIN: PduFraming = PduFraming { header_digest: false, data_digest: false, alignment: 0 };

/// Violations observed: PDU type, status, offset.
type Seen = BTreeSet<(PduType, FatalStatus, Option<u8>)>;

/// Host with three outstanding commands: 0 reads 64 bytes, 1 writes 64 bytes after an R2T, 2 has no
/// data.
fn host() -> HostSide {
    let mut side = HostSide::new(HostConfig { depth: 4, r2ts_max: 2, ..HostConfig::default() });
    side.take(usize::MAX);
    side.give(NOW, IcResp::new(0, false, false, 8192).as_bytes());
    side.submit(2, DataDirection::ToHost(64), 0);
    side.submit(1, DataDirection::FromHost(64), 1);
    side.submit(0, DataDirection::None, 2);
    side.take(usize::MAX);
    side
}

/// Controller that has sent an R2T for the first 64 bytes of the 16 KiB of command 7, whose tag is
/// 0, and none for command 8, whose tag is 1.
fn controller() -> ControllerSide {
    let mut side = ControllerSide::new(ControllerConfig {
        depth: 4,
        h2c_bytes_max: 4096,
        r2t_bytes_max: 8192,
        r2ts_max: 1,
        ..ControllerConfig::default()
    });
    side.give(NOW, IcReq::new(0, false, false, 0).as_bytes());
    side.owner.manner.is_idle = true;
    let write = Command::new(1).with_sgl1(Descriptor::transport(16_384));
    side.give(NOW, CapsuleCmd::new(PLAIN, &write.with_cid(7), 0).as_bytes());
    side.take(usize::MAX);
    let read = Command::new(2).with_sgl1(Descriptor::transport(16_384));
    side.give(NOW, CapsuleCmd::new(PLAIN, &read.with_cid(8), 0).as_bytes());
    side
}

/// Checks that the peer was sent a termination request for this violation, with the offending
/// header.
fn is_told(sent: &[u8], kind: PduType, refusal: FatalError, header: &[u8]) {
    let request = &sent[sent.len() - 24 - header.len()..];
    assert_eq!((request[0], request[2]), (kind as u8, 24));
    assert_eq!(usize::from(request[4]), request.len());
    assert_eq!(request[8..10], refusal.status.code().to_le_bytes());
    assert_eq!(request[10..14], refusal.information.to_le_bytes());
    assert_eq!(&request[24..], header);
}

fn has_offset(refusal: FatalError) -> Option<u8> {
    let tells = matches!(
        refusal.status,
        FatalStatus::InvalidHeaderField | FatalStatus::UnsupportedParameter
    );
    tells.then(|| u8::try_from(refusal.information).unwrap())
}

/// Passes PDUs to an end; the last one is a violation if `expected` is given.
fn try_on<E: Connection, O>(
    side: &mut Side<E, O>,
    told: PduType,
    seen: &mut Seen,
    units: &[Vec<u8>],
    expected: Option<FatalError>,
) where
    Side<E, O>: Owned,
{
    for unit in units {
        assert_eq!(side.cause(), None, "only the last is refused");
        side.give(NOW, unit);
    }
    let last = units.last().unwrap();
    let kind = PduType::from_u8(last[0]).unwrap();
    let Some(refusal) = expected else {
        assert_eq!(side.cause(), None, "{kind:?} is taken");
        return;
    };
    assert_eq!(side.cause(), refused(refusal), "{kind:?}");
    let header = &last[..usize::from(kind.header_bytes())];
    is_told(&side.take(usize::MAX), told, refusal, header);
    assert!(side.end.is_write_closed() && !side.end.is_closed());
    seen.insert((kind, refusal.status, has_offset(refusal)));
}

fn try_on_host(
    side: &mut HostSide,
    seen: &mut Seen,
    units: &[Vec<u8>],
    expected: Option<FatalError>,
) {
    try_on(side, PduType::H2CTermReq, seen, units, expected);
}

fn try_on_controller(
    side: &mut ControllerSide,
    seen: &mut Seen,
    units: &[Vec<u8>],
    expected: Option<FatalError>,
) {
    try_on(side, PduType::C2HTermReq, seen, units, expected);
}

fn try_host(seen: &mut Seen, units: &[Vec<u8>], expected: Option<FatalError>) {
    try_on_host(&mut host(), seen, units, expected);
}

fn try_controller(seen: &mut Seen, units: &[Vec<u8>], expected: Option<FatalError>) {
    try_on_controller(&mut controller(), seen, units, expected);
}

/// C2HData PDU.
fn down(cid: u16, offset: u32, len: u32, last: bool, success: bool) -> Vec<u8> {
    let header = C2HData::new(PLAIN, cid, offset, len, (last, success));
    [header.as_bytes().to_vec(), vec![0; len as usize]].concat()
}

/// H2CData PDU.
fn up(cid: u16, ttag: u16, offset: u32, len: u32, last: bool) -> Vec<u8> {
    let header = H2CData::new(PLAIN, (cid, ttag), offset, len, last);
    [header.as_bytes().to_vec(), vec![0; len as usize]].concat()
}

fn ask(cid: u16, offset: u32, len: u32) -> Vec<u8> {
    R2t::new(PLAIN, (cid, 77), offset, len).as_bytes().to_vec()
}

fn response(cid: u16) -> Vec<u8> {
    CapsuleResp::new(PLAIN, &Completion::new(cid, Status::SUCCESS)).as_bytes().to_vec()
}

fn command(cid: u16, len: u32) -> Vec<u8> {
    let write = Command::new(1).with_sgl1(Descriptor::transport(len)).with_cid(cid);
    CapsuleCmd::new(PLAIN, &write, 0).as_bytes().to_vec()
}

fn hosts_data(seen: &mut Seen) {
    let field = |offset| Some(FatalError::field(offset));
    for (unit, expected) in [
        (down(0, 0, 64, true, false), None),
        (down(0, 0, 4, false, false), None),
        (down(3, 0, 64, true, false), field(8)),
        (down(4, 0, 64, true, false), field(8)),
        (down(u16::MAX, 0, 64, true, false), field(8)),
        (down(1, 0, 64, true, false), Some(FatalError::SEQUENCE)),
        (down(2, 0, 4, true, false), Some(FatalError::SEQUENCE)),
        (down(0, 0, 68, true, false), Some(FatalError::RANGE)),
        (down(0, 64, 4, true, false), Some(FatalError::RANGE)),
        (down(0, u32::MAX - 3, 8, true, false), Some(FatalError::RANGE)),
        (down(0, 4, 60, true, false), Some(FatalError::SEQUENCE)),
    ] {
        try_host(seen, &[unit], expected);
    }
    let first = down(0, 0, 32, false, false);
    for (second, expected) in [
        (down(0, 32, 32, true, true), None),
        (down(0, 28, 32, true, true), Some(FatalError::SEQUENCE)),
        (down(0, 36, 28, true, true), Some(FatalError::SEQUENCE)),
        (down(0, 0, 32, false, false), Some(FatalError::SEQUENCE)),
        (down(0, 32, 36, true, true), Some(FatalError::RANGE)),
    ] {
        try_host(seen, &[first.clone(), second], expected);
    }
    // Data after LAST_PDU, and after SUCCESS.
    let last = down(0, 0, 32, true, false);
    try_host(seen, &[last, down(0, 32, 32, true, false)], Some(FatalError::SEQUENCE));
    let success = down(0, 0, 64, true, true);
    try_host(seen, &[success.clone(), down(0, 0, 64, true, false)], field(8));
    try_host(seen, &[success, response(0)], field(20));
}

fn hosts_others(seen: &mut Seen) {
    let field = |offset| Some(FatalError::field(offset));
    for (cid, expected) in [(0, None), (1, None), (2, None), (3, field(20)), (0xffff, field(20))] {
        try_host(seen, &[response(cid)], expected);
    }
    try_host(seen, &[response(2), response(2)], field(20));
    for (unit, expected) in [
        (ask(1, 0, 64), None),
        (ask(1, 0, 4), None),
        (ask(3, 0, 64), field(8)),
        (ask(0, 0, 64), Some(FatalError::SEQUENCE)),
        (ask(2, 0, 64), Some(FatalError::SEQUENCE)),
        (ask(1, 0, 68), Some(FatalError::RANGE)),
        (ask(1, u32::MAX - 3, 8), Some(FatalError::RANGE)),
        (ask(1, 4, 60), Some(FatalError::SEQUENCE)),
    ] {
        try_host(seen, &[unit], expected);
    }
    let two = [ask(1, 0, 16), ask(1, 16, 16)];
    try_host(seen, &two, None);
    let third = [&two[..], &[ask(1, 32, 16)]].concat();
    try_host(seen, &third, Some(FatalError::LIMIT));
    try_host(seen, &[ask(1, 0, 16), ask(1, 12, 16)], Some(FatalError::SEQUENCE));
    let again = IcResp::new(0, false, false, 8192).as_bytes().to_vec();
    try_host(seen, &[again], Some(FatalError::SEQUENCE));
    for unit in [response(0), down(0, 0, 64, true, false), ask(0, 0, 64)] {
        let mut side = HostSide::new(HostConfig::default());
        try_on_host(&mut side, seen, &[unit], Some(FatalError::SEQUENCE));
    }
    for (header, data) in [(true, false), (false, true)] {
        let using = |digest| if digest { DigestMode::Required } else { DigestMode::Off };
        let (header_digest, data_digest) = (using(header), using(data));
        let config = HostConfig { header_digest, data_digest, ..HostConfig::default() };
        let without = IcResp::new(0, false, false, 8192).as_bytes().to_vec();
        let mut side = HostSide::new(config);
        try_on_host(&mut side, seen, &[without], Some(FatalError::parameter(11)));
    }
}

fn controllers_data(seen: &mut Seen) {
    let field = |offset| Some(FatalError::field(offset));
    for (unit, expected) in [
        (up(7, 0, 0, 4096, false), None),
        (up(7, 0, 0, 4, false), None),
        (up(7, 1, 0, 64, false), field(10)),
        (up(8, 1, 0, 64, false), field(10)),
        (up(7, 4, 0, 64, false), field(10)),
        (up(7, u16::MAX, 0, 64, false), field(10)),
        (up(8, 0, 0, 64, false), field(8)),
        (up(7, 0, 0, 4100, false), Some(FatalError::LIMIT)),
        (up(7, 0, 8192, 4, false), Some(FatalError::RANGE)),
        (up(7, 0, 4100, 4096, false), Some(FatalError::RANGE)),
        (up(7, 0, u32::MAX - 3, 8, false), Some(FatalError::RANGE)),
        (up(7, 0, 4, 64, false), Some(FatalError::SEQUENCE)),
        (up(7, 0, 0, 64, true), Some(FatalError::SEQUENCE)),
    ] {
        try_controller(seen, &[unit], expected);
    }
    let first = up(7, 0, 0, 4096, false);
    for (second, expected) in [
        (up(7, 0, 4096, 4096, true), None),
        (up(7, 0, 4096, 4096, false), Some(FatalError::SEQUENCE)),
        (up(7, 0, 4092, 4096, false), Some(FatalError::SEQUENCE)),
        (up(7, 0, 0, 4096, false), Some(FatalError::SEQUENCE)),
        (up(7, 0, 4100, 4092, true), Some(FatalError::SEQUENCE)),
    ] {
        try_controller(seen, &[first.clone(), second], expected);
    }
    // After the end of an R2T, and before the next one.
    let rest = up(7, 0, 4096, 4096, true);
    try_controller(seen, &[first, rest, up(7, 0, 8192, 4096, false)], field(10));
}

fn controllers_others(seen: &mut Seen) {
    let again = IcReq::new(0, false, false, 0).as_bytes().to_vec();
    try_controller(seen, &[again], Some(FatalError::SEQUENCE));
    for unit in [command(0, 64), up(0, 0, 0, 64, true)] {
        let mut side = ControllerSide::new(ControllerConfig::default());
        try_on_controller(&mut side, seen, &[unit], Some(FatalError::SEQUENCE));
    }
    // A table full of commands that wait for data accepts no further command.
    let mut side =
        ControllerSide::new(ControllerConfig { depth: 2, ..ControllerConfig::default() });
    side.give(NOW, IcReq::new(0, false, false, 0).as_bytes());
    let units = [command(0, 64), command(1, 64), command(2, 64)];
    try_on_controller(&mut side, seen, &units, Some(FatalError::SEQUENCE));
}

/// Each PDU type with one wrong bit in its digest.
fn digests(seen: &mut Seen) {
    let framing = PduFraming { header_digest: true, ..PLAIN };
    let signed = |header: &[u8]| {
        let found = crc32c(header) ^ 1 << 9;
        ([header, &found.to_le_bytes()].concat(), Some(FatalError::digest(found)))
    };
    let completion = Completion::new(0, Status::SUCCESS);
    for header in [
        CapsuleResp::new(framing, &completion).as_bytes().to_vec(),
        C2HData::new(framing, 0, 0, 64, (true, true)).as_bytes().to_vec(),
        R2t::new(framing, (1, 0), 0, 64).as_bytes().to_vec(),
    ] {
        let config = HostConfig { header_digest: DigestMode::Preferred, ..HostConfig::default() };
        let mut side = HostSide::new(config);
        side.give(NOW, IcResp::new(0, true, false, 8192).as_bytes());
        let (unit, expected) = signed(&header);
        try_on_host(&mut side, seen, &[unit], expected);
    }
    for header in [
        CapsuleCmd::new(framing, &Command::new(0), 0).as_bytes().to_vec(),
        H2CData::new(framing, (0, 0), 0, 64, true).as_bytes().to_vec(),
    ] {
        let mut side = ControllerSide::new(ControllerConfig::default());
        side.give(NOW, IcReq::new(0, true, false, 0).as_bytes());
        let (unit, expected) = signed(&header);
        try_on_controller(&mut side, seen, &[unit], expected);
    }
}

#[test]
fn everything_is_refused_at_its_edges_as_the_table_says_and_all_of_the_table_is_seen() {
    let mut seen = Seen::new();
    hosts_data(&mut seen);
    hosts_others(&mut seen);
    controllers_data(&mut seen);
    controllers_others(&mut seen);
    digests(&mut seen);
    let rules = RULES.iter().filter(|rule| rule.checked_by == CheckedBy::Connection);
    let told: Seen = rules.map(|rule| (rule.pdu, rule.status, rule.offset)).collect();
    assert_eq!(told, seen, "the table has a row for each refusal, and a refusal for each row");
}

/// Violations that are detected in the header alone are tested in `wire`; this test checks that
/// both ends detect them.
#[test]
fn a_header_that_is_refused_for_its_own_sake_ends_the_connection() {
    let bent = |mut unit: Vec<u8>, at: usize| {
        unit[at] ^= 0x81;
        unit
    };
    for at in [1, 2, 4] {
        let refusal = Some(FatalError::field(u8::try_from(at).unwrap()));
        let mut seen = Seen::new();
        for unit in [response(0), down(0, 0, 64, true, false), ask(1, 0, 64)] {
            try_host(&mut seen, &[bent(unit, at)], refusal);
        }
        try_controller(&mut seen, &[bent(up(7, 0, 0, 64, false), at)], refusal);
        // With another PLEN the capsule has data, and PDO is checked first.
        let first = if at == 4 { Some(FatalError::field(3)) } else { refusal };
        try_controller(&mut seen, &[bent(command(0, 64), at)], first);
        let opening = IcReq::new(0, false, false, 0).as_bytes().to_vec();
        let mut side = ControllerSide::new(ControllerConfig::default());
        let expected = refusal.filter(|_| at != 1);
        try_on_controller(&mut side, &mut seen, &[bent(opening, at)], expected);
        let opening = IcResp::new(0, false, false, 8192).as_bytes().to_vec();
        let mut side = HostSide::new(HostConfig::default());
        try_on_host(&mut side, &mut seen, &[bent(opening, at)], expected);
    }
    let mut seen = Seen::new();
    let odd = R2t::new(PLAIN, (1, 0), 0, 2).as_bytes().to_vec();
    try_host(&mut seen, &[odd], Some(FatalError::field(16)));
    try_host(&mut seen, &[down(0, 2, 4, true, false)], Some(FatalError::field(12)));
    try_controller(&mut seen, &[up(7, 0, 2, 4, true)], Some(FatalError::field(12)));
    let mut in_capsule = CapsuleCmd::new(PLAIN, &Command::new(1), 8196).as_bytes().to_vec();
    in_capsule.resize(72 + 8196, 0);
    try_controller(&mut seen, &[in_capsule], Some(FatalError::field(4)));
}

/// An undefined type, types of the wrong direction, and a port scanner.
#[test]
fn a_stranger_is_told_with_the_eight_bytes_that_it_began_with() {
    for kind in [0x08, 0x0a, 0xff, PduType::CapsuleCmd as u8, PduType::IcReq as u8] {
        let mut side = host();
        let unit = [kind, 1, 2, 3, 4, 5, 6, 7, 8, 9];
        side.give(NOW, &unit);
        assert_eq!(side.cause(), refused(FatalError::field(0)));
        is_told(&side.take(usize::MAX), PduType::H2CTermReq, FatalError::field(0), &unit[..8]);
    }
    let mut side = ControllerSide::new(ControllerConfig::default());
    side.give(NOW, b"GET / H");
    assert_eq!(side.cause(), None, "a byte is missing");
    side.give(NOW, b"TTP/1.1\r\n");
    assert_eq!(side.cause(), refused(FatalError::field(0)));
    let told = side.take(usize::MAX);
    is_told(&told, PduType::C2HTermReq, FatalError::field(0), b"GET / HT");
    side.give(NOW, &[0; 500]);
    assert!(side.inbox.is_empty() && side.take(usize::MAX).is_empty(), "nothing more is said");
    side.receive_end();
    assert!(side.end.is_closed());
    assert_eq!(side.log.len(), 1, "and its end is told once");
}

/// §3.5: the peer's reason, unless the termination request is too long or too short.
#[test]
fn a_termination_request_ends_the_connection_at_once() {
    for plen in [0_u32, 23, 24, 25, 152, 153, u32::MAX] {
        let is_sound = (24..=152).contains(&plen);
        let mut unit = vec![0; 24];
        unit[2] = 24;
        unit[4..8].copy_from_slice(&plen.to_le_bytes());
        unit[8] = 4;
        let says = FatalError { status: FatalStatus::OutOfRange, information: 0 };
        let expected =
            if is_sound { CloseReason::Terminated(says) } else { CloseReason::InvalidTermination };
        let mut side = host();
        unit[0] = 3;
        side.give(NOW, &unit);
        assert_eq!(side.cause(), Some(expected));
        assert!(side.end.is_closed() && side.end.outstanding().count() == 3);
        let mut side = controller();
        unit[0] = 2;
        side.give(NOW, &unit);
        assert_eq!(side.cause(), Some(expected));
        assert!(side.end.is_closed() && side.end.outstanding().count() == 2);
    }
}
