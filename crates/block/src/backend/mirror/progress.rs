//! How far a mirror that is open is with what it does by itself.

use std::fmt;
use std::sync::{Arc, Weak};

use super::shared::Shared;
use super::superblock::uuid_text;

/// Looks at an open mirror, without keeping it open. Clones are of the same mirror.
#[derive(Clone)]
pub struct MirrorHandle {
    shared: Weak<Shared>,
    /// What the device of each leg is called, by the leg's number.
    names: Arc<[Option<String>]>,
}

/// A mirror at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Which mirror it is.
    pub uuid: String,
    /// How often legs have come and gone.
    pub generation: u64,
    /// Its legs, those that are missing too.
    pub legs: Vec<LegProgress>,
    /// Bytes in a region.
    pub region_bytes: u64,
    /// How many regions there are.
    pub regions: u64,
    /// Regions that somebody writes, or has written a moment ago, or in which legs may differ.
    pub dirty_regions: u64,
    /// Regions that are still to be copied.
    pub left_regions: u64,
    /// The byte from which on the region under copy is still to be copied.
    pub copying_at_bytes: Option<u64>,
    /// Bytes that are copied in a second at most.
    pub copy_bytes_per_s: u64,
}

/// A leg at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LegProgress {
    /// Its number.
    pub number: u8,
    /// Its device, unless it was missing when the mirror was opened.
    pub name: Option<String>,
    /// What it holds.
    pub state: LegState,
}

/// What a leg holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LegState {
    /// Every block that was ever answered for.
    InSync,
    /// Every write from now on, and a copy of what it has missed soon.
    Copied,
    /// Not everything: it has failed, and is looked for.
    Stale,
    /// Nothing: no device of the mirror's name is this leg.
    Missing,
}

/// Two that look at the same mirror are equal.
impl PartialEq for MirrorHandle {
    fn eq(&self, other: &Self) -> bool {
        Weak::ptr_eq(&self.shared, &other.shared)
    }
}

impl MirrorHandle {
    pub(super) fn new(shared: &Arc<Shared>, names: Arc<[Option<String>]>) -> Self {
        Self { shared: Arc::downgrade(shared), names }
    }

    /// How far it is; none once it is closed.
    pub fn progress(&self) -> Option<Progress> {
        let shared = self.shared.upgrade()?;
        let meta = shared.lock();
        let legs = (0..meta.legs).filter(|leg| meta.gone & 1 << leg == 0).map(|number| {
            let has = |legs: u8| legs & 1 << number != 0;
            let state = if has(meta.in_sync) {
                LegState::InSync
            } else if has(meta.returning | meta.joining) {
                LegState::Copied
            } else if has(meta.present) {
                LegState::Stale
            } else {
                LegState::Missing
            };
            let name = self.names.get(usize::from(number)).cloned().flatten();
            LegProgress { number, name, state }
        });
        let block_size = u64::from(meta.shape.block_size);
        Some(Progress {
            uuid: uuid_text(meta.uuid),
            generation: meta.generation,
            legs: legs.collect(),
            region_bytes: meta.shape.region_blocks * block_size,
            regions: meta.shape.regions(),
            dirty_regions: meta.dirty.count(),
            left_regions: meta.todo.count(),
            copying_at_bytes: meta.copying.as_ref().map(|copying| copying.next() * block_size),
            copy_bytes_per_s: meta.times.policy.copy_rate,
        })
    }
}

impl LegState {
    /// It in words.
    pub const fn name(self) -> &'static str {
        match self {
            Self::InSync => "in sync",
            Self::Copied => "copied to",
            Self::Stale => "stale",
            Self::Missing => "missing",
        }
    }
}

impl fmt::Debug for MirrorHandle {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_tuple("MirrorHandle").field(&self.names).finish()
    }
}
