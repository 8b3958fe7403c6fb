//! `tenmil volume`.

mod already;
mod clone;
mod list;
mod said;
mod stream;
mod thick;

use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;

use base::Span;
use block::Opener;
use block::quantity::parse_size;
use block::store::{Change, OpenStore, PAGE_BYTES, Place};
use block::uri::Uri;
use clap::{Args, Subcommand};
use host::random_seed;

use self::clone::CloneArguments;
use self::list::ListArguments;
use self::said::Said;
use self::stream::{DiffArguments, Progress, ReceiveArguments, SendArguments};
use self::thick::InflateArguments;
use super::store::{size, with_opener};
use super::write_out;
use crate::Refused;

/// Make, change, list or delete volumes of a store that no other process has open.
#[derive(Debug, Args)]
#[command(subcommand_required = true, after_help = EXAMPLES)]
pub(super) struct VolumeArguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Make an empty volume; it takes room as it is written, or at once if it is to be thick.
    Create(CreateArguments),
    /// Delete a volume or a snapshot, and give its room back.
    Delete(DeleteArguments),
    /// Give a volume another name.
    Rename(NameArguments),
    /// Give a volume another size.
    Resize(ResizeArguments),
    /// Keep what a volume holds now, under a name of its own; nothing is written to a snapshot.
    Snapshot(NameArguments),
    /// Make a volume that holds what another, a snapshot, or an image elsewhere holds now.
    Clone(CloneArguments),
    /// Make a volume hold what it held when a snapshot of it was made.
    Revert(NameArguments),
    /// Have a clone stand on its own, so that what it was made from can be deleted like any other.
    Decouple(DecoupleArguments),
    /// Make a volume thick: give it room for all of its blocks, of its own, while others use it.
    Inflate(InflateArguments),
    /// Say what a snapshot or volume has that another one has not, from their maps alone.
    Diff(DiffArguments),
    /// Write a snapshot, or what it has that another one has not, to standard output.
    Send(SendArguments),
    /// Make a snapshot of what `send` has written, from standard input.
    Receive(ReceiveArguments),
    /// List the volumes of a store.
    List(ListArguments),
}

#[derive(Debug, Args)]
struct CreateArguments {
    /// The volume, such as volume:[file:/var/tmp/pool]/db
    #[arg(value_name = "VOLUME")]
    volume: Uri,

    /// How large it is, such as 10g; it may be larger than the store
    #[arg(long, value_name = "BYTES")]
    size: Size,

    /// In what pieces room is given to it: 4k, 8k, 16k, 32k or 64k
    #[arg(long, value_name = "BYTES", default_value = "64k")]
    unit: Size,

    /// Keep a checksum of every block, and refuse to read what does not have its own
    #[arg(long)]
    checksums: bool,

    /// Give it room for all of its blocks now, so that no first write finds the store full
    #[arg(long)]
    thick: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct DeleteArguments {
    /// The volume or snapshot
    #[arg(value_name = "VOLUME")]
    volume: Uri,

    /// Delete a snapshot even if volumes were made from it; they keep what they hold
    #[arg(long)]
    orphan: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct NameArguments {
    /// The volume
    #[arg(value_name = "VOLUME")]
    volume: Uri,

    /// The other name, in the same store
    #[arg(value_name = "NAME")]
    name: String,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct DecoupleArguments {
    /// The volume; what it shares with others stays where it is, what is an image's is copied
    #[arg(value_name = "VOLUME")]
    volume: Uri,

    /// Copy so many bytes in a second at most, such as 100m
    #[arg(long, value_name = "BYTES")]
    rate: Option<Size>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct ResizeArguments {
    /// The volume
    #[arg(value_name = "VOLUME")]
    volume: Uri,

    /// How large it is to be
    #[arg(long, value_name = "BYTES")]
    size: Size,

    /// Make it smaller, too: what lies behind the new end is lost
    #[arg(long)]
    shrink: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// A number of bytes on the command line.
#[derive(Clone, Copy, Debug)]
pub(super) struct Size(pub(super) u64);

impl std::str::FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        parse_size(text).map(Self)
    }
}

const EXAMPLES: &str = "\
Examples:
  tenmil volume create volume:[file:/var/tmp/pool]/db --size 100g
  tenmil volume create volume:[file:/var/tmp/pool]/safe --size 100g --checksums
  tenmil volume create volume:[file:/var/tmp/pool]/log --size 10g --thick
  tenmil volume snapshot volume:[file:/var/tmp/pool]/db monday
  tenmil volume clone volume:[file:/var/tmp/pool]/monday trial
  tenmil volume clone volume:[file:/var/tmp/pool]/vm --from file:/srv/golden.img --size 20g
  tenmil volume rename volume:[file:/var/tmp/pool]/trial next
  tenmil volume resize volume:[file:/var/tmp/pool]/next --size 200g
  tenmil volume revert volume:[file:/var/tmp/pool]/db monday
  tenmil volume decouple volume:[file:/var/tmp/pool]/next
  tenmil volume inflate volume:[file:/var/tmp/pool]/next --rate 100m
  tenmil volume delete volume:[file:/var/tmp/pool]/next
  tenmil volume list file:/var/tmp/pool
  tenmil volume diff volume:[file:/var/tmp/pool]/monday tuesday --json
  tenmil volume send volume:[file:/var/tmp/pool]/monday > monday.stream
  tenmil volume receive volume:[file:/mnt/backup]/monday < monday.stream
  tenmil volume send volume:[file:/var/tmp/pool]/tuesday --from monday |
      tenmil volume receive volume:[file:/mnt/backup]/tuesday
  tenmil serve volume:[file:/var/tmp/pool]/db -l nbd:/tmp/db";

/// How long a command waits for the room of what was deleted. The rest is given back when the store
/// is open the next time.
const GIVING_BACK_MAX: Span = Span::from_secs(60);

/// Makes a change, or lists.
pub(super) fn run(arguments: &VolumeArguments, out: &mut dyn Write) -> Result<ExitCode, Refused> {
    let text = with_opener(|opener| match &arguments.command {
        Command::Create(it) if it.thick => thick::create(opener, it)?.render(it.json),
        Command::Create(it) => create(opener, it)?.render(it.json),
        Command::Delete(it) => delete(opener, it)?.render(it.json),
        Command::Rename(it) => rename(opener, it)?.render(it.json),
        Command::Resize(it) => resize(opener, it)?.render(it.json),
        Command::Snapshot(it) => snapshot(opener, it)?.render(it.json),
        Command::Clone(it) => clone::clone(opener, it)?.render(it.json),
        Command::Revert(it) => revert(opener, it)?.render(it.json),
        Command::Decouple(it) => decouple(opener, it)?.render(it.json),
        Command::Inflate(it) => thick::inflate(opener, it)?.render(it.json),
        Command::Diff(diff) => stream::diff(opener, diff, out).map(|()| String::new()),
        Command::Send(send) => stream::send(opener, send, out).map(|()| String::new()),
        Command::Receive(it) => stream::receive(opener, it, out).map(|()| String::new()),
        Command::List(list) => list::list(opener, list),
    })?;
    write_out(out, &text)?;
    Ok(ExitCode::SUCCESS)
}

/// The store of a volume, open, and the volume's name.
fn find(opener: &Opener<'_>, uri: &Uri) -> Result<(Arc<OpenStore>, String), Refused> {
    let place = Place::of(uri)?;
    let name = place.volume(uri)?.to_owned();
    Ok((OpenStore::open(opener, &place)?, name))
}

/// Makes a change, unless it is made already. `text` says that it was made.
fn make(
    open: &Arc<OpenStore>,
    change: Change,
    text: impl FnOnce() -> String,
) -> Result<Said, Refused> {
    if let Some(already) = already::say(open, &change)? {
        return Ok(Said::new(open, false, already));
    }
    open.change(change)?;
    Ok(Said::new(open, true, text()))
}

fn create(opener: &Opener<'_>, create: &CreateArguments) -> Result<Said, Refused> {
    let volume = &create.volume;
    let blocks = blocks(volume, "size", create.size)?;
    let unit = self::blocks(volume, "unit", create.unit)?;
    let (open, name) = find(opener, volume)?;
    let (uuid, checksums) = (uuid(), create.checksums);
    let change = Change::Create { name: name.clone(), blocks, unit, uuid, checksums };
    let text =
        || format!("volume `{name}` of {}: {volume}\n", size(blocks * u64::from(PAGE_BYTES)));
    Ok(make(&open, change, text)?.of(&name))
}

fn delete(opener: &Opener<'_>, delete: &DeleteArguments) -> Result<Said, Refused> {
    let (open, name) = find(opener, &delete.volume)?;
    make(&open, Change::Delete { name: name.clone(), orphan: delete.orphan }, || {
        let rest = match open.settle(GIVING_BACK_MAX) {
            true => "its room is given back",
            false => "the rest of its room is given back when the store is open the next time",
        };
        format!("`{name}` is deleted; {rest}\n")
    })
}

fn rename(opener: &Opener<'_>, it: &NameArguments) -> Result<Said, Refused> {
    let (open, name) = find(opener, &it.volume)?;
    let change = Change::Rename { name: name.clone(), to: it.name.clone() };
    let text = || format!("volume `{name}` is called `{}` now\n", it.name);
    Ok(make(&open, change, text)?.of(&it.name))
}

fn snapshot(opener: &Opener<'_>, it: &NameArguments) -> Result<Said, Refused> {
    let (open, volume) = find(opener, &it.volume)?;
    let name = it.name.clone();
    let change = Change::Snapshot { volume: volume.clone(), name, uuid: uuid() };
    let text = || format!("snapshot `{}` of `{volume}`\n", it.name);
    Ok(make(&open, change, text)?.of(&it.name))
}

fn revert(opener: &Opener<'_>, it: &NameArguments) -> Result<Said, Refused> {
    let (open, volume) = find(opener, &it.volume)?;
    let change = Change::Revert { volume: volume.clone(), snapshot: it.name.clone() };
    let text = || {
        open.settle(GIVING_BACK_MAX);
        format!("volume `{volume}` holds what it held when `{}` was made\n", it.name)
    };
    Ok(make(&open, change, text)?.of(&volume))
}

fn decouple(opener: &Opener<'_>, it: &DecoupleArguments) -> Result<Said, Refused> {
    let rate = rate(&it.volume, it.rate)?;
    let (open, name) = find(opener, &it.volume)?;
    if let Some(already) = already::say(&open, &Change::Decouple { name: name.clone() })? {
        return Ok(Said::new(&open, false, already).of(&name));
    }
    let mut progress = Progress::new(opener, "copying");
    let decoupled = open.decouple(opener, &name, rate, &mut |done| progress.turn(done));
    progress.end();
    let text = match decoupled?.blocks {
        0 => format!("volume `{name}` is on its own; it holds and shares what it did\n"),
        _ => format!("volume `{name}` is on its own; it has what its parent had\n"),
    };
    Ok(Said::new(&open, true, text).of(&name))
}

fn resize(opener: &Opener<'_>, resize: &ResizeArguments) -> Result<Said, Refused> {
    let volume = &resize.volume;
    let blocks = blocks(volume, "size", resize.size)?;
    let (open, name) = find(opener, volume)?;
    let before = open.find(&name)?.blocks;
    let page = u64::from(PAGE_BYTES);
    if blocks < before && !resize.shrink {
        let (found, size) = (before * page, blocks * page);
        let text = format!("resize {volume}: it has {found} bytes, expected {size} at most");
        let hint = "What lies behind the new end would be lost; if it may, add --shrink.";
        return Err(Refused::caller(text).with_hint(hint));
    }
    let text = || {
        open.settle(GIVING_BACK_MAX);
        format!("volume `{name}` has {} now\n", size(blocks * page))
    };
    let said = make(&open, Change::Resize { name: name.clone(), blocks }, text)?.of(&name);
    thick::keep_promise(opener, &open, &name)?;
    Ok(said)
}

fn blocks(volume: &Uri, what: &str, Size(bytes): Size) -> Result<u64, Refused> {
    let page = u64::from(PAGE_BYTES);
    if bytes == 0 || !bytes.is_multiple_of(page) {
        let text = format!("{volume}: {what} is {bytes} bytes, expected a multiple of {page}");
        return Err(Refused::caller(text));
    }
    Ok(bytes / page)
}

/// How fast to copy: bytes in a second.
fn rate(volume: &Uri, rate: Option<Size>) -> Result<Option<u64>, Refused> {
    if let Some(Size(0)) = rate {
        let text = format!("{volume}: rate is 0, expected a byte at least");
        return Err(Refused::caller(text).with_hint("Leave --rate out to copy at full speed."));
    }
    Ok(rate.map(|Size(rate)| rate))
}

fn uuid() -> u128 {
    u128::from(random_seed()) << 64 | u128::from(random_seed())
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::Value;

    use super::{VolumeArguments, run, with_opener};
    use crate::Refused;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        volume: VolumeArguments,
    }

    pub(super) fn say(words: &[&str]) -> Result<String, Refused> {
        let line = Line::try_parse_from(["volume"].iter().chain(words)).unwrap();
        let mut out = Vec::new();
        run(&line.volume, &mut out)?;
        Ok(String::from_utf8(out).unwrap())
    }

    /// A store, and what it is on.
    pub(super) fn pool() -> (tempfile::TempDir, String) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pool");
        let device = format!("file:{}?size=16m&engine=threads", path.display());
        with_opener(|opener| {
            Ok(block::store::create(opener, &device.parse().unwrap(), "pool", false)?)
        })
        .unwrap();
        (directory, device)
    }

    #[test]
    fn volumes_come_are_changed_and_go() {
        let (_directory, device) = pool();
        let volume = |name: &str| format!("volume:[{device}]/{name}");
        let made = say(&["create", &volume("db"), "--size", "1g"]).unwrap();
        assert_eq!(made, format!("volume `db` of 1 GiB: {}\n", volume("db")));
        say(&["create", &volume("safe"), "--size", "1g", "--checksums"]).unwrap();
        let listed = say(&["list", &device, "--json"]).unwrap();
        let listed: Value = serde_json::from_str(&listed).unwrap();
        let sums = |index: usize| listed["volumes"][index]["checksums"].as_bool();
        assert_eq!((sums(0), sums(1)), (Some(false), Some(true)));
        assert!(say(&["list", &device]).unwrap().contains("volume, checksums\n"));
        say(&["delete", &volume("safe")]).unwrap();
        say(&["snapshot", &volume("db"), "monday"]).unwrap();
        say(&["clone", &volume("monday"), "trial"]).unwrap();
        say(&["rename", &volume("trial"), "next"]).unwrap();
        say(&["resize", &volume("next"), "--size", "2g"]).unwrap();
        say(&["revert", &volume("db"), "monday"]).unwrap();

        let listed = say(&["list", &device]).unwrap();
        let lines: Vec<Vec<&str>> =
            listed.lines().map(|line| line.split("  ").map(str::trim).collect()).collect();
        assert_eq!(lines.len(), 4, "{listed}");
        assert!(lines[2].contains(&"snapshot of db"), "{listed}");
        assert!(lines[3].contains(&"clone of monday") && lines[3].contains(&"2 GiB"), "{listed}");
        let json: Value =
            serde_json::from_str(&say(&["list", &device, "--json"]).unwrap()).unwrap();
        assert_eq!(json["volumes"][1]["name"], "monday");
        assert_eq!(json["volumes"][1]["read_only"], true);
        assert_eq!(json["volumes"][0]["size_bytes"], 1_u64 << 30);

        let said = say(&["delete", &volume("next")]).unwrap();
        assert_eq!(said, "`next` is deleted; its room is given back\n");
        assert_eq!(say(&["list", &device]).unwrap().lines().count(), 3);
    }

    #[test]
    fn whoever_says_the_same_twice_is_told_so_and_nothing_changes() {
        let (_directory, device) = pool();
        let volume = |name: &str| format!("volume:[{device}]/{name}");
        let (db, monday, trial) = (volume("db"), volume("monday"), volume("trial"));
        let twice = |words: &[&str], expected: &str| {
            let first = say(words).unwrap();
            let before = say(&["list", &device, "--json"]).unwrap();
            let generation = || {
                with_opener(|opener| Ok(super::find(opener, &db.parse().unwrap())?.0.generation()))
            };
            let then = generation().unwrap();
            let second = say(words).unwrap();
            assert_eq!(second, expected, "{words:?} after {first}");
            assert_ne!(first, second);
            assert_eq!(say(&["list", &device, "--json"]).unwrap(), before, "{words:?}");
            assert_eq!(generation().unwrap(), then, "{words:?}: nothing was written");
        };
        let create = ["create", &db, "--size", "1m", "--unit", "4k", "--checksums"];
        twice(&create, "volume `db` is there already\n");
        twice(&["snapshot", &db, "monday"], "snapshot `monday` of `db` is there already\n");
        let said = "volume `trial`, a clone of `monday`, is there already\n";
        twice(&["clone", &monday, "trial"], said);
        twice(&["resize", &db, "--size", "2m"], "volume `db` has that size already\n");
        twice(&["revert", &db, "monday"], "volume `db` holds what `monday` has already\n");
        let said = "there is no `trial`, and `next` is there already\n";
        twice(&["rename", &trial, "next"], said);
        let said = say(&["rename", &volume("next"), "next"]).unwrap();
        assert_eq!(said, "volume `next` is called that already\n");
        let said = "there is no `next`: nothing was deleted\n";
        twice(&["delete", &volume("next")], said);

        // It is not what it was.
        say(&["resize", &db, "--size", "4m"]).unwrap();
        let refused = say(&["snapshot", &db, "monday"]).unwrap_err();
        assert!(refused.text.contains("`monday`: the name is in use"), "{refused}");
    }

    #[test]
    fn every_verb_says_to_programs_whether_it_was_so_and_what_there_is_now() {
        let (_directory, device) = pool();
        let volume = |name: &str| format!("volume:[{device}]/{name}");
        let (db, trial) = (volume("db"), volume("trial"));
        let cases: [(&[&str], &str); 7] = [
            (&["create", &db, "--size", "1m"], "db"),
            (&["resize", &db, "--size", "2m"], "db"),
            (&["snapshot", &db, "monday"], "monday"),
            (&["revert", &db, "monday"], "db"),
            (&["clone", &volume("monday"), "trial"], "trial"),
            (&["decouple", &trial], "trial"),
            (&["rename", &trial, "next"], "next"),
        ];
        let json = |words: &[&str]| -> Value {
            serde_json::from_str(&say(&[words, &["--json"]].concat()).unwrap()).unwrap()
        };
        for (words, name) in cases {
            // Nothing was written to it, so to go back changes nothing.
            let is_changed = words[0] != "revert";
            for is_changed in [is_changed, false] {
                let found = json(words);
                assert_eq!(found["changed"], is_changed, "{words:?}");
                assert_eq!(found["volume"]["name"], name, "{words:?}");
            }
        }
        let found = json(&["resize", &db, "--size", "2m"]);
        assert_eq!(found["volume"]["size_bytes"], 2 << 20);
        say(&["delete", &volume("monday")]).unwrap();
        let next = volume("next");
        for is_changed in [true, false] {
            let found = json(&["delete", &next]);
            assert_eq!((&found["changed"], &found["volume"]), (&is_changed.into(), &Value::Null));
        }
    }

    #[test]
    fn what_cannot_be_is_refused_with_the_remedy_and_changes_nothing() {
        let (_directory, device) = pool();
        let volume = |name: &str| format!("volume:[{device}]/{name}");
        say(&["create", &volume("db"), "--size", "1m"]).unwrap();
        say(&["snapshot", &volume("db"), "s"]).unwrap();
        say(&["clone", &volume("s"), "c"]).unwrap();
        let before = say(&["list", &device, "--json"]).unwrap();
        let whole = format!("volume:[{device}]");
        for (words, text, hint) in [
            (vec!["create", &volume("db"), "--size", "2m"], "the name is in use", "another name"),
            (vec!["create", &volume("c"), "--size", "1m"], "the name is in use", "another name"),
            (vec!["snapshot", &volume("db"), "c"], "`c`: the name is in use", "another name"),
            (vec!["snapshot", &volume("c"), "s"], "`s`: the name is in use", "another name"),
            (vec!["clone", &volume("c"), "db"], "`db`: the name is in use", "another name"),
            (vec!["rename", &volume("db"), "c"], "`c`: the name is in use", "another name"),
            (vec!["delete", &volume("s")], "1 volumes were made from it", "delete those first"),
            (vec!["rename", &volume("x"), "y"], "volume `x`: there is none", ""),
            (vec!["snapshot", &volume("x"), "y"], "volume `x`: there is none", ""),
            (vec!["resize", &volume("s"), "--size", "2m"], "it is a snapshot", "make a clone"),
            (vec!["resize", &volume("db"), "--size", "4k"], "has 1048576 bytes", "--shrink"),
            (vec!["revert", &volume("c"), "s"], "`s` is not a snapshot of it", ""),
            (vec!["create", &volume("y"), "--size", "1000"], "expected a multiple of 4096", ""),
            (
                vec!["create", &volume("y"), "--size", "1m", "--unit", "12k"],
                "a unit cannot have 3 blocks",
                "4, 8, 16, 32 or 64 KiB",
            ),
            (vec!["create", &whole, "--size", "1m"], "the volume is missing", ""),
        ] {
            let refused = say(&words).unwrap_err();
            assert!(refused.text.contains(text), "{words:?}: {refused}");
            let found = refused.hint.clone().unwrap_or_default();
            assert!(found.contains(hint), "{words:?}: {found}");
        }
        assert_eq!(say(&["list", &device, "--json"]).unwrap(), before);
        say(&["delete", &volume("s"), "--orphan"]).unwrap();
        say(&["resize", &volume("db"), "--size", "4k", "--shrink"]).unwrap();
    }
}
