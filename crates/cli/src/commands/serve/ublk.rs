//! `tenmil serve URI --listen ublk:N`: a Linux block device through ublk.

use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;

use serde_json::json;
use tenmil_base::{BlockDevice, Error, Span};
use tenmil_block::BdevOptions;
use tenmil_block::uri::Uri;
use tenmil_dma::RegionTable;
use tenmil_linux::Clock;
use tenmil_linux::kernel_files::KernelFiles;
use tenmil_serve::ublk::{Limits, Server, ServerConfig, UblkEvent, UblkStats, adapted, signature};

use super::endpoint::{claim, refused};
use super::listen::UblkTarget;
use super::{REGIONS_MAX, ServeArguments, WATCH_INTERVAL, start_reactors};
use crate::commands::{rpc_endpoint, write_out};

/// Default queue depth.
const DEPTH: u16 = 128;
/// Time limit for draining requests at shutdown.
const DRAIN_MAX: Span = Span::from_secs(4);

/// Serves the device until SIGTERM, Ctrl-C or deletion of the ublk device.
pub(super) fn run(
    arguments: &ServeArguments,
    place: &UblkTarget,
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    let [uri] = arguments.uris.as_slice() else {
        let count = arguments.uris.len();
        return Err(Error::usage(format!(
            "serve {count} devices as ublk:, expected one: each is a disk of its own"
        )));
    };
    let (machine, clock) = (KernelFiles::live(), Clock::start());
    let regions = RegionTable::new(REGIONS_MAX);
    let medium = open(arguments, uri, &regions, clock)?;
    let balanced = start_reactors(arguments, &clock)?;
    let reactors = &balanced.reactors;
    let mut requested = rpc_endpoint::serve(rpc_endpoint::state_of(&balanced));
    let cores = u16::try_from(reactors.registry().reactors().count()).unwrap_or(u16::MAX);
    let limits =
        Limits { queues: place.queues.unwrap_or(cores), depth: place.depth.unwrap_or(DEPTH) };
    let plan = ServerConfig {
        number: place.number,
        medium,
        is_read_only: arguments.read_only,
        signature: signature(&device_identity(uri)),
        limits,
        replaces: place.replaces,
        wants_zero_copy: !place.copies,
        regions,
        reactors: Arc::clone(reactors.registry()),
    };
    let mut server = Server::start(&machine, &plan).map_err(|why| Error {
        category: why.category,
        text: format!("serve {uri:#}: {}", why.text),
        hint: why.hint,
    })?;
    if server.has_recovered() {
        let number = server.number();
        tracing::info!("ublk:{number} was left behind by a process that has died, and goes on");
    }
    tracing::info!("{}", describe_data_path(&server));
    tenmil_linux::file::commit_created()?;
    write_out(out, &ready(arguments, uri, &plan, &server))?;
    let mut done = UblkStats::default();
    while !tenmil_linux::signal::interrupted() && server.is_served() {
        handle_events(&mut server, &mut done);
        if let Some((_, relay)) = &mut requested {
            relay.forward_events(&rpc_endpoint::of(reactors));
        }
        tenmil_linux::thread::sleep(WATCH_INTERVAL);
    }
    let is_taken_away = !tenmil_linux::signal::interrupted();
    if is_taken_away {
        tracing::info!("{} was deleted by another process", server.path());
    }
    // The ublk device is stopped first, while the reactors still serve requests in flight.
    let stopped = server.stop(DRAIN_MAX);
    balanced.stop();
    handle_events(&mut server, &mut done);
    tracing::info!("{}", summary(&server, done));
    let removed = server.remove(&machine);
    let mut is_clean = !is_taken_away;
    for why in [stopped.err(), removed.err()].into_iter().flatten() {
        is_clean = false;
        tracing::info!("{why}");
    }
    Ok(if is_clean { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Handles server events: logs errors and adds up the queues' statistics.
fn handle_events(server: &mut Server, all: &mut UblkStats) {
    while let Some(new_events) = server.next_event() {
        match new_events {
            UblkEvent::Error(text) => tracing::info!("{text}"),
            UblkEvent::QueueEnded { done, .. } => {
                all.succeeded += done.succeeded;
                all.failed += done.failed;
                all.zero_copy_bytes += done.zero_copy_bytes;
                all.copied_bytes += done.copied_bytes;
            }
        }
    }
}

/// Describes how data are transferred (zero copy or copies), and why.
fn describe_data_path(server: &Server) -> String {
    let number = server.number();
    match server.zero_copy() {
        Ok(()) => format!("the data of ublk:{number} go between kernel and medium without a copy"),
        Err(why) => format!("the data of ublk:{number} are copied: {why}"),
    }
}

/// Summary of the served requests, printed at the end.
fn summary(server: &Server, done: UblkStats) -> String {
    let UblkStats { succeeded, failed, zero_copy_bytes, copied_bytes } = done;
    let number = server.number();
    format!(
        "ublk:{number} has completed {succeeded} requests, {failed} failed; {zero_copy_bytes} bytes moved \
         without a copy, {copied_bytes} with one"
    )
}

/// Opens and claims the device.
fn open(
    arguments: &ServeArguments,
    uri: &Uri,
    regions: &RegionTable,
    clock: Clock,
) -> Result<Arc<dyn BlockDevice>, Error> {
    let options = BdevOptions::new(clock, 1);
    let (device, descriptor) = claim(arguments, uri, regions, options, "ublk")?;
    adapted(&device, descriptor, regions).map_err(|why| refused(uri, why))
}

/// Identity by which a restarted server recognizes its ublk device: the URI, with the working directory
/// if the URI is relative.
pub(super) fn device_identity(uri: &Uri) -> String {
    let text = uri.to_string();
    let is_relative = ["file:", "vfio-user:", "key-file="].iter().any(|before| {
        text.match_indices(before).any(|(at, _)| !text[at + before.len()..].starts_with('/'))
    });
    match std::env::current_dir() {
        Ok(here) if is_relative => format!("{text} in {}", here.display()),
        _ => text,
    }
}

/// The ready message, as text or JSON.
fn ready(arguments: &ServeArguments, uri: &Uri, plan: &ServerConfig, server: &Server) -> String {
    if !arguments.json {
        return format!("ready {}\n", server.path());
    }
    let of = plan.medium.limits();
    let Limits { queues, depth } = server.limits();
    let line = json!({
        "ready": true,
        "listen": [format!("ublk:{}", server.number())],
        "connect": [server.path()],
        "uri": uri.to_string(),
        "size_bytes": of.block_count * u64::from(of.block_size),
        "block_size": of.block_size,
        "read_only": arguments.read_only,
        "queues": queues,
        "depth": depth,
        "recovered": server.has_recovered(),
        "zero_copy": server.zero_copy().is_ok(),
        "copy_reason": server.zero_copy().err(),
    });
    format!("{line}\n")
}

#[cfg(test)]
mod tests {
    use super::device_identity;

    #[test]
    fn a_relative_path_is_known_by_where_it_is_looked_for() {
        let known = |uri: &str| device_identity(&uri.parse().unwrap());
        assert_eq!(known("file:/a?size=1m"), "file:/a?size=1m");
        assert_eq!(known("ram:1m"), "ram:1m");
        let here = std::env::current_dir().unwrap();
        let expected = format!("stripe:[file:/a],[file:b] in {}", here.display());
        assert_eq!(known("stripe:[file:/a],[file:b]"), expected);
        for relative in ["vfio-user:a.sock", "crypt:[file:/a]?key-file=k"] {
            assert!(known(relative).ends_with(&here.display().to_string()), "{relative}");
        }
    }
}
