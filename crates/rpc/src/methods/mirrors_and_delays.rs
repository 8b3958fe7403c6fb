//! Mirrors and delays among the open devices, which can be queried and changed.

use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Value, json};
use tenmil_base::Span;
use tenmil_block::DeviceControl;
use tenmil_block::uri::Uri;
use tenmil_drivers::mirror::{LegProgress, MirrorMonitor, MirrorProgress};
use tenmil_drivers::{DelayControl, LatencySpec};

use crate::error::{ErrorCode, RpcError, join_alternatives, quote_untrusted};
use crate::method::{CallContext, Method, MethodKind, ParamDefault, Parameter};
use crate::param_type::ParamType;
use crate::result_type::{FieldSchema, ResultType};

/// Handles to the devices of a process. Clones share the state.
#[derive(Clone, Debug, Default)]
pub struct DeviceControls(Arc<Mutex<Vec<DeviceControl>>>);

const WHOLE: ResultType = ResultType::Maybe(&ResultType::Whole);
const NAME: ParamType = ParamType::Text { len_max: 4096 };
/// One hour.
const TIME: ParamType = ParamType::Whole { min: 0, max: 3_600_000_000_000 };

const LEG: &[FieldSchema] = &[
    FieldSchema::new("number", ResultType::Whole, "identifier"),
    FieldSchema::new(
        "device",
        ResultType::Maybe(&ResultType::Text),
        "URI of the device; null if it was missing when the mirror was opened",
    ),
    FieldSchema::new(
        "state",
        ResultType::Text,
        "state of the leg: in sync, copied to, stale or missing",
    ),
];

const MIRROR: &[FieldSchema] = &[
    FieldSchema::new("device", ResultType::Text, "name"),
    FieldSchema::new("uuid", ResultType::Text, "UUID of the mirror"),
    FieldSchema::new(
        "generation",
        ResultType::Whole,
        "number of superblock updates caused by changes of the legs",
    ),
    FieldSchema::new("health", ResultType::Text, "health: healthy, resynchronizing or degraded"),
    FieldSchema::new("legs_in_sync", ResultType::Whole, "number of legs in sync"),
    FieldSchema::new("legs", ResultType::Rows(LEG), "legs of the mirror"),
    FieldSchema::new("regions", ResultType::Whole, "number of regions in the dirty map"),
    FieldSchema::new("region_bytes", ResultType::Whole, "size of a region"),
    FieldSchema::new(
        "dirty_regions",
        ResultType::Whole,
        "number of regions in which the legs may differ",
    ),
    FieldSchema::new("left_regions", ResultType::Whole, "number of regions still to be copied"),
    FieldSchema::new(
        "copying_at_bytes",
        WHOLE,
        "current offset of the resynchronization; null if none is running",
    ),
    FieldSchema::new(
        "copy_bytes_per_s",
        ResultType::Whole,
        "rate limit of the resynchronization, in bytes per second",
    ),
    FieldSchema::new(
        "left_ns",
        WHOLE,
        "minimum remaining time of the resynchronization; null if nothing remains",
    ),
    FieldSchema::new(
        "legs_lost",
        ResultType::Whole,
        "number of legs that failed since the mirror was opened",
    ),
    FieldSchema::new(
        "legs_returned",
        ResultType::Whole,
        "number of stale legs that became reachable again",
    ),
    FieldSchema::new(
        "legs_resynchronized",
        ResultType::Whole,
        "number of legs that were resynchronized",
    ),
    FieldSchema::new(
        "writes_lost",
        ResultType::Whole,
        "number of times that completed but unflushed writes were lost on all legs",
    ),
];

const DELAY: &[FieldSchema] = &[
    FieldSchema::new("device", ResultType::Text, "URI of the device"),
    FieldSchema::new("read_mean_ns", ResultType::Whole, "mean delay of reads"),
    FieldSchema::new(
        "read_p99_ns",
        WHOLE,
        "99th percentile of the read delay; null if the delay is constant",
    ),
    FieldSchema::new("write_mean_ns", ResultType::Whole, "mean delay of all other requests"),
    FieldSchema::new(
        "write_p99_ns",
        WHOLE,
        "99th percentile of the delay of other requests; null if the delay is constant",
    ),
];

const fn time_parameter(name: &'static str, help: &'static str) -> Parameter {
    Parameter { name, kind: TIME, need: ParamDefault::Optional, help }
}

pub(super) const METHODS: &[Method] = &[
    Method {
        verb: MethodKind::Get,
        name: "mirrors",
        parameters: &[],
        answer: ResultType::Rows(MIRROR),
        help: "List the open mirrors with the state of their legs and the progress of resynchronization",
        example: "tenmil get mirrors --json",
        run: mirrors_method,
    },
    Method {
        verb: MethodKind::Get,
        name: "delays",
        parameters: &[],
        answer: ResultType::Rows(DELAY),
        help: "List the open `delay:` devices and their delays",
        example: "tenmil get delays",
        run: |call| {
            Ok(delay_controls_of(call)?
                .iter()
                .map(|(name, handle)| delay_row(name, handle))
                .collect())
        },
    },
    Method {
        verb: MethodKind::Set,
        name: "delay",
        parameters: &[
            Parameter {
                name: "device",
                kind: NAME,
                need: ParamDefault::Optional,
                help: "the device to change; optional if there is only one",
            },
            time_parameter("read_mean_ns", "mean delay of reads"),
            time_parameter(
                "read_p99_ns",
                "99th percentile of the read delay; 0 for a constant delay",
            ),
            time_parameter("write_mean_ns", "mean delay of all other requests"),
            time_parameter(
                "write_p99_ns",
                "99th percentile of the delay of other requests; 0 for a constant delay",
            ),
        ],
        answer: ResultType::Record(DELAY),
        help: "Change the delays of a `delay:` device for requests submitted from now on",
        example: "tenmil set delay read_mean_ns=80000 read_p99_ns=1000000",
        run: set_delay_method,
    },
];

impl DeviceControls {
    /// Creates a set of these handles.
    pub fn new(handles: Vec<DeviceControl>) -> Self {
        Self(Arc::new(Mutex::new(handles)))
    }

    /// Replaces the handles.
    pub fn replace_controls(&self, handles: Vec<DeviceControl>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = handles;
    }

    pub(crate) fn all_controls(&self) -> Vec<DeviceControl> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn device_controls_of(call: &CallContext<'_>) -> Result<Vec<DeviceControl>, RpcError> {
    Ok(call.state.find_part::<DeviceControls>("devices that can be watched")?.all_controls())
}

fn mirrors_method(call: &CallContext<'_>) -> Result<Value, RpcError> {
    let all = device_controls_of(call)?;
    let rows = all.iter().filter_map(|control| mirror_row(control.uri(), control.downcast()?));
    Ok(rows.collect())
}

/// Row of a mirror; `None` if it has been closed.
fn mirror_row(uri: &str, handle: &MirrorMonitor) -> Option<Value> {
    let MirrorProgress { uuid, generation, legs, region_bytes, regions, .. } =
        &handle.progress()?;
    let MirrorProgress {
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
    let in_sync =
        legs.iter().filter(|leg| leg.state == tenmil_drivers::mirror::LegState::InSync).count();
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

fn delay_controls_of(call: &CallContext<'_>) -> Result<Vec<(String, DelayControl)>, RpcError> {
    let all = device_controls_of(call)?.into_iter();
    let delays = all.filter_map(|control| {
        control.downcast::<DelayControl>().map(|delay| (control.uri().to_owned(), delay.clone()))
    });
    Ok(delays.collect())
}

/// Whether `wanted` names the device with this URI, in any of its forms.
pub(crate) fn is_uri_of_device(uri: &str, wanted: &str) -> bool {
    uri == wanted || wanted.parse::<Uri>().is_ok_and(|wanted| wanted.to_string() == uri)
}

fn delay_row(name: &str, handle: &DelayControl) -> Value {
    let delays = handle.delays();
    let p99 = |spread: LatencySpec| spread.p99.map(|p99| p99.ns);
    json!({
        "device": name,
        "read_mean_ns": delays.read.mean.ns,
        "read_p99_ns": p99(delays.read),
        "write_mean_ns": delays.write.mean.ns,
        "write_p99_ns": p99(delays.write),
    })
}

fn set_delay_method(call: &CallContext<'_>) -> Result<Value, RpcError> {
    let (all, wanted) = (delay_controls_of(call)?, call.arguments.text("device"));
    let found = match (wanted, &all[..]) {
        (None, [only]) => Some(only),
        (None, _) => None,
        (Some(name), _) => all.iter().find(|(device, _)| is_uri_of_device(device, name)),
    };
    let Some((name, handle)) = found else {
        let names: Vec<&str> = all.iter().map(|(name, _)| name.as_str()).collect();
        let found = wanted
            .map_or_else(|| "no name".to_owned(), |name| format!("no {}", quote_untrusted(name)));
        let expected = if names.is_empty() {
            "a `delay:` device".to_owned()
        } else {
            join_alternatives(&names)
        };
        let message = format!("set delay: {found}, expected {expected}");
        return Err(RpcError::usage(ErrorCode::NotFound, message));
    };
    let mut delays = handle.delays();
    let whole = |name| call.arguments.integer(name).map(|ns| Span { ns });
    let some = |span: Span| Some(span).filter(|span| span.ns > 0);
    for (spread, mean, p99) in [
        (&mut delays.read, "read_mean_ns", "read_p99_ns"),
        (&mut delays.write, "write_mean_ns", "write_p99_ns"),
    ] {
        spread.mean = whole(mean).unwrap_or(spread.mean);
        spread.p99 = whole(p99).map_or(spread.p99, some);
    }
    let refuse = |why| RpcError::usage(ErrorCode::Failed, format!("set delay: {why}"));
    handle.set_delays(delays).map_err(refuse)?;
    Ok(delay_row(name, handle))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tenmil_block::Opener;
    use tenmil_dma::RegionTable;
    use tenmil_linux::Clock;

    use super::DeviceControls;
    use crate::ProcessParts;
    use crate::error::ErrorCode;
    use crate::methods::test_calls::call_method;

    fn open_test_device(uris: &[&str]) -> (ProcessParts, Vec<tenmil_block::OpenedDevice>) {
        let regions = RegionTable::new(64);
        let opener = Opener {
            regions: &regions,
            clock: Clock::start(),
            seed: 1,
            kinds: tenmil_drivers::KINDS,
        };
        let opened = uris.iter().map(|uri| opener.open(&uri.parse().unwrap()).unwrap());
        let opened: Vec<_> = opened.collect();
        let handles = opened.iter().flat_map(|one| one.handles.clone()).collect();
        (ProcessParts::new().with_part(DeviceControls::new(handles)), opened)
    }

    #[test]
    fn rejected_delay_change_keeps_the_former_values() {
        let (state, opened) = open_test_device(&["delay:[null:]?read=80us&read-p99=1ms"]);
        let row = &call_method(&state, "delays", &json!({})).unwrap()[0];
        assert_eq!(
            (&row["read_mean_ns"], &row["read_p99_ns"]),
            (&json!(80_000), &json!(1_000_000))
        );
        assert_eq!((&row["write_mean_ns"], &row["write_p99_ns"]), (&json!(0), &Value::Null));
        let row =
            call_method(&state, "set_delay", &json!({ "read_p99_ns": 0, "write_mean_ns": 7 }))
                .unwrap();
        assert_eq!((&row["read_mean_ns"], &row["read_p99_ns"]), (&json!(80_000), &Value::Null));
        assert_eq!(row["write_mean_ns"], json!(7));
        let handle = opened[0].handles[0].downcast::<tenmil_drivers::DelayControl>().unwrap();
        assert_eq!(handle.delays().write.mean.ns, 7, "the device goes by it");
        let refusal = call_method(&state, "set_delay", &json!({ "read_p99_ns": 1 })).unwrap_err();
        assert_eq!(refusal.code, ErrorCode::Failed);
        assert_eq!(call_method(&state, "delays", &json!({})).unwrap()[0], row);
    }

    #[test]
    fn one_of_several_delays_is_selected_by_name() {
        let (state, _opened) =
            open_test_device(&["delay:[null:]?read=1us", "delay:[null:]?read=2us"]);
        let refused = |change| call_method(&state, "set_delay", &change).unwrap_err().message;
        let expected = "delay:[null:]?read=1us or delay:[null:]?read=2us";
        assert_eq!(refused(json!({})), format!("set delay: no name, expected {expected}"));
        let message = refused(json!({ "device": "null:" }));
        assert_eq!(message, format!("set delay: no `null:`, expected {expected}"));
        let second = json!({ "device": "delay:[null:]?read=2us", "read_mean_ns": 9 });
        assert_eq!(call_method(&state, "set_delay", &second).unwrap()["read_mean_ns"], json!(9));
        let first = &call_method(&state, "delays", &json!({})).unwrap()[0];
        assert_eq!(first["read_mean_ns"], json!(1_000));
        let (none, _) = open_test_device(&["null:"]);
        let refusal = call_method(&none, "set_delay", &json!({})).unwrap_err();
        assert_eq!(refusal.message, "set delay: no name, expected a `delay:` device");
        assert_eq!(call_method(&none, "mirrors", &json!({})).unwrap(), json!([]));
    }

    #[test]
    fn mirror_row_lists_its_legs_without_keeping_the_mirror_open() {
        let directory = tempfile::tempdir().unwrap();
        let leg = |name| format!("file:{}?size=4m", directory.path().join(name).display());
        let uri = format!("mirror:[{}],[{}]", leg("a"), leg("b"));
        let regions = RegionTable::new(64);
        let opener = Opener {
            regions: &regions,
            clock: Clock::start(),
            seed: 1,
            kinds: tenmil_drivers::KINDS,
        };
        let legs = [leg("a"), leg("b")].map(|uri| uri.parse().unwrap());
        tenmil_drivers::mirror::create_mirror(&opener, &legs, false).unwrap();
        let (state, opened) = open_test_device(&[&uri]);
        let row = &call_method(&state, "mirrors", &json!({})).unwrap()[0];
        assert_eq!((&row["device"], &row["legs_in_sync"]), (&json!(uri), &json!(2)));
        assert_eq!((&row["health"], &row["legs_lost"]), (&json!("healthy"), &json!(0)));
        assert_eq!(row["legs"][1]["state"], json!("in sync"));
        assert!(row["legs"][1]["device"].as_str().unwrap().contains("/b?size=4m"), "{row}");
        assert_eq!((&row["left_regions"], &row["left_ns"]), (&json!(0), &Value::Null));
        assert_eq!(row["regions"], json!(3 << 20 >> 16));
        drop(opened);
        assert_eq!(call_method(&state, "mirrors", &json!({})).unwrap(), json!([]));
    }
}
