//! Writes of a channel in flight, counted per epoch.
//!
//! Two buckets are enough: a new epoch uses the second one, and a further epoch has to wait until the
//! first is empty. That delays only the thread that waits for the grace period.

use crate::mirror::mirror_shared::{MirrorShared, OldestWriteEpoch};

/// The writes in flight of one channel.
pub(super) struct ChannelWriteEpochs {
    write_epoch: OldestWriteEpoch,
    under_way: [u32; 2],
    epochs: [u64; 2],
    /// The bucket of new writes.
    bucket: u8,
    /// The write epoch is published.
    is_in: bool,
}

impl ChannelWriteEpochs {
    pub(super) fn new() -> Self {
        Self {
            write_epoch: OldestWriteEpoch::idle(),
            under_way: [0; 2],
            epochs: [0; 2],
            bucket: 0,
            is_in: false,
        }
    }

    pub(super) fn oldest_write_epoch(&self) -> &OldestWriteEpoch {
        &self.write_epoch
    }

    /// Publishes the write epoch, or switches to a newer one.
    #[inline]
    pub(super) fn enter_current_epoch(&mut self, shared: &MirrorShared) {
        let epoch = shared.current_write_epoch();
        let (new, old) = (usize::from(self.bucket), usize::from(self.bucket ^ 1));
        if !self.is_in {
            self.is_in = true;
            self.epochs[new] = epoch;
            self.write_epoch.register_first_write(epoch);
        } else if epoch != self.epochs[new] && self.under_way[old] == 0 {
            if self.under_way[new] == 0 {
                self.epochs[new] = epoch;
                self.write_epoch.advance_to(epoch);
            } else {
                self.epochs[old] = epoch;
                self.bucket ^= 1;
            }
        }
    }

    /// Counts a write; the epoch is published. Returns the bucket for [`end_write`](Self::end_write).
    #[inline]
    pub(super) fn begin_write(&mut self) -> u8 {
        self.under_way[usize::from(self.bucket)] += 1;
        self.bucket
    }

    /// Counts the end of a write.
    #[inline]
    pub(super) fn end_write(&mut self, bucket: u8) {
        let under_way = &mut self.under_way[usize::from(bucket)];
        *under_way -= 1;
        if *under_way == 0 && bucket != self.bucket {
            self.write_epoch.advance_to(self.epochs[usize::from(self.bucket)]);
        }
    }

    /// At the end of an iteration: becomes idle if no write is in flight, or switches to a newer epoch.
    #[inline]
    pub(super) fn leave_epoch(&mut self, shared: &MirrorShared) {
        if !self.is_in {
            return;
        }
        if self.under_way == [0; 2] {
            self.is_in = false;
            self.write_epoch.set_idle();
        } else {
            self.enter_current_epoch(shared);
        }
    }
}
