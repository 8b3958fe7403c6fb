//! Responses that are queued behind the data of a whole batch of reads.
//!
//! ```text
//!   few reads:    data 0, response 0, data 1, response 1, …
//!   many reads:   data 0, data 1, …                          response 0, response 1, …
//! ```
//!
//! Some hosts send new commands after each receive call that completed one. Beside its data, each
//! response costs them a system call for one command, so that large batches fall apart into small
//! ones. Behind the data of the batch, all responses arrive in a few receive calls, and their
//! commands are replaced at once. A host with few commands is slower that way, since it cannot
//! send the next ones while it receives data.

/// Tags of completed reads whose data are queued and whose responses are not.
#[derive(Debug, Default)]
pub(super) struct DeferredResponses {
    tags: Vec<u16>,
    /// Reads with a response in this batch, and in the one before.
    count: u32,
    previous: u32,
}

/// Responses are deferred after a batch of so many. Measured with another host on one core and this
/// side on another: 128 commands at once are 1.4 times as fast, 64 at least as fast, 32 lose 3 %.
pub(super) const BATCH_MIN: u32 = 20;

impl DeferredResponses {
    /// Counts a read whose data were queued. Returns whether its response is deferred; the caller
    /// sends it otherwise.
    #[inline(always)]
    pub(super) fn count_read_and_decide_deferral(&mut self, tag: u16) -> bool {
        self.count += 1;
        let defers = self.previous >= BATCH_MIN;
        if defers {
            self.tags.push(tag);
        }
        defers
    }

    /// Whether reads were counted since the last batch ended.
    #[inline(always)]
    pub(super) fn has_batch(&self) -> bool {
        self.count > 0
    }

    /// Ends the batch, and returns the deferred tags in order.
    pub(super) fn end_batch(&mut self) -> Vec<u16> {
        (self.previous, self.count) = (self.count, 0);
        core::mem::take(&mut self.tags)
    }

    /// Takes the list back, for its memory.
    pub(super) fn recycle_list(&mut self, mut tags: Vec<u16>) {
        tags.clear();
        self.tags = tags;
    }
}
