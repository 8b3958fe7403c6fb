//! Foreign memory regions: mapped files received from another process.

use std::fmt;
use std::os::fd::BorrowedFd;

use rustix::fs::FsWord;
use rustix::mm::{MapFlags, ProtFlags};
use tenmil_base::RegionId;

use super::{Region, RegionError, RegionTable};
use crate::memory_mapping::{HUGE_PAGE, MemoryBacking};
use crate::sigbus_guard::{SigbusGuard, replace_by_zeroed_memory};

/// Region backed by a mapped file of another process, for example a virtual machine or another driver.
///
/// The other process may truncate the file. Reads then return zeroes, and
/// [`has_failed`](Self::has_failed) returns true; this process does not end.
///
/// Dropping it unmaps the file at once. An access still in progress then hits private memory, and its
/// bytes are discarded.
///
/// Huge pages are mapped completely, so the requested part may begin inside the region, at
/// [`offset`](Self::offset).
#[derive(Debug)]
pub struct ForeignRegion {
    guard: SigbusGuard,
    base: *mut libc::c_void,
    mapped_bytes: usize,
    /// Offset of the requested part in the region, and its length.
    offset: u64,
    len_bytes: u64,
    /// Dropped last: only then may its place be reused.
    region: Region,
}

// SAFETY: the address is used only to unmap what this owns; nothing about it is tied to a thread.
unsafe impl Send for ForeignRegion {}
// SAFETY: a shared `ForeignRegion` only returns numbers and whether it has failed.
unsafe impl Sync for ForeignRegion {}

/// Range of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileRange {
    /// Offset, a multiple of the page size.
    pub offset: u64,
    /// Length, a multiple of the page size.
    pub len_bytes: u64,
}

/// Reason why a file cannot be mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForeignMapError {
    /// The range is not page-aligned.
    Unaligned {
        /// Requested range.
        part: FileRange,
    },
    /// The file is shorter than the range.
    Short {
        /// Requested range.
        part: FileRange,
        /// Length of the file.
        found: u64,
    },
    /// The file is not in memory: its bytes come from a disk, a device or another process, so an access
    /// may block for a long time or forever.
    NotMemory {
        /// Requested range.
        part: FileRange,
        /// Whether it is a regular file.
        is_file: bool,
        /// File system type, from `fstatfs`.
        system: FsWord,
    },
    /// The region cannot be created.
    NoRegion(RegionError),
    /// The kernel rejects the mapping.
    Refused {
        /// Requested range.
        part: FileRange,
        /// Error from the kernel.
        errno: rustix::io::Errno,
    },
}

const PAGE: u64 = 4096;
/// File system type of files with huge pages (linux/magic.h); their block size is the page size.
const HUGETLBFS: FsWord = 0x9584_58f6;
/// File system type of `tmpfs`, which also contains memfds without huge pages.
const TMPFS: FsWord = 0x0102_1994;

impl RegionTable {
    /// Maps a range of `file` as a region. The region does not need the descriptor afterwards.
    ///
    /// # Errors
    ///
    /// The file is not memory (tmpfs, hugetlbfs or a memfd), is too short, is not writable, or the table
    /// is full.
    pub fn map_foreign(
        &self,
        file: BorrowedFd<'_>,
        part: FileRange,
    ) -> Result<ForeignRegion, ForeignMapError> {
        let FileRange { offset, len_bytes } = part;
        let refuse = |errno| ForeignMapError::Refused { part, errno };
        if len_bytes == 0 || !offset.is_multiple_of(PAGE) || !len_bytes.is_multiple_of(PAGE) {
            return Err(ForeignMapError::Unaligned { part });
        }
        let (stat, system) = (rustix::fs::fstat(file), rustix::fs::fstatfs(file));
        let (stat, system) = (stat.map_err(refuse)?, system.map_err(refuse)?);
        // A device node may be in a tmpfs, too.
        let is_file = rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file();
        if !is_file || ![TMPFS, HUGETLBFS].contains(&system.f_type) {
            return Err(ForeignMapError::NotMemory { part, is_file, system: system.f_type });
        }
        let found = u64::try_from(stat.st_size).unwrap_or(0);
        if offset.checked_add(len_bytes).is_none_or(|end| end > found) {
            return Err(ForeignMapError::Short { part, found });
        }
        let page = u64::try_from(system.f_bsize).unwrap_or(PAGE);
        let is_huge = system.f_type == HUGETLBFS && page.is_power_of_two();
        self.map_file_part(file, part, if is_huge { page } else { PAGE })
    }

    /// Maps registers of a device as a region: a range of a kernel file without a length. The bytes are
    /// not memory; only whole words may be loaded and stored.
    ///
    /// # Errors
    ///
    /// The kernel rejects the mapping, or the table is full.
    pub fn map_registers(
        &self,
        file: BorrowedFd<'_>,
        part: FileRange,
    ) -> Result<ForeignRegion, ForeignMapError> {
        let FileRange { offset, len_bytes } = part;
        if len_bytes == 0 || !offset.is_multiple_of(PAGE) || !len_bytes.is_multiple_of(PAGE) {
            return Err(ForeignMapError::Unaligned { part });
        }
        self.map_file_part(file, part, PAGE)
    }

    /// Maps whole pages of `page` bytes around `part`, at an address aligned to them.
    fn map_file_part(
        &self,
        file: BorrowedFd<'_>,
        part: FileRange,
        page: u64,
    ) -> Result<ForeignRegion, ForeignMapError> {
        let FileRange { offset, len_bytes } = part;
        let refuse = |errno| ForeignMapError::Refused { part, errno };
        let uneven = |_| ForeignMapError::Unaligned { part };
        let first = offset & !(page - 1);
        let mapped_bytes = (offset - first + len_bytes).next_multiple_of(page);
        // A private mapping is not aligned to pages above the usual huge page size.
        let spare = if page > HUGE_PAGE as u64 { page } else { 0 };
        let region_bytes = usize::try_from(mapped_bytes + spare).map_err(uneven)?;
        let mapped_bytes = usize::try_from(mapped_bytes).map_err(uneven)?;
        let region = self.allocate_with_backing(region_bytes, MemoryBacking::Private);
        let region = region.map_err(ForeignMapError::NoRegion)?;
        let address =
            self.host_address(region.segment()).map_err(|_| ForeignMapError::Unaligned { part })?;
        let skip = address.as_ptr().align_offset(usize::try_from(page).map_err(uneven)?);
        if skip + mapped_bytes > region_bytes {
            return Err(ForeignMapError::Unaligned { part });
        }
        // SAFETY: `skip` is inside the region, as just checked.
        let address = unsafe { address.add(skip) };
        let base = address.as_ptr().cast();
        let guard = SigbusGuard::register_mapping(address, mapped_bytes);
        let guard = guard.map_err(|error| refuse(errno_of(&error)))?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let mut flags = MapFlags::SHARED | MapFlags::FIXED;
        if page > PAGE {
            // The creator of the file has reserved its pages.
            flags |= MapFlags::NORESERVE;
        }
        // SAFETY: the range is the whole of a region that was just created, so nothing uses it yet, and
        // lies in a private mapping of the table, which stays mapped: this replaces its pages.
        let mapped =
            unsafe { rustix::mm::mmap(base, mapped_bytes, protection, flags, file, first) };
        let inner = skip as u64 + (offset - first);
        // After an error, dropping it restores memory that a failed mmap may have unmapped.
        let adopted = ForeignRegion { guard, base, mapped_bytes, offset: inner, len_bytes, region };
        mapped.map(|_| adopted).map_err(refuse)
    }
}

impl ForeignRegion {
    /// Region number.
    pub fn id(&self) -> RegionId {
        self.region.id()
    }

    /// Offset of the requested part in the region.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Length of the requested part.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Whether the file was truncated meanwhile, or [released](Self::unmap_file).
    pub fn has_failed(&self) -> bool {
        self.guard.has_failed()
    }

    /// Unmaps the file now: from here on the region is private memory, and [has
    /// failed](Self::has_failed).
    pub fn unmap_file(&self) {
        self.guard.mark_failed();
        // If memory for a page table is exhausted, the file stays mapped until this is dropped.
        let _ = replace_by_zeroed_memory(self.base, self.mapped_bytes);
    }
}

impl Drop for ForeignRegion {
    fn drop(&mut self) {
        // If memory for a page table is exhausted, the file stays mapped, and writes of a later region
        // would reach it. The place is therefore leaked.
        self.region.is_leaked = !replace_by_zeroed_memory(self.base, self.mapped_bytes);
    }
}

fn errno_of(error: &std::io::Error) -> rustix::io::Errno {
    rustix::io::Errno::from_io_error(error).unwrap_or(rustix::io::Errno::NOMEM)
}

impl fmt::Display for ForeignMapError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = |out: &mut fmt::Formatter<'_>, part: &FileRange| {
            write!(out, "map {} bytes at {} of a shared file: ", part.len_bytes, part.offset)
        };
        match self {
            Self::Unaligned { part } => {
                of(out, part)?;
                write!(out, "expected whole pages of {PAGE} bytes")
            }
            Self::Short { part, found } => {
                of(out, part)?;
                write!(out, "it has {found} bytes")
            }
            Self::NotMemory { part, is_file, system } => {
                of(out, part)?;
                match is_file {
                    true => write!(out, "its file system is {system:#x}")?,
                    false => out.write_str("it is not a regular file")?,
                }
                out.write_str(
                    ", expected memory: a memfd, or a file of tmpfs (/dev/shm) or hugetlbfs; fix: QEMU \
                     takes -object memory-backend-memfd,share=on",
                )
            }
            Self::NoRegion(why) => why.fmt(out),
            Self::Refused { part, errno } => {
                of(out, part)?;
                errno.fmt(out)
            }
        }
    }
}

impl std::error::Error for ForeignMapError {}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};

    use rustix::fs::MemfdFlags;
    use tenmil_base::{Memory, Segment};

    use super::{FileRange, ForeignMapError};
    use crate::RegionTable;

    fn temp_file(len_bytes: u64) -> OwnedFd {
        let file =
            rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC)
                .unwrap();
        rustix::fs::ftruncate(&file, len_bytes).unwrap();
        file
    }

    fn file_range(offset: u64, len_bytes: u64) -> FileRange {
        FileRange { offset, len_bytes }
    }

    fn mapped_at(region: tenmil_base::RegionId, offset: u64) -> Segment {
        Segment { region, offset, len_bytes: 4 }
    }

    #[test]
    fn stores_reach_the_file_until_it_is_unmapped() {
        let (regions, file) = (RegionTable::new(1), temp_file(0x4000));
        let adopted = regions.map_foreign(file.as_fd(), file_range(0x1000, 0x2000)).unwrap();
        let place = mapped_at(adopted.id(), 0x1ffc);
        regions.store(place, b"here").unwrap();
        let mut found = [0; 4];
        rustix::io::pread(&file, &mut found, 0x2ffc).unwrap();
        assert_eq!(&found, b"here");
        assert!(regions.store(mapped_at(adopted.id(), 0x1ffd), b"past").is_err());
        drop(adopted);
        assert!(regions.load(place, &mut found).is_err(), "the number is no region any more");
        // Its place is private memory again, and empty.
        let next = regions.allocate_region(0x2000).unwrap();
        let place = mapped_at(next.id(), 0x1ffc);
        regions.load(place, &mut found).unwrap();
        assert_eq!(found, [0; 4]);
        regions.store(place, b"mine").unwrap();
        rustix::io::pread(&file, &mut found, 0x2ffc).unwrap();
        assert_eq!(&found, b"here");
    }

    /// Runs in a process of its own: for a moment nothing can be mapped in it.
    #[test]
    #[ignore = "the test below runs it"]
    fn unmappable_slot_is_reported() {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        let (regions, file) = (RegionTable::new(1), temp_file(0x1000));
        let adopted = regions.map_foreign(file.as_fd(), file_range(0, 0x1000)).unwrap();
        let word = mapped_at(adopted.id(), 0);
        let before = getrlimit(Resource::As);
        setrlimit(Resource::As, Rlimit { current: Some(0), ..before }).unwrap();
        drop(adopted);
        setrlimit(Resource::As, before).unwrap();
        assert!(regions.store(word, b"gone").is_err(), "its number names nothing");
        assert!(regions.allocate_region(0x1000).is_err(), "and its slot is not reused");
    }

    #[test]
    fn slot_of_a_failed_map_is_not_reused() {
        let this = std::env::current_exe().unwrap();
        let name = "region_table::foreign_region::tests::unmappable_slot_is_reported";
        let mut child = std::process::Command::new(this);
        let output = child.args(["--exact", name, "--ignored"]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
    }

    #[test]
    fn truncated_file_is_detected_without_a_crash() {
        let (regions, file) = (RegionTable::new(2), temp_file(0x4000));
        let adopted = regions.map_foreign(file.as_fd(), file_range(0, 0x4000)).unwrap();
        let other = regions.map_foreign(file.as_fd(), file_range(0, 0x1000)).unwrap();
        regions.store(mapped_at(adopted.id(), 0), b"here").unwrap();
        rustix::fs::ftruncate(&file, 0x1000).unwrap();
        let mut found = [1; 4];
        regions.load(mapped_at(adopted.id(), 0), &mut found).unwrap();
        assert_eq!((&found, adopted.has_failed()), (b"here", false), "that part is there");
        regions.load(mapped_at(adopted.id(), 0x3000), &mut found).unwrap();
        assert_eq!((found, adopted.has_failed()), ([0; 4], true));
        regions.store(mapped_at(adopted.id(), 0x2000), b"gone").unwrap();
        assert!(!other.has_failed(), "another mapping is another matter");
        drop((adopted, other));
        let whole = temp_file(0x4000);
        let again = regions.map_foreign(whole.as_fd(), file_range(0, 0x4000)).unwrap();
        assert!(!again.has_failed(), "a place begins anew");
    }

    #[test]
    fn range_beyond_the_file_is_rejected_and_uses_no_slot() {
        let (regions, file) = (RegionTable::new(1), temp_file(0x4000));
        let refused =
            |offset, len_bytes| regions.map_foreign(file.as_fd(), file_range(offset, len_bytes));
        for (offset, len_bytes) in [(0, 0x5000), (0x4000, 0x1000), (u64::MAX << 12, 0x2000)] {
            let refused = refused(offset, len_bytes).unwrap_err();
            assert!(matches!(refused, ForeignMapError::Short { found: 0x4000, .. }), "{refused}");
        }
        for (offset, len_bytes) in [(0, 0), (0, 0x1001), (1, 0x1000)] {
            let refused = refused(offset, len_bytes).unwrap_err();
            assert!(matches!(refused, ForeignMapError::Unaligned { .. }), "{refused}");
        }
        let adopted = refused(0, 0x4000).unwrap();
        assert!(matches!(refused(0, 0x4000), Err(ForeignMapError::NoRegion(_))));
        drop(adopted);
        assert!(refused(0, 0x4000).is_ok());
    }

    /// A slow disk delays the accessing thread, and a process that serves a file may block it for ever.
    #[test]
    fn only_memory_files_can_be_mapped() {
        let regions = RegionTable::new(1);
        let refused =
            |file: &OwnedFd| regions.map_foreign(file.as_fd(), file_range(0, 0x1000)).unwrap_err();
        let open = |path| {
            let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC;
            rustix::fs::open(path, flags, rustix::fs::Mode::empty()).unwrap()
        };
        let device = refused(&open("/dev/zero"));
        assert!(matches!(device, ForeignMapError::NotMemory { is_file: false, .. }), "{device}");
        let process = refused(&open("/proc/self/comm"));
        assert!(matches!(process, ForeignMapError::NotMemory { is_file: true, .. }), "{process}");
        assert!(process.to_string().contains("its file system is 0x9fa0, expected memory"));
        assert_eq!(regions.region_count(), 0);
    }

    #[test]
    fn read_only_file_is_rejected() {
        let (regions, file) = (RegionTable::new(1), temp_file(0x1000));
        rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::WRITE).unwrap();
        let refused = regions.map_foreign(file.as_fd(), file_range(0, 0x1000)).unwrap_err();
        assert!(matches!(refused, ForeignMapError::Refused { .. }), "{refused}");
        assert_eq!(regions.region_count(), 0);
    }

    #[test]
    fn unmapped_region_becomes_private_memory() {
        let regions = RegionTable::new(1);
        let file = temp_file(8192);
        let part = FileRange { offset: 0, len_bytes: 8192 };
        let adopted = regions.map_foreign(file.as_fd(), part).unwrap();
        let word = Segment { region: adopted.id(), offset: 4096, len_bytes: 4 };
        regions.store_u32(word, 7).unwrap();
        adopted.unmap_file();
        assert!(adopted.has_failed());
        assert_eq!(regions.load_u32(word), Ok(0));
        regions.store_u32(word, 9).unwrap();
        let mut found = [0; 4];
        rustix::io::pread(&file, &mut found, 4096).unwrap();
        assert_eq!(found, [7, 0, 0, 0]);
    }

    /// Needs no reserved page: the mapping is not accessed.
    #[test]
    fn part_of_a_huge_page_file_is_mapped_at_any_offset() {
        let flags = MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB | MemfdFlags::CLOEXEC;
        // A kernel without huge pages has nothing to test here.
        let Ok(file) = rustix::fs::memfd_create("huge", flags) else { return };
        rustix::fs::ftruncate(&file, 8 << 20).unwrap();
        let regions = RegionTable::new(4);
        for (offset, len_bytes) in [(0, 0xa_0000), (0xc_0000, 1 << 20), (1 << 20, 5 << 20)] {
            let adopted =
                regions.map_foreign(file.as_fd(), FileRange { offset, len_bytes }).unwrap();
            assert_eq!((adopted.offset(), adopted.len_bytes()), (offset % (2 << 20), len_bytes));
            assert!(regions.len_bytes(adopted.id()) >= adopted.offset() + len_bytes);
        }
    }
}
