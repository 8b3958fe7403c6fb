//! The device's end of an I/O queue, in the thread that submits to it.

use std::sync::Arc;

use base::{Instant, Wake};

use crate::berth::{Berth, Closed, Order, Serving};
use crate::caches::Association;
use crate::exchange::Answered;
use crate::farewell::Farewell;
use crate::rings::Rings;
use crate::silence::Silence;
use crate::sleep::Sleep;

/// Carries the commands of one queue pair. [`push`](Self::push) follows whatever rings the doorbell,
/// [`pull`](Self::pull) comes before the completions are looked for.
pub(crate) struct Lane {
    berth: Arc<Berth>,
    /// The order that was obeyed last.
    obeyed: u32,
    serving: Option<Box<Serving>>,
    /// The last connection, whose memory is still read, and what is to be told when it is not.
    parting: Option<Box<(Farewell, Closed)>>,
    is_busy: bool,
    /// What the thread sleeps on knows of the connection.
    is_watched: bool,
    /// The last connection has ended by itself, and there is none yet after it.
    is_broken: bool,
    /// The controller that the last connection led to: what was answered came from it.
    association: Option<Arc<Association>>,
}

impl Lane {
    pub(crate) fn new(berth: Arc<Berth>) -> Self {
        let (is_busy, is_watched, is_broken) = (false, false, false);
        let (serving, parting) = (None, None);
        let association = None;
        Self { berth, obeyed: 0, serving, parting, is_busy, is_watched, is_broken, association }
    }

    /// Puts what has been submitted onto the connection.
    #[inline]
    pub(crate) fn push(&mut self) {
        // The doorbell first: it is put back only after an order that is then seen.
        let doorbell = self.serving.as_ref().map(|serving| serving.rings.doorbell());
        if self.berth.word() != self.obeyed {
            return self.obey();
        }
        let (Some(serving), Some(doorbell)) = (&mut self.serving, doorbell) else { return };
        if serving.rings.has_commands(doorbell) {
            if !self.is_busy {
                self.berth.begin();
                if self.berth.word() != self.obeyed {
                    return self.obey();
                }
                self.is_busy = true;
                serving.silence.begin();
            }
            if !serving.silence.is_asking() {
                serving.rings.take(doorbell, &mut serving.exchange);
            }
        }
        let Serving { rings, exchange, silence, .. } = &mut **serving;
        exchange.send(&mut |answered| answer(rings, silence, answered));
        if exchange.lost().is_some() {
            self.lose();
        }
    }

    /// Takes what has come and posts completions for it.
    #[inline]
    pub(crate) fn pull(&mut self, now: Instant) {
        if self.berth.word() != self.obeyed {
            return self.obey();
        }
        let Some(serving) = &mut self.serving else { return self.end_parting(now) };
        let Serving { rings, exchange, silence, .. } = &mut **serving;
        exchange.receive(now, &mut |answered| answer(rings, silence, answered));
        if now >= silence.next() {
            silence.look(now, exchange);
        }
        if now >= exchange.deadline() {
            exchange.expire(now);
        }
        if exchange.lost().is_some() {
            return self.lose();
        }
        if self.is_busy && exchange.outstanding() == 0 {
            self.is_busy = false;
            self.berth.end();
        }
    }

    /// Whether there is a connection.
    #[inline]
    pub(crate) fn is_connected(&self) -> bool {
        self.serving.is_some()
    }

    /// The controller that has answered what was pulled last.
    #[inline]
    pub(crate) fn association(&self) -> Option<&Association> {
        self.association.as_deref()
    }

    /// Whether the last connection has ended by itself.
    pub(crate) fn is_broken(&self) -> bool {
        self.is_broken
    }

    /// When it wants to turn even if nothing comes.
    pub(crate) fn wake_at(&self) -> Instant {
        match (&self.serving, &self.parting) {
            (Some(serving), _) if self.is_busy => {
                serving.exchange.deadline().min(serving.silence.next())
            }
            (Some(serving), _) => serving.exchange.deadline(),
            (None, Some(parting)) => parting.0.wake_at(),
            (None, None) => Instant::NEVER,
        }
    }

    #[cold]
    fn obey(&mut self) {
        let (order, number) = self.berth.take();
        self.obeyed = number;
        if let Some(parting) = &mut self.parting {
            // The berth is busy with what is over, so it can only be to close that.
            parting.1.lost = None;
            return;
        }
        self.is_busy = false;
        let before = self.serving.take();
        match order {
            Some(Order::Serve(serving)) => {
                // What it served before had nothing under way, or it would have been closed first.
                drop(before);
                self.association = Some(Arc::clone(&serving.association));
                self.serving = Some(serving);
                (self.is_watched, self.is_broken) = (false, false);
                self.berth.end();
            }
            Some(Order::Close) => {
                self.part(before, None);
            }
            None => self.berth.end(),
        }
    }

    /// The connection has ended by itself.
    #[cold]
    fn lose(&mut self) {
        let Some(serving) = self.serving.take() else { return };
        let lost = serving.exchange.lost().map(ToString::to_string);
        (self.is_busy, self.is_broken) = (false, true);
        self.part(Some(serving), lost);
    }

    /// Ends a connection, and says so as soon as nothing of it is read any more.
    fn part(&mut self, serving: Option<Box<Serving>>, lost: Option<String>) {
        // Whether anything was outstanding that would do harm if it were executed late.
        let may_linger = serving.as_ref().is_some_and(|it| it.exchange.may_linger(false));
        let closed = Closed { lost, may_linger };
        match serving.and_then(|serving| Farewell::begin(serving.exchange, may_linger)) {
            Some(farewell) => self.parting = Some(Box::new((farewell, closed))),
            None => self.berth.report(closed),
        }
    }

    /// Says that a connection is closed whose memory was still read.
    #[inline]
    fn end_parting(&mut self, now: Instant) {
        let parting = self.parting.take_if(|parting| parting.0.is_over(now));
        if let Some(parting) = parting {
            self.berth.report(parting.1);
        }
    }

    /// Who is woken by an order.
    pub(crate) fn wakes(&self, bell: Arc<dyn Wake + Send + Sync>) {
        self.berth.wakes(bell);
    }

    /// Has `sleep` wake for what comes from now on, and looks once more. True if there is something
    /// to do already, or it may come unnoticed.
    pub(crate) fn arm(&mut self, sleep: &mut dyn Sleep) -> bool {
        if self.berth.word() != self.obeyed {
            return true;
        }
        let Some(serving) = &mut self.serving else { return false };
        if !self.is_watched {
            self.is_watched = sleep.watch(serving.exchange.wake_source());
        }
        !self.is_watched
            || serving.exchange.arm()
            || serving.rings.has_commands(serving.rings.doorbell())
    }

    pub(crate) fn disarm(&mut self) {
        if let Some(serving) = &mut self.serving {
            serving.exchange.disarm();
        }
    }
}

/// Posts an answer, but for one that nobody waits for.
#[inline]
fn answer(rings: &mut Rings, silence: &Silence, answered: Answered) {
    if !silence.is_ours(answered.tag) {
        rings.answer(answered);
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        let serving = self.serving.take();
        self.part(serving, None);
        if let Some(parting) = self.parting.take() {
            self.berth.leave(*parting);
        }
    }
}
