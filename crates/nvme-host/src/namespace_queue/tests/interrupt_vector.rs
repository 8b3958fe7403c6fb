//! Support of a queue for a thread that sleeps.

use std::io::{Stdin, stdin};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tenmil_base::{ChannelWakeup, InterruptVector, IoChannel, IoStatus, Operation, WakeSource};

use super::{NamespaceQueueHarness, VIEW, read_request, request, segment};
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

struct VectorHarness {
    harness: NamespaceQueueHarness,
    is_unmasked: Arc<AtomicBool>,
    is_refused: Arc<AtomicBool>,
}

impl VectorHarness {
    fn new() -> Self {
        let mut harness = NamespaceQueueHarness::new(VIEW, 8);
        let (is_unmasked, is_refused) = <(Arc<AtomicBool>, Arc<AtomicBool>)>::default();
        let vector = FakeVector {
            descriptor: stdin(),
            is_unmasked: is_unmasked.clone(),
            is_refused: is_refused.clone(),
        };
        harness.namespace = harness.namespace.with_vector(Box::new(vector));
        harness.poll();
        Self { harness, is_unmasked, is_refused }
    }

    fn is_unmasked(&self) -> bool {
        self.is_unmasked.load(Ordering::Relaxed)
    }
}

#[test]
fn a_queue_without_a_vector_keeps_its_thread_awake() {
    let mut harness = NamespaceQueueHarness::new(VIEW, 8);
    harness.poll();
    assert!(matches!(harness.namespace.wake_source(), WakeSource::None));
    assert!(harness.namespace.arm());
    harness.namespace.disarm();
}

#[test]
fn a_vector_is_unmasked_for_a_sleep_and_masked_after_it() {
    let mut vector_harness = VectorHarness::new();
    assert!(matches!(vector_harness.harness.namespace.wake_source(), WakeSource::Descriptor(_)));
    assert!(!vector_harness.is_unmasked());
    assert!(!vector_harness.harness.namespace.arm());
    assert!(vector_harness.is_unmasked());
    vector_harness.harness.namespace.disarm();
    assert!(!vector_harness.is_unmasked());
}

#[test]
fn pending_completions_keep_the_thread_awake() {
    let mut vector_harness = VectorHarness::new();
    vector_harness.harness.namespace.submit(
        super::NOW,
        &[read_request(0, 8, 1)],
        &[segment(1, 0, 4096)],
    );
    assert!(!vector_harness.harness.namespace.arm());
    assert_eq!(vector_harness.harness.device.fetch(), 1, "arming rings the doorbell");
    vector_harness.harness.device.complete_next(0);
    assert!(vector_harness.harness.namespace.arm(), "a completion");
    assert_eq!(vector_harness.harness.poll(), [(77, IoStatus::SUCCESS)]);
    assert!(!vector_harness.harness.namespace.arm());
    // Segments that are not in the table: rejected, without a command.
    vector_harness.harness.namespace.submit(super::NOW, &[request(Operation::Flush, 0, 0, 9)], &[]);
    assert!(vector_harness.harness.namespace.arm(), "a refusal");
    assert_eq!(vector_harness.harness.poll().len(), 1);
    assert!(!vector_harness.harness.namespace.arm());
    vector_harness.harness.controller.set_state(QueueState::Quiescing);
    assert!(vector_harness.harness.namespace.arm(), "an order");
}

#[test]
fn failed_unmask_keeps_the_thread_awake() {
    let mut vector_harness = VectorHarness::new();
    vector_harness.is_refused.store(true, Ordering::Relaxed);
    assert!(vector_harness.harness.namespace.arm());
    vector_harness.is_refused.store(false, Ordering::Relaxed);
    assert!(!vector_harness.harness.namespace.arm());
}
