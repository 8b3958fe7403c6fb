//! Whether this process makes and grows files, and which it will once it knows that it may.
//!
//! A command that only reads makes nothing. One that writes opens first, is refused or not, and makes
//! after that:
//!
//! ```text
//!   open    a file that is not there: one without a name in its directory (O_TMPFILE)
//!           a file that is shorter: it is as it was, and reads as zeroes behind its end
//!   keep    the names are given, and the files are grown
//! ```
//!
//! A process that is killed before leaves nothing. Where a file system has no files without a name, they
//! are made at once and recorded, and put back if the command is refused.
//!
//! A server that has begun does the same for each change of its configuration, on the thread that opens
//! what is new: [`create_files_if_ok`]. Other threads make files at once meanwhile.

use std::cell::RefCell;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{AtFlags, CWD, Mode, OFlags, fstat, ftruncate, linkat, open};
use rustix::io::Errno;

use super::FileError;
use super::creation_undo::FileUndo;
use super::file_opening::sync_file_and_directory;

/// Policy for files that do not exist, or are shorter than requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum CreationPolicy {
    /// Files are created and grown.
    Permanent,
    /// They are made and grown by [`commit_created`]; where that cannot be, at once, to be put back by [`undo_created`].
    Recorded,
    /// Creating and growing is rejected.
    Rejected,
}

static MAKING: AtomicU8 = AtomicU8::new(CreationPolicy::Permanent as u8);
static FOUND: Mutex<Vec<FileUndo>> = Mutex::new(Vec::new());
static PENDING: Mutex<Vec<PendingFile>> = Mutex::new(Vec::new());

thread_local! {
    /// What this thread makes by [`create_files_if_ok`], while it does.
    static CHANGE: RefCell<Option<PendingChange>> = const { RefCell::new(None) };
}

/// What is made if one change is not refused.
#[derive(Debug, Default)]
struct PendingChange {
    found: Vec<FileUndo>,
    pending: Vec<PendingFile>,
}

/// A file that is made or grown if the command is not refused.
#[derive(Debug)]
struct PendingFile {
    /// The file, by `O_PATH`: it is neither locked nor kept open for writing by that.
    file: OwnedFd,
    /// Its directory, without links, and its name.
    path: PathBuf,
    len_bytes: u64,
    /// Whether it has no name yet.
    is_new: bool,
}

/// Sets the policy, once, at process start. The default is [`CreationPolicy::Permanent`].
pub fn set_creation_policy(making: CreationPolicy) {
    MAKING.store(making as u8, Ordering::Relaxed);
}

/// Rejects creating and growing from now on, for commands that only read. Has an effect only while
/// the policy is [`CreationPolicy::Recorded`].
pub fn reject_creation() {
    let (recorded, refused) = (CreationPolicy::Recorded as u8, CreationPolicy::Rejected as u8);
    let _ = MAKING.compare_exchange(recorded, refused, Ordering::Relaxed, Ordering::Relaxed);
}

/// All refusals are through: a server is ready, a command begins to write. Gives the files their names and
/// lengths, durably, and makes files at once from now on. Blocks.
///
/// # Errors
///
/// If something is by now where a file was to be, and what the kernel says.
pub fn commit_created() -> Result<(), FileError> {
    lock_recorded_states().clear();
    let recorded = CreationPolicy::Recorded as u8;
    // The exchange fails if the policy is `Refused`, which stays in force.
    let _ = MAKING.compare_exchange(
        recorded,
        CreationPolicy::Permanent as u8,
        Ordering::Relaxed,
        Ordering::Relaxed,
    );
    let pending = std::mem::take(&mut *pending_files());
    pending.iter().try_for_each(PendingFile::create_or_grow)
}

/// Removes created files and truncates grown ones since [`CreationPolicy::Recorded`] was set.
///
/// A file that holds data or is open stays unchanged, so callers close their files first.
pub fn undo_created() {
    pending_files().clear();
    // The last first: a file may have been made and then grown.
    let made = std::mem::take(&mut *lock_recorded_states());
    made.iter().rev().for_each(FileUndo::restore_state);
}

/// Does what may be refused after it has opened files, in a process that makes them at once: makes and
/// grows those that this thread has opened once it is not. If it is, they are as they were. Blocks.
///
/// # Errors
///
/// Why it is refused; or why a file cannot be made, as of [`commit_created`].
pub fn create_files_if_ok<T, E: From<FileError>>(
    work: impl FnOnce() -> Result<T, E>,
) -> Result<T, E> {
    if creation_policy() != CreationPolicy::Permanent {
        return work();
    }
    CHANGE.set(Some(PendingChange::default()));
    let done = work();
    let PendingChange { mut found, pending } = CHANGE.take().unwrap_or_default();
    let made = done.and_then(|done| {
        found.extend(pending.iter().filter_map(|one| FileUndo::of_path(&one.path)));
        pending.iter().try_for_each(PendingFile::create_or_grow)?;
        Ok(done)
    });
    if made.is_err() {
        found.iter().rev().for_each(FileUndo::restore_state);
    }
    made
}

/// Does something with what this thread makes by [`create_files_if_ok`]; none if it does not.
fn with_pending_change<T>(act: impl FnOnce(&mut PendingChange) -> T) -> Option<T> {
    CHANGE.with_borrow_mut(|change| change.as_mut().map(act))
}

/// What becomes of files now.
pub(super) fn creation_policy() -> CreationPolicy {
    if with_pending_change(|_| ()).is_some() {
        return CreationPolicy::Recorded;
    }
    match MAKING.load(Ordering::Relaxed) {
        0 => CreationPolicy::Permanent,
        1 => CreationPolicy::Recorded,
        _ => CreationPolicy::Rejected,
    }
}

/// Records a file before it is created or grown.
pub(super) fn record_original_state(before: Option<FileUndo>) {
    if creation_policy() == CreationPolicy::Recorded
        && let Some(before) = before
        && with_pending_change(|change| change.found.push(before.clone())).is_none()
    {
        lock_recorded_states().push(before);
    }
}

/// Where the file at `path` can be opened and looked at: there, or, as long as it has no name, by a link of
/// this process.
pub fn path_or_proc_link(path: &Path) -> PathBuf {
    let link =
        (creation_policy() == CreationPolicy::Recorded).then(|| path_of_unnamed(path)).flatten();
    link.unwrap_or_else(|| path.into())
}

/// The link to a file without a name that is to be at `path`.
pub(super) fn path_of_unnamed(path: &Path) -> Option<PathBuf> {
    let find = |pending: &[PendingFile]| {
        let whole = if pending.is_empty() { None } else { resolved_parent(path) }?;
        pending
            .iter()
            .find(|one| one.is_new && one.path == whole)
            .map(|one| proc_fd_path(&one.file))
    };
    with_pending_change(|change| find(&change.pending)).unwrap_or_else(|| find(&pending_files()))
}

/// A file without a name that will be at `path`, `len_bytes` long; none if it is to be made at once.
pub(super) fn create_unnamed(path: &Path, len_bytes: u64) -> Option<OwnedFd> {
    // Through a link that leads nowhere a file is made elsewhere.
    if creation_policy() != CreationPolicy::Recorded || path.symlink_metadata().is_ok() {
        return None;
    }
    let path = resolved_parent(path)?;
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::CLOEXEC;
    let made = open(path.parent()?, flags, Mode::RUSR | Mode::WUSR).ok()?;
    crate::sandbox::give_to_service_user(&made).ok()?;
    add_pending(&made, path, len_bytes, true).then_some(made)
}

/// Has an open file be grown by [`commit_created`]. False if that is to be done at once.
pub(super) fn grow_later(file: &OwnedFd, path: &Path, len_bytes: u64) -> bool {
    creation_policy() == CreationPolicy::Recorded
        && add_pending(file, path.into(), len_bytes, false)
}

fn add_pending(file: &OwnedFd, path: PathBuf, len_bytes: u64, is_new: bool) -> bool {
    let Ok(file) = open(proc_fd_path(file), OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) else {
        return false;
    };
    let mut one = Some(PendingFile { file, path, len_bytes, is_new });
    with_pending_change(|change| change.pending.extend(one.take()));
    pending_files().extend(one);
    true
}

/// A path without links but for its last part; none if there is no such directory.
fn resolved_parent(path: &Path) -> Option<PathBuf> {
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    Some(directory.unwrap_or(Path::new(".")).canonicalize().ok()?.join(path.file_name()?))
}

/// The kernel's link to an open file (proc_pid_fd(5)).
pub(super) fn proc_fd_path(file: &OwnedFd) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

impl PendingFile {
    fn create_or_grow(&self) -> Result<(), FileError> {
        let Self { file, path, len_bytes, is_new } = self;
        if *is_new {
            linkat(CWD, proc_fd_path(file), CWD, path, AtFlags::SYMLINK_FOLLOW).map_err(
                |errno| {
                    FileError::new("make", path, errno, "a place where nothing has been made since")
                },
            )?;
        }
        let refuse = |errno: Errno| FileError::new("size", path, errno, "a file that can be grown");
        let opened = open(proc_fd_path(file), OFlags::RDWR | OFlags::CLOEXEC, Mode::empty());
        let opened = opened.map_err(refuse)?;
        let found = u64::try_from(fstat(&opened).map_err(refuse)?.st_size).unwrap_or(0);
        if found < *len_bytes {
            ftruncate(&opened, *len_bytes).map_err(refuse)?;
        }
        sync_file_and_directory(&opened, path)
    }
}

fn pending_files() -> MutexGuard<'static, Vec<PendingFile>> {
    PENDING.lock().unwrap_or_else(PoisonError::into_inner)
}

fn lock_recorded_states() -> MutexGuard<'static, Vec<FileUndo>> {
    FOUND.lock().unwrap_or_else(PoisonError::into_inner)
}
