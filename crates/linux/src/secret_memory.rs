//! Memory for secrets: locked, absent from core dumps and from children, cleared on release.
//!
//! ```text
//!   allocate(32) ──► slot of 64 bytes ─┐
//!   allocate(48) ──► slot of 64 bytes ─┼─ chunk: mmap, mlock, MADV_DONTDUMP, MADV_WIPEONFORK
//!                          …           ┘
//!   allocate(1024) ─► slot of 1024 bytes ── another chunk
//! ```
//!
//! Slots have sizes of powers of two; a chunk has slots of one size. An empty chunk is unmapped,
//! except for the last one of its size.
//!
//! The kernel writes pages with `MADV_DONTDUMP` to no core dump, neither for a signal nor for
//! `gcore`, so the rest of the process can still be dumped and debugged. `memfd_secret` would hide
//! the pages from root as well, but splits the kernel's direct map, which slows the whole machine
//! down, and prevents hibernation.
//!
//! # Unsafe
//!
//! - A slot belongs to one [`SecretBuffer`] from allocation to drop, and slots do not overlap.
//! - A chunk is unmapped only when none of its slots is allocated.

use core::fmt;
use core::ops::{Deref, DerefMut};
use core::ptr::NonNull;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::mm::{Advice, MapFlags, ProtFlags};
use zeroize::Zeroize;

/// Bytes of a secret. All zero when allocated; overwritten on drop; `Debug` prints their number.
pub struct SecretBuffer {
    slot: NonNull<u8>,
    len: usize,
}

/// State of the memory for secrets of this process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SecretMemoryState {
    /// Mapped bytes.
    pub mapped_bytes: usize,
    /// Buffers in use.
    pub buffers: usize,
    /// Why some of the memory may be written to swap space, if it may.
    pub not_locked: Option<String>,
    /// Why some of the memory is in a core dump, if it is.
    pub dumped: Option<String>,
}

/// Chunks of this process.
struct Arena {
    chunks: Vec<Chunk>,
    not_locked: Option<String>,
    dumped: Option<String>,
}

/// Mapping that consists of slots of one size.
struct Chunk {
    base: NonNull<u8>,
    len_bytes: usize,
    slot_bytes: usize,
    /// Indexes of the slots that are not allocated.
    free: Vec<usize>,
}

/// Smallest slot: a cache line, which holds each key.
const SLOT_BYTES_MIN: usize = 64;
/// Smallest chunk. Four sizes of them fit into the 64 KiB that old systems allow to lock.
const CHUNK_BYTES_MIN: usize = 16 << 10;

static ARENA: Mutex<Arena> =
    Mutex::new(Arena { chunks: Vec::new(), not_locked: None, dumped: None });

// SAFETY: the buffer owns its slot, of which nothing else has a pointer; the memory is mapped for the
// whole process.
unsafe impl Send for SecretBuffer {}
// SAFETY: a shared buffer permits shared access to its bytes only.
unsafe impl Sync for SecretBuffer {}
// SAFETY: a chunk is accessed through the lock around the arena; its slots belong to their buffers.
unsafe impl Send for Chunk {}

impl SecretBuffer {
    /// Allocates `len` bytes.
    ///
    /// A kernel that does not lock the memory, or dumps it, is no error:
    /// [`secret_memory_state`] has the reason.
    ///
    /// # Errors
    ///
    /// If no memory can be mapped.
    pub fn allocate(len: usize) -> io::Result<Self> {
        let slot_bytes = len
            .max(SLOT_BYTES_MIN)
            .checked_next_power_of_two()
            .ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { slot: lock_arena().allocate(slot_bytes)?, len })
    }

    /// Allocates a copy of `bytes`.
    ///
    /// # Errors
    ///
    /// If no memory can be mapped.
    pub fn copy_of(bytes: &[u8]) -> io::Result<Self> {
        let mut copy = Self::allocate(bytes.len())?;
        copy.copy_from_slice(bytes);
        Ok(copy)
    }

    /// Shortens the buffer; the bytes behind `len` are overwritten.
    pub fn truncate(&mut self, len: usize) {
        if len < self.len {
            self[len..].zeroize();
            self.len = len;
        }
    }
}

/// State of the memory for secrets of this process.
pub fn secret_memory_state() -> SecretMemoryState {
    let arena = lock_arena();
    SecretMemoryState {
        mapped_bytes: arena.chunks.iter().map(|chunk| chunk.len_bytes).sum(),
        buffers: arena.chunks.iter().map(Chunk::used).sum(),
        not_locked: arena.not_locked.clone(),
        dumped: arena.dumped.clone(),
    }
}

/// Excludes the whole process from core dumps, and from being traced by other processes of its user.
/// For a program that ends soon and handles secrets in all of its memory.
///
/// # Errors
///
/// If the kernel refuses.
pub fn forbid_core_dumps() -> io::Result<()> {
    Ok(rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)?)
}

impl Arena {
    fn allocate(&mut self, slot_bytes: usize) -> io::Result<NonNull<u8>> {
        let mut fitting = self.chunks.iter_mut().filter(|chunk| chunk.slot_bytes == slot_bytes);
        if let Some(slot) = fitting.find_map(Chunk::allocate) {
            return Ok(slot);
        }
        let mut chunk = self.map_chunk(slot_bytes)?;
        let slot = chunk.allocate().ok_or(io::ErrorKind::OutOfMemory)?;
        self.chunks.push(chunk);
        Ok(slot)
    }

    fn map_chunk(&mut self, slot_bytes: usize) -> io::Result<Chunk> {
        let page = rustix::param::page_size();
        let len_bytes = slot_bytes
            .max(CHUNK_BYTES_MIN)
            .checked_next_multiple_of(page)
            .ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: a null hint without MAP_FIXED: the kernel selects a free range, nothing is replaced.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                core::ptr::null_mut(),
                len_bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }?;
        let base = NonNull::new(base.cast::<u8>()).ok_or(io::ErrorKind::OutOfMemory)?;
        // SAFETY: the range was just mapped here; locking does not change its contents.
        if let Err(why) = unsafe { rustix::mm::mlock(base.as_ptr().cast(), len_bytes) } {
            self.not_locked = Some(format!("mlock of {len_bytes} bytes: {}", io::Error::from(why)));
        }
        // SAFETY: as above; the advice concerns core dumps.
        let advised =
            unsafe { rustix::mm::madvise(base.as_ptr().cast(), len_bytes, Advice::LinuxDontDump) };
        if let Err(why) = advised {
            self.dumped = Some(format!("MADV_DONTDUMP: {}", io::Error::from(why)));
        }
        // SAFETY: as above; the advice concerns children. Without it they have a copy, as of all other
        // memory, so a failure changes nothing that was promised.
        let _ = unsafe {
            rustix::mm::madvise(base.as_ptr().cast(), len_bytes, Advice::LinuxWipeOnFork)
        };
        let free = (0..len_bytes / slot_bytes).rev().collect();
        Ok(Chunk { base, len_bytes, slot_bytes, free })
    }

    fn release(&mut self, slot: NonNull<u8>) {
        let Some(at) = self.chunks.iter().position(|chunk| chunk.holds(slot)) else { return };
        let chunk = &mut self.chunks[at];
        chunk.release(slot);
        let (slot_bytes, is_empty) = (chunk.slot_bytes, chunk.used() == 0);
        let same = self.chunks.iter().filter(|chunk| chunk.slot_bytes == slot_bytes).count();
        if is_empty && same > 1 {
            let chunk = self.chunks.swap_remove(at);
            // SAFETY: the chunk was mapped here with this length, and none of its slots is allocated.
            let _ = unsafe { rustix::mm::munmap(chunk.base.as_ptr().cast(), chunk.len_bytes) };
        }
    }
}

impl Chunk {
    fn allocate(&mut self) -> Option<NonNull<u8>> {
        let at = self.free.pop()?;
        // SAFETY: the slot `at` lies within the mapping: indexes are below `len_bytes / slot_bytes`.
        Some(unsafe { self.base.add(at * self.slot_bytes) })
    }

    fn holds(&self, slot: NonNull<u8>) -> bool {
        let (base, slot) = (self.base.addr().get(), slot.addr().get());
        (base..base + self.len_bytes).contains(&slot)
    }

    fn release(&mut self, slot: NonNull<u8>) {
        let at = (slot.addr().get() - self.base.addr().get()) / self.slot_bytes;
        self.free.push(at);
    }

    /// Number of allocated slots.
    fn used(&self) -> usize {
        self.len_bytes / self.slot_bytes - self.free.len()
    }
}

fn lock_arena() -> MutexGuard<'static, Arena> {
    ARENA.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Deref for SecretBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the slot has at least `len` bytes, which are initialized: the kernel maps zeroes.
        // They are mapped until the buffer is dropped, and only this buffer refers to them.
        unsafe { core::slice::from_raw_parts(self.slot.as_ptr(), self.len) }
    }
}

impl DerefMut for SecretBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`; the buffer is borrowed exclusively.
        unsafe { core::slice::from_raw_parts_mut(self.slot.as_ptr(), self.len) }
    }
}

impl Drop for SecretBuffer {
    fn drop(&mut self) {
        self.zeroize();
        lock_arena().release(self.slot);
    }
}

impl fmt::Debug for SecretBuffer {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "SecretBuffer({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::{CHUNK_BYTES_MIN, SecretBuffer, secret_memory_state};

    /// Flags of the mapping that contains `address` (proc(5), smaps: `VmFlags`).
    fn mapping_flags(address: usize) -> String {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut is_it = false;
        for line in maps.lines() {
            let range = line.split(' ').next().unwrap().split_once('-');
            let number = |text| usize::from_str_radix(text, 16).ok();
            if let Some((Some(from), Some(to))) = range.map(|(from, to)| (number(from), number(to)))
            {
                is_it = (from..to).contains(&address);
            } else if let Some(flags) = line.strip_prefix("VmFlags: ").filter(|_| is_it) {
                return flags.to_owned();
            }
        }
        panic!("{address:x} is not mapped");
    }

    #[test]
    fn buffer_is_locked_and_in_no_core_dump_and_in_no_child() {
        let buffer = SecretBuffer::allocate(48).unwrap();
        let state = secret_memory_state();
        let flags = mapping_flags(buffer.as_ptr().addr());
        let has = |flag: &str| flags.split(' ').any(|found| found == flag);
        assert!(has("dd") && has("wf"), "{flags}");
        assert_eq!(has("lo"), state.not_locked.is_none(), "{flags}, {state:?}");
        assert_eq!(state.dumped, None);
    }

    #[test]
    fn buffers_do_not_overlap_and_memory_returns_to_its_baseline() {
        // A size that no other test of this process uses.
        let slot_bytes = CHUNK_BYTES_MIN / 2;
        let mapped = || {
            let arena = super::lock_arena();
            let fitting = arena.chunks.iter().filter(|chunk| chunk.slot_bytes == slot_bytes);
            fitting.map(super::Chunk::used).collect::<Vec<_>>()
        };
        let mut buffers: Vec<_> = (0..7_u8)
            .map(|fill| {
                let mut buffer = SecretBuffer::allocate(slot_bytes - 1).unwrap();
                assert!(buffer.iter().all(|byte| *byte == 0));
                buffer.fill(fill + 1);
                buffer
            })
            .collect();
        for (fill, buffer) in (1_u8..).zip(&buffers) {
            assert!(buffer.iter().all(|byte| *byte == fill), "buffer {fill}");
        }
        let places: BTreeSet<_> = buffers.iter().map(|buffer| buffer.as_ptr()).collect();
        assert_eq!((places.len(), mapped()), (7, vec![2, 2, 2, 1]));
        buffers.clear();
        assert_eq!(mapped(), [0]);
        // A used slot is handed out clean.
        assert!(SecretBuffer::allocate(slot_bytes).unwrap().iter().all(|byte| *byte == 0));
    }

    #[test]
    fn truncated_bytes_are_overwritten() {
        let mut buffer = SecretBuffer::copy_of(b"secret and more").unwrap();
        let behind = buffer[6..].as_ptr();
        buffer.truncate(6);
        assert_eq!(&*buffer, b"secret");
        buffer.truncate(9);
        assert_eq!(buffer.len(), 6);
        // SAFETY: the slot has 64 bytes, all initialized, and the buffer is alive and not borrowed.
        let rest = unsafe { core::slice::from_raw_parts(behind, 9) };
        assert_eq!(rest, [0; 9]);
        assert_eq!(format!("{buffer:?}"), "SecretBuffer(6 bytes)");
    }

    #[test]
    fn length_without_a_slot_size_is_refused() {
        assert!(SecretBuffer::allocate(usize::MAX).is_err());
        assert_eq!(SecretBuffer::allocate(0).unwrap().len(), 0);
    }
}
