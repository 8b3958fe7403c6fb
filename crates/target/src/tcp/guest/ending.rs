//! How a connection ends, and by when what has to be done.

use base::{Broken, Instant, Span};
use tcp::{Cause, Connection, Place};

use super::{Guest, Role};
use crate::tcp::news::{News, Reason};
#[cfg(test)]
use crate::tcp::plant::{Plant, is_planted};
use crate::tcp::rooms::{Fault, Untaken};

/// What a host owes for the longest.
#[derive(Clone, Copy, Debug)]
pub(super) struct Debt {
    /// When it was asked for, and for how many commands at that time.
    asked_at: Instant,
    count: usize,
    /// Since when nothing of that has come to its end.
    since: Instant,
}

/// How many times as long a host may owe what others wait for.
const DEBT_PATIENCE: u64 = 4;

/// Looks at what a host leaves untaken in the time that it is given for it.
const LOOKS_PATIENT: u8 = 8;

impl Guest {
    /// The end has ended by itself.
    #[cold]
    pub(super) fn line_ended(&mut self, now: Instant, cause: Cause) {
        let reason = match cause {
            Cause::Refused(refusal) => Reason::Refused(refusal.to_string()),
            Cause::Terminated(refusal) => Reason::Terminated(refusal.to_string()),
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
        if self.owes_for_too_long(now) {
            return self.end_for(now, Reason::TooSlow("send what it was asked for"));
        }
        if self.debt.is_some() {
            self.watch_untaken(now);
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

impl Guest {
    /// Whether all data of a command that was asked for first have been owed for too long, since they
    /// were asked for or those of another came to their end. Bytes are not counted: a host has to end
    /// what it began. While others wait for its memory it has four times as long at most, however
    /// many commands it ends meanwhile.
    fn owes_for_too_long(&mut self, now: Instant) -> bool {
        #[cfg(test)]
        if is_planted(Plant::Renewed) {
            return false;
        }
        let patience = self.service.limits().patience;
        let Some((asked_at, count)) = self.rooms.owed_since() else {
            self.debt = None;
            return false;
        };
        let since = match self.debt {
            Some(debt) if (debt.asked_at, debt.count) == (asked_at, count) => debt.since,
            Some(debt) if debt.asked_at == asked_at && debt.count < count => debt.since,
            Some(_) => now,
            None => asked_at,
        };
        self.debt = Some(Debt { asked_at, count, since });
        let most = Span { ns: patience.ns * DEBT_PATIENCE };
        now >= since.after(patience) || now >= asked_at.after(most) && self.rooms.is_missed()
    }
}
