//! Threads that doze: nobody asks them anything until there is something for one of them.
//!
//! A reactor that serves a thousand idle connections wakes for one of them, and to poll the others,
//! to disarm them and to arm them again costs more than what it has woken for. So a thread all of
//! whose pollers [say that it may](crate::Poller::may_doze) stays armed when its reactor sleeps, and
//! is put aside. It gets up when
//!
//! - somebody rings for it, with a message or without: [`host::Doze`] is how that is noticed;
//! - a descriptor of one of its pollers is ready: at the end of a sleep the kernel says so, and a
//!   reactor that does not sleep asks for it every other millisecond ([`Wait::Look`](host::Wait));
//! - the time comes that one of its pollers has named, or a timer;
//! - an order is for it, or nobody sleeps here any more.
//!
//! ```text
//!   idle:   those who may: begin to doze → announce → arm: each is looked at once more
//!           nothing anywhere → those who may still are put aside → block
//!   turn:   called? due? → whoever it is for gets up: disarmed, and polled in this turn
//! ```

use std::collections::{BTreeMap, BTreeSet};

use base::Instant;

use super::{PUBLISH, Reactor};
use crate::directory::ThreadId;
use crate::spell::PollMode;
use crate::thread::LightThread;

/// Those who doze, and what each of them waits for.
#[derive(Default)]
pub(super) struct Dormitory {
    dozers: BTreeMap<ThreadId, Dozer>,
    /// By the numbers of pollers with a descriptor.
    ears: BTreeMap<u64, ThreadId>,
    alarms: BTreeSet<(Instant, ThreadId)>,
}

struct Dozer {
    thread: LightThread,
    wake_at: Instant,
}

impl Dormitory {
    pub(super) fn is_empty(&self) -> bool {
        self.dozers.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.dozers.len()
    }

    /// When the first of them wants to be polled even if nothing happens.
    pub(super) fn next_alarm(&self) -> Instant {
        self.alarms.first().map_or(Instant::NEVER, |(at, _)| *at)
    }

    fn put(&mut self, thread: LightThread, wake_at: Instant) {
        let id = thread.record().id;
        for number in thread.ears() {
            self.ears.insert(number, id);
        }
        if wake_at != Instant::NEVER {
            self.alarms.insert((wake_at, id));
        }
        self.dozers.insert(id, Dozer { thread, wake_at });
    }

    fn take(&mut self, id: ThreadId) -> Option<LightThread> {
        let Dozer { thread, wake_at } = self.dozers.remove(&id)?;
        for number in thread.ears() {
            self.ears.remove(&number);
        }
        self.alarms.remove(&(wake_at, id));
        Some(thread)
    }

    /// Whose descriptor has this token.
    fn heard(&self, token: u64) -> Option<ThreadId> {
        self.ears.get(&token).copied()
    }

    /// Those that somebody rang for.
    fn rung(&self) -> Vec<ThreadId> {
        let is_rung = |dozer: &&Dozer| dozer.thread.record().doze.is_rung();
        self.dozers.values().filter(is_rung).map(|dozer| dozer.thread.record().id).collect()
    }

    /// Whoever's time has come first, if it has.
    fn due(&self, now: Instant) -> Option<ThreadId> {
        self.alarms.first().filter(|(at, _)| *at <= now).map(|(_, id)| *id)
    }
}

impl Reactor {
    /// Before an announcement: whoever may doze begins to.
    pub(super) fn begin_dozing(&mut self, now: Instant) {
        self.guarded(now, |reactor| {
            let Self { threads, local, .. } = reactor;
            for thread in threads {
                if thread.may_doze(local) {
                    thread.record().doze.begin();
                }
            }
        });
    }

    /// After the last look, which found nothing: whoever has begun to doze, and may still, is put
    /// aside. Who does not hurry lingers.
    pub(super) fn put_aside(&mut self, now: Instant) {
        self.guarded(now, |reactor| {
            let Self { threads, local, dormitory, .. } = reactor;
            let mut index = 0;
            while let Some(thread) = threads.get_mut(index) {
                thread.choose_ears(local);
                if thread.record().doze.is_dozing() && thread.may_doze(local) {
                    let wake_at = thread.wake_at(now, local);
                    dormitory.put(threads.swap_remove(index), wake_at);
                } else {
                    index += 1;
                }
            }
            local.due = local.due.min(dormitory.next_alarm());
        });
    }

    /// Gets one up. It is still armed.
    pub(super) fn get_up(&mut self, id: ThreadId) -> bool {
        let Some(thread) = self.dormitory.take(id) else { return false };
        thread.record().doze.end();
        self.threads.push(thread);
        // Until somebody counts.
        self.local.watch.several = true;
        true
    }

    /// Gets one up while the reactor is awake.
    pub(super) fn rouse(&mut self, id: ThreadId, now: Instant) {
        if self.get_up(id) {
            self.guarded(now, |reactor| {
                let Self { threads, local, .. } = reactor;
                if let Some(thread) = threads.last_mut() {
                    thread.disarm(local);
                }
            });
        }
    }

    /// Gets those up for whom somebody rang.
    #[cold]
    pub(super) fn rouse_called(&mut self, now: Instant) {
        if self.local.bell.take_call() {
            self.dormitory.rung().into_iter().for_each(|id| self.rouse(id, now));
        }
    }

    /// Gets those up whose time has come.
    pub(super) fn rouse_due(&mut self, now: Instant) {
        while let Some(id) = self.dormitory.due(now) {
            self.rouse(id, now);
        }
    }

    /// Gets everybody up.
    pub(super) fn rouse_all(&mut self, now: Instant) {
        let all: Vec<_> = self.dormitory.dozers.keys().copied().collect();
        all.into_iter().for_each(|id| self.rouse(id, now));
    }

    /// The descriptors with these numbers have ended a sleep: their dozers get up, and are disarmed
    /// with all others.
    pub(super) fn hear(&mut self, ready: &[u64]) {
        for token in ready {
            if let Some(id) = self.dormitory.heard(*token) {
                self.get_up(id);
            }
        }
    }

    /// The descriptors with these numbers are ready, while it is awake.
    pub(super) fn overhear(&mut self, ready: &[u64]) {
        let now = self.last;
        for token in ready {
            if let Some(id) = self.dormitory.heard(*token) {
                self.rouse(id, now);
            }
        }
    }

    /// Whether descriptors are to be asked for those who doze: nobody has for a while.
    pub(super) fn wants_look(&mut self, now: Instant) -> bool {
        let is_due = self.asked != Instant::NEVER && now.since(self.asked) >= PUBLISH;
        if is_due || self.asked == Instant::NEVER {
            self.asked = now;
        }
        is_due && !self.dormitory.is_empty()
    }

    /// Whether threads may doze on a reactor that polls in this way. One that never sleeps never puts
    /// anybody aside, and looks at everybody in every turn.
    pub(super) fn lets_doze(mode: PollMode) -> bool {
        mode != PollMode::Always
    }
}
