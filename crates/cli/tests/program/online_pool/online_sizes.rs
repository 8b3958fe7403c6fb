//! Volumes that are extended while they are in use.

use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{PoolServer, assert_load_found_no_error, load, parsed};
use crate::pool::{MIB, PoolTestDirectory};

/// How long the namespace is that a host finds.
fn namespace_size_bytes(pool: &PoolTestDirectory, server: &PoolServer) -> usize {
    let found = parsed(&pool.stdout_of_success(&["identify", &server.uri, "--json"]));
    let blocks = found["namespaces"]["1"]["identify"]["nsze"].as_u64().unwrap();
    4096 * usize::try_from(blocks).unwrap()
}

fn await_size(pool: &PoolTestDirectory, server: &PoolServer, expected: usize) {
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        let found = namespace_size_bytes(pool, server);
        if found == expected {
            return;
        }
        assert!(Instant::now() < until, "{}: {found} bytes", server.uri);
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn reexported_volume_grows_with_its_volume() {
    let pool = PoolTestDirectory::new("64m");
    pool.stdout_of_success(&["volume", "create", &pool.volume_uri("db"), "--size", "4m"]);
    let first = PoolServer::start(&pool, "db");
    let second = PoolServer::start_with_uri(&pool, &format!("{}&read-queue=yes", first.uri));
    // Two names of one address are two paths.
    let others = second.uri.replace("127.0.0.1", "localhost");
    let [address, name] = ["//", "/nqn"].map(|mark| others.split(mark).nth(1).unwrap());
    let address = address.split('/').next().unwrap();
    let third =
        PoolServer::start_with_uri(&pool, &second.uri.replace("/nqn", &format!(",{address}/nqn")));
    assert!(third.uri != second.uri && name.ends_with("?ns=1"));
    let all = [&first, &second, &third];
    for server in all {
        assert_eq!(namespace_size_bytes(&pool, server), 4 * MIB);
    }
    pool.stdout_of_success(&["volume", "resize", &pool.volume_uri("db"), "--size", "12m"]);
    for server in all {
        await_size(&pool, server, 12 * MIB);
    }
    let source = pool.write("source", 12 * MIB, 5);
    pool.stdout_of_success(&[
        "copy",
        &pool.file_uri("source"),
        &third.uri,
        "--overwrite",
        "--verify",
    ]);
    // A volume that is open is not shrunk.
    pool.exit_code_and_stderr(&[
        "volume",
        "resize",
        &pool.volume_uri("db"),
        "--size",
        "4m",
        "--shrink",
    ]);
    [third, second, first].into_iter().for_each(PoolServer::stop_with_sigterm);
    assert!(pool.volume_bytes("db") == source);
}

#[test]
fn vfio_user_client_sees_the_grown_volume() {
    let pool = PoolTestDirectory::new("64m");
    pool.stdout_of_success(&["volume", "create", &pool.volume_uri("db"), "--size", "4m"]);
    let socket = format!("vfio-user:{}", pool.path("socket").display());
    let words = ["serve", &pool.volume_uri("db"), "--listen", &socket];
    let child = pool.command(&words).stdout(Stdio::piped()).spawn().unwrap();
    let mut controller = PoolServer { child, uri: socket.clone() };
    let mut ready = String::new();
    BufReader::new(controller.child.stdout.as_mut().unwrap()).read_line(&mut ready).unwrap();
    let guest = PoolServer::start_with_uri(&pool, &socket);
    assert_eq!(namespace_size_bytes(&pool, &guest), 4 * MIB);
    pool.stdout_of_success(&["volume", "resize", &pool.volume_uri("db"), "--size", "12m"]);
    await_size(&pool, &guest, 12 * MIB);
    let source = pool.write("source", 12 * MIB, 6);
    pool.stdout_of_success(&[
        "copy",
        &pool.file_uri("source"),
        &guest.uri,
        "--overwrite",
        "--verify",
    ]);
    guest.stop_with_sigterm();
    controller.stop_with_sigterm();
    assert!(pool.volume_bytes("db") == source);
}

#[test]
fn volume_grown_under_load_has_its_new_end_at_once() {
    let pool = PoolTestDirectory::new("64m");
    pool.stdout_of_success(&["volume", "create", &pool.volume_uri("db"), "--size", "4m"]);
    let server = PoolServer::start(&pool, "db");
    assert_eq!(namespace_size_bytes(&pool, &server), 4 * MIB);
    let load = load(&pool, &server, "4");
    let grow = ["volume", "resize", &pool.volume_uri("db"), "--size", "12m"];
    let reported = pool.stdout_of_success(&grow);
    assert!(reported.contains("its users are notified of the new size"), "{reported}");
    await_size(&pool, &server, 12 * MIB);
    assert_load_found_no_error(load);
    let again = parsed(&pool.stdout_of_success(&[&grow[..], &["--json"]].concat()));
    assert_eq!(again["changed"], Value::from(false));

    // Through the old end and the new one; and then the power goes.
    let source = pool.write("source", 12 * MIB, 7);
    pool.stdout_of_success(&[
        "copy",
        &pool.file_uri("source"),
        &server.uri,
        "--overwrite",
        "--verify",
    ]);
    drop(server);
    assert!(pool.volume_bytes("db") == source);
    pool.stdout_of_success(&["pool", "check", &pool.device_uri()]);
}
