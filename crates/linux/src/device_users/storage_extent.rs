//! Underlying bytes of a file or a block device, to compare two paths.
//!
//! ```text
//!   /dev/loop0p1 ── bytes 1 MiB.. of loop0 ── bytes 0.. of the file /srv/image
//!   /dev/dm-0    ── itself ── and, below it, all of each device that it is mapped to
//! ```
//!
//! A loop device is a part of its file, and a partition a part of its disk. A mapped device or an
//! array is a medium of its own, since others may be mapped to other blocks of the same disks.

use std::fmt;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::{DEPTH_MAX, DevicePath, HardwareIdentity, device_number_in, device_sysfs_directory};
use crate::kernel_files::KernelFiles;
use crate::storage_file::path_or_proc_link;

/// Byte range of a medium.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StorageExtent {
    /// The medium.
    pub medium: StorageId,
    /// Byte range; ends at `u64::MAX` if it extends to the end of the medium.
    pub bytes: Range<u64>,
}

/// Identity of a medium, unique on this machine.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StorageId {
    /// A file, identified by file system and inode.
    File {
        /// Device number of the file system.
        device: u64,
        /// Inode number.
        inode: u64,
    },
    /// A disk, mapped device or array, by its unique name.
    Named(String),
    /// A block device without a unique name, by its device number.
    Numbered(u32, u32),
}

/// Underlying bytes of a file or a block device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StorageExtents {
    /// The innermost medium that it is a part of.
    pub own: Option<StorageExtent>,
    /// Media below a mapped device or an array; each may have other users too.
    pub below: Vec<StorageExtent>,
}

/// Part of a file or a device that a loop device over it shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilePart {
    /// The file or device.
    pub path: PathBuf,
    /// Its bytes; ends at `u64::MAX` if the part extends to its end.
    pub bytes: Range<u64>,
}

/// Unit of the kernel's sizes and offsets, independent of the device's block size.
const SECTOR_BYTES: u64 = 512;

impl StorageExtents {
    /// Examines the file or device at `path`; empty if it does not exist.
    pub fn of_path(machine: &KernelFiles, path: &Path) -> Self {
        match DevicePath::resolve(path).device {
            Some(device) => Self::of_device(machine, device, 0..u64::MAX, 1),
            None => Self { own: file_extent(path, 0..u64::MAX), below: Vec::new() },
        }
    }

    /// Examines a byte range of a block device.
    fn of_device(machine: &KernelFiles, device: (u32, u32), bytes: Range<u64>, depth: u32) -> Self {
        match lower_range(machine, device, &bytes) {
            Some(LowerRange::Disk(disk, bytes)) if depth < DEPTH_MAX => {
                return Self::of_device(machine, disk, bytes, depth + 1);
            }
            Some(LowerRange::Backing(FilePart { path, bytes })) => {
                return match DevicePath::resolve(&path).device {
                    Some(disk) if depth < DEPTH_MAX => {
                        Self::of_device(machine, disk, bytes, depth + 1)
                    }
                    _ => {
                        let number = StorageId::Numbered(device.0, device.1);
                        let own = file_extent(&path, bytes.clone())
                            .unwrap_or_else(|| whole_extent(number, bytes));
                        Self { own: Some(own), below: Vec::new() }
                    }
                };
            }
            _ => {}
        }
        let own = device_sysfs_directory(device);
        // Anything else is a medium of its own, stacked on its slaves.
        let below = machine.directory_entries(&format!("{own}/slaves"));
        let below = below.iter().filter_map(|slave| {
            let device = device_number_in(machine, &format!("{own}/slaves/{slave}"))?;
            (depth < DEPTH_MAX).then(|| Self::of_device(machine, device, 0..u64::MAX, depth + 1))
        });
        let below = below.flat_map(|slave| slave.own.into_iter().chain(slave.below)).collect();
        Self { own: Some(whole_extent(disk_id(machine, device), bytes)), below }
    }

    /// Whether both are the same bytes of the same medium.
    pub fn is_same(&self, other: &Self) -> bool {
        self.own.is_some() && self.own == other.own
    }

    /// Common medium, if both share bytes: a disk and its partition, a file and a loop device on
    /// it, an array and one of its disks; not two volumes mapped to one disk.
    pub fn shared_extent_with(&self, other: &Self) -> Option<&StorageExtent> {
        let (own, others) = (self.own.as_ref()?, other.own.as_ref()?);
        let meets_below = |below: &[StorageExtent], own: &StorageExtent| {
            below.iter().any(|extent| extent.overlaps(own))
        };
        if own.overlaps(others) || meets_below(&other.below, own) {
            return Some(own);
        }
        self.below.iter().find(|extent| extent.overlaps(others))
    }
}

/// What a device is a range of.
enum LowerRange {
    /// A disk, of which it is a partition.
    Disk((u32, u32), Range<u64>),
    /// The file or device of a loop device.
    Backing(FilePart),
}

fn lower_range(
    machine: &KernelFiles,
    device: (u32, u32),
    bytes: &Range<u64>,
) -> Option<LowerRange> {
    let own = device_sysfs_directory(device);
    let sectors = |path: &str| Some(machine.read_number(path)?.saturating_mul(SECTOR_BYTES));
    if machine.exists(&format!("{own}/partition")) {
        let begin = sectors(&format!("{own}/start"));
        let len = sectors(&format!("{own}/size")).unwrap_or(u64::MAX);
        if let (Some(begin), Some(disk)) = (begin, device_number_in(machine, &format!("{own}/..")))
        {
            return Some(LowerRange::Disk(disk, range_within(bytes, begin, len)));
        }
    }
    let path = machine.read_trimmed(&format!("{own}/loop/backing_file"))?;
    let begin = machine.read_number(&format!("{own}/loop/offset")).unwrap_or(0);
    let limit = machine.read_number(&format!("{own}/loop/sizelimit")).filter(|limit| *limit > 0);
    let bytes = range_within(bytes, begin, limit.unwrap_or(u64::MAX));
    Some(LowerRange::Backing(FilePart { path: path.into(), bytes }))
}

/// The files and devices below a loop device, or below the one that `device` is a partition of, from the
/// top, with the bytes of each that it shows. Empty for any other device.
pub fn backing_parts(machine: &KernelFiles, device: (u32, u32)) -> Vec<FilePart> {
    let mut parts = Vec::new();
    let (mut device, mut bytes) = (device, 0..u64::MAX);
    for _ in 0..DEPTH_MAX {
        match lower_range(machine, device, &bytes) {
            Some(LowerRange::Disk(disk, range)) => (device, bytes) = (disk, range),
            Some(LowerRange::Backing(part)) => {
                let below = DevicePath::resolve(&part.path).device;
                bytes = part.bytes.clone();
                parts.push(part);
                let Some(below) = below else { break };
                device = below;
            }
            None => break,
        }
    }
    parts
}

impl StorageExtent {
    fn overlaps(&self, other: &Self) -> bool {
        let (one, two) = (&self.bytes, &other.bytes);
        self.medium == other.medium && one.start < two.end && two.start < one.end
    }
}

const fn whole_extent(medium: StorageId, bytes: Range<u64>) -> StorageExtent {
    StorageExtent { medium, bytes }
}

/// Converts a range within a part, given by start and length, to a range of the whole.
fn range_within(bytes: &Range<u64>, begin: u64, len: u64) -> Range<u64> {
    let end = bytes.end.min(len);
    begin.saturating_add(bytes.start)..begin.saturating_add(end)
}

fn file_extent(path: &Path, bytes: Range<u64>) -> Option<StorageExtent> {
    let found = path_or_proc_link(path).metadata().ok()?;
    Some(whole_extent(StorageId::File { device: found.dev(), inode: found.ino() }, bytes))
}

/// Unique name of a disk: the world-wide name, which for an NVMe namespace is derived from its
/// NGUID, EUI-64 or UUID, or from the controller's serial number and the namespace identifier.
fn disk_id(machine: &KernelFiles, (major, minor): (u32, u32)) -> StorageId {
    let own = device_sysfs_directory((major, minor));
    let text = |path: String| machine.read_trimmed(&path).filter(|text| !text.is_empty());
    let place = DevicePath { path: Path::new("").into(), device: Some((major, minor)) };
    let HardwareIdentity { wwid, .. } = HardwareIdentity::of_device(machine, &place);
    let mapped = text(format!("{own}/dm/uuid")).or_else(|| text(format!("{own}/md/uuid")));
    mapped.or(wwid).map_or(StorageId::Numbered(major, minor), StorageId::Named)
}

impl fmt::Display for StorageId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { device, inode } => write!(out, "inode {inode} of {device:x}"),
            Self::Named(name) => out.write_str(name),
            Self::Numbered(major, minor) => write!(out, "block device {major}:{minor}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::{StorageExtents, StorageId};
    use crate::kernel_files::KernelFiles;
    use crate::kernel_files::tests::fake_kernel_files;

    const SYS: &str = "sys/dev/block";

    fn extents_of(machine: &KernelFiles, device: (u32, u32)) -> StorageExtents {
        StorageExtents::of_device(machine, device, 0..u64::MAX, 1)
    }

    #[test]
    fn partition_overlaps_its_disk_and_no_other_partition() {
        // The kernel's links lead from the partition into the directory of its disk.
        let (root, machine) = fake_kernel_files(&[
            ("disk/dev", "8:0"),
            ("disk/wwid", "naa.5"),
            ("disk/sda1/partition", "1"),
            ("disk/sda1/start", "2048"),
            ("disk/sda1/size", "4096"),
            ("disk/sda2/partition", "2"),
            ("disk/sda2/start", "6144"),
            ("disk/sda2/size", "4096"),
        ]);
        std::fs::create_dir_all(root.path().join(SYS)).unwrap();
        for (number, to) in [("8:0", "disk"), ("8:1", "disk/sda1"), ("8:2", "disk/sda2")] {
            let link = root.path().join(SYS).join(number);
            std::os::unix::fs::symlink(root.path().join(to), link).unwrap();
        }
        let [disk, one, two] = [(8, 0), (8, 1), (8, 2)].map(|device| extents_of(&machine, device));
        assert_eq!(one.own.as_ref().unwrap().medium, StorageId::Named("naa.5".into()));
        assert_eq!(one.own.as_ref().unwrap().bytes, 2048 * 512..6144 * 512);
        assert!(disk.shared_extent_with(&one).is_some() && two.shared_extent_with(&disk).is_some());
        assert!(one.shared_extent_with(&two).is_none() && !one.is_same(&disk) && one.is_same(&one));
    }

    #[test]
    fn loop_device_is_its_backing_file_at_any_depth() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        std::fs::write(&path, "").unwrap();
        let file = path.metadata().unwrap();
        let (_root, machine) = fake_kernel_files(&[
            (&format!("{SYS}/7:0/loop/backing_file"), path.to_str().unwrap()),
            (&format!("{SYS}/7:0/loop/offset"), "0"),
            (&format!("{SYS}/7:0/loop/sizelimit"), "0"),
            (&format!("{SYS}/7:1/loop/backing_file"), path.to_str().unwrap()),
            (&format!("{SYS}/7:1/loop/offset"), "4096"),
            (&format!("{SYS}/7:1/loop/sizelimit"), "8192"),
            (&format!("{SYS}/7:2/loop/backing_file"), "/gone (deleted)"),
        ]);
        let plain = StorageExtents::of_path(&machine, &path);
        let [all, part, gone] = [(7, 0), (7, 1), (7, 2)].map(|device| extents_of(&machine, device));
        let id = StorageId::File { device: file.dev(), inode: file.ino() };
        assert_eq!(part.own.as_ref().unwrap().medium, id);
        assert_eq!(part.own.as_ref().unwrap().bytes, 4096..12_288);
        assert!(plain.is_same(&all) && !plain.is_same(&part));
        assert!(plain.shared_extent_with(&part).is_some());
        assert_eq!(gone.own.unwrap().medium, StorageId::Numbered(7, 2));
    }

    #[test]
    fn mapped_devices_overlap_their_disk_and_not_each_other() {
        let (_root, machine) = fake_kernel_files(&[
            (&format!("{SYS}/253:0/dm/uuid"), "LVM-a"),
            (&format!("{SYS}/253:0/slaves/sda/dev"), "8:0"),
            (&format!("{SYS}/253:1/dm/uuid"), "LVM-b"),
            (&format!("{SYS}/253:1/slaves/sda/dev"), "8:0"),
            (&format!("{SYS}/8:0/wwid"), "eui.1"),
            (&format!("{SYS}/8:16/size"), "8"),
        ]);
        let [a, b, disk, other] =
            [(253, 0), (253, 1), (8, 0), (8, 16)].map(|one| extents_of(&machine, one));
        assert!(a.shared_extent_with(&b).is_none() && b.shared_extent_with(&a).is_none());
        assert!(a.shared_extent_with(&disk).is_some() && disk.shared_extent_with(&a).is_some());
        assert!(
            a.shared_extent_with(&other).is_none() && other.shared_extent_with(&disk).is_none()
        );
        assert_eq!(other.own.unwrap().medium, StorageId::Numbered(8, 16));
        assert_eq!(
            StorageExtents::of_path(&machine, std::path::Path::new("/no/such/file")).own,
            None
        );
    }
}
