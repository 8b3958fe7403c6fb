//! Socket options of a stream, and its receive placement.

use std::fmt;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrAny, getpeername, getsockname, sockopt};
use tenmil_base::{ErrorCategory, Span};

use super::socket_stream_factory::SocketEngine;
use crate::io_vectors::last_errno;

/// Options of a thread's streams. Defaults are those of [`SocketOptions::default`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketOptions {
    /// Socket engine. Default `epoll`.
    pub engine: SocketEngine,
    /// `TCP_NODELAY`: data is sent at once. Default on. When off, the kernel waits for more
    /// (Nagle), which together with delayed acknowledgements costs up to 40 ms.
    pub no_delay: bool,
    /// `SO_KEEPALIVE`: detects a silently lost peer on an idle connection, after 30 seconds of
    /// silence and three probes 10 seconds apart. Default on.
    pub keepalive: bool,
    /// `TCP_USER_TIMEOUT`: how long sent bytes may stay unacknowledged before the connection is
    /// aborted. Default 30 seconds. Zero leaves it to the kernel (about 15 minutes).
    pub user_timeout: Span,
    /// Whether a batch is sent by one gathering call. Default on. When off, each segment is sent by
    /// its own call, with the headers before it: for measuring the gain.
    pub batch_send: bool,
    /// `MSG_MORE`: informs the kernel that more data follows at once, so that it delays a partial
    /// packet. Default on.
    pub msg_more: bool,
    /// `SO_SNDBUF` in bytes: unacknowledged and unsent data. `None`: tuned by the kernel. Capped at
    /// `net.core.wmem_max`.
    pub send_buffer_bytes: Option<usize>,
    /// `SO_RCVBUF` in bytes: received and unread data. `None`: tuned by the kernel. Capped at
    /// `net.core.rmem_max`.
    pub receive_buffer_bytes: Option<usize>,
    /// `SO_BUSY_POLL`: duration for which a poll that finds nothing polls the network card. `None`:
    /// the value of `net.core.busy_read`. A larger value requires `CAP_NET_ADMIN`.
    pub busy_poll: Option<Span>,
    /// `TCP_CONGESTION`: congestion control. `None`: the system default, but [`LOCAL_CONGESTION`]
    /// between two sockets of this machine, where nothing is lost and pacing (BBR) only adds delay.
    pub congestion: Option<String>,
    /// `SO_PRIORITY`: queueing class of sent packets, 0 to 6. `None`: 0.
    pub priority: Option<u32>,
    /// Smallest average segment length for a zero-copy send. Default 32 KiB; `None`: all sends
    /// copy. A stream whose kernel reports that it copied anyway, as on loopback, returns to
    /// copying.
    pub zero_copy_from_bytes: Option<usize>,
    /// Length of a receive buffer: the maximum that one poll receives. Default 256 KiB.
    pub recv_buffer_bytes: usize,
    /// Maximum number of receive buffers per thread. A stream holds one only while it has
    /// unconsumed bytes; without a free one it does not receive. Default 64.
    pub recv_buffers_max: usize,
}

/// The kernel refused an option.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketOptionError {
    option: &'static str,
    value: String,
    errno: Errno,
}

/// CPU and receive queue that process a socket's packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RxPlacement {
    /// CPU that processed the last packet (`SO_INCOMING_CPU`).
    pub cpu: Option<u32>,
    /// Receive queue of the last packet (`SO_INCOMING_NAPI_ID`). `None` on loopback.
    pub napi_id: Option<u32>,
}

/// Congestion control between two sockets of this machine: built into every kernel, and
/// unprivileged.
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
            batch_send: true,
            msg_more: true,
            keepalive: true,
            user_timeout: USER_TIMEOUT,
            send_buffer_bytes: None,
            receive_buffer_bytes: None,
            busy_poll: None,
            congestion: None,
            priority: None,
            zero_copy_from_bytes: Some(32 << 10),
            recv_buffer_bytes: 256 << 10,
            recv_buffers_max: 64,
        }
    }
}

impl SocketOptions {
    /// Applies the options to a socket. TCP options are skipped for other sockets.
    pub(crate) fn apply(&self, socket: BorrowedFd<'_>) -> Result<(), SocketOptionError> {
        let ioctl = rustix::io::ioctl_fionbio(socket, true);
        ioctl.map_err(option_error("FIONBIO", 1))?;
        if let Some(bytes) = self.send_buffer_bytes {
            let set = sockopt::set_socket_send_buffer_size(socket, bytes);
            set.map_err(option_error("SO_SNDBUF", bytes as u64))?;
        }
        if let Some(bytes) = self.receive_buffer_bytes {
            let set = sockopt::set_socket_recv_buffer_size(socket, bytes);
            set.map_err(option_error("SO_RCVBUF", bytes as u64))?;
        }
        if let Some(busy) = self.busy_poll {
            set_busy_poll(socket, busy)?;
        }
        if let Some(priority) = self.priority {
            set_socket_option(socket, ("SO_PRIORITY", libc::SO_PRIORITY), u64::from(priority))?;
        }
        match sockopt::socket_domain(socket) {
            Ok(AddressFamily::INET | AddressFamily::INET6) => self.apply_to_tcp(socket),
            _ => Ok(()),
        }
    }

    fn apply_to_tcp(&self, socket: BorrowedFd<'_>) -> Result<(), SocketOptionError> {
        sockopt::set_tcp_nodelay(socket, self.no_delay)
            .map_err(option_error("TCP_NODELAY", u64::from(self.no_delay)))?;
        sockopt::set_socket_keepalive(socket, self.keepalive)
            .map_err(option_error("SO_KEEPALIVE", u64::from(self.keepalive)))?;
        if self.keepalive {
            set_keepalive_times(socket)?;
        }
        if let Some(name) = &self.congestion {
            sockopt::set_tcp_congestion(socket, name).map_err(|errno| SocketOptionError {
                option: "TCP_CONGESTION",
                value: name.clone(),
                errno,
            })?;
        } else if is_local(socket) {
            // Optional: on failure the system's default congestion control stays.
            let _ = sockopt::set_tcp_congestion(socket, LOCAL_CONGESTION);
        }
        let timeout_ms = self.user_timeout.ns.div_ceil(1_000_000);
        let timeout = u32::try_from(timeout_ms).unwrap_or(u32::MAX);
        sockopt::set_tcp_user_timeout(socket, timeout)
            .map_err(option_error("TCP_USER_TIMEOUT", timeout_ms))
    }
}

/// Has the kernel notice within a minute that the peer of a TCP socket is gone: with nothing to send by
/// probes, otherwise by what stays unacknowledged.
///
/// # Errors
///
/// Which option the kernel refuses.
pub(crate) fn set_peer_timeouts(socket: BorrowedFd<'_>) -> Result<(), SocketOptionError> {
    sockopt::set_socket_keepalive(socket, true).map_err(option_error("SO_KEEPALIVE", 1))?;
    set_keepalive_times(socket)?;
    let timeout_ms = USER_TIMEOUT.ns / 1_000_000;
    let timeout = u32::try_from(timeout_ms).unwrap_or(u32::MAX);
    sockopt::set_tcp_user_timeout(socket, timeout)
        .map_err(option_error("TCP_USER_TIMEOUT", timeout_ms))
}

fn set_keepalive_times(socket: BorrowedFd<'_>) -> Result<(), SocketOptionError> {
    sockopt::set_tcp_keepidle(socket, KEEPALIVE_IDLE)
        .map_err(option_error("TCP_KEEPIDLE", KEEPALIVE_IDLE.as_secs()))?;
    sockopt::set_tcp_keepintvl(socket, KEEPALIVE_BETWEEN)
        .map_err(option_error("TCP_KEEPINTVL", KEEPALIVE_BETWEEN.as_secs()))?;
    sockopt::set_tcp_keepcnt(socket, KEEPALIVE_COUNT)
        .map_err(option_error("TCP_KEEPCNT", u64::from(KEEPALIVE_COUNT)))
}

/// Whether the peer of a connected socket is on this machine.
fn is_local(socket: BorrowedFd<'_>) -> bool {
    let address_of = |address: SocketAddrAny| SocketAddr::try_from(address).ok();
    let peer = getpeername(socket).ok().flatten().and_then(address_of);
    let own = getsockname(socket).ok().and_then(address_of);
    peer.zip(own).is_some_and(|(peer, own)| peer.ip().is_loopback() || peer.ip() == own.ip())
}

impl RxPlacement {
    /// Reads the placement of a connected socket, as far as known.
    pub fn of_socket(socket: impl AsFd) -> Self {
        let socket = socket.as_fd();
        Self {
            // -1 until a packet arrives.
            cpu: sockopt::socket_incoming_cpu(socket).ok().filter(|cpu| *cpu < u32::MAX),
            // Zero, or a CPU number, where no receive queue is known.
            napi_id: get_socket_option(socket, libc::SO_INCOMING_NAPI_ID).filter(|id| *id > 0),
        }
    }
}

/// Error for a number that was not set.
fn option_error(option: &'static str, value: u64) -> impl FnOnce(Errno) -> SocketOptionError {
    move |errno| SocketOptionError { option, value: value.to_string(), errno }
}

/// Makes polls that find nothing busy-poll the receive queue for this long; zero disables it.
pub(super) fn set_busy_poll(socket: BorrowedFd<'_>, busy: Span) -> Result<(), SocketOptionError> {
    set_socket_option(socket, ("SO_BUSY_POLL", libc::SO_BUSY_POLL), busy.ns.div_ceil(1000))
}

/// Busy-poll duration in microseconds.
#[cfg(test)]
pub(super) fn busy_poll_of(socket: BorrowedFd<'_>) -> Option<u32> {
    get_socket_option(socket, libc::SO_BUSY_POLL)
}

pub(super) fn set_socket_option(
    socket: BorrowedFd<'_>,
    (option, name): (&'static str, i32),
    value: u64,
) -> Result<(), SocketOptionError> {
    let refused = option_error(option, value);
    let Ok(number) = libc::c_int::try_from(value) else { return Err(refused(Errno::INVAL)) };
    // SAFETY: pointer and length are those of `number`, which outlives the call, and the descriptor
    // is open.
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

fn get_socket_option(socket: BorrowedFd<'_>, name: i32) -> Option<u32> {
    let mut number: u32 = 0;
    let mut len = NUMBER_LEN;
    // SAFETY: pointer and length are those of `number`; both outlive the call, and the descriptor
    // is open.
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

/// Size of an `int`.
const NUMBER_LEN: libc::socklen_t = 4;

impl SocketOptionError {
    /// Error category.
    pub fn category(&self) -> ErrorCategory {
        match self.errno {
            Errno::INVAL | Errno::DOM | Errno::NOENT => ErrorCategory::Usage,
            _ => ErrorCategory::Environment,
        }
    }

    /// Hint for the user, if any.
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

impl fmt::Display for SocketOptionError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { option, value, errno } = self;
        write!(out, "set {option} of a socket to {value}: {errno}")
    }
}

impl std::error::Error for SocketOptionError {}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

    use rustix::net::sockopt;
    use tenmil_base::{ErrorCategory, Span};

    use super::{LOCAL_CONGESTION, RxPlacement, SocketOptions, is_local};

    fn socket_pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (one, listener.accept().unwrap().0)
    }

    #[test]
    fn vanished_peer_is_noticed_within_a_minute() {
        let (one, _other) = socket_pair();
        super::set_peer_timeouts(one.as_fd()).unwrap();
        assert!(sockopt::socket_keepalive(&one).unwrap());
        let (idle, between) = (sockopt::tcp_keepidle(&one), sockopt::tcp_keepintvl(&one));
        let probes = between.unwrap() * sockopt::tcp_keepcnt(&one).unwrap();
        assert!((idle.unwrap() + probes).as_secs() <= 60);
        assert_eq!(sockopt::tcp_user_timeout(&one).unwrap(), 30_000);
    }

    #[test]
    fn requested_options_are_set_in_the_kernel() {
        let (one, _other) = socket_pair();
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
        // The kernel doubles both, for its bookkeeping.
        assert_eq!(sockopt::socket_recv_buffer_size(&one).unwrap(), 100_000);
        assert_eq!(sockopt::socket_send_buffer_size(&one).unwrap(), 80_000);
        assert_eq!(super::get_socket_option(one.as_fd(), libc::SO_PRIORITY), Some(5));
        let off = SocketOptions { no_delay: false, keepalive: false, ..options };
        off.apply(one.as_fd()).unwrap();
        assert!(!sockopt::tcp_nodelay(&one).unwrap());
        assert!(!sockopt::socket_keepalive(&one).unwrap());
    }

    #[test]
    fn pacing_is_off_by_default_on_local_connections() {
        let name = |socket: &TcpStream| sockopt::tcp_congestion(socket).unwrap();
        let (one, other) = socket_pair();
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
    fn remote_connection_keeps_kernel_defaults() {
        // An unconnected socket is not local.
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(!is_local(listener.as_fd()));
        let (one, _other) = socket_pair();
        assert!(is_local(one.as_fd()));
    }

    #[test]
    fn rejected_option_is_named_with_its_value() {
        let (one, _other) = socket_pair();
        let absurd = Span { ns: u64::MAX };
        let options = SocketOptions { busy_poll: Some(absurd), ..SocketOptions::default() };
        let refused = options.apply(one.as_fd()).unwrap_err();
        let text = refused.to_string();
        assert!(text.starts_with("set SO_BUSY_POLL of a socket to 18446744073709552: "), "{text}");
        assert_eq!(refused.category(), ErrorCategory::Usage);
    }

    #[test]
    fn loopback_socket_has_a_cpu_and_no_receive_queue() {
        use std::io::{Read, Write};
        let (mut one, mut other) = socket_pair();
        one.write_all(b"x").unwrap();
        other.read_exact(&mut [0]).unwrap();
        let placement = RxPlacement::of_socket(&other);
        assert!(placement.cpu.is_some(), "{placement:?}");
        assert_eq!(placement.napi_id, None);
    }
}
