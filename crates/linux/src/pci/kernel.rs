//! Kernel interface for changing drivers.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;

use rustix::fs::{Access, AtFlags, CWD, OFlags, Uid, accessat, chownat};

use crate::Errno;
use crate::kernel_files::KernelFiles;

/// Kernel on which drivers are changed: that of a [`KernelFiles`], or a test double. State is read
/// through the machine's files and changed only by these calls.
pub trait Kernel {
    /// Kernel files of the machine.
    fn machine(&self) -> &KernelFiles;
    /// Writes a value to an existing file.
    fn write(&self, path: &str, value: &str) -> Result<(), Errno>;
    /// Whether a file is writable.
    fn may_write(&self, path: &str) -> bool;
    /// Opens a block device exclusively: `BUSY` if the kernel uses it for anything. No other use
    /// can begin while the file is open.
    fn claim(&self, node: &str) -> Result<File, Errno>;
    /// Changes the owner of a file.
    fn chown(&self, node: &str, uid: u32) -> Result<(), Errno>;
}

impl Kernel for KernelFiles {
    fn machine(&self) -> &KernelFiles {
        self
    }

    fn write(&self, path: &str, value: &str) -> Result<(), Errno> {
        KernelFiles::write(self, path, value)
    }

    fn may_write(&self, path: &str) -> bool {
        accessat(CWD, self.path(path), Access::WRITE_OK, AtFlags::EACCESS).is_ok()
    }

    fn claim(&self, node: &str) -> Result<File, Errno> {
        let exclusive = i32::try_from(OFlags::EXCL.bits()).unwrap_or_default();
        let opened = File::options().read(true).custom_flags(exclusive).open(self.path(node));
        opened.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
    }

    fn chown(&self, node: &str, uid: u32) -> Result<(), Errno> {
        chownat(CWD, self.path(node), Some(Uid::from_raw(uid)), None, AtFlags::empty())
    }
}
