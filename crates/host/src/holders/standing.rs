//! What stands on a block device, by kind, and how each kind is made to let go.

use super::InUse;
use crate::machine::Machine;

/// Something of the kernel's that stands on a block device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// A logical volume of LVM, by its name in `/dev/mapper`.
    Volume(String),
    /// A cipher of the device mapper, by its name.
    Cipher(String),
    /// Several paths of the device mapper made one, by its name.
    Multipath(String),
    /// Another device of the device mapper, by its name.
    Mapped(String),
    /// An array of MD, by its device.
    Array(String),
    /// A mounted btrfs over several devices, by its UUID.
    Btrfs(String),
    /// A loop device, by its name.
    Loop(String),
    /// The kernel's NVMe target, by the subsystem that exports it.
    Exported(String),
    /// A device of another kind, by its name.
    Other(String),
}

impl Standing {
    /// The holder whose directory in `/sys` is `directory`.
    pub(super) fn of(machine: &Machine, directory: &str, holder: &str) -> Self {
        let mapped = machine.text(&format!("{directory}/dm/name"));
        let uuid = machine.text(&format!("{directory}/dm/uuid")).unwrap_or_default();
        match mapped {
            Some(name) if uuid.starts_with("LVM-") => Self::Volume(name),
            Some(name) if uuid.starts_with("CRYPT-") => Self::Cipher(name),
            Some(name) if uuid.starts_with("mpath-") => Self::Multipath(name),
            Some(name) => Self::Mapped(name),
            None if holder.starts_with("md") => Self::Array(holder.into()),
            None => Self::Other(holder.into()),
        }
    }

    /// That it stands on `device`; `holder` is how the kernel calls it, if that is not its name.
    pub(super) fn on(self, device: &str, holder: &str) -> InUse {
        let shown = match &self {
            Self::Volume(name) => format!("{holder} (LVM {name})"),
            Self::Cipher(name) => format!("{holder} (cipher {name})"),
            Self::Multipath(name) => format!("{holder} (multipath {name})"),
            Self::Mapped(name) => format!("{holder} ({name})"),
            Self::Array(_) | Self::Loop(_) | Self::Other(_) => holder.to_owned(),
            Self::Btrfs(uuid) => format!("btrfs {uuid}"),
            Self::Exported(subsystem) => format!("the kernel's target with {subsystem}"),
        };
        InUse::HeldBy { device: device.into(), holder: shown, kind: self }
    }

    /// The command, or the act, that takes it away.
    pub(super) fn remedy(&self) -> String {
        match self {
            Self::Volume(name) => format!("`sudo lvchange -an /dev/mapper/{name}`"),
            Self::Cipher(name) => format!("`sudo cryptsetup close {name}`"),
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

/// What has no link in `holders`, though it stands on the device called `name`.
pub(super) fn without_a_link(machine: &Machine, name: &str) -> Vec<Standing> {
    let mut found = Vec::new();
    for uuid in machine.names("sys/fs/btrfs") {
        if machine.has(&format!("sys/fs/btrfs/{uuid}/devices/{name}")) {
            found.push(Standing::Btrfs(uuid));
        }
    }
    const TARGET: &str = "sys/kernel/config/nvmet/subsystems";
    let node = format!("/dev/{name}");
    for subsystem in machine.names(TARGET) {
        let spaces = format!("{TARGET}/{subsystem}/namespaces");
        let of_it = |space: &String| {
            let path = |file| format!("{spaces}/{space}/{file}");
            machine.text(&path("device_path")).is_some_and(|path| path == node)
                && machine.text(&path("enable")).is_some_and(|enabled| enabled == "1")
        };
        if machine.names(&spaces).iter().any(of_it) {
            found.push(Standing::Exported(subsystem));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use crate::holders::{InUse, Place};
    use crate::machine::tests::made_of;

    /// What is said of 8:0, and how it is ended.
    fn said(files: &[(&str, &str)]) -> Vec<(String, String)> {
        let (_root, machine) = made_of(files);
        let disk = Place { path: "/dev/sda".into(), device: Some((8, 0)) };
        let said = |used: &InUse| (used.to_string(), used.remedy());
        InUse::of(&machine, &disk).iter().map(said).collect()
    }

    #[test]
    fn every_kind_of_holder_is_named_with_what_ends_it() {
        const NAMED: (&str, &str) = ("sys/dev/block/8:0/uevent", "DEVNAME=sda\n");
        const DM: &str = "sys/dev/block/8:0/holders/dm-0/dm";
        let (name, uuid) = (format!("{DM}/name"), format!("{DM}/uuid"));
        for (kind, holder, remedy) in [
            ("LVM-x", "dm-0 (LVM n)", "`sudo lvchange -an /dev/mapper/n`"),
            ("CRYPT-LUKS2-x", "dm-0 (cipher n)", "`sudo cryptsetup close n`"),
            ("mpath-x", "dm-0 (multipath n)", "`sudo multipath -f n`"),
            ("", "dm-0 (n)", "`sudo dmsetup remove n`"),
        ] {
            let found = said(&[NAMED, (&name, "n\n"), (&uuid, kind)]);
            assert_eq!(found, [(format!("{holder} stands on sda"), remedy.to_owned())]);
        }
        let found = said(&[
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
