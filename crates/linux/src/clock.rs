//! Monotonic clock.
//!
//! Time is read from the CPU's own counter (TSC on x86-64, CNTVCT on aarch64), which costs about 8
//! ns where the kernel's clock costs about 20. The counter's rate is measured against
//! `CLOCK_MONOTONIC` at start; after that an instant is a multiplication and a shift:
//!
//! ```text
//!   ns = ns at start + ((ticks − ticks at start) × multiplier) >> 32
//! ```
//!
//! Where the counter is not reliable the kernel's clock is used instead, and [`Clock::source`]
//! gives the reason.

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::time::{ClockId, Timespec, clock_gettime};
use tenmil_base::{Instant, Span, UtcTime};

/// Clock: a plain value that is copied to each user. All copies agree, on every thread.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    source: ClockSource,
    start_ticks: u64,
    start_ns: u64,
    /// Nanoseconds per tick, times 2^32.
    multiplier: u64,
}

/// Time source of a [`Clock`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClockSource {
    /// The CPU's counter.
    Counter,
    /// `CLOCK_MONOTONIC`, with the reason.
    Kernel(FallbackReason),
}

/// Why the CPU's counter is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FallbackReason {
    /// The caller requested the kernel's clock.
    Requested,
    /// The counter changes its rate, or stops, in CPU sleep states.
    NotInvariant,
    /// The kernel does not list the counter among its clock sources.
    NotAvailable,
    /// Two measurements of the rate did not agree.
    Unstable,
}

const SHIFT: u32 = 32;
/// Time of the kernel's last tick (CLOCK_MONOTONIC_COARSE), which advances every 1 to 10 ms.
///
/// Costs one or two loads instead of a counter read. Its origin differs from that of any [`Clock`].
#[inline]
pub fn coarse_now() -> Span {
    Span { ns: kernel_ns_of(ClockId::MonotonicCoarse) }
}

/// Time of the wall clock (`CLOCK_REALTIME`). A clock before 1970 counts as 1970.
pub fn utc_now() -> UtcTime {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    UtcTime { unix_us: u64::try_from(since.as_micros()).unwrap_or(u64::MAX) }
}

/// Duration of each half of a calibration. A sample is accurate to about 50 ns, so 5 ms give the
/// rate to 10 parts per million.
const CALIBRATION_HALF: Span = Span::from_ms(5);
const ATTEMPTS: usize = 5;

impl Clock {
    /// Creates a clock on the CPU's counter if that is reliable, else on the kernel's clock.
    ///
    /// Takes 10 ms to measure the rate; create one and copy it.
    pub fn start() -> Self {
        match check_counter_reliable() {
            Ok(()) => calibrate_counter()
                .unwrap_or_else(|| Self::kernel_fallback(FallbackReason::Unstable)),
            Err(reason) => Self::kernel_fallback(reason),
        }
    }

    /// Creates a clock on `CLOCK_MONOTONIC`, for comparison.
    pub fn on_kernel_clock() -> Self {
        Self::kernel_fallback(FallbackReason::Requested)
    }

    const fn kernel_fallback(reason: FallbackReason) -> Self {
        let source = ClockSource::Kernel(reason);
        Self { source, start_ticks: 0, start_ns: 0, multiplier: 1 << SHIFT }
    }

    /// Current time. Never runs backwards on one thread; the counters of different CPUs agree to a
    /// few nanoseconds.
    #[inline]
    pub fn now(&self) -> Instant {
        let elapsed = self.raw_ticks().saturating_sub(self.start_ticks);
        Instant { ns: self.start_ns + self.span_of_ticks(elapsed).ns }
    }

    /// Raw counter value: ticks of the CPU's counter, or nanoseconds.
    #[inline]
    pub fn raw_ticks(&self) -> u64 {
        match self.source {
            ClockSource::Counter => read_counter(),
            ClockSource::Kernel(_) => kernel_ns(),
        }
    }

    /// Duration of `ticks` of the raw counter.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "584 years of nanoseconds fit")]
    pub fn span_of_ticks(&self, ticks: u64) -> Span {
        Span { ns: ((u128::from(ticks) * u128::from(self.multiplier)) >> SHIFT) as u64 }
    }

    /// Number of raw counter ticks in `span`.
    #[expect(clippy::cast_possible_truncation, reason = "as many as the counter can show")]
    pub fn ticks_of_span(&self, span: Span) -> u64 {
        ((u128::from(span.ns) << SHIFT) / u128::from(self.multiplier)) as u64
    }

    /// Frequency of the CPU's counter, if the clock reads it.
    pub fn tsc_hz(&self) -> Option<u64> {
        (self.source == ClockSource::Counter).then(|| self.ticks_of_span(Span::from_secs(1)))
    }

    /// Time source of this clock, with the reason.
    pub fn source(&self) -> ClockSource {
        self.source
    }
}

impl fmt::Display for ClockSource {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Counter => "processor counter",
            Self::Kernel(FallbackReason::Requested) => "kernel clock, as requested",
            Self::Kernel(FallbackReason::NotInvariant) => {
                "kernel clock: the processor does not promise a counter of constant rate"
            }
            Self::Kernel(FallbackReason::NotAvailable) => {
                "kernel clock: the kernel does not trust the processor's counter"
            }
            Self::Kernel(FallbackReason::Unstable) => {
                "kernel clock: the processor's counter has no steady rate"
            }
        })
    }
}

/// `CLOCK_MONOTONIC` in nanoseconds.
pub(crate) fn kernel_ns() -> u64 {
    kernel_ns_of(ClockId::Monotonic)
}

fn kernel_ns_of(clock: ClockId) -> u64 {
    let Timespec { tv_sec, tv_nsec } = clock_gettime(clock);
    let whole = u64::try_from(tv_sec).unwrap_or(0).saturating_mul(1_000_000_000);
    whole + u64::try_from(tv_nsec).unwrap_or(0)
}

/// Paired reading of the counter and `CLOCK_MONOTONIC`.
#[derive(Clone, Copy)]
struct ClockSample {
    ticks: u64,
    ns: u64,
}

/// Samples both clocks at the same moment: of 16 tries, the one that took the least time.
fn sample_both() -> ClockSample {
    let one = |_| {
        let before = read_counter();
        let ns = kernel_ns();
        let width = read_counter().saturating_sub(before);
        (width, ClockSample { ticks: before + width / 2, ns })
    };
    let narrowest = (0..16).map(one).min_by_key(|(width, _)| *width);
    narrowest.map_or(ClockSample { ticks: 0, ns: 0 }, |(_, bracket)| bracket)
}

/// Measures the counter's rate twice; `None` unless the two agree to one part in a thousand.
fn calibrate_counter() -> Option<Clock> {
    for _ in 0..ATTEMPTS {
        let begin = sample_both();
        std::thread::sleep(std::time::Duration::from_nanos(CALIBRATION_HALF.ns));
        let middle = sample_both();
        std::thread::sleep(std::time::Duration::from_nanos(CALIBRATION_HALF.ns));
        let end = sample_both();
        let (first, second) =
            (ns_per_tick_multiplier(begin, middle)?, ns_per_tick_multiplier(middle, end)?);
        if first.abs_diff(second) <= first / 1_000 {
            let multiplier = ns_per_tick_multiplier(begin, end)?;
            let (start_ticks, start_ns) = (end.ticks, end.ns);
            return Some(Clock { source: ClockSource::Counter, start_ticks, start_ns, multiplier });
        }
    }
    None
}

/// Nanoseconds per tick times 2^32 between two samples; `None` if the counter did not advance.
fn ns_per_tick_multiplier(from: ClockSample, to: ClockSample) -> Option<u64> {
    let ns = u128::from(to.ns.checked_sub(from.ns)?);
    let ticks = u128::from(to.ticks.checked_sub(from.ticks)?);
    u64::try_from((ns << SHIFT).checked_div(ticks)?).ok().filter(|multiplier| *multiplier > 0)
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn read_counter() -> u64 {
    // SAFETY: RDTSC exists on every x86-64 CPU, reads no memory, and Linux leaves it enabled in
    // user space unless a process disables it for itself with PR_SET_TSC, which nothing here does.
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[cfg(target_arch = "aarch64")]
#[inline]
fn read_counter() -> u64 {
    let ticks: u64;
    // SAFETY: reading CNTVCT_EL0 has no effect, and Linux enables it in user space.
    unsafe {
        core::arch::asm!("mrs {}, cntvct_el0", out(reg) ticks, options(nomem, nostack));
    }
    ticks
}

#[cfg(target_arch = "x86_64")]
fn check_counter_reliable() -> Result<(), FallbackReason> {
    // Advanced power management leaf: bit 8 of EDX is the invariant TSC.
    const LEAF: u32 = 0x8000_0007;
    let highest = core::arch::x86_64::__cpuid(0x8000_0000).eax;
    if highest < LEAF || core::arch::x86_64::__cpuid(LEAF).edx & (1 << 8) == 0 {
        return Err(FallbackReason::NotInvariant);
    }
    // The kernel removes the TSC from this list when the counters of two CPUs diverge.
    let list = "/sys/devices/system/clocksource/clocksource0/available_clocksource";
    match std::fs::read_to_string(list) {
        Ok(sources) if !sources.split_whitespace().any(|source| source == "tsc") => {
            Err(FallbackReason::NotAvailable)
        }
        _ => Ok(()),
    }
}

#[cfg(target_arch = "aarch64")]
fn check_counter_reliable() -> Result<(), FallbackReason> {
    // The generic timer has one constant rate by architecture (Arm ARM, D11.1).
    Ok(())
}

#[cfg(test)]
mod tests {
    use tenmil_base::Span;

    use super::{
        Clock, ClockSample, ClockSource, FallbackReason, kernel_ns, ns_per_tick_multiplier,
    };

    #[test]
    fn clock_agrees_with_the_kernel_clock() {
        let clock = Clock::start();
        let begin = kernel_ns();
        while kernel_ns() < begin + 5_000_000 {
            let (before, shown, after) = (kernel_ns(), clock.now().ns, kernel_ns());
            assert!(shown + 100_000 >= before, "{before} {shown}");
            assert!(shown <= after + 100_000, "{shown} {after}");
        }
    }

    #[test]
    fn clock_never_runs_backwards() {
        for clock in [Clock::start(), Clock::on_kernel_clock()] {
            let mut last = clock.now();
            for _ in 0..100_000 {
                let now = clock.now();
                assert!(now >= last);
                last = now;
            }
        }
    }

    #[test]
    fn ticks_and_spans_convert_both_ways() {
        for clock in [Clock::start(), Clock::on_kernel_clock()] {
            let ticks = clock.ticks_of_span(Span::from_secs(3));
            let back = clock.span_of_ticks(ticks);
            assert!(back.ns.abs_diff(3_000_000_000) < 100, "{back:?}");
        }
        assert_eq!(Clock::on_kernel_clock().tsc_hz(), None);
        if let Some(hz) = Clock::start().tsc_hz() {
            assert!((1_000_000..20_000_000_000).contains(&hz), "{hz}");
        }
    }

    #[test]
    fn multiplier_is_nanoseconds_per_tick() {
        let from = ClockSample { ticks: 1_000, ns: 500 };
        let rate = |ticks, ns| ns_per_tick_multiplier(from, ClockSample { ticks, ns });
        assert_eq!(rate(3_000, 1_500), Some(1 << 31), "two ticks a nanosecond");
        assert_eq!(rate(1_000, 1_500), None, "a counter that stands still has no rate");
        assert_eq!(rate(900, 1_500), None, "nor has one that runs backwards");
    }

    #[test]
    fn fallback_clock_reports_its_reason() {
        assert_eq!(
            Clock::on_kernel_clock().source(),
            ClockSource::Kernel(FallbackReason::Requested)
        );
        let said = |reason| ClockSource::Kernel(reason).to_string();
        assert!(said(FallbackReason::NotInvariant).contains("constant rate"));
        assert!(said(FallbackReason::NotAvailable).contains("trust"));
        assert!(said(FallbackReason::Unstable).contains("steady"));
    }
}
