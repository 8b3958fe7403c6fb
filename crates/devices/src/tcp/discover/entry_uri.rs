//! URI of a discovery log entry, with the security that it has to be opened with.

use tenmil_nvme_fabrics::SecureChannelMode;
use tenmil_wire::log::discovery::{
    DiscoveryEntry, SecureChannel, SecurityType, SubsystemType, TransportType,
};

use crate::tcp::security::TcpSecurity;

/// URI that opens what an entry names, with `security` at least: that of the discovery, as its user has
/// asked for. An entry comes from a peer, so it can require more and never permit less.
///
/// # Errors
///
/// If it cannot be opened; the text says why.
pub fn uri_of_entry(entry: &DiscoveryEntry, security: &TcpSecurity) -> Result<String, String> {
    let transport = entry.trtype();
    let port = entry
        .tcp_port()
        .filter(|_| transport == TransportType::Tcp)
        .ok_or_else(|| format!("over {}, which is not supported", transport_name(transport)))?;
    let (address, subsystem) = (entry.traddr().to_string(), entry.subnqn().to_string());
    // These would become options of the URI, or other addresses.
    if let Some(found) = subsystem.chars().find(|found| "?&#[],%".contains(*found)) {
        return Err(format!("its NQN contains `{found}`"));
    }
    let is_part_of_address = |part: char| part.is_ascii_alphanumeric() || "-_.:%".contains(part);
    if address.is_empty() || !address.chars().all(is_part_of_address) {
        return Err("its address is not valid".to_owned());
    }
    let address = if address.contains(':') { format!("[{address}]") } else { address };
    let uri = match entry.subtype() {
        SubsystemType::Nvm => format!("tcp://{address}:{port}/{subsystem}"),
        _ => format!("tcp://{address}:{port}"),
    };
    let options = entry_security(entry, security)?.uri_options();
    let options: Vec<String> =
        options.into_iter().map(|(key, value)| format!("{key}={value}")).collect();
    let mark = if options.is_empty() { "" } else { "?" };
    Ok(format!("{uri}{mark}{}", options.join("&")))
}

/// Security of an entry: that of the discovery, and TLS if the entry requires it.
fn entry_security(entry: &DiscoveryEntry, security: &TcpSecurity) -> Result<TcpSecurity, String> {
    let has_tls = entry.sectype() == SecurityType::Tls13;
    match security.tls {
        SecureChannelMode::Off if requires_tls(entry) => {
            Ok(TcpSecurity { tls: SecureChannelMode::Required, ..security.clone() })
        }
        // Before its own plaintext connection, a port without TLS would be one more to trust.
        SecureChannelMode::Required | SecureChannelMode::Concatenate if !has_tls => {
            Err(format!("it offers {}, expected TLS 1.3", security_name(entry)))
        }
        _ => Ok(security.clone()),
    }
}

/// Whether an entry leads to a port that accepts nothing but TLS.
fn requires_tls(entry: &DiscoveryEntry) -> bool {
    entry.secure_channel() == SecureChannel::Required
}

/// Security of an entry for people: SECTYPE and TREQ.
pub fn security_name(entry: &DiscoveryEntry) -> &'static str {
    match (entry.sectype(), entry.secure_channel()) {
        (SecurityType::Tls13, SecureChannel::Required) => "tls required",
        (SecurityType::Tls13, _) => "tls allowed",
        (SecurityType::Tls12, _) => "tls 1.2",
        (SecurityType::None, SecureChannel::Required) => "no tls, but required",
        _ => "no tls",
    }
}

/// Transport name, as in `nvme connect --transport`.
pub const fn transport_name(transport: TransportType) -> &'static str {
    match transport {
        TransportType::Tcp => "tcp",
        TransportType::Rdma => "rdma",
        TransportType::FibreChannel => "fc",
        TransportType::Loop => "loop",
        _ => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use tenmil_nvme_fabrics::SecureChannelMode;
    use tenmil_wire::field_type::Ascii;
    use tenmil_wire::log::discovery::{
        DiscoveryEntry, SecureChannel, SecurityType, SubsystemType, TransportType,
    };

    use super::{TcpSecurity, security_name, uri_of_entry};

    const NQN: &str = "nqn.2024-01.example:disk";

    fn entry(sectype: SecurityType, secure_channel: SecureChannel) -> DiscoveryEntry {
        DiscoveryEntry::zeroed().with(|entry| {
            entry
                .trtype(TransportType::Tcp)
                .subtype(SubsystemType::Nvm)
                .trsvcid(Ascii::new("4420"))
                .traddr(Ascii::new("192.0.2.7"))
                .subnqn(Ascii::nul_padded(NQN))
                .sectype(sectype)
                .secure_channel(secure_channel)
        })
    }

    fn with_tls() -> TcpSecurity {
        let (tls, keys) = (SecureChannelMode::Required, vec!["a".to_owned()]);
        TcpSecurity { tls, keys, dhchap: Some("b".to_owned()), ..TcpSecurity::default() }
    }

    #[test]
    fn entry_is_opened_with_tls_if_it_requires_it_or_its_user_does() {
        let plain = entry(SecurityType::None, SecureChannel::NotSpecified);
        let both = entry(SecurityType::Tls13, SecureChannel::NotRequired);
        let tls = entry(SecurityType::Tls13, SecureChannel::Required);
        let names = [&plain, &both, &tls].map(security_name);
        assert_eq!(names, ["no tls", "tls allowed", "tls required"]);
        let base = format!("tcp://192.0.2.7:4420/{NQN}");
        let none = TcpSecurity::default();
        assert_eq!(uri_of_entry(&plain, &none), Ok(base.clone()));
        assert_eq!(uri_of_entry(&both, &none), Ok(base.clone()));
        assert_eq!(uri_of_entry(&tls, &none), Ok(format!("{base}?tls=required")));
        let secured = format!("{base}?tls=required&key=a&dhchap=b");
        assert_eq!(uri_of_entry(&both, &with_tls()), Ok(secured.clone()));
        assert_eq!(uri_of_entry(&tls, &with_tls()), Ok(secured));
        // As an attacker does who alters the log.
        let refused = uri_of_entry(&plain, &with_tls());
        assert_eq!(refused, Err("it offers no tls, expected TLS 1.3".to_owned()));
        let contradiction = entry(SecurityType::None, SecureChannel::Required);
        assert_eq!(uri_of_entry(&contradiction, &none), Ok(format!("{base}?tls=required")));
        assert!(uri_of_entry(&contradiction, &with_tls()).is_err());
    }

    #[test]
    fn names_of_an_entry_add_no_options_and_no_addresses() {
        for subsystem in ["nqn.2024-01.example:disk?tls=off", "nqn.2024-01.example:[ram:1m]"] {
            let entry = entry(SecurityType::None, SecureChannel::NotSpecified);
            let entry = entry.with(|entry| entry.subnqn(Ascii::nul_padded(subsystem)));
            assert!(uri_of_entry(&entry, &TcpSecurity::default()).is_err(), "{subsystem}");
        }
        for address in ["192.0.2.7,203.0.113.1", "192.0.2.7/nqn", "192.0.2.7?tls=off", ""] {
            let entry = entry(SecurityType::None, SecureChannel::NotSpecified);
            let entry = entry.with(|entry| entry.traddr(Ascii::new(address)));
            assert!(uri_of_entry(&entry, &TcpSecurity::default()).is_err(), "{address}");
        }
    }

    #[test]
    fn referral_keeps_the_security_of_the_discovery() {
        let referral = entry(SecurityType::Tls13, SecureChannel::Required)
            .with(|entry| entry.subtype(SubsystemType::Referral).traddr(Ascii::new("2001:db8::7")));
        let expected = "tcp://[2001:db8::7]:4420?tls=required&key=a&dhchap=b";
        assert_eq!(uri_of_entry(&referral, &with_tls()).as_deref(), Ok(expected));
    }
}
