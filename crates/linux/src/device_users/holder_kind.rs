//! Kinds of kernel devices stacked on a block device, and how each is removed.

use super::DeviceUser;
use crate::kernel_files::KernelFiles;

/// Kernel user stacked on a block device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HolderKind {
    /// LVM logical volume, by its name in `/dev/mapper`.
    LogicalVolume(String),
    /// dm-crypt device, by its name.
    Crypt(String),
    /// dm-multipath device, by its name.
    Multipath(String),
    /// Other device-mapper device, by its name.
    Mapped(String),
    /// MD array, by its device.
    Array(String),
    /// Mounted btrfs on several devices, by its UUID.
    Btrfs(String),
    /// Loop device, by its name.
    Loop(String),
    /// Export of the kernel's NVMe target, by its subsystem.
    Exported(String),
    /// Other device, by its name.
    Other(String),
}

impl HolderKind {
    /// Determines the kind of the holder whose sysfs directory is `directory`.
    pub(super) fn from_sysfs(machine: &KernelFiles, directory: &str, holder: &str) -> Self {
        let mapped = machine.read_trimmed(&format!("{directory}/dm/name"));
        let uuid = machine.read_trimmed(&format!("{directory}/dm/uuid")).unwrap_or_default();
        match mapped {
            Some(name) if uuid.starts_with("LVM-") => Self::LogicalVolume(name),
            Some(name) if uuid.starts_with("CRYPT-") => Self::Crypt(name),
            Some(name) if uuid.starts_with("mpath-") => Self::Multipath(name),
            Some(name) => Self::Mapped(name),
            None if holder.starts_with("md") => Self::Array(holder.into()),
            None => Self::Other(holder.into()),
        }
    }

    /// Builds the user entry for `device`; `holder` is the kernel's name, if it differs.
    pub(super) fn into_device_user(self, device: &str, holder: &str) -> DeviceUser {
        let shown = match &self {
            Self::LogicalVolume(name) => format!("{holder} (LVM {name})"),
            Self::Crypt(name) => format!("{holder} (cipher {name})"),
            Self::Multipath(name) => format!("{holder} (multipath {name})"),
            Self::Mapped(name) => format!("{holder} ({name})"),
            Self::Array(_) | Self::Loop(_) | Self::Other(_) => holder.to_owned(),
            Self::Btrfs(uuid) => format!("btrfs {uuid}"),
            Self::Exported(subsystem) => format!("the kernel's target with {subsystem}"),
        };
        DeviceUser::HeldBy { device: device.into(), holder: shown, kind: self }
    }

    /// Command or action that removes the holder.
    pub(super) fn removal_fix(&self) -> String {
        match self {
            Self::LogicalVolume(name) => format!("`sudo lvchange -an /dev/mapper/{name}`"),
            Self::Crypt(name) => format!("`sudo cryptsetup close {name}`"),
            Self::Multipath(name) => format!("`sudo multipath -f {name}`"),
            Self::Mapped(name) => format!("`sudo dmsetup remove {name}`"),
            Self::Array(name) => format!("`sudo mdadm --stop /dev/{name}`"),
            Self::Btrfs(uuid) => format!("`sudo umount UUID={uuid}`"),
            Self::Loop(name) => format!("`sudo losetup -d /dev/{name}`"),
            Self::Exported(subsystem) => {
                format!("`nvmetcli`, which takes the namespace out of {subsystem}")
            }
            Self::Other(name) => format!("stopping {name}"),
        }
    }
}

/// Users of device `name` that have no link in `holders`.
pub(super) fn unlinked_holders(machine: &KernelFiles, name: &str) -> Vec<HolderKind> {
    let mut found = Vec::new();
    for uuid in machine.directory_entries("sys/fs/btrfs") {
        if machine.exists(&format!("sys/fs/btrfs/{uuid}/devices/{name}")) {
            found.push(HolderKind::Btrfs(uuid));
        }
    }
    const TARGET: &str = "sys/kernel/config/nvmet/subsystems";
    let node = format!("/dev/{name}");
    for subsystem in machine.directory_entries(TARGET) {
        let spaces = format!("{TARGET}/{subsystem}/namespaces");
        let of_it = |space: &String| {
            let path = |file| format!("{spaces}/{space}/{file}");
            machine.read_trimmed(&path("device_path")).is_some_and(|path| path == node)
                && machine.read_trimmed(&path("enable")).is_some_and(|enabled| enabled == "1")
        };
        if machine.directory_entries(&spaces).iter().any(of_it) {
            found.push(HolderKind::Exported(subsystem));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use crate::device_users::{DevicePath, DeviceUser};
    use crate::kernel_files::tests::fake_kernel_files;

    /// Holders of 8:0 with their fixes.
    fn holder_and_fix_texts(files: &[(&str, &str)]) -> Vec<(String, String)> {
        let (_root, machine) = fake_kernel_files(files);
        let disk = DevicePath { path: "/dev/sda".into(), device: Some((8, 0)) };
        let said = |used: &DeviceUser| (used.to_string(), used.release_command());
        DeviceUser::users_of(&machine, &disk).iter().map(said).collect()
    }

    #[test]
    fn every_holder_kind_has_a_name_and_a_removal_command() {
        const NAMED: (&str, &str) = ("sys/dev/block/8:0/uevent", "DEVNAME=sda\n");
        const DM: &str = "sys/dev/block/8:0/holders/dm-0/dm";
        let (name, uuid) = (format!("{DM}/name"), format!("{DM}/uuid"));
        for (kind, holder, remedy) in [
            ("LVM-x", "dm-0 (LVM n)", "`sudo lvchange -an /dev/mapper/n`"),
            ("CRYPT-LUKS2-x", "dm-0 (cipher n)", "`sudo cryptsetup close n`"),
            ("mpath-x", "dm-0 (multipath n)", "`sudo multipath -f n`"),
            ("", "dm-0 (n)", "`sudo dmsetup remove n`"),
        ] {
            let found = holder_and_fix_texts(&[NAMED, (&name, "n\n"), (&uuid, kind)]);
            assert_eq!(found, [(format!("{holder} stands on sda"), remedy.to_owned())]);
        }
        let found = holder_and_fix_texts(&[
            NAMED,
            ("sys/dev/block/8:0/holders/md127/md/level", "raid1\n"),
            ("sys/dev/block/8:0/holders/bcache0/x", ""),
            ("sys/fs/btrfs/0ab4/devices/sda/size", "8\n"),
            ("sys/fs/btrfs/0ab5/devices/sdb/size", "8\n"),
            ("sys/fs/btrfs/features/raid1c34", "0\n"),
            ("sys/kernel/config/nvmet/subsystems/nqn.x/namespaces/1/device_path", "/dev/sda\n"),
            ("sys/kernel/config/nvmet/subsystems/nqn.x/namespaces/1/enable", "1\n"),
            ("sys/kernel/config/nvmet/subsystems/nqn.y/namespaces/1/device_path", "/dev/sda\n"),
            ("sys/kernel/config/nvmet/subsystems/nqn.y/namespaces/1/enable", "0\n"),
            ("sys/block/loop1/loop/backing_file", "/dev/sda\n"),
            ("sys/block/loop2/loop/backing_file", "/dev/sdb\n"),
        ]);
        let expected = [
            ("bcache0 stands on sda", "stopping bcache0"),
            ("md127 stands on sda", "`sudo mdadm --stop /dev/md127`"),
            ("btrfs 0ab4 stands on sda", "`sudo umount UUID=0ab4`"),
            (
                "the kernel's target with nqn.x stands on sda",
                "`nvmetcli`, which takes the namespace out of nqn.x",
            ),
            ("loop1 stands on sda", "`sudo losetup -d /dev/loop1`"),
        ];
        assert_eq!(found, expected.map(|(said, remedy)| (said.to_owned(), remedy.to_owned())));
    }
}
