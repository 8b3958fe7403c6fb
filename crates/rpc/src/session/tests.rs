//! One session in simulated time: its responses, and its ends.

use std::cell::RefCell;

use serde_json::{Value, json};
use tenmil_base::{Instant, Span};

use super::{CloseReason, Limits, ServerContext, Session, StepResult};
use crate::deferred::ReplySender;
use crate::event::announcements;
use crate::method::{Method, MethodKind, MethodRegistry, ParamDefault, Parameter};
use crate::param_type::ParamType;
use crate::result_type::ResultType;
use crate::state::ServerState;

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

const LIMITS: Limits = Limits {
    line_len_max: 256,
    unsent_soft_max: 1024,
    unsent_max: 2048,
    line_timeout: Span::from_secs(10),
    send_timeout: Span::from_secs(20),
    idle_timeout: Span::from_secs(60),
};

/// Session with its simulated time.
struct Life {
    session: Session,
    now: Instant,
}

impl Life {
    fn new() -> Self {
        let now = Instant { ns: 5 };
        Self { session: Session::new(now, "process 7 of uid 1", LIMITS), now }
    }

    fn pass(&mut self, span: Span) {
        self.now = self.now.after(span);
        self.session.expire(self.now);
    }

    fn give(&mut self, text: &str) {
        assert_eq!(self.session.receive(self.now, text.as_bytes()), text.len(), "there is room");
    }

    fn steps(&mut self) -> Vec<StepResult> {
        let state = ServerState::new();
        let mut step = || self.session.step(ServerContext { table: &TABLE, state: &state });
        std::iter::from_fn(|| Some(step()).filter(|step| *step != StepResult::Nothing)).collect()
    }

    /// Reads the pending output.
    fn read(&mut self) -> Vec<Value> {
        let text = String::from_utf8(self.session.to_send().to_vec()).unwrap();
        self.session.sent(self.now, text.len());
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    fn ask(&mut self, text: &str) -> Vec<Value> {
        self.give(text);
        self.steps();
        self.read()
    }

    fn code(&mut self) -> Value {
        self.read()[0]["error"]["code"].clone()
    }
}

const ECHO: &str = "{\"id\":1,\"method\":\"echo\"}\n";

#[test]
fn a_stream_is_answered_the_same_wherever_it_is_cut() {
    let stream = "{\"id\":1,\"method\":\"echo\",\"parameters\":{\"text\":\"ä\"}}\n\r\n \n\
                  {\"id\":2,\"method\":\"ecko\"}\r\nnonsense\n{\"id\":\"z\",\"method\":\"set_echo\"}";
    let bytes = stream.as_bytes();
    let run = |cuts: &[usize]| {
        let mut life = Life::new();
        let mut begin = 0;
        for end in cuts.iter().copied().chain([bytes.len()]) {
            assert_eq!(life.session.receive(life.now, &bytes[begin..end]), end - begin);
            life.steps();
            begin = end;
        }
        life.session.receive_end();
        life.steps();
        let answers = life.read();
        assert_eq!(life.session.is_over(), Some(CloseReason::ClientClosed));
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
fn what_is_wrong_with_a_request_is_said_and_the_next_one_is_answered() {
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
        let mut life = Life::new();
        let answers = life.ask(&format!("{line}\n{ECHO}"));
        assert_eq!(answers[0]["error"]["code"], code);
        assert_eq!(answers[0]["error"]["message"], message);
        assert_eq!(answers[0]["error"]["category"], "usage");
        assert_eq!(answers[1], json!({ "id": 1, "answer": { "text": "hello" } }));
    }
    let hint = Life::new().ask("{\"id\":1,\"method\":\"eco\"}\n")[0]["error"]["hint"].clone();
    assert_eq!(hint, "did you mean `echo`?");
}

#[test]
fn hostile_lines_are_refused_and_the_next_one_is_answered() {
    let deep = "[".repeat(200);
    let text = |inner: &str| format!("{{\"id\":1,\"method\":\"echo\",{inner}}}");
    let twice = text(r#""method":"echo""#);
    let inside = text(r#""parameters":{"text":"a","text":"b"}"#);
    for line in [deep.as_bytes(), b"\xff\xfe", b"\"\xc3\x28\"", twice.as_bytes(), inside.as_bytes()]
    {
        let mut life = Life::new();
        life.session.receive(life.now, line);
        let answers = life.ask(&format!("\n{ECHO}"));
        assert_eq!(answers[0]["error"]["code"], "parse_error", "{}", String::from_utf8_lossy(line));
        assert_eq!(answers[1]["id"], 1);
    }
}

#[test]
fn a_line_may_be_as_long_as_it_may_and_not_a_byte_longer() {
    let line = |len: usize| format!("{}{}\n", " ".repeat(len - ECHO.len()), ECHO.trim_end());
    let mut life = Life::new();
    assert_eq!(life.ask(&line(256))[0]["id"], 1);
    assert_eq!(life.ask(&line(256))[0]["id"], 1, "and again");

    assert_eq!(life.session.receive(life.now, line(257).as_bytes()), 256, "no more than a line");
    assert!(life.steps().is_empty());
    assert_eq!(life.session.is_over(), None, "it is to be told");
    assert_eq!(life.code(), "line_too_long");
    assert_eq!(life.session.is_over(), Some(CloseReason::Rejected));
    assert_eq!(life.session.receive(life.now, ECHO.as_bytes()), 0);
}

#[test]
fn whoever_does_not_read_is_not_answered_and_what_he_sends_is_not_taken() {
    let mut life = Life::new();
    let mut taken = 0;
    // Sends as much as the session accepts, and reads nothing.
    loop {
        let count = life.session.receive(life.now, ECHO.as_bytes());
        if count == 0 {
            break;
        }
        assert_eq!(count, ECHO.len());
        life.steps();
        taken += 1;
    }
    let unsent = life.session.to_send().len();
    assert!((1024..1024 + 100).contains(&unsent), "{unsent}");
    assert!(!life.session.can_step() && life.session.room() == 0);
    assert_eq!(life.read().len(), taken, "nothing is lost");
    assert_eq!(life.ask(ECHO).len(), 1);
}

#[test]
fn lines_that_wait_for_room_are_answered_when_there_is_some() {
    let mut life = Life::new();
    let long =
        format!(r#"{{"id":9,"method":"echo","parameters":{{"text":"{}"}}}}"#, "x".repeat(150));
    for _ in 0..5 {
        life.give(&format!("{long}\n"));
        life.steps();
    }
    life.give(&ECHO.repeat(2));
    assert_eq!(life.steps().len(), 2);
    life.give(&format!("{long}\n"));
    life.steps();
    life.session.receive(life.now, ECHO.as_bytes());
    let waits = life.session.to_send().len() >= 1024;
    assert_eq!(life.session.can_step(), !waits);
    life.read();
    life.session.receive(life.now, ECHO.as_bytes());
    assert!(life.session.can_step());
    assert!(!life.steps().is_empty());
}

#[test]
fn a_line_that_is_begun_is_ended_in_time_or_the_connection_is() {
    let mut life = Life::new();
    life.give("{\"id\":1,");
    for _ in 0..9 {
        life.pass(Span::from_secs(1));
        life.give(" ");
    }
    assert_eq!(life.session.deadline(), Instant { ns: 5 }.after(LIMITS.line_timeout));
    life.pass(Span::from_secs(1));
    assert_eq!(life.code(), "timeout");
    assert_eq!(life.session.is_over(), Some(CloseReason::Rejected));

    // A complete line restarts the time limit.
    let mut life = Life::new();
    life.give("{\"id\":1,");
    life.pass(Span::from_secs(9));
    life.give("\"method\":\"echo\"}\n{");
    life.pass(Span::from_secs(9));
    assert_eq!(life.session.is_over(), None);
    life.steps();
    assert_eq!(life.read()[0]["id"], 1);
    life.pass(Span::from_secs(1));
    assert_eq!(life.code(), "timeout");
}

#[test]
fn a_silent_connection_ends_unless_it_follows_events() {
    let mut life = Life::new();
    life.pass(Span::from_secs(59));
    life.ask(ECHO);
    life.pass(Span::from_secs(59));
    assert_eq!(life.session.is_over(), None);
    life.pass(Span::from_secs(1));
    assert_eq!(life.code(), "timeout");

    let mut life = Life::new();
    life.ask("{\"id\":1,\"method\":\"events\"}\n");
    assert_eq!(life.session.deadline(), Instant::NEVER);
    life.pass(Span::from_secs(1_000_000));
    assert_eq!(life.session.is_over(), None);
}

#[test]
fn answers_that_are_not_taken_cut_the_connection_off() {
    let mut life = Life::new();
    life.give(ECHO);
    life.steps();
    life.pass(Span::from_secs(19));
    life.session.sent(life.now, 1);
    life.pass(Span::from_secs(19));
    assert_eq!(life.session.is_over(), None, "a byte is some progress");
    life.pass(Span::from_secs(1));
    assert_eq!(life.session.is_over(), Some(CloseReason::SlowReader));
}

#[test]
fn events_come_to_whoever_asked_for_them_until_he_does_not_read_them() {
    let mut life = Life::new();
    let line = [&[b'"'; 1][..], &[b'e'; 100], b"\"\n"].concat();
    life.session.queue_event(&line);
    assert_eq!(life.session.to_send(), b"", "nobody asked");
    life.ask("{\"id\":1,\"method\":\"events\"}\n");
    life.session.queue_event(&line);
    assert_eq!(life.read().len(), 1);
    for _ in 0..2048 / line.len() {
        life.session.queue_event(&line);
        assert_eq!(life.session.is_over(), None);
    }
    life.session.queue_event(&line);
    assert_eq!(life.session.is_over(), Some(CloseReason::SlowReader));
    assert!(life.session.to_send().len() <= 2048);
}

#[test]
fn a_change_is_announced_with_who_made_it_and_a_question_is_not() {
    let mut life = Life::new();
    life.give(
        "{\"id\":1,\"method\":\"echo\"}\n{\"id\":2,\"method\":\"set_echo\",\"parameters\":{}}\n",
    );
    let steps = life.steps();
    assert_eq!(steps[0], StepResult::Replied);
    let StepResult::Changed(event) = &steps[1] else { panic!("{steps:?}") };
    assert_eq!(event.text, "process 7 of uid 1 called set_echo with {}");
    assert_eq!(event.about["method"], "set_echo");
    life.give("{\"id\":2,\"method\":\"set_echo\",\"parameters\":{\"x\":1}}\n");
    assert_eq!(life.steps(), [StepResult::Replied], "a refused change is none");
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
            let (promise, pending) = ReplySender::new(announcements().unwrap().0);
            OWED.with_borrow_mut(|owed| owed.push(promise));
            call.later.defer(pending);
            Ok(Value::Null)
        },
    }]],
    &[],
);

#[test]
fn an_answer_that_comes_later_comes_in_its_turn_and_holds_up_this_connection_alone() {
    let state = ServerState::new();
    let served = ServerContext { table: &SLOW, state: &state };
    let mut life = Life::new();
    let line = |id: u32| format!("{{\"id\":{id},\"method\":\"set_slow\"}}\n");
    life.give(&(line(1) + &line(2)));
    assert_eq!(life.session.step(served), StepResult::Nothing);
    assert_eq!(OWED.with_borrow(Vec::len), 1, "the second is not begun before the first is done");
    assert!(!life.session.can_step());
    // The time of the reply does not count against the client.
    life.pass(Span::from_secs(3600));
    assert!(life.session.is_over().is_none() && life.read().is_empty());
    OWED.with_borrow_mut(|owed| owed.remove(0)).keep(Ok(json!({ "done": true })));
    assert!(life.session.can_step());
    let StepResult::Changed(event) = life.session.step(served) else {
        panic!("it has changed something")
    };
    assert_eq!(event.about["method"], "set_slow");
    assert_eq!(life.read(), [json!({ "id": 1, "answer": { "done": true } })]);

    assert_eq!(life.session.step(served), StepResult::Nothing);
    life.session.receive_end();
    assert!(life.session.is_over().is_none(), "what was asked before the end is answered");
    drop(OWED.with_borrow_mut(|owed| owed.remove(0)));
    assert_eq!(life.session.step(served), StepResult::Replied, "nothing was changed");
    assert_eq!(life.code(), "connection_closed");
    assert_eq!(life.session.is_over(), Some(CloseReason::ClientClosed));
}
