//! Memory mappings obtained from the kernel.

mod contiguous_memory;

use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use self::contiguous_memory::ContiguousMemory;
use crate::sigbus_guard::replace_by_zeroed_memory;

/// Memory mapping, unmapped when dropped, unless it is the program's.
#[derive(Debug)]
pub struct MemoryMapping {
    base: NonNull<u8>,
    len_bytes: usize,
    backing: MemoryBacking,
    transparent_huge_pages: bool,
    /// Range returned by `mmap`, which for aligned private memory is larger than the usable range.
    whole: (NonNull<u8>, usize),
    shared: Option<OwnedFd>,
    row: Option<ContiguousMemory>,
}

/// Kind of memory behind a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryBacking {
    /// Ordinary private memory, with transparent huge pages where the kernel provides them.
    Private,
    /// A memfd, which another process can map too.
    Shared,
    /// A memfd with explicit 2 MiB pages, which must be reserved on the system.
    SharedHuge,
    /// Private 2 MiB pages that are physically contiguous and pinned. They must be reserved on the
    /// system, and only root can read their physical addresses.
    Contiguous,
    /// Memory that the program has mapped itself, and unmaps.
    OfProgram,
}

/// Error: the kernel did not provide the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MappingError {
    /// Requested bytes.
    pub len_bytes: usize,
    /// Requested kind of memory.
    pub backing: MemoryBacking,
    /// Error from the kernel.
    pub errno: rustix::io::Errno,
}

/// Size of a transparent or explicit huge page on x86-64, and on aarch64 with 4 KiB pages.
pub(crate) const HUGE_PAGE: usize = 2 << 20;
const PAGE: usize = 4096;

// SAFETY: the mapping is plain memory that is not tied to the creating thread; all access goes through
// `RegionTable`, by raw pointer and atomics, or word by word through atomics.
unsafe impl Send for MemoryMapping {}
// SAFETY: a shared `MemoryMapping` exposes only its address, length and descriptor, and words as atomics.
unsafe impl Sync for MemoryMapping {}

impl MemoryMapping {
    /// Maps zeroed memory of at least `len_bytes`, aligned to a huge page if it is that long.
    pub fn new(len_bytes: usize, backing: MemoryBacking) -> Result<Self, MappingError> {
        let refuse = |errno| MappingError { len_bytes, backing, errno };
        if len_bytes == 0 {
            return Err(refuse(rustix::io::Errno::INVAL));
        }
        match backing {
            MemoryBacking::Private => Self::map_private(len_bytes, true).map_err(refuse),
            MemoryBacking::Shared => Self::map_memfd(len_bytes, backing).map_err(refuse),
            MemoryBacking::SharedHuge => Self::map_memfd(len_bytes, backing).map_err(refuse),
            MemoryBacking::Contiguous => Self::map_contiguous(len_bytes).map_err(refuse),
            MemoryBacking::OfProgram => Err(refuse(rustix::io::Errno::INVAL)),
        }
    }

    /// Memory that the program has mapped: it is not unmapped when this is dropped.
    pub(crate) fn of_program(base: NonNull<u8>, len_bytes: usize) -> Self {
        Self {
            base,
            len_bytes,
            backing: MemoryBacking::OfProgram,
            transparent_huge_pages: false,
            whole: (base, len_bytes),
            shared: None,
            row: None,
        }
    }

    /// Maps private memory like [`new`](Self::new), without the advice to use huge pages.
    pub fn with_small_pages(len_bytes: usize) -> Result<Self, MappingError> {
        let refuse = |errno| MappingError { len_bytes, backing: MemoryBacking::Private, errno };
        if len_bytes == 0 {
            return Err(refuse(rustix::io::Errno::INVAL));
        }
        Self::map_private(len_bytes, false).map_err(refuse)
    }

    fn map_private(len_bytes: usize, wants_huge: bool) -> Result<Self, rustix::io::Errno> {
        let len_bytes = len_bytes.next_multiple_of(PAGE);
        let huge = wants_huge && len_bytes >= HUGE_PAGE;
        let whole_len = if huge { len_bytes + HUGE_PAGE } else { len_bytes };
        // SAFETY: a null hint without MAP_FIXED: the kernel selects a free range, nothing is replaced.
        let whole = unsafe {
            rustix::mm::mmap_anonymous(
                core::ptr::null_mut(),
                whole_len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }?;
        let whole = NonNull::new(whole.cast::<u8>()).ok_or(rustix::io::Errno::NOMEM)?;
        let skip = if huge { whole.as_ptr().align_offset(HUGE_PAGE) } else { 0 };
        // SAFETY: `skip` is below HUGE_PAGE, by which the mapping is longer than the usable range.
        let base = unsafe { whole.add(skip) };
        let transparent_huge_pages = huge && {
            // SAFETY: the range was just mapped here; the advice changes its backing, not its contents.
            let advised = unsafe {
                rustix::mm::madvise(base.as_ptr().cast(), len_bytes, Advice::LinuxHugepage)
            };
            advised.is_ok()
        };
        Ok(Self {
            base,
            len_bytes,
            backing: MemoryBacking::Private,
            transparent_huge_pages,
            whole: (whole, whole_len),
            shared: None,
            row: None,
        })
    }

    fn map_contiguous(len_bytes: usize) -> Result<Self, rustix::io::Errno> {
        let len_bytes = len_bytes.checked_next_multiple_of(HUGE_PAGE);
        let len_bytes = len_bytes.ok_or(rustix::io::Errno::NOMEM)?;
        let (base, row) = contiguous_memory::allocate_contiguous(len_bytes)?;
        Ok(Self {
            base,
            len_bytes,
            backing: MemoryBacking::Contiguous,
            transparent_huge_pages: false,
            whole: (base, len_bytes),
            shared: None,
            row: Some(row),
        })
    }

    fn map_memfd(len_bytes: usize, backing: MemoryBacking) -> Result<Self, rustix::io::Errno> {
        let (flags, page) = match backing {
            MemoryBacking::SharedHuge => (MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB, HUGE_PAGE),
            _ => (MemfdFlags::empty(), PAGE),
        };
        let len_bytes = len_bytes.next_multiple_of(page);
        let flags = flags | MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("tenmil", flags)?;
        rustix::fs::ftruncate(&file, len_bytes as u64)?;
        // Sealed, so that another process that maps it cannot truncate it.
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        // SAFETY: a null hint without MAP_FIXED: the kernel selects a free range, nothing is replaced.
        let base = unsafe {
            rustix::mm::mmap(
                core::ptr::null_mut(),
                len_bytes,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &file,
                0,
            )
        }?;
        let base = NonNull::new(base.cast::<u8>()).ok_or(rustix::io::Errno::NOMEM)?;
        let whole = (base, len_bytes);
        let shared = Some(file);
        Ok(Self {
            base,
            len_bytes,
            backing,
            transparent_huge_pages: false,
            whole,
            shared,
            row: None,
        })
    }

    /// Faults in every page, so that no I/O has to. Otherwise the first access to each page does.
    pub fn populate(&self) {
        // SAFETY: the range belongs to this mapping; populating changes no byte. Kernels before 5.14
        // reject it, and then pages are faulted in by the first access, as without this call.
        let populated = unsafe {
            rustix::mm::madvise(
                self.base.as_ptr().cast(),
                self.len_bytes,
                Advice::LinuxPopulateWrite,
            )
        };
        let _ = populated;
    }

    /// Returns the pages to the kernel, those of a memfd for all processes that map it. The addresses
    /// stay mapped and read as zeroes. Pinned contiguous pages are kept and zeroed, and pages of the program
    /// are left alone. Returns false if the kernel refuses.
    pub(crate) fn discard_pages(&self) -> bool {
        let advice = match self.backing {
            MemoryBacking::Private => Advice::LinuxDontNeed,
            MemoryBacking::Shared | MemoryBacking::SharedHuge => Advice::LinuxRemove,
            MemoryBacking::OfProgram => return true,
            MemoryBacking::Contiguous => {
                // SAFETY: the range belongs to this mapping, is mapped, and any byte is a valid byte; no
                // reference into it exists.
                unsafe { self.base.as_ptr().write_bytes(0, self.len_bytes) };
                return true;
            }
        };
        // SAFETY: the range belongs to this mapping and stays mapped; an access through a raw pointer
        // reads zeroes or gets new pages, and no reference into it exists.
        let discarded =
            unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), self.len_bytes, advice) };
        discarded.is_ok()
    }

    /// Releases the pages that [`discard_pages`](Self::discard_pages) keeps, once no device and no region uses them:
    /// the addresses stay mapped and read as zeroes, the pages return to the system.
    pub(crate) fn release_pinned_pages(&mut self) {
        if self.row.is_some() && replace_by_zeroed_memory(self.base.as_ptr().cast(), self.len_bytes)
        {
            // Released only after the replacement: a device must never find foreign data at an address of
            // this process.
            self.row = None;
        }
    }

    /// Address of the first byte.
    pub(crate) fn base_address(&self) -> NonNull<u8> {
        self.base
    }

    /// Usable bytes: the requested length, rounded up to whole pages.
    pub fn len_bytes(&self) -> usize {
        self.len_bytes
    }

    /// Kind of memory.
    pub fn backing(&self) -> MemoryBacking {
        self.backing
    }

    /// Physical address of the first byte, if the memory is [contiguous](MemoryBacking::Contiguous).
    pub fn physical_address(&self) -> Option<u64> {
        self.row.as_ref().map(|row| row.address)
    }

    /// Whether the kernel has accepted the advice to use transparent huge pages.
    pub fn has_transparent_huge_pages(&self) -> bool {
        self.transparent_huge_pages
    }

    /// Word at `offset`, which other processes that map the memory may change at any time. `None` if it
    /// is outside the mapping or not aligned.
    #[inline]
    pub fn shared_word(&self, offset: usize) -> Option<&AtomicU32> {
        let end = offset.checked_add(size_of::<AtomicU32>())?;
        if end > self.len_bytes || !offset.is_multiple_of(align_of::<AtomicU32>()) {
            return None;
        }
        // SAFETY: `offset` is inside the mapping, as just checked.
        let at = unsafe { self.base.add(offset) };
        // SAFETY: four bytes of the mapping, which is at least page-aligned, so they are aligned as
        // `offset` is. It stays mapped as long as `self` is borrowed, and the file behind it is sealed
        // against truncation. Any bytes are a valid word, and other accesses use atomics as well, or come
        // from another process.
        Some(unsafe { at.cast::<AtomicU32>().as_ref() })
    }

    /// Descriptor with which another process can map the same memory.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.shared.as_ref().map(AsFd::as_fd)
    }
}

impl Drop for MemoryMapping {
    fn drop(&mut self) {
        if self.backing == MemoryBacking::OfProgram {
            return;
        }
        let (base, len_bytes) = self.whole;
        // SAFETY: exactly the range returned by `mmap`, unmapped once; `RegionTable` drops mappings only
        // when no handle is left that could resolve an address in them.
        let unmapped = unsafe { rustix::mm::munmap(base.as_ptr().cast(), len_bytes) };
        debug_assert!(unmapped.is_ok(), "unmapping what was mapped cannot be refused");
    }
}

impl fmt::Display for MappingError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { len_bytes, backing, errno } = self;
        let kind = match backing {
            MemoryBacking::Private => "private",
            MemoryBacking::Shared => "shared",
            MemoryBacking::SharedHuge => "2 MiB-page",
            MemoryBacking::Contiguous => "contiguous 2 MiB-page",
            MemoryBacking::OfProgram => "the program's",
        };
        write!(out, "map {len_bytes} bytes of {kind} memory: {errno}")?;
        let remedy = match (backing, *errno) {
            (MemoryBacking::Private | MemoryBacking::Shared | MemoryBacking::OfProgram, _) => {
                return Ok(());
            }
            (MemoryBacking::SharedHuge, _) => {
                "reserve pages with `sysctl vm.nr_hugepages=…`, or use ordinary memory"
            }
            (MemoryBacking::Contiguous, contiguous_memory::HIDDEN) => {
                "only root is told where memory lies"
            }
            (MemoryBacking::Contiguous, rustix::io::Errno::PERM | rustix::io::Errno::NOSYS) => {
                "io_uring keeps it in its place: `sysctl kernel.io_uring_disabled=0`"
            }
            (MemoryBacking::Contiguous, contiguous_memory::SCATTERED) => {
                "those that are free lie scattered: reserve more with `sysctl vm.nr_hugepages=…`, \
                 best when the machine starts"
            }
            (MemoryBacking::Contiguous, _) => "reserve pages with `sysctl vm.nr_hugepages=…`",
        };
        write!(out, "; {remedy}")
    }
}

impl std::error::Error for MappingError {}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::sync::atomic::Ordering;

    use rustix::io::Errno;

    use super::{HUGE_PAGE, MappingError, MemoryBacking, MemoryMapping, contiguous_memory};

    #[test]
    fn memory_has_the_requested_length_and_the_alignment_of_its_backing() {
        let small = MemoryMapping::new(5000, MemoryBacking::Private).unwrap();
        assert_eq!((small.len_bytes(), small.has_transparent_huge_pages()), (8192, false));
        let large = MemoryMapping::new(3 * HUGE_PAGE, MemoryBacking::Private).unwrap();
        assert_eq!(large.base_address().as_ptr().align_offset(HUGE_PAGE), 0);
        large.populate();
        assert!(MemoryMapping::new(0, MemoryBacking::Private).is_err());
    }

    #[test]
    fn shared_memory_has_a_descriptor_and_private_memory_has_none() {
        assert!(MemoryMapping::new(4096, MemoryBacking::Shared).unwrap().descriptor().is_some());
        assert!(MemoryMapping::new(4096, MemoryBacking::Private).unwrap().descriptor().is_none());
    }

    #[test]
    fn shared_word_reads_the_file_and_must_be_aligned_and_inside() {
        let mapping = MemoryMapping::new(8192, MemoryBacking::Shared).unwrap();
        let file = mapping.descriptor().unwrap();
        rustix::io::pwrite(file, &7_u32.to_ne_bytes(), 8188).unwrap();
        let last = mapping.shared_word(8188).unwrap();
        assert_eq!(last.load(Ordering::Acquire), 7);
        last.store(9, Ordering::Release);
        let mut bytes = [0; 4];
        assert_eq!(rustix::io::pread(file, &mut bytes, 8188), Ok(4));
        assert_eq!(u32::from_ne_bytes(bytes), 9);
        for offset in [1, 2, 8189, 8190, 8192, 8196, usize::MAX - 3, usize::MAX] {
            assert!(mapping.shared_word(offset).is_none(), "{offset}");
        }
    }

    #[test]
    fn shared_memory_cannot_be_truncated_by_a_peer() {
        let mapping = MemoryMapping::new(8192, MemoryBacking::Shared).unwrap();
        let file = mapping.descriptor().unwrap();
        assert_eq!(rustix::fs::ftruncate(file, 0), Err(Errno::PERM));
        assert_eq!(rustix::fs::ftruncate(file, 1 << 20), Err(Errno::PERM));
    }

    #[test]
    fn huge_pages_are_provided_or_the_error_names_the_fix() {
        match MemoryMapping::new(1, MemoryBacking::SharedHuge) {
            Ok(mapping) => assert_eq!(mapping.len_bytes(), HUGE_PAGE),
            Err(error) => assert!(error.to_string().contains("vm.nr_hugepages"), "{error}"),
        }
    }

    #[test]
    fn discarded_contiguous_memory_is_zero_and_holds_no_page() {
        let mut mapping = MemoryMapping::new(8192, MemoryBacking::Shared).unwrap();
        let file = mapping.descriptor().unwrap().try_clone_to_owned().unwrap();
        mapping.release_pinned_pages();
        let word =
            |mapping: &MemoryMapping| mapping.shared_word(4096).unwrap().load(Ordering::Relaxed);
        mapping.shared_word(4096).unwrap().store(7, Ordering::Relaxed);
        assert_eq!(word(&mapping), 7, "what is no row keeps nothing that could be given up");
        let (mut held, other_end) = std::io::pipe().unwrap();
        mapping.row = Some(contiguous_memory::ContiguousMemory::from_pinned(
            HUGE_PAGE as u64,
            other_end.into(),
        ));
        mapping.release_pinned_pages();
        assert_eq!((mapping.physical_address(), word(&mapping)), (None, 0));
        assert_eq!(held.read(&mut [0; 1]).unwrap(), 0, "what held the pages is closed");
        mapping.shared_word(4096).unwrap().store(9, Ordering::Relaxed);
        let mut bytes = [0; 4];
        assert_eq!(rustix::io::pread(&file, &mut bytes, 4096), Ok(4));
        assert_eq!(u32::from_ne_bytes(bytes), 7, "and nothing goes there any more");
    }

    #[test]
    fn contiguous_memory_is_physically_contiguous_or_the_error_names_the_fix() {
        match MemoryMapping::new(HUGE_PAGE + 1, MemoryBacking::Contiguous) {
            Ok(mapping) => {
                assert_eq!(
                    (mapping.len_bytes(), mapping.backing()),
                    (2 * HUGE_PAGE, MemoryBacking::Contiguous)
                );
                assert!(mapping.physical_address().unwrap().is_multiple_of(HUGE_PAGE as u64));
                assert!(mapping.descriptor().is_none(), "its file has it in another order");
                mapping.shared_word(2 * HUGE_PAGE - 4).unwrap().store(7, Ordering::Relaxed);
                assert!(mapping.discard_pages());
                assert_eq!(
                    mapping.shared_word(2 * HUGE_PAGE - 4).unwrap().load(Ordering::Relaxed),
                    0
                );
            }
            Err(error) => assert!(error.to_string().contains("; "), "{error}"),
        }
        assert!(MemoryMapping::new(usize::MAX, MemoryBacking::Contiguous).is_err());
        assert_eq!(
            MemoryMapping::new(4096, MemoryBacking::Private).unwrap().physical_address(),
            None
        );
    }

    #[test]
    fn contiguous_memory_requirements_are_reported() {
        let reported = |errno| {
            let error = MappingError { len_bytes: 4096, backing: MemoryBacking::Contiguous, errno };
            error.to_string()
        };
        assert!(reported(Errno::NOMEM).contains("vm.nr_hugepages"));
        assert!(reported(contiguous_memory::SCATTERED).contains("scattered"));
        assert!(reported(contiguous_memory::HIDDEN).contains("root"));
        assert!(reported(Errno::PERM).contains("io_uring_disabled"));
    }
}
