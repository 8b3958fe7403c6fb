//! Memory that a device may touch: regions, addresses, rings, and the barrier between them.
//!
//! ```text
//!   Mapping      one mmap: private or memfd, ordinary or huge pages
//!      │
//!   Regions      a table of them; a Segment { region, offset, len } is resolved here, checked
//!      │
//!   DevicePool   what one device may reach: page runs to hand out, I/O virtual addresses
//!      ├─ HostSubmissionRing, HostCompletionRing     the driver's end      (base::Dma)
//!      └─ SharedHostMemory, SharedEntries            the controller's end  (base::HostMemory)
//! ```
//!
//! # Unsafe
//!
//! This crate is part of the machine wing. What its safe face promises:
//!
//! - Every access is checked against the region it names; a segment that lies outside is refused.
//! - A region stays mapped for as long as any handle to its [`Regions`] exists, and every ring holds
//!   one. Nothing is unmapped while somebody could still look at it. A [`Region`] that goes gives its
//!   pages back and not its addresses, and its number never stands for other memory.
//! - Memory of another process is mapped only if it is there, and losing it later ends nobody: see
//!   [`Adopted`].
//! - No reference into a region is ever formed. A device, another thread or a guest may write it at
//!   any time; bytes are moved by raw pointer, ring words by atomics.

mod address_space;
mod arena;
mod barrier;
mod command_store;
mod cut;
mod guard;
mod mapping;
mod order;
mod pool;
mod regions;
mod ring;
mod shared;
mod streaming;
mod windows;

/// What `barrier` and `order` take their words from: a model checker's, in the model of the rings.
use core::sync::atomic as sync;

pub use address_space::AddressSpace;
pub use barrier::DeviceKind;
pub use command_store::{CommandStore, StoreNotSupported};
pub use mapping::{Backing, Mapping, MappingError};
pub use pool::{Attachment, DevicePool};
pub use regions::{
    Adopted, FilePart, Lender, LentPart, NoRegion, NotAdopted, Region, Regions, TableFull, Withdraw,
};
pub use ring::{HostCompletionRing, HostSubmissionRing};
pub use shared::{SharedEntries, SharedHostMemory};
pub use streaming::prefetch;
