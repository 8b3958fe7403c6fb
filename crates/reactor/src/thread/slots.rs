//! The pollers of one thread.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use base::{Count, Instant, Span};

use crate::context::Context;
use crate::directory::{PollerRecord, ThreadId};
use crate::event::Event;
use crate::panicked::panic_text;
use crate::poller::{Poller, PollerId, Registration, WakeKind, WhenPanicked, WokenBy};
use crate::reactor::Local;
use crate::timers::Timers;

use super::Trust;

/// The pollers, by number, and the order in which they are polled.
#[derive(Default)]
pub(crate) struct Slots {
    slots: Vec<Option<Slot>>,
    /// Those to be polled every turn.
    pub(crate) active: Vec<u16>,
    pub(crate) timers: Timers,
    /// How many keep their reactor from sleeping.
    pub(crate) sleepless: usize,
    /// How many of those that are polled every turn it is any use to poll before work is announced.
    pub(crate) looking: usize,
}

/// One poller. What a turn touches comes first.
pub(crate) struct Slot {
    pub(crate) poller: Box<dyn Poller>,
    pub(crate) number: u64,
    pub(crate) id: PollerId,
    polls: u64,
    found: u64,
    /// When it is polled next, if it is timed. Entries of the heap with another moment are stale.
    due: Instant,
    pub(crate) every: Option<Span>,
    pub(crate) paused: bool,
    pub(crate) detached: bool,
    /// It was asked to let go and has something in flight: it is polled although it is paused.
    pub(crate) is_draining: bool,
    sleeps_at_once: bool,
    /// What the reactor's sleeper hears of its descriptor.
    hearing: Hearing,
    /// Whether its descriptor could not be put there.
    unlisted: bool,
    woken_by: WokenBy,
    pub(crate) trust: Trust,
    pub(crate) when_panicked: Option<WhenPanicked>,
    pub(crate) record: Arc<PollerRecord>,
}

/// When a descriptor ends a sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Hearing {
    /// Never.
    Nothing,
    /// While it is readable.
    Readable,
    /// While it is readable, or a little later: nobody hurries.
    Lingering,
    /// When it becomes so once more: it is not quite believed.
    Changes,
}

/// Which numbers are free.
#[derive(Default)]
pub(crate) struct Ids {
    generations: Vec<u16>,
    free: VecDeque<u16>,
}

/// Whoever is polled once in no time at all is due again in the turn that polls it, and that turn
/// would never end.
const PERIOD_MIN: Span = Span { ns: 1 };
/// How soon a timed poller that was due while it was detached is looked at again.
const DETACHED: Span = Span::from_us(100);

impl Slots {
    /// Calls `body` with those that are polled every turn, in order, until it says that this is
    /// enough. Returns whether it did.
    #[inline]
    pub(crate) fn any_active(&mut self, mut body: impl FnMut(&mut Slot) -> bool) -> bool {
        let Self { slots, active, .. } = self;
        active.iter().any(|index| match slots.get_mut(usize::from(*index)) {
            Some(Some(slot)) => body(slot),
            _ => false,
        })
    }

    pub(crate) fn get(&mut self, id: PollerId) -> Option<&mut Slot> {
        self.slots.get_mut(id.index())?.as_mut().filter(|slot| slot.id == id)
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Slot> {
        self.slots.iter_mut().flatten()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Slot> {
        self.slots.iter().flatten()
    }

    pub(crate) fn active(&self) -> impl Iterator<Item = &Slot> {
        self.active.iter().filter_map(|index| self.slots.get(usize::from(*index))?.as_ref())
    }

    /// Puts a poller where its number says. It is not attached yet.
    pub(crate) fn put(&mut self, slot: Slot) {
        let index = slot.id.index();
        if self.slots.len() <= index {
            self.slots.resize_with(index + 1, || None);
        }
        self.slots[index] = Some(slot);
    }

    pub(crate) fn take(&mut self, id: PollerId) -> Option<Slot> {
        self.get(id)?;
        self.slots[id.index()].take()
    }

    pub(crate) fn any(&self) -> Option<PollerId> {
        self.iter().next().map(|slot| slot.id)
    }

    /// Whether the descriptor of somebody could not be put among the sources of the sleeper.
    pub(crate) fn has_unlisted(&self) -> bool {
        self.iter().any(|slot| slot.unlisted)
    }

    /// Sorts out again who is polled every turn, who is waited for, and when the timed ones are due.
    /// To be called after anything of that has changed.
    pub(crate) fn sort_out(&mut self, thread: ThreadId, now: Instant, local: &mut Local) {
        self.active.clear();
        (self.sleepless, self.looking) = (0, 0);
        for (index, slot) in (0_u16..).zip(&mut self.slots) {
            let Some(slot) = slot else { continue };
            let runs = slot.runs();
            let hearing = match (runs, slot.trust.is_wary()) {
                (false, _) => Hearing::Nothing,
                (true, false) if slot.hearing == Hearing::Lingering => Hearing::Lingering,
                (true, false) => Hearing::Readable,
                (true, true) => Hearing::Changes,
            };
            if let Err(error) = slot.list(hearing, local) {
                let (poller, error) = (slot.name().to_owned(), error.to_string());
                local.directory.note(now, Event::NotWaitedFor { poller, thread, error });
            }
            if runs && slot.every.is_none() {
                self.active.push(index);
                self.sleepless += usize::from(slot.is_sleepless());
                self.looking += usize::from(!slot.sleeps_at_once);
            }
            if let Some(every) = slot.every.filter(|_| runs && slot.due == Instant::NEVER) {
                slot.due = now.after(every);
                self.timers.push(slot.due, slot.id);
            }
            if slot.paused && !runs {
                slot.due = Instant::NEVER;
            }
        }
        local.due = local.due.min(self.timers.next());
    }
}

impl Slot {
    pub(crate) fn new(id: PollerId, registration: Registration, number: u64) -> Self {
        let Registration { name, poller, woken_by, every, paused, .. } = registration;
        let (sleeps_at_once, when_panicked) =
            (registration.sleeps_at_once, registration.when_panicked);
        let every = every.map(|every| every.max(PERIOD_MIN));
        let record = PollerRecord {
            number,
            name,
            wake: woken_by.kind(),
            tied: registration.tied,
            every_ns: every.map(Count::from),
            paused: AtomicBool::new(paused),
            polls: Count::default(),
            found: Count::default(),
            woken_in_vain: Count::default(),
        };
        Self {
            poller,
            number,
            id,
            polls: 0,
            found: 0,
            due: Instant::NEVER,
            every,
            paused,
            detached: true,
            is_draining: false,
            sleeps_at_once,
            hearing: Hearing::Nothing,
            unlisted: false,
            woken_by,
            trust: Trust::default(),
            when_panicked,
            record: Arc::new(record),
        }
    }

    /// Whether it is polled.
    fn runs(&self) -> bool {
        !self.detached && (!self.paused || self.is_draining)
    }

    #[inline]
    pub(crate) fn poll(&mut self, context: &mut Context<'_>) -> bool {
        context.local.watch.begin(self.number);
        context.desk.current = Some(self.id);
        self.polls += 1;
        let found = self.poller.poll(context).is_work();
        self.found += u64::from(found);
        context.desk.busy_ns += context.local.watch.end(found);
        found
    }

    /// Polls a timed poller if this entry of the heap is not stale. Returns when it is due again.
    pub(crate) fn poll_due(
        &mut self,
        due: Instant,
        context: &mut Context<'_>,
    ) -> Option<(bool, Instant)> {
        let every = self.every.filter(|_| self.due == due)?;
        if self.detached {
            self.due = context.now.after(every.min(DETACHED));
            return Some((false, self.due));
        }
        let found = self.poll(context);
        // After a long sleep or a long turn: once, not once for every period that has passed.
        let next = due.after(every);
        self.due = if next > context.now { next } else { context.now.after(every) };
        Some((found, self.due))
    }

    /// Another period, if it is timed. Its slots are to be sorted out after this.
    pub(crate) fn set_period(&mut self, period: Span) {
        if let Some(every_ns) = &self.record.every_ns {
            let period = period.max(PERIOD_MIN);
            every_ns.set(period.ns);
            self.every = Some(period);
            self.due = Instant::NEVER;
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.record.name
    }

    pub(crate) fn publish(&self) {
        self.record.polls.set(self.polls);
        self.record.found.set(self.found);
        self.record.woken_in_vain.set(self.trust.in_vain());
        self.record.paused.store(self.paused, Ordering::Relaxed);
    }

    /// Puts its descriptor among the sources of the reactor's sleeper, takes it out, or listens in
    /// another way.
    fn list(&mut self, wanted: Hearing, local: &Local) -> io::Result<()> {
        let WokenBy::Descriptor(descriptor) = &self.woken_by else { return Ok(()) };
        let sources = &local.sources;
        if self.hearing == Hearing::Nothing && wanted != Hearing::Nothing {
            let added = sources.add(descriptor, self.number);
            let was_unlisted = std::mem::replace(&mut self.unlisted, added.is_err());
            return match added {
                Ok(()) => {
                    self.hearing = Hearing::Readable;
                    self.list(wanted, local)
                }
                // It is tried again and again, and told once.
                Err(_) if was_unlisted => Ok(()),
                Err(error) => Err(error),
            };
        }
        self.unlisted = false;
        if self.hearing == Hearing::Lingering && wanted != Hearing::Lingering {
            sources.hurry(descriptor, self.number)?;
            self.hearing = Hearing::Readable;
        }
        let before = std::mem::replace(&mut self.hearing, wanted);
        match (before, wanted) {
            _ if before == wanted => Ok(()),
            (_, Hearing::Nothing) => sources.remove(descriptor),
            (_, Hearing::Readable) => sources.hear_readable(descriptor, self.number),
            (_, Hearing::Changes) => sources.hear_changes(descriptor, self.number),
            (_, Hearing::Lingering) => sources.let_linger(descriptor, self.number),
        }
    }

    /// Before a sleep: its descriptor lingers or not, as it says. One that cannot be put elsewhere is
    /// heard as before.
    pub(crate) fn choose_ear(&mut self, local: &Local) {
        let wanted = match (self.hearing, self.poller.may_linger()) {
            (Hearing::Readable, true) => Hearing::Lingering,
            (Hearing::Lingering, false) => Hearing::Readable,
            _ => return,
        };
        let before = self.hearing;
        if self.list(wanted, local).is_err() {
            self.hearing = before;
        }
    }

    /// Its descriptor has ended a sleep of this length. If it is stuck, and that was not known,
    /// returns which descriptor it is.
    pub(crate) fn woken(&mut self, slept: Span, now: Instant) -> Option<i32> {
        let WokenBy::Descriptor(descriptor) = &self.woken_by else { return None };
        self.trust.woken(self.found, slept, now).then(|| descriptor.as_raw_fd())
    }

    pub(crate) fn has_descriptor(&self) -> bool {
        matches!(self.woken_by, WokenBy::Descriptor(_))
    }

    /// Whether nothing would end a sleep on its behalf.
    fn is_sleepless(&self) -> bool {
        self.record.wake == WakeKind::Nothing || self.unlisted
    }

    /// Whether it alone brings itself work, and has some.
    pub(crate) fn is_busy(&self) -> bool {
        matches!(self.record.wake, WakeKind::OnlyWhileBusy(_))
            && self.poller.is_busy() == Some(true)
    }

    /// Drops the poller. Should that panic, returns what the panic said.
    pub(crate) fn dispose(mut self, local: &Local) -> Option<String> {
        // It is closed just below, which takes it out as well unless it has been cloned.
        let _ = self.list(Hearing::Nothing, local);
        catch_unwind(AssertUnwindSafe(|| drop(self.poller))).err().map(|panic| panic_text(&*panic))
    }
}

impl Ids {
    pub(crate) fn take(&mut self) -> Option<PollerId> {
        let index = match self.free.pop_front() {
            Some(index) => index,
            None => {
                let index = u16::try_from(self.generations.len()).ok()?;
                self.generations.push(0);
                index
            }
        };
        Some(PollerId::new(index, self.generations[usize::from(index)]))
    }

    pub(crate) fn give_back(&mut self, id: PollerId) {
        if let Some(generation) = self.generations.get_mut(id.index()) {
            *generation = generation.wrapping_add(1);
            self.free.extend(u16::try_from(id.index()));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::Ids;

    #[test]
    fn numbers_are_unlike_each_other_and_come_back_changed() {
        let mut ids = Ids::default();
        let mut seen = BTreeSet::new();
        for _ in 0..1_000 {
            let id = ids.take().unwrap();
            assert!(seen.insert(id), "{id:?} was given before");
            assert!(id.index() < 1, "{id:?} takes no room of its own");
            ids.give_back(id);
        }
        let count = (0..).take_while(|_| ids.take().is_some()).count();
        assert_eq!(count, 1 << 16, "then there are no more");
    }
}
