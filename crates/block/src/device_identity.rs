//! Identity of a device: two URIs are compared by the device they lead to, not by their text.
//!
//! | device | identity |
//! |---|---|
//! | `file:` of a regular file | file system and inode |
//! | `file:` of a block device | its world-wide name, the UUID of a device-mapper device or an array, else its device number |
//! | a loop device | the bytes of its file, through any number of loop devices |
//! | a partition | the bytes of its disk |
//! | `tcp:`, `pcie:`, `vfio-user:` | the world-wide name of its namespace once it is open; before, its URI |
//! | `rbd:` | cluster, pool, image and snapshot by their identifiers once it is open; before, its URI |
//! | `emu:` over a file | the file: it is the only namespace, and its blocks are the file's |
//! | `ram:`, `null:`, a model of one, `emu:` over one | nothing: each open creates another one |
//! | what stands on others | all of them |
//!
//! Contract: [`is_same`](DeviceIdentity::is_same_device) is true only if both are the same bytes of the same
//! devices, composed in the same way.
//! [`describe_overlap`](DeviceIdentity::describe_overlap) returns `None` if no overlap is known on this machine. A local
//! file and the namespace of a target that serves it have no identity in common. A namespace that the
//! kernel attached and the same one over `tcp:` do, if the kernel shows its name.
//! A writer therefore also needs a lock, a fence or a reservation on the device itself; the identity
//! serves to reject a conflict early and by name.

use std::convert::Infallible;
use std::fmt;
use std::path::Path;

use tenmil_linux::device_users::{StorageExtent, StorageExtents, StorageId};
use tenmil_linux::kernel_files::KernelFiles;

use crate::open::OpenedDevice;
use crate::uri::Uri;

/// The identity of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceIdentity {
    /// The URI, with the identity of each device in place of its name.
    key: String,
    leaves: Vec<LeafDevice>,
}

/// A device without devices below it.
#[derive(Clone, Debug, PartialEq, Eq)]
enum LeafDevice {
    /// A file, a local block device, or a namespace with a world-wide name.
    Known(String, StorageExtents),
    /// A name without further identity.
    Name(String),
}

/// World-wide names of open devices, by their URIs.
type WorldWideNames = [(Uri, String)];

/// Schemes whose blocks are private to the process.
const PRIVATE: [&str; 3] = ["ram", "null", "model"];
/// Schemes that pass the blocks of the device below through unchanged.
const TRANSPARENT: [&str; 2] = ["delay", "fault"];

impl DeviceIdentity {
    /// The identity as far as it is known without opening the device. Only files of the kernel are read.
    pub fn of_uri(uri: &Uri) -> Self {
        Self::from_system(&KernelFiles::live_system(), uri, &[])
    }

    /// The identity of an open device.
    pub fn of_opened(uri: &Uri, opened: &OpenedDevice) -> Self {
        Self::of_stack_on_names(uri, &opened.identities)
    }

    /// The identity of a device stacked on open ones; `names` are their [`OpenedDevice::identities`].
    pub fn of_stack_on_names(uri: &Uri, names: &[(Uri, String)]) -> Self {
        Self::from_system(&KernelFiles::live_system(), uri, names)
    }

    fn from_system(machine: &KernelFiles, uri: &Uri, names: &WorldWideNames) -> Self {
        let mut leaves = Vec::new();
        let key =
            replace_names_collect_leaves(machine, uri.clone(), names, &mut leaves).to_string();
        Self { key, leaves }
    }

    /// A key that is equal for equal devices only. It is valid in records and for comparison by other
    /// processes of this machine.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Whether both are the same device.
    pub fn is_same_device(&self, other: &Self) -> bool {
        self.key == other.key && !self.leaves.is_empty()
    }

    /// Description of the blocks that both share, if known: a write to one may change the other.
    pub fn describe_overlap(&self, other: &Self) -> Option<String> {
        self.leaves.iter().find_map(|leaf| {
            let meets = other.leaves.iter().find(|other| leaf.overlaps(other));
            meets.map(|other| match leaf.name() == other.name() {
                true => leaf.name().to_owned(),
                false => format!("{} and {}", leaf.name(), other.name()),
            })
        })
    }
}

impl LeafDevice {
    fn name(&self) -> &str {
        match self {
            Self::Known(name, _) | Self::Name(name) => name,
        }
    }

    fn overlaps(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Known(_, one), Self::Known(_, two)) => one.shared_extent_with(two).is_some(),
            (Self::Name(one), Self::Name(two)) => one == two,
            _ => false,
        }
    }
}

/// Replaces each device name in the URI by its identity, and collects the devices at the bottom.
fn replace_names_collect_leaves(
    machine: &KernelFiles,
    uri: Uri,
    names: &WorldWideNames,
    leaves: &mut Vec<LeafDevice>,
) -> Uri {
    let scheme = uri.scheme();
    if scheme == "file" {
        return identity_uri_of_file(machine, &uri, leaves);
    }
    if scheme == "emu" {
        return match uri.path().strip_prefix("file:") {
            Some(path) => identity_uri_of_file(machine, &Uri::new("file", path), leaves),
            None => uri,
        };
    }
    if uri.children().is_empty() {
        if let Some((_, name)) = names.iter().find(|(named, _)| *named == uri) {
            return identity_uri_of_named_device(&uri, name, leaves);
        }
        if !PRIVATE.contains(&scheme) {
            leaves.push(LeafDevice::Name(uri.to_string()));
        }
        return uri;
    }
    if let ([below], true) = (uri.children(), TRANSPARENT.contains(&scheme)) {
        return replace_names_collect_leaves(machine, below.clone(), names, leaves);
    }
    if scheme == "volume"
        && let [below] = uri.children()
    {
        // Volumes of one pool share no block. The size of the metadata cache is irrelevant.
        let below = replace_names_collect_leaves(machine, below.clone(), names, &mut Vec::new());
        let known = Uri::with_child("volume", below, uri.path());
        leaves.push(LeafDevice::Name(known.to_string()));
        return known;
    }
    let Ok(known) = uri.try_map_children(|below| {
        Ok::<_, Infallible>(replace_names_collect_leaves(machine, below, names, leaves))
    });
    known
}

/// A device with a world-wide name, as a whole.
fn identity_uri_of_named_device(uri: &Uri, name: &str, leaves: &mut Vec<LeafDevice>) -> Uri {
    let whole = StorageExtent { medium: StorageId::Named(name.to_owned()), bytes: 0..u64::MAX };
    leaves.push(LeafDevice::Known(
        uri.to_string(),
        StorageExtents { own: Some(whole), below: Vec::new() },
    ));
    Uri::new("medium", name)
}

fn identity_uri_of_file(machine: &KernelFiles, uri: &Uri, leaves: &mut Vec<LeafDevice>) -> Uri {
    let extents = StorageExtents::of_path(machine, Path::new(uri.path()));
    let Some(own) = &extents.own else {
        // The file does not exist: its absolute path is its identity.
        let plain = Uri::new("file", uri.path()).with_absolute_paths();
        leaves.push(LeafDevice::Name(plain.to_string()));
        return plain;
    };
    let known = storage_extent_uri(own);
    let name = match partition_guid(machine, uri.path()) {
        Some(uuid) => format!("{} (PARTUUID {uuid})", uri.path()),
        None => uri.path().to_owned(),
    };
    leaves.push(LeafDevice::Known(name, extents));
    known
}

/// The bytes of a device: two partitions of one disk are two devices.
fn storage_extent_uri(own: &StorageExtent) -> Uri {
    let StorageExtent { medium, bytes } = own;
    let part = match (bytes.start, bytes.end) {
        (0, u64::MAX) => String::new(),
        (start, end) => format!(", bytes {start} to {end}"),
    };
    Uri::new("medium", format!("{medium}{part}"))
}

/// The GUID of a partition, as its table has it. It is neither shown nor compared: a copied disk has the same
/// ones, and a partition shares its bytes with the disk, which has none.
fn partition_guid(machine: &KernelFiles, path: &str) -> Option<String> {
    let node = path.strip_prefix("/dev/")?;
    // The name of the node, or of what a link such as /dev/disk/by-id/… leads to.
    let name = machine.link_target_name(path.trim_start_matches('/'));
    let name = name.or_else(|| node.rsplit('/').next().map(str::to_owned))?;
    let uevent = machine.read_trimmed(&format!("sys/class/block/{name}/uevent"))?;
    uevent.lines().find_map(|line| line.strip_prefix("PARTUUID=").map(str::to_owned))
}

impl fmt::Display for DeviceIdentity {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.key)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use tenmil_linux::device_users::{StorageExtent, StorageId};
    use tenmil_linux::kernel_files::KernelFiles;

    use super::{DeviceIdentity, storage_extent_uri as medium_of};

    fn identity_of(uri: &str) -> DeviceIdentity {
        DeviceIdentity::of_uri(&uri.parse().unwrap())
    }

    #[test]
    fn device_identity_is_independent_of_the_path_spelling() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name).display().to_string();
        for name in ["a", "b"] {
            std::fs::File::create_new(path(name)).unwrap();
        }
        std::os::unix::fs::symlink(path("a"), path("link")).unwrap();
        std::fs::hard_link(path("a"), path("hard")).unwrap();
        let [a, b, link, hard] = ["a", "b", "link", "hard"].map(path);
        let plain = identity_of(&format!("file:{a}"));
        for same in [
            format!("file:{link}"),
            format!("file:{hard}?engine=threads&size=1m"),
            format!("delay:[file:{a}]?read=1us"),
            format!("emu:file:{a}"),
            format!("emu:file:{link}?queue-size=64&block=4k"),
        ] {
            assert!(identity_of(&same).is_same_device(&plain), "{same}");
        }
        for other in [format!("file:{b}"), format!("file:{}", path("none"))] {
            assert!(
                !identity_of(&other).is_same_device(&plain)
                    && identity_of(&other).describe_overlap(&plain).is_none(),
                "{other}"
            );
        }
        let stripe = |second: &str, chunk: &str| {
            identity_of(&format!("stripe:[file:{a}],[file:{second}]?chunk={chunk}"))
        };
        assert!(stripe(&b, "64k").is_same_device(&stripe(&format!("{b}?engine=threads"), "64k")));
        assert!(!stripe(&b, "64k").is_same_device(&stripe(&b, "128k")), "blocks lie elsewhere");
        let shared = stripe(&b, "64k").describe_overlap(&identity_of(&format!("file:{hard}")));
        assert_eq!(shared, Some(format!("{a} and {hard}")));
        let inner =
            |name: &str, more: &str| identity_of(&format!("volume:[file:{link}]/{name}{more}"));
        assert!(inner("x", "?metadata-cache=1m").is_same_device(&inner("x", "")));
        assert!(
            inner("x", "").describe_overlap(&inner("y", "")).is_none(),
            "two volumes of one pool"
        );
    }

    #[test]
    fn namespace_has_one_identity_for_every_uri() {
        let [one, two] = ["tcp://127.0.0.1:4420/nqn", "tcp://localhost:4420/nqn?ns=1"];
        let opened = |uri: &str, names: &[(&str, &str)]| {
            let names: Vec<_> =
                names.iter().map(|(uri, name)| (uri.parse().unwrap(), (*name).into())).collect();
            DeviceIdentity::from_system(&KernelFiles::live_system(), &uri.parse().unwrap(), &names)
        };
        let first = opened(one, &[(one, "uuid.1")]);
        assert!(first.is_same_device(&opened(two, &[(two, "uuid.1")])));
        assert!(!first.is_same_device(&opened(two, &[(two, "uuid.2")])));
        let striped = format!("stripe:[{two}],[ram:1m]");
        let shared = opened(&striped, &[(two, "uuid.1")]).describe_overlap(&first);
        assert_eq!(shared, Some(format!("{two} and {one}")));
        assert!(opened(&striped, &[(two, "uuid.2")]).describe_overlap(&first).is_none());
    }

    #[test]
    fn partition_is_shown_with_its_guid() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        for directory in ["dev/disk/by-id", "sys/class/block/sda1", "sys/class/block/sda"] {
            std::fs::create_dir_all(at(directory)).unwrap();
        }
        let text = "MAJOR=8\nDEVTYPE=partition\nPARTN=1\nPARTUUID=1b2c\n";
        for (disk, text) in [("sda1", text), ("sda", "MAJOR=8\nDEVTYPE=disk\n")] {
            let path = at("sys/class/block").join(disk).join("uevent");
            std::fs::File::create_new(path).unwrap().write_all(text.as_bytes()).unwrap();
        }
        std::os::unix::fs::symlink("../../sda1", at("dev/disk/by-id/ssd-part1")).unwrap();
        let machine = KernelFiles::under_root(root.path());
        let found = |path: &str| super::partition_guid(&machine, path);
        for path in ["/dev/sda1", "/dev/disk/by-id/ssd-part1"] {
            assert_eq!(found(path).as_deref(), Some("1b2c"), "{path}");
        }
        assert_eq!((found("/dev/sda"), found("/srv/sda1")), (None, None));
    }

    #[test]
    fn partitions_of_one_disk_are_distinct_devices() {
        let of = |bytes| {
            let medium = StorageId::Named("eui.1".into());
            medium_of(&StorageExtent { medium, bytes }).to_string()
        };
        let keys = [of(0..u64::MAX), of(0..4096), of(4096..8192), of(4096..u64::MAX)];
        for (index, key) in keys.iter().enumerate() {
            assert!(!keys[..index].contains(key), "{keys:?}");
        }
        assert_eq!(of(4096..8192), keys[2]);
    }

    #[test]
    fn ram_devices_are_private() {
        assert!(!identity_of("emu:ram").is_same_device(&identity_of("emu:ram")));
        assert!(identity_of("emu:ram").describe_overlap(&identity_of("emu:ram")).is_none());
        assert!(
            !identity_of("ram:1m").is_same_device(&identity_of("ram:1m"))
                && identity_of("ram:1m").describe_overlap(&identity_of("ram:1m")).is_none()
        );
        let [one, two] =
            ["tcp://127.0.0.1:4420/nqn", "tcp://127.0.0.1:4420/nqn?ns=2"].map(identity_of);
        assert!(
            one.is_same_device(&one)
                && !one.is_same_device(&two)
                && one.describe_overlap(&two).is_none()
        );
    }
}
