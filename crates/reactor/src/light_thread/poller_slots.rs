//! Pollers of one thread.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tenmil_base::{Counter, Instant, Span};

use crate::context::Context;
use crate::event::Event;
use crate::panic_text::panic_text;
use crate::poller::{PanicHandler, Poller, PollerBuilder, PollerId, PollerWake, WakeKind};
use crate::reactor::ReactorLocal;
use crate::registry::{PollerCounters, ThreadId};
use crate::timer_heap::TimerHeap;

use super::SpuriousWakeFilter;

/// Pollers by number, and the order in which they are polled.
#[derive(Default)]
pub(crate) struct PollerSlots {
    slots: Vec<Option<PollerSlot>>,
    /// Pollers that are polled in every iteration.
    pub(crate) active: Vec<u16>,
    pub(crate) timers: TimerHeap,
    /// Number of pollers that keep the reactor from sleeping.
    pub(crate) keeps_awake: usize,
}

/// One poller. Fields used in every iteration come first.
pub(crate) struct PollerSlot {
    pub(crate) poller: Box<dyn Poller>,
    pub(crate) number: u64,
    pub(crate) id: PollerId,
    polls: u64,
    found: u64,
    /// Next due time, if it is timed. Heap entries with another time are stale.
    due: Instant,
    pub(crate) every: Option<Span>,
    pub(crate) paused: bool,
    pub(crate) detached: bool,
    /// The poller is detaching and has I/O in flight: it is polled although it is paused.
    pub(crate) is_draining: bool,
    pub(crate) sleeps_at_once: bool,
    /// Wake mode of its descriptor in the reactor's sleeper.
    wake_mode: DescriptorWakeMode,
    /// Whether its descriptor could not be added.
    is_unwaitable: bool,
    woken_by: PollerWake,
    pub(crate) spurious_filter: SpuriousWakeFilter,
    pub(crate) when_panicked: Option<PanicHandler>,
    pub(crate) record: Arc<PollerCounters>,
}

/// Mode in which a descriptor ends a sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DescriptorWakeMode {
    /// Never.
    None,
    /// While it is readable.
    Level,
    /// While it is readable, possibly delayed.
    Coalesced,
    /// When it becomes readable again; used after spurious wake-ups.
    Edge,
}

/// Free poller numbers.
#[derive(Default)]
pub(crate) struct PollerIdAllocator {
    generations: Vec<u16>,
    free: VecDeque<u16>,
}

/// A period of zero would make a timed poller due again in the iteration that polls it, which would
/// never end.
const PERIOD_MIN: Span = Span { ns: 1 };
/// Delay after which a timed poller that was due while detached is checked again.
const DETACHED_RETRY: Span = Span::from_us(100);

impl PollerSlots {
    /// Calls `body` with the active pollers, in order, until it returns true. Returns whether it
    /// did.
    #[inline]
    pub(crate) fn find_active_poller_where(
        &mut self,
        mut body: impl FnMut(&mut PollerSlot) -> bool,
    ) -> bool {
        let Self { slots, active, .. } = self;
        active.iter().any(|index| match slots.get_mut(usize::from(*index)) {
            Some(Some(slot)) => body(slot),
            _ => false,
        })
    }

    pub(crate) fn get(&mut self, id: PollerId) -> Option<&mut PollerSlot> {
        self.slots.get_mut(id.index())?.as_mut().filter(|slot| slot.id == id)
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut PollerSlot> {
        self.slots.iter_mut().flatten()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &PollerSlot> {
        self.slots.iter().flatten()
    }

    pub(crate) fn active_slots(&self) -> impl Iterator<Item = &PollerSlot> {
        self.active.iter().filter_map(|index| self.slots.get(usize::from(*index))?.as_ref())
    }

    /// Stores a poller under its number. It is not attached yet.
    pub(crate) fn insert(&mut self, slot: PollerSlot) {
        let index = slot.id.index();
        if self.slots.len() <= index {
            self.slots.resize_with(index + 1, || None);
        }
        self.slots[index] = Some(slot);
    }

    pub(crate) fn remove(&mut self, id: PollerId) -> Option<PollerSlot> {
        self.get(id)?;
        self.slots[id.index()].take()
    }

    pub(crate) fn any_poller_id(&self) -> Option<PollerId> {
        self.iter().next().map(|slot| slot.id)
    }

    /// Whether some descriptor could not be added to the sleeper's set.
    pub(crate) fn has_poller_without_wake(&self) -> bool {
        self.iter().any(|slot| slot.is_unwaitable)
    }

    /// Rebuilds the lists of active, waiting and timed pollers. Call after any change to these.
    pub(crate) fn rebuild_lists(
        &mut self,
        thread: ThreadId,
        now: Instant,
        local: &mut ReactorLocal,
    ) {
        self.active.clear();
        self.keeps_awake = 0;
        for (index, slot) in (0_u16..).zip(&mut self.slots) {
            let Some(slot) = slot else { continue };
            let runs = slot.is_active();
            // A coalesced descriptor stays so here; `update_wake_mode` decides before each sleep.
            let hearing = match (runs, slot.spurious_filter.is_edge_triggered()) {
                (false, _) => DescriptorWakeMode::None,
                (true, false) if slot.wake_mode == DescriptorWakeMode::Coalesced => {
                    DescriptorWakeMode::Coalesced
                }
                (true, false) => DescriptorWakeMode::Level,
                (true, true) => DescriptorWakeMode::Edge,
            };
            if let Err(error) = slot.set_wake_mode(hearing, local) {
                let (poller, error) = (slot.name().to_owned(), error.to_string());
                local.registry.record_event(now, Event::WaitFailed { poller, thread, error });
            }
            if runs && slot.every.is_none() {
                self.active.push(index);
                self.keeps_awake += usize::from(slot.is_without_wake());
            }
            // A poller that becomes runnable is first due one period from now.
            if let Some(every) = slot.every.filter(|_| runs && slot.due == Instant::NEVER) {
                slot.due = now.after(every);
                self.timers.push(slot.due, slot.id);
            }
            // Its heap entry becomes stale; resuming creates a new one.
            if slot.paused && !runs {
                slot.due = Instant::NEVER;
            }
        }
        local.due = local.due.min(self.timers.earliest_due());
    }
}

impl PollerSlot {
    pub(crate) fn new(id: PollerId, registration: PollerBuilder, number: u64) -> Self {
        let PollerBuilder { name, poller, wake: woken_by, every, paused, .. } = registration;
        let (sleeps_at_once, when_panicked) = (registration.no_spin, registration.on_panic);
        let every = every.map(|every| every.max(PERIOD_MIN));
        let record = PollerCounters {
            number,
            name,
            wake: woken_by.kind(),
            pinned: registration.pinned,
            every_ns: every.map(Counter::from),
            paused: AtomicBool::new(paused),
            polls: Counter::default(),
            found: Counter::default(),
            spurious_wakeups: Counter::default(),
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
            wake_mode: DescriptorWakeMode::None,
            is_unwaitable: false,
            woken_by,
            spurious_filter: SpuriousWakeFilter::default(),
            when_panicked,
            record: Arc::new(record),
        }
    }

    /// Whether it is polled.
    fn is_active(&self) -> bool {
        !self.detached && (!self.paused || self.is_draining)
    }

    #[inline]
    pub(crate) fn poll(&mut self, context: &mut Context<'_>) -> bool {
        context.local.accounting.begin_account(self.number);
        context.thread_state.current = Some(self.id);
        self.polls += 1;
        let found = self.poller.poll(context).is_busy();
        self.found += u64::from(found);
        context.thread_state.busy_ns += context.local.accounting.finish_account(found);
        found
    }

    /// Polls a timed poller if this heap entry is not stale. Returns its next due time.
    pub(crate) fn poll_timed(
        &mut self,
        due: Instant,
        context: &mut Context<'_>,
    ) -> Option<(bool, Instant)> {
        let every = self.every.filter(|_| self.due == due)?;
        if self.detached {
            self.due = context.now.after(every.min(DETACHED_RETRY));
            return Some((false, self.due));
        }
        let found = self.poll(context);
        // After a long sleep or iteration it is polled once, not once per elapsed period.
        let next = due.after(every);
        self.due = if next > context.now { next } else { context.now.after(every) };
        Some((found, self.due))
    }

    /// Changes the period of a timed poller. Rebuild the lists afterwards.
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

    pub(crate) fn publish_counters(&self) {
        self.record.polls.set(self.polls);
        self.record.found.set(self.found);
        self.record.spurious_wakeups.set(self.spurious_filter.spurious_count());
        self.record.paused.store(self.paused, Ordering::Relaxed);
    }

    /// Adds its descriptor to the sleeper's set, removes it, or changes its wake mode.
    fn set_wake_mode(
        &mut self,
        wanted: DescriptorWakeMode,
        local: &ReactorLocal,
    ) -> io::Result<()> {
        let PollerWake::Descriptor(descriptor) = &self.woken_by else { return Ok(()) };
        let sources = &local.sources;
        // Added level-triggered first, then changed to the wanted mode.
        if self.wake_mode == DescriptorWakeMode::None && wanted != DescriptorWakeMode::None {
            let added = sources.add_source(descriptor, self.number);
            let was_unlisted = std::mem::replace(&mut self.is_unwaitable, added.is_err());
            return match added {
                Ok(()) => {
                    self.wake_mode = DescriptorWakeMode::Level;
                    self.set_wake_mode(wanted, local)
                }
                // Retried indefinitely, reported once.
                Err(_) if was_unlisted => Ok(()),
                Err(error) => Err(error),
            };
        }
        self.is_unwaitable = false;
        // The coalesced set is left before any other change.
        if self.wake_mode == DescriptorWakeMode::Coalesced
            && wanted != DescriptorWakeMode::Coalesced
        {
            sources.set_prompt(descriptor, self.number)?;
            self.wake_mode = DescriptorWakeMode::Level;
        }
        let before = std::mem::replace(&mut self.wake_mode, wanted);
        match (before, wanted) {
            _ if before == wanted => Ok(()),
            (_, DescriptorWakeMode::None) => sources.remove_source(descriptor),
            (_, DescriptorWakeMode::Level) => sources.set_level_triggered(descriptor, self.number),
            (_, DescriptorWakeMode::Edge) => sources.set_edge_triggered(descriptor, self.number),
            (_, DescriptorWakeMode::Coalesced) => sources.set_coalesced(descriptor, self.number),
        }
    }

    /// Sets the wake mode before a sleep: coalesced or prompt. If that fails, the mode stays as it
    /// was.
    pub(crate) fn update_wake_mode(&mut self, local: &ReactorLocal) {
        let wanted = match (self.wake_mode, self.poller.may_coalesce_wakeups()) {
            (DescriptorWakeMode::Level, true) => DescriptorWakeMode::Coalesced,
            (DescriptorWakeMode::Coalesced, false) => DescriptorWakeMode::Level,
            _ => return,
        };
        let before = self.wake_mode;
        if self.set_wake_mode(wanted, local).is_err() {
            self.wake_mode = before;
        }
    }

    /// Handles a sleep of this length that its descriptor ended. Returns the descriptor number if
    /// it is newly found to be stuck.
    pub(crate) fn handle_wakeup(&mut self, slept: Span, now: Instant) -> Option<i32> {
        let PollerWake::Descriptor(descriptor) = &self.woken_by else { return None };
        self.spurious_filter.handle_wakeup(self.found, slept, now).then(|| descriptor.as_raw_fd())
    }

    pub(crate) fn has_descriptor(&self) -> bool {
        matches!(self.woken_by, PollerWake::Descriptor(_))
    }

    /// Whether no event would end a sleep on its behalf.
    fn is_without_wake(&self) -> bool {
        self.record.wake == WakeKind::Never || self.is_unwaitable
    }

    /// Whether it generates work itself, and has some.
    pub(crate) fn is_busy(&self) -> bool {
        matches!(self.record.wake, WakeKind::OnlyWhileBusy(_))
            && self.poller.is_busy() == Some(true)
    }

    /// Drops the poller. Returns the panic message if that panics.
    pub(crate) fn drop_poller(mut self, local: &ReactorLocal) -> Option<String> {
        // It is closed below, which removes it from the set as well, unless it was duplicated.
        let _ = self.set_wake_mode(DescriptorWakeMode::None, local);
        catch_unwind(AssertUnwindSafe(|| drop(self.poller))).err().map(|panic| panic_text(&*panic))
    }
}

impl PollerIdAllocator {
    pub(crate) fn allocate(&mut self) -> Option<PollerId> {
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

    pub(crate) fn free(&mut self, id: PollerId) {
        if let Some(generation) = self.generations.get_mut(id.index()) {
            *generation = generation.wrapping_add(1);
            self.free.extend(u16::try_from(id.index()));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::PollerIdAllocator;

    #[test]
    fn poller_ids_differ_and_are_reused_with_a_new_generation() {
        let mut ids = PollerIdAllocator::default();
        let mut seen = BTreeSet::new();
        for _ in 0..1_000 {
            let id = ids.allocate().unwrap();
            assert!(seen.insert(id), "{id:?} was given before");
            assert!(id.index() < 1, "{id:?} takes no room of its own");
            ids.free(id);
        }
        let count = (0..).take_while(|_| ids.allocate().is_some()).count();
        assert_eq!(count, 1 << 16, "then there are no more");
    }
}
