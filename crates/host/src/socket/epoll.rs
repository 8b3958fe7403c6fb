//! The `epoll` engine: `recv` and `sendmsg` by whoever looks, and one descriptor to sleep on.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use base::{Broken, Received, Segment, Stream, Stretch, WakeSource};
use dma::Regions;
use rustix::io::Errno;
use rustix::net::RecvFlags;

use super::gather::{Gather, scatter};
use super::groups::Member;
use super::inbox::{Inbox, Inboxes};
use super::lent::Mover;
use super::sockets::Counts;
use super::waiter::{ERRORS, Waiter};
use super::zero_copy::{self, Held, Threshold};
use crate::stream::{local_address_of, name_of_peer};
use crate::watch::Interest;

/// One connection.
pub(super) struct EpollStream {
    socket: OwnedFd,
    inbox: Inbox,
    regions: Regions,
    /// Why nothing comes any more.
    over: Option<Received>,
    /// So many bytes were taken to be sent.
    taken: u64,
    /// Those of them that the kernel did not copy and may still read.
    held: Held,
    threshold: Threshold,
    /// Whether sends by reference are worth trying.
    by_reference: bool,
    is_abandoned: bool,
    waiter: Waiter,
    /// There is memory for what it was armed to hear of: else a neighbour gives some back, and it is
    /// armed again.
    is_heard: bool,
    peer: String,
    counts: Arc<Counts>,
    /// Once something was lent.
    mover: Option<Box<Mover>>,
    /// Its place among those behind one receive queue.
    _member: Option<Member>,
}

impl EpollStream {
    pub(super) fn new(
        (socket, member): (OwnedFd, Option<Member>),
        regions: Regions,
        inboxes: Inboxes,
        threshold: Threshold,
        counts: Arc<Counts>,
    ) -> io::Result<Self> {
        let by_reference = zero_copy::allow(socket.as_fd());
        let peer = name_of_peer(socket.as_fd());
        Ok(Self {
            socket,
            inbox: Inbox::new(inboxes),
            regions,
            over: None,
            taken: 0,
            held: Held::default(),
            threshold,
            by_reference,
            is_abandoned: false,
            waiter: Waiter::new()?,
            is_heard: false,
            peer,
            counts,
            mover: None,
            _member: member,
        })
    }

    /// Takes what has come, but no more than `most` bytes.
    #[inline(always)]
    fn take(&mut self, most: usize) -> Received {
        if let Some(over) = &self.over {
            return over.clone();
        }
        let found = match self.inbox.room() {
            Some(room) if !room.is_empty() => {
                let most = most.min(room.len());
                rustix::net::recv(&self.socket, &mut room[..most], RecvFlags::DONTWAIT)
                    .map(|(count, _)| count)
            }
            Some(_) => return Received::Nothing,
            None => {
                self.counts.without_inbox.add(1);
                return Received::Nothing;
            }
        };
        if let Ok(count) = found {
            self.inbox.filled(count);
        }
        let received = self.outcome(found);
        if !matches!(received, Received::Bytes(_)) {
            self.inbox.settle();
        }
        received
    }

    /// What the kernel's answer to a look means.
    #[inline]
    fn outcome(&mut self, found: Result<usize, Errno>) -> Received {
        self.counts.receives.add(1);
        match found {
            Ok(count) if count > 0 => Received::Bytes(count),
            Err(Errno::AGAIN | Errno::INTR) => {
                self.counts.receives_in_vain.add(1);
                Received::Nothing
            }
            Ok(_) => self.end(Received::End),
            Err(errno) => {
                let broken = self.broken("receive from", errno);
                self.end(Received::Broken(broken))
            }
        }
    }

    #[cold]
    fn end(&mut self, over: Received) -> Received {
        self.over.get_or_insert(over).clone()
    }

    #[cold]
    fn broken(&self, doing: &str, errno: Errno) -> Broken {
        Broken(format!("{doing} {}: {errno}", self.peer))
    }

    #[cold]
    fn nowhere(&self, doing: &str, segment: Segment) -> Broken {
        Broken(format!("{doing} {}: {segment:?} lies in no region", self.peer))
    }

    /// What is worth waiting for. After the end there is nothing to receive, and without an inbox
    /// nothing could be: an inbox comes back in a turn of this thread, which arms again.
    fn wanted(&self, wants_bytes: bool, wants_room: bool) -> Option<Interest> {
        let wanted = Interest {
            readable: wants_bytes && self.over.is_none() && self.inbox.has_room(),
            writable: wants_room,
        };
        // One that was abandoned has a hang-up for ever, which says nothing.
        let has_news = wanted != ERRORS || !self.held.is_empty();
        (has_news && !self.is_abandoned).then_some(wanted)
    }

    /// Sends without copying. The headers are copied, to where the kernel may read them for longer.
    #[cold]
    fn send_by_reference(
        &mut self,
        headers: &[u8],
        stretches: &[Stretch],
        flags: i32,
    ) -> Result<usize, Broken> {
        // What the kernel says meanwhile is taken here too, whether or not anybody asks for it.
        self.released();
        let by_reference = self.by_reference;
        let headers: Box<[u8]> = headers.into();
        let mut list = Gather::new(&self.regions);
        list.add_all(&headers, stretches).map_err(|nowhere| self.nowhere("send to", nowhere.0))?;
        let how = if by_reference { libc::MSG_ZEROCOPY } else { 0 };
        let sent = match list.send(self.socket.as_fd(), flags | how) {
            Err(Errno::NOBUFS) => {
                // As much is held as this process may lock.
                let sent = list.send(self.socket.as_fd(), flags);
                return self.taken(sent);
            }
            sent => self.taken(sent)?,
        };
        if sent > 0 && by_reference {
            self.held.push(self.taken - sent as u64, headers);
            self.counts.sends_by_reference.add(1);
        }
        Ok(sent)
    }

    /// Sends what has no address because it was lent, each piece by itself, and what lies between.
    #[cold]
    fn send_lent(
        &mut self,
        headers: &[u8],
        stretches: &[Stretch],
        has_more: bool,
        nowhere: Segment,
    ) -> Result<usize, Broken> {
        let regions = self.regions.clone();
        let lent = |stretch: &Stretch| match *stretch {
            Stretch::Memory(segment) => regions.lent(segment).map(|_| segment),
            Stretch::Headers { .. } => None,
        };
        if regions.lent(nowhere).is_none() {
            return Err(self.nowhere("send to", nowhere));
        }
        let (mut sent, mut rest) = (0, stretches.len());
        for run in stretches.chunk_by(|one, next| lent(one).is_none() && lent(next).is_none()) {
            rest -= run.len();
            let follows = has_more || rest > 0;
            let taken = match run.first().and_then(&lent) {
                Some(segment) => self.send_one_lent(segment, follows),
                None => self.send(headers, run, follows),
            };
            match taken {
                Ok(count) => sent += count,
                // What went before is told first, and the end with the next call.
                Err(_) if sent > 0 => return Ok(sent),
                Err(broken) => return Err(broken),
            }
            if taken != Ok(run.iter().map(Stretch::len_bytes).sum()) {
                break;
            }
        }
        Ok(sent)
    }

    fn send_one_lent(&mut self, segment: Segment, has_more: bool) -> Result<usize, Broken> {
        if segment.len_bytes == 0 {
            return Ok(0);
        }
        let mover = self.mover.get_or_insert_default();
        let sent = mover.send(&self.regions, segment, self.socket.as_fd(), has_more);
        self.taken(sent)
    }

    /// Receives to what has no address because it was lent, or to what lies before that.
    #[cold]
    fn receive_lent(&mut self, into: &[Segment], nowhere: Segment) -> Received {
        let mut parts = into.iter().filter(|segment| segment.len_bytes > 0);
        let first = parts.next().copied().unwrap_or(nowhere);
        if self.regions.lent(nowhere).is_none() {
            let broken = self.nowhere("receive from", nowhere);
            return self.end(Received::Broken(broken));
        }
        if self.regions.lent(first).is_none() {
            return self.receive_into(&[first]);
        }
        let mover = self.mover.get_or_insert_default();
        let found = mover.receive(&self.regions, first, self.socket.as_fd());
        self.outcome(found)
    }

    #[inline]
    fn taken(&mut self, sent: Result<usize, Errno>) -> Result<usize, Broken> {
        self.counts.sends.add(1);
        match sent {
            Ok(count) => {
                self.taken += count as u64;
                Ok(count)
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(0),
            Err(errno) => Err(self.broken("send to", errno)),
        }
    }
}

impl Stream for EpollStream {
    #[inline]
    fn receive(&mut self) -> Received {
        self.take(usize::MAX)
    }

    fn receive_at_most(&mut self, count: usize) -> Received {
        self.take(count)
    }

    #[inline]
    fn bytes(&self) -> &[u8] {
        self.inbox.bytes()
    }

    #[inline]
    fn consume(&mut self, count: usize) {
        self.inbox.consume(count);
    }

    #[inline]
    fn receive_into(&mut self, into: &[Segment]) -> Received {
        assert!(self.bytes().is_empty(), "bytes that came before have not been consumed");
        if let Some(over) = &self.over {
            return over.clone();
        }
        if into.iter().all(|segment| segment.len_bytes == 0) {
            return Received::Nothing;
        }
        match scatter(&self.regions, into, self.socket.as_fd()) {
            Ok(found) => self.outcome(found),
            Err(nowhere) => self.receive_lent(into, nowhere.0),
        }
    }

    #[inline]
    fn send(
        &mut self,
        headers: &[u8],
        stretches: &[Stretch],
        has_more: bool,
    ) -> Result<usize, Broken> {
        let mut list = Gather::new(&self.regions);
        let is_whole = match list.add_all(headers, stretches) {
            Ok(is_whole) => is_whole,
            Err(nowhere) => return self.send_lent(headers, stretches, has_more, nowhere.0),
        };
        if list.len_bytes() == 0 {
            return Ok(0);
        }
        let flags = if has_more || !is_whole { libc::MSG_MORE } else { 0 };
        if self.by_reference && list.has_pieces_of(self.threshold.get()) {
            return self.send_by_reference(headers, stretches, flags);
        }
        let sent = list.send(self.socket.as_fd(), flags);
        self.taken(sent)
    }

    #[inline]
    fn released(&mut self) -> u64 {
        if self.held.is_empty() {
            return self.taken;
        }
        let copied = self.held.look(self.socket.as_fd());
        if copied > 0 {
            self.by_reference = false;
            self.counts.copied_anyway.add(copied);
        }
        self.held.first().unwrap_or(self.taken)
    }

    fn shut_down(&mut self) {
        // A peer that has gone already is told nothing.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Write);
    }

    fn abandon(&mut self) {
        zero_copy::abort(self.socket.as_fd());
        self.is_abandoned = true;
        // A hang-up that is asked for by nobody may still be reported, which ends a sleep too early.
        let _ = self.waiter.wait_for(self.socket.as_fd(), None);
        let broken = Broken(format!("receive from {}: the connection was abandoned", self.peer));
        self.end(Received::Broken(broken));
    }

    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::Descriptor(self.waiter.as_fd())
    }

    fn arm(&mut self, wants_bytes: bool, wants_room: bool) -> bool {
        self.inbox.settle();
        let wanted = self.wanted(wants_bytes, wants_room);
        self.is_heard = wanted == Some(Interest { readable: wants_bytes, writable: wants_room });
        match self.waiter.wait_for(self.socket.as_fd(), wanted) {
            Ok(()) => false,
            Err(error) => {
                let broken = format!("wait for {}: {error}", self.peer);
                self.end(Received::Broken(Broken(broken)));
                true
            }
        }
    }

    fn is_heard(&self) -> bool {
        self.is_heard
    }

    fn let_go(&mut self) -> bool {
        self.inbox.let_go()
    }

    fn peer(&self) -> String {
        self.peer.clone()
    }

    fn local_address(&self) -> Option<SocketAddr> {
        local_address_of(self.socket.as_fd())
    }
}

impl Drop for EpollStream {
    fn drop(&mut self) {
        self.released();
        if !self.held.is_empty() {
            zero_copy::abort(self.socket.as_fd());
            self.released();
        }
        if !self.held.is_empty() {
            self.held.keep();
        }
    }
}
