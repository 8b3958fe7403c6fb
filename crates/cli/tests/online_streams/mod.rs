//! Snapshots that go out of a store that another process serves, and come into one.

use std::io::Write;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::pool::{MIB, Pool};
use super::{PoolServer, errors, is_content, job, load, names, parsed, signal};

/// A command whose standard input and output go to and from files of the pool.
fn send_through(pool: &Pool, words: &[&str], input: Option<&str>, output: Option<&str>) -> Output {
    let mut command = pool.command(words);
    if let Some(name) = input {
        command.stdin(std::fs::File::open(pool.path(name)).unwrap());
    }
    if let Some(name) = output {
        command.stdout(std::fs::File::create(pool.path(name)).unwrap());
    }
    command.output().unwrap()
}

#[test]
fn snapshots_are_streamed_between_pools_under_load() {
    let (source, target) = (Pool::new("512m"), Pool::new("512m"));
    for pool in [&source, &target] {
        pool.done(&[
            "volume",
            "create",
            &pool.volume("db"),
            "--size",
            "24m",
            "--cluster-size",
            "4k",
        ]);
    }
    let (from, to) = (PoolServer::start(&source, "db"), PoolServer::start(&target, "db"));
    is_content(load(&source, &from, "2"));
    let loads = [load(&source, &from, "8"), load(&target, &to, "8")];
    for (name, base) in [("first", None), ("second", Some("first"))] {
        source.done(&["volume", "snapshot", &source.volume("db"), name]);
        let snapshot = source.volume(name);
        let mut words = vec!["volume", "send", &snapshot, "--json"];
        words.extend(base.iter().flat_map(|base| ["--from", base]));
        let sent = send_through(&source, &words, None, Some("stream"));
        assert_eq!(sent.status.code(), Some(0), "{}", errors(&sent));
        let sent = parsed(&errors(&sent));
        assert_eq!((&sent["process"], &sent["name"]), (&from.pid().into(), &name.into()));
        assert!(sent["data_bytes"].as_u64().unwrap() > 0 && sent["base"] == json!(base), "{sent}");
        std::fs::rename(source.path("stream"), target.path("stream")).unwrap();
        for was_there in [false, true] {
            let words = ["volume", "receive", &target.volume(name), "--json"];
            let received = send_through(&target, &words, Some("stream"), None);
            assert_eq!(received.status.code(), Some(0), "{}", errors(&received));
            let received = parsed(&String::from_utf8(received.stdout).unwrap());
            assert_eq!(received["process"], to.pid());
            assert_eq!(
                (&received["existed"], &received["uuid"]),
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
fn snapshot() -> (Pool, PoolServer, Vec<u8>) {
    let pool = Pool::new("256m");
    pool.done(&["volume", "create", &pool.volume("db"), "--size", "32m"]);
    let bytes = pool.write("source", 32 * MIB, 6);
    pool.done(&["copy", &pool.file("source"), &pool.volume("db")]);
    pool.done(&["volume", "snapshot", &pool.volume("db"), "monday"]);
    pool.done(&["volume", "create", &pool.volume("other"), "--size", "4m"]);
    let server = PoolServer::start(&pool, "other");
    (pool, server, bytes)
}

#[test]
fn unread_stream_ends_and_releases_its_snapshot() {
    let (pool, server, _) = snapshot();
    let monday = pool.volume("monday");
    let words = ["volume", "send", &monday, "--json"];
    let send = || {
        let mut send = pool.command(&words);
        let send = send.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        assert_eq!(job(&server, &pool, true)["what"], "send");
        send
    };
    // While its reader exists, the stream waits for it, and its snapshot cannot be deleted.
    let mut stalled = send();
    std::thread::sleep(Duration::from_secs(6));
    assert_eq!(job(&server, &pool, true)["volume"], "monday");
    let (code, text) = pool.refused(&["volume", "delete", &monday]);
    assert!(code == Some(2) && text.contains("its users would lose it"), "{text}");
    drop(stalled.stdout.take());
    let output = stalled.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", errors(&output));
    assert!(errors(&output).contains("write the stream: Broken pipe"), "{}", errors(&output));
    // How far it was is not told in between: what is asked for there is JSON.
    assert!(!errors(&output).contains("sending"), "{}", errors(&output));
    assert_eq!(job(&server, &pool, false)["state"], "refused");

    for name in ["TERM", "KILL", "STOP"] {
        let mut send = send();
        signal(send.id(), name);
        let began = Instant::now();
        assert_ne!(job(&server, &pool, false)["state"], "done", "{name}");
        assert!(began.elapsed() < Duration::from_secs(10), "{name}: {:?}", began.elapsed());
        send.kill().unwrap();
        assert_eq!(send.wait().unwrap().code(), None, "{name} ends it, as without a server");
    }
    let stopped = send();
    let id = job(&server, &pool, true)["id"].to_string();
    pool.done(&["set", "job", &format!("id={id}"), "stop=true"]);
    assert_eq!(job(&server, &pool, false)["state"], "stopped");
    let output = stopped.wait_with_output().unwrap();
    assert!(errors(&output).contains("the job was cancelled"), "{}", errors(&output));
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
fn impossible_send_or_receive_is_rejected_as_for_a_local_pool() {
    let (pool, server, _) = snapshot();
    pool.done(&["volume", "snapshot", &pool.volume("db"), "tuesday"]);
    let [monday, other, none, taken] =
        ["monday", "other", "none", "db"].map(|name| pool.volume(name));
    let tuesday = pool.volume("tuesday");
    let words = ["volume", "send", &tuesday, "--from", "monday"];
    assert!(send_through(&pool, &words, None, Some("rest")).status.success());
    assert!(
        send_through(&pool, &["volume", "send", &monday], None, Some("whole")).status.success()
    );
    std::fs::write(pool.path("wrong"), [7; 5000]).unwrap();
    std::fs::File::options()
        .write(true)
        .open(pool.path("whole"))
        .unwrap()
        .set_len(9 << 20)
        .unwrap();
    pool.done(&["volume", "delete", &monday]);
    let all = || {
        let send = |words: &[&str]| {
            send_through(&pool, &[&["volume", "send"], words].concat(), None, None)
        };
        let receive = |name: &str, input| {
            send_through(&pool, &["volume", "receive", name], Some(input), None)
        };
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
fn killed_receive_leaves_nothing_and_only_one_runs_at_a_time() {
    let (pool, server, bytes) = snapshot();
    let monday = pool.volume("monday");
    assert!(
        send_through(&pool, &["volume", "send", &monday], None, Some("whole")).status.success()
    );
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
    for name in ["KILL", "TERM", "STOP"] {
        let mut first = begin();
        until(&|| is_there("monday.incomplete"));
        let second = send_through(&pool, &words, Some("whole"), None);
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

    let received = send_through(&pool, &words, Some("whole"), None);
    let said = String::from_utf8_lossy(&received.stdout);
    assert!(said.ends_with("which has the pool open\n") && said.contains("received\n"), "{said}");
    server.end();
    assert!(pool.bytes("monday") == bytes);

    // What a killed process leaves the next receive replaces.
    pool.done(&["volume", "delete", &monday]);
    let server = PoolServer::start(&pool, "other");
    let mut first = begin();
    until(&|| is_there("monday.incomplete"));
    drop(server);
    assert_ne!(first.wait().unwrap().code(), Some(0));
    assert!(pool.is_clean());
    let server = PoolServer::start(&pool, "other");
    assert!(send_through(&pool, &words, Some("whole"), None).status.success());
    assert_eq!(names(&pool), ["db", "other", "monday"]);
    server.end();
    assert!(pool.bytes("monday") == bytes && pool.is_clean());
}
