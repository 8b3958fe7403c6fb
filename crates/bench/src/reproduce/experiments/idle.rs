//! Experiments on idle threads: polling and sleeping.

use crate::experiment::{Experiment, Threshold, Variant};

use super::{CPU, IOPS, MEAN, P99, TAIL, ratio_criterion};
use crate::reproduce::BenchTask;

pub(super) fn idle_experiments() -> Vec<Experiment<BenchTask>> {
    vec![dynamic_scheduler_experiment(), polling_versus_sleeping_experiment()]
}

/// Arguments for two modeled SSDs at a fixed rate of reads per second.
macro_rules! load {
    ($rate:literal, $how:literal) => {
        concat!(
            "model:p4600?size=64m&seed=1 model:p4600?size=64m&seed=2 -c {all} --rate ",
            $rate,
            " ",
            $how
        )
    };
}

fn dynamic_scheduler_experiment() -> Experiment<BenchTask> {
    Experiment {
        name: "dynamic-scheduler",
        claim: "A scheduler that gathers threads which do little, and lets the cores sleep that are \
                left, keeps the throughput and saves processor time.",
        seeds: &[3],
        seen: "no figure",
        figures: &[CPU, IOPS, P99],
        sides: vec![
            Variant::new(
                "always polling",
                BenchTask::Phases(&[
                    load!("1k", "--poll always"),
                    load!("50k", "--poll always"),
                    load!("1k", "--poll always"),
                ]),
            )
            .with_trial_length(3),
            Variant::new(
                "dynamic",
                BenchTask::Phases(&[
                    load!("1k", "--scheduler dynamic?period=50ms"),
                    load!("50k", "--scheduler dynamic?period=50ms"),
                    load!("1k", "--scheduler dynamic?period=50ms"),
                ]),
            )
            .with_trial_length(3),
        ],
        questions: vec![
            ratio_criterion(
                "processor time, dynamic against always polling",
                "dynamic",
                "always polling",
                CPU,
                Threshold::AtMost(0.5),
            ),
            ratio_criterion(
                "throughput, dynamic against always polling",
                "dynamic",
                "always polling",
                IOPS,
                Threshold::AtLeast(0.98),
            ),
        ],
        limits: "The load rises and falls by three runs one after the other. The frequency of cores, \
                 which the seed lowers as well, can only be set by root where the kernel has a \
                 frequency driver; virtual machines have none. `tenmil perf --governor` does it.",
    }
}

fn polling_versus_sleeping_experiment() -> Experiment<BenchTask> {
    let over = |label, words| Variant::new(label, BenchTask::Perf(words));
    Experiment {
        name: "polling",
        claim: "Sleeping for three quarters of the usual latency before looking saves most of the \
                processor time of polling and keeps its latency.",
        seeds: &[2],
        seen: "no figure; the kernel's hybrid polling is named as a way",
        figures: &[CPU, MEAN, TAIL, IOPS],
        sides: vec![
            over("always", "model:p4600?size=64m -q 1 --poll always"),
            over("adaptive", "model:p4600?size=64m -q 1 --poll adaptive"),
            over("hybrid", "model:p4600?size=64m -q 1 --poll hybrid"),
        ],
        questions: vec![
            ratio_criterion(
                "processor time, hybrid against always",
                "hybrid",
                "always",
                CPU,
                Threshold::AtMost(0.75),
            ),
            ratio_criterion(
                "mean latency, hybrid against always",
                "hybrid",
                "always",
                MEAN,
                Threshold::AtMost(1.1),
            ),
            ratio_criterion(
                "processor time, adaptive against always",
                "adaptive",
                "always",
                CPU,
                Threshold::AtMost(0.75),
            ),
            ratio_criterion(
                "mean latency, adaptive against always",
                "adaptive",
                "always",
                MEAN,
                Threshold::AtMost(1.1),
            ),
        ],
        limits: "One read at a time from a model of an SSD that takes 85 µs. How well a thread \
                 sleeps for so short a time is up to the kernel's timers, and in a virtual machine \
                 to its host's.",
    }
}
