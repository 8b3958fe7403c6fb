//! Hosts over TLS: which connections a port accepts, and many hosts that come back at once.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tenmil_base::{RecvResult, Span, Stream};
use tenmil_dma::RegionTable;
use tenmil_linux::{Clock, CpuList};
use tenmil_nvme_auth::{
    ConfiguredPsk, Derivation, Hash, IdentityVersion, KeyHash, SecretBytes, TlsPsk, tls_psk,
};
use tenmil_nvme_tcp::DataDirection;
use tenmil_reactor::{PollMode, ReactorOptions, Reactors};
use tenmil_tls::{ClientConfig, Psk, TlsSession, TlsStream};
use tenmil_wire::IoOpcode;

use super::server::{SocketHostFactory, connect_admin_queue, connect_write_and_read, start_server};
use super::test_target::{
    HOST, NQN, TestHostConnection, TestTarget, admin_config, read_or_write_command, service_limits,
};
use crate::tcp::{
    HostKeys, NamedKey, PlacementPolicy, Port, PortSecurity, Server, ServiceLimits,
    SubsystemSecurity, TargetEvent,
};

/// Target with TLS on reactors.
struct TlsTarget {
    rig: TestTarget,
    reactors: Option<Reactors>,
    server: Option<Server>,
    client: SocketHostFactory,
    clock: Clock,
}

fn configured_psk(hash: Hash, seed: u8) -> ConfiguredPsk {
    let secret = SecretBytes::new(vec![seed; hash.len_bytes()]);
    ConfiguredPsk::generate(KeyHash::Transform(hash), secret).unwrap()
}

fn psk(hash: Hash, seed: u8, version: IdentityVersion, derivation: Derivation) -> TlsPsk {
    tls_psk(&configured_psk(hash, seed), version, derivation, HOST, NQN).unwrap()
}

/// Stream of a client that has this key.
fn tls_stream(below: Box<dyn Stream>, psk: impl Into<Psk>) -> Box<dyn Stream> {
    let config = ClientConfig::with_psks([psk.into()]).unwrap();
    let session = TlsSession::client(&config).unwrap();
    Box::new(TlsStream::new(below, session, RegionTable::new(4)))
}

fn with_first_key(below: Box<dyn Stream>) -> Box<dyn Stream> {
    let (version, derivation) = (IdentityVersion::One, Derivation::Specification);
    tls_stream(below, psk(Hash::Sha256, 1, version, derivation))
}

fn with_second_key_of_old_libnvme(below: Box<dyn Stream>) -> Box<dyn Stream> {
    let (version, derivation) = (IdentityVersion::Zero, Derivation::LibnvmeBefore115);
    tls_stream(below, psk(Hash::Sha384, 2, version, derivation))
}

fn with_unknown_key(below: Box<dyn Stream>) -> Box<dyn Stream> {
    let (version, derivation) = (IdentityVersion::One, Derivation::Specification);
    tls_stream(below, psk(Hash::Sha256, 3, version, derivation))
}

impl TlsTarget {
    fn start(security: PortSecurity, limits: ServiceLimits) -> Self {
        let rig = TestTarget::with_options(limits, |config| {
            let psks = [(Hash::Sha256, 1), (Hash::Sha384, 2)]
                .map(|(hash, seed)| {
                    NamedKey::new(format!("tls-{seed}"), configured_psk(hash, seed))
                })
                .to_vec();
            let hosts =
                BTreeMap::from([(HOST.to_owned(), HostKeys { psks, ..HostKeys::default() })]);
            let security = SubsystemSecurity { hosts, ..SubsystemSecurity::default() };
            crate::tcp::SubsystemExportConfig { security, ..config }
        });
        rig.service.add_port(1, Port { security, ..Port::default() });
        let clock = Clock::start();
        let options = ReactorOptions { poll: PollMode::Adaptive, ..ReactorOptions::default() };
        let cores: CpuList = CpuList::allowed_cpus().iter().take(2).collect();
        let reactors = Reactors::start_on_cores(&cores, &options, &clock).unwrap();
        let (server, client) = start_server(&rig, &reactors, PlacementPolicy::default(), clock);
        Self { rig, reactors: Some(reactors), server: Some(server), client, clock }
    }

    /// Next notice that contains `text`.
    fn expect_notice(&self, text: &str) {
        let until = self.clock.now().after(Span::from_secs(20));
        let mut seen = Vec::new();
        while self.clock.now() < until {
            match self.rig.service.next_event() {
                Some(event) if event.to_string().contains(text) => return,
                Some(event) => seen.push(event.to_string()),
                None => tenmil_linux::named_thread::sleep(Span::from_ms(1)),
            }
        }
        panic!("no event contains `{text}`, but {seen:#?}");
    }

    /// Receives until the connection ends, and returns how.
    fn receive_until_end(&self, host: &mut TestHostConnection) -> RecvResult {
        let until = self.clock.now().after(Span::from_secs(20));
        loop {
            match host.pipe.as_mut().unwrap().receive() {
                RecvResult::WouldBlock => {}
                end => return end,
            }
            assert!(self.clock.now() < until, "it stays connected");
        }
    }
}

impl Drop for TlsTarget {
    fn drop(&mut self) {
        drop(self.server.take());
        if let Some(reactors) = self.reactors.take() {
            reactors.stop();
        }
    }
}

#[test]
fn hosts_write_and_read_over_tls_with_each_key_and_derivation() {
    for wrap in [with_first_key, with_second_key_of_old_libnvme] {
        let mut target = TlsTarget::start(PortSecurity::TlsRequired, service_limits());
        target.client.wrap = wrap;
        connect_write_and_read(&target.client);
        drop(target.server.take());
        target.reactors.take().unwrap().stop();
        let service = &target.rig.service;
        assert_eq!(service.connection_count(), 0);
        assert_eq!(service.buffer_pool().free_bytes(), service.buffer_pool().size_bytes());
    }
}

#[test]
fn plaintext_hosts_are_served_only_where_tls_is_not_required() {
    let mut target = TlsTarget::start(PortSecurity::TlsAllowed, service_limits());
    connect_write_and_read(&target.client);
    target.client.wrap = with_first_key;
    connect_write_and_read(&target.client);
    drop(target);

    let target = TlsTarget::start(PortSecurity::TlsRequired, service_limits());
    let mut host = target.client.start_connecting(admin_config());
    host.poll_once(target.clock.now());
    assert!(!host.sent.is_empty(), "an ICReq in plaintext");
    let end = target.receive_until_end(&mut host);
    assert_eq!(end, RecvResult::Eof, "nothing is answered in the clear");
    target.expect_notice("the peer began in plaintext, expected TLS");
}

#[test]
fn unknown_key_is_refused_with_its_identity() {
    let mut target = TlsTarget::start(PortSecurity::TlsAllowed, service_limits());
    target.client.wrap = with_unknown_key;
    let mut host = target.client.start_connecting(admin_config());
    let end = target.receive_until_end(&mut host);
    let RecvResult::Failed(error) = end else { panic!("{end:?}") };
    assert!(error.to_string().contains("unknown_psk_identity"), "{error}");
    target.expect_notice(&format!("no key for identity \"NVMe1R01 {HOST} {NQN} "));
}

/// Number of hosts that come back at once after the target has restarted.
const HOSTS: usize = 500;

/// All of them are served soon, and an established host goes on meanwhile. The aim is five seconds; two
/// processors that ten other programs use need three.
#[test]
fn many_hosts_that_come_back_at_once_are_served_and_established_ones_go_on() {
    tenmil_linux::fd_table::reserve_fds();
    let limits = ServiceLimits {
        memory_bytes: 64 << 20,
        connections_max: 4 * HOSTS + 100,
        ..service_limits()
    };
    let mut target = TlsTarget::start(PortSecurity::TlsRequired, limits);
    target.client.wrap = with_first_key;
    let (_admin, mut established) = connect_admin_queue(&target.client);
    let is_done = Arc::new(AtomicBool::new(false));
    let clock = target.clock;
    std::thread::scope(|scope| {
        let (client, stop) = (&target.client, Arc::clone(&is_done));
        let io = scope.spawn(move || {
            let read = read_or_write_command(IoOpcode::Read.code(), 0, 8);
            let (mut count, mut longest) = (0_u32, Span::default());
            while !stop.load(Ordering::Relaxed) {
                let start = clock.now();
                let direction = DataDirection::ToHost(4096);
                let (completion, _) =
                    client.execute_command(&mut established, &read, direction, &[]);
                assert!(completion.status().is_success(), "{completion:?}");
                longest = longest.max(clock.now().since(start));
                count += 1;
            }
            (count, longest)
        });
        let start = clock.now();
        let mut hosts: Vec<TestHostConnection> =
            (0..HOSTS).map(|_| target.client.start_connecting(admin_config())).collect();
        let connected = clock.now().since(start);
        while hosts.iter().any(|host| host.terms.is_none()) {
            for host in hosts.iter_mut().filter(|host| host.terms.is_none()) {
                host.poll_once(clock.now());
            }
            assert!(clock.now().since(start) < Span::from_secs(20), "they are not served");
        }
        let took = clock.now().since(start);
        is_done.store(true, Ordering::Relaxed);
        let (count, longest) = io.join().unwrap();
        println!(
            "{HOSTS} hosts: connected after {connected}, served after {took}; meanwhile {count} \
             reads of an established host, the longest took {longest}"
        );
        assert!(took < Span::from_secs(15), "{took}");
        assert!(count > 0 && longest < Span::from_secs(3), "{longest}");
    });
    let refused = std::iter::from_fn(|| target.rig.service.next_event())
        .filter(|event| matches!(event, TargetEvent::Rejected { .. } | TargetEvent::Notice(_)))
        .count();
    assert_eq!(refused, 0);
}
