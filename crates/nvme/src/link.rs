//! What a queue pair and its controller tell each other, across threads and without a lock.
//!
//! A queue pair lives on the thread that uses it; the controller lives on the thread that does
//! admin work. Between them stands one link of plain atomics: the queue's poll pays one relaxed
//! load for it.
//!
//! # Orders: controller → queue
//!
//! ```text
//!                 .------------------------------------------------------.
//!                 v                                                      |
//!   Release --> Run --> Quiesce --> Freeze --> Release --> Run (a generation later) --> …
//!   (at birth)    '------------------^            '------> Dead (also from anywhere)
//! ```
//!
//! | order | the controller says | once adopted, the queue promises |
//! |---|---|---|
//! | `Run` | queues exist in the device, empty, both at index 0 | – |
//! | `Quiesce` | let it run dry | submits nothing; still takes completions and rings for them |
//! | `Freeze` | a reset begins | touches neither ring nor doorbell; what is in flight is parked |
//! | `Release` | **the device can touch no memory** | has zeroed its rings, kept no token back, and uses no abort |
//! | `Dead` | as `Release`, and for ever | as `Release`, and refuses everything from now on |
//!
//! - The queue adopts an order in its next `submit` or `poll`, and says so:
//!   [`ControllerEnd::has_adopted`]. A queue that nobody polls adopts nothing, so every wait for it
//!   is bounded, and going on without it is safe as far as `Release`: what may happen until it has
//!   adopted `Freeze` is a stray doorbell.
//! - `Run` may be ordered only once `Release` **has been adopted** and the device has both queues
//!   again: before that, old phase bits are still in the completion ring.
//! - Parked tokens are answered after `Release` or `Dead`, and not before. They may need several
//!   polls, since each has only so much room for answers; [`ControllerEnd::in_flight`] counts them
//!   down. `has_adopted` does not wait for them.
//! - An admin queue has a link as well; there both ends are on one thread.
//!
//! # Overdue commands: queue → controller → queue
//!
//! ```text
//!   place:  Empty --post(cid)--> Posted --next_overdue()--> Taken --abort_ended()--> Ended --> Empty
//!           (queue)              (controller)               (controller)             (queue)
//! ```
//!
//! There are [`ABORTS_MAX`] places per queue. While a place holds a command identifier, the queue
//! does not use that identifier for another command, so an Abort can never hit the wrong one. The
//! command itself may well complete meanwhile. If it has not completed one more time-out after it
//! was posted, the queue asks for a reset. Both sides forget all places at `Release`.
//!
//! # Lost writes: controller → queue
//!
//! A controller that has failed by itself may have lost its volatile cache. That is noted before the
//! queue runs again, and taken by the first flush after it.
//!
//! # Wanted resets: queue → controller
//!
//! The first reason is kept until the controller takes it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::slot::Nonsense;

/// What the controller wants of a queue pair. See the head of this file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Order {
    /// Work.
    Run = 0,
    /// Submit nothing more; let what is in flight complete.
    Quiesce = 1,
    /// Touch neither rings nor doorbells.
    Freeze = 2,
    /// The device can no longer touch memory: answer what is parked and start from nothing.
    Release = 3,
    /// The device can no longer touch memory and will not come back.
    Dead = 4,
}

/// Why a queue pair wants its controller reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResetReason {
    /// This command has missed its deadline, and aborting it has not ended it.
    Stuck {
        /// Its identifier.
        cid: u16,
    },
    /// The controller posted a completion that cannot be.
    Nonsense(Nonsense),
}

/// A command that has missed its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overdue {
    /// Its command identifier, as an Abort command wants it.
    pub cid: u16,
    /// Where the queue keeps it; for [`ControllerEnd::abort_ended`].
    place: u8,
}

/// The controller's end of a link.
#[derive(Debug)]
pub struct ControllerEnd {
    shared: Arc<Shared>,
    queue_id: u16,
}

/// The queue pair's end of a link.
#[derive(Debug)]
pub struct QueueEnd {
    shared: Arc<Shared>,
}

/// Overdue commands that a queue may have before its controller at once. The usual Abort Command
/// Limit of a controller is four (Base 2.1 §5.1.13, ACL, a zeroes-based three).
pub const ABORTS_MAX: usize = 4;

/// On lines of its own, so that the queue's one load per poll stays in its cache.
#[derive(Debug)]
#[repr(align(128))]
struct Shared {
    /// Written by the controller only: generation and order. See [`word_of`].
    order: AtomicU32,
    from_queue: FromQueue,
    /// [`place_word`]s.
    places: [AtomicU32; ABORTS_MAX],
}

/// Written by the queue (and cleared by the controller).
#[derive(Debug)]
#[repr(align(128))]
struct FromQueue {
    /// The last order that the queue has adopted.
    adopted: AtomicU32,
    /// What is in flight or parked; kept up to date while the order is not `Run`.
    in_flight: AtomicU32,
    /// A packed [`ResetReason`], or zero.
    wanted_reset: AtomicU32,
    /// Completed writes may be lost, and no flush has failed for it. Set by the controller, cleared by
    /// the queue.
    has_lost_writes: AtomicBool,
}

/// A new link for queue `queue_id`. It begins at `Release`, adopted.
pub fn link(queue_id: u16) -> (ControllerEnd, QueueEnd) {
    let first = word_of(Order::Release, 0);
    let shared = Arc::new(Shared {
        order: AtomicU32::new(first),
        from_queue: FromQueue {
            adopted: AtomicU32::new(first),
            in_flight: AtomicU32::new(0),
            wanted_reset: AtomicU32::new(0),
            has_lost_writes: AtomicBool::new(false),
        },
        places: [const { AtomicU32::new(0) }; ABORTS_MAX],
    });
    (ControllerEnd { shared: Arc::clone(&shared), queue_id }, QueueEnd { shared })
}

impl ControllerEnd {
    /// Which queue this is.
    pub fn queue_id(&self) -> u16 {
        self.queue_id
    }

    /// The order in force.
    pub fn order(&self) -> Order {
        order_in(self.shared.order.load(Ordering::Relaxed))
    }

    /// How often the queue has been told to run. Zero before the first time.
    pub fn generation(&self) -> u32 {
        self.shared.order.load(Ordering::Relaxed) >> ORDER_BITS
    }

    /// Gives an order. The order that is in force already changes nothing, and nothing leads out
    /// of `Dead`.
    ///
    /// # Panics
    ///
    /// If `Run` is ordered before the queue has adopted `Release`, unless it is the way back from
    /// a `Quiesce`: the queue's rings would still be those of the generation before.
    pub fn give(&self, order: Order) {
        let (before, generation) = (self.order(), self.generation());
        if before == order || before == Order::Dead {
            return;
        }
        let generation = match (before, order) {
            (Order::Quiesce, Order::Run) => generation,
            (_, Order::Run) => {
                let released = before == Order::Release && self.has_adopted();
                assert!(released, "queue {}: run ordered before its release", self.queue_id);
                generation.wrapping_add(1)
            }
            _ => generation,
        };
        // Pairs with the acquire in `QueueEnd::word`: who sees `Release` or `Run` also sees what
        // the controller did to the device before it.
        self.shared.order.store(word_of(order, generation), Ordering::Release);
    }

    /// Whether the queue has adopted the order in force.
    pub fn has_adopted(&self) -> bool {
        let adopted = self.shared.from_queue.adopted.load(Ordering::Acquire);
        adopted == self.shared.order.load(Ordering::Relaxed)
    }

    /// Whether the queue pair has been dropped: nobody will adopt anything any more, and nobody
    /// touches its rings.
    pub fn is_abandoned(&self) -> bool {
        Arc::strong_count(&self.shared) == 1
    }

    /// How many commands are in flight or parked. Up to date only while the order is not `Run` and
    /// has been adopted.
    pub fn in_flight(&self) -> u32 {
        self.shared.from_queue.in_flight.load(Ordering::Acquire)
    }

    /// Takes the next overdue command that the queue has posted. It is to be aborted, and then
    /// [`abort_ended`](Self::abort_ended) is called.
    pub fn next_overdue(&self) -> Option<Overdue> {
        for (index, place) in (0_u8..).zip(&self.shared.places) {
            let word = place.load(Ordering::Acquire);
            if word >> 16 != POSTED {
                continue;
            }
            let cid = low_half(word);
            let taken = place_word(TAKEN, cid);
            if place.compare_exchange(word, taken, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return Some(Overdue { cid, place: index });
            }
        }
        None
    }

    /// The Abort for `overdue` has completed, however it did: its identifier may be used again.
    pub fn abort_ended(&self, overdue: Overdue) {
        let Overdue { cid, place } = overdue;
        let place = &self.shared.places[usize::from(place)];
        // Fails if a release has emptied the place meanwhile, and then there is nothing to say.
        let (taken, ended) = (place_word(TAKEN, cid), place_word(ENDED, cid));
        let _ = place.compare_exchange(taken, ended, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Notes that writes which the queue has completed may be lost with the controller's cache.
    pub fn lose_writes(&self) {
        self.shared.from_queue.has_lost_writes.store(true, Ordering::Release);
    }

    /// Whether that was noted, and the queue has not failed a flush for it.
    pub fn has_lost_writes(&self) -> bool {
        self.shared.from_queue.has_lost_writes.load(Ordering::Acquire)
    }

    /// Takes the reason for which the queue wants a reset, if it does.
    pub fn take_wanted_reset(&self) -> Option<ResetReason> {
        ResetReason::unpack(self.shared.from_queue.wanted_reset.swap(0, Ordering::AcqRel))
    }
}

impl QueueEnd {
    /// The order word, to be compared with the one adopted last: the one load per poll.
    #[inline]
    pub(crate) fn word(&self) -> u32 {
        // Acquire costs nothing over relaxed on x86 and next to nothing on aarch64, and spares the
        // rare path a fence. Pairs with the release in `ControllerEnd::give`.
        self.shared.order.load(Ordering::Acquire)
    }

    /// Says that the order in `word` has been carried out.
    pub(crate) fn adopt(&self, word: u32, in_flight: u32) {
        if matches!(order_in(word), Order::Release | Order::Dead) {
            for place in &self.shared.places {
                place.store(0, Ordering::Relaxed);
            }
            self.shared.from_queue.wanted_reset.store(0, Ordering::Relaxed);
        }
        self.count(in_flight);
        // Pairs with the acquire in `has_adopted`: the zeroed rings come before this word.
        self.shared.from_queue.adopted.store(word, Ordering::Release);
    }

    /// Says how many commands are in flight or parked.
    pub(crate) fn count(&self, in_flight: u32) {
        self.shared.from_queue.in_flight.store(in_flight, Ordering::Release);
    }

    /// Posts an overdue command; false if all places are taken.
    pub(crate) fn post_overdue(&self, cid: u16) -> bool {
        let free = self.shared.places.iter().find(|place| place.load(Ordering::Relaxed) == 0);
        // Only the queue fills an empty place, so nobody comes between the load and the store.
        free.map(|place| place.store(place_word(POSTED, cid), Ordering::Release)).is_some()
    }

    /// Takes the identifier of a command whose Abort has ended.
    pub(crate) fn next_ended_abort(&self) -> Option<u16> {
        self.shared.places.iter().find_map(|place| {
            let word = place.load(Ordering::Acquire);
            (word >> 16 == ENDED).then(|| {
                place.store(0, Ordering::Relaxed);
                low_half(word)
            })
        })
    }

    /// Whether writes may be lost for which no flush has failed. The flag stays.
    pub(crate) fn has_lost_writes(&self) -> bool {
        self.shared.from_queue.has_lost_writes.load(Ordering::Acquire)
    }

    /// A flush fails for them.
    pub(crate) fn report_lost_writes(&self) {
        self.shared.from_queue.has_lost_writes.store(false, Ordering::Release);
    }

    /// Asks for a reset. The first reason stays until it is taken.
    pub(crate) fn want_reset(&self, reason: ResetReason) {
        let word = &self.shared.from_queue.wanted_reset;
        let _ = word.compare_exchange(0, reason.pack(), Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// The order in an order word.
pub(crate) const fn order_in(word: u32) -> Order {
    match word & ((1 << ORDER_BITS) - 1) {
        0 => Order::Run,
        1 => Order::Quiesce,
        2 => Order::Freeze,
        3 => Order::Release,
        _ => Order::Dead,
    }
}

impl ResetReason {
    /// Sixteen bits of what was found, and above them a number for the reason, never zero.
    const fn pack(self) -> u32 {
        let (number, found) = match self {
            Self::Stuck { cid } => (1, cid),
            Self::Nonsense(Nonsense::UnknownIdentifier { cid }) => (2, cid),
            Self::Nonsense(Nonsense::NotInFlight { cid }) => (3, cid),
            Self::Nonsense(Nonsense::SubmissionHead { head }) => (4, head),
        };
        place_word(number, found)
    }

    const fn unpack(word: u32) -> Option<Self> {
        let found = low_half(word);
        Some(match word >> 16 {
            1 => Self::Stuck { cid: found },
            2 => Self::Nonsense(Nonsense::UnknownIdentifier { cid: found }),
            3 => Self::Nonsense(Nonsense::NotInFlight { cid: found }),
            4 => Self::Nonsense(Nonsense::SubmissionHead { head: found }),
            _ => return None,
        })
    }
}

const ORDER_BITS: u32 = 3;

/// States of a place in the upper half of its word; an empty place is all zeroes.
const POSTED: u32 = 1;
const TAKEN: u32 = 2;
const ENDED: u32 = 3;

const fn word_of(order: Order, generation: u32) -> u32 {
    generation << ORDER_BITS | order as u32
}

const fn place_word(state: u32, cid: u16) -> u32 {
    state << 16 | cid as u32
}

#[expect(clippy::cast_possible_truncation, reason = "the low half is what is wanted")]
const fn low_half(word: u32) -> u16 {
    word as u16
}

#[cfg(test)]
mod tests {
    use super::{ABORTS_MAX, ControllerEnd, Order, QueueEnd, ResetReason, link, order_in};
    use crate::slot::Nonsense;

    fn adopt(queue: &QueueEnd) -> Order {
        let word = queue.word();
        queue.adopt(word, 0);
        order_in(word)
    }

    fn running() -> (ControllerEnd, QueueEnd) {
        let (controller, queue) = link(3);
        controller.give(Order::Run);
        assert_eq!(adopt(&queue), Order::Run);
        (controller, queue)
    }

    #[test]
    fn a_link_is_born_released_and_each_run_is_a_generation() {
        let (controller, queue) = link(3);
        assert_eq!((controller.queue_id(), controller.order()), (3, Order::Release));
        assert!(controller.has_adopted());
        for generation in 1..4 {
            controller.give(Order::Run);
            assert!(!controller.has_adopted());
            assert_eq!(adopt(&queue), Order::Run);
            assert!(controller.has_adopted());
            assert_eq!(controller.generation(), generation);
            for order in [Order::Freeze, Order::Release] {
                controller.give(order);
                assert_eq!(adopt(&queue), order);
            }
        }
    }

    #[test]
    fn a_quiesced_queue_runs_on_in_the_same_generation() {
        let (controller, queue) = running();
        controller.give(Order::Quiesce);
        assert_eq!(adopt(&queue), Order::Quiesce);
        controller.give(Order::Run);
        assert_eq!(controller.generation(), 1);
        assert_eq!(adopt(&queue), Order::Run);
    }

    #[test]
    #[should_panic(expected = "queue 3: run ordered before its release")]
    fn a_frozen_queue_cannot_run_before_it_was_released() {
        let (controller, queue) = running();
        controller.give(Order::Freeze);
        adopt(&queue);
        controller.give(Order::Run);
    }

    #[test]
    #[should_panic(expected = "run ordered before its release")]
    fn a_release_that_was_not_adopted_does_not_count() {
        let (controller, _queue) = running();
        controller.give(Order::Release);
        controller.give(Order::Run);
    }

    #[test]
    fn nothing_leads_out_of_death() {
        let (controller, queue) = running();
        controller.give(Order::Dead);
        assert_eq!(adopt(&queue), Order::Dead);
        for order in [Order::Run, Order::Quiesce, Order::Freeze, Order::Release] {
            controller.give(order);
            assert_eq!(controller.order(), Order::Dead);
        }
    }

    #[test]
    fn an_overdue_command_goes_there_and_back_once() {
        let (controller, queue) = running();
        assert!(queue.post_overdue(0));
        let overdue = controller.next_overdue().unwrap();
        assert_eq!(overdue.cid, 0, "identifier zero is not an empty place");
        assert_eq!(controller.next_overdue(), None);
        assert_eq!(queue.next_ended_abort(), None, "not before the abort has ended");

        controller.abort_ended(overdue);
        assert_eq!(queue.next_ended_abort(), Some(0));
        assert_eq!(queue.next_ended_abort(), None);
    }

    #[test]
    fn there_are_as_many_places_as_said() {
        let (controller, queue) = running();
        for cid in 0..u16::try_from(ABORTS_MAX).unwrap() {
            assert!(queue.post_overdue(cid));
        }
        assert!(!queue.post_overdue(9));
        let overdue = controller.next_overdue().unwrap();
        assert!(!queue.post_overdue(9), "a command being aborted still has its place");
        controller.abort_ended(overdue);
        assert!(!queue.post_overdue(9), "and until the queue knows");
        assert_eq!(queue.next_ended_abort(), Some(overdue.cid));
        assert!(queue.post_overdue(9));
    }

    #[test]
    fn a_release_empties_all_places_and_late_news_of_them_is_nothing() {
        let (controller, queue) = running();
        queue.post_overdue(5);
        let overdue = controller.next_overdue().unwrap();
        queue.want_reset(ResetReason::Stuck { cid: 5 });
        controller.give(Order::Release);
        adopt(&queue);
        controller.abort_ended(overdue);
        assert_eq!(queue.next_ended_abort(), None);
        assert_eq!(controller.next_overdue(), None);
        assert_eq!(controller.take_wanted_reset(), None, "it has just had one");
    }

    #[test]
    fn the_first_reason_for_a_reset_is_kept_until_taken() {
        let (controller, queue) = running();
        let reasons = [
            ResetReason::Stuck { cid: 0 },
            ResetReason::Nonsense(Nonsense::UnknownIdentifier { cid: 0xffff }),
            ResetReason::Nonsense(Nonsense::NotInFlight { cid: 7 }),
            ResetReason::Nonsense(Nonsense::SubmissionHead { head: 300 }),
        ];
        assert_eq!(controller.take_wanted_reset(), None);
        for reason in reasons {
            queue.want_reset(reason);
            queue.want_reset(ResetReason::Stuck { cid: 99 });
            assert_eq!(controller.take_wanted_reset(), Some(reason));
            assert_eq!(controller.take_wanted_reset(), None);
        }
    }

    #[test]
    fn a_queue_end_that_was_dropped_is_noticed() {
        let (controller, queue) = running();
        assert!(!controller.is_abandoned());
        drop(queue);
        assert!(controller.is_abandoned() && controller.has_adopted());
    }

    #[test]
    fn what_is_parked_can_be_watched() {
        let (controller, queue) = running();
        controller.give(Order::Quiesce);
        queue.adopt(queue.word(), 12);
        assert_eq!(controller.in_flight(), 12);
        queue.count(0);
        assert_eq!(controller.in_flight(), 0);
    }
}
