//! `tenmil store scrub`.

use std::fmt::Write as _;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use base::Blame;
use block::Opener;
use block::store::{Bad, Cause, OpenStore, PAGE_BYTES, Place, Scrubbed};
use block::uri::Uri;
use clap::Args;
use serde_json::{Value, json};

use super::super::copy::line::Line;
use super::super::volume::Size;
use super::super::write_out;
use super::{size, table};
use crate::Refused;

#[derive(Debug, Args)]
pub(super) struct ScrubArguments {
    /// The device that the store is on
    #[arg(value_name = "URI")]
    device: Uri,

    /// Read so many bytes in a second at most, such as 100m
    #[arg(long, value_name = "BYTES")]
    rate: Option<Size>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Scrubs, and says by the exit code whether anything is damaged.
pub(super) fn scrub(
    opener: &Opener<'_>,
    arguments: &ScrubArguments,
    out: &mut dyn Write,
) -> Result<ExitCode, Refused> {
    let open = OpenStore::open(opener, &Place::of(&arguments.device)?)?;
    let rate = arguments.rate.map(|Size(rate)| rate);
    if rate == Some(0) {
        let text = format!("store scrub {}: rate is 0, expected a byte at least", arguments.device);
        return Err(Refused::caller(text).with_hint("Leave --rate out to read at full speed."));
    }
    let mut line = Line::new(std::io::stderr().is_terminal(), opener.clock.now());
    let scrubbed = open.scrub(rate, &mut |progress| {
        line.turn("scrubbing", opener.clock.now(), progress, &mut std::io::stderr());
        true
    });
    line.clear(&mut std::io::stderr());
    let (scrubbed, name) = (scrubbed?, open.name());
    let text = match arguments.json {
        true => as_json(&name, open.uuid(), &scrubbed),
        false => as_text(&name, &scrubbed),
    };
    write_out(out, &text)?;
    Ok(ExitCode::from(if is_clean(&scrubbed) { 0 } else { Blame::Peer.exit_code() }))
}

fn is_clean(scrubbed: &[Scrubbed]) -> bool {
    scrubbed.iter().all(|volume| volume.bad.is_empty())
}

const fn bytes(blocks: u64) -> u64 {
    blocks * PAGE_BYTES as u64
}

const fn cause(bad: &Bad) -> &'static str {
    match bad.cause {
        Cause::Unread => "the device does not give them",
        Cause::Checksum => "they do not have the checksums on record",
        Cause::Metadata => "what describes them is damaged: see `tenmil store check`",
    }
}

fn as_text(name: &str, scrubbed: &[Scrubbed]) -> String {
    let mut text = String::new();
    for volume in scrubbed {
        for bad in &volume.bad {
            let Bad { block, blocks, at, shared_with, .. } = bad;
            let _ = write!(
                text,
                "volume `{}`: {} from byte {} on, at block {at} of the store: {}",
                volume.info.name,
                size(bytes(*blocks)),
                bytes(*block),
                cause(bad)
            );
            if !shared_with.is_empty() {
                let _ = write!(text, "; also of `{}`", shared_with.join("`, `"));
            }
            text.push('\n');
        }
    }
    let head = ["volume", "read", "damaged", "checksums"].map(String::from);
    let row = |volume: &Scrubbed| {
        let damaged: u64 = volume.bad.iter().map(|bad| bad.blocks).sum();
        let sums = if volume.info.has_checksums { "yes" } else { "no" };
        let numbers = [volume.blocks, damaged].map(|blocks| size(bytes(blocks)));
        let [read, damaged] = numbers;
        [volume.info.name.clone(), read, damaged, sums.into()]
    };
    let rows: Vec<[String; 4]> = scrubbed.iter().map(row).collect();
    text += &table(&[&[head][..], &rows].concat());
    let verdict = if is_clean(scrubbed) { "clean" } else { "damaged" };
    let _ = writeln!(text, "store `{name}`: {verdict}");
    text
}

fn as_json(name: &str, uuid: u128, scrubbed: &[Scrubbed]) -> String {
    let bad = |bad: &Bad| {
        json!({
            "offset_bytes": bytes(bad.block),
            "bytes": bytes(bad.blocks),
            "store_block": bad.at,
            "cause": match bad.cause {
                Cause::Unread => "unread",
                Cause::Checksum => "checksum",
                Cause::Metadata => "metadata",
            },
            "shared_with": bad.shared_with,
        })
    };
    let volume = |volume: &Scrubbed| {
        json!({
            "name": volume.info.name,
            "checksums": volume.info.has_checksums,
            "read_bytes": bytes(volume.blocks),
            "damaged": volume.bad.iter().map(bad).collect::<Vec<Value>>(),
        })
    };
    let document = json!({
        "name": name,
        "uuid": format!("{uuid:032x}"),
        "clean": is_clean(scrubbed),
        "volumes": scrubbed.iter().map(volume).collect::<Vec<Value>>(),
    });
    format!("{document:#}\n")
}
