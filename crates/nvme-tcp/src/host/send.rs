//! Send path of the host side: commands and their data.

use tenmil_wire::sgl::Descriptor;
use tenmil_wire::tcp::{ADMIN_IN_CAPSULE_BYTES, CapsuleCmd, H2CData};
use tenmil_wire::{AdminOpcode, Command};

use super::slot::{CommandSlot, TransferState};
use super::{CAPSULE_BYTES, CannotSubmit, DataDirection, HostConnection, HostEvent};
use crate::PayloadDigest;
use crate::events::EventQueue;

impl HostConnection {
    /// Submits a command. Its identifier and SGL are filled in here; data that fit are sent in the
    /// capsule.
    ///
    /// The returned tag is valid until [`HostEvent::Completed`]. Until then data to the controller must
    /// not change, and data to the host may be written.
    ///
    /// # Panics
    ///
    /// If data outside the capsule are not a multiple of a dword: NVMe/TCP cannot transfer them
    /// (§3.6.2.8).
    #[inline]
    pub fn submit(
        &mut self,
        command: &Command,
        data: DataDirection,
        payloads: &impl PayloadDigest,
    ) -> Result<u16, CannotSubmit> {
        let can_submit = self.can_submit();
        let tag = self.free_list.pop_if(|_| can_submit).ok_or(CannotSubmit)?;
        self.queue_command((tag, tag), command, data, payloads);
        Ok(tag)
    }

    /// Submits a command under an identifier chosen by the caller, for a host whose identifiers are [the
    /// caller's](super::HostConfig::cid_mask). Otherwise as [`submit`](Self::submit).
    ///
    /// # Panics
    ///
    /// As `submit`; and if the tag of the identifier is in use or not below the depth.
    #[inline]
    pub fn submit_with_cid(
        &mut self,
        cid: u16,
        command: &Command,
        data: DataDirection,
        payloads: &impl PayloadDigest,
    ) -> Result<(), CannotSubmit> {
        let tag = cid & self.tag_mask;
        assert!(
            self.is_tag_free(tag) && self.config.cid_mask != 0,
            "command identifier {cid} is outstanding, or identifiers are assigned by the host side"
        );
        if let DataDirection::ToHost(len_bytes @ 1..) = data
            && self.is_open_without_digests
        {
            return self.queue_read((tag, cid), command, len_bytes);
        }
        if !self.can_submit() {
            return Err(CannotSubmit);
        }
        self.queue_command((tag, cid), command, data, payloads);
        Ok(())
    }

    /// Whether no command has this tag, for a host whose identifiers are the caller's.
    pub fn is_tag_free(&self, tag: u16) -> bool {
        self.slots[usize::from(tag)].state == TransferState::Free
    }

    #[inline]
    fn can_submit(&self) -> bool {
        self.core.is_open() && self.core.send_queue.has_space(CAPSULE_BYTES + 4)
    }

    /// Queues a read on a connection without digests: a capsule of a known length.
    #[inline(always)]
    fn queue_read(
        &mut self,
        (tag, cid): (u16, u16),
        command: &Command,
        len_bytes: u32,
    ) -> Result<(), CannotSubmit> {
        assert!(len_bytes & 3 == 0, "data outside the capsule are a multiple of a dword");
        if !self.core.is_open() {
            return Err(CannotSubmit);
        }
        let command = command.with_cid(cid).with_sgl1(Descriptor::transport_data_block(len_bytes));
        self.core.send_queue.push_capsule(&command.0).ok_or(CannotSubmit)?;
        let stream_end = self.core.send_queue.queued_bytes();
        self.slots[usize::from(tag)].assign_command(
            cid,
            TransferState::Data,
            len_bytes,
            stream_end,
        );
        Ok(())
    }

    #[inline(always)]
    fn queue_command(
        &mut self,
        (tag, cid): (u16, u16),
        command: &Command,
        data: DataDirection,
        payloads: &impl PayloadDigest,
    ) {
        let (state, len_bytes, in_capsule) = match data {
            DataDirection::ToHost(len) if len > 0 => (TransferState::Data, len, 0),
            DataDirection::FromHost(len) if len > 0 => self.choose_transfer(command, len),
            _ => (TransferState::AwaitResponse, 0, 0),
        };
        assert!(
            in_capsule > 0 || len_bytes & 3 == 0,
            "data outside the capsule are a multiple of a dword"
        );
        let descriptor = match in_capsule {
            0 => Descriptor::transport_data_block(len_bytes),
            len => Descriptor::in_capsule(0, len),
        };
        let command = command.with_cid(cid).with_sgl1(descriptor);
        let framing = self.core.outgoing;
        let pdu = CapsuleCmd::new(framing, &command, in_capsule);
        self.core.queue_pdu_header(pdu.as_bytes(), pdu.pdo().into());
        if in_capsule > 0 {
            self.push_payload(tag, 0, in_capsule, payloads);
        }
        let stream_end = self.core.send_queue.queued_bytes();
        self.slots[usize::from(tag)].assign_command(cid, state, len_bytes, stream_end);
    }

    /// Determines how data to the controller are transferred: the state to wait in, the total
    /// length, and the length in the capsule.
    fn choose_transfer(&self, command: &Command, len_bytes: u32) -> (TransferState, u32, u32) {
        let is_fabrics = command.opcode() == AdminOpcode::FabricsCommands.code();
        let limit = self.config.in_capsule_bytes;
        let limit = if is_fabrics { limit.max(ADMIN_IN_CAPSULE_BYTES) } else { limit };
        if len_bytes <= limit {
            (TransferState::AwaitResponse, len_bytes, len_bytes)
        } else {
            (TransferState::AwaitR2t, len_bytes, 0)
        }
    }

    /// Queues payload, and its data digest if negotiated.
    #[inline]
    fn push_payload(
        &mut self,
        tag: u16,
        offset: u32,
        len_bytes: u32,
        payloads: &impl PayloadDigest,
    ) {
        self.core.send_queue.push_payload(tag, offset, len_bytes);
        if self.core.outgoing.data_digest {
            let digest = payloads.data_digest(tag, offset, len_bytes);
            self.core.send_queue.push_header(&digest.to_le_bytes(), None, 4);
        }
    }

    /// Queues data PDUs, one per slot in rotation, so that a long write does not delay a short one.
    pub(super) fn queue_write_data(&mut self, payloads: &impl PayloadDigest) {
        while let Some(tag) = self.send_list.front().copied()
            && self.core.is_open()
            && self.core.send_queue.has_space(CAPSULE_BYTES + 4)
            && self.core.send_queue.queued_bytes() - self.core.send_queue.sent_bytes()
                < self.send_budget_bytes.into()
        {
            self.send_list.pop_front();
            let has_more = self.queue_h2c_data_pdu(tag, payloads);
            self.slots[usize::from(tag)].is_in_send_list = has_more;
            if has_more {
                self.send_list.push_back(tag);
            }
        }
    }

    /// Queues the next PDU of a slot's oldest requested range. Returns whether more can be sent.
    fn queue_h2c_data_pdu(&mut self, tag: u16, payloads: &impl PayloadDigest) -> bool {
        let limit = usize::from(self.config.r2ts_max);
        let index = usize::from(tag);
        let slot = &mut self.slots[index];
        if slot.state != TransferState::AwaitR2t || slot.r2t_count == 0 {
            // The command was completed early: the controller no longer needs the data.
            return false;
        }
        let range = self.r2ts[index * limit + usize::from(slot.r2t_first)];
        let offset = slot.transferred;
        let len_bytes =
            (range.end - offset).min(self.params.h2c_bytes_max).min(self.send_budget_bytes);
        slot.transferred += len_bytes;
        let is_last = slot.transferred == range.end;
        if is_last {
            slot.r2t_count -= 1;
            slot.r2t_first += 1;
            if usize::from(slot.r2t_first) == limit {
                slot.r2t_first = 0;
            }
        }
        let has_more = slot.r2t_count > 0;
        let cid = slot.cid;
        let pdu = H2CData::new(self.core.outgoing, (cid, range.ttag), offset, len_bytes, is_last);
        self.core.queue_pdu_header(pdu.as_bytes(), pdu.pdo().into());
        self.push_payload(tag, offset, len_bytes, payloads);
        self.slots[index].stream_end = self.core.send_queue.queued_bytes();
        has_more
    }

    /// Completes commands whose response arrived earlier and whose data have now been sent, as far
    /// as there is space for events.
    #[cold]
    pub(super) fn handle_sent_commands(&mut self, events: &mut EventQueue<HostEvent>) {
        let mut index = 0;
        while let Some(tag) = self.completed_unsent.get(index).copied()
            && events.remaining_capacity() > 0
        {
            let CommandSlot { stream_end, completion, .. } = self.slots[usize::from(tag)];
            if stream_end <= self.core.send_queue.sent_bytes() {
                self.completed_unsent.swap_remove(index);
                self.complete_command(tag, completion, events);
            } else {
                index += 1;
            }
        }
    }
}
