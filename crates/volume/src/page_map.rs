//! Hash map from block addresses to pages.
//!
//! One write to a volume looks some thirty pages up. The order of the addresses matters only when the
//! pages are written.

#[expect(clippy::disallowed_types, reason = "this hash has no random seed")]
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Map from block addresses.
#[expect(clippy::disallowed_types, reason = "this hash has no random seed")]
pub(crate) type PageMap<T> = HashMap<u64, T, BuildHasherDefault<AddressHasher>>;

/// Hash of one block address: the same in every run, so that runs with one seed are the same.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AddressHasher(u64);

/// 2⁶⁴ divided by the golden ratio: neighboring addresses are spread over all bits.
const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;

impl Hasher for AddressHasher {
    #[inline]
    fn write_u64(&mut self, address: u64) {
        let product = address.wrapping_mul(MULTIPLIER);
        // The map takes its index from the low bits, which depend on the low bits of the address only.
        self.0 = product ^ product >> 32;
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(self.0 << 8 | u64::from(*byte));
        }
    }

    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }
}
