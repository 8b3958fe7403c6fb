//! Experiments on NVMe/TCP over loopback: the target on the last core in a process of its own, the
//! host on the first core.

use crate::experiment::{Experiment, Threshold, Variant};

use super::{BYTES, CPU, IOPS, MEAN, MEDIAN, TAIL, ratio_criterion};
use crate::reproduce::BenchTask;

const LOOPBACK: &str = "Over loopback, where the kernel copies what is sent to where it is received: \
    there is no network card, no interrupt and no wire.";

pub(super) fn network_experiments() -> Vec<Experiment<BenchTask>> {
    vec![
        zero_copy_experiment(),
        direct_submission_experiment(),
        send_batching_experiment(),
        msg_more_experiment(),
        read_queues_experiment(),
        incoming_cpu_experiment(),
        busy_polling_experiment(),
    ]
}

/// Work with the arguments of target and host.
const fn target_and_host_task(serve: &'static str, perf: &'static str) -> BenchTask {
    BenchTask::Served { serve, perf }
}

fn zero_copy_experiment() -> Experiment<BenchTask> {
    Experiment {
        name: "tcp-zero-copy",
        claim: "Sending without a copy from some size on is faster than always copying, and than \
                never.",
        seeds: &[3],
        seen: "2.4 to 8.3 % for random writes",
        figures: &[BYTES, IOPS, CPU],
        sides: vec![
            Variant::new(
                "always copied",
                target_and_host_task(
                    "-c {last} --socket zero-copy=no",
                    "{target} -c {first} -o 128k -q 32",
                ),
            ),
            Variant::new(
                "by reference from 128 KiB",
                target_and_host_task(
                    "-c {last} --socket zero-copy=128k",
                    "{target} -c {first} -o 128k -q 32",
                ),
            )
            .full_runs_only(),
            Variant::new(
                "by reference from 32 KiB",
                target_and_host_task(
                    "-c {last} --socket zero-copy=32k",
                    "{target} -c {first} -o 128k -q 32",
                ),
            ),
            Variant::new(
                "by reference from 4 KiB",
                target_and_host_task(
                    "-c {last} --socket zero-copy=4k",
                    "{target} -c {first} -o 128k -q 32",
                ),
            ),
        ],
        questions: vec![ratio_criterion(
            "by reference from 32 KiB on, against always copied",
            "by reference from 32 KiB",
            "always copied",
            BYTES,
            Threshold::AtLeast(1.02),
        )],
        limits: "Loopback always copies: the kernel reports so for each send, and a stream that gets this report \
                 returns to copying. What can be shown here is that the request costs little; the \
                 gain takes a network card.",
    }
}

fn direct_submission_experiment() -> Experiment<BenchTask> {
    Experiment {
        name: "tcp-direct",
        claim: "Sending a command from the thread that submits it, and not later from another \
                context, shortens the round trip at low depth.",
        seeds: &[5],
        seen: "a lower latency of 4 KiB reads at low depth; the figure is a picture",
        figures: &[MEAN, MEDIAN, IOPS],
        sides: vec![
            Variant::new("direct", target_and_host_task("-c {last}", "{target} -c {first} -q 1")),
            Variant::new(
                "later",
                target_and_host_task("-c {last}", "{target}?inline-send=no -c {first} -q 1"),
            ),
            Variant::new(
                "direct, depth 32",
                target_and_host_task("-c {last}", "{target} -c {first} -q 32"),
            )
            .full_runs_only(),
            Variant::new(
                "later, depth 32",
                target_and_host_task("-c {last}", "{target}?inline-send=no -c {first} -q 32"),
            )
            .full_runs_only(),
        ],
        questions: vec![ratio_criterion(
            "mean round trip, direct against later",
            "direct",
            "later",
            MEAN,
            Threshold::AtMost(0.98),
        )],
        limits: "Later is a moment later in the same thread, which polls at once: the context \
                 switch that the seed avoids does not exist here. Over loopback.",
    }
}

fn send_batching_experiment() -> Experiment<BenchTask> {
    Experiment {
        name: "tcp-batching",
        claim: "Sending what has gathered in one call, and not each command by itself, raises the \
                rate at high depth.",
        seeds: &[5],
        seen: "a higher rate at high depth; the figure is a picture",
        figures: &[IOPS, MEAN, CPU],
        sides: vec![
            Variant::new(
                "gathered",
                target_and_host_task("-c {last}", "{target} -c {first} -q 128"),
            ),
            Variant::new(
                "each by itself",
                target_and_host_task(
                    "-c {last} --socket batch-send=no",
                    "{target}?batch-send=no -c {first} -q 128",
                ),
            ),
            Variant::new(
                "gathered, stream-batch",
                target_and_host_task(
                    "-c {last}",
                    "{target} -c {first} -q 128 --block-scheduler stream-batch",
                ),
            ),
        ],
        questions: vec![
            ratio_criterion(
                "gathered at both ends, against each by itself",
                "gathered",
                "each by itself",
                IOPS,
                Threshold::AtLeast(1.2),
            ),
            ratio_criterion(
                "with the stream-batch scheduler, against without",
                "gathered, stream-batch",
                "gathered",
                IOPS,
                Threshold::AtLeast(1.02),
            ),
        ],
        limits: LOOPBACK,
    }
}

fn msg_more_experiment() -> Experiment<BenchTask> {
    Experiment {
        name: "tcp-msg-more",
        claim: "Telling the kernel with MSG_MORE that more follows makes large transfers faster.",
        seeds: &[5],
        seen: "part of the figure for batching",
        figures: &[BYTES, IOPS, CPU],
        sides: vec![
            Variant::new(
                "writes, MSG_MORE",
                target_and_host_task(
                    "-c {last}",
                    "{target} -c {first} -o 128k -q 32 -w randwrite --overwrite",
                ),
            ),
            Variant::new(
                "writes, without",
                target_and_host_task(
                    "-c {last} --socket msg-more=no",
                    "{target}?msg-more=no -c {first} -o 128k -q 32 -w randwrite --overwrite",
                ),
            ),
            Variant::new(
                "reads, MSG_MORE",
                target_and_host_task("-c {last}", "{target} -c {first} -o 128k -q 32"),
            )
            .full_runs_only(),
            Variant::new(
                "reads, without",
                target_and_host_task(
                    "-c {last} --socket msg-more=no",
                    "{target}?msg-more=no -c {first} -o 128k -q 32",
                ),
            )
            .full_runs_only(),
        ],
        questions: vec![
            ratio_criterion(
                "writes of 128 KiB with MSG_MORE, against without",
                "writes, MSG_MORE",
                "writes, without",
                BYTES,
                Threshold::AtLeast(1.02),
            ),
            ratio_criterion(
                "reads of 128 KiB with MSG_MORE, against without",
                "reads, MSG_MORE",
                "reads, without",
                BYTES,
                Threshold::AtLeast(1.02),
            ),
        ],
        limits: LOOPBACK,
    }
}

fn read_queues_experiment() -> Experiment<BenchTask> {
    Experiment {
        name: "tcp-read-queues",
        claim: "Small reads with a connection of their own do not wait behind large writes: more of \
                them, and a shorter tail.",
        seeds: &[5],
        seen: "80 to 171 k IOPS, p99.99 from 14.2 to 1.8 ms",
        figures: &[IOPS, MEAN, TAIL, BYTES],
        sides: vec![
            Variant::new("shared", BenchTask::Mixed { serve: "-c {last}", keys: "" })
                .with_trial_length(2),
            Variant::new(
                "a connection of their own",
                BenchTask::Mixed { serve: "-c {last}", keys: "?read-queue=yes" },
            )
            .with_trial_length(2),
        ],
        questions: vec![
            ratio_criterion(
                "reads beside writes, on a connection of their own against a shared one",
                "a connection of their own",
                "shared",
                IOPS,
                Threshold::AtLeast(1.5),
            ),
            ratio_criterion(
                "their p99.99 against that on a shared one",
                "a connection of their own",
                "shared",
                TAIL,
                Threshold::AtMost(0.67),
            ),
        ],
        limits: "16 readers of 4 KiB, one at a time each, beside 1 MiB writes at depth 32, all on \
                 one thread, over loopback to a target that keeps nothing. In the seed the network \
                 was the bottleneck; here it is the two processors, which reads and writes share.",
    }
}

fn incoming_cpu_experiment() -> Experiment<BenchTask> {
    Experiment {
        name: "tcp-incoming-cpu",
        claim: "Serving a connection on the core that its packets come in by is faster than \
                spreading connections evenly.",
        seeds: &[3],
        seen: "11 to 17 % for random writes, eight cores",
        figures: &[IOPS, MEAN, CPU],
        sides: vec![
            Variant::new(
                "by incoming core",
                target_and_host_task(
                    "-c {all}",
                    "{target}?queues=8 -c {first} -P 4 -q 128 -w randwrite --overwrite",
                ),
            ),
            Variant::new(
                "spread",
                target_and_host_task(
                    "-c {all} --socket placement=spread",
                    "{target}?queues=8 -c {first} -P 4 -q 128 -w randwrite --overwrite",
                ),
            ),
        ],
        questions: vec![ratio_criterion(
            "by incoming core against spread",
            "by incoming core",
            "spread",
            IOPS,
            Threshold::AtLeast(1.02),
        )],
        limits: "Over loopback packets are received on the core of the sender, which here is the \
                 host's own: the target then shares it, while the seed's cores are the target's \
                 alone. The claim for a network card with a queue for each core cannot be shown.",
    }
}

fn busy_polling_experiment() -> Experiment<BenchTask> {
    let over = |label, perf| Variant::new(label, BenchTask::OverVeth { serve: "-c {last}", perf });
    Experiment {
        name: "tcp-busy-poll",
        claim: "Polling a receive queue of the network card from the application, and grouping the \
                connections of one queue, shortens the round trip and saves processor time.",
        seeds: &[5],
        seen: "lower latency with ADQ; the figure is a picture",
        figures: &[MEAN, CPU, IOPS],
        sides: vec![
            over("busy polling", "{target}?busy-poll=50us -c {first} -q 1"),
            over("left to interrupts", "{target} -c {first} -q 1"),
            over(
                "busy polling, 4 grouped",
                "{target}?busy-poll=50us&queues=4 -c {first} -P 4 -q 4",
            ),
            over("left to interrupts, 4", "{target}?queues=4 -c {first} -P 4 -q 4"),
        ],
        questions: vec![
            ratio_criterion(
                "mean round trip, busy polling against interrupts",
                "busy polling",
                "left to interrupts",
                MEAN,
                Threshold::AtMost(0.95),
            ),
            ratio_criterion(
                "mean round trip of 4 connections in one group, against interrupts",
                "busy polling, 4 grouped",
                "left to interrupts, 4",
                MEAN,
                Threshold::AtMost(0.95),
            ),
        ],
        limits: "Over a pair of veth cards, the target in a network namespace of its own: its \
                 receive queue is a list in memory that the sender's core fills, no interrupt \
                 crosses a bus, and the thread polls its sockets on either side. What ADQ saves on \
                 a card cannot be shown.",
    }
}
