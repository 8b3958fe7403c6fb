//! Flushes after the failure of a controller with a volatile cache.

use tenmil_base::{Durability, IoStatus, Operation, Request};

use super::{NamespaceQueueHarness, NamespaceView, VIEW, read_request, segment};
use crate::queue_link::QueueState;

fn flush_request(token: u64) -> Request {
    Request { token, operation: Operation::Flush, ..Request::PLACEHOLDER }
}

/// The controller fails, and recovers.
fn fail_and_recover_controller(harness: &mut NamespaceQueueHarness) {
    harness.controller.set_state(QueueState::Frozen);
    harness.poll();
    harness.controller.record_lost_writes();
    harness.controller.set_state(QueueState::Released);
    harness.poll();
    harness.device.reset();
    harness.controller.run(None);
    harness.poll();
}

#[test]
fn flushes_fail_until_lost_writes_are_reported() {
    let mut harness = NamespaceQueueHarness::new(VIEW, 8);
    for _ in 0..3 {
        assert_eq!(harness.submit_for_command(flush_request(1), &[]).opcode(), 0);
        fail_and_recover_controller(&mut harness);
        harness.submit_for_command(read_request(0, 1, 1), &[segment(1, 0, super::BLOCK)]);
        for token in [5, 6] {
            assert!(harness.submit(flush_request(token), &[]));
        }
        assert!(harness.device.fetched.is_empty(), "no flush is sent before its owner knows");
        let lost = [5, 6].map(|token| (token, IoStatus::WRITE_FAULT));
        assert_eq!(harness.poll(), lost);
    }
    harness.submit_for_command(flush_request(7), &[]);
}

#[test]
fn without_a_volatile_cache_no_flush_fails() {
    let view = NamespaceView { durability: Durability::Persistent, ..VIEW };
    let mut harness = NamespaceQueueHarness::new(view, 8);
    fail_and_recover_controller(&mut harness);
    harness.submit_for_command(flush_request(1), &[]);
}
