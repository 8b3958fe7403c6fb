//! Undo of creating or growing a file.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{
    FileType, FlockOperation, Mode, OFlags, SeekFrom, Stat, flock, fstat, ftruncate, open, seek,
    stat, unlink,
};
use rustix::io::{Errno, pread};

use super::deferred_creation::path_or_proc_link;

/// Previous state of a file, or the fact that it did not exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileUndo {
    path: PathBuf,
    /// `None` if the file did not exist.
    len_bytes: Option<u64>,
}

impl FileUndo {
    /// Records the state of `path`. `None` for what is never created or grown, such as devices.
    pub fn of_path(path: &Path) -> Option<Self> {
        let len_bytes = match stat(path) {
            Ok(found) if is_regular_file(&found) => Some(stat_len_bytes(&found)),
            Err(Errno::NOENT) => None,
            _ => return None,
        };
        Some(Self { path: path.into(), len_bytes })
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the file existed.
    pub fn existed(&self) -> bool {
        self.len_bytes.is_some()
    }

    /// Previous length; zero if the file did not exist.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes.unwrap_or(0)
    }

    /// Removes the file if it was created since, or truncates it to its previous length.
    ///
    /// The file stays as it is if the added part holds data, or if the file is open elsewhere.
    pub fn restore_state(&self) {
        let Ok(path) = self.path.canonicalize() else { return };
        let is_longer =
            |found: Stat| is_regular_file(&found) && stat_len_bytes(&found) > self.len_bytes();
        if self.len_bytes.is_some() && !stat(&path).is_ok_and(is_longer) {
            return;
        }
        let Some(descriptor) = open_exclusive(&path) else { return };
        if !is_unwritten_tail(&descriptor, self.len_bytes()) {
            return;
        }
        // A failure is ignored: a later run finds that the file holds no data.
        let _ = match self.len_bytes {
            None => unlink(&path),
            Some(len_bytes) => ftruncate(&descriptor, len_bytes),
        };
    }
}

/// Whether `path` is a regular file that holds only zeroes, provable by reading at most
/// [`ZEROES_READ_MAX`] bytes. Blocks while reading.
pub fn contains_only_zeroes(path: &Path) -> bool {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let opened = open(path_or_proc_link(path), flags, Mode::empty());
    opened.is_ok_and(|descriptor| {
        fstat(&descriptor).is_ok_and(|found| is_regular_file(&found))
            && are_zeroes(&descriptor).unwrap_or(false)
    })
}

/// Upper bound of the bytes read to prove that a file holds only zeroes.
const ZEROES_READ_MAX: u64 = 1 << 30;

fn are_zeroes(descriptor: &OwnedFd) -> Result<bool, Errno> {
    let (mut offset, mut read_bytes) = (0, 0);
    let mut buffer = vec![0; 1 << 20];
    loop {
        let data = match seek(descriptor, SeekFrom::Data(offset)) {
            Err(Errno::NXIO) => return Ok(true),
            data => data?,
        };
        offset = data;
        let end = seek(descriptor, SeekFrom::Hole(data))?;
        while offset < end {
            let most = usize::try_from(end - offset).unwrap_or(usize::MAX).min(buffer.len());
            let count = pread(descriptor, &mut buffer[..most], offset)?;
            read_bytes += count as u64;
            if buffer[..count].iter().any(|byte| *byte != 0) || read_bytes > ZEROES_READ_MAX {
                return Ok(false);
            }
            if count == 0 {
                return Ok(true);
            }
            offset += count as u64;
        }
    }
}

/// Whether a write to `path` could destroy data: false only for a regular file that is entirely a
/// hole, as reported by its file system.
pub fn may_contain_data(path: &Path) -> bool {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let opened = open(path_or_proc_link(path), flags, Mode::empty());
    opened.map_or(true, |descriptor| {
        !fstat(&descriptor).is_ok_and(|found| is_regular_file(&found))
            || has_data_from(&descriptor, 0)
    })
}

/// Opens and locks (flock) `path`, if no other process has locked it and it is still the same file.
fn open_exclusive(path: &Path) -> Option<OwnedFd> {
    let descriptor = open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).ok()?;
    flock(&descriptor, FlockOperation::NonBlockingLockExclusive).ok()?;
    let (opened, there) = (fstat(&descriptor).ok()?, stat(path).ok()?);
    let is_same = (opened.st_dev, opened.st_ino) == (there.st_dev, there.st_ino);
    (is_same && is_regular_file(&opened)).then_some(descriptor)
}

/// Whether the file from `offset` on holds only what growing adds: zeroes up to the end of the
/// block, then a hole.
fn is_unwritten_tail(descriptor: &OwnedFd, offset: u64) -> bool {
    let Ok(found) = fstat(descriptor) else { return false };
    let edge = offset.next_multiple_of(u64::try_from(found.st_blksize).unwrap_or(0).max(1));
    let len = edge.min(stat_len_bytes(&found)).saturating_sub(offset);
    let mut rest = vec![0; usize::try_from(len).unwrap_or(0)];
    let is_read = pread(descriptor, &mut rest, offset).is_ok_and(|count| count as u64 == len);
    is_read && rest.iter().all(|byte| *byte == 0) && !has_data_from(descriptor, edge)
}

fn has_data_from(descriptor: impl AsFd, offset: u64) -> bool {
    // No data from there to the end (lseek(2)).
    !matches!(seek(descriptor, SeekFrom::Data(offset)), Err(Errno::NXIO))
}

fn is_regular_file(found: &Stat) -> bool {
    FileType::from_raw_mode(found.st_mode) == FileType::RegularFile
}

fn stat_len_bytes(found: &Stat) -> u64 {
    u64::try_from(found.st_size).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::path::{Path, PathBuf};

    use super::{FileUndo, may_contain_data};
    use crate::storage_file::{FileOptions, StorageFile};

    fn open_file(path: &Path, len_bytes: u64) -> StorageFile {
        let (path, len_bytes) = (PathBuf::from(path), Some(len_bytes));
        let (unit_bytes, direct, read_only) = (512, true, false);
        StorageFile::open(&FileOptions { path, len_bytes, unit_bytes, direct, read_only }).unwrap()
    }

    fn file_system_reports_holes(path: &Path) -> bool {
        let tells = !may_contain_data(path);
        if !tells {
            println!("skipped: this file systemis not readable its holes");
        }
        tells
    }

    #[test]
    fn created_file_is_removed_and_a_grown_one_truncated() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("blocks");
        std::os::unix::fs::symlink(&path, directory.path().join("link")).unwrap();
        let before = FileUndo::of_path(&directory.path().join("link")).unwrap();
        assert_eq!(before.len_bytes(), 0);
        drop(open_file(&path, 1 << 20));
        if !file_system_reports_holes(&path) {
            return;
        }
        before.restore_state();
        assert!(!path.exists() && directory.path().join("link").is_symlink());
        before.restore_state();

        std::fs::write(&path, [1; 1300]).unwrap();
        let before = FileUndo::of_path(&path).unwrap();
        assert_eq!(before.len_bytes(), 1300);
        drop(open_file(&path, 1 << 20));
        before.restore_state();
        assert!(std::fs::read(&path).unwrap() == [1; 1300]);
        std::fs::write(&path, [1; 1000]).unwrap();
        before.restore_state();
        assert_eq!(std::fs::read(&path).unwrap().len(), 1000, "and nothing is added");
    }

    #[test]
    fn file_with_data_or_in_use_is_kept() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("blocks");
        let before = FileUndo::of_path(&path).unwrap();
        let file = open_file(&path, 1 << 20);
        before.restore_state();
        assert!(path.exists(), "the file is open");
        drop(file);
        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all_at(&[1], 1 << 19).unwrap();
        assert!(may_contain_data(&path));
        before.restore_state();
        assert_eq!(path.metadata().unwrap().len(), 1 << 20, "the file has data");

        file.set_len(512).unwrap();
        let before = FileUndo::of_path(&path).unwrap();
        file.write_all_at(&[1], 1 << 19).unwrap();
        before.restore_state();
        assert_eq!(path.metadata().unwrap().len(), (1 << 19) + 1);

        file.set_len(512).unwrap();
        file.write_all_at(&[1], 1000).unwrap();
        before.restore_state();
        assert_eq!(path.metadata().unwrap().len(), 1001, "in the block that it ended in");
    }

    #[test]
    fn only_an_entirely_sparse_file_contains_no_data() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("blocks");
        assert!(may_contain_data(&path), "who knows what comes to be there");
        assert!(may_contain_data(directory.path()) && may_contain_data(Path::new("/dev/null")));
        assert_eq!(FileUndo::of_path(Path::new("/dev/null")), None);
        std::fs::write(&path, "").unwrap();
        assert!(!may_contain_data(&path));
        std::fs::write(&path, "a").unwrap();
        assert!(may_contain_data(&path));
    }
}
