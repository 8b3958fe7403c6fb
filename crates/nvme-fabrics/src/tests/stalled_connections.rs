//! A stalled connection of a queue: when its thread looks, and what waits for the probe.

use tenmil_base::{ChannelWakeup, Operation, Span};
use tenmil_sim::sim_network::{LinkFault, LinkTransferDirection};

use super::simulated_time::SimulatedTime;
use super::single_path_host::SinglePathHost;
use crate::timeout_policy::TimeoutPolicy;

/// Nothing else wakes the thread of the queue: its controller has a thread of its own.
#[test]
fn sleeping_thread_with_a_request_in_flight_wakes_in_time_to_notice_a_stalled_connection() {
    let mut host = SinglePathHost::with_queue(32);
    host.write_and_verify(0, 8, 0);
    host.target.state().networks[1]
        .inject_fault(LinkTransferDirection::Downstream, LinkFault::BlackHole);
    let place = host.buffer(0, 8);
    assert!(host.submit(0, Operation::Read, 0, &[place], 1));
    let third = Span { ns: TimeoutPolicy::default().detect.ns / 3 };
    while host.controller().connection_stats().lost == 0 {
        let asleep = host.queues[0].wake_at().since(host.now);
        assert!(asleep <= third, "it sleeps {asleep}");
        host.run_for(Span::from_ms(100));
    }
}

/// The probe has an entry of the queue that a command would take.
#[test]
fn command_is_sent_once_the_probe_of_its_connection_is_answered() {
    let mut host = SinglePathHost::with_queue(8);
    host.write_and_verify(0, 8, 0);
    (host.target.state().withholds_completions, host.target.state().ignores_probes) = (true, true);
    let place = host.buffer(0, 8);
    assert!(host.submit(0, Operation::Read, 0, &[place], 0));
    host.run_for(Span { ns: TimeoutPolicy::default().detect.ns / 4 * 3 });
    assert_eq!(host.controller().connection_stats().lost, 0);
    let before = host.target.state().received_io_commands;
    (1..7).for_each(|token| assert!(host.submit(0, Operation::Read, 0, &[place], token)));
    host.run_for(Span::from_ms(1));
    assert_eq!(host.target.state().received_io_commands, before);
    host.target.state().withholds_completions = false;
    host.run_until(|host| host.completions.len() == 7);
    assert_eq!(host.controller().connection_stats().lost, 1);
}
