//! Fuzzers of both ends: peers that send almost correct messages.
//!
//! The input is a script. Each step names a message and how to modify it, so that most of the
//! generated input gets far.

use crate::header::{Header, MessageKind};
use crate::server::DeviceInfo;
use crate::{
    Client, ClientEvent, Command, Errno, HEADER_BYTES, IrqInfo, RegionInfo, Request, Server,
    SparseMmapArea, VersionCapabilities, Violation,
};

/// Stand-in for a file descriptor.
type FakeFile = u8;

/// Largest number of steps.
const STEPS_MAX: usize = 500;

/// Script, consumed from the front.
struct FuzzScript<'a>(&'a [u8]);

impl FuzzScript<'_> {
    fn byte(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    /// Next byte; zero at the end of the script.
    fn next_byte_or_zero(&mut self) -> u8 {
        self.byte().unwrap_or(0)
    }

    /// Next offset or length, usually a valid one.
    fn next_offset_or_length(&mut self) -> u64 {
        match self.next_byte_or_zero() {
            small @ 0..=0x7f => u64::from(small) * 4,
            page @ 0x80..=0xbf => u64::from(page - 0x80) << 12,
            shift @ 0xc0..=0xfe => 1 << (shift - 0xc0),
            0xff => u64::MAX,
        }
    }

    fn next_u32_offset_or_length(&mut self) -> u32 {
        u32::try_from(self.next_offset_or_length() & 0xffff_ffff).unwrap_or(0)
    }
}

/// Device with a region of each kind.
fn sample_device() -> DeviceInfo<FakeFile> {
    let plain =
        RegionInfo { size: 0x4000, is_readable: true, is_writable: true, ..sample_region() };
    let sparse = RegionInfo {
        areas: vec![SparseMmapArea { offset: 0x1000, size: 0x1000 }],
        ..plain.clone()
    };
    DeviceInfo {
        regions: vec![(sparse, Some(9)), (plain, None), (sample_region(), None)],
        irqs: vec![IrqInfo::default(), IrqInfo { count: 4, is_maskable: true, is_fixed: false }],
    }
}

fn sample_region() -> RegionInfo {
    RegionInfo::default()
}

/// Fuzzes a server.
///
/// # Panics
///
/// If an invariant is violated: a request that the device does not have, or bytes that are not
/// consumed.
pub fn fuzz_server(bytes: &[u8]) {
    let mut script = FuzzScript(bytes);
    let mut server = Server::new(sample_device());
    let piece = usize::from(script.next_byte_or_zero()) + 1;
    let first =
        command_message(Command::Version, 1, &VersionCapabilities::OURS.encode_proposal(), true);
    if script.next_byte_or_zero() < 0xf0
        && pass_bytes_to_server(&mut server, &first, 0, piece, &mut script).is_err()
    {
        panic!("a proposal that is right was refused");
    }
    for _ in 0..STEPS_MAX {
        let Some(step) = script.byte() else { break };
        let (command, body) = scripted_client_command(&mut script, step);
        let wants_reply = step & 0x40 == 0;
        let whole = match step & 0x30 {
            0x30 => dma_reply(&mut script),
            _ => command_message(command, u16::from(step), &body, wants_reply),
        };
        let whole = maybe_mutate_message(&mut script, whole);
        let files = if step & 0x80 != 0 { script.next_byte_or_zero() % 20 } else { 0 };
        if pass_bytes_to_server(&mut server, &whole, files, piece, &mut script).is_err() {
            return;
        }
    }
}

fn pass_bytes_to_server(
    server: &mut Server<FakeFile>,
    mut bytes: &[u8],
    files: u8,
    piece: usize,
    script: &mut FuzzScript<'_>,
) -> Result<(), Violation> {
    let mut files: Vec<FakeFile> = (0..files).collect();
    while !bytes.is_empty() {
        let receive_len = server.receive_len();
        assert!(receive_len > 0, "everything is sent at once, so nothing waits");
        let (first, rest) = bytes.split_at(bytes.len().min(receive_len).min(piece));
        bytes = rest;
        server.handle_received(first, core::mem::take(&mut files))?;
        while let Some(request) = server.next_request()? {
            check_and_answer_request(server, request, script);
        }
        while let Some(outgoing) = server.next_outgoing() {
            let len = outgoing.bytes.len();
            server.record_sent(len);
        }
    }
    Ok(())
}

/// Checks that a request is valid for the device, and answers it.
fn check_and_answer_request(
    server: &mut Server<FakeFile>,
    request: Request<FakeFile>,
    script: &mut FuzzScript<'_>,
) {
    let device = sample_device();
    let fits = |region: u32, offset: u64, len: usize| {
        let shape = &device.regions[region as usize].0;
        assert!(offset + len as u64 <= shape.size, "outside of the region");
    };
    match request {
        Request::Map { call, map, .. } => {
            assert!(map.len_bytes > 0 && map.iova.checked_add(map.len_bytes).is_some());
            server.request_dma_read(7, map.iova, script.next_u32_offset_or_length() & 0xfff);
            server.reply_success(call);
        }
        Request::Unmap { call, .. } => server.reply_error(call, Errno::NO_ENTRY),
        Request::SetIrqs { call, irqs } => {
            assert!(irqs.start + irqs.count <= device.irqs[irqs.index as usize].count);
            server.reply_success(call);
        }
        Request::Read { call, region, offset, len_bytes } => {
            fits(region, offset, len_bytes as usize);
            server.reply_read(call, &vec![0; len_bytes as usize]);
        }
        Request::Write { call, region, offset, data } => {
            fits(region, offset, data.len());
            server.request_dma_write(8, offset, &data);
            server.reply_success(call);
        }
        Request::Reset { call } => server.reply_success(call),
        Request::DmaRead { token, data } => {
            assert_eq!(token, 7);
            assert!(data.map_or(0, |data| data.len()) < 0x1000, "more than was asked for");
        }
        Request::DmaWritten { token, .. } => assert_eq!(token, 8),
    }
}

/// Fuzzes a client.
///
/// # Panics
///
/// If an invariant is violated: a reply without a request, or an area outside its region.
pub fn fuzz_client(bytes: &[u8]) {
    let mut script = FuzzScript(bytes);
    let mut client: Client<FakeFile> = Client::new();
    let piece = usize::from(script.next_byte_or_zero()) + 1;
    let mut asked = vec![(1, Command::Version)];
    for _ in 0..STEPS_MAX {
        let Some(step) = script.byte() else { break };
        if step & 7 == 0 {
            send_client_request(&mut client, &mut script, &mut asked);
            continue;
        }
        let whole = match (step & 7, asked.pop()) {
            (1, _) | (_, None) => {
                let is_read = step & 8 == 0;
                let command = if is_read { Command::DmaRead } else { Command::DmaWrite };
                command_message(command, 3, &vec![0; usize::from(script.next_byte_or_zero())], true)
            }
            (_, Some((id, Command::Version))) => {
                reply_message(Command::Version, id, &VersionCapabilities::OURS.encode_proposal())
            }
            (_, Some((id, Command::DeviceGetRegionInfo))) => {
                let shape = RegionInfo {
                    size: script.next_offset_or_length(),
                    areas: vec![SparseMmapArea {
                        offset: script.next_offset_or_length(),
                        size: script.next_offset_or_length(),
                    }],
                    ..sample_region()
                };
                reply_message(Command::DeviceGetRegionInfo, id, &shape.encode(1, 4096))
            }
            (_, Some((id, command))) => {
                reply_message(command, id, &vec![0; usize::from(script.next_byte_or_zero())])
            }
        };
        let whole = maybe_mutate_message(&mut script, whole);
        let files = if step & 0x80 != 0 { script.next_byte_or_zero() % 20 } else { 0 };
        if pass_bytes_to_client(&mut client, &whole, files, piece).is_err() {
            return;
        }
    }
}

fn send_client_request(
    client: &mut Client<FakeFile>,
    script: &mut FuzzScript<'_>,
    asked: &mut Vec<(u16, Command)>,
) {
    asked.push(match script.next_byte_or_zero() % 5 {
        0 => (client.request_device_info(), Command::DeviceGetInfo),
        1 => (client.request_region_info(1), Command::DeviceGetRegionInfo),
        2 => (client.request_irq_info(1), Command::DeviceGetIrqInfo),
        3 => (
            client.request_region_read(0, 0, script.next_u32_offset_or_length() & 0xff),
            Command::RegionRead,
        ),
        _ => (client.request_reset(), Command::DeviceReset),
    });
    while let Some(outgoing) = client.next_outgoing() {
        let len = outgoing.bytes.len();
        client.record_sent(len);
    }
}

fn pass_bytes_to_client(
    client: &mut Client<FakeFile>,
    mut bytes: &[u8],
    files: u8,
    piece: usize,
) -> Result<(), Violation> {
    let mut files: Vec<FakeFile> = (0..files).collect();
    while !bytes.is_empty() {
        let (first, rest) = bytes.split_at(bytes.len().min(client.receive_len()).min(piece));
        bytes = rest;
        match client.handle_received(first, core::mem::take(&mut files))? {
            Some(ClientEvent::Region { shape, .. }) => {
                let is_inside = |area: &SparseMmapArea| area.offset + area.size <= shape.size;
                assert!(shape.areas.iter().all(is_inside));
            }
            Some(ClientEvent::DmaRead { call, len_bytes, .. }) => {
                client.reply_dma_read(call, &vec![0; len_bytes as usize]);
            }
            Some(ClientEvent::DmaWrite { call, .. }) => client.reply_dma_write(call),
            _ => {}
        }
        while let Some(outgoing) = client.next_outgoing() {
            let len = outgoing.bytes.len();
            client.record_sent(len);
        }
    }
    Ok(())
}

/// Seeds that get far: every command, correct and with some modifications.
pub fn server_seeds() -> Vec<(&'static str, Vec<u8>)> {
    let calm = |step: u8| [step, 3, 4, 4, 4, 4, 0, 0, 0];
    let all: Vec<u8> = (2..14).flat_map(calm).collect();
    let posted = (2..14).flat_map(|step| calm(step | 0x40));
    let replies = (0..8).flat_map(|id| [0x39, 0, id, 16, 0, 0, 0]);
    vec![
        ("commands", [&[255, 0], &all[..]].concat()),
        ("pieces", [&[0, 0], &all[..]].concat()),
        ("posted", [255, 0].into_iter().chain(posted).collect()),
        ("replies", [255, 0, 2, 3, 0, 0, 0, 0].into_iter().chain(replies).collect()),
        ("no-version", [&[255, 0xff], &all[..]].concat()),
    ]
}

/// Seeds that get far: every request, with almost correct replies.
pub fn client_seeds() -> Vec<(&'static str, Vec<u8>)> {
    let version = [2, 0, 0, 0];
    let asked: Vec<u8> = (0..5).flat_map(|what| [0, what, 2, 16, 0, 0, 0]).collect();
    let region = [0, 1, 2, 0x84, 0x80, 0x81, 0, 0, 0];
    let memory = [1, 16, 0, 0, 0, 9, 16, 0, 0, 0];
    vec![
        ("questions", [&[255], &version[..], &asked].concat()),
        ("region", [&[255], &version[..], &region].concat()),
        ("memory", [&[7], &version[..], &memory].concat()),
    ]
}

fn command_message(command: Command, id: u16, body: &[u8], wants_reply: bool) -> Vec<u8> {
    Header { id, command, body_bytes: 0, kind: MessageKind::Command { wants_reply } }
        .encode_message(body)
}

fn reply_message(command: Command, id: u16, body: &[u8]) -> Vec<u8> {
    Header { id, command, body_bytes: 0, kind: MessageKind::Reply { error: None } }
        .encode_message(body)
}

/// Reply to a DMA access, existing or not.
fn dma_reply(script: &mut FuzzScript<'_>) -> Vec<u8> {
    let command =
        if script.next_byte_or_zero() & 1 == 0 { Command::DmaRead } else { Command::DmaWrite };
    let id = script.next_byte_or_zero().into();
    reply_message(command, id, &vec![0; usize::from(script.next_byte_or_zero())])
}

/// Command of a client.
fn scripted_client_command(script: &mut FuzzScript<'_>, step: u8) -> (Command, Vec<u8>) {
    let command = Command::from_number(u16::from(step & 0xf));
    let halves = |values: &[u32]| values.iter().flat_map(|value| value.to_le_bytes()).collect();
    let words = |values: &[u64]| -> Vec<u8> {
        values.iter().flat_map(|value| value.to_le_bytes()).collect()
    };
    let mut body: Vec<u8> = match command {
        Command::DmaMap => halves(&[32, 1 + u32::from(script.next_byte_or_zero() & 3)]),
        Command::DmaUnmap => halves(&[24, 0]),
        Command::DeviceGetInfo => halves(&[16, 0, 0, 0]),
        Command::DeviceGetRegionInfo => halves(&[
            script.next_u32_offset_or_length() | 32,
            0,
            script.next_u32_offset_or_length() / 4,
            0,
            0,
            0,
            0,
            0,
        ]),
        Command::DeviceGetIrqInfo => halves(&[16, 0, script.next_u32_offset_or_length() / 4, 0]),
        Command::DeviceSetIrqs => {
            let flags =
                1 << (script.next_byte_or_zero() & 3) | 8 << (script.next_byte_or_zero() & 3);
            halves(&[
                20,
                flags,
                script.next_u32_offset_or_length() / 4,
                script.next_u32_offset_or_length() / 4,
                script.next_u32_offset_or_length() / 4,
            ])
        }
        _ => Vec::new(),
    };
    match command {
        Command::DmaMap => body.extend(words(&[
            script.next_offset_or_length(),
            script.next_offset_or_length(),
            script.next_offset_or_length(),
        ])),
        Command::DmaUnmap => {
            body.extend(words(&[script.next_offset_or_length(), script.next_offset_or_length()]))
        }
        Command::RegionRead | Command::RegionWrite => {
            let (offset, region, len) = (
                script.next_offset_or_length(),
                script.next_u32_offset_or_length() / 4,
                script.next_u32_offset_or_length(),
            );
            body.extend(words(&[offset, u64::from(region) | u64::from(len) << 32]));
            if command == Command::RegionWrite {
                body.resize(16 + (len as usize).min(5000), 0);
            }
        }
        _ => {}
    }
    (command, body)
}

/// Modifies a byte or truncates the message; usually does nothing.
fn maybe_mutate_message(script: &mut FuzzScript<'_>, mut whole: Vec<u8>) -> Vec<u8> {
    let (how, at, value) = (
        script.next_byte_or_zero(),
        usize::from(script.next_byte_or_zero()),
        script.next_byte_or_zero(),
    );
    let place = at % whole.len();
    match how & 0xf0 {
        0xe0 => whole[place % HEADER_BYTES] = value,
        0xf0 => whole[place] ^= value,
        0xd0 => whole.truncate(place),
        _ => {}
    }
    whole
}

#[cfg(test)]
mod tests {
    use tenmil_base::Random;

    #[test]
    fn random_scripts_violate_no_vfio_user_invariant() {
        let mut random = Random::new(0x7f_0001);
        for _ in 0..3_000 {
            let len = random.below(400);
            let bytes: Vec<u8> = (0..len).map(|_| random.next_u64().to_le_bytes()[0]).collect();
            super::fuzz_server(&bytes);
            super::fuzz_client(&bytes);
            // Few bits: valid offsets, unmodified messages.
            let calm: Vec<u8> = bytes.iter().map(|byte| byte & 0x3f).collect();
            super::fuzz_server(&calm);
            super::fuzz_client(&calm);
        }
    }
}
