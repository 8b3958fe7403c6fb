//! Our client of vfio-user, with a server that others have written: that of rust-vmm.
//!
//! The device behind it is our controller, since theirs is a library without a device.

mod peer;

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::served::run;
use serde_json::Value;

const TENMIL: &str = env!("CARGO_BIN_EXE_tenmil");
const SOCKET: &str = "TENMIL_TEST_PEER";

/// A process with a server of theirs, which ends with this.
struct PeerServer {
    child: Child,
    directory: tempfile::TempDir,
}

impl PeerServer {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "vfio_user_peer::foreign_server_process", "--ignored"]);
        child.env(SOCKET, directory.path().join("device"));
        // It ends when it finds nothing more to read.
        let child = child.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let server = Self { child, directory };
        wait_until("it does not listen", || server.socket().exists());
        server
    }

    fn socket(&self) -> std::path::PathBuf {
        self.directory.path().join("device")
    }

    fn name(&self, more: &str) -> String {
        format!("vfio-user:{}?queues=2{more}", self.socket().display())
    }
}

impl Drop for PeerServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
#[ignore = "the tests below run it"]
fn foreign_server_process() {
    let Ok(path) = std::env::var(SOCKET) else { return };
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
    peer::serve(Path::new(&path));
}

#[test]
fn controller_of_a_foreign_server_is_identified() {
    let server = PeerServer::start();
    // One client after the other: each resets what the one before has left.
    for _ in 0..2 {
        let said = run(TENMIL, &["identify", &server.name(""), "--json"]);
        let said: Value = serde_json::from_str(&said).unwrap();
        assert_eq!(said["controller"]["identify"]["sn"], peer::SERIAL, "{said}");
        let blocks = &said["namespaces"]["1"]["identify"]["nsze"];
        assert_eq!(blocks.as_u64(), Some(peer::BLOCKS), "{said}");
    }
}

#[test]
fn verified_load_on_a_foreign_server_succeeds_with_every_doorbell_kind() {
    let server = PeerServer::start();
    for doorbells in ["yes", "no"] {
        let name = server.name(&format!("&shadow-doorbells={doorbells}"));
        let load = ["perf", &name, "-w", "randrw", "--verify", "--overwrite", "-t", "1", "--json"];
        let said: Value = serde_json::from_str(&run(TENMIL, &load)).unwrap();
        assert!(said["iops"].as_f64().unwrap() > 0.0, "{doorbells}: {said}");
    }
}

/// A client that is killed in the middle leaves a controller that works; the next one resets it.
#[test]
fn state_left_by_a_client_is_reset_by_the_next() {
    let server = PeerServer::start();
    let name = server.name("");
    let mut load = Command::new(TENMIL);
    load.args(["perf", &name, "-w", "randread", "-t", "60"]).stderr(Stdio::null());
    let mut load = load.stdout(Stdio::null()).spawn().unwrap();
    wait_until("the client maps nothing", || memfd_map_count(server.child.id()) >= 2);
    load.kill().unwrap();
    load.wait().unwrap();
    let more = ["perf", &name, "-w", "randrw", "--verify", "--overwrite", "-t", "1"];
    run(TENMIL, &more);
}

#[test]
fn client_reports_that_its_server_has_ended() {
    let server = PeerServer::start();
    let mut load = Command::new(TENMIL);
    load.args(["perf", &server.name(""), "-w", "randread", "-t", "60"]);
    let load = load.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    wait_until("the client maps nothing", || memfd_map_count(server.child.id()) >= 2);
    drop(server);
    let Output { status, stderr, .. } = load.wait_with_output().unwrap();
    let said = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(3), "{said}");
    let expected = ["the server process has ended", "path"];
    assert!(expected.iter().any(|text| said.contains(text)), "{said}");
}

/// How many files of a client's memory a process has mapped.
fn memfd_map_count(pid: u32) -> usize {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    maps.lines().filter(|line| line.contains("memfd:")).count()
}
