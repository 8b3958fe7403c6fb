//! Send path of the controller side: R2Ts, data and responses.

use tenmil_wire::Completion;
use tenmil_wire::fabrics::SQHD_WITHOUT_FLOW_CONTROL;
use tenmil_wire::tcp::{C2HData, CapsuleResp, R2t};

use super::slot::{CommandSlot, TransferState};
use super::{ControllerConnection, RESPONSE_BYTES_MAX};
use crate::PayloadDigest;

impl ControllerConnection {
    /// Queues the deferred responses of a batch.
    #[inline(never)]
    fn queue_deferred(&mut self) {
        let tags = self.deferred.end_batch();
        for tag in &tags {
            if self.can_queue_pdu() {
                self.queue_response_or_success(*tag);
            } else {
                self.add_to_send_list(*tag);
            }
        }
        self.deferred.recycle_list(tags);
    }

    /// Whether the send queue has space for any PDU without payload.
    #[inline(always)]
    fn can_queue_pdu(&mut self) -> bool {
        self.core.is_open()
            && (self.core.send_queue.has_space(RESPONSE_BYTES_MAX)
                || self.core.send_queue.grow(RESPONSE_BYTES_MAX))
    }

    /// Queues R2Ts, data and responses of the send list, as far as there is space: one PDU per
    /// command in rotation.
    #[inline]
    pub(super) fn queue_pdus(&mut self, payloads: &impl PayloadDigest) {
        if self.deferred.has_batch() {
            self.queue_deferred();
        }
        while let Some(tag) = self.send_list.front().copied()
            && self.can_queue_pdu()
        {
            self.send_list.pop_front();
            let has_more = self.queue_next_pdu(tag, payloads);
            self.slots[usize::from(tag)].is_in_send_list = has_more;
            if has_more {
                self.send_list.push_back(tag);
            }
        }
    }

    /// Whether a PDU can be queued without waiting: nothing waits before it, and no data digest needs the
    /// payload.
    #[inline(always)]
    pub(super) fn may_queue_now(&mut self) -> bool {
        self.send_list.is_empty() && !self.params.data_digest && self.can_queue_pdu()
    }

    /// Queues all data of a read in one PDU, which replaces the response or is followed by it. Returns
    /// false, without effect, if that is not possible now.
    #[inline(always)]
    pub(super) fn try_queue_all_data_at_once(
        &mut self,
        tag: u16,
        len_bytes: u32,
        completion: Completion,
    ) -> bool {
        let (may_omit, may_queue) = (self.may_omit_response, self.may_queue_now());
        let Some(slot) = self.slots.get_mut(usize::from(tag)) else { return false };
        let CommandSlot { cid, state, len_bytes: data_bytes, ready, .. } = *slot;
        let is_whole_read = state == TransferState::ToHost
            && !slot.is_completed
            && (ready, data_bytes) == (0, len_bytes)
            && len_bytes <= self.config.c2h_bytes_max;
        if !is_whole_read || !may_queue {
            return false;
        }
        let is_success = may_omit && completion.status().is_success() && completion.result() == 0;
        (slot.is_completed, slot.is_response_queued) = (true, is_success);
        if !is_success {
            slot.completion = completion;
        }
        self.queue_data((tag, cid), (0, len_bytes), (true, is_success));
        if !is_success && !self.deferred.count_read_and_decide_deferral(tag) {
            self.queue_response_or_success(tag);
        }
        true
    }

    /// Queues a C2HData PDU. With SUCCESS, it is the last PDU of the command.
    #[inline(never)]
    fn queue_data(
        &mut self,
        (tag, cid): (u16, u16),
        (offset, len_bytes): (u32, u32),
        (is_final, is_success): (bool, bool),
    ) {
        let framing = self.core.outgoing;
        let pdu = C2HData::new(framing, cid, offset, len_bytes, (is_final, is_success));
        self.core.queue_pdu_header(pdu.as_bytes(), pdu.pdo().into());
        self.core.send_queue.push_payload(tag, offset, len_bytes);
        if is_success && !framing.data_digest {
            self.record_response_end(tag);
        }
    }

    /// Queues the next PDU of a command, and its response after the last data. Returns whether another PDU
    /// can be queued at once.
    #[inline(always)]
    pub(super) fn queue_next_pdu(&mut self, tag: u16, payloads: &impl PayloadDigest) -> bool {
        match self.slots[usize::from(tag)].state {
            TransferState::FromHost => self.request_next_range(tag),
            TransferState::ToHost => self.queue_next_c2h_data(tag, payloads),
            _ => {
                self.queue_response_or_success(tag);
                false
            }
        }
    }

    /// Requests the next range with an R2T, or sends the response. Returns whether another range can
    /// be requested at once.
    fn request_next_range(&mut self, tag: u16) -> bool {
        let slot = &mut self.slots[usize::from(tag)];
        let limit = self.params.r2ts_max;
        if slot.is_completed {
            self.queue_response_or_success(tag);
            return false;
        }
        if slot.issued == slot.ready || u32::from(slot.r2t_count) >= limit {
            return false;
        }
        let begin = slot.issued;
        let len_bytes = (slot.ready - begin).min(self.config.r2t_bytes_max);
        slot.add_r2t_range(begin + len_bytes);
        let has_more = slot.issued < slot.ready && u32::from(slot.r2t_count) < limit;
        let pdu = R2t::new(self.core.outgoing, (slot.cid, tag), begin, len_bytes);
        self.core.queue_pdu_header(pdu.as_bytes(), 0);
        has_more
    }

    /// Sends the next data that are ready, and the response after the last. Returns whether there
    /// is more.
    fn queue_next_c2h_data(&mut self, tag: u16, payloads: &impl PayloadDigest) -> bool {
        let slot = &mut self.slots[usize::from(tag)];
        let offset = slot.issued;
        let len_bytes = (slot.ready - offset).min(self.config.c2h_bytes_max);
        if len_bytes == 0 {
            self.queue_response_or_success(tag);
            return false;
        }
        slot.issued += len_bytes;
        let has_more = slot.issued < slot.ready;
        let is_last = slot.is_completed && !has_more;
        // LAST_PDU, independent of the response.
        let is_final = is_last || slot.issued == slot.len_bytes;
        let is_success = is_last
            && slot.issued == slot.len_bytes
            && slot.completion.status().is_success()
            && slot.completion.result() == 0;
        let cid = slot.cid;
        let is_success = is_success && self.may_omit_response;
        self.slots[usize::from(tag)].is_response_queued |= is_success;
        self.queue_data((tag, cid), (offset, len_bytes), (is_final, is_success));
        if self.core.outgoing.data_digest {
            let digest = payloads.data_digest(tag, offset, len_bytes);
            self.core.send_queue.push_header(&digest.to_le_bytes(), None, 4);
            if is_success {
                self.record_response_end(tag);
            }
        }
        if is_last && !is_success {
            self.queue_response_or_success(tag);
        }
        has_more
    }

    /// Sends the response, if the command is completed and no data are in transfer: requested data are
    /// received completely, so that the host never sends to a reused TTAG.
    #[inline]
    fn queue_response_or_success(&mut self, tag: u16) {
        let sqhd =
            if self.queue.has_flow_control() { self.sqhd } else { SQHD_WITHOUT_FLOW_CONTROL };
        let slot = &self.slots[usize::from(tag)];
        let CommandSlot { completion, cid, is_completed, is_response_queued, .. } = *slot;
        if !is_completed || is_response_queued || slot.is_receiving() {
            return;
        }
        let completion = completion.with_cid(cid).with_sqhd(sqhd).with_phase(false);
        let pdu = CapsuleResp::new(self.core.outgoing, &completion);
        self.core.queue_pdu_header(pdu.as_bytes(), 0);
        self.slots[usize::from(tag)].is_response_queued = true;
        self.record_response_end(tag);
    }
}
