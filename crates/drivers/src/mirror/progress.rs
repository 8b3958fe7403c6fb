//! Progress of the background work of an open mirror.

use std::fmt;
use std::sync::{Arc, Weak};

use super::events::MirrorEventCounters;
use super::mirror_shared::MirrorShared;
use tenmil_volume::mirror::uuid_text;

/// Monitor of an open mirror; does not keep it open. Clones refer to the same mirror.
#[derive(Clone)]
pub struct MirrorMonitor {
    shared: Weak<MirrorShared>,
    /// Device name of each leg, by leg number.
    names: Arc<[Option<String>]>,
}

/// State of a mirror at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MirrorProgress {
    /// UUID of the mirror.
    pub uuid: String,
    /// Number of membership and state changes.
    pub generation: u64,
    /// All legs, including absent ones.
    pub legs: Vec<LegProgress>,
    /// Health of the mirror.
    pub health: Health,
    /// Event counters since it was opened.
    pub counters: MirrorEventCounters,
    /// Bytes in a region.
    pub region_bytes: u64,
    /// Number of regions.
    pub regions: u64,
    /// Regions with writes in flight or recent writes, or in which legs may differ.
    pub dirty_regions: u64,
    /// Regions to resynchronize.
    pub left_regions: u64,
    /// Byte offset of the resync in the region being copied.
    pub copying_at_bytes: Option<u64>,
    /// Maximum resync rate in bytes per second.
    pub copy_bytes_per_s: u64,
}

/// Redundancy of a mirror.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    /// Every leg is in sync.
    Healthy,
    /// Every leg that is not in sync is being resynchronized.
    Resynchronizing,
    /// A leg is stale or absent.
    Degraded,
}

/// State of a leg at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LegProgress {
    /// Leg number.
    pub number: u8,
    /// Device name, unless it was absent when the mirror was opened.
    pub name: Option<String>,
    /// State.
    pub state: LegState,
}

/// State of a leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LegState {
    /// It has every completed write.
    InSync,
    /// It receives every write, and the writes that it has missed are being copied.
    Resyncing,
    /// It has failed and misses writes; it is probed.
    Stale,
    /// No device of the mirror's URI is this leg.
    Missing,
}

/// Monitors of the same mirror are equal.
impl PartialEq for MirrorMonitor {
    fn eq(&self, other: &Self) -> bool {
        Weak::ptr_eq(&self.shared, &other.shared)
    }
}

impl MirrorMonitor {
    pub(super) fn new(shared: &Arc<MirrorShared>, names: Arc<[Option<String>]>) -> Self {
        Self { shared: Arc::downgrade(shared), names }
    }

    /// The current progress; `None` once the mirror is closed.
    pub fn progress(&self) -> Option<MirrorProgress> {
        let shared = self.shared.upgrade()?;
        let meta = shared.lock();
        let legs = (0..meta.legs).filter(|leg| meta.gone & 1 << leg == 0).map(|number| {
            let has = |legs: u8| legs & 1 << number != 0;
            let state = if has(meta.in_sync) {
                LegState::InSync
            } else if has(meta.returning | meta.joining) {
                LegState::Resyncing
            } else if has(meta.present) {
                LegState::Stale
            } else {
                LegState::Missing
            };
            let name = self.names.get(usize::from(number)).cloned().flatten();
            LegProgress { number, name, state }
        });
        let block_size = u64::from(meta.geometry.block_size);
        let all = u8::MAX >> (8 - meta.legs) & !meta.gone;
        let health = Health::from_leg_masks(all, meta.in_sync, meta.returning | meta.joining);
        Some(MirrorProgress {
            uuid: uuid_text(meta.uuid),
            generation: meta.generation,
            legs: legs.collect(),
            health,
            counters: meta.events.counters,
            region_bytes: meta.geometry.region_blocks * block_size,
            regions: meta.geometry.regions(),
            dirty_regions: meta.dirty.count(),
            left_regions: meta.todo.count(),
            copying_at_bytes: meta
                .copying
                .as_ref()
                .map(|copying| copying.next_block() * block_size),
            copy_bytes_per_s: meta.times.policy.copy_rate,
        })
    }
}

impl Health {
    pub(super) const fn from_leg_masks(all: u8, in_sync: u8, returning: u8) -> Self {
        match (all & !in_sync, all & !in_sync & !returning) {
            (0, _) => Self::Healthy,
            (_, 0) => Self::Resynchronizing,
            _ => Self::Degraded,
        }
    }

    /// Name for the user.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Resynchronizing => "resynchronizing",
            Self::Degraded => "degraded",
        }
    }
}

impl LegState {
    /// Name for the user.
    pub const fn name(self) -> &'static str {
        match self {
            Self::InSync => "in sync",
            Self::Resyncing => "copied to",
            Self::Stale => "stale",
            Self::Missing => "missing",
        }
    }
}

impl fmt::Debug for MirrorMonitor {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_tuple("MirrorHandle").field(&self.names).finish()
    }
}
