//! Fuzz target: gives arbitrary bytes to every decoder, and corrupted pools to the code that traverses
//! them. Nothing may panic, and no allocation may exceed the limits.

use crate::checksums::block_checksum;
use crate::consistency_check::ConsistencyCheck;
use crate::device_table::{DeviceLabel, DeviceTable, SecondaryDevice};
use crate::format::{
    BLOCK_BYTES, Block, BlockKind, HOLE, Header, Page, PageBody, Record, UNWRITTEN,
    decode_superblock, update_checksum,
};
use crate::on_disk_layout::Layout;
use crate::open::{CreateStep, PoolConfig, PoolOpening};
use crate::parent::ParentInfo;
use crate::pool::{ActionResult, DeviceAction, Pool, PoolRequest, PoolResponse};
use crate::snapshot_stream::{
    self, DATA_BLOCKS_MAX, StreamEncoder, StreamEvent, StreamInfo, StreamParser,
};
use crate::volume_catalog::VolumeOp;

/// Blocks of the corrupted pool, and number of them on its first device.
const BLOCKS: u64 = 600;
const FIRST_BLOCKS: u64 = 540;
/// Action limit, above the need of any request in such a small pool.
const ACTIONS_MAX: usize = 100_000;
/// Bytes of a patch: block, offset, length and value.
const PATCH_BYTES: usize = 6;
/// Maximum bytes after one record of a stream.
#[expect(clippy::cast_possible_truncation, reason = "a megabyte")]
const DATA_MAX: usize = DATA_BLOCKS_MAX as usize * BLOCK_BYTES;

/// Gives `bytes` to every decoder.
///
/// # Panics
///
/// An invariant is violated: a bug in this crate, never in the bytes.
pub fn fuzz_decoders(bytes: &[u8]) {
    decode_resealed_block(bytes);
    if let Some((how, patches)) = bytes.split_first() {
        fuzz_corrupted_pool(*how, patches);
    }
}

/// Gives `bytes` to a stream receiver: unchanged, and with corrected checksums of header and records.
///
/// # Panics
///
/// An invariant is violated: a bug in this crate, never in the bytes.
pub fn fuzz_stream(bytes: &[u8]) {
    parse_stream(bytes);
    let mut sealed = bytes.to_vec();
    snapshot_stream::fix_checksums(&mut sealed);
    parse_stream(&sealed);
}

fn parse_stream(mut rest: &[u8]) {
    let (mut receiver, mut at) = (StreamParser::new(), 0);
    while receiver.bytes_needed() > 0 {
        assert!(receiver.bytes_needed() <= DATA_MAX, "memory is bounded");
        let Some((bytes, left)) = rest.split_at_checked(receiver.bytes_needed()) else { return };
        let Ok(event) = receiver.handle(bytes) else { return };
        if let StreamEvent::Data { block } | StreamEvent::Hole { block, .. } = event {
            assert!(block >= at, "blocks come in their order");
            at = block;
        }
        rest = left;
    }
}

/// Decodes a block with these bytes, after correcting everything that a decoder checks first.
fn decode_resealed_block(bytes: &[u8]) {
    let mut block = [0; BLOCK_BYTES];
    let len = bytes.len().min(BLOCK_BYTES);
    block[..len].copy_from_slice(&bytes[..len]);
    let _ = Page::decode(&block, 0, 0);
    let header = Header::decode(&block);
    update_checksum(&mut block, header.store, header.address);
    let _ = decode_superblock(&block, header.address);
    let _ = DeviceLabel::decode(&block);
    if let Ok(page) = Page::decode(&block, header.store, header.address) {
        let again = page.encode(header.store, header.address);
        assert_eq!(Page::decode(&again, header.store, header.address), Ok(page));
    }
}

/// Checks and uses a pool with volumes that was changed at some places, with all checksums corrected.
fn fuzz_corrupted_pool(how: u8, patches: &[u8]) {
    let mut image = sample_pool();
    for patch in patches.chunks_exact(PATCH_BYTES).take(64) {
        let at = usize::from(patch[0]) % (image.len() / BLOCK_BYTES);
        let from = usize::from(u16::from_le_bytes([patch[1], patch[2]])) % BLOCK_BYTES;
        let to = (from + usize::from(patch[3] % 16)).min(BLOCK_BYTES);
        if let Some(block) = image[at * BLOCK_BYTES..].first_chunk_mut::<BLOCK_BYTES>() {
            block[from..to].fill(patch[4]);
            if how & 1 == 0 || patch[5] & 1 == 0 {
                update_checksum(block, Header::decode(&block[..]).store, at as u64);
            }
        }
    }
    let Some(mut store) = open_image(&image) else { return };
    let mut check = ConsistencyCheck::of_pool(&store);
    while let Some(at) = check.next_read() {
        check.handle_read(Ok(block_at(&image, at)));
    }
    drop(check.into_report());
    submit_every_request(&mut store, &mut image);
}

/// Sends every kind of request.
fn submit_every_request(store: &mut Pool, image: &mut [u8]) {
    let Some(PoolResponse::Volumes(volumes)) = execute_request(store, image, PoolRequest::List)
    else {
        return;
    };
    for info in volumes.iter().take(8) {
        let (volume, blocks) = (info.id, info.blocks.min(64));
        execute_request(store, image, PoolRequest::Read { volume, block: 0, blocks });
        execute_request(
            store,
            image,
            PoolRequest::Write { volume, block: blocks / 2, blocks: blocks.min(3) },
        );
        execute_request(
            store,
            image,
            PoolRequest::Trim { volume, block: 0, blocks: blocks.min(2) },
        );
        execute_request(store, image, PoolRequest::SpaceUsage(info.name.clone()));
        execute_request(
            store,
            image,
            PoolRequest::Difference { volume, base: info.origin, block: 0 },
        );
        execute_request(store, image, PoolRequest::ReserveThick(info.name.clone()));
        execute_request(store, image, PoolRequest::MakeExclusive { volume, block: 0, blocks: 32 });
        execute_request(
            store,
            image,
            PoolRequest::MakeExclusive { volume, block: blocks, blocks: 16 },
        );
        execute_request(store, image, PoolRequest::Parent { volume });
        execute_request(store, image, PoolRequest::CopyFromParent { volume, blocks: 5 });
        execute_request(
            store,
            image,
            PoolRequest::Trim { volume, block: blocks / 3, blocks: blocks.min(4) },
        );
    }
    for info in volumes.into_iter().take(4) {
        let name = info.name;
        let snapshot =
            VolumeOp::Snapshot { volume: name.clone(), name: format!("{name}s"), uuid: 1 };
        execute_request(store, image, PoolRequest::Change(snapshot));
        execute_request(
            store,
            image,
            PoolRequest::Change(VolumeOp::Decouple { name: name.clone() }),
        );
        execute_request(
            store,
            image,
            PoolRequest::Change(VolumeOp::Resize { name: name.clone(), blocks: 7 }),
        );
        execute_request(store, image, PoolRequest::Change(VolumeOp::Delete { name, orphan: true }));
    }
    let mut devices = store.devices().clone();
    devices.add_device(SecondaryDevice { uuid: 9, uri: "ram:2m".into() }, 40);
    execute_request(store, image, PoolRequest::Grow(devices));
    execute_request(store, image, PoolRequest::Flush);
}

fn execute_request(store: &mut Pool, image: &mut [u8], ask: PoolRequest) -> Option<PoolResponse> {
    store.submit(0, ask);
    for _ in 0..ACTIONS_MAX {
        let Some(action) = store.next_action() else {
            let (_, response) = store.next_response().expect("every question is answered");
            return response.ok();
        };
        execute_action(store, image, action);
    }
    panic!("a question never ends");
}

fn execute_action(store: &mut Pool, image: &mut [u8], action: DeviceAction) {
    match action {
        DeviceAction::ReadPage { io, at } => {
            store.handle_action_result(io, ActionResult::Read(block_at(image, at)))
        }
        DeviceAction::ReadSlots { io } => {
            let slots = [*block_at(image, 0), *block_at(image, 1)];
            store.handle_action_result(io, ActionResult::Slots(&slots));
        }
        DeviceAction::WritePages { io, at, bytes } => {
            for (at, block) in (at..).zip(bytes.chunks_exact(BLOCK_BYTES)) {
                assert!(at < store.end_of_pool(), "metadata stay within the pool");
                let from = usize::try_from(at).unwrap_or(usize::MAX).saturating_mul(BLOCK_BYTES);
                // Writes after the image are lost, which is detected later.
                if let Some(room) = image.get_mut(from..from.saturating_add(BLOCK_BYTES)) {
                    room.copy_from_slice(block);
                }
            }
            store.handle_action_result(io, ActionResult::Done);
        }
        DeviceAction::ReadData { io, at, blocks, is_summed: true, .. } => {
            let sums: Vec<u32> =
                (at..at + blocks).map(|at| block_checksum(block_at(image, at))).collect();
            store.handle_action_result(io, ActionResult::Sums(&sums));
        }
        DeviceAction::WriteData { io, blocks, is_summed: true, .. } => {
            let sums = vec![1; usize::try_from(blocks).unwrap_or(0)];
            store.handle_action_result(io, ActionResult::Sums(&sums));
        }
        DeviceAction::ReadData { io, .. }
        | DeviceAction::ReadParent { io, .. }
        | DeviceAction::WriteData { io, .. }
        | DeviceAction::Flush { io } => store.handle_action_result(io, ActionResult::Done),
        DeviceAction::Zero { .. } => {}
    }
}

fn open_image(image: &[u8]) -> Option<Pool> {
    let mut opening = PoolOpening::new(FIRST_BLOCKS, 0);
    while let Some(at) = opening.next_read() {
        opening.handle_read(Ok(block_at(image, at)));
    }
    opening.finish().ok().map(|opened| opened.store.with_node_records_max(6))
}

/// Block of a pool. Behind the image, where a pool may have been made to believe in devices, nothing was
/// ever written.
fn block_at(image: &[u8], at: u64) -> &Block {
    let from = usize::try_from(at).unwrap_or(usize::MAX).saturating_mul(BLOCK_BYTES);
    image.get(from..).and_then(|bytes| bytes.first_chunk()).unwrap_or(&[0; BLOCK_BYTES])
}

/// A pool on two devices with a volume, its snapshot and a clone, a volume with checksums, a thick one,
/// and one with a parent.
fn sample_pool() -> Vec<u8> {
    let mut image = vec![0; usize::try_from(BLOCKS).unwrap_or(0) * BLOCK_BYTES];
    let new = PoolConfig { name: "fuzz".into(), uuid: 1, blocks: FIRST_BLOCKS };
    for step in new.create_steps().expect("a pool that may be") {
        if let CreateStep::Write { at, bytes } = step {
            let from = usize::try_from(at).unwrap_or(0) * BLOCK_BYTES;
            image[from..from + BLOCK_BYTES].copy_from_slice(&bytes[..]);
        }
    }
    let mut store = open_image(&image).expect("a pool that was just made");
    let mut devices = DeviceTable::single(FIRST_BLOCKS);
    devices
        .add_device(SecondaryDevice { uuid: 8, uri: "ram:1m".into() }, BLOCKS - FIRST_BLOCKS + 1);
    execute_request(&mut store, &mut image, PoolRequest::Grow(devices));
    let create =
        VolumeOp::Create { name: "a".into(), blocks: 64, unit: 4, uuid: 1, checksums: false };
    execute_request(&mut store, &mut image, PoolRequest::Change(create));
    for block in [0, 9, 22, 35, 41, 50] {
        execute_request(&mut store, &mut image, PoolRequest::Write { volume: 1, block, blocks: 3 });
    }
    let snapshot = VolumeOp::Snapshot { volume: "a".into(), name: "b".into(), uuid: 2 };
    execute_request(&mut store, &mut image, PoolRequest::Change(snapshot));
    execute_request(
        &mut store,
        &mut image,
        PoolRequest::Write { volume: 1, block: 10, blocks: 30 },
    );
    let clone = VolumeOp::Clone { from: "b".into(), name: "c".into(), uuid: 3 };
    execute_request(&mut store, &mut image, PoolRequest::Change(clone));
    let name = || "d".to_owned();
    let create = VolumeOp::Create { name: name(), blocks: 64, unit: 4, uuid: 4, checksums: true };
    execute_request(&mut store, &mut image, PoolRequest::Change(create));
    for block in [0, 9, 22, 35, 41, 50] {
        execute_request(&mut store, &mut image, PoolRequest::Write { volume: 4, block, blocks: 3 });
    }
    let create = VolumeOp::CreateThick { name: "e".into(), blocks: 40, unit: 4, uuid: 5 };
    execute_request(&mut store, &mut image, PoolRequest::Change(create));
    execute_request(
        &mut store,
        &mut image,
        PoolRequest::MakeExclusive { volume: 5, block: 0, blocks: 16 },
    );
    execute_request(&mut store, &mut image, PoolRequest::Write { volume: 5, block: 7, blocks: 3 });
    let (name, parent) = ("f".into(), sample_parent());
    let over =
        VolumeOp::CreateOver { name, blocks: 60, unit: 4, uuid: 6, checksums: false, parent };
    execute_request(&mut store, &mut image, PoolRequest::Change(over));
    execute_request(&mut store, &mut image, PoolRequest::Trim { volume: 6, block: 3, blocks: 20 });
    execute_request(&mut store, &mut image, PoolRequest::Write { volume: 6, block: 7, blocks: 3 });
    execute_request(&mut store, &mut image, PoolRequest::Flush);
    image
}

fn sample_parent() -> ParentInfo {
    ParentInfo { uri: "ram:1m".into(), blocks: 40, block_bytes: 512, uuid: 7, print: 8 }
}

/// Seed inputs for the mutator that reach deep code.
#[must_use]
pub fn decoder_seeds() -> Vec<(&'static str, Vec<u8>)> {
    let record = |key, value, extra| Record { key, value, extra };
    let spare = record(16, 100 | UNWRITTEN, 3);
    let node = |kind, level, records| Page {
        kind,
        generation: 3,
        owner: 1,
        body: PageBody::Node { level, records },
    };
    let map = node(BlockKind::Map, 0, vec![record(0, 64, 8), spare, record(30, HOLE | 30, 4)]);
    let body = PageBody::Parent(Box::new(sample_parent().to_body().expect("a parent that may be")));
    let above = Page { kind: BlockKind::Parent, generation: 3, owner: 1, body };
    let label = DeviceLabel {
        store: 1,
        name: "s".into(),
        number: 1,
        uuid: 8,
        generation: 3,
        begin: FIRST_BLOCKS,
        first_uri: "ram:1m".into(),
    };
    let label = label.encode().expect("a label that may be");
    let inner = node(BlockKind::SpaceMap, 1, vec![record(0, 7, 3), record(90, 8, 2)]);
    let patch = |block: u8, from: u16, len: u8, value: u8| {
        let [low, high] = from.to_le_bytes();
        [block, low, high, len, value, 0]
    };
    vec![
        ("map", map.encode(1, 5).to_vec()),
        ("inner", inner.encode(1, 6).to_vec()),
        ("parent", above.encode(1, 7).to_vec()),
        ("label", label.to_vec()),
        ("spans", [&[0][..], &patch(0, 336, 1, 3), &patch(1, 368, 1, 70)].concat()),
        ("untouched", vec![0]),
        ("count", [&[0][..], &patch(2, 6, 1, 3), &patch(3, 64, 8, 1)].concat()),
        ("pointers", [&[1][..], &patch(0, 136, 8, 2), &patch(1, 144, 2, 9)].concat()),
    ]
}

/// Seed streams.
#[must_use]
pub fn stream_seeds() -> Vec<(&'static str, Vec<u8>)> {
    let contents = |base| StreamInfo {
        store: 1,
        uuid: 2,
        name: "s".into(),
        blocks: 40,
        unit: 4,
        has_checksums: true,
        base,
    };
    let data = [7; 2 * BLOCK_BYTES];
    let (mut sender, mut whole) = StreamEncoder::start_with_head(&contents(None));
    whole.extend(sender.data_record(3, &data));
    whole.extend(data);
    whole.extend(sender.end_record());
    let (mut sender, mut changed) =
        StreamEncoder::start_with_head(&contents(Some((3, "b".into()))));
    changed.extend(sender.hole_record(3, 4));
    changed.extend(sender.data_record(9, &data[..BLOCK_BYTES]));
    changed.extend(&data[..BLOCK_BYTES]);
    changed.extend(sender.hole_record(30, 10));
    changed.extend(sender.end_record());
    vec![("whole", whole), ("changed", changed)]
}

#[cfg(test)]
mod tests {
    use super::{PATCH_BYTES, decoder_seeds, fuzz_decoders, fuzz_stream, stream_seeds};
    use tenmil_base::Random;

    #[test]
    fn random_corruption_never_panics_a_pool() {
        decoder_seeds().iter().for_each(|(_, bytes)| fuzz_decoders(bytes));
        let mut random = Random::new(8);
        for _ in 0..400 {
            let mut bytes = vec![u8::from(random.chance(1, 2))];
            for _ in 0..=random.below(6) {
                let block = random.below(60).to_le_bytes()[0];
                // Mostly at used positions: headers, and the first records.
                let most = if random.chance(3, 4) { 200 } else { 4096 };
                let from = random.below(most).to_le_bytes();
                let most = if random.chance(1, 2) { 8 } else { 256 };
                let value = random.below(most).to_le_bytes()[0];
                let len = random.below(9).to_le_bytes()[0];
                let patch: [u8; PATCH_BYTES] = [block, from[0], from[1], len, value, 0];
                bytes.extend(patch);
            }
            fuzz_decoders(&bytes);
        }
    }
    #[test]
    fn random_streams_never_panic_the_receiver() {
        let mut random = Random::new(9);
        for (_, seed) in stream_seeds() {
            fuzz_stream(&seed);
            for _ in 0..400 {
                let mut bytes = seed.clone();
                for _ in 0..=random.below(4) {
                    let most = if random.chance(3, 4) { 450 } else { bytes.len() as u64 };
                    let at = usize::try_from(random.below(most)).unwrap();
                    bytes[at] = random.next_u64().to_le_bytes()[0];
                }
                fuzz_stream(&bytes);
            }
        }
    }
}
