//! A session, byte by byte.

use crate::{
    BackendConfig, CONFIG_CHANGED, InflightBuffer, MemoryChange, MessageType, OwnerRequest,
    ReplyDisposition, Server, Violation,
};

type FakeFile = u32;

/// Reply with its file descriptor.
type ReplyWithFile = (Vec<u8>, Option<FakeFile>);

pub(super) fn backend_config() -> BackendConfig {
    let features = 1 << 32 | 1 << 29 | 1 << 9;
    BackendConfig { features, queues: 2, config: (0..60).collect(), slots: 256 }
}

/// Bytes of a message.
pub(super) fn encode_message(code: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let size = u32::try_from(payload.len()).unwrap();
    let mut bytes = [code, flags, size].map(u32::to_le_bytes).concat();
    bytes.extend_from_slice(payload);
    bytes
}

pub(super) fn u64_payload(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

pub(super) fn u32_payload(halves: &[u32]) -> Vec<u8> {
    halves.iter().flat_map(|half| half.to_le_bytes()).collect()
}

/// Server, and the requests passed to its embedding code.
pub(super) struct ServerFixture {
    pub(super) server: Server<FakeFile>,
    pub(super) log: Vec<String>,
    /// The embedding code rejects all requests.
    pub(super) refuses: bool,
    /// Number of results that the front end did not request.
    pub(super) untold: usize,
}

impl ServerFixture {
    pub(super) fn new() -> Self {
        Self { server: Server::new(backend_config()), log: Vec::new(), refuses: false, untold: 0 }
    }

    /// Sends bytes in fragments, with the descriptors in the first one; returns the replies with
    /// their descriptors.
    pub(super) fn send(
        &mut self,
        bytes: &[u8],
        files: &[FakeFile],
        piece: usize,
    ) -> Result<Vec<ReplyWithFile>, Violation> {
        let (mut rest, mut files) = (bytes, files.to_vec());
        while !rest.is_empty() {
            let receive_len = self.server.receive_len();
            assert!(receive_len > 0, "nothing is waited for");
            let (first, others) = rest.split_at(rest.len().min(receive_len).min(piece));
            rest = others;
            self.server.receive(first, std::mem::take(&mut files))?;
            while let Some(request) = self.server.next_request()? {
                assert_eq!(self.server.receive_len(), 0, "one at a time");
                self.answer_request(request);
            }
        }
        let mut answers = Vec::new();
        while let Some((bytes, file)) = self.server.next_outgoing() {
            let (bytes, file) = (bytes.to_vec(), file.copied());
            self.server.record_sent(bytes.len());
            answers.push((bytes, file));
        }
        Ok(answers)
    }

    fn answer_request(&mut self, request: OwnerRequest<FakeFile>) {
        let server = &mut self.server;
        let (text, call) = match request {
            OwnerRequest::Memory { call, change } => {
                let text = match change {
                    MemoryChange::Replace(areas) => format!("memory {areas:x?}"),
                    MemoryChange::Add(area, file) => format!("more {area:x?} {file}"),
                    MemoryChange::Remove(area) => format!("less {area:x?}"),
                };
                (text, call)
            }
            OwnerRequest::Start { call, queue, start } => {
                (format!("start {queue} {start:x?}"), call)
            }
            OwnerRequest::SetCall { call, queue, file } => (format!("call {queue} {file:?}"), call),
            OwnerRequest::SetInflightFd { call, area, file } => {
                (format!("inflight {area:?} {file}"), call)
            }
            OwnerRequest::SetBackChannel { call, file } => (format!("back {file}"), call),
            OwnerRequest::Stop { call, queue } => {
                self.log.push(format!("stop {queue}"));
                return server.reply_queue_stopped(call, 0x1234);
            }
            OwnerRequest::GetInflightFd { call, queues, size } => {
                self.log.push(format!("make {queues} {size}"));
                let area = InflightBuffer { len_bytes: 0x3000, file_offset: 0, queues, size };
                return server.reply_inflight(call, area, 55);
            }
        };
        self.log.push(text);
        if self.refuses {
            self.untold += usize::from(server.reply_error(call) == ReplyDisposition::NotReported);
        } else {
            server.reply_success(call);
        }
    }
}

/// Message with descriptors that QEMU sends when it starts and stops a disk with one queue, and the
/// expected reply.
type SessionStep = (Vec<u8>, Vec<FakeFile>, Option<ReplyWithFile>);

pub(super) fn qemu_session() -> Vec<SessionStep> {
    let get = |code, answer: Vec<u8>| (encode_message(code, 1, &[]), vec![], Some((answer, None)));
    let set = |code, payload: Vec<u8>| (encode_message(code, 1, &payload), vec![], None);
    let acked = |code, payload: Vec<u8>, files: Vec<FakeFile>| {
        (
            encode_message(code, 9, &payload),
            files,
            Some((encode_message(code, 5, &u64_payload(&[0])), None)),
        )
    };
    let config: Vec<u8> = [u32_payload(&[2, 8, 0]), (2..10).collect()].concat();
    let asked = [u32_payload(&[2, 8, 0]), vec![0; 8]].concat();
    let area = |guest: u64| [guest, 0x20_0000, 0x7f00_0000_0000 + guest, 0x1000];
    let table =
        [u32_payload(&[2, 0]), u64_payload(&area(0)), u64_payload(&area(0x1_0000_0000))].concat();
    let inflight = |len: u64| [u64_payload(&[len, 0]), vec![1, 0, 128, 0, 0, 0, 0, 0]].concat();
    let rings = u64_payload(&[0x7f00_0000_4000, 0x7f00_0000_6000, 0x7f00_0000_5000, 0]);
    vec![
        get(1, encode_message(1, 5, &u64_payload(&[1 << 32 | 1 << 30 | 1 << 29 | 1 << 9]))),
        get(
            15,
            encode_message(
                15,
                5,
                &u64_payload(&[1 | 1 << 3 | 1 << 5 | 1 << 9 | 1 << 12 | 1 << 15]),
            ),
        ),
        set(16, u64_payload(&[1 | 1 << 3 | 1 << 5 | 1 << 9 | 1 << 12 | 1 << 15])),
        get(17, encode_message(17, 5, &u64_payload(&[2]))),
        get(36, encode_message(36, 5, &u64_payload(&[256]))),
        acked(21, vec![], vec![9]),
        set(3, vec![]),
        (encode_message(13, 1, &u64_payload(&[0])), vec![7], None),
        (encode_message(24, 1, &asked), vec![], Some((encode_message(24, 5, &config), None))),
        (
            encode_message(31, 1, &inflight(0)),
            vec![],
            Some((encode_message(31, 5, &inflight(0x3000)), Some(55))),
        ),
        acked(32, inflight(0x3000), vec![55]),
        acked(2, u64_payload(&[1 << 32 | 1 << 30 | 1 << 29]), vec![]),
        acked(5, table, vec![11, 12]),
        acked(37, [u64_payload(&[0]), u64_payload(&area(0x2_0000_0000))].concat(), vec![13]),
        acked(38, [u64_payload(&[0]), u64_payload(&area(0x2_0000_0000))].concat(), vec![]),
        set(8, u32_payload(&[0, 128])),
        set(10, u32_payload(&[0, 0xfffe])),
        set(9, [u32_payload(&[0, 0]), rings].concat()),
        (encode_message(14, 1, &u64_payload(&[0x100])), vec![], None),
        acked(12, u64_payload(&[0]), vec![21]),
        acked(13, u64_payload(&[0]), vec![22]),
        acked(18, u32_payload(&[0, 1]), vec![]),
        acked(13, u64_payload(&[0x100]), vec![]),
        (
            encode_message(11, 1, &u32_payload(&[0, 0])),
            vec![],
            Some((encode_message(11, 5, &u32_payload(&[0, 0x1234])), None)),
        ),
        acked(18, u32_payload(&[0, 0]), vec![]),
        // The queue is stopped already.
        (
            encode_message(11, 1, &u32_payload(&[0, 0])),
            vec![],
            Some((encode_message(11, 5, &u32_payload(&[0, 0x1234])), None)),
        ),
    ]
}

#[test]
fn vhost_user_session_has_the_bytes_of_the_protocol() {
    let mut pair = ServerFixture::new();
    for (bytes, files, answer) in qemu_session() {
        let found = pair.send(&bytes, &files, usize::MAX).unwrap();
        assert_eq!(found, answer.into_iter().collect::<Vec<_>>(), "{bytes:x?}");
    }
    let area = |guest: &str| {
        format!(
            "MemoryRegionDesc {{ guest: {guest}, len_bytes: 200000, user: 7f00{guest:0>8}, \
             file_offset: 1000 }}"
        )
    };
    let expected = [
        "back 9".to_owned(),
        "call 0 Some(7)".to_owned(),
        "make 1 128".to_owned(),
        "inflight InflightBuffer { len_bytes: 12288, file_offset: 0, queues: 1, size: 128 } 55"
            .to_owned(),
        format!("memory [({}, b), ({}, c)]", area("0"), area("100000000").replace("7f00", "7f0")),
        format!("more {} 13", area("200000000").replace("7f00", "7f0")),
        format!("less {}", area("200000000").replace("7f00", "7f0")),
        "call 0 Some(22)".to_owned(),
        "start 0 QueueStartParams { size: 80, base: fffe, addresses: [7f0000004000, 7f0000005000, \
         7f0000006000], kick: Some(15), features: 160000000 }"
            .to_owned(),
        "call 0 None".to_owned(),
        "stop 0".to_owned(),
    ];
    assert_eq!(pair.log, expected);
}

#[test]
fn config_space_change_is_signaled_to_the_front_end() {
    let mut pair = ServerFixture::new();
    assert!(!pair.server.set_config(vec![7; 60]), "it has not said that it asks for it");
    pair.send(&encode_message(16, 1, &u64_payload(&[1 << 5 | 1 << 9])), &[], usize::MAX).unwrap();
    let asked = [u32_payload(&[58, 4, 0]), vec![0; 4]].concat();
    let space = |first: u8| [u32_payload(&[58, 4, 0]), vec![first, first, 0, 0]].concat();
    for first in [7, 8] {
        assert!(pair.server.set_config(vec![first; 60]));
        let found = pair.send(&encode_message(24, 1, &asked), &[], usize::MAX).unwrap();
        assert_eq!(found, [(encode_message(24, 5, &space(first)), None)]);
    }
    assert_eq!(CONFIG_CHANGED.to_vec(), encode_message(2, 1, &[]));
}

#[test]
fn vhost_user_session_is_independent_of_fragmentation() {
    let whole: Vec<u8> = qemu_session().into_iter().flat_map(|(bytes, ..)| bytes).collect();
    let mut expected = ServerFixture::new();
    for (bytes, files, _) in qemu_session() {
        expected.send(&bytes, &files, usize::MAX).unwrap();
    }
    for piece in 1..=64 {
        let mut pair = ServerFixture::new();
        for (bytes, files, answer) in qemu_session() {
            let found = pair.send(&bytes, &files, piece).unwrap();
            assert_eq!(found, answer.into_iter().collect::<Vec<_>>(), "in pieces of {piece}");
        }
        assert_eq!(pair.log, expected.log, "in pieces of {piece}");
    }
    // Cut at each byte and disconnected: an incomplete message is not executed.
    for cut in 0..whole.len() {
        let mut pair = ServerFixture::new();
        let mut left = cut;
        for (bytes, files, _) in qemu_session() {
            let count = bytes.len().min(left);
            pair.send(&bytes[..count], &files, usize::MAX).unwrap();
            left -= count;
            let is_cut_within = count > 0 && count < bytes.len();
            assert_eq!(pair.server.has_partial_message(), is_cut_within, "cut at {cut}");
            if left == 0 {
                break;
            }
        }
        assert!(expected.log.starts_with(&pair.log), "cut at {cut}");
    }
}

#[test]
fn queue_starts_at_set_vring_kick_without_protocol_features() {
    let mut pair = ServerFixture::new();
    let rings = u64_payload(&[0x4000, 0x6000, 0x5000, 0]);
    for (bytes, files) in [
        (encode_message(2, 1, &u64_payload(&[1 << 32])), vec![]),
        (encode_message(8, 1, &u32_payload(&[1, 64])), vec![]),
        (encode_message(9, 1, &[u32_payload(&[1, 0]), rings].concat()), vec![]),
        (encode_message(12, 1, &u64_payload(&[1])), vec![9]),
    ] {
        assert_eq!(pair.send(&bytes, &files, usize::MAX), Ok(vec![]));
    }
    assert_eq!(pair.log.len(), 1);
    assert!(pair.log[0].starts_with("start 1 "), "{:?}", pair.log);
}

#[test]
fn rejection_is_reported_if_a_reply_was_requested() {
    for (flags, untold) in [(9, 0), (1, 1)] {
        let mut pair = ServerFixture::new();
        pair.send(&encode_message(16, 1, &u64_payload(&[1 << 3])), &[], usize::MAX).unwrap();
        pair.refuses = true;
        let answer =
            pair.send(&encode_message(13, flags, &u64_payload(&[0])), &[3], usize::MAX).unwrap();
        assert_eq!(pair.untold, untold);
        let reported: Vec<_> = answer.into_iter().map(|(bytes, _)| bytes).collect();
        let failed = encode_message(MessageType::SET_VRING_CALL.0, 5, &u64_payload(&[1]));
        assert_eq!(reported, if untold == 0 { vec![failed] } else { vec![] });
    }
}

#[test]
fn front_end_that_does_not_receive_is_no_longer_read() {
    let mut pair = ServerFixture::new();
    let question = encode_message(1, 1, &[]);
    for _ in 0..64 {
        pair.server.receive(&question, []).unwrap_or_else(|why| panic!("{why}"));
        assert!(pair.server.next_request().unwrap().is_none());
    }
    assert_eq!(pair.server.receive_len(), 0);
    pair.server.record_sent(20);
    assert_eq!(pair.server.receive_len(), 12);
}
