//! `tenmil serve URI --listen vhost-user:PATH`: a virtio disk over vhost-user.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use serde_json::json;
use tenmil_base::{BlockDevice, Error, Limits};
use tenmil_block::uri::Uri;
use tenmil_block::{BdevDescriptor, BdevOptions};
use tenmil_dma::RegionTable;
use tenmil_linux::Clock;
use tenmil_linux::stream::Address;
use tenmil_serve::vhost_user::{Server, ServerConfig, adapted, id};

use super::endpoint::{check_guest_memory, claim, handle_event, refused, watch};
use super::ublk::device_identity;
use super::{REGIONS_MAX, ServeArguments, open_listener, start_reactors};
use crate::commands::{rpc_endpoint, write_out};

/// Serves the device until SIGTERM or Ctrl-C.
pub(super) fn run(
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
    let (descriptor, medium) = open(arguments, uri, &regions, clock)?;
    let limits = medium.limits();
    let listen_socket = open_listener(&Address::Path(socket.into()))?;
    let balanced = start_reactors(arguments, &clock)?;
    let reactors = &balanced.reactors;
    let requested = rpc_endpoint::serve(rpc_endpoint::state_of(&balanced));
    let server = Server::start(ServerConfig {
        listen_socket,
        medium,
        is_read_only: arguments.read_only,
        id: id(&device_identity(uri)),
        regions,
        reactors: Arc::clone(reactors.registry()),
    });
    let server = server.map_err(|why| Error::usage(format!("serve {uri:#}: {why}")))?;
    tenmil_linux::file::commit_created()?;
    write_out(out, &ready(arguments, uri, &limits, &server))?;
    watch(requested, reactors, "front end", || {
        handle_event(uri, &descriptor, || server.resized());
        server.next_event()
    });
    drop(server);
    balanced.stop();
    Ok(ExitCode::SUCCESS)
}

/// Opens and claims the device.
fn open(
    arguments: &ServeArguments,
    uri: &Uri,
    regions: &RegionTable,
    clock: Clock,
) -> Result<(Arc<BdevDescriptor>, Arc<dyn BlockDevice>), Error> {
    check_guest_memory(uri)?;
    let options = BdevOptions::new(clock, 1);
    let (device, descriptor) = claim(arguments, uri, regions, options, "vhost-user")?;
    let descriptor = Arc::new(descriptor);
    let medium = adapted(&device, Arc::clone(&descriptor), regions);
    Ok((descriptor, medium.map_err(|why| refused(uri, why))?))
}

/// The ready message, as text or JSON.
fn ready(arguments: &ServeArguments, uri: &Uri, of: &Limits, server: &Server) -> String {
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
        "queues": server.queues(),
    });
    format!("{line}\n")
}
