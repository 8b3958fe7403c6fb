//! Light threads: some pollers and a mailbox that live on one reactor and move together.

mod plan;
mod slots;
mod travel;
mod trust;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use base::{Instant, Span};
use host::{Bell, Receiver, mailbox};

use crate::channel::{Channels, Open};
use crate::context::Context;
use crate::directory::{Directory, ReactorId, ThreadId, ThreadRecord};
use crate::event::{Event, PollerPanicked};
use crate::message::{Call, Handle, Message};
use crate::panicked::panic_text;
use crate::poller::{PollerId, Registration, wake_at};
use crate::reactor::Local;
pub use plan::ThreadPlan;
pub(crate) use slots::Ids;
use slots::{Slot, Slots};
use travel::Leaving;
pub(crate) use travel::Letting;
use trust::Trust;
pub(crate) use trust::WARY_MAX;

/// A light thread. Whoever holds it may run it: it is on one reactor, or on its way to one.
pub(crate) struct LightThread {
    desk: Desk,
    slots: Slots,
    /// What it is made from, until it has come to its first reactor.
    plan: Option<ThreadPlan>,
    leaving: Option<Leaving>,
    /// Some of its pollers are not attached yet.
    arriving: bool,
    /// The reactor it came from.
    from: ReactorId,
}

/// What the pollers of a thread may use of it.
pub(crate) struct Desk {
    pub(crate) record: Arc<ThreadRecord>,
    mail: Receiver<Message>,
    /// The number of the mailbox, unlike that of any other mailbox or poller.
    number: u64,
    pub(crate) current: Option<PollerId>,
    pub(crate) changes: VecDeque<Change>,
    pub(crate) ids: Ids,
    pub(crate) channels: Channels,
    pub(crate) busy_ns: u64,
    messages: u64,
}

/// What a poller asked for, to be done when none is being polled.
pub(crate) enum Change {
    Add(PollerId, Box<Registration>),
    Remove(PollerId),
    Pause(PollerId),
    Resume(PollerId),
    SetPeriod(PollerId, Span),
    Run(Call),
    Send(Handle, Message),
    Flush,
    End,
}

/// How many messages a thread runs in one turn.
const MESSAGES: usize = 32;

impl LightThread {
    pub(crate) fn new(
        plan: ThreadPlan,
        id: ThreadId,
        home: ReactorId,
        bells: Arc<[Bell]>,
        directory: &Directory,
    ) -> Self {
        let (send, mail) = mailbox(plan.mailbox);
        let desk = Desk {
            record: Arc::new(ThreadRecord::new(id, &plan, send, home, bells)),
            mail,
            number: directory.number(),
            current: None,
            changes: VecDeque::new(),
            ids: Ids::default(),
            channels: Channels::default(),
            busy_ns: 0,
            messages: 0,
        };
        let slots = Slots::default();
        Self { desk, slots, plan: Some(plan), leaving: None, arriving: true, from: home }
    }

    /// What it was made from, if it has not come to a reactor yet.
    pub(crate) fn into_plan(self) -> ThreadPlan {
        self.plan.unwrap_or_else(|| ThreadPlan::new(&self.desk.record.name))
    }

    pub(crate) fn record(&self) -> &Arc<ThreadRecord> {
        &self.desk.record
    }

    /// Its part of a turn.
    #[inline]
    pub(crate) fn pass(&mut self, now: Instant, due: bool, local: &mut Local) -> bool {
        let mut found = false;
        if !self.desk.mail.is_empty() {
            found |= self.run_messages(now, local);
        }
        self.slots.any_active(|slot| {
            found |= slot.poll(&mut Context { now, desk: &mut self.desk, local });
            false
        });
        if due {
            found |= self.run_due(now, local);
        }
        if !self.desk.changes.is_empty() {
            found |= self.apply_changes(now, local);
        }
        if found {
            self.flush(local);
        }
        found
    }

    fn run_messages(&mut self, now: Instant, local: &mut Local) -> bool {
        let mut count = 0;
        while count < MESSAGES
            && let Some(message) = self.desk.mail.receive()
        {
            count += 1;
            if !self.desk.changes.is_empty() {
                self.apply_changes(now, local);
            }
            self.run(message, now, local);
        }
        self.desk.messages += count as u64;
        local.messages += count as u64;
        count > 0
    }

    fn run(&mut self, message: Message, now: Instant, local: &mut Local) {
        match message {
            Message::Call(call) => {
                local.watch.begin(self.desk.number);
                self.desk.current = None;
                call(&mut Context { now, desk: &mut self.desk, local });
            }
            Message::Words { poller, words } => {
                let Some(slot) = self.slots.get(poller) else { return };
                local.watch.begin(slot.number);
                self.desk.current = Some(poller);
                slot.poller.message(words, &mut Context { now, desk: &mut self.desk, local });
            }
        }
        self.desk.busy_ns += local.watch.end(true);
    }

    /// Polls the timed pollers whose time has come.
    fn run_due(&mut self, now: Instant, local: &mut Local) -> bool {
        let mut found = false;
        while let Some((due, id)) = self.slots.timers.pop(now) {
            let Some(slot) = self.slots.get(id) else { continue };
            let mut context = Context { now, desk: &mut self.desk, local };
            if let Some((work, next)) = slot.poll_due(due, &mut context) {
                found |= work;
                self.slots.timers.push(next, id);
            }
        }
        found
    }

    fn flush(&mut self, local: &mut Local) {
        for slot in self.slots.iter_mut() {
            local.watch.begin(slot.number);
            slot.poller.flush();
            local.watch.end(false);
        }
    }

    /// Does what pollers have asked for. What cannot be done yet stays. Returns whether there is
    /// something to be made visible.
    fn apply_changes(&mut self, now: Instant, local: &mut Local) -> bool {
        let mut flush = false;
        for _ in 0..self.desk.changes.len() {
            match self.desk.changes.pop_front() {
                Some(Change::Add(id, registration)) => self.add(id, *registration, now, local),
                Some(Change::Remove(id)) => self.remove(id, now, local),
                Some(Change::Pause(id)) => self.set_paused(id, true, now, local),
                Some(Change::Resume(id)) => self.set_paused(id, false, now, local),
                Some(Change::SetPeriod(id, period)) => self.set_period(id, period, now, local),
                Some(Change::Run(call)) => self.run(Message::Call(call), now, local),
                Some(Change::Send(to, message)) => self.send_again(to, message),
                Some(Change::Flush) => flush = true,
                Some(Change::End) => self.leave(None, now, local),
                None => break,
            }
        }
        flush
    }

    fn add(&mut self, id: PollerId, registration: Registration, now: Instant, local: &mut Local) {
        let slot = Slot::new(id, registration, local.directory.number());
        self.desk.record.pollers().push(Arc::clone(&slot.record));
        self.slots.put(slot);
        self.attach(now, local);
    }

    pub(crate) fn remove(&mut self, id: PollerId, now: Instant, local: &mut Local) {
        let Some(slot) = self.slots.take(id) else { return };
        let record = Arc::clone(&slot.record);
        self.desk.ids.give_back(id);
        self.desk.record.pollers().retain(|poller| poller.number != record.number);
        self.slots.sort_out(self.desk.record.id, now, local);
        if let Some(panic) = slot.dispose(local) {
            let (poller, thread) = (record.name.clone(), self.desk.record.id);
            let panicked = PollerPanicked { poller, thread, panic };
            local.directory.note(now, Event::PollerPanicked(panicked));
        }
    }

    fn set_paused(&mut self, id: PollerId, paused: bool, now: Instant, local: &mut Local) {
        let Some(slot) = self.slots.get(id) else { return };
        slot.paused = paused;
        self.slots.sort_out(self.desk.record.id, now, local);
    }

    fn set_period(&mut self, id: PollerId, period: Span, now: Instant, local: &mut Local) {
        let Some(slot) = self.slots.get(id) else { return };
        slot.set_period(period);
        self.slots.sort_out(self.desk.record.id, now, local);
    }

    fn send_again(&mut self, to: Handle, message: Message) {
        if let Err(message) = to.send(message)
            && !to.is_gone()
        {
            self.desk.changes.push_back(Change::Send(to, message));
        }
    }

    /// Whether somebody wants something of it: a message, or what it left for later itself.
    pub(crate) fn is_wanted(&self) -> bool {
        !self.desk.mail.is_empty() || !self.desk.changes.is_empty()
    }

    /// Gets every poller ready to be slept for. True if one of them, or a message, has work.
    pub(crate) fn arm(&mut self, local: &mut Local) -> bool {
        if self.is_wanted() {
            return true;
        }
        self.slots.any_active(|slot| {
            local.watch.begin(slot.number);
            slot.poller.arm().is_work() || slot.is_busy()
        })
    }

    pub(crate) fn disarm(&mut self, local: &mut Local) {
        self.desk.record.doze.end();
        self.slots.any_active(|slot| {
            local.watch.begin(slot.number);
            slot.poller.disarm();
            false
        });
    }

    /// Whether nothing but a ring, a descriptor and the clock brings it anything: all of its pollers
    /// say so, and it neither comes nor goes. One that has no poller which is polled in every turn
    /// costs nothing as it is.
    pub(crate) fn may_doze(&self, local: &mut Local) -> bool {
        let is_settled = !self.is_travelling() && !self.is_wanted() && !self.is_sleepless();
        let mut active = self.slots.active().peekable();
        is_settled
            && active.peek().is_some()
            && active.all(|slot| {
                local.watch.begin(slot.number);
                !slot.trust.is_wary() && slot.poller.may_doze()
            })
    }

    /// Before a sleep: descriptors of its pollers linger or do not, as those say.
    pub(crate) fn choose_ears(&mut self, local: &mut Local) {
        self.slots.any_active(|slot| {
            local.watch.begin(slot.number);
            slot.choose_ear(local);
            false
        });
    }

    /// The numbers of those of its pollers that have a descriptor.
    pub(crate) fn ears(&self) -> impl Iterator<Item = u64> {
        self.slots.active().filter(|slot| slot.has_descriptor()).map(|slot| slot.number)
    }

    /// When it wants to be polled even if nothing happens.
    pub(crate) fn wake_at(&mut self, now: Instant, local: &mut Local) -> Instant {
        self.reconcile(now, local);
        let mut earliest = self.slots.timers.next();
        for slot in self.slots.active() {
            local.watch.begin(slot.number);
            earliest = earliest.min(wake_at(&*slot.poller)).min(slot.trust.wary_until());
        }
        earliest
    }

    /// The least that any of its pollers expects what is in flight to take.
    pub(crate) fn expected_latency(&self, local: &mut Local) -> Option<Span> {
        let expects = |slot: &Slot| {
            local.watch.begin(slot.number);
            slot.poller.expected_latency()
        };
        self.slots.active().filter_map(expects).min()
    }

    /// When the earliest of its timed pollers is due.
    pub(crate) fn next_timer(&self) -> Instant {
        self.slots.timers.next()
    }

    /// How many of its pollers are polled every turn, and for how many of them that is any use
    /// before their work is announced.
    pub(crate) fn looking(&self) -> (usize, usize) {
        (self.slots.active.len(), self.slots.looking)
    }

    /// Whether one of its pollers keeps the reactor from sleeping.
    pub(crate) fn is_sleepless(&self) -> bool {
        self.slots.sleepless > 0
    }

    /// For how many the time has to be told apart.
    pub(crate) fn workers(&self) -> usize {
        1 + self.slots.iter().count()
    }

    /// Closes channels that nobody uses any more, and publishes the books.
    pub(crate) fn keep_house(&mut self, now: Instant, local: &mut Local) {
        while let Some(unused) = self.desk.channels.take_unused() {
            self.close_channel(unused, now, local);
        }
        if self.slots.has_unlisted() {
            // What the kernel refused may have been for want of room.
            self.slots.sort_out(self.desk.record.id, now, local);
        }
        let record = &self.desk.record;
        record.busy_ns.set(self.desk.busy_ns);
        record.messages.set(self.desk.messages);
        record.channels.set(self.desk.channels.len() as u64);
        self.slots.iter().for_each(Slot::publish);
    }

    /// Closes a channel. Should that panic, the channel is gone all the same.
    fn close_channel(&mut self, open: Open, now: Instant, local: &mut Local) {
        local.watch.begin(self.desk.number);
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| open.close())) {
            let (thread, name) = (self.desk.record.id, self.desk.record.name.clone());
            let panic = panic_text(&*panic);
            local.directory.note(now, Event::ChannelPanicked { thread, name, panic });
        }
    }

    /// The time since the last look belongs to it.
    pub(crate) fn charge(&mut self, span: Span) {
        self.desk.busy_ns += span.ns;
    }

    /// The poller with this number.
    pub(crate) fn poller_numbered(&self, number: u64) -> Option<PollerId> {
        self.slots.iter().find(|slot| slot.number == number).map(|slot| slot.id)
    }

    pub(crate) fn poller_name(&mut self, id: PollerId) -> Option<String> {
        self.slots.get(id).map(|slot| slot.name().to_owned())
    }

    pub(crate) fn has_mailbox(&self, number: u64) -> bool {
        self.desk.number == number
    }

    /// Drops a poller that panicked, and lets those it served be told.
    pub(crate) fn bury(
        &mut self,
        id: PollerId,
        panicked: PollerPanicked,
        now: Instant,
        local: &mut Local,
    ) {
        let tell = self.slots.get(id).and_then(|slot| slot.when_panicked.take());
        self.remove(id, now, local);
        if let Some(tell) = tell {
            let tell: Call = Box::new(move |context| tell(context, panicked));
            self.desk.changes.push_back(Change::Run(tell));
        }
    }
}
