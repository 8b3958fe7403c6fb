//! Secrets of a handshake, as the library serializes them (`s2n_connection_serialize`, version 1).
//!
//! ```text
//!  | 1 : 8 | 3 4 | cipher suite : 2 | sequence numbers of client and server : 8 each |
//!  | largest fragment : 2 | secrets of client and server | resumption secret |
//! ```

use tenmil_nvme_auth::SecretBytes;

use crate::key_schedule::TrafficSecret;
use crate::record::CONTENT_BYTES_MAX;
use crate::suite::CipherSuite;

/// State of both directions at the end of a handshake.
#[derive(Debug)]
pub(crate) struct Handover {
    pub(crate) client: Direction,
    pub(crate) server: Direction,
    /// Largest content of a record that the peer accepts.
    pub(crate) content_bytes_max: usize,
}

/// State of one direction.
#[derive(Debug)]
pub(crate) struct Direction {
    pub(crate) secret: TrafficSecret,
    /// Sequence number of the next record.
    pub(crate) sequence: u64,
}

const FORMAT_VERSION: u64 = 1;
const TLS13: [u8; 2] = [3, 4];
/// Smallest limit of a fragment that can be negotiated (RFC 6066 §4).
const CONTENT_BYTES_MIN: usize = 512;

impl Handover {
    /// `None` if this is not the state of a TLS 1.3 connection with one of the cipher suites.
    pub(crate) fn parse(serialized: &SecretBytes) -> Option<Self> {
        let mut rest = serialized.expose();
        if u64::from_be_bytes(take(&mut rest)?) != FORMAT_VERSION || take(&mut rest) != Some(TLS13)
        {
            return None;
        }
        let suite = CipherSuite::from_id(u16::from_be_bytes(take(&mut rest)?))?;
        let client_sequence = u64::from_be_bytes(take(&mut rest)?);
        let server_sequence = u64::from_be_bytes(take(&mut rest)?);
        let fragment_max = usize::from(u16::from_be_bytes(take(&mut rest)?));
        let secrets = rest;
        let len = suite.hash().len_bytes();
        if secrets.len() != 3 * len || fragment_max < CONTENT_BYTES_MIN {
            return None;
        }
        let direction = |index: usize, sequence| {
            let secret = SecretBytes::new(secrets[index * len..][..len].to_vec());
            Some(Direction { secret: TrafficSecret::new(suite, secret)?, sequence })
        };
        Some(Self {
            client: direction(0, client_sequence)?,
            server: direction(1, server_sequence)?,
            content_bytes_max: fragment_max.min(CONTENT_BYTES_MAX),
        })
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (taken, behind) = rest.split_first_chunk()?;
    *rest = behind;
    Some(*taken)
}

#[cfg(test)]
mod tests {
    use tenmil_nvme_auth::SecretBytes;

    use super::Handover;

    fn serialized() -> Vec<u8> {
        let mut bytes = vec![0, 0, 0, 0, 0, 0, 0, 1, 3, 4, 0x13, 0x01];
        bytes.extend(5_u64.to_be_bytes());
        bytes.extend(6_u64.to_be_bytes());
        bytes.extend([0x40, 0]);
        bytes.extend([[1; 32], [2; 32], [3; 32]].concat());
        bytes
    }

    #[test]
    fn state_of_another_version_suite_or_length_is_refused() {
        let parse = |bytes: Vec<u8>| Handover::parse(&SecretBytes::new(bytes));
        let handover = parse(serialized()).unwrap();
        assert_eq!((handover.client.sequence, handover.server.sequence), (5, 6));
        assert_eq!(handover.content_bytes_max, 1 << 14);
        for len in 0..serialized().len() {
            assert!(parse(serialized()[..len].to_vec()).is_none(), "{len}");
        }
        assert!(parse([&serialized()[..], &[0]].concat()).is_none());
        for at in 0..12 {
            let mut changed = serialized();
            changed[at] ^= 0x40;
            assert!(parse(changed).is_none(), "{at}");
        }
        // The other suite has longer secrets.
        let mut changed = serialized();
        changed[11] = 2;
        assert!(parse(changed).is_none());
    }
}
