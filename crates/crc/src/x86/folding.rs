//! Folds by carry-less multiplication, four registers in a pass.

use core::arch::x86_64::{
    __m128i, __m256i, __m512i, _mm_clmulepi64_si128, _mm_crc32_u64, _mm_cvtsi32_si128,
    _mm_cvtsi128_si64, _mm_extract_epi64, _mm_set_epi64x, _mm_xor_si128, _mm256_castsi128_si256,
    _mm256_castsi256_si128, _mm256_clmulepi64_epi128, _mm256_extracti128_si256,
    _mm256_inserti128_si256, _mm256_loadu_si256, _mm256_xor_si256, _mm256_zextsi128_si256,
    _mm512_castsi512_si256, _mm512_clmulepi64_epi128, _mm512_extracti64x4_epi64,
    _mm512_loadu_si512, _mm512_set_epi64, _mm512_ternarylogic_epi64, _mm512_xor_si512,
    _mm512_zextsi128_si512,
};

use super::{low_half, update_short};
use crate::powers::fold_factors;

/// `a ^ b ^ c` of `_mm512_ternarylogic_epi64`.
const XOR: i32 = 0x96;

/// The state after `bytes`, which are at least 256 unless another way computes them.
#[target_feature(enable = "avx512f,avx512vl,vpclmulqdq,pclmulqdq,avx2,sse4.2")]
pub(super) fn update_avx512(state: u32, bytes: &[u8]) -> u32 {
    let (passes, rest) = bytes.as_chunks::<256>();
    let Some((first, passes)) = passes.split_first() else { return update_short(state, bytes) };
    let mut sums = load_pass_512(first);
    let state = _mm512_zextsi128_si512(_mm_cvtsi32_si128(state.cast_signed()));
    sums[0] = _mm512_xor_si512(sums[0], state);
    let factors = repeat_512(const { fold_factors(8 * 256) });
    for pass in passes {
        let next = load_pass_512(pass);
        sums = [
            fold_512(sums[0], factors, next[0]),
            fold_512(sums[1], factors, next[1]),
            fold_512(sums[2], factors, next[2]),
            fold_512(sums[3], factors, next[3]),
        ];
    }
    // The first three are moved onto the last one.
    let moved = fold_512(sums[0], repeat_512(const { fold_factors(8 * 192) }), sums[3]);
    let moved = fold_512(sums[1], repeat_512(const { fold_factors(8 * 128) }), moved);
    let mut sum = fold_512(sums[2], repeat_512(const { fold_factors(8 * 64) }), moved);
    let (blocks, rest) = rest.as_chunks::<64>();
    for block in blocks {
        sum = fold_512(sum, repeat_512(const { fold_factors(8 * 64) }), load_512(block));
    }
    let low = fold_256(_mm512_castsi512_si256(sum), repeat_256(const { fold_factors(8 * 32) }));
    let sum = _mm256_xor_si256(low, _mm512_extracti64x4_epi64::<1>(sum));
    update_short(state_of_256(sum), rest)
}

/// The state after `bytes`, which are at least 128 unless another way computes them.
#[target_feature(enable = "vpclmulqdq,pclmulqdq,avx2,sse4.2")]
pub(super) fn update_avx2(state: u32, bytes: &[u8]) -> u32 {
    let (passes, rest) = bytes.as_chunks::<128>();
    let Some((first, passes)) = passes.split_first() else { return update_short(state, bytes) };
    let mut sums = load_pass_256(first);
    let state = _mm256_zextsi128_si256(_mm_cvtsi32_si128(state.cast_signed()));
    sums[0] = _mm256_xor_si256(sums[0], state);
    let factors = repeat_256(const { fold_factors(8 * 128) });
    for pass in passes {
        let next = load_pass_256(pass);
        sums = [
            _mm256_xor_si256(fold_256(sums[0], factors), next[0]),
            _mm256_xor_si256(fold_256(sums[1], factors), next[1]),
            _mm256_xor_si256(fold_256(sums[2], factors), next[2]),
            _mm256_xor_si256(fold_256(sums[3], factors), next[3]),
        ];
    }
    // The first three are moved onto the last one.
    let first = fold_256(sums[0], repeat_256(const { fold_factors(8 * 96) }));
    let second = fold_256(sums[1], repeat_256(const { fold_factors(8 * 64) }));
    let third = fold_256(sums[2], repeat_256(const { fold_factors(8 * 32) }));
    let mut sum =
        _mm256_xor_si256(_mm256_xor_si256(first, second), _mm256_xor_si256(third, sums[3]));
    let (blocks, rest) = rest.as_chunks::<32>();
    for block in blocks {
        sum = _mm256_xor_si256(
            fold_256(sum, repeat_256(const { fold_factors(8 * 32) })),
            load_256(block),
        );
    }
    update_short(state_of_256(sum), rest)
}

/// Moves each block of `sum` by the bits of `factors`, and adds `next`.
#[inline]
#[target_feature(enable = "avx512f,vpclmulqdq")]
fn fold_512(sum: __m512i, factors: __m512i, next: __m512i) -> __m512i {
    let first = _mm512_clmulepi64_epi128::<0x00>(sum, factors);
    let second = _mm512_clmulepi64_epi128::<0x11>(sum, factors);
    _mm512_ternarylogic_epi64::<XOR>(first, second, next)
}

/// Moves each block of `sum` by the bits of `factors`.
#[inline]
#[target_feature(enable = "avx2,vpclmulqdq")]
fn fold_256(sum: __m256i, factors: __m256i) -> __m256i {
    let first = _mm256_clmulepi64_epi128::<0x00>(sum, factors);
    let second = _mm256_clmulepi64_epi128::<0x11>(sum, factors);
    _mm256_xor_si256(first, second)
}

/// The state after two blocks.
#[inline]
#[target_feature(enable = "avx2,pclmulqdq,sse4.2")]
fn state_of_256(sum: __m256i) -> u32 {
    let (first, last) = (_mm256_castsi256_si128(sum), _mm256_extracti128_si256::<1>(sum));
    let factors = pair(const { fold_factors(8 * 16) });
    let low = _mm_clmulepi64_si128::<0x00>(first, factors);
    let high = _mm_clmulepi64_si128::<0x11>(first, factors);
    let sum = _mm_xor_si128(_mm_xor_si128(low, high), last);
    let state = _mm_crc32_u64(0, _mm_cvtsi128_si64(sum).cast_unsigned());
    low_half(_mm_crc32_u64(state, _mm_extract_epi64::<1>(sum).cast_unsigned()))
}

#[inline]
#[target_feature(enable = "sse2")]
fn pair(factors: [u64; 2]) -> __m128i {
    let [first, second] = factors.map(u64::cast_signed);
    _mm_set_epi64x(second, first)
}

#[inline]
#[target_feature(enable = "avx2")]
fn repeat_256(factors: [u64; 2]) -> __m256i {
    let pair = pair(factors);
    _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(pair), pair)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn repeat_512(factors: [u64; 2]) -> __m512i {
    let [a, b] = factors.map(u64::cast_signed);
    _mm512_set_epi64(b, a, b, a, b, a, b, a)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_pass_512(pass: &[u8; 256]) -> [__m512i; 4] {
    let (blocks, _) = pass.as_chunks::<64>();
    [load_512(&blocks[0]), load_512(&blocks[1]), load_512(&blocks[2]), load_512(&blocks[3])]
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load_512(block: &[u8; 64]) -> __m512i {
    // SAFETY: the reference is valid for reads of 64 bytes, and the instruction needs no alignment.
    unsafe { _mm512_loadu_si512(block.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_pass_256(pass: &[u8; 128]) -> [__m256i; 4] {
    let (blocks, _) = pass.as_chunks::<32>();
    [load_256(&blocks[0]), load_256(&blocks[1]), load_256(&blocks[2]), load_256(&blocks[3])]
}

#[inline]
#[target_feature(enable = "avx2")]
fn load_256(block: &[u8; 32]) -> __m256i {
    // SAFETY: the reference is valid for reads of 32 bytes, and the instruction needs no alignment.
    unsafe { _mm256_loadu_si256(block.as_ptr().cast()) }
}
