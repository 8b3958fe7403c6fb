//! Discovery log page: what a host may use, and where (Base 2.1 §5.1.12.3.1).

use std::net::SocketAddr;

use tenmil_wire::fabrics::CNTLID_DYNAMIC;
use tenmil_wire::layout::Ascii;
use tenmil_wire::log::discovery::{
    ASQSZ_MIN, AddressFamily, DiscoveryEntry, DiscoveryHeader, SecureChannel, SubsystemType,
    TransportType,
};
use tenmil_wire::nqn;

use super::{Port, Service};
use crate::tcp::security::PortSecurity;

impl Service {
    /// Builds the discovery log page for a host that connected to `port` at the local address
    /// `local_address`. `name` is the NQN of the discovery service if it is another one for this host.
    /// Returns the page with its generation (Base 2.1 §5.1.12.3.1).
    pub(in crate::tcp) fn build_discovery_log_page(
        &self,
        host: &str,
        (port, local_address): (u16, Option<SocketAddr>),
        name: Option<&str>,
    ) -> (u64, Vec<u8>) {
        let state = self.lock_state();
        let mut entries = Vec::new();
        for (&reserve_cntlid, at) in &state.ports {
            let Some(address) = at.reachable_address(local_address) else { continue };
            if reserve_cntlid == port {
                let name = name.unwrap_or(&state.discovery.nqn);
                let is_secure = state.discovery_security.security.secure_channel_required;
                let entry =
                    discovery_entry(name, SubsystemType::Discovery, reserve_cntlid, address);
                entries.push(with_port_security(entry, at.security, is_secure));
            }
            for export in state.exports.values() {
                if export.is_visible_at(reserve_cntlid) && export.allows_host(host) {
                    let entry =
                        discovery_entry(export.nqn(), SubsystemType::Nvm, reserve_cntlid, address);
                    let entry = entry.with(|entry| entry.cntlid(export.advertised_cntlid()));
                    let is_secure = export.requires_secure_channel();
                    entries.push(with_port_security(entry, at.security, is_secure));
                }
            }
        }
        for (reserve_cntlid, address) in state.gateway_group.iter().flat_map(|it| &it.addresses) {
            for export in state.exports.values().filter(|export| export.allows_host(host)) {
                // The gateways of a group have the same configuration: its listeners, too, are as this one.
                let Some(at) = state.ports.get(&port) else { continue };
                let entry =
                    discovery_entry(export.nqn(), SubsystemType::Nvm, *reserve_cntlid, *address);
                let entry = entry.with(|entry| entry.cntlid(export.advertised_cntlid()));
                let is_secure = export.requires_secure_channel();
                entries.push(with_port_security(entry, at.security, is_secure));
            }
        }
        let referral =
            |address| discovery_entry(nqn::DISCOVERY, SubsystemType::Referral, 0, address);
        entries.extend(state.referrals.iter().copied().map(referral));
        let header = DiscoveryHeader::zeroed()
            .with(|header| header.genctr(state.generation).numrec(entries.len() as u64));
        let mut page = header.as_bytes().to_vec();
        entries.iter().for_each(|entry| page.extend(entry.as_bytes()));
        (state.generation, page)
    }
}

impl Port {
    /// Address to report to a host that connected to `local_address`; `None` if such a host cannot reach it.
    fn reachable_address(&self, local_address: Option<SocketAddr>) -> Option<SocketAddr> {
        let address = self.address?;
        match address.ip() {
            ip if !ip.is_unspecified() => Some(address),
            // A listener on `::` also accepts IPv4.
            ip => local_address
                .filter(|local_address| ip.is_ipv6() || local_address.is_ipv4())
                .map(|local_address| SocketAddr::new(local_address.ip(), address.port())),
        }
    }
}

/// Builds a discovery log page entry.
fn discovery_entry(
    name: &str,
    kind: SubsystemType,
    port: u16,
    address: SocketAddr,
) -> DiscoveryEntry {
    let family = if address.is_ipv6() { AddressFamily::Ipv6 } else { AddressFamily::Ipv4 };
    DiscoveryEntry::zeroed().with(|entry| {
        entry
            .trtype(TransportType::Tcp)
            .adrfam(family)
            .subtype(kind)
            .secure_channel(SecureChannel::NotRequired)
            .disable_sq_flow_control(true)
            .portid(port)
            .cntlid(CNTLID_DYNAMIC)
            .asqsz(ASQSZ_MIN)
            .persistent(kind != SubsystemType::Nvm)
            .trsvcid(Ascii::new(&address.port().to_string()))
            .subnqn(Ascii::nul_padded(name))
            .traddr(Ascii::new(&address.ip().to_string()))
    })
}

/// Sets SECTYPE and TREQ of an entry, whose subsystem requires a secure channel or not.
fn with_port_security(
    entry: DiscoveryEntry,
    port: PortSecurity,
    is_required: bool,
) -> DiscoveryEntry {
    entry.with(|entry| {
        entry.sectype(port.security_type()).secure_channel(port.secure_channel(is_required))
    })
}
