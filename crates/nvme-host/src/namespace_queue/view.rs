//! Namespace view for its queues: plain numbers derived from Identify data.

use tenmil_base::{Durability, Limits, OperationSet};

use crate::data_pointer::SglSupport;

/// Properties of a namespace and its controller, as needed by a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceView {
    /// Namespace identifier.
    pub nsid: u32,
    /// Logical block size in bytes; a power of two.
    pub block_size: u32,
    /// Number of blocks (NSZE).
    pub block_count: u64,
    /// Location of a block's metadata.
    pub metadata: Metadata,
    /// Handling of protection information by the controller.
    pub protection: ProtectionChecks,
    /// Maximum data transfer in bytes (MDTS). Zero means no limit.
    pub transfer_bytes_max: u32,
    /// Commands should not cross multiples of this many blocks (NOIOB). Zero means no boundary.
    pub optimal_boundary_blocks: u32,
    /// Largest atomic write in blocks with respect to power loss (NAWUPF or AWUPF).
    pub atomic_write_blocks: u32,
    /// Durability of a completed write (VWC).
    pub durability: Durability,
    /// Supported operations (ONCS).
    pub support: OperationSet,
    /// Whether data pointers may be SGLs (SGLS).
    pub sgl: SglSupport,
    /// Memory page size (CC.MPS).
    pub page_bytes: u32,
    /// Limits of single commands of each kind.
    pub blocks_max: BlocksMax,
}

/// Maximum blocks of one command, apart from the width of its fields. Zero means that the controller
/// reports no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlocksMax {
    /// Write Zeroes (WZSL).
    pub write_zeroes: u32,
    /// Verify (VSL).
    pub verify: u32,
    /// Write Uncorrectable (WUSL).
    pub write_uncorrectable: u32,
    /// One range of Dataset Management (DMRSL).
    pub deallocate: u32,
    /// One source range of Copy (MSSRL).
    pub copy: u32,
    /// Fused Compare and Write (NACWU or ACWU, FUSES); here zero means not supported.
    pub compare_and_write: u32,
}

/// Location of a block's metadata (Identify Namespace, FLBAS, NVM 1.1 §4.1.5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metadata {
    /// No metadata, or metadata handled by the controller (PRACT with eight bytes of metadata).
    None,
    /// In a separate buffer, this many bytes per block.
    Separate(u16),
    /// After the data of each block, this many bytes: the segments of a request contain both.
    Interleaved(u16),
}

/// Protection information fields of every command with a block range (NVM 1.1 §5.3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProtectionChecks {
    /// PRACT: the controller inserts and strips it.
    pub action: bool,
    /// PRCHK bit 2: check the guard.
    pub check_guard: bool,
    /// PRCHK bit 1: check the application tag.
    pub check_application: bool,
    /// PRCHK bit 0: check the reference tag.
    pub check_reference: bool,
    /// The reference tag of a block is the low half of its number (types 1 and 2).
    pub reference_is_lba: bool,
}

/// Maximum request size. Larger than any command, because requests are split.
const REQUEST_BYTES_MAX: u32 = 1 << 30;

impl ProtectionChecks {
    /// PRINFO, four bits (NVM 1.1 §3.3.4).
    pub(crate) const fn prinfo(self) -> u32 {
        (self.action as u32) << 3
            | (self.check_guard as u32) << 2
            | (self.check_application as u32) << 1
            | self.check_reference as u32
    }
}

impl NamespaceView {
    /// Bytes in data segments per block.
    pub(crate) fn block_bytes(&self) -> u32 {
        match self.metadata {
            Metadata::Interleaved(bytes) => self.block_size + u32::from(bytes),
            _ => self.block_size,
        }
    }

    /// Bytes in metadata segments per block.
    pub(crate) fn metadata_bytes(&self) -> u16 {
        match self.metadata {
            Metadata::Separate(bytes) => bytes,
            _ => 0,
        }
    }

    /// Limits of a queue for this namespace.
    pub(crate) fn limits(&self, depth: u32, segments_max: u16) -> Limits {
        Limits {
            block_size: self.block_size,
            metadata_size: self.metadata_bytes(),
            block_count: self.block_count,
            request_blocks_max: REQUEST_BYTES_MAX >> self.block_size.trailing_zeros(),
            segments_max,
            optimal_boundary_blocks: self.optimal_boundary_blocks,
            atomic_write_blocks: self.atomic_write_blocks,
            depth_max: depth,
            durability: self.durability,
            operations: self.support,
        }
    }
}
