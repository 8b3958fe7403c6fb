//! CRC-32C by tables, for processors without an instruction.

/// Polynomial, with the coefficient of x³¹ in bit 0.
const POLYNOMIAL: u32 = 0x82f6_3b78;

/// The state after a byte and as many zero bytes as the index says.
static TABLES: [[u32; 256]; 8] = tables();

#[expect(clippy::cast_possible_truncation, reason = "an index below 256")]
const fn tables() -> [[u32; 256]; 8] {
    let mut tables = [[0; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let (mut state, mut bit) = (byte as u32, 0);
        while bit < 8 {
            state = (state >> 1) ^ (POLYNOMIAL & (state & 1).wrapping_neg());
            bit += 1;
        }
        tables[0][byte] = state;
        byte += 1;
    }
    let mut zeros = 1;
    while zeros < 8 {
        let mut byte = 0;
        while byte < 256 {
            let before = tables[zeros - 1][byte];
            tables[zeros][byte] = (before >> 8) ^ tables[0][(before & 0xff) as usize];
            byte += 1;
        }
        zeros += 1;
    }
    tables
}

/// The state after `bytes`, eight at a time.
pub(crate) fn update(mut state: u32, bytes: &[u8]) -> u32 {
    let (words, rest) = bytes.as_chunks::<8>();
    for word in words {
        let mixed = u64::from_le_bytes(*word) ^ u64::from(state);
        let bytes = mixed.to_le_bytes().into_iter().zip(TABLES.iter().rev());
        state = bytes.fold(0, |sum, (byte, table)| sum ^ table[usize::from(byte)]);
    }
    for byte in rest {
        let [first, ..] = state.to_le_bytes();
        state = (state >> 8) ^ TABLES[0][usize::from(first ^ byte)];
    }
    state
}

#[cfg(test)]
mod tests {
    use super::{POLYNOMIAL, update};

    fn bit_by_bit(mut state: u32, bytes: &[u8]) -> u32 {
        for byte in bytes {
            state ^= u32::from(*byte);
            for _ in 0..8 {
                state = (state >> 1) ^ (POLYNOMIAL & (state & 1).wrapping_neg());
            }
        }
        state
    }

    #[test]
    fn tables_are_those_of_the_polynomial() {
        let bytes: Vec<u8> = (0..100_u32).map(|at| (at * 151 + 7).to_le_bytes()[0]).collect();
        for length in 0..bytes.len() {
            for state in [0, !0, 0x1234_5678] {
                let bytes = &bytes[..length];
                assert_eq!(update(state, bytes), bit_by_bit(state, bytes), "{length} bytes");
            }
        }
    }
}
