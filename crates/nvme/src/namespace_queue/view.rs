//! A namespace as its queues need to know it: plain numbers out of Identify data.

use base::{Durability, Limits, Support};

use crate::data_pointer::SglSupport;

/// What a queue knows about the namespace it serves and the controller behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceView {
    /// Namespace identifier.
    pub nsid: u32,
    /// Bytes in a logical block; a power of two.
    pub block_size: u32,
    /// Blocks in the namespace (NSZE).
    pub block_count: u64,
    /// Where the metadata of a block is.
    pub metadata: Metadata,
    /// What the controller does about protection information.
    pub protection: ProtectionChecks,
    /// Bytes in the largest data transfer (MDTS). Zero means no limit.
    pub transfer_bytes_max: u32,
    /// Commands should not cross multiples of this many blocks (NOIOB). Zero means no boundary.
    pub optimal_boundary_blocks: u32,
    /// Blocks that are written all or not at all when the power fails (NAWUPF or AWUPF).
    pub atomic_write_blocks: u32,
    /// What an answered write is worth (VWC).
    pub durability: Durability,
    /// Which operations there are (ONCS).
    pub support: Support,
    /// Whether data pointers may be SGLs (SGLS).
    pub sgl: SglSupport,
    /// The memory page size (CC.MPS).
    pub page_bytes: u32,
    /// What single commands of each kind are limited to.
    pub blocks_max: BlocksMax,
}

/// How many blocks one command may name, beyond what its fields have room for. Zero means that the
/// controller reports no limit.
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
    /// A fused Compare and Write (NACWU or ACWU, FUSES); here zero means that there is none.
    pub compare_and_write: u32,
}

/// Where the metadata of a block is (Identify Namespace, FLBAS, NVM 1.1 §4.1.5.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metadata {
    /// There is none, or the controller keeps it to itself (PRACT with eight bytes of it).
    None,
    /// In a buffer of its own, this many bytes per block.
    Separate(u16),
    /// Behind the data of each block, this many bytes: the segments of a request hold both.
    Interleaved(u16),
}

/// What goes into the protection information fields of every command that moves blocks
/// (NVM 1.1 §5.3).
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

/// The largest request that is taken: it is split, and its parts need not fit anything at once.
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
    /// Bytes of data segments that go with a block.
    pub(crate) fn block_bytes(&self) -> u32 {
        match self.metadata {
            Metadata::Interleaved(bytes) => self.block_size + u32::from(bytes),
            _ => self.block_size,
        }
    }

    /// Bytes of metadata segments that go with a block.
    pub(crate) fn metadata_bytes(&self) -> u16 {
        match self.metadata {
            Metadata::Separate(bytes) => bytes,
            _ => 0,
        }
    }

    /// What a queue over this namespace can do.
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
            support: self.support,
        }
    }
}
