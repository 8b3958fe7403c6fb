//! Totals of the checks of all guests, and the verdict on a run.

use std::fmt;

use super::guest_console::{CheckResult, CheckStatus};

/// Number of checks by status.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CheckTotals {
    pub(crate) passed: u32,
    pub(crate) failed: u32,
    pub(crate) skipped: u32,
}

/// Reason why a scenario did not start or not finish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ScenarioError {
    /// A prerequisite is missing, which says nothing about tenmil.
    Unavailable(String),
    /// A failure of tenmil.
    Failed(String),
}

impl CheckTotals {
    pub(crate) fn add_totals(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }

    pub(crate) fn count_check(&mut self, check: &CheckResult) {
        match check.verdict {
            CheckStatus::Passed => self.passed += 1,
            CheckStatus::Failed => self.failed += 1,
            CheckStatus::Skipped => self.skipped += 1,
        }
    }

    /// Whether any check was made.
    pub(crate) fn has_any(self) -> bool {
        self != Self::default()
    }

    /// True if every check that could be made has passed; an error if none could be made.
    pub(crate) fn verdict(self) -> Result<bool, String> {
        match self {
            Self { failed: 1.., .. } => Ok(false),
            Self { passed: 0, .. } => Err("nothing could be tried".to_owned()),
            Self { .. } => Ok(true),
        }
    }
}

impl fmt::Display for CheckTotals {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

impl ScenarioError {
    /// The check result that it counts as.
    pub(crate) fn into_check_result(self, scenario: &str) -> CheckResult {
        let (verdict, why) = match self {
            Self::Unavailable(why) => (CheckStatus::Skipped, why),
            Self::Failed(why) => (CheckStatus::Failed, why),
        };
        CheckResult { verdict, what: format!("{scenario}: {why}") }
    }
}

/// Errors of the preparation mean a missing prerequisite.
impl From<String> for ScenarioError {
    fn from(why: String) -> Self {
        Self::Unavailable(why)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_failed_check_fails_the_run() {
        for (passed, skipped) in [(0, 0), (0, 3), (3, 0), (3, 3)] {
            assert_eq!(CheckTotals { passed, failed: 1, skipped }.verdict(), Ok(false));
        }
    }

    #[test]
    fn run_without_passed_check_is_an_error() {
        assert!(CheckTotals::default().verdict().is_err());
        assert!(CheckTotals { skipped: 5, ..CheckTotals::default() }.verdict().is_err());
        assert_eq!(CheckTotals { passed: 1, failed: 0, skipped: 5 }.verdict(), Ok(true));
    }

    #[test]
    fn skipped_and_failed_scenarios_are_distinguished() {
        let lacking = ScenarioError::from("no mirror".to_owned()).into_check_result("ublk");
        assert_eq!(lacking.verdict, CheckStatus::Skipped);
        assert_eq!(lacking.what, "ublk: no mirror");
        let failed = ScenarioError::Failed("is not ready".to_owned()).into_check_result("ublk");
        assert_eq!(failed.verdict, CheckStatus::Failed);
    }
}
