//! `tenmil serve URI --listen vfio-user:PATH`.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use base::Medium;
use block::{Descriptor, DeviceOptions};
use dma::Regions;
use host::Clock;
use host::stream::Address;
use reactor::PollMode;
use serde_json::json;
use target::vfu::{DeviceOptions as ControllerOptions, Plan, Server};

use super::guests::{claim, hear, watch};
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
    let namespaces = open(arguments, &regions, clock)?;
    let media = namespaces.iter().map(|one| Arc::clone(one) as Arc<dyn Medium>).collect();
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
    watch(asked, reactors, "client", || {
        for (nsid, (uri, namespace)) in (1..).zip(arguments.uris.iter().zip(&namespaces)) {
            hear(uri, namespace, || server.resized(nsid));
        }
        server.next_news()
    });
    drop(server);
    balanced.stop();
    Ok(ExitCode::SUCCESS)
}

/// Opens every device and claims it.
fn open(
    arguments: &ServeArguments,
    regions: &Regions,
    clock: Clock,
) -> Result<Vec<Arc<Descriptor>>, Refused> {
    let open = |uri| -> Result<Arc<Descriptor>, Refused> {
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
