//! The handshake: options and their answers until the client has an export.

use base::Memory;
use dma::Regions;
use wire::nbd::handshake::{EXPORT_NAME_ZEROES, export_name_reply};
use wire::nbd::option::{
    BASE_ALLOCATION, ContextQuery, Info, InfoQuery, emit_context, emit_reply, emit_server,
    finds_base_allocation,
};
use wire::nbd::{
    ClientFlags, HandshakeFlags, InfoCode, Malformed, OptionCode, OptionHeader, OptionReplyCode,
    PAYLOAD_BYTES_MAX,
};

use super::export::Export;
use super::inbox::Inbox;

/// What was agreed on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Terms {
    /// Reads are answered by chunks.
    pub(super) structured: bool,
    /// The client may ask what is where.
    pub(super) allocation: bool,
}

/// A handshake that goes on.
#[derive(Debug)]
pub(super) struct Haggling {
    awaits: Awaits,
    no_zeroes: bool,
    terms: Terms,
}

/// What comes next from the client.
#[derive(Clone, Copy, Debug)]
enum Awaits {
    ClientFlags,
    Option,
    Data(OptionHeader),
    /// The data of an option that are too long to be looked at.
    TooMuch {
        option: OptionCode,
        left_bytes: u32,
    },
}

/// What a step came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Haggled {
    /// More has to be received first.
    Nothing,
    /// An option was answered, or something was put aside.
    Step,
    /// The client has its export.
    Agreed(Terms),
    /// This ends when the answer has been sent.
    Over,
}

/// What this server says of itself.
pub(super) const FLAGS: HandshakeFlags =
    HandshakeFlags::FIXED_NEWSTYLE.and(HandshakeFlags::NO_ZEROES);

/// The number of the one context there is.
pub(super) const ALLOCATION: u32 = 1;

/// Longer data of an option are not looked at: two strings of any length and some more fit.
const DATA_BYTES_MAX: u32 = 32 << 10;

impl Haggling {
    pub(super) fn new() -> Self {
        Self { awaits: Awaits::ClientFlags, no_zeroes: false, terms: Terms::default() }
    }

    /// Takes one thing from `inbox` and appends its answer to `out`.
    pub(super) fn step(
        &mut self,
        inbox: &mut Inbox,
        regions: &Regions,
        export: &Export,
        out: &mut Vec<u8>,
    ) -> Haggled {
        match self.awaits {
            Awaits::ClientFlags => self.client_flags(inbox, regions),
            Awaits::Option => self.option(inbox, regions),
            Awaits::Data(header) => {
                if inbox.len() < header.len_bytes {
                    return Haggled::Nothing;
                }
                let segment = inbox.take(header.len_bytes);
                let mut data = vec![0; segment.len_bytes as usize];
                if regions.load(segment, &mut data).is_err() {
                    return Haggled::Over;
                }
                self.awaits = Awaits::Option;
                self.answer(header.option, &data, export, out)
            }
            Awaits::TooMuch { option, left_bytes } => {
                let taken = inbox.take(left_bytes).len_bytes;
                let left_bytes = left_bytes - taken;
                if left_bytes > 0 {
                    self.awaits = Awaits::TooMuch { option, left_bytes };
                    return if taken > 0 { Haggled::Step } else { Haggled::Nothing };
                }
                self.awaits = Awaits::Option;
                let text = format!("its data are longer than {DATA_BYTES_MAX} bytes");
                refuse(option, OptionReplyCode::ERR_TOO_BIG, &text, out);
                Haggled::Step
            }
        }
    }

    fn client_flags(&mut self, inbox: &mut Inbox, regions: &Regions) -> Haggled {
        let Some(bytes) = inbox.peek::<4>(regions) else { return Haggled::Nothing };
        inbox.take(4);
        let flags = ClientFlags(u32::from_be_bytes(bytes));
        let known = ClientFlags::FIXED_NEWSTYLE.and(ClientFlags::NO_ZEROES);
        // "Client flags": the connection of whoever sets others must be dropped.
        if flags.without(known) != ClientFlags::NONE {
            return Haggled::Over;
        }
        self.no_zeroes = flags.has(ClientFlags::NO_ZEROES);
        self.awaits = Awaits::Option;
        Haggled::Step
    }

    fn option(&mut self, inbox: &mut Inbox, regions: &Regions) -> Haggled {
        let Some(bytes) = inbox.peek(regions) else { return Haggled::Nothing };
        inbox.take(u32::try_from(bytes.len()).unwrap_or(0));
        // Without the magic number nobody knows where the next option begins.
        let Ok(header) = OptionHeader::parse(&bytes) else { return Haggled::Over };
        let OptionHeader { option, len_bytes } = header;
        if len_bytes > PAYLOAD_BYTES_MAX {
            return Haggled::Over;
        }
        self.awaits = if len_bytes <= DATA_BYTES_MAX {
            Awaits::Data(header)
        } else if option == OptionCode::EXPORT_NAME {
            return Haggled::Over;
        } else {
            Awaits::TooMuch { option, left_bytes: len_bytes }
        };
        Haggled::Step
    }

    fn answer(
        &mut self,
        option: OptionCode,
        data: &[u8],
        export: &Export,
        out: &mut Vec<u8>,
    ) -> Haggled {
        let takes_nothing = matches!(
            option,
            OptionCode::LIST | OptionCode::STARTTLS | OptionCode::STRUCTURED_REPLY
        );
        if takes_nothing && !data.is_empty() {
            let text = format!("its data are {} bytes, expected none", data.len());
            refuse(option, OptionReplyCode::ERR_INVALID, &text, out);
            return Haggled::Step;
        }
        match option {
            OptionCode::EXPORT_NAME => self.export_name(data, export, out),
            OptionCode::ABORT => {
                acknowledge(option, out);
                Haggled::Over
            }
            OptionCode::LIST => {
                emit_reply(option, OptionReplyCode::SERVER, out, |out| {
                    emit_server(export.name(), export.description(), out);
                });
                acknowledge(option, out);
                Haggled::Step
            }
            OptionCode::INFO | OptionCode::GO => self.info(option, data, export, out),
            OptionCode::STRUCTURED_REPLY => {
                self.terms.structured = true;
                acknowledge(option, out);
                Haggled::Step
            }
            OptionCode::LIST_META_CONTEXT | OptionCode::SET_META_CONTEXT => {
                self.contexts(option, data, export, out);
                Haggled::Step
            }
            _ => {
                refuse(option, OptionReplyCode::ERR_UNSUP, "it is not known here", out);
                Haggled::Step
            }
        }
    }

    fn export_name(&self, data: &[u8], export: &Export, out: &mut Vec<u8>) -> Haggled {
        // There is no way to refuse ("Option types", NBD_OPT_EXPORT_NAME).
        if !core::str::from_utf8(data).is_ok_and(|name| export.is_called(name)) {
            return Haggled::Over;
        }
        out.extend(export_name_reply(export.size_bytes(), export.flags(self.terms.structured)));
        if !self.no_zeroes {
            out.extend([0; EXPORT_NAME_ZEROES]);
        }
        Haggled::Agreed(self.terms)
    }

    fn info(&self, option: OptionCode, data: &[u8], export: &Export, out: &mut Vec<u8>) -> Haggled {
        let query = match InfoQuery::parse(data) {
            Ok(query) if export.is_called(query.name) => query,
            Ok(query) => {
                unknown(option, query.name, export, out);
                return Haggled::Step;
            }
            Err(why) => {
                invalid(option, why, out);
                return Haggled::Step;
            }
        };
        let mut tell = |info: Info<'_>| {
            emit_reply(option, OptionReplyCode::INFO, out, |out| info.emit(out));
        };
        let flags = export.flags(self.terms.structured);
        tell(Info::Export { size_bytes: export.size_bytes(), flags });
        tell(Info::BlockSize {
            minimum: export.block_size(),
            preferred: export.preferred_bytes(),
            maximum: export.payload_bytes_max(),
        });
        let asks = |code| query.infos().any(|info| info == code);
        if asks(InfoCode::NAME) {
            tell(Info::Name(export.name()));
        }
        if asks(InfoCode::DESCRIPTION) {
            tell(Info::Description(export.description()));
        }
        acknowledge(option, out);
        if option == OptionCode::GO { Haggled::Agreed(self.terms) } else { Haggled::Step }
    }

    fn contexts(&mut self, option: OptionCode, data: &[u8], export: &Export, out: &mut Vec<u8>) {
        let lists = option == OptionCode::LIST_META_CONTEXT;
        if !lists {
            // Whatever comes of it, what was chosen before is no longer.
            self.terms.allocation = false;
        }
        let query = match ContextQuery::parse(data) {
            Ok(query) if export.is_called(query.name) => query,
            Ok(query) => return unknown(option, query.name, export, out),
            Err(why) => return invalid(option, why, out),
        };
        if !self.terms.structured {
            let text = "structured replies have to be agreed on first";
            return refuse(option, OptionReplyCode::ERR_INVALID, text, out);
        }
        let asked = query.queries().any(|query| finds_base_allocation(query, lists));
        if asked || (lists && query.count == 0) {
            let id = if lists { 0 } else { ALLOCATION };
            self.terms.allocation |= !lists;
            emit_reply(option, OptionReplyCode::META_CONTEXT, out, |out| {
                emit_context(id, BASE_ALLOCATION, out);
            });
        }
        acknowledge(option, out);
    }
}

fn acknowledge(option: OptionCode, out: &mut Vec<u8>) {
    emit_reply(option, OptionReplyCode::ACK, out, |_| {});
}

fn refuse(option: OptionCode, kind: OptionReplyCode, why: &str, out: &mut Vec<u8>) {
    emit_reply(option, kind, out, |out| out.extend(format!("{option}: {why}").into_bytes()));
}

fn invalid(option: OptionCode, why: Malformed, out: &mut Vec<u8>) {
    refuse(option, OptionReplyCode::ERR_INVALID, &why.to_string(), out);
}

fn unknown(option: OptionCode, name: &str, export: &Export, out: &mut Vec<u8>) {
    let short = |name: &str| name.chars().take(200).collect::<String>();
    let (found, expected) = (short(name), short(export.name()));
    let text = format!("no export `{found}`, expected `{expected}` or none");
    refuse(option, OptionReplyCode::ERR_UNKNOWN, &text, out);
}
