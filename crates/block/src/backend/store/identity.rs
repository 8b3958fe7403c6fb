//! Which device a name means, however it is spelled.
//!
//! `file:pool`, `file:/srv/pool?engine=threads` and a link to either are one file; a program that looks
//! for whoever has a store open compares what the kernel calls the file, not what people do.

use std::path::Path;

use host::holders::locker_of;
use host::machine::Machine;

use crate::identity::DeviceIdentity;
use crate::uri::Uri;

/// What two names have in common that mean the same device, and no others: the name with the number of
/// each file, and its file system, in place of its path. Files that are not there, and devices that are
/// no files, go by their names.
pub fn identity(device: &Uri) -> String {
    DeviceIdentity::of_uri(device).key().to_owned()
}

/// The process that has a file locked on which a device stands, and the file's path.
pub fn file_holder(device: &Uri) -> Option<(u32, String)> {
    if device.scheme() != "file" {
        return device.children().iter().find_map(file_holder);
    }
    let pid = locker_of(&Machine::this(), Path::new(device.path()))?;
    Some((pid, device.path().to_owned()))
}
