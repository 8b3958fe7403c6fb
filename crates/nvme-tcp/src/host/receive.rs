//! Receive path of the host side.

use tenmil_wire::tcp::check::offset;
use tenmil_wire::tcp::{C2HData, CapsuleResp, FatalError, IcResp, PduType, R2t};
use tenmil_wire::{Completion, Status};

use super::slot::{CommandSlot, R2tRange, TransferState};
use super::{DigestMode, HostConnection, HostEvent};
use crate::NegotiatedParams;
use crate::endpoint::RejectedPdu;
use crate::events::EventQueue;
use crate::pdu_body::{BodyProgress, DataPlacement, PduBody};
use crate::receive::{Receive, ReceiveStep, padding, whole};

/// LAST_PDU and SUCCESS in FLAGS (§3.6.2.9).
const LAST: u8 = 1 << 2;
const SUCCESS: u8 = 1 << 3;

impl Receive for HostConnection {
    #[inline]
    fn read_body(
        &mut self,
        bytes: &[u8],
        at: &mut usize,
        events: &mut EventQueue<HostEvent>,
    ) -> ReceiveStep {
        let Some(body) = &mut self.line.body else { return ReceiveStep::On };
        let read = body.read(bytes, at, |place, at| events.push(HostEvent::Data { place, at }));
        let BodyProgress::Whole { is_intact } = read else { return ReceiveStep::Short };
        let (tag, flags) = (body.tag, body.flags);
        self.line.body = None;
        self.end_body(tag, flags, is_intact, events);
        ReceiveStep::On
    }

    #[inline]
    fn read_header<'a>(
        &mut self,
        bytes: &'a [u8],
        at: &mut usize,
        events: &mut EventQueue<HostEvent>,
    ) -> Result<ReceiveStep, RejectedPdu<'a>> {
        if self.read_plain(bytes, at, events) {
            return Ok(ReceiveStep::On);
        }
        let Some((kind, header, len)) = self.line.header(&bytes[*at..])? else {
            return Ok(ReceiveStep::Short);
        };
        *at += len;
        let handled = match kind {
            PduType::C2HTermReq => self.handle_termination(header, events),
            PduType::IcResp => self.handle_opening(header, events),
            _ if self.line.is_opening() => Err(FatalError::SEQUENCE),
            PduType::C2HData => self.handle_data(header, len, (bytes, at), events),
            PduType::CapsuleResp => self.handle_response(header, events),
            PduType::R2t => self.handle_ask(header),
            _ => Err(FatalError::field(offset::TYPE)),
        };
        handled.map(|()| ReceiveStep::On).map_err(|refusal| (refusal, header))
    }
}

/// First eight bytes of PDUs without digests: type, flags, lengths of the header and to the data, and of
/// the PDU, of which the data are added (§3.6.2.7, §3.6.2.9).
const PLAIN_READ: u64 = PLAIN_DATA | (SUCCESS as u64) << 8;
const PLAIN_DATA: u64 =
    24 << 32 | 24 << 24 | 24 << 16 | (LAST as u64) << 8 | PduType::C2HData as u64;
const PLAIN_RESPONSE: u64 = 24 << 32 | 24 << 16 | PduType::CapsuleResp as u64;

impl HostConnection {
    /// Receives the PDUs of nearly every command on a connection without digests: all data of a read in
    /// one PDU, which may report its success as well, and a response. Returns false, without effect, for
    /// everything else.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "fields of a word")]
    fn read_plain(
        &mut self,
        bytes: &[u8],
        at: &mut usize,
        events: &mut EventQueue<HostEvent>,
    ) -> bool {
        if !self.is_plain {
            return false;
        }
        let Some((header, data)) = bytes[*at..].split_first_chunk::<24>() else { return false };
        let [first, second, third] = [0, 1, 2].map(|word| {
            u64::from_le_bytes(*header[8 * word..].first_chunk().expect("a third of 24 bytes"))
        });
        if first == PLAIN_RESPONSE {
            return self.read_plain_response([first, second, third], at, events);
        }
        // CCCID, and DATAO, which is zero; reserved bits are ignored.
        let (cid, offset, len_bytes) = (second as u16, (second >> 32) as u32, third as u32);
        let tag = cid & self.tag_mask;
        // A length that does not fit beside the header wraps, and is not that of the command below.
        let plen = u64::from(len_bytes) << 32;
        let is_read = first == PLAIN_READ.wrapping_add(plen);
        let is_known = is_read || first == PLAIN_DATA.wrapping_add(plen);
        let Some(slot) = self.slots.get_mut(usize::from(tag)) else { return false };
        let is_plain = is_known
            && (slot.state, slot.is_last) == (TransferState::Data, false)
            && (slot.cid, slot.moved, offset) == (cid, 0, 0)
            && slot.len_bytes == len_bytes
            && data.len() >= len_bytes as usize
            && slot.sent_end <= self.line.out.sent_bytes();
        if !is_plain {
            return false;
        }
        let place = DataPlacement { tag, offset: 0, len_bytes };
        let begin = *at + header.len();
        *at = begin + len_bytes as usize;
        let data_at = u32::try_from(begin).unwrap_or(u32::MAX);
        if is_read {
            self.end_read(place, cid, data_at, events);
        } else {
            (slot.moved, slot.is_last) = (len_bytes, true);
            events.push(HostEvent::Data { place, at: data_at });
        }
        true
    }

    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "fields of a word")]
    fn read_plain_response(
        &mut self,
        [_, second, third]: [u64; 3],
        at: &mut usize,
        events: &mut EventQueue<HostEvent>,
    ) -> bool {
        let words = [second, second >> 32, third, third >> 32];
        let completion = Completion(words.map(|word| word as u32));
        let tag = completion.cid() & self.tag_mask;
        if outstanding(&mut self.slots, (tag, completion.cid()), offset::RCCQE_CID).is_err() {
            return false;
        }
        *at += 24;
        self.answered(tag, completion, events);
        true
    }

    #[cold]
    fn handle_opening(
        &mut self,
        header: &[u8],
        events: &mut EventQueue<HostEvent>,
    ) -> Result<(), FatalError> {
        if !self.line.is_opening() {
            return Err(FatalError::SEQUENCE);
        }
        let pdu = IcResp::from_bytes(whole(header));
        pdu.check(&self.request)?;
        let lacks = |digest, is_there: bool| digest == DigestMode::Required && !is_there;
        if lacks(self.config.header_digest, pdu.hdgst())
            || lacks(self.config.data_digest, pdu.ddgst())
        {
            return Err(FatalError::parameter(offset::DGST));
        }
        self.terms = NegotiatedParams {
            header_digest: pdu.hdgst(),
            data_digest: pdu.ddgst(),
            hpda: self.config.hpda,
            cpda: pdu.cpda(),
            r2ts_max: self.config.r2ts_max.into(),
            h2c_bytes_max: pdu.maxh2cdata(),
        };
        self.line.opened(self.terms.to_host(), self.terms.to_controller());
        self.is_plain = !pdu.hdgst() && !pdu.ddgst();
        events.push(HostEvent::Open(self.terms));
        Ok(())
    }

    #[inline]
    fn handle_data(
        &mut self,
        header: &[u8],
        len: usize,
        (bytes, at): (&[u8], &mut usize),
        events: &mut EventQueue<HostEvent>,
    ) -> Result<(), FatalError> {
        let framing = self.line.incoming;
        let pdu = C2HData::from_bytes(whole(header));
        pdu.check(framing)?;
        let (cid, tag) = (pdu.cccid(), pdu.cccid() & self.tag_mask);
        let slot = outstanding(&mut self.slots, (tag, cid), offset::CCCID)?;
        pdu.check_range()?;
        if slot.state != TransferState::Data || slot.is_last {
            return Err(FatalError::SEQUENCE);
        }
        let (begin, count) = (pdu.datao(), pdu.datal());
        let end = begin.checked_add(count).filter(|end| *end <= slot.len_bytes);
        let end = end.ok_or(FatalError::RANGE)?;
        if begin != slot.moved {
            return Err(FatalError::SEQUENCE);
        }
        slot.moved = end;
        let body = PduBody {
            tag,
            flags: pdu.flags(),
            padding: padding(pdu.pdo(), len),
            has_digest: framing.data_digest,
            is_wanted: true,
            offset: begin,
            left: count,
            digest: tenmil_wire::tcp::Crc32c::new(),
        };
        if let Some((begin, end, is_intact)) = body.read_whole(bytes, *at) {
            *at = end;
            let is_all = is_intact
                && (body.offset, count) == (0, slot.len_bytes)
                && body.flags & (LAST | SUCCESS) == LAST | SUCCESS
                && slot.sent_end <= self.line.out.sent_bytes();
            if is_all {
                self.end_read(body.placement(), cid, begin, events);
                return Ok(());
            }
            events.push(HostEvent::Data { place: body.placement(), at: begin });
            self.end_body(tag, body.flags, is_intact, events);
        } else {
            self.line.body = Some(body);
        }
        Ok(())
    }

    /// Completes a read whose data have arrived in one PDU.
    #[inline(always)]
    fn end_read(
        &mut self,
        place: DataPlacement,
        cid: u16,
        at: u32,
        events: &mut EventQueue<HostEvent>,
    ) {
        self.slots[usize::from(place.tag)].state = TransferState::Free;
        if self.config.cid_mask == 0 {
            self.free.push(place.tag);
        }
        events.push(HostEvent::ReadCompleted { place, cid, at });
    }

    /// The body of a C2HData PDU is complete.
    #[inline(always)]
    fn end_body(
        &mut self,
        tag: u16,
        flags: u8,
        is_intact: bool,
        events: &mut EventQueue<HostEvent>,
    ) {
        let slot = &mut self.slots[usize::from(tag)];
        slot.is_damaged |= !is_intact;
        slot.is_last |= flags & LAST != 0;
        if flags & SUCCESS != 0 {
            let completion = Completion::new(slot.cid, Status::SUCCESS);
            self.answered(tag, completion, events);
        }
    }

    #[inline]
    fn handle_response(
        &mut self,
        header: &[u8],
        events: &mut EventQueue<HostEvent>,
    ) -> Result<(), FatalError> {
        let pdu = CapsuleResp::from_bytes(whole(header));
        pdu.check(self.line.incoming)?;
        let completion = pdu.completion();
        let tag = completion.cid() & self.tag_mask;
        outstanding(&mut self.slots, (tag, completion.cid()), offset::RCCQE_CID)?;
        self.answered(tag, completion, events);
        Ok(())
    }

    fn handle_ask(&mut self, header: &[u8]) -> Result<(), FatalError> {
        let pdu = R2t::from_bytes(whole(header));
        pdu.check(self.line.incoming)?;
        let (cid, tag) = (pdu.cccid(), pdu.cccid() & self.tag_mask);
        let most = self.config.r2ts_max;
        let slot = outstanding(&mut self.slots, (tag, cid), offset::CCCID)?;
        pdu.check_range()?;
        if slot.state != TransferState::AwaitR2t {
            return Err(FatalError::SEQUENCE);
        }
        if slot.asks == most {
            return Err(FatalError::LIMIT);
        }
        let end = pdu.r2to().checked_add(pdu.r2tl()).filter(|end| *end <= slot.len_bytes);
        let end = end.ok_or(FatalError::RANGE)?;
        if pdu.r2to() != slot.asked {
            return Err(FatalError::SEQUENCE);
        }
        let most = usize::from(most);
        let place = (usize::from(slot.ask_first) + usize::from(slot.asks)) % most;
        self.asks[usize::from(tag) * most + place] = R2tRange { end, ttag: pdu.ttag() };
        slot.asked = end;
        slot.asks += 1;
        if !slot.is_pending {
            slot.is_pending = true;
            debug_assert!(self.pending.len() < self.slots.len(), "each slot is in the list once");
            self.pending.push_back(tag);
        }
        Ok(())
    }

    /// Handles the final response of a command.
    #[inline(always)]
    fn answered(&mut self, tag: u16, completion: Completion, events: &mut EventQueue<HostEvent>) {
        let slot = &mut self.slots[usize::from(tag)];
        let completion =
            if completion.status().is_success() { judged(slot, completion) } else { completion };
        // A write may be answered before all its data are sent; its buffer is still referenced by
        // the send queue until then.
        if slot.sent_end <= self.line.out.sent_bytes() {
            self.end(tag, completion, events);
        } else {
            slot.completion = completion;
            slot.state = TransferState::Sent;
            self.answered.push(tag);
        }
    }

    /// Completes a command and frees its tag.
    #[inline(always)]
    pub(super) fn end(
        &mut self,
        tag: u16,
        completion: Completion,
        events: &mut EventQueue<HostEvent>,
    ) {
        let slot = &mut self.slots[usize::from(tag)];
        let reads = slot.len_bytes > 0 && slot.asked == 0;
        let moved_bytes = if reads { slot.moved } else { 0 };
        slot.state = TransferState::Free;
        if self.config.cid_mask == 0 {
            self.free.push(tag);
        }
        events.push(HostEvent::Completed { tag, completion, moved_bytes });
    }
}

/// Status of a successful command: it is successful only if all data arrived intact (§3.5).
#[inline]
fn judged(slot: &CommandSlot, completion: Completion) -> Completion {
    if slot.is_damaged {
        completion.with_status(Status::TRANSIENT_TRANSPORT_ERROR)
    } else if slot.state == TransferState::Data && slot.moved < slot.len_bytes {
        completion.with_status(Status::DATA_TRANSFER_ERROR)
    } else {
        completion
    }
}

/// Slot of an outstanding command; otherwise the error for the field at `offset` that named it.
#[inline]
fn outstanding(
    slots: &mut [CommandSlot],
    (tag, cid): (u16, u16),
    offset: u8,
) -> Result<&mut CommandSlot, FatalError> {
    let slot = slots.get_mut(usize::from(tag));
    let slot = slot.filter(|slot| slot.is_outstanding() && slot.cid == cid);
    slot.ok_or(FatalError::field(offset))
}
