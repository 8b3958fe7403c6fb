//! The threads of devices: they turn while there is work, and sleep when there is none.
//!
//! ```text
//!   turn ──▶ nothing for a spell ──▶ announce ──▶ look once more ──▶ sleep
//!    ▲                                                │ work          │ a doorbell, a register,
//!    └────────────────────────────────────────────────┴───────────────┘ a medium, a timer
//! ```
//!
//! The host stores its doorbell and then looks whether the thread has announced that it sleeps; the
//! thread announces it and then looks at the doorbells. The barrier between the two is paid by the
//! one who sleeps (see [`host::bell`]).

use base::{Instant, Interrupts, Span};
use ctrl::front::Wait as Rest;
use host::{Bell, Clock, EventVectors, Sleeper, Sources, Stop, Thread, Turn, Wait};
use reactor::{PollMode, Spell};

use super::device::EmulatedSsd;
use crate::Refused;

/// A thread that turns some SSDs. Dropping it ends the thread.
pub(super) struct DeviceThread {
    thread: Option<Thread<()>>,
    bell: Bell,
}

/// A thread to be, with a bell that wakes it: the hosts of its SSDs have to know that before it
/// starts.
pub(super) struct Shift {
    ssds: Vec<EmulatedSsd>,
    sleeper: Sleeper,
}

/// What the thread turns.
pub(super) struct OnShift<I: Interrupts = EventVectors> {
    ssds: Vec<EmulatedSsd<I>>,
    stop: Stop,
    gives_way: bool,
    sources: Sources,
    /// A medium's descriptor could not be waited for, so nothing may be slept on.
    is_deaf: bool,
    spell: Spell,
    /// Until when nothing is going to happen by itself, as of the last turn.
    until: Instant,
    /// Turns between two looks at the clock.
    turns: u32,
}

/// Turns between two looks at the clock: a turn takes well under a microsecond.
const TURNS_PER_LOOK: u32 = 16;

/// The kernel wakes about so late: a deadline is awaited awake from so long before it.
const LEAD: Span = Span::from_us(100);

impl Shift {
    pub(super) fn new() -> Result<Self, Refused> {
        let sleeper = Sleeper::new().map_err(|error| {
            Refused::machine(format!("make a bell for a device's thread: {error}"))
        })?;
        Ok(Self { ssds: Vec::new(), sleeper })
    }

    pub(super) fn bell(&self) -> Bell {
        self.sleeper.bell()
    }

    pub(super) fn push(&mut self, ssd: EmulatedSsd) {
        self.ssds.push(ssd);
    }

    /// Starts thread number `index`, on `core` if that can be.
    pub(super) fn start(
        self,
        index: usize,
        core: Option<u32>,
        gives_way: bool,
        clock: Clock,
    ) -> Result<DeviceThread, Refused> {
        let Self { ssds, mut sleeper } = self;
        let (bell, name) = (sleeper.bell(), format!("device-{index}"));
        let body = move |stop: &Stop| {
            let mut on_shift = OnShift::new(ssds, stop.clone(), gives_way, sleeper.sources());
            host::turn::run(&mut on_shift, &clock, &mut sleeper);
        };
        let thread = Thread::spawn(&name, core, body)
            .map_err(|error| Refused::machine(format!("start thread {name}: {error}")))?;
        Ok(DeviceThread { thread: Some(thread), bell })
    }
}

impl Drop for DeviceThread {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            thread.stop_flag().stop();
            self.bell.ring();
            // Its own drop waits for the end.
            drop(thread);
        }
    }
}

impl<I: Interrupts> OnShift<I> {
    fn new(ssds: Vec<EmulatedSsd<I>>, stop: Stop, gives_way: bool, sources: Sources) -> Self {
        let spell = Spell::new(PollMode::Adaptive, Instant::default());
        let (until, turns) = (Instant::NEVER, TURNS_PER_LOOK);
        Self { ssds, stop, gives_way, sources, is_deaf: false, spell, until, turns }
    }

    /// One SSD on no thread: its owner lets the time pass, and turns it once for each look.
    #[cfg(test)]
    pub(super) fn by_hand(ssd: EmulatedSsd<I>, sources: Sources) -> Self {
        Self { turns: 1, ..Self::new(vec![ssd], Stop::new(), false, sources) }
    }

    /// Turns every SSD once. True if there was work.
    #[inline]
    fn turn_each(&mut self, now: Instant) -> bool {
        let mut is_busy = false;
        self.until = Instant::NEVER;
        for ssd in &mut self.ssds {
            match ssd.turn(now) {
                Rest::Busy => is_busy = true,
                Rest::Pending(until) | Rest::Idle(until) => self.until = self.until.min(until),
            }
        }
        is_busy
    }

    /// When to be awake again.
    fn wake_at(&self) -> Instant {
        if self.until == Instant::NEVER {
            return Instant::NEVER;
        }
        Instant { ns: self.until.ns.saturating_sub(LEAD.ns) }
    }
}

impl<I: Interrupts> Turn for OnShift<I> {
    fn turn(&mut self, now: Instant) -> Wait {
        if self.stop.is_stopped() {
            return Wait::Ended;
        }
        let mut is_idle = false;
        for _ in 0..self.turns {
            is_idle = !self.turn_each(now);
            if is_idle && self.gives_way {
                host::thread::give_way();
                break;
            }
        }
        if !is_idle {
            self.spell.work(now);
            return Wait::Again;
        }
        let may_sleep = self.spell.is_over(now) && self.wake_at() > now && !self.is_deaf;
        if may_sleep { Wait::Until(self.wake_at()) } else { Wait::Again }
    }

    fn arm(&mut self, now: Instant) -> bool {
        let (planned, mut has_work) = (self.wake_at(), false);
        self.until = Instant::NEVER;
        for ssd in &mut self.ssds {
            let until = ssd.arm(now);
            has_work |= until.is_none();
            self.until = self.until.min(until.unwrap_or_default());
            let (sources, is_deaf) = (&self.sources, &mut self.is_deaf);
            ssd.new_descriptors(|source| *is_deaf |= sources.add(source, 0).is_err());
        }
        let must_wake = has_work || self.is_deaf || self.wake_at() < planned;
        if must_wake {
            // Not again at once: announcing a sleep costs more than some turns.
            self.spell.extend(now);
        }
        must_wake || self.stop.is_stopped()
    }

    fn woken(&mut self, _: &[u64]) {
        self.ssds.iter_mut().for_each(EmulatedSsd::disarm);
    }
}
