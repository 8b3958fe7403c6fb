//! Data on a device that this run did not create.

use std::fmt;
use std::path::PathBuf;

/// A device whose contents would be destroyed by a write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExistingData {
    /// Name: the path of a file, the name of a device.
    pub name: String,
    /// What is known without reading: the size. [`OverwriteReport`](crate::overwrite::OverwriteReport)
    /// has the details.
    pub found: String,
    /// Path on this machine, if it is a file or a kernel device.
    pub path: Option<PathBuf>,
}

impl fmt::Display for ExistingData {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} ({})", self.name, self.found)
    }
}
