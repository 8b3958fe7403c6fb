//! Receive path of the controller side.

use tenmil_wire::tcp::pdu_validation::offset;
use tenmil_wire::tcp::{ADMIN_IN_CAPSULE_BYTES, CapsuleCmd, Crc32c, H2CData, IcReq, IcResp};
use tenmil_wire::tcp::{FatalError, PduType};

use super::data_transfer::{classify_transfer, is_fabrics};
use super::slot::{CommandSlot, TransferState};
use super::{ControllerConnection, ControllerEvent, DataTransfer, QueueKind};
use crate::NegotiatedParams;
use crate::endpoint::RejectedPdu;
use crate::events::EventQueue;
use crate::pdu_body::{PduBody, PduBodyProgress};
use crate::receive_loop::{PduReceiveStep, ReceivePdus, header_array, padding_len};

/// Number of slots added at a time.
const GROWTH: usize = 4;

impl ReceivePdus for ControllerConnection {
    #[inline]
    fn receive_body(
        &mut self,
        bytes: &[u8],
        at: &mut usize,
        events: &mut EventQueue<ControllerEvent>,
    ) -> PduReceiveStep {
        let Some(body) = &mut self.core.body else { return PduReceiveStep::Continue };
        let deliver = |placement, at| events.push(ControllerEvent::Data { placement, at });
        let PduBodyProgress::Complete { is_intact } = body.receive(bytes, at, deliver) else {
            return PduReceiveStep::NeedBytes;
        };
        let tag = body.tag;
        self.core.body = None;
        self.handle_body_end(tag, is_intact, events);
        PduReceiveStep::Continue
    }

    #[inline]
    fn receive_header<'a>(
        &mut self,
        bytes: &'a [u8],
        at: &mut usize,
        events: &mut EventQueue<ControllerEvent>,
    ) -> Result<PduReceiveStep, RejectedPdu<'a>> {
        let Some((kind, header, len)) = self.core.parse_header(&bytes[*at..])? else {
            return Ok(PduReceiveStep::NeedBytes);
        };
        if kind == PduType::CapsuleCmd
            && self.free_list.is_empty()
            && !self.do_all_commands_await_data()
            && !self.core.is_connecting()
        {
            return Ok(PduReceiveStep::NeedTag);
        }
        *at += len;
        let handled = match kind {
            PduType::H2CTermReq => self.handle_termination(header, events),
            PduType::IcReq => self.handle_ic_req(header, events),
            _ if self.core.is_connecting() => Err(FatalError::SEQUENCE),
            PduType::CapsuleCmd => self.handle_command_capsule(header, len, (bytes, at), events),
            PduType::H2CData => self.handle_data(header, len, (bytes, at), events),
            _ => Err(FatalError::invalid_field(offset::TYPE)),
        };
        handled.map(|()| PduReceiveStep::Continue).map_err(|violation| (violation, header))
    }
}

impl ControllerConnection {
    #[cold]
    fn handle_ic_req(
        &mut self,
        header: &[u8],
        events: &mut EventQueue<ControllerEvent>,
    ) -> Result<(), FatalError> {
        if !self.core.is_connecting() {
            return Err(FatalError::SEQUENCE);
        }
        let pdu = IcReq::from_bytes(header_array(header));
        pdu.check()?;
        let hpda = pdu.hpda();
        let r2ts_max = self.config.r2ts_max.into();
        self.params = NegotiatedParams {
            header_digest: pdu.hdgst() && self.config.header_digest,
            data_digest: pdu.ddgst() && self.config.data_digest,
            hpda,
            cpda: if hpda == 0 { 0 } else { self.config.cpda },
            r2ts_max: pdu.maxr2t().saturating_add(1).min(r2ts_max),
            h2c_bytes_max: self.config.h2c_bytes_max,
        };
        let NegotiatedParams { header_digest, data_digest, cpda, h2c_bytes_max, .. } = self.params;
        let response = IcResp::new(cpda, header_digest, data_digest, h2c_bytes_max);
        self.core.queue_pdu_header(response.as_bytes(), 0);
        self.core.set_open(self.params.framing_to_controller(), self.params.framing_to_host());
        events.push(ControllerEvent::Open(self.params));
        Ok(())
    }

    #[inline]
    fn handle_command_capsule(
        &mut self,
        header: &[u8],
        len: usize,
        rest: (&[u8], &mut usize),
        events: &mut EventQueue<ControllerEvent>,
    ) -> Result<(), FatalError> {
        let framing = self.core.incoming;
        let pdu = CapsuleCmd::from_bytes(header_array(header));
        let command = pdu.command();
        let is_io = matches!(self.queue, QueueKind::Io { .. }) && !is_fabrics(&command);
        let limit = if is_io { self.config.in_capsule_bytes } else { ADMIN_IN_CAPSULE_BYTES };
        let capsule = pdu.check(framing, limit)?;
        // Only a host that exceeds its queue size gets here: all outstanding commands wait for
        // data, which could only follow this command.
        let tag = self.free_list.pop().ok_or(FatalError::SEQUENCE)?;
        let sqhd = self.sqhd.wrapping_add(1);
        self.sqhd = if sqhd == self.queue.entries() { 0 } else { sqhd };
        let data = classify_transfer(&command, capsule.len_bytes, self.config.transfer_bytes_max);
        let (state, len_bytes) = match data {
            _ if capsule.len_bytes > 0 => (TransferState::InCapsule, 0),
            Ok(DataTransfer::FromHost(len)) => (TransferState::FromHost, len),
            Ok(DataTransfer::ToHost(len)) => (TransferState::ToHost, len),
            _ => (TransferState::NoData, 0),
        };
        if usize::from(tag) >= self.slots.len() {
            self.grow_slots(tag);
        }
        let slot = &mut self.slots[usize::from(tag)];
        self.awaiting_data += u16::from(state == TransferState::FromHost);
        slot.assign_command(command.cid(), state, len_bytes);
        events.push(ControllerEvent::Command { tag, command, data });
        if capsule.len_bytes > 0 {
            let body = PduBody {
                tag,
                flags: pdu.flags(),
                padding: padding_len(capsule.offset, len),
                has_digest: framing.data_digest,
                is_needed: data.is_ok(),
                offset: 0,
                remaining: capsule.len_bytes,
                digest: Crc32c::new(),
            };
            self.receive_whole_body(body, rest, events);
        }
        Ok(())
    }

    /// Adds slots up to `tag`. The least recently freed tag is used last, so an idle connection has few
    /// slots.
    #[cold]
    fn grow_slots(&mut self, tag: u16) {
        let count = (usize::from(tag) + 1).next_multiple_of(GROWTH);
        let count = count.min(self.config.depth.into());
        self.slots.reserve_exact(count - self.slots.len());
        self.slots.resize(count, CommandSlot::FREE);
    }

    fn handle_data(
        &mut self,
        header: &[u8],
        len: usize,
        rest: (&[u8], &mut usize),
        events: &mut EventQueue<ControllerEvent>,
    ) -> Result<(), FatalError> {
        let framing = self.core.incoming;
        let pdu = H2CData::from_bytes(header_array(header));
        // Checked before use: the framing, then TTAG and CCCID, then the range against the oldest R2T.
        pdu.check_header(framing)?;
        let tag = pdu.ttag();
        let slot = self.slots.get_mut(usize::from(tag));
        let has_r2t =
            |slot: &&mut CommandSlot| slot.state == TransferState::FromHost && slot.r2t_count > 0;
        let slot = slot.filter(has_r2t).ok_or(FatalError::invalid_field(offset::TTAG))?;
        if pdu.cccid() != slot.cid {
            return Err(FatalError::invalid_field(offset::CCCID));
        }
        pdu.check_range()?;
        let (begin, count) = (pdu.datao(), pdu.datal());
        if count > self.config.h2c_bytes_max {
            return Err(FatalError::LIMIT);
        }
        let (r2t_begin, r2t_end) = slot.oldest_r2t();
        let end = begin.checked_add(count).filter(|end| begin >= r2t_begin && *end <= r2t_end);
        let end = end.ok_or(FatalError::RANGE)?;
        if begin != slot.received || pdu.last() != (end == r2t_end) {
            return Err(FatalError::SEQUENCE);
        }
        slot.received = end;
        let body = PduBody {
            tag,
            flags: pdu.flags(),
            padding: padding_len(pdu.pdo(), len),
            has_digest: framing.data_digest,
            is_needed: !slot.is_completed,
            offset: begin,
            remaining: count,
            digest: Crc32c::new(),
        };
        self.receive_whole_body(body, rest, events);
        Ok(())
    }

    /// Receives a body that is in `bytes` as a whole, or leaves it to [`receive_body`](ReceivePdus::receive_body).
    #[inline]
    fn receive_whole_body(
        &mut self,
        body: PduBody,
        (bytes, at): (&[u8], &mut usize),
        events: &mut EventQueue<ControllerEvent>,
    ) {
        let Some((begin, end, is_intact)) = body.receive_if_whole(bytes, *at) else {
            self.core.body = Some(body);
            return;
        };
        *at = end;
        if body.is_needed {
            events.push(ControllerEvent::Data { placement: body.remaining_placement(), at: begin });
        }
        self.handle_body_end(body.tag, is_intact, events);
    }

    /// Handles the end of a PDU body: the last one of a command's data is reported, or queues the response
    /// of a command that was completed early.
    #[inline]
    fn handle_body_end(
        &mut self,
        tag: u16,
        is_intact: bool,
        events: &mut EventQueue<ControllerEvent>,
    ) {
        let slot = &mut self.slots[usize::from(tag)];
        slot.is_damaged |= !is_intact;
        let is_complete = if slot.state == TransferState::InCapsule {
            slot.state = TransferState::NoData;
            true
        } else {
            if slot.received == slot.oldest_r2t().1 {
                slot.remove_oldest_r2t();
            }
            let is_complete = slot.received == slot.len_bytes;
            let still_awaits_data =
                if slot.is_completed { slot.r2t_count > 0 } else { !is_complete };
            self.awaiting_data -= u16::from(!still_awaits_data);
            is_complete
        };
        // Data of a completed command are discarded; its response waits for the last of them.
        if slot.is_completed {
            if slot.completion.status().is_success() && slot.is_damaged {
                slot.completion =
                    slot.completion.with_status(tenmil_wire::Status::TRANSIENT_TRANSPORT_ERROR);
            }
            self.add_to_send_list(tag);
        } else if is_complete {
            let is_intact = !slot.is_damaged;
            events.push(ControllerEvent::DataComplete { tag, is_intact });
        } else if slot.issued < slot.ready {
            self.add_to_send_list(tag);
        }
    }
}
