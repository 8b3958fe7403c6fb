//! `tenmil pool` and `tenmil volume` from the command line.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::pool::{MIB, PoolTestDirectory};
use crate::served::{ServeProcess, are_tools_installed, run};
use serde_json::Value;

#[test]
fn clone_of_a_snapshot_has_its_data_after_the_volume_changed() {
    let pool = PoolTestDirectory::new("64m");
    let first = pool.write("first", 4 * MIB, 1);
    let second = pool.write("second", 4 * MIB, 2);
    pool.stdout_of_success(&["volume", "create", &pool.volume_uri("db"), "--size", "4m"]);
    pool.stdout_of_success(&["copy", &pool.file_uri("first"), &pool.volume_uri("db"), "--verify"]);
    let written = pool.volume_row("db")["used_bytes"].as_u64().unwrap();
    assert_eq!(written, 3 * MIB as u64, "holes take no room");
    pool.stdout_of_success(&["volume", "snapshot", &pool.volume_uri("db"), "monday"]);
    pool.stdout_of_success(&["volume", "clone", &pool.volume_uri("monday"), "trial"]);
    pool.stdout_of_success(&[
        "copy",
        &pool.file_uri("second"),
        &pool.volume_uri("db"),
        "--verify",
        "--overwrite",
    ]);
    assert!(pool.volume_bytes("db") == second, "what was written last");
    assert!(pool.volume_bytes("monday") == first && pool.volume_bytes("trial") == first);
    let unique = pool.volume_row("db")["unique_bytes"].as_u64().unwrap();
    assert!((3 * MIB as u64..4 * MIB as u64).contains(&unique), "{unique}");

    let (code, error) =
        pool.exit_code_and_stderr(&["copy", &pool.file_uri("second"), &pool.volume_uri("monday")]);
    assert!(code == Some(2) && error.contains("write"), "{code:?} {error}");

    let before = pool.used();
    for name in ["db", "trial", "monday"] {
        pool.stdout_of_success(&["volume", "delete", &pool.volume_uri(name)]);
        assert!(pool.is_clean());
    }
    assert!(before >= 6 * MIB as u64 && pool.used() < MIB as u64, "{before} {}", pool.used());
}

#[test]
fn snapshot_is_sent_and_then_its_increment() {
    let (pool, backup) = (PoolTestDirectory::new("64m"), PoolTestDirectory::new("64m"));
    let first = pool.write("first", 4 * MIB, 1);
    pool.stdout_of_success(&["volume", "create", &pool.volume_uri("db"), "--size", "8m"]);
    pool.stdout_of_success(&["copy", &pool.file_uri("first"), &pool.volume_uri("db")]);
    pool.stdout_of_success(&["volume", "snapshot", &pool.volume_uri("db"), "monday"]);
    let second = pool.write("second", 64 << 10, 2);
    pool.stdout_of_success(&[
        "copy",
        &pool.file_uri("second"),
        &pool.volume_uri("db"),
        "--overwrite",
    ]);
    pool.stdout_of_success(&["volume", "snapshot", &pool.volume_uri("db"), "tuesday"]);

    let json = pool.stdout_of_success(&[
        "volume",
        "diff",
        &pool.volume_uri("monday"),
        "tuesday",
        "--json",
    ]);
    let json: Value = serde_json::from_str(&json).unwrap();
    let changed = json["data_bytes"].as_u64().unwrap() + json["hole_bytes"].as_u64().unwrap();
    assert!((1..=128 << 10).contains(&changed), "{json}");

    let pipe = |words: &[&str], name: &str, cut: usize| {
        let sent = pool.command(words).output().unwrap();
        assert!(sent.status.success(), "{}", String::from_utf8_lossy(&sent.stderr));
        std::fs::write(backup.path("stream"), &sent.stdout[..sent.stdout.len() - cut]).unwrap();
        let input = std::fs::File::open(backup.path("stream")).unwrap();
        let mut receive = backup.command(&["volume", "receive", &backup.volume_uri(name)]);
        receive.stdin(input).output().unwrap()
    };
    let (monday, tuesday) = (pool.volume_uri("monday"), pool.volume_uri("tuesday"));
    let rest = ["volume", "send", &tuesday, "--from", "monday"];
    let refused = pipe(&rest, "tuesday", 0);
    let error = String::from_utf8_lossy(&refused.stderr);
    assert!(refused.status.code() == Some(2) && error.contains("found no snapshot"), "{error}");
    assert!(!pipe(&["volume", "send", &monday], "monday", 1).status.success(), "it is cut");
    for (words, name) in [(&["volume", "send", &monday][..], "monday"), (&rest, "tuesday")] {
        let received = pipe(words, name, 0);
        assert!(received.status.success(), "{}", String::from_utf8_lossy(&received.stderr));
    }
    let mut expected = first;
    expected.resize(8 * MIB, 0);
    assert!(backup.volume_bytes("monday") == expected);
    expected[..second.len()].copy_from_slice(&second);
    assert!(backup.volume_bytes("tuesday") == expected);
    assert_eq!(backup.volume_row("tuesday")["origin"], "monday");
    assert!(backup.is_clean());
}

#[test]
fn volumes_are_rescued_from_a_pool_without_superblocks() {
    let (pool, other) = (PoolTestDirectory::new("64m"), PoolTestDirectory::new("64m"));
    let first = pool.write("first", 4 * MIB, 5);
    pool.stdout_of_success(&["volume", "create", &pool.volume_uri("db"), "--size", "4m"]);
    pool.stdout_of_success(&["copy", &pool.file_uri("first"), &pool.volume_uri("db")]);
    pool.stdout_of_success(&["volume", "snapshot", &pool.volume_uri("db"), "monday"]);
    let second = pool.write("second", 4 * MIB, 6);
    pool.stdout_of_success(&[
        "copy",
        &pool.file_uri("second"),
        &pool.volume_uri("db"),
        "--overwrite",
    ]);
    let mut image = std::fs::read(pool.path("pool")).unwrap();
    let end = image.len();
    image[..8192].fill(0xa5);
    image[end - 8192..].fill(0xa5);
    std::fs::write(pool.path("pool"), &image).unwrap();
    let (_, error) = pool.exit_code_and_stderr(&["volume", "list", &pool.device_uri()]);
    assert!(error.contains("no superblock can be read"), "{error}");

    for was_there in [false, true] {
        let output =
            other.run(&["pool", "rescue", &pool.device_uri(), &other.device_uri(), "--json"]);
        assert_eq!(output.status.code(), Some(3), "four superblocks are lost");
        let json: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(json["damaged"].as_array().unwrap().len(), 4);
        for volume in json["volumes"].as_array().unwrap() {
            assert_eq!((&volume["lost_bytes"], &volume["existed"]), (&0.into(), &was_there.into()));
        }
    }
    assert!(other.volume_bytes("db") == second && other.volume_bytes("monday") == first);
    assert_eq!(other.volume_row("monday")["read_only"], true);
    assert!(other.is_clean() && std::fs::read(pool.path("pool")).unwrap() == image);
}

#[test]
fn clone_is_served_while_its_pool_is_locked() {
    if !are_tools_installed(&["qemu-img"]) {
        return;
    }
    let pool = PoolTestDirectory::new("64m");
    let source = pool.write("source", 8 * MIB, 3);
    pool.stdout_of_success(&["volume", "create", &pool.volume_uri("db"), "--size", "8m"]);
    pool.stdout_of_success(&["copy", &pool.file_uri("source"), &pool.volume_uri("db")]);
    pool.stdout_of_success(&["volume", "clone", &pool.volume_uri("db"), "trial"]);
    let served = ServeProcess::start(&pool.volume_uri("trial"), &[]);
    let (uri, back) = (served.uri(), pool.path("read"));
    run("qemu-img", &["convert", "-f", "raw", "-O", "raw", &uri, back.to_str().unwrap()]);
    assert!(std::fs::read(&back).unwrap() == source);
    let (code, error) = pool.exit_code_and_stderr(&["volume", "list", &pool.device_uri()]);
    let pid = served.pid().to_string();
    assert!(code != Some(0) && error.contains(&pid), "{code:?} {error}: who holds it");
    let zeroes = vec![0; 8 * MIB];
    std::fs::write(pool.path("zeroes"), &zeroes).unwrap();
    let zeroes_path = pool.path("zeroes");
    let convert = ["convert", "-n", "-f", "raw", "-O", "raw", zeroes_path.to_str().unwrap(), &uri];
    run("qemu-img", &convert);
    assert_eq!(served.stop_with_sigterm(), Some(0));
    assert!(pool.volume_bytes("trial") == zeroes && pool.volume_bytes("db") == source);
    assert!(pool.is_clean());
}

#[test]
fn pool_of_a_killed_writer_is_clean_and_has_all_flushed_data() {
    let pool = PoolTestDirectory::new("256m");
    let source = pool.write("source", 4 * MIB, 4);
    for (name, size) in [("kept", "4m"), ("loaded", "64m")] {
        pool.stdout_of_success(&["volume", "create", &pool.volume_uri(name), "--size", size]);
    }
    // Ends with a flush.
    pool.stdout_of_success(&["copy", &pool.file_uri("source"), &pool.volume_uri("kept")]);
    let blocks = || pool.path("pool").metadata().unwrap().blocks();
    for round in 1..=3 {
        let before = blocks();
        let words =
            ["perf", &pool.volume_uri("loaded"), "-w", "randrw", "-t", "100", "--overwrite"];
        let mut command = pool.command(&words);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let until = Instant::now() + Duration::from_secs(60);
        let mut wrote = false;
        while !wrote && Instant::now() < until && child.try_wait().unwrap().is_none() {
            wrote = blocks() > before + 512 * round;
            std::thread::yield_now();
        }
        child.kill().unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(wrote, "{}", String::from_utf8_lossy(&output.stderr));
        assert!(pool.is_clean(), "round {round}");
        assert!(pool.volume_bytes("kept") == source, "round {round}");
        pool.stdout_of_success(&[
            "volume",
            "snapshot",
            &pool.volume_uri("loaded"),
            &format!("after-{round}"),
        ]);
    }
    assert!(pool.is_clean());
}

#[test]
fn low_space_is_reported_and_a_full_pool_loses_nothing() {
    let pool = PoolTestDirectory::new("16m");
    // Three quarters of each are written, and the rest are holes.
    let (first, _) = (pool.write("first", 17 * MIB, 1), pool.write("second", 8 * MIB, 2));
    pool.stdout_of_success(&["volume", "create", &pool.volume_uri("db"), "--size", "64m"]);
    pool.stdout_of_success(&["volume", "create", &pool.volume_uri("other"), "--size", "64m"]);
    let output = pool.run(&["copy", &pool.file_uri("first"), &pool.volume_uri("db")]);
    let reported = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{reported}");
    assert_eq!(reported.matches("note: pool `pool` on /").count(), 1, "{reported}");
    assert!(reported.contains("80 % of its capacity are used"), "{reported}");

    let (code, error) =
        pool.exit_code_and_stderr(&["copy", &pool.file_uri("second"), &pool.volume_uri("other")]);
    assert!(code != Some(0) && error.contains("it is full and has refused"), "{code:?} {error}");
    assert!(pool.is_clean());
    assert!(pool.volume_bytes("db")[..first.len()] == first[..], "what was there before is there");
    pool.stdout_of_success(&["volume", "delete", &pool.volume_uri("db")]);
    pool.stdout_of_success(&[
        "copy",
        &pool.file_uri("second"),
        &pool.volume_uri("other"),
        "--overwrite",
    ]);
}

#[test]
fn low_space_event_reaches_followers() {
    let pool = PoolTestDirectory::new("16m");
    pool.stdout_of_success(&["volume", "create", &pool.volume_uri("db"), "--size", "64m"]);
    let volume = pool.volume_uri("db");
    // Forty units of 64 KiB a second: some four seconds to four fifths.
    let words = ["perf", &volume, "-w", "randwrite", "--limit-iops", "40", "-t", "30"];
    let mut perf = pool.command(&words);
    let mut perf = perf.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    let event = loop {
        let mut events = pool.command(&["events", "--json", "-t", "30"]);
        let mut events = events.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let lines = BufReader::new(events.stdout.take().unwrap()).lines();
        let mut reported = lines.map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
        let found = reported.find(|event| event["kind"] == "pool-low-space");
        // It may have ended by itself, if no process could be asked yet.
        let _ = events.kill();
        events.wait().unwrap();
        if let Some(event) = found {
            break event;
        }
        assert!(Instant::now() < until, "no event reports that the pool fills");
        std::thread::sleep(Duration::from_millis(50));
    };
    perf.kill().unwrap();
    perf.wait().unwrap();
    assert_eq!(event["about"]["pool"], "pool");
    assert_eq!(event["about"]["threshold_percent"], 80);
}
