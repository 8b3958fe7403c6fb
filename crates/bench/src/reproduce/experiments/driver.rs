//! Experiments on the driver with emulated SSDs: doorbells and command stores.

use crate::experiment::{Experiment, Metric, Threshold, Unit, Variant};

use super::{IOPS, MEDIAN, PER_IO, ratio_criterion, single_variant_criterion, steady_metric};
use crate::reproduce::BenchTask;

const OF_BASELINE: Metric =
    steady_metric("of_baseline", "of the ring micro-benchmark", Unit::Times);
const DOORBELLS: Metric = steady_metric("doorbells_per_io", "doorbells per I/O", Unit::Times);

const NO_BUS: &str = "An emulated SSD's doorbell is a store into memory and not across a PCIe bus, \
    where it takes longer: the sides with `doorbell=` hold the processor for so many nanoseconds, \
    which is a model of a bus and not one.";

pub(super) fn driver_experiments() -> Vec<Experiment<BenchTask>> {
    vec![
        ten_million_iops_experiment(),
        submission_doorbell_experiment(),
        completion_doorbell_experiment(),
        streaming_stores_experiment(),
    ]
}

fn ten_million_iops_experiment() -> Experiment<BenchTask> {
    Experiment {
        name: "ten-million",
        claim: "One thread does ten million random reads of 4 KiB in a second, from 21 SSDs at \
                depth 128.",
        seeds: &[1, 2],
        seen: "10.39 M IOPS, 21 Intel P4600, Xeon Platinum 8280L at 4.0 GHz",
        figures: &[IOPS, PER_IO, OF_BASELINE, MEDIAN],
        sides: vec![
            Variant::new("21 SSDs", BenchTask::Perf("emu:null?count=21 -q 128 --baseline"))
                .with_trial_length(2),
        ],
        questions: vec![single_variant_criterion(
            "random reads of 4 KiB in a second",
            "21 SSDs",
            IOPS,
            Threshold::AtLeast(10e6),
        )],
        limits: "The SSDs are emulated by a second thread; they complete commands, transfer no data, and there \
                 is no PCIe bus. So this is what the driver can do, not what SSDs can. The bare \
                 ring is two rings between the same two threads with no driver at all: the most \
                 that any driver could do here.",
    }
}

fn submission_doorbell_experiment() -> Experiment<BenchTask> {
    Experiment {
        name: "submission-doorbell",
        claim: "Ringing the submission doorbell once for a batch of commands, and not for each, \
                multiplies the rate.",
        seeds: &[1, 2],
        seen: "2.89 M IOPS without, 10.39 M with: 3.6 times",
        figures: &[IOPS, PER_IO, DOORBELLS],
        sides: vec![
            Variant::new("for a batch", BenchTask::Perf("emu:null?count=21")),
            Variant::new("for each", BenchTask::Perf("emu:null?count=21 --no-doorbell-batching")),
            Variant::new(
                "for a batch, 100 ns",
                BenchTask::Perf("emu:null?count=21&doorbell-cost=100"),
            ),
            Variant::new(
                "for each, 100 ns",
                BenchTask::Perf("emu:null?count=21&doorbell-cost=100 --no-doorbell-batching"),
            ),
        ],
        questions: vec![
            ratio_criterion(
                "batching is worth, where a doorbell is a store",
                "for a batch",
                "for each",
                IOPS,
                Threshold::AtLeast(1.2),
            ),
            ratio_criterion(
                "batching is worth, where a doorbell takes 100 ns",
                "for a batch, 100 ns",
                "for each, 100 ns",
                IOPS,
                Threshold::AtLeast(3.6),
            ),
        ],
        limits: NO_BUS,
    }
}

fn completion_doorbell_experiment() -> Experiment<BenchTask> {
    let at = |label, words| Variant::new(label, BenchTask::Perf(words));
    Experiment {
        name: "completion-doorbell",
        claim: "Ringing the completion doorbell once per poll is most of what can be had at depth \
                128; ringing it only when the SSD needs free entries helps where few I/Os are in flight.",
        seeds: &[1, 2],
        seen: "no figure; the second half is what the authors suspect",
        figures: &[IOPS, PER_IO, DOORBELLS],
        sides: vec![
            at("per poll, depth 128", "emu:null?count=21"),
            at("per entry, depth 128", "emu:null?count=21 --cq-doorbell each"),
            at("deferred, depth 128", "emu:null?count=21 --cq-doorbell deferred"),
            at("per poll, depth 1", "emu:null -q 1"),
            at("deferred, depth 1", "emu:null -q 1 --cq-doorbell deferred"),
            at("per poll, depth 2", "emu:null -q 2").full_runs_only(),
            at("deferred, depth 2", "emu:null -q 2 --cq-doorbell deferred").full_runs_only(),
            at("per poll, depth 4", "emu:null -q 4"),
            at("per entry, depth 4", "emu:null -q 4 --cq-doorbell each").full_runs_only(),
            at("deferred, depth 4", "emu:null -q 4 --cq-doorbell deferred"),
            at("per poll, depth 8", "emu:null -q 8").full_runs_only(),
            at("deferred, depth 8", "emu:null -q 8 --cq-doorbell deferred").full_runs_only(),
        ],
        questions: vec![
            ratio_criterion(
                "once per poll against each entry, at depth 128",
                "per poll, depth 128",
                "per entry, depth 128",
                IOPS,
                Threshold::AtLeast(1.1),
            ),
            ratio_criterion(
                "deferred against once per poll, at depth 128: no large difference",
                "deferred, depth 128",
                "per poll, depth 128",
                IOPS,
                Threshold::Between(0.8, 1.25),
            ),
            ratio_criterion(
                "deferred against once per poll, at depth 1",
                "deferred, depth 1",
                "per poll, depth 1",
                IOPS,
                Threshold::AtLeast(1.02),
            ),
            ratio_criterion(
                "deferred against once per poll, at depth 4",
                "deferred, depth 4",
                "per poll, depth 4",
                IOPS,
                Threshold::AtLeast(1.02),
            ),
            ratio_criterion(
                "deferred against once per poll, at depth 8",
                "deferred, depth 8",
                "per poll, depth 8",
                IOPS,
                Threshold::AtLeast(1.02),
            ),
        ],
        limits: NO_BUS,
    }
}

fn streaming_stores_experiment() -> Experiment<BenchTask> {
    let over = |label, words| Variant::new(label, BenchTask::Perf(words));
    Experiment {
        name: "streaming-stores",
        claim: "Storing commands past the cache leaves it to others and makes the whole faster.",
        seeds: &[1],
        seen: "2.5 % with SSE2 streaming stores",
        figures: &[IOPS, PER_IO],
        sides: vec![
            over("plain", "emu:null?count=21 --command-store plain"),
            over("sse2", "emu:null?count=21 --command-store sse2"),
            over("movdir64b", "emu:null?count=21 --command-store movdir64b"),
        ],
        questions: vec![
            ratio_criterion(
                "SSE2 against plain stores",
                "sse2",
                "plain",
                IOPS,
                Threshold::AtLeast(1.01),
            ),
            ratio_criterion(
                "MOVDIR64B against plain stores",
                "movdir64b",
                "plain",
                IOPS,
                Threshold::AtLeast(1.01),
            ),
        ],
        limits: "The emulated SSD reads commands from another core's cache, where plain stores have \
                 left them; a real one reads memory. A store past the cache costs that reader an access \
                 to memory, which a real SSD would have anyway.",
    }
}
