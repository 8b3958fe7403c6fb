//! The experiment of the fourth seed: modes of the block layer over a device that only answers.
//!
//! With one lock, threads are in each other's way; with a queue each, they are not. The device costs
//! next to nothing, so what differs is what the layer costs.

use std::sync::Arc;

use base::Span;
use block::QueueMap;
use host::{Clock, Cores};

use super::Watch;
use super::places::Places;
use super::rig::Rig;
use crate::perf::options::{Layer, LayerOptions, PerfOptions};
use crate::perf::outcome::{NullBlkOutcome, NullBlkPoint, NullBlkRow, per_second};
use crate::perf::progress::{Phase, Progress};
use crate::{Refused, Uri};

/// Measures every mode with 1 to all threads, if `options` ask for it. Ends early when somebody
/// presses Ctrl-C, with what there is.
pub(super) fn compare(
    options: &PerfOptions,
    clock: Clock,
    watch: Watch<'_>,
) -> Result<Option<NullBlkOutcome>, Refused> {
    let Some(time) = options.null_blk else { return Ok(None) };
    let cores: Vec<u32> = Cores::allowed().iter().collect();
    let mut rows = Vec::new();
    for (layer, contexts) in modes(cores.len()) {
        let mut points = Vec::new();
        for threads in 1..=cores.len() {
            if host::signal::interrupted() {
                break;
            }
            let options = PerfOptions {
                uris: vec![Uri::Block(block::uri::Uri::new("null", ""))],
                cores: cores[..threads].iter().copied().collect(),
                layer: LayerOptions {
                    layer: Some(layer),
                    map: contexts.map(QueueMap::of),
                    ..LayerOptions::default()
                },
                depth: options.depth,
                time,
                warm_up: Span::default(),
                poll: options.poll,
                seed: options.seed,
                ..PerfOptions::default()
            };
            points.push(measure(&options, threads, clock, watch)?);
        }
        rows.push(NullBlkRow { mode: layer.name(), contexts, points });
    }
    Ok(Some(NullBlkOutcome { depth: options.depth, time, rows }))
}

/// The modes, and with `mq` 1, 2 and as many hardware contexts as there are threads.
fn modes(threads: usize) -> Vec<(Layer, Option<u32>)> {
    let all = u32::try_from(threads).unwrap_or(u32::MAX);
    let mut modes = vec![(Layer::Single, None), (Layer::Bypass, None)];
    let mut contexts = vec![1, 2.min(all), all];
    contexts.dedup();
    modes.extend(contexts.into_iter().map(|count| (Layer::Mq, Some(count))));
    modes
}

fn measure(
    options: &PerfOptions,
    threads: usize,
    clock: Clock,
    watch: Watch<'_>,
) -> Result<NullBlkPoint, Refused> {
    let places = Places::choose(options, &Cores::allowed());
    let progress = Arc::new(Progress::new(threads));
    let mut rig = Rig::bring_up(options, &places, clock)?;
    progress.enter(Phase::NullBlk);
    let tally = rig.load(options, &places, &progress, watch)?;
    let waited = rig.lock_wait();
    rig.shut_down();
    let (ios, elapsed) = tally.sums();
    let spent = elapsed.ns.saturating_mul(threads as u64);
    Ok(NullBlkPoint {
        threads,
        iops: per_second(ios, elapsed),
        lock_wait_share: share(waited.ns, spent),
    })
}

/// `part` of `whole`; zero if there is no whole.
#[expect(clippy::cast_precision_loss, reason = "shown to people")]
fn share(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { (part as f64 / whole as f64).min(1.0) }
}

#[cfg(test)]
mod tests {
    use super::{Layer, modes};

    #[test]
    fn no_number_of_contexts_is_measured_twice() {
        let contexts = |threads| {
            let modes = modes(threads).into_iter().filter(|(layer, _)| *layer == Layer::Mq);
            modes.filter_map(|(_, contexts)| contexts).collect::<Vec<_>>()
        };
        assert_eq!(contexts(1), [1]);
        assert_eq!(contexts(2), [1, 2]);
        assert_eq!(contexts(8), [1, 2, 8]);
    }
}
