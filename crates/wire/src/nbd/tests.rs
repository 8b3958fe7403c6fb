//! Round trip of every structure, every bit of every header, and a recorded session.

use super::handshake::{OptionHeader, OptionReply, ServerGreeting, export_name_reply};
use super::option::{
    InfoOption, InfoReply, MetaContextOption, emit_meta_context_reply_data, emit_option_reply,
    emit_server_reply_data, parse_meta_context_reply_data, parse_server_reply_data,
    selects_base_allocation,
};
use super::reply::{ChunkPayload, encode_data_chunk_header, encode_extent, encode_hole_chunk};
use super::{
    BlockStatusExtent, ChunkCode, ChunkFlags, ChunkHeader, Command, CommandFlags, ErrorCode,
    ExtentFlags, HandshakeFlags, InfoCode, OptionCode, OptionReplyCode, ParseError, RequestHeader,
    SimpleReply, TransmissionFlags,
};

/// Flips each bit of `bytes`: changes of the magic number are rejected; all others round-trip and
/// change the value.
fn assert_header_bit_flips<const N: usize, T: PartialEq + core::fmt::Debug>(
    bytes: [u8; N],
    magic_bytes: usize,
    parse: fn(&[u8; N]) -> Result<T, ParseError>,
    emit: fn(T) -> [u8; N],
) {
    let plain = parse(&bytes).unwrap();
    for bit in 0..N * 8 {
        let mut flipped = bytes;
        flipped[bit / 8] ^= 1 << (bit % 8);
        match parse(&flipped) {
            Err(ParseError::Magic { .. }) => assert!(bit / 8 < magic_bytes, "bit {bit}"),
            Err(other) => panic!("bit {bit}: {other}"),
            Ok(parsed) => {
                assert!(bit / 8 >= magic_bytes, "bit {bit} of a magic number is not looked at");
                assert_ne!(parsed, plain, "bit {bit}");
                assert_eq!(emit(parsed), flipped, "bit {bit}");
            }
        }
    }
}

#[test]
fn changing_any_header_bit_changes_the_parsed_header() {
    let greeting = ServerGreeting { flags: HandshakeFlags(3) };
    assert_header_bit_flips(
        greeting.to_bytes(),
        16,
        ServerGreeting::parse,
        ServerGreeting::to_bytes,
    );
    let option = OptionHeader { option: OptionCode::GO, len_bytes: 0x0102_0304 };
    assert_header_bit_flips(option.to_bytes(), 8, OptionHeader::parse, OptionHeader::to_bytes);
    let reply =
        OptionReply { option: OptionCode::LIST, kind: OptionReplyCode::SERVER, len_bytes: 9 };
    assert_header_bit_flips(reply.to_bytes(), 8, OptionReply::parse, OptionReply::to_bytes);
    assert_header_bit_flips(READ.to_bytes(), 4, RequestHeader::parse, RequestHeader::to_bytes);
    let simple = SimpleReply { error: ErrorCode::EIO, cookie: 0x1122_3344_5566_7788 };
    assert_header_bit_flips(simple.to_bytes(), 4, SimpleReply::parse, SimpleReply::to_bytes);
    let chunk = ChunkHeader {
        flags: ChunkFlags::DONE,
        kind: ChunkCode::ERROR,
        cookie: 0x1122_3344_5566_7788,
        len_bytes: 6,
    };
    assert_header_bit_flips(chunk.to_bytes(), 4, ChunkHeader::parse, ChunkHeader::to_bytes);
}

const READ: RequestHeader = RequestHeader {
    flags: CommandFlags::DF,
    command: Command::READ,
    cookie: 0x0102_0304_0506_0708,
    offset: 0x1112_1314_1516_1718,
    len_bytes: 0x2122_2324,
};

#[test]
fn nbd_messages_have_the_bytes_of_the_protocol() {
    let greeting = ServerGreeting { flags: HandshakeFlags(3) }.to_bytes();
    assert_eq!(&greeting, b"NBDMAGICIHAVEOPT\x00\x03");
    let option = OptionHeader { option: OptionCode::EXPORT_NAME, len_bytes: 5 }.to_bytes();
    assert_eq!(&option, b"IHAVEOPT\x00\x00\x00\x01\x00\x00\x00\x05");
    assert_eq!(
        READ.to_bytes(),
        [
            0x25, 0x60, 0x95, 0x13, 0, 4, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0x11, 0x12, 0x13, 0x14,
            0x15, 0x16, 0x17, 0x18, 0x21, 0x22, 0x23, 0x24
        ]
    );
    let simple = SimpleReply { error: ErrorCode::ENOSPC, cookie: 7 }.to_bytes();
    assert_eq!(simple, [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 28, 0, 0, 0, 0, 0, 0, 0, 7]);
    let data = encode_data_chunk_header(7, 0x1000, 512);
    assert_eq!(data[..8], [0x66, 0x8e, 0x33, 0xef, 0, 1, 0, 1]);
    assert_eq!(data[16..], [0, 0, 2, 8, 0, 0, 0, 0, 0, 0, 0x10, 0]);
    let hole = encode_hole_chunk(7, 0x1000, 512);
    assert_eq!(hole[..8], [0x66, 0x8e, 0x33, 0xef, 0, 1, 0, 2]);
    assert_eq!(hole[16..], [0, 0, 0, 12, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 2, 0]);
    let name = export_name_reply(1 << 20, TransmissionFlags(0x0105));
    assert_eq!(name, [0, 0, 0, 0, 0, 0x10, 0, 0, 1, 5]);
    let extent =
        BlockStatusExtent { len_bytes: 512, flags: ExtentFlags::HOLE.union(ExtentFlags::ZERO) };
    assert_eq!(encode_extent(extent), [0, 0, 2, 0, 0, 0, 0, 3]);
}

#[test]
fn only_write_requests_have_a_payload() {
    for (command, name) in Command::NAMED {
        let header = RequestHeader { command: *command, len_bytes: 9, ..READ };
        let expected = if *command == Command::WRITE { 9 } else { 0 };
        assert_eq!(header.payload_bytes(), expected, "{name}");
    }
}

#[test]
fn export_queries_round_trip() {
    let mut data = Vec::new();
    InfoOption::emit("disk", &[InfoCode::BLOCK_SIZE, InfoCode(77)], &mut data);
    assert_eq!(data, b"\0\0\0\x04disk\0\x02\0\x03\0\x4d");
    let query = InfoOption::parse(&data).unwrap();
    assert_eq!(query.name, "disk");
    assert!(query.infos().eq([InfoCode::BLOCK_SIZE, InfoCode(77)]));
    for len in 0..data.len() {
        assert_eq!(InfoOption::parse(&data[..len]).unwrap_err(), ParseError::Length, "{len}");
    }
    data.push(0);
    assert_eq!(InfoOption::parse(&data).unwrap_err(), ParseError::Length);

    let mut data = Vec::new();
    MetaContextOption::emit("disk", &["base:allocation", "", "x-y:z"], &mut data);
    let query = MetaContextOption::parse(&data).unwrap();
    assert_eq!((query.name, query.count), ("disk", 3));
    assert!(query.queries().eq(["base:allocation", "", "x-y:z"]));
    for len in 0..data.len() {
        assert_eq!(
            MetaContextOption::parse(&data[..len]).unwrap_err(),
            ParseError::Length,
            "{len}"
        );
    }
    assert!(selects_base_allocation("base:allocation", false));
    assert!(selects_base_allocation("base:", true) && !selects_base_allocation("base:", false));
}

#[test]
fn invalid_nbd_strings_are_rejected() {
    let long = "x".repeat(super::STRING_BYTES_MAX + 1);
    for name in ["a\0b".as_bytes(), b"\xff", long.as_bytes()] {
        let mut data = u32::try_from(name.len()).unwrap().to_be_bytes().to_vec();
        data.extend(name);
        data.extend([0; 2]);
        assert_eq!(InfoOption::parse(&data).unwrap_err(), ParseError::Text);
    }
    // An impossible number of queries, and a length past the end.
    assert!(MetaContextOption::parse(&[0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]).is_err());
    assert!(MetaContextOption::parse(&[0xff; 12]).is_err());
}

#[test]
fn export_info_round_trips() {
    for info in [
        InfoReply::Export { size_bytes: u64::MAX, flags: TransmissionFlags(0xfff) },
        InfoReply::Name("disk"),
        InfoReply::Description("a disk"),
        InfoReply::BlockSize { minimum: 512, preferred: 4096, maximum: 1 << 25 },
        InfoReply::Other(InfoCode(9), &[1, 2]),
    ] {
        let mut data = Vec::new();
        info.emit(&mut data);
        assert_eq!(InfoReply::parse(&data), Ok(info));
    }
    assert_eq!(InfoReply::parse(&[0, 3, 0]), Err(ParseError::Length));
    let mut reply = Vec::new();
    emit_option_reply(OptionCode::LIST, OptionReplyCode::SERVER, &mut reply, |out| {
        emit_server_reply_data("disk", "big", out);
    });
    let (header, data) = reply.split_first_chunk::<20>().unwrap();
    assert_eq!(OptionReply::parse(header).unwrap().len_bytes, 11);
    assert_eq!(parse_server_reply_data(data), Ok(("disk", "big")));
    let mut data = Vec::new();
    emit_meta_context_reply_data(1, "base:allocation", &mut data);
    assert_eq!(parse_meta_context_reply_data(&data), Ok((1, "base:allocation")));
}

#[test]
fn chunk_payloads_round_trip_and_invalid_ones_are_rejected() {
    let extents = [0, 0, 2, 0, 0, 0, 0, 3, 0, 0, 4, 0, 0, 0, 0, 0];
    let status = [&[0, 0, 0, 1][..], &extents].concat();
    let parsed = ChunkPayload::parse(ChunkCode::BLOCK_STATUS, &status).unwrap();
    let ChunkPayload::Status { context: 1, extents } = parsed else { panic!("{parsed:?}") };
    assert!(
        extents.iter().map(|extent| (extent.len_bytes, extent.flags.0)).eq([(512, 3), (1024, 0)])
    );
    for payload in [
        ChunkPayload::None,
        ChunkPayload::Data { offset: 5, data: b"x" },
        ChunkPayload::Hole { offset: 5, len_bytes: 6 },
        parsed,
        ChunkPayload::Error { error: ErrorCode::EIO, text: "no", offset: None },
        ChunkPayload::Error { error: ErrorCode::EIO, text: "", offset: Some(9) },
    ] {
        let mut bytes = Vec::new();
        payload.emit(&mut bytes);
        let again = ChunkPayload::parse(payload.kind(), &bytes).unwrap();
        assert_eq!(format!("{again:?}"), format!("{payload:?}"));
        for len in 0..bytes.len() {
            let whole = matches!(payload, ChunkPayload::Data { .. }) && len > 8;
            let extent = matches!(payload, ChunkPayload::Status { .. }) && len == 12;
            let cut = ChunkPayload::parse(payload.kind(), &bytes[..len]);
            assert_eq!(cut.is_ok(), whole || extent, "{payload:?} cut at {len}");
        }
    }
    for (kind, payload) in [
        (ChunkCode::NONE, &[0][..]),
        (ChunkCode::OFFSET_HOLE, &[0; 12]),
        (ChunkCode::BLOCK_STATUS, &[0; 12]),
        (ChunkCode(77), &[]),
    ] {
        assert!(ChunkPayload::parse(kind, payload).is_err(), "{kind}");
    }
    let too_long = [0, 0, 0, 5, 0, 3, b'n', b'o'];
    assert!(ChunkPayload::parse(ChunkCode::ERROR, &too_long).is_err());
}

#[test]
fn nbd_codes_have_the_names_of_the_protocol() {
    assert_eq!(OptionCode::GO.to_string(), "NBD_OPT_GO");
    assert_eq!(OptionCode(99).to_string(), "0x63");
    assert!(OptionReplyCode::ERR_UNSUP.is_error() && !OptionReplyCode::ACK.is_error());
    assert!(ChunkCode::ERROR.is_error() && !ChunkCode::OFFSET_DATA.is_error());
    assert!(
        OptionReplyCode::NAMED.iter().all(|(code, name)| code.is_error() == name.contains("ERR"))
    );
    let flags =
        CommandFlags::FUA.union_if(true, CommandFlags::DF).union_if(false, CommandFlags::REQ_ONE);
    assert_eq!(flags, CommandFlags(5));
    assert!(flags.has(CommandFlags::DF) && !flags.without(CommandFlags::DF).has(CommandFlags::DF));
}
