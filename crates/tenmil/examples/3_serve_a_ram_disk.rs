//! A RAM disk over NVMe/TCP, and somebody who reads it: both ends of a network in one program. Linux
//! would come in by the same door, with `nvme connect`.

use std::collections::BTreeMap;
use std::error::Error;
use std::sync::Arc;

use block::Ram;
use ctrl::controller::{NamespaceConfig, Subsystem, SubsystemConfig};
use dma::Regions;
use host::socket::{Address, Door, SocketOptions};
use host::{Clock, Cores};
use reactor::{ReactorOptions, Reactors, ThreadPlan};
use target::tcp::{
    ControllerModel, Hosts, Limits, OfferPlan, Placement, Port, Server, ServerPlan, Service,
};
use tenmil::aio::{Claim, Opener};

const NQN: &str = "nqn.2026-01.org.tenmil:example";

fn subsystem(regions: &Regions) -> Result<Subsystem, Box<dyn Error>> {
    let ram = Ram::new(regions, 512, 1 << 16)?;
    let namespace = NamespaceConfig { nsid: Some(1), ..NamespaceConfig::new(Arc::new(ram)) };
    let named = SubsystemConfig::new("EXAMPLE", vec![namespace]);
    Ok(Subsystem::new(SubsystemConfig { nqn: NQN.into(), ..named })?)
}

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let clock = Clock::start();
    let reactors = Reactors::start(&Cores::allowed(), &ReactorOptions::default(), &clock)?;
    let regions = Regions::new(1024);

    // What is served, to whom, and where it is shown.
    let service = Service::new(&regions, Limits::default())?;
    service.open_port(1, Port { address: None });
    service.offer(OfferPlan {
        subsystem: subsystem(&regions)?,
        nqn: NQN.into(),
        hosts: Hosts::Any,
        ports: BTreeMap::from([(1, Vec::new())]),
        model: ControllerModel::Dynamic,
        masks: BTreeMap::new(),
    })?;
    // Port 0 is any that is free.
    let door = Door::open(&Address::Tcp("127.0.0.1:0".parse()?))?;
    let server = Server::start(ServerPlan {
        doors: vec![(door, 1)],
        service: service.clone(),
        regions,
        sockets: SocketOptions::default(),
        placement: Placement::default(),
        reactors: Arc::clone(reactors.directory()),
        clock,
    })?;

    // The other end: an SSD like any other.
    let Address::Tcp(address) = server.addresses()[0].clone() else { return Err("a port".into()) };
    let storage = reactors.spawn(ThreadPlan::new("storage"))?;
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
