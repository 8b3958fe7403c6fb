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
pub struct Stamp {
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
pub struct Stamper {
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
        found: Stamp,
    },
    /// Not written by this run.
    Foreign,
}

const HEADER_WORDS: usize = 5;
const WORD: usize = size_of::<u64>();

impl Stamper {
    /// Creates the stamper of the run with this seed.
    pub fn new(seed: u64) -> Self {
        Self { mark: mix(seed ^ 0x7465_6e6d_696c_2121) }
    }

    /// Fills `block` with the stamp and the words derived from it.
    ///
    /// # Panics
    ///
    /// If `block` is shorter than the header, which no logical block is.
    pub fn write(&self, stamp: Stamp, block: &mut [u8]) {
        let header = self.header(stamp);
        for (index, word) in block.chunks_exact_mut(WORD).enumerate() {
            word.copy_from_slice(&word_at(&header, index).to_le_bytes());
        }
    }

    /// Verifies `block` against the last written version of its address. The token is not compared,
    /// since the version already identifies the write.
    pub fn check(&self, expected: Stamp, block: &[u8]) -> BlockCheck {
        let mut found = [0; HEADER_WORDS];
        for (index, word) in found.iter_mut().enumerate() {
            *word = load(block, index);
        }
        // From the least to the most specific mismatch: each test relies on those before it.
        if found[0] != self.mark {
            return BlockCheck::Foreign;
        }
        let stamp = Stamp {
            device: high(found[1]),
            version: low(found[1]),
            lba: found[2],
            token: found[3],
        };
        if found != self.header(stamp) {
            return BlockCheck::Torn { at_byte: WORD };
        }
        let other = (HEADER_WORDS..block.len() / WORD)
            .find(|index| load(block, *index) != word_at(&found, *index));
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

    fn header(self, stamp: Stamp) -> [u64; HEADER_WORDS] {
        let which = u64::from(stamp.device) << 32 | u64::from(stamp.version);
        let words = [self.mark, which, stamp.lba, stamp.token];
        let sum = words.iter().fold(0, |sum, word| mix(sum ^ word));
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
        None => mix(header[4].wrapping_add((index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15))),
    }
}

#[inline]
fn load(block: &[u8], index: usize) -> u64 {
    let mut bytes = [0; WORD];
    bytes.copy_from_slice(&block[index * WORD..][..WORD]);
    u64::from_le_bytes(bytes)
}

/// Finalizer of SplitMix64.
#[inline]
const fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[expect(clippy::cast_possible_truncation, reason = "the low half is what is wanted")]
const fn low(word: u64) -> u32 {
    word as u32
}

const fn high(word: u64) -> u32 {
    low(word >> 32)
}

#[cfg(test)]
mod tests {
    use super::{BlockCheck, Stamp, Stamper};

    const STAMP: Stamp = Stamp { device: 3, version: 7, lba: 1 << 40, token: 99 };

    fn block(stamp: Stamp, len_bytes: usize) -> Vec<u8> {
        let mut block = vec![0; len_bytes];
        Stamper::new(1).write(stamp, &mut block);
        block
    }

    fn check(block: &[u8]) -> BlockCheck {
        Stamper::new(1).check(STAMP, block)
    }

    #[test]
    fn a_block_that_was_read_back_whole_is_good_whoever_wrote_it() {
        for len_bytes in [512, 4096] {
            assert_eq!(check(&block(STAMP, len_bytes)), BlockCheck::Good);
            assert_eq!(check(&block(Stamp { token: 5, ..STAMP }, len_bytes)), BlockCheck::Good);
        }
    }

    #[test]
    fn an_older_version_is_stale() {
        let verdict = check(&block(Stamp { version: 6, ..STAMP }, 512));
        assert_eq!(verdict, BlockCheck::Stale { found: 6, expected: 7 });
        assert_eq!(verdict.to_string(), "stale: version 6, expected 7");
    }

    #[test]
    fn a_block_of_another_address_or_another_ssd_is_misplaced() {
        for found in [Stamp { lba: 8, ..STAMP }, Stamp { device: 2, ..STAMP }] {
            assert_eq!(check(&block(found, 512)), BlockCheck::Misplaced { found });
        }
    }

    #[test]
    fn a_block_is_torn_wherever_the_other_write_begins() {
        let (older, newer) = (block(Stamp { version: 6, ..STAMP }, 512), block(STAMP, 512));
        for cut in (8..512).step_by(8) {
            let torn = [&newer[..cut], &older[cut..]].concat();
            // The first words of both blocks are equal, so the tear is detected at the first
            // difference.
            let at_byte = if cut < 40 { 8 } else { cut };
            let expected = match cut {
                8 => BlockCheck::Stale { found: 6, expected: 7 },
                _ => BlockCheck::Torn { at_byte },
            };
            assert_eq!(check(&torn), expected, "cut at {cut}");
            let torn = [&older[..cut], &newer[cut..]].concat();
            assert_eq!(check(&torn) == BlockCheck::Good, cut == 8, "cut at {cut}");
        }
    }

    #[test]
    fn any_single_bit_that_flips_is_noticed() {
        let whole = block(STAMP, 512);
        for bit in 0..512 * 8 {
            let mut flipped = whole.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(check(&flipped), BlockCheck::Good, "bit {bit}");
        }
    }

    #[test]
    fn zeroes_and_other_runs_are_foreign() {
        assert_eq!(check(&[0; 512]), BlockCheck::Foreign);
        let mut other = vec![0; 512];
        Stamper::new(2).write(STAMP, &mut other);
        assert_eq!(check(&other), BlockCheck::Foreign);
    }
}
