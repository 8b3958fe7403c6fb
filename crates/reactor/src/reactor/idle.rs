//! Going to sleep without losing wake-ups.
//!
//! ```text
//!   idle:   no work for the spin time; every poller states how long it can wait → Until(deadline)
//!   loop:   announce: asleep = true, then the heavy half of a barrier
//!   arm:    inbox? mailboxes? every poller: arm its source, then check once more; deadlines?
//!           work found → cancel the sleep
//!           none → threads that may park stay armed and are parked: see `parking.rs`
//!   loop:   block until a notification, a descriptor or the deadline
//! ```
//!
//! Work reaches a sleeping reactor in the following ways, none of which can be missed:
//!
//! - *A command or a message.* The sender stores it, passes the light half of the barrier and then
//!   loads the sleep flag. Either it sees the flag and wakes the reactor, or its store is visible
//!   to [`arm`](tenmil_linux::EventLoop::arm), which checks after the heavy half. The sender notifies the
//!   reactor where the thread lives; `ThreadCounters::notify_thread` explains why that holds while the
//!   thread migrates.
//! - *A pause* of hybrid mode is announced like a sleep and ended by the same notifications.
//!   Descriptors are not waited for: a pause is no longer than the expected completion time.
//! - *A device or a socket.* Each poller declares its wake-up source at registration, or is
//!   rejected. Its `arm` requests the signal first and checks second, so an event between the two
//!   is found, and a later one signals. The descriptor is in the sleeper's set from the moment the
//!   poller is attached until it is detached. If it could not be added, the reactor does not sleep.
//! - *Time.* The deadline is the earliest of all timers and of all pollers' `wake_at`. It is
//!   recomputed in `arm`: if it has become earlier, the sleep is canceled.
//! - *The reactor itself.* Deferred work (poller changes, an undelivered message, a departing
//!   thread) is checked too, and keeps the reactor awake.

use std::sync::atomic::Ordering;

use tenmil_base::{Instant, Span};
use tenmil_linux::NextStep;

use super::Reactor;
use crate::adaptive_spin::PAUSE_MIN;
use crate::light_thread::LightThread;

/// A deadline closer than this is polled for instead of slept for.
const NEAR_DEADLINE: Span = Span::from_us(10);

impl Reactor {
    /// Next step after an idle iteration, when the spin time is over.
    #[cold]
    pub(super) fn next_step_when_idle(&mut self, now: Instant) -> NextStep {
        // The next iteration needs a fresh clock reading in any case: a close deadline is noticed
        // only with one.
        self.idle_polls = 0;
        if self.poll_descriptors {
            return self.handle_stop_or_descriptor_poll();
        }
        // Hybrid mode pauses before a sleep is considered.
        if self.spin.is_hybrid_pause_due() {
            let rest = self.due_hybrid_pause(now);
            self.spin.restart_spin(now.after(rest.unwrap_or_default()));
            self.slept = rest.is_some();
            return rest.map_or(NextStep::Again, NextStep::Pause);
        }
        // A migration in progress, or a poller without a wake-up source, keeps the reactor awake.
        if self.local.has_migrations || self.threads.iter().any(|thread| thread.keeps_awake()) {
            self.spin.restart_spin(now);
            return NextStep::Again;
        }
        self.update_spin_use(now);
        let deadline =
            self.catch_panic(now, |reactor| reactor.earliest_deadline(now)).unwrap_or(now);
        if deadline <= now.after(NEAR_DEADLINE) {
            return NextStep::Again;
        }
        // Published now, since the sleep may be long.
        self.publish_statistics(now);
        self.mark_parkable_threads(now);
        self.deadline = deadline;
        NextStep::SleepUntil(deadline)
    }

    /// Determines whether spinning can find work before it is announced. Evaluated before every sleep and at each
    /// publication, not when pollers change: one premature sleep or superfluous spin is harmless.
    pub(super) fn update_spin_use(&mut self, now: Instant) {
        let has_active = self.threads.iter().any(LightThread::has_active_poller);
        let can_help = self.is_mostly_busy
            || !has_active
            || self
                .catch_panic(now, |reactor| {
                    let local = &mut reactor.local;
                    reactor.threads.iter().any(|thread| thread.can_spin_help(local))
                })
                .unwrap_or(true);
        self.spin.set_spin_useful(can_help);
    }

    /// Pause due now in hybrid mode. It never extends beyond a deadline, and is not taken during a
    /// migration or with a pending message; a message ends it.
    fn due_hybrid_pause(&mut self, now: Instant) -> Option<Span> {
        let expects =
            |reactor: &mut Self| (reactor.expected_latency(), reactor.earliest_deadline(now));
        let (latency, deadline) = self.catch_panic(now, expects)?;
        let rest = self.spin.take_hybrid_pause(now, latency)?.min(deadline.since(now));
        (rest >= PAUSE_MIN && !self.local.has_migrations).then_some(rest)
    }

    /// Whether work arrived whose sender did not notify, because the reactor was not asleep.
    pub(super) fn has_unnotified_messages(&self) -> bool {
        let is_wanted = |thread: &LightThread| thread.has_pending();
        !self.inbox.is_empty()
            || self.local.notifier.has_notified_parked_thread()
            || self.threads.iter().any(is_wanted)
    }

    /// Earliest time at which a timer or a poller must be called.
    fn earliest_deadline(&mut self, now: Instant) -> Instant {
        let local = &mut self.local;
        let moments = self.threads.iter_mut().map(|thread| thread.wake_at(now, local));
        moments.min().unwrap_or(Instant::NEVER).min(self.parked.next_deadline())
    }

    fn expected_latency(&mut self) -> Option<Span> {
        let local = &mut self.local;
        self.threads.iter().filter_map(|thread| thread.expected_latency(local)).min()
    }

    /// Arms everything and checks once more. True if there may be work.
    pub(super) fn arm_wake_sources(&mut self, now: Instant) -> bool {
        // Deadlines are evaluated last, since arming a poller may have moved them closer.
        let stays = self.catch_panic(now, |reactor| {
            let local = &mut reactor.local;
            !reactor.inbox.is_empty()
                || local.notifier.has_notified_parked_thread()
                || reactor.threads.iter_mut().any(|thread| thread.arm(local))
                || reactor.earliest_deadline(now) < reactor.deadline
        });
        if stays.unwrap_or(true) {
            // Not again at once: an announcement costs a microsecond.
            self.spin.restart_spin(now);
            return true;
        }
        self.park_marked_threads(now);
        let record = &self.local.record;
        record.sleeps.add(1);
        record.sleeping.store(true, Ordering::Relaxed);
        self.slept = true;
        self.armed = now;
        false
    }

    /// Handles the end or omission of a sleep, which the descriptors with these tokens ended.
    pub(super) fn disarm_wake_sources(&mut self, ready: &[u64]) {
        if !ready.is_empty() {
            self.unpark_after_sleep(ready);
            let now = self.local.accounting.now();
            let slept = now.since(self.armed);
            let local = &mut self.local;
            self.threads
                .iter_mut()
                .for_each(|thread| thread.handle_wakeups(ready, slept, now, local));
        }
        let now = self.last;
        self.catch_panic(now, |reactor| {
            let local = &mut reactor.local;
            reactor.threads.iter_mut().for_each(|thread| thread.disarm(local));
        });
        let record = &self.local.record;
        if record.sleeping.load(Ordering::Relaxed) {
            record.sleeping.store(false, Ordering::Relaxed);
            record.wakes.add(1);
            self.descriptors_polled_at = Instant::NEVER;
        }
    }
}
