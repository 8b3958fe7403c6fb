//! The conforming controller behind the registers: the production crate `ctrl`, unaware of the
//! fault injector.

use std::sync::Arc;

use tenmil_base::{BlockDevice, Instant, Interrupts, Segment, Span};
use tenmil_nvme_controller::BouncePool;
use tenmil_nvme_controller::controller::{
    ControllerConfig, NamespaceConfig, Subsystem, SubsystemConfig, TransportModel,
};
use tenmil_nvme_controller::transport::{MemoryTransport, MemoryTransportConfig, NextPoll};

use crate::device_memory::{DataAccessMode, DeviceMemory, MediumMemory};
use crate::sim_bus::SimBus;
use crate::sim_medium::SimMedium;
use crate::sim_pci_device::PciFunctionModel;

/// Properties of the controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FunctionOptions {
    /// How it accesses data in host memory.
    pub reach: DataAccessMode,
    /// Maximum data transfer size in bytes (MDTS).
    pub transfer_bytes_max: u32,
    /// Maximum number of I/O queues.
    pub io_queues_max: u16,
    /// Maximum queue size in entries.
    pub queue_entries_max: u32,
    /// Whether it supports SGLs.
    pub sgls: bool,
    /// CAP.TO.
    pub ready_timeout: Span,
}

/// The controller of `ctrl` on a simulated bus.
pub struct ControllerFunction {
    front: MemoryTransport<DeviceMemory, SimInterrupts>,
    wait: NextPoll,
}

/// Interrupt vectors that are signaled on the bus.
struct SimInterrupts {
    bus: SimBus,
}

/// Size of a bounce buffer.
const BUFFER_BYTES: u32 = 16 << 10;
/// Poll interval of a controller with outstanding work whose medium and host announce no event.
const PENDING_STEP: Span = Span::from_us(100);

impl Default for FunctionOptions {
    fn default() -> Self {
        Self {
            reach: DataAccessMode::Direct,
            transfer_bytes_max: 64 << 10,
            io_queues_max: 4,
            queue_entries_max: 256,
            sgls: true,
            ready_timeout: Span::from_ms(500),
        }
    }
}

impl ControllerFunction {
    /// Creates a controller with one namespace on `medium`.
    ///
    /// # Errors
    ///
    /// If the options are invalid.
    pub fn new(
        bus: &SimBus,
        medium: &SimMedium,
        options: &FunctionOptions,
    ) -> Result<Self, String> {
        let namespace = NamespaceConfig::new(Arc::new(medium.clone()) as Arc<dyn BlockDevice>);
        let subsystem = Subsystem::new(SubsystemConfig::new("SIM", vec![namespace]))
            .map_err(|error| error.to_string())?;
        let config = ControllerConfig {
            queue_entries_max: options.queue_entries_max,
            transfer_bytes_max: options.transfer_bytes_max,
            io_queues_max: options.io_queues_max,
            vectors: options.io_queues_max + 1,
            sgls: u32::from(options.sgls),
            transport: TransportModel::Memory { doorbell_buffers: true },
            ..ControllerConfig::default()
        };
        let controller =
            subsystem.open_controller(bus.now(), config).map_err(|error| error.to_string())?;
        let buffers = BouncePool::new(
            Arc::new(MediumMemory::new(bus)),
            bounce_segments(bus.device_private_memory()),
        );
        let front_config = MemoryTransportConfig {
            in_flight_max: 64,
            contexts_max: 16,
            burst: 16,
            ready_timeout: options.ready_timeout,
            vectors_armed: true,
        };
        let front = MemoryTransport::new(
            controller,
            DeviceMemory::new(bus, options.reach),
            SimInterrupts { bus: bus.clone() },
            buffers,
            front_config,
        );
        Ok(Self { front, wait: NextPoll::Busy })
    }
}

impl PciFunctionModel for ControllerFunction {
    fn read_register(&mut self, _: Instant, offset: u32, is_wide: bool) -> u64 {
        self.front.read_register(offset, register_width(is_wide))
    }

    fn write_register(&mut self, now: Instant, offset: u32, value: u64, is_wide: bool) {
        self.front.write_register(now, offset, register_width(is_wide), value);
        self.wait = NextPoll::Busy;
    }

    fn write_doorbell(&mut self, now: Instant, index: u32, value: u32) {
        self.front.write_doorbell(now, index, value);
        self.wait = NextPoll::Busy;
    }

    fn poll_function(&mut self, now: Instant) {
        self.wait = self.front.poll(now);
    }

    fn wake_at(&self, now: Instant) -> Instant {
        match self.wait {
            // At once. The world advances the time nevertheless.
            NextPoll::Busy => now,
            NextPoll::Pending(until) => until.min(now.after(PENDING_STEP)),
            NextPoll::Idle(until) => until,
        }
    }
}

impl Interrupts for SimInterrupts {
    fn raise(&mut self, vector: u16) {
        self.bus.signal_interrupt(vector);
    }
}

fn register_width(is_wide: bool) -> u32 {
    if is_wide { 8 } else { 4 }
}

fn bounce_segments(private: Segment) -> Vec<Segment> {
    let starts = (0..private.len_bytes).step_by(BUFFER_BYTES as usize);
    starts.filter_map(|at| private.slice(at, BUFFER_BYTES)).collect()
}
