//! Recorder of NVMe/TCP PDUs.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use tenmil_base::{Instant, SendSlice};

use crate::run_history::{RecordScope, RunHistory};

/// Decodes the stream of one sender and records each PDU.
pub(crate) struct PduRecorder {
    history: Arc<Mutex<RunHistory>>,
    host: usize,
    /// Block ranges of the commands on this connection by command identifier, shared by both
    /// directions.
    commands: CommandRanges,
    from: String,
    to: String,
    /// Header bytes of the current PDU so far.
    header: Vec<u8>,
    /// Remaining bytes of the current PDU.
    rest: usize,
}

/// Block ranges of commands. Empty for commands without data.
pub(crate) type CommandRanges = Arc<Mutex<BTreeMap<u16, Range<u64>>>>;

/// Length of the common header (NVMe/TCP 1.1 §3.6.1).
const COMMON_BYTES: usize = 8;

impl PduRecorder {
    /// Creates a recorder for data from `from` to `to` on a connection of `host`.
    pub(crate) fn new(
        history: Arc<Mutex<RunHistory>>,
        (host, commands): (usize, CommandRanges),
        (from, to): (String, String),
    ) -> Self {
        Self { history, host, commands, from, to, header: Vec::new(), rest: 0 }
    }

    /// Records that the first `count` bytes of these segments were sent.
    pub(crate) fn record_sent(
        &mut self,
        now: Instant,
        headers: &[u8],
        stretches: &[SendSlice],
        count: usize,
    ) {
        let mut left = count;
        for stretch in stretches {
            let len = stretch.len_bytes().min(left);
            left -= len;
            match *stretch {
                SendSlice::Headers { at, .. } => {
                    self.parse_bytes(now, &headers[at as usize..][..len])
                }
                SendSlice::Memory(_) => self.rest = self.rest.saturating_sub(len),
            }
        }
    }

    fn parse_bytes(&mut self, now: Instant, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let skipped = self.rest.min(bytes.len());
            self.rest -= skipped;
            bytes = &bytes[skipped..];
            let wanted = match self.header.get(2) {
                Some(len) if self.header.len() >= COMMON_BYTES => usize::from(*len),
                _ => COMMON_BYTES,
            };
            let taken = wanted.saturating_sub(self.header.len()).min(bytes.len());
            self.header.extend(&bytes[..taken]);
            bytes = &bytes[taken..];
            let len = self.header.get(2).map_or(0, |len| usize::from(*len));
            if self.header.len() >= COMMON_BYTES.max(len) {
                self.record_pdu(now);
            }
        }
    }

    /// Records the PDU of a complete header.
    fn record_pdu(&mut self, now: Instant) {
        let header = PduHeader(std::mem::take(&mut self.header));
        self.rest = (header.u32_at(4) as usize).saturating_sub(header.0.len());
        let (cid, what) = match header.0[0] {
            0x00 => (None, "ICReq".to_owned()),
            0x01 => (None, "ICResp".to_owned()),
            0x02 => (None, "H2CTermReq".to_owned()),
            0x03 => (None, "C2HTermReq".to_owned()),
            0x04 => {
                let (cid, blocks, what) = header.decode_command();
                lock(&self.commands).insert(cid, blocks);
                (Some(cid), what)
            }
            0x05 => (Some(header.u16_at(20)), format!("status {:#06x}", header.u16_at(22) >> 1)),
            0x06 => (Some(header.u16_at(8)), header.describe_data_pdu("H2CData")),
            0x07 => (Some(header.u16_at(8)), header.describe_data_pdu("C2HData")),
            0x09 => (Some(header.u16_at(8)), header.describe_data_pdu("R2T")),
            other => (None, format!("unit of type {other:#04x}")),
        };
        let blocks = cid.and_then(|cid| lock(&self.commands).get(&cid).cloned());
        let scope =
            RecordScope { host: Some(self.host), disk: None, blocks: blocks.or(Some(0..0)) };
        let cid = cid.map_or(String::new(), |cid| format!("cid {cid} "));
        let text = format!("{} -> {}: {cid}{what}", self.from, self.to);
        lock(&self.history).add_pdu(now, scope, text);
    }
}

/// Header of a PDU.
struct PduHeader(Vec<u8>);

impl PduHeader {
    fn u32_at(&self, at: usize) -> u32 {
        let bytes = self.0.get(at..at + 4).and_then(|bytes| bytes.first_chunk());
        bytes.map_or(0, |bytes| u32::from_le_bytes(*bytes))
    }

    fn u16_at(&self, at: usize) -> u16 {
        let bytes = self.0.get(at..at + 2).and_then(|bytes| bytes.first_chunk());
        bytes.map_or(0, |bytes| u16::from_le_bytes(*bytes))
    }

    /// Describes a data PDU.
    fn describe_data_pdu(&self, name: &str) -> String {
        format!("{name} +{} {} bytes", self.u32_at(12), self.u32_at(16))
    }

    /// Decodes a command capsule, whose submission queue entry follows the common header: its
    /// identifier, its block range and a description.
    fn decode_command(&self) -> (u16, Range<u64>, String) {
        let dword = |index: usize| self.u32_at(COMMON_BYTES + 4 * index);
        let (opcode, cid) = (dword(0) & 0xff, self.u16_at(COMMON_BYTES + 2));
        let first = u64::from(dword(10)) | u64::from(dword(11)) << 32;
        let range = first..first + u64::from(dword(12) & 0xffff) + 1;
        let name = match opcode {
            0x01 => "write",
            0x02 => "read",
            0x7f => return (cid, 0..0, format!("fabrics type {:02x}h", dword(1) & 0xff)),
            0x00 => return (cid, 0..0, "flush or delete queue".to_owned()),
            0x38 => return (cid, 0..0, format!("reset of controller {}", dword(10) & 0xffff)),
            other => return (cid, 0..0, format!("opcode {other:02x}h")),
        };
        let text = format!("{name} {}..{} of namespace {}", range.start, range.end, dword(1));
        (cid, range, text)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
