//! Sleeping threads: no lost wake-ups, and no needless ones.

use std::sync::Arc;

use tenmil_base::{ChannelWakeup, Operation, Span, Wake, WakeSource};
use tenmil_sim::sim_network::{LinkOptions, LinkTransferDirection};

use super::simulated_time::SimulatedTime;
use super::single_path_host::SinglePathHost;
use crate::wait_handle::WaitHandle;

/// Sleep in simulated time: the test polls by itself.
struct PolledWaitHandle;

impl WaitHandle for PolledWaitHandle {
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

/// A host whose queue has writes of 1 MiB each in flight: commands sent, completions outstanding.
fn host_with_writes_in_flight(count: u64) -> SinglePathHost {
    let mut host = SinglePathHost::new();
    let roomy = LinkOptions { room_bytes: 16 << 20, ..LinkOptions::default() };
    host.target.state().network.there = roomy;
    assert!(host.await_connection());
    host.add_queue(8);
    let queue = host.queues.remove(0);
    host.queues.push(queue.with_wait_handle(Box::new(PolledWaitHandle)));
    // Without recent completions, large data is not sent in small portions.
    host.run_for(Span::from_ms(2));
    host.target.state().withholds_completions = true;
    for number in 0..count {
        let place = host.buffer(number, 2048);
        assert!(host.submit(0, Operation::Write, 0, &[place], number));
    }
    host
}

/// Polls the queue until its thread would sleep. False if it never would.
fn can_sleep(host: &mut SinglePathHost) -> bool {
    (0..20).any(|_| {
        host.poll_queues();
        !host.queues[0].arm()
    })
}

#[test]
fn thread_does_not_sleep_with_data_that_the_socket_accepts() {
    let mut host = host_with_writes_in_flight(3);
    host.target.step(host.now);
    assert!(can_sleep(&mut host));
    (0..100).for_each(|_| host.target.step(host.now));
    let arrived =
        host.target.state().networks[1].arrived_byte_count(LinkTransferDirection::Upstream);
    assert!(arrived > 3 << 20, "{arrived}");
}

/// A completion may take long. The release of the data in the meantime wakes the thread at most once.
#[test]
fn memory_release_reports_do_not_keep_the_thread_awake() {
    let mut host = host_with_writes_in_flight(1);
    for _ in 0..10 {
        host.target.step(host.now);
        assert!(can_sleep(&mut host));
    }
    let network = host.target.state().networks[1].clone();
    assert!(network.arrived_byte_count(LinkTransferDirection::Upstream) > 1 << 20);
}
