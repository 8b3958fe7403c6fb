//! Small reads beside large writes on one thread: 16 readers of 4 KiB at depth 1 each, first alone
//! and then beside a writer of 1 MiB at depth 32. Prints how much the readers slow down.
//!
//! ```text
//! cargo run --release --example mixed -- 'tcp://HOST:PORT/NQN' 5
//! cargo run --release --example mixed -- 'tcp://HOST:PORT/NQN?read-queue=yes' 5
//! ```

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tenmil::aio::{Claim, Device, IoError, Opener};
use tenmil_base::{Histogram, Instant, Random, Span};
use tenmil_linux::{Clock, CpuList};
use tenmil_reactor::task::ExecutorHandle;
use tenmil_reactor::{ReactorOptions, Reactors, ThreadBuilder};

const READERS: u64 = 16;
const READ_BYTES: u32 = 4 << 10;
const WRITES: u64 = 32;
const WRITE_BYTES: u32 = 1 << 20;

/// Reads at random addresses until `end`, one at a time.
async fn read(device: Device, clock: Clock, seed: u64, end: Instant) -> Result<Histogram, IoError> {
    let (mut times, mut random) = (Histogram::new(), Random::new(seed));
    let mut buffer = device.buffer(READ_BYTES).expect("memory for a buffer");
    let (block_size, block_count) = (device.limits().block_size, device.limits().block_count);
    let blocks = u64::from(READ_BYTES / block_size);
    while clock.now() < end {
        let begun = clock.now();
        buffer = device.read(random.below(block_count / blocks) * blocks, buffer).await?;
        times.record(clock.now().since(begun).ns);
    }
    Ok(times)
}

/// Writes sequentially until `end`, together with the other writers.
async fn write(
    device: Device,
    clock: Clock,
    next: Arc<AtomicU64>,
    end: Instant,
) -> Result<Histogram, IoError> {
    let mut times = Histogram::new();
    let mut buffer = device.buffer(WRITE_BYTES).expect("memory for a buffer");
    let (block_size, block_count) = (device.limits().block_size, device.limits().block_count);
    let blocks = u64::from(WRITE_BYTES / block_size);
    while clock.now() < end {
        let begun = clock.now();
        let number = next.fetch_add(1, Ordering::Relaxed) % (block_count / blocks);
        buffer = device.write(number * blocks, buffer).await?;
        times.record(clock.now().since(begun).ns);
    }
    Ok(times)
}

/// Runs one part of the test and returns the latencies of readers and writer.
fn part(
    tasks: &ExecutorHandle,
    device: &Device,
    clock: Clock,
    time: Span,
    writes: u64,
) -> Result<[Histogram; 2], Box<dyn Error>> {
    let (end, next) = (clock.now().after(time), Arc::new(AtomicU64::new(0)));
    let mut both = [Vec::new(), Vec::new()];
    for seed in 0..READERS {
        both[0].push(tasks.spawn(read(device.clone(), clock, seed, end))?);
    }
    for _ in 0..writes {
        both[1].push(tasks.spawn(write(device.clone(), clock, Arc::clone(&next), end))?);
    }
    let mut times = [Histogram::new(), Histogram::new()];
    for (times, handles) in times.iter_mut().zip(both) {
        for handle in handles {
            times.merge(&handle.wait()??);
        }
    }
    Ok(times)
}

/// Runs both parts on the device that `uri` names.
pub(crate) fn run(uri: &str, time: Span) -> Result<(), Box<dyn Error>> {
    let clock = Clock::start();
    let reactors = Reactors::start(&CpuList::allowed(), &ReactorOptions::default(), &clock)?;
    let thread = reactors.spawn(ThreadBuilder::new("storage"))?;
    let tasks =
        ExecutorHandle::start(&thread, "tasks", 64).map_err(|_| "the thread takes no messages")?;
    let opener = Opener::with_buffers(&clock, 40 << 20)?;
    let device = opener.open(&uri.parse()?, Claim::WriteOnce, &thread).wait()?;
    let alone = part(&tasks, &device, clock, time, 0)?;
    let beside = part(&tasks, &device, clock, time, WRITES)?;
    let per_second = |count: u64| u128::from(count) * 1_000_000_000 / u128::from(time.ns);
    for (name, [reads, writes]) in [("alone", &alone), ("beside", &beside)] {
        println!(
            "{name}: reads_per_s {} p50_ns {} p9999_ns {} writes_mib_per_s {}",
            per_second(reads.count()),
            reads.percentile(500_000),
            reads.percentile(999_900),
            per_second(writes.count())
        );
    }
    Ok(())
}

pub(crate) fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let uri = arguments.next().unwrap_or_else(|| "ram:64m".to_owned());
    let seconds = arguments.next().map_or(Ok(5), |text| text.parse())?;
    run(&uri, Span::from_secs(seconds))
}
