//! Users of a file or a block device, and the identity of the device, from the kernel's files.
//!
//! | file | content |
//! |---|---|
//! | `/sys/dev/block/M:m/holders`, `dm/name`, `md` | devices stacked on it, recursively |
//! | `/sys/block/loop*/loop/backing_file` | loop devices backed by it |
//! | `/sys/fs/btrfs/UUID/devices` | all devices of a mounted btrfs; the mount names only one |
//! | `/sys/kernel/config/nvmet` | exports of the kernel's NVMe target |
//! | `/proc/self/mountinfo` | file systems mounted from it, its partitions and its holders |
//! | `/proc/swaps` | swap |
//! | `/proc/locks` | processes that have locked a file |
//! | `/proc/PID/fd` | processes that have a device open, as far as permitted |
//! | `/sys/dev/block/M:m/start`, `loop/offset`, `slaves` | the underlying bytes |
//! | `/sys/dev/block/M:m/queue/write_cache` | whether completed writes are persistent |
//! | `/sys/dev/block/M:m/wwid`, `serial`, `dm/uuid`, `md/uuid` | identity of the device |

mod holder_kind;
mod processes_with_open_devices;
mod storage_extent;
mod storage_identity;

use std::fmt;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, major, minor, stat};

pub use self::holder_kind::HolderKind;
pub use self::processes_with_open_devices::{
    ProcessesWithOpenDevices, find_processes_with_open_devices,
};
pub use self::storage_extent::{FilePart, StorageExtent, StorageExtents, StorageId, backing_parts};
pub use self::storage_identity::{device_identity, file_identity, persistent_identity};
use crate::kernel_files::KernelFiles;

/// User of a file or a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceUser {
    /// A mounted file system.
    Mounted {
        /// Kernel name of the mounted device.
        device: String,
        /// Mount point.
        at: String,
    },
    /// Active swap.
    Swap {
        /// Device or file.
        name: String,
    },
    /// A stacked kernel device.
    HeldBy {
        /// Underlying device.
        device: String,
        /// Name of the holder: `dm-0 (LVM vg-root)`.
        holder: String,
        /// Kind of the holder.
        kind: HolderKind,
    },
    /// A process that has the device open.
    Open {
        /// Device name.
        device: String,
        /// Process identifier.
        process: u32,
        /// Process name.
        name: String,
    },
}

/// File or device, with its device number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DevicePath {
    /// Canonical path.
    pub path: PathBuf,
    /// Device number of a block device; `None` for a file.
    pub device: Option<(u32, u32)>,
}

/// Hardware identity of a block device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HardwareIdentity {
    /// Model.
    pub model: Option<String>,
    /// Serial number.
    pub serial: Option<String>,
    /// World-wide identifier.
    pub wwid: Option<String>,
}

/// Maximum depth of stacked devices that is examined.
const DEPTH_MAX: u32 = 8;

impl DevicePath {
    /// Resolves the file or device at `path`.
    pub fn resolve(path: &Path) -> Self {
        let is_device = |mode| FileType::from_raw_mode(mode) == FileType::BlockDevice;
        let found = stat(path).ok().filter(|found| is_device(found.st_mode));
        let device = found.map(|found| (major(found.st_rdev), minor(found.st_rdev)));
        Self { path: path.canonicalize().unwrap_or_else(|_| path.into()), device }
    }
}

impl DeviceUser {
    /// Finds the users of the file or device at `path`.
    pub fn users_of_path(machine: &KernelFiles, path: &Path) -> Vec<Self> {
        Self::users_of(machine, &DevicePath::resolve(path))
    }

    /// Finds the users of `place`, nearest first.
    pub fn users_of(machine: &KernelFiles, place: &DevicePath) -> Vec<Self> {
        let mut look = HolderScan::new(machine);
        let path = place.path.display().to_string();
        match place.device {
            Some(device) => look.scan_device(device, Some(&path), 1),
            None => look.scan_file(&path),
        }
        look.found
    }

    /// Whether the user is on `disk` or one of its partitions.
    pub fn is_user_of_disk(&self, disk: &str) -> bool {
        let device = match self {
            Self::Mounted { device, .. } | Self::HeldBy { device, .. } => device,
            Self::Open { device, .. } => device,
            Self::Swap { name } => name.strip_prefix("/dev/").unwrap_or(name),
        };
        // A disk whose name ends in a digit has partitions named with `p` and a number.
        device.strip_prefix(disk).is_some_and(|rest| rest.is_empty() || rest.starts_with('p'))
    }

    /// Command or action that releases the device.
    pub fn release_command(&self) -> String {
        match self {
            Self::Mounted { at, .. } => format!("`sudo umount {at}`"),
            Self::Swap { name } => format!("`sudo swapoff {name}`"),
            Self::HeldBy { kind, .. } => kind.removal_fix(),
            Self::Open { process, .. } => format!("`kill {process}`"),
        }
    }
}

impl HardwareIdentity {
    /// Hardware identity of the device at `place`; for a partition, of its disk.
    pub fn of_device(machine: &KernelFiles, place: &DevicePath) -> Self {
        let Some(device) = place.device else { return Self::default() };
        let disk = disk_of_partition(machine, &device_sysfs_directory(device));
        let first = |names: &[&str]| {
            let mut texts =
                names.iter().filter_map(|name| machine.read_trimmed(&format!("{disk}/{name}")));
            texts.find(|text| !text.is_empty())
        };
        Self {
            model: first(&["device/model"]),
            serial: first(&["device/serial", "serial"]),
            wwid: first(&["wwid", "device/wwid"]),
        }
    }
}

/// Cache mode of a block device, or of the disk of a partition: `write back` or `write through`
/// (`queue/write_cache`). `None` if not reported.
pub fn write_cache_mode(machine: &KernelFiles, device: (u32, u32)) -> Option<String> {
    let disk = disk_of_partition(machine, &device_sysfs_directory(device));
    machine.read_trimmed(&format!("{disk}/queue/write_cache"))
}

/// Processes that have a lock on the file of this inode, on a file system of this device, in order.
pub fn lock_holders(machine: &KernelFiles, device: (u32, u32), inode: u64) -> Vec<u32> {
    let (major, minor) = device;
    let wanted = format!("{major:02x}:{minor:02x}:{inode}");
    let text = machine.read_trimmed("proc/locks").unwrap_or_default();
    // `1: FLOCK  ADVISORY  WRITE 4711 fd:01:123456 0 EOF` (proc_locks(5)). A lock of an open file
    // description has the process -1.
    let holders = text.lines().filter_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let place = words.iter().position(|word| *word == wanted)?;
        words.get(place.checked_sub(1)?)?.parse().ok()
    });
    let mut holders: Vec<u32> = holders.collect();
    holders.sort_unstable();
    holders.dedup();
    holders
}

/// The first process that has a lock on the file of this inode.
pub fn lock_holder(machine: &KernelFiles, device: (u32, u32), inode: u64) -> Option<u32> {
    lock_holders(machine, device, inode).into_iter().next()
}

/// Process that has locked the file at `path`.
pub fn lock_holder_of(machine: &KernelFiles, path: &Path) -> Option<u32> {
    let found = stat(path).ok()?;
    lock_holder(machine, (major(found.st_dev), minor(found.st_dev)), found.st_ino)
}

/// One scan of mounts, swap and holders.
struct HolderScan<'a> {
    machine: &'a KernelFiles,
    mounts: Vec<MountEntry>,
    swaps: Vec<String>,
    found: Vec<DeviceUser>,
}

struct MountEntry {
    device: String,
    source: String,
    at: String,
}

impl<'a> HolderScan<'a> {
    fn new(machine: &'a KernelFiles) -> Self {
        let text = |path| machine.read_trimmed(path).unwrap_or_default();
        Self {
            machine,
            mounts: text("proc/self/mountinfo").lines().filter_map(parse_mountinfo_line).collect(),
            swaps: text("proc/swaps").lines().skip(1).filter_map(parse_swap_line).collect(),
            found: Vec::new(),
        }
    }

    fn scan_file(&mut self, path: &str) {
        if self.swaps.iter().any(|swap| swap == path) {
            self.found.push(DeviceUser::Swap { name: path.into() });
        }
        self.scan_loop_devices(path, path, 1);
    }

    fn scan_loop_devices(&mut self, path: &str, name: &str, depth: u32) {
        for holder in self.machine.directory_entries("sys/block") {
            let backing =
                self.machine.read_trimmed(&format!("sys/block/{holder}/loop/backing_file"));
            if backing.as_deref() == Some(path) {
                let found = HolderKind::Loop(holder.clone());
                self.scan_holder(name, found, &format!("sys/block/{holder}"), depth);
            }
        }
    }

    /// Examines a block device, its partitions, and everything stacked on them.
    fn scan_device(&mut self, device: (u32, u32), path: Option<&str>, depth: u32) {
        let own = device_sysfs_directory(device);
        let name = device_name(self.machine, &own)
            .or_else(|| path.map(str::to_owned))
            .unwrap_or_else(|| device_number_text(device));
        self.scan_direct_users(device, path, &name);
        self.scan_holders(&own, &name, depth);
        for part in self.machine.directory_entries(&own) {
            let part = format!("{own}/{part}");
            if self.machine.exists(&format!("{part}/partition"))
                && let Some(device) = device_number_in(self.machine, &part)
            {
                let name =
                    device_name(self.machine, &part).unwrap_or_else(|| device_number_text(device));
                self.scan_direct_users(device, None, &name);
                self.scan_holders(&part, &name, depth);
            }
        }
    }

    fn scan_direct_users(&mut self, device: (u32, u32), path: Option<&str>, name: &str) {
        let number = device_number_text(device);
        let node = format!("/dev/{name}");
        let is_it = |text: &str| text == node || path == Some(text);
        // File systems on several devices have an anonymous device number; their source is one of
        // the devices.
        let mounts = self.mounts.iter().filter(|one| one.device == number || is_it(&one.source));
        let mounts =
            mounts.map(|one| DeviceUser::Mounted { device: name.into(), at: one.at.clone() });
        self.found.extend(mounts);
        if self.swaps.iter().any(|swap| is_it(swap)) {
            self.found.push(DeviceUser::Swap { name: node });
        }
    }

    fn scan_holders(&mut self, directory: &str, name: &str, depth: u32) {
        for holder in self.machine.directory_entries(&format!("{directory}/holders")) {
            let directory = format!("{directory}/holders/{holder}");
            let found = HolderKind::from_sysfs(self.machine, &directory, &holder);
            self.scan_holder(name, found, &directory, depth);
        }
        for found in holder_kind::unlinked_holders(self.machine, name) {
            self.found.push(found.into_device_user(name, ""));
        }
        if !name.starts_with('/') {
            self.scan_loop_devices(&format!("/dev/{name}"), name, depth);
        }
    }

    fn scan_holder(&mut self, device: &str, found: HolderKind, directory: &str, depth: u32) {
        let holder = directory.rsplit('/').next().unwrap_or_default();
        self.found.push(found.into_device_user(device, holder));
        if depth < DEPTH_MAX
            && let Some(device) = device_number_in(self.machine, directory)
        {
            self.scan_device(device, None, depth + 1);
        }
    }
}

fn device_sysfs_directory((major, minor): (u32, u32)) -> String {
    format!("sys/dev/block/{major}:{minor}")
}

/// Disk of a partition; of anything else, itself.
fn disk_of_partition(machine: &KernelFiles, own: &str) -> String {
    let is_partition = machine.exists(&format!("{own}/partition"));
    if is_partition { format!("{own}/..") } else { own.to_owned() }
}

fn device_number_text((major, minor): (u32, u32)) -> String {
    format!("{major}:{minor}")
}

fn device_number_in(machine: &KernelFiles, directory: &str) -> Option<(u32, u32)> {
    let text = machine.read_trimmed(&format!("{directory}/dev"))?;
    let (major, minor) = text.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

fn device_name(machine: &KernelFiles, directory: &str) -> Option<String> {
    let text = machine.read_trimmed(&format!("{directory}/uevent"))?;
    text.lines().find_map(|line| line.strip_prefix("DEVNAME=")).map(str::to_owned)
}

/// `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw` (proc_pid_mountinfo(5)).
fn parse_mountinfo_line(line: &str) -> Option<MountEntry> {
    let (before, after) = line.split_once(" - ")?;
    let fields: Vec<&str> = before.split(' ').collect();
    let source = after.split(' ').nth(1)?;
    let (device, at) = (*fields.get(2)?, decode_octal_escapes(fields.get(4)?));
    Some(MountEntry { device: device.into(), source: decode_octal_escapes(source), at })
}

fn parse_swap_line(line: &str) -> Option<String> {
    line.split_whitespace().next().map(decode_octal_escapes)
}

/// Decodes octal escapes such as `\040`, as the kernel writes them.
fn decode_octal_escapes(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((byte, after)) = rest.split_first() {
        let octal = after
            .get(..3)
            .filter(|_| *byte == b'\\')
            .and_then(|digits| u8::from_str_radix(std::str::from_utf8(digits).ok()?, 8).ok());
        bytes.push(octal.unwrap_or(*byte));
        rest = if octal.is_some() { &after[3..] } else { after };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

impl fmt::Display for DeviceUser {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mounted { device, at } => write!(out, "{device} is mounted at {at}"),
            Self::Swap { name } => write!(out, "{name} is swapped to"),
            Self::HeldBy { device, holder, .. } => write!(out, "{holder} stands on {device}"),
            Self::Open { device, process, name } => {
                write!(out, "process {process} ({name}) has {device} open")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{DevicePath, DeviceUser, HardwareIdentity, lock_holder};
    use crate::kernel_files::tests::fake_kernel_files;

    const DISK: &str = "sys/dev/block/8:0";
    const DM: &str = "sys/dev/block/8:0/sda2/holders/dm-0";

    fn device_path(path: &str, device: Option<(u32, u32)>) -> DevicePath {
        DevicePath { path: path.into(), device }
    }

    fn user_texts(uses: &[DeviceUser]) -> Vec<String> {
        uses.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn users_of_a_disk_are_found_through_partitions_and_holders() {
        let (_root, machine) = fake_kernel_files(&[
            (&format!("{DISK}/uevent"), "MAJOR=8\nDEVNAME=sda\n"),
            (&format!("{DISK}/device/model"), "Disk 9\n"),
            (&format!("{DISK}/device/serial"), "S4EW\n"),
            (&format!("{DISK}/sda1/partition"), "1\n"),
            (&format!("{DISK}/sda1/dev"), "8:1\n"),
            (&format!("{DISK}/sda1/uevent"), "DEVNAME=sda1\n"),
            (&format!("{DISK}/sda2/partition"), "2\n"),
            (&format!("{DISK}/sda2/dev"), "8:2\n"),
            (&format!("{DISK}/sda2/uevent"), "DEVNAME=sda2\n"),
            (&format!("{DM}/dm/name"), "vg-root\n"),
            (&format!("{DM}/dev"), "253:0\n"),
            ("sys/dev/block/253:0/uevent", "DEVNAME=dm-0\n"),
            (
                "proc/self/mountinfo",
                "22 1 253:0 / / rw shared:1 - ext4 /dev/mapper/vg-root rw\n\
                 23 22 0:39 / /data\\040one rw - btrfs /dev/sda1 rw\n\
                 24 22 8:16 / /other rw - xfs /dev/sdb rw\n",
            ),
            ("proc/swaps", "Filename Type Size Used Priority\n/dev/sda1 partition 1 0 -2\n"),
        ]);
        let disk = device_path("/dev/disk/by-id/x", Some((8, 0)));
        assert_eq!(
            user_texts(&DeviceUser::users_of(&machine, &disk)),
            [
                "sda1 is mounted at /data one",
                "/dev/sda1 is swapped to",
                "dm-0 (vg-root) stands on sda2",
                "dm-0 is mounted at /"
            ]
        );
        let hardware = HardwareIdentity::of_device(&machine, &disk);
        assert_eq!((hardware.model.as_deref(), hardware.wwid), (Some("Disk 9"), None));
        assert_eq!(hardware.serial.as_deref(), Some("S4EW"));
        assert_eq!(DeviceUser::users_of(&machine, &device_path("/dev/sdc", Some((8, 32)))), []);
    }

    #[test]
    fn mounted_disk_is_found_by_number_and_by_name() {
        let (_root, machine) = fake_kernel_files(&[(
            "proc/self/mountinfo",
            "24 22 8:16 / /a rw - xfs /dev/root rw\n25 22 0:9 / /b rw - btrfs /dev/sdb rw\n",
        )]);
        let found = DeviceUser::users_of(&machine, &device_path("/dev/sdb", Some((8, 16))));
        let device = || "/dev/sdb".to_owned();
        assert_eq!(
            found,
            [
                DeviceUser::Mounted { device: device(), at: "/a".into() },
                DeviceUser::Mounted { device: device(), at: "/b".into() }
            ]
        );
    }

    #[test]
    fn file_is_found_below_a_loop_device_and_as_swap() {
        let (_root, machine) = fake_kernel_files(&[
            ("sys/block/loop0/loop/backing_file", "/srv/other\n"),
            ("sys/block/loop3/loop/backing_file", "/srv/disk\n"),
            ("sys/block/loop3/dev", "7:3\n"),
            ("sys/dev/block/7:3/uevent", "DEVNAME=loop3\n"),
            ("proc/self/mountinfo", "24 22 7:3 / /mnt rw - ext4 /dev/loop3 rw\n"),
            ("proc/swaps", "Filename\n/srv/swap\\040file file 1 0 -2\n"),
        ]);
        let of = |path| user_texts(&DeviceUser::users_of(&machine, &device_path(path, None)));
        assert_eq!(of("/srv/disk"), ["loop3 stands on /srv/disk", "loop3 is mounted at /mnt"]);
        assert_eq!(of("/srv/swap file"), ["/srv/swap file is swapped to"]);
        assert_eq!(of("/srv/new"), [""; 0]);
    }

    #[test]
    fn circular_stacking_terminates() {
        let (_root, machine) = fake_kernel_files(&[("sys/dev/block/9:0/holders/md0/dev", "9:0\n")]);
        let found = DeviceUser::users_of(&machine, &device_path("/dev/md0", Some((9, 0))));
        assert_eq!(found.len(), 8);
    }

    #[test]
    fn disk_of_a_partition_has_its_hardware_identity() {
        let (_root, machine) = fake_kernel_files(&[
            ("sys/dev/block/259:1/partition", "1\n"),
            ("sys/dev/block/device/model", "NVMe 1\n"),
            ("sys/dev/block/wwid", "eui.1\n"),
        ]);
        let hardware =
            HardwareIdentity::of_device(&machine, &device_path("/dev/nvme0n1p1", Some((259, 1))));
        assert_eq!((hardware.model.as_deref(), hardware.serial), (Some("NVMe 1"), None));
        assert_eq!(hardware.wwid.as_deref(), Some("eui.1"));
    }

    #[test]
    fn lock_holder_is_found_by_device_and_inode() {
        let (_root, machine) = fake_kernel_files(&[(
            "proc/locks",
            "1: POSIX  ADVISORY  WRITE 7 fd:01:12 0 EOF\n\
             2: FLOCK  ADVISORY  WRITE 4711 fd:01:123456 0 EOF\n\
             3: OFDLCK ADVISORY  READ -1 fd:01:99 0 EOF\n",
        )]);
        assert_eq!(lock_holder(&machine, (253, 1), 123_456), Some(4711));
        assert_eq!(lock_holder(&machine, (253, 1), 1234), None);
        assert_eq!(lock_holder(&machine, (253, 1), 99), None, "-1 is not a process");
        assert_eq!(lock_holder(&machine, (8, 1), 12), None);
    }
}
