//! `tenmil doctor`: checks the machine.

use std::fmt::Write as _;
use std::io::Write;
use std::process::ExitCode;

use clap::Args;
use serde_json::{Value, json};
use tenmil_linux::doctor::{self, Applied, Check, Section, Severity};
use tenmil_linux::kernel_files::KernelFiles;

use super::write_out;
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
pub(super) fn run(arguments: &DoctorArguments, out: &mut dyn Write) -> Result<ExitCode, Error> {
    let findings = doctor::examine_this();
    let applied = arguments.apply.then(|| doctor::apply(&KernelFiles::live(), &findings));
    let text = if arguments.json {
        as_json(&findings, applied.as_deref())
    } else {
        as_text(&findings, applied.as_deref())
    };
    write_out(out, &text)?;
    let failed = applied.iter().flatten().any(|one| one.result.is_err());
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn as_text(findings: &[Check], applied: Option<&[Applied]>) -> String {
    let mut text = String::new();
    for part in Section::ALL {
        let _ = writeln!(text, "{}", part.name());
        for finding in findings.iter().filter(|finding| finding.section == part) {
            let _ = writeln!(text, "  {finding}");
        }
    }
    let count =
        |state: Severity| findings.iter().filter(|finding| finding.severity == state).count();
    let _ = writeln!(
        text,
        "{} missing, {} slow, {} not readable here",
        count(Severity::Required),
        count(Severity::Warning),
        count(Severity::Unknown)
    );
    if let Some(applied) = applied {
        text += &applied_as_text(applied);
    }
    text
}

fn applied_as_text(applied: &[Applied]) -> String {
    let mut text = String::from("applied\n");
    for one in applied {
        let doctor::SysfsChange { path, from, to } = &one.change;
        let _ = match &one.result {
            Ok(()) => writeln!(text, "  /{path}: {from} is {to} now; undo: {}", one.change.undo()),
            Err(why) => writeln!(text, "  /{path}: stays {from}: {why}"),
        };
    }
    if applied.is_empty() {
        text += "  nothing: no change is both safe and needed\n";
    }
    text
}

fn as_json(findings: &[Check], applied: Option<&[Applied]>) -> String {
    let finding = |finding: &Check| {
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
    let change = |one: &Applied| {
        json!({
            "item": one.item,
            "path": format!("/{}", one.change.path),
            "from": one.change.from,
            "to": one.change.to,
            "error": one.result.as_ref().err(),
            "undo": one.change.undo(),
        })
    };
    let findings: Vec<Value> = findings.iter().map(finding).collect();
    let applied: Option<Vec<Value>> = applied.map(|applied| applied.iter().map(change).collect());
    format!("{:#}\n", json!({ "findings": findings, "applied": applied }))
}

#[cfg(test)]
mod tests {
    use tenmil_linux::doctor::{Applied, SysfsChange, examine_this};

    use super::{as_json, as_text};

    fn applied(applied_result: Result<(), String>) -> Applied {
        let change = SysfsChange { path: "a/b".into(), from: "1".into(), to: "2".into() };
        Applied { item: "x".into(), change, result: applied_result }
    }

    #[test]
    fn findings_stand_under_their_part_and_are_counted() {
        let findings = examine_this();
        let text = as_text(&findings, None);
        assert!(text.starts_with("devices\n  "), "{text}");
        assert!(text.contains("\nmemory\n") && text.contains("\nnetwork\n"), "{text}");
        assert!(text.trim_end().ends_with("not readable here"), "{text}");
        assert_eq!(text.lines().count(), findings.len() + 6);
        let json: serde_json::Value = serde_json::from_str(&as_json(&findings, None)).unwrap();
        assert_eq!(json["findings"].as_array().unwrap().len(), findings.len());
        assert!(json["applied"].is_null());
    }

    #[test]
    fn what_was_applied_is_told_with_how_it_is_undone() {
        let all = [applied(Ok(())), applied(Err("permission denied".into()))];
        let text = as_text(&[], Some(&all));
        assert!(text.contains("  /a/b: 1 is 2 now; undo: echo 1 | sudo tee /a/b\n"), "{text}");
        assert!(text.ends_with("  /a/b: stays 1: permission denied\n"), "{text}");
        assert!(as_text(&[], Some(&[])).ends_with("no change is both safe and needed\n"));
        let json: serde_json::Value = serde_json::from_str(&as_json(&[], Some(&all))).unwrap();
        assert_eq!(json["applied"][1]["error"], "permission denied");
    }
}
