//! `tenmil serve` over NVMe/TCP.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;

use base::Medium;
use block::uri::Uri;
use block::{Claim, Descriptor, Device, DeviceOptions, Event, MediumError, Opener};
use control::configuration::{self, Access, Configuration};
use ctrl::controller::{AnaState, NamespaceConfig, Subsystem, SubsystemConfig};
use dma::Regions;
use host::Clock;
use host::socket::{Address, SocketOptions};
use serde_json::json;
use target::tcp::{
    ControllerModel, Hosts, Limits, News, OfferPlan, Port, Server, ServerPlan, Service,
};

use super::{REGIONS_MAX, ServeArguments, WATCH_INTERVAL, open_door, running, start_reactors};
use crate::Refused;
use crate::cli::write_out;

/// A namespace that is served.
struct Served {
    subsystem: Subsystem,
    nqn: String,
    nsid: u32,
    uri: Uri,
    description: String,
    descriptor: Arc<Descriptor>,
    /// Where it is reached, by number.
    ports: Vec<u16>,
}

/// What a subsystem is called if nobody says.
const NQN: &str = "nqn.2026-01.org.tenmil:disk";

/// What the arguments ask for, as a file would say it.
pub(super) fn asked(
    arguments: &ServeArguments,
    listeners: Vec<SocketAddr>,
) -> Result<Configuration, Refused> {
    let hosts = match (arguments.host.is_empty(), arguments.allow_any_host) {
        (false, false) => configuration::Hosts::Only(arguments.host.clone()),
        (true, _) => configuration::Hosts::Any,
        (false, true) => {
            return Err(Refused::caller("--host and --allow-any-host together, expected one"));
        }
    };
    let nqn = arguments.nqn.clone().unwrap_or_else(|| NQN.to_owned());
    for name in arguments.host.iter().chain([&nqn]) {
        wire::nqn::check(name).map_err(|why| Refused::caller(format!("`{name}`: {why}")))?;
    }
    let namespace = |(nsid, uri): (u32, &Uri)| configuration::Namespace {
        nsid,
        uri: uri.clone(),
        is_read_only: arguments.read_only,
        hosts: configuration::Hosts::Any,
        ana_group: 1,
    };
    let subsystem = configuration::Subsystem {
        nqn,
        serial: None,
        hosts,
        listeners: (0..listeners.len()).collect(),
        namespaces: (1..).zip(&arguments.uris).map(namespace).collect(),
        paths: Vec::new(),
    };
    Ok(Configuration {
        memory_bytes: arguments.memory.map(std::num::NonZeroU64::get),
        listeners: listeners
            .into_iter()
            .map(|address| configuration::Listener { address })
            .collect(),
        subsystems: vec![subsystem],
        referrals: Vec::new(),
    })
}

/// Serves until somebody ends it.
pub(super) fn run(
    arguments: &ServeArguments,
    asked: &Configuration,
    out: &mut dyn Write,
) -> Result<ExitCode, Refused> {
    check_access(asked, arguments.allow_any_host)?;
    let clock = Clock::start();
    let regions = Regions::new(REGIONS_MAX);
    let usual = Limits::default();
    let limits = Limits {
        memory_bytes: asked.memory_bytes.unwrap_or(usual.memory_bytes),
        connections_max: arguments.connections.map_or(usual.connections_max, |most| most as usize),
        ..usual
    };
    let service = Service::new(&regions, limits).map_err(Refused::machine)?;
    // Doors first: who cannot listen need not open a disk.
    let mut doors = Vec::new();
    for (number, listener) in (1_u16..).zip(&asked.listeners) {
        let door = open_door(&Address::Tcp(listener.address))?;
        let address = match door.address() {
            Address::Tcp(address) => Some(*address),
            Address::Path(_) => None,
        };
        service.open_port(number, Port { address });
        doors.push((door, number));
    }
    service.refer_to(asked.referrals.clone());
    let mut served = Vec::new();
    for subsystem in &asked.subsystems {
        offer(&service, subsystem, asked.ana_groups(), (&regions, clock), &mut served)?;
    }
    let reactors = start_reactors(arguments, &clock)?;
    let mut asking = running::serve(running::state_of(&reactors));
    let server = Server::start(ServerPlan {
        doors,
        service: service.clone(),
        regions,
        sockets: SocketOptions::default(),
        reactors: Arc::clone(reactors.directory()),
        clock,
    });
    let server = server.map_err(|error| Refused::machine(format!("serve: {error}")))?;
    write_out(out, &ready(arguments.json, &served, server.addresses()))?;
    while !host::signal::interrupted() {
        while let Some(news) = service.next_news() {
            if matches!(news, News::Trouble(_) | News::Refused { .. }) {
                eprintln!("note: {news}");
            }
        }
        served.iter().for_each(hear);
        if let Some((_, relay)) = &mut asking {
            relay.pass_on(&running::of(&reactors));
        }
        host::thread::rest(WATCH_INTERVAL);
    }
    // Nobody new first; then those who are in.
    drop(server);
    reactors.stop();
    Ok(ExitCode::SUCCESS)
}

/// Whoever can reach a listener beyond this machine has to be named, or let in on purpose.
fn check_access(asked: &Configuration, allows_any: bool) -> Result<(), Refused> {
    for subsystem in &asked.subsystems {
        let reached = subsystem.listeners.iter().filter_map(|at| asked.listeners.get(*at));
        let beyond = reached.map(|listener| listener.address).find(|at| !at.ip().is_loopback());
        if let Some(address) = beyond
            && subsystem.hosts == configuration::Hosts::Any
            && !allows_any
        {
            let text = format!(
                "serve {}: anybody who reaches {address} could read and write it, \
                 expected a list of hosts",
                subsystem.nqn
            );
            let hint = "name them with --host NQN, or say --allow-any-host";
            return Err(Refused { hint: Some(hint.to_owned()), ..Refused::caller(text) });
        }
    }
    Ok(())
}

/// Opens what a subsystem is made of, and offers it.
fn offer(
    service: &Service,
    asked: &configuration::Subsystem,
    ana_groups: u32,
    (regions, clock): (&Regions, Clock),
    served: &mut Vec<Served>,
) -> Result<(), Refused> {
    let opener = Opener { regions, clock, seed: 1, more: crate::KINDS };
    let has_ana = ana_groups > 1 || !asked.paths.is_empty();
    let config = SubsystemConfig {
        nqn: asked.nqn.clone(),
        model: "tenmil target".to_owned(),
        ana_groups: if has_ana { ana_groups } else { 0 },
        ..SubsystemConfig::new(asked.serial.as_deref().unwrap_or(&serial(&asked.nqn)), Vec::new())
    };
    let subsystem = Subsystem::new(config).map_err(Refused::caller)?;
    let ports = asked.listeners.iter().filter_map(|at| u16::try_from(at + 1).ok());
    let ports: Vec<u16> = ports.collect();
    let mut masks = BTreeMap::new();
    for namespace in &asked.namespaces {
        let (descriptor, description) = open(&opener, namespace)?;
        let config = NamespaceConfig {
            nsid: Some(namespace.nsid),
            ana_group: namespace.ana_group,
            is_read_only: namespace.is_read_only,
            ..NamespaceConfig::new(Arc::clone(&descriptor) as Arc<dyn Medium>)
        };
        let refuse = |why| Refused::caller(format!("serve {}: {why}", namespace.uri));
        let nsid = subsystem.add_namespace(config).map_err(refuse)?;
        if let configuration::Hosts::Only(hosts) = &namespace.hosts {
            masks.insert(nsid, hosts.iter().cloned().collect::<BTreeSet<_>>());
        }
        served.push(Served {
            subsystem: subsystem.clone(),
            nqn: asked.nqn.clone(),
            nsid,
            uri: namespace.uri.clone(),
            description,
            descriptor,
            ports: ports.clone(),
        });
    }
    let state_at = |port: u16| {
        let here = asked.paths.iter().filter(|path| path.listener + 1 == usize::from(port));
        here.map(|path| (path.ana_group, state(path.access))).collect()
    };
    let hosts = match &asked.hosts {
        configuration::Hosts::Any => Hosts::Any,
        configuration::Hosts::Only(hosts) => Hosts::Listed(hosts.iter().cloned().collect()),
    };
    let plan = OfferPlan {
        subsystem,
        nqn: asked.nqn.clone(),
        hosts,
        ports: ports.into_iter().map(|port| (port, state_at(port))).collect(),
        model: ControllerModel::Dynamic,
        masks,
    };
    service.offer(plan).map_err(Refused::caller)
}

/// Opens a device and claims it.
fn open(
    opener: &Opener<'_>,
    namespace: &configuration::Namespace,
) -> Result<(Arc<Descriptor>, String), Refused> {
    let uri = &namespace.uri;
    let refuse = |why: MediumError| Refused::of(why.blame(), format!("serve {uri}: {why}"));
    let asked = if namespace.is_read_only { uri.clone().to_read() } else { uri.clone() };
    let opened = opener.open(&asked).map_err(refuse)?;
    let options = DeviceOptions::new(opener.clock, 1);
    let device = Device::new(&uri.to_string(), opened.medium, options).map_err(refuse)?;
    let claim = if namespace.is_read_only { Claim::ReadShared } else { Claim::WriteOnce };
    let descriptor = device
        .open(claim, "nvme-tcp")
        .map_err(|why| Refused::of(why.blame(), format!("serve {uri}: {why}")))?;
    Ok((Arc::new(descriptor), opened.description))
}

/// Passes on what has happened to a device.
fn hear(served: &Served) {
    while let Some(event) = served.descriptor.next_event() {
        match event {
            Event::Resized { .. } | Event::Overflowed { .. } => {
                served.subsystem.resized(served.nsid);
            }
            Event::Removed => {
                served.subsystem.remove_namespace(served.nsid);
            }
            Event::MediumError { lba, blocks } => {
                eprintln!("note: {} has lost {blocks} blocks from {lba} on", served.uri);
            }
            Event::MediumChanged => eprintln!("note: {} has been changed", served.uri),
        }
    }
}

/// A serial number made from a name, so that it is the same after a restart.
fn serial(nqn: &str) -> String {
    let hash = nqn.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    format!("{hash:016x}")
}

const fn state(access: Access) -> AnaState {
    match access {
        Access::Optimized => AnaState::Optimized,
        Access::NonOptimized => AnaState::NonOptimized,
        Access::Inaccessible => AnaState::Inaccessible,
    }
}

/// What is printed once it listens: the addresses, and for each namespace how it is reached.
fn ready(is_json: bool, served: &[Served], addresses: &[Address]) -> String {
    let sockets: Vec<SocketAddr> = addresses
        .iter()
        .filter_map(|address| match address {
            Address::Tcp(address) => Some(*address),
            Address::Path(_) => None,
        })
        .collect();
    let listens: Vec<String> = sockets.iter().map(|address| format!("tcp://{address}")).collect();
    let ways = |served: &Served| -> Vec<(String, String)> {
        let there = served.ports.iter().filter_map(|port| sockets.get(usize::from(*port) - 1));
        there.map(|at| (from_linux(at, &served.nqn), from_tenmil(at, served))).collect()
    };
    if is_json {
        let namespace = |served: &Served| {
            let limits = served.descriptor.limits();
            json!({
                "nqn": served.nqn,
                "nsid": served.nsid,
                "uri": served.uri.to_string(),
                "description": served.description,
                "size_bytes": limits.block_count * u64::from(limits.block_size),
                "nvme": ways(served).iter().map(|(linux, _)| linux.clone()).collect::<Vec<_>>(),
                "connect": ways(served).iter().map(|(_, uri)| uri.clone()).collect::<Vec<_>>(),
            })
        };
        let namespaces: Vec<_> = served.iter().map(namespace).collect();
        let line = json!({ "ready": true, "listen": listens, "namespaces": namespaces });
        return format!("{line}\n");
    }
    let mut text = format!("ready {}\n", listens.join(" "));
    for one in served {
        text += &format!("namespace {} of {}: {}\n", one.nsid, one.nqn, one.uri);
        for (linux, uri) in ways(one) {
            text += &format!("  {linux}\n  {uri}\n");
        }
    }
    text
}

/// The line that connects a Linux host.
fn from_linux(address: &SocketAddr, nqn: &str) -> String {
    let (ip, port) = (address.ip(), address.port());
    format!("nvme connect --transport tcp --traddr {ip} --trsvcid {port} --nqn {nqn}")
}

/// What tenmil calls it.
fn from_tenmil(address: &SocketAddr, served: &Served) -> String {
    format!("tcp://{address}/{}?ns={}", served.nqn, served.nsid)
}
