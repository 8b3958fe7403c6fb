//! Handling of a finding: the input is saved, reported, and reproduced.

#![expect(clippy::disallowed_methods, reason = "findings are files")]
#![expect(clippy::unwrap_used, reason = "a test may")]

use std::path::Path;
use std::process::{Command, Output};

/// All targets, in the order in which they are listed.
const TARGETS: [&str; 18] = [
    "wire",
    "controller",
    "front",
    "control",
    "block",
    "signatures",
    "nbd",
    "tcp_host",
    "tcp_controller",
    "tcp_service",
    "tcp_authentication",
    "tls",
    "volume",
    "volume_stream",
    "vfu_server",
    "vfu_client",
    "vhost_server",
    "vhost_ring",
];

fn run_fuzz(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tenmil-fuzz"))
        .args(arguments)
        .arg("--keep")
        .arg(folder)
        .current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
        .output()
        .unwrap()
}

fn stderr_text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn injected_bug_is_found_saved_and_reproduced_from_file_and_seed() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let first = run_fuzz(one.path(), &["--injected-bugs", "--seed", "7"]);
    assert_eq!(first.status.code(), Some(1), "{}", stderr_text(&first));
    let file = one.path().join("fuzz-canary.input");
    assert!(stderr_text(&first).contains("the planted bug"), "{}", stderr_text(&first));
    assert!(
        stderr_text(&first).contains(&format!("--replay {}", file.display())),
        "{}",
        stderr_text(&first)
    );

    let again = run_fuzz(two.path(), &["--injected-bugs", "--replay", file.to_str().unwrap()]);
    assert_eq!(again.status.code(), Some(1), "{}", stderr_text(&again));

    run_fuzz(two.path(), &["--injected-bugs", "--seed", "7"]);
    let kept = std::fs::read(two.path().join("fuzz-canary.input")).unwrap();
    assert_eq!(kept, std::fs::read(&file).unwrap());
}

#[test]
fn every_target_runs_its_corpus_and_some_inputs_without_findings() {
    let folder = tempfile::tempdir().unwrap();
    let output = run_fuzz(folder.path(), &["--count", "50", "--seconds", "60"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr_text(&output));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    for target in TARGETS {
        assert!(text.contains(&format!("fuzz {target}: 50 inputs from seed 1")), "{text}");
    }
    assert!(std::fs::read_dir(folder.path()).unwrap().next().is_none(), "nothing is kept");
}

#[test]
fn unknown_target_is_rejected_with_the_known_ones() {
    let folder = tempfile::tempdir().unwrap();
    let output = run_fuzz(folder.path(), &["--target", "wires"]);
    assert_eq!(output.status.code(), Some(2));
    let (last, others) = TARGETS.split_last().unwrap();
    let expected = format!("{} or {last}", others.join(", "));
    assert_eq!(
        stderr_text(&output),
        format!("error: --target wires: there is none, expected {expected}\n")
    );
}
