//! A device that is removed while clients load it: they are told within a second, and nothing stays
//! open. Alone in its process, since it counts what that has open.

#![expect(clippy::unwrap_used, reason = "a test may")]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use base::{Instant, Operation, Span};
use block::{Device, DeviceOptions, Opener};
use dma::Regions;
use host::stream::{Address, Door};
use host::thread::Thread;
use host::{Clock, Cores};
use reactor::{ReactorOptions, Reactors};
use tenmil_target::nbd::{News, Plan, Reason, Served, ServedPlan, Server};
use wire::nbd::option::InfoQuery;
use wire::nbd::{
    ClientFlags, Command, CommandFlags, ErrorCode, OptionCode, OptionHeader, RequestHeader,
    SimpleReply,
};

const PATIENCE: Duration = Duration::from_secs(20);
const LEN: u32 = 4096;

/// What this process has open, and how many threads.
fn open_here() -> (usize, usize) {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    // Those of the kernel's rings stay for some seconds.
    (descriptors, names.filter(|name| !name.starts_with("iou-")).count())
}

fn has_open(path: &Path) -> bool {
    let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    links.filter_map(|link| std::fs::read_link(link.path()).ok()).any(|open| open == path)
}

fn connect(path: &Path) -> UnixStream {
    let mut stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    let flags = ClientFlags::FIXED_NEWSTYLE.and(ClientFlags::NO_ZEROES);
    let mut data = Vec::new();
    InfoQuery::emit("", &[], &mut data);
    let header = OptionHeader { option: OptionCode::GO, len_bytes: 6 };
    stream.write_all(&[&flags.0.to_be_bytes()[..], &header.to_bytes(), &data].concat()).unwrap();
    // Two replies of 20 bytes with 12 and 14 of data, and the last.
    stream.read_exact(&mut [0; 32 + 34 + 20]).unwrap();
    stream
}

/// Keeps 16 reads under way until the server closes. Which errors there were, and when the first was.
fn load(mut stream: UnixStream, clock: Clock) -> (Vec<ErrorCode>, Option<Instant>) {
    let header = RequestHeader {
        flags: CommandFlags::NONE,
        command: Command::READ,
        cookie: 1,
        offset: 0,
        len_bytes: LEN,
    };
    let ask = |stream: &mut UnixStream| stream.write_all(&header.to_bytes()).is_ok();
    assert!((0..16).all(|_| ask(&mut stream)));
    let (mut errors, mut first) = (Vec::new(), None);
    let mut reply = [0; 16];
    while stream.read_exact(&mut reply).is_ok() {
        let error = SimpleReply::parse(&reply).unwrap().error;
        if error == ErrorCode::NONE {
            stream.read_exact(&mut [0; LEN as usize]).unwrap();
        } else {
            first.get_or_insert(clock.now());
            errors.push(error);
        }
        ask(&mut stream);
    }
    (errors, first)
}

struct House {
    server: Server,
    reactors: Reactors,
    served: Arc<Served>,
    device: Device,
}

fn serve(uri: &str, socket: &Path, regions: &Regions, clock: Clock) -> House {
    let opener = Opener { regions, clock, seed: 1, more: &[] };
    let opened = opener.open(&uri.parse().unwrap()).unwrap();
    let device = Device::new("file0", opened.medium, DeviceOptions::new(clock, 1)).unwrap();
    let served = Served::new(ServedPlan {
        name: "disk".into(),
        description: opened.description,
        uri: uri.into(),
        device: &device,
        limiter: None,
        is_read_only: false,
        lets_resize: false,
        regions,
    });
    let served = Arc::new(served.unwrap());
    let cores: Cores = Cores::allowed().iter().take(1).collect();
    let reactors = Reactors::start(&cores, &ReactorOptions::default(), &clock).unwrap();
    let server = Server::start(Plan {
        doors: vec![Door::open(&Address::Path(socket.into())).unwrap()],
        served: Arc::clone(&served),
        regions: regions.clone(),
        reactors: Arc::clone(reactors.directory()),
        clock,
        connections_max: 8,
        per_address_max: 8,
        idle_max: None,
    });
    House { server: server.unwrap(), reactors, served, device }
}

/// Why everybody has gone, once nobody is there any more.
fn reasons(house: &House, count: usize) -> Vec<Reason> {
    let mut reasons = Vec::new();
    while reasons.len() < count {
        match house.server.next_news() {
            Some(News::Disconnected { reason, .. }) => reasons.push(reason),
            Some(_) => {}
            None => host::thread::give_way(),
        }
    }
    reasons
}

#[test]
fn a_device_removed_under_load_is_told_of_within_a_second_and_leaves_nothing_open() {
    let directory = tempfile::tempdir().unwrap();
    let (disk, socket) = (directory.path().join("disk"), directory.path().join("socket"));
    let clock = Clock::start();
    let regions = Regions::new(64);
    for engine in ["auto", "threads"] {
        let before = (open_here(), regions.count());
        let uri = format!("file:{}?size=1m&engine={engine}", disk.display());
        let house = serve(&uri, &socket, &regions, clock);
        // The server has memory of its own for as long as it is there.
        let idle = regions.count();
        let clients: Vec<_> = (0..2)
            .map(|_| {
                let stream = connect(&socket);
                Thread::spawn("client", None, move |_| load(stream, clock)).unwrap()
            })
            .collect();
        while house.device.statistics().of(Operation::Read).count < 2_000 {
            host::thread::give_way();
        }
        assert!(has_open(&disk));
        let removed = clock.now();
        house.served.remove();
        for client in clients {
            let (errors, first) = client.join();
            assert!(!errors.is_empty(), "{engine}");
            assert!(errors.iter().all(|error| *error == ErrorCode::ESHUTDOWN), "{errors:?}");
            let took = first.unwrap().since(removed);
            assert!(took < Span::from_secs(1), "{engine}: {took}");
        }
        let gone = [Reason::DeviceRemoved, Reason::DeviceRemoved];
        assert_eq!(reasons(&house, 2), gone, "{engine}");
        // What a connection has goes with it, a moment after it has said so.
        while regions.count() > idle || house.device.ways_open() > 0 || has_open(&disk) {
            assert!(clock.now().since(removed) < Span::from_secs(20), "{engine}: something stays");
            host::thread::give_way();
        }
        let mut late = UnixStream::connect(&socket).unwrap();
        late.set_read_timeout(Some(PATIENCE)).unwrap();
        assert_eq!(late.read(&mut [0; 1]).unwrap(), 0, "nobody is let in any more");
        drop(late);
        let House { server, reactors, served, device } = house;
        drop(server);
        reactors.stop();
        drop((served, device));
        // The kernel lists a thread for a moment after it was waited for.
        let ended = clock.now();
        while (open_here(), regions.count()) != before {
            let now = (open_here(), regions.count());
            let is_late = clock.now().since(ended) > Span::from_secs(5);
            assert!(!is_late, "{engine}: {now:?}, expected {before:?}");
            host::thread::give_way();
        }
    }
}
