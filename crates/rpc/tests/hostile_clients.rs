//! Many, slow and malformed clients: memory stays bounded, and others are answered. Runs in a process of
//! its own, because it measures the memory of the whole process.

#![expect(clippy::unwrap_used, reason = "a test may")]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use serde_json::{Map, json};
use tenmil_base::{Random, Span};
use tenmil_linux::Clock;
use tenmil_linux::process_stats::ProcessStats;
use tenmil_linux::runtime_directory::RuntimeDirectory;
use tenmil_rpc::{
    Event, EventKind, EventSender, ProcessParts, ProgramInfo, RpcClient, RpcServer, TABLE,
    event_channel,
};

const TIME_LIMIT: Span = Span::from_secs(20);
const BELL: EventKind = EventKind { name: "bell", help: "the bell rang" };

struct TestServer {
    server: RpcServer,
    announcer: EventSender,
    _root: tempfile::TempDir,
}

fn start_server() -> TestServer {
    let root = tempfile::tempdir().unwrap();
    let directory = RuntimeDirectory::at_path(root.path().join("run")).unwrap();
    let (announcer, announced) = event_channel().unwrap();
    let state = ProcessParts::new().with_part(ProgramInfo { version: "1", log: None });
    let server = RpcServer::start(&directory, 7, &TABLE, state, announced).unwrap();
    TestServer { server, announcer, _root: root }
}

impl TestServer {
    fn connect_client(&self) -> RpcClient {
        RpcClient::connect(self.server.socket_path(), TIME_LIMIT).unwrap()
    }

    fn connect_stream(&self) -> UnixStream {
        let stream = UnixStream::connect(self.server.socket_path()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
        stream
    }
}

fn resident_bytes() -> u64 {
    ProcessStats::read().resident_bytes.unwrap_or_default()
}

/// A request that is not well-formed, or of which a part is missing.
fn malformed_request(random: &mut Random) -> Vec<u8> {
    const REQUESTS: [&str; 5] = [
        "GET /v1/threads?name=submit-0 HTTP/1.1\r\nhost: tenmil\r\n\r\n",
        "POST /v1/poll HTTP/1.1\r\nhost: tenmil\r\ncontent-length: 17\r\n\r\n{\"mode\":\"always\"}",
        "POST /v1/poll HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{\"a\":\r\n0\r\n\r\n",
        "DELETE /v1/methods/%2e%2e/x HTTP/1.1\r\nexpect: 100-continue\r\n\r\n",
        "{\"id\":1,\"method\":\"methods\"}\n",
    ];
    let mut below = |limit: usize| usize::try_from(random.below(limit as u64)).unwrap();
    let mut bytes = REQUESTS[below(REQUESTS.len())].as_bytes().to_vec();
    for _ in 0..=below(4) {
        let at = below(bytes.len());
        match below(5) {
            0 => bytes[at] = u8::try_from(below(256)).unwrap(),
            1 => bytes.truncate(at.max(1)),
            2 => bytes.insert(at, b"\r\n\0 %"[below(5)]),
            3 => bytes.extend_from_within(at..),
            _ => bytes.splice(at..at, vec![b'x'; below(50_000)]).for_each(drop),
        }
    }
    bytes
}

/// Clients that never finish their requests, ten thousand malformed requests, and one client that calls
/// methods all the while.
#[test]
fn malformed_and_slow_clients_cost_bounded_memory_and_delay_nobody() {
    let served = start_server();
    let mut client = served.connect_client();
    let mut call = |round: u32| {
        let called = client.call_method("methods", Map::new(), TIME_LIMIT);
        assert!(called.unwrap().is_array(), "in round {round}");
    };
    let mut slow: Vec<UnixStream> = (0..60).map(|_| served.connect_stream()).collect();
    let mut random = Random::new(32);
    let mut before = 0;
    for round in 0..10_000 {
        if round == 1_000 {
            before = resident_bytes();
        }
        let mut stream = served.connect_stream();
        // The connection may be closed before everything is sent.
        let _ = stream.write_all(&malformed_request(&mut random));
        let _ = stream.shutdown(std::net::Shutdown::Write);
        if round % 100 == 0 {
            let _ = stream.read(&mut [0; 64]);
            call(round);
            for stream in &mut slow {
                // Those that were closed for others connect again.
                if stream.write_all(b"G").is_err() {
                    *stream = served.connect_stream();
                }
            }
        }
    }
    let grown = resident_bytes().saturating_sub(before);
    assert!(before > 0 && grown < 32 << 20, "{grown} bytes more than before");
    call(u32::MAX);
}

#[test]
fn fifty_event_streams_receive_every_event_while_requests_are_answered() {
    const EVENTS: usize = 100;
    let served = start_server();
    let mut followers: Vec<RpcClient> = (0..50).map(|_| served.connect_client()).collect();
    for follower in &mut followers {
        follower.call_method("events", Map::new(), TIME_LIMIT).unwrap();
    }
    let mut client = served.connect_client();
    let (clock, requests) = (Clock::start(), 2_000);
    let began = clock.now();
    for number in 0..requests {
        if number % (requests / EVENTS) == 0 {
            let text = format!("number {}", number / (requests / EVENTS));
            served.announcer.emit(Event { kind: BELL, text, about: json!({}) });
        }
        client.call_method("process", Map::new(), TIME_LIMIT).unwrap();
    }
    let seconds = clock.now().since(began).as_secs_f64();
    println!("{:.0} requests per second beside 50 event streams", requests as f64 / seconds);
    for follower in &mut followers {
        for number in 0..EVENTS {
            let event = follower.next_event(TIME_LIMIT).unwrap().unwrap();
            assert_eq!(event["text"], format!("number {number}"));
        }
    }
}
