//! One session in simulated time: its responses, and its ends.

use std::cell::RefCell;

use serde_json::{Value, json};
use tenmil_base::{Instant, Span};

use super::{CloseReason, LineResult, ServerContext, Session, SessionLimits};
use crate::deferred_reply::ReplySender;
use crate::event::event_channel;
use crate::method::{Method, MethodKind, MethodRegistry, ParamDefault, Parameter};
use crate::param_type::ParamType;
use crate::process_parts::ProcessParts;
use crate::result_type::ResultType;

static TABLE: MethodRegistry = MethodRegistry::new(
    &[&[
        Method {
            verb: MethodKind::Get,
            name: "echo",
            parameters: &[Parameter {
                name: "text",
                kind: ParamType::Text { len_max: 2000 },
                need: ParamDefault::Default("hello"),
                help: "what to say",
            }],
            answer: ResultType::Object,
            help: "Say it again",
            example: "tenmil get echo",
            run: |call| Ok(json!({ "text": call.arguments.text("text") })),
        },
        Method {
            verb: MethodKind::Set,
            name: "echo",
            parameters: &[],
            answer: ResultType::Object,
            help: "Change nothing",
            example: "tenmil set echo",
            run: |_| Ok(json!({})),
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

const LIMITS: SessionLimits = SessionLimits {
    line_len_max: 256,
    unsent_soft_max: 1024,
    unsent_max: 2048,
    line_timeout: Span::from_secs(10),
    send_timeout: Span::from_secs(20),
    idle_timeout: Span::from_secs(60),
};

/// Session with its simulated time.
struct TestSession {
    session: Session,
    now: Instant,
}

impl TestSession {
    fn new() -> Self {
        let now = Instant { ns: 5 };
        Self { session: Session::new(now, "process 7 of uid 1", LIMITS), now }
    }

    fn advance_time(&mut self, span: Span) {
        self.now = self.now.after(span);
        self.session.close_if_timed_out(self.now);
    }

    fn receive_bytes(&mut self, text: &str) {
        assert_eq!(self.session.receive(self.now, text.as_bytes()), text.len(), "there is room");
    }

    fn process_all_lines(&mut self) -> Vec<LineResult> {
        let state = ProcessParts::new();
        let mut step = || self.session.process_line(ServerContext { table: &TABLE, state: &state });
        std::iter::from_fn(|| Some(step()).filter(|step| *step != LineResult::Nothing)).collect()
    }

    /// Reads the pending output.
    fn take_sent_lines(&mut self) -> Vec<Value> {
        let text = String::from_utf8(self.session.unsent_bytes().to_vec()).unwrap();
        self.session.record_sent(self.now, text.len());
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    fn request_and_reply(&mut self, text: &str) -> Vec<Value> {
        self.receive_bytes(text);
        self.process_all_lines();
        self.take_sent_lines()
    }

    fn sent_error_code(&mut self) -> Value {
        self.take_sent_lines()[0]["error"]["code"].clone()
    }
}

const ECHO: &str = "{\"id\":1,\"method\":\"echo\"}\n";

#[test]
fn request_stream_split_at_any_byte_gives_the_same_replies() {
    let stream = "{\"id\":1,\"method\":\"echo\",\"parameters\":{\"text\":\"ä\"}}\n\r\n \n\
                  {\"id\":2,\"method\":\"ecko\"}\r\nnonsense\n{\"id\":\"z\",\"method\":\"set_echo\"}";
    let bytes = stream.as_bytes();
    let run = |cuts: &[usize]| {
        let mut life = TestSession::new();
        let mut begin = 0;
        for end in cuts.iter().copied().chain([bytes.len()]) {
            assert_eq!(life.session.receive(life.now, &bytes[begin..end]), end - begin);
            life.process_all_lines();
            begin = end;
        }
        life.session.handle_stream_end();
        life.process_all_lines();
        let answers = life.take_sent_lines();
        assert_eq!(life.session.close_reason(), Some(CloseReason::ClientClosed));
        answers
    };
    let whole = run(&[]);
    assert_eq!(whole[0], json!({ "id": 1, "answer": { "text": "ä" } }));
    assert_eq!(whole[1]["error"]["code"], "method_not_found");
    assert_eq!(whole[2]["error"]["code"], "parse_error");
    assert_eq!(whole[3], json!({ "id": "z", "answer": {} }), "the last line needs no end");
    assert_eq!(whole.len(), 4);
    for first in 0..bytes.len() {
        for second in first..bytes.len() {
            assert_eq!(run(&[first, second]), whole, "cut at {first} and {second}");
        }
    }
}

#[test]
fn invalid_request_gets_an_error_and_the_next_one_is_answered() {
    for (line, code, message) in [
        (
            r#"{"id":1,"method":"echo","parameters":{"txt":"a"}}"#,
            "unknown_parameter",
            "get echo: no parameter `txt`, expected text",
        ),
        (
            r#"{"id":1,"method":"echo","parameters":{"text":1}}"#,
            "invalid_value",
            "get echo: text is 1, expected a text of 1 to 2000 bytes",
        ),
        (
            r#"{"id":1,"method":"eco"}"#,
            "method_not_found",
            "no method `eco`, expected echo, set_echo or events",
        ),
    ] {
        let mut life = TestSession::new();
        let answers = life.request_and_reply(&format!("{line}\n{ECHO}"));
        assert_eq!(answers[0]["error"]["code"], code);
        assert_eq!(answers[0]["error"]["message"], message);
        assert_eq!(answers[0]["error"]["category"], "usage");
        assert_eq!(answers[1], json!({ "id": 1, "answer": { "text": "hello" } }));
    }
    let hint = TestSession::new().request_and_reply("{\"id\":1,\"method\":\"eco\"}\n")[0]["error"]
        ["hint"]
        .clone();
    assert_eq!(hint, "did you mean `echo`?");
}

#[test]
fn malformed_lines_are_rejected_and_the_next_one_is_answered() {
    let deep = "[".repeat(200);
    let text = |inner: &str| format!("{{\"id\":1,\"method\":\"echo\",{inner}}}");
    let twice = text(r#""method":"echo""#);
    let inside = text(r#""parameters":{"text":"a","text":"b"}"#);
    for line in [deep.as_bytes(), b"\xff\xfe", b"\"\xc3\x28\"", twice.as_bytes(), inside.as_bytes()]
    {
        let mut life = TestSession::new();
        life.session.receive(life.now, line);
        let answers = life.request_and_reply(&format!("\n{ECHO}"));
        assert_eq!(answers[0]["error"]["code"], "parse_error", "{}", String::from_utf8_lossy(line));
        assert_eq!(answers[1]["id"], 1);
    }
}

#[test]
fn line_of_maximum_length_is_accepted_and_one_byte_more_is_not() {
    let line = |len: usize| format!("{}{}\n", " ".repeat(len - ECHO.len()), ECHO.trim_end());
    let mut life = TestSession::new();
    assert_eq!(life.request_and_reply(&line(256))[0]["id"], 1);
    assert_eq!(life.request_and_reply(&line(256))[0]["id"], 1, "and again");

    assert_eq!(life.session.receive(life.now, line(257).as_bytes()), 256, "no more than a line");
    assert!(life.process_all_lines().is_empty());
    assert_eq!(life.session.close_reason(), None, "it is to be told");
    assert_eq!(life.sent_error_code(), "line_too_long");
    assert_eq!(life.session.close_reason(), Some(CloseReason::Rejected));
    assert_eq!(life.session.receive(life.now, ECHO.as_bytes()), 0);
}

#[test]
fn client_that_does_not_receive_gets_no_replies_and_is_not_read() {
    let mut life = TestSession::new();
    let mut taken = 0;
    // Sends as much as the session accepts, and reads nothing.
    loop {
        let count = life.session.receive(life.now, ECHO.as_bytes());
        if count == 0 {
            break;
        }
        assert_eq!(count, ECHO.len());
        life.process_all_lines();
        taken += 1;
    }
    let unsent = life.session.unsent_bytes().len();
    assert!((1024..1024 + 100).contains(&unsent), "{unsent}");
    assert!(!life.session.can_process_line() && life.session.receive_capacity_bytes() == 0);
    assert_eq!(life.take_sent_lines().len(), taken, "nothing is lost");
    assert_eq!(life.request_and_reply(ECHO).len(), 1);
}

#[test]
fn lines_waiting_for_space_are_answered_when_there_is_some() {
    let mut life = TestSession::new();
    let long =
        format!(r#"{{"id":9,"method":"echo","parameters":{{"text":"{}"}}}}"#, "x".repeat(150));
    for _ in 0..5 {
        life.receive_bytes(&format!("{long}\n"));
        life.process_all_lines();
    }
    life.receive_bytes(&ECHO.repeat(2));
    assert_eq!(life.process_all_lines().len(), 2);
    life.receive_bytes(&format!("{long}\n"));
    life.process_all_lines();
    life.session.receive(life.now, ECHO.as_bytes());
    let waits = life.session.unsent_bytes().len() >= 1024;
    assert_eq!(life.session.can_process_line(), !waits);
    life.take_sent_lines();
    life.session.receive(life.now, ECHO.as_bytes());
    assert!(life.session.can_process_line());
    assert!(!life.process_all_lines().is_empty());
}

#[test]
fn unfinished_line_times_out() {
    let mut life = TestSession::new();
    life.receive_bytes("{\"id\":1,");
    for _ in 0..9 {
        life.advance_time(Span::from_secs(1));
        life.receive_bytes(" ");
    }
    assert_eq!(life.session.deadline(), Instant { ns: 5 }.after(LIMITS.line_timeout));
    life.advance_time(Span::from_secs(1));
    assert_eq!(life.sent_error_code(), "timeout");
    assert_eq!(life.session.close_reason(), Some(CloseReason::Rejected));

    // A complete line restarts the time limit.
    let mut life = TestSession::new();
    life.receive_bytes("{\"id\":1,");
    life.advance_time(Span::from_secs(9));
    life.receive_bytes("\"method\":\"echo\"}\n{");
    life.advance_time(Span::from_secs(9));
    assert_eq!(life.session.close_reason(), None);
    life.process_all_lines();
    assert_eq!(life.take_sent_lines()[0]["id"], 1);
    life.advance_time(Span::from_secs(1));
    assert_eq!(life.sent_error_code(), "timeout");
}

#[test]
fn silent_connection_times_out_unless_subscribed() {
    let mut life = TestSession::new();
    life.advance_time(Span::from_secs(59));
    life.request_and_reply(ECHO);
    life.advance_time(Span::from_secs(59));
    assert_eq!(life.session.close_reason(), None);
    life.advance_time(Span::from_secs(1));
    assert_eq!(life.sent_error_code(), "timeout");

    let mut life = TestSession::new();
    life.request_and_reply("{\"id\":1,\"method\":\"events\"}\n");
    assert_eq!(life.session.deadline(), Instant::NEVER);
    life.advance_time(Span::from_secs(1_000_000));
    assert_eq!(life.session.close_reason(), None);
}

#[test]
fn unreceived_replies_close_the_connection() {
    let mut life = TestSession::new();
    life.receive_bytes(ECHO);
    life.process_all_lines();
    life.advance_time(Span::from_secs(19));
    life.session.record_sent(life.now, 1);
    life.advance_time(Span::from_secs(19));
    assert_eq!(life.session.close_reason(), None, "a byte is some progress");
    life.advance_time(Span::from_secs(1));
    assert_eq!(life.session.close_reason(), Some(CloseReason::SlowReader));
}

#[test]
fn events_reach_a_subscriber_until_it_stops_receiving() {
    let mut life = TestSession::new();
    let line = [&[b'"'; 1][..], &[b'e'; 100], b"\"\n"].concat();
    life.session.queue_event(&line);
    assert_eq!(life.session.unsent_bytes(), b"", "there is no subscription");
    life.request_and_reply("{\"id\":1,\"method\":\"events\"}\n");
    life.session.queue_event(&line);
    assert_eq!(life.take_sent_lines().len(), 1);
    for _ in 0..2048 / line.len() {
        life.session.queue_event(&line);
        assert_eq!(life.session.close_reason(), None);
    }
    life.session.queue_event(&line);
    assert_eq!(life.session.close_reason(), Some(CloseReason::SlowReader));
    assert!(life.session.unsent_bytes().len() <= 2048);
}

#[test]
fn change_event_names_its_caller_and_a_query_emits_none() {
    let mut life = TestSession::new();
    life.receive_bytes(
        "{\"id\":1,\"method\":\"echo\"}\n{\"id\":2,\"method\":\"set_echo\",\"parameters\":{}}\n",
    );
    let steps = life.process_all_lines();
    assert_eq!(steps[0], LineResult::Replied);
    let LineResult::Changed(event) = &steps[1] else { panic!("{steps:?}") };
    assert_eq!(event.text, "process 7 of uid 1 called set_echo with {}");
    assert_eq!(event.about["method"], "set_echo");
    life.receive_bytes("{\"id\":2,\"method\":\"set_echo\",\"parameters\":{\"x\":1}}\n");
    assert_eq!(life.process_all_lines(), [LineResult::Replied], "a refused change is none");
}

thread_local! {
    /// Replies not sent yet.
    static OWED: RefCell<Vec<ReplySender>> = const { RefCell::new(Vec::new()) };
}

/// Method that replies when the test does.
static SLOW: MethodRegistry = MethodRegistry::new(
    &[&[Method {
        verb: MethodKind::Set,
        name: "slow",
        parameters: &[],
        answer: ResultType::Object,
        help: "Take a while",
        example: "tenmil set slow",
        run: |call| {
            let (promise, pending) = ReplySender::new(event_channel().unwrap().0);
            OWED.with_borrow_mut(|owed| owed.push(promise));
            call.later.defer(pending);
            Ok(Value::Null)
        },
    }]],
    &[],
);

#[test]
fn deferred_reply_keeps_its_order_and_delays_only_its_connection() {
    let state = ProcessParts::new();
    let served = ServerContext { table: &SLOW, state: &state };
    let mut life = TestSession::new();
    let line = |id: u32| format!("{{\"id\":{id},\"method\":\"set_slow\"}}\n");
    life.receive_bytes(&(line(1) + &line(2)));
    assert_eq!(life.session.process_line(served), LineResult::Nothing);
    assert_eq!(OWED.with_borrow(Vec::len), 1, "the second is not begun before the first is done");
    assert!(!life.session.can_process_line());
    // The time of the reply does not count against the client.
    life.advance_time(Span::from_secs(3600));
    assert!(life.session.close_reason().is_none() && life.take_sent_lines().is_empty());
    OWED.with_borrow_mut(|owed| owed.remove(0)).send_reply(Ok(json!({ "done": true })));
    assert!(life.session.can_process_line());
    let LineResult::Changed(event) = life.session.process_line(served) else {
        panic!("it has changed something")
    };
    assert_eq!(event.about["method"], "set_slow");
    assert_eq!(life.take_sent_lines(), [json!({ "id": 1, "answer": { "done": true } })]);

    assert_eq!(life.session.process_line(served), LineResult::Nothing);
    life.session.handle_stream_end();
    assert!(life.session.close_reason().is_none(), "what was asked before the end is answered");
    drop(OWED.with_borrow_mut(|owed| owed.remove(0)));
    assert_eq!(life.session.process_line(served), LineResult::Replied, "nothing was changed");
    assert_eq!(life.sent_error_code(), "connection_closed");
    assert_eq!(life.session.close_reason(), Some(CloseReason::ClientClosed));
}
