//! Metrics of a process for Prometheus and compatible collectors.
//!
//! ```text
//!   GET /metrics ──► render ──► collectors: io, limits, connections, reactors, storage, process
//!                                    │ set(family, labels, value)
//!                                    ▼
//!                               MetricsText ──► text format 0.0.4, or OpenMetrics 1.0
//! ```
//!
//! [`families`] is the table of all metrics: name, type, unit and description. Their names are stable.
//!
//! Collectors read counters that their threads write without locks, and copies of management state. What
//! needs a lock that an I/O may need, which is the space usage of pools and the state of mirrors, is read
//! on a worker thread ([`storage`]).
//!
//! The number of series is bounded by what an operator configures. Of what peers choose, only the host NQN
//! is a label, for at most [`HOSTS_MAX`](host_names::HOSTS_MAX) hosts; the others are added up. Addresses,
//! connection identifiers and error texts are no labels.

mod connections;
mod families;
mod host_names;
mod io;
mod limits;
mod metrics_text;
mod process;
mod reactors;
mod storage;
#[cfg(test)]
mod tests;

use crate::process_parts::ProcessParts;

use self::host_names::HostNames;
use self::io::IoRows;
use self::metrics_text::MetricsText;

pub(crate) use self::storage::StorageSampler;

/// Content type of the Prometheus text format.
pub const TEXT_CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";
/// Content type of OpenMetrics.
pub const OPEN_METRICS_CONTENT_TYPE: &str =
    "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Whether a client with this `Accept` header receives OpenMetrics: it names the type with a weight that is
/// not less than that of the text format.
#[must_use]
pub fn prefers_open_metrics(accept: &str) -> bool {
    let weight_of = |wanted: &[&str]| {
        let ranges = accept.split(',').filter_map(|range| {
            let mut parts = range.split(';').map(str::trim);
            let media_type = parts.next()?.to_ascii_lowercase();
            wanted.contains(&&*media_type).then_some(())?;
            let weight = parts.find_map(|part| part.strip_prefix("q=")).unwrap_or("1");
            weight.parse::<f64>().ok().filter(|weight| *weight > 0.0)
        });
        ranges
            .fold(None, |most: Option<f64>, weight| Some(most.map_or(weight, |it| it.max(weight))))
    };
    let Some(open_metrics) = weight_of(&["application/openmetrics-text"]) else { return false };
    weight_of(&["text/plain", "text/*"]).is_none_or(|text| open_metrics >= text)
}

/// All metrics of the process with these parts, in OpenMetrics or in the text format.
///
/// It may wait up to [`storage::WAIT_MAX`] for the worker thread, so it is for the control thread.
#[must_use]
pub fn render(parts: &ProcessParts, open_metrics: bool) -> String {
    let text = collect(parts);
    if open_metrics { text.open_metrics() } else { text.prometheus() }
}

/// All metrics as a request of OTLP, from this resource and scope, at `now_ns` since 1970.
#[cfg(feature = "otlp")]
pub(crate) fn otlp_metrics(
    parts: &ProcessParts,
    resource: &serde_json::Value,
    scope: &serde_json::Value,
    now_ns: u64,
) -> serde_json::Value {
    let text = collect(parts);
    let start_ns = text.number_of(families::START_TIME.name).unwrap_or(now_ns);
    serde_json::json!({ "resourceMetrics": [{
        "resource": resource,
        "scopeMetrics": [{ "scope": scope, "metrics": text.to_otlp(start_ns, now_ns) }],
    }] })
}

fn collect(parts: &ProcessParts) -> MetricsText {
    let mut text = MetricsText::default();
    let io = IoRows::collect(parts);
    let connections = connections::nvme_connections(parts);
    let limited = limits::hosts(parts);
    let hosts = io.hosts().chain(connections::hosts(&connections));
    let hosts = HostNames::new(hosts.chain(limited.iter().map(String::as_str)));
    process::collect(parts, &mut text);
    io.write(&hosts, &mut text);
    limits::collect(parts, &hosts, &mut text);
    connections::collect(parts, &connections, &hosts, &mut text);
    reactors::collect(parts, &mut text);
    storage::collect(parts, &mut text);
    text
}
