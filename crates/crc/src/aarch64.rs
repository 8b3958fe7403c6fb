//! CRC-32C by the instructions of AArch64.

use core::arch::aarch64::{__crc32cb, __crc32cd};
use std::arch::is_aarch64_feature_detected;

/// The state after `bytes`.
pub(crate) fn update(state: u32, bytes: &[u8]) -> u32 {
    if is_aarch64_feature_detected!("crc") {
        // SAFETY: the processor has the instructions.
        unsafe { update_by_instruction(state, bytes) }
    } else {
        crate::table::update(state, bytes)
    }
}

#[target_feature(enable = "crc")]
fn update_by_instruction(mut state: u32, bytes: &[u8]) -> u32 {
    let (words, rest) = bytes.as_chunks::<8>();
    for word in words {
        state = __crc32cd(state, u64::from_le_bytes(*word));
    }
    rest.iter().fold(state, |state, byte| __crc32cb(state, *byte))
}
