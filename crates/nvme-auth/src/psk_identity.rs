//! Identity of a TLS PSK: which host and which subsystem it is for (TCP 1.1 §3.6.1.3).

use crate::{Hash, IdentityVersion, PskKind};

/// Parts of an identity, `NVMe1R01 HOSTNQN SUBNQN DIGEST`; version 0 has no digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PskIdentity<'a> {
    /// The identity.
    pub text: &'a str,
    /// Its version.
    pub version: IdentityVersion,
    /// Origin of the key.
    pub kind: PskKind,
    /// Hash of the handshake, which decides the length of the key.
    pub hash: Hash,
    /// Host NQN.
    pub host_nqn: &'a str,
    /// Subsystem NQN.
    pub subsystem_nqn: &'a str,
}

impl<'a> PskIdentity<'a> {
    /// Parses an identity. `None` if it has another form, which no key of NVMe/TCP has.
    #[must_use]
    pub fn parse(text: &'a str) -> Option<Self> {
        let mut parts = text.split(' ');
        let (prefix, host_nqn, subsystem_nqn) = (parts.next()?, parts.next()?, parts.next()?);
        let digest = parts.next();
        let (version, kind, hash) = match prefix.as_bytes() {
            [b'N', b'V', b'M', b'e', version, kind, b'0', b'1'] => (version, kind, Hash::Sha256),
            [b'N', b'V', b'M', b'e', version, kind, b'0', b'2'] => (version, kind, Hash::Sha384),
            _ => return None,
        };
        let (version, has_digest) = match version {
            b'0' => (IdentityVersion::Zero, false),
            b'1' => (IdentityVersion::One, true),
            _ => return None,
        };
        let kind = match kind {
            b'R' => PskKind::Retained,
            b'G' => PskKind::Generated,
            _ => return None,
        };
        let is_complete = digest.is_some() == has_digest
            && parts.next().is_none()
            && [Some(host_nqn), Some(subsystem_nqn), digest].iter().all(|part| *part != Some(""));
        is_complete.then_some(Self { text, version, kind, hash, host_nqn, subsystem_nqn })
    }
}

#[cfg(test)]
mod tests {
    use super::PskIdentity;
    use crate::{Hash, IdentityVersion, PskKind};

    #[test]
    fn identity_names_host_and_subsystem() {
        use IdentityVersion::{One, Zero};
        for (prefix, digest, expected) in [
            ("NVMe0R01", "", (Zero, PskKind::Retained, Hash::Sha256)),
            ("NVMe1R02", " AAAA=", (One, PskKind::Retained, Hash::Sha384)),
            ("NVMe1G01", " AAAA=", (One, PskKind::Generated, Hash::Sha256)),
        ] {
            let text = format!("{prefix} nqn.2026-01.a:h nqn.2026-01.b:s{digest}");
            let identity = PskIdentity::parse(&text).unwrap();
            assert_eq!((identity.version, identity.kind, identity.hash), expected);
            assert_eq!(identity.text, text);
            assert_eq!(
                (identity.host_nqn, identity.subsystem_nqn),
                ("nqn.2026-01.a:h", "nqn.2026-01.b:s")
            );
        }
    }

    #[test]
    fn identity_of_another_form_is_not_parsed() {
        for text in [
            "",
            "NVMe0R01",
            "NVMe0R01 h",
            "NVMe0R01 h s digest",
            "NVMe1R01 h s",
            "NVMe1R01 h s ",
            "NVMe1R01 h s d e",
            "NVMe0R01  s",
            "NVMe0R03 h s",
            "NVMe0R00 h s",
            "NVMe2R01 h s d",
            "NVMe1X01 h s d",
            "nvme1R01 h s d",
            "NVMe1R01\th\ts\td",
        ] {
            assert_eq!(PskIdentity::parse(text), None, "{text}");
        }
    }
}
