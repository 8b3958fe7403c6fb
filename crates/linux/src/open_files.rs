//! Files and devices that this process has open.

use std::fs::{File, Metadata};
use std::os::fd::RawFd;
use std::os::unix::fs::{DirEntryExt, FileTypeExt, MetadataExt};
use std::path::PathBuf;

use rustix::fs::OFlags;

/// Open file or device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenFile {
    /// Path, as of now.
    pub path: PathBuf,
    /// Whether it is open for writing.
    pub is_writable: bool,
    /// User that it belongs to.
    pub owner: u32,
    descriptor: RawFd,
}

/// Standard input, output and error.
const STANDARD: std::ops::RangeInclusive<RawFd> = 0..=2;

/// Regular files, block devices and character devices that are open and have a path, without standard
/// input and output. Directories and files without a name are left out.
pub fn open_files() -> Vec<OpenFile> {
    let Ok(entries) = std::fs::read_dir("/proc/self/fd") else { return Vec::new() };
    let mut files: Vec<OpenFile> =
        entries.flatten().filter_map(|entry| open_file(entry.file_name().to_str()?)).collect();
    files.sort_unstable_by(|one, other| {
        (&one.path, other.is_writable).cmp(&(&other.path, one.is_writable))
    });
    files.dedup_by(|later, earlier| later.path == earlier.path);
    files
}

fn open_file(name: &str) -> Option<OpenFile> {
    let descriptor: RawFd = name.parse().ok().filter(|number| !STANDARD.contains(number))?;
    let link = link_of(descriptor);
    let path = std::fs::read_link(&link).ok().filter(|path| path.is_absolute())?;
    let open = std::fs::metadata(&link).ok()?;
    let kind = open.file_type();
    let has_data = kind.is_file() || kind.is_block_device() || kind.is_char_device();
    let path = current_path(path, &open)?;
    let status = std::fs::read_to_string(format!("/proc/self/fdinfo/{descriptor}")).ok()?;
    let flags = status.lines().find_map(|line| line.strip_prefix("flags:"))?;
    let flags = OFlags::from_bits_retain(u32::from_str_radix(flags.trim(), 8).ok()?);
    let is_path_only = flags.contains(OFlags::PATH);
    (has_data && !is_path_only).then(|| OpenFile {
        path,
        is_writable: flags.intersects(OFlags::WRONLY | OFlags::RDWR),
        owner: open.uid(),
        descriptor,
    })
}

/// The path at which an open file is. The kernel shows the name with which it was opened: another file
/// may be there by now, or none if the file was deleted, is a memfd, or got its name later (O_TMPFILE).
fn current_path(shown: PathBuf, open: &Metadata) -> Option<PathBuf> {
    let is_open = |found: &Metadata| (found.dev(), found.ino()) == (open.dev(), open.ino());
    if std::fs::metadata(&shown).is_ok_and(|found| is_open(&found)) {
        return Some(shown);
    }
    if !open.is_file() || open.nlink() == 0 {
        return None;
    }
    let entries = std::fs::read_dir(shown.parent()?).ok()?.flatten();
    let mut same = entries.filter(|entry| entry.ino() == open.ino());
    same.find(|entry| entry.metadata().is_ok_and(|found| is_open(&found))).map(|one| one.path())
}

fn link_of(descriptor: RawFd) -> PathBuf {
    format!("/proc/self/fd/{descriptor}").into()
}

impl OpenFile {
    /// Whether this process may open it once more, for reading.
    pub fn can_be_reopened(&self) -> bool {
        // A character device may do something when it is opened.
        let is_device = std::fs::metadata(link_of(self.descriptor))
            .is_ok_and(|found| found.file_type().is_char_device());
        is_device || File::open(link_of(self.descriptor)).is_ok()
    }

    /// Whether it belongs to another user than this process's.
    pub fn belongs_to_another_user(&self) -> bool {
        self.owner != rustix::process::geteuid().as_raw()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::open_files;

    #[test]
    fn file_that_got_its_name_after_it_was_opened_has_that_name() {
        let root = tempfile::tempdir().unwrap();
        let root_path = root.path().canonicalize().unwrap();
        let unnamed = tempfile::tempfile_in(&root_path).unwrap();
        assert!(open_files().iter().all(|file| !file.path.starts_with(&root_path)));
        let (before, after) = (root_path.join("before"), root_path.join("after"));
        let _open = File::create_new(&before).unwrap();
        std::fs::hard_link(&before, &after).unwrap();
        std::fs::remove_file(&before).unwrap();
        let mut found = open_files();
        found.retain(|file| file.path.starts_with(&root_path));
        assert_eq!(found.iter().map(|file| &file.path).collect::<Vec<_>>(), [&after]);
        drop(unnamed);
    }

    #[test]
    fn open_files_are_listed_with_their_access_until_they_are_deleted() {
        let root = tempfile::tempdir().unwrap();
        let root_path = root.path().canonicalize().unwrap();
        let (read, both, gone) =
            (root_path.join("read"), root_path.join("both"), root_path.join("gone"));
        for path in [&read, &both, &gone] {
            std::fs::write(path, "x").unwrap();
        }
        let _read = File::open(&read).unwrap();
        let _also = File::open(&both).unwrap();
        let _both = File::options().read(true).write(true).open(&both).unwrap();
        let _gone = File::open(&gone).unwrap();
        let _directory = File::open(&root_path).unwrap();
        std::fs::remove_file(&gone).unwrap();
        let mut found = open_files();
        found.retain(|file| file.path.starts_with(&root_path));
        let found: Vec<_> = found.iter().map(|file| (&file.path, file.is_writable)).collect();
        assert_eq!(found, [(&both, true), (&read, false)]);
        assert!(open_files().iter().all(super::OpenFile::can_be_reopened));
    }
}
