//! Paths to remote devices: list, state and events.

use serde_json::{Value, json};
use tenmil_nvme_fabrics::{PathChange, PathRow, PathTable};
use tenmil_reactor::flight_recorder::{self, FlightEventKind};

use super::mirrors_and_delays::is_uri_of_device;
use crate::event::{Event, EventKind, EventSender};
use crate::method::{Method, MethodKind, ParamDefault, Parameter};
use crate::param_type::ParamType;
use crate::result_type::{FieldSchema, ResultType};
use tenmil_block::uri::short_form_for_terminal;

const NAME: ParamType = ParamType::Text { len_max: 4096 };
const TEXT: ResultType = ResultType::Maybe(&ResultType::Text);

const PATH: &[FieldSchema] = &[
    FieldSchema::new("device", ResultType::Text, "device that the path leads to"),
    FieldSchema::new(
        "path",
        ResultType::Whole,
        "number of the path in the URI of the device, from 0",
    ),
    FieldSchema::new("address", ResultType::Text, "address of the remote end"),
    FieldSchema::new(
        "state",
        ResultType::Text,
        "state: trying, up, lost, or unfit if the path leads to a different device",
    ),
    FieldSchema::new("access", TEXT, "ANA state, while the path is up"),
    FieldSchema::new("best", ResultType::Flag, "whether this is the preferred path"),
    FieldSchema::new("why", TEXT, "why the path is not up"),
    FieldSchema::new("connects", ResultType::Whole, "number of times the path came up"),
    FieldSchema::new("losses", ResultType::Whole, "number of times the path was lost"),
    FieldSchema::new(
        "failed_connects",
        ResultType::Whole,
        "number of attempts to connect the path that failed",
    ),
    FieldSchema::new(
        "failovers",
        ResultType::Whole,
        "number of times it replaced another path as the preferred one",
    ),
    FieldSchema::new(
        "timeouts",
        ResultType::Whole,
        "number of commands that missed their deadline",
    ),
    FieldSchema::new(
        "retries",
        ResultType::Whole,
        "number of requests that the path has not completed and that were sent again, on it or another \
         path",
    ),
    FieldSchema::new(
        "unserved",
        ResultType::Whole,
        "number of requests of the device that failed because no path was usable; the same for all its \
         paths",
    ),
    FieldSchema::new("tls", TEXT, "cipher suite of its connections; null in plaintext"),
    FieldSchema::new(
        "authenticated",
        ResultType::Flag,
        "whether the host was authenticated with DH-HMAC-CHAP",
    ),
];

pub(super) const METHODS: &[Method] = &[Method {
    verb: MethodKind::Get,
    name: "paths",
    parameters: &[Parameter {
        name: "device",
        kind: NAME,
        need: ParamDefault::Optional,
        help: "only paths to the device of this name",
    }],
    answer: ResultType::Rows(PATH),
    help: "List the paths to remote devices and their ANA states",
    example: "tenmil get paths",
    run: |call| {
        let rows = call.state.find_part::<PathTable>("paths")?.rows();
        let wanted = call.arguments.text("device");
        let rows =
            rows.iter().filter(|row| wanted.is_none_or(|name| is_uri_of_device(&row.device, name)));
        Ok(rows.map(path_row).collect())
    },
}];

const UP: EventKind =
    path_event_kind("path-up", "a path to a remote device was connected or reconnected");
const LOST: EventKind =
    path_event_kind("path-lost", "a path to a remote device was lost, with the reason");
const CHANGED: EventKind = path_event_kind("path-changed", "the ANA state of a path changed");
const UNFIT: EventKind =
    path_event_kind("path-mismatch", "a path leads to a different device than the other paths");
const TAKEN: EventKind = path_event_kind("path-selected", "another path became the preferred one");
const NONE: EventKind = path_event_kind("all-paths-down", "all paths to a remote device are down");

pub(super) const EVENTS: &[EventKind] = &[UP, LOST, CHANGED, UNFIT, TAKEN, NONE];

const fn path_event_kind(name: &'static str, help: &'static str) -> EventKind {
    EventKind { name, help }
}

/// Sends an event for each change of a path in `table`.
pub fn subscribe_path_events(table: &PathTable, sender: EventSender) {
    table.set_observer(Box::new(move |device, address, change| {
        let event = path_event(device, address, change);
        let name = event.kind.name.trim_start_matches("path-");
        let path = change.path_index().map_or(u64::MAX, |path| path as u64);
        let arguments = [path, flight_recorder::pack_text(name)];
        flight_recorder::record_now(FlightEventKind::PathChanged, arguments);
        sender.emit(event);
    }));
}

fn path_event(device: &str, address: Option<&str>, change: PathChange<'_>) -> Event {
    let by = address.map_or_else(String::new, |address| format!(" by {address}"));
    let (kind, what, access, why) = match change {
        PathChange::Up(_, access) => (UP, format!("up, {access}"), Some(access), None),
        PathChange::Lost(_, why) => (LOST, format!("lost: {why}"), None, Some(why)),
        PathChange::Changed(_, access) => {
            (CHANGED, format!("{access} from now on"), Some(access), None)
        }
        PathChange::Mismatch(_, why) => (UNFIT, format!("not used: {why}"), None, Some(why)),
        PathChange::Selected(_) => (TAKEN, "the best from now on".to_owned(), None, None),
        PathChange::AllPathsDown => (NONE, "no path is left".to_owned(), None, None),
    };
    let about = json!({
        "device": device,
        "path": change.path_index(),
        "address": address,
        "access": access,
        "why": why,
    });
    Event { kind, text: format!("{}{by}: {what}", short_form_for_terminal(device)), about }
}

fn path_row(row: &PathRow) -> Value {
    json!({
        "device": row.device,
        "path": row.number,
        "address": row.address,
        "state": row.state,
        "access": row.access,
        "best": row.is_preferred,
        "why": row.reason,
        "connects": row.ups,
        "losses": row.losses,
        "failed_connects": row.failed_connects,
        "failovers": row.failovers,
        "timeouts": row.timeouts,
        "retries": row.retries,
        "unserved": row.unserved,
        "tls": row.security.cipher_suite,
        "authenticated": row.security.is_authenticated,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use tenmil_nvme_fabrics::PathSecurity;

    use super::{PathChange, PathTable, subscribe_path_events};
    use crate::ProcessParts;
    use crate::event::event_channel;
    use crate::methods::test_calls::call_method;

    fn path_rows(paths: &PathTable, arguments: Value) -> Value {
        let state = ProcessParts::new().with_part(paths.clone());
        call_method(&state, "paths", &arguments).unwrap()
    }

    #[test]
    fn path_changes_are_listed_and_emitted_in_order() {
        let paths = PathTable::default();
        let (announcer, announced) = event_channel().unwrap();
        subscribe_path_events(&paths, announcer);
        let device = paths.add("tcp://a,b/disk".into(), ["a", "b"].map(str::to_owned).into_iter());
        for change in [
            PathChange::Up(0, "optimized"),
            PathChange::Up(1, "optimized"),
            PathChange::Lost(0, "it was cut"),
            PathChange::Selected(1),
            PathChange::Changed(1, "non-optimized"),
        ] {
            device.record_change(change);
        }
        let found = path_rows(&paths, json!({}));
        let state = |row: usize| (&found[row]["state"], &found[row]["best"]);
        assert_eq!(state(0), (&json!("lost"), &json!(false)));
        assert_eq!(state(1), (&json!("up"), &json!(true)));
        assert_eq!((&found[0]["why"], &found[0]["losses"]), (&json!("it was cut"), &json!(1)));
        assert_eq!(found[1]["access"], "non-optimized");
        assert_eq!((&found[1]["tls"], &found[1]["authenticated"]), (&Value::Null, &json!(false)));
        let suite = "TLS_AES_128_GCM_SHA256";
        let security = PathSecurity { cipher_suite: Some(suite), is_authenticated: true };
        device.record_security(1, security);
        let found = path_rows(&paths, json!({}));
        assert_eq!((&found[1]["tls"], &found[1]["authenticated"]), (&json!(suite), &json!(true)));
        assert_eq!(found[0]["tls"], Value::Null, "of the other path nothing is known");
        device.record_timeout(0);
        let count = |row: usize, name: &str| path_rows(&paths, json!({}))[row][name].as_u64();
        assert_eq!((count(0, "timeouts"), count(1, "timeouts")), (Some(1), Some(0)));
        assert_eq!((count(0, "failovers"), count(1, "failovers")), (Some(0), Some(1)));
        let events: Vec<_> = std::iter::from_fn(|| announced.next()).collect();
        let kinds: Vec<&str> = events.iter().map(|event| event.kind.name).collect();
        let expected = ["path-up", "path-up", "path-lost", "path-selected", "path-changed"];
        assert_eq!(kinds, expected);
        assert_eq!(events[2].text, "tcp://a:4420,b:4420/disk by a: lost: it was cut");
        assert_eq!(events[2].about["address"], "a");
        device.record_change(PathChange::AllPathsDown);
        assert!(path_rows(&paths, json!({}))[1]["best"] == false);
        device.record_change(PathChange::Up(0, "optimized"));
        assert!(path_rows(&paths, json!({}))[0]["best"] == true, "there is no other");
    }

    #[test]
    fn device_is_listed_while_open_and_found_by_name() {
        let paths = PathTable::default();
        let first = paths.add("first".into(), ["a".to_owned()].into_iter());
        let _second = paths.add("second".into(), ["b".to_owned()].into_iter());
        assert_eq!(path_rows(&paths, json!({})).as_array().unwrap().len(), 2);
        assert_eq!(path_rows(&paths, json!({ "device": "first" }))[0]["address"], "a");
        drop(first);
        assert_eq!(path_rows(&paths, json!({ "device": "first" })), json!([]));
        let refusal = call_method(&ProcessParts::new(), "paths", &json!({})).unwrap_err();
        assert_eq!(refusal.message, "this process has no paths, expected one that has");
    }
}
