//! Tests of sessions in pairs, both ends here; foreign peers are in `tests/`.

mod client_hello;
mod handshake;
mod known_answers;
mod record_rules;
mod records;
mod streams;

use std::slice::from_ref;
use std::sync::Arc;

use tenmil_nvme_auth::{
    ConfiguredPsk, Derivation, Hash, IdentityVersion, KeyHash, SecretBytes, tls_psk,
};

use crate::cipher_io::{CipherIo, Received};
use crate::psk::Psk;
use crate::record_layer::Plaintext;
use crate::session::{ClientConfig, ServerConfig, TlsSession};

/// Encrypted bytes of one end, in memory.
#[derive(Debug, Default)]
pub(crate) struct Wire {
    pub(crate) inward: Vec<u8>,
    consumed: usize,
    pub(crate) outward: Vec<u8>,
    pub(crate) is_closed: bool,
    /// Largest number of bytes seen at a time.
    pub(crate) cut: Option<usize>,
}

impl CipherIo for Wire {
    fn received(&mut self) -> Received<'_> {
        let rest = &self.inward[self.consumed..];
        match rest.len().min(self.cut.unwrap_or(usize::MAX)) {
            0 if self.is_closed => Received::End,
            0 => Received::WouldBlock,
            count => Received::Bytes(&rest[..count]),
        }
    }

    fn consume(&mut self, count: usize) {
        self.consumed += count;
    }

    fn outgoing(&mut self) -> &mut Vec<u8> {
        &mut self.outward
    }
}

/// Both ends of a connection.
pub(crate) struct Pair {
    pub(crate) client: TlsSession,
    pub(crate) server: TlsSession,
    pub(crate) client_wire: Wire,
    pub(crate) server_wire: Wire,
}

impl Pair {
    pub(crate) fn new(client_keys: &[Psk], server_keys: &[Psk]) -> Self {
        let source = Arc::new(server_keys.to_vec());
        let server = ServerConfig::with_psks(source).unwrap();
        let client = ClientConfig::with_psks(client_keys.iter().cloned()).unwrap();
        Self {
            client: TlsSession::client(&client).unwrap(),
            server: TlsSession::server(&server).unwrap(),
            client_wire: Wire::default(),
            server_wire: Wire::default(),
        }
    }

    /// Delivers what both ends have sent.
    pub(crate) fn deliver(&mut self) {
        self.server_wire.inward.append(&mut self.client_wire.outward);
        self.client_wire.inward.append(&mut self.server_wire.outward);
    }

    /// Runs the handshake; returns the errors of client and server.
    pub(crate) fn handshake(
        &mut self,
    ) -> (Result<bool, crate::TlsError>, Result<bool, crate::TlsError>) {
        let mut results = (Ok(false), Ok(false));
        for _ in 0..8 {
            results.0 = self.client.handshake(&mut self.client_wire);
            self.deliver();
            results.1 = self.server.handshake(&mut self.server_wire);
            self.deliver();
        }
        results
    }

    pub(crate) fn open(key: &Psk) -> Self {
        let mut pair = Self::new(from_ref(key), from_ref(key));
        assert_eq!(pair.handshake(), (Ok(true), Ok(true)));
        pair
    }
}

/// Receives everything that is available.
pub(crate) fn receive_all(
    session: &mut TlsSession,
    wire: &mut Wire,
) -> Result<(Vec<u8>, Plaintext), crate::TlsError> {
    let (mut all, mut part) = (Vec::new(), vec![0; 100_000]);
    loop {
        match session.receive(wire, &mut part)? {
            Plaintext::Bytes(count) => all.extend_from_slice(&part[..count]),
            end => return Ok((all, end)),
        }
    }
}

pub(crate) fn key(hash: Hash, seed: u8, version: IdentityVersion, derivation: Derivation) -> Psk {
    let secret = SecretBytes::new(vec![seed; hash.len_bytes()]);
    let configured = ConfiguredPsk::generate(KeyHash::Transform(hash), secret).unwrap();
    let host = "nqn.2014-08.org.nvmexpress:uuid:3c6a0d4e-1111-2222-3333-444455556666";
    tls_psk(&configured, version, derivation, host, "nqn.2026-01.io.tenmil:test").unwrap().into()
}

/// Key with a version 1 identity and the specification's derivation.
pub(crate) fn usual_key(hash: Hash, seed: u8) -> Psk {
    key(hash, seed, IdentityVersion::One, Derivation::Specification)
}
