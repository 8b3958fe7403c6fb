//! A device at its door.

use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};

use base::Medium;
use ctrl::controller::Subsystem;
use dma::Regions;
use host::Clock;
use host::stream::{Address, Door};
use reactor::{Directory, Handle, Registration, ThreadPlan};

use super::device::{Device, DeviceOptions};
use super::guest::Guest;
use super::lines::Lines;
use super::memory::Maps;
use super::poller::Host;
use crate::news::News;

/// What is served to whom by whom.
pub struct Plan {
    /// Where it listens: a Unix socket.
    pub door: Door,
    /// Its namespaces, from 1 on.
    pub media: Vec<Arc<dyn Medium>>,
    /// What the controller is like.
    pub options: DeviceOptions,
    /// Where memory of clients is entered; a place for each stretch of it.
    pub regions: Regions,
    /// Who serves.
    pub reactors: Arc<Directory>,
    /// What deadlines are counted by: the reactors' own clock.
    pub clock: Clock,
}

/// A device that is served. It is until the reactors end.
pub struct Server {
    address: Address,
    told: Receiver<News>,
    subsystem: Subsystem,
    thread: Handle,
}

/// Messages to a device's thread: there are hardly any.
const MAILBOX: usize = 16;
/// News that nobody has asked for yet.
const NEWS_MAX: usize = 64;

impl Server {
    /// Serves.
    ///
    /// # Errors
    ///
    /// If the controller cannot be as it was asked for, or what the kernel says.
    pub fn start(plan: Plan) -> Result<Self, String> {
        let Plan { door, media, options, regions, reactors, clock } = plan;
        let (tell, told) = sync_channel(NEWS_MAX);
        let address = door.address().clone();
        let maps = Maps::new(regions.clone());
        let lines = Lines::new(options.queues.saturating_add(1));
        let device = Device::new(media, &options, &maps, lines.clone(), &regions, clock.now())?;
        let subsystem = device.subsystem.clone();
        let guest = Guest::new(device, maps, lines, regions, tell);
        let host = Host::new(door, guest).map_err(|error| error.to_string())?;
        let woken_by = host.woken_by().map_err(|error| error.to_string())?;
        let registration = Registration::active("device", woken_by, host);
        let plan = ThreadPlan::new("vfio-user").mailbox(MAILBOX).poller(registration);
        let thread = reactors.spawn(plan).map_err(|refused| refused.to_string())?;
        Ok(Self { address, told, subsystem, thread })
    }

    /// Where it listens.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// A namespace has become longer: the client is told, if there is one.
    pub fn resized(&self, nsid: u32) {
        self.subsystem.resized(nsid);
        // It may sleep, and looks at what was told when it does not.
        self.thread.ring();
    }

    /// The next thing that has happened, if something has.
    pub fn next_news(&self) -> Option<News> {
        self.told.try_recv().ok()
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Server").field("address", &self.address).finish_non_exhaustive()
    }
}

impl fmt::Debug for Plan {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Plan").field("door", &self.door).finish_non_exhaustive()
    }
}
