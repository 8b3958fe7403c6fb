//! Listening sockets that a service manager has bound and passed (socket activation, sd_listen_fds(3)).
//!
//! ```text
//!   LISTEN_PID=4711            the process that they are meant for
//!   LISTEN_FDS=2               descriptors 3 and 4
//!   LISTEN_FDNAMES=nvme:nbd    their names, for messages
//! ```
//!
//! [`adopt_passed_sockets`] collects them once, when a server starts. From then on a
//! [`StreamListener`](crate::socket_stream::StreamListener) for the address of one of them uses it instead of
//! binding the address: so a port below 1024 needs no capability, and connections that arrive while the server
//! restarts wait in the socket's backlog instead of being refused.
//!
//! The service manager keeps each socket open, and so does this process: a listener that is closed and opened
//! again finds its socket again.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, FromRawFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_setfd};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, getsockname, sockopt};

use crate::socket_stream::ListenAddress;

/// A socket that was passed.
#[derive(Debug)]
struct PassedSocket {
    socket: OwnedFd,
    address: ListenAddress,
    name: String,
    /// Whether a listener has used it.
    is_used: bool,
}

/// The passed sockets of this process; `None` before they are adopted.
static PASSED: Mutex<Option<Vec<PassedSocket>>> = Mutex::new(None);

/// Number of the first passed descriptor (SD_LISTEN_FDS_START).
const FIRST: RawFd = 3;
/// More descriptors than that are passed to no server; it bounds what a wrong variable costs.
const SOCKETS_MAX: RawFd = 1024;

/// Collects the sockets that were passed to this process. Later calls do nothing.
///
/// # Errors
///
/// If a variable is wrong, or a descriptor is no listening stream socket; the text says which.
pub fn adopt_passed_sockets() -> Result<(), String> {
    let mut passed = lock_passed();
    if passed.is_some() {
        return Ok(());
    }
    let variable = |name| std::env::var(name).ok();
    let pid = variable("LISTEN_PID");
    let count = passed_count(pid.as_deref(), variable("LISTEN_FDS").as_deref(), std::process::id());
    let names = variable("LISTEN_FDNAMES").unwrap_or_default();
    let mut names = names.split(':');
    let mut sockets = Vec::new();
    for number in (FIRST..).take(usize::try_from(count?).unwrap_or_default()) {
        let name = names.next().filter(|name| !name.is_empty()).unwrap_or("unknown").to_owned();
        let refuse = |why: String| format!("descriptor {number} ({name}), which was passed: {why}");
        // SAFETY: the variables say that the parent process has opened the descriptor for it, and
        // they are read once in the life of the process; no other code of this process has opened or owns
        // a descriptor with this number, since it was open before the first of them was made. A closed
        // number is only inspected by the kernel, which the next call reports.
        let socket = unsafe { OwnedFd::from_raw_fd(number) };
        let inspected = inspect_socket(&socket);
        match inspected {
            Ok(address) => sockets.push(PassedSocket { socket, address, name, is_used: false }),
            Err(why) => {
                // The number may be closed; closing it again is not this process's business.
                std::mem::forget(socket);
                return Err(refuse(why));
            }
        }
    }
    *passed = Some(sockets);
    Ok(())
}

/// Sockets that were passed and that no listener has used: address and name of each.
pub fn unused_passed_sockets() -> Vec<(ListenAddress, String)> {
    let passed = lock_passed();
    let unused = passed.iter().flatten().filter(|socket| !socket.is_used);
    unused.map(|socket| (socket.address.clone(), socket.name.clone())).collect()
}

/// A duplicate of the passed socket with this address, if there is one.
pub(crate) fn take_passed_socket(address: &ListenAddress) -> io::Result<Option<OwnedFd>> {
    let mut passed = lock_passed();
    let mut sockets = passed.iter_mut().flatten();
    let Some(found) = sockets.find(|socket| socket.address == *address) else { return Ok(None) };
    let socket = fcntl_dupfd_cloexec(&found.socket, FIRST)?;
    rustix::io::ioctl_fionbio(&socket, true)?;
    found.is_used = true;
    Ok(Some(socket))
}

fn lock_passed() -> MutexGuard<'static, Option<Vec<PassedSocket>>> {
    PASSED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Number of descriptors that were passed to the process `pid`.
fn passed_count(listen_pid: Option<&str>, fds: Option<&str>, pid: u32) -> Result<RawFd, String> {
    let Some(fds) = fds.filter(|_| listen_pid.is_some_and(|text| text.parse() == Ok(pid))) else {
        return Ok(0);
    };
    let count = fds.parse().ok().filter(|count| (0..=SOCKETS_MAX).contains(count));
    count.ok_or_else(|| format!("LISTEN_FDS is `{fds}`, expected a number up to {SOCKETS_MAX}"))
}

/// Checks that a descriptor is a listening stream socket and returns its address.
fn inspect_socket(socket: &OwnedFd) -> Result<ListenAddress, String> {
    const EXPECTED: &str = "expected a listening stream socket (ListenStream= of a socket unit)";
    let refuse = |errno| format!("{errno}, {EXPECTED}");
    fcntl_setfd(socket.as_fd(), FdFlags::CLOEXEC).map_err(refuse)?;
    if sockopt::socket_type(socket).map_err(refuse)? != SocketType::STREAM {
        return Err(format!("it is a socket of another type, {EXPECTED}"));
    }
    if !sockopt::socket_acceptconn(socket).map_err(refuse)? {
        return Err(format!("it does not listen, {EXPECTED}"));
    }
    let address = getsockname(socket).map_err(refuse)?;
    match sockopt::socket_domain(socket).map_err(refuse)? {
        AddressFamily::UNIX => {
            let address = SocketAddrUnix::try_from(address).map_err(refuse)?;
            let path = address.path_bytes().ok_or_else(|| {
                format!("it has no path, {EXPECTED} with a path or an address of TCP")
            })?;
            Ok(ListenAddress::Path(PathBuf::from(String::from_utf8_lossy(path).into_owned())))
        }
        _ => SocketAddr::try_from(address).map(ListenAddress::Tcp).map_err(refuse),
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};

    use super::{inspect_socket, passed_count};
    use crate::socket_stream::ListenAddress;

    #[test]
    fn descriptors_are_those_of_this_process() {
        assert_eq!(passed_count(Some("7"), Some("2"), 7), Ok(2));
        assert_eq!(passed_count(Some("8"), Some("2"), 7), Ok(0));
        assert_eq!(passed_count(None, Some("2"), 7), Ok(0));
        assert_eq!(passed_count(Some("7"), None, 7), Ok(0));
        for wrong in ["x", "-1", "100000"] {
            let refused = passed_count(Some("7"), Some(wrong), 7).unwrap_err();
            assert!(refused.starts_with(&format!("LISTEN_FDS is `{wrong}`")), "{refused}");
        }
    }

    #[test]
    fn only_listening_stream_sockets_are_adopted() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("listener");
        let local = OwnedFd::from(UnixListener::bind(&path).unwrap());
        assert_eq!(inspect_socket(&local), Ok(ListenAddress::Path(path)));
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = tcp.local_addr().unwrap();
        assert_eq!(inspect_socket(&tcp.into()), Ok(ListenAddress::Tcp(address)));
        let (one, _other) = UnixStream::pair().unwrap();
        assert!(inspect_socket(&one.into()).unwrap_err().contains("does not listen"));
        let datagrams = UnixDatagram::unbound().unwrap();
        assert!(inspect_socket(&datagrams.into()).unwrap_err().contains("another type"));
        let file = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        assert!(inspect_socket(&file).unwrap_err().contains("expected a listening stream socket"));
    }
}
