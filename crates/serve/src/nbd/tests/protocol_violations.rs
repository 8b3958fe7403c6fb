//! Clients that violate the protocol, devices that fail, and disconnects at any time.

use tenmil_base::{Instant, Operation, Request, RequestFlags};
use tenmil_wire::nbd::{
    Command, CommandFlags, ErrorCode, OptionCode, OptionHeader, OptionReplyCode, PAYLOAD_BYTES_MAX,
};

use super::client_messages::{
    Reply, encode_client_flags, encode_go, encode_handshake, encode_meta_contexts, encode_option,
    encode_request, encode_request_with_flags, encode_write, parse_option_replies, parse_replies,
};
use super::{SIZE, TestConnection};

/// Replies to a request, over structured replies.
fn exchange_structured(session: &mut TestConnection, bytes: &[u8]) -> Vec<(u64, Reply)> {
    if session.connection.is_negotiating() {
        session.exchange_bytes(&encode_handshake(true), usize::MAX);
    }
    parse_replies(&session.exchange_bytes(bytes, usize::MAX), |_| 0)
}

#[test]
fn invalid_request_is_rejected_with_its_error_and_no_side_effect() {
    let huge = PAYLOAD_BYTES_MAX + 512;
    let none = CommandFlags::NONE;
    for (command, flags, offset, len, error) in [
        (Command::READ, none, 0, huge, ErrorCode::EINVAL),
        (Command::READ, none, 0, u32::MAX, ErrorCode::EINVAL),
        (Command::READ, none, SIZE - 512, 1024, ErrorCode::EINVAL),
        (Command::READ, none, u64::MAX - 511, 512, ErrorCode::EINVAL),
        (Command::READ, none, 1, 512, ErrorCode::EINVAL),
        (Command::READ, none, 0, 513, ErrorCode::EINVAL),
        (Command::READ, CommandFlags::NO_HOLE, 0, 512, ErrorCode::EINVAL),
        (Command::READ, CommandFlags(1 << 15), 0, 512, ErrorCode::EINVAL),
        (Command::FLUSH, CommandFlags::DF, 0, 0, ErrorCode::EINVAL),
        (Command::TRIM, none, SIZE, 512, ErrorCode::EINVAL),
        (Command::TRIM, CommandFlags::FAST_ZERO, 0, 512, ErrorCode::EINVAL),
        (Command::WRITE_ZEROES, none, SIZE, 512, ErrorCode::ENOSPC),
        (Command::WRITE_ZEROES, CommandFlags::REQ_ONE, 0, 512, ErrorCode::EINVAL),
        (Command::BLOCK_STATUS, none, 0, 0, ErrorCode::EINVAL),
        (Command::BLOCK_STATUS, none, SIZE, 1, ErrorCode::EINVAL),
        (Command::RESIZE, none, 0, 512, ErrorCode::EINVAL),
        (Command(999), none, 0, 512, ErrorCode::EINVAL),
    ] {
        let mut session = TestConnection::new();
        let bytes = encode_request_with_flags(command, flags, 7, offset, len);
        let found = exchange_structured(&mut session, &bytes);
        let case = format!("{command} {flags:?} {offset} {len}");
        assert_eq!(found, [(7, Reply::Failed(error, None))], "{case}");
        let next = exchange_structured(&mut session, &encode_request(Command::READ, 8, 0, 512));
        assert_eq!(next, [(8, Reply::Data(0, vec![0; 512]))], "{case}: it goes on");
    }
}

#[test]
fn data_of_a_rejected_write_is_not_parsed_as_requests() {
    let too_long = vec![0xee; PAYLOAD_BYTES_MAX as usize + 512];
    for (session, offset, data, error) in [
        (TestConnection::new(), SIZE, &too_long[..512], ErrorCode::ENOSPC),
        (TestConnection::new(), 0, &too_long[..], ErrorCode::EINVAL),
        (TestConnection::new(), 0, &too_long[..700], ErrorCode::EINVAL),
        (TestConnection::with_limits(true, |_| {}), 0, &too_long[..512], ErrorCode::EPERM),
    ] {
        let mut session = session;
        let bytes =
            [encode_write(7, offset, data), encode_request(Command::READ, 8, 0, 512)].concat();
        let found = exchange_structured(&mut session, &bytes);
        let expected = [(7, Reply::Failed(error, None)), (8, Reply::Data(0, vec![0; 512]))];
        assert_eq!(found, expected);
    }
}

#[test]
fn read_only_export_rejects_every_change() {
    let mut session = TestConnection::with_limits(true, |_| {});
    for command in [Command::TRIM, Command::WRITE_ZEROES] {
        let found = exchange_structured(&mut session, &encode_request(command, 7, 0, 512));
        assert_eq!(found, [(7, Reply::Failed(ErrorCode::EPERM, None))], "{command}");
    }
    let found = exchange_structured(&mut session, &encode_request(Command::FLUSH, 7, 0, 0));
    assert_eq!(found, [(7, Reply::Done)]);
}

#[test]
fn volatile_device_does_not_offer_flush() {
    let mut session = TestConnection::with_limits(false, |limits| {
        limits.durability = tenmil_base::Durability::NonPersistent
    });
    let found = exchange_structured(&mut session, &encode_request(Command::FLUSH, 7, 0, 0));
    assert_eq!(found, [(7, Reply::Failed(ErrorCode::EINVAL, None))]);
    let forced = encode_request_with_flags(Command::WRITE_ZEROES, CommandFlags::FUA, 8, 0, 512);
    let found = exchange_structured(&mut session, &forced);
    assert_eq!(found, [(8, Reply::Failed(ErrorCode::EINVAL, None))]);
}

#[test]
fn block_status_without_negotiated_context_is_rejected() {
    let mut session = TestConnection::new();
    session.exchange_bytes(&encode_handshake(false), usize::MAX);
    let back =
        session.exchange_bytes(&encode_request(Command::BLOCK_STATUS, 7, 0, 512), usize::MAX);
    assert_eq!(parse_replies(&back, |_| 0), [(7, Reply::Failed(ErrorCode::EINVAL, None))]);
}

#[test]
fn a_device_error_is_reported_with_its_offset() {
    for structured in [true, false] {
        let mut session = TestConnection::new();
        session.exchange_bytes(&encode_handshake(structured), usize::MAX);
        // In the third part of a read that is split.
        let spoiled = (2 << 20) + 4096;
        let request_of = Request {
            token: 0,
            lba: spoiled / 512,
            operand: 0,
            segment_first: 0,
            blocks: 1,
            segment_count: 0,
            metadata_count: 0,
            operation: Operation::WriteUncorrectable,
            flags: RequestFlags::NONE,
        };
        assert_eq!(session.backend.submit(Instant::default(), &[request_of], &[]), 1);
        let mut completions = tenmil_base::CompletionBatch::with_capacity(1);
        assert_eq!(session.backend.poll(Instant::default(), &mut completions), 1);
        let back =
            session.exchange_bytes(&encode_request(Command::READ, 7, 512, 4 << 20), usize::MAX);
        let memory = structured.then_some(512 + (2 << 20));
        let expected = [(7, Reply::Failed(ErrorCode::EIO, memory))];
        assert_eq!(parse_replies(&back, |_| 0), expected, "structured: {structured}");
    }
}

#[test]
fn only_unrecoverable_violations_close_the_connection() {
    let too_long = OptionHeader { option: OptionCode::LIST, len_bytes: PAYLOAD_BYTES_MAX + 1 };
    let mut bad_magic = encode_request(Command::READ, 1, 0, 512);
    bad_magic[0] ^= 1;
    for (name, bytes) in [
        ("unknown client flags", 4_u32.to_be_bytes().to_vec()),
        ("no option", [encode_client_flags(), vec![0; 16]].concat()),
        ("an endless option", [encode_client_flags(), too_long.to_bytes().to_vec()].concat()),
        (
            "no such export",
            [encode_client_flags(), encode_option(OptionCode::EXPORT_NAME, b"tape")].concat(),
        ),
        (
            "an export that is no text",
            [encode_client_flags(), encode_option(OptionCode::EXPORT_NAME, b"\xff")].concat(),
        ),
        ("abort", [encode_client_flags(), encode_option(OptionCode::ABORT, &[])].concat()),
        ("no request", [encode_handshake(true), bad_magic].concat()),
        ("disconnect", [encode_handshake(true), encode_request(Command::DISC, 1, 0, 0)].concat()),
    ] {
        let mut session = TestConnection::new();
        session.exchange_bytes(&bytes, usize::MAX);
        assert!(session.connection.is_finished(), "{name}");
        assert!(session.connection.receive_segments().is_empty(), "{name}: nothing more is taken");
    }
}

#[test]
fn an_invalid_option_is_rejected_and_the_next_one_is_handled() {
    use OptionReplyCode as Kind;
    let asks = |option: OptionCode, data: &[u8], expected: Kind| (option, data.to_vec(), expected);
    let set = |data: &[u8]| {
        let mut whole = encode_meta_contexts(OptionCode::SET_META_CONTEXT, &["base:allocation"]);
        whole.drain(..16);
        whole.extend(data);
        whole
    };
    for (option_code, data, expected) in [
        asks(OptionCode::LIST, b"x", Kind::ERR_INVALID),
        asks(OptionCode::STARTTLS, b"x", Kind::ERR_INVALID),
        asks(OptionCode::STRUCTURED_REPLY, b"x", Kind::ERR_INVALID),
        asks(OptionCode::INFO, b"", Kind::ERR_INVALID),
        asks(OptionCode::GO, &[0xff; 6], Kind::ERR_INVALID),
        asks(OptionCode::GO, b"\0\0\0\x01x\0\0", Kind::ERR_UNKNOWN),
        asks(OptionCode::SET_META_CONTEXT, &set(b""), Kind::ERR_INVALID),
        asks(OptionCode::SET_META_CONTEXT, &set(b"x"), Kind::ERR_INVALID),
        asks(OptionCode::PEEK_EXPORT, b"", Kind::ERR_UNSUP),
        asks(OptionCode(77), b"what", Kind::ERR_UNSUP),
        asks(OptionCode::INFO, &vec![0; 40_000], Kind::ERR_TOO_BIG),
        asks(OptionCode::LIST, &vec![0; 1_000_000], Kind::ERR_TOO_BIG),
    ] {
        let mut session = TestConnection::new();
        let mut bytes = encode_client_flags();
        bytes.extend(encode_option(option_code, &data));
        bytes.extend(encode_go(""));
        let back = session.exchange_bytes(&bytes, 5000);
        let (replies, _) = parse_option_replies(&back);
        let (first, last) = (&replies[0], &replies[replies.len() - 1]);
        assert_eq!((first.0, first.1), (option_code, expected), "{}", data.len());
        assert!(!first.2.is_empty(), "it says why");
        assert_eq!((last.0, last.1), (OptionCode::GO, Kind::ACK));
    }
}

#[test]
fn stream_end_completes_fully_received_requests() {
    let requests = [encode_write(1, 0, &[1; 512]), encode_write(2, 512, &[2; 512])].concat();
    let begin = encode_handshake(true);
    for cut in 0..=requests.len() {
        let mut session = TestConnection::new();
        session.exchange_bytes(&begin, usize::MAX);
        let mut back = session.exchange_bytes(&requests[..cut], usize::MAX);
        session.connection.handle_stream_end();
        while session.run_until_idle() {}
        back.extend(session.take_output(usize::MAX));
        assert!(session.connection.is_finished(), "cut at {cut}");
        assert_eq!(parse_replies(&back, |_| 0).len(), cut / (28 + 512), "cut at {cut}");
    }
}

#[test]
fn a_broken_connection_ends_when_the_device_has_completed_all_requests() {
    let mut session = TestConnection::new();
    session.exchange_bytes(&encode_handshake(true), usize::MAX);
    session.receive_bytes(&encode_request(Command::READ, 1, 0, 512));
    session.connection.step();
    let (requests, segments) = session.connection.pending_requests();
    assert_eq!(session.backend.submit(Instant::default(), requests, segments), 1);
    session.connection.record_submitted(1);
    session.connection.handle_send_error();
    assert!(!session.connection.is_finished(), "the backend still has its memory");
    session.run_until_idle();
    assert!(session.connection.is_finished());
    assert!(session.connection.pending_requests().0.is_empty());
}

#[test]
fn fuzzed_client_stream_causes_no_panic() {
    let mut random = tenmil_base::Random::new(7);
    let recorded = [
        encode_handshake(true),
        encode_request(Command::READ, 1, 0, 4096),
        encode_write(2, 0, &[5; 1024]),
    ];
    let recorded = recorded.concat();
    for _ in 0..300 {
        let mut bytes = vec![(random.next_u64() & 0xff) as u8];
        bytes.extend(&recorded);
        for _ in 0..random.below(4) {
            let at = usize::try_from(random.below(bytes.len() as u64)).unwrap();
            bytes[at] = (random.next_u64() & 0xff) as u8;
        }
        crate::nbd::fuzz::fuzz_nbd_connection(&bytes);
    }
}
