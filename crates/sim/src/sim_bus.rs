//! Bus between host and device. Every register access, memory access and completion passes here, is
//! checked and recorded in the trace.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use tenmil_base::{
    AccessFault, Dma, Instant, Memory, Random, RingEntries, RingMemory, Segment, Span,
};
use tenmil_dma::{
    CommandStore, DeviceKind, DevicePool, MemoryBacking, MemoryMapping, RegionTable,
    SharedHostMemory, SharedRingEntries,
};

use crate::buffer_ownership::BufferOwnership;
use crate::event_trace::{EventTrace, TraceKind, digest_bytes};
use crate::fault_injector::{EmittedCompletion, FaultInjector, RingView};
use crate::iommu::{AccessDenied, SimIommu};
use crate::sim_clock::SimClock;
use crate::violation::Violation;

/// The bus of one world. Clones are cheap and refer to the same bus.
#[derive(Clone)]
pub struct SimBus {
    state: Arc<Mutex<BusState>>,
    pool: DevicePool,
    /// Device memory, which the host cannot access.
    private: Segment,
    /// IOVA of the pool.
    base: u64,
    memory: Segment,
}

/// Mutable state of the bus.
pub struct BusState {
    /// Clock.
    pub clock: SimClock,
    /// Trace.
    pub trace: EventTrace,
    /// IOMMU mappings.
    pub iommu: SimIommu,
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
    completion_rings: BTreeMap<u64, PostedCompletionRing>,
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
struct PostedCompletionRing {
    entries: SharedRingEntries,
    view: RingView,
}

/// Origin of a memory access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryAccessor {
    /// The controller or its medium, executing a command.
    Device,
    /// The fault injector.
    FaultInjector,
}

/// Bytes of a completion entry.
const ENTRY_BYTES: u64 = 16;
const DATA_SEEN_MAX: usize = 64;

impl SimBus {
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
            let mapping = MemoryMapping::new(len_bytes, MemoryBacking::Private)
                .map_err(|error| format!("map {len_bytes} bytes: {error:?}"))?;
            regions.add_mapping(mapping).map_err(|error| error.to_string())
        };
        let (memory, private) = (add(pool_bytes)?, add(private_bytes)?);
        let pool =
            DevicePool::new(regions.clone(), memory, DeviceKind::Emulated, CommandStore::Plain);
        let base = pool.iova(memory).ok_or("a pool has no address")?;
        let random = Random::new(evil.random_detail());
        let state = BusState {
            clock: SimClock::default(),
            trace: EventTrace::default(),
            iommu: SimIommu::default(),
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
    pub fn with_state<T>(&self, work: impl FnOnce(&mut BusState) -> T) -> T {
        // The state can still be printed after a panic in the code under test.
        work(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Current time.
    pub fn now(&self) -> Instant {
        self.with_state(|state| state.clock.now())
    }

    /// Adds a record to the trace.
    pub fn record(&self, kind: TraceKind, detail: [u64; 3]) {
        self.with_state(|state| state.record(kind, detail));
    }

    /// Reports a violation.
    pub fn report_violation(&self, failure: Violation) {
        self.with_state(|state| state.failures.push(failure));
    }

    /// Host memory.
    pub fn host_memory_pool(&self) -> &DevicePool {
        &self.pool
    }

    /// Device memory.
    pub fn device_private_memory(&self) -> Segment {
        self.private
    }

    /// IOVA of a segment of host memory. `None` for device memory.
    pub fn iova_of(&self, segment: Segment) -> Option<u64> {
        (segment.region == self.memory.region)
            .then(|| self.base + (segment.offset - self.memory.offset))
    }

    /// Signals an interrupt vector.
    pub fn signal_interrupt(&self, vector: u16) {
        self.with_state(|state| {
            state.interrupts |= 1_u64.checked_shl(vector.into()).unwrap_or(0);
            state.record(TraceKind::Interrupt, [vector.into(), 0, 0]);
        });
    }

    /// Reads host memory for the device.
    pub fn device_read(
        &self,
        actor: MemoryAccessor,
        iova: u64,
        into: &mut [u8],
    ) -> Result<(), AccessFault> {
        let segment = self.check_device_access(actor, iova, into.len(), false)?;
        self.load_segment(segment, into);
        self.record(TraceKind::DeviceRead, [iova, into.len() as u64, digest_bytes(into)]);
        Ok(())
    }

    /// Writes host memory for the device.
    pub fn device_write(
        &self,
        actor: MemoryAccessor,
        iova: u64,
        from: &[u8],
    ) -> Result<(), AccessFault> {
        let segment = self.check_device_access(actor, iova, from.len(), true)?;
        // Cannot fail: the memory is mapped.
        let _ = self.pool.store(segment, from);
        self.record(TraceKind::DeviceWrite, [iova, from.len() as u64, digest_bytes(from)]);
        Ok(())
    }

    /// Checks whether the device may access this memory, and resolves it.
    pub fn check_device_access(
        &self,
        actor: MemoryAccessor,
        iova: u64,
        len_bytes: usize,
        is_write: bool,
    ) -> Result<Segment, AccessFault> {
        let fault = AccessFault { iova, len_bytes: len_bytes as u64 };
        self.with_state(|state| state.check_access(actor, fault, is_write))?;
        self.segment_at(iova, len_bytes).ok_or(fault)
    }

    /// Resolves a ring for the controller.
    pub fn resolve_ring(
        &self,
        iova: u64,
        len_bytes: u64,
    ) -> Result<SharedRingEntries, AccessFault> {
        let fault = AccessFault { iova, len_bytes };
        self.with_state(|state| state.check_access(MemoryAccessor::Device, fault, false))?;
        SharedHostMemory::new(&self.pool).resolve_ring(iova, len_bytes)?.ok_or(fault)
    }

    /// Posts a completion at `index` of the ring at `iova`, which has `depth` entries. The fault
    /// injector may change or drop it.
    pub fn post_completion(
        &self,
        iova: u64,
        depth: u32,
        index: u32,
        entry: [u32; 4],
    ) -> Result<(), AccessFault> {
        let resolved = self.resolve_ring(iova, u64::from(depth) * ENTRY_BYTES)?;
        self.with_state(|state| {
            let now = state.clock.now();
            let emissions = state.evil.on_completion(now, depth, entry, &state.ledger);
            let ring = state.completion_rings.entry(iova);
            let ring = ring.or_insert_with(|| PostedCompletionRing {
                entries: resolved,
                view: RingView::new(depth),
            });
            ring.view.record_posted(index);
            emissions
                .iter()
                .try_for_each(|emission| state.post_completion_to_host_ring(iova, emission))
        })
    }

    /// Lets the fault injector corrupt the data of an admin command.
    pub fn corrupt_admin_data(&self, iova: u64, bytes: &mut [u8]) {
        self.with_state(|state| {
            let now = state.clock.now();
            let Some((command, at)) = state.ledger.admin_command_at(iova) else { return };
            if state.evil.corrupt_admin_data(now, &command, iova - at, bytes) {
                state.record(TraceKind::Mischief, [1, iova, u64::from(command.cdw10)]);
            }
        });
    }

    /// Injected bug: unmaps a buffer while the device may access it.
    pub(crate) fn unmap_early(&self, segment: Segment) {
        let Some(iova) = self.iova_of(segment) else { return };
        self.with_state(|state| {
            let now = state.clock.now();
            let _ = state.iommu.unmap(now, iova, segment.len_bytes.into());
        });
    }

    /// Posts completions that the fault injector has held back, and performs its unsolicited
    /// accesses. Returns an interrupt vector to signal.
    pub fn inject_unsolicited(&self) -> Option<u16> {
        use crate::fault_injector::{DmaFault, Fault as Evilness};
        self.with_state(|state| {
            let now = state.clock.now();
            for (queue, emission) in state.evil.take_released_completions(now) {
                if let Some(iova) = state.completion_queues.get(&queue).copied() {
                    let _ = state.post_completion_to_host_ring(iova, &emission);
                }
            }
        });
        let now = self.now();
        let deed = self.with_state(|state| state.evil.next_unsolicited_fault(now))?;
        self.record(TraceKind::Mischief, [0, 0, 0]);
        match deed {
            Evilness::Interrupt { vector } => return Some(vector),
            Evilness::Dma(DmaFault::StrayWrite) => {
                let _ = self.device_write(MemoryAccessor::FaultInjector, STRAY, &[0xee; 64]);
            }
            Evilness::Dma(DmaFault::StrayRead) => {
                let _ = self.device_read(MemoryAccessor::FaultInjector, STRAY, &mut [0; 64]);
            }
            Evilness::Dma(DmaFault::ScribbleRing) => self.write_stray_to_ring(),
            Evilness::Dma(DmaFault::ScribbleBuffers) => self.write_stray_to_buffers(),
            _ => {}
        }
        None
    }

    fn write_stray_to_ring(&self) {
        let ring = self.with_state(|state| {
            let iova = *state.completion_queues.get(&1)?;
            let depth = state.completion_rings.get(&iova).map_or(2, |ring| ring.view.entry_count());
            // Random bytes may look like any completion, so every request in flight may be
            // completed wrongly.
            state.ledger.taint_all();
            state.ledger.record_device_stop();
            state.is_scribbled = true;
            let mut random = Random::new(state.evil.random_detail());
            let len_bytes = usize::try_from(u64::from(depth) * ENTRY_BYTES).unwrap_or(0);
            let noise: Vec<u8> =
                (0..len_bytes).map(|_| random.next_u64().to_le_bytes()[7]).collect();
            Some((iova, noise))
        });
        if let Some((iova, noise)) = ring {
            let _ = self.device_write(MemoryAccessor::FaultInjector, iova, &noise);
        }
    }

    fn write_stray_to_buffers(&self) {
        let addresses = self.with_state(|state| {
            state.is_scribbled = true;
            state.data_seen.clone()
        });
        for iova in addresses {
            let _ = self.device_write(MemoryAccessor::FaultInjector, iova, &[0xee; 512]);
        }
    }

    /// Resolves memory without a check of mapping or ownership.
    pub fn resolve_unchecked(&self, iova: u64, len_bytes: usize) -> Result<Segment, AccessFault> {
        let fault = AccessFault { iova, len_bytes: len_bytes as u64 };
        self.segment_at(iova, len_bytes).ok_or(fault)
    }

    fn segment_at(&self, iova: u64, len_bytes: usize) -> Option<Segment> {
        let offset = iova.checked_sub(self.base)?;
        let len_bytes = u32::try_from(len_bytes).ok()?;
        let segment =
            Segment { region: self.memory.region, offset: self.memory.offset + offset, len_bytes };
        self.pool.contains(segment).then_some(segment)
    }

    fn load_segment(&self, segment: Segment, into: &mut [u8]) {
        // Cannot fail: the memory is mapped.
        let _ = self.pool.load(segment, into);
    }
}

/// Address that is never mapped.
const STRAY: u64 = 0xdead_0000;

impl BusState {
    /// Adds a record to the trace.
    pub fn record(&mut self, kind: TraceKind, detail: [u64; 3]) {
        self.trace.record(self.clock.now(), kind, detail);
    }

    /// Starts to revoke the DMA access. Returns true once it is complete.
    pub fn start_revocation(&mut self) -> bool {
        let now = self.clock.now();
        if self.cut_off_at.is_none() {
            self.record(TraceKind::CutOff, [0; 3]);
            self.cut_off_at = Some(now.after(self.cut_off_lag));
        }
        self.complete_due_revocation();
        self.ignores_cut_off || self.hastens_cut_off || self.iommu.is_revoked()
    }

    /// Restores the DMA access.
    pub fn restore_access(&mut self) {
        self.cut_off_at = None;
        self.iommu.set_revoked(false);
    }

    /// Completes a revocation that is due.
    fn complete_due_revocation(&mut self) {
        let is_due = self.cut_off_at.is_some_and(|at| self.clock.now() >= at);
        if is_due && !self.iommu.is_revoked() && !self.ignores_cut_off {
            self.iommu.set_revoked(true);
            self.ledger.record_device_stop();
        }
    }

    /// Delays a device access by a random time up to `longest`. Returns its due time.
    pub fn defer_access(&mut self, longest: Span) -> Instant {
        let due = self.clock.now().after(Span { ns: self.random.below(longest.ns + 1) });
        *self.late.entry(due).or_default() += 1;
        due
    }

    /// Removes a delayed access that was due at `due`.
    pub fn remove_deferred(&mut self, due: Instant) {
        if let Some(count) = self.late.get_mut(&due) {
            *count -= 1;
            if *count == 0 {
                self.late.remove(&due);
            }
        }
    }

    /// Due time of the next delayed access.
    pub fn next_deferred_access_at(&self) -> Instant {
        self.late.keys().next().copied().unwrap_or(Instant::NEVER)
    }

    /// Registers a new completion queue, whose ring starts empty.
    pub fn record_completion_queue_created(&mut self, id: u16, iova: u64) {
        self.completion_queues.insert(id, iova);
        self.completion_rings.remove(&iova);
    }

    /// Records that the device fetched a command from the submission queue at `ring`.
    pub fn record_fetch(&mut self, ring: u64, command: &[u64; 8]) {
        if self.ledger.ring_address(0) != Some(ring) {
            if command[3] != 0 && self.data_seen.len() < DATA_SEEN_MAX {
                self.data_seen.push(command[3]);
            }
            return;
        }
        let [opcode, _, cid_low, cid_high, ..] = command[0].to_le_bytes();
        let cid = u16::from_le_bytes([cid_low, cid_high]);
        if opcode == tenmil_wire::AdminOpcode::CreateIoCompletionQueue.code() {
            let [id_low, id_high, ..] = command[5].to_le_bytes();
            self.record_completion_queue_created(u16::from_le_bytes([id_low, id_high]), command[3]);
        }
        if opcode == tenmil_wire::AdminOpcode::DoorbellBufferConfig.code() {
            self.shadows = Some([command[3], command[4]]);
        }
        let now = self.clock.now();
        if let Some(emission) = self.evil.on_admin_command(now, opcode, cid)
            && let Some(iova) = self.completion_queues.get(&0).copied()
        {
            let _ = self.post_completion_to_host_ring(iova, &emission);
        }
    }

    /// Translates the value that the host writes to the head doorbell of completion queue `id` for
    /// the controller.
    pub fn translate_head_doorbell(&mut self, id: u16, head: u32) -> u32 {
        let ring = self.completion_queues.get(&id).and_then(|at| self.completion_rings.get_mut(at));
        ring.map_or(head, |ring| ring.view.translate_head(head))
    }

    /// Handles a disabled controller.
    pub fn handle_controller_disable(&mut self) {
        self.shadows = None;
        self.is_misled = false;
        self.evil.on_disable();
    }

    /// Translates the shadow of a head doorbell that the controller loads at `iova`, like the
    /// doorbell itself.
    pub fn translate_shadow_head(&mut self, iova: u64, word: u32) -> u32 {
        let queue = self.shadows.and_then(|[shadows, _]| completion_queue_of_shadow(shadows, iova));
        queue.map_or(word, |queue| self.translate_head_doorbell(queue, word))
    }

    /// Translates the event index that the controller stores at `iova`: for a head doorbell it is
    /// the last head of the host.
    pub fn translate_event_index(&self, iova: u64, word: u32) -> u32 {
        let queue = self.shadows.and_then(|[_, indices]| completion_queue_of_shadow(indices, iova));
        let at = queue.and_then(|queue| self.completion_queues.get(&queue));
        at.and_then(|at| self.completion_rings.get(at)).map_or(word, |ring| ring.view.host_head())
    }

    /// Posts a completion at the position that the host polls next.
    fn post_completion_to_host_ring(
        &mut self,
        iova: u64,
        emission: &EmittedCompletion,
    ) -> Result<(), AccessFault> {
        let Some(ring) = self.completion_rings.get_mut(&iova) else { return Ok(()) };
        let (index, entry) = ring.view.next_host_entry(emission);
        let at = iova + u64::from(index) * ENTRY_BYTES;
        let fault = AccessFault { iova: at, len_bytes: ENTRY_BYTES };
        self.check_access(MemoryAccessor::Device, fault, true)?;
        let Some(ring) = self.completion_rings.get_mut(&iova) else { return Ok(()) };
        let before = ring.entries.load_u32(index * 4 + 3)?;
        ring.entries.store_completion(index, tenmil_base::entry_from_dwords(entry))?;
        let [result, head, status] = [entry[0], entry[2], entry[3]].map(u64::from);
        self.record(TraceKind::CompletionStored, [at, result << 32 | head, status]);
        let is_visible = (before ^ entry[3]) & PHASE != 0;
        if is_visible && let Some(queue) = self.completion_queue_of_ring(iova) {
            let [cid_low, cid_high, ..] = entry[3].to_le_bytes();
            let cid = u16::from_le_bytes([cid_low, cid_high]);
            self.ledger.record_completion(queue, cid, entry[3] >> 17 == 0, emission.is_invalid);
        }
        Ok(())
    }

    fn completion_queue_of_ring(&self, iova: u64) -> Option<u16> {
        self.completion_queues.iter().find(|(_, at)| **at == iova).map(|(id, _)| *id)
    }

    fn check_access(
        &mut self,
        actor: MemoryAccessor,
        access: AccessFault,
        is_write: bool,
    ) -> Result<(), AccessFault> {
        let AccessFault { iova, len_bytes } = access;
        let at = self.clock.now();
        self.complete_due_revocation();
        match self.iommu.check_access(iova, len_bytes) {
            Ok(()) => {
                if actor == MemoryAccessor::Device
                    && let Err(failure) =
                        self.ledger.check_device_access(at, iova, len_bytes, is_write)
                {
                    self.failures.push(failure);
                }
                return Ok(());
            }
            Err(AccessDenied::Stray(unmapped))
                if actor == MemoryAccessor::Device && !self.is_misled =>
            {
                self.failures.push(Violation::Stray { iova, len_bytes, is_write, unmapped, at });
            }
            Err(_) => {}
        }
        self.iommu.blocked += 1;
        self.record(TraceKind::Blocked, [iova, len_bytes, u64::from(is_write)]);
        Err(access)
    }
}

/// Completion queue whose shadow doorbell is at `iova` in `page`. Shadow doorbells have the stride
/// of the doorbells (Base 2.1 §5.2.5).
fn completion_queue_of_shadow(page: u64, iova: u64) -> Option<u16> {
    let distance = iova.checked_sub(page).filter(|distance| *distance < 4096)?;
    let index = distance >> (2 + tenmil_nvme_controller::STRIDE);
    if index % 2 == 1 { u16::try_from(index / 2).ok() } else { None }
}

/// Phase Tag in dword 3 of a completion.
const PHASE: u32 = 1 << 16;

#[cfg(test)]
mod tests {
    use tenmil_base::{Dma, Random, Span};

    use super::{MemoryAccessor, STRAY, SimBus};
    use crate::buffer_ownership::DataDirection;
    use crate::fault_injector::{DmaFault, Fault, FaultInjector, PlannedFault};
    use crate::host_memory::SimDma;
    use crate::violation::Violation;

    fn test_bus(plan: &[PlannedFault]) -> SimBus {
        SimBus::new(1 << 16, 1 << 12, FaultInjector::new(plan, Random::new(1))).unwrap()
    }

    #[test]
    fn stray_access_is_a_violation_that_names_who_unmapped_the_memory() {
        let bus = test_bus(&[]);
        let dma = SimDma::new(&bus);
        let first = dma.allocate(4096).unwrap();
        let second = dma.allocate(4096).unwrap();
        let iova = dma.iova(second).unwrap();
        assert!(bus.device_write(MemoryAccessor::Device, iova, &[1; 16]).is_ok());
        dma.release(second);
        assert!(bus.device_write(MemoryAccessor::Device, iova, &[1; 16]).is_err());
        let failures = bus.with_state(|state| std::mem::take(&mut state.failures));
        let [Violation::Stray { unmapped: Some(unmapped), is_write: true, .. }] = failures[..]
        else {
            panic!("{failures:?}");
        };
        assert_eq!(unmapped.allocation, 2);
        dma.release(first);
    }

    #[test]
    fn access_after_revocation_is_rejected_without_a_violation() {
        let bus = test_bus(&[]);
        let dma = SimDma::new(&bus);
        let iova = dma.iova(dma.allocate(4096).unwrap()).unwrap();
        assert!(dma.revoke_access());
        assert!(bus.device_read(MemoryAccessor::Device, iova, &mut [0; 4]).is_err());
        dma.restore_access();
        assert!(bus.device_read(MemoryAccessor::Device, iova, &mut [0; 4]).is_ok());
        assert_eq!(bus.with_state(|state| (state.iommu.blocked, state.failures.len())), (1, 0));
    }

    #[test]
    fn unsolicited_device_access_is_rejected_and_not_attributed_to_the_driver() {
        let bus = test_bus(&[
            PlannedFault::for_all_commands(Fault::Dma(DmaFault::StrayWrite)).with_count(2)
        ]);
        for _ in 0..3 {
            assert_eq!(bus.inject_unsolicited(), None);
            let soon = bus.now().after(Span::from_us(20));
            bus.with_state(|state| state.clock.jump_to(soon));
        }
        assert_eq!(bus.with_state(|state| (state.iommu.blocked, state.failures.len())), (2, 0));
        assert!(bus.device_read(MemoryAccessor::Device, STRAY, &mut [0; 4]).is_err());
        assert_eq!(bus.with_state(|state| state.failures.len()), 1, "an honest device never does");
    }

    #[test]
    fn access_to_a_returned_buffer_is_a_violation() {
        let bus = test_bus(&[]);
        let dma = SimDma::new(&bus);
        let iova = dma.iova(dma.allocate(4096).unwrap()).unwrap();
        bus.with_state(|state| {
            state.ledger.mark_in_use(5, &[(iova, 4096)], DataDirection::FromDevice)
        });
        assert!(bus.device_write(MemoryAccessor::Device, iova, &[1; 16]).is_ok());
        let now = bus.now();
        assert_eq!(bus.with_state(|state| state.ledger.return_to_host(5, now)), Ok(false));
        assert!(bus.device_write(MemoryAccessor::FaultInjector, iova, &[1; 16]).is_ok());
        assert!(bus.with_state(|state| state.failures.is_empty()));
        assert!(bus.device_write(MemoryAccessor::Device, iova, &[1; 16]).is_ok());
        let failures = bus.with_state(|state| state.failures.clone());
        assert!(matches!(failures[..], [Violation::AccessAfterCompletion { token: 5, .. }]));
    }
}
