//! Removal of a device under load: clients get errors within a second, and nothing stays open. The
//! only test of its process, because it counts open files and threads of the process.

#![expect(clippy::unwrap_used, reason = "a test may")]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tenmil_base::{Instant, Operation, Span};
use tenmil_block::{Bdev, BdevOptions, Opener};
use tenmil_dma::RegionTable;
use tenmil_linux::named_thread::NamedThread;
use tenmil_linux::socket_stream::{ListenAddress, StreamListener};
use tenmil_linux::{Clock, CpuList};
use tenmil_reactor::{ReactorOptions, Reactors};
use tenmil_serve::nbd::{
    DisconnectReason, ExportConfig, ExportedDevice, NbdEvent, Server, ServerConfig,
};
use tenmil_wire::nbd::option::InfoOption;
use tenmil_wire::nbd::{
    ClientFlags, Command, CommandFlags, ErrorCode, OptionCode, OptionHeader, RequestHeader,
    SimpleReply,
};

const TIME_LIMIT: Duration = Duration::from_secs(20);
const LEN: u32 = 4096;

/// Number of open files and threads of this process.
fn count_descriptors_and_threads() -> (usize, usize) {
    let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    // Threads of io_uring rings end some seconds later.
    (descriptors, names.filter(|name| !name.starts_with("iou-")).count())
}

fn is_file_open_here(path: &Path) -> bool {
    let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
    links.filter_map(|link| std::fs::read_link(link.path()).ok()).any(|open| open == path)
}

fn connect_nbd_client(path: &Path) -> UnixStream {
    let mut stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(TIME_LIMIT)).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    let flags = ClientFlags::FIXED_NEWSTYLE.union(ClientFlags::NO_ZEROES);
    let mut data = Vec::new();
    InfoOption::emit("", &[], &mut data);
    let header = OptionHeader { option: OptionCode::GO, len_bytes: 6 };
    stream.write_all(&[&flags.0.to_be_bytes()[..], &header.to_bytes(), &data].concat()).unwrap();
    // Two option replies of 20 bytes with 12 and 14 bytes of data, and the last reply.
    stream.read_exact(&mut [0; 32 + 34 + 20]).unwrap();
    stream
}

/// Keeps 16 reads outstanding until the server closes. Returns the errors and the time of the first
/// one.
fn keep_reads_outstanding(
    mut stream: UnixStream,
    clock: Clock,
) -> (Vec<ErrorCode>, Option<Instant>) {
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

struct TestServer {
    server: Server,
    reactors: Reactors,
    served: Arc<ExportedDevice>,
    device: Bdev,
}

fn start_server(uri: &str, socket: &Path, regions: &RegionTable, clock: Clock) -> TestServer {
    let opener = Opener { regions, clock, seed: 1, kinds: tenmil_drivers::KINDS };
    let opened = opener.open(&uri.parse().unwrap()).unwrap();
    let device = Bdev::new("file0", opened.medium, BdevOptions::new(clock, 1)).unwrap();
    let served = ExportedDevice::new(ExportConfig {
        name: "disk".into(),
        description: opened.description,
        uri: uri.into(),
        device: &device,
        limits: tenmil_block::QosLimits::default(),
        is_read_only: false,
        allows_resize: false,
        regions,
    });
    let served = Arc::new(served.unwrap());
    let cores: CpuList = CpuList::allowed_cpus().iter().take(1).collect();
    let reactors = Reactors::start_on_cores(&cores, &ReactorOptions::default(), &clock).unwrap();
    let server = Server::start(ServerConfig {
        listen_sockets: vec![StreamListener::open(&ListenAddress::Path(socket.into())).unwrap()],
        exports: vec![Arc::clone(&served)],
        regions: regions.clone(),
        reactors: Arc::clone(reactors.registry()),
        clock,
        connections_max: 8,
        per_address_max: 8,
        idle_max: None,
        tls: None,
    });
    TestServer { server: server.unwrap(), reactors, served, device }
}

/// Disconnect reasons, once all clients are disconnected.
fn await_disconnect_reasons(house: &TestServer, count: usize) -> Vec<DisconnectReason> {
    let mut reasons = Vec::new();
    while reasons.len() < count {
        match house.server.next_event() {
            Some(NbdEvent::Disconnected { reason, .. }) => reasons.push(reason),
            Some(_) => {}
            None => tenmil_linux::named_thread::yield_cpu(),
        }
    }
    reasons
}

#[test]
fn device_removed_under_load_is_reported_within_a_second_and_leaves_nothing_open() {
    let directory = tempfile::tempdir().unwrap();
    let (disk, socket) = (directory.path().join("disk"), directory.path().join("socket"));
    let clock = Clock::start();
    let regions = RegionTable::new(64);
    for engine in ["auto", "threads"] {
        let before = (count_descriptors_and_threads(), regions.region_count());
        let uri = format!("file:{}?size=1m&engine={engine}", disk.display());
        let house = start_server(&uri, &socket, &regions, clock);
        // The server owns memory for its whole lifetime.
        let idle = regions.region_count();
        let clients: Vec<_> = (0..2)
            .map(|_| {
                let stream = connect_nbd_client(&socket);
                NamedThread::spawn("client", None, move |_| keep_reads_outstanding(stream, clock))
                    .unwrap()
            })
            .collect();
        while house.device.statistics().operation_stats(Operation::Read).count < 2_000 {
            tenmil_linux::named_thread::yield_cpu();
        }
        assert!(is_file_open_here(&disk));
        let removed = clock.now();
        house.served.remove_and_disconnect();
        for client in clients {
            let (errors, first) = client.join();
            assert!(!errors.is_empty(), "{engine}");
            assert!(errors.iter().all(|error| *error == ErrorCode::ESHUTDOWN), "{errors:?}");
            let took = first.unwrap().since(removed);
            assert!(took < Span::from_secs(1), "{engine}: {took}");
        }
        let gone = [DisconnectReason::DeviceRemoved, DisconnectReason::DeviceRemoved];
        assert_eq!(await_disconnect_reasons(&house, 2), gone, "{engine}");
        // The resources of a connection are released shortly after its event.
        while regions.region_count() > idle
            || house.device.open_channel_count() > 0
            || is_file_open_here(&disk)
        {
            assert!(clock.now().since(removed) < Span::from_secs(20), "{engine}: something stays");
            tenmil_linux::named_thread::yield_cpu();
        }
        let mut late = UnixStream::connect(&socket).unwrap();
        late.set_read_timeout(Some(TIME_LIMIT)).unwrap();
        assert_eq!(late.read(&mut [0; 1]).unwrap(), 0, "a new connection is closed");
        drop(late);
        let TestServer { server, reactors, served, device } = house;
        drop(server);
        reactors.stop();
        drop((served, device));
        // The kernel lists a thread for a moment after it was joined.
        let ended = clock.now();
        while (count_descriptors_and_threads(), regions.region_count()) != before {
            let now = (count_descriptors_and_threads(), regions.region_count());
            let is_late = clock.now().since(ended) > Span::from_secs(5);
            assert!(!is_late, "{engine}: {now:?}, expected {before:?}");
            tenmil_linux::named_thread::yield_cpu();
        }
    }
}
