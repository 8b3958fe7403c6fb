//! What the disk of a namespace is known by, so that reservations stay with it.
//!
//! | URI | identity |
//! |---|---|
//! | `file:` of a regular file | its inode and when it was made: a file that is renamed is the same, a copy or a restored one is another |
//! | `file:` of a block device | world-wide name, serial number or UUID, and the partition; of a loop device its file |
//! | `volume:` | the pool, by what it lies on, and the volume's name |
//! | what stands on others | those, in the same order and made up in the same way |
//! | `ram:`, `null:`, `tcp:`, `pcie:`, files of FUSE | the URI: nothing about the disk itself is known |
//!
//! The UUID that hosts see is made of the subsystem's NQN and the namespace's number, and is not used here:
//! that number is what must not decide whose reservations they are. Neither is the number of a file system
//! or of a block device, which another may have after the next start.

use std::convert::Infallible;
use std::path::Path;

use block::uri::Uri;
use host::holders::lasting_mark;
use host::machine::Machine;

/// The identity of what is served, in a line.
pub(super) fn identity(uri: &Uri) -> String {
    known(uri.clone().from_root()).to_string()
}

/// The URI with what each file and device is in place of its name.
fn known(uri: Uri) -> Uri {
    match (uri.scheme(), uri.children()) {
        ("file", _) => match lasting_mark(&Machine::this(), Path::new(uri.path())) {
            Some(mark) => Uri::new("file", mark),
            None => Uri::new("file", uri.path()),
        },
        // They pass blocks through as they are.
        ("delay" | "fault" | "device", [below]) => known(below.clone()),
        ("volume", [below]) => Uri::on("volume", known(below.clone()), uri.path()),
        _ => {
            let Ok(known) = uri.try_over(|below| Ok::<_, Infallible>(known(below)));
            known
        }
    }
}

#[cfg(test)]
mod tests {
    use super::identity;

    fn of(uri: &str) -> String {
        identity(&uri.parse().unwrap())
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
    fn what_has_no_identity_is_known_by_its_name() {
        assert_eq!(of("ram:16m"), "ram:16m");
        assert_ne!(of("ram:16m"), of("ram:8m"));
    }
}
