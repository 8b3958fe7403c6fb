//! ClientHello: selection of the key that a client has, before the library sees the message.
//!
//! The library compares identities, and accepts one key per identity only. Here each key with an
//! offered identity is tried against the binder of that identity (RFC 8446 §4.2.11.2). The library
//! checks the binder of the selected key again, so nothing is trusted for having passed here.
//!
//! ```text
//!  record  | 22 | version : 2 | length : 2 | …                       one or more
//!  message | 1 | length : 3 | version : 2 | random : 32 | session | suites | compression | extensions
//!  last extension   41: identities (2) { identity (2), age : 4 } …  binders (2) { binder (1) } …
//!                                                                  ^ end of what a binder covers
//! ```

use crate::error::TlsError;
use crate::psk::{Psk, PskSource};
use crate::suite::CipherSuite;
use ctutils::CtEq;

/// Largest ClientHello with its record headers. One with a key share of every usual group and several
/// identities has less than 4 KiB.
pub(crate) const CLIENT_HELLO_BYTES_MAX: usize = 16 << 10;

const RECORD_HANDSHAKE: u8 = 22;
const RECORD_HEADER_BYTES: usize = 5;
const MESSAGE_CLIENT_HELLO: u8 = 1;
const MESSAGE_HEADER_BYTES: usize = 4;
/// Extensions (RFC 8446 §4.2).
const EXTENSION_PRE_SHARED_KEY: u16 = 41;
const EXTENSION_EARLY_DATA: u16 = 42;
const EXTENSION_SUPPORTED_VERSIONS: u16 = 43;
const EXTENSION_PSK_KEY_EXCHANGE_MODES: u16 = 45;
const VERSION_TLS13: u16 = 0x0304;
const PSK_DHE_KE: u8 = 1;

/// Fields of a ClientHello that decide about its key.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ClientHello<'a> {
    suites: Vec<u16>,
    has_tls13: bool,
    has_psk_dhe_ke: bool,
    has_early_data: bool,
    identities: Vec<&'a [u8]>,
    binders: Vec<&'a [u8]>,
    /// Message up to the binders: what they cover.
    covered: &'a [u8],
}

/// Reassembles the message of the records in `received`. `None` if its end has not been received.
///
/// # Errors
///
/// If the bytes are not the records of a ClientHello, or too many.
pub(crate) fn reassemble(received: &[u8]) -> Result<Option<Vec<u8>>, TlsError> {
    let mut message = Vec::new();
    let mut rest = received;
    loop {
        match rest.first() {
            None => return check_length(received),
            Some(&RECORD_HANDSHAKE) => {}
            Some(&found) => return Err(TlsError::NotTls { first_byte: found }),
        }
        if rest.get(1).is_some_and(|major| *major != 3) {
            return Err(TlsError::MalformedClientHello("version of the record"));
        }
        let Some((header, body)) = rest.split_at_checked(RECORD_HEADER_BYTES) else {
            return check_length(received);
        };
        let len = usize::from(u16::from_be_bytes([header[3], header[4]]));
        if len == 0 || len > 1 << 14 {
            return Err(TlsError::MalformedClientHello("length of the record"));
        }
        message.extend_from_slice(&body[..len.min(body.len())]);
        if message.first().is_some_and(|kind| *kind != MESSAGE_CLIENT_HELLO) {
            return Err(TlsError::MalformedClientHello("type of the first message"));
        }
        if let [_, high, mid, low, ..] = message[..] {
            let len = u32::from_be_bytes([0, high, mid, low]) as usize + MESSAGE_HEADER_BYTES;
            if len > CLIENT_HELLO_BYTES_MAX {
                return Err(TlsError::MalformedClientHello("length of the message"));
            }
            if message.len() >= len {
                message.truncate(len);
                return Ok(Some(message));
            }
        }
        let Some(next) = body.get(len..) else { return check_length(received) };
        rest = next;
    }
}

fn check_length(received: &[u8]) -> Result<Option<Vec<u8>>, TlsError> {
    if received.len() < CLIENT_HELLO_BYTES_MAX {
        return Ok(None);
    }
    Err(TlsError::MalformedClientHello("length of its records"))
}

impl<'a> ClientHello<'a> {
    /// Parses a whole message with its header.
    pub(crate) fn parse(message: &'a [u8]) -> Result<Self, TlsError> {
        let malformed = TlsError::MalformedClientHello;
        let mut hello = Self::default();
        let mut at = Reader(message);
        at.take(MESSAGE_HEADER_BYTES + 2 + 32).ok_or(malformed("random"))?;
        at.vector_u8().ok_or(malformed("session identifier"))?;
        let mut suites = Reader(at.vector_u16().ok_or(malformed("cipher suites"))?);
        while let Some(suite) = suites.u16() {
            hello.suites.push(suite);
        }
        at.vector_u8().ok_or(malformed("compression methods"))?;
        if at.0.is_empty() {
            return Ok(hello);
        }
        let mut extensions = Reader(at.vector_u16().ok_or(malformed("extensions"))?);
        if !at.0.is_empty() {
            return Err(malformed("end"));
        }
        while !extensions.0.is_empty() {
            let kind = extensions.u16().ok_or(malformed("type of an extension"))?;
            let body = extensions.vector_u16().ok_or(malformed("length of an extension"))?;
            hello.parse_extension(kind, body).ok_or(malformed("extension"))?;
            if kind == EXTENSION_PRE_SHARED_KEY {
                if !extensions.0.is_empty() {
                    return Err(malformed("extension behind pre_shared_key"));
                }
                // The binders are the end of the message, behind their length.
                let binders: usize = hello.binders.iter().map(|binder| binder.len() + 1).sum();
                hello.covered = message.get(..message.len() - binders - 2).unwrap_or_default();
            }
        }
        Ok(hello)
    }

    fn parse_extension(&mut self, kind: u16, body: &'a [u8]) -> Option<()> {
        let mut body = Reader(body);
        match kind {
            EXTENSION_SUPPORTED_VERSIONS => {
                let mut versions = Reader(body.vector_u8()?);
                while let Some(version) = versions.u16() {
                    self.has_tls13 |= version == VERSION_TLS13;
                }
            }
            EXTENSION_PSK_KEY_EXCHANGE_MODES => {
                self.has_psk_dhe_ke = body.vector_u8()?.contains(&PSK_DHE_KE);
            }
            EXTENSION_EARLY_DATA => self.has_early_data = true,
            EXTENSION_PRE_SHARED_KEY => {
                let mut identities = Reader(body.vector_u16()?);
                while !identities.0.is_empty() {
                    self.identities.push(identities.vector_u16()?);
                    identities.take(4)?;
                }
                let mut binders = Reader(body.vector_u16()?);
                while !binders.0.is_empty() {
                    self.binders.push(binders.vector_u8()?);
                }
                let is_paired = self.identities.len() == self.binders.len();
                return (is_paired && body.0.is_empty() && !self.binders.is_empty()).then_some(());
            }
            _ => {}
        }
        Some(())
    }

    /// The same with other cipher suites, as if the client had signed it.
    #[cfg(test)]
    pub(crate) fn with_suites(self, suites: &[u16]) -> Self {
        Self { suites: suites.to_vec(), ..self }
    }

    /// Whether it offers pre-shared keys.
    pub(crate) fn offers_psk(&self) -> bool {
        !self.identities.is_empty()
    }

    /// Selects the first offered identity for which the client has one of the keys of `source` and
    /// offers its cipher suite.
    ///
    /// # Errors
    ///
    /// The reason why there is none.
    pub(crate) fn select_psk(&self, source: &dyn PskSource) -> Result<Psk, TlsError> {
        if !self.has_tls13 {
            return Err(TlsError::NoTls13);
        }
        if !self.offers_psk() {
            return Err(TlsError::NoPsk);
        }
        if !self.has_psk_dhe_ke {
            return Err(TlsError::NoPskDheKe);
        }
        if self.has_early_data {
            return Err(TlsError::EarlyData);
        }
        let mut wrong = None;
        let mut without_suite = None;
        for (identity, binder) in self.identities.iter().zip(&self.binders) {
            for psk in source.find_psks(identity) {
                if !is_binder_of(&psk, self.covered, binder) {
                    wrong.get_or_insert(*identity);
                } else if self.suites.contains(&CipherSuite::of_hash(psk.hash).id()) {
                    return Ok(psk);
                } else {
                    without_suite.get_or_insert(psk.hash);
                }
            }
        }
        if let Some(hash) = without_suite {
            let expected = CipherSuite::of_hash(hash);
            return Err(TlsError::NoCommonSuite { offered: self.suites.clone(), expected });
        }
        if let Some(identity) = wrong {
            return Err(TlsError::WrongKey { identity: identity.to_vec() });
        }
        let identities = self.identities.iter().map(|identity| identity.to_vec()).collect();
        Err(TlsError::UnknownIdentity { identities, searched: source.description() })
    }
}

/// Whether `binder` proves that the client has this key. Takes a time that does not depend on the key.
fn is_binder_of(psk: &Psk, covered: &[u8], binder: &[u8]) -> bool {
    let hash = psk.hash;
    let len = hash.len_bytes();
    // RFC 8446 §7.1 and §4.4.4: early secret, binder key, finished key, HMAC.
    let early_secret = hash.hmac(&[0; 64][..len], &[psk.secret.expose()]);
    let empty = hash.digest(&[]);
    let finished_key = hash
        .expand_label(early_secret.expose(), "ext binder", empty.expose(), len)
        .and_then(|binder_key| hash.expand_label(binder_key.expose(), "finished", &[], len));
    finished_key.is_some_and(|key| {
        let expected = hash.hmac(key.expose(), &[hash.digest(covered).expose()]);
        expected.expose().ct_eq(binder).to_bool()
    })
}

/// Unread part of a message.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take(2).map(|bytes| u16::from_be_bytes([bytes[0], bytes[1]]))
    }

    /// Bytes behind their length in one byte.
    fn vector_u8(&mut self) -> Option<&'a [u8]> {
        let len = self.take(1)?[0];
        self.take(usize::from(len))
    }

    /// Bytes behind their length in two bytes.
    fn vector_u16(&mut self) -> Option<&'a [u8]> {
        let len = self.u16()?;
        self.take(usize::from(len))
    }
}
