//! The paths to remote devices: which there are, how well each leads there, and what happens to them.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};

use crate::event::{Announcer, Event, EventKind};
use crate::kind::Kind;
use crate::method::{Method, Need, Parameter, Verb};
use crate::shape::{Field, Shape};

/// What is known of the paths to remote devices. Cheap to clone: all clones are the same board.
#[derive(Clone, Debug, Default)]
pub struct Paths(Arc<Mutex<Board>>);

/// The paths of one device, for whoever tends them. They are forgotten when this is dropped.
#[derive(Debug)]
pub struct DevicePaths {
    board: Paths,
    number: u64,
}

/// What has happened to paths, which are counted from 0 in the order in which they were given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathNews<'a> {
    /// A path can be used, and leads there so well.
    Up(usize, &'static str),
    /// It cannot be used, and why.
    Lost(usize, &'a str),
    /// It leads there better or worse than before.
    Changed(usize, &'static str),
    /// It leads to something else, and to what.
    Unfit(usize, &'a str),
    /// It is the best one now, in place of another.
    Taken(usize),
    /// None leads there.
    None,
}

#[derive(Default)]
struct Board {
    devices: BTreeMap<u64, Device>,
    /// The number of the next one.
    next: u64,
    announcer: Option<Announcer>,
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

const NAME: Kind = Kind::Text { len_max: 4096 };
const TEXT: Shape = Shape::Maybe(&Shape::Text);

const PATH: &[Field] = &[
    Field::new("device", Shape::Text, "what it leads to"),
    Field::new("path", Shape::Whole, "its number in the name of the device, counted from 0"),
    Field::new("address", Shape::Text, "where it begins"),
    Field::new("state", Shape::Text, "trying, up, lost, or unfit: it leads to something else"),
    Field::new("access", TEXT, "how well it leads there (ANA), while it is up"),
    Field::new("best", Shape::Flag, "whether there is none that leads there better"),
    Field::new("why", TEXT, "why it is not up"),
    Field::new("ups", Shape::Whole, "how often it came up"),
    Field::new("losses", Shape::Whole, "how often it was lost"),
];

pub(super) const METHODS: &[Method] = &[Method {
    verb: Verb::Get,
    name: "paths",
    parameters: &[Parameter {
        name: "device",
        kind: NAME,
        need: Need::Optional,
        help: "only those to the device of this name",
    }],
    answer: Shape::Rows(PATH),
    help: "List the paths to devices behind a network, and how well each leads there",
    example: "tenmil get paths",
    run: |call| {
        let board = call.state.part::<Paths>("paths")?.lock();
        let wanted = call.arguments.text("device");
        let devices = board.devices.values();
        let devices = devices.filter(|device| wanted.is_none_or(|name| name == device.name));
        Ok(devices.flat_map(Device::rows).collect())
    },
}];

const UP: EventKind =
    kind("path-up", "a path to a remote device can be used, for the first time or again");
const LOST: EventKind = kind("path-lost", "a path to a remote device cannot be used, and why");
const CHANGED: EventKind =
    kind("path-changed", "a path leads to its device better or worse than before (ANA)");
const UNFIT: EventKind = kind("path-unfit", "a path leads to another device than the others do");
const TAKEN: EventKind = kind("path-taken", "another path than before is the best one");
const NONE: EventKind = kind("path-none", "no path leads to a remote device");

pub(super) const EVENTS: &[EventKind] = &[UP, LOST, CHANGED, UNFIT, TAKEN, NONE];

const fn kind(name: &'static str, help: &'static str) -> EventKind {
    EventKind { name, help }
}

impl Paths {
    /// What happens to paths from now on is announced there.
    pub fn announce_by(&self, announcer: Announcer) {
        self.lock().announcer = Some(announcer);
    }

    /// A device is called by so many paths.
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

    fn lock(&self) -> MutexGuard<'_, Board> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DevicePaths {
    /// Something has happened.
    pub fn tell(&self, news: PathNews<'_>) {
        let mut board = self.board.lock();
        let Some(device) = board.devices.get_mut(&self.number) else { return };
        device.note(news);
        let event = device.event(news);
        if let Some(announcer) = &board.announcer {
            announcer.announce(event);
        }
    }
}

impl Drop for DevicePaths {
    fn drop(&mut self) {
        self.board.lock().devices.remove(&self.number);
    }
}

impl Device {
    fn note(&mut self, news: PathNews<'_>) {
        if let PathNews::Taken(_) | PathNews::None = news {
            self.paths.iter_mut().for_each(|path| path.is_best = false);
        }
        let has_best = self.paths.iter().any(|path| path.is_best);
        let Some(path) = news.path().and_then(|path| self.paths.get_mut(path)) else { return };
        match news {
            PathNews::Up(_, access) => {
                (path.state, path.access, path.why) = ("up", Some(access), None);
                path.ups += 1;
                path.is_best |= !has_best;
            }
            PathNews::Lost(_, why) => {
                path.losses += u64::from(path.state == "up");
                (path.state, path.access, path.why) = ("lost", None, Some(why.to_owned()));
                path.is_best = false;
            }
            PathNews::Unfit(_, why) => {
                (path.state, path.access, path.why) = ("unfit", None, Some(why.to_owned()));
            }
            PathNews::Changed(_, access) => path.access = Some(access),
            PathNews::Taken(_) => path.is_best = true,
            PathNews::None => {}
        }
    }

    fn event(&self, news: PathNews<'_>) -> Event {
        let address = news.path().and_then(|path| self.paths.get(path)).map(|path| &path.address);
        let where_ = address.map_or_else(String::new, |address| format!(" by {address}"));
        let (kind, what, access, why) = match news {
            PathNews::Up(_, access) => (UP, format!("up, {access}"), Some(access), None),
            PathNews::Lost(_, why) => (LOST, format!("lost: {why}"), None, Some(why)),
            PathNews::Changed(_, access) => {
                (CHANGED, format!("{access} from now on"), Some(access), None)
            }
            PathNews::Unfit(_, why) => (UNFIT, format!("not used: {why}"), None, Some(why)),
            PathNews::Taken(_) => (TAKEN, "the best from now on".to_owned(), None, None),
            PathNews::None => (NONE, "no path is left".to_owned(), None, None),
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

impl PathNews<'_> {
    const fn path(&self) -> Option<usize> {
        match *self {
            Self::Up(path, _)
            | Self::Lost(path, _)
            | Self::Changed(path, _)
            | Self::Unfit(path, _)
            | Self::Taken(path) => Some(path),
            Self::None => None,
        }
    }
}

impl fmt::Debug for Board {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Board").field("devices", &self.devices.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, Value, json};

    use super::{PathNews, Paths};
    use crate::event::announcements;
    use crate::methods::TABLE;
    use crate::{Arguments, Call, Later, State};

    fn rows(paths: &Paths, arguments: Value) -> Value {
        let state = State::new().with(paths.clone());
        let method = TABLE.find("paths").unwrap();
        let Value::Object(arguments) = arguments else { panic!("{arguments}") };
        let arguments = Arguments::check(method, &arguments).unwrap();
        (method.run)(&Call {
            table: &TABLE,
            state: &state,
            arguments: &arguments,
            later: &Later::default(),
            passed: &crate::Passed::default(),
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
            PathNews::Up(0, "optimized"),
            PathNews::Up(1, "optimized"),
            PathNews::Lost(0, "it was cut"),
            PathNews::Taken(1),
            PathNews::Changed(1, "non-optimized"),
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
        let expected = ["path-up", "path-up", "path-lost", "path-taken", "path-changed"];
        assert_eq!(kinds, expected);
        assert_eq!(events[2].text, "tcp://a,b/disk by a: lost: it was cut");
        assert_eq!(events[2].about["address"], "a");
        device.tell(PathNews::None);
        assert!(rows(&paths, json!({}))[1]["best"] == false);
        device.tell(PathNews::Up(0, "optimized"));
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
        let call = Call {
            table: &TABLE,
            state: &State::new(),
            arguments: &arguments,
            later: &Later::default(),
            passed: &crate::Passed::default(),
        };
        let refusal = (method.run)(&call).unwrap_err();
        assert_eq!(refusal.message, "this process has no paths, expected one that has");
    }
}
