//! Both ends with simulated owner, and a stream between them with arbitrary fragmentation.

use std::collections::{BTreeMap, BTreeSet};

use tenmil_base::{Instant, Random};
use tenmil_wire::tcp::{FatalError, crc32c};
use tenmil_wire::{Command, Completion, Status};

use crate::{
    CloseReason, Connection, ControllerConfig, ControllerConnection, ControllerEvent,
    DataDirection, DataPlacement, DataTransfer, EventQueue, HostConfig, HostConnection, HostEvent,
    NegotiatedParams, PayloadDigest, SendPiece,
};

/// Buffers of commands, by tag.
#[derive(Debug, Default)]
pub(super) struct CommandBuffers(pub(super) BTreeMap<u16, Vec<u8>>);

impl PayloadDigest for CommandBuffers {
    fn data_digest(&self, tag: u16, offset: u32, len_bytes: u32) -> u32 {
        crc32c(&self.0[&tag][offset as usize..][..len_bytes as usize])
    }
}

impl CommandBuffers {
    fn store(&mut self, placement: DataPlacement, bytes: &[u8], at: u32) {
        let from = &bytes[at as usize..][..placement.len_bytes as usize];
        let into = &mut self.0.get_mut(&placement.tag).unwrap()[placement.offset as usize..];
        into[..from.len()].copy_from_slice(from);
    }

    fn gather(&self, pieces: &[SendPiece], headers: &[u8], limit: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        for piece in pieces {
            match *piece {
                SendPiece::Headers { at, len_bytes } => {
                    bytes.extend(&headers[at as usize..][..len_bytes as usize]);
                }
                SendPiece::Payload { tag, offset, len_bytes } => {
                    bytes.extend(&self.0[&tag][offset as usize..][..len_bytes as usize]);
                }
            }
            if bytes.len() >= limit {
                break;
            }
        }
        bytes.truncate(limit);
        bytes
    }
}

/// Data of command `command_number`.
pub(super) fn pattern_bytes(command_number: u16, len: u32) -> Vec<u8> {
    (0..len)
        .map(|at| {
            (at.wrapping_mul(31) ^ (at >> 8) ^ (u32::from(command_number) * 7)).to_le_bytes()[0]
        })
        .collect()
}

/// Event, independent of the fragmentation of the stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum SessionEvent {
    Open(NegotiatedParams),
    Command { cid: u16, data: Result<DataTransfer, Status> },
    Data { offset: u32, len_bytes: u32 },
    DataComplete { is_intact: bool },
    Sent,
    Completed { status: Status, transferred_bytes: u32, bytes: Vec<u8> },
    Ended(CloseReason),
}

fn record_event(log: &mut Vec<(u16, SessionEvent)>, tag: u16, entry: SessionEvent) {
    if let (
        Some((last, SessionEvent::Data { offset, len_bytes })),
        SessionEvent::Data { offset: next, len_bytes: more },
    ) = (log.last_mut(), &entry)
        && (*last, *offset + *len_bytes) == (tag, *next)
    {
        *len_bytes += more;
        return;
    }
    log.push((tag, entry));
}

/// One end, the state of its owner, and all its events.
#[derive(Debug)]
pub(super) struct TestEndpoint<E: Connection, O> {
    pub(super) connection: E,
    pub(super) owner: O,
    pub(super) memory: CommandBuffers,
    pub(super) log: Vec<(u16, SessionEvent)>,
    /// Received bytes that were not consumed.
    pub(super) unconsumed: Vec<u8>,
    events: EventQueue<E::Event>,
    /// Data are received directly into their buffers where possible.
    pub(super) is_direct: bool,
}

/// Event handling of one end.
pub(super) trait HandleEvents {
    /// Handles the pending events; `bytes` are the received bytes that they refer to.
    fn handle(&mut self, bytes: &[u8]);
}

impl<E: Connection, O> TestEndpoint<E, O> {
    fn with(connection: E, owner: O) -> Self {
        Self {
            connection,
            owner,
            memory: CommandBuffers::default(),
            log: Vec::new(),
            unconsumed: Vec::new(),
            events: EventQueue::with_capacity(8),
            is_direct: false,
        }
    }

    pub(super) fn close_reason(&self) -> Option<CloseReason> {
        self.log.iter().find_map(|(_, entry)| match entry {
            SessionEvent::Ended(close_reason) => Some(*close_reason),
            _ => None,
        })
    }

    /// Records data that were received into their buffer.
    fn record_data(&mut self, placement: DataPlacement) {
        let DataPlacement { tag, offset, len_bytes } = placement;
        record_event(&mut self.log, tag, SessionEvent::Data { offset, len_bytes });
    }
}

impl<E: Connection, O> TestEndpoint<E, O>
where
    Self: HandleEvents,
{
    /// The next at most `limit` bytes to send.
    pub(super) fn send(&mut self, limit: usize) -> Vec<u8> {
        self.connection.fill_send_queue(&self.memory);
        let bytes = self.memory.gather(
            self.connection.send_pieces(),
            self.connection.header_bytes(),
            limit,
        );
        self.connection.record_sent(bytes.len(), &mut self.events);
        self.handle(&[]);
        bytes
    }

    pub(super) fn receive(&mut self, now: Instant, mut bytes: &[u8]) {
        if self.is_direct
            && self.unconsumed.is_empty()
            && let Some(placement) = self.connection.next_direct_placement()
        {
            let count = bytes.len().min(placement.len_bytes as usize);
            let direct = DataPlacement { len_bytes: u32::try_from(count).unwrap(), ..placement };
            self.memory.store(direct, bytes, 0);
            self.record_data(direct);
            self.connection.received_direct(now, direct.len_bytes, &mut self.events);
            self.handle(&[]);
            bytes = &bytes[count..];
        }
        self.unconsumed.extend_from_slice(bytes);
        loop {
            let unconsumed = core::mem::take(&mut self.unconsumed);
            let consumed = self.connection.receive(now, &unconsumed, &mut self.events);
            let had_events = !self.events.as_slice().is_empty();
            self.handle(&unconsumed);
            self.unconsumed = unconsumed[consumed..].to_vec();
            if consumed == 0 && !had_events {
                break;
            }
        }
    }

    pub(super) fn handle_deadline(&mut self, now: Instant) {
        self.connection.handle_deadline(now, &mut self.events);
        self.handle(&[]);
    }

    pub(super) fn handle_eof(&mut self) {
        self.connection.handle_eof(self.unconsumed.len(), &mut self.events);
        self.handle(&[]);
    }
}

/// Host with its owner.
pub(super) type HostEndpoint = TestEndpoint<HostConnection, ()>;

impl HostEndpoint {
    pub(super) fn new(config: HostConfig) -> Self {
        Self::with(HostConnection::new(config, Instant::default()), ())
    }

    pub(super) fn submit(&mut self, opcode: u8, data: DataDirection, command_number: u16) -> u16 {
        let tag = self.try_submit(opcode, data, command_number);
        tag.expect("a tag is free")
    }

    pub(super) fn try_submit(
        &mut self,
        opcode: u8,
        data: DataDirection,
        command_number: u16,
    ) -> Option<u16> {
        let tag = self.connection.next_tag()?;
        let bytes = match data {
            DataDirection::FromHost(len) => pattern_bytes(command_number, len),
            DataDirection::ToHost(len) => vec![0; len as usize],
            DataDirection::None => Vec::new(),
        };
        self.memory.0.insert(tag, bytes);
        let command = Command::new(opcode).with_cdw10(command_number.into());
        let assigned = self.connection.submit(&command, data, &self.memory).ok()?;
        assert_eq!(assigned, tag);
        Some(tag)
    }

    pub(super) fn completions(&self) -> Vec<(Status, u32)> {
        let each = self.log.iter().filter_map(|(_, entry)| match entry {
            SessionEvent::Completed { status, transferred_bytes, .. } => {
                Some((*status, *transferred_bytes))
            }
            _ => None,
        });
        each.collect()
    }
}

impl HandleEvents for HostEndpoint {
    fn handle(&mut self, bytes: &[u8]) {
        for event in self.events.as_slice().iter().flat_map(|event| event.split_read_completed()) {
            match event {
                HostEvent::Open(params) => {
                    record_event(&mut self.log, u16::MAX, SessionEvent::Open(params))
                }
                HostEvent::Data { placement, at } => {
                    self.memory.store(placement, bytes, at);
                    let (offset, len_bytes) = (placement.offset, placement.len_bytes);
                    record_event(
                        &mut self.log,
                        placement.tag,
                        SessionEvent::Data { offset, len_bytes },
                    );
                }
                HostEvent::Completed { tag, completion, transferred_bytes } => {
                    let bytes = self.memory.0[&tag].clone();
                    let status = completion.status();
                    record_event(
                        &mut self.log,
                        tag,
                        SessionEvent::Completed { status, transferred_bytes, bytes },
                    );
                }
                HostEvent::Ended(close_reason) => {
                    record_event(&mut self.log, u16::MAX, SessionEvent::Ended(close_reason))
                }
                HostEvent::ReadCompleted { .. } => unreachable!("split() never returns it"),
            }
        }
        self.events.clear();
    }
}

/// Behavior of the controller's owner.
#[derive(Clone, Copy, Debug)]
pub(super) struct ControllerOwnerBehavior {
    /// Largest number of bytes per call of `request_data`.
    pub(super) request_bytes_max: u32,
    /// Number of bytes per call of `send_data`.
    pub(super) send_bytes_max: u32,
    /// Status of the completions.
    pub(super) status: Status,
    /// Commands with data from the host are completed at once, without their data.
    pub(super) completes_early: bool,
    /// Commands are not completed.
    pub(super) completes_nothing: bool,
}

impl Default for ControllerOwnerBehavior {
    fn default() -> Self {
        Self {
            request_bytes_max: u32::MAX,
            send_bytes_max: u32::MAX,
            status: Status::SUCCESS,
            completes_early: false,
            completes_nothing: false,
        }
    }
}

/// State of the controller's owner.
#[derive(Debug, Default)]
pub(super) struct ControllerOwner {
    pub(super) behavior: ControllerOwnerBehavior,
    /// Bytes of each tag that are not requested yet.
    unrequested: BTreeMap<u16, u32>,
    /// Tags of completed commands, whose remaining events of a batch are ignored.
    completed: BTreeSet<u16>,
    /// Command of each tag.
    commands: BTreeMap<u16, (Command, Result<DataTransfer, Status>)>,
}

/// Controller with its owner.
pub(super) type ControllerEndpoint = TestEndpoint<ControllerConnection, ControllerOwner>;

impl HandleEvents for ControllerEndpoint {
    fn handle(&mut self, bytes: &[u8]) {
        for event in self.events.as_slice().to_vec() {
            match event {
                ControllerEvent::Open(params) => {
                    record_event(&mut self.log, u16::MAX, SessionEvent::Open(params))
                }
                ControllerEvent::Command { tag, command, data } => {
                    record_event(
                        &mut self.log,
                        tag,
                        SessionEvent::Command { cid: command.cid(), data },
                    );
                    self.owner.commands.insert(tag, (command, data));
                    self.owner.completed.remove(&tag);
                    self.begin(tag, command, data);
                }
                ControllerEvent::Data { placement, .. }
                    if self.owner.completed.contains(&placement.tag) => {}
                ControllerEvent::DataComplete { tag, .. }
                    if self.owner.completed.contains(&tag) => {}
                ControllerEvent::Data { placement, at } => {
                    self.memory.store(placement, bytes, at);
                    let (offset, len_bytes) = (placement.offset, placement.len_bytes);
                    record_event(
                        &mut self.log,
                        placement.tag,
                        SessionEvent::Data { offset, len_bytes },
                    );
                    self.request_next_range(placement.tag, offset + len_bytes);
                }
                ControllerEvent::DataComplete { tag, is_intact } => {
                    record_event(&mut self.log, tag, SessionEvent::DataComplete { is_intact });
                    let (command, _) = self.owner.commands[&tag];
                    if is_intact {
                        let len = u32::try_from(self.memory.0[&tag].len()).unwrap();
                        let expected = pattern_bytes(command_number(command), len);
                        assert!(self.memory.0[&tag] == expected, "data of {command:?}");
                    }
                    self.complete(tag, 0);
                }
                ControllerEvent::Sent { tag } => {
                    record_event(&mut self.log, tag, SessionEvent::Sent);
                    self.owner.commands.remove(&tag);
                }
                ControllerEvent::Ended(close_reason) => {
                    record_event(&mut self.log, u16::MAX, SessionEvent::Ended(close_reason))
                }
            }
        }
        self.events.clear();
    }
}

impl ControllerEndpoint {
    pub(super) fn new(config: ControllerConfig) -> Self {
        Self::with(
            ControllerConnection::new(config, Instant::default()),
            ControllerOwner::default(),
        )
    }

    fn begin(&mut self, tag: u16, command: Command, data: Result<DataTransfer, Status>) {
        let len = match data {
            Ok(DataTransfer::InCapsule(len) | DataTransfer::FromHost(len)) => len,
            Ok(DataTransfer::ToHost(len)) => {
                self.memory.0.insert(tag, pattern_bytes(command_number(command), len));
                if !self.owner.behavior.completes_nothing {
                    self.send_read_data(tag, len);
                }
                return;
            }
            Ok(DataTransfer::None) => return self.complete(tag, 0),
            Err(status) => {
                return self.connection.complete(tag, 0, Completion::new(0, status)).unwrap();
            }
        };
        self.memory.0.insert(tag, vec![0; len as usize]);
        if self.owner.behavior.completes_early {
            if matches!(data, Ok(DataTransfer::FromHost(_))) {
                self.connection.request_data(tag, len).unwrap();
                self.connection.fill_send_queue(&self.memory);
            }
            return self.complete(tag, 0);
        }
        if let Ok(DataTransfer::FromHost(len)) = data {
            let first = len.min(self.owner.behavior.request_bytes_max);
            self.owner.unrequested.insert(tag, len - first);
            self.connection.request_data(tag, first).unwrap();
        }
    }

    /// Requests the next part after the previous one was received.
    fn request_next_range(&mut self, tag: u16, received: u32) {
        let Some((_, Ok(DataTransfer::FromHost(len)))) = self.owner.commands.get(&tag).copied()
        else {
            return;
        };
        let left = self.owner.unrequested[&tag];
        if left > 0 && received == len - left {
            let next = left.min(self.owner.behavior.request_bytes_max);
            self.owner.unrequested.insert(tag, left - next);
            self.connection.request_data(tag, next).unwrap();
        }
    }

    fn send_read_data(&mut self, tag: u16, len: u32) {
        let mut left = len;
        while left > self.owner.behavior.send_bytes_max {
            self.connection.send_data(tag, self.owner.behavior.send_bytes_max).unwrap();
            left -= self.owner.behavior.send_bytes_max;
        }
        self.complete(tag, left);
    }

    pub(super) fn complete(&mut self, tag: u16, len: u32) {
        if !self.owner.behavior.completes_nothing {
            self.owner.completed.insert(tag);
            self.connection
                .complete(tag, len, Completion::new(0, self.owner.behavior.status))
                .unwrap();
        }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "numbers are small")]
fn command_number(command: Command) -> u16 {
    command.cdw10() as u16
}

/// Host and controller.
#[derive(Debug)]
pub(super) struct ConnectedPair {
    pub(super) host: HostEndpoint,
    pub(super) controller: ControllerEndpoint,
    /// All bytes sent in each direction.
    pub(super) to_controller: Vec<u8>,
    pub(super) to_host: Vec<u8>,
}

impl ConnectedPair {
    pub(super) fn new(host: HostConfig, controller: ControllerConfig) -> Self {
        Self {
            host: HostEndpoint::new(host),
            controller: ControllerEndpoint::new(controller),
            to_controller: Vec::new(),
            to_host: Vec::new(),
        }
    }

    /// Pair with an open connection.
    pub(super) fn open(host: HostConfig, controller: ControllerConfig) -> Self {
        let mut pair = Self::new(host, controller);
        pair.exchange_until_idle(&mut |_| usize::MAX);
        pair
    }

    /// Moves bytes until neither end sends any more. `limit` limits each step.
    pub(super) fn exchange_until_idle(&mut self, limit: &mut dyn FnMut(usize) -> usize) {
        let now = Instant::default();
        let mut iteration = 0;
        loop {
            iteration += 1;
            let up = self.host.send(limit(iteration).max(1));
            self.controller.receive(now, &up);
            let down = self.controller.send(limit(iteration + 1).max(1));
            self.host.receive(now, &down);
            if up.is_empty() && down.is_empty() {
                return;
            }
            self.to_controller.extend(up);
            self.to_host.extend(down);
        }
    }
}

/// Random fragment sizes, mostly small.
pub(super) fn random_fragments(seed: u64) -> impl FnMut(usize) -> usize {
    let mut random = Random::new(seed);
    move |_| {
        let bound = 1 << random.below(14);
        usize::try_from(random.below(bound)).unwrap() + 1
    }
}

pub(super) fn closed_by_protocol_error(refusal: FatalError) -> Option<CloseReason> {
    Some(CloseReason::ProtocolError(refusal))
}
