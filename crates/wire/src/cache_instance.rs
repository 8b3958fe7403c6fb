//! Identity of the volatile write cache behind a namespace, reported by `tenmil serve` in the
//! vendor specific bytes of Identify Namespace.
//!
//! ```text
//!   384               400               416          4096
//!    | signature       | instance        | zeroes     |
//! ```
//!
//! Controllers that report the same instance write through the same cache, and it has lost nothing
//! since the first of them reported it. Other targets do not report the signature, which is a
//! random number.

use crate::identify::IdentifyNamespace;

/// Lifetime of a cache: a random number drawn when a process opens the device that it serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheInstance(pub [u8; 16]);

/// Signature before the instance.
const SIGNATURE: [u8; 16] = [
    0x9e, 0x4b, 0x1c, 0x27, 0xd3, 0x60, 0x4f, 0xa8, 0xb5, 0x72, 0x3e, 0xc9, 0x06, 0x8d, 0xf1, 0x5a,
];
/// End of the fields in the vendor specific bytes.
const END: usize = 32;

impl CacheInstance {
    /// Reads the instance from the page.
    #[must_use]
    pub fn from_identify_namespace(page: &IdentifyNamespace) -> Option<Self> {
        let vendor = page.vendor();
        let (signature, rest) = vendor.split_first_chunk::<16>()?;
        let (instance, _) = rest.split_first_chunk::<16>()?;
        let is_said = *signature == SIGNATURE && *instance != [0; 16];
        is_said.then_some(Self(*instance))
    }

    /// Writes the instance to the page.
    pub fn store_to_identify_namespace(self, page: &mut IdentifyNamespace) {
        let mut vendor = page.vendor();
        vendor[..16].copy_from_slice(&SIGNATURE);
        vendor[16..END].copy_from_slice(&self.0);
        page.set().vendor(vendor);
    }
}

#[cfg(test)]
mod tests {
    use super::CacheInstance;
    use crate::identify::IdentifyNamespace;

    #[test]
    fn cache_instance_round_trips_and_other_bytes_are_not_an_instance() {
        let mut page = IdentifyNamespace::zeroed();
        assert_eq!(CacheInstance::from_identify_namespace(&page), None);
        let instance = CacheInstance(core::array::from_fn(|at| u8::try_from(at + 1).unwrap()));
        instance.store_to_identify_namespace(&mut page);
        assert_eq!(CacheInstance::from_identify_namespace(&page), Some(instance));
        for at in 0..16 {
            let mut other = page.clone();
            let mut vendor = other.vendor();
            vendor[at] ^= 1;
            other.set().vendor(vendor);
            assert_eq!(
                CacheInstance::from_identify_namespace(&other),
                None,
                "byte {at} of the signature"
            );
        }
        let mut nothing = IdentifyNamespace::zeroed();
        CacheInstance([0; 16]).store_to_identify_namespace(&mut nothing);
        assert_eq!(CacheInstance::from_identify_namespace(&nothing), None);
    }
}
