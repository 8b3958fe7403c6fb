//! `tenmil pool scrub`: verifies the data of a pool.

use std::fmt::Write as _;
use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use serde_json::Value;
use tenmil_base::{Error, ErrorCategory};
use tenmil_block::Opener;
use tenmil_block::uri::Uri;
use tenmil_drivers::pool::VolumeRef;
use tenmil_rpc::pool_commands::{JobKind, JobSpec, format_bytes};

use super::super::pool_access::PoolAccess;
use super::super::volume::ByteSize;
use super::super::write_stdout;
use super::{EXIT_INTERRUPTED, align_columns};

#[derive(Debug, Args)]
pub(super) struct ScrubArguments {
    /// Device of the pool
    #[arg(value_name = "URI")]
    device: Uri,

    /// Limit of bytes read per second, such as 100m
    #[arg(long, value_name = "BYTES")]
    limit_bytes: Option<ByteSize>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Scrubs the pool; the exit code shows whether anything is damaged.
pub(super) fn scrub_pool(
    opener: &Opener<'_>,
    arguments: &ScrubArguments,
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    let rate_bytes = arguments.limit_bytes.map(|ByteSize(rate)| rate);
    if rate_bytes == Some(0) {
        let text = format!("pool scrub {}: rate is 0, expected a byte at least", arguments.device);
        return Err(Error::usage(text).with_hint("Leave --rate out to read at full speed."));
    }
    let mut access = PoolAccess::open_or_connect(opener, &VolumeRef::parse(&arguments.device)?)?;
    let long = JobSpec { what: JobKind::Scrub, rate_bytes, unheard_max: None };
    let Some(mut found) = access.run_job(&long, "scrubbing")? else {
        return Ok(ExitCode::from(EXIT_INTERRUPTED));
    };
    let is_clean = found["clean"] == true;
    let text = match arguments.json {
        true => {
            found["process"] = access.owner_pid().into();
            format!("{found:#}\n")
        }
        false => scrub_text(&found) + &access.owner_line(),
    };
    write_stdout(out, &text)?;
    Ok(ExitCode::from(if is_clean { 0 } else { ErrorCategory::Remote.exit_code() }))
}

fn damage_cause(bad: &Value) -> &'static str {
    match bad["cause"].as_str() {
        Some("unread") => "the device does not give them",
        Some("checksum") => "they do not have the checksums on record",
        _ => "what describes them is damaged: see `tenmil pool check`",
    }
}

fn json_list<'a>(value: &'a Value, name: &str) -> &'a [Value] {
    value[name].as_array().map_or(&[], Vec::as_slice)
}

fn scrub_text(found: &Value) -> String {
    let mut text = String::new();
    let whole = |value: &Value, name: &str| value[name].as_u64().unwrap_or_default();
    let word = |value: &Value, name: &str| value[name].as_str().unwrap_or_default().to_owned();
    for volume in json_list(found, "volumes") {
        let name = word(volume, "name");
        let mut left = whole(volume, "damaged_bytes");
        for bad in json_list(volume, "damaged") {
            left -= whole(bad, "bytes").min(left);
            let _ = write!(
                text,
                "volume `{name}`: {} from byte {} on, at block {} of the pool: {}",
                format_bytes(whole(bad, "bytes")),
                whole(bad, "offset_bytes"),
                whole(bad, "pool_block"),
                damage_cause(bad)
            );
            let others: Vec<&str> =
                json_list(bad, "shared_with").iter().filter_map(Value::as_str).collect();
            if !others.is_empty() {
                let _ = write!(text, "; also of `{}`", others.join("`, `"));
            }
            text.push('\n');
        }
        if left > 0 {
            let _ = writeln!(text, "volume `{name}`: {} more", format_bytes(left));
        }
    }
    let head = ["volume", "read", "damaged", "checksums"].map(String::from);
    let row = |volume: &Value| {
        let [read, damaged] =
            ["read_bytes", "damaged_bytes"].map(|name| format_bytes(whole(volume, name)));
        let sums = if volume["checksums"] == true { "yes" } else { "no" };
        [word(volume, "name"), read, damaged, sums.into()]
    };
    let rows: Vec<[String; 4]> = json_list(found, "volumes").iter().map(row).collect();
    text += &align_columns(&[&[head][..], &rows].concat());
    let verdict = if found["clean"] == true { "clean" } else { "damaged" };
    let _ = writeln!(text, "pool `{}`: {verdict}", word(found, "name"));
    text
}
