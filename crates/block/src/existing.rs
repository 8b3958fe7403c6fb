//! What a device holds that this run did not put there.

use std::fmt;

/// Something with contents that a write would destroy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Existing {
    /// What it is called: the path of a file, the name of a device.
    pub name: String,
    /// What was found on it, or about it: `1 GiB, ext4 file system, in use by dm-0, serial S4EW…`.
    pub found: String,
}

impl fmt::Display for Existing {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} ({})", self.name, self.found)
    }
}
