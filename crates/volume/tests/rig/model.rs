//! Expected contents of a pool, in simple maps.

use std::collections::BTreeMap;

use tenmil_volume::{PoolError, THRESHOLDS, VolumeOp};

/// Volumes by name.
#[derive(Clone, Debug, Default)]
pub struct Model {
    pub volumes: BTreeMap<String, Volume>,
    /// Zeroes until thresholds are set.
    pub thresholds: [u8; 2],
    next: u64,
}

/// Name of a volume, first block, and number of blocks.
pub type BlockRange = (String, u64, u64);

/// A volume.
#[derive(Clone, Debug)]
pub struct Volume {
    pub number: u64,
    pub origin: u64,
    pub is_read_only: bool,
    pub is_thick: bool,
    pub has_checksums: bool,
    /// Unwritten blocks before this one are read from the parent.
    pub reach: u64,
    pub cells: Vec<Cell>,
}

/// Contents of a block of every parent.
pub const fn parent_value(block: u64) -> u64 {
    // It also has holes of whole clusters.
    if block % 32 < 16 { PARENT + block } else { 0 }
}

const PARENT: u64 = 1 << 40;

/// Possible contents of a block: the oldest value that a power loss may restore, and all later ones. The
/// last is the current one. Zero if it was never written, or was trimmed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cell {
    pub values: Vec<(u64, u64)>,
}

impl Cell {
    pub fn new(value: u64) -> Self {
        Self { values: vec![(0, value)] }
    }

    pub fn value(&self) -> u64 {
        self.values.last().map_or(0, |(_, value)| *value)
    }

    pub fn may_be(&self, value: u64) -> bool {
        self.values.iter().any(|(_, may)| *may == value)
    }

    fn collapse(&mut self, time: u64) {
        let last = self.values.iter().rposition(|(at, _)| *at <= time).unwrap_or(0);
        self.values.drain(..last);
    }
}

impl Volume {
    fn copy(&self, number: u64, is_read_only: bool) -> Self {
        let cells = self.cells.iter().map(|cell| Cell::new(cell.value())).collect();
        let (is_thick, has_checksums) = (false, self.has_checksums);
        let (origin, reach) = (self.number, self.reach);
        Self { number, origin, is_read_only, is_thick, has_checksums, reach, cells }
    }

    /// Whether a block belongs to the volume itself: written, or copied from the parent.
    pub fn is_own(&self, at: usize) -> bool {
        let value = self.cells.get(at).map_or(0, Cell::value);
        value != 0 && (value < PARENT || at as u64 >= self.reach)
    }

    pub fn mapped(&self) -> u64 {
        (0..self.cells.len()).filter(|at| self.is_own(*at)).count() as u64
    }
}

impl Model {
    pub fn new() -> Self {
        Self { thresholds: THRESHOLDS, ..Self::default() }
    }

    /// Everything written up to this time is durable.
    pub fn collapse(&mut self, time: u64) {
        for cell in self.volumes.values_mut().flat_map(|volume| &mut volume.cells) {
            cell.collapse(time);
        }
    }

    /// Everything written up to this time is durable, except for writes that were not completed: each
    /// with its blocks, and the time of its submission.
    pub fn collapse_but(&mut self, time: u64, unanswered: &[(BlockRange, u64)]) {
        for (name, volume) in &mut self.volumes {
            for (block, cell) in (0..).zip(&mut volume.cells) {
                let is_in = |(other, first, count): &BlockRange| {
                    other == name && (*first..first + count).contains(&block)
                };
                let before = unanswered.iter().filter(|(range, _)| is_in(range));
                let before = before.map(|(_, submitted)| submitted - 1).min();
                cell.collapse(before.unwrap_or(time));
            }
        }
    }

    pub fn get(&self, name: &str) -> Result<&Volume, PoolError> {
        self.volumes.get(name).ok_or_else(|| PoolError::NoVolume(name.into()))
    }

    /// Number of mapped blocks of a volume, and number of those that another volume shares.
    pub fn room(&self, name: &str) -> (u64, u64) {
        let volume = &self.volumes[name];
        let others: Vec<&Volume> =
            self.volumes.values().filter(|other| other.number != volume.number).collect();
        let has = |other: &&Volume, at: usize, value| {
            other.is_own(at) && other.cells[at].value() == value
        };
        let mapped = volume.cells.iter().enumerate().filter(|(at, _)| volume.is_own(*at));
        let shared = |at, value| others.iter().any(|other| has(other, at, value));
        mapped.fold((0, 0), |(mapped, sum), (at, cell)| {
            (mapped + 1, sum + u64::from(shared(at, cell.value())))
        })
    }

    fn free(&self, name: &str) -> Result<(), PoolError> {
        match self.volumes.get(name) {
            Some(_) => Err(PoolError::NameExists(name.into())),
            None => Ok(()),
        }
    }

    /// The model after an operation, which makes all writes durable.
    pub fn after(&self, change: &VolumeOp) -> Result<Self, PoolError> {
        let mut after = self.clone();
        after.collapse(u64::MAX);
        after.apply(change)?;
        Ok(after)
    }

    /// The model after a volume has become thick.
    pub fn thick(&self, name: &str) -> Result<Self, PoolError> {
        let mut after = self.clone();
        after.collapse(u64::MAX);
        let volume = after.get(name)?;
        if volume.is_read_only {
            return Err(PoolError::ReadOnly(name.into()));
        }
        if volume.has_checksums {
            return Err(PoolError::ThickChecksums(name.into()));
        }
        if volume.reach > 0 {
            return Err(PoolError::HasParent(name.into()));
        }
        after.volumes.get_mut(name).unwrap().is_thick = true;
        Ok(after)
    }

    fn apply(&mut self, change: &VolumeOp) -> Result<(), PoolError> {
        let number = self.next + 1;
        match change {
            VolumeOp::Create { name, blocks, .. } | VolumeOp::CreateThick { name, blocks, .. } => {
                self.free(name)?;
                let is_thick = matches!(change, VolumeOp::CreateThick { .. });
                let has_checksums = matches!(change, VolumeOp::Create { checksums: true, .. });
                let cells = vec![Cell::new(0); usize::try_from(*blocks).unwrap()];
                let is_read_only = false;
                let (origin, reach) = (0, 0);
                let volume =
                    Volume { number, origin, is_read_only, is_thick, has_checksums, reach, cells };
                self.volumes.insert(name.clone(), volume);
            }
            VolumeOp::CreateOver { name, blocks, checksums: has_checksums, parent, .. } => {
                self.free(name)?;
                let reach = (*blocks).min(parent.blocks);
                let value = |block| if block < reach { parent_value(block) } else { 0 };
                let cells = (0..*blocks).map(|block| Cell::new(value(block))).collect();
                let (origin, is_read_only, is_thick) = (0, false, false);
                let has_checksums = *has_checksums;
                let volume =
                    Volume { number, origin, is_read_only, is_thick, has_checksums, reach, cells };
                self.volumes.insert(name.clone(), volume);
            }
            VolumeOp::Snapshot { volume: from, name, .. } | VolumeOp::Clone { from, name, .. } => {
                let is_read_only = matches!(change, VolumeOp::Snapshot { .. });
                let copy = self.get(from)?.copy(number, is_read_only);
                self.free(name)?;
                self.volumes.insert(name.clone(), copy);
            }
            VolumeOp::Delete { name, orphan } => {
                let volume = self.get(name)?;
                let children = |other: &&Volume| other.origin == volume.number;
                let children = self.volumes.values().filter(children).count() as u64;
                if volume.is_read_only && children > 0 && !orphan {
                    return Err(PoolError::HasChildren { name: name.clone(), children });
                }
                self.volumes.remove(name);
            }
            VolumeOp::Rename { name, to } => {
                self.get(name)?;
                self.free(to)?;
                let volume = self.volumes.remove(name).unwrap();
                self.volumes.insert(to.clone(), volume);
            }
            VolumeOp::ConvertToSnapshot { name, to, .. } => {
                let is_read_only = self.get(name)?.is_read_only;
                self.free(to)?;
                if is_read_only {
                    return Err(PoolError::ReadOnly(name.clone()));
                }
                let volume = self.volumes.remove(name).unwrap();
                let volume = Volume { is_read_only: true, is_thick: false, ..volume };
                self.volumes.insert(to.clone(), volume);
            }
            VolumeOp::Resize { name, blocks } => {
                if self.get(name)?.is_read_only {
                    return Err(PoolError::ReadOnly(name.clone()));
                }
                let volume = self.volumes.get_mut(name).unwrap();
                volume.reach = volume.reach.min(*blocks);
                volume.cells.resize(usize::try_from(*blocks).unwrap(), Cell::new(0));
            }
            VolumeOp::Decouple { name } => {
                if self.get(name)?.is_read_only {
                    return Err(PoolError::ReadOnly(name.clone()));
                }
                self.volumes.get_mut(name).unwrap().origin = 0;
            }
            VolumeOp::Thresholds { percent } => self.thresholds = *percent,
            VolumeOp::Rollback { volume, snapshot } => {
                let (to, from) = (self.get(volume)?, self.get(snapshot)?);
                if from.origin != to.number || !from.is_read_only {
                    let (snapshot, volume) = (snapshot.clone(), volume.clone());
                    return Err(PoolError::NotOwnSnapshot { snapshot, volume });
                }
                if to.is_read_only {
                    return Err(PoolError::ReadOnly(volume.clone()));
                }
                let Volume { cells, reach, .. } = from.copy(0, false);
                let volume = self.volumes.get_mut(volume).unwrap();
                (volume.cells, volume.reach) = (cells, reach);
            }
        }
        self.next = number;
        Ok(())
    }
}
