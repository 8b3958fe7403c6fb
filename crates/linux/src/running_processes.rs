//! Search for the control sockets of running processes.
//!
//! | user | directories |
//! |---|---|
//! | any | the one of this process ([`RuntimeDirectory::of_user`]), `/run/user/UID/tenmil`, `/tmp/tenmil-UID` |
//! | root | the same of all users, and `/run/tenmil`, that of the system service |
//!
//! With `TENMIL_RUNTIME_DIR` only that one. A directory is skipped unless it belongs to the user that its
//! name says and is closed to all others, and a socket unless a process of that user listens at it: a
//! user must not lead root to another process.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::local_socket::LocalConnection;
use crate::runtime_directory::{
    CONNECT_TIMEOUT, DIRECTORY_VARIABLE, RuntimeDirectory, RuntimeDirectoryError, SUFFIX,
    current_uid,
};

/// Process that listens at a control socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListeningProcess {
    /// Identifier.
    pub pid: u32,
    /// User.
    pub uid: u32,
    /// Name, if it was given one.
    pub instance: Option<String>,
    /// Path of the socket.
    pub socket: PathBuf,
}

/// Directories in which processes are searched.
#[derive(Clone, Debug)]
pub struct ProcessSearch {
    own: RuntimeDirectory,
    /// Root of the file system, if further directories are searched.
    root: Option<PathBuf>,
}

impl ProcessSearch {
    /// Search for the processes that the user of this process may control.
    ///
    /// # Errors
    ///
    /// If the directory of this process is rejected.
    pub fn of_user() -> Result<Self, RuntimeDirectoryError> {
        let is_named = std::env::var_os(DIRECTORY_VARIABLE).is_some();
        let root = (!is_named).then(|| PathBuf::from("/"));
        Ok(Self { own: RuntimeDirectory::of_user()?, root })
    }

    /// Search in one directory only.
    pub fn in_directory(own: RuntimeDirectory) -> Self {
        Self { own, root: None }
    }

    /// Directory of this process.
    pub fn own_directory(&self) -> &RuntimeDirectory {
        &self.own
    }

    /// Processes in the directory of this process, or if there is none, those in the others; ascending.
    /// Removes the sockets of dead processes of this user.
    ///
    /// # Errors
    ///
    /// If the directory of this process cannot be read.
    pub fn processes(&self) -> io::Result<Vec<ListeningProcess>> {
        let own = self.own_processes()?;
        Ok(if own.is_empty() { self.other_processes() } else { own })
    }

    /// Processes in all directories; those in the directory of this process first.
    ///
    /// # Errors
    ///
    /// If the directory of this process cannot be read.
    pub fn all_processes(&self) -> io::Result<Vec<ListeningProcess>> {
        let mut found = self.own_processes()?;
        found.extend(self.other_processes());
        Ok(found)
    }

    /// The process of this identifier.
    ///
    /// # Errors
    ///
    /// If the directory of this process cannot be read.
    pub fn find_pid(&self, pid: u32) -> io::Result<Option<ListeningProcess>> {
        self.find(|process| process.pid == pid)
    }

    /// The process of this name.
    ///
    /// # Errors
    ///
    /// If the directory of this process cannot be read.
    pub fn find_instance(&self, name: &str) -> io::Result<Option<ListeningProcess>> {
        self.find(|process| process.instance.as_deref() == Some(name))
    }

    fn find(
        &self,
        mut is_it: impl FnMut(&ListeningProcess) -> bool,
    ) -> io::Result<Option<ListeningProcess>> {
        let own = self.own_processes()?.into_iter().find(&mut is_it);
        Ok(own.or_else(|| self.other_processes().into_iter().find(is_it)))
    }

    fn own_processes(&self) -> io::Result<Vec<ListeningProcess>> {
        processes_in(self.own.path(), current_uid())
    }

    fn other_processes(&self) -> Vec<ListeningProcess> {
        let Some(root) = &self.root else { return Vec::new() };
        let uid = current_uid();
        let mut candidates: Vec<(u32, PathBuf)> = Vec::new();
        if uid == 0 {
            let users = numbered_entries(&root.join("run/user"), "");
            candidates.extend(users.into_iter().map(|(uid, path)| (uid, path.join("tenmil"))));
            candidates.extend(numbered_entries(&root.join("tmp"), "tenmil-"));
            // Only root and the service manager create directories in /run.
            let service = root.join("run/tenmil");
            let owner = std::fs::symlink_metadata(&service).map(|found| found.uid());
            candidates.extend(owner.ok().map(|uid| (uid, service)));
        } else {
            candidates.push((uid, root.join(format!("run/user/{uid}/tenmil"))));
            candidates.push((uid, root.join(format!("tmp/tenmil-{uid}"))));
        }
        candidates.sort_unstable();
        let closed = candidates
            .into_iter()
            .filter(|(uid, path)| path != self.own.path() && is_closed_directory_of(path, *uid));
        // A directory that disappears meanwhile has no processes.
        closed.flat_map(|(uid, path)| processes_in(&path, uid).unwrap_or_default()).collect()
    }
}

/// Entries of a directory whose name is `prefix` and a number.
fn numbered_entries(directory: &Path, prefix: &str) -> Vec<(u32, PathBuf)> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let numbered = entries.filter_map(|entry| {
        let number = entry.file_name().to_str()?.strip_prefix(prefix)?.parse().ok()?;
        Some((number, entry.path()))
    });
    numbered.collect()
}

fn is_closed_directory_of(path: &Path, uid: u32) -> bool {
    std::fs::symlink_metadata(path)
        .is_ok_and(|found| found.is_dir() && found.uid() == uid && found.mode() & 0o077 == 0)
}

/// Processes of user `uid` that listen in a directory of that user, ascending.
fn processes_in(directory: &Path, uid: u32) -> io::Result<Vec<ListeningProcess>> {
    let (mut processes, mut names) = (Vec::new(), Vec::new());
    for entry in std::fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(name) = name.to_str().and_then(|name| name.strip_suffix(SUFFIX)) else { continue };
        if let Ok(pid) = name.parse() {
            let socket = entry.path();
            if is_listening(&socket, uid) {
                processes.push(ListeningProcess { pid, uid, instance: None, socket });
            }
        } else if let Some(pid) = linked_pid(&entry.path()) {
            names.push((pid, name.to_owned()));
        }
    }
    for (pid, name) in names {
        let named = processes.iter_mut().find(|process| process.pid == pid);
        named.into_iter().for_each(|process| process.instance = Some(name.clone()));
    }
    processes.sort_unstable_by_key(|process| process.pid);
    Ok(processes)
}

/// Process to whose socket a link with a name leads.
pub(crate) fn linked_pid(link: &Path) -> Option<u32> {
    let target = std::fs::read_link(link).ok()?;
    target.to_str()?.strip_suffix(SUFFIX)?.parse().ok()
}

/// Whether a process of user `uid` listens at a socket. Otherwise the socket is removed, if it belongs
/// to this user.
fn is_listening(socket: &Path, uid: u32) -> bool {
    let is_own = uid == current_uid();
    match LocalConnection::connect(socket, CONNECT_TIMEOUT) {
        Ok(connection) => {
            is_own || connection.peer().is_ok_and(|peer| peer.uid == uid || peer.uid == 0)
        }
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            if is_own {
                // Another process may have removed it first.
                let _ = std::fs::remove_file(socket);
            }
            false
        }
        // A busy listener is alive; a socket without permission is left alone.
        Err(error) => {
            matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::PermissionDenied)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{DirBuilderExt, PermissionsExt, symlink};
    use std::os::unix::net::UnixListener;
    use std::path::Path;

    use super::ProcessSearch;
    use crate::runtime_directory::{RuntimeDirectory, current_uid};

    fn make_directory(path: &Path) {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path).unwrap();
    }

    #[test]
    fn processes_in_other_directories_of_the_user_are_found_if_the_own_has_none() {
        let root = tempfile::tempdir().unwrap();
        let own = RuntimeDirectory::at_path(root.path().join("own")).unwrap();
        let uid = current_uid();
        let temporary = root.path().join(format!("tmp/tenmil-{uid}"));
        let session = root.path().join(format!("run/user/{uid}/tenmil"));
        make_directory(&temporary);
        make_directory(&session);
        let _one = UnixListener::bind(temporary.join("7.sock")).unwrap();
        let _other = UnixListener::bind(session.join("9.sock")).unwrap();
        symlink("9.sock", session.join("db.sock")).unwrap();
        let search = ProcessSearch { own: own.clone(), root: Some(root.path().into()) };
        let pids = |search: &ProcessSearch| {
            search.processes().unwrap().iter().map(|process| process.pid).collect::<Vec<_>>()
        };
        assert_eq!(pids(&search), [9, 7], "by path");
        let own_listener = UnixListener::bind(own.socket_of(11)).unwrap();
        assert_eq!(pids(&search), [11]);
        assert_eq!(search.all_processes().unwrap().len(), 3);
        let found = search.find_pid(7).unwrap().unwrap();
        assert_eq!((found.uid, found.socket), (uid, temporary.join("7.sock")));
        assert_eq!(search.find_instance("db").unwrap().unwrap().pid, 9);
        assert_eq!(search.find_instance("other").unwrap(), None);
        let alone = ProcessSearch::in_directory(own.clone());
        assert_eq!(alone.find_pid(7).unwrap(), None);
        drop(own_listener);
        assert_eq!(pids(&alone), [0; 0]);
        assert!(!own.socket_of(11).exists(), "of a dead process");
    }

    #[test]
    fn root_finds_the_system_service() {
        if current_uid() != 0 {
            println!("skipped: only root looks for it");
            return;
        }
        let root = tempfile::tempdir().unwrap();
        let own = RuntimeDirectory::at_path(root.path().join("own")).unwrap();
        let service = root.path().join("run/tenmil");
        make_directory(&service);
        let _listener = UnixListener::bind(service.join("7.sock")).unwrap();
        let search = ProcessSearch { own, root: Some(root.path().into()) };
        assert_eq!(search.find_pid(7).unwrap().unwrap().socket, service.join("7.sock"));
    }

    #[test]
    fn open_directories_and_links_are_skipped() {
        let root = tempfile::tempdir().unwrap();
        let own = RuntimeDirectory::at_path(root.path().join("own")).unwrap();
        let directory = root.path().join(format!("tmp/tenmil-{}", current_uid()));
        make_directory(&directory);
        let _listener = UnixListener::bind(directory.join("7.sock")).unwrap();
        let search = ProcessSearch { own, root: Some(root.path().into()) };
        assert_eq!(search.processes().unwrap().len(), 1);
        std::fs::set_permissions(&directory, PermissionsExt::from_mode(0o755)).unwrap();
        assert_eq!(search.processes().unwrap(), []);
        std::fs::set_permissions(&directory, PermissionsExt::from_mode(0o700)).unwrap();
        let real = root.path().join("real");
        std::fs::rename(&directory, &real).unwrap();
        symlink(&real, &directory).unwrap();
        assert_eq!(search.processes().unwrap(), []);
    }
}
