//! Ownership of a mirror, as its superblocks record it.

use crate::PoolOwner;
use crate::format::OwnerRecord;

/// The owner of a mirror that is open for writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MirrorOwnership {
    /// Drawn at open; zero means no owner.
    pub id: u128,
    /// Number of claims of the mirror.
    pub epoch: u64,
    /// The process, its machine, and its start time.
    pub record: OwnerRecord,
}

impl MirrorOwnership {
    /// No owner.
    pub const NONE: Self = Self { id: 0, epoch: 0, record: OwnerRecord::NONE };

    /// The owner, if any.
    pub fn owner(&self) -> Option<PoolOwner> {
        (self.id != 0).then_some(PoolOwner { id: self.id, record: self.record })
    }
}
