//! Connection as a poller on a reactor: arming, sleeping and migration.

use std::io;

use tenmil_base::{Instant, Span, WakeSource};
use tenmil_linux::poll_set::{Interest, PollSet};
use tenmil_reactor::{Context, DetachReason, PollResult, Poller, PollerWake};

use super::connection::TargetConnection;
use super::io_queue::IoQueue;

/// Wake sources of a connection: its stream and the devices of its queue.
#[derive(Debug)]
pub(super) struct WakeSet {
    watch: PollSet,
    /// Whether a source could not be registered, so the connection must not sleep.
    must_poll: bool,
}

const STREAM: u64 = 0;
const DEVICE: u64 = 1;
const READABLE: Interest = Interest { readable: true, writable: false };

impl WakeSet {
    pub(super) fn new(stream: WakeSource<'_>) -> io::Result<Self> {
        let watch = PollSet::new()?;
        let mut must_poll = false;
        match stream {
            WakeSource::Descriptor(descriptor) => watch.add(descriptor, STREAM, READABLE)?,
            WakeSource::Deadline => {}
            WakeSource::None => must_poll = true,
        }
        Ok(Self { watch, must_poll })
    }

    pub(super) fn poller_wake(&self) -> io::Result<PollerWake> {
        PollerWake::from_source(WakeSource::Descriptor(std::os::fd::AsFd::as_fd(&self.watch)))
    }

    /// Whether all sources are registered.
    pub(super) fn covers_all_sources(&self) -> bool {
        !self.must_poll
    }

    /// Arms the devices of a queue before sleeping. Returns true if the connection must not sleep.
    fn arm(&mut self, io: &mut IoQueue) -> bool {
        let Self { watch, must_poll } = self;
        let stays_awake = io.arm(&mut |descriptor| {
            *must_poll |= watch.add(descriptor, DEVICE, READABLE).is_err();
        });
        stays_awake || *must_poll
    }
}

impl Poller for TargetConnection {
    fn poll(&mut self, context: &mut Context<'_>) -> PollResult {
        let now = context.now();
        let count = self.process_commands(now);
        if self.is_closed() {
            context.request_thread_end();
        }
        PollResult::from_count(count + usize::from(self.has_unsent()))
    }

    fn flush(&mut self) {
        self.send(self.last_work_time());
    }

    fn arm(&mut self) -> PollResult {
        self.prepare_to_idle();
        let has_new_events = self.arm_stream();
        let (wake_set, io) = self.wake_set_and_queue();
        let has_completions = match (wake_set, io) {
            (Some(wake_set), Some(io)) => wake_set.arm(io),
            (Some(wake_set), None) => wake_set.must_poll,
            (None, _) => true,
        };
        let stays_awake =
            has_new_events || has_completions || self.has_unsent() || self.needs_iteration();
        PollResult::from_count(usize::from(stays_awake))
    }

    fn disarm(&mut self) {
        self.resume_polling();
    }

    fn may_park(&self) -> bool {
        self.can_park()
    }

    fn may_coalesce_wakeups(&self) -> bool {
        self.may_coalesce_wakeups()
    }

    fn wake_at(&self) -> Instant {
        self.next_poll_time()
    }

    fn expected_latency(&self) -> Option<Span> {
        self.mean_command_latency()
    }

    fn can_spin_help(&self) -> bool {
        self.may_complete_soon()
    }

    fn try_detach(&mut self, reason: DetachReason) -> bool {
        match reason {
            DetachReason::Migrating => self.prepare_migration(),
            DetachReason::Exiting => {
                self.close_on_thread_end();
                self.is_closed()
            }
        }
    }

    fn attach(&mut self) {
        self.finish_migration();
    }
}
