//! Who has a pool open for writing, as its superblocks say.
//!
//! ```text
//!   open      read the superblocks: who owns it?          refused if that is another one
//!   claim     read them again | write the newest as it is | flush | the next one, with the new owner | flush
//!             | read them again: are they still ours?
//!   commit    read the two at the start: still ours? | pages | flush | superblocks, with the owner | flush
//!   release   a commit whose superblock has no owner
//! ```
//!
//! The claim is the superblock itself: whoever takes a pool over writes a superblock of a later generation
//! with another owner, so it needs no place of its own, and the loss of power in the middle leaves a pool as
//! it was or as it was to become. A former owner finds it before its next commit and writes nothing more.
//! Between that read and the writes lies a window in which a device without reservations cannot refuse
//! the former owner; so a pool is only taken over if its owner is known to be gone, or by force. By force,
//! generations go on far behind those that the former owner may still write, in both slots, so that none of
//! its superblocks is ever the newest.

use std::fmt;

use crate::error::StoreError;
use crate::format::{
    BLOCK_BYTES, Block, OwnerRecord, Superblock, decode_owner, decode_superblock, unpadded,
};
use crate::layout::Layout;

/// Who has a pool open for writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Drawn when the pool was opened.
    pub id: u128,
    /// The process, its machine, and since when. All zeroes if the superblock has no room for it.
    pub record: OwnerRecord,
}

/// How a pool may be claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Claim {
    /// If nobody owns it.
    Free,
    /// Even if this one does, which is known to be gone.
    Over(u128),
    /// Whoever owns it.
    Force,
}

/// Bugs that are put back on purpose, to see whether a test finds them.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InjectedBugs {
    /// The pool is claimed whoever owns it, and commits do not look who does.
    pub ignore_fence: bool,
}

/// The two superblocks at the start of a pool.
pub type Slots = [Block; 2];

/// How far generations go on when a pool is taken over by force: further than its former owner commits in
/// the time between a look at the superblocks and the write behind it. Even, so that the slot stays the same.
pub(crate) const TAKEOVER_GENERATIONS: u64 = 1 << 20;

const _: () = assert!(TAKEOVER_GENERATIONS.is_multiple_of(2), "the slot stays the same");
const _: () = assert!(size_of::<Slots>() == 2 * BLOCK_BYTES, "what is read before a commit");

impl Owner {
    /// The one that a superblock names, in its block.
    pub(crate) fn of(superblock: &Superblock, record: OwnerRecord) -> Option<Self> {
        (superblock.owner != 0).then_some(Self { id: superblock.owner, record })
    }
}

/// Looks whether the superblocks at the start are as this generation left them: none is newer, none of the
/// same generation has another owner, and none is of another pool. One that cannot be read says nothing, and if
/// neither can be, something else has been written over the pool.
pub(crate) fn look(
    slots: &Slots,
    store: u128,
    (generation, owner): (u64, u128),
) -> Result<(), StoreError> {
    let mut are_lost = true;
    for (at, block) in (0..).zip(slots) {
        let Ok((other, found, superblock, _)) = decode_superblock(block, at) else { continue };
        are_lost = false;
        let is_same = found == generation && superblock.owner == owner;
        if other != store || !(is_same || found < generation) {
            let by = Owner::of(&superblock, decode_owner(block)).filter(|_| other == store);
            return Err(StoreError::TakenOver { by: by.map(Box::new) });
        }
    }
    if are_lost { Err(StoreError::TakenOver { by: None }) } else { Ok(()) }
}

impl fmt::Display for Owner {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OwnerRecord { pid, since, host, .. } = &self.record;
        if self.record == OwnerRecord::NONE {
            return write!(out, "opener {:032x}", self.id);
        }
        write!(out, "process {pid} on host `{}` since ", unpadded(host))?;
        write_time(out, *since)
    }
}

/// Seconds since 1970 as RFC 3339 has them, in UTC.
fn write_time(out: &mut fmt::Formatter<'_>, seconds: u64) -> fmt::Result {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Days are counted from March 1st of year 0, in eras of 400 years.
    let days = days.saturating_add(719_468);
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let shifted = (5 * day + 2) / 153;
    let day = day - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = year + era * 400 + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    write!(out, "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

impl OwnerRecord {
    /// Nothing is known.
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
    use super::Owner;
    use crate::format::OwnerRecord;

    #[test]
    fn an_owner_is_named_by_host_process_and_time() {
        let mut record = OwnerRecord { pid: 4711, since: 1_795_684_365, ..OwnerRecord::NONE };
        record.host[..2].copy_from_slice(b"db");
        let owner = Owner { id: 7, record };
        assert_eq!(owner.to_string(), "process 4711 on host `db` since 2026-11-26T09:12:45Z");
        let leap = OwnerRecord { since: 1_709_210_096, ..record };
        assert!(Owner { id: 7, record: leap }.to_string().ends_with("2024-02-29T12:34:56Z"));
        let unknown = Owner { id: 7, record: OwnerRecord::NONE };
        assert_eq!(unknown.to_string(), "opener 00000000000000000000000000000007");
    }
}
