//! The log of a process that serves: standard error that cannot be written, that is not read, peers
//! that cause many lines, and what it reports of pools and mirrors.

use std::io::{BufRead, BufReader, PipeReader, PipeWriter, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// A process that serves memory over NVMe/TCP.
struct LoggingTarget {
    child: Child,
    address: String,
    root: tempfile::TempDir,
}

impl LoggingTarget {
    fn start(error: Stdio) -> Self {
        Self::start_with_uri(tempfile::tempdir().unwrap(), "ram:1m", error)
    }

    fn start_with_uri(root: tempfile::TempDir, uri: &str, error: Stdio) -> Self {
        Self::start_with_options(root, uri, error, &[])
    }

    fn start_with_options(
        root: tempfile::TempDir,
        uri: &str,
        error: Stdio,
        options: &[&str],
    ) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tenmil"));
        command.args(["serve", uri, "--listen", "tcp://127.0.0.1:0"]).args(options);
        command.env("XDG_RUNTIME_DIR", root.path()).stdout(Stdio::piped()).stderr(error);
        let mut child = command.spawn().unwrap();
        let mut ready = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut ready).unwrap();
        let address = ready.trim().strip_prefix("ready tcp://").expect(&ready).to_owned();
        Self { child, address, root }
    }

    /// A Connect command for a subsystem that is not there. Its refusal is a line of the log.
    #[expect(clippy::disallowed_methods, reason = "a test is a client")]
    fn send_rejected_connect(&self) {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut bytes = vec![0; 128 + 72 + 1024];
        // ICReq: 128 bytes (NVMe/TCP 1.1 §3.6.2.2).
        bytes[2] = 128;
        bytes[4] = 128;
        // A command capsule with 1024 bytes of data in it, the Connect command (Base 2.1 §6.3).
        let capsule = &mut bytes[128..];
        capsule[..8].copy_from_slice(&[4, 0, 72, 72, 72, 4, 0, 0]);
        capsule[8] = 0x7f;
        capsule[9] = 0x40;
        capsule[12] = 1;
        capsule[8 + 32..8 + 36].copy_from_slice(&1024_u32.to_le_bytes());
        capsule[8 + 39] = 1;
        capsule[8 + 44] = 31;
        let data = &mut capsule[72..];
        data[..16].fill(7);
        data[16..18].fill(0xff);
        let subsystem = format!("nqn.2024-01.example:{}", "a".repeat(180));
        data[256..256 + subsystem.len()].copy_from_slice(subsystem.as_bytes());
        let host = b"nqn.2024-01.example:host";
        data[512..512 + host.len()].copy_from_slice(host);
        stream.write_all(&bytes).unwrap();
        // ICResp and the response.
        stream.read_exact(&mut [0; 128 + 24]).unwrap();
    }

    fn log_line_count(&self, name: &str) -> u64 {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tenmil"));
        command.args(["get", "process", "--json"]).env("XDG_RUNTIME_DIR", self.root.path());
        let output = command.output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let (_, after) = text.split_once(&format!("\"{name}\":")).expect(&text);
        let digits = after.trim_start().chars().take_while(char::is_ascii_digit);
        digits.collect::<String>().parse().expect(&text)
    }

    fn stop(mut self) -> Option<i32> {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        wait_for_exit_code(&mut self.child)
    }
}

/// Exit code of a process. One that does not end within 6 s is killed, and has none.
fn wait_for_exit_code(child: &mut Child) -> Option<i32> {
    let pid = child.id();
    let last = format!(
        "for _ in $(seq 60); do kill -0 {pid} 2>&- || exit 0; sleep 0.1; done; kill -KILL {pid}"
    );
    let mut last = Command::new("sh").args(["-c", &last]).spawn().unwrap();
    let code = child.wait().unwrap().code();
    last.wait().unwrap();
    code
}

/// A pipe that is full already (pipe(7): 64 KiB): the first line is not written, however few follow.
fn full_pipe() -> (PipeReader, PipeWriter) {
    let (reader, mut writer) = std::io::pipe().unwrap();
    writer.write_all(&[b'-'; 64 << 10]).unwrap();
    (reader, writer)
}

impl Drop for LoggingTarget {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits for what the process does by itself, within its own 50 ms intervals.
fn await_condition(mut is_so: impl FnMut() -> bool) {
    for _ in 0..400 {
        if is_so() {
            return;
        }
        std::thread::park_timeout(Duration::from_millis(50));
    }
    panic!("it did not happen in 20 s");
}

#[test]
fn unwritable_stderr_loses_lines_and_not_the_process() {
    let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let target = LoggingTarget::start(full.into());
    target.send_rejected_connect();
    await_condition(|| target.log_line_count("log_lines_dropped") > 0);
    target.send_rejected_connect();
    assert_eq!(target.stop(), Some(0));
}

#[test]
fn unread_stderr_blocks_neither_service_nor_stop() {
    let (_reader, writer) = full_pipe();
    let target = LoggingTarget::start(writer.into());
    for _ in 0..500 {
        target.send_rejected_connect();
    }
    target.send_rejected_connect();
    assert_eq!(target.stop(), Some(0));
}

#[test]
fn final_error_does_not_wait_for_a_reader_of_stderr() {
    let (_reader, writer) = full_pipe();
    let mut command = Command::new(env!("CARGO_BIN_EXE_tenmil"));
    command.args(["serve", "file:/nonexistent/disk", "--listen", "tcp://127.0.0.1:0"]);
    let mut child = command.stdout(Stdio::null()).stderr(writer).spawn().unwrap();
    assert_eq!(wait_for_exit_code(&mut child), Some(2));
}

/// Runs one test of this file, which is ignored otherwise, as a process of its own.
fn run_alone(test: &str, errors: Stdio) -> Child {
    let test = format!("{}::{test}", module_path!().rsplit("::").next().unwrap());
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--ignored", "--exact", "--nocapture", &test]);
    command.stdout(Stdio::null()).stderr(errors).env_remove("RUST_BACKTRACE").spawn().unwrap()
}

#[test]
#[ignore = "a process of its own, started by the tests below"]
#[expect(clippy::exit, reason = "it is a program")]
fn child_with_panicking_thread() {
    tenmil_cli::commands::install_panic_logging();
    let panics = std::thread::Builder::new().name("victim".into()).spawn(|| panic!("on\tpurpose"));
    assert!(panics.unwrap().join().is_err());
    std::process::exit(7);
}

#[test]
fn panic_does_not_block_while_stderr_is_not_read() {
    let (_reader, writer) = full_pipe();
    let mut child = run_alone("child_with_panicking_thread", writer.into());
    assert_eq!(wait_for_exit_code(&mut child), Some(7));
}

#[test]
fn panic_is_one_line_with_thread_location_and_message() {
    let mut child = run_alone("child_with_panicking_thread", Stdio::piped());
    let mut text = String::new();
    child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(wait_for_exit_code(&mut child), Some(7));
    let line = concat!("error: thread victim panicked at ", file!(), ":");
    assert!(text.contains(line) && text.contains(": on\\u{9}purpose\n"), "{text}");
}

#[test]
fn refusals_of_one_peer_are_rate_limited_and_counted() {
    let errors = tempfile::NamedTempFile::new().unwrap();
    let target = LoggingTarget::start(errors.reopen().unwrap().into());
    for _ in 0..300 {
        target.send_rejected_connect();
    }
    let text = || std::fs::read_to_string(errors.path()).unwrap();
    // One of the next interval tells how many there were before.
    await_condition(|| {
        target.send_rejected_connect();
        text().contains(" rejections before are not reported)")
    });
    assert_eq!(target.stop(), Some(0));
    assert!(text().lines().count() < 100, "{}", text());
}

/// A command that succeeds.
fn run_successfully(words: &[&str]) {
    let output = Command::new(env!("CARGO_BIN_EXE_tenmil")).args(words).output().unwrap();
    assert!(output.status.success(), "{words:?}: {output:?}");
}

/// A directory, the URIs of two files in it, and a file for what a server reports.
fn directory_with_two_file_uris() -> (tempfile::TempDir, [String; 2], tempfile::NamedTempFile) {
    let root = tempfile::tempdir().unwrap();
    let files = ["a", "b"].map(|name| format!("file:{}", root.path().join(name).display()));
    (root, files, tempfile::NamedTempFile::new().unwrap())
}

#[test]
fn mirror_that_starts_without_a_leg_is_reported() {
    let (root, [a, b], errors) = directory_with_two_file_uris();
    run_successfully(&["mirror", "create", &format!("{a}?size=8m"), &format!("{b}?size=8m")]);
    std::fs::remove_file(root.path().join("b")).unwrap();
    let uri = format!("mirror:[{a}],[{b}]?degraded=yes");
    let target = LoggingTarget::start_with_uri(root, &uri, errors.reopen().unwrap().into());
    await_condition(|| {
        let text = std::fs::read_to_string(errors.path()).unwrap();
        text.lines().any(|line| line.contains("leg 1 (") && line.contains("in sync, degraded"))
    });
    assert_eq!(target.stop(), Some(0));
}

#[test]
#[expect(clippy::disallowed_methods, reason = "it makes the file that is copied")]
fn stopped_pool_is_reported_in_the_log_and_by_an_event() {
    let (root, [pool, data], errors) = directory_with_two_file_uris();
    run_successfully(&["pool", "create", &format!("{pool}?size=16m")]);
    run_successfully(&["volume", "create", &format!("volume:[{pool}]/v"), "--size", "1m"]);
    std::fs::write(root.path().join("b"), [7; 1 << 20]).unwrap();
    // Opening it flushes less often.
    let uri = format!("volume:[fault:[{pool}]?rule=error:flush+8]/v");
    let target = LoggingTarget::start_with_uri(root, &uri, errors.reopen().unwrap().into());
    let events = tempfile::NamedTempFile::new().unwrap();
    let mut follower = Command::new(env!("CARGO_BIN_EXE_tenmil"))
        .args(["events", "--json", "--time", "60"])
        .env("XDG_RUNTIME_DIR", target.root.path())
        .stdout(events.reopen().unwrap())
        .spawn()
        .unwrap();
    let served = format!("tcp://{}/nqn.2026-01.org.tenmil:disk", target.address);
    let said = |file: &tempfile::NamedTempFile, text: &str| {
        std::fs::read_to_string(file.path()).unwrap().contains(text)
    };
    await_condition(|| {
        // Each copy ends with a flush, which fails sooner or later.
        let mut copy = Command::new(env!("CARGO_BIN_EXE_tenmil"));
        copy.args(["copy", &data, &served, "--overwrite"]).output().unwrap();
        said(&errors, "takes no changes any more") && said(&events, "pool-stopped")
    });
    follower.kill().unwrap();
    follower.wait().unwrap();
    target.stop();
}

/// Serves memory, lets a host write to it, and returns what was logged.
fn log_of_a_connection(options: &[&str]) -> String {
    let errors = tempfile::NamedTempFile::new().unwrap();
    let root = tempfile::tempdir().unwrap();
    let error = errors.reopen().unwrap().into();
    let target = LoggingTarget::start_with_options(root, "ram:1m", error, options);
    let uri = format!(
        "tcp://{}/nqn.2026-01.org.tenmil:disk/1?hostnqn=nqn.2026-01.example:db",
        target.address
    );
    run_successfully(&["perf", &uri, "-w", "randwrite", "--overwrite", "-t", "0.1"]);
    target.send_rejected_connect();
    assert_eq!(target.stop(), Some(0));
    std::fs::read_to_string(errors.path()).unwrap()
}

#[test]
fn json_log_has_connects_refusals_and_disconnects_with_their_values() {
    let text = log_of_a_connection(&["--log-format", "json"]);
    let records: Vec<serde_json::Value> =
        text.lines().map(|line| serde_json::from_str(line).expect(line)).collect();
    for record in &records {
        let time = record["time"].as_str().unwrap();
        assert!(time.starts_with("20") && time.ends_with('Z') && time.len() == 27, "{time}");
        assert!(record["module"].as_str().unwrap().starts_with("tenmil_"), "{record}");
    }
    let found = |event: &str| records.iter().find(|record| record["event"] == event).expect(&text);
    let connect = found("connect");
    assert_eq!((&connect["level"], &connect["protocol"]), (&"info".into(), &"nvme-tcp".into()));
    assert_eq!(connect["host"], "nqn.2026-01.example:db");
    assert_eq!(connect["subsystem"], "nqn.2026-01.org.tenmil:disk");
    assert!(connect["peer"].as_str().unwrap().starts_with("127.0.0.1:"));
    let disconnect = found("disconnect");
    assert_eq!(disconnect["connection"], connect["connection"]);
    assert_eq!(disconnect["controller"], connect["controller"]);
    assert!(disconnect["duration_s"].as_f64().unwrap() > 0.1, "{disconnect}");
    let writes = disconnect["writes"].as_u64().unwrap();
    assert!(writes > 0 && disconnect["written_bytes"] == 4096 * writes, "{disconnect}");
    assert_eq!((&disconnect["reads"], &disconnect["errors"]), (&0.into(), &0.into()));
    let refuse = found("refuse");
    assert_eq!(
        (&refuse["level"], &refuse["reason"]),
        (&"warn".into(), &"no-such-subsystem".into())
    );
    assert!(!text.contains("\"accept\""), "details are not logged without being asked for");
}

#[test]
fn text_log_of_a_server_has_times_and_complete_sentences() {
    let text = log_of_a_connection(&["--log-format", "text"]);
    let line = |what: &str| text.lines().find(|line| line.contains(what)).expect(&text).to_owned();
    let connect = line(" created controller ");
    let (time, rest) = connect.split_once(' ').unwrap();
    assert!(time.starts_with("20") && time.ends_with('Z'), "{connect}");
    assert!(rest.starts_with("note: connection ") && rest.ends_with(" as nqn.2026-01.example:db"));
    assert!(line(" disconnected controller ").contains(" writes of "), "{text}");
    assert!(line(" is rejected: ").contains("warning: "), "{text}");
}

#[test]
fn log_filter_selects_levels_and_modules() {
    assert_eq!(log_of_a_connection(&["--log", "off"]), "");
    let text = log_of_a_connection(&["--log", "error,cli::commands::serve::event_log=debug"]);
    assert!(
        text.contains(" debug: connection ") && text.contains(" created controller "),
        "{text}"
    );
    assert!(!text.contains("sandbox:"), "{text}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_tenmil"));
    let output = command.args(["list", "--log", "loud"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(errors.contains("`loud` is no level, expected off, error, warn"), "{errors}");
    let mut command = Command::new(env!("CARGO_BIN_EXE_tenmil"));
    let output = command.arg("list").env("TENMIL_LOG", "loud").output().unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(errors.starts_with("error: $TENMIL_LOG: `loud` is no level"), "{errors}");
}

#[test]
fn final_error_is_a_record_in_json() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tenmil"));
    command.args(["serve", "file:/nonexistent/disk", "-l", "tcp://127.0.0.1:0"]);
    let output = command.args(["--log-format", "json"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8(output.stderr).unwrap();
    let last: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).expect(&text);
    assert_eq!((&last["level"], &last["event"]), (&"error".into(), &"exit".into()));
    assert!(last["message"].as_str().unwrap().contains("/nonexistent/disk"), "{last}");
}
