//! `tenmil volume`: creates, changes, lists and deletes volumes, snapshots and clones.

mod clone;
mod command_result_output;
mod list;
mod rbd_images;
#[cfg(test)]
mod read_only_tests;
pub(super) mod stream_commands;
mod thick;

use std::io::Write;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use tenmil_block::Opener;
use tenmil_block::quantity_parser::parse_size;
use tenmil_block::uri::Uri;
use tenmil_drivers::pool::VolumeRef;
use tenmil_rpc::pool_commands::{CommandResult, JobKind, JobSpec, PoolCommand};

use self::clone::CloneArguments;
use self::list::ListArguments;
use self::stream_commands::{DiffArguments, ReceiveArguments, SendArguments};
use self::thick::InflateArguments;
use super::pool::{EXIT_INTERRUPTED, with_device_kinds};
use super::pool_access::PoolAccess;
use super::write_stdout;
use tenmil_base::Error;

/// Create, change, list or delete volumes of a pool, or images of a Ceph cluster. If another process of this user has the pool open,
/// that process carries out the command.
#[derive(Debug, Args)]
#[command(subcommand_required = true, after_help = EXAMPLES)]
pub(super) struct VolumeArguments {
    #[command(subcommand)]
    command: VolumeCommand,
}

#[derive(Debug, Subcommand)]
enum VolumeCommand {
    /// Create an empty volume: thin-provisioned, or fully allocated with --thick.
    Create(CreateArguments),
    /// Delete a volume or a snapshot and free its space.
    Delete(DeleteArguments),
    /// Rename a volume.
    Rename(NameArguments),
    /// Resize a volume.
    Resize(ResizeArguments),
    /// Create a snapshot: a read-only copy of a volume at this moment.
    Snapshot(NameArguments),
    /// Clone a volume, a snapshot, or an external image.
    Clone(CloneArguments),
    /// Roll a volume back to one of its snapshots.
    Rollback(NameArguments),
    /// Detach a clone from its parent, so that the parent can be deleted (compare rbd flatten).
    Decouple(DecoupleArguments),
    /// Make a volume thick: allocate all of its blocks exclusively, also while it is in use.
    Inflate(InflateArguments),
    /// List the ranges that differ between two volumes or snapshots, from metadata alone.
    Diff(DiffArguments),
    /// Write a snapshot to standard output as a stream, in full or incrementally.
    Send(SendArguments),
    /// Create a snapshot from a stream on standard input.
    Receive(ReceiveArguments),
    /// List the volumes of a pool.
    List(ListArguments),
}

#[derive(Debug, Args)]
struct CreateArguments {
    /// Volume, such as /var/tmp/pool/db: the pool, a slash and the name
    #[arg(value_name = "VOLUME")]
    volume: Uri,

    /// Volume size, such as 10g; may exceed the pool size
    #[arg(long, value_name = "BYTES")]
    size: ByteSize,

    /// Cluster size (allocation unit): 4k, 8k, 16k, 32k or 64k [default: 64k]; of an image of Ceph, size of its
    /// objects: 4k to 32m [default: that of the cluster]
    #[arg(long, value_name = "BYTES")]
    cluster_size: Option<ByteSize>,

    /// Store a checksum of every block, and fail reads of blocks that do not match
    #[arg(long)]
    checksums: bool,

    /// Allocate all blocks now, so that no later write fails because the pool is full
    #[arg(long)]
    thick: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct DeleteArguments {
    /// Volume or snapshot
    #[arg(value_name = "VOLUME")]
    volume: Uri,

    /// Delete a snapshot even if it has clones; the clones keep their data
    #[arg(long)]
    orphan: bool,

    /// Succeed if the volume does not exist, for idempotent scripts
    #[arg(long)]
    if_exists: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct NameArguments {
    /// Volume
    #[arg(value_name = "VOLUME")]
    volume: Uri,

    /// Second name, in the same pool
    #[arg(value_name = "NAME")]
    name: String,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct DecoupleArguments {
    /// Volume; blocks shared inside the pool stay shared, blocks of an external image are copied
    #[arg(value_name = "VOLUME")]
    volume: Uri,

    /// Limit of copied bytes per second, such as 100m
    #[arg(long, value_name = "BYTES")]
    limit_bytes: Option<ByteSize>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct ResizeArguments {
    /// Volume
    #[arg(value_name = "VOLUME")]
    volume: Uri,

    /// New size
    #[arg(long, value_name = "BYTES")]
    size: ByteSize,

    /// Allow shrinking: data beyond the new end are lost
    #[arg(long)]
    shrink: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Byte count argument, such as 10g.
#[derive(Clone, Copy, Debug)]
pub(super) struct ByteSize(pub(super) u64);

impl std::str::FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        parse_size(text).map(Self)
    }
}

const EXAMPLES: &str = "\
Examples:
  tenmil volume create /var/tmp/pool/db --size 100g
  tenmil volume create /var/tmp/pool/safe --size 100g --checksums
  tenmil volume create /var/tmp/pool/log --size 10g --thick
  tenmil volume snapshot /var/tmp/pool/db monday          also while it is served
  tenmil volume clone /var/tmp/pool/monday trial
  tenmil volume clone /var/tmp/pool/vm --from /srv/golden.img --size 20g
  tenmil volume rename /var/tmp/pool/trial next
  tenmil volume resize /var/tmp/pool/next --size 200g
  tenmil volume rollback /var/tmp/pool/db monday
  tenmil volume decouple /var/tmp/pool/next
  tenmil volume inflate /var/tmp/pool/next --limit-bytes 100m
  tenmil volume delete /var/tmp/pool/next
  tenmil volume list /var/tmp/pool
  tenmil volume diff /var/tmp/pool/monday tuesday --json
  tenmil volume send /var/tmp/pool/monday > monday.stream
  tenmil volume receive /mnt/backup/monday < monday.stream
  tenmil volume send /var/tmp/pool/tuesday --from monday |
      tenmil volume receive /mnt/backup/tuesday
  tenmil serve /var/tmp/pool/db -l nbd:/tmp/db
  tenmil volume create rbd:rbd/db --size 100g             an image of a Ceph cluster
  tenmil volume snapshot rbd:rbd/db monday
  tenmil volume list rbd:rbd

/var/tmp/pool/db is the volume db of the pool in the file /var/tmp/pool, in full
'volume:[file:/var/tmp/pool]/db'; of a pool on another device it is 'volume:[URI]/db'.";

impl VolumeArguments {
    /// Whether the command reads only.
    pub(super) fn only_reads(&self) -> bool {
        matches!(
            self.command,
            VolumeCommand::Diff(_) | VolumeCommand::Send(_) | VolumeCommand::List(_)
        )
    }
}

/// Runs the subcommand.
pub(super) fn run_volume(
    arguments: &VolumeArguments,
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    if let Some(text) = rbd_images::run_if_image(&arguments.command)? {
        write_stdout(out, &text)?;
        return Ok(ExitCode::SUCCESS);
    }
    let kinds = if arguments.only_reads() { super::LOOKING_KINDS } else { tenmil::KINDS };
    let text = with_device_kinds(kinds, |opener| match &arguments.command {
        VolumeCommand::Create(it) => create_volume(opener, it),
        VolumeCommand::Delete(it) => {
            let order =
                |name| PoolCommand::Delete { name, orphan: it.orphan, if_exists: it.if_exists };
            execute_and_render(opener, &it.volume, order, it.json)
        }
        VolumeCommand::Rename(it) => {
            let order = |name| PoolCommand::Rename { name, to: it.name.clone() };
            execute_and_render(opener, &it.volume, order, it.json)
        }
        VolumeCommand::Resize(it) => resize_volume(opener, it),
        VolumeCommand::Snapshot(it) => {
            let order = |volume| PoolCommand::Snapshot { volume, name: it.name.clone() };
            execute_and_render(opener, &it.volume, order, it.json)
        }
        VolumeCommand::Clone(it) => clone::clone_volume(opener, it),
        VolumeCommand::Rollback(it) => {
            let order = |volume| PoolCommand::Rollback { volume, snapshot: it.name.clone() };
            execute_and_render(opener, &it.volume, order, it.json)
        }
        VolumeCommand::Decouple(it) => decouple_volume(opener, it),
        VolumeCommand::Inflate(it) => thick::inflate_volume(opener, it),
        VolumeCommand::Diff(diff) => {
            stream_commands::diff_volumes(opener, diff, out).map(|()| Some(String::new()))
        }
        VolumeCommand::Send(send) => {
            stream_commands::send_snapshot(opener, send, out).map(|()| Some(String::new()))
        }
        VolumeCommand::Receive(it) => {
            stream_commands::receive_snapshot(opener, it, out).map(|()| Some(String::new()))
        }
        VolumeCommand::List(list) => list::list_volumes(opener, list).map(Some),
    })?;
    let Some(text) = text else { return Ok(ExitCode::from(EXIT_INTERRUPTED)) };
    write_stdout(out, &text)?;
    Ok(ExitCode::SUCCESS)
}

/// Text to print; `None` if the command was interrupted.
type CommandOutput = Result<Option<String>, Error>;

/// Access to the pool of a volume, in this or another process, and the volume's name.
fn open_pool_of<'a>(opener: &'a Opener<'a>, uri: &Uri) -> Result<(PoolAccess<'a>, String), Error> {
    let place = VolumeRef::parse(uri)?;
    let name = place.volume_name(uri)?.to_owned();
    Ok((PoolAccess::open_or_connect(opener, &place)?, name))
}

/// Executes a pool command on a volume and renders the result.
fn execute_and_render(
    opener: &Opener<'_>,
    uri: &Uri,
    order: impl FnOnce(String) -> PoolCommand,
    is_json: bool,
) -> CommandOutput {
    let (mut access, name) = open_pool_of(opener, uri)?;
    let result = access.execute_command(&order(name))?;
    Ok(Some(command_result_output::render_result(&result, &access, is_json)))
}

/// The same, and afterwards allocates the missing blocks if the volume is thick.
fn execute_and_inflate(
    opener: &Opener<'_>,
    uri: &Uri,
    order: impl FnOnce(String) -> PoolCommand,
    is_json: bool,
) -> CommandOutput {
    let (mut access, name) = open_pool_of(opener, uri)?;
    let result = access.execute_command(&order(name.clone()))?;
    let is_thick = result.volume.as_ref().is_some_and(|volume| volume["thick"] == true);
    let owed = JobSpec { what: JobKind::Inflate(name), rate_bytes: None, unheard_max: None };
    if is_thick && access.run_job(&owed, "inflating")?.is_none() {
        return Ok(None);
    }
    Ok(Some(command_result_output::render_result(&result, &access, is_json)))
}

/// Runs a long job on a volume and renders the result.
fn run_job_and_render(
    opener: &Opener<'_>,
    uri: &Uri,
    rate: Option<ByteSize>,
    long: (fn(String) -> JobKind, &'static str),
    is_json: bool,
) -> CommandOutput {
    let rate_bytes = copy_rate(uri, rate)?;
    let (mut access, name) = open_pool_of(opener, uri)?;
    let (what, phase) = long;
    let long = JobSpec { what: what(name), rate_bytes, unheard_max: None };
    let Some(done) = access.run_job(&long, phase)? else { return Ok(None) };
    let result = CommandResult::from_json(&done);
    let result = result
        .ok_or_else(|| Error::remote(format!("{uri:#}: found {done}, expected what it is")))?;
    Ok(Some(command_result_output::render_result(&result, &access, is_json)))
}

fn create_volume(opener: &Opener<'_>, it: &CreateArguments) -> CommandOutput {
    let (ByteSize(size_bytes), ByteSize(unit_bytes)) =
        (it.size, it.cluster_size.unwrap_or(clone::UNIT));
    let (checksums, thick) = (it.checksums, it.thick);
    let order = |name| PoolCommand::Create { name, size_bytes, unit_bytes, checksums, thick };
    execute_and_inflate(opener, &it.volume, order, it.json)
}

fn resize_volume(opener: &Opener<'_>, it: &ResizeArguments) -> CommandOutput {
    let (ByteSize(size_bytes), shrink) = (it.size, it.shrink);
    let order = |name| PoolCommand::Resize { name, size_bytes, shrink };
    execute_and_inflate(opener, &it.volume, order, it.json)
}

fn decouple_volume(opener: &Opener<'_>, it: &DecoupleArguments) -> CommandOutput {
    run_job_and_render(opener, &it.volume, it.limit_bytes, (JobKind::Decouple, "copying"), it.json)
}

/// Validates the limit of copied bytes per second.
fn copy_rate(volume: &Uri, rate: Option<ByteSize>) -> Result<Option<u64>, Error> {
    if let Some(ByteSize(0)) = rate {
        let text = format!("{volume:#}: rate is 0, expected a byte at least");
        return Err(Error::usage(text).with_hint("Leave --limit-bytes out to copy at full speed."));
    }
    Ok(rate.map(|ByteSize(rate)| rate))
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::Value;

    use tenmil_drivers::pool::{OpenPool, VolumeRef};

    use super::{VolumeArguments, run_volume};
    use crate::commands::pool::with_opener;
    use tenmil_base::Error;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        volume: VolumeArguments,
    }

    pub(super) fn run_volume_command(words: &[&str]) -> Result<String, Error> {
        let line = Line::try_parse_from(["volume"].iter().chain(words)).unwrap();
        let mut out = Vec::new();
        run_volume(&line.volume, &mut out)?;
        Ok(String::from_utf8(out).unwrap())
    }

    /// Creates a pool in a temporary directory.
    pub(super) fn test_pool() -> (tempfile::TempDir, String) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pool");
        let device = format!("file:{}?size=16m&engine=threads", path.display());
        with_opener(|opener| {
            tenmil_drivers::pool::create_pool(opener, &device.parse().unwrap(), "pool", false)
        })
        .unwrap();
        (directory, device)
    }

    #[test]
    fn volumes_are_created_changed_and_deleted() {
        let (_directory, device) = test_pool();
        let volume = |name: &str| format!("volume:[{device}]/{name}");
        let made = run_volume_command(&["create", &volume("db"), "--size", "1g"]).unwrap();
        assert_eq!(made, format!("volume `db` of 1 GiB: {}\n", volume("db")));
        run_volume_command(&["create", &volume("safe"), "--size", "1g", "--checksums"]).unwrap();
        let listed = run_volume_command(&["list", &device, "--json"]).unwrap();
        let listed: Value = serde_json::from_str(&listed).unwrap();
        let sums = |index: usize| listed["volumes"][index]["checksums"].as_bool();
        assert_eq!((sums(0), sums(1)), (Some(false), Some(true)));
        assert!(run_volume_command(&["list", &device]).unwrap().contains("volume, checksums\n"));
        run_volume_command(&["delete", &volume("safe")]).unwrap();
        run_volume_command(&["snapshot", &volume("db"), "monday"]).unwrap();
        run_volume_command(&["clone", &volume("monday"), "trial"]).unwrap();
        run_volume_command(&["rename", &volume("trial"), "next"]).unwrap();
        run_volume_command(&["resize", &volume("next"), "--size", "2g"]).unwrap();
        run_volume_command(&["rollback", &volume("db"), "monday"]).unwrap();

        let listed = run_volume_command(&["list", &device]).unwrap();
        let lines: Vec<Vec<&str>> =
            listed.lines().map(|line| line.split("  ").map(str::trim).collect()).collect();
        assert_eq!(lines.len(), 4, "{listed}");
        assert!(lines[2].contains(&"snapshot of db"), "{listed}");
        assert!(lines[3].contains(&"clone of monday") && lines[3].contains(&"2 GiB"), "{listed}");
        let json: Value =
            serde_json::from_str(&run_volume_command(&["list", &device, "--json"]).unwrap())
                .unwrap();
        assert_eq!(json["volumes"][1]["name"], "monday");
        assert_eq!(json["volumes"][1]["read_only"], true);
        assert_eq!(json["volumes"][0]["size_bytes"], 1_u64 << 30);

        let said = run_volume_command(&["delete", &volume("next")]).unwrap();
        assert_eq!(said, "`next` is deleted; its space is free\n");
        assert_eq!(run_volume_command(&["list", &device]).unwrap().lines().count(), 3);
    }

    #[test]
    fn repeated_command_reports_no_change() {
        let (_directory, device) = test_pool();
        let volume = |name: &str| format!("volume:[{device}]/{name}");
        let (db, monday, trial) = (volume("db"), volume("monday"), volume("trial"));
        let twice = |words: &[&str], expected: &str| {
            let first = run_volume_command(words).unwrap();
            let before = run_volume_command(&["list", &device, "--json"]).unwrap();
            let generation = || {
                with_opener(|opener| {
                    let place = VolumeRef::parse(&db.parse().unwrap())?;
                    Ok(OpenPool::open(opener, &place)?.generation())
                })
            };
            let then = generation().unwrap();
            let second = run_volume_command(words).unwrap();
            assert_eq!(second, expected, "{words:?} after {first}");
            assert_ne!(first, second);
            assert_eq!(
                run_volume_command(&["list", &device, "--json"]).unwrap(),
                before,
                "{words:?}"
            );
            assert_eq!(generation().unwrap(), then, "{words:?}: nothing was written");
        };
        let create = ["create", &db, "--size", "1m", "--cluster-size", "4k", "--checksums"];
        twice(&create, "volume `db` is there already\n");
        twice(&["snapshot", &db, "monday"], "snapshot `monday` of `db` is there already\n");
        let said = "volume `trial`, a clone of `monday`, is there already\n";
        twice(&["clone", &monday, "trial"], said);
        twice(&["resize", &db, "--size", "2m"], "volume `db` has that size already\n");
        twice(&["rollback", &db, "monday"], "volume `db` holds what `monday` has already\n");
        let said = "there is no `trial`, and `next` is there already\n";
        twice(&["rename", &trial, "next"], said);
        let said = run_volume_command(&["rename", &volume("next"), "next"]).unwrap();
        assert_eq!(said, "volume `next` is called that already\n");
        let said = "there is no `next`: nothing was deleted\n";
        twice(&["delete", "--if-exists", &volume("next")], said);
        for (wrong, expected) in [
            ("next", "no volume `next`, expected one that `tenmil volume list` shows"),
            ("dv", "no volume `dv`, expected `db`"),
        ] {
            let refused = run_volume_command(&["delete", &volume(wrong)]).unwrap_err();
            assert!(refused.text.contains(expected), "{refused}");
            assert!(refused.hint.unwrap().contains("--if-exists"));
        }

        // The volume has changed since the snapshot, so the same command is an error now.
        run_volume_command(&["resize", &db, "--size", "4m"]).unwrap();
        let refused = run_volume_command(&["snapshot", &db, "monday"]).unwrap_err();
        assert!(refused.text.contains("`monday`: the name is in use"), "{refused}");
    }

    #[test]
    fn every_command_reports_changed_and_new_state_as_json() {
        let (_directory, device) = test_pool();
        let volume = |name: &str| format!("volume:[{device}]/{name}");
        let (db, trial) = (volume("db"), volume("trial"));
        let cases: [(&[&str], &str); 7] = [
            (&["create", &db, "--size", "1m"], "db"),
            (&["resize", &db, "--size", "2m"], "db"),
            (&["snapshot", &db, "monday"], "monday"),
            (&["rollback", &db, "monday"], "db"),
            (&["clone", &volume("monday"), "trial"], "trial"),
            (&["decouple", &trial], "trial"),
            (&["rename", &trial, "next"], "next"),
        ];
        let json = |words: &[&str]| -> Value {
            serde_json::from_str(&run_volume_command(&[words, &["--json"]].concat()).unwrap())
                .unwrap()
        };
        for (words, name) in cases {
            // A rollback of an unwritten volume changes nothing.
            let is_changed = words[0] != "rollback";
            for is_changed in [is_changed, false] {
                let found = json(words);
                assert_eq!(found["changed"], is_changed, "{words:?}");
                assert_eq!(found["volume"]["name"], name, "{words:?}");
            }
        }
        let found = json(&["resize", &db, "--size", "2m"]);
        assert_eq!(found["volume"]["size_bytes"], 2 << 20);
        run_volume_command(&["delete", &volume("monday")]).unwrap();
        let next = volume("next");
        for is_changed in [true, false] {
            let found = json(&["delete", &next, "--if-exists"]);
            assert_eq!((&found["changed"], &found["volume"]), (&is_changed.into(), &Value::Null));
        }
    }

    #[test]
    fn impossible_command_is_rejected_with_its_fix_and_changes_nothing() {
        let (_directory, device) = test_pool();
        let volume = |name: &str| format!("volume:[{device}]/{name}");
        run_volume_command(&["create", &volume("db"), "--size", "1m"]).unwrap();
        run_volume_command(&["snapshot", &volume("db"), "s"]).unwrap();
        run_volume_command(&["clone", &volume("s"), "c"]).unwrap();
        let before = run_volume_command(&["list", &device, "--json"]).unwrap();
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
            (vec!["rollback", &volume("c"), "s"], "`s` is not a snapshot of it", ""),
            (vec!["create", &volume("y"), "--size", "1000"], "expected a multiple of 4096", ""),
            (
                vec!["create", &volume("y"), "--size", "1m", "--cluster-size", "12k"],
                "a unit cannot have 3 blocks",
                "4, 8, 16, 32 or 64 KiB",
            ),
            (vec!["create", &whole, "--size", "1m"], "the volume is missing", ""),
        ] {
            let refused = run_volume_command(&words).unwrap_err();
            assert!(refused.text.contains(text), "{words:?}: {refused}");
            let found = refused.hint.clone().unwrap_or_default();
            assert!(found.contains(hint), "{words:?}: {found}");
        }
        assert_eq!(run_volume_command(&["list", &device, "--json"]).unwrap(), before);
        run_volume_command(&["delete", &volume("s"), "--orphan"]).unwrap();
        run_volume_command(&["resize", &volume("db"), "--size", "4k", "--shrink"]).unwrap();
    }
}
