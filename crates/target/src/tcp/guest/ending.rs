//! How a connection ends, and by when what has to be done.

use base::{Broken, Instant};
use tcp::{Cause, Connection};

use super::{Guest, Role};
use crate::tcp::news::Reason;

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
            Role::Admin(admin) => admin.stop(now),
            Role::Stranger | Role::Discovery(_) | Role::Gone => {}
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
            Role::Admin(admin) => admin.stop(now),
            Role::Stranger | Role::Discovery(_) | Role::Gone => {}
        }
        let is_telling = matches!(self.reason, Some(Reason::Refused(_))) && !self.end.is_over();
        if !is_telling {
            self.stream = None;
        } else if self.end.is_spent()
            && let Some(stream) = &mut self.stream
        {
            stream.shut_down();
        }
        if self.stream.is_none() {
            self.leave_queue(now);
            self.rooms.give_back();
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
            self.end_for(now, Reason::TooSlow("connect"));
        }
        let patience = self.service.limits().patience;
        if self.blocked_since.is_some_and(|since| now >= since.after(patience)) {
            self.blocked_since = None;
            self.end_for(now, Reason::TooSlow("take what it asked for"));
        }
        if now >= self.owed_check {
            // A host that sends something sends the rest in its turn.
            let since = self.rooms.owed_since().map(|since| since.max(self.brought_at));
            let until = since.map(|since| since.after(patience));
            self.owed_check = until.unwrap_or(Instant::NEVER);
            if now >= self.owed_check {
                self.owed_check = Instant::NEVER;
                self.end_for(now, Reason::TooSlow("send what it was asked for"));
            }
        }
        self.end.expired(now, &mut self.events);
        self.handle_events(now) + 1
    }
}

fn refusal_text(refusal: wire::tcp::Refusal) -> String {
    format!("{:?}, {:#x}", refusal.status, refusal.information)
}
