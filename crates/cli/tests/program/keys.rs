//! Keys as a user handles them, and that a secret is found nowhere but in its file: neither in output,
//! events, `ps` and `/proc`, nor in a core dump of the target that has it loaded.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;
use tenmil_linux::pty::PseudoTerminal;

const HOST: &str = "nqn.2014-08.org.example:client";
const SUBSYSTEM: &str = "nqn.2026-01.org.example:disks";

/// Directories of a test, and commands with its keyring.
struct Fixture {
    root: tempfile::TempDir,
}

/// All forms in which a secret could be written.
struct Secret {
    name: String,
    forms: Vec<Vec<u8>>,
}

impl Fixture {
    fn new() -> Self {
        Self { root: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tenmil"));
        command.args(words).env("TENMIL_KEYRING", self.path("keys"));
        command.env("XDG_RUNTIME_DIR", self.root.path()).current_dir(self.root.path());
        command
    }

    fn run(&self, words: &[&str]) -> Output {
        self.command(words).stdin(Stdio::null()).output().unwrap()
    }

    fn stdout_of_success(&self, words: &[&str]) -> String {
        let output = self.run(words);
        assert!(output.status.success(), "{words:?}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Generates a key and returns its secret.
    fn generate(&self, kind: &str, name: &str) -> Secret {
        self.stdout_of_success(&["key", "generate", kind, name, "--force"]);
        let text = fs::read_to_string(self.path("keys").join(name)).unwrap();
        Secret::of_text(name, text.trim())
    }

    /// Writes the configuration of a target whose host has these keys.
    fn configure(&self, dhchap: &[&str], psk: &[&str]) {
        let list = |names: &[&str]| format!("{names:?}");
        let tls = if psk.is_empty() { "off" } else { "allowed" };
        let psk = if psk.is_empty() { String::new() } else { format!(", psk = {}", list(psk)) };
        let text = format!(
            "keyring = {:?}\nbuffer-memory = \"16m\"\n[[listener]]\naddress = \"127.0.0.1:0\"\ntls = \
             \"{tls}\"\n[discovery]\nauthentication = \"required\"\n[[subsystem]]\nnqn = \"{SUBSYSTEM}\"\n\
             authentication = \"required\"\nallowed-hosts = [{{ nqn = \"{HOST}\", dhchap = {}, \
             dhchap-controller = \"controller\"{psk} }}]\n[[subsystem.namespace]]\nuri = \"ram:1m\"\n",
            self.path("keys"),
            list(dhchap),
        );
        fs::write(self.path("target.toml"), text).unwrap();
    }

    /// Starts a target on the configuration, which may leave a core dump in the directory.
    fn serve(&self) -> Target {
        let mut command = Command::new("sh");
        let line = format!(
            "ulimit -c unlimited; exec '{}' serve --config target.toml --json",
            env!("CARGO_BIN_EXE_tenmil")
        );
        command.args(["-c", &line]).current_dir(self.root.path());
        command.env("XDG_RUNTIME_DIR", self.root.path()).stdout(Stdio::piped());
        command.stderr(File::create(self.path("log")).unwrap());
        let mut child = command.spawn().unwrap();
        let mut ready = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut ready).unwrap();
        let log = || fs::read_to_string(self.path("log")).unwrap();
        assert!(ready.contains("\"ready\":true"), "{ready}{}", log());
        Target { child, ready }
    }
}

impl Secret {
    fn of_text(name: &str, text: &str) -> Self {
        let encoded = text.split(':').nth(2).unwrap();
        let raw = decode_base64(encoded);
        // Without the CRC.
        let raw = raw[..raw.len() - 4].to_vec();
        let hex: String = raw.iter().map(|byte| format!("{byte:02x}")).collect();
        let list = format!("{raw:?}");
        let list = list.trim_matches(['[', ']']).to_owned();
        // A part of the secret is a leak as well: the first 24 characters and the last 16 bytes.
        let part = raw[raw.len() - 16..].to_vec();
        let forms = [encoded[..24].into(), hex[..24].into(), list[..32].into(), raw, part];
        Self { name: name.to_owned(), forms: forms.to_vec() }
    }

    fn assert_absent_from(&self, place: &str, bytes: &[u8]) {
        for (at, form) in self.forms.iter().enumerate() {
            assert!(!contains(bytes, form), "form {at} of `{}` is in {place}", self.name);
        }
    }
}

/// A running target. Dropping it ends it.
struct Target {
    child: Child,
    ready: String,
}

impl Target {
    /// Address at which it listens.
    fn address(&self) -> String {
        let ready: Value = serde_json::from_str(&self.ready).unwrap();
        ready["listen"][0].as_str().unwrap().to_owned()
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    // The first byte is searched with the vectorized search of the standard library.
    let mut rest = bytes;
    while let Some(at) = rest.iter().position(|byte| *byte == part[0]) {
        if rest[at..].starts_with(part) {
            return true;
        }
        rest = &rest[at + 1..];
    }
    false
}

fn decode_base64(text: &str) -> Vec<u8> {
    const ALPHABET: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let (mut bits, mut count, mut bytes) = (0_u32, 0, Vec::new());
    for letter in text.bytes().filter(|letter| *letter != b'=') {
        let digit = ALPHABET.iter().position(|known| *known == letter).unwrap();
        bits = bits << 6 | u32::try_from(digit).unwrap();
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push(u8::try_from(bits >> count & 0xff).unwrap());
        }
    }
    bytes
}

#[test]
fn key_travels_through_pipes_and_files_and_never_through_an_argument() {
    let fixture = Fixture::new();
    let secret = fixture.generate("dhchap", "a");
    let exported = fixture.stdout_of_success(&["key", "export", "a"]);
    // From the standard input of the other end.
    let mut import = fixture.command(&["key", "import", "b"]);
    let mut import = import.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    import.stdin.take().unwrap().write_all(exported.as_bytes()).unwrap();
    let imported = import.wait_with_output().unwrap();
    assert!(imported.status.success());
    secret.assert_absent_from("the output of import", &imported.stdout);
    assert_eq!(fixture.stdout_of_success(&["key", "export", "b"]), exported);
    for words in [
        &["key", "import", "c", exported.trim()][..],
        &["perf", &format!("tcp://127.0.0.1/{SUBSYSTEM}/1?dhchap={}", exported.trim())],
        &["serve", "ram:1m", "--dhchap", exported.trim()],
        &["get", exported.trim()],
    ] {
        let output = fixture.run(words);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("holds a key") && said.contains("tenmil key import NAME"), "{said}");
        secret.assert_absent_from("the error", &[output.stdout, output.stderr].concat());
    }
    for words in [&["key", "list"][..], &["key", "list", "--json"], &["key", "remove", "b"]] {
        let output = fixture.run(words);
        secret.assert_absent_from("the output", &[output.stdout, output.stderr].concat());
    }
}

#[test]
fn export_to_a_terminal_and_import_from_one_are_refused() {
    let fixture = Fixture::new();
    let secret = fixture.generate("psk", "a");
    let terminal = PseudoTerminal::open(100, 30).unwrap();
    let theirs = || Stdio::from(terminal.slave.try_clone().unwrap());
    let mut export = fixture.command(&["key", "export", "a"]);
    let export = export.stdout(theirs()).stderr(Stdio::piped()).spawn().unwrap();
    let export = export.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&export.stderr).into_owned();
    assert!(said.contains("standard output is a terminal") && said.contains("--show"), "{said}");
    assert_eq!(export.status.code(), Some(2));
    secret.assert_absent_from("the error", &export.stderr);
    let import = fixture.command(&["key", "import", "b"]).stdin(theirs()).output().unwrap();
    let said = String::from_utf8_lossy(&import.stderr).into_owned();
    assert!(said.contains("which would show the key"), "{said}");
}

#[test]
fn secrets_of_a_target_are_in_no_output_process_list_event_or_core_dump() {
    let fixture = Fixture::new();
    let mut secrets = Vec::new();
    let (mut dhchap, mut psk) = (vec![], vec![]);
    for name in ["host-0", "host-1"] {
        secrets.push(fixture.generate("dhchap", name));
        dhchap.push(name);
    }
    secrets.push(fixture.generate("dhchap", "controller"));
    if tenmil_serve::HAS_TLS {
        secrets.push(fixture.generate("psk", "tls-0"));
        psk.push("tls-0");
    }
    fixture.configure(&dhchap, &psk);
    let mut target = fixture.serve();
    let events = fixture.command(&["events", "--json"]).stdout(Stdio::piped()).spawn().unwrap();
    // Old and new key are rotated while the target runs.
    secrets.push(fixture.generate("dhchap", "host-0"));
    let reloaded = fixture.run(&["set", "configuration", "reload=true", "--json"]);
    let text = String::from_utf8_lossy(&reloaded.stdout).into_owned();
    assert!(
        text.contains(&format!("changes keys, requirements or rights of {SUBSYSTEM}")),
        "{text}"
    );
    // A key that is gone: nothing changes, and the error names it.
    fixture.configure(&["host-0", "gone"], &psk);
    let refused = fixture.run(&["set", "configuration", "reload=true"]);
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(text.contains("line 11, `dhchap`: key `gone`: keyring"), "{text}");
    assert!(text.contains("tenmil key import gone"), "{text}");
    let mut outputs = vec![("answer to reload", reloaded), ("refused reload", refused)];
    for words in [
        &["get", "hosts", "--json"][..],
        &["get", "hosts"],
        &["get", "nvme_connections", "--json"],
        &["get", "process", "--json"],
        &["get", "schema", "--json"],
        &["get", "mirrors", "--json"],
    ] {
        outputs.push((words[1], fixture.run(words)));
    }
    let hosts: Value = serde_json::from_slice(&outputs[2].1.stdout).unwrap();
    let row = hosts.as_array().unwrap().iter().find(|row| row["subsystem"] == SUBSYSTEM).unwrap();
    assert_eq!(row["dhchap"], serde_json::json!(["host-0", "host-1"]), "{hosts}");
    assert_eq!(row["dhchap_controller"], "controller");
    let listing = Command::new("ps").args(["axww", "-o", "args"]).output();
    outputs.extend(listing.ok().map(|listing| ("ps", listing)));
    let process = PathBuf::from(format!("/proc/{}", target.child.id()));
    let read = |name: &str| fs::read(process.join(name)).unwrap();
    let (arguments, environment) = (read("cmdline"), read("environ"));
    // The process itself, with all of its memory that a dump contains.
    let core = core_dump(&fixture, &mut target);
    let mut events = events;
    let _ = events.kill();
    let events = events.wait_with_output().unwrap().stdout;
    assert!(contains(&events, b"configuration-applied"), "{}", String::from_utf8_lossy(&events));
    let log = fs::read(fixture.path("log")).unwrap();
    assert!(contains(&log, b"nothing is changed: "), "{}", String::from_utf8_lossy(&log));
    if let Some(core) = &core {
        // It is one of this process, with its heap.
        assert!(contains(core, SUBSYSTEM.as_bytes()) && contains(core, HOST.as_bytes()));
    }
    for secret in &secrets {
        for (place, output) in &outputs {
            secret.assert_absent_from(place, &output.stdout);
            secret.assert_absent_from(place, &output.stderr);
        }
        secret.assert_absent_from("the ready message", target.ready.as_bytes());
        secret.assert_absent_from("/proc/PID/cmdline", &arguments);
        secret.assert_absent_from("/proc/PID/environ", &environment);
        secret.assert_absent_from("events", &events);
        secret.assert_absent_from("the log", &log);
        if let Some(core) = &core {
            secret.assert_absent_from("the core dump", core);
        }
    }
}

#[test]
fn keys_are_rotated_while_a_host_reads_and_writes() {
    let fixture = Fixture::new();
    for name in ["old", "new", "controller", "stranger"] {
        fixture.generate("dhchap", name);
    }
    fixture.configure(&["old"], &[]);
    let target = fixture.serve();
    let uri = |secret: &str, controller: &str| {
        let address = target.address();
        format!("{address}/{SUBSYSTEM}/1?hostnqn={HOST}&dhchap={secret}{controller}")
    };
    let connects = |uri: &str| fixture.run(&["identify", uri]);
    let accepted = |uri: &str| {
        let output = connects(uri);
        assert!(output.status.success(), "{uri}: {output:?}");
    };
    let refused = |uri: &str, why: &str| {
        let output = connects(uri);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(why), "{uri}: {said}");
    };
    let reload = |dhchap: &[&str]| {
        fixture.configure(dhchap, &[]);
        let pid = target.child.id().to_string();
        fixture.stdout_of_success(&["set", "configuration", "reload=true", "--pid", &pid]);
    };
    accepted(&uri("old", ""));
    accepted(&uri("old", "&dhchap-controller=controller"));
    refused(&uri("old", "&dhchap-controller=stranger"), "authentication");
    refused(&uri("stranger", ""), "authentication");
    refused(&uri("new", ""), "authentication");
    refused(&uri("none", ""), "key `none`: keyring");
    let unauthenticated = uri("", "").replace("&dhchap=", "");
    refused(&unauthenticated, "authenticat");
    // A load that outlasts the rotation, with the old key and then with the new one under its name.
    let mut load =
        fixture.command(&["perf", &uri("old", ""), "-w", "randrw", "--overwrite", "-t", "4"]);
    let load = load.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    reload(&["old", "new"]);
    let path = connected_path(&fixture, load.id());
    assert_eq!((&path["authenticated"], &path["tls"]), (&Value::Bool(true), &Value::Null));
    accepted(&uri("old", ""));
    accepted(&uri("new", ""));
    let load = load.wait_with_output().unwrap();
    assert!(load.status.success(), "{}", String::from_utf8_lossy(&load.stderr));
    reload(&["new"]);
    accepted(&uri("new", ""));
    refused(&uri("old", ""), "authentication");
}

/// The first path of a process to a remote device, once it is authenticated.
fn connected_path(fixture: &Fixture, pid: u32) -> Value {
    let pid = pid.to_string();
    for _ in 0..250 {
        let output = fixture.run(&["get", "paths", "--pid", &pid, "--json"]);
        let paths: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        if paths[0]["authenticated"] == true {
            return paths[0].clone();
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    panic!("no authenticated path in process {pid}");
}

/// Ends the target with a core dump and returns its bytes; `None` where the kernel writes it elsewhere
/// and there is no gdb.
fn core_dump(fixture: &Fixture, target: &mut Target) -> Option<Vec<u8>> {
    let pattern = fs::read_to_string("/proc/sys/kernel/core_pattern").unwrap();
    let pid = target.child.id().to_string();
    if !pattern.starts_with(['|', '/']) {
        let killed = Command::new("kill").args(["-ABRT", &pid]).status();
        let killed = killed
            .or_else(|_| Command::new("sh").args(["-c", &format!("kill -ABRT {pid}")]).status());
        assert!(killed.unwrap().success());
        target.child.wait().unwrap();
        return core_file(fixture.root.path());
    }
    let mut gcore = Command::new("gcore");
    gcore.args(["-o", "core", &pid]).current_dir(fixture.root.path());
    if gcore.output().is_err() {
        println!("skipped the core dump: core_pattern is {pattern}, and there is no gcore");
    }
    core_file(fixture.root.path())
}

fn core_file(directory: &Path) -> Option<Vec<u8>> {
    let mut entries = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path());
    let is_core = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().starts_with("core");
    let core = entries.find(is_core);
    if core.is_none() {
        println!("skipped the core dump: the kernel wrote none (`ulimit -c`)");
    }
    core.map(|core| fs::read(core).unwrap())
}
