//! `tenmil serve URI --listen vhost-user:PATH`: a virtio disk over vhost-user.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use serde_json::json;
use tenmil_base::{BlockDevice, Error, Limits};
use tenmil_block::uri::Uri;
use tenmil_block::{Bdev, BdevDescriptor, BdevOptions};
use tenmil_dma::RegionTable;
use tenmil_linux::Clock;
use tenmil_linux::socket_stream::ListenAddress;
use tenmil_rpc::{ServedDevice, ServedDevices};
use tenmil_serve::DeviceSlowIo;
use tenmil_serve::vhost_user::{Server, ServerConfig, adapt_device, device_id_of_uri};

use super::endpoint_devices::{
    cannot_serve_error, check_device_can_access_guest_memory, log_device_event, open_and_claim,
    run_until_stopped,
};
use super::sandbox::{self, ServedParts};
use super::service_manager;
use super::transport::ServeTransport;
use super::ublk::device_identity;
use super::{REGIONS_MAX, ServeArguments, event_sender, open_listener, start_reactors};
use crate::commands::rpc_endpoint;

/// Serves the device until SIGTERM or Ctrl-C.
pub(super) fn serve_vhost_user(
    arguments: &ServeArguments,
    socket: &Path,
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    let [uri] = arguments.uris.as_slice() else {
        let count = arguments.uris.len();
        return Err(Error::usage(format!(
            "serve {count} devices over vhost-user, expected one: each is a disk of its own"
        )));
    };
    let clock = Clock::start();
    let regions = RegionTable::new(REGIONS_MAX);
    let (device, descriptor, medium) = open_medium(arguments, uri, &regions, clock)?;
    let limits = medium.limits();
    let listen_socket = open_listener(&ListenAddress::Path(socket.into()))?;
    let listen = format!("vhost-user:{}", listen_socket.address());
    let slow_io = DeviceSlowIo::new("vhost-user", &listen, None);
    slow_io.export().set_threshold(arguments.slow_io);
    let medium = slow_io.observe(medium);
    let balanced = start_reactors(arguments, &clock)?;
    let reactors = &balanced.reactors;
    let server = Server::start(ServerConfig {
        listen_socket,
        medium,
        is_read_only: arguments.read_only,
        id: device_id_of_uri(&device_identity(uri)),
        regions,
        reactors: Arc::clone(reactors.registry()),
    });
    let server = server.map_err(|why| Error::usage(format!("serve {uri:#}: {why}")))?;
    tenmil_linux::storage_file::commit_created()?;
    let parts = ServedParts::at_sockets(ServeTransport::VhostUser, vec![uri], vec![socket]);
    sandbox::run_as_user(arguments, &parts)?;
    let served = ServedDevice {
        protocol: "vhost-user",
        listen,
        namespace: None,
        device,
        slow_io: Arc::clone(&slow_io),
    };
    let state =
        rpc_endpoint::rpc_state_of_reactors(&balanced).with_part(ServedDevices(vec![served]));
    let requested = rpc_endpoint::serve_control_socket(state);
    sandbox::drop_rights(arguments, &parts, event_sender(&requested));
    rpc_endpoint::set_ready(&requested);
    service_manager::announce_ready(out, &ready_message(arguments, uri, &limits, &server))?;
    run_until_stopped(requested, reactors, &[slow_io], "front end", || {
        log_device_event(uri, &descriptor, || server.notify_resize());
        server.next_event()
    });
    drop(server);
    balanced.stop();
    Ok(ExitCode::SUCCESS)
}

/// Device, its claim, and what is served of it.
type OpenedMedium = (Bdev, Arc<BdevDescriptor>, Arc<dyn BlockDevice>);

/// Opens and claims the device.
fn open_medium(
    arguments: &ServeArguments,
    uri: &Uri,
    regions: &RegionTable,
    clock: Clock,
) -> Result<OpenedMedium, Error> {
    check_device_can_access_guest_memory(uri)?;
    let options = BdevOptions::new(clock, 1);
    let (device, descriptor) = open_and_claim(arguments, uri, regions, options, "vhost-user")?;
    let descriptor = Arc::new(descriptor);
    let medium = adapt_device(&device, Arc::clone(&descriptor), regions);
    Ok((device, descriptor, medium.map_err(|why| cannot_serve_error(uri, why))?))
}

/// The ready message, as text or JSON.
fn ready_message(arguments: &ServeArguments, uri: &Uri, of: &Limits, server: &Server) -> String {
    let listen = format!("vhost-user:{}", server.address());
    if !arguments.json {
        return format!("ready {listen}\n");
    }
    let line = json!({
        "ready": true,
        "listen": [listen],
        "connect": [server.address().to_string()],
        "uri": uri.to_string(),
        "size_bytes": of.block_count * u64::from(of.block_size),
        "block_size": of.block_size,
        "read_only": arguments.read_only,
        "queues": server.queues_max(),
    });
    format!("{line}\n")
}
