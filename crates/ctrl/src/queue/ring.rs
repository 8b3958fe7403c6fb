//! The two ends of a queue pair that a controller holds: it takes from one ring and adds to the
//! other.
//!
//! A ring in memory that is shared is read and written in place. A ring in memory that is not is
//! fetched some entries at a time, and an entry arrives when the host says so.

use base::{
    CompletionEntry, Ended, Fault, HostEntries, HostMemory, Progress, Ticket, entry_to_dwords,
};
use wire::Command;

use super::shadow::Shadow;
use crate::doorbell::DoorbellPage;

/// The controller's end of a submission queue.
#[derive(Debug)]
pub(crate) struct SubmissionQueue<E> {
    pub(crate) id: u16,
    size: u32,
    /// Index of the next entry to take: what completions report as SQHD.
    head: u32,
    /// The last valid tail that the host has rung.
    tail: u32,
    ring: Ring<E>,
    doorbell: Source<E>,
    /// Deleted by the host: nothing more is taken.
    pub(crate) is_closing: bool,
    /// Commands that were taken and not answered.
    pub(crate) in_flight: u32,
    /// The first half of a fused pair, with its slot, whose second half must come next.
    pub(crate) first: Option<(u16, Command)>,
}

/// The controller's end of a completion queue.
#[derive(Debug)]
pub(crate) struct CompletionQueue<E> {
    pub(crate) id: u16,
    size: u32,
    /// Index of the next entry to fill.
    tail: u32,
    phase: bool,
    /// The last valid head that the host has rung, as far as it was needed.
    head: u32,
    ring: Ring<E>,
    doorbell: Source<E>,
}

/// Where entries are.
#[derive(Debug)]
enum Ring<E> {
    Shared(E),
    Remote { iova: u64, fetched: Box<Fetched> },
}

/// Entries of a remote submission queue that have been fetched and not yet taken.
#[derive(Debug)]
struct Fetched {
    bytes: [u8; FETCH_ENTRIES * COMMAND_BYTES],
    at: usize,
    count: usize,
    is_open: bool,
}

/// Where the host writes a doorbell.
#[derive(Debug)]
struct Source<E> {
    shadow: Option<Shadow<E>>,
    /// An invalid value that has been reported.
    reported: Option<u32>,
}

/// What was rung cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct InvalidValue;

const COMMAND_BYTES: usize = 64;
/// Where the phase is in the second half of an entry.
const PHASE_SHIFT: u32 = 48;
/// Entries of a remote ring that are fetched at once.
const FETCH_ENTRIES: usize = 8;
/// How many entries ahead of the one being taken are asked for.
const AHEAD: u32 = 8;

impl<E: HostEntries> SubmissionQueue<E> {
    pub(crate) fn open<H: HostMemory<Entries = E>>(
        host: &mut H,
        id: u16,
        size: u32,
        iova: u64,
    ) -> Result<Self, Fault> {
        let ring = Ring::open(host, iova, u64::from(size) * COMMAND_BYTES as u64)?;
        let doorbell = Source { shadow: None, reported: None };
        Ok(Self {
            id,
            size,
            head: 0,
            tail: 0,
            ring,
            doorbell,
            is_closing: false,
            in_flight: 0,
            first: None,
        })
    }

    pub(crate) fn set_shadow(&mut self, shadow: Shadow<E>) {
        self.doorbell.shadow = Some(shadow);
    }

    /// What completions report: commands before this one have been taken.
    #[inline]
    pub(crate) fn head(&self) -> u32 {
        self.head
    }

    /// Looks at the doorbell: how many entries wait, and whether what was rung is invalid.
    #[inline]
    pub(crate) fn look(&mut self, doorbells: &DoorbellPage) -> (u32, Option<InvalidValue>) {
        let rung = match &self.doorbell.shadow {
            None => doorbells.tail(usize::from(self.id)),
            Some(shadow) => shadow.load().unwrap_or(self.tail),
        };
        if rung == self.tail && self.head == self.tail {
            return (0, None);
        }
        let invalid = if rung < self.size {
            self.tail = rung;
            None
        } else {
            self.doorbell.report(rung)
        };
        (distance(self.head, self.tail, self.size), invalid)
    }

    /// Whether a [look](Self::look) would find nothing.
    #[inline]
    pub(crate) fn is_caught_up(&self, doorbells: &DoorbellPage) -> bool {
        let rung = match &self.doorbell.shadow {
            None => doorbells.tail(usize::from(self.id)),
            Some(_) => return false,
        };
        rung == self.tail && self.head == self.tail
    }

    /// Whether entries can be taken in place.
    #[inline]
    pub(crate) fn is_shared(&self) -> bool {
        matches!(self.ring, Ring::Shared(_))
    }

    /// Takes the next entry of a shared ring.
    #[inline]
    pub(crate) fn take(&mut self) -> Result<[u64; 8], Fault> {
        let Ring::Shared(entries) = &self.ring else {
            return Err(Fault { iova: 0, len_bytes: 0 });
        };
        let words = entries.load_command(self.head)?;
        let ahead = self.head + AHEAD;
        entries.prefetch_command(if ahead < self.size { ahead } else { 0 });
        self.head = next(self.head, self.size);
        Ok(words)
    }

    /// Takes entries of a shared ring as long as `begin` accepts what a plain command is made of, at
    /// most `count`. How many were accepted, and the one that was not.
    #[inline(always)]
    pub(crate) fn take_run(
        &mut self,
        count: u32,
        mut begin: impl FnMut([u64; 4]) -> bool,
    ) -> (u32, Result<Option<[u64; 8]>, Fault>) {
        let Ring::Shared(entries) = &self.ring else { return (0, Ok(None)) };
        let (mut head, mut accepted, mut end) = (self.head, 0, Ok(None));
        while accepted < count && matches!(end, Ok(None)) {
            let part = (count - accepted).min(self.size - head);
            let (taken, refused) = match entries.load_each(head, part, &mut begin) {
                Ok((taken, refused)) => (taken, Ok(refused)),
                Err(fault) => (0, Err(fault)),
            };
            head += taken + u32::from(matches!(refused, Ok(Some(_))));
            head = if head == self.size { 0 } else { head };
            accepted += taken;
            end = refused;
        }
        self.head = head;
        self.in_flight += accepted;
        (accepted, end)
    }

    /// Takes the next entry of a remote ring, if it is here; else asks for some of those that wait.
    pub(crate) fn take_remote<H: HostMemory>(
        &mut self,
        host: &mut H,
        ticket: Ticket,
    ) -> Result<Option<[u64; 8]>, Fault> {
        let waiting = distance(self.head, self.tail, self.size);
        let Ring::Remote { iova, fetched } = &mut self.ring else { return Ok(None) };
        if fetched.at == fetched.count {
            if fetched.is_open {
                return Ok(None);
            }
            let count = (waiting.min(self.size - self.head) as usize).min(FETCH_ENTRIES);
            (fetched.at, fetched.count) = (0, 0);
            let bytes = &mut fetched.bytes[..count * COMMAND_BYTES];
            let from = *iova + u64::from(self.head) * COMMAND_BYTES as u64;
            match host.read(ticket, from, bytes)? {
                Progress::Done => fetched.count = count,
                Progress::Later => {
                    fetched.is_open = true;
                    // Remembered until it ends, as a count that is not there yet.
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
        self.head = next(self.head, self.size);
        Ok(Some(words))
    }

    /// Whether the host owes entries.
    pub(crate) fn is_fetching(&self) -> bool {
        matches!(&self.ring, Ring::Remote { fetched, .. } if fetched.is_open)
    }

    /// A fetch has ended.
    pub(crate) fn fetched<H: HostMemory>(&mut self, host: &mut H, ended: Ended) {
        if let Ring::Remote { fetched, .. } = &mut self.ring
            && fetched.is_open
        {
            fetched.is_open = false;
            if ended.result.is_ok() {
                let len_bytes = fetched.count * COMMAND_BYTES;
                host.collect(ended.ticket, &mut fetched.bytes[..len_bytes]);
                fetched.at = 0;
            }
        }
    }

    /// Tells the host up to where its doorbell has been seen, before the queue rests. True if the
    /// host has rung since: then it may not have rung the register, and the queue must not rest.
    pub(crate) fn rest(&mut self) -> bool {
        self.doorbell.rest(self.tail)
    }
}

impl<E: HostEntries> CompletionQueue<E> {
    pub(crate) fn open<H: HostMemory<Entries = E>>(
        host: &mut H,
        id: u16,
        size: u32,
        iova: u64,
    ) -> Result<Self, Fault> {
        let ring = Ring::open(host, iova, u64::from(size) * 16)?;
        let doorbell = Source { shadow: None, reported: None };
        Ok(Self { id, size, tail: 0, phase: true, head: 0, ring, doorbell })
    }

    pub(crate) fn set_shadow(&mut self, shadow: Shadow<E>) {
        self.doorbell.shadow = Some(shadow);
    }

    /// How many entries may be filled, as far as is known without a look.
    #[inline]
    pub(crate) fn room(&self) -> u32 {
        self.size - 1 - distance(self.head, self.tail, self.size)
    }

    /// Looks at the doorbell. A head that was never filled is refused.
    pub(crate) fn look(&mut self, doorbells: &DoorbellPage) -> Option<InvalidValue> {
        let rung = match &self.doorbell.shadow {
            None => doorbells.head(usize::from(self.id)),
            Some(shadow) => shadow.load().unwrap_or(self.head),
        };
        if rung < self.size
            && distance(self.head, rung, self.size) <= distance(self.head, self.tail, self.size)
        {
            self.head = rung;
            return None;
        }
        self.doorbell.report(rung)
    }

    /// Fills the next entry: the caller knows that there is room. With [`Progress::Later`] it
    /// arrives when `ticket` ends.
    #[inline]
    pub(crate) fn store<H: HostMemory>(
        &mut self,
        host: &mut H,
        ticket: Ticket,
        mut entry: CompletionEntry,
    ) -> Result<Progress, Fault> {
        entry[1] |= u64::from(self.phase) << PHASE_SHIFT;
        let progress = match &mut self.ring {
            Ring::Shared(entries) => {
                entries.store_completion(self.tail, entry)?;
                Progress::Done
            }
            Ring::Remote { iova, .. } => {
                let to = *iova + u64::from(self.tail) * 16;
                host.write(ticket, to, &wire::Completion(entry_to_dwords(entry)).to_bytes())?
            }
        };
        self.tail = next(self.tail, self.size);
        self.phase ^= self.tail == 0;
        Ok(progress)
    }

    /// Fills entries of a shared ring with what `make` makes of each of `items`, until it makes
    /// nothing of one. The caller knows that there is room. Returns of how many something was made.
    #[inline(always)]
    pub(crate) fn post<T>(
        &mut self,
        items: &[T],
        mut make: impl FnMut(&T) -> Option<CompletionEntry>,
    ) -> (usize, Result<(), Fault>) {
        let Ring::Shared(entries) = &mut self.ring else { return (0, Ok(())) };
        let (mut done, mut end) = (0, Ok(()));
        while done < items.len() && end.is_ok() {
            let part = &items[done..];
            let part = &part[..part.len().min((self.size - self.tail) as usize)];
            let phase = u64::from(self.phase) << PHASE_SHIFT;
            let (made, stored) = entries.store_each(self.tail, part, |item| {
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

    /// Whether entries can be filled in place.
    #[inline]
    pub(crate) fn is_shared(&self) -> bool {
        matches!(self.ring, Ring::Shared(_))
    }

    /// Says that the next `count` entries will be filled.
    #[inline]
    pub(crate) fn prefetch(&self, count: u32) {
        if let Ring::Shared(entries) = &self.ring {
            // Four entries to a line.
            let mut index = self.tail;
            for _ in 0..count.div_ceil(4).min(4) {
                entries.prefetch_completion(index);
                index = if index + 4 < self.size { index + 4 } else { 0 };
            }
        }
    }

    /// As [`SubmissionQueue::rest`].
    pub(crate) fn rest(&mut self) -> bool {
        self.doorbell.rest(self.head)
    }
}

impl<E: HostEntries> Ring<E> {
    fn open<H: HostMemory<Entries = E>>(
        host: &mut H,
        iova: u64,
        len_bytes: u64,
    ) -> Result<Self, Fault> {
        if iova.checked_add(len_bytes).is_none() {
            return Err(Fault { iova, len_bytes });
        }
        Ok(match host.entries(iova, len_bytes)? {
            Some(entries) => Self::Shared(entries),
            None => {
                let bytes = [0; FETCH_ENTRIES * COMMAND_BYTES];
                let fetched = Fetched { bytes, at: 0, count: 0, is_open: false };
                Self::Remote { iova, fetched: Box::new(fetched) }
            }
        })
    }
}

impl<E: HostEntries> Source<E> {
    /// Tells the host what has been seen. True if it has rung something else since, and not what
    /// was refused already.
    fn rest(&mut self, seen: u32) -> bool {
        let rung = self.shadow.as_mut().and_then(|shadow| shadow.rest(seen));
        rung.is_some() && rung != self.reported
    }
}

impl<E> Source<E> {
    /// An invalid value is reported once, not at every look.
    #[cold]
    fn report(&mut self, rung: u32) -> Option<InvalidValue> {
        (self.reported.replace(rung) != Some(rung)).then_some(InvalidValue)
    }
}

/// Steps from `from` to `to` around a ring.
#[inline]
fn distance(from: u32, to: u32, size: u32) -> u32 {
    if to >= from { to - from } else { to + size - from }
}

#[inline]
fn next(index: u32, size: u32) -> u32 {
    let next = index + 1;
    if next == size { 0 } else { next }
}

#[cfg(test)]
mod tests {
    use super::{distance, next};

    #[test]
    fn distances_go_forward_around_the_ring() {
        for size in 2..6 {
            for from in 0..size {
                let mut at = from;
                for steps in 0..size {
                    assert_eq!(distance(from, at, size), steps);
                    at = next(at, size);
                }
                assert_eq!(at, from);
            }
        }
    }
}
