//! A stream over a ring.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};

use base::{Broken, Memory as _, Received, Segment, Stream, Stretch, WakeSource};
use dma::Regions;
use rustix::io::Errno;

use super::buffers::{HEADROOM, Lent};
use super::slot::{Over, Slot};
use super::{Core, Ring};
use crate::socket::waiter::{ERRORS, Waiter};
use crate::socket::zero_copy::Threshold;
use crate::stream::{local_address_of, name_of_peer};
use crate::watch::Interest;

/// One connection.
pub(in crate::socket) struct RingStream {
    ring: Ring,
    key: u32,
    regions: Regions,
    /// What waits to be consumed.
    held: Option<Lent>,
    /// What waits while no buffer is held: a piece of a header, usually.
    stash: Vec<u8>,
    /// After which enter it was looked at last.
    looked_at: u64,
    threshold: Threshold,
    /// Why nothing comes any more has been told.
    is_over: bool,
    is_abandoned: bool,
    waiter: Waiter,
    peer: String,
}

/// So few bytes do not keep a buffer.
const STASH_MAX: usize = 512;

impl RingStream {
    pub(in crate::socket) fn new(
        ring: Ring,
        socket: OwnedFd,
        regions: Regions,
        threshold: Threshold,
    ) -> io::Result<Self> {
        let waiter = Waiter::new()?;
        let peer = name_of_peer(socket.as_fd());
        let mut core = ring.core();
        let looked_at = core.generation;
        let key = core.insert(Slot::new(socket, regions.clone()));
        drop(core);
        Ok(Self {
            ring,
            key,
            regions,
            held: None,
            stash: Vec::new(),
            looked_at,
            threshold,
            is_over: false,
            is_abandoned: false,
            waiter,
            peer,
        })
    }

    /// The next buffer of what has come, if there is one, with what waits in front of it.
    fn next_buffer(&mut self) -> Received {
        let Self { ring, key, held, stash, looked_at, .. } = self;
        let mut core = ring.core();
        core.attach(*key);
        core.start_receiving(*key);
        if core.unsubmitted > 0 || core.slot(*key).arrived.is_empty() {
            turn(&mut core, looked_at);
        }
        *looked_at = core.generation;
        let failed = core.problem();
        let slot = core.slot(*key);
        let Some(mut lent) = slot.arrived.pop_front() else {
            let over = slot.over.or(failed.map(Over::Broken));
            drop(core);
            return self.nothing(over);
        };
        let count = lent.len();
        let memory = &ring.memory;
        match held.take() {
            Some(before) => {
                memory.put_before(&mut lent, memory.bytes(&before));
                core.buffers.give_back(&before);
            }
            None => {
                memory.put_before(&mut lent, stash);
                stash.clear();
            }
        }
        *held = Some(lent);
        // The next one, with the next enter.
        core.start_receiving(*key);
        core.counts.receives.add(1);
        Received::Bytes(count)
    }

    fn nothing(&mut self, over: Option<Over>) -> Received {
        self.settle();
        self.is_over = over.is_some();
        match over {
            None => Received::Nothing,
            Some(Over::End) => Received::End,
            Some(Over::Broken(errno)) => Received::Broken(self.broken("receive from", errno)),
        }
    }

    /// Gives the buffer back if little waits in it.
    fn settle(&mut self) {
        let Some(lent) = self.held.take_if(|lent| lent.len() <= STASH_MAX) else { return };
        self.stash.extend_from_slice(self.ring.memory.bytes(&lent));
        self.ring.core().buffers.give_back(&lent);
    }

    #[cold]
    fn broken(&self, doing: &str, errno: Errno) -> Broken {
        let peer = &self.peer;
        match errno {
            Errno::EXIST => Broken(format!("{doing} {peer}: its ring is another thread's")),
            errno => Broken(format!("{doing} {peer}: {errno}")),
        }
    }
}

/// Enters if the stream that is looked at has been looked at since the last time, or if the kernel
/// has not done all of its work then: it does so much at a time.
fn turn(core: &mut Core, looked_at: &mut u64) {
    if *looked_at == core.generation || core.uring.submission().taskrun() {
        core.enter();
    } else {
        core.reap();
    }
    *looked_at = core.generation;
}

/// Whether the pieces of region memory are so long, taken together.
fn has_pieces_of(len_bytes: usize, stretches: &[Stretch]) -> bool {
    let (mut pieces, mut bytes) = (0_usize, 0);
    for stretch in stretches {
        if let Stretch::Memory(segment) = stretch {
            pieces += 1;
            bytes += segment.len_bytes as usize;
        }
    }
    pieces > 0 && bytes >= len_bytes.saturating_mul(pieces)
}

impl Stream for RingStream {
    fn receive(&mut self) -> Received {
        if self.bytes().len() > HEADROOM {
            // What comes next could not be put behind it.
            return Received::Nothing;
        }
        self.next_buffer()
    }

    #[inline]
    fn bytes(&self) -> &[u8] {
        match &self.held {
            Some(lent) => self.ring.memory.bytes(lent),
            None => &self.stash,
        }
    }

    #[inline]
    fn consume(&mut self, count: usize) {
        let waiting = self.bytes().len();
        assert!(count <= waiting, "{count} consumed of {waiting} bytes");
        let Some(lent) = &mut self.held else {
            self.stash.drain(..count);
            return;
        };
        lent.consume(count);
        if let Some(empty) = self.held.take_if(|lent| lent.len() == 0) {
            self.ring.core().buffers.give_back(&empty);
        }
    }

    fn receive_into(&mut self, into: &[Segment]) -> Received {
        assert!(self.bytes().is_empty(), "bytes that came before have not been consumed");
        let room: usize = into.iter().map(|segment| segment.len_bytes as usize).sum();
        if room == 0 {
            return Received::Nothing;
        }
        match self.next_buffer() {
            Received::Bytes(_) => {}
            other => return other,
        }
        let mut moved = 0;
        for segment in into {
            let bytes = &self.bytes()[moved..];
            let count = bytes.len().min(segment.len_bytes as usize);
            let part = u32::try_from(count).ok().and_then(|count| segment.slice(0, count));
            let stored = part.map(|part| self.regions.store(part, &bytes[..count]));
            if !matches!(stored, Some(Ok(()))) {
                let peer = &self.peer;
                let broken = format!("receive from {peer}: {segment:?} lies in no region");
                return Received::Broken(Broken(broken));
            }
            moved += count;
        }
        self.consume(moved);
        Received::Bytes(moved)
    }

    fn send(
        &mut self,
        headers: &[u8],
        stretches: &[Stretch],
        has_more: bool,
    ) -> Result<usize, Broken> {
        let mut core = self.ring.core();
        core.attach(self.key);
        if core.slot(self.key).sending().next().is_some() {
            turn(&mut core, &mut self.looked_at);
        }
        let failed = core.problem();
        let slot = core.slot(self.key);
        let broken = slot.broken.or(slot.is_shut.then_some(Errno::PIPE)).or(failed);
        if let Some(errno) = broken {
            drop(core);
            return Err(self.broken("send to", errno));
        }
        let by_reference = has_pieces_of(self.threshold.get(), stretches);
        let filled = slot.fill(headers, stretches, has_more, by_reference).map_err(|nowhere| {
            Broken(format!("send to {}: {:?} lies in no region", self.peer, nowhere.0))
        })?;
        let Some((number, count)) = filled else { return Ok(0) };
        core.push_send(self.key, number);
        core.counts.sends.add(1);
        Ok(count)
    }

    fn released(&mut self) -> u64 {
        let mut core = self.ring.core();
        if self.is_abandoned {
            // Nothing else asks the kernel any more.
            core.enter();
        }
        core.slot(self.key).released()
    }

    fn shut_down(&mut self) {
        let mut core = self.ring.core();
        core.enter();
        core.slot(self.key).shut_down();
    }

    fn abandon(&mut self) {
        self.is_abandoned = true;
        let mut core = self.ring.core();
        core.attach(self.key);
        core.cancel(self.key);
        core.enter();
        core.slot(self.key).abort();
        core.enter();
        let _ = self.waiter.wait_for(core.slot(self.key).socket(), None);
    }

    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::Descriptor(self.waiter.as_fd())
    }

    fn arm(&mut self, wants_bytes: bool, wants_room: bool) -> bool {
        if self.is_abandoned {
            return false;
        }
        self.settle();
        let has_room = self.bytes().len() <= HEADROOM;
        let mut core = self.ring.core();
        core.attach(self.key);
        core.start_receiving(self.key);
        if core.unsubmitted > 0 {
            core.enter();
        }
        let has_free = core.buffers.free() > 0;
        let has_failed = core.problem().is_some();
        let slot = core.slot(self.key);
        let is_sending = slot.released() < slot.taken;
        let has_more = !slot.arrived.is_empty() || (slot.over.is_some() && !self.is_over);
        let has_bytes = wants_bytes && has_room && has_more;
        slot.wants_bytes = wants_bytes;
        slot.wants_room = wants_room || is_sending;
        let wanted = Interest {
            readable: wants_bytes && has_room && has_free && slot.over.is_none(),
            // A notice that memory is released has no signal of its own: the socket's room stands
            // for it, which is there more often.
            writable: wants_room || is_sending,
        };
        let wanted = (wanted != ERRORS).then_some(wanted);
        let waits = self.waiter.wait_for(slot.socket(), wanted);
        has_bytes || core.has_woken || has_failed || waits.is_err()
    }

    fn disarm(&mut self) {
        let mut core = self.ring.core();
        core.has_woken = false;
        let slot = core.slot(self.key);
        (slot.wants_bytes, slot.wants_room) = (false, false);
    }

    fn is_tied(&self) -> bool {
        true
    }

    fn peer(&self) -> String {
        self.peer.clone()
    }

    fn local_address(&self) -> Option<SocketAddr> {
        local_address_of(self.ring.core().slot(self.key).socket())
    }
}

impl Drop for RingStream {
    fn drop(&mut self) {
        let mut core = self.ring.core();
        // Out of what is slept on before the descriptor may become somebody else's.
        let _ = self.waiter.wait_for(core.slot(self.key).socket(), None);
        core.leave(self.key, self.held.take());
    }
}
