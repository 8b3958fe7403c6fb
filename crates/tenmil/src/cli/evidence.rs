//! `tenmil evidence`.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use base::Span;
use clap::Args;
use evidence::Pace;
use host::{Clock, Environment};

use super::{perf, write_out};
use crate::Refused;
use crate::evidence::report::{html, json, text};
use crate::evidence::{Evidence, Progress, Stand, Store, choose, key};

/// Try what talks and articles claim about stacks like this one, on this machine.
///
/// The sides of each comparison take turns. What comes of it is one page, evidence.html, and
/// evidence.json beside it: which claims hold here, by how much, and which could not be tested.
#[derive(Debug, Args)]
#[command(after_help = MORE)]
pub(super) struct EvidenceArguments {
    /// End within 3 minutes: fewer rounds, shorter ones, and no long comparisons
    #[arg(long)]
    quick: bool,

    /// Run these experiments alone, by name
    #[arg(long, value_name = "NAME", num_args = 1.., value_delimiter = ',')]
    only: Vec<String>,

    /// Say which experiments there are, and end
    #[arg(long)]
    list: bool,

    /// Where the reports go, and what is finished is kept
    #[arg(long, value_name = "DIR", default_value = "tenmil-evidence")]
    out: PathBuf,

    /// Where `cargo xtask pgo` has left programs that were built in other ways
    #[arg(long, value_name = "DIR")]
    builds: Option<PathBuf>,

    /// Print JSON in place of the text
    #[arg(long)]
    json: bool,
}

const MORE: &str = "\
A full run takes up to 30 minutes. It wants two cores, and nobody else on them: rounds in which
others use the machine say less, or nothing. What is finished is kept in DIR; the same program on the same
machine with the same options takes it from there, so a run that was stopped goes on.

Examples:
  tenmil evidence --quick                          three minutes; then look at tenmil-evidence/evidence.html
  tenmil evidence                                  the whole of it
  tenmil evidence --list                           what is claimed, and by which name it is chosen
  tenmil evidence --only submission-doorbell polling
  tenmil evidence --only slot-layout,random-block --quick --json
  cargo xtask pgo                                  builds with a profile, then compares them by this

Exit codes: 0 done, whatever the verdicts are, 1 machine not set up, 2 bad arguments, 130 interrupted.";

/// What shells say of a program that Ctrl-C has ended.
const INTERRUPTED: u8 = 130;

/// Runs the experiments and reports.
pub(super) fn run(
    arguments: &EvidenceArguments,
    command: &str,
    out: &mut dyn Write,
) -> Result<ExitCode, Refused> {
    let chosen = choose(&arguments.only)?;
    if arguments.list {
        let listed = match arguments.json {
            true => json::list(&chosen),
            false => chosen.iter().map(|it| format!("{:<24}{}\n", it.name, it.claim)).collect(),
        };
        write_out(out, &listed)?;
        return Ok(ExitCode::SUCCESS);
    }
    let pace = if arguments.quick { Pace::QUICK } else { Pace::FULL };
    let machine = Environment::read();
    let store = Store::open(&arguments.out, key(&machine, &pace, arguments.builds.as_deref()))?;
    host::signal::catch_interrupts()
        .map_err(|error| Refused::machine(format!("catch Ctrl-C: {error}")))?;
    let clock = Clock::start();
    let mut stand = Stand::new(clock, perf::options_of, arguments.builds.clone());
    let mut line = Line { is_terminal: std::io::stderr().is_terminal() };
    let chapters = crate::evidence::run(chosen, pace, &mut stand, &store, clock, &mut |progress| {
        // A terminal that is gone is no reason to stop measuring.
        let _ = line.tell(progress, &mut std::io::stderr());
    });
    drop(stand);
    let Ok(chapters) = chapters else {
        let kept = arguments.out.display();
        tracing::info!("interrupted: what is finished is kept in {kept}; the same command goes on");
        return Ok(ExitCode::from(INTERRUPTED));
    };
    let evidence = Evidence { pace, machine, chapters, command: command.to_owned() };
    let report = json::render(&evidence);
    let written = vec![
        store.write("evidence.html", &html::render(&evidence))?,
        store.write("evidence.json", &report)?,
    ];
    write_out(out, &if arguments.json { report } else { text::render(&evidence, &written) })?;
    Ok(ExitCode::SUCCESS)
}

/// What is said on the way: a line that changes on a terminal, and one for each that is finished.
struct Line {
    is_terminal: bool,
}

impl Line {
    fn tell(&mut self, progress: &Progress<'_>, errors: &mut dyn Write) -> std::io::Result<()> {
        // Whatever stood in the line before goes.
        let clear = if self.is_terminal { "\r\x1b[K" } else { "" };
        match progress {
            Progress::Turn { number, count, name, step, left } if self.is_terminal => write!(
                errors,
                "{clear}{number}/{count} {name}: round {} of {}, {}; at most {} left",
                step.round,
                step.rounds,
                step.label,
                minutes(*left)
            )?,
            Progress::Turn { .. } => {}
            Progress::Finished(chapter) => {
                let row = chapter.rows().into_iter().next();
                let found = row.map_or_else(String::new, |row| row.found);
                let kept = if chapter.was_kept { " (kept from an earlier run)" } else { "" };
                let (name, verdict) = (chapter.experiment.name, chapter.verdict().words());
                writeln!(errors, "{clear}{name}: {verdict}: {found}{kept}")?;
            }
        }
        errors.flush()
    }
}

/// `12 min`, or seconds where there are few.
fn minutes(span: Span) -> String {
    let seconds = span.ns.div_ceil(1_000_000_000);
    if seconds < 120 { format!("{seconds} s") } else { format!("{} min", seconds.div_ceil(60)) }
}

#[cfg(test)]
mod tests {
    use base::Span;

    use super::minutes;

    #[test]
    fn what_is_left_is_told_in_what_suits_it() {
        assert_eq!(minutes(Span::from_ms(1500)), "2 s");
        assert_eq!(minutes(Span::from_secs(119)), "119 s");
        assert_eq!(minutes(Span::from_secs(121)), "3 min");
    }
}
