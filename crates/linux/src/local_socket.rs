//! Unix sockets between processes of one machine, with peer credentials.
//!
//! A listener's socket has mode 0600, appears under its name only when it is listening, and is
//! removed when the listener is dropped. Nothing here blocks, except [`LocalConnection::connect`] and
//! the `wait_*` functions, which have a time limit.

use std::fs::Permissions;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::net::sockopt::{self, Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    connect, recvmsg, sendmsg, socket_with,
};
use tenmil_base::Span;

use crate::running_processes::linked_pid;
use crate::runtime_directory::RuntimeDirectory;
use crate::stream_socket::{receive_available, send_available, wait_for_poll_flags};

/// Listening Unix socket.
#[derive(Debug)]
pub struct LocalListener {
    socket: UnixListener,
    path: PathBuf,
    /// Link that names the process.
    link: Option<PathBuf>,
    /// Inode of the socket file, so that only this listener's file is removed on drop.
    inode: (u64, u64),
}

/// Stream between two processes.
#[derive(Debug)]
pub struct LocalConnection {
    stream: UnixStream,
}

/// Credentials of the peer, as of the time of its connect or listen (SO_PEERCRED).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerCredentials {
    /// Process identifier; 0 if it is in a PID namespace that is not visible here.
    pub pid: u32,
    /// User identifier.
    pub uid: u32,
    /// Group identifier.
    pub gid: u32,
}

/// Result of a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecvResult {
    /// Number of bytes, at least one.
    Bytes(usize),
    /// Nothing available now.
    WouldBlock,
    /// The peer has closed.
    Eof,
}

/// Longest name of a process.
const INSTANCE_LEN_MAX: usize = 64;
/// Control buffer for more descriptors than any sender here passes at once.
const FILES_SPACE: usize = rustix::cmsg_space!(ScmRights(64));

impl LocalListener {
    /// Listens as process `pid` in `directory`. Replaces the socket of a dead process with the same
    /// identifier.
    ///
    /// `AddrInUse` if a live process listens there.
    pub fn bind(directory: &RuntimeDirectory, pid: u32) -> io::Result<Self> {
        let path = directory.socket_of(pid);
        if directory.is_listening_or_remove(pid) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        let unnamed = directory.path().join(format!(".{pid}"));
        match std::fs::remove_file(&unnamed) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        // Bound under a temporary name and renamed when it listens, so that the final name never
        // belongs to a socket that refuses connections.
        let socket = UnixListener::bind(&unnamed)?;
        let prepared = restrict_socket_file(&socket, &unnamed)
            .and_then(|inode| std::fs::rename(&unnamed, &path).map(|()| inode));
        match prepared {
            Ok(inode) => Ok(Self { socket, path, link: None, inode }),
            Err(error) => {
                // The first error is the more useful one.
                let _ = std::fs::remove_file(&unnamed);
                Err(error)
            }
        }
    }

    /// Names the process: a link of that name leads to its socket until the listener is dropped.
    ///
    /// # Errors
    ///
    /// `AddrInUse` if a live process has this name, `InvalidInput` if it is no name, or the error of
    /// the system call.
    pub fn set_instance(&mut self, directory: &RuntimeDirectory, name: &str) -> io::Result<()> {
        check_instance_name(name)?;
        let link = directory.link_of(name);
        let other = linked_pid(&link).filter(|pid| directory.socket_of(*pid) != self.path);
        if other.is_some_and(|pid| directory.is_listening_or_remove(pid)) {
            return Err(io::ErrorKind::AddrInUse.into());
        }
        // Renamed over the link of a dead process, so that the name always leads somewhere.
        let target = self.path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        let unnamed = directory.path().join(format!(".{name}"));
        let _ = std::fs::remove_file(&unnamed);
        std::os::unix::fs::symlink(target, &unnamed)?;
        std::fs::rename(&unnamed, &link)?;
        self.link = Some(link);
        Ok(())
    }

    /// Path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Accepts the next pending connection, if any.
    pub fn accept(&self) -> io::Result<Option<LocalConnection>> {
        loop {
            match self.socket.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(true)?;
                    return Ok(Some(LocalConnection { stream }));
                }
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return Ok(None),
                    // The client has gone already.
                    io::ErrorKind::Interrupted | io::ErrorKind::ConnectionAborted => {}
                    _ => return Err(error),
                },
            }
        }
    }
}

/// Names are those of files, and differ from process identifiers.
fn check_instance_name(name: &str) -> io::Result<()> {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let is_name = (1..=INSTANCE_LEN_MAX).contains(&name.len())
        && name.bytes().all(is_allowed)
        && name.bytes().any(|byte| !byte.is_ascii_digit())
        && !name.starts_with(['.', '-']);
    if is_name {
        return Ok(());
    }
    let text = format!(
        "no name, expected 1 to {INSTANCE_LEN_MAX} letters, digits, `-`, `_` and `.`, not only digits"
    );
    Err(io::Error::new(io::ErrorKind::InvalidInput, text))
}

/// Restricts the socket to its owner and returns the identity of its file.
fn restrict_socket_file(socket: &UnixListener, path: &Path) -> io::Result<(u64, u64)> {
    std::fs::set_permissions(path, Permissions::from_mode(0o600))?;
    socket.set_nonblocking(true)?;
    file_identity(path)
}

fn file_identity(path: &Path) -> io::Result<(u64, u64)> {
    let found = std::fs::symlink_metadata(path)?;
    Ok((found.dev(), found.ino()))
}

impl Drop for LocalListener {
    fn drop(&mut self) {
        if let Some(link) = &self.link
            && std::fs::read_link(link).ok().as_deref() == self.path.file_name().map(Path::new)
        {
            let _ = std::fs::remove_file(link);
        }
        if file_identity(&self.path).is_ok_and(|inode| inode == self.inode) {
            // A stale socket is removed by the next search.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl AsFd for LocalListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl LocalConnection {
    /// Connects to the socket at `path`. Waits up to `time_limit` while the listener's backlog is
    /// full; then the error is `WouldBlock`.
    pub fn connect(path: &Path, time_limit: Span) -> io::Result<Self> {
        let address = SocketAddrUnix::new(path)?;
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        // The kernel takes zero for "no timeout", and rounds below a microsecond to zero.
        let time_limit = Duration::from_nanos(time_limit.ns.max(1_000_000));
        set_socket_timeout(&socket, Timeout::Send, Some(time_limit))?;
        connect(&socket, &address)?;
        let stream = UnixStream::from(socket);
        stream.set_nonblocking(true)?;
        Ok(Self { stream })
    }

    /// Creates a connected pair.
    pub fn pair() -> io::Result<(Self, Self)> {
        let (one, other) = UnixStream::pair()?;
        one.set_nonblocking(true)?;
        other.set_nonblocking(true)?;
        Ok((Self { stream: one }, Self { stream: other }))
    }

    /// Wraps one end of a stream that another process created and passed to this one.
    ///
    /// # Errors
    ///
    /// If it is not a Unix stream socket.
    pub fn from_fd(socket: OwnedFd) -> io::Result<Self> {
        let is_stream = |socket: &OwnedFd| -> io::Result<bool> {
            let domain = sockopt::socket_domain(socket)?;
            Ok(domain == AddressFamily::UNIX && sockopt::socket_type(socket)? == SocketType::STREAM)
        };
        if !is_stream(&socket).unwrap_or(false) {
            let text = "found another kind of descriptor, expected one end of a Unix stream";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let stream = UnixStream::from(socket);
        stream.set_nonblocking(true)?;
        Ok(Self { stream })
    }

    /// Credentials of the peer.
    pub fn peer(&self) -> io::Result<PeerCredentials> {
        peer_credentials(self.stream.as_fd())
    }

    /// Receives what is available, up to the length of `into`.
    pub fn receive(&self, into: &mut [u8]) -> io::Result<RecvResult> {
        receive_available(&self.stream, into)
    }

    /// Sends as much of `bytes` as fits, and returns the number of bytes.
    pub fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        send_available(&self.stream, bytes)
    }

    /// Receives what is available, up to the length of `into`, with the descriptors passed along.
    /// Bytes of two sends that both carried descriptors are never returned together.
    ///
    /// # Errors
    ///
    /// The error of the system call, or more than `files_max` descriptors.
    pub fn receive_files(
        &self,
        into: &mut [u8],
        files: &mut Vec<OwnedFd>,
        files_max: usize,
    ) -> io::Result<RecvResult> {
        let mut space = [const { MaybeUninit::uninit() }; FILES_SPACE];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = loop {
            let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
            let mut parts = [IoSliceMut::new(into)];
            match recvmsg(&self.stream, &mut parts, &mut ancillary, flags) {
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return Ok(RecvResult::WouldBlock),
                // The peer has closed with unread data: treated as the end of the stream.
                Err(rustix::io::Errno::CONNRESET) => return Ok(RecvResult::Eof),
                received => break received?,
            }
        };
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(passed) = message {
                files.extend(passed);
            }
        }
        // CTRUNC: the control buffer was too small and descriptors were lost; the rest is closed.
        if files.len() > files_max || received.flags.contains(ReturnFlags::CTRUNC) {
            let found = files.len();
            files.clear();
            let text = format!("{found} descriptors or more, expected at most {files_max}");
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        Ok(if received.bytes == 0 { RecvResult::Eof } else { RecvResult::Bytes(received.bytes) })
    }

    /// Sends as much of `bytes` as fits, and returns the number of bytes; unless it is zero, all of
    /// `files` were passed.
    pub fn send_files(&self, bytes: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<usize> {
        let mut space = [const { MaybeUninit::uninit() }; FILES_SPACE];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(files)) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        loop {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match sendmsg(&self.stream, &[IoSlice::new(bytes)], &mut ancillary, flags) {
                Err(rustix::io::Errno::AGAIN) => return Ok(0),
                Err(rustix::io::Errno::INTR) => {}
                sent => return Ok(sent?),
            }
        }
    }

    /// Shuts the write side down: the peer sees the end after the data sent. Receiving still works.
    ///
    /// # Errors
    ///
    /// If the peer has closed.
    pub fn shutdown_write(&self) -> io::Result<()> {
        self.stream.shutdown(Shutdown::Write)
    }

    /// Waits up to `timeout` until data can be received. Returns whether it can.
    pub fn wait_to_receive(&self, timeout: Span) -> io::Result<bool> {
        wait_for_poll_flags(self.stream.as_fd(), PollFlags::IN, timeout)
    }

    /// Waits up to `timeout` until data can be sent, or the peer has closed. Returns whether so.
    pub fn wait_to_send(&self, timeout: Span) -> io::Result<bool> {
        wait_for_poll_flags(self.stream.as_fd(), PollFlags::OUT, timeout)
    }
}

/// Credentials of the peer of a Unix socket. For other sockets, and for processes in an invisible
/// PID namespace, the process identifier is 0.
pub(crate) fn peer_credentials(socket: BorrowedFd<'_>) -> io::Result<PeerCredentials> {
    let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut len_bytes = libc::socklen_t::try_from(size_of_val(&found)).unwrap_or(0);
    // SAFETY: the descriptor is open while borrowed; `found` is a plain structure of `len_bytes`
    // bytes, of which the kernel writes no more, and any bit pattern is valid.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut len_bytes,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(PeerCredentials {
        pid: u32::try_from(found.pid).unwrap_or(0),
        uid: found.uid,
        gid: found.gid,
    })
}

impl From<OwnedFd> for LocalConnection {
    /// Wraps a connected non-blocking socket.
    fn from(socket: OwnedFd) -> Self {
        Self { stream: socket.into() }
    }
}

impl From<LocalConnection> for OwnedFd {
    fn from(connection: LocalConnection) -> Self {
        connection.stream.into()
    }
}

impl AsFd for LocalConnection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::os::fd::AsFd;
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::net::UnixListener;

    use tenmil_base::Span;

    use super::{LocalConnection, LocalListener, RecvResult};
    use crate::runtime_directory::{RuntimeDirectory, current_uid};

    const TIME_LIMIT: Span = Span::from_secs(10);

    fn test_directory() -> (tempfile::TempDir, RuntimeDirectory) {
        let root = tempfile::tempdir().unwrap();
        let directory = RuntimeDirectory::at_path(root.path().join("run")).unwrap();
        (root, directory)
    }

    #[test]
    fn both_ends_know_the_peer_credentials_and_bytes_arrive() {
        let (_root, directory) = test_directory();
        let listener = LocalListener::bind(&directory, 4).unwrap();
        assert!(listener.accept().unwrap().is_none(), "no connection is pending");
        let client = LocalConnection::connect(listener.path(), TIME_LIMIT).unwrap();
        let server = listener.accept().unwrap().unwrap();
        for end in [&client, &server] {
            let peer = end.peer().unwrap();
            assert_eq!((peer.pid, peer.uid), (std::process::id(), current_uid()));
        }
        let mut bytes = [0; 8];
        assert_eq!(server.receive(&mut bytes).unwrap(), RecvResult::WouldBlock);
        assert!(!server.wait_to_receive(Span::default()).unwrap());
        assert_eq!(client.send(b"words").unwrap(), 5);
        assert!(server.wait_to_receive(TIME_LIMIT).unwrap());
        assert_eq!(server.receive(&mut bytes).unwrap(), RecvResult::Bytes(5));
        assert_eq!(&bytes[..5], b"words");
        drop(client);
        assert_eq!(server.receive(&mut bytes).unwrap(), RecvResult::Eof);
        assert!(server.send(b"gone").is_err());
    }

    #[test]
    fn descriptors_arrive_with_the_bytes_they_were_sent_with() {
        let (one, other) = LocalConnection::pair().unwrap();
        let (mut bytes, mut files) = ([0; 16], Vec::new());
        let received = other.receive_files(&mut bytes, &mut files, 2).unwrap();
        assert_eq!((received, files.len()), (RecvResult::WouldBlock, 0));
        assert_eq!(one.send_files(b"with", &[one.as_fd(), one.as_fd()]).unwrap(), 4);
        assert_eq!(one.send_files(b"out", &[]).unwrap(), 3);
        let received = other.receive_files(&mut bytes, &mut files, 2).unwrap();
        assert_eq!((received, files.len()), (RecvResult::Bytes(4), 2));
        files.clear();
        let received = other.receive_files(&mut bytes, &mut files, 2).unwrap();
        assert_eq!((received, files.len()), (RecvResult::Bytes(3), 0));
        one.send_files(b"many", &[one.as_fd(); 3]).unwrap();
        let refused = other.receive_files(&mut bytes, &mut files, 2).unwrap_err();
        assert_eq!((refused.kind(), files.len()), (io::ErrorKind::InvalidData, 0));
        drop(one);
        let received = other.receive_files(&mut bytes, &mut files, 2).unwrap();
        assert_eq!(received, RecvResult::Eof);
    }

    #[test]
    fn from_fd_accepts_only_stream_sockets() {
        let (one, other) = std::os::unix::net::UnixStream::pair().unwrap();
        let given = LocalConnection::from_fd(one.into()).unwrap();
        let mut bytes = [0; 8];
        assert_eq!(given.receive(&mut bytes).unwrap(), RecvResult::WouldBlock, "it does not wait");
        drop(other);
        let (datagram, _) = std::os::unix::net::UnixDatagram::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        for wrong in [datagram.into(), file.into()] {
            let refused = LocalConnection::from_fd(wrong).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::InvalidInput, "{refused}");
        }
    }

    #[test]
    fn half_closed_peer_can_still_receive() {
        let (one, other) = LocalConnection::pair().unwrap();
        one.send(b"last").unwrap();
        one.shutdown_write().unwrap();
        let mut bytes = [0; 8];
        assert_eq!(other.receive(&mut bytes).unwrap(), RecvResult::Bytes(4));
        assert_eq!(other.receive(&mut bytes).unwrap(), RecvResult::Eof);
        assert_eq!(other.send(b"more").unwrap(), 4);
        assert_eq!(one.receive(&mut bytes).unwrap(), RecvResult::Bytes(4));
        drop(other);
        assert_eq!(one.receive(&mut bytes).unwrap(), RecvResult::Eof);
    }

    #[test]
    fn send_to_a_stream_that_is_not_read_does_not_block() {
        let (one, other) = LocalConnection::pair().unwrap();
        while one.send(&[7; 65_536]).unwrap() > 0 {}
        assert!(!one.wait_to_send(Span::default()).unwrap(), "no room");
        while !matches!(other.receive(&mut [0; 65_536]).unwrap(), RecvResult::WouldBlock) {}
        assert!(one.wait_to_send(TIME_LIMIT).unwrap());
    }

    #[test]
    fn socket_file_is_private_and_removed_with_its_listener() {
        let (_root, directory) = test_directory();
        let listener = LocalListener::bind(&directory, 4).unwrap();
        let path = directory.socket_of(4);
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 1, "and nothing beside");
        drop(listener);
        assert!(!path.exists());
        let refused = LocalConnection::connect(&path, TIME_LIMIT).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn socket_of_a_live_process_is_kept_and_of_a_dead_one_replaced() {
        let (_root, directory) = test_directory();
        let first = LocalListener::bind(&directory, 4).unwrap();
        let refused = LocalListener::bind(&directory, 4).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::AddrInUse);
        drop(first);
        // A process that was killed, during its start or after it.
        drop(UnixListener::bind(directory.socket_of(4)).unwrap());
        drop(UnixListener::bind(directory.path().join(".4")).unwrap());
        let next = LocalListener::bind(&directory, 4).unwrap();
        LocalConnection::connect(next.path(), TIME_LIMIT).unwrap();
    }

    #[test]
    fn name_of_a_process_leads_to_its_socket_and_is_of_one_live_process() {
        let (_root, directory) = test_directory();
        let link = directory.link_of("db");
        let mut first = LocalListener::bind(&directory, 4).unwrap();
        first.set_instance(&directory, "db").unwrap();
        LocalConnection::connect(&link, TIME_LIMIT).unwrap();
        let mut second = LocalListener::bind(&directory, 5).unwrap();
        let refused = second.set_instance(&directory, "db").unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::AddrInUse);
        drop(first);
        assert!(!link.is_symlink());
        // A process that was killed.
        std::os::unix::fs::symlink("9.sock", &link).unwrap();
        second.set_instance(&directory, "db").unwrap();
        assert_eq!(std::fs::read_link(&link).unwrap().to_str(), Some("5.sock"));
        for name in ["", "7", ".a", "-a", "a/b", "a b", "ä", &"x".repeat(65)] {
            let refused = second.set_instance(&directory, name).unwrap_err();
            assert_eq!(refused.kind(), io::ErrorKind::InvalidInput, "{name}");
        }
    }

    #[test]
    fn file_that_replaced_the_socket_is_not_removed() {
        let (_root, directory) = test_directory();
        let listener = LocalListener::bind(&directory, 4).unwrap();
        let path = listener.path().to_owned();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, "not ours").unwrap();
        drop(listener);
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "not ours");
    }

    #[test]
    fn connect_to_a_listener_that_does_not_accept_times_out() {
        let (_root, directory) = test_directory();
        let listener = LocalListener::bind(&directory, 4).unwrap();
        let mut waiting = Vec::new();
        let refused = loop {
            match LocalConnection::connect(listener.path(), Span::from_ms(1)) {
                Ok(connection) => waiting.push(connection),
                Err(error) => break error,
            }
        };
        assert_eq!(refused.kind(), io::ErrorKind::WouldBlock);
        assert!(waiting.len() > 16, "{}", waiting.len());
        assert!(directory.is_listening_or_remove(4), "busy is alive");
    }

    #[test]
    fn too_long_socket_path_is_rejected() {
        let (_root, directory) = test_directory();
        let long = RuntimeDirectory::at_path(directory.path().join("x".repeat(120))).unwrap();
        let refused = LocalListener::bind(&long, 4).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidInput, "{refused}");
    }
}
