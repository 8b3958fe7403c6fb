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

use super::test_pair::{
    ControllerEndpoint, HandleEvents, HostEndpoint, TestEndpoint, closed_by_protocol_error,
};
use crate::{CloseReason, Connection, ControllerConfig, DataDirection, DigestMode, HostConfig};

const NOW: Instant = Instant { ns: 0 };
const PLAIN: PduFraming = PduFraming { header_digest: false, data_digest: false, alignment: 0 };

/// Violations observed: PDU type, status, offset.
type ObservedViolations = BTreeSet<(PduType, FatalStatus, Option<u8>)>;

/// Host with three outstanding commands: 0 reads 64 bytes, 1 writes 64 bytes after an R2T, 2 has no
/// data.
fn host_with_commands() -> HostEndpoint {
    let mut endpoint =
        HostEndpoint::new(HostConfig { depth: 4, r2ts_max: 2, ..HostConfig::default() });
    endpoint.send(usize::MAX);
    endpoint.receive(NOW, IcResp::new(0, false, false, 8192).as_bytes());
    endpoint.submit(2, DataDirection::ToHost(64), 0);
    endpoint.submit(1, DataDirection::FromHost(64), 1);
    endpoint.submit(0, DataDirection::None, 2);
    endpoint.send(usize::MAX);
    endpoint
}

/// Controller that has sent an R2T for the first 64 bytes of the 16 KiB of command 7, whose tag is
/// 0, and none for command 8, whose tag is 1.
fn controller_with_command() -> ControllerEndpoint {
    let mut endpoint = ControllerEndpoint::new(ControllerConfig {
        depth: 4,
        h2c_bytes_max: 4096,
        r2t_bytes_max: 8192,
        r2ts_max: 1,
        ..ControllerConfig::default()
    });
    endpoint.receive(NOW, IcReq::new(0, false, false, 0).as_bytes());
    endpoint.owner.behavior.completes_nothing = true;
    let write = Command::new(1).with_sgl1(Descriptor::transport_data_block(16_384));
    endpoint.receive(NOW, CapsuleCmd::new(PLAIN, &write.with_cid(7), 0).as_bytes());
    endpoint.send(usize::MAX);
    let read = Command::new(2).with_sgl1(Descriptor::transport_data_block(16_384));
    endpoint.receive(NOW, CapsuleCmd::new(PLAIN, &read.with_cid(8), 0).as_bytes());
    endpoint
}

/// Checks that the peer was sent a termination request for this violation, with the offending
/// header.
fn assert_term_req(sent: &[u8], kind: PduType, violation: FatalError, header: &[u8]) {
    let request = &sent[sent.len() - 24 - header.len()..];
    assert_eq!((request[0], request[2]), (kind as u8, 24));
    assert_eq!(usize::from(request[4]), request.len());
    assert_eq!(request[8..10], violation.status.code().to_le_bytes());
    assert_eq!(request[10..14], violation.information.to_le_bytes());
    assert_eq!(&request[24..], header);
}

fn field_offset(violation: FatalError) -> Option<u8> {
    let has_field_offset = matches!(
        violation.status,
        FatalStatus::InvalidHeaderField | FatalStatus::UnsupportedParameter
    );
    has_field_offset.then(|| u8::try_from(violation.information).unwrap())
}

/// Passes PDUs to an end; the last one is a violation if `expected` is given.
fn check_pdus<E: Connection, O>(
    endpoint: &mut TestEndpoint<E, O>,
    expected_kind: PduType,
    violations: &mut ObservedViolations,
    pdus: &[Vec<u8>],
    expected: Option<FatalError>,
) where
    TestEndpoint<E, O>: HandleEvents,
{
    for pdu in pdus {
        assert_eq!(endpoint.close_reason(), None, "only the last PDU is a violation");
        endpoint.receive(NOW, pdu);
    }
    let last = pdus.last().unwrap();
    let kind = PduType::from_u8(last[0]).unwrap();
    let Some(violation) = expected else {
        assert_eq!(endpoint.close_reason(), None, "{kind:?} is accepted");
        return;
    };
    assert_eq!(endpoint.close_reason(), closed_by_protocol_error(violation), "{kind:?}");
    let header = &last[..usize::from(kind.header_bytes())];
    assert_term_req(&endpoint.send(usize::MAX), expected_kind, violation, header);
    assert!(endpoint.connection.is_write_closed() && !endpoint.connection.is_closed());
    violations.insert((kind, violation.status, field_offset(violation)));
}

fn check_on_host(
    endpoint: &mut HostEndpoint,
    violations: &mut ObservedViolations,
    pdus: &[Vec<u8>],
    expected: Option<FatalError>,
) {
    check_pdus(endpoint, PduType::H2CTermReq, violations, pdus, expected);
}

fn check_on_controller(
    endpoint: &mut ControllerEndpoint,
    violations: &mut ObservedViolations,
    pdus: &[Vec<u8>],
    expected: Option<FatalError>,
) {
    check_pdus(endpoint, PduType::C2HTermReq, violations, pdus, expected);
}

fn check_host(violations: &mut ObservedViolations, pdus: &[Vec<u8>], expected: Option<FatalError>) {
    check_on_host(&mut host_with_commands(), violations, pdus, expected);
}

fn check_controller(
    violations: &mut ObservedViolations,
    pdus: &[Vec<u8>],
    expected: Option<FatalError>,
) {
    check_on_controller(&mut controller_with_command(), violations, pdus, expected);
}

/// C2HData PDU.
fn c2h_data_pdu(cid: u16, offset: u32, len: u32, last: bool, success: bool) -> Vec<u8> {
    let header = C2HData::new(PLAIN, cid, offset, len, (last, success));
    [header.as_bytes().to_vec(), vec![0; len as usize]].concat()
}

/// H2CData PDU.
fn h2c_data_pdu(cid: u16, ttag: u16, offset: u32, len: u32, last: bool) -> Vec<u8> {
    let header = H2CData::new(PLAIN, (cid, ttag), offset, len, last);
    [header.as_bytes().to_vec(), vec![0; len as usize]].concat()
}

fn r2t_pdu(cid: u16, offset: u32, len: u32) -> Vec<u8> {
    R2t::new(PLAIN, (cid, 77), offset, len).as_bytes().to_vec()
}

fn response_pdu(cid: u16) -> Vec<u8> {
    CapsuleResp::new(PLAIN, &Completion::new(cid, Status::SUCCESS)).as_bytes().to_vec()
}

fn command_pdu(cid: u16, len: u32) -> Vec<u8> {
    let write = Command::new(1).with_sgl1(Descriptor::transport_data_block(len)).with_cid(cid);
    CapsuleCmd::new(PLAIN, &write, 0).as_bytes().to_vec()
}

fn check_host_data_pdus(violations: &mut ObservedViolations) {
    let field = |offset| Some(FatalError::invalid_field(offset));
    for (pdu, expected) in [
        (c2h_data_pdu(0, 0, 64, true, false), None),
        (c2h_data_pdu(0, 0, 4, false, false), None),
        (c2h_data_pdu(3, 0, 64, true, false), field(8)),
        (c2h_data_pdu(4, 0, 64, true, false), field(8)),
        (c2h_data_pdu(u16::MAX, 0, 64, true, false), field(8)),
        (c2h_data_pdu(1, 0, 64, true, false), Some(FatalError::SEQUENCE)),
        (c2h_data_pdu(2, 0, 4, true, false), Some(FatalError::SEQUENCE)),
        (c2h_data_pdu(0, 0, 68, true, false), Some(FatalError::RANGE)),
        (c2h_data_pdu(0, 64, 4, true, false), Some(FatalError::RANGE)),
        (c2h_data_pdu(0, u32::MAX - 3, 8, true, false), Some(FatalError::RANGE)),
        (c2h_data_pdu(0, 4, 60, true, false), Some(FatalError::SEQUENCE)),
    ] {
        check_host(violations, &[pdu], expected);
    }
    let first = c2h_data_pdu(0, 0, 32, false, false);
    for (second, expected) in [
        (c2h_data_pdu(0, 32, 32, true, true), None),
        (c2h_data_pdu(0, 28, 32, true, true), Some(FatalError::SEQUENCE)),
        (c2h_data_pdu(0, 36, 28, true, true), Some(FatalError::SEQUENCE)),
        (c2h_data_pdu(0, 0, 32, false, false), Some(FatalError::SEQUENCE)),
        (c2h_data_pdu(0, 32, 36, true, true), Some(FatalError::RANGE)),
    ] {
        check_host(violations, &[first.clone(), second], expected);
    }
    // Data after LAST_PDU, and after SUCCESS.
    let last = c2h_data_pdu(0, 0, 32, true, false);
    check_host(
        violations,
        &[last, c2h_data_pdu(0, 32, 32, true, false)],
        Some(FatalError::SEQUENCE),
    );
    let success = c2h_data_pdu(0, 0, 64, true, true);
    check_host(violations, &[success.clone(), c2h_data_pdu(0, 0, 64, true, false)], field(8));
    check_host(violations, &[success, response_pdu(0)], field(20));
}

fn check_host_other_pdus(violations: &mut ObservedViolations) {
    let field = |offset| Some(FatalError::invalid_field(offset));
    for (cid, expected) in [(0, None), (1, None), (2, None), (3, field(20)), (0xffff, field(20))] {
        check_host(violations, &[response_pdu(cid)], expected);
    }
    check_host(violations, &[response_pdu(2), response_pdu(2)], field(20));
    for (pdu, expected) in [
        (r2t_pdu(1, 0, 64), None),
        (r2t_pdu(1, 0, 4), None),
        (r2t_pdu(3, 0, 64), field(8)),
        (r2t_pdu(0, 0, 64), Some(FatalError::SEQUENCE)),
        (r2t_pdu(2, 0, 64), Some(FatalError::SEQUENCE)),
        (r2t_pdu(1, 0, 68), Some(FatalError::RANGE)),
        (r2t_pdu(1, u32::MAX - 3, 8), Some(FatalError::RANGE)),
        (r2t_pdu(1, 4, 60), Some(FatalError::SEQUENCE)),
    ] {
        check_host(violations, &[pdu], expected);
    }
    let two_r2ts = [r2t_pdu(1, 0, 16), r2t_pdu(1, 16, 16)];
    check_host(violations, &two_r2ts, None);
    let three_r2ts = [&two_r2ts[..], &[r2t_pdu(1, 32, 16)]].concat();
    check_host(violations, &three_r2ts, Some(FatalError::LIMIT));
    check_host(violations, &[r2t_pdu(1, 0, 16), r2t_pdu(1, 12, 16)], Some(FatalError::SEQUENCE));
    let second_ic = IcResp::new(0, false, false, 8192).as_bytes().to_vec();
    check_host(violations, &[second_ic], Some(FatalError::SEQUENCE));
    for pdu in [response_pdu(0), c2h_data_pdu(0, 0, 64, true, false), r2t_pdu(0, 0, 64)] {
        let mut endpoint = HostEndpoint::new(HostConfig::default());
        check_on_host(&mut endpoint, violations, &[pdu], Some(FatalError::SEQUENCE));
    }
    for (header, data) in [(true, false), (false, true)] {
        let using = |digest| if digest { DigestMode::Required } else { DigestMode::Off };
        let (header_digest, data_digest) = (using(header), using(data));
        let config = HostConfig { header_digest, data_digest, ..HostConfig::default() };
        let without = IcResp::new(0, false, false, 8192).as_bytes().to_vec();
        let mut endpoint = HostEndpoint::new(config);
        check_on_host(
            &mut endpoint,
            violations,
            &[without],
            Some(FatalError::unsupported_parameter(11)),
        );
    }
}

fn check_controller_data_pdus(violations: &mut ObservedViolations) {
    let field = |offset| Some(FatalError::invalid_field(offset));
    for (pdu, expected) in [
        (h2c_data_pdu(7, 0, 0, 4096, false), None),
        (h2c_data_pdu(7, 0, 0, 4, false), None),
        (h2c_data_pdu(7, 1, 0, 64, false), field(10)),
        (h2c_data_pdu(8, 1, 0, 64, false), field(10)),
        (h2c_data_pdu(7, 4, 0, 64, false), field(10)),
        (h2c_data_pdu(7, u16::MAX, 0, 64, false), field(10)),
        (h2c_data_pdu(8, 0, 0, 64, false), field(8)),
        (h2c_data_pdu(7, 0, 0, 4100, false), Some(FatalError::LIMIT)),
        (h2c_data_pdu(7, 0, 8192, 4, false), Some(FatalError::RANGE)),
        (h2c_data_pdu(7, 0, 4100, 4096, false), Some(FatalError::RANGE)),
        (h2c_data_pdu(7, 0, u32::MAX - 3, 8, false), Some(FatalError::RANGE)),
        (h2c_data_pdu(7, 0, 4, 64, false), Some(FatalError::SEQUENCE)),
        (h2c_data_pdu(7, 0, 0, 64, true), Some(FatalError::SEQUENCE)),
    ] {
        check_controller(violations, &[pdu], expected);
    }
    let first = h2c_data_pdu(7, 0, 0, 4096, false);
    for (second, expected) in [
        (h2c_data_pdu(7, 0, 4096, 4096, true), None),
        (h2c_data_pdu(7, 0, 4096, 4096, false), Some(FatalError::SEQUENCE)),
        (h2c_data_pdu(7, 0, 4092, 4096, false), Some(FatalError::SEQUENCE)),
        (h2c_data_pdu(7, 0, 0, 4096, false), Some(FatalError::SEQUENCE)),
        (h2c_data_pdu(7, 0, 4100, 4092, true), Some(FatalError::SEQUENCE)),
    ] {
        check_controller(violations, &[first.clone(), second], expected);
    }
    // After the end of an R2T, and before the next one.
    let rest = h2c_data_pdu(7, 0, 4096, 4096, true);
    check_controller(violations, &[first, rest, h2c_data_pdu(7, 0, 8192, 4096, false)], field(10));
}

fn check_controller_other_pdus(violations: &mut ObservedViolations) {
    let second_ic = IcReq::new(0, false, false, 0).as_bytes().to_vec();
    check_controller(violations, &[second_ic], Some(FatalError::SEQUENCE));
    for pdu in [command_pdu(0, 64), h2c_data_pdu(0, 0, 0, 64, true)] {
        let mut endpoint = ControllerEndpoint::new(ControllerConfig::default());
        check_on_controller(&mut endpoint, violations, &[pdu], Some(FatalError::SEQUENCE));
    }
    // A table full of commands that wait for data accepts no further command.
    let mut endpoint =
        ControllerEndpoint::new(ControllerConfig { depth: 2, ..ControllerConfig::default() });
    endpoint.receive(NOW, IcReq::new(0, false, false, 0).as_bytes());
    let pdus = [command_pdu(0, 64), command_pdu(1, 64), command_pdu(2, 64)];
    check_on_controller(&mut endpoint, violations, &pdus, Some(FatalError::SEQUENCE));
}

/// Each PDU type with one wrong bit in its digest.
fn check_header_digests(violations: &mut ObservedViolations) {
    let framing = PduFraming { header_digest: true, ..PLAIN };
    let with_wrong_digest = |header: &[u8]| {
        let found = crc32c(header) ^ 1 << 9;
        ([header, &found.to_le_bytes()].concat(), Some(FatalError::header_digest_error(found)))
    };
    let completion = Completion::new(0, Status::SUCCESS);
    for header in [
        CapsuleResp::new(framing, &completion).as_bytes().to_vec(),
        C2HData::new(framing, 0, 0, 64, (true, true)).as_bytes().to_vec(),
        R2t::new(framing, (1, 0), 0, 64).as_bytes().to_vec(),
    ] {
        let config = HostConfig { header_digest: DigestMode::Preferred, ..HostConfig::default() };
        let mut endpoint = HostEndpoint::new(config);
        endpoint.receive(NOW, IcResp::new(0, true, false, 8192).as_bytes());
        let (pdu, expected) = with_wrong_digest(&header);
        check_on_host(&mut endpoint, violations, &[pdu], expected);
    }
    for header in [
        CapsuleCmd::new(framing, &Command::new(0), 0).as_bytes().to_vec(),
        H2CData::new(framing, (0, 0), 0, 64, true).as_bytes().to_vec(),
    ] {
        let mut endpoint = ControllerEndpoint::new(ControllerConfig::default());
        endpoint.receive(NOW, IcReq::new(0, true, false, 0).as_bytes());
        let (pdu, expected) = with_wrong_digest(&header);
        check_on_controller(&mut endpoint, violations, &[pdu], expected);
    }
}

#[test]
fn every_violation_is_in_the_table_of_validation_rules_and_every_row_occurs() {
    let mut violations = ObservedViolations::new();
    check_host_data_pdus(&mut violations);
    check_host_other_pdus(&mut violations);
    check_controller_data_pdus(&mut violations);
    check_controller_other_pdus(&mut violations);
    check_header_digests(&mut violations);
    let rules = RULES.iter().filter(|rule| rule.checked_by == CheckedBy::Connection);
    let expected_kind: ObservedViolations =
        rules.map(|rule| (rule.pdu, rule.status, rule.offset)).collect();
    assert_eq!(
        expected_kind, violations,
        "each violation has a row in the table, and each row occurs"
    );
}

/// Violations that are detected in the header alone are tested in `wire`; this test checks that
/// both ends detect them.
#[test]
fn an_invalid_header_field_terminates_the_connection() {
    let corrupted = |mut pdu: Vec<u8>, at: usize| {
        pdu[at] ^= 0x81;
        pdu
    };
    for at in [1, 2, 4] {
        let violation = Some(FatalError::invalid_field(u8::try_from(at).unwrap()));
        let mut violations = ObservedViolations::new();
        for pdu in [response_pdu(0), c2h_data_pdu(0, 0, 64, true, false), r2t_pdu(1, 0, 64)] {
            check_host(&mut violations, &[corrupted(pdu, at)], violation);
        }
        check_controller(
            &mut violations,
            &[corrupted(h2c_data_pdu(7, 0, 0, 64, false), at)],
            violation,
        );
        // With another PLEN the capsule has data, and PDO is checked first.
        let first = if at == 4 { Some(FatalError::invalid_field(3)) } else { violation };
        check_controller(&mut violations, &[corrupted(command_pdu(0, 64), at)], first);
        let opening = IcReq::new(0, false, false, 0).as_bytes().to_vec();
        let mut endpoint = ControllerEndpoint::new(ControllerConfig::default());
        let expected = violation.filter(|_| at != 1);
        check_on_controller(&mut endpoint, &mut violations, &[corrupted(opening, at)], expected);
        let opening = IcResp::new(0, false, false, 8192).as_bytes().to_vec();
        let mut endpoint = HostEndpoint::new(HostConfig::default());
        check_on_host(&mut endpoint, &mut violations, &[corrupted(opening, at)], expected);
    }
    let mut violations = ObservedViolations::new();
    let unaligned = R2t::new(PLAIN, (1, 0), 0, 2).as_bytes().to_vec();
    check_host(&mut violations, &[unaligned], Some(FatalError::invalid_field(16)));
    check_host(
        &mut violations,
        &[c2h_data_pdu(0, 2, 4, true, false)],
        Some(FatalError::invalid_field(12)),
    );
    check_controller(
        &mut violations,
        &[h2c_data_pdu(7, 0, 2, 4, true)],
        Some(FatalError::invalid_field(12)),
    );
    let mut in_capsule = CapsuleCmd::new(PLAIN, &Command::new(1), 8196).as_bytes().to_vec();
    in_capsule.resize(72 + 8196, 0);
    check_controller(&mut violations, &[in_capsule], Some(FatalError::invalid_field(4)));
}

/// An undefined type, types of the wrong direction, and a port scanner.
#[test]
fn a_term_req_for_an_unknown_pdu_type_carries_its_common_header() {
    for kind in [0x08, 0x0a, 0xff, PduType::CapsuleCmd as u8, PduType::IcReq as u8] {
        let mut endpoint = host_with_commands();
        let pdu = [kind, 1, 2, 3, 4, 5, 6, 7, 8, 9];
        endpoint.receive(NOW, &pdu);
        assert_eq!(endpoint.close_reason(), closed_by_protocol_error(FatalError::invalid_field(0)));
        assert_term_req(
            &endpoint.send(usize::MAX),
            PduType::H2CTermReq,
            FatalError::invalid_field(0),
            &pdu[..8],
        );
    }
    let mut endpoint = ControllerEndpoint::new(ControllerConfig::default());
    endpoint.receive(NOW, b"GET / H");
    assert_eq!(endpoint.close_reason(), None, "a byte is missing");
    endpoint.receive(NOW, b"TTP/1.1\r\n");
    assert_eq!(endpoint.close_reason(), closed_by_protocol_error(FatalError::invalid_field(0)));
    let expected_kind = endpoint.send(usize::MAX);
    assert_term_req(&expected_kind, PduType::C2HTermReq, FatalError::invalid_field(0), b"GET / HT");
    endpoint.receive(NOW, &[0; 500]);
    assert!(
        endpoint.unconsumed.is_empty() && endpoint.send(usize::MAX).is_empty(),
        "nothing is sent after the TermReq"
    );
    endpoint.handle_eof();
    assert!(endpoint.connection.is_closed());
    assert_eq!(endpoint.log.len(), 1, "the end is reported once");
}

/// §3.5: the peer's reason, unless the termination request is too long or too short.
#[test]
fn a_received_term_req_closes_the_connection_at_once() {
    for plen in [0_u32, 23, 24, 25, 152, 153, u32::MAX] {
        let is_valid = (24..=152).contains(&plen);
        let mut pdu = vec![0; 24];
        pdu[2] = 24;
        pdu[4..8].copy_from_slice(&plen.to_le_bytes());
        pdu[8] = 4;
        let reason = FatalError { status: FatalStatus::OutOfRange, information: 0 };
        let expected = if is_valid {
            CloseReason::Terminated(reason)
        } else {
            CloseReason::InvalidTermination
        };
        let mut endpoint = host_with_commands();
        pdu[0] = 3;
        endpoint.receive(NOW, &pdu);
        assert_eq!(endpoint.close_reason(), Some(expected));
        assert!(
            endpoint.connection.is_closed() && endpoint.connection.outstanding_tags().count() == 3
        );
        let mut endpoint = controller_with_command();
        pdu[0] = 2;
        endpoint.receive(NOW, &pdu);
        assert_eq!(endpoint.close_reason(), Some(expected));
        assert!(
            endpoint.connection.is_closed() && endpoint.connection.outstanding_tags().count() == 2
        );
    }
}
