//! What a target says unasked, and that a host is told of it: our own of both, over real sockets, so that
//! neither can be right about the other alone.

#![expect(clippy::unwrap_used, reason = "a test may")]

mod net;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use tenmil_base::Instant;
use tenmil_dma::RegionTable;
use tenmil_drivers::NullDevice;
use tenmil_linux::socket::{SocketOptions, SocketStreamFactory};
use tenmil_nvme_controller::controller::{AnaState, NamespaceConfig, Subsystem, SubsystemConfig};
use tenmil_nvme_fabrics::{ConnectingController, FabricsController, Options};
use tenmil_nvme_host::{ControllerOptions, Event};
use tenmil_serve::tcp::{
    AllowedHosts, ControllerModel, Port, Service, ServiceLimits, SubsystemExportConfig,
    SubsystemSecurity, TargetConnection,
};
use tenmil_wire::log::event::{AsyncEvent as Notice, NoticeEvent};

use net::LoopbackNet;

const NQN: &str = "nqn.2024-01.example:disk";
const HOST: &str = "nqn.2024-01.example:host";
/// Turns within which whatever is told has been told.
const ITERATIONS: u32 = 2_000;

fn namespace_config() -> NamespaceConfig {
    NamespaceConfig::new(Arc::new(NullDevice::new(512, 1 << 20).unwrap()))
}

fn export_config(nqn: &str) -> SubsystemExportConfig {
    let config = SubsystemConfig {
        nqn: nqn.to_owned(),
        ana_groups: 2,
        ..SubsystemConfig::new("1", vec![namespace_config()])
    };
    SubsystemExportConfig {
        subsystem: Subsystem::new(config).unwrap(),
        nqn: nqn.to_owned(),
        hosts: AllowedHosts::Any,
        ports: BTreeMap::from([(1, Vec::new())]),
        model: ControllerModel::Dynamic,
        masks: BTreeMap::new(),
        security: SubsystemSecurity::default(),
    }
}

/// A connected host, and its target.
struct HostAndTarget {
    remote: FabricsController,
    service: Service,
    connections: Arc<Mutex<Vec<TargetConnection>>>,
    now: Instant,
    events: Vec<Event>,
}

impl HostAndTarget {
    /// A host of subsystem `name`, at a target with one that has a namespace.
    fn connected_to(name: &str) -> Self {
        let regions = RegionTable::new(16);
        let limits = ServiceLimits { memory_bytes: 32 << 20, ..ServiceLimits::default() };
        let service = Service::new(&regions, limits).unwrap();
        service.add_port(
            1,
            Port { address: Some("127.0.0.1:4420".parse().unwrap()), ..Port::default() },
        );
        service.add_subsystem(export_config(NQN)).unwrap();
        let [ours, theirs] =
            [(); 2].map(|()| SocketStreamFactory::new(regions.clone(), SocketOptions::default()));
        let connections: Arc<Mutex<Vec<TargetConnection>>> = Arc::default();
        let net = LoopbackNet::new([ours, theirs], service.clone(), &connections);
        let mut now = Instant { ns: 1_000_000 };
        let options = Options::new(name, HOST, [1; 16]);
        let controller_options =
            ControllerOptions { queue_pairs: 1, ..ControllerOptions::default() };
        let pool = net::host_pool(&regions);
        let mut connecting =
            ConnectingController::begin(pool, Box::new(net), options, controller_options, now)
                .unwrap();
        let mut remote = loop {
            if let Some(ended) = connecting.poll(net::step_connections(&connections, &mut now)) {
                break ended.unwrap();
            }
        };
        while remote.poll(net::step_connections(&connections, &mut now)) != Some(Event::Ready) {}
        let mut pair = Self { remote, service, connections, now, events: Vec::new() };
        // Its requests for events are on their way.
        (0..ITERATIONS / 10).for_each(|_| pair.step());
        pair
    }

    fn step(&mut self) {
        self.events
            .extend(self.remote.poll(net::step_connections(&self.connections, &mut self.now)));
    }

    #[track_caller]
    fn await_event(&mut self, is_it: impl Fn(&Event) -> bool) {
        let has_come = (0..ITERATIONS).any(|_| {
            self.step();
            self.events.iter().any(&is_it)
        });
        assert!(has_come, "only {:?}", self.events);
        let refused = |event: &Event| {
            matches!(event, Event::EventConfigurationRefused { .. } | Event::EventsRefused { .. })
        };
        assert!(!self.events.iter().any(refused), "{:?}", self.events);
        self.events.clear();
    }
}

#[test]
fn host_receives_event_for_attached_namespace() {
    let mut pair = HostAndTarget::connected_to(NQN);
    for id in 2..=4 {
        assert_eq!(pair.service.add_namespace(NQN, namespace_config()), Ok(id));
        pair.await_event(|event| *event == Event::NamespaceAttached { id });
    }
}

#[test]
fn host_receives_event_for_changed_ana_state() {
    let mut pair = HostAndTarget::connected_to(NQN);
    for state in [AnaState::NonOptimized, AnaState::Inaccessible, AnaState::Optimized] {
        let change = tenmil_serve::tcp::SubsystemExportUpdate {
            hosts: AllowedHosts::Any,
            ports: BTreeMap::from([(1, vec![(1, state)])]),
            masks: BTreeMap::new(),
            security: SubsystemSecurity::default(),
        };
        assert!(pair.service.update_export(NQN, change));
        pair.await_event(|event| *event == Event::AccessChanged);
    }
}

#[test]
fn discovery_host_receives_event_for_added_and_removed_subsystems() {
    let mut pair = HostAndTarget::connected_to(tenmil_wire::nqn::DISCOVERY);
    let other = "nqn.2024-01.example:other";
    let is_told = |event: &Event| {
        let what = Notice::Notice(NoticeEvent::Discovery);
        *event == Event::Notice { what, log_page: 0x70 }
    };
    pair.service.add_subsystem(export_config(other)).unwrap();
    pair.await_event(is_told);
    assert!(pair.service.remove_subsystem(other));
    pair.await_event(is_told);
}
