//! The `epoll` socket engine: `recv` and `sendmsg` from the polling thread, and one descriptor to
//! sleep on.

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::RecvFlags;
use tenmil_base::{RecvResult, Segment, SendSlice, Stream, StreamError, WakeSource};
use tenmil_dma::RegionTable;

use super::gather_list::{GatherList, receive_scattered};
use super::kernel_buffers::KernelBufferTransfer;
use super::napi_groups::GroupMembership;
use super::recv_buffer::{RecvBuffer, RecvBufferPool};
use super::socket_stream_factory::SharedSocketStats;
use super::socket_waiter::{ERRORS, SocketReadinessDescriptor};
use super::zero_copy::{self, PendingZeroCopy, ZeroCopyThreshold};
use crate::poll_set::Interest;
use crate::socket_stream::{local_address_of, name_of_peer};

/// One connection.
pub(super) struct EpollStream {
    socket: OwnedFd,
    buffer: RecvBuffer,
    regions: RegionTable,
    /// Reason why nothing more is received.
    end: Option<RecvResult>,
    /// Bytes accepted for sending.
    taken: u64,
    /// Zero-copy sends that the kernel may still read.
    pending_zero_copy: PendingZeroCopy,
    threshold: ZeroCopyThreshold,
    /// Whether zero-copy sends are attempted.
    zero_copy: bool,
    is_aborted: bool,
    waiter: SocketReadinessDescriptor,
    /// Whether all requested events are armed. False if no receive buffer was free; another stream
    /// frees one, and this one is armed again.
    is_fully_armed: bool,
    peer: String,
    counts: Arc<SharedSocketStats>,
    /// Created at the first transfer of a kernel-owned buffer.
    mover: Option<Box<KernelBufferTransfer>>,
    /// Membership in the group of sockets on one receive queue.
    _member: Option<GroupMembership>,
}

impl EpollStream {
    pub(super) fn new(
        (socket, member): (OwnedFd, Option<GroupMembership>),
        regions: RegionTable,
        inboxes: RecvBufferPool,
        threshold: ZeroCopyThreshold,
        counts: Arc<SharedSocketStats>,
    ) -> io::Result<Self> {
        let by_reference = zero_copy::enable_zero_copy(socket.as_fd());
        let peer = name_of_peer(socket.as_fd());
        Ok(Self {
            socket,
            buffer: RecvBuffer::new(inboxes),
            regions,
            end: None,
            taken: 0,
            pending_zero_copy: PendingZeroCopy::default(),
            threshold,
            zero_copy: by_reference,
            is_aborted: false,
            waiter: SocketReadinessDescriptor::new()?,
            is_fully_armed: false,
            peer,
            counts,
            mover: None,
            _member: member,
        })
    }

    /// Receives what is available, at most `most` bytes.
    #[inline(always)]
    fn receive_at_most(&mut self, most: usize) -> RecvResult {
        if let Some(over) = &self.end {
            return over.clone();
        }
        let found = match self.buffer.free_space() {
            Some(room) if !room.is_empty() => {
                let most = most.min(room.len());
                rustix::net::recv(&self.socket, &mut room[..most], RecvFlags::DONTWAIT)
                    .map(|(count, _)| count)
            }
            Some(_) => return RecvResult::WouldBlock,
            None => {
                self.counts.without_inbox.add(1);
                return RecvResult::WouldBlock;
            }
        };
        if let Ok(count) = found {
            self.buffer.mark_filled(count);
        }
        let received = self.convert_receive_result(found);
        if !matches!(received, RecvResult::Bytes(_)) {
            self.buffer.release_unless_large();
        }
        received
    }

    /// Converts the result of a receive call.
    #[inline]
    fn convert_receive_result(&mut self, found: Result<usize, Errno>) -> RecvResult {
        self.counts.receives.add(1);
        match found {
            Ok(count) if count > 0 => RecvResult::Bytes(count),
            Err(Errno::AGAIN | Errno::INTR) => {
                self.counts.receives_in_vain.add(1);
                RecvResult::WouldBlock
            }
            Ok(_) => self.record_end(RecvResult::Eof),
            Err(errno) => {
                let broken = self.call_error("receive from", errno);
                self.record_end(RecvResult::Failed(broken))
            }
        }
    }

    #[cold]
    fn record_end(&mut self, over: RecvResult) -> RecvResult {
        self.end.get_or_insert(over).clone()
    }

    #[cold]
    fn call_error(&self, doing: &str, errno: Errno) -> StreamError {
        StreamError(format!("{doing} {}: {errno}", self.peer))
    }

    #[cold]
    fn invalid_segment(&self, doing: &str, segment: Segment) -> StreamError {
        StreamError(format!("{doing} {}: {segment:?} lies in no region", self.peer))
    }

    /// Events worth waiting for. After the end nothing is received, and without a free receive
    /// buffer nothing could be: a buffer is freed in an iteration of this thread, which arms again.
    fn interest(&self, wants_bytes: bool, wants_space: bool) -> Option<Interest> {
        let interest = Interest {
            readable: wants_bytes && self.end.is_none() && self.buffer.has_space(),
            writable: wants_space,
        };
        // An aborted socket reports a permanent hang-up, which carries no information.
        let has_new_events = interest != ERRORS || !self.pending_zero_copy.is_empty();
        (has_new_events && !self.is_aborted).then_some(interest)
    }

    /// Sends without copying. The headers are copied to memory that stays valid until the
    /// notification.
    #[cold]
    fn send_zero_copy(
        &mut self,
        headers: &[u8],
        stretches: &[SendSlice],
        flags: i32,
    ) -> Result<usize, StreamError> {
        // Notifications are read here too, whether or not the caller polls for them.
        self.released_bytes();
        // Read after the notifications, which may have disabled zero copy.
        let by_reference = self.zero_copy;
        let headers: Box<[u8]> = headers.into();
        let mut list = GatherList::new(&self.regions);
        list.add_all(&headers, stretches)
            .map_err(|nowhere| self.invalid_segment("send to", nowhere.0))?;
        let how = if by_reference { libc::MSG_ZEROCOPY } else { 0 };
        let sent = match list.send(self.socket.as_fd(), flags | how) {
            Err(Errno::NOBUFS) => {
                // The process's limit of locked memory is reached: send with a copy.
                let sent = list.send(self.socket.as_fd(), flags);
                return self.record_sent(sent);
            }
            sent => self.record_sent(sent)?,
        };
        if sent > 0 && by_reference {
            self.pending_zero_copy.record_send(self.taken - sent as u64, headers);
            self.counts.sends_by_reference.add(1);
        }
        Ok(sent)
    }

    /// Sends a list with kernel-owned segments: each of those by itself, and the rest between them.
    #[cold]
    fn send_kernel_buffers(
        &mut self,
        headers: &[u8],
        stretches: &[SendSlice],
        has_more: bool,
        nowhere: Segment,
    ) -> Result<usize, StreamError> {
        let regions = self.regions.clone();
        let leased = |stretch: &SendSlice| match *stretch {
            SendSlice::Memory(segment) => regions.kernel_buffer(segment).map(|_| segment),
            SendSlice::Headers { .. } => None,
        };
        if regions.kernel_buffer(nowhere).is_none() {
            return Err(self.invalid_segment("send to", nowhere));
        }
        let (mut sent, mut rest) = (0, stretches.len());
        // Each kernel-owned segment is a run of its own, consecutive other slices form one run.
        for run in stretches.chunk_by(|one, next| leased(one).is_none() && leased(next).is_none()) {
            rest -= run.len();
            let follows = has_more || rest > 0;
            let taken = match run.first().and_then(&leased) {
                Some(segment) => self.send_kernel_buffer(segment, follows),
                None => self.send(headers, run, follows),
            };
            match taken {
                Ok(count) => sent += count,
                // Earlier progress is returned first, the error by the next call.
                Err(_) if sent > 0 => return Ok(sent),
                Err(broken) => return Err(broken),
            }
            // A partial send: the socket is full, and later runs must not overtake the rest.
            if taken != Ok(run.iter().map(SendSlice::len_bytes).sum()) {
                break;
            }
        }
        Ok(sent)
    }

    fn send_kernel_buffer(
        &mut self,
        segment: Segment,
        has_more: bool,
    ) -> Result<usize, StreamError> {
        if segment.len_bytes == 0 {
            return Ok(0);
        }
        let mover = self.mover.get_or_insert_default();
        let sent = mover.send(&self.regions, segment, self.socket.as_fd(), has_more);
        self.record_sent(sent)
    }

    /// Receives into a kernel-owned segment, or into the segments before it.
    #[cold]
    fn receive_kernel_buffer(&mut self, into: &[Segment], nowhere: Segment) -> RecvResult {
        let mut parts = into.iter().filter(|segment| segment.len_bytes > 0);
        let first = parts.next().copied().unwrap_or(nowhere);
        if self.regions.kernel_buffer(nowhere).is_none() {
            let broken = self.invalid_segment("receive from", nowhere);
            return self.record_end(RecvResult::Failed(broken));
        }
        if self.regions.kernel_buffer(first).is_none() {
            return self.receive_into(&[first]);
        }
        let mover = self.mover.get_or_insert_default();
        let found = mover.receive(&self.regions, first, self.socket.as_fd());
        self.convert_receive_result(found)
    }

    #[inline]
    fn record_sent(&mut self, sent: Result<usize, Errno>) -> Result<usize, StreamError> {
        self.counts.sends.add(1);
        match sent {
            Ok(count) => {
                self.taken += count as u64;
                Ok(count)
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(0),
            Err(errno) => Err(self.call_error("send to", errno)),
        }
    }
}

impl Stream for EpollStream {
    #[inline]
    fn receive(&mut self) -> RecvResult {
        self.receive_at_most(usize::MAX)
    }

    fn receive_up_to(&mut self, count: usize) -> RecvResult {
        self.receive_at_most(count)
    }

    #[inline]
    fn buffered(&self) -> &[u8] {
        self.buffer.unconsumed_bytes()
    }

    #[inline]
    fn consume(&mut self, count: usize) {
        self.buffer.consume(count);
    }

    #[inline]
    fn receive_into(&mut self, into: &[Segment]) -> RecvResult {
        assert!(self.buffered().is_empty(), "bytes that came before have not been consumed");
        if let Some(over) = &self.end {
            return over.clone();
        }
        if into.iter().all(|segment| segment.len_bytes == 0) {
            return RecvResult::WouldBlock;
        }
        match receive_scattered(&self.regions, into, &mut [], self.socket.as_fd()) {
            Ok(found) => self.convert_receive_result(found),
            Err(nowhere) => self.receive_kernel_buffer(into, nowhere.0),
        }
    }

    #[inline]
    fn receive_into_and_following(&mut self, into: &[Segment], following: usize) -> RecvResult {
        assert!(self.buffered().is_empty(), "bytes that came before have not been consumed");
        if let Some(over) = &self.end {
            return over.clone();
        }
        let direct: usize = into.iter().map(|segment| segment.len_bytes as usize).sum();
        let Some(space) = self.buffer.free_space().filter(|_| direct > 0) else {
            return self.receive_into(into);
        };
        let following = following.min(space.len());
        let space = &mut space[..following];
        match receive_scattered(&self.regions, into, space, self.socket.as_fd()) {
            Ok(found) => {
                let behind = found.map_or(0, |count| count.saturating_sub(direct));
                self.buffer.mark_filled(behind);
                if behind == 0 {
                    self.buffer.release_unless_large();
                }
                self.convert_receive_result(found)
            }
            Err(nowhere) => {
                self.buffer.release_unless_large();
                self.receive_kernel_buffer(into, nowhere.0)
            }
        }
    }

    #[inline]
    fn send(
        &mut self,
        headers: &[u8],
        stretches: &[SendSlice],
        has_more: bool,
    ) -> Result<usize, StreamError> {
        let mut list = GatherList::new(&self.regions);
        let is_whole = match list.add_all(headers, stretches) {
            Ok(is_whole) => is_whole,
            Err(nowhere) => {
                return self.send_kernel_buffers(headers, stretches, has_more, nowhere.0);
            }
        };
        if list.len_bytes() == 0 {
            return Ok(0);
        }
        let flags = if has_more || !is_whole { libc::MSG_MORE } else { 0 };
        if self.zero_copy && list.is_average_segment_at_least(self.threshold.get()) {
            return self.send_zero_copy(headers, stretches, flags);
        }
        let sent = list.send(self.socket.as_fd(), flags);
        self.record_sent(sent)
    }

    #[inline]
    fn released_bytes(&mut self) -> u64 {
        if self.pending_zero_copy.is_empty() {
            return self.taken;
        }
        let copied = self.pending_zero_copy.poll_notifications(self.socket.as_fd());
        if copied > 0 {
            self.zero_copy = false;
            self.counts.copied_anyway.add(copied);
        }
        self.pending_zero_copy.first_pending_position().unwrap_or(self.taken)
    }

    fn shutdown_write(&mut self) {
        // Fails if the peer has closed already.
        let _ = rustix::net::shutdown(&self.socket, rustix::net::Shutdown::Write);
    }

    fn abort(&mut self) {
        zero_copy::abort_connection(self.socket.as_fd());
        self.is_aborted = true;
        // The socket is removed from the set: a hang-up is reported even if not requested, and
        // would end sleeps.
        let _ = self.waiter.set_awaited_events(self.socket.as_fd(), None);
        let broken =
            StreamError(format!("receive from {}: the connection was abandoned", self.peer));
        self.record_end(RecvResult::Failed(broken));
    }

    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::Descriptor(self.waiter.as_fd())
    }

    fn arm(&mut self, wants_bytes: bool, wants_space: bool) -> bool {
        self.buffer.release_unless_large();
        let interest = self.interest(wants_bytes, wants_space);
        self.is_fully_armed =
            interest == Some(Interest { readable: wants_bytes, writable: wants_space });
        match self.waiter.set_awaited_events(self.socket.as_fd(), interest) {
            Ok(()) => false,
            Err(error) => {
                let broken = format!("wait for {}: {error}", self.peer);
                self.record_end(RecvResult::Failed(StreamError(broken)));
                true
            }
        }
    }

    fn is_fully_armed(&self) -> bool {
        self.is_fully_armed
    }

    fn detach_from_thread(&mut self) -> bool {
        self.buffer.release_before_thread_change()
    }

    fn peer_description(&self) -> String {
        self.peer.clone()
    }

    fn local_address(&self) -> Option<SocketAddr> {
        local_address_of(self.socket.as_fd())
    }
}

impl Drop for EpollStream {
    fn drop(&mut self) {
        self.released_bytes();
        if !self.pending_zero_copy.is_empty() {
            zero_copy::abort_connection(self.socket.as_fd());
            self.released_bytes();
        }
        if !self.pending_zero_copy.is_empty() {
            self.pending_zero_copy.leak_pending();
        }
    }
}
