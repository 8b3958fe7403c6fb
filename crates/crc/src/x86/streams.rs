//! Three streams of the instruction `crc32`, which has a latency of three cycles and starts in each.

use core::arch::x86_64::{
    _mm_clmulepi64_si128, _mm_crc32_u64, _mm_cvtsi64_si128, _mm_cvtsi128_si64,
};

use super::{low_half, update_short};
use crate::powers::shift_factor;

/// Bytes of a stream: three of the longer ones are nearly 4 KiB.
const LONG: usize = 1_344;
const SHORT: usize = 168;

const LONG_FACTORS: [u64; 2] = [shift_factor(2 * LONG), shift_factor(LONG)];
const SHORT_FACTORS: [u64; 2] = [shift_factor(2 * SHORT), shift_factor(SHORT)];

/// The state after `bytes`.
#[target_feature(enable = "sse4.2,pclmulqdq")]
pub(super) fn update_sse(state: u32, bytes: &[u8]) -> u32 {
    let (state, bytes) = update_streams::<LONG>(state, bytes, LONG_FACTORS);
    let (state, bytes) = update_streams::<SHORT>(state, bytes, SHORT_FACTORS);
    update_short(state, bytes)
}

/// The state after as many bytes as three streams of this length take, and the others.
#[inline]
#[target_feature(enable = "sse4.2,pclmulqdq")]
fn update_streams<const LENGTH: usize>(
    state: u32,
    mut bytes: &[u8],
    factors: [u64; 2],
) -> (u32, &[u8]) {
    let mut first = u64::from(state);
    while let Some((block, behind)) = bytes.split_at_checked(3 * LENGTH) {
        bytes = behind;
        let (mut second, mut third) = (0, 0);
        let (block, others) = block.split_at(LENGTH);
        let (others, last) = others.split_at(LENGTH);
        let words = [block, others, last].map(|part| part.as_chunks::<8>().0);
        for ((one, two), three) in words[0].iter().zip(words[1]).zip(words[2]) {
            first = _mm_crc32_u64(first, u64::from_le_bytes(*one));
            second = _mm_crc32_u64(second, u64::from_le_bytes(*two));
            third = _mm_crc32_u64(third, u64::from_le_bytes(*three));
        }
        first = third ^ shift(first, factors[0]) ^ shift(second, factors[1]);
    }
    (low_half(first), bytes)
}

/// Moves a state over the bytes of a factor.
#[inline]
#[target_feature(enable = "sse4.2,pclmulqdq")]
fn shift(state: u64, factor: u64) -> u64 {
    let [state, factor] = [state, factor].map(|value| _mm_cvtsi64_si128(value.cast_signed()));
    let product = _mm_clmulepi64_si128::<0>(state, factor);
    _mm_crc32_u64(0, _mm_cvtsi128_si64(product).cast_unsigned())
}
