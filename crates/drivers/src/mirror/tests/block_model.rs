//! Model of what each block of a mirror may hold, as far as completions determine it.

use std::collections::BTreeSet;
use tenmil_base::Error;

use super::simulated_disk::BLOCK;

/// A block.
#[derive(Clone, Debug)]
pub(super) struct BlockModel {
    /// Versions that a read may return.
    candidates: BTreeSet<u32>,
    /// Versions that may be found after a power failure.
    alive: BTreeSet<u32>,
    latest: u32,
    pub(super) is_busy: bool,
    /// Counts all events of the block.
    stamp: u64,
    /// Whether the last write has completed, and since the last power failure: then all legs have it.
    is_written: bool,
}

/// State of a block when a read or a flush started.
#[derive(Clone, Debug)]
pub(super) struct BlockSnapshot {
    candidates: BTreeSet<u32>,
    stamp: u64,
    latest: u32,
    is_certain: bool,
}

impl BlockModel {
    pub(super) fn new() -> Self {
        let zero = BTreeSet::from([0]);
        let (candidates, alive) = (zero.clone(), zero);
        Self { candidates, alive, latest: 0, is_busy: false, stamp: 0, is_written: true }
    }

    /// Starts a write and returns its version.
    pub(super) fn begin_write(&mut self) -> u32 {
        self.latest += 1;
        self.stamp += 1;
        self.is_busy = true;
        self.candidates.insert(self.latest);
        self.alive.insert(self.latest);
        self.latest
    }

    /// Ends a write; after an error, it is unknown how far it got.
    pub(super) fn end_write(&mut self, is_good: bool, is_forced: bool) {
        self.stamp += 1;
        self.is_busy = false;
        // From here on, legs may differ until they have been resynchronized.
        self.is_written = is_good;
        if is_good {
            self.candidates = BTreeSet::from([self.latest]);
            if is_forced {
                self.alive = BTreeSet::from([self.latest]);
            }
        }
    }

    pub(super) fn snapshot(&self, is_recovering: bool) -> BlockSnapshot {
        let is_certain =
            !self.is_busy && self.candidates.len() == 1 && (self.is_written || !is_recovering);
        let (stamp, latest) = (self.stamp, self.latest);
        BlockSnapshot { candidates: self.candidates.clone(), stamp, latest, is_certain }
    }

    /// Checks the version that a read has returned, which `decides` what later ones return.
    pub(super) fn check_read(
        &mut self,
        before: &BlockSnapshot,
        version: u32,
        decides: bool,
    ) -> Result<(), Error> {
        if !before.candidates.contains(&version) && !self.candidates.contains(&version) {
            let (then, now) = (&before.candidates, &self.candidates);
            return Err(Error::environment(format!(
                "version {version}, expected one of {then:?} or {now:?}"
            )));
        }
        if decides && before.stamp == self.stamp && !self.is_busy {
            self.candidates = BTreeSet::from([version]);
        }
        Ok(())
    }

    /// Records that a flush has completed that started at `before`.
    pub(super) fn record_flush(&mut self, before: &BlockSnapshot) {
        if before.is_certain {
            let newer = self.alive.split_off(&(before.latest + 1));
            self.alive = newer;
            self.alive.extend(&before.candidates);
        }
    }

    /// Records a power failure.
    pub(super) fn record_power_failure(&mut self) {
        self.stamp += 1;
        self.is_busy = false;
        self.is_written = false;
        self.candidates = self.alive.clone();
    }

    /// A leg failed during a resynchronization: data read from it may be lost.
    pub(super) fn record_second_fault(&mut self) {
        self.stamp += 1;
        if !self.is_written {
            self.candidates.extend(&self.alive);
        }
    }
}

/// Contents of a block of this version.
pub(super) fn versioned_contents(lba: u64, version: u32) -> Vec<u8> {
    let mut bytes = vec![u8::try_from(version % 251).unwrap(); BLOCK];
    bytes[..8].copy_from_slice(&lba.to_le_bytes());
    bytes[8..12].copy_from_slice(&version.to_le_bytes());
    bytes
}

/// The version of a block, if it is complete and in its place.
pub(super) fn parse_version(lba: u64, bytes: &[u8]) -> Result<u32, Error> {
    let version = u32::from_le_bytes(bytes[8..12].try_into().unwrap());
    if version == 0 || bytes == versioned_contents(lba, version) {
        return Ok(version);
    }
    let found = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    Err(Error::environment(format!("version {version} of block {found}, torn or misplaced")))
}
