//! A seed that nobody can guess and everybody should print.

/// A fresh seed from the kernel. The one number of a run that is not repeatable, so print it.
pub fn random_seed() -> u64 {
    let mut bytes = [0; 8];
    match rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty()) {
        Ok(count) if count == bytes.len() => u64::from_ne_bytes(bytes),
        // Denied by a sandbox: the time differs from run to run, which is all that a seed needs.
        _ => crate::clock::kernel_ns(),
    }
}

/// A number that no other process and no other call has. `None` if the kernel has no randomness to give:
/// then there is none.
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
