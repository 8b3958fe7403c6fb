//! Flushes after the failure of a controller with a volatile cache.

use tenmil_base::{Durability, IoStatus, Operation, Request};

use super::{NamespaceQueueHarness, NamespaceView, VIEW, read, segment};
use crate::queue_link::QueueState;

fn flush(token: u64) -> Request {
    Request { token, operation: Operation::Flush, ..Request::PLACEHOLDER }
}

/// The controller fails, and recovers.
fn fail(harness: &mut NamespaceQueueHarness) {
    harness.controller.set_state(QueueState::Frozen);
    harness.poll();
    harness.controller.lose_writes();
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
        assert_eq!(harness.command_of(flush(1), &[]).opcode(), 0);
        fail(&mut harness);
        harness.command_of(read(0, 1, 1), &[segment(1, 0, super::BLOCK)]);
        for token in [5, 6] {
            assert!(harness.submit(flush(token), &[]));
        }
        assert!(harness.device.fetched.is_empty(), "no flush is sent before its owner knows");
        let lost = [5, 6].map(|token| (token, IoStatus::WRITE_FAULT));
        assert_eq!(harness.poll(), lost);
    }
    harness.command_of(flush(7), &[]);
}

#[test]
fn without_a_volatile_cache_no_flush_fails() {
    let view = NamespaceView { durability: Durability::Persistent, ..VIEW };
    let mut harness = NamespaceQueueHarness::new(view, 8);
    fail(&mut harness);
    harness.command_of(flush(1), &[]);
}
