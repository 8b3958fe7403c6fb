//! Store instructions for a 64-byte command in a submission ring.
//!
//! The host never reads a ring of a PCIe device, so caching it has no benefit: non-temporal stores leave
//! the cache to other data, and `movdir64b` writes the whole line at once. A ring read by a thread is the
//! opposite case: a non-temporal store evicts the line to memory, from where the other thread has to
//! fetch it.
//!
//! Device memory is the third case: it is uncached, and each store is a bus transaction. It is written in
//! whole words, like registers, whatever the processor supports.

use core::fmt;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering};

use crate::barrier::{DeviceKind, store_barrier, streaming_barrier};

/// Instruction that stores a command into its ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommandStore {
    /// Eight ordinary 64-bit stores.
    Plain,
    /// Eight non-temporal 64-bit stores.
    Sse2,
    /// One direct store of 64 bytes.
    Movdir64b,
    /// Eight volatile 64-bit stores, for a ring in device memory. Not part of [`ALL`](Self::ALL): such a
    /// ring permits no other instruction, and no other ring uses this one.
    Device,
}

/// The processor does not support this store instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnsupportedStore(pub CommandStore);

impl CommandStore {
    /// All selectable instructions, simplest first.
    pub const ALL: [Self; 3] = [Self::Plain, Self::Sse2, Self::Movdir64b];

    /// Best instruction for a device of this kind on this processor.
    pub fn for_device(kind: DeviceKind) -> Self {
        match kind {
            DeviceKind::Emulated => Self::Plain,
            DeviceKind::Pcie => {
                let best = Self::ALL.into_iter().rev().find(|store| store.is_supported());
                best.unwrap_or(Self::Plain)
            }
        }
    }

    /// Returns this instruction if the processor supports it.
    pub fn check_supported(self) -> Result<Self, UnsupportedStore> {
        if self.is_supported() { Ok(self) } else { Err(UnsupportedStore(self)) }
    }

    /// Whether the processor supports it.
    pub fn is_supported(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        return match self {
            Self::Plain | Self::Sse2 | Self::Device => true,
            Self::Movdir64b => has_movdir64b(),
        };
        #[cfg(not(target_arch = "x86_64"))]
        return matches!(self, Self::Plain | Self::Device);
    }

    /// Name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Sse2 => "sse2",
            Self::Movdir64b => "movdir64b",
            Self::Device => "device",
        }
    }

    /// Stores `command` at `entry`.
    ///
    /// # Safety
    ///
    /// `entry` is aligned to 64 bytes and valid for writes of 64; no reference to those bytes exists;
    /// `self` came from [`for_device`](Self::for_device) or [`check_supported`](Self::check_supported).
    #[inline]
    pub(crate) unsafe fn store_command(self, entry: NonNull<u64>, command: &[u64; 8]) {
        match self {
            // SAFETY: the caller's promises to this function.
            Self::Plain => unsafe { store_plain(entry, command) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the caller's promises to this function; SSE2 is part of every x86-64 processor.
            Self::Sse2 => unsafe { store_sse2(entry, command) },
            // SAFETY: the caller's promises to this function. `command` is copied here, so that the two
            // cases above keep its words in registers.
            _ => unsafe { self.store_from_memory(entry, *command) },
        }
    }

    /// Stores with instructions that read all 64 bytes from memory, or to slow device memory.
    ///
    /// # Safety
    ///
    /// As for [`store_command`](Self::store_command).
    #[cold]
    unsafe fn store_from_memory(self, entry: NonNull<u64>, command: [u64; 8]) {
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the caller's promises to this function; the feature was checked when `self` was
            // made.
            Self::Movdir64b => unsafe { store_movdir64b(entry, &command) },
            // SAFETY: the caller's promises to this function.
            Self::Device => unsafe { store_to_device_memory(entry, &command) },
            // SAFETY: the caller's promises to this function. On other processors only this one is
            // selected.
            _ => unsafe { store_plain(entry, &command) },
        }
    }

    /// Orders the stores made so far before the doorbell.
    #[inline]
    pub(crate) fn order_before_doorbell(self, kind: DeviceKind) {
        match self {
            Self::Plain => store_barrier(kind),
            // For device memory, the first barrier orders stores on aarch64. The second one drains the
            // write-combining buffers of an x86-64 processor, in case the kernel has mapped the BAR as
            // write-combining. On x86-64 the first emits no instruction, so one arm serves both.
            Self::Sse2 | Self::Movdir64b | Self::Device => {
                store_barrier(kind);
                streaming_barrier();
            }
        }
    }
}

/// # Safety
///
/// As for [`CommandStore::store_command`].
#[inline]
unsafe fn store_plain(entry: NonNull<u64>, command: &[u64; 8]) {
    for (index, word) in command.iter().enumerate() {
        // SAFETY: `index < 8`, so the word is within the 64 bytes promised by the caller.
        let target = unsafe { entry.add(index) };
        // SAFETY: aligned and valid; all readers use atomics or DMA.
        unsafe { AtomicU64::from_ptr(target.as_ptr()) }.store(*word, Ordering::Relaxed);
    }
}

/// # Safety
///
/// As for [`CommandStore::store_command`].
unsafe fn store_to_device_memory(entry: NonNull<u64>, command: &[u64; 8]) {
    for (index, word) in command.iter().enumerate() {
        // SAFETY: `index < 8`, so the word is within the 64 bytes promised by the caller.
        let target = unsafe { entry.add(index) };
        // SAFETY: aligned and valid for writes. Volatile, so that each word is one store of 8 bytes: a
        // bus may reject any other size, and a device emulator does.
        unsafe { target.write_volatile(*word) };
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn store_sse2(entry: NonNull<u64>, command: &[u64; 8]) {
    use core::arch::x86_64::_mm_stream_si64;
    // Word by word from registers: a wide load of words that were just stored individually would have to
    // wait until they, and every previous non-temporal store, have left the processor. The eight stores
    // merge in the write-combining buffer of their line.
    for (index, word) in command.iter().enumerate() {
        // SAFETY: `index < 8`: within the 64 bytes promised by the caller.
        let target = unsafe { entry.add(index) };
        // SAFETY: aligned, valid for writes; SSE2 is part of every x86-64 processor.
        unsafe { _mm_stream_si64(target.as_ptr().cast(), word.cast_signed()) };
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn store_movdir64b(entry: NonNull<u64>, command: &[u64; 8]) {
    // SAFETY: reads the 64 bytes of `command` and writes the 64 aligned bytes at `entry`, as promised by
    // the caller; the instruction is supported, as checked when it was selected.
    unsafe {
        core::arch::asm!(
            "movdir64b {entry}, [{command}]",
            entry = in(reg) entry.as_ptr(),
            command = in(reg) command.as_ptr(),
            options(nostack, preserves_flags),
        );
    }
}

/// Checks CPUID leaf 7, sub-leaf 0, ECX bit 28. The standard library has no name for this feature.
#[cfg(target_arch = "x86_64")]
fn has_movdir64b() -> bool {
    use core::arch::x86_64::{__cpuid, __cpuid_count};
    __cpuid(0).eax >= 7 && __cpuid_count(7, 0).ecx & (1 << 28) != 0
}

impl fmt::Display for UnsupportedStore {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "command store is `{}`, and this processor has only", self.0.name())?;
        for store in CommandStore::ALL.into_iter().filter(|store| store.is_supported()) {
            write!(out, " `{}`", store.name())?;
        }
        Ok(())
    }
}

impl core::error::Error for UnsupportedStore {}

#[cfg(test)]
mod tests {
    use core::ptr::NonNull;

    use super::CommandStore;
    use crate::DeviceKind;

    #[repr(align(64))]
    struct Line([u64; 8]);

    #[test]
    fn every_supported_instruction_stores_the_same_bytes() {
        let command = [1, 2 << 40, 3, u64::MAX, 5, 6, 7, 1 << 63];
        let all = CommandStore::ALL.into_iter().chain([CommandStore::Device]);
        for store in all.filter(|store| store.is_supported()) {
            let mut line = Line([0; 8]);
            let entry = NonNull::from(&mut line.0).cast();
            // SAFETY: 64 bytes, aligned, owned by this test; the store method was filtered by support.
            unsafe { store.store_command(entry, &command) };
            store.order_before_doorbell(DeviceKind::Pcie);
            assert_eq!(line.0, command, "{}", store.name());
        }
    }

    #[test]
    fn emulated_device_gets_plain_stores_and_an_unsupported_store_error_lists_the_supported() {
        assert_eq!(CommandStore::for_device(DeviceKind::Emulated), CommandStore::Plain);
        for store in CommandStore::ALL {
            if let Err(error) = store.check_supported() {
                assert!(
                    error.to_string().contains(store.name()) && error.to_string().contains("plain")
                );
            }
        }
    }
}
