//! Small reads beside large writes on one thread, as the fifth seed has them: 16 readers of 4 KiB,
//! one at a time each, and a writer of 1 MiB, 32 at a time.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use base::{Histogram, Instant, Random, Span};
use host::{Clock, Cores};
use reactor::task::Tasks;
use reactor::{ReactorOptions, Reactors, ThreadPlan};

use crate::Refused;
use crate::aio::{Claim, Device, NotDone, Opener};
use crate::perf::outcome::per_second;

const READERS: u64 = 16;
const READ_BYTES: u32 = 4 << 10;
const WRITES: u64 = 32;
const WRITE_BYTES: u32 = 1 << 20;
/// Room for the buffers of all of them.
const BUFFERS_BYTES: u32 = 40 << 20;
/// Tasks at most.
const TASKS_MAX: u32 = 64;

/// What takes turns with whom, until when.
#[derive(Clone)]
struct Load {
    device: Device,
    clock: Clock,
    end: Instant,
    /// Where the next write goes.
    next: Arc<AtomicU64>,
}

/// Loads the device that `uri` names from the first core: what the readers and the writer had of it.
#[expect(clippy::cast_precision_loss, reason = "shown to people")]
pub(super) fn run(uri: &str, clock: Clock, time: Span) -> Result<BTreeMap<String, f64>, Refused> {
    let refuse = |what: &dyn std::fmt::Display| Refused::machine(format!("mixed load: {what}"));
    let cores: Cores = Cores::allowed().iter().take(1).collect();
    let reactors =
        Reactors::start(&cores, &ReactorOptions::default(), &clock).map_err(|why| refuse(&why))?;
    let thread = reactors.spawn(ThreadPlan::new("storage")).map_err(|why| refuse(&why))?;
    let tasks = Tasks::start(&thread, "tasks", TASKS_MAX)
        .map_err(|_| refuse(&"its thread takes no messages"))?;
    let opener = Opener::with_buffers(&clock, BUFFERS_BYTES).map_err(|why| refuse(&why))?;
    let parsed = uri.parse().map_err(|why| refuse(&why))?;
    let device =
        opener.open(&parsed, Claim::WriteOnce, &thread).wait().map_err(|why| refuse(&why))?;
    let begun = clock.now();
    let load = Load { device, clock, end: begun.after(time), next: Arc::default() };
    let mut handles = Vec::new();
    for seed in 0..READERS {
        handles.push(
            tasks.spawn(read(load.clone(), seed)).map_err(|_| refuse(&"no room for a task"))?,
        );
    }
    let mut writing = Vec::new();
    for _ in 0..WRITES {
        writing.push(tasks.spawn(write(load.clone())).map_err(|_| refuse(&"no room for a task"))?);
    }
    let (mut reads, mut writes) = (Histogram::new(), Histogram::new());
    for (sum, handles) in [(&mut reads, handles), (&mut writes, writing)] {
        for handle in handles {
            let times = handle.wait().map_err(|_| refuse(&"a task has gone"))?;
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

/// Reads somewhere, one after the other.
async fn read(load: Load, seed: u64) -> Result<Histogram, NotDone> {
    let Load { device, clock, end, .. } = load;
    let (mut times, mut random) = (Histogram::new(), Random::new(seed));
    let Some(mut buffer) = device.buffer(READ_BYTES) else { return Ok(times) };
    let (places, blocks) = places(&device, READ_BYTES);
    while clock.now() < end {
        let begun = clock.now();
        buffer = device.read(random.below(places) * blocks, buffer).await?;
        times.record(clock.now().since(begun).ns);
    }
    Ok(times)
}

/// Writes from one end to the other, in company.
async fn write(load: Load) -> Result<Histogram, NotDone> {
    let Load { device, clock, end, next } = load;
    let mut times = Histogram::new();
    let Some(mut buffer) = device.buffer(WRITE_BYTES) else { return Ok(times) };
    let (places, blocks) = places(&device, WRITE_BYTES);
    while clock.now() < end {
        let begun = clock.now();
        let number = next.fetch_add(1, Ordering::Relaxed) % places;
        buffer = device.write(number * blocks, buffer).await?;
        times.record(clock.now().since(begun).ns);
    }
    Ok(times)
}

/// How many places of so many bytes a device has, and the blocks of each.
fn places(device: &Device, len_bytes: u32) -> (u64, u64) {
    let limits = device.limits();
    let blocks = u64::from(len_bytes / limits.block_size);
    (limits.block_count / blocks, blocks)
}

#[cfg(test)]
mod tests {
    use base::Span;
    use host::Clock;

    use super::run;

    #[test]
    fn readers_and_writer_both_have_something_of_the_device() {
        let figures = run("ram:64m", Clock::start(), Span::from_ms(60)).unwrap();
        assert!(figures["iops"] > 0.0 && figures["bytes_per_s"] > 0.0, "{figures:?}");
        assert!(figures["p9999"] >= figures["mean"], "{figures:?}");
        assert!(run("nothing:", Clock::start(), Span::from_ms(1)).is_err());
    }
}
