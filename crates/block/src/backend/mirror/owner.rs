//! The thread of an open mirror: it resynchronizes while nobody does I/O, and announces what happens.
//!
//! It ends after the last channel of the mirror, whose superblocks then say that nobody has it open.
//! It has a channel of its own, and is the only one that does tasks of the background and writes
//! superblocks: a channel of a client is polled only while the client waits for answers, and would
//! leave them half done. It sleeps until the mirror has something to do, a leg answers, or a second
//! has passed.

use std::sync::Arc;

use base::{Answers, Backend, Span, WakeSource};
use host::{Bell, Clock, Sleeper, Stop, Thread};

use super::channel::MirrorChannel;
use super::events::MirrorNews;
use super::shared::Shared;

/// The thread. It ends with this.
pub(super) struct Owner {
    thread: Thread<()>,
    bell: Bell,
}

struct Running {
    shared: Arc<Shared>,
    channel: MirrorChannel,
    device: String,
    names: Arc<[Option<String>]>,
}

/// How long the last superblocks may take.
const RELEASE_MAX: Span = Span::from_secs(10);
/// How long the owner sleeps at most.
const SLEEP_MAX: Span = Span::from_secs(1);

impl Owner {
    /// Starts it, unless a leg has only one channel, which somebody else needs.
    pub(super) fn start(
        shared: &Arc<Shared>,
        device: String,
        names: &Arc<[Option<String>]>,
        clock: Clock,
    ) -> Result<Option<Self>, String> {
        if shared.media.iter().flatten().any(|leg| leg.channels_max() < 2) {
            return Ok(None);
        }
        let (shared, names) = (Arc::clone(shared), Arc::clone(names));
        let channel = MirrorChannel::open_for_owner(&shared)?;
        let mut running = Running { shared, channel, device, names };
        let refuse = |error: std::io::Error| format!("start the thread of a mirror: {error}");
        let mut sleeper = Sleeper::new().map_err(refuse)?;
        let bell = sleeper.bell();
        let thread = Thread::spawn("mirror", None, move |stop| {
            running.run(stop, &clock, &mut sleeper);
        });
        Ok(Some(Self { thread: thread.map_err(refuse)?, bell }))
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.thread.stop_flag().stop();
        self.bell.ring();
    }
}

impl Running {
    fn run(&mut self, stop: &Stop, clock: &Clock, sleeper: &mut Sleeper) {
        if let WakeSource::Descriptor(descriptor) = self.channel.wake_source() {
            // Without it the sleeps are short.
            let _ = sleeper.sources().add(descriptor, 0);
        }
        let mut nothing = Answers::with_capacity(1);
        while !stop.is_stopped() {
            self.channel.poll(clock.now(), &mut nothing);
            self.announce();
            self.sleep(stop, clock, sleeper);
        }
        self.release(clock, sleeper);
        if let WakeSource::Descriptor(descriptor) = self.channel.wake_source() {
            let _ = sleeper.sources().remove(descriptor);
        }
    }

    /// Has the superblocks say that nobody has the mirror open any more, unless that takes too long: then
    /// it is known by the end of the process.
    fn release(&mut self, clock: &Clock, sleeper: &mut Sleeper) {
        if !self.shared.lock().disown() {
            return;
        }
        let (until, never) = (clock.now().after(RELEASE_MAX), Stop::default());
        let mut nothing = Answers::with_capacity(1);
        while clock.now() < until && !self.shared.lock().is_settled() {
            self.channel.look();
            self.channel.poll(clock.now(), &mut nothing);
            self.sleep(&never, clock, sleeper);
        }
        if self.shared.lock().is_released() {
            self.shared.reserved.exclusion.release();
        }
    }

    fn sleep(&mut self, stop: &Stop, clock: &Clock, sleeper: &mut Sleeper) {
        let is_silent = !matches!(self.channel.wake_source(), WakeSource::Descriptor(_));
        sleeper.announce();
        let is_busy = !is_silent && self.channel.arm();
        let left = self.channel.wake_at().since(clock.now()).min(SLEEP_MAX);
        if is_busy || left == Span::default() || stop.is_stopped() {
            sleeper.cancel();
            host::thread::give_way();
        } else {
            sleeper.block(left, &mut Vec::new());
        }
        self.channel.disarm();
    }

    fn announce(&self) {
        let (events, in_sync, legs) = {
            let mut meta = self.shared.lock();
            (meta.events.take(), meta.in_sync.count_ones(), meta.members_count())
        };
        for event in events {
            let name = |leg: u8| self.names.get(usize::from(leg)).cloned().flatten();
            let news = MirrorNews {
                device: self.device.clone(),
                event,
                leg_device: event.leg().and_then(name),
                legs_in_sync: in_sync,
                legs,
            };
            news.announce();
        }
    }
}
