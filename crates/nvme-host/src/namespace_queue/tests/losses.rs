//! Flushes after the failure of a controller with a volatile cache.

use tenmil_base::{Durability, IoStatus, Operation, Request};

use super::{NamespaceView, VIEW, World, read, segment};
use crate::queue_link::QueueState;

fn flush(token: u64) -> Request {
    Request { token, operation: Operation::Flush, ..Request::PLACEHOLDER }
}

/// The controller fails, and recovers.
fn fail(world: &mut World) {
    world.controller.set_state(QueueState::Frozen);
    world.poll();
    world.controller.lose_writes();
    world.controller.set_state(QueueState::Released);
    world.poll();
    world.device.reset();
    world.controller.set_state(QueueState::Running);
    world.poll();
}

#[test]
fn flushes_fail_until_the_owner_knows_that_writes_are_lost() {
    let mut world = World::new(VIEW, 8);
    for _ in 0..3 {
        assert_eq!(world.command_of(flush(1), &[]).opcode(), 0);
        fail(&mut world);
        world.command_of(read(0, 1, 1), &[segment(1, 0, super::BLOCK)]);
        for token in [5, 6] {
            assert!(world.submit(flush(token), &[]));
        }
        assert!(world.device.fetched.is_empty(), "no flush is sent before its owner knows");
        let lost = [5, 6].map(|token| (token, IoStatus::WRITE_FAULT));
        assert_eq!(world.poll(), lost);
    }
    world.command_of(flush(7), &[]);
}

#[test]
fn without_a_volatile_cache_no_flush_fails() {
    let view = NamespaceView { durability: Durability::Persistent, ..VIEW };
    let mut world = World::new(view, 8);
    fail(&mut world);
    world.command_of(flush(1), &[]);
}
