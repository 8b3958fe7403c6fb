//! The end of a session: before a shutdown is reported complete, every medium that has a volatile
//! cache is flushed (Base 2.1 §3.6.1).

use base::{Answers, Backend, Durability, Flags, Instant, Operation, Request};
use wire::register::{ShutdownNotification, ShutdownStatus};

use crate::controller::Controller;
use crate::namespace::Namespaces;

/// A shutdown under way, or complete.
pub(super) struct Shutdown {
    flushes: Vec<Flush>,
    answers: Answers,
    has_failed: bool,
}

struct Flush {
    backend: Box<dyn Backend>,
    is_submitted: bool,
}

impl Shutdown {
    /// What the host has said of the end (CC.SHN): the controller's is begun in `this` with the first
    /// word of it, and goes on from there.
    pub(super) fn heed(
        this: &mut Option<Self>,
        now: Instant,
        notice: ShutdownNotification,
        controller: &mut Controller,
    ) {
        let is_abrupt = match notice {
            ShutdownNotification::Abrupt => true,
            ShutdownNotification::Normal => false,
            _ if this.is_none() => return,
            _ => false,
        };
        let shutdown = this.get_or_insert_with(|| {
            controller.shutdown();
            Self::begin(controller.namespaces().reader().get(), is_abrupt)
        });
        shutdown.turn(now);
    }

    /// Opens a channel to every medium that has something to lose. An abrupt shutdown flushes
    /// nothing.
    fn begin(namespaces: &Namespaces, is_abrupt: bool) -> Self {
        let mut shutdown =
            Self { flushes: Vec::new(), answers: Answers::with_capacity(1), has_failed: false };
        let has_cache = |durability| durability == Durability::VolatileCache;
        for namespace in namespaces.iter().filter(|_| !is_abrupt) {
            if has_cache(namespace.limits.durability) {
                match namespace.medium.channel() {
                    Ok(backend) => shutdown.flushes.push(Flush { backend, is_submitted: false }),
                    Err(_) => shutdown.has_failed = true,
                }
            }
        }
        shutdown
    }

    /// Flushes as far as the media let it.
    fn turn(&mut self, now: Instant) {
        let Self { flushes, answers, has_failed } = self;
        flushes.retain_mut(|flush| {
            if !flush.is_submitted {
                flush.is_submitted = flush.backend.submit(now, &[REQUEST], &[]) > 0;
                flush.backend.flush();
            }
            flush.backend.poll(now, answers);
            let answer = answers.drain().next();
            *has_failed |= answer.is_some_and(|answer| !answer.outcome.is_success());
            answer.is_none()
        });
    }

    /// CSTS.SHST.
    pub(super) fn status(&self) -> ShutdownStatus {
        if self.is_running() { ShutdownStatus::Occurring } else { ShutdownStatus::Complete }
    }

    pub(super) fn is_running(&self) -> bool {
        !self.flushes.is_empty()
    }

    /// A medium could not be flushed: what was written may be lost, and the host has to know.
    pub(super) fn has_failed(&self) -> bool {
        self.has_failed
    }
}

impl core::fmt::Debug for Shutdown {
    fn fmt(&self, out: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(out, "Shutdown {{ {} to flush }}", self.flushes.len())
    }
}

const REQUEST: Request = Request {
    token: 0,
    lba: 0,
    operand: 0,
    blocks: 0,
    segment_first: 0,
    segment_count: 0,
    metadata_count: 0,
    operation: Operation::Flush,
    flags: Flags::NONE,
};
