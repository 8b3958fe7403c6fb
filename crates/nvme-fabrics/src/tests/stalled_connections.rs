//! A stalled connection of a queue: when its thread looks, and what waits for the probe.

use tenmil_base::{ChannelWakeup, Operation, Span};
use tenmil_sim::sim_network::{LinkFault, LinkSide};

use super::bed::Bed;
use super::turning::Turning;
use crate::timeout_policy::TimeoutPolicy;

/// Nothing else wakes the thread of the queue: its controller has a thread of its own.
#[test]
fn sleeping_thread_with_a_request_in_flight_wakes_in_time_to_notice_a_stalled_connection() {
    let mut bed = Bed::with_queue(32);
    bed.exchange(0, 8, 0);
    bed.target.state().networks[1].inject_fault(LinkSide::Downstream, LinkFault::BlackHole);
    let place = bed.place(0, 8);
    assert!(bed.submit(0, Operation::Read, 0, &[place], 1));
    let third = Span { ns: TimeoutPolicy::default().detect.ns / 3 };
    while bed.remote().counts().lost == 0 {
        let asleep = bed.queues[0].wake_at().since(bed.now);
        assert!(asleep <= third, "it sleeps {asleep}");
        bed.turn_for(Span::from_ms(100));
    }
}

/// The probe has an entry of the queue that a command would take.
#[test]
fn command_is_sent_once_the_probe_of_its_connection_is_answered() {
    let mut bed = Bed::with_queue(8);
    bed.exchange(0, 8, 0);
    (bed.target.state().is_idle, bed.target.state().ignores_probes) = (true, true);
    let place = bed.place(0, 8);
    assert!(bed.submit(0, Operation::Read, 0, &[place], 0));
    bed.turn_for(Span { ns: TimeoutPolicy::default().detect.ns / 4 * 3 });
    assert_eq!(bed.remote().counts().lost, 0);
    let before = bed.target.state().heard;
    (1..7).for_each(|token| assert!(bed.submit(0, Operation::Read, 0, &[place], token)));
    bed.turn_for(Span::from_ms(1));
    assert_eq!(bed.target.state().heard, before);
    bed.target.state().is_idle = false;
    bed.turn_until(|bed| bed.completions.len() == 7);
    assert_eq!(bed.remote().counts().lost, 1);
}
