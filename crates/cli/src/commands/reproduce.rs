//! `tenmil reproduce`: runs the experiments of the reproduction report.

use std::io::{IsTerminal, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use tenmil_base::{Error, Span};
use tenmil_bench::experiment::Effort;
use tenmil_linux::{Clock, MachineEnvironment};

use super::{perf, write_stdout};
use tenmil_bench::reproduce::report::{html_report, json_report, text_report};
use tenmil_bench::reproduce::{
    ReportDirectory, ReproduceProgress, ReproduceRun, TestBench, experiments_by_name, record_key,
};

/// Reproduce published claims about user-space storage stacks on this machine.
///
/// The sides of each comparison run alternately. The result is one page, report.html, with
/// report.json beside it: which claims hold here, by how much, and which could not be tested.
#[derive(Debug, Args)]
#[command(after_help = MORE)]
pub(super) struct ReproduceArguments {
    /// Finish within 3 minutes: fewer and shorter rounds, no long comparisons
    #[arg(long)]
    quick: bool,

    /// Run only these experiments
    #[arg(long, value_name = "NAME", num_args = 1.., value_delimiter = ',')]
    only: Vec<String>,

    /// List the experiments and exit
    #[arg(long)]
    list: bool,

    /// Directory of the reports and of finished experiments
    #[arg(long, value_name = "DIR", default_value = "tenmil-reproduce")]
    out: PathBuf,

    /// Directory with the build variants of `cargo xtask pgo`
    #[arg(long, value_name = "DIR")]
    builds: Option<PathBuf>,

    /// Print JSON instead of text
    #[arg(long)]
    json: bool,
}

const MORE: &str = "\
A full run takes up to 30 minutes. It needs two otherwise idle cores: rounds that are disturbed by
other programs are widened or discarded. Finished experiments are saved in DIR; the same program on the same
machine with the same options reuses them, so an interrupted run can be resumed.

Examples:
  tenmil reproduce --quick                          3 minutes; see tenmil-reproduce/report.html
  tenmil reproduce                                  the whole of it
  tenmil reproduce --list                           what is claimed, and by which name it is chosen
  tenmil reproduce --only submission-doorbell polling
  tenmil reproduce --only slot-layout,random-block --quick --json
  cargo xtask pgo                                  builds with a profile, then compares them by this

Exit codes: 0 done, whatever the verdicts are, 1 machine not set up, 2 bad arguments, 130 interrupted.";

/// Exit status of a program that SIGINT has ended, by shell convention (128 + 2).
const INTERRUPTED: u8 = 130;

/// Runs the experiments and writes the reports.
pub(super) fn run_reproduce(
    arguments: &ReproduceArguments,
    command: &str,
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    let chosen = experiments_by_name(&arguments.only)?;
    if arguments.list {
        let listed = match arguments.json {
            true => json_report::experiment_list_json(&chosen),
            false => chosen.iter().map(|it| format!("{:<24}{}\n", it.name, it.claim)).collect(),
        };
        write_stdout(out, &listed)?;
        return Ok(ExitCode::SUCCESS);
    }
    let effort = if arguments.quick { Effort::QUICK } else { Effort::FULL };
    let machine = MachineEnvironment::read();
    let store = ReportDirectory::open(
        &arguments.out,
        record_key(&machine, &effort, arguments.builds.as_deref()),
    )?;
    tenmil_linux::signal::request_stop_on_sigint_or_sigterm()
        .map_err(|error| Error::environment(format!("catch Ctrl-C: {error}")))?;
    let clock = Clock::start();
    let mut stand = TestBench::new(clock, perf::parse_options, arguments.builds.clone());
    let mut line = ProgressLine { is_terminal: std::io::stderr().is_terminal() };
    let experiment_results = tenmil_bench::reproduce::run_experiments(
        chosen,
        effort,
        &mut stand,
        &store,
        clock,
        &mut |progress| {
            // A closed terminal does not end the measurement.
            let _ = line.print(progress, &mut std::io::stderr());
        },
    );
    drop(stand);
    let Ok(experiment_results) = experiment_results else {
        let kept = arguments.out.display();
        tracing::info!(
            "interrupted: finished experiments are saved in {kept}; repeat the command to resume"
        );
        return Ok(ExitCode::from(INTERRUPTED));
    };
    let run = ReproduceRun { effort, machine, experiment_results, command: command.to_owned() };
    let report = json_report::render_json(&run);
    let written = vec![
        store.write_report("report.html", &html_report::render_page(&run))?,
        store.write_report("report.json", &report)?,
    ];
    write_stdout(
        out,
        &if arguments.json { report } else { text_report::render_text(&run, &written) },
    )?;
    Ok(ExitCode::SUCCESS)
}

/// Progress output: one updated line on a terminal, and one line per finished experiment.
struct ProgressLine {
    is_terminal: bool,
}

impl ProgressLine {
    fn print(
        &mut self,
        progress: &ReproduceProgress<'_>,
        errors: &mut dyn Write,
    ) -> std::io::Result<()> {
        // Erases the previous progress line.
        let clear = if self.is_terminal { "\r\x1b[K" } else { "" };
        match progress {
            ReproduceProgress::Turn { number, count, name, step, left } if self.is_terminal => {
                write!(
                    errors,
                    "{clear}{number}/{count} {name}: round {} of {}, {}; at most {} left",
                    step.round,
                    step.rounds,
                    step.label,
                    minutes_text(*left)
                )?
            }
            ReproduceProgress::Turn { .. } => {}
            ReproduceProgress::Finished(experiment_result) => {
                let row = experiment_result.criterion_rows().into_iter().next();
                let found = row.map_or_else(String::new, |row| row.found);
                let kept = if experiment_result.is_reused { " (from an earlier run)" } else { "" };
                let (name, verdict) =
                    (experiment_result.experiment.name, experiment_result.claim_verdict().text());
                writeln!(errors, "{clear}{name}: {verdict}: {found}{kept}")?;
            }
        }
        errors.flush()
    }
}

/// `12 min`, or seconds below two minutes.
fn minutes_text(span: Span) -> String {
    let seconds = span.ns.div_ceil(1_000_000_000);
    if seconds < 120 { format!("{seconds} s") } else { format!("{} min", seconds.div_ceil(60)) }
}

#[cfg(test)]
mod tests {
    use tenmil_base::Span;
    use tenmil_bench::reproduce::{expand_placeholders, perf_arguments_of_variants};
    use tenmil_linux::CpuList;

    use super::minutes_text;

    #[test]
    fn remaining_time_is_shown_in_a_suitable_unit() {
        assert_eq!(minutes_text(Span::from_ms(1500)), "2 s");
        assert_eq!(minutes_text(Span::from_secs(119)), "119 s");
        assert_eq!(minutes_text(Span::from_secs(121)), "3 min");
    }

    #[test]
    fn every_experiment_load_is_a_valid_perf_command() {
        let cores = CpuList::parse("0-1").unwrap();
        assert!(perf_arguments_of_variants().len() > 30);
        for (name, words) in perf_arguments_of_variants() {
            let target = "tcp://127.0.0.1:4420/nqn.2026-01.org.tenmil:disk";
            let words = expand_placeholders(words, &cores, target).unwrap();
            let parsed = crate::commands::perf_options(&words);
            assert!(parsed.is_ok(), "{name}: {words:?}: {parsed:?}");
            assert!(!words.iter().any(|word| word.contains(['{', '}'])), "{name}: {words:?}");
        }
    }
}
