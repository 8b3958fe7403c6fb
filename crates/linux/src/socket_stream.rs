//! Streams over Unix sockets and TCP that transfer to and from region memory.
//!
//! Nothing here blocks. A receive fills a list of segments and a send drains one, each in a single
//! system call.

mod stream_listener;

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::sockopt;
use tenmil_base::{InvalidSegment, Segment};
use tenmil_dma::RegionTable;

use crate::io_vectors::IoVectors;
pub use crate::local_socket::RecvResult;
use crate::local_socket::{PeerCredentials, peer_credentials};
use crate::socket::set_peer_timeouts;
pub use stream_listener::{ListenAddress, StreamListener};

/// One end of a stream.
#[derive(Debug)]
pub struct SocketStream {
    socket: OwnedFd,
    vectors: IoVectors,
}

/// Maximum number of segments per system call: half of the kernel's limit (`IOV_MAX`).
const SEGMENTS_MAX: usize = 512;

/// Requested send buffer of a Unix socket; the kernel grants at most twice `net.core.wmem_max`.
const SEND_BUFFER_BYTES: usize = 4 << 20;

impl SocketStream {
    /// Creates a stream on a connected socket, for segments of `regions`.
    ///
    /// # Errors
    ///
    /// The error of the system call.
    pub fn new(socket: OwnedFd, regions: RegionTable) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        if sockopt::socket_domain(&socket)? == rustix::net::AddressFamily::UNIX {
            sockopt::set_socket_send_buffer_size(&socket, SEND_BUFFER_BYTES)?;
        } else {
            // The kernel sizes the buffers of TCP better than we could. Replies are gathered before
            // they are sent, so nothing is won by waiting for more.
            sockopt::set_tcp_nodelay(&socket, true)?;
            set_peer_timeouts(socket.as_fd())
                .map_err(|refused| io::Error::other(refused.to_string()))?;
        }
        Ok(Self { socket, vectors: IoVectors::with_capacity(regions, SEGMENTS_MAX) })
    }

    /// Creates a stream and a plain socket as its other end.
    ///
    /// # Errors
    ///
    /// The error of the system call.
    pub fn pair(regions: RegionTable) -> io::Result<(Self, UnixStream)> {
        let (one, other) = UnixStream::pair()?;
        Ok((Self::new(one.into(), regions)?, other))
    }

    /// Name of the peer for messages: `127.0.0.1:4711`, or its process identifier.
    pub fn peer(&self) -> String {
        name_of_peer(self.socket.as_fd())
    }

    /// Receives what is available into `segments`, in order.
    ///
    /// # Errors
    ///
    /// The error of the system call, or a segment outside every region.
    #[inline]
    pub fn receive(&mut self, segments: &[Segment]) -> io::Result<RecvResult> {
        self.vectors.set_fitting_segments(segments).map_err(invalid_segment)?;
        loop {
            return match self.vectors.receive(&self.socket) {
                Ok(0) | Err(Errno::CONNRESET) => Ok(RecvResult::Eof),
                Ok(count) => Ok(RecvResult::Bytes(count)),
                Err(Errno::AGAIN) => Ok(RecvResult::WouldBlock),
                Err(Errno::INTR) => continue,
                Err(errno) => Err(errno.into()),
            };
        }
    }

    /// Sends from `segments` as far as the socket has space, and returns the number of bytes.
    ///
    /// # Errors
    ///
    /// The error of the system call, or a segment outside every region.
    #[inline]
    pub fn send(&mut self, segments: &[Segment]) -> io::Result<usize> {
        self.vectors.set_fitting_segments(segments).map_err(invalid_segment)?;
        loop {
            return match self.vectors.send(&self.socket) {
                Err(Errno::AGAIN) => Ok(0),
                Err(Errno::INTR) => continue,
                sent => sent.map_err(io::Error::from),
            };
        }
    }
}

impl AsFd for SocketStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Name of the peer for messages: `127.0.0.1:4711`, or its process identifier.
pub(crate) fn name_of_peer(socket: BorrowedFd<'_>) -> String {
    let peer = rustix::net::getpeername(socket).ok().flatten();
    if let Some(peer) = peer.and_then(|peer| SocketAddr::try_from(peer).ok()) {
        return peer.to_string();
    }
    match peer_credentials(socket) {
        Ok(PeerCredentials { pid, .. }) if pid != 0 => format!("process {pid}"),
        _ => "an unknown process".to_owned(),
    }
}

/// Local address of a connected socket; an IPv4-mapped address is returned as IPv4.
pub(crate) fn local_address_of(socket: BorrowedFd<'_>) -> Option<SocketAddr> {
    let address = SocketAddr::try_from(rustix::net::getsockname(socket).ok()?).ok()?;
    Some(SocketAddr::new(address.ip().to_canonical(), address.port()))
}

fn invalid_segment(InvalidSegment(segment): InvalidSegment) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("{segment:?} lies in no region"))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsFd;

    use tenmil_base::{Memory, Segment};
    use tenmil_dma::{MemoryBacking, MemoryMapping, RegionTable};

    use super::{RecvResult, SocketStream};

    fn test_memory() -> (RegionTable, Segment) {
        let regions = RegionTable::new(1);
        let whole = regions
            .add_mapping(MemoryMapping::new(1 << 20, MemoryBacking::Private).unwrap())
            .unwrap();
        (regions, whole)
    }

    fn load_bytes(regions: &RegionTable, segment: Segment) -> Vec<u8> {
        let mut bytes = vec![0; segment.len_bytes as usize];
        regions.load(segment, &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn bytes_are_scattered_and_gathered_in_list_order() {
        let (regions, whole) = test_memory();
        let part = |from, len| whole.slice(from, len).unwrap();
        let (mut stream, mut other) = SocketStream::pair(regions.clone()).unwrap();
        assert_eq!(stream.receive(&[part(0, 4)]).unwrap(), RecvResult::WouldBlock);
        other.write_all(b"abcdefgh").unwrap();
        let list = [part(100, 3), part(50, 2), part(0, 64)];
        assert_eq!(stream.receive(&list).unwrap(), RecvResult::Bytes(8));
        assert_eq!(load_bytes(&regions, part(100, 3)), b"abc");
        assert_eq!(load_bytes(&regions, part(50, 2)), b"de");
        assert_eq!(load_bytes(&regions, part(0, 3)), b"fgh");
        assert_eq!(stream.send(&[part(50, 2), part(101, 2), part(0, 1)]).unwrap(), 5);
        let mut back = [0; 5];
        other.read_exact(&mut back).unwrap();
        assert_eq!(&back, b"debcf");
        drop(other);
        assert_eq!(stream.receive(&[part(0, 4)]).unwrap(), RecvResult::Eof);
        assert!(stream.send(&[part(0, 4)]).is_err(), "and no signal ends the process");
    }

    #[test]
    #[expect(clippy::disallowed_methods, reason = "a peer opens sockets")]
    fn peer_is_named_by_address_or_process() {
        let (regions, _) = test_memory();
        let (stream, _other) = SocketStream::pair(regions.clone()).unwrap();
        assert_eq!(stream.peer(), format!("process {}", std::process::id()));
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let there = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (here, from) = listener.accept().unwrap();
        assert_eq!(
            SocketStream::new(here.into(), regions.clone()).unwrap().peer(),
            from.to_string()
        );
        let socket = std::os::unix::net::UnixDatagram::unbound().unwrap();
        assert_eq!(super::name_of_peer(socket.as_fd()), "an unknown process", "it has no peer");
        drop(there);
    }

    #[test]
    fn send_to_a_stream_that_is_not_read_does_not_block() {
        let (regions, whole) = test_memory();
        let (mut stream, mut other) = SocketStream::pair(regions).unwrap();
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
    fn more_segments_than_iov_max_use_several_calls() {
        let (regions, whole) = test_memory();
        let (mut stream, mut other) = SocketStream::pair(regions.clone()).unwrap();
        let list: Vec<Segment> =
            (0..2000).map(|index| whole.slice(index * 16, 8).unwrap()).collect();
        let sent = stream.send(&list).unwrap();
        assert_eq!(sent, super::SEGMENTS_MAX * 8);
        let mut back = vec![0; sent];
        other.read_exact(&mut back).unwrap();
        assert!(
            stream.receive(&[Segment { offset: 1 << 20, ..whole }]).is_err(),
            "it lies nowhere"
        );
    }
}
