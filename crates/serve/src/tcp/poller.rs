//! Connection as a poller on a reactor: arming, sleeping and migration.

use std::io;

use tenmil_base::{Instant, Span, WakeSource};
use tenmil_linux::poll_set::{Interest, PollSet};
use tenmil_reactor::{Context, DetachReason, PollResult, Poller, PollerWake};

use super::connection::TargetConnection;
use super::io::Io;

/// Wake sources of a connection: its stream and the devices of its queue.
#[derive(Debug)]
pub(super) struct WakeSet {
    watch: PollSet,
    /// Whether a source could not be registered, so the connection must not sleep.
    is_sleepless: bool,
}

const STREAM: u64 = 0;
const MEDIUM: u64 = 1;
const READABLE: Interest = Interest { readable: true, writable: false };

impl WakeSet {
    pub(super) fn new(stream: WakeSource<'_>) -> io::Result<Self> {
        let watch = PollSet::new()?;
        let mut is_sleepless = false;
        match stream {
            WakeSource::Descriptor(descriptor) => watch.add(descriptor, STREAM, READABLE)?,
            WakeSource::Deadline => {}
            WakeSource::None => is_sleepless = true,
        }
        Ok(Self { watch, is_sleepless })
    }

    pub(super) fn woken_by(&self) -> io::Result<PollerWake> {
        PollerWake::of(WakeSource::Descriptor(std::os::fd::AsFd::as_fd(&self.watch)))
    }

    /// Whether all sources are registered.
    pub(super) fn hears_all(&self) -> bool {
        !self.is_sleepless
    }

    /// Arms the devices of a queue before sleeping. Returns true if the connection must not sleep.
    fn arm(&mut self, io: &mut Io) -> bool {
        let Self { watch, is_sleepless } = self;
        let stays_awake = io.arm(&mut |descriptor| {
            *is_sleepless |= watch.add(descriptor, MEDIUM, READABLE).is_err();
        });
        stays_awake || *is_sleepless
    }
}

impl Poller for TargetConnection {
    fn poll(&mut self, context: &mut Context<'_>) -> PollResult {
        let now = context.now();
        let count = self.work(now);
        if self.is_over() {
            context.end();
        }
        PollResult::from_count(count + usize::from(self.has_unsent()))
    }

    fn flush(&mut self) {
        self.send(self.worked_at());
    }

    fn arm(&mut self) -> PollResult {
        self.rest();
        let has_new_events = self.arm_stream();
        let (wake_set, io) = self.bed_and_queue();
        let has_answers = match (wake_set, io) {
            (Some(wake_set), Some(io)) => wake_set.arm(io),
            (Some(wake_set), None) => wake_set.is_sleepless,
            (None, _) => true,
        };
        let stays_awake = has_new_events || has_answers || self.has_unsent() || self.is_behind();
        PollResult::from_count(usize::from(stays_awake))
    }

    fn disarm(&mut self) {
        self.awake();
    }

    fn may_park(&self) -> bool {
        self.is_quiet()
    }

    fn may_coalesce_wakeups(&self) -> bool {
        self.may_coalesce_wakeups()
    }

    fn wake_at(&self) -> Instant {
        self.next_deadline()
    }

    fn expected_latency(&self) -> Option<Span> {
        self.latency()
    }

    fn detach(&mut self, parting: DetachReason) -> bool {
        match parting {
            DetachReason::Migrating => self.may_move(),
            DetachReason::Exiting => {
                self.leave();
                self.is_over()
            }
        }
    }

    fn attach(&mut self) {
        self.arrive();
    }
}
