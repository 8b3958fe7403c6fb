//! What lies between a host and its device: every register access, every byte of memory and every
//! answer passes here, is checked, and goes into the trace.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use base::{Dma, Fault, HostEntries, HostMemory, Instant, Memory, Random, Segment, Span};
use dma::{
    Backing, CommandStore, DeviceKind, DevicePool, Mapping, Regions, SharedEntries,
    SharedHostMemory,
};

use crate::clock::Clock;
use crate::evil::{Emission, Evil, View};
use crate::failure::Failure;
use crate::iommu::{Iommu, Refusal};
use crate::ledger::Ledger;
use crate::trace::{Kind, Trace, digest};

/// The bus of one world. A handle, cheap to clone.
#[derive(Clone)]
pub struct Bus {
    state: Arc<Mutex<State>>,
    pool: DevicePool,
    /// The device's own memory, which no host can see.
    private: Segment,
    /// Address of the first byte of the pool.
    base: u64,
    memory: Segment,
}

/// Everything on the bus that changes.
pub struct State {
    /// Time.
    pub clock: Clock,
    /// What happened.
    pub trace: Trace,
    /// What is mapped.
    pub iommu: Iommu,
    /// What is lent.
    pub ledger: Ledger,
    /// What the device does wrong.
    pub evil: Evil,
    /// What broke.
    pub failures: Vec<Failure>,
    /// The host's memory has been scribbled on: what reads bring proves nothing any more.
    pub is_scribbled: bool,
    /// Vectors signalled, and not yet looked at.
    pub interrupts: u64,
    completion_rings: BTreeMap<u64, Ring>,
    /// Where the completion queues lie, by their identifiers.
    completion_queues: BTreeMap<u16, u64>,
    /// Shadow doorbells and event indices, once the host has said where they are.
    shadows: Option<[u64; 2]>,
    /// Where data of earlier commands was.
    data_seen: Vec<u64>,
    /// Accesses of the device that are under way, by when they are made.
    late: BTreeMap<Instant, u32>,
    random: Random,
    /// A store to a register was lost on the bus, so the device may believe anything of its rings
    /// until it is disabled.
    pub is_misled: bool,
    /// How long it takes to cut the device off.
    pub(crate) cut_off_lag: Span,
    /// When the device will be, if it is being cut off.
    cut_off_at: Option<Instant>,
    /// For a canary: cutting the device off does nothing.
    pub(crate) ignores_cut_off: bool,
    /// For a canary: the device is said to be cut off while it is being cut off.
    pub(crate) hastens_cut_off: bool,
}

/// A completion ring that the device posts to.
struct Ring {
    entries: SharedEntries,
    view: View,
}

/// Who makes an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Actor {
    /// The controller or its medium, which know what they were asked.
    Device,
    /// The wrapper that breaks the contract.
    Evil,
}

/// Bytes of a completion entry.
const ENTRY_BYTES: u64 = 16;
const DATA_SEEN_MAX: usize = 64;

impl Bus {
    /// A bus with `pool_bytes` of host memory and `private_bytes` of the device's.
    ///
    /// # Errors
    ///
    /// If the machine has no memory left.
    pub fn new(pool_bytes: usize, private_bytes: usize, mut evil: Evil) -> Result<Self, String> {
        let regions = Regions::new(2);
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
            ledger: Ledger::default(),
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

    /// Works on the state. Never called from within itself.
    pub fn with<T>(&self, work: impl FnOnce(&mut State) -> T) -> T {
        // After a panic under test the state is still good enough to be printed.
        work(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// What time it is.
    pub fn now(&self) -> Instant {
        self.with(|state| state.clock.now())
    }

    /// Adds a record to the trace.
    pub fn record(&self, kind: Kind, detail: [u64; 3]) {
        self.with(|state| state.record(kind, detail));
    }

    /// Reports a broken promise.
    pub fn fail(&self, failure: Failure) {
        self.with(|state| state.failures.push(failure));
    }

    /// The host's memory, as it is underneath.
    pub fn pool(&self) -> &DevicePool {
        &self.pool
    }

    /// The device's own memory.
    pub fn private(&self) -> Segment {
        self.private
    }

    /// Where a segment of host memory is for the device; `None` if it is the device's own.
    pub fn address(&self, segment: Segment) -> Option<u64> {
        (segment.region == self.memory.region)
            .then(|| self.base + (segment.offset - self.memory.offset))
    }

    /// A vector is signalled.
    pub fn interrupt(&self, vector: u16) {
        self.with(|state| {
            state.interrupts |= 1_u64.checked_shl(vector.into()).unwrap_or(0);
            state.record(Kind::Interrupt, [vector.into(), 0, 0]);
        });
    }

    /// The device reads host memory.
    pub fn device_read(&self, actor: Actor, iova: u64, into: &mut [u8]) -> Result<(), Fault> {
        let segment = self.check(actor, iova, into.len(), false)?;
        self.load(segment, into);
        self.record(Kind::DeviceRead, [iova, into.len() as u64, digest(into)]);
        Ok(())
    }

    /// The device writes host memory.
    pub fn device_write(&self, actor: Actor, iova: u64, from: &[u8]) -> Result<(), Fault> {
        let segment = self.check(actor, iova, from.len(), true)?;
        // Cannot fail for memory that was just found mapped.
        let _ = self.pool.store(segment, from);
        self.record(Kind::DeviceWrite, [iova, from.len() as u64, digest(from)]);
        Ok(())
    }

    /// Whether the device may touch this memory, and where it is.
    pub fn check(
        &self,
        actor: Actor,
        iova: u64,
        len_bytes: usize,
        is_write: bool,
    ) -> Result<Segment, Fault> {
        let fault = Fault { iova, len_bytes: len_bytes as u64 };
        self.with(|state| state.check(actor, fault, is_write))?;
        self.segment(iova, len_bytes).ok_or(fault)
    }

    /// The controller resolves a ring.
    pub fn entries(&self, iova: u64, len_bytes: u64) -> Result<SharedEntries, Fault> {
        let fault = Fault { iova, len_bytes };
        self.with(|state| state.check(Actor::Device, fault, false))?;
        SharedHostMemory::new(&self.pool).entries(iova, len_bytes)?.ok_or(fault)
    }

    /// The controller posts a completion at `index` of the ring at `iova`, which has `depth`
    /// entries. What becomes of it is up to the wrapper.
    pub fn post(&self, iova: u64, depth: u32, index: u32, entry: [u32; 4]) -> Result<(), Fault> {
        let resolved = self.entries(iova, u64::from(depth) * ENTRY_BYTES)?;
        self.with(|state| {
            let now = state.clock.now();
            let emissions = state.evil.on_completion(now, depth, entry, &state.ledger);
            let ring = state.completion_rings.entry(iova);
            let ring = ring.or_insert_with(|| Ring { entries: resolved, view: View::new(depth) });
            ring.view.posted(index);
            emissions.iter().try_for_each(|emission| state.emit(iova, emission))
        })
    }

    /// Gives the wrapper the chance to falsify what an admin command brings the host.
    pub fn falsify(&self, iova: u64, bytes: &mut [u8]) {
        self.with(|state| {
            let now = state.clock.now();
            let Some((command, at)) = state.ledger.admin_command_at(iova) else { return };
            if state.evil.on_admin_data(now, &command, iova - at, bytes) {
                state.record(Kind::Mischief, [1, iova, u64::from(command.cdw10)]);
            }
        });
    }

    /// For a canary: unmaps a buffer under the device's feet.
    pub(crate) fn unmap(&self, segment: Segment) {
        let Some(iova) = self.address(segment) else { return };
        self.with(|state| {
            let now = state.clock.now();
            let _ = state.iommu.unmap(now, iova, segment.len_bytes.into());
        });
    }

    /// The wrapper posts what it has held back, and does what nobody asked for. Returns a vector to
    /// be signalled.
    pub fn evil_turn(&self) -> Option<u16> {
        use crate::evil::{DmaFault, Fault as Evilness};
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
                let _ = self.device_write(Actor::Evil, STRAY, &[0xee; 64]);
            }
            Evilness::Dma(DmaFault::StrayRead) => {
                let _ = self.device_read(Actor::Evil, STRAY, &mut [0; 64]);
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
            // Noise may look like any completion, so nothing that is in flight is safe from it.
            state.ledger.taint_all();
            state.ledger.stopped();
            state.is_scribbled = true;
            let mut random = Random::new(state.evil.draw());
            let len_bytes = usize::try_from(u64::from(depth) * ENTRY_BYTES).unwrap_or(0);
            let noise: Vec<u8> = (0..len_bytes).map(|_| random.draw().to_le_bytes()[7]).collect();
            Some((iova, noise))
        });
        if let Some((iova, noise)) = ring {
            let _ = self.device_write(Actor::Evil, iova, &noise);
        }
    }

    fn scribble_buffers(&self) {
        let addresses = self.with(|state| {
            state.is_scribbled = true;
            state.data_seen.clone()
        });
        for iova in addresses {
            let _ = self.device_write(Actor::Evil, iova, &[0xee; 512]);
        }
    }

    /// Where some memory is, whoever may touch it.
    pub fn peek(&self, iova: u64, len_bytes: usize) -> Result<Segment, Fault> {
        let fault = Fault { iova, len_bytes: len_bytes as u64 };
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
        // Cannot fail for memory that was just found mapped.
        let _ = self.pool.load(segment, into);
    }
}

/// Where nothing is ever mapped.
const STRAY: u64 = 0xdead_0000;

impl State {
    /// Adds a record to the trace.
    pub fn record(&mut self, kind: Kind, detail: [u64; 3]) {
        self.trace.record(self.clock.now(), kind, detail);
    }

    /// The host cuts the device off. True once it is.
    pub fn cut_off(&mut self) -> bool {
        let now = self.clock.now();
        if self.cut_off_at.is_none() {
            self.record(Kind::CutOff, [0; 3]);
            self.cut_off_at = Some(now.after(self.cut_off_lag));
        }
        self.take_cut();
        self.ignores_cut_off || self.hastens_cut_off || self.iommu.is_cut_off()
    }

    /// The device gets its memory back.
    pub fn reconnect(&mut self) {
        self.cut_off_at = None;
        self.iommu.cut_off(false);
    }

    /// The time to be cut off may have come.
    fn take_cut(&mut self) {
        let is_due = self.cut_off_at.is_some_and(|at| self.clock.now() >= at);
        if is_due && !self.iommu.is_cut_off() && !self.ignores_cut_off {
            self.iommu.cut_off(true);
            self.ledger.stopped();
        }
    }

    /// An access of the device takes up to so long: when it is made.
    pub fn defer(&mut self, longest: Span) -> Instant {
        let due = self.clock.now().after(Span { ns: self.random.below(longest.ns + 1) });
        *self.late.entry(due).or_default() += 1;
        due
    }

    /// An access that was due at `due` is under way no more.
    pub fn arrived(&mut self, due: Instant) {
        if let Some(count) = self.late.get_mut(&due) {
            *count -= 1;
            if *count == 0 {
                self.late.remove(&due);
            }
        }
    }

    /// When the next access is made that is under way.
    pub fn late_wake_at(&self) -> Instant {
        self.late.keys().next().copied().unwrap_or(Instant::NEVER)
    }

    /// A completion queue exists, and its ring begins anew.
    pub fn completion_queue_created(&mut self, id: u16, iova: u64) {
        self.completion_queues.insert(id, iova);
        self.completion_rings.remove(&iova);
    }

    /// The device fetches a command from the submission queue whose ring is at `ring`.
    pub fn fetched(&mut self, ring: u64, command: &[u64; 8]) {
        if self.ledger.ring(0) != Some(ring) {
            if command[3] != 0 && self.data_seen.len() < DATA_SEEN_MAX {
                self.data_seen.push(command[3]);
            }
            return;
        }
        let [opcode, _, cid_low, cid_high, ..] = command[0].to_le_bytes();
        let cid = u16::from_le_bytes([cid_low, cid_high]);
        if opcode == wire::AdminOpcode::CreateIoCompletionQueue.code() {
            let [id_low, id_high, ..] = command[5].to_le_bytes();
            self.completion_queue_created(u16::from_le_bytes([id_low, id_high]), command[3]);
        }
        if opcode == wire::AdminOpcode::DoorbellBufferConfig.code() {
            self.shadows = Some([command[3], command[4]]);
        }
        let now = self.clock.now();
        if let Some(emission) = self.evil.on_admin_command(now, opcode, cid)
            && let Some(iova) = self.completion_queues.get(&0).copied()
        {
            let _ = self.emit(iova, &emission);
        }
    }

    /// What the controller is told when the host rings the head doorbell of completion queue `id`.
    pub fn translate_head(&mut self, id: u16, head: u32) -> u32 {
        let ring = self.completion_queues.get(&id).and_then(|at| self.completion_rings.get_mut(at));
        ring.map_or(head, |ring| ring.view.translate(head))
    }

    /// The controller has been disabled.
    pub fn disabled(&mut self) {
        self.shadows = None;
        self.is_misled = false;
        self.evil.on_disable();
    }

    /// What the controller finds at `iova`, where the host has stored `word`: the shadow of a head
    /// doorbell is translated as the doorbell is.
    pub fn translate_shadow(&mut self, iova: u64, word: u32) -> u32 {
        let queue = self.shadows.and_then(|[shadows, _]| completion_queue_at(shadows, iova));
        queue.map_or(word, |queue| self.translate_head(queue, word))
    }

    /// What the host finds at `iova`, where the controller has stored `word`: the event index of a
    /// head doorbell is the host's own last head.
    pub fn translate_event_index(&self, iova: u64, word: u32) -> u32 {
        let queue = self.shadows.and_then(|[_, indices]| completion_queue_at(indices, iova));
        let at = queue.and_then(|queue| self.completion_queues.get(&queue));
        at.and_then(|at| self.completion_rings.get(at)).map_or(word, |ring| ring.view.host_head())
    }

    /// Posts a completion where the host will look for it.
    fn emit(&mut self, iova: u64, emission: &Emission) -> Result<(), Fault> {
        let Some(ring) = self.completion_rings.get_mut(&iova) else { return Ok(()) };
        let (index, entry) = ring.view.place(emission);
        let at = iova + u64::from(index) * ENTRY_BYTES;
        let fault = Fault { iova: at, len_bytes: ENTRY_BYTES };
        self.check(Actor::Device, fault, true)?;
        let Some(ring) = self.completion_rings.get_mut(&iova) else { return Ok(()) };
        let before = ring.entries.load_u32(index * 4 + 3)?;
        ring.entries.store_completion(index, base::entry_from_dwords(entry))?;
        let [result, head, status] = [entry[0], entry[2], entry[3]].map(u64::from);
        self.record(Kind::CompletionStored, [at, result << 32 | head, status]);
        let is_visible = (before ^ entry[3]) & PHASE != 0;
        if is_visible && let Some(queue) = self.queue_at(iova) {
            let [cid_low, cid_high, ..] = entry[3].to_le_bytes();
            let cid = u16::from_le_bytes([cid_low, cid_high]);
            self.ledger.completed(queue, cid, entry[3] >> 17 == 0, emission.is_lie);
        }
        Ok(())
    }

    fn queue_at(&self, iova: u64) -> Option<u16> {
        self.completion_queues.iter().find(|(_, at)| **at == iova).map(|(id, _)| *id)
    }

    fn check(&mut self, actor: Actor, access: Fault, is_write: bool) -> Result<(), Fault> {
        let Fault { iova, len_bytes } = access;
        let at = self.clock.now();
        self.take_cut();
        match self.iommu.check(iova, len_bytes) {
            Ok(()) => {
                if actor == Actor::Device
                    && let Err(failure) = self.ledger.check(at, iova, len_bytes, is_write)
                {
                    self.failures.push(failure);
                }
                return Ok(());
            }
            Err(Refusal::Stray(unmapped)) if actor == Actor::Device && !self.is_misled => {
                self.failures.push(Failure::Stray { iova, len_bytes, is_write, unmapped, at });
            }
            Err(_) => {}
        }
        self.iommu.blocked += 1;
        self.record(Kind::Blocked, [iova, len_bytes, u64::from(is_write)]);
        Err(access)
    }
}

/// The completion queue whose shadow lies at `iova` in the page at `page`: shadows lie as far apart
/// as doorbells (Base 2.1 §5.2.5).
fn completion_queue_at(page: u64, iova: u64) -> Option<u16> {
    let distance = iova.checked_sub(page).filter(|distance| *distance < 4096)?;
    let index = distance >> (2 + ctrl::STRIDE);
    if index % 2 == 1 { u16::try_from(index / 2).ok() } else { None }
}

/// The phase in the last dword of a completion.
const PHASE: u32 = 1 << 16;

#[cfg(test)]
mod tests {
    use base::{Dma, Random, Span};

    use super::{Actor, Bus, STRAY};
    use crate::evil::{DmaFault, Evil, Fault, Mischief};
    use crate::failure::Failure;
    use crate::host_memory::SimDma;
    use crate::ledger::Direction;

    fn bus(plan: &[Mischief]) -> Bus {
        Bus::new(1 << 16, 1 << 12, Evil::new(plan, Random::new(1))).unwrap()
    }

    #[test]
    fn a_stray_access_fails_the_run_and_names_who_unmapped_the_memory() {
        let bus = bus(&[]);
        let dma = SimDma::new(&bus);
        let first = dma.allocate(4096).unwrap();
        let second = dma.allocate(4096).unwrap();
        let iova = dma.iova(second).unwrap();
        assert!(bus.device_write(Actor::Device, iova, &[1; 16]).is_ok());
        dma.release(second);
        assert!(bus.device_write(Actor::Device, iova, &[1; 16]).is_err());
        let failures = bus.with(|state| std::mem::take(&mut state.failures));
        let [Failure::Stray { unmapped: Some(unmapped), is_write: true, .. }] = failures[..] else {
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
        assert!(dma.cut_off());
        assert!(bus.device_read(Actor::Device, iova, &mut [0; 4]).is_err());
        dma.reconnect();
        assert!(bus.device_read(Actor::Device, iova, &mut [0; 4]).is_ok());
        assert_eq!(bus.with(|state| (state.iommu.blocked, state.failures.len())), (1, 0));
    }

    #[test]
    fn what_an_evil_device_tries_is_turned_away_and_is_not_the_drivers_fault() {
        let bus = bus(&[Mischief::always(Fault::Dma(DmaFault::StrayWrite)).times(2)]);
        for _ in 0..3 {
            assert_eq!(bus.evil_turn(), None);
            let soon = bus.now().after(Span::from_us(20));
            bus.with(|state| state.clock.jump(soon));
        }
        assert_eq!(bus.with(|state| (state.iommu.blocked, state.failures.len())), (2, 0));
        assert!(bus.device_read(Actor::Device, STRAY, &mut [0; 4]).is_err());
        assert_eq!(bus.with(|state| state.failures.len()), 1, "an honest device never does");
    }

    #[test]
    fn touching_a_buffer_that_was_handed_back_fails_the_run() {
        let bus = bus(&[]);
        let dma = SimDma::new(&bus);
        let iova = dma.iova(dma.allocate(4096).unwrap()).unwrap();
        bus.with(|state| state.ledger.lend(5, &[(iova, 4096)], Direction::FromDevice));
        assert!(bus.device_write(Actor::Device, iova, &[1; 16]).is_ok());
        let now = bus.now();
        assert_eq!(bus.with(|state| state.ledger.hand_back(5, now)), Ok(false));
        assert!(bus.device_write(Actor::Evil, iova, &[1; 16]).is_ok());
        assert!(bus.with(|state| state.failures.is_empty()));
        assert!(bus.device_write(Actor::Device, iova, &[1; 16]).is_ok());
        let failures = bus.with(|state| state.failures.clone());
        assert!(matches!(failures[..], [Failure::TouchedAfterReturn { token: 5, .. }]));
    }
}
