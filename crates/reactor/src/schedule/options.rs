//! What the scheduler is told: its policy, its limits, and which cores have a part of their own.

use std::fmt;
use std::str::FromStr;

use base::{Blame, Span};
use host::Cores;

use super::share::{Share, WHOLE};

/// How light threads are spread over reactors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// New threads go round the reactors and stay, unless their core is taken or their mask changes.
    #[default]
    Static,
    /// Idle threads gather on one reactor, overloaded reactors shed, and what is left empty sleeps.
    Dynamic,
}

/// The scheduler's settings. [`Options::check`] says whether they go together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// How threads are spread.
    pub policy: Policy,
    /// How often loads are collected.
    pub period: Span,
    /// A thread that is busy for less than this many percent of a period is idle.
    pub load_limit: u8,
    /// A reactor that several threads keep busy for more than this many percent sheds some.
    pub core_limit: u8,
    /// At this many percent and more a reactor may hide work: what its threads would do, if they
    /// were given the time, cannot be seen.
    pub core_busy: u8,
    /// No thread moves twice within this time.
    pub rest: Span,
    /// Where idle threads gather. `None` is the lowest core that is not isolated.
    pub scheduling_core: Option<u32>,
    /// Cores for threads whose mask names isolated cores and no others. Those are not balanced.
    pub isolated: Cores,
}

/// Settings that do not go together, or do not go with the reactors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OptionsError {
    /// No policy has this name.
    Policy {
        /// What was given.
        text: String,
    },
    /// The three limits must ascend, and the last be no more than 100.
    Limits {
        /// Percent below which a thread is idle.
        load_limit: u8,
        /// Percent above which a reactor sheds.
        core_limit: u8,
        /// Percent from which a reactor may hide work.
        core_busy: u8,
    },
    /// A period of no length.
    Period,
    /// No reactor has the scheduling core.
    SchedulingCore {
        /// What was given.
        core: u32,
        /// The cores of the reactors.
        reactors: Cores,
    },
    /// The scheduling core is isolated, so nothing could gather on it.
    SchedulingCoreIsolated {
        /// What was given.
        core: u32,
    },
    /// No reactor has these isolated cores.
    Isolated {
        /// Those that no reactor has.
        cores: Cores,
        /// The cores of the reactors.
        reactors: Cores,
    },
    /// All reactors' cores are isolated.
    AllIsolated {
        /// What was given.
        cores: Cores,
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
            rest: Span::from_secs(5),
            scheduling_core: None,
            isolated: Cores::default(),
        }
    }
}

impl Options {
    /// Whether these settings go together, and with reactors on these cores.
    pub fn check(&self, reactors: &Cores) -> Result<(), OptionsError> {
        let Self { load_limit, core_limit, core_busy, .. } = *self;
        if load_limit >= core_limit || core_limit > core_busy || core_busy > 100 {
            return Err(OptionsError::Limits { load_limit, core_limit, core_busy });
        }
        if self.period == Span::default() {
            return Err(OptionsError::Period);
        }
        let strange: Cores =
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

    pub(super) fn idle_below(&self) -> Share {
        percent(self.load_limit)
    }

    pub(super) fn shed_above(&self) -> Share {
        percent(self.core_limit)
    }

    pub(super) fn hides_from(&self) -> Share {
        percent(self.core_busy)
    }
}

fn percent(count: u8) -> Share {
    Share::from(count) * WHOLE / 100
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
    /// Always the caller's move.
    pub const fn blame(&self) -> Blame {
        Blame::Caller
    }
}

impl Policy {
    /// Its name, as it is written and read.
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
    use base::Blame;
    use base::Span;
    use host::Cores;

    use super::{Options, Policy};

    fn cores(text: &str) -> Cores {
        Cores::parse(text).unwrap()
    }

    fn refusal(change: impl FnOnce(&mut Options)) -> String {
        let mut options = Options::default();
        change(&mut options);
        let error = options.check(&cores("0-3")).unwrap_err();
        assert_eq!(error.blame(), Blame::Caller);
        error.to_string()
    }

    #[test]
    fn settings_out_of_the_box_go_together() {
        assert_eq!(Options::default().check(&cores("0-3")), Ok(()));
        assert_eq!(Options::default().check(&cores("7")), Ok(()));
    }

    #[test]
    fn what_does_not_go_together_is_refused_by_name() {
        let limits = |load_limit, core_limit, core_busy| {
            refusal(|options| {
                *options = Options { load_limit, core_limit, core_busy, ..options.clone() };
            })
        };
        for (load_limit, core_limit, core_busy) in [(80, 80, 95), (20, 96, 95), (20, 80, 101)] {
            let text = limits(load_limit, core_limit, core_busy);
            assert!(text.contains(&format!("core limit {core_limit} %")), "{text}");
        }
        for (text, named) in [
            (refusal(|options| options.period = Span::default()), "period is 0"),
            (
                refusal(|options| options.scheduling_core = Some(9)),
                "core is 9, expected a reactor's: 0-3",
            ),
            (refusal(|options| options.isolated = cores("3-5")), "isolated cores are 4-5"),
            (refusal(|options| options.isolated = cores("0-3")), "isolated cores are 0-3"),
            (
                refusal(|options| {
                    options.scheduling_core = Some(1);
                    options.isolated = cores("1");
                }),
                "scheduling core 1 is isolated",
            ),
        ] {
            assert!(text.starts_with("scheduler: ") && text.contains(named), "{text}");
        }
    }

    #[test]
    fn a_policy_is_read_as_it_is_written() {
        for policy in [Policy::Static, Policy::Dynamic] {
            assert_eq!(policy.to_string().parse(), Ok(policy));
        }
        let error = "fair".parse::<Policy>().unwrap_err();
        assert_eq!(error.to_string(), "scheduler: policy is 'fair', expected static or dynamic");
    }
}
