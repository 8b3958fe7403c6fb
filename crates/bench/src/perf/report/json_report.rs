//! JSON report.
//!
//! The top-level names are a stable interface: names may be added, but not changed or removed.

use serde::Serialize;
use serde_json::{Map, Value, json};
use tenmil_base::Histogram;

use super::{PERCENTILES, error_rows, result_notes};
use crate::perf::perf_options::{BlockLayerMode, PerfOptions, queue_map_text};
use crate::perf::perf_result::{
    BaselineResult, DeviceResult, NullBlkPoint, NullBlkResult, NullBlkRow, PerfResult, RamResult,
    RunEndReason, VerifyResult,
};

/// Top-level object.
#[derive(Debug, Serialize)]
struct JsonReport {
    iops: f64,
    ns_per_io: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    tsc_per_io: Option<f64>,
    bytes_per_s: f64,
    data_moved: bool,
    ios: u64,
    bytes: u64,
    errors: u64,
    elapsed_s: f64,
    ended: &'static str,
    latency_ns: LatencyJson,
    latency_ns_by_operation: Map<String, Value>,
    time_stamp_error_ns: u64,
    completions_per_poll: f64,
    doorbells_per_io: f64,
    doorbell_registers_per_io: f64,
    cmb_commands_per_io: f64,
    polls: u64,
    idle_polls: u64,
    poll: &'static str,
    sleeps: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    baseline_iops: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    baseline_ratio: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    baseline_is_disturbed: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    baseline_round_trip_ns: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ram: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    null_blk: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    open_loop: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    verified: Option<Value>,
    errors_by_status: Map<String, Value>,
    notes: Vec<String>,
    series: Value,
    devices: Vec<Value>,
    options: Value,
    driver_options: Map<String, Value>,
    environment: Value,
    version: &'static str,
}

/// Latency distribution in nanoseconds.
#[derive(Debug, Serialize)]
struct LatencyJson {
    mean: f64,
    p50: u64,
    p99: u64,
    p999: u64,
    p9999: u64,
    max: u64,
}

/// Renders the report as one JSON object with a trailing newline.
pub fn render_json(result: &PerfResult) -> String {
    let text = serde_json::to_string_pretty(&json_report(result));
    text.expect("every key is a string and every number finite") + "\n"
}

fn json_report(result: &PerfResult) -> JsonReport {
    let by_operation = result.latency_by_operation.iter();
    JsonReport {
        iops: result.iops(),
        ns_per_io: result.thread_ns_per_io(),
        tsc_per_io: result.tsc_per_io(),
        bytes_per_s: result.bytes_per_second(),
        data_moved: result.transfers_data(),
        ios: result.totals.ios,
        bytes: result.totals.bytes,
        errors: result.totals.errors,
        elapsed_s: result.elapsed.as_secs_f64(),
        ended: match result.ended {
            RunEndReason::Time => "time",
            RunEndReason::Count => "count",
            RunEndReason::Interrupt => "interrupt",
        },
        latency_ns: LatencyJson::from_histogram(&result.latency),
        latency_ns_by_operation: by_operation
            .map(|(operation, latency)| {
                (operation.name().into(), json!(LatencyJson::from_histogram(latency)))
            })
            .collect(),
        time_stamp_error_ns: result.time_stamp_error.ns,
        completions_per_poll: result.counters.completions_per_nonempty_poll(),
        doorbells_per_io: result.counters.doorbells_per_io(),
        doorbell_registers_per_io: result.counters.doorbell_registers_per_io(),
        cmb_commands_per_io: result.counters.cmb_commands_per_io(),
        polls: result.counters.polls,
        idle_polls: result.counters.idle_polls,
        poll: result.options.poll.name(),
        sleeps: result.sleeps,
        baseline_iops: result.baseline.map(|baseline| baseline.iops),
        baseline_ratio: result.baseline_ratio(),
        baseline_is_disturbed: result.baseline.map(|_| result.is_above_baseline()),
        baseline_round_trip_ns: result.baseline.and_then(round_trip_ns),
        ram: result.ram.as_ref().map(ram_json),
        null_blk: result.null_blk.as_ref().map(null_blk_json),
        open_loop: result.open_loop.map(|open| {
            json!({
                "intended_per_s": open.intended_per_second,
                "delayed": open.delayed,
                "backlog": open.backlog,
            })
        }),
        verified: result.verified.as_ref().map(verify_json),
        errors_by_status: error_rows(result)
            .into_iter()
            .map(|(status, count)| (status, count.into()))
            .collect(),
        notes: result_notes(result),
        series: json!({
            "interval_ns": result.series.interval.ns,
            "ios": result.series.ios,
            "bytes": result.series.bytes,
        }),
        devices: result.devices.iter().map(device_json).collect(),
        options: options_json(&result.options),
        driver_options: result
            .techniques
            .iter()
            .map(|technique| (technique.name.into(), technique.setting.clone().into()))
            .collect(),
        environment: environment_json(result),
        version: env!("CARGO_PKG_VERSION"),
    }
}

impl LatencyJson {
    fn from_histogram(latency: &Histogram) -> Self {
        let at = |index: usize| latency.percentile(PERCENTILES[index].1);
        let (mean, max) = (latency.mean(), latency.max());
        Self { mean, p50: at(0), p99: at(1), p999: at(2), p9999: at(3), max }
    }
}

fn round_trip_ns(baseline: BaselineResult) -> Option<u64> {
    baseline.round_trip.map(|span| span.ns)
}

fn ram_json(ram: &RamResult) -> Value {
    json!({
        "uri": ram.uri,
        "iops": ram.iops(),
        "bytes_per_s": ram.bytes_per_second(),
        "errors": ram.counts.errors,
        "elapsed_s": ram.elapsed.as_secs_f64(),
        "latency_ns": LatencyJson::from_histogram(&ram.latency),
    })
}

fn null_blk_json(compared: &NullBlkResult) -> Value {
    let point = |point: &NullBlkPoint| {
        json!({
            "threads": point.threads,
            "iops": point.iops,
            "lock_wait_share": point.lock_wait_share,
        })
    };
    let row = |row: &NullBlkRow| {
        let points: Vec<Value> = row.points.iter().map(point).collect();
        json!({ "mode": row.mode, "contexts": row.contexts, "points": points })
    };
    json!({
        "depth": compared.depth,
        "time_s": compared.time.as_secs_f64(),
        "rows": compared.rows.iter().map(row).collect::<Vec<Value>>(),
    })
}

fn verify_json(verified: &VerifyResult) -> Value {
    json!({
        "good_blocks": verified.good_blocks,
        "unwritten_blocks": verified.unwritten_blocks,
        "stale_blocks": verified.stale_blocks,
        "torn_blocks": verified.torn_blocks,
        "misplaced_blocks": verified.misplaced_blocks,
        "foreign_blocks": verified.foreign_blocks,
        "first_bad": verified.first_bad,
    })
}

fn device_json(device: &DeviceResult) -> Value {
    json!({
        "name": device.name,
        "model": device.model,
        "durability": device.durability.describe(),
        "size_bytes": device.size_bytes,
        "block_size": device.block_size,
        "ios": device.counts.ios,
        "bytes": device.counts.bytes,
        "errors": device.counts.errors,
        "latency_ns": LatencyJson::from_histogram(&device.latency),
    })
}

fn options_json(options: &PerfOptions) -> Value {
    let uris: Vec<String> = options.uris.iter().map(ToString::to_string).collect();
    json!({
        "uris": uris,
        "depth": options.depth,
        "sizes": options.sizes.to_string(),
        "pattern": options.pattern.name(),
        "read_percent": options.read_percent,
        "time_s": options.time.as_secs_f64(),
        "warm_up_s": options.warm_up.as_secs_f64(),
        "cores": options.cores.to_string(),
        "device_cores": options.device_cores.to_string(),
        "queue_pairs": options.queue_pairs,
        "block": options.layer.layer.map(BlockLayerMode::name),
        "queue_map": options.layer.map.as_ref().map(queue_map_text),
        "block_scheduler": options.layer.scheduler.to_string(),
        "limit_iops": options.layer.limit_iops,
        "limit_bytes": options.layer.limit_bytes,
        "io_count": options.io_count,
        "rate": options.rate.map(|rate| rate.per_second),
        "zipf": options.zipf,
        "verify": options.verify,
        "seed": options.seed,
    })
}

fn environment_json(result: &PerfResult) -> Value {
    let environment = &result.environment;
    let machine = &environment.machine;
    json!({
        "processor": machine.cpu_model,
        "architecture": std::env::consts::ARCH,
        "kernel": machine.kernel,
        "cores": machine.allowed.to_string(),
        "cpu_quota": machine.quota,
        "hypervisor": machine.hypervisor,
        "governor": machine.governor,
        "steal": environment.steal,
        "tsc_hz": environment.tsc_hz,
        "memory": environment.memory_backing,
        "transparent_huge_pages": machine.transparent_huge_pages,
        "huge_pages_free": machine.huge_pages_free,
        "lockable_bytes": machine.lockable_bytes,
        "poll": environment.poll.name(),
        "scheduler": environment.scheduler.to_string(),
        "frequency_scaling": environment.frequency_scaling,
        "optimized": environment.optimized,
        "threads": result.threads.iter().map(|place| {
            json!({ "role": place.role, "core": place.core })
        }).collect::<Vec<_>>(),
        "warnings": result.warnings(),
        "recommendations": environment.recommendations(),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::{PerfResult, render_json};
    use crate::perf::report::sample_result::{failed_sample_result, sample_result};

    fn parse_report(text: &str) -> Value {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn published_names_exist_with_their_meaning() {
        let report = parse_report(&render_json(&sample_result()));
        let near = |name: &str, expected: f64| {
            let found = report[name].as_f64().unwrap_or_else(|| panic!("{name} is no number"));
            assert!((found / expected - 1.0).abs() < 1e-3, "{name} is {found}");
        };
        near("iops", 31.4e6);
        near("ns_per_io", 31.847);
        near("bytes_per_s", 31.4e6 * 4096.0);
        near("completions_per_poll", 314.0 / 26.0);
        near("doorbells_per_io", 26.0 / 314.0);
        near("doorbell_registers_per_io", 2.0 / 314.0);
        near("cmb_commands_per_io", 157.0 / 314.0);
        near("baseline_iops", 74.8e6);
        near("baseline_ratio", 31.4 / 74.8);
        assert_eq!(report["errors"], 0);
        let latency = &report["latency_ns"];
        let at = |name: &str| latency[name].as_f64().unwrap();
        let rising = ["p50", "p99", "p999", "p9999", "max"].map(at);
        assert!(rising.is_sorted() && rising[0] > 0.0, "{rising:?}");
        assert!((50_000.0..200_000.0).contains(&at("mean")));
        let environment = &report["environment"];
        assert_eq!((&environment["poll"], &report["poll"]), (&"hybrid".into(), &"adaptive".into()));
        assert_eq!(environment["scheduler"], "dynamic");
        assert_eq!(environment["frequency_scaling"], "unchanged");
    }

    #[test]
    fn baseline_names_are_absent_without_a_baseline() {
        let mut result = sample_result();
        result.baseline = None;
        let report = parse_report(&render_json(&result));
        assert_eq!((report.get("baseline_iops"), report.get("baseline_ratio")), (None, None));
    }

    #[test]
    fn a_ratio_above_an_upper_bound_is_reported_as_a_disturbed_run() {
        use crate::perf::perf_result::Baseline;
        use crate::perf::report::{baseline_line, html_report};

        let mut result = sample_result();
        let baseline_iops = |iops: f64, limit, result: &mut PerfResult| {
            let baseline = result.baseline.as_mut().unwrap();
            (baseline.iops, baseline.limit) = (iops, limit);
        };
        for (iops, limit, expected) in [
            (10e6, Baseline::Ring, true),
            (10e6, Baseline::Messages("epoll"), true),
            (10e6, Baseline::Copies, false),
            (40e6, Baseline::Ring, false),
        ] {
            baseline_iops(iops, limit, &mut result);
            assert_eq!(
                parse_report(&render_json(&result))["baseline_is_disturbed"],
                expected,
                "{limit:?}"
            );
            let line = baseline_line(&result).unwrap();
            assert_eq!(line.contains("a disturbed run"), expected, "{line}");
            assert_eq!(
                html_report::render_page(&result, "perf").contains("a disturbed run"),
                expected,
                "{limit:?}"
            );
        }
    }

    #[test]
    fn errors_and_bad_blocks_are_counted_by_kind() {
        let report = parse_report(&render_json(&failed_sample_result()));
        assert_eq!(report["errors"], 12);
        assert_eq!(report["errors_by_status"]["Unrecovered Read Error (SCT 0x2, SC 0x81)"], 11);
        assert_eq!(report["verified"]["torn_blocks"], 2);
        assert_eq!(report["ended"], "interrupt");
    }

    #[test]
    fn null_blk_modes_are_listed_by_thread_count() {
        let report = parse_report(&render_json(&sample_result()));
        let rows = report["null_blk"]["rows"].as_array().unwrap();
        assert_eq!((&rows[0]["mode"], &rows[0]["contexts"]), (&"single".into(), &Value::Null));
        assert_eq!(rows[1]["contexts"], 2);
        assert_eq!(rows[0]["points"][1]["threads"], 2);
        assert_eq!(rows[0]["points"][1]["lock_wait_share"], 0.61);
        assert_eq!(rows[1]["points"][1]["iops"], 58e6);
    }

    #[test]
    fn empty_run_is_a_valid_report() {
        let mut result = sample_result();
        result.totals = crate::perf::perf_result::IoCounts::default();
        result.elapsed = tenmil_base::Span { ns: 0 };
        let report = parse_report(&render_json(&result));
        assert_eq!(report["iops"], 0.0);
        assert_eq!(report["ns_per_io"], 0.0);
    }
}
