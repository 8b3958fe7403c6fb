//! Notifications to a service manager: `sd_notify` of systemd, without its library.
//!
//! ```text
//!   start ── READY=1 ── RELOADING=1 ── READY=1 ── … ── STOPPING=1 ── exit
//!                 └── WATCHDOG=1, WATCHDOG=1, … at least every WATCHDOG_USEC
//! ```
//!
//! Each notification is a datagram of lines `NAME=value` to the socket in `$NOTIFY_SOCKET` (sd_notify(3)).
//! The socket is connected once, before a process restricts itself: Landlock denies new connections to
//! abstract sockets, and permits datagrams through a socket that is connected.

use std::ffi::OsStr;
use std::fmt::Write;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, send, socket_with,
};
use rustix::time::{ClockId, clock_gettime};
use tenmil_base::Span;

/// Connection to the service manager that started this process.
#[derive(Debug)]
pub struct ServiceManager {
    socket: OwnedFd,
    watchdog: Option<Span>,
}

/// Variables of a service manager in the environment.
#[derive(Clone, Copy, Debug, Default)]
struct NotifyVariables<'a> {
    socket: Option<&'a OsStr>,
    watchdog_us: Option<&'a str>,
    watchdog_pid: Option<&'a str>,
}

/// Time that a notification waits while the queue of the manager is full. Its receiver is the first process
/// of the machine, which may be busy at boot.
const SEND_MAX: Span = Span::from_secs(1);

impl ServiceManager {
    /// Connects to the service manager in the environment of this process. `None` if there is none.
    ///
    /// # Errors
    ///
    /// If `$NOTIFY_SOCKET` names no Unix socket, or none that can be connected to.
    pub fn from_environment() -> io::Result<Option<Self>> {
        let socket = std::env::var_os("NOTIFY_SOCKET");
        let [watchdog_us, watchdog_pid] =
            ["WATCHDOG_USEC", "WATCHDOG_PID"].map(|name| std::env::var(name).ok());
        Self::connect(NotifyVariables {
            socket: socket.as_deref(),
            watchdog_us: watchdog_us.as_deref(),
            watchdog_pid: watchdog_pid.as_deref(),
        })
    }

    fn connect(variables: NotifyVariables<'_>) -> io::Result<Option<Self>> {
        let Some(name) = variables.socket.filter(|name| !name.is_empty()) else {
            return Ok(None);
        };
        let address = match name.as_bytes() {
            [b'@', name @ ..] => SocketAddrUnix::new_abstract_name(name)?,
            [b'/', ..] => SocketAddrUnix::new(name)?,
            _ => {
                let text = format!(
                    "NOTIFY_SOCKET is `{}`, expected the path of a Unix socket or @ and an abstract name",
                    name.display()
                );
                return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
            }
        };
        let flags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);
        let socket = socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
        connect(&socket, &address)?;
        Ok(Some(Self { socket, watchdog: watchdog_of(variables, std::process::id()) }))
    }

    /// Time within which the manager expects [`keep_alive`](Self::keep_alive). `None` if it watches no time.
    pub fn watchdog(&self) -> Option<Span> {
        self.watchdog
    }

    /// Reports that the service has started or reloaded, and a line that describes its state.
    pub fn report_ready(&self, status: &str) -> io::Result<()> {
        self.send(&format!("READY=1\nSTATUS={}", one_line(status)))
    }

    /// Reports a line that describes the state of the service.
    pub fn report_status(&self, status: &str) -> io::Result<()> {
        self.send(&format!("STATUS={}", one_line(status)))
    }

    /// Reports that the service reads its configuration again. [`report_ready`](Self::report_ready) ends it.
    pub fn report_reloading(&self, status: &str) -> io::Result<()> {
        let now = clock_gettime(ClockId::Monotonic);
        let mut text = String::from("RELOADING=1\n");
        // Type=notify-reload compares it with the time at which the manager requested the reload.
        let us = now.tv_sec.saturating_mul(1_000_000).saturating_add(now.tv_nsec / 1_000);
        // Writing to a string does not fail.
        let _ = write!(text, "MONOTONIC_USEC={us}\nSTATUS={}", one_line(status));
        self.send(&text)
    }

    /// Reports that the service ends.
    pub fn report_stopping(&self, status: &str) -> io::Result<()> {
        self.send(&format!("STOPPING=1\nSTATUS={}", one_line(status)))
    }

    /// Reports that the service makes progress.
    pub fn keep_alive(&self) -> io::Result<()> {
        self.send("WATCHDOG=1")
    }

    /// Sends a datagram; waits for up to [`SEND_MAX`] while the queue of the receiver is full.
    fn send(&self, text: &str) -> io::Result<()> {
        loop {
            match send(&self.socket, text.as_bytes(), SendFlags::NOSIGNAL) {
                Ok(_) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    let limit = Timespec { tv_sec: SEND_MAX.ns as i64 / 1_000_000_000, tv_nsec: 0 };
                    match poll(&mut [PollFd::new(&self.socket, PollFlags::OUT)], Some(&limit)) {
                        Ok(0) => return Err(io::ErrorKind::TimedOut.into()),
                        Ok(_) | Err(Errno::INTR) => {}
                        Err(errno) => return Err(errno.into()),
                    }
                }
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

/// Watchdog time of the process `pid`, if the variables are meant for it.
fn watchdog_of(variables: NotifyVariables<'_>, pid: u32) -> Option<Span> {
    let is_ours = variables.watchdog_pid.is_none_or(|text| text.parse() == Ok(pid));
    let us: u64 = variables.watchdog_us.filter(|_| is_ours)?.parse().ok()?;
    (us > 0).then(|| Span { ns: us.saturating_mul(1_000) })
}

/// Text as the value of one variable: a line end would begin another one.
fn one_line(text: &str) -> String {
    tenmil_base::text::escape(text)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::net::UnixDatagram;
    use std::time::Duration;

    use tenmil_base::Span;

    use super::{NotifyVariables, ServiceManager, watchdog_of};

    fn connected_to(path: &str) -> ServiceManager {
        let variables =
            NotifyVariables { socket: Some(OsStr::new(path)), ..NotifyVariables::default() };
        ServiceManager::connect(variables).unwrap().unwrap()
    }

    fn received(by: &UnixDatagram) -> String {
        by.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut bytes = [0; 4096];
        let count = by.recv(&mut bytes).unwrap();
        String::from_utf8(bytes[..count].to_vec()).unwrap()
    }

    #[test]
    fn states_arrive_at_a_socket_with_a_path() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        let service = connected_to(path.to_str().unwrap());
        service.report_ready("listening at tcp://[::1]:4420").unwrap();
        assert_eq!(received(&manager), "READY=1\nSTATUS=listening at tcp://[::1]:4420");
        service.report_status("a\nREADY=1").unwrap();
        assert_eq!(received(&manager), "STATUS=a\\u{a}READY=1", "text adds no variable");
        service.report_reloading("reading t.toml").unwrap();
        let text = received(&manager);
        let rest = text.strip_prefix("RELOADING=1\nMONOTONIC_USEC=").expect(&text);
        let (us, rest) = rest.split_once('\n').expect(&text);
        assert!(us.parse::<u64>().unwrap() > 0);
        assert_eq!(rest, "STATUS=reading t.toml");
        service.keep_alive().unwrap();
        assert_eq!(received(&manager), "WATCHDOG=1");
        service.report_stopping("draining").unwrap();
        assert_eq!(received(&manager), "STOPPING=1\nSTATUS=draining");
    }

    #[test]
    fn states_arrive_at_an_abstract_socket() {
        use std::os::linux::net::SocketAddrExt;
        let name = format!("tenmil-notify-{}", std::process::id());
        let address = std::os::unix::net::SocketAddr::from_abstract_name(&name).unwrap();
        let manager = UnixDatagram::bind_addr(&address).unwrap();
        connected_to(&format!("@{name}")).keep_alive().unwrap();
        assert_eq!(received(&manager), "WATCHDOG=1");
    }

    #[test]
    fn full_queue_of_the_manager_is_an_error_after_a_time() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("notify");
        let _manager = UnixDatagram::bind(&path).unwrap();
        let service = connected_to(path.to_str().unwrap());
        let failed = (0..100_000).find_map(|_| service.keep_alive().err()).unwrap();
        assert_eq!(failed.kind(), std::io::ErrorKind::TimedOut, "{failed}");
    }

    #[test]
    fn without_a_socket_there_is_no_manager_and_a_wrong_name_is_an_error() {
        assert!(ServiceManager::connect(NotifyVariables::default()).unwrap().is_none());
        for name in ["relative", "vsock:2:1234", "/nonexistent/notify"] {
            let variables =
                NotifyVariables { socket: Some(OsStr::new(name)), ..NotifyVariables::default() };
            ServiceManager::connect(variables).unwrap_err();
        }
    }

    #[test]
    fn watchdog_time_is_that_of_this_process() {
        let of = |watchdog_us, watchdog_pid| {
            watchdog_of(NotifyVariables { socket: None, watchdog_us, watchdog_pid }, 7)
        };
        assert_eq!(of(Some("30000000"), Some("7")), Some(Span::from_secs(30)));
        assert_eq!(of(Some("30000000"), None), Some(Span::from_secs(30)));
        assert_eq!(of(Some("30000000"), Some("8")), None);
        assert_eq!((of(None, None), of(Some("0"), None), of(Some("x"), None)), (None, None, None));
    }
}
