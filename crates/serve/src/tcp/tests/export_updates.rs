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

use super::test_target::{ENABLED, NQN, Rig, admin_config, admin_connect, limits, transfer};
use crate::tcp::association::{Association, HostIds};
use crate::tcp::{Hosts, SubsystemExportConfig, SubsystemExportUpdate};

const ONE: &str = "nqn.2026-01.org.tenmil:one";
const TWO: &str = "nqn.2026-01.org.tenmil:two";

fn named(host: &str) -> ConnectData {
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
fn admin(rig: &mut Rig, host: &str) -> (usize, u16) {
    let line = rig.dial(admin_config());
    let completion = rig.connect(line, &admin_connect(), &named(host));
    assert_eq!(completion.status(), Status::SUCCESS);
    rig.set_property(line, offset::CC, ENABLED);
    let events = Command::new(AdminOpcode::SetFeatures.code()).with_cdw10(0x0b);
    rig.command(line, &events.with_cdw11(1 << 8 | 1 << 11), DataDirection::None, &[]);
    (line, listen(rig, line))
}

fn listen(rig: &mut Rig, line: usize) -> u16 {
    let request = Command::new(AdminOpcode::AsynchronousEventRequest.code());
    let tag = rig.lines[line].submit(&request, DataDirection::None, &[]);
    rig.run();
    tag
}

/// Takes the event that the host received, if any, reads the log page that it names, and sends the
/// next Asynchronous Event Request.
fn heard(rig: &mut Rig, (line, tag): (usize, u16)) -> Option<(u32, u16)> {
    let (completion, _) = rig.lines[line].done.remove(&tag)?;
    let page = completion.dw0() >> 16;
    let get = Command::new(AdminOpcode::GetLogPage.code()).with_cdw10(1023 << 16 | page);
    rig.command(line, &get.with_nsid(u32::MAX), DataDirection::ToHost(4096), &[]);
    Some((page, listen(rig, line)))
}

/// Active namespaces of a host.
fn seen(rig: &mut Rig, line: usize) -> Vec<u32> {
    let identify = Command::new(AdminOpcode::Identify.code()).with_cdw10(2);
    let (completion, bytes) = rig.command(line, &identify, DataDirection::ToHost(4096), &[]);
    assert_eq!(completion.status(), Status::SUCCESS);
    let all = bytes.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().unwrap()));
    all.take_while(|nsid| *nsid != 0).collect()
}

fn namespace(rig: &Rig, nsid: u32) -> NamespaceConfig {
    let medium = Arc::new(RamDevice::new(&rig.regions, 512, 64).unwrap());
    NamespaceConfig { nsid: Some(nsid), ..NamespaceConfig::new(medium) }
}

/// Service with a subsystem with ANA groups, exported at two ports.
fn rig() -> Rig {
    rig_of(subsystem())
}

fn subsystem() -> Subsystem {
    let config = SubsystemConfig {
        nqn: NQN.to_owned(),
        ana_groups: 2,
        ..SubsystemConfig::new("S", Vec::new())
    };
    Subsystem::new(config).unwrap()
}

fn rig_of(subsystem: Subsystem) -> Rig {
    Rig::with(limits(), |plan| {
        let ports = BTreeMap::from([(1, Vec::new()), (2, Vec::new())]);
        SubsystemExportConfig { subsystem, ports, ..plan }
    })
}

fn as_it_was() -> SubsystemExportUpdate {
    let ports = BTreeMap::from([(1, Vec::new()), (2, Vec::new())]);
    SubsystemExportUpdate { hosts: Hosts::Any, ports, masks: BTreeMap::new() }
}

const NAMESPACES: u32 = 0x04;
const ANA: u32 = 0x0c;

#[test]
fn adding_a_namespace_notifies_hosts_that_can_see_it() {
    let mut rig = rig();
    let (one, two) = (admin(&mut rig, ONE), admin(&mut rig, TWO));
    rig.service.add_namespace(NQN, namespace(&rig, 1)).unwrap();
    rig.run();
    let (page, tag) = heard(&mut rig, one).unwrap();
    assert_eq!(page, NAMESPACES);
    let (_, second) = heard(&mut rig, two).unwrap();
    // The second namespace is visible to one host only.
    let masks = BTreeMap::from([(2, BTreeSet::from([TWO.to_owned()]))]);
    assert!(rig.service.update(NQN, SubsystemExportUpdate { masks, ..as_it_was() }));
    rig.service.add_namespace(NQN, namespace(&rig, 2)).unwrap();
    rig.run();
    assert!(heard(&mut rig, (one.0, tag)).is_none());
    let (_, second) = heard(&mut rig, (two.0, second)).unwrap();
    assert_eq!((seen(&mut rig, one.0), seen(&mut rig, two.0)), (vec![1], vec![1, 2]));
    // A host that connects now sees the same.
    let late = admin(&mut rig, ONE);
    assert_eq!(seen(&mut rig, late.0), [1]);
    // Then it is visible to the other host only.
    let masks = BTreeMap::from([(2, BTreeSet::from([ONE.to_owned()]))]);
    rig.service.update(NQN, SubsystemExportUpdate { masks, ..as_it_was() });
    rig.run();
    assert!(heard(&mut rig, (one.0, tag)).is_some() && heard(&mut rig, (two.0, second)).is_some());
    assert_eq!((seen(&mut rig, one.0), seen(&mut rig, two.0)), (vec![1, 2], vec![1]));
    assert!(rig.service.add_namespace(NQN, namespace(&rig, 2)).is_err(), "it is there");
}

#[test]
fn hiding_a_namespace_notifies_only_hosts_that_could_see_it() {
    let mut rig = rig();
    for nsid in [1, 2] {
        rig.service.add_namespace(NQN, namespace(&rig, nsid)).unwrap();
    }
    let one = admin(&mut rig, ONE);
    let masks = BTreeMap::from([(2, BTreeSet::from([TWO.to_owned()]))]);
    rig.service.update(NQN, SubsystemExportUpdate { masks, ..as_it_was() });
    rig.run();
    assert_eq!(heard(&mut rig, one).map(|(page, _)| page), Some(NAMESPACES));
    assert_eq!(seen(&mut rig, one.0), [1]);
    let late = admin(&mut rig, ONE);
    assert_eq!(heard(&mut rig, late), None);
    let get = Command::new(AdminOpcode::GetLogPage.code()).with_cdw10(1023 << 16 | NAMESPACES);
    let (_, changed) =
        rig.command(late.0, &get.with_nsid(u32::MAX), DataDirection::ToHost(4096), &[]);
    assert_eq!(changed, [0; 4096]);
    assert_eq!(seen(&mut rig, late.0), [1]);
}

/// The state that results if one thread processes Connect and another one changes the masks.
#[test]
fn masks_and_namespaces_that_change_while_a_controller_is_opened_hold_for_it() {
    let rig = rig();
    for nsid in [1, 2] {
        rig.service.add_namespace(NQN, namespace(&rig, nsid)).unwrap();
    }
    let only = |nsid, host: &str| (nsid, BTreeSet::from([host.to_owned()]));
    let change = |masks: &[(u32, BTreeSet<String>)]| {
        let masks = masks.iter().cloned().collect();
        assert!(rig.service.update(NQN, SubsystemExportUpdate { masks, ..as_it_was() }));
    };
    change(&[only(3, ONE)]);
    let offer = rig.service.find(NQN, 1).unwrap();
    let host = HostIds { nqn: ONE.to_owned(), identifier: 7 };
    let opened =
        offer.create_controller(rig.now, CNTLID_DYNAMIC, (1, &host, "pipe"), rig.service.limits());
    let controller = opened.unwrap();
    let cntlid = controller.configuration().cntlid;
    rig.service.add_namespace(NQN, namespace(&rig, 3)).unwrap();
    change(&[only(2, TWO), only(3, ONE)]);
    let front = FabricsTransport::new(controller, rig.now);
    let association = Association::new(Arc::clone(&offer), cntlid, (host, 1), front);
    offer.add_association(&association);
    let namespaces = association.transport().controller().namespaces().reader();
    let seen: Vec<u32> = namespaces.get().iter().map(|namespace| namespace.nsid).collect();
    assert_eq!(seen, [1, 3]);
}

#[test]
fn an_update_disconnects_only_hosts_no_longer_allowed() {
    let mut rig = rig();
    rig.service.add_namespace(NQN, namespace(&rig, 1)).unwrap();
    let (one, two) = (admin(&mut rig, ONE), admin(&mut rig, TWO));
    let hosts = Hosts::Listed(BTreeSet::from([TWO.to_owned()]));
    rig.service.update(NQN, SubsystemExportUpdate { hosts: hosts.clone(), ..as_it_was() });
    rig.run();
    assert_eq!((rig.service.associations(), rig.service.connected()), (1, 1));
    assert!(heard(&mut rig, two).is_none());
    assert_eq!(seen(&mut rig, two.0), [1]);
    assert!(!rig.lines[one.0].done.contains_key(&one.1));
    // The host is connected through port 1.
    let ports = BTreeMap::from([(2, Vec::new())]);
    rig.service.update(NQN, SubsystemExportUpdate { hosts, ports, ..as_it_was() });
    rig.run();
    assert_eq!((rig.service.associations(), rig.service.connected()), (0, 0));
    assert!(!rig.service.update("nqn.2026-01.org.tenmil:other", as_it_was()));
}

#[test]
fn an_ana_change_is_reported_only_if_the_state_differs() {
    let mut rig = rig();
    rig.service.add_namespace(NQN, namespace(&rig, 1)).unwrap();
    let one = admin(&mut rig, ONE);
    let generation = rig.service.generation();
    rig.service.update(NQN, as_it_was());
    rig.run();
    assert_eq!(rig.service.generation(), generation);
    assert!(heard(&mut rig, one).is_none());
    let group = |state| BTreeMap::from([(1, vec![(1, state)]), (2, Vec::new())]);
    let ports = group(AnaState::Inaccessible);
    rig.service.update(NQN, SubsystemExportUpdate { ports, ..as_it_was() });
    rig.run();
    let (page, tag) = heard(&mut rig, one).unwrap();
    assert_eq!(page, ANA);
    rig.service.update(NQN, as_it_was());
    rig.run();
    assert_eq!(heard(&mut rig, (one.0, tag)).map(|(page, _)| page), Some(ANA));
}

#[test]
fn removing_a_namespace_keeps_the_others() {
    let subsystem = subsystem();
    let mut rig = rig_of(subsystem.clone());
    for nsid in [1, 2] {
        rig.service.add_namespace(NQN, namespace(&rig, nsid)).unwrap();
    }
    let (line, cntlid) = rig.admin();
    let one = admin(&mut rig, ONE);
    let io = rig.io(cntlid, 1);
    assert!(subsystem.remove_namespace(2));
    rig.run();
    assert_eq!(heard(&mut rig, one).map(|(page, _)| page), Some(NAMESPACES));
    let read = transfer(IoOpcode::Read.code(), 0, 8);
    let (completion, _) = rig.command(io, &read, DataDirection::ToHost(4096), &[]);
    assert_eq!(completion.status(), Status::SUCCESS);
    assert_eq!(seen(&mut rig, line), [1]);
}

#[test]
fn device_of_a_removed_namespace_is_closed_while_hosts_stay_connected_and_idle() {
    let subsystem = subsystem();
    let mut rig = rig_of(subsystem.clone());
    let (line, cntlid) = rig.admin();
    let listening = admin(&mut rig, ONE);
    let queues = [1, 2].map(|qid| rig.io(cntlid, qid));
    for nsid in [1, 2] {
        rig.service.add_namespace(NQN, namespace(&rig, nsid)).unwrap();
        rig.run();
        let medium: Arc<dyn BlockDevice> = Arc::new(RamDevice::new(&rig.regions, 512, 64).unwrap());
        let watched = Arc::downgrade(&medium);
        let new = NamespaceConfig { nsid: Some(3), ..NamespaceConfig::new(medium) };
        rig.service.add_namespace(NQN, new).unwrap();
        rig.run();
        // The first queue has used it, and the second one has been idle ever since.
        let read = transfer(IoOpcode::Read.code(), 0, 8).with_nsid(3);
        let (completion, _) = rig.command(queues[0], &read, DataDirection::ToHost(4096), &[]);
        assert_eq!(completion.status(), Status::SUCCESS);
        assert!(watched.upgrade().is_some());
        assert!(subsystem.remove_namespace(3));
        rig.run();
        assert!(watched.upgrade().is_none(), "it is open still");
        let (completion, _) = rig.command(queues[1], &read, DataDirection::ToHost(4096), &[]);
        assert!(!completion.status().is_success());
    }
    assert_eq!(seen(&mut rig, line), [1, 2]);
    assert!(heard(&mut rig, listening).is_some());
}
