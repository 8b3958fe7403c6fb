//! Receive path of the controller side.

use tenmil_wire::tcp::check::offset;
use tenmil_wire::tcp::{ADMIN_IN_CAPSULE_BYTES, CapsuleCmd, Crc32c, H2CData, IcReq, IcResp};
use tenmil_wire::tcp::{FatalError, PduType};

use super::classify::{classify, is_fabrics};
use super::slot::{CommandSlot, TransferState};
use super::{ControllerConnection, ControllerEvent, DataTransfer, QueueKind};
use crate::NegotiatedParams;
use crate::endpoint::RejectedPdu;
use crate::events::EventQueue;
use crate::pdu_body::{BodyProgress, PduBody};
use crate::receive::{Receive, ReceiveStep, padding, whole};

/// Number of slots added at a time.
const GROWTH: usize = 4;

impl Receive for ControllerConnection {
    #[inline]
    fn read_body(
        &mut self,
        bytes: &[u8],
        at: &mut usize,
        events: &mut EventQueue<ControllerEvent>,
    ) -> ReceiveStep {
        let Some(body) = &mut self.line.body else { return ReceiveStep::On };
        let place = |place, at| events.push(ControllerEvent::Data { place, at });
        let BodyProgress::Whole { is_intact } = body.read(bytes, at, place) else {
            return ReceiveStep::Short;
        };
        let tag = body.tag;
        self.line.body = None;
        self.end_body(tag, is_intact, events);
        ReceiveStep::On
    }

    #[inline]
    fn read_header<'a>(
        &mut self,
        bytes: &'a [u8],
        at: &mut usize,
        events: &mut EventQueue<ControllerEvent>,
    ) -> Result<ReceiveStep, RejectedPdu<'a>> {
        let Some((kind, header, len)) = self.line.header(&bytes[*at..])? else {
            return Ok(ReceiveStep::Short);
        };
        if kind == PduType::CapsuleCmd
            && self.free.is_empty()
            && !self.is_starved()
            && !self.line.is_opening()
        {
            return Ok(ReceiveStep::Full);
        }
        *at += len;
        let handled = match kind {
            PduType::H2CTermReq => self.handle_termination(header, events),
            PduType::IcReq => self.handle_opening(header, events),
            _ if self.line.is_opening() => Err(FatalError::SEQUENCE),
            PduType::CapsuleCmd => self.handle_command(header, len, (bytes, at), events),
            PduType::H2CData => self.handle_data(header, len, (bytes, at), events),
            _ => Err(FatalError::field(offset::TYPE)),
        };
        handled.map(|()| ReceiveStep::On).map_err(|refusal| (refusal, header))
    }
}

impl ControllerConnection {
    #[cold]
    fn handle_opening(
        &mut self,
        header: &[u8],
        events: &mut EventQueue<ControllerEvent>,
    ) -> Result<(), FatalError> {
        if !self.line.is_opening() {
            return Err(FatalError::SEQUENCE);
        }
        let pdu = IcReq::from_bytes(whole(header));
        pdu.check()?;
        let hpda = pdu.hpda();
        let own = self.config.r2ts_max.into();
        self.terms = NegotiatedParams {
            header_digest: pdu.hdgst() && self.config.header_digest,
            data_digest: pdu.ddgst() && self.config.data_digest,
            hpda,
            cpda: if hpda == 0 { 0 } else { self.config.cpda },
            r2ts_max: pdu.maxr2t().saturating_add(1).min(own),
            h2c_bytes_max: self.config.h2c_bytes_max,
        };
        let NegotiatedParams { header_digest, data_digest, cpda, h2c_bytes_max, .. } = self.terms;
        let response = IcResp::new(cpda, header_digest, data_digest, h2c_bytes_max);
        self.line.push(response.as_bytes(), 0);
        self.line.opened(self.terms.to_controller(), self.terms.to_host());
        events.push(ControllerEvent::Open(self.terms));
        Ok(())
    }

    #[inline]
    fn handle_command(
        &mut self,
        header: &[u8],
        len: usize,
        rest: (&[u8], &mut usize),
        events: &mut EventQueue<ControllerEvent>,
    ) -> Result<(), FatalError> {
        let framing = self.line.incoming;
        let pdu = CapsuleCmd::from_bytes(whole(header));
        let command = pdu.command();
        let is_io = matches!(self.queue, QueueKind::Io { .. }) && !is_fabrics(&command);
        let most = if is_io { self.config.in_capsule_bytes } else { ADMIN_IN_CAPSULE_BYTES };
        let capsule = pdu.check(framing, most)?;
        // Only a host that exceeds its queue size gets here: all outstanding commands wait for
        // data, which could only follow this command.
        let tag = self.free.pop().ok_or(FatalError::SEQUENCE)?;
        let head = self.head.wrapping_add(1);
        self.head = if head == self.queue.entries() { 0 } else { head };
        let data = classify(&command, capsule.len_bytes, self.config.transfer_bytes_max);
        let (state, len_bytes) = match data {
            _ if capsule.len_bytes > 0 => (TransferState::InCapsule, 0),
            Ok(DataTransfer::FromHost(len)) => (TransferState::FromHost, len),
            Ok(DataTransfer::ToHost(len)) => (TransferState::ToHost, len),
            _ => (TransferState::NoData, 0),
        };
        if usize::from(tag) >= self.slots.len() {
            self.grow(tag);
        }
        let slot = &mut self.slots[usize::from(tag)];
        self.starved += u16::from(state == TransferState::FromHost);
        slot.begin(command.cid(), state, len_bytes);
        events.push(ControllerEvent::Command { tag, command, data });
        if capsule.len_bytes > 0 {
            let body = PduBody {
                tag,
                flags: pdu.flags(),
                padding: padding(capsule.offset, len),
                has_digest: framing.data_digest,
                is_wanted: data.is_ok(),
                offset: 0,
                left: capsule.len_bytes,
                digest: Crc32c::new(),
            };
            self.begin_body(body, rest, events);
        }
        Ok(())
    }

    /// The least recently freed tag is used last, so an idle connection has few slots.
    #[cold]
    fn grow(&mut self, tag: u16) {
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
        let framing = self.line.incoming;
        let pdu = H2CData::from_bytes(whole(header));
        pdu.check(framing)?;
        let tag = pdu.ttag();
        let slot = self.slots.get_mut(usize::from(tag));
        let is_asked =
            |slot: &&mut CommandSlot| slot.state == TransferState::FromHost && slot.asks > 0;
        let slot = slot.filter(is_asked).ok_or(FatalError::field(offset::TTAG))?;
        if pdu.cccid() != slot.cid {
            return Err(FatalError::field(offset::CCCID));
        }
        pdu.check_range()?;
        let (begin, count) = (pdu.datao(), pdu.datal());
        if count > self.config.h2c_bytes_max {
            return Err(FatalError::LIMIT);
        }
        let (ask_begin, ask_end) = slot.oldest_r2t();
        let end = begin.checked_add(count).filter(|end| begin >= ask_begin && *end <= ask_end);
        let end = end.ok_or(FatalError::RANGE)?;
        if begin != slot.came || pdu.last() != (end == ask_end) {
            return Err(FatalError::SEQUENCE);
        }
        slot.came = end;
        let body = PduBody {
            tag,
            flags: pdu.flags(),
            padding: padding(pdu.pdo(), len),
            has_digest: framing.data_digest,
            is_wanted: !slot.is_answered,
            offset: begin,
            left: count,
            digest: Crc32c::new(),
        };
        self.begin_body(body, rest, events);
        Ok(())
    }

    /// Receives a body that is all there, or keeps it for [`read_body`](Receive::read_body).
    #[inline]
    fn begin_body(
        &mut self,
        body: PduBody,
        (bytes, at): (&[u8], &mut usize),
        events: &mut EventQueue<ControllerEvent>,
    ) {
        let Some((begin, end, is_intact)) = body.read_whole(bytes, *at) else {
            self.line.body = Some(body);
            return;
        };
        *at = end;
        if body.is_wanted {
            events.push(ControllerEvent::Data { place: body.placement(), at: begin });
        }
        self.end_body(body.tag, is_intact, events);
    }

    /// The body of a PDU is complete.
    #[inline]
    fn end_body(&mut self, tag: u16, is_intact: bool, events: &mut EventQueue<ControllerEvent>) {
        let slot = &mut self.slots[usize::from(tag)];
        slot.is_damaged |= !is_intact;
        let is_all = if slot.state == TransferState::InCapsule {
            slot.state = TransferState::NoData;
            true
        } else {
            if slot.came == slot.oldest_r2t().1 {
                slot.pop_ask();
            }
            let is_all = slot.came == slot.len_bytes;
            let needs_host = if slot.is_answered { slot.asks > 0 } else { !is_all };
            self.starved -= u16::from(!needs_host);
            is_all
        };
        // Data of a completed command are discarded; its response waits for the last of them.
        if slot.is_answered {
            if slot.completion.status().is_success() && slot.is_damaged {
                slot.completion =
                    slot.completion.with_status(tenmil_wire::Status::TRANSIENT_TRANSPORT_ERROR);
            }
            self.queue_job(tag);
        } else if is_all {
            let is_intact = !slot.is_damaged;
            events.push(ControllerEvent::DataComplete { tag, is_intact });
        } else if slot.asked < slot.ready {
            self.queue_job(tag);
        }
    }
}
