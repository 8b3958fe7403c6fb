//! `tenmil serve URI --listen vhost-user:PATH`.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use base::{Limits, Medium};
use block::uri::Uri;
use block::{Caps, Claim, Device, DeviceOptions, Limiter, MediumError, Opener, Rate};
use dma::Regions;
use host::Clock;
use host::stream::Address;
use serde_json::json;
use target::vhost::{News, Plan, Server, id, shaped};

use super::ublk::known_by;
use super::{REGIONS_MAX, ServeArguments, WATCH_INTERVAL, open_door, start_reactors};
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
    let medium = open(arguments, uri, &regions, clock)?;
    let limits = medium.limits();
    let door = open_door(&Address::Path(socket.into()))?;
    let balanced = start_reactors(arguments, &clock)?;
    let reactors = &balanced.reactors;
    let mut asked = running::serve(running::state_of(&balanced));
    let server = Server::start(Plan {
        door,
        medium,
        is_read_only: arguments.read_only,
        id: id(&known_by(uri)),
        regions,
        reactors: Arc::clone(reactors.directory()),
    });
    let server = server.map_err(|why| Refused::caller(format!("serve {uri}: {why}")))?;
    write_out(out, &ready(arguments, uri, &limits, &server))?;
    while !host::signal::interrupted() {
        while let Some(news) = server.next_news() {
            match news {
                News::Left(Some(why)) => eprintln!("note: the front end was sent away: {why}"),
                News::Trouble(text) => eprintln!("note: {text}"),
                News::Came(_) | News::Left(None) => {}
            }
        }
        if let Some((_, relay)) = &mut asked {
            relay.pass_on(&running::of(reactors));
        }
        host::thread::rest(WATCH_INTERVAL);
    }
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
) -> Result<Arc<dyn Medium>, Refused> {
    let ServeArguments { read_only, limit_iops, limit_bytes, .. } = arguments;
    let refuse = |why: MediumError| Refused::of(why.blame(), format!("serve {uri}: {why}"));
    let wanted = if *read_only { uri.clone().to_read() } else { uri.clone() };
    let opener = Opener { regions, clock, seed: 1, more: crate::KINDS };
    let opened = opener.open(&wanted).map_err(refuse)?;
    let total = Rate { iops: *limit_iops, bytes: *limit_bytes };
    let limiter = Limiter::new(Caps { total, ..Caps::default() });
    let is_limited = limit_iops.is_some() || limit_bytes.is_some();
    let options =
        DeviceOptions { limiter: is_limited.then_some(limiter), ..DeviceOptions::new(clock, 1) };
    let device = Device::new(&uri.to_string(), opened.medium, options).map_err(refuse)?;
    let claim = if *read_only { Claim::ReadShared } else { Claim::WriteOnce };
    let descriptor = device
        .open(claim, "vhost-user")
        .map_err(|why| Refused::of(why.blame(), format!("serve {uri}: {why}")))?;
    shaped(&device, descriptor, regions).map_err(refuse)
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
