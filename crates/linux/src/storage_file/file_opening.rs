//! Opening a file that may have to be made or grown, at once or when the command is not refused.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags, SeekFrom, fstat, fsync, ftruncate, open, seek};
use rustix::io::Errno;

use super::creation_undo::FileUndo;
use super::{FileError, FileOptions, deferred_creation, open_error, open_flags};
use crate::sandbox::give_to_service_user;

/// Where an open file has come from.
pub(super) enum FileOrigin {
    /// It was there.
    Found(Option<FileUndo>),
    /// It was made just now.
    Made,
    /// It has no name yet.
    Unnamed,
}

pub(super) fn open_or_create(options: &FileOptions) -> Result<(OwnedFd, FileOrigin), FileError> {
    let path = options.path.as_path();
    let refuse = |errno| open_error(options, errno);
    if let Some(link) = deferred_creation::path_of_unnamed(path) {
        let flags = open_flags(options) - OFlags::CREATE;
        let opened = open(link, flags, Mode::empty()).map_err(refuse)?;
        return Ok((opened, FileOrigin::Unnamed));
    }
    let before = if options.may_create() { FileUndo::of_path(path) } else { None };
    let is_new = before.as_ref().is_some_and(|before| !before.existed());
    if is_new && let Some(len_bytes) = options.len_bytes {
        if let Some(made) = deferred_creation::create_unnamed(path, len_bytes) {
            return Ok((made, FileOrigin::Unnamed));
        }
        deferred_creation::record_original_state(before.clone());
    }
    let opened = open(path, open_flags(options), Mode::RUSR | Mode::WUSR).map_err(refuse)?;
    if is_new {
        give_to_service_user(&opened).map_err(refuse)?;
    }
    Ok((opened, if is_new { FileOrigin::Made } else { FileOrigin::Found(before) }))
}

/// Grows the file if it is to be longer. Returns how long it was, how much of it is used, and whether it is
/// grown later.
pub(super) fn grow_and_measure(
    descriptor: &OwnedFd,
    options: &FileOptions,
    origin: FileOrigin,
) -> Result<(u64, u64, bool), FileError> {
    let path = options.path.as_path();
    let refuse = |errno| FileError::new("size", path, errno, "a resizable file");
    let found = fstat(descriptor).map_err(refuse)?;
    let regular = FileType::from_raw_mode(found.st_mode) == FileType::RegularFile;
    let there = seek(descriptor, SeekFrom::End(0)).map_err(refuse)?;
    let mut grows_later = false;
    let used = match options.len_bytes {
        Some(wanted) if wanted > there && regular && options.may_create() => {
            let is_found = matches!(origin, FileOrigin::Found(_));
            grows_later = is_found && deferred_creation::grow_later(descriptor, path, wanted);
            if !grows_later {
                grow_file(descriptor, path, wanted, origin)?;
            }
            wanted
        }
        Some(wanted) if wanted > there => {
            let expected = "at least the requested size";
            return Err(FileError::unexpected_state(
                "size",
                path,
                format!("{there} bytes"),
                expected,
            ));
        }
        Some(wanted) => wanted,
        None => there,
    };
    let used = used - used % u64::from(options.unit_bytes);
    if used == 0 {
        let expected = "at least one block";
        return Err(FileError::unexpected_state("size", path, format!("{there} bytes"), expected));
    }
    Ok((there, used, grows_later))
}

/// Makes a file longer. One without a name is made durable when it has one.
fn grow_file(
    descriptor: &OwnedFd,
    path: &Path,
    len_bytes: u64,
    origin: FileOrigin,
) -> Result<(), FileError> {
    let is_unnamed = matches!(origin, FileOrigin::Unnamed);
    if let FileOrigin::Found(before) = origin {
        deferred_creation::record_original_state(before);
    }
    ftruncate(descriptor, len_bytes)
        .map_err(|errno| FileError::new("size", path, errno, "a resizable file"))?;
    if is_unnamed { Ok(()) } else { sync_file_and_directory(descriptor, path) }
}

/// Brings the length of a file, and its name in its directory, to stable storage: fsync(2) of a file
/// does not do the second.
pub(super) fn sync_file_and_directory(descriptor: &OwnedFd, path: &Path) -> Result<(), FileError> {
    let refuse =
        |errno| FileError::new("sync", path, errno, "a file that was made, and its directory");
    sync_descriptor(descriptor).map_err(refuse)?;
    let whole = path.canonicalize().unwrap_or_else(|_| path.into());
    let directory = whole.parent().filter(|parent| !parent.as_os_str().is_empty());
    let directory = directory.unwrap_or(Path::new("."));
    let opened =
        open(directory, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    match opened.and_then(sync_descriptor) {
        // Of a directory that one may not read, and where directories have no sync.
        Ok(()) | Err(Errno::ACCESS | Errno::INVAL | Errno::OPNOTSUPP) => Ok(()),
        Err(errno) => Err(refuse(errno)),
    }
}

/// fsync(2), which tests see.
pub(super) fn sync_descriptor(descriptor: impl AsFd) -> Result<(), Errno> {
    #[cfg(test)]
    super::tests::record_sync(descriptor.as_fd());
    fsync(descriptor)
}
