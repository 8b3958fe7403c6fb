//! Options of a client before TLS: the greeting, and `NBD_OPT_STARTTLS` as the first option.

use tenmil_tls::CipherIo;
use tenmil_wire::nbd::option::emit_option_reply;
use tenmil_wire::nbd::{ClientFlags, OptionCode, OptionHeader, OptionReplyCode, ServerGreeting};

use super::negotiation::{DATA_BYTES_MAX, FLAGS, check_client_flags};
use crate::handshake::{Prelude, PreludeStep, Refusal, SocketIo};

/// Prelude of a connection to a server with TLS.
#[derive(Debug)]
pub(super) struct NbdPrelude {
    required: bool,
    state: PreludeState,
    flags: ClientFlags,
}

/// Next element expected from the client.
#[derive(Clone, Copy, Debug)]
enum PreludeState {
    Connected,
    ClientFlags,
    Option,
    /// Data of a refused option.
    Discard {
        option: OptionCode,
        left_bytes: usize,
    },
}

/// Bytes of the client's flags and of the header of an option.
const FLAGS_BYTES: usize = 4;
const OPTION_BYTES: usize = 16;

impl NbdPrelude {
    pub(super) const fn new(required: bool) -> Self {
        Self { required, state: PreludeState::Connected, flags: ClientFlags::NONE }
    }

    fn try_step(&mut self, io: &mut SocketIo) -> Result<Option<PreludeStep>, Refusal> {
        match self.state {
            PreludeState::Connected => {
                io.send(&ServerGreeting { flags: FLAGS }.to_bytes());
                self.state = PreludeState::ClientFlags;
            }
            PreludeState::ClientFlags => {
                // Together with the first option, so that a client without TLS finds both in place.
                let Some(bytes) = io.receive_at_least(FLAGS_BYTES + OPTION_BYTES)? else {
                    return Ok(Some(PreludeStep::Await));
                };
                let (flags, option) = bytes.split_at(FLAGS_BYTES);
                let flags = flags.iter().fold(0, |word, byte| word << 8 | u32::from(*byte));
                self.flags = check_client_flags(flags)
                    .ok_or_else(|| protocol_error("the client sets unknown flags"))?;
                let header = parse_header(&option[..OPTION_BYTES])?;
                if header.option != OptionCode::STARTTLS && !self.required {
                    return Ok(Some(PreludeStep::Plaintext));
                }
                io.consume(FLAGS_BYTES);
                self.state = PreludeState::Option;
            }
            PreludeState::Option => {
                let Some(bytes) = io.receive_at_least(OPTION_BYTES)? else {
                    return Ok(Some(PreludeStep::Await));
                };
                let OptionHeader { option, len_bytes } = parse_header(&bytes[..OPTION_BYTES])?;
                io.consume(OPTION_BYTES);
                if option == OptionCode::STARTTLS && len_bytes == 0 {
                    reply(io, option, OptionReplyCode::ACK, "");
                    return Ok(Some(PreludeStep::StartTls));
                }
                // This one has no error reply ("Option types", NBD_OPT_EXPORT_NAME).
                if option == OptionCode::EXPORT_NAME {
                    return Err(Refusal::Plaintext);
                }
                if len_bytes > DATA_BYTES_MAX {
                    return Err(protocol_error("an option before TLS is too long"));
                }
                self.state = PreludeState::Discard { option, left_bytes: len_bytes as usize };
            }
            PreludeState::Discard { option, left_bytes } => {
                let count = match left_bytes {
                    0 => 0,
                    _ => match io.receive_at_least(1)? {
                        Some(bytes) => bytes.len().min(left_bytes),
                        None => return Ok(Some(PreludeStep::Await)),
                    },
                };
                io.consume(count);
                let left_bytes = left_bytes - count;
                if left_bytes > 0 {
                    self.state = PreludeState::Discard { option, left_bytes };
                    return Ok(None);
                }
                if option == OptionCode::ABORT {
                    reply(io, option, OptionReplyCode::ACK, "");
                    return Err(Refusal::Closed);
                }
                let (code, text) = match option {
                    OptionCode::STARTTLS => (OptionReplyCode::ERR_INVALID, "expected no data"),
                    _ => (OptionReplyCode::ERR_TLS_REQD, "TLS has to be started first"),
                };
                reply(io, option, code, text);
                self.state = PreludeState::Option;
            }
        }
        Ok(None)
    }
}

impl Prelude for NbdPrelude {
    fn step(&mut self, io: &mut SocketIo) -> PreludeStep {
        loop {
            // A client that does not read the replies gets no more of them.
            if io.has_unsent() {
                return PreludeStep::Await;
            }
            match self.try_step(io) {
                Ok(None) => io.flush(),
                Ok(Some(step)) => return step,
                Err(why) => return PreludeStep::Refused(why),
            }
        }
    }

    fn received_flags(&self) -> u32 {
        self.flags.0
    }
}

fn parse_header(bytes: &[u8]) -> Result<OptionHeader, Refusal> {
    let bytes = bytes.try_into().map_err(|_| protocol_error("an option is too short"))?;
    OptionHeader::parse(bytes).map_err(|error| protocol_error(&error.to_string()))
}

fn protocol_error(what: &str) -> Refusal {
    Refusal::Protocol(format!("NBD negotiation: {what}"))
}

fn reply(io: &mut SocketIo, option: OptionCode, code: OptionReplyCode, text: &str) {
    let mut bytes = Vec::new();
    emit_option_reply(option, code, &mut bytes, |out| out.extend_from_slice(text.as_bytes()));
    io.send(&bytes);
}
