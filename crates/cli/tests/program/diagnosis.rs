//! Slow-I/O log, flight recorder and support bundle of a running server.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};

const NQN: &str = "nqn.2026-01.org.tenmil:disk";

/// A target in a directory of its own. Dropping it ends it.
struct Target {
    child: std::process::Child,
    root: tempfile::TempDir,
    /// Of the listener; 0 without one of TCP.
    port: u16,
}

impl Target {
    fn start(words: &[&str]) -> Self {
        let root = tempfile::tempdir().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_tenmil"));
        command.args(["serve", "--json"]).args(words).env("XDG_RUNTIME_DIR", root.path());
        command.env("TENMIL_KEYRING", root.path().join("keys")).current_dir(root.path());
        let log = fs::File::create(root.path().join("log")).unwrap();
        let mut child = command.stdout(Stdio::piped()).stderr(log).spawn().unwrap();
        let mut ready = String::new();
        let stdout = child.stdout.as_mut().unwrap();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(stdout), &mut ready).unwrap();
        let ready: Value = serde_json::from_str(&ready).unwrap();
        let listen = ready["listen"][0].as_str().unwrap();
        let port = listen.rsplit(':').next().unwrap().parse().unwrap_or_default();
        Self { child, root, port }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.root.path().join("log")).unwrap()
    }

    fn run(&self, words: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tenmil"));
        command.args(words).env("XDG_RUNTIME_DIR", self.root.path());
        command.current_dir(self.root.path()).output().unwrap()
    }

    fn json(&self, words: &[&str]) -> Value {
        let output = self.run(&[words, &["--json"]].concat());
        assert!(output.status.success(), "{words:?}: {output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Reads from the device for a moment.
    fn load(&self) {
        let uri = format!("tcp://127.0.0.1:{}/{NQN}/1", self.port);
        let output = self.run(&["perf", &uri, "-t", "0.3", "-a", "0.1", "-q", "1"]);
        assert!(output.status.success(), "{output:?}");
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Milliseconds before `unit` that follow `word` in a line.
fn milliseconds_after(line: &str, word: &str) -> f64 {
    let rest = line.split_once(word).unwrap_or_else(|| panic!("{word}: {line}")).1;
    rest.split_once(" ms").unwrap().0.trim().parse().unwrap()
}

#[test]
fn slow_commands_are_logged_with_stages_that_add_up() {
    let device = "delay:[ram:8m]?read=20ms&write=20ms";
    let target = Target::start(&[device, "-l", "tcp://127.0.0.1:0", "--slow-io", "10ms"]);
    target.load();
    let log = target.log();
    let line = log.lines().find(|line| line.contains("slow I/O: Read")).expect(&log);
    assert!(line.contains(NQN) && line.contains(", success"), "{line}");
    let total = milliseconds_after(line, "bytes: ");
    let stages =
        ["wait ", "queue ", "device ", "send "].map(|stage| milliseconds_after(line, stage));
    assert!(stages[2] >= 19.9, "the device takes 20 ms: {line}");
    assert!((total - stages.iter().sum::<f64>()).abs() < 0.01, "{line}");
    let rows = target.json(&["get", "slow_io"]);
    assert_eq!(rows[0]["threshold_ns"], 10_000_000, "{rows}");
    let slow = rows[0]["slow"].as_u64().unwrap();
    assert!(slow > 0, "{rows}");
    let rows = target.json(&["set", "slow_io", "threshold=off"]);
    assert_eq!(rows[0]["threshold_ns"], Value::Null, "{rows}");
    target.load();
    assert_eq!(target.json(&["get", "slow_io"])[0]["slow"], slow, "it was switched off");
    let refused = target.run(&["set", "slow_io", "threshold=soon"]);
    let text = String::from_utf8(refused.stderr).unwrap();
    assert!(text.contains("'soon'") || text.contains("`soon`"), "{text}");
}

#[test]
fn slow_requests_of_a_vfio_user_client_are_logged_by_namespace() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("nvme");
    let listen = format!("vfio-user:{}", socket.display());
    let delayed = "delay:[ram:8m]?read=20ms&write=20ms";
    let target = Target::start(&["ram:8m", delayed, "-l", &listen, "--slow-io", "10ms"]);
    let load = |namespace: u32| {
        let uri = format!("{listen}?ns={namespace}");
        let done = target.run(&["perf", &uri, "-t", "0.3", "-a", "0.1", "-q", "1"]);
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    };
    (1..3).for_each(load);
    let log = target.log();
    let line = log.lines().find(|line| line.contains("slow I/O: read")).expect(&log);
    assert!(line.contains(&format!("of {listen} namespace 2, block ")), "{line}");
    assert!(line.contains(", success") && !log.contains("namespace 1"), "{log}");
    assert!(milliseconds_after(line, "device ") >= 19.9, "{line}");
    let rows = target.json(&["get", "slow_io"]);
    let thresholds = [0, 1].map(|row| (&rows[row]["namespace"], &rows[row]["threshold_ns"]));
    let expected = json!(10_000_000);
    assert_eq!(thresholds, [(&json!(1), &expected), (&json!(2), &expected)]);
    let slow = rows[0]["slow"].as_u64().unwrap();
    assert!(slow > 0, "{rows}");
    let rows = target.json(&["set", "slow_io", "threshold=off", "namespace=2"]);
    assert_eq!((&rows[0]["threshold_ns"], &rows[1]["threshold_ns"]), (&expected, &Value::Null));
    load(2);
    assert_eq!(target.json(&["get", "slow_io"])[0]["slow"], slow, "it was switched off");
    let refused = target.run(&["set", "slow_io", "threshold=1s", "namespace=3"]);
    let text = String::from_utf8(refused.stderr).unwrap();
    assert!(text.contains("`namespace` is 3, expected 1 to 2"), "{text}");
}

#[test]
fn support_bundle_has_what_a_report_needs() {
    let target = Target::start(&["delay:[ram:8m]?read=11us", "-l", "tcp://127.0.0.1:0"]);
    target.load();
    let recorded = target.json(&["get", "flight_recorder"]);
    let kinds: Vec<&str> =
        recorded.as_array().unwrap().iter().filter_map(|row| row["kind"].as_str()).collect();
    for kind in ["thread-started", "connection-accepted", "queue-connected", "connection-ended"] {
        assert!(kinds.contains(&kind), "{kind}: {kinds:?}");
    }
    let output = target.run(&["support-bundle", "-o", "a.tar", "-t", "0.2", "--log-file", "log"]);
    assert!(output.status.success(), "{output:?}");
    let listed =
        Command::new("tar").args(["-tf", "a.tar"]).current_dir(target.root.path()).output();
    let names = String::from_utf8(listed.unwrap().stdout).unwrap();
    let expected = [
        "manifest.txt",
        "events.jsonl",
        "methods/configuration.json",
        "methods/flight_recorder.json",
        "methods/io_statistics.json",
        "methods/process.json",
        "process/limits",
        "system/meminfo",
        "log/end.log",
    ];
    for name in expected {
        assert!(
            names.lines().any(|line| line == format!("tenmil-support/{name}")),
            "{name}: {names}"
        );
    }
    let bytes = fs::read(target.root.path().join("a.tar")).unwrap();
    assert!(!contains(&bytes, b"read=11us"), "options of URIs are removed");
    let again = target.run(&["support-bundle", "-o", "a.tar", "-t", "0"]);
    assert_eq!(again.status.code(), Some(2), "it replaces no file: {again:?}");
}

#[test]
fn support_bundle_contains_no_key() {
    let root = tempfile::tempdir().unwrap();
    let key = |kind: &str, name: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tenmil"));
        command
            .args(["key", "generate", kind, name])
            .env("TENMIL_KEYRING", root.path().join("keys"));
        assert!(command.status().unwrap().success());
        fs::read_to_string(root.path().join("keys").join(name)).unwrap().trim().to_owned()
    };
    let secrets = [key("dhchap", "host"), key("dhchap", "controller"), key("psk", "tls")];
    let config = format!(
        "keyring = {:?}\nbuffer-memory = \"16m\"\n[[listener]]\naddress = \"127.0.0.1:0\"\n[[subsystem]]\nnqn = \
         \"{NQN}\"\nauthentication = \"required\"\nallowed-hosts = [{{ nqn = \
         \"nqn.2014-08.org.example:client\", dhchap = [\"host\"], dhchap-controller = \"controller\" }}]\n\
         [[subsystem.namespace]]\nuri = \"ram:1m\"\n",
        root.path().join("keys"),
    );
    let file = root.path().join("target.toml");
    fs::write(&file, config).unwrap();
    let target = Target::start(&["--config", file.to_str().unwrap()]);
    // A log of another program may have a key.
    let log = target.root.path().join("other.log");
    fs::write(&log, format!("nvme connect --dhchap-secret={} done\n", secrets[0])).unwrap();
    let words = ["support-bundle", "-o", "a.tar", "-t", "0.2", "--log-file", "other.log"];
    let output = target.run(&words);
    assert!(output.status.success(), "{output:?}");
    let bytes = fs::read(target.root.path().join("a.tar")).unwrap();
    assert!(contains(&bytes, b"--dhchap-secret=[key removed] done"));
    for secret in &secrets {
        let encoded = secret.split(':').nth(2).unwrap();
        for part in [&secret[..], encoded, &encoded[..24]] {
            assert!(!contains(&bytes, part.as_bytes()), "a key is in the bundle");
        }
    }
}

#[test]
fn support_bundle_without_a_process_has_the_machine() {
    let root = tempfile::tempdir().unwrap();
    let run = root.path().join("tenmil");
    let mut builder = fs::DirBuilder::new();
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700).create(&run).unwrap();
    fs::write(run.join("flight-recorder-77-1.txt"), "reactor 0 panicked\n").unwrap();
    let bundle = |path: &Path| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tenmil"));
        command.args(["support-bundle", "--no-process", "-o"]).arg(path);
        command.env("XDG_RUNTIME_DIR", root.path()).output().unwrap()
    };
    let output = bundle(&root.path().join("b.tar"));
    assert!(output.status.success(), "{output:?}");
    let bytes = fs::read(root.path().join("b.tar")).unwrap();
    for part in ["flight-recorder/flight-recorder-77-1.txt", "reactor 0 panicked", "system/version"]
    {
        assert!(contains(&bytes, part.as_bytes()), "{part}");
    }
    let refused = bundle(&root.path().join("b.tar.gz"));
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

/// Set for the process that panics.
const PANICS: &str = "TENMIL_TEST_PANICS";

#[test]
fn panic_leaves_a_file_with_what_happened_before() {
    let root = tempfile::tempdir().unwrap();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "diagnosis::poller_panics_in_a_process_of_its_own", "--nocapture"]);
    command.env("XDG_RUNTIME_DIR", root.path()).env(PANICS, "yes");
    let output = command.output().unwrap();
    let log = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{log}");
    let files: Vec<_> = fs::read_dir(root.path().join("tenmil")).unwrap().flatten().collect();
    let [file] = &files[..] else { panic!("{files:?}: {log}") };
    let name = file.file_name().into_string().unwrap();
    assert!(name.starts_with("flight-recorder-") && log.contains(&name), "{name}: {log}");
    let text = fs::read_to_string(file.path()).unwrap();
    assert!(text.contains("on purpose") && text.contains(" panicked: "), "{text}");
    assert!(text.contains("thread-started: thread 0 'doomed thread' on reactor 0"), "{text}");
}

/// Run by the test above.
#[test]
fn poller_panics_in_a_process_of_its_own() {
    use tenmil_reactor::{Context, PollResult, PollerBuilder, PollerWake};
    if std::env::var_os(PANICS).is_none() {
        return;
    }
    tenmil_cli::commands::install_panic_logging();
    let cores = tenmil_linux::CpuList::allowed_cpus().iter().take(1).collect();
    let options = tenmil_reactor::ReactorOptions::default();
    let clock = tenmil_linux::Clock::start();
    let reactors = tenmil_reactor::Reactors::start_on_cores(&cores, &options, &clock).unwrap();
    let (told, tells) = std::sync::mpsc::channel();
    let doomed = |_: &mut Context<'_>| -> PollResult { panic!("on purpose") };
    let doomed = PollerBuilder::polled_each_iteration("doomed", PollerWake::Messages, doomed);
    let doomed = doomed.on_panic(move |_, panicked| drop(told.send(panicked)));
    let plan = tenmil_reactor::ThreadBuilder::new("doomed thread").add_poller(doomed);
    reactors.spawn(plan).unwrap();
    tells.recv_timeout(std::time::Duration::from_secs(60)).unwrap();
    reactors.stop();
}
