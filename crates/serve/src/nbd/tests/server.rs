//! The server on real reactors and sockets. Every wait has a time limit.

#![expect(clippy::disallowed_methods, reason = "a client opens sockets")]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use tenmil_base::{BlockDevice, Operation, Span};
use tenmil_block::{Bdev, BdevOptions, QosLimits, RateLimit};
use tenmil_dma::RegionTable;
use tenmil_drivers::{FileDevice, FileDeviceOptions, NullDevice, RamDevice};
use tenmil_linux::file_engine::EngineChoice;
use tenmil_linux::socket_stream::{ListenAddress, StreamListener};
use tenmil_linux::{Clock, CpuList};
use tenmil_reactor::{PollMode, ReactorOptions, Reactors};
use tenmil_wire::nbd::reply::encode_hole_chunk;
use tenmil_wire::nbd::{Command, SimpleReply};

use super::client_messages::{encode_handshake, encode_request, encode_write};
use crate::nbd::{
    ConnectionPhase, DisconnectReason, ExportConfig, ExportedDevice, NbdEvent, NbdStats, Server,
    ServerConfig,
};

const TIME_LIMIT: Duration = Duration::from_secs(20);

struct TestServer {
    server: Option<Server>,
    reactors: Option<Reactors>,
    path: std::path::PathBuf,
    exported_device: Arc<ExportedDevice>,
    clock: Clock,
    device: Bdev,
    regions: RegionTable,
    _directory: tempfile::TempDir,
}

fn start_server(poll: PollMode, connections_max: usize) -> TestServer {
    start_server_with_device(poll, connections_max, false, |regions, _| {
        Arc::new(RamDevice::new(regions, 512, 8192).unwrap())
    })
}

fn start_server_with_device(
    poll: PollMode,
    connections_max: usize,
    allows_resize: bool,
    open: impl FnOnce(&RegionTable, &std::path::Path) -> Arc<dyn BlockDevice>,
) -> TestServer {
    let clock = Clock::start();
    let cores: CpuList = CpuList::allowed_cpus().iter().take(2).collect();
    let options = ReactorOptions { poll, ..ReactorOptions::default() };
    let reactors = Reactors::start_on_cores(&cores, &options, &clock).unwrap();
    let regions = RegionTable::new(16);
    let directory = tempfile::tempdir().unwrap();
    let medium = open(&regions, directory.path());
    let options = BdevOptions::new(clock, 1);
    let device = Bdev::new("ram0", medium, options).unwrap();
    let exported_device = ExportedDevice::new(ExportConfig {
        name: "disk".into(),
        description: String::new(),
        uri: "ram:4m".into(),
        device: &device,
        limits: QosLimits::default(),
        is_read_only: false,
        allows_resize,
        regions: &regions,
    });
    let exported_device = Arc::new(exported_device.unwrap());
    let path = directory.path().join("socket");
    let any = ListenAddress::Tcp("127.0.0.1:0".parse().unwrap());
    let listen_sockets = [ListenAddress::Path(path.clone()), any]
        .map(|address| StreamListener::open(&address).unwrap());
    let server = Server::start(ServerConfig {
        listen_sockets: listen_sockets.into(),
        exports: vec![Arc::clone(&exported_device)],
        regions: regions.clone(),
        reactors: Arc::clone(reactors.registry()),
        clock,
        connections_max,
        per_address_max: 2,
        idle_max: None,
        tls: None,
    });
    TestServer {
        server: Some(server.unwrap()),
        reactors: Some(reactors),
        path,
        exported_device,
        clock,
        device,
        regions,
        _directory: directory,
    }
}

/// Connects a client and selects the export.
fn connect_and_select_export(house: &TestServer) -> UnixStream {
    let mut stream = UnixStream::connect(&house.path).unwrap();
    stream.set_read_timeout(Some(TIME_LIMIT)).unwrap();
    select_export(&mut stream);
    stream
}

fn select_export(stream: &mut (impl Read + Write)) {
    // Real clients wait for the greeting.
    stream.read_exact(&mut [0; 18]).unwrap();
    stream.write_all(&encode_handshake(false)).unwrap();
    // Two option replies of 20 bytes with 12 and 14 bytes of data, and the last reply.
    stream.read_exact(&mut [0; 32 + 34 + 20]).unwrap();
}

fn write_and_read(stream: &mut (impl Read + Write), request: &[u8], data: &mut [u8]) {
    stream.write_all(request).unwrap();
    let mut header = [0; 16];
    stream.read_exact(&mut header).unwrap();
    let reply = SimpleReply::parse(&header).unwrap();
    assert_eq!(reply.error.0, 0);
    stream.read_exact(data).unwrap();
}

#[test]
fn data_written_by_one_client_is_read_by_another_in_every_poll_mode() {
    for poll in PollMode::ALL {
        let house = start_server(poll, 8);
        let mut one = connect_and_select_export(&house);
        write_and_read(&mut one, &encode_write(1, 512, &[7; 4096]), &mut []);
        let ListenAddress::Tcp(port) = house.server.as_ref().unwrap().addresses()[1].clone() else {
            panic!("the second listener is a TCP port")
        };
        let mut other = TcpStream::connect(port).unwrap();
        other.set_read_timeout(Some(TIME_LIMIT)).unwrap();
        select_export(&mut other);
        let mut back = [0; 4096];
        write_and_read(&mut other, &encode_request(Command::READ, 2, 512, 4096), &mut back);
        assert!(back.iter().all(|byte| *byte == 7), "{poll}");
        // The pauses are long enough for the reactor to go to sleep in between.
        for cookie in 0..50 {
            tenmil_linux::named_thread::sleep(Span::from_us(100 << (cookie % 6)));
            write_and_read(&mut one, &encode_request(Command::READ, cookie, 0, 512), &mut [0; 512]);
        }
    }
}

#[test]
fn null_device_is_read_as_one_hole() {
    let house = start_server_with_device(PollMode::Adaptive, 1, false, |_, _| {
        Arc::new(NullDevice::new(512, 8192).unwrap())
    });
    let mut stream = UnixStream::connect(&house.path).unwrap();
    stream.set_read_timeout(Some(TIME_LIMIT)).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    stream.write_all(&encode_handshake(true)).unwrap();
    stream.write_all(&encode_request(Command::READ, 9, 512, 128 << 10)).unwrap();
    let hole = encode_hole_chunk(9, 512, 128 << 10);
    let mut found = Vec::new();
    // After the replies to the options.
    while !found.ends_with(&hole) {
        let mut bytes = [0; 256];
        let count = stream.read(&mut bytes).unwrap();
        assert!(count > 0 && found.len() < 1024, "{} bytes without a hole", found.len());
        found.extend(&bytes[..count]);
    }
}

/// Next event, which must arrive.
fn wait_for_event(house: &TestServer) -> NbdEvent {
    let clock = Clock::start();
    let end = clock.now().after(Span::from_secs(20));
    loop {
        if let Some(new_events) = house.server.as_ref().unwrap().next_event() {
            return new_events;
        }
        assert!(clock.now() < end, "no event arrives");
        tenmil_linux::named_thread::yield_cpu();
    }
}

/// Disconnect reason and counters of the next connection that ends.
fn wait_for_disconnect(house: &TestServer) -> (DisconnectReason, NbdStats) {
    loop {
        if let NbdEvent::Disconnected { reason, done, .. } = wait_for_event(house) {
            return (reason, done);
        }
    }
}

#[test]
fn every_way_of_disconnecting_leaves_no_resources() {
    let house = start_server(PollMode::Adaptive, 4);
    let before = house.regions.region_count();
    for round in 0..30 {
        let mut stream = connect_and_select_export(&house);
        match round % 3 {
            0 => stream.write_all(&encode_request(Command::DISC, 0, 0, 0)).unwrap(),
            1 => stream.write_all(&encode_write(0, 0, &[1; 700])[..300]).unwrap(),
            _ => stream.write_all(&[0; 28]).unwrap(),
        }
        if round % 3 != 1 {
            assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0, "the server closes");
        }
        drop(stream);
        let expected = [
            DisconnectReason::ClientDisconnect,
            DisconnectReason::Closed,
            DisconnectReason::ProtocolError,
        ][round % 3]
            .clone();
        assert_eq!(wait_for_disconnect(&house).0, expected);
        assert!(house.exported_device.connections().is_empty());
    }
    // The last connection reports its end before it releases its memory.
    while house.regions.region_count() > before {
        tenmil_linux::named_thread::yield_cpu();
    }
    assert_eq!(house.exported_device.connections_total(), 30);
}

#[test]
fn connection_continues_after_migration_to_another_reactor() {
    const BYTES: u32 = 64 << 10;
    /// More than the socket buffers hold, so that the server always has some requests outstanding.
    const READS: u64 = 256;
    let house = start_server(PollMode::Adaptive, 4);
    let directory = Arc::clone(house.reactors.as_ref().unwrap().registry());
    let homes: Vec<_> = directory.reactors().collect();
    let mut client = connect_and_select_export(&house);
    let content = |block: u64| [u8::try_from(block % 251).unwrap(); BYTES as usize];
    for block in 0..16 {
        let to = encode_write(block, block * u64::from(BYTES), &content(block));
        write_and_read(&mut client, &to, &mut []);
    }
    let thread = directory.sample_statistics(house.clock.now()).threads[0].id;
    let thread = directory.find_thread(thread).unwrap();
    let mut data = vec![0; BYTES as usize];
    for index in 0..40 {
        for cookie in 0..READS {
            let read = encode_request(Command::READ, cookie, cookie % 16 * u64::from(BYTES), BYTES);
            client.write_all(&read).unwrap();
        }
        let to = homes[(index + 1) % homes.len()];
        let _ = directory.migrate_thread(thread.id(), to);
        for _ in 0..READS {
            let mut header = [0; 16];
            client.read_exact(&mut header).unwrap();
            let reply = SimpleReply::parse(&header).unwrap();
            client.read_exact(&mut data).unwrap();
            assert!(data == content(reply.cookie % 16), "after {index} moves");
        }
        let end = house.clock.now().after(Span::from_secs(20));
        while thread.reactor() != to {
            assert!(house.clock.now() < end, "it never comes home");
            tenmil_linux::named_thread::yield_cpu();
        }
    }
    drop(client);
    let (reason, done) = wait_for_disconnect(&house);
    assert_eq!((reason, done.reads), (DisconnectReason::Closed, 40 * READS));
}

#[test]
fn a_connection_beyond_the_limit_is_rejected_and_reported() {
    let house = start_server(PollMode::Adaptive, 1);
    let mut first = connect_and_select_export(&house);
    let come =
        NbdEvent::Connected { connection: 0, peer: format!("process {}", std::process::id()) };
    assert_eq!(wait_for_event(&house), come);
    let mut second = UnixStream::connect(&house.path).unwrap();
    second.set_read_timeout(Some(TIME_LIMIT)).unwrap();
    assert_eq!(second.read(&mut [0; 1]).unwrap(), 0);
    let text =
        "connect: 1 are connected, expected fewer (`--max-connections` allows more)".to_owned();
    assert_eq!(wait_for_event(&house), NbdEvent::Error(text));
    write_and_read(&mut first, &encode_request(Command::READ, 1, 0, 512), &mut [0; 512]);
}

#[test]
fn a_connection_is_listed_and_can_be_disconnected() {
    let house = start_server(PollMode::Adaptive, 4);
    let (mut one, mut other) =
        (connect_and_select_export(&house), connect_and_select_export(&house));
    write_and_read(&mut one, &encode_write(1, 512, &[7; 4096]), &mut []);
    write_and_read(&mut one, &encode_request(Command::READ, 2, 0, 1024), &mut [0; 1024]);
    write_and_read(&mut other, &encode_request(Command::READ, 3, 0, 512), &mut [0; 512]);
    let done = NbdStats {
        reads: 1,
        read_bytes: 1024,
        writes: 1,
        written_bytes: 4096,
        ..NbdStats::default()
    };
    // Counters are published at the end of the iteration that sent the replies.
    let sample = loop {
        let samples = house.exported_device.connections();
        assert_eq!(samples.iter().map(|sample| sample.id).collect::<Vec<_>>(), [0, 1]);
        if samples[0].done == done && samples[0].in_flight == 0 {
            break samples[0].clone();
        }
        tenmil_linux::named_thread::yield_cpu();
    };
    assert_eq!(sample.phase, ConnectionPhase::Transmission);
    assert!(sample.receives >= 3 && sample.sends >= 3, "{sample:?}");
    let statistics = house.exported_device.io_stats();
    let reads = statistics.operation_stats(Operation::Read);
    assert_eq!((reads.count, reads.bytes, reads.latency.count()), (2, 1536, 2));
    assert!(!house.exported_device.disconnect_client(7), "there is none");
    assert!(house.exported_device.disconnect_client(0));
    assert_eq!(one.read(&mut [0; 1]).unwrap(), 0);
    assert_eq!(wait_for_disconnect(&house), (DisconnectReason::Administrative, done));
    write_and_read(&mut other, &encode_request(Command::READ, 3, 0, 512), &mut [0; 512]);
}

#[test]
fn rate_limit_applies_as_soon_as_it_is_set() {
    let house = start_server(PollMode::Adaptive, 4);
    let mut stream = connect_and_select_export(&house);
    let clock = house.clock;
    let rate = |iops| RateLimit { iops: std::num::NonZeroU64::new(iops), bytes: None };
    let limits = QosLimits { total: rate(200), ..QosLimits::default() };
    house.exported_device.set_qos_limits(clock.now(), limits);
    assert_eq!(house.exported_device.qos_limits(), limits);
    let timed = |stream: &mut UnixStream| {
        let began = clock.now();
        for cookie in 0..30 {
            write_and_read(stream, &encode_request(Command::READ, cookie, 0, 512), &mut [0; 512]);
        }
        clock.now().since(began)
    };
    let limited = timed(&mut stream);
    // The limiter permits a burst.
    assert!(limited >= Span::from_ms(100), "{limited}");
    let stats = house.exported_device.io_stats();
    assert!(stats.limited > 0 && stats.limit_wait >= Span::from_ms(50), "{stats:?}");
    house.exported_device.set_qos_limits(clock.now(), QosLimits::default());
    let free = timed(&mut stream);
    assert!(free < limited, "{free}");
}

#[test]
fn disconnected_client_receives_outstanding_replies_first() {
    let house = start_server(PollMode::Adaptive, 4);
    let mut stream = connect_and_select_export(&house);
    let rate = RateLimit { iops: std::num::NonZeroU64::new(10), bytes: None };
    let limits = QosLimits { total: rate, ..QosLimits::default() };
    house.exported_device.set_qos_limits(house.clock.now(), limits);
    let reads = 35;
    for cookie in 0..reads {
        stream.write_all(&encode_request(Command::READ, cookie, 0, 512)).unwrap();
    }
    let begun = |sample: &crate::nbd::ConnectionSample| sample.in_flight + sample.done.reads;
    while begun(&house.exported_device.connections()[0]) < reads {
        tenmil_linux::named_thread::yield_cpu();
    }
    assert!(house.exported_device.disconnect_client(0));
    // Longer than the time limit for the last reply.
    for _ in 0..reads {
        stream.read_exact(&mut [0; 16 + 512]).unwrap();
    }
    assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
    let (reason, done) = wait_for_disconnect(&house);
    assert_eq!((reason, done.reads), (DisconnectReason::Administrative, reads));
}

#[test]
fn resize_is_visible_to_new_and_connected_clients() {
    let house = start_server(PollMode::Adaptive, 4);
    house.device.set_resized_block_count(4096);
    assert_eq!(wait_for_event(&house), NbdEvent::Resized { size_bytes: 4096 * 512 });
    let mut stream = connect_and_select_export(&house);
    let past = encode_request(Command::READ, 1, 4096 * 512, 512);
    stream.write_all(&past).unwrap();
    let mut header = [0; 16];
    stream.read_exact(&mut header).unwrap();
    assert_eq!(SimpleReply::parse(&header).unwrap().error, tenmil_wire::nbd::ErrorCode::EINVAL);
    house.device.set_resized_block_count(8192);
    while !matches!(wait_for_event(&house), NbdEvent::Resized { .. }) {}
    write_and_read(&mut stream, &past, &mut [0; 512]);
}

#[test]
fn client_resizes_an_exported_file() {
    let mut file = std::path::PathBuf::new();
    let house = start_server_with_device(PollMode::Adaptive, 4, true, |regions, directory| {
        file = directory.join("blocks");
        let options = FileDeviceOptions {
            path: file.clone(),
            size_bytes: Some(1 << 20),
            block_size: 4096,
            direct: true,
            read_only: false,
            engine: EngineChoice::Best,
        };
        Arc::new(FileDevice::open(regions, &options).unwrap())
    });
    let len = || std::fs::metadata(&file).unwrap().len();
    let (mut one, mut other) =
        (connect_and_select_export(&house), connect_and_select_export(&house));
    write_and_read(&mut one, &encode_request(Command::RESIZE, 1, 2 << 20, 0), &mut []);
    assert_eq!(len(), 2 << 20);
    write_and_read(&mut one, &encode_write(2, (2 << 20) - 4096, &[7; 4096]), &mut []);
    let mut back = [0; 4096];
    write_and_read(
        &mut other,
        &encode_request(Command::READ, 3, (2 << 20) - 4096, 4096),
        &mut back,
    );
    assert_eq!(back, [7; 4096]);
    write_and_read(&mut other, &encode_request(Command::RESIZE, 4, 4096, 0), &mut []);
    assert_eq!((len(), house.exported_device.export().size_bytes()), (4096, 4096));
    let mut sizes = Vec::new();
    while sizes.len() < 2 {
        if let NbdEvent::Resized { size_bytes } = wait_for_event(&house) {
            sizes.push(size_bytes);
        }
    }
    // The size is read when the event is received, so a later change may be visible already.
    assert!(sizes[0] == 2 << 20 || sizes[0] == 4096, "{sizes:?}");
    assert_eq!(sizes[1], 4096);
    one.write_all(&encode_request(Command::RESIZE, 5, 1 << 62, 0)).unwrap();
    let mut header = [0; 16];
    one.read_exact(&mut header).unwrap();
    assert_eq!(SimpleReply::parse(&header).unwrap().error, tenmil_wire::nbd::ErrorCode::ENOSPC);
    let trouble =
        std::iter::repeat_with(|| wait_for_event(&house)).find_map(|new_events| match new_events {
            NbdEvent::Error(text) => Some(text),
            _ => None,
        });
    assert!(trouble.unwrap().contains("resize "), "the reason is told here");
    assert!(
        house.exported_device.resize(4097).unwrap_err().to_string().contains("a multiple of 4096")
    );
}

#[test]
fn stopping_a_server_removes_its_socket_and_disconnects_clients() {
    let mut house = start_server(PollMode::Adaptive, 4);
    let mut stream = connect_and_select_export(&house);
    drop(house.server.take());
    assert!(!house.path.exists());
    write_and_read(&mut stream, &encode_request(Command::READ, 1, 0, 512), &mut [0; 512]);
    house.reactors.take().unwrap().stop();
    assert_eq!(stream.read(&mut [0; 1]).unwrap(), 0);
}
