//! Lock-free link between a queue pair and its controller, on different threads.
//!
//! A queue pair lives on the thread that uses it; the controller lives on the thread that does admin
//! work. The link between them consists of atomics: the queue's poll costs one atomic load. It is the
//! only protocol of orders between the two, whatever the queue's transport.
//!
//! A [`Mailbox`] beside the atomics carries what a state cannot: the attachment of `Running`, and the
//! wake-up of a sleeping thread. The state itself is not a message: a reset waits until the queue has
//! acknowledged a state of this generation, and the queue responds in several words of its own.
//!
//! # Queue states: controller → queue
//!
//! ```text
//!                   .----------------------------------------------------------.
//!                   v                                                          |
//!   Released --> Running --> Quiescing --> Frozen --> Released --> Running (next generation) --> …
//!   (initially)     '----------------------^             '-------> Dead (also from any state)
//! ```
//!
//! | state | set by the controller when | guaranteed by the queue once acknowledged |
//! |---|---|---|
//! | `Running` | both queues exist in the device, empty, at index 0 | uses the attachment, if there is one |
//! | `Quiescing` | the queue should drain | submits nothing; still takes completions and frees entries |
//! | `Frozen` | a reset begins; a queue without rings is deleted | accesses neither ring nor doorbell, has closed its connection; commands in flight are parked |
//! | `Released` | **no memory access by the device** | zeroed its rings, withholds no token, uses no abort |
//! | `Dead` | as `Released`, and permanently | as `Released`, and rejects all new commands |
//!
//! - The queue applies a state in its next `submit` or `poll` and acknowledges it:
//!   [`ControllerLinkEnd::has_acknowledged`]. A queue that is not polled acknowledges nothing, so every
//!   wait for it is bounded. Proceeding without it is safe as far as `Released`: before the queue
//!   acknowledges `Frozen`, the only possible effect is a stray doorbell write. A transport for which
//!   that is not enough has the busy flag, below.
//! - `Running` may be set only after `Released` **has been acknowledged** and the device has both queues
//!   again: before that, the completion ring contains old phase bits. This is
//!   [`run`](ControllerLinkEnd::run), whose attachment the queue takes when it applies the state. Every
//!   other state except `Quiescing` drops an attachment that was not taken, and so does the queue's end.
//! - Parked tokens are completed after `Released` or `Dead`, not before. This may need several polls,
//!   since each has limited space for completions; [`ControllerLinkEnd::in_flight`] counts them down.
//!   `has_acknowledged` does not wait for them.
//! - An admin queue has a link as well; both of its ends are on one thread.
//!
//! # Busy flag: queue → controller
//!
//! For a transport that sends by itself, such as a connection. It is busy while anything is in flight.
//! The controller has to wait until a busy queue has closed its connection, but not for an idle one,
//! whose thread may not run for hours.
//!
//! ```text
//!   controller thread  state = Frozen ── fence ── busy? no: nothing is in flight, or will be sent
//!                                                 yes: wait until the queue has closed
//!   queue thread       idle, and a command comes: busy ── fence ── state? Running, Quiescing: send
//!                                                                  otherwise close, and do not send
//! ```
//!
//! Each side stores before it loads, so at least one of the two sees the other.
//!
//! # Timed-out commands: queue → controller → queue
//!
//! ```text
//!   place:  Empty --post(cid)--> Posted --next_timeout()--> Taken --abort_ended()--> Ended --> Empty
//!           (queue)              (controller)               (controller)             (queue)
//! ```
//!
//! There are [`ABORTS_MAX`] places per queue. While a place holds a command identifier, the queue does
//! not reuse that identifier, so an Abort can never hit another command. The command itself may complete
//! meanwhile. If it has not completed one more timeout after it was posted, the queue requests a reset.
//! Both sides clear all places at `Released`.
//!
//! # Lost writes: controller → queue
//!
//! A controller that has failed by itself may have lost its volatile cache. This is recorded before the
//! queue runs again, and the first flush after it fails.
//!
//! # Reset requests: queue → controller
//!
//! The first reason is kept until the controller takes it.

use tenmil_base::SharedWaker;

use super::sync::{Arc, AtomicBool, AtomicU32, Mailbox, Ordering, fence};
use crate::slot_table::InvalidCompletion;

/// State that the controller requests of a queue pair; see the module documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum QueueState {
    /// Commands are submitted and completed.
    Running = 0,
    /// Nothing new is submitted; commands in flight complete.
    Quiescing = 1,
    /// Neither rings nor doorbells are accessed.
    Frozen = 2,
    /// The device can no longer access memory: parked commands complete, and the rings start empty.
    Released = 3,
    /// The device can no longer access memory and will not return.
    Dead = 4,
}

/// Reason why a queue pair requests a controller reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResetReason {
    /// A command has timed out, and its abort has not ended it.
    CommandTimeout {
        /// Command identifier.
        cid: u16,
    },
    /// The controller posted an invalid completion.
    InvalidCompletion(InvalidCompletion),
}

/// Command past its deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimedOutCommand {
    /// Command identifier, for an Abort command.
    pub cid: u16,
    /// Place in the link, for [`ControllerLinkEnd::note_abort_completed`].
    place: u8,
}

/// Controller side of a link whose queue is attached to an `A` when it runs.
#[derive(Debug)]
pub struct ControllerLinkEnd<A> {
    shared: Arc<LinkState>,
    attachment: Arc<Mailbox<Option<A>>>,
    queue_id: u16,
}

/// Queue side of a link.
#[derive(Debug)]
pub struct QueueLinkEnd<A> {
    signals: LinkSignals,
    attachment: Arc<Mailbox<Option<A>>>,
}

/// State and busy flag of a link, for both sides of a transport without rings.
#[derive(Clone, Debug)]
pub struct LinkSignals {
    shared: Arc<LinkState>,
}

/// Maximum timed-out commands that a queue posts at once. The usual Abort Command Limit of a controller
/// is four (Base 2.1 §5.1.13, ACL, a 0's based three).
pub const ABORTS_MAX: usize = 4;

/// State shared by both ends, on its own cache lines, so that the queue's one load per poll hits its
/// cache.
#[derive(Debug)]
#[repr(align(128))]
struct LinkState {
    /// Generation and requested state; written by the controller only. See [`state_word_of`].
    order: AtomicU32,
    from_queue: QueueToController,
    /// [`timeout_slot_word`]s.
    places: [AtomicU32; ABORTS_MAX],
}

/// Fields written by the queue (and cleared by the controller).
#[derive(Debug)]
#[repr(align(128))]
struct QueueToController {
    /// Last state acknowledged by the queue.
    adopted: AtomicU32,
    /// Commands in flight or parked; up to date while the state is not `Running`.
    in_flight: AtomicU32,
    /// Packed [`ResetReason`], or zero.
    requested_reset: AtomicU32,
    /// Something is in flight, of a transport without rings.
    is_busy: AtomicBool,
    /// Completed writes may be lost, and no flush has failed for it. Set by the controller, cleared by
    /// the queue.
    has_lost_writes: AtomicBool,
}

/// Creates a link for queue `queue_id`. Its initial state is `Released`, acknowledged.
pub fn create_link<A>(queue_id: u16) -> (ControllerLinkEnd<A>, QueueLinkEnd<A>) {
    let first = state_word_of(QueueState::Released, 0);
    let shared = Arc::new(LinkState {
        order: AtomicU32::new(first),
        from_queue: QueueToController {
            adopted: AtomicU32::new(first),
            in_flight: AtomicU32::new(0),
            requested_reset: AtomicU32::new(0),
            is_busy: AtomicBool::new(false),
            has_lost_writes: AtomicBool::new(false),
        },
        places: core::array::from_fn(|_| AtomicU32::new(0)),
    });
    let attachment = Arc::new(Mailbox::new(None));
    let signals = LinkSignals { shared: Arc::clone(&shared) };
    let queue_end = QueueLinkEnd { signals, attachment: Arc::clone(&attachment) };
    (ControllerLinkEnd { shared, attachment, queue_id }, queue_end)
}

impl QueueState {
    /// Whether commands that were submitted are still sent, and completions received.
    pub(crate) const fn is_live(self) -> bool {
        matches!(self, Self::Running | Self::Quiescing)
    }
}

impl<A> ControllerLinkEnd<A> {
    /// Queue identifier.
    pub fn queue_id(&self) -> u16 {
        self.queue_id
    }

    /// Requested state.
    pub fn state(&self) -> QueueState {
        queue_state_in(self.shared.order.load(Ordering::Relaxed))
    }

    /// Number of times the queue was set to run; zero initially.
    pub fn generation(&self) -> u32 {
        self.shared.order.load(Ordering::Relaxed) >> ORDER_BITS
    }

    /// Sets `Running`, with what the transport is attached to, if it needs anything. `Dead` is final.
    ///
    /// # Panics
    ///
    /// The queue has not acknowledged `Released`: its rings would still be those of the previous
    /// generation.
    pub fn run(&self, attachment: Option<A>) {
        if self.state() == QueueState::Dead {
            return;
        }
        let is_released = self.state() == QueueState::Released && self.has_acknowledged();
        assert!(is_released, "queue {}: run ordered before its release", self.queue_id);
        let generation = self.generation().wrapping_add(1);
        self.store_state(QueueState::Running, generation, |slot| {
            core::mem::replace(slot, attachment)
        });
    }

    /// Sets the state: any but `Running`, other than to return from `Quiescing`. Setting the current
    /// state has no effect, and `Dead` is final.
    ///
    /// # Panics
    ///
    /// `Running` is set in any other state.
    pub fn set_state(&self, order: QueueState) {
        let before = self.state();
        if before == order || before == QueueState::Dead {
            return;
        }
        let is_possible = order != QueueState::Running || before == QueueState::Quiescing;
        assert!(is_possible, "queue {}: it runs without its attachment", self.queue_id);
        self.store_state(order, self.generation(), |slot| {
            // A connection that the queue has not taken is closed, with the state that supersedes it.
            slot.take_if(|_| !order.is_live())
        });
    }

    /// Sets `Frozen`, unless the queue accesses nothing already.
    pub fn freeze(&self) {
        // A released queue may not have acknowledged its state yet.
        if self.state().is_live() {
            self.set_state(QueueState::Frozen);
        }
    }

    /// Stores the state, has `change` remove an unused attachment, and wakes the queue's thread.
    fn store_state(
        &self,
        order: QueueState,
        generation: u32,
        change: impl FnOnce(&mut Option<A>) -> Option<A>,
    ) {
        let mut unused = None;
        self.attachment.send(|slot| {
            unused = change(slot);
            // Pairs with the acquire load in `QueueLinkEnd::state_word`: a queue that sees `Released` or
            // `Running` also sees what the controller did to the device before. Under the lock: it
            // also finds the attachment.
            self.shared.order.store(state_word_of(order, generation), Ordering::Release);
        });
        // Without the lock, since it may close a socket.
        drop(unused);
        // Pairs with the fence in `LinkSignals::set_busy`.
        fence(Ordering::SeqCst);
    }

    /// Whether the queue has acknowledged the current state.
    pub fn has_acknowledged(&self) -> bool {
        let adopted = self.shared.from_queue.adopted.load(Ordering::Acquire);
        adopted == self.shared.order.load(Ordering::Relaxed)
    }

    /// Whether the queue pair has been dropped: nothing will acknowledge a state or access its rings
    /// anymore.
    pub fn is_dropped(&self) -> bool {
        Arc::strong_count(&self.attachment) == 1
    }

    /// Commands in flight or parked. Up to date only while the state is not `Running` and has been
    /// acknowledged.
    pub fn in_flight(&self) -> u32 {
        self.shared.from_queue.in_flight.load(Ordering::Acquire)
    }

    /// Takes the next timed-out command posted by the queue. The caller aborts it and then calls
    /// [`note_abort_completed`](Self::note_abort_completed).
    pub fn next_timeout(&self) -> Option<TimedOutCommand> {
        for (index, place) in (0_u8..).zip(&self.shared.places) {
            let word = place.load(Ordering::Acquire);
            if word >> 16 != POSTED {
                continue;
            }
            let cid = low_half(word);
            let taken = timeout_slot_word(TAKEN, cid);
            if place.compare_exchange(word, taken, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return Some(TimedOutCommand { cid, place: index });
            }
        }
        None
    }

    /// Records that the Abort for `overdue` has completed, with any result: its identifier may be reused.
    pub fn note_abort_completed(&self, overdue: TimedOutCommand) {
        let TimedOutCommand { cid, place } = overdue;
        let place = &self.shared.places[usize::from(place)];
        // Fails if `Released` has cleared the place meanwhile; then nothing is left to record.
        let (taken, ended) = (timeout_slot_word(TAKEN, cid), timeout_slot_word(ENDED, cid));
        let _ = place.compare_exchange(taken, ended, Ordering::AcqRel, Ordering::Relaxed);
    }

    /// Records that completed writes may be lost with the controller's cache.
    pub fn record_lost_writes(&self) {
        self.shared.from_queue.has_lost_writes.store(true, Ordering::Release);
    }

    /// Whether lost writes are recorded and the queue has not failed a flush for them.
    pub fn has_lost_writes(&self) -> bool {
        self.shared.from_queue.has_lost_writes.load(Ordering::Acquire)
    }

    /// Takes the reset request of the queue, if there is one.
    pub fn take_reset_request(&self) -> Option<ResetReason> {
        ResetReason::unpack(self.shared.from_queue.requested_reset.swap(0, Ordering::AcqRel))
    }
}

impl<A> QueueLinkEnd<A> {
    /// The part of the link for its transport.
    pub fn signals(&self) -> &LinkSignals {
        &self.signals
    }

    /// Sets the waker of the queue's thread for state changes.
    pub fn set_waker(&self, waker: SharedWaker) {
        self.attachment.set_waker(waker);
    }

    /// State word, compared with the last acknowledged one: the one load per poll.
    #[inline]
    pub(crate) fn state_word(&self) -> u32 {
        // Acquire costs nothing over relaxed on x86 and next to nothing on aarch64, and saves the slow
        // path a fence. Pairs with the release store in `ControllerLinkEnd::set_state`.
        self.signals.shared.order.load(Ordering::Acquire)
    }

    /// Takes what the transport is to be attached to, when the queue applies `order`.
    pub(crate) fn take_attachment(&self, order: QueueState) -> Option<A> {
        // Under the lock, since the state is visible before the message counts as pending. It is kept for
        // a queue that begins to quiesce before it has run.
        self.attachment.lock_contents().take_if(|_| order == QueueState::Running)
    }

    /// Acknowledges that the state in `word` has been applied.
    pub(crate) fn acknowledge(&self, word: u32, in_flight: u32) {
        if matches!(queue_state_in(word), QueueState::Released | QueueState::Dead) {
            for place in &self.signals.shared.places {
                place.store(0, Ordering::Relaxed);
            }
            self.signals.shared.from_queue.requested_reset.store(0, Ordering::Relaxed);
        }
        self.set_in_flight(in_flight);
        // Pairs with the acquire load in `has_acknowledged`: the zeroed rings are visible before this
        // word.
        self.signals.shared.from_queue.adopted.store(word, Ordering::Release);
    }

    /// Publishes the number of commands in flight or parked.
    pub(crate) fn set_in_flight(&self, in_flight: u32) {
        self.signals.shared.from_queue.in_flight.store(in_flight, Ordering::Release);
    }

    /// Posts a timed-out command; returns false if all places are taken.
    pub(crate) fn post_timeout(&self, cid: u16) -> bool {
        let free =
            self.signals.shared.places.iter().find(|place| place.load(Ordering::Relaxed) == 0);
        // Only the queue fills an empty place, so no other store happens between the load and the store.
        free.map(|place| place.store(timeout_slot_word(POSTED, cid), Ordering::Release)).is_some()
    }

    /// Takes the identifier of a command whose Abort has ended.
    pub(crate) fn next_ended_abort(&self) -> Option<u16> {
        self.signals.shared.places.iter().find_map(|place| {
            let word = place.load(Ordering::Acquire);
            (word >> 16 == ENDED).then(|| {
                place.store(0, Ordering::Relaxed);
                low_half(word)
            })
        })
    }

    /// Whether writes may be lost for which no flush has failed. Does not clear the flag.
    pub(crate) fn has_lost_writes(&self) -> bool {
        self.signals.shared.from_queue.has_lost_writes.load(Ordering::Acquire)
    }

    /// Records that a flush fails for the lost writes.
    pub(crate) fn note_lost_writes_reported(&self) {
        self.signals.shared.from_queue.has_lost_writes.store(false, Ordering::Release);
    }
}

impl<A> Drop for QueueLinkEnd<A> {
    fn drop(&mut self) {
        let unused = self.attachment.lock_contents().take();
        drop(unused);
    }
}

impl LinkSignals {
    /// Whether the requested state permits the transport to send.
    pub fn may_send(&self) -> bool {
        queue_state_in(self.shared.order.load(Ordering::Acquire)).is_live()
    }

    /// Queue thread: from now on something is in flight. Returns whether it may be sent. If not, the
    /// controller may already count the queue as closed.
    #[must_use]
    pub fn set_busy(&self) -> bool {
        self.shared.from_queue.is_busy.store(true, Ordering::Relaxed);
        // Pairs with the fence in `ControllerLinkEnd::store_state`.
        fence(Ordering::SeqCst);
        self.may_send()
    }

    /// Queue thread: nothing is in flight.
    #[inline]
    pub fn set_idle(&self) {
        // Pairs with the acquire load in `is_idle`: memory is not accessed after this.
        self.shared.from_queue.is_busy.store(false, Ordering::Release);
    }

    /// Controller thread: whether nothing is in flight.
    pub fn is_idle(&self) -> bool {
        !self.shared.from_queue.is_busy.load(Ordering::Acquire)
    }

    /// Requests a reset. The first reason is kept until it is taken.
    pub(crate) fn request_reset(&self, reason: ResetReason) {
        let word = &self.shared.from_queue.requested_reset;
        let _ = word.compare_exchange(0, reason.pack(), Ordering::AcqRel, Ordering::Relaxed);
    }
}

/// Queue state in a state word.
pub(crate) const fn queue_state_in(word: u32) -> QueueState {
    match word & ((1 << ORDER_BITS) - 1) {
        0 => QueueState::Running,
        1 => QueueState::Quiescing,
        2 => QueueState::Frozen,
        3 => QueueState::Released,
        _ => QueueState::Dead,
    }
}

impl ResetReason {
    /// Packs the reason: sixteen bits of the value found, and above them a number for the reason, never
    /// zero.
    const fn pack(self) -> u32 {
        let (number, found) = match self {
            Self::CommandTimeout { cid } => (1, cid),
            Self::InvalidCompletion(InvalidCompletion::UnknownIdentifier { cid }) => (2, cid),
            Self::InvalidCompletion(InvalidCompletion::NotInFlight { cid }) => (3, cid),
            Self::InvalidCompletion(InvalidCompletion::SubmissionHead { head }) => (4, head),
        };
        timeout_slot_word(number, found)
    }

    const fn unpack(word: u32) -> Option<Self> {
        let found = low_half(word);
        Some(match word >> 16 {
            1 => Self::CommandTimeout { cid: found },
            2 => Self::InvalidCompletion(InvalidCompletion::UnknownIdentifier { cid: found }),
            3 => Self::InvalidCompletion(InvalidCompletion::NotInFlight { cid: found }),
            4 => Self::InvalidCompletion(InvalidCompletion::SubmissionHead { head: found }),
            _ => return None,
        })
    }
}

const ORDER_BITS: u32 = 3;

/// States of a place in the upper half of its word; an empty place is all zeroes.
const POSTED: u32 = 1;
const TAKEN: u32 = 2;
const ENDED: u32 = 3;

const fn state_word_of(order: QueueState, generation: u32) -> u32 {
    generation << ORDER_BITS | order as u32
}

const fn timeout_slot_word(state: u32, cid: u16) -> u32 {
    state << 16 | cid as u32
}

#[expect(clippy::cast_possible_truncation, reason = "the low half is what is wanted")]
const fn low_half(word: u32) -> u16 {
    word as u16
}
