#![expect(clippy::disallowed_methods, reason = "tests make the files that are looked at")]

use std::path::{Path, PathBuf};

use tenmil_linux::kernel_files::KernelFiles;

use super::{OverwriteReport, check_overwrite_allowed};
use crate::ExistingData;

/// A disk of 1 MiB with an ext4 file system, and a machine without anything else.
fn ext4_image_and_kernel_files() -> (tempfile::TempDir, PathBuf, KernelFiles) {
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

fn existing_data(path: &Path) -> ExistingData {
    let name = path.display().to_string();
    ExistingData { name, found: "1048576 bytes".into(), path: Some(path.into()) }
}

fn write_at(root: &Path, file: &str, text: &str) {
    let file = root.join(file);
    std::fs::create_dir_all(file.parent().unwrap()).unwrap();
    std::fs::write(file, text).unwrap();
}

#[test]
fn overwrite_error_names_the_data_and_the_option() {
    let (_root, path, machine) = ext4_image_and_kernel_files();
    let refused =
        check_overwrite_allowed("-w write", &[existing_data(&path)], false, &machine).unwrap_err();
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
    assert_eq!(
        check_overwrite_allowed("-w write", &[existing_data(&path)], true, &machine),
        Ok(())
    );
    assert_eq!(check_overwrite_allowed("-w write", &[], false, &machine), Ok(()));
}

#[test]
fn device_in_use_is_never_overwritten() {
    let (root, path, machine) = ext4_image_and_kernel_files();
    write_at(root.path(), "sys/block/loop0/loop/backing_file", &path.display().to_string());
    for overwrite in [false, true] {
        let refused = check_overwrite_allowed("copy", &[existing_data(&path)], overwrite, &machine)
            .unwrap_err();
        assert!(refused.text.contains("loop0 stands on "), "{refused}");
        assert!(refused.text.ends_with("expected it not in use"), "{refused}");
        assert!(!refused.remedy.contains("add --overwrite"), "{}", refused.remedy);
    }
}

#[test]
fn unknown_data_is_reported_as_unknown() {
    let (root, _, machine) = ext4_image_and_kernel_files();
    let of = |bytes: &[u8]| {
        let path = root.path().join("other");
        std::fs::write(&path, bytes).unwrap();
        OverwriteReport::probe_existing_data(&existing_data(&path), &machine).to_string()
    };
    assert!(of(&[0; 5000]).ends_with("(1048576 bytes; nothing but zeroes at both ends)"));
    assert!(of(&[7; 5000]).ends_with("(1048576 bytes; data of no kind that is known)"));
    let mut end = vec![0; 3 << 20];
    *end.last_mut().unwrap() = 1;
    assert!(of(&end).ends_with("data of no kind that is known)"), "the last byte counts");
    let gone =
        OverwriteReport::probe_existing_data(&existing_data(&root.path().join("gone")), &machine)
            .to_string();
    assert!(gone.contains("; it cannot be read: "), "{gone}");
    let elsewhere = ExistingData { path: None, ..existing_data(Path::new("ssd 0")) };
    let said = OverwriteReport::probe_existing_data(&elsewhere, &machine).to_string();
    assert_eq!(said, "ssd 0 (1048576 bytes; it has no file to look at)");
}
