//! Fuzzer of the controller side, with a scripted host.

use tenmil_base::Instant;
use tenmil_wire::sgl::Descriptor;
use tenmil_wire::tcp::{CapsuleCmd, H2CData, IcReq, PduFraming};
use tenmil_wire::{Command, Completion, Status};

use super::{BYTES_MAX, DEPTH, Owned, Peer, Script, Setting, bend};
use crate::{
    CloseReason, Connection, ControllerConfig, ControllerConnection, ControllerEvent,
    DataPlacement, DataTransfer, QueueKind, SuccessPolicy,
};

/// Feeds a script to a controller as the input from its host.
///
/// # Panics
///
/// If an invariant is violated: a bug of this crate, whatever the bytes are.
pub fn controller(bytes: &[u8]) {
    let mut script = Script(bytes);
    let setting = Setting::of(&mut script);
    let success = [SuccessPolicy::Never, SuccessPolicy::WithoutFlowControl, SuccessPolicy::Always];
    let config = ControllerConfig {
        depth: DEPTH,
        in_capsule_bytes: 4096,
        transfer_bytes_max: BYTES_MAX,
        cpda: setting.alignment,
        h2c_bytes_max: 4096,
        r2t_bytes_max: 2048,
        r2ts_max: 3,
        c2h_bytes_max: 3000,
        success: success[usize::from(script.small()) % 3],
        ..ControllerConfig::default()
    };
    let end = ControllerConnection::new(config, Instant::default());
    let mut peer = ControllerPeer::new(end, Works::default(), setting.piece);
    let mut framing = setting.framing();
    let opening = IcReq::new(
        setting.alignment,
        setting.header_digest,
        setting.data_digest,
        u32::from(script.small()),
    );
    let opened = bend(&mut script, PduFraming::default(), opening.as_bytes().to_vec(), 0);
    peer.turn(&opened);
    if setting.alignment == 0 {
        framing.alignment = 0;
    }
    peer.end.connected(QueueKind::Io { entries: DEPTH, flow_control: true });
    peer.play(&mut script, framing);
    let known = peer.owner.commands.iter().flatten().count();
    assert_eq!(peer.end.outstanding().count(), known, "no tag is lost");
    peer.close();
}

/// Outstanding command of the owner.
#[derive(Clone, Copy)]
struct Work {
    data: DataTransfer,
    came: u32,
    granted: u32,
    is_finished: bool,
    cid: u16,
}

/// State of the owner.
#[derive(Default)]
struct Works {
    commands: [Option<Work>; DEPTH as usize],
    /// Whether buffers are granted in parts.
    by_parts: bool,
}

/// Controller and its owner.
type ControllerPeer = Peer<ControllerConnection, Works>;

impl Owned for ControllerPeer {
    type Event = ControllerEvent;

    fn handle_event(&mut self, event: ControllerEvent) {
        match event {
            ControllerEvent::Open(terms) => assert!(terms.r2ts_max >= 1),
            ControllerEvent::Command { tag, command, data } => {
                let place = &mut self.owner.commands[usize::from(tag)];
                assert!(place.is_none(), "a tag is given once");
                let work = Work {
                    data: data.unwrap_or(DataTransfer::None),
                    came: 0,
                    granted: 0,
                    is_finished: false,
                    cid: command.cid(),
                };
                *place = Some(work);
                match work.data {
                    DataTransfer::None => self.finish(tag, 0),
                    DataTransfer::FromHost(len) => self.grant(tag, len),
                    DataTransfer::InCapsule(len) => assert!(len <= 8192),
                    DataTransfer::ToHost(len) => assert!(len <= BYTES_MAX),
                }
            }
            ControllerEvent::Data { place, at } => self.handle_data(place, at),
            ControllerEvent::DataComplete { tag, .. } => {
                if !self.owner.commands[usize::from(tag)].expect("it is known").is_finished {
                    self.finish(tag, 0);
                }
            }
            ControllerEvent::Sent { tag } => {
                let work = self.owner.commands[usize::from(tag)].take();
                assert!(work.is_some_and(|work| work.is_finished), "what is finished is released");
            }
            ControllerEvent::Ended(cause) => {
                assert_ne!(cause, CloseReason::ConnectTimeout);
                self.ends += 1;
            }
        }
    }

    fn step(&mut self, script: &mut Script<'_>, framing: PduFraming, step: u8) -> Vec<u8> {
        self.owner.by_parts = step & 8 != 0;
        let (tag, kind) = (u16::from(step >> 4) % 6, step & 7);
        let (offset, len) = (script.len(), script.len());
        let work = self.owner.commands.get(usize::from(tag)).copied().flatten();
        let (header, len) = match kind {
            0 => (CapsuleCmd::new(framing, &Command::new(0).with_cid(tag), 0), 0),
            1 | 2 => {
                let sgl = Descriptor::transport(len);
                let command = Command::new(kind).with_cid(offset.to_le_bytes()[0].into());
                (CapsuleCmd::new(framing, &command.with_sgl1(sgl), 0), 0)
            }
            3 => {
                let sgl = Descriptor::in_capsule(0, len);
                (CapsuleCmd::new(framing, &Command::new(1).with_sgl1(sgl), len), len)
            }
            4 => {
                if let Some(work) = work.filter(|work| !work.is_finished) {
                    let ready = if let DataTransfer::ToHost(len) = work.data { len } else { 0 };
                    self.finish(tag, if step & 8 == 0 { ready } else { 0 });
                }
                return Vec::new();
            }
            5 | 6 => {
                let (cid, came) = work.map_or((tag, offset), |work| (work.cid, work.came));
                let offset = if offset.is_multiple_of(7) { offset } else { came };
                let last = step & 8 != 0;
                let pdu = H2CData::new(framing, (cid, tag), offset, len, last);
                return bend(script, framing, pdu.as_bytes().to_vec(), len);
            }
            _ => return (0..8).map(|_| script.small()).collect(),
        };
        bend(script, framing, header.as_bytes().to_vec(), len)
    }
}

impl ControllerPeer {
    fn finish(&mut self, tag: u16, len: u32) {
        if let Some(work) = &mut self.owner.commands[usize::from(tag)] {
            work.is_finished = true;
        }
        let finished = self.end.complete(tag, len, Completion::new(0, Status::SUCCESS));
        assert_eq!(finished, Ok(()), "a command is finished once");
    }

    /// Grants the whole length, or a part.
    fn grant(&mut self, tag: u16, len: u32) {
        let part = if self.owner.by_parts { len.min(1024) } else { len };
        assert_eq!(self.end.request_data(tag, part), Ok(()), "it needs the room");
        if let Some(work) = &mut self.owner.commands[usize::from(tag)] {
            work.granted += part;
        }
    }

    fn handle_data(&mut self, place: DataPlacement, at: u32) {
        assert!(at as usize + place.len_bytes as usize <= self.inbox.len());
        let work = self.owner.commands[usize::from(place.tag)].as_mut().expect("it is known");
        if work.is_finished {
            return;
        }
        assert_eq!(place.offset, work.came, "data come in order");
        work.came += place.len_bytes;
        match work.data {
            DataTransfer::InCapsule(len) => assert!(work.came <= len),
            DataTransfer::FromHost(len) => {
                assert!(work.came <= work.granted, "nothing comes that was not granted");
                let (came, granted) = (work.came, work.granted);
                if came == granted && granted < len {
                    self.grant(place.tag, len - granted);
                }
            }
            DataTransfer::None | DataTransfer::ToHost(_) => panic!("nothing comes for it"),
        }
    }
}
