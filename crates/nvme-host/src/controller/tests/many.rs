//! One thread with many controllers.

use tenmil_base::{Instant, Random, Span};

use super::{World, options};
use crate::Event;

/// A hundred controllers, each with its own delay, some of them never ready: the slowest takes as long as
/// it would alone, and none waits for another.
#[test]
fn a_hundred_controllers_come_up_side_by_side() {
    let mut random = Random::new(11);
    let mut worlds: Vec<World> = (0..100)
        .map(|index| {
            let lag = if index % 10 == 9 { 100_000 } else { random.below(480) };
            World::with(options(), |script| {
                script.enable_lag = Span::from_ms(lag);
                script.command_lag = Span::from_us(random.below(2_000));
            })
        })
        .collect();
    let mut now = Instant::default();
    let mut polls = 0_u64;
    while worlds.iter().any(|world| world.events.is_empty()) {
        for world in &mut worlds {
            // No party is polled before its wake time.
            if world.controller.wake_at() <= now || world.device.script().wake_at() <= now {
                world.now = now;
                world.moment();
                polls += 1;
            }
        }
        let wakes = worlds
            .iter()
            .map(|world| world.controller.wake_at().min(world.device.script().wake_at()));
        now = wakes.min().unwrap().max(now.after(Span::from_us(1)));
        assert!(now < Instant { ns: 600_000_000 }, "a controller has no event after 600 s");
    }
    for (index, world) in worlds.iter_mut().enumerate() {
        world.run(Span::from_ms(50));
        let last = world.told().pop().unwrap();
        match index % 10 {
            9 => assert!(matches!(last, Event::Dead(_)), "{index}: {last:?}"),
            _ => assert_eq!(last, Event::Ready, "{index}"),
        }
    }
    assert!(polls < 1_000_000, "{polls}");
}
