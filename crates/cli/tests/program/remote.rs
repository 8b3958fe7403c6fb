//! One process serves over NVMe/TCP, and others use what it serves.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};

use crate::served::{ServeProcess, run};
use serde_json::Value;
use tenmil_base::Span;
use tenmil_linux::NamedThread;

const TENMIL: &str = env!("CARGO_BIN_EXE_tenmil");
const NQN: &str = "nqn.2026-01.org.tenmil:disk";

/// A process that serves `uri` over NVMe/TCP, and what others call that.
fn serve(uri: &str) -> (ServeProcess, String) {
    let served = ServeProcess::start_shell_line(&format!(
        "{TENMIL} serve '{uri}' --listen tcp://127.0.0.1:0"
    ));
    let address = served.ready.trim().strip_prefix("ready ").unwrap().to_owned();
    (served, address)
}

#[test]
fn identify_describes_the_served_subsystem() {
    let (_served, address) = serve("ram:16m");
    let said = run(TENMIL, &["identify", &format!("{address}/{NQN}"), "--json"]);
    let said: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(said["controller"]["identify"]["subnqn"], NQN);
}

#[test]
fn data_is_copied_to_and_from_the_target_unchanged() {
    let (_served, address) = serve("ram:8m");
    let directory = tempfile::tempdir().unwrap();
    let (from, to) = (directory.path().join("from"), directory.path().join("to"));
    let bytes: Vec<u8> = (0..(8_u64 << 20) / 8)
        .flat_map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())
        .collect();
    std::fs::write(&from, &bytes).unwrap();
    let file = |path: &std::path::Path| format!("file:{}", path.display());
    for more in ["", "?hdgst=yes&ddgst=yes", "?depth=2", "?read-queue=yes&poll-queue=yes"] {
        let remote = format!("{address}/{NQN}{more}");
        run(TENMIL, &["copy", &file(&from), &remote, "--overwrite"]);
        let back = format!("{}?size=8m", file(&to));
        run(TENMIL, &["copy", &remote, &back, "--overwrite"]);
        assert!(std::fs::read(&to).unwrap() == bytes, "{more}");
        std::fs::remove_file(&to).unwrap();
    }
}

#[test]
fn verified_load_over_tcp_succeeds() {
    let (_served, address) = serve("ram:16m");
    let remote = format!("{address}/{NQN}");
    let load = ["perf", &remote, "-w", "randrw", "--verify", "--overwrite", "-t", "1", "--json"];
    let said: Value = serde_json::from_str(&run(TENMIL, &load)).unwrap();
    assert!(said["iops"].as_f64().unwrap() > 0.0, "{said}");
}

#[test]
fn missing_remote_device_is_reported_with_its_category() {
    let (_served, address) = serve("ram:1m");
    for (uri, code, expected) in [
        (format!("{address}/nqn.2024-01.example:other"), 3, "there is no such subsystem"),
        (format!("{address}/{NQN}?ns=7"), 2, "no namespace 7 in"),
        (format!("tcp://127.0.0.1:1/{NQN}"), 3, "tcp://127.0.0.1:1"),
    ] {
        let output = Command::new(TENMIL).args(["perf", &uri, "-t", "1"]).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains(expected), "{uri}: {said}");
        assert_eq!(output.status.code(), Some(code), "{uri}: {said}");
    }
}

/// What leads to `address`, until it is dropped.
fn proxy(address: &str) -> (ServeProcess, String) {
    proxy_at("127.0.0.1:0", address)
}

fn proxy_at(at: &str, address: &str) -> (ServeProcess, String) {
    let to = address.trim_start_matches("tcp://");
    let served = ServeProcess::start_shell_line(&format!("{TENMIL} proxy {at} {to}"));
    let ready = served.ready.trim().strip_prefix("ready ").unwrap();
    let address = ready.split_whitespace().next().unwrap().trim_start_matches("tcp://").to_owned();
    (served, address)
}

#[test]
fn load_over_two_paths_survives_the_loss_of_one() {
    let (_served, address) = serve("ram:16m");
    for spread in ["active-passive", "round-robin", "queue-depth"] {
        let ((first, one), (_second, two)) = (proxy(&address), proxy(&address));
        let remote = format!("tcp://{one},{two}/{NQN}?iopolicy={spread}&keep-alive-timeout=500ms");
        let mut load = Command::new(TENMIL);
        load.args([
            "perf",
            &remote,
            "-w",
            "randrw",
            "--verify",
            "--overwrite",
            "-t",
            "3",
            "--json",
        ]);
        let mut load = load.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut said = String::new();
        let mut errors = BufReader::new(load.stderr.take().unwrap());
        while !(said.contains("path 0 is up") && said.contains("path 1 is up")) {
            assert!(errors.read_line(&mut said).unwrap() > 0, "{said}");
        }
        drop(first);
        errors.read_to_string(&mut said).unwrap();
        let output = load.wait_with_output().unwrap();
        assert!(output.status.success(), "{said}");
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(report["iops"].as_f64().unwrap() > 0.0, "{report}");
        assert!(said.contains("path 0 is down"), "{said}");
        assert!(said.contains(&format!("path 1 instead of path 0 ({two})")), "{said}");
    }
}

#[test]
fn loss_and_return_of_the_only_path_are_logged() {
    let (_served, address) = serve("ram:16m");
    let (first, one) = proxy(&address);
    let remote = format!("tcp://{one}/{NQN}?keep-alive-timeout=1s&reconnect-delay=100ms");
    let mut load = Command::new(TENMIL);
    load.args(["perf", &remote, "-w", "randread", "-t", "4", "--json"]);
    let load = load.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    tenmil_linux::named_thread::sleep(Span::from_secs(2));
    drop(first);
    tenmil_linux::named_thread::sleep(Span::from_ms(500));
    let _second = proxy_at(&one, &address);
    let output = load.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}");
    let (away, back) =
        (format!("note: tcp://{one}/{NQN}: connection lost ("), "it is there again, after ");
    let lines: Vec<&str> = said.lines().filter(|line| line.contains(NQN)).collect();
    assert!(
        matches!(lines[..], [first, second] if first.starts_with(&away)
        && first.ends_with("reconnecting every 100 ms for up to 600 s, and what waits for it fails after 30 s")
        && second.contains(back)),
        "{said}"
    );
}

/// Starts `tenmil events` for a process, and returns once it has received an event.
fn start_events_follower(served: &ServeProcess) -> (Child, BufReader<std::process::ChildStdout>) {
    let mut command = served.command(&["events", "--json", "--time", "60"]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let mut knock = served.command(&["set", "scheduler", "policy=static"]);
    let knocks = NamedThread::spawn("knocks", None, move |stop| {
        while !stop.is_stopped() {
            assert!(knock.output().unwrap().status.success());
        }
    });
    assert!(lines.read_line(&mut String::new()).unwrap() > 0);
    knocks.unwrap().stop();
    (child, lines)
}

#[test]
fn path_changes_are_listed_and_emitted_as_events() {
    let (_served, address) = serve("ram:16m");
    let ((first, one), (_second, two)) = (proxy(&address), proxy(&address));
    let remote = format!("tcp://{one},{two}/{NQN}?keep-alive-timeout=500ms");
    let user = ServeProcess::start(&remote, &[]);
    let paths = || -> Vec<Value> {
        serde_json::from_str(&user.stdout_of_rpc_command("get paths --json")).unwrap()
    };
    let is_up = |row: &Value| row["state"] == "up" && row["access"] == "optimized";
    assert!((0..200).any(|_| paths().iter().all(is_up)), "{:?}", paths());
    assert_eq!(paths()[0]["address"], one.as_str());
    assert_eq!((&paths()[0]["best"], &paths()[1]["best"]), (&true.into(), &false.into()));
    let (mut follower, mut lines) = start_events_follower(&user);
    drop(first);
    let mut next = |kind: &str| loop {
        let mut line = String::new();
        assert!(lines.read_line(&mut line).unwrap() > 0, "it has ended before {kind}");
        let event: Value = serde_json::from_str(&line).unwrap();
        if event["kind"] == kind {
            return event;
        }
    };
    let lost = next("path-lost");
    assert_eq!((&lost["about"]["address"], &lost["about"]["path"]), (&one.into(), &0.into()));
    assert!(lost["about"]["why"].as_str().is_some_and(|why| !why.is_empty()), "{lost}");
    assert_eq!(next("path-selected")["about"]["address"], two.as_str());
    let (lost, taken) = (&paths()[0], &paths()[1]);
    assert_eq!((&lost["state"], &lost["losses"]), (&"lost".into(), &1.into()), "{lost}");
    assert_eq!((&taken["state"], &taken["best"]), (&"up".into(), &true.into()), "{taken}");
    // The one that came up first may have been replaced by the other at the start.
    assert!(taken["failovers"].as_u64() >= Some(1), "{taken}");
    follower.kill().unwrap();
    follower.wait().unwrap();
}

#[test]
fn each_unreachable_path_is_reported() {
    let remote = format!("tcp://127.0.0.1:1,127.0.0.1:2/{NQN}");
    let output = Command::new(TENMIL).args(["perf", &remote, "-t", "1"]).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("no path leads there: 127.0.0.1:1: "), "{said}");
    assert!(said.contains("; 127.0.0.1:2: "), "{said}");
    assert_eq!(output.status.code(), Some(3), "{said}");
}
