//! A device that answers later than the one it stands on.
//!
//! ```text
//!   quantile   0 ......................... 98 %   99 %    100 %
//!   delay      (1 − w)·t  ──────  t  ── (1 + w)·t ── p99 ── 2·p99      straight lines between
//! ```
//!
//! `w` is at most a half and smaller where the two given times are close; `t` is what makes the mean
//! of the curve the mean that was asked for. Without a p99 every delay is the mean.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use base::{Backend, Blame, Extent, Instant, Limits, Medium, Operation, Random, Request, Span};

use super::held::{self, HeldChannel, Timing};
use crate::MediumError;
use crate::open::{Handle, Opened, Opener};
use crate::uri::{Fields, Uri, UriError};

/// A medium over another one, whose answers it keeps back for times that are drawn from a seed.
///
/// Reads, compares and verifications take a read's time, everything else a write's. The time is
/// added to what the medium underneath takes only as far as that is shorter: both begin at once.
pub struct Delay {
    inner: Arc<dyn Medium>,
    shared: Arc<Shared>,
    /// Each channel gets a stream of its own.
    random: Mutex<Random>,
}

/// How long a delay keeps its answers back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Delays {
    /// For what reads.
    pub read: Spread,
    /// For what writes, and everything else.
    pub write: Spread,
}

/// A distribution of times, by two of its numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Spread {
    /// The mean of all.
    pub mean: Span,
    /// What one in a hundred exceeds; none if every one is to be the mean.
    pub p99: Option<Span>,
}

/// Looks at the delays of an open medium, and changes them. Clones are of the same medium.
#[derive(Clone, Debug)]
pub struct DelayHandle {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    delays: Mutex<Delays>,
    /// How often they were changed: all that a channel looks at while they were not.
    changes: AtomicU64,
}

struct DelayTiming {
    shared: Arc<Shared>,
    /// The change that the curves below are of.
    seen: u64,
    read: Curve,
    write: Curve,
    random: Random,
}

/// Four points of a curve; see the drawing above.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Curve([(u64, u64); 4]);

/// The unit of a curve's first numbers.
const PARTS: u64 = 1_000_000;
/// The p99 may be so many times the mean: one in fifty takes its time, so it has its share in the
/// mean.
const RATIO_MAX: u64 = 40;

/// Opens `delay:[URI]?read=80us&read-p99=1ms&write=20us&write-p99=100us&seed=1`.
pub(crate) fn open(opener: &Opener<'_>, uri: &Uri) -> Result<Opened, MediumError> {
    let child = uri.only_child()?;
    let mut fields = uri.fields();
    let read = spread(&mut fields, "read", "read-p99")?;
    let write = spread(&mut fields, "write", "write-p99")?;
    let delays = Delays { read, write };
    let seed = fields.seed()?.unwrap_or(opener.seed);
    fields.finish()?;
    delays.check().map_err(|problem| uri.refuse(problem))?;
    let below = opener.open(child)?;
    let delay = Delay::new(below.medium.clone(), delays, seed)?;
    let description =
        format!("delay: reads {read}, writes {write} later; over {}", below.description);
    let handle = Handle::Delay { uri: uri.to_string(), handle: delay.handle() };
    Ok(below.under(Arc::new(delay), description).with(handle))
}

fn spread(
    fields: &mut Fields<'_>,
    mean: &'static str,
    p99: &'static str,
) -> Result<Spread, UriError> {
    let mean = fields.time(mean)?.unwrap_or_default();
    Ok(Spread { mean, p99: fields.time(p99)? })
}

impl Delay {
    /// A medium over `inner`, whose blocks, limits and durability it has.
    ///
    /// # Errors
    ///
    /// If there is no distribution with these numbers.
    pub fn new(inner: Arc<dyn Medium>, delays: Delays, seed: u64) -> Result<Self, MediumError> {
        let refuse = |problem| MediumError::new(Blame::Caller, format!("delay: {problem}"));
        delays.check().map_err(refuse)?;
        let shared = Shared { delays: Mutex::new(delays), changes: AtomicU64::new(0) };
        Ok(Self { inner, shared: Arc::new(shared), random: Mutex::new(Random::new(seed)) })
    }

    /// What changes the delays while the medium is in use.
    pub fn handle(&self) -> DelayHandle {
        DelayHandle { shared: Arc::clone(&self.shared) }
    }
}

impl Medium for Delay {
    fn limits(&self) -> Limits {
        held::limits(&*self.inner)
    }

    fn channel(&self) -> Result<Box<dyn Backend>, String> {
        let random = self.random.lock().unwrap_or_else(PoisonError::into_inner).fork();
        let timing = DelayTiming::new(Arc::clone(&self.shared), random);
        Ok(Box::new(HeldChannel::open(&*self.inner, timing)?))
    }

    fn channels_max(&self) -> u32 {
        self.inner.channels_max()
    }

    fn extent(&self, lba: u64) -> Result<Extent, String> {
        self.inner.extent(lba)
    }

    fn notice_size(&self) -> Result<u64, String> {
        self.inner.notice_size()
    }
}

/// Two hands on the same medium are equal.
impl PartialEq for DelayHandle {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }
}

impl DelayHandle {
    /// How long answers are kept back.
    pub fn delays(&self) -> Delays {
        *self.shared.delays.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes that, for whatever is submitted from now on; what is under way keeps its time.
    ///
    /// # Errors
    ///
    /// If there is no distribution with these numbers: then nothing has changed.
    pub fn set(&self, delays: Delays) -> Result<(), MediumError> {
        let refuse = |problem| MediumError::new(Blame::Caller, format!("delay: {problem}"));
        delays.check().map_err(refuse)?;
        *self.shared.delays.lock().unwrap_or_else(PoisonError::into_inner) = delays;
        // Pairs with the acquire in `schedule`. A channel that looks in between takes the new
        // delays already and then once more.
        self.shared.changes.fetch_add(1, Ordering::Release);
        Ok(())
    }
}

impl Delays {
    fn check(&self) -> Result<(), String> {
        self.read.check("read")?;
        self.write.check("write")
    }
}

impl Spread {
    fn check(&self, class: &str) -> Result<(), String> {
        let Self { mean, p99: Some(p99) } = *self else { return Ok(()) };
        if mean <= p99 && p99.ns <= mean.ns.saturating_mul(RATIO_MAX) {
            return Ok(());
        }
        Err(format!(
            "{class}-p99 is {p99}, expected from the mean of {mean} to {RATIO_MAX} times as much"
        ))
    }
}

impl std::fmt::Display for Spread {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { mean, p99 } = self;
        match p99 {
            Some(p99) => write!(out, "{mean} (p99 {p99})"),
            None => write!(out, "{mean}"),
        }
    }
}

impl DelayTiming {
    fn new(shared: Arc<Shared>, random: Random) -> Self {
        let (read, write) = (Curve::default(), Curve::default());
        let mut timing = Self { shared, seen: 0, read, write, random };
        timing.look();
        timing
    }

    /// Takes over the delays as they are now.
    fn look(&mut self) {
        self.seen = self.shared.changes.load(Ordering::Acquire);
        let delays = *self.shared.delays.lock().unwrap_or_else(PoisonError::into_inner);
        (self.read, self.write) = (Curve::of(delays.read), Curve::of(delays.write));
    }
}

impl Timing for DelayTiming {
    fn schedule(&mut self, now: Instant, requests: &[Request], each: &mut dyn FnMut(Instant)) {
        if self.shared.changes.load(Ordering::Acquire) != self.seen {
            self.look();
        }
        for request in requests {
            let curve = match request.operation {
                Operation::Read | Operation::Compare | Operation::Verify => &self.read,
                _ => &self.write,
            };
            each(now.after(curve.at(self.random.below(PARTS))));
        }
    }
}

impl Curve {
    fn of(spread: Spread) -> Self {
        let mean = spread.mean.ns;
        let Some(Span { ns: p99 }) = spread.p99.filter(|_| mean > 0) else {
            return Self([(0, mean), (PARTS, mean), (PARTS, mean), (PARTS, mean)]);
        };
        // In thousandths: half of what the p99 is above the mean, at most a half.
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

    /// What `part` of all do not exceed; `part` is below [`PARTS`].
    fn at(&self, part: u64) -> Span {
        let above = self.0.iter().position(|(share, _)| *share > part).unwrap_or(1);
        let ((from, low), (to, high)) = (self.0[above - 1], self.0[above]);
        let rise = u128::from(high - low) * u128::from(part - from) / u128::from(to - from);
        Span { ns: low.saturating_add(u64::try_from(rise).unwrap_or(u64::MAX)) }
    }
}

impl std::fmt::Debug for Delay {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Delay").field("shared", &self.shared).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
