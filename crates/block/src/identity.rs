//! Which device a name means: two names are compared by what they lead to, never by how they are spelled.
//!
//! | device | what it is known by |
//! |---|---|
//! | `file:` of a regular file | file system and inode |
//! | `file:` of a block device | its world-wide name (an NVMe namespace: NGUID, EUI-64 or UUID), the UUID of a mapped device or an array, else its number |
//! | a loop device | the bytes of its file, through any number of loop devices |
//! | a partition | the bytes of its disk |
//! | `tcp:`, `pcie:`, `vfio-user:` | the world-wide name of its namespace once it is open; before, its URI |
//! | `emu:` over a file | the file: it is the only namespace, and its blocks are the file's |
//! | `ram:`, `null:`, a model of one, `emu:` over one | nothing: whoever opens one has another |
//! | what stands on others | all of them |
//!
//! Contract: [`is_same`](DeviceIdentity::is_same) is true only if both are the same bytes of the same
//! media, made up in the same way. [`overlap`](DeviceIdentity::overlap) is `None` only as far as can be
//! known on this machine: a file here and the namespace of a target that serves it have nothing in common
//! that could be compared; a namespace that the kernel attached and the same one over `tcp:` do, where the
//! kernel shows its name. So who writes to a device takes a lock, a fence or a reservation on the medium
//! as well; the identity serves to refuse early and by name.

use std::convert::Infallible;
use std::fmt;
use std::path::Path;

use host::holders::{Extents, MediumExtent, MediumId};
use host::machine::Machine;

use crate::open::Opened;
use crate::uri::Uri;

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceIdentity {
    /// The URI with what each device is in place of how it was named.
    key: String,
    leaves: Vec<Leaf>,
}

/// A device that stands on no other.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Leaf {
    /// A file, a block device of this machine, or a namespace with a world-wide name.
    Known(String, Extents),
    /// A name of which nothing more is known.
    Name(String),
}

/// World-wide names of devices that are open, by their URIs.
type Names = [(Uri, String)];

/// Kinds whose blocks nobody else can reach.
const PRIVATE: [&str; 3] = ["ram", "null", "model"];
/// Kinds that pass the blocks of the one they stand on through as they are.
const TRANSPARENT: [&str; 2] = ["delay", "fault"];

impl DeviceIdentity {
    /// As far as it can be known without opening the device. What is looked at are files of the kernel.
    pub fn of_uri(uri: &Uri) -> Self {
        Self::look(&Machine::this(), uri, &[])
    }

    /// That of a device that is open.
    pub fn of_opened(uri: &Uri, opened: &Opened) -> Self {
        Self::with_names(uri, &opened.identities)
    }

    /// That of a device that stands on some that are open: their [`Opened::identities`].
    pub fn with_names(uri: &Uri, names: &[(Uri, String)]) -> Self {
        Self::look(&Machine::this(), uri, names)
    }

    fn look(machine: &Machine, uri: &Uri, names: &Names) -> Self {
        let mut leaves = Vec::new();
        let key = known(machine, uri.clone(), names, &mut leaves).to_string();
        Self { key, leaves }
    }

    /// What two devices have in common that are the same, and no others: for records, and to be compared by
    /// another process of this machine.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Whether both are the same.
    pub fn is_same(&self, other: &Self) -> bool {
        self.key == other.key && !self.leaves.is_empty()
    }

    /// What both have, in words, if that is known: a write to one may change the other.
    pub fn overlap(&self, other: &Self) -> Option<String> {
        self.leaves.iter().find_map(|leaf| {
            let meets = other.leaves.iter().find(|other| leaf.meets(other));
            meets.map(|other| match leaf.name() == other.name() {
                true => leaf.name().to_owned(),
                false => format!("{} and {}", leaf.name(), other.name()),
            })
        })
    }
}

impl Leaf {
    fn name(&self) -> &str {
        match self {
            Self::Known(name, _) | Self::Name(name) => name,
        }
    }

    fn meets(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Known(_, one), Self::Known(_, two)) => one.shared_with(two).is_some(),
            (Self::Name(one), Self::Name(two)) => one == two,
            _ => false,
        }
    }
}

/// The URI with what each device is in place of its name, and those that stand on no other.
fn known(machine: &Machine, uri: Uri, names: &Names, leaves: &mut Vec<Leaf>) -> Uri {
    let scheme = uri.scheme();
    if scheme == "file" {
        return file(machine, &uri, leaves);
    }
    if scheme == "emu" {
        return match uri.path().strip_prefix("file:") {
            Some(path) => file(machine, &Uri::new("file", path), leaves),
            None => uri,
        };
    }
    if uri.children().is_empty() {
        if let Some((_, name)) = names.iter().find(|(named, _)| *named == uri) {
            return named(&uri, name, leaves);
        }
        if !PRIVATE.contains(&scheme) {
            leaves.push(Leaf::Name(uri.to_string()));
        }
        return uri;
    }
    if let ([below], true) = (uri.children(), TRANSPARENT.contains(&scheme)) {
        return known(machine, below.clone(), names, leaves);
    }
    if scheme == "volume"
        && let [below] = uri.children()
    {
        // Two volumes of one pool have no block in common; how much memory its metadata have does not
        // matter.
        let below = known(machine, below.clone(), names, &mut Vec::new());
        let known = Uri::on("volume", below, uri.path());
        leaves.push(Leaf::Name(known.to_string()));
        return known;
    }
    let Ok(known) = uri.try_over(|below| Ok::<_, Infallible>(known(machine, below, names, leaves)));
    known
}

/// A device with a world-wide name, all of it.
fn named(uri: &Uri, name: &str, leaves: &mut Vec<Leaf>) -> Uri {
    let whole = MediumExtent { medium: MediumId::Named(name.to_owned()), bytes: 0..u64::MAX };
    leaves.push(Leaf::Known(uri.to_string(), Extents { own: Some(whole), below: Vec::new() }));
    Uri::new("medium", name)
}

fn file(machine: &Machine, uri: &Uri, leaves: &mut Vec<Leaf>) -> Uri {
    let extents = Extents::of(machine, Path::new(uri.path()));
    let Some(own) = &extents.own else {
        // It is not there: it goes by its name.
        let plain = Uri::new("file", uri.path()).from_root();
        leaves.push(Leaf::Name(plain.to_string()));
        return plain;
    };
    let whole = own.bytes.start == 0 && own.bytes.end == u64::MAX;
    let part = match whole {
        true => String::new(),
        false => format!(", bytes {} to {}", own.bytes.start, own.bytes.end),
    };
    let known = Uri::new("medium", format!("{}{part}", own.medium));
    let name = match part_uuid(machine, uri.path()) {
        Some(uuid) => format!("{} (PARTUUID {uuid})", uri.path()),
        None => uri.path().to_owned(),
    };
    leaves.push(Leaf::Known(name, extents));
    known
}

/// The GUID of a partition, as its table has it. It is shown and compared by nobody: a copied disk has the same
/// ones, and a partition shares its bytes with the disk, which has none.
fn part_uuid(machine: &Machine, path: &str) -> Option<String> {
    let node = path.strip_prefix("/dev/")?;
    // The name of the node, or of what a link such as /dev/disk/by-id/… leads to.
    let name = machine.link(path.trim_start_matches('/'));
    let name = name.or_else(|| node.rsplit('/').next().map(str::to_owned))?;
    let uevent = machine.text(&format!("sys/class/block/{name}/uevent"))?;
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

    use host::machine::Machine;

    use super::DeviceIdentity;

    fn of(uri: &str) -> DeviceIdentity {
        DeviceIdentity::of_uri(&uri.parse().unwrap())
    }

    #[test]
    fn a_device_is_the_same_however_its_files_are_spelled_and_no_other_is() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name).display().to_string();
        for name in ["a", "b"] {
            std::fs::File::create_new(path(name)).unwrap();
        }
        std::os::unix::fs::symlink(path("a"), path("link")).unwrap();
        std::fs::hard_link(path("a"), path("hard")).unwrap();
        let [a, b, link, hard] = ["a", "b", "link", "hard"].map(path);
        let plain = of(&format!("file:{a}"));
        for same in [
            format!("file:{link}"),
            format!("file:{hard}?engine=threads&size=1m"),
            format!("delay:[file:{a}]?read=1us"),
            format!("emu:file:{a}"),
            format!("emu:file:{link}?entries=64&block=4k"),
        ] {
            assert!(of(&same).is_same(&plain), "{same}");
        }
        for other in [format!("file:{b}"), format!("file:{}", path("none"))] {
            assert!(!of(&other).is_same(&plain) && of(&other).overlap(&plain).is_none(), "{other}");
        }
        let stripe = |second: &str, chunk: &str| {
            of(&format!("stripe:[file:{a}],[file:{second}]?chunk={chunk}"))
        };
        assert!(stripe(&b, "64k").is_same(&stripe(&format!("{b}?engine=threads"), "64k")));
        assert!(!stripe(&b, "64k").is_same(&stripe(&b, "128k")), "blocks lie elsewhere");
        let shared = stripe(&b, "64k").overlap(&of(&format!("file:{hard}")));
        assert_eq!(shared, Some(format!("{a} and {hard}")));
        let inner = |name: &str, more: &str| of(&format!("volume:[file:{link}]/{name}{more}"));
        assert!(inner("x", "?cache=1m").is_same(&inner("x", "")));
        assert!(inner("x", "").overlap(&inner("y", "")).is_none(), "two volumes of one pool");
    }

    #[test]
    fn a_namespace_is_one_device_by_every_uri_that_leads_to_it() {
        let [one, two] = ["tcp://127.0.0.1:4420/nqn", "tcp://localhost:4420/nqn?ns=1"];
        let opened = |uri: &str, names: &[(&str, &str)]| {
            let names: Vec<_> =
                names.iter().map(|(uri, name)| (uri.parse().unwrap(), (*name).into())).collect();
            DeviceIdentity::look(&Machine::this(), &uri.parse().unwrap(), &names)
        };
        let first = opened(one, &[(one, "uuid.1")]);
        assert!(first.is_same(&opened(two, &[(two, "uuid.1")])));
        assert!(!first.is_same(&opened(two, &[(two, "uuid.2")])));
        let striped = format!("stripe:[{two}],[ram:1m]");
        let shared = opened(&striped, &[(two, "uuid.1")]).overlap(&first);
        assert_eq!(shared, Some(format!("{two} and {one}")));
        assert!(opened(&striped, &[(two, "uuid.2")]).overlap(&first).is_none());
    }

    #[test]
    fn a_partition_is_shown_with_its_guid_however_it_is_named() {
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
        let machine = Machine::under(root.path());
        let found = |path: &str| super::part_uuid(&machine, path);
        for path in ["/dev/sda1", "/dev/disk/by-id/ssd-part1"] {
            assert_eq!(found(path).as_deref(), Some("1b2c"), "{path}");
        }
        assert_eq!((found("/dev/sda"), found("/srv/sda1")), (None, None));
    }

    #[test]
    fn memory_is_nobody_elses() {
        assert!(!of("emu:ram").is_same(&of("emu:ram")));
        assert!(of("emu:ram").overlap(&of("emu:ram")).is_none());
        assert!(
            !of("ram:1m").is_same(&of("ram:1m")) && of("ram:1m").overlap(&of("ram:1m")).is_none()
        );
        let [one, two] = ["tcp://127.0.0.1:4420/nqn", "tcp://127.0.0.1:4420/nqn?ns=2"].map(of);
        assert!(one.is_same(&one) && !one.is_same(&two) && one.overlap(&two).is_none());
    }
}
