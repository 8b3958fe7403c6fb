//! The PCI device: registers behind the fault injector, posted writes, and a controller that is
//! polled when it has work.
//!
//! ```text
//!   SimMmio --read-->   deliver posted writes, PciFunctionModel::read_register, fault injector --> value
//!           --write-->  posted --latency--> PciFunctionModel::write_register
//!   SimDoorbell ring--> posted --latency--> head translation --> PciFunctionModel::write_doorbell
//! ```

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::{Doorbell, Instant, Mmio, Random, Span};
use tenmil_wire::register::offset;
use tenmil_wire::register::{Capabilities, Configuration, ControllerStatus, SUBSYSTEM_RESET};

use crate::event_trace::TraceKind;
use crate::sim_bus::SimBus;
use crate::sim_clock::NextWakeup;
use crate::sim_medium::SimMedium;

/// Controller behind the registers.
pub trait PciFunctionModel: Send {
    /// Reads a register of 4 or 8 bytes.
    fn read_register(&mut self, now: Instant, offset: u32, is_wide: bool) -> u64;
    /// Writes a register.
    fn write_register(&mut self, now: Instant, offset: u32, value: u64, is_wide: bool);
    /// Writes doorbell `index`: twice the queue identifier, plus one for a completion queue.
    fn write_doorbell(&mut self, now: Instant, index: u32, value: u32);
    /// Performs pending work.
    fn poll_function(&mut self, now: Instant);
    /// Time at which it must be polled without an event.
    fn wake_at(&self, now: Instant) -> Instant;
}

/// The device. Clones are cheap and refer to the same device.
#[derive(Clone)]
pub struct SimPciDevice {
    bus: SimBus,
    shared: Arc<Mutex<SimDeviceShared>>,
}

/// Timing of the bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BusTimingOptions {
    /// Shortest and longest time from a write to its arrival.
    pub posting: (Span, Span),
    /// Time without any activity of the device after a write to CC.
    pub configuration_lag: Span,
}

/// Register access for a driver.
pub struct SimMmio {
    device: SimPciDevice,
}

/// One doorbell register.
pub struct SimDoorbell {
    device: SimPciDevice,
    at: u32,
}

struct SimDeviceShared {
    function: Option<Box<dyn PciFunctionModel>>,
    options: BusTimingOptions,
    random: Random,
    posted: VecDeque<PostedWrite>,
    /// The device is inactive until this time.
    asleep_until: Instant,
    /// CC, ASQ and ACQ as written by the host.
    configuration: u32,
    admin_submission: u64,
    admin_completion: u64,
    /// CAP.DSTRD as read by the host.
    stride_seen: u8,
    medium: SimMedium,
    is_powered: bool,
    accesses: u64,
}

/// A posted write in flight.
#[derive(Clone, Copy, Debug)]
struct PostedWrite {
    due: Instant,
    store: MmioStore,
}

#[derive(Clone, Copy, Debug)]
enum MmioStore {
    Register { offset: u32, value: u64, is_wide: bool },
    Doorbell { offset: u32, value: u32 },
}

impl Default for BusTimingOptions {
    fn default() -> Self {
        Self {
            posting: (Span { ns: 200 }, Span::from_us(2)),
            configuration_lag: Span::from_us(300),
        }
    }
}

const CAP: u32 = 0x00;
const CC: u32 = 0x14;
const CSTS: u32 = 0x1c;
const NSSR: u32 = 0x20;
const ASQ: u32 = 0x28;
const ACQ: u32 = 0x30;
const DOORBELLS: u32 = 0x1000;
const _: () = assert!(CC as usize == offset::CC && CSTS as usize == offset::CSTS);
const _: () = assert!(NSSR as usize == offset::NSSR);
const _: () = assert!(ASQ as usize == offset::ASQ && ACQ as usize == offset::ACQ);

impl SimPciDevice {
    /// Creates a device with the controller `function` and its `medium`.
    pub fn new(
        bus: &SimBus,
        function: Box<dyn PciFunctionModel>,
        medium: SimMedium,
        options: BusTimingOptions,
        random: Random,
    ) -> Self {
        let shared = SimDeviceShared {
            function: Some(function),
            options,
            random,
            posted: VecDeque::new(),
            asleep_until: Instant::default(),
            configuration: 0,
            admin_submission: 0,
            admin_completion: 0,
            stride_seen: 0,
            medium,
            is_powered: true,
            accesses: 0,
        };
        Self { bus: bus.clone(), shared: Arc::new(Mutex::new(shared)) }
    }

    /// Register access for one driver.
    pub fn register_access(&self) -> SimMmio {
        SimMmio { device: self.clone() }
    }

    /// Whether the device has power.
    pub fn is_powered(&self) -> bool {
        self.lock().is_powered
    }

    /// Restores the power with a new controller without state.
    pub fn restore_power(&self, function: Box<dyn PciFunctionModel>) {
        let mut shared = self.lock();
        shared.function = Some(function);
        shared.posted.clear();
        shared.configuration = 0;
        shared.is_powered = true;
    }

    /// Drops the controller with all its channels.
    pub fn drop_controller(&self) {
        let function = self.lock().function.take();
        drop(function);
    }

    /// Performs pending work.
    pub fn poll_device(&self) {
        let now = self.bus.now();
        let mut shared = self.lock();
        if shared.is_powered && !shared.medium.is_powered() {
            self.lose_power(&mut shared);
        }
        if !shared.is_powered || self.bus.with_state(|state| state.evil.is_removed()) {
            shared.posted.clear();
            return;
        }
        self.deliver_posted_writes(&mut shared, now);
        if now >= shared.asleep_until
            && let Some(function) = &mut shared.function
        {
            function.poll_function(now);
        }
        drop(shared);
        if let Some(vector) = self.bus.inject_unsolicited() {
            self.bus.signal_interrupt(vector);
        }
    }

    /// Time at which the device must be polled without an event.
    pub fn wake_at(&self) -> NextWakeup {
        let now = self.bus.now();
        let shared = self.lock();
        if !shared.is_powered || self.bus.with_state(|state| state.evil.is_removed()) {
            return NextWakeup::default();
        }
        let posted = shared.posted.iter().map(|posted| posted.due).min();
        let function = shared.function.as_ref().map_or(Instant::NEVER, |one| one.wake_at(now));
        NextWakeup::default()
            .with_wakeup_at(posted.unwrap_or(Instant::NEVER))
            .with_wakeup_at(
                function
                    .min(self.bus.with_state(|state| state.next_deferred_access_at()))
                    .max(shared.asleep_until),
            )
            .with_wakeup_at(self.bus.with_state(|state| state.evil.wake_at()))
    }

    fn lock(&self) -> MutexGuard<'_, SimDeviceShared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lose_power(&self, shared: &mut SimDeviceShared) {
        shared.is_powered = false;
        shared.function = None;
        shared.posted.clear();
        self.bus.record(TraceKind::Harness, [HARNESS_POWER_LOST, 0, 0]);
    }

    /// Delivers the writes that have arrived by `until`, in the order of posting.
    fn deliver_posted_writes(&self, shared: &mut SimDeviceShared, until: Instant) {
        while let Some(posted) = shared.posted.front().copied()
            && posted.due <= until
        {
            shared.posted.pop_front();
            match posted.store {
                MmioStore::Register { offset, value, is_wide } => {
                    self.deliver_register(shared, offset, value, is_wide);
                }
                MmioStore::Doorbell { offset, value } => {
                    self.deliver_doorbell(shared, offset, value)
                }
            }
        }
    }

    fn deliver_register(
        &self,
        shared: &mut SimDeviceShared,
        offset: u32,
        value: u64,
        is_wide: bool,
    ) {
        let now = self.bus.now();
        if offset == CC {
            shared.asleep_until = now.after(shared.options.configuration_lag);
        }
        if let Some(function) = &mut shared.function {
            function.write_register(now, offset, value, is_wide);
        }
    }

    fn deliver_doorbell(&self, shared: &mut SimDeviceShared, offset: u32, value: u32) {
        let now = self.bus.now();
        let index = (offset - DOORBELLS) >> (2 + shared.stride_seen);
        let driver_events = match (index % 2, u16::try_from(index / 2)) {
            (1, Ok(queue)) => {
                self.bus.with_state(|state| state.translate_head_doorbell(queue, value))
            }
            _ => value,
        };
        self.bus.record(TraceKind::Doorbell, [index.into(), value.into(), driver_events.into()]);
        if let Some(function) = &mut shared.function {
            function.write_doorbell(now, index, driver_events);
        }
    }

    fn read_register(&self, offset: u32, is_wide: bool) -> u64 {
        let now = self.bus.now();
        let mut shared = self.lock();
        shared.accesses += 1;
        let all_ones = if is_wide { u64::MAX } else { u64::from(u32::MAX) };
        if shared.is_powered && !shared.medium.is_powered() {
            self.lose_power(&mut shared);
        }
        // A read pushes all earlier posted writes ahead of it (PCIe ordering rules).
        self.deliver_posted_writes(&mut shared, Instant::NEVER);
        // Without power there is no controller.
        let held = match &mut shared.function {
            Some(function) => function.read_register(now, offset, is_wide),
            None => all_ones,
        };
        let seen =
            self.bus.with_state(|state| state.evil.on_register_read(now, offset, held)) & all_ones;
        if seen != all_ones {
            self.note_register_read(&mut shared, offset, held, seen);
        }
        let accesses = shared.accesses;
        self.bus.record(TraceKind::RegisterRead, [offset.into(), seen, accesses]);
        seen
    }

    /// Updates the conclusions that the host may draw from the value it has read.
    fn note_register_read(&self, shared: &mut SimDeviceShared, offset: u32, held: u64, seen: u64) {
        if offset == CAP {
            shared.stride_seen = Capabilities(seen).dstrd();
        }
        let is_ready = |value: u64| ControllerStatus(low_dword(value)).rdy();
        if offset == CSTS && !Configuration(shared.configuration).en() && !is_ready(seen) {
            self.bus.with_state(|state| {
                if is_ready(held) {
                    // RDY reads as 0 although the controller is enabled: the device may still
                    // access any buffer.
                    state.ledger.taint_all();
                }
                state.ledger.record_device_stop();
            });
        }
    }

    fn write_register(&self, offset: u32, value: u64, is_wide: bool) {
        let now = self.bus.now();
        let mut shared = self.lock();
        shared.accesses += 1;
        let accesses = shared.accesses;
        self.bus.record(TraceKind::RegisterWrite, [offset.into(), value, accesses]);
        if !shared.is_powered {
            return;
        }
        // A lost write leaves the device in a state that the host does not know.
        if !self.bus.with_state(|state| state.evil.passes_register_write(now)) {
            self.bus.with_state(|state| state.is_misled = true);
            return;
        }
        match offset {
            CC => {
                let before = core::mem::replace(&mut shared.configuration, low_dword(value));
                self.note_cc_write(&shared, before);
            }
            NSSR if low_dword(value) == SUBSYSTEM_RESET => {
                let before = core::mem::replace(&mut shared.configuration, 0);
                self.note_cc_write(&shared, before);
            }
            // A 32-bit write changes the low half only.
            ASQ | ACQ => {
                let kept = if is_wide { 0 } else { u64::MAX << 32 };
                let base = shared.admin_queue_base(offset);
                *base = *base & kept | value;
            }
            // High halves of ASQ and ACQ.
            0x2c | 0x34 => {
                let base = shared.admin_queue_base(offset - 4);
                *base = *base & u64::from(u32::MAX) | value << 32;
            }
            _ => {}
        }
        self.post_write(&mut shared, now, MmioStore::Register { offset, value, is_wide });
    }

    fn note_cc_write(&self, shared: &SimDeviceShared, before: u32) {
        let (was_enabled, is_enabled) =
            (Configuration(before).en(), Configuration(shared.configuration).en());
        self.bus.with_state(|state| {
            state.evil.count_cc_transitions(before, shared.configuration);
            if is_enabled && !was_enabled {
                state.ledger.record_admin_ring(shared.admin_submission);
                state.record_completion_queue_created(0, shared.admin_completion);
            }
            if was_enabled && !is_enabled {
                state.handle_controller_disable();
            }
        });
    }

    fn post_write(&self, shared: &mut SimDeviceShared, now: Instant, store: MmioStore) {
        let (shortest, longest) = shared.options.posting;
        let spread = shared.random.below(longest.ns.saturating_sub(shortest.ns) + 1);
        let due = now.after(Span { ns: shortest.ns + spread });
        // Posted writes arrive in order.
        let due = shared.posted.back().map_or(due, |last| last.due.max(due));
        shared.posted.push_back(PostedWrite { due, store });
    }
}

impl SimDeviceShared {
    fn admin_queue_base(&mut self, offset: u32) -> &mut u64 {
        if offset == ASQ { &mut self.admin_submission } else { &mut self.admin_completion }
    }
}

/// Detail codes of [`TraceKind::Harness`] records.
const HARNESS_POWER_LOST: u64 = 1;

impl Mmio for SimMmio {
    type Doorbell = SimDoorbell;

    fn read32(&mut self, offset: u32) -> u32 {
        low_dword(self.device.read_register(offset, false))
    }

    fn read64(&mut self, offset: u32) -> u64 {
        self.device.read_register(offset, true)
    }

    fn write32(&mut self, offset: u32, value: u32) {
        self.device.write_register(offset, value.into(), false);
    }

    fn write64(&mut self, offset: u32, value: u64) {
        self.device.write_register(offset, value, true);
    }

    fn doorbell(&mut self, offset: u32) -> SimDoorbell {
        SimDoorbell { device: self.device.clone(), at: offset }
    }
}

impl Doorbell for SimDoorbell {
    fn ring(&mut self, value: u32) {
        let device = &self.device;
        let now = device.bus.now();
        let mut shared = device.lock();
        if device.bus.with_state(|state| state.evil.passes_register_write(now)) && shared.is_powered
        {
            device.post_write(&mut shared, now, MmioStore::Doorbell { offset: self.at, value });
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "the low half is what is wanted")]
const fn low_dword(value: u64) -> u32 {
    value as u32
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use tenmil_base::{Doorbell, Instant, Mmio, Random};

    use super::{BusTimingOptions, PciFunctionModel, SimPciDevice};
    use crate::fault_injector::{Fault, FaultInjector, PlannedFault, lies};
    use crate::sim_bus::SimBus;
    use crate::sim_medium::{MediumOptions, SimMedium};

    /// Registers that store what is written, with a log.
    #[derive(Default)]
    struct Plain {
        log: Log,
        cc: u64,
    }

    impl PciFunctionModel for Plain {
        fn read_register(&mut self, _: Instant, offset: u32, _: bool) -> u64 {
            match offset {
                0x14 => self.cc,
                0x1c => self.cc & 1,
                _ => 0,
            }
        }

        fn write_register(&mut self, _: Instant, offset: u32, value: u64, _: bool) {
            self.log.lock().unwrap().push((offset, value));
            if offset == 0x14 {
                self.cc = value;
            }
        }

        fn write_doorbell(&mut self, _: Instant, index: u32, value: u32) {
            self.log.lock().unwrap().push((0x1000 + index, value.into()));
        }

        fn poll_function(&mut self, _: Instant) {}

        fn wake_at(&self, _: Instant) -> Instant {
            Instant::NEVER
        }
    }

    type Log = Arc<Mutex<Vec<(u32, u64)>>>;

    fn test_device(plan: &[PlannedFault]) -> (SimBus, SimPciDevice, Log) {
        let bus = SimBus::new(1 << 16, 1 << 12, FaultInjector::new(plan, Random::new(1))).unwrap();
        let medium = SimMedium::new(&bus, MediumOptions::default(), Random::new(2));
        let plain = Plain::default();
        let log = Arc::clone(&plain.log);
        let options = BusTimingOptions::default();
        let device = SimPciDevice::new(&bus, Box::new(plain), medium, options, Random::new(3));
        (bus, device, log)
    }

    #[test]
    fn posted_writes_arrive_late_in_order_and_a_read_flushes_them() {
        let (bus, device, log) = test_device(&[]);
        let mut registers = device.register_access();
        registers.write64(0x28, 0x4000);
        registers.doorbell(0x1008).ring(7);
        device.poll_device();
        assert!(log.lock().unwrap().is_empty(), "nothing has arrived");
        assert!(device.wake_at().earliest().unwrap() > bus.now());
        bus.with_state(|state| state.clock.jump_to(Instant { ns: state.clock.now().ns + 10_000 }));
        device.poll_device();
        assert_eq!(*log.lock().unwrap(), [(0x28, 0x4000), (0x1002, 7)]);
        registers.write32(0x14, 1);
        assert_eq!(registers.read32(0x1c), 1);
    }

    #[test]
    fn host_that_sees_csts_rdy_clear_after_clearing_cc_en_has_stopped_the_device() {
        for plan in [vec![], vec![PlannedFault::for_all_commands(lies::NEVER_READY)]] {
            let (bus, device, _) = test_device(&plan);
            let mut registers = device.register_access();
            registers.write64(0x28, 0x4000);
            registers.write32(0x14, 1);
            let pending =
                |bus: &SimBus| bus.with_state(|state| state.ledger.owned_command(0, 0).is_some());
            let identify = [6, 0, 0, 0, 0, 0, 0, 0];
            bus.with_state(|state| {
                state.ledger.record_stored_command(Instant::default(), 0x4000, &identify, &[])
            });
            registers.read32(0x1c);
            assert!(pending(&bus), "EN was not cleared");
            registers.write32(0x14, 0);
            assert!(pending(&bus), "nothing was seen");
            registers.read32(0x1c);
            assert!(!pending(&bus));
        }
    }

    #[test]
    fn removed_device_reads_all_ones_and_ignores_writes() {
        let (_, device, log) =
            test_device(&[PlannedFault::for_all_commands(Fault::Gone).with_skip(1)]);
        let mut registers = device.register_access();
        assert_eq!(registers.read32(0x1c), 0);
        assert_eq!(registers.read32(0x1c), u32::MAX);
        assert_eq!(registers.read64(0x00), u64::MAX);
        registers.write32(0x14, 1);
        registers.doorbell(0x1000).ring(1);
        device.poll_device();
        assert!(log.lock().unwrap().is_empty());
        assert_eq!(device.wake_at().earliest(), None);
    }
}
