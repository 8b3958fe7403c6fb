//! How a thread comes to a reactor and leaves it.

use std::sync::Arc;

use base::{Instant, Span};

use super::slots::Slot;
use super::{Change, LightThread};
use crate::directory::ReactorId;
use crate::event::Event;
use crate::message::Message;
use crate::poller::{Parting, PollerId};
use crate::reactor::Local;

/// A thread that is asked to let go of its OS thread.
#[derive(Clone, Copy)]
pub(super) struct Leaving {
    /// Where it goes; nowhere if it ends.
    to: Option<ReactorId>,
    since: Instant,
}

/// How far a thread has let go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Letting {
    /// Nobody asked it to.
    Stays,
    /// Some poller has something in flight.
    NotYet,
    /// It may go to this reactor.
    Goes(ReactorId),
    /// It may end.
    Ends,
}

impl LightThread {
    /// Begins to live on a reactor: makes its pollers if this is the first one, and attaches them.
    /// If one of them panics, it is to be called again. Returns whether there was anything to do.
    pub(crate) fn arrive(&mut self, now: Instant, local: &mut Local) -> bool {
        if !self.arriving {
            return false;
        }
        let record = Arc::clone(&self.desk.record);
        if let Some(plan) = self.plan.take() {
            record.started_ns.set(now.ns);
            for registration in plan.pollers {
                if let Some(id) = self.desk.ids.take() {
                    let slot = Slot::new(id, registration, local.directory.number());
                    record.pollers().push(Arc::clone(&slot.record));
                    self.slots.put(slot);
                }
            }
            let (thread, name, reactor) = (record.id, record.name.clone(), local.id);
            local.directory.note(now, Event::ThreadStarted { thread, name, reactor });
            self.attach(now, local);
            self.arriving = false;
            if let Some(first) = plan.first {
                self.run(Message::Call(first), now, local);
            }
        } else {
            if self.from != local.id {
                record.moves.add(1);
                let (thread, name) = (record.id, record.name.clone());
                let event = Event::ThreadMoved { thread, name, from: self.from, to: local.id };
                local.directory.note(now, event);
                self.from = local.id;
            }
            self.attach(now, local);
            self.arriving = false;
        }
        true
    }

    /// Whether it has been asked to leave, or has not quite arrived.
    pub(crate) fn is_travelling(&self) -> bool {
        self.leaving.is_some() || self.arriving
    }

    /// The reactor where it lives, or lived before it was handed on.
    pub(crate) fn from(&self) -> ReactorId {
        self.from
    }

    /// Attaches those pollers that are not, and sorts out who is polled.
    pub(super) fn attach(&mut self, now: Instant, local: &mut Local) {
        for slot in self.slots.iter_mut().filter(|slot| slot.detached) {
            local.watch.begin(slot.number);
            (slot.detached, slot.is_draining) = (false, false);
            slot.poller.attach();
            // It may begin with something to be made visible.
            self.desk.changes.push_back(Change::Flush);
        }
        // Until somebody counts.
        local.watch.several = true;
        self.slots.sort_out(self.desk.record.id, now, local);
    }

    /// Does what others want of it: leaves, or stays although it was going to leave.
    pub(crate) fn heed(&mut self, now: Instant, local: &mut Local) {
        let record = &self.desk.record;
        let to = if record.is_to_end() { None } else { Some(record.wanted()) };
        self.leave(to, now, local);
    }

    /// Asks it to go to another reactor, or to end. An end is final; a move does not take an end
    /// back. Asked to be where it is, it does not leave after all.
    pub(crate) fn leave(&mut self, to: Option<ReactorId>, now: Instant, local: &mut Local) {
        if self.leaving.is_some_and(|leaving| leaving.to.is_none()) {
            return;
        }
        if to != Some(local.id) {
            self.leaving = Some(Leaving { to, since: now });
            local.attention = true;
        } else if self.leaving.take().is_some() {
            self.expect_attach();
            local.attention = true;
        }
    }

    /// All of its pollers are attached when it [arrives](Self::arrive), also those that have not let
    /// go: they were told to begin nothing new.
    fn expect_attach(&mut self) {
        self.slots.iter_mut().for_each(|slot| slot.detached = true);
        self.arriving = true;
    }

    /// Asks all of its pollers to let go. One that has let go is asked again as long as others have
    /// not, since a message may have brought it something.
    pub(crate) fn let_go(&mut self, now: Instant, local: &mut Local) -> Letting {
        let Some(Leaving { to, since }) = self.leaving else { return Letting::Stays };
        let parting = if to.is_some() { Parting::Moves } else { Parting::Ends };
        let mut holds_on = None;
        for slot in self.slots.iter_mut() {
            local.watch.begin(slot.number);
            slot.detached = slot.poller.detach(parting);
            slot.is_draining = !slot.detached;
            if !slot.detached && holds_on.is_none() {
                holds_on = Some(slot.id);
            }
        }
        self.slots.sort_out(self.desk.record.id, now, local);
        let Some(id) = holds_on else { return to.map_or(Letting::Ends, Letting::Goes) };
        let waited = now.since(since);
        if waited < local.drain_max {
            return Letting::NotYet;
        }
        match to {
            Some(to) => {
                self.desk.record.give_up(to, local.id);
                self.stay(id, waited, now, local);
                Letting::Stays
            }
            None => Letting::Ends,
        }
    }

    /// Gives a move up.
    fn stay(&mut self, id: PollerId, after: Span, now: Instant, local: &mut Local) {
        let poller = self.poller_name(id).unwrap_or_default();
        let (thread, name) = (self.desk.record.id, self.desk.record.name.clone());
        local.directory.note(now, Event::MoveGivenUp { thread, name, poller, after });
        self.leaving = None;
        // If one of them panics, the others are attached next time.
        self.expect_attach();
        self.attach(now, local);
        self.arriving = false;
    }

    /// Gets ready to be handed to the reactor `to`. All of its pollers have let go.
    pub(crate) fn depart(&mut self, to: ReactorId, now: Instant, local: &mut Local) {
        self.keep_house(now, local);
        self.leaving = None;
        self.arriving = true;
        self.desk.record.set_home(to);
    }

    /// Ends: channels are closed, pollers and then messages are dropped.
    pub(crate) fn close(&mut self, now: Instant, local: &mut Local) {
        let holds_on = self.slots.iter().find(|slot| !slot.detached);
        let cut_off = holds_on.map(|slot| slot.name().to_owned());
        local.watch.begin(self.desk.number);
        while let Some(id) = self.slots.any() {
            self.remove(id, now, local);
        }
        while let Some(open) = self.desk.channels.take_any() {
            self.close_channel(open, now, local);
        }
        let (thread, name) = (self.desk.record.id, self.desk.record.name.clone());
        local.directory.note(now, Event::ThreadEnded { thread, name, cut_off });
    }
}
