//! The server over real sockets, in this process. Every wait has a time limit.

use std::os::fd::{AsFd, BorrowedFd};

use serde_json::{Map, Value, json};
use tenmil_base::Span;
use tenmil_linux::local_socket::{LocalConnection, PeerCredentials, RecvResult};
use tenmil_linux::runtime_directory::RuntimeDirectory;

use super::{CONNECTIONS_PER_PROCESS_MAX, RpcServer, check_peer_uid};
use crate::client::RpcClient;
use crate::error::ErrorCode;
use crate::event::{Event, EventSender, SET, event_channel};
use crate::method::{Method, MethodKind, MethodRegistry, ParamDefault, Parameter};
use crate::param_type::ParamType;
use crate::process_parts::ProcessParts;
use crate::result_type::ResultType;

const TIME_LIMIT: Span = Span::from_secs(20);

static TABLE: MethodRegistry = MethodRegistry::new(
    &[&[
        Method {
            verb: MethodKind::Get,
            name: "text",
            parameters: &[Parameter {
                name: "len",
                kind: ParamType::Whole { min: 1, max: 100_000 },
                need: ParamDefault::Default("3"),
                help: "how much of it",
            }],
            answer: ResultType::Text,
            help: "Answer some text",
            example: "tenmil get text",
            run: |call| {
                let len = usize::try_from(call.arguments.integer("len").unwrap_or(0)).unwrap_or(0);
                Ok("x".repeat(len).into())
            },
        },
        Method {
            verb: MethodKind::Set,
            name: "text",
            parameters: &[],
            answer: ResultType::Object,
            help: "Change nothing",
            example: "tenmil set text",
            run: |_| Ok(json!({})),
        },
        Method {
            verb: MethodKind::Get,
            name: "passed",
            parameters: &[],
            answer: ResultType::Flag,
            help: "Say whether a descriptor came beside it",
            example: "tenmil get passed",
            run: |call| Ok(call.passed.take_fd().is_some().into()),
        },
        Method {
            verb: MethodKind::Subscribe,
            name: "events",
            parameters: &[],
            answer: ResultType::Object,
            help: "Follow",
            example: "tenmil events",
            run: |_| Ok(json!({})),
        },
    ]],
    &[],
);

struct TestServer {
    server: RpcServer,
    announcer: EventSender,
    directory: RuntimeDirectory,
    _root: tempfile::TempDir,
}

fn start_server() -> TestServer {
    let root = tempfile::tempdir().unwrap();
    let directory = RuntimeDirectory::at_path(root.path().join("run")).unwrap();
    let (announcer, announced) = event_channel().unwrap();
    let server = RpcServer::start(&directory, 7, &TABLE, ProcessParts::new(), announced).unwrap();
    TestServer { server, announcer, directory, _root: root }
}

impl TestServer {
    fn connect_client(&self) -> RpcClient {
        RpcClient::connect(self.server.socket_path(), TIME_LIMIT).unwrap()
    }

    fn connect_socket(&self) -> LocalConnection {
        LocalConnection::connect(self.server.socket_path(), TIME_LIMIT).unwrap()
    }
}

fn response_text_len(client: &mut RpcClient, len: u64) -> usize {
    let parameters = json!({ "len": len }).as_object().unwrap().clone();
    client.call_method("text", parameters, TIME_LIMIT).unwrap().as_str().unwrap().len()
}

/// Received bytes, until the server closes or nothing arrives within the time limit.
fn read_to_end(connection: &LocalConnection) -> Option<Vec<u8>> {
    let mut all = Vec::new();
    let mut bytes = [0; 4096];
    loop {
        match connection.receive(&mut bytes).unwrap() {
            RecvResult::Bytes(count) => all.extend_from_slice(&bytes[..count]),
            RecvResult::Eof => return Some(all),
            RecvResult::WouldBlock if connection.wait_to_receive(TIME_LIMIT).unwrap() => {}
            RecvResult::WouldBlock => return None,
        }
    }
}

#[test]
fn valid_and_invalid_requests_on_one_connection_are_answered() {
    let served = start_server();
    let mut client = served.connect_client();
    assert_eq!(response_text_len(&mut client, 5), 5);
    let refusal = client.call_method("txt", Map::new(), TIME_LIMIT).unwrap_err();
    assert_eq!(refusal.code, ErrorCode::NoSuchMethod);
    assert_eq!(refusal.hint.as_deref(), Some("did you mean `text`?"));
    assert_eq!(response_text_len(&mut client, 100_000), 100_000, "more than a socket holds");
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
    assert!(!passed(&mut served.connect_client(), &[]));
}

#[test]
fn events_reach_all_subscribers_and_each_change_emits_one() {
    let served = start_server();
    let mut followers = [served.connect_client(), served.connect_client()];
    for follower in &mut followers {
        follower.call_method("events", Map::new(), TIME_LIMIT).unwrap();
    }
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
fn every_event_wakes_the_server_and_so_does_its_stop() {
    let served = start_server();
    let mut follower = served.connect_client();
    follower.call_method("events", Map::new(), TIME_LIMIT).unwrap();
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
    let mut follower = served.connect_client();
    follower.call_method("events", Map::new(), TIME_LIMIT).unwrap();
    let path = served.server.socket_path().to_owned();
    assert_eq!(served.directory.listening_processes().unwrap(), [7]);
    drop(served.server);
    assert!(!path.exists());
    assert_eq!(follower.next_event(TIME_LIMIT).unwrap().unwrap()["kind"], "shutdown");
    assert_eq!(follower.next_event(TIME_LIMIT).unwrap_err().code, ErrorCode::ConnectionClosed);
    assert_eq!(RpcClient::connect(&path, TIME_LIMIT).unwrap_err().code, ErrorCode::NoProcess);
}

#[test]
fn client_that_never_receives_does_not_block_others() {
    let served = start_server();
    let greedy = served.connect_socket();
    let request = b"{\"id\":1,\"method\":\"text\",\"parameters\":{\"len\":100000}}\n";
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
fn malformed_client_gets_an_error_and_is_disconnected_alone() {
    let served = start_server();
    let mut client = served.connect_client();
    let hostile = served.connect_socket();
    let mut rest_of_line = &vec![b'['; 1 << 20][..];
    // The connection may be closed before everything is sent.
    while let Ok(count) = hostile.send(rest_of_line)
        && !rest_of_line.is_empty()
    {
        rest_of_line = &rest_of_line[count..];
        if count == 0 {
            hostile.wait_to_send(TIME_LIMIT).unwrap();
        }
    }
    let mut bytes = [0; 512];
    let has_queued = loop {
        match hostile.receive(&mut bytes) {
            Ok(RecvResult::WouldBlock) => assert!(hostile.wait_to_receive(TIME_LIMIT).unwrap()),
            Ok(RecvResult::Bytes(count)) => {
                break String::from_utf8_lossy(&bytes[..count]).into_owned();
            }
            other => panic!("{other:?}"),
        }
    };
    assert!(has_queued.contains("line_too_long"), "{has_queued}");
    assert_eq!(response_text_len(&mut client, 3), 3);
}

#[test]
fn request_without_newline_is_answered_at_stream_end() {
    let served = start_server();
    let socket = std::os::unix::net::UnixStream::connect(served.server.socket_path()).unwrap();
    std::io::Write::write_all(&mut &socket, b"{\"id\":1,\"method\":\"text\"}").unwrap();
    socket.shutdown(std::net::Shutdown::Write).unwrap();
    socket.set_read_timeout(Some(std::time::Duration::from_secs(20))).unwrap();
    let mut answer = String::new();
    std::io::Read::read_to_string(&mut &socket, &mut answer).unwrap();
    assert_eq!(answer, "{\"id\":1,\"answer\":\"xxx\"}\n");
}

#[test]
fn connections_beyond_the_maximum_are_rejected() {
    let served = start_server();
    let mut clients: Vec<RpcClient> =
        (0..CONNECTIONS_PER_PROCESS_MAX).map(|_| served.connect_client()).collect();
    for client in &mut clients {
        assert_eq!(response_text_len(client, 1), 1);
    }
    let has_queued = read_to_end(&served.connect_socket()).expect("it is closed");
    let has_queued: Value = serde_json::from_slice(&has_queued).unwrap();
    assert_eq!(has_queued["error"]["code"], "busy");
    assert_eq!(response_text_len(&mut clients[3], 1), 1, "the others stay");
    // A closed connection makes room for another one.
    drop(clients.pop());
    let mut tries = 0;
    let answered = loop {
        match served.connect_client().call_method("text", Map::new(), TIME_LIMIT) {
            Err(refusal) if refusal.code == ErrorCode::Busy && tries < 10_000 => tries += 1,
            result => break result,
        }
    };
    assert_eq!(answered.unwrap(), "xxx");
}

#[test]
fn only_the_same_user_and_root_may_connect() {
    let peer = |uid| PeerCredentials { pid: 9, uid, gid: uid };
    assert_eq!(check_peer_uid(peer(1000), 1000), Ok(()));
    assert_eq!(check_peer_uid(peer(0), 1000), Ok(()));
    let refusal = check_peer_uid(peer(1001), 1000).unwrap_err();
    assert_eq!(refusal.code, ErrorCode::NotAllowed);
    assert_eq!(refusal.message, "connect: user is uid 1001, expected uid 1000 or 0");
    assert!(check_peer_uid(peer(1000), 0).is_err());
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
