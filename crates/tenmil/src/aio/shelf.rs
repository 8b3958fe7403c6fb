//! Which devices are open: whoever asks for one that is gets the same one, by the claims.
//!
//! ```text
//!   name ── Place ── Weak ──▶ Open ── block::Device ── Descriptor ── channel
//!                              ▲                                        │
//!                              └────────── Lent: until it is closed ────┘
//! ```
//!
//! All of this may block, and runs on the pool.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use base::{
    Answers, Backend, DoorbellCounts, Instant, Limits, Medium, Request, Segment, WakeSource,
};
use block::uri::Uri;
use block::{BounceMemory, Claim, DeviceOptions, MediumError, ShapeOptions, Shaped};
use dma::Regions;
use host::Clock;
use host::pool::{Intake, Job};

use super::device::Closed;
use crate::{KINDS, Refused};

/// All that is open, and the table that resolves its memory.
pub(super) struct Shelf {
    pub(super) regions: Regions,
    clock: Clock,
    places: Mutex<BTreeMap<String, Arc<Place>>>,
}

/// What is open by one name, locked while it is being opened.
pub(super) type Place = Mutex<Weak<Open>>;

/// An open device.
pub(super) struct Open {
    device: block::Device,
}

/// A channel and the device it is of. Where it is dropped it is only let go: it is closed on the
/// pool, or on a thread of its own if that is full or gone.
pub(super) struct Lent {
    parts: Option<Parts>,
    pool: Intake,
}

/// In the order in which it is closed.
struct Parts {
    channel: Box<dyn Backend>,
    _device: Arc<Open>,
    closed: Arc<Closed>,
}

/// What emulated operations, and memory that is not aligned, go through.
const CHUNK_BYTES: u32 = 64 << 10;
const CHUNKS: u16 = 4;

impl Shelf {
    pub(super) fn new(regions: Regions, clock: Clock) -> Self {
        Self { regions, clock, places: Mutex::default() }
    }

    /// A channel of the device that `uri` names, which is opened if it is not open.
    pub(super) fn lend(&self, uri: &Uri, claim: Claim, pool: Intake) -> Result<Lent, Refused> {
        let device = self.open(uri)?;
        let refuse = |text: String| Refused::machine(format!("open {uri}: {text}"));
        let descriptor = device.device.open(claim, "aio");
        let descriptor = descriptor
            .map_err(|refused| Refused::of(refused.blame(), format!("open {uri}: {refused}")))?;
        let chunk_bytes = CHUNK_BYTES.max(descriptor.limits().block_size.next_power_of_two());
        let memory = BounceMemory::new(&self.regions, chunk_bytes, CHUNKS).map_err(of(uri))?;
        let shaped = Shaped::new(&device.device, descriptor, memory, ShapeOptions::default());
        let channel = shaped.map_err(of(uri))?.channel().map_err(refuse)?;
        let parts = Parts { channel, _device: device, closed: Arc::default() };
        Ok(Lent { parts: Some(parts), pool })
    }

    fn open(&self, uri: &Uri) -> Result<Arc<Open>, Refused> {
        let name = uri.to_string();
        let place = self.place(&name);
        let mut place = place.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(open) = place.upgrade() {
            return Ok(open);
        }
        let opener =
            block::Opener { regions: &self.regions, clock: self.clock, seed: 1, more: KINDS };
        let opened = opener.open(uri).map_err(of(uri))?;
        let seed = host::random_seed();
        let options = DeviceOptions::new(self.clock, seed);
        let device = block::Device::new(&name, opened.medium, options).map_err(of(uri))?;
        let open = Arc::new(Open { device });
        *place = Arc::downgrade(&open);
        Ok(open)
    }

    /// The place of a name. Those of devices that are gone are forgotten.
    pub(super) fn place(&self, name: &str) -> Arc<Place> {
        let mut places = self.places();
        let is_used = |place: &Arc<Place>| {
            Arc::strong_count(place) > 1
                || place.try_lock().is_ok_and(|open| open.strong_count() > 0)
        };
        places.retain(|_, place| is_used(place));
        Arc::clone(places.entry(name.to_owned()).or_default())
    }

    fn places(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Place>>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn of(uri: &Uri) -> impl Fn(MediumError) -> Refused + '_ {
    move |error| {
        let (blame, text, name) = (error.blame(), error.to_string(), uri.to_string());
        // Most errors begin with the name.
        let text = text.strip_prefix(&format!("{name}: ")).unwrap_or(&text).to_owned();
        Refused::of(blame, format!("open {name}: {text}"))
    }
}

impl Lent {
    /// What is dropped when it has been closed.
    pub(super) fn closed(&self) -> Arc<Closed> {
        Arc::clone(&self.parts().closed)
    }

    fn parts(&self) -> &Parts {
        self.parts.as_ref().unwrap_or_else(|| unreachable!("they are taken when it is dropped"))
    }

    fn channel(&mut self) -> &mut dyn Backend {
        let parts = self.parts.as_mut();
        &mut *parts.unwrap_or_else(|| unreachable!("they are taken when it is dropped")).channel
    }
}

impl Backend for Lent {
    fn limits(&self) -> &Limits {
        self.parts().channel.limits()
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        self.channel().submit(now, requests, segments)
    }

    fn flush(&mut self) {
        self.channel().flush();
    }

    fn poll(&mut self, now: Instant, answers: &mut Answers) -> usize {
        self.channel().poll(now, answers)
    }

    fn doorbells(&self) -> DoorbellCounts {
        self.parts().channel.doorbells()
    }

    fn wake_at(&self) -> Instant {
        self.parts().channel.wake_at()
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.parts().channel.wake_source()
    }

    fn is_done_by_kernel(&self) -> bool {
        self.parts.as_ref().is_some_and(|parts| parts.channel.is_done_by_kernel())
    }

    fn arm(&mut self) -> bool {
        self.channel().arm()
    }

    fn disarm(&mut self) {
        self.channel().disarm();
    }
}

impl Drop for Lent {
    /// Closing joins threads, shuts controllers down and writes files: not on a reactor.
    fn drop(&mut self) {
        let Some(parts) = self.parts.take() else { return };
        // Where there is no thread to be had at all, it is closed here: late is better than never.
        drop(self.pool.submit_surely(Job::new("close", move || drop(parts))));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};
    use std::time::Duration;

    use base::{Answers, Backend, Instant, Limits, Request, Segment};
    use block::Claim;
    use dma::Regions;
    use host::Clock;
    use host::pool::{Job, Pool};

    use super::{Lent, Shelf};

    /// A channel that tells which thread closes it.
    struct Noted {
        channel: Box<dyn Backend>,
        tell: Sender<std::thread::ThreadId>,
    }

    impl Drop for Noted {
        fn drop(&mut self) {
            self.tell.send(std::thread::current().id()).unwrap();
        }
    }

    impl Backend for Noted {
        fn limits(&self) -> &Limits {
            self.channel.limits()
        }

        fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
            self.channel.submit(now, requests, segments)
        }

        fn poll(&mut self, now: Instant, answers: &mut Answers) -> usize {
            self.channel.poll(now, answers)
        }
    }

    #[test]
    fn whoever_lets_go_of_a_device_does_not_close_it() {
        let shelf = Shelf::new(Regions::new(64), Clock::kernel());
        let (tell, closed) = channel();
        // Each another device: one that is just being closed is still claimed.
        let lend = |name: &str, pool: &Pool| -> Lent {
            let uri = name.parse().unwrap();
            let mut lent = shelf.lend(&uri, Claim::WriteOnce, pool.intake()).unwrap();
            let mut parts = lent.parts.take().unwrap();
            parts.channel = Box::new(Noted { channel: parts.channel, tell: tell.clone() });
            lent.parts = Some(parts);
            lent
        };
        let closes_elsewhere = |lent: Lent| {
            drop(lent);
            let by = closed.recv_timeout(Duration::from_secs(20)).unwrap();
            assert_ne!(by, std::thread::current().id());
        };
        let pool = Pool::new(1, 1);
        closes_elsewhere(lend("ram:1m", &pool));
        let full = lend("ram:2m", &pool);
        let (release, released) = channel::<()>();
        let (begin, begun) = channel();
        let wait = move || {
            begin.send(()).unwrap();
            let _ = released.recv();
        };
        pool.submit(Job::new("held", wait)).unwrap();
        begun.recv().unwrap();
        pool.submit(Job::new("waits", || {})).unwrap();
        closes_elsewhere(full);
        drop(release);
        let late = lend("ram:3m", &pool);
        drop(pool);
        closes_elsewhere(late);
    }
}
