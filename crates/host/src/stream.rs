//! Streams to other programs over Unix sockets and TCP, whose bytes go to and come from region
//! memory.
//!
//! Nothing here blocks. A receive fills a list of segments and a send empties one, each in a single
//! system call.

mod door;

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use base::{NoSuchMemory, Segment};
use dma::Regions;
use rustix::io::Errno;
use rustix::net::sockopt;

pub use crate::local_socket::Received;
use crate::local_socket::{Peer, peer_of};
use crate::socket::notice_vanished_peer;
use crate::vectored::Vectors;
pub use door::{Address, Door};

/// One end of a stream.
#[derive(Debug)]
pub struct Stream {
    socket: OwnedFd,
    vectors: Vectors,
}

/// Stretches of memory that one system call takes: half of what the kernel allows (`IOV_MAX`).
const STRETCHES_MAX: usize = 512;

/// What a Unix socket may hold that the other side has not taken. As much as this is asked for; the
/// kernel gives at most twice `net.core.wmem_max`.
const UNSENT_BYTES: usize = 4 << 20;

impl Stream {
    /// A stream over a connected socket, between the segments of `regions`.
    ///
    /// # Errors
    ///
    /// What the kernel says.
    pub fn new(socket: OwnedFd, regions: Regions) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        if sockopt::socket_domain(&socket)? == rustix::net::AddressFamily::UNIX {
            sockopt::set_socket_send_buffer_size(&socket, UNSENT_BYTES)?;
        } else {
            // The kernel sizes the buffers of TCP better than we could. Replies are gathered before
            // they are sent, so nothing is won by waiting for more.
            sockopt::set_tcp_nodelay(&socket, true)?;
            notice_vanished_peer(socket.as_fd())
                .map_err(|refused| io::Error::other(refused.to_string()))?;
        }
        Ok(Self { socket, vectors: Vectors::with_capacity(regions, STRETCHES_MAX) })
    }

    /// A stream, and a plain socket that is the other end of it.
    ///
    /// # Errors
    ///
    /// What the kernel says.
    pub fn pair(regions: Regions) -> io::Result<(Self, UnixStream)> {
        let (one, other) = UnixStream::pair()?;
        Ok((Self::new(one.into(), regions)?, other))
    }

    /// Who is at the other end, for people: `127.0.0.1:4711`, or the number of the process.
    pub fn peer(&self) -> String {
        name_of_peer(self.socket.as_fd())
    }

    /// Takes what has come into `segments`, first one first, as far as they reach.
    ///
    /// # Errors
    ///
    /// What the kernel says, or that a segment lies nowhere.
    #[inline]
    pub fn receive(&mut self, segments: &[Segment]) -> io::Result<Received> {
        self.vectors.set_first(segments).map_err(nowhere)?;
        loop {
            return match self.vectors.receive(&self.socket) {
                Ok(0) | Err(Errno::CONNRESET) => Ok(Received::End),
                Ok(count) => Ok(Received::Bytes(count)),
                Err(Errno::AGAIN) => Ok(Received::Nothing),
                Err(Errno::INTR) => continue,
                Err(errno) => Err(errno.into()),
            };
        }
    }

    /// Sends what lies in `segments`, as far as there is room for it, and says how many bytes that
    /// was.
    ///
    /// # Errors
    ///
    /// What the kernel says, or that a segment lies nowhere.
    #[inline]
    pub fn send(&mut self, segments: &[Segment]) -> io::Result<usize> {
        self.vectors.set_first(segments).map_err(nowhere)?;
        loop {
            return match self.vectors.send(&self.socket) {
                Err(Errno::AGAIN) => Ok(0),
                Err(Errno::INTR) => continue,
                sent => sent.map_err(io::Error::from),
            };
        }
    }
}

impl AsFd for Stream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Who is at the other end, for people: `127.0.0.1:4711`, or the number of the process.
pub(crate) fn name_of_peer(socket: BorrowedFd<'_>) -> String {
    let peer = rustix::net::getpeername(socket).ok().flatten();
    if let Some(peer) = peer.and_then(|peer| SocketAddr::try_from(peer).ok()) {
        return peer.to_string();
    }
    match peer_of(socket) {
        Ok(Peer { pid, .. }) if pid != 0 => format!("process {pid}"),
        _ => "somebody".to_owned(),
    }
}

/// Where its peer has reached a socket; an IPv4 address is one, by whatever kind of socket.
pub(crate) fn local_address_of(socket: BorrowedFd<'_>) -> Option<SocketAddr> {
    let address = SocketAddr::try_from(rustix::net::getsockname(socket).ok()?).ok()?;
    Some(SocketAddr::new(address.ip().to_canonical(), address.port()))
}

fn nowhere(NoSuchMemory(segment): NoSuchMemory) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("{segment:?} lies in no region"))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsFd;

    use base::{Memory, Segment};
    use dma::{Backing, Mapping, Regions};

    use super::{Received, Stream};

    fn memory() -> (Regions, Segment) {
        let regions = Regions::new(1);
        let whole = regions.add(Mapping::new(1 << 20, Backing::Private).unwrap()).unwrap();
        (regions, whole)
    }

    fn load(regions: &Regions, segment: Segment) -> Vec<u8> {
        let mut bytes = vec![0; segment.len_bytes as usize];
        regions.load(segment, &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn bytes_are_scattered_and_gathered_in_the_order_of_the_list() {
        let (regions, whole) = memory();
        let part = |from, len| whole.slice(from, len).unwrap();
        let (mut stream, mut other) = Stream::pair(regions.clone()).unwrap();
        assert_eq!(stream.receive(&[part(0, 4)]).unwrap(), Received::Nothing);
        other.write_all(b"abcdefgh").unwrap();
        let list = [part(100, 3), part(50, 2), part(0, 64)];
        assert_eq!(stream.receive(&list).unwrap(), Received::Bytes(8));
        assert_eq!(load(&regions, part(100, 3)), b"abc");
        assert_eq!(load(&regions, part(50, 2)), b"de");
        assert_eq!(load(&regions, part(0, 3)), b"fgh");
        assert_eq!(stream.send(&[part(50, 2), part(101, 2), part(0, 1)]).unwrap(), 5);
        let mut back = [0; 5];
        other.read_exact(&mut back).unwrap();
        assert_eq!(&back, b"debcf");
        drop(other);
        assert_eq!(stream.receive(&[part(0, 4)]).unwrap(), Received::End);
        assert!(stream.send(&[part(0, 4)]).is_err(), "and no signal ends the process");
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "a peer opens sockets")]
    fn a_peer_is_named_by_its_address_or_its_process() {
        let (regions, _) = memory();
        let (stream, _other) = Stream::pair(regions.clone()).unwrap();
        assert_eq!(stream.peer(), format!("process {}", std::process::id()));
        let door = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let there = std::net::TcpStream::connect(door.local_addr().unwrap()).unwrap();
        let (here, from) = door.accept().unwrap();
        assert_eq!(Stream::new(here.into(), regions.clone()).unwrap().peer(), from.to_string());
        let door = std::os::unix::net::UnixDatagram::unbound().unwrap();
        assert_eq!(super::name_of_peer(door.as_fd()), "somebody", "it has no peer");
        drop(there);
    }

    #[test]
    fn a_stream_that_nobody_reads_takes_no_more() {
        let (regions, whole) = memory();
        let (mut stream, mut other) = Stream::pair(regions).unwrap();
        let mut sent = 0;
        loop {
            match stream.send(&[whole]).unwrap() {
                0 => break,
                count => sent += count,
            }
        }
        assert!(sent > 300_000, "{sent}: a depth of 64 times 4 KiB fits");
        let mut back = vec![0; sent];
        other.read_exact(&mut back).unwrap();
        assert!(stream.send(&[whole]).unwrap() > 0);
    }

    #[test]
    fn more_stretches_than_the_kernel_takes_go_in_several_calls() {
        let (regions, whole) = memory();
        let (mut stream, mut other) = Stream::pair(regions.clone()).unwrap();
        let list: Vec<Segment> =
            (0..2000).map(|index| whole.slice(index * 16, 8).unwrap()).collect();
        let sent = stream.send(&list).unwrap();
        assert_eq!(sent, super::STRETCHES_MAX * 8);
        let mut back = vec![0; sent];
        other.read_exact(&mut back).unwrap();
        assert!(
            stream.receive(&[Segment { offset: 1 << 20, ..whole }]).is_err(),
            "it lies nowhere"
        );
    }
}
