//! Fuzzer of the host side, with a scripted controller.

use tenmil_base::Instant;
use tenmil_wire::tcp::{C2HData, CapsuleResp, IcResp, PduFraming, R2t, TERM_REQ_BYTES_MAX};
use tenmil_wire::{Command, Completion, Status};

use super::{
    BYTES_MAX, DEPTH, EndpointOwner, FuzzScript, ScriptedSession, SessionParams, Zeros, mutate_pdu,
};
use crate::{Connection, DataDirection, DigestMode, HostConfig, HostConnection, HostEvent};

/// Feeds a script to a host as the input from its controller.
///
/// # Panics
///
/// If an invariant is violated: a bug of this crate, whatever the bytes are.
pub fn fuzz_host(bytes: &[u8]) {
    let mut script = FuzzScript(bytes);
    let session = SessionParams::from_script(&mut script);
    let digest_mode = |digest| if digest { DigestMode::Preferred } else { DigestMode::Off };
    let config = HostConfig {
        depth: DEPTH,
        in_capsule_bytes: 64,
        hpda: session.alignment,
        header_digest: digest_mode(session.header_digest),
        data_digest: digest_mode(session.data_digest),
        r2ts_max: 2,
        ..HostConfig::default()
    };
    let end = HostConnection::new(config, Instant::default());
    let mut peer = HostPeer::new(end, OutstandingReads::default(), session.fragment_bytes);
    peer.exchange(&[]);
    let ic_pdu = IcResp::new(
        session.alignment,
        session.header_digest,
        session.data_digest,
        4096 + u32::from(script.byte_or_zero()) * 4,
    );
    let ic_bytes = mutate_pdu(&mut script, PduFraming::default(), ic_pdu.as_bytes().to_vec(), 0);
    peer.exchange(&ic_bytes);
    peer.run_script(&mut script, session.framing());
    assert_eq!(
        peer.end.outstanding_tags().count() + peer.end.free_tags(),
        DEPTH.into(),
        "no tag is lost"
    );
    peer.close();
}

/// Length of each command's read data, and the bytes received.
type OutstandingReads = [Option<(u32, u32)>; DEPTH as usize];

/// Host and its owner.
type HostPeer = ScriptedSession<HostConnection, OutstandingReads>;

impl EndpointOwner for HostPeer {
    type Event = HostEvent;

    fn handle_event(&mut self, event: HostEvent) {
        if let HostEvent::ReadCompleted { .. } = event {
            return event.split_read_completed().for_each(|part| self.handle_event(part));
        }
        match event {
            HostEvent::Open(params) => assert!(params.h2c_bytes_max >= 4096),
            HostEvent::Data { placement, at } => {
                let read = self.owner[usize::from(placement.tag)]
                    .as_mut()
                    .expect("only reads receive data");
                assert_eq!(placement.offset, read.1, "data arrive in order");
                read.1 += placement.len_bytes;
                assert!(read.1 <= read.0, "data do not exceed the command's length");
                assert!(at as usize + placement.len_bytes as usize <= self.unconsumed.len());
            }
            HostEvent::Completed { tag, completion, transferred_bytes } => {
                let read = self.owner[usize::from(tag)].take();
                let has_missing_data = read.is_some_and(|(len, received)| received < len);
                assert!(!has_missing_data || !completion.status().is_success(), "a short read");
                assert_eq!(transferred_bytes, read.map_or(0, |(_, received)| received));
            }
            HostEvent::Ended(_) => self.close_events += 1,
            HostEvent::ReadCompleted { .. } => unreachable!("split() never returns it"),
        }
    }

    fn step(&mut self, script: &mut FuzzScript<'_>, framing: PduFraming, step: u8) -> Vec<u8> {
        let (tag, kind) = (u16::from(step >> 4) % 6, step & 7);
        let (offset, len) = (script.next_len(), script.next_len());
        let header = match kind {
            0..=2 => {
                let len = (len % BYTES_MAX) & !3;
                let data =
                    [DataDirection::None, DataDirection::ToHost(len), DataDirection::FromHost(len)]
                        [usize::from(kind)];
                if let Ok(tag) = self.end.submit(&Command::new(kind), data, &Zeros) {
                    let reads = matches!(data, DataDirection::ToHost(_));
                    self.owner[usize::from(tag)] = reads.then_some((len, 0));
                }
                return Vec::new();
            }
            3 | 4 => {
                // Usually the expected offset.
                let received = self.owner.get(usize::from(tag)).copied().flatten();
                let offset =
                    received.filter(|_| offset % 7 != 0).map_or(offset, |(_, received)| received);
                let close_events = (step & 8 != 0, kind == 4 && step & 8 != 0);
                C2HData::new(framing, tag, offset, len, close_events).as_bytes().to_vec()
            }
            5 => {
                let status = if step & 8 == 0 { Status::SUCCESS } else { Status::WRITE_FAULT };
                CapsuleResp::new(framing, &Completion::new(tag, status)).as_bytes().to_vec()
            }
            6 => R2t::new(framing, (tag, 9), offset, len).as_bytes().to_vec(),
            _ => (0..TERM_REQ_BYTES_MAX).map(|_| script.byte_or_zero()).take(8).collect(),
        };
        let len = if matches!(kind, 3 | 4) { len } else { 0 };
        mutate_pdu(script, framing, header, len)
    }
}
