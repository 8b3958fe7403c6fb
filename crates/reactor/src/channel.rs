//! Channels: what each light thread keeps of an object that many threads use.
//!
//! A queue pair of a controller, a connection, a cache: the object is shared, and each thread that
//! uses it has a context of its own, so that nothing is locked on the way of an I/O. The first use on
//! a thread opens it and the last one closes it.

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::context::Context;
use crate::directory::Directory;
use crate::message::{Call, Handle, Message};

/// Something that many threads use, each through a channel of its own.
pub trait Shared: Send + Sync + 'static {
    /// What a thread keeps of it. It moves with its thread.
    type Channel: Send + 'static;
    /// Why no channel is opened.
    type Refusal;

    /// Opens a channel, on the thread that is going to use it.
    fn open(&self) -> Result<Self::Channel, Self::Refusal>;

    /// Closes a channel, on the thread that used it.
    fn close(&self, channel: Self::Channel) {
        drop(channel);
    }
}

/// A shared object. Clones are the same object.
pub struct Object<S: Shared>(Arc<Inner<S>>);

struct Inner<S> {
    shared: S,
    /// The threads with a channel. Locked when one is opened or closed.
    threads: Mutex<Vec<Handle>>,
}

/// One use of a thread's channel to an object. It is of use on that thread only.
#[must_use = "the channel closes when its last use is dropped"]
pub struct Channel<S: Shared> {
    object: Object<S>,
    uses: Arc<()>,
}

/// The channels of one thread.
#[derive(Default)]
pub(crate) struct Channels(Vec<Open>);

/// One of them, whoever it leads to.
pub(crate) struct Open {
    uses: Arc<()>,
    held: Box<dyn Held>,
}

struct OpenTo<S: Shared> {
    object: Object<S>,
    /// There until it is closed.
    channel: Option<S::Channel>,
    me: Handle,
}

/// An [`OpenTo`] some object, of whatever kind.
trait Held: Send {
    fn key(&self) -> usize;
    fn as_any(&mut self) -> &mut dyn Any;
    fn close(&mut self);
}

impl<S: Shared> Object<S> {
    /// Shares an object.
    pub fn new(shared: S) -> Self {
        Self(Arc::new(Inner { shared, threads: Mutex::default() }))
    }

    /// The object itself.
    pub fn get(&self) -> &S {
        &self.0.shared
    }

    /// The threads that have a channel to it.
    pub fn threads(&self) -> Vec<Handle> {
        self.0.threads.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Unlike that of any other object that lives.
    fn key(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }
}

impl<S: Shared> Clone for Object<S> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<S: Shared> Channel<S> {
    /// What it leads to.
    pub fn object(&self) -> &Object<S> {
        &self.object
    }
}

impl Channels {
    pub(crate) fn open<S: Shared>(
        &mut self,
        object: &Object<S>,
        me: Handle,
    ) -> Result<Channel<S>, S::Refusal> {
        let key = object.key();
        if let Some(open) = self.0.iter().find(|open| open.held.key() == key) {
            return Ok(Channel { object: object.clone(), uses: Arc::clone(&open.uses) });
        }
        let channel = Some(object.get().open()?);
        object.0.threads.lock().unwrap_or_else(PoisonError::into_inner).push(me.clone());
        let uses = Arc::new(());
        let held = Box::new(OpenTo { object: object.clone(), channel, me });
        self.0.push(Open { uses: Arc::clone(&uses), held });
        Ok(Channel { object: object.clone(), uses })
    }

    #[inline]
    pub(crate) fn get<S: Shared>(&mut self, channel: &Channel<S>) -> Option<&mut S::Channel> {
        let is_it = |open: &&mut Open| Arc::ptr_eq(&open.uses, &channel.uses);
        self.0.iter_mut().find(is_it)?.channel::<S>()
    }

    fn find<S: Shared>(&mut self, object: &Object<S>) -> Option<&mut S::Channel> {
        let key = object.key();
        self.0.iter_mut().find(|open| open.held.key() == key)?.channel::<S>()
    }

    /// Takes out a channel that nobody uses any more, to be closed.
    pub(crate) fn take_unused(&mut self) -> Option<Open> {
        let index = self.0.iter().position(|open| Arc::strong_count(&open.uses) == 1)?;
        Some(self.0.swap_remove(index))
    }

    /// Takes out any channel, to be closed: the thread ends.
    pub(crate) fn take_any(&mut self) -> Option<Open> {
        self.0.pop()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

impl Open {
    /// Has the object close it.
    pub(crate) fn close(mut self) {
        self.held.close();
    }

    fn channel<S: Shared>(&mut self) -> Option<&mut S::Channel> {
        self.held.as_any().downcast_mut::<OpenTo<S>>()?.channel.as_mut()
    }
}

impl<S: Shared> Held for OpenTo<S> {
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
            inner.shared.close(channel);
        }
    }
}

/// Someone who goes round all threads that have a channel, as a message, and reports back.
///
/// Should a thread end before it has let the visitor in, the message is dropped, and the visitor
/// goes on from there: it is `Drop` that sends it on. Where there is no room just then, the reactor
/// that has dropped it tries again.
pub(crate) struct Visit<S: Shared>(Option<Round<S>>);

struct Round<S: Shared> {
    object: Object<S>,
    to_go: Vec<Handle>,
    origin: Handle,
    directory: Weak<Directory>,
    step: Step<S>,
    done: Call,
}

type Step<S> = Box<dyn FnMut(&mut <S as Shared>::Channel) + Send>;

impl<S: Shared> Visit<S> {
    pub(crate) fn new(
        object: &Object<S>,
        context: &Context<'_>,
        step: Step<S>,
        done: Call,
    ) -> Self {
        let (to_go, origin) = (object.threads(), context.handle());
        let directory = Arc::downgrade(&context.local.directory);
        Self(Some(Round { object: object.clone(), to_go, origin, directory, step, done }))
    }

    /// Goes to the next thread, or home.
    pub(crate) fn go_on(mut self, context: &mut Context<'_>) {
        if let Some((to, message)) = self.0.take().map(Round::next) {
            context.send_surely(to, message);
        }
    }

    /// Arrives.
    fn arrive(mut self, context: &mut Context<'_>) {
        if let Some(round) = &mut self.0
            && let Some(channel) = context.desk.channels.find(&round.object)
        {
            (round.step)(channel);
        }
        self.go_on(context);
    }
}

impl<S: Shared> Drop for Visit<S> {
    fn drop(&mut self) {
        let Some(round) = self.0.take() else { return };
        let directory = round.directory.clone();
        let (to, message) = round.next();
        // To one that is gone it is refused and dropped, and tries the next one in doing so.
        if let Err(message) = to.send(message)
            && !to.is_gone()
            && let Some(directory) = directory.upgrade()
        {
            directory.leave_stray(to, message);
        }
    }
}

impl<S: Shared> Round<S> {
    fn next(mut self) -> (Handle, Message) {
        match self.to_go.pop() {
            Some(next) => {
                let visit = Visit(Some(self));
                (next, Message::Call(Box::new(move |context| visit.arrive(context))))
            }
            None => (self.origin, Message::Call(self.done)),
        }
    }
}
