//! World-wide name of a namespace, the same through every controller and path.
//!
//! | available | name |
//! |---|---|
//! | a UUID, an NGUID or an EUI-64 | `uuid.…`, `eui.…`, as in Linux's `wwid` of the block device |
//! | none of them, and a serial number | `nvme.VID-SN-MN-NSID`, as in Linux |
//! | none of these, and an NQN | `nqn.…, namespace NSID` |
//!
//! A UUID that `tenmil serve` derived from NQN and NSID is the same on every target with that NQN. Such a
//! namespace has a name only together with its cache instance.

use std::fmt::Write as _;

use tenmil_wire::derived_uuid::derived_uuid;

use super::Namespace;
use crate::controller::Identity;

/// Separator before the cache instance in a name. Such a name is valid until the target that serves the
/// namespace restarts.
pub const INSTANCE: &str = ", instance ";

impl Namespace {
    /// World-wide name, if there is one. `controller` is a controller of this namespace.
    pub fn world_wide_name(&self, controller: &Identity) -> Option<String> {
        let page = &controller.page;
        let nqn = page.subnqn().to_string();
        let mut name = match self.identifier_name() {
            Some(name) => name,
            None if !page.sn().trimmed().is_empty() => format!(
                "nvme.{:04x}-{}-{}-{:08x}",
                page.vid(),
                hex(page.sn().trimmed()),
                hex(page.mn().trimmed()),
                self.id
            ),
            None if !nqn.is_empty() => format!("{nqn}, namespace {}", self.id),
            None => return None,
        };
        let is_derived = self.names.uuid == derived_uuid(&nqn, self.id);
        match self.cache_instance {
            Some(instance) if is_derived => {
                name += &format!("{INSTANCE}{}", hex(&instance.0));
                Some(name)
            }
            None if is_derived => None,
            _ => Some(name),
        }
    }

    fn identifier_name(&self) -> Option<String> {
        let super::NamespaceIds { eui64, nguid, uuid } = self.names;
        if uuid != [0; 16] {
            let digits = hex(&uuid);
            let parts =
                [&digits[..8], &digits[8..12], &digits[12..16], &digits[16..20], &digits[20..]];
            return Some(format!("uuid.{}", parts.join("-")));
        }
        if nguid != [0; 16] {
            return Some(format!("eui.{}", hex(&nguid)));
        }
        (eui64 != [0; 8]).then(|| format!("eui.{}", hex(&eui64)))
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use tenmil_wire::cache_instance::CacheInstance;
    use tenmil_wire::derived_uuid::derived_uuid;
    use tenmil_wire::field_type::Ascii;
    use tenmil_wire::identify::namespace::LbaFormat;
    use tenmil_wire::identify::{IdentifyController, IdentifyNamespace};

    use crate::{Identity, Namespace, NamespaceIds};

    const NQN: &str = "nqn.2026-01.org.tenmil:disk";

    fn namespace_with_ids(names: NamespaceIds) -> Namespace {
        let page = IdentifyNamespace::zeroed()
            .with(|id| id.nsze(1000).ncap(1000).lbaf(0, LbaFormat::new(12, 0)));
        Namespace { names, ..Namespace::from_identify(1, &page, None, &[]).unwrap() }
    }

    fn controller_with_serial(serial: &str) -> Identity {
        let page = IdentifyController::zeroed().with(|id| {
            let id = id.sqes(0x66).cqes(0x44).vid(0x1b36).sn(Ascii::new(serial));
            id.mn(Ascii::new("M1")).subnqn(Ascii::nul_padded(NQN))
        });
        Identity::from_identify(page, false).unwrap()
    }

    #[test]
    fn world_wide_name_follows_the_kernel_wwid() {
        let (uuid, nguid, eui64) = ([0x5a; 16], [0xa5; 16], [0xe1; 8]);
        let none = NamespaceIds::default();
        for (names, serial, expected) in [
            (
                NamespaceIds { uuid, nguid, eui64 },
                "S1",
                "uuid.5a5a5a5a-5a5a-5a5a-5a5a-5a5a5a5a5a5a",
            ),
            (NamespaceIds { nguid, eui64, ..none }, "S1", "eui.a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5a5"),
            (NamespaceIds { eui64, ..none }, "S1", "eui.e1e1e1e1e1e1e1e1"),
            (none, "S1", "nvme.1b36-5331-4d31-00000001"),
            (none, "", "nqn.2026-01.org.tenmil:disk, namespace 1"),
        ] {
            let found = namespace_with_ids(names).world_wide_name(&controller_with_serial(serial));
            assert_eq!(found.as_deref(), Some(expected));
        }
    }

    #[test]
    fn uuid_shared_by_targets_is_not_a_name_by_itself() {
        let names = NamespaceIds { uuid: derived_uuid(NQN, 1), ..NamespaceIds::default() };
        let mut namespace = namespace_with_ids(names);
        assert_eq!(namespace.world_wide_name(&controller_with_serial("S1")), None);
        let mut named = |byte| {
            namespace.cache_instance = Some(CacheInstance([byte; 16]));
            namespace.world_wide_name(&controller_with_serial("S1")).unwrap()
        };
        assert_eq!(named(1), named(1));
        assert_ne!(named(1), named(2), "two targets serve two disks");
    }
}
