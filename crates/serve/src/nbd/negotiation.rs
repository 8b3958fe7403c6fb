//! NBD negotiation: options and replies until the client has selected an export.

use std::sync::Arc;

use tenmil_base::Memory;
use tenmil_dma::RegionTable;
use tenmil_wire::nbd::handshake::{EXPORT_NAME_ZEROES, export_name_reply};
use tenmil_wire::nbd::option::{
    BASE_ALLOCATION, InfoOption, InfoReply, MetaContextOption, emit_meta_context_reply_data,
    emit_option_reply, emit_server_reply_data, selects_base_allocation,
};
use tenmil_wire::nbd::{
    ClientFlags, HandshakeFlags, InfoCode, OptionCode, OptionHeader, OptionReplyCode,
    PAYLOAD_BYTES_MAX, ParseError,
};

use super::export::Export;
use super::export_set::find_export;
use super::receive_buffer::ReceiveBuffer;

/// Result of the negotiation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct NegotiatedOptions {
    /// Whether structured replies were negotiated.
    pub(super) structured: bool,
    /// Whether the client may request block status (`base:allocation`).
    pub(super) allocation: bool,
}

/// State of the negotiation.
#[derive(Debug)]
pub(super) struct Negotiation {
    awaits: NegotiationState,
    no_zeroes: bool,
    options: NegotiatedOptions,
    start_tls: StartTls,
}

/// What a client is told that wants to start TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StartTls {
    /// The server has no TLS.
    Unsupported,
    /// TLS is started by the first option only.
    #[cfg(feature = "tls")]
    OnlyFirst,
    /// TLS has been started.
    #[cfg(feature = "tls")]
    Started,
}

/// Next element expected from the client.
#[derive(Clone, Copy, Debug)]
enum NegotiationState {
    ClientFlags,
    Option,
    Data(OptionHeader),
    /// Oversized option data, being skipped.
    DiscardOption {
        option: OptionCode,
        left_bytes: u32,
    },
}

/// Result of one negotiation step.
#[derive(Clone, Debug)]
pub(super) enum NegotiationStep {
    /// More bytes must be received first.
    Nothing,
    /// An option was replied to or a part of the input was consumed.
    Step,
    /// The client has selected this export.
    Selected(NegotiatedOptions, Arc<Export>),
    /// The connection closes once the reply has been sent.
    Abort,
}

/// Handshake flags of this server.
pub(super) const FLAGS: HandshakeFlags =
    HandshakeFlags::FIXED_NEWSTYLE.union(HandshakeFlags::NO_ZEROES);

/// Id of the only metadata context, `base:allocation`.
pub(super) const ALLOCATION: u32 = 1;

/// Longest list of exports, without the header of its last entry and the acknowledgment.
const LIST_BYTES_MAX: usize = (super::connection_memory::REPLIES_BYTES - 1024) as usize;

/// Longest option data that is parsed; two strings of the longest size and more fit.
pub(super) const DATA_BYTES_MAX: u32 = 32 << 10;

impl Negotiation {
    pub(super) fn new() -> Self {
        Self {
            awaits: NegotiationState::ClientFlags,
            no_zeroes: false,
            options: NegotiatedOptions::default(),
            start_tls: StartTls::Unsupported,
        }
    }

    /// Negotiation of a client whose first option is another one than TLS, on a server that has it.
    #[cfg(feature = "tls")]
    pub(super) fn without_tls() -> Self {
        Self { start_tls: StartTls::OnlyFirst, ..Self::new() }
    }

    /// Negotiation of a client that has sent its flags and started TLS.
    #[cfg(feature = "tls")]
    pub(super) fn after_start_tls(flags: ClientFlags) -> Self {
        Self {
            awaits: NegotiationState::Option,
            no_zeroes: flags.has(ClientFlags::NO_ZEROES),
            start_tls: StartTls::Started,
            ..Self::new()
        }
    }

    /// Consumes one item of `inbox` and appends the reply to `out`.
    pub(super) fn step(
        &mut self,
        inbox: &mut ReceiveBuffer,
        regions: &RegionTable,
        exports: &[Arc<Export>],
        out: &mut Vec<u8>,
    ) -> NegotiationStep {
        match self.awaits {
            NegotiationState::ClientFlags => self.handle_client_flags(inbox, regions),
            NegotiationState::Option => self.handle_option(inbox, regions),
            NegotiationState::Data(header) => {
                if inbox.unparsed_bytes() < header.len_bytes {
                    return NegotiationStep::Nothing;
                }
                let segment = inbox.consume(header.len_bytes);
                let mut data = vec![0; segment.len_bytes as usize];
                if regions.load(segment, &mut data).is_err() {
                    return NegotiationStep::Abort;
                }
                self.awaits = NegotiationState::Option;
                self.reply_to_option(header.option, &data, exports, out)
            }
            NegotiationState::DiscardOption { option, left_bytes } => {
                let taken = inbox.consume(left_bytes).len_bytes;
                let left_bytes = left_bytes - taken;
                if left_bytes > 0 {
                    self.awaits = NegotiationState::DiscardOption { option, left_bytes };
                    return if taken > 0 {
                        NegotiationStep::Step
                    } else {
                        NegotiationStep::Nothing
                    };
                }
                self.awaits = NegotiationState::Option;
                let text = format!("its data are longer than {DATA_BYTES_MAX} bytes");
                write_option_error(option, OptionReplyCode::ERR_TOO_BIG, &text, out);
                NegotiationStep::Step
            }
        }
    }

    fn handle_client_flags(
        &mut self,
        inbox: &mut ReceiveBuffer,
        regions: &RegionTable,
    ) -> NegotiationStep {
        let Some(bytes) = inbox.peek::<4>(regions) else { return NegotiationStep::Nothing };
        inbox.consume(4);
        let Some(flags) = check_client_flags(u32::from_be_bytes(bytes)) else {
            return NegotiationStep::Abort;
        };
        self.no_zeroes = flags.has(ClientFlags::NO_ZEROES);
        self.awaits = NegotiationState::Option;
        NegotiationStep::Step
    }

    fn handle_option(
        &mut self,
        inbox: &mut ReceiveBuffer,
        regions: &RegionTable,
    ) -> NegotiationStep {
        let Some(bytes) = inbox.peek(regions) else { return NegotiationStep::Nothing };
        inbox.consume(u32::try_from(bytes.len()).unwrap_or(0));
        // Without the magic number the start of the next option is unknown.
        let Ok(header) = OptionHeader::parse(&bytes) else { return NegotiationStep::Abort };
        let OptionHeader { option, len_bytes } = header;
        if len_bytes > PAYLOAD_BYTES_MAX {
            return NegotiationStep::Abort;
        }
        self.awaits = if len_bytes <= DATA_BYTES_MAX {
            NegotiationState::Data(header)
        } else if option == OptionCode::EXPORT_NAME {
            return NegotiationStep::Abort;
        } else {
            NegotiationState::DiscardOption { option, left_bytes: len_bytes }
        };
        NegotiationStep::Step
    }

    fn reply_to_option(
        &mut self,
        option: OptionCode,
        data: &[u8],
        exports: &[Arc<Export>],
        out: &mut Vec<u8>,
    ) -> NegotiationStep {
        // Data of an option without data are an error and are not ignored ("Option types").
        let takes_nothing = matches!(
            option,
            OptionCode::LIST | OptionCode::STARTTLS | OptionCode::STRUCTURED_REPLY
        );
        if takes_nothing && !data.is_empty() {
            let text = format!("its data are {} bytes, expected none", data.len());
            write_option_error(option, OptionReplyCode::ERR_INVALID, &text, out);
            return NegotiationStep::Step;
        }
        match option {
            OptionCode::EXPORT_NAME => self.handle_export_name(data, exports, out),
            OptionCode::ABORT => {
                write_ack(option, out);
                NegotiationStep::Abort
            }
            OptionCode::LIST => {
                write_list(exports, out);
                write_ack(option, out);
                NegotiationStep::Step
            }
            OptionCode::INFO | OptionCode::GO => self.handle_info(option, data, exports, out),
            OptionCode::STRUCTURED_REPLY => {
                self.options.structured = true;
                write_ack(option, out);
                NegotiationStep::Step
            }
            OptionCode::LIST_META_CONTEXT | OptionCode::SET_META_CONTEXT => {
                self.handle_meta_context(option, data, exports, out);
                NegotiationStep::Step
            }
            OptionCode::STARTTLS => {
                let (code, text) = match self.start_tls {
                    StartTls::Unsupported => (OptionReplyCode::ERR_UNSUP, "it is not offered here"),
                    #[cfg(feature = "tls")]
                    StartTls::Started => (OptionReplyCode::ERR_INVALID, "TLS has been started"),
                    #[cfg(feature = "tls")]
                    StartTls::OnlyFirst => {
                        (OptionReplyCode::ERR_POLICY, "it has to be the first option")
                    }
                };
                write_option_error(option, code, text, out);
                NegotiationStep::Step
            }
            _ => {
                write_option_error(option, OptionReplyCode::ERR_UNSUP, "it is not known here", out);
                NegotiationStep::Step
            }
        }
    }

    fn handle_export_name(
        &self,
        data: &[u8],
        exports: &[Arc<Export>],
        out: &mut Vec<u8>,
    ) -> NegotiationStep {
        // The option has no error reply ("Option types", NBD_OPT_EXPORT_NAME).
        let name = core::str::from_utf8(data).ok();
        let Some(export) = name.and_then(|name| find_export(exports, name)) else {
            return NegotiationStep::Abort;
        };
        out.extend(export_name_reply(
            export.size_bytes(),
            export.transmission_flags(self.options.structured),
        ));
        if !self.no_zeroes {
            out.extend([0; EXPORT_NAME_ZEROES]);
        }
        NegotiationStep::Selected(self.options, Arc::clone(export))
    }

    fn handle_info(
        &self,
        option: OptionCode,
        data: &[u8],
        exports: &[Arc<Export>],
        out: &mut Vec<u8>,
    ) -> NegotiationStep {
        let query = match InfoOption::parse(data) {
            Ok(query) => query,
            Err(why) => {
                write_invalid_option(option, why, out);
                return NegotiationStep::Step;
            }
        };
        let Some(export) = find_export(exports, query.name) else {
            write_unknown_export(option, query.name, exports, out);
            return NegotiationStep::Step;
        };
        let mut event_sender = |info: InfoReply<'_>| {
            emit_option_reply(option, OptionReplyCode::INFO, out, |out| info.emit(out));
        };
        // These two are sent without a request: the first is mandatory, and a client that does not
        // know the block sizes may send requests that do not fit ("Option types", NBD_OPT_INFO).
        let flags = export.transmission_flags(self.options.structured);
        event_sender(InfoReply::Export { size_bytes: export.size_bytes(), flags });
        event_sender(InfoReply::BlockSize {
            minimum: export.block_size(),
            preferred: export.preferred_bytes(),
            maximum: export.payload_bytes_max(),
        });
        let asks = |code| query.infos().any(|info| info == code);
        if asks(InfoCode::NAME) {
            event_sender(InfoReply::Name(export.name()));
        }
        if asks(InfoCode::DESCRIPTION) {
            event_sender(InfoReply::Description(export.description()));
        }
        write_ack(option, out);
        if option == OptionCode::GO {
            NegotiationStep::Selected(self.options, Arc::clone(export))
        } else {
            NegotiationStep::Step
        }
    }

    fn handle_meta_context(
        &mut self,
        option: OptionCode,
        data: &[u8],
        exports: &[Arc<Export>],
        out: &mut Vec<u8>,
    ) {
        let lists = option == OptionCode::LIST_META_CONTEXT;
        if !lists {
            // Even a failed request clears the contexts that were selected before.
            self.options.allocation = false;
        }
        let query = match MetaContextOption::parse(data) {
            Ok(query) if find_export(exports, query.name).is_some() => query,
            Ok(query) => return write_unknown_export(option, query.name, exports, out),
            Err(why) => return write_invalid_option(option, why, out),
        };
        if !self.options.structured {
            let text = "structured replies have to be agreed on first";
            return write_option_error(option, OptionReplyCode::ERR_INVALID, text, out);
        }
        let asked = query.queries().any(|query| selects_base_allocation(query, lists));
        if asked || (lists && query.count == 0) {
            let id = if lists { 0 } else { ALLOCATION };
            self.options.allocation |= !lists;
            emit_option_reply(option, OptionReplyCode::META_CONTEXT, out, |out| {
                emit_meta_context_reply_data(id, BASE_ALLOCATION, out);
            });
        }
        write_ack(option, out);
    }
}

/// Flags of a client. `None`: a client that sets unknown flags must be disconnected ("Client flags").
pub(super) fn check_client_flags(flags: u32) -> Option<ClientFlags> {
    let known = ClientFlags::FIXED_NEWSTYLE.union(ClientFlags::NO_ZEROES);
    let flags = ClientFlags(flags);
    (flags.without(known) == ClientFlags::NONE).then_some(flags)
}

fn write_ack(option: OptionCode, out: &mut Vec<u8>) {
    emit_option_reply(option, OptionReplyCode::ACK, out, |_| {});
}

/// Lists the exports, as many as the buffer of the replies holds; the others can be selected all the same.
fn write_list(exports: &[Arc<Export>], out: &mut Vec<u8>) {
    for export in exports {
        let (name, mut description) = (export.name(), export.description());
        if out.len() + name.len() + description.len() > LIST_BYTES_MAX {
            description = "";
        }
        if out.len() + name.len() > LIST_BYTES_MAX {
            return;
        }
        emit_option_reply(OptionCode::LIST, OptionReplyCode::SERVER, out, |out| {
            emit_server_reply_data(name, description, out);
        });
    }
}

fn write_option_error(option: OptionCode, kind: OptionReplyCode, why: &str, out: &mut Vec<u8>) {
    emit_option_reply(option, kind, out, |out| out.extend(format!("{option}: {why}").into_bytes()));
}

fn write_invalid_option(option: OptionCode, why: ParseError, out: &mut Vec<u8>) {
    write_option_error(option, OptionReplyCode::ERR_INVALID, &why.to_string(), out);
}

fn write_unknown_export(
    option: OptionCode,
    name: &str,
    exports: &[Arc<Export>],
    out: &mut Vec<u8>,
) {
    let short = |name: &str| name.chars().take(200).collect::<String>();
    let found = short(name);
    let expected = match exports {
        [] => "one that exists: there is none now".to_owned(),
        [only] => format!("`{}` or none", short(only.name())),
        [first, others @ ..] => {
            format!(
                "`{}` or one of {} others, which NBD_OPT_LIST lists",
                short(first.name()),
                others.len()
            )
        }
    };
    let text = format!("no export `{found}`, expected {expected}");
    write_option_error(option, OptionReplyCode::ERR_UNKNOWN, &text, out);
}
