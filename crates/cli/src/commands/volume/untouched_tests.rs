//! Commands that only look, and those that are refused, write nothing to the devices.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::tests::say;
use crate::commands::identify_block::block_device;
use crate::commands::pool::with_opener;

/// Contents and time of the last change of every file in a directory.
#[expect(clippy::disallowed_methods, reason = "it reads the files that must not change")]
fn contents(directory: &Path) -> Vec<(PathBuf, SystemTime, Vec<u8>)> {
    let paths = std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<_> = paths
        .map(|path| {
            let bytes = std::fs::read(&path).unwrap();
            (path.clone(), path.metadata().unwrap().modified().unwrap(), bytes)
        })
        .collect();
    found.sort();
    found
}

/// A pool with a volume `v`, a snapshot `s` of it and a clone `c` of that, on a file or on a mirror.
fn pool(directory: &Path, is_mirrored: bool) -> String {
    let file =
        |name: &str| format!("file:{}?size=16m&engine=threads", directory.join(name).display());
    let device = match is_mirrored {
        true => format!("mirror:[{}],[{}]", file("a"), file("b")),
        false => file("a"),
    };
    with_opener(|opener| {
        if is_mirrored {
            let legs = [file("a"), file("b")].map(|leg| leg.parse().unwrap());
            tenmil_drivers::mirror::create_mirror(opener, &legs, false)?;
        }
        // A new mirror is data that is there.
        tenmil_drivers::pool::create_pool(opener, &device.parse().unwrap(), "pool", is_mirrored)
    })
    .unwrap();
    let volume = |name: &str| format!("volume:[{device}]/{name}");
    say(&["create", &volume("v"), "--size", "1m"]).unwrap();
    say(&["snapshot", &volume("v"), "s"]).unwrap();
    say(&["clone", &volume("s"), "c"]).unwrap();
    device
}

#[test]
fn identify_and_list_write_nothing_to_the_devices_of_volumes_and_mirrors() {
    for is_mirrored in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let device = pool(directory.path(), is_mirrored);
        let before = contents(directory.path());
        for name in ["v", "s", "c"] {
            let uri = format!("volume:[{device}]/{name}");
            let text = block_device(&uri.parse().unwrap()).unwrap().text();
            assert!(text.contains("of pool `pool`"), "{text}");
            assert!(contents(directory.path()) == before, "identify {uri}");
        }
        let text = block_device(&device.parse().unwrap()).unwrap().text();
        assert_eq!(
            (text.contains("2 of 2 legs in sync") && text.contains("for reading only")),
            is_mirrored,
            "{text}"
        );
        assert!(contents(directory.path()) == before, "identify {device}");
        let listed = say(&["list", &device]).unwrap();
        assert_eq!(listed.lines().count(), 4, "{listed}");
        assert!(contents(directory.path()) == before, "list {device}");
    }
}

#[test]
fn volume_command_that_is_refused_writes_nothing_to_the_device() {
    let directory = tempfile::tempdir().unwrap();
    let device = pool(directory.path(), false);
    let before = contents(directory.path());
    let volume = |name: &str| format!("volume:[{device}]/{name}");
    let [v, s, c, none] = ["v", "s", "c", "none"].map(volume);
    for words in [
        &["create", &v, "--size", "2m"][..],
        &["create", &volume("n"), "--size", "1g", "--thick"],
        &["delete", &s],
        &["delete", &none],
        &["rename", &v, "c"],
        &["rename", &none, "other"],
        &["resize", &s, "--size", "2m"],
        &["resize", &none, "--size", "2m"],
        &["snapshot", &v, "c"],
        &["snapshot", &none, "t"],
        &["clone", &s, "v"],
        &["clone", &none, "t"],
        &["rollback", &v, "c"],
        &["rollback", &c, "none"],
    ] {
        let refused = say(words).unwrap_err();
        assert!(contents(directory.path()) == before, "{words:?}: {refused}");
    }
    say(&["create", &volume("n"), "--size", "1m"]).unwrap();
    assert!(contents(directory.path()) != before, "what is not refused is written");
}
