//! Paths to remote devices: list, state and events.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};

use crate::event::{Event, EventKind, EventSender};
use crate::method::{Method, MethodKind, ParamDefault, Parameter};
use crate::param_type::ParamType;
use crate::result_type::{FieldSchema, ResultType};

/// Registry of the paths to remote devices. Clones share the registry.
#[derive(Clone, Debug, Default)]
pub struct Paths(Arc<Mutex<PathRegistry>>);

/// Paths of one device, updated by its driver. They are removed from the registry on drop.
#[derive(Debug)]
pub struct DevicePaths {
    board: Paths,
    number: u64,
}

/// Change of a path's state. Paths are numbered from 0 in the order of the device's URI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathStateEvent<'a> {
    /// The path is usable, with this ANA state.
    Up(usize, &'static str),
    /// The path was lost, with the reason.
    Lost(usize, &'a str),
    /// The ANA state of the path has changed.
    Changed(usize, &'static str),
    /// The path leads to a different device, which the text names.
    Mismatch(usize, &'a str),
    /// The path is now the preferred one.
    Selected(usize),
    /// No path is usable.
    AllPathsDown,
}

#[derive(Default)]
struct PathRegistry {
    devices: BTreeMap<u64, Device>,
    /// Number of the next device.
    next: u64,
    announcer: Option<EventSender>,
}

struct Device {
    name: String,
    paths: Vec<Path>,
}

#[derive(Clone, Debug)]
struct Path {
    address: String,
    state: &'static str,
    access: Option<&'static str>,
    is_best: bool,
    why: Option<String>,
    ups: u64,
    losses: u64,
}

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
    FieldSchema::new("ups", ResultType::Whole, "number of times the path came up"),
    FieldSchema::new("losses", ResultType::Whole, "number of times the path was lost"),
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
        let board = call.state.part::<Paths>("paths")?.lock();
        let wanted = call.arguments.text("device");
        let devices = board.devices.values();
        let devices = devices.filter(|device| wanted.is_none_or(|name| name == device.name));
        Ok(devices.flat_map(Device::rows).collect())
    },
}];

const UP: EventKind = kind("path-up", "a path to a remote device was connected or reconnected");
const LOST: EventKind = kind("path-lost", "a path to a remote device was lost, with the reason");
const CHANGED: EventKind = kind("path-changed", "the ANA state of a path changed");
const UNFIT: EventKind =
    kind("path-mismatch", "a path leads to a different device than the other paths");
const TAKEN: EventKind = kind("path-selected", "another path became the preferred one");
const NONE: EventKind = kind("all-paths-down", "all paths to a remote device are down");

pub(super) const EVENTS: &[EventKind] = &[UP, LOST, CHANGED, UNFIT, TAKEN, NONE];

const fn kind(name: &'static str, help: &'static str) -> EventKind {
    EventKind { name, help }
}

impl Paths {
    /// Sets the sender of path events.
    pub fn announce_by(&self, announcer: EventSender) {
        self.lock().announcer = Some(announcer);
    }

    /// Registers a device with its paths.
    #[must_use]
    pub fn add(&self, device: String, addresses: impl Iterator<Item = String>) -> DevicePaths {
        let path = |address| Path {
            address,
            state: "trying",
            access: None,
            is_best: false,
            why: None,
            ups: 0,
            losses: 0,
        };
        let mut board = self.lock();
        let number = board.next;
        board.next += 1;
        let paths = addresses.map(path).collect();
        board.devices.insert(number, Device { name: device, paths });
        DevicePaths { board: self.clone(), number }
    }

    fn lock(&self) -> MutexGuard<'_, PathRegistry> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DevicePaths {
    /// Records a change and emits its event.
    pub fn tell(&self, news: PathStateEvent<'_>) {
        let mut board = self.board.lock();
        let Some(device) = board.devices.get_mut(&self.number) else { return };
        device.note(news);
        let event = device.event(news);
        if let Some(announcer) = &board.announcer {
            announcer.emit(event);
        }
    }
}

impl Drop for DevicePaths {
    fn drop(&mut self) {
        self.board.lock().devices.remove(&self.number);
    }
}

impl Device {
    fn note(&mut self, news: PathStateEvent<'_>) {
        if let PathStateEvent::Selected(_) | PathStateEvent::AllPathsDown = news {
            self.paths.iter_mut().for_each(|path| path.is_best = false);
        }
        let has_best = self.paths.iter().any(|path| path.is_best);
        let Some(path) = news.path().and_then(|path| self.paths.get_mut(path)) else { return };
        match news {
            PathStateEvent::Up(_, access) => {
                (path.state, path.access, path.why) = ("up", Some(access), None);
                path.ups += 1;
                path.is_best |= !has_best;
            }
            PathStateEvent::Lost(_, why) => {
                path.losses += u64::from(path.state == "up");
                (path.state, path.access, path.why) = ("lost", None, Some(why.to_owned()));
                path.is_best = false;
            }
            PathStateEvent::Mismatch(_, why) => {
                (path.state, path.access, path.why) = ("unfit", None, Some(why.to_owned()));
            }
            PathStateEvent::Changed(_, access) => path.access = Some(access),
            PathStateEvent::Selected(_) => path.is_best = true,
            PathStateEvent::AllPathsDown => {}
        }
    }

    fn event(&self, news: PathStateEvent<'_>) -> Event {
        let address = news.path().and_then(|path| self.paths.get(path)).map(|path| &path.address);
        let where_ = address.map_or_else(String::new, |address| format!(" by {address}"));
        let (kind, what, access, why) = match news {
            PathStateEvent::Up(_, access) => (UP, format!("up, {access}"), Some(access), None),
            PathStateEvent::Lost(_, why) => (LOST, format!("lost: {why}"), None, Some(why)),
            PathStateEvent::Changed(_, access) => {
                (CHANGED, format!("{access} from now on"), Some(access), None)
            }
            PathStateEvent::Mismatch(_, why) => {
                (UNFIT, format!("not used: {why}"), None, Some(why))
            }
            PathStateEvent::Selected(_) => (TAKEN, "the best from now on".to_owned(), None, None),
            PathStateEvent::AllPathsDown => (NONE, "no path is left".to_owned(), None, None),
        };
        let about = json!({
            "device": self.name,
            "path": news.path(),
            "address": address,
            "access": access,
            "why": why,
        });
        Event { kind, text: format!("{}{where_}: {what}", self.name), about }
    }

    fn rows(&self) -> impl Iterator<Item = Value> {
        self.paths.iter().enumerate().map(|(number, path)| {
            json!({
                "device": self.name,
                "path": number,
                "address": path.address,
                "state": path.state,
                "access": path.access,
                "best": path.is_best,
                "why": path.why,
                "ups": path.ups,
                "losses": path.losses,
            })
        })
    }
}

impl PathStateEvent<'_> {
    const fn path(&self) -> Option<usize> {
        match *self {
            Self::Up(path, _)
            | Self::Lost(path, _)
            | Self::Changed(path, _)
            | Self::Mismatch(path, _)
            | Self::Selected(path) => Some(path),
            Self::AllPathsDown => None,
        }
    }
}

impl fmt::Debug for PathRegistry {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Board").field("devices", &self.devices.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, Value, json};

    use super::{PathStateEvent, Paths};
    use crate::event::announcements;
    use crate::methods::TABLE;
    use crate::{Arguments, CallContext, DeferredReply, ServerState};

    fn rows(paths: &Paths, arguments: Value) -> Value {
        let state = ServerState::new().with(paths.clone());
        let method = TABLE.find("paths").unwrap();
        let Value::Object(arguments) = arguments else { panic!("{arguments}") };
        let arguments = Arguments::check(method, &arguments).unwrap();
        (method.run)(&CallContext {
            table: &TABLE,
            state: &state,
            arguments: &arguments,
            later: &DeferredReply::default(),
            passed: &crate::PassedFd::default(),
        })
        .unwrap()
    }

    #[test]
    fn what_happens_to_paths_is_listed_and_announced_in_order() {
        let paths = Paths::default();
        let (announcer, announced) = announcements().unwrap();
        paths.announce_by(announcer);
        let device = paths.add("tcp://a,b/disk".into(), ["a", "b"].map(str::to_owned).into_iter());
        for news in [
            PathStateEvent::Up(0, "optimized"),
            PathStateEvent::Up(1, "optimized"),
            PathStateEvent::Lost(0, "it was cut"),
            PathStateEvent::Selected(1),
            PathStateEvent::Changed(1, "non-optimized"),
        ] {
            device.tell(news);
        }
        let found = rows(&paths, json!({}));
        let state = |row: usize| (&found[row]["state"], &found[row]["best"]);
        assert_eq!(state(0), (&json!("lost"), &json!(false)));
        assert_eq!(state(1), (&json!("up"), &json!(true)));
        assert_eq!((&found[0]["why"], &found[0]["losses"]), (&json!("it was cut"), &json!(1)));
        assert_eq!(found[1]["access"], "non-optimized");
        let events: Vec<_> = std::iter::from_fn(|| announced.next()).collect();
        let kinds: Vec<&str> = events.iter().map(|event| event.kind.name).collect();
        let expected = ["path-up", "path-up", "path-lost", "path-selected", "path-changed"];
        assert_eq!(kinds, expected);
        assert_eq!(events[2].text, "tcp://a,b/disk by a: lost: it was cut");
        assert_eq!(events[2].about["address"], "a");
        device.tell(PathStateEvent::AllPathsDown);
        assert!(rows(&paths, json!({}))[1]["best"] == false);
        device.tell(PathStateEvent::Up(0, "optimized"));
        assert!(rows(&paths, json!({}))[0]["best"] == true, "there is no other");
    }

    #[test]
    fn a_device_is_listed_as_long_as_it_is_tended_and_found_by_name() {
        let paths = Paths::default();
        let first = paths.add("first".into(), ["a".to_owned()].into_iter());
        let _second = paths.add("second".into(), ["b".to_owned()].into_iter());
        assert_eq!(rows(&paths, json!({})).as_array().unwrap().len(), 2);
        assert_eq!(rows(&paths, json!({ "device": "first" }))[0]["address"], "a");
        drop(first);
        assert_eq!(rows(&paths, json!({ "device": "first" })), json!([]));
        let method = TABLE.find("paths").unwrap();
        let arguments = Arguments::check(method, &Map::new()).unwrap();
        let call = CallContext {
            table: &TABLE,
            state: &ServerState::new(),
            arguments: &arguments,
            later: &DeferredReply::default(),
            passed: &crate::PassedFd::default(),
        };
        let refusal = (method.run)(&call).unwrap_err();
        assert_eq!(refusal.message, "this process has no paths, expected one that has");
    }
}
