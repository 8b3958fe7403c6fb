//! NVMe/TCP connection of one queue, with its socket: commands out, completions in, data directly to and
//! from its memory.
//!
//! ```text
//!   submit ─────▶ tenmil_nvme_tcp::HostConnection ── pieces ──▶ one gathered send ──▶ Stream
//!   completion ◀─ tenmil_nvme_tcp::HostConnection ◀── buffered bytes ◀─────────────── Stream
//!                   └── data: copied once from there, or received in place
//! ```
//!
//! Kernel buffers (registered by ublk) have no address, and data for them has to be received in place.
//! While such data is awaited, headers are received one by one, so that no data is received after them.
//!
//! The owner calls [`send`](QueueConnection::send) and [`receive`](QueueConnection::receive) once per
//! iteration each.

use std::collections::VecDeque;

use tenmil_base::{
    Instant, RecvResult, SecureChannel, Segment, SendSlice, Span, Stream, StreamError, WakeSource,
};
use tenmil_dma::DevicePool;
use tenmil_nvme_tcp::{
    CannotSubmit, CloseReason, Connection, DataDirection, EventQueue, HostConfig, HostConnection,
    HostEvent, SendPiece,
};
use tenmil_wire::{Command, Completion, Status};

use crate::command_table::{CommandTable, RECEIVE_IN_PLACE, STORE_FAILED, TO_CONTROLLER};
use crate::write_pacing;

/// A connection that is being opened, is open, or has been lost.
pub(crate) struct QueueConnection {
    protocol: HostConnection,
    stream: Box<dyn Stream>,
    events: EventQueue<HostEvent>,
    commands: CommandTable,
    /// Bits of a command identifier that are its tag.
    tag_mask: u16,
    slices: Vec<SendSlice>,
    direct_segments: Vec<Segment>,
    /// Total number of bytes accepted by the stream.
    sent_bytes: u64,
    /// Position in these bytes up to which they may be in memory of commands.
    memory_bytes: u64,
    /// Position up to which the kernel is known to have released them.
    released_bytes: u64,
    /// Completed commands whose data the kernel may still read, each with the position in these bytes
    /// that has to be released first.
    held_completions: VecDeque<(u64, CompletedCommand)>,
    outstanding: u32,
    /// Number of outstanding commands that are marked [`RECEIVE_IN_PLACE`].
    in_place_only: u32,
    /// Number of times that data was received.
    received: u64,
    /// The last data belonged to a transfer of [`HEADER_ALONE_BYTES_MIN`] or more.
    is_receiving_large: bool,
    lost: Option<ConnectionLoss>,
}

/// A command that has completed, and whose memory is no longer accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CompletedCommand {
    /// Command identifier.
    pub(crate) cid: u16,
    pub(crate) completion: Completion,
}

/// Data of a command.
#[derive(Debug)]
pub(crate) enum CommandData {
    None,
    /// In one segment.
    Segment(DataDirection, Segment),
    /// In a kernel buffer, which has no address in this process.
    KernelBuffer(DataDirection, Segment),
    /// In several segments.
    List(DataDirection, Vec<Segment>),
}

/// Cause of the end of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ConnectionLoss {
    Ended(CloseReason),
    Broken(StreamError),
    /// Nothing was received for so long while commands were outstanding.
    Stalled(Span),
}

/// Maximum number of events of one call into the protocol state machine.
const EVENTS: usize = 128;

/// Maximum number of separate receives of headers and data per poll, while data for kernel buffers is
/// awaited.
const KERNEL_BUFFER_RECVS: usize = 64;

/// From this size on, data is received in place. For less, a copy is cheaper than a separate system call.
const DIRECT_RECV_BYTES_MIN: u32 = 16 << 10;

/// While transfers of this size or more are received, a header is received without the data behind it if
/// the receive of the data before it did not bring it, so that the data are received in place.
const HEADER_ALONE_BYTES_MIN: u32 = 128 << 10;

/// Maximum number of receives in place per poll.
const DIRECT_RECVS: usize = 4;

impl QueueConnection {
    /// A connection over `stream`, which starts to open. Data is in memory that `memory` can resolve. The
    /// identifiers of commands have their tags in the bits of the configuration's mask.
    pub(crate) fn new(
        stream: Box<dyn Stream>,
        config: HostConfig,
        memory: DevicePool,
        now: Instant,
    ) -> Self {
        let HostConfig { depth, cid_mask: tag_mask, .. } = config;
        Self {
            protocol: HostConnection::new(config, now),
            stream,
            events: EventQueue::with_capacity(EVENTS),
            commands: CommandTable::new(memory, depth),
            tag_mask,
            slices: Vec::new(),
            direct_segments: Vec::new(),
            sent_bytes: 0,
            memory_bytes: 0,
            released_bytes: 0,
            held_completions: VecDeque::new(),
            outstanding: 0,
            in_place_only: 0,
            received: 0,
            is_receiving_large: false,
            lost: None,
        }
    }

    /// Whether commands can be submitted.
    pub(crate) fn is_open(&self) -> bool {
        self.protocol.is_open()
    }

    /// Secure channel of its stream; `None` for plaintext.
    pub(crate) fn secure_channel(&self) -> Option<&SecureChannel> {
        self.stream.secure_channel()
    }

    /// Cause of its end, if it has ended.
    #[inline]
    pub(crate) fn loss(&self) -> Option<&ConnectionLoss> {
        self.lost.as_ref()
    }

    /// Number of commands that have not completed, or whose memory the stream may still read.
    #[inline]
    pub(crate) fn outstanding_count(&self) -> u32 {
        self.outstanding
    }

    /// Number of times that data was received.
    pub(crate) const fn receive_count(&self) -> u64 {
        self.received
    }

    /// Ends the connection, because nothing was received for `waited` although a completion was due.
    pub(crate) fn end_as_stalled(&mut self, waited: Span) {
        self.set_lost(ConnectionLoss::Stalled(waited));
    }

    /// Whether an outstanding command would do harm if it were executed late.
    pub(crate) fn may_execute_late(&self, is_admin: bool) -> bool {
        self.protocol
            .outstanding_tags()
            .any(|tag| self.commands.entry(tag).has_side_effects(is_admin))
    }

    /// Whether the stream may still read memory of outstanding commands.
    pub(crate) fn has_kernel_references(&mut self) -> bool {
        self.released_bytes = self.stream.released_bytes();
        self.outstanding > 0 && self.released_bytes < self.memory_bytes
    }

    /// Whether the stream may still read memory that was sent, also that of completed commands.
    pub(crate) fn has_unreleased_memory(&mut self) -> bool {
        self.released_bytes = self.stream.released_bytes();
        self.released_bytes < self.memory_bytes
    }

    /// Whether no command has this tag.
    pub(crate) fn is_tag_free(&self, tag: u16) -> bool {
        self.protocol.is_tag_free(tag)
    }

    /// Discards unsent data, so that the peer receives none of it.
    pub(crate) fn discard_unsent(&mut self) {
        self.stream.abort();
    }

    /// Submits `command` under its identifier, with its data in `segment`.
    #[inline]
    pub(crate) fn submit_segment(
        &mut self,
        command: &Command,
        data: DataDirection,
        segment: Segment,
    ) -> Result<(), CannotSubmit> {
        let cid = command.cid();
        self.commands.insert(cid & self.tag_mask, command.opcode(), segment);
        self.protocol.submit_with_cid(cid, command, data, &self.commands)?;
        self.outstanding += 1;
        Ok(())
    }

    /// Takes a list that is no longer used, for its memory.
    pub(crate) fn take_replaced_list(&mut self) -> Vec<Segment> {
        self.commands.take_replaced_list()
    }

    /// Submits `command` under its identifier, with any data. Returns the data if it is not accepted.
    pub(crate) fn submit(
        &mut self,
        command: &Command,
        data: CommandData,
    ) -> Result<(), (CannotSubmit, CommandData)> {
        let tag = command.cid() & self.tag_mask;
        match data {
            CommandData::None => {
                let nothing = Segment::default();
                let submitted = self.submit_segment(command, DataDirection::None, nothing);
                submitted.map_err(|full| (full, data))
            }
            CommandData::Segment(direction, segment) => {
                let submitted = self.submit_segment(command, direction, segment);
                submitted.map_err(|full| (full, data))
            }
            CommandData::KernelBuffer(direction, segment) => {
                let submitted = self.submit_segment(command, direction, segment);
                submitted.map_err(|full| (full, data))?;
                if let DataDirection::ToHost(_) = direction {
                    self.commands.set_flag(tag, RECEIVE_IN_PLACE);
                    self.in_place_only += 1;
                }
                Ok(())
            }
            CommandData::List(direction, list) => {
                self.commands.insert_list(tag, command.opcode(), list);
                match self.protocol.submit_with_cid(
                    command.cid(),
                    command,
                    direction,
                    &self.commands,
                ) {
                    Ok(()) => {
                        self.outstanding += 1;
                        Ok(())
                    }
                    Err(full) => {
                        Err((full, CommandData::List(direction, self.commands.take_list(tag))))
                    }
                }
            }
        }
    }

    /// Sends what is pending.
    #[inline]
    pub(crate) fn send(&mut self, complete: &mut impl FnMut(CompletedCommand)) {
        if self.protocol.has_more() {
            self.send_large(complete);
        } else if !self.protocol.send_pieces().is_empty() && self.lost.is_none() {
            // Commands and their in-capsule data.
            self.send_once(false, complete);
        }
    }

    /// Sends as much of large data as the budget permits, after the commands.
    #[inline(never)]
    fn send_large(&mut self, complete: &mut impl FnMut(CompletedCommand)) {
        let budget = write_pacing::send_budget();
        self.protocol.set_send_budget(budget.bytes);
        for _ in 0..budget.sends {
            let has_more = self.protocol.has_more() && budget.bytes > 0;
            if has_more {
                write_pacing::note_large_send();
            }
            let has_nothing = self.protocol.send_pieces().is_empty() && !has_more;
            if has_nothing || self.lost.is_some() || !self.send_once(budget.sends > 1, complete) {
                return;
            }
        }
    }

    /// Sends pending pieces. Returns whether all were sent. `follows` announces that more data is sent at
    /// once.
    fn send_once(&mut self, follows: bool, complete: &mut impl FnMut(CompletedCommand)) -> bool {
        self.protocol.fill_send_queue(&self.commands);
        self.slices.clear();
        let mut has_memory = false;
        for piece in self.protocol.send_pieces() {
            match *piece {
                SendPiece::Headers { at, len_bytes } => {
                    self.slices.push(SendSlice::Headers { at, len_bytes });
                }
                SendPiece::Payload { tag, offset, len_bytes } => {
                    has_memory = true;
                    let place = tenmil_nvme_tcp::DataPlacement { tag, offset, len_bytes };
                    self.commands.for_each_segment(place, |segment| {
                        self.slices.push(SendSlice::Memory(segment))
                    });
                }
            }
        }
        let has_more = follows && self.protocol.has_more();
        match self.stream.send(self.protocol.header_bytes(), &self.slices, has_more) {
            Ok(count) => {
                self.sent_bytes += count as u64;
                if has_memory {
                    self.memory_bytes = self.sent_bytes;
                }
                self.protocol.record_sent(count, &mut self.events);
                self.handle_events(complete);
                count > 0 && self.protocol.send_pieces().is_empty()
            }
            Err(error) => {
                self.set_lost(ConnectionLoss::Broken(error));
                false
            }
        }
    }

    /// Receives what has arrived.
    #[inline]
    pub(crate) fn receive(&mut self, now: Instant, complete: &mut impl FnMut(CompletedCommand)) {
        write_pacing::begin_iteration(now);
        if self.lost.is_some() {
            return;
        }
        if self.in_place_only > 0 {
            self.receive_to_kernel_buffers(now, complete);
        } else if !self.receive_direct(now, complete) {
            let is_header_alone = self.is_receiving_large;
            let received = if is_header_alone {
                let waiting = self.stream.buffered().len();
                self.stream.receive_up_to(self.protocol.receivable_bytes_before_data(waiting))
            } else {
                self.stream.receive()
            };
            self.parse_buffered(now, complete);
            match received {
                RecvResult::Bytes(_) => {
                    self.received += 1;
                    let is_direct = self.receive_direct(now, complete);
                    self.is_receiving_large &= is_direct || !is_header_alone;
                }
                RecvResult::WouldBlock => {}
                RecvResult::Eof => self.handle_eof(complete),
                RecvResult::Failed(error) => self.set_lost(ConnectionLoss::Broken(error)),
            }
        }
        if !self.held_completions.is_empty() {
            self.deliver_released(complete);
        }
    }

    /// Receives headers and data separately.
    #[cold]
    fn receive_to_kernel_buffers(
        &mut self,
        now: Instant,
        complete: &mut impl FnMut(CompletedCommand),
    ) {
        for _ in 0..KERNEL_BUFFER_RECVS {
            // Bytes received before a kernel buffer was used.
            self.parse_buffered(now, complete);
            if self.lost.is_some() {
                return;
            }
            let waiting = self.stream.buffered().len();
            let received = match self.protocol.next_direct_placement().filter(|_| waiting == 0) {
                Some(place) => self.receive_to(place, 0, now, complete),
                None => {
                    self.stream.receive_up_to(self.protocol.receivable_bytes_before_data(waiting))
                }
            };
            match received {
                RecvResult::Bytes(_) => self.received += 1,
                RecvResult::WouldBlock => return,
                RecvResult::Eof => return self.handle_eof(complete),
                RecvResult::Failed(error) => return self.set_lost(ConnectionLoss::Broken(error)),
            }
        }
        self.parse_buffered(now, complete);
    }

    /// Receives awaited data in place if it is large enough, and in the same call the header behind it.
    /// Returns whether it was.
    #[inline]
    fn receive_direct(
        &mut self,
        now: Instant,
        complete: &mut impl FnMut(CompletedCommand),
    ) -> bool {
        let Some(place) = self.large_placement() else { return false };
        self.receive_large(place, now, complete);
        true
    }

    /// Place of awaited data, if they are large enough to be received there and come next.
    #[inline]
    fn large_placement(&self) -> Option<tenmil_nvme_tcp::DataPlacement> {
        let place = self.protocol.next_direct_placement();
        place
            .filter(|place| place.len_bytes >= DIRECT_RECV_BYTES_MIN)
            .filter(|_| self.stream.buffered().is_empty())
    }

    /// Receives large data into `place`, and then those behind them.
    #[inline(never)]
    fn receive_large(
        &mut self,
        mut place: tenmil_nvme_tcp::DataPlacement,
        now: Instant,
        complete: &mut impl FnMut(CompletedCommand),
    ) {
        for _ in 0..DIRECT_RECVS {
            self.is_receiving_large = self.commands.len_bytes(place.tag) >= HEADER_ALONE_BYTES_MIN;
            let following = self.protocol.bytes_between_data();
            match self.receive_to(place, following, now, complete) {
                // A short receive has emptied the socket.
                RecvResult::Bytes(count) if count < place.len_bytes as usize + following => break,
                RecvResult::Bytes(_) => {}
                RecvResult::WouldBlock => break,
                RecvResult::Eof => {
                    self.handle_eof(complete);
                    break;
                }
                RecvResult::Failed(error) => {
                    self.set_lost(ConnectionLoss::Broken(error));
                    break;
                }
            }
            let Some(next) = self.large_placement() else { break };
            place = next;
        }
    }

    /// Receives data in place, and up to `following` bytes behind it, which it parses.
    #[inline]
    fn receive_to(
        &mut self,
        place: tenmil_nvme_tcp::DataPlacement,
        following: usize,
        now: Instant,
        complete: &mut impl FnMut(CompletedCommand),
    ) -> RecvResult {
        self.direct_segments.clear();
        self.commands.for_each_segment(place, |segment| self.direct_segments.push(segment));
        let received = if following > 0 {
            self.stream.receive_into_and_following(&self.direct_segments, following)
        } else {
            self.stream.receive_into(&self.direct_segments)
        };
        if let RecvResult::Bytes(count) = received {
            self.received += 1;
            let direct = u32::try_from(count).unwrap_or(u32::MAX).min(place.len_bytes);
            self.protocol.received_direct(now, direct, &mut self.events);
            self.handle_events(complete);
            self.parse_buffered(now, complete);
        }
        received
    }

    /// Parses the buffered bytes of the stream.
    #[inline]
    fn parse_buffered(&mut self, now: Instant, complete: &mut impl FnMut(CompletedCommand)) {
        loop {
            let Self { protocol, stream, events, commands, .. } = self;
            let bytes = stream.buffered();
            if bytes.is_empty() {
                return;
            }
            let consumed = protocol.receive(now, bytes, events);
            if consumed == 0 {
                return;
            }
            for event in events.as_slice() {
                if let HostEvent::Data { placement, at }
                | HostEvent::ReadCompleted { placement, at, .. } = *event
                {
                    commands.store_received(
                        placement,
                        &bytes[at as usize..][..placement.len_bytes as usize],
                    );
                }
            }
            stream.consume(consumed);
            self.handle_events(complete);
        }
    }

    /// Handles events, except for data, which has been stored already.
    #[inline]
    fn handle_events(&mut self, complete: &mut impl FnMut(CompletedCommand)) {
        let mut ended = None;
        // Queried once: a release in the meantime is found in the next iteration.
        let mut is_referenced = None;
        let mut has_small_io = false;
        for event in self.events.as_slice() {
            match *event {
                HostEvent::ReadCompleted { placement, cid, .. } => {
                    let mut completion = Completion::new(cid, Status::SUCCESS);
                    let flags = self.commands.entry(placement.tag).flags;
                    if flags != 0 {
                        self.in_place_only -= u32::from(flags & RECEIVE_IN_PLACE != 0);
                        completion = check_completion_flags(flags, completion);
                    }
                    has_small_io |= placement.len_bytes < write_pacing::LARGE;
                    self.outstanding -= 1;
                    complete(CompletedCommand { cid, completion });
                }
                HostEvent::Completed { tag, completion, .. } => {
                    let entry = self.commands.entry(tag);
                    let completion = match entry.flags {
                        0 => completion,
                        flags => {
                            self.in_place_only -= u32::from(flags & RECEIVE_IN_PLACE != 0);
                            check_completion_flags(flags, completion)
                        }
                    };
                    // Write data sent with MSG_ZEROCOPY: the completion is held until the kernel has
                    // released its memory.
                    let command = CompletedCommand { cid: completion.cid(), completion };
                    if entry.opcode & 0b11 == TO_CONTROLLER {
                        let consumed = self.sent_bytes;
                        let stream = &mut self.stream;
                        if *is_referenced.get_or_insert_with(|| stream.released_bytes() < consumed)
                        {
                            self.held_completions.push_back((consumed, command));
                            continue;
                        }
                    } else {
                        has_small_io =
                            has_small_io || self.commands.len_bytes(tag) < write_pacing::LARGE;
                    }
                    self.outstanding -= 1;
                    complete(command);
                }
                HostEvent::Ended(cause) => ended = Some(cause),
                HostEvent::Data { .. } | HostEvent::Open(_) => {}
            }
        }
        if has_small_io {
            write_pacing::note_small_completion();
        } else {
            self.is_receiving_large |= self.has_large_data();
        }
        self.events.clear();
        if let Some(cause) = ended {
            self.set_lost(ConnectionLoss::Ended(cause));
        }
    }

    /// Whether an event has data of a transfer of [`HEADER_ALONE_BYTES_MIN`] or more.
    fn has_large_data(&self) -> bool {
        self.events.as_slice().iter().any(|event| match event {
            HostEvent::Data { placement, .. } | HostEvent::ReadCompleted { placement, .. } => {
                self.commands.len_bytes(placement.tag) >= HEADER_ALONE_BYTES_MIN
            }
            HostEvent::Completed { .. } | HostEvent::Ended(_) | HostEvent::Open(_) => false,
        })
    }

    /// Delivers held completions whose data the stream has released.
    #[cold]
    fn deliver_released(&mut self, complete: &mut impl FnMut(CompletedCommand)) {
        let released = self.stream.released_bytes();
        while let Some((_, command)) =
            self.held_completions.pop_front_if(|(protocol, _)| *protocol <= released)
        {
            self.outstanding -= 1;
            complete(command);
        }
    }

    /// Handles the end of the stream.
    #[cold]
    fn handle_eof(&mut self, complete: &mut impl FnMut(CompletedCommand)) {
        self.protocol.handle_eof(self.stream.buffered().len(), &mut self.events);
        self.handle_events(complete);
    }

    /// When [`check_timeouts`](Self::check_timeouts) is due.
    pub(crate) fn deadline(&self) -> Instant {
        if self.lost.is_some() { Instant::NEVER } else { self.protocol.deadline() }
    }

    /// Ends the connection if a timeout of the peer has expired.
    pub(crate) fn check_timeouts(&mut self, now: Instant) {
        if now >= self.deadline() {
            self.protocol.handle_deadline(now, &mut self.events);
            self.handle_events(&mut |_| {});
        }
    }

    #[cold]
    fn set_lost(&mut self, lost: ConnectionLoss) {
        if self.lost.is_some() {
            return;
        }
        if let ConnectionLoss::Ended(CloseReason::ProtocolError(_)) = lost {
            // Reports the cause to the peer by a termination request, if there is space.
            self.slices.clear();
            let headers = |piece: &SendPiece| match *piece {
                SendPiece::Headers { at, len_bytes } => Some(SendSlice::Headers { at, len_bytes }),
                SendPiece::Payload { .. } => None,
            };
            if self.protocol.send_pieces().len() == 1 {
                self.slices.extend(self.protocol.send_pieces().iter().filter_map(headers));
                // The connection is lost in either case.
                let _ = self.stream.send(self.protocol.header_bytes(), &self.slices, false);
            }
            self.stream.shutdown_write();
        }
        self.lost = Some(lost);
    }

    pub(crate) fn wake_source(&self) -> WakeSource<'_> {
        self.stream.wake_source()
    }

    /// Like [`Stream::arm`]: true if there is work already.
    pub(crate) fn arm(&mut self) -> bool {
        let wants_space = !self.protocol.send_pieces().is_empty();
        // The budget of an iteration limits sends: the socket does not signal for the rest.
        let has_unsent = !wants_space && self.protocol.has_more();
        has_unsent
            || self.lost.is_some()
            || self.poll_releases()
            || self.stream.arm(true, wants_space)
    }

    /// Consumes release notifications of the kernel, which would otherwise end every sleep at once.
    /// Returns true if a completion can be delivered now.
    fn poll_releases(&mut self) -> bool {
        if self.released_bytes == self.sent_bytes {
            return false;
        }
        self.released_bytes = self.stream.released_bytes();
        self.held_completions.front().is_some_and(|(protocol, _)| *protocol <= self.released_bytes)
    }

    pub(crate) fn disarm(&mut self) {
        self.stream.disarm();
    }
}

/// Data transfer of `command`, by the low bits of its opcode (NVM Express Base 2.1, section 3.3.2), of
/// which at most one is set.
#[inline]
pub(crate) fn direction_of(command: &Command, len_bytes: u32) -> DataDirection {
    match command.opcode() & 0b11 {
        0b10 => DataDirection::ToHost(len_bytes),
        TO_CONTROLLER => DataDirection::FromHost(len_bytes),
        _ => DataDirection::None,
    }
}

/// Status of a command with an exceptional condition.
#[cold]
fn check_completion_flags(flags: u8, completion: Completion) -> Completion {
    if flags & STORE_FAILED != 0 && completion.status().is_success() {
        completion.with_status(Status::DATA_TRANSFER_ERROR)
    } else {
        completion
    }
}

impl core::fmt::Display for ConnectionLoss {
    fn fmt(&self, out: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self {
            Self::Broken(error) => error.fmt(out),
            Self::Stalled(waited) => write!(
                out,
                "nothing came over the connection of a queue for {}, expected an answer",
                Span::from_ms(waited.ns / 1_000_000)
            ),
            Self::Ended(cause) => match cause {
                CloseReason::ProtocolError(error) => {
                    write!(out, "the peer sent an invalid PDU: {error}")
                }
                CloseReason::Terminated(error) => {
                    write!(out, "the peer has terminated the connection: {error}")
                }
                CloseReason::InvalidTermination => {
                    out.write_str("the peer has sent an invalid termination request")
                }
                CloseReason::ConnectTimeout => {
                    out.write_str("the peer has not opened the connection in time")
                }
                CloseReason::PduTimeout => {
                    out.write_str("the peer has not completed a PDU in time")
                }
                CloseReason::Closed => out.write_str("the peer has closed the connection"),
                CloseReason::TruncatedPdu => out.write_str("the connection has ended within a PDU"),
            },
        }
    }
}
