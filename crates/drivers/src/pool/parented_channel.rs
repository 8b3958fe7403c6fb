//! Device channel of a volume with a parent: combines the pool's devices and the parent.
//!
//! ```text
//!   blocks as the channel addresses them:  0        past the end of any pool
//!                                          | device | parent: read only
//! ```
//!
//! The volume's channel only uses higher addresses for the parent, so a volume without a parent has no
//! extra cost.

use tenmil_base::{
    ChannelWakeup, CompletionBatch, DoorbellStats, Error, Instant, IoChannel, IoCompletion,
    IoStatus, Limits, Request, Segment, WakeSource,
};

use tenmil_volume::format::BLOCKS_MAX;

use super::PageGeometry;
use super::parent_image::ParentImage;
use crate::combined_wake_source::CombinedWakeSource;
use tenmil_block::CompletionQueue;

/// A channel to the devices of a pool, followed by one to a parent.
pub(super) struct ParentedChannel {
    store: Box<dyn IoChannel>,
    /// `None` if the parent could not be opened.
    parent: Option<Box<dyn IoChannel>>,
    /// First block of the parent.
    end: u64,
    /// Blocks in a page of the pool, and of the parent.
    per_page: (u64, u64),
    wake: CombinedWakeSource,
    /// Requests to the parent, in its own blocks.
    batch: Vec<Request>,
    /// Completions of requests to an unavailable parent.
    ready: CompletionQueue,
}

/// Maximum number of requests submitted to the parent at once.
const BATCH: usize = 64;
/// Maximum number of failed requests that wait for a poll.
const REFUSED_MAX: u32 = 256;

impl ParentedChannel {
    pub(super) fn new(
        store: Box<dyn IoChannel>,
        parent: Option<&ParentImage>,
        geometry: &PageGeometry,
    ) -> Result<Self, Error> {
        let channel = parent.map(|parent| parent.opened.medium.channel()).transpose()?;
        let sources = [Some(store.wake_source()), channel.as_ref().map(|one| one.wake_source())];
        let wake = CombinedWakeSource::from_sources(sources.into_iter().flatten())?;
        let per_page =
            (geometry.blocks_in_page, parent.map_or(1, |parent| parent.geometry.blocks_in_page));
        Ok(Self {
            store,
            parent: channel,
            end: BLOCKS_MAX * geometry.blocks_in_page,
            per_page,
            wake,
            batch: Vec::with_capacity(BATCH),
            ready: CompletionQueue::with_depth(REFUSED_MAX),
        })
    }

    /// Submits requests to the parent. Returns the number accepted.
    fn forward_requests(
        &mut self,
        now: Instant,
        requests: &[Request],
        segments: &[Segment],
    ) -> usize {
        let Some(parent) = &mut self.parent else {
            let count = requests.len().min(self.ready.free_count());
            let refused = requests[..count].iter().map(|request| IoCompletion {
                token: request.token,
                status: IoStatus::UNRECOVERED_READ,
                result: 0,
            });
            self.ready.extend(refused);
            return count;
        };
        let ((ours, theirs), end) = (self.per_page, self.end);
        self.batch.clear();
        self.batch.extend(requests.iter().take(BATCH).map(|request| Request {
            lba: (request.lba - end) / ours * theirs,
            blocks: u32::try_from(u64::from(request.blocks) / ours * theirs).unwrap_or(u32::MAX),
            ..*request
        }));
        parent.submit(now, &self.batch, segments)
    }
}

impl IoChannel for ParentedChannel {
    fn limits(&self) -> &Limits {
        self.store.limits()
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let mut done = 0;
        while let Some(next) = requests.get(done) {
            let is_above = |request: &&Request| request.lba >= self.end;
            let kind = is_above(&next);
            let like = requests[done..].iter().take_while(|one| is_above(one) == kind).count();
            let like = &requests[done..done + like];
            let taken = match kind {
                true => self.forward_requests(now, like, segments),
                false => self.store.submit(now, like, segments),
            };
            done += taken;
            if taken == 0 {
                break;
            }
        }
        done
    }

    fn flush_submissions(&mut self) {
        self.store.flush_submissions();
        if let Some(parent) = &mut self.parent {
            parent.flush_submissions();
        }
    }

    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        let own = self.ready.drain_into(completions) + self.store.poll(now, completions);
        own + self.parent.as_mut().map_or(0, |parent| parent.poll(now, completions))
    }

    /// Of the pool's devices. The parent is only read.
    fn known_write_loss_count(&self) -> u64 {
        self.store.known_write_loss_count()
    }

    fn ack_repaired_write_losses(&mut self, count: u64) {
        self.store.ack_repaired_write_losses(count);
    }

    fn accept_write_losses(&mut self) -> Result<(), Error> {
        self.store.accept_write_losses()
    }

    fn doorbell_stats(&self) -> DoorbellStats {
        self.store.doorbell_stats()
    }
}

impl ChannelWakeup for ParentedChannel {
    fn wake_at(&self) -> Instant {
        if !self.ready.is_empty() {
            return Instant::default();
        }
        let parent = self.parent.as_ref().map_or(Instant::NEVER, |parent| parent.wake_at());
        self.store.wake_at().min(parent)
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.wake.source()
    }

    fn is_done_by_local_kernel(&self) -> bool {
        let parent = self.parent.as_ref();
        self.store.is_done_by_local_kernel()
            && parent.is_none_or(|parent| parent.is_done_by_local_kernel())
    }

    fn arm(&mut self) -> bool {
        let store = self.store.arm();
        let parent = self.parent.as_mut().is_some_and(|parent| parent.arm());
        store || parent || !self.ready.is_empty()
    }

    fn disarm(&mut self) {
        self.store.disarm();
        if let Some(parent) = &mut self.parent {
            parent.disarm();
        }
    }
}
