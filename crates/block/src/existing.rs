//! What a device holds that this run did not put there.

use std::fmt;
use std::path::PathBuf;

/// Something with contents that a write would destroy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Existing {
    /// What it is called: the path of a file, the name of a device.
    pub name: String,
    /// What is known of it at once: how long it is. [`Findings`](crate::guard::Findings) looks closer.
    pub found: String,
    /// Where the machine has it, if it is a file or a device of the kernel.
    pub path: Option<PathBuf>,
}

impl fmt::Display for Existing {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} ({})", self.name, self.found)
    }
}
