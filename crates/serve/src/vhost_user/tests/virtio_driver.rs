//! Driver side of a ring, in any memory. `crates/cli/tests/program/vhost_user.rs` includes it.

use tenmil_base::{Memory, RegionId, Segment};

/// Driver of one queue, in the memory of a guest.
#[derive(Debug)]
pub(super) struct VirtioBlkDriver<M> {
    pub(super) memory: M,
    pub(super) region: RegionId,
    /// Offset of its ring in memory.
    pub(super) base: u64,
    pub(super) next: u16,
    pub(super) used: u16,
    /// Available index at the time of the last kick decision.
    thought_of: u16,
    pub(super) uses_tables: bool,
}

/// Address of the memory in the guest, and in the front end.
pub(super) const GUEST: u64 = 0x4000_0000;
pub(super) const USER: u64 = 0x7000_0000_0000;
pub(super) const MEMORY_BYTES: u64 = 1 << 20;

/// Entries of every ring.
pub(super) const SIZE: u16 = 32;
/// Offsets of the parts of a queue.
pub(super) const AVAILABLE: u64 = 0x1000;
pub(super) const USED: u64 = 0x2000;
/// Request headers and status bytes.
const HEADERS: u64 = 0x3000;
/// Indirect tables of 8 descriptors each.
const TABLES: u64 = 0x4000;
pub(super) const QUEUE_BYTES: u64 = 0x8000;
/// Data of requests: a page per head and queue, from this offset on.
pub(super) const DATA: u64 = 0x4_0000;

pub(super) const NEXT: u16 = 1;
pub(super) const WRITE: u16 = 2;
pub(super) const INDIRECT: u16 = 4;

/// Request; each head uses three descriptors.
#[derive(Clone, Copy, Debug)]
pub(super) struct DriverRequest {
    pub(super) kind: u32,
    pub(super) sector: u64,
    /// Length of the data, and whether the device writes them.
    pub(super) len_bytes: u32,
    pub(super) is_read: bool,
}

impl<M: Memory> VirtioBlkDriver<M> {
    pub(super) fn new(memory: M, region: RegionId, queue: u64) -> Self {
        let base = queue * QUEUE_BYTES;
        Self { memory, region, base, next: 0, used: 0, thought_of: 0, uses_tables: false }
    }

    pub(super) fn store_bytes(&self, at: u64, bytes: &[u8]) {
        let len_bytes = u32::try_from(bytes.len()).unwrap();
        let place = Segment { region: self.region, offset: at, len_bytes };
        self.memory.store(place, bytes).unwrap();
    }

    pub(super) fn load_bytes<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        let len_bytes = u32::try_from(N).unwrap();
        let place = Segment { region: self.region, offset: at, len_bytes };
        self.memory.load(place, &mut bytes).unwrap();
        bytes
    }

    /// Offset of the data of a head.
    pub(super) fn data_offset(&self, head: u16) -> u64 {
        DATA + (self.base / QUEUE_BYTES * u64::from(SIZE) + u64::from(head)) * 4096
    }

    pub(super) fn write_descriptor(
        &self,
        at: u64,
        address: u64,
        len_bytes: u32,
        flags: u16,
        next: u16,
    ) {
        let tail = [flags, next].map(u16::to_le_bytes).concat();
        let bytes = [&address.to_le_bytes()[..], &len_bytes.to_le_bytes(), &tail].concat();
        self.store_bytes(at, &bytes);
    }

    /// Writes a chain that begins at `head`, a multiple of 3, and makes it available.
    pub(super) fn submit_request(&mut self, head: u16, asked: DriverRequest) {
        let header = self.base + HEADERS + u64::from(head) * 32;
        let kind = [&asked.kind.to_le_bytes()[..], &[0; 4], &asked.sector.to_le_bytes()].concat();
        self.store_bytes(header, &kind);
        self.store_bytes(header + 16, &[0xee]);
        let (first, table) =
            (self.base + u64::from(head) * 16, self.base + TABLES + u64::from(head) * 128);
        let (at, from) = if self.uses_tables { (table, 0) } else { (first, head) };
        let way = if asked.is_read { WRITE } else { 0 };
        self.write_descriptor(at, GUEST + header, 16, NEXT, from + 1);
        self.write_descriptor(
            at + 16,
            GUEST + self.data_offset(head),
            asked.len_bytes,
            NEXT | way,
            from + 2,
        );
        self.write_descriptor(at + 32, GUEST + header + 16, 1, WRITE, 0);
        if asked.len_bytes == 0 {
            self.write_descriptor(at, GUEST + header, 16, NEXT, from + 2);
        }
        if self.uses_tables {
            self.write_descriptor(first, GUEST + table, 48, INDIRECT, 0);
        }
        self.publish_chain(head);
    }

    /// Makes a head available.
    pub(super) fn publish_chain(&mut self, head: u16) {
        let slot = self.base + AVAILABLE + 4 + 2 * u64::from(self.next % SIZE);
        self.store_bytes(slot, &head.to_le_bytes());
        self.next = self.next.wrapping_add(1);
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        self.store_bytes(self.base + AVAILABLE + 2, &self.next.to_le_bytes());
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    }

    /// Next used head, and the number of bytes written.
    pub(super) fn take_used(&mut self) -> Option<(u16, u32)> {
        let index = u16::from_le_bytes(self.load_bytes(self.base + USED + 2));
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        if index == self.used {
            return None;
        }
        let slot = self.base + USED + 4 + 8 * u64::from(self.used % SIZE);
        let entry = u64::from_le_bytes(self.load_bytes(slot));
        self.used = self.used.wrapping_add(1);
        Some((u16::try_from(entry & 0xffff).unwrap(), u32::try_from(entry >> 32).unwrap()))
    }

    /// Status of the request of a head.
    pub(super) fn request_status(&self, head: u16) -> u8 {
        let [status] = self.load_bytes(self.base + HEADERS + u64::from(head) * 32 + 16);
        status
    }

    /// Whether the device wants a kick for the heads made available since the last call.
    pub(super) fn wants_kick(&mut self, has_event_index: bool) -> bool {
        let before = std::mem::replace(&mut self.thought_of, self.next);
        if has_event_index {
            let at = self.base + USED + 4 + 8 * u64::from(SIZE);
            let event = u16::from_le_bytes(self.load_bytes(at));
            return self.next.wrapping_sub(event).wrapping_sub(1) < self.next.wrapping_sub(before);
        }
        self.load_bytes(self.base + USED) == [0_u8]
    }
}

/// Addresses of the descriptor table and of both rings of a queue.
pub(super) fn queue_addresses(queue: u64) -> [u64; 3] {
    let base = USER + queue * QUEUE_BYTES;
    [base, base + AVAILABLE, base + USED]
}

pub(super) fn write_request(sector: u64, len_bytes: u32) -> DriverRequest {
    DriverRequest { kind: 1, sector, len_bytes, is_read: false }
}

pub(super) fn read_request(sector: u64, len_bytes: u32) -> DriverRequest {
    DriverRequest { kind: 0, sector, len_bytes, is_read: true }
}

pub(super) fn flush_request() -> DriverRequest {
    DriverRequest { kind: 4, sector: 0, len_bytes: 0, is_read: false }
}
