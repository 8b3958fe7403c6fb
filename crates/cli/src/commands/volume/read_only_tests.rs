//! Commands that only look, and those that are refused, write nothing to the devices.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::tests::run_volume_command;
use crate::commands::identify_block::identify_block_device;
use crate::commands::pool::with_opener;

/// Contents and time of the last change of every file in a directory.
#[expect(clippy::disallowed_methods, reason = "it reads the files that must not change")]
fn file_contents(directory: &Path) -> Vec<(PathBuf, SystemTime, Vec<u8>)> {
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
fn test_pool(directory: &Path, is_mirrored: bool) -> String {
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
    run_volume_command(&["create", &volume("v"), "--size", "1m"]).unwrap();
    run_volume_command(&["snapshot", &volume("v"), "s"]).unwrap();
    run_volume_command(&["clone", &volume("s"), "c"]).unwrap();
    device
}

#[test]
fn identify_and_list_write_nothing_to_devices_of_volumes_and_mirrors() {
    for is_mirrored in [false, true] {
        let directory = tempfile::tempdir().unwrap();
        let device = test_pool(directory.path(), is_mirrored);
        let before = file_contents(directory.path());
        for name in ["v", "s", "c"] {
            let uri = format!("volume:[{device}]/{name}");
            let text = identify_block_device(&uri.parse().unwrap()).unwrap().text();
            assert!(text.contains("of pool `pool`"), "{text}");
            assert!(file_contents(directory.path()) == before, "identify {uri}");
        }
        let text = identify_block_device(&device.parse().unwrap()).unwrap().text();
        assert_eq!(
            (text.contains("2 of 2 legs in sync") && text.contains("for reading only")),
            is_mirrored,
            "{text}"
        );
        assert!(file_contents(directory.path()) == before, "identify {device}");
        let listed = run_volume_command(&["list", &device]).unwrap();
        assert_eq!(listed.lines().count(), 4, "{listed}");
        assert!(file_contents(directory.path()) == before, "list {device}");
    }
}

#[test]
fn rejected_volume_command_writes_nothing_to_the_device() {
    let directory = tempfile::tempdir().unwrap();
    let device = test_pool(directory.path(), false);
    let before = file_contents(directory.path());
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
        let refused = run_volume_command(words).unwrap_err();
        assert!(file_contents(directory.path()) == before, "{words:?}: {refused}");
    }
    run_volume_command(&["create", &volume("n"), "--size", "1m"]).unwrap();
    assert!(file_contents(directory.path()) != before, "what is not refused is written");
}
