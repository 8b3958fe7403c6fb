//! The device's end of memory: every access of the controller and of its medium is checked when it
//! is made, and may be made late.

use std::collections::BTreeMap;

use base::{
    Ended, Fault, HostEntries, HostMemory, Instant, Memory, NoSuchMemory, Progress, Segment, Span,
    Ticket,
};
use dma::SharedEntries;

use crate::bus::{Actor, Bus};
use crate::trace::Kind;

/// How the device reaches data in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Its medium moves bytes straight to and from host memory.
    Direct,
    /// It copies, at once.
    Copied,
    /// It copies, and each copy takes up to so long.
    Late(Span),
}

/// A controller's view of its host's memory. A clone is another channel to the same memory, with
/// tickets of its own.
pub struct DeviceMemory {
    bus: Bus,
    reach: Reach,
    open: BTreeMap<u32, Open>,
    arrived: BTreeMap<u32, Vec<u8>>,
}

/// A ring in host memory, or a page of shadow doorbells.
pub struct DeviceEntries {
    bus: Bus,
    inner: SharedEntries,
    iova: u64,
    len_bytes: u64,
}

/// What a medium reaches: host memory as the IOMMU lets it, and the device's own.
#[derive(Clone)]
pub struct MediumMemory {
    bus: Bus,
}

/// An access that has been asked for and not made.
struct Open {
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
    /// A view over `bus`.
    pub fn new(bus: &Bus, reach: Reach) -> Self {
        Self { bus: bus.clone(), reach, open: BTreeMap::new(), arrived: BTreeMap::new() }
    }

    fn defer(&mut self, ticket: Ticket, iova: u64, access: Access) -> Progress {
        let Reach::Late(longest) = self.reach else { return Progress::Done };
        let due = self.bus.with(|state| state.defer(longest));
        let before = self.open.insert(ticket.0, Open { due, iova, access });
        debug_assert!(before.is_none(), "ticket {ticket:?} is open already");
        Progress::Later
    }

    fn write_now(&self, iova: u64, from: &[u8]) -> Result<(), Fault> {
        let mut bytes = from.to_vec();
        self.bus.falsify(iova, &mut bytes);
        self.bus.device_write(Actor::Device, iova, &bytes)
    }
}

impl HostMemory for DeviceMemory {
    type Entries = DeviceEntries;

    fn entries(&mut self, iova: u64, len_bytes: u64) -> Result<Option<DeviceEntries>, Fault> {
        let inner = self.bus.entries(iova, len_bytes)?;
        Ok(Some(DeviceEntries { bus: self.bus.clone(), inner, iova, len_bytes }))
    }

    fn reach(&mut self, iova: u64, len_bytes: u32) -> Result<Option<Segment>, Fault> {
        let segment = self.bus.check(Actor::Device, iova, len_bytes as usize, false)?;
        Ok((self.reach == Reach::Direct).then_some(segment))
    }

    fn read(&mut self, ticket: Ticket, iova: u64, into: &mut [u8]) -> Result<Progress, Fault> {
        if matches!(self.reach, Reach::Late(_)) {
            return Ok(self.defer(ticket, iova, Access::Read { len_bytes: into.len() }));
        }
        self.bus.device_read(Actor::Device, iova, into)?;
        Ok(Progress::Done)
    }

    fn write(&mut self, ticket: Ticket, iova: u64, from: &[u8]) -> Result<Progress, Fault> {
        if matches!(self.reach, Reach::Late(_)) {
            return Ok(self.defer(ticket, iova, Access::Write { bytes: from.to_vec() }));
        }
        self.write_now(iova, from)?;
        Ok(Progress::Done)
    }

    fn poll(&mut self) -> Option<Ended> {
        let now = self.bus.now();
        let (&number, _) = self
            .open
            .iter()
            .filter(|(_, open)| open.due <= now)
            .min_by_key(|(_, open)| open.due)?;
        let Open { iova, access, due } = self.open.remove(&number)?;
        self.bus.with(|state| state.arrived(due));
        let result = match access {
            Access::Read { len_bytes } => {
                let mut bytes = vec![0; len_bytes];
                let result = self.bus.device_read(Actor::Device, iova, &mut bytes);
                self.arrived.insert(number, bytes);
                result
            }
            Access::Write { bytes } => self.write_now(iova, &bytes),
        };
        Some(Ended { ticket: Ticket(number), result })
    }

    fn collect(&mut self, ticket: Ticket, into: &mut [u8]) {
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
    /// Nobody waits for what was under way.
    fn drop(&mut self) {
        for open in self.open.values() {
            self.bus.with(|state| state.arrived(open.due));
        }
    }
}

impl DeviceEntries {
    fn check(&self, index: u32, entry_bytes: u64, is_write: bool) -> Result<u64, Fault> {
        let at = self.iova + u64::from(index) * entry_bytes;
        let len_bytes = usize::try_from(entry_bytes).unwrap_or(usize::MAX);
        self.bus.check(Actor::Device, at, len_bytes, is_write)?;
        Ok(at)
    }
}

impl HostEntries for DeviceEntries {
    fn load_command(&self, index: u32) -> Result<[u64; 8], Fault> {
        self.check(index, COMMAND_BYTES, false)?;
        let command = self.inner.load_command(index)?;
        self.bus.with(|state| {
            state.record(Kind::CommandFetched, [self.iova, index.into(), command[0]]);
            state.fetched(self.iova, &command);
        });
        Ok(command)
    }

    fn store_completion(&mut self, index: u32, entry: base::CompletionEntry) -> Result<(), Fault> {
        let depth = u32::try_from(self.len_bytes / COMPLETION_BYTES).unwrap_or(u32::MAX);
        self.bus.post(self.iova, depth, index, base::entry_to_dwords(entry))
    }

    fn load_u32(&self, index: u32) -> Result<u32, Fault> {
        let at = self.check(index, WORD_BYTES, false)?;
        let word = self.inner.load_u32(index)?;
        Ok(self.bus.with(|state| state.translate_shadow(at, word)))
    }

    fn store_u32(&mut self, index: u32, value: u32) -> Result<(), Fault> {
        let at = self.check(index, WORD_BYTES, true)?;
        let value = self.bus.with(|state| state.translate_event_index(at, value));
        self.bus.record(Kind::DeviceWrite, [at, WORD_BYTES, value.into()]);
        self.inner.store_u32(index, value)
    }
}

impl MediumMemory {
    /// What a medium behind `bus` reaches.
    pub fn new(bus: &Bus) -> Self {
        Self { bus: bus.clone() }
    }
}

impl Memory for MediumMemory {
    fn load(&self, segment: Segment, into: &mut [u8]) -> Result<(), NoSuchMemory> {
        match self.bus.address(segment) {
            Some(iova) => {
                self.bus.device_read(Actor::Device, iova, into).map_err(|_| NoSuchMemory(segment))
            }
            None => self.bus.pool().regions().load(segment, into),
        }
    }

    fn store(&self, segment: Segment, from: &[u8]) -> Result<(), NoSuchMemory> {
        match self.bus.address(segment) {
            Some(iova) => {
                self.bus.device_write(Actor::Device, iova, from).map_err(|_| NoSuchMemory(segment))
            }
            None => self.bus.pool().regions().store(segment, from),
        }
    }

    fn fill(&self, segment: Segment, byte: u8) -> Result<(), NoSuchMemory> {
        self.store(segment, &vec![byte; segment.len_bytes as usize])
    }
}

#[cfg(test)]
mod tests {
    use base::{Dma, HostMemory, Memory, Progress, Random, Span, Ticket};

    use super::{DeviceMemory, MediumMemory, Reach};
    use crate::bus::Bus;
    use crate::evil::Evil;
    use crate::host_memory::SimDma;

    fn bus() -> Bus {
        Bus::new(1 << 16, 1 << 12, Evil::new(&[], Random::new(1))).unwrap()
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
        let reach = Reach::Late(Span::from_us(50));
        let mut device = DeviceMemory::new(&bus, reach);
        assert_eq!(device.write(Ticket(1), iova, b"late"), Ok(Progress::Later));
        assert_eq!(device.poll(), None);
        jump(&bus);
        assert_eq!(device.poll().unwrap().result, Ok(()));
        assert_eq!(device.read(Ticket(2), iova, &mut [0; 4]), Ok(Progress::Later));
        jump(&bus);
        assert_eq!(device.poll().unwrap().ticket, Ticket(2));
        let mut bytes = [0; 4];
        device.collect(Ticket(2), &mut bytes);
        assert_eq!(&bytes, b"late");
    }

    #[test]
    fn a_late_write_to_memory_that_was_released_meanwhile_is_a_stray() {
        let bus = bus();
        let dma = SimDma::new(&bus);
        let segment = dma.allocate(4096).unwrap();
        let iova = dma.iova(segment).unwrap();
        let reach = Reach::Late(Span::from_us(50));
        let mut device = DeviceMemory::new(&bus, reach);
        device.write(Ticket(1), iova, b"late").unwrap();
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
