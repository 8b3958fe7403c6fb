//! What is done to a machine when a function changes hands.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;

use rustix::fs::{Access, AtFlags, CWD, OFlags, Uid, accessat, chownat};

use crate::Errno;
use crate::machine::Machine;

/// A kernel that can be told to change drivers: that of a [`Machine`], or what a test has in its
/// place. It is looked at through the files of its machine and changed by these calls only.
pub trait Kernel {
    /// The machine whose kernel it is.
    fn machine(&self) -> &Machine;
    /// Writes a value into a file that is there.
    fn write(&self, path: &str, value: &str) -> Result<(), Errno>;
    /// Whether we may write to a file.
    fn may_write(&self, path: &str) -> bool;
    /// Opens a block device for us alone: `BUSY` if the kernel has it in use for anything. Nobody
    /// can begin to use it while the file is open.
    fn claim(&self, node: &str) -> Result<File, Errno>;
    /// Makes a user the owner of a file.
    fn give(&self, node: &str, uid: u32) -> Result<(), Errno>;
}

impl Kernel for Machine {
    fn machine(&self) -> &Machine {
        self
    }

    fn write(&self, path: &str, value: &str) -> Result<(), Errno> {
        Machine::write(self, path, value)
    }

    fn may_write(&self, path: &str) -> bool {
        accessat(CWD, self.path(path), Access::WRITE_OK, AtFlags::EACCESS).is_ok()
    }

    fn claim(&self, node: &str) -> Result<File, Errno> {
        let exclusive = i32::try_from(OFlags::EXCL.bits()).unwrap_or_default();
        let opened = File::options().read(true).custom_flags(exclusive).open(self.path(node));
        opened.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
    }

    fn give(&self, node: &str, uid: u32) -> Result<(), Errno> {
        chownat(CWD, self.path(node), Some(Uid::from_raw(uid)), None, AtFlags::empty())
    }
}
