//! Two gateways of a group with a store that speaks as etcd does: drain, a kill under verified load, discovery, changes of
//! the configuration, reservations, and Compare and Write.
//! `cargo xtask cluster` does the same with the real etcd.

#![expect(clippy::unwrap_used, reason = "a test may")]
#![allow(clippy::disallowed_methods, reason = "it has sockets, files and processes")]

#[expect(dead_code, reason = "this test uses a part of it")]
mod served;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};

use base64ct::{Base64, Encoding};
use serde_json::{Value, json};
use served::ServeProcess;
use tenmil_base::Span;
use tenmil_group::{Condition, LeaseId, MemoryStore, Put, StoreOperation, StoreReply, Transaction};

const TENMIL: &str = env!("CARGO_BIN_EXE_tenmil");
const NQN: &str = "nqn.2026-01.org.tenmil:disks";
const BACKEND: &str = "nqn.2026-01.org.tenmil:backend";

/// Store in memory behind the HTTP gateway of etcd.
#[derive(Clone)]
struct EtcdModel {
    store: Arc<Mutex<MemoryStore>>,
    /// Whether changes of the configuration wait.
    holds: Arc<AtomicBool>,
    started: Instant,
    address: SocketAddr,
}

impl EtcdModel {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let started = Instant::now();
        let model = Self { store: Arc::default(), holds: Arc::default(), started, address };
        let of_thread = model.clone();
        spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let model = of_thread.clone();
                spawn(move || model.serve(stream));
            }
        });
        model
    }

    /// Delays transactions that change the configuration, or executes them again, in their order.
    fn hold_changes(&self, holds: bool) {
        self.holds.store(holds, Ordering::SeqCst);
    }

    fn now(&self) -> tenmil_base::Instant {
        tenmil_base::Instant { ns: u64::try_from(self.started.elapsed().as_nanos()).unwrap() }
    }

    fn execute(&self, operation: &StoreOperation) -> StoreReply {
        self.store.lock().unwrap().execute_at(self.now(), operation)
    }

    fn serve(&self, mut stream: TcpStream) -> Option<()> {
        let mut reader = BufReader::new(stream.try_clone().ok()?);
        loop {
            let (mut head, mut len) = (String::new(), 0);
            loop {
                let mut line = String::new();
                if reader.read_line(&mut line).ok()? == 0 {
                    return None;
                }
                if let Some(count) = line.strip_prefix("content-length: ") {
                    len = count.trim().parse().unwrap();
                }
                if line == "\r\n" {
                    break;
                }
                head += &line;
            }
            let mut body = vec![0; len];
            reader.read_exact(&mut body).ok()?;
            let body: Value = serde_json::from_slice(&body).unwrap();
            let path = head.split(' ').nth(1).unwrap();
            if path == "/v3/watch" {
                return self.send_changes(stream);
            }
            let answer = self.answer(path, &body).to_string();
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", answer.len());
            stream.write_all((head + &answer).as_bytes()).ok()?;
        }
    }

    fn send_changes(&self, mut stream: TcpStream) -> Option<()> {
        stream.write_all(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n").ok()?;
        let mut last = None;
        loop {
            let revision = self.store.lock().unwrap().end_leases(self.now());
            if last != Some(revision) {
                stream.write_all(b"b\r\n{\"result\":0\r\n").ok()?;
                last = Some(revision);
            }
            sleep(Duration::from_millis(10));
        }
    }

    fn answer(&self, path: &str, body: &Value) -> Value {
        let header = json!({ "revision": "1" });
        let lease = || LeaseId(number(&body["ID"]));
        match path {
            "/v3/lease/grant" => {
                let time_to_live = Span::from_secs(number(&body["TTL"]));
                match self.execute(&StoreOperation::Grant { time_to_live }) {
                    StoreReply::Granted(lease) => json!({ "ID": lease.0.to_string() }),
                    other => panic!("{other:?}"),
                }
            }
            "/v3/lease/keepalive" => match self.execute(&StoreOperation::Renew(lease())) {
                StoreReply::Done => json!({ "result": { "TTL": "3" } }),
                _ => json!({ "result": { "header": header } }),
            },
            "/v3/lease/revoke" => match self.execute(&StoreOperation::Revoke(lease())) {
                StoreReply::Done => json!({ "header": header }),
                _ => json!({ "error": "requested lease not found", "code": 5 }),
            },
            "/v3/kv/range" => {
                let prefix = text(&body["key"]);
                let StoreReply::Snapshot(snapshot) = self.execute(&StoreOperation::Read) else {
                    panic!("no snapshot")
                };
                let pair = |(key, entry): (&String, &tenmil_group::Entry)| {
                    json!({
                        "key": base64(&format!("{prefix}{key}")),
                        "value": base64(&entry.value),
                        "mod_revision": entry.revision.to_string(),
                    })
                };
                let pairs: Vec<Value> = snapshot.entries.iter().map(pair).collect();
                json!({ "header": header, "kvs": pairs })
            }
            "/v3/kv/txn" => {
                let key = |value: &Value| {
                    text(value).strip_prefix("/tenmil/group/disks/").unwrap().to_owned()
                };
                let conditions = body["compare"].as_array().unwrap().iter().map(|it| Condition {
                    key: key(&it["key"]),
                    revision: number(&it["mod_revision"]),
                });
                let puts = body["success"].as_array().unwrap().iter().map(|it| {
                    let put = &it["request_put"];
                    let lease = Some(LeaseId(number(&put["lease"]))).filter(|lease| lease.0 > 0);
                    Put { key: key(&put["key"]), value: text(&put["value"]), lease }
                });
                let puts: Vec<Put> = puts.collect();
                while self.holds.load(Ordering::SeqCst)
                    && puts.iter().any(|put| put.key == "configuration")
                {
                    sleep(Duration::from_millis(5));
                }
                let transaction = Transaction { conditions: conditions.collect(), puts };
                match self.execute(&StoreOperation::Commit(transaction)) {
                    StoreReply::Committed => json!({ "header": header, "succeeded": true }),
                    StoreReply::Conflict => json!({ "header": header }),
                    _ => json!({ "error": "requested lease not found", "code": 5 }),
                }
            }
            other => panic!("{other}"),
        }
    }
}

struct Gateway {
    served: ServeProcess,
    /// `ADDRESS:PORT` of its listener.
    address: String,
}

impl Gateway {
    fn start(root: &Path, member: &str, etcd: SocketAddr, backend: &str) -> Self {
        let file = Self::write_file(root, member, etcd, backend);
        let line = format!("{TENMIL} serve --config '{}' 2>'{0}.log'", file.display());
        let served = ServeProcess::start_shell_line(&line);
        let address = address_of(&served);
        Self { served, address }
    }

    fn write_file(root: &Path, member: &str, etcd: SocketAddr, backend: &str) -> PathBuf {
        let namespaces: String = (1..=2)
            .map(|nsid| {
                format!(
                    "[[subsystem.namespace]]\nuri = \"tcp://{backend}/{BACKEND}/{nsid}\"\n\
                     ana-group = {nsid}\n"
                )
            })
            .collect();
        // The port is not known before it is bound, so discovery has one that is not used here.
        let text = format!(
            "[group]\nname = \"disks\"\nmember = \"{member}\"\nstore = \"etcd:http://{etcd}\"\n\
             addresses = [\"192.0.2.1:4420\"]\n[[listener]]\naddress = \"127.0.0.1:0\"\n\
             [[subsystem]]\nnqn = \"{NQN}\"\n{namespaces}"
        );
        let file = root.join(format!("{member}.toml"));
        std::fs::write(&file, text).unwrap();
        file
    }

    fn status(&self) -> Value {
        let text = self.served.stdout_of_rpc_command("group status --json");
        serde_json::from_str(&text).unwrap()
    }

    /// Owner of an ANA group, if it has the devices open.
    fn owner_of(&self, ana_group: usize) -> Option<String> {
        let found = self.status()["ana_groups"][ana_group - 1].clone();
        (found["is_open"] == true).then(|| found["owner"].as_str().unwrap_or_default().to_owned())
    }

    fn await_owners(&self, owners: [&str; 2]) {
        let end = Instant::now() + Duration::from_secs(30);
        while [1, 2].map(|group| self.owner_of(group).unwrap_or_default()) != owners {
            assert!(Instant::now() < end, "{}, expected {owners:?}", self.status());
            sleep(Duration::from_millis(20));
        }
    }
}

fn address_of(served: &ServeProcess) -> String {
    let address = served.ready.split_whitespace().find_map(|word| word.strip_prefix("tcp://"));
    address.unwrap().to_owned()
}

fn number(value: &Value) -> u64 {
    value.as_u64().or_else(|| value.as_str()?.parse().ok()).unwrap_or(0)
}

fn base64(text: &str) -> String {
    Base64::encode_string(text.as_bytes())
}

fn text(value: &Value) -> String {
    String::from_utf8(Base64::decode_vec(value.as_str().unwrap()).unwrap()).unwrap()
}

/// Serves three disks.
fn start_backend(root: &Path) -> ServeProcess {
    let disks: String = ["one", "two", "three"]
        .map(|name| format!("'file:{}?size=16m' ", root.join(name).display()))
        .concat();
    let line = format!("{TENMIL} serve {disks} -l tcp://127.0.0.1:0 --nqn {BACKEND}");
    ServeProcess::start_shell_line(&line)
}

fn await_true(what: &str, mut is_true: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !is_true() {
        assert!(Instant::now() < end, "{what}");
        sleep(Duration::from_millis(20));
    }
}

#[test]
fn hosts_go_on_when_a_gateway_is_drained_and_when_one_is_killed() {
    let root = tempfile::tempdir().unwrap();
    let backend = start_backend(root.path());
    let etcd = EtcdModel::start();
    let start = |member| Gateway::start(root.path(), member, etcd.address, &address_of(&backend));
    let a = start("a");
    a.await_owners(["a", "a"]);
    let b = start("b");
    // It gets its share at once, and not when hosts have had the time to connect.
    b.served.stdout_of_rpc_command("group rebalance");
    b.await_owners(["a", "b"]);
    let found = b.served.command(&["discover", &format!("tcp://{}", b.address)]).output().unwrap();
    let found = String::from_utf8(found.stdout).unwrap();
    assert!(found.contains(&format!("tcp://192.0.2.1:4420/{NQN}")), "that of the other: {found}");

    let uri = |nsid| format!("tcp://{},{}/{NQN}/{nsid}", a.address, b.address);
    let mut load = Command::new(TENMIL);
    load.args(["perf", "-w", "randrw", "--verify", "--overwrite", "--json", "-q", "4", "-t", "9"]);
    let load = load.args([uri(1), uri(2)]).stdout(Stdio::piped()).stderr(Stdio::null());
    let load = load.spawn().unwrap();
    sleep(Duration::from_secs(1));
    a.served.stdout_of_rpc_command("group drain");
    b.await_owners(["b", "b"]);
    a.served.stdout_of_rpc_command("group rebalance");
    b.await_owners(["b", "a"]);
    let killed = format!("kill -KILL {}", a.served.pid());
    assert!(Command::new("sh").args(["-c", &killed]).status().unwrap().success());
    b.await_owners(["b", "b"]);
    let output = load.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["errors"], 0, "{report}");
    for kind in ["stale_blocks", "torn_blocks", "misplaced_blocks", "foreign_blocks"] {
        assert_eq!(report["verified"][kind], 0, "{report}");
    }
    assert!(report["verified"]["good_blocks"].as_u64().unwrap() > 0, "{report}");
    assert_eq!(b.served.stop_with_sigterm(), Some(0));
}

#[test]
fn configuration_is_compared_at_join_and_changed_on_all_gateways() {
    let root = tempfile::tempdir().unwrap();
    let backend = start_backend(root.path());
    let etcd = EtcdModel::start();
    let backend_address = address_of(&backend);
    let a = Gateway::start(root.path(), "a", etcd.address, &backend_address);
    a.await_owners(["a", "a"]);

    let file = Gateway::write_file(root.path(), "c", etcd.address, &backend_address);
    let other = std::fs::read_to_string(&file)
        .unwrap()
        .replace(&format!("{BACKEND}/2"), &format!("{BACKEND}/3"));
    std::fs::write(&file, other).unwrap();
    let mut refused = Command::new("timeout");
    let refused = refused.args(["30", TENMIL, "serve", "--config"]).arg(&file).output().unwrap();
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(2), "{text}");
    let found = format!(
        "namespace 2 of {NQN}: `uri` is \"tcp://{backend_address}/{BACKEND}/3\", expected \
         \"tcp://{backend_address}/{BACKEND}/2\" as in the group"
    );
    assert!(text.contains(&found), "{text}");

    let b = Gateway::start(root.path(), "b", etcd.address, &backend_address);
    await_true("b joins", || b.status()["state"] == "member");
    let third = format!("tcp://{backend_address}/{BACKEND}/3");
    let nsids = |gateway: &Gateway| {
        let rows = gateway.served.stdout_of_rpc_command("get namespaces --json");
        let rows: Value = serde_json::from_str(&rows).unwrap();
        rows.as_array().unwrap().iter().map(|row| row["nsid"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    // b owns nothing yet; a opens the device.
    let create = format!("namespace create {NQN} {third} --ana-group 2");
    b.served.stdout_of_rpc_command(&create);
    await_true("a has the namespace", || nsids(&a) == [1, 2, 3]);
    let file = std::fs::read_to_string(root.path().join("a.toml")).unwrap();
    assert!(file.contains(&third) && file.contains("member = \"a\""), "{file}");
    await_true("a host uses it", || {
        let uri = format!("tcp://{}/{NQN}/3", a.address);
        let read = Command::new(TENMIL).args(["perf", &uri, "-w", "randread", "-t", "1"]).output();
        read.unwrap().status.success()
    });
    a.served.stdout_of_rpc_command(&format!("namespace delete {NQN} 3"));
    await_true("b has it no more", || nsids(&b) == [1, 2]);

    // The second of two gateways that change the same configuration is refused.
    etcd.hold_changes(true);
    let change = |gateway: &Gateway, size: u32| {
        let line = format!("namespace create {NQN} {third} --ana-group 1 --nsid {size}");
        let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
        let mut command =
            gateway.served.command(&words.iter().map(String::as_str).collect::<Vec<_>>());
        spawn(move || command.output().unwrap())
    };
    let both = [change(&a, 8), change(&b, 9)];
    sleep(Duration::from_millis(500));
    etcd.hold_changes(false);
    let ended = both.map(|thread| thread.join().unwrap());
    let succeeded = ended.iter().filter(|output| output.status.success()).count();
    let errors: String =
        ended.iter().map(|output| String::from_utf8_lossy(&output.stderr).into_owned()).collect();
    assert_eq!(succeeded, 1, "{errors}");
    assert!(errors.contains("another gateway has changed the configuration"), "{errors}");
    await_true("both have the same", || nsids(&a) == nsids(&b) && nsids(&a).len() == 3);
}

#[test]
fn reservations_are_refused_and_compare_and_write_holds_across_gateways() {
    use tenmil::{Access, IoErrorKind, Runtime};
    use tenmil_base::IoStatus;
    let root = tempfile::tempdir().unwrap();
    let backend = start_backend(root.path());
    let etcd = EtcdModel::start();
    let start = |member| Gateway::start(root.path(), member, etcd.address, &address_of(&backend));
    let a = start("a");
    a.await_owners(["a", "a"]);
    let b = start("b");
    await_true("b joins", || b.status()["state"] == "member");
    for gateway in [&a, &b] {
        let uri = format!("tcp://{}/{NQN}/1", gateway.address);
        let found = gateway.served.command(&["identify", &uri, "--json"]).output().unwrap();
        let found: Value = serde_json::from_slice(&found.stdout).unwrap();
        let oncs = found["controller"]["identify"]["oncs"].as_u64().unwrap();
        assert_eq!(oncs & 1 << 5, 0, "reservations are not announced");
        assert_eq!(found["controller"]["identify"]["fuses"], 1, "Compare and Write is");
        assert_eq!(found["namespaces"]["1"]["identify"]["rescap"].as_u64().unwrap_or(0), 0);
    }
    let runtime = Runtime::new().unwrap();
    let uri = format!("tcp://{},{}/{NQN}/1", a.address, b.address);
    runtime.block_on(async {
        let device = runtime.open(&uri, Access::ReadWrite).await.unwrap();
        let block = device.limits().block_size;
        let pair = |old: u8, new: u8| {
            let mut pair = device.buffer(2 * block).unwrap();
            pair.store(0, &vec![old; block as usize]);
            pair.store(block, &vec![new; block as usize]);
            pair
        };
        device.compare_and_write(0, pair(0, 1)).await.unwrap();
        a.served.stdout_of_rpc_command("group drain");
        b.await_owners(["b", "b"]);
        let stale = device.compare_and_write(0, pair(0, 2)).await.unwrap_err();
        assert_eq!(stale.why, IoErrorKind::Status(IoStatus::COMPARE_FAILURE));
        device.compare_and_write(0, pair(1, 2)).await.unwrap();
    });
    drop(runtime);
    assert_eq!(b.served.stop_with_sigterm(), Some(0));
}
