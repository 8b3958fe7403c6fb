//! An open store, and all who ask it something.
//!
//! ```text
//!   channel ─┐                      ┌── data to move, answers ──> whoever asked, and his bell
//!   channel ─┼─ asks, ends ─> Store ┤
//!   owner   ─┘                      └── pages, flushes ─────────> the owner
//! ```
//!
//! The store is behind a lock, and nothing is waited for under it: whoever has it tells the store
//! what he wants or what has ended, and sorts what the store wants done. Data are moved by the
//! channel that asked, over its own way to the device; metadata by the owner, a thread that lives as
//! long as the store is open.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::{Interrupts, Outcome};
use host::{Bell, EventVectors};
use volume::{Action, Answer, Ask, End, Store, StoreError};

use super::grow::More;
use super::readers;

/// What all who use an open store share.
pub(super) struct Shared {
    state: Mutex<State>,
    /// The transaction that is open, or one before it.
    transaction: AtomicU64,
    /// How often writes that no flush had followed may have been lost.
    losses: AtomicU64,
    /// Wakes the owner.
    bell: Bell,
}

/// What the lock keeps.
pub(super) struct State {
    pub(super) store: Store,
    seats: BTreeMap<u32, Seat>,
    next_seat: u32,
    /// What the owner is to do.
    pages: VecDeque<Action>,
    /// Numbers of the volumes that somebody has open to write.
    pub(super) written: Vec<u64>,
    /// Numbers of the volumes and snapshots that somebody outside has open, as often as he has.
    pub(super) used: Vec<u64>,
    /// What snapshots are called that are being received.
    pub(super) arriving: Vec<String>,
    /// How often somebody outside was told that his volume has grown.
    pub(super) told: u64,
    /// How many volumes are open.
    pub(super) volumes_open: u64,
    /// For each volume that is open a count of how often its runs became old.
    epochs: BTreeMap<u64, Arc<AtomicU64>>,
    /// Whether those who keep runs were told that somebody else owns the store.
    is_taken_over: bool,
}

/// Someone who asks, as seen by whoever has the lock.
struct Seat {
    desk: Arc<Desk>,
    bell: EventVectors,
    notes: VecDeque<Note>,
    /// If he reads without asking: how old the oldest of such reads is.
    reads: Option<readers::Seat>,
    /// Whether he has a way of his own to the devices.
    has_way: bool,
}

/// What he looks at without the lock.
pub(super) struct Desk {
    pub(super) number: u32,
    has_notes: AtomicBool,
    pub(super) bell: EventVectors,
}

/// What somebody is told.
#[derive(Debug)]
pub(super) enum Note {
    /// To move data.
    Do(Action),
    /// What came of the question with this number.
    Ended(u32, Result<Answer, StoreError>),
    /// To go to one device more.
    More(More),
}

impl Shared {
    pub(super) fn new(store: Store, bell: Bell) -> Self {
        let state = State {
            store,
            seats: BTreeMap::new(),
            next_seat: 0,
            pages: VecDeque::new(),
            written: Vec::new(),
            used: Vec::new(),
            told: 0,
            arriving: Vec::new(),
            volumes_open: 0,
            epochs: BTreeMap::new(),
            is_taken_over: false,
        };
        let transaction = AtomicU64::new(state.store.transaction());
        Self { state: Mutex::new(state), transaction, losses: AtomicU64::new(0), bell }
    }

    /// The transaction that is open, or one before it.
    #[inline]
    pub(super) fn transaction(&self) -> u64 {
        self.transaction.load(Ordering::Acquire)
    }

    /// How often writes that no flush had followed may have been lost: a channel whose last failed flush was
    /// before that fails one more.
    #[inline]
    pub(super) fn losses(&self) -> u64 {
        // Stored before the answers of the store are told, and those are read after this is.
        self.losses.load(Ordering::Acquire)
    }

    /// Takes the lock, for somebody who has something to tell the store, and tells it how old the
    /// oldest read is.
    pub(super) fn lock_to_tell(&self) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        // Pairs with the one in `Readers::begin`: a channel whose seat is not seen has seen all runs
        // become old that did so before this.
        fence(Ordering::SeqCst);
        let seats = state.seats.values().filter_map(|seat| seat.reads.as_ref());
        let oldest = seats.map(readers::Seat::oldest).min().unwrap_or(u64::MAX);
        state.store.note_oldest_read(oldest);
        state
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the owner, to look around.
    pub(super) fn ring(&self) {
        self.bell.ring();
    }

    /// A seat for somebody who asks.
    pub(super) fn join(
        &self,
        reads: Option<readers::Seat>,
        has_way: bool,
    ) -> Result<Arc<Desk>, String> {
        let bell = EventVectors::new(1).map_err(|error| format!("a descriptor: {error}"))?;
        bell.mask(0);
        let mut state = self.lock();
        let number = state.next_seat;
        state.next_seat += 1;
        let desk = Arc::new(Desk { number, has_notes: AtomicBool::new(false), bell: bell.clone() });
        let seat = Seat { desk: Arc::clone(&desk), bell, notes: VecDeque::new(), reads, has_way };
        state.seats.insert(number, seat);
        Ok(desk)
    }

    /// Gives everybody who has a way of his own to the devices one to one more.
    pub(super) fn give_more(
        &self,
        mut make: impl FnMut() -> Result<More, String>,
    ) -> Result<(), String> {
        let ways = self.lock().seats.iter().filter(|(_, seat)| seat.has_way).count();
        let made = (0..ways).map(|_| make()).collect::<Result<Vec<More>, String>>()?;
        let mut state = self.lock();
        let seats = state.seats.iter().filter(|(_, seat)| seat.has_way);
        let seats: Vec<u32> = seats.map(|(number, _)| *number).collect();
        for (seat, more) in seats.into_iter().zip(made) {
            state.tell(seat, Note::More(more));
        }
        drop(state);
        self.ring();
        Ok(())
    }

    /// Nobody sits there any more: what the store still wants of him has failed, and so have the
    /// transfers that he names.
    pub(super) fn leave(&self, desk: &Desk, transfers: impl Iterator<Item = u64>) {
        let mut state = self.lock_to_tell();
        let seat = state.seats.remove(&desk.number);
        for note in seat.map(|seat| seat.notes).unwrap_or_default() {
            if let Note::Do(action) = note {
                state.refuse(&action);
            }
        }
        for io in transfers {
            state.store.complete(io, End::Failed(Outcome::ABORTED));
        }
        self.sort(&mut state);
    }

    /// Has all that the store wants done be done by whoever it is for.
    pub(super) fn sort(&self, state: &mut State) {
        let before = state.pages.len();
        loop {
            while let Some(action) = state.store.next_action() {
                match token_of(&action) {
                    None => state.pages.push_back(action),
                    Some(token) => state.pass_on(token, action),
                }
            }
            if !self.begin_recovery(state) {
                break;
            }
        }
        while let Some(volume) = state.store.next_remapped() {
            if let Some(epoch) = state.epochs.get(&volume) {
                // Pairs with the loads of channels: who hears of an answer sees this.
                epoch.fetch_add(1, Ordering::Release);
            }
        }
        if state.store.is_taken_over() && !state.is_taken_over {
            // What was kept of any map is not true any more.
            state.is_taken_over = true;
            for epoch in state.epochs.values() {
                epoch.fetch_add(1, Ordering::Release);
            }
        }
        let transaction = state.store.transaction();
        // Stored only if it is another: all who read look at it.
        if self.transaction.load(Ordering::Relaxed) != transaction {
            self.transaction.store(transaction, Ordering::Release);
        }
        while let Some((token, answer)) = state.store.next_answer() {
            let (seat, number) = parts(token);
            state.tell(seat, Note::Ended(number, answer));
        }
        if state.pages.len() > before {
            self.ring();
        }
    }
}

impl Shared {
    /// If the store has stopped because its device failed, has it read again what is durable, before anybody
    /// asks it anything. What was kept of any map is not true any more.
    fn begin_recovery(&self, state: &mut State) -> bool {
        let losses = state.store.losses();
        if losses == self.losses.load(Ordering::Relaxed) {
            return false;
        }
        for epoch in state.epochs.values() {
            epoch.fetch_add(1, Ordering::Release);
        }
        self.losses.store(losses, Ordering::Release);
        // What fails again at once is tried again by the owner, later.
        state.store.may_recover_at_once() && state.store.recover()
    }
}

impl State {
    /// Asks the store something; the answer bears `number`.
    #[inline]
    pub(super) fn ask(&mut self, desk: &Desk, number: u32, ask: Ask) {
        self.store.submit(u64::from(desk.number) << 32 | u64::from(number), ask);
    }

    /// Whether somebody has I/O under way: what the store is asked, and reads that it does not know of.
    pub(super) fn is_busy(&self) -> bool {
        let reads = self.seats.values().filter_map(|seat| seat.reads.as_ref());
        self.store.has_tasks() || reads.map(readers::Seat::oldest).any(|oldest| oldest != u64::MAX)
    }

    /// Notes that a snapshot is being received, unless it is already. Says whether it was not.
    pub(super) fn begin_to_arrive(&mut self, part: &str) -> bool {
        let is_new = !self.arriving.iter().any(|one| one == part);
        if is_new {
            self.arriving.push(part.to_owned());
        }
        is_new
    }

    /// What counts how often runs of a volume became old.
    pub(super) fn epoch(&mut self, volume: u64) -> Arc<AtomicU64> {
        Arc::clone(self.epochs.entry(volume).or_default())
    }

    /// Takes what the owner is to do.
    pub(super) fn take_pages(&mut self, into: &mut VecDeque<Action>) {
        into.append(&mut self.pages);
    }

    /// Takes what somebody is told, in the order in which it came.
    pub(super) fn take_notes(&mut self, desk: &Desk, into: &mut VecDeque<Note>) {
        if let Some(seat) = self.seats.get_mut(&desk.number) {
            desk.has_notes.store(false, Ordering::Relaxed);
            into.append(&mut seat.notes);
        }
    }

    fn pass_on(&mut self, token: u64, action: Action) {
        let (seat, _) = parts(token);
        if let Some(note) = self.tell(seat, Note::Do(action))
            && let Note::Do(action) = note
        {
            self.refuse(&action);
        }
    }

    /// Gives the note back if nobody sits there.
    fn tell(&mut self, seat: u32, note: Note) -> Option<Note> {
        let Some(seat) = self.seats.get_mut(&seat) else { return Some(note) };
        seat.notes.push_back(note);
        // Whoever sees it takes the lock.
        seat.desk.has_notes.store(true, Ordering::Release);
        seat.bell.raise(0);
        None
    }

    fn refuse(&mut self, action: &Action) {
        if let Some(io) = transfer_of(action) {
            self.store.complete(io, End::Failed(Outcome::ABORTED));
        }
    }
}

impl Desk {
    /// Whether there is something to be taken.
    #[inline]
    pub(super) fn has_notes(&self) -> bool {
        self.has_notes.load(Ordering::Acquire)
    }
}

/// Who asked for data to be moved; `None` if the store itself wants something.
fn token_of(action: &Action) -> Option<u64> {
    match action {
        Action::ReadData { token, .. }
        | Action::ReadParent { token, .. }
        | Action::WriteData { token, .. }
        | Action::Zero { token, .. } => Some(*token),
        Action::ReadPage { .. }
        | Action::ReadSlots { .. }
        | Action::WritePages { .. }
        | Action::Flush { .. } => None,
    }
}

/// What is to be named when data have been moved.
pub(super) const fn transfer_of(action: &Action) -> Option<u64> {
    match action {
        Action::ReadData { io, .. }
        | Action::ReadParent { io, .. }
        | Action::WriteData { io, .. } => Some(*io),
        _ => None,
    }
}

/// The seat in a token, and the number of the question.
#[expect(clippy::cast_possible_truncation, reason = "cut as they were put together")]
const fn parts(token: u64) -> (u32, u32) {
    ((token >> 32) as u32, token as u32)
}
