//! Hosts connected by loopback sockets to a service on reactors.

#![expect(clippy::disallowed_methods, reason = "a host opens sockets, and a kernel writes files")]

use std::net::TcpStream;
use std::sync::Arc;

use tenmil_base::{Span, Stream};
use tenmil_dma::RegionTable;
use tenmil_linux::cpu_topology::CpuLocation;
use tenmil_linux::kernel_files::KernelFiles;
use tenmil_linux::socket::{ListenAddress, SocketOptions, SocketStreamFactory, StreamListener};
use tenmil_linux::thread_pool::ThreadPool;
use tenmil_linux::{Clock, CpuList};
use tenmil_nvme_tcp::DataDirection;
use tenmil_reactor::load_balancer::{LinuxPlatform, new_balancer};
use tenmil_reactor::thread_scheduler::{Options, Policy};
use tenmil_reactor::{PollMode, ReactorOptions, Reactors, ThreadBuilder, ThreadId};
use tenmil_wire::fabrics::{CNTLID_DYNAMIC, PropertySet, PropertySize};
use tenmil_wire::register::offset;
use tenmil_wire::{Command, Completion, Fuse, IoOpcode, Status, TypedCommand};

use super::test_target::{
    ENABLED, TestHostConnection, TestTarget, admin_config, admin_connect, connect_data, io_config,
    io_connect, pattern, read_or_write_command,
};
use crate::tcp::{PlacementPolicy, Server, ServerConfig, TargetEvent};

/// Host over sockets.
pub(super) struct SocketHostFactory {
    clock: Clock,
    sockets: SocketStreamFactory,
    address: std::net::SocketAddr,
    /// Makes the stream of a connection of that of its socket.
    pub(super) wrap: fn(Box<dyn Stream>) -> Box<dyn Stream>,
}

impl SocketHostFactory {
    /// Connects a socket, and sends nothing yet.
    pub(super) fn start_connecting(
        &self,
        config: tenmil_nvme_tcp::HostConfig,
    ) -> TestHostConnection {
        let socket = TcpStream::connect(self.address).unwrap();
        let stream = (self.wrap)(self.sockets.new_stream(socket.into()).unwrap());
        TestHostConnection::new(config, stream, self.clock.now())
    }

    fn connect_socket(&self, config: tenmil_nvme_tcp::HostConfig) -> TestHostConnection {
        let mut line = self.start_connecting(config);
        while line.terms.is_none() {
            line.poll_once(self.clock.now());
        }
        line
    }

    pub(super) fn execute_command(
        &self,
        line: &mut TestHostConnection,
        command: &Command,
        data: DataDirection,
        bytes: &[u8],
    ) -> (Completion, Vec<u8>) {
        let tag = line.submit(command, data, bytes);
        let until = self.clock.now().after(Span::from_secs(20));
        while !line.done.contains_key(&tag) {
            line.poll_once(self.clock.now());
            assert!(self.clock.now() < until, "{command:?} has not ended");
        }
        line.done.remove(&tag).unwrap()
    }
}

/// Connects, writes, reads and disconnects, over reactors that poll permanently and over reactors
/// that sleep.
#[test]
fn hosts_connect_over_sockets_in_every_poll_mode() {
    for poll in [PollMode::Always, PollMode::Adaptive] {
        let rig = TestTarget::new();
        let clock = Clock::start();
        let options = ReactorOptions { poll, ..ReactorOptions::default() };
        let cores = CpuList::allowed_cpus().iter().take(1).collect();
        let reactors = Reactors::start_on_cores(&cores, &options, &clock).unwrap();
        let (server, client) = start_server(&rig, &reactors, PlacementPolicy::default(), clock);
        connect_write_and_read(&client);
        drop(server);
        reactors.stop();
        assert_eq!(rig.service.connection_count(), 0);
        assert_eq!(rig.service.buffer_pool().free_bytes(), rig.service.buffer_pool().size_bytes());
        let gone =
            |new_events: &TargetEvent| matches!(new_events, TargetEvent::Disconnected { .. });
        let new_events = std::iter::from_fn(|| rig.service.next_event());
        assert_eq!(new_events.filter(gone).count(), 2);
        assert!(TcpStream::connect(client.address).is_err(), "the port is closed");
    }
}

/// The NAPI IDs are made up: loopback connections have none.
#[test]
fn connections_of_one_receive_queue_share_a_reactor_and_a_missing_queue_is_logged_once() {
    let rig = TestTarget::new();
    let clock = Clock::start();
    let cores: CpuList = CpuList::allowed_cpus().iter().take(2).collect();
    let count = cores.iter().count();
    let reactors = Reactors::start_on_cores(&cores, &ReactorOptions::default(), &clock).unwrap();
    let (server, client) = start_server(&rig, &reactors, PlacementPolicy::Queue, clock);
    let at = |napi_id| {
        server
            .dispatcher
            .reactor_of_queue(tenmil_linux::socket::RxPlacement {
                cpu: None,
                napi_id: Some(napi_id),
            })
            .unwrap()
    };
    // The order differs from round robin, which would otherwise pass as well.
    let places = [8193, 8193, 8194, 8194, 8193].map(at);
    assert_eq!([places[1], places[3], places[4]], [places[0], places[2], places[0]]);
    assert_eq!(places[0] != places[2], count > 1, "another queue, the next reactor");

    connect_write_and_read(&client);
    drop(server);
    reactors.stop();
    let new_events = std::iter::from_fn(|| rig.service.next_event());
    let is_notified = |new_events: &TargetEvent| matches!(new_events, TargetEvent::Error(text) if text.contains("SO_INCOMING_NAPI_ID is 0"));
    assert_eq!(new_events.filter(is_notified).count(), 1, "of two connections");
}

/// One host sends fused pairs while the others are idle or have reads outstanding, on the same
/// reactor or on others.
#[test]
fn fused_pair_completes_under_load_of_other_hosts() {
    for poll in [PollMode::Always, PollMode::Adaptive] {
        let rig = TestTarget::new();
        let clock = Clock::start();
        let options = ReactorOptions { poll, ..ReactorOptions::default() };
        let cores: CpuList = CpuList::allowed_cpus().iter().take(2).collect();
        let reactors = Reactors::start_on_cores(&cores, &options, &clock).unwrap();
        let (server, client) = start_server(&rig, &reactors, PlacementPolicy::default(), clock);
        let mut hosts = [(); 3].map(|()| connect_admin_queue(&client));
        let block = |value: u64| [value.to_le_bytes(); 64].concat();
        for round in 0..60 {
            let (_, other) = &mut hosts[1];
            let read = read_or_write_command(IoOpcode::Read.code(), 0, 8);
            let count = if round < 30 { 0 } else { 8 };
            let tags = (0..count).map(|_| other.submit(&read, DataDirection::ToHost(4096), &[]));
            let tags: Vec<u16> = tags.collect();
            other.poll_once(clock.now());
            let (_, io) = &mut hosts[0];
            let halves = [(IoOpcode::Compare, Fuse::First), (IoOpcode::Write, Fuse::Second)];
            let pair = halves.map(|(opcode, fuse)| {
                let value = round + u64::from(fuse == Fuse::Second);
                let command = read_or_write_command(opcode.code(), 0, 1).with_fuse(fuse);
                io.submit(&command, DataDirection::FromHost(512), &block(value))
            });
            // A connection that does not respond is given up after five seconds.
            let until = clock.now().after(Span::from_secs(20));
            while !pair.iter().all(|tag| io.done.contains_key(tag)) {
                io.poll_once(clock.now());
                assert!(clock.now() < until, "a pair has not ended");
            }
            let ends = pair.map(|tag| io.done.remove(&tag).unwrap().0.status());
            assert_eq!(ends, [Status::SUCCESS; 2], "{poll:?}, round {round}");
            let (_, other) = &mut hosts[1];
            while tags.iter().any(|tag| !other.done.contains_key(tag)) {
                other.poll_once(clock.now());
                assert!(clock.now() < until, "a read has not ended");
            }
            other.done.clear();
            if round % 10 == 0 {
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
        }
        drop(server);
        reactors.stop();
        assert_eq!(rig.service.buffer_pool().free_bytes(), rig.service.buffer_pool().size_bytes());
    }
}

/// Serves at a free port; returns the server and a client for it.
pub(super) fn start_server(
    rig: &TestTarget,
    reactors: &Reactors,
    placement: PlacementPolicy,
    clock: Clock,
) -> (Server, SocketHostFactory) {
    let listen_socket =
        StreamListener::open(&ListenAddress::Tcp("127.0.0.1:0".parse().unwrap())).unwrap();
    let server = Server::start(ServerConfig {
        listen_sockets: vec![(listen_socket, 1)],
        service: rig.service.clone(),
        regions: rig.regions.clone(),
        sockets: SocketOptions::default(),
        placement,
        reactors: Arc::clone(reactors.registry()),
        clock,
    });
    let server = server.unwrap();
    let ListenAddress::Tcp(address) = server.addresses()[0].clone() else { panic!("a port") };
    let sockets = SocketStreamFactory::new(RegionTable::new(4), SocketOptions::default());
    (server, SocketHostFactory { clock, sockets, address, wrap: |stream| stream })
}

pub(super) fn connect_write_and_read(client: &SocketHostFactory) {
    let (_admin, mut io) = connect_admin_queue(client);
    write_and_read(client, &mut io);
}

/// Connects a host and enables its controller; returns its admin connection and its I/O connection.
pub(super) fn connect_admin_queue(
    client: &SocketHostFactory,
) -> (TestHostConnection, TestHostConnection) {
    let mut admin = client.connect_socket(admin_config());
    let data = connect_data(CNTLID_DYNAMIC);
    let connect = admin_connect().to_command();
    let (completion, _) = client.execute_command(
        &mut admin,
        &connect,
        DataDirection::FromHost(1024),
        data.as_bytes(),
    );
    assert_eq!(completion.status(), Status::SUCCESS);
    let cntlid = u16::try_from(completion.dw0()).unwrap();
    let ofst = u32::try_from(offset::CC).unwrap();
    let enable = PropertySet { size: PropertySize::Four, ofst, value: ENABLED }.to_command();
    let (completion, _) = client.execute_command(&mut admin, &enable, DataDirection::None, &[]);
    assert_eq!(completion.status(), Status::SUCCESS);
    let mut io = client.connect_socket(io_config());
    let (connect, data) = (io_connect(1).to_command(), connect_data(cntlid));
    let (completion, _) =
        client.execute_command(&mut io, &connect, DataDirection::FromHost(1024), data.as_bytes());
    assert_eq!(completion.status(), Status::SUCCESS);
    (admin, io)
}

pub(super) fn write_and_read(client: &SocketHostFactory, io: &mut TestHostConnection) {
    for blocks in [1, 8, 256] {
        let len = blocks * 512;
        let bytes = pattern(blocks, len as usize);
        let write = read_or_write_command(IoOpcode::Write.code(), 7, blocks);
        let (completion, _) =
            client.execute_command(io, &write, DataDirection::FromHost(len), &bytes);
        assert_eq!(completion.status(), Status::SUCCESS);
        let read = read_or_write_command(IoOpcode::Read.code(), 7, blocks);
        let (completion, back) = client.execute_command(io, &read, DataDirection::ToHost(len), &[]);
        assert_eq!(completion.status(), Status::SUCCESS);
        assert!(back == bytes);
    }
    // More data than the socket buffers hold, to a host that does not receive for a while.
    let read = read_or_write_command(IoOpcode::Read.code(), 0, 256);
    let tags: Vec<u16> =
        (0..40).map(|_| io.submit(&read, DataDirection::ToHost(256 * 512), &[])).collect();
    io.is_deaf = true;
    let until = client.clock.now().after(Span::from_ms(20));
    while client.clock.now() < until {
        io.poll_once(client.clock.now());
    }
    assert!(io.done.is_empty());
    io.is_deaf = false;
    let until = client.clock.now().after(Span::from_secs(20));
    while tags.iter().any(|tag| !io.done.contains_key(tag)) {
        io.poll_once(client.clock.now());
        assert!(client.clock.now() < until, "{} of 40 have ended", io.done.len());
    }
}

/// Two reactors with a balancer over a simulated sysfs tree, and a host served by them.
struct BalancedServer {
    rig: TestTarget,
    reactors: Reactors,
    server: Server,
    client: SocketHostFactory,
    cores: [u32; 2],
    root: tempfile::TempDir,
    _pool: Arc<ThreadPool>,
}

const CPUSET: &str = "sys/fs/cgroup/pod/cpuset.cpus.effective";

impl BalancedServer {
    /// None on a machine with one core.
    fn start() -> Option<Self> {
        let allowed: Vec<u32> = CpuList::allowed_cpus().iter().take(2).collect();
        let Ok(cores) = <[u32; 2]>::try_from(allowed) else {
            println!("skipped: there is one core, expected two");
            return None;
        };
        let (rig, clock) = (TestTarget::new(), Clock::start());
        let both = CpuList::from_iter(cores);
        let reactors = Reactors::start_on_cores(&both, &ReactorOptions::default(), &clock).unwrap();
        let root = tempfile::tempdir().unwrap();
        let files = [("proc/self/cgroup", "0::/pod\n"), (CPUSET, &*both.to_string())];
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        let pool = Arc::new(ThreadPool::new(1, 1));
        let machine = KernelFiles::under_root(root.path());
        let ground = LinuxPlatform::new(machine, both, None, Arc::clone(&pool));
        let place = |core| CpuLocation { core, ..CpuLocation::default() };
        let options = Options {
            policy: Policy::Static,
            period: Span::from_ms(5),
            migration_interval: Span::from_ms(20),
            ..Options::default()
        };
        let (balancer, _) = new_balancer(options, cores.map(place).to_vec(), ground).unwrap();
        reactors.spawn(ThreadBuilder::new("balancer").add_poller(balancer)).unwrap();
        let (server, client) = start_server(&rig, &reactors, PlacementPolicy::Spread, clock);
        Some(Self { rig, reactors, server, client, cores, root, _pool: pool })
    }

    /// Sets the cores that the simulated cpuset allows.
    fn allow_cores(&self, cores: &[u32]) {
        let cores: CpuList = cores.iter().copied().collect();
        std::fs::write(self.root.path().join(CPUSET), cores.to_string()).unwrap();
    }

    /// Core of each connection and of the balancer.
    fn thread_cores(&self) -> Vec<(ThreadId, u32)> {
        let sample = self.reactors.sample();
        let core = |id| sample.reactors.iter().find(|reactor| reactor.id == id).unwrap().core;
        sample.threads.iter().map(|thread| (thread.id, core(thread.home))).collect()
    }

    /// Whether all of them run on `core`.
    fn are_all_threads_on(&self, core: u32) -> bool {
        self.thread_cores().iter().all(|(_, home)| *home == core)
    }

    /// Repeats 32 writes and 32 reads and compares the data, until `is_so` holds.
    fn write_and_read_until(
        &self,
        io: &mut TestHostConnection,
        what: &str,
        is_so: impl Fn() -> bool,
    ) {
        let until = self.client.clock.now().after(Span::from_secs(20));
        let len_of = |lba: u64| if lba.is_multiple_of(2) { 512 } else { 4096 };
        for round in 0.. {
            let begin = |io: &mut TestHostConnection, lba: u64, is_write: bool| {
                let len = len_of(lba);
                let (opcode, data, bytes) = match is_write {
                    true => {
                        (IoOpcode::Write, DataDirection::FromHost(len), block_data(round, lba, len))
                    }
                    false => (IoOpcode::Read, DataDirection::ToHost(len), Vec::new()),
                };
                io.submit(&read_or_write_command(opcode.code(), lba * 8, len / 512), data, &bytes)
            };
            // Writes and reads alternate in batches: a tag is reused as soon as its command has
            // completed.
            for is_write in [true, false] {
                let tags: Vec<u16> = (0..32).map(|lba| begin(io, lba, is_write)).collect();
                for (lba, tag) in (0..).zip(tags) {
                    let bytes = self.wait_for_read_data(io, tag);
                    let is_it = bytes == block_data(round, lba, len_of(lba));
                    assert!(is_it, "round {round}, block {lba}, write: {is_write}");
                }
            }
            if is_so() {
                return;
            }
            assert!(self.client.clock.now() < until, "never: {what}: {:?}", self.thread_cores());
        }
    }

    /// Waits for a command and returns its data.
    fn wait_for_read_data(&self, io: &mut TestHostConnection, tag: u16) -> Vec<u8> {
        let until = self.client.clock.now().after(Span::from_secs(20));
        while !io.done.contains_key(&tag) {
            io.poll_once(self.client.clock.now());
            assert!(self.client.clock.now() < until, "a command has not ended");
        }
        let (completion, bytes) = io.done.remove(&tag).unwrap();
        assert_eq!(completion.status(), Status::SUCCESS);
        bytes
    }
}

/// Data written at this block in this round.
fn block_data(round: u32, lba: u64, len: u32) -> Vec<u8> {
    pattern(round + u32::try_from(lba).unwrap(), len as usize)
}

/// A container whose cpuset changes while the service runs.
#[test]
fn connections_migrate_from_an_offline_core() {
    let Some(balanced) = BalancedServer::start() else { return };
    let (_admin, mut io) = connect_admin_queue(&balanced.client);
    let [first, second] = balanced.cores;
    balanced.write_and_read_until(&mut io, "they are served", || true);
    for (left, taken) in [(second, first), (first, second), (second, first)] {
        assert!(balanced.thread_cores().len() >= 3, "two connections and a balancer");
        balanced.allow_cores(&[left]);
        balanced.write_and_read_until(&mut io, "they leave", || balanced.are_all_threads_on(left));
        // The core returns; the static policy moves no connection back.
        balanced.allow_cores(&[left, taken]);
        balanced.write_and_read_until(&mut io, "they go on", || true);
    }
    let migrations: u64 =
        balanced.reactors.sample().threads.iter().map(|thread| thread.migrations).sum();
    assert!(migrations >= 6, "{migrations} moves");
    drop(io);
    drop(balanced.server);
    balanced.reactors.stop();
    assert_eq!(balanced.rig.service.connection_count(), 0);
}
