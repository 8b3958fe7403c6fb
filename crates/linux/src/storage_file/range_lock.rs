//! Locks of byte ranges, owned by an open file description as flock(2) is: several loop devices over
//! parts of one file exclude each other where the parts overlap, and nowhere else.

use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::FileError;

/// Locks `bytes` of a file that is open for reading, or also for writing if not `read_only`. Where the
/// file system has no such locks, nothing is locked.
///
/// # Errors
///
/// If another description has locked some of these bytes.
pub(super) fn lock_range(
    descriptor: &OwnedFd,
    path: &Path,
    bytes: &Range<u64>,
    read_only: bool,
) -> Result<(), FileError> {
    let kind = if read_only { libc::F_RDLCK } else { libc::F_WRLCK };
    match set_ofd_lock(descriptor, kind, bytes) {
        Ok(()) => Ok(()),
        Err(Errno::AGAIN | Errno::ACCESS) => {
            // The kernel does not report which process has a range. Each has a lock of the file, too, as this
            // one, which is closed.
            let _ = flock(descriptor, FlockOperation::Unlock);
            let end = if bytes.end == u64::MAX { "its end".into() } else { bytes.end.to_string() };
            let who = super::describe_lock_owner(descriptor);
            let found = format!("{who}, and uses some of the bytes {} to {end}", bytes.start);
            let expected = "a part that is not open elsewhere";
            Err(FileError::unexpected_state("lock", path, found, expected))
        }
        Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::NOLCK | Errno::INVAL) => Ok(()),
        Err(errno) => Err(FileError::new("lock", path, errno, "a file with locks of ranges")),
    }
}

/// Releases all ranges of a description.
pub(super) fn unlock_all_ranges(descriptor: &OwnedFd) {
    let _ = set_ofd_lock(descriptor, libc::F_UNLCK, &(0..u64::MAX));
}

fn set_ofd_lock(descriptor: &OwnedFd, kind: i32, bytes: &Range<u64>) -> Result<(), Errno> {
    let offset = |at: u64| libc::off_t::try_from(at).unwrap_or(libc::off_t::MAX);
    // Length 0 is up to the end, wherever that is (fcntl(2)).
    let is_open = offset(bytes.end) == libc::off_t::MAX;
    let len = if is_open { 0 } else { offset(bytes.end) - offset(bytes.start) };
    let lock = libc::flock {
        l_type: i16::try_from(kind).map_err(|_| Errno::INVAL)?,
        l_whence: 0, // SEEK_SET
        l_start: offset(bytes.start),
        l_len: len,
        l_pid: 0,
    };
    // SAFETY: the descriptor is open for the duration of the call by its borrow, and the kernel only
    // reads the structure, which lives on this stack frame.
    let done = unsafe {
        libc::fcntl(descriptor.as_raw_fd(), libc::F_OFD_SETLK, std::ptr::from_ref(&lock))
    };
    if done == 0 {
        return Ok(());
    }
    let error = std::io::Error::last_os_error().raw_os_error();
    Err(error.map_or(Errno::IO, Errno::from_raw_os_error))
}
