//! What is served over NVMe/TCP from a file: to whom, by which way, and how it changes while it is.

use std::io::{BufRead, BufReader, Read as _};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::served::{ServeProcess, run};
use serde_json::Value;
use tenmil_linux::NamedThread;

const TENMIL: &str = env!("CARGO_BIN_EXE_tenmil");
const NQN: &str = "nqn.2026-01.org.tenmil:disks";
const ONE: &str = "nqn.2026-01.org.tenmil:one";
const TWO: &str = "nqn.2026-01.org.tenmil:two";

/// A file, and a process that serves what it says.
struct ServeTest {
    served: ServeProcess,
    file: PathBuf,
    /// Where it listens, without a scheme.
    addresses: Vec<String>,
    _root: tempfile::TempDir,
}

impl ServeTest {
    fn new(text: &str) -> Self {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("target.toml");
        std::fs::write(&file, text).unwrap();
        let served = ServeProcess::start_shell_line(&format!(
            "{TENMIL} serve --json --config '{}'",
            file.display()
        ));
        let ready: Value = serde_json::from_str(&served.ready).unwrap();
        let addresses = ready["listen"].as_array().unwrap().iter();
        let bare = |address: &Value| address.as_str().unwrap().replace("tcp://", "");
        Self { addresses: addresses.map(bare).collect(), served, file, _root: root }
    }

    /// What `host` calls a namespace that it reaches by a listener.
    fn uri(&self, listener: usize, nsid: u32, host: &str) -> String {
        format!("tcp://{}/{NQN}?ns={nsid}&hostnqn={host}", self.addresses[listener])
    }

    fn send_sighup_to_server(&self) {
        send_sighup(self.served.pid());
    }

    /// What is said of the file once it is this one.
    fn replace_config_and_reload(&self, text: &str, events: &mut EventsFollower) -> String {
        // At once: it may be read just now.
        let beside = self.file.with_extension("new");
        std::fs::write(&beside, text).unwrap();
        std::fs::rename(&beside, &self.file).unwrap();
        self.send_sighup_to_server();
        events.next_change()
    }
}

fn send_sighup(pid: u32) {
    let sent = Command::new("sh").args(["-c", &format!("kill -HUP {pid}")]).status();
    assert!(sent.unwrap().success());
}

/// The size of a namespace, or what is said instead.
fn namespace_size_or_error(uri: &str) -> Result<u64, String> {
    let output = Command::new("timeout")
        .args(["-k", "5", "60", TENMIL, "identify", uri, "--json"])
        .output()
        .unwrap();
    if !output.status.success() {
        return Err(String::from_utf8(output.stderr).unwrap());
    }
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    let nsid = uri.split_once("?ns=").unwrap().1.split('&').next().unwrap();
    let size = said["namespaces"][nsid]["identify"]["nvmcap"].as_u64();
    size.ok_or_else(|| format!("no namespace {nsid}"))
}

/// Who is connected, as a process says.
fn connection_rows(served: &ServeProcess, of: &str) -> Vec<Value> {
    let said = served.stdout_of_rpc_command(&format!("get nvme_connections {of}--json"));
    serde_json::from_str::<Value>(&said).unwrap().as_array().unwrap().clone()
}

fn is_io(row: &Value) -> bool {
    row["queue"].as_u64().is_some_and(|queue| queue > 0)
}

/// `tenmil events` of a process.
struct EventsFollower {
    child: Child,
    lines: BufReader<std::process::ChildStdout>,
}

impl EventsFollower {
    /// It hears everything from now on.
    fn start(world: &ServeTest) -> Self {
        let mut command = world.served.command(&["events", "--json", "--time", "60"]);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        let mut follower = Self { child, lines };
        // It has to be heard once before it is known that it hears.
        let pid = world.served.pid();
        let knocks = NamedThread::spawn("knocks", None, move |stop| {
            while !stop.is_stopped() {
                send_sighup(pid);
            }
        });
        assert_eq!(follower.next(), "nothing has changed");
        knocks.unwrap().stop();
        follower
    }

    /// What came next of the file, without its name.
    fn next(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert!(self.lines.read_line(&mut line).unwrap() > 0, "it has ended");
            let event: Value = serde_json::from_str(&line).unwrap();
            if event["kind"].as_str().unwrap().starts_with("configuration-") {
                let text = event["text"].as_str().unwrap();
                return text.split_once(".toml: ").unwrap().1.to_owned();
            }
        }
    }

    /// What came next that tells of a change or of a mistake.
    fn next_change(&mut self) -> String {
        loop {
            let text = self.next();
            if text != "nothing has changed" {
                return text;
            }
        }
    }
}

impl Drop for EventsFollower {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const WHOLE: &str = r#"
buffer-memory = "64m"

[[listener]]
address = "127.0.0.1:0"

[[listener]]
address = "127.0.0.2:0"

[[subsystem]]
nqn = "nqn.2026-01.org.tenmil:disks"
allowed-hosts = ["nqn.2026-01.org.tenmil:one", "nqn.2026-01.org.tenmil:two"]

[[subsystem.namespace]]
uri = "ram:16m"

[[subsystem.namespace]]
uri = "ram:8m"
allowed-hosts = ["nqn.2026-01.org.tenmil:two"]

[[subsystem.namespace]]
uri = "ram:4m"
ana-group = 2

[[subsystem.path]]
listener = "127.0.0.2:0"
ana-group = 2
ana-state = "inaccessible"
"#;

#[test]
fn configuration_file_defines_visibility_of_namespaces_per_listener() {
    let world = ServeTest::new(WHOLE);
    assert_eq!(namespace_size_or_error(&world.uri(0, 1, ONE)), Ok(16 << 20));
    assert_eq!(namespace_size_or_error(&world.uri(1, 1, TWO)), Ok(16 << 20));
    // It is masked.
    assert_eq!(namespace_size_or_error(&world.uri(0, 2, TWO)), Ok(8 << 20));
    let said = namespace_size_or_error(&world.uri(0, 2, ONE)).unwrap_err();
    assert!(said.contains("no namespace 2"), "{said}");
    let identify = |host| {
        let arguments = ["-k", "5", "60", TENMIL, "identify", &world.uri(0, 2, host), "--json"];
        Command::new("timeout").args(arguments).output().unwrap()
    };
    assert!(identify(TWO).status.success());
    let masked = String::from_utf8(identify(ONE).stderr).unwrap();
    let expected = "no namespace 2 is shown to this host, expected one of: 1, 3";
    assert!(masked.contains(expected) && masked.contains("`allowed-hosts`"), "{masked}");
    // It is not named.
    let said =
        namespace_size_or_error(&world.uri(0, 1, "nqn.2026-01.org.tenmil:three")).unwrap_err();
    assert!(said.contains("this host may not connect"), "{said}");
    // One way leads there. On the other one requests wait for an accessible state.
    let load = |listener| {
        let uri = format!("{}&fast-io-fail-timeout=100ms", world.uri(listener, 3, ONE));
        let arguments = ["-k", "5", "60", TENMIL, "perf", &uri, "-t", "0.5", "--json"];
        Command::new("timeout").args(arguments).output().unwrap()
    };
    assert!(load(0).status.success());
    let barred = load(1);
    assert!(!barred.status.success(), "{barred:?}");
    // Both are told of.
    let discovered = run(TENMIL, &["discover", &format!("tcp://{}", world.addresses[0]), "--json"]);
    assert!(!discovered.contains(NQN), "a host that is not listed gets no entry: {discovered}");
    assert_eq!(world.served.stop_with_sigterm(), Some(0));
}

#[test]
fn named_device_is_shared_by_all_its_users() {
    let text = WHOLE.replace(
        "[[subsystem]]",
        "[[device]]\nname = \"slow\"\nuri = \"delay:[ram:8m]?read=1us\"\n[[subsystem]]",
    );
    let part =
        |at| format!("[[subsystem.namespace]]\nuri = \"split:[device:slow]?part={at}&parts=2\"\n");
    let world = ServeTest::new(&format!("{text}{}{}", part(0), part(1)));
    assert_eq!(
        [4, 5].map(|nsid| namespace_size_or_error(&world.uri(0, nsid, ONE))),
        [Ok(4 << 20), Ok(4 << 20)]
    );
    let delays = world.served.stdout_of_rpc_command("get delays --json");
    let delays: Value = serde_json::from_str(&delays).unwrap();
    assert_eq!(delays.as_array().unwrap().len(), 1, "{delays}");
    // It goes with the last.
    let mut events = EventsFollower::start(&world);
    let mut change = |text: &str| world.replace_config_and_reload(text, &mut events);
    let said = change(&format!("{text}{}", part(1)));
    assert!(said.starts_with("removes namespace"), "{said}");
    assert_eq!(
        world.served.stdout_of_rpc_command("get delays --json").matches("delay:").count(),
        1
    );
    change(&text);
    assert_eq!(world.served.stdout_of_rpc_command("get delays --json").trim(), "[]");
    drop(events);
    assert_eq!(world.served.stop_with_sigterm(), Some(0));
}

#[test]
fn every_connection_is_listed() {
    let world = ServeTest::new(WHOLE);
    let uri = format!("{}&ddgst=yes", world.uri(0, 1, ONE));
    let mut load = Command::new(TENMIL)
        .args(["perf", &uri, "-t", "60"])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let ask = || connection_rows(&world.served, &format!("host={ONE} "));
    // The admin queue may be listed before its reactor is recorded.
    let is_whole = |rows: &Vec<Value>| {
        rows.iter().any(is_io) && rows.iter().all(|row| !row["reactor"].is_null())
    };
    let rows = (0..200).map(|_| ask()).find(is_whole).expect("its load connects");
    for row in &rows {
        assert_eq!((&row["subsystem"], &row["port"]), (&NQN.into(), &1.into()), "{row}");
        assert_eq!((&row["data_digest"], &row["header_digest"]), (&true.into(), &false.into()));
        assert!(row["memory_bytes"].as_u64().unwrap() >= 8192, "{row}");
        assert_eq!(row["reactor"], 0, "{row}");
    }
    load.kill().unwrap();
    load.wait().unwrap();
    assert!((0..200).any(|_| ask().is_empty()), "it has gone");
}

#[test]
fn changed_configuration_is_applied_and_an_invalid_one_changes_nothing() {
    let world = ServeTest::new(WHOLE);
    let mut events = EventsFollower::start(&world);
    let mut change = |text: &str| world.replace_config_and_reload(text, &mut events);
    let said = change(&WHOLE.replace("64m", "32m"));
    assert!(
        said.starts_with("line 2, `buffer-memory`: it is 33554432 bytes, expected 67108864"),
        "{said}"
    );
    let said = change(&WHOLE.replace("ram:4m", "file:/nowhere/at/all"));
    assert!(said.starts_with("line 22, `uri`: serve file:/nowhere/at/all"), "{said}");
    let said = change(&WHOLE.replace("ana-group = 2\n\n[", "ana-grupp = 2\n\n["));
    assert!(said.starts_with("line 23, `ana-grupp`: unknown field"), "{said}");
    let taken = std::net::TcpListener::bind("127.0.0.3:0").unwrap();
    let taken = format!("\n[[listener]]\naddress = \"{}\"\n", taken.local_addr().unwrap());
    let more = "\n[[subsystem.namespace]]\nuri = \"ram:2m\"\n";
    let said = change(&format!("{WHOLE}{more}{taken}"));
    assert!(said.contains("`address`: listen at 127.0.0.3:"), "{said}");
    assert!(namespace_size_or_error(&world.uri(0, 4, ONE)).is_err(), "all or nothing");
    // A load runs meanwhile, and is not disturbed.
    let arguments = ["perf", &world.uri(0, 1, ONE), "-t", "3", "-w", "randrw", "--verify"];
    let mut load = Command::new(TENMIL)
        .args(arguments)
        .args(["--overwrite", "--json"])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let said = change(&format!("{WHOLE}{more}"));
    assert_eq!(said, format!("adds namespace 4 to {NQN}: ram:2m"));
    assert_eq!(namespace_size_or_error(&world.uri(0, 4, ONE)), Ok(2 << 20));
    let open = WHOLE.replace("allowed-hosts = [\"nqn.2026-01.org.tenmil:two\"]\n", "");
    let said = change(&open);
    assert!(
        said.contains("removes namespace 4 of") && said.contains("changes hosts, masks"),
        "{said}"
    );
    assert!(namespace_size_or_error(&world.uri(0, 4, ONE)).is_err());
    assert_eq!(namespace_size_or_error(&world.uri(0, 2, ONE)), Ok(8 << 20));
    let only_one = open.replace(", \"nqn.2026-01.org.tenmil:two\"]", "]");
    change(&only_one);
    assert!(namespace_size_or_error(&world.uri(0, 1, TWO)).is_err());
    let other = "\n[[subsystem]]\nnqn = \"nqn.2026-01.org.tenmil:other\"\n";
    let said = change(&format!("{only_one}{other}{more}"));
    assert!(said.contains("offers nqn.2026-01.org.tenmil:other"), "{said}");
    let found = run(TENMIL, &["discover", &format!("tcp://{}", world.addresses[0]), "--json"]);
    assert!(found.contains("nqn.2026-01.org.tenmil:other"), "{found}");
    assert!(load.wait().unwrap().success());
    drop(events);
    assert_eq!(world.served.stop_with_sigterm(), Some(0));
}

#[test]
fn rejected_configuration_change_creates_and_grows_no_file() {
    let world = ServeTest::new(WHOLE);
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("short"), [7; 4096]).unwrap();
    let namespace = |name: &str| {
        format!("\n[[subsystem.namespace]]\nuri = \"file:{}?size=1m\"\n", path(name).display())
    };
    let both = [namespace("new"), namespace("short")].concat();
    let lens = || {
        let files = std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap());
        let mut lens: Vec<_> = files
            .map(|it| (it.file_name().into_string().unwrap(), it.metadata().unwrap().len()))
            .collect();
        lens.sort();
        lens
    };
    let shown = |lens: &[(&str, u64)]| -> Vec<_> {
        lens.iter().map(|(name, len)| ((*name).to_owned(), *len)).collect()
    };
    let mut events = EventsFollower::start(&world);
    for wrong in ["file:/nowhere/at/all", &format!("file:{}", path("new").display())] {
        let wrong = format!("\n[[subsystem.namespace]]\nuri = \"{wrong}\"\n");
        let said = world.replace_config_and_reload(&format!("{WHOLE}{both}{wrong}"), &mut events);
        assert!(said.contains("`uri`: serve file:"), "{said}");
        assert_eq!(lens(), shown(&[("short", 4096)]), "{said}");
    }
    let said = world.replace_config_and_reload(&format!("{WHOLE}{both}"), &mut events);
    assert!(said.contains("adds namespace 4") && said.contains("adds namespace 5"), "{said}");
    assert_eq!(lens(), shown(&[("new", 1 << 20), ("short", 1 << 20)]));
    assert_eq!(namespace_size_or_error(&world.uri(0, 4, ONE)), Ok(1 << 20));
    drop(events);
    assert_eq!(world.served.stop_with_sigterm(), Some(0));
}

#[test]
fn discovery_watch_reports_changes_across_a_lost_connection() {
    let world = ServeTest::new(WHOLE);
    let proxy = format!("{TENMIL} proxy 127.0.0.1:0 {} --to-client 60k=cut", world.addresses[0]);
    let proxy = ServeProcess::start_shell_line(&proxy);
    let ready = proxy.ready.trim().strip_prefix("ready ").unwrap();
    let address = ready.split_whitespace().next().unwrap().trim_start_matches("tcp://");
    let mut watch = Command::new("timeout")
        .args(["-k", "5", "120", TENMIL, "discover", "--watch", "--json"])
        .arg(format!("tcp://{address}?hostnqn={ONE}&reconnect-delay=100ms"))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap());
    let mut next = || -> Value {
        let mut line = String::new();
        assert!(lines.read_line(&mut line).unwrap() > 0, "it has ended");
        serde_json::from_str(&line).unwrap()
    };
    let is = |change: &Value, word: &str, subsystem: &str| {
        change["change"] == word && change["subsystem"] == subsystem && change["port"] == 2
    };
    while !is(&next(), "added", NQN) {}
    let other = "nqn.2026-01.org.tenmil:other";
    let more = format!("{WHOLE}\n[[subsystem]]\nnqn = \"{other}\"\n");
    let more = format!("{more}\n[[subsystem.namespace]]\nuri = \"ram:2m\"\n");
    let (mut away, mut back, mut rounds) = (0, 0, 0);
    while back == 0 || rounds % 2 == 1 {
        rounds += 1;
        assert!(rounds < 100, "the connection was never lost");
        let (text, word) = if rounds % 2 == 1 { (&*more, "added") } else { (WHOLE, "removed") };
        let beside = world.file.with_extension("new");
        std::fs::write(&beside, text).unwrap();
        std::fs::rename(&beside, &world.file).unwrap();
        world.send_sighup_to_server();
        loop {
            let change = next();
            away += usize::from(change["change"] == "disconnected");
            back += usize::from(change["change"] == "reconnected");
            if is(&change, word, other) {
                break;
            }
        }
    }
    assert_eq!(away, back);
    watch.kill().unwrap();
    watch.wait().unwrap();
}

#[test]
fn server_with_a_stuck_device_exits_with_3_and_names_it() {
    for (operation, pattern) in [("read", "randread"), ("write", "randwrite")] {
        let hangs = format!("fault:[ram:16m]?rule=hang:{operation}+10");
        let serve = format!("{TENMIL} serve '{hangs}' --listen tcp://127.0.0.1:0");
        let errors = tempfile::NamedTempFile::new().unwrap();
        let served =
            ServeProcess::start_shell_line(&format!("{serve} 2>{}", errors.path().display()));
        let address = served.ready.trim().strip_prefix("ready ").unwrap().to_owned();
        let uri = format!(
            "{address}/nqn.2026-01.org.tenmil:disk?fast-io-fail-timeout=200ms&ctrl-loss-timeout=200ms"
        );
        let mut load = Command::new(TENMIL)
            .args(["perf", &uri, "-t", "30", "-q", "16", "-w", pattern, "--overwrite"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // All commands hold memory of the target, also when it is read again: none is answered.
        let holds_all = |row: &Value| is_io(row) && row["memory_bytes"].as_u64() >= Some(16 * 4096);
        let waits = || connection_rows(&served, "").iter().any(holds_all);
        assert!((0..200).any(|_| waits() && waits()), "its load waits");
        assert_eq!(served.stop_with_sigterm(), Some(3), "{operation}");
        let said = std::fs::read_to_string(errors.path()).unwrap();
        let expected = format!(
            "commands are abandoned: the devices have not completed them, expected them to: {hangs}"
        );
        assert!(said.contains(&expected), "{said}");
        load.kill().unwrap();
        load.wait().unwrap();
    }
}

/// It does not fail I/Os by the million until its time is over.
#[test]
fn perf_exits_with_3_and_the_reason_when_its_device_is_lost() {
    let served = ServeProcess::start_shell_line(&format!(
        "{TENMIL} serve ram:16m --listen tcp://127.0.0.1:0"
    ));
    let address = served.ready.trim().strip_prefix("ready ").unwrap().to_owned();
    let uri = format!(
        "{address}/nqn.2026-01.org.tenmil:disk?fast-io-fail-timeout=200ms&ctrl-loss-timeout=500ms"
    );
    let mut load = Command::new(TENMIL)
        .args(["perf", &uri, "-t", "60", "-q", "4"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let works = |_| connection_rows(&served, "").iter().any(is_io);
    assert!((0..200).any(works), "its load runs");
    assert!(served.stop_with_sigterm().is_some());
    let status = load.wait().unwrap();
    let mut text = String::new();
    load.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(status.code(), Some(3), "{text}");
    assert!(text.contains("error: tcp://127.0.0.1:"), "{text}");
}

#[test]
fn server_with_exit_with_parent_ends_with_its_parent() {
    let serve = format!("{TENMIL} serve null: --listen tcp://127.0.0.1:0 --exit-with-parent");
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("{serve} & echo $!; wait")]).stdout(Stdio::piped());
    let mut shell = shell.spawn().unwrap();
    let mut lines = BufReader::new(shell.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut pid = None;
    while !lines.by_ref().any(|line| {
        pid = pid.or_else(|| line.parse::<u32>().ok());
        line.starts_with("ready ")
    }) {}
    let pid = pid.unwrap();
    assert!(!tenmil_linux::process_stats::has_ended(pid));
    shell.kill().unwrap();
    shell.wait().unwrap();
    let begun = std::time::Instant::now();
    while !tenmil_linux::process_stats::has_ended(pid) {
        assert!(begun.elapsed() < Duration::from_secs(5), "{pid} goes on");
        std::thread::yield_now();
    }
}

#[test]
fn scheduler_of_a_server_is_configured_before_and_while_it_runs() {
    let serve = format!("{TENMIL} serve ram:1m --listen tcp://127.0.0.1:0");
    let served = ServeProcess::start_shell_line(&format!(
        "{serve} --scheduler 'dynamic?load=10&period=200ms' --governor"
    ));
    let scheduler = |line: &str| -> Value {
        serde_json::from_str(&served.stdout_of_rpc_command(line)).unwrap()
    };
    let reported = scheduler("get scheduler --json");
    assert_eq!(
        (&reported["policy"], &reported["load_limit_percent"]),
        (&"dynamic".into(), &10.into())
    );
    assert_eq!(reported["period_ns"], 200_000_000);
    let reported = scheduler("set scheduler policy=static --json");
    assert_eq!(
        (&reported["policy"], &reported["load_limit_percent"]),
        (&"static".into(), &10.into())
    );
    assert_eq!(served.stop_with_sigterm(), Some(0));

    for (rules, said) in [
        ("dynamic?load=90", "load limit 90 %, core limit 80 %"),
        ("dynamic?scheduling-core=1000", "scheduling core is 1000"),
        ("fair", "no policy `fair`"),
    ] {
        let line = format!("{serve} --scheduler '{rules}'");
        let output = Command::new("sh").args(["-c", &line]).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(said) && output.stdout.is_empty(), "{error}");
    }
}

#[test]
fn proxy_answers_rpc_queries() {
    let proxy = ServeProcess::start_shell_line(&format!("{TENMIL} proxy 127.0.0.1:0 127.0.0.1:9"));
    assert!(proxy.stdout_of_rpc_command("get process --json").contains("\"version\""));
    assert_eq!(proxy.stop_with_sigterm(), Some(0));
}
