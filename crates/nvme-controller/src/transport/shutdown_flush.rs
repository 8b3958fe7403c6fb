//! Controller shutdown: block devices with a volatile cache are flushed before the shutdown is reported
//! complete (Base 2.1 §3.6.1).

use tenmil_base::{
    CompletionBatch, Durability, Instant, IoChannel, Operation, Request, RequestFlags,
};
use tenmil_wire::register::{ShutdownNotification, ShutdownStatus};

use crate::controller::Controller;
use crate::namespace::NamespaceSnapshot;

/// Shutdown in progress or complete.
pub(super) struct ShutdownFlush {
    flushes: Vec<NamespaceFlush>,
    completions: CompletionBatch,
    has_failed: bool,
}

struct NamespaceFlush {
    backend: Box<dyn IoChannel>,
    is_submitted: bool,
}

impl ShutdownFlush {
    /// Handles the value of CC.SHN: the first shutdown notification starts the shutdown in `this`, later
    /// calls advance it.
    #[inline]
    pub(super) fn handle_shutdown(
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
        Self::advance(this, now, is_abrupt, controller);
    }

    fn advance(
        this: &mut Option<Self>,
        now: Instant,
        is_abrupt: bool,
        controller: &mut Controller,
    ) {
        let shutdown = this.get_or_insert_with(|| {
            controller.note_host_shutdown();
            Self::begin_flushes(controller.namespaces().reader().get(), is_abrupt)
        });
        shutdown.poll(now);
    }

    /// Opens a channel to every block device with unflushed data. An abrupt shutdown flushes nothing.
    fn begin_flushes(namespaces: &NamespaceSnapshot, is_abrupt: bool) -> Self {
        let mut shutdown = Self {
            flushes: Vec::new(),
            completions: CompletionBatch::with_capacity(1),
            has_failed: false,
        };
        let has_cache = |durability| durability == Durability::VolatileCache;
        for namespace in namespaces.iter().filter(|_| !is_abrupt) {
            if has_cache(namespace.limits.durability) {
                match namespace.device.channel() {
                    Ok(backend) => {
                        shutdown.flushes.push(NamespaceFlush { backend, is_submitted: false })
                    }
                    Err(_) => shutdown.has_failed = true,
                }
            }
        }
        shutdown
    }

    /// Advances the flushes.
    fn poll(&mut self, now: Instant) {
        let Self { flushes, completions, has_failed } = self;
        flushes.retain_mut(|flush| {
            if !flush.is_submitted {
                flush.is_submitted = flush.backend.submit(now, &[REQUEST], &[]) > 0;
                flush.backend.flush_submissions();
            }
            flush.backend.poll(now, completions);
            let completion = completions.drain().next();
            *has_failed |= completion.is_some_and(|completion| !completion.status.is_success());
            completion.is_none()
        });
    }

    /// Value of CSTS.SHST.
    pub(super) fn status(&self) -> ShutdownStatus {
        if self.is_running() { ShutdownStatus::Occurring } else { ShutdownStatus::Complete }
    }

    pub(super) fn is_running(&self) -> bool {
        !self.flushes.is_empty()
    }

    /// Whether a block device could not be flushed: written data may be lost, and the host must be
    /// informed.
    pub(super) fn has_failed(&self) -> bool {
        self.has_failed
    }
}

impl core::fmt::Debug for ShutdownFlush {
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
    flags: RequestFlags::NONE,
};
