//! That reads of memory move what lies there: blocks that were never written are one page of zeroes
//! for all, which fills buffers from the first-level cache. In a process of its own: it is the
//! process's memory that is looked at.

#![expect(clippy::unwrap_used, reason = "a test may")]

use std::sync::Arc;

use tenmil_base::Span;
use tenmil_bench::perf::engine;
use tenmil_bench::perf::perf_options::PerfOptions;
use tenmil_bench::perf::progress::RunProgress;
use tenmil_linux::process_stats::ProcessStats;

const MIB: u64 = 1 << 20;

/// The most memory that was in use at once, after a run over this device.
fn peak_memory_after_run_over(uri: &str) -> u64 {
    let options = PerfOptions {
        uris: vec![uri.parse().unwrap()],
        depth: 4,
        io_count: Some(100),
        warm_up: Span::from_ms(50),
        ..PerfOptions::default()
    };
    let progress = Arc::new(RunProgress::new(options.thread_count() as usize));
    let result = engine::run_perf(&options, &progress, &mut |_| {}).unwrap();
    assert_eq!((result.totals.reads, result.totals.errors), (100, 0), "{uri}");
    ProcessStats::read().resident_max_bytes.unwrap()
}

/// Each device is larger than all before it together: what those had in use is not enough for it.
#[test]
fn ram_device_that_is_read_is_filled_at_open() {
    let without = peak_memory_after_run_over("null:");
    for (uri, blocks) in
        [("emu:ram?size=96m", 96), ("ram:192m", 192), ("stripe:[ram:192m],[ram:192m]", 384)]
    {
        let (most, expected) = (peak_memory_after_run_over(uri), without + blocks * MIB);
        assert!(most + MIB >= expected, "{uri}: {most} bytes were in use, expected {expected}");
    }
}
