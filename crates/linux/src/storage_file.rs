//! Files and block devices as storage: opening, sizing, locking and querying.

mod creation_undo;
mod deferred_creation;
mod file_opening;
mod loop_device_lock;
mod range_lock;
mod replace_text;
mod replace_with_backup;
#[cfg(test)]
mod tests;
mod write_durability;

use std::fmt;
use std::io::Seek;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::{
    AtFlags, FileType, FlockOperation, Mode, OFlags, SeekFrom, StatxFlags, fcntl_getfl,
    fcntl_setfl, flock, fstat, ftruncate, major, minor, open, seek, stat, statx,
};
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use tenmil_base::{Durability, ErrorCategory};

pub use self::creation_undo::{FileUndo, contains_only_zeroes, may_contain_data};
pub use self::deferred_creation::{
    CreationPolicy, commit_created, create_files_if_ok, path_or_proc_link, reject_creation,
    set_creation_policy, undo_created,
};
use self::file_opening::{grow_and_measure, open_or_create, sync_descriptor};
pub use self::replace_text::{ReplaceError, create_text, replace_text};
pub use self::replace_with_backup::replace_with_backup;
use self::write_durability::FileDurabilityInfo;
use crate::device_users::{self, DeviceUser};
use crate::kernel_files::KernelFiles;
use crate::process_stats::{command_line, has_ended, process_name};

/// Open file or block device that stores blocks.
///
/// Locked (flock) until it is dropped, against a second opening in this or another process; readers
/// share the lock. A block device opened for writing is also claimed exclusively from the kernel,
/// so that opening fails while it is mounted or has holders.
#[derive(Debug)]
pub struct StorageFile {
    descriptor: OwnedFd,
    /// The files below a loop device, locked.
    _below: Vec<OwnedFd>,
    path: PathBuf,
    len_bytes: AtomicU64,
    found_bytes: u64,
    /// Granularity of every transfer.
    unit_bytes: u64,
    /// Whether the whole file is used (no length was given).
    uses_whole_file: bool,
    /// Whether it is grown only once the process knows that it may.
    grows_later: bool,
    direct: Result<DirectIoAlignment, BufferedReason>,
    durability: Durability,
}

/// Options for opening a file.
#[derive(Clone, Debug)]
pub struct FileOptions {
    /// Path of the file.
    pub path: PathBuf,
    /// Length to use. A missing file is created and a shorter one grown, both sparse; the rest of a
    /// longer file is not touched. `None` uses the current length.
    pub len_bytes: Option<u64>,
    /// Granularity: offset and length of every transfer are multiples of this.
    pub unit_bytes: u32,
    /// Whether to bypass the page cache (O_DIRECT) where possible.
    pub direct: bool,
    /// Whether to open for reading only; the file is then neither created nor grown.
    pub read_only: bool,
}

/// Range of a file that is entirely data or entirely a hole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileExtent {
    /// Length; zero only past the end.
    pub len_bytes: u64,
    /// The range is not allocated and reads as zeroes.
    pub is_hole: bool,
}

/// Alignment required for direct transfers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectIoAlignment {
    /// Alignment of each memory segment's address.
    pub memory_bytes: u32,
    /// Alignment of the file offset and of each segment's length.
    pub offset_bytes: u32,
}

/// Reason why transfers use the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BufferedReason {
    /// The caller requested it.
    Requested,
    /// The file system does not support direct transfers.
    NotSupported(Errno),
    /// Direct transfers require this alignment, which exceeds the unit.
    UnitTooSmall(u32),
}

/// A file could not be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileError {
    doing: &'static str,
    path: PathBuf,
    found: String,
    expected: &'static str,
    category: ErrorCategory,
}

/// Attempts, and the pause between them, for a lock whose owner has exited: five seconds, the time
/// a slow device may take to finish outstanding I/O.
const LOCK_ATTEMPTS: u32 = 500;
const LINGER_PAUSE: Duration = Duration::from_millis(10);

/// Alignment assumed where the kernel does not report it (before 6.1): a page satisfies every
/// device.
const ALIGNMENT_UNKNOWN: DirectIoAlignment =
    DirectIoAlignment { memory_bytes: 4096, offset_bytes: 4096 };

impl StorageFile {
    /// Opens, creates or grows a file, and locks it.
    pub fn open(options: &FileOptions) -> Result<Self, FileError> {
        let path = options.path.as_path();
        let (descriptor, origin) = open_or_create(options)?;
        lock_file(&descriptor, path, options.read_only)?;
        range_lock::lock_range(&descriptor, path, &(0..u64::MAX), options.read_only)?;
        let below = loop_device_lock::lock_backing_files(
            &KernelFiles::live_system(),
            &descriptor,
            options.read_only,
        )?;
        let (found_bytes, len_bytes, grows_later) = grow_and_measure(&descriptor, options, origin)?;
        let direct = enable_direct(&descriptor, options);
        let durability = FileDurabilityInfo::of_descriptor(&descriptor)
            .durability(&KernelFiles::live_system(), direct.is_ok());
        let len_bytes = AtomicU64::new(len_bytes);
        let (unit_bytes, is_whole) = (options.unit_bytes.into(), options.len_bytes.is_none());
        let path = path.into();
        Ok(Self {
            descriptor,
            _below: below,
            path,
            len_bytes,
            found_bytes,
            unit_bytes,
            uses_whole_file: is_whole,
            grows_later,
            direct,
            durability,
        })
    }

    /// Whether it is shorter than it is said to be, until the process knows that it may be grown.
    pub fn is_growth_pending(&self) -> bool {
        self.grows_later && deferred_creation::creation_policy() == CreationPolicy::Recorded
    }

    /// Reads a file that [is yet to grow](Self::is_growth_pending): behind its end there are zeroes. Blocks.
    ///
    /// # Errors
    ///
    /// The kernel's description.
    pub fn read_with_zero_fill(&self, offset: u64, into: &mut [u8]) -> std::io::Result<()> {
        // Not directly: the end need not be aligned.
        let file = std::fs::File::open(deferred_creation::proc_fd_path(&self.descriptor))?;
        let left = file.metadata()?.len().saturating_sub(offset);
        let there = usize::try_from(left).map_or(into.len(), |left| left.min(into.len()));
        into[there..].fill(0);
        file.read_exact_at(&mut into[..there], offset)
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Usable length: a multiple of the unit.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes.load(Ordering::Relaxed)
    }

    /// Sets the length of a file that is used as a whole, durably; `len_bytes` is a multiple of the
    /// unit. A block device keeps its size; the usable length changes. Blocks.
    ///
    /// # Errors
    ///
    /// If only a part of the file is used, the device is shorter, or the kernel refuses.
    pub fn resize(&self, len_bytes: u64) -> Result<(), FileError> {
        let Self { descriptor, path, .. } = self;
        let refuse = |errno| FileError::new("resize", path, errno, "a resizable file");
        let kind = FileType::from_raw_mode(fstat(descriptor).map_err(refuse)?.st_mode);
        let there = seek(descriptor, SeekFrom::End(0)).map_err(refuse)?;
        let refuse_size = |expected| {
            let found = format!("{there} bytes, of which {} are used", self.len_bytes());
            Err(FileError::unexpected_state("resize", path, found, expected))
        };
        if kind == FileType::RegularFile {
            if there != self.len_bytes() {
                return refuse_size("all of them: the rest is left alone");
            }
            ftruncate(descriptor, len_bytes).map_err(refuse)?;
            sync_descriptor(descriptor).map_err(refuse)?;
        } else if len_bytes > there {
            return refuse_size("a device of at least the requested size");
        }
        self.len_bytes.store(len_bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Current length in whole units: larger than before if the file was extended elsewhere, unless
    /// only a part of the file is used.
    ///
    /// # Errors
    ///
    /// The error of the system call.
    pub fn refresh_len(&self) -> Result<u64, FileError> {
        let Self { descriptor, path, .. } = self;
        let refuse = |errno| FileError::new("look at", path, errno, "a file with a length");
        let there = seek(descriptor, SeekFrom::End(0)).map_err(refuse)?;
        let there = there / self.unit_bytes * self.unit_bytes;
        if there < self.len_bytes() {
            return Ok(if self.is_growth_pending() { self.len_bytes() } else { there });
        }
        if self.uses_whole_file {
            self.len_bytes.fetch_max(there, Ordering::Relaxed);
        }
        Ok(self.len_bytes())
    }

    /// Length before opening: zero if the file was created or empty.
    pub fn len_bytes_before_open(&self) -> u64 {
        self.found_bytes
    }

    /// Alignment for direct transfers, or the reason why the page cache is used.
    pub fn direct_io_alignment(&self) -> Result<DirectIoAlignment, BufferedReason> {
        self.direct
    }

    /// Durability of a completed write: for a block device the state of its write cache; for a
    /// file, none if the file system is in memory.
    pub fn durability(&self) -> Durability {
        self.durability
    }

    /// Allocation state at `offset`, and the length of the range in that state. Reported as data
    /// where the file system cannot report them. Blocks for the duration of the lookup.
    pub fn extent_at(&self, offset: u64) -> FileExtent {
        let len_bytes = self.len_bytes();
        let left = len_bytes.saturating_sub(offset);
        let extent = |until: u64, is_hole| FileExtent {
            len_bytes: until.saturating_sub(offset).min(left),
            is_hole,
        };
        if left == 0 {
            return extent(offset, false);
        }
        match seek(&self.descriptor, SeekFrom::Data(offset)) {
            Ok(data) if data > offset => extent(data, true),
            Ok(_) => match seek(&self.descriptor, SeekFrom::Hole(offset)) {
                Ok(hole) => extent(hole, false),
                Err(_) => extent(len_bytes, false),
            },
            // No data up to the end of the file (lseek(2)).
            Err(Errno::NXIO) => extent(len_bytes, true),
            Err(_) => extent(len_bytes, false),
        }
    }

    /// Opens a separate file description for the syncs of one channel.
    ///
    /// The kernel reports a writeback error once per file description (errseq), so channels that
    /// shared one would not all see it. Where a second one cannot be opened (no `/proc`), the same
    /// description is used.
    pub(crate) fn open_sync_descriptor(&self) -> Result<OwnedFd, Errno> {
        let link = format!("/proc/self/fd/{}", self.descriptor.as_raw_fd());
        open(&*link, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())
            .or_else(|_| fcntl_dupfd_cloexec(&self.descriptor, 0))
    }

    /// Bytes of storage allocated: less than the length if the file has holes.
    pub fn allocated_bytes(&self) -> u64 {
        // Counted in units of 512 bytes on every file system (stat(2)).
        fstat(&self.descriptor).map_or(0, |found| u64::try_from(found.st_blocks).unwrap_or(0) * 512)
    }
}

/// Reads a text file.
///
/// # Errors
///
/// The error of the system call, or invalid UTF-8.
pub fn read_text(path: &Path) -> std::io::Result<String> {
    std::fs::read_to_string(path)
}

/// Returns the first and the last `most` bytes of the file or device at `path`, and its length. Of
/// a shorter one both parts are the whole content.
///
/// For set-up only: blocks, and uses the page cache.
///
/// # Errors
///
/// The error of the system call.
pub fn read_first_and_last_bytes(
    path: &Path,
    most: usize,
) -> std::io::Result<(Vec<u8>, Vec<u8>, u64)> {
    let file = std::fs::File::open(path)?;
    let size_bytes = (&file).seek(std::io::SeekFrom::End(0))?;
    let len = usize::try_from(size_bytes).map_or(most, |size| size.min(most));
    let mut ends = (vec![0; len], vec![0; len]);
    file.read_exact_at(&mut ends.0, 0)?;
    file.read_exact_at(&mut ends.1, size_bytes - len as u64)?;
    Ok((ends.0, ends.1, size_bytes))
}

impl AsFd for StorageFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl Drop for StorageFile {
    fn drop(&mut self) {
        // An io_uring releases its files some time after it is closed, and the lock belongs to the
        // open file description. Therefore it is unlocked explicitly. In any case it ends with the
        // process.
        range_lock::unlock_all_ranges(&self.descriptor);
        let _ = flock(&self.descriptor, FlockOperation::Unlock);
    }
}

fn open_flags(options: &FileOptions) -> OFlags {
    if options.read_only {
        return OFlags::RDONLY | OFlags::CLOEXEC;
    }
    let makes = options.len_bytes.is_some() && options.may_create();
    let create = if makes { OFlags::CREATE } else { OFlags::empty() };
    let found = stat(options.path.as_path());
    let is_device =
        found.is_ok_and(|found| FileType::from_raw_mode(found.st_mode) == FileType::BlockDevice);
    // On a block device O_EXCL is an exclusive claim: it fails while the device is mounted or
    // claimed, and prevents both later (open(2)). With O_CREAT it has another meaning; devices are
    // not created.
    let claim = if is_device { OFlags::EXCL } else { create };
    OFlags::RDWR | OFlags::CLOEXEC | claim
}

fn open_error(options: &FileOptions, errno: Errno) -> FileError {
    let path = options.path.as_path();
    if errno == Errno::BUSY {
        let expected = "a device that is not in use, whatever --overwrite";
        return FileError::unexpected_state("open", path, describe_users(path), expected);
    }
    if matches!(errno, Errno::ACCESS | Errno::PERM)
        && let Some(why) = crate::sandbox::denial_of_path(path, !options.read_only)
    {
        let expected = "a path that the process may open: start it with --sandbox-path and the \
                        directory, or with --sandbox=off";
        return FileError::unexpected_state("open", path, why, expected);
    }
    let expected = match options.len_bytes {
        _ if options.read_only => "a file that can be read",
        Some(_) if !options.may_create() => {
            "a file that can be read and written: what only reads makes none"
        }
        Some(_) => "a file that can be read and written, in a directory that exists",
        None => "a file that can be read and written; with a size it would be made",
    };
    FileError::new("open", path, errno, expected)
}

fn lock_file(descriptor: &OwnedFd, path: &Path, read_only: bool) -> Result<(), FileError> {
    let (operation, expected) = if read_only {
        (FlockOperation::NonBlockingLockShared, "not open for writing")
    } else {
        (FlockOperation::NonBlockingLockExclusive, "not open elsewhere")
    };
    match flock(descriptor, operation) {
        Ok(()) => Ok(()),
        // Some network file systems do not support locks.
        Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::NOLCK) => Ok(()),
        Err(Errno::WOULDBLOCK) => {
            let takes = || flock(descriptor, operation).is_ok();
            let is_left = || {
                let holders = lock_owners(descriptor);
                !holders.is_empty() && holders.into_iter().all(has_ended)
            };
            if wait_for_stale_lock(takes, is_left, || std::thread::sleep(LINGER_PAUSE)) {
                return Ok(());
            }
            Err(FileError::unexpected_state(
                "lock",
                path,
                describe_lock_owner(descriptor),
                expected,
            ))
        }
        Err(errno) => Err(FileError::new("lock", path, errno, expected)),
    }
}

/// Waits for a lock whose owner has exited. Returns whether the lock was acquired.
///
/// A lock belongs to the open file description, and an io_uring keeps its files open until its last
/// I/O completes: for a while after its process was killed.
fn wait_for_stale_lock(
    takes: impl Fn() -> bool,
    is_left: impl Fn() -> bool,
    pause: impl Fn(),
) -> bool {
    for _ in 0..LOCK_ATTEMPTS {
        // Checked before the lock attempt, so that a release in between is not missed.
        let is_left = is_left();
        if takes() {
            return true;
        }
        if !is_left {
            return false;
        }
        pause();
    }
    false
}

/// Text that names the user of a device: `in use: mounted at /home`.
fn describe_users(path: &Path) -> String {
    let uses: Vec<String> = DeviceUser::users_of_path(&KernelFiles::live_system(), path)
        .iter()
        .map(ToString::to_string)
        .collect();
    if uses.is_empty() { "in use".into() } else { format!("in use: {}", uses.join(", ")) }
}

/// Processes that hold a lock.
fn lock_owners(descriptor: &OwnedFd) -> Vec<u32> {
    let Ok(found) = fstat(descriptor) else { return Vec::new() };
    let device = (major(found.st_dev), minor(found.st_dev));
    device_users::lock_holders(&KernelFiles::live_system(), device, found.st_ino)
}

/// Text that names the lock owner: `process 4711 (tenmil serve file:/disk) has it open`.
fn describe_lock_owner(descriptor: &OwnedFd) -> String {
    let holders = lock_owners(descriptor);
    match holders[..] {
        [] => "another process has it open".into(),
        [pid] => describe_process(pid),
        // Parts of it, or readers: any of them may be in the way.
        _ => {
            let holders: Vec<_> = holders.into_iter().map(describe_process).collect();
            format!("in use by one of: {}", holders.join(", "))
        }
    }
}

fn describe_process(pid: u32) -> String {
    if has_ended(pid) {
        let name = process_name(pid).map_or_else(String::new, |name| format!(" ({name})"));
        return format!("process {pid}{name} has ended, and the kernel has not done its I/O yet");
    }
    if pid == std::process::id() {
        return "this process has it open already".into();
    }
    match command_line(pid) {
        Some(words) => format!("process {pid} ({}) has it open", words.join(" ")),
        None => format!("process {pid} has it open"),
    }
}

/// Switches the page cache off, if that was requested and is possible.
fn enable_direct(
    descriptor: &OwnedFd,
    options: &FileOptions,
) -> Result<DirectIoAlignment, BufferedReason> {
    if !options.direct {
        return Err(BufferedReason::Requested);
    }
    let alignment = query_alignment(descriptor).map_err(BufferedReason::NotSupported)?;
    if !options.unit_bytes.is_multiple_of(alignment.offset_bytes) {
        return Err(BufferedReason::UnitTooSmall(alignment.offset_bytes));
    }
    let flags = fcntl_getfl(descriptor).map_err(BufferedReason::NotSupported)?;
    fcntl_setfl(descriptor, flags | OFlags::DIRECT).map_err(BufferedReason::NotSupported)?;
    Ok(alignment)
}

fn query_alignment(descriptor: &OwnedFd) -> Result<DirectIoAlignment, Errno> {
    let found = match statx(descriptor, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) {
        Err(Errno::NOSYS) => return Ok(ALIGNMENT_UNKNOWN),
        found => found?,
    };
    if found.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return Ok(ALIGNMENT_UNKNOWN);
    }
    let (memory_bytes, offset_bytes) = (found.stx_dio_mem_align, found.stx_dio_offset_align);
    // Zero means that the file does not support direct transfers (statx(2)).
    let has = memory_bytes.is_power_of_two() && offset_bytes.is_power_of_two();
    has.then_some(DirectIoAlignment { memory_bytes, offset_bytes }).ok_or(Errno::OPNOTSUPP)
}

impl FileOptions {
    /// Whether the file may be created or grown.
    fn may_create(&self) -> bool {
        !self.read_only && deferred_creation::creation_policy() != CreationPolicy::Rejected
    }
}

impl FileError {
    fn new(doing: &'static str, path: &Path, errno: Errno, expected: &'static str) -> Self {
        let category = match errno {
            Errno::NOSPC | Errno::IO | Errno::MFILE | Errno::NFILE | Errno::NOMEM => {
                ErrorCategory::Environment
            }
            _ => ErrorCategory::Usage,
        };
        Self { category, ..Self::unexpected_state(doing, path, errno.to_string(), expected) }
    }

    fn unexpected_state(
        doing: &'static str,
        path: &Path,
        found: String,
        expected: &'static str,
    ) -> Self {
        Self { doing, path: path.into(), found, expected, category: ErrorCategory::Usage }
    }

    /// Error category.
    pub const fn category(&self) -> ErrorCategory {
        self.category
    }
}

impl fmt::Display for FileError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { doing, path, found, expected, .. } = self;
        write!(out, "{doing} {}: {found}, expected {expected}", path.display())
    }
}

impl std::error::Error for FileError {}

impl From<FileError> for tenmil_base::Error {
    fn from(error: FileError) -> Self {
        Self::new(error.category(), error.to_string())
    }
}

impl fmt::Display for BufferedReason {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Requested => out.write_str("through the page cache, as requested"),
            Self::NotSupported(errno) => {
                write!(out, "through the page cache: no direct transfers here ({errno})")
            }
            Self::UnitTooSmall(needed) => {
                write!(
                    out,
                    "through the page cache: direct transfers need blocks of {needed} bytes"
                )
            }
        }
    }
}

/// Text of an I/O error on a path, without the error number for common causes.
pub fn error_text(error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::NotFound => "no such file or directory".into(),
        std::io::ErrorKind::PermissionDenied => "permission denied".into(),
        std::io::ErrorKind::IsADirectory => "is a directory".into(),
        std::io::ErrorKind::ReadOnlyFilesystem => "the filesystem is read-only".into(),
        _ => error.to_string(),
    }
}
