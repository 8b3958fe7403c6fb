//! Peers that send anything: units that are nearly right, to both ends.
//!
//! The bytes are a script. Each step names a unit and what to do to it, so that most of what is made
//! comes far: it has the lengths, the digests and the tags that the end expects, but for the fields
//! that the script changes.

use base::{Instant, Span};
use wire::sgl::Descriptor;
use wire::tcp::{
    C2HData, CapsuleCmd, CapsuleResp, Framing, H2CData, IcReq, IcResp, R2t, TERMINATION_BYTES_MAX,
    crc32c,
};
use wire::{Command, Completion, Status};

use crate::{
    Cause, CommandData, Controller, ControllerConfig, ControllerEvent, Data, DigestUse, Events,
    Host, HostConfig, HostEvent, Payloads, Piece, QueueKind, SuccessFlag,
};

/// Commands at each end.
const DEPTH: u16 = 4;
/// The longest data of a command.
const BYTES_MAX: u32 = 16_384;
/// No script turns longer.
const STEPS_MAX: usize = 2_000;

/// Payloads that are all zeros.
struct Zeros;

impl Payloads for Zeros {
    fn digest(&self, _: u16, _: u32, len_bytes: u32) -> u32 {
        crc32c(&vec![0; len_bytes as usize])
    }
}

/// A script, read from its front.
struct Script<'a>(&'a [u8]);

impl Script<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    /// Zero where the script is at its end.
    fn small(&mut self) -> u8 {
        self.byte().unwrap_or(0)
    }

    /// Mostly a length that fits.
    fn len(&mut self) -> u32 {
        match self.small() {
            whole @ 0..=0x3f => u32::from(whole) * 4,
            whole @ 0x40..=0x7f => u32::from(whole - 0x40) * 256,
            odd @ 0x80..=0xbf => u32::from(odd),
            _ => u32::from_le_bytes([self.small(), self.small(), self.small(), self.small()]),
        }
    }
}

/// Digests, alignment and how the stream is cut: the first byte of a script.
struct Setting {
    header_digest: bool,
    data_digest: bool,
    alignment: u8,
    piece: usize,
}

impl Setting {
    fn of(script: &mut Script<'_>) -> Self {
        let (how, piece) = (script.small(), script.small());
        Self {
            header_digest: how & 1 != 0,
            data_digest: how & 2 != 0,
            alignment: how >> 3,
            piece: usize::from(piece).pow(2) + 1,
        }
    }

    fn framing(&self) -> Framing {
        let Self { header_digest, data_digest, alignment, .. } = *self;
        Framing { header_digest, data_digest, alignment }
    }
}

/// A unit of a header and `len` zeros, whole with digests and padding.
fn unit(framing: Framing, header: &[u8], len: u32) -> Vec<u8> {
    let mut bytes = header.to_vec();
    if framing.header_digest {
        bytes.extend(crc32c(header).to_le_bytes());
    }
    if len > 0 {
        let hlen = u8::try_from(header.len()).expect("headers are short");
        bytes.resize(bytes.len().max(framing.data_offset(hlen).into()), 0);
        let data = vec![0; len.min(2 * BYTES_MAX) as usize];
        let digest = crc32c(&data);
        bytes.extend(data);
        if framing.data_digest {
            bytes.extend(digest.to_le_bytes());
        }
    }
    bytes
}

/// Changes a header before it is given its digest, or the whole unit afterwards.
fn bend(script: &mut Script<'_>, framing: Framing, mut header: Vec<u8>, len: u32) -> Vec<u8> {
    let how = script.small();
    let (at, value) = (usize::from(script.small()), script.small());
    if how & 0xc0 == 0x40 && !header.is_empty() {
        let place = at % header.len();
        header[place] = value;
    }
    let mut whole = unit(framing, &header, len);
    if how & 0xc0 == 0x80 && !whole.is_empty() {
        let place = at % whole.len();
        whole[place] ^= value;
    }
    if how & 0xc0 == 0xc0 {
        whole.truncate(at % (whole.len() + 1));
    }
    whole
}

/// Gives a script to a host as what its controller sends.
///
/// # Panics
///
/// If something does not hold that must: a mistake in this crate, never in the bytes.
pub fn host(bytes: &[u8]) {
    let mut script = Script(bytes);
    let setting = Setting::of(&mut script);
    let using = |digest| if digest { DigestUse::Offered } else { DigestUse::Off };
    let mut peer = HostPeer {
        end: Host::new(
            HostConfig {
                depth: DEPTH,
                in_capsule_bytes: 64,
                hpda: setting.alignment,
                header_digest: using(setting.header_digest),
                data_digest: using(setting.data_digest),
                r2ts_max: 2,
                ..HostConfig::default()
            },
            Instant::default(),
        ),
        events: Events::with_capacity(4),
        inbox: Vec::new(),
        reads: [None; DEPTH as usize],
        ends: 0,
    };
    let framing = setting.framing();
    peer.turn(Instant::default(), &[], usize::MAX);
    let opening = IcResp::new(
        setting.alignment,
        setting.header_digest,
        setting.data_digest,
        4096 + u32::from(script.small()) * 4,
    );
    let opened = bend(&mut script, Framing::default(), opening.as_bytes().to_vec(), 0);
    peer.turn(Instant::default(), &opened, setting.piece);
    let mut now = Instant::default();
    for _ in 0..STEPS_MAX {
        let Some(step) = script.byte() else { break };
        now = now.after(Span::from_ms(1));
        let sent = peer.script(&mut script, framing, step);
        peer.turn(now, &sent, setting.piece);
    }
    peer.close(now);
}

/// A host and its owner.
struct HostPeer {
    end: Host,
    events: Events<HostEvent>,
    inbox: Vec<u8>,
    /// How long the data are of commands that read, and how many bytes of them have come.
    reads: [Option<(u32, u32)>; DEPTH as usize],
    ends: usize,
}

impl HostPeer {
    /// What a step of the script does: a command is submitted, or a unit comes.
    fn script(&mut self, script: &mut Script<'_>, framing: Framing, step: u8) -> Vec<u8> {
        let (tag, kind) = (u16::from(step >> 4) % 6, step & 7);
        let (offset, len) = (script.len(), script.len());
        let header = match kind {
            0..=2 => {
                let len = (len % BYTES_MAX) & !3;
                let data = [Data::None, Data::ToHost(len), Data::FromHost(len)][usize::from(kind)];
                if let Ok(tag) = self.end.submit(&Command::new(kind), data, &Zeros) {
                    let reads = matches!(data, Data::ToHost(_));
                    self.reads[usize::from(tag)] = reads.then_some((len, 0));
                }
                return Vec::new();
            }
            3 | 4 => {
                // Mostly what comes next.
                let came = self.reads.get(usize::from(tag)).copied().flatten();
                let offset = came.filter(|_| offset % 7 != 0).map_or(offset, |(_, came)| came);
                let ends = (step & 8 != 0, kind == 4 && step & 8 != 0);
                C2HData::new(framing, tag, offset, len, ends).as_bytes().to_vec()
            }
            5 => {
                let status = if step & 8 == 0 { Status::SUCCESS } else { Status::WRITE_FAULT };
                CapsuleResp::new(framing, &Completion::new(tag, status)).as_bytes().to_vec()
            }
            6 => R2t::new(framing, (tag, 9), offset, len).as_bytes().to_vec(),
            _ => (0..TERMINATION_BYTES_MAX).map(|_| script.small()).take(8).collect(),
        };
        let len = if matches!(kind, 3 | 4) { len } else { 0 };
        bend(script, framing, header, len)
    }

    fn turn(&mut self, now: Instant, bytes: &[u8], piece: usize) {
        for part in bytes.chunks(piece.max(1)) {
            self.inbox.extend_from_slice(part);
            self.read(now);
        }
        self.end.fill(&Zeros);
        let len = len_of(self.end.pieces(), self.end.headers(), DEPTH);
        self.end.sent(len, &mut self.events);
        self.handle();
        self.read(now);
        assert!(self.end.deadline() >= now, "a deadline was missed");
    }

    fn read(&mut self, now: Instant) {
        loop {
            let taken = self.end.receive(now, &self.inbox, &mut self.events);
            let any = self.handle();
            self.inbox.drain(..taken);
            if taken == 0 && !any {
                return;
            }
        }
    }

    fn handle(&mut self) -> bool {
        for event in self.events.as_slice() {
            match *event {
                HostEvent::Open(terms) => assert!(terms.h2c_bytes_max >= 4096),
                HostEvent::Data { place, at } => {
                    let read = self.reads[usize::from(place.tag)].as_mut().expect("it reads");
                    assert_eq!(place.offset, read.1, "data come in order");
                    read.1 += place.len_bytes;
                    assert!(read.1 <= read.0, "data come to where there is room");
                    assert!(at as usize + place.len_bytes as usize <= self.inbox.len());
                }
                HostEvent::Done { tag, completion, moved_bytes } => {
                    let read = self.reads[usize::from(tag)].take();
                    let is_short = read.is_some_and(|(len, came)| came < len);
                    assert!(!is_short || !completion.status().is_success(), "a short read");
                    assert_eq!(moved_bytes, read.map_or(0, |(_, came)| came));
                }
                HostEvent::Ended(_) => self.ends += 1,
            }
        }
        let any = !self.events.as_slice().is_empty();
        self.events.clear();
        assert!(self.ends <= 1, "an end is told once");
        any
    }

    fn close(&mut self, now: Instant) {
        let outstanding = self.end.outstanding().count();
        assert_eq!(outstanding + self.end.room(), usize::from(DEPTH), "no tag is lost");
        self.end.receive_end(self.inbox.len(), &mut self.events);
        self.handle();
        self.end.expired(now.after(Span::from_secs(100)), &mut self.events);
        self.handle();
        assert!(self.end.is_over() && self.ends == 1);
    }
}

/// Gives a script to a controller as what its host sends.
///
/// # Panics
///
/// If something does not hold that must: a mistake in this crate, never in the bytes.
pub fn controller(bytes: &[u8]) {
    let mut script = Script(bytes);
    let setting = Setting::of(&mut script);
    let success = [SuccessFlag::Never, SuccessFlag::WithoutFlowControl, SuccessFlag::Always];
    let mut peer = ControllerPeer {
        end: Controller::new(
            ControllerConfig {
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
            },
            Instant::default(),
        ),
        events: Events::with_capacity(4),
        inbox: Vec::new(),
        commands: [None; DEPTH as usize],
        ends: 0,
        step: 0,
    };
    let mut framing = setting.framing();
    let opening = IcReq::new(
        setting.alignment,
        setting.header_digest,
        setting.data_digest,
        u32::from(script.small()),
    );
    let opened = bend(&mut script, Framing::default(), opening.as_bytes().to_vec(), 0);
    peer.turn(Instant::default(), &opened, setting.piece);
    if setting.alignment == 0 {
        framing.alignment = 0;
    }
    peer.end.connected(QueueKind::Io { entries: DEPTH, flow_control: true });
    let mut now = Instant::default();
    for _ in 0..STEPS_MAX {
        let Some(step) = script.byte() else { break };
        now = now.after(Span::from_ms(1));
        peer.step = step;
        let sent = peer.script(&mut script, framing, step);
        peer.turn(now, &sent, setting.piece);
    }
    peer.close(now);
}

/// What is under way at a controller's owner.
#[derive(Clone, Copy)]
struct Work {
    data: CommandData,
    came: u32,
    granted: u32,
    is_finished: bool,
    cid: u16,
}

/// A controller and its owner.
struct ControllerPeer {
    end: Controller,
    events: Events<ControllerEvent>,
    inbox: Vec<u8>,
    commands: [Option<Work>; DEPTH as usize],
    ends: usize,
    step: u8,
}

impl ControllerPeer {
    fn script(&mut self, script: &mut Script<'_>, framing: Framing, step: u8) -> Vec<u8> {
        let (tag, kind) = (u16::from(step >> 4) % 6, step & 7);
        let (offset, len) = (script.len(), script.len());
        let work = self.commands.get(usize::from(tag)).copied().flatten();
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
                    let ready = if let CommandData::ToHost(len) = work.data { len } else { 0 };
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

    fn finish(&mut self, tag: u16, len: u32) {
        if let Some(work) = &mut self.commands[usize::from(tag)] {
            work.is_finished = true;
        }
        self.end.finish(tag, len, Completion::new(0, Status::SUCCESS));
    }

    fn turn(&mut self, now: Instant, bytes: &[u8], piece: usize) {
        for part in bytes.chunks(piece.max(1)) {
            self.inbox.extend_from_slice(part);
            self.read(now);
        }
        self.end.fill(&Zeros);
        let len = len_of(self.end.pieces(), self.end.headers(), DEPTH);
        self.end.sent(len, &mut self.events);
        self.handle();
        self.read(now);
        assert!(self.end.deadline() >= now, "a deadline was missed");
    }

    fn read(&mut self, now: Instant) {
        loop {
            let taken = self.end.receive(now, &self.inbox, &mut self.events);
            let any = self.handle();
            self.inbox.drain(..taken);
            if taken == 0 && !any {
                return;
            }
        }
    }

    fn handle(&mut self) -> bool {
        let events: Vec<_> = self.events.as_slice().to_vec();
        self.events.clear();
        for event in &events {
            self.handle_event(*event);
        }
        assert!(self.ends <= 1, "an end is told once");
        !events.is_empty()
    }

    fn handle_event(&mut self, event: ControllerEvent) {
        match event {
            ControllerEvent::Open(terms) => assert!(terms.r2ts_max >= 1),
            ControllerEvent::Command { tag, command, data } => {
                let place = &mut self.commands[usize::from(tag)];
                assert!(place.is_none(), "a tag is given once");
                let work = Work {
                    data: data.unwrap_or(CommandData::None),
                    came: 0,
                    granted: 0,
                    is_finished: false,
                    cid: command.cid(),
                };
                *place = Some(work);
                match work.data {
                    CommandData::None => self.finish(tag, 0),
                    CommandData::FromHost(len) => self.grant(tag, len),
                    CommandData::InCapsule(len) => assert!(len <= 8192),
                    CommandData::ToHost(len) => assert!(len <= BYTES_MAX),
                }
            }
            ControllerEvent::Data { place, at } => self.handle_data(place, at),
            ControllerEvent::Arrived { tag, .. } => {
                if !self.commands[usize::from(tag)].expect("it is known").is_finished {
                    self.finish(tag, 0);
                }
            }
            ControllerEvent::Released { tag } => {
                let work = self.commands[usize::from(tag)].take();
                assert!(work.is_some_and(|work| work.is_finished), "what is finished is released");
            }
            ControllerEvent::Ended(cause) => {
                assert_ne!(cause, Cause::NotOpened);
                self.ends += 1;
            }
        }
    }

    /// All at once, or by parts.
    fn grant(&mut self, tag: u16, len: u32) {
        let part = if self.step & 8 == 0 { len } else { len.min(1024) };
        self.end.grant(tag, part);
        if let Some(work) = &mut self.commands[usize::from(tag)] {
            work.granted += part;
        }
    }

    fn handle_data(&mut self, place: crate::Place, at: u32) {
        assert!(at as usize + place.len_bytes as usize <= self.inbox.len());
        let work = self.commands[usize::from(place.tag)].as_mut().expect("it is known");
        if work.is_finished {
            return;
        }
        assert_eq!(place.offset, work.came, "data come in order");
        work.came += place.len_bytes;
        match work.data {
            CommandData::InCapsule(len) => assert!(work.came <= len),
            CommandData::FromHost(len) => {
                assert!(work.came <= work.granted, "nothing comes that was not granted");
                let (came, granted) = (work.came, work.granted);
                if came == granted && granted < len {
                    self.grant(place.tag, len - granted);
                }
            }
            CommandData::None | CommandData::ToHost(_) => panic!("nothing comes for it"),
        }
    }

    fn close(&mut self, now: Instant) {
        let known = self.commands.iter().flatten().count();
        assert_eq!(self.end.outstanding().count(), known, "no tag is lost");
        self.end.receive_end(self.inbox.len(), &mut self.events);
        self.handle();
        self.end.expired(now.after(Span::from_secs(100)), &mut self.events);
        self.handle();
        assert!(self.end.is_over() && self.ends == 1);
    }
}

/// How many bytes the pieces have, each of which lies where it may.
fn len_of(pieces: &[Piece], headers: &[u8], tags: u16) -> usize {
    let len = |piece: &Piece| match *piece {
        Piece::Headers { at, len_bytes } => headers[at as usize..][..len_bytes as usize].len(),
        Piece::Payload { tag, offset, len_bytes } => {
            assert!(tag < tags && offset + len_bytes <= BYTES_MAX);
            len_bytes as usize
        }
    };
    pieces.iter().map(len).sum()
}

#[cfg(test)]
mod tests {
    use base::Random;

    #[test]
    fn nothing_that_must_hold_is_broken_by_scripts_of_any_kind() {
        let mut random = Random::new(0x7c9_0001);
        for _ in 0..3_000 {
            let len = random.below(400);
            let bytes: Vec<u8> = (0..len).map(|_| random.draw().to_le_bytes()[0]).collect();
            super::host(&bytes);
            super::controller(&bytes);
            // Few bits: digests off, openings that are right, units that are not bent.
            let calm: Vec<u8> = bytes.iter().map(|byte| byte & 0x3f).collect();
            super::host(&calm);
            super::controller(&calm);
        }
    }
}
