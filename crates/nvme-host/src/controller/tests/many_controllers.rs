//! One thread with many controllers.

use tenmil_base::{Instant, Random, Span};

use super::{ControllerHarness, short_timeout_options};
use crate::Event;

/// A hundred controllers, each with its own delay, some of them never ready: the slowest takes as long as
/// it would alone, and none waits for another.
#[test]
fn hundred_controllers_initialize_concurrently() {
    let mut random = Random::new(11);
    let mut worlds: Vec<ControllerHarness> = (0..100)
        .map(|index| {
            let lag = if index % 10 == 9 { 100_000 } else { random.below(480) };
            ControllerHarness::with_device(short_timeout_options(), |state| {
                state.enable_lag = Span::from_ms(lag);
                state.command_lag = Span::from_us(random.below(2_000));
            })
        })
        .collect();
    let mut now = Instant::default();
    let mut polls = 0_u64;
    while worlds.iter().any(|harness| harness.events.is_empty()) {
        for harness in &mut worlds {
            // No party is polled before its wake time.
            if harness.controller.wake_at() <= now || harness.device.state().wake_at() <= now {
                harness.now = now;
                harness.poll_all();
                polls += 1;
            }
        }
        let wakes = worlds
            .iter()
            .map(|harness| harness.controller.wake_at().min(harness.device.state().wake_at()));
        now = wakes.min().unwrap().max(now.after(Span::from_us(1)));
        assert!(now < Instant { ns: 600_000_000 }, "a controller has no event after 600 s");
    }
    for (index, harness) in worlds.iter_mut().enumerate() {
        harness.run_for(Span::from_ms(50));
        let last = harness.events_without_times().pop().unwrap();
        match index % 10 {
            9 => assert!(matches!(last, Event::Dead(_)), "{index}: {last:?}"),
            _ => assert_eq!(last, Event::Ready, "{index}"),
        }
    }
    assert!(polls < 1_000_000, "{polls}");
}
