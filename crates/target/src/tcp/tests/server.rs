//! Over sockets of this machine, on reactors.

#![expect(clippy::disallowed_methods, reason = "a host opens sockets")]

use std::net::TcpStream;
use std::sync::Arc;

use base::Span;
use dma::Regions;
use host::socket::{Address, Door, SocketOptions, Sockets};
use host::{Clock, Cores};
use reactor::{PollMode, ReactorOptions, Reactors};
use tcp::Data;
use wire::fabrics::{CNTLID_DYNAMIC, PropertySet, PropertySize};
use wire::register::offset;
use wire::{Command, Completion, IoOpcode, Status, Typed};

use super::rig::{
    ENABLED, Line, Rig, admin_config, admin_connect, connect_data, io_config, io_connect, pattern,
    transfer,
};
use crate::tcp::{News, Placement, Server, ServerPlan};

/// A host over sockets.
struct Client {
    clock: Clock,
    sockets: Sockets,
    address: std::net::SocketAddr,
}

impl Client {
    fn dial(&self, config: tcp::HostConfig) -> Line {
        let socket = TcpStream::connect(self.address).unwrap();
        let stream = self.sockets.stream(socket.into()).unwrap();
        let mut line = Line::new(config, stream, self.clock.now());
        while line.terms.is_none() {
            line.turn(self.clock.now());
        }
        line
    }

    fn command(
        &self,
        line: &mut Line,
        command: &Command,
        data: Data,
        bytes: &[u8],
    ) -> (Completion, Vec<u8>) {
        let tag = line.submit(command, data, bytes);
        let until = self.clock.now().after(Span::from_secs(20));
        while !line.done.contains_key(&tag) {
            line.turn(self.clock.now());
            assert!(self.clock.now() < until, "{command:?} has not ended");
        }
        line.done.remove(&tag).unwrap()
    }
}

/// Connects, writes and reads, leaves; with reactors that look for ever, and with such that sleep.
#[test]
fn hosts_come_by_sockets_and_are_served_by_reactors_that_sleep_or_not() {
    for poll in [PollMode::Always, PollMode::Adaptive] {
        let rig = Rig::new();
        let clock = Clock::start();
        let options = ReactorOptions { poll, ..ReactorOptions::default() };
        let cores = Cores::allowed().iter().take(1).collect();
        let reactors = Reactors::start(&cores, &options, &clock).unwrap();
        let door = Door::open(&Address::Tcp("127.0.0.1:0".parse().unwrap())).unwrap();
        let server = Server::start(ServerPlan {
            doors: vec![(door, 1)],
            service: rig.service.clone(),
            regions: rig.regions.clone(),
            sockets: SocketOptions::default(),
            placement: Placement::default(),
            reactors: Arc::clone(reactors.directory()),
            clock,
        });
        let server = server.unwrap();
        let Address::Tcp(address) = server.addresses()[0].clone() else { panic!("a port") };
        let sockets = Sockets::new(Regions::new(4), SocketOptions::default());
        let client = Client { clock, sockets, address };
        visit(&client);
        drop(server);
        reactors.stop();
        assert_eq!(rig.service.connected(), 0);
        assert_eq!(rig.service.budget().free_bytes(), rig.service.budget().bytes());
        let gone = |news: &News| matches!(news, News::Disconnected { .. });
        let news = std::iter::from_fn(|| rig.service.next_news());
        assert_eq!(news.filter(gone).count(), 2);
        assert!(TcpStream::connect(address).is_err(), "nobody listens any more");
    }
}

fn visit(client: &Client) {
    let mut admin = client.dial(admin_config());
    let data = connect_data(CNTLID_DYNAMIC);
    let connect = admin_connect().to_command();
    let (completion, _) =
        client.command(&mut admin, &connect, Data::FromHost(1024), data.as_bytes());
    assert_eq!(completion.status(), Status::SUCCESS);
    let cntlid = u16::try_from(completion.dw0()).unwrap();
    let ofst = u32::try_from(offset::CC).unwrap();
    let enable = PropertySet { size: PropertySize::Four, ofst, value: ENABLED }.to_command();
    let (completion, _) = client.command(&mut admin, &enable, Data::None, &[]);
    assert_eq!(completion.status(), Status::SUCCESS);
    let mut io = client.dial(io_config());
    let (connect, data) = (io_connect(1).to_command(), connect_data(cntlid));
    let (completion, _) = client.command(&mut io, &connect, Data::FromHost(1024), data.as_bytes());
    assert_eq!(completion.status(), Status::SUCCESS);
    for blocks in [1, 8, 256] {
        let len = blocks * 512;
        let bytes = pattern(blocks, len as usize);
        let write = transfer(IoOpcode::Write.code(), 7, blocks);
        let (completion, _) = client.command(&mut io, &write, Data::FromHost(len), &bytes);
        assert_eq!(completion.status(), Status::SUCCESS);
        let read = transfer(IoOpcode::Read.code(), 7, blocks);
        let (completion, back) = client.command(&mut io, &read, Data::ToHost(len), &[]);
        assert_eq!(completion.status(), Status::SUCCESS);
        assert!(back == bytes);
    }
    // More than the sockets hold, to a host that does not look for a while.
    let read = transfer(IoOpcode::Read.code(), 0, 256);
    let tags: Vec<u16> = (0..40).map(|_| io.submit(&read, Data::ToHost(256 * 512), &[])).collect();
    io.is_deaf = true;
    let until = client.clock.now().after(Span::from_ms(20));
    while client.clock.now() < until {
        io.turn(client.clock.now());
    }
    assert!(io.done.is_empty());
    io.is_deaf = false;
    let until = client.clock.now().after(Span::from_secs(20));
    while tags.iter().any(|tag| !io.done.contains_key(tag)) {
        io.turn(client.clock.now());
        assert!(client.clock.now() < until, "{} of 40 have ended", io.done.len());
    }
}
