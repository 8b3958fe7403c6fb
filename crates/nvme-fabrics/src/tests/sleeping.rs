//! Sleeping threads: no lost wake-ups, and no needless ones.

use std::sync::Arc;

use tenmil_base::{ChannelWakeup, Operation, Span, Wake, WakeSource};
use tenmil_sim::sim_network::{LinkOptions, LinkSide};

use super::bed::Bed;
use super::turning::Turning;
use crate::wait_handle::WaitHandle;

/// Sleep in simulated time: the test polls by itself.
struct Nap;

impl WaitHandle for Nap {
    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::None
    }

    fn watch(&mut self, _: WakeSource<'_>) -> bool {
        true
    }

    fn waker(&self) -> Arc<dyn Wake + Send + Sync> {
        Arc::new(())
    }

    fn clear(&mut self) {}
}

/// A bed whose queue has writes of 1 MiB each in flight: commands sent, completions outstanding.
fn bed_with_writes(count: u64) -> Bed {
    let mut bed = Bed::new();
    let roomy = LinkOptions { room_bytes: 16 << 20, ..LinkOptions::default() };
    bed.target.state().network.there = roomy;
    assert!(bed.is_reached());
    bed.add_queue(8);
    let queue = bed.queues.remove(0);
    bed.queues.push(queue.with_wait_handle(Box::new(Nap)));
    // Without recent completions, large data is not sent in small portions.
    bed.turn_for(Span::from_ms(2));
    bed.target.state().is_idle = true;
    for number in 0..count {
        let place = bed.place(number, 2048);
        assert!(bed.submit(0, Operation::Write, 0, &[place], number));
    }
    bed
}

/// Polls the queue until its thread would sleep. False if it never would.
fn falls_asleep(bed: &mut Bed) -> bool {
    (0..20).any(|_| {
        bed.turn_queues();
        !bed.queues[0].arm()
    })
}

#[test]
fn nobody_sleeps_with_data_left_that_there_is_room_for() {
    let mut bed = bed_with_writes(3);
    bed.target.turn(bed.now);
    assert!(falls_asleep(&mut bed));
    (0..100).for_each(|_| bed.target.turn(bed.now));
    let arrived = bed.target.state().networks[1].is_data_available(LinkSide::Upstream);
    assert!(arrived > 3 << 20, "{arrived}");
}

/// A completion may take long. The release of the data in the meantime wakes the thread at most once.
#[test]
fn released_memory_keeps_nobody_awake() {
    let mut bed = bed_with_writes(1);
    for _ in 0..10 {
        bed.target.turn(bed.now);
        assert!(falls_asleep(&mut bed));
    }
    let network = bed.target.state().networks[1].clone();
    assert!(network.is_data_available(LinkSide::Upstream) > 1 << 20);
}
