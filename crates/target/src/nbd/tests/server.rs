//! The server on real reactors and sockets. Every wait has a limit.

#![expect(clippy::disallowed_methods, reason = "a client opens sockets")]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use base::{Medium, Span};
use block::Ram;
use dma::Regions;
use host::stream::{Address, Door};
use host::{Clock, Cores};
use reactor::{PollMode, ReactorOptions, Reactors};
use wire::nbd::{Command, SimpleReply};

use super::client::{handshake, request, write};
use crate::nbd::{Export, Plan, Server};

const PATIENCE: Duration = Duration::from_secs(20);

struct Served {
    server: Option<Server>,
    reactors: Option<Reactors>,
    path: std::path::PathBuf,
    regions: Regions,
    _directory: tempfile::TempDir,
}

fn serve(poll: PollMode, connections_max: usize) -> Served {
    let clock = Clock::start();
    let cores: Cores = Cores::allowed().iter().take(2).collect();
    let options = ReactorOptions { poll, ..ReactorOptions::default() };
    let reactors = Reactors::start(&cores, &options, &clock).unwrap();
    let regions = Regions::new(16);
    let medium: Arc<dyn Medium> = Arc::new(Ram::new(&regions, 512, 8192).unwrap());
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("door");
    let any = Address::Tcp("127.0.0.1:0".parse().unwrap());
    let doors = [Address::Path(path.clone()), any].map(|address| Door::open(&address).unwrap());
    let server = Server::start(Plan {
        doors: doors.into(),
        export: Export::new("disk", "", medium.limits(), false).unwrap(),
        medium,
        regions: regions.clone(),
        reactors: Arc::clone(reactors.directory()),
        clock,
        connections_max,
    });
    Served {
        server: Some(server.unwrap()),
        reactors: Some(reactors),
        path,
        regions,
        _directory: directory,
    }
}

/// A client that has chosen its export.
fn connect(served: &Served) -> UnixStream {
    let mut stream = UnixStream::connect(&served.path).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    choose(&mut stream);
    stream
}

fn choose(stream: &mut (impl Read + Write)) {
    // Real clients say nothing before they are greeted.
    stream.read_exact(&mut [0; 18]).unwrap();
    stream.write_all(&handshake(false)).unwrap();
    // Two replies of 20 bytes with 12 and 14 of data, and the last.
    stream.read_exact(&mut [0; 32 + 34 + 20]).unwrap();
}

fn exchange(stream: &mut (impl Read + Write), request: &[u8], data: &mut [u8]) {
    stream.write_all(request).unwrap();
    let mut header = [0; 16];
    stream.read_exact(&mut header).unwrap();
    let reply = SimpleReply::parse(&header).unwrap();
    assert_eq!(reply.error.0, 0);
    stream.read_exact(data).unwrap();
}

#[test]
fn what_one_client_wrote_another_reads_on_either_socket_in_every_poll_mode() {
    for poll in PollMode::ALL {
        let served = serve(poll, 8);
        let mut one = connect(&served);
        exchange(&mut one, &write(1, 512, &[7; 4096]), &mut []);
        let Address::Tcp(port) = served.server.as_ref().unwrap().addresses()[1].clone() else {
            panic!("the second door is a port")
        };
        let mut other = TcpStream::connect(port).unwrap();
        other.set_read_timeout(Some(PATIENCE)).unwrap();
        choose(&mut other);
        let mut back = [0; 4096];
        exchange(&mut other, &request(Command::READ, 2, 512, 4096), &mut back);
        assert!(back.iter().all(|byte| *byte == 7), "{poll}");
        // Long enough after each other that whoever serves has gone to sleep between them.
        for cookie in 0..50 {
            host::thread::rest(Span::from_us(100 << (cookie % 6)));
            exchange(&mut one, &request(Command::READ, cookie, 0, 512), &mut [0; 512]);
        }
    }
}

#[test]
fn connections_end_in_every_way_and_their_memory_serves_the_next() {
    let served = serve(PollMode::Adaptive, 4);
    let regions_before = |served: &Served| {
        (0..16).filter(|id| served.regions.len_bytes(base::RegionId(*id)) > 0).count()
    };
    for round in 0..30 {
        let mut stream = connect(&served);
        match round % 3 {
            0 => stream.write_all(&request(Command::DISC, 0, 0, 0)).unwrap(),
            1 => stream.write_all(&write(0, 0, &[1; 700])[..300]).unwrap(),
            _ => stream.write_all(&[0; 28]).unwrap(),
        }
        if round % 3 != 1 {
            assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0, "the server closes");
        }
    }
    assert!(regions_before(&served) <= 1 + 4, "{}", regions_before(&served));
    let trouble = served.server.as_ref().unwrap().next_trouble();
    assert_eq!(trouble, None);
}

#[test]
fn one_too_many_is_sent_away_and_told_of() {
    let served = serve(PollMode::Adaptive, 1);
    let mut first = connect(&served);
    let mut second = UnixStream::connect(&served.path).unwrap();
    second.set_read_timeout(Some(PATIENCE)).unwrap();
    assert_eq!(second.read(&mut [0; 1]).unwrap(), 0);
    // It is told a moment after the socket was closed.
    let clock = Clock::start();
    let end = clock.now().after(Span::from_secs(20));
    let trouble = loop {
        if let Some(trouble) = served.server.as_ref().unwrap().next_trouble() {
            break trouble;
        }
        assert!(clock.now() < end, "nobody is told");
        host::thread::give_way();
    };
    assert_eq!(trouble, "connect: 1 are connected, expected fewer");
    exchange(&mut first, &request(Command::READ, 1, 0, 512), &mut [0; 512]);
}

#[test]
fn a_server_that_ends_takes_its_socket_and_its_guests_with_it() {
    let mut served = serve(PollMode::Adaptive, 4);
    let mut stream = connect(&served);
    drop(served.server.take());
    assert!(!served.path.exists());
    exchange(&mut stream, &request(Command::READ, 1, 0, 512), &mut [0; 512]);
    served.reactors.take().unwrap().stop();
    assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
}
