//! Cost model of a doorbell write across a bus.
//!
//! A doorbell of an emulated SSD is a store to a cache line, which completes in the store buffer. A
//! doorbell of a real SSD is a write to uncached memory across PCIe. It is posted, so the device is
//! not waited for, but the CPU stalls until the write has left it. The model spends that many
//! nanoseconds in a dependent computation before the same store.

use std::hint::black_box;

use tenmil_base::{Doorbell, Span};
use tenmil_linux::Clock;

/// Doorbell register with a modeled write cost.
#[derive(Clone, Debug)]
pub struct DoorbellWithPostedCost<B> {
    register: B,
    bus: PostedWriteCost,
}

/// Cost of a posted write, in steps of [`busy_wait`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PostedWriteCost {
    steps: u64,
}

/// Steps in one calibration run, and number of runs. The shortest run counts, since interference
/// only lengthens a run.
const TIMED_STEPS: u64 = 1 << 16;
const TIMES: u32 = 8;

impl PostedWriteCost {
    /// Calibrates a write that stalls the CPU for `cost`, at its current frequency. Takes about a
    /// millisecond.
    pub(crate) fn calibrate(cost: Span, clock: &Clock) -> Self {
        let timed = (0..TIMES).map(|_| {
            let begun = clock.now();
            busy_wait(TIMED_STEPS);
            clock.now().since(begun).ns
        });
        let shortest_ns = timed.min().unwrap_or(1).max(1);
        Self { steps: cost.ns * TIMED_STEPS / shortest_ns }
    }

    /// Wraps a register.
    pub(crate) fn wrap_doorbell<B>(self, register: B) -> DoorbellWithPostedCost<B> {
        DoorbellWithPostedCost { register, bus: self }
    }
}

impl<B: Doorbell> Doorbell for DoorbellWithPostedCost<B> {
    #[inline]
    fn ring(&mut self, value: u32) {
        busy_wait(self.bus.steps);
        self.register.ring(value);
    }
}

/// Stalls the CPU for `steps` dependent multiplications.
#[inline(never)]
fn busy_wait(steps: u64) {
    let mut word = 1_u64;
    for _ in 0..steps {
        word = black_box(word.wrapping_mul(0x5851_f42d_4c95_7f2d));
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{Doorbell, Span};
    use tenmil_linux::Clock;

    use super::PostedWriteCost;

    #[derive(Default)]
    struct Rung(Vec<u32>);

    impl Doorbell for Rung {
        fn ring(&mut self, value: u32) {
            self.0.push(value);
        }
    }

    #[test]
    fn delayed_register_receives_each_write_once() {
        let clock = Clock::start();
        let bus = PostedWriteCost::calibrate(Span::from_us(50), &clock);
        let mut posted = bus.wrap_doorbell(Rung::default());
        let begun = clock.now();
        (1..=20).for_each(|value| posted.ring(value));
        // The stall has a lower bound only; how much longer it takes depends on the machine.
        assert!(clock.now().since(begun) >= Span::from_us(20 * 50 / 4));
        assert_eq!(posted.register.0, (1..=20).collect::<Vec<_>>());
    }

    #[test]
    fn a_write_that_costs_twice_as_much_takes_twice_the_steps() {
        let clock = Clock::start();
        assert_eq!(PostedWriteCost::calibrate(Span::from_us(0), &clock).steps, 0);
        assert!(
            PostedWriteCost::calibrate(Span::from_us(100), &clock).steps
                > PostedWriteCost::calibrate(Span::from_us(1), &clock).steps
        );
    }
}
