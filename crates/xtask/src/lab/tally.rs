//! Checks of all guests, counted, and what the count says of a run.

use std::fmt;

use super::console::{Check, Verdict};

/// Checks, counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) passed: u32,
    pub(crate) failed: u32,
    pub(crate) skipped: u32,
}

/// Why a scenario did not come to its end, or not to its beginning.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Trouble {
    /// Something cannot be had here, which says nothing of tenmil.
    Lacking(String),
    /// Tenmil did not do what it should.
    Failed(String),
}

impl Tally {
    pub(crate) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }

    pub(crate) fn count(&mut self, check: &Check) {
        match check.verdict {
            Verdict::Passed => self.passed += 1,
            Verdict::Failed => self.failed += 1,
            Verdict::Skipped => self.skipped += 1,
        }
    }

    /// Whether anything was looked at.
    pub(crate) fn has_any(self) -> bool {
        self != Self::default()
    }

    /// True if whatever could be tried has passed; an error if nothing could be.
    pub(crate) fn verdict(self) -> Result<bool, String> {
        match self {
            Self { failed: 1.., .. } => Ok(false),
            Self { passed: 0, .. } => Err("nothing could be tried".to_owned()),
            Self { .. } => Ok(true),
        }
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

impl Trouble {
    /// What it counts as.
    pub(crate) fn check(self, scenario: &str) -> Check {
        let (verdict, why) = match self {
            Self::Lacking(why) => (Verdict::Skipped, why),
            Self::Failed(why) => (Verdict::Failed, why),
        };
        Check { verdict, what: format!("{scenario}: {why}") }
    }
}

/// What a machine answers when parts are looked for.
impl From<String> for Trouble {
    fn from(why: String) -> Self {
        Self::Lacking(why)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_failure_is_one_whatever_else_there_was() {
        for (passed, skipped) in [(0, 0), (0, 3), (3, 0), (3, 3)] {
            assert_eq!(Tally { passed, failed: 1, skipped }.verdict(), Ok(false));
        }
    }

    #[test]
    fn a_run_without_any_check_that_was_made_has_not_passed() {
        assert!(Tally::default().verdict().is_err());
        assert!(Tally { skipped: 5, ..Tally::default() }.verdict().is_err());
        assert_eq!(Tally { passed: 1, failed: 0, skipped: 5 }.verdict(), Ok(true));
    }

    #[test]
    fn what_is_lacking_is_skipped_and_what_failed_has_failed() {
        let lacking = Trouble::from("no mirror".to_owned()).check("ublk");
        assert_eq!(lacking.verdict, Verdict::Skipped);
        assert_eq!(lacking.what, "ublk: no mirror");
        let failed = Trouble::Failed("is not ready".to_owned()).check("ublk");
        assert_eq!(failed.verdict, Verdict::Failed);
    }
}
