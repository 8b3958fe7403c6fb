//! Random mutations of inputs.

use tenmil_base::Random;

/// Maximum length of an input.
pub(crate) const LEN_MAX: usize = 8192;

/// Values at which integer arithmetic tends to fail.
const BOUNDARY_VALUES: [u64; 10] =
    [0, 1, 0x7f, 0x80, 0xff, 0x7fff, 0xffff, 0x7fff_ffff, 0xffff_ffff, u64::MAX];

/// Creates an input from one of `corpus`, or from nothing.
pub(crate) fn generate_input(random: &mut Random, corpus: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = match pick_index(random, corpus.len()) {
        Some(index) if random.chance(9, 10) => corpus[index].clone(),
        _ => (0..random.below(300)).map(|_| random_byte(random)).collect(),
    };
    for _ in 0..=random.below(8) {
        mutate_bytes(random, &mut bytes, corpus);
    }
    bytes.truncate(LEN_MAX);
    bytes
}

fn mutate_bytes(random: &mut Random, bytes: &mut Vec<u8>, corpus: &[Vec<u8>]) {
    let at = pick_index(random, bytes.len()).unwrap_or(0);
    match random.below(7) {
        0 if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
        1 if !bytes.is_empty() => bytes[at] = random_byte(random),
        2 if !bytes.is_empty() => {
            let edge = BOUNDARY_VALUES[pick_index(random, BOUNDARY_VALUES.len()).unwrap_or(0)]
                .to_le_bytes();
            let width = 1 << random.below(4);
            bytes[at..].iter_mut().zip(&edge[..width]).for_each(|(into, from)| *into = *from);
        }
        3 => bytes.truncate(at),
        4 if !bytes.is_empty() => {
            let end = at + pick_index(random, bytes.len() - at).unwrap_or(0);
            let copy = bytes[at..end].to_vec();
            bytes.extend(copy);
        }
        5 => bytes.extend((0..random.below(64)).map(|_| random_byte(random)).collect::<Vec<_>>()),
        _ => {
            if let Some(other) = pick_index(random, corpus.len()) {
                let from = pick_index(random, corpus[other].len()).unwrap_or(0);
                bytes.truncate(at);
                bytes.extend_from_slice(&corpus[other][from..]);
            }
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "below a length that fits")]
fn pick_index(random: &mut Random, len: usize) -> Option<usize> {
    (len > 0).then(|| random.below(len as u64) as usize)
}

#[expect(clippy::cast_possible_truncation, reason = "eight bits are what is wanted")]
fn random_byte(random: &mut Random) -> u8 {
    random.next_u64() as u8
}

#[cfg(test)]
mod tests {
    use super::{LEN_MAX, Random, generate_input};

    fn test_inputs(seed: u64, corpus: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let mut random = Random::new(seed);
        (0..500).map(|_| generate_input(&mut random, corpus)).collect()
    }

    #[test]
    fn same_seed_gives_the_same_inputs_and_another_seed_others() {
        let corpus = [vec![1, 2, 3, 4], (0..=255).collect()];
        assert_eq!(test_inputs(1, &corpus), test_inputs(1, &corpus));
        assert_ne!(test_inputs(1, &corpus), test_inputs(2, &corpus));
    }

    /// A bug of the kind that a length field causes.
    #[test]
    fn injected_bug_is_found() {
        let falls_over = |bytes: &[u8]| bytes.len() > 4 && bytes[0] == 0xff && bytes[4] == 4;
        let corpus = [vec![0, 1, 2, 3, 4, 5]];
        let mut random = Random::new(1);
        assert!((0..100_000).any(|_| falls_over(&generate_input(&mut random, &corpus))));
    }

    #[test]
    fn inputs_differ_derive_from_the_corpus_and_are_bounded() {
        let corpus = [vec![0x5a; LEN_MAX]];
        let mut inputs = test_inputs(3, &corpus);
        assert!(inputs.iter().all(|bytes| bytes.len() <= LEN_MAX));
        let related = inputs.iter().filter(|bytes| bytes.starts_with(&[0x5a; 8])).count();
        assert!(related > inputs.len() / 2, "{related}");
        inputs.sort();
        inputs.dedup();
        assert!(inputs.len() > 400, "{}", inputs.len());
    }
}
