//! The memory of a client, as the controller sees it: by I/O virtual address.
//!
//! ```text
//!   DMA_MAP, DMA_UNMAP ──▶ Maps ── a new table, and the next generation
//!                                        │
//!   queue, admin: Reach ── has the generation changed? ── its own handle on the table
//!        │ shared by descriptor: a segment of a region
//!        └ not shared: a Question for the client, which the guest carries to the socket
//! ```
//!
//! An address is looked up without a lock. What is not shared goes through one, and through a socket.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use base::{Ended, Fault, HostMemory, Memory, Progress, RegionId, Segment, Ticket, Window};
use dma::{Adopted, Regions, SharedEntries};
use vfu::Errno;
use vfu::server::DmaMap;

/// What the client has mapped, as the guest has it that hears of it.
#[derive(Debug)]
pub(super) struct Maps {
    shared: Arc<Shared>,
    regions: Regions,
    /// The memory itself, by its address.
    adopted: BTreeMap<u64, Adopted>,
}

/// One user's way to it. Every clone is a user of its own.
#[derive(Debug)]
pub(super) struct Reach {
    shared: Arc<Shared>,
    regions: Regions,
    table: Arc<Table>,
    seen: u32,
    /// The place in the table that was looked at last.
    last: usize,
    lane: u32,
    /// Accesses by message that have not ended.
    waiting: u32,
}

/// An access to memory that is not shared.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Question {
    pub(super) token: u32,
    pub(super) iova: u64,
    pub(super) what: Access,
}

/// Which way bytes go.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Access {
    /// So many are wanted.
    Read(u32),
    /// These are sent.
    Write(Vec<u8>),
}

#[derive(Debug)]
struct Shared {
    generation: AtomicU32,
    /// There are questions, or have been: whoever carries them looks only then.
    has_questions: AtomicBool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    table: Arc<Table>,
    questions: VecDeque<Question>,
    /// Accesses that have been begun, by token.
    begun: BTreeMap<u32, Begun>,
    /// What has ended, by user.
    lanes: BTreeMap<u32, Lane>,
    tokens: u32,
    /// Regions in which rings lie.
    rings: Vec<RegionId>,
    /// Some of the memory with rings is to be taken away.
    cut: Cut,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Cut {
    #[default]
    None,
    Asked,
    LetGo,
}

#[derive(Debug)]
struct Begun {
    lane: u32,
    ticket: Ticket,
    iova: u64,
    len_bytes: u32,
    is_read: bool,
}

#[derive(Debug, Default)]
struct Lane {
    ended: VecDeque<Ended>,
    data: BTreeMap<Ticket, Vec<u8>>,
}

type Table = Vec<Map>;

/// A stretch of the client's memory.
#[derive(Clone, Copy, Debug)]
struct Map {
    iova: u64,
    len_bytes: u64,
    /// Where it lies, if it is shared and may be read and written, and from which byte on.
    region: Option<RegionId>,
    offset: u64,
    is_readable: bool,
    is_writable: bool,
}

/// Why memory was not mapped.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct NotMapped {
    pub(super) errno: Errno,
    pub(super) text: String,
}

/// Stretches that a client may have mapped at a time: a virtual machine has some tens.
const MAPS_MAX: usize = 1024;

/// Bytes of files that a client may have mapped at a time: 4 TiB.
const BYTES_MAX: u64 = 4 << 40;

/// A window reaches so far: a segment cannot name more.
const WINDOW_SHIFT: u32 = 31;

impl Maps {
    pub(super) fn new(regions: Regions) -> Self {
        let (generation, has_questions) = (AtomicU32::new(0), AtomicBool::new(false));
        let shared = Shared { generation, has_questions, state: Mutex::default() };
        Self { shared: Arc::new(shared), regions, adopted: BTreeMap::new() }
    }

    /// A way to it for a controller.
    pub(super) fn reach(&self) -> Reach {
        Reach::new(Arc::clone(&self.shared), self.regions.clone())
    }

    /// Whether so much more can be mapped from files: address space that was used for a region stays
    /// used.
    pub(super) fn has_room(&self, len_bytes: u64) -> Result<(), NotMapped> {
        let mapped: u64 = self.adopted.values().map(Adopted::len_bytes).sum();
        if mapped.saturating_add(len_bytes) <= BYTES_MAX {
            return Ok(());
        }
        let text = format!(
            "{mapped} bytes are mapped, and {len_bytes} more were to be, expected at most {BYTES_MAX}"
        );
        Err(NotMapped { errno: Errno::NO_SPACE, text })
    }

    /// Enters a stretch, with the region that it is if it is shared.
    pub(super) fn map(&mut self, map: DmaMap, memory: Option<Adopted>) -> Result<(), NotMapped> {
        let DmaMap { iova, len_bytes, is_readable, is_writable, .. } = map;
        let refuse = |errno, text| Err(NotMapped { errno, text });
        let mut state = self.shared.lock();
        if state.table.len() >= MAPS_MAX {
            let text = format!("{MAPS_MAX} stretches are mapped, expected fewer");
            return refuse(Errno::NO_SPACE, text);
        }
        let end = iova + len_bytes;
        let at = state.table.partition_point(|map| map.iova < iova);
        let before = at.checked_sub(1).map(|before| state.table[before]);
        let after = state.table.get(at);
        if before.is_some_and(|map| map.iova + map.len_bytes > iova)
            || after.is_some_and(|map| map.iova < end)
        {
            let text = format!("{iova:#x} to {end:#x} overlaps what is mapped");
            return refuse(Errno::EXISTS, text);
        }
        let is_open = is_readable && is_writable;
        let memory_of = memory.as_ref().filter(|_| is_open);
        let (region, offset) = (memory_of.map(Adopted::id), memory_of.map_or(0, Adopted::offset));
        let mut table = Table::clone(&state.table);
        table.insert(at, Map { iova, len_bytes, region, offset, is_readable, is_writable });
        state.table = Arc::new(table);
        drop(state);
        self.shared.changed();
        self.adopted.extend(memory.map(|memory| (iova, memory)));
        Ok(())
    }

    /// Begins to take a stretch away: from now on its addresses are nowhere. What was begun before
    /// may still touch it, until [`release`](Self::release). False if there is no such stretch.
    pub(super) fn unmap(&mut self, iova: u64, len_bytes: u64) -> bool {
        let mut state = self.shared.lock();
        let is_it = |map: &Map| map.iova == iova && map.len_bytes == len_bytes;
        let Some(at) = state.table.iter().position(is_it) else { return false };
        let mut table = Table::clone(&state.table);
        let gone = table.remove(at);
        state.table = Arc::new(table);
        if gone.region.is_some_and(|region| state.rings.contains(&region)) {
            state.cut = Cut::Asked;
        }
        drop(state);
        self.shared.changed();
        true
    }

    /// Whether rings lie in what is being taken away, and the controller still works on them.
    pub(super) fn awaits_cut(&self) -> bool {
        self.shared.lock().cut == Cut::Asked
    }

    /// Lets go of what was taken away, which nothing touches any more.
    pub(super) fn release(&mut self, iova: u64) {
        let gone = self.adopted.remove(&iova);
        let mut state = self.shared.lock();
        state.cut = Cut::None;
        if let Some(gone) = gone {
            state.rings.retain(|region| *region != gone.id());
        }
    }

    /// The client has gone: everything is taken away and nothing is asked any more. What was begun
    /// before may still touch it, until [`release_all`](Self::release_all).
    pub(super) fn unmap_all(&mut self) {
        let mut state = self.shared.lock();
        state.table = Arc::default();
        state.questions.clear();
        let begun: Vec<u32> = state.begun.keys().copied().collect();
        for token in begun {
            state.end(token, Err(Errno::IO));
        }
        drop(state);
        self.shared.changed();
    }

    /// The controller works on no ring any more.
    pub(super) fn forget_rings(&mut self) {
        self.shared.lock().rings.clear();
    }

    /// Lets go of everything.
    pub(super) fn release_all(&mut self) {
        self.adopted.clear();
        let mut state = self.shared.lock();
        (state.cut, state.rings) = (Cut::None, Vec::new());
    }

    /// The first address of memory that the client has taken back behind our back, if it has.
    pub(super) fn failed(&self) -> Option<u64> {
        self.adopted.iter().find(|(_, memory)| memory.has_failed()).map(|(iova, _)| *iova)
    }

    /// Whether accesses may be there that are to go by message.
    #[inline]
    pub(super) fn has_questions(&self) -> bool {
        // Pairs with the release in `ask`.
        self.shared.has_questions.load(Ordering::Acquire)
    }

    /// The next access that is to go by message.
    pub(super) fn next_question(&self) -> Option<Question> {
        let mut state = self.shared.lock();
        let question = state.questions.pop_front();
        // Under the lock, so that no question comes between.
        self.shared.has_questions.store(!state.questions.is_empty(), Ordering::Relaxed);
        question
    }

    /// What became of an access.
    pub(super) fn answered(&self, token: u32, data: Result<Vec<u8>, Errno>) {
        self.shared.lock().end(token, data);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn changed(&self) {
        // Pairs with the acquire in `refresh`.
        self.generation.fetch_add(1, Ordering::Release);
    }
}

impl State {
    fn end(&mut self, token: u32, data: Result<Vec<u8>, Errno>) {
        let Some(begun) = self.begun.remove(&token) else { return };
        let Begun { lane, ticket, iova, len_bytes, is_read } = begun;
        let Some(lane) = self.lanes.get_mut(&lane) else { return };
        let fault = Fault { iova, len_bytes: len_bytes.into() };
        let result = match data {
            Ok(data) if is_read => {
                lane.data.insert(ticket, data);
                Ok(())
            }
            Ok(_) => Ok(()),
            Err(_) => Err(fault),
        };
        lane.ended.push_back(Ended { ticket, result });
    }
}

impl Reach {
    fn new(shared: Arc<Shared>, regions: Regions) -> Self {
        let mut state = shared.lock();
        state.tokens += 1;
        let lane = state.tokens;
        state.lanes.insert(lane, Lane::default());
        let table = Arc::clone(&state.table);
        drop(state);
        let seen = shared.generation.load(Ordering::Acquire).wrapping_sub(1);
        Self { shared, regions, table, seen, last: 0, lane, waiting: 0 }
    }

    /// Takes the newest table.
    #[inline]
    fn refresh(&mut self) {
        let generation = self.shared.generation.load(Ordering::Acquire);
        if generation != self.seen {
            self.take_table(generation);
        }
    }

    #[cold]
    fn take_table(&mut self, generation: u32) {
        self.table = Arc::clone(&self.shared.lock().table);
        (self.seen, self.last) = (generation, 0);
    }

    /// The stretch around `iova`, and how much of it follows.
    #[inline]
    fn find(&mut self, iova: u64) -> Option<(Map, u64)> {
        self.refresh();
        let around = |map: &Map| {
            let skip = iova.wrapping_sub(map.iova);
            (skip < map.len_bytes).then(|| (*map, map.len_bytes - skip))
        };
        if let Some(found) = self.table.get(self.last).and_then(around) {
            return Some(found);
        }
        let after = self.table.partition_point(|map| map.iova <= iova);
        let at = after.checked_sub(1)?;
        let found = around(&self.table[at])?;
        self.last = at;
        Some(found)
    }

    /// The whole of an access in one stretch, if it is shared.
    #[inline]
    fn segment(&mut self, iova: u64, len_bytes: u32) -> Result<Option<Segment>, Fault> {
        let fault = Fault { iova, len_bytes: len_bytes.into() };
        let (map, room) = self.find(iova).ok_or(fault)?;
        if u64::from(len_bytes) > room {
            // The rest may lie in the next stretch.
            return Ok(None);
        }
        let offset = map.offset + (iova - map.iova);
        Ok(map.region.map(|region| Segment { region, offset, len_bytes }))
    }

    /// The pieces of an access that crosses stretches, all of them shared. `None` if it lies in one
    /// that is not.
    fn pieces(&mut self, iova: u64, len_bytes: u32) -> Result<Option<Vec<Segment>>, Fault> {
        let fault = Fault { iova, len_bytes: len_bytes.into() };
        let mut pieces = Vec::new();
        let (mut at, mut left) = (iova, len_bytes);
        while left > 0 {
            let (map, room) = self.find(at).ok_or(fault)?;
            let Some(region) = map.region else {
                return if pieces.is_empty() && u64::from(left) <= room {
                    Ok(None)
                } else {
                    Err(fault)
                };
            };
            let len_bytes = u32::try_from(room).unwrap_or(u32::MAX).min(left);
            let offset = map.offset + (at - map.iova);
            pieces.push(Segment { region, offset, len_bytes });
            left -= len_bytes;
            at = at.checked_add(len_bytes.into()).filter(|_| left > 0).unwrap_or(at);
        }
        Ok(Some(pieces))
    }

    /// Has the client be asked.
    fn ask(&mut self, ticket: Ticket, iova: u64, len_bytes: u32, what: Access) -> Progress {
        let mut state = self.shared.lock();
        state.tokens = state.tokens.wrapping_add(1);
        let token = state.tokens;
        let (lane, is_read) = (self.lane, matches!(what, Access::Read(_)));
        state.begun.insert(token, Begun { lane, ticket, iova, len_bytes, is_read });
        state.questions.push_back(Question { token, iova, what });
        // Under the lock; pairs with the acquire in `has_questions`.
        self.shared.has_questions.store(true, Ordering::Release);
        self.waiting += 1;
        Progress::Later
    }
}

impl Clone for Reach {
    fn clone(&self) -> Self {
        Self::new(Arc::clone(&self.shared), self.regions.clone())
    }
}

impl Drop for Reach {
    fn drop(&mut self) {
        self.shared.lock().lanes.remove(&self.lane);
    }
}

impl HostMemory for Reach {
    type Entries = SharedEntries;

    fn entries(&mut self, iova: u64, len_bytes: u64) -> Result<Option<SharedEntries>, Fault> {
        let fault = Fault { iova, len_bytes };
        let len = u32::try_from(len_bytes).map_err(|_| fault)?;
        let Some(segment) = self.segment(iova, len)? else {
            return self.pieces(iova, len).map(|_| None);
        };
        let entries = SharedEntries::new(&self.regions, segment, iova)?;
        let mut state = self.shared.lock();
        if !state.rings.contains(&segment.region) {
            state.rings.push(segment.region);
        }
        Ok(Some(entries))
    }

    #[inline]
    fn reach(&mut self, iova: u64, len_bytes: u32) -> Result<Option<Segment>, Fault> {
        match self.segment(iova, len_bytes)? {
            Some(segment) => Ok(Some(segment)),
            None => self.pieces(iova, len_bytes).map(|_| None),
        }
    }

    #[inline]
    fn window(&mut self, len_bytes: u32) -> Option<Window> {
        self.refresh();
        let map = *self.table.get(self.last)?;
        let region = map.region?;
        let len = u32::try_from(map.len_bytes.min(1 << WINDOW_SHIFT)).unwrap_or(0);
        Window::of(Segment { region, offset: map.offset, len_bytes: len }, map.iova, len_bytes)
    }

    fn read(&mut self, ticket: Ticket, iova: u64, into: &mut [u8]) -> Result<Progress, Fault> {
        let fault = Fault { iova, len_bytes: into.len() as u64 };
        let len = u32::try_from(into.len()).map_err(|_| fault)?;
        let Some(pieces) = self.pieces(iova, len)? else {
            let (map, _) = self.find(iova).filter(|(map, _)| map.is_readable).ok_or(fault)?;
            debug_assert!(map.region.is_none(), "shared memory is read where it lies");
            return Ok(self.ask(ticket, iova, len, Access::Read(len)));
        };
        let mut rest = into;
        for piece in pieces {
            let (first, others) = rest.split_at_mut(piece.len_bytes as usize);
            self.regions.load(piece, first).map_err(|_| fault)?;
            rest = others;
        }
        Ok(Progress::Done)
    }

    fn write(&mut self, ticket: Ticket, iova: u64, from: &[u8]) -> Result<Progress, Fault> {
        let fault = Fault { iova, len_bytes: from.len() as u64 };
        let len = u32::try_from(from.len()).map_err(|_| fault)?;
        let Some(pieces) = self.pieces(iova, len)? else {
            self.find(iova).filter(|(map, _)| map.is_writable).ok_or(fault)?;
            return Ok(self.ask(ticket, iova, len, Access::Write(from.to_vec())));
        };
        let mut rest = from;
        for piece in pieces {
            let (first, others) = rest.split_at(piece.len_bytes as usize);
            self.regions.store(piece, first).map_err(|_| fault)?;
            rest = others;
        }
        Ok(Progress::Done)
    }

    fn is_cut_off(&mut self) -> bool {
        self.shared.lock().cut != Cut::None
    }

    fn let_go(&mut self) {
        let mut state = self.shared.lock();
        if state.cut == Cut::Asked {
            state.cut = Cut::LetGo;
        }
    }

    fn poll(&mut self) -> Option<Ended> {
        if self.waiting == 0 {
            return None;
        }
        let ended = self.shared.lock().lanes.get_mut(&self.lane)?.ended.pop_front()?;
        self.waiting -= 1;
        Some(ended)
    }

    fn collect(&mut self, ticket: Ticket, into: &mut [u8]) {
        let mut state = self.shared.lock();
        let data = state.lanes.get_mut(&self.lane).and_then(|lane| lane.data.remove(&ticket));
        if let Some(data) = data.filter(|data| data.len() == into.len()) {
            into.copy_from_slice(&data);
        }
    }
}
