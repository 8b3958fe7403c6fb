//! Volumes over images outside their store, from the command line.

use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::pool::{MIB, PoolTestDirectory};
use crate::served::ServeProcess;
use serde_json::Value;

const TENMIL: &str = env!("CARGO_BIN_EXE_tenmil");
const NQN: &str = "nqn.2026-01.org.tenmil:disk";

/// What some command says as JSON.
fn json_output_of(pool: &PoolTestDirectory, words: &[&str]) -> Value {
    serde_json::from_str(&pool.stdout_of_success(&[words, &["--json"]].concat())).unwrap()
}

#[test]
fn image_is_cloned_overwritten_and_copied_and_stays_unchanged() {
    let pool = PoolTestDirectory::new("64m");
    let golden = pool.write("golden", 4 * MIB, 1);
    let (vm, image) = (pool.volume_uri("vm"), pool.file_uri("golden"));
    let clone = ["volume", "clone", &vm, "--from", &image, "--size", "6m"];
    let said = pool.stdout_of_success(&clone);
    assert_eq!(
        said,
        format!(
            "volume `vm` of 6 MiB, a clone of {}: {}\n",
            pool.file_path_text("golden"),
            pool.volume_name_in_messages("vm")
        )
    );
    let said = pool.stdout_of_success(&clone);
    assert_eq!(
        said,
        format!("volume `vm`, a clone of {}, is there already\n", pool.file_path_text("golden"))
    );
    let (code, error) = pool.exit_code_and_stderr(&["volume", "clone", &vm, "--from", &image]);
    assert!(code == Some(2) && error.contains("name is in use"), "{code:?} {error}");

    let mut expected = golden.clone();
    expected.resize(6 * MIB, 0);
    assert!(pool.volume_bytes("vm") == expected, "it is read through, and behind it are zeroes");
    let listed = pool.volume_row("vm");
    assert_eq!(
        (&listed["used_bytes"], &listed["parent"]["uri"]),
        (&0.into(), &image.clone().into())
    );
    assert_eq!(listed["parent"]["size_bytes"], 4 * MIB);
    let text = pool.stdout_of_success(&["volume", "list", &pool.device_uri()]);
    assert!(text.contains(&format!("volume over {}\n", pool.file_path_text("golden"))), "{text}");

    let patch = pool.write("patch", 64 << 10, 2);
    let part = format!("split:[{vm}]?offset=8k&size=64k");
    let (code, error) = pool.exit_code_and_stderr(&["copy", &pool.file_uri("patch"), &part]);
    assert!(code == Some(2) && error.contains("a clone of file:"), "{code:?} {error}");
    pool.stdout_of_success(&["copy", &pool.file_uri("patch"), &part, "--overwrite", "--verify"]);
    expected[8192..8192 + patch.len()].copy_from_slice(&patch);
    assert!(pool.volume_bytes("vm") == expected);
    pool.stdout_of_success(&["volume", "snapshot", &vm, "monday"]);
    let monday = pool.volume_uri("monday");
    for more in [&["--cluster-size", "4k"][..], &["--size", "1m"], &["--checksums"]] {
        let words = [&["volume", "clone", &monday, "trial"], more].concat();
        let (code, error) = pool.exit_code_and_stderr(&words);
        assert!(code == Some(2) && error.contains("expected only with --from"), "{error}");
    }
    pool.stdout_of_success(&["volume", "clone", &pool.volume_uri("monday"), "trial"]);
    assert!(pool.volume_bytes("monday") == expected && pool.volume_bytes("trial") == expected);
    assert_eq!(pool.volume_row("trial")["parent"]["uri"], image);

    let checked = json_output_of(&pool, &["pool", "check", &pool.device_uri()]);
    let volumes = serde_json::json!(["vm", "monday", "trial"]);
    assert_eq!((&checked["clean"], &checked["parents"][0]["volumes"]), (&true.into(), &volumes));
    let said = pool.stdout_of_success(&["volume", "decouple", &vm, "--limit-bytes", "100m"]);
    assert_eq!(said, "volume `vm` is on its own; it has what its parent had\n");
    assert_eq!(
        pool.stdout_of_success(&["volume", "decouple", &vm]),
        "volume `vm` is on its own already\n"
    );
    assert_eq!(pool.volume_row("vm")["parent"], Value::Null);
    let (code, error) = pool.exit_code_and_stderr(&[
        "volume",
        "inflate",
        &pool.volume_uri("trial"),
        "--limit-bytes",
        "0",
    ]);
    assert!(code == Some(2) && error.contains("rate is 0"), "{code:?} {error}");
    pool.stdout_of_success(&[
        "volume",
        "inflate",
        &pool.volume_uri("trial"),
        "--limit-bytes",
        "1g",
    ]);
    assert_eq!(pool.volume_row("trial")["fully_allocated"], true);
    assert!(std::fs::read(pool.path("golden")).unwrap() == golden, "the parent image is unchanged");

    std::fs::remove_file(pool.path("golden")).unwrap();
    assert!(pool.volume_bytes("vm") == expected && pool.volume_bytes("trial") == expected);
    let (code, error) =
        pool.exit_code_and_stderr(&["copy", &pool.volume_uri("monday"), &pool.file_uri("back")]);
    assert!(error.contains("volume `monday`: its parent file:"), "{code:?} {error}");
    assert_ne!(code, Some(0));
    assert!(error.contains("pool rescue"), "{error}");
    let checked = pool.stdout_of_success(&["pool", "check", &pool.device_uri()]);
    assert!(checked.contains("golden of `monday`: not accessible"), "{checked}");
    assert!(pool.is_clean(), "that is no fault of the pool");

    let other = PoolTestDirectory::new("64m");
    let rescued =
        json_output_of(&other, &["pool", "rescue", &pool.device_uri(), &other.device_uri()]);
    let monday = rescued["volumes"].as_array().unwrap().iter().find(|one| one["name"] == "monday");
    assert_eq!(monday.unwrap()["parent"], image);
    std::fs::write(pool.path("golden"), &golden).unwrap();
    for name in ["vm", "monday", "trial"] {
        assert!(other.volume_bytes(name) == expected, "{name}");
    }
    assert!(other.is_clean());
}

#[test]
fn vanished_image_fails_only_its_reads_and_recovers() {
    let pool = PoolTestDirectory::new("64m");
    let golden = pool.write("golden", 8 * MIB, 1);
    let serve = |address: &str| {
        let uri = format!("{}?read-only=yes", pool.file_uri("golden"));
        ServeProcess::start_shell_line(&format!(
            "{TENMIL} serve '{uri}' --read-only --listen tcp://{address}"
        ))
    };
    let served = serve("127.0.0.1:0");
    let target = served.ready.trim().strip_prefix("ready tcp://").unwrap().to_owned();
    let time_limit = "keep-alive-timeout=2s&connect-timeout=2s&fast-io-fail-timeout=2s&ctrl-loss-timeout=5s&queues=4";
    let image = format!("tcp://{target}/{NQN}?{time_limit}");
    let vm = pool.volume_uri("vm");
    pool.stdout_of_success(&["volume", "create", &pool.volume_uri("plain"), "--size", "1m"]);
    pool.stdout_of_success(&["volume", "clone", &vm, "--from", &image]);
    let patch = pool.write("patch", MIB, 2);
    let part = format!("split:[{vm}]?offset=1m&size=1m");
    pool.stdout_of_success(&["copy", &pool.file_uri("patch"), &part, "--overwrite"]);
    let mut expected = golden;
    expected[MIB..2 * MIB].copy_from_slice(&patch);
    assert!(pool.volume_bytes("vm") == expected, "over the network and from the pool");

    let words = ["perf", &vm, "-w", "randread", "-t", "20", "--json"];
    let mut perf = pool.command(&words);
    let mut perf = perf.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(Duration::from_secs(2));
    assert!(perf.try_wait().unwrap().is_none(), "it goes on until the image is gone");
    let gone = Instant::now();
    drop(served);
    let output = perf.wait_with_output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "reads of the image have failed: {error}");
    assert!(gone.elapsed() < Duration::from_secs(60), "they do not wait for ever");

    assert!(pool.is_clean());
    assert!(pool.volume_bytes("plain") == vec![0; MIB], "others open");
    let (code, error) = pool.exit_code_and_stderr(&["copy", &vm, &pool.file_uri("back")]);
    assert!(
        code == Some(3) && error.contains("volume `vm`: its parent tcp://"),
        "{code:?} {error}"
    );
    let _served = serve(&target);
    assert!(pool.volume_bytes("vm") == expected, "it is back, and nothing was lost");
}
