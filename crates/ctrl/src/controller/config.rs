//! What a subsystem and its controllers are made of, decided at start.

use std::sync::Arc;

use base::{Medium, Span};

use super::subsystem::Stored;
use crate::namespace::{CacheVoucher, Identity};

/// A subsystem: what all its controllers share.
pub struct SubsystemConfig {
    /// NVMe Qualified Name, at most 223 bytes (Base 2.1 §4.7).
    pub nqn: String,
    /// Serial number: at most 20 printable characters.
    pub serial: String,
    /// Model number: at most 40.
    pub model: String,
    /// Firmware revision: at most 8.
    pub firmware: String,
    /// The highest namespace identifier there may be (NN).
    pub nsid_max: u32,
    /// The namespaces there are from the start.
    pub namespaces: Vec<NamespaceConfig>,
    /// Where new namespaces come from. Without it Namespace Management is not offered.
    pub pool: Option<Box<dyn MediumPool>>,
    /// Whether reservations are offered.
    pub reservations: bool,
    /// How many ANA groups there are; zero means that ANA is not offered.
    pub ana_groups: u32,
}

/// One namespace.
pub struct NamespaceConfig {
    /// Its identifier, or the lowest that is free.
    pub nsid: Option<u32>,
    /// Where its blocks are.
    pub medium: Arc<dyn Medium>,
    /// Bytes in a logical block, or as many as the medium's have.
    pub block_size: Option<u32>,
    /// Names by which hosts recognise it; without any, a UUID is made from the subsystem's NQN and
    /// the namespace identifier, so that it is the same after a restart.
    pub identity: Identity,
    /// Whether more than one controller may have it attached.
    pub is_shared: bool,
    /// Whether controllers have it attached from the start; a private one only the first.
    pub is_attached: bool,
    /// Its ANA group, from 1; means nothing without ANA.
    pub ana_group: u32,
    /// Whether it is write protected for ever (Base 2.1 §8.1.16).
    pub is_read_only: bool,
    /// What survives of its reservations.
    pub persistence: Persistence,
    /// What says to hosts that come back that its volatile cache has lost nothing.
    pub cache: Option<Arc<CacheVoucher>>,
}

/// What a loss of power leaves of the reservations of a namespace whose hosts want them to persist
/// (PTPL, Base 2.1 §8.1.22.1).
#[derive(Default)]
pub enum Persistence {
    /// All of it, as long as the subsystem is not dropped: its loss of power is a game.
    #[default]
    Simulated,
    /// What was written down here.
    Kept(Box<dyn Keeper>),
    /// Nothing: hosts are told that there is no such thing.
    None,
}

/// Where the reservations of one namespace are written down. Called with a lock held, perhaps by a
/// thread that polls: it does not wait for anything.
pub trait Keeper: Send {
    /// What had been written down when this keeper was made, if anything had. The error says, in a
    /// line, what was found.
    fn load(&self) -> Result<Option<Vec<u8>>, String>;

    /// Has this written down in place of what was, or that there is nothing; whoever has done it says
    /// so to `stored`, once this has returned. From then on it stays written; if the power goes
    /// before, either that or what was before is there, whole. One record at a time: the next comes
    /// when `stored` is told of this one. It is given back if nobody could be found to write.
    fn store(&mut self, record: Option<Vec<u8>>, stored: Stored) -> Result<(), Stored>;
}

/// Where the media of new namespaces come from.
pub trait MediumPool: Send {
    /// All the room there is, used or not.
    fn capacity_bytes(&self) -> u64;
    /// The block sizes on offer; at least one, in rising order.
    fn block_sizes(&self) -> &[u32];
    /// Makes a medium that reads as zeroes. Dropping the last handle to it gives the room back.
    /// The error says, in a line, what was found and what was expected.
    fn create(&mut self, block_size: u32, block_count: u64) -> Result<Arc<dyn Medium>, String>;
}

/// One controller: what is its own.
#[derive(Clone, Debug)]
pub struct ControllerConfig {
    /// Its identifier within the subsystem: at most FFEFh.
    pub cntlid: u16,
    /// PCI vendor and subsystem vendor, as in the function's configuration space.
    pub pci_vendor: u16,
    /// Entries in the largest I/O queue (CAP.MQES is one less): 2 to 65 536.
    pub queue_entries_max: u32,
    /// Bytes in the largest transfer: a power of two, at least 8192, since MDTS 0 means no limit.
    pub transfer_bytes_max: u32,
    /// I/O queues of each direction that a host may have: 1 to 65 535.
    pub io_queues_max: u16,
    /// Interrupt vectors; zero means that there are none.
    pub vectors: u16,
    /// Asynchronous Event Requests that may be parked: 1 to 256 (AERL is one less).
    pub event_requests_max: u16,
    /// Abort commands that may be outstanding: 1 to 256 (ACL is one less).
    pub aborts_max: u16,
    /// Entries of the error log: 1 to 256 (ELPE is one less).
    pub error_entries: u16,
    /// What the SGL walker of the front end can do (SGLS, Base 2.1 §5.1.13.2.1).
    pub sgls: u32,
    /// Whether Compare followed by Write may be fused.
    pub fused_compare_and_write: bool,
    /// How it is reached.
    pub transport: Transport,
    /// By what it is known to be this one and no other before it under the same identifier. With it,
    /// controllers of the subsystem may reset each other (Base 2.3 §5.4.3).
    pub instance: Option<Instance>,
    /// How warm it says it is.
    pub temperature_kelvin: u16,
    /// The shortest step of the keep-alive timer: a multiple of 100 ms (KAS).
    pub keep_alive_step: Span,
    /// The longest keep-alive time-out that a host may ask for, by Connect or Set Features.
    pub keep_alive_max: Span,
    /// How long a host without a keep-alive time-out may be silent before it is taken for gone; never
    /// does not miss it.
    pub silence_max: Option<Span>,
    /// Bytes the largest firmware image may have.
    pub firmware_bytes_max: u32,
}

/// One life of a controller, which Cross-Controller Reset names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Instance {
    /// Another one for each: not zero (CIU).
    pub uniquifier: u8,
    /// Drawn for each (CIRN).
    pub random: u64,
    /// Resets of other controllers that it may have under way at once (CCRL): not zero.
    pub resets_max: u8,
}

/// How hosts reach a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// Registers and rings in shared memory: queues are created by command and signalled by vector.
    Memory {
        /// Whether the front end knows shadow doorbells.
        doorbell_buffers: bool,
    },
    /// Capsules: queues come with connections (Base 2.1 §5.1.13.2.1, fabrics fields).
    Fabrics {
        /// Bytes in the largest I/O command capsule: a multiple of 16, at least 64 (IOCCSZ).
        command_capsule_bytes: u32,
        /// Data descriptors per command (MSDBD).
        descriptors_max: u8,
        /// How long after the end of an association commands may still take effect (CQT).
        quiesce: Span,
    },
}

impl NamespaceConfig {
    /// A shared namespace over `medium`, attached everywhere, its other properties by default.
    pub fn new(medium: Arc<dyn Medium>) -> Self {
        Self {
            nsid: None,
            medium,
            block_size: None,
            identity: Identity::default(),
            is_shared: true,
            is_attached: true,
            ana_group: 1,
            is_read_only: false,
            persistence: Persistence::default(),
            cache: None,
        }
    }
}

impl SubsystemConfig {
    /// A subsystem of these namespaces, named after its serial number.
    pub fn new(serial: &str, namespaces: Vec<NamespaceConfig>) -> Self {
        Self {
            nqn: format!("nqn.2026-01.org.tenmil:{serial}"),
            serial: serial.to_owned(),
            model: "tenmil emulated SSD".to_owned(),
            firmware: concat!("t", env!("CARGO_PKG_VERSION")).to_owned(),
            nsid_max: 1024,
            namespaces,
            pool: None,
            reservations: true,
            ana_groups: 0,
        }
    }
}

impl Default for ControllerConfig {
    fn default() -> Self {
        Self {
            cntlid: 1,
            pci_vendor: 0,
            queue_entries_max: 4096,
            transfer_bytes_max: 1 << 20,
            io_queues_max: 128,
            vectors: 129,
            event_requests_max: 4,
            aborts_max: 4,
            error_entries: 64,
            sgls: crate::SGLS,
            fused_compare_and_write: true,
            transport: Transport::Memory { doorbell_buffers: true },
            instance: None,
            temperature_kelvin: 310,
            keep_alive_step: Span::from_ms(100),
            keep_alive_max: Span::from_ms(u32::MAX as u64),
            silence_max: None,
            firmware_bytes_max: 1 << 20,
        }
    }
}

impl ControllerConfig {
    /// The first thing that is out of range, in a line.
    pub(super) fn check(&self) -> Result<(), String> {
        let within = |what: &str, value: u64, low: u64, high: u64| {
            let fits = (low..=high).contains(&value);
            fits.then_some(()).ok_or_else(|| {
                format!(
                    "configure controller {}: {what} is {value}, expected {low} to {high}",
                    self.cntlid
                )
            })
        };
        within("cntlid", self.cntlid.into(), 0, 0xffef)?;
        within("queue_entries_max", self.queue_entries_max.into(), 2, 1 << 16)?;
        within("transfer_bytes_max", self.transfer_bytes_max.into(), 8192, 1 << 31)?;
        within("io_queues_max", self.io_queues_max.into(), 1, 0xffff)?;
        within("vectors", self.vectors.into(), 0, 2048)?;
        within("event_requests_max", self.event_requests_max.into(), 1, 256)?;
        within("aborts_max", self.aborts_max.into(), 1, 256)?;
        within("error_entries", self.error_entries.into(), 1, 256)?;
        within("keep_alive_step in ms", self.keep_alive_step.ns / 1_000_000, 100, 6_553_500)?;
        within("firmware_bytes_max", self.firmware_bytes_max.into(), 4096, 1 << 30)?;
        if let Transport::Fabrics { command_capsule_bytes: bytes, .. } = self.transport
            && (bytes < 64 || !bytes.is_multiple_of(16))
        {
            return Err(format!(
                "configure controller {}: command_capsule_bytes is {bytes}, expected a multiple of 16 from 64 on",
                self.cntlid
            ));
        }
        if !self.transfer_bytes_max.is_power_of_two() {
            return Err(format!(
                "configure controller {}: transfer_bytes_max is {}, expected a power of two",
                self.cntlid, self.transfer_bytes_max
            ));
        }
        Ok(())
    }
}
