//! What is claimed, and what is run for it. The seeds are five talks and articles:
//!
//! | seed | what it is |
//! |---|---|
//! | 1 | "10.39M Storage I/O Per Second From One Thread", Ben Walker and Jim Harris, 2019 |
//! | 2 | the talk on it, Storage Developer Conference 2019 |
//! | 3 | "SPDK NVMe over TCP on Arm" |
//! | 4 | "High performance storage devices in kernel", Evgeny Budilovsky, 2016 |
//! | 5 | "Bringing NVMe/TCP Up to Speed", Sagi Grimberg |

mod driver;
mod elsewhere;
mod layer;
mod memory;
mod network;
mod waiting;

use evidence::{Bound, Compared, Experiment, Figure, Question, Unit};

use super::Work;
use crate::Refused;

/// What the seeds are called, by number.
pub(crate) const SEEDS: [&str; 5] = [
    "10.39M Storage I/O Per Second From One Thread (article)",
    "10 Million I/Ops From a Single Thread (talk)",
    "Optimizing SPDK NVMe over TCP on Arm",
    "High performance storage devices in kernel (slides on blk-mq)",
    "Bringing NVMe/TCP Up to Speed (slides)",
];

const IOPS: Figure = steady("iops", "IOPS", Unit::PerSecond);
const RATE: Figure = steady("rate", "per second", Unit::PerSecond);
const EACH: Figure = steady("ns", "each", Unit::Ns);
const PER_IO: Figure = steady("ns_per_io", "per I/O", Unit::Ns);
const MEAN: Figure = steady("mean", "mean latency", Unit::Ns);
const MEDIAN: Figure = steady("p50", "median latency", Unit::Ns);
const P99: Figure = tail("p99", "p99", Unit::Ns);
const TAIL: Figure = tail("p9999", "p99.99", Unit::Ns);
const CPU: Figure = steady("cpu", "processors used", Unit::Processors);
const BYTES: Figure = steady("bytes_per_s", "data", Unit::BytesPerSecond);

/// A figure that a disturbance changes by no more than the time that it took.
const fn steady(key: &'static str, title: &'static str, unit: Unit) -> Figure {
    Figure { key, title, unit, is_tail: false }
}

/// A figure that one disturbance may make.
const fn tail(key: &'static str, title: &'static str, unit: Unit) -> Figure {
    Figure { key, title, unit, is_tail: true }
}

/// All of them, in the order of the page.
pub(crate) fn all() -> Vec<Experiment<Work>> {
    let parts = [
        driver::experiments(),
        memory::experiments(),
        layer::experiments(),
        waiting::experiments(),
        network::experiments(),
        elsewhere::experiments(),
    ];
    parts.into_iter().flatten().collect()
}

/// Those with these names, in the order of the page; all of them without a name.
pub(crate) fn choose(names: &[String]) -> Result<Vec<Experiment<Work>>, Refused> {
    let all = all();
    if let Some(unknown) = names.iter().find(|name| all.iter().all(|known| known.name != **name)) {
        let known: Vec<&str> = all.iter().map(|experiment| experiment.name).collect();
        return Err(Refused::caller(format!(
            "--only {unknown}: no experiment has that name, expected some of {}",
            known.join(", ")
        ))
        .with_hint("`tenmil evidence --list` says what each of them claims"));
    }
    let is_asked = |name: &str| names.is_empty() || names.iter().any(|asked| asked == name);
    Ok(all.into_iter().filter(|experiment| is_asked(experiment.name)).collect())
}

/// `of` against `to`, in the same round.
const fn ratio(
    asks: &'static str,
    of: &'static str,
    to: &'static str,
    figure: Figure,
    bound: Bound,
) -> Question {
    let compared = Compared::Ratio { of, to, figure: figure.key };
    Question { asks, compared, bound, is_tail: figure.is_tail }
}

/// A figure of one side.
const fn alone(asks: &'static str, side: &'static str, figure: Figure, bound: Bound) -> Question {
    let compared = Compared::Alone { side, figure: figure.key };
    Question { asks, compared, bound, is_tail: figure.is_tail }
}

#[cfg(test)]
mod tests;
