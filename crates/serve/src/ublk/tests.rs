//! Tests with a simulated kernel, which is not always well-behaved.

mod fake_kernel;
mod invalid_requests;
mod queue_poller;
mod tag_table;
mod takeover;
mod zero_copy;

use tenmil_base::{Durability, Limits, Operation, OperationSet, Random};
use tenmil_wire::ublk::{IoDescriptor, IoFlags, IoOp};

use super::disk::UblkDisk;

/// Block size of the device, and its number of blocks.
const BLOCK: u32 = 512;
const BLOCKS: u64 = 4096;

fn device_limits() -> Limits {
    Limits {
        block_size: BLOCK,
        metadata_size: 0,
        block_count: BLOCKS,
        request_blocks_max: 64,
        segments_max: 1,
        optimal_boundary_blocks: 0,
        atomic_write_blocks: 1,
        depth_max: 32,
        durability: Durability::VolatileCache,
        operations: OperationSet::from_operations(&[
            Operation::Read,
            Operation::Write,
            Operation::Flush,
            Operation::Deallocate,
            Operation::WriteZeroes,
        ]),
    }
}

fn test_disk() -> UblkDisk {
    UblkDisk::new(device_limits(), false).unwrap()
}

fn io_descriptor(op: IoOp, first_sector: u64, sectors: u32) -> IoDescriptor {
    IoDescriptor { op, flags: IoFlags::NONE, sectors, first_sector }
}

fn random_byte(random: &mut Random) -> u8 {
    u8::try_from(random.below(256)).unwrap()
}
