//! Going to sleep, and why nothing can be forgotten by one who sleeps.
//!
//! ```text
//!   idle:   nothing found for a spell; every poller says until when it can wait → Until(deadline)
//!   loop:   announce: asleep = true, then the heavy half of a barrier
//!   arm:    inbox? mailboxes? every poller: make the source ready, and look once more; deadlines?
//!           anything there → cancel the sleep
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

/// A deadline as near as this is not slept for.
const NEAR: Span = Span::from_us(10);

impl Reactor {
    /// What to do after a turn that found nothing, when the spell is over.
    #[cold]
    pub(super) fn idle(&mut self, now: Instant) -> Wait {
        if self.spell.wants_rest() {
            let latency = self.guarded(now, |reactor| reactor.expected_latency()).flatten();
            let rest = self.spell.rest(now, latency);
            self.spell.extend(now.after(rest.unwrap_or_default()));
            self.slept = rest.is_some();
            return rest.map_or(Wait::Again, Wait::Pause);
        }
        if self.local.attention || self.threads.iter().any(|thread| thread.is_sleepless()) {
            self.spell.extend(now);
            return Wait::Again;
        }
        let deadline = self.guarded(now, Self::deadline).unwrap_or(now);
        if deadline <= now.after(NEAR) {
            return Wait::Again;
        }
        self.publish();
        self.promised = deadline;
        Wait::Until(deadline)
    }

    /// The earliest moment at which a timer or a poller wants to be called.
    fn deadline(&mut self) -> Instant {
        let local = &mut self.local;
        let moments = self.threads.iter().map(|thread| thread.wake_at(local));
        moments.min().unwrap_or(Instant::NEVER)
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
                || reactor.threads.iter_mut().any(|thread| thread.arm(local))
                || reactor.deadline() < reactor.promised
        });
        if stays.unwrap_or(true) {
            // Not at once again: announcing costs a microsecond.
            self.spell.extend(now);
            return true;
        }
        let record = &self.local.record;
        record.sleeps.add(1);
        record.asleep.store(true, Ordering::Relaxed);
        self.slept = true;
        false
    }

    pub(super) fn disarm_all(&mut self) {
        let now = self.last;
        self.guarded(now, |reactor| {
            let local = &mut reactor.local;
            reactor.threads.iter_mut().for_each(|thread| thread.disarm(local));
        });
        let record = &self.local.record;
        if record.asleep.load(Ordering::Relaxed) {
            record.asleep.store(false, Ordering::Relaxed);
            record.wakes.add(1);
        }
    }
}
