//! Exchanges written down from the specification, byte by byte.

use tenmil_base::Instant;
use tenmil_wire::tcp::crc32c;
use tenmil_wire::{Command, Completion, Status};

use super::test_pair::{ControllerEndpoint, HostEndpoint, SessionEvent, pattern_bytes};
use crate::{
    ControllerConfig, DataDirection, DataTransfer, DigestMode, HostConfig, NegotiatedParams,
    QueueKind, SuccessFlagPolicy,
};

const NOW: Instant = Instant { ns: 0 };

/// Bytes of a text of hexadecimal digits; text after `|` is a remark.
fn bytes_from_hex(text: &str) -> Vec<u8> {
    let digits: String = text.lines().filter_map(|line| line.split('|').next()).collect();
    let digits: Vec<u8> = digits.bytes().filter(u8::is_ascii_hexdigit).collect();
    let pair =
        |pair: &[u8; 2]| u8::from_str_radix(core::str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.as_chunks::<2>().0.iter().map(pair).collect()
}

fn padded_to(mut bytes: Vec<u8>, len: usize) -> Vec<u8> {
    bytes.resize(len, 0);
    bytes
}

/// ICReq and ICResp (§3.6.2.2 and §3.6.2.3).
fn ic_pdus(digests: u8, hpda: u8, maxr2t: u8) -> (Vec<u8>, Vec<u8>) {
    let request = [0, 0, 0x80, 0, 0x80, 0, 0, 0, 0, 0, hpda, digests, maxr2t, 0, 0, 0];
    let response = [1, 0, 0x80, 0, 0x80, 0, 0, 0, 0, 0, hpda, digests, 0, 0x20, 0, 0];
    (padded_to(request.to_vec(), 128), padded_to(response.to_vec(), 128))
}

fn host(digests: DigestMode, hpda: u8) -> HostEndpoint {
    HostEndpoint::new(HostConfig {
        depth: 4,
        hpda,
        header_digest: digests,
        data_digest: digests,
        r2ts_max: 2,
        ..HostConfig::default()
    })
}

fn controller(success: SuccessFlagPolicy) -> ControllerEndpoint {
    ControllerEndpoint::new(ControllerConfig {
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
fn a_host_reads_with_the_bytes_of_the_specification() {
    let mut endpoint = host(DigestMode::Off, 0);
    let (request, mut response) = ic_pdus(0, 0, 1);
    response[13] = 0x10;
    assert_eq!(endpoint.send(usize::MAX), request);
    endpoint.receive(NOW, &response);
    endpoint.submit(2, DataDirection::ToHost(16), 5);
    assert_eq!(endpoint.send(usize::MAX), bytes_from_hex(READ));
    let data = pattern_bytes(5, 16);
    endpoint.receive(
        NOW,
        &[bytes_from_hex(READ_DATA), data.clone(), bytes_from_hex(READ_RESPONSE)].concat(),
    );
    let done =
        SessionEvent::Completed { status: Status::SUCCESS, transferred_bytes: 16, bytes: data };
    assert_eq!(
        endpoint.log[1..],
        [(0, SessionEvent::Data { offset: 0, len_bytes: 16 }), (0, done)]
    );
}

#[test]
fn a_controller_serves_a_read_with_the_bytes_of_the_specification() {
    let mut endpoint = controller(SuccessFlagPolicy::Never);
    let (request, response) = ic_pdus(0, 0, 1);
    endpoint.receive(NOW, &request);
    assert_eq!(endpoint.send(usize::MAX), response);
    endpoint.connection.set_queue_kind(QueueKind::Io { entries: 4, flow_control: true });
    endpoint.receive(NOW, &bytes_from_hex(READ));
    let expected =
        [bytes_from_hex(READ_DATA), pattern_bytes(5, 16), bytes_from_hex(READ_RESPONSE)].concat();
    assert_eq!(endpoint.send(usize::MAX), expected);
}

/// §3.3.2.1: SUCCESS in the last C2HData PDU, and no response capsule.
#[test]
fn success_in_the_last_data_pdu_completes_a_read() {
    let mut endpoint = controller(SuccessFlagPolicy::WithoutFlowControl);
    endpoint.receive(NOW, &ic_pdus(0, 0, 1).0);
    endpoint.send(usize::MAX);
    endpoint.connection.set_queue_kind(QueueKind::Io { entries: 4, flow_control: false });
    endpoint.receive(NOW, &bytes_from_hex(READ));
    let mut header = bytes_from_hex(READ_DATA);
    header[1] = 0x0c;
    let bytes = [header, pattern_bytes(5, 16)].concat();
    assert_eq!(endpoint.send(usize::MAX), bytes);

    let mut endpoint = host(DigestMode::Off, 0);
    endpoint.send(usize::MAX);
    endpoint.receive(NOW, &ic_pdus(0, 0, 1).1);
    endpoint.submit(2, DataDirection::ToHost(16), 5);
    endpoint.send(usize::MAX);
    endpoint.receive(NOW, &bytes);
    assert_eq!(endpoint.completions(), [(Status::SUCCESS, 16)]);
    assert_eq!(endpoint.connection.free_tags(), 4);
}

/// PDUs of a write, in the order of transmission.
struct WriteSession {
    capsule: Vec<u8>,
    r2ts: Vec<Vec<u8>>,
    data_pdus: Vec<Vec<u8>>,
    response: Vec<u8>,
}

/// Write of 12 KiB in R2Ts of 4 KiB, two at a time, with both digests and data aligned to 16 bytes
/// (§3.3.2.2, §3.3.1.1). Digests cover the bytes before them.
fn write_session() -> WriteSession {
    let with_digest = |header: Vec<u8>| {
        let digest = crc32c(&header);
        [header, digest.to_le_bytes().to_vec()].concat()
    };
    let capsule = with_digest(bytes_from_hex(
        "
        04 01 48 00  4c 00 00 00                                | CapsuleCmd, HDGSTF, PLEN 76
        01 40 00 00  00 00 00 00  00 00 00 00  00 00 00 00      | Write, SGL, CID 0
        00 00 00 00  00 00 00 00
        00 00 00 00  00 00 00 00  00 30 00 00  00 00 00 5a      | transport data block of 12 288
        09 00 00 00  00 00 00 00  00 00 00 00  00 00 00 00
        00 00 00 00  00 00 00 00",
    ));
    let r2t = |command_number: u8| {
        let mut header = bytes_from_hex(
            "
            09 01 18 00  1c 00 00 00                            | R2T, HDGSTF, PLEN 28
            00 00 00 00  00 00 00 00  00 10 00 00  00 00 00 00  | CCCID 0, TTAG 0, R2TL 4096",
        );
        header[13] = command_number << 4;
        with_digest(header)
    };
    let data = pattern_bytes(9, 12_288);
    let data_pdu = |command_number: u8| {
        let mut header = bytes_from_hex(
            "
            06 07 18 20  24 10 00 00                            | H2CData, LAST, PDO 32, PLEN 4132
            00 00 00 00  00 00 00 00  00 10 00 00  00 00 00 00  | CCCID 0, TTAG 0, DATAL 4096",
        );
        header[13] = command_number << 4;
        let part = &data[usize::from(command_number) * 4096..][..4096];
        let digest = crc32c(part).to_le_bytes();
        [with_digest(header), vec![0; 4], part.to_vec(), digest.to_vec()].concat()
    };
    let response = with_digest(bytes_from_hex(
        "
        05 01 18 00  1c 00 00 00                                | CapsuleResp, HDGSTF, PLEN 28
        00 00 00 00  00 00 00 00  01 00 00 00  00 00 00 00      | SQHD 1, CID 0, success",
    ));
    let (r2ts, data_pdus) = ((0..3).map(r2t).collect(), (0..3).map(data_pdu).collect());
    WriteSession { capsule, r2ts, data_pdus, response }
}

#[test]
fn a_host_writes_with_the_bytes_of_the_specification() {
    let WriteSession { capsule, r2ts, data_pdus, response } = write_session();
    let mut endpoint = host(DigestMode::Required, 3);
    let (request, ic_response) = ic_pdus(3, 3, 1);
    assert_eq!(endpoint.send(usize::MAX), request);
    endpoint.receive(NOW, &ic_response);
    endpoint.submit(1, DataDirection::FromHost(12_288), 9);
    assert_eq!(endpoint.send(usize::MAX), capsule);
    endpoint.receive(NOW, &r2ts[..2].concat());
    assert_eq!(endpoint.send(usize::MAX), data_pdus[..2].concat());
    endpoint.receive(NOW, &r2ts[2]);
    assert_eq!(endpoint.send(usize::MAX), data_pdus[2]);
    endpoint.receive(NOW, &response);
    assert_eq!(endpoint.completions(), [(Status::SUCCESS, 0)]);
}

#[test]
fn a_controller_serves_a_write_with_the_bytes_of_the_specification() {
    let WriteSession { capsule, r2ts, data_pdus, response } = write_session();
    let mut endpoint = controller(SuccessFlagPolicy::Always);
    let (request, ic_response) = ic_pdus(3, 3, 1);
    endpoint.receive(NOW, &request);
    assert_eq!(endpoint.send(usize::MAX), ic_response);
    endpoint.connection.set_queue_kind(QueueKind::Io { entries: 4, flow_control: true });
    endpoint.receive(NOW, &capsule);
    assert_eq!(endpoint.send(usize::MAX), r2ts[..2].concat());
    endpoint.receive(NOW, &data_pdus[0]);
    assert_eq!(endpoint.send(usize::MAX), r2ts[2]);
    endpoint.receive(NOW, &data_pdus[1..].concat());
    assert_eq!(endpoint.send(usize::MAX), response);
    assert!(endpoint.log.contains(&(0, SessionEvent::DataComplete { is_intact: true })));
}

/// Connect as sent by Linux 6 and others: a Fabrics command with 1024 bytes of in-capsule data.
#[test]
fn connect_carries_its_data_in_the_capsule() {
    let begin = bytes_from_hex(
        "
        04 00 48 48  48 04 00 00                                | CapsuleCmd, PDO 72, PLEN 1096
        7f 40 00 00  01 00 00 00  00 00 00 00  00 00 00 00      | fabrics, SGL, CID 0, Connect
        00 00 00 00  00 00 00 00
        00 00 00 00  00 00 00 00  00 04 00 00  00 00 00 01      | in capsule, 1024
        00 00 00 00  1f 00 00 00  00 00 00 00  00 00 00 00      | QID 0, SQSIZE 31
        00 00 00 00  00 00 00 00",
    );
    let bytes = [begin, pattern_bytes(0, 1024)].concat();
    let mut endpoint = host(DigestMode::Off, 0);
    endpoint.send(usize::MAX);
    endpoint.receive(NOW, &ic_pdus(0, 0, 0).1);
    let command = Command::new(0x7f).with_nsid(1).with_cdw11(31);
    endpoint.memory.0.insert(0, pattern_bytes(0, 1024));
    endpoint.connection.submit(&command, DataDirection::FromHost(1024), &endpoint.memory).unwrap();
    assert_eq!(endpoint.send(usize::MAX), bytes);

    let mut endpoint = controller(SuccessFlagPolicy::Never);
    endpoint.receive(NOW, &ic_pdus(0, 0, 0).0);
    endpoint.send(usize::MAX);
    endpoint.owner.behavior.completes_nothing = true;
    endpoint.receive(NOW, &bytes);
    let data = Ok(DataTransfer::InCapsule(1024));
    assert_eq!(
        endpoint.log[1..],
        [
            (0, SessionEvent::Command { cid: 0, data }),
            (0, SessionEvent::Data { offset: 0, len_bytes: 1024 }),
            (0, SessionEvent::DataComplete { is_intact: true }),
        ]
    );
    // The response to Connect already confirms that SQ flow control is disabled (Base 2.1 §6.3).
    endpoint.connection.set_queue_kind(QueueKind::Admin { entries: 32, flow_control: false });
    endpoint.connection.complete(0, 0, Completion::new(0, Status::SUCCESS).with_dw0(7)).unwrap();
    let response = endpoint.send(usize::MAX);
    assert_eq!(
        response[8..24],
        bytes_from_hex("07 00 00 00  00 00 00 00  ff ff 00 00  00 00 00 00")
    );
}

/// §3.3.1.1: digests are used if both ends request them; §3.1: a request is echoed or dropped.
#[test]
fn digests_are_used_if_both_ends_support_them() {
    for requested in 0..4_u8 {
        for offered in 0..4_u8 {
            let config = ControllerConfig {
                header_digest: offered & 1 != 0,
                data_digest: offered & 2 != 0,
                ..ControllerConfig::default()
            };
            let mut endpoint = ControllerEndpoint::new(config);
            endpoint.receive(NOW, &ic_pdus(requested, 0, 0).0);
            assert_eq!(endpoint.send(usize::MAX)[11], requested & offered);
            let params = endpoint.log.first().map(|(_, entry)| entry.clone());
            let Some(SessionEvent::Open(NegotiatedParams { header_digest, data_digest, .. })) =
                params
            else {
                panic!("the first event is Open");
            };
            let both = requested & offered;
            assert_eq!((header_digest, data_digest), (both & 1 != 0, both & 2 != 0));
        }
    }
}

/// Some hosts support no alignment but 0.
#[test]
fn cpda_is_zero_for_a_host_with_hpda_zero() {
    for hpda in [0, 1, 31] {
        let mut endpoint = controller(SuccessFlagPolicy::Never);
        endpoint.receive(NOW, &ic_pdus(0, hpda, 0).0);
        assert_eq!(endpoint.send(usize::MAX)[10], if hpda == 0 { 0 } else { 3 });
    }
}
