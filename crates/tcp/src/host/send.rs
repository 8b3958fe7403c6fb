//! Commands and their data, on their way out.

use wire::sgl::Descriptor;
use wire::tcp::{ADMIN_IN_CAPSULE_BYTES, CapsuleCmd, H2CData};
use wire::{AdminOpcode, Command};

use super::slot::{Slot, State};
use super::{CAPSULE_BYTES, Data, Full, Host, HostEvent};
use crate::Payloads;
use crate::events::Events;

impl Host {
    /// Sends a command. Its identifier and SGL are written here; data that fit go with it.
    ///
    /// The tag that comes back is its own until [`HostEvent::Done`]. Data from host to controller
    /// must not change, and data to the host may be written, until then.
    ///
    /// # Panics
    ///
    /// If data outside of a capsule are no whole dwords: NVMe/TCP cannot carry them (§3.6.2.8).
    #[inline]
    pub fn submit(
        &mut self,
        command: &Command,
        data: Data,
        payloads: &impl Payloads,
    ) -> Result<u16, Full> {
        let is_possible = self.can_submit();
        let tag = self.free.pop_if(|_| is_possible).ok_or(Full)?;
        self.queue(tag, command, data, payloads);
        Ok(tag)
    }

    /// As [`submit`](Self::submit), under a tag that the caller has chosen: for a host whose tags are
    /// [the caller's](super::HostConfig::names_tags).
    ///
    /// # Panics
    ///
    /// As there; and if the tag is out, or not below the depth.
    #[inline]
    pub fn submit_as(
        &mut self,
        tag: u16,
        command: &Command,
        data: Data,
        payloads: &impl Payloads,
    ) -> Result<(), Full> {
        if !self.can_submit() {
            return Err(Full);
        }
        let is_free = self.slots[usize::from(tag)].state == State::Free;
        assert!(is_free && self.config.names_tags, "tag {tag} is not for the caller to give");
        self.queue(tag, command, data, payloads);
        Ok(())
    }

    #[inline]
    fn can_submit(&self) -> bool {
        self.line.is_open() && self.line.out.has_room(CAPSULE_BYTES + 4)
    }

    #[inline(always)]
    fn queue(&mut self, tag: u16, command: &Command, data: Data, payloads: &impl Payloads) {
        let (state, len_bytes, in_capsule) = match data {
            Data::ToHost(len) if len > 0 => (State::Data, len, 0),
            Data::FromHost(len) if len > 0 => self.plan(command, len),
            _ => (State::Answer, 0, 0),
        };
        assert!(in_capsule > 0 || len_bytes & 3 == 0, "data outside of a capsule are dwords");
        let descriptor = match in_capsule {
            0 => Descriptor::transport(len_bytes),
            len => Descriptor::in_capsule(0, len),
        };
        let command = command.with_cid(tag).with_sgl1(descriptor);
        let framing = self.line.outgoing;
        let pdu = CapsuleCmd::new(framing, &command, in_capsule);
        self.line.push(pdu.as_bytes(), pdu.pdo().into());
        if in_capsule > 0 {
            self.push_data(tag, 0, in_capsule, payloads);
        }
        let slot = &mut self.slots[usize::from(tag)];
        *slot = Slot {
            sent_end: self.line.out.queued_bytes(),
            len_bytes,
            state,
            is_pending: slot.is_pending,
            ..Slot::FREE
        };
    }

    /// How data from host to controller travel: the state that awaits them, all of them, and how
    /// many go in the capsule.
    fn plan(&self, command: &Command, len_bytes: u32) -> (State, u32, u32) {
        let is_fabrics = command.opcode() == AdminOpcode::FabricsCommands.code();
        let most = self.config.in_capsule_bytes;
        let most = if is_fabrics { most.max(ADMIN_IN_CAPSULE_BYTES) } else { most };
        if len_bytes <= most {
            (State::Answer, len_bytes, len_bytes)
        } else {
            (State::Ask, len_bytes, 0)
        }
    }

    /// Queues payload, and its digest if there is one.
    #[inline]
    fn push_data(&mut self, tag: u16, offset: u32, len_bytes: u32, payloads: &impl Payloads) {
        self.line.out.push_payload(tag, offset, len_bytes);
        if self.line.outgoing.data_digest {
            let digest = payloads.digest(tag, offset, len_bytes);
            self.line.out.push_header(&digest.to_le_bytes(), None, 4);
        }
    }

    /// One unit for each slot in turn, so that a long write does not hold up a short one.
    pub(super) fn fill_data(&mut self, payloads: &impl Payloads) {
        while let Some(tag) = self.pending.front().copied()
            && self.line.is_open()
            && self.line.out.has_room(CAPSULE_BYTES + 4)
            && self.line.out.queued_bytes() - self.line.out.sent_bytes() < self.portion_bytes.into()
        {
            self.pending.pop_front();
            let has_more = self.send_piece(tag, payloads);
            self.slots[usize::from(tag)].is_pending = has_more;
            if has_more {
                self.pending.push_back(tag);
            }
        }
    }

    /// Queues the next unit of a slot's oldest range. Whether there is more to come.
    fn send_piece(&mut self, tag: u16, payloads: &impl Payloads) -> bool {
        let most = usize::from(self.config.r2ts_max);
        let index = usize::from(tag);
        let slot = &mut self.slots[index];
        if slot.state != State::Ask || slot.asks == 0 {
            // It was answered early: whoever answers no longer wants the data.
            return false;
        }
        let ask = self.asks[index * most + usize::from(slot.ask_first)];
        let offset = slot.moved;
        let len_bytes = (ask.end - offset).min(self.terms.h2c_bytes_max).min(self.portion_bytes);
        slot.moved += len_bytes;
        let is_last = slot.moved == ask.end;
        if is_last {
            slot.asks -= 1;
            slot.ask_first += 1;
            if usize::from(slot.ask_first) == most {
                slot.ask_first = 0;
            }
        }
        let has_more = slot.asks > 0;
        let pdu = H2CData::new(self.line.outgoing, (tag, ask.ttag), offset, len_bytes, is_last);
        self.line.push(pdu.as_bytes(), pdu.pdo().into());
        self.push_data(tag, offset, len_bytes, payloads);
        self.slots[index].sent_end = self.line.out.queued_bytes();
        has_more
    }

    /// Ends those that were answered before, and have been sent now, as far as there is room.
    #[cold]
    pub(super) fn end_answered(&mut self, events: &mut Events<HostEvent>) {
        let mut index = 0;
        while let Some(tag) = self.answered.get(index).copied()
            && events.room() > 0
        {
            let Slot { sent_end, completion, .. } = self.slots[usize::from(tag)];
            if sent_end <= self.line.out.sent_bytes() {
                self.answered.swap_remove(index);
                self.end(tag, completion, events);
            } else {
                index += 1;
            }
        }
    }
}
