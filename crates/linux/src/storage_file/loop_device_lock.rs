//! The file below a loop device, which is locked together with it: a lock of the device alone does not
//! exclude processes that open the file by its own name, or by another loop device.

use std::os::fd::OwnedFd;

use rustix::fs::{FileType, Mode, OFlags, fstat, major, minor, open};

use super::range_lock::lock_range;
use super::{FileError, lock_file};
use crate::device_users::{FilePart, backing_parts};
use crate::kernel_files::KernelFiles;

/// Locks the files below, if `descriptor` is a loop device or a partition of one: the bytes that the
/// device has, at every level of loop devices over loop devices.
///
/// # Errors
///
/// If another process has some of these bytes open.
pub(super) fn lock_backing_files(
    machine: &KernelFiles,
    descriptor: &OwnedFd,
    read_only: bool,
) -> Result<Vec<OwnedFd>, FileError> {
    let Ok(found) = fstat(descriptor) else { return Ok(Vec::new()) };
    if FileType::from_raw_mode(found.st_mode) != FileType::BlockDevice {
        return Ok(Vec::new());
    }
    lock_backing_parts(machine, (major(found.st_rdev), minor(found.st_rdev)), read_only)
}

fn lock_backing_parts(
    machine: &KernelFiles,
    device: (u32, u32),
    read_only: bool,
) -> Result<Vec<OwnedFd>, FileError> {
    let parts = backing_parts(machine, device).into_iter();
    let locked = parts.filter_map(|part| lock_part(&part, read_only).transpose());
    locked.collect()
}

fn lock_part(part: &FilePart, read_only: bool) -> Result<Option<OwnedFd>, FileError> {
    let FilePart { path, bytes } = part;
    let flags = OFlags::CLOEXEC | OFlags::NONBLOCK;
    // To lock a range against readers, a file must be open for writing (fcntl(2)).
    let access = if read_only { OFlags::RDONLY } else { OFlags::RDWR };
    let opened = open(path, flags | access, Mode::empty());
    let is_writable = !read_only && opened.is_ok();
    // A file that has no name any more, or none here, is not opened by it.
    let opened = opened.or_else(|_| open(path, flags | OFlags::RDONLY, Mode::empty()));
    let Ok(file) = opened else { return Ok(None) };
    // Parts share this lock, which excludes earlier versions that open the whole file for writing.
    let is_whole = *bytes == (0..u64::MAX);
    lock_file(&file, path, read_only || !is_whole)?;
    lock_range(&file, path, bytes, !is_writable)?;
    Ok(Some(file))
}

#[cfg(test)]
mod tests {
    use super::lock_backing_parts;
    use crate::kernel_files::KernelFiles;
    use crate::kernel_files::tests::fake_kernel_files;
    use crate::storage_file::{FileOptions, StorageFile};

    /// A machine with loop devices over a file of 1 MiB: 7:0 is all of it, 7:1 the first half as a
    /// partition of 7:0, 7:2 the second half, and 7:3 from a quarter to three quarters.
    fn test_kernel_files(backing: &str) -> (tempfile::TempDir, KernelFiles) {
        let part = |minor: u32, name: &str| format!("sys/dev/block/7:{minor}/loop/{name}");
        let (root, machine) = fake_kernel_files(&[
            ("disk/dev", "7:0"),
            ("disk/loop/backing_file", backing),
            ("disk/loop/offset", "0"),
            ("disk/loop/sizelimit", "0"),
            ("disk/loop0p1/partition", "1"),
            ("disk/loop0p1/start", "0"),
            ("disk/loop0p1/size", "1024"),
            (&part(2, "backing_file"), backing),
            (&part(2, "offset"), "524288"),
            (&part(3, "backing_file"), backing),
            (&part(3, "offset"), "262144"),
            (&part(3, "sizelimit"), "524288"),
            ("sys/dev/block/8:0/size", "2048"),
        ]);
        for (number, to) in [("7:0", "disk"), ("7:1", "disk/loop0p1")] {
            let link = root.path().join("sys/dev/block").join(number);
            std::os::unix::fs::symlink(root.path().join(to), link).unwrap();
        }
        (root, machine)
    }

    fn backing_file() -> (tempfile::TempDir, std::path::PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("blocks");
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        (directory, path)
    }

    fn file_options(path: &std::path::Path, read_only: bool) -> FileOptions {
        FileOptions {
            path: path.into(),
            len_bytes: None,
            unit_bytes: 512,
            direct: false,
            read_only,
        }
    }

    #[test]
    fn file_and_a_loop_device_over_it_are_not_open_together() {
        let (_directory, path) = backing_file();
        let (_root, machine) = test_kernel_files(path.to_str().unwrap());
        let lock = |minor, read_only| lock_backing_parts(&machine, (7, minor), read_only);
        for minor in 0..4 {
            let file = StorageFile::open(&file_options(&path, false)).unwrap();
            for read_only in [false, true] {
                let refused = lock(minor, read_only).unwrap_err().to_string();
                assert!(refused.contains("this process has it open"), "{minor}: {refused}");
            }
            drop(file);
            let below = lock(minor, false).unwrap();
            assert_eq!(below.len(), 1, "{minor}");
            for read_only in [false, true] {
                assert!(StorageFile::open(&file_options(&path, read_only)).is_err(), "{minor}");
            }
            drop(below);
            // Readers go together.
            let reader = StorageFile::open(&file_options(&path, true)).unwrap();
            assert!(lock(minor, false).is_err(), "{minor}");
            assert_eq!(lock(minor, true).unwrap().len(), 1);
            drop(reader);
        }
        assert!(
            lock_backing_parts(&machine, (8, 0), false).unwrap().is_empty(),
            "it is no loop device"
        );
    }

    #[test]
    fn loop_devices_over_disjoint_parts_of_a_file_are_open_together() {
        let (_directory, path) = backing_file();
        let (_root, machine) = test_kernel_files(path.to_str().unwrap());
        let lock = |minor, read_only| lock_backing_parts(&machine, (7, minor), read_only);
        for (one, other, is_admitted) in [
            (0, 1, false),
            (0, 2, false),
            (0, 3, false),
            (1, 2, true),
            (1, 3, false),
            (2, 3, false),
            (3, 3, false),
        ] {
            for (first, second) in [(one, other), (other, one)] {
                for (reads, also_reads) in [(false, false), (false, true), (true, false)] {
                    let held = lock(first, reads).unwrap();
                    let found = lock(second, also_reads);
                    assert_eq!(found.is_ok(), is_admitted, "{first} {second} {reads}: {found:?}");
                    drop((held, found));
                }
                let held = lock(first, true).unwrap();
                assert!(lock(second, true).is_ok(), "readers go together");
                drop(held);
            }
        }
        let _held = lock(2, false).unwrap();
        let refused = lock(3, false).unwrap_err().to_string();
        assert!(refused.contains("some of the bytes 262144 to 786432"), "{refused}");
        assert!(refused.contains("this process has it open already"), "{refused}");
    }
}
