//! Device threads: poll while there is work, and sleep otherwise.
//!
//! ```text
//!   poll ──▶ no work for the busy-poll time ──▶ arm ──▶ check once more ──▶ sleep
//!    ▲                                                   │ work             │ doorbell, register,
//!    └───────────────────────────────────────────────────┴──────────────────┘ block device, timer
//! ```
//!
//! The host stores its doorbell and then checks whether the thread is armed; the thread arms and
//! then checks the doorbells. The full barrier between the two steps is executed by the sleeping
//! side (see [`tenmil_linux::wakeup`]).

use tenmil_base::{Instant, Interrupts, Span};
use tenmil_linux::{
    Clock, EventFdVectors, EventLoop, NamedThread, NextStep, Notifier, Sleeper, StopFlag,
    WakeSources,
};
use tenmil_nvme_controller::transport::NextPoll as Rest;
use tenmil_reactor::{AdaptiveSpin, PollMode};

use super::device::EmulatedSsd;
use tenmil_base::Error;

/// A thread that polls some SSDs. Dropping it stops and joins the thread.
pub(super) struct DeviceThread {
    thread: Option<NamedThread<()>>,
    notifier: Notifier,
}

/// A thread before its start. Its waker exists already, since the host sides of the SSDs need it.
pub(super) struct DeviceThreadBuilder {
    ssds: Vec<EmulatedSsd>,
    sleeper: Sleeper,
}

/// Loop of a device thread.
pub(super) struct DeviceLoop<I: Interrupts = EventFdVectors> {
    ssds: Vec<EmulatedSsd<I>>,
    stop: StopFlag,
    yields: bool,
    sources: WakeSources,
    /// A descriptor could not be added to the wait set, so the thread must not sleep.
    is_deaf: bool,
    adaptive_spin: AdaptiveSpin,
    /// Next time at which an SSD has work without an event, as of the last iteration.
    until: Instant,
    /// Iterations per reading of the clock.
    iterations: u32,
}

/// Iterations per reading of the clock; one takes well under a microsecond.
const POLLS_PER_CLOCK_READ: u32 = 16;

/// Typical delay of a timed wake-up by the kernel. A deadline closer than this is awaited by
/// polling.
const WAKE_LEAD: Span = Span::from_us(100);

impl DeviceThreadBuilder {
    pub(super) fn new() -> Result<Self, Error> {
        let sleeper = Sleeper::new().map_err(|error| {
            Error::environment(format!("make a bell for a device's thread: {error}"))
        })?;
        Ok(Self { ssds: Vec::new(), sleeper })
    }

    pub(super) fn notifier(&self) -> Notifier {
        self.sleeper.notifier()
    }

    pub(super) fn push(&mut self, ssd: EmulatedSsd) {
        self.ssds.push(ssd);
    }

    /// Starts thread number `index`, on CPU `core` if that is possible.
    pub(super) fn start(
        self,
        index: usize,
        core: Option<u32>,
        yields: bool,
        clock: Clock,
    ) -> Result<DeviceThread, Error> {
        let Self { ssds, mut sleeper } = self;
        let (notifier, name) = (sleeper.notifier(), format!("device-{index}"));
        let body = move |stop: &StopFlag| {
            let mut on_shift = DeviceLoop::new(ssds, stop.clone(), yields, sleeper.sources());
            tenmil_linux::event_loop::run_event_loop(&mut on_shift, &clock, &mut sleeper);
        };
        let thread = NamedThread::spawn(&name, core, body)
            .map_err(|error| Error::environment(format!("start thread {name}: {error}")))?;
        Ok(DeviceThread { thread: Some(thread), notifier })
    }
}

impl Drop for DeviceThread {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            thread.stop_flag().set();
            self.notifier.notify();
            // Joins the thread.
            drop(thread);
        }
    }
}

impl<I: Interrupts> DeviceLoop<I> {
    fn new(ssds: Vec<EmulatedSsd<I>>, stop: StopFlag, yields: bool, sources: WakeSources) -> Self {
        let adaptive_spin = AdaptiveSpin::new(PollMode::Adaptive, Instant::default());
        let (until, iterations) = (Instant::NEVER, POLLS_PER_CLOCK_READ);
        Self { ssds, stop, yields, sources, is_deaf: false, adaptive_spin, until, iterations }
    }

    /// Loop without a thread, for tests that advance the time themselves: the clock is read in each
    /// iteration.
    #[cfg(test)]
    pub(super) fn without_thread(ssd: EmulatedSsd<I>, sources: WakeSources) -> Self {
        Self { iterations: 1, ..Self::new(vec![ssd], StopFlag::new(), false, sources) }
    }

    /// Polls every SSD once. Returns true if there was work.
    #[inline]
    fn poll_each(&mut self, now: Instant) -> bool {
        let mut is_busy = false;
        self.until = Instant::NEVER;
        for ssd in &mut self.ssds {
            match ssd.poll(now) {
                Rest::Busy => is_busy = true,
                Rest::Pending(until) | Rest::Idle(until) => self.until = self.until.min(until),
            }
        }
        is_busy
    }

    /// Time at which the thread must be awake.
    fn wake_at(&self) -> Instant {
        if self.until == Instant::NEVER {
            return Instant::NEVER;
        }
        Instant { ns: self.until.ns.saturating_sub(WAKE_LEAD.ns) }
    }
}

impl<I: Interrupts> EventLoop for DeviceLoop<I> {
    fn iterate(&mut self, now: Instant) -> NextStep {
        if self.stop.is_stopped() {
            return NextStep::Exit;
        }
        let mut is_idle = false;
        for _ in 0..self.iterations {
            is_idle = !self.poll_each(now);
            if is_idle && self.yields {
                tenmil_linux::named_thread::yield_cpu();
                break;
            }
        }
        if !is_idle {
            self.adaptive_spin.record_work(now);
            return NextStep::Again;
        }
        let may_sleep =
            self.adaptive_spin.is_spin_over(now) && self.wake_at() > now && !self.is_deaf;
        if may_sleep { NextStep::SleepUntil(self.wake_at()) } else { NextStep::Again }
    }

    fn arm(&mut self, now: Instant) -> bool {
        let (planned, mut has_work) = (self.wake_at(), false);
        self.until = Instant::NEVER;
        for ssd in &mut self.ssds {
            let until = ssd.arm(now);
            has_work |= until.is_none();
            self.until = self.until.min(until.unwrap_or_default());
            let (sources, is_deaf) = (&self.sources, &mut self.is_deaf);
            ssd.for_each_new_wake_descriptor(|source| {
                *is_deaf |= sources.add_source(source, 0).is_err()
            });
        }
        let must_wake = has_work || self.is_deaf || self.wake_at() < planned;
        if must_wake {
            // Poll for another period first: arming costs more than a few iterations.
            self.adaptive_spin.restart_spin(now);
        }
        must_wake || self.stop.is_stopped()
    }

    fn disarm(&mut self, _: &[u64]) {
        self.ssds.iter_mut().for_each(EmulatedSsd::disarm);
    }
}
