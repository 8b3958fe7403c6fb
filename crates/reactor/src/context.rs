//! What a poller or a message may do to the world: everything that is not its own.

use base::{Instant, Span};

use crate::channel::{Channel, Object, Shared, Visit};
use crate::directory::{Directory, ReactorId, ThreadId};
use crate::message::{Handle, Message};
use crate::poller::{Found, Poller, PollerId, Registration};
use crate::reactor::Local;
use crate::refused::Refused;
use crate::thread::{Change, Desk};

/// The light thread that one runs on, and its reactor.
///
/// Pollers that are added, removed, paused or resumed are so by the end of the turn at the latest,
/// and before any message that is run later.
pub struct Context<'a> {
    pub(crate) now: Instant,
    pub(crate) desk: &'a mut Desk,
    pub(crate) local: &'a mut Local,
}

/// A poller that was not added.
#[derive(Debug)]
pub struct NotAdded {
    /// Why.
    pub why: Refused,
    /// What was to be added.
    pub registration: Box<Registration>,
}

impl Context<'_> {
    /// When the turn began. The clock is read once for all.
    #[inline]
    pub fn now(&self) -> Instant {
        self.now
    }

    /// The thread's number.
    #[inline]
    pub fn thread(&self) -> ThreadId {
        self.desk.record.id
    }

    /// The thread's name.
    pub fn name(&self) -> &str {
        &self.desk.record.name
    }

    /// A handle to the thread.
    pub fn handle(&self) -> Handle {
        Handle(self.desk.record.clone())
    }

    /// The poller that is being polled, or is given a message; none in a closure.
    #[inline]
    pub fn poller(&self) -> Option<PollerId> {
        self.desk.current
    }

    /// The reactor that runs this.
    pub fn reactor(&self) -> ReactorId {
        self.local.id
    }

    /// Who else there is.
    pub fn directory(&self) -> &Directory {
        &self.local.directory
    }

    /// Adds a poller to the thread. Refused if nothing wakes it and the reactor sleeps.
    pub fn add(&mut self, registration: Registration) -> Result<PollerId, NotAdded> {
        let refuse = |why, registration| NotAdded { why, registration: Box::new(registration) };
        if let Err(why) = registration.check(self.local.mode) {
            return Err(refuse(why, registration));
        }
        let Some(id) = self.desk.ids.take() else {
            let why = Refused::TooManyPollers { poller: registration.name.clone() };
            return Err(refuse(why, registration));
        };
        self.desk.changes.push_back(Change::Add(id, Box::new(registration)));
        Ok(id)
    }

    /// Removes a poller of the thread, if it is still there; it may remove itself.
    pub fn remove(&mut self, poller: PollerId) {
        self.desk.changes.push_back(Change::Remove(poller));
    }

    /// Polls it no more until it is resumed. It still gets messages, and what it has in flight when
    /// its thread leaves is polled for.
    pub fn pause(&mut self, poller: PollerId) {
        self.desk.changes.push_back(Change::Pause(poller));
    }

    /// Polls it again. A timed poller is due one period from now.
    pub fn resume(&mut self, poller: PollerId) {
        self.desk.changes.push_back(Change::Resume(poller));
    }

    /// Polls a timed poller every `period` from now on, for the first time one period from now.
    pub fn set_period(&mut self, poller: PollerId, period: Span) {
        self.desk.changes.push_back(Change::SetPeriod(poller, period));
    }

    /// Runs `call` on this thread when `span` has passed, unless the poller that is returned is
    /// removed before. Refused only if the thread has no numbers left.
    pub fn after(
        &mut self,
        span: Span,
        call: impl FnOnce(&mut Context<'_>) + Send + 'static,
    ) -> Result<PollerId, NotAdded> {
        self.add(Registration::timed("timer", span, Once(Some(call))))
    }

    /// Has the pollers of the thread flushed, in this turn or the next, even if nobody finds work in
    /// it. Not needed by one that returns [`Found::Work`], nor at the beginning: a poller that has
    /// been added, or has come with its thread, is flushed soon.
    pub fn flush(&mut self) {
        self.desk.changes.push_back(Change::Flush);
    }

    /// Ends the thread, once its pollers have let go.
    pub fn end(&mut self) {
        self.desk.changes.push_back(Change::End);
    }

    /// Opens this thread's channel to a shared object, or gives another use of it. The channel
    /// closes a little after its last use was dropped.
    pub fn open<S: Shared>(&mut self, object: &Object<S>) -> Result<Channel<S>, S::Refusal> {
        let me = self.handle();
        self.desk.channels.open(object, me)
    }

    /// The channel of this thread; nothing if it was opened on another.
    #[inline]
    pub fn channel<S: Shared>(&mut self, channel: &Channel<S>) -> Option<&mut S::Channel> {
        self.desk.channels.get(channel)
    }

    /// Calls `step` with every thread's channel to `object`, each on its own thread and one after
    /// another, and then `done` on this one. Channels that are opened meanwhile are not visited.
    pub fn for_each_channel<S: Shared>(
        &mut self,
        object: &Object<S>,
        step: impl FnMut(&mut S::Channel) + Send + 'static,
        done: impl FnOnce(&mut Context<'_>) + Send + 'static,
    ) {
        Visit::new(object, self, Box::new(step), Box::new(done)).go_on(self);
    }

    /// Sends a message, if need be in a later turn: for the few that must not be lost and have
    /// nobody to be given back to.
    pub(crate) fn send_surely(&mut self, to: Handle, message: Message) {
        if let Err(message) = to.send(message) {
            self.desk.changes.push_back(Change::Send(to, message));
        }
    }
}

/// A timer: a timed poller that goes after its first poll.
struct Once<C>(Option<C>);

impl<C: FnOnce(&mut Context<'_>) + Send> Poller for Once<C> {
    fn poll(&mut self, context: &mut Context<'_>) -> Found {
        if let Some(me) = context.poller() {
            context.remove(me);
        }
        if let Some(call) = self.0.take() {
            call(context);
        }
        Found::Work
    }
}

impl std::fmt::Display for NotAdded {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.why.fmt(out)
    }
}

impl std::error::Error for NotAdded {}
