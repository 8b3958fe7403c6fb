//! Block-layer comparison over a null device, as in null_blk (source 4 of `reproduce`).
//!
//! With one lock, threads block each other; with a queue each, they do not. The device costs next
//! to nothing, so the difference is the cost of the layer.

use std::sync::Arc;

use tenmil_base::Span;
use tenmil_block::QueueMap;
use tenmil_linux::{Clock, CpuList};

use super::TickFn;
use super::cpu_placement::CoreAssignment;
use super::device_set::DeviceSet;
use crate::perf::perf_options::{BlockLayerMode, BlockLayerOptions, PerfOptions};
use crate::perf::perf_result::{NullBlkPoint, NullBlkResult, NullBlkRow, per_second};
use crate::perf::progress::{RunPhase, RunProgress};
use tenmil_base::Error;
use tenmil_devices::Uri;

/// Measures every mode with 1 to all threads, if `options` request it. SIGINT ends it early, with
/// the results so far.
pub(super) fn compare_block_layer_modes(
    options: &PerfOptions,
    clock: Clock,
    watch: TickFn<'_>,
) -> Result<Option<NullBlkResult>, Error> {
    let Some(time) = options.null_blk else { return Ok(None) };
    let cores: Vec<u32> = CpuList::allowed_cpus().iter().collect();
    let mut rows = Vec::new();
    for (layer, contexts) in modes_to_measure(cores.len()) {
        let mut points = Vec::new();
        for threads in 1..=cores.len() {
            if tenmil_linux::signal::is_stop_requested() {
                break;
            }
            let options = PerfOptions {
                uris: vec![Uri::Block(tenmil_block::uri::Uri::new("null", ""))],
                cores: cores[..threads].iter().copied().collect(),
                layer: BlockLayerOptions {
                    layer: Some(layer),
                    map: contexts.map(QueueMap::with_default_contexts),
                    ..BlockLayerOptions::default()
                },
                depth: options.depth,
                time,
                warm_up: Span::default(),
                poll: options.poll,
                seed: options.seed,
                ..PerfOptions::default()
            };
            points.push(measure_block_layer_mode(&options, threads, clock, watch)?);
        }
        rows.push(NullBlkRow { mode: layer.name(), contexts, points });
    }
    Ok(Some(NullBlkResult { depth: options.depth, time, rows }))
}

/// Modes to measure; `mq` with 1, 2 and as many hardware contexts as threads.
fn modes_to_measure(threads: usize) -> Vec<(BlockLayerMode, Option<u32>)> {
    let all = u32::try_from(threads).unwrap_or(u32::MAX);
    let mut modes = vec![(BlockLayerMode::Single, None), (BlockLayerMode::Bypass, None)];
    let mut contexts = vec![1, 2.min(all), all];
    contexts.dedup();
    modes.extend(contexts.into_iter().map(|count| (BlockLayerMode::Mq, Some(count))));
    modes
}

fn measure_block_layer_mode(
    options: &PerfOptions,
    threads: usize,
    clock: Clock,
    watch: TickFn<'_>,
) -> Result<NullBlkPoint, Error> {
    let places = CoreAssignment::from_options(options, &CpuList::allowed_cpus());
    let progress = Arc::new(RunProgress::new(threads));
    let mut rig = DeviceSet::open_devices(options, &places, clock)?;
    progress.set_phase(RunPhase::NullBlk);
    let tally = rig.run_load(options, &places, &progress, watch)?;
    let waited = rig.lock_wait_total();
    rig.shut_down();
    let (ios, elapsed) = tally.ios_and_elapsed();
    let spent = elapsed.ns.saturating_mul(threads as u64);
    Ok(NullBlkPoint {
        threads,
        iops: per_second(ios, elapsed),
        lock_wait_share: fraction(waited.ns, spent),
    })
}

/// Fraction of `part` in `whole`. Zero if `whole` is zero.
#[expect(clippy::cast_precision_loss, reason = "shown to people")]
fn fraction(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { (part as f64 / whole as f64).min(1.0) }
}

#[cfg(test)]
mod tests {
    use super::{BlockLayerMode, modes_to_measure};

    #[test]
    fn no_hardware_context_count_is_measured_twice() {
        let contexts = |threads| {
            let modes = modes_to_measure(threads)
                .into_iter()
                .filter(|(layer, _)| *layer == BlockLayerMode::Mq);
            modes.filter_map(|(_, contexts)| contexts).collect::<Vec<_>>()
        };
        assert_eq!(contexts(1), [1]);
        assert_eq!(contexts(2), [1, 2]);
        assert_eq!(contexts(8), [1, 2, 8]);
    }
}
