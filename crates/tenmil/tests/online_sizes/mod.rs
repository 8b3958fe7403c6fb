//! Volumes that become longer while somebody uses them.

use std::time::{Duration, Instant};

use serde_json::Value;

use super::pool::{MIB, Pool};
use super::{Server, is_content, load, parsed};

/// How long the namespace is that a host finds.
fn size_bytes(pool: &Pool, server: &Server) -> usize {
    let found = parsed(&pool.done(&["identify", &server.uri, "--json"]));
    let blocks = found["namespaces"]["1"]["identify"]["nsze"].as_u64().unwrap();
    4096 * usize::try_from(blocks).unwrap()
}

#[test]
fn a_volume_that_grows_under_load_has_its_new_end_at_once_and_keeps_what_is_written_there() {
    let pool = Pool::new("64m");
    pool.done(&["volume", "create", &pool.volume("db"), "--size", "4m"]);
    let server = Server::start(&pool, "db");
    assert_eq!(size_bytes(&pool, &server), 4 * MIB);
    let load = load(&pool, &server, "4");
    let grow = ["volume", "resize", &pool.volume("db"), "--size", "12m"];
    let told = pool.done(&grow);
    assert!(told.contains("those whom it is served to are told of its new end"), "{told}");
    let until = Instant::now() + Duration::from_secs(10);
    while size_bytes(&pool, &server) != 12 * MIB {
        assert!(Instant::now() < until, "whoever comes finds the new end");
        std::thread::sleep(Duration::from_millis(20));
    }
    is_content(load);
    let again = parsed(&pool.done(&[&grow[..], &["--json"]].concat()));
    assert_eq!(again["changed"], Value::from(false));

    // Through the old end and the new one; and then the power goes.
    let source = pool.write("source", 12 * MIB, 7);
    pool.done(&["copy", &pool.file("source"), &server.uri, "--overwrite", "--verify"]);
    drop(server);
    assert!(pool.bytes("db") == source);
    pool.done(&["store", "check", &pool.device()]);
}
