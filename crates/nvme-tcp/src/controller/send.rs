//! Send path of the controller side: R2Ts, data and responses.

use tenmil_wire::Completion;
use tenmil_wire::fabrics::SQHD_WITHOUT_FLOW_CONTROL;
use tenmil_wire::tcp::{C2HData, CapsuleResp, R2t};

use super::slot::{CommandSlot, TransferState};
use super::{ANSWER_BYTES, ControllerConnection};
use crate::PayloadDigest;

impl ControllerConnection {
    /// Queues what was granted, replied and completed, as far as there is space: one PDU per
    /// command in rotation.
    #[inline]
    pub(super) fn queue_units(&mut self, payloads: &impl PayloadDigest) {
        while let Some(tag) = self.jobs.front().copied()
            && self.line.is_open()
            && (self.line.out.has_space(ANSWER_BYTES) || self.line.out.grow(ANSWER_BYTES))
        {
            self.jobs.pop_front();
            let has_more = self.queue_unit(tag, payloads);
            self.slots[usize::from(tag)].is_queued = has_more;
            if has_more {
                self.jobs.push_back(tag);
            }
        }
    }

    /// Whether a PDU can be queued without waiting: nothing waits before it, and no data digest needs the
    /// payload.
    #[inline(always)]
    pub(super) fn may_queue_now(&mut self) -> bool {
        self.jobs.is_empty()
            && !self.terms.data_digest
            && self.line.is_open()
            && (self.line.out.has_space(ANSWER_BYTES) || self.line.out.grow(ANSWER_BYTES))
    }

    /// Queues all data of a read in one PDU, which replaces the response or is followed by it, if that is
    /// possible now. Returns whether it was.
    #[inline(always)]
    pub(super) fn send_whole(&mut self, tag: u16, len_bytes: u32, completion: Completion) -> bool {
        let (may_omit, may_queue) = (self.may_omit_response, self.may_queue_now());
        let Some(slot) = self.slots.get_mut(usize::from(tag)) else { return false };
        let CommandSlot { cid, state, len_bytes: all, ready, .. } = *slot;
        let is_whole = state == TransferState::ToHost
            && !slot.is_answered
            && (ready, all) == (0, len_bytes)
            && len_bytes <= self.config.c2h_bytes_max;
        if !is_whole || !may_queue {
            return false;
        }
        let is_success = may_omit && completion.status().is_success() && completion.result() == 0;
        (slot.is_answered, slot.is_sent) = (true, is_success);
        if !is_success {
            slot.completion = completion;
        }
        self.queue_data((tag, cid), (0, len_bytes), (true, is_success));
        if !is_success {
            self.send_response(tag);
        }
        true
    }

    /// Queues a data PDU. One that replaces the response is the end of the command.
    #[inline(never)]
    fn queue_data(
        &mut self,
        (tag, cid): (u16, u16),
        (offset, len_bytes): (u32, u32),
        (is_final, is_success): (bool, bool),
    ) {
        let framing = self.line.outgoing;
        let pdu = C2HData::new(framing, cid, offset, len_bytes, (is_final, is_success));
        self.line.push(pdu.as_bytes(), pdu.pdo().into());
        self.line.out.push_payload(tag, offset, len_bytes);
        if is_success && !framing.data_digest {
            self.push_end(tag);
        }
    }

    /// Queues the next PDU of a command, and its response after the last data. Returns whether another one
    /// could be queued at once.
    #[inline(always)]
    pub(super) fn queue_unit(&mut self, tag: u16, payloads: &impl PayloadDigest) -> bool {
        match self.slots[usize::from(tag)].state {
            TransferState::FromHost => self.request_next_range(tag),
            TransferState::ToHost => self.send_data_pdu(tag, payloads),
            _ => {
                self.send_response(tag);
                false
            }
        }
    }

    /// Requests the next granted range, or sends the response. Returns whether another range could
    /// be requested at once.
    fn request_next_range(&mut self, tag: u16) -> bool {
        let slot = &mut self.slots[usize::from(tag)];
        let most = self.terms.r2ts_max;
        if slot.is_answered {
            self.send_response(tag);
            return false;
        }
        if slot.asked == slot.ready || u32::from(slot.asks) >= most {
            return false;
        }
        let begin = slot.asked;
        let len_bytes = (slot.ready - begin).min(self.config.r2t_bytes_max);
        slot.push_ask(begin + len_bytes);
        let has_more = slot.asked < slot.ready && u32::from(slot.asks) < most;
        let pdu = R2t::new(self.line.outgoing, (slot.cid, tag), begin, len_bytes);
        self.line.push(pdu.as_bytes(), 0);
        has_more
    }

    /// Sends the next data that are ready, and the response after the last. Returns whether there
    /// is more.
    fn send_data_pdu(&mut self, tag: u16, payloads: &impl PayloadDigest) -> bool {
        let slot = &mut self.slots[usize::from(tag)];
        let offset = slot.asked;
        let len_bytes = (slot.ready - offset).min(self.config.c2h_bytes_max);
        if len_bytes == 0 {
            self.send_response(tag);
            return false;
        }
        slot.asked += len_bytes;
        let has_more = slot.asked < slot.ready;
        let is_last = slot.is_answered && !has_more;
        // LAST_PDU, independent of the response.
        let is_final = is_last || slot.asked == slot.len_bytes;
        let is_success = is_last
            && slot.asked == slot.len_bytes
            && slot.completion.status().is_success()
            && slot.completion.result() == 0;
        let cid = slot.cid;
        let is_success = is_success && self.may_omit_response;
        self.slots[usize::from(tag)].is_sent |= is_success;
        self.queue_data((tag, cid), (offset, len_bytes), (is_final, is_success));
        if self.line.outgoing.data_digest {
            let digest = payloads.digest(tag, offset, len_bytes);
            self.line.out.push_header(&digest.to_le_bytes(), None, 4);
            if is_success {
                self.push_end(tag);
            }
        }
        if is_last && !is_success {
            self.send_response(tag);
        }
        has_more
    }

    /// Sends the response, if there is one and no data are in transfer: requested data are received
    /// completely, so that the host never sends to a tag that was reused.
    #[inline]
    fn send_response(&mut self, tag: u16) {
        let sqhd =
            if self.queue.has_flow_control() { self.head } else { SQHD_WITHOUT_FLOW_CONTROL };
        let slot = &self.slots[usize::from(tag)];
        let CommandSlot { completion, cid, is_answered, is_sent, .. } = *slot;
        if !is_answered || is_sent || slot.is_receiving() {
            return;
        }
        let completion = completion.with_cid(cid).with_sqhd(sqhd).with_phase(false);
        let pdu = CapsuleResp::new(self.line.outgoing, &completion);
        self.line.push(pdu.as_bytes(), 0);
        self.slots[usize::from(tag)].is_sent = true;
        self.push_end(tag);
    }
}
