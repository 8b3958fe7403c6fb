//! What would be lost: whoever writes to what a run did not create is told what is there, and needs
//! to say that it may go.
//!
//! ```text
//!   Opened::existing ──> Findings: signatures at both ends, who uses it, which device it is
//!                            │
//!   --overwrite ─────────> allow ──> a refusal that names all that, and the remedy
//! ```

mod ends;
mod probe;
#[cfg(test)]
mod tests;

use std::fmt;

use host::file::{holds_zeroes, read_ends};
use host::holders::{Hardware, InUse, Place};
use host::machine::Machine;

pub use self::ends::{END_BYTES, Ends};
pub use self::probe::{Signature, probe};
use crate::Existing;

/// All that could be found out about something that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Findings {
    /// What it is called.
    pub name: String,
    /// How long it is.
    pub found: String,
    /// What has left its mark there, or why nobody could look.
    pub signatures: Result<Vec<Signature>, String>,
    /// Whether there is nothing but zeroes at both ends.
    pub is_blank: bool,
    /// Whether it is a file that holds nothing but zeroes all over.
    pub is_zeroes: bool,
    /// Who uses it.
    pub used_by: Vec<InUse>,
    /// What device it is.
    pub hardware: Hardware,
}

/// Why something is not written to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotAllowed {
    /// A line: what is there.
    pub text: String,
    /// What to do if it is to be written to all the same.
    pub remedy: String,
}

/// Lets `doing` write to what is there if that may go and nobody uses it.
///
/// # Errors
///
/// If there is something and `overwrite` is not set, or somebody uses it, whatever is set.
pub fn allow(
    doing: &str,
    existing: &[Existing],
    overwrite: bool,
    machine: &Machine,
) -> Result<(), NotAllowed> {
    let mut findings: Vec<Findings> =
        existing.iter().map(|one| Findings::of(one, machine)).collect();
    let listed =
        |of: &[&Findings]| of.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ");
    let used: Vec<&Findings> = findings.iter().filter(|one| !one.used_by.is_empty()).collect();
    if !used.is_empty() {
        let used = listed(&used);
        return Err(NotAllowed {
            text: format!(
                "{doing} would write to what is in use: {used}; expected nobody who uses it"
            ),
            remedy: "Unmount it and stop what stands on it; --overwrite does not change this."
                .into(),
        });
    }
    if !overwrite {
        // All that is there is zeroes: a run that was refused, or stopped before it began, leaves such.
        findings.retain(|one| !one.is_zeroes);
    }
    if overwrite || findings.is_empty() {
        return Ok(());
    }
    let found = listed(&findings.iter().collect::<Vec<_>>());
    Err(NotAllowed {
        text: format!(
            "{doing} would destroy what is there: {found}; expected devices that this run creates, or \
             --overwrite"
        ),
        remedy: "To write to them all the same, add --overwrite.".into(),
    })
}

impl Findings {
    /// Looks at what is there. Reads both its ends, and the kernel's files; not for the way of an
    /// I/O.
    pub fn of(existing: &Existing, machine: &Machine) -> Self {
        let Existing { name, found, path } = existing.clone();
        let Some(path) = path else {
            let signatures = Err("nobody could look closer".into());
            let (used_by, hardware) = (Vec::new(), Hardware::default());
            let (is_blank, is_zeroes) = (false, false);
            return Self { name, found, signatures, is_blank, is_zeroes, used_by, hardware };
        };
        let place = Place::of(&path);
        let ends = read_ends(&path, END_BYTES);
        let is_blank = ends
            .as_ref()
            .is_ok_and(|(head, tail, _)| head.iter().chain(tail).all(|byte| *byte == 0));
        let signatures = ends
            .map(|(head, tail, size_bytes)| probe(&Ends { head: &head, tail: &tail, size_bytes }))
            .map_err(|error| format!("it cannot be read: {error}"));
        let (used_by, hardware) = (InUse::of(machine, &place), Hardware::of(machine, &place));
        let is_zeroes = is_blank && holds_zeroes(&path);
        Self { name, found, signatures, is_blank, is_zeroes, used_by, hardware }
    }
}

/// `/dev/sdb (1000 bytes; GPT 0ab4… at byte 512; sdb1 is mounted at /home; model Disk, serial S4EW)`.
impl fmt::Display for Findings {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} ({}", self.name, self.found)?;
        match &self.signatures {
            Err(why) => write!(out, "; {why}")?,
            Ok(none) if none.is_empty() && self.is_blank => {
                out.write_str("; nothing but zeroes at both ends")?;
            }
            Ok(none) if none.is_empty() => out.write_str("; data of no kind that is known")?,
            Ok(some) => some.iter().try_for_each(|one| write!(out, "; {one}"))?,
        }
        self.used_by.iter().try_for_each(|one| write!(out, "; {one}"))?;
        let Hardware { model, serial, wwid } = &self.hardware;
        for (word, text) in [("model", model), ("serial", serial), ("wwid", wwid)] {
            if let Some(text) = text {
                write!(out, "; {word} {text}")?;
            }
        }
        out.write_str(")")
    }
}

impl fmt::Display for NotAllowed {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.text)
    }
}

impl std::error::Error for NotAllowed {}
