//! The controller behind the registers: `ctrl` itself, which knows nothing of the wrapper.

use std::sync::Arc;

use base::{Instant, Interrupts, Medium, Segment, Span};
use ctrl::Buffers;
use ctrl::controller::{ControllerConfig, NamespaceConfig, Subsystem, SubsystemConfig, Transport};
use ctrl::front::{FrontEndConfig, MemoryFrontEnd, Wait};

use crate::bus::Bus;
use crate::device::Function;
use crate::device_memory::{DeviceMemory, MediumMemory, Reach};
use crate::medium::SimMedium;

/// What the controller is like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FunctionOptions {
    /// How it reaches data in host memory.
    pub reach: Reach,
    /// Bytes in the largest transfer (MDTS).
    pub transfer_bytes_max: u32,
    /// I/O queues that a host may have.
    pub io_queues_max: u16,
    /// Entries in the largest queue.
    pub queue_entries_max: u32,
    /// Whether it takes SGLs.
    pub sgls: bool,
    /// CAP.TO.
    pub ready_timeout: Span,
}

/// `ctrl` on a bus.
pub struct ControllerFunction {
    front: MemoryFrontEnd<DeviceMemory, SimInterrupts>,
    wait: Wait,
}

/// Vectors that end on the bus.
struct SimInterrupts {
    bus: Bus,
}

/// Bytes of a bounce buffer.
const BUFFER_BYTES: u32 = 16 << 10;
/// A controller that owes an answer looks around this often, even if neither its medium nor its host
/// has answered.
const PENDING_STEP: Span = Span::from_us(100);

impl Default for FunctionOptions {
    fn default() -> Self {
        Self {
            reach: Reach::Direct,
            transfer_bytes_max: 64 << 10,
            io_queues_max: 4,
            queue_entries_max: 256,
            sgls: true,
            ready_timeout: Span::from_ms(500),
        }
    }
}

impl ControllerFunction {
    /// A controller with one namespace, over `medium`.
    ///
    /// # Errors
    ///
    /// If the options make no sense.
    pub fn new(bus: &Bus, medium: &SimMedium, options: &FunctionOptions) -> Result<Self, String> {
        let namespace = NamespaceConfig::new(Arc::new(medium.clone()) as Arc<dyn Medium>);
        let subsystem = Subsystem::new(SubsystemConfig::new("SIM", vec![namespace]))?;
        let config = ControllerConfig {
            queue_entries_max: options.queue_entries_max,
            transfer_bytes_max: options.transfer_bytes_max,
            io_queues_max: options.io_queues_max,
            vectors: options.io_queues_max + 1,
            sgls: u32::from(options.sgls),
            transport: Transport::Memory { doorbell_buffers: true },
            ..ControllerConfig::default()
        };
        let controller = subsystem.controller(bus.now(), config)?;
        let buffers = Buffers::new(Arc::new(MediumMemory::new(bus)), bounce_buffers(bus.private()));
        let front_config = FrontEndConfig {
            in_flight_max: 64,
            areas: 16,
            burst: 16,
            ready_timeout: options.ready_timeout,
            vectors_armed: true,
        };
        let front = MemoryFrontEnd::new(
            controller,
            DeviceMemory::new(bus, options.reach),
            SimInterrupts { bus: bus.clone() },
            buffers,
            front_config,
        );
        Ok(Self { front, wait: Wait::Busy })
    }
}

impl Function for ControllerFunction {
    fn read(&mut self, _: Instant, offset: u32, is_wide: bool) -> u64 {
        self.front.read(offset, bytes_of(is_wide))
    }

    fn write(&mut self, now: Instant, offset: u32, value: u64, is_wide: bool) {
        self.front.write(now, offset, bytes_of(is_wide), value);
        self.wait = Wait::Busy;
    }

    fn ring(&mut self, now: Instant, index: u32, value: u32) {
        self.front.ring(now, index, value);
        self.wait = Wait::Busy;
    }

    fn turn(&mut self, now: Instant) {
        self.wait = self.front.turn(now);
    }

    fn wake_at(&self, now: Instant) -> Instant {
        match self.wait {
            // At once. The world sees to it that time moves all the same.
            Wait::Busy => now,
            Wait::Pending(until) => until.min(now.after(PENDING_STEP)),
            Wait::Idle(until) => until,
        }
    }
}

impl Interrupts for SimInterrupts {
    fn raise(&mut self, vector: u16) {
        self.bus.interrupt(vector);
    }
}

fn bytes_of(is_wide: bool) -> u32 {
    if is_wide { 8 } else { 4 }
}

fn bounce_buffers(private: Segment) -> Vec<Segment> {
    let starts = (0..private.len_bytes).step_by(BUFFER_BYTES as usize);
    starts.filter_map(|at| private.slice(at, BUFFER_BYTES)).collect()
}
