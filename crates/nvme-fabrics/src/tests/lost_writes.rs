//! Completed writes that are lost with the controller that held them, over one path, in simulated time.

use tenmil_base::{IoChannel, IoStatus, Memory, Operation, RequestFlags, Segment};
use tenmil_nvme_host::Event;
use tenmil_wire::cache::CacheInstance;

use super::bed::Bed;
use super::target::BLOCK;
use super::turning::Turning;
use crate::options::InjectedBugs;

const ONE: CacheInstance = CacheInstance([1; 16]);
const OTHER: CacheInstance = CacheInstance([2; 16]);

/// A bed with a queue to a target that has a volatile cache.
fn bed(cache: Option<CacheInstance>, bugs: InjectedBugs) -> Bed {
    let mut bed = Bed::new();
    {
        let mut state = bed.target.state();
        // Write Zeroes and Dataset Management.
        state.identity = state.identity.clone().with(|it| it.vwcp(true).oncs(0x0c));
        state.cache = cache;
    }
    let mut options = Bed::options();
    options.injected_bugs = bugs;
    bed.call(options).unwrap();
    bed.add_queue(32);
    bed
}

impl Bed {
    fn submit_flagged(
        &mut self,
        queue: usize,
        operation: Operation,
        flags: RequestFlags,
        token: u64,
    ) {
        let place = self.place(0, 8);
        let segments: &[Segment] = if operation == Operation::Write { &[place] } else { &[] };
        self.turn_until(|bed| {
            let request = tenmil_base::Request {
                flags,
                blocks: if operation == Operation::Flush { 0 } else { 8 },
                ..Self::request(operation, 8, segments, token)
            };
            let taken = bed.queues[queue].submit(bed.now, &[request], segments);
            bed.queues[queue].flush();
            taken == 1
        });
    }

    #[track_caller]
    fn end_of(&mut self, token: u64) -> IoStatus {
        self.turn_until(|bed| bed.completions.iter().any(|completion| completion.token == token));
        let at = self.completions.iter().position(|completion| completion.token == token).unwrap();
        self.completions.remove(at).status
    }

    #[track_caller]
    fn done(&mut self, queue: usize, operation: Operation, flags: RequestFlags) -> IoStatus {
        self.submit_flagged(queue, operation, flags, 99);
        self.end_of(99)
    }

    #[track_caller]
    fn write(&mut self, value: u8) {
        let place = self.place(0, 8);
        self.regions.fill(place, value).unwrap();
        assert_eq!(self.done(0, Operation::Write, RequestFlags::NONE), IoStatus::SUCCESS);
    }

    #[track_caller]
    fn flush_on(&mut self, queue: usize) -> IoStatus {
        self.done(queue, Operation::Flush, RequestFlags::NONE)
    }

    /// The connection is lost, and the next one leads to another controller.
    fn lose_controller(&mut self) {
        self.events.clear();
        self.target.cut();
        self.turn_until(|bed| bed.events.contains(&Event::Recovered));
        let count = self.queues.len();
        let is_resumed = |event: &&Event| matches!(event, Event::QueuePairResumed { .. });
        self.turn_until(|bed| bed.events.iter().filter(is_resumed).count() == count);
    }

    fn is_durable(&self, value: u8) -> bool {
        let durable = self.target.state().durable.lock().unwrap().clone();
        durable[8 * BLOCK..16 * BLOCK].iter().all(|byte| *byte == value)
    }
}

#[test]
fn first_flush_after_a_lost_controller_fails_once() {
    let mut bed = bed(None, InjectedBugs::default());
    for round in 1..4 {
        bed.write(round);
        bed.lose_controller();
        assert_eq!(bed.flush_on(0), IoStatus::WRITE_FAULT, "round {round}");
        assert!(!bed.is_durable(round), "round {round}");
        assert_eq!(bed.flush_on(0), IoStatus::SUCCESS, "round {round}");
        bed.write(round);
        assert_eq!(bed.flush_on(0), IoStatus::SUCCESS, "round {round}");
        assert!(bed.is_durable(round), "round {round}");
    }
}

#[test]
fn simulation_can_put_the_bug_back() {
    let mut bed = bed(None, InjectedBugs { flush_ignores_lost_writes: true });
    bed.write(1);
    bed.lose_controller();
    assert_eq!(bed.flush_on(0), IoStatus::SUCCESS);
    assert!(!bed.is_durable(1));
}

#[test]
fn same_cache_instance_loses_nothing_and_another_one_does() {
    for (after, expected) in [
        (Some(ONE), IoStatus::SUCCESS),
        (Some(OTHER), IoStatus::WRITE_FAULT),
        (None, IoStatus::WRITE_FAULT),
    ] {
        let mut bed = bed(Some(ONE), InjectedBugs::default());
        bed.write(7);
        if after != Some(ONE) {
            bed.target.state().unflushed.clear();
        }
        bed.target.state().cache = after;
        bed.lose_controller();
        assert_eq!(bed.flush_on(0), expected, "{after:?}");
        assert_eq!(bed.is_durable(7), expected.is_success(), "{after:?}");
        assert_eq!(bed.flush_on(0), IoStatus::SUCCESS, "{after:?}");
    }
}

/// The cache keeps its contents across any number of connections, but not what was lost in between.
#[test]
fn instance_vouches_across_several_connections_and_not_across_another_instance() {
    let mut bed = bed(Some(ONE), InjectedBugs::default());
    bed.write(1);
    (0..3).for_each(|_| bed.lose_controller());
    bed.write(2);
    bed.lose_controller();
    assert_eq!(bed.flush_on(0), IoStatus::SUCCESS);
    bed.write(3);
    bed.target.state().cache = Some(OTHER);
    bed.lose_controller();
    bed.write(4);
    assert_eq!(bed.flush_on(0), IoStatus::WRITE_FAULT);
    assert_eq!(bed.flush_on(0), IoStatus::SUCCESS);
}

#[test]
fn nothing_at_risk_fails_nothing() {
    for (operation, flags) in [
        (Operation::Read, RequestFlags::NONE),
        (Operation::Write, RequestFlags::FUA),
        (Operation::Flush, RequestFlags::NONE),
    ] {
        let mut bed = bed(None, InjectedBugs::default());
        bed.write(1);
        assert_eq!(bed.flush_on(0), IoStatus::SUCCESS);
        let operation_of =
            |operation| if operation == Operation::Read { Operation::Flush } else { operation };
        assert_eq!(bed.done(0, operation_of(operation), flags), IoStatus::SUCCESS);
        if operation == Operation::Read {
            let place = bed.place(1, 8);
            assert_eq!(bed.run(Operation::Read, 8, &[place]), IoStatus::SUCCESS);
        }
        bed.lose_controller();
        assert_eq!(bed.flush_on(0), IoStatus::SUCCESS, "{operation:?}");
    }
}

#[test]
fn device_without_a_volatile_cache_loses_nothing() {
    let mut bed = Bed::with_queue(32);
    bed.write(1);
    bed.lose_controller();
    assert_eq!(bed.flush_on(0), IoStatus::SUCCESS);
}

#[test]
fn zeroes_and_deallocations_are_lost_like_writes() {
    for operation in [Operation::WriteZeroes, Operation::Deallocate] {
        let mut bed = bed(None, InjectedBugs::default());
        assert_eq!(bed.done(0, operation, RequestFlags::NONE), IoStatus::SUCCESS);
        bed.lose_controller();
        assert_eq!(bed.flush_on(0), IoStatus::WRITE_FAULT, "{operation:?}");
        assert_eq!(bed.flush_on(0), IoStatus::SUCCESS, "{operation:?}");
    }
}

/// One was submitted while the old controller was present, the other one while none was.
#[test]
fn flushes_that_are_held_over_a_reconnect_fail() {
    let mut bed = bed(None, InjectedBugs::default());
    bed.write(1);
    bed.target.state().is_idle = true;
    (0..2).for_each(|token| bed.submit_flagged(0, Operation::Flush, RequestFlags::NONE, token));
    bed.target.state().is_idle = false;
    bed.lose_controller();
    assert_eq!([bed.end_of(0), bed.end_of(1)], [IoStatus::WRITE_FAULT; 2]);
    assert_eq!(bed.flush_on(0), IoStatus::SUCCESS);
    bed.write(2);
    bed.events.clear();
    bed.target.cut();
    bed.turn();
    bed.submit_flagged(0, Operation::Flush, RequestFlags::NONE, 2);
    assert_eq!(bed.end_of(2), IoStatus::WRITE_FAULT);
    assert_eq!(bed.flush_on(0), IoStatus::SUCCESS);
}

#[test]
fn every_queue_fails_one_flush_for_each_loss() {
    let mut bed = bed(None, InjectedBugs::default());
    bed.add_queue(32);
    bed.add_queue(32);
    bed.write(1);
    bed.lose_controller();
    for queue in 0..3 {
        assert_eq!(bed.flush_on(queue), IoStatus::WRITE_FAULT, "queue {queue}");
        assert_eq!(bed.flush_on(queue), IoStatus::SUCCESS, "queue {queue}");
    }
    // A completed flush of the other queue covers the writes of this one.
    bed.write(2);
    assert_eq!(bed.flush_on(2), IoStatus::SUCCESS);
    bed.lose_controller();
    assert_eq!(bed.flush_on(0), IoStatus::SUCCESS);
}

/// Like a client that reopens the device: the loss was not reported yet, or it was.
#[test]
fn losses_that_are_heeded_fail_no_flush_and_later_ones_do() {
    let mut bed = bed(None, InjectedBugs::default());
    bed.add_queue(32);
    bed.write(1);
    bed.lose_controller();
    assert_eq!(bed.flush_on(0), IoStatus::WRITE_FAULT);
    assert_eq!(bed.queues[1].write_losses(), 1);
    bed.queues[1].ack_repaired_losses(1);
    assert_eq!(bed.flush_on(1), IoStatus::SUCCESS, "its owner knows of it");
    for is_counted in [false, true] {
        bed.write(2);
        bed.lose_controller();
        if is_counted {
            assert_eq!(bed.flush_on(0), IoStatus::WRITE_FAULT);
        }
        bed.queues[1].ack_repaired_losses(1);
        assert_eq!(bed.flush_on(1), IoStatus::WRITE_FAULT, "another one, counted: {is_counted}");
        bed.queues[0].ack_repaired_losses(2);
    }
}

#[test]
fn queue_that_is_made_after_a_loss_reports_it_if_nobody_has() {
    for is_reported in [false, true] {
        let mut bed = bed(None, InjectedBugs::default());
        bed.write(1);
        bed.lose_controller();
        if is_reported {
            assert_eq!(bed.flush_on(0), IoStatus::WRITE_FAULT);
        }
        bed.queues.clear();
        bed.turn();
        bed.events.clear();
        bed.add_queue(32);
        let expected = if is_reported { IoStatus::SUCCESS } else { IoStatus::WRITE_FAULT };
        assert_eq!(bed.flush_on(0), expected, "{is_reported}");
        assert_eq!(bed.flush_on(0), IoStatus::SUCCESS, "{is_reported}");
    }
}

/// An idle queue does not detect the loss of its connection, and finds the next one.
#[test]
fn idle_queue_that_missed_the_reconnect_fails_nothing_for_its_later_writes() {
    let mut bed = bed(None, InjectedBugs::default());
    bed.write(1);
    assert_eq!(bed.flush_on(0), IoStatus::SUCCESS);
    let queue = bed.queues.pop().unwrap();
    bed.events.clear();
    bed.target.cut();
    bed.turn_until(|bed| bed.events.contains(&Event::Recovered));
    bed.queues.push(queue);
    bed.turn_until(|bed| bed.events.contains(&Event::QueuePairResumed { id: 1 }));
    bed.write(2);
    assert_eq!(bed.flush_on(0), IoStatus::SUCCESS);
    assert!(bed.is_durable(2));
}
