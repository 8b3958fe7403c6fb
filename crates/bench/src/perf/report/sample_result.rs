//! Sample result for tests of the reports.

use std::collections::BTreeMap;

use tenmil_base::{Durability, Histogram, IoStatus, Operation, Random, Span};

use crate::perf::environment::RunEnvironment;
use crate::perf::perf_options::PerfOptions;
use crate::perf::perf_result::{
    Baseline, BaselineResult, DeviceResult, DriverOption, FastPathCounters, IoCounts, NullBlkPoint,
    NullBlkResult, NullBlkRow, PerfResult, RamResult, RunEndReason, ThreadPlacement, TimeSeries,
};
use tenmil_base::Error;
use tenmil_linux::{CpuList, MachineEnvironment};
use tenmil_reactor::PollMode;
use tenmil_reactor::thread_scheduler::Policy;

const IOS: u64 = 314_000_000;

/// Result of a default run on a quiet machine.
pub fn sample_result() -> PerfResult {
    let mut random = Random::new(4);
    let latency = sample_latency(&mut random, 85_000);
    let devices = (0..21)
        .map(|index| DeviceResult {
            name: format!("emu:null #{index}"),
            model: "tenmil emulated SSD".into(),
            durability: Durability::NonPersistent,
            size_bytes: 1 << 40,
            block_size: 512,
            counts: io_counts(IOS / 21 - index * 1000),
            latency: sample_latency(&mut random, 85_000),
        })
        .collect();
    PerfResult {
        options: PerfOptions::default().with_default_baseline_and_report(),
        elapsed: Span::from_secs(10),
        ended: RunEndReason::Time,
        devices,
        totals: io_counts(IOS),
        latency_by_operation: vec![(Operation::Read, latency.clone())],
        latency,
        time_stamp_error: Span { ns: 640 },
        series: TimeSeries {
            interval: Span::from_ms(100),
            ios: (0..100).map(|_| 3_040_000 + random.below(200_000)).collect(),
            bytes: vec![0; 100],
        },
        sleeps: 3,
        counters: FastPathCounters {
            polls: 30_000_000,
            idle_polls: 4_000_000,
            completions: IOS,
            submission_doorbells: 13_000_000,
            completion_doorbells: 13_000_000,
            doorbell_registers: 2_000_000,
            cmb_commands: 157_000_000,
        },
        tsc_ticks: Some(26_000_000_000),
        errors_by_status: BTreeMap::new(),
        techniques: vec![
            driver_option("submission doorbell per iteration", "on", "--no-doorbell-batching"),
            driver_option("completion doorbell", "poll", "--cq-doorbell each|poll|deferred"),
            driver_option("command store", "plain", "--command-store auto|plain|sse2|movdir64b"),
            driver_option("shadow doorbells", "off", "--shadow-doorbells"),
            driver_option("huge pages", "on", "--no-huge-pages"),
        ],
        verified: None,
        open_loop: None,
        baseline: Some(BaselineResult {
            limit: Baseline::Ring,
            iops: 74_800_000.0,
            elapsed: Span::from_secs(1),
            rings: 21,
            depth: 128,
            round_trip: None,
        }),
        ram: Some(RamResult {
            uri: "emu:ram?count=21".into(),
            elapsed: Span::from_secs(2),
            counts: IoCounts { ios: 9_000_000, bytes: 9_000_000 * 4096, ..IoCounts::default() },
            latency: sample_latency(&mut random, 600_000),
        }),
        null_blk: Some(NullBlkResult {
            depth: 128,
            time: Span::from_secs(1),
            rows: vec![
                null_blk_row("single", None, [(20e6, 0.02), (9e6, 0.61)]),
                null_blk_row("mq", Some(2), [(30e6, 0.0), (58e6, 0.0)]),
            ],
        }),
        missing: Vec::new(),
        threads: vec![
            ThreadPlacement { role: "submit", core: Some(0) },
            ThreadPlacement { role: "device", core: Some(1) },
        ],
        environment: quiet_machine(),
    }
}

/// The sample with every kind of failure.
pub fn failed_sample_result() -> PerfResult {
    let mut result = sample_result();
    result.totals.errors = 12;
    result.errors_by_status =
        BTreeMap::from([(IoStatus::UNRECOVERED_READ.0, 11), (IoStatus::LBA_OUT_OF_RANGE.0, 1)]);
    result.ended = RunEndReason::Interrupt;
    result.missing = vec![Error::environment("allocate 336 MiB of memory: no such memory is free")];
    result.elapsed = Span::from_secs(4);
    result.environment.steal = 0.05;
    result.environment.machine.governor = Some("powersave".into());
    result.verified = Some(crate::perf::perf_result::VerifyResult {
        good_blocks: 1000,
        torn_blocks: 2,
        first_bad: Some("block 7 of SSD 3: torn: another write from byte 512 on".into()),
        ..crate::perf::perf_result::VerifyResult::default()
    });
    result
}

fn driver_option(name: &'static str, setting: &str, switch: &'static str) -> DriverOption {
    DriverOption { name, setting: setting.into(), switch }
}

fn io_counts(ios: u64) -> IoCounts {
    IoCounts { ios, bytes: ios * 4096, errors: 0, reads: ios, writes: 0 }
}

/// Latencies around `median`, with a tail.
fn sample_latency(random: &mut Random, median: u64) -> Histogram {
    let mut latency = Histogram::new();
    for _ in 0..100_000 {
        let spread: u64 = (0..6).map(|_| random.below(median / 8)).sum();
        let late = match random.below(10_000) {
            0..5 => median * 40 + random.below(median * 60),
            5..200 => random.below(median * 3),
            _ => 0,
        };
        latency.record_many(median * 5 / 8 + spread + late, 3140);
    }
    latency
}

fn null_blk_row(mode: &'static str, contexts: Option<u32>, points: [(f64, f64); 2]) -> NullBlkRow {
    let point =
        |(threads, (iops, lock_wait_share))| NullBlkPoint { threads, iops, lock_wait_share };
    NullBlkRow { mode, contexts, points: (1..).zip(points).map(point).collect() }
}

/// A quiet machine with two cores.
#[expect(clippy::unwrap_used, reason = "the list is valid")]
pub fn quiet_machine() -> RunEnvironment {
    let cores = CpuList::parse("0-1").unwrap();
    RunEnvironment {
        machine: MachineEnvironment {
            cpu_model: Some("Fast One".into()),
            kernel: "6.12.0".into(),
            online: Some(cores.clone()),
            allowed: cores,
            quota: None,
            quota_file: None,
            hypervisor: Some("KVM".into()),
            governor: None,
            transparent_huge_pages: Some("madvise".into()),
            huge_pages_free: 8,
            lockable_bytes: Some(65_536),
            io_uring: Ok(()),
            shares_cores: false,
        },
        steal: 0.001,
        tsc_hz: Some(2_596_000_000),
        memory_backing: "2 MiB pages".into(),
        poll: PollMode::Hybrid,
        scheduler: Policy::Dynamic,
        frequency_scaling: "unchanged".into(),
        optimized: true,
    }
}
