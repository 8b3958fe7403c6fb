//! `tenmil serve URI… --listen vfio-user:PATH…`.

use std::io::Write;
use std::path::PathBuf;
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

use super::guests::{check_guest_memory, claim, hear, watch};
use super::{REGIONS_MAX, ServeArguments, open_door, start_reactors};
use crate::Refused;
use crate::cli::{running, write_out};

/// Serves controllers until somebody ends it: at one socket one that has all devices as its
/// namespaces, at several one for each device.
pub(super) fn run(
    arguments: &ServeArguments,
    sockets: &[PathBuf],
    out: &mut dyn Write,
) -> Result<ExitCode, Refused> {
    let each = devices_each(arguments.uris.len(), sockets.len())?;
    let clock = Clock::start();
    let regions = Regions::new(REGIONS_MAX);
    let namespaces = open(arguments, &regions, clock)?;
    let open_one = |socket: &PathBuf| open_door(&Address::Path(socket.clone()));
    let doors = sockets.iter().map(open_one).collect::<Result<Vec<_>, _>>()?;
    let balanced = start_reactors(arguments, &clock)?;
    let reactors = &balanced.reactors;
    let asked = running::serve(running::state_of(&balanced));
    // Whoever never sleeps looks at doorbells by himself.
    let maps_doorbells = arguments.poll == PollMode::Always;
    let mut servers = Vec::new();
    for (index, (door, devices)) in doors.into_iter().zip(namespaces.chunks(each)).enumerate() {
        let options = ControllerOptions { maps_doorbells, ..ControllerOptions::default() };
        let server = Server::start(Plan {
            door,
            media: devices.iter().map(|one| Arc::clone(one) as Arc<dyn Medium>).collect(),
            options: ControllerOptions { serial: serial(options.serial, index), ..options },
            regions: regions.clone(),
            reactors: Arc::clone(reactors.directory()),
            clock,
        });
        servers.push(server.map_err(|why| Refused::machine(format!("serve: {why}")))?);
    }
    let listen = |server: &Server| format!("vfio-user:{}", server.address());
    let listens: Vec<_> = servers.iter().map(listen).collect();
    let line = match arguments.json {
        true => format!("{}\n", json!({ "ready": true, "listen": listens, "connect": listens })),
        false => format!("ready {}\n", listens.join(" ")),
    };
    write_out(out, &line)?;
    watch(asked, reactors, "client", || {
        for (index, (uri, namespace)) in arguments.uris.iter().zip(&namespaces).enumerate() {
            let nsid = u32::try_from(index % each + 1).unwrap_or(u32::MAX);
            hear(uri, namespace, || servers[index / each].resized(nsid));
        }
        let next = |server: &Server| Some((listen(server), server.next_news()?));
        let (place, news) = servers.iter().find_map(next)?;
        Some(if servers.len() > 1 { news.at(&place) } else { news })
    });
    drop(servers);
    balanced.stop();
    Ok(ExitCode::SUCCESS)
}

/// How many of so many devices are namespaces of the controller at each of so many sockets.
fn devices_each(devices: usize, sockets: usize) -> Result<usize, Refused> {
    match sockets {
        1 => Ok(devices),
        _ if sockets == devices => Ok(1),
        _ => Err(Refused::caller(format!(
            "serve {devices} devices at {sockets} sockets of vfio-user, expected one socket for all \
             of them, or one for each"
        ))),
    }
}

/// Machines tell controllers apart by their serial numbers.
fn serial(first: String, index: usize) -> String {
    if index == 0 { first } else { format!("{first}{}", index + 1) }
}

/// Opens every device and claims it.
fn open(
    arguments: &ServeArguments,
    regions: &Regions,
    clock: Clock,
) -> Result<Vec<Arc<Descriptor>>, Refused> {
    let open = |uri| -> Result<Arc<Descriptor>, Refused> {
        check_guest_memory(uri)?;
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

#[cfg(test)]
mod tests {
    use super::{devices_each, serial};

    #[test]
    fn devices_share_one_controller_or_have_one_each() {
        assert_eq!((devices_each(3, 1).unwrap(), devices_each(3, 3).unwrap()), (3, 1));
        for (devices, sockets) in [(3, 2), (1, 2), (4, 8)] {
            let refused = devices_each(devices, sockets).unwrap_err();
            let expected = format!("serve {devices} devices at {sockets} sockets of vfio-user, ");
            assert!(refused.text.starts_with(&expected), "{}", refused.text);
        }
    }

    #[test]
    fn no_two_controllers_have_one_serial_number() {
        let serials = [0, 1, 20].map(|index| serial("TENMIL".to_owned(), index));
        assert_eq!(serials, ["TENMIL", "TENMIL2", "TENMIL21"]);
    }
}
