//! Exports a RAM disk over NVMe/TCP and reads it in the same program. A Linux host would connect to
//! it with `nvme connect`.

use std::collections::BTreeMap;
use std::error::Error;
use std::sync::Arc;

use tenmil::aio::{Claim, Opener};
use tenmil_dma::RegionTable;
use tenmil_drivers::RamDevice;
use tenmil_linux::socket::{Address, SocketOptions, StreamListener};
use tenmil_linux::{Clock, CpuList};
use tenmil_nvme_controller::controller::{NamespaceConfig, Subsystem, SubsystemConfig};
use tenmil_reactor::{ReactorOptions, Reactors, ThreadBuilder};
use tenmil_serve::tcp::{
    ControllerModel, Hosts, Limits, PlacementPolicy, Port, Server, ServerConfig, Service,
    SubsystemExportConfig,
};

const NQN: &str = "nqn.2026-01.org.tenmil:example";

fn subsystem(regions: &RegionTable) -> Result<Subsystem, Box<dyn Error>> {
    let ram = RamDevice::new(regions, 512, 1 << 16)?;
    let namespace = NamespaceConfig { nsid: Some(1), ..NamespaceConfig::new(Arc::new(ram)) };
    let named = SubsystemConfig::new("EXAMPLE", vec![namespace]);
    Ok(Subsystem::new(SubsystemConfig { nqn: NQN.into(), ..named })?)
}

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let clock = Clock::start();
    let reactors = Reactors::start(&CpuList::allowed(), &ReactorOptions::default(), &clock)?;
    let regions = RegionTable::new(1024);

    // Subsystem, allowed hosts and port.
    let service = Service::new(&regions, Limits::default())?;
    service.open_port(1, Port { address: None });
    service.add_subsystem(SubsystemExportConfig {
        subsystem: subsystem(&regions)?,
        nqn: NQN.into(),
        hosts: Hosts::Any,
        ports: BTreeMap::from([(1, Vec::new())]),
        model: ControllerModel::Dynamic,
        masks: BTreeMap::new(),
    })?;
    // Port 0 selects a free port.
    let door = StreamListener::open(&Address::Tcp("127.0.0.1:0".parse()?))?;
    let server = Server::start(ServerConfig {
        doors: vec![(door, 1)],
        service: service.clone(),
        regions,
        sockets: SocketOptions::default(),
        placement: PlacementPolicy::default(),
        reactors: Arc::clone(reactors.registry()),
        clock,
    })?;

    // Host side: opened like any other device.
    let Address::Tcp(address) = server.addresses()[0].clone() else { return Err("a port".into()) };
    let storage = reactors.spawn(ThreadBuilder::new("storage"))?;
    let name = format!("tcp://{address}/{NQN}?ns=1").parse()?;
    let device = Opener::new(&clock)?.open(&name, Claim::WriteOnce, &storage).wait()?;
    let mut buffer = device.buffer(4096).ok_or("no memory for a buffer")?;
    buffer.store(0, b"ten million");
    let buffer = smol::block_on(device.write(0, buffer))?;
    let buffer = smol::block_on(device.read(0, buffer))?;
    assert!(buffer.to_vec().starts_with(b"ten million"));
    println!("{address} has served a block to {} host", service.associations());
    Ok(())
}
