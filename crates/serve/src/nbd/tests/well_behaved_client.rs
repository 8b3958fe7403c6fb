//! Requests of well-behaved clients, with the stream cut at each byte.

use tenmil_base::{HoleReporting, IoCompletion, IoStatus, Operation, RequestFlags};
use tenmil_wire::nbd::option::{InfoReply, parse_meta_context_reply_data, parse_server_reply_data};
use tenmil_wire::nbd::{Command, CommandFlags, OptionCode, OptionReplyCode, TransmissionFlags};

use super::client_messages::{
    ParsedOptionReply, Reply, encode_client_flags, encode_go, encode_handshake,
    encode_meta_contexts, encode_option, encode_request, encode_request_with_flags, encode_write,
    parse_option_replies, parse_replies,
};
use super::{SIZE, TestConnection};

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..=250).cycle().take(len).map(|byte: u8| byte ^ seed).collect()
}

/// Requests of each kind, each with its own cookie.
fn request_stream(structured: bool) -> Vec<u8> {
    let mut bytes = encode_handshake(structured);
    bytes.extend(encode_write(1, 0, &pattern(1536, 1)));
    bytes.extend(encode_request(Command::READ, 2, 512, 1024));
    bytes.extend(encode_request_with_flags(
        Command::WRITE_ZEROES,
        CommandFlags::NO_HOLE,
        3,
        512,
        512,
    ));
    bytes.extend(encode_request(Command::READ, 4, 0, 1536));
    bytes.extend(encode_request_with_flags(Command::TRIM, CommandFlags::FUA, 5, 1024, 512));
    bytes.extend(encode_request(Command::FLUSH, 6, 0, 0));
    bytes.extend(encode_request(Command::READ, 7, SIZE, 512));
    bytes.extend(encode_write(8, SIZE, &pattern(512, 3)));
    bytes.extend(encode_request(Command::READ, 9, 4096, 0));
    bytes.extend(encode_request(Command::CACHE, 10, 0, 512));
    if structured {
        bytes.extend(encode_request_with_flags(Command::READ, CommandFlags::DF, 11, 0, 512));
    }
    bytes.extend(encode_request(Command::DISC, 12, 0, 0));
    bytes
}

fn read_len_of_cookie(cookie: u64) -> usize {
    match cookie {
        2 => 1024,
        4 => 1536,
        _ => 0,
    }
}

/// Parsed output, with the replies sorted by cookie: replies that need no backend may overtake
/// others.
fn sorted_replies(back: &[u8]) -> (Vec<ParsedOptionReply>, Vec<(u64, Reply)>) {
    let (options, rest) = parse_option_replies(back);
    let mut replies = parse_replies(rest, read_len_of_cookie);
    replies.sort_by_key(|(cookie, _)| *cookie);
    (options, replies)
}

#[test]
fn stream_split_at_any_byte_gives_the_same_replies() {
    for structured in [false, true] {
        let bytes = request_stream(structured);
        let expected = TestConnection::new().exchange_bytes(&bytes, usize::MAX);
        let expected = sorted_replies(&expected);
        for cut in 1..bytes.len() {
            let mut session = TestConnection::new();
            let mut back = session.exchange_bytes(&bytes[..cut], usize::MAX);
            assert!(!session.connection.is_finished(), "cut at {cut}");
            back.extend(session.exchange_bytes(&bytes[cut..], usize::MAX));
            assert!(sorted_replies(&back) == expected, "cut at {cut}");
            assert!(session.connection.is_finished(), "cut at {cut}");
        }
        for piece in [1, 2, 3, 7, 28, 511] {
            let back = TestConnection::new().exchange_bytes(&bytes, piece);
            assert!(sorted_replies(&back) == expected, "pieces of {piece}");
        }
    }
}

#[test]
fn every_request_gets_its_expected_reply() {
    for structured in [false, true] {
        let back = TestConnection::new().exchange_bytes(&request_stream(structured), 100);
        let (options, rest) = parse_option_replies(&back);
        assert!(options.iter().all(|(_, kind, _)| !kind.is_error()), "{options:?}");
        let mut found = parse_replies(rest, read_len_of_cookie);
        found.sort_by_key(|(cookie, _)| *cookie);
        let data = pattern(1536, 1);
        let mut zeroed = data.clone();
        zeroed[512..1024].fill(0);
        let at = |offset| if structured { offset } else { 0 };
        let failed = |code| Reply::Failed(code, None);
        let mut expected = vec![
            (1, Reply::Done),
            (2, Reply::Data(at(512), data[512..].to_vec())),
            (3, Reply::Done),
            (4, Reply::Data(at(0), zeroed)),
            (5, Reply::Done),
            (6, Reply::Done),
            (7, failed(tenmil_wire::nbd::ErrorCode::EINVAL)),
            (8, failed(tenmil_wire::nbd::ErrorCode::ENOSPC)),
            (9, Reply::Done),
            (10, Reply::Done),
        ];
        if structured {
            expected.push((11, Reply::Data(0, data[..512].to_vec())));
        }
        assert_eq!(found, expected, "structured: {structured}");
    }
}

#[test]
fn export_is_listed_described_and_selected() {
    let mut bytes = encode_client_flags();
    bytes.extend(encode_option(OptionCode::LIST, &[]));
    bytes.extend(encode_option(OptionCode::STARTTLS, &[]));
    bytes.extend(encode_option(OptionCode::EXTENDED_HEADERS, &[]));
    bytes.extend(encode_option(OptionCode::STRUCTURED_REPLY, &[]));
    bytes.extend(encode_meta_contexts(OptionCode::LIST_META_CONTEXT, &[]));
    bytes.extend(encode_meta_contexts(OptionCode::SET_META_CONTEXT, &["x:y", "base:allocation"]));
    let mut info = Vec::new();
    let asked = [tenmil_wire::nbd::InfoCode::NAME, tenmil_wire::nbd::InfoCode::DESCRIPTION];
    tenmil_wire::nbd::option::InfoOption::emit("disk", &asked, &mut info);
    bytes.extend(encode_option(OptionCode::INFO, &info));
    bytes.extend(encode_go("disk"));
    let back = TestConnection::new().exchange_bytes(&bytes, usize::MAX);
    let (options, rest) = parse_option_replies(&back);
    assert!(rest.is_empty());
    let kinds: Vec<_> = options.iter().map(|(option, kind, _)| (*option, *kind)).collect();
    let of = |option, kinds: &[OptionReplyCode]| {
        kinds.iter().map(|kind| (option, *kind)).collect::<Vec<_>>()
    };
    use OptionReplyCode as Kind;
    let expected = [
        of(OptionCode::LIST, &[Kind::SERVER, Kind::ACK]),
        of(OptionCode::STARTTLS, &[Kind::ERR_UNSUP]),
        of(OptionCode::EXTENDED_HEADERS, &[Kind::ERR_UNSUP]),
        of(OptionCode::STRUCTURED_REPLY, &[Kind::ACK]),
        of(OptionCode::LIST_META_CONTEXT, &[Kind::META_CONTEXT, Kind::ACK]),
        of(OptionCode::SET_META_CONTEXT, &[Kind::META_CONTEXT, Kind::ACK]),
        of(OptionCode::INFO, &[Kind::INFO, Kind::INFO, Kind::INFO, Kind::INFO, Kind::ACK]),
        of(OptionCode::GO, &[Kind::INFO, Kind::INFO, Kind::ACK]),
    ];
    assert_eq!(kinds, expected.concat());
    assert_eq!(parse_server_reply_data(&options[0].2), Ok(("disk", "a disk")));
    assert_eq!(parse_meta_context_reply_data(&options[5].2), Ok((0, "base:allocation")));
    assert_eq!(parse_meta_context_reply_data(&options[7].2), Ok((1, "base:allocation")));
    let Ok(InfoReply::Export { size_bytes, flags }) = InfoReply::parse(&options[9].2) else {
        panic!()
    };
    assert_eq!(size_bytes, SIZE);
    assert!(flags.has(TransmissionFlags::SEND_DF.union(TransmissionFlags::CAN_MULTI_CONN)));
    let sizes = InfoReply::BlockSize { minimum: 512, preferred: 4096, maximum: 32 << 20 };
    assert_eq!(InfoReply::parse(&options[10].2), Ok(sizes));
    assert_eq!(InfoReply::parse(&options[11].2), Ok(InfoReply::Name("disk")));
    assert_eq!(InfoReply::parse(&options[12].2), Ok(InfoReply::Description("a disk")));
}

#[test]
fn export_name_reply_has_zeroes_unless_no_zeroes_is_negotiated() {
    for (client_flags, zeroes) in [(1_u32, 124), (3, 0)] {
        let mut bytes = client_flags.to_be_bytes().to_vec();
        bytes.extend(encode_option(OptionCode::EXPORT_NAME, b"disk"));
        bytes.extend(encode_request(Command::READ, 5, 0, 512));
        let back = TestConnection::new().exchange_bytes(&bytes, usize::MAX);
        assert_eq!(back.len(), 18 + 10 + zeroes + 16 + 512);
        assert_eq!(back[18..26], SIZE.to_be_bytes());
        assert!(back[28..28 + zeroes].iter().all(|byte| *byte == 0));
    }
}

#[test]
fn block_status_returns_extents() {
    let mut bytes = encode_handshake(true);
    bytes.extend(encode_request_with_flags(
        Command::BLOCK_STATUS,
        CommandFlags::REQ_ONE,
        1,
        0,
        8192,
    ));
    let mut session = TestConnection::new();
    let back = session.exchange_bytes(&bytes, usize::MAX);
    let found = parse_replies(parse_option_replies(&back).1, |_| 0);
    let [(1, Reply::Status(extents))] = &found[..] else { panic!("{found:?}") };
    assert_eq!(extents.len(), 1);
    assert!(extents[0].0 <= 8192 && extents[0].0 > 0, "{extents:?}");
}

#[test]
fn requests_beyond_every_limit_wait_and_complete() {
    // More requests than slots, or more data than memory.
    for (count, len) in [(600, 4096), (40, 1 << 20), (300, 20_480), (3, 32 << 20)] {
        let mut session = TestConnection::new();
        let mut bytes = encode_handshake(true);
        (0..count).for_each(|cookie| bytes.extend(encode_request(Command::READ, cookie, 0, len)));
        let mut given = 0;
        let mut back = Vec::new();
        // Output is taken only after the connection accepts no more input.
        while given < bytes.len() || !session.connection.unsent_segments().is_empty() {
            let more = session.receive_bytes(&bytes[given..]);
            given += more;
            let worked = session.run_until_idle();
            if more == 0 && !worked || session.connection.is_negotiating() {
                let taken = session.take_output(1 << 20);
                assert!(!taken.is_empty() || worked || more > 0, "it is stuck at {given}");
                back.extend(taken);
            }
            while session.run_until_idle() {}
        }
        let found = parse_replies(parse_option_replies(&back).1, |_| 0);
        assert_eq!(found.len() as u64, count, "{count} of {len}");
        assert!(
            found.iter().all(
                |(_, reply)| matches!(reply, Reply::Data(0, data) if data.len() == len as usize)
            )
        );
    }
}

#[test]
fn large_write_is_read_back_unchanged() {
    for len in [16 << 10, (16 << 10) + 512, 256 << 10, (1 << 20) + 512, 32 << 20] {
        let mut session = TestConnection::new();
        let data = pattern(len, 9);
        let mut bytes = encode_handshake(true);
        bytes.extend(encode_write(1, 512, &data));
        bytes.extend(encode_write(2, 512, &data[..512]));
        session.exchange_bytes(&bytes, 100_000);
        let back = session.exchange_bytes(
            &encode_request(Command::READ, 3, 512, u32::try_from(len).unwrap()),
            28,
        );
        let found = parse_replies(&back, |_| 0);
        assert!(found == [(3, Reply::Data(512, data))], "{len}");
    }
}

/// Size in the last option reply that contains one.
fn negotiated_size(options: &[ParsedOptionReply]) -> Option<u64> {
    let sizes = options.iter().filter(|(_, kind, _)| *kind == OptionReplyCode::INFO);
    let mut sizes = sizes.filter_map(|(_, _, data)| match InfoReply::parse(data) {
        Ok(InfoReply::Export { size_bytes, .. }) => Some(size_bytes),
        _ => None,
    });
    sizes.next_back()
}

#[test]
fn repeated_info_reports_the_current_size() {
    let mut session = TestConnection::new();
    let mut info = Vec::new();
    tenmil_wire::nbd::option::InfoOption::emit("", &[], &mut info);
    let asks = encode_option(OptionCode::INFO, &info);
    let greeting = session.exchange_bytes(&[], usize::MAX);
    let ask = |session: &mut TestConnection, bytes: &[u8]| {
        let back = session.exchange_bytes(bytes, usize::MAX);
        negotiated_size(&parse_option_replies(&[&greeting[..], &back].concat()).0)
    };
    assert_eq!(ask(&mut session, &[encode_client_flags(), asks.clone()].concat()), Some(SIZE));
    session.export.set_block_count(SIZE / 1024);
    assert_eq!(ask(&mut session, &asks), Some(SIZE / 2));
    session.export.set_block_count(SIZE / 2048);
    assert_eq!(ask(&mut session, &encode_go("")), Some(SIZE / 4), "the one that is chosen counts");
}

#[test]
fn connected_client_uses_the_current_size() {
    use tenmil_wire::nbd::ErrorCode;
    let mut session = TestConnection::new();
    session.exchange_bytes(&encode_handshake(true), usize::MAX);
    let mut at_the_end = |blocks: u64| {
        session.export.set_block_count(blocks);
        let last = SIZE - 512;
        let asked = [encode_request(Command::READ, 1, last, 512), encode_write(2, last, &[1; 512])]
            .concat();
        let mut found = parse_replies(&session.exchange_bytes(&asked, usize::MAX), |_| 0);
        found.sort_by_key(|(cookie, _)| *cookie);
        found.into_iter().map(|(_, reply)| reply).collect::<Vec<_>>()
    };
    let [too_far, no_room] =
        [ErrorCode::EINVAL, ErrorCode::ENOSPC].map(|it| Reply::Failed(it, None));
    assert_eq!(at_the_end(SIZE / 512 - 1), [too_far, no_room]);
    let there = at_the_end(SIZE / 512);
    assert!(matches!(&there[..], [Reply::Data(_, _), Reply::Done]), "{there:?}");
}

/// Bytes of a resize request, written out as in the protocol document.
fn encode_resize(cookie: u8, size_bytes: u64, len_bytes: u32) -> Vec<u8> {
    let mut bytes = vec![0x25, 0x60, 0x95, 0x13, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, cookie];
    bytes.extend(size_bytes.to_be_bytes());
    bytes.extend(len_bytes.to_be_bytes());
    bytes
}

#[test]
fn resize_applies_before_its_reply_is_sent() {
    for structured in [false, true] {
        let mut session = TestConnection::resizable();
        let back = session.exchange_bytes(&encode_handshake(structured), usize::MAX);
        let events = parse_option_replies(&back).0;
        let flags = events.iter().find_map(|(_, _, data)| match InfoReply::parse(data) {
            Ok(InfoReply::Export { flags, .. }) => Some(flags),
            _ => None,
        });
        assert!(flags.unwrap().has(TransmissionFlags::SEND_RESIZE));
        let back = session.exchange_bytes(&encode_resize(3, SIZE / 2, 0), 1);
        assert_eq!(back, [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3]);
        assert_eq!(session.export.size_bytes(), SIZE / 2);
        let error_of = |session: &mut TestConnection, bytes: &[u8]| {
            let found = parse_replies(&session.exchange_bytes(bytes, usize::MAX), |_| 0);
            let [(_, reply)] = &found[..] else { panic!("{found:?}") };
            reply.clone()
        };
        let failed = |error| Reply::Failed(error, None);
        use tenmil_wire::nbd::ErrorCode;
        let read = encode_request(Command::READ, 4, SIZE / 2, 512);
        assert_eq!(error_of(&mut session, &read), failed(ErrorCode::EINVAL));
        for (size_bytes, len_bytes, error) in [
            (SIZE * 2, 0, ErrorCode::ENOSPC),
            (0, 0, ErrorCode::EINVAL),
            (SIZE + 1, 0, ErrorCode::EINVAL),
            (SIZE, 512, ErrorCode::EINVAL),
        ] {
            let asked = encode_resize(5, size_bytes, len_bytes);
            assert_eq!(error_of(&mut session, &asked), failed(error), "{size_bytes}, {len_bytes}");
        }
        assert_eq!(session.connection.completed_stats().errors, 5);
    }
}

#[test]
fn resize_without_negotiated_extension_is_rejected() {
    let mut session = TestConnection::new();
    session.exchange_bytes(&encode_handshake(true), usize::MAX);
    let back = session.exchange_bytes(&encode_resize(3, SIZE / 2, 0), usize::MAX);
    let refused = Reply::Failed(tenmil_wire::nbd::ErrorCode::EINVAL, None);
    assert_eq!(parse_replies(&back, |_| 0), [(3, refused)]);
    assert_eq!(session.export.size_bytes(), SIZE);
}

#[test]
fn zero_length_requests_complete_at_once() {
    let mut session = TestConnection::new();
    session.exchange_bytes(&encode_handshake(true), usize::MAX);
    for command in
        [Command::READ, Command::WRITE, Command::TRIM, Command::WRITE_ZEROES, Command::CACHE]
    {
        for offset in [0, SIZE] {
            let back = session.exchange_bytes(&encode_request(command, 1, offset, 0), usize::MAX);
            assert_eq!(parse_replies(&back, |_| 0), [(1, Reply::Done)], "{command} at {offset}");
        }
    }
}

#[test]
fn advertised_command_flags_are_accepted() {
    let mut session = TestConnection::new();
    session.exchange_bytes(&encode_handshake(true), usize::MAX);
    for (command, flag) in [
        (Command::READ, CommandFlags::FUA),
        (Command::READ, CommandFlags::DF.union(CommandFlags::FUA)),
        (Command::FLUSH, CommandFlags::FUA),
        (Command::CACHE, CommandFlags::FUA),
        (Command::TRIM, CommandFlags::FUA),
        (Command::WRITE_ZEROES, CommandFlags::FUA.union(CommandFlags::NO_HOLE)),
        (Command::WRITE_ZEROES, CommandFlags::FAST_ZERO),
    ] {
        let len_bytes = if command == Command::FLUSH { 0 } else { 512 };
        let back = session
            .exchange_bytes(&encode_request_with_flags(command, flag, 1, 0, len_bytes), usize::MAX);
        let found = parse_replies(&back, |_| 0);
        let is_done = matches!(&found[..], [(1, Reply::Done | Reply::Data(_, _))]);
        assert!(is_done, "{command} {flag:?}: {found:?}");
    }
}

#[test]
fn an_unknown_metadata_context_is_not_selected() {
    use OptionReplyCode as Kind;
    let chosen = [
        (OptionCode::LIST_META_CONTEXT, &["qemu:dirty-bitmap:x"][..], 0),
        (OptionCode::LIST_META_CONTEXT, &["base:"][..], 1),
        (OptionCode::SET_META_CONTEXT, &["base:allocation"][..], 1),
        // A new selection replaces the previous one.
        (OptionCode::SET_META_CONTEXT, &["qemu:dirty-bitmap:x", "base:"][..], 0),
    ];
    let mut bytes =
        [encode_client_flags(), encode_option(OptionCode::STRUCTURED_REPLY, &[])].concat();
    chosen.iter().for_each(|(code, queries, _)| bytes.extend(encode_meta_contexts(*code, queries)));
    bytes.extend(encode_go(""));
    let mut session = TestConnection::new();
    let back = session.exchange_bytes(&bytes, usize::MAX);
    let (events, _) = parse_option_replies(&back);
    let kinds: Vec<Kind> = events.iter().map(|(_, kind, _)| *kind).collect();
    let mut expected = vec![Kind::ACK];
    for (_, _, count) in chosen {
        expected.extend(vec![Kind::META_CONTEXT; count]);
        expected.push(Kind::ACK);
    }
    expected.extend([Kind::INFO, Kind::INFO, Kind::ACK]);
    assert_eq!(kinds, expected);
    let back =
        session.exchange_bytes(&encode_request(Command::BLOCK_STATUS, 7, 0, 512), usize::MAX);
    let refused = Reply::Failed(tenmil_wire::nbd::ErrorCode::EINVAL, None);
    assert_eq!(parse_replies(&back, |_| 0), [(7, refused)]);
}

#[test]
fn failed_flush_has_no_offset_and_failed_write_has_one() {
    for (command, status) in
        [(Command::FLUSH, IoStatus::WRITE_FAULT), (Command::TRIM, IoStatus::WRITE_FAULT)]
    {
        let mut session = TestConnection::new();
        session.exchange_bytes(&encode_handshake(true), usize::MAX);
        let len_bytes = if command == Command::FLUSH { 0 } else { 512 };
        session.receive_bytes(&encode_request(command, 7, 0, len_bytes));
        session.connection.step();
        let token = session.connection.pending_requests().0[0].token;
        session.connection.record_submitted(1);
        session.connection.handle_completion(IoCompletion { token, status, result: 0 });
        let back = session.take_output(usize::MAX);
        // NBD_REPLY_TYPE_ERROR and NBD_REPLY_TYPE_ERROR_OFFSET.
        let expected: u16 = if command == Command::FLUSH { 1 << 15 | 1 } else { 1 << 15 | 2 };
        assert_eq!(back[6..8], expected.to_be_bytes(), "{command:?}");
    }
}

/// Replies to a read of `len_bytes` that the device completes with this result, and the flags of
/// the request to the device.
fn complete_read_with(
    session: &mut TestConnection,
    (len_bytes, result, status): (u32, u32, IoStatus),
) -> (RequestFlags, Vec<(u64, Reply)>) {
    session.receive_bytes(&encode_request(Command::READ, 7, 8192, len_bytes));
    session.connection.step();
    let (requests, _) = session.connection.pending_requests();
    let (tokens, flags): (Vec<u64>, Vec<RequestFlags>) =
        requests.iter().map(|request| (request.token, request.flags)).unzip();
    session.connection.record_submitted(tokens.len());
    for token in tokens {
        session.connection.handle_completion(IoCompletion { token, status, result });
    }
    let back = session.take_output(usize::MAX);
    (flags.first().copied().unwrap_or_default(), parse_replies(&back, |_| len_bytes as usize))
}

#[test]
fn hole_is_sent_without_data_if_client_and_device_support_it() {
    let (read, done) = ((4096, IoCompletion::HOLE, IoStatus::SUCCESS), IoStatus::SUCCESS);
    let mut session = TestConnection::with_holes(HoleReporting::AtReads);
    session.exchange_bytes(&encode_handshake(true), usize::MAX);
    let (flags, back) = complete_read_with(&mut session, read);
    assert_eq!((flags, back), (RequestFlags::HOLES, vec![(7, Reply::Hole(8192, 4096))]));
    let (_, back) = complete_read_with(&mut session, (4096, 0, done));
    assert_eq!(back, [(7, Reply::Data(8192, vec![0; 4096]))], "the next read has its own result");
    let failed = (4096, IoCompletion::HOLE, IoStatus::UNRECOVERED_READ);
    let (_, back) = complete_read_with(&mut session, failed);
    assert!(matches!(back[..], [(7, Reply::Failed(..))]), "{back:?}");
    // In several requests to the device, each of which could be a hole.
    let (flags, back) = complete_read_with(&mut session, (3 << 20, IoCompletion::HOLE, done));
    assert_eq!(flags, RequestFlags::NONE);
    assert!(matches!(&back[..], [(7, Reply::Data(_, data))] if data.len() == 3 << 20));
    let mut session = TestConnection::with_holes(HoleReporting::Everywhere);
    session.exchange_bytes(&encode_handshake(true), usize::MAX);
    let (flags, back) = complete_read_with(&mut session, (2 << 20, 0, done));
    assert_eq!((flags, back), (RequestFlags::NONE, vec![(7, Reply::Hole(8192, 2 << 20))]));
    let (_, back) = complete_read_with(&mut session, (0, 0, done));
    assert_eq!(back, [(7, Reply::Done)], "a hole chunk has a length");
    for (structured, mut session) in
        [(false, TestConnection::with_holes(HoleReporting::AtReads)), (true, TestConnection::new())]
    {
        session.exchange_bytes(&encode_handshake(structured), usize::MAX);
        let (flags, back) = complete_read_with(&mut session, read);
        assert_eq!(flags, RequestFlags::NONE, "structured: {structured}");
        assert!(matches!(&back[..], [(7, Reply::Data(_, data))] if data.len() == 4096));
    }
}

#[test]
fn trim_with_fua_completes_after_a_flush() {
    let mut session = TestConnection::new();
    session.exchange_bytes(&encode_handshake(true), usize::MAX);
    session.receive_bytes(&encode_request_with_flags(Command::TRIM, CommandFlags::FUA, 7, 0, 512));
    session.connection.step();
    for operation in [Operation::Deallocate, Operation::Flush] {
        assert!(session.connection.unsent_segments().is_empty(), "{operation:?} is not done");
        session.connection.step();
        let asked = session.connection.pending_requests().0[0];
        assert_eq!((asked.operation, asked.flags), (operation, RequestFlags::NONE));
        session.connection.record_submitted(1);
        let completion = IoCompletion { token: asked.token, status: IoStatus::SUCCESS, result: 0 };
        session.connection.handle_completion(completion);
    }
    assert!(!session.connection.unsent_segments().is_empty());
    session.receive_bytes(&encode_request(Command::TRIM, 8, 0, 512));
    session.connection.step();
    let token = session.connection.pending_requests().0[0].token;
    session.connection.record_submitted(1);
    session.connection.handle_completion(IoCompletion {
        token,
        status: IoStatus::SUCCESS,
        result: 0,
    });
    session.connection.step();
    assert!(session.connection.pending_requests().0.is_empty(), "one that is not forced is done");
}

#[test]
fn request_is_partial_from_its_first_byte_to_its_last() {
    let mut session = TestConnection::new();
    session.exchange_bytes(&encode_handshake(true), usize::MAX);
    assert_eq!(session.connection.partial_request_number(), None, "an idle client owes nothing");
    let bytes = encode_write(1, 0, &pattern(32 << 10, 1));
    session.receive_bytes(&bytes[..1]);
    session.run_until_idle();
    let header = session.connection.partial_request_number();
    assert!(header.is_some());
    session.receive_bytes(&bytes[1..bytes.len() - 1]);
    session.run_until_idle();
    let payload = session.connection.partial_request_number();
    assert!(payload.is_some() && payload != header);
    session.receive_bytes(&bytes[bytes.len() - 1..]);
    session.run_until_idle();
    assert_eq!(session.connection.partial_request_number(), None);
}
