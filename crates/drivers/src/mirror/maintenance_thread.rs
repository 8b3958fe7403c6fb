//! Maintenance thread of an open mirror: resynchronizes without I/O of clients, and emits events.
//!
//! It ends after the last channel of the mirror, and then releases ownership in the superblocks.
//! It has a channel of its own, and is the only one that performs maintenance tasks and writes
//! superblocks. The channel of a client is polled only while the client waits for completions, and would
//! leave them unfinished.
//! It sleeps until the mirror has work to do, a leg completes a request, or a second has passed.

use std::sync::Arc;

use tenmil_base::{ChannelWakeup, CompletionBatch, Error, IoChannel, Span, WakeSource};
use tenmil_linux::{Clock, NamedThread, Notifier, Sleeper, StopFlag};

use super::events::MirrorNotice;
use super::mirror_channel::MirrorChannel;
use super::mirror_shared::MirrorShared;

/// The maintenance thread. Dropping this stops it.
pub(super) struct MaintenanceThread {
    thread: NamedThread<()>,
    waker: Notifier,
}

struct MaintenanceLoop {
    shared: Arc<MirrorShared>,
    channel: MirrorChannel,
    device: String,
    names: Arc<[Option<String>]>,
}

/// Maximum time of the last commit.
const RELEASE_MAX: Span = Span::from_secs(10);
/// Maximum sleep of the thread.
const SLEEP_MAX: Span = Span::from_secs(1);

impl MaintenanceThread {
    /// Starts the thread, unless a leg has only one channel, which clients need.
    pub(super) fn start(
        shared: &Arc<MirrorShared>,
        device: String,
        names: &Arc<[Option<String>]>,
        clock: Clock,
    ) -> Result<Option<Self>, Error> {
        if shared.media.iter().flatten().any(|leg| leg.channels_max() < 2) {
            return Ok(None);
        }
        let (shared, names) = (Arc::clone(shared), Arc::clone(names));
        let channel = MirrorChannel::open_for_maintenance(&shared)?;
        let mut running = MaintenanceLoop { shared, channel, device, names };
        let refuse = |error: std::io::Error| format!("start the thread of a mirror: {error}");
        let mut sleeper = Sleeper::new().map_err(refuse).map_err(Error::environment)?;
        let waker = sleeper.notifier();
        let thread = NamedThread::spawn("mirror", None, move |stop| {
            running.run(stop, &clock, &mut sleeper);
        });
        Ok(Some(Self { thread: thread.map_err(refuse).map_err(Error::environment)?, waker }))
    }
}

impl Drop for MaintenanceThread {
    fn drop(&mut self) {
        self.thread.stop_flag().set();
        self.waker.notify();
    }
}

impl MaintenanceLoop {
    fn run(&mut self, stop: &StopFlag, clock: &Clock, sleeper: &mut Sleeper) {
        if let WakeSource::Descriptor(descriptor) = self.channel.wake_source() {
            // Without it, sleeps are short.
            let _ = sleeper.sources().add_source(descriptor, 0);
        }
        let mut nothing = CompletionBatch::with_capacity(1);
        while !stop.is_stopped() {
            self.channel.poll(clock.now(), &mut nothing);
            self.emit_events();
            self.sleep_until_due(stop, clock, sleeper);
        }
        self.release_ownership(clock, sleeper);
        if let WakeSource::Descriptor(descriptor) = self.channel.wake_source() {
            let _ = sleeper.sources().remove_source(descriptor);
        }
    }

    /// Releases ownership in the superblocks, unless that takes too long. Then the exit of the process
    /// proves that the mirror is free.
    fn release_ownership(&mut self, clock: &Clock, sleeper: &mut Sleeper) {
        if !self.shared.lock().release_ownership() {
            return;
        }
        let (until, never) = (clock.now().after(RELEASE_MAX), StopFlag::default());
        let mut nothing = CompletionBatch::with_capacity(1);
        while clock.now() < until && !self.shared.lock().has_no_pending_commit() {
            self.channel.start_commit_if_needed();
            self.channel.poll(clock.now(), &mut nothing);
            self.sleep_until_due(&never, clock, sleeper);
        }
        if self.shared.lock().is_ownership_released() {
            self.shared.reserved.exclusion.release();
        }
    }

    fn sleep_until_due(&mut self, stop: &StopFlag, clock: &Clock, sleeper: &mut Sleeper) {
        // Announced before arming: a wake-up in between ends the sleep at once.
        let is_silent = !matches!(self.channel.wake_source(), WakeSource::Descriptor(_));
        sleeper.announce_sleep();
        let is_busy = !is_silent && self.channel.arm();
        let left = self.channel.wake_at().since(clock.now()).min(SLEEP_MAX);
        if is_busy || left == Span::default() || stop.is_stopped() {
            sleeper.cancel_sleep();
            tenmil_linux::named_thread::yield_cpu();
        } else {
            sleeper.sleep_until_ready(left, &mut Vec::new());
        }
        self.channel.disarm();
    }

    fn emit_events(&self) {
        let (events, in_sync, legs) = {
            let mut meta = self.shared.lock();
            (meta.events.take_if_subscribed(), meta.in_sync.count_ones(), meta.leg_count())
        };
        for event in events {
            let name = |leg: u8| self.names.get(usize::from(leg)).cloned().flatten();
            let new_events = MirrorNotice {
                device: self.device.clone(),
                event,
                leg_device: event.leg().and_then(name),
                legs_in_sync: in_sync,
                legs,
            };
            new_events.emit();
        }
    }
}
