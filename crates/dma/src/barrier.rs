//! The order in which a device sees our stores and we see its.
//!
//! | | x86-64 | aarch64, a thread | aarch64, a PCIe device |
//! |---|---|---|---|
//! | entries before doorbell | stores are ordered; `sfence` after streaming ones | release | `dmb oshst` |
//! | phase before the rest | loads are ordered | acquire | `dmb oshld` |
//!
//! Rust's fences order against other cores, which aarch64 calls the inner shareable domain. A PCIe
//! device lies in the outer one, so for it the barrier is written out.

use super::sync::{Ordering, fence};

/// What stands at the other end of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// A PCIe function: it reads memory by DMA, and never through our cache on purpose.
    Pcie,
    /// A controller emulated by a thread of this or another process: it reads through the cache.
    Emulated,
}

/// Puts all stores so far before all stores to come, as seen by a device of this kind.
#[inline]
pub(crate) fn store_barrier(kind: DeviceKind) {
    #[cfg(target_arch = "aarch64")]
    if kind == DeviceKind::Pcie {
        // SAFETY: a barrier touches no memory and no register.
        unsafe { core::arch::asm!("dmb oshst", options(nostack, preserves_flags)) };
        return;
    }
    let _ = kind;
    // Emits nothing on x86-64, where stores are ordered; it keeps the compiler from reordering.
    fence(Ordering::Release);
}

/// Puts all loads so far before all loads to come, as seen against a device of this kind.
#[inline]
pub(crate) fn load_barrier(kind: DeviceKind) {
    #[cfg(target_arch = "aarch64")]
    if kind == DeviceKind::Pcie {
        // SAFETY: a barrier touches no memory and no register.
        unsafe { core::arch::asm!("dmb oshld", options(nostack, preserves_flags)) };
        return;
    }
    let _ = kind;
    fence(Ordering::Acquire);
}

/// Puts streaming (non-temporal, direct) stores before all stores to come.
#[inline]
pub(crate) fn streaming_barrier() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: `sfence` is part of every x86-64 processor and touches no memory.
    unsafe {
        core::arch::x86_64::_mm_sfence();
    }
    #[cfg(not(target_arch = "x86_64"))]
    fence(Ordering::SeqCst);
}

/// Asks for the cache line of `address`, to be read soon. A hint: any address will do.
#[inline]
pub(crate) fn prefetch_read(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is a hint, never faults, and SSE is part of every x86-64 processor.
    unsafe {
        core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(address.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a prefetch is a hint and never faults.
    unsafe {
        core::arch::asm!("prfm pldl1keep, [{}]", in(reg) address, options(nostack, readonly, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = address;
}

/// Asks for the cache line of `address` to be ours alone, to be written soon. A hint.
#[inline]
pub(crate) fn prefetch_write(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: `prefetchw` is a hint that never faults; 64-bit processors that lack it treat it as a
    // no-operation.
    unsafe {
        core::arch::asm!("prefetchw [{}]", in(reg) address, options(nostack, readonly, preserves_flags));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a prefetch is a hint and never faults.
    unsafe {
        core::arch::asm!("prfm pstl1keep, [{}]", in(reg) address, options(nostack, readonly, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = address;
}
