//! `tenmil pool rescue`: copies volumes out of a damaged pool.

use std::fmt::Write as _;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Arc;

use clap::Args;
use serde_json::{Value, json};
use tenmil_base::{Error, ErrorCategory};
use tenmil_block::Opener;
use tenmil_block::uri::Uri;
use tenmil_drivers::pool::{
    self, OpenPool, PAGE_BYTES, RescueReport, RescuedVolumeReport, VolumeRef,
};
use tenmil_rpc::pool_commands::format_bytes;

use super::super::copy::progress_bar::ProgressBar;
use super::super::pool_access::PoolAccess;
use super::super::write_stdout;
use super::align_columns;

#[derive(Debug, Args)]
pub(super) struct RescueArguments {
    /// Device of the damaged pool, which is only read
    #[arg(value_name = "SRC")]
    source: Uri,

    /// Device of an intact pool, created by `tenmil pool create`
    #[arg(value_name = "DST")]
    target: Uri,

    /// Further device of the damaged pool, if the first one is lost or does not list the others; may be
    /// repeated
    #[arg(long = "device", value_name = "URI")]
    devices: Vec<Uri>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Rescues the volumes; the exit code shows whether anything was lost.
pub(super) fn rescue_pool(
    opener: &Opener<'_>,
    arguments: &RescueArguments,
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    let (source, target) =
        (VolumeRef::parse(&arguments.source)?, VolumeRef::parse(&arguments.target)?);
    if source.store == target.store {
        let text = format!("pool rescue: {} is both SRC and DST, expected two", source.store);
        return Err(Error::usage(text).with_hint("Make a pool on another device, and name that."));
    }
    let open = open_target_unless_source_in_use(opener, &source, &target)?;
    let mut line = ProgressBar::new(std::io::stderr().is_terminal(), opener.clock.now());
    let others = &arguments.devices;
    let saved = pool::rescue_pool(opener, (&source, others), &open, &mut |progress| {
        line.update("rescuing", opener.clock.now(), progress, &mut std::io::stderr());
        true
    });
    line.clear(&mut std::io::stderr());
    let saved = saved?;
    write_stdout(out, &if arguments.json { rescue_json(&saved) } else { rescue_text(&saved) })?;
    let is_whole = saved.damaged.is_empty() && saved.volumes.iter().all(is_volume_complete);
    Ok(ExitCode::from(if is_whole { 0 } else { ErrorCategory::Remote.exit_code() }))
}

/// Opens the target pool, after checking that the source pool is not open in another process: a pool
/// that can be served needs no rescue.
fn open_target_unless_source_in_use(
    opener: &Opener<'_>,
    source: &VolumeRef,
    target: &VolumeRef,
) -> Result<Arc<OpenPool>, Error> {
    if let Err(access) = PoolAccess::run_local_or_connect(opener, source, |_, _| Ok(()))? {
        let text = format!(
            "pool rescue: {} is open {}, expected a pool that does not open",
            source.store,
            access.owner_text()
        );
        return Err(Error::usage(text).with_hint(
            "Copy its volumes by `tenmil volume snapshot`, `send` and `receive`, also while they are \
             served; to rescue what is damaged in it, end that process.",
        ));
    }
    PoolAccess::run_local_or_connect(opener, target, OpenPool::open)?.map_err(|access| {
        let text = format!(
            "pool rescue: {} is open {}, expected a pool that is not open",
            target.store,
            access.owner_text()
        );
        Error::usage(text).with_hint("End that process, or rescue into another pool.")
    })
}

fn is_volume_complete(volume: &RescuedVolumeReport) -> bool {
    volume.lost_blocks == 0 && volume.damaged.is_empty() && volume.failed.is_none()
}

fn rescue_text(saved: &RescueReport) -> String {
    let mut text = String::new();
    for problem in saved.damaged.iter().chain(saved.volumes.iter().flat_map(|one| &one.damaged)) {
        let _ = writeln!(text, "{problem}");
    }
    let head = ["volume", "size", "allocated", "lost", ""].map(String::from);
    let row = |volume: &RescuedVolumeReport| {
        let bytes = |blocks: u64| format_bytes(blocks * u64::from(PAGE_BYTES));
        let RescuedVolumeReport { info, lost_blocks, was_there, failed, parent, .. } = volume;
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
    text += &align_columns(&[&[head][..], &rows].concat());
    let failed = saved.volumes.iter().filter(|volume| volume.failed.is_some()).count();
    let lost = saved.volumes.iter().filter(|volume| !is_volume_complete(volume)).count() - failed;
    let whole = saved.volumes.len() - lost - failed;
    let how = if saved.was_scanned { ", after a look at every block" } else { "" };
    let none = if failed > 0 { format!(", {failed} not at all") } else { String::new() };
    let name = &saved.name;
    let _ = writeln!(text, "pool `{name}`: {whole} volumes whole, {lost} in part{none}{how}");
    text
}

fn rescue_json(saved: &RescueReport) -> String {
    let page = u64::from(PAGE_BYTES);
    let volume = |volume: &RescuedVolumeReport| {
        json!({
            "name": volume.info.name,
            "uuid": format!("{:032x}", volume.info.uuid),
            "size_bytes": volume.info.blocks * page,
            "allocated_bytes": volume.info.mapped * page,
            "lost_bytes": volume.lost_blocks * page,
            "damaged": volume.damaged,
            "existed": volume.was_there,
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
