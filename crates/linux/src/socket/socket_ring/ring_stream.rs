//! Stream on an `io_uring` socket ring.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::Errno;
use tenmil_base::{Memory as _, RecvResult, Segment, SendSlice, Stream, StreamError, WakeSource};
use tenmil_dma::RegionTable;

use super::provided_buffers::{FilledBuffer, HEADROOM};
use super::socket_slot::{SocketSlot, StreamEnd};
use super::{RingState, SocketRing};
use crate::poll_set::Interest;
use crate::socket::socket_waiter::{ERRORS, SocketReadinessDescriptor};
use crate::socket::zero_copy::ZeroCopyThreshold;
use crate::socket_stream::{local_address_of, name_of_peer};

/// One connection.
pub(in crate::socket) struct RingStream {
    ring: SocketRing,
    key: u32,
    regions: RegionTable,
    /// Buffer with unconsumed bytes.
    held: Option<FilledBuffer>,
    /// Unconsumed bytes while no buffer is held: usually part of a header.
    stash: Vec<u8>,
    /// Number of enters at the last poll.
    polled_generation: u64,
    threshold: ZeroCopyThreshold,
    /// The end of the stream has been reported.
    is_over: bool,
    is_abandoned: bool,
    waiter: SocketReadinessDescriptor,
    peer: String,
}

/// Unconsumed bytes up to this length are copied to the stash, and the buffer is released.
const STASH_MAX: usize = 512;

impl RingStream {
    pub(in crate::socket) fn new(
        ring: SocketRing,
        socket: OwnedFd,
        regions: RegionTable,
        threshold: ZeroCopyThreshold,
    ) -> io::Result<Self> {
        let waiter = SocketReadinessDescriptor::new()?;
        let peer = name_of_peer(socket.as_fd());
        let mut core = ring.lock_state();
        let looked_at = core.generation;
        let key = core.insert_slot(SocketSlot::new(socket, regions.clone()));
        drop(core);
        Ok(Self {
            ring,
            key,
            regions,
            held: None,
            stash: Vec::new(),
            polled_generation: looked_at,
            threshold,
            is_over: false,
            is_abandoned: false,
            waiter,
            peer,
        })
    }

    /// Takes the next received buffer, with the unconsumed bytes in front of it.
    fn next_buffer(&mut self) -> RecvResult {
        let Self { ring, key, held, stash, polled_generation: looked_at, .. } = self;
        let mut core = ring.lock_state();
        core.attach_stream(*key);
        core.start_receiving(*key);
        // Enter only if entries must be submitted or nothing has arrived yet.
        if core.unsubmitted > 0 || core.slot_mut(*key).arrived.is_empty() {
            enter_or_reap(&mut core, looked_at);
        }
        *looked_at = core.generation;
        let failed = core.take_error();
        let slot = core.slot_mut(*key);
        let Some(mut leased) = slot.arrived.pop_front() else {
            let over = slot.end.or(failed.map(StreamEnd::Broken));
            drop(core);
            return self.no_data(over);
        };
        let count = leased.len();
        let memory = &ring.memory;
        // Unconsumed bytes move in front of the new buffer, so that they stay contiguous.
        match held.take() {
            Some(before) => {
                memory.prepend_bytes(&mut leased, memory.filled_bytes(&before));
                core.buffers.release_buffer(&before);
            }
            None => {
                memory.prepend_bytes(&mut leased, stash);
                stash.clear();
            }
        }
        *held = Some(leased);
        // The next receive is submitted with the next enter.
        core.start_receiving(*key);
        core.counts.receives.add(1);
        RecvResult::Bytes(count)
    }

    fn no_data(&mut self, over: Option<StreamEnd>) -> RecvResult {
        self.stash_small();
        self.is_over = over.is_some();
        match over {
            None => RecvResult::WouldBlock,
            Some(StreamEnd::End) => RecvResult::Eof,
            Some(StreamEnd::Broken(errno)) => {
                RecvResult::Failed(self.call_error("receive from", errno))
            }
        }
    }

    /// Returns the buffer if few bytes are unconsumed.
    fn stash_small(&mut self) {
        let Some(leased) = self.held.take_if(|leased| leased.len() <= STASH_MAX) else { return };
        self.stash.extend_from_slice(self.ring.memory.filled_bytes(&leased));
        self.ring.lock_state().buffers.release_buffer(&leased);
    }

    #[cold]
    fn call_error(&self, doing: &str, errno: Errno) -> StreamError {
        let peer = &self.peer;
        match errno {
            Errno::EXIST => StreamError(format!("{doing} {peer}: its ring is another thread's")),
            errno => StreamError(format!("{doing} {peer}: {errno}")),
        }
    }
}

/// Enters the ring if this stream was polled already since the last enter, or if the kernel had not
/// finished its work then: it processes a limited number of items at a time.
fn enter_or_reap(core: &mut RingState, looked_at: &mut u64) {
    if *looked_at == core.generation || core.uring.submission().taskrun() {
        core.enter_kernel();
    } else {
        core.reap_completions();
    }
    *looked_at = core.generation;
}

/// Whether the average length of the region segments reaches `len_bytes`.
fn is_average_segment_at_least(len_bytes: usize, stretches: &[SendSlice]) -> bool {
    let (mut pieces, mut bytes) = (0_usize, 0);
    for stretch in stretches {
        if let SendSlice::Memory(segment) = stretch {
            pieces += 1;
            bytes += segment.len_bytes as usize;
        }
    }
    pieces > 0 && bytes >= len_bytes.saturating_mul(pieces)
}

impl Stream for RingStream {
    fn receive(&mut self) -> RecvResult {
        if self.buffered().len() > HEADROOM {
            // The headroom could not take these bytes in front of the next buffer.
            return RecvResult::WouldBlock;
        }
        self.next_buffer()
    }

    #[inline]
    fn buffered(&self) -> &[u8] {
        match &self.held {
            Some(leased) => self.ring.memory.filled_bytes(leased),
            None => &self.stash,
        }
    }

    #[inline]
    fn consume(&mut self, count: usize) {
        let waiting = self.buffered().len();
        assert!(count <= waiting, "{count} consumed of {waiting} bytes");
        let Some(leased) = &mut self.held else {
            self.stash.drain(..count);
            return;
        };
        leased.consume(count);
        if let Some(empty) = self.held.take_if(|leased| leased.len() == 0) {
            self.ring.lock_state().buffers.release_buffer(&empty);
        }
    }

    fn receive_into(&mut self, into: &[Segment]) -> RecvResult {
        assert!(self.buffered().is_empty(), "bytes that came before have not been consumed");
        let room: usize = into.iter().map(|segment| segment.len_bytes as usize).sum();
        if room == 0 {
            return RecvResult::WouldBlock;
        }
        match self.next_buffer() {
            RecvResult::Bytes(_) => {}
            other => return other,
        }
        let mut moved = 0;
        for segment in into {
            let bytes = &self.buffered()[moved..];
            let count = bytes.len().min(segment.len_bytes as usize);
            let part = u32::try_from(count).ok().and_then(|count| segment.slice(0, count));
            let stored = part.map(|part| self.regions.store(part, &bytes[..count]));
            if !matches!(stored, Some(Ok(()))) {
                let peer = &self.peer;
                let broken = format!("receive from {peer}: {segment:?} lies in no region");
                return RecvResult::Failed(StreamError(broken));
            }
            moved += count;
        }
        self.consume(moved);
        RecvResult::Bytes(moved)
    }

    fn send(
        &mut self,
        headers: &[u8],
        stretches: &[SendSlice],
        has_more: bool,
    ) -> Result<usize, StreamError> {
        let mut core = self.ring.lock_state();
        core.attach_stream(self.key);
        // One send at a time keeps the byte order.
        if core.slot_mut(self.key).sends_in_flight().next().is_some() {
            enter_or_reap(&mut core, &mut self.polled_generation);
        }
        let failed = core.take_error();
        let slot = core.slot_mut(self.key);
        let broken = slot.broken.or(slot.is_shut.then_some(Errno::PIPE)).or(failed);
        if let Some(errno) = broken {
            drop(core);
            return Err(self.call_error("send to", errno));
        }
        let by_reference = is_average_segment_at_least(self.threshold.get(), stretches);
        let filled =
            slot.fill_send(headers, stretches, has_more, by_reference).map_err(|nowhere| {
                StreamError(format!("send to {}: {:?} lies in no region", self.peer, nowhere.0))
            })?;
        let Some((number, count)) = filled else { return Ok(0) };
        core.push_send(self.key, number);
        core.counts.sends.add(1);
        Ok(count)
    }

    fn released_bytes(&mut self) -> u64 {
        let mut core = self.ring.lock_state();
        if self.is_abandoned {
            // No later poll enters the ring on behalf of this stream.
            core.enter_kernel();
        }
        core.slot_mut(self.key).released_position()
    }

    fn shutdown_write(&mut self) {
        let mut core = self.ring.lock_state();
        core.enter_kernel();
        core.slot_mut(self.key).shutdown_write();
    }

    fn abort(&mut self) {
        self.is_abandoned = true;
        let mut core = self.ring.lock_state();
        core.attach_stream(self.key);
        // Cancel before the reset; the second enter handles the completions of both.
        core.cancel_operations(self.key);
        core.enter_kernel();
        core.slot_mut(self.key).abort();
        core.enter_kernel();
        let _ = self.waiter.set_awaited_events(core.slot_mut(self.key).socket_fd(), None);
    }

    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::Descriptor(self.waiter.as_fd())
    }

    fn arm(&mut self, wants_bytes: bool, wants_space: bool) -> bool {
        if self.is_abandoned {
            return false;
        }
        self.stash_small();
        let has_space = self.buffered().len() <= HEADROOM;
        let mut core = self.ring.lock_state();
        core.attach_stream(self.key);
        core.start_receiving(self.key);
        if core.unsubmitted > 0 {
            core.enter_kernel();
        }
        let has_free = core.buffers.kernel_owned_count() > 0;
        let has_failed = core.take_error().is_some();
        let slot = core.slot_mut(self.key);
        // Accepted but not released: a send or a zero-copy notification is outstanding.
        let is_sending = slot.released_position() < slot.taken;
        let has_more = !slot.arrived.is_empty() || (slot.end.is_some() && !self.is_over);
        let has_bytes = wants_bytes && has_space && has_more;
        slot.wants_bytes = wants_bytes;
        slot.wants_space = wants_space || is_sending;
        let wanted = Interest {
            readable: wants_bytes && has_space && has_free && slot.end.is_none(),
            // A zero-copy notification has no event of its own here: writability, which is true
            // more often, stands for it.
            writable: wants_space || is_sending,
        };
        let wanted = (wanted != ERRORS).then_some(wanted);
        let waits = self.waiter.set_awaited_events(slot.socket_fd(), wanted);
        has_bytes || core.has_wakeup || has_failed || waits.is_err()
    }

    fn disarm(&mut self) {
        let mut core = self.ring.lock_state();
        core.has_wakeup = false;
        let slot = core.slot_mut(self.key);
        (slot.wants_bytes, slot.wants_space) = (false, false);
    }

    fn is_thread_bound(&self) -> bool {
        true
    }

    fn peer_description(&self) -> String {
        self.peer.clone()
    }

    fn local_address(&self) -> Option<SocketAddr> {
        local_address_of(self.ring.lock_state().slot_mut(self.key).socket_fd())
    }
}

impl Drop for RingStream {
    fn drop(&mut self) {
        let mut core = self.ring.lock_state();
        // Removed from the poll set before the descriptor number may be reused.
        let _ = self.waiter.set_awaited_events(core.slot_mut(self.key).socket_fd(), None);
        core.detach_stream(self.key, self.held.take());
    }
}
