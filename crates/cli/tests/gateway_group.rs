//! Two gateways of a group with a store that speaks as etcd does: drain, a kill under verified load, discovery.
//! `cargo xtask cluster` does the same with the real etcd.

#![expect(clippy::unwrap_used, reason = "a test may")]
#![allow(clippy::disallowed_methods, reason = "it has sockets, files and processes")]

#[expect(dead_code, reason = "this test uses a part of it")]
mod served;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Command, Stdio};
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
    started: Instant,
    address: SocketAddr,
}

impl EtcdModel {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let model = Self { store: Arc::default(), started: Instant::now(), address };
        let of_thread = model.clone();
        spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let model = of_thread.clone();
                spawn(move || model.serve(stream));
            }
        });
        model
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
                let transaction =
                    Transaction { conditions: conditions.collect(), puts: puts.collect() };
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
        let line = format!("{TENMIL} serve --config '{}' 2>'{0}.log'", file.display());
        let served = ServeProcess::start_shell_line(&line);
        let address = address_of(&served);
        Self { served, address }
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

#[test]
fn hosts_go_on_when_a_gateway_is_drained_and_when_one_is_killed() {
    let root = tempfile::tempdir().unwrap();
    let disks: String = ["one", "two"]
        .map(|name| format!("'file:{}?size=16m' ", root.path().join(name).display()))
        .concat();
    let line = format!("{TENMIL} serve {disks} -l tcp://127.0.0.1:0 --nqn {BACKEND}");
    let backend = ServeProcess::start_shell_line(&line);
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
