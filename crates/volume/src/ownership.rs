//! Ownership of a pool that is open for writing, recorded in its superblocks.
//!
//! ```text
//!   open      read the superblocks: owner?                rejected if it is another one
//!   claim     read them again | rewrite the newest | flush | write the next one, with the new owner
//!             | flush | read them again: still owned?
//!   commit    read the two at the start: still owned? | pages | flush | superblocks, with the owner
//!             | flush
//!   release   a commit whose superblock has no owner
//! ```
//!
//! The claim is the superblock itself: a takeover writes a superblock of a later generation with another
//! owner, so it needs no separate block, and a power loss in between leaves the pool in the old or in the
//! new state. A former owner finds the claim before its next commit and writes nothing more. Between that
//! read and the writes there is a window in which a device without reservations cannot reject the former
//! owner. Therefore a pool is only taken over if its owner is known to be gone, or by force. A forced
//! takeover advances the generation far beyond those that the former owner may still write, in both
//! slots, so that none of its superblocks is ever the newest.

use std::fmt;

use tenmil_base::UtcTime;

use crate::error::PoolError;
use crate::format::{
    BLOCK_BYTES, Block, OwnerRecord, Superblock, decode_name, decode_owner, decode_superblock,
};
use crate::on_disk_layout::Layout;

/// Owner of a pool that is open for writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolOwner {
    /// Random identifier, drawn when the pool was opened.
    pub id: u128,
    /// Process, host and time of opening. All zeroes if the superblock has no space for it.
    pub record: OwnerRecord,
}

/// Condition for claiming a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimCondition {
    /// It has no owner.
    Free,
    /// It has no owner, or this one, which is known to be gone.
    Over(u128),
    /// Any owner.
    Force,
}

/// Bugs injected on purpose, to verify that a test finds them.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InjectedBugs {
    /// The pool is claimed regardless of its owner, and commits do not check the owner.
    pub ignore_fence: bool,
}

/// The two superblocks at the start of a pool.
pub type SuperblockSlots = [Block; 2];

/// Generation increment of a forced takeover: more than the former owner can commit between its check of
/// the superblocks and the following write. Even, so that the slot stays the same.
pub(crate) const TAKEOVER_GENERATIONS: u64 = 1 << 20;

const _: () = assert!(TAKEOVER_GENERATIONS.is_multiple_of(2), "the slot stays the same");
const _: () =
    assert!(size_of::<SuperblockSlots>() == 2 * BLOCK_BYTES, "what is read before a commit");

impl PoolOwner {
    /// Owner named in a superblock.
    pub(crate) fn from_record(superblock: &Superblock, record: OwnerRecord) -> Option<Self> {
        (superblock.owner != 0).then_some(Self { id: superblock.owner, record })
    }
}

/// Checks that the superblocks at the start are as this generation left them: none is newer, none of the
/// same generation has another owner, and none belongs to another pool. An unreadable one is ignored; if
/// neither can be read, the pool was overwritten.
pub(crate) fn check_superblocks_unchanged(
    slots: &SuperblockSlots,
    store: u128,
    (generation, owner): (u64, u128),
) -> Result<(), PoolError> {
    let mut are_lost = true;
    for (at, block) in (0..).zip(slots) {
        let Ok((other, found, superblock, _)) = decode_superblock(block, at) else { continue };
        are_lost = false;
        let is_same = found == generation && superblock.owner == owner;
        if other != store || !(is_same || found < generation) {
            let by =
                PoolOwner::from_record(&superblock, decode_owner(block)).filter(|_| other == store);
            return Err(PoolError::TakenOver { by: by.map(Box::new) });
        }
    }
    if are_lost { Err(PoolError::TakenOver { by: None }) } else { Ok(()) }
}

impl fmt::Display for PoolOwner {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OwnerRecord { pid, since, host, .. } = &self.record;
        if self.record == OwnerRecord::NONE {
            return write!(out, "opener {:032x}", self.id);
        }
        let since = UtcTime::from_unix_secs(*since);
        write!(out, "process {pid} on host `{}` since {since:.0}", decode_name(host))
    }
}

impl OwnerRecord {
    /// No information.
    pub const NONE: Self = Self {
        boot: 0,
        machine: 0,
        pid_space: 0,
        started: 0,
        since: 0,
        pid: 0,
        gap: 0,
        host: [0; 64],
    };
}

const _: () = assert!(OwnerRecord::BYTES == 128, "as drawn");

#[cfg(test)]
mod tests {
    use super::PoolOwner;
    use crate::format::OwnerRecord;

    #[test]
    fn pool_owner_is_displayed_with_host_process_and_time() {
        let mut record = OwnerRecord { pid: 4711, since: 1_795_684_365, ..OwnerRecord::NONE };
        record.host[..2].copy_from_slice(b"db");
        let owner = PoolOwner { id: 7, record };
        assert_eq!(owner.to_string(), "process 4711 on host `db` since 2026-11-26T09:12:45Z");
        let leap = OwnerRecord { since: 1_709_210_096, ..record };
        assert!(PoolOwner { id: 7, record: leap }.to_string().ends_with("2024-02-29T12:34:56Z"));
        let unknown = PoolOwner { id: 7, record: OwnerRecord::NONE };
        assert_eq!(unknown.to_string(), "opener 00000000000000000000000000000007");
    }
}
