//! `tenmil doctor`: checks the machine.

use std::fmt::Write as _;
use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use serde_json::{Value, json};
use tenmil_linux::doctor::{self, AppliedChange, CheckSection, CheckSeverity, MachineCheck};
use tenmil_linux::kernel_files::KernelFiles;

use super::write_stdout;
use tenmil_base::Error;

/// Check this machine for missing or slow settings, and print the fix for each.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct DoctorArguments {
    /// Apply the fixes that are safe, and print how to undo each
    #[arg(long)]
    apply: bool,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  tenmil doctor
  sudo tenmil doctor                     also the settings that only root may read
  sudo tenmil doctor --apply             also apply the fixes that are safe and can be undone
  tenmil doctor --json | jq '.findings[] | select(.state == \"missing\")'

One line for each check: severity, value found, value recommended, reason, and fix. Nothing is
changed without --apply. docs/operator/doctor.md lists the checks.";

/// Checks the machine, and applies the safe fixes with `--apply`.
pub(super) fn run_doctor(
    arguments: &DoctorArguments,
    out: &mut dyn Write,
) -> Result<ExitCode, Error> {
    let findings = doctor::check_this_machine();
    let applied =
        arguments.apply.then(|| doctor::apply_safe_changes(&KernelFiles::live_system(), &findings));
    let text = if arguments.json {
        checks_json(&findings, applied.as_deref())
    } else {
        checks_text(&findings, applied.as_deref())
    };
    write_stdout(out, &text)?;
    let failed = applied.iter().flatten().any(|one| one.result.is_err());
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn checks_text(findings: &[MachineCheck], applied: Option<&[AppliedChange]>) -> String {
    let mut text = String::new();
    for part in CheckSection::ALL {
        let _ = writeln!(text, "{}", part.name());
        for finding in findings.iter().filter(|finding| finding.section == part) {
            let _ = writeln!(text, "  {finding}");
        }
    }
    let count =
        |state: CheckSeverity| findings.iter().filter(|finding| finding.severity == state).count();
    let _ = writeln!(
        text,
        "{} missing, {} slow, {} not readable here",
        count(CheckSeverity::Required),
        count(CheckSeverity::Warning),
        count(CheckSeverity::Unknown)
    );
    if let Some(applied) = applied {
        text += &applied_as_text(applied);
    }
    text
}

fn applied_as_text(applied: &[AppliedChange]) -> String {
    let mut text = String::from("applied\n");
    for one in applied {
        let doctor::SysfsChange { path, from, to } = &one.change;
        let _ = match &one.result {
            Ok(()) => {
                writeln!(text, "  /{path}: {from} is {to} now; undo: {}", one.change.undo_command())
            }
            Err(why) => writeln!(text, "  /{path}: stays {from}: {why}"),
        };
    }
    if applied.is_empty() {
        text += "  nothing: no change is both safe and needed\n";
    }
    text
}

fn checks_json(findings: &[MachineCheck], applied: Option<&[AppliedChange]>) -> String {
    let finding = |finding: &MachineCheck| {
        let remedy = finding.fix.as_ref();
        json!({
            "part": finding.section.name(),
            "item": finding.item,
            "state": finding.severity.name(),
            "found": finding.found,
            "recommended": finding.recommended,
            "why": finding.why,
            "command": remedy.map(|remedy| &remedy.command),
            "is_safe": remedy.is_some_and(|remedy| !remedy.changes.is_empty()),
        })
    };
    let change = |one: &AppliedChange| {
        json!({
            "item": one.item,
            "path": format!("/{}", one.change.path),
            "from": one.change.from,
            "to": one.change.to,
            "error": one.result.as_ref().err(),
            "undo": one.change.undo_command(),
        })
    };
    let findings: Vec<Value> = findings.iter().map(finding).collect();
    let applied: Option<Vec<Value>> = applied.map(|applied| applied.iter().map(change).collect());
    format!("{:#}\n", json!({ "findings": findings, "applied": applied }))
}

#[cfg(test)]
mod tests {
    use tenmil_linux::doctor::{AppliedChange, SysfsChange, check_this_machine};

    use super::{checks_json, checks_text};

    fn test_change_result(applied_result: Result<(), String>) -> AppliedChange {
        let change = SysfsChange { path: "a/b".into(), from: "1".into(), to: "2".into() };
        AppliedChange { item: "x".into(), change, result: applied_result }
    }

    #[test]
    fn checks_are_listed_by_section_and_counted() {
        let findings = check_this_machine();
        let text = checks_text(&findings, None);
        assert!(text.starts_with("devices\n  "), "{text}");
        assert!(text.contains("\nmemory\n") && text.contains("\nnetwork\n"), "{text}");
        assert!(text.trim_end().ends_with("not readable here"), "{text}");
        assert_eq!(text.lines().count(), findings.len() + 6);
        let json: serde_json::Value = serde_json::from_str(&checks_json(&findings, None)).unwrap();
        assert_eq!(json["findings"].as_array().unwrap().len(), findings.len());
        assert!(json["applied"].is_null());
    }

    #[test]
    fn applied_fix_is_reported_with_its_undo_command() {
        let all = [test_change_result(Ok(())), test_change_result(Err("permission denied".into()))];
        let text = checks_text(&[], Some(&all));
        assert!(text.contains("  /a/b: 1 is 2 now; undo: echo 1 | sudo tee /a/b\n"), "{text}");
        assert!(text.ends_with("  /a/b: stays 1: permission denied\n"), "{text}");
        assert!(checks_text(&[], Some(&[])).ends_with("no change is both safe and needed\n"));
        let json: serde_json::Value = serde_json::from_str(&checks_json(&[], Some(&all))).unwrap();
        assert_eq!(json["applied"][1]["error"], "permission denied");
    }
}
