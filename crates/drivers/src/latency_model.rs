//! Latency model: a device whose requests take as long as on a named SSD.
//!
//! ```text
//!   reads ──── rate gate ─┐
//!                         ├─ units of its blocks ── overhead ── completed
//!   writes ─── rate gate ─┘   busy for a drawn        the same
//!              one at a time  latency                 for all
//! ```
//!
//! Reads and writes pass separate rate gates, because an SSD accepts writes into its write buffer and
//! serves reads ahead of writes that wait for flash. Both meet at the units.
//!
//! No clock is read: the completion time follows from the time of submission and a seed. The device below
//! executes a request at once; its completion is delayed.

use std::sync::{Arc, Mutex, PoisonError};

use tenmil_base::{
    BlockDevice, BlockExtent, Instant, IoChannel, Limits, Operation, Random, Request, Span,
};

use super::delayed_channel::{self, CompletionTiming, DelayedChannel};
use super::model_profile::{ModelProfile, PROFILES};
use tenmil_base::Error;
use tenmil_block::uri::Uri;
use tenmil_block::{OpenedDevice, Opener};

/// Device with the latencies of a modeled SSD.
pub struct ModeledLatencyDevice {
    inner: Arc<dyn BlockDevice>,
    profile: &'static ModelProfile,
    device: Arc<Mutex<ModelState>>,
}

/// State shared by all channels, behind the only lock of this device. It is taken once per batch; the
/// modeled microseconds are a hundred times its cost.
#[derive(Debug)]
struct ModelState {
    profile: &'static ModelProfile,
    random: Random,
    /// Busy times of the units.
    units: Box<[ParallelUnit]>,
    /// When the rate gates admit the next read and the next write.
    open_at: [Instant; 2],
}

/// Computes the completion times of a channel.
struct ModelTiming {
    device: Arc<Mutex<ModelState>>,
    block_size: u32,
}

/// Opens `model:p4600?size=1g`, over memory, or `model:[URI]?device=p4600`.
pub(crate) fn open(opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
    let names = PROFILES.iter().map(|profile| profile.name).collect::<Vec<_>>().join(" or ");
    let profile = |name: &str| {
        ModelProfile::find_by_name(name)
            .ok_or_else(|| uri.error(format!("no model `{name}`, expected {names}")))
    };
    let mut fields = uri.options();
    let seed = fields.seed_value()?.unwrap_or(opener.seed);
    let (profile, below) = if uri.children().is_empty() {
        let profile = profile(uri.path())?;
        let size = fields.text_value("size").unwrap_or("1g".into());
        let block = fields.text_value("block").unwrap_or("512".into());
        fields.reject_unconsumed()?;
        let ram: Uri = format!("ram:{size}?block={block}").parse()?;
        (profile, opener.open(&ram)?)
    } else {
        let child = uri.single_child()?;
        let device = fields
            .text_value("device")
            .ok_or_else(|| uri.error(format!("device is missing, expected device={names}")))?;
        fields.reject_unconsumed()?;
        (profile(&device)?, opener.open(child)?)
    };
    let description = format!("{}; over {}", profile.describe(), below.description);
    let medium = ModeledLatencyDevice::new(below.medium.clone(), profile, seed);
    Ok(below.with_device_stacked_on(Arc::new(medium), description))
}

impl ModeledLatencyDevice {
    /// A model of `profile` over `inner`, with the blocks and durability of `inner`.
    pub fn new(inner: Arc<dyn BlockDevice>, profile: &'static ModelProfile, seed: u64) -> Self {
        let device = ModelState::new(profile, seed);
        Self { inner, profile, device: Arc::new(Mutex::new(device)) }
    }

    /// The modeled SSD.
    pub fn profile(&self) -> &'static ModelProfile {
        self.profile
    }
}

impl BlockDevice for ModeledLatencyDevice {
    fn limits(&self) -> Limits {
        delayed_channel::delayed_device_limits(&*self.inner)
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let block_size = self.inner.limits().block_size;
        let timing = ModelTiming { device: Arc::clone(&self.device), block_size };
        Ok(Box::new(DelayedChannel::open(&*self.inner, timing)?))
    }

    fn channels_max(&self) -> u32 {
        self.inner.channels_max()
    }

    fn block_status(&self, lba: u64) -> Result<BlockExtent, Error> {
        self.inner.block_status(lba)
    }

    fn refresh_size(&self) -> Result<u64, Error> {
        self.inner.refresh_size()
    }
}

impl CompletionTiming for ModelTiming {
    fn completion_times(
        &mut self,
        now: Instant,
        requests: &[Request],
        each: &mut dyn FnMut(Instant),
    ) {
        let mut device = self.device.lock().unwrap_or_else(PoisonError::into_inner);
        for request in requests {
            each(device.completion_time(now, request, self.block_size));
        }
    }
}

/// A unit that executes one operation at a time. A scheduled write that has not begun does not delay a
/// read.
#[derive(Clone, Copy, Debug, Default)]
struct ParallelUnit {
    read_until: Instant,
    /// The last write, which may begin in the future.
    write_from: Instant,
    write_until: Instant,
}

/// Transfer direction.
#[derive(Clone, Copy)]
enum TransferDirection {
    Read,
    Write,
}

impl ModelState {
    fn new(profile: &'static ModelProfile, seed: u64) -> Self {
        let units = vec![ParallelUnit::default(); profile.units as usize].into();
        Self { profile, random: Random::new(seed), units, open_at: [Instant::default(); 2] }
    }

    /// The completion time of a request submitted now.
    fn completion_time(&mut self, now: Instant, request: &Request, block_size: u32) -> Instant {
        let ModelProfile { read_rates, write_rates, overhead, other, .. } = self.profile;
        let block_size = u64::from(block_size);
        let len = u64::from(request.blocks) * block_size;
        let first = request.lba.saturating_mul(block_size);
        let done = match request.operation {
            Operation::Read | Operation::Compare | Operation::Verify => {
                let start = self.pass_rate_gate(
                    TransferDirection::Read,
                    now,
                    read_rates.request_spacing(len),
                );
                self.reserve_units(TransferDirection::Read, start, first, len)
            }
            Operation::Write | Operation::CompareAndWrite => {
                let start = self.pass_rate_gate(
                    TransferDirection::Write,
                    now,
                    write_rates.request_spacing(len),
                );
                self.reserve_units(TransferDirection::Write, start, first, len)
            }
            Operation::Copy => {
                let start = self.pass_rate_gate(
                    TransferDirection::Read,
                    now,
                    read_rates.request_spacing(len),
                );
                let source = request.operand.saturating_mul(block_size);
                let between = self.reserve_units(TransferDirection::Read, start, source, len);
                let start = self.pass_rate_gate(
                    TransferDirection::Write,
                    between,
                    write_rates.request_spacing(len),
                );
                self.reserve_units(TransferDirection::Write, start, first, len)
            }
            Operation::Flush
            | Operation::Deallocate
            | Operation::WriteZeroes
            | Operation::WriteUncorrectable => return now.after(*other),
        };
        done.after(*overhead)
    }

    /// Passes a rate gate: one request at a time, spaced by the rate.
    fn pass_rate_gate(&mut self, way: TransferDirection, now: Instant, spacing: Span) -> Instant {
        let open_at = &mut self.open_at[way as usize];
        let start = now.max(*open_at);
        *open_at = start.after(spacing);
        start
    }

    /// Assigns each stripe of a transfer to its unit, behind earlier work, and returns when the last one
    /// is done. A transfer of more stripes than units uses each unit once; the rates cover the remaining
    /// bytes.
    fn reserve_units(
        &mut self,
        way: TransferDirection,
        start: Instant,
        first: u64,
        len: u64,
    ) -> Instant {
        let latency = match way {
            TransferDirection::Read => &self.profile.read,
            TransferDirection::Write => &self.profile.write,
        };
        let stripe_bytes = u64::from(self.profile.stripe_bytes);
        let stripes = len.div_ceil(stripe_bytes).clamp(1, u64::from(self.profile.units));
        let mut done = start;
        for stripe in (first / stripe_bytes..).take(usize::try_from(stripes).unwrap_or(1)) {
            let unit = unit_of_stripe(stripe, self.units.len());
            done = done.max(self.units[unit].reserve(
                way,
                start,
                latency.random_latency(&mut self.random),
            ));
        }
        done
    }
}

impl ParallelUnit {
    /// Occupies the unit for `time` once it is free; returns when it is done.
    fn reserve(&mut self, way: TransferDirection, start: Instant, time: Span) -> Instant {
        match way {
            TransferDirection::Read => {
                let free = start.max(self.read_until);
                let is_writing = (self.write_from..self.write_until).contains(&free);
                let begin = if is_writing { self.write_until } else { free };
                self.read_until = begin.after(time);
                self.read_until
            }
            TransferDirection::Write => {
                self.write_from = start.max(self.write_until).max(self.read_until);
                self.write_until = self.write_from.after(time);
                self.write_until
            }
        }
    }
}

/// Distributes stripes evenly and pseudo-randomly over units (Fibonacci hashing), so that requests
/// collide as often as by chance.
fn unit_of_stripe(stripe: u64, units: usize) -> usize {
    let hash = stripe.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let hash = (hash ^ (hash >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    let wide = u128::from(hash) * units as u128;
    usize::try_from(wide >> 64).unwrap_or(0)
}

impl std::fmt::Debug for ModeledLatencyDevice {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Model").field("profile", &self.profile.name).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tenmil_base::{
        BlockDevice, CompletionBatch, Histogram, Instant, IoChannel, Operation, Random, Request,
        RequestFlags, Span,
    };

    use super::{ModelState, ModeledLatencyDevice, unit_of_stripe};
    use crate::{ModelProfile, NullDevice};

    #[test]
    fn read_overtakes_queued_writes() {
        let (now, mib) = (Instant::default(), 2048);
        let read_behind = |writes| {
            let mut device = ModelState::new(ModelProfile::find_by_name("p4600").unwrap(), 1);
            for index in 0..writes {
                device.completion_time(
                    now,
                    &model_request(Operation::Write, 0, index * u64::from(mib), mib),
                    512,
                );
            }
            device.completion_time(now, &model_request(Operation::Read, 0, 0, 8), 512)
        };
        let write_until = |writes: u64| {
            let mut device = ModelState::new(ModelProfile::find_by_name("p4600").unwrap(), 1);
            let each = (0..writes).map(|index| {
                device.completion_time(
                    now,
                    &model_request(Operation::Write, 0, index * u64::from(mib), mib),
                    512,
                )
            });
            each.last().unwrap()
        };
        // 32 MiB take 25 ms to write; the read is to what is written first.
        assert!(write_until(32) > now.after(Span::from_ms(20)));
        assert!(read_behind(32) < now.after(Span::from_ms(3)), "{:?}", read_behind(32));
        // An operation in progress is not interrupted.
        let unit = &mut super::ParallelUnit::default();
        let (write, read) = (Span::from_us(10), Span::from_us(80));
        assert_eq!(unit.reserve(super::TransferDirection::Write, now, write), now.after(write));
        let done = now.after(write).after(read);
        assert_eq!(
            unit.reserve(super::TransferDirection::Read, now, read),
            done,
            "behind a write under way"
        );
        assert_eq!(
            unit.reserve(super::TransferDirection::Write, now, write),
            done.after(write),
            "and the reverse"
        );
    }

    fn model_channel(name: &str, seed: u64) -> Box<dyn IoChannel> {
        let profile = ModelProfile::find_by_name(name).unwrap();
        let null = NullDevice::new(512, profile.capacity_bytes / 512).unwrap();
        ModeledLatencyDevice::new(Arc::new(null), profile, seed).channel().unwrap()
    }

    fn model_request(operation: Operation, token: u64, lba: u64, blocks: u32) -> Request {
        let (segment_first, segment_count, metadata_count) = (0, 0, 0);
        let (operand, flags) = (0, RequestFlags::NONE);
        Request {
            token,
            lba,
            operand,
            blocks,
            segment_first,
            segment_count,
            metadata_count,
            operation,
            flags,
        }
    }

    /// Keeps `depth` requests in flight until `count` have completed, advancing the time from event to
    /// event. Returns the latencies and the elapsed time.
    fn run_closed_loop(
        channel: &mut dyn IoChannel,
        operation: Operation,
        blocks: u32,
        depth: u64,
        count: u64,
    ) -> (Histogram, Span) {
        let mut random = Random::new(99);
        let mut latencies = Histogram::new();
        let mut completions = CompletionBatch::with_capacity(64);
        let mut now = Instant { ns: 1 };
        let places = channel.limits().block_count / u64::from(blocks);
        let mut submit = |channel: &mut dyn IoChannel, now: Instant| {
            // The token is the time of submission.
            let lba = random.below(places) * u64::from(blocks);
            let request = model_request(operation, now.ns, lba, blocks);
            assert_eq!(channel.submit(now, &[request], &[]), 1);
        };
        (0..depth).for_each(|_| submit(channel, now));
        while latencies.count() < count {
            now = now.max(channel.wake_at());
            channel.poll(now, &mut completions);
            for completion in completions.drain() {
                latencies.record(now.ns - completion.token);
                submit(channel, now);
            }
        }
        (latencies, now.since(Instant { ns: 1 }))
    }

    fn rate_per_second(count: u64, span: Span) -> u64 {
        count * 1_000_000_000 / span.ns
    }

    #[test]
    fn depth_one_has_the_typical_latency() {
        for (name, operation, low, high) in [
            ("p4600", Operation::Read, 82_000, 88_000),
            ("p4600", Operation::Write, 14_000, 17_000),
            ("p4800x", Operation::Read, 8_500, 9_500),
            ("p4800x", Operation::Write, 9_000, 10_500),
        ] {
            let (latencies, _) =
                run_closed_loop(&mut *model_channel(name, 1), operation, 8, 1, 20_000);
            let median = latencies.percentile(500_000);
            assert!((low..high).contains(&median), "{name} {operation:?}: {median}");
        }
    }

    #[test]
    fn high_depth_reaches_the_maximum_rate() {
        for (name, operation, depth, low, high) in [
            ("p4600", Operation::Read, 128, 490_000, 559_500),
            ("p4600", Operation::Write, 128, 170_000, 176_500),
            ("p4800x", Operation::Read, 32, 540_000, 550_500),
        ] {
            let count = 100_000;
            let (_, span) =
                run_closed_loop(&mut *model_channel(name, 1), operation, 8, depth, count);
            let rate = rate_per_second(count, span);
            assert!((low..high).contains(&rate), "{name} {operation:?}: {rate}");
        }
    }

    #[test]
    fn large_requests_are_limited_by_bandwidth() {
        let (latencies, span) =
            run_closed_loop(&mut *model_channel("p4600", 1), Operation::Read, 256, 16, 20_000);
        let bytes = rate_per_second(20_000, span) * 256 * 512;
        assert!((2_900_000_000..3_210_000_000).contains(&bytes), "{bytes}");
        let (alone, _) =
            run_closed_loop(&mut *model_channel("p4600", 1), Operation::Read, 256, 1, 2_000);
        assert!(alone.percentile(500_000) < 110_000, "eight stripes are read side by side");
        assert!(latencies.percentile(500_000) > alone.percentile(500_000));
    }

    #[test]
    fn requests_to_one_parallel_unit_are_serialized() {
        let mut channel = model_channel("p4600", 1);
        let now = Instant { ns: 1_000_000 };
        let same = [0, 1, 2].map(|token| model_request(Operation::Read, token, 0, 8));
        assert_eq!(channel.submit(now, &same, &[]), 3);
        let mut completions = CompletionBatch::with_capacity(3);
        assert_eq!(channel.poll(now.after(Span::from_us(3 * 64)), &mut completions), 2);
        assert_eq!(channel.poll(now.after(Span::from_ms(10)), &mut completions), 1);
    }

    #[test]
    fn same_seed_repeats_a_model_run() {
        let run = |seed| {
            let mut channel = model_channel("p4600", seed);
            let (latencies, span) = run_closed_loop(&mut *channel, Operation::Read, 8, 32, 5_000);
            (latencies.buckets().collect::<Vec<_>>(), span)
        };
        assert_eq!(run(7), run(7));
        assert_ne!(run(7), run(8));
    }

    #[test]
    fn model_channels_share_the_device() {
        let profile = ModelProfile::find_by_name("p4800x").unwrap();
        let null: Arc<dyn BlockDevice> = Arc::new(NullDevice::new(512, 1 << 20).unwrap());
        let model = ModeledLatencyDevice::new(null, profile, 3);
        let mut channels = [model.channel().unwrap(), model.channel().unwrap()];
        let now = Instant { ns: 1 };
        let many: Vec<Request> =
            (0..1_000).map(|token| model_request(Operation::Read, token, token * 8, 8)).collect();
        for channel in &mut channels {
            assert_eq!(channel.submit(now, &many, &[]), 1_000);
        }
        // 2000 requests at 550 k/s take 3.6 ms; with one device per channel it would be 1.8 ms.
        let soon = now.after(Span::from_us(2_500));
        let mut completions = CompletionBatch::with_capacity(2_000);
        channels.iter_mut().for_each(|channel| {
            channel.poll(soon, &mut completions);
        });
        let count = completions.as_slice().len();
        assert!((1_200..1_400).contains(&count), "{count}");
    }

    #[test]
    fn model_wake_time_is_its_next_completion() {
        let mut channel = model_channel("p4800x", 1);
        assert_eq!(channel.wake_at(), Instant::NEVER);
        let now = Instant { ns: 5_000 };
        channel.submit(now, &[model_request(Operation::Flush, 1, 0, 0)], &[]);
        let mut completions = CompletionBatch::with_capacity(1);
        // The device below has a completion ready and needs to be polled for it.
        assert_eq!(channel.poll(now, &mut completions), 0);
        assert_eq!(channel.wake_at(), now.after(Span::from_us(10)));
        assert_eq!(channel.poll(Instant { ns: 14_999 }, &mut completions), 0);
        assert_eq!(channel.poll(Instant { ns: 15_000 }, &mut completions), 1);
        assert_eq!(channel.wake_at(), Instant::NEVER);
    }

    #[test]
    fn stripes_are_distributed_evenly_over_units() {
        let mut counts = [0_u32; 28];
        (0..28_000).for_each(|stripe| counts[unit_of_stripe(stripe, 28)] += 1);
        assert!(counts.iter().all(|count| (850..1_150).contains(count)), "{counts:?}");
    }
}
