#![expect(clippy::disallowed_methods, reason = "tests make the files that are looked at")]

use std::path::{Path, PathBuf};

use tenmil_linux::kernel_files::KernelFiles;

use super::{OverwriteReport, allow};
use crate::ExistingData;

/// A disk of 1 MiB with an ext4 file system, and a machine without anything else.
fn world() -> (tempfile::TempDir, PathBuf, KernelFiles) {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("disk");
    let mut bytes = vec![0; 1 << 20];
    bytes[1024 + 0x38..][..2].copy_from_slice(&[0x53, 0xef]);
    bytes[1024 + 0x60] = 0x40;
    bytes[1024 + 0x68..][..16].copy_from_slice(&[0xab; 16]);
    bytes[1024 + 0x78..][..4].copy_from_slice(b"home");
    std::fs::write(&path, bytes).unwrap();
    let machine = KernelFiles::under_root(root.path());
    (root, path, machine)
}

fn existing(path: &Path) -> ExistingData {
    let name = path.display().to_string();
    ExistingData { name, found: "1048576 bytes".into(), path: Some(path.into()) }
}

fn put(root: &Path, file: &str, text: &str) {
    let file = root.join(file);
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    std::fs::write(file, text).unwrap();
}

#[test]
fn a_refusal_names_what_would_be_lost_and_the_remedy() {
    let (_root, path, machine) = world();
    let refused = allow("-w write", &[existing(&path)], false, &machine).unwrap_err();
    assert_eq!(
        refused.text,
        format!(
            "-w write would destroy what is there: {} (1048576 bytes; ext4 \"home\" \
             abababab-abab-abab-abab-abababababab at byte 1080); expected devices that this run \
             creates, or --overwrite",
            path.display()
        )
    );
    assert!(refused.remedy.contains("--overwrite"));
    assert_eq!(allow("-w write", &[existing(&path)], true, &machine), Ok(()));
    assert_eq!(allow("-w write", &[], false, &machine), Ok(()));
}

#[test]
fn what_is_in_use_is_refused_whatever_is_said() {
    let (root, path, machine) = world();
    put(root.path(), "sys/block/loop0/loop/backing_file", &path.display().to_string());
    for overwrite in [false, true] {
        let refused = allow("copy", &[existing(&path)], overwrite, &machine).unwrap_err();
        assert!(refused.text.contains("loop0 stands on "), "{refused}");
        assert!(refused.text.ends_with("expected it not in use"), "{refused}");
        assert!(!refused.remedy.contains("add --overwrite"), "{}", refused.remedy);
    }
}

#[test]
fn what_is_not_known_is_said_as_it_is() {
    let (root, _, machine) = world();
    let of = |bytes: &[u8]| {
        let path = root.path().join("other");
        std::fs::write(&path, bytes).unwrap();
        OverwriteReport::of(&existing(&path), &machine).to_string()
    };
    assert!(of(&[0; 5000]).ends_with("(1048576 bytes; nothing but zeroes at both ends)"));
    assert!(of(&[7; 5000]).ends_with("(1048576 bytes; data of no kind that is known)"));
    let mut end = vec![0; 3 << 20];
    *end.last_mut().unwrap() = 1;
    assert!(of(&end).ends_with("data of no kind that is known)"), "the last byte counts");
    let gone = OverwriteReport::of(&existing(&root.path().join("gone")), &machine).to_string();
    assert!(gone.contains("; it cannot be read: "), "{gone}");
    let elsewhere = ExistingData { path: None, ..existing(Path::new("ssd 0")) };
    let said = OverwriteReport::of(&elsewhere, &machine).to_string();
    assert_eq!(said, "ssd 0 (1048576 bytes; it has no file to look at)");
}
