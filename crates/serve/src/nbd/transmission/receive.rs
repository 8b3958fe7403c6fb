//! Request parser: headers are parsed in the inbox, data is received into its final place.

use tenmil_base::{HoleReporting, Operation, RequestFlags, Segment};
use tenmil_wire::nbd::{Command, CommandFlags, ParseError, RequestHeader};

use super::validate::{ValidatedRequest, validate_request};
use super::{EXTENTS_MAX, QueryKind, RequestSlot, SlowQuery, Transmission};
use crate::nbd::connection_memory::subsegment;
use crate::nbd::receive_buffer::ReceiveBuffer;
use crate::nbd::send_queue::SendQueue;

/// Next element expected from the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RequestState {
    Header,
    /// Data of a slot, from byte `done_bytes` on.
    Payload {
        slot: u16,
        done_bytes: u32,
    },
    /// Payload of a rejected request, to be discarded before the error reply.
    DiscardPayload {
        slot: u16,
        left_bytes: u32,
    },
}

impl Transmission {
    /// Appends the segments that the next payload bytes belong to, if they bypass the inbox.
    #[inline]
    pub(in crate::nbd) fn append_payload_segments(&self, into: &mut Vec<Segment>) {
        if let RequestState::Payload { slot, done_bytes } = self.awaits {
            let RequestSlot { buffer, header, .. } = self.slots[usize::from(slot)];
            let remaining = header.len_bytes - done_bytes;
            self.store
                .for_each_segment((slot, buffer), done_bytes, remaining, |part| into.push(part));
        }
    }

    /// Records `count` received bytes, the first of which lie in their final place. Returns how
    /// many went to the inbox.
    #[inline]
    pub(in crate::nbd) fn record_payload_received(&mut self, count: u32) -> u32 {
        let RequestState::Payload { slot, done_bytes } = self.awaits else { return count };
        let remaining = self.slots[usize::from(slot)].header.len_bytes - done_bytes;
        let taken = count.min(remaining);
        self.awaits = RequestState::Payload { slot, done_bytes: done_bytes + taken };
        count - taken
    }

    /// Parses the inbox as far as there are slots and memory. Returns the number of parsing steps
    /// that made progress.
    #[inline]
    pub(in crate::nbd) fn parse_requests(
        &mut self,
        inbox: &mut ReceiveBuffer,
        outbox: &mut SendQueue,
    ) -> Result<usize, ParseError> {
        let mut count = 0;
        while !self.is_ended {
            let went_on = match self.awaits {
                RequestState::Header => self.parse_header(inbox, outbox)?,
                RequestState::Payload { slot, done_bytes } => {
                    self.copy_payload(inbox, slot, done_bytes)
                }
                RequestState::DiscardPayload { slot, left_bytes } => {
                    self.reject_request(inbox, outbox, slot, left_bytes)
                }
            };
            if !went_on {
                break;
            }
            count += 1;
        }
        Ok(count)
    }

    fn parse_header(
        &mut self,
        inbox: &mut ReceiveBuffer,
        outbox: &mut SendQueue,
    ) -> Result<bool, ParseError> {
        let Some(slot) = self.free.last().copied() else { return Ok(false) };
        let Some(bytes) = inbox.peek(&self.regions) else { return Ok(false) };
        let header = RequestHeader::parse(&bytes)?;
        let admitted = validate_request(&self.export, self.options, &header);
        let moves = match admitted {
            Ok(ValidatedRequest::Run { operation: Operation::Read | Operation::Write, .. }) => {
                header.len_bytes
            }
            _ => 0,
        };
        let Some(buffer) = self.store.allocate(moves) else { return Ok(false) };
        // The header stays in the inbox until the slot and its memory are certain, so that a
        // shortage only delays it.
        inbox.consume(28);
        self.headers += 1;
        self.free.pop();
        let memory = &mut self.slots[usize::from(slot)];
        (memory.header, memory.buffer, memory.failure) = (header, buffer, None);
        memory.received_at = self.times.now;
        let reads_holes =
            header.command == Command::READ && header.len_bytes > 0 && self.options.structured;
        memory.is_hole = reads_holes && self.export.hole_reporting() == HoleReporting::Everywhere;
        match admitted {
            Ok(ValidatedRequest::Run { operation, flags }) => {
                memory.then_flush =
                    operation == Operation::Deallocate && flags.has(RequestFlags::FUA);
                let flags = if memory.then_flush { RequestFlags::NONE } else { flags };
                // The reply is one chunk, so that all of the request must be a hole: which is known
                // if the device executes it as a whole.
                let flags = if reads_holes
                    && self.export.hole_reporting() == HoleReporting::AtReads
                    && header.len_bytes <= self.export.request_bytes_max()
                {
                    flags.union(RequestFlags::HOLES)
                } else {
                    flags
                };
                (memory.operation, memory.flags) = (operation, flags);
                if operation == Operation::Write {
                    self.awaits = RequestState::Payload { slot, done_bytes: 0 };
                } else {
                    self.queue_request(slot);
                }
            }
            Ok(ValidatedRequest::Nothing) => self.queue_reply(slot, outbox),
            Ok(ValidatedRequest::Survey) => {
                let one = header.flags.has(CommandFlags::REQ_ONE);
                let RequestHeader { offset, len_bytes, .. } = header;
                let extents_max = if one { 1 } else { EXTENTS_MAX };
                let kind = QueryKind::Extents { offset, len_bytes, extents_max };
                self.queries.push_back(SlowQuery { slot, kind });
            }
            Ok(ValidatedRequest::Resize { bytes }) => {
                self.queries.push_back(SlowQuery { slot, kind: QueryKind::Size { bytes } });
            }
            Ok(ValidatedRequest::End) => {
                self.free.push(slot);
                self.is_ended = true;
            }
            Err(failure) => {
                memory.failure = Some(failure);
                self.awaits =
                    RequestState::DiscardPayload { slot, left_bytes: header.payload_bytes() };
            }
        }
        Ok(true)
    }

    /// Copies payload that arrived in the inbox together with other bytes to its final place.
    fn copy_payload(&mut self, inbox: &mut ReceiveBuffer, slot: u16, done_bytes: u32) -> bool {
        let RequestSlot { header, buffer, .. } = self.slots[usize::from(slot)];
        let remaining = header.len_bytes - done_bytes;
        let from = inbox.consume(remaining);
        let mut copied = 0;
        self.store.for_each_segment((slot, buffer), done_bytes, from.len_bytes, |to| {
            let part = subsegment(from, copied, to.len_bytes);
            self.regions
                .copy_segment(part, to)
                .expect("a connection has its memory as long as it lives");
            copied += to.len_bytes;
        });
        if from.len_bytes == remaining {
            self.awaits = RequestState::Header;
            self.queue_request(slot);
            return true;
        }
        self.awaits = RequestState::Payload { slot, done_bytes: done_bytes + from.len_bytes };
        false
    }

    fn reject_request(
        &mut self,
        inbox: &mut ReceiveBuffer,
        outbox: &mut SendQueue,
        slot: u16,
        left_bytes: u32,
    ) -> bool {
        let left_bytes = left_bytes - inbox.consume(left_bytes).len_bytes;
        if left_bytes > 0 {
            self.awaits = RequestState::DiscardPayload { slot, left_bytes };
            return false;
        }
        self.awaits = RequestState::Header;
        self.queue_reply(slot, outbox);
        true
    }
}
