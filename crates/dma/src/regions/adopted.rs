//! Regions of somebody else's memory: a file that another process has sent us.

use std::fmt;
use std::os::fd::BorrowedFd;

use base::RegionId;
use rustix::mm::{MapFlags, ProtFlags};

use super::{NoRegion, Region, Regions};
use crate::guard::{Guard, put_empty_memory};
use crate::mapping::Backing;

/// A region that lies in a file of somebody else, who may be a virtual machine or another driver.
///
/// Whoever gave it may make it shorter. Then what is read there is zeroes, and
/// [`has_failed`](Self::has_failed) says so; this process does not end.
///
/// Dropping it lets go of the file at once. An access that is under way still meets memory: the
/// bytes are ours then, and go nowhere.
#[derive(Debug)]
pub struct Adopted {
    guard: Guard,
    base: *mut libc::c_void,
    mapped_bytes: usize,
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

impl Regions {
    /// A region that is a part of `file`, which is closed again.
    ///
    /// # Errors
    ///
    /// If the file is shorter than that, cannot be written, or there is no place for it.
    pub fn adopt(&self, file: BorrowedFd<'_>, part: FilePart) -> Result<Adopted, NotAdopted> {
        let FilePart { offset, len_bytes } = part;
        let refuse = |errno| NotAdopted::Refused { part, errno };
        if len_bytes == 0 || !offset.is_multiple_of(PAGE) || !len_bytes.is_multiple_of(PAGE) {
            return Err(NotAdopted::Uneven { part });
        }
        let found = rustix::fs::fstat(file).map_err(refuse)?.st_size;
        let found = u64::try_from(found).unwrap_or(0);
        if offset.checked_add(len_bytes).is_none_or(|end| end > found) {
            return Err(NotAdopted::Short { part, found });
        }
        self.adopt_part(file, part)
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
        self.adopt_part(file, part)
    }

    fn adopt_part(&self, file: BorrowedFd<'_>, part: FilePart) -> Result<Adopted, NotAdopted> {
        let FilePart { offset, len_bytes } = part;
        let refuse = |errno| NotAdopted::Refused { part, errno };
        let mapped_bytes = usize::try_from(len_bytes).map_err(|_| NotAdopted::Uneven { part })?;
        let region = self.allocate_of(mapped_bytes, Backing::Private);
        let region = region.map_err(NotAdopted::NoRegion)?;
        let address = self.address(region.segment()).map_err(|_| NotAdopted::Uneven { part })?;
        let base = address.as_ptr().cast();
        let guard = Guard::enter(address, mapped_bytes);
        let guard = guard.map_err(|error| refuse(errno_of(&error)))?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        // SAFETY: the range is the whole of a region that was just made, so nobody works on it yet,
        // and lies in a private mapping of the table, which stays mapped: this replaces its pages.
        let mapped =
            unsafe { rustix::mm::mmap(base, mapped_bytes, protection, flags, file, offset) };
        // Dropping it puts memory back where a refusal may have left none.
        let adopted = Adopted { guard, base, mapped_bytes, region };
        mapped.map(|_| adopted).map_err(refuse)
    }
}

impl Adopted {
    /// Its number.
    pub fn id(&self) -> RegionId {
        self.region.id()
    }

    /// How long it is.
    pub fn len_bytes(&self) -> u64 {
        self.region.len_bytes()
    }

    /// Whether whoever gave it has taken it back meanwhile.
    pub fn has_failed(&self) -> bool {
        self.guard.has_failed()
    }
}

impl Drop for Adopted {
    fn drop(&mut self) {
        // Without memory for a page table the file stays mapped, and the place is used again all the
        // same: what is written there then reaches the file.
        let _ = put_empty_memory(self.base, self.mapped_bytes);
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

    #[test]
    fn a_file_that_may_not_be_written_is_refused() {
        let (regions, file) = (Regions::new(1), file(0x1000));
        rustix::fs::fcntl_add_seals(&file, rustix::fs::SealFlags::WRITE).unwrap();
        let refused = regions.adopt(file.as_fd(), part(0, 0x1000)).unwrap_err();
        assert!(matches!(refused, NotAdopted::Refused { .. }), "{refused}");
        assert_eq!(regions.count(), 0);
    }
}
