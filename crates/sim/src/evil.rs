//! A wrapper round a controller that breaks the contract on purpose.
//!
//! ```text
//!   host                          Evil                        ctrl (always honest)
//!    | <--- register value --- [ registers ] <--- value ------- |
//!    | <--- completions ------ [completions] <--- completion -- |
//!    | <--- Identify, logs --- [  forgery  ] <--- data -------- |
//!    | <--- stray accesses --- [ on a turn ]                    |
//! ```
//!
//! The controller inside never notices: doorbells are translated back to what it expects. So one
//! honest controller serves every fault, and when the faults are switched off it goes on honestly.

mod completions;
mod fault;
mod forgery;
mod registers;

use std::collections::BTreeMap;

use base::{Instant, Random, Span};

pub use completions::{Emission, View};
pub use fault::{
    DmaFault, Fault, Forgery, Gate, How, Invented, Mischief, QueueKind, Release, Target,
};
pub use fault::{FOR_GOOD, lies, pokes};

/// The wrapper's mind: what it plans and what it has done.
#[derive(Debug)]
pub struct Evil {
    plan: Vec<Armed>,
    random: Random,
    counters: Counters,
    is_gone: bool,
    held: Vec<completions::Held>,
    /// Commands answered behind the controller's back: when it answers them, nobody is told.
    answered: Vec<(u16, u16)>,
    /// How far each submission queue has been read, as the controller reported last.
    heads: BTreeMap<u16, u16>,
    deeds: u64,
    /// Nothing is done before this that nobody asked for.
    idle_until: Instant,
}

/// One planned fault, and how far it got.
#[derive(Clone, Debug)]
struct Armed {
    mischief: Mischief,
    seen: u32,
    done: u32,
}

/// What faults can be timed by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Times CC.EN went from 1 to 0.
    pub disables: u32,
    /// Times CC.EN went from 0 to 1.
    pub enables: u32,
    /// Times CC.SHN was set.
    pub shutdowns: u32,
    /// Completions of I/O commands, before any fault.
    pub io_completions: u32,
    /// Completions of admin commands, before any fault.
    pub admin_completions: u32,
    /// Register loads.
    pub reads: u32,
}

impl Evil {
    /// A wrapper with this plan. An empty plan is an honest device.
    pub fn new(plan: &[Mischief], random: Random) -> Self {
        let armed = |mischief: &Mischief| Armed { mischief: *mischief, seen: 0, done: 0 };
        Self {
            plan: plan.iter().map(armed).collect(),
            random,
            counters: Counters::default(),
            is_gone: false,
            held: Vec::new(),
            answered: Vec::new(),
            heads: BTreeMap::new(),
            deeds: 0,
            idle_until: Instant::default(),
        }
    }

    /// Adds to the plan.
    pub fn arm(&mut self, mischief: Mischief) {
        self.plan.push(Armed { mischief, seen: 0, done: 0 });
    }

    /// Gives up all evil. What was unplugged stays unplugged, and what was swallowed or held back is
    /// never posted.
    pub fn repent(&mut self) {
        self.plan.clear();
        self.held.clear();
    }

    /// Whether the device has been unplugged.
    pub fn is_gone(&self) -> bool {
        self.is_gone
    }

    /// What has been counted so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// How often a fault has struck.
    pub fn deeds(&self) -> u64 {
        self.deeds
    }

    /// What to do on this turn that nobody asked for.
    pub fn turn(&mut self, now: Instant) -> Option<Fault> {
        self.vanish_if_so(now);
        if now < self.idle_until {
            return None;
        }
        let site = Site { queue: QueueKind::Any, opcode: None };
        let deed = self.strike(now, site, is_spontaneous)?;
        self.idle_until = now.after(DEED_INTERVAL);
        Some(deed)
    }

    /// Whether it is to vanish at a moment that has come, and not at some look of its host.
    fn vanish_if_so(&mut self, now: Instant) {
        let counters = self.counters;
        let vanishes = |armed: &Armed| {
            let Mischief { fault, gate, skip, .. } = armed.mischief;
            fault == Fault::Gone
                && gate != Gate::Always
                && skip == 0
                && gate.is_open(now, &counters)
        };
        if !self.is_gone && self.plan.iter().any(vanishes) {
            self.is_gone = true;
            self.deeds += 1;
        }
    }

    /// When the wrapper wants to be turned by itself.
    pub fn wake_at(&self) -> Instant {
        let held = self.held.iter().filter_map(completions::Held::wake_at);
        let gates = self.plan.iter().filter_map(|armed| match armed.mischief.gate {
            Gate::At(at) if armed.done == 0 => Some(at),
            _ => None,
        });
        let wake = held.chain(gates).min().unwrap_or(Instant::NEVER);
        let has_more = |armed: &Armed| {
            let Mischief { fault, gate, times, .. } = armed.mischief;
            // One whose time has not come cannot be waited for, unless its time is a time.
            armed.done > 0 && armed.done < times && is_spontaneous(&fault)
                || gate == Gate::Always && armed.done == 0 && is_spontaneous(&fault)
        };
        if self.plan.iter().any(has_more) { wake.min(self.idle_until) } else { wake }
    }

    /// A random number for the details of a fault.
    pub fn draw(&mut self) -> u64 {
        self.random.draw()
    }

    /// The first planned fault of the wanted kind whose time has come at this site.
    fn strike(
        &mut self,
        now: Instant,
        site: Site,
        is_wanted: impl Fn(&Fault) -> bool,
    ) -> Option<Fault> {
        let counters = self.counters;
        for armed in &mut self.plan {
            let Mischief { fault, target, gate, skip, times } = armed.mischief;
            if !is_wanted(&fault) || !target.covers(site) || !gate.is_open(now, &counters) {
                continue;
            }
            armed.seen += 1;
            if armed.seen <= skip || armed.done >= times {
                continue;
            }
            armed.done += 1;
            self.deeds += 1;
            return Some(fault);
        }
        None
    }
}

/// From one thing that nobody asked for to the next.
const DEED_INTERVAL: Span = Span::from_us(20);

fn is_spontaneous(fault: &Fault) -> bool {
    matches!(fault, Fault::Dma(_) | Fault::Interrupt { .. })
}

/// Where something happens that a fault could strike.
#[derive(Clone, Copy, Debug)]
struct Site {
    queue: QueueKind,
    opcode: Option<u8>,
}

impl Target {
    fn covers(&self, site: Site) -> bool {
        let is_any = |queue| queue == QueueKind::Any;
        let queue = is_any(self.queue) || is_any(site.queue) || self.queue == site.queue;
        queue && (self.opcode.is_none() || self.opcode == site.opcode)
    }
}

impl Gate {
    fn is_open(&self, now: Instant, counters: &Counters) -> bool {
        match *self {
            Self::Always => true,
            Self::At(at) => now >= at,
            Self::Disables(count) => counters.disables >= count,
            Self::Enables(count) => counters.enables >= count,
            Self::Shutdowns(count) => counters.shutdowns >= count,
            Self::IoCompletions(count) => counters.io_completions >= count,
            Self::AdminCompletions(count) => counters.admin_completions >= count,
        }
    }
}

#[cfg(test)]
mod tests {
    use base::{Instant, Random};

    use super::{Evil, Fault, Gate, Mischief};

    #[test]
    fn a_fault_waits_for_its_gate_lets_some_pass_and_strikes_so_often() {
        let fault = Fault::Interrupt { vector: 3 };
        let mischief =
            Mischief::always(fault).gate(Gate::At(Instant { ns: 200_000 })).skip(2).times(3);
        let mut evil = Evil::new(&[mischief], Random::new(1));
        let mut struck = Vec::new();
        for us in 0..20 {
            if evil.turn(Instant { ns: 20_000 * us }).is_some() {
                struck.push(us);
            }
        }
        assert_eq!(struck, [12, 13, 14]);
        assert_eq!(evil.deeds(), 3);
    }

    #[test]
    fn one_that_repents_does_nothing_more() {
        let mischief = Mischief::always(Fault::Interrupt { vector: 0 });
        let mut evil = Evil::new(&[mischief], Random::new(1));
        assert!(evil.turn(Instant::default()).is_some());
        evil.repent();
        assert!(evil.turn(Instant::default()).is_none());
    }
}
