//! Connection to a front end: negotiation, queue configuration and requests.
//!
//! ```text
//!   message ──▶ valid? ── yes ──▶ answered here: features, configuration space
//!                  │          └─▶ Request ──▶ owner ── done, refuse, base … ──▶ reply
//!                  no
//!                  ├── acknowledgement requested: reply with an error
//!                  └── else the connection ends
//! ```
//!
//! Messages are executed in order, one at a time: while the owner has not answered one, nothing is
//! received.
//!
//! A queue starts when everything that it needs is set (size, addresses, kick, and that it is
//! enabled). It stops when one of them is removed or its base is requested.

use std::collections::VecDeque;

use crate::features::{device, protocol};
use crate::message_parser::{Message, MessageParser};
use crate::message_types::{
    AREA_BYTES, BACKEND_CONFIG_CHANGE_MSG, CONFIG_FIELDS, CONFIG_MAX, HEADER_BYTES, MessageType,
    REPLY, TABLE_MAX, VERSION,
};
use crate::payload::{
    check_files, check_inflight_buffer, field_violation, parse_get_inflight, parse_memory_change,
    parse_memory_region,
};
use crate::payload_reader::PayloadReader;
use crate::request::{
    BackendConfig, InflightBuffer, MemoryChange, OwnerRequest, PendingReply, QueueStartParams,
    ReplyDisposition,
};
use crate::violation::Violation;
use crate::vring::QUEUE_SIZE_MAX;

/// Connection to a front end.
#[derive(Debug)]
pub struct Server<F> {
    offer: BackendConfig,
    inbox: MessageParser<F>,
    outbox: VecDeque<OutgoingMessage<F>>,
    /// Bytes of the first queued message that were sent.
    sent_bytes: usize,
    message: Option<Message<F>>,
    is_awaiting_reply: bool,
    /// Negotiated device and protocol features.
    features: u64,
    protocol: u64,
    queues: Vec<VringState<F>>,
    /// Last rejected message that did not end the connection.
    refused: Option<Violation>,
}

/// Queue configuration received from the front end.
#[derive(Debug)]
struct VringState<F> {
    size: u16,
    base: u16,
    addresses: Option<[u64; 3]>,
    kick: Option<KickFile<F>>,
    is_enabled: bool,
    is_running: bool,
}

#[derive(Clone, Debug)]
struct KickFile<F>(Option<F>);

/// Queued message.
#[derive(Debug)]
struct OutgoingMessage<F> {
    bytes: Vec<u8>,
    file: Option<F>,
}

/// Message of the back end that reports changed configuration space: a header without payload.
pub const CONFIG_CHANGED: [u8; HEADER_BYTES] = {
    let mut message = [0; HEADER_BYTES];
    message[0] = BACKEND_CONFIG_CHANGE_MSG.to_le_bytes()[0];
    message[4] = VERSION.to_le_bytes()[0];
    message
};

/// Number of queued replies at which the front end is not read from.
const WAITING_MAX: usize = 64;
/// Flag of a kick or call message: no descriptor is attached, and none is wanted.
const NO_FILE: u64 = 1 << 8;

impl<F: Clone> Server<F> {
    /// Creates a connection that offers `offer`.
    pub fn new(offer: BackendConfig) -> Self {
        let queues = (0..offer.queues).map(|_| VringState::new()).collect();
        Self {
            offer,
            inbox: MessageParser::new(),
            outbox: VecDeque::new(),
            sent_bytes: 0,
            message: None,
            is_awaiting_reply: false,
            features: 0,
            protocol: 0,
            queues,
            refused: None,
        }
    }

    /// Number of bytes to receive next. Zero while a message is being executed or the front end
    /// does not read its replies.
    pub fn receive_len(&self) -> usize {
        let is_busy = self.is_awaiting_reply || self.message.is_some();
        if is_busy || self.outbox.len() >= WAITING_MAX { 0 } else { self.inbox.receive_len() }
    }

    /// Whether a message was received in part.
    pub fn has_partial_message(&self) -> bool {
        self.inbox.has_partial_message()
    }

    /// Receives at most [`receive_len`](Self::receive_len) bytes and the descriptors that arrived with them.
    ///
    /// # Errors
    ///
    /// If the stream cannot be parsed any further; the connection must be closed.
    pub fn receive(
        &mut self,
        bytes: &[u8],
        files: impl IntoIterator<Item = F>,
    ) -> Result<(), Violation> {
        self.message = self.inbox.receive(bytes, files)?;
        Ok(())
    }

    /// Next request to the owner, if any.
    ///
    /// # Errors
    ///
    /// If a message is invalid and the front end did not request an acknowledgement; the connection
    /// must be closed.
    pub fn next_request(&mut self) -> Result<Option<OwnerRequest<F>>, Violation> {
        let Some(message) = self.message.take() else { return Ok(None) };
        let (code, wants_reply) = (message.code, message.wants_reply);
        match self.execute_message(message) {
            Ok(request) => {
                self.is_awaiting_reply = request.is_some();
                Ok(request)
            }
            Err(violation) => {
                let is_question = code.rule().is_some_and(|rule| rule.is_question);
                let is_told =
                    wants_reply && !is_question && self.has_protocol_feature(protocol::REPLY_ACK);
                if !is_told || !violation.leaves_stream_readable() {
                    return Err(violation);
                }
                self.acknowledge(code, false);
                self.refused = Some(violation);
                Ok(None)
            }
        }
    }

    /// Removes and returns the last rejected message that did not end the connection.
    pub fn take_rejection(&mut self) -> Option<Violation> {
        self.refused.take()
    }

    /// Replies that a message succeeded.
    pub fn reply_success(&mut self, call: PendingReply) {
        self.is_awaiting_reply = false;
        if call.wants_reply {
            self.acknowledge(call.code, true);
        }
    }

    /// Replies that a message failed. Returns whether the front end was informed.
    pub fn reply_error(&mut self, call: PendingReply) -> ReplyDisposition {
        self.is_awaiting_reply = false;
        if call.code == MessageType::SET_VRING_KICK || call.code == MessageType::SET_VRING_ENABLE {
            self.queues[usize::from(call.queue)].is_running = false;
        }
        let is_question = call.code.rule().is_some_and(|rule| rule.is_question);
        if !call.wants_reply || is_question {
            return ReplyDisposition::NotReported;
        }
        self.acknowledge(call.code, false);
        ReplyDisposition::Reported
    }

    /// Replies that a queue has stopped and accesses nothing any more. `next` is its next available
    /// index.
    pub fn reply_queue_stopped(&mut self, call: PendingReply, next: u16) {
        self.queues[usize::from(call.queue)].base = next;
        if call.code == MessageType::GET_VRING_BASE {
            self.is_awaiting_reply = false;
            self.reply_vring_base(call.queue);
        } else {
            self.reply_success(call);
        }
    }

    /// Replies with a new inflight buffer.
    pub fn reply_inflight(&mut self, call: PendingReply, area: InflightBuffer, file: F) {
        self.is_awaiting_reply = false;
        let mut payload = [area.len_bytes, area.file_offset].map(u64::to_le_bytes).concat();
        payload.extend([area.queues, area.size].map(u16::to_le_bytes).concat());
        // As long as the request, which some compilers pad.
        payload.resize(call.payload_bytes, 0);
        self.queue_reply(call.code, &payload, Some(file));
    }

    /// Replaces the configuration space. Returns whether the front end reads it by message, and so
    /// can be notified.
    pub fn set_config(&mut self, config: Vec<u8>) -> bool {
        self.offer.config = config;
        self.has_protocol_feature(protocol::CONFIG)
    }

    /// Next message to send, and the descriptor to send with its first byte.
    pub fn next_outgoing(&self) -> Option<(&[u8], Option<&F>)> {
        let first = self.outbox.front()?;
        let file = first.file.as_ref().filter(|_| self.sent_bytes == 0);
        Some((&first.bytes[self.sent_bytes..], file))
    }

    /// Records that `count` bytes of it were sent.
    pub fn record_sent(&mut self, count: usize) {
        self.sent_bytes += count;
        if self.outbox.front().is_some_and(|first| self.sent_bytes >= first.bytes.len()) {
            self.outbox.pop_front();
            self.sent_bytes = 0;
        }
    }

    fn has_protocol_feature(&self, feature: u64) -> bool {
        self.protocol & feature != 0
    }

    fn queue_reply(&mut self, code: MessageType, payload: &[u8], file: Option<F>) {
        let size = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        let mut bytes = [code.0, VERSION | REPLY, size].map(u32::to_le_bytes).concat();
        bytes.extend_from_slice(payload);
        self.outbox.push_back(OutgoingMessage { bytes, file });
    }

    fn queue_u64_reply(&mut self, code: MessageType, word: u64) {
        self.queue_reply(code, &word.to_le_bytes(), None);
    }

    /// Queues an acknowledgement; zero means success.
    fn acknowledge(&mut self, code: MessageType, is_done: bool) {
        self.queue_u64_reply(code, u64::from(!is_done));
    }

    fn reply_vring_base(&mut self, queue: u16) {
        let base = self.queues[usize::from(queue)].base;
        let payload = [u32::from(queue), base.into()].map(u32::to_le_bytes).concat();
        self.queue_reply(MessageType::GET_VRING_BASE, &payload, None);
    }

    /// Executes a message, or turns it into a request to the owner.
    fn execute_message(
        &mut self,
        message: Message<F>,
    ) -> Result<Option<OwnerRequest<F>>, Violation> {
        let code = message.code;
        let rule = code.rule().ok_or(Violation::NotOffered { code })?;
        if rule.with_required_feature != 0 && !self.has_protocol_feature(rule.with_required_feature)
        {
            return Err(Violation::NotOffered { code });
        }
        check_files(rule, message.files.len())?;
        let wants_ack = message.wants_reply
            && !rule.is_question
            && self.has_protocol_feature(protocol::REPLY_ACK);
        let payload_bytes = message.payload.len();
        let call = PendingReply { code, wants_reply: wants_ack, queue: 0, payload_bytes };
        match code {
            MessageType::GET_FEATURES => {
                let features = self.offer.features | device::PROTOCOL_FEATURES;
                self.queue_u64_reply(code, features);
            }
            MessageType::GET_PROTOCOL_FEATURES => self.queue_u64_reply(code, protocol::OURS),
            MessageType::GET_QUEUE_NUM => self.queue_u64_reply(code, self.offer.queues.into()),
            MessageType::GET_MAX_MEM_SLOTS => self.queue_u64_reply(code, self.offer.slots.into()),
            MessageType::GET_CONFIG => {
                let payload = self.read_config_space(&message.payload)?;
                self.queue_reply(code, &payload, None);
            }
            MessageType::SET_BACKEND_REQ_FD => {
                let file = message.files.into_iter().next();
                return Ok(file.map(|file| OwnerRequest::SetBackChannel { call, file }));
            }
            MessageType::GET_INFLIGHT_FD => return parse_get_inflight(call, &message).map(Some),
            MessageType::SET_INFLIGHT_FD => return self.set_inflight(call, message).map(Some),
            MessageType::SET_MEM_TABLE => return self.set_memory_table(call, message).map(Some),
            MessageType::ADD_MEM_REG | MessageType::REM_MEM_REG => {
                return parse_memory_change(call, message).map(Some);
            }
            MessageType::SET_VRING_KICK
            | MessageType::SET_VRING_CALL
            | MessageType::SET_VRING_ERR
            | MessageType::SET_VRING_ENABLE
            | MessageType::GET_VRING_BASE => return self.execute_queue_message(call, message),
            _ => {
                self.execute_setter(&message)?;
                self.reply_success(call);
            }
        }
        Ok(None)
    }

    /// Executes a message that only sets values.
    fn execute_setter(&mut self, message: &Message<F>) -> Result<(), Violation> {
        let code = message.code;
        let mut fields = PayloadReader(&message.payload);
        match code {
            MessageType::SET_FEATURES => {
                let found = fields.u64();
                if found & !(self.offer.features | device::PROTOCOL_FEATURES) != 0 {
                    return Err(field_violation(
                        code,
                        "features",
                        found,
                        "no more than was offered",
                    ));
                }
                if found != self.features && self.queues.iter().any(|queue| queue.is_running) {
                    return Err(field_violation(
                        code,
                        "features",
                        found,
                        "the same while queues run",
                    ));
                }
                self.features = found;
            }
            MessageType::SET_PROTOCOL_FEATURES => {
                let found = fields.u64();
                if found & !protocol::OURS != 0 {
                    return Err(field_violation(
                        code,
                        "features",
                        found,
                        "no more than was offered",
                    ));
                }
                self.protocol = found;
            }
            // Ownership is implied by the connection.
            MessageType::SET_OWNER | MessageType::RESET_OWNER => {}
            MessageType::SET_CONFIG => {
                let found = fields.u32().into();
                return Err(field_violation(
                    code,
                    "offset",
                    found,
                    "nothing: no field can be written",
                ));
            }
            MessageType::SET_VRING_NUM => {
                let (queue, found) = (self.stopped_queue_mut(code, fields.u32())?, fields.u32());
                let is_right = found.is_power_of_two() && found <= QUEUE_SIZE_MAX.into();
                let size = u16::try_from(found).ok().filter(|_| is_right).ok_or(
                    field_violation(code, "num", found.into(), "a power of two up to 1024"),
                )?;
                queue.size = size;
            }
            MessageType::SET_VRING_BASE => {
                let (queue, found) = (self.stopped_queue_mut(code, fields.u32())?, fields.u32());
                let base = u16::try_from(found);
                queue.base = base.map_err(|_| {
                    field_violation(code, "num", found.into(), "an index of 16 bits")
                })?;
            }
            MessageType::SET_VRING_ADDR => {
                let queue = self.stopped_queue_mut(code, fields.u32())?;
                let flags = fields.u32();
                if flags != 0 {
                    return Err(field_violation(
                        code,
                        "flags",
                        flags.into(),
                        "0: nothing is logged",
                    ));
                }
                let (descriptors, used, available) = (fields.u64(), fields.u64(), fields.u64());
                let places = [
                    ("descriptor table", descriptors, 16, "a multiple of 16"),
                    ("available ring", available, 2, "a multiple of 2"),
                    ("used ring", used, 4, "a multiple of 4"),
                ];
                for (field, found, unit, expected) in places {
                    if found % unit != 0 {
                        return Err(field_violation(code, field, found, expected));
                    }
                }
                queue.addresses = Some([descriptors, available, used]);
            }
            _ => return Err(Violation::NotOffered { code }),
        }
        Ok(())
    }

    /// Executes a message that may start or stop a queue.
    fn execute_queue_message(
        &mut self,
        call: PendingReply,
        message: Message<F>,
    ) -> Result<Option<OwnerRequest<F>>, Violation> {
        let code = call.code;
        let mut fields = PayloadReader(&message.payload);
        let file = message.files.into_iter().next();
        if code == MessageType::SET_VRING_ENABLE {
            let (index, found) = (fields.u32(), fields.u32());
            let queue = self.queue_mut(code, index)?;
            if found > 1 {
                return Err(field_violation(code, "num", found.into(), "0 or 1"));
            }
            queue.is_enabled = found == 1;
            return Ok(self.start_or_stop_queue_if_due(call, index));
        }
        if code == MessageType::GET_VRING_BASE {
            let index = fields.u32();
            let queue = self.queue_mut(code, index)?;
            queue.kick = None;
            return Ok(match self.start_or_stop_queue_if_due(call, index) {
                None => {
                    self.reply_vring_base(u16::try_from(index).unwrap_or(0));
                    None
                }
                stop => stop,
            });
        }
        let found = fields.u64();
        let (index, has_none) = (u32::try_from(found & 0xff).unwrap_or(0), found & NO_FILE != 0);
        if found & !(NO_FILE | 0xff) != 0 {
            return Err(field_violation(code, "payload", found, "a queue, and bit 8"));
        }
        let queue = self.queue_mut(code, index)?;
        if has_none == file.is_some() {
            let (found, least) = (usize::from(has_none), usize::from(!has_none));
            return Err(Violation::Files { code, found, expected: (least, least) });
        }
        match code {
            MessageType::SET_VRING_CALL => {
                let queue = u16::try_from(index).unwrap_or(0);
                Ok(Some(OwnerRequest::SetCall {
                    call: PendingReply { queue, ..call },
                    queue,
                    file,
                }))
            }
            MessageType::SET_VRING_KICK if queue.is_running => {
                Err(field_violation(code, "payload", found, "a queue that does not run"))
            }
            MessageType::SET_VRING_KICK => {
                queue.kick = Some(KickFile(file));
                Ok(self.start_or_stop_queue_if_due(call, index))
            }
            // Errors end the connection, so the error eventfd is not needed.
            _ => {
                self.reply_success(call);
                Ok(None)
            }
        }
    }

    /// Starts or stops a queue if its configuration requires it. Otherwise acknowledges the
    /// message, unless it has a reply of its own.
    fn start_or_stop_queue_if_due(
        &mut self,
        call: PendingReply,
        index: u32,
    ) -> Option<OwnerRequest<F>> {
        let number = u16::try_from(index).unwrap_or(0);
        let call = PendingReply { queue: number, ..call };
        let features = self.features;
        let queue = &mut self.queues[usize::from(number)];
        let start = queue.start_parameters(features);
        match (queue.is_running, start) {
            (false, Some(start)) => {
                queue.is_running = true;
                Some(OwnerRequest::Start { call, queue: number, start })
            }
            (true, None) => {
                queue.is_running = false;
                Some(OwnerRequest::Stop { call, queue: number })
            }
            _ => {
                if call.code != MessageType::GET_VRING_BASE {
                    self.reply_success(call);
                }
                None
            }
        }
    }

    fn queue_mut(
        &mut self,
        code: MessageType,
        index: u32,
    ) -> Result<&mut VringState<F>, Violation> {
        let found = index.into();
        let queue = self.queues.get_mut(index as usize);
        queue.ok_or_else(|| field_violation(code, "queue", found, "one of those that there are"))
    }

    fn stopped_queue_mut(
        &mut self,
        code: MessageType,
        index: u32,
    ) -> Result<&mut VringState<F>, Violation> {
        let queue = self.queue_mut(code, index)?;
        if queue.is_running {
            return Err(field_violation(code, "queue", index.into(), "one that does not run"));
        }
        Ok(queue)
    }

    fn read_config_space(&self, payload: &[u8]) -> Result<Vec<u8>, Violation> {
        let mut fields = PayloadReader(payload);
        let (offset, size, flags) = (fields.u32(), fields.u32(), fields.u32());
        let code = MessageType::GET_CONFIG;
        let fits = offset.checked_add(size).is_some_and(|end| end <= CONFIG_MAX);
        if !fits {
            return Err(field_violation(code, "offset", offset.into(), "256 bytes of space"));
        }
        if payload.len() != (CONFIG_FIELDS + size) as usize {
            return Err(field_violation(code, "size", size.into(), "as many bytes as follow"));
        }
        let mut space = self.offer.config.clone();
        space.resize(CONFIG_MAX as usize, 0);
        let mut reply = [offset, size, flags].map(u32::to_le_bytes).concat();
        reply.extend_from_slice(&space[offset as usize..][..size as usize]);
        Ok(reply)
    }

    fn set_memory_table(
        &self,
        call: PendingReply,
        message: Message<F>,
    ) -> Result<OwnerRequest<F>, Violation> {
        let code = call.code;
        let mut fields = PayloadReader(&message.payload);
        let (count, _) = (fields.u32(), fields.u32());
        let len_bytes = message.payload.len();
        if count as usize > TABLE_MAX || len_bytes != 8 + count as usize * AREA_BYTES {
            let expected = "as many stretches as follow, 8 at most";
            return Err(field_violation(code, "count", count.into(), expected));
        }
        let found = message.files.len();
        if found != count as usize {
            let expected = (count as usize, count as usize);
            return Err(Violation::Files { code, found, expected });
        }
        let areas: Result<Vec<_>, _> = message
            .files
            .into_iter()
            .map(|file| Ok((parse_memory_region(code, &mut fields)?, file)))
            .collect();
        Ok(OwnerRequest::Memory { call, change: MemoryChange::Replace(areas?) })
    }

    fn set_inflight(
        &self,
        call: PendingReply,
        message: Message<F>,
    ) -> Result<OwnerRequest<F>, Violation> {
        let code = call.code;
        let mut fields = PayloadReader(&message.payload);
        let (len_bytes, file_offset) = (fields.u64(), fields.u64());
        let (queues, size) = (fields.u16(), fields.u16());
        check_inflight_buffer(code, queues, size)?;
        if self.queues.iter().any(|queue| queue.is_running) {
            return Err(field_violation(code, "queues", queues.into(), "none that runs"));
        }
        let needed = u64::from(crate::inflight::stride_bytes(size)) * u64::from(queues);
        if len_bytes < needed || file_offset.checked_add(len_bytes).is_none() {
            return Err(field_violation(code, "size", len_bytes, "room for what all queues have"));
        }
        let area = InflightBuffer { len_bytes, file_offset, queues, size };
        match message.files.into_iter().next() {
            Some(file) => Ok(OwnerRequest::SetInflightFd { call, area, file }),
            None => Err(Violation::Files { code, found: 0, expected: (1, 1) }),
        }
    }
}

impl<F: Clone> VringState<F> {
    fn new() -> Self {
        Self { size: 0, base: 0, addresses: None, kick: None, is_enabled: false, is_running: false }
    }

    /// Parameters of the queue, if it is ready to run. Without protocol features, queues are always
    /// enabled.
    fn start_parameters(&self, features: u64) -> Option<QueueStartParams<F>> {
        let is_enabled = self.is_enabled || features & device::PROTOCOL_FEATURES == 0;
        let (addresses, kick) = (self.addresses?, self.kick.clone()?.0);
        let Self { size, base, .. } = *self;
        (is_enabled && size > 0).then_some(QueueStartParams {
            size,
            base,
            addresses,
            kick,
            features,
        })
    }
}
