//! The way down of a channel whose volume has a parent: to the device of the store, and to the parent.
//!
//! ```text
//!   blocks as the channel counts them:   0        more than any store has
//!                                        | device | parent: read only
//! ```
//!
//! So the channel sends what it sends anyhow, and one of a volume without a parent has nothing of this
//! on its way.

use base::{
    Answer, Answers, Backend, DoorbellCounts, Instant, Limits, Outcome, Request, Segment,
    WakeSource,
};

use volume::format::BLOCKS_MAX;

use super::Shape;
use super::outside::Outside;
use crate::backend::joined::Joined;
use crate::backend::ready::Ready;

/// A channel to the device of a store, and one to a parent behind it.
pub(super) struct Below {
    store: Box<dyn Backend>,
    /// None if the parent could not be opened.
    parent: Option<Box<dyn Backend>>,
    /// Where the blocks of the parent begin.
    end: u64,
    /// Blocks in a page of the one, and of the other.
    per_page: (u64, u64),
    wake: Joined,
    /// What goes to the parent, in its own blocks.
    batch: Vec<Request>,
    /// Answers to what the parent would be asked, if there were one.
    ready: Ready,
}

/// Requests that go to a parent at once.
const BATCH: usize = 64;
/// Refusals that wait to be polled.
const REFUSED_MAX: u32 = 256;

impl Below {
    pub(super) fn new(
        store: Box<dyn Backend>,
        parent: Option<&Outside>,
        shape: &Shape,
    ) -> Result<Self, String> {
        let channel = parent.map(|parent| parent.opened.medium.channel()).transpose()?;
        let sources = [Some(store.wake_source()), channel.as_ref().map(|one| one.wake_source())];
        let wake = Joined::of(sources.into_iter().flatten())?;
        let per_page =
            (shape.blocks_in_page, parent.map_or(1, |parent| parent.shape.blocks_in_page));
        Ok(Self {
            store,
            parent: channel,
            end: BLOCKS_MAX * shape.blocks_in_page,
            per_page,
            wake,
            batch: Vec::with_capacity(BATCH),
            ready: Ready::with_depth(REFUSED_MAX),
        })
    }

    /// Submits requests for the parent. Returns how many it took.
    fn submit_above(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let Some(parent) = &mut self.parent else {
            let count = requests.len().min(self.ready.room());
            let refused = requests[..count].iter().map(|request| Answer {
                token: request.token,
                outcome: Outcome::UNRECOVERED_READ,
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

impl Backend for Below {
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
                true => self.submit_above(now, like, segments),
                false => self.store.submit(now, like, segments),
            };
            done += taken;
            if taken == 0 {
                break;
            }
        }
        done
    }

    fn flush(&mut self) {
        self.store.flush();
        if let Some(parent) = &mut self.parent {
            parent.flush();
        }
    }

    fn poll(&mut self, now: Instant, answers: &mut Answers) -> usize {
        let own = self.ready.give(answers) + self.store.poll(now, answers);
        own + self.parent.as_mut().map_or(0, |parent| parent.poll(now, answers))
    }

    fn doorbells(&self) -> DoorbellCounts {
        self.store.doorbells()
    }

    fn wake_at(&self) -> Instant {
        if self.ready.len() > 0 {
            return Instant::default();
        }
        let parent = self.parent.as_ref().map_or(Instant::NEVER, |parent| parent.wake_at());
        self.store.wake_at().min(parent)
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.wake.source()
    }

    fn is_done_by_kernel(&self) -> bool {
        let parent = self.parent.as_ref();
        self.store.is_done_by_kernel() && parent.is_none_or(|parent| parent.is_done_by_kernel())
    }

    fn arm(&mut self) -> bool {
        let store = self.store.arm();
        let parent = self.parent.as_mut().is_some_and(|parent| parent.arm());
        store || parent || self.ready.len() > 0
    }

    fn disarm(&mut self) {
        self.store.disarm();
        if let Some(parent) = &mut self.parent {
            parent.disarm();
        }
    }
}
