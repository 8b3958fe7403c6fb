//! The evidence: what others claim about storage stacks like this one, tried on the machine it
//! stands on.
//!
//! ```text
//!   experiments ── what is claimed, and what is run for it
//!       │  Stand: perf in this process, targets in processes of their own, loops, other programs
//!       ▼
//!   Store ── what is finished is kept, and taken again by the same program on the same machine
//!       ▼
//!   Evidence ── verdicts, as text, JSON and one page
//! ```

mod bench;
mod experiments;
pub(crate) mod report;
mod store;
mod work;

use base::Span;
use evidence::{Experiment, Finding, Interrupted, Pace, Record, Step, Verdict};
use host::{Clock, Environment};

pub(crate) use bench::Stand;
pub(crate) use experiments::choose;
pub(crate) use store::{Store, key};
pub(crate) use work::Work;

/// Everything that a run has found out.
#[derive(Debug)]
pub(crate) struct Evidence {
    /// How thorough it was.
    pub(crate) pace: Pace,
    /// What it ran on.
    pub(crate) machine: Environment,
    /// Experiment by experiment.
    pub(crate) chapters: Vec<Chapter>,
    /// How to run it again.
    pub(crate) command: String,
}

/// One experiment and what came of it.
#[derive(Debug)]
pub(crate) struct Chapter {
    pub(crate) experiment: Experiment<Work>,
    /// What was measured.
    pub(crate) record: Record,
    /// An answer for each question.
    pub(crate) findings: Vec<Finding>,
    /// Whether it was measured by an earlier run.
    pub(crate) was_kept: bool,
}

/// What is told as it goes.
pub(crate) enum Progress<'a> {
    /// A side has its turn.
    Turn {
        number: usize,
        count: usize,
        name: &'static str,
        step: Step,
        /// What all that is left takes at most.
        left: Span,
    },
    /// An experiment is finished.
    Finished(&'a Chapter),
}

/// Who is told.
type Tell<'a> = dyn FnMut(&Progress<'_>) + 'a;

/// Why nothing is known of an experiment for which there was no time.
const NO_TIME: &str = "there was no time left; the same command again goes on from here";

/// Runs `chosen`, or takes what is kept of it; then again what others have disturbed, as long as
/// there is time. What is finished when somebody has seen enough stays kept.
pub(crate) fn run(
    chosen: Vec<Experiment<Work>>,
    pace: Pace,
    stand: &mut Stand,
    store: &Store,
    clock: Clock,
    tell: &mut Tell<'_>,
) -> Result<Vec<Chapter>, Interrupted> {
    let begun = clock.now();
    let has_time = |planned: Span| clock.now().since(begun).ns + planned.ns <= pace.limit.ns;
    let count = chosen.len();
    let planned: Vec<Span> = chosen.iter().map(|experiment| pace.planned(experiment)).collect();
    let mut measure = |number, left, experiment: &Experiment<Work>, tell: &mut Tell<'_>| {
        let name = experiment.name;
        let mut told = |step| tell(&Progress::Turn { number, count, name, step, left });
        let measured = evidence::measure(experiment, &pace, stand, &mut told);
        stand.put_away();
        measured
    };
    let mut chapters = Vec::new();
    for (index, experiment) in chosen.into_iter().enumerate() {
        let kept = store.kept(experiment.name);
        let was_kept = kept.is_some();
        let record = match kept {
            Some(record) => record,
            None if !has_time(planned[index]) => {
                chapters.push(Chapter::without_time(experiment));
                continue;
            }
            None => {
                let left = Span { ns: planned[index..].iter().map(|span| span.ns).sum() };
                measure(index + 1, left, &experiment, tell)?
            }
        };
        let chapter = Chapter::new(experiment, record, was_kept);
        chapter.finish(store, tell);
        chapters.push(chapter);
    }
    for (index, chapter) in chapters.iter_mut().enumerate() {
        if chapter.was_disturbed() && has_time(planned[index]) {
            let left = Span { ns: pace.limit.ns - clock.now().since(begun).ns };
            let mut more = measure(index + 1, left, &chapter.experiment, tell)?;
            chapter.record.rounds.append(&mut more.rounds);
            chapter.judge();
            chapter.finish(store, tell);
        }
    }
    Ok(chapters)
}

impl Chapter {
    /// An experiment with its answers.
    pub(crate) fn new(experiment: Experiment<Work>, record: Record, was_kept: bool) -> Self {
        let mut chapter = Self { experiment, record, findings: Vec::new(), was_kept };
        chapter.judge();
        chapter
    }

    /// Answers the questions anew.
    fn judge(&mut self) {
        let asked = self.experiment.questions.iter();
        self.findings = asked.map(|question| evidence::judge(question, &self.record)).collect();
    }

    /// Keeps what need not be measured again, and says what was found.
    fn finish(&self, store: &Store, tell: &mut Tell<'_>) {
        if self.is_settled() && !self.was_kept {
            store.keep(&self.record);
        }
        tell(&Progress::Finished(self));
    }

    /// Whether measuring again would not help: nothing failed, was missing or was disturbed.
    fn is_settled(&self) -> bool {
        let is_missing = self.findings.iter().any(|finding| {
            finding.verdict == Verdict::NotShown && finding.reason != evidence::LEFT_OUT
        });
        !is_missing && !self.was_disturbed()
    }

    /// Whether there is no answer to some question because others had part of the machine.
    fn was_disturbed(&self) -> bool {
        self.findings.iter().any(|finding| {
            let is_open = finding.verdict == Verdict::NotConclusive;
            is_open && (finding.values.is_none() || finding.disturbed > 0)
        })
    }

    fn without_time(experiment: Experiment<Work>) -> Self {
        let open = || Finding::none(Verdict::NotConclusive, NO_TIME.to_owned());
        let findings = experiment.questions.iter().map(|_| open()).collect();
        let record = Record { name: experiment.name.to_owned(), ..Record::default() };
        Self { experiment, record, findings, was_kept: false }
    }

    /// The answer to the claim itself.
    pub(crate) fn verdict(&self) -> Verdict {
        self.findings.first().map_or(Verdict::NotShown, |finding| finding.verdict)
    }
}

impl Evidence {
    /// How many claims have this verdict.
    pub(crate) fn count(&self, verdict: Verdict) -> usize {
        self.chapters.iter().filter(|chapter| chapter.verdict() == verdict).count()
    }

    /// What one should know before one believes any of it.
    pub(crate) fn caveats(&self) -> Vec<String> {
        let mut caveats = Vec::new();
        if cfg!(debug_assertions) {
            caveats.push("built without optimisation: the numbers say nothing".to_owned());
        }
        if self.machine.allowed.len() < 2 {
            caveats.push(
                "one processor: driver and device take turns on it, and nothing about several \
                 threads can be shown"
                    .to_owned(),
            );
        }
        caveats
    }
}
