//! Experiments: claims and what is run to test each. The sources are five talks and articles:
//!
//! | source | title |
//! |---|---|
//! | 1 | "10.39M Storage I/O Per Second From One Thread", Ben Walker and Jim Harris, 2019 |
//! | 2 | the talk on it, Storage Developer Conference 2019 |
//! | 3 | "SPDK NVMe over TCP on Arm" |
//! | 4 | "High performance storage devices in kernel", Evgeny Budilovsky, 2016 |
//! | 5 | "Bringing NVMe/TCP Up to Speed", Sagi Grimberg |

mod block_layer;
mod build_variants;
mod driver;
mod idle;
mod memory_layout;
mod network;

use crate::experiment::{Criterion, Experiment, Metric, Operand, Threshold, Unit};

use super::BenchTask;
use tenmil_base::Error;

/// Titles of the sources, by number.
pub(crate) const SOURCES: [&str; 5] = [
    "10.39M Storage I/O Per Second From One Thread (article)",
    "10 Million I/Ops From a Single Thread (talk)",
    "Optimizing SPDK NVMe over TCP on Arm",
    "High performance storage devices in kernel (slides on blk-mq)",
    "Bringing NVMe/TCP Up to Speed (slides)",
];

const IOPS: Metric = steady_metric("iops", "IOPS", Unit::PerSecond);
const RATE: Metric = steady_metric("rate", "per second", Unit::PerSecond);
const EACH: Metric = steady_metric("ns", "each", Unit::Ns);
const PER_IO: Metric = steady_metric("ns_per_io", "per I/O", Unit::Ns);
const MEAN: Metric = steady_metric("mean", "mean latency", Unit::Ns);
const MEDIAN: Metric = steady_metric("p50", "median latency", Unit::Ns);
const P99: Metric = tail_metric("p99", "p99", Unit::Ns);
const TAIL: Metric = tail_metric("p9999", "p99.99", Unit::Ns);
const CPU: Metric = steady_metric("cpu", "processors used", Unit::Processors);
const BYTES: Metric = steady_metric("bytes_per_s", "data", Unit::BytesPerSecond);

/// Metric that a disturbance changes at most in proportion to its duration.
const fn steady_metric(key: &'static str, title: &'static str, unit: Unit) -> Metric {
    Metric { key, title, unit, is_tail: false }
}

/// Metric that a single disturbance can determine.
const fn tail_metric(key: &'static str, title: &'static str, unit: Unit) -> Metric {
    Metric { key, title, unit, is_tail: true }
}

/// All experiments, in the order of the report.
pub(crate) fn all_experiments() -> Vec<Experiment<BenchTask>> {
    let parts = [
        driver::driver_experiments(),
        memory_layout::memory_experiments(),
        block_layer::block_layer_experiments(),
        idle::idle_experiments(),
        network::network_experiments(),
        build_variants::build_experiments(),
    ];
    parts.into_iter().flatten().collect()
}

/// Experiments with these names, in the order of the report. All without a name.
pub fn experiments_by_name(names: &[String]) -> Result<Vec<Experiment<BenchTask>>, Error> {
    let all = all_experiments();
    if let Some(unknown) = names.iter().find(|name| all.iter().all(|known| known.name != **name)) {
        let known: Vec<&str> = all.iter().map(|experiment| experiment.name).collect();
        return Err(Error::usage(format!(
            "--only {unknown}: no experiment has that name, expected some of {}",
            known.join(", ")
        ))
        .with_hint("`tenmil reproduce --list` shows the claim of each"));
    }
    let is_asked = |name: &str| names.is_empty() || names.iter().any(|asked| asked == name);
    Ok(all.into_iter().filter(|experiment| is_asked(experiment.name)).collect())
}

/// Criterion on the ratio of `of` to `to` in the same round.
const fn ratio_criterion(
    question: &'static str,
    of: &'static str,
    to: &'static str,
    figure: Metric,
    bound: Threshold,
) -> Criterion {
    let compared = Operand::Ratio { of, to, figure: figure.key };
    Criterion { question, compared, bound, is_tail: figure.is_tail }
}

/// Criterion on a metric of one variant.
const fn single_variant_criterion(
    question: &'static str,
    side: &'static str,
    figure: Metric,
    bound: Threshold,
) -> Criterion {
    let compared = Operand::Alone { side, figure: figure.key };
    Criterion { question, compared, bound, is_tail: figure.is_tail }
}

#[cfg(test)]
mod tests;

/// Arguments of every variant that runs `tenmil perf`, each with the name of its experiment.
pub fn perf_arguments_of_variants() -> Vec<(&'static str, &'static str)> {
    let of = |work: &BenchTask| match *work {
        BenchTask::Perf(words)
        | BenchTask::Served { perf: words, .. }
        | BenchTask::OverVeth { perf: words, .. }
        | BenchTask::Built { perf: words, .. } => vec![words],
        BenchTask::Phases(phases) => phases.to_vec(),
        BenchTask::Mixed { .. } | BenchTask::Loop { .. } | BenchTask::Fio(_) => Vec::new(),
    };
    let sides = |experiment: Experiment<BenchTask>| {
        let words = experiment.sides.iter().flat_map(|side| of(&side.work)).collect::<Vec<_>>();
        words.into_iter().map(move |words| (experiment.name, words))
    };
    all_experiments().into_iter().flat_map(sides).collect()
}
