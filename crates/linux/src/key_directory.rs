//! Directory of key files, which only their owner can read.
//!
//! ```text
//!   /etc/tenmil/keys/     0700, of this user or root, no symbolic link
//!     db-host             0600, of this user or root, a regular file
//! ```
//!
//! The directory is opened once and every file relative to it, whatever becomes of the path. What
//! others could read or replace is rejected. A new file appears complete and durable, or not at all.

use std::fmt;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;

use crate::sandbox::service_uid;
use crate::secret_memory::SecretBuffer;

/// Open directory of key files; a handle, cheap to clone.
#[derive(Clone, Debug)]
pub struct KeyDirectory {
    directory: Arc<File>,
    path: PathBuf,
    /// The owner of the directory and its files, if not root.
    own: u32,
}

/// A key file, without its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyFileAttributes {
    /// Length in bytes.
    pub len_bytes: u64,
    /// Time of the last change, in seconds since 1970.
    pub modified_unix_s: i64,
}

/// Whether a new file may replace an existing one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overwrite {
    /// An existing file is an error.
    Refuse,
    /// An existing file is replaced.
    Replace,
}

/// A directory or a file of keys was rejected.
#[derive(Debug)]
pub struct KeyDirectoryError {
    /// What was being done: `open`, `read`, `write`, `remove`.
    pub action: &'static str,
    /// Path of the directory or the file.
    pub path: PathBuf,
    /// Problem found.
    pub found: KeyPathProblem,
}

/// Reason for rejecting a directory or a file.
#[derive(Debug)]
pub enum KeyPathProblem {
    /// The kernel refused.
    Io(io::Error),
    /// It does not exist.
    Missing,
    /// It exists already.
    Exists,
    /// A symbolic link.
    Link,
    /// The path of the directory is no directory.
    NotADirectory,
    /// The key is no regular file.
    NotAFile,
    /// Owned by another user.
    Owner {
        /// Its owner.
        found: u32,
        /// The user of this process.
        expected: u32,
    },
    /// Others may access it.
    Mode {
        /// Its mode.
        found: u32,
        /// Expected mode.
        expected: u32,
    },
    /// Longer than any key.
    TooLong {
        /// Its length.
        found_bytes: u64,
        /// Longest key.
        max_bytes: usize,
    },
}

type Result<T, E = KeyDirectoryError> = std::result::Result<T, E>;

/// Permissions of others.
const OTHERS: u32 = 0o077;
const DIRECTORY_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;

impl KeyDirectory {
    /// Opens a directory.
    ///
    /// # Errors
    ///
    /// If it does not exist, is a symbolic link, belongs to a user other than the one that this process
    /// runs as, or will run as, and root, or is accessible to others.
    pub fn open(path: &Path) -> Result<Self> {
        Self::open_for_owner(path, service_uid())
    }

    /// Opens a directory; creates it, and those above it, if it does not exist.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open), or if it cannot be created.
    pub fn open_or_create(path: &Path) -> Result<Self> {
        match Self::open(path) {
            Err(KeyDirectoryError { found: KeyPathProblem::Missing, .. }) => {}
            opened => return opened,
        }
        let refuse = |error| refuse("create", path, KeyPathProblem::Io(error));
        if let Some(parent) = path.parent() {
            std::fs::DirBuilder::new().recursive(true).create(parent).map_err(refuse)?;
        }
        match std::fs::DirBuilder::new().mode(DIRECTORY_MODE).create(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(refuse(error)),
            _ => Self::open(path),
        }
    }

    fn open_for_owner(path: &Path, own: u32) -> Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = rustix::fs::open(path, flags, Mode::empty()).map_err(|error| {
            let is_link = || {
                std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_symlink())
            };
            let found = match error {
                Errno::NOENT => KeyPathProblem::Missing,
                Errno::LOOP | Errno::NOTDIR if is_link() => KeyPathProblem::Link,
                Errno::NOTDIR => KeyPathProblem::NotADirectory,
                error => KeyPathProblem::Io(error.into()),
            };
            refuse("open", path, found)
        })?;
        let directory = File::from(opened);
        let found = directory
            .metadata()
            .map_err(|error| refuse("open", path, KeyPathProblem::Io(error)))?;
        check_owner(found.uid(), own)
            .and_then(|()| check_mode(found.mode(), DIRECTORY_MODE))
            .map_err(|found| refuse("open", path, found))?;
        Ok(Self { directory: Arc::new(directory), path: path.into(), own })
    }

    /// Path of the directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Path of a file in it.
    #[must_use]
    pub fn path_of(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Names of all entries, in ascending order.
    ///
    /// # Errors
    ///
    /// The error of the system call.
    pub fn names(&self) -> Result<Vec<String>> {
        let refuse = |error: Errno| refuse("read", &self.path, KeyPathProblem::Io(error.into()));
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::read_from(&*self.directory).map_err(refuse)? {
            let name = entry.map_err(refuse)?.file_name().to_string_lossy().into_owned();
            if name != "." && name != ".." {
                names.push(name);
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    /// Reads a file of at most `max_bytes`.
    ///
    /// # Errors
    ///
    /// If it does not exist, is no regular file or a symbolic link, belongs to another user, is
    /// accessible to others, or is longer.
    pub fn read_file(
        &self,
        name: &str,
        max_bytes: usize,
    ) -> Result<(SecretBuffer, KeyFileAttributes)> {
        let (mut file, attributes) = self.open_checked(name)?;
        let too_long = |found_bytes| {
            self.refuse("read", name, KeyPathProblem::TooLong { found_bytes, max_bytes })
        };
        if attributes.len_bytes > max_bytes as u64 {
            return Err(too_long(attributes.len_bytes));
        }
        // One buffer of the largest size, and no reallocation that would leave a copy behind.
        let refuse = |error| self.refuse("read", name, KeyPathProblem::Io(error));
        let mut bytes = SecretBuffer::allocate(max_bytes + 1).map_err(refuse)?;
        let mut len = 0;
        while len < bytes.len() {
            match file.read(&mut bytes[len..]) {
                Ok(0) => break,
                Ok(count) => len += count,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(refuse(error)),
            }
        }
        if len > max_bytes {
            return Err(too_long(len as u64));
        }
        bytes.truncate(len);
        Ok((bytes, attributes))
    }

    /// Creates a file with mode 0600. It appears with all its bytes, and durable.
    ///
    /// # Errors
    ///
    /// If it exists and must not be replaced, or the error of the system call.
    pub fn create_file(&self, name: &str, bytes: &[u8], overwrite: Overwrite) -> Result<()> {
        let id = crate::random_id().map_or(0, u128::from_ne_bytes);
        let temporary = format!(".new-{id:032x}");
        let written = self.write_temporary(&temporary, bytes).and_then(|()| match overwrite {
            Overwrite::Replace => {
                Ok(rustix::fs::renameat(&*self.directory, &*temporary, &*self.directory, name)?)
            }
            // A link is refused if the name exists, unlike a rename.
            Overwrite::Refuse => Ok(rustix::fs::linkat(
                &*self.directory,
                &*temporary,
                &*self.directory,
                name,
                AtFlags::empty(),
            )?),
        });
        // Behind a rename there is nothing of that name.
        let _ = rustix::fs::unlinkat(&*self.directory, &*temporary, AtFlags::empty());
        let done = written.and_then(|()| self.directory.sync_all());
        done.map_err(|error| {
            let found = match error.kind() {
                io::ErrorKind::AlreadyExists => KeyPathProblem::Exists,
                _ => KeyPathProblem::Io(error),
            };
            self.refuse("write", name, found)
        })
    }

    fn write_temporary(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        let mut file = File::from(rustix::fs::openat(&*self.directory, name, flags, mode)?);
        file.write_all(bytes)?;
        file.sync_all()
    }

    /// Removes a file. Returns false if it does not exist.
    ///
    /// # Errors
    ///
    /// The error of the system call.
    pub fn remove_file(&self, name: &str) -> Result<bool> {
        let removed = match rustix::fs::unlinkat(&*self.directory, name, AtFlags::empty()) {
            Err(Errno::NOENT) => return Ok(false),
            removed => removed,
        };
        removed
            .map_err(io::Error::from)
            .and_then(|()| self.directory.sync_all())
            .map(|()| true)
            .map_err(|error| self.refuse("remove", name, KeyPathProblem::Io(error)))
    }

    fn open_checked(&self, name: &str) -> Result<(File, KeyFileAttributes)> {
        // Opening a FIFO must not block.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let opened = rustix::fs::openat(&*self.directory, name, flags, Mode::empty());
        let opened = opened.map_err(|error| {
            let found = match error {
                Errno::NOENT => KeyPathProblem::Missing,
                Errno::LOOP => KeyPathProblem::Link,
                error => KeyPathProblem::Io(error.into()),
            };
            self.refuse("read", name, found)
        })?;
        let found = rustix::fs::fstat(&opened)
            .map_err(|error| self.refuse("read", name, KeyPathProblem::Io(error.into())))?;
        let is_regular = FileType::from_raw_mode(found.st_mode) == FileType::RegularFile;
        let checked = match is_regular {
            false => Err(KeyPathProblem::NotAFile),
            true => check_owner(found.st_uid, self.own)
                .and_then(|()| check_mode(found.st_mode, FILE_MODE)),
        };
        checked.map_err(|found| self.refuse("read", name, found))?;
        let attributes = KeyFileAttributes {
            len_bytes: u64::try_from(found.st_size).unwrap_or(u64::MAX),
            modified_unix_s: found.st_mtime,
        };
        Ok((File::from(opened), attributes))
    }

    fn refuse(&self, action: &'static str, name: &str, found: KeyPathProblem) -> KeyDirectoryError {
        refuse(action, &self.path_of(name), found)
    }
}

fn check_owner(found: u32, own: u32) -> Result<(), KeyPathProblem> {
    match found == 0 || found == own {
        true => Ok(()),
        false => Err(KeyPathProblem::Owner { found, expected: own }),
    }
}

fn check_mode(mode: u32, expected: u32) -> Result<(), KeyPathProblem> {
    match mode & OTHERS {
        0 => Ok(()),
        _ => Err(KeyPathProblem::Mode { found: mode & 0o7777, expected }),
    }
}

fn refuse(action: &'static str, path: &Path, found: KeyPathProblem) -> KeyDirectoryError {
    KeyDirectoryError { action, path: path.into(), found }
}

impl KeyDirectoryError {
    /// Command or step that removes the problem, if one is known.
    #[must_use]
    pub fn fix(&self) -> Option<String> {
        let path = self.path.display();
        match self.found {
            KeyPathProblem::Link => {
                Some(format!("name what {path} refers to, or move it here in place of the link"))
            }
            KeyPathProblem::Owner { expected, .. } => {
                Some(format!("`chown {expected} {path}`, or run as the owner"))
            }
            KeyPathProblem::Mode { expected, .. } => {
                Some(format!("`chmod {expected:o} {path}`; replace keys that others may have read"))
            }
            KeyPathProblem::Exists => Some("choose another name, or replace it".to_owned()),
            KeyPathProblem::Io(_)
            | KeyPathProblem::Missing
            | KeyPathProblem::NotADirectory
            | KeyPathProblem::NotAFile
            | KeyPathProblem::TooLong { .. } => None,
        }
    }
}

impl fmt::Display for KeyDirectoryError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} {}: ", self.action, self.path.display())?;
        match &self.found {
            KeyPathProblem::Io(error) => write!(out, "{error}"),
            KeyPathProblem::Missing => out.write_str("it does not exist"),
            KeyPathProblem::Exists => out.write_str("it exists already, expected a new name"),
            KeyPathProblem::Link => out.write_str("found a symbolic link, expected none"),
            KeyPathProblem::NotADirectory => {
                out.write_str("found no directory, expected one with key files")
            }
            KeyPathProblem::NotAFile => out.write_str("found no regular file, expected one"),
            KeyPathProblem::Owner { found, expected } => write!(
                out,
                "it belongs to user {found}, expected {expected}, the user of this process, or root"
            ),
            KeyPathProblem::Mode { found, expected } => write!(
                out,
                "its mode is {found:04o}, so that other users can access it, expected {expected:04o}"
            ),
            KeyPathProblem::TooLong { found_bytes, max_bytes } => {
                write!(out, "found {found_bytes} bytes, expected a key of at most {max_bytes}")
            }
        }
    }
}

impl std::error::Error for KeyDirectoryError {}

#[cfg(test)]
mod tests {
    use std::fs::{Permissions, set_permissions};
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
    use std::path::{Path, PathBuf};

    use super::{KeyDirectory, KeyDirectoryError, Overwrite};

    const SECRET: &[u8] = b"NVMeTLSkey-1:secret";

    fn key_directory() -> (tempfile::TempDir, PathBuf, KeyDirectory) {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("below/keys");
        let directory = KeyDirectory::open_or_create(&path).unwrap();
        (root, path, directory)
    }

    fn set_mode(path: &Path, mode: u32) {
        set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    /// Text and fix of an error, which has nothing of the content.
    fn text(error: KeyDirectoryError) -> String {
        let text = format!("{error}; fix: {}", error.fix().unwrap_or_default());
        assert!(!format!("{text}{error:?}").contains("secret"), "{text}");
        text
    }

    #[test]
    fn directory_and_file_are_created_private_and_are_read_again() {
        let (_root, path, directory) = key_directory();
        directory.create_file("db", SECRET, Overwrite::Refuse).unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().mode() & 0o7777;
        assert_eq!((mode(&path), mode(&path.join("db"))), (0o700, 0o600));
        let (read, attributes) = directory.read_file("db", SECRET.len()).unwrap();
        assert_eq!((&*read, attributes.len_bytes), (SECRET, SECRET.len() as u64));
        let modified = std::fs::metadata(path.join("db")).unwrap().mtime();
        assert_eq!(attributes.modified_unix_s, modified);
        assert_eq!(KeyDirectory::open(&path).unwrap().names().unwrap(), ["db"]);
    }

    #[test]
    fn existing_file_is_replaced_only_on_request_and_leaves_no_temporary_file() {
        let (_root, path, directory) = key_directory();
        directory.create_file("db", b"first", Overwrite::Refuse).unwrap();
        let refused = text(directory.create_file("db", SECRET, Overwrite::Refuse).unwrap_err());
        assert!(refused.contains("below/keys/db: it exists already"), "{refused}");
        assert_eq!(&*directory.read_file("db", 99).unwrap().0, b"first");
        directory.create_file("db", SECRET, Overwrite::Replace).unwrap();
        assert_eq!(&*directory.read_file("db", 99).unwrap().0, SECRET);
        // A link of that name is replaced, not followed.
        symlink("/nowhere", path.join("link")).unwrap();
        assert!(directory.create_file("link", SECRET, Overwrite::Refuse).is_err());
        directory.create_file("link", SECRET, Overwrite::Replace).unwrap();
        assert_eq!(directory.names().unwrap(), ["db", "link"]);
        assert!(directory.remove_file("db").unwrap() && !directory.remove_file("db").unwrap());
        assert_eq!(directory.names().unwrap(), ["link"]);
    }

    #[test]
    fn directory_or_file_accessible_to_others_is_rejected_with_the_chmod_command() {
        let (_root, path, directory) = key_directory();
        directory.create_file("db", SECRET, Overwrite::Refuse).unwrap();
        for (mode, is_accepted) in [
            (0o700, true),
            (0o500, true),
            (0o710, false),
            (0o701, false),
            (0o740, false),
            (0o704, false),
            (0o777, false),
        ] {
            set_mode(&path, mode);
            let opened = KeyDirectory::open(&path);
            assert_eq!(opened.is_ok(), is_accepted, "{mode:o}");
            if let Err(refused) = opened {
                let refused = text(refused);
                let expected = format!("its mode is {mode:04o}, ");
                assert!(refused.contains(&expected) && refused.contains("chmod 700 "), "{refused}");
            }
        }
        set_mode(&path, 0o700);
        let file = path.join("db");
        for (mode, is_accepted) in
            [(0o600, true), (0o400, true), (0o640, false), (0o602, false), (0o601, false)]
        {
            set_mode(&file, mode);
            let read = directory.read_file("db", 99);
            assert_eq!(read.is_ok(), is_accepted, "{mode:o}");
            if let Err(refused) = read {
                let refused = text(refused);
                let expected = format!("its mode is {mode:04o}, ");
                assert!(refused.contains(&expected) && refused.contains("chmod 600 "), "{refused}");
            }
        }
    }

    #[test]
    fn symbolic_links_and_other_kinds_of_files_are_rejected() {
        let (root, path, directory) = key_directory();
        let link = root.path().join("link");
        symlink(&path, &link).unwrap();
        let refused = text(KeyDirectory::open(&link).unwrap_err());
        assert!(refused.contains("found a symbolic link, expected none"), "{refused}");
        let file = root.path().join("file");
        std::fs::write(&file, SECRET).unwrap();
        let refused = text(KeyDirectory::open(&file).unwrap_err());
        assert!(refused.contains("found no directory"), "{refused}");
        symlink(&file, path.join("link")).unwrap();
        let refused = text(directory.read_file("link", 99).unwrap_err());
        assert!(refused.contains("keys/link: found a symbolic link"), "{refused}");
        std::fs::create_dir(path.join("directory")).unwrap();
        let fifo = path.join("fifo");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &fifo,
            rustix::fs::FileType::Fifo,
            rustix::fs::Mode::RUSR,
            0,
        )
        .unwrap();
        for name in ["directory", "fifo"] {
            let refused = text(directory.read_file(name, 99).unwrap_err());
            assert!(refused.contains("found no regular file"), "{refused}");
        }
        let refused = text(directory.read_file("none", 99).unwrap_err());
        assert!(refused.contains("keys/none: it does not exist"), "{refused}");
        let refused = text(KeyDirectory::open(&root.path().join("none")).unwrap_err());
        assert!(refused.contains("none: it does not exist"), "{refused}");
    }

    #[test]
    fn file_longer_than_any_key_is_rejected() {
        let (_root, _, directory) = key_directory();
        directory.create_file("db", &[b'a'; 100], Overwrite::Refuse).unwrap();
        assert_eq!(directory.read_file("db", 100).unwrap().0.len(), 100);
        let refused = text(directory.read_file("db", 99).unwrap_err());
        assert!(refused.contains("found 100 bytes, expected a key of at most 99"), "{refused}");
    }

    #[test]
    fn keys_of_another_user_are_rejected_with_both_users() {
        let (_root, path, directory) = key_directory();
        directory.create_file("db", SECRET, Overwrite::Refuse).unwrap();
        let own = rustix::process::geteuid().as_raw();
        if own != 0 {
            println!("skipped: only root can give files to another user");
            return;
        }
        std::os::unix::fs::chown(path.join("db"), Some(4711), None).unwrap();
        let refused = text(directory.read_file("db", 99).unwrap_err());
        let expected = "keys/db: it belongs to user 4711, expected 0, the user of this process";
        assert!(refused.contains(expected) && refused.contains("`chown 0 "), "{refused}");
        std::os::unix::fs::chown(&path, Some(4711), None).unwrap();
        let refused = text(KeyDirectory::open(&path).unwrap_err());
        assert!(refused.contains("it belongs to user 4711, expected 0"), "{refused}");
        // A process that will run as that user.
        let future = KeyDirectory::open_for_owner(&path, 4711).unwrap();
        assert_eq!(&*future.read_file("db", 99).unwrap().0, SECRET);
        assert!(KeyDirectory::open_for_owner(&path, 4712).is_err());
        // The keys of root are valid for others, if they can read them.
        std::os::unix::fs::chown(&path, Some(0), None).unwrap();
        KeyDirectory::open_for_owner(&path, 4711).unwrap();
    }

    #[test]
    fn renamed_directory_is_still_the_open_one() {
        let (root, path, directory) = key_directory();
        let moved = root.path().join("moved");
        std::fs::rename(&path, &moved).unwrap();
        std::fs::create_dir(&path).unwrap();
        directory.create_file("db", SECRET, Overwrite::Refuse).unwrap();
        assert!(moved.join("db").exists() && !path.join("db").exists());
    }
}
