//! `tcp:` devices with TLS and authentication, against the target of this project, and against a relay on
//! the path that alters what passes.

#![expect(clippy::unwrap_used, reason = "a test may")]

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex};

use tenmil_base::{
    CompletionBatch, Error, IoStatus, Memory, Operation, RecvResult, Request, RequestFlags,
    Segment, SendSlice, Span, Stream,
};
use tenmil_block::{OpenedDevice, Opener};
use tenmil_devices::tcp::set_key_source;
use tenmil_dma::RegionTable;
use tenmil_drivers::RamDevice;
use tenmil_linux::named_thread::sleep;
use tenmil_linux::socket::{ListenAddress, SocketOptions, SocketStreamFactory, StreamListener};
use tenmil_linux::{Clock, NamedThread, StopFlag};
use tenmil_nvme_auth::{ChapSecret, ConfiguredPsk, Hash, KeyHash, KeySource, KeyText, SecretBytes};
use tenmil_nvme_controller::controller::{NamespaceConfig, Subsystem, SubsystemConfig};
use tenmil_serve::tcp::{
    AllowedHosts, ControllerModel, HostKeys, NamedKey, Port, PortSecurity, Service, ServiceLimits,
    SubsystemExportConfig, SubsystemSecurity, TargetConnection,
};
use tenmil_tls::{Psk, PskSource, ServerConfig, TlsSession, TlsStream};

const NQN: &str = "nqn.2024-01.example:disk";
const HOST: &str = "nqn.2024-01.example:host";

/// Keys by name, the same at both ends: `psk-N`, `chap-N`.
struct NumberedKeys;

impl KeySource for NumberedKeys {
    fn find_key(&self, name: &str) -> Result<KeyText, Error> {
        let (kind, number) = name.split_once('-').unwrap();
        let number = number.parse().unwrap();
        Ok(KeyText::new(match kind {
            "psk" => psk(number).to_text().to_string(),
            _ => chap(number).to_text().to_string(),
        }))
    }
}

static KEYS: LazyLock<()> = LazyLock::new(|| set_key_source(Arc::new(NumberedKeys)));

fn psk(number: u8) -> ConfiguredPsk {
    // Odd numbers are keys of SHA-256, even ones of SHA-384.
    let hash = if number % 2 == 1 { Hash::Sha256 } else { Hash::Sha384 };
    let random = SecretBytes::new(vec![number; hash.len_bytes()]);
    ConfiguredPsk::generate(KeyHash::Transform(hash), random).unwrap()
}

fn chap(number: u8) -> ChapSecret {
    ChapSecret::generate(KeyHash::None, SecretBytes::new(vec![number; 32])).unwrap()
}

/// What the target knows: PSKs 1 and 2, the secret 1 of the host, and 2 of the controller.
fn known_host(has_psks: bool, has_chap: bool) -> SubsystemSecurity {
    let keys = HostKeys {
        chap_secrets: if has_chap { vec![NamedKey::new("chap-1", chap(1))] } else { Vec::new() },
        controller_secret: has_chap.then(|| NamedKey::new("chap-2", chap(2))),
        psks: match has_psks {
            true => vec![NamedKey::new("psk-1", psk(1)), NamedKey::new("psk-2", psk(2))],
            false => Vec::new(),
        },
        ..HostKeys::default()
    };
    let hosts = BTreeMap::from([(HOST.to_owned(), keys)]);
    SubsystemSecurity { hosts, ..SubsystemSecurity::default() }
}

/// A target on a port of this machine, on a thread of its own.
struct TestTarget {
    address: SocketAddr,
    service: Service,
    /// What the first byte of each connection was.
    first_bytes: Arc<Mutex<Vec<u8>>>,
    _thread: NamedThread<()>,
}

struct ServicePsks {
    service: Service,
    clock: Clock,
}

impl PskSource for ServicePsks {
    fn find_psks(&self, identity: &[u8]) -> Vec<Psk> {
        let identity = std::str::from_utf8(identity).unwrap_or("");
        let psks = self.service.tls_psks_of_identity(self.clock.now(), identity);
        psks.into_iter().map(Psk::from).collect()
    }
}

impl TestTarget {
    fn start(security: SubsystemSecurity, port: PortSecurity) -> Self {
        let regions = RegionTable::new(16);
        let service = Service::new(&regions, ServiceLimits::default()).unwrap();
        let disk = Arc::new(RamDevice::new(&regions, 512, 8192).unwrap());
        let config = SubsystemConfig {
            nqn: NQN.to_owned(),
            ..SubsystemConfig::new("1", vec![NamespaceConfig::new(disk)])
        };
        service.add_port(1, Port { security: port, ..Port::default() });
        let export = SubsystemExportConfig {
            subsystem: Subsystem::new(config).unwrap(),
            nqn: NQN.to_owned(),
            hosts: AllowedHosts::Any,
            ports: BTreeMap::from([(1, Vec::new())]),
            model: ControllerModel::Dynamic,
            masks: BTreeMap::new(),
            security,
        };
        service.add_subsystem(export).unwrap();
        let (listener, address) = listener();
        let first_bytes = Arc::<Mutex<Vec<u8>>>::default();
        let (theirs, seen) = (service.clone(), Arc::clone(&first_bytes));
        let body = move |stop: &StopFlag| serve(stop, &listener, &theirs, &regions, port, &seen);
        let thread = NamedThread::spawn("target", None, body).unwrap();
        Self { address, service, first_bytes, _thread: thread }
    }

    /// Waits until no connection is left.
    fn await_no_connections(&self) {
        for _ in 0..10_000 {
            if self.service.connection_count() == 0 && self.service.association_count() == 0 {
                return;
            }
            sleep(Span::from_ms(1));
        }
        panic!("{} connections are left", self.service.connection_count());
    }
}

fn listener() -> (StreamListener, SocketAddr) {
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let listener = StreamListener::open(&ListenAddress::Tcp(any)).unwrap();
    let ListenAddress::Tcp(address) = *listener.address() else { unreachable!() };
    (listener, address)
}

/// Loop of the target. The first byte of a connection decides whether it is TLS.
fn serve(
    stop: &StopFlag,
    listener: &StreamListener,
    service: &Service,
    regions: &RegionTable,
    port: PortSecurity,
    first_bytes: &Mutex<Vec<u8>>,
) {
    let clock = Clock::on_kernel_clock();
    let sockets = SocketStreamFactory::new(regions.clone(), SocketOptions::default());
    let psks = ServicePsks { service: service.clone(), clock };
    let config = ServerConfig::with_psks(Arc::new(psks)).unwrap();
    let mut new: Vec<Box<dyn Stream>> = Vec::new();
    let mut handshakes: Vec<Box<TlsStream>> = Vec::new();
    let mut connections: Vec<TargetConnection> = Vec::new();
    while !stop.is_stopped() {
        let now = clock.now();
        while let Some(socket) = listener.accept().unwrap() {
            new.push(sockets.with_own_counters().new_stream(socket).unwrap());
        }
        for mut stream in std::mem::take(&mut new) {
            let received = stream.receive();
            match stream.buffered().first() {
                Some(0x16) if port.accepts_tls() => {
                    first_bytes.lock().unwrap().push(0x16);
                    let session = TlsSession::server(&config).unwrap();
                    handshakes.push(Box::new(TlsStream::new(stream, session, regions.clone())));
                }
                Some(first) if port.accepts_plaintext() => {
                    first_bytes.lock().unwrap().push(*first);
                    connections.extend(service.accept_stream(stream, 1, now));
                }
                Some(first) => first_bytes.lock().unwrap().push(*first),
                None if received == RecvResult::WouldBlock => new.push(stream),
                None => {}
            }
        }
        for mut stream in std::mem::take(&mut handshakes) {
            match stream.poll_handshake() {
                Ok(true) => connections.extend(service.accept_stream(stream, 1, now)),
                Ok(false) => handshakes.push(stream),
                // The client gets an alert.
                Err(_) => _ = stream.receive(),
            }
        }
        for connection in &mut connections {
            connection.poll_once(now);
        }
        connections.retain(|connection| !connection.is_closed());
        while service.next_event().is_some() {}
        sleep(Span::from_us(50));
    }
}

/// What a relay does with the bytes for the host.
type Alteration = fn(&mut Vec<u8>);

/// Relays connections to a target.
struct Relay {
    address: SocketAddr,
    /// All connections are to be cut.
    cuts: Arc<AtomicBool>,
    _thread: NamedThread<()>,
}

impl Relay {
    fn start(target: SocketAddr, alter: Alteration) -> Self {
        let (listener, address) = listener();
        let cuts = Arc::<AtomicBool>::default();
        let theirs = Arc::clone(&cuts);
        let body = move |stop: &StopFlag| relay(stop, &listener, target, alter, &theirs);
        Self { address, cuts, _thread: NamedThread::spawn("relay", None, body).unwrap() }
    }
}

fn relay(
    stop: &StopFlag,
    listener: &StreamListener,
    target: SocketAddr,
    alter: Alteration,
    cuts: &AtomicBool,
) {
    let sockets = SocketStreamFactory::new(RegionTable::new(1), SocketOptions::default());
    let mut pairs: Vec<[Box<dyn Stream>; 2]> = Vec::new();
    while !stop.is_stopped() {
        while let Some(socket) = listener.accept().unwrap() {
            let ours = sockets.with_own_counters().new_stream(socket).unwrap();
            let theirs = sockets.with_own_counters().new_stream(connect(target)).unwrap();
            pairs.push([ours, theirs]);
        }
        if cuts.swap(false, Ordering::AcqRel) {
            pairs.clear();
        }
        pairs.retain_mut(|[host, target]| {
            pass_on(host, target, |_| {}) && pass_on(target, host, alter)
        });
        sleep(Span::from_us(50));
    }
}

#[expect(clippy::disallowed_methods, reason = "a relay has sockets")]
fn connect(target: SocketAddr) -> OwnedFd {
    let socket = std::net::TcpStream::connect(target).unwrap();
    socket.set_nonblocking(true).unwrap();
    socket.into()
}

/// Moves bytes from one stream to another. False at the end.
fn pass_on(
    from: &mut Box<dyn Stream>,
    to: &mut Box<dyn Stream>,
    alter: impl Fn(&mut Vec<u8>),
) -> bool {
    let received = from.receive();
    let mut bytes = from.buffered().to_vec();
    if bytes.is_empty() {
        return received == RecvResult::WouldBlock;
    }
    from.consume(bytes.len());
    alter(&mut bytes);
    let mut sent = 0;
    while sent < bytes.len() {
        let len_bytes = u32::try_from(bytes.len() - sent).unwrap();
        let slices = [SendSlice::Headers { at: 0, len_bytes }];
        match to.send(&bytes[sent..], &slices, false) {
            Ok(count) => sent += count,
            Err(_) => return false,
        }
    }
    true
}

/// A host of the device at `address` with these options.
struct TestHost {
    regions: RegionTable,
    buffer: Segment,
}

impl TestHost {
    fn new() -> Self {
        LazyLock::force(&KEYS);
        let regions = RegionTable::new(64);
        let buffer = regions.allocate_region(1 << 20).unwrap();
        let segment = buffer.segment();
        // Until the process ends.
        std::mem::forget(buffer);
        Self { regions, buffer: segment }
    }

    fn open(&self, address: SocketAddr, options: &str) -> Result<OpenedDevice, Error> {
        let text = format!(
            "tcp://{address}/{NQN}/1?hostnqn={HOST}&queues=2&reconnect-delay=100ms&{options}"
        );
        let opener = Opener {
            regions: &self.regions,
            clock: Clock::on_kernel_clock(),
            seed: 1,
            kinds: tenmil_devices::KINDS,
        };
        opener.open(&text.parse().unwrap())
    }

    /// Writes and reads back 64 KiB.
    fn write_and_verify(&self, device: &OpenedDevice, seed: u8) {
        let mut channel = device.medium.channel().unwrap();
        let clock = Clock::on_kernel_clock();
        let bytes: Vec<u8> = (0..64u32 << 10).map(|at| at.to_le_bytes()[0] ^ seed).collect();
        let segment = self.buffer.slice(0, 64 << 10).unwrap();
        for operation in [Operation::Write, Operation::Read] {
            match operation {
                Operation::Write => self.regions.store(segment, &bytes).unwrap(),
                _ => self.regions.fill(segment, 0).unwrap(),
            }
            let request = Request {
                token: 7,
                lba: 16,
                operand: 0,
                segment_first: 0,
                blocks: 128,
                segment_count: 1,
                metadata_count: 0,
                operation,
                flags: RequestFlags::NONE,
            };
            let mut completions = CompletionBatch::with_capacity(4);
            let mut is_taken = false;
            while completions.as_slice().is_empty() {
                let now = clock.now();
                if !is_taken {
                    is_taken = channel.submit(now, &[request], &[segment]) == 1;
                }
                channel.flush_submissions();
                channel.poll(now, &mut completions);
                sleep(Span::from_us(50));
            }
            assert_eq!(completions.as_slice()[0].status, IoStatus::SUCCESS, "{operation:?}");
        }
        let mut found = vec![0; bytes.len()];
        self.regions.load(segment, &mut found).unwrap();
        assert!(found == bytes);
    }
}

#[test]
fn device_is_read_and_written_over_tls_with_each_key() {
    let target = TestTarget::start(known_host(true, false), PortSecurity::TlsRequired);
    let host = TestHost::new();
    for (options, suite) in [
        ("key=psk-1", "TLS_AES_128_GCM_SHA256"),
        ("key=psk-2", "TLS_AES_256_GCM_SHA384"),
        ("key=psk-1&tls-identity=0", "TLS_AES_128_GCM_SHA256"),
        ("key=psk-1&derivation=libnvme-1.13", "TLS_AES_128_GCM_SHA256"),
        ("key=psk-2&derivation=libnvme-1.13&tls-identity=0", "TLS_AES_256_GCM_SHA384"),
        // The first key is unknown to the target, which finds the second one.
        ("key=psk-3,psk-1", "TLS_AES_128_GCM_SHA256"),
    ] {
        let device = host.open(target.address, options).unwrap();
        assert!(device.description.ends_with(&format!(", with TLS ({suite})")), "{options}");
        host.write_and_verify(&device, 1);
        drop(device);
        target.await_no_connections();
    }
    let first_bytes = target.first_bytes.lock().unwrap();
    assert!(first_bytes.iter().all(|first| *first == 0x16), "{first_bytes:?}");
}

#[test]
fn wrong_key_and_missing_tls_end_the_connect_with_a_reason() {
    let host = TestHost::new();
    let with_tls = TestTarget::start(known_host(true, false), PortSecurity::TlsRequired);
    let plain = TestTarget::start(known_host(true, false), PortSecurity::Plaintext);
    for (target, options, expected) in [
        (&with_tls, "key=psk-3", "TLS handshake: the server "),
        (&plain, "key=psk-1", "TLS handshake: "),
        // A host without TLS at a port that requires it.
        (&with_tls, "tls=off", ""),
    ] {
        let error = host.open(target.address, options).err().unwrap();
        assert!(error.text.contains(expected), "{options}: {error}");
        target.await_no_connections();
    }
    let first_bytes = plain.first_bytes.lock().unwrap();
    assert!(first_bytes.iter().all(|first| *first == 0x16), "nothing was sent in plaintext");
}

#[test]
fn host_and_controller_authenticate_in_plaintext_and_over_tls() {
    let host = TestHost::new();
    let target = TestTarget::start(known_host(true, true), PortSecurity::TlsAllowed);
    for (options, description) in [
        ("dhchap=chap-1", ", with DH-HMAC-CHAP"),
        ("dhchap=chap-1&dhchap-controller=chap-2", ", with DH-HMAC-CHAP"),
        ("dhchap=chap-1&dhchap-controller=chap-9,chap-2", ", with DH-HMAC-CHAP"),
        (
            "key=psk-1&dhchap=chap-1&dhchap-controller=chap-2",
            ", with TLS (TLS_AES_128_GCM_SHA256) and DH-HMAC-CHAP",
        ),
    ] {
        let device = host.open(target.address, options).unwrap();
        assert!(device.description.ends_with(description), "{}", device.description);
        host.write_and_verify(&device, 2);
        drop(device);
        target.await_no_connections();
    }
    for (options, expected) in [
        ("dhchap=chap-9", "authentication failed"),
        ("dhchap=chap-1&dhchap-controller=chap-9", "does not match its secret"),
        ("hdgst=yes", "has no secret"),
    ] {
        let error = host.open(target.address, options).err().unwrap();
        assert!(error.text.contains(expected), "{options}: {error}");
        target.await_no_connections();
    }
}

#[test]
fn authentication_generates_the_key_of_all_connections() {
    let host = TestHost::new();
    let target = TestTarget::start(known_host(false, true), PortSecurity::TlsAllowed);
    for options in ["", "&dhchap-controller=chap-2"] {
        target.first_bytes.lock().unwrap().clear();
        let options = format!("tls=concatenate&dhchap=chap-1{options}");
        let device = host.open(target.address, &options).unwrap();
        let description = &device.description;
        assert!(description.contains(", with TLS (TLS_AES_"), "{description}");
        host.write_and_verify(&device, 3);
        let first_bytes = target.first_bytes.lock().unwrap().clone();
        assert_eq!(first_bytes[0], 0, "ICReq");
        assert!(first_bytes[1..].iter().all(|first| *first == 0x16), "{first_bytes:?}");
        drop(device);
        target.await_no_connections();
    }
}

/// A proxy clears the bits of the response to Connect by which the target requests
/// authentication.
#[test]
fn authentication_cannot_be_removed_by_a_proxy() {
    let host = TestHost::new();
    let target = TestTarget::start(known_host(false, true), PortSecurity::TlsAllowed);
    let clear_requirements: Alteration = |bytes| {
        // CapsuleResp: type 5, 24 bytes; DW0 of the completion follows the header of 8 bytes.
        if bytes.len() == 24 && bytes[..3] == [5, 0, 24] {
            bytes[10] &= !0b110;
        }
    };
    let relay = Relay::start(target.address, clear_requirements);
    for (options, expected) in [
        ("dhchap=chap-1&dhchap-controller=chap-2", "does not request authentication"),
        ("tls=concatenate&dhchap=chap-1", "expected it to agree on a TLS key"),
        // The target notices.
        ("dhchap=chap-1", "a property command was refused"),
        ("hdgst=no", "a property command was refused"),
    ] {
        let error = host.open(relay.address, options).err().unwrap();
        assert!(error.text.contains(expected), "{options}: {error}");
        target.await_no_connections();
    }
    // Without the alteration, the relay is harmless.
    let honest = Relay::start(target.address, |_| {});
    let device = host.open(honest.address, "dhchap=chap-1&dhchap-controller=chap-2").unwrap();
    host.write_and_verify(&device, 4);
}

#[test]
fn device_is_secured_again_after_each_loss() {
    let host = TestHost::new();
    let target = TestTarget::start(known_host(true, true), PortSecurity::TlsAllowed);
    for (options, plaintext) in [
        ("key=psk-1", 0),
        ("dhchap=chap-1&dhchap-controller=chap-2", 3),
        // The admin connection over which the key is generated.
        ("tls=concatenate&dhchap=chap-1&dhchap-controller=chap-2", 1),
    ] {
        let relay = Relay::start(target.address, |_| {});
        let device = host.open(relay.address, options);
        let Ok(device) = device else {
            let error = device.err().unwrap();
            // A host with a secret has to use it.
            assert!(options == "key=psk-1" && error.text.contains("has no secret"), "{error}");
            continue;
        };
        for round in 0..3 {
            host.write_and_verify(&device, round);
            target.first_bytes.lock().unwrap().clear();
            relay.cuts.store(true, Ordering::Release);
            sleep(Span::from_ms(300));
        }
        host.write_and_verify(&device, 9);
        let first_bytes = target.first_bytes.lock().unwrap().clone();
        let found = first_bytes.iter().filter(|first| **first != 0x16).count();
        assert!(found <= plaintext && found < 4, "{options}: {first_bytes:?}");
        drop(device);
        target.await_no_connections();
    }
}

#[test]
fn altered_records_end_the_connect_and_nothing_follows_in_plaintext() {
    let host = TestHost::new();
    let target = TestTarget::start(known_host(true, false), PortSecurity::TlsAllowed);
    let relay = Relay::start(target.address, |bytes| {
        // An application record, of a size that a small response has.
        if bytes.len() > 40 && bytes.len() < 60 && bytes[..3] == [0x17, 3, 3] {
            let last = bytes.len() - 1;
            bytes[last] ^= 1;
        }
    });
    let error = host.open(relay.address, "key=psk-1").err().unwrap();
    assert!(error.text.contains("TLS: a record is not authentic"), "{error}");
    target.await_no_connections();
    let first_bytes = target.first_bytes.lock().unwrap();
    assert!(first_bytes.iter().all(|first| *first == 0x16), "{first_bytes:?}");
}
