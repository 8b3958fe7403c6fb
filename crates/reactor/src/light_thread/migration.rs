//! Attaching, detaching and migrating a light thread.

use std::sync::Arc;

use tenmil_base::{Instant, Span};

use super::poller_slots::PollerSlot;
use super::{DeferredCommand, LightThread};
use crate::event::Event;
use crate::message::Message;
use crate::poller::{DetachReason, PollerId};
use crate::reactor::ReactorLocal;
use crate::registry::ReactorId;

/// Request to detach a thread from its OS thread.
#[derive(Clone, Copy)]
pub(super) struct DetachRequest {
    /// Target reactor; `None` if the thread ends.
    to: Option<ReactorId>,
    since: Instant,
}

/// Progress of detaching.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DetachProgress {
    /// No request.
    NotRequested,
    /// Some poller still has I/O in flight.
    Pending,
    /// Detached; ready to migrate to this reactor.
    Migrate(ReactorId),
    /// Detached; ready to end.
    Exit,
}

impl LightThread {
    /// Arrives at a reactor: creates its pollers on first arrival, and attaches them. Call again if
    /// one of them panics. Returns whether there was anything to do.
    pub(crate) fn attach_on_arrival(&mut self, now: Instant, local: &mut ReactorLocal) -> bool {
        if !self.arriving {
            return false;
        }
        let record = Arc::clone(&self.state.record);
        if let Some(plan) = self.builder.take() {
            record.started_ns.set(now.ns);
            for registration in plan.pollers {
                if let Some(id) = self.state.ids.allocate() {
                    let slot =
                        PollerSlot::new(id, registration, local.registry.allocate_account_number());
                    record.lock_pollers().push(Arc::clone(&slot.record));
                    self.slots.insert(slot);
                }
            }
            let (thread, name, reactor) = (record.id, record.name.clone(), local.id);
            local.registry.record_event(now, Event::ThreadStarted { thread, name, reactor });
            // `arriving` is cleared afterwards: if a poller panics, the rest is attached in the
            // next iteration.
            self.attach_pollers(now, local);
            self.arriving = false;
            if let Some(first) = plan.first {
                self.run_message(Message::Call(first), now, local);
            }
        } else {
            if self.from != local.id {
                record.migrations.add(1);
                let (thread, name) = (record.id, record.name.clone());
                let event = Event::ThreadMigrated { thread, name, from: self.from, to: local.id };
                local.registry.record_event(now, event);
                self.from = local.id;
            }
            self.attach_pollers(now, local);
            self.arriving = false;
        }
        true
    }

    /// Whether it is detaching or has not fully arrived.
    pub(crate) fn is_migrating(&self) -> bool {
        self.detach_request.is_some() || self.arriving
    }

    /// The reactor it lives on, or lived on before the handover.
    pub(crate) fn current_reactor(&self) -> ReactorId {
        self.from
    }

    /// Attaches detached pollers and rebuilds the poll lists.
    pub(super) fn attach_pollers(&mut self, now: Instant, local: &mut ReactorLocal) {
        for slot in self.slots.iter_mut().filter(|slot| slot.detached) {
            local.accounting.begin_account(slot.number);
            (slot.detached, slot.is_draining) = (false, false);
            slot.poller.attach();
            // A poller may have prepared something that needs a flush.
            self.state.changes.push_back(DeferredCommand::Flush);
        }
        // Until the accounts are counted.
        local.accounting.has_several_accounts = true;
        self.slots.rebuild_lists(self.state.record.id, now, local);
    }

    /// Processes its pending request: leave, or cancel a departure.
    pub(crate) fn begin_or_cancel_departure(&mut self, now: Instant, local: &mut ReactorLocal) {
        let record = &self.state.record;
        let to = if record.is_end_requested() { None } else { Some(record.requested_reactor()) };
        self.detach_pollers(to, now, local);
    }

    /// Requests a migration, or the end. An end is final; a migration does not replace it. A
    /// migration to the current reactor cancels a departure.
    pub(crate) fn detach_pollers(
        &mut self,
        to: Option<ReactorId>,
        now: Instant,
        local: &mut ReactorLocal,
    ) {
        if self.detach_request.is_some_and(|leaving| leaving.to.is_none()) {
            return;
        }
        if to != Some(local.id) {
            self.detach_request = Some(DetachRequest { to, since: now });
            local.has_migrations = true;
        } else if self.detach_request.take().is_some() {
            self.mark_for_attach();
            local.has_migrations = true;
        }
    }

    /// Marks all pollers for attaching at [arrival](Self::attach_on_arrival), including those that have not
    /// detached: they start no new I/O.
    fn mark_for_attach(&mut self) {
        self.slots.iter_mut().for_each(|slot| slot.detached = true);
        self.arriving = true;
    }

    /// Requests all of its pollers to detach. A detached poller is called again as long as others are
    /// not, since a message may have brought it new work.
    pub(crate) fn request_poller_detach(
        &mut self,
        now: Instant,
        local: &mut ReactorLocal,
    ) -> DetachProgress {
        let Some(DetachRequest { to, since }) = self.detach_request else {
            return DetachProgress::NotRequested;
        };
        let parting = if to.is_some() { DetachReason::Migrating } else { DetachReason::Exiting };
        let mut holds_on = None;
        for slot in self.slots.iter_mut() {
            local.accounting.begin_account(slot.number);
            slot.detached = slot.poller.try_detach(parting);
            slot.is_draining = !slot.detached;
            if !slot.detached && holds_on.is_none() {
                holds_on = Some(slot.id);
            }
        }
        self.slots.rebuild_lists(self.state.record.id, now, local);
        let Some(id) = holds_on else {
            return to.map_or(DetachProgress::Exit, DetachProgress::Migrate);
        };
        let waited = now.since(since);
        if waited < local.drain_max {
            return DetachProgress::Pending;
        }
        // After the time limit a migration is canceled, but an exit proceeds.
        match to {
            Some(to) => {
                self.state.record.cancel_migration(to, local.id);
                self.cancel_migration(id, waited, now, local);
                DetachProgress::NotRequested
            }
            None => DetachProgress::Exit,
        }
    }

    /// Cancels a migration after its time limit.
    fn cancel_migration(
        &mut self,
        id: PollerId,
        after: Span,
        now: Instant,
        local: &mut ReactorLocal,
    ) {
        let poller = self.poller_name(id).unwrap_or_default();
        let (thread, name) = (self.state.record.id, self.state.record.name.clone());
        local.registry.record_event(now, Event::MigrationTimeout { thread, name, poller, after });
        self.detach_request = None;
        // If one of them panics, the others are attached in the next iteration.
        self.mark_for_attach();
        self.attach_pollers(now, local);
        self.arriving = false;
    }

    /// Prepares the handover to the reactor `to`. All of its pollers are detached.
    pub(crate) fn prepare_handover(
        &mut self,
        to: ReactorId,
        now: Instant,
        local: &mut ReactorLocal,
    ) {
        self.close_unused_and_publish(now, local);
        self.detach_request = None;
        self.arriving = true;
        self.state.record.set_current_reactor(to);
    }

    /// Ends the thread: closes channels, drops pollers and then messages.
    pub(crate) fn close_and_drop(&mut self, now: Instant, local: &mut ReactorLocal) {
        let holds_on = self.slots.iter().find(|slot| !slot.detached);
        let cut_off = holds_on.map(|slot| slot.name().to_owned());
        local.accounting.begin_account(self.state.number);
        while let Some(id) = self.slots.any_poller_id() {
            self.remove_poller(id, now, local);
        }
        while let Some(open) = self.state.channels.take_any_channel() {
            self.close_channel(open, now, local);
        }
        let (thread, name) = (self.state.record.id, self.state.record.name.clone());
        local
            .registry
            .record_event(now, Event::ThreadEnded { thread, name, dropped_poller: cut_off });
    }
}
