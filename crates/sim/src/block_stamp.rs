//! Stamps: self-describing block contents for verification.
//!
//! Every 512-byte part of a block has the same fields, and the rest of the part is derived from
//! them, so a part is either intact or garbage:
//!
//! ```text
//!   0       8      16     24       32        40              48       56          512
//!   | magic | seed | lba  | token  | version | part of parts | check  | filling … |
//! ```
//!
//! A block with parts of different versions is torn; a block with the number of another block is
//! misplaced; a block of an older version is stale, which only the [`data_oracle`](crate::data_oracle) can
//! detect.

/// Identity of a written block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BlockStamp {
    /// Seed of the run that wrote it.
    pub seed: u64,
    /// Block it was written to.
    pub lba: u64,
    /// Token of the request that wrote it.
    pub token: u64,
    /// Number of writes of this block so far.
    pub version: u64,
}

/// Contents of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockContent {
    /// Zeroes: never written, or zeroed.
    Zeroes,
    /// One stamp in all parts.
    Stamped(BlockStamp),
    /// Parts of different writes.
    Torn {
        /// Stamp of the first part, if it has one.
        first: Option<BlockStamp>,
        /// Stamp of the first part that differs, if it has one.
        other: Option<BlockStamp>,
    },
    /// Neither a stamp nor zeroes: not written by a request.
    Garbage {
        /// First invalid part.
        part: usize,
    },
}

/// Bytes that are written atomically even by a medium with torn writes.
pub const PART: usize = 512;

const MAGIC: u64 = 0x7465_6e6d_696c_2121;
const WORDS: usize = PART / 8;
const FIELDS: usize = 7;

impl BlockStamp {
    /// Fills a block with the stamp.
    ///
    /// # Panics
    ///
    /// If the length of the block is no multiple of the part size.
    pub fn write_block(&self, block: &mut [u8]) {
        assert!(block.len().is_multiple_of(PART), "a block is made of parts");
        let parts = block.len() / PART;
        for (part, bytes) in block.chunks_exact_mut(PART).enumerate() {
            let words = self.part_words(part, parts);
            for (chunk, word) in bytes.chunks_exact_mut(8).zip(words) {
                chunk.copy_from_slice(&word.to_le_bytes());
            }
        }
    }

    /// Decodes a block.
    pub fn decode_block(block: &[u8]) -> BlockContent {
        let parts = block.len() / PART;
        let mut first = None;
        for (part, bytes) in block.chunks_exact(PART).enumerate() {
            let Ok(found) = decode_part(bytes, part, parts) else {
                return BlockContent::Garbage { part };
            };
            match first {
                None => first = Some(found),
                Some(first) if first != found => return BlockContent::Torn { first, other: found },
                Some(_) => {}
            }
        }
        first.flatten().map_or(BlockContent::Zeroes, BlockContent::Stamped)
    }

    fn part_words(&self, part: usize, parts: usize) -> [u64; WORDS] {
        let part_of_parts = (part as u64) << 32 | parts as u64;
        let fields = [MAGIC, self.seed, self.lba, self.token, self.version, part_of_parts];
        let check = fields.iter().fold(MAGIC, |check, field| {
            (check ^ field).wrapping_mul(0x9fb2_1c65_1e98_df25).rotate_left(29)
        });
        let mut words = [0; WORDS];
        words[..FIELDS - 1].copy_from_slice(&fields);
        words[FIELDS - 1] = check;
        for (word, index) in words[FIELDS..].iter_mut().zip(1..) {
            *word = check.wrapping_mul(2 * index + 1);
        }
        words
    }
}

/// Decodes a part: `Ok(None)` for zeroes, an error for neither zeroes nor a stamp.
fn decode_part(bytes: &[u8], part: usize, parts: usize) -> Result<Option<BlockStamp>, ()> {
    let mut words = [0_u64; WORDS];
    for (word, chunk) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_le_bytes(chunk.try_into().unwrap_or_default());
    }
    if words.iter().all(|word| *word == 0) {
        return Ok(None);
    }
    let [_, seed, lba, token, version, ..] = words;
    let stamp = BlockStamp { seed, lba, token, version };
    if words == stamp.part_words(part, parts) { Ok(Some(stamp)) } else { Err(()) }
}

#[cfg(test)]
mod tests {
    use super::{BlockContent, BlockStamp, PART};

    const STAMP: BlockStamp = BlockStamp { seed: 1, lba: 77, token: 5, version: 2 };

    fn stamped_block(stamp: BlockStamp) -> Vec<u8> {
        let mut block = vec![0; 8 * PART];
        stamp.write_block(&mut block);
        block
    }

    #[test]
    fn stamp_is_decoded_from_its_block() {
        assert_eq!(BlockStamp::decode_block(&stamped_block(STAMP)), BlockContent::Stamped(STAMP));
        assert_eq!(BlockStamp::decode_block(&[0; 8 * PART]), BlockContent::Zeroes);
    }

    #[test]
    fn parts_of_two_writes_are_torn_and_name_both() {
        let newer = BlockStamp { token: 6, version: 3, ..STAMP };
        for cut in 1..8 {
            let mut torn = stamped_block(STAMP);
            torn[cut * PART..].copy_from_slice(&stamped_block(newer)[cut * PART..]);
            let expected = BlockContent::Torn { first: Some(STAMP), other: Some(newer) };
            assert_eq!(BlockStamp::decode_block(&torn), expected, "cut after {cut} parts");
            torn[cut * PART..].fill(0);
            let expected = BlockContent::Torn { first: Some(STAMP), other: None };
            assert_eq!(BlockStamp::decode_block(&torn), expected, "zeroes after {cut} parts");
        }
    }

    #[test]
    fn single_wrong_byte_is_garbage() {
        for index in 0..2 * PART {
            let mut wrong = stamped_block(STAMP);
            wrong[index] ^= 1;
            assert_eq!(
                BlockStamp::decode_block(&wrong),
                BlockContent::Garbage { part: index / PART },
                "{index}"
            );
        }
    }

    #[test]
    fn misplaced_part_is_garbage() {
        let mut moved = stamped_block(STAMP);
        moved.copy_within(..PART, PART);
        assert_eq!(BlockStamp::decode_block(&moved), BlockContent::Garbage { part: 1 });
    }
}
