//! Fuzzer of the controller side, with a scripted host.

use tenmil_base::Instant;
use tenmil_wire::sgl::Descriptor;
use tenmil_wire::tcp::{CapsuleCmd, H2CData, IcReq, PduFraming};
use tenmil_wire::{Command, Completion, Status};

use super::{
    BYTES_MAX, DEPTH, EndpointOwner, FuzzScript, ScriptedSession, SessionParams, mutate_pdu,
};
use crate::{
    CloseReason, Connection, ControllerConfig, ControllerConnection, ControllerEvent,
    DataPlacement, DataTransfer, QueueKind, SuccessFlagPolicy,
};

/// Feeds a script to a controller as the input from its host.
///
/// # Panics
///
/// If an invariant is violated: a bug of this crate, whatever the bytes are.
pub fn fuzz_controller(bytes: &[u8]) {
    let mut script = FuzzScript(bytes);
    let session = SessionParams::from_script(&mut script);
    let success = [
        SuccessFlagPolicy::Never,
        SuccessFlagPolicy::WithoutFlowControl,
        SuccessFlagPolicy::Always,
    ];
    let config = ControllerConfig {
        depth: DEPTH,
        in_capsule_bytes: 4096,
        transfer_bytes_max: BYTES_MAX,
        cpda: session.alignment,
        h2c_bytes_max: 4096,
        r2t_bytes_max: 2048,
        r2ts_max: 3,
        c2h_bytes_max: 3000,
        success: success[usize::from(script.byte_or_zero()) % 3],
        ..ControllerConfig::default()
    };
    let end = ControllerConnection::new(config, Instant::default());
    let mut peer = ControllerPeer::new(end, ControllerOwner::default(), session.fragment_bytes);
    let mut framing = session.framing();
    let ic_pdu = IcReq::new(
        session.alignment,
        session.header_digest,
        session.data_digest,
        u32::from(script.byte_or_zero()),
    );
    let ic_bytes = mutate_pdu(&mut script, PduFraming::default(), ic_pdu.as_bytes().to_vec(), 0);
    peer.exchange(&ic_bytes);
    if session.alignment == 0 {
        framing.alignment = 0;
    }
    peer.end.set_queue_kind(QueueKind::Io { entries: DEPTH, flow_control: true });
    peer.run_script(&mut script, framing);
    let outstanding = peer.owner.commands.iter().flatten().count();
    assert_eq!(peer.end.outstanding_tags().count(), outstanding, "no tag is lost");
    peer.close();
}

/// Outstanding command of the owner.
#[derive(Clone, Copy)]
struct OutstandingCommand {
    data: DataTransfer,
    received: u32,
    requested: u32,
    is_completed: bool,
    cid: u16,
}

/// State of the owner.
#[derive(Default)]
struct ControllerOwner {
    commands: [Option<OutstandingCommand>; DEPTH as usize],
    /// Whether data are requested in parts.
    requests_in_parts: bool,
}

/// Controller and its owner.
type ControllerPeer = ScriptedSession<ControllerConnection, ControllerOwner>;

impl EndpointOwner for ControllerPeer {
    type Event = ControllerEvent;

    fn handle_event(&mut self, event: ControllerEvent) {
        match event {
            ControllerEvent::Open(params) => assert!(params.r2ts_max >= 1),
            ControllerEvent::Command { tag, command, data } => {
                let placement = &mut self.owner.commands[usize::from(tag)];
                assert!(placement.is_none(), "a tag of an outstanding command is not reused");
                let command = OutstandingCommand {
                    data: data.unwrap_or(DataTransfer::None),
                    received: 0,
                    requested: 0,
                    is_completed: false,
                    cid: command.cid(),
                };
                *placement = Some(command);
                match command.data {
                    DataTransfer::None => self.complete(tag, 0),
                    DataTransfer::FromHost(len) => self.request_data(tag, len),
                    DataTransfer::InCapsule(len) => assert!(len <= 8192),
                    DataTransfer::ToHost(len) => assert!(len <= BYTES_MAX),
                }
            }
            ControllerEvent::Data { placement, at } => self.handle_data(placement, at),
            ControllerEvent::DataComplete { tag, .. } => {
                if !self.owner.commands[usize::from(tag)]
                    .expect("the tag is outstanding")
                    .is_completed
                {
                    self.complete(tag, 0);
                }
            }
            ControllerEvent::Sent { tag } => {
                let command = self.owner.commands[usize::from(tag)].take();
                assert!(
                    command.is_some_and(|command| command.is_completed),
                    "only completed commands are released"
                );
            }
            ControllerEvent::Ended(close_reason) => {
                assert_ne!(close_reason, CloseReason::ConnectTimeout);
                self.close_events += 1;
            }
        }
    }

    fn step(&mut self, script: &mut FuzzScript<'_>, framing: PduFraming, step: u8) -> Vec<u8> {
        self.owner.requests_in_parts = step & 8 != 0;
        let (tag, kind) = (u16::from(step >> 4) % 6, step & 7);
        let (offset, len) = (script.next_len(), script.next_len());
        let command = self.owner.commands.get(usize::from(tag)).copied().flatten();
        let (header, len) = match kind {
            0 => (CapsuleCmd::new(framing, &Command::new(0).with_cid(tag), 0), 0),
            1 | 2 => {
                let sgl = Descriptor::transport_data_block(len);
                let command = Command::new(kind).with_cid(offset.to_le_bytes()[0].into());
                (CapsuleCmd::new(framing, &command.with_sgl1(sgl), 0), 0)
            }
            3 => {
                let sgl = Descriptor::in_capsule(0, len);
                (CapsuleCmd::new(framing, &Command::new(1).with_sgl1(sgl), len), len)
            }
            4 => {
                if let Some(command) = command.filter(|command| !command.is_completed) {
                    let ready = if let DataTransfer::ToHost(len) = command.data { len } else { 0 };
                    self.complete(tag, if step & 8 == 0 { ready } else { 0 });
                }
                return Vec::new();
            }
            5 | 6 => {
                let (cid, received) =
                    command.map_or((tag, offset), |command| (command.cid, command.received));
                let offset = if offset.is_multiple_of(7) { offset } else { received };
                let last = step & 8 != 0;
                let pdu = H2CData::new(framing, (cid, tag), offset, len, last);
                return mutate_pdu(script, framing, pdu.as_bytes().to_vec(), len);
            }
            _ => return (0..8).map(|_| script.byte_or_zero()).collect(),
        };
        mutate_pdu(script, framing, header.as_bytes().to_vec(), len)
    }
}

impl ControllerPeer {
    fn complete(&mut self, tag: u16, len: u32) {
        if let Some(command) = &mut self.owner.commands[usize::from(tag)] {
            command.is_completed = true;
        }
        let result = self.end.complete(tag, len, Completion::new(0, Status::SUCCESS));
        assert_eq!(result, Ok(()), "an outstanding command can be completed");
    }

    /// Requests the whole length, or a part.
    fn request_data(&mut self, tag: u16, len: u32) {
        let part = if self.owner.requests_in_parts { len.min(1024) } else { len };
        assert_eq!(self.end.request_data(tag, part), Ok(()), "the command awaits more data");
        if let Some(command) = &mut self.owner.commands[usize::from(tag)] {
            command.requested += part;
        }
    }

    fn handle_data(&mut self, placement: DataPlacement, at: u32) {
        assert!(at as usize + placement.len_bytes as usize <= self.unconsumed.len());
        let command = self.owner.commands[usize::from(placement.tag)]
            .as_mut()
            .expect("the tag is outstanding");
        if command.is_completed {
            return;
        }
        assert_eq!(placement.offset, command.received, "data arrive in order");
        command.received += placement.len_bytes;
        match command.data {
            DataTransfer::InCapsule(len) => assert!(command.received <= len),
            DataTransfer::FromHost(len) => {
                assert!(command.received <= command.requested, "only requested data are received");
                let (received, requested) = (command.received, command.requested);
                if received == requested && requested < len {
                    self.request_data(placement.tag, len - requested);
                }
            }
            DataTransfer::None | DataTransfer::ToHost(_) => {
                panic!("a command without host data receives none")
            }
        }
    }
}
