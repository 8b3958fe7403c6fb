//! Ring of one engine, or of the engines of channels that are used together.
//!
//! ```text
//!   user_data   63       48 47       32 31   18 17  16 15         0
//!              | lap       | engine    |  0    | step | slot       |
//!              '--- EngineTag ---------'--- of the engine ---------'
//!
//!   completion queue ──> engine that polls: its own are passed to it
//!                    └──> any other engine: stored in its `arrived`, in order
//! ```
//!
//! **Which engines share.** Those that were opened as members of one [`ChannelGroup`]: their owner,
//! such as a mirror, uses them together. All other engines have a ring of their own, which costs
//! them nothing. A ring for each thread would be wrong: a channel may move to another thread at any
//! time, its wake-up descriptor is constant, and a channel is often opened by another thread than
//! the one that uses it. A group has further rings of four times the engines when the first is full,
//! so that the completion queue always has room for all jobs.
//!
//! **Threads.** An engine may move away from the others, or be dropped by another thread. So a
//! shared ring is behind a [`BiasedLock`], which costs the thread that uses all of its engines two
//! stores and two loads. No flag ties the kernel's side to a thread (`SINGLE_ISSUER`,
//! `DEFER_TASKRUN`).
//!
//! **Submission.** The entries of all engines are in one queue, and a system call submits them all.
//! If it is full it is submitted; if the kernel accepts nothing, the engine keeps the job and tries
//! again in its next iteration.
//!
//! **Sleep.** All engines have the same descriptor. It is readable while the completion queue is
//! not empty, so a thread that is to be woken must find its completions there, or must not fall
//! asleep:
//!
//! - arming takes nothing out of the queue, and fails if it is not empty or if something of the
//!   engine has arrived;
//! - an engine that polls leaves the completions of another engine in the queue while that is armed,
//!   and all that follow, so that the descriptor stays readable until the other thread has woken.
//!
//! **End.** An engine that is dropped waits for its own jobs only. If the queue holds completions of
//! an armed engine before its own, these are stored, and an entry without effect follows them, which
//! wakes the other thread in their place. Entries of an engine that gave up waiting are recognized
//! by the lap of its place, and ignored.

use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;

use io_uring::{IoUring, cqueue, opcode, squeue, types};
use rustix::io::Errno;
use tenmil_base::ChannelGroup;

use super::errno_of;
use super::kernel_buffer_jobs::{BufferTable, ENTRIES};
use crate::asymmetric_barrier::AsymmetricBarrier;
use crate::biased_lock::BiasedLock;
use crate::thread_flags::thread_flag;

/// Access of an engine to its ring.
#[derive(Debug)]
pub(super) enum RingHandle {
    Own(Box<Ring>),
    Shared(Arc<BiasedLock<Ring>>),
}

/// The ring and its engines.
pub(super) struct Ring {
    pub(super) uring: IoUring,
    members: Box<[Member]>,
    /// Largest number of jobs of an engine.
    depth: u16,
    /// Entries pushed but not yet submitted.
    unsubmitted: usize,
    /// Jobs of all engines.
    jobs: usize,
    /// Engines whose threads sleep or are about to.
    armed: usize,
    /// Table of buffers, one place for each slot of each engine, created on first use.
    pub(super) table: BufferTable,
}

/// Place of an engine.
#[derive(Debug)]
struct Member {
    tag: EngineTag,
    is_used: bool,
    is_armed: bool,
    /// Completions that another engine found.
    arrived: Vec<Arrival>,
}

/// Completion of an entry: the part of `user_data` that belongs to the engine, and the result.
type Arrival = (u32, i32);

/// Number of an engine in its ring, and how often the place has been used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct EngineTag {
    pub(super) number: u16,
    pub(super) lap: u16,
}

/// Entry without effect, in the part of `user_data` that belongs to the engine.
const NO_JOB: u32 = u32::MAX;
/// Pushed entries that are submitted at once while the devices are busy. An idle device gets the
/// first two at once. A disk of a virtual machine, which completes a batch as a whole, did 113
/// instead of 95 thousand reads per second at depth 32.
const BATCH_MAX: usize = 16;
/// A single entry is left to the caller's flush, which follows: that of a mirror is then one system
/// call for all legs.
const BATCH_MIN: usize = 2;
/// Engines of the first ring of a group. A mirror usually has two legs.
const MEMBERS_FIRST: u16 = 2;
/// Largest number of engines of a ring: the kernel's tables have 16 Ki buffers, and its completion
/// queue 64 Ki entries.
const MEMBERS_MAX: u16 = 64;
const PLACES_MAX: u32 = 1 << 14;
/// Registered files of an engine.
const FILES: u16 = 2;
const _: () = assert!(3 * PLACES_MAX <= 1 << 16 && ENTRIES == 3);

impl RingHandle {
    /// Opens a ring for an engine with these files, or adds it to the ring of its group.
    pub(super) fn open(depth: u16, files: [RawFd; 2]) -> Result<(Self, EngineTag), Errno> {
        let Some(group) = ChannelGroup::current() else {
            let mut ring = Ring::new(depth, 1)?;
            let tag = ring.add_member(depth, files)?.ok_or(Errno::NOSPC)?;
            return Ok((Self::Own(Box::new(ring)), tag));
        };
        let rings = group.resources::<BiasedLock<Ring>>();
        for ring in &rings {
            let joined = ring.access(thread_flag(), |ring| ring.add_member(depth, files));
            if let Ok(Some(tag)) = joined {
                return Ok((Self::Shared(Arc::clone(ring)), tag));
            }
        }
        let wanted = u32::from(MEMBERS_FIRST) << (2 * rings.len().min(8));
        let count = wanted.min(u32::from(MEMBERS_MAX)).min(PLACES_MAX / u32::from(depth)).max(1);
        let mut ring = match Ring::new(depth, u16::try_from(count).unwrap_or(1)) {
            // The user may lock little memory: a ring for one engine needs less.
            Err(Errno::NOMEM) if count > 1 => Ring::new(depth, 1)?,
            ring => ring?,
        };
        let tag = ring.add_member(depth, files)?.ok_or(Errno::NOSPC)?;
        let ring = Arc::new(BiasedLock::new(ring, AsymmetricBarrier::detect()));
        group.add_resource(&ring);
        Ok((Self::Shared(ring), tag))
    }

    /// Passes the ring to `body`, which accesses no other ring.
    #[inline]
    pub(super) fn access<R>(&mut self, body: impl FnOnce(&mut Ring) -> R) -> R {
        match self {
            Self::Own(ring) => body(ring),
            Self::Shared(ring) => ring.access(thread_flag(), body),
        }
    }

    /// As [`access`](Self::access), to read it.
    pub(super) fn inspect<R>(&self, body: impl FnOnce(&Ring) -> R) -> R {
        match self {
            Self::Own(ring) => body(ring),
            Self::Shared(ring) => ring.access(thread_flag(), |ring| body(ring)),
        }
    }

    /// Descriptor that becomes readable when a job of any engine completes: an io_uring is pollable.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        let descriptor = self.inspect(|ring| ring.uring.as_raw_fd());
        // SAFETY: the descriptor belongs to the ring, which stays open while `self` is borrowed.
        unsafe { BorrowedFd::borrow_raw(descriptor) }
    }
}

impl Ring {
    fn new(depth: u16, members: u16) -> Result<Self, Errno> {
        // The linked entries of a kernel-buffer job must fit at once.
        let depth_max = u32::from(depth).max(ENTRIES);
        // The completion queue holds every completion; the kernel would otherwise hold back the
        // overflow.
        let completions = depth_max * ENTRIES * u32::from(members);
        let uring = IoUring::builder().setup_cqsize(completions).build(depth_max);
        let uring = uring.map_err(|error| errno_of(&error))?;
        // Places without a file, which are filled when an engine joins.
        let files = vec![-1; usize::from(members * FILES)];
        uring.submitter().register_files(&files).map_err(|error| errno_of(&error))?;
        // Only engines that share a ring store completions for each other.
        let stored = if members > 1 { usize::from(depth) * ENTRIES as usize } else { 0 };
        let member = |number| Member {
            tag: EngineTag { number, lap: 0 },
            is_used: false,
            is_armed: false,
            arrived: Vec::with_capacity(stored),
        };
        Ok(Self {
            uring,
            members: (0..members).map(member).collect(),
            depth,
            unsubmitted: 0,
            jobs: 0,
            armed: 0,
            table: BufferTable::Unasked,
        })
    }

    /// Adds an engine with these files. `None` if the ring has no place for it.
    fn add_member(&mut self, depth: u16, files: [RawFd; 2]) -> Result<Option<EngineTag>, Errno> {
        let free = self.members.iter_mut().find(|member| !member.is_used);
        let Some(member) = free.filter(|_| depth <= self.depth) else { return Ok(None) };
        let place = u32::from(member.tag.number * FILES);
        // The ring holds references of its own from here on.
        let registered = self.uring.submitter().register_files_update(place, &files);
        if registered.map_err(|error| errno_of(&error))? < files.len() {
            return Err(Errno::MFILE);
        }
        member.is_used = true;
        Ok(Some(member.tag))
    }

    /// Removes an engine, and closes its files.
    pub(super) fn remove_member(&mut self, tag: EngineTag) {
        self.set_armed(tag, false);
        let member = &mut self.members[usize::from(tag.number)];
        member.is_used = false;
        member.tag.lap = member.tag.lap.wrapping_add(1);
        member.arrived.clear();
        // If the kernel refuses that, the files stay open until their places are used again.
        let _ = self.uring.submitter().register_files_update(tag.file(0).0, &[-1, -1]);
    }

    /// Pushes the entries of an engine, all or none; false if there is no space, even after
    /// everything has been submitted.
    ///
    /// # Safety
    ///
    /// As for [`io_uring::SubmissionQueue::push`]: what the entries refer to stays valid until they have
    /// completed.
    #[inline]
    pub(super) unsafe fn push(&mut self, entries: &[squeue::Entry]) -> bool {
        // SAFETY: that is the contract of this function, too.
        let pushed = unsafe { self.uring.submission().push_multiple(entries) };
        if pushed.is_err() {
            self.flush();
            // SAFETY: the same.
            let pushed = unsafe { self.uring.submission().push_multiple(entries) };
            if pushed.is_err() {
                return false;
            }
        }
        self.unsubmitted += entries.len();
        // An idle device gets the first entries at once, a busy one as many as it has, up to
        // `BATCH_MAX`.
        let started = self.jobs.saturating_sub(self.unsubmitted);
        if self.unsubmitted >= started.clamp(BATCH_MIN, BATCH_MAX) {
            self.flush();
        }
        true
    }

    /// Submits the entries of all engines.
    #[inline]
    pub(super) fn flush(&mut self) {
        // A partial submission (EAGAIN, EBUSY, EINTR) is temporary; the rest is submitted in the
        // next iteration.
        let _ = self.try_flush();
    }

    /// As [`flush`](Self::flush); fails if the kernel will never accept the entries.
    pub(super) fn try_flush(&mut self) -> Result<(), Errno> {
        if self.unsubmitted == 0 {
            return Ok(());
        }
        match self.uring.submit() {
            Ok(count) => self.unsubmitted = self.unsubmitted.saturating_sub(count),
            Err(error) if matches!(errno_of(&error), Errno::INTR | Errno::AGAIN | Errno::BUSY) => {}
            Err(error) => return Err(errno_of(&error)),
        }
        Ok(())
    }

    /// Whether entries of any engine have not been submitted.
    pub(super) fn has_unsubmitted(&self) -> bool {
        self.unsubmitted > 0
    }

    /// Counts a job that an engine has accepted.
    #[inline]
    pub(super) fn begin_job(&mut self) {
        self.jobs += 1;
    }

    /// Counts jobs that have completed.
    #[inline]
    pub(super) fn end_jobs(&mut self, count: usize) {
        self.jobs -= count;
    }

    /// Passes the completions of an engine to `each`, and stores those of other engines, except
    /// for engines that are armed: see the head of the file.
    #[inline]
    pub(super) fn reap(&mut self, own: EngineTag, mut each: impl FnMut(u32, i32)) {
        let Self { uring, members, armed, .. } = self;
        let arrived = &mut members[usize::from(own.number)].arrived;
        for (place, result) in arrived.drain(..) {
            each(place, result);
        }
        if *armed > 0 && *armed > usize::from(members[usize::from(own.number)].is_armed) {
            return self.reap_beside_sleepers(own, &mut each);
        }
        for entry in uring.completion() {
            let (tag, place) = tag_and_place(&entry);
            if tag != own {
                store_arrival(members, tag, (place, entry.result()));
            } else if place != NO_JOB {
                each(place, entry.result());
            }
        }
    }

    /// As [`reap`](Self::reap), up to the first completion of another engine that is armed.
    #[cold]
    #[inline(never)]
    fn reap_beside_sleepers(&mut self, own: EngineTag, each: &mut dyn FnMut(u32, i32)) {
        loop {
            let mut queue = self.uring.completion();
            let Some(entry) = queue.next() else { return };
            let (tag, place) = tag_and_place(&entry);
            let member = self.members.get(usize::from(tag.number));
            if tag != own && member.is_some_and(|other| other.tag == tag && other.is_armed) {
                // The head of the queue is not published: the entry stays there.
                std::mem::forget(queue);
                return;
            }
            drop(queue);
            if tag != own {
                store_arrival(&mut self.members, tag, (place, entry.result()));
            } else if place != NO_JOB {
                each(place, entry.result());
            }
        }
    }

    /// As [`reap`](Self::reap), also beyond completions of engines that are armed: an entry without
    /// effect wakes each of their threads instead.
    #[cold]
    pub(super) fn reap_all(&mut self, own: EngineTag, each: &mut dyn FnMut(u32, i32)) {
        let mut sleepers: Vec<EngineTag> = Vec::new();
        let armed: Vec<_> = self.members.iter().map(|one| one.is_armed).collect();
        self.members.iter_mut().for_each(|one| one.is_armed = false);
        let before = std::mem::take(&mut self.armed);
        self.reap(own, each);
        for (member, is_armed) in self.members.iter_mut().zip(armed) {
            member.is_armed = is_armed;
            if is_armed && member.tag != own && !member.arrived.is_empty() {
                sleepers.push(member.tag);
            }
        }
        self.armed = before;
        for tag in sleepers {
            let entry = opcode::Nop::new().build().user_data(tag.user_data(NO_JOB));
            // SAFETY: the entry refers to no memory.
            // If it has no space, the next call tries again: what has arrived is still there.
            let _ = unsafe { self.push(&[entry]) };
        }
        self.flush();
    }

    /// Submits everything and arms an engine. True if there are completions.
    pub(super) fn arm(&mut self, own: EngineTag) -> bool {
        self.flush();
        self.set_armed(own, true);
        let member = &self.members[usize::from(own.number)];
        self.has_unsubmitted() || !member.arrived.is_empty() || !self.uring.completion().is_empty()
    }

    pub(super) fn disarm(&mut self, own: EngineTag) {
        self.set_armed(own, false);
    }

    /// Whether the ring has a table of buffers; it is created on first use.
    pub(super) fn has_buffer_table(&mut self) -> bool {
        if self.table == BufferTable::Unasked {
            let places = u32::from(self.depth) * u32::try_from(self.members.len()).unwrap_or(1);
            let registered = self.uring.submitter().register_buffers_sparse(places);
            self.table = if registered.is_ok() { BufferTable::There } else { BufferTable::Refused };
        }
        self.table == BufferTable::There
    }

    /// Place in the table of buffers of a slot of an engine.
    pub(super) fn buffer_place(&self, own: EngineTag, slot: u16) -> u16 {
        own.number * self.depth + slot
    }

    fn set_armed(&mut self, own: EngineTag, is_armed: bool) {
        let member = &mut self.members[usize::from(own.number)];
        if member.is_armed != is_armed {
            member.is_armed = is_armed;
            self.armed = if is_armed { self.armed + 1 } else { self.armed - 1 };
        }
    }
}

impl EngineTag {
    /// `user_data` of an entry.
    #[inline]
    pub(super) fn user_data(self, place: u32) -> u64 {
        u64::from(self.lap) << 48 | u64::from(self.number) << 32 | u64::from(place)
    }

    /// Place of a registered file.
    #[inline]
    pub(super) fn file(self, index: u16) -> types::Fixed {
        types::Fixed(u32::from(self.number * FILES + index))
    }
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let used = self.members.iter().filter(|member| member.is_used).count();
        out.debug_struct("Ring")
            .field("engines", &used)
            .field("jobs", &self.jobs)
            .finish_non_exhaustive()
    }
}

#[inline]
#[expect(clippy::cast_possible_truncation, reason = "taken apart as it was put together")]
fn tag_and_place(entry: &cqueue::Entry) -> (EngineTag, u32) {
    let data = entry.user_data();
    (EngineTag { number: (data >> 32) as u16, lap: (data >> 48) as u16 }, data as u32)
}

/// Stores a completion for the engine that it belongs to, if that is still there.
#[inline]
fn store_arrival(members: &mut [Member], tag: EngineTag, arrival: Arrival) {
    if let Some(member) = members.get_mut(usize::from(tag.number)).filter(|one| one.tag == tag)
        && arrival.0 != NO_JOB
    {
        member.arrived.push(arrival);
    }
}
