//! The device's end of an I/O queue, in the thread that submits to it.

use std::sync::Arc;

use base::{Instant, Wake};

use crate::berth::{Berth, Closed, Order, Serving};
use crate::sleep::Sleep;

/// Carries the commands of one queue pair. [`push`](Self::push) follows whatever rings the doorbell,
/// [`pull`](Self::pull) comes before the completions are looked for.
pub(crate) struct Lane {
    berth: Arc<Berth>,
    /// The order that was obeyed last.
    obeyed: u32,
    serving: Option<Box<Serving>>,
    is_busy: bool,
    /// What the thread sleeps on knows of the connection.
    is_watched: bool,
    /// The last connection has ended by itself, and there is none yet after it.
    is_broken: bool,
}

impl Lane {
    pub(crate) fn new(berth: Arc<Berth>) -> Self {
        let (is_busy, is_watched, is_broken) = (false, false, false);
        Self { berth, obeyed: 0, serving: None, is_busy, is_watched, is_broken }
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
            }
            serving.rings.take(doorbell, &mut serving.exchange);
        }
        let Serving { rings, exchange } = &mut **serving;
        exchange.send(&mut |answered| rings.answer(answered));
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
        let Some(serving) = &mut self.serving else { return };
        let Serving { rings, exchange } = &mut **serving;
        exchange.receive(now, &mut |answered| rings.answer(answered));
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

    /// Whether the last connection has ended by itself.
    pub(crate) fn is_broken(&self) -> bool {
        self.is_broken
    }

    /// When it wants to turn even if nothing comes.
    pub(crate) fn wake_at(&self) -> Instant {
        let serving = self.serving.as_ref();
        serving.map_or(Instant::NEVER, |serving| serving.exchange.deadline())
    }

    #[cold]
    fn obey(&mut self) {
        let (order, number) = self.berth.take();
        self.obeyed = number;
        self.is_busy = false;
        let before = self.serving.take();
        match order {
            Some(Order::Serve(serving)) => {
                // What it served before had nothing under way, or it would have been closed first.
                drop(before);
                self.serving = Some(serving);
                (self.is_watched, self.is_broken) = (false, false);
                self.berth.end();
            }
            Some(Order::Close) => {
                let may_linger = before.is_some_and(part);
                self.berth.report(Closed { lost: None, may_linger });
            }
            None => self.berth.end(),
        }
    }

    /// The connection has ended by itself.
    #[cold]
    fn lose(&mut self) {
        let Some(serving) = self.serving.take() else { return };
        let lost = serving.exchange.lost().map(ToString::to_string);
        let may_linger = part(serving);
        (self.is_busy, self.is_broken) = (false, true);
        self.berth.report(Closed { lost, may_linger });
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

impl Drop for Lane {
    fn drop(&mut self) {
        let may_linger = self.serving.take().is_some_and(part);
        self.berth.report(Closed { lost: None, may_linger });
    }
}

/// Ends a connection. Whether anything was outstanding that would do harm if it were executed late:
/// then what the socket still holds is thrown away, which a mere close would have the kernel deliver.
fn part(mut serving: Box<Serving>) -> bool {
    let may_linger = serving.exchange.may_linger(false);
    if may_linger {
        serving.exchange.abandon();
    }
    may_linger
}
