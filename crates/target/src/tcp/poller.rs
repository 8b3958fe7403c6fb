//! A connection on a reactor: how it sleeps, and how it leaves.

use std::io;

use base::{Instant, Span, WakeSource};
use host::watch::{Interest, Watch};
use reactor::{Context, Found, Parting, Poller, WokenBy};

use super::guest::Guest;
use super::io::Io;

/// What wakes a connection: its stream and the media of its queue.
#[derive(Debug)]
pub(super) struct Bed {
    watch: Watch,
    /// Something could not be listened to: it must not sleep.
    is_sleepless: bool,
}

const STREAM: u64 = 0;
const MEDIUM: u64 = 1;
const READABLE: Interest = Interest { readable: true, writable: false };

impl Bed {
    pub(super) fn new(stream: WakeSource<'_>) -> io::Result<Self> {
        let watch = Watch::new()?;
        let mut is_sleepless = false;
        match stream {
            WakeSource::Descriptor(descriptor) => watch.add(descriptor, STREAM, READABLE)?,
            WakeSource::Deadline => {}
            WakeSource::Nothing => is_sleepless = true,
        }
        Ok(Self { watch, is_sleepless })
    }

    pub(super) fn woken_by(&self) -> io::Result<WokenBy> {
        WokenBy::of(WakeSource::Descriptor(std::os::fd::AsFd::as_fd(&self.watch)))
    }

    /// Whether nothing is listened to by looking.
    pub(super) fn hears_all(&self) -> bool {
        !self.is_sleepless
    }

    /// Gets ready for a sleep on the media of a queue. True if there must be none.
    fn arm(&mut self, io: &mut Io) -> bool {
        let queue = io.queue();
        let Self { watch, is_sleepless } = self;
        queue.new_descriptors(&mut |descriptor| {
            *is_sleepless |= watch.add(descriptor, MEDIUM, READABLE).is_err();
        });
        queue.arm() || queue.is_unheard() || self.is_sleepless
    }
}

impl Poller for Guest {
    fn poll(&mut self, context: &mut Context<'_>) -> Found {
        let now = context.now();
        let count = self.work(now);
        if self.is_over() {
            context.end();
        }
        Found::from_count(count + usize::from(self.has_unsent()))
    }

    fn flush(&mut self) {
        self.send(self.worked_at());
    }

    fn arm(&mut self) -> Found {
        self.rest();
        let has_news = self.arm_stream();
        let (bed, io) = self.bed_and_queue();
        let has_answers = match (bed, io) {
            (Some(bed), Some(io)) => bed.arm(io),
            (Some(bed), None) => bed.is_sleepless,
            (None, _) => true,
        };
        let stays_awake = has_news || has_answers || self.has_unsent() || self.is_behind();
        Found::from_count(usize::from(stays_awake))
    }

    fn disarm(&mut self) {
        self.awake();
    }

    fn may_doze(&self) -> bool {
        self.is_quiet()
    }

    fn may_linger(&self) -> bool {
        self.is_in_no_hurry()
    }

    fn wake_at(&self) -> Instant {
        self.next_deadline()
    }

    fn expected_latency(&self) -> Option<Span> {
        self.latency()
    }

    fn detach(&mut self, parting: Parting) -> bool {
        match parting {
            Parting::Moves => self.may_move(),
            Parting::Ends => {
                self.leave();
                self.is_over()
            }
        }
    }

    fn attach(&mut self) {
        self.arrive();
    }
}
