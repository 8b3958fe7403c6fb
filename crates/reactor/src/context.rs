//! Context of a poller or message: access to its light thread and reactor.

use tenmil_base::{Instant, Span};

use crate::error::ReactorError;
use crate::light_thread::{DeferredCommand, ThreadState};
use crate::message::{Message, ThreadHandle};
use crate::poller::{PollResult, Poller, PollerBuilder, PollerId};
use crate::reactor::ReactorLocal;
use crate::registry::{ReactorId, Registry, ThreadId};
use crate::thread_channel::{Channel, ChannelProvider, ForEachChannel, SharedProvider};

/// Light thread that the caller runs on, and its reactor.
///
/// Adding, removing, pausing and resuming a poller takes effect by the end of the iteration at the
/// latest, and before any later message is run.
pub struct Context<'a> {
    pub(crate) now: Instant,
    pub(crate) thread_state: &'a mut ThreadState,
    pub(crate) local: &'a mut ReactorLocal,
}

/// A poller was not added.
#[derive(Debug)]
pub struct AddPollerError {
    /// Reason.
    pub reason: ReactorError,
    /// The rejected poller.
    pub poller: Box<PollerBuilder>,
}

impl Context<'_> {
    /// Start of the iteration. The clock is read once per iteration.
    #[inline]
    pub fn now(&self) -> Instant {
        self.now
    }

    /// Thread number.
    #[inline]
    pub fn thread_id(&self) -> ThreadId {
        self.thread_state.record.id
    }

    /// Thread name.
    pub fn name(&self) -> &str {
        &self.thread_state.record.name
    }

    /// Handle of the thread.
    pub fn thread_handle(&self) -> ThreadHandle {
        ThreadHandle(self.thread_state.record.clone())
    }

    /// Poller that is being polled, or receives a message; `None` in a closure.
    #[inline]
    pub fn current_poller(&self) -> Option<PollerId> {
        self.thread_state.current
    }

    /// Reactor that runs this.
    pub fn reactor_id(&self) -> ReactorId {
        self.local.id
    }

    /// Registry of reactors and threads.
    pub fn registry(&self) -> &Registry {
        &self.local.registry
    }

    /// Adds a poller to the thread. Rejected if nothing wakes it and the reactor sleeps.
    pub fn add_poller(&mut self, registration: PollerBuilder) -> Result<PollerId, AddPollerError> {
        let refuse =
            |why, registration| AddPollerError { reason: why, poller: Box::new(registration) };
        if let Err(why) = registration.check_poll_mode(self.local.mode) {
            return Err(refuse(why, registration));
        }
        let Some(id) = self.thread_state.ids.allocate() else {
            let why = ReactorError::TooManyPollers { poller: registration.name.clone() };
            return Err(refuse(why, registration));
        };
        self.thread_state.changes.push_back(DeferredCommand::Add(id, Box::new(registration)));
        Ok(id)
    }

    /// Removes a poller of the thread, if it still exists; a poller may remove itself.
    pub fn remove_poller(&mut self, poller: PollerId) {
        self.thread_state.changes.push_back(DeferredCommand::Remove(poller));
    }

    /// Pauses a poller. It still receives messages, and is polled for I/O in flight when its thread
    /// leaves.
    pub fn pause_poller(&mut self, poller: PollerId) {
        self.thread_state.changes.push_back(DeferredCommand::Pause(poller));
    }

    /// Resumes a poller. A timed poller is due one period from now.
    pub fn resume_poller(&mut self, poller: PollerId) {
        self.thread_state.changes.push_back(DeferredCommand::Resume(poller));
    }

    /// Sets the period of a timed poller, which is next due one period from now.
    pub fn set_poller_period(&mut self, poller: PollerId, period: Span) {
        self.thread_state.changes.push_back(DeferredCommand::SetPeriod(poller, period));
    }

    /// Runs `call` on this thread when `span` has passed, unless the returned poller is removed
    /// before. Rejected only if the thread has no poller number left.
    pub fn call_after(
        &mut self,
        span: Span,
        call: impl FnOnce(&mut Context<'_>) + Send + 'static,
    ) -> Result<PollerId, AddPollerError> {
        self.add_poller(PollerBuilder::polled_each_period("timer", span, OneShotTimer(Some(call))))
    }

    /// Requests a flush of the thread's pollers in this iteration or the next, even if it finds no
    /// work. Not needed by a poller that returns [`PollResult::Busy`], nor initially: a poller that
    /// was added, or arrived with its thread, is flushed soon.
    pub fn request_poller_flush(&mut self) {
        self.thread_state.changes.push_back(DeferredCommand::Flush);
    }

    /// Ends the thread, once its pollers have detached.
    pub fn request_thread_end(&mut self) {
        self.thread_state.changes.push_back(DeferredCommand::End);
    }

    /// Opens this thread's channel to a shared object, or adds a use of it. The channel closes some
    /// time after its last use was dropped.
    pub fn open_channel<S: ChannelProvider>(
        &mut self,
        object: &SharedProvider<S>,
    ) -> Result<Channel<S>, S::Refusal> {
        let me = self.thread_handle();
        self.thread_state.channels.open(object, me)
    }

    /// Channel of this thread; `None` if it was opened on another thread.
    #[inline]
    pub fn channel<S: ChannelProvider>(&mut self, channel: &Channel<S>) -> Option<&mut S::Channel> {
        self.thread_state.channels.channel_mut(channel)
    }

    /// Calls `step` with every thread's channel to `object`, one after the other on its own thread,
    /// and then `done` on this thread. Channels opened meanwhile are not visited. (SPDK:
    /// `spdk_for_each_channel`.)
    pub fn for_each_channel<S: ChannelProvider>(
        &mut self,
        object: &SharedProvider<S>,
        step: impl FnMut(&mut S::Channel) + Send + 'static,
        done: impl FnOnce(&mut Context<'_>) + Send + 'static,
    ) {
        ForEachChannel::new(object, self, Box::new(step), Box::new(done)).send_to_next(self);
    }

    /// Sends a message, in a later iteration if the mailbox is full: for messages that must not be
    /// lost and whose sender cannot take them back.
    pub(crate) fn send_or_retry(&mut self, to: ThreadHandle, message: Message) {
        if let Err(message) = to.send(message) {
            self.thread_state.changes.push_back(DeferredCommand::Send(to, message));
        }
    }
}

/// Timer: a timed poller that is removed after its first poll.
struct OneShotTimer<C>(Option<C>);

impl<C: FnOnce(&mut Context<'_>) + Send> Poller for OneShotTimer<C> {
    fn poll(&mut self, context: &mut Context<'_>) -> PollResult {
        if let Some(me) = context.current_poller() {
            context.remove_poller(me);
        }
        if let Some(call) = self.0.take() {
            call(context);
        }
        PollResult::Busy
    }
}

impl std::fmt::Display for AddPollerError {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.reason.fmt(out)
    }
}

impl std::error::Error for AddPollerError {}
