//! Snapshots as streams: the receiver restores exactly what was sent, and accepts nothing else.

use crate::fixture::fake_disk::stamped_block;
use crate::fixture::model_comparison::read_volume_differences;
use crate::fixture::pool_with_model::PoolWithModel;
use crate::fixture::{PoolFixture, new_pool_image};
use tenmil_base::Random;
use tenmil_volume::snapshot_stream::{
    DATA_BLOCKS_MAX, StreamEncoder, StreamError, StreamErrorKind, StreamEvent, StreamHead,
    StreamInfo, StreamParser,
};
use tenmil_volume::{Layout, PoolRequest, PoolResponse, VolumeInfo, VolumeOp};

const BLOCKS: u64 = 8192;

/// Sends a snapshot as a stream.
fn send_stream(rig: &mut PoolFixture, base: Option<&VolumeInfo>, info: &VolumeInfo) -> Vec<u8> {
    let contents = StreamInfo {
        store: rig.store.uuid(),
        uuid: info.uuid,
        name: info.name.clone(),
        blocks: info.blocks,
        unit: info.unit,
        has_checksums: info.has_checksums,
        base: base.map(|base| (base.uuid, base.name.clone())),
    };
    let (mut sender, mut stream) = StreamEncoder::start_with_head(&contents);
    for (block, blocks, is_mapped) in
        read_volume_differences(rig, base.map_or(0, |base| base.id), info.id)
    {
        if !is_mapped {
            stream.extend(sender.hole_record(block, blocks));
            continue;
        }
        let mut at = block;
        while at < block + blocks {
            let count = DATA_BLOCKS_MAX.min(block + blocks - at);
            let token = rig.submit(PoolRequest::Read { volume: info.id, block: at, blocks: count });
            rig.run_until_idle();
            rig.responses.remove(&token).unwrap().unwrap();
            let data: Vec<u8> =
                rig.buffers.remove(&token).unwrap().iter().flat_map(|block| **block).collect();
            stream.extend(sender.data_record(at, &data));
            stream.extend(data);
            at += count;
        }
    }
    stream.extend(sender.end_record());
    stream
}

/// Events of a receiver for a stream, with the data that it has returned.
fn parse_events(stream: &[u8]) -> Result<Vec<(StreamEvent, Vec<u8>)>, StreamError> {
    let (mut receiver, mut rest, mut events) = (StreamParser::new(), stream, Vec::new());
    while receiver.bytes_needed() > 0 {
        let Some((bytes, left)) = rest.split_at_checked(receiver.bytes_needed()) else {
            return Err(receiver.truncated_error());
        };
        rest = left;
        events.push((receiver.handle(bytes)?, bytes.to_vec()));
    }
    Ok(events)
}

/// Receives into a pool: the base of the stream exists under the given name.
fn receive_stream(rig: &mut PoolFixture, stream: &[u8], base: Option<&str>, name: &str) {
    let mut volume = 0;
    for (event, bytes) in parse_events(stream).unwrap() {
        match event {
            StreamEvent::Begun(StreamInfo {
                blocks, unit, uuid, has_checksums: checksums, ..
            }) => {
                let change = match base {
                    None => VolumeOp::Create { name: "part".into(), blocks, unit, uuid, checksums },
                    Some(base) => VolumeOp::Clone { from: base.into(), name: "part".into(), uuid },
                };
                rig.run_request(PoolRequest::Change(change)).unwrap();
                let resize = VolumeOp::Resize { name: "part".into(), blocks };
                let Ok(PoolResponse::Volume(info)) = rig.run_request(PoolRequest::Change(resize))
                else {
                    panic!()
                };
                volume = info.id;
            }
            StreamEvent::More => {}
            StreamEvent::Data { block } => {
                let blocks = bytes.len() as u64 / 4096;
                let token = rig.submit(PoolRequest::Write { volume, block, blocks });
                let data = bytes.chunks_exact(4096);
                let data = data.map(|block| <[u8; 4096]>::try_from(block).unwrap().into());
                rig.buffers.insert(token, data.collect());
                rig.run_until_idle();
                rig.responses.remove(&token).unwrap().unwrap();
            }
            StreamEvent::Hole { block, blocks } => {
                rig.run_request(PoolRequest::Trim { volume, block, blocks }).unwrap();
            }
            StreamEvent::Ended => {
                let change =
                    VolumeOp::ConvertToSnapshot { name: "part".into(), to: name.into(), uuid: 9 };
                rig.run_request(PoolRequest::Change(change)).unwrap();
            }
        }
    }
}

fn find_volume(rig: &mut PoolFixture, name: &str) -> VolumeInfo {
    match rig.run_request(PoolRequest::Find(name.into())).unwrap() {
        PoolResponse::Volume(info) => info,
        other => panic!("{other:?}"),
    }
}

fn read_sector_values(rig: &mut PoolFixture, info: &VolumeInfo) -> Vec<[u64; 8]> {
    rig.read_blocks(info.id, 0, info.blocks).unwrap()
}

/// A pool with a volume and two snapshots of it, with different sizes and contents.
fn two_snapshots(seed: u64) -> PoolFixture {
    let mut random = Random::new(seed);
    let mut rig = PoolFixture::new(new_pool_image(BLOCKS), BLOCKS, random.fork()).unwrap();
    let unit = 1 << random.below(5);
    let create =
        VolumeOp::Create { name: "v".into(), blocks: 900, unit, uuid: 1, checksums: false };
    rig.run_request(PoolRequest::Change(create)).unwrap();
    for (round, name) in [(1, "one"), (2, "two")] {
        for _ in 0..30 {
            let block = random.below(850);
            let token = match random.below(4) {
                0 => {
                    rig.submit(PoolRequest::Trim { volume: 1, block, blocks: 1 + random.below(50) })
                }
                _ => rig.submit_write(1, block, 1 + random.below(30), round * 1000 + block),
            };
            rig.run_until_idle();
            rig.responses.remove(&token).unwrap().unwrap();
        }
        let snapshot = VolumeOp::Snapshot { volume: "v".into(), name: name.into(), uuid: 7 };
        rig.run_request(PoolRequest::Change(snapshot)).unwrap();
        let blocks = 880 + random.below(100);
        rig.run_request(PoolRequest::Change(VolumeOp::Resize { name: "v".into(), blocks }))
            .unwrap();
    }
    rig
}

#[test]
fn full_and_incremental_streams_reproduce_the_snapshots() {
    for seed in 1..=12 {
        let mut source = two_snapshots(seed);
        let (one, two) = (find_volume(&mut source, "one"), find_volume(&mut source, "two"));
        let whole = send_stream(&mut source, None, &one);
        let changed = send_stream(&mut source, Some(&one), &two);

        let random = Random::new(seed);
        let mut target = PoolFixture::new(new_pool_image(BLOCKS), BLOCKS, random).unwrap();
        receive_stream(&mut target, &whole, None, "uno");
        receive_stream(&mut target, &changed, Some("uno"), "due");
        for (sent, name) in [(&one, "uno"), (&two, "due")] {
            let received = find_volume(&mut target, name);
            assert!(received.is_read_only && received.uuid == 9);
            assert_eq!((received.blocks, received.mapped), (sent.blocks, sent.mapped), "{name}");
            assert_eq!(
                read_sector_values(&mut target, &received),
                read_sector_values(&mut source, sent),
                "{name}"
            );
        }
        target.run_request(PoolRequest::Flush).unwrap();
        assert_eq!(crate::fixture::check_pool(&target.store, target.disk.image()).findings, []);
    }
}

#[test]
fn shared_subtrees_are_neither_sent_nor_read() {
    let mut random = Random::new(3);
    let mut rig =
        PoolFixture::with_normal_trees(new_pool_image(1 << 20), 1 << 20, random.fork()).unwrap();
    let create =
        VolumeOp::Create { name: "v".into(), blocks: 1 << 24, unit: 1, uuid: 1, checksums: false };
    rig.run_request(PoolRequest::Change(create)).unwrap();
    for piece in 0..6000 {
        rig.submit_write(1, piece * 2000 + random.below(1000), 1, 7);
        rig.run_until_idle();
    }
    let snapshot =
        |name: &str| VolumeOp::Snapshot { volume: "v".into(), name: name.into(), uuid: 1 };
    rig.run_request(PoolRequest::Change(snapshot("one"))).unwrap();
    rig.submit_write(1, 5_000_000, 3, 8);
    rig.run_until_idle();
    rig.run_request(PoolRequest::Change(snapshot("two"))).unwrap();
    let image = rig.disk.image().clone();
    let mut again = PoolFixture::with_normal_trees(image, 1 << 20, Random::new(4)).unwrap();
    let (one, two) = (find_volume(&mut again, "one"), find_volume(&mut again, "two"));
    let before = again.reads;
    assert_eq!(read_volume_differences(&mut again, one.id, two.id), [(5_000_000, 3, true)]);
    let read = again.reads - before;
    assert!(read <= 12, "{read} blocks of metadata were read");
}

#[test]
fn removed_leaf_is_part_of_the_difference() {
    for first in (0..60).step_by(2) {
        let random = Random::new(1);
        let mut rig = PoolFixture::with_normal_trees(new_pool_image(2048), 2048, random).unwrap();
        rig.store = rig.store.with_node_records_max(4);
        let create =
            VolumeOp::Create { name: "v".into(), blocks: 200, unit: 1, uuid: 1, checksums: false };
        rig.run_request(PoolRequest::Change(create)).unwrap();
        for block in (0..120).step_by(2) {
            rig.submit_write(1, block, 1, 7);
            rig.run_until_idle();
        }
        let snapshot =
            |name: &str| VolumeOp::Snapshot { volume: "v".into(), name: name.into(), uuid: 1 };
        rig.run_request(PoolRequest::Change(snapshot("one"))).unwrap();
        rig.run_request(PoolRequest::Trim { volume: 1, block: first, blocks: 40 }).unwrap();
        rig.run_request(PoolRequest::Change(snapshot("two"))).unwrap();
        let (one, two) = (find_volume(&mut rig, "one"), find_volume(&mut rig, "two"));
        let holes: Vec<(u64, u64, bool)> =
            (first..first + 40).step_by(2).map(|block| (block, 1, false)).collect();
        assert_eq!(read_volume_differences(&mut rig, one.id, two.id), holes);
        let back = holes.iter().map(|(block, ..)| (*block, 1, true));
        assert_eq!(read_volume_differences(&mut rig, two.id, one.id), back.collect::<Vec<_>>());
    }
}

/// A short stream of data, a hole and data.
fn short_stream() -> Vec<u8> {
    let contents = StreamInfo {
        store: 1,
        uuid: 2,
        name: "s".into(),
        blocks: 40,
        unit: 4,
        has_checksums: false,
        base: Some((3, "b".into())),
    };
    let (mut sender, mut stream) = StreamEncoder::start_with_head(&contents);
    let data: Vec<u8> = [5, 6].iter().flat_map(|value| *stamped_block(*value)).collect();
    stream.extend(sender.data_record(3, &data));
    stream.extend(&data);
    stream.extend(sender.hole_record(9, 20));
    stream.extend(sender.data_record(30, &data[..4096]));
    stream.extend(&data[..4096]);
    stream.extend(sender.end_record());
    stream
}

#[test]
fn truncated_stream_is_detected() {
    let stream = short_stream();
    assert_eq!(parse_events(&stream).unwrap().last().unwrap().0, StreamEvent::Ended);
    for len in 0..stream.len() {
        let error = parse_events(&stream[..len]).unwrap_err();
        assert_eq!(error.wrong, StreamErrorKind::Truncated, "{len}: {error}");
        assert!(error.at <= len as u64);
    }
}

#[test]
fn any_flipped_stream_bit_is_detected() {
    let stream = short_stream();
    for bit in 0..stream.len() * 8 {
        let mut wrong = stream.clone();
        wrong[bit / 8] ^= 1 << (bit % 8);
        let error = parse_events(&wrong).expect_err("it is reported");
        let is_cut = error.wrong == StreamErrorKind::Truncated;
        assert!(is_cut || error.at <= bit as u64 / 8, "bit {bit}: {error}");
    }
}

#[test]
fn missing_duplicate_or_reordered_records_are_detected() {
    let stream = short_stream();
    let places = [0, 384, 384 + 32 + 8192, 384 + 64 + 8192, stream.len() - 32, stream.len()];
    let parts: Vec<&[u8]> = places.windows(2).map(|pair| &stream[pair[0]..pair[1]]).collect();
    let of = |order: &[usize]| order.iter().map(|part| parts[*part]).collect::<Vec<_>>().concat();
    assert!(parse_events(&of(&[0, 1, 2, 3, 4])).is_ok());
    for order in [&[0, 2, 3, 4][..], &[0, 1, 3, 4], &[0, 1, 2, 4], &[0, 1, 1], &[0, 2, 1], &[0, 4]]
    {
        let error = parse_events(&of(order)).unwrap_err();
        assert_eq!(error.wrong, StreamErrorKind::Order, "{order:?}: {error}");
    }
    // The records of one stream after the head of another.
    let (_, other) = StreamEncoder::start_with_head(&StreamInfo {
        store: 1,
        uuid: 77,
        name: "t".into(),
        blocks: 40,
        unit: 4,
        has_checksums: false,
        base: None,
    });
    let error = parse_events(&[&other, &stream[StreamHead::BYTES..]].concat()).unwrap_err();
    assert_eq!(error.wrong, StreamErrorKind::Order, "the end tells");
}

#[test]
fn difference_of_any_two_random_volumes_is_correct() {
    let mut world = PoolWithModel::new(1 << 14, 21);
    world.changes = 30;
    while world.operations < 1500 {
        world.run_random_operation();
    }
    world.compare_contents();
}
