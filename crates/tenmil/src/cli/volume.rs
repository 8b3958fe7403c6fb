//! `tenmil volume`.

mod clone;
mod list;
mod said;
pub(super) mod stream;
mod thick;

use std::io::Write;
use std::process::ExitCode;

use block::Opener;
use block::quantity::parse_size;
use block::store::Place;
use block::uri::Uri;
use clap::{Args, Subcommand};
use control::orders::{Long, Order, Told, What};

use self::clone::CloneArguments;
use self::list::ListArguments;
use self::stream::{DiffArguments, ReceiveArguments, SendArguments};
use self::thick::InflateArguments;
use super::hand::Hand;
use super::store::{EXIT_INTERRUPTED, with_opener};
use super::write_out;
use crate::Refused;

/// Make, change, list or delete volumes of a store; if another process of yours has it open, that
/// process does it.
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

    /// Succeed even if there is no such volume, for scripts that say it twice
    #[arg(long)]
    if_exists: bool,

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
  tenmil serve volume:[file:/var/tmp/pool]/db -l nbd:/tmp/db
      tenmil volume snapshot volume:[file:/var/tmp/pool]/db now, while it is served";

impl VolumeArguments {
    /// Whether it only looks.
    pub(super) fn only_reads(&self) -> bool {
        matches!(self.command, Command::Diff(_) | Command::Send(_) | Command::List(_))
    }
}

/// Makes a change, or lists.
pub(super) fn run(arguments: &VolumeArguments, out: &mut dyn Write) -> Result<ExitCode, Refused> {
    let text = with_opener(|opener| match &arguments.command {
        Command::Create(it) => create(opener, it),
        Command::Delete(it) => {
            let order = |name| Order::Delete { name, orphan: it.orphan, if_exists: it.if_exists };
            give(opener, &it.volume, order, it.json)
        }
        Command::Rename(it) => {
            let order = |name| Order::Rename { name, to: it.name.clone() };
            give(opener, &it.volume, order, it.json)
        }
        Command::Resize(it) => resize(opener, it),
        Command::Snapshot(it) => {
            let order = |volume| Order::Snapshot { volume, name: it.name.clone() };
            give(opener, &it.volume, order, it.json)
        }
        Command::Clone(it) => clone::clone(opener, it),
        Command::Revert(it) => {
            let order = |volume| Order::Revert { volume, snapshot: it.name.clone() };
            give(opener, &it.volume, order, it.json)
        }
        Command::Decouple(it) => decouple(opener, it),
        Command::Inflate(it) => thick::inflate(opener, it),
        Command::Diff(diff) => stream::diff(opener, diff, out).map(|()| Some(String::new())),
        Command::Send(send) => stream::send(opener, send, out).map(|()| Some(String::new())),
        Command::Receive(it) => stream::receive(opener, it, out).map(|()| Some(String::new())),
        Command::List(list) => list::list(opener, list).map(Some),
    })?;
    let Some(text) = text else { return Ok(ExitCode::from(EXIT_INTERRUPTED)) };
    write_out(out, &text)?;
    Ok(ExitCode::SUCCESS)
}

/// What is to be printed; none if it was stopped.
type Printed = Result<Option<String>, Refused>;

/// The store of a volume, wherever it is open, and the volume's name.
fn hand_on<'a>(opener: &'a Opener<'a>, uri: &Uri) -> Result<(Hand<'a>, String), Refused> {
    let place = Place::of(uri)?;
    let name = place.volume(uri)?.to_owned();
    Ok((Hand::on(opener, &place)?, name))
}

/// Gives an order about a volume, and says what came of it.
fn give(
    opener: &Opener<'_>,
    uri: &Uri,
    order: impl FnOnce(String) -> Order,
    is_json: bool,
) -> Printed {
    let (mut hand, name) = hand_on(opener, uri)?;
    let told = hand.order(&order(name))?;
    Ok(Some(said::render(&told, &hand, is_json)))
}

/// The same, and then gives a thick volume what it is owed.
fn give_thick(
    opener: &Opener<'_>,
    uri: &Uri,
    order: impl FnOnce(String) -> Order,
    is_json: bool,
) -> Printed {
    let (mut hand, name) = hand_on(opener, uri)?;
    let told = hand.order(&order(name.clone()))?;
    let is_thick = told.volume.as_ref().is_some_and(|volume| volume["thick"] == true);
    let owed = Long { what: What::Inflate(name), rate_bytes: None, unheard_max: None };
    if is_thick && hand.long(&owed, "inflating")?.is_none() {
        return Ok(None);
    }
    Ok(Some(said::render(&told, &hand, is_json)))
}

/// Has something long done to a volume.
fn give_long(
    opener: &Opener<'_>,
    uri: &Uri,
    rate: Option<Size>,
    long: (fn(String) -> What, &'static str),
    is_json: bool,
) -> Printed {
    let rate_bytes = self::rate(uri, rate)?;
    let (mut hand, name) = hand_on(opener, uri)?;
    let (what, phase) = long;
    let long = Long { what: what(name), rate_bytes, unheard_max: None };
    let Some(done) = hand.long(&long, phase)? else { return Ok(None) };
    let told = Told::from_json(&done);
    let told =
        told.ok_or_else(|| Refused::peer(format!("{uri}: found {done}, expected what it is")))?;
    Ok(Some(said::render(&told, &hand, is_json)))
}

fn create(opener: &Opener<'_>, it: &CreateArguments) -> Printed {
    let (Size(size_bytes), Size(unit_bytes)) = (it.size, it.unit);
    let (checksums, thick) = (it.checksums, it.thick);
    let order = |name| Order::Create { name, size_bytes, unit_bytes, checksums, thick };
    give_thick(opener, &it.volume, order, it.json)
}

fn resize(opener: &Opener<'_>, it: &ResizeArguments) -> Printed {
    let (Size(size_bytes), shrink) = (it.size, it.shrink);
    let order = |name| Order::Resize { name, size_bytes, shrink };
    give_thick(opener, &it.volume, order, it.json)
}

fn decouple(opener: &Opener<'_>, it: &DecoupleArguments) -> Printed {
    give_long(opener, &it.volume, it.rate, (What::Decouple, "copying"), it.json)
}

/// How fast to copy: bytes in a second.
fn rate(volume: &Uri, rate: Option<Size>) -> Result<Option<u64>, Refused> {
    if let Some(Size(0)) = rate {
        let text = format!("{volume}: rate is 0, expected a byte at least");
        return Err(Refused::caller(text).with_hint("Leave --rate out to copy at full speed."));
    }
    Ok(rate.map(|Size(rate)| rate))
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::Value;

    use block::store::{OpenStore, Place};

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
                with_opener(|opener| {
                    let place = Place::of(&db.parse().unwrap())?;
                    Ok(OpenStore::open(opener, &place)?.generation())
                })
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
        twice(&["delete", "--if-exists", &volume("next")], said);
        for (wrong, expected) in [
            ("next", "no volume `next`, expected one that `tenmil volume list` shows"),
            ("dv", "no volume `dv`, expected `db`"),
        ] {
            let refused = say(&["delete", &volume(wrong)]).unwrap_err();
            assert!(refused.text.contains(expected), "{refused}");
            assert!(refused.hint.unwrap().contains("--if-exists"));
        }

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
            let found = json(&["delete", &next, "--if-exists"]);
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
