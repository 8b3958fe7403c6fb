//! The part of a host in the takeover of its pool.

use super::{PoolHost, PoolStage};

impl PoolHost {
    /// Whether a take-over is safe now: no write is in flight that would damage the data of the new
    /// owner, and there is something to commit.
    pub(crate) fn is_takeover_safe(&self) -> bool {
        let is_open = matches!(&self.stage, PoolStage::Open(_)) && self.volume.is_some();
        is_open && self.is_dirty && self.under_way.is_empty() && self.ops.is_empty()
    }

    /// Opens the pool for the first time.
    pub(crate) fn open_pool(&mut self) {
        self.begin_request();
    }

    /// Whether the pool is open, with a volume that this host has written to.
    pub(crate) fn has_written_volume(&self) -> bool {
        matches!(&self.stage, PoolStage::Open(_)) && self.volume.is_some() && self.is_dirty
    }

    /// Another host preempts the reservation of this one.
    pub(crate) fn handle_preemption(&mut self) {
        self.is_preempted = true;
    }

    /// Takes the pool over by force.
    pub(crate) fn take_over_pool(&mut self) {
        self.has_force = true;
        self.begin_request();
    }

    /// Stops new requests until the pool has been taken over by the other host.
    pub(crate) fn stop_requests(&mut self) {
        self.is_cut_off = true;
    }
}
