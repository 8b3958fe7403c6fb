//! Pool commands called through the method table, with pools of this process.

use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};
use tenmil_base::Span;
use tenmil_block::{OpenedDevice, Opener};
use tenmil_dma::RegionTable;
use tenmil_drivers::pool::{OpenPool, VolumeRef};
use tenmil_linux::Clock;
use tenmil_linux::local_socket::{Connection, RecvResult};

use super::{PoolCommands, find};
use crate::arguments::Arguments;
use crate::deferred::DeferredReply;
use crate::error::{Code, RpcError};
use crate::event::announcements;
use crate::method::CallContext;
use crate::methods::TABLE;
use crate::passed_fd::PassedFd;
use crate::state::ServerState;

/// Pools of this process are visible to all tests, so only one test at a time uses them.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// Process with a pool.
struct Bench {
    directory: tempfile::TempDir,
    regions: RegionTable,
    clock: Clock,
    state: ServerState,
    _turn: MutexGuard<'static, ()>,
}

impl Bench {
    fn new() -> Self {
        let turn = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let (announcer, _announcements) = announcements().unwrap();
        let state = ServerState::new().with(PoolCommands::new(&[], announcer));
        let (directory, regions) = (tempfile::tempdir().unwrap(), RegionTable::new(400));
        let bench = Self { directory, regions, clock: Clock::start(), state, _turn: turn };
        bench.make("pool");
        bench
    }

    fn opener(&self) -> Opener<'_> {
        Opener { regions: &self.regions, clock: self.clock, seed: 1, kinds: tenmil_drivers::KINDS }
    }

    fn device(&self, name: &str) -> String {
        format!("file:{}?engine=threads", self.directory.path().join(name).display())
    }

    fn make(&self, name: &str) {
        let device = format!("{}&size=32m", self.device(name)).parse().unwrap();
        tenmil_drivers::pool::create_pool(&self.opener(), &device, name, false).unwrap();
    }

    fn store(&self, name: &str) -> Arc<OpenPool> {
        let place = VolumeRef::pool_on(&self.device(name).parse().unwrap());
        OpenPool::open(&self.opener(), &place).unwrap()
    }

    fn open(&self, volume: &str) -> OpenedDevice {
        let uri = format!("volume:[{}]/{volume}", self.device("pool"));
        self.opener().open(&uri.parse().unwrap()).unwrap()
    }

    /// Calls a method and waits for its response.
    fn call(&self, method: &str, given: Value) -> Result<Value, RpcError> {
        self.call_with(method, given, PassedFd::default())
    }

    /// Same, with a passed file descriptor.
    fn call_with(&self, method: &str, given: Value, passed: PassedFd) -> Result<Value, RpcError> {
        let method = TABLE.find(method).unwrap();
        let arguments = Arguments::check(method, given.as_object().unwrap())?;
        let later = DeferredReply::default();
        let (state, passed) = (&self.state, &passed);
        let call =
            CallContext { table: &TABLE, state, arguments: &arguments, later: &later, passed };
        let now = (method.run)(&call)?;
        let answer = match later.take() {
            None => now,
            Some(pending) => {
                let until = self.clock.now().after(Span::from_secs(60));
                while !pending.is_there() {
                    assert!(self.clock.now() < until, "{} is answered", method.name);
                    tenmil_linux::thread::sleep(Span::from_ms(1));
                }
                pending.take().unwrap()?
            }
        };
        assert_eq!(method.answer.check(&answer), Ok(()), "{}", method.name);
        Ok(answer)
    }

    fn refused(&self, method: &str, given: Value) -> RpcError {
        self.call(method, given).unwrap_err()
    }

    /// Waits until a job has ended.
    fn end_of(&self, job: &Value) -> Value {
        let until = self.clock.now().after(Span::from_secs(60));
        loop {
            let rows = self.call("jobs", json!({ "id": job["id"] })).unwrap();
            if rows[0]["state"] != "running" {
                return rows[0].clone();
            }
            assert!(self.clock.now() < until, "{job} ends");
            tenmil_linux::thread::sleep(Span::from_ms(1));
        }
    }
}

#[test]
fn orders_are_carried_out_on_the_store_that_is_open_and_said_twice_change_nothing() {
    let bench = Bench::new();
    let open = bench.store("pool");
    let names = |bench: &Bench| -> Vec<String> {
        let rows = bench.call("volumes", json!({})).unwrap();
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
    ] {
        let first = bench.call(method, given.clone()).unwrap();
        assert_eq!(
            (&first["changed"], names(&bench)),
            (&json!(true), after.clone().iter().map(|name| (*name).to_owned()).collect()),
            "{method}"
        );
        let generation = open.generation();
        let second = bench.call(method, given).unwrap();
        assert_eq!(
            (&second["changed"], open.generation()),
            (&json!(false), generation),
            "{method}"
        );
        assert_eq!(second["volume"], first["volume"], "{method}");
    }
    let store = &bench.call("pools", json!({})).unwrap()[0];
    assert_eq!(store["thresholds_percent"], json!([70, 90]));
    assert_eq!((&store["volumes"], &store["name"]), (&json!(2), &json!("pool")));
    let refusal = bench.refused("set_volume_delete", json!({ "name": "db", "pool": "other" }));
    assert_eq!(refusal.code, Code::NotFound);
    let refusal = bench.refused("set_volume_snapshot", json!({ "volume": "x", "name": "y" }));
    let expected = open.find_volume("x").unwrap_err();
    assert_eq!((refusal.code, refusal.message), (Code::Failed, expected.to_string()));
}

#[test]
fn deleting_a_volume_that_is_not_there_is_refused_unless_it_is_said_to_be_no_error() {
    let bench = Bench::new();
    let open = bench.store("pool");
    bench.call("set_volume_create", json!({ "name": "db", "size_bytes": 1 << 20 })).unwrap();
    let generation = open.generation();
    let refusal = bench.refused("set_volume_delete", json!({ "name": "dv" }));
    assert_eq!((refusal.code, refusal.category), (Code::Failed, tenmil_base::ErrorCategory::Usage));
    assert!(refusal.message.contains("no volume `dv`, expected `db`"), "{refusal}");
    let told = bench.call("set_volume_delete", json!({ "name": "dv", "if_exists": true }));
    assert_eq!(told.unwrap()["changed"], json!(false));
    assert_eq!(open.generation(), generation);
}

#[test]
fn what_somebody_has_open_is_not_taken_from_him() {
    let bench = Bench::new();
    let _open = bench.store("pool");
    bench.call("set_volume_create", json!({ "name": "db", "size_bytes": 1 << 20 })).unwrap();
    bench.call("set_volume_snapshot", json!({ "volume": "db", "name": "mon" })).unwrap();
    bench.call("set_volume_resize", json!({ "name": "db", "size_bytes": 2 << 20 })).unwrap();
    let (db, mon) = (bench.open("db"), bench.open("mon"));
    let us = format!("it is open in process {}", std::process::id());
    let shrink = json!({ "name": "db", "size_bytes": 1 << 19, "shrink": true });
    let cases = [
        ("set_volume_delete", json!({ "name": "mon" })),
        ("set_volume_delete", json!({ "name": "db" })),
        ("set_volume_resize", shrink),
        ("set_volume_rollback", json!({ "volume": "db", "snapshot": "mon" })),
    ];
    for (method, given) in &cases {
        let refusal = bench.refused(method, given.clone());
        assert!(refusal.message.contains(&us), "{method}: {refusal}");
        assert!(
            refusal.hint.is_some() && refusal.category == tenmil_base::ErrorCategory::Usage,
            "{method}"
        );
    }
    let users = bench.call("volumes", json!({})).unwrap();
    assert_eq!((&users[0]["users"], &users[1]["users"]), (&json!(1), &json!(1)));
    let grown = json!({ "name": "db", "size_bytes": 4 << 20 });
    let told = bench.call("set_volume_resize", grown).unwrap();
    assert!(told["text"].as_str().unwrap().contains("when they open it again"), "{told}");
    assert_eq!(db.medium.limits().block_count, 512, "whoever has it open sees what he opened");
    drop((db, mon));
    for (method, given) in cases.iter().rev().filter(|(_, given)| given["name"] != "mon") {
        assert_eq!(bench.call(method, given.clone()).unwrap()["changed"], true, "{method}");
    }
}

#[test]
fn a_store_is_found_by_any_of_its_names_unless_there_are_two_of_it() {
    let bench = Bench::new();
    assert_eq!(find(None).unwrap_err().code, Code::NotFound);
    let first = bench.store("pool");
    for name in [None, Some("pool".into()), Some(format!("{:032x}", first.uuid()))] {
        assert_eq!(find(name.as_deref()).unwrap().uuid(), first.uuid(), "{name:?}");
    }
    bench.make("other");
    let second = bench.store("other");
    let refusal = find(None).unwrap_err();
    assert!(refusal.message.contains(first.device_uri()), "{refusal}");
    assert!(refusal.message.contains(second.device_uri()), "{refusal}");
    assert_eq!(find(Some(second.device_uri())).unwrap().uuid(), second.uuid());
    let rows = bench.call("pools", json!({})).unwrap();
    assert_eq!(rows.as_array().map(Vec::len), Some(2));
    assert_ne!(rows[0]["identity"], rows[1]["identity"]);
}

#[test]
fn what_differs_is_told_and_whoever_is_not_there_is_named() {
    let bench = Bench::new();
    let _open = bench.store("pool");
    bench.call("set_volume_create", json!({ "name": "db", "size_bytes": 4 << 20 })).unwrap();
    bench.call("set_volume_snapshot", json!({ "volume": "db", "name": "a" })).unwrap();
    let volume = format!("volume:[{}]/db", bench.device("pool")).parse().unwrap();
    tenmil_drivers::pool::create_pool(&bench.opener(), &volume, "inner", false).unwrap();
    bench.call("set_volume_snapshot", json!({ "volume": "db", "name": "b" })).unwrap();
    let told = bench.call("volume_diff", json!({ "from": "a", "to": "b" })).unwrap();
    let first = &told["changed"][0];
    assert_eq!((&first["offset_bytes"], &first["kind"]), (&json!(0), &json!("data")), "{told}");
    assert_eq!(told["next_bytes"], Value::Null);
    let at_bytes = first["length_bytes"].clone();
    let rest = json!({ "from": "a", "to": "b", "at_bytes": at_bytes });
    let rest = bench.call("volume_diff", rest).unwrap();
    assert_eq!(
        rest["changed"].as_array(),
        Some(&told["changed"].as_array().unwrap()[1..].to_vec())
    );
    let refusal = bench.refused("volume_diff", json!({ "from": "a", "to": "x" }));
    assert_eq!(refusal.message, bench.store("pool").find_volume("x").unwrap_err().to_string());
}

#[test]
fn something_long_tells_how_far_it_is_and_stops_when_told_or_when_nobody_asks() {
    let bench = Bench::new();
    let open = bench.store("pool");
    let create = json!({ "name": "db", "size_bytes": 4 << 20, "thick": true });
    bench.call("set_volume_create", create).unwrap();
    let job = bench.call("set_volume_inflate", json!({ "name": "db" })).unwrap();
    let ended = bench.end_of(&job);
    assert_eq!((&ended["state"], &ended["volume"]), (&json!("done"), &json!("db")), "{ended}");
    assert_eq!(ended["done_bytes"], 4 << 20);
    assert!(ended["result"]["text"].as_str().unwrap().contains("`db` is thick"), "{ended}");

    // A volume with a store is written first, so that there is data to read.
    let volume = format!("volume:[{}]/db", bench.device("pool")).parse().unwrap();
    tenmil_drivers::pool::create_pool(&bench.opener(), &volume, "inner", false).unwrap();
    let whole = bench.call("set_pool_scrub", json!({})).unwrap();
    let ended = bench.end_of(&whole);
    assert_eq!((&ended["state"], &ended["result"]["clean"]), (&json!("done"), &json!(true)));

    let slow = json!({ "rate_bytes": 1 });
    let job = bench.call("set_pool_scrub", slow.clone()).unwrap();
    assert_eq!(job["state"], "running");
    bench.call("set_job", json!({ "id": job["id"], "stop": true })).unwrap();
    let ended = bench.end_of(&job);
    assert_eq!(ended["state"], "stopped", "{ended}");

    let unheard = json!({ "rate_bytes": 1, "unheard_max_ms": 50 });
    let job = bench.call("set_pool_scrub", unheard).unwrap();
    let until = bench.clock.now().after(Span::from_secs(60));
    // Other jobs are queried, this one is not.
    let others = || bench.call("jobs", json!({ "id": 1 })).unwrap();
    let orders = bench.state.part::<PoolCommands>("orders").unwrap();
    while !format!("{orders:?}").contains(&format!("({}, \"stopped\")", job["id"])) {
        assert!(bench.clock.now() < until, "{orders:?}");
        others();
        tenmil_linux::thread::sleep(Span::from_ms(5));
    }

    let running: Vec<Value> =
        (0..4).map(|_| bench.call("set_pool_scrub", slow.clone()).unwrap()).collect();
    let refusal = bench.refused("set_pool_scrub", slow);
    assert!(refusal.code == Code::Busy && refusal.message.contains("4 jobs"), "{refusal}");
    let began = bench.clock.now();
    let Bench { state, clock, _turn, .. } = bench;
    drop(state);
    assert!(clock.now().since(began) < Span::from_secs(5), "{running:?}");
    assert_eq!(Arc::strong_count(&open), 1, "no job has the pool open any more");
}

/// At any time, a client sees the job either running or with its result.
#[test]
fn a_job_that_has_ended_tells_what_came_of_it() {
    let bench = Bench::new();
    let _open = bench.store("pool");
    for _ in 0..200 {
        let job = bench.call("set_pool_check", json!({})).unwrap();
        let until = bench.clock.now().after(Span::from_secs(60));
        let row = || bench.call("jobs", json!({ "id": job["id"] })).unwrap()[0].take();
        let ended = std::iter::repeat_with(row).find(|row| {
            assert!(bench.clock.now() < until, "{row} ends");
            row["state"] != "running"
        });
        let ended = ended.unwrap();
        assert!(ended["state"] == "done" && ended["result"].is_object(), "{ended}");
    }
}

/// One end of a stream, as passed with a request.
fn passed(stream: &Connection) -> PassedFd {
    let passed = PassedFd::default();
    passed.put(stream.as_fd().try_clone_to_owned().unwrap());
    passed
}

#[test]
fn a_snapshot_goes_through_the_stream_that_came_beside_the_request() {
    let bench = Bench::new();
    let _open = bench.store("pool");
    bench.call("set_volume_create", json!({ "name": "db", "size_bytes": 4 << 20 })).unwrap();
    let volume = format!("volume:[{}]/db", bench.device("pool")).parse().unwrap();
    tenmil_drivers::pool::create_pool(&bench.opener(), &volume, "inner", false).unwrap();
    bench.call("set_volume_snapshot", json!({ "volume": "db", "name": "a" })).unwrap();

    let (ours, theirs) = Connection::pair().unwrap();
    let send = bench.call_with("set_volume_send", json!({ "name": "a" }), passed(&theirs)).unwrap();
    drop(theirs);
    let (mut stream, mut bytes) = (Vec::new(), vec![0; 1 << 16]);
    loop {
        match ours.receive(&mut bytes).unwrap() {
            RecvResult::Bytes(count) => stream.extend_from_slice(&bytes[..count]),
            RecvResult::WouldBlock => assert!(ours.wait_to_receive(Span::from_secs(60)).unwrap()),
            RecvResult::Eof => break,
        }
    }
    let ended = bench.end_of(&send);
    assert_eq!((&ended["state"], &ended["what"]), (&json!("done"), &json!("send")), "{ended}");
    let sent = ended["result"]["data_bytes"].as_u64().unwrap();
    assert!(sent > 0 && (stream.len() as u64) > sent, "{ended}");
    assert_eq!((&ended["done_bytes"], &ended["size_bytes"]), (&json!(sent), &json!(sent)));

    bench.call("set_volume_delete", json!({ "name": "a" })).unwrap();
    let (ours, theirs) = Connection::pair().unwrap();
    let given = json!({ "name": "b" });
    let receive = bench.call_with("set_volume_receive", given, passed(&theirs)).unwrap();
    drop(theirs);
    let mut left = &stream[..];
    while !left.is_empty() {
        left = &left[ours.send(left).unwrap()..];
        ours.wait_to_send(Span::from_secs(60)).unwrap();
    }
    let ended = bench.end_of(&receive);
    assert_eq!((&ended["state"], &ended["volume"]), (&json!("done"), &json!("b")), "{ended}");
    assert_eq!(ended["result"]["data_bytes"], sent);

    for method in ["set_volume_send", "set_volume_receive"] {
        let refusal = bench.refused(method, json!({ "name": "b" }));
        assert!(refusal.message.contains("no descriptor beside it"), "{refusal}");
        assert!(refusal.code == Code::BadValue && refusal.hint.is_some(), "{refusal}");
        let wrong = PassedFd::default();
        wrong.put(tempfile::tempfile().unwrap().into());
        let refusal = bench.call_with(method, json!({ "name": "b" }), wrong).unwrap_err();
        assert!(refusal.message.contains("another kind of descriptor"), "{refusal}");
    }
}

#[test]
fn a_job_that_is_refused_says_why_as_the_order_would() {
    let bench = Bench::new();
    let open = bench.store("pool");
    let job = bench.call("set_volume_inflate", json!({ "name": "none" })).unwrap();
    let ended = bench.end_of(&job);
    let expected = open.find_volume("none").unwrap_err().to_string();
    assert_eq!(
        (&ended["state"], &ended["refusal"]["message"]),
        (&json!("refused"), &json!(expected))
    );
    for number in 0..20 {
        let job = bench.call("set_volume_inflate", json!({ "name": "none" })).unwrap();
        assert_eq!(job["id"], number + 2);
        bench.end_of(&job);
    }
    let rows = bench.call("jobs", json!({})).unwrap();
    assert_eq!(rows.as_array().map(Vec::len), Some(16), "the oldest are forgotten");
    assert_eq!(bench.refused("set_job", json!({ "id": 1, "stop": true })).code, Code::NotFound);
}
