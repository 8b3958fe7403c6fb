//! The controller's end, for a controller emulated in this process: the host's memory is ours.
//!
//! An I/O virtual address names its region in its upper bits, so resolving one is a shift, a bounds
//! check and nothing else.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use base::{CompletionEntry, Fault, HostEntries, HostMemory, Memory, Progress, Segment, Ticket};

use crate::barrier::{prefetch_read, prefetch_write};
use crate::pool::DevicePool;
use crate::regions::Regions;

/// The memory of a host in this process.
#[derive(Clone, Debug)]
pub struct SharedHostMemory {
    pool: DevicePool,
}

/// A ring in it.
#[derive(Debug)]
pub struct SharedEntries {
    words: NonNull<u64>,
    iova: u64,
    len_bytes: u64,
    /// Keeps the memory mapped.
    _regions: Regions,
}

// SAFETY: the pointer is into a region that the handle beside it keeps mapped, whichever thread it
// is on; all access is by atomics.
unsafe impl Send for SharedEntries {}

impl SharedHostMemory {
    /// The controller's view of what `pool` lets it reach.
    pub fn new(pool: &DevicePool) -> Self {
        Self { pool: pool.clone() }
    }

    #[inline]
    fn segment(&self, iova: u64, len_bytes: u32) -> Result<Segment, Fault> {
        let segment = self.pool.segment_at(iova, len_bytes).filter(|_| !self.pool.is_cut_off());
        segment.ok_or(Fault { iova, len_bytes: u64::from(len_bytes) })
    }
}

impl HostMemory for SharedHostMemory {
    type Entries = SharedEntries;

    fn entries(&mut self, iova: u64, len_bytes: u64) -> Result<Option<SharedEntries>, Fault> {
        let fault = Fault { iova, len_bytes };
        let len = u32::try_from(len_bytes).map_err(|_| fault)?;
        let segment = self.pool.own_segment_at(iova, len).filter(|_| !self.pool.is_cut_off());
        // A view lasts, and what else has been mapped may be taken away: rings lie in the pool.
        let segment = segment.ok_or(fault)?;
        if !iova.is_multiple_of(8) {
            return Err(fault);
        }
        let regions = self.pool.regions().clone();
        let words = regions.address(segment).map_err(|_| fault)?.cast();
        Ok(Some(SharedEntries { words, iova, len_bytes, _regions: regions }))
    }

    #[inline]
    fn reach(&mut self, iova: u64, len_bytes: u32) -> Result<Option<Segment>, Fault> {
        self.segment(iova, len_bytes).map(Some)
    }

    fn read(&mut self, _: Ticket, iova: u64, into: &mut [u8]) -> Result<Progress, Fault> {
        let fault = Fault { iova, len_bytes: into.len() as u64 };
        let segment = self.segment(iova, u32::try_from(into.len()).map_err(|_| fault)?)?;
        self.pool.load(segment, into).map_err(|_| fault)?;
        Ok(Progress::Done)
    }

    fn write(&mut self, _: Ticket, iova: u64, from: &[u8]) -> Result<Progress, Fault> {
        let fault = Fault { iova, len_bytes: from.len() as u64 };
        let segment = self.segment(iova, u32::try_from(from.len()).map_err(|_| fault)?)?;
        self.pool.store(segment, from).map_err(|_| fault)?;
        Ok(Progress::Done)
    }
}

impl SharedEntries {
    /// The address of 64-bit word `word`, if it is followed by `count` words of the ring.
    #[inline]
    fn words(&self, word: usize, count: usize) -> Result<NonNull<u64>, Fault> {
        let end = (word + count) as u64 * 8;
        if end > self.len_bytes {
            return Err(Fault { iova: self.iova + word as u64 * 8, len_bytes: count as u64 * 8 });
        }
        // SAFETY: `word + count` words lie in the memory resolved when this was made.
        Ok(unsafe { self.words.add(word) })
    }

    #[inline]
    fn half_word(&self, index: u32) -> Result<&AtomicU32, Fault> {
        let address = self.words(index as usize / 2, 1)?.cast::<u32>();
        // SAFETY: the first or the second half of a word inside the ring.
        let address = unsafe { address.add(index as usize % 2) };
        // SAFETY: aligned and inside, mapped as long as `self` holds `_regions`, and an atomic may be
        // shared with whoever else accesses it atomically.
        Ok(unsafe { AtomicU32::from_ptr(address.as_ptr()) })
    }
}

impl HostEntries for SharedEntries {
    #[inline]
    fn load_command(&self, index: u32) -> Result<[u64; 8], Fault> {
        let first = self.words(index as usize * 8, 8)?;
        let mut command = [0; 8];
        for (offset, word) in command.iter_mut().enumerate() {
            // SAFETY: `offset < 8`: inside the entry just checked.
            let address = unsafe { first.add(offset) };
            // SAFETY: aligned, mapped as long as `self` holds `_regions`, accessed atomically only.
            *word = unsafe { AtomicU64::from_ptr(address.as_ptr()) }.load(Ordering::Relaxed);
        }
        Ok(command)
    }

    #[inline]
    fn store_completion(&mut self, index: u32, entry: CompletionEntry) -> Result<(), Fault> {
        let first = self.words(index as usize * 2, 2)?;
        // SAFETY: the second word of the entry just checked.
        let second = unsafe { first.add(1) };
        // SAFETY: aligned, mapped as long as `self` holds `_regions`, accessed atomically only.
        unsafe { AtomicU64::from_ptr(first.as_ptr()) }.store(entry[0], Ordering::Relaxed);
        // Pairs with the driver's barrier after it has seen the phase.
        // SAFETY: as above.
        unsafe { AtomicU64::from_ptr(second.as_ptr()) }.store(entry[1], Ordering::Release);
        Ok(())
    }

    #[inline]
    fn load_u32(&self, index: u32) -> Result<u32, Fault> {
        // Pairs with the driver's barrier between its entries and its shadow doorbell.
        Ok(self.half_word(index)?.load(Ordering::Acquire))
    }

    #[inline]
    fn store_u32(&mut self, index: u32, value: u32) -> Result<(), Fault> {
        self.half_word(index)?.store(value, Ordering::Release);
        Ok(())
    }

    #[inline]
    fn prefetch_command(&self, index: u32) {
        prefetch_read(self.words.as_ptr().wrapping_add(index as usize * 8).cast());
    }

    #[inline]
    fn prefetch_completion(&self, index: u32) {
        prefetch_write(self.words.as_ptr().wrapping_add(index as usize * 2).cast());
    }
}

#[cfg(test)]
mod tests {
    use base::{Dma, HostEntries, HostMemory, Memory, Ticket};

    use crate::{
        Backing, CommandStore, DeviceKind, DevicePool, Mapping, Regions, SharedHostMemory,
    };

    fn pool() -> DevicePool {
        let regions = Regions::new(1);
        let memory = regions.add(Mapping::new(1 << 16, Backing::Private).unwrap()).unwrap();
        DevicePool::new(regions, memory, DeviceKind::Emulated, CommandStore::Plain)
    }

    #[test]
    fn an_address_resolves_to_the_segment_it_was_made_from() {
        let pool = pool();
        let segment = pool.allocate(8192).unwrap();
        let mut host = SharedHostMemory::new(&pool);
        let iova = pool.iova(segment).unwrap();
        assert_eq!(host.reach(iova, 8192), Ok(Some(segment)));

        let mut bytes = [0; 5];
        host.write(Ticket(0), iova + 8000, b"bytes").unwrap();
        host.read(Ticket(0), iova + 8000, &mut bytes).unwrap();
        assert_eq!(&bytes, b"bytes");
    }

    #[test]
    fn a_stray_address_is_a_fault_and_so_is_every_address_once_cut_off() {
        let pool = pool();
        let iova = pool.iova(pool.allocate(4096).unwrap()).unwrap();
        let mut host = SharedHostMemory::new(&pool);
        for stray in [0, 1, iova - 1, iova + (1 << 16), iova << 1, u64::MAX, u64::MAX << 12] {
            assert!(host.reach(stray, 1).is_err(), "{stray:#x}");
            assert!(host.entries(stray, 64).is_err(), "{stray:#x}");
            assert!(host.write(Ticket(0), stray, b"x").is_err(), "{stray:#x}");
        }
        assert!(host.reach(iova + (1 << 16) - 1, 2).is_err(), "half inside");
        pool.cut_off();
        assert!(host.reach(iova, 1).is_err());
        pool.reconnect();
        assert!(host.reach(iova, 1).is_ok());
    }

    #[test]
    fn shadow_doorbells_are_half_words_and_stay_inside() {
        let pool = pool();
        let segment = pool.allocate(4096).unwrap();
        let mut entries =
            SharedHostMemory::new(&pool).entries(pool.iova(segment).unwrap(), 64).unwrap().unwrap();
        for index in 0..16 {
            entries.store_u32(index, index * 3).unwrap();
        }
        assert!((0..16).all(|index| entries.load_u32(index) == Ok(index * 3)));
        assert!(entries.load_u32(16).is_err());
        assert!(entries.load_command(1).is_err());
        assert!(entries.store_completion(4, [0; 2]).is_err());
        let mut bytes = [0; 4];
        pool.load(segment.slice(12, 4).unwrap(), &mut bytes).unwrap();
        assert_eq!(u32::from_le_bytes(bytes), 9);
    }
}
