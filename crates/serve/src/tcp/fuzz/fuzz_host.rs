//! Host side of a connection that sends arbitrary PDUs.

use std::collections::VecDeque;

use tenmil_wire::fabrics::{CNTLID_DYNAMIC, Connect, ConnectData, PropertySet, PropertySize};
use tenmil_wire::layout::Ascii;
use tenmil_wire::register::offset;
use tenmil_wire::sgl::Descriptor;
use tenmil_wire::tcp::{
    C2HData, CapsuleCmd, CapsuleResp, H2CData, IcReq, PduFraming, PduType, R2t,
};
use tenmil_wire::{Command, Completion, Status, TypedCommand};

use super::simulated_stream::{PipeDirection, SimulatedStream};

/// Data range requested by an R2T.
#[derive(Clone, Copy, Debug)]
pub(super) struct DataRequest {
    cid: u16,
    ttag: u16,
    offset: u32,
    pub(super) len_bytes: u32,
}

/// Fuzzed host connection.
#[derive(Debug)]
pub(super) struct FuzzHost {
    /// Tenant that the host belongs to.
    pub(super) tenant: u8,
    /// Queue ID; zero for an admin queue.
    pub(super) qid: u16,
    up: PipeDirection,
    down: PipeDirection,
    inbox: Vec<u8>,
    next_cid: u16,
    pub(super) asked: VecDeque<DataRequest>,
    /// Completions received.
    pub(super) ended: Vec<Completion>,
    /// Data of the last C2HData PDU.
    pub(super) last_data: Option<Vec<u8>>,
    /// Remaining bytes of an H2CData PDU that was begun.
    body_left: u32,
    /// The peer reads nothing.
    pub(super) is_deaf: bool,
    /// The peer has sent a modified header, and sends nothing but data from now on.
    is_wild: bool,
}

/// CC of an enabled controller: EN 1, IOSQES 6, IOCQES 4.
const ENABLED: u64 = 4 << 20 | 6 << 16 | 1;
pub(super) const FRAMING: PduFraming =
    PduFraming { header_digest: false, data_digest: false, alignment: 0 };

/// Byte that all data of a tenant consist of.
pub(super) fn tenant_byte(tenant: u8) -> u8 {
    0xa1 + tenant
}

pub(super) fn subsystem_nqn(tenant: u8) -> String {
    format!("nqn.2026-01.org.tenmil:subsystem{tenant}")
}

pub(super) fn host_nqn(tenant: u8) -> String {
    format!("nqn.2026-01.org.tenmil:host{tenant}")
}

impl FuzzHost {
    /// Opens the connection with an ICReq.
    pub(super) fn new(tenant: u8, qid: u16, pipe: &SimulatedStream) -> Self {
        let peer = Self {
            tenant,
            qid,
            up: pipe.up.clone(),
            down: pipe.down.clone(),
            inbox: Vec::new(),
            next_cid: 0,
            asked: VecDeque::new(),
            ended: Vec::new(),
            last_data: None,
            body_left: 0,
            is_deaf: false,
            is_wild: false,
        };
        peer.send_pdu(IcReq::new(0, false, false, 0).as_bytes());
        peer
    }

    pub(super) fn is_closed(&self) -> bool {
        self.down.lock().is_closed
    }

    pub(super) fn close(&self) {
        self.up.lock().is_closed = true;
        self.down.lock().is_closed = true;
    }

    fn send_pdu(&self, bytes: &[u8]) {
        self.up.lock().bytes.extend(bytes);
    }

    pub(super) fn last_cid(&self) -> u16 {
        self.next_cid
    }

    fn next_cid(&mut self) -> u16 {
        self.next_cid = (self.next_cid + 1) & 0x3ff;
        self.next_cid
    }

    /// Completes the PDU that was begun, because the next PDU starts after it.
    fn finish_partial_pdu(&mut self) {
        let left = core::mem::take(&mut self.body_left);
        self.send_pdu(&vec![tenant_byte(self.tenant); left as usize]);
    }

    /// Sends more data of the PDU that was begun, or stray data if the stream is already invalid.
    pub(super) fn continue_pdu_data(&mut self, count: u32) {
        let count = if self.is_wild { count } else { count.min(self.body_left) };
        self.body_left = self.body_left.saturating_sub(count);
        self.send_pdu(&vec![tenant_byte(self.tenant); count as usize]);
    }

    /// Sends a command, immediately followed by its in-capsule data.
    pub(super) fn send_command(&mut self, command: &Command, in_capsule: u32) -> u16 {
        let command = if command.cid() == 0 { command.with_cid(self.next_cid()) } else { *command };
        let cid = command.cid();
        if !self.is_wild {
            self.finish_partial_pdu();
            self.send_pdu(CapsuleCmd::new(FRAMING, &command, in_capsule).as_bytes());
            self.send_pdu(&vec![tenant_byte(self.tenant); in_capsule as usize]);
        }
        cid
    }

    /// Sends a command with these in-capsule data.
    pub(super) fn send_capsule(&mut self, command: &Command, data: &[u8]) -> u16 {
        let cid = self.next_cid();
        let len = u32::try_from(data.len()).unwrap_or(0);
        self.send_pdu(CapsuleCmd::new(FRAMING, &command.with_cid(cid), len).as_bytes());
        self.send_pdu(data);
        cid
    }

    /// Sends a header with one byte modified. Only data follow it.
    pub(super) fn send_corrupted_command(&mut self, command: &Command, (at, value): (u8, u8)) {
        if !self.is_wild {
            self.finish_partial_pdu();
            let mut bytes = CapsuleCmd::new(FRAMING, command, 0).as_bytes().to_vec();
            let at = usize::from(at) % bytes.len();
            bytes[at] ^= value;
            self.send_pdu(&bytes);
            self.is_wild = true;
        }
    }

    /// Begins the H2CData PDU for the oldest R2T, with `change` added to its offset, tag and
    /// length.
    pub(super) fn send_h2c_data(&mut self, count: u32, change: (u32, u16, u32)) {
        let Some(asked) = self.asked.pop_front() else { return };
        if self.is_wild {
            return;
        }
        self.finish_partial_pdu();
        let (skip, ttag, more) = change;
        let len_bytes = asked.len_bytes + more;
        let at = asked.offset + skip;
        let names = (asked.cid, asked.ttag ^ ttag);
        self.send_pdu(H2CData::new(FRAMING, names, at, len_bytes, true).as_bytes());
        self.is_wild = change != (0, 0, 0);
        self.body_left = if self.is_wild { 0 } else { len_bytes };
        self.continue_pdu_data(count);
    }

    /// Sends a Connect command after `change` modified it.
    pub(super) fn send_connect(
        &mut self,
        cntlid: Option<u16>,
        change: impl Fn(Command) -> Command,
    ) {
        let connect = Connect { qid: self.qid, sqsize: 7, ..Connect::default() };
        let data = ConnectData::zeroed().with(|data| {
            data.hostid([self.tenant + 1; 16])
                .cntlid(cntlid.unwrap_or(CNTLID_DYNAMIC))
                .subnqn(Ascii::nul_padded(&subsystem_nqn(self.tenant)))
                .hostnqn(Ascii::nul_padded(&host_nqn(self.tenant)))
        });
        let len = u32::try_from(ConnectData::BYTES).unwrap_or(0);
        let cid = self.next_cid();
        let command = connect.to_command().with_cid(cid).with_sgl1(Descriptor::in_capsule(0, len));
        self.send_pdu(CapsuleCmd::new(FRAMING, &change(command), len).as_bytes());
        self.send_pdu(data.as_bytes());
    }

    /// Enables the controller.
    pub(super) fn send_controller_enable(&mut self) {
        let ofst = u32::try_from(offset::CC).unwrap_or(0);
        let set = PropertySet { size: PropertySize::Four, ofst, value: ENABLED };
        self.send_command(&set.to_command(), 0);
    }

    /// Processes the received PDUs.
    ///
    /// # Panics
    ///
    /// If received data are not zeroes or the stamp of the peer's own tenant.
    pub(super) fn receive_pdus(&mut self) {
        if self.is_deaf {
            return;
        }
        self.inbox.append(&mut self.down.lock().bytes);
        let mut at = 0;
        while let Some(unit) = first_complete_pdu(&self.inbox[at..]) {
            let len = unit.len();
            let unit = unit.to_vec();
            self.handle_pdu(&unit);
            at += len;
        }
        self.inbox.drain(..at);
    }

    fn handle_pdu(&mut self, unit: &[u8]) {
        match unit.first().copied() {
            Some(kind) if kind == PduType::CapsuleResp as u8 => {
                let Some(bytes) = unit.first_chunk() else { return };
                self.ended.push(CapsuleResp::from_bytes(bytes).completion());
            }
            Some(kind) if kind == PduType::R2t as u8 => {
                let Some(bytes) = unit.first_chunk() else { return };
                let pdu = R2t::from_bytes(bytes);
                let (cid, ttag) = (pdu.cccid(), pdu.ttag());
                let (offset, len_bytes) = (pdu.r2to(), pdu.r2tl());
                self.asked.push_back(DataRequest { cid, ttag, offset, len_bytes });
            }
            Some(kind) if kind == PduType::C2HData as u8 => {
                let Some(bytes) = unit.first_chunk() else { return };
                let pdu = C2HData::from_bytes(bytes);
                let data = &unit[usize::from(pdu.pdo())..];
                let is_own = |byte: &u8| *byte == 0 || *byte == tenant_byte(self.tenant);
                assert!(
                    self.qid == 0 || data.iter().all(is_own),
                    "tenant {} read {:02x?}, expected zeroes or {:02x}",
                    self.tenant,
                    data.iter().find(|byte| !is_own(byte)),
                    tenant_byte(self.tenant)
                );
                self.last_data = Some(data.to_vec());
                if pdu.success() {
                    self.ended.push(Completion::new(pdu.cccid(), Status::SUCCESS));
                }
            }
            _ => {}
        }
    }
}

/// First PDU, if it was received completely.
fn first_complete_pdu(bytes: &[u8]) -> Option<&[u8]> {
    let len = u32::from_le_bytes(*bytes.get(4..)?.first_chunk()?) as usize;
    bytes.get(..len.max(8))
}
