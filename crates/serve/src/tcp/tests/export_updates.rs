//! Changes of an export while hosts use it: the affected hosts get events, the others notice
//! nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tenmil_base::BlockDevice;
use tenmil_drivers::RamDevice;
use tenmil_nvme_controller::controller::{AnaState, NamespaceConfig, Subsystem, SubsystemConfig};
use tenmil_nvme_controller::transport::fabrics::FabricsTransport;
use tenmil_nvme_tcp::DataDirection;
use tenmil_wire::fabrics::{CNTLID_DYNAMIC, ConnectData};
use tenmil_wire::layout::Ascii;
use tenmil_wire::register::offset;
use tenmil_wire::{AdminOpcode, Command, IoOpcode, Status};

use super::test_target::{
    ENABLED, NQN, TestTarget, admin_config, admin_connect, read_or_write_command, service_limits,
};
use crate::tcp::association::{AdminQueueProof, Association, HostIds};
use crate::tcp::subsystem_export::RequestedCntlid;
use crate::tcp::{AllowedHosts, SubsystemExportConfig, SubsystemExportUpdate, SubsystemSecurity};

const ONE: &str = "nqn.2026-01.org.tenmil:one";
const TWO: &str = "nqn.2026-01.org.tenmil:two";

fn connect_data_of_host(host: &str) -> ConnectData {
    ConnectData::zeroed().with(|data| {
        let id = host.as_bytes()[host.len() - 1];
        data.hostid([id; 16])
            .cntlid(CNTLID_DYNAMIC)
            .subnqn(Ascii::nul_padded(NQN))
            .hostnqn(Ascii::nul_padded(host))
    })
}

/// Connects a host with events for namespace attributes and ANA changes enabled; returns its
/// connection and the tag of the Asynchronous Event Request.
fn connect_admin(rig: &mut TestTarget, host: &str) -> (usize, u16) {
    let line = rig.open_connection(admin_config());
    let completion = rig.execute_connect(line, &admin_connect(), &connect_data_of_host(host));
    assert_eq!(completion.status(), Status::SUCCESS);
    rig.set_property(line, offset::CC, ENABLED);
    let events = Command::new(AdminOpcode::SetFeatures.code()).with_cdw10(0x0b);
    rig.execute_command(line, &events.with_cdw11(1 << 8 | 1 << 11), DataDirection::None, &[]);
    (line, submit_event_request(rig, line))
}

fn submit_event_request(rig: &mut TestTarget, line: usize) -> u16 {
    let request = Command::new(AdminOpcode::AsynchronousEventRequest.code());
    let tag = rig.lines[line].submit(&request, DataDirection::None, &[]);
    rig.run_until_idle();
    tag
}

/// Takes the event that the host received, if any, reads the log page that it names, and sends the
/// next Asynchronous Event Request.
fn take_received_event(rig: &mut TestTarget, (line, tag): (usize, u16)) -> Option<(u32, u16)> {
    let (completion, _) = rig.lines[line].done.remove(&tag)?;
    let page = completion.dw0() >> 16;
    let get = Command::new(AdminOpcode::GetLogPage.code()).with_cdw10(1023 << 16 | page);
    rig.execute_command(line, &get.with_nsid(u32::MAX), DataDirection::ToHost(4096), &[]);
    Some((page, submit_event_request(rig, line)))
}

/// Active namespaces of a host.
fn visible_namespaces(rig: &mut TestTarget, line: usize) -> Vec<u32> {
    let identify = Command::new(AdminOpcode::Identify.code()).with_cdw10(2);
    let (completion, bytes) =
        rig.execute_command(line, &identify, DataDirection::ToHost(4096), &[]);
    assert_eq!(completion.status(), Status::SUCCESS);
    let all = bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap()));
    all.take_while(|nsid| *nsid != 0).collect()
}

fn namespace_config(rig: &TestTarget, nsid: u32) -> NamespaceConfig {
    let medium = Arc::new(RamDevice::new(&rig.regions, 512, 64).unwrap());
    NamespaceConfig { nsid: Some(nsid), ..NamespaceConfig::new(medium) }
}

/// Service with a subsystem with ANA groups, exported at two ports.
fn test_target() -> TestTarget {
    target_with_subsystem(subsystem_config())
}

fn subsystem_config() -> Subsystem {
    let config = SubsystemConfig {
        nqn: NQN.to_owned(),
        ana_groups: 2,
        ..SubsystemConfig::new("S", Vec::new())
    };
    Subsystem::new(config).unwrap()
}

fn target_with_subsystem(subsystem: Subsystem) -> TestTarget {
    TestTarget::with_options(service_limits(), |config| {
        let ports = BTreeMap::from([(1, Vec::new()), (2, Vec::new())]);
        SubsystemExportConfig { subsystem, ports, ..config }
    })
}

fn unchanged_update() -> SubsystemExportUpdate {
    let ports = BTreeMap::from([(1, Vec::new()), (2, Vec::new())]);
    SubsystemExportUpdate {
        hosts: AllowedHosts::Any,
        ports,
        masks: BTreeMap::new(),
        security: SubsystemSecurity::default(),
    }
}

const NAMESPACES: u32 = 0x04;
const ANA: u32 = 0x0c;

#[test]
fn adding_a_namespace_notifies_hosts_that_can_see_it() {
    let mut rig = test_target();
    let (one, two) = (connect_admin(&mut rig, ONE), connect_admin(&mut rig, TWO));
    rig.service.add_namespace(NQN, namespace_config(&rig, 1)).unwrap();
    rig.run_until_idle();
    let (page, tag) = take_received_event(&mut rig, one).unwrap();
    assert_eq!(page, NAMESPACES);
    let (_, second) = take_received_event(&mut rig, two).unwrap();
    // The second namespace is visible to one host only.
    let masks = BTreeMap::from([(2, BTreeSet::from([TWO.to_owned()]))]);
    assert!(rig.service.update_export(NQN, SubsystemExportUpdate { masks, ..unchanged_update() }));
    rig.service.add_namespace(NQN, namespace_config(&rig, 2)).unwrap();
    rig.run_until_idle();
    assert!(take_received_event(&mut rig, (one.0, tag)).is_none());
    let (_, second) = take_received_event(&mut rig, (two.0, second)).unwrap();
    assert_eq!(
        (visible_namespaces(&mut rig, one.0), visible_namespaces(&mut rig, two.0)),
        (vec![1], vec![1, 2])
    );
    // A host that connects now sees the same.
    let late = connect_admin(&mut rig, ONE);
    assert_eq!(visible_namespaces(&mut rig, late.0), [1]);
    // Then it is visible to the other host only.
    let masks = BTreeMap::from([(2, BTreeSet::from([ONE.to_owned()]))]);
    rig.service.update_export(NQN, SubsystemExportUpdate { masks, ..unchanged_update() });
    rig.run_until_idle();
    assert!(
        take_received_event(&mut rig, (one.0, tag)).is_some()
            && take_received_event(&mut rig, (two.0, second)).is_some()
    );
    assert_eq!(
        (visible_namespaces(&mut rig, one.0), visible_namespaces(&mut rig, two.0)),
        (vec![1, 2], vec![1])
    );
    assert!(rig.service.add_namespace(NQN, namespace_config(&rig, 2)).is_err(), "it is there");
}

#[test]
fn hiding_a_namespace_notifies_only_hosts_that_could_see_it() {
    let mut rig = test_target();
    for nsid in [1, 2] {
        rig.service.add_namespace(NQN, namespace_config(&rig, nsid)).unwrap();
    }
    let one = connect_admin(&mut rig, ONE);
    let masks = BTreeMap::from([(2, BTreeSet::from([TWO.to_owned()]))]);
    rig.service.update_export(NQN, SubsystemExportUpdate { masks, ..unchanged_update() });
    rig.run_until_idle();
    assert_eq!(take_received_event(&mut rig, one).map(|(page, _)| page), Some(NAMESPACES));
    assert_eq!(visible_namespaces(&mut rig, one.0), [1]);
    let late = connect_admin(&mut rig, ONE);
    assert_eq!(take_received_event(&mut rig, late), None);
    let get = Command::new(AdminOpcode::GetLogPage.code()).with_cdw10(1023 << 16 | NAMESPACES);
    let (_, changed) =
        rig.execute_command(late.0, &get.with_nsid(u32::MAX), DataDirection::ToHost(4096), &[]);
    assert_eq!(changed, [0; 4096]);
    assert_eq!(visible_namespaces(&mut rig, late.0), [1]);
}

/// The state that results if one thread processes Connect and another one changes the masks.
#[test]
fn mask_and_namespace_changes_during_connect_apply_to_the_new_controller() {
    let rig = test_target();
    for nsid in [1, 2] {
        rig.service.add_namespace(NQN, namespace_config(&rig, nsid)).unwrap();
    }
    let only = |nsid, host: &str| (nsid, BTreeSet::from([host.to_owned()]));
    let change = |masks: &[(u32, BTreeSet<String>)]| {
        let masks = masks.iter().cloned().collect();
        assert!(
            rig.service.update_export(NQN, SubsystemExportUpdate { masks, ..unchanged_update() })
        );
    };
    change(&[only(3, ONE)]);
    let offer = rig.service.find_export(NQN, 1).unwrap();
    let host = HostIds { nqn: ONE.to_owned(), identifier: 7 };
    let opened = offer.create_controller(
        rig.now,
        RequestedCntlid::OfHost(CNTLID_DYNAMIC),
        (1, &host, "pipe"),
        rig.service.limits(),
    );
    let controller = opened.unwrap();
    let cntlid = controller.configuration().cntlid;
    rig.service.add_namespace(NQN, namespace_config(&rig, 3)).unwrap();
    change(&[only(2, TWO), only(3, ONE)]);
    let front = FabricsTransport::new(controller, rig.now);
    let association =
        Association::new(Arc::clone(&offer), cntlid, (host, 1), AdminQueueProof::default(), front);
    offer.add_association(&association).unwrap();
    let namespaces = association.lock_transport().controller().namespaces().reader();
    let seen: Vec<u32> = namespaces.get().iter().map(|namespace| namespace.nsid).collect();
    assert_eq!(seen, [1, 3]);
}

#[test]
fn update_disconnects_only_hosts_no_longer_allowed() {
    let mut rig = test_target();
    rig.service.add_namespace(NQN, namespace_config(&rig, 1)).unwrap();
    let (one, two) = (connect_admin(&mut rig, ONE), connect_admin(&mut rig, TWO));
    let hosts = AllowedHosts::Listed(BTreeSet::from([TWO.to_owned()]));
    rig.service
        .update_export(NQN, SubsystemExportUpdate { hosts: hosts.clone(), ..unchanged_update() });
    rig.run_until_idle();
    assert_eq!((rig.service.association_count(), rig.service.connection_count()), (1, 1));
    assert!(take_received_event(&mut rig, two).is_none());
    assert_eq!(visible_namespaces(&mut rig, two.0), [1]);
    assert!(!rig.lines[one.0].done.contains_key(&one.1));
    // The host is connected through port 1.
    let ports = BTreeMap::from([(2, Vec::new())]);
    rig.service.update_export(NQN, SubsystemExportUpdate { hosts, ports, ..unchanged_update() });
    rig.run_until_idle();
    assert_eq!((rig.service.association_count(), rig.service.connection_count()), (0, 0));
    assert!(!rig.service.update_export("nqn.2026-01.org.tenmil:other", unchanged_update()));
}

#[test]
fn ana_change_is_reported_only_if_the_state_differs() {
    let mut rig = test_target();
    rig.service.add_namespace(NQN, namespace_config(&rig, 1)).unwrap();
    let one = connect_admin(&mut rig, ONE);
    let generation = rig.service.discovery_generation();
    rig.service.update_export(NQN, unchanged_update());
    rig.run_until_idle();
    assert_eq!(rig.service.discovery_generation(), generation);
    assert!(take_received_event(&mut rig, one).is_none());
    let group = |state| BTreeMap::from([(1, vec![(1, state)]), (2, Vec::new())]);
    let ports = group(AnaState::Inaccessible);
    rig.service.update_export(NQN, SubsystemExportUpdate { ports, ..unchanged_update() });
    rig.run_until_idle();
    let (page, tag) = take_received_event(&mut rig, one).unwrap();
    assert_eq!(page, ANA);
    rig.service.update_export(NQN, unchanged_update());
    rig.run_until_idle();
    assert_eq!(take_received_event(&mut rig, (one.0, tag)).map(|(page, _)| page), Some(ANA));
}

#[test]
fn namespace_removal_keeps_other_namespaces() {
    let subsystem = subsystem_config();
    let mut rig = target_with_subsystem(subsystem.clone());
    for nsid in [1, 2] {
        rig.service.add_namespace(NQN, namespace_config(&rig, nsid)).unwrap();
    }
    let (line, cntlid) = rig.connect_admin_queue();
    let one = connect_admin(&mut rig, ONE);
    let io = rig.connect_io_queue(cntlid, 1);
    assert!(subsystem.remove_namespace(2));
    rig.run_until_idle();
    assert_eq!(take_received_event(&mut rig, one).map(|(page, _)| page), Some(NAMESPACES));
    let read = read_or_write_command(IoOpcode::Read.code(), 0, 8);
    let (completion, _) = rig.execute_command(io, &read, DataDirection::ToHost(4096), &[]);
    assert_eq!(completion.status(), Status::SUCCESS);
    assert_eq!(visible_namespaces(&mut rig, line), [1]);
}

#[test]
fn removed_namespace_device_closes_while_hosts_stay_connected_and_idle() {
    let subsystem = subsystem_config();
    let mut rig = target_with_subsystem(subsystem.clone());
    let (line, cntlid) = rig.connect_admin_queue();
    let listening = connect_admin(&mut rig, ONE);
    let queues = [1, 2].map(|qid| rig.connect_io_queue(cntlid, qid));
    for nsid in [1, 2] {
        rig.service.add_namespace(NQN, namespace_config(&rig, nsid)).unwrap();
        rig.run_until_idle();
        let medium: Arc<dyn BlockDevice> = Arc::new(RamDevice::new(&rig.regions, 512, 64).unwrap());
        let watched = Arc::downgrade(&medium);
        let new = NamespaceConfig { nsid: Some(3), ..NamespaceConfig::new(medium) };
        rig.service.add_namespace(NQN, new).unwrap();
        rig.run_until_idle();
        // The first queue has used it, and the second one has been idle ever since.
        let read = read_or_write_command(IoOpcode::Read.code(), 0, 8).with_nsid(3);
        let (completion, _) =
            rig.execute_command(queues[0], &read, DataDirection::ToHost(4096), &[]);
        assert_eq!(completion.status(), Status::SUCCESS);
        assert!(watched.upgrade().is_some());
        assert!(subsystem.remove_namespace(3));
        rig.run_until_idle();
        assert!(watched.upgrade().is_none(), "it is open still");
        let (completion, _) =
            rig.execute_command(queues[1], &read, DataDirection::ToHost(4096), &[]);
        assert!(!completion.status().is_success());
    }
    assert_eq!(visible_namespaces(&mut rig, line), [1, 2]);
    assert!(take_received_event(&mut rig, listening).is_some());
}
