//! Persistent identity of a file or a device, which later ones with the same name or number do not
//! share.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::UNIX_EPOCH;

use super::{DevicePath, HardwareIdentity, device_sysfs_directory, disk_of_partition};
use crate::kernel_files::KernelFiles;
use crate::storage_file::path_or_proc_link;

/// Unique identity of the block device at `place`; `None` if the kernel knows none.
///
/// A disk has a world-wide name or a serial number, a mapped device and an array have a UUID, and a
/// loop device has its file. The content of the device is not part of it.
pub fn device_identity(machine: &KernelFiles, place: &DevicePath) -> Option<String> {
    let own = device_sysfs_directory(place.device?);
    let disk = disk_of_partition(machine, &own);
    let text = |path: String| machine.read_trimmed(&path).filter(|text| !text.is_empty());
    let HardwareIdentity { model, serial, wwid } = HardwareIdentity::of_device(machine, place);
    let looped = text(format!("{disk}/loop/backing_file")).and_then(|path| {
        let offset = text(format!("{disk}/loop/offset")).unwrap_or_default();
        Some(format!("{path}, {}, from byte {offset}", file_identity(Path::new(&path))?))
    });
    let only = [
        ("wwid", wwid),
        ("serial", serial),
        ("mapped", text(format!("{disk}/dm/uuid"))),
        ("array", text(format!("{disk}/md/uuid"))),
        ("loop of", looped),
    ];
    let only: Vec<_> = only.into_iter().filter_map(|(word, text)| Some((word, text?))).collect();
    if only.is_empty() {
        return None;
    }
    // Serial numbers may repeat between models, and a partition may have been moved.
    let more = [("model", model), ("partition", text(format!("{own}/partition")))];
    let start = ("at sector", text(format!("{own}/start")));
    let more = more.into_iter().chain([start]).filter_map(|(word, text)| Some((word, text?)));
    let words = only.into_iter().chain(more).map(|(word, text)| format!("{word} {text}"));
    Some(words.collect::<Vec<_>>().join(", "))
}

/// Inode, file system and, where supported, creation time of the file at `path`. A file system may
/// reuse the inode number of a deleted file.
pub fn file_identity(path: &Path) -> Option<String> {
    let found = path_or_proc_link(path).metadata().ok()?;
    let born = found.created().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    let born = born.map_or_else(String::new, |born| format!(", made at {}", born.as_nanos()));
    Some(format!("inode {} of {:x}{born}", found.ino(), found.dev()))
}

/// Identity of what is at `path` that survives a reboot and renumbering: for a file its inode and
/// creation time, for a block device its unique identity. `None` if there is no such identity.
///
/// The device number of the file system is excluded: it is assigned at mount. A copied or restored
/// file is another file. FUSE is excluded: it assigns inode numbers on lookup.
pub fn persistent_identity(machine: &KernelFiles, path: &Path) -> Option<String> {
    let place = DevicePath::resolve(path);
    if place.device.is_some() {
        return device_identity(machine, &place).map(|mark| format!("device {mark}"));
    }
    let path = &*path_or_proc_link(path);
    let in_fuse =
        rustix::fs::statfs(path).is_ok_and(|found| u64::try_from(found.f_type) == Ok(FUSE));
    let found = path.metadata().ok().filter(|found| found.is_file() && !in_fuse)?;
    let born = found.created().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    let born = born.map_or_else(String::new, |born| format!(" made at {}", born.as_nanos()));
    Some(format!("inode {}{born}", found.ino()))
}

/// File systems served by a process (FUSE; statfs(2)).
const FUSE: u64 = 0x6573_5546;

#[cfg(test)]
mod tests {
    use super::{device_identity, file_identity};
    use crate::device_users::DevicePath;
    use crate::kernel_files::KernelFiles;
    use crate::kernel_files::tests::fake_kernel_files;

    fn array_identity(machine: &KernelFiles) -> Option<String> {
        device_identity(machine, &DevicePath { path: "/dev/x".into(), device: Some((9, 1)) })
    }

    #[test]
    fn file_identity_differs_from_its_copy() {
        let directory = tempfile::tempdir().unwrap();
        let [one, two, moved] = ["one", "two", "moved"].map(|name| directory.path().join(name));
        std::fs::write(&one, "same").unwrap();
        std::fs::copy(&one, &two).unwrap();
        let of = |path| super::persistent_identity(&KernelFiles::live_system(), path);
        let mark = of(&one);
        assert!(mark.is_some() && mark != of(&two));
        std::fs::write(&one, "other bytes").unwrap();
        std::fs::rename(&one, &moved).unwrap();
        assert_eq!(of(&moved), mark);
        assert_eq!(of(&one), None);
        let (_root, machine) = fake_kernel_files(&[("sys/dev/block/9:1/wwid", "eui.1")]);
        assert_eq!(super::persistent_identity(&machine, directory.path()), None);
    }

    #[test]
    fn device_identity_is_its_unique_attribute() {
        for (files, expected) in [
            (&[("wwid", "eui.1"), ("device/model", "A")][..], Some("wwid eui.1, model A")),
            (&[("device/serial", "S1")], Some("serial S1")),
            (&[("dm/uuid", "LVM-abc")], Some("mapped LVM-abc")),
            (&[("md/uuid", "1:2")], Some("array 1:2")),
            (&[("device/model", "QEMU HARDDISK"), ("serial", ""), ("dm/uuid", "")], None),
            (&[("loop/backing_file", "/no/such/file (deleted)")], None),
            (&[("size", "8")], None),
        ] {
            let files: Vec<_> = files
                .iter()
                .map(|(name, text)| (format!("sys/dev/block/9:1/{name}"), *text))
                .collect();
            let files: Vec<_> = files.iter().map(|(name, text)| (&**name, *text)).collect();
            let (_root, machine) = fake_kernel_files(&files);
            assert_eq!(array_identity(&machine).as_deref(), expected, "{files:?}");
        }
    }

    #[test]
    fn partition_identity_is_its_disk_and_start() {
        let files = [
            ("sys/dev/block/9:1/partition", "2\n"),
            ("sys/dev/block/9:1/start", "2048\n"),
            ("sys/dev/block/serial", "S1\n"),
        ];
        let (_root, machine) = fake_kernel_files(&files);
        assert_eq!(
            array_identity(&machine).as_deref(),
            Some("serial S1, partition 2, at sector 2048")
        );
        let (_root, machine) = fake_kernel_files(&files[..2]);
        assert_eq!(array_identity(&machine), None, "that alone tells nothing");
    }

    #[test]
    fn loop_device_identity_is_its_file() {
        let directory = tempfile::tempdir().unwrap();
        let (one, other) = (directory.path().join("one"), directory.path().join("other"));
        std::fs::write(&one, "").unwrap();
        std::fs::write(&other, "").unwrap();
        let of = |path: &std::path::Path, offset| {
            let path = path.display().to_string();
            let (_root, machine) = fake_kernel_files(&[
                ("sys/dev/block/9:1/loop/backing_file", &path),
                ("sys/dev/block/9:1/loop/offset", offset),
            ]);
            array_identity(&machine).unwrap()
        };
        let first = of(&one, "0");
        assert!(first.starts_with(&format!("loop of {}, inode ", one.display())), "{first}");
        assert!(first.contains(&file_identity(&one).unwrap()));
        assert_ne!(first, of(&one, "512"));
        std::fs::rename(&other, &one).unwrap();
        assert_ne!(first, of(&one, "0"), "another file of the same name");
    }
}
