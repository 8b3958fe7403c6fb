//! What comes from a client: headers where they lie, data to where they belong.

use base::{Flags, Operation, Segment};
use wire::nbd::{CommandFlags, Malformed, RequestHeader};

use super::admit::{Admitted, admit};
use super::{About, EXTENTS_MAX, Exchange, Question, Slot};
use crate::nbd::inbox::Inbox;
use crate::nbd::memory::cut;
use crate::nbd::outbox::Outbox;

/// What comes next from the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Awaits {
    Header,
    /// Data for a slot, from this byte on.
    Payload {
        slot: u16,
        done_bytes: u32,
    },
    /// Data that nobody wants; then the slot tells of its failure.
    Refused {
        slot: u16,
        left_bytes: u32,
    },
}

impl Exchange {
    /// Appends where the next bytes from the client belong, if that is not the inbox.
    #[inline]
    pub(in crate::nbd) fn payload_into(&self, into: &mut Vec<Segment>) {
        if let Awaits::Payload { slot, done_bytes } = self.awaits {
            let Slot { holding, header, .. } = self.slots[usize::from(slot)];
            let left = header.len_bytes - done_bytes;
            self.store.each((slot, holding), done_bytes, left, |part| into.push(part));
        }
    }

    /// Of `count` bytes that were received, those at the front lie where they belong. Returns how
    /// many have gone to the inbox.
    #[inline]
    pub(in crate::nbd) fn payload_received(&mut self, count: u32) -> u32 {
        let Awaits::Payload { slot, done_bytes } = self.awaits else { return count };
        let left = self.slots[usize::from(slot)].header.len_bytes - done_bytes;
        let taken = count.min(left);
        self.awaits = Awaits::Payload { slot, done_bytes: done_bytes + taken };
        count - taken
    }

    /// Reads what lies in the inbox, as far as there are slots and memory. Returns how many requests
    /// have come to something.
    #[inline]
    pub(in crate::nbd) fn take_in(
        &mut self,
        inbox: &mut Inbox,
        outbox: &mut Outbox,
    ) -> Result<usize, Malformed> {
        let mut count = 0;
        while !self.is_ended {
            let went_on = match self.awaits {
                Awaits::Header => self.header(inbox, outbox)?,
                Awaits::Payload { slot, done_bytes } => self.payload(inbox, slot, done_bytes),
                Awaits::Refused { slot, left_bytes } => {
                    self.refused(inbox, outbox, slot, left_bytes)
                }
            };
            if !went_on {
                break;
            }
            count += 1;
        }
        Ok(count)
    }

    fn header(&mut self, inbox: &mut Inbox, outbox: &mut Outbox) -> Result<bool, Malformed> {
        let Some(slot) = self.free.last().copied() else { return Ok(false) };
        let Some(bytes) = inbox.peek(&self.regions) else { return Ok(false) };
        let header = RequestHeader::parse(&bytes)?;
        let admitted = admit(&self.export, self.terms, &header);
        let moves = match admitted {
            Ok(Admitted::Run { operation: Operation::Read | Operation::Write, .. }) => {
                header.len_bytes
            }
            _ => 0,
        };
        let Some(holding) = self.store.take(moves) else { return Ok(false) };
        inbox.take(28);
        self.headers += 1;
        self.free.pop();
        let place = &mut self.slots[usize::from(slot)];
        (place.header, place.holding, place.failure) = (header, holding, None);
        match admitted {
            Ok(Admitted::Run { operation, flags }) => {
                place.then_flush = operation == Operation::Deallocate && flags.has(Flags::FUA);
                let flags = if place.then_flush { Flags::NONE } else { flags };
                (place.operation, place.flags) = (operation, flags);
                if operation == Operation::Write {
                    self.awaits = Awaits::Payload { slot, done_bytes: 0 };
                } else {
                    self.begin(slot);
                }
            }
            Ok(Admitted::Nothing) => self.reply(slot, outbox),
            Ok(Admitted::Survey) => {
                let one = header.flags.has(CommandFlags::REQ_ONE);
                let RequestHeader { offset, len_bytes, .. } = header;
                let extents_max = if one { 1 } else { EXTENTS_MAX };
                let about = About::Extents { offset, len_bytes, extents_max };
                self.questions.push_back(Question { slot, about });
            }
            Ok(Admitted::Resize { bytes }) => {
                self.questions.push_back(Question { slot, about: About::Size { bytes } });
            }
            Ok(Admitted::End) => {
                self.free.push(slot);
                self.is_ended = true;
            }
            Err(failure) => {
                place.failure = Some(failure);
                self.awaits = Awaits::Refused { slot, left_bytes: header.payload_bytes() };
            }
        }
        Ok(true)
    }

    /// Copies what has come with other things to where it belongs.
    fn payload(&mut self, inbox: &mut Inbox, slot: u16, done_bytes: u32) -> bool {
        let Slot { header, holding, .. } = self.slots[usize::from(slot)];
        let left = header.len_bytes - done_bytes;
        let from = inbox.take(left);
        let mut copied = 0;
        self.store.each((slot, holding), done_bytes, from.len_bytes, |to| {
            let part = cut(from, copied, to.len_bytes);
            self.regions.copy(part, to).expect("a connection has its memory as long as it lives");
            copied += to.len_bytes;
        });
        if from.len_bytes == left {
            self.awaits = Awaits::Header;
            self.begin(slot);
            return true;
        }
        self.awaits = Awaits::Payload { slot, done_bytes: done_bytes + from.len_bytes };
        false
    }

    fn refused(
        &mut self,
        inbox: &mut Inbox,
        outbox: &mut Outbox,
        slot: u16,
        left_bytes: u32,
    ) -> bool {
        let left_bytes = left_bytes - inbox.take(left_bytes).len_bytes;
        if left_bytes > 0 {
            self.awaits = Awaits::Refused { slot, left_bytes };
            return false;
        }
        self.awaits = Awaits::Header;
        self.reply(slot, outbox);
        true
    }
}
