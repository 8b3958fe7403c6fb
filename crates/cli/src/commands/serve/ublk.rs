//! `tenmil serve URI --listen ublk:N`: a Linux block device through ublk.

use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;

use serde_json::json;
use tenmil_base::{BlockDevice, Error, Span};
use tenmil_block::uri::Uri;
use tenmil_block::{Bdev, BdevOptions};
use tenmil_dma::RegionTable;
use tenmil_linux::Clock;
use tenmil_linux::kernel_files::KernelFiles;
use tenmil_rpc::{ServedDevice, ServedDevices};
use tenmil_serve::DeviceSlowIo;
use tenmil_serve::ublk::{
    QueueCountAndDepth, Server, ServerConfig, UblkEvent, UblkStats, adapt_device, uri_hash,
};

use super::endpoint_devices::{cannot_serve_error, open_and_claim};
use super::listen_address::UblkListenOptions;
use super::sandbox::{self, ServedParts};
use super::service_manager;
use super::transport::ServeTransport;
use super::{
    REGIONS_MAX, ServeArguments, WATCH_INTERVAL, event_sender, log_slow_io, start_reactors,
};
use crate::commands::rpc_endpoint;

/// Default queue depth.
const DEPTH: u16 = 128;
/// Time limit for draining requests at shutdown.
const DRAIN_MAX: Span = Span::from_secs(4);

/// Serves the device until SIGTERM, Ctrl-C or deletion of the ublk device.
pub(super) fn serve_ublk(
    arguments: &ServeArguments,
    place: &UblkListenOptions,
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    let [uri] = arguments.uris.as_slice() else {
        let count = arguments.uris.len();
        return Err(Error::usage(format!(
            "serve {count} devices as ublk:, expected one: each is a disk of its own"
        )));
    };
    let (machine, clock) = (KernelFiles::live_system(), Clock::start());
    let regions = RegionTable::new(REGIONS_MAX);
    let (device, medium) = open_medium(arguments, uri, &regions, clock)?;
    // The kernel may choose the number, and reads the partition table before it is known.
    let slow_io = DeviceSlowIo::new("ublk", "ublk:", None);
    slow_io.export().set_threshold(arguments.slow_io);
    let medium = slow_io.observe(medium);
    let balanced = start_reactors(arguments, &clock)?;
    let reactors = &balanced.reactors;
    let cores = u16::try_from(reactors.registry().reactors().count()).unwrap_or(u16::MAX);
    let limits = QueueCountAndDepth {
        queues: place.queues.unwrap_or(cores),
        depth: place.depth.unwrap_or(DEPTH),
    };
    let plan = ServerConfig {
        number: place.number,
        medium,
        is_read_only: arguments.read_only,
        signature: uri_hash(&device_identity(uri)),
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
        let number = server.device_number();
        tracing::info!("ublk:{number} was left behind by a process that has died, and goes on");
    }
    tracing::info!("{}", describe_data_path(&server));
    tenmil_linux::storage_file::commit_created()?;
    let parts = ServedParts::at_sockets(ServeTransport::Ublk, vec![uri], Vec::new());
    sandbox::run_as_user(arguments, &parts)?;
    let listen = format!("ublk:{}", server.device_number());
    slow_io.set_listen(&listen);
    let served = ServedDevice {
        protocol: "ublk",
        listen,
        namespace: None,
        device,
        slow_io: Arc::clone(&slow_io),
    };
    let state =
        rpc_endpoint::rpc_state_of_reactors(&balanced).with_part(ServedDevices(vec![served]));
    let mut requested = rpc_endpoint::serve_control_socket(state);
    sandbox::drop_rights(arguments, &parts, event_sender(&requested));
    rpc_endpoint::set_ready(&requested);
    service_manager::announce_ready(out, &ready_message(arguments, uri, &plan, &server))?;
    let mut done = UblkStats::default();
    while !tenmil_linux::signal::is_stop_requested() && server.has_active_queue() {
        handle_events(&mut server, &mut done);
        log_slow_io(slow_io.export().log(), event_sender(&requested));
        sandbox::log_denied_calls(event_sender(&requested));
        service_manager::keep_alive(reactors);
        service_manager::reload_on_request(event_sender(&requested));
        if let Some((_, relay)) = &mut requested {
            relay.forward_events(&rpc_endpoint::reactors_handle(reactors));
        }
        tenmil_linux::named_thread::sleep(WATCH_INTERVAL);
    }
    service_manager::report_stopping();
    let is_taken_away = !tenmil_linux::signal::is_stop_requested();
    if is_taken_away {
        tracing::info!("{} was deleted by another process", server.disk_path());
    }
    // The ublk device is stopped first, while the reactors still serve requests in flight.
    let stopped = server.stop_disk(DRAIN_MAX);
    balanced.stop();
    handle_events(&mut server, &mut done);
    tracing::info!("{}", summary_text(&server, done));
    let removed = server.delete_device(&machine);
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
    let number = server.device_number();
    match server.zero_copy_status() {
        Ok(()) => format!("the data of ublk:{number} go between kernel and medium without a copy"),
        Err(why) => format!("the data of ublk:{number} are copied: {why}"),
    }
}

/// Summary of the served requests, printed at the end.
fn summary_text(server: &Server, done: UblkStats) -> String {
    let UblkStats { succeeded, failed, zero_copy_bytes, copied_bytes } = done;
    let number = server.device_number();
    format!(
        "ublk:{number} has completed {succeeded} requests, {failed} failed; {zero_copy_bytes} bytes moved \
         without a copy, {copied_bytes} with one"
    )
}

/// Opens and claims the device.
fn open_medium(
    arguments: &ServeArguments,
    uri: &Uri,
    regions: &RegionTable,
    clock: Clock,
) -> Result<(Bdev, Arc<dyn BlockDevice>), Error> {
    let options = BdevOptions::new(clock, 1);
    let (device, descriptor) = open_and_claim(arguments, uri, regions, options, "ublk")?;
    let medium = adapt_device(&device, descriptor, regions);
    Ok((device, medium.map_err(|why| cannot_serve_error(uri, why))?))
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
fn ready_message(
    arguments: &ServeArguments,
    uri: &Uri,
    plan: &ServerConfig,
    server: &Server,
) -> String {
    if !arguments.json {
        return format!("ready {}\n", server.disk_path());
    }
    let of = plan.medium.limits();
    let QueueCountAndDepth { queues, depth } = server.limits();
    let line = json!({
        "ready": true,
        "listen": [format!("ublk:{}", server.device_number())],
        "connect": [server.disk_path()],
        "uri": uri.to_string(),
        "size_bytes": of.block_count * u64::from(of.block_size),
        "block_size": of.block_size,
        "read_only": arguments.read_only,
        "queues": queues,
        "depth": depth,
        "recovered": server.has_recovered(),
        "zero_copy": server.zero_copy_status().is_ok(),
        "copy_reason": server.zero_copy_status().err(),
    });
    format!("{line}\n")
}

#[cfg(test)]
mod tests {
    use super::device_identity;

    #[test]
    fn relative_path_is_identified_by_its_working_directory() {
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
