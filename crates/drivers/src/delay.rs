//! Delay: adds latency to another device.
//!
//! ```text
//!   quantile   0 ......................... 98 %   99 %    100 %
//!   delay      (1 − w)·t  ──────  t  ── (1 + w)·t ── p99 ── 2·p99      linear in between
//! ```
//!
//! `w` is at most 0.5, and smaller if mean and p99 are close. `t` is chosen so that the mean of the curve
//! is the requested mean. Without a p99, every delay is the mean.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use tenmil_base::{
    BlockDevice, BlockExtent, ErrorCategory, Instant, IoChannel, Limits, Operation, Random,
    Request, Span,
};

use super::delayed_channel::{self, CompletionTiming, DelayedChannel};
use tenmil_base::Error;
use tenmil_block::uri::{Uri, UriError, UriOptions};
use tenmil_block::{DeviceControl, OpenedDevice, Opener};

/// Device that delays the completions of another one by times drawn from a seed.
///
/// Reads, compares and verifies use the read delay, all other operations the write delay. The delay and
/// the device below run concurrently, so a request takes the longer of the two.
pub struct DelayDevice {
    inner: Arc<dyn BlockDevice>,
    shared: Arc<SharedDelays>,
    /// Seeds a random stream for each channel.
    random: Mutex<Random>,
}

/// Delays of a [`DelayDevice`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DelaySettings {
    /// Delay of reads.
    pub read: LatencySpec,
    /// Delay of writes and all other operations.
    pub write: LatencySpec,
}

/// A latency distribution, given by its mean and p99.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LatencySpec {
    /// Mean.
    pub mean: Span,
    /// 99th percentile; `None`: every value is the mean.
    pub p99: Option<Span>,
}

/// Reads and changes the delays of an open device. Clones control the same device.
#[derive(Clone, Debug)]
pub struct DelayControl {
    shared: Arc<SharedDelays>,
}

#[derive(Debug)]
struct SharedDelays {
    delays: Mutex<DelaySettings>,
    /// Number of changes; the only word that a channel loads while the delays are unchanged.
    changes: AtomicU64,
}

struct DelayTiming {
    shared: Arc<SharedDelays>,
    /// Value of `changes` that the curves are of.
    seen: u64,
    read: DelayCurve,
    write: DelayCurve,
    random: Random,
}

/// Four points of a curve; see the drawing above.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct DelayCurve([(u64, u64); 4]);

/// The unit of quantiles.
const PARTS: u64 = 1_000_000;
/// Maximum ratio of p99 to mean. The slowest 2 % count toward the mean, which bounds the ratio.
const RATIO_MAX: u64 = 40;

/// Opens `delay:[URI]?read=80us&read-p99=1ms&write=20us&write-p99=100us&seed=1`.
pub(crate) fn open(opener: &Opener<'_>, uri: &Uri) -> Result<OpenedDevice, Error> {
    let child = uri.single_child()?;
    let mut fields = uri.options();
    let read = parse_latency_spec(&mut fields, "read", "read-p99")?;
    let write = parse_latency_spec(&mut fields, "write", "write-p99")?;
    let delays = DelaySettings { read, write };
    let seed = fields.seed_value()?.unwrap_or(opener.seed);
    fields.reject_unconsumed()?;
    delays.check().map_err(|problem| uri.error(problem))?;
    let below = opener.open(child)?;
    let delay = DelayDevice::new(below.medium.clone(), delays, seed)?;
    let description =
        format!("delay: reads {read}, writes {write} later; over {}", below.description);
    let handle = DeviceControl::new(uri, delay.control());
    Ok(below.with_device_stacked_on(Arc::new(delay), description).with_control(handle))
}

fn parse_latency_spec(
    fields: &mut UriOptions<'_>,
    mean: &'static str,
    p99: &'static str,
) -> Result<LatencySpec, UriError> {
    let mean = fields.time_value(mean)?.unwrap_or_default();
    Ok(LatencySpec { mean, p99: fields.time_value(p99)? })
}

impl DelayDevice {
    /// A delay over `inner`, with its blocks, limits and durability.
    ///
    /// # Errors
    ///
    /// If no distribution has this mean and p99.
    pub fn new(
        inner: Arc<dyn BlockDevice>,
        delays: DelaySettings,
        seed: u64,
    ) -> Result<Self, Error> {
        let refuse = |problem| Error::new(ErrorCategory::Usage, format!("delay: {problem}"));
        delays.check().map_err(refuse)?;
        let shared = SharedDelays { delays: Mutex::new(delays), changes: AtomicU64::new(0) };
        Ok(Self { inner, shared: Arc::new(shared), random: Mutex::new(Random::new(seed)) })
    }

    /// Control for changing the delays at run time.
    pub fn control(&self) -> DelayControl {
        DelayControl { shared: Arc::clone(&self.shared) }
    }
}

impl BlockDevice for DelayDevice {
    fn limits(&self) -> Limits {
        delayed_channel::delayed_device_limits(&*self.inner)
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let random = self.random.lock().unwrap_or_else(PoisonError::into_inner).fork();
        let timing = DelayTiming::new(Arc::clone(&self.shared), random);
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

/// Controls of the same device are equal.
impl PartialEq for DelayControl {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }
}

impl DelayControl {
    /// The current delays.
    pub fn delays(&self) -> DelaySettings {
        *self.shared.delays.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the delays of requests submitted from now on; requests in flight keep theirs.
    ///
    /// # Errors
    ///
    /// If no distribution has this mean and p99: then nothing is changed.
    pub fn set_delays(&self, delays: DelaySettings) -> Result<(), Error> {
        let refuse = |problem| Error::new(ErrorCategory::Usage, format!("delay: {problem}"));
        delays.check().map_err(refuse)?;
        *self.shared.delays.lock().unwrap_or_else(PoisonError::into_inner) = delays;
        // Pairs with the acquire in `completion_times`. A channel that reads in between applies the new delays
        // early, and once more afterwards.
        self.shared.changes.fetch_add(1, Ordering::Release);
        Ok(())
    }
}

impl DelaySettings {
    fn check(&self) -> Result<(), Error> {
        self.read.check("read")?;
        self.write.check("write")
    }
}

impl LatencySpec {
    fn check(&self, class: &str) -> Result<(), Error> {
        let Self { mean, p99: Some(p99) } = *self else { return Ok(()) };
        if mean <= p99 && p99.ns <= mean.ns.saturating_mul(RATIO_MAX) {
            return Ok(());
        }
        Err(Error::environment(format!(
            "{class}-p99 is {p99}, expected from the mean of {mean} to {RATIO_MAX} times as much"
        )))
    }
}

impl std::fmt::Display for LatencySpec {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { mean, p99 } = self;
        match p99 {
            Some(p99) => write!(out, "{mean} (p99 {p99})"),
            None => write!(out, "{mean}"),
        }
    }
}

impl DelayTiming {
    fn new(shared: Arc<SharedDelays>, random: Random) -> Self {
        let (read, write) = (DelayCurve::default(), DelayCurve::default());
        let mut timing = Self { shared, seen: 0, read, write, random };
        timing.apply_current_delays();
        timing
    }

    /// Applies the current delays.
    fn apply_current_delays(&mut self) {
        self.seen = self.shared.changes.load(Ordering::Acquire);
        let delays = *self.shared.delays.lock().unwrap_or_else(PoisonError::into_inner);
        (self.read, self.write) =
            (DelayCurve::from_spec(delays.read), DelayCurve::from_spec(delays.write));
    }
}

impl CompletionTiming for DelayTiming {
    fn completion_times(
        &mut self,
        now: Instant,
        requests: &[Request],
        each: &mut dyn FnMut(Instant),
    ) {
        if self.shared.changes.load(Ordering::Acquire) != self.seen {
            self.apply_current_delays();
        }
        for request in requests {
            let curve = match request.operation {
                Operation::Read | Operation::Compare | Operation::Verify => &self.read,
                _ => &self.write,
            };
            each(now.after(curve.delay_at_quantile(self.random.below(PARTS))));
        }
    }
}

impl DelayCurve {
    fn from_spec(spread: LatencySpec) -> Self {
        let mean = spread.mean.ns;
        let Some(Span { ns: p99 }) = spread.p99.filter(|_| mean > 0) else {
            return Self([(0, mean), (PARTS, mean), (PARTS, mean), (PARTS, mean)]);
        };
        // In thousandths: half of the distance of p99 from the mean, at most 0.5.
        let width = u128::from(p99 - mean) * 500 / u128::from(mean);
        let width = width.min(500);
        // 0.98·t + 0.01·((1 + w)·t + p99)/2 + 0.01·1.5·p99 = mean
        let rest = u128::from(mean) * 1_000 - u128::from(p99) * 20;
        let typical = rest * 1_000 / (985_000 + 5 * width);
        let ns = |thousandths: u128| u64::try_from(typical * thousandths / 1_000).unwrap_or(p99);
        let (low, high) = (ns(1_000 - width), ns(1_000 + width));
        let percent = PARTS / 100;
        Self([(0, low), (98 * percent, high), (99 * percent, p99), (PARTS, p99.saturating_mul(2))])
    }

    /// The delay at quantile `part`, which is below [`PARTS`].
    fn delay_at_quantile(&self, part: u64) -> Span {
        let above = self.0.iter().position(|(share, _)| *share > part).unwrap_or(1);
        let ((from, low), (to, high)) = (self.0[above - 1], self.0[above]);
        let rise = u128::from(high - low) * u128::from(part - from) / u128::from(to - from);
        Span { ns: low.saturating_add(u64::try_from(rise).unwrap_or(u64::MAX)) }
    }
}

impl std::fmt::Debug for DelayDevice {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Delay").field("shared", &self.shared).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
