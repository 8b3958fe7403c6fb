//! Discovery controller: the content of its log page, for each host, and its change events.

use std::collections::{BTreeMap, BTreeSet};

use tenmil_base::Span;
use tenmil_nvme_auth::tls_psk_candidates;
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

use super::authenticating_host::{psk, with_psks};
use super::test_target::{
    ENABLED, HOST, NQN, TestStream, TestTarget, admin_config, admin_connect, service_limits,
};
use crate::tcp::{
    AllowedHosts, ControllerModel, DisconnectReason, DiscoveryName, Port, PortSecurity,
    SubsystemExportConfig, SubsystemSecurity, TargetEvent,
};

const LOG: u32 = 0x70;

fn discovery_connect_data(host: &str) -> ConnectData {
    ConnectData::zeroed().with(|data| {
        data.hostid([7; 16])
            .cntlid(CNTLID_DYNAMIC)
            .subnqn(Ascii::nul_padded(nqn::DISCOVERY))
            .hostnqn(Ascii::nul_padded(host))
    })
}

fn connect_discovery(rig: &mut TestTarget, host: &str) -> usize {
    let line = rig.open_connection(admin_config());
    let completion = rig.execute_connect(line, &admin_connect(), &discovery_connect_data(host));
    assert_eq!(completion.status(), Status::SUCCESS);
    rig.set_property(line, offset::CC, ENABLED);
    line
}

fn read_discovery_log(rig: &mut TestTarget, line: usize) -> (DiscoveryHeader, Vec<u8>) {
    let dwords = 8192 / 4 - 1;
    let get = Command::new(AdminOpcode::GetLogPage.code()).with_cdw10(dwords << 16 | LOG);
    let (completion, bytes) = rig.execute_command(line, &get, DataDirection::ToHost(8192), &[]);
    assert_eq!(completion.status(), Status::SUCCESS);
    (DiscoveryHeader::from_bytes(bytes.first_chunk().unwrap()), bytes)
}

/// Log page as this host sees it: generation counter, and name, type and port of each entry.
fn read_discovery_entries(
    rig: &mut TestTarget,
    line: usize,
) -> (u64, Vec<(String, SubsystemType, Option<u16>)>) {
    let (header, bytes) = read_discovery_log(rig, line);
    let entry = |entry: DiscoveryEntry| {
        let name = String::from_utf8(entry.subnqn().trimmed().to_vec()).unwrap();
        (name.trim_end_matches('\0').to_owned(), entry.subtype(), entry.tcp_port())
    };
    (header.genctr(), discovery_entries(&bytes).map(entry).collect())
}

fn subsystem_config(name: &str, hosts: AllowedHosts) -> SubsystemExportConfig {
    let config = SubsystemConfig { nqn: name.to_owned(), ..SubsystemConfig::new("S", Vec::new()) };
    SubsystemExportConfig {
        subsystem: Subsystem::new(config).unwrap(),
        nqn: name.to_owned(),
        hosts,
        ports: BTreeMap::from([(1, Vec::new())]),
        model: ControllerModel::Dynamic,
        masks: BTreeMap::new(),
        security: SubsystemSecurity::default(),
    }
}

#[test]
fn discovery_lists_allowed_subsystems_with_their_addresses() {
    let mut rig = TestTarget::new();
    rig.service
        .add_port(1, Port { address: Some("127.0.0.1:4420".parse().unwrap()), ..Port::default() });
    rig.service.set_referrals(vec!["[::1]:8009".parse().unwrap()]);
    let secret = "nqn.2026-01.org.tenmil:secret";
    let hosts = AllowedHosts::Listed(BTreeSet::from(["nqn.2026-01.org.tenmil:friend".to_owned()]));
    rig.service.add_subsystem(subsystem_config(secret, hosts)).unwrap();
    let line = connect_discovery(&mut rig, HOST);
    let own = (nqn::DISCOVERY.to_owned(), SubsystemType::Discovery, Some(4420));
    let other = (nqn::DISCOVERY.to_owned(), SubsystemType::Referral, Some(8009));
    let disk = (NQN.to_owned(), SubsystemType::Nvm, Some(4420));
    assert_eq!(
        read_discovery_entries(&mut rig, line).1,
        [own.clone(), disk.clone(), other.clone()]
    );
    let line = connect_discovery(&mut rig, "nqn.2026-01.org.tenmil:friend");
    let shown = (secret.to_owned(), SubsystemType::Nvm, Some(4420));
    assert_eq!(read_discovery_entries(&mut rig, line).1, [own, shown, disk, other]);
}

/// SECTYPE and TREQ (TCP 1.1 §3.6.1.1, Base 2.2 §5.2.12.3.1).
#[test]
fn discovery_reports_the_security_of_ports_and_subsystems() {
    use tenmil_wire::log::discovery::SecureChannel;
    let requires = |is_required| SubsystemSecurity {
        secure_channel_required: is_required,
        ..SubsystemSecurity::default()
    };
    for (security, is_required, sectype, treq) in [
        (PortSecurity::Plaintext, false, 0, SecureChannel::NotRequired),
        (PortSecurity::TlsAllowed, false, 2, SecureChannel::NotRequired),
        (PortSecurity::TlsAllowed, true, 2, SecureChannel::Required),
        (PortSecurity::TlsRequired, false, 2, SecureChannel::Required),
    ] {
        let rig = TestTarget::with_options(service_limits(), |config| SubsystemExportConfig {
            security: requires(is_required),
            ..config
        });
        let address = Some("127.0.0.1:4420".parse().unwrap());
        rig.service.add_port(1, Port { address, security, ..Port::default() });
        let (_, page) = rig.service.build_discovery_log_page(HOST, (1, None), None);
        let of_subsystem = |page: &[u8]| page[2048..3072].to_vec();
        let entry = of_subsystem(&page);
        assert_eq!(entry[768], sectype, "SECTYPE of {security:?}");
        assert_eq!(u16::from(entry[3] & 3), u16::from(treq.code()), "TREQ of {security:?}");
        // The discovery service has a requirement of its own.
        let is_strict = security == PortSecurity::TlsRequired;
        assert_eq!(page[1024 + 3] & 3, if is_strict { 1 } else { 2 });
        rig.service.set_discovery_security(requires(true));
        let (_, page) = rig.service.build_discovery_log_page(HOST, (1, None), None);
        assert_eq!(page[1024 + 3] & 3, 1);
        assert_eq!(of_subsystem(&page), entry);
    }
}

#[test]
fn security_that_no_host_can_fulfill_is_not_exported() {
    use super::authenticating_host::{OF_HOST, security};
    let mut offered = security(&[OF_HOST]);
    offered.policy.bidirectional_required = true;
    offered.hosts.values_mut().for_each(|keys| keys.controller_secret = None);
    let rig = TestTarget::new();
    let config = SubsystemExportConfig {
        security: offered,
        ..subsystem_config("nqn.2026-01.org.tenmil:new", AllowedHosts::Any)
    };
    let error = rig.service.add_subsystem(config).unwrap_err().to_string();
    assert!(error.contains(HOST) && error.contains("no secret of the controller"), "{error}");
}

#[test]
fn discovery_log_change_is_reported_once_until_read() {
    let mut rig = TestTarget::new();
    rig.service
        .add_port(1, Port { address: Some("127.0.0.1:4420".parse().unwrap()), ..Port::default() });
    let line = connect_discovery(&mut rig, HOST);
    let (first, _) = read_discovery_entries(&mut rig, line);
    let events = Command::new(AdminOpcode::SetFeatures.code()).with_cdw10(0x0b);
    rig.execute_command(line, &events.with_cdw11(1 << 31), DataDirection::None, &[]);
    let request = Command::new(AdminOpcode::AsynchronousEventRequest.code());
    let tag = rig.lines[line].submit(&request, DataDirection::None, &[]);
    rig.run_until_idle();
    assert!(!rig.lines[line].done.contains_key(&tag), "nothing has changed");
    rig.service
        .add_subsystem(subsystem_config("nqn.2026-01.org.tenmil:new", AllowedHosts::Any))
        .unwrap();
    rig.run_until_idle();
    let (completion, _) = rig.lines[line].done.remove(&tag).expect("it is reported");
    // Notice, discovery log page change, log page 70h.
    assert_eq!(completion.dw0(), 0x0070_f002);
    let tag = rig.lines[line].submit(&request, DataDirection::None, &[]);
    assert!(rig.service.remove_subsystem("nqn.2026-01.org.tenmil:new"));
    rig.run_until_idle();
    assert!(!rig.lines[line].done.contains_key(&tag), "it has not read the announced log page");
    let (second, shown) = read_discovery_entries(&mut rig, line);
    assert_eq!((second, shown.len()), (first + 2, 2));
    rig.service.set_referrals(Vec::new());
    rig.run_until_idle();
    assert!(rig.lines[line].done.contains_key(&tag), "now it wants to hear again");
}

#[test]
fn reset_of_discovery_controller_drops_event_requests() {
    let mut rig = TestTarget::new();
    let line = connect_discovery(&mut rig, HOST);
    let events = Command::new(AdminOpcode::SetFeatures.code()).with_cdw10(0x0b);
    let request = Command::new(AdminOpcode::AsynchronousEventRequest.code());
    let mut asked = Vec::new();
    for _ in 0..3 {
        rig.execute_command(line, &events.with_cdw11(1 << 31), DataDirection::None, &[]);
        asked.extend([0; 4].map(|_| rig.lines[line].submit(&request, DataDirection::None, &[])));
        rig.run_until_idle();
        assert_eq!(rig.set_property(line, offset::CC, 0).status(), Status::SUCCESS);
        rig.service.set_referrals(Vec::new());
        rig.run_until_idle();
        rig.set_property(line, offset::CC, ENABLED);
        let wanted = Command::new(AdminOpcode::GetFeatures.code()).with_cdw10(0x0b);
        assert_eq!(rig.execute_command(line, &wanted, DataDirection::None, &[]).0.dw0(), 0);
        assert!(!asked.iter().any(|tag| rig.lines[line].done.contains_key(tag)));
    }
    rig.execute_command(line, &events.with_cdw11(1 << 31), DataDirection::None, &[]);
    let tag = rig.lines[line].submit(&request, DataDirection::None, &[]);
    rig.service.set_referrals(Vec::new());
    rig.run_until_idle();
    assert!(rig.lines[line].done.contains_key(&tag), "a new request is completed");
}

#[test]
fn service_close_ends_unassociated_connections_at_once() {
    let mut rig = TestTarget::new();
    let (admin, _) = rig.connect_admin_queue();
    connect_discovery(&mut rig, HOST);
    rig.open_connection(admin_config());
    assert_eq!(rig.service.connection_count(), 3);
    rig.service.close_unassociated_connections();
    rig.run_until_idle();
    assert_eq!(rig.service.connection_count(), 1, "that of the subsystem");
    let ended = |new_events: &&TargetEvent| {
        matches!(new_events, TargetEvent::Disconnected { reason: DisconnectReason::ServerEnds, .. })
    };
    assert_eq!(rig.new_events.iter().filter(ended).count(), 2);
    assert!(rig.lines[admin].pipe.is_some());
    let (_, theirs) = TestStream::pair(&tenmil_dma::RegionTable::new(1));
    let refused = rig.service.accept_stream(Box::new(theirs), 1, rig.now).unwrap_err();
    assert!(refused.text.ends_with("the server is shutting down"), "{refused}");
}

#[test]
fn discovery_rejects_io_queues_and_silent_hosts_are_disconnected() {
    let mut rig = TestTarget::new();
    let line = rig.open_connection(admin_config());
    let io = Connect { qid: 1, ..admin_connect() };
    let completion = rig.execute_connect(line, &io, &discovery_connect_data(HOST));
    assert_eq!((completion.status().0 & 0x7ff, completion.dw0()), (0x182, 42));
    rig.lines[line].pipe = None;
    connect_discovery(&mut rig, HOST);
    rig.advance_time(Span::from_secs(120));
    rig.advance_time(Span::from_secs(119));
    assert_eq!(rig.service.connection_count(), 1);
    rig.advance_time(Span::from_secs(1));
    assert_eq!(rig.service.connection_count(), 0);
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
fn silent_discovery_host_is_disconnected_after_its_keep_alive_interval() {
    let mut rig = TestTarget::new();
    let line = rig.open_connection(admin_config());
    let connect = Connect { kato: 10_000, ..admin_connect() };
    assert_eq!(
        rig.execute_connect(line, &connect, &discovery_connect_data(HOST)).status(),
        Status::SUCCESS
    );
    rig.set_property(line, offset::CC, ENABLED);
    let keep_alive = Command::new(AdminOpcode::KeepAlive.code());
    for _ in 0..3 {
        rig.advance_time(Span::from_ms(9999));
        rig.execute_command(line, &keep_alive, DataDirection::None, &[]);
    }
    rig.advance_time(Span::from_ms(10_000));
    rig.advance_time(Span::from_ms(9999));
    assert_eq!(rig.service.connection_count(), 1);
    rig.advance_time(Span::from_ms(1));
    assert_eq!(rig.service.connection_count(), 0);
}

/// Serial number and NQN that a discovery controller reports.
fn identify_discovery(rig: &mut TestTarget, line: usize) -> (Vec<u8>, Ascii<256>) {
    let identify = Command::new(AdminOpcode::Identify.code()).with_cdw10(1);
    let (_, bytes) = rig.execute_command(line, &identify, DataDirection::ToHost(4096), &[]);
    let page = IdentifyController::from_bytes(bytes.first_chunk().unwrap());
    (bytes[4..24].to_vec(), page.subnqn())
}

#[test]
fn the_discovery_service_has_a_unique_nqn_beside_the_well_known_one() {
    let mut rig = TestTarget::new();
    rig.service
        .add_port(1, Port { address: Some("127.0.0.1:4420".parse().unwrap()), ..Port::default() });
    let line = connect_discovery(&mut rig, HOST);
    let without = (b"1                   ".to_vec(), Ascii::nul_padded(nqn::DISCOVERY));
    assert_eq!(identify_discovery(&mut rig, line), without);
    let own = "nqn.2026-01.org.tenmil:discovery";
    let nonsense = DiscoveryName { nqn: "own".to_owned(), serial: "7".to_owned() };
    assert!(rig.service.set_discovery_name(nonsense).is_err());
    let name = DiscoveryName { nqn: own.to_owned(), serial: "7".to_owned() };
    rig.service.set_discovery_name(name).unwrap();
    let asked = discovery_connect_data(HOST).with(|data| data.subnqn(Ascii::nul_padded(own)));
    let named = rig.open_connection(admin_config());
    assert_eq!(rig.execute_connect(named, &admin_connect(), &asked).status(), Status::SUCCESS);
    rig.set_property(named, offset::CC, ENABLED);
    for line in [named, connect_discovery(&mut rig, HOST)] {
        let with = (b"7                   ".to_vec(), Ascii::nul_padded(own));
        assert_eq!(identify_discovery(&mut rig, line), with);
        let current = (own.to_owned(), SubsystemType::Discovery, Some(4420));
        assert_eq!(read_discovery_entries(&mut rig, line).1[0], current);
    }
}

/// A host that connects over TLS has a key for the NQN that it names, and nvme-cli goes on to the one
/// that is reported.
#[test]
fn discovery_over_tls_reports_the_nqn_of_the_tls_key() {
    let mut rig = TestTarget::new();
    let address = Some("127.0.0.1:4420".parse().unwrap());
    let security = PortSecurity::TlsAllowed;
    rig.service.add_port(1, Port { address, security, ..Port::default() });
    let unique = "nqn.2026-01.org.tenmil:discovery";
    let name = DiscoveryName { nqn: unique.to_owned(), serial: "7".to_owned() };
    rig.service.set_discovery_name(name).unwrap();
    let open = SubsystemSecurity { secure_channel_required: false, ..with_psks(&[1]) };
    rig.set_discovery_security(open);
    for named in [nqn::DISCOVERY, unique] {
        let data = discovery_connect_data(HOST).with(|data| data.subnqn(Ascii::nul_padded(named)));
        for psk in tls_psk_candidates(&[psk(1)], HOST, named) {
            assert!(rig.service.tls_psks_of_identity(rig.now, &psk.identity).contains(&psk));
            let (line, completion) = rig.connect_over_tls(&psk.identity, 0, &data);
            assert_eq!(completion.status(), Status::SUCCESS, "{}", psk.identity);
            rig.set_property(line, offset::CC, ENABLED);
            assert_eq!(identify_discovery(&mut rig, line).1, Ascii::nul_padded(named));
            let current = (named.to_owned(), SubsystemType::Discovery, Some(4420));
            assert_eq!(read_discovery_entries(&mut rig, line).1[0], current);
            rig.lines[line].pipe = None;
            rig.run_until_idle();
        }
    }
    // In plaintext, no key is needed for the unique one.
    let line = connect_discovery(&mut rig, HOST);
    assert_eq!(identify_discovery(&mut rig, line).1, Ascii::nul_padded(unique));
    rig.end_all();
}

#[test]
fn subsystem_removal_ends_its_associations() {
    let mut rig = TestTarget::new();
    let (_, cntlid) = rig.connect_admin_queue();
    rig.connect_io_queue(cntlid, 1);
    assert!(rig.service.remove_subsystem(NQN) && !rig.service.remove_subsystem(NQN));
    rig.run_until_idle();
    assert_eq!(rig.service.connection_count(), 0);
    rig.lines.clear();
    rig.assert_all_released();
}

#[test]
fn log_page_longer_than_own_pages_is_rejected() {
    let mut rig = TestTarget::new();
    let line = connect_discovery(&mut rig, HOST);
    let before = rig.service.buffer_pool().free_bytes();
    let identify = Command::new(AdminOpcode::Identify.code()).with_cdw10(1);
    let (_, bytes) = rig.execute_command(line, &identify, DataDirection::ToHost(4096), &[]);
    let page = IdentifyController::from_bytes(bytes.first_chunk().unwrap());
    assert_eq!(page.mdts(), 1, "8 KiB");
    let get = |len: u32| {
        let dwords = len / 4 - 1;
        Command::new(AdminOpcode::GetLogPage.code()).with_cdw10(dwords << 16 | LOG)
    };
    let (completion, _) = rig.execute_command(line, &get(16384), DataDirection::ToHost(16384), &[]);
    assert_eq!(completion.status(), Status::DATA_SGL_LENGTH_INVALID.with_dnr());
    // Four commands wait for the same two pages and use them one after the other.
    let asked =
        [0; 4].map(|_| rig.lines[line].submit(&get(8192), DataDirection::ToHost(8192), &[]));
    rig.run_until_idle();
    for tag in asked {
        let (completion, _) = rig.lines[line].done.remove(&tag).unwrap();
        assert_eq!(completion.status(), Status::SUCCESS);
    }
    assert_eq!(rig.service.buffer_pool().free_bytes(), before);
}

/// Addresses in the log page of a host that is connected through port 1 of `ports`, to the local
/// address `here`.
fn discovery_addresses_of(ports: &[&str], here: Option<&str>) -> Vec<String> {
    let mut rig = TestTarget::new();
    for (number, address) in (1..).zip(ports) {
        rig.service
            .add_port(number, Port { address: Some(address.parse().unwrap()), ..Port::default() });
    }
    rig.traits.here = here.map(|here| here.parse().unwrap());
    let line = connect_discovery(&mut rig, HOST);
    let (_, bytes) = read_discovery_log(&mut rig, line);
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
    assert_eq!(discovery_addresses_of(&wild, Some("10.1.2.3:4420")), ["10.1.2.3 4420"]);
    assert_eq!(discovery_addresses_of(&["[::]:4421"], Some("10.1.2.3:4421")), ["10.1.2.3 4421"]);
    assert_eq!(discovery_addresses_of(&["[::]:4421"], Some("[fe80::1]:4421")), ["fe80::1 4421"]);
    assert_eq!(discovery_addresses_of(&["127.0.0.1:4420"], Some("10.1.2.3:9")), ["127.0.0.1 4420"]);
    // A wildcard IPv4 port has no address for a host connected by IPv6, and a wildcard address is
    // never reported.
    assert!(discovery_addresses_of(&wild, Some("[fe80::1]:4420")).is_empty());
    assert!(discovery_addresses_of(&wild, None).is_empty());
}
