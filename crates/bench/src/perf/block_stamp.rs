//! Self-describing block contents for verification.
//!
//! ```text
//!   0        8        12        16      24      32         40                     end of block
//!   | seed   | device | version | lba   | token | checksum | words derived from the header … |
//! ```
//!
//! The words after the header are derived from it, so a torn block shows where one write ends and
//! the other begins.

use core::fmt;

/// Identity of a written block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockStamp {
    /// Number of the device in the run.
    pub device: u32,
    /// Number of writes of this block so far, including this one. Never zero.
    pub version: u32,
    /// Logical block address.
    pub lba: u64,
    /// Token of the request that wrote it.
    pub token: u64,
}

/// Writer and verifier of the stamps of one run.
#[derive(Clone, Copy, Debug)]
pub struct BlockStamper {
    mark: u64,
}

/// Result of verifying a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockCheck {
    /// Matches the expected stamp.
    Good,
    /// A complete block of this address in another version than the last one written.
    Stale {
        /// Version that was read.
        found: u32,
        /// Version that was written last.
        expected: u32,
    },
    /// Contents from more than one write.
    Torn {
        /// First byte that does not match the header.
        at_byte: usize,
    },
    /// Block of another address or device.
    Misplaced {
        /// Stamp that was read.
        found: BlockStamp,
    },
    /// Not written by this run.
    Foreign,
}

const HEADER_WORDS: usize = 5;
const WORD: usize = size_of::<u64>();

impl BlockStamper {
    /// Creates the stamper of the run with this seed.
    pub fn new(seed: u64) -> Self {
        Self { mark: mix_bits(seed ^ 0x7465_6e6d_696c_2121) }
    }

    /// Fills `block` with the stamp and the words derived from it.
    ///
    /// # Panics
    ///
    /// If `block` is shorter than the header, which no logical block is.
    pub fn write_stamp(&self, stamp: BlockStamp, block: &mut [u8]) {
        let header = self.header_words(stamp);
        for (index, word) in block.chunks_exact_mut(WORD).enumerate() {
            word.copy_from_slice(&word_at(&header, index).to_le_bytes());
        }
    }

    /// Verifies `block` against the last written version of its address. The token is not compared,
    /// since the version already identifies the write.
    pub fn verify_block(&self, expected: BlockStamp, block: &[u8]) -> BlockCheck {
        let mut found = [0; HEADER_WORDS];
        for (index, word) in found.iter_mut().enumerate() {
            *word = load_word(block, index);
        }
        // From the least to the most specific mismatch: each test relies on those before it.
        if found[0] != self.mark {
            return BlockCheck::Foreign;
        }
        let stamp = BlockStamp {
            device: high_half(found[1]),
            version: low_half(found[1]),
            lba: found[2],
            token: found[3],
        };
        if found != self.header_words(stamp) {
            return BlockCheck::Torn { at_byte: WORD };
        }
        let other = (HEADER_WORDS..block.len() / WORD)
            .find(|index| load_word(block, *index) != word_at(&found, *index));
        if let Some(index) = other {
            return BlockCheck::Torn { at_byte: index * WORD };
        }
        if (stamp.device, stamp.lba) != (expected.device, expected.lba) {
            return BlockCheck::Misplaced { found: stamp };
        }
        if stamp.version != expected.version {
            return BlockCheck::Stale { found: stamp.version, expected: expected.version };
        }
        BlockCheck::Good
    }

    fn header_words(self, stamp: BlockStamp) -> [u64; HEADER_WORDS] {
        let which = u64::from(stamp.device) << 32 | u64::from(stamp.version);
        let words = [self.mark, which, stamp.lba, stamp.token];
        let sum = words.iter().fold(0, |sum, word| mix_bits(sum ^ word));
        [words[0], words[1], words[2], words[3], sum]
    }
}

impl fmt::Display for BlockCheck {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Good => out.write_str("as written"),
            Self::Stale { found, expected } => {
                write!(out, "stale: version {found}, expected {expected}")
            }
            Self::Torn { at_byte } => write!(out, "torn: another write from byte {at_byte} on"),
            Self::Misplaced { found } => {
                write!(out, "misplaced: belongs to block {} of SSD {}", found.lba, found.device)
            }
            Self::Foreign => out.write_str("foreign: no stamp of this run"),
        }
    }
}

/// Word with this index, in the header or after it.
#[inline]
fn word_at(header: &[u64; HEADER_WORDS], index: usize) -> u64 {
    match header.get(index) {
        Some(word) => *word,
        // Multiplication by an odd number is a bijection, so the inputs of all words differ.
        None => {
            mix_bits(header[4].wrapping_add((index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)))
        }
    }
}

#[inline]
fn load_word(block: &[u8], index: usize) -> u64 {
    let mut bytes = [0; WORD];
    bytes.copy_from_slice(&block[index * WORD..][..WORD]);
    u64::from_le_bytes(bytes)
}

/// Finalizer of SplitMix64.
#[inline]
const fn mix_bits(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[expect(clippy::cast_possible_truncation, reason = "the low half is what is wanted")]
const fn low_half(word: u64) -> u32 {
    word as u32
}

const fn high_half(word: u64) -> u32 {
    low_half(word >> 32)
}

#[cfg(test)]
mod tests {
    use super::{BlockCheck, BlockStamp, BlockStamper};

    const STAMP: BlockStamp = BlockStamp { device: 3, version: 7, lba: 1 << 40, token: 99 };

    fn stamped_block(stamp: BlockStamp, len_bytes: usize) -> Vec<u8> {
        let mut block = vec![0; len_bytes];
        BlockStamper::new(1).write_stamp(stamp, &mut block);
        block
    }

    fn verify(block: &[u8]) -> BlockCheck {
        BlockStamper::new(1).verify_block(STAMP, block)
    }

    #[test]
    fn block_written_by_any_thread_verifies() {
        for len_bytes in [512, 4096] {
            assert_eq!(verify(&stamped_block(STAMP, len_bytes)), BlockCheck::Good);
            assert_eq!(
                verify(&stamped_block(BlockStamp { token: 5, ..STAMP }, len_bytes)),
                BlockCheck::Good
            );
        }
    }

    #[test]
    fn older_version_is_stale() {
        let verdict = verify(&stamped_block(BlockStamp { version: 6, ..STAMP }, 512));
        assert_eq!(verdict, BlockCheck::Stale { found: 6, expected: 7 });
        assert_eq!(verdict.to_string(), "stale: version 6, expected 7");
    }

    #[test]
    fn block_of_another_lba_or_device_is_misplaced() {
        for found in [BlockStamp { lba: 8, ..STAMP }, BlockStamp { device: 2, ..STAMP }] {
            assert_eq!(verify(&stamped_block(found, 512)), BlockCheck::Misplaced { found });
        }
    }

    #[test]
    fn torn_block_is_detected_at_any_boundary() {
        let (older, newer) =
            (stamped_block(BlockStamp { version: 6, ..STAMP }, 512), stamped_block(STAMP, 512));
        for cut in (8..512).step_by(8) {
            let torn = [&newer[..cut], &older[cut..]].concat();
            // The first words of both blocks are equal, so the tear is detected at the first
            // difference.
            let at_byte = if cut < 40 { 8 } else { cut };
            let expected = match cut {
                8 => BlockCheck::Stale { found: 6, expected: 7 },
                _ => BlockCheck::Torn { at_byte },
            };
            assert_eq!(verify(&torn), expected, "cut at {cut}");
            let torn = [&older[..cut], &newer[cut..]].concat();
            assert_eq!(verify(&torn) == BlockCheck::Good, cut == 8, "cut at {cut}");
        }
    }

    #[test]
    fn any_single_bit_flip_is_detected() {
        let whole = stamped_block(STAMP, 512);
        for bit in 0..512 * 8 {
            let mut flipped = whole.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(verify(&flipped), BlockCheck::Good, "bit {bit}");
        }
    }

    #[test]
    fn unstamped_contents_are_foreign() {
        assert_eq!(verify(&[0; 512]), BlockCheck::Foreign);
        let mut other = vec![0; 512];
        BlockStamper::new(2).write_stamp(STAMP, &mut other);
        assert_eq!(verify(&other), BlockCheck::Foreign);
    }
}
