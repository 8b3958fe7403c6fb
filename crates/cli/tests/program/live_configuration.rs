//! A running target is changed by commands: hosts see each change, and the file has it.

use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use crate::served::{ServeProcess, are_tools_installed, run};
use serde_json::{Value, json};

const TENMIL: &str = env!("CARGO_BIN_EXE_tenmil");
const NQN: &str = "nqn.2026-01.org.tenmil:disks";
const OTHER: &str = "nqn.2026-01.org.tenmil:other";
const ONE: &str = "nqn.2026-01.org.tenmil:one";
const TWO: &str = "nqn.2026-01.org.tenmil:two";

const TEXT: &str = r#"# The target of a test.
buffer-memory = "64m"

[[listener]]
address = "127.0.0.1:0"   # any port

[[subsystem]]
nqn = "nqn.2026-01.org.tenmil:disks"
allowed-hosts = [
    "nqn.2026-01.org.tenmil:one",   # the first host
]

# The first disk.
[[subsystem.namespace]]
uri = "ram:16m"
"#;

struct LiveTarget {
    served: ServeProcess,
    file: PathBuf,
    address: String,
    _root: Option<tempfile::TempDir>,
}

impl LiveTarget {
    fn new(text: &str) -> Self {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("target.toml");
        std::fs::write(&file, text).unwrap();
        Self { _root: Some(root), ..Self::serving(file) }
    }

    fn serving(file: PathBuf) -> Self {
        let line = format!("{TENMIL} serve --json --config '{}'", file.display());
        let served = ServeProcess::start_shell_line(&line);
        let address = first_address(&served);
        Self { served, file, address, _root: None }
    }

    fn text(&self) -> String {
        std::fs::read_to_string(&self.file).unwrap()
    }

    fn run(&self, line: &str) -> Output {
        self.served.command(&line.split(' ').collect::<Vec<_>>()).output().unwrap()
    }

    /// The result of a command as JSON.
    fn json(&self, line: &str) -> Value {
        let output = self.run(&format!("{line} --json"));
        assert!(output.status.success(), "{line}: {output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    fn error(&self, line: &str) -> String {
        let output = self.run(line);
        assert!(!output.status.success(), "{line}: {output:?}");
        String::from_utf8(output.stderr).unwrap()
    }

    fn size(&self, nqn: &str, nsid: u32, host: &str) -> Result<u64, String> {
        namespace_size(&self.address, nqn, nsid, host)
    }
}

fn first_address(served: &ServeProcess) -> String {
    let ready: Value = serde_json::from_str(&served.ready).unwrap();
    ready["listen"][0].as_str().map(|at| at.replace("tcp://", "")).unwrap_or_default()
}

/// The size of a namespace as a host sees it, or why it does not.
fn namespace_size(address: &str, nqn: &str, nsid: u32, host: &str) -> Result<u64, String> {
    let uri = format!("tcp://{address}/{nqn}?ns={nsid}&hostnqn={host}");
    let output = Command::new("timeout")
        .args(["-k", "5", "60", TENMIL, "identify", &uri, "--json"])
        .output()
        .unwrap();
    if !output.status.success() {
        return Err(String::from_utf8(output.stderr).unwrap());
    }
    let found: Value = serde_json::from_slice(&output.stdout).unwrap();
    let size = found["namespaces"][nsid.to_string()]["identify"]["nvmcap"].as_u64();
    size.ok_or_else(|| format!("no namespace {nsid}"))
}

#[test]
fn each_object_is_created_seen_by_a_host_and_deleted() {
    let target = LiveTarget::new(TEXT);
    assert_eq!(target.size(NQN, 1, ONE), Ok(16 << 20));
    // A namespace, while a load of the first one is not disturbed.
    let uri = format!("tcp://{}/{NQN}?ns=1&hostnqn={ONE}", target.address);
    let load = ["perf", &uri, "-t", "4", "-w", "randrw", "--verify", "--overwrite", "--json"];
    let mut load = Command::new(TENMIL).args(load).stdout(Stdio::null()).spawn().unwrap();
    let made = target.json(&format!("namespace create {NQN} ram:8m --read-only"));
    assert_eq!(
        (&made["object"]["nsid"], &made["object"]["size_bytes"]),
        (&json!(2), &json!(8 << 20))
    );
    assert_eq!(made["saved_to"], target.file.to_str().unwrap());
    assert_eq!(target.size(NQN, 2, ONE), Ok(8 << 20));
    // A host.
    assert!(target.size(NQN, 1, TWO).unwrap_err().contains("this host may not connect"));
    target.json(&format!("host create {NQN} {TWO} --connections 8"));
    assert_eq!(target.size(NQN, 1, TWO), Ok(16 << 20));
    target.json(&format!("namespace set {NQN} 2 --allowed-hosts {TWO}"));
    assert_eq!(target.size(NQN, 2, TWO), Ok(8 << 20));
    assert!(target.size(NQN, 2, ONE).is_err());
    let hosts = target.json(&format!("host list --subsystem {NQN}"));
    assert_eq!((&hosts[1]["host"], &hosts[1]["connections"]), (&json!(TWO), &json!(8)));
    // A subsystem.
    target.json(&format!("subsystem create {OTHER} --allow-any-host"));
    target.json(&format!("namespace create {OTHER} ram:4m --nsid 9"));
    assert_eq!(target.size(OTHER, 9, "nqn.2026-01.org.tenmil:any"), Ok(4 << 20));
    for read_only in [true, false] {
        let set = target.json(&format!("namespace set {OTHER} 9 --read-only={read_only}"));
        assert_eq!(set["object"]["read_only"], read_only);
        assert_eq!(target.size(OTHER, 9, ONE), Ok(4 << 20));
    }
    // A listener.
    let made = target.json("listener create 127.0.0.2:0");
    let second = made["object"]["address"].as_str().unwrap().to_owned();
    assert_eq!(namespace_size(&second, OTHER, 9, ONE), Ok(4 << 20));
    target.json(&format!("subsystem set {OTHER} --listeners {}", target.address));
    assert!(namespace_size(&second, OTHER, 9, ONE).is_err());
    let first = &target.address;
    target.json(&format!("set ana_state subsystem={OTHER} listener={first} state=inaccessible"));
    // What the file says now, with its comments, is what is served after a restart.
    let text = target.text();
    for part in ["# any port\n", "# the first host\n", "# The first disk.\n", "# The target of"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let shown = target.run("config show");
    assert_eq!(String::from_utf8(shown.stdout).unwrap(), text);
    // All of it is deleted again.
    target.json(&format!("listener delete {second}"));
    assert!(namespace_size(&second, NQN, 1, ONE).is_err());
    target.json(&format!("subsystem delete {OTHER}"));
    assert!(target.size(OTHER, 9, ONE).is_err());
    target.json(&format!("namespace delete {NQN} 2"));
    assert!(target.size(NQN, 2, TWO).is_err());
    target.json(&format!("host delete {NQN} {TWO}"));
    assert!(target.size(NQN, 1, TWO).is_err());
    assert_eq!(target.size(NQN, 1, ONE), Ok(16 << 20));
    assert_eq!(target.text(), TEXT, "as it was, to the byte");
    assert!(load.wait().unwrap().success());
    assert_eq!(target.served.stop_with_sigterm(), Some(0));
}

#[test]
fn first_ana_state_is_reported_to_hosts_that_stay_connected() {
    let target = LiveTarget::new(TEXT);
    let uri = format!("tcp://{}/{NQN}?ns=1&hostnqn={ONE}", target.address);
    let load = ["perf", &uri, "-t", "4", "-w", "randrw", "--verify", "--overwrite", "--json"];
    let mut load = Command::new(TENMIL).args(load).stdout(Stdio::null()).spawn().unwrap();
    let connections = || {
        let all = target.json("get nvme_connections");
        let ids = all.as_array().unwrap().iter().filter(|row| row["host"] == ONE);
        ids.map(|row| (row["id"].clone(), row["controller"].clone())).collect::<Vec<_>>()
    };
    let before = (0..100)
        .map(|_| {
            std::thread::sleep(std::time::Duration::from_millis(20));
            connections()
        })
        .find(|found| found.len() > 1)
        .unwrap();
    // A group of its own is no new subsystem either.
    target.json(&format!("namespace create {NQN} ram:1m --ana-group 2"));
    for (group, state) in [(1, "inaccessible"), (2, "non-optimized"), (1, "non-optimized")] {
        let line = format!("subsystem={NQN} listener={} ana_group={group}", target.address);
        target.json(&format!("set ana_state {line} state={state}"));
    }
    assert_eq!(connections(), before);
    assert!(load.wait().unwrap().success(), "requests wait while the state is inaccessible");
    assert_eq!(target.served.stop_with_sigterm(), Some(0));
}

#[test]
fn write_protection_of_a_file_goes_and_comes_and_a_refused_change_keeps_it_served() {
    let target = LiveTarget::new(TEXT);
    let disk = target.file.with_file_name("disk");
    std::fs::write(&disk, vec![7; 1 << 20]).unwrap();
    let uri = format!("tcp://{}/{NQN}?ns=2&hostnqn={ONE}", target.address);
    let writes = || {
        let load = ["perf", &uri, "-t", "0.2", "-w", "randwrite", "--overwrite", "--json"];
        Command::new(TENMIL).args(load).output().unwrap().status.success()
    };
    target.json(&format!("namespace create {NQN} file:{} --read-only", disk.display()));
    // Another reader, which keeps the file locked for reading.
    let reader = format!("{TENMIL} serve --json file:{} --read-only -l nbd:", disk.display());
    let socket = target.file.with_file_name("reader.sock");
    let reader = ServeProcess::start_shell_line(&format!("{reader}{}", socket.display()));
    let error = target.error(&format!("namespace set {NQN} 2 --read-only=false"));
    assert!(error.contains("disk"), "{error}");
    assert_eq!(target.size(NQN, 2, ONE), Ok(1 << 20), "served as before");
    assert_eq!(reader.stop_with_sigterm(), Some(0));
    assert!(!writes());
    for is_writable in [true, false, true] {
        let set = format!("namespace set {NQN} 2 --read-only={}", !is_writable);
        assert_eq!(target.json(&set)["failed"], json!([]));
        assert_eq!(target.size(NQN, 2, ONE), Ok(1 << 20));
        assert_eq!(writes(), is_writable);
    }
    assert_eq!(target.served.stop_with_sigterm(), Some(0));
}

#[test]
fn limits_set_live_are_saved_with_the_comments_and_hold_after_a_restart() {
    let target = LiveTarget::new(TEXT);
    let set = target.json(&format!("set subsystem_limits subsystem={NQN} bytes=4000000"));
    assert_eq!(set["saved_to"], target.file.to_str().unwrap());
    assert_eq!(set["object"]["bytes"], 4_000_000);
    target.json("set namespace_limits namespace=1 read_iops=700 burst_ms=2000");
    target.json(&format!("set host_limits host={ONE} write_iops=50"));
    target.json("set host_limits iops=900");
    let error = target.error("set namespace_limits namespace=7 iops=1");
    assert!(error.contains("no `7`, expected 1"), "{error}");
    let text = target.text();
    for part in [
        "limits = { bytes = 4000000 }\n",
        "limits = { read-iops = 700, burst = \"2s\" }\n",
        "{ nqn = \"nqn.2026-01.org.tenmil:one\", limits = { write-iops = 50 } },   # the first host\n",
        "host-limits = { iops = 900 }\n",
        "# The first disk.\n",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let limits = target.json("get limits");
    let LiveTarget { served, file, _root, .. } = target;
    assert_eq!(served.stop_with_sigterm(), Some(0));
    let again = LiveTarget::serving(file);
    assert_eq!(again.json("get limits"), limits);
    assert_eq!(limits.as_array().unwrap().len(), 4, "{limits}");
    for line in [
        format!("subsystem_limits subsystem={NQN} bytes=0"),
        "namespace_limits namespace=1 read_iops=0".to_owned(),
        format!("host_limits host={ONE} write_iops=0"),
        "host_limits iops=0".to_owned(),
    ] {
        again.json(&format!("set {line}"));
    }
    assert_eq!(again.text(), TEXT, "as it was, to the byte");
}

#[test]
fn refused_change_leaves_the_target_and_the_file_as_they_were() {
    let target = LiveTarget::new(TEXT);
    let taken = std::net::TcpListener::bind("127.0.0.3:0").unwrap();
    let taken = taken.local_addr().unwrap();
    for (line, expected) in [
        (
            format!("namespace create {NQN} file:/nowhere/at/all"),
            "create namespace: `uri`: serve file:/nowhere/at/all",
        ),
        (format!("namespace create {NQN} what:ever"), "create namespace: `uri`: "),
        (format!("namespace create {OTHER} ram:1m"), "no `nqn.2026-01.org.tenmil:other`"),
        (format!("namespace delete {NQN} 7"), "delete namespace: no `7`, expected 1"),
        (format!("listener create {taken}"), "the address is in use"),
        ("subsystem create foo".to_owned(), "'foo': NQN does not begin with nqn."),
        (format!("host create {NQN} {TWO} --dhchap missing"), "create host: `"),
        (format!("subsystem create {NQN}"), "exists already"),
        (format!("host create {NQN} foo"), "'foo': NQN does not begin with nqn."),
    ] {
        let error = target.error(&line);
        assert!(error.contains(expected), "{line}: {error}");
    }
    assert_eq!(target.text(), TEXT);
    assert_eq!(target.json("namespace list").as_array().unwrap().len(), 1);
    assert_eq!(target.size(NQN, 1, ONE), Ok(16 << 20));
}

#[test]
fn file_that_was_changed_meanwhile_is_not_overwritten() {
    let target = LiveTarget::new(TEXT);
    let edited = TEXT.replace("ram:16m", "ram:32m");
    std::fs::write(&target.file, &edited).unwrap();
    let error = target.error(&format!("namespace create {NQN} ram:8m"));
    assert!(error.contains("has been changed since it was read"), "{error}");
    assert!(error.contains("tenmil reload"), "{error}");
    assert_eq!((target.text(), target.size(NQN, 1, ONE)), (edited, Ok(16 << 20)));
    target.json("reload");
    assert_eq!(target.size(NQN, 1, ONE), Ok(32 << 20));
    target.json(&format!("namespace create {NQN} ram:8m"));
    assert!(target.text().contains("ram:32m") && target.text().contains("ram:8m"));
}

#[test]
fn file_that_cannot_be_written_refuses_the_change() {
    let target = LiveTarget::new(TEXT);
    // In place of the draft lies something that cannot be removed as a file.
    std::fs::create_dir(target.file.with_extension("toml.new")).unwrap();
    let error = target.error(&format!("namespace create {NQN} ram:8m"));
    assert!(
        error.contains("target.toml.new") && error.contains("must be able to write"),
        "{error}"
    );
    assert_eq!(target.text(), TEXT);
    assert!(target.size(NQN, 2, ONE).is_err());
}

#[test]
fn configuration_is_applied_as_a_whole_after_its_difference_was_shown() {
    let target = LiveTarget::new(TEXT);
    let new = target.file.with_file_name("new.toml");
    let text = TEXT.replace("ram:16m", "ram:32m").replace("# The first disk.", "# Another disk.");
    std::fs::write(&new, &text).unwrap();
    let expected =
        [format!("- namespace 1 of {NQN}: ram:16m"), format!("+ namespace 1 of {NQN}: ram:32m")];
    let apply = format!("apply {}", new.display());
    assert_eq!(target.json(&format!("{apply} --dry-run"))["difference"], json!(expected));
    assert_eq!((target.text(), target.size(NQN, 1, ONE)), (TEXT.to_owned(), Ok(16 << 20)));
    let printed = String::from_utf8(target.run(&apply).stdout).unwrap();
    assert!(
        printed.starts_with(&format!("{}\n{}\nsaved to ", expected[0], expected[1])),
        "{printed}"
    );
    assert_eq!((target.text(), target.size(NQN, 1, ONE)), (text.clone(), Ok(32 << 20)));
    assert_eq!(
        String::from_utf8(target.run(&apply).stdout).unwrap().lines().next(),
        Some("no difference")
    );
    std::fs::write(&new, text.replace("64m", "32m")).unwrap();
    let error = target.error(&format!("{apply} --dry-run"));
    assert!(error.contains("`buffer-memory`: it is 33554432 bytes"), "{error}");
    std::fs::write(&new, text.replace("uri =", "urii =")).unwrap();
    assert!(target.error(&apply).contains("new.toml: line 15, `urii`"), "{}", target.error(&apply));
}

#[test]
fn target_without_a_file_is_changed_in_memory_and_can_be_saved() {
    let line = format!("{TENMIL} serve --json ram:4m -l tcp://127.0.0.1:0 --nqn {NQN}");
    let served = ServeProcess::start_shell_line(&line);
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("saved.toml");
    let address = first_address(&served);
    let target = LiveTarget { served, file: file.clone(), address, _root: None };
    let made = target.json(&format!("namespace create {NQN} ram:8m"));
    assert_eq!(made["saved_to"], Value::Null);
    assert_eq!(target.size(NQN, 2, ONE), Ok(8 << 20));
    assert!(target.error("reload").contains("no configuration file"), "{}", target.error("reload"));
    let listener = target.json("listener create 127.0.0.2:0");
    let second = listener["object"]["address"].as_str().unwrap();
    assert_eq!(namespace_size(second, NQN, 2, ONE), Ok(8 << 20), "the sandbox permits to listen");
    target.json(&format!("config save {}", file.display()));
    assert!(target.error(&format!("config save {}", file.display())).contains("--overwrite"));
    assert_eq!(target.json(&format!("config check {}", file.display()))["namespaces"], 2);
    assert_eq!(target.served.stop_with_sigterm(), Some(0));
    let again = LiveTarget::serving(file);
    assert_eq!(again.size(NQN, 2, ONE), Ok(8 << 20));
}

#[test]
fn target_starts_empty_and_gets_all_of_its_objects_later() {
    let target = LiveTarget::new("# Nothing is served yet.\n");
    let made = target.json("listener create 127.0.0.1:0");
    let address = made["object"]["address"].as_str().unwrap();
    target.json(&format!("subsystem create {NQN}"));
    target.json(&format!("host create {NQN} {ONE}"));
    target.json(&format!("namespace create {NQN} ram:2m"));
    assert_eq!(namespace_size(address, NQN, 1, ONE), Ok(2 << 20));
    assert!(target.text().starts_with("# Nothing is served yet.\n"), "{}", target.text());
}

#[test]
fn hosts_and_clients_are_told_of_a_change() {
    let target = LiveTarget::new(TEXT);
    let follow = |words: &[&str]| {
        let mut command = target.served.command(words);
        command.stdout(Stdio::piped()).spawn().unwrap()
    };
    let events = follow(&["events", "--json", "--time", "4"]);
    let discovery = format!("tcp://{}?hostnqn={ONE}", target.address);
    let mut watch = follow(&["discover", &discovery, "--watch", "--json"]);
    // Both have begun once the watcher has printed the first entry.
    let mut lines = std::io::BufReader::new(watch.stdout.take().unwrap());
    let mut next = || {
        let mut line = String::new();
        std::io::BufRead::read_line(&mut lines, &mut line).unwrap();
        serde_json::from_str::<Value>(&line).unwrap()
    };
    while next()["subsystem"] != NQN {}
    target.json(&format!("subsystem create {OTHER} --allowed-hosts {ONE}"));
    let entry = next();
    assert_eq!(
        (&entry["change"], &entry["subsystem"]),
        (&json!("added"), &json!(OTHER)),
        "{entry}"
    );
    target.json(&format!("subsystem delete {OTHER}"));
    assert_eq!(next()["change"], "removed");
    watch.kill().unwrap();
    watch.wait().unwrap();
    let events = String::from_utf8(events.wait_with_output().unwrap().stdout).unwrap();
    let events = events.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let changed: Vec<Value> =
        events.filter(|event| event["kind"] == "configuration-changed").collect();
    let [made, deleted] = changed.as_slice() else { panic!("{changed:?}") };
    assert_eq!(made["about"]["before"], Value::Null);
    assert_eq!(made["about"]["after"]["nqn"], OTHER);
    assert_eq!(deleted["about"]["difference"], json!([format!("- subsystem {OTHER}")]));
}

#[test]
fn objects_are_resources_of_the_http_api() {
    if !are_tools_installed(&["curl"]) {
        return;
    }
    let target = LiveTarget::new(TEXT);
    let socket = target.served.control_socket();
    let curl = |arguments: &[&str], path: &str| {
        let url = format!("http://tenmil/v1/{path}");
        let common = ["--silent", "--max-time", "30", "--unix-socket", socket.to_str().unwrap()];
        let output = run("curl", &[&common, arguments, &[url.as_str()][..]].concat());
        serde_json::from_str::<Value>(&output).unwrap()
    };
    let body = json!({ "nqn": OTHER, "allow_any_host": true }).to_string();
    assert_eq!(curl(&["--json", &body], "subsystems")["object"]["nqn"], OTHER);
    let body = json!({ "subsystem": OTHER, "uri": "ram:2m" }).to_string();
    assert_eq!(curl(&["--json", &body], "namespaces")["object"]["nsid"], 1);
    assert_eq!(target.size(OTHER, 1, ONE), Ok(2 << 20));
    let rows = curl(&[], "subsystems");
    assert_eq!((rows[1]["nqn"].as_str(), &rows[1]["namespaces"]), (Some(OTHER), &json!(1)));
    let body = json!({ "read_only": true }).to_string();
    let path = format!("namespaces/{OTHER}/1");
    let changed = curl(&["--request", "PATCH", "--json", &body], &path);
    assert_eq!(changed["object"]["read_only"], true, "{changed}");
    curl(&["--request", "DELETE"], &path);
    curl(&["--request", "DELETE"], &format!("subsystems/{OTHER}"));
    let refused = curl(&["--request", "DELETE"], &format!("subsystems/{OTHER}"));
    assert_eq!(refused["error"]["code"], "not_found", "{refused}");
    assert_eq!(target.text(), TEXT);
}

/// It is killed at any moment of a burst of changes.
#[test]
fn killed_process_leaves_a_file_with_the_changes_that_were_answered() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join("target.toml");
    std::fs::write(&file, TEXT).unwrap();
    let mut count = 1;
    for round in 0_u64..4 {
        let target = LiveTarget::serving(file.clone());
        assert_eq!(
            target.json("namespace list").as_array().unwrap().len(),
            count,
            "as the file says"
        );
        let pid = target.served.pid();
        let delay = 0.1 + 0.07 * round as f64;
        let killer =
            Command::new("sh").args(["-c", &format!("sleep {delay}; kill -KILL {pid}")]).spawn();
        let mut answered = count;
        for nsid in count + 1..200 {
            let line = format!("namespace create {NQN} ram:{nsid}m");
            if !target.run(&line).status.success() {
                break;
            }
            answered = nsid;
        }
        killer.unwrap().wait().unwrap();
        let checked = Command::new(TENMIL)
            .args(["config", "check", file.to_str().unwrap(), "--json"])
            .output()
            .unwrap();
        let checked: Value = serde_json::from_slice(&checked.stdout).expect("a whole file");
        let found = usize::try_from(checked["namespaces"].as_u64().unwrap()).unwrap();
        assert!(found == answered || found == answered + 1, "{found}, {answered} were answered");
        count = found;
    }
}
