//! A host's end of a connection that sends anything, unit by unit.

use std::collections::VecDeque;

use wire::fabrics::{CNTLID_DYNAMIC, Connect, ConnectData, PropertySet, PropertySize};
use wire::layout::Ascii;
use wire::register::offset;
use wire::sgl::Descriptor;
use wire::tcp::{C2HData, CapsuleCmd, CapsuleResp, Framing, H2CData, IcReq, PduType, R2t};
use wire::{Command, Completion, Status, Typed};

use super::stream::{Pipe, Way};

/// Data that were asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked {
    cid: u16,
    ttag: u16,
    offset: u32,
    pub(super) len_bytes: u32,
}

/// A peer.
#[derive(Debug)]
pub(super) struct Peer {
    /// Whose it is.
    pub(super) tenant: u8,
    /// Zero for an admin queue.
    pub(super) qid: u16,
    up: Way,
    down: Way,
    inbox: Vec<u8>,
    next_cid: u16,
    pub(super) asked: VecDeque<Asked>,
    /// Commands that have ended.
    pub(super) ended: Vec<Completion>,
    /// Bytes of data that were begun and have to follow.
    body_left: u32,
    /// It takes nothing of what comes.
    pub(super) is_deaf: bool,
    /// It has sent a header that was changed, and sends nothing but data from now on.
    is_wild: bool,
}

/// CC: enabled, IOSQES 6, IOCQES 4.
const ENABLED: u64 = 4 << 20 | 6 << 16 | 1;
pub(super) const FRAMING: Framing =
    Framing { header_digest: false, data_digest: false, alignment: 0 };

/// The byte that all data of a tenant consist of.
pub(super) fn stamp(tenant: u8) -> u8 {
    0xa1 + tenant
}

pub(super) fn subsystem(tenant: u8) -> String {
    format!("nqn.2026-01.org.tenmil:subsystem{tenant}")
}

pub(super) fn host(tenant: u8) -> String {
    format!("nqn.2026-01.org.tenmil:host{tenant}")
}

impl Peer {
    /// Opens the connection.
    pub(super) fn new(tenant: u8, qid: u16, pipe: &Pipe) -> Self {
        let peer = Self {
            tenant,
            qid,
            up: pipe.up.clone(),
            down: pipe.down.clone(),
            inbox: Vec::new(),
            next_cid: 0,
            asked: VecDeque::new(),
            ended: Vec::new(),
            body_left: 0,
            is_deaf: false,
            is_wild: false,
        };
        peer.push(IcReq::new(0, false, false, 0).as_bytes());
        peer
    }

    pub(super) fn is_over(&self) -> bool {
        self.down.lock().is_closed
    }

    pub(super) fn close(&self) {
        self.up.lock().is_closed = true;
        self.down.lock().is_closed = true;
    }

    fn push(&self, bytes: &[u8]) {
        self.up.lock().bytes.extend(bytes);
    }

    pub(super) fn last_cid(&self) -> u16 {
        self.next_cid
    }

    fn cid(&mut self) -> u16 {
        self.next_cid = (self.next_cid + 1) & 0x3ff;
        self.next_cid
    }

    /// Sends what was begun to its end, since the next unit begins behind it.
    fn end_body(&mut self) {
        let left = core::mem::take(&mut self.body_left);
        self.push(&vec![stamp(self.tenant); left as usize]);
    }

    /// Goes on with what was begun, or with data that belong nowhere if its stream makes no sense.
    pub(super) fn drip(&mut self, count: u32) {
        let count = if self.is_wild { count } else { count.min(self.body_left) };
        self.body_left = self.body_left.saturating_sub(count);
        self.push(&vec![stamp(self.tenant); count as usize]);
    }

    /// Sends a command whose data, if they are in its capsule, come at once.
    pub(super) fn command(&mut self, command: &Command, in_capsule: u32) -> u16 {
        let command = if command.cid() == 0 { command.with_cid(self.cid()) } else { *command };
        let cid = command.cid();
        if !self.is_wild {
            self.end_body();
            self.push(CapsuleCmd::new(FRAMING, &command, in_capsule).as_bytes());
            self.push(&vec![stamp(self.tenant); in_capsule as usize]);
        }
        cid
    }

    /// Sends a header with a byte changed. Nothing but data follow it.
    pub(super) fn bend(&mut self, command: &Command, (at, value): (u8, u8)) {
        if !self.is_wild {
            self.end_body();
            let mut bytes = CapsuleCmd::new(FRAMING, command, 0).as_bytes().to_vec();
            let at = usize::from(at) % bytes.len();
            bytes[at] ^= value;
            self.push(&bytes);
            self.is_wild = true;
        }
    }

    /// Begins to send what was asked for first, or something else than that.
    pub(super) fn answer(&mut self, count: u32, change: (u32, u16, u32)) {
        let Some(asked) = self.asked.pop_front() else { return };
        if self.is_wild {
            return;
        }
        self.end_body();
        let (skip, ttag, more) = change;
        let len_bytes = asked.len_bytes + more;
        let at = asked.offset + skip;
        let names = (asked.cid, asked.ttag ^ ttag);
        self.push(H2CData::new(FRAMING, names, at, len_bytes, true).as_bytes());
        self.is_wild = change != (0, 0, 0);
        self.body_left = if self.is_wild { 0 } else { len_bytes };
        self.drip(count);
    }

    /// Connect, with `change` made to the command.
    pub(super) fn connect(&mut self, cntlid: Option<u16>, change: impl Fn(Command) -> Command) {
        let connect = Connect { qid: self.qid, sqsize: 7, ..Connect::default() };
        let data = ConnectData::zeroed().with(|data| {
            data.hostid([self.tenant + 1; 16])
                .cntlid(cntlid.unwrap_or(CNTLID_DYNAMIC))
                .subnqn(Ascii::nul_padded(&subsystem(self.tenant)))
                .hostnqn(Ascii::nul_padded(&host(self.tenant)))
        });
        let len = u32::try_from(ConnectData::BYTES).unwrap_or(0);
        let cid = self.cid();
        let command = connect.to_command().with_cid(cid).with_sgl1(Descriptor::in_capsule(0, len));
        self.push(CapsuleCmd::new(FRAMING, &change(command), len).as_bytes());
        self.push(data.as_bytes());
    }

    /// Enables its controller.
    pub(super) fn enable(&mut self) {
        let ofst = u32::try_from(offset::CC).unwrap_or(0);
        let set = PropertySet { size: PropertySize::Four, ofst, value: ENABLED };
        self.command(&set.to_command(), 0);
    }

    /// Reads what has come.
    ///
    /// # Panics
    ///
    /// If it got what is another tenant's, or nobody's.
    pub(super) fn read(&mut self) {
        if self.is_deaf {
            return;
        }
        self.inbox.append(&mut self.down.lock().bytes);
        let mut at = 0;
        while let Some(unit) = whole(&self.inbox[at..]) {
            let len = unit.len();
            let unit = unit.to_vec();
            self.handle(&unit);
            at += len;
        }
        self.inbox.drain(..at);
    }

    fn handle(&mut self, unit: &[u8]) {
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
                self.asked.push_back(Asked { cid, ttag, offset, len_bytes });
            }
            Some(kind) if kind == PduType::C2HData as u8 => {
                let Some(bytes) = unit.first_chunk() else { return };
                let pdu = C2HData::from_bytes(bytes);
                let data = &unit[usize::from(pdu.pdo())..];
                let is_own = |byte: &u8| *byte == 0 || *byte == stamp(self.tenant);
                assert!(
                    self.qid == 0 || data.iter().all(is_own),
                    "tenant {} read {:02x?}, expected zeroes or {:02x}",
                    self.tenant,
                    data.iter().find(|byte| !is_own(byte)),
                    stamp(self.tenant)
                );
                if pdu.success() {
                    self.ended.push(Completion::new(pdu.cccid(), Status::SUCCESS));
                }
            }
            _ => {}
        }
    }
}

/// The first unit, if all of it is there.
fn whole(bytes: &[u8]) -> Option<&[u8]> {
    let len = u32::from_le_bytes(*bytes.get(4..)?.first_chunk()?) as usize;
    bytes.get(..len.max(8))
}
