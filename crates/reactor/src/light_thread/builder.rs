//! Builder of light threads.

use std::fmt;

use tenmil_linux::CpuList;

use crate::adaptive_spin::PollMode;
use crate::context::Context;
use crate::error::ReactorError;
use crate::message::MessageFn;
use crate::poller::PollerBuilder;
use crate::registry::ReactorId;

/// Builder of a light thread.
pub struct ThreadBuilder {
    pub(crate) name: String,
    pub(crate) mask: Option<CpuList>,
    pub(crate) node: Option<u32>,
    pub(crate) reactor: Option<ReactorId>,
    pub(crate) mailbox: usize,
    pub(crate) pollers: Vec<PollerBuilder>,
    pub(crate) first: Option<MessageFn>,
}

/// Default mailbox capacity: 32 KiB.
const MAILBOX: usize = 1024;

impl ThreadBuilder {
    /// A thread without pollers that may live on any reactor.
    pub fn new(name: &str) -> Self {
        let name = name.to_owned();
        let pollers = Vec::new();
        let (mask, node, reactor, first) = (None, None, None, None);
        Self { name, mask, node, reactor, mailbox: MAILBOX, pollers, first }
    }

    /// Restricts it to these cores.
    #[must_use]
    pub fn affinity(self, cores: CpuList) -> Self {
        Self { mask: Some(cores), ..self }
    }

    /// NUMA node of its data: the dynamic scheduler prefers reactors on this node.
    #[must_use]
    pub fn numa_node(self, node: u32) -> Self {
        Self { node: Some(node), ..self }
    }

    /// Starts it on this reactor.
    #[must_use]
    pub fn on_reactor(self, reactor: ReactorId) -> Self {
        Self { reactor: Some(reactor), ..self }
    }

    /// Minimum capacity of its mailbox in messages.
    #[must_use]
    pub fn mailbox_size(self, messages: usize) -> Self {
        Self { mailbox: messages, ..self }
    }

    /// Adds a poller. Its number is [`PollerId::of_builder_index`](crate::PollerId::of_builder_index).
    #[must_use]
    pub fn add_poller(mut self, registration: PollerBuilder) -> Self {
        self.pollers.push(registration);
        self
    }

    /// Closure that the thread runs first.
    #[must_use]
    pub fn run_first(self, call: impl FnOnce(&mut Context<'_>) + Send + 'static) -> Self {
        Self { first: Some(Box::new(call)), ..self }
    }

    /// Checks that a reactor in this poll mode can run it.
    pub(crate) fn check_poll_mode(&self, mode: PollMode) -> Result<(), ReactorError> {
        if let Some(extra) = self.pollers.get(1 << 16) {
            return Err(ReactorError::TooManyPollers { poller: extra.name.clone() });
        }
        self.pollers.iter().try_for_each(|registration| registration.check_poll_mode(mode))
    }
}

impl fmt::Debug for ThreadBuilder {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, mask, node, reactor, mailbox, pollers, first: _ } = self;
        let mut out = out.debug_struct("ThreadPlan");
        out.field("name", name).field("mask", mask).field("node", node).field("reactor", reactor);
        out.field("mailbox", mailbox).field("pollers", pollers).finish_non_exhaustive()
    }
}
