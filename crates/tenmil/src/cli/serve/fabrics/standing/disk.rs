//! What the disk of a namespace is known by, so that reservations stay with it.
//!
//! | URI | identity |
//! |---|---|
//! | `file:` of a regular file | its inode and when it was made: a file that is renamed is the same, a copy or a restored one is another |
//! | `file:` of a block device | world-wide name, serial number or UUID, and the partition; of a loop device its file |
//! | `volume:` | the pool, by what it lies on, and the volume's UUID |
//! | `tcp:`, `pcie:`, `vfio-user:` | the namespace's UUID, NGUID or EUI-64, else the controller's serial number and the namespace's identifier |
//! | `mirror:` | the mirror's own UUID, whichever of its legs are there, in whatever order |
//! | what stands on others | those, in the same order and made up in the same way |
//! | `ram:`, `null:`, files of FUSE | the URI: nothing about the disk itself is known |
//! | a namespace of `tenmil serve` | the URI: its UUID is derived from the NQN, which other targets may have |
//!
//! The UUID that hosts see is made of the subsystem's NQN and the namespace's number, and is not used here:
//! that number is what must not decide whose reservations they are. Neither is the number of a file system
//! or of a block device, which another may have after the next start.

use std::convert::Infallible;
use std::path::Path;

use block::uri::Uri;
use host::holders::lasting_mark;
use host::machine::Machine;

/// The identity of what is served, in a line. Of what is open `names` are known: what
/// [`block::Opened::identities`] has.
pub(super) fn identity(uri: &Uri, names: &Names) -> String {
    let from_root = |(uri, name): &(Uri, String)| (uri.clone().from_root(), name.clone());
    let names: Vec<_> = names.iter().filter(|(_, name)| lasts(name)).map(from_root).collect();
    known(uri.clone().from_root(), &names).to_string()
}

/// Names of devices that are open, by their URIs.
type Names = [(Uri, String)];

/// Whether a name stays when the target that serves the device is started again.
fn lasts(name: &str) -> bool {
    !name.contains(nvme::INSTANCE)
}

/// The name of a device that is open, also if that is to be read only.
fn name_of<'a>(uri: &Uri, names: &'a Names) -> Option<&'a str> {
    let to_read = uri.clone().to_read();
    let found = names.iter().find(|(named, _)| named == uri || *named == to_read);
    found.map(|(_, name)| name.as_str())
}

/// The URI with what each file and device is in place of its name.
fn known(uri: Uri, names: &Names) -> Uri {
    match (uri.scheme(), uri.children()) {
        ("file", _) => match lasting_mark(&Machine::this(), Path::new(uri.path())) {
            Some(mark) => Uri::new("file", mark),
            None => Uri::new("file", uri.path()),
        },
        // They pass blocks through as they are.
        ("delay" | "fault" | "device", [below]) => known(below.clone(), names),
        ("mirror", _) if let Some(uuid) = name_of(&uri, names) => Uri::new("mirror", uuid),
        ("volume", [below]) => {
            let volume = name_of(&uri, names).unwrap_or(uri.path());
            Uri::on("volume", known(below.clone(), names), volume)
        }
        (_, []) if let Some(name) = name_of(&uri, names) => Uri::new("namespace", name),
        _ => {
            let Ok(known) = uri.try_over(|below| Ok::<_, Infallible>(known(below, names)));
            known
        }
    }
}

#[cfg(test)]
mod tests {
    use super::identity;

    fn of(uri: &str) -> String {
        identity(&uri.parse().unwrap(), &[])
    }

    fn named(uri: &str, names: &[(&str, &str)]) -> String {
        let names: Vec<_> =
            names.iter().map(|(uri, name)| (uri.parse().unwrap(), (*name).into())).collect();
        identity(&uri.parse().unwrap(), &names)
    }

    #[test]
    fn a_namespace_is_known_by_its_name_and_a_volume_by_its_uuid_in_its_pool() {
        let [one, two] = ["tcp://127.0.0.1:4420/nqn", "tcp://localhost:4420/nqn?ns=1"];
        let nguid = "eui.a5a5";
        assert_eq!(named(one, &[(one, nguid)]), named(two, &[(two, nguid)]));
        assert_ne!(named(one, &[(one, nguid)]), named(one, &[(one, "eui.a5a6")]));
        let derived = [(one, "uuid.1, instance 7")];
        assert_eq!(named(one, &derived), of(one), "the next start of the target has another");
        let volume = |uuid: &str| {
            let uri = format!("volume:[{one}]/db");
            named(&uri, &[(one, nguid), (&uri, uuid)])
        };
        assert_ne!(volume("1"), volume("2"), "one of the same name that was made anew");
        assert_ne!(volume("1"), of(&format!("volume:[{one}]/db")));
    }

    #[test]
    fn a_disk_is_known_by_its_file_and_not_by_the_name_of_that() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name).display().to_string();
        for name in ["a", "b"] {
            std::fs::File::create_new(path(name)).unwrap();
        }
        let [a, b, moved] = ["a", "b", "moved"].map(path);
        let (of_a, of_b) = (of(&format!("file:{a}")), of(&format!("file:{b}")));
        let striped =
            |one: &str, two: &str| of(&format!("stripe:[file:{one}],[file:{two}]?chunk=64k"));
        let of_both = striped(&a, &b);
        assert_ne!(of_a, of_b);
        assert_eq!(of(&format!("delay:[file:{a}?size=8&engine=threads]?read=1us")), of_a);
        assert_ne!(striped(&b, &a), of_both);
        let volume = |name: &str| of(&format!("volume:[file:{a}]/{name}?cache=1m"));
        assert_ne!(volume("x"), volume("y"));
        std::fs::rename(&a, &moved).unwrap();
        std::fs::rename(&b, &a).unwrap();
        assert_eq!((of(&format!("file:{moved}")), of(&format!("file:{a}"))), (of_a, of_b));
        assert_eq!(striped(&moved, &a), of_both);
        std::fs::copy(&moved, path("copy")).unwrap();
        std::fs::rename(path("copy"), &moved).unwrap();
        assert_ne!(striped(&moved, &a), of_both, "a restored file is another");
    }

    #[test]
    fn a_mirror_is_the_same_disk_whichever_legs_are_there() {
        let whole = "mirror:[file:/a],[file:/b]";
        let of = |uri: &str, uuid: &str| named(uri, &[(uri, uuid)]);
        for other in ["mirror:[file:/b],[file:/a]", "mirror:[file:/a]?degraded=yes"] {
            assert_eq!(of(other, "1-2"), of(whole, "1-2"));
            let volume = |mirror: &str| named(&format!("volume:[{mirror}]/v"), &[(mirror, "1-2")]);
            assert_eq!(volume(other), volume(whole));
        }
        assert_ne!(of(whole, "1-3"), of(whole, "1-2"));
    }

    #[test]
    fn what_has_no_identity_is_known_by_its_name() {
        assert_eq!(of("ram:16m"), "ram:16m");
        assert_ne!(of("ram:16m"), of("ram:8m"));
    }
}
