//! One end of a simulated connection.

use std::fmt;
use std::sync::Arc;

use tenmil_base::{Memory, RecvResult, Segment, SendSlice, Stream, StreamError, WakeSource};

use super::link_direction::ReadResult;
use super::{LinkTransferDirection, SimNetwork, SimNetworkState};

/// One end of a simulated connection. Dropping it closes the connection: data in flight still
/// arrive, unless they include memory that was not read yet, which breaks the connection.
pub struct SimStream {
    network: SimNetwork,
    sends: LinkTransferDirection,
    memory: Arc<dyn Memory>,
    inbox: Vec<u8>,
    start: usize,
    inbox_bytes: usize,
    copied_below: u32,
    /// Number of bytes accepted by sends.
    taken: u64,
    is_shut: bool,
}

impl SimStream {
    pub(super) fn new(
        network: SimNetwork,
        sends: LinkTransferDirection,
        memory: Arc<dyn Memory>,
        inbox_bytes: usize,
        copied_below: u32,
    ) -> Self {
        let (inbox, is_shut) = (Vec::with_capacity(inbox_bytes), false);
        Self {
            network,
            sends,
            memory,
            inbox,
            start: 0,
            inbox_bytes,
            copied_below,
            taken: 0,
            is_shut,
        }
    }

    /// Receives data that have arrived, up to the length of `into`.
    fn receive_arrived(&self, into: &mut [u8]) -> RecvResult {
        let mut cables = self.network.lock_state();
        let SimNetworkState { now, lines, cut, .. } = &mut *cables;
        if let Some(by) = cut {
            return RecvResult::Failed(StreamError((*by).to_owned()));
        }
        match lines[self.sends.reverse() as usize].read_arrived(*now, into) {
            ReadResult::Bytes(count) => RecvResult::Bytes(count),
            ReadResult::Nothing => RecvResult::WouldBlock,
            ReadResult::End => RecvResult::Eof,
            ReadResult::Cut => {
                let by = "the connection was reset";
                cables.cut_link(by);
                RecvResult::Failed(StreamError(by.to_owned()))
            }
        }
    }

    fn send_slice(
        &self,
        cables: &mut SimNetworkState,
        headers: &[u8],
        stretch: SendSlice,
    ) -> Result<bool, StreamError> {
        let now = cables.now;
        let line = &mut cables.lines[self.sends as usize];
        let unreleased = &mut cables.unreleased[self.sends as usize];
        let (taken, len) = match stretch {
            SendSlice::Headers { at, len_bytes } => {
                let part = &headers[at as usize..][..len_bytes as usize];
                let taken = line.accept_bytes(now, part);
                unreleased.record_copied(line.accepted_bytes());
                (taken, part.len())
            }
            SendSlice::Memory(segment) => {
                let len = segment.len_bytes as usize;
                let mut bytes = vec![0; len];
                let looked_at = self.memory.load(segment, &mut bytes);
                looked_at
                    .map_err(|_| StreamError(format!("send: {segment:?} lies in no region")))?;
                if segment.len_bytes < self.copied_below {
                    let taken = line.accept_bytes(now, &bytes);
                    unreleased.record_copied(line.accepted_bytes());
                    return Ok(taken == len);
                }
                let taken = line.accept_segment(now, segment, &self.memory);
                unreleased.record_segment(line.accepted_bytes(), segment, &self.memory, taken);
                (taken, len)
            }
        };
        Ok(taken == len)
    }
}

impl Stream for SimStream {
    fn receive(&mut self) -> RecvResult {
        self.receive_up_to(usize::MAX)
    }

    fn receive_up_to(&mut self, count: usize) -> RecvResult {
        self.inbox.drain(..self.start);
        self.start = 0;
        let waiting = self.inbox.len();
        let mut room = vec![0; self.inbox_bytes.saturating_sub(waiting).min(count)];
        if room.is_empty() {
            return RecvResult::WouldBlock;
        }
        let received = self.receive_arrived(&mut room);
        if let RecvResult::Bytes(count) = received {
            self.inbox.extend_from_slice(&room[..count]);
        }
        received
    }

    fn buffered(&self) -> &[u8] {
        &self.inbox[self.start..]
    }

    fn consume(&mut self, count: usize) {
        assert!(
            count <= self.buffered().len(),
            "{count} consumed of {} bytes",
            self.buffered().len()
        );
        self.start += count;
    }

    fn receive_into(&mut self, into: &[Segment]) -> RecvResult {
        self.receive_into_and_following(into, 0)
    }

    fn receive_into_and_following(&mut self, into: &[Segment], following: usize) -> RecvResult {
        assert!(self.buffered().is_empty(), "bytes that came before have not been consumed");
        let len: usize = into.iter().map(|segment| segment.len_bytes as usize).sum();
        if len == 0 {
            return RecvResult::WouldBlock;
        }
        let mut room = vec![0; len + following.min(self.inbox_bytes)];
        let received = self.receive_arrived(&mut room);
        let RecvResult::Bytes(mut left) = received else { return received };
        let mut from = room.as_slice();
        for segment in into {
            let count = left.min(segment.len_bytes as usize);
            let part = u32::try_from(count).ok().and_then(|count| segment.slice(0, count));
            let stored = part.map(|part| self.memory.store(part, &from[..count]));
            if !matches!(stored, Some(Ok(()))) {
                return RecvResult::Failed(StreamError(format!("{segment:?} lies in no region")));
            }
            (from, left) = (&from[count..], left - count);
        }
        (self.start, self.inbox) = (0, from[..left].to_vec());
        received
    }

    fn send(
        &mut self,
        headers: &[u8],
        stretches: &[SendSlice],
        _has_more: bool,
    ) -> Result<usize, StreamError> {
        let network = self.network.clone();
        let mut cables = network.lock_state();
        if let Some(by) = cables.cut {
            return Err(StreamError(by.to_owned()));
        }
        if self.is_shut {
            return Err(StreamError("this end has been shut down".to_owned()));
        }
        if cables.gone[self.sends.reverse() as usize] {
            cables.cut_link("the peer has closed the connection");
            return Err(StreamError("the peer has closed the connection".to_owned()));
        }
        let before = cables.lines[self.sends as usize].accepted_bytes();
        for stretch in stretches {
            if !self.send_slice(&mut cables, headers, *stretch)? {
                break;
            }
        }
        let count = cables.lines[self.sends as usize].accepted_bytes() - before;
        self.taken += count;
        Ok(usize::try_from(count).unwrap_or(usize::MAX))
    }

    fn released_bytes(&mut self) -> u64 {
        self.network.lock_state().released_bytes_of(self.sends)
    }

    fn shutdown_write(&mut self) {
        self.is_shut = true;
        self.network.lock_state().lines[self.sends as usize].close();
    }

    fn abort(&mut self) {
        self.network.lock_state().cut_link("the peer has closed the connection");
    }

    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::None
    }

    fn arm(&mut self, wants_bytes: bool, wants_space: bool) -> bool {
        let released = self.released_bytes();
        let cables = self.network.lock_state();
        let now = cables.now;
        let has_bytes = cables.lines[self.sends.reverse() as usize].has_arrived(now);
        let has_space = cables.lines[self.sends as usize].free_capacity_bytes() > 0;
        let is_told = cables.unreleased[self.sends as usize].has_releasable(now);
        let is_cut = cables.cut.is_some();
        (wants_bytes && (has_bytes || is_cut))
            || (wants_space && (has_space || is_cut))
            || (released < self.taken && is_told)
    }

    fn peer_description(&self) -> String {
        match self.sends {
            LinkTransferDirection::Upstream => "the second end".to_owned(),
            LinkTransferDirection::Downstream => "the first end".to_owned(),
        }
    }
}

impl Drop for SimStream {
    fn drop(&mut self) {
        let mut cables = self.network.lock_state();
        cables.gone[self.sends as usize] = true;
        if cables.lines[self.sends as usize].holds_memory() {
            cables.cut_link("the peer has closed the connection");
        } else {
            cables.lines[self.sends as usize].close();
        }
    }
}

impl fmt::Debug for SimStream {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("End")
            .field("sends", &self.sends)
            .field("waiting", &self.buffered().len())
            .field("taken", &self.taken)
            .finish_non_exhaustive()
    }
}
