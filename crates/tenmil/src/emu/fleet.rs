//! Emulated SSDs as media: their channels are queue pairs, and a thread looks after the controllers.
//!
//! ```text
//!   SsdMedium, SsdMedium, … ──┐
//!   SsdChannel, SsdChannel, … ┴─▶ Fleet ── Emulated (locked to make a queue pair, or to tend)
//!                                   └── a thread that tends: time-outs, events, removal
//! ```
//!
//! An I/O meets neither the lock nor that thread. When a controller is lost, its owner is dropped:
//! its queue pairs then answer everything that the path is gone, and no more are made.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::{
    Answers, Backend, Doorbell, DoorbellCounts, Instant, Interrupts, Limits, Medium, Request,
    Segment, Span, WakeSource,
};
use block::Existing;
use dma::{DevicePool, Region};
use host::{Bell, Clock, EventVectors, Sleeper, Stop, Thread, Turn, Wait};
use nvme::NamespaceQueue;

use super::{Emulated, SsdQueue};
use crate::Refused;
use crate::perf::options::Techniques;
use crate::perf::outcome::DeviceOutcome;

/// Emulated SSDs and the thread that tends them. They go with the last medium and channel.
pub(crate) struct Fleet {
    shared: Arc<Shared>,
    /// Ends before the SSDs are shut down.
    tender: Option<Thread<()>>,
    bell: Bell,
    clock: Clock,
    techniques: Techniques,
    depth: u32,
    channels_max: u32,
    /// Queue pairs may live on when their SSD is lost.
    _memory: Option<Arc<Region>>,
}

/// What the thread and the media both use.
struct Shared {
    state: Mutex<State>,
    /// Rung when the SSDs are lost, for those who sleep on a queue pair.
    vectors: Vec<EventVectors>,
}

struct State {
    emulated: Option<Emulated>,
    /// Why there are none any more.
    lost: Option<Refused>,
    /// Channels of each SSD.
    open: Vec<u32>,
}

/// One SSD of a fleet.
pub(crate) struct SsdMedium {
    fleet: Arc<Fleet>,
    index: usize,
    limits: Limits,
}

/// A queue pair of one.
struct SsdChannel<B: Doorbell> {
    queue: NamespaceQueue<DevicePool, B>,
    limits: Limits,
    /// Dropped after the queue pair.
    lease: Lease,
}

/// A queue pair's right to be there.
struct Lease {
    fleet: Arc<Fleet>,
    index: usize,
    vector: Option<u16>,
}

/// How often controllers are looked after at least.
const TENDED: Span = Span::from_ms(100);

impl Fleet {
    /// Puts `emulated` under the care of a thread. Each SSD has `channels_max` queue pairs, and each
    /// queue pair takes `depth` commands.
    pub(crate) fn new(
        emulated: Emulated,
        depth: u32,
        channels_max: u32,
        techniques: &Techniques,
        clock: Clock,
    ) -> Result<Arc<Self>, Refused> {
        emulated.map_on_use();
        let memory = emulated.memory();
        let (vectors, open) = (emulated.vectors(), vec![0; emulated.count()]);
        let state = Mutex::new(State { emulated: Some(emulated), lost: None, open });
        let shared = Arc::new(Shared { state, vectors });
        let refuse = |error: std::io::Error| {
            Refused::machine(format!("start the thread that tends emulated SSDs: {error}"))
        };
        let mut sleeper = Sleeper::new().map_err(refuse)?;
        let (bell, tended) = (sleeper.bell(), Arc::clone(&shared));
        let body = move |stop: &Stop| {
            let mut tender = Tender { shared: tended, stop: stop.clone() };
            host::turn::run(&mut tender, &clock, &mut sleeper);
        };
        let tender = Some(Thread::spawn("tend", None, body).map_err(refuse)?);
        let techniques = *techniques;
        let fleet =
            Self { shared, tender, bell, clock, techniques, depth, channels_max, _memory: memory };
        Ok(Arc::new(fleet))
    }

    /// Number `index` of its SSDs.
    pub(crate) fn medium(self: &Arc<Self>, index: usize) -> Result<SsdMedium, Refused> {
        // The first queue pair tells what all are like.
        let mut limits = self.channel(index, None)?.limits().clone();
        limits.durability = self.describe(index)?.durability;
        Ok(SsdMedium { fleet: Arc::clone(self), index, limits })
    }

    /// A buffer in the memory of SSD `index`, which finds it fastest.
    pub(crate) fn allocate(&self, index: usize, len_bytes: u32) -> Option<Segment> {
        self.shared.lock().emulated.as_ref()?.allocate(index, len_bytes)
    }

    /// What SSD `index` is.
    pub(crate) fn describe(&self, index: usize) -> Result<DeviceOutcome, Refused> {
        let mut state = self.shared.lock();
        Ok(state.emulated()?.descriptions().swap_remove(index))
    }

    /// What lies on them that this run did not create.
    pub(crate) fn existing(&self) -> Vec<Existing> {
        let state = self.shared.lock();
        state.emulated.as_ref().map_or_else(Vec::new, |emulated| emulated.existing().to_vec())
    }

    /// A queue pair of SSD `index`, with `limits` if they are others than its own.
    fn channel(
        self: &Arc<Self>,
        index: usize,
        limits: Option<&Limits>,
    ) -> Result<Box<dyn Backend>, Refused> {
        let mut state = self.shared.lock();
        let open = state.open[index];
        if open >= self.channels_max {
            return Err(Refused::caller(format!(
                "{open} queue pairs are in use, expected at most {}, which the controller has",
                self.channels_max
            )));
        }
        let emulated = state.emulated()?;
        let made = emulated.ssd_queue(index, self.depth, &self.techniques, &self.clock);
        let (queue, vector) = made?;
        state.open[index] += 1;
        let lease = Lease { fleet: Arc::clone(self), index, vector };
        Ok(match queue {
            SsdQueue::Direct(queue) => SsdChannel::boxed(queue, limits, lease),
            SsdQueue::Posted(queue) => SsdChannel::boxed(queue, limits, lease),
        })
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        if let Some(tender) = self.tender.take() {
            tender.stop_flag().stop();
            self.bell.ring();
            // Its own drop waits for the end.
            drop(tender);
        }
        if let Some(emulated) = self.shared.lock().emulated.take() {
            emulated.shut_down(&self.clock);
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the controllers look after themselves; true if there still are some.
    fn tend(&self, now: Instant) -> bool {
        let mut state = self.lock();
        let Some(emulated) = &mut state.emulated else { return false };
        match emulated.look_after(now) {
            Ok(()) => true,
            Err(refused) => {
                self.lose(&mut state, refused);
                false
            }
        }
    }

    /// The SSDs are gone: everything in flight is answered so, and whoever sleeps is woken for it.
    fn lose(&self, state: &mut State, why: Refused) {
        state.lost = Some(why);
        state.emulated = None;
        for vectors in &self.vectors {
            let count = u16::try_from(vectors.count()).unwrap_or(u16::MAX);
            (0..count).for_each(|vector| vectors.clone().raise(vector));
        }
    }
}

impl State {
    fn emulated(&mut self) -> Result<&mut Emulated, Refused> {
        let lost = || self.lost.clone().unwrap_or_else(|| Refused::peer("the SSDs are gone"));
        self.emulated.as_mut().ok_or_else(lost)
    }
}

/// What the thread does.
struct Tender {
    shared: Arc<Shared>,
    stop: Stop,
}

impl Turn for Tender {
    fn turn(&mut self, now: Instant) -> Wait {
        if self.stop.is_stopped() || !self.shared.tend(now) {
            return Wait::Ended;
        }
        Wait::Until(now.after(TENDED))
    }

    fn arm(&mut self, _: Instant) -> bool {
        self.stop.is_stopped()
    }

    fn woken(&mut self, _: &[u64]) {}
}

impl SsdMedium {
    /// What lies on the SSDs of its fleet that this run did not create.
    pub(crate) fn existing(&self) -> Vec<Existing> {
        self.fleet.existing()
    }
}

impl Medium for SsdMedium {
    fn limits(&self) -> Limits {
        self.limits.clone()
    }

    fn channel(&self) -> Result<Box<dyn Backend>, String> {
        self.fleet.channel(self.index, Some(&self.limits)).map_err(|refused| refused.text)
    }

    fn channels_max(&self) -> u32 {
        self.fleet.channels_max
    }
}

impl<B: Doorbell + Send + 'static> SsdChannel<B> {
    fn boxed(
        queue: NamespaceQueue<DevicePool, B>,
        limits: Option<&Limits>,
        lease: Lease,
    ) -> Box<dyn Backend> {
        let limits = limits.unwrap_or(queue.limits()).clone();
        Box::new(Self { queue, limits, lease })
    }
}

impl<B: Doorbell + Send> Backend for SsdChannel<B> {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        self.queue.submit(now, requests, segments)
    }

    fn flush(&mut self) {
        self.queue.flush();
    }

    fn poll(&mut self, now: Instant, answers: &mut Answers) -> usize {
        self.queue.poll(now, answers)
    }

    fn doorbells(&self) -> DoorbellCounts {
        self.queue.doorbells()
    }

    fn wake_at(&self) -> Instant {
        self.queue.wake_at()
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.queue.wake_source()
    }

    fn arm(&mut self) -> bool {
        self.queue.arm()
    }

    fn disarm(&mut self) {
        self.queue.disarm();
    }
}

impl<B: Doorbell> Drop for SsdChannel<B> {
    fn drop(&mut self) {
        abandon(&mut self.queue, &self.lease.fleet.clock);
    }
}

/// Gives up what the SSD has not completed, and waits until it touches no memory for it any more. It
/// completes what it has; if it does not, the thread that tends it resets it, or finds it lost.
fn abandon<B: Doorbell>(queue: &mut NamespaceQueue<DevicePool, B>, clock: &Clock) {
    while !queue.abandon(clock.now()) {
        host::thread::give_way();
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut state = self.fleet.shared.lock();
        state.open[self.index] -= 1;
        if let (Some(emulated), Some(vector)) = (&mut state.emulated, self.vector) {
            emulated.release_vector(self.index, vector);
        }
    }
}

#[cfg(test)]
mod tests;
