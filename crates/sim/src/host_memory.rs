//! Host side of memory: allocations are mapped, releases are unmapped, and every stored command is
//! recorded in the ownership table.

use tenmil_base::{CompletionRing, Dma, InvalidSegment, Memory, Segment, SubmissionRing};
use tenmil_dma::{HostCompletionRing, HostSubmissionRing};

use crate::bus::{Bus, State};
use crate::failure::Violation;
use crate::iommu::AccessDenied;
use crate::trace::Kind;

/// Memory as seen by the driver.
#[derive(Clone)]
pub struct SimDma {
    bus: Bus,
}

/// Host side of a submission ring.
pub struct SimSubmissionRing {
    bus: Bus,
    inner: HostSubmissionRing,
    memory: Segment,
}

/// Host side of a completion ring.
pub struct SimCompletionRing {
    bus: Bus,
    inner: HostCompletionRing,
    memory: Segment,
}

const COMMAND_BYTES: u64 = 64;
/// SGL descriptor types (Base 2.1 §4.3.2): data block, segment, last segment.
const SGL_DATA_BLOCK: u8 = 0x0;
const SGL_SEGMENT: u8 = 0x2;
const SGL_LAST_SEGMENT: u8 = 0x3;
/// Maximum number of SGL descriptors examined. The first one identifies the buffer.
const SGL_POLL: usize = 4;

impl SimDma {
    /// Creates a view over the pool of the bus.
    pub fn new(bus: &Bus) -> Self {
        Self { bus: bus.clone() }
    }

    fn check(&self, doing: &'static str, segment: Segment) {
        check(&self.bus, doing, segment);
    }
}

impl Dma for SimDma {
    type Submission = SimSubmissionRing;
    type Completion = SimCompletionRing;

    fn allocate(&self, len_bytes: u32) -> Option<Segment> {
        let segment = self.bus.pool().allocate(len_bytes)?;
        let iova = self.bus.address(segment)?;
        self.bus.with(|state| {
            state.iommu.map(iova, len_bytes.into());
            state.record(Kind::Mapped, [iova, len_bytes.into(), 0]);
        });
        Some(segment)
    }

    fn release(&self, segment: Segment) {
        if let Some(iova) = self.bus.address(segment) {
            let len_bytes = u64::from(segment.len_bytes);
            self.bus.with(|state| {
                let now = state.clock.now();
                state.record(Kind::Unmapped, [iova, len_bytes, 0]);
                state.ledger.forget(iova, len_bytes);
                if !state.iommu.unmap(now, iova, len_bytes) {
                    let doing = "releasing";
                    let stray = Violation::HostStray { doing, iova, len_bytes, unmapped: None };
                    state.failures.push(stray);
                }
            });
        }
        self.bus.pool().release(segment);
    }

    fn iova(&self, segment: Segment) -> Option<u64> {
        self.bus.pool().iova(segment)
    }

    fn submission_ring(&self, memory: Segment, depth: u32) -> SimSubmissionRing {
        let inner = self.bus.pool().submission_ring(memory, depth);
        SimSubmissionRing { bus: self.bus.clone(), inner, memory }
    }

    fn completion_ring(&self, memory: Segment, depth: u32) -> SimCompletionRing {
        let inner = self.bus.pool().completion_ring(memory, depth);
        SimCompletionRing { bus: self.bus.clone(), inner, memory }
    }

    fn revoke_access(&self) -> bool {
        self.bus.with(State::cut_off)
    }

    fn restore_access(&self) {
        self.bus.with(|state| {
            state.reconnect();
            state.record(Kind::Reconnected, [0; 3]);
        });
    }
}

impl Memory for SimDma {
    fn load(&self, segment: Segment, into: &mut [u8]) -> Result<(), InvalidSegment> {
        self.check("loading", segment);
        self.bus.pool().load(segment, into)
    }

    fn store(&self, segment: Segment, from: &[u8]) -> Result<(), InvalidSegment> {
        self.check("storing", segment);
        self.bus.pool().store(segment, from)
    }

    fn fill(&self, segment: Segment, byte: u8) -> Result<(), InvalidSegment> {
        self.check("filling", segment);
        self.bus.pool().fill(segment, byte)
    }
}

impl SubmissionRing for SimSubmissionRing {
    fn store(&mut self, index: u32, command: &[u64; 8]) {
        check(&self.bus, "storing a command in", self.memory);
        let Some(ring) = self.bus.address(self.memory) else { return };
        let data = data_addresses(&self.bus, command);
        self.bus.with(|state| {
            let now = state.clock.now();
            state.ledger.stored(now, ring, command, &data);
            let at = ring + u64::from(index) * COMMAND_BYTES;
            state.record(Kind::CommandStored, [at, command[0], command[3]]);
        });
        self.inner.store(index, command);
    }

    fn publish(&mut self) {
        self.inner.publish();
    }
}

impl CompletionRing for SimCompletionRing {
    fn load(&self, index: u32, phase: bool) -> Option<tenmil_base::CompletionEntry> {
        check(&self.bus, "looking at completions in", self.memory);
        self.inner.load(index, phase)
    }
}

fn check(bus: &Bus, doing: &'static str, segment: Segment) {
    let Some(iova) = bus.address(segment) else { return };
    let len_bytes = u64::from(segment.len_bytes);
    bus.with(|state| {
        if let Err(AccessDenied::Stray(unmapped)) = state.iommu.check_mapped(iova, len_bytes) {
            state.failures.push(Violation::HostStray { doing, iova, len_bytes, unmapped });
        }
    });
}

/// Data addresses of a command, from its PRPs or SGL (Base 2.1 §4.1, figure 91).
fn data_addresses(bus: &Bus, command: &[u64; 8]) -> Vec<u64> {
    let [_, flags, ..] = command[0].to_le_bytes();
    let (address, second) = (command[3], command[4]);
    if flags >> 6 == 0 {
        return vec![address];
    }
    match kind_of(second) {
        SGL_DATA_BLOCK => vec![address],
        SGL_SEGMENT | SGL_LAST_SEGMENT => {
            let count = usize::try_from(second & 0xffff_ffff).unwrap_or(0) / 16;
            let mut bytes = vec![0; count.min(SGL_POLL) * 16];
            load_at(bus, address, &mut bytes);
            let (descriptors, _) = bytes.as_chunks::<16>();
            let blocks = descriptors.iter().map(|descriptor| {
                let (words, _) = descriptor.as_chunks::<8>();
                (u64::from_le_bytes(words[0]), kind_of(u64::from_le_bytes(words[1])))
            });
            blocks.filter(|(_, kind)| *kind == SGL_DATA_BLOCK).map(|(at, _)| at).collect()
        }
        _ => Vec::new(),
    }
}

/// Descriptor type in the last byte.
fn kind_of(second: u64) -> u8 {
    second.to_le_bytes()[7] >> 4
}

fn load_at(bus: &Bus, iova: u64, into: &mut [u8]) {
    if let Ok(segment) = bus.peek(iova, into.len()) {
        let _ = bus.pool().load(segment, into);
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{CompletionRing, Dma, Memory, Random, SubmissionRing};

    use super::SimDma;
    use crate::bus::Bus;
    use crate::failure::Violation;
    use crate::fault_injector::FaultInjector;
    use crate::ownership::Direction;

    fn bus() -> Bus {
        Bus::new(1 << 16, 1 << 12, FaultInjector::new(&[], Random::new(1))).unwrap()
    }

    #[test]
    fn a_driver_that_uses_what_it_gave_back_is_found() {
        let bus = bus();
        let dma = SimDma::new(&bus);
        let memory = dma.allocate(4096).unwrap();
        let ring = dma.completion_ring(memory, 4);
        assert_eq!(ring.load(0, true), None);
        assert!(bus.with(|state| state.failures.is_empty()));
        dma.release(memory);
        ring.load(0, true);
        let _ = dma.fill(memory, 1);
        let failures = bus.with(|state| state.failures.clone());
        assert!(matches!(
            failures[..],
            [
                Violation::HostStray { doing: "looking at completions in", .. },
                Violation::HostStray { doing: "filling", .. }
            ]
        ));
    }

    #[test]
    fn a_stored_command_is_the_devices_whether_its_data_is_named_by_prp_or_sgl() {
        let bus = bus();
        let dma = SimDma::new(&bus);
        let ring_memory = dma.allocate(4096).unwrap();
        let (buffer, list) = (dma.allocate(8192).unwrap(), dma.allocate(4096).unwrap());
        let (at, list_at) = (dma.iova(buffer).unwrap(), dma.iova(list).unwrap());
        let mut block = [0; 16];
        block[..8].copy_from_slice(&at.to_le_bytes());
        dma.store(list.slice(0, 16).unwrap(), &block).unwrap();
        let sgl = 1_u64 << 14;
        let cases = [
            [2, 0, 0, at, 0, 0, 0, 0],
            [2 | sgl, 0, 0, at, 4096, 0, 0, 0],
            [2 | sgl, 0, 0, list_at, 0x30 << 56 | 16, 0, 0, 0],
        ];
        for (token, command) in (1..).zip(cases) {
            let mut ring = dma.submission_ring(ring_memory, 8);
            bus.with(|state| {
                state.ledger.mark_in_use(token, &[(at, 8192)], Direction::FromDevice);
            });
            ring.store(0, &command);
            let now = bus.now();
            let early = bus.with(|state| state.ledger.return_to_host(token, now));
            assert!(matches!(early, Err(Violation::CompletedEarly { .. })), "{command:x?}");
            assert!(dma.revoke_access());
        }
    }
}
