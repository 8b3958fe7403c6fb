//! Steps of a script.

use std::sync::atomic::Ordering;

use tenmil_wire::sgl::Descriptor;
use tenmil_wire::{AdminOpcode, Command, Fuse, IoOpcode};

use super::fuzz_host::FuzzHost;
use super::{
    BLOCKS, FuzzTarget, PEERS_MAX, STEPS_MAX, STUCK_MAX, TENANTS, TRANSFER_BYTES_MAX,
    read_or_write_command,
};

/// Script, consumed from the front; zero at its end.
struct ScriptBytes<'a>(&'a [u8]);

impl ScriptBytes<'_> {
    fn next_byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    /// Normal in most cases.
    fn next_fuse(&mut self) -> Fuse {
        match self.next_byte() & 7 {
            1 => Fuse::First,
            2 => Fuse::Second,
            3 => Fuse::Reserved,
            _ => Fuse::Normal,
        }
    }

    /// A multiple of the block size in most cases.
    fn next_len(&mut self) -> u32 {
        match self.next_byte() {
            few @ 0..=0x7f => u32::from(few % 65) * 512,
            0x80..=0xbf => TRANSFER_BYTES_MAX,
            odd @ 0xc0..=0xef => u32::from(odd) * 4,
            far => u32::from(far) << 12,
        }
    }
}

/// Kind of a step. The other bits of its byte select the peer, and whether the service runs before
/// the next step.
const DIAL: u8 = 0;
const TRANSFER: u8 = 1;
const PAIR: u8 = 2;
const FABRICS: u8 = 3;
const ANSWER: u8 = 4;
const BEGIN: u8 = 5;
const DRIP: u8 = 6;
const ABORT: u8 = 7;
const CLOSE: u8 = 8;
const DEAF: u8 = 9;
const TIME: u8 = 10;
const STUCK: u8 = 11;
const BEND: u8 = 12;
const ADMIN: u8 = 13;
const WRONG: u8 = 14;
const MANY: u8 = 15;

impl FuzzTarget {
    /// Runs a script to its end.
    pub(super) fn run_script(&mut self, bytes: &[u8]) {
        let mut script = ScriptBytes(bytes);
        for _ in 0..STEPS_MAX {
            if script.0.is_empty() {
                break;
            }
            let step = script.next_byte();
            self.execute_step(step & 15, step >> 4 & 7, &mut script);
            if step & 0x80 == 0 {
                self.submit_well_behaved_command();
                self.poll_until_idle();
            }
        }
    }

    fn execute_step(&mut self, kind: u8, whom: u8, script: &mut ScriptBytes<'_>) {
        match kind {
            DIAL => return self.open_scripted_connection(whom, script),
            TIME => return self.advance_time(u64::from(script.next_byte() % 20)),
            STUCK => return self.stall_device(1 + whom % (TENANTS - 1)),
            ABORT => return self.send_abort(whom, script),
            _ => {}
        }
        let count = self.peers.len().max(1);
        let Some(peer) = self.peers.get_mut(usize::from(whom) % count) else { return };
        match kind {
            TRANSFER => send_scripted_io_command(peer, script),
            PAIR => send_fused_commands(peer, script),
            FABRICS => send_scripted_fabrics_command(peer, script),
            ANSWER => peer.send_h2c_data(u32::MAX >> 8, (0, 0, 0)),
            BEGIN => peer.send_h2c_data(script.next_byte().into(), (0, 0, 0)),
            DRIP => peer.continue_pdu_data(u32::from(script.next_byte() & 0x3f) + 1),
            CLOSE => peer.close(),
            DEAF => peer.is_deaf = !peer.is_deaf,
            BEND => peer.send_corrupted_command(
                &Command::new(1).with_cid(1),
                (script.next_byte(), script.next_byte()),
            ),
            ADMIN => send_scripted_admin_command(peer, script),
            WRONG => {
                let (skip, ttag) =
                    (u32::from(script.next_byte()), u16::from(script.next_byte() & 3));
                peer.send_h2c_data(
                    script.next_len(),
                    (skip, ttag, u32::from(script.next_byte() & 4)),
                );
            }
            MANY => {
                for _ in 0..8 {
                    let sgl = Descriptor::transport_data_block(TRANSFER_BYTES_MAX);
                    let command =
                        read_or_write_command(IoOpcode::Write.code(), 0, TRANSFER_BYTES_MAX / 512);
                    peer.send_command(&command.with_sgl1(sgl), 0);
                }
            }
            _ => {}
        }
    }

    /// Opens a connection of a tenant other than the first: its admin queue, then I/O queues.
    /// Connect is sent in most cases.
    fn open_scripted_connection(&mut self, whom: u8, script: &mut ScriptBytes<'_>) {
        let (how, fuse) = (script.next_byte(), script.next_fuse());
        let tenant = 1 + whom % (TENANTS - 1);
        if self.peers.len() >= PEERS_MAX {
            return;
        }
        let of_tenant = |peer: &&FuzzHost| peer.tenant == tenant;
        let qids = self.peers.iter().filter(of_tenant).map(|peer| peer.qid);
        let qid = qids.max().map_or(0, |qid| qid + 1);
        let piece = if how & 3 == 0 { 700 } else { 16 << 10 };
        let before = self.peers.len();
        self.open_connection(tenant, qid, piece);
        if how & 0xf0 == 0xf0 {
            return;
        }
        let cntlid = self.cntlid_of_association(tenant).filter(|_| qid > 0);
        let Some(peer) = self.peers.get_mut(before) else { return };
        peer.send_connect(cntlid, |command| command.with_fuse(fuse));
        if qid == 0 {
            peer.send_controller_enable();
        }
    }

    /// Controller ID of a tenant, from the completion of its Connect.
    fn cntlid_of_association(&self, tenant: u8) -> Option<u16> {
        let admin = self.peers.iter().find(|peer| peer.tenant == tenant && peer.qid == 0)?;
        u16::try_from(admin.ended.first()?.dw0()).ok()
    }

    fn stall_device(&mut self, tenant: u8) {
        if let Some(medium) = self.media.get_mut(usize::from(tenant)) {
            medium.is_stuck.store(true, Ordering::Relaxed);
            medium.stuck_until = self.now.after(STUCK_MAX);
        }
    }

    /// Sends an Abort of one of the last commands of a queue.
    fn send_abort(&mut self, whom: u8, script: &mut ScriptBytes<'_>) {
        let back = u16::from(script.next_byte() & 7);
        let queues: Vec<(u8, u16, u16)> =
            self.peers.iter().map(|peer| (peer.tenant, peer.qid, peer.last_cid())).collect();
        let Some(&(tenant, qid, last)) = queues.get(usize::from(whom) % queues.len().max(1)) else {
            return;
        };
        let is_admin = |peer: &&mut FuzzHost| peer.tenant == tenant && peer.qid == 0;
        let Some(admin) = self.peers.iter_mut().find(is_admin) else { return };
        let cdw10 = u32::from(last.saturating_sub(back)) << 16 | u32::from(qid);
        admin.send_command(&Command::new(AdminOpcode::Abort.code()).with_cdw10(cdw10), 0);
    }
}

/// Sends an I/O command, with in-capsule data or data transferred after an R2T.
fn send_scripted_io_command(peer: &mut FuzzHost, script: &mut ScriptBytes<'_>) {
    let (how, fuse, len) = (script.next_byte(), script.next_fuse(), script.next_len());
    let opcode = [1, 2, 1, 2, 5, 0, 8, 9, 0x0c, 0x81][usize::from(how & 0x1f) % 10];
    let lba = u32::from(script.next_byte()) % u32::try_from(BLOCKS).unwrap_or(1);
    let blocks = if how & 0xe0 == 0xe0 { 1 } else { len / 512 };
    let command = read_or_write_command(opcode, lba, blocks).with_fuse(fuse);
    send_io_command(peer, &command, len, how & 0x20 != 0 && opcode & 3 == 1);
}

/// Sends a fused Compare and Write, or only the first of them.
fn send_fused_commands(peer: &mut FuzzHost, script: &mut ScriptBytes<'_>) {
    let (how, len) = (script.next_byte(), script.next_len() % 4608);
    for (opcode, fuse) in [(IoOpcode::Compare, Fuse::First), (IoOpcode::Write, Fuse::Second)] {
        let command =
            read_or_write_command(opcode.code(), (how & 3).into(), len / 512).with_fuse(fuse);
        send_io_command(peer, &command, len, how & 0x20 != 0);
        if how & 0xc0 == 0xc0 {
            return;
        }
    }
}

/// Sends a Fabrics command of any type.
fn send_scripted_fabrics_command(peer: &mut FuzzHost, script: &mut ScriptBytes<'_>) {
    let (kind, fuse, len) = (script.next_byte() % 12, script.next_fuse(), script.next_len());
    let command = Command::new(AdminOpcode::FabricsCommands.code());
    send_io_command(peer, &command.with_nsid(kind.into()).with_fuse(fuse), len, false);
}

/// Sends an admin command, on any queue.
fn send_scripted_admin_command(peer: &mut FuzzHost, script: &mut ScriptBytes<'_>) {
    let (how, fuse, len) = (script.next_byte(), script.next_fuse(), script.next_len());
    let opcode = [0x06, 0x02, 0x0a, 0x09, 0x0c, 0x18, 0x08, 0x38][usize::from(how & 7)];
    let command = Command::new(opcode).with_cdw10(script.next_byte().into()).with_fuse(fuse);
    send_io_command(peer, &command.with_cdw11(script.next_byte().into()), len, how & 0x20 != 0);
}

fn send_io_command(peer: &mut FuzzHost, command: &Command, len: u32, in_capsule: bool) {
    if in_capsule && len <= 8192 {
        peer.send_command(&command.with_sgl1(Descriptor::in_capsule(0, len)), len);
    } else {
        peer.send_command(&command.with_sgl1(Descriptor::transport_data_block(len)), 0);
    }
}

/// Scripts that reach deep states.
#[must_use]
pub fn seed_scripts() -> Vec<(&'static str, Vec<u8>)> {
    const NEXT: u8 = 0x80;
    /// An admin queue and two I/O queues of the second tenant, and the same of the third.
    const CONNECTED: [u8; 18] = [0, 1, 0, 0, 1, 0, 0, 1, 0, 0x10, 1, 0, 0x10, 1, 0, 0x10, 1, 0];
    let with = |steps: &[&[u8]]| [&CONNECTED[..], &steps.concat()].concat();
    let on = |step: u8, peer: u8| step | peer << 4;
    let attack = |kind: u8| {
        // A fused pair with in-capsule data, then a Fabrics command whose FUSE is "first".
        let burst = [on(PAIR, 1) | NEXT, 0x20, 1, on(FABRICS, 1), kind, 1, 0x90, on(ANSWER, 1)];
        let read = [on(TRANSFER, 4) | NEXT, 1, 0, 0x90, 0];
        with(&[&read, &burst, &read, &burst, &[TIME, 5]])
    };
    let hog = [on(MANY, 1), on(MANY, 2), on(MANY, 4), on(MANY, 5)];
    let begin = [on(BEGIN, 1), 1, on(BEGIN, 2), 1, on(BEGIN, 4), 1, on(BEGIN, 5), 1];
    let drip = [on(DRIP, 1), 0, on(DRIP, 2), 0, on(DRIP, 4), 0, on(DRIP, 5), 0, TIME, 8];
    vec![
        ("fabrics-behind-a-pair", attack(5)),
        ("fabrics-to-the-host-behind-a-pair", attack(6)),
        ("drip", with(&[&hog, &begin, &drip.repeat(20)])),
        (
            "transfers",
            with(&[
                &[on(TRANSFER, 1), 0, 0, 8, 3, on(ANSWER, 1), on(TRANSFER, 4), 1, 0, 0x90, 0],
                &[on(TRANSFER, 4), 0x20, 0, 4, 1, on(PAIR, 2), 0, 2, on(ANSWER, 2), on(ANSWER, 2)],
                &[on(DEAF, 2), on(TRANSFER, 2), 1, 0, 0x90, 0, TIME, 19, on(CLOSE, 2), TIME, 3],
            ]),
        ),
        (
            "aborts",
            with(&[
                &[STUCK, on(TRANSFER, 1), 0, 0, 8, 3, on(TRANSFER, 1), 1, 0, 0x90, 0],
                &[on(ABORT, 1), 0, on(ABORT, 1), 1, on(BEGIN, 1), 9, on(CLOSE, 1), TIME, 3],
                &[
                    on(MANY, 2),
                    on(ABORT, 2),
                    0,
                    on(ABORT, 2),
                    7,
                    TIME,
                    19,
                    on(WRONG, 2),
                    0,
                    1,
                    4,
                    0,
                ],
            ]),
        ),
    ]
}
