//! Data of options and of their replies.

use super::handshake::{InfoCode, OptionCode, OptionReply, OptionReplyCode, TransmissionFlags};
use super::{ByteReader, ParseError};

/// The only metadata context defined by the protocol itself ("Metadata contexts").
pub const BASE_ALLOCATION: &str = "base:allocation";

/// Data of `NBD_OPT_INFO` and `NBD_OPT_GO`: an export name and information requests.
#[derive(Clone, Copy, Debug)]
pub struct InfoOption<'a> {
    /// Export name.
    pub name: &'a str,
    infos: &'a [u8],
}

impl<'a> InfoOption<'a> {
    /// Parses the data.
    ///
    /// # Errors
    ///
    /// If a length or the name is invalid.
    pub fn parse(data: &'a [u8]) -> Result<Self, ParseError> {
        let mut reader = ByteReader(data);
        let name = reader.take_length_prefixed_text()?;
        let count = usize::from(reader.u16()?);
        let infos = reader.bytes(count * 2)?;
        reader.expect_end()?;
        Ok(Self { name, infos })
    }

    /// Requested information types, in order.
    pub fn infos(&self) -> impl Iterator<Item = InfoCode> + 'a {
        let pairs = self.infos.chunks_exact(2);
        pairs.map(|pair| InfoCode(u16::from_be_bytes([pair[0], pair[1]])))
    }

    /// Appends the encoded data.
    pub fn emit(name: &str, infos: &[InfoCode], out: &mut Vec<u8>) {
        append_text(name, out);
        out.extend(len_u16(infos.len()).to_be_bytes());
        infos.iter().for_each(|info| out.extend(info.0.to_be_bytes()));
    }
}

/// Data of `NBD_OPT_LIST_META_CONTEXT` and `NBD_OPT_SET_META_CONTEXT`: an export name and context
/// queries.
#[derive(Clone, Copy, Debug)]
pub struct MetaContextOption<'a> {
    /// Export name.
    pub name: &'a str,
    /// Number of queries.
    pub count: u32,
    queries: &'a [u8],
}

impl<'a> MetaContextOption<'a> {
    /// Parses the data.
    ///
    /// # Errors
    ///
    /// If a length, the name or a query is invalid.
    pub fn parse(data: &'a [u8]) -> Result<Self, ParseError> {
        let mut reader = ByteReader(data);
        let name = reader.take_length_prefixed_text()?;
        let count = reader.u32()?;
        let queries = reader.0;
        for _ in 0..count {
            reader.take_length_prefixed_text()?;
        }
        reader.expect_end()?;
        Ok(Self { name, count, queries })
    }

    /// Queries, in order.
    pub fn queries(&self) -> impl Iterator<Item = &'a str> {
        let mut reader = ByteReader(self.queries);
        core::iter::from_fn(move || reader.take_length_prefixed_text().ok())
    }

    /// Appends the encoded data.
    pub fn emit(name: &str, queries: &[&str], out: &mut Vec<u8>) {
        append_text(name, out);
        out.extend(len_u32(queries.len()).to_be_bytes());
        queries.iter().for_each(|query| append_text(query, out));
    }
}

/// Whether a query selects `base:allocation`. When contexts are listed, the namespace name alone
/// selects all contexts in it ("Option types", `NBD_OPT_LIST_META_CONTEXT`).
#[must_use]
pub fn selects_base_allocation(query: &str, lists: bool) -> bool {
    query == BASE_ALLOCATION || (lists && query == "base:")
}

/// Data of `NBD_REP_INFO`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InfoReply<'a> {
    /// Size and flags.
    Export {
        /// Size in bytes.
        size_bytes: u64,
        /// Capabilities.
        flags: TransmissionFlags,
    },
    /// Export name.
    Name(&'a str),
    /// Description.
    Description(&'a str),
    /// Block size constraints.
    BlockSize {
        /// Alignment of offsets and lengths.
        minimum: u32,
        /// Preferred block size.
        preferred: u32,
        /// Maximum payload.
        maximum: u32,
    },
    /// Unknown information type.
    Other(InfoCode, &'a [u8]),
}

impl<'a> InfoReply<'a> {
    /// Information type.
    #[must_use]
    pub const fn code(&self) -> InfoCode {
        match self {
            Self::Export { .. } => InfoCode::EXPORT,
            Self::Name(_) => InfoCode::NAME,
            Self::Description(_) => InfoCode::DESCRIPTION,
            Self::BlockSize { .. } => InfoCode::BLOCK_SIZE,
            Self::Other(code, _) => *code,
        }
    }

    /// Parses the data.
    ///
    /// # Errors
    ///
    /// If a length or a string is invalid.
    pub fn parse(data: &'a [u8]) -> Result<Self, ParseError> {
        let mut reader = ByteReader(data);
        let info = match InfoCode(reader.u16()?) {
            InfoCode::EXPORT => {
                Self::Export { size_bytes: reader.u64()?, flags: TransmissionFlags(reader.u16()?) }
            }
            InfoCode::NAME => Self::Name(reader.text(reader.0.len())?),
            InfoCode::DESCRIPTION => Self::Description(reader.text(reader.0.len())?),
            InfoCode::BLOCK_SIZE => Self::BlockSize {
                minimum: reader.u32()?,
                preferred: reader.u32()?,
                maximum: reader.u32()?,
            },
            other => Self::Other(other, reader.bytes(reader.0.len())?),
        };
        reader.expect_end()?;
        Ok(info)
    }

    /// Appends the encoded data.
    pub fn emit(&self, out: &mut Vec<u8>) {
        out.extend(self.code().0.to_be_bytes());
        match self {
            Self::Export { size_bytes, flags } => {
                out.extend(size_bytes.to_be_bytes());
                out.extend(flags.0.to_be_bytes());
            }
            Self::Name(text) | Self::Description(text) => out.extend(text.as_bytes()),
            Self::BlockSize { minimum, preferred, maximum } => {
                [minimum, preferred, maximum]
                    .iter()
                    .for_each(|size| out.extend(size.to_be_bytes()));
            }
            Self::Other(_, bytes) => out.extend(*bytes),
        }
    }
}

/// Appends a complete reply to an option: its header, and what `data` appends.
pub fn emit_option_reply(
    option: OptionCode,
    kind: OptionReplyCode,
    out: &mut Vec<u8>,
    data: impl FnOnce(&mut Vec<u8>),
) {
    let begin = out.len();
    out.extend([0; OptionReply::BYTES]);
    data(out);
    let len_bytes = len_u32(out.len() - begin - OptionReply::BYTES);
    let header = OptionReply { option, kind, len_bytes }.to_bytes();
    out[begin..begin + OptionReply::BYTES].copy_from_slice(&header);
}

/// Appends the data of `NBD_REP_SERVER`: an export's name and details ("Option reply types").
pub fn emit_server_reply_data(name: &str, details: &str, out: &mut Vec<u8>) {
    append_text(name, out);
    out.extend(details.as_bytes());
}

/// Parses the data of `NBD_REP_SERVER`: name and details.
///
/// # Errors
///
/// If a length or a string is invalid.
pub fn parse_server_reply_data(data: &[u8]) -> Result<(&str, &str), ParseError> {
    let mut reader = ByteReader(data);
    let name = reader.take_length_prefixed_text()?;
    Ok((name, reader.text(reader.0.len())?))
}

/// Appends the data of `NBD_REP_META_CONTEXT` ("Option reply types").
pub fn emit_meta_context_reply_data(id: u32, name: &str, out: &mut Vec<u8>) {
    out.extend(id.to_be_bytes());
    out.extend(name.as_bytes());
}

/// Parses the data of `NBD_REP_META_CONTEXT`: context identifier and name.
///
/// # Errors
///
/// If a length or a string is invalid.
pub fn parse_meta_context_reply_data(data: &[u8]) -> Result<(u32, &str), ParseError> {
    let mut reader = ByteReader(data);
    let id = reader.u32()?;
    Ok((id, reader.text(reader.0.len())?))
}

fn append_text(text: &str, out: &mut Vec<u8>) {
    out.extend(len_u32(text.len()).to_be_bytes());
    out.extend(text.as_bytes());
}

/// Strings and lists are short: a length that does not fit is a bug of the caller.
fn len_u32(len: usize) -> u32 {
    u32::try_from(len).expect("the data of an option are short")
}

fn len_u16(len: usize) -> u16 {
    u16::try_from(len).expect("few things can be asked")
}
