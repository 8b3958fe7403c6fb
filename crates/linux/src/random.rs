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

/// Fills `bytes` from the kernel's generator, which is fit for keys.
///
/// # Errors
///
/// If the kernel refuses, for example in a sandbox.
pub fn fill_secure_random(bytes: &mut [u8]) -> std::io::Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #[test]
    fn secure_random_fills_every_byte() {
        let mut used = [0u8; 600];
        for _ in 0..20 {
            let mut bytes = [0; 600];
            super::fill_secure_random(&mut bytes).expect("the kernel has random numbers");
            used.iter_mut().zip(bytes).for_each(|(used, byte)| *used |= byte);
        }
        assert!(used.iter().all(|&byte| byte != 0));
    }

    #[test]
    fn two_seeds_differ() {
        assert_ne!(super::random_seed(), super::random_seed());
    }
}
