//! `tenmil pool` and `tenmil volume` on a store that another process serves.

mod online_sizes;
mod online_streams;

use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::pool::{MIB, PoolTestDirectory};
use crate::served::are_tools_installed;
use serde_json::Value;

/// A process that serves a volume over NVMe/TCP, and can be asked by those who use the pool. Dropping it
/// kills it.
struct PoolServer {
    child: Child,
    uri: String,
}

/// Creates the volume `db` with clusters of 4 KiB.
fn create_volume(pool: &PoolTestDirectory, size: &str) {
    let uri = pool.volume_uri("db");
    pool.stdout_of_success(&["volume", "create", &uri, "--size", size, "--cluster-size", "4k"]);
}

impl PoolServer {
    fn start(pool: &PoolTestDirectory, volume: &str) -> Self {
        Self::start_with_uri(pool, &pool.volume_uri(volume))
    }

    /// Serves any URI, which another process may have open.
    fn start_with_uri(pool: &PoolTestDirectory, uri: &str) -> Self {
        let words = ["serve", uri, "--listen", "tcp://127.0.0.1:0", "--json"];
        let mut child = pool.command(&words).stdout(Stdio::piped()).spawn().unwrap();
        let mut ready = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut ready).unwrap();
        let at = ready.find("tcp://").unwrap_or_else(|| panic!("{ready}"));
        let address = ready[at..].split('"').next().unwrap().trim();
        let address = address.split('/').take(3).collect::<Vec<_>>().join("/");
        Self { child, uri: format!("{address}/nqn.2026-01.org.tenmil:disk?ns=1") }
    }

    fn pid(&self) -> u32 {
        self.child.id()
    }

    fn signal(&self, name: &str) {
        signal(self.pid(), name);
    }

    /// Ends it as a service manager would.
    fn stop_with_sigterm(mut self) {
        self.signal("TERM");
        let status = self.child.wait().unwrap();
        assert_eq!(status.code(), Some(0));
    }
}

impl Drop for PoolServer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn signal(pid: u32, name: &str) {
    let line = format!("kill -{name} {pid}");
    assert!(Command::new("sh").args(["-c", &line]).status().unwrap().success());
}

fn parsed(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

fn volume_names_of_pool(pool: &PoolTestDirectory) -> Vec<String> {
    let listed = parsed(&pool.stdout_of_success(&["volume", "list", &pool.device_uri(), "--json"]));
    let name = |one: &Value| one["name"].as_str().unwrap().to_owned();
    listed["volumes"].as_array().unwrap().iter().map(name).collect()
}

#[test]
fn every_pool_command_is_executed_by_the_serving_process() {
    let pool = PoolTestDirectory::new("64m");
    pool.stdout_of_success(&["volume", "create", &pool.volume_uri("db"), "--size", "4m"]);
    std::os::unix::fs::symlink(pool.path("pool"), pool.path("link")).unwrap();
    let server = PoolServer::start(&pool, "db");
    let by = format!("by process {} (", server.pid());
    // However its device is spelled: what counts is which file it is.
    let volume = |name: &str| format!("volume:[file:link?engine=threads]/{name}");
    let (db, monday, trial, next) =
        (volume("db"), volume("monday"), pool.volume_uri("trial"), volume("next"));
    for (words, name) in [
        (vec!["snapshot", &db, "monday"], "monday"),
        (vec!["clone", &monday, "trial"], "trial"),
        (vec!["rename", &trial, "next"], "next"),
        (vec!["resize", &next, "--size", "8m"], "next"),
        (vec!["inflate", &next], "next"),
        (vec!["decouple", &next], "next"),
        (vec!["rollback", &next, "friday"], "next"),
        (vec!["create", &trial, "--size", "2m", "--thick"], "trial"),
    ] {
        if words[0] == "rollback" {
            pool.stdout_of_success(&["volume", "snapshot", &next, "friday"]);
            pool.stdout_of_success(&["volume", "resize", &next, "--size", "16m"]);
        }
        let words = [&["volume"], &words[..]].concat();
        let text = pool.stdout_of_success(&words);
        assert!(text.contains(&by) && text.ends_with("has the pool open\n"), "{words:?}: {text}");
        let reported = parsed(&pool.stdout_of_success(&[&words[..], &["--json"]].concat()));
        assert_eq!(
            (&reported["changed"], &reported["process"]),
            (&false.into(), &server.pid().into())
        );
        assert_eq!(reported["volume"]["name"], name, "{words:?}");
    }
    for is_changed in [true, false] {
        let reported =
            parsed(&pool.stdout_of_success(&["volume", "delete", &trial, "--if-exists", "--json"]));
        assert_eq!((&reported["changed"], &reported["volume"]), (&is_changed.into(), &Value::Null));
    }
    assert_eq!(volume_names_of_pool(&pool), ["db", "monday", "next", "friday"]);
    let list = pool.stdout_of_success(&["volume", "list", &pool.device_uri()]);
    assert!(list.contains("snapshot of db") && list.contains(&by), "{list}");
    let found = parsed(&pool.stdout_of_success(&["volume", "list", &pool.device_uri(), "--json"]));
    assert_eq!(
        (&found["volumes"][0]["users"], &found["volumes"][1]["users"]),
        (&1.into(), &0.into())
    );
    for words in [vec!["open", "file:link"], vec!["set", "file:pool", "--thresholds", "60"]] {
        let reported =
            parsed(&pool.stdout_of_success(&[&["pool"], &words[..], &["--json"]].concat()));
        assert_eq!(reported["process"], server.pid(), "{words:?}: {reported}");
    }
    // Another device, named relative to the directory of the command that adds it.
    let grow = ["pool", "grow", "file:link", "--add", "file:more?size=16m"];
    let reported = pool.stdout_of_success(&grow);
    assert!(
        reported.contains("now, and had 64 MiB\n  device 0: ") && reported.contains(&by),
        "{reported}"
    );
    let again = parsed(&pool.stdout_of_success(&[&grow[..], &["--json"]].concat()));
    assert_eq!((&again["changed"], &again["process"]), (&false.into(), &server.pid().into()));
    assert_eq!(again["devices"].as_array().unwrap().len(), 2, "{again}");
    assert!(again["size_bytes"].as_u64().unwrap() > 79 << 20, "{again}");
    // All or none.
    let (code, text) = pool.exit_code_and_stderr(
        &[&["pool", "grow", "file:link", "--add", "file:third?size=16m", "--add", "file:missing"]
            [..]]
        .concat(),
    );
    assert!(code == Some(2) && text.contains("missing"), "{code:?} {text}");
    assert!(!pool.path("third").exists(), "it was made for nothing");
    let grow = [
        &["pool", "grow", "file:link", "--json"][..],
        &["--add", "file:third?size=16m", "--add", "file:fourth?size=16m"],
    ];
    let grown = parsed(&pool.stdout_of_success(&grow.concat()));
    assert_eq!((&grown["changed"], &grown["process"]), (&true.into(), &server.pid().into()));
    assert_eq!(grown["devices"].as_array().unwrap().len(), 4, "{grown}");
    let reported = pool.stdout_of_success(&["pool", "list", &pool.device_uri()]);
    assert!(reported.contains(&format!("(open in process {})", server.pid())), "{reported}");
    let scrubbed =
        parsed(&pool.stdout_of_success(&["pool", "scrub", &pool.device_uri(), "--json"]));
    assert_eq!((&scrubbed["clean"], &scrubbed["process"]), (&true.into(), &server.pid().into()));

    // An invalid change is refused as it is for a pool that no process serves.
    let cases = [
        vec!["volume", "delete", &monday],
        vec!["volume", "snapshot", &db, "next"],
        vec!["volume", "rename", &trial, "other"],
        vec!["volume", "resize", &next, "--size", "4k"],
        vec!["volume", "rollback", &next, "monday"],
        vec!["volume", "inflate", &monday],
        vec!["volume", "create", &trial, "--size", "1000"],
        vec!["pool", "set", "file:link", "--thresholds", "90,80"],
    ];
    // The device has the name by which the serving process has opened it.
    let plain = |(code, text): (Option<i32>, String)| {
        let text =
            text.replace("volume:[file:link?engine=threads]/", &pool.volume_name_in_messages(""));
        let text = text.replace("file:link?engine=threads", &pool.device_uri());
        let text = text.replace("file:link", &pool.device_uri());
        let short = pool.file_path_text("pool");
        (
            code,
            text.replace(&pool.device_uri(), &short)
                .replace("error: link:", &format!("error: {short}:")),
        )
    };
    pool.stdout_of_success(&["volume", "clone", &monday, "child"]);
    let there: Vec<_> = cases.iter().map(|words| plain(pool.exit_code_and_stderr(words))).collect();
    pool.stdout_of_success(&["volume", "resize", &db, "--size", "8m"]);
    for words in [vec!["volume", "delete", &db], vec!["volume", "rollback", &db, "monday"]] {
        let (code, text) = pool.exit_code_and_stderr(&words);
        let expected = format!("it is open in process {}", server.pid());
        assert!(code == Some(2) && text.contains(&expected), "{words:?}: {code:?} {text}");
    }
    server.stop_with_sigterm();
    for (words, there) in cases.iter().zip(&there) {
        assert!(there.0.is_some_and(|code| code != 0), "{words:?}");
        assert_eq!(&plain(pool.exit_code_and_stderr(words)), there, "{words:?}");
    }
    assert!(pool.is_clean());
    assert_eq!(volume_names_of_pool(&pool), ["db", "monday", "next", "friday", "child"]);
}

#[test]
fn load_is_exact_while_its_pool_is_snapshotted_cloned_and_scrubbed() {
    let pool = PoolTestDirectory::new("512m");
    pool.stdout_of_success(&["volume", "create", &pool.volume_uri("db"), "--size", "16m"]);
    pool.stdout_of_success(&[
        "volume",
        "create",
        &pool.volume_uri("sums"),
        "--size",
        "4m",
        "--checksums",
    ]);
    let source = pool.write("source", 4 * MIB, 3);
    pool.stdout_of_success(&["copy", &pool.file_uri("source"), &pool.volume_uri("sums")]);
    let server = PoolServer::start(&pool, "db");
    let words = ["perf", &server.uri, "-w", "randrw", "-t", "8", "--verify", "--overwrite"];
    let mut load = pool.command(&words);
    let load = load.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let began = Instant::now();
    let mut rounds = 0;
    while began.elapsed() < Duration::from_secs(6) {
        let (snapshot, clone) = (format!("s{rounds}"), format!("c{rounds}"));
        pool.stdout_of_success(&["volume", "snapshot", &pool.volume_uri("db"), &snapshot]);
        pool.stdout_of_success(&["volume", "clone", &pool.volume_uri(&snapshot), &clone]);
        if rounds % 4 == 0 {
            let found =
                parsed(&pool.stdout_of_success(&["pool", "scrub", &pool.device_uri(), "--json"]));
            assert_eq!(found["clean"], true, "{found}");
        }
        pool.stdout_of_success(&["volume", "delete", &pool.volume_uri(&clone)]);
        pool.stdout_of_success(&["volume", "delete", &pool.volume_uri(&snapshot)]);
        rounds += 1;
    }
    let output = load.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "after {rounds} rounds: {said}{errors}");
    assert!(rounds >= 2, "{rounds}");
    server.stop_with_sigterm();
    assert!(pool.is_clean());
    assert_eq!(volume_names_of_pool(&pool), ["db", "sums"]);
    assert!(pool.volume_bytes("sums") == source);
}

#[test]
fn server_killed_during_commands_leaves_a_clean_pool() {
    let pool = PoolTestDirectory::new("128m");
    let source = pool.write("source", 4 * MIB, 4);
    for name in ["db", "kept"] {
        pool.stdout_of_success(&["volume", "create", &pool.volume_uri(name), "--size", "4m"]);
    }
    // Ends with a flush.
    pool.stdout_of_success(&["copy", &pool.file_uri("source"), &pool.volume_uri("kept")]);
    for round in 0..4 {
        let server = PoolServer::start(&pool, "db");
        let pid = server.pid();
        std::thread::scope(|scope| {
            let kill = scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(150 + 130 * round));
                drop(server);
            });
            let mut step = 0;
            while !kill.is_finished() {
                let name = format!("s{round}-{step}");
                // A command that was done, or was lost with the server, may be repeated.
                for words in [
                    ["volume", "snapshot", &pool.volume_uri("kept"), &name],
                    ["volume", "clone", &pool.volume_uri(&name), &format!("{name}-c")],
                    ["volume", "delete", &pool.volume_uri(&format!("{name}-c")), "--json"],
                ] {
                    let output = pool.run(&words);
                    let error = String::from_utf8_lossy(&output.stderr);
                    let is_lost = error.contains(&format!("process {pid}"))
                        || error.contains("there is none");
                    assert!(output.status.success() || is_lost, "{words:?}: {error}");
                }
                step += 1;
            }
            kill.join().unwrap();
        });
        assert!(pool.is_clean(), "round {round}");
        let name = format!("s{round}-0");
        pool.stdout_of_success(&["volume", "snapshot", &pool.volume_uri("kept"), &name]);
        assert!(pool.volume_bytes(&name) == source, "round {round}");
    }
    assert!(pool.volume_bytes("kept") == source);
}

/// A load that verifies what it reads, for so many seconds, beside what a test does.
fn load(pool: &PoolTestDirectory, server: &PoolServer, seconds: &str) -> Child {
    let words = ["perf", &server.uri, "-w", "randrw", "-t", seconds, "--verify", "--overwrite"];
    let mut load = pool.command(&words);
    load.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// It has found nothing wrong.
fn assert_load_found_no_error(load: Child) {
    let output = load.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}{errors}");
}

#[test]
fn snapshot_differences_are_listed_while_the_volume_is_written() {
    let pool = PoolTestDirectory::new("512m");
    create_volume(&pool, "40m");
    let server = PoolServer::start(&pool, "db");
    pool.stdout_of_success(&["volume", "snapshot", &pool.volume_uri("db"), "a"]);
    assert_load_found_no_error(load(&pool, &server, "3"));
    pool.stdout_of_success(&["volume", "snapshot", &pool.volume_uri("db"), "b"]);
    let load = load(&pool, &server, "4");
    let by = format!("by process {} (", server.pid());
    let diff = |b: &str| ["volume".into(), "diff".into(), pool.volume_uri("a"), b.to_owned()];
    let diff = |b: &str, json: &[&'static str]| {
        let words = diff(b);
        let words: Vec<&str> =
            words.iter().map(String::as_str).chain(json.iter().copied()).collect();
        pool.run(&words)
    };
    let text = |output: &Output| String::from_utf8(output.stdout.clone()).unwrap();
    let there = text(&diff("b", &[]));
    let mut there_json = parsed(&text(&diff("b", &["--json"])));
    let none = diff("none", &[]);
    assert_load_found_no_error(load);
    assert!(there.contains(&by) && there.ends_with("which has the pool open\n"), "{there}");
    assert_eq!(there_json["process"], server.pid());
    let ranges = there_json["changed"].as_array().unwrap().len();
    server.stop_with_sigterm();
    let here = text(&diff("b", &[]));
    let (there, _) = there.rsplit_once("by process").unwrap();
    assert!(here.lines().count() == ranges + 2 && here == there, "{ranges}");
    there_json["process"] = Value::Null;
    assert_eq!(parsed(&text(&diff("b", &["--json"]))), there_json);
    let alone = diff("none", &[]);
    assert_eq!((none.status.code(), none.stderr), (alone.status.code(), alone.stderr));
}

/// Waits until the last job is in another state than `running`, or in it.
fn wait_for_job_state(server: &PoolServer, pool: &PoolTestDirectory, is_running: bool) -> Value {
    let until = Instant::now() + Duration::from_secs(30);
    loop {
        let rows = parsed(&pool.stdout_of_success(&[
            "get",
            "jobs",
            "--json",
            "--pid",
            &server.pid().to_string(),
        ]));
        let last = rows.as_array().unwrap().last().cloned().unwrap_or_default();
        if !last.is_null() && (last["state"] == "running") == is_running {
            return last;
        }
        assert!(Instant::now() < until, "{rows}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn stopped_or_abandoned_scrub_ends_in_the_serving_process() {
    let pool = PoolTestDirectory::new("64m");
    pool.stdout_of_success(&["volume", "create", &pool.volume_uri("db"), "--size", "8m"]);
    pool.write("source", 8 * MIB, 5);
    pool.stdout_of_success(&["copy", &pool.file_uri("source"), &pool.volume_uri("db")]);
    let server = PoolServer::start(&pool, "db");
    let scrub = || {
        let words = ["pool", "scrub", &pool.device_uri(), "--limit-bytes", "1m"];
        let mut scrub = pool.command(&words);
        scrub.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let stopped = scrub();
    wait_for_job_state(&server, &pool, true);
    signal(stopped.id(), "INT");
    let output = stopped.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", String::from_utf8_lossy(&output.stderr));
    let found = wait_for_job_state(&server, &pool, false);
    assert_eq!((&found["state"], &found["what"]), (&"stopped".into(), &"scrub".into()));

    let mut left = scrub();
    assert_ne!(wait_for_job_state(&server, &pool, true)["id"], found["id"]);
    left.kill().unwrap();
    left.wait().unwrap();
    std::thread::sleep(Duration::from_secs(6));
    assert_eq!(
        wait_for_job_state(&server, &pool, false)["state"],
        "stopped",
        "the client of the job is gone"
    );

    let mut running = scrub();
    wait_for_job_state(&server, &pool, true);
    let began = Instant::now();
    server.stop_with_sigterm();
    assert!(began.elapsed() < Duration::from_secs(5), "it goes whatever it does");
    assert_ne!(running.wait().unwrap().code(), Some(0));
    assert!(pool.is_clean());
}

#[test]
fn unresponsive_pool_owner_is_named_with_the_fix() {
    let pool = PoolTestDirectory::new("64m");
    pool.stdout_of_success(&["volume", "create", &pool.volume_uri("db"), "--size", "4m"]);
    let server = PoolServer::start(&pool, "db");
    let pid = server.pid();
    server.signal("STOP");
    let began = Instant::now();
    let (code, error) = pool.exit_code_and_stderr(&["volume", "list", &pool.device_uri()]);
    server.signal("CONT");
    assert!(began.elapsed() < Duration::from_secs(20));
    assert_eq!(code, Some(3), "{error}");
    for expected in [&format!("process {pid} ("), "within", &format!("`kill {pid}`")] {
        assert!(error.contains(expected), "{expected}: {error}");
    }
    assert_eq!(volume_names_of_pool(&pool), ["db"]);
    // One that has the device for something else.
    server.stop_with_sigterm();
    let words = ["serve", &pool.device_uri(), "--listen", "tcp://127.0.0.1:0"];
    let mut other = pool.command(&words).stdout(Stdio::piped()).spawn().unwrap();
    let mut ready = String::new();
    BufReader::new(other.stdout.as_mut().unwrap()).read_line(&mut ready).unwrap();
    let (code, error) = pool.exit_code_and_stderr(&["volume", "list", &pool.device_uri()]);
    let (_, twice) = pool.exit_code_and_stderr(&["pool", "scrub", &pool.device_uri()]);
    other.kill().unwrap();
    other.wait().unwrap();
    let expected =
        format!("Process {} has it open, but does not accept commands for this pool", other.id());
    assert!(code == Some(2) && error.contains(&expected), "{code:?} {error}");
    assert!(twice.contains(&expected), "{twice}");
    if !are_tools_installed(&["flock"]) {
        return;
    }
    let path = pool.path("pool");
    let mut locker = Command::new("flock");
    let mut locker = locker.args(["-x", path.to_str().unwrap(), "cat"]);
    locker = locker.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut locker = locker.spawn().unwrap();
    let until = Instant::now() + Duration::from_secs(30);
    let error = loop {
        let output = pool.run(&["volume", "list", &pool.device_uri()]);
        if !output.status.success() {
            break String::from_utf8(output.stderr).unwrap();
        }
        assert!(Instant::now() < until, "it is locked");
    };
    drop(locker.stdin.take());
    locker.wait().unwrap();
    assert!(error.contains(&format!("process {} (", locker.id())), "{error}");
}

/// What a command has said on standard error.
fn stderr_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn pool_under_load_is_checked_at_a_commit_and_damage_is_reported() {
    let pool = PoolTestDirectory::new("512m");
    create_volume(&pool, "24m");
    let server = PoolServer::start(&pool, "db");
    let load = load(&pool, &server, "6");
    let check = || pool.run(&["pool", "check", &pool.device_uri(), "--json"]);
    let (began, mut rounds) = (Instant::now(), 0);
    let mut generations = Vec::new();
    while began.elapsed() < Duration::from_secs(5) {
        let name = format!("s{rounds}");
        pool.stdout_of_success(&["volume", "snapshot", &pool.volume_uri("db"), &name]);
        let found = parsed(&String::from_utf8(check().stdout).unwrap());
        assert_eq!((&found["clean"], &found["process"]), (&true.into(), &server.pid().into()));
        assert_eq!(found["volumes"], rounds + 2, "{found}");
        generations.push(found["generation"].as_u64().unwrap());
        rounds += 1;
    }
    assert!(rounds >= 2 && generations.is_sorted_by(|a, b| a < b), "{generations:?}");
    assert_load_found_no_error(load);
    let text = pool.stdout_of_success(&["pool", "check", &pool.device_uri()]);
    assert!(text.contains("clean; generation") && text.ends_with("which has the pool open\n"));

    // Every block of metadata but the superblocks.
    let file = std::fs::File::options().read(true).write(true).open(pool.path("pool")).unwrap();
    let blocks = file.metadata().unwrap().len() / 4096;
    let mut head = [0; 101];
    for block in 2..blocks - 2 {
        file.read_exact_at(&mut head, block * 4096).unwrap();
        if head[8..16] == *b"tenmilVS" {
            file.write_all_at(&[head[100] ^ 1], block * 4096 + 100).unwrap();
        }
    }
    let there = check();
    let stopped = pool.run(&["pool", "check", &pool.device_uri()]);
    server.stop_with_sigterm();
    let here = check();
    let found = [&there, &here].map(|output| parsed(&String::from_utf8_lossy(&output.stdout)));
    assert_eq!([there.status.code(), here.status.code(), stopped.status.code()], [Some(3); 3]);
    assert!(!found[0]["problems"].as_array().unwrap().is_empty());
    assert_eq!(found[0]["problems"], found[1]["problems"]);
    assert_eq!(found[1]["process"], Value::Null);
}

#[test]
fn relocated_device_is_found_again_and_rescue_requires_a_closed_pool() {
    let pool = PoolTestDirectory::new("64m");
    pool.stdout_of_success(&["volume", "create", &pool.volume_uri("db"), "--size", "4m"]);
    pool.stdout_of_success(&["pool", "grow", "file:pool", "--add", "file:more?size=16m"]);
    let server = PoolServer::start(&pool, "db");
    std::fs::copy(pool.path("more"), pool.path("copy")).unwrap();
    std::fs::rename(pool.path("more"), pool.path("moved")).unwrap();
    let set = |number: &str, name: &str| {
        let place = format!("{number}={}", pool.file_uri(name));
        pool.run(&["pool", "set", "file:pool", "--device", &place])
    };
    let by = format!("by process {} (", server.pid());
    for already in ["", " already"] {
        let said = String::from_utf8(set("1", "moved").stdout).unwrap();
        let expected = format!(
            "device 1 of pool `pool` is at {}{already}\n{by}",
            pool.file_path_text("moved")
        );
        assert!(said.starts_with(&expected), "{said}");
    }
    let place = format!("1={}", pool.file_uri("moved"));
    let words = ["pool", "set", "file:pool", "--device", &place, "--json"];
    let reported = parsed(&pool.stdout_of_success(&words));
    assert_eq!((&reported["changed"], &reported["process"]), (&false.into(), &server.pid().into()));
    assert_eq!(reported["devices"][1]["uri"], pool.file_uri("moved"));
    for name in ["copy", "none"] {
        let refused = set("1", name);
        let error = stderr_of(&refused);
        assert!(
            refused.status.code() == Some(2) && error.contains("is not device 1 of it"),
            "{error}"
        );
    }
    let unknown = set("5", "moved");

    let other = PoolTestDirectory::new("64m");
    for (source, target, remedy) in [
        (pool.device_uri(), other.device_uri(), "`send` and `receive`"),
        (other.device_uri(), pool.device_uri(), "rescue into another pool"),
    ] {
        let (code, error) = pool.exit_code_and_stderr(&["pool", "rescue", &source, &target]);
        let found = format!("is open in process {} (", server.pid());
        assert!(code == Some(2) && error.contains(&found) && error.contains(remedy), "{error}");
    }
    server.stop_with_sigterm();
    let reported = parsed(&pool.stdout_of_success(&words));
    assert_eq!((&reported["changed"], &reported["process"]), (&false.into(), &Value::Null));
    let alone = set("5", "moved");
    assert_eq!(unknown.status.code(), alone.status.code());
    let errors = [&unknown, &alone].map(stderr_of);
    assert!(errors[0] == errors[1] && errors[0].contains("no device 5"), "{errors:?}");
    assert!(pool.is_clean());
}
