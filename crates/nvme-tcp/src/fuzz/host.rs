//! Fuzzer of the host side, with a scripted controller.

use tenmil_base::Instant;
use tenmil_wire::tcp::{C2HData, CapsuleResp, IcResp, PduFraming, R2t, TERM_REQ_BYTES_MAX};
use tenmil_wire::{Command, Completion, Status};

use super::{BYTES_MAX, DEPTH, Owned, Peer, Script, Setting, Zeros, bend};
use crate::{Connection, DataDirection, DigestMode, HostConfig, HostConnection, HostEvent};

/// Feeds a script to a host as the input from its controller.
///
/// # Panics
///
/// If an invariant is violated: a bug of this crate, whatever the bytes are.
pub fn host(bytes: &[u8]) {
    let mut script = Script(bytes);
    let setting = Setting::of(&mut script);
    let using = |digest| if digest { DigestMode::Preferred } else { DigestMode::Off };
    let config = HostConfig {
        depth: DEPTH,
        in_capsule_bytes: 64,
        hpda: setting.alignment,
        header_digest: using(setting.header_digest),
        data_digest: using(setting.data_digest),
        r2ts_max: 2,
        ..HostConfig::default()
    };
    let end = HostConnection::new(config, Instant::default());
    let mut peer = HostPeer::new(end, Reads::default(), setting.piece);
    peer.turn(&[]);
    let opening = IcResp::new(
        setting.alignment,
        setting.header_digest,
        setting.data_digest,
        4096 + u32::from(script.small()) * 4,
    );
    let opened = bend(&mut script, PduFraming::default(), opening.as_bytes().to_vec(), 0);
    peer.turn(&opened);
    peer.play(&mut script, setting.framing());
    assert_eq!(peer.end.outstanding().count() + peer.end.room(), DEPTH.into(), "no tag is lost");
    peer.close();
}

/// Length of each command's read data, and the bytes received.
type Reads = [Option<(u32, u32)>; DEPTH as usize];

/// Host and its owner.
type HostPeer = Peer<HostConnection, Reads>;

impl Owned for HostPeer {
    type Event = HostEvent;

    fn handle_event(&mut self, event: HostEvent) {
        if let HostEvent::ReadCompleted { .. } = event {
            return event.parts().for_each(|part| self.handle_event(part));
        }
        match event {
            HostEvent::Open(terms) => assert!(terms.h2c_bytes_max >= 4096),
            HostEvent::Data { place, at } => {
                let read = self.owner[usize::from(place.tag)].as_mut().expect("it reads");
                assert_eq!(place.offset, read.1, "data come in order");
                read.1 += place.len_bytes;
                assert!(read.1 <= read.0, "data come to where there is room");
                assert!(at as usize + place.len_bytes as usize <= self.inbox.len());
            }
            HostEvent::Completed { tag, completion, moved_bytes } => {
                let read = self.owner[usize::from(tag)].take();
                let is_short = read.is_some_and(|(len, came)| came < len);
                assert!(!is_short || !completion.status().is_success(), "a short read");
                assert_eq!(moved_bytes, read.map_or(0, |(_, came)| came));
            }
            HostEvent::Ended(_) => self.ends += 1,
            HostEvent::ReadCompleted { .. } => unreachable!("it has parts"),
        }
    }

    fn step(&mut self, script: &mut Script<'_>, framing: PduFraming, step: u8) -> Vec<u8> {
        let (tag, kind) = (u16::from(step >> 4) % 6, step & 7);
        let (offset, len) = (script.len(), script.len());
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
                let came = self.owner.get(usize::from(tag)).copied().flatten();
                let offset = came.filter(|_| offset % 7 != 0).map_or(offset, |(_, came)| came);
                let ends = (step & 8 != 0, kind == 4 && step & 8 != 0);
                C2HData::new(framing, tag, offset, len, ends).as_bytes().to_vec()
            }
            5 => {
                let status = if step & 8 == 0 { Status::SUCCESS } else { Status::WRITE_FAULT };
                CapsuleResp::new(framing, &Completion::new(tag, status)).as_bytes().to_vec()
            }
            6 => R2t::new(framing, (tag, 9), offset, len).as_bytes().to_vec(),
            _ => (0..TERM_REQ_BYTES_MAX).map(|_| script.small()).take(8).collect(),
        };
        let len = if matches!(kind, 3 | 4) { len } else { 0 };
        bend(script, framing, header, len)
    }
}
