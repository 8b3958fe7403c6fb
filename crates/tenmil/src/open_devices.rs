//! Open devices: opening the same URI again shares the device, if the claims are compatible.
//!
//! ```text
//!   URI ── RegistryEntry ── Weak ──▶ OpenDevice ◀── DeviceClaim ◀── ChannelLease: until closed
//!                                                        ▲
//!                                                        └── namespace or export of a server
//! ```
//!
//! Every function here may block and runs on the thread pool.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tenmil_base::{
    BlockDevice, ChannelWakeup, CompletionBatch, Error, Instant, IoChannel, Limits, Request,
    Segment,
};
use tenmil_block::uri::Uri;
use tenmil_block::{
    AdaptationOptions, AdaptedDevice, Bdev, BdevDescriptor, BdevOptions, BounceBufferAllocator,
    ClaimConflict, ClaimError,
};
use tenmil_dma::RegionTable;
use tenmil_linux::Clock;
use tenmil_linux::thread_pool::PoolHandle;

use crate::KINDS;
use crate::access::Access;
use crate::blocking;
use crate::device::CloseNotifier;

/// Registry of open devices, and the region table for their memory.
pub(crate) struct OpenDevices {
    pub(crate) regions: RegionTable,
    pub(crate) clock: Clock,
    entries: Mutex<BTreeMap<String, Arc<RegistryEntry>>>,
}

/// Device open under one name. Locked while the device is being opened.
pub(crate) type RegistryEntry = Mutex<Weak<OpenDevice>>;

/// An open device.
pub(crate) struct OpenDevice {
    pub(crate) device: Bdev,
    /// One line: what the device is.
    pub(crate) description: String,
    /// Whether its files were opened read-only, so that no later opening can write.
    is_read_only: bool,
}

/// Claim on an open device, shared by the handles of one opening and the exports of them. Fields in
/// the order in which they are dropped.
pub(crate) struct DeviceClaim {
    pub(crate) descriptor: Arc<BdevDescriptor>,
    pub(crate) open: Arc<OpenDevice>,
    pub(crate) regions: RegionTable,
}

/// I/O channel together with its device. Dropping it only schedules the close, on the thread pool
/// or on a new thread if the pool is full or has ended.
pub(crate) struct ChannelLease {
    parts: Option<OpenDeviceParts>,
    pool: PoolHandle,
}

/// Fields in the order in which they are dropped.
struct OpenDeviceParts {
    channel: Box<dyn IoChannel>,
    claim: Arc<DeviceClaim>,
    closed: Arc<CloseNotifier>,
}

/// Bounce buffers for emulated operations and for unaligned memory.
const CHUNK_BYTES: u32 = 64 << 10;
const CHUNKS: u16 = 4;

/// Name of the holder of all claims.
const HOLDER: &str = "the program";

impl OpenDevices {
    pub(crate) fn new(regions: RegionTable, clock: Clock) -> Self {
        Self { regions, clock, entries: Mutex::default() }
    }

    /// Claims the device that `uri` names and opens a channel of it. Opens the device first if
    /// necessary.
    pub(crate) fn open(
        &self,
        uri: &Uri,
        access: Access,
        pool: PoolHandle,
    ) -> Result<ChannelLease, Error> {
        let name = uri.to_string();
        let open = self.find_or_open(uri, &name, access)?;
        let has_files_to_read = open.is_read_only && access != Access::ReadOnly;
        if has_files_to_read {
            let text = format!(
                "open {name} {access}: it is open with its files read-only, expected it to be opened \
                 read-write first"
            );
            let hint = "Open it with Access::ReadWrite before Access::ReadOnly, or close it first.";
            return Err(Error::usage(text).with_hint(hint));
        }
        self.lease_channel(open, &name, access, pool)
    }

    /// Claims a device of the program's own and opens a channel of it.
    pub(crate) fn attach(
        &self,
        name: &str,
        medium: Arc<dyn BlockDevice>,
        access: Access,
        pool: PoolHandle,
    ) -> Result<ChannelLease, Error> {
        let options = BdevOptions::new(self.clock, tenmil_linux::random_seed());
        let device = Bdev::new(name, medium, options)
            .map_err(|why| with_device_name("attach", name, &why))?;
        let description = "device of the program".to_owned();
        let open = OpenDevice { device, description, is_read_only: false };
        self.lease_channel(Arc::new(open), name, access, pool)
    }

    fn lease_channel(
        &self,
        open: Arc<OpenDevice>,
        name: &str,
        access: Access,
        pool: PoolHandle,
    ) -> Result<ChannelLease, Error> {
        let descriptor = open.device.open(access.to_claim(), HOLDER);
        let descriptor =
            Arc::new(descriptor.map_err(|why| claim_conflict_error(name, access, &why))?);
        let refuse = |why: Error| with_device_name("open", name, &why);
        let chunk_bytes = CHUNK_BYTES.max(descriptor.limits().block_size.next_power_of_two());
        let memory =
            BounceBufferAllocator::new(&self.regions, chunk_bytes, CHUNKS).map_err(refuse)?;
        let (shared, options) = (Arc::clone(&descriptor), AdaptationOptions::default());
        let adapted = AdaptedDevice::new(&open.device, shared, memory, options).map_err(refuse)?;
        let channel = adapted.channel().map_err(refuse)?;
        let regions = self.regions.clone();
        let claim = Arc::new(DeviceClaim { descriptor, open, regions });
        let parts = OpenDeviceParts { channel, claim, closed: Arc::default() };
        Ok(ChannelLease { parts: Some(parts), pool })
    }

    fn find_or_open(
        &self,
        uri: &Uri,
        name: &str,
        access: Access,
    ) -> Result<Arc<OpenDevice>, Error> {
        let entry = self.registry_entry(name);
        let mut entry = entry.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(open) = entry.upgrade() {
            return Ok(open);
        }
        // Files are opened read-only if nothing else is needed: they may be write-protected.
        let to_read = uri.clone().read_only();
        let is_read_only = access == Access::ReadOnly && to_read != *uri;
        let opener = tenmil_block::Opener {
            regions: &self.regions,
            clock: self.clock,
            seed: 1,
            kinds: KINDS,
        };
        // A refused opening leaves no file behind that it has created.
        let opened = tenmil_linux::storage_file::create_files_if_ok(|| {
            opener.open(if is_read_only { &to_read } else { uri })
        });
        let opened = opened.map_err(|why| with_device_name("open", name, &why))?;
        let options = BdevOptions::new(self.clock, tenmil_linux::random_seed());
        let device = Bdev::new(name, opened.medium, options);
        let device = device.map_err(|why| with_device_name("open", name, &why))?;
        let open = Arc::new(OpenDevice { device, description: opened.description, is_read_only });
        *entry = Arc::downgrade(&open);
        Ok(open)
    }

    /// Registry entry of a name. Entries of closed devices are removed.
    pub(crate) fn registry_entry(&self, name: &str) -> Arc<RegistryEntry> {
        let mut entries = self.lock_entries();
        let is_used = |entry: &Arc<RegistryEntry>| {
            Arc::strong_count(entry) > 1
                || entry.try_lock().is_ok_and(|open| open.strong_count() > 0)
        };
        entries.retain(|_, entry| is_used(entry));
        Arc::clone(entries.entry(name.to_owned()).or_default())
    }

    fn lock_entries(&self) -> MutexGuard<'_, BTreeMap<String, Arc<RegistryEntry>>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The error with what was being done and the name of the device. Most errors begin with the name, and
/// some with the operation.
pub(crate) fn with_device_name(doing: &str, name: &str, error: &Error) -> Error {
    let text = error.text.strip_prefix(&format!("{doing} ")).unwrap_or(&error.text);
    let text = text.strip_prefix(&format!("{name}: ")).unwrap_or(text);
    Error { text: format!("{doing} {name}: {text}"), ..error.clone() }
}

/// Error of an opening that conflicts with others.
fn claim_conflict_error(name: &str, access: Access, error: &ClaimError) -> Error {
    let text = match &error.found {
        ClaimConflict::Holders(holders) => {
            let mut open: Vec<String> =
                holders.iter().map(|holder| Access::from_claim(holder.claim).to_string()).collect();
            open.dedup();
            let (open, expected) = (open.join(" and "), access.compatible_openings());
            format!("open {name} {access}: it is open {open} in this runtime, expected {expected}")
        }
        ClaimConflict::Removed | ClaimConflict::Machine(_) => format!("open {name}: {error}"),
    };
    let hint = "Clone the `Device` that is open: clones share one opening. A device is closed after its \
                last clone has been dropped; `Device::close` waits for that.";
    Error::new(error.category(), text).with_hint(hint)
}

impl ChannelLease {
    /// Claim on the device.
    pub(crate) fn claim(&self) -> &Arc<DeviceClaim> {
        &self.open_parts().claim
    }

    /// Notifier that is dropped after the channel has been closed.
    pub(crate) fn close_notifier(&self) -> Arc<CloseNotifier> {
        Arc::clone(&self.open_parts().closed)
    }

    fn open_parts(&self) -> &OpenDeviceParts {
        self.parts.as_ref().unwrap_or_else(|| unreachable!("the parts are taken only by drop"))
    }

    fn channel(&mut self) -> &mut dyn IoChannel {
        let parts = self.parts.as_mut();
        &mut *parts.unwrap_or_else(|| unreachable!("the parts are taken only by drop")).channel
    }
}

impl IoChannel for ChannelLease {
    fn limits(&self) -> &Limits {
        self.open_parts().channel.limits()
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        self.channel().submit(now, requests, segments)
    }

    fn flush_submissions(&mut self) {
        self.channel().flush_submissions();
    }

    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        self.channel().poll(now, completions)
    }
}

impl ChannelWakeup for ChannelLease {
    fn below(&self) -> Option<&dyn IoChannel> {
        Some(&*self.open_parts().channel)
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
        drop(self.pool.submit_reliable(blocking::blocking_task("close", move || drop(parts))));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Sender, channel};
    use std::time::Duration;

    use tenmil_base::{
        ChannelWakeup, CompletionBatch, Instant, IoChannel, Limits, Request, Segment,
    };
    use tenmil_dma::RegionTable;
    use tenmil_linux::Clock;
    use tenmil_linux::thread_pool::{BlockingTask, ThreadPool};

    use super::{ChannelLease, OpenDevices};
    use crate::access::Access;

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

        fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
            self.channel.poll(now, completions)
        }
    }

    impl ChannelWakeup for Noted {}

    #[test]
    fn dropping_a_device_closes_it_on_another_thread() {
        let devices = OpenDevices::new(RegionTable::new(64), Clock::on_kernel_clock());
        let (tell, closed) = channel();
        // Each test uses another device, since one that is being closed is still claimed.
        let lease = |name: &str, pool: &ThreadPool| -> ChannelLease {
            let uri = name.parse().unwrap();
            let mut leased = devices.open(&uri, Access::ReadWrite, pool.handle()).unwrap();
            let mut parts = leased.parts.take().unwrap();
            parts.channel = Box::new(Noted { channel: parts.channel, tell: tell.clone() });
            leased.parts = Some(parts);
            leased
        };
        let closes_elsewhere = |leased: ChannelLease| {
            drop(leased);
            let by = closed.recv_timeout(Duration::from_secs(20)).unwrap();
            assert_ne!(by, std::thread::current().id());
        };
        let pool = ThreadPool::new(1, 1);
        closes_elsewhere(lease("ram:1m", &pool));
        let full = lease("ram:2m", &pool);
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
        let late = lease("ram:3m", &pool);
        drop(pool);
        closes_elsewhere(late);
    }
}
