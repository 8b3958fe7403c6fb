//! Powers of x modulo the polynomial of CRC-32C, by which remainders are moved over further bits.

/// The polynomial without x³², with the coefficient of x³¹ in bit 0, as all values here.
pub(crate) const POLYNOMIAL: u32 = 0x82f6_3b78;

/// xⁿ modulo the polynomial.
pub(crate) const fn power(n: usize) -> u32 {
    let (mut value, mut left) = (1_u32 << 31, n);
    while left > 0 {
        value = (value >> 1) ^ (POLYNOMIAL & (value & 1).wrapping_neg());
        left -= 1;
    }
    value
}

/// Factors of a 128-bit block that is moved over `bits` bits: of its first 64 bits and of its others.
///
/// Both bit orders are reversed, so a product has a factor x besides; a factor is the upper half of 64 bits, which is
/// x³². So the factors are those of x^(bits + 64) and x^bits, divided by x³³.
pub(crate) const fn fold_factors(bits: usize) -> [u64; 2] {
    [power(bits + 64 - 33) as u64, power(bits - 33) as u64]
}

/// Factor of a state that is moved over `bytes` bytes: the instruction `crc32`, which ends the multiplication, has a
/// factor x³² of its own.
pub(crate) const fn shift_factor(bytes: usize) -> u64 {
    power(8 * bytes - 33) as u64
}
