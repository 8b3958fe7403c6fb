//! Threads that arrive, leave or end.

use tenmil_base::Instant;

use super::Reactor;
use crate::error::ReactorError;
use crate::light_thread::{DetachProgress, LightThread};
use crate::registry::{ReactorCommand, ThreadId};

impl Reactor {
    /// Takes over a thread. A stopping reactor ends it at once.
    pub(super) fn add_thread(&mut self, mut thread: LightThread, now: Instant) {
        if self.local.id != thread.current_reactor() {
            self.local.record.migrations.add(1);
        }
        if self.stopping {
            thread.detach_pollers(None, now, &mut self.local);
        } else {
            // A request made during the migration may have been sent to the previous reactor.
            thread.begin_or_cancel_departure(now, &mut self.local);
        }
        self.threads.push(thread);
        self.local.has_migrations = true;
    }

    /// Processes a thread's pending request. If the thread is not here (any more), its new reactor
    /// does so on arrival.
    pub(super) fn apply_thread_request(&mut self, thread: ThreadId, now: Instant) {
        self.unpark_and_disarm(thread, now);
        let mut threads = self.threads.iter_mut();
        if let Some(thread) = threads.find(|candidate| candidate.thread_counters().id == thread) {
            thread.begin_or_cancel_departure(now, &mut self.local);
        }
    }

    pub(super) fn stop_all_threads(&mut self, now: Instant) {
        (self.stopping, self.has_deferred) = (true, true);
        self.unpark_all(now);
        self.local.has_migrations = true;
        for thread in &mut self.threads {
            thread.detach_pollers(None, now, &mut self.local);
        }
    }

    /// Processes arrivals and departures. Returns whether there were any.
    #[cold]
    pub(super) fn poll_migrations(&mut self, now: Instant) -> bool {
        let mut travelled = false;
        let mut index = 0;
        while let Some(thread) = self.threads.get_mut(index) {
            travelled |= thread.attach_on_arrival(now, &mut self.local);
            match thread.request_poller_detach(now, &mut self.local) {
                DetachProgress::NotRequested | DetachProgress::Pending => index += 1,
                DetachProgress::Migrate(to) => {
                    travelled = true;
                    let mut thread = self.threads.remove(index);
                    thread.prepare_handover(to, now, &mut self.local);
                    self.departing.push((to, Box::new(thread)));
                }
                DetachProgress::Exit => {
                    travelled = true;
                    thread.close_and_drop(now, &mut self.local);
                    self.threads.remove(index);
                }
            }
        }
        let waiting = self.departing.len();
        self.send_departing(now);
        // A stopping reactor may end after this.
        travelled |= self.departing.len() < waiting;
        travelled |= self.send_undelivered();
        // Publish now, which shows the threads that share the reactor.
        self.publish_at = now;
        self.local.due = now;
        let leaving = self.threads.iter().any(|thread| thread.is_migrating());
        let waits = !self.departing.is_empty() || !self.undelivered.is_empty();
        self.local.has_migrations = leaving || waits;
        travelled
    }

    /// Sends messages left by ended threads, as far as there is space. Returns whether there were
    /// any.
    fn send_undelivered(&mut self) -> bool {
        let waiting = std::mem::take(&mut self.undelivered);
        let count = waiting.len();
        for (to, message) in waiting {
            if let Err(message) = to.send(message)
                && !to.has_ended()
            {
                self.undelivered.push((to, message));
            }
        }
        let sent = self.undelivered.len() < count;
        self.undelivered.append(&mut self.local.registry.take_undelivered());
        sent
    }

    /// Sends departing threads to their new reactors. If an inbox is full, the thread waits for the
    /// next iteration and keeps this reactor awake; if the new reactor has stopped, the thread
    /// comes back.
    fn send_departing(&mut self, now: Instant) {
        for (to, thread) in std::mem::take(&mut self.departing) {
            match self.local.registry.send_command(to, ReactorCommand::AddThread(thread)) {
                Err((ReactorError::Stopped(_), ReactorCommand::AddThread(thread))) => {
                    // The new reactor has stopped: the thread stays here.
                    thread.thread_counters().set_current_reactor(self.local.id);
                    thread.thread_counters().cancel_migration(to, self.local.id);
                    self.add_thread(*thread, now);
                }
                Err((_, ReactorCommand::AddThread(thread))) => self.departing.push((to, thread)),
                _ => {}
            }
        }
    }
}
