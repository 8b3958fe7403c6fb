//! What a socket is told when it becomes a stream, and what it tells about its place.

use std::fmt;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

use base::{Blame, Span};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrAny, getpeername, getsockname, sockopt};

use super::sockets::SocketEngine;
use crate::vectored::last_errno;

/// How a thread's streams are made. The defaults are those of [`SocketOptions::default`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketOptions {
    /// What carries the streams. `epoll`.
    pub engine: SocketEngine,
    /// `TCP_NODELAY`: what is sent goes at once. On. Off, the kernel waits for more (Nagle), which
    /// together with delayed acknowledgements costs up to 40 ms.
    pub no_delay: bool,
    /// `SO_KEEPALIVE`: a peer that has gone without a word is noticed although nothing is sent, after
    /// 30 seconds without a sign of life and three questions 10 seconds apart. On.
    pub keepalive: bool,
    /// `TCP_USER_TIMEOUT`: how long sent bytes may stay unacknowledged before the connection is
    /// broken. 30 seconds. Zero leaves it to the kernel (about 15 minutes).
    pub user_timeout: Span,
    /// All that is sent at a time goes by one call. On. Off, each piece of memory goes by a call of its
    /// own, with the headers before it: for measuring what gathering is worth.
    pub gathers: bool,
    /// `MSG_MORE`: the kernel is told that more follows at once, and waits with the rest of a packet.
    /// On.
    pub says_more: bool,
    /// `SO_SNDBUF`, in bytes: what may be under way or wait to be sent. None: the kernel adapts it.
    /// More than `net.core.wmem_max` is cut down to that.
    pub send_buffer_bytes: Option<usize>,
    /// `SO_RCVBUF`, in bytes: what may have come and not been received. None: the kernel adapts it.
    /// More than `net.core.rmem_max` is cut down to that.
    pub receive_buffer_bytes: Option<usize>,
    /// `SO_BUSY_POLL`: for so long a look that finds nothing asks the network card itself. None: as
    /// `net.core.busy_read` says. More than that takes `CAP_NET_ADMIN`.
    pub busy_poll: Option<Span>,
    /// `TCP_CONGESTION`: what says how fast to send. None: what the machine has for all, but
    /// [`LOCAL_CONGESTION`] between two sockets of this machine, where nothing is lost and whoever sends
    /// at a pace (BBR) waits for nothing.
    pub congestion: Option<String>,
    /// `SO_PRIORITY`: the queueing class of what is sent, 0 to 6. None: 0.
    pub priority: Option<u32>,
    /// From how many bytes on, on average over its pieces of memory, a send does not copy them.
    /// 32 KiB; none: all sends copy. A stream whose kernel reports that it copied anyway, as on loopback, goes back to copying.
    pub zero_copy_from_bytes: Option<usize>,
    /// How long each inbox is: what one look can receive at most. 256 KiB.
    pub inbox_bytes: usize,
    /// How many inboxes a thread has at most. A stream has one only while bytes wait in it; without
    /// one it is not received from. 64.
    pub inboxes_max: usize,
}

/// An option that the kernel refuses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OptionRefused {
    option: &'static str,
    value: String,
    errno: Errno,
}

/// Where the kernel handles what comes for a socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Placement {
    /// The processor that handled the last packet (`SO_INCOMING_CPU`).
    pub cpu: Option<u32>,
    /// The receive queue that the last packet came by (`SO_INCOMING_NAPI_ID`). None on loopback.
    pub napi_id: Option<u32>,
}

/// The congestion control between two sockets of this machine: every kernel has it, and lets anybody
/// have it.
pub const LOCAL_CONGESTION: &str = "reno";

const KEEPALIVE_IDLE: Duration = Duration::from_secs(30);
/// How long sent bytes may stay unacknowledged.
const USER_TIMEOUT: Span = Span::from_secs(30);
const KEEPALIVE_BETWEEN: Duration = Duration::from_secs(10);
const KEEPALIVE_COUNT: u32 = 3;

impl Default for SocketOptions {
    fn default() -> Self {
        Self {
            engine: SocketEngine::default(),
            no_delay: true,
            gathers: true,
            says_more: true,
            keepalive: true,
            user_timeout: USER_TIMEOUT,
            send_buffer_bytes: None,
            receive_buffer_bytes: None,
            busy_poll: None,
            congestion: None,
            priority: None,
            zero_copy_from_bytes: Some(32 << 10),
            inbox_bytes: 256 << 10,
            inboxes_max: 64,
        }
    }
}

impl SocketOptions {
    /// Applies what is told to the kernel. What is told to TCP only is kept from other sockets.
    pub(crate) fn apply(&self, socket: BorrowedFd<'_>) -> Result<(), OptionRefused> {
        let ioctl = rustix::io::ioctl_fionbio(socket, true);
        ioctl.map_err(refused("FIONBIO", 1))?;
        if let Some(bytes) = self.send_buffer_bytes {
            let set = sockopt::set_socket_send_buffer_size(socket, bytes);
            set.map_err(refused("SO_SNDBUF", bytes as u64))?;
        }
        if let Some(bytes) = self.receive_buffer_bytes {
            let set = sockopt::set_socket_recv_buffer_size(socket, bytes);
            set.map_err(refused("SO_RCVBUF", bytes as u64))?;
        }
        if let Some(busy) = self.busy_poll {
            set_busy_poll(socket, busy)?;
        }
        if let Some(priority) = self.priority {
            set_number(socket, ("SO_PRIORITY", libc::SO_PRIORITY), u64::from(priority))?;
        }
        match sockopt::socket_domain(socket) {
            Ok(AddressFamily::INET | AddressFamily::INET6) => self.apply_to_tcp(socket),
            _ => Ok(()),
        }
    }

    fn apply_to_tcp(&self, socket: BorrowedFd<'_>) -> Result<(), OptionRefused> {
        sockopt::set_tcp_nodelay(socket, self.no_delay)
            .map_err(refused("TCP_NODELAY", u64::from(self.no_delay)))?;
        sockopt::set_socket_keepalive(socket, self.keepalive)
            .map_err(refused("SO_KEEPALIVE", u64::from(self.keepalive)))?;
        if self.keepalive {
            set_keepalive_times(socket)?;
        }
        if let Some(name) = &self.congestion {
            sockopt::set_tcp_congestion(socket, name).map_err(|errno| OptionRefused {
                option: "TCP_CONGESTION",
                value: name.clone(),
                errno,
            })?;
        } else if is_local(socket) {
            // Nothing depends on it: without it, it is as fast as the machine's lets it be.
            let _ = sockopt::set_tcp_congestion(socket, LOCAL_CONGESTION);
        }
        let timeout_ms = self.user_timeout.ns.div_ceil(1_000_000);
        let timeout = u32::try_from(timeout_ms).unwrap_or(u32::MAX);
        sockopt::set_tcp_user_timeout(socket, timeout)
            .map_err(refused("TCP_USER_TIMEOUT", timeout_ms))
    }
}

/// Has the kernel notice within a minute that the peer of a TCP socket is gone: with nothing to send by
/// probes, otherwise by what stays unacknowledged.
///
/// # Errors
///
/// Which option the kernel refuses.
pub(crate) fn notice_vanished_peer(socket: BorrowedFd<'_>) -> Result<(), OptionRefused> {
    sockopt::set_socket_keepalive(socket, true).map_err(refused("SO_KEEPALIVE", 1))?;
    set_keepalive_times(socket)?;
    let timeout_ms = USER_TIMEOUT.ns / 1_000_000;
    let timeout = u32::try_from(timeout_ms).unwrap_or(u32::MAX);
    sockopt::set_tcp_user_timeout(socket, timeout).map_err(refused("TCP_USER_TIMEOUT", timeout_ms))
}

fn set_keepalive_times(socket: BorrowedFd<'_>) -> Result<(), OptionRefused> {
    sockopt::set_tcp_keepidle(socket, KEEPALIVE_IDLE)
        .map_err(refused("TCP_KEEPIDLE", KEEPALIVE_IDLE.as_secs()))?;
    sockopt::set_tcp_keepintvl(socket, KEEPALIVE_BETWEEN)
        .map_err(refused("TCP_KEEPINTVL", KEEPALIVE_BETWEEN.as_secs()))?;
    sockopt::set_tcp_keepcnt(socket, KEEPALIVE_COUNT)
        .map_err(refused("TCP_KEEPCNT", u64::from(KEEPALIVE_COUNT)))
}

/// Whether the other end of a connected socket is a socket of this machine.
fn is_local(socket: BorrowedFd<'_>) -> bool {
    let address_of = |address: SocketAddrAny| SocketAddr::try_from(address).ok();
    let peer = getpeername(socket).ok().flatten().and_then(address_of);
    let own = getsockname(socket).ok().and_then(address_of);
    peer.zip(own).is_some_and(|(peer, own)| peer.ip().is_loopback() || peer.ip() == own.ip())
}

impl Placement {
    /// Where a connected socket is handled, as far as the kernel knows by now.
    pub fn of(socket: impl AsFd) -> Self {
        let socket = socket.as_fd();
        Self {
            // It answers -1 while nothing has come.
            cpu: sockopt::socket_incoming_cpu(socket).ok().filter(|cpu| *cpu < u32::MAX),
            // Zero, or the number of a processor, where there is no receive queue.
            napi_id: number(socket, libc::SO_INCOMING_NAPI_ID).filter(|id| *id > 0),
        }
    }
}

/// Why a number was not set.
fn refused(option: &'static str, value: u64) -> impl FnOnce(Errno) -> OptionRefused {
    move |errno| OptionRefused { option, value: value.to_string(), errno }
}

/// Has looks that find nothing poll the receive queue for so long; not at all, if that is nothing.
pub(super) fn set_busy_poll(socket: BorrowedFd<'_>, busy: Span) -> Result<(), OptionRefused> {
    set_number(socket, ("SO_BUSY_POLL", libc::SO_BUSY_POLL), busy.ns.div_ceil(1000))
}

/// For how long that is, in microseconds.
#[cfg(test)]
pub(super) fn busy_poll_of(socket: BorrowedFd<'_>) -> Option<u32> {
    number(socket, libc::SO_BUSY_POLL)
}

pub(super) fn set_number(
    socket: BorrowedFd<'_>,
    (option, name): (&'static str, i32),
    value: u64,
) -> Result<(), OptionRefused> {
    let refused = refused(option, value);
    let Ok(number) = libc::c_int::try_from(value) else { return Err(refused(Errno::INVAL)) };
    // SAFETY: the pointer and the length are those of `number`, which outlives the call, and the
    // descriptor is open.
    let answer = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            name,
            (&raw const number).cast(),
            NUMBER_LEN,
        )
    };
    if answer == 0 { Ok(()) } else { Err(refused(last_errno())) }
}

fn number(socket: BorrowedFd<'_>, name: i32) -> Option<u32> {
    let mut number: u32 = 0;
    let mut len = NUMBER_LEN;
    // SAFETY: the pointer and the length are those of `number`; both outlive the call, and the
    // descriptor is open.
    let answer = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            name,
            (&raw mut number).cast(),
            &raw mut len,
        )
    };
    (answer == 0).then_some(number)
}

/// The length of an `int`.
const NUMBER_LEN: libc::socklen_t = 4;

impl OptionRefused {
    /// Whose move it is.
    pub fn blame(&self) -> Blame {
        match self.errno {
            Errno::INVAL | Errno::DOM | Errno::NOENT => Blame::Caller,
            _ => Blame::Machine,
        }
    }

    /// What can be done about it, if anything can.
    pub fn hint(&self) -> Option<&'static str> {
        match (self.option, self.errno) {
            ("SO_BUSY_POLL", Errno::PERM) => Some(
                "give the process CAP_NET_ADMIN, or raise net.core.busy_read with sysctl and leave \
                 busy polling to it",
            ),
            ("SO_PRIORITY", Errno::PERM) => Some("use a priority of 0 to 6, or CAP_NET_ADMIN"),
            ("TCP_CONGESTION", Errno::NOENT | Errno::PERM) => Some(
                "take one of net.ipv4.tcp_allowed_congestion_control, or add yours there with sysctl",
            ),
            _ => None,
        }
    }
}

impl fmt::Display for OptionRefused {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { option, value, errno } = self;
        write!(out, "set {option} of a socket to {value}: {errno}")
    }
}

impl std::error::Error for OptionRefused {}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

    use base::{Blame, Span};
    use rustix::net::sockopt;

    use super::{LOCAL_CONGESTION, Placement, SocketOptions, is_local};

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (one, listener.accept().unwrap().0)
    }

    #[test]
    fn peer_that_has_vanished_is_noticed_within_a_minute() {
        let (one, _other) = pair();
        super::notice_vanished_peer(one.as_fd()).unwrap();
        assert!(sockopt::socket_keepalive(&one).unwrap());
        let (idle, between) = (sockopt::tcp_keepidle(&one), sockopt::tcp_keepintvl(&one));
        let probes = between.unwrap() * sockopt::tcp_keepcnt(&one).unwrap();
        assert!((idle.unwrap() + probes).as_secs() <= 60);
        assert_eq!(sockopt::tcp_user_timeout(&one).unwrap(), 30_000);
    }

    #[test]
    fn what_is_asked_for_is_what_the_kernel_has() {
        let (one, _other) = pair();
        let options = SocketOptions {
            user_timeout: Span::from_ms(4321),
            receive_buffer_bytes: Some(50_000),
            send_buffer_bytes: Some(40_000),
            priority: Some(5),
            ..SocketOptions::default()
        };
        options.apply(one.as_fd()).unwrap();
        assert!(sockopt::tcp_nodelay(&one).unwrap());
        assert!(sockopt::socket_keepalive(&one).unwrap());
        assert_eq!(sockopt::tcp_user_timeout(&one).unwrap(), 4321);
        // The kernel doubles both, for what it keeps beside the bytes.
        assert_eq!(sockopt::socket_recv_buffer_size(&one).unwrap(), 100_000);
        assert_eq!(sockopt::socket_send_buffer_size(&one).unwrap(), 80_000);
        assert_eq!(super::number(one.as_fd(), libc::SO_PRIORITY), Some(5));
        let off = SocketOptions { no_delay: false, keepalive: false, ..options };
        off.apply(one.as_fd()).unwrap();
        assert!(!sockopt::tcp_nodelay(&one).unwrap());
        assert!(!sockopt::socket_keepalive(&one).unwrap());
    }

    #[test]
    fn within_the_machine_nothing_is_sent_at_a_pace_unless_it_is_asked_for() {
        let name = |socket: &TcpStream| sockopt::tcp_congestion(socket).unwrap();
        let (one, other) = pair();
        SocketOptions::default().apply(one.as_fd()).unwrap();
        assert_eq!(name(&one), LOCAL_CONGESTION);
        let allowed = "/proc/sys/net/ipv4/tcp_allowed_congestion_control";
        let allowed = std::fs::read_to_string(allowed).unwrap();
        for choice in allowed.split_whitespace() {
            let congestion = Some(choice.to_owned());
            let options = SocketOptions { congestion, ..SocketOptions::default() };
            options.apply(other.as_fd()).unwrap();
            assert_eq!(name(&other), choice);
        }
        let congestion = Some("none-such".to_owned());
        let options = SocketOptions { congestion, ..SocketOptions::default() };
        let refused = options.apply(one.as_fd()).unwrap_err();
        let text = refused.to_string();
        assert!(text.starts_with("set TCP_CONGESTION of a socket to none-such: "), "{text}");
        assert!(refused.hint().unwrap().contains("tcp_allowed_congestion_control"));
    }

    #[test]
    fn a_socket_of_another_machine_is_left_as_it_is() {
        // An end that is connected to nobody is nobody's neighbour.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(!is_local(listener.as_fd()));
        let (one, _other) = pair();
        assert!(is_local(one.as_fd()));
    }

    #[test]
    fn a_refused_option_is_named_with_its_value() {
        let (one, _other) = pair();
        let absurd = Span { ns: u64::MAX };
        let options = SocketOptions { busy_poll: Some(absurd), ..SocketOptions::default() };
        let refused = options.apply(one.as_fd()).unwrap_err();
        let text = refused.to_string();
        assert!(text.starts_with("set SO_BUSY_POLL of a socket to 18446744073709552: "), "{text}");
        assert_eq!(refused.blame(), Blame::Caller);
    }

    #[test]
    fn loopback_has_a_processor_and_no_queue() {
        use std::io::{Read, Write};
        let (mut one, mut other) = pair();
        one.write_all(b"x").unwrap();
        other.read_exact(&mut [0]).unwrap();
        let placement = Placement::of(&other);
        assert!(placement.cpu.is_some(), "{placement:?}");
        assert_eq!(placement.napi_id, None);
    }
}
