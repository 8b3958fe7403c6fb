//! Parked threads: not polled until there is work for them.
//!
//! A reactor with a thousand idle connections wakes for one of them; polling, disarming and arming
//! the others would cost more than the work. Therefore a thread whose pollers all [permit
//! it](crate::Poller::may_park) stays armed when its reactor sleeps, and is parked. It is unparked
//! when
//!
//! - it is notified, with or without a message, by way of [`tenmil_linux::ParkFlag`];
//! - a descriptor of one of its pollers is ready: the kernel reports it at the end of a sleep, and
//!   a reactor that does not sleep polls for it about every millisecond
//!   ([`NextStep::PollDescriptors`](tenmil_linux::NextStep));
//! - the deadline of one of its pollers, or a timer, is reached;
//! - a command concerns it, or the reactor no longer sleeps.
//!
//! ```text
//!   idle:     threads that may park: begin → announce → arm: each is checked once more
//!             no work anywhere → those that still may are parked → block
//!   iterate:  notified? due? → the thread is unparked: disarmed, and polled in this iteration
//! ```

use std::collections::{BTreeMap, BTreeSet};

use tenmil_base::Instant;

use super::{PUBLISH, Reactor};
use crate::adaptive_spin::PollMode;
use crate::light_thread::LightThread;
use crate::registry::ThreadId;

/// Parked threads, and what each of them waits for.
#[derive(Default)]
pub(super) struct ParkedThreads {
    threads: BTreeMap<ThreadId, ParkedThread>,
    /// Threads by the numbers of their pollers with a descriptor.
    descriptors: BTreeMap<u64, ThreadId>,
    deadlines: BTreeSet<(Instant, ThreadId)>,
}

struct ParkedThread {
    thread: LightThread,
    wake_at: Instant,
}

impl ParkedThreads {
    pub(super) fn is_empty(&self) -> bool {
        self.threads.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.threads.len()
    }

    /// Earliest deadline of a parked thread.
    pub(super) fn next_deadline(&self) -> Instant {
        self.deadlines.first().map_or(Instant::NEVER, |(at, _)| *at)
    }

    fn insert(&mut self, thread: LightThread, wake_at: Instant) {
        let id = thread.thread_counters().id;
        for number in thread.descriptor_poller_numbers() {
            self.descriptors.insert(number, id);
        }
        if wake_at != Instant::NEVER {
            self.deadlines.insert((wake_at, id));
        }
        self.threads.insert(id, ParkedThread { thread, wake_at });
    }

    fn remove(&mut self, id: ThreadId) -> Option<LightThread> {
        let ParkedThread { thread, wake_at } = self.threads.remove(&id)?;
        for number in thread.descriptor_poller_numbers() {
            self.descriptors.remove(&number);
        }
        self.deadlines.remove(&(wake_at, id));
        Some(thread)
    }

    /// Thread whose descriptor has this token.
    fn thread_of_token(&self, token: u64) -> Option<ThreadId> {
        self.descriptors.get(&token).copied()
    }

    /// Threads that were notified.
    fn notified_threads(&self) -> Vec<ThreadId> {
        let is_rung =
            |dozer: &&ParkedThread| dozer.thread.thread_counters().park_flag.is_notified();
        self.threads
            .values()
            .filter(is_rung)
            .map(|dozer| dozer.thread.thread_counters().id)
            .collect()
    }

    /// Thread with the earliest deadline, if it has passed.
    fn first_due(&self, now: Instant) -> Option<ThreadId> {
        self.deadlines.first().filter(|(at, _)| *at <= now).map(|(_, id)| *id)
    }
}

impl Reactor {
    /// Marks threads that may park. Called before the announcement.
    pub(super) fn mark_parkable_threads(&mut self, now: Instant) {
        self.catch_panic(now, |reactor| {
            let Self { threads, local, .. } = reactor;
            for thread in threads {
                if thread.may_park(local) {
                    thread.thread_counters().park_flag.mark_parked();
                }
            }
        });
    }

    /// Parks the threads that were marked and still may park. Called after the final check, which
    /// found no work. Coalesced descriptors are set here.
    pub(super) fn park_marked_threads(&mut self, now: Instant) {
        self.catch_panic(now, |reactor| {
            let Self { threads, local, parked: dormitory, .. } = reactor;
            let mut index = 0;
            while let Some(thread) = threads.get_mut(index) {
                thread.update_wake_modes(local);
                if thread.thread_counters().park_flag.is_parked() && thread.may_park(local) {
                    let wake_at = thread.wake_at(now, local);
                    dormitory.insert(threads.swap_remove(index), wake_at);
                } else {
                    index += 1;
                }
            }
            local.due = local.due.min(dormitory.next_deadline());
        });
    }

    /// Unparks a thread, which is still armed.
    pub(super) fn unpark_thread(&mut self, id: ThreadId) -> bool {
        let Some(thread) = self.parked.remove(id) else { return false };
        thread.thread_counters().park_flag.mark_runnable();
        self.threads.push(thread);
        // Until the threads are counted again.
        self.local.accounting.has_several_accounts = true;
        true
    }

    /// Unparks a thread while the reactor is awake.
    pub(super) fn unpark_and_disarm(&mut self, id: ThreadId, now: Instant) {
        if self.unpark_thread(id) {
            self.catch_panic(now, |reactor| {
                let Self { threads, local, .. } = reactor;
                if let Some(thread) = threads.last_mut() {
                    thread.disarm(local);
                }
            });
        }
    }

    /// Unparks the threads that were notified.
    #[cold]
    pub(super) fn unpark_notified(&mut self, now: Instant) {
        if self.local.notifier.clear_notified_parked_thread() {
            self.parked
                .notified_threads()
                .into_iter()
                .for_each(|id| self.unpark_and_disarm(id, now));
        }
    }

    /// Unparks the threads whose deadline has passed.
    pub(super) fn unpark_due(&mut self, now: Instant) {
        while let Some(id) = self.parked.first_due(now) {
            self.unpark_and_disarm(id, now);
        }
    }

    /// Unparks all threads.
    pub(super) fn unpark_all(&mut self, now: Instant) {
        let all: Vec<_> = self.parked.threads.keys().copied().collect();
        all.into_iter().for_each(|id| self.unpark_and_disarm(id, now));
    }

    /// Unparks the threads whose descriptors, given by token, have ended a sleep. They are disarmed
    /// with all others.
    pub(super) fn unpark_after_sleep(&mut self, ready: &[u64]) {
        for token in ready {
            if let Some(id) = self.parked.thread_of_token(*token) {
                self.unpark_thread(id);
            }
        }
    }

    /// Unparks the threads whose descriptors, given by token, are ready, while the reactor is
    /// awake.
    pub(super) fn unpark_while_awake(&mut self, ready: &[u64]) {
        let now = self.last;
        for token in ready {
            if let Some(id) = self.parked.thread_of_token(*token) {
                self.unpark_and_disarm(id, now);
            }
        }
    }

    /// Whether descriptors of parked threads have not been polled for a while.
    pub(super) fn is_descriptor_poll_due(&mut self, now: Instant) -> bool {
        let is_due = self.descriptors_polled_at != Instant::NEVER
            && now.since(self.descriptors_polled_at) >= PUBLISH;
        if is_due || self.descriptors_polled_at == Instant::NEVER {
            self.descriptors_polled_at = now;
        }
        is_due && !self.parked.is_empty()
    }

    /// Whether this poll mode allows parking. A reactor that never sleeps polls every thread in
    /// every iteration.
    pub(super) fn allows_parking(mode: PollMode) -> bool {
        mode != PollMode::Always
    }
}
