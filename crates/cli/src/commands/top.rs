//! `tenmil top`: live view of a running process.

use std::ffi::OsStr;
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

use clap::Args;
use tenmil_base::{Error, Span};

use super::rpc_endpoint::{ProcessSelector, choose_process, connect_to_process, process_search};
use super::write_stdout;
use crate::top::WatchedProcess;
use tenmil_bench::balance::restore_frequencies;
use tenmil_block::quantity_parser::parse_time;
use tenmil_linux::kernel_files::KernelFiles;

/// Show the reactors, threads and pollers of a running tenmil process, live.
///
/// Without a terminal, the tables are printed once, as with --once.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct TopArguments {
    #[command(flatten)]
    process: ProcessSelector,

    /// Print one sample as JSON
    #[arg(long)]
    json: bool,

    /// Print the tables once, as plain text
    #[arg(long)]
    once: bool,

    /// Interval between two samples; rates are computed over it
    #[arg(short, long, value_name = "TIME", default_value = "1", value_parser = parse_interval)]
    interval: Span,
}

const EXAMPLES: &str = "\
Examples:
  tenmil top                        the one process that runs, or a list to choose from
  tenmil top --pid 4711             this process
  tenmil top --once                 for a log
  tenmil top --json | jq .reactors  for programs

NO_COLOR=1 in the environment does without colours. docs/operator/top.md describes what is shown, and the
names of --json.";

fn parse_interval(text: &str) -> Result<Span, String> {
    let (least, most) = (Span::from_ms(10), Span::from_secs(3_600));
    let span = parse_time(text)?;
    if (least..=most).contains(&span) {
        return Ok(span);
    }
    Err(format!("`{text}` is out of range, expected a time from {least} to {most}"))
}

/// Runs the live view, or prints one sample.
pub(super) fn run_top(arguments: &TopArguments, out: &mut dyn Write) -> Result<ExitCode, Error> {
    let TopArguments { process, json, once, interval } = arguments;
    let interval = *interval;
    if *json {
        write_stdout(
            out,
            &crate::top::sample_twice_as_json(&mut connect_to_process(process)?, interval)?,
        )?;
    } else if *once || !is_terminal() {
        write_stdout(
            out,
            &crate::top::sample_twice_as_text(&mut connect_to_process(process)?, interval)?,
        )?;
    } else {
        let search = process_search()?;
        let directory = search.own_directory();
        restore_frequencies(&KernelFiles::live_system(), directory, &|text| {
            tracing::info!("{text}")
        });
        let selected = match process.endpoint()? {
            Some(endpoint) => Some(WatchedProcess::At(endpoint)),
            // A process that does not exist at the start is a usage error; one that exits later is
            // awaited.
            None if process.pid.is_some() || process.instance.is_some() => {
                Some(WatchedProcess::Pid(choose_process(process, &search)?.pid))
            }
            None => None,
        };
        crate::top::run_live_view(
            search,
            selected,
            interval,
            is_colored(no_color_variable().as_deref()),
        )?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Whether input and output are terminals that support cursor positioning.
fn is_terminal() -> bool {
    let is_dumb = std::env::var_os("TERM").is_some_and(|terminal| terminal == "dumb");
    io::stdout().is_terminal() && io::stdin().is_terminal() && !is_dumb
}

fn no_color_variable() -> Option<std::ffi::OsString> {
    std::env::var_os("NO_COLOR")
}

/// no-color.org: any value other than unset or empty disables color.
fn is_colored(no_color: Option<&OsStr>) -> bool {
    no_color.is_none_or(OsStr::is_empty)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;

    use tenmil_base::Span;

    use super::{is_colored, parse_interval};

    #[test]
    fn interval_is_bounded() {
        assert_eq!(parse_interval("500ms"), Ok(Span::from_ms(500)));
        assert_eq!(parse_interval("3600"), Ok(Span::from_secs(3_600)));
        let expected = "expected a time from 10 ms to 3600 s";
        for text in ["0", "9ms", "3601"] {
            assert_eq!(parse_interval(text), Err(format!("`{text}` is out of range, {expected}")));
        }
        assert!(parse_interval("often").unwrap_err().contains("is not a time"));
    }

    #[test]
    fn any_no_color_value_disables_color() {
        assert!(is_colored(None) && is_colored(Some(OsStr::new(""))));
        assert!(!is_colored(Some(OsStr::new("0"))));
    }
}
