//! The server over real sockets, in this process. Every wait has a time limit.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::{Map, Value, json};
use tenmil_base::Span;
use tenmil_linux::local_socket::{LocalConnection, RecvResult};
use tenmil_linux::runtime_directory::RuntimeDirectory;

use super::admission::CONNECTIONS_PER_PROCESS_MAX;
use super::connection::BODY_MAX;
use super::{ControlListeners, ControlToken, RpcServer};
use crate::client::RpcClient;
use crate::deferred_reply::ReplySender;
use crate::error::ErrorCode;
use crate::event::{Event, EventKind, EventSender, SET, event_channel};
use crate::method::{Method, MethodKind, MethodRegistry, ParamDefault, Parameter};
use crate::param_type::ParamType;
use crate::process_parts::ProcessParts;
use crate::result_type::ResultType;

pub(super) const TIME_LIMIT: Span = Span::from_secs(20);
const READ_TIMEOUT: Duration = Duration::from_secs(20);
const TOKEN: &str = "0123456789abcdef";

const fn row(
    verb: MethodKind,
    name: &'static str,
    parameters: &'static [Parameter],
    answer: ResultType,
    run: fn(&crate::CallContext<'_>) -> Result<Value, crate::RpcError>,
) -> Method {
    Method { verb, name, parameters, answer, help: "Do it", example: "tenmil do", run }
}

static TABLE: MethodRegistry = MethodRegistry::new(
    &[&[
        row(
            MethodKind::Get,
            "text",
            &[Parameter {
                name: "len",
                kind: ParamType::Whole { min: 1, max: 10_000_000 },
                need: ParamDefault::Default("3"),
                help: "how much of it",
            }],
            ResultType::Text,
            |call| {
                let len = usize::try_from(call.arguments.integer("len").unwrap_or(0)).unwrap_or(0);
                Ok("x".repeat(len).into())
            },
        ),
        row(MethodKind::Set, "text", &[], ResultType::Object, |_| Ok(json!({}))),
        row(MethodKind::Get, "passed", &[], ResultType::Flag, |call| {
            Ok(call.passed.take_fd().is_some().into())
        }),
        row(MethodKind::Get, "later", &[], ResultType::Flag, |call| {
            let announcer: &EventSender = call.state.find_part("sender")?;
            let (promise, pending) = ReplySender::new(announcer.clone());
            call.later.defer(pending);
            // The thread ends by itself; the test waits for its reply.
            let spawned = tenmil_linux::NamedThread::spawn("reply", None, move |_| {
                tenmil_linux::named_thread::sleep(Span::from_ms(200));
                promise.send_reply(Ok(true.into()));
            });
            std::mem::forget(spawned);
            Ok(Value::Null)
        }),
        row(
            MethodKind::Subscribe,
            "events",
            &[Parameter {
                name: "kind",
                kind: ParamType::Texts { len_max: 64, count_max: 64 },
                need: ParamDefault::Optional,
                help: "kinds of events",
            }],
            ResultType::Object,
            |_| Ok(json!({})),
        ),
    ]],
    &[&EventKind::COMMON],
);

pub(super) struct TestServer {
    pub(super) server: RpcServer,
    pub(super) announcer: EventSender,
    directory: RuntimeDirectory,
    _root: tempfile::TempDir,
}

fn start_server_at(add: impl FnOnce(&mut ControlListeners, &Path)) -> TestServer {
    let root = tempfile::tempdir().unwrap();
    let directory = RuntimeDirectory::at_path(root.path().join("run")).unwrap();
    let (announcer, announced) = event_channel().unwrap();
    let mut listeners = ControlListeners::new();
    listeners.add_process_socket(&directory, 7, None).unwrap();
    add(&mut listeners, root.path());
    let state = ProcessParts::new().with_part(announcer.clone());
    let server = RpcServer::start_at(listeners, &TABLE, state, announced).unwrap();
    TestServer { server, announcer, directory, _root: root }
}

pub(super) fn start_server() -> TestServer {
    start_server_at(|_, _| {})
}

impl TestServer {
    pub(super) fn connect_client(&self) -> RpcClient {
        RpcClient::connect(self.server.socket_path(), TIME_LIMIT).unwrap().with_table(&TABLE)
    }

    pub(super) fn connect_socket(&self) -> LocalConnection {
        LocalConnection::connect(self.server.socket_path(), TIME_LIMIT).unwrap()
    }

    fn connect_stream(&self) -> UnixStream {
        let stream = UnixStream::connect(self.server.socket_path()).unwrap();
        stream.set_read_timeout(Some(READ_TIMEOUT)).unwrap();
        stream
    }
}

pub(super) fn response_text_len(client: &mut RpcClient, len: u64) -> usize {
    let parameters = json!({ "len": len }).as_object().unwrap().clone();
    client.call_method("text", parameters, TIME_LIMIT).unwrap().as_str().unwrap().len()
}

fn subscribed_client(served: &TestServer) -> RpcClient {
    let mut client = served.connect_client();
    client.call_method("events", Map::new(), TIME_LIMIT).unwrap();
    client
}

/// Sends `request` and returns the response up to its end; the request closes the connection.
fn exchange(mut stream: impl Read + Write, request: &str) -> String {
    // The server closes a connection whose request it has rejected before the rest was sent.
    if let Err(error) = stream.write_all(request.as_bytes()) {
        assert_eq!(error.kind(), std::io::ErrorKind::BrokenPipe, "{error}");
    }
    let mut response = Vec::new();
    // A connection that is closed with unread bytes is reset after the response.
    let mut bytes = [0; 4096];
    while let Ok(count) = stream.read(&mut bytes)
        && count > 0
    {
        response.extend_from_slice(&bytes[..count]);
    }
    String::from_utf8(response).unwrap()
}

fn status_of(response: &str) -> &str {
    response.get(9..12).unwrap_or(response)
}

#[test]
fn valid_and_invalid_requests_on_one_connection_are_answered() {
    let served = start_server();
    let mut client = served.connect_client();
    assert_eq!(response_text_len(&mut client, 5), 5);
    let refusal = client.call_method("txt", Map::new(), TIME_LIMIT).unwrap_err();
    assert_eq!(refusal.code, ErrorCode::NoSuchMethod);
    assert_eq!(refusal.hint.as_deref(), Some("did you mean `text`?"));
    let wrong = json!({ "len": 0 }).as_object().unwrap().clone();
    let refusal = client.call_method("text", wrong, TIME_LIMIT).unwrap_err();
    assert_eq!(refusal.code, ErrorCode::BadValue, "{refusal}");
    assert_eq!(response_text_len(&mut client, 5_000_000), 5_000_000, "more than a socket holds");
}

#[test]
fn requests_sent_together_are_answered_in_their_order() {
    let served = start_server();
    let request = |len: u32, end: &str| {
        format!("GET /v1/text?len={len} HTTP/1.1\r\nhost: tenmil\r\n{end}\r\n")
    };
    let text = [request(1, ""), request(2, ""), request(3, "connection: close\r\n")].concat();
    let response = exchange(served.connect_stream(), &text);
    let bodies: Vec<&str> = response.lines().filter(|line| line.starts_with('"')).collect();
    assert_eq!(bodies, ["\"x\"", "\"xx\"", "\"xxx\""]);
}

#[test]
fn file_descriptor_reaches_the_first_consuming_method_and_more_are_rejected() {
    let served = start_server();
    let mut client = served.connect_client();
    let (one, other) = LocalConnection::pair().unwrap();
    let passed = |client: &mut RpcClient, files: &[BorrowedFd<'_>]| {
        client.call_with_files("passed", Map::new(), files, TIME_LIMIT).unwrap() == true
    };
    let found = [&[][..], &[one.as_fd()], &[]].map(|files| passed(&mut client, files));
    assert_eq!(found, [false, true, false]);
    let len = json!({ "len": 3 }).as_object().unwrap().clone();
    client.call_with_files("text", len.clone(), &[one.as_fd()], TIME_LIMIT).unwrap();
    // Replaces the descriptor passed before.
    client.call_with_files("text", len.clone(), &[one.as_fd()], TIME_LIMIT).unwrap();
    drop(one);
    assert_eq!([(); 2].map(|()| passed(&mut client, &[])), [true, false]);
    assert_eq!(other.receive(&mut [0; 8]).unwrap(), RecvResult::Eof, "none is kept");
    let both = [other.as_fd(), other.as_fd()];
    let refusal = client.call_with_files("text", len, &both, TIME_LIMIT).unwrap_err();
    assert_eq!(refusal.code, ErrorCode::ConnectionClosed, "{refusal}");
    assert!(!passed(&mut client, &[]), "it connects again");
}

#[test]
fn events_reach_all_subscribers_and_each_change_emits_one() {
    let served = start_server();
    let mut followers = [(); 2].map(|()| subscribed_client(&served));
    let mut other = served.connect_client();
    other.call_method("set_text", Map::new(), TIME_LIMIT).unwrap();
    let event = Event { kind: SET, text: "by hand".into(), about: json!({}) };
    served.announcer.emit(event);
    for follower in &mut followers {
        let first = follower.next_event(TIME_LIMIT).unwrap().unwrap();
        assert_eq!(first["kind"], "set");
        assert_eq!(first["about"]["method"], "set_text");
        assert_eq!(follower.next_event(TIME_LIMIT).unwrap().unwrap()["text"], "by hand");
        assert_eq!(response_text_len(follower, 1), 1, "it can still ask");
    }
    assert_eq!(other.next_event(Span::default()).unwrap(), None, "it did not follow");
}

#[test]
fn only_events_of_the_requested_kinds_are_sent() {
    let served = start_server();
    let mut follower = served.connect_client();
    let kinds = |kinds: Value| json!({ "kind": kinds }).as_object().unwrap().clone();
    let refusal = follower.call_method("events", kinds(json!("sett")), TIME_LIMIT).unwrap_err();
    assert_eq!(refusal.hint.as_deref(), Some("did you mean `set`?"), "{refusal}");
    follower.call_method("events", kinds(json!(["events-dropped"])), TIME_LIMIT).unwrap();
    served.announcer.emit(Event { kind: SET, text: "other".into(), about: json!({}) });
    served.announcer.report_dropped(3);
    let event = follower.next_event(TIME_LIMIT).unwrap().unwrap();
    assert_eq!(event["text"], "3 events were dropped");
}

#[test]
fn every_event_wakes_the_server_and_so_does_its_stop() {
    let served = start_server();
    let mut follower = subscribed_client(&served);
    for number in 0..5 {
        let text = format!("number {number}");
        served.announcer.emit(Event { kind: SET, text: text.clone(), about: json!({}) });
        // Nothing else wakes the server before the next event.
        assert_eq!(follower.next_event(TIME_LIMIT).unwrap().unwrap()["text"], text);
    }
    drop(served.server);
    assert_eq!(follower.next_event(TIME_LIMIT).unwrap().unwrap()["kind"], "shutdown");
}

#[test]
fn server_stop_notifies_clients_and_removes_the_socket() {
    let served = start_server();
    let mut follower = subscribed_client(&served);
    let path = served.server.socket_path().to_owned();
    assert_eq!(served.directory.listening_processes().unwrap(), [7]);
    drop(served.server);
    assert!(!path.exists());
    assert_eq!(follower.next_event(TIME_LIMIT).unwrap().unwrap()["kind"], "shutdown");
    assert_eq!(follower.next_event(TIME_LIMIT).unwrap_err().code, ErrorCode::ConnectionClosed);
    assert_eq!(RpcClient::connect(&path, TIME_LIMIT).unwrap_err().code, ErrorCode::NoProcess);
}

#[test]
fn deferred_reply_delays_no_other_connection() {
    let served = start_server();
    let mut waiting = served.connect_stream();
    waiting.write_all(b"GET /v1/later HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n").unwrap();
    waiting.set_nonblocking(true).unwrap();
    for _ in 0..50 {
        assert_eq!(response_text_len(&mut served.connect_client(), 1), 1);
    }
    waiting.set_nonblocking(false).unwrap();
    let mut response = String::new();
    waiting.read_to_string(&mut response).unwrap();
    assert!(response.ends_with("\r\n\r\ntrue\n"), "{response}");
}

#[test]
fn malformed_requests_have_fitting_statuses() {
    let served = start_server();
    let close = "host: tenmil\r\nconnection: close\r\n";
    for (request, status) in [
        (format!("GET /v1/text HTTP/1.1\r\n{close}\r\n"), "200"),
        (format!("HEAD /v1/text HTTP/1.1\r\n{close}\r\n"), "200"),
        (format!("GET /v1/txt HTTP/1.1\r\n{close}\r\n"), "404"),
        (format!("PUT /v1/text HTTP/1.1\r\n{close}\r\n"), "405"),
        (format!("GET /v1/text?length=1 HTTP/1.1\r\n{close}\r\n"), "400"),
        (format!("GET /healthz HTTP/1.1\r\n{close}\r\n"), "200"),
        (format!("POST /healthz HTTP/1.1\r\n{close}\r\n"), "405"),
        (format!("GET /readyz HTTP/1.1\r\n{close}\r\n"), "503"),
        (format!("GET /v1/openapi.json HTTP/1.1\r\n{close}\r\n"), "200"),
        (format!("POST /v1/text HTTP/1.1\r\n{close}content-length: 2\r\n\r\n[]"), "400"),
        (format!("POST /v1/text HTTP/1.1\r\n{close}content-length: 2\r\n\r\n{{}}"), "200"),
        (format!("POST /v1/text HTTP/1.1\r\n{close}origin: http://a\r\n\r\n"), "403"),
        (format!("POST /v1/text HTTP/1.1\r\n{close}content-length: 9999999\r\n\r\n"), "413"),
        (format!("GET /{} HTTP/1.1\r\n{close}\r\n", "x".repeat(60_000)), "431"),
        (format!("GET / HTTP/1.1\r\nx: {}\r\n{close}\r\n", "x".repeat(60_000)), "431"),
        ("GET / HTTP/9\r\n\r\n".to_owned(), "400"),
        ("{\"id\":1,\"method\":\"text\"}\n\r\n\r\n".to_owned(), "400"),
    ] {
        let response = exchange(served.connect_stream(), &request);
        assert_eq!(status_of(&response), status, "{request:.80}: {response:.300}");
    }
    let chunked = format!("POST /v1/text HTTP/1.1\r\n{close}transfer-encoding: chunked\r\n\r\n");
    let chunk = format!("10000\r\n{}\r\n", " ".repeat(65_536));
    let request = chunked + &chunk.repeat(BODY_MAX / 65_536 + 1);
    assert_eq!(status_of(&exchange(served.connect_stream(), &request)), "413");
    served.server.readiness().set_ready();
    let request = format!("GET /readyz HTTP/1.1\r\n{close}\r\n");
    let response = exchange(served.connect_stream(), &request);
    assert!(response.ends_with("\r\n\r\nserving\n"), "{response}");
    for header in ["content-security-policy: default-src 'none'", "x-content-type-options: nosniff"]
    {
        assert!(response.contains(header), "{response}");
    }
}

#[test]
fn bodies_of_all_clients_together_are_bounded() {
    let served = start_server();
    let head = format!("POST /v1/text HTTP/1.1\r\nhost: t\r\ncontent-length: {BODY_MAX}\r\n\r\n");
    let body = vec![b' '; BODY_MAX - 1];
    // All but the last byte, which is never sent.
    let clients: Vec<UnixStream> = (0..9)
        .map(|_| {
            let mut stream = served.connect_stream();
            stream.set_write_timeout(Some(READ_TIMEOUT)).unwrap();
            stream.write_all(head.as_bytes()).unwrap();
            // One of them is refused meanwhile.
            let _ = stream.write_all(&body);
            stream
        })
        .collect();
    let refused = clients.into_iter().filter(|stream| {
        stream.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
        let mut bytes = [0; 12];
        (&*stream).read_exact(&mut bytes).is_ok_and(|()| &bytes[9..] == b"503")
    });
    assert_eq!(refused.count(), 1);
    assert_eq!(response_text_len(&mut served.connect_client(), 3), 3);
}

#[test]
fn client_that_never_receives_does_not_block_others() {
    let served = start_server();
    let greedy = served.connect_socket();
    let request = b"GET /v1/text?len=100000 HTTP/1.1\r\nhost: tenmil\r\n\r\n";
    // Until the server stops receiving, because it has too much unsent data for this client.
    loop {
        if greedy.send(request).unwrap() < request.len()
            && !greedy.wait_to_send(Span::from_ms(50)).unwrap()
        {
            break;
        }
        let mut client = served.connect_client();
        assert_eq!(response_text_len(&mut client, 10), 10);
    }
    let mut client = served.connect_client();
    assert_eq!(response_text_len(&mut client, 10), 10);
}

#[test]
fn event_subscriber_that_does_not_read_is_disconnected_alone() {
    let served = start_server();
    let mut slow = subscribed_client(&served);
    let mut other = subscribed_client(&served);
    let text = "x".repeat(10_000);
    let mut numbers = 0..;
    // More than its socket and the queue hold.
    for _ in 0..100 {
        let text = format!("{} {text}", numbers.next().unwrap());
        served.announcer.emit(Event { kind: SET, text: text.clone(), about: json!({}) });
        assert_eq!(other.next_event(TIME_LIMIT).unwrap().unwrap()["text"], text);
    }
    let refusal = loop {
        match slow.next_event(TIME_LIMIT) {
            Ok(event) => assert!(event.is_some(), "it is disconnected"),
            Err(refusal) => break refusal,
        }
    };
    assert_eq!(refusal.code, ErrorCode::ConnectionClosed);
    assert_eq!(response_text_len(&mut other, 3), 3);
}

#[test]
fn connections_beyond_the_maximum_replace_idle_ones_but_no_busy_one() {
    let served = start_server();
    let mut followers: Vec<RpcClient> =
        (0..CONNECTIONS_PER_PROCESS_MAX - 60).map(|_| subscribed_client(&served)).collect();
    // Each has a connection for events and one that is idle, which is closed for others.
    let mut clients: Vec<RpcClient> = (0..200).map(|_| served.connect_client()).collect();
    for client in &mut clients {
        assert_eq!(response_text_len(client, 1), 1);
    }
    while followers.len() < CONNECTIONS_PER_PROCESS_MAX {
        followers.push(subscribed_client(&served));
    }
    let refusal = served.connect_client().call_method("text", Map::new(), TIME_LIMIT).unwrap_err();
    assert_eq!(refusal.code, ErrorCode::Busy, "{refusal}");
    served.announcer.emit(Event { kind: SET, text: "all".into(), about: json!({}) });
    for follower in &mut followers {
        assert_eq!(follower.next_event(TIME_LIMIT).unwrap().unwrap()["text"], "all");
    }
    // A closed connection makes room for another one.
    drop(followers.pop());
    let mut tries = 0;
    let answered = loop {
        match served.connect_client().call_method("text", Map::new(), TIME_LIMIT) {
            Err(refusal) if refusal.code == ErrorCode::Busy && tries < 10_000 => tries += 1,
            result => break result,
        }
    };
    assert_eq!(answered.unwrap(), "xxx");
}

/// A server that closes its first connection when the request has arrived, and answers on later ones.
#[test]
#[expect(clippy::disallowed_methods, reason = "a thread that is not awaited when the test fails")]
fn read_is_repeated_once_if_its_idle_connection_was_closed_but_a_change_is_not() {
    let directory = tempfile::tempdir().unwrap();
    for (method, name, requests) in [("text", "reads", 2), ("set_text", "changes", 1)] {
        let socket = directory.path().join(name);
        let listener = UnixListener::bind(&socket).unwrap();
        let mut client = RpcClient::connect(&socket, TIME_LIMIT).unwrap().with_table(&TABLE);
        // Not awaited where the client gives up: then it would wait for a connection.
        let server = std::thread::spawn(move || {
            for number in 1..=requests {
                let mut stream = listener.accept().unwrap().0;
                stream.set_read_timeout(Some(READ_TIMEOUT)).unwrap();
                assert!(stream.read(&mut [0; 4096]).unwrap() > 0);
                if number == 2 {
                    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n";
                    write!(stream, "{head}content-length: 5\r\n\r\n\"yyy\"").unwrap();
                }
            }
        });
        let answered = client.call_method(method, Map::new(), TIME_LIMIT);
        match requests {
            2 => assert_eq!(answered.unwrap(), "yyy"),
            _ => assert_eq!(answered.unwrap_err().code, ErrorCode::ConnectionClosed),
        }
        server.join().unwrap();
    }
}

#[test]
fn second_server_of_the_same_name_is_rejected() {
    let served = start_server();
    let (_announcer, announced) = event_channel().unwrap();
    let refused =
        RpcServer::start(&served.directory, 7, &TABLE, ProcessParts::new(), announced).unwrap_err();
    assert!(refused.to_string().starts_with("listen at "), "{refused}");
    assert_eq!(response_text_len(&mut served.connect_client(), 2), 2, "the first is unharmed");
}

#[test]
#[expect(clippy::disallowed_methods, reason = "a test connects as others do")]
fn tcp_clients_read_and_those_with_the_token_change() {
    let served = start_server_at(|listeners, _| {
        listeners.add_tcp("127.0.0.1:0".parse().unwrap()).unwrap();
    });
    let guarded = start_server_at(|listeners, _| {
        listeners.add_tcp("127.0.0.1:0".parse().unwrap()).unwrap();
        listeners.set_token(ControlToken::parse(TOKEN).unwrap());
    });
    let status = |served: &TestServer, verb: &str, headers: &str| {
        let stream = TcpStream::connect(served.server.tcp_addresses()[0].0).unwrap();
        stream.set_read_timeout(Some(READ_TIMEOUT)).unwrap();
        let request = format!(
            "{verb} /v1/text HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}\r\n"
        );
        status_of(&exchange(stream, &request)).to_owned()
    };
    let json = "content-type: application/json\r\n";
    let token = format!("{json}authorization: Bearer {TOKEN}\r\n");
    assert_eq!(status(&served, "GET", ""), "200");
    assert_eq!(status(&served, "POST", json), "403");
    assert_eq!(status(&guarded, "GET", ""), "401");
    assert_eq!(status(&guarded, "POST", &token), "200");
    assert_eq!(status(&guarded, "POST", &token[json.len()..]), "415");
}

#[test]
fn further_socket_is_served_and_removed() {
    let mut path = None;
    let served = start_server_at(|listeners, root| {
        let group = std::os::unix::fs::MetadataExt::gid(&std::fs::metadata(root).unwrap());
        let at = root.join("control");
        listeners.add_socket(&at, Some(group)).unwrap();
        path = Some(at);
    });
    let path = path.unwrap();
    let mut client = RpcClient::connect(&path, TIME_LIMIT).unwrap().with_table(&TABLE);
    assert_eq!(response_text_len(&mut client, 4), 4);
    drop(served);
    assert!(!path.exists());
}

/// `curl`, as the documentation has it.
#[test]
fn curl_reads_changes_and_follows_events() {
    if Command::new("curl").arg("--version").output().is_err() {
        println!("skipped: curl is not installed");
        return;
    }
    let served = start_server();
    let curl = |words: &str| {
        let output = Command::new("curl")
            .args(["--silent", "--max-time", "20", "--unix-socket"])
            .arg(served.server.socket_path())
            .args(words.split(' '))
            .output()
            .unwrap();
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(curl("http://tenmil/v1/text?len=2"), "\"xx\"\n");
    assert_eq!(curl("-X POST http://tenmil/v1/text"), "{}\n");
    assert_eq!(curl("--json {} http://tenmil/v1/text"), "{}\n");
    assert_eq!(curl("-o /dev/null -w %{http_code} http://tenmil/v1/nothing"), "404");
    let refused: Value = serde_json::from_str(&curl("http://tenmil/v1/tex")).unwrap();
    assert_eq!(refused["error"]["hint"], "did you mean `/v1/text`?");
    // The stream ends with the server.
    let path = served.server.socket_path().to_owned();
    let mut child = Command::new("curl")
        .args(["--silent", "--no-buffer", "--max-time", "20", "--unix-socket"])
        .arg(&path)
        .arg("http://tenmil/v1/events")
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = child.stdout.take().unwrap();
    let mut begin = [0; 12];
    output.read_exact(&mut begin).unwrap();
    assert_eq!(&begin, b": subscribed");
    served.announcer.emit(Event { kind: SET, text: "hello".into(), about: json!({}) });
    drop(served);
    let mut rest = String::new();
    output.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("event: set\ndata: {"), "{rest}");
    assert!(rest.contains("event: shutdown\ndata: {"), "{rest}");
    assert!(child.wait().unwrap().success());
}
