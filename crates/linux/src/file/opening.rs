//! Opening a file that may have to be made or grown, at once or when the command is not refused.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags, SeekFrom, fstat, fsync, ftruncate, open, seek};
use rustix::io::Errno;

use super::undo::FileUndo;
use super::{FileError, FileOptions, creation, flags, not_opened};

/// Where an open file has come from.
pub(super) enum Origin {
    /// It was there.
    Found(Option<FileUndo>),
    /// It was made just now.
    Made,
    /// It has no name yet.
    Unnamed,
}

pub(super) fn open_or_make(options: &FileOptions) -> Result<(OwnedFd, Origin), FileError> {
    let path = options.path.as_path();
    let refuse = |errno| not_opened(options, errno);
    if let Some(link) = creation::unnamed_at(path) {
        let flags = flags(options) - OFlags::CREATE;
        let opened = open(link, flags, Mode::empty()).map_err(refuse)?;
        return Ok((opened, Origin::Unnamed));
    }
    let before = if options.may_create() { FileUndo::record(path) } else { None };
    let is_new = before.as_ref().is_some_and(|before| !before.existed());
    if is_new && let Some(len_bytes) = options.len_bytes {
        if let Some(made) = creation::make_unnamed(path, len_bytes) {
            return Ok((made, Origin::Unnamed));
        }
        creation::record(before.clone());
    }
    let opened = open(path, flags(options), Mode::RUSR | Mode::WUSR).map_err(refuse)?;
    Ok((opened, if is_new { Origin::Made } else { Origin::Found(before) }))
}

/// Grows the file if it is to be longer. Returns how long it was, how much of it is used, and whether it is
/// grown later.
pub(super) fn size(
    descriptor: &OwnedFd,
    options: &FileOptions,
    origin: Origin,
) -> Result<(u64, u64, bool), FileError> {
    let path = options.path.as_path();
    let refuse = |errno| FileError::new("size", path, errno, "a resizable file");
    let found = fstat(descriptor).map_err(refuse)?;
    let regular = FileType::from_raw_mode(found.st_mode) == FileType::RegularFile;
    let there = seek(descriptor, SeekFrom::End(0)).map_err(refuse)?;
    let mut grows_later = false;
    let used = match options.len_bytes {
        Some(wanted) if wanted > there && regular && options.may_create() => {
            let is_found = matches!(origin, Origin::Found(_));
            grows_later = is_found && creation::grow_later(descriptor, path, wanted);
            if !grows_later {
                grow(descriptor, path, wanted, origin)?;
            }
            wanted
        }
        Some(wanted) if wanted > there => {
            let expected = "at least the requested size";
            return Err(FileError::found("size", path, format!("{there} bytes"), expected));
        }
        Some(wanted) => wanted,
        None => there,
    };
    let used = used - used % u64::from(options.unit_bytes);
    if used == 0 {
        let expected = "at least one block";
        return Err(FileError::found("size", path, format!("{there} bytes"), expected));
    }
    Ok((there, used, grows_later))
}

/// Makes a file longer. One without a name is made durable when it has one.
fn grow(
    descriptor: &OwnedFd,
    path: &Path,
    len_bytes: u64,
    origin: Origin,
) -> Result<(), FileError> {
    let is_unnamed = matches!(origin, Origin::Unnamed);
    if let Origin::Found(before) = origin {
        creation::record(before);
    }
    ftruncate(descriptor, len_bytes)
        .map_err(|errno| FileError::new("size", path, errno, "a resizable file"))?;
    if is_unnamed { Ok(()) } else { settle(descriptor, path) }
}

/// Brings the length of a file, and its name in its directory, to stable storage: fsync(2) of a file
/// does not do the second.
pub(super) fn settle(descriptor: &OwnedFd, path: &Path) -> Result<(), FileError> {
    let refuse =
        |errno| FileError::new("sync", path, errno, "a file that was made, and its directory");
    sync(descriptor).map_err(refuse)?;
    let whole = path.canonicalize().unwrap_or_else(|_| path.into());
    let directory = whole.parent().filter(|parent| !parent.as_os_str().is_empty());
    let directory = directory.unwrap_or(Path::new("."));
    let opened =
        open(directory, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    match opened.and_then(sync) {
        // Of a directory that one may not read, and where directories have no sync.
        Ok(()) | Err(Errno::ACCESS | Errno::INVAL | Errno::OPNOTSUPP) => Ok(()),
        Err(errno) => Err(refuse(errno)),
    }
}

/// fsync(2), which tests see.
pub(super) fn sync(descriptor: impl AsFd) -> Result<(), Errno> {
    #[cfg(test)]
    super::tests::note_sync(descriptor.as_fd());
    fsync(descriptor)
}
