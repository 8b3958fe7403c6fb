//! Memory shared by host and controller: one vector behind a lock, and no `unsafe`.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

use tenmil_base::{
    BarMapError, BarRange, CompletionRing, Dma, InvalidSegment, Memory, RegionId, Segment,
    SubmissionRing,
};

/// Handle to the memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct SharedMemory(Arc<Mutex<MemoryState>>);

#[derive(Debug, Default)]
struct MemoryState {
    bytes: Vec<u8>,
    /// Offset and length of each allocation.
    allocated: BTreeMap<u64, u32>,
    is_dma_revoked: bool,
    revocation_count: u32,
    /// An access is in progress that a revocation does not end.
    has_under_way: bool,
    /// Limit of bytes allocated in total.
    limit: Option<usize>,
    /// The device's BAR 2, which is region 1; only whole commands are stored there.
    bar: Vec<u8>,
    /// Reason why it cannot be used.
    bar_unusable: Option<&'static str>,
    /// Requested parts of BARs.
    bar_parts: Vec<BarRange>,
}

/// Address of offset zero for the device.
const IOVA: u64 = 0x4000_0000;
const PAGE: usize = 4096;
/// Bus address of BAR 2: not below 4 GiB.
pub(super) const BAR: u64 = 0x8_fe80_0000;
const BAR_REGION: RegionId = RegionId(1);

impl SharedMemory {
    pub(crate) fn with_limit(limit: usize) -> Self {
        let memory = Self::default();
        memory.lock().limit = Some(limit);
        memory
    }

    /// Sets the limit of bytes allocated in total.
    pub(super) fn set_limit(&self, limit: Option<usize>) {
        self.lock().limit = limit;
    }

    fn lock(&self) -> MutexGuard<'_, MemoryState> {
        self.0.lock().unwrap()
    }

    pub(crate) fn is_dma_revoked(&self) -> bool {
        self.lock().is_dma_revoked
    }

    pub(crate) fn revocation_count(&self) -> u32 {
        self.lock().revocation_count
    }

    /// Sets whether an access is in progress that a revocation does not end.
    pub(crate) fn set_dma_in_flight(&self, has_under_way: bool) {
        self.lock().has_under_way = has_under_way;
    }

    /// Number of current allocations.
    pub(crate) fn allocation_count(&self) -> usize {
        self.lock().allocated.len()
    }

    /// Adds a BAR 2 to the device, with remains of an earlier ring.
    pub(super) fn set_bar(&self, len_bytes: usize) {
        self.lock().bar = vec![0xee; len_bytes];
    }

    pub(super) fn set_bar_unusable(&self, why: &'static str) {
        self.lock().bar_unusable = Some(why);
    }

    pub(super) fn mapped_bar_ranges(&self) -> Vec<BarRange> {
        self.lock().bar_parts.clone()
    }

    /// Reads from BAR 2.
    pub(super) fn bar_load(&self, offset: u64, into: &mut [u8]) -> bool {
        let inside = self.lock();
        let first = usize::try_from(offset).unwrap();
        let bytes = inside.bar.get(first..first + into.len());
        bytes.map(|bytes| into.copy_from_slice(bytes)).is_some()
    }

    fn bar_store(&self, segment: Segment, from: &[u8]) {
        self.lock().bar[byte_range_of(segment)].copy_from_slice(from);
    }

    /// Read by the device: fails while its DMA is revoked, and outside allocations.
    pub(crate) fn device_load(&self, iova: u64, into: &mut [u8]) -> bool {
        let inside = self.lock();
        let Some(at) = inside.device_range(iova, into.len()) else { return false };
        into.copy_from_slice(&inside.bytes[at..at + into.len()]);
        true
    }

    /// Write by the device.
    pub(crate) fn device_store(&self, iova: u64, from: &[u8]) -> bool {
        let mut inside = self.lock();
        let Some(at) = inside.device_range(iova, from.len()) else { return false };
        inside.bytes[at..at + from.len()].copy_from_slice(from);
        true
    }
}

impl MemoryState {
    fn device_range(&self, iova: u64, len: usize) -> Option<usize> {
        let offset = iova.checked_sub(IOVA)?;
        let (start, length) = self.allocated.range(..=offset).next_back()?;
        let inside = offset + len as u64 <= start + u64::from(*length);
        (inside && !self.is_dma_revoked).then(|| usize::try_from(offset).unwrap())
    }
}

fn byte_range_of(segment: Segment) -> core::ops::Range<usize> {
    let start = usize::try_from(segment.offset).unwrap();
    start..start + segment.len_bytes as usize
}

impl Memory for SharedMemory {
    fn load(&self, segment: Segment, into: &mut [u8]) -> Result<(), InvalidSegment> {
        assert_ne!(segment.region, BAR_REGION, "that is slow, and has no reason");
        let inside = self.lock();
        let bytes = inside.bytes.get(byte_range_of(segment)).ok_or(InvalidSegment(segment))?;
        into.copy_from_slice(bytes);
        Ok(())
    }

    fn store(&self, segment: Segment, from: &[u8]) -> Result<(), InvalidSegment> {
        assert_ne!(segment.region, BAR_REGION, "a ring is written by its own stores");
        let mut inside = self.lock();
        let bytes = inside.bytes.get_mut(byte_range_of(segment)).ok_or(InvalidSegment(segment))?;
        bytes.copy_from_slice(from);
        Ok(())
    }

    fn fill(&self, segment: Segment, byte: u8) -> Result<(), InvalidSegment> {
        assert_ne!(segment.region, BAR_REGION, "a ring is zeroed by its own stores");
        let mut inside = self.lock();
        inside.bytes.get_mut(byte_range_of(segment)).ok_or(InvalidSegment(segment))?.fill(byte);
        Ok(())
    }
}

impl Dma for SharedMemory {
    type Submission = HostRing;
    type Completion = HostRing;

    fn allocate(&self, len_bytes: u32) -> Option<Segment> {
        let mut inside = self.lock();
        let len = (len_bytes as usize).next_multiple_of(PAGE);
        let used: usize = inside.allocated.values().map(|len| *len as usize).sum();
        if inside.limit.is_some_and(|limit| used + len > limit) {
            return None;
        }
        // Memory is never reused, so that a late access to released memory is detected.
        let offset = inside.bytes.len();
        inside.bytes.resize(offset + len, 0);
        inside.allocated.insert(offset as u64, u32::try_from(len).unwrap());
        Some(Segment { region: RegionId(0), offset: offset as u64, len_bytes })
    }

    fn release(&self, segment: Segment) {
        let released = self.lock().allocated.remove(&segment.offset);
        assert!(released.is_some(), "{segment:?} is released once, by who allocated it");
    }

    fn device_memory(&self, part: BarRange) -> Result<Segment, BarMapError> {
        let mut inside = self.lock();
        inside.bar_parts.push(part);
        if let Some(why) = inside.bar_unusable {
            return Err(BarMapError::Unusable { reason: why });
        }
        let bar_bytes = if part.bar == 2 { inside.bar.len() as u64 } else { 0 };
        if part.offset + part.len_bytes > bar_bytes {
            return Err(BarMapError::OutOfRange { bar_bytes });
        }
        let len_bytes = u32::try_from(part.len_bytes).unwrap();
        Ok(Segment { region: BAR_REGION, offset: part.offset, len_bytes })
    }

    fn iova(&self, segment: Segment) -> Option<u64> {
        if segment.region == BAR_REGION {
            return Some(BAR + segment.offset);
        }
        (byte_range_of(segment).end <= self.lock().bytes.len()).then_some(IOVA + segment.offset)
    }

    fn submission_ring(&self, memory: Segment, _depth: u32) -> HostRing {
        HostRing { memory: self.clone(), segment: memory }
    }

    fn completion_ring(&self, memory: Segment, _depth: u32) -> HostRing {
        HostRing { memory: self.clone(), segment: memory }
    }

    fn revoke_access(&self) -> bool {
        let mut inside = self.lock();
        inside.revocation_count += u32::from(!inside.is_dma_revoked);
        inside.is_dma_revoked = true;
        !inside.has_under_way
    }

    fn restore_access(&self) {
        self.lock().is_dma_revoked = false;
    }
}

/// Host side of either kind of ring.
#[derive(Debug)]
pub(crate) struct HostRing {
    memory: SharedMemory,
    segment: Segment,
}

impl SubmissionRing for HostRing {
    fn store(&mut self, index: u32, command: &[u64; 8]) {
        let bytes = tenmil_wire::Command(*command).to_bytes();
        let entry = self.segment.slice(index * 64, 64).expect("inside the ring");
        match entry.region {
            BAR_REGION => self.memory.bar_store(entry, &bytes),
            _ => self.memory.store(entry, &bytes).unwrap(),
        }
    }

    fn order_before_doorbell(&mut self) {}
}

impl CompletionRing for HostRing {
    fn load(&self, index: u32, phase: bool) -> Option<tenmil_base::CompletionEntry> {
        let mut bytes = [0; 16];
        let entry = self.segment.slice(index * 16, 16)?;
        self.memory.load(entry, &mut bytes).unwrap();
        let completion = tenmil_wire::Completion::from_bytes(&bytes);
        (completion.phase() == phase).then_some(tenmil_base::entry_from_dwords(completion.0))
    }
}
