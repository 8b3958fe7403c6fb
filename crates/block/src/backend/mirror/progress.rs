//! How far a mirror that is open is with what it does by itself.

use std::fmt;
use std::sync::{Arc, Weak};

use super::events::MirrorCounters;
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
    /// Whether all of them hold everything.
    pub health: Health,
    /// What has happened since it was opened.
    pub counters: MirrorCounters,
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

/// Whether a mirror would survive the loss of a leg as it should.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// Every leg is in sync.
    Healthy,
    /// Every leg that is missing something is being resynchronized.
    Resynchronizing,
    /// A leg is stale or absent.
    Degraded,
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
        let all = u8::MAX >> (8 - meta.legs) & !meta.gone;
        let health = Health::of(all, meta.in_sync, meta.returning | meta.joining);
        Some(Progress {
            uuid: uuid_text(meta.uuid),
            generation: meta.generation,
            legs: legs.collect(),
            health,
            counters: meta.events.counters,
            region_bytes: meta.shape.region_blocks * block_size,
            regions: meta.shape.regions(),
            dirty_regions: meta.dirty.count(),
            left_regions: meta.todo.count(),
            copying_at_bytes: meta.copying.as_ref().map(|copying| copying.next() * block_size),
            copy_bytes_per_s: meta.times.policy.copy_rate,
        })
    }
}

impl Health {
    pub(super) const fn of(all: u8, in_sync: u8, returning: u8) -> Self {
        match (all & !in_sync, all & !in_sync & !returning) {
            (0, _) => Self::Healthy,
            (_, 0) => Self::Resynchronizing,
            _ => Self::Degraded,
        }
    }

    /// It in a word.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Resynchronizing => "resynchronizing",
            Self::Degraded => "degraded",
        }
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
