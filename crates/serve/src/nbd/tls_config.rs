//! Credentials of a server that speaks TLS.

use std::fmt;

use tenmil_base::Error;
use tenmil_nvme_auth::SecretBytes;

/// TLS of a server (`NBD_OPT_STARTTLS`). It needs the feature `tls`.
#[derive(Clone, Debug)]
pub struct NbdTls {
    /// By listener: whether clients must start TLS before any other option but `NBD_OPT_ABORT`. Other
    /// listeners accept plaintext, too.
    pub required: Vec<bool>,
    /// Certificate of the server.
    pub certificate: Option<NbdCertificate>,
    /// Pre-shared keys of clients.
    pub psks: Vec<NbdPsk>,
}

/// Certificate of a server.
#[derive(Clone)]
pub struct NbdCertificate {
    /// Certificate chain in PEM.
    pub chain_pem: Vec<u8>,
    /// Private key in PEM.
    pub key_pem: SecretBytes,
    /// Certificate authority in PEM; clients must have a certificate that it has signed.
    pub client_ca_pem: Option<Vec<u8>>,
}

/// Pre-shared key of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdPsk {
    /// Name that the client uses.
    pub identity: String,
    /// Key.
    pub secret: SecretBytes,
}

/// Shortest key: 128 bits (RFC 9257 §6).
const SECRET_BYTES_MIN: usize = 16;

impl NbdPsk {
    /// Parses a file as `psktool` of GnuTLS writes it: a line `IDENTITY:KEY` for each key, which is
    /// hexadecimal.
    ///
    /// # Errors
    ///
    /// If a line has another form. The error does not contain the line.
    pub fn parse_file(text: &str) -> Result<Vec<Self>, Error> {
        let mut keys = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let parsed = line.rsplit_once(':').and_then(|(identity, key)| {
                let secret = SecretBytes::new(parse_hex(key)?);
                let is_usable = secret.len() >= SECRET_BYTES_MIN && !identity.is_empty();
                is_usable.then(|| Self { identity: identity.to_owned(), secret })
            });
            let expected =
                "expected NAME:KEY with at least 32 hexadecimal digits, as psktool writes";
            keys.push(parsed.ok_or_else(|| Error::usage(format!("line {number}: {expected}")))?);
        }
        Ok(keys)
    }
}

fn parse_hex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes();
    if !digits.len().is_multiple_of(2) {
        return None;
    }
    let digit =
        |digit: u8| char::from(digit).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
    digits.chunks(2).map(|pair| Some(digit(pair[0])? << 4 | digit(pair[1])?)).collect()
}

impl fmt::Debug for NbdCertificate {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("NbdCertificate")
            .field("verifies_clients", &self.client_ca_pem.is_some())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::NbdPsk;

    #[test]
    fn key_file_has_a_line_for_each_client() {
        let text = "# comment\nalice:000102030405060708090a0b0c0d0e0f\n\n b:c:ABCDEF0102030405060708090a0b0c0d \n";
        let keys = NbdPsk::parse_file(text).unwrap();
        let found: Vec<_> = keys.iter().map(|key| (&*key.identity, key.secret.len())).collect();
        assert_eq!(found, [("alice", 16), ("b:c", 16)]);
        assert_eq!(keys[1].secret.expose()[..3], [0xab, 0xcd, 0xef]);
    }

    #[test]
    fn malformed_line_is_named_without_its_content() {
        for line in [
            "alice",
            "alice:",
            ":00",
            "alice:0011",
            "alice:zz0102030405060708090a0b0c0d0e0f",
            "alice:000",
        ] {
            let error = NbdPsk::parse_file(&format!("# keys\n{line}\n")).unwrap_err().text;
            assert!(error.starts_with("line 2: expected") && !error.contains("alice"), "{error}");
        }
    }
}
