//! Every metadata block destroyed, one at a time: the corruption is identified, and everything that the
//! block does not describe is still readable.

#![expect(clippy::unwrap_used, reason = "a test may")]

mod rig;

use std::sync::Arc;

use rig::disk::{Image, Shared};
use rig::world::World;
use rig::{Rig, check, open};
use tenmil_base::Random;
use tenmil_volume::format::{
    Kind, OwnerRecord, Page, PageBody, Superblock, VolumeBody, decode_superblock, flags,
};
use tenmil_volume::{CorruptionKind, Finding, PoolError, PoolRequest, PoolResponse};

const BLOCKS: u64 = 4096;

/// A pool with volumes, snapshots and clones, and all metadata blocks in use.
fn world() -> (World, Vec<u64>) {
    let mut world = World::new(BLOCKS, 18);
    while world.operations < 1200 {
        world.work();
    }
    world.compare();
    let image = world.rig.disk.image().clone();
    let opened = open(&image, BLOCKS).unwrap();
    let mut walk = tenmil_volume::Check::of(&opened.store);
    let mut metadata = Vec::new();
    while let Some(at) = walk.next_read() {
        metadata.push(at);
        walk.handle_read(Ok(&image[&at]));
    }
    assert!(metadata.len() > 20, "only {}", metadata.len());
    (world, metadata)
}

fn destroyed(image: &Image, at: u64, how: impl Fn(&mut [u8; 4096])) -> Image {
    let mut image = image.clone();
    let mut block = *image[&at];
    how(&mut block);
    image.insert(at, block.into());
    image
}

/// Reads everything; returns the result for each volume.
fn read_all(image: &Image) -> Vec<Result<(), PoolError>> {
    let mut rig = Rig::new(image.clone(), BLOCKS, Random::new(1)).unwrap();
    match rig.ask(PoolRequest::List) {
        Ok(PoolResponse::Volumes(volumes)) => {
            volumes.iter().map(|info| rig.read(info.id, 0, info.blocks).map(drop)).collect()
        }
        Ok(other) => panic!("{other:?}"),
        Err(error) => vec![Err(error)],
    }
}

#[test]
fn any_block_of_metadata_that_is_destroyed_is_named() {
    let (world, metadata) = world();
    let image = world.rig.disk.image();
    let mut random = Random::new(5);
    for at in metadata {
        let bit = usize::try_from(random.below(4096 * 8)).unwrap();
        let ways: [(&str, Image); 3] = [
            ("zeroes", destroyed(image, at, |block| block.fill(0))),
            ("a flipped bit", destroyed(image, at, |block| block[bit / 8] ^= 1 << (bit % 8))),
            ("a torn sector", destroyed(image, at, |block| block[1024..1536].fill(0xa5))),
        ];
        for (how, image) in &ways {
            let store = open(image, BLOCKS).unwrap().store;
            let report = check(&store, image);
            let named = |finding: &Finding| matches!(finding, Finding::Damaged(damage) if damage.address == at);
            assert!(report.findings.iter().any(named), "{how} in {at}: {:?}", report.findings);
            for status in read_all(image).into_iter().filter_map(Result::err) {
                let PoolError::Damaged(damage) = &status else { panic!("{status}") };
                assert_eq!(damage.address, at, "{how}: {status}");
                assert!(status.to_string().contains(&format!("at block {at}")), "{status}");
            }
        }
    }
}

#[test]
fn a_node_of_one_volumes_map_that_is_destroyed_leaves_the_other_volumes() {
    let (mut world, _) = world();
    let names: Vec<String> = world.model.volumes.keys().cloned().collect();
    let Ok(PoolResponse::Volumes(volumes)) = world.rig.ask(PoolRequest::List) else {
        panic!("no list")
    };
    let image = world.rig.disk.image().clone();
    assert_eq!(names.len(), volumes.len());
    let opened = open(&image, BLOCKS).unwrap();
    let mut walk = tenmil_volume::Check::of(&opened.store);
    let mut hit = 0;
    while let Some(at) = walk.next_read() {
        let damaged = destroyed(&image, at, |block| block.fill(0xff));
        let block: Shared = Arc::clone(&image[&at]);
        walk.handle_read(Ok(&block));
        if block[4] != Kind::Map.code() {
            continue;
        }
        let responses = read_all(&damaged);
        assert_eq!(responses.len(), volumes.len(), "all are listed");
        hit += responses.iter().filter(|response| response.is_err()).count();
    }
    assert!(hit > 0, "some volume was hit");
}

#[test]
fn writes_that_were_lost_or_went_astray_are_told_from_what_should_be_there() {
    let (world, metadata) = world();
    let image = world.rig.disk.image();
    let store = open(image, BLOCKS).unwrap().store;
    let mut seen = 0;
    for pair in metadata.windows(2) {
        let (at, other) = (pair[0], pair[1]);
        let page = Page::decode(&image[&at], store.uuid(), at).unwrap();
        let stale = Page { generation: page.generation - 1, ..page.clone() };
        let foreign = page.encode(store.uuid() + 1, at);
        let ways: [(CorruptionKind, Shared); 3] = [
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
            let report = check(&store, &wrong);
            let [Finding::Damaged(damage)] = &report.findings[..] else { panic!("{report:?}") };
            assert_eq!((damage.address, &damage.flaw), (at, &flaw));
            for error in read_all(&wrong).into_iter().filter_map(Result::err) {
                let PoolError::Damaged(damage) = &error else { panic!("{error}") };
                assert_eq!((damage.address, &damage.flaw), (at, &flaw));
                seen += 1;
            }
        }
    }
    assert!(seen > 30, "only {seen} reads came upon it");
}

#[test]
fn a_copy_of_the_superblock_that_is_destroyed_is_named_and_written_anew() {
    let (mut world, _) = world();
    let generation = world.rig.store.generation();
    for at in Superblock::places(generation, BLOCKS) {
        let image = destroyed(world.rig.disk.image(), at, |block| block.fill(0));
        let opened = open(&image, BLOCKS).unwrap();
        assert_eq!(opened.store.generation(), generation, "the other copy has it");
        let named: Vec<u64> = opened.damaged.iter().map(|damage| damage.address).collect();
        assert_eq!(named, [at]);

        let mut rig = Rig::new(image, BLOCKS, Random::new(2)).unwrap();
        rig::compare::compare(&mut rig, &world.model).unwrap();
        for name in ["one more", "and another"] {
            let (name, uuid) = (name.into(), 1);
            rig.ask(PoolRequest::Change(tenmil_volume::VolumeOp::Create {
                name,
                blocks: 1,
                unit: 1,
                uuid,
                checksums: false,
            }))
            .unwrap();
        }
        assert_eq!(open(rig.disk.image(), BLOCKS).unwrap().damaged, []);
    }
    world.compare();
}

#[test]
fn a_store_without_any_superblock_names_all_four() {
    let mut image = rig::new_store(BLOCKS);
    for at in [0, 1, BLOCKS - 2, BLOCKS - 1] {
        image = destroyed(&image, at, |block| block[100] ^= 1);
    }
    let error = open(&image, BLOCKS).unwrap_err();
    let PoolError::NotAPool(damaged) = &error else { panic!("{error}") };
    assert_eq!(damaged.len(), 4);
    assert!(error.to_string().contains("superblock at block 4095: its checksum is"), "{error}");
}

/// A pool whose superblock was changed, with valid checksums.
fn with_superblock(generation: Option<u64>, change: impl Fn(&mut Superblock)) -> Image {
    let mut image = rig::new_store(BLOCKS);
    let (store, found, mut body, devices) = decode_superblock(&image[&0], 0).unwrap();
    change(&mut body);
    let (kind, generation, body) = (
        Kind::Superblock,
        generation.unwrap_or(found),
        PageBody::Superblock(body, devices, OwnerRecord::NONE),
    );
    let page = Page { kind, generation, owner: 0, body };
    image.insert(0, page.encode(store, 0).into());
    image
}

#[test]
fn a_store_that_somebody_newer_has_written_to_is_not_opened_whatever_its_numbers_are() {
    let newer = |superblock: &mut Superblock| {
        (superblock.version, superblock.blocks, superblock.next_volume) = (2, 3, 0);
        superblock.block_shift = 9;
    };
    let error = open(&with_superblock(None, newer), BLOCKS).unwrap_err();
    assert_eq!(error, PoolError::UnsupportedVersion { version: 2, features: 0 });
    let image = with_superblock(None, |body| body.incompatible = 16);
    let error = open(&image, BLOCKS).unwrap_err();
    assert_eq!(error, PoolError::UnsupportedVersion { version: 1, features: 16 });
    open(&with_superblock(None, |body| body.compatible = 4), BLOCKS).unwrap();
}

#[test]
fn numbers_that_would_be_counted_up_to_the_limit_are_refused() {
    for image in [
        with_superblock(None, |body| body.next_volume = 1 << 55),
        with_superblock(Some(1 << 55), |_| {}),
    ] {
        let opened = open(&image, BLOCKS).unwrap();
        assert_eq!((opened.damaged.len(), opened.store.generation()), (1, 2), "others serve");
    }
}

#[test]
fn a_map_that_leads_out_of_the_store_is_damage() {
    let (world, metadata) = world();
    let image = world.rig.disk.image();
    let store = open(image, BLOCKS).unwrap().store;
    let mut seen = 0;
    for at in metadata {
        let mut page = Page::decode(&image[&at], store.uuid(), at).unwrap();
        let (Kind::Map, PageBody::Node { level: 0, records }) = (page.kind, &mut page.body) else {
            continue;
        };
        let last = records.last_mut().unwrap();
        last.value = BLOCKS + last.value % 16;
        let mut wrong = image.clone();
        wrong.insert(at, page.encode(store.uuid(), at).into());
        assert_ne!(check(&store, &wrong).findings, [], "block {at}");
        for error in read_all(&wrong).into_iter().filter_map(Result::err) {
            let PoolError::Damaged(damage) = &error else { panic!("{error}") };
            assert_eq!((damage.address, &damage.flaw), (at, &CorruptionKind::Records));
            seen += 1;
        }
    }
    assert!(seen > 3, "only {seen} reads came upon it");
}

#[test]
fn what_is_mapped_behind_the_end_and_a_forgotten_cut_are_found() {
    let (world, metadata) = world();
    let image = world.rig.disk.image();
    let store = open(image, BLOCKS).unwrap().store;
    let mut found = [0; 2];
    for at in metadata {
        let page = Page::decode(&image[&at], store.uuid(), at).unwrap();
        let PageBody::Volume(body) = page.body else { continue };
        if body.mapped < 2 || body.cut != u64::MAX || body.has(flags::DOOMED) {
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
            let is_it =
                |one: &Finding| matches!(one, Finding::Number { what, .. } if *what == said);
            assert!(check(&store, &wrong).findings.iter().any(is_it), "block {at}: {said}");
            found[index] += 1;
        }
    }
    assert!(found.iter().all(|count| *count > 0), "{found:?}");
}
