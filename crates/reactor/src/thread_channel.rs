//! Channels: per-thread state of an object that many threads use.
//!
//! A queue pair of a controller, a connection, a cache: the object is shared, and each thread that
//! uses it has a channel of its own, so the I/O path takes no lock. The first use on a thread opens
//! the channel and the last one closes it. (SPDK: io_device and io_channel.)

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::context::Context;
use crate::message::{Message, MessageFn, ThreadHandle};
use crate::registry::Registry;

/// Object used by many threads, each through a channel of its own.
pub trait ChannelProvider: Send + Sync + 'static {
    /// Per-thread state. It migrates with its thread.
    type Channel: Send + 'static;
    /// Reason why a channel could not be opened.
    type Refusal;

    /// Opens a channel on the thread that will use it.
    fn open_channel(&self) -> Result<Self::Channel, Self::Refusal>;

    /// Closes a channel on the thread that used it.
    fn close_channel(&self, channel: Self::Channel) {
        drop(channel);
    }
}

/// Shared object. Clones refer to the same object.
pub struct SharedProvider<S: ChannelProvider>(Arc<SharedInner<S>>);

struct SharedInner<S> {
    shared: S,
    /// Threads with a channel. Locked when a channel is opened or closed.
    threads: Mutex<Vec<ThreadHandle>>,
}

/// Use of a thread's channel to an object. Valid on that thread only.
#[must_use = "the channel closes when its last use is dropped"]
pub struct Channel<S: ChannelProvider> {
    object: SharedProvider<S>,
    uses: Arc<()>,
}

/// Channels of one thread.
#[derive(Default)]
pub(crate) struct ThreadChannels(Vec<ErasedChannel>);

/// Open channel, type-erased.
pub(crate) struct ErasedChannel {
    uses: Arc<()>,
    held: Box<dyn AnyChannel>,
}

struct OpenChannel<S: ChannelProvider> {
    object: SharedProvider<S>,
    /// Present until the channel is closed.
    channel: Option<S::Channel>,
    me: ThreadHandle,
}

/// Type-erased [`OpenChannel`].
trait AnyChannel: Send {
    fn key(&self) -> usize;
    fn as_any(&mut self) -> &mut dyn Any;
    fn close(&mut self);
}

impl<S: ChannelProvider> SharedProvider<S> {
    /// Shares an object.
    pub fn new(shared: S) -> Self {
        Self(Arc::new(SharedInner { shared, threads: Mutex::default() }))
    }

    /// The object.
    pub fn provider(&self) -> &S {
        &self.0.shared
    }

    /// Threads that have a channel to it.
    pub fn threads_with_channel(&self) -> Vec<ThreadHandle> {
        self.0.threads.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Key of the object, unique among living objects.
    fn key(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }
}

impl<S: ChannelProvider> Clone for SharedProvider<S> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<S: ChannelProvider> Channel<S> {
    /// Object that the channel belongs to.
    pub fn shared_provider(&self) -> &SharedProvider<S> {
        &self.object
    }
}

impl ThreadChannels {
    pub(crate) fn open<S: ChannelProvider>(
        &mut self,
        object: &SharedProvider<S>,
        me: ThreadHandle,
    ) -> Result<Channel<S>, S::Refusal> {
        let key = object.key();
        if let Some(open) = self.0.iter().find(|open| open.held.key() == key) {
            return Ok(Channel { object: object.clone(), uses: Arc::clone(&open.uses) });
        }
        let channel = Some(object.provider().open_channel()?);
        object.0.threads.lock().unwrap_or_else(PoisonError::into_inner).push(me.clone());
        let uses = Arc::new(());
        let held = Box::new(OpenChannel { object: object.clone(), channel, me });
        self.0.push(ErasedChannel { uses: Arc::clone(&uses), held });
        Ok(Channel { object: object.clone(), uses })
    }

    #[inline]
    pub(crate) fn channel_mut<S: ChannelProvider>(
        &mut self,
        channel: &Channel<S>,
    ) -> Option<&mut S::Channel> {
        let is_it = |open: &&mut ErasedChannel| Arc::ptr_eq(&open.uses, &channel.uses);
        self.0.iter_mut().find(is_it)?.channel::<S>()
    }

    fn find_open<S: ChannelProvider>(
        &mut self,
        object: &SharedProvider<S>,
    ) -> Option<&mut S::Channel> {
        let key = object.key();
        self.0.iter_mut().find(|open| open.held.key() == key)?.channel::<S>()
    }

    /// Removes a channel that is no longer used, to be closed.
    pub(crate) fn take_unused_channel(&mut self) -> Option<ErasedChannel> {
        let index = self.0.iter().position(|open| Arc::strong_count(&open.uses) == 1)?;
        Some(self.0.swap_remove(index))
    }

    /// Removes any channel, to be closed when the thread ends.
    pub(crate) fn take_any_channel(&mut self) -> Option<ErasedChannel> {
        self.0.pop()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

impl ErasedChannel {
    /// Closes the channel through its object.
    pub(crate) fn close(mut self) {
        self.held.close();
    }

    fn channel<S: ChannelProvider>(&mut self) -> Option<&mut S::Channel> {
        self.held.as_any().downcast_mut::<OpenChannel<S>>()?.channel.as_mut()
    }
}

impl<S: ChannelProvider> AnyChannel for OpenChannel<S> {
    fn key(&self) -> usize {
        self.object.key()
    }

    fn as_any(&mut self) -> &mut dyn Any {
        self
    }

    fn close(&mut self) {
        let inner = &self.object.0;
        let me = self.me.id();
        let mut threads = inner.threads.lock().unwrap_or_else(PoisonError::into_inner);
        threads.retain(|thread| thread.id() != me);
        drop(threads);
        if let Some(channel) = self.channel.take() {
            inner.shared.close_channel(channel);
        }
    }
}

/// Message that visits all threads with a channel, one after the other, and reports back.
///
/// If a thread ends before it has run the message, the message is dropped, and `Drop` sends it on
/// to the next thread. If its inbox is full then, the reactor that dropped it retries.
pub(crate) struct ForEachChannel<S: ChannelProvider>(Option<ForEachState<S>>);

struct ForEachState<S: ChannelProvider> {
    object: SharedProvider<S>,
    to_go: Vec<ThreadHandle>,
    origin: ThreadHandle,
    directory: Weak<Registry>,
    step: ChannelVisit<S>,
    done: MessageFn,
}

type ChannelVisit<S> = Box<dyn FnMut(&mut <S as ChannelProvider>::Channel) + Send>;

impl<S: ChannelProvider> ForEachChannel<S> {
    pub(crate) fn new(
        object: &SharedProvider<S>,
        context: &Context<'_>,
        step: ChannelVisit<S>,
        done: MessageFn,
    ) -> Self {
        let (to_go, origin) = (object.threads_with_channel(), context.thread_handle());
        let directory = Arc::downgrade(&context.local.registry);
        Self(Some(ForEachState { object: object.clone(), to_go, origin, directory, step, done }))
    }

    /// Sends itself to the next thread, or back to the origin.
    pub(crate) fn send_to_next(mut self, context: &mut Context<'_>) {
        if let Some((to, message)) = self.0.take().map(ForEachState::message_for_next_thread) {
            context.send_or_retry(to, message);
        }
    }

    /// Runs on the visited thread.
    fn run_on_thread(mut self, context: &mut Context<'_>) {
        if let Some(round) = &mut self.0
            && let Some(channel) = context.thread_state.channels.find_open(&round.object)
        {
            (round.step)(channel);
        }
        self.send_to_next(context);
    }
}

impl<S: ChannelProvider> Drop for ForEachChannel<S> {
    fn drop(&mut self) {
        let Some(round) = self.0.take() else { return };
        let directory = round.directory.clone();
        let (to, message) = round.message_for_next_thread();
        // A thread that is gone rejects the message, whose drop then tries the next one.
        if let Err(message) = to.send(message)
            && !to.has_ended()
            && let Some(directory) = directory.upgrade()
        {
            directory.requeue_message(to, message);
        }
    }
}

impl<S: ChannelProvider> ForEachState<S> {
    fn message_for_next_thread(mut self) -> (ThreadHandle, Message) {
        match self.to_go.pop() {
            Some(next) => {
                let visit = ForEachChannel(Some(self));
                (next, Message::Call(Box::new(move |context| visit.run_on_thread(context))))
            }
            None => (self.origin, Message::Call(self.done)),
        }
    }
}
