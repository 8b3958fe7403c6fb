//! What comes from the controller.

use base::Instant;
use wire::tcp::check::offset;
use wire::tcp::{C2HData, CapsuleResp, IcResp, PduType, R2t, Refusal, TermReq};
use wire::{Completion, Status};

use super::slot::{Ask, Slot, State};
use super::{DigestUse, Host, HostEvent};
use crate::Terms;
use crate::body::{Body, Read};
use crate::events::{EVENTS_PER_UNIT, Events};
use crate::line::Refused;

/// LAST_PDU and SUCCESS in FLAGS (§3.6.2.9).
const LAST: u8 = 1 << 2;
const SUCCESS: u8 = 1 << 3;

impl Host {
    /// What [`receive`](crate::Connection::receive) does.
    #[inline]
    pub(super) fn read(
        &mut self,
        now: Instant,
        bytes: &[u8],
        events: &mut Events<HostEvent>,
    ) -> usize {
        let mut at = 0;
        let mut is_within = false;
        while self.line.is_listening() && events.room() >= EVENTS_PER_UNIT {
            let read = match self.line.body {
                Some(_) => Ok(self.read_body(bytes, &mut at, events)),
                None => self.read_header(&bytes[at..], &mut at, events),
            };
            match read {
                Ok(true) => {}
                Ok(false) => {
                    is_within = self.line.body.is_some() || at < bytes.len();
                    break;
                }
                Err((refusal, header)) => {
                    let cause = self.line.refuse(now, refusal, header);
                    events.push(HostEvent::Ended(cause));
                }
            }
        }
        if !self.line.is_listening() {
            return bytes.len();
        }
        self.line.note(now, is_within, at > 0);
        at
    }

    /// Whether the body was read to its end.
    #[inline]
    fn read_body(&mut self, bytes: &[u8], at: &mut usize, events: &mut Events<HostEvent>) -> bool {
        let Some(body) = &mut self.line.body else { return true };
        let read = body.read(bytes, at, |place, at| events.push(HostEvent::Data { place, at }));
        let Read::Whole { is_intact } = read else { return false };
        let (tag, flags) = (body.tag, body.flags);
        self.line.body = None;
        let slot = &mut self.slots[usize::from(tag)];
        slot.is_damaged |= !is_intact;
        slot.is_last |= flags & LAST != 0;
        if flags & SUCCESS != 0 {
            self.answered(tag, Completion::new(tag, Status::SUCCESS), events);
        }
        true
    }

    /// Whether there was a whole header.
    #[inline]
    fn read_header<'a>(
        &mut self,
        bytes: &'a [u8],
        at: &mut usize,
        events: &mut Events<HostEvent>,
    ) -> Result<bool, Refused<'a>> {
        let Some((kind, header, len)) = self.line.header(bytes)? else { return Ok(false) };
        *at += len;
        let handled = match kind {
            PduType::C2HTermReq => self.handle_termination(header, events),
            PduType::IcResp => self.handle_opening(header, events),
            _ if self.line.is_opening() => Err(Refusal::SEQUENCE),
            PduType::C2HData => self.handle_data(header, len),
            PduType::CapsuleResp => self.handle_response(header, events),
            PduType::R2t => self.handle_ask(header),
            _ => Err(Refusal::field(offset::TYPE)),
        };
        handled.map(|()| true).map_err(|refusal| (refusal, header))
    }

    #[cold]
    fn handle_termination(
        &mut self,
        header: &[u8],
        events: &mut Events<HostEvent>,
    ) -> Result<(), Refusal> {
        let cause = self.line.terminated(&TermReq::from_bytes(whole(header)));
        events.push(HostEvent::Ended(cause));
        Ok(())
    }

    #[cold]
    fn handle_opening(
        &mut self,
        header: &[u8],
        events: &mut Events<HostEvent>,
    ) -> Result<(), Refusal> {
        if !self.line.is_opening() {
            return Err(Refusal::SEQUENCE);
        }
        let pdu = IcResp::from_bytes(whole(header));
        pdu.check(&self.request)?;
        let lacks = |digest, is_there: bool| digest == DigestUse::Required && !is_there;
        if lacks(self.config.header_digest, pdu.hdgst())
            || lacks(self.config.data_digest, pdu.ddgst())
        {
            return Err(Refusal::parameter(offset::DGST));
        }
        self.terms = Terms {
            header_digest: pdu.hdgst(),
            data_digest: pdu.ddgst(),
            hpda: self.config.hpda,
            cpda: pdu.cpda(),
            r2ts_max: self.config.r2ts_max.into(),
            h2c_bytes_max: pdu.maxh2cdata(),
        };
        self.line.opened(self.terms.to_host(), self.terms.to_controller());
        events.push(HostEvent::Open(self.terms));
        Ok(())
    }

    #[inline]
    fn handle_data(&mut self, header: &[u8], len: usize) -> Result<(), Refusal> {
        let framing = self.line.incoming;
        let pdu = C2HData::from_bytes(whole(header));
        pdu.check(framing)?;
        let tag = pdu.cccid();
        let slot = outstanding(&mut self.slots, tag, offset::CCCID)?;
        pdu.check_range()?;
        if slot.state != State::Data || slot.is_last {
            return Err(Refusal::SEQUENCE);
        }
        let (begin, count) = (pdu.datao(), pdu.datal());
        let end = begin.checked_add(count).filter(|end| *end <= slot.len_bytes);
        let end = end.ok_or(Refusal::RANGE)?;
        if begin != slot.moved {
            return Err(Refusal::SEQUENCE);
        }
        slot.moved = end;
        self.line.body = Some(Body {
            tag,
            flags: pdu.flags(),
            padding: padding(pdu.pdo(), len),
            has_digest: framing.data_digest,
            is_wanted: true,
            offset: begin,
            left: count,
            digest: wire::tcp::Crc32c::new(),
        });
        Ok(())
    }

    #[inline]
    fn handle_response(
        &mut self,
        header: &[u8],
        events: &mut Events<HostEvent>,
    ) -> Result<(), Refusal> {
        let pdu = CapsuleResp::from_bytes(whole(header));
        pdu.check(self.line.incoming)?;
        let completion = pdu.completion();
        let tag = completion.cid();
        outstanding(&mut self.slots, tag, offset::RCCQE_CID)?;
        self.answered(tag, completion, events);
        Ok(())
    }

    fn handle_ask(&mut self, header: &[u8]) -> Result<(), Refusal> {
        let pdu = R2t::from_bytes(whole(header));
        pdu.check(self.line.incoming)?;
        let tag = pdu.cccid();
        let most = self.config.r2ts_max;
        let slot = outstanding(&mut self.slots, tag, offset::CCCID)?;
        pdu.check_range()?;
        if slot.state != State::Ask {
            return Err(Refusal::SEQUENCE);
        }
        if slot.asks == most {
            return Err(Refusal::LIMIT);
        }
        let end = pdu.r2to().checked_add(pdu.r2tl()).filter(|end| *end <= slot.len_bytes);
        let end = end.ok_or(Refusal::RANGE)?;
        if pdu.r2to() != slot.asked {
            return Err(Refusal::SEQUENCE);
        }
        let most = usize::from(most);
        let place = (usize::from(slot.ask_first) + usize::from(slot.asks)) % most;
        self.asks[usize::from(tag) * most + place] = Ask { end, ttag: pdu.ttag() };
        slot.asked = end;
        slot.asks += 1;
        if !slot.is_pending {
            slot.is_pending = true;
            debug_assert!(self.pending.len() < self.slots.len(), "each slot is in the list once");
            self.pending.push_back(tag);
        }
        Ok(())
    }

    /// The controller has said its last word about a command.
    #[inline]
    fn answered(&mut self, tag: u16, completion: Completion, events: &mut Events<HostEvent>) {
        let slot = &mut self.slots[usize::from(tag)];
        let completion =
            if completion.status().is_success() { judged(slot, completion) } else { completion };
        if slot.sent_end <= self.line.out.sent_bytes() {
            self.end(tag, completion, events);
        } else {
            slot.completion = completion;
            slot.state = State::Sent;
            self.answered.push(tag);
        }
    }

    /// A command is at its end, and its tag free.
    #[inline]
    pub(super) fn end(&mut self, tag: u16, completion: Completion, events: &mut Events<HostEvent>) {
        let slot = &mut self.slots[usize::from(tag)];
        let reads = slot.len_bytes > 0 && slot.asked == 0;
        let moved_bytes = if reads { slot.moved } else { 0 };
        slot.state = State::Free;
        if !self.config.names_tags {
            self.free.push(tag);
        }
        events.push(HostEvent::Done { tag, completion, moved_bytes });
    }
}

/// A success is one only if all data came, and came whole (§3.5).
#[inline]
fn judged(slot: &Slot, completion: Completion) -> Completion {
    if slot.is_damaged {
        completion.with_status(Status::TRANSIENT_TRANSPORT_ERROR)
    } else if slot.state == State::Data && slot.moved < slot.len_bytes {
        completion.with_status(Status::DATA_TRANSFER_ERROR)
    } else {
        completion
    }
}

/// The slot of an outstanding command, or the refusal of the field at `offset` that named it.
#[inline]
fn outstanding(slots: &mut [Slot], tag: u16, offset: u8) -> Result<&mut Slot, Refusal> {
    let slot = slots.get_mut(usize::from(tag)).filter(|slot| slot.is_outstanding());
    slot.ok_or(Refusal::field(offset))
}

/// The bytes between a header of `len`, digest included, and data at `pdo`.
#[inline]
pub(crate) fn padding(pdo: u8, len: usize) -> u8 {
    pdo - u8::try_from(len).unwrap_or(pdo)
}

/// A header, whose length follows from its type.
#[inline]
pub(crate) fn whole<const N: usize>(header: &[u8]) -> &[u8; N] {
    header.first_chunk().expect("a header is as long as its type says")
}
