//! Directory that only its owner can write to, and the files in it.
//!
//! Neither the directory nor a file in it is reached through a symbolic link: a link could lead to
//! a file of another user, which would be read or replaced instead. The directory is opened once,
//! and every file relative to it (openat), whatever becomes of the path.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawMode};

use crate::sandbox::{give_path_to_service_user, give_to_service_user, service_uid};

/// Open directory; a handle, cheap to clone.
#[derive(Clone, Debug)]
pub struct OwnedDirectory {
    directory: Arc<File>,
    /// The owner of the directory and its files, if not root.
    own: u32,
}

/// Permission bits that are rejected: write for group and others.
const WRITABLE_BY_OTHERS: RawMode = 0o022;
const OWN: Mode = Mode::RUSR.union(Mode::WUSR);

impl OwnedDirectory {
    /// Opens a directory; creates it, accessible by its owner only, if it does not exist.
    ///
    /// # Errors
    ///
    /// If it cannot be opened, the path ends in a symbolic link, or users other than this process's
    /// and root may modify it. The text contains what was found, what was expected, and the fix.
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::open_for_owner(path, service_uid())
    }

    fn open_for_owner(path: &Path, own: u32) -> io::Result<Self> {
        match rustix::fs::mkdir(path, Mode::RWXU) {
            Ok(()) => give_path_to_service_user(path)?,
            Err(rustix::io::Errno::EXIST) => {}
            Err(error) => return Err(error.into()),
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = rustix::fs::open(path, flags, Mode::empty()).map_err(|error| match error {
            rustix::io::Errno::LOOP | rustix::io::Errno::NOTDIR => io::Error::other(
                "it is a symbolic link or no directory, expected a directory: name the directory itself",
            ),
            error => error.into(),
        })?;
        let found = rustix::fs::fstat(&opened)?;
        check_owner(found.st_uid, own)?;
        let mode = found.st_mode & 0o7777;
        if mode & WRITABLE_BY_OTHERS != 0 {
            return Err(io::Error::other(format!(
                "its mode is {mode:04o}, expected only its owner to write: `chmod go-w {}`",
                path.display()
            )));
        }
        Ok(Self { directory: Arc::new(File::from(opened)), own })
    }

    /// Opens a lock file; creates it if it does not exist.
    ///
    /// # Errors
    ///
    /// If it cannot be opened, is not a regular file, or belongs to another user than root.
    pub fn lock_file(&self, name: &str) -> io::Result<File> {
        self.open_file(name, OFlags::WRONLY | OFlags::CREATE)
    }

    /// Reads a file; `None` if it does not exist.
    ///
    /// # Errors
    ///
    /// If it cannot be read, is not a regular file, or belongs to another user than root.
    pub fn read_file(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        let mut bytes = Vec::new();
        match self.open_file(name, OFlags::RDONLY) {
            Ok(mut file) => file.read_to_end(&mut bytes).map(|_| Some(bytes)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Creates a file with these bytes, replacing an existing one.
    ///
    /// # Errors
    ///
    /// The error of the system call.
    pub fn write_file(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        // An existing link or file of that name is unlinked, never opened.
        self.remove_file(name)?;
        self.open_file(name, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL)?.write_all(bytes)
    }

    /// Makes the content of a file durable.
    ///
    /// # Errors
    ///
    /// The error of the system call.
    pub fn sync_file(&self, name: &str) -> io::Result<()> {
        self.open_file(name, OFlags::WRONLY)?.sync_all()
    }

    /// Renames a file, replacing an existing one.
    ///
    /// # Errors
    ///
    /// The error of the system call.
    pub fn rename_file(&self, from: &str, to: &str) -> io::Result<()> {
        Ok(rustix::fs::renameat(&*self.directory, from, &*self.directory, to)?)
    }

    /// Removes a file, if it exists.
    ///
    /// # Errors
    ///
    /// The error of the system call.
    pub fn remove_file(&self, name: &str) -> io::Result<()> {
        match rustix::fs::unlinkat(&*self.directory, name, AtFlags::empty()) {
            Ok(()) | Err(rustix::io::Errno::NOENT) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Makes the directory entries durable.
    ///
    /// # Errors
    ///
    /// The error of the system call.
    pub fn sync_entries(&self) -> io::Result<()> {
        self.directory.sync_all()
    }

    fn open_file(&self, name: &str, flags: OFlags) -> io::Result<File> {
        // Opening a FIFO would block.
        let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let opened = rustix::fs::openat(&*self.directory, name, flags, OWN);
        let opened = opened.map_err(|error| match error {
            rustix::io::Errno::LOOP => io::Error::other(format!(
                "`{name}` is a symbolic link, expected a file: move the file here, or remove the link"
            )),
            error => error.into(),
        })?;
        let found = rustix::fs::fstat(&opened)?;
        if FileType::from_raw_mode(found.st_mode) != FileType::RegularFile {
            return Err(io::Error::other(format!("`{name}` is no regular file, expected one")));
        }
        check_owner(found.st_uid, self.own)?;
        if flags.contains(OFlags::CREATE) {
            give_to_service_user(&opened)?;
        }
        Ok(File::from(opened))
    }
}

fn check_owner(owner: u32, own: u32) -> io::Result<()> {
    if owner == own || owner == 0 {
        return Ok(());
    }
    Err(io::Error::other(format!(
        "it belongs to user {owner}, expected {own}, the user of this process, or root: `chown` it, or \
         run as that user"
    )))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::OwnedDirectory;

    #[test]
    fn symlink_in_place_of_the_directory_or_a_file_is_rejected() {
        let root = tempfile::tempdir().unwrap();
        let elsewhere = root.path().join("elsewhere");
        std::fs::write(&elsewhere, "of another owner").unwrap();
        let path = root.path().join("state");
        let directory = OwnedDirectory::open(&path).unwrap();
        let link = root.path().join("link");
        symlink(&path, &link).unwrap();
        let refused = OwnedDirectory::open(&link).unwrap_err().to_string();
        assert!(refused.contains("name the directory itself"), "{refused}");
        for name in ["record", "lock"] {
            symlink(&elsewhere, path.join(name)).unwrap();
        }
        for refused in [
            directory.read_file("record").unwrap_err(),
            directory.sync_file("record").unwrap_err(),
            directory.lock_file("lock").unwrap_err(),
        ] {
            assert!(refused.to_string().contains("symbolic link"), "{refused}");
        }
        // The new file replaces the link.
        directory.write_file("record", b"own").unwrap();
        assert_eq!(directory.read_file("record").unwrap().unwrap(), b"own");
        assert_eq!(std::fs::read(&elsewhere).unwrap(), b"of another owner");
        symlink(root.path().join("none"), path.join("dangling")).unwrap();
        assert!(directory.lock_file("dangling").is_err());
        assert!(!root.path().join("none").exists());
    }

    #[test]
    fn directory_of_another_user_is_rejected_with_both_users() {
        let root = tempfile::tempdir().unwrap();
        let own = rustix::process::geteuid().as_raw();
        let path = root.path().join("state");
        OwnedDirectory::open(&path).unwrap().write_file("record", b"1").unwrap();
        // Only root can give something away; for others this process is another user's.
        let is_root = own == 0;
        let (owner, user) = if is_root { (4711, 0) } else { (own, own + 1) };
        let give = |path: &std::path::Path, owner| {
            if is_root {
                std::os::unix::fs::chown(path, Some(owner), None).unwrap();
            }
        };
        let text = format!("it belongs to user {owner}, expected {user}, the user of this process");
        give(&path, owner);
        let refused = OwnedDirectory::open_for_owner(&path, user).unwrap_err().to_string();
        assert!(refused.contains(&text) && refused.contains("`chown` it"), "{refused}");
        give(&path, 0);
        let mut directory = OwnedDirectory::open_for_owner(&path, own).unwrap();
        give(&path.join("record"), owner);
        directory.own = user;
        let refused = directory.read_file("record").unwrap_err().to_string();
        assert!(refused.contains(&text), "{refused}");
        let refused = directory.lock_file("record").unwrap_err().to_string();
        assert!(refused.contains(&text), "{refused}");
    }

    #[test]
    fn directory_writable_by_others_is_rejected_with_the_chmod_command() {
        let root = tempfile::tempdir().unwrap();
        for mode in [0o720, 0o702, 0o777] {
            std::fs::set_permissions(root.path(), PermissionsExt::from_mode(mode)).unwrap();
            let refused = OwnedDirectory::open(root.path()).unwrap_err().to_string();
            assert!(refused.contains("chmod go-w"), "{refused}");
        }
        std::fs::set_permissions(root.path(), PermissionsExt::from_mode(0o755)).unwrap();
        OwnedDirectory::open(root.path()).unwrap();
    }

    #[test]
    fn renamed_directory_is_still_the_open_one() {
        let root = tempfile::tempdir().unwrap();
        let (path, moved) = (root.path().join("state"), root.path().join("moved"));
        let directory = OwnedDirectory::open(&path).unwrap();
        std::fs::rename(&path, &moved).unwrap();
        symlink(root.path(), &path).unwrap();
        directory.write_file("record", b"1").unwrap();
        directory.rename_file("record", "other").unwrap();
        directory.sync_entries().unwrap();
        assert!(moved.join("other").exists() && !root.path().join("record").exists());
        assert_eq!(directory.read_file("record").unwrap(), None);
    }

    #[test]
    fn non_regular_file_is_not_read() {
        let root = tempfile::tempdir().unwrap();
        let directory = OwnedDirectory::open(root.path()).unwrap();
        std::fs::create_dir(root.path().join("record")).unwrap();
        let refused = directory.read_file("record").unwrap_err().to_string();
        assert!(refused.contains("no regular file"), "{refused}");
    }
}
