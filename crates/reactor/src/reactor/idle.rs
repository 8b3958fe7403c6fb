//! Going to sleep, and why nothing can be forgotten by one who sleeps.
//!
//! ```text
//!   idle:   nothing found for a spell; every poller says until when it can wait → Until(deadline)
//!   loop:   announce: asleep = true, then the heavy half of a barrier
//!   arm:    inbox? mailboxes? every poller: make the source ready, and look once more; deadlines?
//!           anything there → cancel the sleep
//!           nothing → who may doze is put aside, armed as it is: see `dozing.rs`
//!   loop:   block until a bell, a descriptor or the deadline
//! ```
//!
//! There are four ways in which work reaches a sleeping reactor, and each is closed:
//!
//! - *An order or a message.* Whoever sends stores it, passes the light half of the barrier and then
//!   looks at the flag. Either it sees the flag and wakes the reactor, or what it stored can be seen
//!   by [`arm`](host::Turn::arm), which looks later than the heavy half. It rings the bell of the
//!   reactor where the thread lives; how that stays true while the thread moves is said at
//!   `ThreadRecord::ring`.
//! - *A rest* of hybrid mode is announced like a sleep, and ended by the same bells. Descriptors are
//!   not waited for: it is as long as what is in flight takes at least.
//! - *A device or a socket.* Each poller says what wakes it when it is registered, or is refused. Its
//!   `arm` asks for the signal first and looks second, so what comes between the two is seen, and
//!   what comes later signals. The descriptor is among the sources of the sleeper from the moment at
//!   which the poller is attached until it is detached. If it could not be put there, nobody sleeps.
//! - *Time.* The deadline is the earliest of all timers and of what every poller says. It is asked
//!   again in `arm`: should it have come nearer, the sleep is cancelled.
//! - *The reactor itself.* What a poller left for later (changes, a message that found no room, a
//!   thread that is on its way out) is looked at too, and keeps the reactor awake.

use std::sync::atomic::Ordering;

use base::{Instant, Span};
use host::Wait;

use super::Reactor;
use crate::spell::REST_MIN;
use crate::thread::LightThread;

/// A deadline as near as this is not slept for.
const NEAR: Span = Span::from_us(10);

impl Reactor {
    /// What to do after a turn that found nothing, when the spell is over.
    #[cold]
    pub(super) fn idle(&mut self, now: Instant) -> Wait {
        // Whatever becomes of this, the next turn wants to know the time: a deadline that is near
        // comes only for one who looks.
        self.looks = 0;
        if self.looks_out {
            return self.step_aside();
        }
        if self.spell.wants_rest() {
            let rest = self.rest(now);
            self.spell.extend(now.after(rest.unwrap_or_default()));
            self.slept = rest.is_some();
            return rest.map_or(Wait::Again, Wait::Pause);
        }
        if self.local.attention || self.threads.iter().any(|thread| thread.is_sleepless()) {
            self.spell.extend(now);
            return Wait::Again;
        }
        self.spell.set_useful(self.is_looking_useful());
        let deadline = self.guarded(now, |reactor| reactor.deadline(now)).unwrap_or(now);
        if deadline <= now.after(NEAR) {
            return Wait::Again;
        }
        self.publish(now);
        self.begin_dozing(now);
        self.promised = deadline;
        Wait::Until(deadline)
    }

    /// Whether it is any use to look for work before it is announced. It is asked before every sleep,
    /// not when pollers come and go: a sleep too soon, or a spell too many, is of no account.
    fn is_looking_useful(&self) -> bool {
        let counts = self.threads.iter().map(LightThread::looking);
        let (active, looking) =
            counts.fold((0, 0), |sum, (active, looking)| (sum.0 + active, sum.1 + looking));
        active == 0 || looking > 0
    }

    /// The rest that is due now in hybrid mode. No deadline is rested over, nobody who travels, and
    /// no message: it ends the rest.
    fn rest(&mut self, now: Instant) -> Option<Span> {
        let expects = |reactor: &mut Self| (reactor.expected_latency(), reactor.deadline(now));
        let (latency, deadline) = self.guarded(now, expects)?;
        let rest = self.spell.rest(now, latency)?.min(deadline.since(now));
        (rest >= REST_MIN && !self.local.attention).then_some(rest)
    }

    /// Whether there is something for which nobody rang, because this did not sleep.
    pub(super) fn has_messages(&self) -> bool {
        let is_wanted = |thread: &LightThread| thread.is_wanted();
        !self.inbox.is_empty() || self.local.bell.is_called() || self.threads.iter().any(is_wanted)
    }

    /// The earliest moment at which a timer or a poller wants to be called.
    fn deadline(&mut self, now: Instant) -> Instant {
        let local = &mut self.local;
        let moments = self.threads.iter_mut().map(|thread| thread.wake_at(now, local));
        moments.min().unwrap_or(Instant::NEVER).min(self.dormitory.next_alarm())
    }

    fn expected_latency(&mut self) -> Option<Span> {
        let local = &mut self.local;
        self.threads.iter().filter_map(|thread| thread.expected_latency(local)).min()
    }

    /// Looks once more at everything. True if there is work, or may be.
    pub(super) fn arm_all(&mut self, now: Instant) -> bool {
        let stays = self.guarded(now, |reactor| {
            let local = &mut reactor.local;
            !reactor.inbox.is_empty()
                || local.bell.is_called()
                || reactor.threads.iter_mut().any(|thread| thread.arm(local))
                || reactor.deadline(now) < reactor.promised
        });
        if stays.unwrap_or(true) {
            // Not at once again: announcing costs a microsecond.
            self.spell.extend(now);
            return true;
        }
        self.put_aside(now);
        let record = &self.local.record;
        record.sleeps.add(1);
        record.asleep.store(true, Ordering::Relaxed);
        self.slept = true;
        self.armed = now;
        false
    }

    /// The sleep is over, or did not take place. The descriptors with these numbers have ended it.
    pub(super) fn disarm_all(&mut self, ready: &[u64]) {
        if !ready.is_empty() {
            self.hear(ready);
            let now = self.local.watch.now();
            let slept = now.since(self.armed);
            let local = &mut self.local;
            self.threads.iter_mut().for_each(|thread| thread.woken(ready, slept, now, local));
        }
        let now = self.last;
        self.guarded(now, |reactor| {
            let local = &mut reactor.local;
            reactor.threads.iter_mut().for_each(|thread| thread.disarm(local));
        });
        let record = &self.local.record;
        if record.asleep.load(Ordering::Relaxed) {
            record.asleep.store(false, Ordering::Relaxed);
            record.wakes.add(1);
            self.asked = Instant::NEVER;
        }
    }
}
