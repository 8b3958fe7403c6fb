//! Small reads beside large writes on one thread, as in source 5: 16 readers of 4 KiB at depth 1
//! each, and a writer of 1 MiB at depth 32.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tenmil_base::{Histogram, Instant, Random, Span};
use tenmil_linux::{Clock, CpuList};

use crate::perf::perf_result::per_second;
use tenmil::{Access, Device, Runtime};
use tenmil_base::Error;

const READERS: u64 = 16;
const READ_BYTES: u32 = 4 << 10;
const WRITES: u64 = 32;
const WRITE_BYTES: u32 = 1 << 20;
/// Buffer memory of all tasks.
const BUFFERS_BYTES: u32 = 40 << 20;

/// State of the mixed load.
#[derive(Clone)]
struct MixedLoad {
    device: Device,
    clock: Clock,
    end: Instant,
    /// Number of the next write.
    next: Arc<AtomicU64>,
}

/// Loads the device that `uri` names from the first core. Returns the metrics of readers and
/// writer.
#[expect(clippy::cast_precision_loss, reason = "shown to people")]
pub(super) fn run_mixed_load(
    uri: &str,
    clock: Clock,
    time: Span,
) -> Result<BTreeMap<String, f64>, Error> {
    let refuse = |what: &dyn std::fmt::Display| Error::environment(format!("mixed load: {what}"));
    let core = CpuList::allowed_cpus().iter().next();
    let rt = Runtime::builder().cores(core).buffer_bytes(BUFFERS_BYTES).start();
    let rt = rt.map_err(|why| refuse(&why))?;
    let device = rt.block_on(rt.open(uri, Access::ReadWrite)).map_err(|why| refuse(&why))?;
    let begun = clock.now();
    let load = MixedLoad { device, clock, end: begun.after(time), next: Arc::default() };
    let reader = |seed| load.device.spawn(run_reader(load.clone(), seed));
    let readers = (0..READERS).map(reader).collect::<Result<Vec<_>, _>>();
    let writer = |_| load.device.spawn(run_writer(load.clone()));
    let writers = (0..WRITES).map(writer).collect::<Result<Vec<_>, _>>();
    let (mut reads, mut writes) = (Histogram::new(), Histogram::new());
    for (sum, handles) in [(&mut reads, readers), (&mut writes, writers)] {
        for handle in handles.map_err(|why| refuse(&why))? {
            let times = rt.block_on(handle).map_err(|why| refuse(&why))?;
            sum.merge(&times.map_err(|why| refuse(&why))?);
        }
    }
    Ok(BTreeMap::from([
        ("iops".to_owned(), per_second(reads.count(), time)),
        ("mean".to_owned(), reads.mean()),
        ("p9999".to_owned(), reads.percentile(999_900) as f64),
        ("bytes_per_s".to_owned(), per_second(writes.count(), time) * f64::from(WRITE_BYTES)),
    ]))
}

/// Reads at random addresses, one at a time.
async fn run_reader(load: MixedLoad, seed: u64) -> Result<Histogram, Error> {
    let MixedLoad { device, clock, end, .. } = load;
    let (mut times, mut random) = (Histogram::new(), Random::new(seed));
    let mut buffer = device.buffer(READ_BYTES)?;
    let (places, blocks) = slot_count_and_blocks_per_slot(&device, READ_BYTES);
    while clock.now() < end {
        let begun = clock.now();
        buffer = device.read(random.below(places) * blocks, buffer).await?;
        times.record(clock.now().since(begun).ns);
    }
    Ok(times)
}

/// Writes sequentially, together with the other writers.
async fn run_writer(load: MixedLoad) -> Result<Histogram, Error> {
    let MixedLoad { device, clock, end, next } = load;
    let mut times = Histogram::new();
    let mut buffer = device.buffer(WRITE_BYTES)?;
    let (places, blocks) = slot_count_and_blocks_per_slot(&device, WRITE_BYTES);
    while clock.now() < end {
        let begun = clock.now();
        let number = next.fetch_add(1, Ordering::Relaxed) % places;
        buffer = device.write(number * blocks, buffer).await?;
        times.record(clock.now().since(begun).ns);
    }
    Ok(times)
}

/// Number of slots of `len_bytes` bytes on the device, and blocks per slot.
fn slot_count_and_blocks_per_slot(device: &Device, len_bytes: u32) -> (u64, u64) {
    let limits = device.limits();
    let blocks = u64::from(len_bytes / limits.block_size);
    (limits.block_count / blocks, blocks)
}

#[cfg(test)]
mod tests {
    use tenmil_base::Span;
    use tenmil_linux::Clock;

    use super::run_mixed_load;

    #[test]
    fn readers_and_writer_both_access_the_device() {
        let figures = run_mixed_load("ram:64m", Clock::start(), Span::from_ms(60)).unwrap();
        assert!(figures["iops"] > 0.0 && figures["bytes_per_s"] > 0.0, "{figures:?}");
        assert!(figures["p9999"] >= figures["mean"], "{figures:?}");
        assert!(run_mixed_load("nothing:", Clock::start(), Span::from_ms(1)).is_err());
    }
}
