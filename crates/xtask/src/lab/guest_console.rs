//! Protocol of the guest console: lines that begin with a mark are messages to the test.
//!
//! ```text
//!   @@ ok WHAT          passed check
//!   @@ not ok WHAT      failed check, with the reason
//!   @@ skip WHAT        check that is impossible there, with the reason
//!   @@ note WHAT        information
//!   @@ kill beside      kill and restart the companion tenmil process
//!   @@ cold start       end the machine, and start another with the same disks
//!   @@ do WHAT          perform a monitor action; the reply is a line of input
//!   @@ end              end of the script
//! ```

use std::fmt;

/// Prefix of a message.
const MARK: &str = "@@ ";

/// Result of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CheckResult {
    pub(crate) verdict: CheckStatus,
    /// Description of the check, and the finding if it did not pass.
    pub(crate) what: String,
}

/// Status of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CheckStatus {
    Passed,
    Failed,
    Skipped,
}

/// Parsed console line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ConsoleLine {
    Check(CheckResult),
    /// Information.
    Note(String),
    KillBeside,
    ColdStart,
    /// Requested monitor action, by name.
    Do(String),
    End,
    /// Other output.
    Noise,
}

impl fmt::Display for CheckResult {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = match self.verdict {
            CheckStatus::Passed => "ok     ",
            CheckStatus::Failed => "FAILED ",
            CheckStatus::Skipped => "skipped",
        };
        write!(out, "{word} {}", self.what)
    }
}

/// Parses a line. The mark may follow kernel output on the same line.
pub(crate) fn parse_console_line(line: &str) -> ConsoleLine {
    let Some(at) = line.find(MARK) else { return ConsoleLine::Noise };
    let text = line[at + MARK.len()..].trim_end();
    let verdicts = [
        ("ok ", CheckStatus::Passed),
        ("not ok ", CheckStatus::Failed),
        ("skip ", CheckStatus::Skipped),
    ];
    for (word, verdict) in verdicts {
        if let Some(what) = text.strip_prefix(word) {
            return ConsoleLine::Check(CheckResult { verdict, what: what.to_owned() });
        }
    }
    if let Some(what) = text.strip_prefix("note ") {
        return ConsoleLine::Note(what.to_owned());
    }
    if let Some(name) = text.strip_prefix("do ") {
        return ConsoleLine::Do(name.to_owned());
    }
    match text {
        "kill beside" => ConsoleLine::KillBeside,
        "cold start" => ConsoleLine::ColdStart,
        "end" => ConsoleLine::End,
        _ => ConsoleLine::Noise,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marked_lines_are_checks_and_others_are_ignored() {
        let check = |verdict, what: &str| {
            ConsoleLine::Check(CheckResult { verdict, what: what.to_owned() })
        };
        assert_eq!(
            parse_console_line("@@ ok it connects\r"),
            check(CheckStatus::Passed, "it connects")
        );
        assert_eq!(
            parse_console_line("[ 1.2] nvme0: @@ not ok a: b"),
            check(CheckStatus::Failed, "a: b")
        );
        assert_eq!(
            parse_console_line("@@ skip no module"),
            check(CheckStatus::Skipped, "no module")
        );
        assert_eq!(
            parse_console_line("@@ note Linux 6.12\r"),
            ConsoleLine::Note("Linux 6.12".to_owned())
        );
        assert_eq!(parse_console_line("@@ end"), ConsoleLine::End);
        assert_eq!(parse_console_line("@@ kill beside"), ConsoleLine::KillBeside);
        assert_eq!(parse_console_line("@@ cold start"), ConsoleLine::ColdStart);
        assert_eq!(parse_console_line("@@ do pull\r"), ConsoleLine::Do("pull".to_owned()));
        for line in ["", "ok it connects", "@@ endless", "@@ okay", "@@", "@@ done"] {
            assert_eq!(parse_console_line(line), ConsoleLine::Noise, "{line}");
        }
    }
}
