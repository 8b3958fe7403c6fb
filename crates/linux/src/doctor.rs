//! Machine checks: what prevents tenmil from working or slows it down, with the fixes.
//!
//! A check is a line: the value found, the recommended value, the reason, and the fix. Unreadable
//! values are reported as such and never guessed. Checking changes nothing; [`apply_safe_changes()`] makes only
//! changes that deprive no other program and can be undone.
//!
//! | file | subject |
//! |---|---|
//! | `devices.rs` | IOMMU, VFIO, SSDs and their PCIe links |
//! | `memory.rs` | lockable memory, huge pages |
//! | `processors.rs` | isolated CPUs, frequency, quotas, mitigations |
//! | `kernel.rs` | io_uring, descriptors, socket buffers, NAPI budgets |
//! | `network.rs` | rings, interrupts and queues of network cards |

mod apply_fixes;
mod cpus;
mod devices;
mod kernel;
mod limits;
mod memory;
mod network;
#[cfg(test)]
mod tests;

use std::fmt;

pub use self::apply_fixes::{AppliedChange, apply_safe_changes};
use crate::kernel_files::KernelFiles;
use crate::{CpuList, Errno, ethtool, tc_flower, uring_engine};

/// Result of one check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MachineCheck {
    /// Section of the report.
    pub section: CheckSection,
    /// Subject: `IOMMU`, `eth0 rings`.
    pub item: String,
    /// Severity.
    pub severity: CheckSeverity,
    /// Value found, or why it cannot be read.
    pub found: String,
    /// Recommended value.
    pub recommended: &'static str,
    /// Reason for the recommendation.
    pub why: &'static str,
    /// Fix, if there is something to fix.
    pub fix: Option<CheckFix>,
}

/// Section of the report, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CheckSection {
    /// SSDs and their prerequisites.
    Devices,
    /// Memory.
    Memory,
    /// CPUs.
    Processors,
    /// Kernel limits and settings.
    Kernel,
    /// Network cards.
    Network,
}

/// Severity of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum CheckSeverity {
    /// As recommended.
    Good,
    /// Informational: there is no recommendation.
    Info,
    /// Works, but could be faster.
    Warning,
    /// Something does not work without it.
    Required,
    /// Not readable here.
    Unknown,
}

/// Fix for a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckFix {
    /// Command, or an instruction where no command suffices.
    pub command: String,
    /// The same as file writes, if it is safe: it deprives no other program and can be undone.
    pub changes: Vec<SysfsChange>,
}

/// Value to write to a kernel file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SysfsChange {
    /// Path without the leading slash.
    pub path: String,
    /// Current value, in the form that restores it.
    pub from: String,
    /// New value.
    pub to: String,
}

/// Machine and user for which checks are made.
#[derive(Clone, Copy)]
pub struct DoctorContext<'a> {
    /// Kernel files.
    pub machine: &'a KernelFiles,
    /// Kernel queries that are not files.
    pub kernel: &'a dyn KernelProbe,
    /// User identifier.
    pub uid: u32,
    /// CPUs available to this process.
    pub allowed: &'a CpuList,
}

/// Kernel queries that are not files.
pub trait KernelProbe {
    /// Whether an `io_uring` can be created; the error is the kernel's text.
    fn io_uring(&self) -> Result<(), String>;
    /// Ring sizes of a network card.
    fn nic_rings(&self, card: &str) -> Result<ethtool::NicRings, Errno>;
    /// Queue counts of a network card.
    fn nic_channels(&self, card: &str) -> Result<ethtool::NicChannels, Errno>;
    /// Interrupt coalescing of a network card.
    fn coalescing(&self, card: &str) -> Result<ethtool::NicCoalescing, Errno>;
    /// Flower filters of the card with this interface index.
    fn flower_filters(&self, card: u32) -> Result<Vec<tc_flower::FlowerFilter>, Errno>;
}

/// Queries of the running kernel.
#[derive(Clone, Copy, Debug)]
pub struct LiveKernelProbe;

impl KernelProbe for LiveKernelProbe {
    fn io_uring(&self) -> Result<(), String> {
        uring_engine::check_io_uring().map_err(|errno| errno.to_string())
    }

    fn nic_rings(&self, card: &str) -> Result<ethtool::NicRings, Errno> {
        ethtool::nic_rings(card)
    }

    fn nic_channels(&self, card: &str) -> Result<ethtool::NicChannels, Errno> {
        ethtool::nic_channels(card)
    }

    fn coalescing(&self, card: &str) -> Result<ethtool::NicCoalescing, Errno> {
        ethtool::nic_coalescing(card)
    }

    fn flower_filters(&self, card: u32) -> Result<Vec<tc_flower::FlowerFilter>, Errno> {
        tc_flower::flower_filters(card)
    }
}

/// Runs all checks. Changes nothing.
pub fn run_checks(patient: &DoctorContext<'_>) -> Vec<MachineCheck> {
    const PARTS: [fn(&DoctorContext<'_>) -> Vec<MachineCheck>; 5] = [
        devices::check_devices,
        memory::check_memory,
        cpus::check_cpus,
        kernel::check_kernel,
        network::check_network,
    ];
    PARTS.iter().flat_map(|examine| examine(patient)).collect()
}

/// Runs all checks for this machine and the user of this process.
pub fn check_this_machine() -> Vec<MachineCheck> {
    let (machine, allowed) = (KernelFiles::live_system(), CpuList::allowed_cpus());
    let uid = crate::runtime_directory::current_uid();
    run_checks(&DoctorContext {
        machine: &machine,
        kernel: &LiveKernelProbe,
        uid,
        allowed: &allowed,
    })
}

impl CheckSection {
    /// All sections, in order.
    pub const ALL: [Self; 5] =
        [Self::Devices, Self::Memory, Self::Processors, Self::Kernel, Self::Network];

    /// Name of the section.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Devices => "devices",
            Self::Memory => "memory",
            Self::Processors => "processors",
            Self::Kernel => "kernel",
            Self::Network => "network",
        }
    }

    /// Creates a check of `item` with unknown state.
    fn new_check(
        self,
        item: impl Into<String>,
        recommended: &'static str,
        why: &'static str,
    ) -> MachineCheck {
        let (state, found) = (CheckSeverity::Unknown, String::new());
        MachineCheck {
            section: self,
            item: item.into(),
            severity: state,
            found,
            recommended,
            why,
            fix: None,
        }
    }
}

impl CheckSeverity {
    /// Name of the severity, in one word.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Info => "info",
            Self::Warning => "slow",
            Self::Required => "missing",
            Self::Unknown => "unknown",
        }
    }
}

impl MachineCheck {
    fn with_good(self, found: impl Into<String>) -> Self {
        Self { severity: CheckSeverity::Good, found: found.into(), ..self }
    }

    fn with_info(self, found: impl Into<String>) -> Self {
        Self { severity: CheckSeverity::Info, found: found.into(), ..self }
    }

    fn with_warning(self, found: impl Into<String>, command: impl Into<String>) -> Self {
        self.with_severity(CheckSeverity::Warning, found.into(), command.into())
    }

    fn with_required(self, found: impl Into<String>, command: impl Into<String>) -> Self {
        self.with_severity(CheckSeverity::Required, found.into(), command.into())
    }

    /// Marks the value as unreadable, with the reason.
    fn with_unknown(self, why: impl Into<String>) -> Self {
        Self { severity: CheckSeverity::Unknown, found: why.into(), ..self }
    }

    fn with_severity(self, state: CheckSeverity, found: String, command: String) -> Self {
        let remedy = Some(CheckFix { command, changes: Vec::new() });
        Self { severity: state, found, fix: remedy, ..self }
    }

    /// Adds the file writes that `apply` may make.
    fn with_safe_changes(mut self, changes: Vec<SysfsChange>) -> Self {
        if let Some(remedy) = &mut self.fix {
            remedy.changes = changes;
        }
        self
    }
}

/// `slow     THP: never; recommended madvise or always: fewer …; fix: echo …`.
impl fmt::Display for MachineCheck {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { item, severity: state, found, recommended, why, .. } = self;
        write!(out, "{:<8} {item}: ", state.name())?;
        match state {
            CheckSeverity::Unknown => write!(out, "not readable here: {found}")?,
            _ => out.write_str(found)?,
        }
        if !recommended.is_empty() {
            write!(out, "; recommended {recommended}")?;
        }
        if *state != CheckSeverity::Good && !why.is_empty() {
            write!(out, ": {why}")?;
        }
        match &self.fix {
            Some(remedy) => write!(out, "; fix: {}", remedy.command),
            None => Ok(()),
        }
    }
}

/// Command line for a root shell that writes a value to a file.
fn shell_write_command(value: &str, path: &str) -> String {
    format!("echo {value} | sudo tee /{path}")
}
