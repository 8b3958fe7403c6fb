//! Fuzzers: front ends and drivers that send arbitrary input.
//!
//! The input is a script. The first target receives almost correct messages; the second follows a
//! ring through memory that the script describes.

use std::sync::Mutex;

use tenmil_base::{InvalidSegment, Memory, RegionId, Segment};

use crate::inflight::InflightLog;
use crate::message_types::{HEADER_BYTES, RULES};
use crate::virtio_blk::CONFIG_BYTES;
use crate::{
    BackendConfig, DescriptorChain, GuestMemory, GuestRegion, InflightBuffer, OwnerRequest, Server,
    Violation, Vring, VringAddresses,
};

/// Stand-in for a file descriptor.
type FakeFile = u8;

/// Largest number of steps.
const STEPS_MAX: usize = 500;
const QUEUES: u16 = 3;

/// Script, consumed from the front; zero at its end.
struct FuzzScript<'a>(&'a [u8]);

impl FuzzScript<'_> {
    fn next_byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    fn is_over(&self) -> bool {
        self.0.is_empty()
    }

    /// Next number, usually a meaningful one.
    fn next_number(&mut self) -> u64 {
        match self.next_byte() {
            small @ 0..=0x3f => small.into(),
            page @ 0x40..=0x7f => u64::from(page - 0x40) << 12,
            power @ 0x80..=0xbf => 1 << (power - 0x80),
            0xff => u64::MAX,
            other => u64::from(other) << 8 | u64::from(self.next_byte()),
        }
    }
}

/// Fuzzes a server.
///
/// # Panics
///
/// If an invariant is violated: a request that the disk does not have, two requests at once, or an
/// invalid reply.
pub fn fuzz_server(bytes: &[u8]) {
    let mut script = FuzzScript(bytes);
    let config = vec![7; CONFIG_BYTES];
    let mut server =
        Server::new(BackendConfig { features: 1 << 32, queues: QUEUES, config, slots: 4 });
    let piece = usize::from(script.next_byte()) + 1;
    for _ in 0..STEPS_MAX {
        if script.is_over() {
            return;
        }
        let (message, files) = encode_message(&mut script);
        if pass_bytes_to_server(&mut server, &message, files, piece, &mut script).is_err() {
            return;
        }
    }
}

/// Builds an almost correct message.
fn encode_message(script: &mut FuzzScript<'_>) -> (Vec<u8>, Vec<FakeFile>) {
    let step = script.next_byte();
    let rule = &RULES[usize::from(step) % RULES.len()];
    let (least, most) = rule.payload_bytes;
    let len = least + u32::from(script.next_byte()) * 8 % (most - least + 1);
    let mut payload = Vec::new();
    while payload.len() < len as usize {
        let word = script.next_number();
        if script.next_byte() & 1 == 0 {
            payload.extend(word.to_le_bytes());
        } else {
            payload.extend(u32::try_from(word & 0xffff_ffff).unwrap_or(0).to_le_bytes());
        }
    }
    payload.truncate(len as usize);
    let how = script.next_byte();
    let flags = if how & 1 == 0 { 1 } else { 9 };
    let mut bytes = [rule.code.0, flags, len].map(u32::to_le_bytes).concat();
    bytes.extend(payload);
    let (fewest, most) = rule.with_files;
    let files = match how & 6 {
        6 => usize::from(how >> 3),
        2 => fewest,
        _ => most,
    };
    if how & 0xf0 == 0xf0 {
        let at = usize::from(script.next_byte()) % bytes.len();
        bytes[at] = script.next_byte();
    }
    (bytes, (0..files).map(|_| 3).collect())
}

fn pass_bytes_to_server(
    server: &mut Server<FakeFile>,
    mut bytes: &[u8],
    mut files: Vec<FakeFile>,
    piece: usize,
    script: &mut FuzzScript<'_>,
) -> Result<(), Violation> {
    while !bytes.is_empty() {
        let receive_len = server.receive_len();
        assert!(receive_len > 0, "everything is sent at once, so nothing waits");
        let (first, rest) = bytes.split_at(bytes.len().min(receive_len).min(piece));
        bytes = rest;
        server.receive(first, core::mem::take(&mut files))?;
        while let Some(request) = server.next_request()? {
            assert_eq!(server.receive_len(), 0, "one at a time");
            serve_request(server, request, script);
        }
        while let Some((bytes, _)) = server.next_outgoing() {
            assert!(bytes.len() >= HEADER_BYTES && bytes[4] == 5, "an answer of version 1");
            let len = bytes.len();
            server.record_sent(len);
        }
    }
    Ok(())
}

/// Checks that a request is valid, and answers it.
fn serve_request(
    server: &mut Server<FakeFile>,
    request: OwnerRequest<FakeFile>,
    script: &mut FuzzScript<'_>,
) {
    match request {
        OwnerRequest::GetInflightFd { call, queues, size } => {
            assert!(queues > 0 && (1..=1024).contains(&size));
            let area = InflightBuffer { len_bytes: 4096, file_offset: 0, queues, size };
            server.reply_inflight(call, area, 1);
        }
        OwnerRequest::Stop { call, queue } => {
            assert!(queue < QUEUES);
            server.reply_queue_stopped(call, script.next_byte().into());
        }
        OwnerRequest::Start { call, queue, start } => {
            assert!(queue < QUEUES && start.size.is_power_of_two() && start.size <= 1024);
            reply_or_reject(server, call, script);
        }
        OwnerRequest::SetCall { call, queue, .. } => {
            assert!(queue < QUEUES);
            reply_or_reject(server, call, script);
        }
        OwnerRequest::SetInflightFd { call, area, .. } => {
            assert!(area.file_offset.checked_add(area.len_bytes).is_some());
            reply_or_reject(server, call, script);
        }
        OwnerRequest::Memory { call, .. } | OwnerRequest::SetBackChannel { call, .. } => {
            reply_or_reject(server, call, script);
        }
    }
}

fn reply_or_reject(
    server: &mut Server<FakeFile>,
    call: crate::PendingReply,
    script: &mut FuzzScript<'_>,
) {
    if script.next_byte() & 7 == 7 {
        let _ = server.reply_error(call);
    } else {
        server.reply_success(call);
    }
}

/// Guest memory that the script describes.
#[derive(Debug)]
struct ScriptedMemory(Mutex<Vec<u8>>);

const MEMORY_BYTES: u64 = 0x4000;
const SIZE: u16 = 16;

impl Memory for &ScriptedMemory {
    fn load(&self, segment: Segment, into: &mut [u8]) -> Result<(), InvalidSegment> {
        let bytes = self.0.lock().map_err(|_| InvalidSegment(segment))?;
        let at = usize::try_from(segment.offset).map_err(|_| InvalidSegment(segment))?;
        let found = bytes.get(at..).and_then(|rest| rest.get(..into.len()));
        into.copy_from_slice(found.ok_or(InvalidSegment(segment))?);
        Ok(())
    }

    fn store(&self, segment: Segment, from: &[u8]) -> Result<(), InvalidSegment> {
        let mut bytes = self.0.lock().map_err(|_| InvalidSegment(segment))?;
        let at = usize::try_from(segment.offset).map_err(|_| InvalidSegment(segment))?;
        let found = bytes.get_mut(at..).and_then(|rest| rest.get_mut(..from.len()));
        found.ok_or(InvalidSegment(segment))?.copy_from_slice(from);
        Ok(())
    }

    fn fill(&self, segment: Segment, byte: u8) -> Result<(), InvalidSegment> {
        self.store(segment, &vec![byte; segment.len_bytes as usize])
    }
}

/// Fuzzes a ring and its inflight record.
///
/// # Panics
///
/// If a chain leaves memory or does not end.
pub fn fuzz_ring(bytes: &[u8]) {
    let len = usize::try_from(MEMORY_BYTES).unwrap_or(0);
    let memory: Vec<u8> = bytes.iter().copied().cycle().take(len).collect();
    if memory.len() < len {
        return;
    }
    let memory = ScriptedMemory(Mutex::new(memory));
    let half = MEMORY_BYTES / 2;
    let area = |index: u64| GuestRegion {
        guest: index * half,
        user: index * (half + 0x1000),
        len_bytes: half,
        region: RegionId(0),
        offset: index * half,
    };
    let Some(space) = GuestMemory::new(vec![area(0), area(1)]) else { return };
    let Ok(place) = VringAddresses::new(&space, SIZE, [0, 0x400, 0x800]) else { return };
    let has_event_index = bytes.first().is_some_and(|byte| byte & 1 != 0);
    let first = u16::try_from(bytes.len() & 0xffff).unwrap_or(0);
    let Ok(mut ring) = Vring::new(&memory, place, first, has_event_index) else {
        return;
    };
    let record = Segment { region: RegionId(0), offset: 0xc00, len_bytes: 0x140 };
    if let Ok((mut record, heads)) = InflightLog::open(&memory, record, SIZE, ring.used_index()) {
        assert!(heads.len() <= usize::from(SIZE) && heads.iter().all(|head| *head < SIZE));
        let _ = record
            .mark_in_flight(3)
            .and_then(|()| record.add_to_batch(3))
            .and_then(|()| record.publish_batch(4));
    }
    let mut chain = DescriptorChain::default();
    for _ in 0..SIZE {
        let Ok(Some(head)) = ring.take_head() else { break };
        if ring.resolve_chain(head, &space, &mut chain).is_ok() {
            let pieces = chain.readable.iter().chain(&chain.writable);
            let is_inside =
                |piece: &Segment| piece.offset + u64::from(piece.len_bytes) <= MEMORY_BYTES;
            assert!(pieces.clone().all(is_inside), "a piece outside of memory");
        }
        let _ = ring
            .write_used(head, 1)
            .and_then(|()| ring.publish_used_index())
            .and_then(|()| ring.needs_interrupt());
    }
    let _ = ring.enable_kicks();
}

/// Seeds that get far: every message, correct and with other numbers.
pub fn server_seeds() -> Vec<(&'static str, Vec<u8>)> {
    // A step, a length, and numbers each followed by their width.
    let calm = |step: u8, words: &[u8]| {
        let words = words.iter().flat_map(|word| [*word, 0]);
        [step, 0].into_iter().chain(words).chain([0]).collect::<Vec<u8>>()
    };
    let features = [13, 0, 0xd2, 9, 0, 0];
    let start: Vec<u8> = [
        calm(5, &[0x41]),
        calm(6, &[0, 0x10, 0x20, 0x30, 0]),
        calm(7, &[0]),
        calm(9, &[0]),
        calm(15, &[0]),
        calm(8, &[0]),
    ]
    .concat();
    let all: Vec<u8> = (0..24).flat_map(|step| calm(step, &[0; 5])).collect();
    vec![
        ("start", [&[255], &features[..], &start].concat()),
        ("pieces", [&[0], &features[..], &all].concat()),
        ("all", [&[255], &all[..]].concat()),
    ]
}

/// Memory with a chain, and memory with a loop.
pub fn ring_seeds() -> Vec<(&'static str, Vec<u8>)> {
    let memory = |entries: &[(u64, u32, u16, u16)]| {
        let mut bytes: Vec<u8> = entries
            .iter()
            .flat_map(|(address, len, flags, next)| {
                let tail = [*flags, *next].map(u16::to_le_bytes).concat();
                [&address.to_le_bytes()[..], &len.to_le_bytes(), &tail].concat()
            })
            .collect();
        bytes.resize(0x400, 0);
        bytes
    };
    let with_index = |mut bytes: Vec<u8>| {
        // The length of the input is the initial ring index.
        bytes.extend([0, 0, 4, 4, 0, 0, 1, 0, 2, 0, 3, 0]);
        bytes
    };
    vec![
        ("chain", with_index(memory(&[(0x1000, 16, 1, 1), (0x1ff0, 64, 1, 2), (0x3000, 1, 2, 0)]))),
        ("loop", with_index(memory(&[(0x1000, 16, 1, 1), (0x1000, 16, 1, 0)]))),
        ("table", with_index(memory(&[(0x10, 48, 4, 0), (0x1000, 16, 1, 1), (0x3000, 1, 2, 0)]))),
    ]
}

#[cfg(test)]
mod tests {
    use tenmil_base::Random;

    #[test]
    fn random_scripts_violate_no_vhost_user_invariant() {
        let mut random = Random::new(0x7f_0002);
        for _ in 0..2_000 {
            let len = random.below(400);
            let bytes: Vec<u8> = (0..len).map(|_| random.next_u64().to_le_bytes()[0]).collect();
            super::fuzz_server(&bytes);
            super::fuzz_ring(&bytes);
            // Few bits: valid numbers, unmodified messages.
            let calm: Vec<u8> = bytes.iter().map(|byte| byte & 0x1f).collect();
            super::fuzz_server(&calm);
            super::fuzz_ring(&calm);
        }
        for (_, seed) in super::server_seeds() {
            super::fuzz_server(&seed);
        }
        for (_, seed) in super::ring_seeds() {
            super::fuzz_ring(&seed);
        }
    }
}
