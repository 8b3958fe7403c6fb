//! How a connection ends, and by when what has to be done.

use base::{Broken, Instant, Span};
use tcp::{Cause, Connection, Place};

use super::{Guest, Role};
use crate::tcp::news::{News, Reason};
use crate::tcp::rooms::{Fault, Untaken};

/// Looks at what a host leaves untaken in the time that it is given for it.
const LOOKS_PATIENT: u8 = 8;

impl Guest {
    /// The end has ended by itself.
    #[cold]
    pub(super) fn line_ended(&mut self, now: Instant, cause: Cause) {
        let reason = match cause {
            Cause::Refused(refusal) => Reason::Refused(refusal_text(refusal)),
            Cause::Terminated(refusal) => Reason::Terminated(refusal_text(refusal)),
            Cause::TerminatedUnsoundly => {
                Reason::Terminated("by a request that makes no sense".to_owned())
            }
            Cause::NotOpened => Reason::TooSlow("open its connection"),
            Cause::Stalled => Reason::TooSlow("send a unit that it had begun"),
            Cause::Closed | Cause::Cut => Reason::Closed,
        };
        self.end_for(now, reason);
    }

    /// Its end could not do what it was asked to: a mistake of ours, of which nobody else is to notice
    /// anything.
    #[cold]
    pub(super) fn faulted(&mut self, now: Instant, fault: Fault) {
        let Fault { tag, command, why } = fault;
        let opcode = command.opcode();
        self.end_for(now, Reason::Internal(format!("command {tag}, opcode {opcode:02x}h: {why}")));
    }

    /// A buffer does not lie in the budget's region: a mistake of ours.
    #[cold]
    pub(super) fn misplaced(&mut self, now: Instant, place: Place) {
        let Place { tag, offset, len_bytes } = place;
        let what = format!("{len_bytes} bytes from {offset} of command {tag} lie nowhere");
        self.end_for(now, Reason::Internal(what));
    }

    /// Nothing comes any more.
    #[cold]
    pub(super) fn stream_ended(&mut self, why: Option<Broken>) {
        if let Some(Broken(text)) = why {
            self.reason.get_or_insert(Reason::Broken(text));
        }
        let rest = self.stream.as_ref().map_or(0, |stream| stream.bytes().len());
        self.reason.get_or_insert(Reason::Closed);
        self.end.receive_end(rest, &mut self.events);
        self.events.clear();
        (self.next_event, self.taken) = (0, 0);
    }

    /// It ends, for the first reason that was found.
    #[cold]
    pub(super) fn end_for(&mut self, now: Instant, reason: Reason) {
        self.reason.get_or_insert(reason);
        self.rooms.forsake();
        match &mut self.role {
            Role::Io(io) => io.stop(now),
            Role::Admin(admin) => admin.stop(),
            Role::Stranger | Role::Discovery(_) | Role::Gone => {}
        }
    }

    /// Its queue has stopped: the connection ends, unless the host waits for the answer to Disconnect.
    #[cold]
    pub(super) fn look_after_stopped(&mut self, now: Instant) {
        if let Role::Io(io) = &mut self.role
            && let Some(text) = io.next_report(now)
        {
            self.service.tell(News::Trouble(format!("{}: {text}", self.peer)));
        }
        if self.reason.is_none() && !self.ends_sent {
            self.end_for(now, Reason::AssociationEnded);
        }
    }

    /// Closes the stream, unless the peer is still being told why.
    #[cold]
    pub(super) fn close(&mut self, now: Instant) {
        // Nothing that has come and was not dealt with matters any more.
        self.events.clear();
        (self.next_event, self.taken) = (0, 0);
        self.rooms.forsake();
        match &mut self.role {
            Role::Io(io) => io.stop(now),
            Role::Admin(admin) => admin.stop(),
            Role::Stranger | Role::Discovery(_) | Role::Gone => {}
        }
        let is_telling = matches!(self.reason, Some(Reason::Refused(_))) && !self.end.is_over();
        if !is_telling {
            self.part(now);
        } else if self.end.is_spent()
            && let Some(stream) = &mut self.stream
        {
            stream.shut_down();
        }
        if self.stream.is_none() {
            self.leave_queue(now);
            self.rooms.give_back(self.farewell.is_some());
        }
    }

    /// Gives its queue back, if nobody works on anything of it.
    pub(super) fn leave_queue(&mut self, now: Instant) {
        match core::mem::replace(&mut self.role, Role::Gone) {
            Role::Io(io) if io.is_drained() => io.leave(now, &mut self.rooms),
            role => self.role = role,
        }
    }

    /// Whether nobody works on anything of it.
    pub(super) fn is_drained(&self) -> bool {
        match &self.role {
            Role::Io(_) => false,
            Role::Admin(admin) => admin.is_drained(),
            Role::Stranger | Role::Discovery(_) | Role::Gone => true,
        }
    }

    /// Ends what has taken too long.
    #[cold]
    pub(super) fn expire(&mut self, now: Instant) -> usize {
        if now >= self.connect_by {
            self.connect_by = Instant::NEVER;
            let waits = self.reason.is_none() && self.connect_again(now);
            if !waits {
                self.end_for(now, Reason::TooSlow("connect"));
            }
        }
        let patience = self.service.limits().patience;
        if self.blocked_since.is_some_and(|since| now >= since.after(patience)) {
            self.blocked_since = None;
            self.end_for(now, Reason::TooSlow("take what it asked for"));
        }
        if now >= self.debts_check {
            self.check_debts(now);
        }
        self.end.expired(now, &mut self.events);
        self.handle_events(now) + 1
    }

    /// Its stream has no room: it is looked, again and again, how long answers stay in memory.
    #[cold]
    pub(super) fn watch_untaken(&mut self, now: Instant) {
        self.debts_check = self.debts_check.min(now.after(self.interval()));
    }

    /// How often that is looked at.
    fn interval(&self) -> Span {
        Span { ns: self.service.limits().patience.ns / u64::from(LOOKS_PATIENT) }
    }

    /// Looks whether the host owes data for too long, or takes its answers too slowly.
    fn check_debts(&mut self, now: Instant) {
        self.debts_check = Instant::NEVER;
        let patience = self.service.limits().patience;
        // A host that sends something sends the rest in its turn.
        let since = self.rooms.owed_since().map(|since| since.max(self.brought_at));
        if let Some(until) = since.map(|since| since.after(patience)) {
            if now >= until {
                return self.end_for(now, Reason::TooSlow("send what it was asked for"));
            }
            self.debts_check = until;
        }
        match self.rooms.untaken(LOOKS_PATIENT) {
            Untaken::Nothing => {}
            Untaken::Some => self.watch_untaken(now),
            Untaken::TooLong => {
                self.end_for(now, Reason::TooSlow("take what it asked for, while others waited"));
            }
        }
    }
}

fn refusal_text(refusal: wire::tcp::Refusal) -> String {
    format!("{:?}, {:#x}", refusal.status, refusal.information)
}
