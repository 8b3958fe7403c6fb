//! A controller's view of the host it serves: memory by I/O virtual address, and interrupts.
//!
//! The host is not believed. An address may lie anywhere, and what lies there may change between
//! two looks, so each entry is read once and every access may fail. A host may also be slow: a peer
//! that shares no memory answers a read many turns later. So an access is either
//! [done](Progress::Done) at once or [later](Progress::Later), and then its [`Ticket`] ends.

use crate::{CompletionEntry, Segment};

/// A host's memory, as a controller uses it.
pub trait HostMemory {
    /// A resolved view of a ring.
    type Entries: HostEntries;

    /// Resolves `len_bytes` at `iova` once, so that a ring needs no look-up per entry. `Ok(None)`
    /// means that the memory exists and is not shared: use [`read`](Self::read) and
    /// [`write`](Self::write).
    fn entries(&mut self, iova: u64, len_bytes: u64) -> Result<Option<Self::Entries>, Fault>;

    /// Where `len_bytes` at `iova` lie, if a medium may reach them directly and they are
    /// contiguous. `Ok(None)` means that the bytes must be copied through
    /// [`read`](Self::read) and [`write`](Self::write).
    fn reach(&mut self, iova: u64, len_bytes: u32) -> Result<Option<Segment>, Fault>;

    /// Where every piece of `len_bytes` can be reached without asking again, if there is such a
    /// place. It is good for the rest of the turn, and an address outside of it says nothing yet:
    /// [`reach`](Self::reach) has to be asked.
    fn window(&mut self, len_bytes: u32) -> Option<Window> {
        let _ = len_bytes;
        None
    }

    /// Copies bytes from the host. With [`Progress::Done`] they are in `into`; with
    /// [`Progress::Later`] they are fetched by [`collect`](Self::collect) once `ticket` has ended.
    fn read(&mut self, ticket: Ticket, iova: u64, into: &mut [u8]) -> Result<Progress, Fault>;

    /// Copies bytes to the host. Either way `from` has been taken; with [`Progress::Later`] it has
    /// arrived once `ticket` has ended.
    fn write(&mut self, ticket: Ticket, iova: u64, from: &[u8]) -> Result<Progress, Fault>;

    /// Whether the host has cut this controller off from its memory. Then no access can be begun, and
    /// the host waits to be told that none is under way: [`let_go`](Self::let_go).
    fn is_cut_off(&mut self) -> bool {
        false
    }

    /// Whatever was begun before this was last seen to be [cut off](Self::is_cut_off) has ended, at
    /// media as well.
    fn let_go(&mut self) {}

    /// The next access that has ended, in whatever order they do.
    fn poll(&mut self) -> Option<Ended> {
        None
    }

    /// Copies out what a later read has brought. Called once, after its ticket has ended well.
    fn collect(&mut self, ticket: Ticket, into: &mut [u8]) {
        let _ = (ticket, into);
    }
}

/// A resolved view of a ring in host memory.
pub trait HostEntries {
    /// Loads a 64-byte submission entry, once and whole.
    fn load_command(&self, index: u32) -> Result<[u64; 8], Fault>;
    /// Loads the [`PLAIN_WORDS`] of each submission entry from `first` on, at most `count`, and
    /// hands them to `take` until it returns false. Returns how many it returned true for, and the
    /// entry for which it did not, whole. No word is loaded twice. A fault ends it early, and is
    /// told when it is the first entry that is not there.
    #[inline(always)]
    fn load_each(
        &self,
        first: u32,
        count: u32,
        mut take: impl FnMut([u64; 4]) -> bool,
    ) -> Result<(u32, Option<[u64; 8]>), Fault> {
        for (taken, index) in (first..).take(count as usize).enumerate() {
            let taken = u32::try_from(taken).unwrap_or(count);
            let command = match self.load_command(index) {
                Ok(command) => command,
                Err(fault) if taken == 0 => return Err(fault),
                Err(_) => return Ok((taken, None)),
            };
            if !take(PLAIN_WORDS.map(|word| command[word])) {
                return Ok((taken, Some(command)));
            }
        }
        Ok((count, None))
    }
    /// Stores a 16-byte completion entry, the word with the phase last.
    fn store_completion(&mut self, index: u32, entry: CompletionEntry) -> Result<(), Fault>;
    /// Stores entries from `index` on, back to back.
    ///
    /// A host polls the line that is being written, and each look takes the line away from the
    /// writer. Four entries stored at once cost one such visit and not four: on two cores that
    /// share no cache it doubles what a ring can do.
    fn store_completions(&mut self, index: u32, entries: &[CompletionEntry]) -> Result<(), Fault> {
        for (at, entry) in (index..).zip(entries) {
            self.store_completion(at, *entry)?;
        }
        Ok(())
    }
    /// Stores what `make` makes of each of `items` into the entries from `first` on, until it makes
    /// nothing of one. Returns of how many something was made. There must be an entry for each item
    /// between `first` and the end of the ring.
    #[inline(always)]
    fn store_each<T>(
        &mut self,
        first: u32,
        items: &[T],
        mut make: impl FnMut(&T) -> Option<CompletionEntry>,
    ) -> (usize, Result<(), Fault>) {
        for (made, (item, index)) in items.iter().zip(first..).enumerate() {
            let Some(entry) = make(item) else { return (made, Ok(())) };
            if let Err(fault) = self.store_completion(index, entry) {
                return (made + 1, Err(fault));
            }
        }
        (items.len(), Ok(()))
    }
    /// Loads a 32-bit word: a shadow doorbell.
    fn load_u32(&self, index: u32) -> Result<u32, Fault>;
    /// Stores a 32-bit word: an event index.
    fn store_u32(&mut self, index: u32, value: u32) -> Result<(), Fault>;
    /// Says that submission entry `index` will be read soon.
    fn prefetch_command(&self, index: u32) {
        let _ = index;
    }
    /// Says that completion entry `index` will be written soon.
    fn prefetch_completion(&self, index: u32) {
        let _ = index;
    }
}

/// The words of a submission entry that a plain read or write is made of: what it is and on which
/// namespace, PRP1, the first block, and how many (NVM 1.1 §3.3.4, §3.3.6).
pub const PLAIN_WORDS: [usize; 4] = [0, 3, 5, 6];

/// A stretch of a host's memory in which pieces of one length can be reached where they lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Where the last piece begins, less where the first does.
    skip_max: u64,
    iova: u64,
    first: Segment,
}

impl Window {
    /// Pieces of `len_bytes` in `memory`, which begins at `iova`. `None` if not one fits.
    #[inline]
    pub fn of(memory: Segment, iova: u64, len_bytes: u32) -> Option<Self> {
        let skip_max = u64::from(memory.len_bytes.checked_sub(len_bytes)?);
        Some(Self { skip_max, iova, first: Segment { len_bytes, ..memory } })
    }

    /// The piece that begins at `iova`, if it lies inside.
    #[inline(always)]
    pub fn at(&self, iova: u64) -> Option<Segment> {
        // An address below the first wraps round to more than any length.
        let skip = iova.wrapping_sub(self.iova);
        let Segment { region, offset, len_bytes } = self.first;
        (skip <= self.skip_max).then(|| Segment { region, offset: offset + skip, len_bytes })
    }
}

/// The number under which a controller waits for an access to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u32);

/// How far an access got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// It is done.
    Done,
    /// Its ticket will end.
    Later,
}

/// An access that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Which.
    pub ticket: Ticket,
    /// How.
    pub result: Result<(), Fault>,
}

/// The host has no such memory, or does not let this controller touch it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// First byte of the access.
    pub iova: u64,
    /// Its length.
    pub len_bytes: u64,
}

/// The interrupt vectors of a controller's host.
pub trait Interrupts {
    /// Signals `vector`. Signals may merge; none is lost.
    fn raise(&mut self, vector: u16);
}
