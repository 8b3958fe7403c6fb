//! What was at a path before somebody opened it to write, and how that is put back.

use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{
    FileType, FlockOperation, Mode, OFlags, SeekFrom, Stat, flock, fstat, ftruncate, open, seek,
    stat, unlink,
};
use rustix::io::{Errno, pread};

use super::making::reach;

/// A file as it was found, or the place of one that was not there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Before {
    path: PathBuf,
    /// None if it was not there.
    len_bytes: Option<u64>,
}

impl Before {
    /// Looks at what is at `path`. None of what nobody makes or grows: devices, for one.
    pub fn look(path: &Path) -> Option<Self> {
        let len_bytes = match stat(path) {
            Ok(found) if is_regular(&found) => Some(len_bytes(&found)),
            Err(Errno::NOENT) => None,
            _ => return None,
        };
        Some(Self { path: path.into(), len_bytes })
    }

    /// Where it lies.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether it was there.
    pub fn was_there(&self) -> bool {
        self.len_bytes.is_some()
    }

    /// How long it was; zero if it was not there.
    pub fn len_bytes(&self) -> u64 {
        self.len_bytes.unwrap_or(0)
    }

    /// Takes away the file if it has been made since, and what it has grown by. It stays as it is
    /// if there is data in that, or somebody has it open: that is not the caller's to take.
    pub fn put_back(&self) {
        let Ok(path) = self.path.canonicalize() else { return };
        let is_longer = |found: Stat| is_regular(&found) && len_bytes(&found) > self.len_bytes();
        if self.len_bytes.is_some() && !stat(&path).is_ok_and(is_longer) {
            return;
        }
        let Some(descriptor) = alone(&path) else { return };
        if !is_grown(&descriptor, self.len_bytes()) {
            return;
        }
        // Of what cannot be put back, the next who comes finds that it holds nothing.
        let _ = match self.len_bytes {
            None => unlink(&path),
            Some(len_bytes) => ftruncate(&descriptor, len_bytes),
        };
    }
}

/// Whether the file at `path` holds nothing but zeroes: a regular file in which no more than
/// [`ZEROES_READ_MAX`] bytes have to be read to know. Blocks while they are read.
pub fn holds_zeroes(path: &Path) -> bool {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let opened = open(reach(path), flags, Mode::empty());
    opened.is_ok_and(|descriptor| {
        fstat(&descriptor).is_ok_and(|found| is_regular(&found))
            && are_zeroes(&descriptor).unwrap_or(false)
    })
}

/// As much of a file is read to find out that it holds nothing.
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

/// Whether a write to the file at `path` could destroy something: false only of a regular file that
/// is one hole, as far as its file system tells.
pub fn holds_data(path: &Path) -> bool {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let opened = open(reach(path), flags, Mode::empty());
    opened.map_or(true, |descriptor| {
        !fstat(&descriptor).is_ok_and(|found| is_regular(&found)) || has_data_from(&descriptor, 0)
    })
}

/// The file at `path`, if nobody else has it open as blocks, and it is still at `path`.
fn alone(path: &Path) -> Option<OwnedFd> {
    let descriptor = open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).ok()?;
    flock(&descriptor, FlockOperation::NonBlockingLockExclusive).ok()?;
    let (opened, there) = (fstat(&descriptor).ok()?, stat(path).ok()?);
    let is_same = (opened.st_dev, opened.st_ino) == (there.st_dev, there.st_ino);
    (is_same && is_regular(&opened)).then_some(descriptor)
}

/// Whether there is nothing from `offset` on but what growing a file adds: zeroes in the block that
/// it ended in, and a hole.
fn is_grown(descriptor: &OwnedFd, offset: u64) -> bool {
    let Ok(found) = fstat(descriptor) else { return false };
    let edge = offset.next_multiple_of(u64::try_from(found.st_blksize).unwrap_or(0).max(1));
    let len = edge.min(len_bytes(&found)).saturating_sub(offset);
    let mut rest = vec![0; usize::try_from(len).unwrap_or(0)];
    let is_read = pread(descriptor, &mut rest, offset).is_ok_and(|count| count as u64 == len);
    is_read && rest.iter().all(|byte| *byte == 0) && !has_data_from(descriptor, edge)
}

fn has_data_from(descriptor: impl AsFd, offset: u64) -> bool {
    // No data from there to the end (lseek(2)).
    !matches!(seek(descriptor, SeekFrom::Data(offset)), Err(Errno::NXIO))
}

fn is_regular(found: &Stat) -> bool {
    FileType::from_raw_mode(found.st_mode) == FileType::RegularFile
}

fn len_bytes(found: &Stat) -> u64 {
    u64::try_from(found.st_size).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::path::{Path, PathBuf};

    use super::{Before, holds_data};
    use crate::file::{File, FileOptions};

    fn open(path: &Path, len_bytes: u64) -> File {
        let (path, len_bytes) = (PathBuf::from(path), Some(len_bytes));
        let (unit_bytes, direct, read_only) = (512, true, false);
        File::open(&FileOptions { path, len_bytes, unit_bytes, direct, read_only }).unwrap()
    }

    fn tells_holes(path: &Path) -> bool {
        let tells = !holds_data(path);
        if !tells {
            println!("skipped: this file system does not tell its holes");
        }
        tells
    }

    #[test]
    fn what_was_made_and_what_was_grown_is_put_back() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("blocks");
        std::os::unix::fs::symlink(&path, directory.path().join("link")).unwrap();
        let before = Before::look(&directory.path().join("link")).unwrap();
        assert_eq!(before.len_bytes(), 0);
        drop(open(&path, 1 << 20));
        if !tells_holes(&path) {
            return;
        }
        before.put_back();
        assert!(!path.exists() && directory.path().join("link").is_symlink());
        before.put_back();

        std::fs::write(&path, [1; 1300]).unwrap();
        let before = Before::look(&path).unwrap();
        assert_eq!(before.len_bytes(), 1300);
        drop(open(&path, 1 << 20));
        before.put_back();
        assert!(std::fs::read(&path).unwrap() == [1; 1300]);
        std::fs::write(&path, [1; 1000]).unwrap();
        before.put_back();
        assert_eq!(std::fs::read(&path).unwrap().len(), 1000, "and nothing is added");
    }

    #[test]
    fn what_holds_data_or_is_open_elsewhere_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("blocks");
        let before = Before::look(&path).unwrap();
        let file = open(&path, 1 << 20);
        before.put_back();
        assert!(path.exists(), "somebody has it open");
        drop(file);
        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        file.write_all_at(&[1], 1 << 19).unwrap();
        assert!(holds_data(&path));
        before.put_back();
        assert_eq!(path.metadata().unwrap().len(), 1 << 20, "somebody has written to it");

        file.set_len(512).unwrap();
        let before = Before::look(&path).unwrap();
        file.write_all_at(&[1], 1 << 19).unwrap();
        before.put_back();
        assert_eq!(path.metadata().unwrap().len(), (1 << 19) + 1);

        file.set_len(512).unwrap();
        file.write_all_at(&[1], 1000).unwrap();
        before.put_back();
        assert_eq!(path.metadata().unwrap().len(), 1001, "in the block that it ended in");
    }

    #[test]
    fn only_a_file_that_is_one_hole_holds_nothing() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("blocks");
        assert!(holds_data(&path), "who knows what comes to be there");
        assert!(holds_data(directory.path()) && holds_data(Path::new("/dev/null")));
        assert_eq!(Before::look(Path::new("/dev/null")), None);
        std::fs::write(&path, "").unwrap();
        assert!(!holds_data(&path));
        std::fs::write(&path, "a").unwrap();
        assert!(holds_data(&path));
    }
}
