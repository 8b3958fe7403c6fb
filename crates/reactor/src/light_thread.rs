//! Light threads: pollers and a mailbox that live on one reactor and migrate together.

mod builder;
mod migration;
mod poller_slots;
mod spurious_wakeups;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use tenmil_base::{Instant, Span};
use tenmil_linux::{Notifier, Receiver, mailbox};

use crate::context::Context;
use crate::event::{Event, PollerPanicked};
use crate::message::{Message, MessageFn, ThreadHandle};
use crate::panic_text::panic_text;
use crate::poller::{PollerBuilder, PollerId, wake_at};
use crate::reactor::ReactorLocal;
use crate::registry::{ReactorId, Registry, ThreadCounters, ThreadId};
use crate::thread_channel::{ErasedChannel, ThreadChannels};
pub use builder::ThreadBuilder;
pub(crate) use migration::DetachProgress;
use migration::DetachRequest;
pub(crate) use poller_slots::PollerIdAllocator;
use poller_slots::{PollerSlot, PollerSlots};
pub(crate) use spurious_wakeups::EDGE_MAX;
use spurious_wakeups::SpuriousWakeFilter;

/// Light thread. Its owner may run it: it is on one reactor, or on its way to one.
pub(crate) struct LightThread {
    state: ThreadState,
    slots: PollerSlots,
    /// Its builder, until it has arrived at its first reactor.
    builder: Option<ThreadBuilder>,
    detach_request: Option<DetachRequest>,
    /// Some of its pollers are not attached yet.
    arriving: bool,
    /// The reactor it came from.
    from: ReactorId,
}

/// Thread state visible to its pollers.
pub(crate) struct ThreadState {
    pub(crate) record: Arc<ThreadCounters>,
    mailbox: Receiver<Message>,
    /// Number of the mailbox, unique among mailboxes and pollers.
    number: u64,
    pub(crate) current: Option<PollerId>,
    pub(crate) changes: VecDeque<DeferredCommand>,
    pub(crate) ids: PollerIdAllocator,
    pub(crate) channels: ThreadChannels,
    pub(crate) busy_ns: u64,
    messages: u64,
}

/// Deferred change requested by a poller, applied when no poller is being polled.
pub(crate) enum DeferredCommand {
    Add(PollerId, Box<PollerBuilder>),
    Remove(PollerId),
    Pause(PollerId),
    Resume(PollerId),
    SetPeriod(PollerId, Span),
    Run(MessageFn),
    Send(ThreadHandle, Message),
    Flush,
    End,
}

/// Maximum number of messages run per iteration.
const MESSAGES: usize = 32;

impl LightThread {
    pub(crate) fn new(
        plan: ThreadBuilder,
        id: ThreadId,
        home: ReactorId,
        bells: Arc<[Notifier]>,
        directory: &Registry,
    ) -> Self {
        let (send, mail) = mailbox(plan.mailbox);
        let number = directory.allocate_account_number();
        let thread_state = ThreadState {
            record: Arc::new(ThreadCounters::new((id, number), &plan, send, home, bells)),
            mailbox: mail,
            number,
            current: None,
            changes: VecDeque::new(),
            ids: PollerIdAllocator::default(),
            channels: ThreadChannels::default(),
            busy_ns: 0,
            messages: 0,
        };
        let slots = PollerSlots::default();
        Self {
            state: thread_state,
            slots,
            builder: Some(plan),
            detach_request: None,
            arriving: true,
            from: home,
        }
    }

    /// Returns its builder, if it has not arrived at a reactor yet.
    pub(crate) fn into_builder(self) -> ThreadBuilder {
        self.builder.unwrap_or_else(|| ThreadBuilder::new(&self.state.record.name))
    }

    pub(crate) fn thread_counters(&self) -> &Arc<ThreadCounters> {
        &self.state.record
    }

    /// The thread's part of an iteration.
    #[inline]
    pub(crate) fn run_iteration(
        &mut self,
        now: Instant,
        due: bool,
        local: &mut ReactorLocal,
    ) -> bool {
        let mut found = false;
        if !self.state.mailbox.is_empty() {
            found |= self.run_messages(now, local);
        }
        self.slots.find_active_poller_where(|slot| {
            found |= slot.poll(&mut Context { now, thread_state: &mut self.state, local });
            false
        });
        if due {
            found |= self.run_due_timers(now, local);
        }
        if !self.state.changes.is_empty() {
            found |= self.apply_changes(now, local);
        }
        if found {
            self.flush(local);
        }
        found
    }

    fn run_messages(&mut self, now: Instant, local: &mut ReactorLocal) -> bool {
        let mut count = 0;
        while count < MESSAGES
            && let Some(message) = self.state.mailbox.receive()
        {
            count += 1;
            if !self.state.changes.is_empty() {
                self.apply_changes(now, local);
            }
            self.run_message(message, now, local);
        }
        self.state.messages += count as u64;
        local.messages += count as u64;
        count > 0
    }

    fn run_message(&mut self, message: Message, now: Instant, local: &mut ReactorLocal) {
        match message {
            Message::Call(call) => {
                local.accounting.begin_account(self.state.number);
                self.state.current = None;
                call(&mut Context { now, thread_state: &mut self.state, local });
            }
            Message::Data { poller, words } => {
                let Some(slot) = self.slots.get(poller) else { return };
                local.accounting.begin_account(slot.number);
                self.state.current = Some(poller);
                slot.poller.handle_message(
                    words,
                    &mut Context { now, thread_state: &mut self.state, local },
                );
            }
        }
        self.state.busy_ns += local.accounting.finish_account(true);
    }

    /// Polls the timed pollers that are due.
    fn run_due_timers(&mut self, now: Instant, local: &mut ReactorLocal) -> bool {
        let mut found = false;
        while let Some((due, id)) = self.slots.timers.pop_due(now) {
            let Some(slot) = self.slots.get(id) else { continue };
            let mut context = Context { now, thread_state: &mut self.state, local };
            if let Some((work, next)) = slot.poll_timed(due, &mut context) {
                found |= work;
                self.slots.timers.push(next, id);
            }
        }
        found
    }

    fn flush(&mut self, local: &mut ReactorLocal) {
        for slot in self.slots.iter_mut() {
            local.accounting.begin_account(slot.number);
            slot.poller.flush();
            local.accounting.finish_account(false);
        }
    }

    /// Applies deferred changes. Those not yet possible stay. Returns whether a flush is needed.
    fn apply_changes(&mut self, now: Instant, local: &mut ReactorLocal) -> bool {
        let mut flush = false;
        // Bounded by the initial length, since a change may queue further ones.
        for _ in 0..self.state.changes.len() {
            match self.state.changes.pop_front() {
                Some(DeferredCommand::Add(id, registration)) => {
                    self.add_poller(id, *registration, now, local)
                }
                Some(DeferredCommand::Remove(id)) => self.remove_poller(id, now, local),
                Some(DeferredCommand::Pause(id)) => self.set_poller_paused(id, true, now, local),
                Some(DeferredCommand::Resume(id)) => self.set_poller_paused(id, false, now, local),
                Some(DeferredCommand::SetPeriod(id, period)) => {
                    self.set_poller_period(id, period, now, local)
                }
                Some(DeferredCommand::Run(call)) => {
                    self.run_message(Message::Call(call), now, local)
                }
                Some(DeferredCommand::Send(to, message)) => self.send_or_defer(to, message),
                Some(DeferredCommand::Flush) => flush = true,
                Some(DeferredCommand::End) => self.detach_pollers(None, now, local),
                None => break,
            }
        }
        flush
    }

    fn add_poller(
        &mut self,
        id: PollerId,
        registration: PollerBuilder,
        now: Instant,
        local: &mut ReactorLocal,
    ) {
        let slot = PollerSlot::new(id, registration, local.registry.allocate_account_number());
        self.state.record.lock_pollers().push(Arc::clone(&slot.record));
        self.slots.insert(slot);
        self.attach_pollers(now, local);
    }

    pub(crate) fn remove_poller(&mut self, id: PollerId, now: Instant, local: &mut ReactorLocal) {
        let Some(slot) = self.slots.remove(id) else { return };
        let record = Arc::clone(&slot.record);
        self.state.ids.free(id);
        self.state.record.lock_pollers().retain(|poller| poller.number != record.number);
        self.slots.rebuild_lists(self.state.record.id, now, local);
        if let Some(panic) = slot.drop_poller(local) {
            let (poller, thread) = (record.name.clone(), self.state.record.id);
            let panicked = PollerPanicked { poller, thread, panic };
            local.registry.record_event(now, Event::PollerPanicked(panicked));
        }
    }

    fn set_poller_paused(
        &mut self,
        id: PollerId,
        paused: bool,
        now: Instant,
        local: &mut ReactorLocal,
    ) {
        let Some(slot) = self.slots.get(id) else { return };
        slot.paused = paused;
        self.slots.rebuild_lists(self.state.record.id, now, local);
    }

    fn set_poller_period(
        &mut self,
        id: PollerId,
        period: Span,
        now: Instant,
        local: &mut ReactorLocal,
    ) {
        let Some(slot) = self.slots.get(id) else { return };
        slot.set_period(period);
        self.slots.rebuild_lists(self.state.record.id, now, local);
    }

    fn send_or_defer(&mut self, to: ThreadHandle, message: Message) {
        if let Err(message) = to.send(message)
            && !to.has_ended()
        {
            self.state.changes.push_back(DeferredCommand::Send(to, message));
        }
    }

    /// Whether a message or deferred work is pending.
    pub(crate) fn has_pending(&self) -> bool {
        !self.state.mailbox.is_empty() || !self.state.changes.is_empty()
    }

    /// Arms every poller before a sleep. True if one of them, or a message, has work.
    pub(crate) fn arm(&mut self, local: &mut ReactorLocal) -> bool {
        if self.has_pending() {
            return true;
        }
        self.slots.find_active_poller_where(|slot| {
            local.accounting.begin_account(slot.number);
            slot.poller.arm().is_busy() || slot.is_busy()
        })
    }

    pub(crate) fn disarm(&mut self, local: &mut ReactorLocal) {
        self.state.record.park_flag.mark_runnable();
        self.slots.find_active_poller_where(|slot| {
            local.accounting.begin_account(slot.number);
            slot.poller.disarm();
            false
        });
    }

    /// Whether only a notification, a descriptor and the clock bring it work: all of its pollers
    /// permit parking, and it is not migrating. A thread without active pollers costs nothing
    /// anyway.
    pub(crate) fn may_park(&self, local: &mut ReactorLocal) -> bool {
        let is_settled = !self.is_migrating() && !self.has_pending() && !self.keeps_awake();
        let mut active = self.slots.active_slots().peekable();
        is_settled
            && active.peek().is_some()
            && active.all(|slot| {
                local.accounting.begin_account(slot.number);
                !slot.spurious_filter.is_edge_triggered() && slot.poller.may_park()
            })
    }

    /// Sets the wake mode of its pollers' descriptors before a sleep: coalesced or prompt.
    pub(crate) fn update_wake_modes(&mut self, local: &mut ReactorLocal) {
        self.slots.find_active_poller_where(|slot| {
            local.accounting.begin_account(slot.number);
            slot.update_wake_mode(local);
            false
        });
    }

    /// Numbers of its pollers with a descriptor.
    pub(crate) fn descriptor_poller_numbers(&self) -> impl Iterator<Item = u64> {
        self.slots.active_slots().filter(|slot| slot.has_descriptor()).map(|slot| slot.number)
    }

    /// Time at which it must be polled even if nothing happens.
    pub(crate) fn wake_at(&mut self, now: Instant, local: &mut ReactorLocal) -> Instant {
        self.restore_level_triggered(now, local);
        let mut earliest = self.slots.timers.earliest_due();
        for slot in self.slots.active_slots() {
            local.accounting.begin_account(slot.number);
            earliest =
                earliest.min(wake_at(&*slot.poller)).min(slot.spurious_filter.level_triggered_at());
        }
        earliest
    }

    /// Minimum of its pollers' expected completion times.
    pub(crate) fn expected_latency(&self, local: &mut ReactorLocal) -> Option<Span> {
        let expects = |slot: &PollerSlot| {
            local.accounting.begin_account(slot.number);
            slot.poller.expected_latency()
        };
        self.slots.active_slots().filter_map(expects).min()
    }

    /// Due time of its earliest timed poller.
    pub(crate) fn earliest_timed_poll(&self) -> Instant {
        self.slots.timers.earliest_due()
    }

    /// Whether a poller is polled in each iteration.
    pub(crate) fn has_active_poller(&self) -> bool {
        !self.slots.active.is_empty()
    }

    /// Whether spinning can find work of one of its pollers before it is announced.
    pub(crate) fn can_spin_help(&self, local: &mut ReactorLocal) -> bool {
        let helps = |slot: &PollerSlot| {
            local.accounting.begin_account(slot.number);
            slot.poller.can_spin_help()
        };
        self.slots.active_slots().filter(|slot| !slot.sleeps_at_once).any(helps)
    }

    /// Whether one of its pollers keeps the reactor from sleeping.
    pub(crate) fn keeps_awake(&self) -> bool {
        self.slots.keeps_awake > 0
    }

    /// Number of accounts among which its time is divided.
    pub(crate) fn time_account_count(&self) -> usize {
        1 + self.slots.iter().count()
    }

    /// Closes unused channels and publishes statistics.
    pub(crate) fn close_unused_and_publish(&mut self, now: Instant, local: &mut ReactorLocal) {
        while let Some(unused) = self.state.channels.take_unused_channel() {
            self.close_channel(unused, now, local);
        }
        if self.slots.has_poller_without_wake() {
            // A descriptor that the kernel refused earlier is tried again.
            self.slots.rebuild_lists(self.state.record.id, now, local);
        }
        let record = &self.state.record;
        record.busy_ns.set(self.state.busy_ns);
        record.messages.set(self.state.messages);
        record.channels.set(self.state.channels.len() as u64);
        self.slots.iter().for_each(PollerSlot::publish_counters);
    }

    /// Closes a channel. If that panics, the channel is gone nevertheless.
    fn close_channel(&mut self, open: ErasedChannel, now: Instant, local: &mut ReactorLocal) {
        local.accounting.begin_account(self.state.number);
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| open.close())) {
            let (thread, name) = (self.state.record.id, self.state.record.name.clone());
            let panic = panic_text(&*panic);
            local.registry.record_event(now, Event::ChannelPanicked { thread, name, panic });
        }
    }

    /// Charges the time since the last account to it.
    pub(crate) fn charge_time(&mut self, span: Span) {
        self.state.busy_ns += span.ns;
    }

    /// The poller with this number.
    pub(crate) fn find_poller(&self, number: u64) -> Option<PollerId> {
        self.slots.iter().find(|slot| slot.number == number).map(|slot| slot.id)
    }

    pub(crate) fn poller_name(&mut self, id: PollerId) -> Option<String> {
        self.slots.get(id).map(|slot| slot.name().to_owned())
    }

    pub(crate) fn is_mailbox_number(&self, number: u64) -> bool {
        self.state.number == number
    }

    /// Drops a poller that panicked, and runs its panic handler.
    pub(crate) fn drop_panicked(
        &mut self,
        id: PollerId,
        panicked: PollerPanicked,
        now: Instant,
        local: &mut ReactorLocal,
    ) {
        let tell = self.slots.get(id).and_then(|slot| slot.when_panicked.take());
        self.remove_poller(id, now, local);
        if let Some(tell) = tell {
            let tell: MessageFn = Box::new(move |context| tell(context, panicked));
            self.state.changes.push_back(DeferredCommand::Run(tell));
        }
    }
}
