//! `tenmil volume diff`, `send` and `receive`: differences and streams of volumes.

use std::io::{IsTerminal, Write};

use clap::Args;
use serde_json::{Value, json};
use tenmil_base::{Error, Instant};
use tenmil_block::Opener;
use tenmil_block::uri::Uri;
use tenmil_drivers::pool::{ChangedRange, PAGE_BYTES};
use tenmil_rpc::pool_commands::{format_bytes, kind_of_range as range_kind};

use super::super::copy::progress_bar::ProgressBar;
use super::super::pool::align_columns;
use super::super::pool_access::PoolAccess;
use super::super::write_stdout;
use super::open_pool_of;

#[derive(Debug, Args)]
pub(super) struct DiffArguments {
    /// Older volume or snapshot, such as volume:[file:/var/tmp/pool]/monday
    #[arg(value_name = "A")]
    pub(super) volume: Uri,

    /// Name of the newer one, in the same pool
    #[arg(value_name = "B")]
    name: String,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub(super) struct SendArguments {
    /// Snapshot
    #[arg(value_name = "SNAPSHOT")]
    pub(super) volume: Uri,

    /// Incremental: send only the changes since this snapshot of the same pool
    #[arg(long, value_name = "NAME")]
    from: Option<String>,

    /// Print a summary as JSON on standard error
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
pub(super) struct ReceiveArguments {
    /// Snapshot to create, such as volume:[file:/mnt/backup]/monday
    #[arg(value_name = "VOLUME")]
    pub(super) volume: Uri,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Lists the ranges of B that differ from A.
pub(super) fn diff_volumes(
    opener: &Opener<'_>,
    arguments: &DiffArguments,
    out: &mut dyn Write,
) -> Result<(), Error> {
    let (mut access, from) = open_pool_of(opener, &arguments.volume)?;
    let changed = access.changed_ranges(&from, &arguments.name)?;
    let text = match arguments.json {
        true => diff_json((&from, &arguments.name), &changed, access.owner_pid()),
        false => diff_text((&from, &arguments.name), &changed) + &access.owner_line(),
    };
    write_stdout(out, &text)
}

fn diff_text((a, b): (&str, &str), changed: &[ChangedRange]) -> String {
    let head = ["from byte", "bytes", "size", "now"].map(String::from);
    let row = |range: &ChangedRange| {
        let (at, len) = (bytes_of_blocks(range.block), bytes_of_blocks(range.blocks));
        [at.to_string(), len.to_string(), format_bytes(len), range_kind(range).into()]
    };
    let rows: Vec<[String; 4]> = changed.iter().map(row).collect();
    let ranges =
        if rows.is_empty() { String::new() } else { align_columns(&[&[head][..], &rows].concat()) };
    let [data, holes, parents] = changed_bytes_by_kind(changed).map(format_bytes);
    let outside = changed.iter().any(|range| range.is_parents);
    let more = if outside { format!(", and {parents} from its parent") } else { String::new() };
    format!("{ranges}`{b}` has {data} that `{a}` has not, and {holes} of new holes{more}\n")
}

fn diff_json((a, b): (&str, &str), changed: &[ChangedRange], process: Option<u32>) -> String {
    let range = |range: &ChangedRange| {
        json!({
            "offset_bytes": bytes_of_blocks(range.block),
            "length_bytes": bytes_of_blocks(range.blocks),
            "kind": range_kind(range),
        })
    };
    let [data, holes, parents] = changed_bytes_by_kind(changed);
    let document = json!({
        "from": a,
        "to": b,
        "changed": changed.iter().map(range).collect::<Vec<Value>>(),
        "data_bytes": data,
        "hole_bytes": holes,
        "parent_bytes": parents,
        "process": process,
    });
    format!("{document:#}\n")
}

/// Sums of the changed bytes: data, holes, and ranges that read from the parent.
fn changed_bytes_by_kind(changed: &[ChangedRange]) -> [u64; 3] {
    ["data", "hole", "parent"].map(|of| {
        let these = changed.iter().filter(|range| range_kind(range) == of);
        bytes_of_blocks(these.map(|range| range.blocks).sum())
    })
}

const fn bytes_of_blocks(blocks: u64) -> u64 {
    blocks * PAGE_BYTES as u64
}

/// Writes the stream to standard output.
pub(super) fn send_snapshot(
    opener: &Opener<'_>,
    arguments: &SendArguments,
    out: &mut dyn Write,
) -> Result<(), Error> {
    if std::io::stdout().is_terminal() {
        let text = "volume send: standard output is a terminal, expected a file or a pipe";
        let hint = "Add `> FILE`, or `| tenmil volume receive VOLUME`.";
        return Err(Error::usage(text).with_hint(hint));
    }
    let (mut access, name) = open_pool_of(opener, &arguments.volume)?;
    // With --json, standard error carries the JSON document only.
    let progress = match arguments.json {
        true => StreamProgressBar::silent(opener),
        false => StreamProgressBar::new(opener, "sending"),
    };
    let sent = access.send_snapshot(&name, arguments.from.as_deref(), out, progress)?;
    let report = transfer_text_or_json(sent, "sent", &access, arguments.json);
    // With standard error closed, the exit code is the only indication.
    let _ = std::io::stderr().write_all(report.as_bytes());
    Ok(())
}

/// Receives a stream from standard input.
pub(super) fn receive_snapshot(
    opener: &Opener<'_>,
    arguments: &ReceiveArguments,
    out: &mut dyn Write,
) -> Result<(), Error> {
    if std::io::stdin().is_terminal() {
        let text = "volume receive: standard input is a terminal, expected a file or a pipe";
        return Err(Error::usage(text).with_hint("Add `< FILE`, as `volume send` has written it."));
    }
    let (mut access, name) = open_pool_of(opener, &arguments.volume)?;
    let received = access.receive_snapshot(&name)?;
    write_stdout(out, &transfer_text_or_json(received, "received", &access, arguments.json))
}

/// Progress bar on standard error.
pub(in crate::commands) struct StreamProgressBar<'a> {
    opener: &'a Opener<'a>,
    phase: &'static str,
    line: Option<ProgressBar>,
}

impl<'a> StreamProgressBar<'a> {
    pub(in crate::commands) fn new(opener: &'a Opener<'a>, phase: &'static str) -> Self {
        let now: Instant = opener.clock.now();
        Self { opener, phase, line: Some(ProgressBar::new(std::io::stderr().is_terminal(), now)) }
    }

    /// Creates a progress bar that prints nothing.
    pub(in crate::commands) const fn silent(opener: &'a Opener<'a>) -> Self {
        Self { opener, phase: "", line: None }
    }

    /// Updates the bar. Always returns true: the job continues.
    pub(in crate::commands) fn update(&mut self, progress: (u64, u64)) -> bool {
        if let Some(line) = &mut self.line {
            line.update(self.phase, self.opener.clock.now(), progress, &mut std::io::stderr());
        }
        true
    }

    pub(in crate::commands) fn end(&mut self) {
        if let Some(line) = &mut self.line {
            line.clear(&mut std::io::stderr());
        }
    }
}

/// Renders the summary of a transfer as text or JSON, with the process that did it if it was another
/// one.
fn transfer_text_or_json(
    mut carried: Value,
    verb: &str,
    access: &PoolAccess<'_>,
    is_json: bool,
) -> String {
    match is_json {
        true => {
            carried["process"] = access.owner_pid().into();
            format!("{carried:#}\n")
        }
        false => transfer_text(verb, &carried) + &access.owner_line(),
    }
}

fn transfer_text(verb: &str, carried: &Value) -> String {
    let name = carried["name"].as_str().unwrap_or_default();
    if carried["existed"] == true {
        return format!("snapshot `{name}` was received before; the stream is whole\n");
    }
    let base = carried["base"].as_str();
    let since = base.map(|base| format!(" since `{base}`")).unwrap_or_default();
    let [whole, data, holes] = ["size_bytes", "data_bytes", "hole_bytes"]
        .map(|name| format_bytes(carried[name].as_u64().unwrap_or_default()));
    format!("snapshot `{name}` of {whole}{since}: {data} of data and {holes} of new holes {verb}\n")
}

#[cfg(test)]
mod tests {
    use tenmil_drivers::pool::ChangedRange;

    use super::{diff_json, diff_text};

    #[test]
    fn diff_is_printed_as_text_and_json() {
        let of = |block, blocks, is_mapped| {
            let is_parents = false;
            ChangedRange { block, blocks, is_mapped, is_parents }
        };
        let changed = [of(0, 16, true), of(100, 1, false)];
        let text = diff_text(("a", "b"), &changed);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[1].split_whitespace().collect::<Vec<_>>(),
            ["0", "65536", "64", "KiB", "data"]
        );
        assert_eq!(lines[3], "`b` has 64 KiB that `a` has not, and 4 KiB of new holes");
        let json: serde_json::Value =
            serde_json::from_str(&diff_json(("a", "b"), &changed, Some(7))).unwrap();
        assert_eq!(json["changed"][1]["offset_bytes"], 409_600);
        assert_eq!(json["process"], 7);
        assert_eq!((&json["data_bytes"], &json["hole_bytes"]), (&65_536.into(), &4096.into()));
        assert_eq!(diff_text(("a", "b"), &[]).lines().count(), 1);
    }
}
