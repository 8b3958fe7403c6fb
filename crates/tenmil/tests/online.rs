//! `tenmil store` and `tenmil volume` on a store that another process serves.

#![expect(clippy::unwrap_used, reason = "a test may")]
#![allow(clippy::disallowed_methods, reason = "it waits for processes")]

mod pool;
#[expect(dead_code, reason = "this test uses a part of it")]
mod served;

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use pool::{MIB, Pool};
use serde_json::{Value, json};
use served::tools;

/// A process that serves a volume over NVMe/TCP, and can be asked by those who use the pool. Dropping it
/// kills it.
struct Server {
    child: Child,
    uri: String,
}

impl Server {
    fn start(pool: &Pool, volume: &str) -> Self {
        let words = ["serve", &pool.volume(volume), "--listen", "tcp://127.0.0.1:0", "--json"];
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
    fn end(mut self) {
        self.signal("TERM");
        let status = self.child.wait().unwrap();
        assert_eq!(status.code(), Some(0));
    }
}

impl Drop for Server {
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

fn names(pool: &Pool) -> Vec<String> {
    let listed = parsed(&pool.done(&["volume", "list", &pool.device(), "--json"]));
    let name = |one: &Value| one["name"].as_str().unwrap().to_owned();
    listed["volumes"].as_array().unwrap().iter().map(name).collect()
}

#[test]
fn every_verb_is_done_by_the_process_that_serves_the_store_and_says_so() {
    let pool = Pool::new("64m");
    pool.done(&["volume", "create", &pool.volume("db"), "--size", "4m"]);
    std::os::unix::fs::symlink(pool.path("pool"), pool.path("link")).unwrap();
    let server = Server::start(&pool, "db");
    let by = format!("by process {} (", server.pid());
    // However its device is spelled: what counts is which file it is.
    let volume = |name: &str| format!("volume:[file:link?engine=threads]/{name}");
    let (db, monday, trial, next) =
        (volume("db"), volume("monday"), pool.volume("trial"), volume("next"));
    for (words, name) in [
        (vec!["snapshot", &db, "monday"], "monday"),
        (vec!["clone", &monday, "trial"], "trial"),
        (vec!["rename", &trial, "next"], "next"),
        (vec!["resize", &next, "--size", "8m"], "next"),
        (vec!["inflate", &next], "next"),
        (vec!["decouple", &next], "next"),
        (vec!["revert", &next, "friday"], "next"),
        (vec!["create", &trial, "--size", "2m", "--thick"], "trial"),
    ] {
        if words[0] == "revert" {
            pool.done(&["volume", "snapshot", &next, "friday"]);
            pool.done(&["volume", "resize", &next, "--size", "16m"]);
        }
        let words = [&["volume"], &words[..]].concat();
        let text = pool.done(&words);
        assert!(text.contains(&by) && text.ends_with("has the store open\n"), "{words:?}: {text}");
        let told = parsed(&pool.done(&[&words[..], &["--json"]].concat()));
        assert_eq!((&told["changed"], &told["process"]), (&false.into(), &server.pid().into()));
        assert_eq!(told["volume"]["name"], name, "{words:?}");
    }
    for is_changed in [true, false] {
        let told = parsed(&pool.done(&["volume", "delete", &trial, "--json"]));
        assert_eq!((&told["changed"], &told["volume"]), (&is_changed.into(), &Value::Null));
    }
    assert_eq!(names(&pool), ["db", "monday", "next", "friday"]);
    let list = pool.done(&["volume", "list", &pool.device()]);
    assert!(list.contains("snapshot of db") && list.contains(&by), "{list}");
    let found = parsed(&pool.done(&["volume", "list", &pool.device(), "--json"]));
    assert_eq!(
        (&found["volumes"][0]["users"], &found["volumes"][1]["users"]),
        (&1.into(), &0.into())
    );
    for words in [vec!["open", "file:link"], vec!["set", "file:pool", "--thresholds", "60"]] {
        let told = parsed(&pool.done(&[&["store"], &words[..], &["--json"]].concat()));
        assert_eq!(told["process"], server.pid(), "{words:?}: {told}");
    }
    // A device more, named from where whoever adds it stands.
    let grow = ["store", "grow", "file:link", "--add", "file:more?size=16m"];
    let told = pool.done(&grow);
    assert!(told.contains("now, and had 64 MiB\n  device 0: ") && told.contains(&by), "{told}");
    let again = parsed(&pool.done(&[&grow[..], &["--json"]].concat()));
    assert_eq!((&again["changed"], &again["process"]), (&false.into(), &server.pid().into()));
    assert_eq!(again["devices"].as_array().unwrap().len(), 2, "{again}");
    assert!(again["size_bytes"].as_u64().unwrap() > 79 << 20, "{again}");
    let told = pool.done(&["store", "list", &pool.device()]);
    assert!(told.contains(&format!("(open in process {})", server.pid())), "{told}");
    let scrubbed = parsed(&pool.done(&["store", "scrub", &pool.device(), "--json"]));
    assert_eq!((&scrubbed["clean"], &scrubbed["process"]), (&true.into(), &server.pid().into()));

    // What cannot be is refused as it is where nobody serves it.
    let cases = [
        vec!["volume", "delete", &monday],
        vec!["volume", "snapshot", &db, "next"],
        vec!["volume", "rename", &trial, "other"],
        vec!["volume", "resize", &next, "--size", "4k"],
        vec!["volume", "revert", &next, "monday"],
        vec!["volume", "inflate", &monday],
        vec!["volume", "create", &trial, "--size", "1000"],
        vec!["store", "set", "file:link", "--thresholds", "90,80"],
    ];
    // The device has the name by which whoever has the store open has opened it.
    let plain = |(code, text): (Option<i32>, String)| {
        let text = text.replace("file:link?engine=threads", &pool.device());
        (code, text.replace("file:link", &pool.device()))
    };
    pool.done(&["volume", "clone", &monday, "child"]);
    let there: Vec<_> = cases.iter().map(|words| plain(pool.refused(words))).collect();
    pool.done(&["volume", "resize", &db, "--size", "8m"]);
    for words in [vec!["volume", "delete", &db], vec!["volume", "revert", &db, "monday"]] {
        let (code, text) = pool.refused(&words);
        let expected = format!("it is open in process {}", server.pid());
        assert!(code == Some(2) && text.contains(&expected), "{words:?}: {code:?} {text}");
    }
    server.end();
    for (words, there) in cases.iter().zip(&there) {
        assert!(there.0.is_some_and(|code| code != 0), "{words:?}");
        assert_eq!(&plain(pool.refused(words)), there, "{words:?}");
    }
    assert!(pool.is_clean());
    assert_eq!(names(&pool), ["db", "monday", "next", "friday", "child"]);
}

#[test]
fn a_load_loses_nothing_while_its_store_is_snapshot_cloned_scrubbed_and_emptied() {
    let pool = Pool::new("512m");
    pool.done(&["volume", "create", &pool.volume("db"), "--size", "16m"]);
    pool.done(&["volume", "create", &pool.volume("sums"), "--size", "4m", "--checksums"]);
    let source = pool.write("source", 4 * MIB, 3);
    pool.done(&["copy", &pool.file("source"), &pool.volume("sums")]);
    let server = Server::start(&pool, "db");
    let words = ["perf", &server.uri, "-w", "randrw", "-t", "8", "--verify", "--overwrite"];
    let mut load = pool.command(&words);
    let load = load.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let began = Instant::now();
    let mut rounds = 0;
    while began.elapsed() < Duration::from_secs(6) {
        let (snapshot, clone) = (format!("s{rounds}"), format!("c{rounds}"));
        pool.done(&["volume", "snapshot", &pool.volume("db"), &snapshot]);
        pool.done(&["volume", "clone", &pool.volume(&snapshot), &clone]);
        if rounds % 4 == 0 {
            let found = parsed(&pool.done(&["store", "scrub", &pool.device(), "--json"]));
            assert_eq!(found["clean"], true, "{found}");
        }
        pool.done(&["volume", "delete", &pool.volume(&clone)]);
        pool.done(&["volume", "delete", &pool.volume(&snapshot)]);
        rounds += 1;
    }
    let output = load.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "after {rounds} rounds: {said}{errors}");
    assert!(rounds >= 2, "{rounds}");
    server.end();
    assert!(pool.is_clean());
    assert_eq!(names(&pool), ["db", "sums"]);
    assert!(pool.bytes("sums") == source);
}

#[test]
fn a_server_that_is_killed_in_the_middle_of_verbs_leaves_a_clean_store() {
    let pool = Pool::new("128m");
    let source = pool.write("source", 4 * MIB, 4);
    for name in ["db", "kept"] {
        pool.done(&["volume", "create", &pool.volume(name), "--size", "4m"]);
    }
    // Ends with a flush.
    pool.done(&["copy", &pool.file("source"), &pool.volume("kept")]);
    for round in 0..4 {
        let server = Server::start(&pool, "db");
        let pid = server.pid();
        std::thread::scope(|scope| {
            let kill = scope.spawn(move || {
                std::thread::sleep(Duration::from_millis(150 + 130 * round));
                drop(server);
            });
            let mut step = 0;
            while !kill.is_finished() {
                let name = format!("s{round}-{step}");
                // Whether it was done, or nobody was there any more to do it, it may be said again.
                for words in [
                    ["volume", "snapshot", &pool.volume("kept"), &name],
                    ["volume", "clone", &pool.volume(&name), &format!("{name}-c")],
                    ["volume", "delete", &pool.volume(&format!("{name}-c")), "--json"],
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
        pool.done(&["volume", "snapshot", &pool.volume("kept"), &name]);
        assert!(pool.bytes(&name) == source, "round {round}");
    }
    assert!(pool.bytes("kept") == source);
}

/// A load that verifies what it reads, for so many seconds, beside what a test does.
fn load(pool: &Pool, server: &Server, seconds: &str) -> Child {
    let words = ["perf", &server.uri, "-w", "randrw", "-t", seconds, "--verify", "--overwrite"];
    let mut load = pool.command(&words);
    load.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// It has found nothing wrong.
fn is_content(load: Child) {
    let output = load.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}{errors}");
}

#[test]
fn what_snapshots_differ_by_is_told_while_their_volume_is_written() {
    let pool = Pool::new("512m");
    pool.done(&["volume", "create", &pool.volume("db"), "--size", "40m", "--unit", "4k"]);
    let server = Server::start(&pool, "db");
    pool.done(&["volume", "snapshot", &pool.volume("db"), "a"]);
    is_content(load(&pool, &server, "3"));
    pool.done(&["volume", "snapshot", &pool.volume("db"), "b"]);
    let load = load(&pool, &server, "4");
    let by = format!("by process {} (", server.pid());
    let diff = |b: &str| ["volume".into(), "diff".into(), pool.volume("a"), b.to_owned()];
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
    is_content(load);
    assert!(there.contains(&by) && there.ends_with("which has the store open\n"), "{there}");
    assert_eq!(there_json["process"], server.pid());
    let ranges = there_json["changed"].as_array().unwrap().len();
    server.end();
    let here = text(&diff("b", &[]));
    let (there, _) = there.rsplit_once("by process").unwrap();
    assert!(here.lines().count() == ranges + 2 && here == there, "{ranges}");
    there_json["process"] = Value::Null;
    assert_eq!(parsed(&text(&diff("b", &["--json"]))), there_json);
    let alone = diff("none", &[]);
    assert_eq!((none.status.code(), none.stderr), (alone.status.code(), alone.stderr));
}

/// Waits until the last job is in another state than `running`, or in it.
fn job(server: &Server, pool: &Pool, is_running: bool) -> Value {
    let until = Instant::now() + Duration::from_secs(30);
    loop {
        let rows =
            parsed(&pool.done(&["get", "jobs", "--json", "--pid", &server.pid().to_string()]));
        let last = rows.as_array().unwrap().last().cloned().unwrap_or_default();
        if !last.is_null() && (last["state"] == "running") == is_running {
            return last;
        }
        assert!(Instant::now() < until, "{rows}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

#[test]
fn a_scrub_that_is_stopped_or_left_alone_ends_in_the_process_that_does_it() {
    let pool = Pool::new("64m");
    pool.done(&["volume", "create", &pool.volume("db"), "--size", "8m"]);
    pool.write("source", 8 * MIB, 5);
    pool.done(&["copy", &pool.file("source"), &pool.volume("db")]);
    let server = Server::start(&pool, "db");
    let scrub = || {
        let words = ["store", "scrub", &pool.device(), "--rate", "1m"];
        let mut scrub = pool.command(&words);
        scrub.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let stopped = scrub();
    job(&server, &pool, true);
    signal(stopped.id(), "INT");
    let output = stopped.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{}", String::from_utf8_lossy(&output.stderr));
    let found = job(&server, &pool, false);
    assert_eq!((&found["state"], &found["what"]), (&"stopped".into(), &"scrub".into()));

    let mut left = scrub();
    assert_ne!(job(&server, &pool, true)["id"], found["id"]);
    left.kill().unwrap();
    left.wait().unwrap();
    std::thread::sleep(Duration::from_secs(6));
    assert_eq!(job(&server, &pool, false)["state"], "stopped", "nobody asks about it any more");

    let mut running = scrub();
    job(&server, &pool, true);
    let began = Instant::now();
    server.end();
    assert!(began.elapsed() < Duration::from_secs(5), "it goes whatever it does");
    assert_ne!(running.wait().unwrap().code(), Some(0));
    assert!(pool.is_clean());
}

#[test]
fn whoever_holds_a_store_and_does_not_answer_is_named_with_the_remedy() {
    let pool = Pool::new("64m");
    pool.done(&["volume", "create", &pool.volume("db"), "--size", "4m"]);
    let server = Server::start(&pool, "db");
    let pid = server.pid();
    server.signal("STOP");
    let began = Instant::now();
    let (code, error) = pool.refused(&["volume", "list", &pool.device()]);
    server.signal("CONT");
    assert!(began.elapsed() < Duration::from_secs(20));
    assert_eq!(code, Some(3), "{error}");
    for expected in [&format!("process {pid} ("), "within", &format!("`kill {pid}`")] {
        assert!(error.contains(expected), "{expected}: {error}");
    }
    assert_eq!(names(&pool), ["db"]);
    // One that has the device for something else.
    server.end();
    let words = ["serve", &pool.device(), "--listen", "tcp://127.0.0.1:0"];
    let mut other = pool.command(&words).stdout(Stdio::piped()).spawn().unwrap();
    let mut ready = String::new();
    BufReader::new(other.stdout.as_mut().unwrap()).read_line(&mut ready).unwrap();
    let (code, error) = pool.refused(&["volume", "list", &pool.device()]);
    let (_, twice) = pool.refused(&["store", "scrub", &pool.device()]);
    other.kill().unwrap();
    other.wait().unwrap();
    let expected = format!("Process {} has it open, but not this store", other.id());
    assert!(code == Some(2) && error.contains(&expected), "{code:?} {error}");
    assert!(twice.contains(&expected), "{twice}");
    if !tools(&["flock"]) {
        return;
    }
    let path = pool.path("pool");
    let mut locker = Command::new("flock");
    let mut locker = locker.args(["-x", path.to_str().unwrap(), "cat"]);
    locker = locker.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut locker = locker.spawn().unwrap();
    let until = Instant::now() + Duration::from_secs(30);
    let error = loop {
        let output = pool.run(&["volume", "list", &pool.device()]);
        if !output.status.success() {
            break String::from_utf8(output.stderr).unwrap();
        }
        assert!(Instant::now() < until, "it is locked");
    };
    drop(locker.stdin.take());
    locker.wait().unwrap();
    assert!(error.contains(&format!("process {} (", locker.id())), "{error}");
}

/// A command whose standard input and output go to and from files of the pool.
fn through(pool: &Pool, words: &[&str], input: Option<&str>, output: Option<&str>) -> Output {
    let mut command = pool.command(words);
    if let Some(name) = input {
        command.stdin(std::fs::File::open(pool.path(name)).unwrap());
    }
    if let Some(name) = output {
        command.stdout(std::fs::File::create(pool.path(name)).unwrap());
    }
    command.output().unwrap()
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn snapshots_go_from_a_store_under_load_to_another_one_under_load() {
    let (source, target) = (Pool::new("512m"), Pool::new("512m"));
    for pool in [&source, &target] {
        pool.done(&["volume", "create", &pool.volume("db"), "--size", "24m", "--unit", "4k"]);
    }
    let (from, to) = (Server::start(&source, "db"), Server::start(&target, "db"));
    is_content(load(&source, &from, "2"));
    let loads = [load(&source, &from, "8"), load(&target, &to, "8")];
    for (name, base) in [("first", None), ("second", Some("first"))] {
        source.done(&["volume", "snapshot", &source.volume("db"), name]);
        let snapshot = source.volume(name);
        let mut words = vec!["volume", "send", &snapshot, "--json"];
        words.extend(base.iter().flat_map(|base| ["--from", base]));
        let sent = through(&source, &words, None, Some("stream"));
        assert_eq!(sent.status.code(), Some(0), "{}", errors(&sent));
        let sent = parsed(&errors(&sent));
        assert_eq!((&sent["process"], &sent["name"]), (&from.pid().into(), &name.into()));
        assert!(sent["data_bytes"].as_u64().unwrap() > 0 && sent["base"] == json!(base), "{sent}");
        std::fs::rename(source.path("stream"), target.path("stream")).unwrap();
        for was_there in [false, true] {
            let words = ["volume", "receive", &target.volume(name), "--json"];
            let received = through(&target, &words, Some("stream"), None);
            assert_eq!(received.status.code(), Some(0), "{}", errors(&received));
            let received = parsed(&String::from_utf8(received.stdout).unwrap());
            assert_eq!(received["process"], to.pid());
            assert_eq!(
                (&received["was_there"], &received["uuid"]),
                (&was_there.into(), &sent["uuid"])
            );
        }
    }
    loads.into_iter().for_each(is_content);
    assert_eq!(names(&target), ["db", "first", "second"]);
    let users = |pool: &Pool| ["first", "second"].map(|name| pool.listed(name)["users"].clone());
    assert_eq!([users(&source), users(&target)], [[0, 0], [0, 0]].map(|all| all.map(Value::from)));
    from.end();
    to.end();
    for name in ["first", "second"] {
        assert!(source.bytes(name) == target.bytes(name), "{name}");
    }
    assert!(source.is_clean() && target.is_clean());
}

/// A store with a snapshot of 32 MiB of which 24 are written, that is served, and its bytes.
fn snapshot() -> (Pool, Server, Vec<u8>) {
    let pool = Pool::new("256m");
    pool.done(&["volume", "create", &pool.volume("db"), "--size", "32m"]);
    let bytes = pool.write("source", 32 * MIB, 6);
    pool.done(&["copy", &pool.file("source"), &pool.volume("db")]);
    pool.done(&["volume", "snapshot", &pool.volume("db"), "monday"]);
    pool.done(&["volume", "create", &pool.volume("other"), "--size", "4m"]);
    let server = Server::start(&pool, "other");
    (pool, server, bytes)
}

#[test]
fn a_stream_that_nobody_reads_any_more_ends_and_gives_its_snapshot_back() {
    let (pool, server, _) = snapshot();
    let monday = pool.volume("monday");
    let words = ["volume", "send", &monday];
    let send = || {
        let mut send = pool.command(&words);
        let send = send.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        assert_eq!(job(&server, &pool, true)["what"], "send");
        send
    };
    // As long as somebody is there who wants it, it waits for him, and nobody takes the snapshot away.
    let mut stalled = send();
    std::thread::sleep(Duration::from_secs(6));
    assert_eq!(job(&server, &pool, true)["volume"], "monday");
    let (code, text) = pool.refused(&["volume", "delete", &monday]);
    assert!(code == Some(2) && text.contains("whoever has it open would lose it"), "{text}");
    drop(stalled.stdout.take());
    let output = stalled.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", errors(&output));
    assert!(errors(&output).contains("write the stream: Broken pipe"), "{}", errors(&output));
    assert_eq!(job(&server, &pool, false)["state"], "refused");

    for name in ["INT", "KILL", "STOP"] {
        let mut send = send();
        signal(send.id(), name);
        let began = Instant::now();
        assert_ne!(job(&server, &pool, false)["state"], "done", "{name}");
        assert!(began.elapsed() < Duration::from_secs(10), "{name}: {:?}", began.elapsed());
        send.kill().unwrap();
        assert_eq!(send.wait().unwrap().code(), None, "{name} ends it, as where nobody serves");
    }
    let stopped = send();
    let id = job(&server, &pool, true)["id"].to_string();
    pool.done(&["set", "job", &format!("id={id}"), "stop=true"]);
    assert_eq!(job(&server, &pool, false)["state"], "stopped");
    let output = stopped.wait_with_output().unwrap();
    assert!(errors(&output).contains("nobody wants it any more"), "{}", errors(&output));
    assert_eq!(pool.listed("monday")["users"], 0);

    let left = send();
    let began = Instant::now();
    let pid = server.pid();
    server.end();
    assert!(began.elapsed() < Duration::from_secs(5), "it goes whatever it does");
    let output = left.wait_with_output().unwrap();
    let error = errors(&output);
    assert!(
        output.status.code() == Some(3) && error.contains(&format!("process {pid}")),
        "{error}"
    );
    pool.done(&["volume", "delete", &monday]);
    assert!(pool.is_clean());
}

#[test]
fn what_cannot_be_sent_or_received_is_refused_as_where_nobody_serves() {
    let (pool, server, _) = snapshot();
    pool.done(&["volume", "snapshot", &pool.volume("db"), "tuesday"]);
    let [monday, other, none, taken] =
        ["monday", "other", "none", "db"].map(|name| pool.volume(name));
    let tuesday = pool.volume("tuesday");
    let words = ["volume", "send", &tuesday, "--from", "monday"];
    assert!(through(&pool, &words, None, Some("rest")).status.success());
    assert!(through(&pool, &["volume", "send", &monday], None, Some("whole")).status.success());
    std::fs::write(pool.path("wrong"), [7; 5000]).unwrap();
    std::fs::File::options()
        .write(true)
        .open(pool.path("whole"))
        .unwrap()
        .set_len(9 << 20)
        .unwrap();
    pool.done(&["volume", "delete", &monday]);
    let all = || {
        let send =
            |words: &[&str]| through(&pool, &[&["volume", "send"], words].concat(), None, None);
        let receive =
            |name: &str, input| through(&pool, &["volume", "receive", name], Some(input), None);
        let outputs = [
            send(&[&other]),
            send(&[&none]),
            send(&[&tuesday, "--from", "none"]),
            receive(&none, "wrong"),
            receive(&none, "whole"),
            receive(&none, "rest"),
            receive(&taken, "rest"),
        ];
        outputs.map(|output| (output.status.code(), errors(&output)))
    };
    let there = all();
    assert_eq!(names(&pool), ["db", "other", "tuesday"], "nothing is left of what was cut");
    server.end();
    for (there, here) in there.iter().zip(&all()) {
        assert!(here.0.is_some_and(|code| code > 0), "{here:?}");
        assert_eq!(there, here);
    }
    assert!(pool.is_clean());
}

#[test]
fn a_receive_that_is_killed_leaves_nothing_and_only_one_at_a_time_is_done() {
    let (pool, server, bytes) = snapshot();
    let monday = pool.volume("monday");
    assert!(through(&pool, &["volume", "send", &monday], None, Some("whole")).status.success());
    let whole = std::fs::read(pool.path("whole")).unwrap();
    pool.done(&["volume", "delete", &monday]);
    let words = ["volume", "receive", &monday];
    let begin = || {
        let mut receive = pool.command(&words);
        let mut receive = receive.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // Half of it, and then nothing.
        receive.stdin.as_mut().unwrap().write_all(&whole[..whole.len() / 2]).unwrap();
        receive
    };
    let is_there = |name: &str| names(&pool).iter().any(|one| one == name);
    let until = |is_met: &dyn Fn() -> bool| {
        let until = Instant::now() + Duration::from_secs(10);
        while !is_met() {
            assert!(Instant::now() < until, "{:?}", names(&pool));
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    for name in ["KILL", "INT", "STOP"] {
        let mut first = begin();
        until(&|| is_there("monday.incomplete"));
        let second = through(&pool, &words, Some("whole"), None);
        let error = errors(&second);
        assert!(second.status.code() == Some(2) && error.contains("received already"), "{error}");
        let (_, error) = pool.refused(&["volume", "delete", &pool.volume("monday.incomplete")]);
        assert!(error.contains("it is open in process"), "{error}");
        signal(first.id(), name);
        until(&|| !is_there("monday.incomplete"));
        first.kill().unwrap();
        first.wait().unwrap();
        assert_ne!(job(&server, &pool, false)["state"], "done");
    }
    // One whose name is taken meanwhile is refused, and leaves nothing either.
    let mut first = begin();
    until(&|| is_there("monday.incomplete"));
    pool.done(&["volume", "snapshot", &pool.volume("db"), "monday"]);
    first.stdin.as_mut().unwrap().write_all(&whole[whole.len() / 2..]).unwrap();
    let output = first.wait_with_output().unwrap();
    assert!(errors(&output).contains("`monday`"), "{}", errors(&output));
    assert_eq!(output.status.code(), Some(2));
    assert!(!is_there("monday.incomplete"));
    pool.done(&["volume", "delete", &monday]);

    let received = through(&pool, &words, Some("whole"), None);
    let said = String::from_utf8_lossy(&received.stdout);
    assert!(said.ends_with("which has the store open\n") && said.contains("received\n"), "{said}");
    server.end();
    assert!(pool.bytes("monday") == bytes);

    // What a killed process leaves the next receive replaces.
    pool.done(&["volume", "delete", &monday]);
    let server = Server::start(&pool, "other");
    let mut first = begin();
    until(&|| is_there("monday.incomplete"));
    drop(server);
    assert_ne!(first.wait().unwrap().code(), Some(0));
    assert!(pool.is_clean());
    let server = Server::start(&pool, "other");
    assert!(through(&pool, &words, Some("whole"), None).status.success());
    assert_eq!(names(&pool), ["db", "other", "monday"]);
    server.end();
    assert!(pool.bytes("monday") == bytes && pool.is_clean());
}

#[test]
fn a_store_under_load_is_checked_as_of_a_commit_and_damage_is_told() {
    let pool = Pool::new("512m");
    pool.done(&["volume", "create", &pool.volume("db"), "--size", "24m", "--unit", "4k"]);
    let server = Server::start(&pool, "db");
    let load = load(&pool, &server, "6");
    let check = || pool.run(&["store", "check", &pool.device(), "--json"]);
    let (began, mut rounds) = (Instant::now(), 0);
    let mut generations = Vec::new();
    while began.elapsed() < Duration::from_secs(5) {
        let name = format!("s{rounds}");
        pool.done(&["volume", "snapshot", &pool.volume("db"), &name]);
        let found = parsed(&String::from_utf8(check().stdout).unwrap());
        assert_eq!((&found["clean"], &found["process"]), (&true.into(), &server.pid().into()));
        assert_eq!(found["volumes"], rounds + 2, "{found}");
        generations.push(found["generation"].as_u64().unwrap());
        rounds += 1;
    }
    assert!(rounds >= 2 && generations.is_sorted_by(|a, b| a < b), "{generations:?}");
    is_content(load);
    let text = pool.done(&["store", "check", &pool.device()]);
    assert!(text.contains("clean; generation") && text.ends_with("which has the store open\n"));

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
    let stopped = pool.run(&["store", "check", &pool.device()]);
    server.end();
    let here = check();
    let found = [&there, &here].map(|output| parsed(&String::from_utf8_lossy(&output.stdout)));
    assert_eq!([there.status.code(), here.status.code(), stopped.status.code()], [Some(3); 3]);
    assert!(!found[0]["problems"].as_array().unwrap().is_empty());
    assert_eq!(found[0]["problems"], found[1]["problems"]);
    assert_eq!(found[1]["process"], Value::Null);
}
