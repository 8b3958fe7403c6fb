//! Volume capabilities: access mode, and block device or file system.

use crate::messages::{Mode, VolumeCapability};
use crate::status::{CallResult, Status};

/// File system of a volume whose storage class names none.
pub(crate) const FS_TYPE_DEFAULT: &str = "ext4";

/// Capability that the driver supports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Access {
    pub(crate) mode: Mode,
    /// `None` for a block device.
    pub(crate) mount: Option<MountAccess>,
}

/// Use of a volume as a file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MountAccess {
    pub(crate) fs_type: FsType,
    pub(crate) flags: Vec<String>,
}

/// File system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FsType {
    Ext4,
    Xfs,
}

impl FsType {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
        }
    }

    pub(crate) fn from_name(name: &str) -> Option<Self> {
        [Self::Ext4, Self::Xfs].into_iter().find(|known| known.name() == name)
    }
}

impl Access {
    /// Checks a capability; the error names what is not supported.
    pub(crate) fn parse(capability: &VolumeCapability) -> CallResult<Self> {
        let refuse = |why: &str| Err(Status::invalid_argument(format!("volume_capability: {why}")));
        let found = capability.access_mode.map(|mode| mode.mode());
        let Some(mode) = found.filter(|mode| *mode != Mode::Unknown) else {
            return refuse("no access mode, expected one");
        };
        let mount = match (&capability.block, &capability.mount) {
            (Some(_), None) => None,
            (None, Some(mount)) => {
                let name = match mount.fs_type.as_str() {
                    "" => FS_TYPE_DEFAULT,
                    name => name,
                };
                let Some(fs_type) = FsType::from_name(name) else {
                    return refuse(&format!("file system `{name}`, expected ext4 or xfs"));
                };
                Some(MountAccess { fs_type, flags: mount.mount_flags.clone() })
            }
            _ => return refuse("no access type, expected block or mount"),
        };
        if mount.is_some()
            && matches!(mode, Mode::MultiNodeSingleWriter | Mode::MultiNodeMultiWriter)
        {
            return refuse(
                "a file system that several nodes write, expected a block device, or nodes that read",
            );
        }
        Ok(Self { mode, mount })
    }

    /// Checks the capability of a request, which must have one.
    pub(crate) fn required(capability: Option<&VolumeCapability>) -> CallResult<Self> {
        let missing = || Status::invalid_argument("volume_capability: missing");
        Self::parse(capability.ok_or_else(missing)?)
    }

    /// Checks all capabilities of a volume, which must have some.
    pub(crate) fn parse_all(capabilities: &[VolumeCapability]) -> CallResult<Vec<Self>> {
        if capabilities.is_empty() {
            return Err(Status::invalid_argument("volume_capabilities: missing"));
        }
        capabilities.iter().map(Self::parse).collect()
    }

    /// Whether one node may have the volume at a time.
    pub(crate) const fn is_single_node(&self) -> bool {
        matches!(
            self.mode,
            Mode::SingleNodeWriter
                | Mode::SingleNodeReaderOnly
                | Mode::SingleNodeSingleWriter
                | Mode::SingleNodeMultiWriter
        )
    }

    /// Whether the volume is only read.
    pub(crate) const fn is_read_only(&self) -> bool {
        matches!(self.mode, Mode::SingleNodeReaderOnly | Mode::MultiNodeReaderOnly)
    }
}

#[cfg(test)]
mod tests {
    use super::{Access, FsType};
    use crate::messages::{AccessMode, Empty, Mode, MountVolume, VolumeCapability};

    fn parse(block: bool, fs_type: Option<&str>, mode: Mode) -> Result<Access, String> {
        let mount = |fs_type: &str| MountVolume { fs_type: fs_type.into(), mount_flags: vec![] };
        let capability = VolumeCapability {
            block: block.then_some(Empty {}),
            mount: fs_type.map(mount),
            access_mode: Some(AccessMode { mode: mode as i32 }),
        };
        Access::parse(&capability).map_err(|status| status.message)
    }

    #[test]
    fn file_system_is_written_by_one_node() {
        for mode in [Mode::SingleNodeWriter, Mode::SingleNodeMultiWriter, Mode::MultiNodeReaderOnly]
        {
            let access = parse(false, Some(""), mode).unwrap();
            assert_eq!(access.mount.unwrap().fs_type, FsType::Ext4);
        }
        for mode in [Mode::MultiNodeSingleWriter, Mode::MultiNodeMultiWriter] {
            assert!(parse(false, Some("xfs"), mode).unwrap_err().contains("several nodes write"));
            assert_eq!(parse(true, None, mode).unwrap().mount, None);
        }
    }

    #[test]
    fn what_is_missing_or_unknown_is_named() {
        assert!(parse(false, None, Mode::SingleNodeWriter).unwrap_err().contains("access type"));
        assert!(parse(true, None, Mode::Unknown).unwrap_err().contains("access mode"));
        let refused = parse(false, Some("btrfs"), Mode::SingleNodeWriter).unwrap_err();
        assert!(refused.contains("`btrfs`, expected ext4 or xfs"), "{refused}");
    }
}
