//! A device that is served, as everybody sees it: the doors, the guests, and whoever asks.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::{Blame, Instant, Limits, Medium, Operation, Support};
use block::{
    BounceMemory, Caps, Claim, Descriptor, Device, Event, Limiter, MediumError, ShapeOptions,
    Shaped, Statistics,
};
use dma::Regions;
use reactor::Handle;

use super::export::Export;
use super::seat::{ConnectionSample, Order, Seat};

/// A device that is served. It holds the device by one claim: as the only writer, or as one reader of
/// several. Every connection has a channel of its own.
pub struct Served {
    export: Arc<Export>,
    uri: String,
    device: Device,
    limiter: Option<Limiter>,
    descriptor: Arc<Descriptor>,
    medium: Arc<dyn Medium>,
    is_shaped: bool,
    seats: Mutex<Vec<Entry>>,
    connections: AtomicU64,
}

/// What is served, and how.
pub struct ServedPlan<'a> {
    /// What clients call it, beside the empty name.
    pub name: String,
    /// What it is, for people.
    pub description: String,
    /// What it is, as it was opened.
    pub uri: String,
    /// The device.
    pub device: &'a Device,
    /// What the device was made with, to be changed while it is served.
    pub limiter: Option<Limiter>,
    /// Whether nobody may write.
    pub is_read_only: bool,
    /// Whether clients may change its size.
    pub lets_resize: bool,
    /// Where memory lies that the device may need requests to go through.
    pub regions: &'a Regions,
}

/// Who is there, and how to wake him.
struct Entry {
    seat: Arc<Seat>,
    home: Option<Handle>,
}

/// Bytes in a buffer for what a device cannot do by itself, and how many a connection has.
const BUFFER_BYTES: u32 = 64 << 10;
const BUFFERS: u16 = 4;

impl Served {
    /// Opens the device.
    ///
    /// # Errors
    ///
    /// If somebody has a claim that does not go with ours, such a device cannot be served, or there
    /// is no memory.
    pub fn new(plan: ServedPlan<'_>) -> Result<Self, MediumError> {
        let ServedPlan { name, description, uri, device, limiter, is_read_only, .. } = plan;
        let (lets_resize, regions) = (plan.lets_resize, plan.regions);
        let claim = if is_read_only { Claim::ReadShared } else { Claim::WriteOnce };
        let descriptor = device
            .open(claim, "nbd")
            .map_err(|refused| MediumError::new(refused.blame(), refused.to_string()))?;
        let descriptor = Arc::new(descriptor);
        if lets_resize && !descriptor.is_resizable() {
            let text = "its size cannot be changed, expected a file that one may write";
            return Err(MediumError::new(Blame::Caller, text));
        }
        let is_shaped = needs_shaping(&descriptor.limits());
        let medium: Arc<dyn Medium> = if is_shaped {
            let memory = BounceMemory::new(regions, BUFFER_BYTES, BUFFERS)?;
            let options = ShapeOptions::default();
            Arc::new(Shaped::new(device, Arc::clone(&descriptor), memory, options)?)
        } else {
            Arc::clone(&descriptor) as Arc<dyn Medium>
        };
        let export = Export::new(name, description, medium.limits(), is_read_only)
            .map_err(|text| MediumError::new(Blame::Caller, text))?;
        let zeroes_fast = descriptor.limits().support.has(Operation::WriteZeroes);
        let export = if zeroes_fast { export } else { export.with_slow_zeroes() };
        let export = if lets_resize { export.with_resize() } else { export };
        Ok(Self {
            export: Arc::new(export),
            uri,
            device: device.clone(),
            limiter,
            descriptor,
            medium,
            is_shaped,
            seats: Mutex::default(),
            connections: AtomicU64::new(0),
        })
    }

    /// What clients are told of it.
    pub fn export(&self) -> &Arc<Export> {
        &self.export
    }

    /// What it is, as it was opened.
    pub fn uri(&self) -> &str {
        &self.uri
    }

    /// What connections open channels of.
    pub fn medium(&self) -> &Arc<dyn Medium> {
        &self.medium
    }

    /// Whether requests are shaped before they reach the device.
    pub fn is_shaped(&self) -> bool {
        self.is_shaped
    }

    /// What all connections together have had done, those that have gone too.
    pub fn statistics(&self) -> Statistics {
        self.device.statistics()
    }

    /// How many have ever been connected.
    pub fn connections_ever(&self) -> u64 {
        self.connections.load(Ordering::Relaxed)
    }

    /// Who is connected.
    pub fn connections(&self) -> Vec<ConnectionSample> {
        self.seats().iter().map(|entry| entry.seat.sample()).collect()
    }

    /// Has a connection end: what is under way is answered, and nothing more is taken. False if there
    /// is none of that number.
    pub fn disconnect(&self, connection: u64) -> bool {
        let seats = self.seats();
        let found = seats.iter().find(|entry| entry.seat.id() == connection);
        if let Some(entry) = found {
            entry.order(Order::Leave);
        }
        found.is_some()
    }

    /// What all connections together are given.
    pub fn caps(&self) -> Caps {
        self.limiter.as_ref().map_or_else(Caps::default, Limiter::caps)
    }

    /// Changes what they are given. False if the device was made without limits.
    pub fn limit(&self, now: Instant, caps: Caps) -> bool {
        let Some(limiter) = &self.limiter else { return false };
        limiter.set(now, caps);
        true
    }

    /// Makes the device so long. Blocks: what is under way past a new end is waited for.
    ///
    /// # Errors
    ///
    /// If it cannot be that long; then it is as long as it was.
    pub fn resize(&self, size_bytes: u64) -> Result<(), MediumError> {
        let block_size = u64::from(self.export.block_size());
        let refuse = |text| MediumError::new(Blame::Caller, text);
        if !size_bytes.is_multiple_of(block_size) {
            let text = format!("resize to {size_bytes} bytes: expected a multiple of {block_size}");
            return Err(refuse(text));
        }
        self.descriptor.resize(size_bytes / block_size).map_err(refuse)?;
        // Before anybody is told of the event: who has asked may use it as soon as he is answered.
        self.export.resize(self.descriptor.limits().block_count);
        Ok(())
    }

    /// Takes the device away: what is under way is answered within a second, and everybody is sent
    /// away.
    pub fn remove(&self) {
        self.device.remove();
    }

    /// What happens to the device.
    pub(super) fn descriptor(&self) -> &Descriptor {
        &self.descriptor
    }

    /// Does what an event of the device asks for.
    pub(super) fn obey(&self, event: &Event) {
        match event {
            Event::Resized { block_count } => self.export.resize(*block_count),
            Event::Removed => {
                self.seats().iter().for_each(|entry| entry.order(Order::DeviceRemoved));
            }
            // Nobody knows what was lost, so everything is looked at again.
            Event::Overflowed { .. } => self.export.resize(self.device.limits().block_count),
            Event::MediumError { .. } | Event::MediumChanged => {}
        }
    }

    /// A number for somebody who comes.
    pub(super) fn next_connection(&self) -> u64 {
        self.connections.fetch_add(1, Ordering::Relaxed)
    }

    /// Somebody has come.
    pub(super) fn enter(&self, seat: Arc<Seat>) {
        self.seats().push(Entry { seat, home: None });
    }

    /// Where he lives.
    pub(super) fn settle(&self, connection: u64, home: Handle) {
        let mut seats = self.seats();
        if let Some(entry) = seats.iter_mut().find(|entry| entry.seat.id() == connection) {
            // For what was ordered before anybody could be woken.
            home.ring();
            entry.home = Some(home);
        }
    }

    /// Somebody has gone.
    pub(super) fn leave(&self, connection: u64) {
        self.seats().retain(|entry| entry.seat.id() != connection);
    }

    fn seats(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.seats.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    fn order(&self, order: Order) {
        self.seat.order(order);
        if let Some(home) = &self.home {
            home.ring();
        }
    }
}

/// Whether there is something that clients may ask for and the device cannot do as it is. Connections
/// cut their requests to the size of the device's by themselves, and their memory is aligned.
fn needs_shaping(limits: &Limits) -> bool {
    let has = |operation| limits.support.has(operation);
    let lacks = |operation, from: Support| {
        !has(operation) && limits.support.common(from) == from && limits.metadata_size == 0
    };
    limits.optimal_boundary_blocks > 0
        || lacks(Operation::WriteZeroes, Support::of(&[Operation::Write]))
        || lacks(Operation::Verify, Support::of(&[Operation::Read]))
}

impl fmt::Debug for Served {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { export, device, is_shaped, .. } = self;
        out.debug_struct("Served")
            .field("export", export)
            .field("device", device)
            .field("is_shaped", is_shaped)
            .finish_non_exhaustive()
    }
}
