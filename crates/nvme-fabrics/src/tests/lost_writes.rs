//! Completed writes that are lost with the controller that held them, over one path, in simulated time.

use tenmil_base::{IoChannel, IoStatus, Memory, Operation, RequestFlags, Segment};
use tenmil_nvme_host::Event;
use tenmil_wire::cache_instance::CacheInstance;

use super::simulated_time::SimulatedTime;
use super::single_path_host::SinglePathHost;
use super::target::BLOCK;
use crate::options::InjectedBugs;

const ONE: CacheInstance = CacheInstance([1; 16]);
const OTHER: CacheInstance = CacheInstance([2; 16]);

/// A host with a queue to a target that has a volatile cache.
fn host_with_cached_target(cache: Option<CacheInstance>, bugs: InjectedBugs) -> SinglePathHost {
    let mut host = SinglePathHost::new();
    {
        let mut state = host.target.state();
        // Write Zeroes and Dataset Management.
        state.identity = state.identity.clone().with(|it| it.vwcp(true).oncs(0x0c));
        state.cache = cache;
    }
    let mut options = SinglePathHost::options();
    options.injected_bugs = bugs;
    host.connect(options).unwrap();
    host.add_queue(32);
    host
}

impl SinglePathHost {
    fn submit_flagged(
        &mut self,
        queue: usize,
        operation: Operation,
        flags: RequestFlags,
        token: u64,
    ) {
        let place = self.buffer(0, 8);
        let segments: &[Segment] = if operation == Operation::Write { &[place] } else { &[] };
        self.run_until(|host| {
            let request = tenmil_base::Request {
                flags,
                blocks: if operation == Operation::Flush { 0 } else { 8 },
                ..Self::request(operation, 8, segments, token)
            };
            let taken = host.queues[queue].submit(host.now, &[request], segments);
            host.queues[queue].flush_submissions();
            taken == 1
        });
    }

    #[track_caller]
    fn await_completion(&mut self, token: u64) -> IoStatus {
        self.run_until(|host| host.completions.iter().any(|completion| completion.token == token));
        let at = self.completions.iter().position(|completion| completion.token == token).unwrap();
        self.completions.remove(at).status
    }

    #[track_caller]
    fn run_flagged(&mut self, queue: usize, operation: Operation, flags: RequestFlags) -> IoStatus {
        self.submit_flagged(queue, operation, flags, 99);
        self.await_completion(99)
    }

    #[track_caller]
    fn write(&mut self, value: u8) {
        let place = self.buffer(0, 8);
        self.regions.fill(place, value).unwrap();
        assert_eq!(self.run_flagged(0, Operation::Write, RequestFlags::NONE), IoStatus::SUCCESS);
    }

    #[track_caller]
    fn flush_on(&mut self, queue: usize) -> IoStatus {
        self.run_flagged(queue, Operation::Flush, RequestFlags::NONE)
    }

    /// The connection is lost, and the next one leads to another controller.
    fn lose_controller(&mut self) {
        self.events.clear();
        self.target.cut();
        self.run_until(|host| host.events.contains(&Event::Recovered));
        let count = self.queues.len();
        let is_resumed = |event: &&Event| matches!(event, Event::QueuePairResumed { .. });
        self.run_until(|host| host.events.iter().filter(is_resumed).count() == count);
    }

    fn is_durable(&self, value: u8) -> bool {
        let durable = self.target.state().durable.lock().unwrap().clone();
        durable[8 * BLOCK..16 * BLOCK].iter().all(|byte| *byte == value)
    }
}

#[test]
fn first_flush_after_a_lost_controller_fails_once() {
    let mut host = host_with_cached_target(None, InjectedBugs::default());
    for round in 1..4 {
        host.write(round);
        host.lose_controller();
        assert_eq!(host.flush_on(0), IoStatus::WRITE_FAULT, "round {round}");
        assert!(!host.is_durable(round), "round {round}");
        assert_eq!(host.flush_on(0), IoStatus::SUCCESS, "round {round}");
        host.write(round);
        assert_eq!(host.flush_on(0), IoStatus::SUCCESS, "round {round}");
        assert!(host.is_durable(round), "round {round}");
    }
}

#[test]
fn injected_bug_hides_lost_writes() {
    let mut host = host_with_cached_target(None, InjectedBugs { flush_ignores_lost_writes: true });
    host.write(1);
    host.lose_controller();
    assert_eq!(host.flush_on(0), IoStatus::SUCCESS);
    assert!(!host.is_durable(1));
}

#[test]
fn same_cache_instance_loses_nothing_and_another_one_does() {
    for (after, expected) in [
        (Some(ONE), IoStatus::SUCCESS),
        (Some(OTHER), IoStatus::WRITE_FAULT),
        (None, IoStatus::WRITE_FAULT),
    ] {
        let mut host = host_with_cached_target(Some(ONE), InjectedBugs::default());
        host.write(7);
        if after != Some(ONE) {
            host.target.state().unflushed.clear();
        }
        host.target.state().cache = after;
        host.lose_controller();
        assert_eq!(host.flush_on(0), expected, "{after:?}");
        assert_eq!(host.is_durable(7), expected.is_success(), "{after:?}");
        assert_eq!(host.flush_on(0), IoStatus::SUCCESS, "{after:?}");
    }
}

/// The cache keeps its contents across any number of connections, but not what was lost in between.
#[test]
fn cache_instance_covers_several_connections_but_not_another_instance() {
    let mut host = host_with_cached_target(Some(ONE), InjectedBugs::default());
    host.write(1);
    (0..3).for_each(|_| host.lose_controller());
    host.write(2);
    host.lose_controller();
    assert_eq!(host.flush_on(0), IoStatus::SUCCESS);
    host.write(3);
    host.target.state().cache = Some(OTHER);
    host.lose_controller();
    host.write(4);
    assert_eq!(host.flush_on(0), IoStatus::WRITE_FAULT);
    assert_eq!(host.flush_on(0), IoStatus::SUCCESS);
}

#[test]
fn flush_without_unflushed_writes_succeeds_after_a_loss() {
    for (operation, flags) in [
        (Operation::Read, RequestFlags::NONE),
        (Operation::Write, RequestFlags::FUA),
        (Operation::Flush, RequestFlags::NONE),
    ] {
        let mut host = host_with_cached_target(None, InjectedBugs::default());
        host.write(1);
        assert_eq!(host.flush_on(0), IoStatus::SUCCESS);
        let operation_of =
            |operation| if operation == Operation::Read { Operation::Flush } else { operation };
        assert_eq!(host.run_flagged(0, operation_of(operation), flags), IoStatus::SUCCESS);
        if operation == Operation::Read {
            let place = host.buffer(1, 8);
            assert_eq!(host.run_request(Operation::Read, 8, &[place]), IoStatus::SUCCESS);
        }
        host.lose_controller();
        assert_eq!(host.flush_on(0), IoStatus::SUCCESS, "{operation:?}");
    }
}

#[test]
fn device_without_a_volatile_cache_loses_nothing() {
    let mut host = SinglePathHost::with_queue(32);
    host.write(1);
    host.lose_controller();
    assert_eq!(host.flush_on(0), IoStatus::SUCCESS);
}

#[test]
fn zeroes_and_deallocations_are_lost_like_writes() {
    for operation in [Operation::WriteZeroes, Operation::Deallocate] {
        let mut host = host_with_cached_target(None, InjectedBugs::default());
        assert_eq!(host.run_flagged(0, operation, RequestFlags::NONE), IoStatus::SUCCESS);
        host.lose_controller();
        assert_eq!(host.flush_on(0), IoStatus::WRITE_FAULT, "{operation:?}");
        assert_eq!(host.flush_on(0), IoStatus::SUCCESS, "{operation:?}");
    }
}

/// One was submitted while the old controller was present, the other one while none was.
#[test]
fn flushes_that_are_held_over_a_reconnect_fail() {
    let mut host = host_with_cached_target(None, InjectedBugs::default());
    host.write(1);
    host.target.state().withholds_completions = true;
    (0..2).for_each(|token| host.submit_flagged(0, Operation::Flush, RequestFlags::NONE, token));
    host.target.state().withholds_completions = false;
    host.lose_controller();
    assert_eq!([host.await_completion(0), host.await_completion(1)], [IoStatus::WRITE_FAULT; 2]);
    assert_eq!(host.flush_on(0), IoStatus::SUCCESS);
    host.write(2);
    host.events.clear();
    host.target.cut();
    host.step();
    host.submit_flagged(0, Operation::Flush, RequestFlags::NONE, 2);
    assert_eq!(host.await_completion(2), IoStatus::WRITE_FAULT);
    assert_eq!(host.flush_on(0), IoStatus::SUCCESS);
}

#[test]
fn every_queue_fails_one_flush_for_each_loss() {
    let mut host = host_with_cached_target(None, InjectedBugs::default());
    host.add_queue(32);
    host.add_queue(32);
    host.write(1);
    host.lose_controller();
    for queue in 0..3 {
        assert_eq!(host.flush_on(queue), IoStatus::WRITE_FAULT, "queue {queue}");
        assert_eq!(host.flush_on(queue), IoStatus::SUCCESS, "queue {queue}");
    }
    // A completed flush of the other queue covers the writes of this one.
    host.write(2);
    assert_eq!(host.flush_on(2), IoStatus::SUCCESS);
    host.lose_controller();
    assert_eq!(host.flush_on(0), IoStatus::SUCCESS);
}

/// Like a client that reopens the device: the loss was not reported yet, or it was.
#[test]
fn acknowledged_losses_fail_no_flush_and_later_ones_do() {
    let mut host = host_with_cached_target(None, InjectedBugs::default());
    host.add_queue(32);
    host.write(1);
    host.lose_controller();
    assert_eq!(host.flush_on(0), IoStatus::WRITE_FAULT);
    assert_eq!(host.queues[1].known_write_loss_count(), 1);
    host.queues[1].ack_repaired_write_losses(1);
    assert_eq!(host.flush_on(1), IoStatus::SUCCESS, "its owner knows of it");
    for is_counted in [false, true] {
        host.write(2);
        host.lose_controller();
        if is_counted {
            assert_eq!(host.flush_on(0), IoStatus::WRITE_FAULT);
        }
        host.queues[1].ack_repaired_write_losses(1);
        assert_eq!(host.flush_on(1), IoStatus::WRITE_FAULT, "another one, counted: {is_counted}");
        host.queues[0].ack_repaired_write_losses(2);
    }
}

#[test]
fn queue_created_after_a_loss_reports_it_if_not_reported_yet() {
    for is_reported in [false, true] {
        let mut host = host_with_cached_target(None, InjectedBugs::default());
        host.write(1);
        host.lose_controller();
        if is_reported {
            assert_eq!(host.flush_on(0), IoStatus::WRITE_FAULT);
        }
        host.queues.clear();
        host.step();
        host.events.clear();
        host.add_queue(32);
        let expected = if is_reported { IoStatus::SUCCESS } else { IoStatus::WRITE_FAULT };
        assert_eq!(host.flush_on(0), expected, "{is_reported}");
        assert_eq!(host.flush_on(0), IoStatus::SUCCESS, "{is_reported}");
    }
}

/// An idle queue does not detect the loss of its connection, and finds the next one.
#[test]
fn idle_queue_that_missed_the_reconnect_fails_nothing_for_its_later_writes() {
    let mut host = host_with_cached_target(None, InjectedBugs::default());
    host.write(1);
    assert_eq!(host.flush_on(0), IoStatus::SUCCESS);
    let queue = host.queues.pop().unwrap();
    host.events.clear();
    host.target.cut();
    host.run_until(|host| host.events.contains(&Event::Recovered));
    host.queues.push(queue);
    host.run_until(|host| host.events.contains(&Event::QueuePairResumed { id: 1 }));
    host.write(2);
    assert_eq!(host.flush_on(0), IoStatus::SUCCESS);
    assert!(host.is_durable(2));
}
