//! `tenmil serve URI --listen vfio-user:PATH`.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use base::Medium;
use block::{Caps, Claim, Device, DeviceOptions, Limiter, MediumError, Opener, Rate};
use dma::Regions;
use host::Clock;
use host::stream::Address;
use reactor::PollMode;
use serde_json::json;
use target::vfu::{DeviceOptions as ControllerOptions, News, Plan, Server};

use super::{REGIONS_MAX, ServeArguments, WATCH_INTERVAL, open_door, start_reactors};
use crate::Refused;
use crate::cli::{running, write_out};

/// Serves a controller with a namespace for each device until somebody ends it.
pub(super) fn run(
    arguments: &ServeArguments,
    socket: &Path,
    out: &mut dyn Write,
) -> Result<ExitCode, Refused> {
    let clock = Clock::start();
    let regions = Regions::new(REGIONS_MAX);
    let media = open(arguments, &regions, clock)?;
    let door = open_door(&Address::Path(socket.into()))?;
    let balanced = start_reactors(arguments, &clock)?;
    let reactors = &balanced.reactors;
    let mut asked = running::serve(running::state_of(&balanced));
    // Whoever never sleeps looks at doorbells by himself.
    let maps_doorbells = arguments.poll == PollMode::Always;
    let server = Server::start(Plan {
        door,
        media,
        options: ControllerOptions { maps_doorbells, ..ControllerOptions::default() },
        regions,
        reactors: Arc::clone(reactors.directory()),
        clock,
    });
    let server = server.map_err(|why| Refused::machine(format!("serve: {why}")))?;
    let listen = format!("vfio-user:{}", server.address());
    let line = match arguments.json {
        true => format!("{}\n", json!({ "ready": true, "listen": [listen], "connect": [listen] })),
        false => format!("ready {listen}\n"),
    };
    write_out(out, &line)?;
    while !host::signal::interrupted() {
        while let Some(news) = server.next_news() {
            match news {
                News::Left(Some(why)) => eprintln!("note: the client was sent away: {why}"),
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

/// Opens every device and claims it.
fn open(
    arguments: &ServeArguments,
    regions: &Regions,
    clock: Clock,
) -> Result<Vec<Arc<dyn Medium>>, Refused> {
    let ServeArguments { uris, read_only, limit_iops, limit_bytes, .. } = arguments;
    let opener = Opener { regions, clock, seed: 1, more: crate::KINDS };
    let total = Rate { iops: *limit_iops, bytes: *limit_bytes };
    let mut media: Vec<Arc<dyn Medium>> = Vec::new();
    for uri in uris {
        let refuse = |why: MediumError| Refused::of(why.blame(), format!("serve {uri}: {why}"));
        let wanted = if *read_only { uri.clone().to_read() } else { uri.clone() };
        let opened = opener.open(&wanted).map_err(refuse)?;
        let limiter = Limiter::new(Caps { total, ..Caps::default() });
        let is_limited = limit_iops.is_some() || limit_bytes.is_some();
        // A controller times its commands itself.
        let options = DeviceOptions {
            limiter: is_limited.then_some(limiter),
            depth: QUEUE_DEPTH,
            timing: false,
            ..DeviceOptions::new(clock, 1)
        };
        let device = Device::new(&uri.to_string(), opened.medium, options).map_err(refuse)?;
        let claim = if *read_only { Claim::ReadShared } else { Claim::WriteOnce };
        let descriptor = device
            .open(claim, "vfio-user")
            .map_err(|why| Refused::of(why.blame(), format!("serve {uri}: {why}")))?;
        media.push(Arc::new(descriptor));
    }
    Ok(media)
}

/// Commands in flight on each queue.
const QUEUE_DEPTH: u32 = 256;
