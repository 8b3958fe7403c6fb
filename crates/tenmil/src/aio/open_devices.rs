//! Registry of open devices: opening the same URI again shares the device, if the claims are
//! compatible.
//!
//! ```text
//!   URI ── RegistryEntry ── Weak ──▶ OpenDevice ── tenmil_block::Device ── Descriptor ── channel
//!                                       ▲                                            │
//!                                       └───────── ChannelLease: until closed ───────┘
//! ```
//!
//! Every function here may block and runs on the thread pool.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tenmil_base::{
    BlockDevice, ChannelWakeup, CompletionBatch, Instant, IoChannel, Limits, Request, Segment,
};
use tenmil_block::uri::Uri;
use tenmil_block::{AdaptOptions, AdaptedDevice, BdevOptions, BounceMemory, Claim};
use tenmil_dma::RegionTable;
use tenmil_linux::Clock;
use tenmil_linux::thread_pool::{BlockingTask, PoolHandle};

use super::device::CloseNotifier;
use crate::KINDS;
use tenmil_base::Error;

/// Registry of open devices, and the region table for their memory.
pub(super) struct OpenDevices {
    pub(super) regions: RegionTable,
    clock: Clock,
    places: Mutex<BTreeMap<String, Arc<RegistryEntry>>>,
}

/// Device open under one name. Locked while the device is being opened.
pub(super) type RegistryEntry = Mutex<Weak<OpenDevice>>;

/// An open device.
pub(super) struct OpenDevice {
    device: tenmil_block::Bdev,
}

/// I/O channel together with its device. Dropping it only schedules the close, on the thread pool
/// or on a new thread if the pool is full or gone.
pub(super) struct ChannelLease {
    parts: Option<OpenDeviceParts>,
    pool: PoolHandle,
}

/// Fields in the order in which they are dropped.
struct OpenDeviceParts {
    channel: Box<dyn IoChannel>,
    _device: Arc<OpenDevice>,
    closed: Arc<CloseNotifier>,
}

/// Bounce buffers for emulated operations and for unaligned memory.
const CHUNK_BYTES: u32 = 64 << 10;
const CHUNKS: u16 = 4;

impl OpenDevices {
    pub(super) fn new(regions: RegionTable, clock: Clock) -> Self {
        Self { regions, clock, places: Mutex::default() }
    }

    /// Creates a channel of the device that `uri` names, and opens the device first if necessary.
    pub(super) fn lend(
        &self,
        uri: &Uri,
        claim: Claim,
        pool: PoolHandle,
    ) -> Result<ChannelLease, Error> {
        let device = self.open(uri)?;
        let refuse = |error: Error| error.during(format_args!("open {uri}"));
        let descriptor = device.device.open(claim, "aio");
        let descriptor = descriptor
            .map_err(|refused| Error::new(refused.category(), format!("open {uri}: {refused}")))?;
        let chunk_bytes = CHUNK_BYTES.max(descriptor.limits().block_size.next_power_of_two());
        let memory = BounceMemory::new(&self.regions, chunk_bytes, CHUNKS).map_err(of(uri))?;
        let shaped =
            AdaptedDevice::new(&device.device, descriptor, memory, AdaptOptions::default());
        let channel = shaped.map_err(of(uri))?.channel().map_err(refuse)?;
        let parts = OpenDeviceParts { channel, _device: device, closed: Arc::default() };
        Ok(ChannelLease { parts: Some(parts), pool })
    }

    fn open(&self, uri: &Uri) -> Result<Arc<OpenDevice>, Error> {
        let name = uri.to_string();
        let place = self.place(&name);
        let mut place = place.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(open) = place.upgrade() {
            return Ok(open);
        }
        let opener = tenmil_block::Opener {
            regions: &self.regions,
            clock: self.clock,
            seed: 1,
            kinds: KINDS,
        };
        let opened = opener.open(uri).map_err(of(uri))?;
        let seed = tenmil_linux::random_seed();
        let options = BdevOptions::new(self.clock, seed);
        let device = tenmil_block::Bdev::new(&name, opened.medium, options).map_err(of(uri))?;
        let open = Arc::new(OpenDevice { device });
        *place = Arc::downgrade(&open);
        Ok(open)
    }

    /// Registry entry of a name. Entries of closed devices are removed.
    pub(super) fn place(&self, name: &str) -> Arc<RegistryEntry> {
        let mut places = self.places();
        let is_used = |place: &Arc<RegistryEntry>| {
            Arc::strong_count(place) > 1
                || place.try_lock().is_ok_and(|open| open.strong_count() > 0)
        };
        places.retain(|_, place| is_used(place));
        Arc::clone(places.entry(name.to_owned()).or_default())
    }

    fn places(&self) -> MutexGuard<'_, BTreeMap<String, Arc<RegistryEntry>>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn of(uri: &Uri) -> impl Fn(Error) -> Error + '_ {
    move |error| {
        let (category, text, name) = (error.category(), error.to_string(), uri.to_string());
        // Most errors begin with the name.
        let text = text.strip_prefix(&format!("{name}: ")).unwrap_or(&text).to_owned();
        Error::new(category, format!("open {name}: {text}"))
    }
}

impl ChannelLease {
    /// Notifier that is dropped after the channel has been closed.
    pub(super) fn closed(&self) -> Arc<CloseNotifier> {
        Arc::clone(&self.parts().closed)
    }

    fn parts(&self) -> &OpenDeviceParts {
        self.parts.as_ref().unwrap_or_else(|| unreachable!("they are taken when it is dropped"))
    }

    fn channel(&mut self) -> &mut dyn IoChannel {
        let parts = self.parts.as_mut();
        &mut *parts.unwrap_or_else(|| unreachable!("they are taken when it is dropped")).channel
    }
}

impl IoChannel for ChannelLease {
    fn limits(&self) -> &Limits {
        self.parts().channel.limits()
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        self.channel().submit(now, requests, segments)
    }

    fn poll(&mut self, now: Instant, answers: &mut CompletionBatch) -> usize {
        self.channel().poll(now, answers)
    }
}

impl ChannelWakeup for ChannelLease {
    fn below(&self) -> Option<&dyn IoChannel> {
        Some(&*self.parts().channel)
    }

    fn below_mut(&mut self) -> Option<&mut dyn IoChannel> {
        Some(self.channel())
    }
}

impl Drop for ChannelLease {
    /// Closing joins threads, shuts down controllers and writes files, which must not run on a
    /// reactor.
    fn drop(&mut self) {
        let Some(parts) = self.parts.take() else { return };
        // If no thread can be started at all, the channel is closed here.
        drop(self.pool.submit_reliable(BlockingTask::new("close", move || drop(parts))));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};
    use std::time::Duration;

    use tenmil_base::{
        ChannelWakeup, CompletionBatch, Instant, IoChannel, Limits, Request, Segment,
    };
    use tenmil_block::Claim;
    use tenmil_dma::RegionTable;
    use tenmil_linux::Clock;
    use tenmil_linux::thread_pool::{BlockingTask, ThreadPool};

    use super::{ChannelLease, OpenDevices};

    /// A channel that reports the thread that closes it.
    struct Noted {
        channel: Box<dyn IoChannel>,
        tell: Sender<std::thread::ThreadId>,
    }

    impl Drop for Noted {
        fn drop(&mut self) {
            self.tell.send(std::thread::current().id()).unwrap();
        }
    }

    impl IoChannel for Noted {
        fn limits(&self) -> &Limits {
            self.channel.limits()
        }

        fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
            self.channel.submit(now, requests, segments)
        }

        fn poll(&mut self, now: Instant, answers: &mut CompletionBatch) -> usize {
            self.channel.poll(now, answers)
        }
    }

    impl ChannelWakeup for Noted {}

    #[test]
    fn whoever_lets_go_of_a_device_does_not_close_it() {
        let shelf = OpenDevices::new(RegionTable::new(64), Clock::kernel());
        let (tell, closed) = channel();
        // Each test uses another device, since one that is being closed is still claimed.
        let lend = |name: &str, pool: &ThreadPool| -> ChannelLease {
            let uri = name.parse().unwrap();
            let mut lent = shelf.lend(&uri, Claim::WriteOnce, pool.handle()).unwrap();
            let mut parts = lent.parts.take().unwrap();
            parts.channel = Box::new(Noted { channel: parts.channel, tell: tell.clone() });
            lent.parts = Some(parts);
            lent
        };
        let closes_elsewhere = |lent: ChannelLease| {
            drop(lent);
            let by = closed.recv_timeout(Duration::from_secs(20)).unwrap();
            assert_ne!(by, std::thread::current().id());
        };
        let pool = ThreadPool::new(1, 1);
        closes_elsewhere(lend("ram:1m", &pool));
        let full = lend("ram:2m", &pool);
        let (release, released) = channel::<()>();
        let (begin, begun) = channel();
        let wait = move || {
            begin.send(()).unwrap();
            let _ = released.recv();
        };
        pool.submit(BlockingTask::new("held", wait)).unwrap();
        begun.recv().unwrap();
        pool.submit(BlockingTask::new("waits", || {})).unwrap();
        closes_elsewhere(full);
        drop(release);
        let late = lend("ram:3m", &pool);
        drop(pool);
        closes_elsewhere(late);
    }
}
