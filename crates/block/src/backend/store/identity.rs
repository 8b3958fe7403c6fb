//! Which device a name means, however it is spelled.
//!
//! `file:pool`, `file:/srv/pool?engine=threads` and a link to either are one file; a program that looks
//! for whoever has a store open compares what the kernel calls the file, not what people do.

use std::convert::Infallible;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use host::holders::{Place as Found, locker_of};
use host::machine::Machine;

use super::Place;
use crate::uri::Uri;

/// What two names have in common that mean the same device, and no others: the name with the number of
/// each file, and its file system, in place of its path. Files that are not there, and devices that are
/// no files, go by their names.
pub fn identity(device: &Uri) -> String {
    known(device.clone()).to_string()
}

fn known(uri: Uri) -> Uri {
    if uri.scheme() == "file" {
        return file(&uri);
    }
    if uri.scheme() == Place::SCHEME
        && let Ok(below) = uri.only_child()
    {
        // How much memory its metadata have does not matter.
        return Uri::on(Place::SCHEME, known(below.clone()), uri.path());
    }
    let Ok(known) = uri.try_over(|below| Ok::<_, Infallible>(known(below)));
    known
}

/// The number of a file or of a block device, in place of its name and of how it is read.
fn file(uri: &Uri) -> Uri {
    let path = Path::new(uri.path());
    match (Found::of(path).device, path.metadata()) {
        (Some((major, minor)), _) => Uri::new("device", format!("{major}-{minor}")),
        (None, Ok(found)) => Uri::new("file", format!("{:x}-{}", found.dev(), found.ino())),
        (None, Err(_)) => Uri::new("file", uri.path()),
    }
}

/// The process that has a file locked on which a device stands, and the file's path.
pub fn file_holder(device: &Uri) -> Option<(u32, String)> {
    if device.scheme() != "file" {
        return device.children().iter().find_map(file_holder);
    }
    let pid = locker_of(&Machine::this(), Path::new(device.path()))?;
    Some((pid, device.path().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::identity;

    #[test]
    fn a_device_is_the_same_however_its_files_are_spelled_and_no_other_is() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name).display().to_string();
        for name in ["a", "b"] {
            std::fs::File::create_new(path(name)).unwrap();
        }
        std::os::unix::fs::symlink(path("a"), path("link")).unwrap();
        std::fs::hard_link(path("a"), path("hard")).unwrap();
        let of = |uri: String| identity(&uri.parse().unwrap());
        let [a, b, link, hard] = ["a", "b", "link", "hard"].map(path);
        let plain = of(format!("file:{a}"));
        for same in [format!("file:{link}"), format!("file:{hard}?engine=threads&size=1m")] {
            assert_eq!(of(same.clone()), plain, "{same}");
        }
        assert_ne!(of(format!("file:{b}")), plain);
        assert_ne!(of(format!("file:{}", path("none"))), plain);
        let stripe = |second: &str, chunk: &str| {
            of(format!("stripe:[file:{a}],[file:{second}]?chunk={chunk}"))
        };
        assert_eq!(stripe(&b, "64k"), stripe(&format!("{b}?engine=threads"), "64k"));
        assert_ne!(stripe(&b, "64k"), stripe(&b, "128k"), "blocks lie elsewhere");
        assert_ne!(stripe(&b, "64k"), stripe(&link, "64k"));
        let inner = |name: &str, more: &str| of(format!("volume:[file:{link}]/{name}{more}"));
        assert_eq!(inner("x", "?cache=1m"), inner("x", ""));
        assert_ne!(inner("x", ""), inner("y", ""));
        assert_eq!(of("tcp://127.0.0.1:4420/nqn".into()), "tcp://127.0.0.1:4420/nqn");
    }
}
