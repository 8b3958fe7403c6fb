//! What a mirror does by itself: clear the map of what is equal again, bring legs back, copy. No I/O:
//! whoever has time asks [`Meta::tend`] what is to be done, does it, and says how it went.
//!
//! ```text
//!   rest ─┬─ quiet ── flush ──────────────────────────────────▶ rest     regions become clean
//!         ├─ probe ── joining ── entering ────────────────────▶ rest     a leg is back
//!         ├─ draining ── locking ── reading ── writing ─┬─────▶ rest     a region is copied
//!         │                 ▲────────── pacing ◀────────┘   flush of the leg that was read, before
//!         │                                                   others in sync are written
//!         └─ flush ── promoting ──────────────────────────────▶ rest     a leg is in sync
//! ```

use base::{Instant, Span};

use super::copy::{Copying, lowest};
use super::events::MirrorEvent;
use super::meta::{Meta, Planted};
use super::shared::Shared;
use super::superblock::{NoSuperblock, Superblock};

/// How eager the background is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Policy {
    /// A region that nobody has written for so long becomes clean.
    pub(super) clear_after: Span,
    /// A leg that has failed is looked for as often as this.
    pub(super) probe_every: Span,
    /// Bytes per second that are copied.
    pub(super) copy_rate: u64,
}

/// When what is due.
#[derive(Debug)]
pub(super) struct Times {
    pub(super) policy: Policy,
    clear_at: Instant,
    probe_at: Instant,
    pub(super) copy_at: Instant,
    /// What all channels had been asked at the last chunk.
    load: u64,
}

/// What is awaited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// That something is due.
    Rest,
    /// That nobody writes the quiet regions, and that older writes end.
    Quiet { until: Instant, epoch: u64 },
    /// A flush, after which the quiet regions are clean.
    FlushedToClear,
    /// A superblock of a leg that had failed.
    Probed { leg: u8 },
    /// That a leg says of itself that it is stale.
    Joined { leg: u8, version: u64 },
    /// The end of all writes that this leg did not get.
    Entered { epoch: u64 },
    /// The end of all writes to the region that nobody has registered.
    Drained { epoch: u64 },
    /// The end of registered writes in the chunk.
    Locked,
    /// A chunk, from this leg; these could not read it.
    Read { leg: u8, tried: u8 },
    /// A flush of the leg that the chunk was read from; these could not read it.
    FlushedToCopy { leg: u8, tried: u8 },
    /// That the chunk is on the other legs.
    Written,
    /// The time of the next chunk.
    Paced,
    /// A flush, after which a leg is in sync.
    FlushedToPromote,
    /// That all legs say so.
    Promoted,
}

/// What is to be done by whoever asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Task {
    /// Flush these legs.
    Flush { legs: u8 },
    /// Read both copies of this leg's superblock.
    Probe { leg: u8 },
    /// Read these blocks of the mirror from this leg into the chunk.
    Read { leg: u8, lba: u64, blocks: u32 },
    /// Write the chunk to these legs.
    Write { legs: u8, lba: u64, blocks: u32 },
}

impl Task {
    /// Whether it tells of a loss of completed writes.
    pub(super) const fn flushes(self) -> bool {
        matches!(self, Self::Flush { .. })
    }
}

/// The copying takes so many times as long while somebody uses the mirror.
const BUSY_SHARE: u64 = 4;

/// What comes next for the background.
pub(super) enum Next {
    Again,
    At(Instant),
    Do(Task),
}

/// How soon something is looked at again that other threads will have done in a moment.
const LOOK: Span = Span::from_us(50);

impl Times {
    pub(super) const fn new(policy: Policy) -> Self {
        let now = Instant { ns: 0 };
        Self { policy, clear_at: Instant::NEVER, probe_at: now, copy_at: now, load: 0 }
    }
}

impl Meta {
    /// What is to be done now, if anything; else says when to ask again.
    pub(super) fn tend(&mut self, shared: &Shared, now: Instant) -> Option<Task> {
        if self.fence.is_lost() {
            self.phase = Phase::Rest;
            shared.tend_again_at(Instant::NEVER);
            return None;
        }
        loop {
            match self.step(shared, now) {
                Next::Again => {}
                Next::At(at) => {
                    shared.tend_again_at(at);
                    return None;
                }
                Next::Do(task) => {
                    shared.tend_again_at(Instant::NEVER);
                    return Some(task);
                }
            }
        }
    }

    fn step(&mut self, shared: &Shared, now: Instant) -> Next {
        match self.phase {
            Phase::Rest => self.rest(shared, now),
            Phase::Quiet { until, epoch } => self.quiet(shared, until, epoch, now),
            Phase::Joined { leg, version } => self.joined(shared, leg, version, now),
            Phase::Entered { epoch } => self.entered(epoch, now),
            Phase::Drained { epoch } => self.drained(epoch, now),
            Phase::Locked => self.locked(now),
            Phase::Paced if now < self.times.copy_at => Next::At(self.times.copy_at),
            Phase::Paced => self.go(Phase::Locked),
            Phase::Promoted if self.promoting == 0 => self.go(Phase::Rest),
            Phase::Promoted => self.wait(now),
            Phase::FlushedToClear
            | Phase::Probed { .. }
            | Phase::Read { .. }
            | Phase::FlushedToCopy { .. }
            | Phase::Written
            | Phase::FlushedToPromote => Next::At(Instant::NEVER),
        }
    }

    pub(super) fn go(&mut self, phase: Phase) -> Next {
        self.phase = phase;
        Next::Again
    }

    /// How long the copying has to rest after so many bytes.
    pub(super) fn pace(&mut self, bytes: u64) -> Span {
        let load = self.members.iter().fold(0, |sum: u64, one| sum.wrapping_add(one.load.count()));
        let is_busy = std::mem::replace(&mut self.times.load, load) != load;
        let share = if is_busy { BUSY_SHARE } else { 1 };
        let rate = u128::from(self.times.policy.copy_rate.max(1));
        let ns = u128::from(bytes) * u128::from(share) * 1_000_000_000 / rate;
        Span { ns: u64::try_from(ns).unwrap_or(u64::MAX) }
    }

    /// For superblocks to be written, or for writes to end.
    pub(super) fn wait(&mut self, now: Instant) -> Next {
        if std::mem::take(&mut self.stalled) {
            return Next::At(now.after(self.times.policy.probe_every));
        }
        Next::At(now.after(LOOK))
    }

    fn rest(&mut self, shared: &Shared, now: Instant) -> Next {
        let pairs = self.in_sync.count_ones() > 1;
        if !pairs {
            self.repairs.clear();
        }
        if let Some((lba, blocks)) = self.repairs.pop() {
            return self.begin_repair(shared, lba, blocks);
        }
        let todo = self.todo.first().filter(|_| pairs || self.returning != 0);
        if let Some(region) = todo
            && now >= self.times.copy_at
        {
            let (first, count) = self.shape.blocks_of(region);
            return self.begin_copy(shared, region, first, first + count, true);
        }
        if self.returning != 0 && todo.is_none() {
            self.phase = Phase::FlushedToPromote;
            return Next::Do(Task::Flush { legs: self.returning });
        }
        let stale = self.present & !self.in_sync & !self.returning;
        if stale != 0 && now >= self.times.probe_at {
            // One after the other.
            self.times.probe_at = now.after(self.times.policy.probe_every);
            let leg = lowest(stale);
            self.phase = Phase::Probed { leg };
            return Next::Do(Task::Probe { leg });
        }
        let may_clear = self.is_whole() && todo.is_none() && !self.durable.is_empty();
        if !may_clear {
            self.times.clear_at = Instant::NEVER;
        } else if self.times.clear_at == Instant::NEVER {
            self.times.clear_at = now.after(self.times.policy.clear_after);
        }
        if now >= self.times.clear_at {
            return self.begin_quiet(shared, now);
        }
        let probe_at = if stale != 0 { self.times.probe_at } else { Instant::NEVER };
        let copy_at = if todo.is_some() { self.times.copy_at } else { Instant::NEVER };
        Next::At(probe_at.min(copy_at).min(self.times.clear_at))
    }

    /// Closes every dirty region. Whoever writes one opens it again; what is still closed after a
    /// while has not been written.
    fn begin_quiet(&mut self, shared: &Shared, now: Instant) -> Next {
        self.quiet = self.durable.clone();
        self.quiet.iter().for_each(|region| shared.closed.set(region, 1));
        let until = now.after(self.times.policy.clear_after);
        self.go(Phase::Quiet { until, epoch: shared.advance() })
    }

    fn quiet(&mut self, shared: &Shared, until: Instant, epoch: u64, now: Instant) -> Next {
        let other_work = !self.todo.is_empty() || !self.repairs.is_empty();
        if !self.is_whole() || other_work || self.quiet.is_empty() {
            self.quiet.clear_all();
            self.times.clear_at = now.max(until);
            return self.go(Phase::Rest);
        }
        if now < until {
            return Next::At(until);
        }
        if !self.is_past(epoch) {
            return self.wait(now);
        }
        if self.has(Planted::ClearsBeforeFlushing) {
            return self.flushed_to_clear(shared, 0);
        }
        self.phase = Phase::FlushedToClear;
        Next::Do(Task::Flush { legs: self.in_sync })
    }

    fn joined(&mut self, shared: &Shared, leg: u8, version: u64, now: Instant) -> Next {
        if self.joining & leg == 0 || self.stalled {
            self.joining = 0;
            return self.go(Phase::Rest);
        }
        if self.settled < version {
            return self.wait(now);
        }
        self.joining = 0;
        self.returning |= leg;
        let number = leg.trailing_zeros().try_into().unwrap_or(0);
        self.events.push(MirrorEvent::LegReturned { leg: number });
        shared.publish(self);
        shared.add_return();
        self.go(Phase::Entered { epoch: shared.advance() })
    }

    fn entered(&mut self, epoch: u64, now: Instant) -> Next {
        if self.returning != 0 {
            if !self.is_past(epoch) {
                return self.wait(now);
            }
            if self.has(Planted::PromotesBeforeCopying) {
                return self.go(Phase::Rest);
            }
            if self.returning & self.fresh != 0 {
                self.todo.fill();
            } else {
                let dirty = self.dirty.clone();
                self.todo.add(&dirty);
            }
        }
        self.go(Phase::Rest)
    }

    /// The task has been done, except by legs that `failed`. Returns the next one, if there is one
    /// at once.
    pub(super) fn end_task(&mut self, shared: &Shared, now: Instant, failed: u8) -> Option<Task> {
        let next = match self.phase {
            Phase::FlushedToClear => self.flushed_to_clear(shared, failed),
            Phase::FlushedToPromote => self.flushed_to_promote(shared, failed),
            Phase::Read { leg, tried } if failed != 0 => self.not_read(shared, tried | leg),
            Phase::Read { leg, tried } => self.read(shared, leg, tried),
            Phase::FlushedToCopy { leg, tried } => self.flushed_to_copy(shared, leg, tried, failed),
            Phase::Written => self.written(shared, now, failed),
            _ => self.go(Phase::Rest),
        };
        match next {
            Next::Do(task) => Some(task),
            _ => self.tend(shared, now),
        }
    }

    fn flushed_to_clear(&mut self, shared: &Shared, failed: u8) -> Next {
        let failed = if self.bugs.ignores_failed_flush { 0 } else { failed };
        if self.in_sync & !failed != 0 {
            self.drop_legs(shared, failed);
        }
        let quiet = self.quiet.clone();
        self.quiet.clear_all();
        if failed == 0 && self.is_whole() && !quiet.is_empty() {
            self.clearing.add(&quiet);
            self.want();
        }
        self.times.clear_at = Instant::NEVER;
        self.go(Phase::Rest)
    }

    fn flushed_to_promote(&mut self, shared: &Shared, failed: u8) -> Next {
        if self.in_sync & !failed != 0 {
            self.drop_legs(shared, failed);
        }
        if self.returning == 0 || !self.todo.is_empty() {
            return self.go(Phase::Rest);
        }
        self.promoting = self.returning;
        self.want();
        self.go(Phase::Promoted)
    }

    /// What was found where the superblock of a leg should be.
    pub(super) fn end_probe(
        &mut self,
        shared: &Shared,
        now: Instant,
        found: Option<Result<Superblock, NoSuperblock>>,
    ) -> Option<Task> {
        if let Phase::Probed { leg } = self.phase {
            self.phase = Phase::Rest;
            match found {
                // It does not answer yet.
                None => {}
                Some(Ok(superblock)) if self.is_ours(leg, &superblock) => {
                    let index = leg.trailing_zeros() as usize;
                    self.sequences[index].good = superblock.sequence;
                    self.fence.first[index] = superblock.sequence + 1;
                    self.known[index] = superblock.generation;
                    // Where it was being written when it was last heard of.
                    self.dirty.add(&superblock.dirty);
                    self.joining = leg;
                    self.want();
                    self.phase = Phase::Joined { leg, version: self.wanted };
                }
                // Something else is there now, and is left alone.
                Some(_) => self.present &= !leg,
            }
        }
        self.tend(shared, now)
    }

    /// Whether a leg that has come back is what it was, or older. One that was written without the
    /// others has something to say that none of them has heard: that one of them is stale.
    fn is_ours(&self, leg: u8, found: &Superblock) -> bool {
        let is_news = found.generation > self.known[usize::from(found.leg)];
        let was_apart = is_news && found.is_sound() && self.in_sync & !found.in_sync != 0;
        !was_apart
            && self.may_rejoin(found)
            && found.uuid == self.uuid
            && 1_u8.checked_shl(found.leg.into()) == Some(leg)
            && found.shape == self.shape
            && found.generation <= self.generation
            && found.generation >= self.known[usize::from(found.leg)]
    }

    /// Whoever had the task is gone.
    pub(super) fn abandon_task(&mut self, shared: &Shared) {
        self.quiet.clear_all();
        self.times.clear_at = Instant::NEVER;
        self.repairs.extend(self.copying.as_ref().and_then(Copying::repair));
        self.stop_copy(shared);
        shared.tend_again_at(Instant::default());
    }
}
