//! What lies below a volume outside its store: a read-only image, a snapshot of another store, whatever
//! has blocks.
//!
//! ```text
//!   block of the volume:   0            reach          blocks
//!     mapped                where the map says
//!     a hole, or spare      zeroes
//!     neither               the parent  |  zeroes
//! ```
//!
//! What the parent is stands in a block of its own, which the volume's snapshots and clones share. The
//! reach only ever becomes less: with the size, and as what the parent has is copied, from the end on.
//! Where it is nothing the parent is needed no more, and forgotten in the same commit.

use crate::books::{Books, Stop};
use crate::error::{Damage, Flaw, StoreError};
use crate::format::{
    BLOCK_BYTES, BLOCKS_MAX, Body, Kind, ParentBody, Pointer, URI_BYTES_MAX, VolumeBody, features,
    unpadded,
};
use crate::plan::Source;
use crate::volumes::Progress;

/// What a volume is read from where nothing is mapped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parent {
    /// What it is called.
    pub uri: String,
    /// How many blocks of 4 KiB it has.
    pub blocks: u64,
    /// Bytes in a block of its own.
    pub block_bytes: u32,
    /// What it is known by, if it is a snapshot of another store; else zero.
    pub uuid: u128,
    /// Checksums of some of its blocks: at its ends (low half), and all over it (high half).
    pub print: u64,
}

/// Blocks that are looked through at once for one that is the parent's.
const WINDOW_BLOCKS: u64 = 4096;

impl ParentBody {
    /// What must hold of one whose checksum is right; else what is wrong.
    pub(crate) fn check(&self) -> Result<(), Flaw> {
        let sized = (1..=BLOCKS_MAX).contains(&self.blocks);
        let block = self.block_bytes as usize;
        let is_block = block.is_power_of_two() && block <= BLOCK_BYTES;
        if sized && is_block && self.name().is_some() { Ok(()) } else { Err(Flaw::Contents) }
    }

    fn name(&self) -> Option<&str> {
        let bytes = self.uri.get(..usize::try_from(self.uri_bytes).ok()?)?;
        str::from_utf8(bytes).ok().filter(|name| is_name(name))
    }
}

/// Whether a parent, or a device, may be called so.
pub(crate) fn is_name(uri: &str) -> bool {
    !uri.is_empty() && uri.len() <= URI_BYTES_MAX && !uri.contains(char::is_control)
}

impl Parent {
    /// As it stands on disk.
    pub(crate) fn body(&self) -> Result<ParentBody, StoreError> {
        let refused = || StoreError::BadParent { uri: self.uri.clone() };
        let mut uri = [0; URI_BYTES_MAX];
        let room = uri.get_mut(..self.uri.len()).filter(|_| is_name(&self.uri));
        room.ok_or_else(refused)?.copy_from_slice(self.uri.as_bytes());
        let Self { blocks, block_bytes, uuid, print, .. } = *self;
        let uri_bytes = u32::try_from(self.uri.len()).map_err(|_| refused())?;
        let body =
            ParentBody { blocks, block_bytes, uri_bytes, uuid, print, reserved: [0; 120], uri };
        body.check().map(|()| body).map_err(|_| refused())
    }

    pub(crate) fn of(body: &ParentBody) -> Self {
        let ParentBody { blocks, block_bytes, uuid, print, .. } = *body;
        let uri = body.name().unwrap_or_default().to_owned();
        Self { uri, blocks, block_bytes, uuid, print }
    }
}

impl Books {
    /// Makes an empty volume over a parent.
    pub(crate) fn create_over(
        &mut self,
        mut body: VolumeBody,
        parent: &Parent,
    ) -> Result<Progress, Stop> {
        let page = Body::Parent(Box::new(parent.body()?));
        self.superblock.incompatible |= features::PARENTS;
        body.parent = self.put_new(Kind::Parent, body.id, page)?;
        body.reach = body.blocks.min(parent.blocks);
        self.enter(body)
    }

    /// What a volume is read from where nothing is mapped, if that is anything.
    pub(crate) fn parent(&mut self, body: &VolumeBody) -> Result<Option<Parent>, Stop> {
        if body.parent.is_none() {
            return Ok(None);
        }
        match &self.page(body.parent, Kind::Parent, None)?.body {
            Body::Parent(parent) => Ok(Some(Parent::of(parent))),
            _ => Err(damaged(body, Flaw::Contents)),
        }
    }

    /// One volume less has this parent.
    pub(crate) fn leave_parent(&mut self, body: &VolumeBody) -> Result<(), Stop> {
        let address = body.parent.address;
        if body.parent.is_none() {
            return Ok(());
        }
        match self.count(address)? {
            0 => return Err(damaged(body, Flaw::Count)),
            1 => self.drop_page(address),
            _ => self.add(address..address + 1, -1),
        }
        Ok(())
    }

    /// The last blocks of a volume that are its parent's, so many at most; or, if there are none from
    /// some block on, that block.
    pub(crate) fn last_of_parent(
        &mut self,
        body: &VolumeBody,
        blocks: u64,
    ) -> Result<std::ops::Range<u64>, Stop> {
        let window = body.reach.saturating_sub(WINDOW_BLOCKS)..body.reach;
        let pieces = self.plan_read(body, window.clone())?;
        let Some(last) = pieces.iter().rfind(|piece| piece.from == Source::Parent) else {
            return Ok(window.start..window.start);
        };
        let end = last.block + last.blocks;
        Ok(last.block.max(end.saturating_sub(blocks))..end)
    }

    /// A volume needs its parent only for what lies before a block. Returns how far it reaches now.
    pub(crate) fn lower_reach(&mut self, id: u64, to: u64) -> Result<u64, Stop> {
        let mut body = self.expect_volume(id)?;
        if body.reach > to {
            body.reach = to;
            if to == 0 {
                self.leave_parent(&body)?;
                body.parent = Pointer::NONE;
            }
            self.put_volume(&body)?;
        }
        Ok(body.reach)
    }
}

impl VolumeBody {
    /// Whether it needs no parent; else what is asked of it cannot be done.
    pub(crate) fn expect_no_parent(&self) -> Result<(), StoreError> {
        match self.reach {
            0 => Ok(()),
            _ => Err(StoreError::HasParent(unpadded(&self.name))),
        }
    }
}

fn damaged(body: &VolumeBody, flaw: Flaw) -> Stop {
    let (address, kind) = (body.parent.address, Some(Kind::Parent));
    Damage { address, kind, owner: body.id, flaw }.into()
}
