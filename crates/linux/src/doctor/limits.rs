//! Resource limits and capabilities of this process, from `/proc/self`.

use crate::kernel_files::KernelFiles;

/// Soft and hard value of a limit. `None` is unlimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ResourceLimit {
    pub(super) soft: Option<u64>,
    pub(super) hard: Option<u64>,
}

/// `Max locked memory         8388608              8388608              bytes` (proc_pid_limits(5)).
pub(super) fn resource_limit(machine: &KernelFiles, name: &str) -> Option<ResourceLimit> {
    let text = machine.read_trimmed("proc/self/limits")?;
    let mut rest = text.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace();
    let mut value = || match rest.next()? {
        "unlimited" => Some(None),
        number => number.parse().ok().map(Some),
    };
    Some(ResourceLimit { soft: value()?, hard: value()? })
}

/// Whether this process has a capability, by its number (capabilities(7)).
pub(super) fn has_capability(machine: &KernelFiles, number: u32) -> bool {
    let text = machine.read_trimmed("proc/self/status").unwrap_or_default();
    let set = text.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let set = set.and_then(|set| u64::from_str_radix(set.trim(), 16).ok());
    set.is_some_and(|set| set >> number & 1 == 1)
}
