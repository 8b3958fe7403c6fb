//! UUID of a namespace without a configured one: derived by `tenmil serve` from the subsystem's NQN
//! and the namespace identifier (version 8 of RFC 9562).
//!
//! It is the same after every start, and on every target with the same NQN, so it does not identify
//! the disk by itself.

/// UUID of namespace `nsid` of subsystem `nqn`.
#[must_use]
pub fn derived_uuid(nqn: &str, nsid: u32) -> [u8; 16] {
    let hash = |seed: u64| {
        let bytes = nqn.bytes().chain(nsid.to_le_bytes());
        bytes.fold(seed, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
    };
    let mut uuid = [0; 16];
    uuid[..8].copy_from_slice(&hash(0xcbf2_9ce4_8422_2325).to_be_bytes());
    uuid[8..].copy_from_slice(&hash(0x6c62_272e_07bb_0142).to_be_bytes());
    uuid[6] = uuid[6] & 0x0f | 0x80;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    uuid
}

#[cfg(test)]
mod tests {
    use super::derived_uuid;

    #[test]
    fn derived_uuid_is_stable_and_unique_per_namespace_and_subsystem() {
        let uuid = derived_uuid("nqn.2026-01.org.tenmil:disk", 1);
        assert_eq!((uuid[6] >> 4, uuid[8] >> 6), (8, 2));
        assert_eq!(uuid, derived_uuid("nqn.2026-01.org.tenmil:disk", 1));
        assert_ne!(uuid, derived_uuid("nqn.2026-01.org.tenmil:disk", 2));
        assert_ne!(uuid, derived_uuid("nqn.2026-01.org.tenmil:disc", 1));
    }
}
