//! Runtime directory: sockets of one user's running processes.
//!
//! ```text
//!   $TENMIL_RUNTIME_DIR/         0700, own user     if that variable is set
//!   $XDG_RUNTIME_DIR/tenmil/     0700, own user     if that directory exists and is the user's
//!   /tmp/tenmil-UID/             0700, own user     otherwise
//!     4711.sock                  0600               a listening process
//!     NAME.sock -> 4711.sock                        its name, if it was given one
//! ```
//!
//! Access to the directory is access to the sockets. Therefore it is rejected unless it is a
//! directory, belongs to the user, and is closed to all others.

use std::fmt;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use tenmil_base::Span;

use crate::local_socket::LocalConnection;

/// Directory that only its owner may enter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuntimeDirectory {
    path: PathBuf,
}

/// A directory was rejected.
#[derive(Debug)]
pub struct RuntimeDirectoryError {
    /// Path of the directory.
    pub path: PathBuf,
    /// Problem found.
    pub found: PathProblem,
}

/// Reason for rejecting a directory.
#[derive(Debug)]
pub enum PathProblem {
    /// The kernel refused to create or examine it.
    Io(io::Error),
    /// A file or a symbolic link.
    NotADirectory,
    /// Owned by another user.
    Owner(u32),
    /// Accessible by others; its mode.
    Mode(u32),
}

/// Variable that names the directory.
pub const DIRECTORY_VARIABLE: &str = "TENMIL_RUNTIME_DIR";
pub(crate) const SUFFIX: &str = ".sock";
/// A listener whose backlog stays full for this long counts as busy.
pub(crate) const CONNECT_TIMEOUT: Span = Span::from_ms(100);

impl RuntimeDirectory {
    /// Directory of the user of this process. Created if missing.
    pub fn of_user() -> Result<Self, RuntimeDirectoryError> {
        if let Some(path) = std::env::var_os(DIRECTORY_VARIABLE) {
            return Self::at_path(path);
        }
        let session = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        Self::at_path(select_path(session.as_deref(), current_uid(), Path::new("/tmp")))
    }

    /// Directory at `path`. Created if missing; its parent must exist.
    pub fn at_path(path: impl Into<PathBuf>) -> Result<Self, RuntimeDirectoryError> {
        let path = path.into();
        match check_owner_and_mode(&path, current_uid()) {
            Ok(()) => Ok(Self { path }),
            Err(found) => Err(RuntimeDirectoryError { path, found }),
        }
    }

    /// Path of the directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Socket path of process `pid`.
    pub fn socket_of(&self, pid: u32) -> PathBuf {
        self.path.join(format!("{pid}{SUFFIX}"))
    }

    /// Path of the link that names a process.
    pub fn link_of(&self, instance: &str) -> PathBuf {
        self.path.join(format!("{instance}{SUFFIX}"))
    }

    /// Identifiers of the processes that listen here, ascending. Removes the sockets of dead
    /// processes.
    pub fn listening_processes(&self) -> io::Result<Vec<u32>> {
        let mut pids = Vec::new();
        for entry in std::fs::read_dir(&self.path)? {
            let name = entry?.file_name();
            let pid = name.to_str().and_then(|name| name.strip_suffix(SUFFIX)?.parse().ok());
            pids.extend(pid.filter(|pid| self.is_listening_or_remove(*pid)));
        }
        pids.sort_unstable();
        Ok(pids)
    }

    /// Whether `pid` is listening. Otherwise its socket is removed.
    ///
    /// A process listens before its socket gets this name, so a refused connection means that the
    /// process is dead, never that it is still starting.
    pub(crate) fn is_listening_or_remove(&self, pid: u32) -> bool {
        let path = self.socket_of(pid);
        let Err(error) = LocalConnection::connect(&path, CONNECT_TIMEOUT) else { return true };
        if error.kind() == io::ErrorKind::ConnectionRefused {
            // Another process may have removed it first.
            let _ = std::fs::remove_file(path);
        }
        // A busy listener is alive; a socket without permission is left alone.
        matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::PermissionDenied)
    }
}

/// User identifier of this process.
pub fn current_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Session directory, if it is a directory of this user: under `sudo` the variable may still name
/// that of another user.
fn select_path(session: Option<&Path>, uid: u32, fallback: &Path) -> PathBuf {
    let ours = |path: &&Path| {
        std::fs::metadata(path).is_ok_and(|found| found.is_dir() && found.uid() == uid)
    };
    match session.filter(ours) {
        Some(session) => session.join("tenmil"),
        None => fallback.join(format!("tenmil-{uid}")),
    }
}

fn check_owner_and_mode(path: &Path, uid: u32) -> Result<(), PathProblem> {
    match std::fs::DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(PathProblem::Io(error));
        }
        _ => {}
    }
    let found = std::fs::symlink_metadata(path).map_err(PathProblem::Io)?;
    let mode = found.mode() & 0o777;
    if !found.is_dir() {
        Err(PathProblem::NotADirectory)
    } else if found.uid() != uid {
        Err(PathProblem::Owner(found.uid()))
    } else if mode & 0o077 != 0 {
        Err(PathProblem::Mode(mode))
    } else {
        Ok(())
    }
}

impl fmt::Display for RuntimeDirectoryError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "use {}: ", self.path.display())?;
        match &self.found {
            PathProblem::Io(error) => write!(out, "{error}"),
            PathProblem::NotADirectory => write!(out, "not a directory, expected one of mode 0700"),
            PathProblem::Owner(owner) => write!(
                out,
                "owner is uid {owner}, expected uid {}; fix: set XDG_RUNTIME_DIR to a directory of your own",
                current_uid()
            ),
            PathProblem::Mode(mode) => {
                let path = self.path.display();
                write!(out, "mode is {mode:04o}, expected 0700; fix: `chmod 700 {path}`")
            }
        }
    }
}

impl std::error::Error for RuntimeDirectoryError {}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
    use std::os::unix::net::UnixListener;
    use std::path::Path;

    use super::{PathProblem, RuntimeDirectory, check_owner_and_mode, current_uid, select_path};

    #[test]
    fn directory_is_created_private_and_reused() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("run");
        let directory = RuntimeDirectory::at_path(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
        assert_eq!(RuntimeDirectory::at_path(&path).unwrap(), directory);
        assert_eq!(directory.socket_of(17), path.join("17.sock"));
        assert!(RuntimeDirectory::at_path(root.path().join("a/b")).is_err(), "no parent");
    }

    #[test]
    fn directory_accessible_to_others_is_rejected_with_its_mode() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("run");
        for mode in [0o777, 0o710, 0o701] {
            let _ = std::fs::create_dir(&path);
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            let refused = RuntimeDirectory::at_path(&path).unwrap_err().to_string();
            assert!(refused.contains(&format!("mode is {mode:04o}, expected 0700")), "{refused}");
        }
    }

    #[test]
    fn directory_of_another_user_is_rejected() {
        let root = tempfile::tempdir().unwrap();
        let (real, link, file) =
            (root.path().join("real"), root.path().join("link"), root.path().join("file"));
        RuntimeDirectory::at_path(&real).unwrap();
        symlink(&real, &link).unwrap();
        std::fs::write(&file, "").unwrap();
        for path in [link, file] {
            let refused = RuntimeDirectory::at_path(path).unwrap_err();
            assert!(matches!(refused.found, PathProblem::NotADirectory), "{refused}");
        }
        let found = check_owner_and_mode(&real, current_uid() + 1).unwrap_err();
        assert!(matches!(found, PathProblem::Owner(owner) if owner == current_uid()), "{found:?}");
        let refused = super::RuntimeDirectoryError { path: real, found }.to_string();
        assert!(refused.contains("fix: set XDG_RUNTIME_DIR"), "{refused}");
    }

    #[test]
    fn session_directory_is_used_only_if_owned_by_this_user() {
        let root = tempfile::tempdir().unwrap();
        let (session, tmp) = (root.path(), Path::new("/tmp"));
        assert_eq!(select_path(Some(session), current_uid(), tmp), session.join("tenmil"));
        let other = current_uid() + 1;
        assert_eq!(select_path(Some(session), other, tmp), tmp.join(format!("tenmil-{other}")));
        let fallback = tmp.join(format!("tenmil-{}", current_uid()));
        assert_eq!(select_path(Some(&session.join("none")), current_uid(), tmp), fallback);
        assert_eq!(select_path(None, current_uid(), tmp), fallback);
    }

    #[test]
    fn live_processes_are_listed_and_dead_sockets_removed() {
        let root = tempfile::tempdir().unwrap();
        let directory = RuntimeDirectory::at_path(root.path().join("run")).unwrap();
        let alive = UnixListener::bind(directory.socket_of(20)).unwrap();
        let _also = UnixListener::bind(directory.socket_of(3)).unwrap();
        drop(UnixListener::bind(directory.socket_of(100)).unwrap());
        std::fs::write(directory.path().join("notes.sock"), "").unwrap();
        assert_eq!(directory.listening_processes().unwrap(), [3, 20]);
        assert!(!directory.socket_of(100).exists());
        assert!(directory.path().join("notes.sock").exists(), "not a process's");
        drop(alive);
        assert_eq!(directory.listening_processes().unwrap(), [3]);
    }
}
