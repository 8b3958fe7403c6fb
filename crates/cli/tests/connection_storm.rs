//! Hosts that open all their connections at once, and a target that takes them in. In a process of
//! its own, since it opens some thousand descriptors.

#![expect(clippy::unwrap_used, reason = "a test may")]

#[expect(dead_code, reason = "this test uses a part of it")]
mod served;

use std::process::{Child, Command, Stdio};

use served::ServeProcess;
use tenmil_linux::fd_table::DESCRIPTORS_RESERVED;

const TENMIL: &str = env!("CARGO_BIN_EXE_tenmil");
/// Each has as many connections for I/O, and one for the rest.
const QUEUES: u64 = 64;
const HOSTS: u64 = 16;
/// What a target needs for each, at most.
const DESCRIPTORS: u64 = 6;

/// The number in a line of a file about a process.
fn number_in_proc_file(process: &ServeProcess, file: &str, line: &str, word: usize) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{}/{file}", process.pid())).unwrap();
    let found = text.lines().find_map(|found| found.strip_prefix(line)).unwrap();
    match found.split_whitespace().nth(word).unwrap() {
        "unlimited" => u64::MAX,
        number => number.parse().unwrap(),
    }
}

/// A host that reads once a second with each of its queues.
fn start_reading_host(address: &str, number: u64) -> Child {
    let remote = format!(
        "{address}/nqn.2026-01.org.tenmil:disk?queues={QUEUES}\
         &hostnqn=nqn.2026-01.org.example:host-{number}"
    );
    let queues = QUEUES.to_string();
    let load = ["perf", &remote, "-P", &queues, "-q", &queues, "--rate", "64", "-t", "1"];
    let mut command = Command::new("timeout");
    command.args(["-k", "5", "90", TENMIL]).args(load).stdout(Stdio::null()).stderr(Stdio::piped());
    command.spawn().unwrap()
}

#[test]
fn thousand_simultaneous_connections_are_served() {
    let line = format!("{TENMIL} serve 'null:?size=1g' --listen tcp://127.0.0.1:0");
    let served = ServeProcess::start_shell_line(&line);
    let address = served.ready.trim().strip_prefix("ready ").unwrap();
    let allowed = number_in_proc_file(&served, "limits", "Max open files", 0);
    assert_eq!(allowed, number_in_proc_file(&served, "limits", "Max open files", 1));
    let room = number_in_proc_file(&served, "status", "FDSize:", 0);
    assert!(
        room >= allowed.min(DESCRIPTORS_RESERVED),
        "there is room for {room} of {allowed} descriptors"
    );

    let hosts = HOSTS.min(allowed / ((QUEUES + 1) * DESCRIPTORS));
    let hosts: Vec<_> = (0..hosts).map(|number| start_reading_host(address, number)).collect();
    for host in hosts {
        let output = host.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {said}", output.status);
    }
    assert_eq!(
        number_in_proc_file(&served, "status", "FDSize:", 0),
        room,
        "it has not waited for more room"
    );
    assert_eq!(served.stop_with_sigterm(), Some(0));
}
