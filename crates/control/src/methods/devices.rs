//! Devices under what a process does that can be watched or changed: mirrors and delays.

use std::sync::{Arc, Mutex, PoisonError};

use base::Span;
use block::mirror::{LegProgress, MirrorHandle, Progress};
use block::{DelayHandle, Handle, Spread};
use serde_json::{Value, json};

use crate::kind::Kind;
use crate::method::{Call, Method, Need, Parameter, Verb};
use crate::refusal::{Code, Refusal, either, quoted};
use crate::shape::{Field, Shape};

/// The hands on the devices of a process. Clones are of the same process.
#[derive(Clone, Debug, Default)]
pub struct Devices(Arc<Mutex<Vec<Handle>>>);

const WHOLE: Shape = Shape::Maybe(&Shape::Whole);
const NAME: Kind = Kind::Text { len_max: 4096 };
/// An hour.
const TIME: Kind = Kind::Whole { min: 0, max: 3_600_000_000_000 };

const LEG: &[Field] = &[
    Field::new("number", Shape::Whole, "its number"),
    Field::new("device", Shape::Maybe(&Shape::Text), "what it is, unless it was missing at start"),
    Field::new("state", Shape::Text, "in sync, copied to, stale or missing"),
];

const MIRROR: &[Field] = &[
    Field::new("device", Shape::Text, "its name"),
    Field::new("uuid", Shape::Text, "which mirror it is"),
    Field::new("generation", Shape::Whole, "how often legs have come and gone"),
    Field::new("health", Shape::Text, "healthy, resynchronizing or degraded"),
    Field::new("legs_in_sync", Shape::Whole, "legs that hold everything"),
    Field::new("legs", Shape::Rows(LEG), "all of its legs"),
    Field::new("regions", Shape::Whole, "how many regions its map has"),
    Field::new("region_bytes", Shape::Whole, "how long a region is"),
    Field::new("dirty_regions", Shape::Whole, "regions in which legs may differ"),
    Field::new("left_regions", Shape::Whole, "regions that are still to be copied"),
    Field::new("copying_at_bytes", WHOLE, "how far the copying is, while it copies"),
    Field::new("copy_bytes_per_s", Shape::Whole, "how much is copied in a second at most"),
    Field::new("left_ns", WHOLE, "how long the rest takes at least, if there is any"),
    Field::new("legs_lost", Shape::Whole, "legs that failed since it was opened"),
    Field::new("legs_returned", Shape::Whole, "stale legs that answered again"),
    Field::new("legs_resynchronized", Shape::Whole, "legs that were brought in sync again"),
    Field::new("writes_lost", Shape::Whole, "losses of writes that no leg could make good"),
];

const DELAY: &[Field] = &[
    Field::new("device", Shape::Text, "its name, with what it was opened with"),
    Field::new("read_mean_ns", Shape::Whole, "the mean delay of what reads"),
    Field::new("read_p99_ns", WHOLE, "what one read in a hundred exceeds, if they differ"),
    Field::new("write_mean_ns", Shape::Whole, "the mean delay of everything else"),
    Field::new("write_p99_ns", WHOLE, "what one of those in a hundred exceeds, if they differ"),
];

const fn time(name: &'static str, help: &'static str) -> Parameter {
    Parameter { name, kind: TIME, need: Need::Optional, help }
}

pub(super) const METHODS: &[Method] = &[
    Method {
        verb: Verb::Get,
        name: "mirrors",
        parameters: &[],
        answer: Shape::Rows(MIRROR),
        help: "List the mirrors that are open: which legs hold what, and how far the copying is",
        example: "tenmil get mirrors --json",
        run: mirrors,
    },
    Method {
        verb: Verb::Get,
        name: "delays",
        parameters: &[],
        answer: Shape::Rows(DELAY),
        help: "List the `delay:` devices that are open, and how long they keep answers back",
        example: "tenmil get delays",
        run: |call| {
            Ok(delays(call)?.iter().map(|(name, handle)| delay_row(name, handle)).collect())
        },
    },
    Method {
        verb: Verb::Set,
        name: "delay",
        parameters: &[
            Parameter {
                name: "device",
                kind: NAME,
                need: Need::Optional,
                help: "which; need not be said of the only one",
            },
            time("read_mean_ns", "the mean delay of what reads"),
            time("read_p99_ns", "what one read in a hundred exceeds; 0 for none that differs"),
            time("write_mean_ns", "the mean delay of everything else"),
            time("write_p99_ns", "what one of those in a hundred exceeds; 0 for none that differs"),
        ],
        answer: Shape::Record(DELAY),
        help: "Change how long a `delay:` device keeps answers back, of what is asked from now on",
        example: "tenmil set delay read_mean_ns=80000 read_p99_ns=1000000",
        run: set_delay,
    },
];

impl Devices {
    /// These.
    pub fn new(handles: Vec<Handle>) -> Self {
        Self(Arc::new(Mutex::new(handles)))
    }

    /// Others from now on.
    pub fn replace(&self, handles: Vec<Handle>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = handles;
    }

    fn all(&self) -> Vec<Handle> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn devices(call: &Call<'_>) -> Result<Vec<Handle>, Refusal> {
    Ok(call.state.part::<Devices>("devices that can be watched")?.all())
}

fn mirrors(call: &Call<'_>) -> Result<Value, Refusal> {
    let all = devices(call)?;
    let rows = all.iter().filter_map(|handle| match handle {
        Handle::Mirror { uri, handle } => mirror_row(uri, handle),
        _ => None,
    });
    Ok(rows.collect())
}

/// None of one that has been closed.
fn mirror_row(uri: &str, handle: &MirrorHandle) -> Option<Value> {
    let Progress { uuid, generation, legs, region_bytes, regions, .. } = &handle.progress()?;
    let Progress {
        health,
        counters,
        dirty_regions,
        left_regions,
        copying_at_bytes,
        copy_bytes_per_s,
        ..
    } = handle.progress()?;
    let left = u128::from(left_regions) * u128::from(*region_bytes) * 1_000_000_000;
    let left_ns = left.checked_div(copy_bytes_per_s.into()).filter(|ns| *ns > 0);
    let leg = |leg: &LegProgress| json!({ "number": leg.number, "device": leg.name, "state": leg.state.name() });
    let in_sync = legs.iter().filter(|leg| leg.state == block::mirror::LegState::InSync).count();
    Some(json!({
        "device": uri,
        "uuid": uuid,
        "generation": generation,
        "health": health.name(),
        "legs_in_sync": in_sync,
        "legs": legs.iter().map(leg).collect::<Vec<_>>(),
        "regions": regions,
        "region_bytes": region_bytes,
        "dirty_regions": dirty_regions,
        "left_regions": left_regions,
        "copying_at_bytes": copying_at_bytes,
        "copy_bytes_per_s": copy_bytes_per_s,
        "left_ns": left_ns.map(|ns| u64::try_from(ns).unwrap_or(u64::MAX)),
        "legs_lost": counters.legs_lost,
        "legs_returned": counters.legs_returned,
        "legs_resynchronized": counters.legs_resynchronized,
        "writes_lost": counters.writes_lost,
    }))
}

fn delays(call: &Call<'_>) -> Result<Vec<(String, DelayHandle)>, Refusal> {
    let all = devices(call)?.into_iter();
    let delays = all.filter_map(|handle| match handle {
        Handle::Delay { uri, handle } => Some((uri, handle)),
        _ => None,
    });
    Ok(delays.collect())
}

fn delay_row(name: &str, handle: &DelayHandle) -> Value {
    let delays = handle.delays();
    let p99 = |spread: Spread| spread.p99.map(|p99| p99.ns);
    json!({
        "device": name,
        "read_mean_ns": delays.read.mean.ns,
        "read_p99_ns": p99(delays.read),
        "write_mean_ns": delays.write.mean.ns,
        "write_p99_ns": p99(delays.write),
    })
}

fn set_delay(call: &Call<'_>) -> Result<Value, Refusal> {
    let (all, wanted) = (delays(call)?, call.arguments.text("device"));
    let found = match (wanted, &all[..]) {
        (None, [only]) => Some(only),
        (None, _) => None,
        (Some(name), _) => all.iter().find(|(device, _)| device == name),
    };
    let Some((name, handle)) = found else {
        let names: Vec<&str> = all.iter().map(|(name, _)| name.as_str()).collect();
        let found =
            wanted.map_or_else(|| "no name".to_owned(), |name| format!("no {}", quoted(name)));
        let expected =
            if names.is_empty() { "a `delay:` device".to_owned() } else { either(&names) };
        let message = format!("set delay: {found}, expected {expected}");
        return Err(Refusal::caller(Code::Absent, message));
    };
    let mut delays = handle.delays();
    let whole = |name| call.arguments.whole(name).map(|ns| Span { ns });
    let some = |span: Span| Some(span).filter(|span| span.ns > 0);
    for (spread, mean, p99) in [
        (&mut delays.read, "read_mean_ns", "read_p99_ns"),
        (&mut delays.write, "write_mean_ns", "write_p99_ns"),
    ] {
        spread.mean = whole(mean).unwrap_or(spread.mean);
        spread.p99 = whole(p99).map_or(spread.p99, some);
    }
    let refuse = |why| Refusal::caller(Code::NotDone, format!("set delay: {why}"));
    handle.set(delays).map_err(refuse)?;
    Ok(delay_row(name, handle))
}

#[cfg(test)]
mod tests {
    use block::Opener;
    use dma::Regions;
    use host::Clock;
    use serde_json::{Value, json};

    use super::Devices;
    use crate::methods::TABLE;
    use crate::refusal::{Code, Refusal};
    use crate::{Arguments, Call, Later, State};

    fn open(uris: &[&str]) -> (State, Vec<block::Opened>) {
        let regions = Regions::new(64);
        let opener = Opener { regions: &regions, clock: Clock::start(), seed: 1, more: &[] };
        let opened = uris.iter().map(|uri| opener.open(&uri.parse().unwrap()).unwrap());
        let opened: Vec<_> = opened.collect();
        let handles = opened.iter().flat_map(|one| one.handles.clone()).collect();
        (State::new().with(Devices::new(handles)), opened)
    }

    fn ask(state: &State, method: &str, parameters: &Value) -> Result<Value, Refusal> {
        let method = TABLE.find(method).unwrap();
        let arguments = Arguments::check(method, parameters.as_object().unwrap())?;
        let answer = (method.run)(&Call {
            table: &TABLE,
            state,
            arguments: &arguments,
            later: &Later::default(),
            passed: &crate::Passed::default(),
        })?;
        assert_eq!(method.answer.check(&answer), Ok(()));
        Ok(answer)
    }

    #[test]
    fn a_delay_changes_number_by_number_and_keeps_what_it_was_when_that_is_refused() {
        let (state, opened) = open(&["delay:[null:]?read=80us&read-p99=1ms"]);
        let row = &ask(&state, "delays", &json!({})).unwrap()[0];
        assert_eq!(
            (&row["read_mean_ns"], &row["read_p99_ns"]),
            (&json!(80_000), &json!(1_000_000))
        );
        assert_eq!((&row["write_mean_ns"], &row["write_p99_ns"]), (&json!(0), &Value::Null));
        let row =
            ask(&state, "set_delay", &json!({ "read_p99_ns": 0, "write_mean_ns": 7 })).unwrap();
        assert_eq!((&row["read_mean_ns"], &row["read_p99_ns"]), (&json!(80_000), &Value::Null));
        assert_eq!(row["write_mean_ns"], json!(7));
        let block::Handle::Delay { handle, .. } = &opened[0].handles[0] else { panic!() };
        assert_eq!(handle.delays().write.mean.ns, 7, "the device goes by it");
        let refusal = ask(&state, "set_delay", &json!({ "read_p99_ns": 1 })).unwrap_err();
        assert_eq!(refusal.code, Code::NotDone);
        assert_eq!(ask(&state, "delays", &json!({})).unwrap()[0], row);
    }

    #[test]
    fn of_several_delays_one_is_named() {
        let (state, _opened) = open(&["delay:[null:]?read=1us", "delay:[null:]?read=2us"]);
        let refused = |change| ask(&state, "set_delay", &change).unwrap_err().message;
        let expected = "delay:[null:]?read=1us or delay:[null:]?read=2us";
        assert_eq!(refused(json!({})), format!("set delay: no name, expected {expected}"));
        let message = refused(json!({ "device": "null:" }));
        assert_eq!(message, format!("set delay: no `null:`, expected {expected}"));
        let second = json!({ "device": "delay:[null:]?read=2us", "read_mean_ns": 9 });
        assert_eq!(ask(&state, "set_delay", &second).unwrap()["read_mean_ns"], json!(9));
        let first = &ask(&state, "delays", &json!({})).unwrap()[0];
        assert_eq!(first["read_mean_ns"], json!(1_000));
        let (none, _) = open(&["null:"]);
        let refusal = ask(&none, "set_delay", &json!({})).unwrap_err();
        assert_eq!(refusal.message, "set delay: no name, expected a `delay:` device");
        assert_eq!(ask(&none, "mirrors", &json!({})).unwrap(), json!([]));
    }

    #[test]
    fn a_mirror_tells_its_legs_and_is_not_kept_open_by_that() {
        let directory = tempfile::tempdir().unwrap();
        let leg = |name| format!("file:{}?size=4m", directory.path().join(name).display());
        let uri = format!("mirror:[{}],[{}]", leg("a"), leg("b"));
        let regions = Regions::new(64);
        let opener = Opener { regions: &regions, clock: Clock::start(), seed: 1, more: &[] };
        let legs = [leg("a"), leg("b")].map(|uri| uri.parse().unwrap());
        block::mirror::create(&opener, &legs, false).unwrap();
        let (state, opened) = open(&[&uri]);
        let row = &ask(&state, "mirrors", &json!({})).unwrap()[0];
        assert_eq!((&row["device"], &row["legs_in_sync"]), (&json!(uri), &json!(2)));
        assert_eq!((&row["health"], &row["legs_lost"]), (&json!("healthy"), &json!(0)));
        assert_eq!(row["legs"][1]["state"], json!("in sync"));
        assert!(row["legs"][1]["device"].as_str().unwrap().contains("/b?size=4m"), "{row}");
        assert_eq!((&row["left_regions"], &row["left_ns"]), (&json!(0), &Value::Null));
        assert_eq!(row["regions"], json!(3 << 20 >> 16));
        drop(opened);
        assert_eq!(ask(&state, "mirrors", &json!({})).unwrap(), json!([]));
    }
}
