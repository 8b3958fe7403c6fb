//! Simulated host: plain bytes that may be shared or not, with accesses that may complete later and out
//! of order.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::{
    AccessCompletion, AccessFault, AccessId, AccessProgress, HostMemory, Interrupts,
    InvalidSegment, Memory, Random, RegionId, RingEntries, RingMemory, Segment,
};

/// Region of host memory.
pub(crate) const HOST: RegionId = RegionId(0);
/// Region of bounce buffers.
pub(crate) const BOUNCE: RegionId = RegionId(1);

/// Simulated memory.
#[derive(Debug)]
pub(crate) struct FakeRam {
    regions: [Mutex<Vec<u8>>; 2],
    /// Host memory must not be accessed.
    is_sealed: AtomicBool,
    /// No access may be started.
    is_closed: AtomicBool,
    /// The host has revoked the controller's access.
    is_revoked: AtomicBool,
    /// The controller has acknowledged the revocation.
    has_acknowledged: AtomicBool,
    /// Number of forbidden accesses.
    access_violations: AtomicU64,
}

/// Behavior of the host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostBehavior {
    /// Rings are shared.
    pub(crate) shares_rings: bool,
    /// Block devices can access the data.
    pub(crate) shares_data: bool,
    /// Accesses complete some polls later, in any order.
    pub(crate) completes_later: bool,
}

/// Channel to the host's memory.
#[derive(Debug)]
pub(crate) struct FakeHost {
    ram: Arc<FakeRam>,
    behavior: HostBehavior,
    random: Random,
    pending: Vec<(AccessId, PendingAccessKind)>,
    arrived: Vec<(AccessId, Vec<u8>)>,
}

#[derive(Debug)]
enum PendingAccessKind {
    Read(u64, usize),
    Write(u64, Vec<u8>),
}

/// Ring in host memory.
#[derive(Debug)]
pub(crate) struct FakeRingEntries {
    ram: Arc<FakeRam>,
    iova: u64,
    len_bytes: u64,
}

/// Records signals by vector.
#[derive(Clone, Debug, Default)]
pub(crate) struct RecordedInterrupts(pub(crate) Arc<Mutex<Vec<u16>>>);

impl FakeRam {
    pub(crate) fn new(host_bytes: usize, bounce_bytes: usize) -> Arc<Self> {
        Arc::new(Self {
            regions: [Mutex::new(vec![0; host_bytes]), Mutex::new(vec![0; bounce_bytes])],
            is_sealed: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
            is_revoked: AtomicBool::new(false),
            has_acknowledged: AtomicBool::new(false),
            access_violations: AtomicU64::new(0),
        })
    }

    /// The host's bytes, for the host itself.
    pub(crate) fn host_bytes(&self) -> MutexGuard<'_, Vec<u8>> {
        self.region_bytes(HOST)
    }

    /// Makes every access by the controller or a block device a violation.
    pub(crate) fn forbid_all_access(&self, is_sealed: bool) {
        self.is_sealed.store(is_sealed, Ordering::SeqCst);
    }

    /// Makes every access that the controller starts a violation.
    pub(crate) fn forbid_new_access(&self, is_closed: bool) {
        self.is_closed.store(is_closed, Ordering::SeqCst);
    }

    /// Revokes or restores the controller's access.
    #[cfg(test)]
    pub(crate) fn revoke_access(&self, is_revoked: bool) {
        self.has_acknowledged.store(false, Ordering::SeqCst);
        self.is_revoked.store(is_revoked, Ordering::SeqCst);
    }

    /// Whether the controller has acknowledged the revocation. After that, every access is a violation.
    #[cfg(test)]
    pub(crate) fn has_acknowledged(&self) -> bool {
        self.has_acknowledged.load(Ordering::SeqCst)
    }

    pub(crate) fn violation_count(&self) -> u64 {
        self.access_violations.load(Ordering::SeqCst)
    }

    fn region_bytes(&self, region: RegionId) -> MutexGuard<'_, Vec<u8>> {
        self.regions[region.0 as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `f` on a byte range, if it exists.
    fn with_range<T>(
        &self,
        region: RegionId,
        offset: u64,
        len: usize,
        f: impl FnOnce(&mut [u8]) -> T,
    ) -> Option<T> {
        if region == HOST && self.is_sealed.load(Ordering::SeqCst) {
            self.access_violations.fetch_add(1, Ordering::SeqCst);
        }
        let start = usize::try_from(offset).ok()?;
        if region.0 > 1 {
            return None;
        }
        self.region_bytes(region).get_mut(start..start.checked_add(len)?).map(f)
    }

    /// Existence check before an access.
    fn check_range(&self, iova: u64, len_bytes: u64) -> Result<(), AccessFault> {
        if self.is_closed.load(Ordering::SeqCst) {
            self.access_violations.fetch_add(1, Ordering::SeqCst);
        }
        let end = iova.checked_add(len_bytes);
        let is_there = end.is_some_and(|end| end <= self.host_bytes().len() as u64);
        if is_there { Ok(()) } else { Err(AccessFault { iova, len_bytes }) }
    }
}

impl Memory for FakeRam {
    fn load(&self, segment: Segment, into: &mut [u8]) -> Result<(), InvalidSegment> {
        let done =
            self.with_range(segment.region, segment.offset, segment.len_bytes as usize, |bytes| {
                into.copy_from_slice(bytes);
            });
        done.ok_or(InvalidSegment(segment))
    }

    fn store(&self, segment: Segment, from: &[u8]) -> Result<(), InvalidSegment> {
        let done =
            self.with_range(segment.region, segment.offset, segment.len_bytes as usize, |bytes| {
                bytes.copy_from_slice(from);
            });
        done.ok_or(InvalidSegment(segment))
    }

    fn fill(&self, segment: Segment, byte: u8) -> Result<(), InvalidSegment> {
        let done =
            self.with_range(segment.region, segment.offset, segment.len_bytes as usize, |bytes| {
                bytes.fill(byte);
            });
        done.ok_or(InvalidSegment(segment))
    }
}

impl FakeHost {
    pub(crate) fn new(ram: &Arc<FakeRam>, behavior: HostBehavior, seed: u64) -> Self {
        Self {
            ram: ram.clone(),
            behavior,
            random: Random::new(seed),
            pending: Vec::new(),
            arrived: Vec::new(),
        }
    }

    fn start_access(&mut self, ticket: AccessId, access: PendingAccessKind) -> AccessProgress {
        // A slow host completes some accesses at once.
        if self.behavior.completes_later && self.random.chance(3, 4) {
            self.pending.push((ticket, access));
            return AccessProgress::Pending;
        }
        AccessProgress::Done
    }
}

impl Clone for FakeHost {
    /// A separate channel: the same memory, other access identifiers.
    fn clone(&self) -> Self {
        Self::new(&self.ram, self.behavior, self.random.clone().next_u64())
    }
}

impl RingMemory for FakeHost {
    type Entries = FakeRingEntries;

    fn resolve_ring(
        &mut self,
        iova: u64,
        len_bytes: u64,
    ) -> Result<Option<FakeRingEntries>, AccessFault> {
        self.ram.check_range(iova, len_bytes)?;
        let entries = FakeRingEntries { ram: self.ram.clone(), iova, len_bytes };
        Ok(self.behavior.shares_rings.then_some(entries))
    }
}

impl HostMemory for FakeHost {
    fn resolve(&mut self, iova: u64, len_bytes: u32) -> Result<Option<Segment>, AccessFault> {
        self.ram.check_range(iova, len_bytes.into())?;
        Ok(self.behavior.shares_data.then_some(Segment { region: HOST, offset: iova, len_bytes }))
    }

    fn read(
        &mut self,
        ticket: AccessId,
        iova: u64,
        into: &mut [u8],
    ) -> Result<AccessProgress, AccessFault> {
        self.ram.check_range(iova, into.len() as u64)?;
        let progress = self.start_access(ticket, PendingAccessKind::Read(iova, into.len()));
        if progress == AccessProgress::Done {
            self.ram.with_range(HOST, iova, into.len(), |bytes| into.copy_from_slice(bytes));
        }
        Ok(progress)
    }

    fn write(
        &mut self,
        ticket: AccessId,
        iova: u64,
        from: &[u8],
    ) -> Result<AccessProgress, AccessFault> {
        self.ram.check_range(iova, from.len() as u64)?;
        let progress = self.start_access(ticket, PendingAccessKind::Write(iova, from.to_vec()));
        if progress == AccessProgress::Done {
            self.ram.with_range(HOST, iova, from.len(), |bytes| bytes.copy_from_slice(from));
        }
        Ok(progress)
    }

    fn is_revoked(&mut self) -> bool {
        self.ram.is_revoked.load(Ordering::SeqCst)
    }

    fn ack_revocation(&mut self) {
        self.ram.has_acknowledged.store(true, Ordering::SeqCst);
        self.ram.forbid_all_access(true);
    }

    fn poll(&mut self) -> Option<AccessCompletion> {
        if self.pending.is_empty() || self.random.chance(1, 2) {
            return None;
        }
        let at = usize::try_from(self.random.below(self.pending.len() as u64)).unwrap_or(0);
        let (ticket, access) = self.pending.swap_remove(at);
        match access {
            PendingAccessKind::Read(iova, len) => {
                let bytes = self.ram.with_range(HOST, iova, len, |bytes| bytes.to_vec());
                self.arrived.push((ticket, bytes.unwrap_or_default()));
            }
            PendingAccessKind::Write(iova, from) => {
                self.ram.with_range(HOST, iova, from.len(), |bytes| bytes.copy_from_slice(&from));
            }
        }
        Some(AccessCompletion { id: ticket, result: Ok(()) })
    }

    fn copy_out_read_data(&mut self, ticket: AccessId, into: &mut [u8]) {
        if let Some(at) = self.arrived.iter().position(|(arrived, _)| *arrived == ticket) {
            into.copy_from_slice(&self.arrived.swap_remove(at).1);
        }
    }
}

impl FakeRingEntries {
    fn entry_address(&self, index: u32, size: u64) -> Result<u64, AccessFault> {
        let offset = u64::from(index) * size;
        if offset + size > self.len_bytes {
            return Err(AccessFault { iova: self.iova + offset, len_bytes: size });
        }
        Ok(self.iova + offset)
    }
}

impl RingEntries for FakeRingEntries {
    fn load_command(&self, index: u32) -> Result<[u64; 8], AccessFault> {
        let iova = self.entry_address(index, 64)?;
        let mut words = [0; 8];
        self.ram.with_range(HOST, iova, 64, |bytes| {
            for (word, chunk) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
                *word = u64::from_le_bytes(*chunk);
            }
        });
        Ok(words)
    }

    fn store_completion(
        &mut self,
        index: u32,
        entry: tenmil_base::CompletionEntry,
    ) -> Result<(), AccessFault> {
        let iova = self.entry_address(index, 16)?;
        let from = tenmil_wire::Completion(tenmil_base::entry_to_dwords(entry)).to_bytes();
        self.ram.with_range(HOST, iova, 16, |bytes| bytes.copy_from_slice(&from));
        Ok(())
    }

    fn load_u32(&self, index: u32) -> Result<u32, AccessFault> {
        let iova = self.entry_address(index, 4)?;
        let mut word = [0; 4];
        self.ram.with_range(HOST, iova, 4, |bytes| word.copy_from_slice(bytes));
        Ok(u32::from_le_bytes(word))
    }

    fn store_u32(&mut self, index: u32, value: u32) -> Result<(), AccessFault> {
        let iova = self.entry_address(index, 4)?;
        self.ram.with_range(HOST, iova, 4, |bytes| bytes.copy_from_slice(&value.to_le_bytes()));
        Ok(())
    }
}

impl Interrupts for RecordedInterrupts {
    fn raise(&mut self, vector: u16) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(vector);
    }
}
