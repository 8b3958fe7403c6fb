//! Key files: read once, and only if other users cannot access them.

use std::fmt;
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

/// A key file was rejected.
#[derive(Debug)]
pub struct KeyFileError {
    /// Path of the file.
    pub path: PathBuf,
    /// Problem found.
    pub found: KeyFileProblem,
}

/// Reason for rejecting a key file.
#[derive(Debug)]
pub enum KeyFileProblem {
    /// The kernel refused to open or read it.
    Io(io::Error),
    /// Not a regular file.
    NotAFile,
    /// Other users may read or write it; its mode.
    Mode(u32),
    /// The file exceeds the maximum length; its length so far.
    TooLong(u64),
}

/// Reads a file of at most `len_max` bytes that only its owner may access.
///
/// # Errors
///
/// If it does not exist, is not a file, is longer, or other users may read or write it.
pub fn read_key_file(path: &Path, len_max: u64) -> Result<Vec<u8>, KeyFileError> {
    let refuse = |found| KeyFileError { path: path.into(), found };
    let refusal = |error| refuse(KeyFileProblem::Io(error));
    // Opening a FIFO without a writer must not block.
    let flags = i32::try_from((OFlags::NONBLOCK | OFlags::CLOEXEC).bits()).unwrap_or(0);
    let open = File::options().read(true).custom_flags(flags).open(path);
    let file = open.map_err(refusal)?;
    check_metadata(&file.metadata().map_err(refusal)?, len_max).map_err(refuse)?;
    let mut bytes = Vec::new();
    file.take(len_max + 1).read_to_end(&mut bytes).map_err(refusal)?;
    if bytes.len() as u64 > len_max {
        return Err(refuse(KeyFileProblem::TooLong(bytes.len() as u64)));
    }
    Ok(bytes)
}

fn check_metadata(metadata: &Metadata, len_max: u64) -> Result<(), KeyFileProblem> {
    let mode = metadata.mode() & 0o777;
    if !metadata.is_file() {
        Err(KeyFileProblem::NotAFile)
    } else if mode & 0o077 != 0 {
        Err(KeyFileProblem::Mode(mode))
    } else if metadata.len() > len_max {
        Err(KeyFileProblem::TooLong(metadata.len()))
    } else {
        Ok(())
    }
}

impl fmt::Display for KeyFileError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.display();
        match &self.found {
            KeyFileProblem::Io(error) => write!(out, "read {path}: {error}"),
            KeyFileProblem::NotAFile => write!(out, "read {path}: found no file, expected one"),
            KeyFileProblem::Mode(mode) => write!(
                out,
                "read {path}: its mode is {mode:03o}, expected one that only its owner may read: \
                 chmod 600 {path}"
            ),
            KeyFileProblem::TooLong(len) => {
                write!(out, "read {path}: found {len} bytes, which is no key")
            }
        }
    }
}

impl std::error::Error for KeyFileError {}

#[cfg(test)]
mod tests {
    use std::fs::{Permissions, set_permissions, write};
    use std::os::unix::fs::PermissionsExt;

    use super::read_key_file;

    #[test]
    fn only_a_file_private_to_its_owner_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("key");
        write(&path, b"secret").unwrap();
        for (mode, good) in [(0o600, true), (0o400, true), (0o640, false), (0o604, false)] {
            set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            let read = read_key_file(&path, 6);
            assert_eq!(read.is_ok(), good, "{mode:o}");
            if let Err(refused) = read {
                let expected = format!("its mode is {mode:03o}, expected one that only its owner");
                assert!(refused.to_string().contains(&expected), "{refused}");
            }
        }
        set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        assert_eq!(read_key_file(&path, 6).unwrap(), b"secret");
        let long = read_key_file(&path, 5).unwrap_err().to_string();
        assert!(long.ends_with("found 6 bytes, which is no key"), "{long}");
        let directory = read_key_file(directory.path(), 6).unwrap_err().to_string();
        assert!(directory.ends_with("found no file, expected one"), "{directory}");
        assert!(read_key_file(&path.with_extension("x"), 6).is_err());
    }
}
