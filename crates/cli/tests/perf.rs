//! `perf` from end to end, as a program calls it: what is counted, when it ends, and that a thread
//! which sleeps is woken for every one of its SSDs.

#![expect(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test may")]

use std::num::NonZeroU64;
use std::sync::Arc;

use tenmil_base::Error;
use tenmil_base::{Durability, ErrorCategory, Span};
use tenmil_bench::perf::engine;
use tenmil_bench::perf::perf_options::{
    AccessPattern, ArrivalProcess, BlockLayerMode, BlockLayerOptions, MachineResources, OpenLoop,
    PerfOptions, SizeMix,
};
use tenmil_bench::perf::perf_result::{IoCounts, PerfResult, RunEndReason};
use tenmil_bench::perf::progress::RunProgress;
use tenmil_bench::perf::report::text_report;
use tenmil_block::QueueMap;
use tenmil_devices::Uri;
use tenmil_linux::CpuList;
use tenmil_linux::kernel_files::KernelFiles;
use tenmil_reactor::{PollMode, SPIN_MAX};

fn run(options: &PerfOptions) -> PerfResult {
    let progress = Arc::new(RunProgress::new(options.thread_count() as usize));
    engine::run_perf(options, &progress, &mut |_| {}).unwrap()
}

fn options_for_uris(uris: &[&str]) -> PerfOptions {
    let uris: Vec<Uri> = uris.iter().map(|uri| uri.parse().unwrap()).collect();
    PerfOptions { uris, depth: 16, warm_up: Span::from_ms(50), ..PerfOptions::default() }
}

#[test]
fn requested_number_of_ios_completes_in_every_poll_mode() {
    for poll in PollMode::ALL {
        let options = PerfOptions {
            io_count: Some(1_001),
            poll,
            pattern: AccessPattern::RandRw,
            ..options_for_uris(&["emu:null", "emu:ram?size=1m"])
        };
        let result = run(&options);
        assert_eq!(result.ended, RunEndReason::Count);
        for device in &result.devices {
            assert_eq!(device.counts.ios, 1_001, "{} {poll}", device.name);
            assert_eq!(device.latency.count(), 1_001);
        }
        let IoCounts { ios, reads, writes, bytes, errors, .. } = result.totals;
        assert_eq!((ios, reads + writes, bytes, errors), (2_002, 2_002, 2_002 * 4096, 0));
        assert!(reads > 500 && writes > 500, "{reads} and {writes}");
        assert!(poll != PollMode::Always || result.sleeps == 0);
    }
}

#[test]
fn measurement_has_the_requested_duration_and_its_sums_match() {
    let options =
        PerfOptions { time: Span::from_ms(350), ..options_for_uris(&["emu:null?count=2"]) };
    let result = run(&options);
    assert_eq!(result.ended, RunEndReason::Time);
    assert!(result.elapsed >= options.time, "{}", result.elapsed);
    assert!(result.series.ios.len() >= 3, "a point for each tenth of a second");
    let (ios, sum) = (result.totals.ios, result.series.ios.iter().sum::<u64>());
    assert!(ios > 0 && sum > 0 && sum <= ios, "{sum} of {ios} are in the series");
    assert_eq!(ios, result.devices.iter().map(|device| device.counts.ios).sum::<u64>());
    assert_eq!(ios, result.latency.count());
    // Those that were in flight when the warm-up ended count as well.
    assert!(result.counters.completions >= ios);
}

/// Arrivals come 50 ms apart, and 8 MiB take the model of a P4600 longer than the longest spell: each
/// answer has to end a sleep, or is found by chance when another SSD's I/O begins.
#[test]
fn sleeping_thread_is_woken_for_each_of_its_ssds() {
    for poll in [PollMode::Adaptive, PollMode::Hybrid] {
        let rate = OpenLoop { per_second: 20, arrivals: ArrivalProcess::Uniform };
        let options = PerfOptions {
            rate: Some(rate),
            poll,
            depth: 2,
            sizes: SizeMix::single_size(8 << 20),
            time: Span::from_secs(1),
            ..options_for_uris(&["emu:model:p4600?count=2&size=64m"])
        };
        let result = run(&options);
        assert!(result.sleeps >= 15, "{} sleeps in mode {poll}", result.sleeps);
        for device in &result.devices {
            // Without a wake-up each I/O would wait for the next one, 50 ms; a busy machine delays some.
            let [least, quarter] = [1, 250_000].map(|part| device.latency.percentile(part));
            let quarter = Span { ns: quarter };
            assert!(least > SPIN_MAX.ns, "{least} ns are met awake");
            assert!(device.counts.ios >= 8, "{} I/Os of 10", device.counts.ios);
            assert!(quarter < Span::from_ms(20), "{} in mode {poll}: {quarter}", device.name);
        }
    }
}

#[test]
fn interrupted_run_reports_what_it_has() {
    let options = PerfOptions { time: Span::from_secs(600), ..options_for_uris(&["emu:null"]) };
    let progress = Arc::new(RunProgress::new(1));
    let result = engine::run_perf(&options, &progress, &mut |progress| {
        if progress.total_counts().ios > 0 {
            progress.request_stop();
        }
    });
    let result = result.unwrap();
    assert_eq!(result.ended, RunEndReason::Interrupt);
    assert!(result.totals.ios > 0 && result.elapsed < Span::from_secs(60));
}

/// Why a run over `uris` is not to be.
fn run_error(options: &PerfOptions) -> Error {
    let progress = Arc::new(RunProgress::new(options.thread_count() as usize));
    let options = PerfOptions { depth_may_be_less: false, ..options.clone() };
    engine::run_perf(&options, &progress, &mut |_| {}).err().unwrap()
}

#[test]
fn any_block_device_is_loaded_and_described() {
    let directory = tempfile::tempdir().unwrap();
    let file = format!("file:{}?size=1m&engine=threads", directory.path().join("disk").display());
    let uris = ["null:", "ram:1m?block=4k", &file, "model:p4800x?size=1m", "emu:ram?size=1m"];
    let pattern = AccessPattern::RandRw;
    let options =
        PerfOptions { io_count: Some(501), pattern, queue_pairs: 2, ..options_for_uris(&uris) };
    let result = run(&options);
    assert_eq!((result.ended, result.totals.errors), (RunEndReason::Count, 0));
    let said = [
        "no data is transferred",
        "volatile, lost when the process exits",
        "by threads",
        "a model of an Intel",
        "tenmil",
    ];
    for ((device, uri), said) in result.devices.iter().zip(uris).zip(said) {
        assert_eq!((device.counts.ios, device.name.as_str()), (501, uri));
        assert!(device.model.contains(said), "{uri}: {}", device.model);
    }
    let durability: Vec<_> = result.devices.iter().map(|device| device.durability).collect();
    assert_eq!(durability[2], Durability::VolatileCache);
    assert_eq!(durability[4], Durability::NonPersistent, "an SSD over memory is not called stable");
    let text = text_report::render_text(&result, &[]);
    assert!(text.starts_with("5 devices, random reads and writes"), "{text}");
    assert!(text.contains("`model:p4800x?size=1m`: a model of an Intel"), "{text}");
}

#[test]
fn default_depth_is_reduced_to_the_device_maximum() {
    let directory = tempfile::tempdir().unwrap();
    let file = format!("file:{}?size=1m", directory.path().join("disk").display());
    // A file takes 256 requests. 1024 is the default, not an option that was given.
    let options = PerfOptions { io_count: Some(5000), depth: 1024, ..options_for_uris(&[&file]) };
    let result = run(&options);
    assert_eq!((result.options.depth, result.totals.errors), (256, 0));
    assert!(run_error(&options).to_string().contains("expected 1 to 256"));
}

#[test]
fn data_read_back_from_a_block_device_is_verified() {
    let options = PerfOptions {
        io_count: Some(2_000),
        pattern: AccessPattern::RandRw,
        sizes: SizeMix::parse("4k:3,16k:1").unwrap(),
        verify: true,
        ..options_for_uris(&["ram:256k", "model:p4800x?size=256k"])
    };
    let verified = run(&options).verified.unwrap();
    assert!(verified.has_no_bad_blocks() && verified.good_blocks > 100, "{verified:?}");
}

#[test]
fn existing_data_is_overwritten_only_on_request() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("disk");
    for (uri, size) in [("file:", 1 << 20), ("emu:file:", 2 << 20)] {
        std::fs::write(&path, vec![0x5a; size]).unwrap();
        let uri = format!("{uri}{}", path.display());
        let writing = |overwrite| PerfOptions {
            io_count: Some(64),
            pattern: AccessPattern::RandWrite,
            overwrite,
            ..options_for_uris(&[&uri, "null:"])
        };
        let refused = run_error(&writing(false));
        assert_eq!(refused.category, ErrorCategory::Usage);
        let there = format!("{} ({size} bytes; ", path.display());
        assert!(refused.text.contains(&there), "{refused}");
        assert!(refused.hint.unwrap().contains("--overwrite"));
        assert!(std::fs::read(&path).unwrap().iter().all(|byte| *byte == 0x5a), "untouched");
        let reading = PerfOptions { pattern: AccessPattern::RandRead, ..writing(false) };
        assert_eq!(run(&reading).totals.errors, 0);
        assert_eq!(run(&writing(true)).totals.errors, 0);
        assert!(std::fs::read(&path).unwrap().iter().any(|byte| *byte != 0x5a), "written");
    }
}

#[test]
fn unsupported_operation_is_rejected_by_name() {
    let refused = |uri: &str, change: fn(&mut PerfOptions)| {
        let mut options = options_for_uris(&[uri]);
        change(&mut options);
        let refused = run_error(&options);
        assert_eq!(refused.category, ErrorCategory::Usage, "{refused}");
        refused.text
    };
    assert_eq!(
        refused("null:?block=4k", |options| options.sizes = SizeMix::single_size(512)),
        "-o 512: size is 512 bytes, expected a multiple of the 4096-byte blocks of null:?block=4k"
    );
    assert_eq!(
        refused("null:", |options| {
            options.sizes = SizeMix::single_size(2 << 20);
            options.layer.layer = Some(BlockLayerMode::None);
        }),
        "-o 2097152: size is 2097152 bytes, expected at most the 1048576 bytes of a request to \
         null:, or --block mq, which cuts it"
    );
    assert_eq!(
        refused("null:", |options| options.depth = 5000),
        "-q 5000: depth is 5000, expected 1 to 4096, which null: allows"
    );
    assert_eq!(
        refused("ram:4k", |options| options.sizes = SizeMix::single_size(8192)),
        "-o 8192: size is 8192 bytes, expected at most the 4096 bytes of ram:4k"
    );
    assert!(refused("tape:0", |_| ()).starts_with("tape:0: no devices of kind `tape`, expected"));
}

#[test]
fn too_large_requests_are_split_and_that_is_reported() {
    for layer in [BlockLayerMode::Mq, BlockLayerMode::Single] {
        let options = PerfOptions {
            io_count: Some(40),
            depth: 4,
            sizes: SizeMix::single_size(3 << 20),
            pattern: AccessPattern::RandRw,
            verify: true,
            layer: BlockLayerOptions { layer: Some(layer), ..BlockLayerOptions::default() },
            ..options_for_uris(&["ram:16m"])
        };
        let result = run(&options);
        let said = &result.devices[0].model;
        assert!(said.contains(", requests of more than 1048576 bytes cut"), "{said}");
        assert_eq!((result.totals.ios, result.totals.errors), (40, 0), "{layer}");
        assert!(result.verified.unwrap().has_no_bad_blocks(), "{layer}");
    }
    let plain = run(&PerfOptions { io_count: Some(40), ..options_for_uris(&["ram:16m"]) });
    assert!(!plain.devices[0].model.contains("cut"), "{}", plain.devices[0].model);
}

#[test]
fn every_block_layer_mode_completes_a_load() {
    for layer in BlockLayerMode::ALL {
        let options = PerfOptions {
            io_count: Some(300),
            pattern: AccessPattern::RandRw,
            verify: true,
            layer: BlockLayerOptions { layer: Some(layer), ..BlockLayerOptions::default() },
            ..options_for_uris(&[
                "ram:1m",
                "emu:ram?count=2&size=1m",
                "stripe:[emu:ram],[ram:64m]?chunk=64k",
            ])
        };
        let result = run(&options);
        assert_eq!((result.totals.ios, result.totals.errors), (1_200, 0), "{layer}");
        assert!(result.verified.unwrap().has_no_bad_blocks(), "{layer}");
        let said = result.devices.iter().filter(|device| device.model.contains("block layer"));
        assert_eq!(said.count(), if layer == BlockLayerMode::None { 0 } else { 4 }, "{layer}");
    }
}

#[test]
fn rate_limit_is_kept_and_a_scheduler_loses_nothing() {
    let layer = BlockLayerOptions {
        limit_iops: NonZeroU64::new(1_000),
        scheduler: "deadline".parse().unwrap(),
        ..BlockLayerOptions::default()
    };
    let result =
        run(&PerfOptions { time: Span::from_secs(1), layer, ..options_for_uris(&["null:"]) });
    assert_eq!(result.totals.errors, 0);
    assert!((800.0..1_100.0).contains(&result.iops()), "{}", result.iops());
}

#[test]
fn option_that_needs_a_block_layer_is_rejected_without_one() {
    let refused = |uri: &str, layer: BlockLayerOptions| {
        let supplies = MachineResources::probe_machine(&KernelFiles::live_system());
        PerfOptions { layer, ..options_for_uris(&[uri]) }.validate(&supplies).unwrap_err().text
    };
    let map = BlockLayerOptions {
        map: Some(QueueMap::with_default_contexts(2)),
        ..BlockLayerOptions::default()
    };
    assert_eq!(
        refused("emu:null", map),
        "--queue-map: emu:null is reached by --block none, expected --block mq"
    );
    let limit_iops = NonZeroU64::new(5);
    let bypass = BlockLayerOptions {
        layer: Some(BlockLayerMode::Bypass),
        limit_iops,
        ..BlockLayerOptions::default()
    };
    assert_eq!(
        refused("null:", bypass),
        "--limit-iops: null: is reached by --block bypass, expected --block mq or single"
    );
}

#[test]
fn block_layer_modes_are_compared_over_a_null_device() {
    let options = PerfOptions {
        io_count: Some(10),
        null_blk: Some(Span::from_ms(20)),
        ..options_for_uris(&["null:"])
    };
    let compared = run(&options).null_blk.unwrap();
    let modes: Vec<&str> = compared.rows.iter().map(|row| row.mode).collect();
    assert_eq!(modes[..3], ["single", "bypass", "mq"]);
    let threads = CpuList::allowed_cpus().len();
    for row in &compared.rows {
        assert_eq!(row.points.len(), threads, "{}", row.mode_text());
        for point in &row.points {
            assert!(
                point.iops > 0.0 && point.lock_wait_share <= 1.0,
                "{}: {point:?}",
                row.mode_text()
            );
        }
    }
    assert_eq!(compared.rows[1].points[0].lock_wait_share, 0.0, "there is no lock to wait for");
}
