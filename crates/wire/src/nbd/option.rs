//! What lies in the data of options and of their replies.

use super::handshake::{InfoCode, OptionCode, OptionReply, OptionReplyCode, TransmissionFlags};
use super::{Malformed, Reader};

/// The one metadata context that the protocol itself defines ("Metadata contexts").
pub const BASE_ALLOCATION: &str = "base:allocation";

/// The data of `NBD_OPT_INFO` and `NBD_OPT_GO`: an export, and what is asked about it.
#[derive(Clone, Copy, Debug)]
pub struct InfoQuery<'a> {
    /// The export.
    pub name: &'a str,
    infos: &'a [u8],
}

impl<'a> InfoQuery<'a> {
    /// What the data say.
    ///
    /// # Errors
    ///
    /// If a length or the name is not right.
    pub fn parse(data: &'a [u8]) -> Result<Self, Malformed> {
        let mut reader = Reader(data);
        let name = reader.text_u32()?;
        let count = usize::from(reader.u16()?);
        let infos = reader.bytes(count * 2)?;
        reader.end()?;
        Ok(Self { name, infos })
    }

    /// What is asked, in order.
    pub fn infos(&self) -> impl Iterator<Item = InfoCode> + 'a {
        let pairs = self.infos.chunks_exact(2);
        pairs.map(|pair| InfoCode(u16::from_be_bytes([pair[0], pair[1]])))
    }

    /// Appends the data that ask this.
    pub fn emit(name: &str, infos: &[InfoCode], out: &mut Vec<u8>) {
        put_text(name, out);
        out.extend(len_u16(infos.len()).to_be_bytes());
        infos.iter().for_each(|info| out.extend(info.0.to_be_bytes()));
    }
}

/// The data of `NBD_OPT_LIST_META_CONTEXT` and `NBD_OPT_SET_META_CONTEXT`: an export, and what
/// contexts are looked for.
#[derive(Clone, Copy, Debug)]
pub struct ContextQuery<'a> {
    /// The export.
    pub name: &'a str,
    /// How many queries there are.
    pub count: u32,
    queries: &'a [u8],
}

impl<'a> ContextQuery<'a> {
    /// What the data say.
    ///
    /// # Errors
    ///
    /// If a length, the name or a query is not right.
    pub fn parse(data: &'a [u8]) -> Result<Self, Malformed> {
        let mut reader = Reader(data);
        let name = reader.text_u32()?;
        let count = reader.u32()?;
        let queries = reader.0;
        for _ in 0..count {
            reader.text_u32()?;
        }
        reader.end()?;
        Ok(Self { name, count, queries })
    }

    /// The queries, in order.
    pub fn queries(&self) -> impl Iterator<Item = &'a str> {
        let mut reader = Reader(self.queries);
        core::iter::from_fn(move || reader.text_u32().ok())
    }

    /// Appends the data that ask this.
    pub fn emit(name: &str, queries: &[&str], out: &mut Vec<u8>) {
        put_text(name, out);
        out.extend(len_u32(queries.len()).to_be_bytes());
        queries.iter().for_each(|query| put_text(query, out));
    }
}

/// Whether a query finds `base:allocation`. When contexts are listed, the name of the namespace
/// alone finds all that is in it ("Option types", `NBD_OPT_LIST_META_CONTEXT`).
#[must_use]
pub fn finds_base_allocation(query: &str, lists: bool) -> bool {
    query == BASE_ALLOCATION || (lists && query == "base:")
}

/// The data of `NBD_REP_INFO`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Info<'a> {
    /// Size and flags.
    Export {
        /// Bytes.
        size_bytes: u64,
        /// What it can do.
        flags: TransmissionFlags,
    },
    /// What it is called.
    Name(&'a str),
    /// What it is.
    Description(&'a str),
    /// What requests are to be multiples of.
    BlockSize {
        /// Every offset and length is a multiple of it.
        minimum: u32,
        /// Best are multiples of this.
        preferred: u32,
        /// No payload is longer.
        maximum: u32,
    },
    /// Something else.
    Other(InfoCode, &'a [u8]),
}

impl<'a> Info<'a> {
    /// What it is about.
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

    /// What the data say.
    ///
    /// # Errors
    ///
    /// If a length or a string is not right.
    pub fn parse(data: &'a [u8]) -> Result<Self, Malformed> {
        let mut reader = Reader(data);
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
        reader.end()?;
        Ok(info)
    }

    /// Appends the data that say this.
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

/// Appends a whole reply to an option: its header, and what `data` appends.
pub fn emit_reply(
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

/// Appends the data of `NBD_REP_SERVER`: an export's name, and what it is ("Option reply types").
pub fn emit_server(name: &str, details: &str, out: &mut Vec<u8>) {
    put_text(name, out);
    out.extend(details.as_bytes());
}

/// What the data of `NBD_REP_SERVER` say: the name, and what it is.
///
/// # Errors
///
/// If a length or a string is not right.
pub fn parse_server(data: &[u8]) -> Result<(&str, &str), Malformed> {
    let mut reader = Reader(data);
    let name = reader.text_u32()?;
    Ok((name, reader.text(reader.0.len())?))
}

/// Appends the data of `NBD_REP_META_CONTEXT` ("Option reply types").
pub fn emit_context(id: u32, name: &str, out: &mut Vec<u8>) {
    out.extend(id.to_be_bytes());
    out.extend(name.as_bytes());
}

/// What the data of `NBD_REP_META_CONTEXT` say: the context's number and name.
///
/// # Errors
///
/// If a length or a string is not right.
pub fn parse_context(data: &[u8]) -> Result<(u32, &str), Malformed> {
    let mut reader = Reader(data);
    let id = reader.u32()?;
    Ok((id, reader.text(reader.0.len())?))
}

fn put_text(text: &str, out: &mut Vec<u8>) {
    out.extend(len_u32(text.len()).to_be_bytes());
    out.extend(text.as_bytes());
}

/// Strings are short, and lists of them too: a length that does not fit is our own mistake.
fn len_u32(len: usize) -> u32 {
    u32::try_from(len).expect("the data of an option are short")
}

fn len_u16(len: usize) -> u16 {
    u16::try_from(len).expect("few things can be asked")
}
