//! PDUs as specified, and every field at the limits of its valid range.

use std::collections::BTreeSet;

use super::pdu::{C2HData, CapsuleCmd, CapsuleResp, H2CData, IcReq, IcResp, R2t, TermReq};
use super::pdu_validation::{self, offset};
use super::validation_rules::{CheckedBy, RULES, ValidationRule};
use super::{FatalError, FatalStatus, PduFraming, PduType, Role};
use crate::command::Command;
use crate::completion::Completion;
use crate::layout::Layout;
use crate::sgl::Descriptor;
use crate::status::Status;

const PLAIN: PduFraming = PduFraming { header_digest: false, data_digest: false, alignment: 0 };
const BOTH: PduFraming = PduFraming { header_digest: true, data_digest: true, alignment: 3 };

/// Framings that differ in every parameter.
fn framing_variants() -> impl Iterator<Item = PduFraming> {
    (0..4).flat_map(|digests| {
        [0, 1, 2, 3, 15, 30, 31].map(|alignment| PduFraming {
            header_digest: digests & 1 != 0,
            data_digest: digests & 2 != 0,
            alignment,
        })
    })
}

#[test]
fn ic_pdus_have_the_expected_bytes() {
    let request = IcReq::new(3, true, false, 1);
    let begin = [0, 0, 0x80, 0, 0x80, 0, 0, 0, 0, 0, 3, 1, 1, 0, 0, 0];
    assert_eq!(request.as_bytes()[..16], begin);
    assert_eq!(request.as_bytes()[16..], [0; 112]);
    let response = IcResp::new(0x1f, false, true, 0x0002_0000);
    let begin = [1, 0, 0x80, 0, 0x80, 0, 0, 0, 0, 0, 0x1f, 2, 0, 0, 2, 0];
    assert_eq!(response.as_bytes()[..16], begin);
    assert_eq!(response.as_bytes()[16..], [0; 112]);
}

#[test]
fn capsule_pdus_have_the_expected_bytes() {
    let read = Command::new(2).with_cid(0x0605).with_sgl1(Descriptor::transport_data_block(4096));
    let bare = CapsuleCmd::new(BOTH, &read, 0);
    assert_eq!(bare.as_bytes()[..12], [4, 1, 72, 0, 76, 0, 0, 0, 2, 0x40, 5, 6]);
    assert_eq!(bare.as_bytes()[32..48], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0x5a]);
    assert_eq!(bare.command(), read);
    // Header of 72 bytes, digest of 4, and padding to a multiple of 16: data begins at 80.
    let loaded = CapsuleCmd::new(BOTH, &read, 1024);
    assert_eq!(loaded.as_bytes()[..8], [4, 3, 72, 80, 0x54, 4, 0, 0]);
    let completion = Completion::new(0x0605, Status::INVALID_FIELD).with_sqhd(9);
    let response = CapsuleResp::new(PLAIN, &completion);
    let expected = [5, 0, 24, 0, 24, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 5, 6, 4, 0];
    assert_eq!(response.as_bytes(), &expected);
    assert_eq!(response.completion(), completion);
}

#[test]
fn data_and_r2t_pdus_have_the_expected_bytes() {
    let ask = R2t::new(PLAIN, (0x0201, 0x0403), 0x1000, 0x2000);
    let expected = [9, 0, 24, 0, 24, 0, 0, 0, 1, 2, 3, 4, 0, 0x10, 0, 0, 0, 0x20, 0, 0, 0, 0, 0, 0];
    assert_eq!(ask.as_bytes(), &expected);
    // Header of 24 bytes, digest of 4, and padding to a multiple of 16: data begins at 32.
    let up = H2CData::new(BOTH, (0x0201, 0x0403), 0x1000, 0x2000, true);
    let expected =
        [6, 7, 24, 32, 0x24, 0x20, 0, 0, 1, 2, 3, 4, 0, 0x10, 0, 0, 0, 0x20, 0, 0, 0, 0, 0, 0];
    assert_eq!(up.as_bytes(), &expected);
    let down = C2HData::new(PLAIN, 0x0201, 8, 4, (true, true));
    let expected = [7, 12, 24, 24, 28, 0, 0, 0, 1, 2, 0, 0, 8, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0];
    assert_eq!(down.as_bytes(), &expected);
}

#[test]
fn term_req_contains_at_most_128_bytes_of_the_rejected_header() {
    let (bytes, whole) =
        TermReq::build(PduType::C2HTermReq, FatalError::invalid_field(10), &[0xa5; 24]);
    assert_eq!(bytes[..14], [3, 0, 24, 0, 48, 0, 0, 0, 1, 0, 10, 0, 0, 0]);
    assert_eq!((&bytes[14..24], &bytes[24..48], whole), (&[0; 10][..], &[0xa5; 24][..], 48));
    let (bytes, whole) =
        TermReq::build(PduType::H2CTermReq, FatalError::header_digest_error(7), &[1; 200]);
    assert_eq!((bytes[0], bytes[4], whole), (2, 152, 152));
    for plen in 0..400 {
        let pdu = TermReq::from_bytes(bytes.first_chunk().unwrap()).with(|pdu| pdu.plen(plen));
        assert_eq!(pdu.is_valid(), (24..=152).contains(&plen), "PLEN {plen}");
        assert_eq!(pdu.fatal_error(), FatalError::header_digest_error(7));
    }
    let long = TermReq::zeroed().with(|pdu| pdu.plen(24).hlen(25));
    assert!(!long.is_valid());
}

/// §3.3: "An appropriate number of padding bytes shall be inserted"; Figures 8 and 9 are two rows.
#[test]
fn data_offset_is_aligned_after_the_header() {
    let at = |header_digest, alignment, header| {
        PduFraming { header_digest, data_digest: false, alignment }.data_offset(header)
    };
    assert_eq!((at(false, 0x0f, 24), at(false, 3, 24)), (64, 32));
    for framing in framing_variants() {
        for header in [24, 72] {
            let (offset, unit) = (framing.data_offset(header), (framing.alignment + 1) * 4);
            let end = header + framing.header_digest_bytes();
            assert!(offset >= end && offset - end < unit && offset.is_multiple_of(unit));
        }
    }
}

#[test]
fn pdu_type_is_accepted_only_from_its_sender() {
    for code in 0..=u8::MAX {
        for end in [Role::Host, Role::Controller] {
            let expected = match (end, code) {
                (Role::Controller, 0 | 2 | 4 | 6) | (Role::Host, 1 | 3 | 5 | 7 | 9) => {
                    Ok(PduType::from_u8(code).unwrap())
                }
                _ => Err(FatalError::invalid_field(offset::TYPE)),
            };
            assert_eq!(
                pdu_validation::received_pdu_type(end, code),
                expected,
                "{code:#x} at {end:?}"
            );
        }
    }
    for kind in PduType::ALL {
        assert_eq!(PduType::from_u8(kind as u8), Some(kind));
        assert_ne!(kind.sender(), kind.sender().peer());
    }
}

#[test]
fn fatal_status_codes_round_trip_and_have_names() {
    for code in 0..=u16::MAX {
        assert_eq!(FatalStatus::from_code(code).code(), code);
    }
    assert_eq!(FatalStatus::ALL.map(FatalStatus::code), [1, 2, 3, 4, 5, 6]);
    assert_eq!(
        FatalError::invalid_field(10).to_string(),
        "Invalid PDU Header Field (FES 0x1, offset 10)"
    );
    assert_eq!(FatalError::SEQUENCE.to_string(), "PDU Sequence Error (FES 0x2)");
    assert_eq!(
        FatalError::header_digest_error(1).to_string(),
        "Header Digest Error (FES 0x3, digest 0x00000001)"
    );
}

/// A field, its valid values, and the expected error.
struct FieldCase {
    at: u8,
    width: usize,
    takes: Box<dyn Fn(u32) -> bool>,
    refusal: FatalError,
}

fn field_case(at: u8, width: usize, takes: impl Fn(u32) -> bool + 'static) -> FieldCase {
    FieldCase { at, width, takes: Box::new(takes), refusal: FatalError::invalid_field(at) }
}

fn only_value_case(at: u8, width: usize, value: u32) -> FieldCase {
    field_case(at, width, move |found| found == value)
}

/// Every value of a byte; of wider fields the values at which something changes.
fn boundary_values(good: u32, width: usize) -> Vec<u32> {
    if width == 1 {
        return (0..256).collect();
    }
    let near = |at: u32| [0, 1, 3, 4, 5].map(|by| [at.wrapping_sub(by), at.wrapping_add(by)]);
    let powers = (0..32).map(|shift| 1_u32 << shift);
    let edges = [good, 0, u32::MAX, 4096, 8192].into_iter().chain(powers);
    edges
        .flat_map(near)
        .flatten()
        .map(|value| if width == 2 { value & 0xffff } else { value })
        .collect()
}

/// Sets each field of a valid header to each value, and compares the result.
fn assert_header_rules(
    kind: PduType,
    good: &[u8],
    rows: &[FieldCase],
    judge: impl Fn(&[u8]) -> Result<(), FatalError>,
    seen: &mut BTreeSet<(PduType, u8)>,
) {
    assert_eq!(judge(good), Ok(()), "{kind:?}: {good:x?}");
    for row in rows {
        let at = usize::from(row.at);
        let mut raw = [0; 4];
        raw[..row.width].copy_from_slice(&good[at..at + row.width]);
        for value in boundary_values(u32::from_le_bytes(raw), row.width) {
            let mut changed = good.to_vec();
            changed[at..at + row.width].copy_from_slice(&value.to_le_bytes()[..row.width]);
            let expected = if (row.takes)(value) { Ok(()) } else { Err(row.refusal) };
            assert_eq!(judge(&changed), expected, "{kind:?}, offset {at}: {value:#x}");
            if expected.is_err() {
                seen.insert((kind, row.at));
            }
        }
    }
}

fn parse_and_check<T: Layout>(
    bytes: &[u8],
    check: impl Fn(T) -> Result<(), FatalError>,
) -> Result<(), FatalError> {
    check(T::parse(bytes).unwrap())
}

/// Multiples of the alignment from the end of the header on, if PLEN is consistent with `pdo`.
fn data_offset_predicate(framing: PduFraming) -> impl Fn(u32) -> bool {
    move |pdo| pdo == u32::from(framing.data_offset(24))
}

fn digest_flags_predicate(framing: PduFraming, mask: u32) -> impl Fn(u32) -> bool {
    let expected = u32::from(framing.data_flags());
    move |flags| (flags ^ expected) & mask == 0
}

fn check_ic_pdus(seen: &mut BTreeSet<(PduType, u8)>) {
    let pfv = |at| FieldCase {
        refusal: FatalError::unsupported_parameter(at),
        ..only_value_case(at, 2, 0)
    };
    let ends = |rest: Vec<FieldCase>| {
        let mut rows = vec![
            field_case(1, 1, |_| true),
            only_value_case(2, 1, 128),
            field_case(3, 1, |_| true),
        ];
        rows.extend([only_value_case(4, 4, 128), pfv(8), field_case(10, 1, |value| value <= 31)]);
        rows.extend(rest);
        rows
    };
    let request = IcReq::new(0, true, true, 0);
    let rows = ends(vec![
        field_case(11, 1, |_| true),
        field_case(12, 4, |_| true),
        field_case(16, 4, |_| true),
    ]);
    let judge = |bytes: &[u8]| parse_and_check(bytes, |pdu: IcReq| pdu.check());
    assert_header_rules(PduType::IcReq, request.as_bytes(), &rows, judge, seen);
    for asked in 0..4_u32 {
        let request = IcReq::new(0, asked & 1 != 0, asked & 2 != 0, 0);
        let response = IcResp::new(0, false, false, 4096);
        let rows = ends(vec![
            field_case(11, 1, move |dgst| dgst & 3 & !asked == 0),
            field_case(12, 4, |limit| limit >= 4096 && limit % 4 == 0),
            field_case(16, 4, |_| true),
        ]);
        let judge = |bytes: &[u8]| parse_and_check(bytes, |pdu: IcResp| pdu.check(&request));
        assert_header_rules(PduType::IcResp, response.as_bytes(), &rows, judge, seen);
    }
}

fn check_capsule_pdus(framing: PduFraming, seen: &mut BTreeSet<(PduType, u8)>) {
    let command = Command::new(1).with_cid(9);
    let least = u32::from(framing.header_digest_bytes());
    let judge =
        |bytes: &[u8]| parse_and_check(bytes, |pdu: CapsuleCmd| pdu.check(framing, 4096).map(drop));
    let bare = CapsuleCmd::new(framing, &command, 0);
    let rows = [
        field_case(1, 1, digest_flags_predicate(framing, 1)),
        only_value_case(2, 1, 72),
        field_case(3, 1, |_| true),
        field_case(8, 4, |_| true),
    ];
    assert_header_rules(PduType::CapsuleCmd, bare.as_bytes(), &rows, judge, seen);
    let loaded = CapsuleCmd::new(framing, &command, 512);
    let pdo = u32::from(framing.data_offset(72));
    let around = pdo + u32::from(framing.data_digest_bytes());
    let (unit, end) = (u32::from(framing.alignment + 1) * 4, 72 + least);
    let plen = loaded.plen();
    let ddgst = framing.data_digest;
    let rows = [
        field_case(1, 1, digest_flags_predicate(framing, 3)),
        only_value_case(2, 1, 72),
        field_case(3, 1, move |pdo| {
            pdo >= end && pdo % unit == 0 && plen > pdo + if ddgst { 4 } else { 0 }
        }),
    ];
    assert_header_rules(PduType::CapsuleCmd, loaded.as_bytes(), &rows, judge, seen);
    // Where the flags fit both, PLEN alone tells whether there is data.
    let fits_both = !ddgst;
    let rows = [field_case(4, 4, move |plen| {
        (fits_both && plen == end) || (plen > around && plen <= around + 4096)
    })];
    if fits_both || pdo != end {
        assert_header_rules(PduType::CapsuleCmd, loaded.as_bytes(), &rows, judge, seen);
    }

    let response = CapsuleResp::new(framing, &Completion::new(3, Status::SUCCESS));
    let judge = |bytes: &[u8]| parse_and_check(bytes, |pdu: CapsuleResp| pdu.check(framing));
    let rows = [
        field_case(1, 1, digest_flags_predicate(framing, 1)),
        only_value_case(2, 1, 24),
        field_case(3, 1, |_| true),
        only_value_case(4, 4, 24 + least),
        field_case(8, 4, |_| true),
        field_case(20, 4, |_| true),
    ];
    assert_header_rules(PduType::CapsuleResp, response.as_bytes(), &rows, judge, seen);
}

fn check_data_pdus(framing: PduFraming, seen: &mut BTreeSet<(PduType, u8)>) {
    let rows = |flags: FieldCase, plen: u32| {
        let mut rows = vec![flags, only_value_case(2, 1, 24), only_value_case(4, 4, plen)];
        rows.extend([field_case(8, 4, |_| true), field_case(12, 4, |value| value % 4 == 0)]);
        rows.push(field_case(20, 4, |_| true));
        rows
    };
    let up = H2CData::new(framing, (1, 2), 8, 64, false);
    let judge = |bytes: &[u8]| {
        parse_and_check(bytes, |pdu: H2CData| {
            pdu.check_header(framing).and_then(|()| pdu.check_range())
        })
    };
    let flags = field_case(1, 1, digest_flags_predicate(framing, 3));
    assert_header_rules(PduType::H2CData, up.as_bytes(), &rows(flags, up.plen()), judge, seen);
    let pdo = field_case(3, 1, data_offset_predicate(framing));
    let loose = |bytes: &[u8]| {
        // Padding changes PLEN as well; see the walk of padding below.
        parse_and_check(bytes, |pdu: H2CData| match pdu.check_header(framing) {
            Err(refusal) if refusal == FatalError::invalid_field(4) => {
                Err(FatalError::invalid_field(3))
            }
            other => other,
        })
    };
    assert_header_rules(PduType::H2CData, up.as_bytes(), &[pdo], loose, seen);

    let down = C2HData::new(framing, 1, 8, 64, (true, false));
    let judge = |bytes: &[u8]| {
        parse_and_check(bytes, |pdu: C2HData| {
            pdu.check_header(framing).and_then(|()| pdu.check_range())
        })
    };
    let digests = digest_flags_predicate(framing, 3);
    let flags = field_case(1, 1, move |flags| digests(flags) && flags & 0b1100 != 0b1000);
    assert_header_rules(PduType::C2HData, down.as_bytes(), &rows(flags, down.plen()), judge, seen);

    let ask = R2t::new(framing, (1, 2), 8, 64);
    let judge = |bytes: &[u8]| {
        parse_and_check(bytes, |pdu: R2t| {
            pdu.check_header(framing).and_then(|()| pdu.check_range())
        })
    };
    let mut bare = rows(field_case(1, 1, digest_flags_predicate(framing, 1)), ask.plen());
    bare.push(field_case(3, 1, |_| true));
    bare.push(field_case(16, 4, |len| len % 4 == 0 && len != 0));
    assert_header_rules(PduType::R2t, ask.as_bytes(), &bare, judge, seen);
}

/// PDO and PLEN together: more padding than needed is accepted, as long as it is aligned.
fn assert_padding_accepted(framing: PduFraming, seen: &mut BTreeSet<(PduType, u8)>) {
    let rest = 64 + u32::from(framing.data_digest_bytes());
    let (end, unit) = (24 + framing.header_digest_bytes(), (framing.alignment + 1) * 4);
    for pdo in 0..=u8::MAX {
        let plen = u32::from(pdo) + rest;
        let expected = pdo >= end && pdo.is_multiple_of(unit);
        let expected = if expected { Ok(()) } else { Err(FatalError::invalid_field(offset::PDO)) };
        let up = H2CData::new(framing, (1, 2), 8, 64, false).with(|up| up.pdo(pdo).plen(plen));
        let down = C2HData::new(framing, 1, 8, 64, (true, false));
        let down = down.with(|down| down.pdo(pdo).plen(plen));
        assert_eq!(
            (up.check_header(framing), down.check_header(framing)),
            (expected, expected),
            "PDO {pdo}"
        );
        if expected.is_err() {
            seen.extend([(PduType::H2CData, 3), (PduType::C2HData, 3)]);
        }
    }
    for len in [0, 1, 2, 3, 4, 5, 8, 64, 66, u32::MAX - 200] {
        let up = H2CData::new(framing, (1, 2), 8, len, false);
        let down = C2HData::new(framing, 1, 8, len, (true, false));
        let whole =
            if len % 4 == 0 && len != 0 { Ok(()) } else { Err(FatalError::invalid_field(16)) };
        assert_eq!(
            (up.check_header(framing), down.check_header(framing)),
            (Ok(()), Ok(())),
            "DATAL {len}"
        );
        assert_eq!((up.check_range(), down.check_range()), (whole, whole), "DATAL {len}");
        if whole.is_err() {
            seen.extend([(PduType::H2CData, 16), (PduType::C2HData, 16)]);
        }
    }
}

#[test]
fn every_header_field_is_validated_as_in_the_rule_table() {
    let mut seen = BTreeSet::new();
    check_ic_pdus(&mut seen);
    for framing in framing_variants() {
        check_capsule_pdus(framing, &mut seen);
        check_data_pdus(framing, &mut seen);
        assert_padding_accepted(framing, &mut seen);
    }
    for kind in PduType::ALL {
        // Covered by `pdu_type_is_accepted_only_from_its_sender`.
        seen.insert((kind, offset::TYPE));
    }
    let is_about = |rule: &&ValidationRule| rule.checked_by == CheckedBy::Header;
    let reported_values: BTreeSet<_> =
        RULES.iter().filter(is_about).map(|rule| (rule.pdu, rule.offset.unwrap())).collect();
    let spoken: BTreeSet<_> = seen
        .into_iter()
        .filter(|(kind, _)| reported_values.iter().any(|(pdu, _)| pdu == kind))
        .collect();
    assert_eq!(
        reported_values, spoken,
        "the table has a row for each refusal, and a refusal for each row"
    );
}

#[test]
fn every_validation_rule_cites_section_and_field() {
    for rule in RULES {
        assert!(rule.section.contains('§') && !rule.rejected.is_empty(), "{rule:?}");
        let has_offset = matches!(
            rule.status,
            FatalStatus::InvalidHeaderField | FatalStatus::UnsupportedParameter
        );
        assert_eq!(rule.offset.is_some(), has_offset, "{rule:?}");
        if let Some(at) = rule.offset {
            assert!(at < rule.pdu.header_bytes(), "{rule:?}");
        }
    }
}

/// Of several errors, the one with the lowest offset is reported (§3.6.2.4).
#[test]
fn first_of_several_header_errors_is_reported() {
    let up = H2CData::new(BOTH, (1, 2), 8, 64, false);
    let broken = [offset::FLAGS, offset::HLEN, offset::PDO, offset::PLEN];
    for (index, &first) in broken.iter().enumerate() {
        let mut bytes = *up.as_bytes();
        for &at in &broken[index..] {
            bytes[usize::from(at)] ^= 1;
        }
        let pdu = H2CData::from_bytes(&bytes);
        assert_eq!(pdu.check_header(BOTH), Err(FatalError::invalid_field(first)));
    }
    let odd = up.with(|pdu| pdu.datao(1).datal(1));
    assert_eq!(odd.check_range(), Err(FatalError::invalid_field(offset::DATAO)));
}
