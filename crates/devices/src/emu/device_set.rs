//! Emulated SSDs as block devices: each channel is a queue pair, and an admin thread polls the
//! controllers.
//!
//! ```text
//!   SsdDevice, SsdDevice, … ───┐
//!   SsdChannel, SsdChannel, … ─┴─▶ EmulatedDevices ── Emulated (under a lock: queue creation, admin)
//!                                   └── admin thread: timeouts, events, removal
//! ```
//!
//! I/O uses neither the lock nor the admin thread. When a controller is lost, `Emulated` is
//! dropped: its queue pairs then complete all requests with a path error, and no new ones are
//! created.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::{
    BlockDevice, ChannelWakeup, CompletionBatch, Doorbell, Instant, Interrupts, IoChannel, Limits,
    Request, Segment, Span,
};
use tenmil_block::ExistingData;
use tenmil_dma::{DevicePool, Region};
use tenmil_linux::{
    Clock, EventFdVectors, EventLoop, NamedThread, NextStep, Notifier, Sleeper, StopFlag,
};
use tenmil_nvme_host::{NamespaceQueue, RingTransport};

use super::SsdDescription;
use super::{EmulatedSsds, SsdQueue};
use crate::fast_path_switches::FastPathSwitches;
use tenmil_base::Error;

/// Emulated SSDs and their admin thread. Dropped with the last device and channel.
pub struct EmulatedDevices {
    shared: Arc<DeviceSetState>,
    /// Stopped before the SSDs are shut down.
    admin_thread: Option<NamedThread<()>>,
    notifier: Notifier,
    clock: Clock,
    techniques: FastPathSwitches,
    depth: u32,
    channels_max: u32,
    /// Queue pairs may outlive their SSD, so the memory is held here.
    _memory: Option<Arc<Region>>,
}

/// State shared by the admin thread and the block devices.
struct DeviceSetState {
    state: Mutex<DeviceSetStateInner>,
    /// Signaled when the SSDs are lost, to wake threads that sleep on a queue pair.
    vectors: Vec<EventFdVectors>,
}

struct DeviceSetStateInner {
    emulated: Option<EmulatedSsds>,
    /// Why the SSDs are lost.
    lost: Option<Error>,
    /// Open channels of each SSD.
    open: Vec<u32>,
}

/// One emulated SSD as a block device.
pub struct SsdDevice {
    emulated_devices: Arc<EmulatedDevices>,
    index: usize,
    limits: Limits,
}

/// I/O channel: one queue pair of an SSD.
struct SsdChannel<B: Doorbell> {
    queue: NamespaceQueue<RingTransport<DevicePool, B>>,
    limits: Limits,
    /// Dropped after the queue pair.
    lease: SsdQueueLease,
}

/// Counts an open queue pair, and releases its vector on drop.
struct SsdQueueLease {
    emulated_devices: Arc<EmulatedDevices>,
    index: usize,
    vector: Option<u16>,
}

/// Longest sleep of the admin thread.
const TENDED: Span = Span::from_ms(100);

impl EmulatedDevices {
    /// Starts an admin thread for `emulated`. Each SSD has at most `channels_max` queue pairs of
    /// `depth` commands.
    pub fn new(
        emulated: EmulatedSsds,
        depth: u32,
        channels_max: u32,
        techniques: &FastPathSwitches,
        clock: Clock,
    ) -> Result<Arc<Self>, Error> {
        emulated.enable_mapping_on_use();
        let memory = emulated.memory();
        let (vectors, open) = (emulated.vectors(), vec![0; emulated.count()]);
        let state = Mutex::new(DeviceSetStateInner { emulated: Some(emulated), lost: None, open });
        let shared = Arc::new(DeviceSetState { state, vectors });
        let refuse = |error: std::io::Error| {
            Error::environment(format!("start the thread that tends emulated SSDs: {error}"))
        };
        let mut sleeper = Sleeper::new().map_err(refuse)?;
        let (notifier, loop_state) = (sleeper.notifier(), Arc::clone(&shared));
        let body = move |stop: &StopFlag| {
            let mut event_loop = EmulatedAdminLoop { shared: loop_state, stop: stop.clone() };
            tenmil_linux::event_loop::run_event_loop(&mut event_loop, &clock, &mut sleeper);
        };
        let admin_thread = Some(NamedThread::spawn("tend", None, body).map_err(refuse)?);
        let techniques = *techniques;
        let emulated_devices = Self {
            shared,
            admin_thread,
            notifier,
            clock,
            techniques,
            depth,
            channels_max,
            _memory: memory,
        };
        Ok(Arc::new(emulated_devices))
    }

    /// Block device of SSD `index`.
    pub fn block_device(self: &Arc<Self>, index: usize) -> Result<SsdDevice, Error> {
        // All queue pairs have the same limits, so those of a temporary one apply.
        let mut limits = self.channel(index, None)?.limits().clone();
        limits.durability = self.describe(index)?.durability;
        Ok(SsdDevice { emulated_devices: Arc::clone(self), index, limits })
    }

    /// Allocates a buffer in the pool of SSD `index`, whose address translation is the fastest for
    /// it.
    pub fn allocate(&self, index: usize, len_bytes: u32) -> Option<Segment> {
        self.shared.lock().emulated.as_ref()?.allocate(index, len_bytes)
    }

    /// Description of SSD `index`.
    pub fn describe(&self, index: usize) -> Result<SsdDescription, Error> {
        let mut state = self.shared.lock();
        Ok(state.emulated()?.descriptions().swap_remove(index))
    }

    /// Existing data on the block devices behind the SSDs.
    pub fn existing_data(&self) -> Vec<ExistingData> {
        let state = self.shared.lock();
        state.emulated.as_ref().map_or_else(Vec::new, |emulated| emulated.existing_data().to_vec())
    }

    /// Creates a queue pair of SSD `index`, with `limits` in place of its own if given.
    fn channel(
        self: &Arc<Self>,
        index: usize,
        limits: Option<&Limits>,
    ) -> Result<Box<dyn IoChannel>, Error> {
        let mut state = self.shared.lock();
        let open = state.open[index];
        if open >= self.channels_max {
            return Err(Error::usage(format!(
                "{open} queue pairs are in use, expected at most {}, which the controller has",
                self.channels_max
            )));
        }
        let emulated = state.emulated()?;
        let made = emulated.ssd_queue(index, self.depth, &self.techniques, &self.clock);
        let (queue, vector) = made?;
        state.open[index] += 1;
        let lease = SsdQueueLease { emulated_devices: Arc::clone(self), index, vector };
        Ok(match queue {
            SsdQueue::Direct(queue) => SsdChannel::boxed(queue, limits, lease),
            SsdQueue::WithPostedDoorbell(queue) => SsdChannel::boxed(queue, limits, lease),
        })
    }
}

impl Drop for EmulatedDevices {
    fn drop(&mut self) {
        if let Some(admin_thread) = self.admin_thread.take() {
            admin_thread.stop_flag().set();
            self.notifier.notify();
            // Joins the thread.
            drop(admin_thread);
        }
        if let Some(emulated) = self.shared.lock().emulated.take() {
            emulated.shut_down(&self.clock);
        }
    }
}

impl DeviceSetState {
    fn lock(&self) -> MutexGuard<'_, DeviceSetStateInner> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Polls the controllers. Returns false if they are lost.
    fn poll_controllers(&self, now: Instant) -> bool {
        let mut state = self.lock();
        let Some(emulated) = &mut state.emulated else { return false };
        match emulated.poll_controllers(now) {
            Ok(()) => true,
            Err(refused) => {
                self.mark_lost_and_wake(&mut state, refused);
                false
            }
        }
    }

    /// Drops the SSDs: everything in flight completes with an error, and sleeping threads are
    /// woken.
    fn mark_lost_and_wake(&self, state: &mut DeviceSetStateInner, why: Error) {
        state.lost = Some(why);
        state.emulated = None;
        for vectors in &self.vectors {
            let count = u16::try_from(vectors.vector_count()).unwrap_or(u16::MAX);
            (0..count).for_each(|vector| vectors.clone().raise(vector));
        }
    }
}

impl DeviceSetStateInner {
    fn emulated(&mut self) -> Result<&mut EmulatedSsds, Error> {
        let lost = || self.lost.clone().unwrap_or_else(|| Error::remote("the SSDs were removed"));
        self.emulated.as_mut().ok_or_else(lost)
    }
}

/// Loop of the admin thread.
struct EmulatedAdminLoop {
    shared: Arc<DeviceSetState>,
    stop: StopFlag,
}

impl EventLoop for EmulatedAdminLoop {
    fn iterate(&mut self, now: Instant) -> NextStep {
        if self.stop.is_stopped() || !self.shared.poll_controllers(now) {
            return NextStep::Exit;
        }
        NextStep::SleepUntil(now.after(TENDED))
    }

    fn arm(&mut self, _: Instant) -> bool {
        self.stop.is_stopped()
    }

    fn disarm(&mut self, _: &[u64]) {}
}

impl SsdDevice {
    /// Existing data on all SSDs of the set.
    pub fn existing_data_of_set(&self) -> Vec<ExistingData> {
        self.emulated_devices.existing_data()
    }
}

impl BlockDevice for SsdDevice {
    fn limits(&self) -> Limits {
        self.limits.clone()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        self.emulated_devices
            .channel(self.index, Some(&self.limits))
            .map_err(|refused| refused.text)
            .map_err(Error::environment)
    }

    fn channels_max(&self) -> u32 {
        self.emulated_devices.channels_max
    }
}

impl<B: Doorbell + Send + 'static> SsdChannel<B> {
    fn boxed(
        queue: NamespaceQueue<RingTransport<DevicePool, B>>,
        limits: Option<&Limits>,
        lease: SsdQueueLease,
    ) -> Box<dyn IoChannel> {
        let limits = limits.unwrap_or(queue.limits()).clone();
        Box::new(Self { queue, limits, lease })
    }
}

impl<B: Doorbell + Send> IoChannel for SsdChannel<B> {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        self.queue.submit(now, requests, segments)
    }

    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        self.queue.poll(now, completions)
    }
}

impl<B: Doorbell + Send> ChannelWakeup for SsdChannel<B> {
    fn below(&self) -> Option<&dyn IoChannel> {
        Some(&self.queue)
    }

    fn below_mut(&mut self) -> Option<&mut dyn IoChannel> {
        Some(&mut self.queue)
    }
}

impl<B: Doorbell> Drop for SsdChannel<B> {
    fn drop(&mut self) {
        drain_abandoned_commands(&mut self.queue, &self.lease.emulated_devices.clock);
    }
}

/// Abandons incomplete commands and waits until the SSD can access none of their memory. The SSD
/// completes them; otherwise the admin thread resets it or finds it lost.
fn drain_abandoned_commands<B: Doorbell>(
    queue: &mut NamespaceQueue<RingTransport<DevicePool, B>>,
    clock: &Clock,
) {
    while !queue.drain_discarding_completions(clock.now()) {
        tenmil_linux::named_thread::yield_cpu();
    }
}

impl Drop for SsdQueueLease {
    fn drop(&mut self) {
        let mut state = self.emulated_devices.shared.lock();
        state.open[self.index] -= 1;
        if let (Some(emulated), Some(vector)) = (&mut state.emulated, self.vector) {
            emulated.release_vector(self.index, vector);
        }
    }
}

#[cfg(test)]
mod tests;
