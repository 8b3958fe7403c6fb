//! Send path of the controller side: R2Ts, data and responses.

use tenmil_wire::fabrics::SQHD_WITHOUT_FLOW_CONTROL;
use tenmil_wire::tcp::{C2HData, CapsuleResp, R2t};

use super::slot::{CommandSlot, TransferState};
use super::{ANSWER_BYTES, ControllerConnection, SuccessPolicy};
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
            let has_more = match self.slots[usize::from(tag)].state {
                TransferState::FromHost => self.request_next_range(tag),
                TransferState::ToHost => self.send_data_pdu(tag, payloads),
                _ => {
                    self.send_response(tag);
                    false
                }
            };
            self.slots[usize::from(tag)].is_queued = has_more;
            if has_more {
                self.jobs.push_back(tag);
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
    #[inline]
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
        let is_success = is_success && self.may_omit_response();
        let pdu = C2HData::new(self.line.outgoing, cid, offset, len_bytes, (is_final, is_success));
        self.line.push(pdu.as_bytes(), pdu.pdo().into());
        self.line.out.push_payload(tag, offset, len_bytes);
        if self.line.outgoing.data_digest {
            let digest = payloads.digest(tag, offset, len_bytes);
            self.line.out.push_header(&digest.to_le_bytes(), None, 4);
        }
        if is_success {
            self.answered(tag);
        } else if is_last {
            self.send_response(tag);
        }
        has_more
    }

    /// Whether SUCCESS may replace the response.
    #[inline]
    fn may_omit_response(&self) -> bool {
        match self.config.success {
            SuccessPolicy::Never => false,
            SuccessPolicy::WithoutFlowControl => !self.queue.has_flow_control(),
            SuccessPolicy::Always => true,
        }
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
        self.answered(tag);
    }

    #[inline]
    fn answered(&mut self, tag: u16) {
        self.slots[usize::from(tag)].is_sent = true;
        self.ends.push_back((self.line.out.queued_bytes(), tag));
    }
}
