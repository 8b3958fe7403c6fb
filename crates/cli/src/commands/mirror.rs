//! `tenmil mirror`: creates, shows and changes mirrors.

use std::fmt::Write as _;
use std::io::{self, BufRead, IsTerminal, Write};
use std::process::ExitCode;

use clap::{Args, Subcommand};
use serde_json::{Value, json};
use tenmil_base::{Error, ErrorCategory};
use tenmil_block::Opener;
use tenmil_block::uri::Uri;
use tenmil_dma::RegionTable;
use tenmil_drivers::mirror::{self, Health, MirrorReport};
use tenmil_linux::{Clock, random_seed};

use super::write_stdout;

/// Create a mirror, show it, or change its legs.
#[derive(Debug, Args)]
#[command(subcommand_required = true, after_help = EXAMPLES)]
pub(super) struct MirrorArguments {
    #[command(subcommand)]
    command: MirrorCommand,
}

#[derive(Debug, Subcommand)]
enum MirrorCommand {
    /// Create a mirror: every block is written to each of the devices.
    Create(CreateArguments),
    /// Show the superblocks of the legs, whether the mirror can be opened, and how much must be
    /// resynced; exit status 1 if it is degraded, 3 if it cannot be opened.
    Show(ShowArguments),
    /// Add a leg to a mirror that is not open; it is resynced when the mirror is opened.
    Add(AddArguments),
    /// Replace a leg, present or missing, by another device; it is resynced when the mirror is opened.
    Replace(ReplaceArguments),
    /// Remove a leg from a mirror of three or more that is not open.
    Remove(RemoveArguments),
    /// Take over a mirror whose owner, a process that had it open for writing, has ended.
    Takeover(TakeoverArguments),
}

#[derive(Debug, Args)]
struct CreateArguments {
    /// Two to eight devices
    #[arg(value_name = "URI", required = true, num_args = 1..)]
    legs: Vec<Uri>,

    /// Overwrite existing data of the devices
    #[arg(long)]
    overwrite: bool,
}

#[derive(Debug, Args)]
struct ShowArguments {
    /// Mirror, such as mirror:[file:/a],[file:/b]
    #[arg(value_name = "URI")]
    uri: Uri,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct AddArguments {
    /// Mirror, with its current legs
    #[arg(value_name = "URI")]
    uri: Uri,

    /// Device to add
    #[arg(value_name = "LEG")]
    leg: Uri,

    /// Overwrite existing data of the device
    #[arg(long)]
    overwrite: bool,
}

#[derive(Debug, Args)]
struct ReplaceArguments {
    /// Mirror, with all legs that are present
    #[arg(value_name = "URI")]
    uri: Uri,

    /// Leg to replace: its number or its device
    #[arg(value_name = "OLD")]
    old: String,

    /// New device
    #[arg(value_name = "NEW")]
    new: Uri,

    /// Overwrite existing data of the device
    #[arg(long)]
    overwrite: bool,

    /// Do not ask for confirmation
    #[arg(short, long)]
    yes: bool,
}

#[derive(Debug, Args)]
struct RemoveArguments {
    /// Mirror, with all legs that are present
    #[arg(value_name = "URI")]
    uri: Uri,

    /// Leg to remove: its number or its device
    #[arg(value_name = "OLD")]
    old: String,

    /// Do not ask for confirmation
    #[arg(short, long)]
    yes: bool,
}

#[derive(Debug, Args)]
struct TakeoverArguments {
    /// Mirror, with all legs that are present
    #[arg(value_name = "URI")]
    uri: Uri,

    /// Take over even if this machine cannot verify that the owner has ended: data are lost if it has
    /// not
    #[arg(long)]
    force: bool,
}

const EXAMPLES: &str = "\
Examples:
  tenmil mirror create 'file:/mnt/a/disk?size=1g' 'file:/mnt/b/disk?size=1g'
  tenmil mirror show 'mirror:[/mnt/a/disk],[/mnt/b/disk]'
  tenmil mirror add 'mirror:[/mnt/a/disk],[/mnt/b/disk]' 'file:/mnt/c/disk?size=1g'
  tenmil mirror replace 'mirror:[/mnt/a/disk],[/mnt/c/disk]' 1 'file:/mnt/d/disk?size=1g'
  tenmil mirror remove --yes 'mirror:[/mnt/a/disk],[/mnt/d/disk],[/mnt/c/disk]' 2
  tenmil mirror takeover --force 'mirror:[/mnt/a/disk],[/mnt/d/disk]'
  tenmil perf 'mirror:[/mnt/a/disk],[/mnt/d/disk]'";

/// Capacity of the DMA region table: a device and each device below it use one or two entries.
const REGIONS_MAX: usize = 256;

impl MirrorArguments {
    /// Whether the command creates and grows no file: it reads only, or takes over what exists.
    pub(super) fn creates_and_grows_no_file(&self) -> bool {
        matches!(self.command, MirrorCommand::Show(_) | MirrorCommand::Takeover(_))
    }
}

/// Runs the subcommand.
pub(super) fn run_mirror(
    arguments: &MirrorArguments,
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    let regions = RegionTable::new(REGIONS_MAX);
    let clock = Clock::start();
    let opener = Opener { regions: &regions, clock, seed: random_seed(), kinds: tenmil::KINDS };
    let mut code = ExitCode::SUCCESS;
    let text = match &arguments.command {
        MirrorCommand::Create(create) => {
            mirror::create_mirror(&opener, &create.legs, create.overwrite)?
                + "\n"
                + &open_hint(&create.legs)
        }
        MirrorCommand::Show(show) => {
            let report = mirror::read_mirror_report(&opener, &show.uri)?;
            code = exit_code(&report);
            if show.json { mirror_json(&report) } else { mirror_text(&report) }
        }
        MirrorCommand::Add(add) => {
            mirror::add_leg(&opener, &add.uri, &add.leg, add.overwrite)? + "\n"
        }
        MirrorCommand::Replace(it) => {
            let mut ask = |question: &str| require_consent(it.yes, question);
            mirror::replace_leg(&opener, &it.uri, &it.old, &it.new, it.overwrite, &mut ask)? + "\n"
        }
        MirrorCommand::Remove(it) => {
            let mut ask = |question: &str| require_consent(it.yes, question);
            mirror::remove_leg(&opener, &it.uri, &it.old, &mut ask)? + "\n"
        }
        MirrorCommand::Takeover(TakeoverArguments { uri, force }) => {
            match mirror::take_over_mirror(&opener, uri, *force)? {
                Some(former) => format!("{uri:#} is taken over from {former}\n"),
                None => format!("{uri:#} has no owner: nothing was changed\n"),
            }
        }
    };
    write_stdout(out, &text)?;
    Ok(code)
}

/// Exit code: 0 if all legs are in sync, 1 if the mirror is degraded, 3 if it cannot be opened.
fn exit_code(report: &MirrorReport) -> ExitCode {
    match report.health {
        Some(Health::Healthy) => ExitCode::SUCCESS,
        Some(_) => ExitCode::from(ErrorCategory::Environment.exit_code()),
        None => ExitCode::from(ErrorCategory::Remote.exit_code()),
    }
}

/// Asks for confirmation of a change, unless --yes is given.
fn require_consent(is_given: bool, question: &str) -> Result<(), Error> {
    if is_given {
        return Ok(());
    }
    let input = io::stdin();
    ask_confirmation(question, input.is_terminal().then(|| input.lock()).as_mut())
}

/// Asks for confirmation on the terminal; without a terminal the change is rejected.
fn ask_confirmation(question: &str, input: Option<&mut impl BufRead>) -> Result<(), Error> {
    let refuse = |why: &str| Err(Error::new(ErrorCategory::Usage, format!("{question}: {why}")));
    let Some(input) = input else {
        return refuse("standard input is no terminal, expected a terminal or --yes");
    };
    let mut errors = io::stderr().lock();
    let mut answer = String::new();
    let asked = write!(errors, "{question}. Continue? [y/N] ").and_then(|()| errors.flush());
    match asked.and_then(|()| input.read_line(&mut answer)) {
        Ok(_) if ["y", "yes"].contains(&answer.trim()) => Ok(()),
        _ => refuse("not confirmed, nothing was changed"),
    }
}

/// URI of a mirror that was just created.
fn open_hint(legs: &[Uri]) -> String {
    let legs: Vec<String> = legs.iter().map(|leg| format!("[{leg}]")).collect();
    format!("open it as 'mirror:{}'\n", legs.join(","))
}

fn mirror_text(report: &MirrorReport) -> String {
    let mut text = String::new();
    for (name, found) in &report.legs {
        let _ = writeln!(text, "{name}");
        match found {
            Err(problem) => {
                let _ = writeln!(text, "  {problem}");
            }
            Ok(leg) => {
                let uuid = tenmil_volume::mirror::uuid_text(leg.uuid);
                let (number, legs) = (leg.leg, leg.members());
                let _ = writeln!(text, "  leg {number} of {legs} of mirror {uuid}");
                let (generation, sequence) = (leg.generation, leg.sequence);
                let _ = writeln!(text, "  generation {generation}, {sequence} superblock updates");
                let _ = writeln!(text, "  in sync: {}", leg_numbers(leg.in_sync));
                if let Some(owner) = leg.owner.owner() {
                    let _ = writeln!(text, "  open for writing by: {owner}");
                }
                let (dirty, regions) = (leg.dirty.count(), leg.geometry.regions());
                let share = mirror::format_percentage(dirty, regions);
                let _ = writeln!(text, "  dirty: {dirty} of {regions} regions, {share}");
            }
        }
    }
    let _ = match &report.verdict {
        Ok(description) => writeln!(text, "opens as {description}"),
        Err(refusal) => writeln!(
            text,
            "does not open: {refusal}\n\
             for the state in the process that has it open: tenmil get mirrors"
        ),
    };
    text
}

/// Leg numbers of a bit mask: `0, 2`.
fn leg_numbers(mask: u8) -> String {
    let legs = (0..8_u8).filter(|leg| mask & (1 << leg) != 0);
    let legs: Vec<String> = legs.map(|leg| leg.to_string()).collect();
    if legs.is_empty() { "none".into() } else { legs.join(", ") }
}

fn mirror_json(report: &MirrorReport) -> String {
    let leg = |(name, found): &(String, Result<tenmil_volume::mirror::MirrorSuperblock, Error>)| {
        match found {
            Err(problem) => json!({ "uri": name, "problem": problem.text }),
            Ok(leg) => leg_json(name, leg),
        }
    };
    let legs: Vec<Value> = report.legs.iter().map(leg).collect();
    let document = match &report.verdict {
        Ok(description) => json!({
            "legs": legs,
            "opens": true,
            "health": report.health.map(Health::name),
            "description": description,
        }),
        Err(refusal) => json!({ "legs": legs, "opens": false, "refusal": refusal.text }),
    };
    format!("{document:#}\n")
}

fn leg_json(name: &str, leg: &tenmil_volume::mirror::MirrorSuperblock) -> Value {
    let in_sync: Vec<u8> = (0..leg.legs).filter(|one| leg.in_sync & (1 << one) != 0).collect();
    json!({
        "uri": name,
        "mirror": tenmil_volume::mirror::uuid_text(leg.uuid),
        "leg": leg.leg,
        "legs": leg.members(),
        "generation": leg.generation,
        "sequence": leg.sequence,
        "in_sync": in_sync,
        "block_size": leg.geometry.block_size,
        "block_count": leg.geometry.block_count,
        "region_blocks": leg.geometry.region_blocks,
        "regions": leg.geometry.regions(),
        "dirty_regions": leg.dirty.count(),
    })
}

#[cfg(test)]
mod tests {
    use std::process::ExitCode;

    use clap::Parser;
    use serde_json::Value;

    use super::{MirrorArguments, ask_confirmation, leg_numbers, run_mirror};
    use tenmil_base::Error;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        mirror: MirrorArguments,
    }

    fn run_mirror_command(words: &[&str]) -> Result<String, Error> {
        let line = Line::try_parse_from(["mirror"].iter().chain(words)).unwrap();
        let mut out = Vec::new();
        let code = run_mirror(&line.mirror, &mut out)?;
        let text = String::from_utf8(out).unwrap();
        let opens = !text.contains("does not open: ") && !text.contains("\"opens\": false");
        let is_degraded = text.contains(", degraded");
        let expected =
            if opens { ExitCode::from(u8::from(is_degraded)) } else { ExitCode::from(3) };
        assert_eq!(code, expected, "{text}");
        Ok(text)
    }

    #[test]
    fn mirror_is_created_once_and_shown() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name).display().to_string();
        let [a, b] = ["a", "b"].map(|name| format!("file:{}?size=4m&engine=threads", path(name)));
        let made = run_mirror_command(&["create", &a, &b]).unwrap();
        assert!(made.contains(": 2 legs, 3145728 bytes, "), "{made}");
        assert!(made.ends_with(&format!("open it as 'mirror:[{a}],[{b}]'\n")), "{made}");

        let refused = run_mirror_command(&["create", &a, &b]).unwrap_err();
        assert!(
            refused.text.contains("would destroy what is there: ")
                && refused.text.contains("--overwrite")
        );
        run_mirror_command(&["create", "--overwrite", &a, &b]).unwrap();

        let mirror = format!("mirror:[{b}],[{a}]");
        let text = run_mirror_command(&["show", &mirror]).unwrap();
        assert!(text.starts_with(&format!("{b}\n  leg 1 of 2 of mirror ")), "{text}");
        assert!(text.contains("  in sync: 0, 1\n  dirty: "), "{text}");
        assert!(text.contains("\nopens as mirror "), "{text}");

        let raw = format!("file:{}?size=4m&engine=threads", path("raw"));
        let json =
            run_mirror_command(&["show", "--json", &format!("mirror:[{a}],[{raw}]")]).unwrap();
        let json: Value = serde_json::from_str(&json).unwrap();
        assert_eq!(json["opens"], false);
        assert_eq!(json["legs"][0]["in_sync"], serde_json::json!([0, 1]));
        assert_eq!(json["legs"][1]["problem"], "no superblock");
        assert!(json["refusal"].as_str().unwrap().contains("is not a leg of a mirror"), "{json}");
    }

    #[test]
    fn legs_are_added_and_removed_by_name_and_number() {
        let directory = tempfile::tempdir().unwrap();
        let leg = |name: &str| {
            let path = directory.path().join(name);
            format!("file:{}?engine=threads&size=4m", path.display())
        };
        let [a, b, c, d] = ["a", "b", "c", "d"].map(leg);
        run_mirror_command(&["create", &a, &b]).unwrap();
        let two = format!("mirror:[{a}],[{b}]");
        let said = run_mirror_command(&["add", &two, &c]).unwrap();
        assert!(said.contains(&format!(": leg 2 is {c}; it is copied to")), "{said}");
        let shown = run_mirror_command(&["show", &format!("mirror:[{a}],[{b}],[{c}]")]).unwrap();
        assert!(shown.contains("\nopens as mirror "), "{shown}");
        assert!(shown.contains("2 of 3 legs in sync, degraded; leg 2 ("), "{shown}");
        assert!(shown.contains("; 48 regions (100.0 %) are copied, from leg 0"), "{shown}");

        let three = format!("mirror:[{a}],[{b}],[{c}]");
        for (words, expected) in [
            (vec!["add", &three, &a], "is a leg already, expected another device"),
            (vec!["add", &two, &c], "a new leg would destroy what is there: "),
            (vec!["remove", &three, "3"], "no leg is `3`, expected one of: leg 0 (file:"),
            (vec!["remove", &three, &d], ", stale)"),
            (vec!["replace", &format!("mirror:[{c}]"), "0", &d], "no leg is in sync: "),
            (vec!["replace", &format!("mirror:[{a}]"), "1", &d], "leg 1 is absent, and may hold"),
            (vec!["remove", &a, "0"], "not a mirror, expected mirror:[URI],[URI]"),
        ] {
            let refused = run_mirror_command(&words).unwrap_err().text;
            assert!(refused.contains(expected), "{refused}");
        }

        let other = c.replace("/c?", "/./c?");
        let said = run_mirror_command(&["remove", "--yes", &three, &other]).unwrap();
        assert!(said.contains(": leg 2 is removed; 2 are left"), "{said}");
        let refused = run_mirror_command(&["remove", &two, "0"]).unwrap_err().text;
        assert!(refused.contains("1 leg would be left, expected 2; replace it"), "{refused}");
        let shown = run_mirror_command(&["show", &three]).unwrap();
        assert!(shown.contains("  no superblock\ndoes not open: "), "{shown}");

        // The old leg may be missing, and is not part of the mirror if it returns.
        run_mirror_command(&["replace", "--yes", &format!("mirror:[{a}]?degraded=yes"), "1", &d])
            .unwrap();
        let shown = run_mirror_command(&["show", &format!("mirror:[{a}],[{d}]")]).unwrap();
        assert!(shown.contains("1 of 2 legs in sync, degraded; leg 1 ("), "{shown}");
        let shown = run_mirror_command(&["show", &format!("mirror:[{a}],[{b}]")]).unwrap();
        assert!(shown.contains("is leg 1 of generation 3, expected 4 or later"), "{shown}");
    }

    #[test]
    fn change_requires_consent() {
        let said =
            |words: &'static str| ask_confirmation("leg 1 is removed", Some(&mut words.as_bytes()));
        assert!(said("y\n").is_ok() && said(" yes \n").is_ok());
        for words in ["", "\n", "n\n", "yesterday\n"] {
            let refused = said(words).unwrap_err().to_string();
            assert_eq!(refused, "leg 1 is removed: not confirmed, nothing was changed");
        }
        let refused =
            ask_confirmation("leg 1 is removed", None::<&mut &[u8]>).unwrap_err().to_string();
        assert!(refused.ends_with("standard input is no terminal, expected a terminal or --yes"));
    }

    #[test]
    fn legs_are_listed_by_number() {
        assert_eq!((leg_numbers(0b101), leg_numbers(0)), ("0, 2".into(), "none".into()));
    }
}
