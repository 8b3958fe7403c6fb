//! Host side of memory: allocations are mapped, releases are unmapped, and every stored command is
//! recorded in the ownership table.

use tenmil_base::{CompletionRing, Dma, InvalidSegment, Memory, Segment, SubmissionRing};
use tenmil_dma::{HostCompletionRing, HostSubmissionRing};

use crate::event_trace::TraceKind;
use crate::iommu::AccessDenied;
use crate::sim_bus::{BusState, SimBus};
use crate::violation::Violation;

/// Memory as seen by the driver.
#[derive(Clone)]
pub struct SimDma {
    bus: SimBus,
}

/// Host side of a submission ring.
pub struct SimSubmissionRing {
    bus: SimBus,
    inner: HostSubmissionRing,
    memory: Segment,
}

/// Host side of a completion ring.
pub struct SimCompletionRing {
    bus: SimBus,
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
    pub fn new(bus: &SimBus) -> Self {
        Self { bus: bus.clone() }
    }

    fn check_host_access(&self, doing: &'static str, segment: Segment) {
        check_host_access(&self.bus, doing, segment);
    }
}

impl Dma for SimDma {
    type Submission = SimSubmissionRing;
    type Completion = SimCompletionRing;

    fn allocate(&self, len_bytes: u32) -> Option<Segment> {
        let segment = self.bus.host_memory_pool().allocate(len_bytes)?;
        let iova = self.bus.iova_of(segment)?;
        self.bus.with_state(|state| {
            state.iommu.map(iova, len_bytes.into());
            state.record(TraceKind::Mapped, [iova, len_bytes.into(), 0]);
        });
        Some(segment)
    }

    fn release(&self, segment: Segment) {
        if let Some(iova) = self.bus.iova_of(segment) {
            let len_bytes = u64::from(segment.len_bytes);
            self.bus.with_state(|state| {
                let now = state.clock.now();
                state.record(TraceKind::Unmapped, [iova, len_bytes, 0]);
                state.ledger.stop_tracking(iova, len_bytes);
                if !state.iommu.unmap(now, iova, len_bytes) {
                    let doing = "releasing";
                    let stray = Violation::HostStray { doing, iova, len_bytes, unmapped: None };
                    state.failures.push(stray);
                }
            });
        }
        self.bus.host_memory_pool().release(segment);
    }

    fn iova(&self, segment: Segment) -> Option<u64> {
        self.bus.host_memory_pool().iova(segment)
    }

    fn submission_ring(&self, memory: Segment, depth: u32) -> SimSubmissionRing {
        let inner = self.bus.host_memory_pool().submission_ring(memory, depth);
        SimSubmissionRing { bus: self.bus.clone(), inner, memory }
    }

    fn completion_ring(&self, memory: Segment, depth: u32) -> SimCompletionRing {
        let inner = self.bus.host_memory_pool().completion_ring(memory, depth);
        SimCompletionRing { bus: self.bus.clone(), inner, memory }
    }

    fn revoke_access(&self) -> bool {
        self.bus.with_state(BusState::start_revocation)
    }

    fn restore_access(&self) {
        self.bus.with_state(|state| {
            state.restore_access();
            state.record(TraceKind::Reconnected, [0; 3]);
        });
    }
}

impl Memory for SimDma {
    fn load(&self, segment: Segment, into: &mut [u8]) -> Result<(), InvalidSegment> {
        self.check_host_access("loading", segment);
        self.bus.host_memory_pool().load(segment, into)
    }

    fn store(&self, segment: Segment, from: &[u8]) -> Result<(), InvalidSegment> {
        self.check_host_access("storing", segment);
        self.bus.host_memory_pool().store(segment, from)
    }

    fn fill(&self, segment: Segment, byte: u8) -> Result<(), InvalidSegment> {
        self.check_host_access("filling", segment);
        self.bus.host_memory_pool().fill(segment, byte)
    }
}

impl SubmissionRing for SimSubmissionRing {
    fn store(&mut self, index: u32, command: &[u64; 8]) {
        check_host_access(&self.bus, "storing a command in", self.memory);
        let Some(ring) = self.bus.iova_of(self.memory) else { return };
        let data = data_addresses(&self.bus, command);
        self.bus.with_state(|state| {
            let now = state.clock.now();
            state.ledger.record_stored_command(now, ring, command, &data);
            let at = ring + u64::from(index) * COMMAND_BYTES;
            state.record(TraceKind::CommandStored, [at, command[0], command[3]]);
        });
        self.inner.store(index, command);
    }

    fn order_before_doorbell(&mut self) {
        self.inner.order_before_doorbell();
    }
}

impl CompletionRing for SimCompletionRing {
    fn load(&self, index: u32, phase: bool) -> Option<tenmil_base::CompletionEntry> {
        check_host_access(&self.bus, "looking at completions in", self.memory);
        self.inner.load(index, phase)
    }
}

fn check_host_access(bus: &SimBus, doing: &'static str, segment: Segment) {
    let Some(iova) = bus.iova_of(segment) else { return };
    let len_bytes = u64::from(segment.len_bytes);
    bus.with_state(|state| {
        if let Err(AccessDenied::Stray(unmapped)) = state.iommu.check_mapped(iova, len_bytes) {
            state.failures.push(Violation::HostStray { doing, iova, len_bytes, unmapped });
        }
    });
}

/// Data addresses of a command, from its PRPs or SGL (Base 2.1 §4.1, figure 91).
fn data_addresses(bus: &SimBus, command: &[u64; 8]) -> Vec<u64> {
    let [_, flags, ..] = command[0].to_le_bytes();
    let (address, second) = (command[3], command[4]);
    if flags >> 6 == 0 {
        return vec![address];
    }
    match descriptor_type(second) {
        SGL_DATA_BLOCK => vec![address],
        SGL_SEGMENT | SGL_LAST_SEGMENT => {
            let count = usize::try_from(second & 0xffff_ffff).unwrap_or(0) / 16;
            let mut bytes = vec![0; count.min(SGL_POLL) * 16];
            load_host_memory(bus, address, &mut bytes);
            let (descriptors, _) = bytes.as_chunks::<16>();
            let blocks = descriptors.iter().map(|descriptor| {
                let (words, _) = descriptor.as_chunks::<8>();
                (u64::from_le_bytes(words[0]), descriptor_type(u64::from_le_bytes(words[1])))
            });
            blocks.filter(|(_, kind)| *kind == SGL_DATA_BLOCK).map(|(at, _)| at).collect()
        }
        _ => Vec::new(),
    }
}

/// Descriptor type in the last byte.
fn descriptor_type(second: u64) -> u8 {
    second.to_le_bytes()[7] >> 4
}

fn load_host_memory(bus: &SimBus, iova: u64, into: &mut [u8]) {
    if let Ok(segment) = bus.resolve_unchecked(iova, into.len()) {
        let _ = bus.host_memory_pool().load(segment, into);
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{CompletionRing, Dma, Memory, Random, SubmissionRing};

    use super::SimDma;
    use crate::buffer_ownership::DataDirection;
    use crate::fault_injector::FaultInjector;
    use crate::sim_bus::SimBus;
    use crate::violation::Violation;

    fn test_bus() -> SimBus {
        SimBus::new(1 << 16, 1 << 12, FaultInjector::new(&[], Random::new(1))).unwrap()
    }

    #[test]
    fn driver_use_of_released_memory_is_detected() {
        let bus = test_bus();
        let dma = SimDma::new(&bus);
        let memory = dma.allocate(4096).unwrap();
        let ring = dma.completion_ring(memory, 4);
        assert_eq!(ring.load(0, true), None);
        assert!(bus.with_state(|state| state.failures.is_empty()));
        dma.release(memory);
        ring.load(0, true);
        let _ = dma.fill(memory, 1);
        let failures = bus.with_state(|state| state.failures.clone());
        assert!(matches!(
            failures[..],
            [
                Violation::HostStray { doing: "looking at completions in", .. },
                Violation::HostStray { doing: "filling", .. }
            ]
        ));
    }

    #[test]
    fn stored_command_gives_its_prp_or_sgl_data_to_the_device() {
        let bus = test_bus();
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
            bus.with_state(|state| {
                state.ledger.mark_in_use(token, &[(at, 8192)], DataDirection::FromDevice);
            });
            ring.store(0, &command);
            let now = bus.now();
            let early = bus.with_state(|state| state.ledger.return_to_host(token, now));
            assert!(matches!(early, Err(Violation::CompletedEarly { .. })), "{command:x?}");
            assert!(dma.revoke_access());
        }
    }
}
