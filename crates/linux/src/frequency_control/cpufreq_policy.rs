//! cpufreq policies: CPUs that share a frequency.

use super::{CpufreqFiles, CpufreqUnavailable, FrequencyError, FrequencyRequest};
use crate::CpuList;

/// CPUs that share a frequency, and the frequencies they may use.
#[derive(Clone, Debug)]
pub struct CpufreqPolicy {
    /// First CPU of ours; its files represent the policy.
    core: u32,
    cores: CpuList,
    /// Whether it includes CPUs that are not ours.
    shared: bool,
    driver: Option<String>,
    governor: Option<String>,
    /// Available frequencies in kHz, ascending; empty or at least two.
    steps: Vec<u64>,
    /// State as found.
    found: CpufreqState,
    /// State last written.
    written: CpufreqState,
    /// Error last returned.
    last_error: Option<FrequencyError>,
}

/// State of a policy's files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct CpufreqState {
    pub(super) min_khz: u64,
    pub(super) max_khz: u64,
    pub(super) preference: Option<String>,
}

/// Steps into which a range is divided if the driver does not list its frequencies.
const STEPS: u64 = 10;

const MIN: &str = "scaling_min_freq";
const MAX: &str = "scaling_max_freq";
const PREFERENCE: &str = "energy_performance_preference";

impl CpufreqPolicy {
    /// Policies of these CPUs.
    pub(super) fn policies_of_cpus(
        files: &impl CpufreqFiles,
        cores: &CpuList,
    ) -> Result<Vec<Self>, CpufreqUnavailable> {
        let mut domains: Vec<Self> = Vec::new();
        for core in cores.iter() {
            if !domains.iter().any(|domain| domain.cores.contains(core)) {
                domains.extend(Self::policy_of_cpu(files, core, cores));
            }
        }
        if domains.is_empty() {
            return Err(CpufreqUnavailable::NoCpufreq { cores: cores.clone() });
        }
        Ok(domains)
    }

    fn policy_of_cpu(files: &impl CpufreqFiles, core: u32, ours: &CpuList) -> Option<Self> {
        let text = |name: &str| {
            files.read_trimmed(&cpufreq_path(core, name)).filter(|text| !text.is_empty())
        };
        let found = CpufreqState::read_state(files, core)?;
        let listed = text("affected_cpus").map(|list| list.replace(' ', ","));
        let mut cores = listed.and_then(|list| CpuList::parse(&list).ok()).unwrap_or_default();
        if !cores.contains(core) {
            cores = cores.iter().chain([core]).collect();
        }
        Some(Self {
            core,
            shared: cores.intersection(ours) != cores,
            cores,
            driver: text("scaling_driver"),
            governor: text("scaling_governor"),
            steps: available_steps(text("scaling_available_frequencies").as_deref(), &found),
            written: found.clone(),
            found,
            last_error: None,
        })
    }

    /// First of its CPUs that is ours.
    pub fn first_own_cpu(&self) -> u32 {
        self.core
    }

    /// All of its CPUs.
    pub fn all_cpus(&self) -> &CpuList {
        &self.cores
    }

    /// Whether it includes CPUs that are not ours, so that it is never slowed down.
    pub fn is_shared(&self) -> bool {
        self.shared
    }

    /// Kernel driver.
    pub fn driver(&self) -> Option<&str> {
        self.driver.as_deref()
    }

    /// Kernel governor.
    pub fn governor(&self) -> Option<&str> {
        self.governor.as_deref()
    }

    /// Available frequencies in kHz, ascending. Empty if the range found is a single value.
    pub fn frequencies_khz(&self) -> &[u64] {
        &self.steps
    }

    /// Range last written, in kHz.
    pub fn range_khz(&self) -> (u64, u64) {
        (self.written.min_khz, self.written.max_khz)
    }

    pub(super) fn found_state(&self) -> &CpufreqState {
        &self.found
    }

    /// Applies a request; returns the error unless it is the same as the last one.
    pub(super) fn apply_request(
        &mut self,
        files: &impl CpufreqFiles,
        request: FrequencyRequest,
    ) -> Option<FrequencyError> {
        let target = self.target_state(request)?;
        let refused = self.write_differences(files, &target);
        let new_events = refused.clone().filter(|_| refused != self.last_error);
        self.last_error = refused;
        new_events
    }

    /// Restores the state as found.
    pub(super) fn restore(&mut self, files: &impl CpufreqFiles) -> Option<FrequencyError> {
        let found = self.found.clone();
        self.write_differences(files, &found)
    }

    /// Target state for a request; `None` for no change.
    fn target_state(&self, request: FrequencyRequest) -> Option<CpufreqState> {
        let (lowest, highest) = (*self.steps.first()?, *self.steps.last()?);
        // CPUs that are not ours share the policy: they are never slowed down.
        if request == FrequencyRequest::Restore || self.shared && request < FrequencyRequest::Keep {
            return Some(self.found.clone());
        }
        let khz = match request {
            FrequencyRequest::Keep | FrequencyRequest::Restore => return None,
            FrequencyRequest::Lowest => lowest,
            FrequencyRequest::Highest => highest,
            FrequencyRequest::Up => {
                self.steps.iter().find(|step| **step > self.written_max_khz()).copied()?
            }
            FrequencyRequest::Down => {
                self.steps.iter().rfind(|step| **step < self.written_max_khz()).copied()?
            }
        };
        let hint = match request {
            FrequencyRequest::Lowest => Some("power"),
            FrequencyRequest::Highest => Some("performance"),
            _ => None,
        };
        let found = self.found.preference.as_ref();
        let preference = found.map(|found| hint.unwrap_or(found).to_owned());
        Some(CpufreqState { min_khz: khz, max_khz: khz, preference })
    }

    /// Frequency from which steps count: the top of the range.
    fn written_max_khz(&self) -> u64 {
        self.written.max_khz
    }

    /// Writes the differences. The range is widened before it is narrowed, so that its minimum
    /// never exceeds its maximum, which the kernel would refuse.
    fn write_differences(
        &mut self,
        files: &impl CpufreqFiles,
        target: &CpufreqState,
    ) -> Option<FrequencyError> {
        // Upwards the maximum is written first, downwards the minimum.
        let grows = target.max_khz >= self.written.max_khz;
        let order = if grows { [MAX, MIN] } else { [MIN, MAX] };
        let mut refused = None;
        for name in order {
            let (new, now) = match name {
                MAX => (target.max_khz, &mut self.written.max_khz),
                _ => (target.min_khz, &mut self.written.min_khz),
            };
            if new != *now && refused.is_none() {
                match write_file(files, self.core, name, &new.to_string()) {
                    Ok(()) => *now = new,
                    Err(error) => refused = Some(error),
                }
            }
        }
        if let Some(preference) = &target.preference
            && self.written.preference.as_ref() != Some(preference)
        {
            match write_file(files, self.core, PREFERENCE, preference) {
                Ok(()) => self.written.preference = Some(preference.clone()),
                // The preference is only a hint: an error of the range has precedence.
                Err(error) => refused = refused.or(Some(error)),
            }
        }
        refused
    }
}

impl CpufreqState {
    /// Reads the state of a CPU; `None` if it has no cpufreq files.
    pub(super) fn read_state(files: &impl CpufreqFiles, core: u32) -> Option<Self> {
        let number = |name| files.read_trimmed(&cpufreq_path(core, name))?.parse().ok();
        let preference =
            files.read_trimmed(&cpufreq_path(core, PREFERENCE)).filter(|text| !text.is_empty());
        Some(Self { min_khz: number(MIN)?, max_khz: number(MAX)?, preference })
    }

    /// Writes this state for a CPU, whatever its current state.
    pub(super) fn write_state(
        &self,
        files: &impl CpufreqFiles,
        core: u32,
    ) -> Option<FrequencyError> {
        let now = Self::read_state(files, core)?;
        let mut domain = CpufreqPolicy {
            core,
            cores: [core].into_iter().collect(),
            shared: false,
            driver: None,
            governor: None,
            steps: Vec::new(),
            found: self.clone(),
            written: now,
            last_error: None,
        };
        domain.restore(files)
    }
}

/// Available frequencies: those listed by the driver, or equal steps of the range.
fn available_steps(named: Option<&str>, found: &CpufreqState) -> Vec<u64> {
    let CpufreqState { min_khz, max_khz, .. } = *found;
    if min_khz >= max_khz {
        return Vec::new();
    }
    let named = named.unwrap_or_default().split_whitespace().filter_map(|khz| khz.parse().ok());
    let mut steps: Vec<u64> =
        named.filter(|khz| (min_khz..=max_khz).contains(khz)).chain([min_khz, max_khz]).collect();
    if steps.len() == 2 {
        let part = |step| min_khz + (max_khz - min_khz) / STEPS * step;
        steps.extend((1..STEPS).map(part));
    }
    steps.sort_unstable();
    steps.dedup();
    steps
}

fn write_file(
    files: &impl CpufreqFiles,
    core: u32,
    name: &str,
    value: &str,
) -> Result<(), FrequencyError> {
    let path = cpufreq_path(core, name);
    files.write_value(&path, value).map_err(|errno| FrequencyError::Write {
        file: format!("/{path}"),
        value: value.into(),
        errno,
    })
}

fn cpufreq_path(core: u32, name: &str) -> String {
    format!("sys/devices/system/cpu/cpu{core}/cpufreq/{name}")
}
