//! The file below a loop device, which is locked together with it: a lock of the device alone does not
//! keep away those who open the file by its own name.

use std::os::fd::OwnedFd;

use rustix::fs::{FileType, Mode, OFlags, fstat, major, minor, open};

use super::{FileError, lock};
use crate::holders;
use crate::kernel_files::KernelFiles;

/// Locks the file below, if `descriptor` is a loop device or a partition of one. A part of a file is
/// locked against those who have all of it, and not against those who have other parts.
///
/// # Errors
///
/// If somebody has that file open.
pub(super) fn lock_below(
    machine: &KernelFiles,
    descriptor: &OwnedFd,
    read_only: bool,
) -> Result<Option<OwnedFd>, FileError> {
    let Ok(found) = fstat(descriptor) else { return Ok(None) };
    if FileType::from_raw_mode(found.st_mode) != FileType::BlockDevice {
        return Ok(None);
    }
    lock_file_of(machine, (major(found.st_rdev), minor(found.st_rdev)), read_only)
}

fn lock_file_of(
    machine: &KernelFiles,
    device: (u32, u32),
    read_only: bool,
) -> Result<Option<OwnedFd>, FileError> {
    let Some((path, is_whole)) = holders::file_below(machine, device) else { return Ok(None) };
    // A file that has no name any more, or none here, is not opened by it.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let Ok(file) = open(&path, flags, Mode::empty()) else { return Ok(None) };
    lock(&file, &path, read_only || !is_whole)?;
    Ok(Some(file))
}

#[cfg(test)]
mod tests {
    use super::lock_file_of;
    use crate::file::{File, FileOptions};
    use crate::kernel_files::KernelFiles;
    use crate::kernel_files::tests::made_of;

    /// A machine with a loop device 7:0 over a file of 1 MiB, a partition 7:1 of it, and a loop device
    /// 7:2 over the second half.
    fn machine(backing: &str) -> (tempfile::TempDir, KernelFiles) {
        made_of(&[
            ("sys/dev/block/7:0/loop/backing_file", backing),
            ("sys/dev/block/7:0/loop/offset", "0"),
            ("sys/dev/block/7:0/loop/sizelimit", "0"),
            ("sys/dev/block/7:1/partition", "1"),
            ("sys/dev/block/loop/backing_file", backing),
            ("sys/dev/block/7:2/loop/backing_file", backing),
            ("sys/dev/block/7:2/loop/offset", "524288"),
            ("sys/dev/block/8:0/size", "2048"),
        ])
    }

    #[test]
    fn a_file_and_a_loop_device_over_it_are_not_open_together() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("blocks");
        std::fs::write(&path, vec![0; 1 << 20]).unwrap();
        let (_root, machine) = machine(path.to_str().unwrap());
        let options = |read_only| FileOptions {
            path: path.clone(),
            len_bytes: None,
            unit_bytes: 512,
            direct: false,
            read_only,
        };
        let lock = |minor, read_only| lock_file_of(&machine, (7, minor), read_only);
        for minor in 0..3 {
            let file = File::open(&options(false)).unwrap();
            for read_only in [false, true] {
                let refused = lock(minor, read_only).unwrap_err().to_string();
                assert!(refused.contains("this process has it open"), "{minor}: {refused}");
            }
            drop(file);
            let below = lock(minor, false).unwrap();
            assert!(below.is_some(), "{minor}");
            assert!(File::open(&options(false)).is_err(), "{minor}");
            drop(below);
        }
        // Readers go together, and so do parts.
        let parts = [1, 2].map(|minor| lock(minor, false).unwrap().unwrap());
        assert!(lock(0, false).is_err(), "all of it is no part");
        drop(parts);
        let reader = File::open(&options(true)).unwrap();
        assert!(lock(0, true).unwrap().is_some());
        assert!(lock(0, false).is_err());
        drop(reader);
        assert!(lock_file_of(&machine, (8, 0), false).unwrap().is_none(), "it is no loop device");
    }
}
