//! CPU frequency control through cpufreq, and its restoration.
//!
//! All drivers (acpi-cpufreq, intel_pstate and amd-pstate in all of their modes, cppc_cpufreq) and
//! all governors honor the same two files, so a frequency is selected by setting both to it:
//!
//! ```text
//!   /sys/devices/system/cpu/cpuN/cpufreq/
//!     scaling_min_freq  ─┐ the range as found is the administrator's limit;
//!     scaling_max_freq  ─┘ the selected frequency is always within it
//!     energy_performance_preference      an additional hint, where the driver has one
//!     affected_cpus                      CPUs that change together with this one
//! ```
//!
//! CPUs that change together form a [`CpufreqPolicy`]. A policy shared with CPUs outside our set is
//! never slowed down.
//!
//! The values found are recorded in a file of the runtime directory before anything is changed.
//! They are restored when a [`FrequencyControl`] is dropped, and after a crash by the next call of
//! [`restore_after_crash`]. Opening and restoring exclude each other across processes.

mod cpufreq_policy;
mod error;
mod journal;

use crate::CpuList;
use crate::kernel_files::KernelFiles;
use crate::runtime_directory::RuntimeDirectory;
pub use cpufreq_policy::CpufreqPolicy;
pub use error::{CpufreqUnavailable, FrequencyError};
use journal::FrequencyJournal;
pub use journal::{RecoveryReport, restore_after_crash};
use rustix::io::Errno;

/// Frequency control of a set of CPUs, active while this exists.
#[derive(Debug)]
pub struct FrequencyControl<F: CpufreqFiles = KernelFiles> {
    files: F,
    domains: Vec<CpufreqPolicy>,
    held: Vec<FrequencyError>,
    journal: FrequencyJournal,
}

/// Requested frequency of a CPU. Of several requests for one policy the highest wins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum FrequencyRequest {
    /// Lowest frequency.
    Lowest,
    /// One step down.
    Down,
    /// Keep the current frequency.
    #[default]
    Keep,
    /// Restore the range as found.
    Restore,
    /// One step up.
    Up,
    /// Highest frequency.
    Highest,
}

impl FrequencyRequest {
    /// Name of the request, in one word.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lowest => "lowest",
            Self::Down => "down",
            Self::Keep => "keep",
            Self::Restore => "found",
            Self::Up => "up",
            Self::Highest => "highest",
        }
    }
}

/// Kernel files: a [`KernelFiles`], or a test double.
pub trait CpufreqFiles {
    /// Content of a file, trimmed, if it is readable.
    fn read_trimmed(&self, path: &str) -> Option<String>;
    /// Writes a value to an existing file.
    fn write_value(&self, path: &str, value: &str) -> Result<(), Errno>;
}

impl CpufreqFiles for KernelFiles {
    fn read_trimmed(&self, path: &str) -> Option<String> {
        KernelFiles::read_trimmed(self, path)
    }

    fn write_value(&self, path: &str, value: &str) -> Result<(), Errno> {
        KernelFiles::write_value(self, path, value)
    }
}

impl<F: CpufreqFiles> FrequencyControl<F> {
    /// Takes control of the frequency of these CPUs. Changes nothing yet.
    pub fn take_control(
        files: F,
        cores: &CpuList,
        directory: &RuntimeDirectory,
    ) -> Result<Self, CpufreqUnavailable> {
        // A restoration in progress must not be mistaken for the administrator's setting.
        let _alone = journal::lock_frequency_control(directory.path()).map_err(|found| {
            CpufreqUnavailable::NoJournal { path: directory.path().to_owned(), found }
        })?;
        let held = journal::controlled_cpus(directory);
        let mut domains = CpufreqPolicy::policies_of_cpus(&files, cores)?;
        let taken = |domain: &CpufreqPolicy| {
            let holder =
                held.iter().find(|(_, cores)| !cores.intersection(domain.all_cpus()).is_empty())?;
            Some(FrequencyError::ControlledElsewhere {
                core: domain.first_own_cpu(),
                by: holder.0.clone(),
            })
        };
        let refused = domains.iter().filter_map(taken).collect();
        domains.retain(|domain| taken(domain).is_none());
        let journal = FrequencyJournal::write_found_values(directory, &domains)
            .map_err(|(path, found)| CpufreqUnavailable::NoJournal { path, found })?;
        Ok(Self { files, domains, held: refused, journal })
    }

    /// Policies under control.
    pub fn policies(&self) -> &[CpufreqPolicy] {
        &self.domains
    }

    /// Policies that another tenmil process controls; they are not changed.
    pub fn errors_of_foreign_policies(&self) -> &[FrequencyError] {
        &self.held
    }

    /// Applies frequency requests. A value refused by the kernel is retried at the next call; the
    /// error is returned once, until it changes. CPUs without a policy are ignored.
    pub fn apply_requests(&mut self, requests: &[(u32, FrequencyRequest)]) -> Vec<FrequencyError> {
        let mut errors = Vec::new();
        for domain in &mut self.domains {
            let of_domain = requests.iter().filter(|request| domain.all_cpus().contains(request.0));
            let request = of_domain.map(|request| request.1).max().unwrap_or_default();
            errors.extend(domain.apply_request(&self.files, request));
        }
        errors
    }

    /// Restores the values found. What cannot be restored stays in the file of the runtime
    /// directory, for a later [`restore_after_crash`] with sufficient permission.
    pub fn restore_found(&mut self) -> Vec<FrequencyError> {
        // Continues even without the lock: restoring without it is better than not restoring.
        let _alone = self.journal.lock_directory();
        let mut errors = Vec::new();
        for domain in &mut self.domains {
            errors.extend(domain.restore(&self.files));
        }
        if errors.is_empty() {
            self.journal.delete_journal();
        }
        errors
    }
}

impl<F: CpufreqFiles> Drop for FrequencyControl<F> {
    fn drop(&mut self) {
        // Errors are discarded here; callers that need them call `restore` first.
        self.restore_found();
    }
}

#[cfg(test)]
mod tests;
