//! Durability of a completed write to a file or a block device.
//!
//! | file | source | durability |
//! |---|---|---|
//! | regular, on tmpfs or ramfs | `fstatfs` of the file | none |
//! | regular, elsewhere | | volatile: the page cache, or the disk's cache |
//! | memory-backed block device | its name in `/sys/dev/block` | none |
//! | block device | `queue/write_cache` of the disk | persistent if `write through` |
//!
//! The file system of a device node is never examined: nodes lie on devtmpfs, whatever the device
//! is.

use rustix::fd::AsFd;
use rustix::fs::{FileType, fstat, fstatfs, major, minor};
use tenmil_base::Durability;

use crate::device_users::write_cache_mode;
use crate::kernel_files::KernelFiles;

/// Kernel's description of an open file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileDurabilityInfo {
    /// Regular file or device type.
    pub kind: FileType,
    /// Device number, if it is a device (`st_rdev`).
    pub device: (u32, u32),
    /// Type of the file system that holds the file or the device node (statfs(2)).
    pub file_system: u64,
}

/// File systems in memory: tmpfs and ramfs (statfs(2)).
const MEMORY_FILE_SYSTEMS: [u64; 2] = [0x0102_1994, 0x8584_58f6];
/// Block devices in memory: RAM disk (brd) and zram.
const MEMORY_DISKS: [&str; 2] = ["ram", "zram"];

impl FileDurabilityInfo {
    /// Examines `descriptor`; if the kernel refuses, a regular file on a disk is assumed.
    pub(super) fn of_descriptor(descriptor: impl AsFd) -> Self {
        let found = fstat(&descriptor).ok();
        let file_system = fstatfs(&descriptor).ok();
        Self {
            kind: found.map_or(FileType::RegularFile, |it| FileType::from_raw_mode(it.st_mode)),
            device: found.map_or((0, 0), |it| (major(it.st_rdev), minor(it.st_rdev))),
            file_system: file_system.map_or(0, |it| u64::try_from(it.f_type).unwrap_or(0)),
        }
    }

    /// Durability of a completed write. `is_direct`: transfers bypass the page cache, which is
    /// itself a volatile cache.
    pub(super) fn durability(&self, machine: &KernelFiles, is_direct: bool) -> Durability {
        match self.kind {
            FileType::RegularFile if MEMORY_FILE_SYSTEMS.contains(&self.file_system) => {
                Durability::NonPersistent
            }
            FileType::BlockDevice => self.device_durability(machine, is_direct),
            _ => Durability::VolatileCache,
        }
    }

    fn device_durability(&self, machine: &KernelFiles, is_direct: bool) -> Durability {
        let (major, minor) = self.device;
        let name = machine.link_target_name(&format!("sys/dev/block/{major}:{minor}"));
        let is_memory = |kind: &&str| {
            let number = name.as_deref().and_then(|name| name.strip_prefix(*kind));
            number.is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_digit()))
        };
        if MEMORY_DISKS.iter().any(is_memory) {
            return Durability::NonPersistent;
        }
        // Where sysfs is absent or its value is unknown, flushes are sent: a superfluous flush
        // costs time, a missing one costs data.
        match write_cache_mode(machine, self.device).as_deref() {
            Some("write through") if is_direct => Durability::Persistent,
            _ => Durability::VolatileCache,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use rustix::fs::FileType;
    use tenmil_base::Durability;

    use super::{FileDurabilityInfo, MEMORY_FILE_SYSTEMS};
    use crate::kernel_files::KernelFiles;

    const EXT4: u64 = 0xef53;
    const TMPFS: u64 = MEMORY_FILE_SYSTEMS[0];

    fn info_of_loop_device(minor: u32) -> FileDurabilityInfo {
        FileDurabilityInfo { kind: FileType::BlockDevice, device: (7, minor), file_system: TMPFS }
    }

    /// A disk with its sysfs links, and a partition of it.
    fn add_disk_to_sysfs(root: &Path, name: &str, minor: u32, cache: Option<&str>) {
        let own = root.join("sys/devices/virtual/block").join(name);
        let part = own.join(format!("{name}p1"));
        std::fs::create_dir_all(&part).unwrap();
        std::fs::create_dir_all(own.join("queue")).unwrap();
        std::fs::create_dir_all(root.join("sys/dev/block")).unwrap();
        std::fs::write(part.join("partition"), "1\n").unwrap();
        if let Some(cache) = cache {
            std::fs::write(own.join("queue/write_cache"), format!("{cache}\n")).unwrap();
        }
        for (path, minor) in [(own, minor), (part, minor + 1)] {
            let link = root.join(format!("sys/dev/block/7:{minor}"));
            std::os::unix::fs::symlink(path, link).unwrap();
        }
    }

    #[test]
    fn block_device_durability_follows_its_write_cache() {
        let root = tempfile::tempdir().unwrap();
        add_disk_to_sysfs(root.path(), "sda", 0, Some("write back"));
        add_disk_to_sysfs(root.path(), "sdb", 2, Some("write through"));
        add_disk_to_sysfs(root.path(), "sdc", 4, None);
        add_disk_to_sysfs(root.path(), "sdd", 6, Some("write around"));
        add_disk_to_sysfs(root.path(), "zram0", 8, Some("write through"));
        add_disk_to_sysfs(root.path(), "ram1", 10, Some("write through"));
        add_disk_to_sysfs(root.path(), "ramses", 12, Some("write through"));
        let machine = KernelFiles::under_root(root.path());
        for (minor, expected) in [
            (0, Durability::VolatileCache),
            (2, Durability::Persistent),
            (4, Durability::VolatileCache),
            (6, Durability::VolatileCache),
            (8, Durability::NonPersistent),
            (10, Durability::NonPersistent),
            (12, Durability::Persistent),
            // No such device in sysfs.
            (20, Durability::VolatileCache),
        ] {
            for partition in [0, 1] {
                let node = info_of_loop_device(minor + partition);
                assert_eq!(node.durability(&machine, true), expected, "7:{minor} p{partition}");
                let cached = expected.weaker(Durability::VolatileCache);
                assert_eq!(node.durability(&machine, false), cached, "7:{minor} p{partition}");
            }
        }
        let without = KernelFiles::under_root(root.path().join("nothing"));
        assert_eq!(info_of_loop_device(2).durability(&without, true), Durability::VolatileCache);
    }

    #[test]
    fn device_node_is_identified_by_its_device_and_not_its_file_system() {
        let open = |path: &str| std::fs::File::open(path).unwrap();
        // As every node it lies on devtmpfs or tmpfs (null(4)).
        let node = FileDurabilityInfo::of_descriptor(open("/dev/null"));
        assert_eq!((node.kind, node.device), (FileType::CharacterDevice, (1, 3)));
        assert_eq!(node.durability(&KernelFiles::live_system(), true), Durability::VolatileCache);
        assert_eq!(
            FileDurabilityInfo::of_descriptor(tempfile::tempfile().unwrap()).kind,
            FileType::RegularFile
        );
    }

    #[test]
    fn file_system_is_queried_for_regular_files_only() {
        let root = tempfile::tempdir().unwrap();
        let machine = KernelFiles::under_root(root.path());
        let file =
            FileDurabilityInfo { kind: FileType::RegularFile, device: (0, 0), file_system: EXT4 };
        for is_direct in [true, false] {
            assert_eq!(file.durability(&machine, is_direct), Durability::VolatileCache);
            for file_system in MEMORY_FILE_SYSTEMS {
                let memory = FileDurabilityInfo { file_system, ..file };
                assert_eq!(memory.durability(&machine, is_direct), Durability::NonPersistent);
                let node = FileDurabilityInfo { file_system, ..info_of_loop_device(0) };
                assert_eq!(node.durability(&machine, is_direct), Durability::VolatileCache);
            }
        }
    }
}
