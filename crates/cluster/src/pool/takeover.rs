//! The part of a host in the takeover of its pool.

use super::{PoolHost, Stage};

impl PoolHost {
    /// Whether a take-over is safe now: no write is in flight that would damage the data of the new
    /// owner, and there is something to commit.
    pub(crate) fn is_at_rest(&self) -> bool {
        let is_open = matches!(&self.stage, Stage::Open(_)) && self.volume.is_some();
        is_open && self.is_dirty && self.under_way.is_empty() && self.ops.is_empty()
    }

    /// Opens the pool for the first time.
    pub(crate) fn open(&mut self) {
        self.begin();
    }

    /// Whether the pool is open, with a volume that this host has written to.
    pub(crate) fn is_in_use(&self) -> bool {
        matches!(&self.stage, Stage::Open(_)) && self.volume.is_some() && self.is_dirty
    }

    /// Another host preempts the reservation of this one.
    pub(crate) fn preempt(&mut self) {
        self.is_preempted = true;
    }

    /// Takes the pool over by force.
    pub(crate) fn take_over(&mut self) {
        self.has_force = true;
        self.begin();
    }

    /// Stops new requests until the pool has been taken over by the other host.
    pub(crate) fn cut_off(&mut self) {
        self.is_cut_off = true;
    }
}
