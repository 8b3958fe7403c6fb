//! Snapshots that go out of a store that another process serves, and come into one.

use std::io::Write;
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{
    PoolServer, assert_load_found_no_error, create_volume, load, parsed, signal, stderr_of,
    volume_names_of_pool, wait_for_job_state,
};
use crate::pool::{MIB, PoolTestDirectory};

/// A command whose standard input and output go to and from files of the pool.
fn send_through(
    pool: &PoolTestDirectory,
    words: &[&str],
    input: Option<&str>,
    output: Option<&str>,
) -> Output {
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
    let (source, target) = (PoolTestDirectory::new("512m"), PoolTestDirectory::new("512m"));
    for pool in [&source, &target] {
        create_volume(pool, "24m");
    }
    let (from, to) = (PoolServer::start(&source, "db"), PoolServer::start(&target, "db"));
    assert_load_found_no_error(load(&source, &from, "2"));
    let loads = [load(&source, &from, "8"), load(&target, &to, "8")];
    for (name, base) in [("first", None), ("second", Some("first"))] {
        source.stdout_of_success(&["volume", "snapshot", &source.volume_uri("db"), name]);
        let snapshot = source.volume_uri(name);
        let mut words = vec!["volume", "send", &snapshot, "--json"];
        words.extend(base.iter().flat_map(|base| ["--from", base]));
        let sent = send_through(&source, &words, None, Some("stream"));
        assert_eq!(sent.status.code(), Some(0), "{}", stderr_of(&sent));
        let sent = parsed(&stderr_of(&sent));
        assert_eq!((&sent["process"], &sent["name"]), (&from.pid().into(), &name.into()));
        assert!(sent["data_bytes"].as_u64().unwrap() > 0 && sent["base"] == json!(base), "{sent}");
        std::fs::rename(source.path("stream"), target.path("stream")).unwrap();
        for was_there in [false, true] {
            let words = ["volume", "receive", &target.volume_uri(name), "--json"];
            let received = send_through(&target, &words, Some("stream"), None);
            assert_eq!(received.status.code(), Some(0), "{}", stderr_of(&received));
            let received = parsed(&String::from_utf8(received.stdout).unwrap());
            assert_eq!(received["process"], to.pid());
            assert_eq!(
                (&received["existed"], &received["uuid"]),
                (&was_there.into(), &sent["uuid"])
            );
        }
    }
    loads.into_iter().for_each(assert_load_found_no_error);
    assert_eq!(volume_names_of_pool(&target), ["db", "first", "second"]);
    let users = |pool: &PoolTestDirectory| {
        ["first", "second"].map(|name| pool.volume_row(name)["users"].clone())
    };
    assert_eq!([users(&source), users(&target)], [[0, 0], [0, 0]].map(|all| all.map(Value::from)));
    from.stop_with_sigterm();
    to.stop_with_sigterm();
    for name in ["first", "second"] {
        assert!(source.volume_bytes(name) == target.volume_bytes(name), "{name}");
    }
    assert!(source.is_clean() && target.is_clean());
}

/// A store with a snapshot of 32 MiB of which 24 are written, that is served, and its bytes.
fn served_pool_with_snapshot() -> (PoolTestDirectory, PoolServer, Vec<u8>) {
    let pool = PoolTestDirectory::new("256m");
    pool.stdout_of_success(&["volume", "create", &pool.volume_uri("db"), "--size", "32m"]);
    let bytes = pool.write("source", 32 * MIB, 6);
    pool.stdout_of_success(&["copy", &pool.file_uri("source"), &pool.volume_uri("db")]);
    pool.stdout_of_success(&["volume", "snapshot", &pool.volume_uri("db"), "monday"]);
    pool.stdout_of_success(&["volume", "create", &pool.volume_uri("other"), "--size", "4m"]);
    let server = PoolServer::start(&pool, "other");
    (pool, server, bytes)
}

#[test]
fn unread_stream_ends_and_releases_its_snapshot() {
    let (pool, server, _) = served_pool_with_snapshot();
    let monday = pool.volume_uri("monday");
    let words = ["volume", "send", &monday, "--json"];
    let send = || {
        let mut send = pool.command(&words);
        let send = send.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        assert_eq!(wait_for_job_state(&server, &pool, true)["what"], "send");
        send
    };
    // While its reader exists, the stream waits for it, and its snapshot cannot be deleted.
    let mut stalled = send();
    std::thread::sleep(Duration::from_secs(6));
    assert_eq!(wait_for_job_state(&server, &pool, true)["volume"], "monday");
    let (code, text) = pool.exit_code_and_stderr(&["volume", "delete", &monday]);
    assert!(code == Some(2) && text.contains("its users would lose it"), "{text}");
    drop(stalled.stdout.take());
    let output = stalled.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1), "{}", stderr_of(&output));
    assert!(stderr_of(&output).contains("write the stream: Broken pipe"), "{}", stderr_of(&output));
    // How far it was is not told in between: what is asked for there is JSON.
    assert!(!stderr_of(&output).contains("sending"), "{}", stderr_of(&output));
    assert_eq!(wait_for_job_state(&server, &pool, false)["state"], "refused");

    for name in ["TERM", "KILL", "STOP"] {
        let mut send = send();
        signal(send.id(), name);
        let began = Instant::now();
        assert_ne!(wait_for_job_state(&server, &pool, false)["state"], "done", "{name}");
        assert!(began.elapsed() < Duration::from_secs(10), "{name}: {:?}", began.elapsed());
        send.kill().unwrap();
        assert_eq!(send.wait().unwrap().code(), None, "{name} ends it, as without a server");
    }
    let stopped = send();
    let id = wait_for_job_state(&server, &pool, true)["id"].to_string();
    pool.stdout_of_success(&["set", "job", &format!("id={id}"), "stop=true"]);
    assert_eq!(wait_for_job_state(&server, &pool, false)["state"], "stopped");
    let output = stopped.wait_with_output().unwrap();
    assert!(stderr_of(&output).contains("the job was cancelled"), "{}", stderr_of(&output));
    assert_eq!(pool.volume_row("monday")["users"], 0);

    let left = send();
    wait_for_job_state(&server, &pool, true);
    let began = Instant::now();
    let pid = server.pid();
    server.stop_with_sigterm();
    assert!(began.elapsed() < Duration::from_secs(5), "it goes whatever it does");
    let output = left.wait_with_output().unwrap();
    let error = stderr_of(&output);
    assert!(
        output.status.code() == Some(3) && error.contains(&format!("process {pid}")),
        "{error}"
    );
    pool.stdout_of_success(&["volume", "delete", &monday]);
    assert!(pool.is_clean());
}

#[test]
fn impossible_send_or_receive_is_rejected_as_for_a_local_pool() {
    let (pool, server, _) = served_pool_with_snapshot();
    pool.stdout_of_success(&["volume", "snapshot", &pool.volume_uri("db"), "tuesday"]);
    let [monday, other, none, taken] =
        ["monday", "other", "none", "db"].map(|name| pool.volume_uri(name));
    let tuesday = pool.volume_uri("tuesday");
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
    pool.stdout_of_success(&["volume", "delete", &monday]);
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
        outputs.map(|output| (output.status.code(), stderr_of(&output)))
    };
    let there = all();
    assert_eq!(
        volume_names_of_pool(&pool),
        ["db", "other", "tuesday"],
        "nothing is left of what was cut"
    );
    server.stop_with_sigterm();
    for (there, here) in there.iter().zip(&all()) {
        assert!(here.0.is_some_and(|code| code > 0), "{here:?}");
        assert_eq!(there, here);
    }
    assert!(pool.is_clean());
}

#[test]
fn killed_receive_leaves_nothing_and_only_one_runs_at_a_time() {
    let (pool, server, bytes) = served_pool_with_snapshot();
    let monday = pool.volume_uri("monday");
    assert!(
        send_through(&pool, &["volume", "send", &monday], None, Some("whole")).status.success()
    );
    let whole = std::fs::read(pool.path("whole")).unwrap();
    pool.stdout_of_success(&["volume", "delete", &monday]);
    let words = ["volume", "receive", &monday];
    let begin = || {
        let mut receive = pool.command(&words);
        let mut receive = receive.stdin(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        // Half of it, and then nothing.
        receive.stdin.as_mut().unwrap().write_all(&whole[..whole.len() / 2]).unwrap();
        receive
    };
    let is_there = |name: &str| volume_names_of_pool(&pool).iter().any(|one| one == name);
    let until = |is_met: &dyn Fn() -> bool| {
        let until = Instant::now() + Duration::from_secs(10);
        while !is_met() {
            assert!(Instant::now() < until, "{:?}", volume_names_of_pool(&pool));
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    for name in ["KILL", "TERM", "STOP"] {
        let mut first = begin();
        until(&|| is_there("monday.incomplete"));
        let second = send_through(&pool, &words, Some("whole"), None);
        let error = stderr_of(&second);
        assert!(second.status.code() == Some(2) && error.contains("received already"), "{error}");
        let (_, error) =
            pool.exit_code_and_stderr(&["volume", "delete", &pool.volume_uri("monday.incomplete")]);
        assert!(error.contains("it is open in process"), "{error}");
        signal(first.id(), name);
        until(&|| !is_there("monday.incomplete"));
        first.kill().unwrap();
        first.wait().unwrap();
        assert_ne!(wait_for_job_state(&server, &pool, false)["state"], "done");
    }
    // One whose name is taken meanwhile is refused, and leaves nothing either.
    let mut first = begin();
    until(&|| is_there("monday.incomplete"));
    pool.stdout_of_success(&["volume", "snapshot", &pool.volume_uri("db"), "monday"]);
    first.stdin.as_mut().unwrap().write_all(&whole[whole.len() / 2..]).unwrap();
    let output = first.wait_with_output().unwrap();
    assert!(stderr_of(&output).contains("`monday`"), "{}", stderr_of(&output));
    assert_eq!(output.status.code(), Some(2));
    assert!(!is_there("monday.incomplete"));
    pool.stdout_of_success(&["volume", "delete", &monday]);

    let received = send_through(&pool, &words, Some("whole"), None);
    let said = String::from_utf8_lossy(&received.stdout);
    assert!(said.ends_with("which has the pool open\n") && said.contains("received\n"), "{said}");
    server.stop_with_sigterm();
    assert!(pool.volume_bytes("monday") == bytes);

    // What a killed process leaves the next receive replaces.
    pool.stdout_of_success(&["volume", "delete", &monday]);
    let server = PoolServer::start(&pool, "other");
    let mut first = begin();
    until(&|| is_there("monday.incomplete"));
    drop(server);
    assert_ne!(first.wait().unwrap().code(), Some(0));
    assert!(pool.is_clean());
    let server = PoolServer::start(&pool, "other");
    assert!(send_through(&pool, &words, Some("whole"), None).status.success());
    assert_eq!(volume_names_of_pool(&pool), ["db", "other", "monday"]);
    server.stop_with_sigterm();
    assert!(pool.volume_bytes("monday") == bytes && pool.is_clean());
}
