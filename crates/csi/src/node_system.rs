//! What the node service needs of the operating system. Each method is one step that may be the last one of a
//! process.

use std::path::{Path, PathBuf};

use crate::capabilities::FsType;
use crate::connection::Connection;
use crate::status::CallResult;

/// Operating system of a node.
pub(crate) trait NodeSystem {
    /// Why no volume can be attached here.
    fn attachment_problem(&mut self) -> Option<String>;

    /// The block device of a subsystem, if it is attached.
    fn attached_device(&mut self, nqn: &str) -> CallResult<Option<Device>>;

    /// Attaches a volume by all of its addresses; those that are connected stay.
    fn attach(&mut self, connection: &Connection) -> CallResult<Device>;

    /// Detaches a volume. One that is not attached is no error.
    fn detach(&mut self, nqn: &str) -> CallResult<()>;

    /// Size of a device, once it has at least `size_bytes`.
    fn wait_for_size(&mut self, device: &Device, size_bytes: u64) -> CallResult<u64>;

    /// What a device contains, by its signatures: the name of a file system, or other data. `None` if there is no
    /// signature.
    fn content(&mut self, device: &Device) -> CallResult<Option<String>>;

    /// Records that a file system is being made on the device of a volume, or no longer.
    fn set_formatting(&mut self, nqn: &str, is_formatting: bool) -> CallResult<()>;

    fn is_formatting(&mut self, nqn: &str) -> CallResult<bool>;

    /// Makes a file system, over whatever the device contains.
    fn make_file_system(&mut self, device: &Device, fs_type: FsType) -> CallResult<()>;

    /// Checks a file system that is not mounted, and repairs what is repaired without a question.
    fn check_file_system(&mut self, device: &Device, fs_type: FsType) -> CallResult<()>;

    /// Grows a mounted file system to the size of its device.
    fn grow_file_system(
        &mut self,
        device: &Device,
        fs_type: FsType,
        mount_point: &Path,
    ) -> CallResult<()>;

    /// All mounts, in the order in which they were made.
    fn mounts(&mut self) -> CallResult<Vec<Mount>>;

    fn mount(
        &mut self,
        device: &Device,
        target: &Path,
        fs_type: FsType,
        flags: &[String],
    ) -> CallResult<()>;

    /// Mounts a directory or a device node at another place.
    fn bind_mount(&mut self, source: &Path, target: &Path) -> CallResult<()>;

    /// Makes the mount at a place read-only; other mounts of the file system are not affected.
    fn remount_read_only(&mut self, target: &Path) -> CallResult<()>;

    /// Unmounts the last mount at a place.
    fn unmount(&mut self, target: &Path) -> CallResult<()>;

    /// The path as mounts have it: without symbolic links.
    fn resolve(&mut self, path: &Path) -> PathBuf;

    /// Creates a directory and those above it.
    fn create_directory(&mut self, path: &Path) -> CallResult<()>;

    /// Creates an empty file and the directories above it.
    fn create_file(&mut self, path: &Path) -> CallResult<()>;

    /// Removes a file or an empty directory. One that does not exist is no error.
    fn remove(&mut self, path: &Path) -> CallResult<()>;

    fn file_system_usage(&mut self, path: &Path) -> CallResult<FileSystemUsage>;
}

/// Block device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Device {
    pub(crate) path: PathBuf,
    /// `MAJOR:MINOR`.
    pub(crate) number: String,
}

/// Mount of a file system or of a device node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mount {
    pub(crate) target: PathBuf,
    /// `MAJOR:MINOR` of the device of the file system, or of the device node.
    pub(crate) device: String,
    pub(crate) is_read_only: bool,
    /// Type of the file system; `None` for a device node.
    pub(crate) fs_type: Option<String>,
}

/// Space and inodes of a file system.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FileSystemUsage {
    pub(crate) size_bytes: u64,
    pub(crate) free_bytes: u64,
    pub(crate) available_bytes: u64,
    pub(crate) inodes: u64,
    pub(crate) free_inodes: u64,
}
