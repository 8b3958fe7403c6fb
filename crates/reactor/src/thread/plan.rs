//! What a light thread is made from.

use std::fmt;

use host::Cores;

use crate::context::Context;
use crate::directory::ReactorId;
use crate::message::Call;
use crate::poller::Registration;
use crate::refused::Refused;
use crate::spell::PollMode;

/// A light thread before it lives.
pub struct ThreadPlan {
    pub(crate) name: String,
    pub(crate) mask: Option<Cores>,
    pub(crate) node: Option<u32>,
    pub(crate) reactor: Option<ReactorId>,
    pub(crate) mailbox: usize,
    pub(crate) pollers: Vec<Registration>,
    pub(crate) first: Option<Call>,
}

/// Room in a mailbox if nothing else is asked for: 32 KiB.
const MAILBOX: usize = 1024;

impl ThreadPlan {
    /// A thread with no pollers, that may live anywhere.
    pub fn new(name: &str) -> Self {
        let name = name.to_owned();
        let pollers = Vec::new();
        let (mask, node, reactor, first) = (None, None, None, None);
        Self { name, mask, node, reactor, mailbox: MAILBOX, pollers, first }
    }

    /// It lives on these cores only.
    #[must_use]
    pub fn mask(self, cores: Cores) -> Self {
        Self { mask: Some(cores), ..self }
    }

    /// Its data lies in this memory node: the dynamic scheduler likes to have it near there.
    #[must_use]
    pub fn near(self, node: u32) -> Self {
        Self { node: Some(node), ..self }
    }

    /// It begins on this reactor.
    #[must_use]
    pub fn on(self, reactor: ReactorId) -> Self {
        Self { reactor: Some(reactor), ..self }
    }

    /// Its mailbox has room for at least this many messages.
    #[must_use]
    pub fn mailbox(self, messages: usize) -> Self {
        Self { mailbox: messages, ..self }
    }

    /// It has this poller from the start. Its number is [`PollerId::planned`](crate::PollerId::planned).
    #[must_use]
    pub fn poller(mut self, registration: Registration) -> Self {
        self.pollers.push(registration);
        self
    }

    /// What it does first.
    #[must_use]
    pub fn first(self, call: impl FnOnce(&mut Context<'_>) + Send + 'static) -> Self {
        Self { first: Some(Box::new(call)), ..self }
    }

    /// Whether a reactor of this mode can do with it.
    pub(crate) fn check(&self, mode: PollMode) -> Result<(), Refused> {
        if let Some(extra) = self.pollers.get(1 << 16) {
            return Err(Refused::TooManyPollers { poller: extra.name.clone() });
        }
        self.pollers.iter().try_for_each(|registration| registration.check(mode))
    }
}

impl fmt::Debug for ThreadPlan {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, mask, node, reactor, mailbox, pollers, first: _ } = self;
        let mut out = out.debug_struct("ThreadPlan");
        out.field("name", name).field("mask", mask).field("node", node).field("reactor", reactor);
        out.field("mailbox", mailbox).field("pollers", pollers).finish_non_exhaustive()
    }
}
