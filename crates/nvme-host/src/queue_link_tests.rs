//! Tests of the queue link: its contract, and its interleavings under a model checker (loom).
//!
//! The model compiles the shipped source; only the types of `sync` are the checker's.

#![allow(clippy::duplicate_mod, reason = "that is the point of it")]

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tenmil_base::Wake;

use crate::queue_link::{
    ABORTS_MAX, ControllerLinkEnd, QueueLinkEnd, QueueState, ResetReason, create_link,
    queue_state_in,
};
use crate::slot_table::InvalidCompletion;

#[path = "../../base/src/mailbox.rs"]
#[allow(dead_code, unreachable_pub, reason = "the model needs a part of it")]
mod mailbox;
#[path = "queue_link.rs"]
#[allow(dead_code, unreachable_pub, reason = "the model needs a part of it")]
mod queue_link;

/// `crate::sync` with the checker's types.
mod sync {
    pub(super) use loom::sync::atomic::{AtomicBool, AtomicU32, Ordering};
    pub(super) use loom::sync::{Arc, Mutex, MutexGuard};

    pub(super) use super::mailbox::Mailbox;
    use super::{IS_QUEUE_THREAD, OMITTED, Omitted};

    pub(super) fn fence(order: Ordering) {
        let own = match IS_QUEUE_THREAD.with(|it| it.get()) {
            true => Omitted::FenceOfQueue,
            false => Omitted::FenceOfController,
        };
        if OMITTED.get() != own {
            loom::sync::atomic::fence(order);
        }
    }
}

/// Closed when dropped: the other half of the pair is its only other reference.
type Attachment = Arc<()>;

fn acknowledge(queue: &QueueLinkEnd<Attachment>) -> QueueState {
    let word = queue.state_word();
    queue.acknowledge(word, 0);
    queue_state_in(word)
}

fn running() -> (ControllerLinkEnd<Attachment>, QueueLinkEnd<Attachment>) {
    let (controller, queue) = create_link::<Attachment>(3);
    controller.run(None);
    assert_eq!(acknowledge(&queue), QueueState::Running);
    (controller, queue)
}

#[test]
fn new_link_is_released_and_each_run_increments_the_generation() {
    let (controller, queue) = create_link::<Attachment>(3);
    assert_eq!((controller.queue_id(), controller.state()), (3, QueueState::Released));
    assert!(controller.has_acknowledged());
    for generation in 1..4 {
        controller.run(None);
        assert!(!controller.has_acknowledged());
        assert_eq!(acknowledge(&queue), QueueState::Running);
        assert!(controller.has_acknowledged());
        assert_eq!(controller.generation(), generation);
        for order in [QueueState::Frozen, QueueState::Released] {
            controller.set_state(order);
            assert_eq!(acknowledge(&queue), order);
        }
    }
}

#[test]
fn quiesced_queue_resumes_in_the_same_generation() {
    let (controller, queue) = running();
    controller.set_state(QueueState::Quiescing);
    assert_eq!(acknowledge(&queue), QueueState::Quiescing);
    controller.set_state(QueueState::Running);
    assert_eq!(controller.generation(), 1);
    assert_eq!(acknowledge(&queue), QueueState::Running);
}

#[test]
#[should_panic(expected = "queue 3: run ordered before its release")]
fn a_frozen_queue_cannot_run_before_it_was_released() {
    let (controller, queue) = running();
    controller.set_state(QueueState::Frozen);
    acknowledge(&queue);
    controller.run(None);
}

#[test]
#[should_panic(expected = "run ordered before its release")]
fn a_release_that_was_not_adopted_does_not_count() {
    let (controller, _queue) = running();
    controller.set_state(QueueState::Released);
    controller.run(None);
}

#[test]
fn dead_state_is_final() {
    let (controller, queue) = running();
    controller.set_state(QueueState::Dead);
    assert_eq!(acknowledge(&queue), QueueState::Dead);
    for order in
        [QueueState::Running, QueueState::Quiescing, QueueState::Frozen, QueueState::Released]
    {
        controller.set_state(order);
        assert_eq!(controller.state(), QueueState::Dead);
    }
}

#[test]
fn overdue_command_is_reported_and_acknowledged_once() {
    let (controller, queue) = running();
    assert!(queue.post_timeout(0));
    let overdue = controller.next_timeout().unwrap();
    assert_eq!(overdue.cid, 0, "identifier zero is not an empty place");
    assert_eq!(controller.next_timeout(), None);
    assert_eq!(queue.next_ended_abort(), None, "not before the abort has ended");

    controller.note_abort_completed(overdue);
    assert_eq!(queue.next_ended_abort(), Some(0));
    assert_eq!(queue.next_ended_abort(), None);
}

#[test]
fn timeout_slots_are_limited_to_the_configured_count() {
    let (controller, queue) = running();
    for cid in 0..u16::try_from(ABORTS_MAX).unwrap() {
        assert!(queue.post_timeout(cid));
    }
    assert!(!queue.post_timeout(9));
    let overdue = controller.next_timeout().unwrap();
    assert!(!queue.post_timeout(9), "a command being aborted still has its place");
    controller.note_abort_completed(overdue);
    assert!(!queue.post_timeout(9), "and until the queue knows");
    assert_eq!(queue.next_ended_abort(), Some(overdue.cid));
    assert!(queue.post_timeout(9));
}

#[test]
fn release_clears_timeout_slots_and_ignores_late_aborts() {
    let (controller, queue) = running();
    queue.post_timeout(5);
    let overdue = controller.next_timeout().unwrap();
    queue.signals().request_reset(ResetReason::CommandTimeout { cid: 5 });
    controller.set_state(QueueState::Released);
    acknowledge(&queue);
    controller.note_abort_completed(overdue);
    assert_eq!(queue.next_ended_abort(), None);
    assert_eq!(controller.next_timeout(), None);
    assert_eq!(controller.take_reset_request(), None, "it has just had one");
}

#[test]
fn the_first_reason_for_a_reset_is_kept_until_taken() {
    let (controller, queue) = running();
    let reasons = [
        ResetReason::CommandTimeout { cid: 0 },
        ResetReason::InvalidCompletion(InvalidCompletion::UnknownIdentifier { cid: 0xffff }),
        ResetReason::InvalidCompletion(InvalidCompletion::NotInFlight { cid: 7 }),
        ResetReason::InvalidCompletion(InvalidCompletion::SubmissionHead { head: 300 }),
    ];
    assert_eq!(controller.take_reset_request(), None);
    for reason in reasons {
        queue.signals().request_reset(reason);
        queue.signals().request_reset(ResetReason::CommandTimeout { cid: 99 });
        assert_eq!(controller.take_reset_request(), Some(reason));
        assert_eq!(controller.take_reset_request(), None);
    }
}

#[test]
fn dropped_queue_end_is_detected() {
    let (controller, queue) = running();
    assert!(!controller.is_dropped());
    drop(queue);
    assert!(controller.is_dropped() && controller.has_acknowledged());
}

#[test]
fn in_flight_count_of_a_quiescing_queue_is_visible() {
    let (controller, queue) = running();
    controller.set_state(QueueState::Quiescing);
    queue.acknowledge(queue.state_word(), 12);
    assert_eq!(controller.in_flight(), 12);
    queue.set_in_flight(0);
    assert_eq!(controller.in_flight(), 0);
}

/// A queue that takes its attachment when it applies `Running`.
fn apply(queue: &QueueLinkEnd<Attachment>) -> (QueueState, Option<Attachment>) {
    let word = queue.state_word();
    let attachment = queue.take_attachment(queue_state_in(word));
    queue.acknowledge(word, 0);
    (queue_state_in(word), attachment)
}

/// A connection that was handed over to a new link, and the reference that shows whether it is closed.
fn handed_over() -> (ControllerLinkEnd<Attachment>, QueueLinkEnd<Attachment>, Attachment) {
    let (controller, queue) = create_link(3);
    let connection = Attachment::default();
    controller.run(Some(Arc::clone(&connection)));
    (controller, queue, connection)
}

fn is_closed(connection: &Attachment) -> bool {
    Arc::strong_count(connection) == 1
}

#[test]
fn running_queue_takes_its_attachment_once() {
    let (controller, queue, connection) = handed_over();
    let (order, taken) = apply(&queue);
    assert_eq!((order, taken.is_some()), (QueueState::Running, true));
    controller.set_state(QueueState::Quiescing);
    assert!(apply(&queue).1.is_none());
    controller.set_state(QueueState::Running);
    assert!(apply(&queue).1.is_none(), "it has it");
    assert!(!is_closed(&connection));
    drop(taken);
    for order in [QueueState::Frozen, QueueState::Released] {
        controller.set_state(order);
        assert!(apply(&queue).1.is_none());
    }
    controller.run(Some(Arc::clone(&connection)));
    assert!(apply(&queue).1.is_some(), "the next one");
}

#[test]
fn attachment_that_is_not_taken_is_dropped_when_the_state_moves_on() {
    for order in [QueueState::Frozen, QueueState::Released, QueueState::Dead] {
        let (controller, queue, connection) = handed_over();
        assert!(!is_closed(&connection));
        controller.set_state(order);
        assert!(is_closed(&connection), "{order:?}");
        assert_eq!(apply(&queue), (order, None));
    }
    let (_controller, queue, connection) = handed_over();
    drop(queue);
    assert!(is_closed(&connection));
    let (controller, queue, connection) = handed_over();
    drop(controller);
    drop(queue);
    assert!(is_closed(&connection));
}

/// It may even quiesce before it has run.
#[test]
fn quiescing_queue_keeps_its_attachment_until_it_runs_again() {
    let (controller, queue, connection) = handed_over();
    controller.set_state(QueueState::Quiescing);
    assert_eq!(apply(&queue), (QueueState::Quiescing, None));
    assert!(!is_closed(&connection));
    controller.set_state(QueueState::Running);
    assert!(apply(&queue).1.is_some());
}

#[test]
fn dead_queue_is_not_attached() {
    let (controller, queue, connection) = handed_over();
    controller.set_state(QueueState::Dead);
    controller.run(Some(Arc::clone(&connection)));
    assert_eq!((apply(&queue), is_closed(&connection)), ((QueueState::Dead, None), true));
}

#[test]
#[should_panic(expected = "queue 3: it runs without its attachment")]
fn released_queue_is_not_set_to_running_without_an_attachment() {
    let (controller, queue) = create_link::<Attachment>(3);
    apply(&queue);
    controller.set_state(QueueState::Running);
}

#[test]
fn every_state_change_wakes_the_thread_of_the_queue() {
    let (controller, queue) = create_link::<Attachment>(3);
    let count = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&count);
    let waker = Arc::new(move || {
        counted.fetch_add(1, Ordering::Relaxed);
    });
    queue.set_waker(waker.clone());
    assert_eq!(count.load(Ordering::Relaxed), 0, "nothing has changed");
    controller.run(None);
    let orders =
        [QueueState::Quiescing, QueueState::Frozen, QueueState::Released, QueueState::Dead];
    for (order, before) in orders.into_iter().zip(1..) {
        assert_eq!(count.load(Ordering::Relaxed), before);
        controller.set_state(order);
        controller.set_state(order);
    }
    assert_eq!(count.load(Ordering::Relaxed), 5);
    queue.set_waker(waker);
    assert_eq!(count.load(Ordering::Relaxed), 6, "a change that was not applied yet");
}

#[test]
fn only_running_and_quiescing_queues_may_send() {
    let (controller, queue) = create_link::<Attachment>(3);
    let signals = queue.signals().clone();
    assert!(!signals.may_send() && !signals.set_busy() && !signals.is_idle());
    signals.set_idle();
    controller.run(None);
    assert!(signals.is_idle() && signals.set_busy());
    controller.set_state(QueueState::Quiescing);
    assert!(signals.may_send() && signals.set_busy());
    for order in [QueueState::Frozen, QueueState::Released, QueueState::Dead] {
        controller.set_state(order);
        assert!(!signals.set_busy(), "{order:?}");
    }
    drop(queue);
    assert!(!signals.is_idle(), "it outlives the queue's end");
}

#[test]
fn freeze_stops_only_a_live_queue() {
    let (controller, queue) = create_link::<Attachment>(3);
    controller.freeze();
    assert_eq!(controller.state(), QueueState::Released);
    for quiesces in [false, true] {
        controller.run(None);
        if quiesces {
            controller.set_state(QueueState::Quiescing);
        }
        controller.freeze();
        assert_eq!(controller.state(), QueueState::Frozen);
        controller.set_state(QueueState::Released);
        apply(&queue);
    }
}

/// What a model omits, to show that the checker notices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Omitted {
    Nothing,
    FenceOfController,
    FenceOfQueue,
    /// The queue does not look at the state again once it is busy.
    SecondLook,
}

thread_local! {
    /// All threads of a model run on one thread of the machine.
    static OMITTED: Cell<Omitted> = const { Cell::new(Omitted::Nothing) };
}

loom::thread_local! {
    static IS_QUEUE_THREAD: Cell<bool> = Cell::new(false);
}

/// Whether the checker finds no error, with `omitted` left out.
fn holds(omitted: Omitted, model: fn()) -> bool {
    OMITTED.set(omitted);
    let result = std::panic::catch_unwind(|| loom::model(model));
    OMITTED.set(Omitted::Nothing);
    result.is_ok()
}

/// A controller that freezes an idle queue and counts it as closed, while a command comes to the queue.
fn check_queue_that_counts_as_closed_sends_nothing() {
    let (controller, queue) = queue_link::create_link::<()>(1);
    controller.run(Some(()));
    let applied = queue.state_word();
    queue.acknowledge(applied, 0);
    let in_flight = Arc::new(loom::sync::atomic::AtomicU32::new(0));
    let counts_as_closed = Arc::new(loom::sync::atomic::AtomicBool::new(false));
    let (signals, commands, is_over) =
        (queue.signals().clone(), Arc::clone(&in_flight), Arc::clone(&counts_as_closed));
    let thread = loom::thread::spawn(move || {
        IS_QUEUE_THREAD.with(|it| it.set(true));
        let may_send = queue.signals().set_busy();
        if may_send || OMITTED.get() == Omitted::SecondLook {
            commands.store(1, Ordering::Relaxed);
            assert!(!is_over.load(Ordering::Relaxed), "its memory was returned");
            commands.store(0, Ordering::Relaxed);
        }
        queue.signals().set_idle();
    });
    controller.set_state(queue_link::QueueState::Frozen);
    if !signals.may_send() && signals.is_idle() {
        counts_as_closed.store(true, Ordering::Relaxed);
        assert_eq!(in_flight.load(Ordering::Relaxed), 0, "it sends");
    }
    thread.join().unwrap();
}

/// A queue that polls once while it is set to run, or frozen after that.
fn check_attachment_has_one_owner(is_running: bool) {
    let (controller, queue) = queue_link::create_link::<Attachment>(1);
    let connection = Attachment::default();
    if is_running {
        controller.run(Some(Arc::clone(&connection)));
    }
    let thread = loom::thread::spawn(move || {
        let order = queue_link::queue_state_in(queue.state_word());
        let taken = queue.take_attachment(order);
        (queue, order, taken)
    });
    if is_running {
        controller.set_state(queue_link::QueueState::Frozen);
    } else {
        controller.run(Some(Arc::clone(&connection)));
    }
    let (queue, order, taken) = thread.join().unwrap();
    let is_running_seen = order == queue_link::QueueState::Running;
    assert!(is_running_seen || taken.is_none());
    match (is_running, &taken) {
        (true, None) => assert!(is_closed(&connection), "it was frozen"),
        (false, None) => assert!(!is_running_seen, "it runs without it"),
        (_, Some(_)) => assert_eq!(Arc::strong_count(&connection), 2),
    }
    drop((queue, taken));
    assert!(is_closed(&connection));
}

#[test]
fn queue_that_counts_as_closed_sends_nothing_and_each_fence_is_needed() {
    let model = check_queue_that_counts_as_closed_sends_nothing;
    assert!(holds(Omitted::Nothing, model));
    for omitted in [Omitted::FenceOfController, Omitted::FenceOfQueue, Omitted::SecondLook] {
        assert!(!holds(omitted, model), "the model holds without {omitted:?}");
    }
}

#[test]
fn attachment_is_taken_by_the_queue_or_dropped() {
    loom::model(|| check_attachment_has_one_owner(true));
    loom::model(|| check_attachment_has_one_owner(false));
}
