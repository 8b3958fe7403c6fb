//! Fault injector: a wrapper around a conforming controller that violates the specification on
//! purpose.
//!
//! ```text
//!   host                       fault injector                   controller (conforming)
//!    | <--- register value --- [ registers  ] <--- value ------- |
//!    | <--- completions ------ [ completions] <--- completion -- |
//!    | <--- Identify, logs --- [ corruption ] <--- data -------- |
//!    | <--- stray accesses --- [ on a poll  ]                    |
//! ```
//!
//! The controller inside is unaware: head doorbells are translated to what it expects. One
//! conforming controller therefore serves for every fault, and continues correctly when the faults
//! are stopped.

mod completion_faults;
mod data_corruption;
mod planned_fault;
mod register_faults;

use std::collections::BTreeMap;

use tenmil_base::{Instant, Random, Span};

pub use completion_faults::{EmittedCompletion, RingView};
pub use planned_fault::{
    BogusCid, CorruptionMethod, DataCorruption, DmaFault, Fault, FaultTarget, FaultTrigger,
    PlannedFault, QueueKind, ReleaseTrigger,
};
pub use planned_fault::{FOR_GOOD, lies, pokes};

/// State of the fault injector: planned and applied faults.
#[derive(Debug)]
pub struct FaultInjector {
    plan: Vec<ArmedFault>,
    random: Random,
    counters: TriggerCounters,
    is_removed: bool,
    held: Vec<completion_faults::WithheldCompletion>,
    /// Commands that were completed without the controller. Their real completion is discarded.
    completed: Vec<(u16, u16)>,
    /// Head of each submission queue as last reported by the controller.
    heads: BTreeMap<u16, u16>,
    faults: u64,
    /// No unsolicited action before this time.
    idle_until: Instant,
}

/// One planned fault and its progress.
#[derive(Clone, Debug)]
struct ArmedFault {
    mischief: PlannedFault,
    seen: u32,
    done: u32,
}

/// Counters that can trigger faults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TriggerCounters {
    /// Number of transitions of CC.EN from 1 to 0.
    pub disables: u32,
    /// Number of transitions of CC.EN from 0 to 1.
    pub enables: u32,
    /// Number of times CC.SHN was set.
    pub shutdowns: u32,
    /// Completions of I/O commands, before faults.
    pub io_completions: u32,
    /// Completions of admin commands, before faults.
    pub admin_completions: u32,
    /// Register reads.
    pub reads: u32,
}

impl FaultInjector {
    /// Creates a fault injector with this plan. With an empty plan the device conforms.
    pub fn new(plan: &[PlannedFault], random: Random) -> Self {
        let armed = |mischief: &PlannedFault| ArmedFault { mischief: *mischief, seen: 0, done: 0 };
        Self {
            plan: plan.iter().map(armed).collect(),
            random,
            counters: TriggerCounters::default(),
            is_removed: false,
            held: Vec::new(),
            completed: Vec::new(),
            heads: BTreeMap::new(),
            faults: 0,
            idle_until: Instant::default(),
        }
    }

    /// Adds a planned fault.
    pub fn add_planned_fault(&mut self, mischief: PlannedFault) {
        self.plan.push(ArmedFault { mischief, seen: 0, done: 0 });
    }

    /// Stops all faults. A removed device stays removed, and completions that were dropped or held
    /// back are never posted.
    pub fn stop_faults(&mut self) {
        self.plan.clear();
        self.held.clear();
    }

    /// Whether the device has been removed.
    pub fn is_removed(&self) -> bool {
        self.is_removed
    }

    /// Counters.
    pub fn trigger_counters(&self) -> TriggerCounters {
        self.counters
    }

    /// Number of injected faults.
    pub fn applied_fault_count(&self) -> u64 {
        self.faults
    }

    /// Next unsolicited action that is due, if any.
    pub fn next_unsolicited_fault(&mut self, now: Instant) -> Option<Fault> {
        self.remove_if_due(now);
        if now < self.idle_until {
            return None;
        }
        let site = InjectionPoint { queue: QueueKind::Any, opcode: None };
        let deed = self.take_due_fault(now, site, is_unsolicited)?;
        self.idle_until = now.after(FAULT_INTERVAL);
        Some(deed)
    }

    /// Removes the device if a removal triggered by time or a counter is due. Removals at a
    /// register read are handled there.
    fn remove_if_due(&mut self, now: Instant) {
        let counters = self.counters;
        let vanishes = |armed: &ArmedFault| {
            let PlannedFault { fault, gate, skip, .. } = armed.mischief;
            fault == Fault::Gone
                && gate != FaultTrigger::Always
                && skip == 0
                && gate.is_triggered(now, &counters)
        };
        if !self.is_removed && self.plan.iter().any(vanishes) {
            self.is_removed = true;
            self.faults += 1;
        }
    }

    /// Time at which the fault injector must be polled without an event.
    pub fn wake_at(&self) -> Instant {
        let held = self.held.iter().filter_map(completion_faults::WithheldCompletion::wake_at);
        let gates = self.plan.iter().filter_map(|armed| match armed.mischief.gate {
            FaultTrigger::At(at) if armed.done == 0 => Some(at),
            _ => None,
        });
        let wake = held.chain(gates).min().unwrap_or(Instant::NEVER);
        let has_more = |armed: &ArmedFault| {
            let PlannedFault { fault, gate, times, .. } = armed.mischief;
            // Faults with a counter trigger have no wake-up time.
            armed.done > 0 && armed.done < times && is_unsolicited(&fault)
                || gate == FaultTrigger::Always && armed.done == 0 && is_unsolicited(&fault)
        };
        if self.plan.iter().any(has_more) { wake.min(self.idle_until) } else { wake }
    }

    /// Random number for the details of a fault.
    pub fn random_detail(&mut self) -> u64 {
        self.random.next_u64()
    }

    /// First planned fault of the wanted kind that is due at this injection point.
    fn take_due_fault(
        &mut self,
        now: Instant,
        site: InjectionPoint,
        is_wanted: impl Fn(&Fault) -> bool,
    ) -> Option<Fault> {
        let counters = self.counters;
        for armed in &mut self.plan {
            let PlannedFault { fault, target, gate, skip, times } = armed.mischief;
            if !is_wanted(&fault)
                || !target.matches_injection_point(site)
                || !gate.is_triggered(now, &counters)
            {
                continue;
            }
            armed.seen += 1;
            if armed.seen <= skip || armed.done >= times {
                continue;
            }
            armed.done += 1;
            self.faults += 1;
            return Some(fault);
        }
        None
    }
}

/// Time between two unsolicited actions.
const FAULT_INTERVAL: Span = Span::from_us(20);

fn is_unsolicited(fault: &Fault) -> bool {
    matches!(fault, Fault::Dma(_) | Fault::Interrupt { .. })
}

/// Point at which a fault can be injected.
#[derive(Clone, Copy, Debug)]
struct InjectionPoint {
    queue: QueueKind,
    opcode: Option<u8>,
}

impl FaultTarget {
    fn matches_injection_point(&self, site: InjectionPoint) -> bool {
        let is_any = |queue| queue == QueueKind::Any;
        let queue = is_any(self.queue) || is_any(site.queue) || self.queue == site.queue;
        queue && (self.opcode.is_none() || self.opcode == site.opcode)
    }
}

impl FaultTrigger {
    fn is_triggered(&self, now: Instant, counters: &TriggerCounters) -> bool {
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
    use tenmil_base::{Instant, Random};

    use super::{Fault, FaultInjector, FaultTrigger, PlannedFault};

    #[test]
    fn fault_waits_for_its_trigger_skips_and_repeats_as_planned() {
        let fault = Fault::Interrupt { vector: 3 };
        let mischief = PlannedFault::for_all_commands(fault)
            .with_trigger(FaultTrigger::At(Instant { ns: 200_000 }))
            .with_skip(2)
            .with_count(3);
        let mut evil = FaultInjector::new(&[mischief], Random::new(1));
        let mut struck = Vec::new();
        for us in 0..20 {
            if evil.next_unsolicited_fault(Instant { ns: 20_000 * us }).is_some() {
                struck.push(us);
            }
        }
        assert_eq!(struck, [12, 13, 14]);
        assert_eq!(evil.applied_fault_count(), 3);
    }

    #[test]
    fn stopped_injector_injects_nothing_more() {
        let mischief = PlannedFault::for_all_commands(Fault::Interrupt { vector: 0 });
        let mut evil = FaultInjector::new(&[mischief], Random::new(1));
        assert!(evil.next_unsolicited_fault(Instant::default()).is_some());
        evil.stop_faults();
        assert!(evil.next_unsolicited_fault(Instant::default()).is_none());
    }
}
