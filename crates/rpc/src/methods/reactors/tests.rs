//! Methods of reactors, over running reactors.

use serde_json::{Value, json};
use tenmil_base::Span;
use tenmil_linux::{Clock, CpuList};
use tenmil_reactor::{
    Context, Event, PollMode, PollResult, Poller, PollerBuilder, ReactorId, ReactorOptions,
    ThreadBuilder,
};

use super::{EVENTS, EventRelay, ReactorsHandle, ReactorsSource};
use crate::error::{ErrorCode, RpcError};
use crate::event::event_channel;
use crate::methods::TABLE;
use crate::methods::test_calls::call_method;
use crate::{Arguments, CallContext, DeferredReplySlot, ProcessParts};

struct CountingPoller;

impl Poller for CountingPoller {
    fn poll(&mut self, _: &mut Context<'_>) -> PollResult {
        PollResult::Idle
    }
}

struct TestProcess {
    reactors: tenmil_reactor::Reactors,
    state: ProcessParts,
}

fn running_reactors(reactors: &tenmil_reactor::Reactors) -> ReactorsHandle {
    ReactorsHandle { directory: reactors.registry().clone(), clock: *reactors.clock() }
}

impl TestProcess {
    fn new() -> Self {
        let cores: CpuList = CpuList::allowed_cpus().iter().take(1).collect();
        let options = ReactorOptions::default();
        let reactors =
            tenmil_reactor::Reactors::start_on_cores(&cores, &options, &Clock::on_kernel_clock())
                .unwrap();
        for name in ["first", "second"] {
            let beat = PollerBuilder::polled_each_period("beat", Span::from_ms(10), CountingPoller);
            reactors.spawn(ThreadBuilder::new(name).add_poller(beat)).unwrap();
        }
        let running = running_reactors(&reactors);
        let state =
            ProcessParts::new().with_part(ReactorsSource::new(move || Some(running.clone())));
        Self { reactors, state }
    }

    fn reactors_handle(&self) -> ReactorsHandle {
        running_reactors(&self.reactors)
    }

    /// Calls a method and checks its result against the schema of its table row.
    fn call_method(&self, method: &str, parameters: Value) -> Result<Value, RpcError> {
        call_method(&self.state, method, &parameters)
    }

    /// Waits for an event; fails after a time limit.
    fn await_event(&self, what: impl Fn(&Event) -> bool) {
        let end = self.reactors.clock().now().after(Span::from_secs(20));
        let events = || self.reactors.registry().events_since(0).events;
        while !events().iter().any(|noted| what(&noted.event)) {
            assert!(self.reactors.clock().now() < end, "it does not happen");
            tenmil_linux::named_thread::yield_cpu();
        }
    }
}

#[test]
fn reactors_threads_and_pollers_are_listed() {
    let world = TestProcess::new();
    let reactors = world.call_method("reactors", json!({})).unwrap();
    assert_eq!(reactors[0]["threads"], 2);
    assert_eq!(reactors[0]["mode"], "adaptive");
    assert!(reactors.as_array().unwrap().len() == 1);
    let threads = world.call_method("threads", json!({ "reactor": 0 })).unwrap();
    assert_eq!(threads[1]["name"], "second");
    assert_eq!(threads.as_array().unwrap().len(), 2);
    assert_eq!(world.call_method("threads", json!({ "reactor": 1 })).unwrap(), json!([]));
    let threads = world.call_method("threads", json!({ "name": "second" })).unwrap();
    assert_eq!(threads.as_array().unwrap().len(), 1);
    assert_eq!(threads[0]["id"], 1);
    world.await_event(
        |event| matches!(event, Event::ThreadStarted { name, .. } if name == "second"),
    );
    let pollers = world.call_method("pollers", json!({ "thread": "second" })).unwrap();
    assert_eq!(pollers.as_array().unwrap().len(), 1);
    assert_eq!(pollers[0]["every_ns"], 10_000_000);
    assert_eq!(world.call_method("pollers", json!({})).unwrap().as_array().unwrap().len(), 2);
}

#[test]
fn snapshot_stats_is_one_consistent_sample() {
    let world = TestProcess::new();
    world.await_event(
        |event| matches!(event, Event::ThreadStarted { name, .. } if name == "second"),
    );
    let sample = world.call_method("snapshot_stats", json!({})).unwrap();
    for (rows, count) in [("reactors", 1), ("threads", 2), ("pollers", 2)] {
        assert_eq!(sample[rows].as_array().unwrap().len(), count, "{rows}");
    }
    assert_eq!(sample["pollers"][1]["thread_id"], sample["threads"][1]["id"]);
    let now = world.reactors.clock().now().ns;
    let at = sample["monotonic_ns"].as_u64().unwrap();
    assert!(0 < at && at <= now, "{at} is not before {now}");
    let reactor = &sample["reactors"][0];
    let lived = reactor["busy_ns"].as_u64().unwrap() + reactor["idle_ns"].as_u64().unwrap();
    assert!(lived <= at, "it lived {lived} of {at}");
    let later = world.call_method("snapshot_stats", json!({})).unwrap();
    assert!(later["monotonic_ns"].as_u64().unwrap() > at);
}

#[test]
fn poll_mode_of_reactors_is_changed() {
    let world = TestProcess::new();
    let reported = world.call_method("set_poll", json!({ "mode": "always" })).unwrap();
    assert_eq!(reported, json!({ "mode": "always", "reactors": [0], "refused": [] }));
    world.await_event(|event| event.kind() == "poll-mode-changed");
    assert_eq!(world.call_method("reactors", json!({})).unwrap()[0]["mode"], "always");
    let refusal =
        world.call_method("set_poll", json!({ "mode": "hybrid", "reactor": 5 })).unwrap_err();
    assert!(refusal.message.starts_with("set poll: "), "{refusal}");
    let refusal = world.call_method("set_poll", json!({ "mode": "never" })).unwrap_err();
    assert_eq!(refusal.message, "set poll: mode is `never`, expected always, adaptive or hybrid");
}

#[test]
fn reactor_that_rejects_a_poll_mode_is_named_with_the_reason() {
    let world = TestProcess::new();
    let stopped = ReactorId(0);
    world.reactors.registry().stop_reactor(stopped).unwrap();
    let end = world.reactors.clock().now().after(Span::from_secs(20));
    let refusal = loop {
        assert!(world.reactors.clock().now() < end, "it never stops");
        match world.call_method("set_poll", json!({ "mode": "always" })) {
            Err(refusal) if refusal.message.ends_with("its inbox is full, try again later") => {}
            Err(refusal) => break refusal,
            Ok(_) => {}
        }
        tenmil_linux::named_thread::yield_cpu();
    };
    assert_eq!(refusal.message, "set poll: reactor 0: it has stopped");

    let why = tenmil_reactor::ReactorError::Stopped(ReactorId(1));
    let asked: Vec<_> = (0..3).map(ReactorId).collect();
    let answer = super::poll_mode_result(PollMode::Hybrid, &asked, &[(ReactorId(1), why)]);
    let refused = json!([{ "reactor": 1, "why": "reactor 1: it has stopped" }]);
    assert_eq!(answer, json!({ "mode": "hybrid", "reactors": [0, 2], "refused": refused }));
    assert_eq!(TABLE.find("set_poll").unwrap().answer.check_value(&answer), Ok(()));
}

#[test]
fn thread_is_migrated_by_its_name() {
    let world = TestProcess::new();
    let reported =
        world.call_method("set_thread", json!({ "name": "second", "reactor": 0 })).unwrap();
    assert_eq!(reported, json!({ "id": 1, "reactor": 0, "mask": null }));
    let refusal =
        world.call_method("set_thread", json!({ "name": "third", "reactor": 0 })).unwrap_err();
    assert_eq!(refusal.message, "set thread: no thread `third`, expected first or second");
    let refusal =
        world.call_method("set_thread", json!({ "name": "first", "reactor": 9 })).unwrap_err();
    assert_eq!(refusal.code, ErrorCode::Failed);
}

#[test]
fn thread_mask_is_changed_and_reported() {
    let world = TestProcess::new();
    let core = world.call_method("reactors", json!({})).unwrap()[0]["core"].to_string();
    let reported =
        world.call_method("set_thread", json!({ "name": "first", "mask": core })).unwrap();
    assert_eq!(reported, json!({ "id": 0, "reactor": 0, "mask": core }));
    let threads = world.call_method("threads", json!({})).unwrap();
    assert_eq!((&threads[0]["mask"], &threads[1]["mask"]), (&json!(core), &Value::Null));
    let change = json!({ "name": "first", "mask": "1023" });
    let refusal = world.call_method("set_thread", change).unwrap_err();
    assert_eq!(refusal.code, ErrorCode::Failed);
    assert!(refusal.message.contains("mask 1023, expected one of the cores"), "{refusal}");
    let reported =
        world.call_method("set_thread", json!({ "name": "first", "reactor": 0 })).unwrap();
    assert_eq!(reported["mask"], core, "what was refused changed nothing");
    for change in
        [json!({ "name": "first" }), json!({ "name": "first", "reactor": 0, "mask": core })]
    {
        let refusal = world.call_method("set_thread", change).unwrap_err();
        let expected = "set thread: expected one of `reactor`, `mask` and `anywhere=true`";
        assert_eq!(refusal.message, expected);
    }
    let reported =
        world.call_method("set_thread", json!({ "name": "first", "anywhere": true })).unwrap();
    assert_eq!(reported, json!({ "id": 0, "reactor": 0, "mask": null }));
    assert_eq!(world.call_method("threads", json!({})).unwrap()[0]["mask"], Value::Null);
}

#[test]
fn reactor_events_are_forwarded_once_and_every_kind_is_described() {
    let world = TestProcess::new();
    let (announcer, announced) = event_channel().unwrap();
    let mut relay = EventRelay::new(announcer);
    world.await_event(
        |event| matches!(event, Event::ThreadStarted { name, .. } if name == "second"),
    );
    relay.forward_events(&world.reactors_handle());
    let passed: Vec<_> = std::iter::from_fn(|| announced.next()).collect();
    let started = passed.iter().filter(|event| event.kind.name == "thread-started");
    assert_eq!(started.count(), 2);
    for event in &passed {
        assert!(EVENTS.contains(&event.kind), "{event:?}");
    }
    relay.forward_events(&world.reactors_handle());
    assert!(announced.next().is_none_or(|event| !passed.contains(&event)));
}

#[test]
fn dropped_reactor_events_are_counted_and_new_reactors_are_read_from_the_start() {
    let (announcer, announced) = event_channel().unwrap();
    let mut relay = EventRelay::new(announcer);
    let mut reported = |world: &TestProcess| {
        relay.forward_events(&world.reactors_handle());
        std::iter::from_fn(|| announced.next()).collect::<Vec<_>>()
    };
    let world = TestProcess::new();
    let is_second =
        |event: &Event| matches!(event, Event::ThreadStarted { name, .. } if name == "second");
    world.await_event(is_second);
    let first = reported(&world);
    assert!(first.iter().any(|event| event.kind.name == "thread-started"));
    // As in the second phase of a benchmark run.
    let other = TestProcess::new();
    other.await_event(is_second);
    let starts =
        reported(&other).iter().filter(|event| event.kind.name == "thread-started").count();
    assert_eq!(starts, 2);

    let kept = ReactorOptions::default().events;
    for _ in 0..kept {
        let builder =
            ThreadBuilder::new("mayfly").run_first(|context| context.request_thread_end());
        let mayfly = other.reactors.spawn(builder).unwrap();
        while !mayfly.has_ended() {
            tenmil_linux::named_thread::yield_cpu();
        }
    }
    let lost = reported(&other).remove(0);
    assert_eq!(
        (lost.kind.name, lost.about["count"].as_u64() >= Some(kept as u64 / 2)),
        ("events-dropped", true)
    );
}

#[test]
fn process_without_reactors_reports_that() {
    let none = ProcessParts::new().with_part(ReactorsSource::new(|| None));
    for state in [ProcessParts::new(), none] {
        let arguments = Arguments::default();
        let call = CallContext {
            table: &TABLE,
            state: &state,
            arguments: &arguments,
            later: &DeferredReplySlot::default(),
            passed: &crate::PassedFd::default(),
        };
        let refusal = (TABLE.find("reactors").unwrap().run)(&call).unwrap_err();
        assert_eq!(refusal.code, ErrorCode::NotFound);
    }
}
