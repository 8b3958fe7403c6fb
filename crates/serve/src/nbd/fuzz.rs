//! Fuzzer of the NBD server: arbitrary client bytes, over a device that does nothing.

use std::sync::Arc;

use tenmil_base::{
    Durability, IoCompletion, IoStatus, Limits, Memory, Operation, OperationSet, Segment,
};
use tenmil_dma::{MemoryMapping, RegionTable};
use tenmil_wire::nbd::{BlockStatusExtent, ExtentFlags};

use super::buffer_pool::{BufferPool, POOL_BYTES};
use super::connection::Connection;
use super::connection_memory::MEMORY_BYTES;
use super::export::Export;
use super::transmission::QueryKind;

/// Feeds `bytes` to a connection as the client's stream. The first byte selects the fragment size
/// and the status of the device's completions.
///
/// # Panics
///
/// If an invariant is violated: a bug of this crate, whatever the bytes are.
pub fn fuzz_nbd_connection(bytes: &[u8]) {
    let Some((how, mut stream)) = bytes.split_first() else { return };
    let (regions, memory) = connection_memory();
    let export = Export::new("fuzz", "a disk", limits(), how & 1 != 0).expect("it can be served");
    let pool = Arc::new(BufferPool::new(&regions, POOL_BYTES).expect("there is memory"));
    let mut connection = Connection::new(Arc::new(export), regions.clone(), memory, pool);
    let piece = usize::from(how >> 4).pow(2) + 1;
    let status = if how & 2 == 0 { IoStatus::SUCCESS } else { IoStatus::UNRECOVERED_READ };
    loop {
        let before = stream.len();
        let count = feed_bytes(&mut connection, &regions, &stream[..piece.min(stream.len())]);
        stream = &stream[count..];
        if stream.is_empty() {
            connection.handle_stream_end();
        }
        let worked = run_connection(&mut connection, status);
        if connection.is_finished() {
            return;
        }
        assert!(worked || stream.len() < before, "{connection:?} is stuck");
    }
}

/// Stores as many of `bytes` as the connection has space for; returns their number.
fn feed_bytes(connection: &mut Connection, regions: &RegionTable, bytes: &[u8]) -> usize {
    let mut left = bytes;
    for segment in connection.receive_segments() {
        let count = left.len().min(segment.len_bytes as usize);
        let (part, rest) = left.split_at(count);
        let to = Segment { len_bytes: u32::try_from(count).unwrap_or(0), ..*segment };
        regions.store(to, part).expect("what is named exists");
        left = rest;
    }
    let count = bytes.len() - left.len();
    connection.record_received(count);
    count
}

/// Runs the connection until nothing more happens. Returns whether it did anything.
fn run_connection(connection: &mut Connection, status: IoStatus) -> bool {
    let mut worked = false;
    loop {
        let mut count = connection.step();
        let tokens: Vec<u64> =
            connection.pending_requests().0.iter().map(|one| one.token).collect();
        connection.record_submitted(tokens.len());
        for token in tokens {
            connection.handle_completion(IoCompletion { token, status, result: 0 });
            count += 1;
        }
        while let Some(query) = connection.next_slow_query() {
            match query.kind {
                QueryKind::Extents { len_bytes, .. } => {
                    let all = BlockStatusExtent { len_bytes, flags: ExtentFlags::HOLE };
                    connection.complete_block_status(query.slot, &[all]);
                }
                QueryKind::Size { .. } => connection.complete_resize(query.slot, Ok(())),
            }
            count += 1;
        }
        let unsent: usize =
            connection.unsent_segments().iter().map(|part| part.len_bytes as usize).sum();
        connection.record_sent(unsent);
        if count + unsent == 0 {
            return worked;
        }
        worked = true;
    }
}

fn connection_memory() -> (RegionTable, Segment) {
    let regions = RegionTable::new(2);
    let mapping = MemoryMapping::with_small_pages(MEMORY_BYTES as usize).expect("there is memory");
    let memory = regions.add_mapping(mapping).expect("there is a place");
    (regions, memory)
}

fn limits() -> Limits {
    Limits {
        block_size: 512,
        metadata_size: 0,
        block_count: 1 << 20,
        request_blocks_max: 128,
        segments_max: 8,
        optimal_boundary_blocks: 0,
        atomic_write_blocks: 1,
        depth_max: 64,
        durability: Durability::VolatileCache,
        operations: OperationSet::from_operations(&Operation::ALL),
    }
}
