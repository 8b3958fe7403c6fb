//! Clients that violate the protocol, devices that fail, and disconnects at any time.

use tenmil_base::{Instant, Operation, Request, RequestFlags};
use tenmil_wire::nbd::{
    Command, CommandFlags, ErrorCode, OptionCode, OptionHeader, OptionReplyCode, PAYLOAD_BYTES_MAX,
};

use super::client::{
    Reply, contexts, flagged, flags, go, handshake, option, options_of, replies, request, write,
};
use super::{SIZE, Session};

/// Replies to a request, over structured replies.
fn completed(session: &mut Session, bytes: &[u8]) -> Vec<(u64, Reply)> {
    if session.connection.is_negotiating() {
        session.talk(&handshake(true), usize::MAX);
    }
    replies(&session.talk(bytes, usize::MAX), |_| 0)
}

#[test]
fn every_request_that_cannot_be_is_refused_with_its_error_and_nothing_else_happens() {
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
        let mut session = Session::new();
        let bytes = flagged(command, flags, 7, offset, len);
        let found = completed(&mut session, &bytes);
        let case = format!("{command} {flags:?} {offset} {len}");
        assert_eq!(found, [(7, Reply::Failed(error, None))], "{case}");
        let next = completed(&mut session, &request(Command::READ, 8, 0, 512));
        assert_eq!(next, [(8, Reply::Data(0, vec![0; 512]))], "{case}: it goes on");
    }
}

#[test]
fn the_data_of_a_refused_write_are_not_taken_for_requests() {
    let too_long = vec![0xee; PAYLOAD_BYTES_MAX as usize + 512];
    for (session, offset, data, error) in [
        (Session::new(), SIZE, &too_long[..512], ErrorCode::ENOSPC),
        (Session::new(), 0, &too_long[..], ErrorCode::EINVAL),
        (Session::new(), 0, &too_long[..700], ErrorCode::EINVAL),
        (Session::with(true, |_| {}), 0, &too_long[..512], ErrorCode::EPERM),
    ] {
        let mut session = session;
        let bytes = [write(7, offset, data), request(Command::READ, 8, 0, 512)].concat();
        let found = completed(&mut session, &bytes);
        let expected = [(7, Reply::Failed(error, None)), (8, Reply::Data(0, vec![0; 512]))];
        assert_eq!(found, expected);
    }
}

#[test]
fn a_read_only_export_refuses_every_change() {
    let mut session = Session::with(true, |_| {});
    for command in [Command::TRIM, Command::WRITE_ZEROES] {
        let found = completed(&mut session, &request(command, 7, 0, 512));
        assert_eq!(found, [(7, Reply::Failed(ErrorCode::EPERM, None))], "{command}");
    }
    let found = completed(&mut session, &request(Command::FLUSH, 7, 0, 0));
    assert_eq!(found, [(7, Reply::Done)]);
}

#[test]
fn a_volatile_device_offers_no_flush() {
    let mut session =
        Session::with(false, |limits| limits.durability = tenmil_base::Durability::NonPersistent);
    let found = completed(&mut session, &request(Command::FLUSH, 7, 0, 0));
    assert_eq!(found, [(7, Reply::Failed(ErrorCode::EINVAL, None))]);
    let forced = flagged(Command::WRITE_ZEROES, CommandFlags::FUA, 8, 0, 512);
    let found = completed(&mut session, &forced);
    assert_eq!(found, [(8, Reply::Failed(ErrorCode::EINVAL, None))]);
}

#[test]
fn who_asks_what_is_where_without_having_said_so_is_refused() {
    let mut session = Session::new();
    session.talk(&handshake(false), usize::MAX);
    let back = session.talk(&request(Command::BLOCK_STATUS, 7, 0, 512), usize::MAX);
    assert_eq!(replies(&back, |_| 0), [(7, Reply::Failed(ErrorCode::EINVAL, None))]);
}

#[test]
fn a_device_error_is_reported_with_its_offset() {
    for structured in [true, false] {
        let mut session = Session::new();
        session.talk(&handshake(structured), usize::MAX);
        // In the third part of a read that is split.
        let spoiled = (2 << 20) + 4096;
        let request_of = Request {
            random_token: 0,
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
        let back = session.talk(&request(Command::READ, 7, 512, 4 << 20), usize::MAX);
        let memory = structured.then_some(512 + (2 << 20));
        let expected = [(7, Reply::Failed(ErrorCode::EIO, memory))];
        assert_eq!(replies(&back, |_| 0), expected, "structured: {structured}");
    }
}

#[test]
fn only_unrecoverable_violations_close_the_connection() {
    let too_long = OptionHeader { option: OptionCode::LIST, len_bytes: PAYLOAD_BYTES_MAX + 1 };
    let mut bad_magic = request(Command::READ, 1, 0, 512);
    bad_magic[0] ^= 1;
    for (name, bytes) in [
        ("unknown client flags", 4_u32.to_be_bytes().to_vec()),
        ("no option", [flags(), vec![0; 16]].concat()),
        ("an endless option", [flags(), too_long.to_bytes().to_vec()].concat()),
        ("no such export", [flags(), option(OptionCode::EXPORT_NAME, b"tape")].concat()),
        ("an export that is no text", [flags(), option(OptionCode::EXPORT_NAME, b"\xff")].concat()),
        ("abort", [flags(), option(OptionCode::ABORT, &[])].concat()),
        ("no request", [handshake(true), bad_magic].concat()),
        ("disconnect", [handshake(true), request(Command::DISC, 1, 0, 0)].concat()),
    ] {
        let mut session = Session::new();
        session.talk(&bytes, usize::MAX);
        assert!(session.connection.is_over(), "{name}");
        assert!(session.connection.receive_into().is_empty(), "{name}: nothing more is taken");
    }
}

#[test]
fn an_invalid_option_is_rejected_and_the_next_one_is_handled() {
    use OptionReplyCode as Kind;
    let asks = |option: OptionCode, data: &[u8], expected: Kind| (option, data.to_vec(), expected);
    let set = |data: &[u8]| {
        let mut whole = contexts(OptionCode::SET_META_CONTEXT, &["base:allocation"]);
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
        let mut session = Session::new();
        let mut bytes = flags();
        bytes.extend(option(option_code, &data));
        bytes.extend(go(""));
        let back = session.talk(&bytes, 5000);
        let (replies, _) = options_of(&back);
        let (first, last) = (&replies[0], &replies[replies.len() - 1]);
        assert_eq!((first.0, first.1), (option_code, expected), "{}", data.len());
        assert!(!first.2.is_empty(), "it says why");
        assert_eq!((last.0, last.1), (OptionCode::GO, Kind::ACK));
    }
}

#[test]
fn an_end_in_the_middle_brings_what_is_complete_to_its_end() {
    let requests = [write(1, 0, &[1; 512]), write(2, 512, &[2; 512])].concat();
    let begin = handshake(true);
    for cut in 0..=requests.len() {
        let mut session = Session::new();
        session.talk(&begin, usize::MAX);
        let mut back = session.talk(&requests[..cut], usize::MAX);
        session.connection.receive_end();
        while session.work() {}
        back.extend(session.take(usize::MAX));
        assert!(session.connection.is_over(), "cut at {cut}");
        assert_eq!(replies(&back, |_| 0).len(), cut / (28 + 512), "cut at {cut}");
    }
}

#[test]
fn a_broken_connection_ends_when_the_device_has_completed_all_requests() {
    let mut session = Session::new();
    session.talk(&handshake(true), usize::MAX);
    session.give(&request(Command::READ, 1, 0, 512));
    session.connection.step();
    let (requests, segments) = session.connection.requests();
    assert_eq!(session.backend.submit(Instant::default(), requests, segments), 1);
    session.connection.taken(1);
    session.connection.broken();
    assert!(!session.connection.is_over(), "the backend still has its memory");
    session.work();
    assert!(session.connection.is_over());
    assert!(session.connection.requests().0.is_empty());
}

#[test]
fn a_fuzzed_client_finds_nothing() {
    let mut random = tenmil_base::Random::new(7);
    let recorded = [handshake(true), request(Command::READ, 1, 0, 4096), write(2, 0, &[5; 1024])];
    let recorded = recorded.concat();
    for _ in 0..300 {
        let mut bytes = vec![(random.next_u64() & 0xff) as u8];
        bytes.extend(&recorded);
        for _ in 0..random.below(4) {
            let at = usize::try_from(random.below(bytes.len() as u64)).unwrap();
            bytes[at] = (random.next_u64() & 0xff) as u8;
        }
        crate::nbd::fuzz::fuzz(&bytes);
    }
}
