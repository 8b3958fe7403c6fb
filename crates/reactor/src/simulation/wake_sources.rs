//! Descriptors that the kernel refuses to wait for.

use std::os::fd::OwnedFd;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use tenmil_base::Span;

use super::test_pollers::{idle_poller, new_count};
use super::{SimReactorState, Simulation};
use crate::{PollerBuilder, PollerWake, ThreadBuilder};

fn epoll_add(outer: &OwnedFd, inner: &OwnedFd) {
    epoll::add(outer, inner, EventData::new_u64(0), EventFlags::IN).unwrap();
}

#[test]
fn rejected_descriptor_is_reported_once_and_retried() {
    // The kernel's maximum nesting of epoll instances: one more, the sleeper's own, is refused.
    let mut nested: Vec<OwnedFd> =
        (0..5).map(|_| epoll::create(CreateFlags::CLOEXEC).unwrap()).collect();
    for pair in nested.windows(2).rev() {
        epoll_add(&pair[0], &pair[1]);
    }
    let outermost = nested.remove(0);
    let theirs = outermost.try_clone().unwrap();
    let mut world = Simulation::new_adaptive(0, 1);
    let woken_by = PollerWake::Descriptor(theirs);
    let deep = PollerBuilder::polled_each_iteration("deep", woken_by, idle_poller(&new_count()));
    world.directory.spawn(ThreadBuilder::new("deep").add_poller(deep)).unwrap();
    for _ in 0..1_000 {
        world.step_all(1);
        world.advance_clock(Span::from_us(10));
        assert_eq!(
            world.members[0].stage,
            SimReactorState::Iterating,
            "the reactor does not sleep"
        );
    }
    assert_eq!(world.event_kinds(), ["thread-started", "wait-unsupported"]);
    epoll::delete(&outermost, &nested[0]).unwrap();
    world.run_until_idle();
    assert_eq!(world.event_kinds(), ["thread-started", "wait-unsupported"]);
}
