//! Memory that the program provides for secrets. A test of its own process: it is set once.

use std::sync::atomic::{AtomicUsize, Ordering};

use tenmil_nvme_auth::{
    ChapSecret, Hash, KeyHash, SecretBytes, SecretMemory, set_secret_allocator, tls_psk_candidates,
};

static ALIVE: AtomicUsize = AtomicUsize::new(0);

/// Memory on the heap that counts itself.
struct CountedMemory(Vec<u8>);

impl SecretMemory for CountedMemory {
    fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

impl Drop for CountedMemory {
    fn drop(&mut self) {
        ALIVE.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Has no memory for 33 bytes, and too much for 34.
fn allocate(len: usize) -> Option<Box<dyn SecretMemory>> {
    if len == 33 {
        return None;
    }
    ALIVE.fetch_add(1, Ordering::Relaxed);
    Some(Box::new(CountedMemory(vec![0; if len == 34 { 35 } else { len }])))
}

#[test]
fn every_secret_lies_in_the_provided_memory_and_is_released() {
    set_secret_allocator(allocate);
    // Only the first allocator counts.
    set_secret_allocator(|_| None);
    let alive = || ALIVE.load(Ordering::Relaxed);
    let secret = SecretBytes::new((0..32).collect());
    let copy = secret.clone();
    assert_eq!((alive(), &secret), (2, &copy));
    assert_eq!(copy.expose(), (0..32).collect::<Vec<u8>>());
    drop(secret);
    let secret = ChapSecret::generate(KeyHash::Transform(Hash::Sha256), copy).unwrap();
    let response_key = secret.response_key("nqn");
    assert_eq!((alive(), response_key.len()), (2, 32));
    let psk = tenmil_nvme_auth::ConfiguredPsk::generate(KeyHash::None, response_key).unwrap();
    // One for each of two versions and two derivations; intermediate keys are released.
    let candidates = tls_psk_candidates(std::slice::from_ref(&psk), "h", "s");
    assert_eq!((candidates.len(), alive()), (4, 6));
    drop((candidates, secret, psk));
    assert_eq!(alive(), 0);
    for len in [33, 34] {
        let secret = SecretBytes::new(vec![7; len]);
        assert_eq!((secret.clone().expose(), alive()), (vec![7; len].as_slice(), 0));
    }
}
