//! Device side of memory: every access of the controller and its medium is checked when it is
//! performed, and may be delayed.

use std::collections::BTreeMap;

use tenmil_base::{
    AccessCompletion, AccessFault, AccessId, AccessProgress, HostMemory, Instant, InvalidSegment,
    Memory, RingEntries, RingMemory, Segment, Span,
};
use tenmil_dma::SharedRingEntries;

use crate::event_trace::TraceKind;
use crate::sim_bus::{MemoryAccessor, SimBus};

/// How the device accesses data in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataAccessMode {
    /// The medium transfers data directly to and from host memory.
    Direct,
    /// The controller copies data at once.
    Copied,
    /// The controller copies data with a delay of up to this time.
    Late(Span),
}

/// Host memory as seen by the controller. A clone is another channel to the same memory with its
/// own tickets.
pub struct DeviceMemory {
    bus: SimBus,
    reach: DataAccessMode,
    open: BTreeMap<u32, PendingAccess>,
    arrived: BTreeMap<u32, Vec<u8>>,
}

/// A ring in host memory, or a page of shadow doorbells.
pub struct DeviceEntries {
    bus: SimBus,
    inner: SharedRingEntries,
    iova: u64,
    len_bytes: u64,
}

/// Memory accessible to the medium: mapped host memory and device memory.
#[derive(Clone)]
pub struct MediumMemory {
    bus: SimBus,
}

/// An access that was requested and not performed yet.
struct PendingAccess {
    due: Instant,
    iova: u64,
    access: DeferredAccessKind,
}

enum DeferredAccessKind {
    Read { len_bytes: usize },
    Write { bytes: Vec<u8> },
}

const COMMAND_BYTES: u64 = 64;
const COMPLETION_BYTES: u64 = 16;
const WORD_BYTES: u64 = 4;

impl DeviceMemory {
    /// Creates a view over `bus`.
    pub fn new(bus: &SimBus, reach: DataAccessMode) -> Self {
        Self { bus: bus.clone(), reach, open: BTreeMap::new(), arrived: BTreeMap::new() }
    }

    fn defer_access(
        &mut self,
        ticket: AccessId,
        iova: u64,
        access: DeferredAccessKind,
    ) -> AccessProgress {
        let DataAccessMode::Late(longest) = self.reach else { return AccessProgress::Done };
        let due = self.bus.with_state(|state| state.defer_access(longest));
        let before = self.open.insert(ticket.0, PendingAccess { due, iova, access });
        debug_assert!(before.is_none(), "ticket {ticket:?} is open already");
        AccessProgress::Pending
    }

    fn write_now(&self, iova: u64, from: &[u8]) -> Result<(), AccessFault> {
        let mut bytes = from.to_vec();
        self.bus.corrupt_admin_data(iova, &mut bytes);
        self.bus.device_write(MemoryAccessor::Device, iova, &bytes)
    }
}

impl RingMemory for DeviceMemory {
    type Entries = DeviceEntries;

    fn resolve_ring(
        &mut self,
        iova: u64,
        len_bytes: u64,
    ) -> Result<Option<DeviceEntries>, AccessFault> {
        let inner = self.bus.resolve_ring(iova, len_bytes)?;
        Ok(Some(DeviceEntries { bus: self.bus.clone(), inner, iova, len_bytes }))
    }
}

impl HostMemory for DeviceMemory {
    fn resolve(&mut self, iova: u64, len_bytes: u32) -> Result<Option<Segment>, AccessFault> {
        let segment = self.bus.check_device_access(
            MemoryAccessor::Device,
            iova,
            len_bytes as usize,
            false,
        )?;
        Ok((self.reach == DataAccessMode::Direct).then_some(segment))
    }

    fn read(
        &mut self,
        ticket: AccessId,
        iova: u64,
        into: &mut [u8],
    ) -> Result<AccessProgress, AccessFault> {
        if matches!(self.reach, DataAccessMode::Late(_)) {
            return Ok(self.defer_access(
                ticket,
                iova,
                DeferredAccessKind::Read { len_bytes: into.len() },
            ));
        }
        self.bus.device_read(MemoryAccessor::Device, iova, into)?;
        Ok(AccessProgress::Done)
    }

    fn write(
        &mut self,
        ticket: AccessId,
        iova: u64,
        from: &[u8],
    ) -> Result<AccessProgress, AccessFault> {
        if matches!(self.reach, DataAccessMode::Late(_)) {
            return Ok(self.defer_access(
                ticket,
                iova,
                DeferredAccessKind::Write { bytes: from.to_vec() },
            ));
        }
        self.write_now(iova, from)?;
        Ok(AccessProgress::Done)
    }

    fn poll(&mut self) -> Option<AccessCompletion> {
        let now = self.bus.now();
        let (&number, _) = self
            .open
            .iter()
            .filter(|(_, open)| open.due <= now)
            .min_by_key(|(_, open)| open.due)?;
        let PendingAccess { iova, access, due } = self.open.remove(&number)?;
        self.bus.with_state(|state| state.remove_deferred(due));
        let result = match access {
            DeferredAccessKind::Read { len_bytes } => {
                let mut bytes = vec![0; len_bytes];
                let result = self.bus.device_read(MemoryAccessor::Device, iova, &mut bytes);
                self.arrived.insert(number, bytes);
                result
            }
            DeferredAccessKind::Write { bytes } => self.write_now(iova, &bytes),
        };
        Some(AccessCompletion { id: AccessId(number), result })
    }

    fn copy_out_read_data(&mut self, ticket: AccessId, into: &mut [u8]) {
        if let Some(bytes) = self.arrived.remove(&ticket.0) {
            into.copy_from_slice(&bytes);
        }
    }
}

impl Clone for DeviceMemory {
    fn clone(&self) -> Self {
        Self::new(&self.bus, self.reach)
    }
}

impl Drop for DeviceMemory {
    /// Cancels the accesses in flight.
    fn drop(&mut self) {
        for open in self.open.values() {
            self.bus.with_state(|state| state.remove_deferred(open.due));
        }
    }
}

impl DeviceEntries {
    fn check_entry(
        &self,
        index: u32,
        entry_bytes: u64,
        is_write: bool,
    ) -> Result<u64, AccessFault> {
        let at = self.iova + u64::from(index) * entry_bytes;
        let len_bytes = usize::try_from(entry_bytes).unwrap_or(usize::MAX);
        self.bus.check_device_access(MemoryAccessor::Device, at, len_bytes, is_write)?;
        Ok(at)
    }
}

impl RingEntries for DeviceEntries {
    fn load_command(&self, index: u32) -> Result<[u64; 8], AccessFault> {
        self.check_entry(index, COMMAND_BYTES, false)?;
        let command = self.inner.load_command(index)?;
        self.bus.with_state(|state| {
            state.record(TraceKind::CommandFetched, [self.iova, index.into(), command[0]]);
            state.record_fetch(self.iova, &command);
        });
        Ok(command)
    }

    fn store_completion(
        &mut self,
        index: u32,
        entry: tenmil_base::CompletionEntry,
    ) -> Result<(), AccessFault> {
        let depth = u32::try_from(self.len_bytes / COMPLETION_BYTES).unwrap_or(u32::MAX);
        self.bus.post_completion(self.iova, depth, index, tenmil_base::entry_to_dwords(entry))
    }

    fn load_u32(&self, index: u32) -> Result<u32, AccessFault> {
        let at = self.check_entry(index, WORD_BYTES, false)?;
        let word = self.inner.load_u32(index)?;
        Ok(self.bus.with_state(|state| state.translate_shadow_head(at, word)))
    }

    fn store_u32(&mut self, index: u32, value: u32) -> Result<(), AccessFault> {
        let at = self.check_entry(index, WORD_BYTES, true)?;
        let value = self.bus.with_state(|state| state.translate_event_index(at, value));
        self.bus.record(TraceKind::DeviceWrite, [at, WORD_BYTES, value.into()]);
        self.inner.store_u32(index, value)
    }
}

impl MediumMemory {
    /// Memory accessible to a medium behind `bus`.
    pub fn new(bus: &SimBus) -> Self {
        Self { bus: bus.clone() }
    }
}

impl Memory for MediumMemory {
    fn load(&self, segment: Segment, into: &mut [u8]) -> Result<(), InvalidSegment> {
        match self.bus.iova_of(segment) {
            Some(iova) => self
                .bus
                .device_read(MemoryAccessor::Device, iova, into)
                .map_err(|_| InvalidSegment(segment)),
            None => self.bus.host_memory_pool().regions().load(segment, into),
        }
    }

    fn store(&self, segment: Segment, from: &[u8]) -> Result<(), InvalidSegment> {
        match self.bus.iova_of(segment) {
            Some(iova) => self
                .bus
                .device_write(MemoryAccessor::Device, iova, from)
                .map_err(|_| InvalidSegment(segment)),
            None => self.bus.host_memory_pool().regions().store(segment, from),
        }
    }

    fn fill(&self, segment: Segment, byte: u8) -> Result<(), InvalidSegment> {
        self.store(segment, &vec![byte; segment.len_bytes as usize])
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{AccessId, AccessProgress, Dma, HostMemory, Memory, Random, Span};

    use super::{DataAccessMode, DeviceMemory, MediumMemory};
    use crate::fault_injector::FaultInjector;
    use crate::host_memory::SimDma;
    use crate::sim_bus::SimBus;

    fn test_bus() -> SimBus {
        SimBus::new(1 << 16, 1 << 12, FaultInjector::new(&[], Random::new(1))).unwrap()
    }

    fn jump_to_next_deferred_access(bus: &SimBus) {
        bus.with_state(|state| state.clock.jump_to(state.next_deferred_access_at()));
    }

    #[test]
    fn deferred_accesses_happen_when_due() {
        let bus = test_bus();
        let dma = SimDma::new(&bus);
        let segment = dma.allocate(4096).unwrap();
        let iova = dma.iova(segment).unwrap();
        let reach = DataAccessMode::Late(Span::from_us(50));
        let mut device = DeviceMemory::new(&bus, reach);
        assert_eq!(device.write(AccessId(1), iova, b"late"), Ok(AccessProgress::Pending));
        assert_eq!(device.poll(), None);
        jump_to_next_deferred_access(&bus);
        assert_eq!(device.poll().unwrap().result, Ok(()));
        assert_eq!(device.read(AccessId(2), iova, &mut [0; 4]), Ok(AccessProgress::Pending));
        jump_to_next_deferred_access(&bus);
        assert_eq!(device.poll().unwrap().id, AccessId(2));
        let mut bytes = [0; 4];
        device.copy_out_read_data(AccessId(2), &mut bytes);
        assert_eq!(&bytes, b"late");
    }

    #[test]
    fn deferred_write_to_released_memory_is_a_stray_access() {
        let bus = test_bus();
        let dma = SimDma::new(&bus);
        let segment = dma.allocate(4096).unwrap();
        let iova = dma.iova(segment).unwrap();
        let reach = DataAccessMode::Late(Span::from_us(50));
        let mut device = DeviceMemory::new(&bus, reach);
        device.write(AccessId(1), iova, b"late").unwrap();
        dma.release(segment);
        jump_to_next_deferred_access(&bus);
        assert!(device.poll().unwrap().result.is_err());
        assert_eq!(bus.with_state(|state| state.failures.len()), 1);
    }

    #[test]
    fn medium_accesses_device_memory_always_and_host_memory_if_mapped() {
        let bus = test_bus();
        let medium = MediumMemory::new(&bus);
        let own = bus.device_private_memory().slice(0, 4).unwrap();
        medium.store(own, b"mine").unwrap();
        let mut bytes = [0; 4];
        medium.load(own, &mut bytes).unwrap();
        assert_eq!(&bytes, b"mine");

        let dma = SimDma::new(&bus);
        let theirs = dma.allocate(4).unwrap();
        assert!(medium.fill(theirs, 7).is_ok());
        dma.release(theirs);
        assert!(medium.fill(theirs, 7).is_err());
        assert_eq!(bus.with_state(|state| state.failures.len()), 1);
    }
}
