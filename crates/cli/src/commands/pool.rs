//! `tenmil pool`: creates, shows, checks, grows and rescues pools.

mod check;
mod grow;
mod list;
mod rescue;
mod scrub;
mod set;
mod takeover;

use std::fmt::Write as _;
use std::io::Write;
use std::process::ExitCode;

use clap::{Args, Subcommand};
use serde_json::json;
use tenmil_block::uri::Uri;
use tenmil_block::{NamedDeviceType, Opener};
use tenmil_dma::RegionTable;
use tenmil_drivers::pool::{self, CreateResult, PAGE_BYTES, VolumeRef};
use tenmil_linux::{Clock, random_seed};

use self::grow::GrowArguments;
use self::list::{ListArguments, PoolSummary};
use self::rescue::RescueArguments;
use self::scrub::ScrubArguments;
use self::set::SetArguments;
use self::takeover::TakeoverArguments;
use super::write_stdout;
use tenmil_base::Error;
use tenmil_base::text::quote_shell_word;

/// Create a pool of volumes on devices, show it, check or scrub it, set capacity alerts, grow it, or
/// rescue its data.
#[derive(Debug, Args)]
#[command(subcommand_required = true, after_help = EXAMPLES)]
pub(super) struct PoolArguments {
    #[command(subcommand)]
    command: PoolSubcommand,
}

#[derive(Debug, Subcommand)]
enum PoolSubcommand {
    /// Create an empty pool on one or more devices.
    Create(CreateArguments),
    /// Show a pool and its space usage; exit status 1 if it has stopped.
    Open(ShowArguments),
    /// Show several pools, one per line; exit status 1 if one of them has stopped.
    List(ListArguments),
    /// Read and cross-check all metadata of a pool, also while it is in use.
    Check(ShowArguments),
    /// Read all data of a pool and verify their checksums where present, also while it is in use.
    Scrub(ScrubArguments),
    /// Set the capacity alert thresholds of a pool, or record new locations of its devices.
    Set(SetArguments),
    /// Grow a pool to the size of its devices, or add devices, also while it is in use.
    Grow(GrowArguments),
    /// Copy the volumes of a pool with damaged metadata to another pool.
    Rescue(RescueArguments),
    /// Take over a pool whose owner, a process that had it open for writing, has certainly ended.
    Takeover(TakeoverArguments),
}

#[derive(Debug, Args)]
struct CreateArguments {
    /// Devices, such as 'file:/var/tmp/pool?size=10g'; from then on the first one identifies the pool
    #[arg(value_name = "URI", required = true, num_args = 1..)]
    devices: Vec<Uri>,

    /// Name of the pool
    #[arg(long, default_value = "pool")]
    name: String,

    /// Overwrite existing data of the devices
    #[arg(long)]
    overwrite: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct ShowArguments {
    /// Device of the pool
    #[arg(value_name = "URI")]
    device: Uri,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  tenmil pool create 'file:/var/tmp/pool?size=10g'
  tenmil pool open /var/tmp/pool
  tenmil pool list /var/tmp/pool /var/tmp/other --json | jq .pools
  tenmil pool set /var/tmp/pool --thresholds 70,90
  tenmil pool check /var/tmp/pool
  tenmil pool scrub /var/tmp/pool --limit-bytes 100m
  truncate -s 20g /var/tmp/pool && tenmil pool grow /var/tmp/pool
  tenmil pool grow /var/tmp/pool --add 'file:/var/tmp/more?size=10g'
  tenmil pool set /var/tmp/pool --device 1=/mnt/more
  tenmil pool rescue /var/tmp/pool /var/tmp/other
  tenmil pool takeover tcp://192.0.2.1/nqn.2026-01.org.tenmil:disk/1 --force
  tenmil volume create /var/tmp/pool/db --size 100g";

/// Exit status of a process that SIGINT has ended, by shell convention (128 + 2).
pub(super) const EXIT_INTERRUPTED: u8 = 130;

/// Capacity of the DMA region table: a device and each device below it use one or two entries.
pub(super) const REGIONS_MAX: usize = 256;

impl PoolArguments {
    /// Whether the command creates and grows no file: it reads only, or takes over what exists.
    pub(super) fn creates_and_grows_no_file(&self) -> bool {
        matches!(
            self.command,
            PoolSubcommand::Open(_)
                | PoolSubcommand::List(_)
                | PoolSubcommand::Check(_)
                | PoolSubcommand::Scrub(_)
                | PoolSubcommand::Takeover(_)
        )
    }
}

/// Runs the subcommand.
pub(super) fn run_pool(arguments: &PoolArguments, out: &mut dyn Write) -> Result<ExitCode, Error> {
    let looks = matches!(arguments.command, PoolSubcommand::Open(_) | PoolSubcommand::List(_));
    let kinds = if looks { super::LOOKING_KINDS } else { tenmil::KINDS };
    with_device_kinds(kinds, |opener| match &arguments.command {
        PoolSubcommand::Create(create) => {
            write_stdout(out, &create_pool(opener, create)?)?;
            Ok(ExitCode::SUCCESS)
        }
        PoolSubcommand::Set(it) => {
            write_stdout(out, &set::set_pool(opener, it)?)?;
            Ok(ExitCode::SUCCESS)
        }
        PoolSubcommand::Open(show) => {
            let summary = PoolSummary::from_device(opener, &show.device)?;
            let text =
                if show.json { format!("{:#}\n", summary.as_json()) } else { summary.as_text() };
            write_stdout(out, &text)?;
            Ok(summary.exit_code())
        }
        PoolSubcommand::List(list) => {
            let (text, code) = list::list_pools(opener, list)?;
            write_stdout(out, &text)?;
            Ok(code)
        }
        PoolSubcommand::Check(show) => check::check_pool(opener, show, out),
        PoolSubcommand::Scrub(scrub) => scrub::scrub_pool(opener, scrub, out),
        PoolSubcommand::Grow(it) => {
            write_stdout(out, &grow::grow_pool(opener, it)?)?;
            Ok(ExitCode::SUCCESS)
        }
        PoolSubcommand::Rescue(rescue) => rescue::rescue_pool(opener, rescue, out),
        PoolSubcommand::Takeover(it) => {
            write_stdout(out, &takeover::takeover_pool(opener, it)?)?;
            Ok(ExitCode::SUCCESS)
        }
    })
}

fn create_pool(opener: &Opener<'_>, create: &CreateArguments) -> Result<String, Error> {
    let CreateArguments { devices, name, overwrite, json } = create;
    let [device, others @ ..] = &devices[..] else {
        return Err(Error::usage("pool create: no device is named, expected one".to_owned()));
    };
    let made = pool::create_on_devices(opener, (device, others), name, *overwrite)?;
    let CreateResult { blocks, was_there } = made;
    let on = devices.iter().map(|device| format!("{device:#}")).collect::<Vec<_>>().join(", ");
    let size = blocks * u64::from(PAGE_BYTES);
    let volume =
        quote_shell_word(&format!("{:#}", VolumeRef::pool_on(device).uri_of_other_volume("NAME")));
    let next = format!("make a volume as in: tenmil volume create {volume} --size 1g\n");
    Ok(match (*json, was_there) {
        (true, _) => {
            let uri = device.to_string();
            let devices: Vec<String> = devices.iter().map(ToString::to_string).collect();
            let made = json!({
                "name": name, "uri": uri, "devices": devices, "size_bytes": size, "changed": !was_there
            });
            format!("{made:#}\n")
        }
        (false, true) => format!("pool `{name}` is there already: {size} bytes on {on}\n"),
        (false, false) => format!("pool `{name}`: {size} bytes on {on}\n{next}"),
    })
}

/// Calls `body` with an opener for the devices of a command.
#[cfg(test)]
pub(super) fn with_opener<T>(
    body: impl FnOnce(&Opener<'_>) -> Result<T, Error>,
) -> Result<T, Error> {
    with_device_kinds(tenmil::KINDS, body)
}

/// Calls `body` with an opener of these kinds of devices.
pub(super) fn with_device_kinds<T>(
    kinds: &[NamedDeviceType<'_>],
    body: impl FnOnce(&Opener<'_>) -> Result<T, Error>,
) -> Result<T, Error> {
    let regions = RegionTable::new(REGIONS_MAX);
    let (clock, seed) = (Clock::start(), random_seed());
    body(&Opener { regions: &regions, clock, seed, kinds })
}

/// Aligns the cells of rows in columns: the first and last column to the left, the others to the right. A device
/// may hold any name, so what a terminal would act on is escaped.
pub(super) fn align_columns<const N: usize>(rows: &[[String; N]]) -> String {
    let rows: Vec<[String; N]> =
        rows.iter().map(|row| row.each_ref().map(|cell| tenmil_base::text::escape(cell))).collect();
    let width =
        |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for row in &rows {
        for (column, cell) in row.iter().enumerate() {
            let _ = match column {
                0 => write!(text, "{cell:<0$}", width(0)),
                last if last + 1 == N => write!(text, "  {cell}"),
                _ => write!(text, "  {cell:>0$}", width(column)),
            };
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use std::process::ExitCode;

    use clap::Parser;
    use serde_json::Value;

    use tenmil_drivers::pool::{OpenPool, VolumeOp, VolumeRef};

    use super::{PoolArguments, align_columns, run_pool, with_opener};
    use tenmil_base::Error;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        store: PoolArguments,
    }

    fn run_pool_command(words: &[&str]) -> Result<(ExitCode, String), Error> {
        let line = Line::try_parse_from(["pool"].iter().chain(words)).unwrap();
        let mut out = Vec::new();
        let code = run_pool(&line.store, &mut out)?;
        Ok((code, String::from_utf8(out).unwrap()))
    }

    #[test]
    fn pool_is_created_once_listed_and_checked_clean() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pool");
        let device = format!("file:{}?size=16m&engine=threads", path.display());
        let (_, made) = run_pool_command(&["create", &device, "--name", "pool"]).unwrap();
        assert!(made.starts_with("pool `pool`: 16777216 bytes on file:"), "{made}");
        assert!(made.contains(&format!("'volume:[{device}]/NAME'")), "{made}");

        let (_, again) = run_pool_command(&["create", &device, "--name", "pool"]).unwrap();
        assert!(again.starts_with("pool `pool` is there already: 16777216 bytes on"), "{again}");
        let (_, again) =
            run_pool_command(&["create", &device, "--name", "pool", "--json"]).unwrap();
        let again: Value = serde_json::from_str(&again).unwrap();
        assert_eq!((&again["changed"], &again["name"]), (&false.into(), &"pool".into()));

        let refused = run_pool_command(&["create", &device, "--name", "other"]).unwrap_err();
        assert!(refused.text.contains("pool create would destroy what is there"), "{refused}");
        assert!(refused.hint.unwrap().contains("--overwrite"));

        let (_, shown) = run_pool_command(&["open", &device]).unwrap();
        assert!(shown.contains("generation 2") && shown.contains("capacity 16 MiB: "), "{shown}");
        let (_, listed) = run_pool_command(&["list", &device]).unwrap();
        let [head, line] = listed.lines().collect::<Vec<_>>()[..] else { panic!("{listed}") };
        assert!(head.starts_with("pool") && line.starts_with("pool "), "{listed}");
        let (code, checked) = run_pool_command(&["check", &device, "--json"]).unwrap();
        let checked: Value = serde_json::from_str(&checked).unwrap();
        assert_eq!((code, &checked["clean"]), (ExitCode::SUCCESS, &true.into()));
    }

    #[test]
    fn pool_on_several_devices_is_named_by_the_first() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let file = |name: &str| format!("file:{}?engine=threads", path(name).display());
        let new = |name: &str, size: &str| format!("{}&size={size}", file(name));
        let [a, b, c] = ["a", "b", "c"].map(file);
        let (_, made) = run_pool_command(&["create", &new("a", "8m"), &new("b", "4m")]).unwrap();
        let size = (8 << 20) + (4 << 20) - 4096;
        assert!(made.starts_with(&format!("pool `pool`: {size} bytes on file:")), "{made}");
        let (_, again) = run_pool_command(&["create", &a, &b, "--json"]).unwrap();
        let again: Value = serde_json::from_str(&again).unwrap();
        assert_eq!((&again["changed"], &again["devices"][1]), (&false.into(), &b.clone().into()));
        let (_, shown) = run_pool_command(&["open", &a]).unwrap();
        assert!(
            shown.contains(&format!("\n  device 0: 8 MiB on {a}\n  device 1: 3.9 MiB on {b}\n"))
        );
        let (_, listed) = run_pool_command(&["list", &a]).unwrap();
        assert!(listed.ends_with("and 1 more\n"), "{listed}");

        let (_, grown) =
            run_pool_command(&["grow", &a, "--add", &new("c", "4m"), "--add", &b]).unwrap();
        assert!(grown.starts_with(&format!("{b} is device 1 of the pool already\nthe pool has ")));
        assert!(grown.contains(" now, and had 11.9 MiB\n") && grown.contains(&format!("on {c}\n")));
        let (_, same) = run_pool_command(&["grow", &a]).unwrap();
        assert!(same.starts_with("the pool has 15.9 MiB already, as its devices have\n"), "{same}");
        let refused = run_pool_command(&["grow", &a, "--add", &file("missing")]).unwrap_err();
        assert!(refused.text.contains("missing"), "{refused}");

        std::fs::rename(path("b"), path("moved")).unwrap();
        let refused = run_pool_command(&["list", &a]).unwrap_err();
        assert!(refused.text.contains("device 1, file:"), "{refused}");
        let moved = file("moved");
        for already in ["", " already"] {
            let (_, said) =
                run_pool_command(&["set", &a, "--device", &format!("1={moved}")]).unwrap();
            assert_eq!(said, format!("device 1 of pool `pool` is at {moved}{already}\n"));
        }
        let (_, json) = run_pool_command(&["check", &a, "--json"]).unwrap();
        let json: Value = serde_json::from_str(&json).unwrap();
        let devices = json["devices"].as_array().unwrap();
        assert_eq!((&json["clean"], devices.len()), (&true.into(), 3));
        assert_eq!((&devices[1]["uri"], &devices[1]["number"]), (&moved.clone().into(), &1.into()));
        let refused =
            run_pool_command(&["set", &a, "--device", &format!("7={moved}")]).unwrap_err();
        assert!(refused.text.contains("it has no device 7, expected 2 at most"), "{refused}");
        let refused = run_pool_command(&["open", &moved]).unwrap_err();
        assert!(refused.text.contains("it is device 1 of pool `pool`"), "{refused}");
        assert!(refused.hint.unwrap().contains(&path("a").display().to_string()));
        for wrong in ["0=ram:1m", "x", "1=", "1"] {
            let line = Line::try_parse_from(["pool", "set", &a, "--device", wrong]);
            assert!(line.is_err(), "{wrong}");
        }
        assert!(Line::try_parse_from(["pool", "set", &a]).is_err(), "it says nothing");
    }

    #[test]
    fn thresholds_are_set_and_shown() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pool");
        let device = format!("file:{}?size=16m&engine=threads", path.display());
        run_pool_command(&["create", &device]).unwrap();
        let shown = || run_pool_command(&["open", &device]).unwrap().1;
        assert!(shown().contains("capacity alerts: 80 % and 95 %"), "{}", shown());
        let (_, said) = run_pool_command(&["set", &device, "--thresholds", "70,90"]).unwrap();
        assert_eq!(said, "capacity alerts of pool `pool`: 70 % and 90 %\n");
        let (_, said) = run_pool_command(&["set", &device, "--thresholds", "70,90"]).unwrap();
        assert!(said.contains("`pool` already: "), "{said}");
        let (_, said) =
            run_pool_command(&["set", &device, "--thresholds", "60", "--json"]).unwrap();
        let said: Value = serde_json::from_str(&said).unwrap();
        assert_eq!(said["changed"], true);
        assert_eq!(said["thresholds_percent"], serde_json::json!([60]));
        run_pool_command(&["set", &device, "--thresholds", "none"]).unwrap();
        assert!(shown().contains("capacity alerts: none"), "{}", shown());
        let refused = run_pool_command(&["set", &device, "--thresholds", "90,80"]).unwrap_err();
        assert!(refused.text.contains("the lower one first"), "{refused}");
        for wrong in ["101", "0,50", "1,2,3", "x", "50,"] {
            let line = Line::try_parse_from(["pool", "set", &device, "--thresholds", wrong]);
            assert!(line.is_err(), "{wrong}");
        }
    }

    #[test]
    fn device_without_pool_or_too_small_is_rejected_by_name() {
        let directory = tempfile::tempdir().unwrap();
        let device = |name: &str, size: &str| {
            let path = directory.path().join(name);
            format!("file:{}?size={size}&engine=threads", path.display())
        };
        let small = device("small", "1m");
        let refused = run_pool_command(&["create", &small]).unwrap_err();
        let expected = "the device has 256 blocks of 4 KiB, expected 512 at least";
        assert_eq!(refused.text, format!("{small}: {expected}"));
        let raw = device("raw", "4m");
        let refused = run_pool_command(&["open", &raw]).unwrap_err();
        assert!(refused.text.contains("no superblock can be read"), "{refused}");
        assert!(refused.hint.unwrap().contains("or make one"));
    }

    #[test]
    fn damaged_superblock_is_named_and_fails() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pool");
        let device = format!("file:{}?size=4m&engine=threads", path.display());
        run_pool_command(&["create", &device]).unwrap();
        #[expect(clippy::disallowed_methods, reason = "it breaks what lies there")]
        let mut bytes = std::fs::read(&path).unwrap();
        bytes[100] ^= 1;
        #[expect(clippy::disallowed_methods, reason = "it breaks what lies there")]
        std::fs::write(&path, bytes).unwrap();
        let (code, text) = run_pool_command(&["check", &device]).unwrap();
        assert_eq!(code, ExitCode::from(3));
        assert!(text.starts_with("superblock at block 0: its checksum is "), "{text}");
        assert!(text.ends_with("0 blocks of metadata\n") && text.contains(": 1 problems;"));
    }

    #[test]
    fn scrub_names_the_volume_and_range_of_damage() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pool");
        let device = format!("file:{}?size=16m&engine=threads", path.display());
        run_pool_command(&["create", &device]).unwrap();
        with_opener(|opener| {
            let open = OpenPool::open(opener, &VolumeRef::pool_on(&device.parse().unwrap()))?;
            let (name, blocks) = ("v".into(), 1024);
            open.execute_volume_op(VolumeOp::Create {
                name,
                blocks,
                unit: 16,
                uuid: 1,
                checksums: true,
            })?;
            Ok(())
        })
        .unwrap();
        let mark = "a pool on a volume";
        run_pool_command(&["create", &format!("volume:[{device}]/v"), "--name", mark]).unwrap();
        let (code, text) = run_pool_command(&["scrub", &device, "--limit-bytes", "1g"]).unwrap();
        assert_eq!(code, ExitCode::SUCCESS);
        assert!(text.ends_with("pool `pool`: clean\n") && text.contains("16 KiB"), "{text}");
        #[expect(clippy::disallowed_methods, reason = "it breaks what lies there")]
        let mut bytes = std::fs::read(&path).unwrap();
        let at = bytes.windows(mark.len()).position(|some| some == mark.as_bytes()).unwrap();
        bytes[at] ^= 0x20;
        #[expect(clippy::disallowed_methods, reason = "it breaks what lies there")]
        std::fs::write(&path, bytes).unwrap();
        let (code, text) = run_pool_command(&["scrub", &device]).unwrap();
        assert_eq!(code, ExitCode::from(3));
        let expected = format!("volume `v`: 4 KiB from byte 0 on, at block {} of", at / 4096);
        assert!(text.starts_with(&expected) && text.contains("checksums on record"), "{text}");
        let (_, json) = run_pool_command(&["scrub", &device, "--json"]).unwrap();
        let json: Value = serde_json::from_str(&json).unwrap();
        assert_eq!(
            (&json["clean"], &json["volumes"][0]["read_bytes"]),
            (&false.into(), &16_384.into())
        );
        let damaged = &json["volumes"][0]["damaged"];
        assert_eq!((&damaged[0]["cause"], &damaged[1]), (&"checksum".into(), &Value::Null));
        assert_eq!(damaged[0]["pool_block"], at / 4096);
        let refused = run_pool_command(&["scrub", &device, "--limit-bytes", "0"]).unwrap_err();
        assert!(refused.text.contains("rate is 0"), "{refused}");
    }

    #[test]
    fn pool_grows_with_its_device_and_is_rescued_to_another() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let device = |name: &str| format!("file:{}?engine=threads", path(name).display());
        for name in ["pool", "other"] {
            run_pool_command(&["create", &format!("{}&size=8m", device(name))]).unwrap();
        }
        let (_, same) = run_pool_command(&["grow", &device("pool")]).unwrap();
        assert_eq!(same, "the pool has 8 MiB already, as its device has\n");
        let file = std::fs::OpenOptions::new().write(true).open(path("pool")).unwrap();
        file.set_len(12 << 20).unwrap();
        let (_, grown) = run_pool_command(&["grow", &device("pool")]).unwrap();
        assert_eq!(grown, "the pool has 12 MiB now, and had 8 MiB\n");
        let (_, shown) = run_pool_command(&["open", &device("pool")]).unwrap();
        assert!(shown.contains("capacity 12 MiB"), "{shown}");

        let refused = run_pool_command(&["rescue", &device("pool"), &device("pool")]).unwrap_err();
        assert!(refused.text.contains("is both SRC and DST"), "{refused}");
        let (code, text) =
            run_pool_command(&["rescue", &device("pool"), &device("other")]).unwrap();
        assert_eq!(code, ExitCode::SUCCESS);
        assert!(text.ends_with("pool `pool`: 0 volumes whole, 0 in part\n"), "{text}");
    }

    #[test]
    fn table_columns_are_aligned() {
        let rows = [["a", "10", "x y"], ["bcd", "9", ""]].map(|row| row.map(String::from));
        assert_eq!(align_columns(&rows), "a    10  x y\nbcd   9\n");
        let rows = [["a\u{1b}[2J".into(), "\u{202e}b".into()]];
        assert_eq!(align_columns(&rows), "a\\u{1b}[2J  \\u{202e}b\n");
    }
}
