//! Exchanges written down from the specification, byte by byte.

use tenmil_base::Instant;
use tenmil_wire::tcp::crc32c;
use tenmil_wire::{Command, Completion, Status};

use super::rig::{ControllerSide, HostSide, Seen, pattern};
use crate::{
    ControllerConfig, DataDirection, DataTransfer, DigestMode, HostConfig, NegotiatedParams,
    QueueKind, SuccessPolicy,
};

const NOW: Instant = Instant { ns: 0 };

/// Bytes of a text of hexadecimal digits; text after `|` is a remark.
fn hex(text: &str) -> Vec<u8> {
    let digits: String = text.lines().filter_map(|line| line.split('|').next()).collect();
    let digits: Vec<u8> = digits.bytes().filter(u8::is_ascii_hexdigit).collect();
    let pair =
        |pair: &[u8; 2]| u8::from_str_radix(core::str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.as_chunks::<2>().0.iter().map(pair).collect()
}

fn zeros(mut bytes: Vec<u8>, len: usize) -> Vec<u8> {
    bytes.resize(len, 0);
    bytes
}

/// ICReq and ICResp (§3.6.2.2 and §3.6.2.3).
fn opening(digests: u8, hpda: u8, maxr2t: u8) -> (Vec<u8>, Vec<u8>) {
    let request = [0, 0, 0x80, 0, 0x80, 0, 0, 0, 0, 0, hpda, digests, maxr2t, 0, 0, 0];
    let response = [1, 0, 0x80, 0, 0x80, 0, 0, 0, 0, 0, hpda, digests, 0, 0x20, 0, 0];
    (zeros(request.to_vec(), 128), zeros(response.to_vec(), 128))
}

fn host(digests: DigestMode, hpda: u8) -> HostSide {
    HostSide::new(HostConfig {
        depth: 4,
        hpda,
        header_digest: digests,
        data_digest: digests,
        r2ts_max: 2,
        ..HostConfig::default()
    })
}

fn controller(success: SuccessPolicy) -> ControllerSide {
    ControllerSide::new(ControllerConfig {
        depth: 4,
        cpda: 3,
        h2c_bytes_max: 8192,
        r2t_bytes_max: 4096,
        r2ts_max: 2,
        success,
        ..ControllerConfig::default()
    })
}

/// Read of 16 bytes on a connection without digests (§3.3.2.1), with a response.
const READ: &str = "
    04 00 48 00  48 00 00 00                                | CapsuleCmd, HLEN 72, PLEN 72
    02 40 00 00  00 00 00 00  00 00 00 00  00 00 00 00      | Read, SGL, CID 0
    00 00 00 00  00 00 00 00                                | MPTR
    00 00 00 00  00 00 00 00  10 00 00 00  00 00 00 5a      | transport data block of 16
    05 00 00 00  00 00 00 00  00 00 00 00  00 00 00 00      | CDW10
    00 00 00 00  00 00 00 00";
const READ_DATA: &str = "
    07 04 18 18  28 00 00 00                                | C2HData, LAST, PDO 24, PLEN 40
    00 00 00 00  00 00 00 00  10 00 00 00  00 00 00 00      | CCCID 0, DATAO 0, DATAL 16";
const READ_RESPONSE: &str = "
    05 00 18 00  18 00 00 00                                | CapsuleResp, PLEN 24
    00 00 00 00  00 00 00 00  01 00 00 00  00 00 00 00      | SQHD 1, CID 0, success";

#[test]
fn a_host_reads_by_these_bytes() {
    let mut side = host(DigestMode::Off, 0);
    let (request, mut response) = opening(0, 0, 1);
    response[13] = 0x10;
    assert_eq!(side.take(usize::MAX), request);
    side.give(NOW, &response);
    side.submit(2, DataDirection::ToHost(16), 5);
    assert_eq!(side.take(usize::MAX), hex(READ));
    let data = pattern(5, 16);
    side.give(NOW, &[hex(READ_DATA), data.clone(), hex(READ_RESPONSE)].concat());
    let done = Seen::Done { status: Status::SUCCESS, moved_bytes: 16, bytes: data };
    assert_eq!(side.log[1..], [(0, Seen::Data { offset: 0, len_bytes: 16 }), (0, done)]);
}

#[test]
fn a_controller_serves_a_read_by_these_bytes() {
    let mut side = controller(SuccessPolicy::Never);
    let (request, response) = opening(0, 0, 1);
    side.give(NOW, &request);
    assert_eq!(side.take(usize::MAX), response);
    side.end.connected(QueueKind::Io { entries: 4, flow_control: true });
    side.give(NOW, &hex(READ));
    let expected = [hex(READ_DATA), pattern(5, 16), hex(READ_RESPONSE)].concat();
    assert_eq!(side.take(usize::MAX), expected);
}

/// §3.3.2.1: SUCCESS in the last C2HData PDU, and no response capsule.
#[test]
fn a_controller_says_success_in_the_data_and_a_host_believes_it() {
    let mut side = controller(SuccessPolicy::WithoutFlowControl);
    side.give(NOW, &opening(0, 0, 1).0);
    side.take(usize::MAX);
    side.end.connected(QueueKind::Io { entries: 4, flow_control: false });
    side.give(NOW, &hex(READ));
    let mut header = hex(READ_DATA);
    header[1] = 0x0c;
    let bytes = [header, pattern(5, 16)].concat();
    assert_eq!(side.take(usize::MAX), bytes);

    let mut side = host(DigestMode::Off, 0);
    side.take(usize::MAX);
    side.give(NOW, &opening(0, 0, 1).1);
    side.submit(2, DataDirection::ToHost(16), 5);
    side.take(usize::MAX);
    side.give(NOW, &bytes);
    assert_eq!(side.done(), [(Status::SUCCESS, 16)]);
    assert_eq!(side.end.room(), 4);
}

/// PDUs of a write, in the order of transmission.
struct Write {
    capsule: Vec<u8>,
    asks: Vec<Vec<u8>>,
    units: Vec<Vec<u8>>,
    response: Vec<u8>,
}

/// Write of 12 KiB in R2Ts of 4 KiB, two at a time, with both digests and data aligned to 16 bytes
/// (§3.3.2.2, §3.3.1.1). Digests cover the bytes before them.
fn write() -> Write {
    let signed = |header: Vec<u8>| {
        let digest = crc32c(&header);
        [header, digest.to_le_bytes().to_vec()].concat()
    };
    let capsule = signed(hex("
        04 01 48 00  4c 00 00 00                                | CapsuleCmd, HDGSTF, PLEN 76
        01 40 00 00  00 00 00 00  00 00 00 00  00 00 00 00      | Write, SGL, CID 0
        00 00 00 00  00 00 00 00
        00 00 00 00  00 00 00 00  00 30 00 00  00 00 00 5a      | transport data block of 12 288
        09 00 00 00  00 00 00 00  00 00 00 00  00 00 00 00
        00 00 00 00  00 00 00 00"));
    let ask = |number: u8| {
        let mut header = hex("
            09 01 18 00  1c 00 00 00                            | R2T, HDGSTF, PLEN 28
            00 00 00 00  00 00 00 00  00 10 00 00  00 00 00 00  | CCCID 0, TTAG 0, R2TL 4096");
        header[13] = number << 4;
        signed(header)
    };
    let data = pattern(9, 12_288);
    let unit = |number: u8| {
        let mut header = hex("
            06 07 18 20  24 10 00 00                            | H2CData, LAST, PDO 32, PLEN 4132
            00 00 00 00  00 00 00 00  00 10 00 00  00 00 00 00  | CCCID 0, TTAG 0, DATAL 4096");
        header[13] = number << 4;
        let part = &data[usize::from(number) * 4096..][..4096];
        let digest = crc32c(part).to_le_bytes();
        [signed(header), vec![0; 4], part.to_vec(), digest.to_vec()].concat()
    };
    let response = signed(hex("
        05 01 18 00  1c 00 00 00                                | CapsuleResp, HDGSTF, PLEN 28
        00 00 00 00  00 00 00 00  01 00 00 00  00 00 00 00      | SQHD 1, CID 0, success"));
    let (asks, units) = ((0..3).map(ask).collect(), (0..3).map(unit).collect());
    Write { capsule, asks, units, response }
}

#[test]
fn a_host_writes_by_these_bytes() {
    let Write { capsule, asks, units, response } = write();
    let mut side = host(DigestMode::Required, 3);
    let (request, opened) = opening(3, 3, 1);
    assert_eq!(side.take(usize::MAX), request);
    side.give(NOW, &opened);
    side.submit(1, DataDirection::FromHost(12_288), 9);
    assert_eq!(side.take(usize::MAX), capsule);
    side.give(NOW, &asks[..2].concat());
    assert_eq!(side.take(usize::MAX), units[..2].concat());
    side.give(NOW, &asks[2]);
    assert_eq!(side.take(usize::MAX), units[2]);
    side.give(NOW, &response);
    assert_eq!(side.done(), [(Status::SUCCESS, 0)]);
}

#[test]
fn a_controller_serves_a_write_by_these_bytes() {
    let Write { capsule, asks, units, response } = write();
    let mut side = controller(SuccessPolicy::Always);
    let (request, opened) = opening(3, 3, 1);
    side.give(NOW, &request);
    assert_eq!(side.take(usize::MAX), opened);
    side.end.connected(QueueKind::Io { entries: 4, flow_control: true });
    side.give(NOW, &capsule);
    assert_eq!(side.take(usize::MAX), asks[..2].concat());
    side.give(NOW, &units[0]);
    assert_eq!(side.take(usize::MAX), asks[2]);
    side.give(NOW, &units[1..].concat());
    assert_eq!(side.take(usize::MAX), response);
    assert!(side.log.contains(&(0, Seen::Arrived { is_intact: true })));
}

/// Connect as sent by Linux 6 and others: a Fabrics command with 1024 bytes of in-capsule data.
#[test]
fn connect_travels_with_its_data_in_its_capsule() {
    let begin = hex("
        04 00 48 48  48 04 00 00                                | CapsuleCmd, PDO 72, PLEN 1096
        7f 40 00 00  01 00 00 00  00 00 00 00  00 00 00 00      | fabrics, SGL, CID 0, Connect
        00 00 00 00  00 00 00 00
        00 00 00 00  00 00 00 00  00 04 00 00  00 00 00 01      | in capsule, 1024
        00 00 00 00  1f 00 00 00  00 00 00 00  00 00 00 00      | QID 0, SQSIZE 31
        00 00 00 00  00 00 00 00");
    let bytes = [begin, pattern(0, 1024)].concat();
    let mut side = host(DigestMode::Off, 0);
    side.take(usize::MAX);
    side.give(NOW, &opening(0, 0, 0).1);
    let command = Command::new(0x7f).with_nsid(1).with_cdw11(31);
    side.memory.0.insert(0, pattern(0, 1024));
    side.end.submit(&command, DataDirection::FromHost(1024), &side.memory).unwrap();
    assert_eq!(side.take(usize::MAX), bytes);

    let mut side = controller(SuccessPolicy::Never);
    side.give(NOW, &opening(0, 0, 0).0);
    side.take(usize::MAX);
    side.owner.manner.is_idle = true;
    side.give(NOW, &bytes);
    let data = Ok(DataTransfer::InCapsule(1024));
    assert_eq!(
        side.log[1..],
        [
            (0, Seen::Command { cid: 0, data }),
            (0, Seen::Data { offset: 0, len_bytes: 1024 }),
            (0, Seen::Arrived { is_intact: true }),
        ]
    );
    // The response to Connect already confirms that SQ flow control is disabled (Base 2.1 §6.3).
    side.end.connected(QueueKind::Admin { entries: 32, flow_control: false });
    side.end.complete(0, 0, Completion::new(0, Status::SUCCESS).with_dw0(7)).unwrap();
    let response = side.take(usize::MAX);
    assert_eq!(response[8..24], hex("07 00 00 00  00 00 00 00  ff ff 00 00  00 00 00 00"));
}

/// §3.3.1.1: digests are used if both ends request them; §3.1: a request is echoed or dropped.
#[test]
fn digests_are_used_if_both_ends_have_them() {
    for asked in 0..4_u8 {
        for offered in 0..4_u8 {
            let config = ControllerConfig {
                header_digest: offered & 1 != 0,
                data_digest: offered & 2 != 0,
                ..ControllerConfig::default()
            };
            let mut side = ControllerSide::new(config);
            side.give(NOW, &opening(asked, 0, 0).0);
            assert_eq!(side.take(usize::MAX)[11], asked & offered);
            let terms = side.log.first().map(|(_, seen)| seen.clone());
            let Some(Seen::Open(NegotiatedParams { header_digest, data_digest, .. })) = terms
            else {
                panic!("it is open");
            };
            let both = asked & offered;
            assert_eq!((header_digest, data_digest), (both & 1 != 0, both & 2 != 0));
        }
    }
}

/// Some hosts support no alignment but 0, which is what they are told.
#[test]
fn a_host_without_a_wish_for_alignment_is_told_none() {
    for hpda in [0, 1, 31] {
        let mut side = controller(SuccessPolicy::Never);
        side.give(NOW, &opening(0, hpda, 0).0);
        assert_eq!(side.take(usize::MAX)[10], if hpda == 0 { 0 } else { 3 });
    }
}
