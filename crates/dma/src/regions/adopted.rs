//! Regions of somebody else's memory: a file that another process has sent us.

use std::fmt;
use std::os::fd::BorrowedFd;

use base::RegionId;
use rustix::mm::{MapFlags, ProtFlags};

use super::{NoRegion, Region, Regions};
use crate::guard::{Guard, put_empty_memory};
use crate::mapping::{Backing, HUGE_PAGE};

/// A region that lies in a file of somebody else, who may be a virtual machine or another driver.
///
/// Whoever gave it may make it shorter. Then what is read there is zeroes, and
/// [`has_failed`](Self::has_failed) says so; this process does not end.
///
/// Dropping it lets go of the file at once. An access that is under way still meets memory: the
/// bytes are ours then, and go nowhere.
///
/// Huge pages are mapped whole, so the part that was asked for begins somewhere within the region:
/// at [`offset`](Self::offset).
#[derive(Debug)]
pub struct Adopted {
    guard: Guard,
    base: *mut libc::c_void,
    mapped_bytes: usize,
    /// Where in the region the part begins, and how long it is.
    offset: u64,
    len_bytes: u64,
    /// Dropped last: only then may its place be somebody else's.
    region: Region,
}

// SAFETY: the address is used only to unmap what this owns; nothing about it is tied to a thread.
unsafe impl Send for Adopted {}
// SAFETY: a shared `Adopted` tells numbers and whether it has failed.
unsafe impl Sync for Adopted {}

/// A part of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FilePart {
    /// Where it begins, in whole pages.
    pub offset: u64,
    /// How long it is, in whole pages.
    pub len_bytes: u64,
}

/// A file that cannot be mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotAdopted {
    /// It begins or ends within a page.
    Uneven {
        /// What was to be mapped.
        part: FilePart,
    },
    /// The file is shorter.
    Short {
        /// What was to be mapped.
        part: FilePart,
        /// How long the file is.
        found: u64,
    },
    /// It is not memory: its bytes come from a disk, a device or another process, which may answer late
    /// or never, and who touches them waits.
    NotMemory {
        /// What was to be mapped.
        part: FilePart,
        /// Whether it is a regular file.
        is_file: bool,
        /// Its file system, as `fstatfs` has it.
        system: i64,
    },
    /// There is no place in the table.
    NoRegion(NoRegion),
    /// The kernel does not want it.
    Refused {
        /// What was to be mapped.
        part: FilePart,
        /// What the kernel said.
        errno: rustix::io::Errno,
    },
}

const PAGE: u64 = 4096;
/// What `fstatfs` says of files in huge pages (linux/magic.h); their block is such a page.
const HUGETLBFS: i64 = 0x9584_58f6;
/// The same of `tmpfs`, where a memfd without huge pages lies as well.
const TMPFS: i64 = 0x0102_1994;

impl Regions {
    /// A region that is a part of `file`, which is closed again.
    ///
    /// # Errors
    ///
    /// If the file is not memory (tmpfs, hugetlbfs or a memfd), is shorter than that, cannot be written,
    /// or there is no place for it.
    pub fn adopt(&self, file: BorrowedFd<'_>, part: FilePart) -> Result<Adopted, NotAdopted> {
        let FilePart { offset, len_bytes } = part;
        let refuse = |errno| NotAdopted::Refused { part, errno };
        if len_bytes == 0 || !offset.is_multiple_of(PAGE) || !len_bytes.is_multiple_of(PAGE) {
            return Err(NotAdopted::Uneven { part });
        }
        let (stat, system) = (rustix::fs::fstat(file), rustix::fs::fstatfs(file));
        let (stat, system) = (stat.map_err(refuse)?, system.map_err(refuse)?);
        // A node of a device may lie in a tmpfs as well.
        let is_file = rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file();
        if !is_file || ![TMPFS, HUGETLBFS].contains(&system.f_type) {
            return Err(NotAdopted::NotMemory { part, is_file, system: system.f_type });
        }
        let found = u64::try_from(stat.st_size).unwrap_or(0);
        if offset.checked_add(len_bytes).is_none_or(|end| end > found) {
            return Err(NotAdopted::Short { part, found });
        }
        let page = u64::try_from(system.f_bsize).unwrap_or(PAGE);
        let is_huge = system.f_type == HUGETLBFS && page.is_power_of_two();
        self.adopt_part(file, part, if is_huge { page } else { PAGE })
    }

    /// A region that is registers of a device: a part of a file of the kernel's, which has no length
    /// of its own. Bytes there are not memory: only whole words are to be loaded and stored.
    ///
    /// # Errors
    ///
    /// If the kernel does not want it, or there is no place for it.
    pub fn adopt_registers(
        &self,
        file: BorrowedFd<'_>,
        part: FilePart,
    ) -> Result<Adopted, NotAdopted> {
        let FilePart { offset, len_bytes } = part;
        if len_bytes == 0 || !offset.is_multiple_of(PAGE) || !len_bytes.is_multiple_of(PAGE) {
            return Err(NotAdopted::Uneven { part });
        }
        self.adopt_part(file, part, PAGE)
    }

    /// Maps whole pages of `page` bytes around `part`, at an address that is a multiple of them.
    fn adopt_part(
        &self,
        file: BorrowedFd<'_>,
        part: FilePart,
        page: u64,
    ) -> Result<Adopted, NotAdopted> {
        let FilePart { offset, len_bytes } = part;
        let refuse = |errno| NotAdopted::Refused { part, errno };
        let uneven = |_| NotAdopted::Uneven { part };
        let first = offset & !(page - 1);
        let mapped_bytes = (offset - first + len_bytes).next_multiple_of(page);
        // A mapping of our own may begin between two of the larger pages.
        let spare = if page > HUGE_PAGE as u64 { page } else { 0 };
        let region_bytes = usize::try_from(mapped_bytes + spare).map_err(uneven)?;
        let mapped_bytes = usize::try_from(mapped_bytes).map_err(uneven)?;
        let region = self.allocate_of(region_bytes, Backing::Private);
        let region = region.map_err(NotAdopted::NoRegion)?;
        let address = self.address(region.segment()).map_err(|_| NotAdopted::Uneven { part })?;
        let skip = address.as_ptr().align_offset(usize::try_from(page).map_err(uneven)?);
        if skip + mapped_bytes > region_bytes {
            return Err(NotAdopted::Uneven { part });
        }
        // SAFETY: `skip` lies inside the region, as just checked.
        let address = unsafe { address.add(skip) };
        let base = address.as_ptr().cast();
        let guard = Guard::enter(address, mapped_bytes);
        let guard = guard.map_err(|error| refuse(errno_of(&error)))?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let mut flags = MapFlags::SHARED | MapFlags::FIXED;
        if page > PAGE {
            // Whoever made the file has reserved its pages.
            flags |= MapFlags::NORESERVE;
        }
        // SAFETY: the range is the whole of a region that was just made, so nobody works on it yet,
        // and lies in a private mapping of the table, which stays mapped: this replaces its pages.
        let mapped =
            unsafe { rustix::mm::mmap(base, mapped_bytes, protection, flags, file, first) };
        let inner = skip as u64 + (offset - first);
        // Dropping it puts memory back where a refusal may have left none.
        let adopted = Adopted { guard, base, mapped_bytes, offset: inner, len_bytes, region };
        mapped.map(|_| adopted).map_err(refuse)
    }
}

impl Adopted {
    /// The number of the region.
    pub fn id(&self) -> RegionId {
        self.region.id()
    }

    /// Where in the region the part begins that was asked for.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// How long the part is.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    /// Whether whoever gave it has taken it back meanwhile, or it was [let go](Self::let_go).
    pub fn has_failed(&self) -> bool {
        self.guard.has_failed()
    }

    /// Lets go of the file now: from here on the region is memory of our own, and
    /// [has failed](Self::has_failed).
    pub fn let_go(&self) {
        self.guard.fail();
        // Without memory for a page table the file stays mapped until this is dropped.
        let _ = put_empty_memory(self.base, self.mapped_bytes);
    }
}

impl Drop for Adopted {
    fn drop(&mut self) {
        // Without memory for a page table the file stays mapped, and what somebody else wrote there
        // would reach it.
        self.region.is_spoilt = !put_empty_memory(self.base, self.mapped_bytes);
    }
}

fn errno_of(error: &std::io::Error) -> rustix::io::Errno {
    rustix::io::Errno::from_io_error(error).unwrap_or(rustix::io::Errno::NOMEM)
}

impl fmt::Display for NotAdopted {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = |out: &mut fmt::Formatter<'_>, part: &FilePart| {
            write!(out, "map {} bytes at {} of a shared file: ", part.len_bytes, part.offset)
        };
        match self {
            Self::Uneven { part } => {
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

impl std::error::Error for NotAdopted {}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};

    use base::{Memory, Segment};
    use rustix::fs::MemfdFlags;

    use super::{FilePart, NotAdopted};
    use crate::Regions;

    fn file(len_bytes: u64) -> OwnedFd {
        let file =
            rustix::fs::memfd_create("test", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC)
                .unwrap();
        rustix::fs::ftruncate(&file, len_bytes).unwrap();
        file
    }

    fn part(offset: u64, len_bytes: u64) -> FilePart {
        FilePart { offset, len_bytes }
    }

    fn at(region: base::RegionId, offset: u64) -> Segment {
        Segment { region, offset, len_bytes: 4 }
    }

    #[test]
    fn what_is_stored_lies_in_the_file_and_no_more_once_it_was_let_go() {
        let (regions, file) = (Regions::new(1), file(0x4000));
        let adopted = regions.adopt(file.as_fd(), part(0x1000, 0x2000)).unwrap();
        let place = at(adopted.id(), 0x1ffc);
        regions.store(place, b"here").unwrap();
        let mut found = [0; 4];
        rustix::io::pread(&file, &mut found, 0x2ffc).unwrap();
        assert_eq!(&found, b"here");
        assert!(regions.store(at(adopted.id(), 0x1ffd), b"past").is_err());
        drop(adopted);
        assert!(regions.load(place, &mut found).is_err(), "the number is no region any more");
        // Its place is private memory again, and empty.
        let next = regions.allocate(0x2000).unwrap();
        let place = at(next.id(), 0x1ffc);
        regions.load(place, &mut found).unwrap();
        assert_eq!(found, [0; 4]);
        regions.store(place, b"mine").unwrap();
        rustix::io::pread(&file, &mut found, 0x2ffc).unwrap();
        assert_eq!(&found, b"here");
    }

    /// In a process of its own: for a moment nothing can be mapped in it.
    #[test]
    #[ignore = "the test below runs it"]
    fn a_place_that_the_file_cannot_be_taken_from() {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        let (regions, file) = (Regions::new(1), file(0x1000));
        let adopted = regions.adopt(file.as_fd(), part(0, 0x1000)).unwrap();
        let word = at(adopted.id(), 0);
        let before = getrlimit(Resource::As);
        setrlimit(Resource::As, Rlimit { current: Some(0), ..before }).unwrap();
        drop(adopted);
        setrlimit(Resource::As, before).unwrap();
        assert!(regions.store(word, b"gone").is_err(), "its number names nothing");
        assert!(regions.allocate(0x1000).is_err(), "and its place is nobody's");
    }

    #[test]
    fn a_place_that_the_file_could_not_be_taken_from_is_not_used_again() {
        let this = std::env::current_exe().unwrap();
        let name = "regions::adopted::tests::a_place_that_the_file_cannot_be_taken_from";
        let mut child = std::process::Command::new(this);
        let output = child.args(["--exact", name, "--ignored"]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && said.contains("1 passed"), "{said}");
    }

    #[test]
    fn a_file_that_becomes_shorter_is_found_out_and_ends_nobody() {
        let (regions, file) = (Regions::new(2), file(0x4000));
        let adopted = regions.adopt(file.as_fd(), part(0, 0x4000)).unwrap();
        let other = regions.adopt(file.as_fd(), part(0, 0x1000)).unwrap();
        regions.store(at(adopted.id(), 0), b"here").unwrap();
        rustix::fs::ftruncate(&file, 0x1000).unwrap();
        let mut found = [1; 4];
        regions.load(at(adopted.id(), 0), &mut found).unwrap();
        assert_eq!((&found, adopted.has_failed()), (b"here", false), "that part is there");
        regions.load(at(adopted.id(), 0x3000), &mut found).unwrap();
        assert_eq!((found, adopted.has_failed()), ([0; 4], true));
        regions.store(at(adopted.id(), 0x2000), b"gone").unwrap();
        assert!(!other.has_failed(), "another mapping is another matter");
        drop((adopted, other));
        let whole = self::file(0x4000);
        let again = regions.adopt(whole.as_fd(), part(0, 0x4000)).unwrap();
        assert!(!again.has_failed(), "a place begins anew");
    }

    #[test]
    fn what_the_file_does_not_have_is_refused_and_takes_no_place() {
        let (regions, file) = (Regions::new(1), file(0x4000));
        let refused = |offset, len_bytes| regions.adopt(file.as_fd(), part(offset, len_bytes));
        for (offset, len_bytes) in [(0, 0x5000), (0x4000, 0x1000), (u64::MAX << 12, 0x2000)] {
            let refused = refused(offset, len_bytes).unwrap_err();
            assert!(matches!(refused, NotAdopted::Short { found: 0x4000, .. }), "{refused}");
        }
        for (offset, len_bytes) in [(0, 0), (0, 0x1001), (1, 0x1000)] {
            let refused = refused(offset, len_bytes).unwrap_err();
            assert!(matches!(refused, NotAdopted::Uneven { .. }), "{refused}");
        }
        let adopted = refused(0, 0x4000).unwrap();
        assert!(matches!(refused(0, 0x4000), Err(NotAdopted::NoRegion(_))));
        drop(adopted);
        assert!(refused(0, 0x4000).is_ok());
    }

    /// A disk answers late, and a process that serves a file never, while whoever touches it waits.
    #[test]
    fn only_memory_is_mapped() {
        let regions = Regions::new(1);
        let refused = |file: &OwnedFd| regions.adopt(file.as_fd(), part(0, 0x1000)).unwrap_err();
        let open = |path| {
            let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CLOEXEC;
            rustix::fs::open(path, flags, rustix::fs::Mode::empty()).unwrap()
        };
        let device = refused(&open("/dev/zero"));
        assert!(matches!(device, NotAdopted::NotMemory { is_file: false, .. }), "{device}");
        let process = refused(&open("/proc/self/comm"));
        assert!(matches!(process, NotAdopted::NotMemory { is_file: true, .. }), "{process}");
        assert!(process.to_string().contains("its file system is 0x9fa0, expected memory"));
        assert_eq!(regions.count(), 0);
    }

    #[test]
    fn a_file_that_may_not_be_written_is_refused() {
        let (regions, file) = (Regions::new(1), file(0x1000));
        rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::WRITE).unwrap();
        let refused = regions.adopt(file.as_fd(), part(0, 0x1000)).unwrap_err();
        assert!(matches!(refused, NotAdopted::Refused { .. }), "{refused}");
        assert_eq!(regions.count(), 0);
    }

    #[test]
    fn what_is_let_go_is_memory_that_goes_nowhere() {
        let regions = Regions::new(1);
        let file = file(8192);
        let part = FilePart { offset: 0, len_bytes: 8192 };
        let adopted = regions.adopt(file.as_fd(), part).unwrap();
        let word = Segment { region: adopted.id(), offset: 4096, len_bytes: 4 };
        regions.store_u32(word, 7).unwrap();
        adopted.let_go();
        assert!(adopted.has_failed());
        assert_eq!(regions.load_u32(word), Ok(0));
        regions.store_u32(word, 9).unwrap();
        let mut found = [0; 4];
        rustix::io::pread(&file, &mut found, 4096).unwrap();
        assert_eq!(found, [7, 0, 0, 0]);
    }

    /// Without one reserved page: what is mapped is not touched.
    #[test]
    fn a_part_of_huge_pages_is_mapped_wherever_it_begins() {
        let flags = MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB | MemfdFlags::CLOEXEC;
        // A kernel without them has nothing to show here.
        let Ok(file) = rustix::fs::memfd_create("huge", flags) else { return };
        rustix::fs::ftruncate(&file, 8 << 20).unwrap();
        let regions = Regions::new(4);
        for (offset, len_bytes) in [(0, 0xa_0000), (0xc_0000, 1 << 20), (1 << 20, 5 << 20)] {
            let adopted = regions.adopt(file.as_fd(), FilePart { offset, len_bytes }).unwrap();
            assert_eq!((adopted.offset(), adopted.len_bytes()), (offset % (2 << 20), len_bytes));
            assert!(regions.len_bytes(adopted.id()) >= adopted.offset() + len_bytes);
        }
    }
}
