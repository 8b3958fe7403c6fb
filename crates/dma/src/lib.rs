//! DMA memory: regions, addresses, rings, and the memory barriers between host and device.
//!
//! ```text
//!   Mapping      one mmap: private or memfd, ordinary or huge pages
//!      │
//!   RegionTable  table of mappings; resolves and checks a Segment { region, offset, len }
//!      │
//!   DevicePool   memory that one device may access: page runs to allocate, I/O virtual addresses
//!      ├─ HostSubmissionRing, HostCompletionRing     driver side           (tenmil_base::Dma)
//!      └─ SharedHostMemory, SharedEntries            controller side       (tenmil_base::HostMemory)
//! ```
//!
//! # Unsafe
//!
//! This crate contains unsafe code. Its safe interface guarantees:
//!
//! - Every access is checked against its region; a segment outside of it is rejected.
//! - A region stays mapped as long as any handle to its [`RegionTable`] exists, and every ring holds one.
//!   Nothing is unmapped while it could still be accessed. A dropped [`Region`] returns its pages, but
//!   not its addresses, and its number never refers to other memory. Memory of the program
//!   ([`RegionTable::add_program_memory`]) stays mapped until its region is dropped, as the program promises.
//! - Memory of another process is mapped only if it exists, and its later loss does not end this process:
//!   see [`ForeignRegion`].
//! - No reference into a region is ever formed. A device, another thread or a virtual machine may write
//!   it at any time; bytes are moved through raw pointers, ring words through atomics.

mod barrier;
mod command_store;
mod completion_order;
mod device_pool;
mod host_rings;
mod iova_allocator;
mod mapped_regions;
mod memory_mapping;
mod nontemporal_copy;
mod page_allocator;
mod region_table;
mod revocation;
mod shared_host_memory;
mod sigbus_guard;

/// Atomics and fences used by `barrier` and `completion_order`; the model of the rings substitutes a
/// model checker's.
use core::sync::atomic as sync;

pub use barrier::DeviceKind;
pub use command_store::{CommandStore, UnsupportedStore};
pub use device_pool::{DevicePool, DeviceThreadRegistration};
pub use host_rings::{HostCompletionRing, HostSubmissionRing};
pub use iova_allocator::IovaAllocator;
pub use memory_mapping::{MappingError, MemoryBacking, MemoryMapping};
pub use nontemporal_copy::prefetch_value;
pub use region_table::{
    FileRange, ForeignMapError, ForeignRegion, KernelBufferSlice, KernelBufferSource, Region,
    RegionError, RegionTable, RegionTableFull, UnmapListener,
};
pub use shared_host_memory::{SharedHostMemory, SharedRingEntries};
