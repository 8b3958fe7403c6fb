//! `tenmil serve URI --listen vhost-user:PATH`.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use base::{Limits, Medium};
use block::uri::Uri;
use block::{Descriptor, DeviceOptions};
use dma::Regions;
use host::Clock;
use host::stream::Address;
use serde_json::json;
use target::vhost::{Plan, Server, id, shaped};

use super::guests::{check_guest_memory, claim, hear, refused, watch};
use super::ublk::known_by;
use super::{REGIONS_MAX, ServeArguments, open_door, start_reactors};
use crate::Refused;
use crate::cli::{running, write_out};

/// Serves a disk until somebody ends it.
pub(super) fn run(
    arguments: &ServeArguments,
    socket: &Path,
    out: &mut dyn Write,
) -> Result<ExitCode, Refused> {
    let [uri] = arguments.uris.as_slice() else {
        let count = arguments.uris.len();
        return Err(Refused::caller(format!(
            "serve {count} devices over vhost-user, expected one: each is a disk of its own"
        )));
    };
    let clock = Clock::start();
    let regions = Regions::new(REGIONS_MAX);
    let (descriptor, medium) = open(arguments, uri, &regions, clock)?;
    let limits = medium.limits();
    let door = open_door(&Address::Path(socket.into()))?;
    let balanced = start_reactors(arguments, &clock)?;
    let reactors = &balanced.reactors;
    let asked = running::serve(running::state_of(&balanced));
    let server = Server::start(Plan {
        door,
        medium,
        is_read_only: arguments.read_only,
        id: id(&known_by(uri)),
        regions,
        reactors: Arc::clone(reactors.directory()),
    });
    let server = server.map_err(|why| Refused::caller(format!("serve {uri}: {why}")))?;
    host::file::keep()?;
    write_out(out, &ready(arguments, uri, &limits, &server))?;
    watch(asked, reactors, "front end", || {
        hear(uri, &descriptor, || server.resized());
        server.next_news()
    });
    drop(server);
    balanced.stop();
    Ok(ExitCode::SUCCESS)
}

/// Opens the device and claims it.
fn open(
    arguments: &ServeArguments,
    uri: &Uri,
    regions: &Regions,
    clock: Clock,
) -> Result<(Arc<Descriptor>, Arc<dyn Medium>), Refused> {
    check_guest_memory(uri)?;
    let options = DeviceOptions::new(clock, 1);
    let (device, descriptor) = claim(arguments, uri, regions, options, "vhost-user")?;
    let descriptor = Arc::new(descriptor);
    let medium = shaped(&device, Arc::clone(&descriptor), regions);
    Ok((descriptor, medium.map_err(|why| refused(uri, why))?))
}

/// What is printed once it listens.
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
