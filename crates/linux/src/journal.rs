//! The journal of systemd: entries with fields, by its native protocol.
//!
//! An entry is one datagram of fields to `/run/systemd/journal/socket`:
//!
//! ```text
//!   NAME=value\n                                        a value without a line end
//!   NAME\n  length (64 bits, little-endian)  value\n    any value
//! ```
//!
//! Names consist of `A-Z`, `0-9` and `_`, and begin with a letter; the journal drops others.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, send, socket_with,
    sockopt,
};

/// Connection to the journal. A send blocks while the queue of the journal is full.
#[derive(Debug)]
pub struct JournalSocket {
    socket: OwnedFd,
    path: PathBuf,
}

/// Entry of the journal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JournalEntry {
    bytes: Vec<u8>,
}

/// Socket of the journal for entries.
const JOURNAL_SOCKET: &str = "/run/systemd/journal/socket";
/// Send buffer, as that of sd_journal_send(3); the kernel grants what `net.core.wmem_max` permits.
const SEND_BUFFER_BYTES: usize = 8 << 20;
/// Longest name of a field (journal-file format).
const NAME_BYTES_MAX: usize = 64;

impl JournalSocket {
    /// Connects to the journal of this machine.
    ///
    /// # Errors
    ///
    /// The error of the system call: `NotFound` where no journal runs.
    pub fn connect() -> io::Result<Self> {
        Self::connect_to(Path::new(JOURNAL_SOCKET))
    }

    /// Connects to the journal with this socket.
    ///
    /// # Errors
    ///
    /// The error of the system call.
    pub fn connect_to(path: &Path) -> io::Result<Self> {
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
        // Where it cannot be larger, long entries wait.
        let _ = sockopt::set_socket_send_buffer_size(&socket, SEND_BUFFER_BYTES);
        connect(&socket, &SocketAddrUnix::new(path)?)?;
        Ok(Self { socket, path: path.into() })
    }

    /// Sends an entry. A journal that was restarted is connected to again.
    ///
    /// # Errors
    ///
    /// The error of the system call.
    pub fn send(&mut self, entry: &JournalEntry) -> io::Result<()> {
        match self.send_once(entry) {
            Err(Errno::CONNREFUSED | Errno::NOTCONN | Errno::CONNRESET) => {
                *self = Self::connect_to(&self.path.clone())?;
                Ok(self.send_once(entry)?)
            }
            sent => Ok(sent?),
        }
    }

    fn send_once(&self, entry: &JournalEntry) -> Result<(), Errno> {
        loop {
            match send(&self.socket, &entry.bytes, SendFlags::NOSIGNAL) {
                Err(Errno::INTR) => {}
                sent => return sent.map(drop),
            }
        }
    }
}

impl JournalEntry {
    /// Appends a field. A lower-case name is converted; characters that no name has become `_`.
    pub fn add_field(&mut self, name: &str, value: &str) {
        let start = self.bytes.len();
        let fitting = |byte: u8| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' => byte.to_ascii_uppercase(),
            _ => b'_',
        };
        self.bytes.extend(name.bytes().map(fitting).take(NAME_BYTES_MAX));
        // A leading `_` marks a field that the journal itself has verified.
        if !self.bytes.get(start).is_some_and(u8::is_ascii_uppercase) {
            self.bytes.insert(start, b'X');
            self.bytes.truncate(start + NAME_BYTES_MAX);
        }
        match value.contains('\n') {
            false => {
                self.bytes.push(b'=');
            }
            true => {
                self.bytes.push(b'\n');
                self.bytes.extend_from_slice(&(value.len() as u64).to_le_bytes());
            }
        }
        self.bytes.extend_from_slice(value.as_bytes());
        self.bytes.push(b'\n');
    }
}

/// Whether standard error of this process is a stream of the journal: `$JOURNAL_STREAM` has its device and inode
/// (systemd.exec(5)).
pub fn is_stderr_a_journal_stream() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else { return false };
    // The metadata of a descriptor, by the link that the kernel has for it.
    std::fs::metadata("/proc/self/fd/2")
        .is_ok_and(|found| is_stream(&stream, found.dev(), found.ino()))
}

fn is_stream(variable: &str, device: u64, inode: u64) -> bool {
    let numbers = variable.split_once(':');
    numbers.is_some_and(|(one, other)| one.parse() == Ok(device) && other.parse() == Ok(inode))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;
    use std::time::Duration;

    use super::{JournalEntry, JournalSocket, is_stream};

    fn entry(fields: &[(&str, &str)]) -> JournalEntry {
        let mut entry = JournalEntry::default();
        fields.iter().for_each(|(name, value)| entry.add_field(name, value));
        entry
    }

    #[test]
    fn value_with_a_line_end_has_a_length_and_others_are_lines() {
        let bytes = entry(&[("MESSAGE", "one=1"), ("HOST", "a\nPRIORITY=0")]).bytes;
        let mut expected = b"MESSAGE=one=1\nHOST\n".to_vec();
        expected.extend_from_slice(&[12, 0, 0, 0, 0, 0, 0, 0]);
        expected.extend_from_slice(b"a\nPRIORITY=0\n");
        assert_eq!(bytes, expected);
    }

    #[test]
    fn names_are_those_that_the_journal_accepts() {
        assert_eq!(entry(&[("bytes-read", "1")]).bytes, b"BYTES_READ=1\n");
        assert_eq!(entry(&[("_pid", "1")]).bytes, b"X_PID=1\n", "it is not a trusted field");
        assert_eq!(entry(&[("4k", "1")]).bytes, b"X4K=1\n");
        let long = entry(&[(&"a".repeat(200), "")]).bytes;
        assert_eq!(long.len(), 64 + 2);
    }

    #[test]
    fn restarted_journal_receives_the_next_entry() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let journal = UnixDatagram::bind(&path).unwrap();
        let mut socket = JournalSocket::connect_to(&path).unwrap();
        socket.send(&entry(&[("MESSAGE", "first")])).unwrap();
        drop(journal);
        std::fs::remove_file(&path).unwrap();
        socket.send(&entry(&[("MESSAGE", "lost")])).unwrap_err();
        let journal = UnixDatagram::bind(&path).unwrap();
        socket.send(&entry(&[("MESSAGE", "second")])).unwrap();
        journal.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut bytes = [0; 100];
        let count = journal.recv(&mut bytes).unwrap();
        assert_eq!(&bytes[..count], b"MESSAGE=second\n");
    }

    #[test]
    fn journal_stream_names_device_and_inode() {
        assert!(is_stream("8:4711", 8, 4711));
        assert!(!is_stream("8:4711", 8, 4712) && !is_stream("8", 8, 4711) && !is_stream("", 0, 0));
    }
}
