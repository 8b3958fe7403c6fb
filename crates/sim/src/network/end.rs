//! One end of a simulated connection.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use base::{Broken, Instant, Memory, Received, Segment, Span, Stream, Stretch, WakeSource};

use super::line::Arrival;
use super::{Cables, Direction, Network};

/// One end. Dropped, it closes: what is under way still arrives, unless some of it is memory that was
/// not read yet; then the connection breaks, and it never is.
pub struct End {
    network: Network,
    sends: Direction,
    memory: Arc<dyn Memory>,
    inbox: Vec<u8>,
    start: usize,
    inbox_bytes: usize,
    /// Bytes that were ever taken to be sent.
    taken: u64,
    lag: Lag,
    is_shut: bool,
}

/// What was read by the network, and when the owner is told.
struct Lag {
    span: Span,
    /// So much is told, from then on.
    due: VecDeque<(Instant, u64)>,
    told: u64,
}

impl End {
    pub(super) fn new(
        network: Network,
        sends: Direction,
        memory: Arc<dyn Memory>,
        inbox_bytes: usize,
        release_lag: Span,
    ) -> Self {
        let lag = Lag { span: release_lag, due: VecDeque::new(), told: 0 };
        let (inbox, is_shut) = (Vec::with_capacity(inbox_bytes), false);
        Self { network, sends, memory, inbox, start: 0, inbox_bytes, taken: 0, lag, is_shut }
    }

    /// Takes out of the network what has arrived, up to `into`.
    fn take(&self, into: &mut [u8]) -> Received {
        let mut cables = self.network.cables();
        let Cables { now, lines, cut, .. } = &mut *cables;
        if let Some(by) = cut {
            return Received::Broken(Broken((*by).to_owned()));
        }
        match lines[self.sends.reverse() as usize].take(*now, into) {
            Arrival::Bytes(count) => Received::Bytes(count),
            Arrival::Nothing => Received::Nothing,
            Arrival::End => Received::End,
            Arrival::Cut => {
                let by = "the connection was reset";
                cables.cut(by);
                Received::Broken(Broken(by.to_owned()))
            }
        }
    }

    fn stretch(
        &self,
        cables: &mut Cables,
        headers: &[u8],
        stretch: Stretch,
    ) -> Result<bool, Broken> {
        let now = cables.now;
        let line = &mut cables.lines[self.sends as usize];
        let (taken, len) = match stretch {
            Stretch::Headers { at, len_bytes } => {
                let part = &headers[at as usize..][..len_bytes as usize];
                (line.put(now, part), part.len())
            }
            Stretch::Memory(segment) => {
                let len = segment.len_bytes as usize;
                let looked_at = self.memory.load(segment, &mut vec![0; len]);
                looked_at.map_err(|_| Broken(format!("send: {segment:?} lies in no region")))?;
                (line.put_memory(now, segment, &self.memory), len)
            }
        };
        Ok(taken == len)
    }
}

impl Stream for End {
    fn receive(&mut self) -> Received {
        self.inbox.drain(..self.start);
        self.start = 0;
        let waiting = self.inbox.len();
        let mut room = vec![0; self.inbox_bytes.saturating_sub(waiting)];
        if room.is_empty() {
            return Received::Nothing;
        }
        let received = self.take(&mut room);
        if let Received::Bytes(count) = received {
            self.inbox.extend_from_slice(&room[..count]);
        }
        received
    }

    fn bytes(&self) -> &[u8] {
        &self.inbox[self.start..]
    }

    fn consume(&mut self, count: usize) {
        assert!(count <= self.bytes().len(), "{count} consumed of {} bytes", self.bytes().len());
        self.start += count;
    }

    fn receive_into(&mut self, into: &[Segment]) -> Received {
        assert!(self.bytes().is_empty(), "bytes that came before have not been consumed");
        let len: usize = into.iter().map(|segment| segment.len_bytes as usize).sum();
        if len == 0 {
            return Received::Nothing;
        }
        let mut room = vec![0; len];
        let received = self.take(&mut room);
        let Received::Bytes(mut left) = received else { return received };
        let mut from = room.as_slice();
        for segment in into {
            let count = left.min(segment.len_bytes as usize);
            let part = u32::try_from(count).ok().and_then(|count| segment.slice(0, count));
            let stored = part.map(|part| self.memory.store(part, &from[..count]));
            if !matches!(stored, Some(Ok(()))) {
                return Received::Broken(Broken(format!("{segment:?} lies in no region")));
            }
            (from, left) = (&from[count..], left - count);
        }
        received
    }

    fn send(
        &mut self,
        headers: &[u8],
        stretches: &[Stretch],
        _has_more: bool,
    ) -> Result<usize, Broken> {
        let network = self.network.clone();
        let mut cables = network.cables();
        if let Some(by) = cables.cut {
            return Err(Broken(by.to_owned()));
        }
        if self.is_shut {
            return Err(Broken("this end has been shut down".to_owned()));
        }
        if cables.gone[self.sends.reverse() as usize] {
            cables.cut("the other end has gone");
            return Err(Broken("the other end has gone".to_owned()));
        }
        let before = cables.lines[self.sends as usize].taken();
        for stretch in stretches {
            if !self.stretch(&mut cables, headers, *stretch)? {
                break;
            }
        }
        let count = cables.lines[self.sends as usize].taken() - before;
        self.taken += count;
        Ok(usize::try_from(count).unwrap_or(usize::MAX))
    }

    fn released(&mut self) -> u64 {
        let cables = self.network.cables();
        let given = cables.lines[self.sends as usize].given();
        self.lag.told(cables.now, given)
    }

    fn shut_down(&mut self) {
        self.is_shut = true;
        self.network.cables().lines[self.sends as usize].close();
    }

    fn abandon(&mut self) {
        self.network.cables().cut("the other end has gone");
    }

    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::Nothing
    }

    fn arm(&mut self, wants_bytes: bool, wants_room: bool) -> bool {
        let released = self.released();
        let cables = self.network.cables();
        let now = cables.now;
        let has_bytes = cables.lines[self.sends.reverse() as usize].has_arrived(now);
        let has_room = cables.lines[self.sends as usize].room() > 0;
        let is_told = self.lag.due.front().is_some_and(|(due, _)| *due <= now);
        let is_cut = cables.cut.is_some();
        (wants_bytes && (has_bytes || is_cut))
            || (wants_room && (has_room || is_cut))
            || (released < self.taken && is_told)
    }

    fn peer(&self) -> String {
        match self.sends {
            Direction::There => "the second end".to_owned(),
            Direction::Back => "the first end".to_owned(),
        }
    }
}

impl Lag {
    fn told(&mut self, now: Instant, given: u64) -> u64 {
        let known = self.due.back().map_or(self.told, |(_, upto)| *upto);
        if given > known {
            self.due.push_back((now.after(self.span), given));
        }
        while let Some((_, upto)) = self.due.pop_front_if(|(due, _)| *due <= now) {
            self.told = upto;
        }
        self.told
    }
}

impl Drop for End {
    fn drop(&mut self) {
        let mut cables = self.network.cables();
        cables.gone[self.sends as usize] = true;
        if cables.lines[self.sends as usize].holds_memory() {
            cables.cut("the other end has gone");
        } else {
            cables.lines[self.sends as usize].close();
        }
    }
}

impl fmt::Debug for End {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("End")
            .field("sends", &self.sends)
            .field("waiting", &self.bytes().len())
            .field("taken", &self.taken)
            .finish_non_exhaustive()
    }
}
