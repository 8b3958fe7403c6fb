//! Controller side of a queue pair: consumes a submission ring and produces into a completion ring.
//!
//! A ring in shared memory is accessed in place. Entries of a ring in other memory are read in groups
//! through host accesses, and are available when the access completes.

use tenmil_base::{
    AccessCompletion, AccessFault, AccessId, AccessProgress, CompletionEntry, RingEntries,
    RingMemory, entry_to_dwords,
};

use super::shadow_doorbell::ShadowDoorbell;
use crate::doorbell::DoorbellPage;

/// Controller side of a submission queue.
#[derive(Debug)]
pub(crate) struct SubmissionQueue<E> {
    pub(crate) id: u16,
    size: u32,
    /// Index of the next entry to fetch, reported in completions as SQHD.
    head: u32,
    /// Last valid tail written by the host.
    tail: u32,
    ring: RingAccess<E>,
    doorbell: DoorbellSource<E>,
    /// Deleted by the host: nothing more is fetched.
    pub(crate) is_closing: bool,
    /// Commands fetched and not completed.
    pub(crate) in_flight: u32,
}

/// Controller side of a completion queue.
#[derive(Debug)]
pub(crate) struct CompletionQueue<E> {
    pub(crate) id: u16,
    size: u32,
    /// Index of the next entry to fill.
    tail: u32,
    phase: bool,
    /// Last valid head written by the host, updated only when needed.
    head: u32,
    ring: RingAccess<E>,
    doorbell: DoorbellSource<E>,
}

/// Memory of a ring.
#[derive(Debug)]
enum RingAccess<E> {
    Shared(E),
    Fetched { iova: u64, fetched: Box<FetchedEntries> },
}

/// Entries of a remote submission queue that were read and not yet consumed.
#[derive(Debug)]
struct FetchedEntries {
    bytes: [u8; FETCH_ENTRIES * COMMAND_BYTES],
    at: usize,
    count: usize,
    is_pending: bool,
}

/// Source of a doorbell value: register or shadow doorbell.
#[derive(Debug)]
struct DoorbellSource<E> {
    shadow: Option<ShadowDoorbell<E>>,
    /// Invalid value that has been reported.
    reported: Option<u32>,
}

/// The doorbell has an invalid value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InvalidDoorbellValue;

const COMMAND_BYTES: usize = 64;
/// Position of the phase tag in the second qword of an entry.
const PHASE_SHIFT: u32 = 48;
/// Entries of a remote ring read at once.
const FETCH_ENTRIES: usize = 8;
/// Prefetch distance in entries.
const PREFETCH_DISTANCE: u32 = 8;

impl<E: RingEntries> SubmissionQueue<E> {
    pub(crate) fn open<H: RingMemory<Entries = E>>(
        host: &mut H,
        id: u16,
        size: u32,
        iova: u64,
    ) -> Result<Self, AccessFault> {
        let ring = RingAccess::open(host, iova, u64::from(size) * COMMAND_BYTES as u64)?;
        let doorbell = DoorbellSource { shadow: None, reported: None };
        Ok(Self { id, size, head: 0, tail: 0, ring, doorbell, is_closing: false, in_flight: 0 })
    }

    pub(crate) fn set_shadow(&mut self, shadow: ShadowDoorbell<E>) {
        self.doorbell.shadow = Some(shadow);
    }

    /// SQHD for completions: all commands before this entry have been fetched.
    #[inline]
    pub(crate) fn head(&self) -> u32 {
        self.head
    }

    /// Reads the tail doorbell. Returns the number of pending entries, and whether the value is invalid.
    #[inline]
    pub(crate) fn read_doorbell(
        &mut self,
        doorbells: &DoorbellPage,
    ) -> (u32, Option<InvalidDoorbellValue>) {
        let value = match &self.doorbell.shadow {
            None => doorbells.tail(usize::from(self.id)),
            Some(shadow) => shadow.load().unwrap_or(self.tail),
        };
        if value == self.tail && self.head == self.tail {
            return (0, None);
        }
        let invalid = if value < self.size {
            self.tail = value;
            None
        } else {
            self.doorbell.report_invalid_once(value)
        };
        (ring_distance(self.head, self.tail, self.size), invalid)
    }

    /// Whether [`read_doorbell`](Self::read_doorbell) would find nothing. Always false with a shadow
    /// doorbell.
    #[inline]
    pub(crate) fn is_caught_up(&self, doorbells: &DoorbellPage) -> bool {
        let value = match &self.doorbell.shadow {
            None => doorbells.tail(usize::from(self.id)),
            Some(_) => return false,
        };
        value == self.tail && self.head == self.tail
    }

    /// Whether entries are accessed in place.
    #[inline]
    pub(crate) fn is_accessed_in_place(&self) -> bool {
        matches!(self.ring, RingAccess::Shared(_))
    }

    /// Takes the next entry of a shared ring.
    #[inline]
    pub(crate) fn take_shared_entry(&mut self) -> Result<[u64; 8], AccessFault> {
        let RingAccess::Shared(entries) = &self.ring else {
            return Err(AccessFault { iova: 0, len_bytes: 0 });
        };
        let words = entries.load_command(self.head)?;
        let ahead = self.head + PREFETCH_DISTANCE;
        entries.prefetch_command(if ahead < self.size { ahead } else { 0 });
        self.head = next_index(self.head, self.size);
        Ok(words)
    }

    /// Takes at most `count` entries of a shared ring, as long as `begin` accepts the words of a simple
    /// command. Returns the number accepted, and the entry that was not.
    #[inline(always)]
    pub(crate) fn take_shared_run(
        &mut self,
        count: u32,
        mut begin: impl FnMut([u64; 4]) -> bool,
    ) -> (u32, Result<Option<[u64; 8]>, AccessFault>) {
        let RingAccess::Shared(entries) = &self.ring else { return (0, Ok(None)) };
        let (mut head, mut accepted, mut end) = (self.head, 0, Ok(None));
        while accepted < count && matches!(end, Ok(None)) {
            let part = (count - accepted).min(self.size - head);
            let (taken, refused) = match entries.load_commands(head, part, &mut begin) {
                Ok((taken, refused)) => (taken, Ok(refused)),
                Err(fault) => (0, Err(fault)),
            };
            head += taken + u32::from(matches!(refused, Ok(Some(_))));
            head = if head == self.size { 0 } else { head };
            accepted += taken;
            end = refused;
        }
        self.head = head;
        (accepted, end)
    }

    /// Takes the next entry of a remote ring if it is available; otherwise starts to read pending
    /// entries.
    pub(crate) fn take_remote_entry<H: RingMemory>(
        &mut self,
        host: &mut H,
        ticket: AccessId,
    ) -> Result<Option<[u64; 8]>, AccessFault> {
        let waiting = ring_distance(self.head, self.tail, self.size);
        let RingAccess::Fetched { iova, fetched } = &mut self.ring else { return Ok(None) };
        if fetched.at == fetched.count {
            if fetched.is_pending {
                return Ok(None);
            }
            let count = (waiting.min(self.size - self.head) as usize).min(FETCH_ENTRIES);
            (fetched.at, fetched.count) = (0, 0);
            let bytes = &mut fetched.bytes[..count * COMMAND_BYTES];
            let from = *iova + u64::from(self.head) * COMMAND_BYTES as u64;
            match host.read(ticket, from, bytes)? {
                AccessProgress::Done => fetched.count = count,
                AccessProgress::Pending => {
                    fetched.is_pending = true;
                    // Kept as the length of the access until it completes; `at` equals `count`, so no
                    // entry is available.
                    (fetched.at, fetched.count) = (count, count);
                    return Ok(None);
                }
            }
        }
        let bytes = &fetched.bytes[fetched.at * COMMAND_BYTES..][..COMMAND_BYTES];
        let mut words = [0; 8];
        for (word, chunk) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*chunk);
        }
        fetched.at += 1;
        self.head = next_index(self.head, self.size);
        Ok(Some(words))
    }

    /// Whether a read of entries is in flight.
    pub(crate) fn is_fetching(&self) -> bool {
        matches!(&self.ring, RingAccess::Fetched { fetched, .. } if fetched.is_pending)
    }

    /// Handles the completion of a read of entries.
    pub(crate) fn handle_entries_read<H: RingMemory>(
        &mut self,
        host: &mut H,
        ended: AccessCompletion,
    ) {
        if let RingAccess::Fetched { fetched, .. } = &mut self.ring
            && fetched.is_pending
        {
            fetched.is_pending = false;
            if ended.result.is_ok() {
                let len_bytes = fetched.count * COMMAND_BYTES;
                host.copy_out_read_data(ended.id, &mut fetched.bytes[..len_bytes]);
                fetched.at = 0;
            }
        }
    }

    /// Publishes the event index, up to which the tail doorbell was seen, before the queue goes idle.
    /// Returns true if the host has written since: it may have skipped the register, so the queue must
    /// not go idle.
    pub(crate) fn publish_event_index(&mut self) -> bool {
        self.doorbell.publish_event_index(self.tail)
    }
}

impl<E: RingEntries> CompletionQueue<E> {
    pub(crate) fn open<H: RingMemory<Entries = E>>(
        host: &mut H,
        id: u16,
        size: u32,
        iova: u64,
    ) -> Result<Self, AccessFault> {
        let ring = RingAccess::open(host, iova, u64::from(size) * 16)?;
        let doorbell = DoorbellSource { shadow: None, reported: None };
        Ok(Self { id, size, tail: 0, phase: true, head: 0, ring, doorbell })
    }

    pub(crate) fn set_shadow(&mut self, shadow: ShadowDoorbell<E>) {
        self.doorbell.shadow = Some(shadow);
    }

    /// Number of free entries, as of the last read of the head doorbell.
    #[inline]
    pub(crate) fn free_count(&self) -> u32 {
        self.size - 1 - ring_distance(self.head, self.tail, self.size)
    }

    /// Reads the head doorbell. A head beyond the filled entries is invalid.
    pub(crate) fn read_doorbell(
        &mut self,
        doorbells: &DoorbellPage,
    ) -> Option<InvalidDoorbellValue> {
        let value = match &self.doorbell.shadow {
            None => doorbells.head(usize::from(self.id)),
            Some(shadow) => shadow.load().unwrap_or(self.head),
        };
        if value < self.size
            && ring_distance(self.head, value, self.size)
                <= ring_distance(self.head, self.tail, self.size)
        {
            self.head = value;
            return None;
        }
        self.doorbell.report_invalid_once(value)
    }

    /// Fills the next entry; the caller has checked that one is free. With [`AccessProgress::Pending`]
    /// the entry is stored when the access `ticket` completes.
    #[inline]
    pub(crate) fn store_completion<H: RingMemory>(
        &mut self,
        host: &mut H,
        ticket: AccessId,
        mut entry: CompletionEntry,
    ) -> Result<AccessProgress, AccessFault> {
        entry[1] |= u64::from(self.phase) << PHASE_SHIFT;
        let progress = match &mut self.ring {
            RingAccess::Shared(entries) => {
                entries.store_completion(self.tail, entry)?;
                AccessProgress::Done
            }
            RingAccess::Fetched { iova, .. } => {
                let to = *iova + u64::from(self.tail) * 16;
                host.write(ticket, to, &tenmil_wire::Completion(entry_to_dwords(entry)).to_bytes())?
            }
        };
        self.tail = next_index(self.tail, self.size);
        self.phase ^= self.tail == 0;
        Ok(progress)
    }

    /// Fills entries of a shared ring with the results of `make` for `items`, until it returns `None`.
    /// The caller has checked that enough are free. Returns the number filled.
    #[inline(always)]
    pub(crate) fn post_completions<T>(
        &mut self,
        items: &[T],
        mut make: impl FnMut(&T) -> Option<CompletionEntry>,
    ) -> (usize, Result<(), AccessFault>) {
        let RingAccess::Shared(entries) = &mut self.ring else { return (0, Ok(())) };
        let (mut done, mut end) = (0, Ok(()));
        while done < items.len() && end.is_ok() {
            let part = &items[done..];
            let part = &part[..part.len().min((self.size - self.tail) as usize)];
            let phase = u64::from(self.phase) << PHASE_SHIFT;
            let (made, stored) = entries.store_built_completions(self.tail, part, |item| {
                make(item).map(|[first, second]| [first, second | phase])
            });
            self.tail += u32::try_from(made).unwrap_or(u32::MAX);
            if self.tail == self.size {
                self.tail = 0;
                self.phase = !self.phase;
            }
            (done, end) = (done + made, stored);
            if made < part.len() {
                break;
            }
        }
        (done, end)
    }

    /// Whether entries are accessed in place.
    #[inline]
    pub(crate) fn is_accessed_in_place(&self) -> bool {
        matches!(self.ring, RingAccess::Shared(_))
    }

    /// Prefetches the next `count` entries for writing.
    #[inline]
    pub(crate) fn prefetch(&self, count: u32) {
        if let RingAccess::Shared(entries) = &self.ring {
            // Four entries per cache line.
            let mut index = self.tail;
            for _ in 0..count.div_ceil(4).min(4) {
                entries.prefetch_completion(index);
                index = if index + 4 < self.size { index + 4 } else { 0 };
            }
        }
    }

    /// Publishes the event index of the head doorbell; see [`SubmissionQueue::publish_event_index`].
    pub(crate) fn publish_event_index(&mut self) -> bool {
        self.doorbell.publish_event_index(self.head)
    }
}

impl<E: RingEntries> RingAccess<E> {
    fn open<H: RingMemory<Entries = E>>(
        host: &mut H,
        iova: u64,
        len_bytes: u64,
    ) -> Result<Self, AccessFault> {
        if iova.checked_add(len_bytes).is_none() {
            return Err(AccessFault { iova, len_bytes });
        }
        Ok(match host.resolve_ring(iova, len_bytes)? {
            Some(entries) => Self::Shared(entries),
            None => {
                let bytes = [0; FETCH_ENTRIES * COMMAND_BYTES];
                let fetched = FetchedEntries { bytes, at: 0, count: 0, is_pending: false };
                Self::Fetched { iova, fetched: Box::new(fetched) }
            }
        })
    }
}

impl<E: RingEntries> DoorbellSource<E> {
    /// Publishes the event index. Returns true if the doorbell has changed since, unless to a value
    /// already reported as invalid.
    fn publish_event_index(&mut self, seen: u32) -> bool {
        let value = self.shadow.as_mut().and_then(|shadow| shadow.publish_event_index(seen));
        value.is_some() && value != self.reported
    }
}

impl<E> DoorbellSource<E> {
    /// Reports an invalid value once, not at every poll.
    #[cold]
    fn report_invalid_once(&mut self, value: u32) -> Option<InvalidDoorbellValue> {
        (self.reported.replace(value) != Some(value)).then_some(InvalidDoorbellValue)
    }
}

/// Number of entries from `from` to `to` around the ring.
#[inline]
fn ring_distance(from: u32, to: u32, size: u32) -> u32 {
    if to >= from { to - from } else { to + size - from }
}

#[inline]
fn next_index(index: u32, size: u32) -> u32 {
    let next = index + 1;
    if next == size { 0 } else { next }
}

#[cfg(test)]
mod tests {
    use super::{next_index, ring_distance};

    #[test]
    fn ring_distance_wraps_around() {
        for size in 2..6 {
            for from in 0..size {
                let mut at = from;
                for steps in 0..size {
                    assert_eq!(ring_distance(from, at, size), steps);
                    at = next_index(at, size);
                }
                assert_eq!(at, from);
            }
        }
    }
}
