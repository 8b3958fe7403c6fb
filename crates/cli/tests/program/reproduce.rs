//! `tenmil reproduce` from end to end, from the command line.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn reproduce(out: &Path, more: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tenmil"));
    command.arg("reproduce").args(more).arg("--out").arg(out).env("XDG_RUNTIME_DIR", out);
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn two_experiments_make_a_report_and_are_not_repeated() {
    let root = tempfile::tempdir().unwrap();
    let out = root.path().join("out");
    let words = ["--quick", "--only", "slot-layout", "submission-doorbell", "--json"];
    let first = reproduce(&out, &words);
    assert!(first.status.success(), "{first:?}");
    let report: Value = serde_json::from_slice(&first.stdout).unwrap();
    let experiments = report["experiments"].as_array().unwrap();
    assert_eq!(experiments.len(), 2);
    for experiment in experiments {
        let name = experiment["name"].as_str().unwrap();
        let rounds = experiment["rounds"].as_array().unwrap();
        // Three and a spare one, and the same once more if others have disturbed them.
        assert!((3..=8).contains(&rounds.len()), "{name}: {} rounds", rounds.len());
        let sides = experiment["sides"].as_array().unwrap();
        for (round, side) in rounds.iter().flat_map(|it| sides.iter().map(move |side| (it, side))) {
            let turn = &round["trials"][side["label"].as_str().unwrap()];
            let key = if name == "slot-layout" { "rate" } else { "iops" };
            assert!(turn["figures"][key].as_f64().unwrap() > 0.0, "{name}: {turn}");
        }
        assert_eq!(experiment["reused"], false);
        assert!(text(&first.stderr).contains(&format!("{name}: ")), "{}", text(&first.stderr));
    }
    let page = std::fs::read_to_string(out.join("report.html")).unwrap();
    assert!(page.contains("id=\"slot-layout\"") && page.ends_with("</html>"));
    let again = reproduce(&out, &words);
    let report: Value = serde_json::from_slice(&again.stdout).unwrap();
    // What was disturbed, as by other tests, is measured again.
    let is_settled = |experiment: &Value| {
        let questions = experiment["questions"].as_array().unwrap();
        questions.iter().all(|question| {
            let has_answer = question["verdict"] != "inconclusive";
            has_answer || !question["values"].is_null() && question["disturbed_rounds"] == 0
        })
    };
    for (again, first) in report["experiments"].as_array().unwrap().iter().zip(experiments) {
        assert_eq!(again["reused"], is_settled(first), "{first}");
        assert_eq!(again["rounds"] == first["rounds"], is_settled(first), "{again}");
    }
    let is_any = experiments.iter().any(is_settled);
    assert_eq!(text(&again.stderr).contains("(from an earlier run)"), is_any);
}

#[test]
fn unknown_experiment_is_rejected_before_the_run() {
    let root = tempfile::tempdir().unwrap();
    let out = root.path().join("out");
    let refused = reproduce(&out, &["--only", "perpetual-motion"]);
    assert_eq!(refused.status.code(), Some(2));
    let said = text(&refused.stderr);
    assert!(said.contains("--only perpetual-motion: no experiment has that name"), "{said}");
    assert!(said.contains("ten-million") && said.contains("--list"), "{said}");
    assert!(!out.exists());
}

#[test]
fn list_names_the_selectable_experiments() {
    let root = tempfile::tempdir().unwrap();
    let listed = reproduce(root.path(), &["--list"]);
    let listed = text(&listed.stdout);
    assert!(listed.lines().count() > 20, "{listed}");
    assert!(listed.starts_with("ten-million"), "{listed}");
}
