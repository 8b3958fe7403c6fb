//! 70h: Discovery: subsystems and their transport addresses (Base 2.1 §5.1.12.3.1).
//!
//! A header, then one entry per path to a subsystem. GENCTR changes with every update: a host that reads
//! the page in pieces reads the header again at the end, and restarts if it has changed.

use crate::field_type::{Ascii, code};
use crate::layout::{Layout, layout};

layout! {
    /// The header of 70h (Base 2.1 §5.1.12.3.1).
    pub struct DiscoveryHeader[1024] {
        /// Generation Counter.
        genctr @ 0: u64;
        /// Number of Records.
        numrec @ 8: u64;
        /// Record Format: 0.
        recfmt @ 16: u16;
    }

    /// Discovery log entry: one path to a subsystem (Base 2.1 §5.1.12.3.1).
    pub struct DiscoveryEntry[1024] {
        /// Transport Type.
        trtype @ 0: TransportType;
        /// Address Family.
        adrfam @ 1: AddressFamily;
        /// Subsystem Type.
        subtype @ 2: SubsystemType;
        /// Transport Requirements.
        treq @ 3: u8 {
            /// Secure Channel.
            secure_channel @ 0..=1: SecureChannel;
            /// Disable SQ Flow Control is supported.
            disable_sq_flow_control @ 2: bool;
        };
        /// Port ID.
        portid @ 4: u16;
        /// Controller ID: FFFFh for any, FFFEh for any of a static subsystem.
        cntlid @ 6: u16;
        /// Admin Max SQ Size: at least 32.
        asqsz @ 8: u16;
        /// Entry Flags.
        eflags @ 10: u16 {
            /// Duplicate Returned Information: another entry of this page leads to the same subsystem.
            duplicate @ 0: bool;
            /// Explicit Persistent Connection Support for Discovery.
            persistent @ 1: bool;
            /// No CDC Connectivity.
            no_cdc @ 2: bool;
        };
        /// Transport Service Identifier: for TCP, the port in decimal.
        trsvcid @ 32: Ascii<32>;
        /// NVM Subsystem Qualified Name.
        subnqn @ 256: Ascii<256>;
        /// Transport Address.
        traddr @ 512: Ascii<256>;
        /// Transport Specific Address Subtype: for TCP, the security protocol (TCP 1.0 §3.6.1.1).
        sectype @ 768: SecurityType;
    }
}

code! {
    /// TRTYPE (Base 2.1 §5.1.12.3.1).
    pub enum TransportType {
        /// RDMA.
        Rdma = 1,
        /// Fibre Channel.
        FibreChannel = 2,
        /// TCP.
        Tcp = 3,
        /// Intra-host.
        Loop = 254,
    }

    /// ADRFAM (Base 2.1 §5.1.12.3.1).
    pub enum AddressFamily {
        /// IPv4.
        Ipv4 = 1,
        /// IPv6.
        Ipv6 = 2,
        /// InfiniBand.
        InfiniBand = 3,
        /// Fibre Channel.
        FibreChannel = 4,
        /// Intra-host.
        Loop = 254,
    }

    /// SUBTYPE (Base 2.1 §5.1.12.3.1).
    pub enum SubsystemType {
        /// Another discovery service: a referral.
        Referral = 1,
        /// A subsystem whose controllers may have attached namespaces.
        Nvm = 2,
        /// This discovery service itself.
        Discovery = 3,
    }

    /// TREQ: secure channel requirement (Base 2.1 §5.1.12.3.1).
    pub enum SecureChannel {
        /// Not specified.
        NotSpecified = 0,
        /// Required.
        Required = 1,
        /// Not required.
        NotRequired = 2,
    }

    /// SECTYPE (TCP 1.0 §3.6.1.1).
    pub enum SecurityType {
        /// No transport security.
        None = 0,
        /// TLS 1.2 (obsolete).
        Tls12 = 1,
        /// TLS 1.3.
        Tls13 = 2,
    }
}

/// Minimum admin submission queue size in an entry (Base 2.1 §5.1.12.3.1).
pub const ASQSZ_MIN: u16 = 32;

/// Entries of a page, limited by the header's count and by the bytes available.
pub fn discovery_entries(page: &[u8]) -> impl Iterator<Item = DiscoveryEntry> + '_ {
    let count = DiscoveryHeader::parse(page).map_or(0, |header| header.numrec());
    let rest = page.get(DiscoveryHeader::BYTES..).unwrap_or(&[]);
    let count = usize::try_from(count).unwrap_or(usize::MAX);
    rest.as_chunks::<1024>().0.iter().take(count).map(DiscoveryEntry::from_bytes)
}

impl DiscoveryEntry {
    /// TCP port in TRSVCID, if it is a decimal port number (TCP 1.0 §3.1.2).
    #[must_use]
    pub fn tcp_port(&self) -> Option<u16> {
        let text = self.trsvcid();
        let digits = core::str::from_utf8(text.trimmed()).ok()?;
        let is_decimal = digits.bytes().all(|byte| byte.is_ascii_digit());
        digits.parse().ok().filter(|&port| is_decimal && port != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::{
        Ascii, DiscoveryEntry, DiscoveryHeader, SecureChannel, SubsystemType, TransportType,
        discovery_entries,
    };

    fn sample_discovery_page(numrec: u64, there: u16) -> Vec<u8> {
        let header = DiscoveryHeader::zeroed().with(|header| header.genctr(9).numrec(numrec));
        let entry = |portid| {
            DiscoveryEntry::zeroed().with(|entry| {
                entry.portid(portid).trtype(TransportType::Tcp).subtype(SubsystemType::Nvm)
            })
        };
        let entries = (0..there).flat_map(|portid| entry(portid).as_bytes().to_vec());
        header.as_bytes().iter().copied().chain(entries).collect()
    }

    #[test]
    fn discovery_entries_are_bounded_by_count_and_length() {
        let read =
            |page: &[u8]| discovery_entries(page).map(|entry| entry.portid()).collect::<Vec<_>>();
        assert_eq!(read(&sample_discovery_page(3, 3)), [0, 1, 2]);
        assert_eq!(read(&sample_discovery_page(2, 3)), [0, 1]);
        assert_eq!(read(&sample_discovery_page(u64::MAX, 2)), [0, 1]);
        assert_eq!(read(&sample_discovery_page(3, 3)[..1024 + 2047]), [0]);
        assert!(read(&[0xff; 1023]).is_empty());
    }

    #[test]
    fn trsvcid_must_be_a_decimal_port() {
        let port = |text: &str| {
            DiscoveryEntry::zeroed().with(|entry| entry.trsvcid(Ascii::new(text))).tcp_port()
        };
        assert_eq!((port("4420"), port("65535"), port("1")), (Some(4420), Some(65535), Some(1)));
        for text in ["", "0", "65536", "+5", "0x10", "44 20", "nvme"] {
            assert_eq!(port(text), None, "{text}");
        }
    }

    #[test]
    fn treq_and_eflags_are_at_their_offsets() {
        let entry = DiscoveryEntry::zeroed().with(|entry| {
            entry
                .secure_channel(SecureChannel::NotRequired)
                .disable_sq_flow_control(true)
                .persistent(true)
        });
        assert_eq!((entry.treq(), entry.eflags()), (0b110, 0b10));
        assert_eq!(entry.as_bytes()[3], 0b110);
    }
}
