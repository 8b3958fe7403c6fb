//! A context that several channels use: one lock that nobody waits for.
//!
//! ```text
//!   channel A ── gets the lock: submits, polls the backend ──┬── its own answers
//!                                                            └── B's ──> inbox of B, and its bell
//!   channel B ── does not get it: goes on, and finds its answers in the inbox at its next turn
//! ```
//!
//! The token that goes down is the tag of the request, and the number of its channel above it.
//!
//! Sleeping: a channel that goes to sleep asks for its own bell first, looks into its inbox second,
//! and arms the backend third, under the lock. Whoever polls its answer away puts it into the inbox
//! first and looks whether to ring second. Whoever finds the backend's signal taken by another finds,
//! under the lock, what it was a signal for. A channel that was refused for want of room enters the
//! queue of those who wait under the same lock, and its bell is rung when there is room for it.
//!
//! In mode `single` the same context is entered by waiting for the lock, the old way, and how long
//! that took is counted.

use std::os::fd::BorrowedFd;
use std::sync::{PoisonError, TryLockError};

use base::{
    Answer, Answers, Backend, DoorbellCounts, Instant, Interrupts, Request, Segment, WakeSource,
};

use super::inbox::Inbox;
use super::sync::{Arc, Clock, EventVectors, Mutex, MutexGuard, Port, give_way};
use super::waiters::Waiters;
use crate::device::Mode;

/// A backend and those who use it.
pub(crate) struct SharedContext {
    core: Mutex<Core>,
    waits: bool,
    clock: Clock,
}

/// What the lock keeps.
struct Core {
    /// None until somebody joins, and after the device was removed.
    backend: Option<Box<dyn Backend>>,
    depth: u32,
    in_flight: u32,
    seats: Vec<Option<Seat>>,
    waiters: Waiters,
    /// Members that have armed the backend and not said since that they are awake.
    armed: u32,
    /// Where the backend puts answers before they are sorted.
    found: Answers,
}

/// A member, as seen by whoever has the lock.
struct Seat {
    desk: Arc<Desk>,
    bell: EventVectors,
    in_flight: u32,
    /// The channel is closed: answers to it are dropped.
    is_gone: bool,
}

/// What a member looks at without the lock.
#[derive(Debug)]
struct Desk {
    inbox: Inbox,
    bell: EventVectors,
}

/// One channel's part in a context.
pub(crate) struct Member {
    context: Arc<SharedContext>,
    desk: Arc<Desk>,
    number: u32,
    /// How much of the inbox was taken.
    tail: u64,
    port: Arc<Port>,
    /// The last submission was refused in part.
    wants_room: bool,
    /// Between `arm` and `disarm`.
    is_asleep: bool,
    /// Counted in `armed`.
    is_armed: bool,
    /// The deadline of the backend when the lock was last had.
    wake_at: Instant,
    /// The last turn.
    last: Instant,
}

/// Answers that are taken from the backend at once.
const FOUND_MAX: usize = 256;
const NUMBER_SHIFT: u32 = 32;

impl SharedContext {
    pub(crate) fn new(mode: Mode, clock: Clock) -> Self {
        let core = Core {
            backend: None,
            depth: 0,
            in_flight: 0,
            seats: Vec::new(),
            waiters: Waiters::default(),
            armed: 0,
            found: Answers::with_capacity(FOUND_MAX),
        };
        Self { core: Mutex::new(core), waits: mode == Mode::Single, clock }
    }

    /// A part in this context for a channel with `tags` tags. The first opens its backend.
    pub(crate) fn join(
        this: Arc<Self>,
        port: &Arc<Port>,
        tags: u32,
        open: impl FnOnce() -> Result<Box<dyn Backend>, String>,
    ) -> Result<Member, String> {
        let bell = EventVectors::new(1).map_err(|error| format!("a descriptor: {error}"))?;
        bell.mask(0);
        let desk = Arc::new(Desk { inbox: Inbox::new(tags), bell: bell.clone() });
        let mut core = this.lock();
        if core.backend.is_none() {
            let backend = open()?;
            core.depth = backend.limits().depth_max.min(tags);
            core.backend = Some(backend);
        }
        let seat = Seat { desk: Arc::clone(&desk), bell, in_flight: 0, is_gone: false };
        let position = core.seats.iter().position(Option::is_none).unwrap_or(core.seats.len());
        if position == core.seats.len() {
            core.seats.push(None);
        }
        core.seats[position] = Some(seat);
        let number = u32::try_from(position).map_err(|_| "too many channels".to_owned())?;
        drop(core);
        Ok(Member {
            context: this,
            desk,
            number,
            tail: 0,
            port: Arc::clone(port),
            wants_room: false,
            is_asleep: false,
            is_armed: false,
            wake_at: Instant::NEVER,
            last: Instant::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Core> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lock, if nobody has it. In mode `single` whoever has it is waited for, and that is counted.
    #[inline]
    fn enter(&self, port: &Port) -> Option<MutexGuard<'_, Core>> {
        match self.core.try_lock() {
            Ok(core) => Some(core),
            Err(TryLockError::Poisoned(core)) => Some(core.into_inner()),
            Err(TryLockError::WouldBlock) if !self.waits => None,
            Err(TryLockError::WouldBlock) => {
                let began = self.clock.ticks();
                let core = self.lock();
                port.meter.waited(self.clock.ticks().saturating_sub(began));
                Some(core)
            }
        }
    }
}

impl Core {
    fn room(&self) -> usize {
        (self.depth - self.in_flight) as usize
    }

    /// Polls the backend once and gives everybody what is theirs. Returns how many answers were put
    /// into `answers`, those of member `mine`.
    fn poll(&mut self, now: Instant, mine: u32, answers: &mut Answers) -> usize {
        let Some(backend) = &mut self.backend else { return 0 };
        if backend.poll(now, &mut self.found) == 0 {
            return 0;
        }
        let mut count = 0;
        for answer in self.found.as_slice() {
            #[expect(clippy::cast_possible_truncation, reason = "cut as it was put together")]
            let (number, tag) = ((answer.token >> NUMBER_SHIFT) as u32, answer.token as u32);
            let answer = Answer { token: u64::from(tag), ..*answer };
            let place = &mut self.seats[number as usize];
            let seat = place.as_mut().expect("a seat stays until its last answer");
            seat.in_flight -= 1;
            if number == mine && answers.room() > 0 {
                answers.push(answer);
                count += 1;
            } else if !seat.is_gone {
                seat.desk.inbox.put(answer);
                seat.bell.raise(0);
            } else if seat.in_flight == 0 {
                *place = None;
            }
        }
        #[expect(clippy::cast_possible_truncation, reason = "at most FOUND_MAX")]
        let ended = self.found.as_slice().len() as u32;
        self.in_flight -= ended;
        self.found.clear();
        self.tell(now);
        count
    }

    fn submit(
        &mut self,
        now: Instant,
        number: u32,
        requests: &mut [Request],
        segments: &[Segment],
    ) -> usize {
        let Some(backend) = &mut self.backend else { return 0 };
        for request in requests.iter_mut() {
            request.token |= u64::from(number) << NUMBER_SHIFT;
        }
        let taken = backend.submit(now, requests, segments);
        if taken > 0 {
            backend.flush();
        }
        #[expect(clippy::cast_possible_truncation, reason = "no more than there is room")]
        let count = taken as u32;
        self.in_flight += count;
        if let Some(seat) = &mut self.seats[number as usize] {
            seat.in_flight += count;
        }
        taken
    }

    fn wake_at(&self) -> Instant {
        self.backend.as_ref().map_or(Instant::NEVER, |backend| backend.wake_at())
    }

    fn in_flight_of(&self, number: u32) -> u32 {
        self.seats[number as usize].as_ref().map_or(0, |seat| seat.in_flight)
    }

    /// Whether one who waits for room has it; if not, it is in the queue.
    fn has_room_for(&mut self, number: u32, now: Instant) -> bool {
        self.waiters.enter(number);
        let room = self.room();
        let has_room = self.waiters.share(number, room, now) > 0;
        self.tell(now);
        has_room
    }

    /// A member that has armed the backend is awake again. The last one disarms it.
    fn settle(&mut self, is_armed: &mut bool, is_asleep: bool) {
        if *is_armed && !is_asleep {
            *is_armed = false;
            self.armed -= 1;
            if self.armed == 0
                && let Some(backend) = &mut self.backend
            {
                backend.disarm();
            }
        }
    }

    /// Tells those who wait that there is room.
    fn tell(&mut self, now: Instant) {
        if self.waiters.is_empty() {
            return;
        }
        let (room, seats) = (self.room(), &mut self.seats);
        self.waiters.tell(room, now, |member| {
            if let Some(Some(seat)) = seats.get_mut(member as usize) {
                seat.bell.raise(0);
            }
        });
    }
}

impl Member {
    /// Not inlined, as `poll`: an owned context does not pay for the room that its variables take.
    #[inline(never)]
    pub(super) fn submit(
        &mut self,
        now: Instant,
        requests: &mut [Request],
        segments: &[Segment],
    ) -> usize {
        (self.last, self.wants_room) = (now, true);
        let Some(mut core) = self.context.enter(&self.port) else { return 0 };
        core.settle(&mut self.is_armed, self.is_asleep);
        let room = core.room();
        let share = core.waiters.share(self.number, room, now).min(requests.len());
        let taken = core.submit(now, self.number, &mut requests[..share], segments);
        if taken > 0 {
            core.waiters.leave(self.number);
        }
        self.wants_room = taken < requests.len();
        if self.wants_room {
            core.waiters.enter(self.number);
        }
        // Whoever stood before them may have lost his place, and nothing else may ever end.
        core.tell(now);
        self.wake_at = core.wake_at();
        taken
    }

    #[inline(never)]
    pub(super) fn poll(&mut self, now: Instant, answers: &mut Answers) -> usize {
        self.last = now;
        let count = self.desk.inbox.take(&mut self.tail, answers);
        if answers.room() == 0 {
            return count;
        }
        let Some(mut core) = self.context.enter(&self.port) else { return count };
        core.settle(&mut self.is_armed, self.is_asleep);
        let more = core.poll(now, self.number, answers);
        self.wake_at = core.wake_at();
        count + more
    }

    pub(super) fn is_done_by_kernel(&self) -> bool {
        self.context.lock().backend.as_ref().is_some_and(|backend| backend.is_done_by_kernel())
    }

    pub(super) fn doorbells(&self) -> DoorbellCounts {
        let core = self.context.lock();
        core.backend.as_ref().map(|backend| backend.doorbells()).unwrap_or_default()
    }

    pub(super) fn wake_at(&self) -> Instant {
        if self.desk.inbox.has_more(self.tail) { Instant::default() } else { self.wake_at }
    }

    pub(super) fn arm(&mut self) -> bool {
        self.is_asleep = true;
        let is_heard = self.desk.bell.unmask(0);
        if !is_heard || self.desk.inbox.has_more(self.tail) {
            return true;
        }
        // Whoever has the lock may be about to take an answer of ours away, or to leave one.
        let Some(mut core) = self.context.enter(&self.port) else { return true };
        core.settle(&mut self.is_armed, self.is_asleep);
        if self.wants_room && core.has_room_for(self.number, self.last) {
            self.wants_room = false;
            return true;
        }
        if core.in_flight_of(self.number) == 0 {
            self.wake_at = Instant::NEVER;
            return false;
        }
        if !self.is_armed {
            self.is_armed = true;
            core.armed += 1;
        }
        let is_busy = core.backend.as_mut().is_some_and(|backend| backend.arm());
        self.wake_at = core.wake_at();
        // What was put by before we had the lock has rung; what is put by from now on will ring.
        is_busy
    }

    /// The backend is told at the next turn that has the lock.
    pub(super) fn disarm(&mut self) {
        if self.is_asleep {
            self.is_asleep = false;
            self.desk.bell.mask(0);
        }
    }

    pub(super) fn descriptors(&self, each: &mut dyn FnMut(BorrowedFd<'_>)) {
        if let Some(bell) = self.desk.bell.descriptor(0) {
            each(bell);
        }
        let core = self.context.lock();
        if let Some(WakeSource::Descriptor(descriptor)) =
            core.backend.as_ref().map(|backend| backend.wake_source())
        {
            each(descriptor);
        }
    }

    /// Drops the backend, for every member, and takes what others have put by.
    pub(super) fn close(&mut self, answers: &mut Answers) -> usize {
        self.context.lock().backend = None;
        self.desk.inbox.take(&mut self.tail, answers)
    }
}

impl Drop for Member {
    /// What is still in flight is waited for, however long the device takes, so that nobody touches
    /// its memory afterwards. The last member leaves that to the backend, which goes with it.
    fn drop(&mut self) {
        let Self { context, desk, number, last, .. } = self;
        let mut core = context.lock();
        (self.is_asleep, self.wants_room) = (false, false);
        core.settle(&mut self.is_armed, false);
        core.waiters.leave(*number);
        core.tell(*last);
        let is_idle = core.in_flight_of(*number) == 0 || core.backend.is_none();
        match &mut core.seats[*number as usize] {
            Some(seat) if !is_idle => seat.is_gone = true,
            seat => *seat = None,
        }
        drop(core);
        if is_idle || Arc::strong_count(context) == 1 {
            return;
        }
        let began = context.clock.now();
        let mut nowhere = Answers::with_capacity(0);
        loop {
            let passed = context.clock.now().since(began);
            let mut core = context.lock();
            core.poll(last.after(passed), *number, &mut nowhere);
            let seat = core.seats[*number as usize].as_ref();
            let is_there = seat.is_some_and(|seat| Arc::ptr_eq(&seat.desk, desk));
            if !is_there || core.backend.is_none() {
                return;
            }
            drop(core);
            give_way();
        }
    }
}
