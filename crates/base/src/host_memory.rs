//! Controller view of its host: memory by I/O virtual address, and interrupts.
//!
//! The host is not trusted. An address may be invalid, and its content may change between two
//! loads, so each entry is read once and every access may fail. A host may also be slow: a peer
//! without shared memory completes a read many iterations later. An access is either
//! [done](AccessProgress::Done) at once or [pending](AccessProgress::Pending), and then completes
//! under its [`AccessId`].

use crate::{CompletionEntry, Segment};

/// Memory of a host, as accessed by a controller.
pub trait HostMemory {
    /// Resolves `len_bytes` at `iova` to a segment, if a block device can access them directly and
    /// they are contiguous. `Ok(None)` means that the bytes must be copied by [`read`](Self::read)
    /// and [`write`](Self::write).
    fn resolve(&mut self, iova: u64, len_bytes: u32) -> Result<Option<Segment>, AccessFault>;

    /// Range in which every piece of `len_bytes` is directly accessible without another lookup, if
    /// there is one. Valid for the rest of the iteration. An address outside of it needs
    /// [`resolve`](Self::resolve).
    fn direct_access_window(&mut self, len_bytes: u32) -> Option<DirectAccessWindow> {
        let _ = len_bytes;
        None
    }

    /// Copies bytes from the host. After [`AccessProgress::Done`] they are in `into`; after
    /// [`AccessProgress::Pending`] [`copy_out_read_data`](Self::copy_out_read_data) returns them once the access has
    /// completed.
    fn read(
        &mut self,
        ticket: AccessId,
        iova: u64,
        into: &mut [u8],
    ) -> Result<AccessProgress, AccessFault>;

    /// Copies bytes to the host. `from` is consumed in any case; after [`AccessProgress::Pending`]
    /// the data has arrived once the access has completed.
    fn write(
        &mut self,
        ticket: AccessId,
        iova: u64,
        from: &[u8],
    ) -> Result<AccessProgress, AccessFault>;

    /// Whether the host has revoked this controller's access to its memory. Then no access can
    /// start, and the host waits for [`ack_revocation`](Self::ack_revocation).
    fn is_revoked(&mut self) -> bool {
        false
    }

    /// Acknowledges a revocation: every access that started before [`is_revoked`](Self::is_revoked)
    /// was last true has completed, at block devices too.
    fn ack_revocation(&mut self) {}

    /// Next completed access, in any order.
    fn poll(&mut self) -> Option<AccessCompletion> {
        None
    }

    /// Copies out the data of a completed pending read. Called once, after a successful completion.
    fn copy_out_read_data(&mut self, ticket: AccessId, into: &mut [u8]) {
        let _ = (ticket, into);
    }
}

/// Host memory that also holds the rings of queues.
pub trait RingMemory: HostMemory {
    /// Resolved view of a ring.
    type Entries: RingEntries;

    /// Resolves `len_bytes` at `iova` once, so that a ring needs no lookup per entry. `Ok(None)`
    /// means that the memory exists but is not shared: use [`read`](HostMemory::read) and
    /// [`write`](HostMemory::write).
    fn resolve_ring(
        &mut self,
        iova: u64,
        len_bytes: u64,
    ) -> Result<Option<Self::Entries>, AccessFault>;
}

/// Resolved view of a ring in host memory.
pub trait RingEntries {
    /// Loads a 64-byte submission queue entry, once and whole.
    fn load_command(&self, index: u32) -> Result<[u64; 8], AccessFault>;
    /// Loads the [`SIMPLE_IO_WORDS`] of up to `count` submission queue entries from `first` on, and
    /// passes them to `take` until it returns false. Returns how often it returned true, and the
    /// complete entry for which it did not. No word is loaded twice. A fault stops it early, and is
    /// returned if the first entry is not accessible.
    #[inline(always)]
    fn load_commands(
        &self,
        first: u32,
        count: u32,
        mut take: impl FnMut([u64; 4]) -> bool,
    ) -> Result<(u32, Option<[u64; 8]>), AccessFault> {
        for (taken, index) in (first..).take(count as usize).enumerate() {
            let taken = u32::try_from(taken).unwrap_or(count);
            let command = match self.load_command(index) {
                Ok(command) => command,
                Err(fault) if taken == 0 => return Err(fault),
                Err(_) => return Ok((taken, None)),
            };
            if !take(SIMPLE_IO_WORDS.map(|word| command[word])) {
                return Ok((taken, Some(command)));
            }
        }
        Ok((count, None))
    }
    /// Stores a 16-byte completion queue entry, the word with the phase last.
    fn store_completion(&mut self, index: u32, entry: CompletionEntry) -> Result<(), AccessFault>;
    /// Stores consecutive entries from `index` on.
    ///
    /// A host polls the cache line being written, and each poll takes the line away from the
    /// writer. Storing four entries at once costs one such transfer instead of four: on two cores
    /// without a shared cache this doubles the throughput of a ring.
    fn store_completions(
        &mut self,
        index: u32,
        entries: &[CompletionEntry],
    ) -> Result<(), AccessFault> {
        for (at, entry) in (index..).zip(entries) {
            self.store_completion(at, *entry)?;
        }
        Ok(())
    }
    /// Stores the entry that `make` builds of each of `items` into the entries from `first` on,
    /// until `make` returns `None`. Returns the number of entries. There must be an entry for each
    /// item between `first` and the end of the ring.
    #[inline(always)]
    fn store_built_completions<T>(
        &mut self,
        first: u32,
        items: &[T],
        mut make: impl FnMut(&T) -> Option<CompletionEntry>,
    ) -> (usize, Result<(), AccessFault>) {
        for (made, (item, index)) in items.iter().zip(first..).enumerate() {
            let Some(entry) = make(item) else { return (made, Ok(())) };
            if let Err(fault) = self.store_completion(index, entry) {
                return (made + 1, Err(fault));
            }
        }
        (items.len(), Ok(()))
    }
    /// Loads a 32-bit word: a shadow doorbell.
    fn load_u32(&self, index: u32) -> Result<u32, AccessFault>;
    /// Stores a 32-bit word: an event index.
    fn store_u32(&mut self, index: u32, value: u32) -> Result<(), AccessFault>;
    /// Prefetches submission queue entry `index` for reading.
    fn prefetch_command(&self, index: u32) {
        let _ = index;
    }
    /// Prefetches completion queue entry `index` for writing.
    fn prefetch_completion(&self, index: u32) {
        let _ = index;
    }
}

/// Words of a submission queue entry that a simple read or write uses: opcode and namespace, PRP1,
/// starting LBA, and number of blocks (NVM 1.1 §3.3.4, §3.3.6).
pub const SIMPLE_IO_WORDS: [usize; 4] = [0, 3, 5, 6];

/// Range of host memory in which pieces of one length are directly accessible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirectAccessWindow {
    /// Offset of the last piece from the first one.
    skip_max: u64,
    iova: u64,
    first: Segment,
}

impl DirectAccessWindow {
    /// Pieces of `len_bytes` in `memory`, which begins at `iova`. `None` if not one fits.
    #[inline]
    pub fn for_pieces(memory: Segment, iova: u64, len_bytes: u32) -> Option<Self> {
        let skip_max = u64::from(memory.len_bytes.checked_sub(len_bytes)?);
        Some(Self { skip_max, iova, first: Segment { len_bytes, ..memory } })
    }

    /// Piece at `iova`, if it is inside.
    #[inline(always)]
    pub fn piece_at(&self, iova: u64) -> Option<Segment> {
        // An address below the first one wraps to an offset beyond any length.
        let skip = iova.wrapping_sub(self.iova);
        let Segment { region, offset, len_bytes } = self.first;
        (skip <= self.skip_max).then(|| Segment { region, offset: offset + skip, len_bytes })
    }
}

/// Identifier of an asynchronous access.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AccessId(pub u32);

/// Progress of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessProgress {
    /// Completed.
    Done,
    /// Completes later under its identifier.
    Pending,
}

/// Completed asynchronous access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccessCompletion {
    /// Its identifier.
    pub id: AccessId,
    /// Its result.
    pub result: Result<(), AccessFault>,
}

/// The host memory does not exist, or is not permitted for this controller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccessFault {
    /// First byte of the access.
    pub iova: u64,
    /// Its length.
    pub len_bytes: u64,
}

/// Interrupt vectors of a controller's host.
pub trait Interrupts {
    /// Signals `vector`. Signals may coalesce; none is lost.
    fn raise(&mut self, vector: u16);
}
