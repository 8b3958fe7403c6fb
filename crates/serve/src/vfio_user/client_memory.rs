//! Client memory as the controller sees it, by I/O virtual address.
//!
//! ```text
//!   DMA_MAP, DMA_UNMAP ──▶ DmaMappings ── a new table, and the next generation
//!                                               │
//!   queue, admin: ClientMemory ── generation changed? ── own reference to the table
//!        │ shared by descriptor: a segment of a region
//!        └ not shared: a DmaRequest to the client, which the endpoint sends
//! ```
//!
//! An address is looked up without a lock. Access to memory that is not shared takes a lock and a
//! message exchange.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::{
    AccessCompletion, AccessFault, AccessId, AccessProgress, DirectAccessWindow, HostMemory,
    Memory, RegionId, RingMemory, Segment,
};
use tenmil_dma::{ForeignRegion, RegionTable, SharedRingEntries};
use tenmil_vfio_user::Errno;
use tenmil_vfio_user::server::DmaMap;

/// DMA mappings of the client, on the endpoint's side.
#[derive(Debug)]
pub(super) struct DmaMappings {
    shared: Arc<SharedMappings>,
    regions: RegionTable,
    /// Mapped memory by I/O virtual address.
    adopted: BTreeMap<u64, ForeignRegion>,
}

/// Access of one user to client memory. Every clone is a user of its own.
#[derive(Debug)]
pub(super) struct ClientMemory {
    shared: Arc<SharedMappings>,
    regions: RegionTable,
    table: Arc<MappingTable>,
    generation_seen: u32,
    /// Index of the table entry that was found last.
    last: usize,
    queue: u32,
    /// Message-based accesses that have not completed.
    waiting: u32,
}

/// Access to memory that is not shared.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ClientDmaRequest {
    pub(super) token: u32,
    pub(super) iova: u64,
    pub(super) what: AccessDirection,
}

/// Direction of an access.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum AccessDirection {
    /// Read of this many bytes.
    Read(u32),
    /// Write of these bytes.
    Write(Vec<u8>),
}

#[derive(Debug)]
struct SharedMappings {
    generation: AtomicU32,
    /// Whether requests are queued. The endpoint takes the lock only if so.
    has_requests: AtomicBool,
    state: Mutex<SharedMappingState>,
}

#[derive(Debug, Default)]
struct SharedMappingState {
    table: Arc<MappingTable>,
    requests: VecDeque<ClientDmaRequest>,
    /// Accesses started, by token.
    accesses: BTreeMap<u32, PendingDmaMessage>,
    /// Completed accesses, by user.
    queues: BTreeMap<u32, UserAccessQueue>,
    tokens: u32,
    /// Regions that contain rings.
    rings: Vec<RegionId>,
    /// Revocation of memory that contains rings.
    revocation: RevokeState,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum RevokeState {
    #[default]
    None,
    Requested,
    Acknowledged,
}

#[derive(Debug)]
struct PendingDmaMessage {
    queue: u32,
    ticket: AccessId,
    iova: u64,
    len_bytes: u32,
    is_read: bool,
}

#[derive(Debug, Default)]
struct UserAccessQueue {
    ended: VecDeque<AccessCompletion>,
    data: BTreeMap<AccessId, Vec<u8>>,
}

type MappingTable = Vec<DmaRegion>;

/// Mapped range of client memory.
#[derive(Clone, Copy, Debug)]
struct DmaRegion {
    iova: u64,
    len_bytes: u64,
    /// Region and offset of its memory, if it is shared for reading and writing.
    region: Option<RegionId>,
    offset: u64,
    is_readable: bool,
    is_writable: bool,
}

/// Why memory was not mapped.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct DmaMapError {
    pub(super) errno: Errno,
    pub(super) text: String,
}

/// Largest number of mappings of a client; a virtual machine has some tens.
const MAPS_MAX: usize = 1024;

/// Largest amount of mapped memory of a client: 4 TiB.
const BYTES_MAX: u64 = 4 << 40;

/// log2 of the largest window: the range that a segment can address.
const WINDOW_SHIFT: u32 = 31;

impl DmaMappings {
    pub(super) fn new(regions: RegionTable) -> Self {
        let (generation, has_requests) = (AtomicU32::new(0), AtomicBool::new(false));
        let shared = SharedMappings { generation, has_requests, state: Mutex::default() };
        Self { shared: Arc::new(shared), regions, adopted: BTreeMap::new() }
    }

    /// Creates a view of the memory for a controller.
    pub(super) fn client_memory(&self) -> ClientMemory {
        ClientMemory::new(Arc::clone(&self.shared), self.regions.clone())
    }

    /// Checks whether this much more can be mapped from files. The total is bounded because address
    /// space that was used for a region is not reused.
    pub(super) fn check_mappable(&self, len_bytes: u64) -> Result<(), DmaMapError> {
        let mapped: u64 = self.adopted.values().map(ForeignRegion::len_bytes).sum();
        if mapped.saturating_add(len_bytes) <= BYTES_MAX {
            return Ok(());
        }
        let text = format!(
            "{mapped} bytes are mapped and {len_bytes} more are requested, expected at most {BYTES_MAX}"
        );
        Err(DmaMapError { errno: Errno::NO_SPACE, text })
    }

    /// Adds a mapping, with its region if it is shared.
    pub(super) fn add_mapping(
        &mut self,
        map: DmaMap,
        memory: Option<ForeignRegion>,
    ) -> Result<(), DmaMapError> {
        let DmaMap { iova, len_bytes, is_readable, is_writable, .. } = map;
        let refuse = |errno, text| Err(DmaMapError { errno, text });
        let mut state = self.shared.lock();
        if state.table.len() >= MAPS_MAX {
            let text = format!("{MAPS_MAX} ranges are mapped, the limit");
            return refuse(Errno::NO_SPACE, text);
        }
        let end = iova + len_bytes;
        let at = state.table.partition_point(|map| map.iova < iova);
        let before = at.checked_sub(1).map(|before| state.table[before]);
        let after = state.table.get(at);
        if before.is_some_and(|map| map.iova + map.len_bytes > iova)
            || after.is_some_and(|map| map.iova < end)
        {
            let text = format!("{iova:#x} to {end:#x} overlaps a mapped range");
            return refuse(Errno::EXISTS, text);
        }
        let is_open = is_readable && is_writable;
        let memory_of = memory.as_ref().filter(|_| is_open);
        let (region, offset) =
            (memory_of.map(ForeignRegion::id), memory_of.map_or(0, ForeignRegion::offset));
        let mut table = MappingTable::clone(&state.table);
        table.insert(at, DmaRegion { iova, len_bytes, region, offset, is_readable, is_writable });
        state.table = Arc::new(table);
        drop(state);
        self.shared.increment_generation();
        self.adopted.extend(memory.map(|memory| (iova, memory)));
        Ok(())
    }

    /// Starts removing a mapping: its addresses are invalid from now on, but accesses that were
    /// started earlier continue until [`release_mapping`](Self::release_mapping). Returns false if there is no such
    /// mapping.
    pub(super) fn invalidate_mapping(&mut self, iova: u64, len_bytes: u64) -> bool {
        let mut state = self.shared.lock();
        let matches = |map: &DmaRegion| map.iova == iova && map.len_bytes == len_bytes;
        let Some(at) = state.table.iter().position(matches) else { return false };
        let mut table = MappingTable::clone(&state.table);
        let removed = table.remove(at);
        state.table = Arc::new(table);
        if removed.region.is_some_and(|region| state.rings.contains(&region)) {
            state.revocation = RevokeState::Requested;
        }
        drop(state);
        self.shared.increment_generation();
        true
    }

    /// Whether the mapping being removed contains rings that the controller still uses.
    pub(super) fn is_awaiting_ring_revocation(&self) -> bool {
        self.shared.lock().revocation == RevokeState::Requested
    }

    /// Releases the memory of a removed mapping, which nothing accesses any more.
    pub(super) fn release_mapping(&mut self, iova: u64) {
        let removed = self.adopted.remove(&iova);
        let mut state = self.shared.lock();
        state.revocation = RevokeState::None;
        if let Some(removed) = removed {
            state.rings.retain(|region| *region != removed.id());
        }
    }

    /// Removes all mappings and fails all message-based accesses, because the client has
    /// disconnected. Accesses that were started earlier continue until
    /// [`release_all`](Self::release_all).
    pub(super) fn unmap_all(&mut self) {
        let mut state = self.shared.lock();
        state.table = Arc::default();
        state.requests.clear();
        let accesses: Vec<u32> = state.accesses.keys().copied().collect();
        for token in accesses {
            state.complete_access(token, Err(Errno::IO));
        }
        drop(state);
        self.shared.increment_generation();
    }

    /// Records that the controller uses no ring any more.
    pub(super) fn record_rings_released(&mut self) {
        self.shared.lock().rings.clear();
    }

    /// Releases all memory.
    pub(super) fn release_all(&mut self) {
        self.adopted.clear();
        let mut state = self.shared.lock();
        (state.revocation, state.rings) = (RevokeState::None, Vec::new());
    }

    /// Address of memory whose file the client has truncated, if any.
    pub(super) fn truncated_address(&self) -> Option<u64> {
        self.adopted.iter().find(|(_, memory)| memory.has_failed()).map(|(iova, _)| *iova)
    }

    /// Whether message-based accesses may be queued.
    #[inline]
    pub(super) fn has_dma_requests(&self) -> bool {
        // Acquire; pairs with the release store in `ask`.
        self.shared.has_requests.load(Ordering::Acquire)
    }

    /// Next message-based access to send.
    pub(super) fn next_dma_request(&self) -> Option<ClientDmaRequest> {
        let mut state = self.shared.lock();
        let request = state.requests.pop_front();
        // Stored under the lock, so that no request is missed.
        self.shared.has_requests.store(!state.requests.is_empty(), Ordering::Relaxed);
        request
    }

    /// Completes an access.
    pub(super) fn complete_dma_request(&self, token: u32, data: Result<Vec<u8>, Errno>) {
        self.shared.lock().complete_access(token, data);
    }
}

impl SharedMappings {
    fn lock(&self) -> MutexGuard<'_, SharedMappingState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn increment_generation(&self) {
        // Release; pairs with the acquire load in `refresh`.
        self.generation.fetch_add(1, Ordering::Release);
    }
}

impl SharedMappingState {
    fn complete_access(&mut self, token: u32, data: Result<Vec<u8>, Errno>) {
        let Some(accesses) = self.accesses.remove(&token) else { return };
        let PendingDmaMessage { queue, ticket, iova, len_bytes, is_read } = accesses;
        let Some(queue) = self.queues.get_mut(&queue) else { return };
        let fault = AccessFault { iova, len_bytes: len_bytes.into() };
        let result = match data {
            Ok(data) if is_read => {
                queue.data.insert(ticket, data);
                Ok(())
            }
            Ok(_) => Ok(()),
            Err(_) => Err(fault),
        };
        queue.ended.push_back(AccessCompletion { id: ticket, result });
    }
}

impl ClientMemory {
    fn new(shared: Arc<SharedMappings>, regions: RegionTable) -> Self {
        let mut state = shared.lock();
        state.tokens += 1;
        let queue = state.tokens;
        state.queues.insert(queue, UserAccessQueue::default());
        let table = Arc::clone(&state.table);
        drop(state);
        let generation_seen = shared.generation.load(Ordering::Acquire).wrapping_sub(1);
        Self { shared, regions, table, generation_seen, last: 0, queue, waiting: 0 }
    }

    /// Updates the table if the generation has changed.
    #[inline]
    fn refresh_table(&mut self) {
        let generation = self.shared.generation.load(Ordering::Acquire);
        if generation != self.generation_seen {
            self.copy_shared_table(generation);
        }
    }

    #[cold]
    fn copy_shared_table(&mut self, generation: u32) {
        self.table = Arc::clone(&self.shared.lock().table);
        (self.generation_seen, self.last) = (generation, 0);
    }

    /// Mapping that contains `iova`, and the length of its remainder.
    #[inline]
    fn find_mapping(&mut self, iova: u64) -> Option<(DmaRegion, u64)> {
        self.refresh_table();
        let around = |map: &DmaRegion| {
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

    /// Segment of an access, if it lies within one shared mapping.
    #[inline]
    fn shared_segment(
        &mut self,
        iova: u64,
        len_bytes: u32,
    ) -> Result<Option<Segment>, AccessFault> {
        let fault = AccessFault { iova, len_bytes: len_bytes.into() };
        let (map, room) = self.find_mapping(iova).ok_or(fault)?;
        if u64::from(len_bytes) > room {
            // The rest may lie in the next mapping.
            return Ok(None);
        }
        let offset = map.offset + (iova - map.iova);
        Ok(map.region.map(|region| Segment { region, offset, len_bytes }))
    }

    /// Segments of an access that crosses mappings, all of them shared. `None` if it lies in a
    /// single mapping that is not shared.
    fn shared_segments(
        &mut self,
        iova: u64,
        len_bytes: u32,
    ) -> Result<Option<Vec<Segment>>, AccessFault> {
        let fault = AccessFault { iova, len_bytes: len_bytes.into() };
        let mut pieces = Vec::new();
        let (mut at, mut left) = (iova, len_bytes);
        while left > 0 {
            let (map, room) = self.find_mapping(at).ok_or(fault)?;
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

    /// Queues a message-based access.
    fn queue_dma_message(
        &mut self,
        ticket: AccessId,
        iova: u64,
        len_bytes: u32,
        what: AccessDirection,
    ) -> AccessProgress {
        let mut state = self.shared.lock();
        state.tokens = state.tokens.wrapping_add(1);
        let token = state.tokens;
        let (queue, is_read) = (self.queue, matches!(what, AccessDirection::Read(_)));
        state.accesses.insert(token, PendingDmaMessage { queue, ticket, iova, len_bytes, is_read });
        state.requests.push_back(ClientDmaRequest { token, iova, what });
        // Stored under the lock; release, pairs with the acquire load in `has_requests`.
        self.shared.has_requests.store(true, Ordering::Release);
        self.waiting += 1;
        AccessProgress::Pending
    }
}

impl Clone for ClientMemory {
    fn clone(&self) -> Self {
        Self::new(Arc::clone(&self.shared), self.regions.clone())
    }
}

impl Drop for ClientMemory {
    fn drop(&mut self) {
        self.shared.lock().queues.remove(&self.queue);
    }
}

impl RingMemory for ClientMemory {
    type Entries = SharedRingEntries;

    fn resolve_ring(
        &mut self,
        iova: u64,
        len_bytes: u64,
    ) -> Result<Option<SharedRingEntries>, AccessFault> {
        let fault = AccessFault { iova, len_bytes };
        let len = u32::try_from(len_bytes).map_err(|_| fault)?;
        let Some(segment) = self.shared_segment(iova, len)? else {
            return self.shared_segments(iova, len).map(|_| None);
        };
        let entries = SharedRingEntries::new(&self.regions, segment, iova)?;
        let mut state = self.shared.lock();
        if !state.rings.contains(&segment.region) {
            state.rings.push(segment.region);
        }
        Ok(Some(entries))
    }
}

impl HostMemory for ClientMemory {
    #[inline]
    fn resolve(&mut self, iova: u64, len_bytes: u32) -> Result<Option<Segment>, AccessFault> {
        match self.shared_segment(iova, len_bytes)? {
            Some(segment) => Ok(Some(segment)),
            None => self.shared_segments(iova, len_bytes).map(|_| None),
        }
    }

    #[inline]
    fn direct_access_window(&mut self, len_bytes: u32) -> Option<DirectAccessWindow> {
        self.refresh_table();
        let map = *self.table.get(self.last)?;
        let region = map.region?;
        let len = u32::try_from(map.len_bytes.min(1 << WINDOW_SHIFT)).unwrap_or(0);
        DirectAccessWindow::for_pieces(
            Segment { region, offset: map.offset, len_bytes: len },
            map.iova,
            len_bytes,
        )
    }

    fn read(
        &mut self,
        ticket: AccessId,
        iova: u64,
        into: &mut [u8],
    ) -> Result<AccessProgress, AccessFault> {
        let fault = AccessFault { iova, len_bytes: into.len() as u64 };
        let len = u32::try_from(into.len()).map_err(|_| fault)?;
        let Some(pieces) = self.shared_segments(iova, len)? else {
            let (map, _) =
                self.find_mapping(iova).filter(|(map, _)| map.is_readable).ok_or(fault)?;
            debug_assert!(map.region.is_none(), "shared memory is read where it lies");
            return Ok(self.queue_dma_message(ticket, iova, len, AccessDirection::Read(len)));
        };
        let mut rest = into;
        for piece in pieces {
            let (first, others) = rest.split_at_mut(piece.len_bytes as usize);
            self.regions.load(piece, first).map_err(|_| fault)?;
            rest = others;
        }
        Ok(AccessProgress::Done)
    }

    fn write(
        &mut self,
        ticket: AccessId,
        iova: u64,
        from: &[u8],
    ) -> Result<AccessProgress, AccessFault> {
        let fault = AccessFault { iova, len_bytes: from.len() as u64 };
        let len = u32::try_from(from.len()).map_err(|_| fault)?;
        let Some(pieces) = self.shared_segments(iova, len)? else {
            self.find_mapping(iova).filter(|(map, _)| map.is_writable).ok_or(fault)?;
            return Ok(self.queue_dma_message(
                ticket,
                iova,
                len,
                AccessDirection::Write(from.to_vec()),
            ));
        };
        let mut rest = from;
        for piece in pieces {
            let (first, others) = rest.split_at(piece.len_bytes as usize);
            self.regions.store(piece, first).map_err(|_| fault)?;
            rest = others;
        }
        Ok(AccessProgress::Done)
    }

    fn is_revoked(&mut self) -> bool {
        self.shared.lock().revocation != RevokeState::None
    }

    fn ack_revocation(&mut self) {
        let mut state = self.shared.lock();
        if state.revocation == RevokeState::Requested {
            state.revocation = RevokeState::Acknowledged;
        }
    }

    fn poll(&mut self) -> Option<AccessCompletion> {
        if self.waiting == 0 {
            return None;
        }
        let ended = self.shared.lock().queues.get_mut(&self.queue)?.ended.pop_front()?;
        self.waiting -= 1;
        Some(ended)
    }

    fn copy_out_read_data(&mut self, ticket: AccessId, into: &mut [u8]) {
        let mut state = self.shared.lock();
        let data = state.queues.get_mut(&self.queue).and_then(|queue| queue.data.remove(&ticket));
        if let Some(data) = data.filter(|data| data.len() == into.len()) {
            into.copy_from_slice(&data);
        }
    }
}
