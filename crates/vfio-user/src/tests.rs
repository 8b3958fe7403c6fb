//! Client and server connected directly.

use crate::server::{DeviceInfo, DmaMap};
use crate::{
    Client, ClientEvent, Command, Errno, HEADER_BYTES, IrqAction, IrqInfo, IrqSelection, IrqSet,
    RegionInfo, Request, Server, SparseMmapArea, VersionCapabilities, Violation,
};

type FakeFile = u32;

fn sample_device() -> DeviceInfo<FakeFile> {
    let plain =
        |size| RegionInfo { size, is_readable: true, is_writable: true, ..RegionInfo::default() };
    let areas = vec![
        SparseMmapArea { offset: 0x1000, size: 0x1000 },
        SparseMmapArea { offset: 0x3000, size: 0x1000 },
    ];
    DeviceInfo {
        regions: vec![(RegionInfo { areas, ..plain(0x4000) }, Some(77)), (plain(256), None)],
        irqs: vec![IrqInfo::default(), IrqInfo { count: 9, is_maskable: true, is_fixed: true }],
    }
}

/// Client, and a server whose regions contain the low byte of each offset, and which reads memory
/// when it is written.
struct ClientServerPair {
    client: Client<FakeFile>,
    server: Server<FakeFile>,
    /// Largest number of bytes moved at once.
    piece: usize,
    /// Requests of the server, as text.
    log: Vec<String>,
}

impl ClientServerPair {
    fn new(piece: usize) -> Self {
        Self { client: Client::new(), server: Server::new(sample_device()), piece, log: Vec::new() }
    }

    /// Moves everything in both directions until nothing is left; returns the events of the client.
    fn exchange(&mut self) -> Vec<ClientEvent<FakeFile>> {
        let mut answers = Vec::new();
        loop {
            let mut has_moved = false;
            while let Some(outgoing) = self.client.next_outgoing() {
                let len = self.piece.min(outgoing.bytes.len()).min(self.server.receive_len());
                let (bytes, files) = (outgoing.bytes[..len].to_vec(), outgoing.files.to_vec());
                self.client.record_sent(len);
                self.server.handle_received(&bytes, files).unwrap();
                while let Some(request) = self.server.next_request().unwrap() {
                    self.answer_request(request);
                }
                has_moved = true;
            }
            while let Some(outgoing) = self.server.next_outgoing() {
                let len = self.piece.min(outgoing.bytes.len()).min(self.client.receive_len());
                let (bytes, files) = (outgoing.bytes[..len].to_vec(), outgoing.files.to_vec());
                self.server.record_sent(len);
                match self.client.handle_received(&bytes, files).unwrap() {
                    Some(ClientEvent::DmaRead { call, iova, len_bytes }) => {
                        self.log.push(format!("client reads {iova:#x} {len_bytes}"));
                        self.client.reply_dma_read(call, &vec![0xdd; len_bytes as usize]);
                    }
                    Some(ClientEvent::DmaWrite { call, iova, data }) => {
                        self.log.push(format!("client writes {iova:#x} {data:?}"));
                        self.client.reply_dma_write(call);
                    }
                    Some(answer) => answers.push(answer),
                    None => {}
                }
                has_moved = true;
            }
            if !has_moved {
                return answers;
            }
        }
    }

    fn answer_request(&mut self, request: Request<FakeFile>) {
        self.log.push(match &request {
            Request::Map { map, file, .. } => format!("map {:#x} {file:?}", map.iova),
            Request::Unmap { iova, len_bytes, .. } => format!("unmap {iova:#x} {len_bytes:#x}"),
            Request::SetIrqs { irqs, .. } => format!("irqs {irqs:?}"),
            Request::Read { region, offset, len_bytes, .. } => {
                format!("read {region} {offset:#x} {len_bytes}")
            }
            Request::Write { region, offset, data, .. } => {
                format!("write {region} {offset:#x} {data:?}")
            }
            Request::Reset { .. } => "reset".into(),
            Request::DmaRead { token, data } => format!("dma read {token} {data:?}"),
            Request::DmaWritten { token, result } => format!("dma written {token} {result:?}"),
        });
        let server = &mut self.server;
        match request {
            Request::Read { call, offset, len_bytes, .. } => {
                let data: Vec<u8> =
                    (0..u64::from(len_bytes)).map(|at| (offset + at).to_le_bytes()[0]).collect();
                server.reply_read(call, &data);
            }
            Request::Write { call, offset, .. } => {
                server.request_dma_read(5, offset, 3);
                server.request_dma_write(6, offset, &[1, 2]);
                server.reply_success(call);
            }
            Request::Unmap { call, iova: 0, .. } => server.reply_error(call, Errno::NO_ENTRY),
            Request::Map { call, .. }
            | Request::Unmap { call, .. }
            | Request::SetIrqs { call, .. }
            | Request::Reset { call } => server.reply_success(call),
            Request::DmaRead { .. } | Request::DmaWritten { .. } => {}
        }
    }
}

fn dma_map(iova: u64) -> DmaMap {
    DmaMap { iova, len_bytes: 0x2000, file_offset: 0, is_readable: true, is_writable: true }
}

/// A session with every kind of message, moved in fragments of `piece` bytes: the events of the
/// client and the requests of the server.
fn run_session(piece: usize) -> (Vec<String>, Vec<String>) {
    let mut pair = ClientServerPair::new(piece);
    let client = &mut pair.client;
    client.request_device_info();
    client.request_region_info(0);
    client.request_irq_info(1);
    client.request_dma_map(dma_map(0x10000), Some(5));
    client.request_dma_map(dma_map(0x20000), None);
    let (index, start, count) = (1, 2, 3);
    let data = IrqSelection::Files(vec![10, 11, 12]);
    client.request_set_irqs(IrqSet { index, start, count, action: IrqAction::Trigger, data });
    client.request_region_read(1, 0x10, 4);
    client.request_region_write(0, 0x1000, &[9, 8, 7, 6]);
    client.write_region_without_reply(0, 0x1008, &[5]);
    client.request_dma_unmap(0x20000, 0x2000);
    client.request_dma_unmap(0, 0x2000);
    client.request_reset();
    let answers = pair.exchange();
    (answers.iter().map(|answer| format!("{answer:?}")).collect(), pair.log)
}

#[test]
fn vfio_user_session_delivers_every_message() {
    let (answers, log) = run_session(usize::MAX);
    assert_eq!(
        log,
        [
            "map 0x10000 Some(5)",
            "map 0x20000 None",
            "irqs IrqSet { index: 1, start: 2, count: 3, action: Trigger, data: Files([10, 11, 12]) }",
            "read 1 0x10 4",
            "write 0 0x1000 [9, 8, 7, 6]",
            "write 0 0x1008 [5]",
            "unmap 0x20000 0x2000",
            "unmap 0x0 0x2000",
            "reset",
            "client reads 0x1000 3",
            "client writes 0x1000 [1, 2]",
            "client reads 0x1008 3",
            "client writes 0x1008 [1, 2]",
            "dma read 5 Ok([221, 221, 221])",
            "dma written 6 Ok(())",
            "dma read 5 Ok([221, 221, 221])",
            "dma written 6 Ok(())",
        ]
    );
    let areas = "[SparseMmapArea { offset: 4096, size: 4096 }, SparseMmapArea { offset: 12288, size: 4096 }]";
    assert!(
        answers[0]
            .starts_with("Version(VersionCapabilities { files_max: 16, data_bytes_max: 1048576")
    );
    assert_eq!(answers[1], "Device { regions: 2, irqs: 2, can_reset: true }");
    assert!(answers[2].contains(areas) && answers[2].contains("file: Some(77)"), "{}", answers[2]);
    assert!(answers[3].contains("count: 9, is_maskable: true, is_fixed: true"), "{}", answers[3]);
    assert!(answers.contains(&"Data { id: 8, data: [16, 17, 18, 19] }".into()), "{answers:?}");
    assert!(
        answers.contains(&"Refused { id: 12, command: DmaUnmap, error: Errno(2) }".into()),
        "{answers:?}"
    );
    // VERSION, three descriptions, two maps, interrupts, a read, a write, two unmaps, a reset: a
    // posted write has no reply.
    assert_eq!(answers.len(), 12);
}

/// The fragmentation does not affect the result, except for the order of messages that cross each
/// other.
#[test]
fn session_is_independent_of_fragmentation() {
    let sorted = |(mut answers, mut log): (Vec<String>, Vec<String>)| {
        answers.sort();
        log.sort();
        (answers, log)
    };
    let whole = sorted(run_session(usize::MAX));
    for piece in 1..80 {
        assert_eq!(sorted(run_session(piece)), whole, "pieces of {piece}");
    }
}

/// Server that has negotiated the version; returns its error reply to `bytes` with `files`, and the
/// violation it reports.
fn server_reaction(
    bytes: &[u8],
    files: Vec<FakeFile>,
) -> Result<(Option<u32>, Option<Violation>), Violation> {
    let mut server = Server::new(sample_device());
    let mut feed = |mut bytes: &[u8], mut files: Vec<FakeFile>| {
        while !bytes.is_empty() {
            let (first, rest) = bytes.split_at(server.receive_len().min(bytes.len()));
            server.handle_received(first, core::mem::take(&mut files))?;
            bytes = rest;
        }
        let request = server.next_request()?;
        assert!(request.is_none(), "{request:?}");
        let error = server
            .next_outgoing()
            .map(|outgoing| u32::from_le_bytes(outgoing.bytes[12..16].try_into().unwrap()));
        while let Some(outgoing) = server.next_outgoing() {
            let len = outgoing.bytes.len();
            server.record_sent(len);
        }
        Ok((error, server.take_rejection()))
    };
    let proposal = raw_message(1, 0, &VersionCapabilities::OURS.encode_proposal());
    feed(&proposal, Vec::new()).unwrap();
    feed(bytes, files)
}

fn raw_message(command: u16, flags: u32, body: &[u8]) -> Vec<u8> {
    let size = u32::try_from(HEADER_BYTES + body.len()).unwrap();
    let (command, size) = (command.to_le_bytes(), size.to_le_bytes());
    [&[1, 0], &command[..], &size, &flags.to_le_bytes(), &[0; 4], body].concat()
}

#[test]
fn unparsable_message_ends_the_connection_with_its_violation() {
    let sized = |size: u32| {
        let mut bytes = raw_message(9, 0, &[]);
        bytes[4..8].copy_from_slice(&size.to_le_bytes());
        server_reaction(&bytes, Vec::new()).unwrap_err()
    };
    let expected_max = (1 << 20) + 64 + 16;
    for found in [0, 15, expected_max + 1, u32::MAX] {
        assert_eq!(
            sized(found),
            Violation::Size { command: Command::RegionRead, found, expected_max }
        );
    }
    let refused = |bytes: &[u8], files| server_reaction(bytes, files).unwrap_err().to_string();
    assert_eq!(
        refused(&raw_message(9, 3, &[]), Vec::new()),
        "REGION_READ: flags 0x3, expected a command or a reply"
    );
    assert_eq!(
        refused(&raw_message(1, 0, &[0; 4]), Vec::new()),
        "VERSION: expected it once, and first"
    );
    assert_eq!(
        refused(&raw_message(11, 1, &[0; 16]), Vec::new()),
        "DMA_READ: a reply with number 1, expected one that was requested"
    );
    assert_eq!(
        refused(&raw_message(8, 0, &[0; 20]), (0..17).collect()),
        "DEVICE_SET_IRQS: 17 descriptors, expected at most 16"
    );
}

#[test]
fn commands_before_version_and_beyond_the_limit_are_rejected() {
    let mut server = Server::new(sample_device());
    server.handle_received(&raw_message(13, 0, &[]), Vec::new()).unwrap();
    assert_eq!(
        server.next_request().unwrap_err().to_string(),
        "DEVICE_RESET: expected VERSION first"
    );
    let mut server = Server::new(sample_device());
    for _ in 0..256 {
        server.handle_received(&raw_message(13, 0, &[]), Vec::new()).unwrap();
    }
    let crowd = server.handle_received(&raw_message(13, 0, &[]), Vec::new()).unwrap_err();
    assert_eq!(crowd, Violation::TooManyPending { expected_max: 256, what: "commands" });
}

/// Number of such messages that a server queues behind an unanswered command, and the violation
/// that the next one causes.
fn count_queued_until_violation(message: &[u8], files: usize) -> (usize, String) {
    let mut server = Server::new(sample_device());
    let feed = |server: &mut Server<FakeFile>, mut bytes: &[u8], mut files: Vec<FakeFile>| {
        while !bytes.is_empty() {
            let (first, rest) = bytes.split_at(server.receive_len().min(bytes.len()));
            server.handle_received(first, core::mem::take(&mut files))?;
            bytes = rest;
        }
        Ok::<_, Violation>(())
    };
    let proposal = raw_message(1, 0, &VersionCapabilities::OURS.encode_proposal());
    feed(&mut server, &proposal, Vec::new()).unwrap();
    assert!(server.next_request().unwrap().is_none());
    feed(&mut server, &raw_message(13, 0, &[]), Vec::new()).unwrap();
    assert!(matches!(server.next_request(), Ok(Some(Request::Reset { .. }))));
    for count in 0.. {
        let files = (0..files).map(|file| u32::try_from(file).unwrap()).collect();
        if let Err(violation) = feed(&mut server, message, files) {
            return (count, violation.to_string());
        }
    }
    unreachable!("it keeps them all")
}

#[test]
fn queued_messages_are_bounded_in_bytes_and_descriptors() {
    let write = raw_message(10, 0, &vec![0; 1 << 20]);
    let bytes = "more bytes of commands at once than expected, which is at most 4194304";
    assert_eq!(count_queued_until_violation(&write, 0), (4, bytes.into()));
    let files = "more descriptors with commands at once than expected, which is at most 128";
    assert_eq!(count_queued_until_violation(&raw_message(8, 0, &[0; 20]), 16), (8, files.into()));
    // A command that must not carry descriptors keeps at most one, for the report.
    assert_eq!(
        count_queued_until_violation(&raw_message(10, 0, &[0; 16]), 16),
        (128, files.into())
    );
}

#[test]
fn invalid_command_is_answered_with_an_errno() {
    let words = |values: &[u32]| -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    };
    let map = |flags, iova: u64, size: u64| {
        let places = [0_u64, iova, size].iter().flat_map(|place| place.to_le_bytes()).collect();
        [words(&[32, flags]), places].concat()
    };
    for (command, body, files, expected) in [
        (14, vec![], 0, 95),
        (6, words(&[16, 0, 0, 0]), 0, 95),
        (11, words(&[0; 4]), 0, 95),
        (2, words(&[32]), 0, 22),
        (2, map(0, 0, 4096), 0, 22),
        (2, map(7, 0, 4096), 0, 22),
        (2, map(3, 0, 0), 0, 22),
        (2, map(3, u64::MAX, 4096), 0, 22),
        (2, map(3, 0, 4096), 2, 22),
        (3, words(&[24, 1, 0, 0, 0, 0]), 0, 22),
        (4, vec![], 0, 22),
        (5, words(&[31, 0, 0]), 0, 22),
        (5, words(&[32, 0, 2]), 0, 22),
        (7, words(&[16, 0, 2]), 0, 22),
        (8, words(&[20, 0x24, 1, 8, 2]), 0, 22),
        (8, words(&[20, 0x24, 1, 0, 2]), 1, 22),
        (8, words(&[20, 0x27, 1, 0, 2]), 0, 22),
        (8, words(&[20, 0x19, 1, 0, 2]), 0, 22),
        (8, words(&[20, 0x22, 1, 0, 2]), 0, 22),
        (8, words(&[20, 0x21, 0, 0, 1]), 0, 22),
        (9, words(&[0x3ffe, 0, 0, 4]), 0, 22),
        (9, words(&[0, 0, 9, 4]), 0, 22),
        (9, words(&[0, 0, 0, 4]), 1, 22),
        (10, words(&[0, 0, 0, 4]), 0, 22),
        (10, words(&[0, 0, 0, 4, 0, 0]), 0, 22),
    ] {
        let found = server_reaction(&raw_message(command, 0, &body), (0..files).collect()).unwrap();
        assert_eq!(found.0, Some(expected), "{command} {body:?}");
        assert!(found.1.is_some(), "{command} {body:?}");
    }
}

#[test]
fn one_command_at_a_time_is_returned_and_dma_replies_in_between() {
    let mut pair = ClientServerPair::new(usize::MAX);
    pair.exchange();
    let server = &mut pair.server;
    server.request_dma_read(1, 0x1000, 4);
    let (id, reset) = (1_u16, raw_message(13, 0, &[]));
    server.handle_received(&reset, Vec::new()).unwrap();
    server.handle_received(&reset, Vec::new()).unwrap();
    let Some(Request::Reset { call }) = server.next_request().unwrap() else { panic!() };
    assert!(server.next_request().unwrap().is_none());
    let body = [&0x1000_u64.to_le_bytes()[..], &4_u64.to_le_bytes(), &[1, 2, 3, 4]].concat();
    let mut answer = raw_message(11, 1, &body);
    answer[..2].copy_from_slice(&id.to_le_bytes());
    server.handle_received(&answer[..16], Vec::new()).unwrap();
    server.handle_received(&answer[16..], Vec::new()).unwrap();
    let Some(Request::DmaRead { token: 1, data: Ok(data) }) = server.next_request().unwrap() else {
        panic!()
    };
    assert_eq!((data, server.pending_dma_count()), (vec![1, 2, 3, 4], 0));
    server.reply_success(call);
    assert!(matches!(server.next_request(), Ok(Some(Request::Reset { .. }))));
}

#[test]
fn short_argsz_is_answered_with_the_required_size() {
    let shape = &sample_device().regions[0].0;
    let body = shape.encode(0, 32);
    assert_eq!((body.len(), u32::from_le_bytes(body[..4].try_into().unwrap())), (32, 80));
    let mut bare = RegionInfo::parse(&body, 0).unwrap();
    assert_eq!(bare.areas, [SparseMmapArea { offset: 0, size: 0x4000 }]);
    bare.areas = shape.areas.clone();
    assert_eq!(&bare, shape);
    assert_eq!(&RegionInfo::parse(&shape.encode(0, 80), 0).unwrap(), shape);
}

#[test]
fn region_capability_list_out_of_bounds_is_rejected() {
    let body = sample_device().regions[0].0.encode(0, 80);
    let bent = |at: usize, value: u32| {
        let mut bent = body.clone();
        bent[at..at + 4].copy_from_slice(&value.to_le_bytes());
        RegionInfo::parse(&bent, 0)
    };
    assert!(bent(12, 31).is_err(), "into the fixed part");
    assert!(bent(12, 79).is_err(), "past the end");
    assert!(bent(40, 65).is_err(), "too many areas");
    assert!(bent(40, 3).is_err(), "more than there are");
    assert!(bent(8, 1).is_err(), "another region");
    assert!(bent(16, 0x3000).is_err(), "areas outside of the region");
    // Another capability that refers to itself as the next one.
    let mut ring = body.clone();
    ring[32..40].copy_from_slice(&[9, 0, 1, 0, 32, 0, 0, 0]);
    assert!(RegionInfo::parse(&ring, 0).is_err());
}

#[test]
fn second_client_is_rejected_with_busy() {
    let mut server: Server<FakeFile> = Server::new_rejecting();
    let proposal = raw_message(1, 0, &VersionCapabilities::OURS.encode_proposal());
    server.handle_received(&proposal[..16], Vec::new()).unwrap();
    server.handle_received(&proposal[16..], Vec::new()).unwrap();
    assert_eq!(server.next_request().unwrap_err(), Violation::Busy);
    let answer = server.next_outgoing().unwrap().bytes;
    assert_eq!((answer.len(), answer[8], answer[12]), (16, 0x21, 16));
}

/// Nothing more is received from a peer that does not receive its replies.
#[test]
fn peer_that_does_not_receive_gets_no_further_dma_requests() {
    let mut client: Client<FakeFile> = Client::new();
    let read = |id: u16| {
        let body = [&0x1000_u64.to_le_bytes()[..], &(1_u64 << 20).to_le_bytes()].concat();
        let mut bytes = raw_message(11, 0, &body);
        bytes[..2].copy_from_slice(&id.to_le_bytes());
        bytes
    };
    let mut answered = 0;
    while client.receive_len() > 0 {
        let bytes = read(answered);
        client.handle_received(&bytes[..16], Vec::new()).unwrap();
        let Some(ClientEvent::DmaRead { call, len_bytes, .. }) =
            client.handle_received(&bytes[16..], Vec::new()).unwrap()
        else {
            panic!()
        };
        client.reply_dma_read(call, &vec![0; len_bytes as usize]);
        answered += 1;
        assert!(answered < 10, "4 MiB are enough");
    }
    while let Some(outgoing) = client.next_outgoing() {
        let len = outgoing.bytes.len();
        client.record_sent(len);
    }
    assert!(client.receive_len() > 0);
}

/// Clients of the reference library send it with the descriptor of the memory.
#[test]
fn dma_unmap_with_a_descriptor_is_accepted_and_its_range_can_be_mapped_again() {
    let mut server = Server::<FakeFile>::new(sample_device());
    let mut feed = |message: &[u8], files: Vec<FakeFile>| {
        let (mut bytes, mut files) = (message, files);
        while !bytes.is_empty() {
            let (first, rest) = bytes.split_at(server.receive_len().min(bytes.len()));
            server.handle_received(first, core::mem::take(&mut files)).unwrap();
            bytes = rest;
        }
        let request = server.next_request().unwrap();
        assert_eq!(server.take_rejection().map(|it| it.to_string()), None);
        match request {
            Some(Request::Map { call, map, file }) => {
                server.reply_success(call);
                format!("map {:#x} {file:?}", map.iova)
            }
            Some(Request::Unmap { call, iova, .. }) => {
                server.reply_success(call);
                format!("unmap {iova:#x}")
            }
            None => String::new(),
            other => panic!("{other:?}"),
        }
    };
    let places = |values: &[u64]| -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    };
    let map = raw_message(2, 0, &places(&[32 | 3 << 32, 0, 0x1000, 0x2000]));
    let unmap = raw_message(3, 0, &places(&[24, 0x1000, 0x2000]));
    assert_eq!(
        feed(&raw_message(1, 0, &VersionCapabilities::OURS.encode_proposal()), Vec::new()),
        ""
    );
    for files in [0, 1, 3] {
        assert_eq!(feed(&map, vec![7]), "map 0x1000 Some(7)");
        assert_eq!(feed(&unmap, vec![9; files]), "unmap 0x1000", "{files} descriptors");
    }
}
