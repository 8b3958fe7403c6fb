//! Header and data digests: CRC32C (§3.3.1.1).

use crc_fast::{CrcAlgorithm, Digest};

/// Digest of contiguous bytes.
#[inline]
#[must_use]
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// Digest of bytes that arrive in pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crc32c {
    state: u64,
}

impl Default for Crc32c {
    fn default() -> Self {
        Self::new()
    }
}

impl Crc32c {
    /// Creates the digest of no bytes.
    #[must_use]
    pub const fn new() -> Self {
        Self { state: 0xffff_ffff }
    }

    /// Adds the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, self.state);
        digest.update(bytes);
        self.state = digest.get_state();
    }

    /// Digest of all bytes added.
    #[must_use]
    pub const fn value(self) -> u32 {
        let [a, b, c, d, ..] = self.state.to_le_bytes();
        !u32::from_le_bytes([a, b, c, d])
    }
}

#[cfg(test)]
mod tests {
    use super::{Crc32c, crc32c};

    /// Examples of RFC 3720, appendix B.4, which uses the same polynomial.
    #[test]
    fn crc32c_of_the_standard_examples() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        let counting: Vec<u8> = (0..32).collect();
        assert_eq!(crc32c(&counting), 0x46dd_794e);
    }

    #[test]
    fn crc32c_of_pieces_equals_crc32c_of_the_whole() {
        let bytes: Vec<u8> = (0..=255_u8).cycle().take(700).collect();
        for cut in [0, 1, 3, 31, 32, 64, 255, 256, 512, 699, 700] {
            let mut pieces = Crc32c::new();
            pieces.update(&bytes[..cut]);
            pieces.update(&[]);
            pieces.update(&bytes[cut..]);
            assert_eq!(pieces.value(), crc32c(&bytes), "cut at {cut}");
        }
        assert_eq!(Crc32c::new().value(), crc32c(&[]));
    }
}
