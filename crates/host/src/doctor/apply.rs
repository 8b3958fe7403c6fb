//! Doing what is safe, and telling how it is undone.

use super::{Change, Finding, echo};
use crate::Errno;
use crate::frequency::Files;

/// A change that was tried.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    /// What it was for.
    pub item: String,
    /// The change.
    pub change: Change,
    /// Whether the file says so now; or what the kernel said.
    pub outcome: Result<(), String>,
}

/// Makes the changes of all findings that are safe to make: those that take nothing from anybody,
/// and can be undone. Everything else is left to whoever knows the machine.
pub fn apply(files: &impl Files, findings: &[Finding]) -> Vec<Applied> {
    let changes = |finding: &Finding| {
        let changes = finding.remedy.iter().flat_map(|remedy| remedy.changes.clone());
        changes.map(|change| (finding.item.clone(), change)).collect::<Vec<_>>()
    };
    let tried = |(item, change): (String, Change)| {
        let outcome = make(files, &change);
        Applied { item, change, outcome }
    };
    findings.iter().flat_map(changes).map(tried).collect()
}

fn make(files: &impl Files, change: &Change) -> Result<(), String> {
    files.write(&change.path, &change.to).map_err(|errno| match errno {
        Errno::ACCESS | Errno::PERM => "permission denied, expected to run as root".to_owned(),
        errno => errno.to_string(),
    })?;
    let found = files.text(&change.path).unwrap_or_default();
    let words: Vec<&str> = found.split_whitespace().collect();
    let is_chosen = found.contains(&format!("[{}]", change.to));
    if is_chosen || words == change.to.split_whitespace().collect::<Vec<_>>() {
        Ok(())
    } else {
        Err(format!("the kernel has made `{found}` of it"))
    }
}

impl Change {
    /// The command that undoes it.
    pub fn undo(&self) -> String {
        let quoted =
            if self.from.contains(' ') { format!("'{}'", self.from) } else { self.from.clone() };
        echo(&quoted, &self.path)
    }
}
