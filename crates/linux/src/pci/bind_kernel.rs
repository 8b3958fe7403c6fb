//! Kernel interface for changing drivers.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;

use rustix::fs::{Access, AtFlags, CWD, OFlags, Uid, accessat, chownat};

use crate::Errno;
use crate::kernel_files::KernelFiles;

/// Kernel on which drivers are changed: that of a [`KernelFiles`], or a test double. State is read
/// through the machine's files and changed only by these calls.
pub trait BindKernel {
    /// Kernel files of the machine.
    fn kernel_files(&self) -> &KernelFiles;
    /// Writes a value to an existing file.
    fn write_file(&self, path: &str, value: &str) -> Result<(), Errno>;
    /// Whether a file is writable.
    fn is_writable(&self, path: &str) -> bool;
    /// Opens a block device exclusively: `BUSY` if the kernel uses it for anything. No other use
    /// can begin while the file is open.
    fn open_exclusive(&self, node: &str) -> Result<File, Errno>;
    /// Changes the owner of a file.
    fn change_owner(&self, node: &str, uid: u32) -> Result<(), Errno>;
}

impl BindKernel for KernelFiles {
    fn kernel_files(&self) -> &KernelFiles {
        self
    }

    fn write_file(&self, path: &str, value: &str) -> Result<(), Errno> {
        KernelFiles::write_value(self, path, value)
    }

    fn is_writable(&self, path: &str) -> bool {
        accessat(CWD, self.path_of(path), Access::WRITE_OK, AtFlags::EACCESS).is_ok()
    }

    fn open_exclusive(&self, node: &str) -> Result<File, Errno> {
        let exclusive = i32::try_from(OFlags::EXCL.bits()).unwrap_or_default();
        let opened = File::options().read(true).custom_flags(exclusive).open(self.path_of(node));
        opened.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
    }

    fn change_owner(&self, node: &str, uid: u32) -> Result<(), Errno> {
        chownat(CWD, self.path_of(node), Some(Uid::from_raw(uid)), None, AtFlags::empty())
    }
}
