//! Spans, from the events of a process.
//!
//! | events | span |
//! |---|---|
//! | `slow-io` | a command, with a child for each stage that took time |
//! | `host-connected` … `host-disconnected`, `connected` … `disconnected` | a connection |
//! | `configuration-applied`, `configuration-changed`, `set`, and refusals | a change, which takes no time |
//!
//! The queue is bounded. Spans that do not fit are dropped, the oldest first, and counted.

use std::collections::{BTreeMap, VecDeque};

use serde_json::{Map, Value, json};
use tenmil_base::Random;

use crate::event::Event;

/// Spans to be sent, and connections that are open.
#[derive(Debug)]
pub(super) struct SpanQueue {
    spans: VecDeque<Value>,
    /// By protocol and connection identifier.
    open: BTreeMap<(&'static str, u64), OpenConnection>,
    random: Random,
}

#[derive(Debug)]
struct OpenConnection {
    since_ns: u64,
    attributes: Map<String, Value>,
}

/// A span without its identifiers.
struct Span<'a> {
    name: &'a str,
    kind: u8,
    /// Nanoseconds since 1970.
    start_ns: u64,
    end_ns: u64,
    attributes: Vec<Value>,
    error: Option<&'a str>,
}

/// Largest number of spans that wait.
pub(super) const SPANS_MAX: usize = 2048;
/// Number of spans in a request.
pub(super) const BATCH: usize = 512;
/// Largest number of open connections whose start is remembered.
const CONNECTIONS_MAX: usize = 16 << 10;

/// Kinds of spans (opentelemetry-proto, `Span.SpanKind`).
const INTERNAL: u8 = 1;
const SERVER: u8 = 2;
/// Status of a span (`Status.StatusCode`).
const STATUS_ERROR: u8 = 2;

/// Stages of a slow command, in their order, with the fields of the event.
const STAGES: [(&str, &str); 5] = [
    ("wait", "wait_ns"),
    ("transfer", "transfer_ns"),
    ("queue", "queue_ns"),
    ("device", "device_ns"),
    ("send", "send_ns"),
];

impl SpanQueue {
    pub(super) fn new(seed: u64) -> Self {
        Self { spans: VecDeque::new(), open: BTreeMap::new(), random: Random::new(seed) }
    }

    /// Adds the spans of an event at `now_ns` since 1970. Returns the number of spans that were dropped.
    pub(super) fn record(&mut self, now_ns: u64, event: &Event) -> usize {
        match event.kind.name {
            "slow-io" => self.add_slow_io(&event.about),
            "host-connected" => self.open_connection(now_ns, "nvme-tcp", &event.about),
            "connected" => self.open_connection(now_ns, "nbd", &event.about),
            "host-associated" | "host-accepted" => self.describe("nvme-tcp", &event.about),
            "host-disconnected" => self.close_connection(now_ns, "nvme-tcp", &event.about),
            "disconnected" => self.close_connection(now_ns, "nbd", &event.about),
            "configuration-applied" | "configuration-changed" | "set" => {
                self.add_change(now_ns, event, false);
            }
            "configuration-refused" | "configuration-change-refused" => {
                self.add_change(now_ns, event, true);
            }
            _ => {}
        }
        let dropped = self.spans.len().saturating_sub(SPANS_MAX);
        self.spans.drain(..dropped);
        dropped
    }

    /// Number of spans that wait.
    pub(super) fn len(&self) -> usize {
        self.spans.len()
    }

    /// Takes the oldest spans.
    pub(super) fn take_batch(&mut self) -> Vec<Value> {
        let count = self.spans.len().min(BATCH);
        self.spans.drain(..count).collect()
    }

    /// Puts spans back that were not sent. Returns the number of those that do not fit.
    pub(super) fn put_back(&mut self, spans: Vec<Value>) -> usize {
        for span in spans.into_iter().rev() {
            self.spans.push_front(span);
        }
        let dropped = self.spans.len().saturating_sub(SPANS_MAX);
        self.spans.drain(..dropped);
        dropped
    }

    fn add_slow_io(&mut self, about: &Value) {
        let ns = |field: &str| about[field].as_u64().unwrap_or(0);
        let total_ns: u64 = STAGES.iter().map(|(_, field)| ns(field)).sum();
        let end_ns = ns("ended_unix_us").saturating_mul(1_000);
        let start_ns = end_ns.saturating_sub(total_ns);
        let name = about["operation"].as_str().unwrap_or("command").to_ascii_lowercase();
        let fields = ["protocol", "export", "namespace", "host", "peer", "controller", "queue"];
        let fields = fields.into_iter().chain(["start", "bytes", "command", "error"]);
        let command = Span {
            name: &format!("slow {name}"),
            kind: SERVER,
            start_ns,
            end_ns,
            attributes: fields.filter_map(|field| attribute(field, &about[field])).collect(),
            error: about["error"].as_str(),
        };
        let trace = self.trace_id();
        let parent = self.add(&trace, None, command);
        let mut begin_ns = start_ns;
        for (name, field) in STAGES {
            let took_ns = ns(field);
            if took_ns > 0 {
                let (start_ns, end_ns) = (begin_ns, begin_ns + took_ns);
                let attributes = Vec::new();
                let stage =
                    Span { name, kind: INTERNAL, start_ns, end_ns, attributes, error: None };
                self.add(&trace, Some(&parent), stage);
            }
            begin_ns += took_ns;
        }
    }

    fn open_connection(&mut self, now_ns: u64, protocol: &'static str, about: &Value) {
        if let Some(connection) = about["connection"].as_u64()
            && self.open.len() < CONNECTIONS_MAX
        {
            let attributes = about.as_object().cloned().unwrap_or_default();
            self.open
                .insert((protocol, connection), OpenConnection { since_ns: now_ns, attributes });
        }
    }

    /// Adds what has become known of a connection.
    fn describe(&mut self, protocol: &'static str, about: &Value) {
        let connection = about["connection"].as_u64().unwrap_or(u64::MAX);
        if let Some(open) = self.open.get_mut(&(protocol, connection))
            && let Some(about) = about.as_object()
        {
            let scalars = about.iter().filter(|(_, value)| !value.is_object() && !value.is_null());
            open.attributes.extend(scalars.map(|(name, value)| (name.clone(), value.clone())));
        }
    }

    fn close_connection(&mut self, now_ns: u64, protocol: &'static str, about: &Value) {
        self.describe(protocol, about);
        let connection = about["connection"].as_u64().unwrap_or(u64::MAX);
        let Some(open) = self.open.remove(&(protocol, connection)) else { return };
        let attributes = open.attributes.iter();
        let attributes = attributes.filter_map(|(name, value)| attribute(name, value));
        let attributes = attributes.chain(attribute("protocol", &json!(protocol))).collect();
        let (name, kind, error) = ("connection", SERVER, None);
        let (start_ns, end_ns) = (open.since_ns, now_ns);
        let span = Span { name, kind, start_ns, end_ns, attributes, error };
        let trace = self.trace_id();
        self.add(&trace, None, span);
    }

    fn add_change(&mut self, now_ns: u64, event: &Event, is_refused: bool) {
        let about = event.about.as_object().cloned().unwrap_or_default();
        let attributes = about.iter().filter_map(|(name, value)| attribute(name, value));
        let attributes = attributes.chain(attribute("text", &json!(event.text))).collect();
        let span = Span {
            name: event.kind.name,
            kind: INTERNAL,
            start_ns: now_ns,
            end_ns: now_ns,
            attributes,
            error: is_refused.then_some(event.text.as_str()),
        };
        let trace = self.trace_id();
        self.add(&trace, None, span);
    }

    /// Adds a span, and returns its identifier.
    fn add(&mut self, trace: &str, parent: Option<&str>, span: Span<'_>) -> String {
        let id = format!("{:016x}", self.random.next_u64().max(1));
        let mut object = json!({
            "traceId": trace,
            "spanId": id,
            "name": span.name,
            "kind": span.kind,
            "startTimeUnixNano": span.start_ns.to_string(),
            "endTimeUnixNano": span.end_ns.to_string(),
            "attributes": span.attributes,
        });
        if let Some(parent) = parent {
            object["parentSpanId"] = json!(parent);
        }
        if let Some(error) = span.error {
            object["status"] = json!({ "code": STATUS_ERROR, "message": error });
        }
        self.spans.push_back(object);
        id
    }

    fn trace_id(&mut self) -> String {
        format!("{:016x}{:016x}", self.random.next_u64().max(1), self.random.next_u64())
    }
}

/// Request with these spans.
pub(super) fn traces_request(resource: &Value, scope: &Value, spans: &[Value]) -> Value {
    json!({ "resourceSpans": [{
        "resource": resource,
        "scopeSpans": [{ "scope": scope, "spans": spans }],
    }] })
}

/// An attribute; `None` if there is no value.
pub(super) fn attribute(name: &str, value: &Value) -> Option<Value> {
    let value = match value {
        Value::Null => return None,
        Value::String(text) => json!({ "stringValue": text }),
        Value::Bool(flag) => json!({ "boolValue": flag }),
        Value::Number(number) => match number.as_i64() {
            Some(number) => json!({ "intValue": number.to_string() }),
            None => json!({ "stringValue": number.to_string() }),
        },
        other => json!({ "stringValue": other.to_string() }),
    };
    Some(json!({ "key": format!("tenmil.{name}"), "value": value }))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{SPANS_MAX, SpanQueue};
    use crate::event::{Event, EventKind};

    fn event(name: &'static str, about: Value) -> Event {
        Event { kind: EventKind { name, help: "" }, text: "a text".into(), about }
    }

    /// Times in nanoseconds, and attributes by name.
    fn parts(span: &Value) -> (u64, u64, Value) {
        let time = |field: &str| span[field].as_str().unwrap().parse::<u64>().unwrap();
        let attributes = span["attributes"].as_array().unwrap().iter().map(|one| {
            let value = one["value"].as_object().unwrap().values().next().unwrap().clone();
            (one["key"].as_str().unwrap().to_owned(), value)
        });
        (time("startTimeUnixNano"), time("endTimeUnixNano"), Value::Object(attributes.collect()))
    }

    #[test]
    fn slow_command_is_a_span_with_its_stages_as_children() {
        let mut queue = SpanQueue::new(1);
        let about = json!({
            "protocol": "nvme-tcp", "export": "nqn", "namespace": 1, "peer": "10.0.0.7:1",
            "operation": "Write", "start": 8, "bytes": 4096, "command": 3, "error": "Write Fault",
            "host": null, "wait_ns": 0, "transfer_ns": 200, "queue_ns": 30, "device_ns": 4_000,
            "send_ns": null, "ended_unix_us": 1_000_000,
        });
        assert_eq!(queue.record(5, &event("slow-io", about)), 0);
        let spans = queue.take_batch();
        let names: Vec<&str> = spans.iter().map(|span| span["name"].as_str().unwrap()).collect();
        assert_eq!(names, ["slow write", "transfer", "queue", "device"]);
        let (start, end, attributes) = parts(&spans[0]);
        assert_eq!((start, end), (1_000_000_000 - 4_230, 1_000_000_000));
        assert_eq!(
            (&attributes["tenmil.namespace"], &attributes["tenmil.host"]),
            (&json!("1"), &Value::Null)
        );
        assert_eq!(spans[0]["status"], json!({ "code": 2, "message": "Write Fault" }));
        let mut before = start;
        for (stage, took) in spans[1..].iter().zip([200, 30, 4_000]) {
            let (start, end, _) = parts(stage);
            assert_eq!((start, end - start), (before, took));
            assert_eq!(
                (&stage["traceId"], &stage["parentSpanId"]),
                (&spans[0]["traceId"], &spans[0]["spanId"])
            );
            before = end;
        }
        let id = spans[0]["traceId"].as_str().unwrap();
        assert!(id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit()), "{id}");
        assert_ne!(spans[1]["spanId"], spans[2]["spanId"]);
    }

    #[test]
    fn connection_is_a_span_from_its_start_to_its_end() {
        let mut queue = SpanQueue::new(1);
        queue.record(10, &event("host-connected", json!({ "connection": 4, "peer": "p" })));
        queue.record(
            11,
            &event("connected", json!({ "connection": 4, "peer": "q", "export": "e" })),
        );
        let about =
            json!({ "connection": 4, "host": "nqn.h", "controller": 7, "authentication": null });
        queue.record(12, &event("host-accepted", about));
        assert_eq!(queue.len(), 0);
        let about = json!({ "connection": 4, "reason": "host-disconnect", "reads": 9 });
        queue.record(30, &event("host-disconnected", about));
        queue.record(31, &event("disconnected", json!({ "connection": 4, "reason": "timeout" })));
        queue.record(32, &event("disconnected", json!({ "connection": 4 })));
        let spans = queue.take_batch();
        assert_eq!(spans.len(), 2, "one that was not seen to begin has none");
        let (start, end, attributes) = parts(&spans[0]);
        let expected = json!({
            "tenmil.connection": "4", "tenmil.peer": "p", "tenmil.host": "nqn.h",
            "tenmil.controller": "7", "tenmil.reason": "host-disconnect", "tenmil.reads": "9",
            "tenmil.protocol": "nvme-tcp",
        });
        assert_eq!((start, end, attributes), (10, 30, expected));
        assert_eq!(parts(&spans[1]).2["tenmil.export"], "e");
    }

    #[test]
    fn changes_are_spans_and_refused_ones_are_errors() {
        let mut queue = SpanQueue::new(1);
        queue.record(7, &event("configuration-applied", json!({ "path": "/a", "changes": ["b"] })));
        queue.record(8, &event("configuration-refused", json!({ "path": "/a" })));
        queue.record(9, &event("path-lost", json!({})));
        let spans = queue.take_batch();
        assert_eq!(spans.len(), 2);
        let (start, end, attributes) = parts(&spans[0]);
        assert_eq!((start, end, &attributes["tenmil.changes"]), (7, 7, &json!("[\"b\"]")));
        assert_eq!(spans[0]["status"], Value::Null);
        assert_eq!(spans[1]["status"]["message"], "a text");
    }

    #[test]
    fn full_queue_drops_the_oldest_and_counts_them() {
        let mut queue = SpanQueue::new(1);
        let record = |queue: &mut SpanQueue, count: usize| -> usize {
            (0..count).map(|_| queue.record(1, &event("set", json!({})))).sum()
        };
        assert_eq!(record(&mut queue, SPANS_MAX), 0);
        let batch = queue.take_batch();
        assert_eq!(record(&mut queue, batch.len() + 3), 3);
        let count = batch.len();
        assert_eq!((queue.put_back(batch), queue.len()), (count, SPANS_MAX));
    }
}
