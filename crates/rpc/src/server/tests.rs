//! The server over real sockets, in this process. Every wait has a time limit.

use std::os::fd::{AsFd, BorrowedFd};

use serde_json::{Map, Value, json};
use tenmil_base::Span;
use tenmil_linux::local_socket::{Connection, Peer, RecvResult};
use tenmil_linux::runtime_directory::RuntimeDirectory;

use super::{CONNECTIONS_PER_PROCESS_MAX, Server, admit};
use crate::client::Client;
use crate::error::Code;
use crate::event::{Event, EventSender, SET, announcements};
use crate::method::{Method, MethodKind, MethodRegistry, ParamDefault, Parameter};
use crate::param_type::ParamType;
use crate::result_type::ResultType;
use crate::state::ServerState;

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
                let len = usize::try_from(call.arguments.whole("len").unwrap_or(0)).unwrap_or(0);
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
            run: |call| Ok(call.passed.take().is_some().into()),
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

struct Served {
    server: Server,
    announcer: EventSender,
    directory: RuntimeDirectory,
    _root: tempfile::TempDir,
}

fn serve() -> Served {
    let root = tempfile::tempdir().unwrap();
    let directory = RuntimeDirectory::at(root.path().join("run")).unwrap();
    let (announcer, announced) = announcements().unwrap();
    let server = Server::start(&directory, 7, &TABLE, ServerState::new(), announced).unwrap();
    Served { server, announcer, directory, _root: root }
}

impl Served {
    fn client(&self) -> Client {
        Client::connect(self.server.path(), TIME_LIMIT).unwrap()
    }

    fn connection(&self) -> Connection {
        Connection::connect(self.server.path(), TIME_LIMIT).unwrap()
    }
}

fn text(client: &mut Client, len: u64) -> usize {
    let parameters = json!({ "len": len }).as_object().unwrap().clone();
    client.call("text", parameters, TIME_LIMIT).unwrap().as_str().unwrap().len()
}

/// Received bytes, until the server closes or nothing arrives within the time limit.
fn rest(connection: &Connection) -> Option<Vec<u8>> {
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
fn questions_are_answered_refused_and_answered_again() {
    let served = serve();
    let mut client = served.client();
    assert_eq!(text(&mut client, 5), 5);
    let refusal = client.call("txt", Map::new(), TIME_LIMIT).unwrap_err();
    assert_eq!(refusal.code, Code::NoSuchMethod);
    assert_eq!(refusal.hint.as_deref(), Some("did you mean `text`?"));
    assert_eq!(text(&mut client, 100_000), 100_000, "more than a socket holds");
}

#[test]
fn a_descriptor_goes_to_the_first_method_that_takes_one_and_more_are_not_taken() {
    let served = serve();
    let mut client = served.client();
    let (one, other) = Connection::pair().unwrap();
    let passed = |client: &mut Client, files: &[BorrowedFd<'_>]| {
        client.call_with("passed", Map::new(), files, TIME_LIMIT).unwrap() == true
    };
    let found = [&[][..], &[one.as_fd()], &[]].map(|files| passed(&mut client, files));
    assert_eq!(found, [false, true, false]);
    let len = json!({ "len": 3 }).as_object().unwrap().clone();
    client.call_with("text", len.clone(), &[one.as_fd()], TIME_LIMIT).unwrap();
    // Replaces the descriptor passed before.
    client.call_with("text", len.clone(), &[one.as_fd()], TIME_LIMIT).unwrap();
    drop(one);
    assert_eq!([(); 2].map(|()| passed(&mut client, &[])), [true, false]);
    assert_eq!(other.receive(&mut [0; 8]).unwrap(), RecvResult::Eof, "none is kept");
    let both = [other.as_fd(), other.as_fd()];
    let refusal = client.call_with("text", len, &both, TIME_LIMIT).unwrap_err();
    assert_eq!(refusal.code, Code::ConnectionClosed, "{refusal}");
    assert!(!passed(&mut served.client(), &[]));
}

#[test]
fn events_reach_all_who_follow_and_a_change_is_one() {
    let served = serve();
    let mut followers = [served.client(), served.client()];
    for follower in &mut followers {
        follower.call("events", Map::new(), TIME_LIMIT).unwrap();
    }
    let mut other = served.client();
    other.call("set_text", Map::new(), TIME_LIMIT).unwrap();
    let event = Event { kind: SET, text: "by hand".into(), about: json!({}) };
    served.announcer.emit(event);
    for follower in &mut followers {
        let first = follower.next_event(TIME_LIMIT).unwrap().unwrap();
        assert_eq!(first["kind"], "set");
        assert_eq!(first["about"]["method"], "set_text");
        assert_eq!(follower.next_event(TIME_LIMIT).unwrap().unwrap()["text"], "by hand");
        assert_eq!(text(follower, 1), 1, "it can still ask");
    }
    assert_eq!(other.next_event(Span::default()).unwrap(), None, "it did not follow");
}

#[test]
fn every_announcement_wakes_the_server_and_so_does_its_end() {
    let served = serve();
    let mut follower = served.client();
    follower.call("events", Map::new(), TIME_LIMIT).unwrap();
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
fn the_end_of_a_server_is_told_and_leaves_no_socket() {
    let served = serve();
    let mut follower = served.client();
    follower.call("events", Map::new(), TIME_LIMIT).unwrap();
    let path = served.server.path().to_owned();
    assert_eq!(served.directory.listening().unwrap(), [7]);
    drop(served.server);
    assert!(!path.exists());
    assert_eq!(follower.next_event(TIME_LIMIT).unwrap().unwrap()["kind"], "shutdown");
    assert_eq!(follower.next_event(TIME_LIMIT).unwrap_err().code, Code::ConnectionClosed);
    assert_eq!(Client::connect(&path, TIME_LIMIT).unwrap_err().code, Code::NoProcess);
}

#[test]
fn one_who_sends_and_never_reads_does_not_keep_another_waiting() {
    let served = serve();
    let greedy = served.connection();
    let request = b"{\"id\":1,\"method\":\"text\",\"parameters\":{\"len\":100000}}\n";
    // Until the server stops receiving, because it has too much unsent data for this client.
    loop {
        if greedy.send(request).unwrap() < request.len()
            && !greedy.wait_to_send(Span::from_ms(50)).unwrap()
        {
            break;
        }
        let mut client = served.client();
        assert_eq!(text(&mut client, 10), 10);
    }
    let mut client = served.client();
    assert_eq!(text(&mut client, 10), 10);
}

#[test]
fn a_hostile_client_is_told_and_sent_away_and_others_are_not() {
    let served = serve();
    let mut client = served.client();
    let hostile = served.connection();
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
    assert_eq!(text(&mut client, 3), 3);
}

#[test]
fn a_request_without_an_end_of_line_is_answered_when_the_stream_ends() {
    let served = serve();
    let socket = std::os::unix::net::UnixStream::connect(served.server.path()).unwrap();
    std::io::Write::write_all(&mut &socket, b"{\"id\":1,\"method\":\"text\"}").unwrap();
    socket.shutdown(std::net::Shutdown::Write).unwrap();
    socket.set_read_timeout(Some(std::time::Duration::from_secs(20))).unwrap();
    let mut answer = String::new();
    std::io::Read::read_to_string(&mut &socket, &mut answer).unwrap();
    assert_eq!(answer, "{\"id\":1,\"answer\":\"xxx\"}\n");
}

#[test]
fn one_process_has_so_many_connections_and_no_more() {
    let served = serve();
    let mut clients: Vec<Client> =
        (0..CONNECTIONS_PER_PROCESS_MAX).map(|_| served.client()).collect();
    for client in &mut clients {
        assert_eq!(text(client, 1), 1);
    }
    let has_queued = rest(&served.connection()).expect("it is closed");
    let has_queued: Value = serde_json::from_slice(&has_queued).unwrap();
    assert_eq!(has_queued["error"]["code"], "busy");
    assert_eq!(text(&mut clients[3], 1), 1, "the others stay");
    // A closed connection makes room for another one.
    drop(clients.pop());
    let mut tries = 0;
    let answered = loop {
        match served.client().call("text", Map::new(), TIME_LIMIT) {
            Err(refusal) if refusal.code == Code::Busy && tries < 10_000 => tries += 1,
            result => break result,
        }
    };
    assert_eq!(answered.unwrap(), "xxx");
}

#[test]
fn only_the_same_user_and_root_may_ask() {
    let peer = |uid| Peer { pid: 9, uid, gid: uid };
    assert_eq!(admit(peer(1000), 1000), Ok(()));
    assert_eq!(admit(peer(0), 1000), Ok(()));
    let refusal = admit(peer(1001), 1000).unwrap_err();
    assert_eq!(refusal.code, Code::NotAllowed);
    assert_eq!(refusal.message, "connect: user is uid 1001, expected uid 1000 or 0");
    assert!(admit(peer(1000), 0).is_err());
}

#[test]
fn two_servers_do_not_share_a_name() {
    let served = serve();
    let (_announcer, announced) = announcements().unwrap();
    let refused =
        Server::start(&served.directory, 7, &TABLE, ServerState::new(), announced).unwrap_err();
    assert!(refused.to_string().starts_with("listen at "), "{refused}");
    assert_eq!(text(&mut served.client(), 2), 2, "the first is unharmed");
}
