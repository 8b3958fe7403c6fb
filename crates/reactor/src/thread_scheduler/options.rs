//! Scheduler options: policy, limits, and special cores.

use std::fmt;
use std::str::FromStr;

use tenmil_base::{ErrorCategory, Span};
use tenmil_linux::CpuList;

use super::core_share::{CoreShare, WHOLE};

/// Placement policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// New threads are placed round-robin and stay, unless their core is taken away or their mask
    /// changes.
    #[default]
    Static,
    /// Idle threads are collected on one reactor, overloaded reactors are relieved, and empty ones
    /// sleep.
    Dynamic,
}

/// Scheduler options, validated by [`Options::validate`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Placement policy.
    pub policy: Policy,
    /// Interval between load samples.
    pub period: Span,
    /// Load in percent of a period below which a thread is idle.
    pub load_limit: u8,
    /// Load in percent above which a reactor with several threads is overloaded.
    pub core_limit: u8,
    /// Load in percent from which the demand of a reactor's threads may be larger than measured.
    pub core_busy: u8,
    /// Minimum time between two migrations of a thread.
    pub migration_interval: Span,
    /// Core that collects idle threads. `None` is the lowest core that is not isolated.
    pub scheduling_core: Option<u32>,
    /// Cores reserved for threads whose mask names isolated cores only. Those threads are not
    /// balanced.
    pub isolated: CpuList,
}

/// Inconsistent options, or options that do not fit the reactors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OptionsError {
    /// Unknown policy name.
    Policy {
        /// Given name.
        text: String,
    },
    /// The three limits must ascend, and the last must not exceed 100.
    Limits {
        /// Percent below which a thread is idle.
        load_limit: u8,
        /// Percent above which a reactor is overloaded.
        core_limit: u8,
        /// Percent from which demand may be hidden.
        core_busy: u8,
    },
    /// The period is zero.
    Period,
    /// No reactor runs on the scheduling core.
    SchedulingCore {
        /// Given core.
        core: u32,
        /// Cores of the reactors.
        reactors: CpuList,
    },
    /// The scheduling core is isolated, so it could not collect idle threads.
    SchedulingCoreIsolated {
        /// Given core.
        core: u32,
    },
    /// Isolated cores without a reactor.
    Isolated {
        /// These cores.
        cores: CpuList,
        /// Cores of the reactors.
        reactors: CpuList,
    },
    /// All cores of reactors are isolated.
    AllIsolated {
        /// Given cores.
        cores: CpuList,
    },
}

impl Default for Options {
    fn default() -> Self {
        Self {
            policy: Policy::default(),
            period: Span::from_secs(1),
            load_limit: 20,
            core_limit: 80,
            core_busy: 95,
            migration_interval: Span::from_secs(5),
            scheduling_core: None,
            isolated: CpuList::default(),
        }
    }
}

impl Options {
    /// Validates the options for reactors on these cores.
    pub fn validate(&self, reactors: &CpuList) -> Result<(), OptionsError> {
        let Self { load_limit, core_limit, core_busy, .. } = *self;
        if load_limit >= core_limit || core_limit > core_busy || core_busy > 100 {
            return Err(OptionsError::Limits { load_limit, core_limit, core_busy });
        }
        if self.period == Span::default() {
            return Err(OptionsError::Period);
        }
        let strange: CpuList =
            self.isolated.iter().filter(|core| !reactors.contains(*core)).collect();
        if !strange.is_empty() {
            return Err(OptionsError::Isolated { cores: strange, reactors: reactors.clone() });
        }
        if self.isolated.len() == reactors.len() {
            return Err(OptionsError::AllIsolated { cores: self.isolated.clone() });
        }
        match self.scheduling_core {
            Some(core) if !reactors.contains(core) => {
                Err(OptionsError::SchedulingCore { core, reactors: reactors.clone() })
            }
            Some(core) if self.isolated.contains(core) => {
                Err(OptionsError::SchedulingCoreIsolated { core })
            }
            _ => Ok(()),
        }
    }

    pub(super) fn idle_limit_share(&self) -> CoreShare {
        share_of_percent(self.load_limit)
    }

    pub(super) fn overload_limit_share(&self) -> CoreShare {
        share_of_percent(self.core_limit)
    }

    pub(super) fn sibling_busy_limit_share(&self) -> CoreShare {
        share_of_percent(self.core_busy)
    }
}

fn share_of_percent(count: u8) -> CoreShare {
    CoreShare::from(count) * WHOLE / 100
}

impl FromStr for Policy {
    type Err = OptionsError;

    fn from_str(text: &str) -> Result<Self, OptionsError> {
        match text {
            "static" => Ok(Self::Static),
            "dynamic" => Ok(Self::Dynamic),
            _ => Err(OptionsError::Policy { text: text.into() }),
        }
    }
}

impl OptionsError {
    /// Error category: always usage.
    pub const fn category(&self) -> ErrorCategory {
        ErrorCategory::Usage
    }
}

impl Policy {
    /// Name of the policy, as written and parsed.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Static => "static",
            Self::Dynamic => "dynamic",
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.pad(self.name())
    }
}

impl fmt::Display for OptionsError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "scheduler: ")?;
        match self {
            Self::Policy { text } => write!(out, "policy is '{text}', expected static or dynamic"),
            Self::Limits { load_limit, core_limit, core_busy } => write!(
                out,
                "load limit {load_limit} %, core limit {core_limit} %, core busy {core_busy} %: \
                 expected load limit < core limit <= core busy <= 100 %"
            ),
            Self::Period => write!(out, "period is 0, expected a time to collect loads over"),
            Self::SchedulingCore { core, reactors } => {
                write!(out, "scheduling core is {core}, expected a reactor's: {reactors}")
            }
            Self::SchedulingCoreIsolated { core } => {
                write!(out, "scheduling core {core} is isolated, expected one that is not")
            }
            Self::Isolated { cores, reactors } => {
                write!(out, "isolated cores are {cores}, expected reactors': {reactors}")
            }
            Self::AllIsolated { cores } => {
                write!(out, "isolated cores are {cores}, expected one that is left for the rest")
            }
        }
    }
}

impl std::error::Error for OptionsError {}

#[cfg(test)]
mod tests {
    use tenmil_base::ErrorCategory;
    use tenmil_base::Span;
    use tenmil_linux::CpuList;

    use super::{Options, Policy};

    fn core_list(text: &str) -> CpuList {
        CpuList::parse(text).unwrap()
    }

    fn validation_error(change: impl FnOnce(&mut Options)) -> String {
        let mut options = Options::default();
        change(&mut options);
        let error = options.validate(&core_list("0-3")).unwrap_err();
        assert_eq!(error.category(), ErrorCategory::Usage);
        error.to_string()
    }

    #[test]
    fn default_options_are_valid() {
        assert_eq!(Options::default().validate(&core_list("0-3")), Ok(()));
        assert_eq!(Options::default().validate(&core_list("7")), Ok(()));
    }

    #[test]
    fn inconsistent_options_are_rejected_by_name() {
        let limits = |load_limit, core_limit, core_busy| {
            validation_error(|options| {
                *options = Options { load_limit, core_limit, core_busy, ..options.clone() };
            })
        };
        for (load_limit, core_limit, core_busy) in [(80, 80, 95), (20, 96, 95), (20, 80, 101)] {
            let text = limits(load_limit, core_limit, core_busy);
            assert!(text.contains(&format!("core limit {core_limit} %")), "{text}");
        }
        for (text, named) in [
            (validation_error(|options| options.period = Span::default()), "period is 0"),
            (
                validation_error(|options| options.scheduling_core = Some(9)),
                "core is 9, expected a reactor's: 0-3",
            ),
            (
                validation_error(|options| options.isolated = core_list("3-5")),
                "isolated cores are 4-5",
            ),
            (
                validation_error(|options| options.isolated = core_list("0-3")),
                "isolated cores are 0-3",
            ),
            (
                validation_error(|options| {
                    options.scheduling_core = Some(1);
                    options.isolated = core_list("1");
                }),
                "scheduling core 1 is isolated",
            ),
        ] {
            assert!(text.starts_with("scheduler: ") && text.contains(named), "{text}");
        }
    }

    #[test]
    fn policy_name_parses_back() {
        for policy in [Policy::Static, Policy::Dynamic] {
            assert_eq!(policy.to_string().parse(), Ok(policy));
        }
        let error = "fair".parse::<Policy>().unwrap_err();
        assert_eq!(error.to_string(), "scheduler: policy is 'fair', expected static or dynamic");
    }
}
