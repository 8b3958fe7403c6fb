//! Mistakes made on purpose. A harness that does not find them is broken, whatever else it says.

use base::{Answer, Answers, Backend, Instant, Limits, Outcome, Request, Segment};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::bus::Bus;
use crate::trace::Kind;

/// A planted mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planted {
    /// The driver answers a request while the device has its command.
    AnswersEarly,
    /// The driver answers a request twice.
    AnswersTwice,
    /// The driver forgets to answer a request.
    ForgetsAnswer,
    /// The driver says that a read has succeeded that was never made.
    InventsData,
    /// Cutting the device off from memory does nothing.
    CutOffIgnored,
    /// The device is said to be cut off while it still reaches memory.
    CutOffNotAwaited,
    /// A buffer is unmapped while the device has its command.
    UnmapsBuffer,
    /// The host forgets to give memory back.
    Leaks,
    /// The host sleeps through its deadlines.
    Oversleeps,
    /// The host never sleeps, and changes something at every turn.
    Fidgets,
    /// The code under test panics.
    Panics,
    /// The run depends on something that is not its seed.
    Unrepeatable,
}

/// Carries a planted mistake out.
pub(crate) struct Saboteur {
    bus: Bus,
    planted: Option<Planted>,
    turns: u64,
    submitted: u64,
    answered: u64,
    victim: Option<u64>,
    has_struck: bool,
}

/// A backend with a saboteur in front of it.
pub(crate) struct Sabotaged<'a> {
    saboteur: &'a mut Saboteur,
    inner: &'a mut dyn Backend,
}

/// The request, and the answer, at which a mistake is made.
const STRIKES_AT: u64 = 10;
const TURN: u64 = 40;

/// What no seed determines. Only the canary that must be found looks at it.
static RUNS: AtomicU64 = AtomicU64::new(0);

impl Saboteur {
    pub(crate) fn new(bus: &Bus, planted: Option<Planted>) -> Self {
        if planted == Some(Planted::Unrepeatable) {
            let run = RUNS.fetch_add(1, Ordering::Relaxed);
            bus.record(Kind::Harness, [run, 0, 0]);
        }
        let bus = bus.clone();
        let (turns, submitted, answered, victim) = (0, 0, 0, None);
        Self { bus, planted, turns, submitted, answered, victim, has_struck: false }
    }

    pub(crate) fn turn(&mut self) {
        self.turns += 1;
        match self.planted {
            // As `panic!`, but it was wanted: nobody need be told where it happened.
            Some(Planted::Panics) if self.turns == TURN => {
                std::panic::resume_unwind(Box::new("a planted panic"))
            }
            Some(Planted::Fidgets) => self.bus.record(Kind::Harness, [0; 3]),
            _ => {}
        }
    }

    pub(crate) fn oversleeps(&self) -> bool {
        self.planted == Some(Planted::Oversleeps)
    }

    pub(crate) fn leaks(&self) -> bool {
        self.planted == Some(Planted::Leaks)
    }

    pub(crate) fn over<'a>(&'a mut self, inner: &'a mut dyn Backend) -> Sabotaged<'a> {
        Sabotaged { saboteur: self, inner }
    }

    /// What becomes of an answer.
    fn pass_on(&mut self, answer: Answer, answers: &mut Answers) {
        self.answered += 1;
        let is_victim = self.victim == Some(answer.token);
        match self.planted {
            Some(Planted::AnswersEarly | Planted::InventsData) if is_victim => {}
            Some(Planted::AnswersTwice) if self.answered == STRIKES_AT => {
                answers.push(answer);
                answers.push(answer);
            }
            Some(Planted::ForgetsAnswer) if self.answered == STRIKES_AT => {}
            _ => answers.push(answer),
        }
    }
}

impl Backend for Sabotaged<'_> {
    fn limits(&self) -> &Limits {
        self.inner.limits()
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let saboteur = &mut *self.saboteur;
        if saboteur.planted == Some(Planted::InventsData)
            && saboteur.submitted >= STRIKES_AT
            && saboteur.victim.is_none()
            && requests.first().is_some_and(|one| one.operation == base::Operation::Read)
        {
            saboteur.victim = requests.first().map(|request| request.token);
            return 1;
        }
        let taken = self.inner.submit(now, requests, segments);
        saboteur.submitted += taken as u64;
        if saboteur.planted == Some(Planted::AnswersEarly)
            && saboteur.submitted == STRIKES_AT
            && saboteur.victim.is_none()
        {
            saboteur.victim = requests.first().map(|request| request.token);
        }
        if saboteur.planted == Some(Planted::UnmapsBuffer)
            && saboteur.submitted >= STRIKES_AT
            && !saboteur.has_struck
            && let Some(segment) = segments.first()
        {
            saboteur.has_struck = true;
            saboteur.bus.unmap(*segment);
        }
        taken
    }

    fn flush(&mut self) {
        self.inner.flush();
    }

    fn poll(&mut self, now: Instant, answers: &mut Answers) -> usize {
        let mut inner = Answers::with_capacity(answers.room().saturating_sub(2));
        self.inner.poll(now, &mut inner);
        let saboteur = &mut *self.saboteur;
        let room = answers.room();
        inner.drain().for_each(|answer| saboteur.pass_on(answer, answers));
        if !saboteur.has_struck
            && matches!(saboteur.planted, Some(Planted::AnswersEarly | Planted::InventsData))
            && let Some(token) = saboteur.victim
        {
            saboteur.has_struck = true;
            answers.push(Answer { token, outcome: Outcome::SUCCESS, result: 0 });
        }
        room - answers.room()
    }

    fn wake_at(&self) -> Instant {
        self.inner.wake_at()
    }
}
