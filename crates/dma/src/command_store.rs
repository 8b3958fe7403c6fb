//! Ways to put 64 bytes into a submission ring.
//!
//! A ring that a PCIe device reads is never read by us, so it gains nothing from the cache: the
//! streaming stores leave the cache to those who need it, and `movdir64b` writes the line whole. A
//! ring that a thread reads is the opposite case: there a streaming store only pushes the line out
//! to memory and makes the other thread fetch it from there.
//!
//! Memory of the device's own is a third case: nothing there is cached, and each store goes over the
//! bus as it is. So they are whole words, as registers are written, whatever the processor has.

use core::fmt;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};

use crate::barrier::{DeviceKind, store_barrier, streaming_barrier};

/// How a command is stored into its ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandStore {
    /// Eight ordinary 64-bit stores.
    Plain,
    /// Eight streaming 64-bit stores.
    Sse2,
    /// One streaming 512-bit store.
    Avx512,
    /// One direct store of 64 bytes.
    Movdir64b,
    /// Eight volatile 64-bit stores, for a ring in memory of the device's own. Not one of
    /// [all](Self::ALL) to choose from: such a ring takes no other, and no other ring takes it.
    Device,
}

/// This processor cannot store a command that way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreNotSupported(pub CommandStore);

impl CommandStore {
    /// All ways, plainest first.
    pub const ALL: [Self; 4] = [Self::Plain, Self::Sse2, Self::Avx512, Self::Movdir64b];

    /// The way that suits a device of this kind on this processor.
    pub fn for_device(kind: DeviceKind) -> Self {
        match kind {
            DeviceKind::Emulated => Self::Plain,
            DeviceKind::Pcie => {
                let best = Self::ALL.into_iter().rev().find(|store| store.is_supported());
                best.unwrap_or(Self::Plain)
            }
        }
    }

    /// This way, if the processor has it.
    pub fn checked(self) -> Result<Self, StoreNotSupported> {
        if self.is_supported() { Ok(self) } else { Err(StoreNotSupported(self)) }
    }

    /// Whether the processor has it.
    pub fn is_supported(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return match self {
            Self::Plain | Self::Sse2 | Self::Device => true,
            Self::Avx512 => std::is_x86_feature_detected!("avx512f"),
            Self::Movdir64b => has_movdir64b(),
        };
        #[cfg(not(target_arch = "x86_64"))]
        return matches!(self, Self::Plain | Self::Device);
    }

    /// The name by which it is chosen on a command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Sse2 => "sse2",
            Self::Avx512 => "avx512",
            Self::Movdir64b => "movdir64b",
            Self::Device => "device",
        }
    }

    /// Stores `command` at `entry`.
    ///
    /// # Safety
    ///
    /// `entry` is aligned to 64 bytes and valid for writes of 64; nobody holds a reference to those
    /// bytes; `self` came from [`for_device`](Self::for_device) or [`checked`](Self::checked).
    #[inline]
    pub(crate) unsafe fn store(self, entry: NonNull<u64>, command: &[u64; 8]) {
        match self {
            // SAFETY: as this function was promised.
            Self::Plain => unsafe { store_plain(entry, command) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as this function was promised; SSE2 is part of every x86-64 processor.
            Self::Sse2 => unsafe { store_sse2(entry, command) },
            // SAFETY: as this function was promised. A copy of its own, so that the two above keep
            // their words in registers.
            _ => unsafe { self.store_at_once(entry, *command) },
        }
    }

    /// The ways that take all 64 bytes from memory, and the one that is slow anyway.
    ///
    /// # Safety
    ///
    /// As [`store`](Self::store).
    #[cold]
    unsafe fn store_at_once(self, entry: NonNull<u64>, command: [u64; 8]) {
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as this function was promised; the feature was checked when `self` was made.
            Self::Avx512 => unsafe { store_avx512(entry, &command) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as this function was promised; the feature was checked when `self` was made.
            Self::Movdir64b => unsafe { store_movdir64b(entry, &command) },
            // SAFETY: as this function was promised.
            Self::Device => unsafe { store_device(entry, &command) },
            // SAFETY: as this function was promised. Elsewhere no other way is ever chosen.
            _ => unsafe { store_plain(entry, &command) },
        }
    }

    /// Puts the stores made so far before the doorbell.
    #[inline]
    pub(crate) fn publish(self, kind: DeviceKind) {
        match self {
            Self::Plain => store_barrier(kind),
            // For memory of the device's own the first is what orders stores on aarch64, and the second
            // empties the buffers of an x86-64 processor, should the kernel have mapped the BAR as
            // write-combining. There the first emits nothing, so one arm does for all.
            Self::Sse2 | Self::Avx512 | Self::Movdir64b | Self::Device => {
                store_barrier(kind);
                streaming_barrier();
            }
        }
    }
}

/// # Safety
///
/// As [`CommandStore::store`].
#[inline]
unsafe fn store_plain(entry: NonNull<u64>, command: &[u64; 8]) {
    for (index, word) in command.iter().enumerate() {
        // SAFETY: `index < 8`, so the word lies in the 64 bytes that the caller vouches for.
        let target = unsafe { entry.add(index) };
        // SAFETY: aligned and valid, and whoever reads it does so by atomics or by DMA.
        unsafe { AtomicU64::from_ptr(target.as_ptr()) }.store(*word, Ordering::Relaxed);
    }
}

/// # Safety
///
/// As [`CommandStore::store`].
unsafe fn store_device(entry: NonNull<u64>, command: &[u64; 8]) {
    for (index, word) in command.iter().enumerate() {
        // SAFETY: `index < 8`, so the word lies in the 64 bytes that the caller vouches for.
        let target = unsafe { entry.add(index) };
        // SAFETY: aligned and valid for writes. Volatile, so that each word is one store of 8 bytes:
        // a bus may refuse any other, and what emulates a device does.
        unsafe { target.write_volatile(*word) };
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn store_sse2(entry: NonNull<u64>, command: &[u64; 8]) {
    use core::arch::x86_64::_mm_stream_si64;
    // Word by word, from registers: a wide load of words that were just stored one by one has to
    // wait until they, and every streaming store before them, have left the processor. The eight
    // meet again in the write-combining buffer of their line.
    for (index, word) in command.iter().enumerate() {
        // SAFETY: `index < 8`: inside the 64 bytes that the caller vouches for.
        let target = unsafe { entry.add(index) };
        // SAFETY: aligned, valid for writes; SSE2 is part of every x86-64 processor.
        unsafe { _mm_stream_si64(target.as_ptr().cast(), word.cast_signed()) };
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn store_avx512(entry: NonNull<u64>, command: &[u64; 8]) {
    use core::arch::x86_64::{_mm512_loadu_si512, _mm512_stream_si512};
    // SAFETY: `command` is 64 readable bytes; the load takes any alignment.
    let value = unsafe { _mm512_loadu_si512(command.as_ptr().cast()) };
    // SAFETY: aligned to 64 and valid for writes of 64, as the caller vouches.
    unsafe { _mm512_stream_si512(entry.as_ptr().cast(), value) };
}

#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn store_movdir64b(entry: NonNull<u64>, command: &[u64; 8]) {
    // SAFETY: reads the 64 bytes of `command`, writes the 64 aligned bytes at `entry`, which the
    // caller vouches for; the instruction is there, as checked when the way was chosen.
    unsafe {
        core::arch::asm!(
            "movdir64b {entry}, [{command}]",
            entry = in(reg) entry.as_ptr(),
            command = in(reg) command.as_ptr(),
            options(nostack, preserves_flags),
        );
    }
}

/// CPUID leaf 7, sub-leaf 0, ECX bit 28. The standard library does not know this feature by name.
#[cfg(target_arch = "x86_64")]
fn has_movdir64b() -> bool {
    use core::arch::x86_64::{__cpuid, __cpuid_count};
    __cpuid(0).eax >= 7 && __cpuid_count(7, 0).ecx & (1 << 28) != 0
}

impl fmt::Display for StoreNotSupported {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "command store is `{}`, and this processor has only", self.0.name())?;
        for store in CommandStore::ALL.into_iter().filter(|store| store.is_supported()) {
            write!(out, " `{}`", store.name())?;
        }
        Ok(())
    }
}

impl core::error::Error for StoreNotSupported {}

#[cfg(test)]
mod tests {
    use core::ptr::NonNull;

    use super::CommandStore;
    use crate::DeviceKind;

    #[repr(align(64))]
    struct Line([u64; 8]);

    #[test]
    fn every_way_this_processor_has_stores_the_same_bytes() {
        let command = [1, 2 << 40, 3, u64::MAX, 5, 6, 7, 1 << 63];
        let all = CommandStore::ALL.into_iter().chain([CommandStore::Device]);
        for store in all.filter(|store| store.is_supported()) {
            let mut line = Line([0; 8]);
            let entry = NonNull::from(&mut line.0).cast();
            // SAFETY: 64 bytes, aligned, owned by this test; the way was filtered by support.
            unsafe { store.store(entry, &command) };
            store.publish(DeviceKind::Pcie);
            assert_eq!(line.0, command, "{}", store.name());
        }
    }

    #[test]
    fn a_thread_gets_plain_stores_and_a_refusal_names_what_there_is() {
        assert_eq!(CommandStore::for_device(DeviceKind::Emulated), CommandStore::Plain);
        for store in CommandStore::ALL {
            if let Err(error) = store.checked() {
                assert!(
                    error.to_string().contains(store.name()) && error.to_string().contains("plain")
                );
            }
        }
    }
}
