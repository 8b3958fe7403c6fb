//! A host of plain bytes, which may share its memory or not, and may answer later and out of order.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::{
    Ended, Fault, HostEntries, HostMemory, Interrupts, Memory, NoSuchMemory, Progress, Random,
    RegionId, Segment, Ticket,
};

/// Region of host memory.
pub(crate) const HOST: RegionId = RegionId(0);
/// Region of bounce buffers.
pub(crate) const BOUNCE: RegionId = RegionId(1);

/// All the memory there is.
#[derive(Debug)]
pub(crate) struct Ram {
    regions: [Mutex<Vec<u8>>; 2],
    /// Nobody may touch the host's memory.
    is_sealed: AtomicBool,
    /// No access may be begun.
    is_closed: AtomicBool,
    /// The host has cut the controller off.
    is_cut: AtomicBool,
    /// The controller has said that it has let go.
    has_let_go: AtomicBool,
    /// How often somebody did all the same.
    violations: AtomicU64,
}

/// How a host behaves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Manners {
    /// Rings can be resolved.
    pub(crate) shares_rings: bool,
    /// Media reach the data.
    pub(crate) shares_data: bool,
    /// Copies end some turns later, in any order.
    pub(crate) answers_later: bool,
}

/// A channel to the host's memory.
#[derive(Debug)]
pub(crate) struct FakeHost {
    ram: Arc<Ram>,
    manners: Manners,
    random: Random,
    pending: Vec<(Ticket, Access)>,
    arrived: Vec<(Ticket, Vec<u8>)>,
}

#[derive(Debug)]
enum Access {
    Read(u64, usize),
    Write(u64, Vec<u8>),
}

/// A ring in the host's memory.
#[derive(Debug)]
pub(crate) struct FakeEntries {
    ram: Arc<Ram>,
    iova: u64,
    len_bytes: u64,
}

/// Counts signals by vector.
#[derive(Clone, Debug, Default)]
pub(crate) struct Raised(pub(crate) Arc<Mutex<Vec<u16>>>);

impl Ram {
    pub(crate) fn new(host_bytes: usize, bounce_bytes: usize) -> Arc<Self> {
        Arc::new(Self {
            regions: [Mutex::new(vec![0; host_bytes]), Mutex::new(vec![0; bounce_bytes])],
            is_sealed: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
            is_cut: AtomicBool::new(false),
            has_let_go: AtomicBool::new(false),
            violations: AtomicU64::new(0),
        })
    }

    /// The host's bytes, for the host itself.
    pub(crate) fn host(&self) -> MutexGuard<'_, Vec<u8>> {
        self.region(HOST)
    }

    /// From now on every access by the controller or a medium is a violation.
    pub(crate) fn seal(&self, is_sealed: bool) {
        self.is_sealed.store(is_sealed, Ordering::SeqCst);
    }

    /// From now on every access that the controller begins is a violation.
    pub(crate) fn close(&self, is_closed: bool) {
        self.is_closed.store(is_closed, Ordering::SeqCst);
    }

    /// Cuts the controller off, or lets it back.
    #[cfg(test)]
    pub(crate) fn cut(&self, is_cut: bool) {
        self.has_let_go.store(false, Ordering::SeqCst);
        self.is_cut.store(is_cut, Ordering::SeqCst);
    }

    /// Whether the controller says that it touches nothing any more. If so, it had better not.
    #[cfg(test)]
    pub(crate) fn has_let_go(&self) -> bool {
        self.has_let_go.load(Ordering::SeqCst)
    }

    pub(crate) fn violations(&self) -> u64 {
        self.violations.load(Ordering::SeqCst)
    }

    fn region(&self, region: RegionId) -> MutexGuard<'_, Vec<u8>> {
        self.regions[region.0 as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `f` on some bytes, if they are there.
    fn with<T>(
        &self,
        region: RegionId,
        offset: u64,
        len: usize,
        f: impl FnOnce(&mut [u8]) -> T,
    ) -> Option<T> {
        if region == HOST && self.is_sealed.load(Ordering::SeqCst) {
            self.violations.fetch_add(1, Ordering::SeqCst);
        }
        let start = usize::try_from(offset).ok()?;
        if region.0 > 1 {
            return None;
        }
        self.region(region).get_mut(start..start.checked_add(len)?).map(f)
    }

    /// What the controller asks for before it touches anything.
    fn exists(&self, iova: u64, len_bytes: u64) -> Result<(), Fault> {
        if self.is_closed.load(Ordering::SeqCst) {
            self.violations.fetch_add(1, Ordering::SeqCst);
        }
        let end = iova.checked_add(len_bytes);
        let is_there = end.is_some_and(|end| end <= self.host().len() as u64);
        if is_there { Ok(()) } else { Err(Fault { iova, len_bytes }) }
    }
}

impl Memory for Ram {
    fn load(&self, segment: Segment, into: &mut [u8]) -> Result<(), NoSuchMemory> {
        let done = self.with(segment.region, segment.offset, segment.len_bytes as usize, |bytes| {
            into.copy_from_slice(bytes);
        });
        done.ok_or(NoSuchMemory(segment))
    }

    fn store(&self, segment: Segment, from: &[u8]) -> Result<(), NoSuchMemory> {
        let done = self.with(segment.region, segment.offset, segment.len_bytes as usize, |bytes| {
            bytes.copy_from_slice(from);
        });
        done.ok_or(NoSuchMemory(segment))
    }

    fn fill(&self, segment: Segment, byte: u8) -> Result<(), NoSuchMemory> {
        let done = self.with(segment.region, segment.offset, segment.len_bytes as usize, |bytes| {
            bytes.fill(byte);
        });
        done.ok_or(NoSuchMemory(segment))
    }
}

impl FakeHost {
    pub(crate) fn new(ram: &Arc<Ram>, manners: Manners, seed: u64) -> Self {
        Self {
            ram: ram.clone(),
            manners,
            random: Random::new(seed),
            pending: Vec::new(),
            arrived: Vec::new(),
        }
    }

    fn now_or_later(&mut self, ticket: Ticket, access: Access) -> Progress {
        // Even a slow host is quick at times.
        if self.manners.answers_later && self.random.chance(3, 4) {
            self.pending.push((ticket, access));
            return Progress::Later;
        }
        Progress::Done
    }
}

impl Clone for FakeHost {
    /// A channel of its own: the same memory, other tickets.
    fn clone(&self) -> Self {
        Self::new(&self.ram, self.manners, self.random.clone().draw())
    }
}

impl HostMemory for FakeHost {
    type Entries = FakeEntries;

    fn entries(&mut self, iova: u64, len_bytes: u64) -> Result<Option<FakeEntries>, Fault> {
        self.ram.exists(iova, len_bytes)?;
        let entries = FakeEntries { ram: self.ram.clone(), iova, len_bytes };
        Ok(self.manners.shares_rings.then_some(entries))
    }

    fn reach(&mut self, iova: u64, len_bytes: u32) -> Result<Option<Segment>, Fault> {
        self.ram.exists(iova, len_bytes.into())?;
        Ok(self.manners.shares_data.then_some(Segment { region: HOST, offset: iova, len_bytes }))
    }

    fn read(&mut self, ticket: Ticket, iova: u64, into: &mut [u8]) -> Result<Progress, Fault> {
        self.ram.exists(iova, into.len() as u64)?;
        let progress = self.now_or_later(ticket, Access::Read(iova, into.len()));
        if progress == Progress::Done {
            self.ram.with(HOST, iova, into.len(), |bytes| into.copy_from_slice(bytes));
        }
        Ok(progress)
    }

    fn write(&mut self, ticket: Ticket, iova: u64, from: &[u8]) -> Result<Progress, Fault> {
        self.ram.exists(iova, from.len() as u64)?;
        let progress = self.now_or_later(ticket, Access::Write(iova, from.to_vec()));
        if progress == Progress::Done {
            self.ram.with(HOST, iova, from.len(), |bytes| bytes.copy_from_slice(from));
        }
        Ok(progress)
    }

    fn is_cut_off(&mut self) -> bool {
        self.ram.is_cut.load(Ordering::SeqCst)
    }

    fn let_go(&mut self) {
        self.ram.has_let_go.store(true, Ordering::SeqCst);
        self.ram.seal(true);
    }

    fn poll(&mut self) -> Option<Ended> {
        if self.pending.is_empty() || self.random.chance(1, 2) {
            return None;
        }
        let at = usize::try_from(self.random.below(self.pending.len() as u64)).unwrap_or(0);
        let (ticket, access) = self.pending.swap_remove(at);
        match access {
            Access::Read(iova, len) => {
                let bytes = self.ram.with(HOST, iova, len, |bytes| bytes.to_vec());
                self.arrived.push((ticket, bytes.unwrap_or_default()));
            }
            Access::Write(iova, from) => {
                self.ram.with(HOST, iova, from.len(), |bytes| bytes.copy_from_slice(&from));
            }
        }
        Some(Ended { ticket, result: Ok(()) })
    }

    fn collect(&mut self, ticket: Ticket, into: &mut [u8]) {
        if let Some(at) = self.arrived.iter().position(|(arrived, _)| *arrived == ticket) {
            into.copy_from_slice(&self.arrived.swap_remove(at).1);
        }
    }
}

impl FakeEntries {
    fn place(&self, index: u32, size: u64) -> Result<u64, Fault> {
        let offset = u64::from(index) * size;
        if offset + size > self.len_bytes {
            return Err(Fault { iova: self.iova + offset, len_bytes: size });
        }
        Ok(self.iova + offset)
    }
}

impl HostEntries for FakeEntries {
    fn load_command(&self, index: u32) -> Result<[u64; 8], Fault> {
        let iova = self.place(index, 64)?;
        let mut words = [0; 8];
        self.ram.with(HOST, iova, 64, |bytes| {
            for (word, chunk) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
                *word = u64::from_le_bytes(*chunk);
            }
        });
        Ok(words)
    }

    fn store_completion(&mut self, index: u32, entry: base::CompletionEntry) -> Result<(), Fault> {
        let iova = self.place(index, 16)?;
        let from = wire::Completion(base::entry_to_dwords(entry)).to_bytes();
        self.ram.with(HOST, iova, 16, |bytes| bytes.copy_from_slice(&from));
        Ok(())
    }

    fn load_u32(&self, index: u32) -> Result<u32, Fault> {
        let iova = self.place(index, 4)?;
        let mut word = [0; 4];
        self.ram.with(HOST, iova, 4, |bytes| word.copy_from_slice(bytes));
        Ok(u32::from_le_bytes(word))
    }

    fn store_u32(&mut self, index: u32, value: u32) -> Result<(), Fault> {
        let iova = self.place(index, 4)?;
        self.ram.with(HOST, iova, 4, |bytes| bytes.copy_from_slice(&value.to_le_bytes()));
        Ok(())
    }
}

impl Interrupts for Raised {
    fn raise(&mut self, vector: u16) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(vector);
    }
}
