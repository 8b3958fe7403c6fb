//! A disk at its door.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

use base::Medium;
use block::{BounceMemory, Descriptor, Device, MediumError, ShapeOptions, Shaped};
use dma::Regions;
use host::stream::{Address, Door};
use reactor::{Directory, Registration, ThreadPlan};
use vhost::blk::ID_BYTES;

use super::disk::Disk;
use super::guest::Guest;
use super::poller::Host;
use super::post::Bell;
use super::stand::Stand;
use crate::news::News;

/// What is served to whom by whom.
pub struct Plan {
    /// Where it listens: a Unix socket.
    pub door: Door,
    /// What it is.
    pub medium: Arc<dyn Medium>,
    /// Whether nobody may write.
    pub is_read_only: bool,
    /// By what the guest knows it: see [`id`].
    pub id: [u8; ID_BYTES],
    /// Where memory of front ends is entered; a place for each stretch of it.
    pub regions: Regions,
    /// Who serves.
    pub reactors: Arc<Directory>,
}

/// A disk that is served. It is until the reactors end.
#[derive(Debug)]
pub struct Server {
    address: Address,
    queues: u16,
    told: Receiver<News>,
    bell: Arc<Bell>,
}

/// Queues that a front end may have: QEMU makes one for each processor, and wants no fewer.
const QUEUES_MAX: u32 = 64;
/// Messages to the thread at the door: there are none.
const MAILBOX: usize = 16;
/// News that nobody has asked for yet.
const NEWS_MAX: usize = 64;
/// Bytes in a buffer for what a device cannot do by itself, and how many there are.
const BUFFER_BYTES: u32 = 64 << 10;
const BUFFERS: u16 = 4;

/// What takes requests of any length, which is what guests make: a detour around what the device
/// cannot do at once.
///
/// # Errors
///
/// If there is no memory for it.
pub fn shaped(
    device: &Device,
    descriptor: impl Into<Arc<Descriptor>>,
    regions: &Regions,
) -> Result<Arc<dyn Medium>, MediumError> {
    let memory = BounceMemory::new(regions, BUFFER_BYTES, BUFFERS)?;
    Ok(Arc::new(Shaped::new(device, descriptor, memory, ShapeOptions::default())?))
}

/// By what a disk is known that serves what is called `uri`: the same, whoever serves it and when.
pub fn id(uri: &str) -> [u8; ID_BYTES] {
    let number = crate::ublk::signature(uri) >> 8;
    let mut id = [0; ID_BYTES];
    id.copy_from_slice(format!("tenmil{number:014x}").as_bytes());
    id
}

impl Server {
    /// Serves.
    ///
    /// # Errors
    ///
    /// If the medium cannot be such a disk, or what the kernel says.
    pub fn start(plan: Plan) -> Result<Self, String> {
        let Plan { door, medium, is_read_only, id, regions, reactors } = plan;
        let (told, news) = sync_channel(NEWS_MAX);
        let address = door.address().clone();
        let disk = Disk::new(medium.limits(), is_read_only, id)?;
        let queues = u16::try_from(medium.channels_max().clamp(1, QUEUES_MAX)).unwrap_or(1);
        let bell = Arc::new(Bell::default());
        let guest = Guest::new(Stand {
            disk,
            medium,
            queues,
            regions,
            reactors: Arc::clone(&reactors),
            bell: Arc::clone(&bell),
            told,
            untold: 0,
        });
        let host = Host::new(door, guest).map_err(|error| error.to_string())?;
        let woken_by = host.woken_by().map_err(|error| error.to_string())?;
        let registration = Registration::active("disk", woken_by, host);
        let plan = ThreadPlan::new("vhost-user").mailbox(MAILBOX).poller(registration);
        // Before it is polled first: lanes know whom to wake.
        let rung = Arc::clone(&bell);
        let plan = plan.first(move |context| rung.belongs_to(context.handle()));
        reactors.spawn(plan).map_err(|refused| refused.to_string())?;
        Ok(Self { address, queues, told: news, bell })
    }

    /// Where it listens.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Queues that a front end may have.
    pub fn queues(&self) -> u16 {
        self.queues
    }

    /// The medium has another length now: queues go by it, and a front end that can be told is.
    pub fn resized(&self) {
        self.bell.resized();
    }

    /// The next thing that has happened, if something has.
    pub fn next_news(&self) -> Option<News> {
        self.told.try_recv().ok()
    }
}

impl fmt::Debug for Plan {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Plan").field("door", &self.door).finish_non_exhaustive()
    }
}
