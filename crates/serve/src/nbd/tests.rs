//! Client and server in this process, with or without a socket.

pub(super) mod client_messages;
mod protocol_violations;
mod server;
mod well_behaved_client;

use std::sync::Arc;

use tenmil_base::{
    BlockDevice, CompletionBatch, Durability, HoleReporting, Instant, IoChannel, Limits, Memory,
    Segment,
};
use tenmil_dma::{MemoryMapping, RegionTable};
use tenmil_drivers::RamDevice;
use tenmil_wire::nbd::ErrorCode;

use super::buffer_pool::{BufferPool, POOL_BYTES};
use super::connection_memory::MEMORY_BYTES;
use super::slow_query::block_status_extents;
use super::{Connection, Export, QueryKind};

/// Connection and its backend; the test moves all data between them.
struct TestConnection {
    connection: Connection,
    backend: Box<dyn IoChannel>,
    medium: RamDevice,
    export: Arc<Export>,
    regions: RegionTable,
    completions: CompletionBatch,
}

/// Block size of the device.
const BLOCK: u32 = 512;
/// Size of the device in bytes.
const SIZE: u64 = 64 << 20;

impl TestConnection {
    fn new() -> Self {
        Self::with_limits(false, |_| {})
    }

    fn with_limits(is_read_only: bool, change: impl FnOnce(&mut Limits)) -> Self {
        Self::from_export(is_read_only, |export| export, change)
    }

    /// Session whose client may resize the device.
    fn resizable() -> Self {
        Self::from_export(false, Export::with_resize_allowed, |_| {})
    }

    /// Session on a device that reports holes.
    fn with_holes(holes: HoleReporting) -> Self {
        Self::from_export(false, |export| export.with_hole_reporting(holes), |_| {})
    }

    fn from_export(
        is_read_only: bool,
        extend: impl FnOnce(Export) -> Export,
        change: impl FnOnce(&mut Limits),
    ) -> Self {
        let regions = RegionTable::new(4);
        let medium = RamDevice::new(&regions, BLOCK, SIZE / u64::from(BLOCK)).unwrap();
        let memory = MemoryMapping::with_small_pages(MEMORY_BYTES as usize).unwrap();
        let memory = regions.add_mapping(memory).unwrap();
        let pool = Arc::new(BufferPool::new(&regions, POOL_BYTES).unwrap());
        // The RAM device is not durable; it claims a volatile cache so that flush and FUA are
        // tested.
        let mut limits = Limits { durability: Durability::VolatileCache, ..medium.limits() };
        change(&mut limits);
        let export = Export::new("disk", "a disk", limits, is_read_only).unwrap();
        let export = Arc::new(extend(export));
        Self {
            connection: Connection::new(Arc::clone(&export), regions.clone(), memory, pool),
            backend: medium.channel().unwrap(),
            medium,
            export,
            regions,
            completions: CompletionBatch::with_capacity(7),
        }
    }

    /// Gives the connection as many bytes as it accepts; returns their number.
    fn receive_bytes(&mut self, bytes: &[u8]) -> usize {
        let mut left = bytes;
        for segment in self.connection.receive_segments() {
            let count = left.len().min(segment.len_bytes as usize);
            let (part, rest) = left.split_at(count);
            let to = Segment { len_bytes: u32::try_from(count).unwrap(), ..*segment };
            self.regions.store(to, part).unwrap();
            left = rest;
        }
        let count = bytes.len() - left.len();
        self.connection.record_received(count);
        count
    }

    /// Takes at most `most` bytes of the output of the connection.
    fn take_output(&mut self, most: usize) -> Vec<u8> {
        let mut taken = Vec::new();
        for segment in self.connection.unsent_segments() {
            let count = (most - taken.len()).min(segment.len_bytes as usize);
            let begin = taken.len();
            taken.resize(begin + count, 0);
            let from = Segment { len_bytes: u32::try_from(count).unwrap(), ..*segment };
            self.regions.load(from, &mut taken[begin..]).unwrap();
        }
        self.connection.record_sent(taken.len());
        taken
    }

    /// Does all work except moving bytes; returns whether there was any.
    fn run_until_idle(&mut self) -> bool {
        let now = Instant::default();
        let mut count = self.connection.step();
        let (requests, segments) = self.connection.pending_requests();
        let taken = self.backend.submit(now, requests, segments);
        self.connection.record_submitted(taken);
        count += taken;
        count += self.backend.poll(now, &mut self.completions);
        self.completions
            .drain()
            .for_each(|completion| self.connection.handle_completion(completion));
        while let Some(query) = self.connection.next_slow_query() {
            match query.kind {
                QueryKind::Size { bytes } => {
                    let done = if bytes > SIZE { Err(ErrorCode::ENOSPC) } else { Ok(()) };
                    self.export.set_block_count(bytes.min(SIZE) / u64::from(BLOCK));
                    self.connection.complete_resize(query.slot, done);
                }
                kind => {
                    let extents = block_status_extents(&self.medium, kind);
                    self.connection.complete_block_status(query.slot, &extents);
                }
            }
            count += 1;
        }
        count > 0
    }

    /// Sends `bytes` in fragments of `piece` bytes and returns all output.
    fn exchange_bytes(&mut self, bytes: &[u8], piece: usize) -> Vec<u8> {
        let (mut left, mut back) = (bytes, Vec::new());
        loop {
            let given = self.receive_bytes(&left[..piece.min(left.len())]);
            left = &left[given..];
            let mut worked = given > 0;
            while self.run_until_idle() || !self.connection.unsent_segments().is_empty() {
                back.extend(self.take_output(usize::MAX));
                worked = true;
            }
            if !worked {
                assert!(left.is_empty() || self.connection.is_closing(), "it takes no more");
                return back;
            }
        }
    }
}
