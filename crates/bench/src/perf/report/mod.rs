//! Reports of a run: text, JSON and HTML.

pub mod html_report;
pub mod json_report;
pub mod number_format;
mod page_style;
pub mod plot;
#[doc(hidden)]
pub mod sample_result;
pub mod text_report;

use tenmil_base::Histogram;
use tenmil_wire::Status;

pub use super::environment::machine_rows;
pub use html_report::render_code_spans;
pub use page_style::STYLE;

use super::perf_options::{OpenLoop, PerfOptions};
use super::perf_result::{Baseline, BaselineResult, PerfResult, RunEndReason};
use number_format::{show_count, show_iops, show_ns_f64};
use tenmil_base::text::format_size;
use tenmil_block::uri::short_form_for_terminal;
use tenmil_devices::EmuMedium;

/// Percentiles of every report: name, and rank in parts per million.
pub const PERCENTILES: [(&str, u64); 4] =
    [("p50", 500_000), ("p99", 990_000), ("p99.9", 999_000), ("p99.99", 999_900)];

/// One-line description of the test: `21 SSDs, random reads of 4 KiB, depth 128, 1 submitting
/// thread`.
pub fn workload_line(options: &PerfOptions) -> String {
    let count = options.device_count();
    let plural = |count: u64| if count == 1 { "" } else { "s" };
    let kind = if options.is_all_emulated() { "SSD" } else { "device" };
    let mut line = format!("{count} {kind}{}, {}", plural(count.into()), options.pattern.text());
    match options.sizes.shares.as_slice() {
        [only] => line += &format!(" of {}", format_size(only.len_bytes.into())),
        shares => {
            let shares: Vec<String> = shares
                .iter()
                .map(|share| format!("{}:{}", format_size(share.len_bytes.into()), share.weight))
                .collect();
            line += &format!(" of {}", shares.join(", "));
        }
    }
    if options.pattern.has_read_percentage() {
        line += &format!(", {} % reads", options.read_percent);
    }
    line += &format!(", depth {}", options.depth);
    if options.queue_pairs > 1 {
        line += &format!(" over {} queue pairs", options.queue_pairs);
    }
    if let Some(theta) = options.zipf {
        line += &format!(", zipf {theta}");
    }
    if let Some(OpenLoop { per_second, .. }) = options.rate {
        line += &format!(", open loop at {} I/Os per second", show_count(per_second));
    }
    let threads = options.thread_count();
    line + &format!(", {threads} submitting thread{}", plural(threads.into()))
}

/// Qualifications of the result, one sentence each, shown under the headline.
pub fn result_notes(result: &PerfResult) -> Vec<String> {
    let options = &result.options;
    let mut sentences = emulated_ssd_notes(options);
    if options.is_all_emulated() {
        return sentences;
    }
    let counts = options.uris.iter().flat_map(|uri| (0..uri.count()).map(move |_| uri));
    for (uri, device) in counts.zip(&result.devices).filter(|(uri, _)| uri.emulated().is_none()) {
        let completed = match uri.keeps_data() {
            true => device.durability.describe(),
            false => "some or all of its blocks transfer no data",
        };
        // A description may begin with the kind of device, which the name repeats.
        let kind = device.model.split_once(": ").filter(|(kind, _)| device.name.starts_with(kind));
        let what = kind.map_or(device.model.as_str(), |(_, rest)| rest);
        sentences
            .push(format!("`{}`: {what}; {completed}.", short_form_for_terminal(&device.name)));
    }
    sentences
}

/// Explanation of emulated SSDs.
fn emulated_ssd_notes(options: &PerfOptions) -> Vec<String> {
    let mut sentences = Vec::new();
    let media = || options.emulated_ssds().map(|spec| &spec.medium);
    let answering = media().filter(|medium| **medium == EmuMedium::Null).count();
    if answering > 0 && answering == options.uris.len() {
        sentences.push(
            "No data are transferred: this is the cost of the driver and of an emulated controller \
             that only completes commands."
                .into(),
        );
    } else if answering > 0 {
        sentences.push(
            "Some of these SSDs are emulated, transfer no data and only complete commands.".into(),
        );
    }
    if media().any(|medium| *medium == EmuMedium::Ram) {
        sentences.push("Data are copied in memory: no flash is accessed.".into());
    }
    if media().any(|medium| matches!(medium, EmuMedium::File { .. })) {
        sentences.push(
            "Data are read from and written to a file, at the speed of its file system and device."
                .into(),
        );
    }
    let mut doorbells: Vec<u32> = options.emulated_ssds().map(|spec| spec.doorbell_ns).collect();
    doorbells.retain(|ns| *ns > 0);
    doorbells.dedup();
    for ns in doorbells {
        sentences.push(format!(
            "Each doorbell costs {ns} ns of processor time: a model of a posted PCIe write, not \
             a bus."
        ));
    }
    let mut models: Vec<&String> = media()
        .filter_map(|medium| match medium {
            EmuMedium::Model { name } => Some(name),
            _ => None,
        })
        .collect();
    models.dedup();
    for name in models {
        sentences.push(format!(
            "`{name}` is a model of that device's timing, not the device: latencies are drawn, and \
             the rate is capped."
        ));
    }
    sentences
}

/// What ended the run, unless it was the duration.
pub fn end_reason_text(result: &PerfResult) -> Option<String> {
    let requested = result.options.time.as_secs_f64();
    let measured = result.elapsed.as_secs_f64();
    match result.ended {
        RunEndReason::Time => None,
        RunEndReason::Count => Some(format!("All I/Os were done after {measured:.2} s.")),
        RunEndReason::Interrupt => {
            Some(format!("Interrupted: these are the first {measured:.2} s of {requested:.2} s."))
        }
    }
}

/// What a ratio above 1 to an upper bound means.
const DISTURBED: &str = "above 1 means a disturbed run, since nothing is faster than the \
                         micro-benchmark: repeat it while the machine is idle";

/// Comparison with the baseline, in one sentence.
pub fn baseline_line(result: &PerfResult) -> Option<String> {
    let (ratio, baseline) = (result.baseline_ratio()?, result.baseline?);
    if baseline.limit == Baseline::Copies {
        let rate = show_iops(baseline.iops);
        return Some(format!(
            "{ratio:.2} of the copy micro-benchmark: {rate} between addresses drawn alike, with the \
             next one prefetched and non-temporal stores, in the same run"
        ));
    }
    let BaselineResult { rings, depth, .. } = baseline;
    let rate = show_iops(baseline.iops);
    let mut line = match baseline.limit {
        Baseline::Messages(engine) => format!(
            "{ratio:.2} of the message micro-benchmark over TCP: {rate} over {rings} connections with {depth} \
             in flight each, by {engine}, in the same run"
        ),
        Baseline::Ring | Baseline::Copies => format!(
            "{ratio:.2} of the ring micro-benchmark: {rate} through {rings} rings with {depth} entries in \
             flight each, in the same run"
        ),
    };
    if let Some(round_trip) = baseline.round_trip {
        let round_trip_ns = number_format::show_ns(round_trip.ns);
        line += &format!(", {round_trip_ns} for a round trip");
        if matches!(baseline.limit, Baseline::Messages(_)) && round_trip.ns > 0 {
            #[expect(clippy::cast_precision_loss, reason = "shown to people")]
            let times = result.latency.percentile(500_000) as f64 / round_trip.ns as f64;
            line += &format!(", of which the median I/O takes {times:.2}");
        }
    }
    if result.is_above_baseline() {
        line += &format!("; {DISTURBED}");
    }
    Some(line)
}

/// Mean, percentiles and maximum of `latency`, formatted.
pub fn latency_texts(latency: &Histogram) -> [String; 6] {
    let at = |index: usize| number_format::show_ns(latency.percentile(PERCENTILES[index].1));
    let mean = show_ns_f64(latency.mean());
    [mean, at(0), at(1), at(2), at(3), number_format::show_ns(latency.max())]
}

/// Errors by status: name in the NVMe specification, and count.
pub fn error_rows(result: &PerfResult) -> Vec<(String, u64)> {
    let rows = result.errors_by_status.iter();
    rows.map(|(status, count)| (Status(*status).to_string(), *count)).collect()
}
