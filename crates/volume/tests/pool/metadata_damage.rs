//! Every metadata block destroyed, one at a time: the corruption is identified, and everything that the
//! block does not describe is still readable.

use std::sync::Arc;

use crate::fixture::fake_disk::{DiskImage, SharedBlock};
use crate::fixture::pool_with_model::PoolWithModel;
use crate::fixture::{PoolFixture, check_pool, open_read_only};
use tenmil_base::Random;
use tenmil_volume::format::{
    BlockKind, OwnerRecord, Page, PageBody, Superblock, VolumeBody, decode_superblock, flags,
};
use tenmil_volume::{CheckFinding, CorruptionKind, PoolError, PoolRequest, PoolResponse};

const BLOCKS: u64 = 4096;

/// A pool with volumes, snapshots and clones, and all metadata blocks in use.
fn pool_with_volumes() -> (PoolWithModel, Vec<u64>) {
    let mut world = PoolWithModel::new(BLOCKS, 18);
    while world.operations < 1200 {
        world.run_random_operation();
    }
    world.compare_contents();
    let image = world.rig.disk.image().clone();
    let opened = open_read_only(&image, BLOCKS).unwrap();
    let mut walk = tenmil_volume::ConsistencyCheck::of_pool(&opened.store);
    let mut metadata = Vec::new();
    while let Some(at) = walk.next_read() {
        metadata.push(at);
        walk.handle_read(Ok(&image[&at]));
    }
    assert!(metadata.len() > 20, "only {}", metadata.len());
    (world, metadata)
}

fn corrupt_image(image: &DiskImage, at: u64, how: impl Fn(&mut [u8; 4096])) -> DiskImage {
    let mut image = image.clone();
    let mut block = *image[&at];
    how(&mut block);
    image.insert(at, block.into());
    image
}

/// Reads everything; returns the result for each volume.
fn read_result_of_all_volumes(image: &DiskImage) -> Vec<Result<(), PoolError>> {
    let mut rig = PoolFixture::new(image.clone(), BLOCKS, Random::new(1)).unwrap();
    match rig.run_request(PoolRequest::List) {
        Ok(PoolResponse::Volumes(volumes)) => {
            volumes.iter().map(|info| rig.read_blocks(info.id, 0, info.blocks).map(drop)).collect()
        }
        Ok(other) => panic!("{other:?}"),
        Err(error) => vec![Err(error)],
    }
}

#[test]
fn any_corrupt_metadata_block_is_identified() {
    let (world, metadata) = pool_with_volumes();
    let image = world.rig.disk.image();
    let mut random = Random::new(5);
    for at in metadata {
        let bit = usize::try_from(random.below(4096 * 8)).unwrap();
        let ways: [(&str, DiskImage); 3] = [
            ("zeroes", corrupt_image(image, at, |block| block.fill(0))),
            ("a flipped bit", corrupt_image(image, at, |block| block[bit / 8] ^= 1 << (bit % 8))),
            ("a torn sector", corrupt_image(image, at, |block| block[1024..1536].fill(0xa5))),
        ];
        for (how, image) in &ways {
            let store = open_read_only(image, BLOCKS).unwrap().store;
            let report = check_pool(&store, image);
            let named = |finding: &CheckFinding| matches!(finding, CheckFinding::Damaged(damage) if damage.address == at);
            assert!(report.findings.iter().any(named), "{how} in {at}: {:?}", report.findings);
            for status in read_result_of_all_volumes(image).into_iter().filter_map(Result::err) {
                let PoolError::Damaged(damage) = &status else { panic!("{status}") };
                assert_eq!(damage.address, at, "{how}: {status}");
                assert!(status.to_string().contains(&format!("at block {at}")), "{status}");
            }
        }
    }
}

#[test]
fn corrupt_map_node_affects_only_its_volume() {
    let (mut world, _) = pool_with_volumes();
    let names: Vec<String> = world.model.volumes.keys().cloned().collect();
    let Ok(PoolResponse::Volumes(volumes)) = world.rig.run_request(PoolRequest::List) else {
        panic!("no list")
    };
    let image = world.rig.disk.image().clone();
    assert_eq!(names.len(), volumes.len());
    let opened = open_read_only(&image, BLOCKS).unwrap();
    let mut walk = tenmil_volume::ConsistencyCheck::of_pool(&opened.store);
    let mut hit = 0;
    while let Some(at) = walk.next_read() {
        let damaged = corrupt_image(&image, at, |block| block.fill(0xff));
        let block: SharedBlock = Arc::clone(&image[&at]);
        walk.handle_read(Ok(&block));
        if block[4] != BlockKind::Map.code() {
            continue;
        }
        let responses = read_result_of_all_volumes(&damaged);
        assert_eq!(responses.len(), volumes.len(), "all are listed");
        hit += responses.iter().filter(|response| response.is_err()).count();
    }
    assert!(hit > 0, "some volume was hit");
}

#[test]
fn lost_and_misdirected_metadata_writes_are_detected() {
    let (world, metadata) = pool_with_volumes();
    let image = world.rig.disk.image();
    let store = open_read_only(image, BLOCKS).unwrap().store;
    let mut seen = 0;
    for pair in metadata.windows(2) {
        let (at, other) = (pair[0], pair[1]);
        let page = Page::decode(&image[&at], store.uuid(), at).unwrap();
        let stale = Page { generation: page.generation - 1, ..page.clone() };
        let foreign = page.encode(store.uuid() + 1, at);
        let ways: [(CorruptionKind, SharedBlock); 3] = [
            (
                CorruptionKind::Generation {
                    found: page.generation - 1,
                    expected: page.generation,
                },
                stale.encode(store.uuid(), at).into(),
            ),
            (CorruptionKind::Address { found: other }, Arc::clone(&image[&other])),
            (CorruptionKind::Store { found: store.uuid() + 1 }, foreign.into()),
        ];
        for (flaw, block) in ways {
            let mut wrong = image.clone();
            wrong.insert(at, block);
            let report = check_pool(&store, &wrong);
            let [CheckFinding::Damaged(damage)] = &report.findings[..] else {
                panic!("{report:?}")
            };
            assert_eq!((damage.address, &damage.flaw), (at, &flaw));
            for error in read_result_of_all_volumes(&wrong).into_iter().filter_map(Result::err) {
                let PoolError::Damaged(damage) = &error else { panic!("{error}") };
                assert_eq!((damage.address, &damage.flaw), (at, &flaw));
                seen += 1;
            }
        }
    }
    assert!(seen > 30, "only {seen} reads came upon it");
}

#[test]
fn corrupt_superblock_copy_is_reported_and_rewritten() {
    let (mut world, _) = pool_with_volumes();
    let generation = world.rig.store.generation();
    for at in Superblock::superblock_addresses(generation, BLOCKS) {
        let image = corrupt_image(world.rig.disk.image(), at, |block| block.fill(0));
        let opened = open_read_only(&image, BLOCKS).unwrap();
        assert_eq!(opened.store.generation(), generation, "the other copy has it");
        let named: Vec<u64> = opened.damaged.iter().map(|damage| damage.address).collect();
        assert_eq!(named, [at]);

        let mut rig = PoolFixture::new(image, BLOCKS, Random::new(2)).unwrap();
        crate::fixture::model_comparison::compare_with_model(&mut rig, &world.model).unwrap();
        for name in ["one more", "and another"] {
            let (name, uuid) = (name.into(), 1);
            rig.run_request(PoolRequest::Change(tenmil_volume::VolumeOp::Create {
                name,
                blocks: 1,
                unit: 1,
                uuid,
                checksums: false,
            }))
            .unwrap();
        }
        assert_eq!(open_read_only(rig.disk.image(), BLOCKS).unwrap().damaged, []);
    }
    world.compare_contents();
}

#[test]
fn missing_superblocks_are_all_reported() {
    let mut image = crate::fixture::new_pool_image(BLOCKS);
    for at in [0, 1, BLOCKS - 2, BLOCKS - 1] {
        image = corrupt_image(&image, at, |block| block[100] ^= 1);
    }
    let error = open_read_only(&image, BLOCKS).unwrap_err();
    let PoolError::NotAPool(damaged) = &error else { panic!("{error}") };
    assert_eq!(damaged.len(), 4);
    assert!(error.to_string().contains("superblock at block 4095: its checksum is"), "{error}");
}

/// A pool whose superblock was changed, with valid checksums.
fn image_with_superblock(generation: Option<u64>, change: impl Fn(&mut Superblock)) -> DiskImage {
    let mut image = crate::fixture::new_pool_image(BLOCKS);
    let (store, found, mut body, devices) = decode_superblock(&image[&0], 0).unwrap();
    change(&mut body);
    let (kind, generation, body) = (
        BlockKind::Superblock,
        generation.unwrap_or(found),
        PageBody::Superblock(body, devices, OwnerRecord::NONE),
    );
    let page = Page { kind, generation, owner: 0, body };
    image.insert(0, page.encode(store, 0).into());
    image
}

#[test]
fn pool_with_unknown_features_is_not_opened() {
    let newer = |superblock: &mut Superblock| {
        (superblock.version, superblock.blocks, superblock.next_volume) = (2, 3, 0);
        superblock.block_shift = 9;
    };
    let error = open_read_only(&image_with_superblock(None, newer), BLOCKS).unwrap_err();
    assert_eq!(error, PoolError::UnsupportedVersion { version: 2, features: 0 });
    let image = image_with_superblock(None, |body| body.incompatible = 16);
    let error = open_read_only(&image, BLOCKS).unwrap_err();
    assert_eq!(error, PoolError::UnsupportedVersion { version: 1, features: 16 });
    open_read_only(&image_with_superblock(None, |body| body.compatible = 4), BLOCKS).unwrap();
}

#[test]
fn overflowing_superblock_counters_are_rejected() {
    for image in [
        image_with_superblock(None, |body| body.next_volume = 1 << 55),
        image_with_superblock(Some(1 << 55), |_| {}),
    ] {
        let opened = open_read_only(&image, BLOCKS).unwrap();
        assert_eq!((opened.damaged.len(), opened.store.generation()), (1, 2), "others serve");
    }
}

#[test]
fn map_address_outside_the_pool_is_corruption() {
    let (world, metadata) = pool_with_volumes();
    let image = world.rig.disk.image();
    let store = open_read_only(image, BLOCKS).unwrap().store;
    let mut seen = 0;
    for at in metadata {
        let mut page = Page::decode(&image[&at], store.uuid(), at).unwrap();
        let (BlockKind::Map, PageBody::Node { level: 0, records }) = (page.kind, &mut page.body)
        else {
            continue;
        };
        let last = records.last_mut().unwrap();
        last.value = BLOCKS + last.value % 16;
        let mut wrong = image.clone();
        wrong.insert(at, page.encode(store.uuid(), at).into());
        assert_ne!(check_pool(&store, &wrong).findings, [], "block {at}");
        for error in read_result_of_all_volumes(&wrong).into_iter().filter_map(Result::err) {
            let PoolError::Damaged(damage) = &error else { panic!("{error}") };
            assert_eq!((damage.address, &damage.flaw), (at, &CorruptionKind::Records));
            seen += 1;
        }
    }
    assert!(seen > 3, "only {seen} reads came upon it");
}

#[test]
fn mappings_beyond_the_volume_end_are_found() {
    let (world, metadata) = pool_with_volumes();
    let image = world.rig.disk.image();
    let store = open_read_only(image, BLOCKS).unwrap().store;
    let mut found = [0; 2];
    for at in metadata {
        let page = Page::decode(&image[&at], store.uuid(), at).unwrap();
        let PageBody::Volume(body) = page.body else { continue };
        if body.mapped < 2 || body.cut != u64::MAX || body.has_flag(flags::DOOMED) {
            continue;
        }
        let wrongs = [
            (VolumeBody { blocks: 1, reach: body.reach.min(1), ..body }, "end of what is mapped"),
            (VolumeBody { cut: body.blocks, ..body }, "lines of the work list"),
        ];
        for (index, (body, said)) in wrongs.into_iter().enumerate() {
            let page = Page { body: PageBody::Volume(body), ..page.clone() };
            let mut wrong = image.clone();
            wrong.insert(at, page.encode(store.uuid(), at).into());
            let is_it = |one: &CheckFinding| matches!(one, CheckFinding::Number { what, .. } if *what == said);
            assert!(check_pool(&store, &wrong).findings.iter().any(is_it), "block {at}: {said}");
            found[index] += 1;
        }
    }
    assert!(found.iter().all(|count| *count > 0), "{found:?}");
}
