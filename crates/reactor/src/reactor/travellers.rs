//! Threads that come, go or end.

use base::Instant;

use super::Reactor;
use crate::directory::{Order, ThreadId};
use crate::refused::Refused;
use crate::thread::{Letting, LightThread};

impl Reactor {
    /// Takes a thread in. One that has to stop lets go of it at once.
    pub(super) fn adopt(&mut self, mut thread: LightThread, now: Instant) {
        if self.local.id != thread.from() {
            self.local.record.moves.add(1);
        }
        if self.stopping {
            thread.leave(None, now, &mut self.local);
        } else {
            // What was ordered while it was on its way may have gone where it was not.
            thread.heed(now, &mut self.local);
        }
        self.threads.push(thread);
        self.local.attention = true;
    }

    /// Has a thread look at what is wanted of it. If it is not here (any more), the reactor that takes
    /// it in does so.
    pub(super) fn heed(&mut self, thread: ThreadId, now: Instant) {
        self.rouse(thread, now);
        let mut threads = self.threads.iter_mut();
        if let Some(thread) = threads.find(|candidate| candidate.record().id == thread) {
            thread.heed(now, &mut self.local);
        }
    }

    pub(super) fn stop(&mut self, now: Instant) {
        (self.stopping, self.has_aside) = (true, true);
        self.rouse_all(now);
        self.local.attention = true;
        for thread in &mut self.threads {
            thread.leave(None, now, &mut self.local);
        }
    }

    /// Lets those arrive who come, and sees off those who go. Returns whether anybody did.
    #[cold]
    pub(super) fn mind_travellers(&mut self, now: Instant) -> bool {
        let mut travelled = false;
        let mut index = 0;
        while let Some(thread) = self.threads.get_mut(index) {
            travelled |= thread.arrive(now, &mut self.local);
            match thread.let_go(now, &mut self.local) {
                Letting::Stays | Letting::NotYet => index += 1,
                Letting::Goes(to) => {
                    travelled = true;
                    let mut thread = self.threads.remove(index);
                    thread.depart(to, now, &mut self.local);
                    self.parting.push((to, Box::new(thread)));
                }
                Letting::Ends => {
                    travelled = true;
                    thread.close(now, &mut self.local);
                    self.threads.remove(index);
                }
            }
        }
        let waiting = self.parting.len();
        self.hand_on(now);
        // One that stops may end after this.
        travelled |= self.parting.len() < waiting;
        travelled |= self.send_strays();
        // Books that are due tell who shares the reactor now.
        self.publish_at = now;
        self.local.due = now;
        let leaving = self.threads.iter().any(|thread| thread.is_travelling());
        let waits = !self.parting.is_empty() || !self.strays.is_empty();
        self.local.attention = leaving || waits;
        travelled
    }

    /// Sends what ended threads have left behind, as far as there is room. Returns whether there was
    /// any.
    fn send_strays(&mut self) -> bool {
        let waiting = std::mem::take(&mut self.strays);
        let count = waiting.len();
        for (to, message) in waiting {
            if let Err(message) = to.send(message)
                && !to.is_gone()
            {
                self.strays.push((to, message));
            }
        }
        let sent = self.strays.len() < count;
        self.strays.append(&mut self.local.directory.take_strays());
        sent
    }

    /// Hands those who go to their new reactors. Whom there is no room for waits for the next turn,
    /// and this reactor stays awake for that; whose reactor has stopped comes back.
    fn hand_on(&mut self, now: Instant) {
        for (to, thread) in std::mem::take(&mut self.parting) {
            match self.local.directory.order(to, Order::Adopt(thread)) {
                Err((Refused::Stopped(_), Order::Adopt(thread))) => {
                    thread.record().set_home(self.local.id);
                    thread.record().give_up(to, self.local.id);
                    self.adopt(*thread, now);
                }
                Err((_, Order::Adopt(thread))) => self.parting.push((to, thread)),
                _ => {}
            }
        }
    }
}
