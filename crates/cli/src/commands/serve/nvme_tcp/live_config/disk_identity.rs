//! Disk identity of a namespace, which ties reservations to the disk.
//!
//! | URI | identity |
//! |---|---|
//! | `file:` of a regular file | its inode and creation time: a renamed file is the same, a copied or restored one is another |
//! | `file:` of a block device | world-wide name, serial number or UUID, and the partition; of a loop device its backing file |
//! | `volume:` | the pool, by the devices below it, and the volume's UUID |
//! | `tcp:`, `pcie:`, `vfio-user:` | the namespace's UUID, NGUID or EUI-64, else the controller's serial number and the NSID |
//! | `rbd:` | cluster, pool, image and snapshot by their identifiers: a renamed image is the same |
//! | `mirror:` | the mirror's own UUID, whichever legs are present, in any order |
//! | stacked devices | the identities of the devices below, in the same order and composed in the same way |
//! | `ram:`, `null:`, files on FUSE | the URI: the disk itself has no identity |
//! | a namespace of `tenmil serve` | the URI: its UUID is derived from the NQN, which other targets may share |
//!
//! The UUID that hosts see derives from the subsystem NQN and the NSID. It is not used here, because
//! the NSID must not decide which disk the reservations belong to. Device numbers of file systems and
//! block devices are not used either, because they may change at the next boot.

use std::convert::Infallible;
use std::path::Path;

use tenmil_block::uri::Uri;
use tenmil_linux::device_users::persistent_identity;
use tenmil_linux::kernel_files::KernelFiles;

/// The identity of the device at `uri`, on one line. `names` holds the identities of open devices, as
/// in [`tenmil_block::OpenedDevice::identities`].
pub(super) fn disk_identity(uri: &Uri, names: &DeviceIdentities) -> String {
    let from_root = |(uri, name): &(Uri, String)| (uri.clone().with_absolute_paths(), name.clone());
    let names: Vec<_> =
        names.iter().filter(|(_, name)| is_persistent_identity(name)).map(from_root).collect();
    with_identities_for_names(uri.clone().with_absolute_paths(), &names).to_string()
}

/// Identities of open devices by URI.
type DeviceIdentities = [(Uri, String)];

/// Whether an identity stays the same when the target that exports the device restarts.
fn is_persistent_identity(name: &str) -> bool {
    !name.contains(tenmil_nvme_host::INSTANCE)
}

/// The identity of an open device, also if it was opened read-only.
fn identity_of_open_device<'a>(uri: &Uri, names: &'a DeviceIdentities) -> Option<&'a str> {
    let to_read = uri.clone().read_only();
    let found = names.iter().find(|(named, _)| named == uri || *named == to_read);
    found.map(|(_, name)| name.as_str())
}

/// The URI with the name of each file and device replaced by its identity.
fn with_identities_for_names(uri: Uri, names: &DeviceIdentities) -> Uri {
    match (uri.scheme(), uri.children()) {
        ("file", _) => {
            match persistent_identity(&KernelFiles::live_system(), Path::new(uri.path())) {
                Some(mark) => Uri::new("file", mark),
                None => Uri::new("file", uri.path()),
            }
        }
        // These devices pass blocks through unchanged.
        ("delay" | "fault" | "device", [below]) => with_identities_for_names(below.clone(), names),
        ("mirror", _) if let Some(uuid) = identity_of_open_device(&uri, names) => {
            Uri::new("mirror", uuid)
        }
        ("volume", [below]) => {
            let volume = identity_of_open_device(&uri, names).unwrap_or(uri.path());
            Uri::with_child("volume", with_identities_for_names(below.clone(), names), volume)
        }
        (_, []) if let Some(name) = identity_of_open_device(&uri, names) => {
            Uri::new("namespace", name)
        }
        _ => {
            let Ok(known) = uri.try_map_children(|below| {
                Ok::<_, Infallible>(with_identities_for_names(below, names))
            });
            known
        }
    }
}

#[cfg(test)]
mod tests {
    use super::disk_identity;

    fn identity_of_text(uri: &str) -> String {
        disk_identity(&uri.parse().unwrap(), &[])
    }

    fn disk_identity_with_open_devices(uri: &str, names: &[(&str, &str)]) -> String {
        let names: Vec<_> =
            names.iter().map(|(uri, name)| (uri.parse().unwrap(), (*name).into())).collect();
        disk_identity(&uri.parse().unwrap(), &names)
    }

    #[test]
    fn namespace_is_identified_by_its_id_and_a_volume_by_its_uuid_in_its_pool() {
        let [one, two] = ["tcp://127.0.0.1:4420/nqn", "tcp://localhost:4420/nqn?ns=1"];
        let nguid = "eui.a5a5";
        assert_eq!(
            disk_identity_with_open_devices(one, &[(one, nguid)]),
            disk_identity_with_open_devices(two, &[(two, nguid)])
        );
        assert_ne!(
            disk_identity_with_open_devices(one, &[(one, nguid)]),
            disk_identity_with_open_devices(one, &[(one, "eui.a5a6")])
        );
        let derived = [(one, "uuid.1, instance 7")];
        assert_eq!(
            disk_identity_with_open_devices(one, &derived),
            identity_of_text(one),
            "the next start of the target has another"
        );
        let volume = |uuid: &str| {
            let uri = format!("volume:[{one}]/db");
            disk_identity_with_open_devices(&uri, &[(one, nguid), (&uri, uuid)])
        };
        assert_ne!(volume("1"), volume("2"), "one of the same name that was made anew");
        assert_ne!(volume("1"), identity_of_text(&format!("volume:[{one}]/db")));
    }

    #[test]
    fn file_is_identified_by_its_inode_and_not_by_its_name() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name).display().to_string();
        for name in ["a", "b"] {
            std::fs::File::create_new(path(name)).unwrap();
        }
        let [a, b, moved] = ["a", "b", "moved"].map(path);
        let (of_a, of_b) =
            (identity_of_text(&format!("file:{a}")), identity_of_text(&format!("file:{b}")));
        let striped = |one: &str, two: &str| {
            identity_of_text(&format!("stripe:[file:{one}],[file:{two}]?chunk=64k"))
        };
        let of_both = striped(&a, &b);
        assert_ne!(of_a, of_b);
        assert_eq!(
            identity_of_text(&format!("delay:[file:{a}?size=8&engine=threads]?read=1us")),
            of_a
        );
        assert_ne!(striped(&b, &a), of_both);
        let volume =
            |name: &str| identity_of_text(&format!("volume:[file:{a}]/{name}?metadata-cache=1m"));
        assert_ne!(volume("x"), volume("y"));
        std::fs::rename(&a, &moved).unwrap();
        std::fs::rename(&b, &a).unwrap();
        assert_eq!(
            (identity_of_text(&format!("file:{moved}")), identity_of_text(&format!("file:{a}"))),
            (of_a, of_b)
        );
        assert_eq!(striped(&moved, &a), of_both);
        std::fs::copy(&moved, path("copy")).unwrap();
        std::fs::rename(path("copy"), &moved).unwrap();
        assert_ne!(striped(&moved, &a), of_both, "a restored file is another");
    }

    #[test]
    fn mirror_identity_does_not_depend_on_present_legs() {
        let whole = "mirror:[file:/a],[file:/b]";
        let of = |uri: &str, uuid: &str| disk_identity_with_open_devices(uri, &[(uri, uuid)]);
        for other in ["mirror:[file:/b],[file:/a]", "mirror:[file:/a]?degraded=yes"] {
            assert_eq!(of(other, "1-2"), of(whole, "1-2"));
            let volume = |mirror: &str| {
                disk_identity_with_open_devices(&format!("volume:[{mirror}]/v"), &[(mirror, "1-2")])
            };
            assert_eq!(volume(other), volume(whole));
        }
        assert_ne!(of(whole, "1-3"), of(whole, "1-2"));
    }

    #[test]
    fn device_without_identity_is_identified_by_its_name() {
        assert_eq!(identity_of_text("ram:16m"), "ram:16m");
        assert_ne!(identity_of_text("ram:16m"), identity_of_text("ram:8m"));
    }
}
