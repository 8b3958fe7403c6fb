//! Device side of memory: every access of the controller and its medium is checked when it is
//! performed, and may be delayed.

use std::collections::BTreeMap;

use tenmil_base::{
    AccessCompletion, AccessFault, AccessId, AccessProgress, HostMemory, Instant, InvalidSegment,
    Memory, RingEntries, RingMemory, Segment, Span,
};
use tenmil_dma::SharedEntries;

use crate::bus::{Accessor, Bus};
use crate::trace::Kind;

/// How the device accesses data in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataAccess {
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
    bus: Bus,
    reach: DataAccess,
    open: BTreeMap<u32, PendingAccess>,
    arrived: BTreeMap<u32, Vec<u8>>,
}

/// A ring in host memory, or a page of shadow doorbells.
pub struct DeviceEntries {
    bus: Bus,
    inner: SharedEntries,
    iova: u64,
    len_bytes: u64,
}

/// Memory accessible to the medium: mapped host memory and device memory.
#[derive(Clone)]
pub struct MediumMemory {
    bus: Bus,
}

/// An access that was requested and not performed yet.
struct PendingAccess {
    due: Instant,
    iova: u64,
    access: Access,
}

enum Access {
    Read { len_bytes: usize },
    Write { bytes: Vec<u8> },
}

const COMMAND_BYTES: u64 = 64;
const COMPLETION_BYTES: u64 = 16;
const WORD_BYTES: u64 = 4;

impl DeviceMemory {
    /// Creates a view over `bus`.
    pub fn new(bus: &Bus, reach: DataAccess) -> Self {
        Self { bus: bus.clone(), reach, open: BTreeMap::new(), arrived: BTreeMap::new() }
    }

    fn defer(&mut self, ticket: AccessId, iova: u64, access: Access) -> AccessProgress {
        let DataAccess::Late(longest) = self.reach else { return AccessProgress::Done };
        let due = self.bus.with(|state| state.defer(longest));
        let before = self.open.insert(ticket.0, PendingAccess { due, iova, access });
        debug_assert!(before.is_none(), "ticket {ticket:?} is open already");
        AccessProgress::Pending
    }

    fn write_now(&self, iova: u64, from: &[u8]) -> Result<(), AccessFault> {
        let mut bytes = from.to_vec();
        self.bus.falsify(iova, &mut bytes);
        self.bus.device_write(Accessor::Device, iova, &bytes)
    }
}

impl RingMemory for DeviceMemory {
    type Entries = DeviceEntries;

    fn entries(&mut self, iova: u64, len_bytes: u64) -> Result<Option<DeviceEntries>, AccessFault> {
        let inner = self.bus.entries(iova, len_bytes)?;
        Ok(Some(DeviceEntries { bus: self.bus.clone(), inner, iova, len_bytes }))
    }
}

impl HostMemory for DeviceMemory {
    fn resolve(&mut self, iova: u64, len_bytes: u32) -> Result<Option<Segment>, AccessFault> {
        let segment = self.bus.check(Accessor::Device, iova, len_bytes as usize, false)?;
        Ok((self.reach == DataAccess::Direct).then_some(segment))
    }

    fn read(
        &mut self,
        ticket: AccessId,
        iova: u64,
        into: &mut [u8],
    ) -> Result<AccessProgress, AccessFault> {
        if matches!(self.reach, DataAccess::Late(_)) {
            return Ok(self.defer(ticket, iova, Access::Read { len_bytes: into.len() }));
        }
        self.bus.device_read(Accessor::Device, iova, into)?;
        Ok(AccessProgress::Done)
    }

    fn write(
        &mut self,
        ticket: AccessId,
        iova: u64,
        from: &[u8],
    ) -> Result<AccessProgress, AccessFault> {
        if matches!(self.reach, DataAccess::Late(_)) {
            return Ok(self.defer(ticket, iova, Access::Write { bytes: from.to_vec() }));
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
        self.bus.with(|state| state.arrived(due));
        let result = match access {
            Access::Read { len_bytes } => {
                let mut bytes = vec![0; len_bytes];
                let result = self.bus.device_read(Accessor::Device, iova, &mut bytes);
                self.arrived.insert(number, bytes);
                result
            }
            Access::Write { bytes } => self.write_now(iova, &bytes),
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
            self.bus.with(|state| state.arrived(open.due));
        }
    }
}

impl DeviceEntries {
    fn check(&self, index: u32, entry_bytes: u64, is_write: bool) -> Result<u64, AccessFault> {
        let at = self.iova + u64::from(index) * entry_bytes;
        let len_bytes = usize::try_from(entry_bytes).unwrap_or(usize::MAX);
        self.bus.check(Accessor::Device, at, len_bytes, is_write)?;
        Ok(at)
    }
}

impl RingEntries for DeviceEntries {
    fn load_command(&self, index: u32) -> Result<[u64; 8], AccessFault> {
        self.check(index, COMMAND_BYTES, false)?;
        let command = self.inner.load_command(index)?;
        self.bus.with(|state| {
            state.record(Kind::CommandFetched, [self.iova, index.into(), command[0]]);
            state.fetched(self.iova, &command);
        });
        Ok(command)
    }

    fn store_completion(
        &mut self,
        index: u32,
        entry: tenmil_base::CompletionEntry,
    ) -> Result<(), AccessFault> {
        let depth = u32::try_from(self.len_bytes / COMPLETION_BYTES).unwrap_or(u32::MAX);
        self.bus.post(self.iova, depth, index, tenmil_base::entry_to_dwords(entry))
    }

    fn load_u32(&self, index: u32) -> Result<u32, AccessFault> {
        let at = self.check(index, WORD_BYTES, false)?;
        let word = self.inner.load_u32(index)?;
        Ok(self.bus.with(|state| state.translate_shadow(at, word)))
    }

    fn store_u32(&mut self, index: u32, value: u32) -> Result<(), AccessFault> {
        let at = self.check(index, WORD_BYTES, true)?;
        let value = self.bus.with(|state| state.translate_event_index(at, value));
        self.bus.record(Kind::DeviceWrite, [at, WORD_BYTES, value.into()]);
        self.inner.store_u32(index, value)
    }
}

impl MediumMemory {
    /// Memory accessible to a medium behind `bus`.
    pub fn new(bus: &Bus) -> Self {
        Self { bus: bus.clone() }
    }
}

impl Memory for MediumMemory {
    fn load(&self, segment: Segment, into: &mut [u8]) -> Result<(), InvalidSegment> {
        match self.bus.address(segment) {
            Some(iova) => self
                .bus
                .device_read(Accessor::Device, iova, into)
                .map_err(|_| InvalidSegment(segment)),
            None => self.bus.pool().regions().load(segment, into),
        }
    }

    fn store(&self, segment: Segment, from: &[u8]) -> Result<(), InvalidSegment> {
        match self.bus.address(segment) {
            Some(iova) => self
                .bus
                .device_write(Accessor::Device, iova, from)
                .map_err(|_| InvalidSegment(segment)),
            None => self.bus.pool().regions().store(segment, from),
        }
    }

    fn fill(&self, segment: Segment, byte: u8) -> Result<(), InvalidSegment> {
        self.store(segment, &vec![byte; segment.len_bytes as usize])
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{AccessId, AccessProgress, Dma, HostMemory, Memory, Random, Span};

    use super::{DataAccess, DeviceMemory, MediumMemory};
    use crate::bus::Bus;
    use crate::fault_injector::FaultInjector;
    use crate::host_memory::SimDma;

    fn bus() -> Bus {
        Bus::new(1 << 16, 1 << 12, FaultInjector::new(&[], Random::new(1))).unwrap()
    }

    fn jump(bus: &Bus) {
        bus.with(|state| state.clock.jump(state.late_wake_at()));
    }

    #[test]
    fn late_accesses_are_made_when_they_are_due_and_not_before() {
        let bus = bus();
        let dma = SimDma::new(&bus);
        let segment = dma.allocate(4096).unwrap();
        let iova = dma.iova(segment).unwrap();
        let reach = DataAccess::Late(Span::from_us(50));
        let mut device = DeviceMemory::new(&bus, reach);
        assert_eq!(device.write(AccessId(1), iova, b"late"), Ok(AccessProgress::Pending));
        assert_eq!(device.poll(), None);
        jump(&bus);
        assert_eq!(device.poll().unwrap().result, Ok(()));
        assert_eq!(device.read(AccessId(2), iova, &mut [0; 4]), Ok(AccessProgress::Pending));
        jump(&bus);
        assert_eq!(device.poll().unwrap().id, AccessId(2));
        let mut bytes = [0; 4];
        device.copy_out_read_data(AccessId(2), &mut bytes);
        assert_eq!(&bytes, b"late");
    }

    #[test]
    fn a_late_write_to_memory_that_was_released_meanwhile_is_a_stray() {
        let bus = bus();
        let dma = SimDma::new(&bus);
        let segment = dma.allocate(4096).unwrap();
        let iova = dma.iova(segment).unwrap();
        let reach = DataAccess::Late(Span::from_us(50));
        let mut device = DeviceMemory::new(&bus, reach);
        device.write(AccessId(1), iova, b"late").unwrap();
        dma.release(segment);
        jump(&bus);
        assert!(device.poll().unwrap().result.is_err());
        assert_eq!(bus.with(|state| state.failures.len()), 1);
    }

    #[test]
    fn a_medium_reaches_the_devices_own_memory_always_and_the_hosts_if_it_is_mapped() {
        let bus = bus();
        let medium = MediumMemory::new(&bus);
        let own = bus.private().slice(0, 4).unwrap();
        medium.store(own, b"mine").unwrap();
        let mut bytes = [0; 4];
        medium.load(own, &mut bytes).unwrap();
        assert_eq!(&bytes, b"mine");

        let dma = SimDma::new(&bus);
        let theirs = dma.allocate(4).unwrap();
        assert!(medium.fill(theirs, 7).is_ok());
        dma.release(theirs);
        assert!(medium.fill(theirs, 7).is_err());
        assert_eq!(bus.with(|state| state.failures.len()), 1);
    }
}
