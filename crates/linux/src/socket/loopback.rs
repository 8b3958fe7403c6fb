//! TCP connections over loopback for measurements, and forced connection resets.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, connect, getsockname, socket_with};

use super::{ListenAddress, StreamListener};

/// Creates the two ends of a non-blocking TCP connection over loopback.
///
/// # Errors
///
/// The error of the system call.
pub fn loopback_pair() -> io::Result<[OwnedFd; 2]> {
    let listener =
        StreamListener::open(&ListenAddress::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))))?;
    let ListenAddress::Tcp(port) = listener.address() else {
        return Err(io::ErrorKind::AddrNotAvailable.into());
    };
    let one = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    // Over loopback this completes at once: the kernel accepts on behalf of the listener.
    connect(&one, port)?;
    rustix::io::ioctl_fionbio(&one, true)?;
    let ours = SocketAddr::try_from(getsockname(&one)?)?;
    // Another process may have connected first.
    while let Some(other) = listener.accept()? {
        let from = rustix::net::getpeername(&other)?.map(SocketAddr::try_from);
        if from == Some(Ok(ours)) {
            return Ok([one, other]);
        }
    }
    Err(io::ErrorKind::ConnectionAborted.into())
}

/// Makes close send a reset: unsent data is discarded and the peer receives RST.
pub fn reset_on_close(socket: impl AsFd) {
    super::zero_copy::discard_on_close(socket.as_fd());
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::{loopback_pair, reset_on_close};

    #[test]
    fn reset_is_not_an_orderly_end() {
        let [one, other] = loopback_pair().unwrap();
        reset_on_close(&one);
        drop(one);
        assert_eq!(rustix::io::read(&other, &mut [0; 8]), Err(Errno::CONNRESET));
    }

    #[test]
    fn bytes_sent_on_one_end_arrive_at_the_other() {
        let [one, other] = loopback_pair().unwrap();
        assert_eq!(rustix::io::write(&one, b"hello").unwrap(), 5);
        let mut into = [0; 8];
        assert_eq!(rustix::io::read(&other, &mut into).unwrap(), 5);
        assert!(rustix::io::read(&one, &mut into).is_err(), "neither blocks");
    }
}
