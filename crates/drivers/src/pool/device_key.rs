//! Identity of the device of a pool, independent of the spelling of its URI.
//!
//! `file:pool`, `file:/srv/pool?engine=threads` and a link to either are one file. A program that
//! searches for the process with an open pool compares file identities of the kernel, not paths.

use std::path::Path;

use tenmil_linux::device_users::lock_holder_of;
use tenmil_linux::kernel_files::KernelFiles;

use tenmil_block::device_identity::DeviceIdentity;
use tenmil_block::uri::Uri;

/// A key that is equal for URIs of the same device only: the URI with file system and inode number in
/// place of each path. Files that do not exist, and devices that are not files, keep their names.
pub fn device_key(device: &Uri) -> String {
    DeviceIdentity::of_uri(device).key().to_owned()
}

/// The process that holds the lock of the file below a device, and the path of the file.
pub fn file_lock_holder(device: &Uri) -> Option<(u32, String)> {
    if device.scheme() != "file" {
        return device.children().iter().find_map(file_lock_holder);
    }
    let pid = lock_holder_of(&KernelFiles::live_system(), Path::new(device.path()))?;
    Some((pid, device.path().to_owned()))
}
