//! Listening sockets: a Unix socket path or a TCP port.

use std::fmt;
use std::fs::Permissions;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, getsockname, listen,
    socket_with, sockopt,
};
use tenmil_base::Span;

use crate::local_socket::LocalConnection;
use crate::passed_sockets::take_passed_socket;

/// Address to listen on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenAddress {
    /// Unix socket.
    Path(PathBuf),
    /// TCP address; port 0 selects any free port.
    Tcp(SocketAddr),
}

/// Listening socket.
///
/// A Unix socket has mode 0600, replaces one whose listener has died, and is removed when the
/// listener is dropped. A socket that a service manager has passed is used as it is, and its file stays.
#[derive(Debug)]
pub struct StreamListener {
    socket: OwnedFd,
    address: ListenAddress,
    /// Inode of the socket file, so that only this listener's file is removed on drop.
    inode: Option<(u64, u64)>,
}

/// Backlog of connections that wait to be accepted.
const BACKLOG: i32 = 128;
/// A listener that does not accept for this long is busy, and so alive.
const CONNECT_TIMEOUT: Span = Span::from_ms(100);

impl StreamListener {
    /// Starts listening, at a [passed socket](crate::passed_sockets) if one has the address.
    ///
    /// # Errors
    ///
    /// `AddrInUse` if another listener is alive, `AlreadyExists` if the path is not a socket, or
    /// the error of the system call.
    pub fn open(address: &ListenAddress) -> io::Result<Self> {
        if let Some(socket) = take_passed_socket(address)? {
            return Ok(Self { socket, address: address.clone(), inode: None });
        }
        match address {
            ListenAddress::Path(path) => Self::open_path(path),
            ListenAddress::Tcp(port) => Self::open_port(*port),
        }
    }

    fn open_path(path: &Path) -> io::Result<Self> {
        let name = SocketAddrUnix::new(path)?;
        remove_stale(path)?;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, FLAGS, None)?;
        bind(&socket, &name)?;
        let found = std::fs::symlink_metadata(path)?;
        let inode = Some((found.dev(), found.ino()));
        let listener = Self { socket, address: ListenAddress::Path(path.into()), inode };
        // No client can connect before `listen`.
        std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
        listen(&listener.socket, BACKLOG)?;
        Ok(listener)
    }

    fn open_port(port: SocketAddr) -> io::Result<Self> {
        let family = if port.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
        let socket = socket_with(family, SocketType::STREAM, FLAGS, None)?;
        // Connections of an exited server in TIME_WAIT must not prevent the bind.
        sockopt::set_socket_reuseaddr(&socket, true)?;
        bind(&socket, &port)?;
        listen(&socket, BACKLOG)?;
        let found = SocketAddr::try_from(getsockname(&socket)?)?;
        Ok(Self { socket, address: ListenAddress::Tcp(found), inode: None })
    }

    /// Lets the members of a group connect to a Unix socket: it gets that group and mode 0660.
    ///
    /// # Errors
    ///
    /// If this process may not give a file to the group.
    pub fn allow_group(&self, group: u32) -> io::Result<()> {
        let ListenAddress::Path(path) = &self.address else { return Ok(()) };
        std::os::unix::fs::lchown(path, None, Some(group))?;
        std::fs::set_permissions(path, Permissions::from_mode(0o660))
    }

    /// Address, with the port that was selected.
    pub fn address(&self) -> &ListenAddress {
        &self.address
    }

    /// Accepts the next pending connection, if any.
    ///
    /// # Errors
    ///
    /// The error of the system call, for instance that no descriptor is left.
    pub fn accept(&self) -> io::Result<Option<OwnedFd>> {
        loop {
            return match accept_with(&self.socket, FLAGS) {
                Ok(socket) => Ok(Some(socket)),
                Err(Errno::AGAIN) => Ok(None),
                // The client has gone already.
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(errno) => Err(errno.into()),
            };
        }
    }
}

const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// Removes a socket whose listener has died.
fn remove_stale(path: &Path) -> io::Result<()> {
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
        Ok(found) if !found.file_type().is_socket() => {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        Ok(_) => {}
    }
    match LocalConnection::connect(path, CONNECT_TIMEOUT) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path)
        }
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Err(error),
        _ => Err(io::ErrorKind::AddrInUse.into()),
    }
}

impl Drop for StreamListener {
    fn drop(&mut self) {
        let ListenAddress::Path(path) = &self.address else { return };
        let found = std::fs::symlink_metadata(path);
        if found.is_ok_and(|found| self.inode == Some((found.dev(), found.ino()))) {
            // A stale socket is replaced by the next listener.
            let _ = std::fs::remove_file(path);
        }
    }
}

impl AsFd for StreamListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => path.display().fmt(out),
            Self::Tcp(port) => port.fmt(out),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::net::TcpStream;
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::{ListenAddress, StreamListener};

    #[test]
    fn socket_file_is_private_and_removed_with_its_listener() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("listener");
        let listener = StreamListener::open(&ListenAddress::Path(path.clone())).unwrap();
        assert!(listener.accept().unwrap().is_none(), "no connection is pending");
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let _client = UnixStream::connect(&path).unwrap();
        assert!(listener.accept().unwrap().is_some());
        let second = StreamListener::open(&ListenAddress::Path(path.clone())).unwrap_err();
        assert_eq!(second.kind(), io::ErrorKind::AddrInUse, "{second}");
        drop(listener);
        assert!(!path.exists());
    }

    #[test]
    fn socket_of_a_group_has_its_group_and_mode() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("listener");
        let group = std::fs::metadata(directory.path()).unwrap().gid();
        let listener = StreamListener::open(&ListenAddress::Path(path.clone())).unwrap();
        listener.allow_group(group).unwrap();
        let found = std::fs::metadata(&path).unwrap();
        assert_eq!((found.mode() & 0o777, found.gid()), (0o660, group));
        if std::fs::metadata("/proc/self").unwrap().uid() != 0 {
            let refused = listener.allow_group(0).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied, "{refused}");
        }
    }

    #[test]
    fn stale_socket_is_replaced_and_other_files_are_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("listener");
        drop(UnixListener::bind(&path).unwrap());
        let listener = StreamListener::open(&ListenAddress::Path(path.clone())).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "not ours").unwrap();
        drop(listener);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "not ours");
        let refused = StreamListener::open(&ListenAddress::Path(path)).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::AlreadyExists, "{refused}");
    }

    #[test]
    fn port_zero_is_replaced_by_the_selected_port() {
        for any in ["127.0.0.1:0", "[::1]:0"] {
            let listener = match StreamListener::open(&ListenAddress::Tcp(any.parse().unwrap())) {
                Ok(listener) => listener,
                // A machine without IPv6.
                Err(error) if any.starts_with('[') => {
                    assert_eq!(error.kind(), io::ErrorKind::AddrNotAvailable, "{error}");
                    continue;
                }
                Err(error) => panic!("{error}"),
            };
            let ListenAddress::Tcp(port) = listener.address() else {
                panic!("{}", listener.address())
            };
            assert_ne!(port.port(), 0);
            let _client = TcpStream::connect(port).unwrap();
            assert!(listener.accept().unwrap().is_some());
            let second = StreamListener::open(&ListenAddress::Tcp(*port)).unwrap_err();
            assert_eq!(second.kind(), io::ErrorKind::AddrInUse, "{second}");
        }
    }
}
