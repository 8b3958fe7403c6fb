//! Bus between host and device. Every register access, memory access and completion passes here, is
//! checked and recorded in the trace.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tenmil_base::{
    AccessFault, Dma, Instant, Memory, Random, RingEntries, RingMemory, Segment, Span,
};
use tenmil_dma::{
    Backing, CommandStore, DeviceKind, DevicePool, Mapping, RegionTable, SharedEntries,
    SharedHostMemory,
};

use crate::clock::Clock;
use crate::failure::Violation;
use crate::fault_injector::{CompletionOutput, FaultInjector, RingView};
use crate::iommu::{AccessDenied, Iommu};
use crate::ownership::BufferOwnership;
use crate::trace::{Kind, Trace, digest};

/// The bus of one world. Clones are cheap and refer to the same bus.
#[derive(Clone)]
pub struct Bus {
    state: Arc<Mutex<State>>,
    pool: DevicePool,
    /// Device memory, which the host cannot access.
    private: Segment,
    /// IOVA of the pool.
    base: u64,
    memory: Segment,
}

/// Mutable state of the bus.
pub struct State {
    /// Clock.
    pub clock: Clock,
    /// Trace.
    pub trace: Trace,
    /// IOMMU mappings.
    pub iommu: Iommu,
    /// Buffer ownership.
    pub ledger: BufferOwnership,
    /// Fault injector.
    pub evil: FaultInjector,
    /// Violations found.
    pub failures: Vec<Violation>,
    /// The fault injector has overwritten host memory, so data that are read prove nothing any
    /// more.
    pub is_scribbled: bool,
    /// Signaled interrupt vectors that have not been handled yet.
    pub interrupts: u64,
    completion_rings: BTreeMap<u64, Ring>,
    /// Completion queue addresses by queue identifier.
    completion_queues: BTreeMap<u16, u64>,
    /// Addresses of the shadow doorbells and of the event indices, if they are configured.
    shadows: Option<[u64; 2]>,
    /// Data addresses of earlier commands.
    data_seen: Vec<u64>,
    /// Number of delayed device accesses by due time.
    late: BTreeMap<Instant, u32>,
    random: Random,
    /// A register write was lost, so the device may have a wrong view of its rings until it is
    /// disabled.
    pub is_misled: bool,
    /// Time that revoking the DMA access takes.
    pub(crate) cut_off_lag: Span,
    /// End of the revocation, while it is in progress.
    cut_off_at: Option<Instant>,
    /// Injected bug: revoking the DMA access has no effect.
    pub(crate) ignores_cut_off: bool,
    /// Injected bug: the revocation is reported as complete while it is in progress.
    pub(crate) hastens_cut_off: bool,
}

/// A completion ring that the device posts to.
struct Ring {
    entries: SharedEntries,
    view: RingView,
}

/// Origin of a memory access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accessor {
    /// The controller or its medium, executing a command.
    Device,
    /// The fault injector.
    FaultInjector,
}

/// Bytes of a completion entry.
const ENTRY_BYTES: u64 = 16;
const DATA_SEEN_MAX: usize = 64;

impl Bus {
    /// Creates a bus with `pool_bytes` of host memory and `private_bytes` of device memory.
    ///
    /// # Errors
    ///
    /// If the memory cannot be mapped.
    pub fn new(
        pool_bytes: usize,
        private_bytes: usize,
        mut evil: FaultInjector,
    ) -> Result<Self, String> {
        let regions = RegionTable::new(2);
        let add = |len_bytes| {
            let mapping = Mapping::new(len_bytes, Backing::Private)
                .map_err(|error| format!("map {len_bytes} bytes: {error:?}"))?;
            regions.add(mapping).map_err(|error| error.to_string())
        };
        let (memory, private) = (add(pool_bytes)?, add(private_bytes)?);
        let pool =
            DevicePool::new(regions.clone(), memory, DeviceKind::Emulated, CommandStore::Plain);
        let base = pool.iova(memory).ok_or("a pool has no address")?;
        let random = Random::new(evil.draw());
        let state = State {
            clock: Clock::default(),
            trace: Trace::default(),
            iommu: Iommu::default(),
            ledger: BufferOwnership::default(),
            evil,
            failures: Vec::new(),
            is_scribbled: false,
            interrupts: 0,
            completion_rings: BTreeMap::new(),
            completion_queues: BTreeMap::new(),
            shadows: None,
            data_seen: Vec::new(),
            late: BTreeMap::new(),
            random,
            is_misled: false,
            cut_off_lag: Span::default(),
            cut_off_at: None,
            ignores_cut_off: false,
            hastens_cut_off: false,
        };
        Ok(Self { state: Arc::new(Mutex::new(state)), pool, private, base, memory })
    }

    /// Runs `work` on the state. Must not be nested.
    pub fn with<T>(&self, work: impl FnOnce(&mut State) -> T) -> T {
        // The state can still be printed after a panic in the code under test.
        work(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Current time.
    pub fn now(&self) -> Instant {
        self.with(|state| state.clock.now())
    }

    /// Adds a record to the trace.
    pub fn record(&self, kind: Kind, detail: [u64; 3]) {
        self.with(|state| state.record(kind, detail));
    }

    /// Reports a violation.
    pub fn fail(&self, failure: Violation) {
        self.with(|state| state.failures.push(failure));
    }

    /// Host memory.
    pub fn pool(&self) -> &DevicePool {
        &self.pool
    }

    /// Device memory.
    pub fn private(&self) -> Segment {
        self.private
    }

    /// IOVA of a segment of host memory. `None` for device memory.
    pub fn address(&self, segment: Segment) -> Option<u64> {
        (segment.region == self.memory.region)
            .then(|| self.base + (segment.offset - self.memory.offset))
    }

    /// Signals an interrupt vector.
    pub fn interrupt(&self, vector: u16) {
        self.with(|state| {
            state.interrupts |= 1_u64.checked_shl(vector.into()).unwrap_or(0);
            state.record(Kind::Interrupt, [vector.into(), 0, 0]);
        });
    }

    /// Reads host memory for the device.
    pub fn device_read(
        &self,
        actor: Accessor,
        iova: u64,
        into: &mut [u8],
    ) -> Result<(), AccessFault> {
        let segment = self.check(actor, iova, into.len(), false)?;
        self.load(segment, into);
        self.record(Kind::DeviceRead, [iova, into.len() as u64, digest(into)]);
        Ok(())
    }

    /// Writes host memory for the device.
    pub fn device_write(&self, actor: Accessor, iova: u64, from: &[u8]) -> Result<(), AccessFault> {
        let segment = self.check(actor, iova, from.len(), true)?;
        // Cannot fail: the memory is mapped.
        let _ = self.pool.store(segment, from);
        self.record(Kind::DeviceWrite, [iova, from.len() as u64, digest(from)]);
        Ok(())
    }

    /// Checks whether the device may access this memory, and resolves it.
    pub fn check(
        &self,
        actor: Accessor,
        iova: u64,
        len_bytes: usize,
        is_write: bool,
    ) -> Result<Segment, AccessFault> {
        let fault = AccessFault { iova, len_bytes: len_bytes as u64 };
        self.with(|state| state.check(actor, fault, is_write))?;
        self.segment(iova, len_bytes).ok_or(fault)
    }

    /// Resolves a ring for the controller.
    pub fn entries(&self, iova: u64, len_bytes: u64) -> Result<SharedEntries, AccessFault> {
        let fault = AccessFault { iova, len_bytes };
        self.with(|state| state.check(Accessor::Device, fault, false))?;
        SharedHostMemory::new(&self.pool).entries(iova, len_bytes)?.ok_or(fault)
    }

    /// Posts a completion at `index` of the ring at `iova`, which has `depth` entries. The fault
    /// injector may change or drop it.
    pub fn post(
        &self,
        iova: u64,
        depth: u32,
        index: u32,
        entry: [u32; 4],
    ) -> Result<(), AccessFault> {
        let resolved = self.entries(iova, u64::from(depth) * ENTRY_BYTES)?;
        self.with(|state| {
            let now = state.clock.now();
            let emissions = state.evil.on_completion(now, depth, entry, &state.ledger);
            let ring = state.completion_rings.entry(iova);
            let ring =
                ring.or_insert_with(|| Ring { entries: resolved, view: RingView::new(depth) });
            ring.view.posted(index);
            emissions.iter().try_for_each(|emission| state.emit(iova, emission))
        })
    }

    /// Lets the fault injector corrupt the data of an admin command.
    pub fn falsify(&self, iova: u64, bytes: &mut [u8]) {
        self.with(|state| {
            let now = state.clock.now();
            let Some((command, at)) = state.ledger.admin_command_at(iova) else { return };
            if state.evil.on_admin_data(now, &command, iova - at, bytes) {
                state.record(Kind::Mischief, [1, iova, u64::from(command.cdw10)]);
            }
        });
    }

    /// Injected bug: unmaps a buffer while the device may access it.
    pub(crate) fn unmap(&self, segment: Segment) {
        let Some(iova) = self.address(segment) else { return };
        self.with(|state| {
            let now = state.clock.now();
            let _ = state.iommu.unmap(now, iova, segment.len_bytes.into());
        });
    }

    /// Posts completions that the fault injector has held back, and performs its unsolicited
    /// accesses. Returns an interrupt vector to signal.
    pub fn evil_turn(&self) -> Option<u16> {
        use crate::fault_injector::{DmaFault, Fault as Evilness};
        self.with(|state| {
            let now = state.clock.now();
            for (queue, emission) in state.evil.next_released(now) {
                if let Some(iova) = state.completion_queues.get(&queue).copied() {
                    let _ = state.emit(iova, &emission);
                }
            }
        });
        let now = self.now();
        let deed = self.with(|state| state.evil.turn(now))?;
        self.record(Kind::Mischief, [0, 0, 0]);
        match deed {
            Evilness::Interrupt { vector } => return Some(vector),
            Evilness::Dma(DmaFault::StrayWrite) => {
                let _ = self.device_write(Accessor::FaultInjector, STRAY, &[0xee; 64]);
            }
            Evilness::Dma(DmaFault::StrayRead) => {
                let _ = self.device_read(Accessor::FaultInjector, STRAY, &mut [0; 64]);
            }
            Evilness::Dma(DmaFault::ScribbleRing) => self.scribble_ring(),
            Evilness::Dma(DmaFault::ScribbleBuffers) => self.scribble_buffers(),
            _ => {}
        }
        None
    }

    fn scribble_ring(&self) {
        let ring = self.with(|state| {
            let iova = *state.completion_queues.get(&1)?;
            let depth = state.completion_rings.get(&iova).map_or(2, |ring| ring.view.depth());
            // Random bytes may look like any completion, so every request in flight may be
            // completed wrongly.
            state.ledger.taint_all();
            state.ledger.stopped();
            state.is_scribbled = true;
            let mut random = Random::new(state.evil.draw());
            let len_bytes = usize::try_from(u64::from(depth) * ENTRY_BYTES).unwrap_or(0);
            let noise: Vec<u8> =
                (0..len_bytes).map(|_| random.next_u64().to_le_bytes()[7]).collect();
            Some((iova, noise))
        });
        if let Some((iova, noise)) = ring {
            let _ = self.device_write(Accessor::FaultInjector, iova, &noise);
        }
    }

    fn scribble_buffers(&self) {
        let addresses = self.with(|state| {
            state.is_scribbled = true;
            state.data_seen.clone()
        });
        for iova in addresses {
            let _ = self.device_write(Accessor::FaultInjector, iova, &[0xee; 512]);
        }
    }

    /// Resolves memory without a check of mapping or ownership.
    pub fn peek(&self, iova: u64, len_bytes: usize) -> Result<Segment, AccessFault> {
        let fault = AccessFault { iova, len_bytes: len_bytes as u64 };
        self.segment(iova, len_bytes).ok_or(fault)
    }

    fn segment(&self, iova: u64, len_bytes: usize) -> Option<Segment> {
        let offset = iova.checked_sub(self.base)?;
        let len_bytes = u32::try_from(len_bytes).ok()?;
        let segment =
            Segment { region: self.memory.region, offset: self.memory.offset + offset, len_bytes };
        self.pool.contains(segment).then_some(segment)
    }

    fn load(&self, segment: Segment, into: &mut [u8]) {
        // Cannot fail: the memory is mapped.
        let _ = self.pool.load(segment, into);
    }
}

/// Address that is never mapped.
const STRAY: u64 = 0xdead_0000;

impl State {
    /// Adds a record to the trace.
    pub fn record(&mut self, kind: Kind, detail: [u64; 3]) {
        self.trace.record(self.clock.now(), kind, detail);
    }

    /// Starts to revoke the DMA access. Returns true once it is complete.
    pub fn cut_off(&mut self) -> bool {
        let now = self.clock.now();
        if self.cut_off_at.is_none() {
            self.record(Kind::CutOff, [0; 3]);
            self.cut_off_at = Some(now.after(self.cut_off_lag));
        }
        self.take_cut();
        self.ignores_cut_off || self.hastens_cut_off || self.iommu.is_cut_off()
    }

    /// Restores the DMA access.
    pub fn reconnect(&mut self) {
        self.cut_off_at = None;
        self.iommu.cut_off(false);
    }

    /// Completes a revocation that is due.
    fn take_cut(&mut self) {
        let is_due = self.cut_off_at.is_some_and(|at| self.clock.now() >= at);
        if is_due && !self.iommu.is_cut_off() && !self.ignores_cut_off {
            self.iommu.cut_off(true);
            self.ledger.stopped();
        }
    }

    /// Delays a device access by a random time up to `longest`. Returns its due time.
    pub fn defer(&mut self, longest: Span) -> Instant {
        let due = self.clock.now().after(Span { ns: self.random.below(longest.ns + 1) });
        *self.late.entry(due).or_default() += 1;
        due
    }

    /// Removes a delayed access that was due at `due`.
    pub fn arrived(&mut self, due: Instant) {
        if let Some(count) = self.late.get_mut(&due) {
            *count -= 1;
            if *count == 0 {
                self.late.remove(&due);
            }
        }
    }

    /// Due time of the next delayed access.
    pub fn late_wake_at(&self) -> Instant {
        self.late.keys().next().copied().unwrap_or(Instant::NEVER)
    }

    /// Registers a new completion queue, whose ring starts empty.
    pub fn completion_queue_created(&mut self, id: u16, iova: u64) {
        self.completion_queues.insert(id, iova);
        self.completion_rings.remove(&iova);
    }

    /// Records that the device fetched a command from the submission queue at `ring`.
    pub fn fetched(&mut self, ring: u64, command: &[u64; 8]) {
        if self.ledger.ring(0) != Some(ring) {
            if command[3] != 0 && self.data_seen.len() < DATA_SEEN_MAX {
                self.data_seen.push(command[3]);
            }
            return;
        }
        let [opcode, _, cid_low, cid_high, ..] = command[0].to_le_bytes();
        let cid = u16::from_le_bytes([cid_low, cid_high]);
        if opcode == tenmil_wire::AdminOpcode::CreateIoCompletionQueue.code() {
            let [id_low, id_high, ..] = command[5].to_le_bytes();
            self.completion_queue_created(u16::from_le_bytes([id_low, id_high]), command[3]);
        }
        if opcode == tenmil_wire::AdminOpcode::DoorbellBufferConfig.code() {
            self.shadows = Some([command[3], command[4]]);
        }
        let now = self.clock.now();
        if let Some(emission) = self.evil.on_admin_command(now, opcode, cid)
            && let Some(iova) = self.completion_queues.get(&0).copied()
        {
            let _ = self.emit(iova, &emission);
        }
    }

    /// Translates the value that the host writes to the head doorbell of completion queue `id` for
    /// the controller.
    pub fn translate_head(&mut self, id: u16, head: u32) -> u32 {
        let ring = self.completion_queues.get(&id).and_then(|at| self.completion_rings.get_mut(at));
        ring.map_or(head, |ring| ring.view.translate(head))
    }

    /// Handles a disabled controller.
    pub fn disabled(&mut self) {
        self.shadows = None;
        self.is_misled = false;
        self.evil.on_disable();
    }

    /// Translates the shadow of a head doorbell that the controller loads at `iova`, like the
    /// doorbell itself.
    pub fn translate_shadow(&mut self, iova: u64, word: u32) -> u32 {
        let queue = self.shadows.and_then(|[shadows, _]| completion_queue_at(shadows, iova));
        queue.map_or(word, |queue| self.translate_head(queue, word))
    }

    /// Translates the event index that the controller stores at `iova`: for a head doorbell it is
    /// the last head of the host.
    pub fn translate_event_index(&self, iova: u64, word: u32) -> u32 {
        let queue = self.shadows.and_then(|[_, indices]| completion_queue_at(indices, iova));
        let at = queue.and_then(|queue| self.completion_queues.get(&queue));
        at.and_then(|at| self.completion_rings.get(at)).map_or(word, |ring| ring.view.host_head())
    }

    /// Posts a completion at the position that the host polls next.
    fn emit(&mut self, iova: u64, emission: &CompletionOutput) -> Result<(), AccessFault> {
        let Some(ring) = self.completion_rings.get_mut(&iova) else { return Ok(()) };
        let (index, entry) = ring.view.place(emission);
        let at = iova + u64::from(index) * ENTRY_BYTES;
        let fault = AccessFault { iova: at, len_bytes: ENTRY_BYTES };
        self.check(Accessor::Device, fault, true)?;
        let Some(ring) = self.completion_rings.get_mut(&iova) else { return Ok(()) };
        let before = ring.entries.load_u32(index * 4 + 3)?;
        ring.entries.store_completion(index, tenmil_base::entry_from_dwords(entry))?;
        let [result, head, status] = [entry[0], entry[2], entry[3]].map(u64::from);
        self.record(Kind::CompletionStored, [at, result << 32 | head, status]);
        let is_visible = (before ^ entry[3]) & PHASE != 0;
        if is_visible && let Some(queue) = self.queue_at(iova) {
            let [cid_low, cid_high, ..] = entry[3].to_le_bytes();
            let cid = u16::from_le_bytes([cid_low, cid_high]);
            self.ledger.completed(queue, cid, entry[3] >> 17 == 0, emission.is_invalid);
        }
        Ok(())
    }

    fn queue_at(&self, iova: u64) -> Option<u16> {
        self.completion_queues.iter().find(|(_, at)| **at == iova).map(|(id, _)| *id)
    }

    fn check(
        &mut self,
        actor: Accessor,
        access: AccessFault,
        is_write: bool,
    ) -> Result<(), AccessFault> {
        let AccessFault { iova, len_bytes } = access;
        let at = self.clock.now();
        self.take_cut();
        match self.iommu.check(iova, len_bytes) {
            Ok(()) => {
                if actor == Accessor::Device
                    && let Err(failure) = self.ledger.check(at, iova, len_bytes, is_write)
                {
                    self.failures.push(failure);
                }
                return Ok(());
            }
            Err(AccessDenied::Stray(unmapped)) if actor == Accessor::Device && !self.is_misled => {
                self.failures.push(Violation::Stray { iova, len_bytes, is_write, unmapped, at });
            }
            Err(_) => {}
        }
        self.iommu.blocked += 1;
        self.record(Kind::Blocked, [iova, len_bytes, u64::from(is_write)]);
        Err(access)
    }
}

/// Completion queue whose shadow doorbell is at `iova` in `page`. Shadow doorbells have the stride
/// of the doorbells (Base 2.1 §5.2.5).
fn completion_queue_at(page: u64, iova: u64) -> Option<u16> {
    let distance = iova.checked_sub(page).filter(|distance| *distance < 4096)?;
    let index = distance >> (2 + tenmil_nvme_controller::STRIDE);
    if index % 2 == 1 { u16::try_from(index / 2).ok() } else { None }
}

/// Phase Tag in dword 3 of a completion.
const PHASE: u32 = 1 << 16;

#[cfg(test)]
mod tests {
    use tenmil_base::{Dma, Random, Span};

    use super::{Accessor, Bus, STRAY};
    use crate::failure::Violation;
    use crate::fault_injector::{DmaFault, Fault, FaultInjector, PlannedFault};
    use crate::host_memory::SimDma;
    use crate::ownership::Direction;

    fn bus(plan: &[PlannedFault]) -> Bus {
        Bus::new(1 << 16, 1 << 12, FaultInjector::new(plan, Random::new(1))).unwrap()
    }

    #[test]
    fn a_stray_access_fails_the_run_and_names_who_unmapped_the_memory() {
        let bus = bus(&[]);
        let dma = SimDma::new(&bus);
        let first = dma.allocate(4096).unwrap();
        let second = dma.allocate(4096).unwrap();
        let iova = dma.iova(second).unwrap();
        assert!(bus.device_write(Accessor::Device, iova, &[1; 16]).is_ok());
        dma.release(second);
        assert!(bus.device_write(Accessor::Device, iova, &[1; 16]).is_err());
        let failures = bus.with(|state| std::mem::take(&mut state.failures));
        let [Violation::Stray { unmapped: Some(unmapped), is_write: true, .. }] = failures[..]
        else {
            panic!("{failures:?}");
        };
        assert_eq!(unmapped.allocation, 2);
        dma.release(first);
    }

    #[test]
    fn a_device_that_is_cut_off_is_turned_away_and_that_is_no_failure() {
        let bus = bus(&[]);
        let dma = SimDma::new(&bus);
        let iova = dma.iova(dma.allocate(4096).unwrap()).unwrap();
        assert!(dma.revoke_access());
        assert!(bus.device_read(Accessor::Device, iova, &mut [0; 4]).is_err());
        dma.restore_access();
        assert!(bus.device_read(Accessor::Device, iova, &mut [0; 4]).is_ok());
        assert_eq!(bus.with(|state| (state.iommu.blocked, state.failures.len())), (1, 0));
    }

    #[test]
    fn what_an_evil_device_tries_is_turned_away_and_is_not_the_drivers_fault() {
        let bus = bus(&[PlannedFault::always(Fault::Dma(DmaFault::StrayWrite)).times(2)]);
        for _ in 0..3 {
            assert_eq!(bus.evil_turn(), None);
            let soon = bus.now().after(Span::from_us(20));
            bus.with(|state| state.clock.jump(soon));
        }
        assert_eq!(bus.with(|state| (state.iommu.blocked, state.failures.len())), (2, 0));
        assert!(bus.device_read(Accessor::Device, STRAY, &mut [0; 4]).is_err());
        assert_eq!(bus.with(|state| state.failures.len()), 1, "an honest device never does");
    }

    #[test]
    fn touching_a_buffer_that_was_handed_back_fails_the_run() {
        let bus = bus(&[]);
        let dma = SimDma::new(&bus);
        let iova = dma.iova(dma.allocate(4096).unwrap()).unwrap();
        bus.with(|state| state.ledger.mark_in_use(5, &[(iova, 4096)], Direction::FromDevice));
        assert!(bus.device_write(Accessor::Device, iova, &[1; 16]).is_ok());
        let now = bus.now();
        assert_eq!(bus.with(|state| state.ledger.return_to_host(5, now)), Ok(false));
        assert!(bus.device_write(Accessor::FaultInjector, iova, &[1; 16]).is_ok());
        assert!(bus.with(|state| state.failures.is_empty()));
        assert!(bus.device_write(Accessor::Device, iova, &[1; 16]).is_ok());
        let failures = bus.with(|state| state.failures.clone());
        assert!(matches!(failures[..], [Violation::AccessAfterCompletion { token: 5, .. }]));
    }
}
