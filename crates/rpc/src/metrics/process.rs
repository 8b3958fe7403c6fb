//! Metrics of the process itself.

use std::sync::OnceLock;

use tenmil_linux::process_log::{LogCounters, ProcessLog};
use tenmil_linux::process_stats::ProcessStats;

use super::families::{
    BUILD, CPU_TIME, DESCRIPTORS, LOG_LINES, OTLP_DROPPED_SPANS, OTLP_REQUESTS, RESIDENT,
    START_TIME, THREADS,
};
use super::metrics_text::MetricsText;
use crate::methods::ProgramInfo;
use crate::otlp::{OtlpExport, OtlpSignal};
use crate::process_parts::ProcessParts;

pub(super) fn collect(parts: &ProcessParts, text: &mut MetricsText) {
    let usage = ProcessStats::read();
    if let Ok(ProgramInfo { version, log }) = parts.find_part::<ProgramInfo>("word about itself") {
        text.add(&BUILD, [version], 1);
        if let Some(LogCounters { written, suppressed, dropped }) =
            log.as_ref().map(ProcessLog::counters)
        {
            text.add(&LOG_LINES, ["written"], written);
            text.add(&LOG_LINES, ["suppressed"], suppressed);
            text.add(&LOG_LINES, ["dropped"], dropped);
        }
    }
    if let Ok(OtlpExport { counters, .. }) = parts.find_part::<OtlpExport>("collector") {
        for signal in OtlpSignal::ALL {
            let (accepted, failed) = counters.requests(signal);
            text.add(&OTLP_REQUESTS, [signal.name(), "accepted"], accepted);
            text.add(&OTLP_REQUESTS, [signal.name(), "failed"], failed);
        }
        text.add(&OTLP_DROPPED_SPANS, [], counters.dropped_spans());
    }
    let numbers = [
        (&START_TIME, start_time_ns(&usage)),
        (&CPU_TIME, Some(usage.cpu_time.ns)),
        (&RESIDENT, usage.resident_bytes),
        (&DESCRIPTORS, usage.descriptors),
        (&THREADS, usage.threads),
    ];
    for (family, value) in numbers {
        if let Some(value) = value {
            text.add(family, [], value);
        }
    }
}

/// Nanoseconds from 1970 to the start of the process. Computed once: each computation differs by the time
/// between two clocks, and a collector would take a change for a restart.
fn start_time_ns(usage: &ProcessStats) -> Option<u64> {
    static START: OnceLock<Option<u64>> = OnceLock::new();
    let compute = || {
        let now_ns = tenmil_linux::clock::utc_now().unix_us.saturating_mul(1_000);
        let start_ns = now_ns.saturating_sub(usage.age?.ns);
        // The kernel counts in ticks of 10 ms.
        Some(start_ns - start_ns % 10_000_000)
    };
    *START.get_or_init(compute)
}
