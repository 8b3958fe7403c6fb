//! Identity of a TLS PSK: which host and which subsystem it is for (TCP 1.1 §3.6.1.3).

use tenmil_nvme_auth::PskKind;

/// Parts of an identity, `NVMe1R01 HOSTNQN SUBNQN DIGEST`; version 0 has no digest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::tcp) struct PskIdentity<'a> {
    pub(in crate::tcp) text: &'a str,
    pub(in crate::tcp) kind: PskKind,
    pub(in crate::tcp) host_nqn: &'a str,
    pub(in crate::tcp) subsystem_nqn: &'a str,
}

impl<'a> PskIdentity<'a> {
    /// Parses an identity. `None` if it has another form, which no key of this target has.
    pub(in crate::tcp) fn parse(text: &'a str) -> Option<Self> {
        let mut parts = text.split(' ');
        let (prefix, host_nqn, subsystem_nqn) = (parts.next()?, parts.next()?, parts.next()?);
        let digest = parts.next();
        let (version, kind) = match prefix.as_bytes() {
            [b'N', b'V', b'M', b'e', version, kind, b'0', b'1' | b'2'] => (version, kind),
            _ => return None,
        };
        let has_digest = match version {
            b'0' => false,
            b'1' => true,
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
        is_complete.then_some(Self { text, kind, host_nqn, subsystem_nqn })
    }
}

#[cfg(test)]
mod tests {
    use tenmil_nvme_auth::PskKind;

    use super::PskIdentity;

    #[test]
    fn identity_names_host_and_subsystem() {
        for (text, kind) in [
            ("NVMe0R01 nqn.2026-01.a:h nqn.2026-01.b:s", PskKind::Retained),
            ("NVMe1R02 nqn.2026-01.a:h nqn.2026-01.b:s AAAA=", PskKind::Retained),
            ("NVMe1G01 nqn.2026-01.a:h nqn.2026-01.b:s AAAA=", PskKind::Generated),
        ] {
            let identity = PskIdentity::parse(text).unwrap();
            assert_eq!(identity.kind, kind);
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
