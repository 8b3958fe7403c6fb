//! Requests to a pool, their responses, and the actions that the pool requires from the device.

use tenmil_base::IoStatus;

use crate::device_table::DeviceTable;
use crate::format::Block;
use crate::ownership::SuperblockSlots;
use crate::parent::ParentInfo;
use crate::space_usage::SpaceUsage;
use crate::volume_catalog::{VolumeInfo, VolumeOp};

/// Request to a pool. Blocks are 4 KiB.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PoolRequest {
    /// Operation on a whole volume.
    Change(VolumeOp),
    /// Information about the volume with this name.
    Find(String),
    /// Information about all volumes, in the order of their creation.
    List,
    /// Space usage of the volume with this name, including the part that it shares. Reads the nodes of
    /// its trees that are exclusive to it, and the parts of the space map that count its data.
    SpaceUsage(String),
    /// Space usage of the pool.
    Usage,
    /// Makes a volume thick: reserves space for all of its blocks. The clusters that it lacks remain to
    /// be allocated. Completed once that is durable, or at once if it is so already.
    ReserveThick(String),
    /// Moves blocks of a thick volume into exclusive clusters: the first stretch, from a block on, that
    /// is not in exclusive clusters. The requester moves the data to be copied, first into its buffer and
    /// then from there.
    MakeExclusive {
        /// Number of the volume.
        volume: u64,
        /// First block.
        block: u64,
        /// Number of blocks that fit into the requester's buffer: at least one cluster.
        blocks: u64,
    },
    /// The volume's parent, read where nothing is mapped.
    Parent {
        /// Number of the volume.
        volume: u64,
    },
    /// Copies blocks that a volume still reads from its parent: the last ones. The requester moves them,
    /// first into its buffer and then from there.
    CopyFromParent {
        /// Number of the volume.
        volume: u64,
        /// Number of blocks that fit into the requester's buffer: at least one.
        blocks: u64,
    },
    /// Number of blocks of a volume, from a block on, in the same state, or at least some of them: mapped
    /// in one run, all read from its parent, or all reading as zeroes.
    Extent {
        /// Number of the volume.
        volume: u64,
        /// First block.
        block: u64,
    },
    /// The first blocks of a volume, from a block on, that differ from those of another volume, according
    /// to their maps. A block that was written in between counts as different, even if its contents are
    /// the same.
    Difference {
        /// Number of the volume.
        volume: u64,
        /// Number of the other volume; zero for one that was never written.
        base: u64,
        /// First block.
        block: u64,
    },
    /// Reads blocks of a volume.
    Read {
        /// Number of the volume.
        volume: u64,
        /// First block.
        block: u64,
        /// Number of blocks.
        blocks: u64,
    },
    /// Writes blocks of a volume.
    Write {
        /// Number of the volume.
        volume: u64,
        /// First block.
        block: u64,
        /// Number of blocks.
        blocks: u64,
    },
    /// Unmaps blocks of a volume: they read as zeroes and use no space, unless it is thick.
    Trim {
        /// Number of the volume.
        volume: u64,
        /// First block.
        block: u64,
        /// Number of blocks.
        blocks: u64,
    },
    /// Makes everything completed before durable.
    Flush,
    /// Fails as this change would, as far as that is known without making it: the pool is not claimed, and
    /// nothing is written.
    MayChange(VolumeOp),
    /// Claims the pool for the owner that opened it, before any change: no other instance writes to it
    /// then.
    Claim,
    /// Releases ownership of the pool, once everything completed is durable. The pool rejects changes
    /// afterwards.
    Release,
    /// Replaces the devices of the pool: the existing ones, possibly renamed, and those appended to them.
    /// New devices already have durable labels. Completed once all superblocks on the first device
    /// contain the new devices, or at once if they do already.
    Grow(DeviceTable),
}

impl PoolRequest {
    /// Whether it writes blocks of a volume to the device.
    pub(super) const fn writes_blocks(&self) -> bool {
        matches!(
            self,
            Self::Write { .. } | Self::MakeExclusive { .. } | Self::CopyFromParent { .. }
        )
    }
}

/// Successful result of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PoolResponse {
    /// Done.
    Done,
    /// The volume in its new state.
    Volume(VolumeInfo),
    /// All volumes.
    Volumes(Vec<VolumeInfo>),
    /// Space usage of a volume.
    Account(SpaceUsage),
    /// All blocks before this one are in exclusive clusters of the volume, or were a moment ago. It is
    /// the end of the volume once all blocks have been processed.
    Owned(u64),
    /// Parent of the volume, or `None` if unmapped blocks read as zeroes.
    Parent(Option<ParentInfo>),
    /// All blocks that the volume still reads from its parent are before this one. If it is zero, the
    /// volume has no parent any more.
    Filled(u64),
    /// Blocks in the same state.
    Extent {
        /// Number of blocks; zero only at or after the end of the volume.
        blocks: u64,
        /// Block of the pool with the first one, if they are mapped.
        at: Option<u64>,
        /// Whether they are read from the parent. Blocks that are neither mapped nor the parent's read as
        /// zeroes.
        is_parents: bool,
    },
    /// Blocks that differ.
    Changed {
        /// First block; the end of the volume if none differ.
        block: u64,
        /// Number of blocks, or at least some of them. Zero only if none differ.
        blocks: u64,
        /// Whether they are mapped.
        is_mapped: bool,
        /// Whether they are read from the parent. Blocks that are neither mapped nor the parent's read as
        /// zeroes now.
        is_parents: bool,
    },
    /// Space usage of the pool.
    Usage(PoolUsage),
}

/// Space usage of a pool, in 4 KiB blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolUsage {
    /// Blocks of the whole pool, including superblocks.
    pub blocks: u64,
    /// Blocks used by data and metadata, as of the last commit. Each counts once, however often it is
    /// shared.
    pub used: u64,
    /// Blocks that can be allocated now.
    pub free: u64,
    /// Reserve for deletions and commits, never used for data.
    pub kept: u64,
    /// Reserve for thick volumes: for their maps in the worst case, and for clusters not yet allocated.
    pub provisioned: u64,
    /// Number of volumes, including snapshots.
    pub volumes: u64,
    /// Fill levels, in percent of the data capacity, at which a notice is issued; zero is none.
    pub thresholds: [u8; 2],
}

/// Contiguous run of blocks of a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VolumeRun {
    /// First block.
    pub block: u64,
    /// Number of blocks.
    pub blocks: u64,
    /// Block of the pool with the first one.
    pub at: u64,
}

/// Action for the device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceAction {
    /// Read one block, and complete with its bytes.
    ReadPage {
        /// Identifier for its completion.
        io: u64,
        /// Block to read.
        at: u64,
    },
    /// Read the two superblocks at the start, and complete with their bytes.
    ReadSlots {
        /// Identifier for its completion.
        io: u64,
    },
    /// Write these bytes: one or several blocks.
    WritePages {
        /// Identifier for its completion.
        io: u64,
        /// First block.
        at: u64,
        /// Data to write.
        bytes: Vec<u8>,
    },
    /// Make all completed writes durable.
    Flush {
        /// Identifier for its completion.
        io: u64,
    },
    /// Transfer blocks from the device to the requester.
    ReadData {
        /// Identifier for its completion.
        io: u64,
        /// Token of the request.
        token: u64,
        /// First block, relative to the start of the request.
        offset: u64,
        /// Its block on the device.
        at: u64,
        /// Number of blocks.
        blocks: u64,
        /// Whether to complete with the checksums of the data read. The data must not be used before the
        /// completion of the request.
        is_summed: bool,
    },
    /// Transfer blocks from the parent of the request's volume to the requester.
    ReadParent {
        /// Identifier for its completion.
        io: u64,
        /// Token of the request.
        token: u64,
        /// First block, relative to the start of the request.
        offset: u64,
        /// Its block in the parent.
        block: u64,
        /// Number of blocks.
        blocks: u64,
    },
    /// Give zeroes to the requester of a read. This action has no completion.
    Zero {
        /// Token of the request.
        token: u64,
        /// First block, relative to the start of the request.
        offset: u64,
        /// Number of blocks.
        blocks: u64,
    },
    /// Transfer blocks from the requester to the device.
    WriteData {
        /// Identifier for its completion.
        io: u64,
        /// Token of the request.
        token: u64,
        /// First block, relative to the start of the request.
        offset: u64,
        /// Its block on the device.
        at: u64,
        /// Number of blocks.
        blocks: u64,
        /// Whether to complete with the checksums of the data written. The data must not change in the
        /// meantime.
        is_summed: bool,
    },
}

/// Result of an action.
#[derive(Clone, Copy, Debug)]
pub enum ActionResult<'a> {
    /// Success.
    Done,
    /// Success, with the bytes read.
    Read(&'a Block),
    /// Success, with the superblocks at the start.
    Slots(&'a SuperblockSlots),
    /// Success, with the checksums of the transferred blocks.
    Sums(&'a [u32]),
    /// Success, and whether each block read from a parent contains anything except zeroes. A block
    /// without data need not be copied.
    Contents(&'a [bool]),
    /// Failure.
    Failed(IoStatus),
}
