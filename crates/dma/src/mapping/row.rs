//! Memory that lies in a row in the machine, and stays there: for a device that no IOMMU translates
//! addresses for.
//!
//! ```text
//!   file of huge pages    | 0 | 1 | 2 | 3 | 4 |       as the kernel has them left
//!   where they lie          9   4   7   5   6
//!   mapped                | 1 | 3 | 4 | 2 |           4, 5, 6, 7: one address is enough for a device
//! ```
//!
//! A huge page is 2 MiB in a row, so more is a matter of finding some that are each other's
//! neighbours: of those that are free more and more are taken until there is such a row, and what is
//! not of it goes back. Then all of it is registered as a buffer of an io_uring that does nothing
//! else: so the kernel must not move it, which huge pages alone do not promise.

use std::ffi::c_void;
use std::ptr::NonNull;

use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags};
use rustix::io::Errno;
use rustix::io_uring::{IoringRegisterOp, io_uring_params, io_uring_register, io_uring_setup};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::HUGE_PAGE;

/// Where memory lies, which does not move as long as this is there.
#[derive(Debug)]
pub(super) struct Row {
    /// Of its first byte, as devices see it.
    pub(super) address: u64,
    /// A ring that has it for a buffer.
    _held: OwnedFd,
}

/// A mapping of ours, until it is given to somebody.
struct Stretch {
    base: NonNull<u8>,
    len_bytes: usize,
}

const FRAME_BYTES: u64 = 4096;
/// Frames of a huge page.
const FRAMES: u64 = HUGE_PAGE as u64 / FRAME_BYTES;
/// Longest buffer that a ring takes.
const BUFFER_MAX: usize = 1 << 30;
/// What tells how many pages are free, and how many of these are promised to others.
const POOL: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB";
/// What says of a page of memory that it is there, and where (Documentation/admin-guide/mm/pagemap.rst).
const IS_THERE: u64 = 1 << 63;
const FRAME: u64 = (1 << 55) - 1;

/// The pages are there, and nowhere beside each other.
pub(super) const SCATTERED: Errno = Errno::NOBUFS;
/// The kernel does not tell this process where memory lies.
pub(super) const HIDDEN: Errno = Errno::ACCESS;

/// So often is tried, and so long is waited at most before each time but the first.
const TRIES: u32 = 8;
const PAUSE_MAX_NS: i64 = 20_000_000;

/// Zeroed memory of `len_bytes`, whole huge pages.
///
/// Another process that looks for a row has more pages meanwhile than it keeps, so a kernel that has
/// too few is asked again a little later, if the machine has enough.
pub(super) fn lay(len_bytes: usize) -> Result<(NonNull<u8>, Row), Errno> {
    let wanted = len_bytes / HUGE_PAGE;
    let has_enough = || pages("nr_hugepages").is_some_and(|all| all >= wanted);
    again(|| lay_once(wanted), has_enough, pause)
}

/// Tries until there is enough, a bounded number of times.
fn again<T>(
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

/// Waits for a random time, so that two who have waited for each other do not go on at once.
fn pause() {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // What processes differ in: the nanosecond, and who they are.
    let id = i64::from(rustix::process::getpid().as_raw_nonzero().get());
    let drawn = (now.tv_nsec ^ id.wrapping_mul(0x9e37_79b9)).rem_euclid(PAUSE_MAX_NS);
    let pause = rustix::time::Timespec { tv_sec: 0, tv_nsec: drawn };
    // One that a signal cuts short is short.
    let _ = rustix::thread::nanosleep(&pause);
}

fn lay_once(wanted: usize) -> Result<(NonNull<u8>, Row), Errno> {
    let free = free_pages().unwrap_or(wanted);
    let mut taken = wanted;
    loop {
        if let Some(found) = lay_among(wanted, taken)? {
            return Ok(found);
        }
        if taken >= free {
            return Err(SCATTERED);
        }
        taken = (taken * 2).min(free);
    }
}

/// Takes so many pages, and maps the wanted ones of them if there are as many in a row.
fn lay_among(wanted: usize, taken: usize) -> Result<Option<(NonNull<u8>, Row)>, Errno> {
    let flags = MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB | MemfdFlags::CLOEXEC;
    let file = rustix::fs::memfd_create("tenmil", flags)?;
    rustix::fs::ftruncate(&file, (taken * HUGE_PAGE) as u64)?;
    let mut stretch = Stretch::new(&file, taken * HUGE_PAGE)?;
    stretch.populate()?;
    let Some(order) = row_of(&frames(&stretch)?, wanted) else { return Ok(None) };
    stretch.arrange(&file, &order)?;
    for page in (0..taken).filter(|page| !order.contains(page)) {
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&file, hole, (page * HUGE_PAGE) as u64, HUGE_PAGE as u64)?;
    }
    stretch.populate()?;
    let held = hold(&stretch)?;
    // They may have been moved until just now.
    let frames = frames(&stretch)?;
    if !is_row(&frames) {
        return Ok(None);
    }
    let address = frames.first().ok_or(Errno::INVAL)? * FRAME_BYTES;
    let base = stretch.base;
    std::mem::forget(stretch);
    Ok(Some((base, Row { address, _held: held })))
}

/// The first `wanted` pages that follow each other, in the order in which they lie.
fn row_of(frames: &[u64], wanted: usize) -> Option<Vec<usize>> {
    let mut order: Vec<usize> = (0..frames.len()).collect();
    order.sort_unstable_by_key(|page| frames[*page]);
    let is_row =
        |pages: &&[usize]| pages.windows(2).all(|pair| frames[pair[0]] + FRAMES == frames[pair[1]]);
    order.windows(wanted.max(1)).find(is_row).map(<[usize]>::to_vec)
}

fn is_row(frames: &[u64]) -> bool {
    frames.windows(2).all(|pair| pair[0] + FRAMES == pair[1])
}

/// Where each huge page lies, as the number of its first frame.
fn frames(stretch: &Stretch) -> Result<Vec<u64>, Errno> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let told = rustix::fs::open("/proc/self/pagemap", flags, Mode::empty())?;
    let first = stretch.base.as_ptr() as u64 / FRAME_BYTES;
    let pages = (stretch.len_bytes / HUGE_PAGE) as u64;
    let frame = |page: u64| {
        let mut word = [0; 8];
        let read = rustix::io::pread(&told, &mut word, (first + page * FRAMES) * 8)?;
        frame_of(u64::from_ne_bytes(word)).filter(|_| read == word.len()).ok_or(HIDDEN)
    };
    (0..pages).map(frame).collect()
}

/// The frame of a page, if it is there and this process may know.
fn frame_of(word: u64) -> Option<u64> {
    Some(word & FRAME).filter(|frame| word & IS_THERE != 0 && *frame != 0)
}

/// How many pages somebody may still have.
fn free_pages() -> Option<usize> {
    pages("free_hugepages")?.checked_sub(pages("resv_hugepages")?)
}

/// A number of the pool's.
fn pages(name: &str) -> Option<usize> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let file = rustix::fs::open(format!("{POOL}/{name}"), flags, Mode::empty()).ok()?;
    let mut text = [0; 32];
    let len = rustix::io::read(&file, &mut text).ok()?;
    std::str::from_utf8(&text[..len]).ok()?.trim().parse::<usize>().ok()
}

/// Has the kernel keep all of it where it is, until what is returned is closed.
fn hold(stretch: &Stretch) -> Result<OwnedFd, Errno> {
    let mut parameters = io_uring_params::default();
    // SAFETY: the parameters are zeroes, which ask for a ring as it is usually made and name no memory.
    let ring = unsafe { io_uring_setup(1, &mut parameters) }?;
    let starts = (0..stretch.len_bytes).step_by(BUFFER_MAX);
    let buffer = |start: usize| libc::iovec {
        iov_base: stretch.base.as_ptr().wrapping_add(start).cast(),
        iov_len: (stretch.len_bytes - start).min(BUFFER_MAX),
    };
    let buffers: Vec<libc::iovec> = starts.map(buffer).collect();
    let count = u32::try_from(buffers.len()).map_err(|_| Errno::INVAL)?;
    let at: *const libc::iovec = buffers.as_ptr();
    // SAFETY: the kernel reads `count` pairs, whose stretches are mapped. It keeps a count on their
    // pages, and as nothing is ever submitted to the ring, never touches a byte of them.
    unsafe {
        io_uring_register(&ring, IoringRegisterOp::RegisterBuffers, at.cast::<c_void>(), count)
    }?;
    Ok(ring)
}

#[cfg(test)]
impl Row {
    /// One that lies there as long as `held` is open.
    pub(super) fn at(address: u64, held: OwnedFd) -> Self {
        Self { address, _held: held }
    }
}

impl Stretch {
    /// All of a file of huge pages. The kernel refuses it if it has fewer.
    fn new(file: &OwnedFd, len_bytes: usize) -> Result<Self, Errno> {
        // SAFETY: a null hint without MAP_FIXED: the kernel picks a free range, nothing is replaced.
        let base =
            unsafe { map(std::ptr::null_mut(), len_bytes, MapFlags::SHARED, file.as_fd(), 0) }?;
        Ok(Self { base, len_bytes })
    }

    /// Has every page be there.
    fn populate(&self) -> Result<(), Errno> {
        let base = self.base.as_ptr().cast();
        // SAFETY: the range is ours; populating changes no byte.
        unsafe { rustix::mm::madvise(base, self.len_bytes, Advice::LinuxPopulateWrite) }
    }

    /// Becomes so many pages of the file as `order` names, in that order.
    fn arrange(&mut self, file: &OwnedFd, order: &[usize]) -> Result<(), Errno> {
        for (at, page) in order.iter().enumerate() {
            let place = self.base.as_ptr().wrapping_add(at * HUGE_PAGE).cast();
            let offset = (page * HUGE_PAGE) as u64;
            let flags = MapFlags::SHARED | MapFlags::FIXED;
            // SAFETY: `order` has no more pages than this has, so the place is ours, and nobody has
            // been told of it yet.
            unsafe { map(place, HUGE_PAGE, flags, file.as_fd(), offset) }?;
        }
        let kept = order.len() * HUGE_PAGE;
        if kept < self.len_bytes {
            let rest = self.base.as_ptr().wrapping_add(kept).cast();
            // SAFETY: the end of what is ours, of which nobody has been told yet.
            unsafe { rustix::mm::munmap(rest, self.len_bytes - kept) }?;
            self.len_bytes = kept;
        }
        Ok(())
    }
}

impl Drop for Stretch {
    fn drop(&mut self) {
        // SAFETY: it is ours, and nobody has been told of it.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len_bytes) };
        debug_assert!(unmapped.is_ok(), "unmapping what was mapped cannot be refused");
    }
}

/// Maps a part of a file for reading and writing.
///
/// # Safety
///
/// With [`MapFlags::FIXED`] nobody holds on to what was mapped at `place`.
unsafe fn map(
    place: *mut c_void,
    len_bytes: usize,
    flags: MapFlags,
    file: BorrowedFd<'_>,
    offset: u64,
) -> Result<NonNull<u8>, Errno> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: what is replaced is the caller's; anything else the kernel puts where nothing is.
    let base = unsafe { rustix::mm::mmap(place, len_bytes, protection, flags, file, offset) }?;
    NonNull::new(base.cast::<u8>()).ok_or(Errno::NOMEM)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use rustix::io::Errno;

    use super::{FRAMES, IS_THERE, TRIES, again, frame_of, is_row, pause, row_of};

    #[test]
    fn too_few_pages_are_asked_for_again_and_not_for_ever() {
        let (tries, pauses) = (Cell::new(0), Cell::new(0));
        let run = |result: &dyn Fn(u32) -> Result<u32, Errno>, has_enough: bool| {
            tries.set(0);
            pauses.set(0);
            let attempt = || {
                tries.set(tries.get() + 1);
                result(tries.get())
            };
            let found = again(attempt, || has_enough, || pauses.set(pauses.get() + 1));
            (found, tries.get(), pauses.get())
        };
        let third = |count| if count == 3 { Ok(count) } else { Err(Errno::NOMEM) };
        assert_eq!(run(&third, true), (Ok(3), 3, 2));
        assert_eq!(run(&third, false), (Err(Errno::NOMEM), 1, 0));
        let never = |_| Err(Errno::NOMEM);
        assert_eq!(run(&never, true), (Err(Errno::NOMEM), TRIES, TRIES - 1));
        let other = |_| Err(super::SCATTERED);
        assert_eq!(run(&other, true), (Err(super::SCATTERED), 1, 0));
        pause();
    }

    fn frames(places: &[u64]) -> Vec<u64> {
        places.iter().map(|place| place * FRAMES).collect()
    }

    #[test]
    fn neighbours_are_found_wherever_they_are_and_put_in_order() {
        let found = |places: &[u64], wanted| row_of(&frames(places), wanted);
        assert_eq!(found(&[9, 4, 7, 5, 6], 4), Some(vec![1, 3, 4, 2]));
        assert_eq!(found(&[9, 4, 7, 5, 6], 5), None);
        assert_eq!(found(&[9], 1), Some(vec![0]));
        assert_eq!(found(&[20, 10, 11, 30, 31, 32], 3), Some(vec![3, 4, 5]));
        assert_eq!(found(&[1, 3, 5, 7], 2), None);
        assert_eq!(found(&[], 1), None);
        // Half a page apart is not in a row.
        assert_eq!(row_of(&[512, 512 + 256, 1024 + 256], 3), None);
    }

    #[test]
    fn a_row_has_each_page_right_behind_the_one_before() {
        assert!(is_row(&frames(&[4, 5, 6])) && is_row(&frames(&[4])));
        assert!(!is_row(&frames(&[4, 6])) && !is_row(&frames(&[5, 4])) && !is_row(&[512, 513]));
    }

    #[test]
    fn a_page_that_is_not_there_or_hidden_lies_nowhere() {
        assert_eq!(frame_of(IS_THERE | 1 << 55 | 77), Some(77), "beside a mark");
        assert_eq!(frame_of(IS_THERE), None, "to whoever may not know");
        assert_eq!(frame_of(77), None);
    }
}
