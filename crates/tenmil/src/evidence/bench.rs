//! Runs what a side runs, and looks at what others take of the machine meanwhile.

mod fio;
mod mixed;
mod served;
mod spun;
pub(super) mod wire;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use base::{Instant, Span};
use evidence::{Bench, Pace, Reading, Stopped};
use host::environment::ProcessorTime;
use host::machine::Machine;
use host::process::family_time;
use host::{Clock, Cores};
use serde_json::Value;

use self::served::Targets;
use super::work::{Work, words_of};
use crate::Refused;
use crate::perf::engine;
use crate::perf::options::{PerfOptions, Supplies};
use crate::perf::outcome::PerfOutcome;
use crate::perf::progress::Progress;

/// Reads the words of `tenmil perf`.
pub(crate) type Parse = fn(&[String]) -> Result<PerfOptions, Refused>;

/// The machine, and all that is needed to run something on it.
pub(crate) struct Stand {
    clock: Clock,
    /// Those that may be used: shares of time are of these.
    cores: Cores,
    parse: Parse,
    targets: Targets,
    /// Where programs lie that were built in other ways.
    builds: Option<PathBuf>,
}

/// Figures of a turn, by their keys.
type Figures = BTreeMap<String, f64>;

/// A look at the kernel's books.
#[derive(Clone, Copy)]
struct Look {
    at: Instant,
    all: ProcessorTime,
    ours: Span,
}

impl Stand {
    /// This machine. `builds` is where `cargo xtask pgo` has left programs.
    pub(crate) fn new(clock: Clock, parse: Parse, builds: Option<PathBuf>) -> Self {
        let cores = Cores::allowed();
        let targets = Targets::default();
        Self { clock, cores, parse, targets, builds }
    }

    /// Ends whatever was started for an experiment.
    pub(crate) fn put_away(&mut self) {
        self.targets.end();
    }

    fn turn(&mut self, work: &Work, pace: &Pace) -> Result<Figures, Stopped> {
        match *work {
            Work::Perf(words) => self.perf(words, "", pace),
            Work::Phases(phases) => self.phases(phases, pace),
            Work::Served { serve, perf } => {
                let target = self.target(serve)?;
                self.perf(perf, &target, pace)
            }
            Work::Wired { serve, perf } => {
                let words = words_of(serve, &self.cores, "").map_err(Stopped::Missing)?;
                let target = self.targets.get_far(&words).map_err(Stopped::Missing)?;
                self.perf(perf, &target, pace)
            }
            Work::Mixed { serve, keys } => {
                let target = self.target(serve)?;
                let uri = format!("{target}{keys}");
                let time = Span { ns: pace.warm_up.ns + pace.turn.ns };
                mixed::run(&uri, self.clock, time).map_err(|why| missing(&why))
            }
            Work::Loop { run, .. } => {
                let core = self.cores.iter().next();
                spun::run(run, self.clock, core, pace).map_err(Stopped::Missing)
            }
            Work::Fio(words) => {
                let words = words_of(words, &self.cores, "").map_err(Stopped::Missing)?;
                fio::run(&words).map_err(Stopped::Missing)
            }
            Work::Built { way, perf } => self.built(way, perf, pace).map_err(Stopped::Missing),
        }
    }

    fn target(&mut self, serve: &str) -> Result<String, Stopped> {
        let words = words_of(serve, &self.cores, "").map_err(Stopped::Missing)?;
        self.targets.get(&words).map_err(Stopped::Missing)
    }

    fn perf(&mut self, words: &str, target: &str, pace: &Pace) -> Result<Figures, Stopped> {
        let words = words_of(words, &self.cores, target).map_err(Stopped::Missing)?;
        let mut options = (self.parse)(&words).map_err(|why| missing(&why))?;
        options.time = pace.turn;
        options.warm_up = pace.warm_up;
        options.ceiling = options.ceiling.map(|_| pace.turn);
        options.check(&Supplies::look(&Machine::this())).map_err(|why| missing(&why))?;
        let progress = Arc::new(Progress::new(options.cores.len().max(1)));
        let outcome = engine::run(&options, &progress, &mut |_| {});
        if host::signal::interrupted() {
            return Err(Stopped::Interrupted);
        }
        let outcome = outcome.map_err(|why| missing(&why))?;
        if outcome.totals.ios == 0 || outcome.totals.errors > 0 {
            let why = format!(
                "{} I/Os ended well and {} badly, expected all of them to end well",
                outcome.totals.ios, outcome.totals.errors
            );
            return Err(Stopped::Missing(why));
        }
        Ok(figures_of(&outcome))
    }

    /// Phases one after the other: rates are the mean of all, latencies the worst.
    #[expect(clippy::cast_precision_loss, reason = "a few phases")]
    fn phases(&mut self, phases: &[&str], pace: &Pace) -> Result<Figures, Stopped> {
        let mut all = Figures::new();
        for words in phases {
            for (key, value) in self.perf(words, "", pace)? {
                let is_rate = key == "iops";
                let share = if is_rate { value / phases.len() as f64 } else { value };
                let found = all.entry(key).or_insert(0.0);
                *found = if is_rate { *found + share } else { found.max(share) };
            }
        }
        Ok(all)
    }

    fn built(&self, way: &str, words: &str, pace: &Pace) -> Result<Figures, String> {
        let Some(builds) = &self.builds else {
            return Err(
                "takes builds of several minutes: `cargo xtask pgo` makes and compares them"
                    .to_owned(),
            );
        };
        let program = builds.join(way).join("tenmil");
        let times = [("-t", pace.turn), ("-a", pace.warm_up)];
        let times = times.map(|(flag, span)| [flag.to_owned(), span.as_secs_f64().to_string()]);
        let mut command = Command::new(&program);
        command.arg("perf").args(words_of(words, &self.cores, "")?).args(times.concat());
        let output = command.arg("--json").output();
        let output = output.map_err(|error| format!("{}: {error}", program.display()))?;
        let report: Value = serde_json::from_slice(&output.stdout).map_err(|_| {
            let said = String::from_utf8_lossy(&output.stderr);
            format!("{}: {}, expected a report", program.display(), said.trim())
        })?;
        let figure = |key: &str| Some((key.to_owned(), report[key].as_f64()?));
        Ok(["iops", "ns_per_io"].iter().filter_map(|key| figure(key)).collect())
    }

    fn look(&self) -> Look {
        let ours = family_time(std::process::id()).unwrap_or_default();
        Look {
            at: self.clock.now(),
            all: ProcessorTime::read(&self.cores),
            ours: Span { ns: ours.ns + self.targets.time().ns },
        }
    }

    /// What was read off a turn that began with `before`.
    #[expect(clippy::cast_precision_loss, reason = "a count of processors")]
    fn reading(&self, mut figures: Figures, before: Look) -> Reading {
        let after = self.look();
        let seconds = after.at.since(before.at).as_secs_f64().max(1e-9);
        let ours = Span { ns: after.ours.ns.saturating_sub(before.ours.ns) }.as_secs_f64();
        figures.insert("cpu".to_owned(), ours / seconds);
        let used = after.all.used_since(before.all);
        let cores = self.cores.len().max(1) as f64;
        Reading {
            figures,
            stolen: after.all.stolen_since(before.all),
            others: (used - ours / (seconds * cores)).max(0.0),
            processors: u32::try_from(self.cores.len()).unwrap_or(u32::MAX),
        }
    }
}

impl Bench for Stand {
    type Work = Work;

    fn run(&mut self, work: &Work, pace: &Pace) -> Result<Reading, Stopped> {
        let before = self.look();
        let figures = self.turn(work, pace);
        if host::signal::interrupted() {
            return Err(Stopped::Interrupted);
        }
        Ok(self.reading(figures?, before))
    }
}

/// Whatever was refused is not shown here, with the words of the refusal.
fn missing(why: &Refused) -> Stopped {
    Stopped::Missing(why.text.clone())
}

#[expect(clippy::cast_precision_loss, reason = "shown to people")]
fn figures_of(outcome: &PerfOutcome) -> Figures {
    let at = |part| outcome.latency.percentile(part) as f64;
    let seconds = outcome.elapsed.as_secs_f64().max(1e-9);
    let mut figures = vec![
        ("iops", outcome.iops()),
        ("bytes_per_s", outcome.bytes_per_second()),
        ("ns_per_io", outcome.ns_per_io()),
        ("mean", outcome.latency.mean()),
        ("p50", at(500_000)),
        ("p99", at(990_000)),
        ("p9999", at(999_900)),
        ("doorbells_per_io", outcome.turns.doorbells_per_io()),
        ("sleeps", outcome.sleeps as f64 / seconds),
    ];
    figures.extend(outcome.ceiling_ratio().map(|ratio| ("of_ceiling", ratio)));
    figures.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}
