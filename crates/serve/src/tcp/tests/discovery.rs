//! Discovery controller: the content of its log page, for each host, and its change events.

use std::collections::{BTreeMap, BTreeSet};

use tenmil_base::Span;
use tenmil_nvme_controller::controller::{Subsystem, SubsystemConfig};
use tenmil_nvme_tcp::DataDirection;
use tenmil_wire::fabrics::{CNTLID_DYNAMIC, Connect, ConnectData};
use tenmil_wire::identify::IdentifyController;
use tenmil_wire::layout::Ascii;
use tenmil_wire::log::discovery::{
    DiscoveryEntry, DiscoveryHeader, SubsystemType, discovery_entries,
};
use tenmil_wire::register::offset;
use tenmil_wire::{AdminOpcode, Command, Status, nqn};

use super::test_target::{ENABLED, HOST, NQN, Pipe, Rig, admin_config, admin_connect};
use crate::tcp::{
    ControllerModel, DisconnectReason, DiscoveryName, Hosts, Port, SubsystemExportConfig,
    TargetEvent,
};

const LOG: u32 = 0x70;

fn visitor(host: &str) -> ConnectData {
    ConnectData::zeroed().with(|data| {
        data.hostid([7; 16])
            .cntlid(CNTLID_DYNAMIC)
            .subnqn(Ascii::nul_padded(nqn::DISCOVERY))
            .hostnqn(Ascii::nul_padded(host))
    })
}

fn discover(rig: &mut Rig, host: &str) -> usize {
    let line = rig.dial(admin_config());
    let completion = rig.connect(line, &admin_connect(), &visitor(host));
    assert_eq!(completion.status(), Status::SUCCESS);
    rig.set_property(line, offset::CC, ENABLED);
    line
}

fn log(rig: &mut Rig, line: usize) -> (DiscoveryHeader, Vec<u8>) {
    let dwords = 8192 / 4 - 1;
    let get = Command::new(AdminOpcode::GetLogPage.code()).with_cdw10(dwords << 16 | LOG);
    let (completion, bytes) = rig.command(line, &get, DataDirection::ToHost(8192), &[]);
    assert_eq!(completion.status(), Status::SUCCESS);
    (DiscoveryHeader::from_bytes(bytes.first_chunk().unwrap()), bytes)
}

/// Log page as this host sees it: generation counter, and name, type and port of each entry.
fn page(rig: &mut Rig, line: usize) -> (u64, Vec<(String, SubsystemType, Option<u16>)>) {
    let (header, bytes) = log(rig, line);
    let entry = |entry: DiscoveryEntry| {
        let name = String::from_utf8(entry.subnqn().trimmed().to_vec()).unwrap();
        (name.trim_end_matches('\0').to_owned(), entry.subtype(), entry.tcp_port())
    };
    (header.genctr(), discovery_entries(&bytes).map(entry).collect())
}

fn plan(name: &str, hosts: Hosts) -> SubsystemExportConfig {
    let config = SubsystemConfig { nqn: name.to_owned(), ..SubsystemConfig::new("S", Vec::new()) };
    SubsystemExportConfig {
        subsystem: Subsystem::new(config).unwrap(),
        nqn: name.to_owned(),
        hosts,
        ports: BTreeMap::from([(1, Vec::new())]),
        model: ControllerModel::Dynamic,
        masks: BTreeMap::new(),
    }
}

#[test]
fn discovery_lists_allowed_subsystems_with_their_addresses() {
    let mut rig = Rig::new();
    rig.service.open_port(1, Port { address: Some("127.0.0.1:4420".parse().unwrap()) });
    rig.service.set_referrals(vec!["[::1]:8009".parse().unwrap()]);
    let secret = "nqn.2026-01.org.tenmil:secret";
    let hosts = Hosts::Listed(BTreeSet::from(["nqn.2026-01.org.tenmil:friend".to_owned()]));
    rig.service.add_subsystem(plan(secret, hosts)).unwrap();
    let line = discover(&mut rig, HOST);
    let own = (nqn::DISCOVERY.to_owned(), SubsystemType::Discovery, Some(4420));
    let other = (nqn::DISCOVERY.to_owned(), SubsystemType::Referral, Some(8009));
    let disk = (NQN.to_owned(), SubsystemType::Nvm, Some(4420));
    assert_eq!(page(&mut rig, line).1, [own.clone(), disk.clone(), other.clone()]);
    let line = discover(&mut rig, "nqn.2026-01.org.tenmil:friend");
    let shown = (secret.to_owned(), SubsystemType::Nvm, Some(4420));
    assert_eq!(page(&mut rig, line).1, [own, shown, disk, other]);
}

#[test]
fn a_log_page_change_is_reported_once_until_it_is_read() {
    let mut rig = Rig::new();
    rig.service.open_port(1, Port { address: Some("127.0.0.1:4420".parse().unwrap()) });
    let line = discover(&mut rig, HOST);
    let (first, _) = page(&mut rig, line);
    let events = Command::new(AdminOpcode::SetFeatures.code()).with_cdw10(0x0b);
    rig.command(line, &events.with_cdw11(1 << 31), DataDirection::None, &[]);
    let request = Command::new(AdminOpcode::AsynchronousEventRequest.code());
    let tag = rig.lines[line].submit(&request, DataDirection::None, &[]);
    rig.run();
    assert!(!rig.lines[line].done.contains_key(&tag), "nothing has changed");
    rig.service.add_subsystem(plan("nqn.2026-01.org.tenmil:new", Hosts::Any)).unwrap();
    rig.run();
    let (completion, _) = rig.lines[line].done.remove(&tag).expect("it is told");
    // Notice, discovery log page change, log page 70h.
    assert_eq!(completion.dw0(), 0x0070_f002);
    let tag = rig.lines[line].submit(&request, DataDirection::None, &[]);
    assert!(rig.service.remove_subsystem("nqn.2026-01.org.tenmil:new"));
    rig.run();
    assert!(!rig.lines[line].done.contains_key(&tag), "it has not read what it was told of");
    let (second, shown) = page(&mut rig, line);
    assert_eq!((second, shown.len()), (first + 2, 2));
    rig.service.set_referrals(Vec::new());
    rig.run();
    assert!(rig.lines[line].done.contains_key(&tag), "now it wants to hear again");
}

#[test]
fn a_reset_of_a_discovery_controller_drops_event_requests() {
    let mut rig = Rig::new();
    let line = discover(&mut rig, HOST);
    let events = Command::new(AdminOpcode::SetFeatures.code()).with_cdw10(0x0b);
    let request = Command::new(AdminOpcode::AsynchronousEventRequest.code());
    let mut asked = Vec::new();
    for _ in 0..3 {
        rig.command(line, &events.with_cdw11(1 << 31), DataDirection::None, &[]);
        asked.extend([0; 4].map(|_| rig.lines[line].submit(&request, DataDirection::None, &[])));
        rig.run();
        assert_eq!(rig.set_property(line, offset::CC, 0).status(), Status::SUCCESS);
        rig.service.set_referrals(Vec::new());
        rig.run();
        rig.set_property(line, offset::CC, ENABLED);
        let wanted = Command::new(AdminOpcode::GetFeatures.code()).with_cdw10(0x0b);
        assert_eq!(rig.command(line, &wanted, DataDirection::None, &[]).0.dw0(), 0);
        assert!(!asked.iter().any(|tag| rig.lines[line].done.contains_key(tag)));
    }
    rig.command(line, &events.with_cdw11(1 << 31), DataDirection::None, &[]);
    let tag = rig.lines[line].submit(&request, DataDirection::None, &[]);
    rig.service.set_referrals(Vec::new());
    rig.run();
    assert!(rig.lines[line].done.contains_key(&tag), "who asks anew is told");
}

#[test]
fn closing_ends_the_connections_of_no_subsystem_at_once() {
    let mut rig = Rig::new();
    let (admin, _) = rig.admin();
    discover(&mut rig, HOST);
    rig.dial(admin_config());
    assert_eq!(rig.service.connected(), 3);
    rig.service.close();
    rig.run();
    assert_eq!(rig.service.connected(), 1, "that of the subsystem");
    let ended = |new_events: &&TargetEvent| {
        matches!(new_events, TargetEvent::Disconnected { reason: DisconnectReason::ServerEnds, .. })
    };
    assert_eq!(rig.new_events.iter().filter(ended).count(), 2);
    assert!(rig.lines[admin].pipe.is_some());
    let (_, theirs) = Pipe::pair(&tenmil_dma::RegionTable::new(1));
    let refused = rig.service.accept(Box::new(theirs), 1, rig.now).unwrap_err();
    assert!(refused.text.ends_with("the server is shutting down"), "{refused}");
}

#[test]
fn discovery_has_no_io_queues_and_a_silent_host_is_disconnected() {
    let mut rig = Rig::new();
    let line = rig.dial(admin_config());
    let io = Connect { qid: 1, ..admin_connect() };
    let completion = rig.connect(line, &io, &visitor(HOST));
    assert_eq!((completion.status().0 & 0x7ff, completion.dw0()), (0x182, 42));
    rig.lines[line].pipe = None;
    discover(&mut rig, HOST);
    rig.pass(Span::from_secs(120));
    rig.pass(Span::from_secs(119));
    assert_eq!(rig.service.connected(), 1);
    rig.pass(Span::from_secs(1));
    assert_eq!(rig.service.connected(), 0);
    let expired = |new_events: &TargetEvent| {
        matches!(
            new_events,
            TargetEvent::Disconnected { reason: DisconnectReason::KeepAliveExpired, .. }
        )
    };
    assert!(rig.new_events.iter().any(expired));
}

/// The timer works with intervals, as for each controller with Traffic Based Keep Alive (TBKAS).
#[test]
fn a_silent_discovery_host_is_disconnected_after_its_interval() {
    let mut rig = Rig::new();
    let line = rig.dial(admin_config());
    let connect = Connect { kato: 10_000, ..admin_connect() };
    assert_eq!(rig.connect(line, &connect, &visitor(HOST)).status(), Status::SUCCESS);
    rig.set_property(line, offset::CC, ENABLED);
    let keep_alive = Command::new(AdminOpcode::KeepAlive.code());
    for _ in 0..3 {
        rig.pass(Span::from_ms(9999));
        rig.command(line, &keep_alive, DataDirection::None, &[]);
    }
    rig.pass(Span::from_ms(10_000));
    rig.pass(Span::from_ms(9999));
    assert_eq!(rig.service.connected(), 1);
    rig.pass(Span::from_ms(1));
    assert_eq!(rig.service.connected(), 0);
}

#[test]
fn the_discovery_service_has_a_unique_nqn_beside_the_well_known_one() {
    let mut rig = Rig::new();
    rig.service.open_port(1, Port { address: Some("127.0.0.1:4420".parse().unwrap()) });
    let identity = |rig: &mut Rig, line| {
        let identify = Command::new(AdminOpcode::Identify.code()).with_cdw10(1);
        let (_, bytes) = rig.command(line, &identify, DataDirection::ToHost(4096), &[]);
        let page = IdentifyController::from_bytes(bytes.first_chunk().unwrap());
        (bytes[4..24].to_vec(), page.subnqn())
    };
    let line = discover(&mut rig, HOST);
    let without = (b"1                   ".to_vec(), Ascii::nul_padded(nqn::DISCOVERY));
    assert_eq!(identity(&mut rig, line), without);
    let own = "nqn.2026-01.org.tenmil:discovery";
    let nonsense = DiscoveryName { nqn: "own".to_owned(), serial: "7".to_owned() };
    assert!(rig.service.name_discovery(nonsense).is_err());
    let name = DiscoveryName { nqn: own.to_owned(), serial: "7".to_owned() };
    rig.service.name_discovery(name).unwrap();
    let asked = visitor(HOST).with(|data| data.subnqn(Ascii::nul_padded(own)));
    let named = rig.dial(admin_config());
    assert_eq!(rig.connect(named, &admin_connect(), &asked).status(), Status::SUCCESS);
    rig.set_property(named, offset::CC, ENABLED);
    for line in [named, discover(&mut rig, HOST)] {
        let with = (b"7                   ".to_vec(), Ascii::nul_padded(own));
        assert_eq!(identity(&mut rig, line), with);
        let current = (own.to_owned(), SubsystemType::Discovery, Some(4420));
        assert_eq!(page(&mut rig, line).1[0], current);
    }
}

#[test]
fn removing_a_subsystem_ends_its_associations() {
    let mut rig = Rig::new();
    let (_, cntlid) = rig.admin();
    rig.io(cntlid, 1);
    assert!(rig.service.remove_subsystem(NQN) && !rig.service.remove_subsystem(NQN));
    rig.run();
    assert_eq!(rig.service.connected(), 0);
    rig.lines.clear();
    rig.assert_empty();
}

#[test]
fn a_log_page_longer_than_the_own_pages_is_rejected() {
    let mut rig = Rig::new();
    let line = discover(&mut rig, HOST);
    let before = rig.service.budget().free_bytes();
    let identify = Command::new(AdminOpcode::Identify.code()).with_cdw10(1);
    let (_, bytes) = rig.command(line, &identify, DataDirection::ToHost(4096), &[]);
    let page = IdentifyController::from_bytes(bytes.first_chunk().unwrap());
    assert_eq!(page.mdts(), 1, "8 KiB");
    let get = |len: u32| {
        let dwords = len / 4 - 1;
        Command::new(AdminOpcode::GetLogPage.code()).with_cdw10(dwords << 16 | LOG)
    };
    let (completion, _) = rig.command(line, &get(16384), DataDirection::ToHost(16384), &[]);
    assert_eq!(completion.status(), Status::DATA_SGL_LENGTH_INVALID.with_dnr());
    // Four commands wait for the same two pages and use them one after the other.
    let asked =
        [0; 4].map(|_| rig.lines[line].submit(&get(8192), DataDirection::ToHost(8192), &[]));
    rig.run();
    for tag in asked {
        let (completion, _) = rig.lines[line].done.remove(&tag).unwrap();
        assert_eq!(completion.status(), Status::SUCCESS);
    }
    assert_eq!(rig.service.budget().free_bytes(), before);
}

/// Addresses in the log page of a host that is connected through port 1 of `ports`, to the local
/// address `here`.
fn told(ports: &[&str], here: Option<&str>) -> Vec<String> {
    let mut rig = Rig::new();
    for (number, address) in (1..).zip(ports) {
        rig.service.open_port(number, Port { address: Some(address.parse().unwrap()) });
    }
    rig.traits.here = here.map(|here| here.parse().unwrap());
    let line = discover(&mut rig, HOST);
    let (_, bytes) = log(&mut rig, line);
    let address = |entry: DiscoveryEntry| {
        let [ip, port] = [entry.traddr().trimmed().to_vec(), entry.trsvcid().trimmed().to_vec()];
        let [ip, port] = [ip, port].map(|bytes| String::from_utf8(bytes).unwrap());
        (entry.subtype() == SubsystemType::Discovery).then(|| format!("{ip} {port}"))
    };
    discovery_entries(&bytes).filter_map(address).collect()
}

#[test]
fn discovery_replaces_an_unspecified_address_by_the_local_one() {
    let wild = ["0.0.0.0:4420"];
    assert_eq!(told(&wild, Some("10.1.2.3:4420")), ["10.1.2.3 4420"]);
    assert_eq!(told(&["[::]:4421"], Some("10.1.2.3:4421")), ["10.1.2.3 4421"]);
    assert_eq!(told(&["[::]:4421"], Some("[fe80::1]:4421")), ["fe80::1 4421"]);
    assert_eq!(told(&["127.0.0.1:4420"], Some("10.1.2.3:9")), ["127.0.0.1 4420"]);
    // A wildcard IPv4 port has no address for a host connected by IPv6, and a wildcard address is
    // never reported.
    assert!(told(&wild, Some("[fe80::1]:4420")).is_empty());
    assert!(told(&wild, None).is_empty());
}
