//! CRC-32C, the checksum of NVMe/TCP digests and of all metadata of pools, volumes and mirrors.
//!
//! | processor | how | bytes per cycle at 4 KiB |
//! |---|---|---|
//! | x86-64 with AVX-512 and VPCLMULQDQ | folds of 256 bytes by carry-less multiplication | 25 |
//! | x86-64 with AVX2 and VPCLMULQDQ | folds of 128 bytes | 13 |
//! | x86-64 with SSE 4.2 and PCLMULQDQ | three streams of the instruction `crc32` | 11 |
//! | AArch64 with CRC | the instruction `crc32cx` | not measured |
//! | any | tables of 8 KiB | 0.9 |
//!
//! All four were measured on one AMD EPYC with AVX-512, in cycles of its time stamp counter. Buffers below 256 bytes,
//! such as headers of PDUs, are computed by the instruction alone. A crate for every CRC has more than half a megabyte of
//! tables for processors without these instructions, which the linker cannot leave out.

#![deny(missing_docs)]

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod powers;
mod table;
#[cfg(target_arch = "x86_64")]
mod x86;

/// CRC-32C of contiguous bytes.
#[must_use]
pub fn crc32c(bytes: &[u8]) -> u32 {
    !update(!0, bytes)
}

/// CRC-32C of bytes that come in pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crc32c {
    /// Complement of the checksum.
    state: u32,
}

impl Default for Crc32c {
    fn default() -> Self {
        Self::new()
    }
}

impl Crc32c {
    /// The checksum of no bytes.
    #[must_use]
    pub const fn new() -> Self {
        Self { state: !0 }
    }

    /// Adds the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        self.state = update(self.state, bytes);
    }

    /// Checksum of all bytes added.
    #[must_use]
    pub const fn value(self) -> u32 {
        !self.state
    }
}

/// The state after `bytes`. A call, because callers have a path without checksums, which is not to become longer.
#[inline(never)]
fn update(state: u32, bytes: &[u8]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    return x86::update(state, bytes);
    #[cfg(target_arch = "aarch64")]
    return aarch64::update(state, bytes);
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    table::update(state, bytes)
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
        assert_eq!(crc32c(&[]), 0);
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
