//! The directory in which the running processes of one user leave their sockets.
//!
//! ```text
//!   $XDG_RUNTIME_DIR/tenmil/     0700, ours     if that directory is there and ours
//!   /tmp/tenmil-UID/             0700, ours     otherwise
//!     4711.sock                  0600           a process that listens
//! ```
//!
//! Whoever may enter the directory may reach the sockets, so it is refused unless it is a directory,
//! is ours, and is closed to everybody else.

use std::fmt;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use base::Span;

use crate::local_socket::Connection;

/// A directory that only its owner may enter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeDirectory {
    path: PathBuf,
}

/// Why a directory is not used.
#[derive(Debug)]
pub struct DirectoryError {
    /// Which directory.
    pub path: PathBuf,
    /// What was found there.
    pub found: Found,
}

/// What was found in place of a directory of our own.
#[derive(Debug)]
pub enum Found {
    /// The kernel refused to make or to look at it.
    Refusal(io::Error),
    /// A file, or a link to somewhere else.
    NotADirectory,
    /// Somebody else's directory.
    Owner(u32),
    /// A directory that others may enter, with this mode.
    Mode(u32),
}

const SUFFIX: &str = ".sock";
/// How long one may take to accept before it counts as busy.
const PATIENCE: Span = Span::from_ms(100);

impl RuntimeDirectory {
    /// The directory of the user who runs this process. Made if it is not there.
    pub fn of_user() -> Result<Self, DirectoryError> {
        let session = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        Self::at(place(session.as_deref(), uid(), Path::new("/tmp")))
    }

    /// The directory at `path`. Made if it is not there; its parent must be.
    pub fn at(path: impl Into<PathBuf>) -> Result<Self, DirectoryError> {
        let path = path.into();
        match check(&path, uid()) {
            Ok(()) => Ok(Self { path }),
            Err(found) => Err(DirectoryError { path, found }),
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where the process `pid` listens, if it does.
    pub fn socket_of(&self, pid: u32) -> PathBuf {
        self.path.join(format!("{pid}{SUFFIX}"))
    }

    /// The processes that listen here, lowest number first. The sockets of those that have died are
    /// taken away.
    pub fn listening(&self) -> io::Result<Vec<u32>> {
        let mut pids = Vec::new();
        for entry in std::fs::read_dir(&self.path)? {
            let name = entry?.file_name();
            let pid = name.to_str().and_then(|name| name.strip_suffix(SUFFIX)?.parse().ok());
            pids.extend(pid.filter(|pid| self.sweep(*pid)));
        }
        pids.sort_unstable();
        Ok(pids)
    }

    /// Whether `pid` listens. If nobody does, its socket is taken away.
    ///
    /// A process listens before its socket has the name that is looked for, so a refused connection
    /// means that it is gone and never that it is about to come.
    pub(crate) fn sweep(&self, pid: u32) -> bool {
        let path = self.socket_of(pid);
        let Err(error) = Connection::connect(&path, PATIENCE) else { return true };
        if error.kind() == io::ErrorKind::ConnectionRefused {
            // Somebody else may have been faster.
            let _ = std::fs::remove_file(path);
        }
        // Busy is alive, and what may not be asked is not ours to judge.
        matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::PermissionDenied)
    }
}

/// The user this process acts for.
pub fn uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// The session's directory, if it is one and ours: under `sudo` the variable may still name that of
/// another user, in whose directory ours would only be in the way.
fn place(session: Option<&Path>, uid: u32, fallback: &Path) -> PathBuf {
    let ours = |path: &&Path| {
        std::fs::metadata(path).is_ok_and(|found| found.is_dir() && found.uid() == uid)
    };
    match session.filter(ours) {
        Some(session) => session.join("tenmil"),
        None => fallback.join(format!("tenmil-{uid}")),
    }
}

fn check(path: &Path, uid: u32) -> Result<(), Found> {
    match std::fs::DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(Found::Refusal(error));
        }
        _ => {}
    }
    let found = std::fs::symlink_metadata(path).map_err(Found::Refusal)?;
    let mode = found.mode() & 0o777;
    if !found.is_dir() {
        Err(Found::NotADirectory)
    } else if found.uid() != uid {
        Err(Found::Owner(found.uid()))
    } else if mode & 0o077 != 0 {
        Err(Found::Mode(mode))
    } else {
        Ok(())
    }
}

impl fmt::Display for DirectoryError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "use {}: ", self.path.display())?;
        match &self.found {
            Found::Refusal(error) => write!(out, "{error}"),
            Found::NotADirectory => write!(out, "not a directory, expected one of mode 0700"),
            Found::Owner(owner) => write!(
                out,
                "owner is uid {owner}, expected uid {}; fix: set XDG_RUNTIME_DIR to a directory of your own",
                uid()
            ),
            Found::Mode(mode) => {
                let path = self.path.display();
                write!(out, "mode is {mode:04o}, expected 0700; fix: `chmod 700 {path}`")
            }
        }
    }
}

impl std::error::Error for DirectoryError {}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
    use std::os::unix::net::UnixListener;
    use std::path::Path;

    use super::{Found, RuntimeDirectory, check, place, uid};

    #[test]
    fn a_directory_is_made_for_its_owner_alone_and_used_again() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("run");
        let directory = RuntimeDirectory::at(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
        assert_eq!(RuntimeDirectory::at(&path).unwrap(), directory);
        assert_eq!(directory.socket_of(17), path.join("17.sock"));
        assert!(RuntimeDirectory::at(root.path().join("a/b")).is_err(), "no parent");
    }

    #[test]
    fn a_directory_that_others_may_enter_is_refused_with_its_mode() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("run");
        for mode in [0o777, 0o710, 0o701] {
            let _ = std::fs::create_dir(&path);
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            let refused = RuntimeDirectory::at(&path).unwrap_err().to_string();
            assert!(refused.contains(&format!("mode is {mode:04o}, expected 0700")), "{refused}");
        }
    }

    #[test]
    fn what_is_no_directory_of_ours_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let (real, link, file) =
            (root.path().join("real"), root.path().join("link"), root.path().join("file"));
        RuntimeDirectory::at(&real).unwrap();
        symlink(&real, &link).unwrap();
        std::fs::write(&file, "").unwrap();
        for path in [link, file] {
            let refused = RuntimeDirectory::at(path).unwrap_err();
            assert!(matches!(refused.found, Found::NotADirectory), "{refused}");
        }
        let found = check(&real, uid() + 1).unwrap_err();
        assert!(matches!(found, Found::Owner(owner) if owner == uid()), "{found:?}");
        let refused = super::DirectoryError { path: real, found }.to_string();
        assert!(refused.contains("fix: set XDG_RUNTIME_DIR"), "{refused}");
    }

    #[test]
    fn the_session_directory_is_taken_only_if_it_is_there_and_ours() {
        let root = tempfile::tempdir().unwrap();
        let (session, tmp) = (root.path(), Path::new("/tmp"));
        assert_eq!(place(Some(session), uid(), tmp), session.join("tenmil"));
        let other = uid() + 1;
        assert_eq!(place(Some(session), other, tmp), tmp.join(format!("tenmil-{other}")));
        let fallback = tmp.join(format!("tenmil-{}", uid()));
        assert_eq!(place(Some(&session.join("none")), uid(), tmp), fallback);
        assert_eq!(place(None, uid(), tmp), fallback);
    }

    #[test]
    fn the_living_are_listed_and_the_sockets_of_the_dead_taken_away() {
        let root = tempfile::tempdir().unwrap();
        let directory = RuntimeDirectory::at(root.path().join("run")).unwrap();
        let alive = UnixListener::bind(directory.socket_of(20)).unwrap();
        let _also = UnixListener::bind(directory.socket_of(3)).unwrap();
        drop(UnixListener::bind(directory.socket_of(100)).unwrap());
        std::fs::write(directory.path().join("notes.sock"), "").unwrap();
        assert_eq!(directory.listening().unwrap(), [3, 20]);
        assert!(!directory.socket_of(100).exists());
        assert!(directory.path().join("notes.sock").exists(), "not a process's");
        drop(alive);
        assert_eq!(directory.listening().unwrap(), [3]);
    }
}
