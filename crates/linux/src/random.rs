//! Random seeds and identifiers from the kernel.

/// Returns a fresh seed. It is the one non-repeatable input of a run, so print it.
pub fn random_seed() -> u64 {
    let mut bytes = [0; 8];
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(count) if count == bytes.len() => u64::from_ne_bytes(bytes),
        // getrandom is denied by a sandbox: the time differs between runs, which suffices for a
        // seed.
        _ => crate::clock::kernel_ns(),
    }
}

/// Returns a number that is unique across processes and calls; `None` if the kernel supplies no
/// randomness.
pub fn random_id() -> Option<[u8; 16]> {
    let mut bytes = [0; 16];
    let count = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
    (count == Ok(bytes.len())).then_some(bytes)
}

#[cfg(test)]
mod tests {
    #[test]
    fn two_seeds_differ() {
        assert_ne!(super::random_seed(), super::random_seed());
    }
}
