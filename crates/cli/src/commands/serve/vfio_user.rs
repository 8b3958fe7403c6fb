//! `tenmil serve URI… --listen vfio-user:PATH…`: NVMe controllers over vfio-user.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use serde_json::json;
use tenmil_base::{BlockDevice, Error};
use tenmil_block::{Bdev, BdevDescriptor, BdevOptions};
use tenmil_dma::RegionTable;
use tenmil_linux::Clock;
use tenmil_linux::socket_stream::ListenAddress;
use tenmil_reactor::PollMode;
use tenmil_rpc::{ServedDevice, ServedDevices};
use tenmil_serve::DeviceSlowIo;
use tenmil_serve::vfio_user::{ControllerOptions, Server, ServerConfig};

use super::endpoint_devices::{
    check_device_can_access_guest_memory, log_device_event, open_and_claim, run_until_stopped,
};
use super::sandbox::{self, ServedParts};
use super::service_manager;
use super::transport::ServeTransport;
use super::{REGIONS_MAX, ServeArguments, event_sender, open_listener, start_reactors};
use crate::commands::rpc_endpoint;

/// Serves controllers until SIGTERM or Ctrl-C. With one socket, all devices are namespaces of one
/// controller; with several, each device has a controller of its own.
pub(super) fn serve_vfio_user(
    arguments: &ServeArguments,
    sockets: &[PathBuf],
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    let each = devices_per_controller(arguments.uris.len(), sockets.len())?;
    let clock = Clock::start();
    let regions = RegionTable::new(REGIONS_MAX);
    let opened = open_and_claim_all(arguments, &regions, clock)?;
    let (devices, namespaces): (Vec<_>, Vec<_>) = opened.into_iter().unzip();
    let open_one = |socket: &PathBuf| open_listener(&ListenAddress::Path(socket.clone()));
    let listen_sockets = sockets.iter().map(open_one).collect::<Result<Vec<_>, _>>()?;
    let balanced = start_reactors(arguments, &clock)?;
    let reactors = &balanced.reactors;
    // A thread that never sleeps polls the doorbells in shared memory; no client message has to wake
    // it.
    let maps_doorbells = arguments.poll == PollMode::Always;
    let mut servers = Vec::new();
    let mut slow_ios = Vec::new();
    for (index, (listen_socket, devices)) in
        listen_sockets.into_iter().zip(namespaces.chunks(each)).enumerate()
    {
        let listen = format!("vfio-user:{}", listen_socket.address());
        let observed = (1..).zip(devices).map(|(nsid, device)| {
            let slow_io = DeviceSlowIo::new("vfio-user", &listen, Some(nsid));
            slow_io.export().set_threshold(arguments.slow_io);
            let medium = slow_io.observe(Arc::clone(device) as Arc<dyn BlockDevice>);
            slow_ios.push(slow_io);
            medium
        });
        let media = observed.collect();
        let options = ControllerOptions { maps_doorbells, ..ControllerOptions::default() };
        let server = Server::start(ServerConfig {
            listen_socket,
            media,
            options: ControllerOptions { serial: serial_number(options.serial, index), ..options },
            regions: regions.clone(),
            reactors: Arc::clone(reactors.registry()),
            clock,
        });
        servers.push(server.map_err(|why| Error::environment(format!("serve: {why}")))?);
    }
    let listen = |server: &Server| format!("vfio-user:{}", server.address());
    let listens: Vec<_> = servers.iter().map(listen).collect();
    let line = match arguments.json {
        true => format!("{}\n", json!({ "ready": true, "listen": listens, "connect": listens })),
        false => format!("ready {}\n", listens.join(" ")),
    };
    tenmil_linux::storage_file::commit_created()?;
    let (uris, files) =
        (arguments.uris.iter().collect(), sockets.iter().map(PathBuf::as_path).collect());
    let parts = ServedParts::at_sockets(ServeTransport::VfioUser, uris, files);
    sandbox::run_as_user(arguments, &parts)?;
    let served = (0..).zip(devices).map(|(index, device)| ServedDevice {
        protocol: "vfio-user",
        listen: listens[index / each].clone(),
        namespace: u32::try_from(index % each + 1).ok(),
        device,
        slow_io: Arc::clone(&slow_ios[index]),
    });
    let state =
        rpc_endpoint::rpc_state_of_reactors(&balanced).with_part(ServedDevices(served.collect()));
    let requested = rpc_endpoint::serve_control_socket(state);
    sandbox::drop_rights(arguments, &parts, event_sender(&requested));
    rpc_endpoint::set_ready(&requested);
    service_manager::announce_ready(out, &line)?;
    run_until_stopped(requested, reactors, &slow_ios, "client", || {
        for (index, (uri, namespace)) in arguments.uris.iter().zip(&namespaces).enumerate() {
            let nsid = u32::try_from(index % each + 1).unwrap_or(u32::MAX);
            log_device_event(uri, namespace, || {
                servers[index / each].report_namespace_resize(nsid)
            });
        }
        let next = |server: &Server| Some((listen(server), server.next_event()?));
        let (place, new_events) = servers.iter().find_map(next)?;
        Some(if servers.len() > 1 { new_events.with_endpoint_address(&place) } else { new_events })
    });
    drop(servers);
    balanced.stop();
    Ok(ExitCode::SUCCESS)
}

/// Number of namespaces per controller, for this many devices and sockets.
fn devices_per_controller(devices: usize, sockets: usize) -> Result<usize, Error> {
    match sockets {
        1 => Ok(devices),
        _ if sockets == devices => Ok(1),
        _ => Err(Error::usage(format!(
            "serve {devices} devices at {sockets} sockets of vfio-user, expected one socket for all \
             of them, or one for each"
        ))),
    }
}

/// Serial number of the controller with this index: guests distinguish controllers by it.
fn serial_number(first: String, index: usize) -> String {
    if index == 0 { first } else { format!("{first}{}", index + 1) }
}

/// Opens and claims all devices.
fn open_and_claim_all(
    arguments: &ServeArguments,
    regions: &RegionTable,
    clock: Clock,
) -> Result<Vec<(Bdev, Arc<BdevDescriptor>)>, Error> {
    let open = |uri| -> Result<(Bdev, Arc<BdevDescriptor>), Error> {
        check_device_can_access_guest_memory(uri)?;
        let options = BdevOptions { depth: QUEUE_DEPTH, ..BdevOptions::new(clock, 1) };
        let (device, descriptor) = open_and_claim(arguments, uri, regions, options, "vfio-user")?;
        Ok((device, Arc::new(descriptor)))
    };
    arguments.uris.iter().map(open).collect()
}

/// Queue depth of the device channel.
const QUEUE_DEPTH: u32 = 256;

#[cfg(test)]
mod tests {
    use super::{devices_per_controller, serial_number};

    #[test]
    fn devices_share_one_controller_or_have_one_each() {
        assert_eq!(
            (devices_per_controller(3, 1).unwrap(), devices_per_controller(3, 3).unwrap()),
            (3, 1)
        );
        for (devices, sockets) in [(3, 2), (1, 2), (4, 8)] {
            let refused = devices_per_controller(devices, sockets).unwrap_err();
            let expected = format!("serve {devices} devices at {sockets} sockets of vfio-user, ");
            assert!(refused.text.starts_with(&expected), "{}", refused.text);
        }
    }

    #[test]
    fn every_controller_has_its_own_serial_number() {
        let serials = [0, 1, 20].map(|index| serial_number("TENMIL".to_owned(), index));
        assert_eq!(serials, ["TENMIL", "TENMIL2", "TENMIL21"]);
    }
}
