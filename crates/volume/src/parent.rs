//! Parent of a volume: a block source outside the pool, such as a read-only image or a snapshot of
//! another pool.
//!
//! ```text
//!   block of the volume:   0          overlap          blocks
//!     mapped                according to the map
//!     hole, or unwritten    zeroes
//!     neither               the parent  |  zeroes
//! ```
//!
//! The description of the parent is in a block of its own, which the volume's snapshots and clones share.
//! The overlap only shrinks: with the size, and as blocks are copied from the parent, from the end on.
//! Once it is zero, the parent is no longer needed, and is removed in the same commit.

use crate::error::{Corruption, CorruptionKind, PoolError};
use crate::format::{
    BLOCK_BYTES, BLOCKS_MAX, BlockKind, PageBody, ParentBody, Pointer, URI_BYTES_MAX, VolumeBody,
    decode_name, features,
};
use crate::mapping::ReadSource;
use crate::metadata::{Metadata, TransactionStop};
use crate::volume_catalog::CommandProgress;

/// Description of a volume's parent, read where nothing is mapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParentInfo {
    /// Its URI.
    pub uri: String,
    /// Number of 4 KiB blocks.
    pub blocks: u64,
    /// Bytes per block of its own.
    pub block_bytes: u32,
    /// Its UUID if it is a snapshot of another pool, otherwise zero.
    pub uuid: u128,
    /// Checksums of some of its blocks: those at its ends (low half), and those spread over it (high
    /// half).
    pub print: u64,
}

/// Blocks searched at once for one that still belongs to the parent.
const WINDOW_BLOCKS: u64 = 4096;

impl ParentBody {
    /// Checks the invariants of a parent block with a correct checksum.
    pub(crate) fn check(&self) -> Result<(), CorruptionKind> {
        let sized = (1..=BLOCKS_MAX).contains(&self.blocks);
        let block = self.block_bytes as usize;
        let is_block = block.is_power_of_two() && block <= BLOCK_BYTES;
        if sized && is_block && self.uri_text().is_some() {
            Ok(())
        } else {
            Err(CorruptionKind::Contents)
        }
    }

    fn uri_text(&self) -> Option<&str> {
        let bytes = self.uri.get(..usize::try_from(self.uri_bytes).ok()?)?;
        str::from_utf8(bytes).ok().filter(|name| is_valid_uri(name))
    }
}

/// Whether a string is a valid name of a parent or of a device.
pub(crate) fn is_valid_uri(uri: &str) -> bool {
    !uri.is_empty() && uri.len() <= URI_BYTES_MAX && !uri.contains(char::is_control)
}

impl ParentInfo {
    /// Its on-disk form.
    pub(crate) fn to_body(&self) -> Result<ParentBody, PoolError> {
        let refused = || PoolError::BadParent { uri: self.uri.clone() };
        let mut uri = [0; URI_BYTES_MAX];
        let room = uri.get_mut(..self.uri.len()).filter(|_| is_valid_uri(&self.uri));
        room.ok_or_else(refused)?.copy_from_slice(self.uri.as_bytes());
        let Self { blocks, block_bytes, uuid, print, .. } = *self;
        let uri_bytes = u32::try_from(self.uri.len()).map_err(|_| refused())?;
        let body =
            ParentBody { blocks, block_bytes, uri_bytes, uuid, print, reserved: [0; 120], uri };
        body.check().map(|()| body).map_err(|_| refused())
    }

    pub(crate) fn from_body(body: &ParentBody) -> Self {
        let ParentBody { blocks, block_bytes, uuid, print, .. } = *body;
        let uri = body.uri_text().unwrap_or_default().to_owned();
        Self { uri, blocks, block_bytes, uuid, print }
    }
}

impl Metadata {
    /// Creates an empty volume over a parent.
    pub(crate) fn create_with_parent(
        &mut self,
        mut body: VolumeBody,
        parent: &ParentInfo,
    ) -> Result<CommandProgress, TransactionStop> {
        let page = PageBody::Parent(Box::new(parent.to_body()?));
        self.superblock.incompatible |= features::PARENTS;
        body.parent = self.create_page(BlockKind::Parent, body.id, page)?;
        body.reach = body.blocks.min(parent.blocks);
        self.insert_volume(body)
    }

    /// The parent of a volume, if it has one.
    pub(crate) fn parent(
        &mut self,
        body: &VolumeBody,
    ) -> Result<Option<ParentInfo>, TransactionStop> {
        if body.parent.is_null() {
            return Ok(None);
        }
        match &self.load_page(body.parent, BlockKind::Parent, None)?.body {
            PageBody::Parent(parent) => Ok(Some(ParentInfo::from_body(parent))),
            _ => Err(corrupt_parent(body, CorruptionKind::Contents)),
        }
    }

    /// Drops a volume's reference to its parent.
    pub(crate) fn drop_parent_reference(
        &mut self,
        body: &VolumeBody,
    ) -> Result<(), TransactionStop> {
        let address = body.parent.address;
        if body.parent.is_null() {
            return Ok(());
        }
        match self.refcount(address)? {
            0 => return Err(corrupt_parent(body, CorruptionKind::Count)),
            1 => self.free_page(address),
            _ => self.add_references(address..address + 1, -1),
        }
        Ok(())
    }

    /// The last run of at most `blocks` blocks that the volume still reads from its parent. If the window
    /// before the end of the overlap contains none, an empty range at the start of the window.
    pub(crate) fn last_parent_run(
        &mut self,
        body: &VolumeBody,
        blocks: u64,
    ) -> Result<std::ops::Range<u64>, TransactionStop> {
        let window = body.reach.saturating_sub(WINDOW_BLOCKS)..body.reach;
        let pieces = self.plan_read(body, window.clone())?;
        let Some(last) = pieces.iter().rfind(|piece| piece.from == ReadSource::Parent) else {
            return Ok(window.start..window.start);
        };
        let end = last.block + last.blocks;
        Ok(last.block.max(end.saturating_sub(blocks))..end)
    }

    /// Shrinks the overlap with the parent to a block. Returns the overlap.
    pub(crate) fn shrink_parent_overlap(
        &mut self,
        id: u64,
        to: u64,
    ) -> Result<u64, TransactionStop> {
        let mut body = self.expect_volume(id)?;
        if body.reach > to {
            body.reach = to;
            if to == 0 {
                self.drop_parent_reference(&body)?;
                body.parent = Pointer::NONE;
            }
            self.store_volume(&body)?;
        }
        Ok(body.reach)
    }
}

impl VolumeBody {
    /// Fails if the volume needs a parent, for operations that do not support one.
    pub(crate) fn expect_no_parent(&self) -> Result<(), PoolError> {
        match self.reach {
            0 => Ok(()),
            _ => Err(PoolError::HasParent(decode_name(&self.name))),
        }
    }
}

fn corrupt_parent(body: &VolumeBody, flaw: CorruptionKind) -> TransactionStop {
    let (address, kind) = (body.parent.address, Some(BlockKind::Parent));
    Corruption { address, kind, owner: body.id, flaw }.into()
}
