//! Support of a queue for a thread that sleeps.

use std::io::{Stdin, stdin};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tenmil_base::{ChannelWakeup, InterruptVector, IoChannel, IoStatus, Operation, WakeSource};

use super::{VIEW, World, read, request, segment};
use crate::queue_link::QueueState;

/// A vector that only stores its mask.
struct FakeVector {
    descriptor: Stdin,
    is_unmasked: Arc<AtomicBool>,
    is_refused: Arc<AtomicBool>,
}

impl InterruptVector for FakeVector {
    fn descriptor(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }

    fn unmask(&mut self) -> bool {
        self.is_unmasked.store(true, Ordering::Relaxed);
        !self.is_refused.load(Ordering::Relaxed)
    }

    fn mask(&mut self) {
        self.is_unmasked.store(false, Ordering::Relaxed);
    }
}

struct Bed {
    world: World,
    is_unmasked: Arc<AtomicBool>,
    is_refused: Arc<AtomicBool>,
}

impl Bed {
    fn new() -> Self {
        let mut world = World::new(VIEW, 8);
        let (is_unmasked, is_refused) = <(Arc<AtomicBool>, Arc<AtomicBool>)>::default();
        let vector = FakeVector {
            descriptor: stdin(),
            is_unmasked: is_unmasked.clone(),
            is_refused: is_refused.clone(),
        };
        world.namespace = world.namespace.with_vector(Box::new(vector));
        world.poll();
        Self { world, is_unmasked, is_refused }
    }

    fn is_unmasked(&self) -> bool {
        self.is_unmasked.load(Ordering::Relaxed)
    }
}

#[test]
fn a_queue_without_a_vector_keeps_its_thread_awake() {
    let mut world = World::new(VIEW, 8);
    world.poll();
    assert!(matches!(world.namespace.wake_source(), WakeSource::None));
    assert!(world.namespace.arm());
    world.namespace.disarm();
}

#[test]
fn a_vector_is_unmasked_for_a_sleep_and_masked_after_it() {
    let mut bed = Bed::new();
    assert!(matches!(bed.world.namespace.wake_source(), WakeSource::Descriptor(_)));
    assert!(!bed.is_unmasked());
    assert!(!bed.world.namespace.arm());
    assert!(bed.is_unmasked());
    bed.world.namespace.disarm();
    assert!(!bed.is_unmasked());
}

#[test]
fn whatever_lies_there_already_keeps_the_thread_awake() {
    let mut bed = Bed::new();
    bed.world.namespace.submit(super::NOW, &[read(0, 8, 1)], &[segment(1, 0, 4096)]);
    assert!(!bed.world.namespace.arm());
    assert_eq!(bed.world.device.fetch(), 1, "arming rings the doorbell");
    bed.world.device.complete_next(0);
    assert!(bed.world.namespace.arm(), "a completion");
    assert_eq!(bed.world.poll(), [(77, IoStatus::SUCCESS)]);
    assert!(!bed.world.namespace.arm());
    // Segments that are not in the table: rejected, without a command.
    bed.world.namespace.submit(super::NOW, &[request(Operation::Flush, 0, 0, 9)], &[]);
    assert!(bed.world.namespace.arm(), "a refusal");
    assert_eq!(bed.world.poll().len(), 1);
    assert!(!bed.world.namespace.arm());
    bed.world.controller.set_state(QueueState::Quiescing);
    assert!(bed.world.namespace.arm(), "an order");
}

#[test]
fn a_vector_that_cannot_promise_anything_keeps_the_thread_awake() {
    let mut bed = Bed::new();
    bed.is_refused.store(true, Ordering::Relaxed);
    assert!(bed.world.namespace.arm());
    bed.is_refused.store(false, Ordering::Relaxed);
    assert!(!bed.world.namespace.arm());
}
