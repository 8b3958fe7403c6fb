//! What a connection waits for while its thread sleeps.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use base::{Instant, Span, WakeSource};
use reactor::WokenBy;
use tcp::Connection;

use super::{Guest, Role};
use crate::tcp::io::Io;
use crate::tcp::news::Reason;
use crate::tcp::poller::Bed;
use crate::tcp::seat::Seat;

impl Guest {
    /// It may sleep, on what is returned.
    pub(in crate::tcp) fn make_bed(&mut self) -> io::Result<WokenBy> {
        let source =
            self.stream.as_ref().map_or(WakeSource::Nothing, |stream| stream.wake_source());
        let bed = Bed::new(source)?;
        let woken_by = bed.woken_by()?;
        self.bed = Some(bed);
        Ok(woken_by)
    }

    pub(in crate::tcp) fn bed_and_queue(&mut self) -> (Option<&mut Bed>, Option<&mut Io>) {
        let io = match &mut self.role {
            Role::Io(io) => Some(&mut **io),
            _ => None,
        };
        (self.bed.as_mut(), io)
    }

    /// Nothing will be needed for a while.
    pub(in crate::tcp) fn rest(&mut self) {
        self.rooms.purse().tidy();
        if let Role::Io(io) = &mut self.role {
            io.tell(self.worked_at);
        }
    }

    /// Has the stream signal. True if something is there already.
    pub(in crate::tcp) fn arm_stream(&mut self) -> bool {
        let wants_bytes = self.next_event == self.events.as_slice().len();
        let wants_room = self.outgoing.is_blocked() || self.outgoing.is_read();
        self.stream.as_mut().is_some_and(|stream| stream.arm(wants_bytes, wants_room))
    }

    /// Whether only its socket, a call and the clock bring it on, and all of them are heard. To be asked
    /// once its stream has been armed.
    pub(in crate::tcp) fn is_quiet(&self) -> bool {
        let hears_all = self.bed.as_ref().is_some_and(Bed::hears_all)
            && self.stream.as_ref().is_some_and(|stream| stream.is_heard());
        hears_all && self.waits_for_nobody()
    }

    /// Whether nothing is under way, and nothing is waited for that a neighbour would bring, who rings
    /// nobody: memory for data, or for what comes.
    pub(in crate::tcp) fn waits_for_nobody(&self) -> bool {
        let is_idle = match &self.role {
            Role::Io(io) => io.is_idle() && !io.queue_wants_turn(),
            Role::Stranger | Role::Admin(_) | Role::Discovery(_) => true,
            Role::Gone => false,
        };
        let waits_for_memory =
            self.rooms.has_waiting() || self.next_event < self.events.as_slice().len();
        let is_sending = self.outgoing.is_blocked() || self.outgoing.is_read();
        is_idle && !waits_for_memory && !is_sending && self.reason.is_none()
    }

    /// Whether nobody hurries: it is an admin queue on which a host says that it is there.
    pub(in crate::tcp) fn is_in_no_hurry(&self) -> bool {
        matches!(&self.role, Role::Admin(admin) if admin.is_only_kept_alive())
    }

    /// The thread looks by itself again.
    pub(in crate::tcp) fn awake(&mut self) {
        if let Some(stream) = &mut self.stream {
            stream.disarm();
        }
        if let Role::Io(io) = &mut self.role {
            io.queue().disarm();
        }
        self.looks.now();
    }

    /// Whether there is something to be sent that was not tried yet.
    #[inline]
    pub(in crate::tcp) fn has_unsent(&self) -> bool {
        self.stream.is_some()
            && !self.outgoing.is_blocked()
            && (self.end.has_more() || self.outgoing.has_unsent(&self.end))
    }

    /// Whether only further turns bring it on.
    pub(in crate::tcp) fn is_behind(&self) -> bool {
        let wants_turn = match &self.role {
            Role::Admin(admin) => admin.wants_turn(),
            Role::Io(io) => self.reason.is_some() && io.is_drained(),
            Role::Stranger | Role::Discovery(_) | Role::Gone => false,
        };
        wants_turn || self.rooms.can_go_on() || self.seat.is_called() || self.is_over()
    }

    /// Gets ready to go to another thread. True once nothing of it is this thread's: its stream has let
    /// go, and no medium works for it. One whose stream stays goes on as if nobody had asked.
    pub(in crate::tcp) fn may_move(&mut self) -> bool {
        let is_idle = match &self.role {
            Role::Io(io) => io.is_idle(),
            Role::Stranger | Role::Admin(_) | Role::Discovery(_) | Role::Gone => true,
        };
        // One that is over goes when its media and the kernel have let go of its memory.
        let has_let_go = self.is_drained() && self.farewell.is_none();
        let Some(stream) = &mut self.stream else { return has_let_go };
        self.is_travelling = !stream.is_tied();
        is_idle && stream.let_go()
    }

    /// Every block of memory that its commands have, or could have next.
    pub(in crate::tcp) fn each_block(&self, put: &mut dyn FnMut(Range<u32>)) {
        self.rooms.each_block(put);
    }

    /// Since when its host has owed data for the longest.
    pub(in crate::tcp) fn owed_since(&self) -> Option<Instant> {
        self.rooms.owed_since().map(|(since, _)| since)
    }

    /// Whether other hosts wait for what its commands have.
    pub(in crate::tcp) fn is_missed(&self) -> bool {
        self.rooms.is_missed()
    }

    /// Whose I/O queue it is, if it is one.
    pub(in crate::tcp) fn io_host(&self) -> Option<&str> {
        match &self.role {
            Role::Io(io) => Some(&io.association().host.nqn),
            _ => None,
        }
    }

    /// It has come to its thread.
    pub(in crate::tcp) fn arrive(&mut self) {
        self.is_travelling = false;
        self.looks.now();
    }

    /// Has it end because its thread does.
    pub(in crate::tcp) fn leave(&mut self) {
        if self.reason.is_none() {
            self.end_for(self.worked_at, Reason::ServerEnds);
        }
        self.close(self.worked_at);
    }

    pub(in crate::tcp) fn worked_at(&self) -> Instant {
        self.worked_at
    }

    pub(in crate::tcp) fn seat(&self) -> &Arc<Seat> {
        &self.seat
    }

    /// When to look again even if nothing happens.
    pub(in crate::tcp) fn next_deadline(&self) -> Instant {
        let role = match &self.role {
            Role::Admin(admin) => admin.wake_at(),
            Role::Io(io) => io.wake_at(),
            Role::Discovery(discovery) => discovery.wake_at(),
            Role::Stranger | Role::Gone => Instant::NEVER,
        };
        self.deadline().min(role).min(self.next_release())
    }

    /// What is under way takes so long on average.
    pub(in crate::tcp) fn latency(&self) -> Option<Span> {
        match &self.role {
            Role::Io(io) => io.expected_latency(),
            _ => None,
        }
    }

    /// When something is to be looked after.
    #[inline]
    pub(in crate::tcp) fn deadline(&self) -> Instant {
        let blocked = match self.blocked_since {
            Some(since) => since.after(self.service.limits().patience),
            None => Instant::NEVER,
        };
        self.end.deadline().min(self.connect_by).min(blocked).min(self.debts_check)
    }
}
