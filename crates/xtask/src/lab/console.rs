//! What a guest says on its console: lines that begin with a mark are for us.
//!
//! ```text
//!   @@ ok WHAT          a check that passed
//!   @@ not ok WHAT      one that did not, and why
//!   @@ skip WHAT        one that cannot be made there, and why
//!   @@ note WHAT        something to know, and no check
//!   @@ kill beside      the tenmil beside the guest is killed, and started again
//!   @@ cold start       the machine is ended, and another started with the same disks
//!   @@ do WHAT          something is done to the machine from outside; the answer is a line of input
//!   @@ end              the script came to its end
//! ```

use std::fmt;

/// What begins a line that is for us.
const MARK: &str = "@@ ";

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Check {
    pub(crate) verdict: Verdict,
    /// What was looked at, and if it did not pass, what was found.
    pub(crate) what: String,
}

/// How a check went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Passed,
    Failed,
    Skipped,
}

/// What a line of the console means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Word {
    Check(Check),
    /// Something to know.
    Note(String),
    KillBeside,
    ColdStart,
    /// Something is asked for by its name.
    Do(String),
    End,
    /// It is not for us.
    Noise,
}

impl fmt::Display for Check {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = match self.verdict {
            Verdict::Passed => "ok     ",
            Verdict::Failed => "FAILED ",
            Verdict::Skipped => "skipped",
        };
        write!(out, "{word} {}", self.what)
    }
}

/// Reads a line. The kernel may have written before our mark without ending its own line.
pub(crate) fn read(line: &str) -> Word {
    let Some(at) = line.find(MARK) else { return Word::Noise };
    let text = line[at + MARK.len()..].trim_end();
    let verdicts =
        [("ok ", Verdict::Passed), ("not ok ", Verdict::Failed), ("skip ", Verdict::Skipped)];
    for (word, verdict) in verdicts {
        if let Some(what) = text.strip_prefix(word) {
            return Word::Check(Check { verdict, what: what.to_owned() });
        }
    }
    if let Some(what) = text.strip_prefix("note ") {
        return Word::Note(what.to_owned());
    }
    if let Some(name) = text.strip_prefix("do ") {
        return Word::Do(name.to_owned());
    }
    match text {
        "kill beside" => Word::KillBeside,
        "cold start" => Word::ColdStart,
        "end" => Word::End,
        _ => Word::Noise,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marked_lines_are_checks_and_all_others_are_noise() {
        let check = |verdict, what: &str| Word::Check(Check { verdict, what: what.to_owned() });
        assert_eq!(read("@@ ok it connects\r"), check(Verdict::Passed, "it connects"));
        assert_eq!(read("[ 1.2] nvme0: @@ not ok a: b"), check(Verdict::Failed, "a: b"));
        assert_eq!(read("@@ skip no module"), check(Verdict::Skipped, "no module"));
        assert_eq!(read("@@ note Linux 6.12\r"), Word::Note("Linux 6.12".to_owned()));
        assert_eq!(read("@@ end"), Word::End);
        assert_eq!(read("@@ kill beside"), Word::KillBeside);
        assert_eq!(read("@@ cold start"), Word::ColdStart);
        assert_eq!(read("@@ do pull\r"), Word::Do("pull".to_owned()));
        for line in ["", "ok it connects", "@@ endless", "@@ okay", "@@", "@@ done"] {
            assert_eq!(read(line), Word::Noise, "{line}");
        }
    }
}
