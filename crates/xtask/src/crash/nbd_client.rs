//! NBD client over a Unix socket (NBD protocol, doc/proto.md): simple replies, several requests in
//! flight, replies in any order.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

const OPTION_MAGIC: u64 = 0x4948_4156_454F_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const OPTION_GO: u32 = 7;
const REPLY_ACK: u32 = 1;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const REPLY_MAGIC: u32 = 0x6744_6698;
const REPLY_BYTES: usize = 16;

/// Request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NbdCommand {
    Read {
        offset: u64,
        len: u32,
    },
    Write {
        offset: u64,
        bytes: Vec<u8>,
        forced: bool,
    },
    /// `keep` is NBD_CMD_FLAG_NO_HOLE: the blocks stay allocated.
    WriteZeroes {
        offset: u64,
        len: u32,
        forced: bool,
        keep: bool,
    },
    Flush,
}

/// Reply: the data of a read, or the error.
pub(super) type NbdReply = Result<Vec<u8>, u32>;

/// NBD connection.
#[derive(Debug)]
pub(super) struct NbdClient {
    stream: UnixStream,
    inbox: Vec<u8>,
    sent: u64,
    /// Reply length in bytes of each request in flight.
    waiting: BTreeMap<u64, usize>,
}

/// The connection was closed, or the server violated the NBD protocol.
#[derive(Debug)]
pub(super) struct ConnectionClosed(pub(super) String);

impl From<std::io::Error> for ConnectionClosed {
    fn from(why: std::io::Error) -> Self {
        Self(why.to_string())
    }
}

impl NbdClient {
    pub(super) fn connect(path: &Path) -> Result<Self, ConnectionClosed> {
        let mut stream = UnixStream::connect(path)?;
        stream.set_read_timeout(Some(Duration::from_secs(10)))?;
        stream.set_write_timeout(Some(Duration::from_secs(60)))?;
        let mut greeting = [0; 18];
        stream.read_exact(&mut greeting)?;
        // Fixed newstyle and no zeroes; NBD_OPT_GO for the default export, with no information
        // requests.
        let mut hello = 3_u32.to_be_bytes().to_vec();
        hello.extend(OPTION_MAGIC.to_be_bytes());
        hello.extend(OPTION_GO.to_be_bytes());
        hello.extend(6_u32.to_be_bytes());
        hello.extend([0; 6]);
        stream.write_all(&hello)?;
        loop {
            let mut header = [0; 20];
            stream.read_exact(&mut header)?;
            let kind = be_u32(&header[12..]);
            let mut body = vec![0; be_u32(&header[16..]) as usize];
            stream.read_exact(&mut body)?;
            if be_u64(&header) != OPTION_REPLY_MAGIC || kind & 1 << 31 != 0 {
                let said = String::from_utf8_lossy(&body).into_owned();
                return Err(ConnectionClosed(format!(
                    "NBD_OPT_GO is answered with {kind:#x}: {said}"
                )));
            }
            if kind == REPLY_ACK {
                break;
            }
        }
        Ok(Self { stream, inbox: Vec::new(), sent: 0, waiting: BTreeMap::new() })
    }

    pub(super) fn submit(&mut self, command: &NbdCommand) -> Result<u64, ConnectionClosed> {
        let (kind, flags, offset, len) = match command {
            NbdCommand::Read { offset, len } => (0_u16, 0_u16, *offset, *len),
            NbdCommand::Write { offset, bytes, forced } => {
                (1, (*forced).into(), *offset, u32::try_from(bytes.len()).unwrap_or(0))
            }
            NbdCommand::WriteZeroes { offset, len, forced, keep } => {
                (6, u16::from(*forced) | u16::from(*keep) << 1, *offset, *len)
            }
            NbdCommand::Flush => (3, 0, 0, 0),
        };
        self.sent += 1;
        let mut bytes = REQUEST_MAGIC.to_be_bytes().to_vec();
        bytes.extend(flags.to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend(self.sent.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        bytes.extend(len.to_be_bytes());
        if let NbdCommand::Write { bytes: data, .. } = command {
            bytes.extend(data);
        }
        self.stream.write_all(&bytes)?;
        let answered = if matches!(command, NbdCommand::Read { .. }) { len as usize } else { 0 };
        self.waiting.insert(self.sent, answered);
        Ok(self.sent)
    }

    /// The next reply, if one arrives within `most`.
    pub(super) fn next_reply(
        &mut self,
        most: Duration,
    ) -> Result<Option<(u64, NbdReply)>, ConnectionClosed> {
        loop {
            if let Some(answer) = self.parse_reply()? {
                return Ok(Some(answer));
            }
            self.stream.set_read_timeout(Some(most.max(Duration::from_millis(1))))?;
            let mut bytes = vec![0; 256 << 10];
            match self.stream.read(&mut bytes) {
                Ok(0) => {
                    return Err(ConnectionClosed("the server has closed the connection".into()));
                }
                Ok(len) => self.inbox.extend(&bytes[..len]),
                Err(why) if matches!(why.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    return Ok(None);
                }
                Err(why) if why.kind() == ErrorKind::Interrupted => {}
                Err(why) => return Err(why.into()),
            }
        }
    }

    fn parse_reply(&mut self) -> Result<Option<(u64, NbdReply)>, ConnectionClosed> {
        let Some(header) = self.inbox.get(..REPLY_BYTES) else { return Ok(None) };
        let (error, handle) = (be_u32(&header[4..]), be_u64(&header[8..]));
        let Some(len) =
            self.waiting.get(&handle).copied().filter(|_| be_u32(header) == REPLY_MAGIC)
        else {
            return Err(ConnectionClosed(format!(
                "an answer to nothing that was asked: {header:02x?}"
            )));
        };
        let end = REPLY_BYTES + if error == 0 { len } else { 0 };
        if self.inbox.len() < end {
            return Ok(None);
        }
        let data = self.inbox[REPLY_BYTES..end].to_vec();
        self.inbox.drain(..end);
        self.waiting.remove(&handle);
        Ok(Some((handle, if error == 0 { Ok(data) } else { Err(error) })))
    }
}

fn be_u32(bytes: &[u8]) -> u32 {
    bytes.first_chunk().map_or(0, |part| u32::from_be_bytes(*part))
}

fn be_u64(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map_or(0, |part| u64::from_be_bytes(*part))
}
