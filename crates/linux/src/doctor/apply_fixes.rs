//! Applying safe fixes, and the commands that undo them.

use super::{MachineCheck, SysfsChange, shell_write_command};
use crate::Errno;
use crate::frequency_control::CpufreqFiles;

/// Result of one attempted change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AppliedChange {
    /// Subject of the check.
    pub item: String,
    /// The change.
    pub change: SysfsChange,
    /// Success if the file has the new value; else the kernel's text.
    pub result: Result<(), String>,
}

/// Makes the safe changes of all checks: those that deprive no other program and can be undone.
/// Everything else is left to the administrator.
pub fn apply_safe_changes(
    files: &impl CpufreqFiles,
    findings: &[MachineCheck],
) -> Vec<AppliedChange> {
    let changes = |finding: &MachineCheck| {
        let changes = finding.fix.iter().flat_map(|remedy| remedy.changes.clone());
        changes.map(|change| (finding.item.clone(), change)).collect::<Vec<_>>()
    };
    let tried = |(item, change): (String, SysfsChange)| {
        let outcome = apply_change(files, &change);
        AppliedChange { item, change, result: outcome }
    };
    findings.iter().flat_map(changes).map(tried).collect()
}

fn apply_change(files: &impl CpufreqFiles, change: &SysfsChange) -> Result<(), String> {
    files.write_value(&change.path, &change.to).map_err(|errno| match errno {
        Errno::ACCESS | Errno::PERM => "permission denied, expected to run as root".to_owned(),
        errno => errno.to_string(),
    })?;
    let found = files.read_trimmed(&change.path).unwrap_or_default();
    let words: Vec<&str> = found.split_whitespace().collect();
    let is_chosen = found.contains(&format!("[{}]", change.to));
    if is_chosen || words == change.to.split_whitespace().collect::<Vec<_>>() {
        Ok(())
    } else {
        Err(format!("the kernel has made `{found}` of it"))
    }
}

impl SysfsChange {
    /// Command that undoes the change.
    pub fn undo_command(&self) -> String {
        let quoted =
            if self.from.contains(' ') { format!("'{}'", self.from) } else { self.from.clone() };
        shell_write_command(&quoted, &self.path)
    }
}
