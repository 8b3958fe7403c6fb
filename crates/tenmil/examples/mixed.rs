//! Small reads beside large writes on one thread: 16 readers of 4 KiB at depth 1 each, first alone
//! and then beside a writer of 1 MiB at depth 32. Prints how much the readers slow down.
//!
//! ```text
//! cargo run --release --example mixed -- 'tcp://HOST:PORT/NQN' 5
//! cargo run --release --example mixed -- 'tcp://HOST:PORT/NQN?read-queue=yes' 5
//! ```

#![allow(clippy::disallowed_methods, reason = "it is a program of its own, with the clock of std")]

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tenmil::{Access, Device, Runtime};

const READERS: u64 = 16;
const READ_BYTES: u32 = 4 << 10;
const WRITES: u64 = 32;
const WRITE_BYTES: u32 = 1 << 20;

/// Reads at pseudo-random addresses until `end`, one at a time. Returns the latencies.
async fn read_until(
    device: Device,
    seed: u64,
    end: Instant,
) -> Result<Vec<Duration>, tenmil::Error> {
    let (mut times, mut random) = (Vec::new(), seed);
    let mut buffer = device.buffer(READ_BYTES)?;
    let (block_size, block_count) = (device.limits().block_size, device.limits().block_count);
    let blocks = u64::from(READ_BYTES / block_size);
    let mut begun = Instant::now();
    while begun < end {
        random =
            random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        buffer = device.read((random >> 16) % (block_count / blocks) * blocks, buffer).await?;
        times.push(begun.elapsed());
        begun = Instant::now();
    }
    Ok(times)
}

/// Writes sequentially until `end`, together with the other writers. Returns the number of writes.
async fn write_until(
    device: Device,
    next: Arc<AtomicU64>,
    end: Instant,
) -> Result<u64, tenmil::Error> {
    let mut count = 0;
    let mut buffer = device.buffer(WRITE_BYTES)?;
    let (block_size, block_count) = (device.limits().block_size, device.limits().block_count);
    let blocks = u64::from(WRITE_BYTES / block_size);
    while Instant::now() < end {
        let number = next.fetch_add(1, Ordering::Relaxed) % (block_count / blocks);
        buffer = device.write(number * blocks, buffer).await?;
        count += 1;
    }
    Ok(count)
}

/// Runs one part of the test, and prints the latencies of the readers and the rate of the writer.
fn run_load_part(
    rt: &Runtime,
    device: &Device,
    time: Duration,
    writes: u64,
) -> Result<(), Box<dyn Error>> {
    let (end, next) = (Instant::now() + time, Arc::new(AtomicU64::new(0)));
    let reader = |seed| device.spawn(read_until(device.clone(), seed, end));
    let readers = (0..READERS).map(reader).collect::<Result<Vec<_>, _>>()?;
    let writer = |_| device.spawn(write_until(device.clone(), Arc::clone(&next), end));
    let writers = (0..writes).map(writer).collect::<Result<Vec<_>, _>>()?;
    let (mut times, mut written) = (Vec::new(), 0);
    for reader in readers {
        times.extend(rt.block_on(reader)??);
    }
    for writer in writers {
        written += rt.block_on(writer)??;
    }
    times.sort_unstable();
    let percentile =
        |of_10k: usize| times.get(times.len() * of_10k / 10_000).copied().unwrap_or_default();
    let name = if writes == 0 { "alone" } else { "beside" };
    println!(
        "{name}: reads_per_s {:.0} p50_ns {} p9999_ns {} writes_mib_per_s {:.0}",
        times.len() as f64 / time.as_secs_f64(),
        percentile(5_000).as_nanos(),
        percentile(9_999).as_nanos(),
        written as f64 / time.as_secs_f64()
    );
    Ok(())
}

/// Runs both parts on the device that `uri` names.
pub(crate) fn run_mixed_load(uri: &str, time: Duration) -> Result<(), Box<dyn Error>> {
    let rt = Runtime::new()?;
    let device = rt.block_on(rt.open(uri, Access::ReadWrite))?;
    run_load_part(&rt, &device, time, 0)?;
    run_load_part(&rt, &device, time, WRITES)
}

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let uri = arguments.next().unwrap_or_else(|| "ram:64m".to_owned());
    let seconds = arguments.next().map_or(Ok(5), |text| text.parse())?;
    run_mixed_load(&uri, Duration::from_secs(seconds))
}
