//! Injected bugs, which the checks of the harness must find. A harness that misses one of them is
//! broken.

use std::sync::atomic::{AtomicU64, Ordering};
use tenmil_base::{
    ChannelWakeup, CompletionBatch, Instant, IoChannel, IoCompletion, IoStatus, Limits, Request,
    Segment,
};

use crate::event_trace::TraceKind;
use crate::sim_bus::SimBus;

/// A deliberate bug of the driver, the host or the harness.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InjectedBug {
    /// The driver completes a request while the device owns its command.
    CompletesEarly,
    /// The driver completes a request twice.
    CompletesTwice,
    /// The driver never completes a request.
    ForgetsCompletion,
    /// The driver completes a read successfully without executing it.
    InventsData,
    /// Revoking the DMA access has no effect.
    CutOffIgnored,
    /// The DMA access is reported as revoked while the device still has it.
    CutOffNotAwaited,
    /// A buffer is unmapped while the device owns its command.
    UnmapsBuffer,
    /// The host does not release memory.
    Leaks,
    /// The host sleeps past its deadlines.
    Oversleeps,
    /// The host never sleeps and changes some state in every iteration.
    Fidgets,
    /// The code under test panics.
    Panics,
    /// The run depends on something other than its seed.
    Unrepeatable,
}

/// Carries out an injected bug.
pub(crate) struct BugInjector {
    bus: SimBus,
    planted: Option<InjectedBug>,
    turns: u64,
    submitted: u64,
    completed: u64,
    victim: Option<u64>,
    has_struck: bool,
}

/// An I/O channel with an injected bug.
pub(crate) struct BuggyChannel<'a> {
    saboteur: &'a mut BugInjector,
    inner: &'a mut dyn IoChannel,
}

/// Request number and iteration at which a bug strikes.
const STRIKES_AT: u64 = 10;
const TURN: u64 = 40;

/// Number of runs in this process, which no seed determines. Used by `Unrepeatable` alone.
static RUNS: AtomicU64 = AtomicU64::new(0);

impl BugInjector {
    pub(crate) fn new(bus: &SimBus, planted: Option<InjectedBug>) -> Self {
        if planted == Some(InjectedBug::Unrepeatable) {
            let run = RUNS.fetch_add(1, Ordering::Relaxed);
            bus.record(TraceKind::Harness, [run, 0, 0]);
        }
        let bus = bus.clone();
        let (turns, submitted, completed, victim) = (0, 0, 0, None);
        Self { bus, planted, turns, submitted, completed, victim, has_struck: false }
    }

    pub(crate) fn run_iteration(&mut self) {
        self.turns += 1;
        match self.planted {
            // Like `panic!`, but without the message of the panic hook, since it is intended.
            Some(InjectedBug::Panics) if self.turns == TURN => {
                std::panic::resume_unwind(Box::new("a planted panic"))
            }
            Some(InjectedBug::Fidgets) => self.bus.record(TraceKind::Harness, [0; 3]),
            _ => {}
        }
    }

    pub(crate) fn is_oversleeping(&self) -> bool {
        self.planted == Some(InjectedBug::Oversleeps)
    }

    pub(crate) fn is_leaking(&self) -> bool {
        self.planted == Some(InjectedBug::Leaks)
    }

    pub(crate) fn wrap_channel<'a>(&'a mut self, inner: &'a mut dyn IoChannel) -> BuggyChannel<'a> {
        BuggyChannel { saboteur: self, inner }
    }

    /// Delivers a completion, or what the bug makes of it.
    fn forward_completion(&mut self, completion: IoCompletion, completions: &mut CompletionBatch) {
        self.completed += 1;
        let is_victim = self.victim == Some(completion.token);
        match self.planted {
            Some(InjectedBug::CompletesEarly | InjectedBug::InventsData) if is_victim => {}
            Some(InjectedBug::CompletesTwice) if self.completed == STRIKES_AT => {
                completions.push(completion);
                completions.push(completion);
            }
            Some(InjectedBug::ForgetsCompletion) if self.completed == STRIKES_AT => {}
            _ => completions.push(completion),
        }
    }
}

impl IoChannel for BuggyChannel<'_> {
    fn limits(&self) -> &Limits {
        self.inner.limits()
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let saboteur = &mut *self.saboteur;
        if saboteur.planted == Some(InjectedBug::InventsData)
            && saboteur.submitted >= STRIKES_AT
            && saboteur.victim.is_none()
            && requests.first().is_some_and(|one| one.operation == tenmil_base::Operation::Read)
        {
            saboteur.victim = requests.first().map(|request| request.token);
            return 1;
        }
        let taken = self.inner.submit(now, requests, segments);
        saboteur.submitted += taken as u64;
        if saboteur.planted == Some(InjectedBug::CompletesEarly)
            && saboteur.submitted == STRIKES_AT
            && saboteur.victim.is_none()
        {
            saboteur.victim = requests.first().map(|request| request.token);
        }
        if saboteur.planted == Some(InjectedBug::UnmapsBuffer)
            && saboteur.submitted >= STRIKES_AT
            && !saboteur.has_struck
            && let Some(segment) = segments.first()
        {
            saboteur.has_struck = true;
            saboteur.bus.unmap_early(*segment);
        }
        taken
    }

    fn flush_submissions(&mut self) {
        self.inner.flush_submissions();
    }

    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        let mut inner = CompletionBatch::with_capacity(completions.remaining().saturating_sub(2));
        self.inner.poll(now, &mut inner);
        let saboteur = &mut *self.saboteur;
        let room = completions.remaining();
        inner.drain().for_each(|completion| saboteur.forward_completion(completion, completions));
        if !saboteur.has_struck
            && matches!(
                saboteur.planted,
                Some(InjectedBug::CompletesEarly | InjectedBug::InventsData)
            )
            && let Some(token) = saboteur.victim
        {
            saboteur.has_struck = true;
            completions.push(IoCompletion { token, status: IoStatus::SUCCESS, result: 0 });
        }
        room - completions.remaining()
    }
}

impl ChannelWakeup for BuggyChannel<'_> {
    fn wake_at(&self) -> Instant {
        self.inner.wake_at()
    }
}
