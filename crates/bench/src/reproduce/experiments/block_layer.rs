//! Experiments on the block layer, its queues, and fio.

use crate::experiment::{Experiment, Threshold, Variant};

use super::{CPU, IOPS, MEAN, PER_IO, TAIL, ratio_criterion, single_variant_criterion};
use crate::reproduce::BenchTask;

pub(super) fn block_layer_experiments() -> Vec<Experiment<BenchTask>> {
    vec![
        block_layer_cost_experiment(),
        fio_comparison_experiment(),
        queue_per_thread_experiment(),
        optane_latency_experiment(),
    ]
}

fn block_layer_cost_experiment() -> Experiment<BenchTask> {
    Experiment {
        name: "block-layer",
        claim: "A block layer above the driver keeps 70 to 80 % of its rate.",
        seeds: &[2],
        seen: "seven or eight million IOPS of 10.39 M",
        figures: &[IOPS, PER_IO],
        sides: vec![
            Variant::new("driver alone", BenchTask::Perf("emu:null?count=21 --block none")),
            Variant::new("block layer", BenchTask::Perf("emu:null?count=21 --block mq")),
        ],
        questions: vec![ratio_criterion(
            "what the block layer keeps",
            "block layer",
            "driver alone",
            IOPS,
            Threshold::AtLeast(0.7),
        )],
        limits: "Both sides are tenmil's: its block layer over its driver, over emulated SSDs that \
                 move no data.",
    }
}

fn fio_comparison_experiment() -> Experiment<BenchTask> {
    Experiment {
        name: "fio",
        claim: "fio reaches its own limit far below what the driver does, even over nothing at all.",
        seeds: &[2],
        seen: "about 2.7 M IOPS for each core",
        figures: &[IOPS],
        sides: vec![
            Variant::new("perf over 21 SSDs", BenchTask::Perf("emu:null?count=21")),
            Variant::new(
                "fio over its null engine",
                BenchTask::Fio(
                    "--name=nothing --ioengine=null --size=1g --rw=randread --bs=4k --iodepth=128 \
                     --norandommap --time_based --runtime=1",
                ),
            )
            .with_trial_length(4),
        ],
        questions: vec![ratio_criterion(
            "driver and perf, against fio over nothing",
            "perf over 21 SSDs",
            "fio over its null engine",
            IOPS,
            Threshold::AtLeast(2.0),
        )],
        limits: "fio runs one job and nothing below it; the driver has an emulated SSD below it, \
                 which costs another core.",
    }
}

fn queue_per_thread_experiment() -> Experiment<BenchTask> {
    let over = |label, words| Variant::new(label, BenchTask::Perf(words));
    Experiment {
        name: "queue-per-thread",
        claim: "A queue for each thread grows with the threads; one queue behind one lock does not.",
        seeds: &[1, 4],
        seen: "one lock stays flat or falls from one thread to 32; multi-queue grows with them",
        figures: &[IOPS, CPU],
        sides: vec![
            over("one lock, one thread", "null: --block single -c {first}"),
            over("one lock, a thread per core", "null: --block single -c {all}"),
            over("queues, one thread", "null: --block mq --queue-map default=1 -c {first}"),
            over(
                "queues, a thread per core",
                "null: --block mq --queue-map default={count} -c {all}",
            ),
        ],
        questions: vec![
            ratio_criterion(
                "queues against a lock, a thread per core",
                "queues, a thread per core",
                "one lock, a thread per core",
                IOPS,
                Threshold::AtLeast(1.5),
            ),
            ratio_criterion(
                "queues, a thread per core against one thread",
                "queues, a thread per core",
                "queues, one thread",
                IOPS,
                Threshold::AtLeast(1.4),
            ),
            ratio_criterion(
                "one lock, a thread per core against one thread",
                "one lock, a thread per core",
                "one lock, one thread",
                IOPS,
                Threshold::AtMost(1.4),
            ),
        ],
        limits: "As many threads as there are cores here, not 32 over two sockets. `tenmil perf \
                 --null-blk` draws the curve from one thread on, with the time that is spent \
                 waiting for the lock.",
    }
}

fn optane_latency_experiment() -> Experiment<BenchTask> {
    Experiment {
        name: "optane",
        claim: "Reads of 512 bytes from 20 Optane SSDs at depth 32 take 57 µs on average.",
        seeds: &[1],
        seen: "57 µs mean, 20 Intel Optane P4800X",
        figures: &[MEAN, TAIL, IOPS, PER_IO],
        sides: vec![Variant::new(
            "20 modelled SSDs",
            BenchTask::Perf("emu:model:p4800x?count=20&size=16m&block=512 -o 512 -q 32"),
        )],
        questions: vec![single_variant_criterion(
            "mean latency",
            "20 modelled SSDs",
            MEAN,
            Threshold::Between(51_000.0, 63_000.0),
        )],
        limits: "A model of that SSD's timing, not the SSD: latencies are drawn and the rate is \
                 capped, so what holds here is that driver and model add nothing that would show. \
                 All 20 are emulated by one thread.",
    }
}
