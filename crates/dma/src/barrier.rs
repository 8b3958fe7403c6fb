//! Memory barriers between the host and a device.
//!
//! | | x86-64 | aarch64, a thread | aarch64, a PCIe device |
//! |---|---|---|---|
//! | entries before doorbell | stores are ordered; `sfence` after non-temporal ones | release | `dmb oshst` |
//! | phase before the rest | loads are ordered | acquire | `dmb oshld` |
//!
//! Rust's fences order against other cores, which form the inner shareable domain of aarch64. A PCIe
//! device is in the outer shareable domain, so its barrier is explicit assembly.

use super::sync::{Ordering, fence};

/// Kind of the device that accesses a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// PCIe function: accesses memory by DMA, without sharing a core's cache by design.
    Pcie,
    /// Controller emulated by a thread of this or another process: accesses memory through the cache.
    Emulated,
}

/// Orders all previous stores before all later stores, as seen by a device of this kind.
#[inline]
pub(crate) fn store_barrier(kind: DeviceKind) {
    #[cfg(target_arch = "aarch64")]
    if kind == DeviceKind::Pcie {
        // SAFETY: a barrier accesses no memory and no register.
        unsafe { core::arch::asm!("dmb oshst", options(nostack, preserves_flags)) };
        return;
    }
    let _ = kind;
    // Emits no instruction on x86-64, where stores are ordered; prevents reordering by the compiler.
    fence(Ordering::Release);
}

/// Orders all previous loads before all later loads, with respect to a device of this kind.
#[inline]
pub(crate) fn load_barrier(kind: DeviceKind) {
    #[cfg(target_arch = "aarch64")]
    if kind == DeviceKind::Pcie {
        // SAFETY: a barrier accesses no memory and no register.
        unsafe { core::arch::asm!("dmb oshld", options(nostack, preserves_flags)) };
        return;
    }
    let _ = kind;
    fence(Ordering::Acquire);
}

/// Orders non-temporal and direct stores before all later stores.
#[inline]
pub(crate) fn streaming_barrier() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: `sfence` is part of every x86-64 processor and accesses no memory.
    unsafe {
        core::arch::x86_64::_mm_sfence();
    }
    #[cfg(not(target_arch = "x86_64"))]
    fence(Ordering::SeqCst);
}

/// Prefetches the cache line of `address` for reading. A hint: any address is permitted.
#[inline]
pub(crate) fn prefetch_read(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is a hint that never faults, and SSE is part of every x86-64 processor.
    unsafe {
        core::arch::x86_64::_mm_prefetch::<{ core::arch::x86_64::_MM_HINT_T0 }>(address.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a prefetch is a hint that never faults.
    unsafe {
        core::arch::asm!("prfm pldl1keep, [{}]", in(reg) address, options(nostack, readonly, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = address;
}

/// Prefetches the cache line of `address` for writing, in exclusive state. A hint.
#[inline]
pub(crate) fn prefetch_write(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: `prefetchw` is a hint that never faults; 64-bit processors without it treat it as a
    // no-operation.
    unsafe {
        core::arch::asm!("prefetchw [{}]", in(reg) address, options(nostack, readonly, preserves_flags));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a prefetch is a hint that never faults.
    unsafe {
        core::arch::asm!("prfm pstl1keep, [{}]", in(reg) address, options(nostack, readonly, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = address;
}
