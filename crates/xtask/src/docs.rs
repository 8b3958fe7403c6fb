//! `cargo xtask docs`: runs every command of the documentation.
//!
//! The `sh` blocks of a page are executed in one shell, line by line, in an empty directory. A comment
//! before a block changes that, and is printed for blocks that are skipped:
//!
//! ```text
//!   <!-- not run: WHY -->         only the options of `tenmil` are checked
//!   <!-- needs: TOOL TOOL -->     skipped if one of the tools is missing
//!   <!-- long: WHY -->            run with --all only
//! ```
//!
//! A command that ends in `&` has to print `ready`, and is terminated at the end of its page.

mod page_commands;
mod page_runner;

use std::path::PathBuf;
use std::process::Command;

use page_commands::{BlockMark, CommandBlock};

/// Options of `cargo xtask docs`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  cargo xtask docs                        all pages, with target/release/tenmil
  cargo xtask docs docs/operator/nbd.md   one page
  cargo xtask docs --all                  also commands that take long")]
pub(crate) struct DocsOptions {
    /// Pages; without any, all
    pages: Vec<PathBuf>,
    /// Program to run as `tenmil`
    #[arg(long, default_value = "target/release/tenmil")]
    binary: PathBuf,
    /// Also run blocks that take long
    #[arg(long)]
    all: bool,
    /// A command line that counts as run already
    #[arg(long, value_name = "LINE")]
    ran: Vec<String>,
}

/// Totals of the commands of all pages.
#[derive(Default)]
struct DocTestTotals {
    run: usize,
    checked: usize,
    left_out: Vec<String>,
    failed: Vec<String>,
}

/// Runs the commands; returns true if all succeeded.
pub(crate) fn run_docs(options: &DocsOptions) -> Result<bool, String> {
    let root = crate::book::repository_root()?;
    let binary = options.binary.canonicalize().map_err(|why| {
        format!("no program at {}: {why}; `cargo build --release`", options.binary.display())
    })?;
    let bench = page_runner::PageRunner::new(&root, &binary)?;
    let mut pages = options.pages.clone();
    if pages.is_empty() {
        pages.extend(crate::book::all_pages(&root)?.iter().map(|page| root.join(page)));
    }
    let mut tally = DocTestTotals::default();
    for path in pages {
        let text = std::fs::read_to_string(&path);
        let text = text.map_err(|why| format!("read {}: {why}", path.display()))?;
        let name = path.strip_prefix(&root).unwrap_or(&path).display().to_string();
        let blocks = page_commands::command_blocks(&name, &text)?;
        run_page(&bench, options, &name, &blocks, &mut tally)?;
    }
    print_totals(&tally);
    Ok(tally.failed.is_empty())
}

fn run_page(
    bench: &page_runner::PageRunner,
    options: &DocsOptions,
    name: &str,
    blocks: &[CommandBlock],
    tally: &mut DocTestTotals,
) -> Result<(), String> {
    let mut wanted = Vec::new();
    for block in blocks {
        let why = match &block.mark {
            None => None,
            Some(BlockMark::Long(_)) if options.all => None,
            Some(BlockMark::Needs(tools)) => {
                let missing: Vec<&str> = tools
                    .iter()
                    .map(String::as_str)
                    .filter(|tool| !is_tool_available(tool))
                    .collect();
                (!missing.is_empty()).then(|| format!("no {}", missing.join(", no ")))
            }
            Some(BlockMark::NotRun(why) | BlockMark::Long(why)) => Some(why.clone()),
        };
        match why {
            Some(why) => {
                tally.left_out.push(format!("{name}:{}: {why}", block.line));
                for command in &block.commands {
                    tally.checked +=
                        usize::from(bench.check_options(name, command, &mut tally.failed)?);
                }
            }
            None => wanted.extend(&block.commands),
        }
    }
    wanted.retain(|command| !options.ran.contains(&command.text));
    if !wanted.is_empty() {
        tally.run += bench.run_page(name, &wanted, options.all, &mut tally.failed)?;
    }
    Ok(())
}

/// Whether a tool is in the path; `root` stands for root privileges.
fn is_tool_available(tool: &str) -> bool {
    let script = match tool {
        "root" => "[ \"$(id -u)\" = 0 ]".to_owned(),
        tool => format!("command -v {tool} >/dev/null"),
    };
    Command::new("bash").arg("-c").arg(script).status().is_ok_and(|status| status.success())
}

fn print_totals(tally: &DocTestTotals) {
    println!();
    for line in &tally.left_out {
        println!("docs: not run: {line}");
    }
    for line in &tally.failed {
        println!("docs: FAILED: {line}");
    }
    let DocTestTotals { run, checked, failed, .. } = tally;
    println!("docs: {run} commands run, {checked} only checked, {} failed", failed.len());
}
