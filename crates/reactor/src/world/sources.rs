//! Descriptors that cannot be waited for.

use std::os::fd::OwnedFd;

use base::Span;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

use super::crew::{idle, tally};
use super::{Stage, World};
use crate::{Registration, ThreadPlan, WokenBy};

fn nest(outer: &OwnedFd, inner: &OwnedFd) {
    epoll::add(outer, inner, EventData::new_u64(0), EventFlags::IN).unwrap();
}

#[test]
fn a_descriptor_that_the_kernel_refuses_is_told_of_once_and_tried_again() {
    // As deep as the kernel nests them: one more, the sleeper's own, is refused.
    let mut nested: Vec<OwnedFd> =
        (0..5).map(|_| epoll::create(CreateFlags::CLOEXEC).unwrap()).collect();
    for pair in nested.windows(2).rev() {
        nest(&pair[0], &pair[1]);
    }
    let outermost = nested.remove(0);
    let theirs = outermost.try_clone().unwrap();
    let mut world = World::adaptive(0, 1);
    let woken_by = WokenBy::Descriptor(theirs);
    let deep = Registration::active("deep", woken_by, idle(&tally()));
    world.directory.spawn(ThreadPlan::new("deep").poller(deep)).unwrap();
    for _ in 0..1_000 {
        world.turn_all(1);
        world.pass_time(Span::from_us(10));
        assert_eq!(world.members[0].stage, Stage::Turning, "nobody sleeps");
    }
    assert_eq!(world.kinds(), ["thread-started", "not-waited-for"]);
    epoll::delete(&outermost, &nested[0]).unwrap();
    world.settle();
    assert_eq!(world.kinds(), ["thread-started", "not-waited-for"]);
}
