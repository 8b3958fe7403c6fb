//! `tenmil store rescue`.

use std::fmt::Write as _;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Arc;

use base::Blame;
use block::Opener;
use block::store::{self, OpenStore, PAGE_BYTES, Place, Saved, SavedVolume};
use block::uri::Uri;
use clap::Args;
use control::orders::size;
use serde_json::{Value, json};

use super::super::copy::line::Line;
use super::super::hand::Hand;
use super::super::write_out;
use super::table;
use crate::Refused;

#[derive(Debug, Args)]
pub(super) struct RescueArguments {
    /// The device with the store that is damaged; nothing is written to it
    #[arg(value_name = "SRC")]
    source: Uri,

    /// A device with another store, made by `tenmil store create`
    #[arg(value_name = "DST")]
    target: Uri,

    /// Another device of the damaged store, where the first one is lost or does not say which there are;
    /// may be given several times
    #[arg(long = "device", value_name = "URI")]
    devices: Vec<Uri>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Rescues, and says by the exit code whether anything was lost.
pub(super) fn rescue(
    opener: &Opener<'_>,
    arguments: &RescueArguments,
    out: &mut dyn Write,
) -> Result<ExitCode, Refused> {
    let (source, target) = (Place::of(&arguments.source)?, Place::of(&arguments.target)?);
    if source.store == target.store {
        let text = format!("store rescue: {} is both SRC and DST, expected two", source.store);
        return Err(
            Refused::caller(text).with_hint("Make a store on another device, and name that.")
        );
    }
    let open = expect_closed(opener, &source, &target)?;
    let mut line = Line::new(std::io::stderr().is_terminal(), opener.clock.now());
    let others = &arguments.devices;
    let saved = store::rescue(opener, (&source, others), &open, &mut |progress| {
        line.turn("rescuing", opener.clock.now(), progress, &mut std::io::stderr());
        true
    });
    line.clear(&mut std::io::stderr());
    let saved = saved?;
    write_out(out, &if arguments.json { as_json(&saved) } else { as_text(&saved) })?;
    let is_whole = saved.damaged.is_empty() && saved.volumes.iter().all(is_whole);
    Ok(ExitCode::from(if is_whole { 0 } else { Blame::Peer.exit_code() }))
}

/// Opens the target. Who serves a store has no need of this, and is not disturbed by it.
fn expect_closed(
    opener: &Opener<'_>,
    source: &Place,
    target: &Place,
) -> Result<Arc<OpenStore>, Refused> {
    if let Err(hand) = Hand::elsewhere_or(opener, source, |_, _| Ok(()))? {
        let text = format!(
            "store rescue: {} is open {}, expected a store that does not open",
            source.store,
            hand.by_whom()
        );
        return Err(Refused::caller(text).with_hint(
            "Copy its volumes by `tenmil volume snapshot`, `send` and `receive`, also while they are \
             served; to rescue what is damaged in it, end that process.",
        ));
    }
    Hand::elsewhere_or(opener, target, OpenStore::open)?.map_err(|hand| {
        let text = format!(
            "store rescue: {} is open {}, expected a store that nobody has open",
            target.store,
            hand.by_whom()
        );
        Refused::caller(text).with_hint("End that process, or rescue into another store.")
    })
}

fn is_whole(volume: &SavedVolume) -> bool {
    volume.lost_blocks == 0 && volume.damaged.is_empty() && volume.failed.is_none()
}

fn as_text(saved: &Saved) -> String {
    let mut text = String::new();
    for problem in saved.damaged.iter().chain(saved.volumes.iter().flat_map(|one| &one.damaged)) {
        let _ = writeln!(text, "{problem}");
    }
    let head = ["volume", "size", "written", "lost", ""].map(String::from);
    let row = |volume: &SavedVolume| {
        let bytes = |blocks: u64| size(blocks * u64::from(PAGE_BYTES));
        let SavedVolume { info, lost_blocks, was_there, failed, parent, .. } = volume;
        let said = match (failed, was_there, parent) {
            (Some(why), ..) => why.clone(),
            (None, true, _) => "it was there".into(),
            (None, false, Some(parent)) => format!("the rest is read from {}", parent.uri),
            (None, false, None) => String::new(),
        };
        let numbers = [info.blocks, info.mapped, *lost_blocks].map(bytes);
        let [blocks, mapped, lost] = numbers;
        [info.name.clone(), blocks, mapped, lost, said]
    };
    let rows: Vec<[String; 5]> = saved.volumes.iter().map(row).collect();
    text += &table(&[&[head][..], &rows].concat());
    let failed = saved.volumes.iter().filter(|volume| volume.failed.is_some()).count();
    let lost = saved.volumes.iter().filter(|volume| !is_whole(volume)).count() - failed;
    let whole = saved.volumes.len() - lost - failed;
    let how = if saved.was_scanned { ", after a look at every block" } else { "" };
    let none = if failed > 0 { format!(", {failed} not at all") } else { String::new() };
    let name = &saved.name;
    let _ = writeln!(text, "store `{name}`: {whole} volumes whole, {lost} in part{none}{how}");
    text
}

fn as_json(saved: &Saved) -> String {
    let page = u64::from(PAGE_BYTES);
    let volume = |volume: &SavedVolume| {
        json!({
            "name": volume.info.name,
            "uuid": format!("{:032x}", volume.info.uuid),
            "size_bytes": volume.info.blocks * page,
            "written_bytes": volume.info.mapped * page,
            "lost_bytes": volume.lost_blocks * page,
            "damaged": volume.damaged,
            "was_there": volume.was_there,
            "failed": volume.failed,
            "parent": volume.parent.as_ref().map(|parent| &parent.uri),
        })
    };
    let document = json!({
        "name": saved.name,
        "uuid": format!("{:032x}", saved.uuid),
        "scanned": saved.was_scanned,
        "damaged": saved.damaged,
        "volumes": saved.volumes.iter().map(volume).collect::<Vec<Value>>(),
    });
    format!("{document:#}\n")
}
