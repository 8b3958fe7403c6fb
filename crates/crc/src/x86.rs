//! CRC-32C by the instructions of x86-64.
//!
//! A remainder is moved over the bits behind it by carry-less multiplication ([`powers`](crate::powers)): folds move
//! blocks of 16 bytes of a register onto those a whole pass later; what is left of a register is moved onto its last
//! block, whose checksum the instruction `crc32` computes.

mod folding;
mod streams;

use std::arch::is_x86_feature_detected;
use std::sync::atomic::{AtomicU8, Ordering};

use core::arch::x86_64::{_mm_crc32_u8, _mm_crc32_u16, _mm_crc32_u32, _mm_crc32_u64};

/// Instructions of the processor, from the fewest up. Zero is not determined yet.
const TABLE: u8 = 1;
const SSE: u8 = 2;
const AVX2: u8 = 3;
const AVX512: u8 = 4;

static LEVEL: AtomicU8 = AtomicU8::new(0);

/// Buffers from this length are folded; the instruction is faster for shorter ones.
const FOLDED_MIN: usize = 256;

/// The state after `bytes`.
#[inline]
pub(crate) fn update(state: u32, bytes: &[u8]) -> u32 {
    let level = LEVEL.load(Ordering::Relaxed);
    if level >= SSE && bytes.len() < FOLDED_MIN {
        // SAFETY: the level says that the processor has the instructions.
        return unsafe { update_short(state, bytes) };
    }
    update_by_level(level, state, bytes)
}

fn update_by_level(level: u8, state: u32, bytes: &[u8]) -> u32 {
    match level {
        // SAFETY: the level says that the processor has the instructions.
        AVX512 => unsafe { folding::update_avx512(state, bytes) },
        // SAFETY: as above.
        AVX2 => unsafe { folding::update_avx2(state, bytes) },
        // SAFETY: as above.
        SSE => unsafe { streams::update_sse(state, bytes) },
        TABLE => crate::table::update(state, bytes),
        _ => {
            let level = detect_level();
            LEVEL.store(level, Ordering::Relaxed);
            update_by_level(level, state, bytes)
        }
    }
}

#[cold]
fn detect_level() -> u8 {
    if !is_x86_feature_detected!("sse4.2") || !is_x86_feature_detected!("pclmulqdq") {
        return TABLE;
    }
    if !is_x86_feature_detected!("avx2") || !is_x86_feature_detected!("vpclmulqdq") {
        return SSE;
    }
    let has_avx512 = is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vl");
    if has_avx512 { AVX512 } else { AVX2 }
}

/// The state after few bytes.
#[inline]
#[target_feature(enable = "sse4.2")]
fn update_short(state: u32, bytes: &[u8]) -> u32 {
    let (words, rest) = bytes.as_chunks::<8>();
    let mut wide = u64::from(state);
    for word in words {
        wide = _mm_crc32_u64(wide, u64::from_le_bytes(*word));
    }
    update_rest(low_half(wide), rest)
}

/// The state after fewer than eight bytes.
#[inline]
#[target_feature(enable = "sse4.2")]
fn update_rest(mut state: u32, bytes: &[u8]) -> u32 {
    let (word, bytes) = bytes.as_chunks::<4>();
    if let [word] = word {
        state = _mm_crc32_u32(state, u32::from_le_bytes(*word));
    }
    let (half, byte) = bytes.as_chunks::<2>();
    if let [half] = half {
        state = _mm_crc32_u16(state, u16::from_le_bytes(*half));
    }
    if let [byte] = byte { _mm_crc32_u8(state, *byte) } else { state }
}

/// The instruction has a result of 32 bits in a register of 64.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "the upper half is zero")]
fn low_half(wide: u64) -> u32 {
    wide as u32
}

#[cfg(test)]
mod tests {
    use super::{AVX2, AVX512, SSE, TABLE, detect_level, update, update_by_level};

    /// Pseudorandom bytes.
    fn bytes_of(length: usize) -> Vec<u8> {
        let mut value = 1_u32;
        let next = || {
            value = value.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            value.to_be_bytes()[0]
        };
        std::iter::repeat_with(next).take(length).collect()
    }

    #[test]
    fn every_way_has_the_result_of_the_table() {
        let bytes = bytes_of(70_000);
        let highest = detect_level();
        let lengths = (0..1_600).chain([4_031, 4_032, 4_033, 4_095, 4_096, 4_097, 8_200, 69_990]);
        for length in lengths {
            for (start, state) in [(0, !0), (1, 0), (7, 0x89ab_cdef)] {
                let bytes = &bytes[start..start + length];
                let expected = update_by_level(TABLE, state, bytes);
                for level in [SSE, AVX2, AVX512].into_iter().filter(|level| *level <= highest) {
                    let found = update_by_level(level, state, bytes);
                    assert_eq!(found, expected, "{length} bytes from {start}, level {level}");
                }
                assert_eq!(update(state, bytes), expected, "{length} bytes from {start}");
            }
        }
    }
}
