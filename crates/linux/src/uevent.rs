//! Kernel device events (uevents) over netlink.
//!
//! ```text
//!   remove@/devices/pci0000:00/…/0000:01:00.0 \0 ACTION=remove \0 DEVPATH=… \0 SUBSYSTEM=pci \0 …
//! ```
//!
//! No privilege is needed. When the receive buffer overflows, events are lost and the kernel
//! reports that; so a listener treats an event as a hint and rescans sysfs. Other processes may
//! send to the same socket: messages that do not come from the kernel are dropped.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType, bind, recvfrom, socket_with};

use crate::Errno;

/// Netlink socket that receives kernel uevents.
#[derive(Debug)]
pub struct UeventListener {
    socket: OwnedFd,
    buffer: Box<[u8]>,
}

/// Result of a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UeventResult<'a> {
    /// An event.
    Uevent(Uevent<'a>),
    /// Events were lost: the state must be rescanned.
    Overflow,
    /// No event now.
    WouldBlock,
}

/// Device event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Uevent<'a> {
    /// `add`, `remove`, `change`, `bind`, `unbind` or another action.
    pub action: &'a str,
    /// Sysfs directory, below `/sys`, with a leading slash.
    pub path: &'a str,
    /// Subsystem: `pci`, `nvme`, `block`.
    pub subsystem: &'a str,
}

/// Multicast group of the kernel's own events; udev uses another group.
const KERNEL: u32 = 1;
/// Maximum message length: the kernel limits it to 2 KiB and a path (`UEVENT_BUFFER_SIZE`).
const MESSAGE_MAX: usize = 8192;

impl UeventListener {
    /// Opens a socket that receives all events from now on.
    pub fn new() -> io::Result<Self> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let kind = SocketType::DGRAM;
        let socket = socket_with(AddressFamily::NETLINK, kind, flags, Some(KOBJECT_UEVENT))?;
        bind(&socket, &SocketAddrNetlink::new(0, KERNEL))?;
        Ok(Self { socket, buffer: vec![0; MESSAGE_MAX].into() })
    }

    /// Receives the next event. Skips malformed messages and those of other senders.
    pub fn recv(&mut self) -> io::Result<UeventResult<'_>> {
        let len = loop {
            match recvfrom(&self.socket, &mut *self.buffer, RecvFlags::TRUNC) {
                Ok((_, len, sender)) => {
                    let sender = sender.and_then(|any| SocketAddrNetlink::try_from(any).ok());
                    // Only the kernel has port identifier 0.
                    if sender.is_none_or(|sender| sender.pid() != 0) {
                        continue;
                    }
                    if len > self.buffer.len() {
                        return Ok(UeventResult::Overflow);
                    }
                    if Uevent::parse(&self.buffer[..len]).is_some() {
                        break len;
                    }
                }
                Err(Errno::NOBUFS) => return Ok(UeventResult::Overflow),
                Err(Errno::AGAIN) => return Ok(UeventResult::WouldBlock),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        };
        Ok(Uevent::parse(&self.buffer[..len])
            .map_or(UeventResult::WouldBlock, UeventResult::Uevent))
    }
}

impl AsFd for UeventListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl<'a> Uevent<'a> {
    /// Parses a message: `ACTION@PATH`, the same as variables, and each variable once; `None`
    /// otherwise.
    pub fn parse(message: &'a [u8]) -> Option<Self> {
        let text = str::from_utf8(message).ok()?;
        let mut strings = text.strip_suffix('\0')?.split('\0');
        let (action, path) = strings.next()?.split_once('@')?;
        let (mut named_action, mut named_path, mut subsystem) = (None, None, None);
        for string in strings {
            let (key, value) = string.split_once('=')?;
            let place = match key {
                "ACTION" => &mut named_action,
                "DEVPATH" => &mut named_path,
                "SUBSYSTEM" => &mut subsystem,
                _ => continue,
            };
            if place.replace(value).is_some() {
                return None;
            }
        }
        let is_whole = named_action == Some(action) && named_path == Some(path);
        let is_path = path.starts_with('/') && !action.is_empty();
        (is_whole && is_path).then_some(Self { action, path, subsystem: subsystem? })
    }

    /// Last component of the path: the name on its bus.
    pub fn device_name(&self) -> &'a str {
        self.path.rsplit('/').next().unwrap_or(self.path)
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Random;

    use super::{Errno, Uevent, UeventListener, UeventResult};

    const PULLED: &str = "remove@/devices/pci0000:00/0000:00:05.0/0000:01:00.0\0ACTION=remove\0\
        DEVPATH=/devices/pci0000:00/0000:00:05.0/0000:01:00.0\0SUBSYSTEM=pci\0\
        PCI_CLASS=10802\0SEQNUM=1234\0";

    #[test]
    fn uevent_message_is_parsed() {
        let uevent = Uevent::parse(PULLED.as_bytes()).unwrap();
        assert_eq!((uevent.action, uevent.subsystem), ("remove", "pci"));
        assert_eq!(uevent.device_name(), "0000:01:00.0");
    }

    #[test]
    fn message_that_is_no_kobject_uevent_is_ignored() {
        let whole = PULLED.to_owned();
        let spoilt = [
            String::new(),
            "\0".into(),
            // Messages of udev begin with its name and a binary header.
            "libudev\0\u{fe}\0ACTION=remove\0".into(),
            whole.trim_end_matches('\0').into(),
            whole.replace("remove@", "remove"),
            whole.replace("remove@", "add@"),
            whole.replace("remove@/devices/pci", "remove@/devices/usb"),
            whole.replace("ACTION=remove", "ACTION=add"),
            whole.replace("ACTION=remove\0", ""),
            whole.replace("SUBSYSTEM=pci\0", ""),
            whole.replace("SUBSYSTEM=pci\0", "SUBSYSTEM=pci\0SUBSYSTEM=usb\0"),
            whole.replace("PCI_CLASS=10802", "PCI_CLASS"),
            "@/x\0ACTION=\0DEVPATH=/x\0SUBSYSTEM=pci\0".into(),
            "add@x\0ACTION=add\0DEVPATH=x\0SUBSYSTEM=pci\0".into(),
        ];
        for text in spoilt {
            assert_eq!(Uevent::parse(text.as_bytes()), None, "{text:?}");
        }
        assert_eq!(Uevent::parse(b"add@/\xff\0ACTION=add\0DEVPATH=/\xff\0SUBSYSTEM=pci\0"), None);
    }

    #[test]
    fn random_message_causes_no_panic() {
        let mut random = Random::new(0x75e7);
        for _ in 0..20_000 {
            let mut bytes = PULLED.as_bytes().to_vec();
            for _ in 0..=random.below(4) {
                let at = usize::try_from(random.below(bytes.len() as u64)).unwrap();
                match random.below(3) {
                    0 => bytes[at] = u8::try_from(random.below(256)).unwrap(),
                    1 => bytes.truncate(at.max(1)),
                    _ => bytes.insert(at, b'\0'),
                }
            }
            if let Some(uevent) = Uevent::parse(&bytes) {
                assert!(uevent.path.starts_with('/') && !uevent.device_name().contains('/'));
            }
        }
    }

    #[test]
    fn message_of_a_user_process_is_ignored() {
        // Where netlink is not available, opening fails.
        let Ok(mut listener) = UeventListener::new() else { return };
        // Sending requires a privilege.
        if !send_test_message(&listener, PULLED.as_bytes()) {
            return;
        }
        // The kernel may send events of its own meanwhile.
        while let UeventResult::Uevent(heard) = listener.recv().unwrap() {
            assert_ne!(heard.device_name(), "0000:01:00.0", "that was not the kernel");
        }
    }

    /// Sends a message to `listener`, with the privilege to do so. False without it.
    fn send_test_message(listener: &UeventListener, bytes: &[u8]) -> bool {
        use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
        use rustix::net::{
            AddressFamily, SendFlags, SocketFlags, SocketType, getsockname, sendto, socket_with,
        };
        let kind = SocketType::DGRAM;
        let flags = SocketFlags::CLOEXEC;
        let from = socket_with(AddressFamily::NETLINK, kind, flags, Some(KOBJECT_UEVENT)).unwrap();
        let to = SocketAddrNetlink::try_from(getsockname(listener).unwrap()).unwrap();
        let to = SocketAddrNetlink::new(to.pid(), 0);
        match sendto(&from, bytes, SendFlags::empty(), &to) {
            Err(Errno::PERM) => false,
            sent => sent.unwrap() == bytes.len(),
        }
    }
}
