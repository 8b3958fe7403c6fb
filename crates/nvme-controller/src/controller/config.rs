//! Configuration of a subsystem and its controllers, fixed at start.

use std::sync::Arc;

use tenmil_base::{BlockDevice, Error, Span};

use super::subsystem::PersistRequest;
use crate::namespace::{NamespaceIdentity, RevocableCacheInstance};

/// Subsystem configuration: everything that its controllers share.
pub struct SubsystemConfig {
    /// NVMe Qualified Name, at most 223 bytes (Base 2.1 §4.7).
    pub nqn: String,
    /// Serial number: at most 20 printable characters.
    pub serial: String,
    /// Model number: at most 40.
    pub model: String,
    /// Firmware revision: at most 8.
    pub firmware: String,
    /// Highest valid namespace identifier (NN).
    pub nsid_max: u32,
    /// Initial namespaces.
    pub namespaces: Vec<NamespaceConfig>,
    /// Storage for new namespaces. Without it, Namespace Management is not supported.
    pub pool: Option<Box<dyn NamespacePool>>,
    /// Whether reservations are supported.
    pub reservations: bool,
    /// Number of ANA groups; zero disables ANA.
    pub ana_groups: u32,
}

/// Configuration of one namespace.
pub struct NamespaceConfig {
    /// Namespace identifier; by default the lowest free one.
    pub nsid: Option<u32>,
    /// Block device that backs the namespace.
    pub device: Arc<dyn BlockDevice>,
    /// Logical block size in bytes; by default that of the block device.
    pub block_size: Option<u32>,
    /// Namespace identifiers. If all are zero, a UUID is derived from the subsystem's NQN and the NSID,
    /// so that it is the same after a restart.
    pub identity: NamespaceIdentity,
    /// Whether several controllers may attach the namespace.
    pub is_shared: bool,
    /// Whether controllers attach it initially; a private one is attached to the first controller only.
    pub is_attached: bool,
    /// ANA group, from 1; ignored without ANA.
    pub ana_group: u32,
    /// Whether it is permanently write protected (Base 2.1 §8.1.16).
    pub is_read_only: bool,
    /// Persistence of its reservations.
    pub persistence: ReservationPersistenceMode,
    /// Cache instance, which reports to reconnecting hosts that the volatile cache has lost nothing.
    pub cache: Option<Arc<RevocableCacheInstance>>,
}

/// Persistence of a namespace's reservations through power loss, once a host has enabled it (PTPL, Base
/// 2.1 §8.1.22.1).
#[derive(Default)]
pub enum ReservationPersistenceMode {
    /// Everything, as long as the subsystem is not dropped: the power loss is emulated.
    #[default]
    Emulated,
    /// The state written to this store.
    Durable(Box<dyn ReservationStore>),
    /// Nothing: persistence is reported as not supported.
    None,
}

/// Persistent store for the reservations of one namespace. Its methods are called with a lock held,
/// perhaps by a polling thread, and must not block.
pub trait ReservationStore: Send {
    /// Record found when the store was created, if any. The error is one line with what was found.
    fn load(&self) -> Result<Option<Vec<u8>>, Error>;

    /// Starts to replace the stored record by `record`; `None` means no reservations. After this call has
    /// returned, the writer reports completion through `stored`; from then on the record is durable.
    /// After an earlier power loss, the store has either the old or the new record, complete. One record
    /// is written at a time: the next call follows the completion. `stored` is returned if no writer is
    /// available.
    fn start_store(
        &mut self,
        record: Option<Vec<u8>>,
        stored: PersistRequest,
    ) -> Result<(), PersistRequest>;
}

/// Storage from which Namespace Management creates namespaces.
pub trait NamespacePool: Send {
    /// Total capacity, used or not.
    fn capacity_bytes(&self) -> u64;
    /// Supported block sizes; at least one, in ascending order.
    fn block_sizes(&self) -> &[u32];
    /// Creates a block device that reads as zeroes. Dropping its last handle frees the space. The error
    /// is one line with the value found and the value expected.
    fn create_block_device(
        &mut self,
        block_size: u32,
        block_count: u64,
    ) -> Result<Arc<dyn BlockDevice>, Error>;
}

/// Configuration of one controller.
#[derive(Clone, Debug)]
pub struct ControllerConfig {
    /// Controller identifier within the subsystem: at most FFEFh.
    pub cntlid: u16,
    /// PCI vendor and subsystem vendor, as in the function's configuration space.
    pub pci_vendor: u16,
    /// Entries of the largest I/O queue (CAP.MQES is one less): 2 to 65 536.
    pub queue_entries_max: u32,
    /// Bytes of the largest transfer: a power of two, at least 8192, since MDTS 0 means no limit.
    pub transfer_bytes_max: u32,
    /// Maximum I/O queues of each direction for a host: 1 to 65 535.
    pub io_queues_max: u16,
    /// Interrupt vectors; zero means none.
    pub vectors: u16,
    /// Maximum outstanding Asynchronous Event Requests: 1 to 256 (AERL is one less).
    pub event_requests_max: u16,
    /// Maximum outstanding Abort commands: 1 to 256 (ACL is one less).
    pub aborts_max: u16,
    /// Entries of the error log: 1 to 256 (ELPE is one less).
    pub error_entries: u16,
    /// SGL support of the transport (SGLS, Base 2.1 §5.1.13.2.1).
    pub sgls: u32,
    /// Whether fused Compare and Write is supported.
    pub fused_compare_and_write: bool,
    /// Transport model.
    pub transport: TransportModel,
    /// Instance, which distinguishes this controller from earlier ones with the same identifier. With it,
    /// controllers of the subsystem may reset each other (Base 2.3 §5.4.3).
    pub instance: Option<ControllerInstance>,
    /// Initial composite temperature.
    pub temperature_kelvin: u16,
    /// Granularity of the keep-alive timer: a multiple of 100 ms (KAS).
    pub keep_alive_granularity: Span,
    /// Longest keep-alive timeout that a host may set, by Connect or Set Features.
    pub keep_alive_max: Span,
    /// Longest silence of a host without a keep-alive timeout; `None` means no limit.
    pub idle_host_timeout: Option<Span>,
    /// Maximum bytes of a firmware image.
    pub firmware_bytes_max: u32,
}

/// Instance of a controller, named by Cross-Controller Reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ControllerInstance {
    /// Uniquifier, different for each instance; not zero (CIU).
    pub uniquifier: u8,
    /// Random number, drawn for each instance (CIRN).
    pub random: u64,
    /// Maximum concurrent resets of other controllers (CCRL); not zero.
    pub resets_max: u8,
}

/// Kind of access of hosts to a controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransportModel {
    /// Memory-based: registers and rings in shared memory; queues are created by command and signalled by
    /// interrupt vectors.
    Memory {
        /// Whether the transport supports shadow doorbells.
        doorbell_buffers: bool,
    },
    /// Message-based: capsules; queues are created by connections (Base 2.1 §5.1.13.2.1, fabrics fields).
    Fabrics {
        /// Bytes of the largest I/O command capsule: a multiple of 16, at least 64 (IOCCSZ).
        command_capsule_bytes: u32,
        /// Maximum data descriptors per command (MSDBD).
        descriptors_max: u8,
        /// Time after the end of an association during which its commands may still take effect (CQT).
        quiesce: Span,
    },
}

impl NamespaceConfig {
    /// A shared namespace on `device`, attached to all controllers, with default properties.
    pub fn new(device: Arc<dyn BlockDevice>) -> Self {
        Self {
            nsid: None,
            device,
            block_size: None,
            identity: NamespaceIdentity::default(),
            is_shared: true,
            is_attached: true,
            ana_group: 1,
            is_read_only: false,
            persistence: ReservationPersistenceMode::default(),
            cache: None,
        }
    }
}

impl SubsystemConfig {
    /// A subsystem with these namespaces, whose NQN contains the serial number.
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
            transport: TransportModel::Memory { doorbell_buffers: true },
            instance: None,
            temperature_kelvin: 310,
            keep_alive_granularity: Span::from_ms(100),
            keep_alive_max: Span::from_ms(u32::MAX as u64),
            idle_host_timeout: None,
            firmware_bytes_max: 1 << 20,
        }
    }
}

impl ControllerConfig {
    /// Checks all ranges. The error is one line that names the first violation.
    pub(super) fn validate(&self) -> Result<(), Error> {
        let within = |what: &str, value: u64, low: u64, high: u64| {
            let fits = (low..=high).contains(&value);
            fits.then_some(()).ok_or_else(|| {
                format!(
                    "configure controller {}: {what} is {value}, expected {low} to {high}",
                    self.cntlid
                )
            })
        };
        within("cntlid", self.cntlid.into(), 0, 0xffef).map_err(Error::environment)?;
        within("queue_entries_max", self.queue_entries_max.into(), 2, 1 << 16)
            .map_err(Error::environment)?;
        within("transfer_bytes_max", self.transfer_bytes_max.into(), 8192, 1 << 31)
            .map_err(Error::environment)?;
        within("io_queues_max", self.io_queues_max.into(), 1, 0xffff)
            .map_err(Error::environment)?;
        within("vectors", self.vectors.into(), 0, 2048).map_err(Error::environment)?;
        within("event_requests_max", self.event_requests_max.into(), 1, 256)
            .map_err(Error::environment)?;
        within("aborts_max", self.aborts_max.into(), 1, 256).map_err(Error::environment)?;
        within("error_entries", self.error_entries.into(), 1, 256).map_err(Error::environment)?;
        within("keep_alive_step in ms", self.keep_alive_granularity.ns / 1_000_000, 100, 6_553_500)
            .map_err(Error::environment)?;
        within("firmware_bytes_max", self.firmware_bytes_max.into(), 4096, 1 << 30)
            .map_err(Error::environment)?;
        if let TransportModel::Fabrics { command_capsule_bytes: bytes, .. } = self.transport
            && (bytes < 64 || !bytes.is_multiple_of(16))
        {
            return Err(Error::environment(format!(
                "configure controller {}: command_capsule_bytes is {bytes}, expected a multiple of 16 from 64 on",
                self.cntlid
            )));
        }
        if !self.transfer_bytes_max.is_power_of_two() {
            return Err(Error::environment(format!(
                "configure controller {}: transfer_bytes_max is {}, expected a power of two",
                self.cntlid, self.transfer_bytes_max
            )));
        }
        Ok(())
    }
}
