//! Messages of a client, and parsing of the replies.

use tenmil_wire::nbd::option::{InfoOption, MetaContextOption};
use tenmil_wire::nbd::reply::{CHUNK_MAGIC, ChunkPayload};
use tenmil_wire::nbd::{
    ChunkFlags, ChunkHeader, ClientFlags, Command, CommandFlags, ErrorCode, OptionCode,
    OptionHeader, OptionReply, OptionReplyCode, RequestHeader, ServerGreeting, SimpleReply,
};

/// Client flags, the first message of each client.
pub(super) fn encode_client_flags() -> Vec<u8> {
    ClientFlags::FIXED_NEWSTYLE.union(ClientFlags::NO_ZEROES).0.to_be_bytes().to_vec()
}

pub(super) fn encode_option(option: OptionCode, data: &[u8]) -> Vec<u8> {
    let len_bytes = u32::try_from(data.len()).unwrap();
    [&OptionHeader { option, len_bytes }.to_bytes(), data].concat()
}

pub(super) fn encode_go(name: &str) -> Vec<u8> {
    let mut data = Vec::new();
    InfoOption::emit(name, &[], &mut data);
    encode_option(OptionCode::GO, &data)
}

pub(super) fn encode_meta_contexts(code: OptionCode, queries: &[&str]) -> Vec<u8> {
    let mut data = Vec::new();
    MetaContextOption::emit("", queries, &mut data);
    encode_option(code, &data)
}

/// Handshake that negotiates simple replies, or structured replies and block status.
pub(in crate::nbd) fn encode_handshake(structured: bool) -> Vec<u8> {
    let mut bytes = encode_client_flags();
    if structured {
        bytes.extend(encode_option(OptionCode::STRUCTURED_REPLY, &[]));
        bytes.extend(encode_meta_contexts(OptionCode::SET_META_CONTEXT, &["base:allocation"]));
    }
    bytes.extend(encode_go(""));
    bytes
}

pub(in crate::nbd) fn encode_request(
    command: Command,
    cookie: u64,
    offset: u64,
    len_bytes: u32,
) -> Vec<u8> {
    encode_request_with_flags(command, CommandFlags::NONE, cookie, offset, len_bytes)
}

pub(super) fn encode_request_with_flags(
    command: Command,
    flags: CommandFlags,
    cookie: u64,
    offset: u64,
    len_bytes: u32,
) -> Vec<u8> {
    RequestHeader { flags, command, cookie, offset, len_bytes }.to_bytes().to_vec()
}

pub(in crate::nbd) fn encode_write(cookie: u64, offset: u64, data: &[u8]) -> Vec<u8> {
    let len = u32::try_from(data.len()).unwrap();
    [&encode_request(Command::WRITE, cookie, offset, len)[..], data].concat()
}

/// Option, type of its reply, and data of the reply.
pub(super) type ParsedOptionReply = (OptionCode, OptionReplyCode, Vec<u8>);

/// Greeting and the option replies that follow it; returns the remaining bytes.
pub(super) fn parse_option_replies(bytes: &[u8]) -> (Vec<ParsedOptionReply>, &[u8]) {
    let (greeting, mut rest) = bytes.split_first_chunk().unwrap();
    ServerGreeting::parse(greeting).unwrap();
    let mut replies = Vec::new();
    while let Some((header, data)) = rest.split_first_chunk()
        && let Ok(reply) = OptionReply::parse(header)
    {
        let (data, behind) = data.split_at(reply.len_bytes as usize);
        replies.push((reply.option, reply.kind, data.to_vec()));
        rest = behind;
    }
    (replies, rest)
}

/// Parsed reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    Done,
    Data(u64, Vec<u8>),
    Hole(u64, u32),
    Status(Vec<(u32, u32)>),
    Failed(ErrorCode, Option<u64>),
}

/// Replies with their cookies in the order of arrival. `reads` returns the data length of a simple
/// reply.
pub(super) fn parse_replies(mut bytes: &[u8], reads: impl Fn(u64) -> usize) -> Vec<(u64, Reply)> {
    let mut replies = Vec::new();
    while !bytes.is_empty() {
        let chunk = bytes[..4] == CHUNK_MAGIC.to_be_bytes();
        let (cookie, reply, rest) =
            if chunk { parse_structured_reply(bytes) } else { parse_simple_reply(bytes, &reads) };
        replies.push((cookie, reply));
        bytes = rest;
    }
    replies
}

fn parse_simple_reply(bytes: &[u8], reads: impl Fn(u64) -> usize) -> (u64, Reply, &[u8]) {
    let (header, rest) = bytes.split_first_chunk().unwrap();
    let SimpleReply { error, cookie } = SimpleReply::parse(header).unwrap();
    if error != ErrorCode::NONE {
        return (cookie, Reply::Failed(error, None), rest);
    }
    match reads(cookie) {
        0 => (cookie, Reply::Done, rest),
        len => (cookie, Reply::Data(0, rest[..len].to_vec()), &rest[len..]),
    }
}

fn parse_structured_reply(bytes: &[u8]) -> (u64, Reply, &[u8]) {
    let (header, rest) = bytes.split_first_chunk().unwrap();
    let ChunkHeader { flags, kind, cookie, len_bytes } = ChunkHeader::parse(header).unwrap();
    assert_eq!(flags, ChunkFlags::DONE, "this server answers by one chunk");
    let (payload, rest) = rest.split_at(len_bytes as usize);
    let reply = match ChunkPayload::parse(kind, payload).unwrap() {
        ChunkPayload::None => Reply::Done,
        ChunkPayload::Data { offset, data } => Reply::Data(offset, data.to_vec()),
        ChunkPayload::Status { context, extents } => {
            assert_eq!(context, 1, "the one that was chosen");
            Reply::Status(extents.iter().map(|one| (one.len_bytes, one.flags.0)).collect())
        }
        ChunkPayload::Error { error, text, offset } => {
            assert!(!text.is_empty(), "an error says why");
            Reply::Failed(error, offset)
        }
        ChunkPayload::Hole { offset, len_bytes } => Reply::Hole(offset, len_bytes),
    };
    (cookie, reply, rest)
}
