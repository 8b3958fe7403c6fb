//! Defects that are put back on purpose: a simulator that does not find them proves nothing.

/// Which defects are put back. None by default.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InjectedBugs {
    /// A disk with a volatile cache is reported to be stable.
    pub cached_disk_is_stable: bool,
}

impl InjectedBugs {
    /// Each defect alone, with its name.
    pub fn each() -> Vec<(&'static str, Self)> {
        vec![("a cached disk is reported to be stable", Self { cached_disk_is_stable: true })]
    }
}
