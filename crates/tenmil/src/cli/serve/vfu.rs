//! `tenmil serve URI --listen vfio-user:PATH`.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use base::Medium;
use block::DeviceOptions;
use dma::Regions;
use host::Clock;
use host::stream::Address;
use reactor::PollMode;
use serde_json::json;
use target::vfu::{DeviceOptions as ControllerOptions, Plan, Server};

use super::guests::{claim, watch};
use super::{REGIONS_MAX, ServeArguments, open_door, start_reactors};
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
    let asked = running::serve(running::state_of(&balanced));
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
    watch(asked, reactors, "client", || server.next_news());
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
    let open = |uri| -> Result<Arc<dyn Medium>, Refused> {
        // A controller times its commands itself.
        let options =
            DeviceOptions { depth: QUEUE_DEPTH, timing: false, ..DeviceOptions::new(clock, 1) };
        let (_, descriptor) = claim(arguments, uri, regions, options, "vfio-user")?;
        Ok(Arc::new(descriptor))
    };
    arguments.uris.iter().map(open).collect()
}

/// Commands in flight on each queue.
const QUEUE_DEPTH: u32 = 256;
