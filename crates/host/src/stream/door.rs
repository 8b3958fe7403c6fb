//! Where others may connect: a Unix socket with a path, or a TCP port.

use std::fmt;
use std::fs::Permissions;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use base::Span;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, getsockname, listen,
    socket_with, sockopt,
};

use crate::local_socket::Connection;

/// Where somebody listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A Unix socket.
    Path(PathBuf),
    /// A port; 0 stands for any that is free.
    Tcp(SocketAddr),
}

/// A socket that others may connect to.
///
/// A Unix socket has mode 0600, replaces one whose listener has died, and is taken away when the
/// door is dropped.
#[derive(Debug)]
pub struct Door {
    socket: OwnedFd,
    address: Address,
    /// So that only our own file is taken away at the end.
    inode: Option<(u64, u64)>,
}

/// Connections that wait to be accepted.
const WAITING_MAX: i32 = 128;
/// A listener that does not accept for so long is busy, and so alive.
const PATIENCE: Span = Span::from_ms(100);

impl Door {
    /// Listens.
    ///
    /// # Errors
    ///
    /// `AddrInUse` if somebody does already, `AlreadyExists` if what lies there is no socket, or
    /// what the kernel says.
    pub fn open(address: &Address) -> io::Result<Self> {
        match address {
            Address::Path(path) => Self::open_path(path),
            Address::Tcp(port) => Self::open_port(*port),
        }
    }

    fn open_path(path: &Path) -> io::Result<Self> {
        let name = SocketAddrUnix::new(path)?;
        sweep(path)?;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, FLAGS, None)?;
        bind(&socket, &name)?;
        let found = std::fs::symlink_metadata(path)?;
        let inode = Some((found.dev(), found.ino()));
        let door = Self { socket, address: Address::Path(path.into()), inode };
        // Nobody can connect before it listens.
        std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
        listen(&door.socket, WAITING_MAX)?;
        Ok(door)
    }

    fn open_port(port: SocketAddr) -> io::Result<Self> {
        let family = if port.is_ipv6() { AddressFamily::INET6 } else { AddressFamily::INET };
        let socket = socket_with(family, SocketType::STREAM, FLAGS, None)?;
        // Connections of a server that has just ended linger; that is no reason to wait.
        sockopt::set_socket_reuseaddr(&socket, true)?;
        bind(&socket, &port)?;
        listen(&socket, WAITING_MAX)?;
        let found = SocketAddr::try_from(getsockname(&socket)?)?;
        Ok(Self { socket, address: Address::Tcp(found), inode: None })
    }

    /// Where it listens, with the port that was picked.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// The next connection, if somebody wants one.
    ///
    /// # Errors
    ///
    /// What the kernel says, such as that there are no descriptors left.
    pub fn accept(&self) -> io::Result<Option<OwnedFd>> {
        loop {
            return match accept_with(&self.socket, FLAGS) {
                Ok(socket) => Ok(Some(socket)),
                Err(Errno::AGAIN) => Ok(None),
                // Whoever wanted it has gone again.
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(errno) => Err(errno.into()),
            };
        }
    }
}

const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);

/// Takes a socket away whose listener has died.
fn sweep(path: &Path) -> io::Result<()> {
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
        Ok(found) if !found.file_type().is_socket() => {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        Ok(_) => {}
    }
    match Connection::connect(path, PATIENCE) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            std::fs::remove_file(path)
        }
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Err(error),
        _ => Err(io::ErrorKind::AddrInUse.into()),
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        let Address::Path(path) = &self.address else { return };
        let found = std::fs::symlink_metadata(path);
        if found.is_ok_and(|found| self.inode == Some((found.dev(), found.ino()))) {
            // Without its listener the socket is dead, and the next one to come takes it away.
            let _ = std::fs::remove_file(path);
        }
    }
}

impl AsFd for Door {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl fmt::Display for Address {
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

    use super::{Address, Door};

    #[test]
    fn a_socket_file_is_its_owners_alone_and_gone_with_its_door() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("door");
        let door = Door::open(&Address::Path(path.clone())).unwrap();
        assert!(door.accept().unwrap().is_none(), "nobody is there");
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let _client = UnixStream::connect(&path).unwrap();
        assert!(door.accept().unwrap().is_some());
        let second = Door::open(&Address::Path(path.clone())).unwrap_err();
        assert_eq!(second.kind(), io::ErrorKind::AddrInUse, "{second}");
        drop(door);
        assert!(!path.exists());
    }

    #[test]
    fn a_dead_socket_is_replaced_and_anything_else_is_not() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("door");
        drop(UnixListener::bind(&path).unwrap());
        let door = Door::open(&Address::Path(path.clone())).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "not ours").unwrap();
        drop(door);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "not ours");
        let refused = Door::open(&Address::Path(path)).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::AlreadyExists, "{refused}");
    }

    #[test]
    fn a_port_is_picked_and_told() {
        for any in ["127.0.0.1:0", "[::1]:0"] {
            let door = match Door::open(&Address::Tcp(any.parse().unwrap())) {
                Ok(door) => door,
                // A machine without IPv6.
                Err(error) if any.starts_with('[') => {
                    assert_eq!(error.kind(), io::ErrorKind::AddrNotAvailable, "{error}");
                    continue;
                }
                Err(error) => panic!("{error}"),
            };
            let Address::Tcp(port) = door.address() else { panic!("{}", door.address()) };
            assert_ne!(port.port(), 0);
            let _client = TcpStream::connect(port).unwrap();
            assert!(door.accept().unwrap().is_some());
            let second = Door::open(&Address::Tcp(*port)).unwrap_err();
            assert_eq!(second.kind(), io::ErrorKind::AddrInUse, "{second}");
        }
    }
}
