//! Physically contiguous, pinned memory, for a device without address translation by an IOMMU.
//!
//! ```text
//!   file of huge pages    | 0 | 1 | 2 | 3 | 4 |       as allocated by the kernel
//!   physical location       9   4   7   5   6
//!   mapped                | 1 | 3 | 4 | 2 |           4, 5, 6, 7: one address is sufficient for a device
//! ```
//!
//! A huge page is 2 MiB of contiguous memory; larger ranges require adjacent huge pages. More and more
//! free pages are allocated until they contain a sufficiently long run, and the others are freed. Then
//! the run is registered as a buffer of an otherwise unused io_uring: this pins the pages, which huge
//! pages alone do not guarantee.

use std::ffi::c_void;
use std::ptr::NonNull;

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::io_uring::{IoringRegisterOp, io_uring_params, io_uring_register, io_uring_setup};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::HUGE_PAGE;

/// Pinned contiguous memory, which does not move as long as this exists.
#[derive(Debug)]
pub(super) struct ContiguousMemory {
    /// Physical address of the first byte, as used by devices.
    pub(super) address: u64,
    /// io_uring that has the memory registered as a buffer.
    _held: OwnedFd,
}

/// Mapping that is unmapped on drop, until it is released to its user.
struct OwnedMapping {
    base: NonNull<u8>,
    len_bytes: usize,
}

const FRAME_BYTES: u64 = 4096;
/// Page frames per huge page.
const FRAMES: u64 = HUGE_PAGE as u64 / FRAME_BYTES;
/// Maximum length of a registered buffer.
const BUFFER_MAX: usize = 1 << 30;
/// Directory with the numbers of free and reserved huge pages.
const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";
/// Page present bit of a pagemap entry; [`FRAME`] is its frame number
/// (Documentation/admin-guide/mm/pagemap.rst).
const IS_THERE: u64 = 1 << 63;
const FRAME: u64 = (1 << 55) - 1;

/// Error: enough pages are free, but not adjacent.
pub(super) const SCATTERED: Errno = Errno::NOBUFS;
/// Error: the kernel does not report physical addresses to this process.
pub(super) const HIDDEN: Errno = Errno::ACCESS;

/// Maximum number of attempts, and maximum pause before each but the first.
const TRIES: u32 = 8;
const PAUSE_MAX_NS: i64 = 20_000_000;

/// Allocates zeroed memory of `len_bytes`, whole huge pages.
///
/// Another process searching for a run temporarily has more pages than it keeps. Therefore the search is
/// repeated after a pause if the system has enough huge pages in total.
pub(super) fn allocate_contiguous(
    len_bytes: usize,
) -> Result<(NonNull<u8>, ContiguousMemory), Errno> {
    let wanted = len_bytes / HUGE_PAGE;
    let has_enough = || huge_page_count("nr_hugepages").is_some_and(|all| all >= wanted);
    retry_allocation(|| try_allocate(wanted), has_enough, sleep_random)
}

/// Repeats the attempt until there are enough pages, up to a limit.
fn retry_allocation<T>(
    mut attempt: impl FnMut() -> Result<T, Errno>,
    has_enough: impl Fn() -> bool,
    mut pause: impl FnMut(),
) -> Result<T, Errno> {
    for _ in 1..TRIES {
        match attempt() {
            Err(Errno::NOMEM) if has_enough() => pause(),
            other => return other,
        }
    }
    attempt()
}

/// Sleeps for a random time, so that two processes waiting for each other do not continue at the same
/// time.
fn sleep_random() {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // Processes differ in the nanosecond and in their id.
    let id = i64::from(rustix::process::getpid().as_raw_nonzero().get());
    let drawn = (now.tv_nsec ^ id.wrapping_mul(0x9e37_79b9)).rem_euclid(PAUSE_MAX_NS);
    let pause = rustix::time::Timespec { tv_sec: 0, tv_nsec: drawn };
    // A pause interrupted by a signal is simply shorter.
    let _ = rustix::thread::nanosleep(&pause);
}

fn try_allocate(wanted: usize) -> Result<(NonNull<u8>, ContiguousMemory), Errno> {
    let free = free_huge_pages().unwrap_or(wanted);
    let mut taken = wanted;
    loop {
        if let Some(found) = find_contiguous_run(wanted, taken)? {
            return Ok(found);
        }
        if taken >= free {
            return Err(SCATTERED);
        }
        taken = (taken * 2).min(free);
    }
}

/// Allocates `taken` pages, and maps `wanted` of them if they contain a contiguous run.
fn find_contiguous_run(
    wanted: usize,
    taken: usize,
) -> Result<Option<(NonNull<u8>, ContiguousMemory)>, Errno> {
    let flags = MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB | MemfdFlags::CLOEXEC;
    let file = rustix::fs::memfd_create("tenmil", flags)?;
    rustix::fs::ftruncate(&file, (taken * HUGE_PAGE) as u64)?;
    let mut stretch = OwnedMapping::new(&file, taken * HUGE_PAGE)?;
    stretch.populate()?;
    let Some(order) = find_adjacent_pages(&frame_numbers(&stretch)?, wanted) else {
        return Ok(None);
    };
    stretch.remap_in_order(&file, &order)?;
    for page in (0..taken).filter(|page| !order.contains(page)) {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&file, hole, (page * HUGE_PAGE) as u64, HUGE_PAGE as u64)?;
    }
    stretch.populate()?;
    let held = pin_pages(&stretch)?;
    // The kernel may have moved pages until they were registered.
    let frames = frame_numbers(&stretch)?;
    if !is_contiguous(&frames) {
        return Ok(None);
    }
    let address = frames.first().ok_or(Errno::INVAL)? * FRAME_BYTES;
    let base = stretch.base;
    std::mem::forget(stretch);
    Ok(Some((base, ContiguousMemory { address, _held: held })))
}

/// Finds the first run of `wanted` adjacent pages, in physical order.
fn find_adjacent_pages(frames: &[u64], wanted: usize) -> Option<Vec<usize>> {
    let mut order: Vec<usize> = (0..frames.len()).collect();
    order.sort_unstable_by_key(|page| frames[*page]);
    let is_row =
        |pages: &&[usize]| pages.windows(2).all(|pair| frames[pair[0]] + FRAMES == frames[pair[1]]);
    order.windows(wanted.max(1)).find(is_row).map(<[usize]>::to_vec)
}

fn is_contiguous(frames: &[u64]) -> bool {
    frames.windows(2).all(|pair| pair[0] + FRAMES == pair[1])
}

/// Reads the first frame number of each huge page.
fn frame_numbers(stretch: &OwnedMapping) -> Result<Vec<u64>, Errno> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let reported = rustix::fs::open("/proc/self/pagemap", flags, Mode::empty())?;
    let first = stretch.base.as_ptr() as u64 / FRAME_BYTES;
    let pages = (stretch.len_bytes / HUGE_PAGE) as u64;
    let frame = |page: u64| {
        let mut word = [0; 8];
        let read = rustix::io::pread(&reported, &mut word, (first + page * FRAMES) * 8)?;
        frame_of_pagemap_entry(u64::from_ne_bytes(word))
            .filter(|_| read == word.len())
            .ok_or(HIDDEN)
    };
    (0..pages).map(frame).collect()
}

/// Frame number in a pagemap entry, if the page is present and this process may read it.
fn frame_of_pagemap_entry(word: u64) -> Option<u64> {
    Some(word & FRAME).filter(|frame| word & IS_THERE != 0 && *frame != 0)
}

/// Huge pages that are free and not reserved.
fn free_huge_pages() -> Option<usize> {
    huge_page_count("free_hugepages")?.checked_sub(huge_page_count("resv_hugepages")?)
}

/// Reads a counter of the huge page pool.
fn huge_page_count(name: &str) -> Option<usize> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let file = rustix::fs::open(format!("{POOL}/{name}"), flags, Mode::empty()).ok()?;
    let mut text = [0; 32];
    let len = rustix::io::read(&file, &mut text).ok()?;
    std::str::from_utf8(&text[..len]).ok()?.trim().parse::<usize>().ok()
}

/// Pins the whole mapping until the returned descriptor is closed.
fn pin_pages(stretch: &OwnedMapping) -> Result<OwnedFd, Errno> {
    let mut parameters = io_uring_params::default();
    // SAFETY: the parameters are zeroes, which request an ordinary ring and refer to no memory.
    let ring = unsafe { io_uring_setup(1, &mut parameters) }?;
    let starts = (0..stretch.len_bytes).step_by(BUFFER_MAX);
    let buffer = |start: usize| libc::iovec {
        iov_base: stretch.base.as_ptr().wrapping_add(start).cast(),
        iov_len: (stretch.len_bytes - start).min(BUFFER_MAX),
    };
    let buffers: Vec<libc::iovec> = starts.map(buffer).collect();
    let count = u32::try_from(buffers.len()).map_err(|_| Errno::INVAL)?;
    let at: *const libc::iovec = buffers.as_ptr();
    // SAFETY: the kernel reads `count` pairs, whose ranges are mapped. It holds references on their
    // pages, and as nothing is ever submitted to the ring, it never accesses their bytes.
    unsafe {
        io_uring_register(&ring, IoringRegisterOp::RegisterBuffers, at.cast::<c_void>(), count)
    }?;
    Ok(ring)
}

#[cfg(test)]
impl ContiguousMemory {
    /// Memory that stays at `address` as long as `held` is open.
    pub(super) fn from_pinned(address: u64, held: OwnedFd) -> Self {
        Self { address, _held: held }
    }
}

impl OwnedMapping {
    /// Maps a whole file of huge pages. Fails if the kernel has too few.
    fn new(file: &OwnedFd, len_bytes: usize) -> Result<Self, Errno> {
        // SAFETY: a null hint without MAP_FIXED: the kernel selects a free range, nothing is replaced.
        let base = unsafe {
            map_file(std::ptr::null_mut(), len_bytes, MapFlags::SHARED, file.as_fd(), 0)
        }?;
        Ok(Self { base, len_bytes })
    }

    /// Faults in every page.
    fn populate(&self) -> Result<(), Errno> {
        let base = self.base.as_ptr().cast();
        // SAFETY: the range belongs to this mapping; populating changes no byte.
        unsafe { rustix::mm::madvise(base, self.len_bytes, Advice::LinuxPopulateWrite) }
    }

    /// Remaps the range to the pages of the file listed in `order`, in that order.
    fn remap_in_order(&mut self, file: &OwnedFd, order: &[usize]) -> Result<(), Errno> {
        for (at, page) in order.iter().enumerate() {
            let place = self.base.as_ptr().wrapping_add(at * HUGE_PAGE).cast();
            let offset = (page * HUGE_PAGE) as u64;
            let flags = MapFlags::SHARED | MapFlags::FIXED;
            // SAFETY: `order` has no more pages than this mapping, so the place belongs to it, and the
            // address has not been handed out yet.
            unsafe { map_file(place, HUGE_PAGE, flags, file.as_fd(), offset) }?;
        }
        let kept = order.len() * HUGE_PAGE;
        if kept < self.len_bytes {
            let rest = self.base.as_ptr().wrapping_add(kept).cast();
            // SAFETY: the end of this mapping, whose address has not been handed out yet.
            unsafe { rustix::mm::munmap(rest, self.len_bytes - kept) }?;
            self.len_bytes = kept;
        }
        Ok(())
    }
}

impl Drop for OwnedMapping {
    fn drop(&mut self) {
        // SAFETY: the range belongs to this mapping, and its address has not been handed out.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len_bytes) };
        debug_assert!(unmapped.is_ok(), "unmapping what was mapped cannot be refused");
    }
}

/// Maps a part of a file for reading and writing.
///
/// # Safety
///
/// With [`MapFlags::FIXED`], nothing uses the previous mapping at `place`.
unsafe fn map_file(
    place: *mut c_void,
    len_bytes: usize,
    flags: MapFlags,
    file: BorrowedFd<'_>,
    offset: u64,
) -> Result<NonNull<u8>, Errno> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: the replaced range belongs to the caller; without FIXED the kernel selects a free range.
    let base = unsafe { rustix::mm::mmap(place, len_bytes, protection, flags, file, offset) }?;
    NonNull::new(base.cast::<u8>()).ok_or(Errno::NOMEM)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use rustix::io::Errno;

    use super::{
        FRAMES, IS_THERE, TRIES, find_adjacent_pages, frame_of_pagemap_entry, is_contiguous,
        retry_allocation, sleep_random,
    };

    #[test]
    fn allocation_is_retried_while_pages_are_missing_up_to_a_limit() {
        let (tries, pauses) = (Cell::new(0), Cell::new(0));
        let run = |result: &dyn Fn(u32) -> Result<u32, Errno>, has_enough: bool| {
            tries.set(0);
            pauses.set(0);
            let attempt = || {
                tries.set(tries.get() + 1);
                result(tries.get())
            };
            let found = retry_allocation(attempt, || has_enough, || pauses.set(pauses.get() + 1));
            (found, tries.get(), pauses.get())
        };
        let third = |count| if count == 3 { Ok(count) } else { Err(Errno::NOMEM) };
        assert_eq!(run(&third, true), (Ok(3), 3, 2));
        assert_eq!(run(&third, false), (Err(Errno::NOMEM), 1, 0));
        let never = |_| Err(Errno::NOMEM);
        assert_eq!(run(&never, true), (Err(Errno::NOMEM), TRIES, TRIES - 1));
        let other = |_| Err(super::SCATTERED);
        assert_eq!(run(&other, true), (Err(super::SCATTERED), 1, 0));
        sleep_random();
    }

    fn frame_numbers(places: &[u64]) -> Vec<u64> {
        places.iter().map(|place| place * FRAMES).collect()
    }

    #[test]
    fn adjacent_pages_are_found_in_any_order_and_sorted() {
        let found = |places: &[u64], wanted| find_adjacent_pages(&frame_numbers(places), wanted);
        assert_eq!(found(&[9, 4, 7, 5, 6], 4), Some(vec![1, 3, 4, 2]));
        assert_eq!(found(&[9, 4, 7, 5, 6], 5), None);
        assert_eq!(found(&[9], 1), Some(vec![0]));
        assert_eq!(found(&[20, 10, 11, 30, 31, 32], 3), Some(vec![3, 4, 5]));
        assert_eq!(found(&[1, 3, 5, 7], 2), None);
        assert_eq!(found(&[], 1), None);
        // Half a page apart is not contiguous.
        assert_eq!(find_adjacent_pages(&[512, 512 + 256, 1024 + 256], 3), None);
    }

    #[test]
    fn contiguous_run_has_consecutive_frames() {
        assert!(is_contiguous(&frame_numbers(&[4, 5, 6])) && is_contiguous(&frame_numbers(&[4])));
        assert!(
            !is_contiguous(&frame_numbers(&[4, 6]))
                && !is_contiguous(&frame_numbers(&[5, 4]))
                && !is_contiguous(&[512, 513])
        );
    }

    #[test]
    fn absent_or_hidden_page_has_no_frame() {
        assert_eq!(frame_of_pagemap_entry(IS_THERE | 1 << 55 | 77), Some(77), "beside a mark");
        assert_eq!(frame_of_pagemap_entry(IS_THERE), None, "hidden without CAP_SYS_ADMIN");
        assert_eq!(frame_of_pagemap_entry(77), None);
    }
}
