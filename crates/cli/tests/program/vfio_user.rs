//! One process serves a controller over vfio-user, and others drive it.

use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::served::{ServeProcess, run};
use serde_json::Value;

const TENMIL: &str = env!("CARGO_BIN_EXE_tenmil");

/// A process that serves `uri`, what others call that, and where its socket is.
fn serve(uri: &str, more: &str) -> (ServeProcess, String, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let name = format!("vfio-user:{}", directory.path().join("disk").display());
    let served =
        ServeProcess::start_shell_line(&format!("{TENMIL} serve '{uri}' --listen '{name}' {more}"));
    assert_eq!(served.ready.trim(), format!("ready {name}"));
    (served, name, directory)
}

fn load(name: &str, more: &[&str]) -> Child {
    let mut load = Command::new(TENMIL);
    load.args(["perf", name]).args(more);
    load.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// What is open and mapped in a process.
fn open_resources(pid: u32) -> (usize, usize) {
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count();
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    (files, maps.lines().filter(|line| line.contains("memfd:")).count())
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::yield_now();
    }
}

#[test]
fn identify_describes_the_vfio_user_controller() {
    let (_served, name, _directory) = serve("ram:16m", "");
    let said: Value = serde_json::from_str(&run(TENMIL, &["identify", &name, "--json"])).unwrap();
    assert_eq!(said["controller"]["identify"]["sn"], "TENMIL", "{said}");
}

#[test]
fn verified_load_succeeds_with_every_doorbell_kind() {
    for poll in ["adaptive", "always"] {
        let (_served, name, _directory) = serve("ram:16m", &format!("--poll {poll}"));
        for pattern in ["randrw", "rw"] {
            let more =
                ["perf", &name, "-w", pattern, "--verify", "--overwrite", "-t", "1", "--json"];
            let said: Value = serde_json::from_str(&run(TENMIL, &more)).unwrap();
            assert!(said["iops"].as_f64().unwrap() > 0.0, "{poll} {pattern}: {said}");
        }
    }
}

/// A message is dear and has a shadow that spares it; a store into a page has none that costs more.
#[test]
fn mapped_doorbells_are_written_directly_and_others_through_shadows() {
    for (poll, is_mapped) in [("adaptive", false), ("always", true)] {
        let (_served, name, _directory) = serve("null:", &format!("--poll {poll}"));
        let more = ["perf", &name, "-q", "32", "--number-ios", "20000", "--json"];
        let said: Value = serde_json::from_str(&run(TENMIL, &more)).unwrap();
        let [rung, written] = ["doorbells_per_io", "doorbell_registers_per_io"]
            .map(|what| said[what].as_f64().unwrap());
        assert_eq!(written == rung, is_mapped, "{poll}: {written} of {rung}");
    }
}

/// Each has its own bytes, its own name, and goes on without the others.
#[test]
fn several_sockets_have_one_controller_per_device() {
    let directory = tempfile::tempdir().unwrap();
    let names =
        ["a", "b", "c"].map(|name| format!("vfio-user:{}", directory.path().join(name).display()));
    let [a, b, c] = &names;
    let served = ServeProcess::start_shell_line(&format!(
        "{TENMIL} serve ram:4m ram:8m ram:2m -l {a} -l {b} -l {c}"
    ));
    assert_eq!(served.ready.trim(), format!("ready {a} {b} {c}"));
    for (name, serial, mebibytes) in [(a, "TENMIL", 4), (b, "TENMIL2", 8), (c, "TENMIL3", 2)] {
        let said: Value =
            serde_json::from_str(&run(TENMIL, &["identify", name, "--json"])).unwrap();
        let namespaces = said["namespaces"].as_object().unwrap();
        let blocks = namespaces["1"]["identify"]["nsze"].as_u64().unwrap();
        assert_eq!((namespaces.len(), blocks), (1, mebibytes << 11), "{name}");
        assert_eq!(said["controller"]["identify"]["sn"], serial, "{name}");
    }
    // All at once, from one process; then one while another's client is killed.
    let all = ["perf", a, b, c, "-w", "randrw", "--verify", "--overwrite", "-t", "1", "--json"];
    let said: Value = serde_json::from_str(&run(TENMIL, &all)).unwrap();
    assert!(said["iops"].as_f64().unwrap() > 0.0, "{said}");
    let own = open_resources(served.pid()).1;
    let mut child = load(a, &["-t", "60", "-w", "randread"]);
    wait_until("the client loads nothing", || open_resources(served.pid()).1 >= own + 2);
    child.kill().unwrap();
    child.wait().unwrap();
    run(TENMIL, &["perf", b, "-w", "randrw", "--verify", "--overwrite", "-t", "1"]);
}

/// `copy` has its buffers in memory of its own, which is sent by message.
#[test]
fn data_is_copied_by_messages_unchanged() {
    let (_served, name, directory) = serve("ram:2m", "");
    let (from, to) = (directory.path().join("from"), directory.path().join("to"));
    let bytes: Vec<u8> = (0..(2_u64 << 20) / 8)
        .flat_map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())
        .collect();
    std::fs::write(&from, &bytes).unwrap();
    let file = |path: &std::path::Path| format!("file:{}", path.display());
    run(TENMIL, &["copy", &file(&from), &name, "--overwrite"]);
    let back = format!("{}?size=2m", file(&to));
    run(TENMIL, &["copy", &name, &back, "--overwrite"]);
    assert!(std::fs::read(&to).unwrap() == bytes);
}

/// Whose server dies is told at once, and says so.
#[test]
fn client_of_a_killed_server_ends_within_a_second_with_the_reason() {
    let (served, name, _directory) = serve("ram:16m", "");
    let own = open_resources(served.pid()).1;
    let child = load(&name, &["-t", "60", "-w", "randread"]);
    // Its queues, and its buffers.
    wait_until("the client loads nothing", || open_resources(served.pid()).1 >= own + 2);
    let begun = Instant::now();
    drop(served);
    let Output { status, stderr, .. } = child.wait_with_output().unwrap();
    let said = String::from_utf8(stderr).unwrap();
    assert!(begun.elapsed() < Duration::from_secs(1), "{:?}: {said}", begun.elapsed());
    assert_eq!(status.code(), Some(3), "{said}");
    assert!(said.contains("the server process has ended") || said.contains("path"), "{said}");
}

/// Killed in the middle of a load, several times.
#[test]
fn server_of_a_killed_client_releases_its_resources() {
    for poll in ["adaptive", "always"] {
        let (served, name, _directory) = serve("ram:16m", &format!("--poll {poll}"));
        run(TENMIL, &["identify", &name]);
        let pid = served.pid();
        let (files, own) = (|| open_resources(pid).0, || open_resources(pid).1);
        let is_idle = || own() <= 1;
        wait_until("the first client's memory stays mapped", is_idle);
        let baseline = (files(), own());
        for _ in 0..3 {
            let mut child = load(&name, &["-t", "60", "-w", "randrw", "--overwrite"]);
            wait_until("the client maps nothing", || own() > baseline.1);
            child.kill().unwrap();
            child.wait().unwrap();
            wait_until("something of a client is left", || open_resources(pid) == baseline);
        }
        let more = ["perf", &name, "-w", "randrw", "--verify", "--overwrite", "-t", "1"];
        run(TENMIL, &more);
    }
}

#[test]
fn missing_server_is_reported_with_its_category() {
    let (_served, name, directory) = serve("ram:1m", "");
    let nowhere = format!("vfio-user:{}", directory.path().join("other").display());
    for (uri, code, expected) in [
        (format!("{name}?ns=7"), 2, "no namespace 7, expected one of: 1"),
        (nowhere, 2, "tenmil serve URI --listen"),
        ("vfio-user:".to_owned(), 2, "expected vfio-user:PATH"),
    ] {
        let output = Command::new(TENMIL).args(["perf", &uri, "-t", "1"]).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains(expected), "{uri}: {said}");
        assert_eq!(output.status.code(), Some(code), "{uri}: {said}");
    }
}
