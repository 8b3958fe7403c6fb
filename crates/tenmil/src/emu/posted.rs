//! A model of a doorbell behind a bus.
//!
//! A doorbell of an emulated SSD is a store into a cache line, which the processor forgets as soon
//! as it has made it. One of a real device is a write to uncached memory across PCIe: it is posted,
//! so nobody waits for the device, but the processor is held until the write has left it. Here that
//! is so many nanoseconds of work that nobody needs, before the same store.

use std::hint::black_box;

use base::{Doorbell, Span};
use host::Clock;

/// A doorbell register, and what ringing it costs.
#[derive(Clone, Debug)]
pub(crate) struct PostedWrite<B> {
    register: B,
    bus: Bus,
}

/// What a write across a bus costs, counted in steps of [`hold`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bus {
    steps: u64,
}

/// Steps that are timed to find out how long one is, and how often: the shortest counts, since
/// whatever else the machine does only makes one longer.
const TIMED_STEPS: u64 = 1 << 16;
const TIMES: u32 = 8;

impl Bus {
    /// A bus on which a write holds the processor for `cost`, as fast as this processor is now.
    /// Takes about a millisecond.
    pub(crate) fn of(cost: Span, clock: &Clock) -> Self {
        let timed = (0..TIMES).map(|_| {
            let begun = clock.now();
            hold(TIMED_STEPS);
            clock.now().since(begun).ns
        });
        let shortest_ns = timed.min().unwrap_or(1).max(1);
        Self { steps: cost.ns * TIMED_STEPS / shortest_ns }
    }

    /// A register behind this bus.
    pub(crate) fn before<B>(self, register: B) -> PostedWrite<B> {
        PostedWrite { register, bus: self }
    }
}

impl<B: Doorbell> Doorbell for PostedWrite<B> {
    #[inline]
    fn ring(&mut self, value: u32) {
        hold(self.bus.steps);
        self.register.ring(value);
    }
}

/// Holds the processor for so many steps, each of which has to wait for the one before it.
#[inline(never)]
fn hold(steps: u64) {
    let mut word = 1_u64;
    for _ in 0..steps {
        word = black_box(word.wrapping_mul(0x5851_f42d_4c95_7f2d));
    }
}

#[cfg(test)]
mod tests {
    use base::{Doorbell, Span};
    use host::Clock;

    use super::Bus;

    #[derive(Default)]
    struct Rung(Vec<u32>);

    impl Doorbell for Rung {
        fn ring(&mut self, value: u32) {
            self.0.push(value);
        }
    }

    #[test]
    fn a_register_behind_a_bus_is_rung_once_for_each_write_and_later() {
        let clock = Clock::start();
        let bus = Bus::of(Span::from_us(50), &clock);
        let mut posted = bus.before(Rung::default());
        let begun = clock.now();
        (1..=20).for_each(|value| posted.ring(value));
        // Never much less than it should be; how much more is the machine's affair.
        assert!(clock.now().since(begun) >= Span::from_us(20 * 50 / 4));
        assert_eq!(posted.register.0, (1..=20).collect::<Vec<_>>());
    }

    #[test]
    fn a_write_that_costs_twice_as_much_takes_twice_the_steps() {
        let clock = Clock::start();
        assert_eq!(Bus::of(Span::from_us(0), &clock).steps, 0);
        assert!(
            Bus::of(Span::from_us(100), &clock).steps > Bus::of(Span::from_us(1), &clock).steps
        );
    }
}
