//! Pool commands called through the method table, with pools of this process.

use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};
use tenmil_base::Span;
use tenmil_block::{OpenedDevice, Opener};
use tenmil_dma::RegionTable;
use tenmil_drivers::pool::{OpenPool, VolumeRef};
use tenmil_linux::Clock;
use tenmil_linux::local_socket::{LocalConnection, RecvResult};

use super::{PoolCommands, find_pool};
use crate::arguments::Arguments;
use crate::deferred_reply::DeferredReplySlot;
use crate::error::{ErrorCode, RpcError};
use crate::event::event_channel;
use crate::method::CallContext;
use crate::methods::TABLE;
use crate::passed_fd::PassedFd;
use crate::process_parts::ProcessParts;

/// Pools of this process are visible to all tests, so only one test at a time uses them.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Process with a pool.
struct PoolTest {
    directory: tempfile::TempDir,
    regions: RegionTable,
    clock: Clock,
    state: ProcessParts,
    _turn: MutexGuard<'static, ()>,
}

impl PoolTest {
    fn new() -> Self {
        let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let (announcer, _announcements) = event_channel().unwrap();
        let state = ProcessParts::new().with_part(PoolCommands::new(&[], announcer));
        let (directory, regions) = (tempfile::tempdir().unwrap(), RegionTable::new(400));
        let bench = Self { directory, regions, clock: Clock::start(), state, _turn: turn };
        bench.create_pool_file("pool");
        bench
    }

    fn device_opener(&self) -> Opener<'_> {
        Opener { regions: &self.regions, clock: self.clock, seed: 1, kinds: tenmil_drivers::KINDS }
    }

    fn device_uri(&self, name: &str) -> String {
        format!("file:{}?engine=threads", self.directory.path().join(name).display())
    }

    fn create_pool_file(&self, name: &str) {
        let device = format!("{}&size=32m", self.device_uri(name)).parse().unwrap();
        tenmil_drivers::pool::create_pool(&self.device_opener(), &device, name, false).unwrap();
    }

    fn pool_name(&self, name: &str) -> Arc<OpenPool> {
        let place = VolumeRef::pool_on(&self.device_uri(name).parse().unwrap());
        OpenPool::open(&self.device_opener(), &place).unwrap()
    }

    fn open_pool(&self, volume: &str) -> OpenedDevice {
        let uri = format!("volume:[{}]/{volume}", self.device_uri("pool"));
        self.device_opener().open(&uri.parse().unwrap()).unwrap()
    }

    /// Calls a method and waits for its response.
    fn call_method(&self, method: &str, given: Value) -> Result<Value, RpcError> {
        self.call_with_file(method, given, PassedFd::default())
    }

    /// Same, with a passed file descriptor.
    fn call_with_file(
        &self,
        method: &str,
        given: Value,
        passed: PassedFd,
    ) -> Result<Value, RpcError> {
        let method = TABLE.find(method).unwrap();
        let arguments = Arguments::validate(method, given.as_object().unwrap())?;
        let later = DeferredReplySlot::default();
        let (state, passed) = (&self.state, &passed);
        let call =
            CallContext { table: &TABLE, state, arguments: &arguments, later: &later, passed };
        let now = (method.run)(&call)?;
        let answer = match later.take_pending() {
            None => now,
            Some(pending) => {
                let until = self.clock.now().after(Span::from_secs(60));
                while !pending.is_available() {
                    assert!(self.clock.now() < until, "{} is answered", method.name);
                    tenmil_linux::named_thread::sleep(Span::from_ms(1));
                }
                pending.take_result().unwrap()?
            }
        };
        assert_eq!(method.answer.check_value(&answer), Ok(()), "{}", method.name);
        Ok(answer)
    }

    fn call_expecting_error(&self, method: &str, given: Value) -> RpcError {
        self.call_method(method, given).unwrap_err()
    }

    /// Waits until a job has ended.
    fn await_job_end(&self, job: &Value) -> Value {
        let until = self.clock.now().after(Span::from_secs(60));
        loop {
            let rows = self.call_method("jobs", json!({ "id": job["id"] })).unwrap();
            if rows[0]["state"] != "running" {
                return rows[0].clone();
            }
            assert!(self.clock.now() < until, "{job} ends");
            tenmil_linux::named_thread::sleep(Span::from_ms(1));
        }
    }
}

#[test]
fn commands_execute_on_the_open_pool_and_repeating_changes_nothing() {
    let bench = PoolTest::new();
    let open = bench.pool_name("pool");
    let names = |bench: &PoolTest| -> Vec<String> {
        let rows = bench.call_method("volumes", json!({})).unwrap();
        let name = |row: &Value| row["name"].as_str().unwrap().to_owned();
        rows.as_array().unwrap().iter().map(name).collect()
    };
    for (method, given, after) in [
        ("set_volume_create", json!({ "name": "db", "size_bytes": 1 << 20 }), vec!["db"]),
        ("set_volume_snapshot", json!({ "volume": "db", "name": "mon" }), vec!["db", "mon"]),
        ("set_volume_clone", json!({ "from": "mon", "name": "c" }), vec!["db", "mon", "c"]),
        ("set_volume_rename", json!({ "name": "c", "to": "d" }), vec!["db", "mon", "d"]),
        (
            "set_volume_resize",
            json!({ "name": "d", "size_bytes": 2 << 20 }),
            vec!["db", "mon", "d"],
        ),
        ("set_volume_delete", json!({ "name": "d", "if_exists": true }), vec!["db", "mon"]),
        (
            "set_pool_thresholds",
            json!({ "first_percent": 70, "second_percent": 90 }),
            vec!["db", "mon"],
        ),
        (
            "set_volume_snapshots",
            json!({ "volumes": ["db", "mon"], "names": ["p", "q"] }),
            vec!["db", "mon", "p", "q"],
        ),
    ] {
        let first = bench.call_method(method, given.clone()).unwrap();
        assert_eq!(
            (&first["changed"], names(&bench)),
            (&json!(true), after.clone().iter().map(|name| (*name).to_owned()).collect()),
            "{method}"
        );
        let generation = open.generation();
        let second = bench.call_method(method, given).unwrap();
        assert_eq!(
            (&second["changed"], open.generation()),
            (&json!(false), generation),
            "{method}"
        );
        assert_eq!(second["volume"], first["volume"], "{method}");
    }
    let store = &bench.call_method("pools", json!({})).unwrap()[0];
    assert_eq!(store["thresholds_percent"], json!([70, 90]));
    assert_eq!((&store["volumes"], &store["name"]), (&json!(4), &json!("pool")));
    let uneven = json!({ "volumes": ["db", "mon"], "names": ["z"] });
    let refusal = bench.call_expecting_error("set_volume_snapshots", uneven);
    assert_eq!(refusal.code, ErrorCode::BadValue);
    assert!(refusal.message.contains("1 names, expected 2"), "{refusal}");
    let refusal =
        bench.call_expecting_error("set_volume_delete", json!({ "name": "db", "pool": "other" }));
    assert_eq!(refusal.code, ErrorCode::NotFound);
    let refusal =
        bench.call_expecting_error("set_volume_snapshot", json!({ "volume": "x", "name": "y" }));
    let expected = open.find_volume("x").unwrap_err();
    assert_eq!((refusal.code, refusal.message), (ErrorCode::Failed, expected.to_string()));
}

#[test]
fn deleting_a_missing_volume_fails_unless_allowed() {
    let bench = PoolTest::new();
    let open = bench.pool_name("pool");
    bench.call_method("set_volume_create", json!({ "name": "db", "size_bytes": 1 << 20 })).unwrap();
    let generation = open.generation();
    let refusal = bench.call_expecting_error("set_volume_delete", json!({ "name": "dv" }));
    assert_eq!(
        (refusal.code, refusal.category),
        (ErrorCode::Failed, tenmil_base::ErrorCategory::Usage)
    );
    assert!(refusal.message.contains("no volume `dv`, expected `db`"), "{refusal}");
    let reported =
        bench.call_method("set_volume_delete", json!({ "name": "dv", "if_exists": true }));
    assert_eq!(reported.unwrap()["changed"], json!(false));
    assert_eq!(open.generation(), generation);
}

#[test]
fn volume_in_use_is_not_deleted() {
    let bench = PoolTest::new();
    let _open = bench.pool_name("pool");
    bench.call_method("set_volume_create", json!({ "name": "db", "size_bytes": 1 << 20 })).unwrap();
    bench.call_method("set_volume_snapshot", json!({ "volume": "db", "name": "mon" })).unwrap();
    bench.call_method("set_volume_resize", json!({ "name": "db", "size_bytes": 2 << 20 })).unwrap();
    let (db, mon) = (bench.open_pool("db"), bench.open_pool("mon"));
    let us = format!("it is open in process {}", std::process::id());
    let shrink = json!({ "name": "db", "size_bytes": 1 << 19, "shrink": true });
    let cases = [
        ("set_volume_delete", json!({ "name": "mon" })),
        ("set_volume_delete", json!({ "name": "db" })),
        ("set_volume_resize", shrink),
        ("set_volume_rollback", json!({ "volume": "db", "snapshot": "mon" })),
    ];
    for (method, given) in &cases {
        let refusal = bench.call_expecting_error(method, given.clone());
        assert!(refusal.message.contains(&us), "{method}: {refusal}");
        assert!(
            refusal.hint.is_some() && refusal.category == tenmil_base::ErrorCategory::Usage,
            "{method}"
        );
    }
    let users = bench.call_method("volumes", json!({})).unwrap();
    assert_eq!((&users[0]["users"], &users[1]["users"]), (&json!(1), &json!(1)));
    let grown = json!({ "name": "db", "size_bytes": 4 << 20 });
    let reported = bench.call_method("set_volume_resize", grown).unwrap();
    assert!(reported["text"].as_str().unwrap().contains("when they open it again"), "{reported}");
    assert_eq!(db.medium.limits().block_count, 512, "an open device keeps its size");
    drop((db, mon));
    for (method, given) in cases.iter().rev().filter(|(_, given)| given["name"] != "mon") {
        assert_eq!(bench.call_method(method, given.clone()).unwrap()["changed"], true, "{method}");
    }
}

#[test]
fn pool_is_found_by_any_unambiguous_name() {
    let bench = PoolTest::new();
    assert_eq!(find_pool(None).unwrap_err().code, ErrorCode::NotFound);
    let first = bench.pool_name("pool");
    for name in [None, Some("pool".into()), Some(format!("{:032x}", first.uuid()))] {
        assert_eq!(find_pool(name.as_deref()).unwrap().uuid(), first.uuid(), "{name:?}");
    }
    bench.create_pool_file("other");
    let second = bench.pool_name("other");
    let refusal = find_pool(None).unwrap_err();
    assert!(refusal.message.contains(first.device_uri()), "{refusal}");
    assert!(refusal.message.contains(second.device_uri()), "{refusal}");
    assert_eq!(find_pool(Some(second.device_uri())).unwrap().uuid(), second.uuid());
    let rows = bench.call_method("pools", json!({})).unwrap();
    assert_eq!(rows.as_array().map(Vec::len), Some(2));
    assert_ne!(rows[0]["identity"], rows[1]["identity"]);
}

#[test]
fn differences_are_returned_and_a_missing_volume_is_named() {
    let bench = PoolTest::new();
    let _open = bench.pool_name("pool");
    bench.call_method("set_volume_create", json!({ "name": "db", "size_bytes": 4 << 20 })).unwrap();
    bench.call_method("set_volume_snapshot", json!({ "volume": "db", "name": "a" })).unwrap();
    let volume = format!("volume:[{}]/db", bench.device_uri("pool")).parse().unwrap();
    tenmil_drivers::pool::create_pool(&bench.device_opener(), &volume, "inner", false).unwrap();
    bench.call_method("set_volume_snapshot", json!({ "volume": "db", "name": "b" })).unwrap();
    let reported = bench.call_method("volume_diff", json!({ "from": "a", "to": "b" })).unwrap();
    let first = &reported["changed"][0];
    assert_eq!((&first["offset_bytes"], &first["kind"]), (&json!(0), &json!("data")), "{reported}");
    assert_eq!(reported["next_bytes"], Value::Null);
    let at_bytes = first["length_bytes"].clone();
    let rest = json!({ "from": "a", "to": "b", "at_bytes": at_bytes });
    let rest = bench.call_method("volume_diff", rest).unwrap();
    assert_eq!(
        rest["changed"].as_array(),
        Some(&reported["changed"].as_array().unwrap()[1..].to_vec())
    );
    let refusal = bench.call_expecting_error("volume_diff", json!({ "from": "a", "to": "x" }));
    assert_eq!(refusal.message, bench.pool_name("pool").find_volume("x").unwrap_err().to_string());
}

#[test]
fn job_reports_progress_and_stops_on_request_or_when_not_queried() {
    let bench = PoolTest::new();
    let open = bench.pool_name("pool");
    let create = json!({ "name": "db", "size_bytes": 4 << 20, "thick": true });
    bench.call_method("set_volume_create", create).unwrap();
    let job = bench.call_method("set_volume_inflate", json!({ "name": "db" })).unwrap();
    let ended = bench.await_job_end(&job);
    assert_eq!((&ended["state"], &ended["volume"]), (&json!("done"), &json!("db")), "{ended}");
    assert_eq!(ended["done_bytes"], 4 << 20);
    assert!(ended["result"]["text"].as_str().unwrap().contains("`db` is thick"), "{ended}");

    // A volume with a store is written first, so that there is data to read.
    let volume = format!("volume:[{}]/db", bench.device_uri("pool")).parse().unwrap();
    tenmil_drivers::pool::create_pool(&bench.device_opener(), &volume, "inner", false).unwrap();
    let whole = bench.call_method("set_pool_scrub", json!({})).unwrap();
    let ended = bench.await_job_end(&whole);
    assert_eq!((&ended["state"], &ended["result"]["clean"]), (&json!("done"), &json!(true)));

    let slow = json!({ "rate_bytes": 1 });
    let job = bench.call_method("set_pool_scrub", slow.clone()).unwrap();
    assert_eq!(job["state"], "running");
    bench.call_method("set_job", json!({ "id": job["id"], "stop": true })).unwrap();
    let ended = bench.await_job_end(&job);
    assert_eq!(ended["state"], "stopped", "{ended}");

    let unheard = json!({ "rate_bytes": 1, "unheard_max_ms": 50 });
    let job = bench.call_method("set_pool_scrub", unheard).unwrap();
    let until = bench.clock.now().after(Span::from_secs(60));
    // Other jobs are queried, this one is not.
    let others = || bench.call_method("jobs", json!({ "id": 1 })).unwrap();
    let orders = bench.state.find_part::<PoolCommands>("orders").unwrap();
    while !format!("{orders:?}").contains(&format!("({}, \"stopped\")", job["id"])) {
        assert!(bench.clock.now() < until, "{orders:?}");
        others();
        tenmil_linux::named_thread::sleep(Span::from_ms(5));
    }

    let running: Vec<Value> =
        (0..4).map(|_| bench.call_method("set_pool_scrub", slow.clone()).unwrap()).collect();
    let refusal = bench.call_expecting_error("set_pool_scrub", slow);
    assert!(refusal.code == ErrorCode::Busy && refusal.message.contains("4 jobs"), "{refusal}");
    let began = bench.clock.now();
    let PoolTest { state, clock, _turn, .. } = bench;
    drop(state);
    assert!(clock.now().since(began) < Span::from_secs(5), "{running:?}");
    assert_eq!(Arc::strong_count(&open), 1, "no job has the pool open any more");
}

/// At any time, a client sees the job either running or with its result.
#[test]
fn ended_job_reports_its_result() {
    let bench = PoolTest::new();
    let _open = bench.pool_name("pool");
    for _ in 0..200 {
        let job = bench.call_method("set_pool_check", json!({})).unwrap();
        let until = bench.clock.now().after(Span::from_secs(60));
        let row = || bench.call_method("jobs", json!({ "id": job["id"] })).unwrap()[0].take();
        let ended = std::iter::repeat_with(row).find(|row| {
            assert!(bench.clock.now() < until, "{row} ends");
            row["state"] != "running"
        });
        let ended = ended.unwrap();
        assert!(ended["state"] == "done" && ended["result"].is_object(), "{ended}");
    }
}

/// One end of a stream, as passed with a request.
fn pass_stream(stream: &LocalConnection) -> PassedFd {
    let passed = PassedFd::default();
    passed.store_fd(stream.as_fd().try_clone_to_owned().unwrap());
    passed
}

#[test]
fn snapshot_is_sent_through_the_attached_stream() {
    let bench = PoolTest::new();
    let _open = bench.pool_name("pool");
    bench.call_method("set_volume_create", json!({ "name": "db", "size_bytes": 4 << 20 })).unwrap();
    let volume = format!("volume:[{}]/db", bench.device_uri("pool")).parse().unwrap();
    tenmil_drivers::pool::create_pool(&bench.device_opener(), &volume, "inner", false).unwrap();
    bench.call_method("set_volume_snapshot", json!({ "volume": "db", "name": "a" })).unwrap();

    let (ours, theirs) = LocalConnection::pair().unwrap();
    let send = bench
        .call_with_file("set_volume_send", json!({ "name": "a" }), pass_stream(&theirs))
        .unwrap();
    drop(theirs);
    let (mut stream, mut bytes) = (Vec::new(), vec![0; 1 << 16]);
    loop {
        match ours.receive(&mut bytes).unwrap() {
            RecvResult::Bytes(count) => stream.extend_from_slice(&bytes[..count]),
            RecvResult::WouldBlock => assert!(ours.wait_to_receive(Span::from_secs(60)).unwrap()),
            RecvResult::Eof => break,
        }
    }
    let ended = bench.await_job_end(&send);
    assert_eq!((&ended["state"], &ended["what"]), (&json!("done"), &json!("send")), "{ended}");
    let sent = ended["result"]["data_bytes"].as_u64().unwrap();
    assert!(sent > 0 && (stream.len() as u64) > sent, "{ended}");
    assert_eq!((&ended["done_bytes"], &ended["size_bytes"]), (&json!(sent), &json!(sent)));

    bench.call_method("set_volume_delete", json!({ "name": "a" })).unwrap();
    let (ours, theirs) = LocalConnection::pair().unwrap();
    let given = json!({ "name": "b" });
    let receive = bench.call_with_file("set_volume_receive", given, pass_stream(&theirs)).unwrap();
    drop(theirs);
    let mut left = &stream[..];
    while !left.is_empty() {
        left = &left[ours.send(left).unwrap()..];
        ours.wait_to_send(Span::from_secs(60)).unwrap();
    }
    let ended = bench.await_job_end(&receive);
    assert_eq!((&ended["state"], &ended["volume"]), (&json!("done"), &json!("b")), "{ended}");
    assert_eq!(ended["result"]["data_bytes"], sent);

    for method in ["set_volume_send", "set_volume_receive"] {
        let refusal = bench.call_expecting_error(method, json!({ "name": "b" }));
        assert!(refusal.message.contains("no descriptor beside it"), "{refusal}");
        assert!(refusal.code == ErrorCode::BadValue && refusal.hint.is_some(), "{refusal}");
        let wrong = PassedFd::default();
        wrong.store_fd(tempfile::tempfile().unwrap().into());
        let refusal = bench.call_with_file(method, json!({ "name": "b" }), wrong).unwrap_err();
        assert!(refusal.message.contains("another kind of descriptor"), "{refusal}");
    }
}

#[test]
fn rejected_job_reports_the_same_error_as_the_command() {
    let bench = PoolTest::new();
    let open = bench.pool_name("pool");
    let job = bench.call_method("set_volume_inflate", json!({ "name": "none" })).unwrap();
    let ended = bench.await_job_end(&job);
    let expected = open.find_volume("none").unwrap_err().to_string();
    assert_eq!(
        (&ended["state"], &ended["refusal"]["message"]),
        (&json!("refused"), &json!(expected))
    );
    for number in 0..20 {
        let job = bench.call_method("set_volume_inflate", json!({ "name": "none" })).unwrap();
        assert_eq!(job["id"], number + 2);
        bench.await_job_end(&job);
    }
    let rows = bench.call_method("jobs", json!({})).unwrap();
    assert_eq!(rows.as_array().map(Vec::len), Some(16), "the oldest are forgotten");
    assert_eq!(
        bench.call_expecting_error("set_job", json!({ "id": 1, "stop": true })).code,
        ErrorCode::NotFound
    );
}

#[test]
fn metrics_show_the_space_of_a_pool_and_of_its_volumes() {
    let bench = PoolTest::new();
    bench.create_pool_file("again");
    let _again = bench.pool_name("again");
    let _opened = bench.pool_name("pool");
    let create = json!({ "pool": "pool", "name": "db", "size_bytes": 8 << 20 });
    bench.call_method("set_volume_create", create).unwrap();
    let snapshot = json!({ "pool": "pool", "volume": "db", "name": "monday" });
    bench.call_method("set_volume_snapshot", snapshot).unwrap();
    let text = crate::metrics::render(&bench.state, false);
    for line in [
        "tenmil_pool_size_bytes{pool=\"pool\"} 33554432",
        "tenmil_pool_size_bytes{pool=\"again\"} 33554432",
        "tenmil_pool_volumes{pool=\"pool\"} 2",
        "tenmil_pool_stopped{pool=\"pool\"} 0",
        "tenmil_pool_provisioned_bytes{pool=\"pool\"} 8388608",
        "tenmil_volume_size_bytes{pool=\"pool\",volume=\"db\"} 8388608",
        "tenmil_volume_used_bytes{pool=\"pool\",volume=\"db\"} 0",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} in {text}");
    }
    assert!(!text.contains("monday"), "a snapshot has no series");
}
