//! Who is connected over NVMe/TCP, and what happens at those doors.

use serde_json::{Value, json};
use target::tcp::{ConnectionSample, News, Service};

use crate::event::{Announcer, Event, EventKind};
use crate::kind::Kind;
use crate::method::{Method, Need, Parameter, Verb};
use crate::shape::{Field, Shape};

/// What a program serves over NVMe/TCP.
#[derive(Clone, Debug)]
pub struct Queues(pub Service);

const NAME: Kind = Kind::Text { len_max: 223 };
const TEXT: Shape = Shape::Maybe(&Shape::Text);
const WHOLE: Shape = Shape::Maybe(&Shape::Whole);

const QUEUE: &[Field] = &[
    Field::new("id", Shape::Whole, "the number of its connection, which is never used again"),
    Field::new("peer", Shape::Text, "who it is"),
    Field::new("port", Shape::Whole, "by which listener it has come, counted from 1"),
    Field::new("host", TEXT, "the name of the host, once it is known"),
    Field::new("subsystem", TEXT, "what it is connected to"),
    Field::new("controller", WHOLE, "the number of its controller"),
    Field::new("queue", WHOLE, "which queue of that it is; 0 is the admin queue"),
    Field::new("header_digest", Shape::Flag, "whether a digest follows each header"),
    Field::new("data_digest", Shape::Flag, "whether a digest follows all data"),
    Field::new("memory_bytes", Shape::Whole, "how much of the memory for connections it has"),
    Field::new("reactor", WHOLE, "which reactor turns it, once that is settled"),
];

pub(super) const METHODS: &[Method] = &[Method {
    verb: Verb::Get,
    name: "queues",
    parameters: &[
        Parameter {
            name: "subsystem",
            kind: NAME,
            need: Need::Optional,
            help: "only those of the subsystem of this name",
        },
        Parameter {
            name: "host",
            kind: NAME,
            need: Need::Optional,
            help: "only those of the host of this name",
        },
    ],
    answer: Shape::Rows(QUEUE),
    help: "List who is connected over NVMe/TCP: a connection is a queue of a host",
    example: "tenmil get queues host=nqn.2014-08.org.example:client",
    run: |call| {
        let Queues(service) = call.state.part::<Queues>("queues")?;
        let wanted = |name: &str, found: &Option<String>| {
            call.arguments.text(name).is_none_or(|wanted| found.as_deref() == Some(wanted))
        };
        let connections = service.connections().into_iter();
        let all = connections.filter(|one| wanted("subsystem", &one.subsystem));
        Ok(all.filter(|one| wanted("host", &one.host)).map(row).collect())
    },
}];

fn row(sample: ConnectionSample) -> Value {
    json!({
        "id": sample.id,
        "peer": sample.peer,
        "port": sample.port,
        "host": sample.host,
        "subsystem": sample.subsystem,
        "controller": sample.cntlid,
        "queue": sample.queue,
        "header_digest": sample.header_digest,
        "data_digest": sample.data_digest,
        "memory_bytes": sample.memory_bytes,
        "reactor": sample.reactor,
    })
}

const CAME: EventKind = kind("host-connected", "somebody has connected over NVMe/TCP");
const ASSOCIATED: EventKind = kind("host-associated", "a host has a controller of a subsystem");
const REFUSED: EventKind =
    kind("host-refused", "a host has asked for what it does not get, and why");
const GONE: EventKind = kind("host-disconnected", "a connection over NVMe/TCP has ended, and why");
const TROUBLE: EventKind = kind("host-trouble", "something went wrong with connections of hosts");
const APPLIED: EventKind = kind(
    "configuration-applied",
    "what is served is what the file says now, and what that changed",
);
const NOT_APPLIED: EventKind = kind(
    "configuration-refused",
    "the file cannot be served, where it is wrong; nothing is changed",
);

pub(super) const EVENTS: &[EventKind] =
    &[CAME, ASSOCIATED, REFUSED, GONE, TROUBLE, APPLIED, NOT_APPLIED];

const fn kind(name: &'static str, help: &'static str) -> EventKind {
    EventKind { name, help }
}

impl Announcer {
    /// Tells what has happened to connections over NVMe/TCP.
    pub fn announce_host(&self, news: &News) {
        let (kind, about) = match news {
            News::Connected { connection, peer } => {
                (CAME, json!({ "connection": connection, "peer": peer }))
            }
            News::Associated { connection, peer, host, subsystem, cntlid } => (
                ASSOCIATED,
                json!({
                    "connection": connection,
                    "peer": peer,
                    "host": host,
                    "subsystem": subsystem,
                    "controller": cntlid,
                }),
            ),
            News::Refused { connection, peer, .. } => {
                (REFUSED, json!({ "connection": connection, "peer": peer }))
            }
            News::Disconnected { connection, peer, reason } => {
                (GONE, json!({ "connection": connection, "peer": peer, "reason": reason.name() }))
            }
            News::Notice(_) | News::Trouble(_) => (TROUBLE, json!({})),
        };
        self.announce(Event { kind, text: news.to_string(), about });
    }

    /// Tells what the file at `path` was good for: the changes it made, or why there are none.
    pub fn announce_configuration(&self, path: &str, applied: Result<&[String], &str>) {
        let about = json!({ "path": path, "changes": applied.unwrap_or_default() });
        let (kind, text) = match applied {
            Ok([]) => (APPLIED, format!("{path}: nothing has changed")),
            Ok(changes) => (APPLIED, format!("{path}: {}", changes.join("; "))),
            Err(why) => (NOT_APPLIED, format!("nothing is changed: {why}")),
        };
        self.announce(Event { kind, text, about });
    }
}

#[cfg(test)]
mod tests {
    use dma::Regions;
    use serde_json::json;
    use target::tcp::{Limits, News, Reason, Service};

    use super::{APPLIED, GONE, NOT_APPLIED, Queues};
    use crate::event::announcements;
    use crate::methods::TABLE;
    use crate::{Arguments, Call, Later, State};

    #[test]
    fn nobody_is_connected_to_a_service_without_doors() {
        let limits = Limits { connections_max: 1, memory_bytes: 4 << 20, ..Limits::default() };
        let service = Service::new(&Regions::new(4), limits).unwrap();
        let state = State::new().with(Queues(service));
        let method = TABLE.find("queues").unwrap();
        let arguments = Arguments::check(method, &serde_json::Map::new()).unwrap();
        let call = Call {
            table: &TABLE,
            state: &state,
            arguments: &arguments,
            later: &Later::default(),
            passed: &crate::Passed::default(),
        };
        assert_eq!((method.run)(&call).unwrap(), json!([]));
        let none = State::new();
        let refusal = (method.run)(&Call { state: &none, ..call }).unwrap_err();
        assert_eq!(refusal.message, "this process has no queues, expected one that has");
    }

    #[test]
    fn what_happens_is_announced_with_its_reason() {
        let (announcer, announced) = announcements().unwrap();
        let reason = Reason::TooSlow("connect");
        announcer.announce_host(&News::Disconnected { connection: 3, peer: "x".into(), reason });
        let event = announced.next().unwrap();
        assert_eq!((event.kind, &event.about["reason"]), (GONE, &json!("too-slow")));
        let changes = ["adds one".to_owned(), "removes two".to_owned()];
        announcer.announce_configuration("a.toml", Ok(&changes));
        let event = announced.next().unwrap();
        assert_eq!((event.kind, event.text.as_str()), (APPLIED, "a.toml: adds one; removes two"));
        announcer.announce_configuration("a.toml", Ok(&[]));
        assert_eq!(announced.next().unwrap().text, "a.toml: nothing has changed");
        announcer.announce_configuration("a.toml", Err("a.toml: line 1, `memory`: it is less"));
        let event = announced.next().unwrap();
        assert_eq!((event.kind, &event.about["changes"]), (NOT_APPLIED, &json!([])));
    }
}
