//! Hardware context shared by several channels, behind a lock that is only tried.
//!
//! ```text
//!   channel A ── has the lock: submits, polls the device ──┬── its own completions
//!                                                          └── B's ──> inbox of B, and its waker
//!   channel B ── lock is taken: continues, and finds its completions in the inbox in its next iteration
//! ```
//!
//! The token of a request below is its tag, with the index of its channel above it.
//!
//! Sleep protocol: a channel first arms its own waker, second checks its inbox, and third arms the device
//! under the lock. A channel that polls another one's completion first puts it into the inbox, and second
//! raises the waker. If another channel has consumed the device's signal, its cause is visible under the
//! lock. A channel that was rejected because the context is full enters the wait queue under the same
//! lock, and its waker is raised when there is a free entry.
//!
//! In mode `single` the same context is entered by waiting for the lock, and the waiting time is counted.

use std::os::fd::BorrowedFd;
use std::sync::{PoisonError, TryLockError};

use tenmil_base::{
    CompletionBatch, DoorbellStats, Error, Instant, Interrupts, IoChannel, IoCompletion, Request,
    Segment, WakeSource,
};

use super::inbox::CompletionInbox;
use super::sync::{Arc, ChannelShared, Clock, EventFdVectors, Mutex, MutexGuard, yield_cpu};
use super::wait_queue::WaitQueue;
use crate::bdev::ChannelMode;

/// A device channel and its members.
pub(crate) struct SharedContext {
    core: Mutex<LockedContext>,
    waits: bool,
    clock: Clock,
}

/// State behind the lock.
struct LockedContext {
    /// `None` until the first member joins, and after the device was removed.
    backend: Option<Box<dyn IoChannel>>,
    depth: u32,
    in_flight: u32,
    members: Vec<Option<MemberEntry>>,
    waiters: WaitQueue,
    /// Number of members that have armed the device channel and not disarmed it since.
    armed: u32,
    /// Completions before they are distributed.
    found: CompletionBatch,
}

/// A member, as seen by the lock holder.
struct MemberEntry {
    inbox_of: Arc<MemberInbox>,
    waker: EventFdVectors,
    in_flight: u32,
    /// The channel is closed: its completions are dropped.
    is_closed: bool,
}

/// State of a member that it reads without the lock.
#[derive(Debug)]
struct MemberInbox {
    inbox: CompletionInbox,
    waker: EventFdVectors,
}

/// One channel's membership in a context.
pub(crate) struct ContextMember {
    context: Arc<SharedContext>,
    inbox_of: Arc<MemberInbox>,
    number: u32,
    /// Number of completions taken from the inbox.
    tail: u64,
    port: Arc<ChannelShared>,
    /// The last submission was partly rejected.
    awaits_space: bool,
    /// Between `arm` and `disarm`.
    is_asleep: bool,
    /// Counted in `armed`.
    is_armed: bool,
    /// The deadline of the device channel when the lock was last held.
    wake_at: Instant,
    /// Time of the last iteration.
    last: Instant,
}

/// Maximum number of completions per poll.
const FOUND_MAX: usize = 256;
const NUMBER_SHIFT: u32 = 32;

impl SharedContext {
    pub(crate) fn new(mode: ChannelMode, clock: Clock) -> Self {
        let core = LockedContext {
            backend: None,
            depth: 0,
            in_flight: 0,
            members: Vec::new(),
            waiters: WaitQueue::default(),
            armed: 0,
            found: CompletionBatch::with_capacity(FOUND_MAX),
        };
        Self { core: Mutex::new(core), waits: mode == ChannelMode::SingleQueue, clock }
    }

    /// Adds a member for a channel with `tags` tags. The first one opens the device channel.
    pub(crate) fn add_member(
        this: Arc<Self>,
        port: &Arc<ChannelShared>,
        tags: u32,
        open: impl FnOnce() -> Result<Box<dyn IoChannel>, Error>,
    ) -> Result<ContextMember, Error> {
        let waker = EventFdVectors::new(1)
            .map_err(|error| format!("a descriptor: {error}"))
            .map_err(Error::environment)?;
        waker.mask(0);
        let inbox_of =
            Arc::new(MemberInbox { inbox: CompletionInbox::new(tags), waker: waker.clone() });
        let mut core = this.lock();
        if core.backend.is_none() {
            let backend = open()?;
            core.depth = backend.limits().depth_max.min(tags);
            core.backend = Some(backend);
        }
        let member_index =
            MemberEntry { inbox_of: Arc::clone(&inbox_of), waker, in_flight: 0, is_closed: false };
        let position = core.members.iter().position(Option::is_none).unwrap_or(core.members.len());
        if position == core.members.len() {
            core.members.push(None);
        }
        core.members[position] = Some(member_index);
        let number = u32::try_from(position)
            .map_err(|_| "too many channels".to_owned())
            .map_err(Error::environment)?;
        drop(core);
        Ok(ContextMember {
            context: this,
            inbox_of,
            number,
            tail: 0,
            port: Arc::clone(port),
            awaits_space: false,
            is_asleep: false,
            is_armed: false,
            wake_at: Instant::NEVER,
            last: Instant::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, LockedContext> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tries the lock. In mode `single`, waits for it, and counts the time.
    #[inline]
    fn lock_context(&self, port: &ChannelShared) -> Option<MutexGuard<'_, LockedContext>> {
        match self.core.try_lock() {
            Ok(core) => Some(core),
            Err(TryLockError::Poisoned(core)) => Some(core.into_inner()),
            Err(TryLockError::WouldBlock) if !self.waits => None,
            Err(TryLockError::WouldBlock) => {
                let began = self.clock.raw_ticks();
                let core = self.lock();
                port.meter.add_lock_wait(self.clock.raw_ticks().saturating_sub(began));
                Some(core)
            }
        }
    }
}

impl LockedContext {
    fn free_count(&self) -> usize {
        (self.depth - self.in_flight) as usize
    }

    /// Polls the device once and distributes the completions. Returns how many were appended to
    /// `completions`, those of member `mine`.
    fn poll(&mut self, now: Instant, mine: u32, completions: &mut CompletionBatch) -> usize {
        let Some(backend) = &mut self.backend else { return 0 };
        if backend.poll(now, &mut self.found) == 0 {
            return 0;
        }
        let mut count = 0;
        for completion in self.found.as_slice() {
            #[expect(clippy::cast_possible_truncation, reason = "cut as it was put together")]
            let (number, tag) =
                ((completion.token >> NUMBER_SHIFT) as u32, completion.token as u32);
            let completion = IoCompletion { token: u64::from(tag), ..*completion };
            let place = &mut self.members[number as usize];
            let member_index = place.as_mut().expect("a channel stays until its last completion");
            member_index.in_flight -= 1;
            if number == mine && completions.remaining() > 0 {
                completions.push(completion);
                count += 1;
            } else if !member_index.is_closed {
                member_index.inbox_of.inbox.push_completions(completion);
                member_index.waker.raise(0);
            } else if member_index.in_flight == 0 {
                *place = None;
            }
        }
        #[expect(clippy::cast_possible_truncation, reason = "at most FOUND_MAX")]
        let ended = self.found.as_slice().len() as u32;
        self.in_flight -= ended;
        self.found.clear();
        self.notify_waiters(now);
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
            backend.flush_submissions();
        }
        #[expect(clippy::cast_possible_truncation, reason = "within the capacity")]
        let count = taken as u32;
        self.in_flight += count;
        if let Some(member_index) = &mut self.members[number as usize] {
            member_index.in_flight += count;
        }
        taken
    }

    fn wake_at(&self) -> Instant {
        self.backend.as_ref().map_or(Instant::NEVER, |backend| backend.wake_at())
    }

    fn member_in_flight(&self, number: u32) -> u32 {
        self.members[number as usize].as_ref().map_or(0, |member_index| member_index.in_flight)
    }

    /// Whether there is a free entry for a waiting member; if not, it is in the queue.
    fn queue_and_check_space(&mut self, number: u32, now: Instant) -> bool {
        self.waiters.enqueue(number);
        let room = self.free_count();
        let has_space = self.waiters.free_entries_for(number, room, now) > 0;
        self.notify_waiters(now);
        has_space
    }

    /// Accounts for a member that has armed the device channel and is awake again. The last one disarms
    /// it.
    fn release_armed(&mut self, is_armed: &mut bool, is_asleep: bool) {
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

    /// Notifies waiting members of free entries.
    fn notify_waiters(&mut self, now: Instant) {
        if self.waiters.is_empty() {
            return;
        }
        let (room, members) = (self.free_count(), &mut self.members);
        self.waiters.notify_first(room, now, |member| {
            if let Some(Some(member_index)) = members.get_mut(member as usize) {
                member_index.waker.raise(0);
            }
        });
    }
}

impl ContextMember {
    /// Not inlined, as `poll`: an owned context does not pay for the stack frame.
    #[inline(never)]
    pub(super) fn submit(
        &mut self,
        now: Instant,
        requests: &mut [Request],
        segments: &[Segment],
    ) -> usize {
        (self.last, self.awaits_space) = (now, true);
        let Some(mut core) = self.context.lock_context(&self.port) else { return 0 };
        core.release_armed(&mut self.is_armed, self.is_asleep);
        let room = core.free_count();
        let share = core.waiters.free_entries_for(self.number, room, now).min(requests.len());
        let taken = core.submit(now, self.number, &mut requests[..share], segments);
        if taken > 0 {
            core.waiters.remove(self.number);
        }
        self.awaits_space = taken < requests.len();
        if self.awaits_space {
            core.waiters.enqueue(self.number);
        }
        // A member ahead in the queue may have lost its reservation, and no other event may ever follow.
        core.notify_waiters(now);
        self.wake_at = core.wake_at();
        taken
    }

    #[inline(never)]
    pub(super) fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        self.last = now;
        let count = self.inbox_of.inbox.take_completions(&mut self.tail, completions);
        if completions.remaining() == 0 {
            return count;
        }
        let Some(mut core) = self.context.lock_context(&self.port) else { return count };
        core.release_armed(&mut self.is_armed, self.is_asleep);
        let more = core.poll(now, self.number, completions);
        self.wake_at = core.wake_at();
        count + more
    }

    pub(super) fn is_kernel_io(&self) -> bool {
        self.context
            .lock()
            .backend
            .as_ref()
            .is_some_and(|backend| backend.is_done_by_local_kernel())
    }

    pub(super) fn doorbell_stats(&self) -> DoorbellStats {
        let core = self.context.lock();
        core.backend.as_ref().map(|backend| backend.doorbell_stats()).unwrap_or_default()
    }

    pub(super) fn wake_at(&self) -> Instant {
        if self.inbox_of.inbox.has_more(self.tail) { Instant::default() } else { self.wake_at }
    }

    pub(super) fn arm(&mut self) -> bool {
        self.is_asleep = true;
        let is_heard = self.inbox_of.waker.unmask(0);
        if !is_heard || self.inbox_of.inbox.has_more(self.tail) {
            return true;
        }
        // The lock holder may be taking a completion of this member out of the device, or leaving one
        // there.
        let Some(mut core) = self.context.lock_context(&self.port) else { return true };
        core.release_armed(&mut self.is_armed, self.is_asleep);
        if self.awaits_space && core.queue_and_check_space(self.number, self.last) {
            self.awaits_space = false;
            return true;
        }
        if core.member_in_flight(self.number) == 0 {
            self.wake_at = Instant::NEVER;
            return false;
        }
        if !self.is_armed {
            self.is_armed = true;
            core.armed += 1;
        }
        let is_busy = core.backend.as_mut().is_some_and(|backend| backend.arm());
        self.wake_at = core.wake_at();
        // Completions that were put into the inbox before this lock have raised the waker; later ones
        // will.
        is_busy
    }

    /// The device channel is disarmed in the next iteration with the lock.
    pub(super) fn disarm(&mut self) {
        if self.is_asleep {
            self.is_asleep = false;
            self.inbox_of.waker.mask(0);
        }
    }

    pub(super) fn descriptors(&self, each: &mut dyn FnMut(BorrowedFd<'_>)) {
        if let Some(waker) = self.inbox_of.waker.descriptor(0) {
            each(waker);
        }
        let core = self.context.lock();
        if let Some(WakeSource::Descriptor(descriptor)) =
            core.backend.as_ref().map(|backend| backend.wake_source())
        {
            each(descriptor);
        }
    }

    /// Drops the device channel for all members, and takes the completions in the inbox.
    pub(super) fn close(&mut self, completions: &mut CompletionBatch) -> usize {
        self.context.lock().backend = None;
        self.inbox_of.inbox.take_completions(&mut self.tail, completions)
    }
}

impl Drop for ContextMember {
    /// Waits for everything in flight, however long the device takes, so that its memory is not accessed
    /// afterwards. For the last member, dropping the device channel does that.
    fn drop(&mut self) {
        let Self { context, inbox_of, number, last, .. } = self;
        let mut core = context.lock();
        (self.is_asleep, self.awaits_space) = (false, false);
        core.release_armed(&mut self.is_armed, false);
        core.waiters.remove(*number);
        core.notify_waiters(*last);
        let is_idle = core.member_in_flight(*number) == 0 || core.backend.is_none();
        match &mut core.members[*number as usize] {
            Some(member_index) if !is_idle => member_index.is_closed = true,
            member_index => *member_index = None,
        }
        drop(core);
        if is_idle || Arc::strong_count(context) == 1 {
            return;
        }
        let began = context.clock.now();
        let mut nowhere = CompletionBatch::with_capacity(0);
        loop {
            let passed = context.clock.now().since(began);
            let mut core = context.lock();
            core.poll(last.after(passed), *number, &mut nowhere);
            let member_index = core.members[*number as usize].as_ref();
            let is_there = member_index
                .is_some_and(|member_index| Arc::ptr_eq(&member_index.inbox_of, inbox_of));
            if !is_there || core.backend.is_none() {
                return;
            }
            drop(core);
            yield_cpu();
        }
    }
}
