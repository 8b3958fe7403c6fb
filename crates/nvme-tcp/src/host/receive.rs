//! Receive path of the host side.

use tenmil_wire::tcp::pdu_validation::offset;
use tenmil_wire::tcp::{C2HData, CapsuleResp, FatalError, IcResp, PduType, R2t};
use tenmil_wire::{Completion, Status};

use super::slot::{CommandSlot, R2tRange, TransferState};
use super::{DigestMode, HostConnection, HostEvent};
use crate::NegotiatedParams;
use crate::endpoint::RejectedPdu;
use crate::events::EventQueue;
use crate::pdu_body::{DataPlacement, PduBody, PduBodyProgress};
use crate::receive_loop::{PduReceiveStep, ReceivePdus, header_array, padding_len};

/// LAST_PDU and SUCCESS in FLAGS (§3.6.2.9).
pub(super) const LAST: u8 = 1 << 2;
pub(super) const SUCCESS: u8 = 1 << 3;

impl ReceivePdus for HostConnection {
    #[inline]
    fn receive_body(
        &mut self,
        bytes: &[u8],
        at: &mut usize,
        events: &mut EventQueue<HostEvent>,
    ) -> PduReceiveStep {
        let Some(body) = &mut self.core.body else { return PduReceiveStep::Continue };
        let read =
            body.receive(bytes, at, |placement, at| events.push(HostEvent::Data { placement, at }));
        let PduBodyProgress::Complete { is_intact } = read else {
            return PduReceiveStep::NeedBytes;
        };
        let (tag, flags) = (body.tag, body.flags);
        self.core.body = None;
        self.handle_body_end(tag, flags, is_intact, events);
        PduReceiveStep::Continue
    }

    #[inline]
    fn receive_header<'a>(
        &mut self,
        bytes: &'a [u8],
        at: &mut usize,
        events: &mut EventQueue<HostEvent>,
    ) -> Result<PduReceiveStep, RejectedPdu<'a>> {
        if self.receive_pdu_fast_path(bytes, at, events) {
            return Ok(PduReceiveStep::Continue);
        }
        let Some((kind, header, len)) = self.core.parse_header(&bytes[*at..])? else {
            return Ok(PduReceiveStep::NeedBytes);
        };
        *at += len;
        let handled = match kind {
            PduType::C2HTermReq => self.handle_termination(header, events),
            PduType::IcResp => self.handle_ic_resp(header, events),
            _ if self.core.is_connecting() => Err(FatalError::SEQUENCE),
            PduType::C2HData => self.handle_data(header, len, (bytes, at), events),
            PduType::CapsuleResp => self.handle_response(header, events),
            PduType::R2t => self.handle_r2t(header),
            _ => Err(FatalError::invalid_field(offset::TYPE)),
        };
        handled.map(|()| PduReceiveStep::Continue).map_err(|violation| (violation, header))
    }
}

/// First eight bytes of PDUs without digests: type, flags, lengths of the header and to the data, and of
/// the PDU, of which the data are added (§3.6.2.7, §3.6.2.9).
const DATA_WITH_SUCCESS_PREFIX: u64 = DATA_PREFIX | (SUCCESS as u64) << 8;
const DATA_PREFIX: u64 =
    24 << 32 | 24 << 24 | 24 << 16 | (LAST as u64) << 8 | PduType::C2HData as u64;
const RESPONSE_PREFIX: u64 = 24 << 32 | 24 << 16 | PduType::CapsuleResp as u64;

impl HostConnection {
    /// Receives the PDUs of nearly every command on a connection without digests: all data of a read in
    /// one PDU, which may report its success as well, and a response. Returns false, without effect, for
    /// everything else.
    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, reason = "fields of a word")]
    fn receive_pdu_fast_path(
        &mut self,
        bytes: &[u8],
        at: &mut usize,
        events: &mut EventQueue<HostEvent>,
    ) -> bool {
        if !self.is_open_without_digests {
            return false;
        }
        let Some((header, data)) = bytes[*at..].split_first_chunk::<24>() else { return false };
        let [first, second, third] = [0, 1, 2].map(|word| {
            u64::from_le_bytes(*header[8 * word..].first_chunk().expect("a header has three words"))
        });
        if first == RESPONSE_PREFIX {
            return self.receive_response_fast_path([first, second, third], at, events);
        }
        // CCCID, and DATAO, which is zero; reserved bits are ignored.
        let (cid, offset, len_bytes) = (second as u16, (second >> 32) as u32, third as u32);
        let tag = cid & self.tag_mask;
        // PLEN is the header length plus DATAL. A DATAL near 4 GiB wraps here, but does not match the
        // length of any command, which is checked below.
        let plen = u64::from(len_bytes) << 32;
        let is_read = first == DATA_WITH_SUCCESS_PREFIX.wrapping_add(plen);
        let is_known = is_read || first == DATA_PREFIX.wrapping_add(plen);
        let Some(slot) = self.slots.get_mut(usize::from(tag)) else { return false };
        let is_whole_data = is_known
            && (slot.state, slot.is_last) == (TransferState::Data, false)
            && (slot.cid, slot.transferred, offset) == (cid, 0, 0)
            && slot.len_bytes == len_bytes
            && data.len() >= len_bytes as usize
            && slot.stream_end <= self.core.send_queue.sent_bytes();
        if !is_whole_data {
            return false;
        }
        let placement = DataPlacement { tag, offset: 0, len_bytes };
        let begin = *at + header.len();
        *at = begin + len_bytes as usize;
        let data_at = u32::try_from(begin).unwrap_or(u32::MAX);
        if is_read {
            self.complete_read(placement, cid, data_at, events);
        } else {
            (slot.transferred, slot.is_last) = (len_bytes, true);
            events.push(HostEvent::Data { placement, at: data_at });
        }
        true
    }

    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "fields of a word")]
    fn receive_response_fast_path(
        &mut self,
        [_, second, third]: [u64; 3],
        at: &mut usize,
        events: &mut EventQueue<HostEvent>,
    ) -> bool {
        let words = [second, second >> 32, third, third >> 32];
        let completion = Completion(words.map(|word| word as u32));
        let tag = completion.cid() & self.tag_mask;
        if outstanding_slot(&mut self.slots, (tag, completion.cid()), offset::RCCQE_CID).is_err() {
            return false;
        }
        *at += 24;
        self.handle_completion(tag, completion, events);
        true
    }

    #[cold]
    fn handle_ic_resp(
        &mut self,
        header: &[u8],
        events: &mut EventQueue<HostEvent>,
    ) -> Result<(), FatalError> {
        if !self.core.is_connecting() {
            return Err(FatalError::SEQUENCE);
        }
        let pdu = IcResp::from_bytes(header_array(header));
        pdu.check(&self.request)?;
        let is_missing = |digest, is_used: bool| digest == DigestMode::Required && !is_used;
        if is_missing(self.config.header_digest, pdu.hdgst())
            || is_missing(self.config.data_digest, pdu.ddgst())
        {
            return Err(FatalError::unsupported_parameter(offset::DGST));
        }
        self.params = NegotiatedParams {
            header_digest: pdu.hdgst(),
            data_digest: pdu.ddgst(),
            hpda: self.config.hpda,
            cpda: pdu.cpda(),
            r2ts_max: self.config.r2ts_max.into(),
            h2c_bytes_max: pdu.maxh2cdata(),
        };
        self.core.set_open(self.params.framing_to_host(), self.params.framing_to_controller());
        self.is_open_without_digests = !pdu.hdgst() && !pdu.ddgst();
        events.push(HostEvent::Open(self.params));
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
        let framing = self.core.incoming;
        let pdu = C2HData::from_bytes(header_array(header));
        pdu.check_header(framing)?;
        let (cid, tag) = (pdu.cccid(), pdu.cccid() & self.tag_mask);
        // The identifier is checked before the range, and the state before the offset: the order of the
        // checks determines which error a TermReq reports.
        let slot = outstanding_slot(&mut self.slots, (tag, cid), offset::CCCID)?;
        pdu.check_range()?;
        if slot.state != TransferState::Data || slot.is_last {
            return Err(FatalError::SEQUENCE);
        }
        let (begin, count) = (pdu.datao(), pdu.datal());
        let end = begin.checked_add(count).filter(|end| *end <= slot.len_bytes);
        let end = end.ok_or(FatalError::RANGE)?;
        if begin != slot.transferred {
            return Err(FatalError::SEQUENCE);
        }
        slot.transferred = end;
        let body = PduBody {
            tag,
            flags: pdu.flags(),
            padding: padding_len(pdu.pdo(), len),
            has_digest: framing.data_digest,
            is_needed: true,
            offset: begin,
            remaining: count,
            digest: tenmil_wire::tcp::Crc32c::new(),
        };
        if let Some((begin, end, is_intact)) = body.receive_if_whole(bytes, *at) {
            *at = end;
            // A read whose data and success arrive in one PDU is one event. Its command must be sent as a
            // whole: its tag is free afterwards.
            let is_whole_read = is_intact
                && (body.offset, count) == (0, slot.len_bytes)
                && body.flags & (LAST | SUCCESS) == LAST | SUCCESS
                && slot.stream_end <= self.core.send_queue.sent_bytes();
            if is_whole_read {
                self.complete_read(body.remaining_placement(), cid, begin, events);
                return Ok(());
            }
            events.push(HostEvent::Data { placement: body.remaining_placement(), at: begin });
            self.handle_body_end(tag, body.flags, is_intact, events);
        } else {
            self.core.body = Some(body);
        }
        Ok(())
    }

    /// Completes a read whose data have arrived in one PDU.
    #[inline(always)]
    fn complete_read(
        &mut self,
        placement: DataPlacement,
        cid: u16,
        at: u32,
        events: &mut EventQueue<HostEvent>,
    ) {
        self.slots[usize::from(placement.tag)].state = TransferState::Free;
        if self.config.cid_mask == 0 {
            self.free_list.push(placement.tag);
        }
        events.push(HostEvent::ReadCompleted { placement, cid, at });
    }

    /// The body of a C2HData PDU is complete.
    #[inline(always)]
    fn handle_body_end(
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
            self.handle_completion(tag, completion, events);
        }
    }

    #[inline]
    fn handle_response(
        &mut self,
        header: &[u8],
        events: &mut EventQueue<HostEvent>,
    ) -> Result<(), FatalError> {
        let pdu = CapsuleResp::from_bytes(header_array(header));
        pdu.check(self.core.incoming)?;
        let completion = pdu.completion();
        let tag = completion.cid() & self.tag_mask;
        outstanding_slot(&mut self.slots, (tag, completion.cid()), offset::RCCQE_CID)?;
        self.handle_completion(tag, completion, events);
        Ok(())
    }

    fn handle_r2t(&mut self, header: &[u8]) -> Result<(), FatalError> {
        let pdu = R2t::from_bytes(header_array(header));
        pdu.check_header(self.core.incoming)?;
        let (cid, tag) = (pdu.cccid(), pdu.cccid() & self.tag_mask);
        let limit = self.config.r2ts_max;
        let slot = outstanding_slot(&mut self.slots, (tag, cid), offset::CCCID)?;
        pdu.check_range()?;
        if slot.state != TransferState::AwaitR2t {
            return Err(FatalError::SEQUENCE);
        }
        if slot.r2t_count == limit {
            return Err(FatalError::LIMIT);
        }
        let end = pdu.r2to().checked_add(pdu.r2tl()).filter(|end| *end <= slot.len_bytes);
        let end = end.ok_or(FatalError::RANGE)?;
        if pdu.r2to() != slot.requested {
            return Err(FatalError::SEQUENCE);
        }
        let limit = usize::from(limit);
        let index = (usize::from(slot.r2t_first) + usize::from(slot.r2t_count)) % limit;
        self.r2ts[usize::from(tag) * limit + index] = R2tRange { end, ttag: pdu.ttag() };
        slot.requested = end;
        slot.r2t_count += 1;
        if !slot.is_in_send_list {
            slot.is_in_send_list = true;
            debug_assert!(self.send_list.len() < self.slots.len(), "each slot is in the list once");
            self.send_list.push_back(tag);
        }
        Ok(())
    }

    /// Handles the completion of a command, from a response or from SUCCESS in its last data.
    #[inline(always)]
    fn handle_completion(
        &mut self,
        tag: u16,
        completion: Completion,
        events: &mut EventQueue<HostEvent>,
    ) {
        let slot = &mut self.slots[usize::from(tag)];
        let completion = if completion.status().is_success() {
            checked_completion(slot, completion)
        } else {
            completion
        };
        // A write may complete before all its data are sent; the send queue references its buffer
        // until then.
        if slot.stream_end <= self.core.send_queue.sent_bytes() {
            self.complete_command(tag, completion, events);
        } else {
            slot.completion = completion;
            slot.state = TransferState::Sent;
            self.completed_unsent.push(tag);
        }
    }

    /// Completes a command and frees its tag.
    #[inline(always)]
    pub(super) fn complete_command(
        &mut self,
        tag: u16,
        completion: Completion,
        events: &mut EventQueue<HostEvent>,
    ) {
        let slot = &mut self.slots[usize::from(tag)];
        let is_read = slot.len_bytes > 0 && slot.requested == 0;
        let transferred_bytes = if is_read { slot.transferred } else { 0 };
        slot.state = TransferState::Free;
        if self.config.cid_mask == 0 {
            self.free_list.push(tag);
        }
        events.push(HostEvent::Completed { tag, completion, transferred_bytes });
    }
}

/// Completion of a command with a success status: an error replaces it if data are missing or damaged (§3.5).
#[inline]
fn checked_completion(slot: &CommandSlot, completion: Completion) -> Completion {
    if slot.is_damaged {
        completion.with_status(Status::TRANSIENT_TRANSPORT_ERROR)
    } else if slot.state == TransferState::Data && slot.transferred < slot.len_bytes {
        completion.with_status(Status::DATA_TRANSFER_ERROR)
    } else {
        completion
    }
}

/// Slot of an outstanding command; otherwise an error for the header field at `offset` with its identifier.
#[inline]
fn outstanding_slot(
    slots: &mut [CommandSlot],
    (tag, cid): (u16, u16),
    offset: u8,
) -> Result<&mut CommandSlot, FatalError> {
    let slot = slots.get_mut(usize::from(tag));
    let slot = slot.filter(|slot| slot.is_outstanding() && slot.cid == cid);
    slot.ok_or(FatalError::invalid_field(offset))
}
