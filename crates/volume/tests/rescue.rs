//! Any metadata block destroyed: every volume that it does not describe is rescued byte for byte, and the
//! others as far as they are described.

#![expect(clippy::unwrap_used, reason = "a test may")]

mod rig;

use std::collections::{BTreeMap, BTreeSet};

use rig::disk::{Image, ZEROES, values};
use rig::model::{Volume, parent_value};
use rig::world::World;
use rig::{Rig, check, new_store, open};
use tenmil_base::Random;
use tenmil_volume::format::{Kind, Page, PageBody, Superblock, decode_superblock};
use tenmil_volume::rescue::{FoundVolume, LostRange, Rescue, RescueResult};
use tenmil_volume::{Check, Finding, PoolRequest, VolumeOp};

const BLOCKS: u64 = 4096;

fn world(seed: u64) -> World {
    let mut world = World::new(BLOCKS, seed);
    world.changes = 15;
    while world.operations < 1500 {
        world.work();
    }
    world.compare();
    world
}

/// All metadata blocks in use.
fn metadata(image: &Image) -> Vec<u64> {
    let store = open(image, BLOCKS).unwrap().store;
    let mut walk = Check::of(&store);
    let mut metadata = Vec::new();
    while let Some(at) = walk.next_read() {
        metadata.push(at);
        walk.handle_read(Ok(&image[&at]));
    }
    metadata
}

fn block(image: &Image, at: u64) -> &[u8; 4096] {
    image.get(&at).map_or(&ZEROES, |block| block)
}

fn rescue(image: &Image) -> RescueResult {
    let mut rescue = Rescue::new(BLOCKS);
    while let Some(at) = rescue.next_read().unwrap() {
        rescue.handle_read(Ok(block(image, at)));
    }
    rescue.finish()
}

/// Contents of a volume's blocks, the lost ranges, and the metadata blocks that describe them.
fn read(image: &Image, found: &FoundVolume) -> (Vec<[u64; 8]>, Vec<LostRange>, BTreeSet<u64>) {
    let (mut walk, mut told) = (found.walk(), BTreeSet::new());
    while let Some(at) = walk.next_read() {
        told.insert(at);
        walk.handle_read(Ok(block(image, at)));
    }
    let (records, mut lost) = walk.finish();
    let mut cells = vec![[0; 8]; usize::try_from(found.info.blocks).unwrap()];
    if let Some(at) = found.parent_at() {
        told.insert(at);
        for (index, cell) in (0..found.info.reach).zip(&mut cells) {
            *cell = [parent_value(index); 8];
        }
        match found.parent(Ok(block(image, at))) {
            Ok(parent) => assert_eq!(parent.uri, "ram:1m"),
            Err(damage) => lost.push(LostRange { keys: 0..found.info.reach, damage }),
        }
    }
    for run in records {
        for index in 0..run.extra {
            if let Some(cell) = cells.get_mut(usize::try_from(run.key + index).unwrap()) {
                let is_hole = run.is_hole();
                *cell = if is_hole { [0; 8] } else { values(block(image, run.value + index)) };
            }
        }
    }
    (cells, lost, told)
}

/// Compares the rescued contents of a volume with the model, except for lost ranges.
fn compare(cells: &[[u64; 8]], lost: &[LostRange], expected: &Volume, what: &str) {
    assert_eq!(cells.len(), expected.cells.len(), "{what}");
    for (index, (found, cell)) in (0..).zip(cells.iter().zip(&expected.cells)) {
        if !lost.iter().any(|lost| lost.keys.contains(&index)) {
            assert_eq!(*found, [cell.value(); 8], "{what}: block {index}");
        }
    }
}

#[test]
fn any_block_of_metadata_may_be_destroyed_and_what_it_does_not_describe_comes_back() {
    let (mut partly, mut scans) = (0, 0);
    for seed in [18, 31, 32] {
        let world = world(seed);
        let image = world.rig.disk.image();
        // The volumes that each block describes.
        let mut describes: BTreeMap<u64, BTreeSet<String>> = BTreeMap::new();
        for found in rescue(image).volumes {
            for at in read(image, &found).2 {
                describes.entry(at).or_default().insert(found.info.name.clone());
            }
        }
        let store = open(image, BLOCKS).unwrap().store;
        let generation = store.generation();
        let superblocks = Superblock::places(generation, BLOCKS);
        for at in metadata(image).into_iter().chain(superblocks) {
            for byte in [0, 0xa5] {
                let mut wrong = image.clone();
                let page = Page::decode(&image[&at], store.uuid(), at).unwrap();
                wrong.insert(at, [byte; 4096].into());
                let opened = open(&wrong, BLOCKS).unwrap();
                let found = check(&opened.store, &wrong).findings;
                let is_named = |finding: &Finding| matches!(finding, Finding::Damaged(damage) if damage.address == at);
                let is_superblock = opened.damaged.iter().any(|damage| damage.address == at);
                assert!(is_superblock || found.iter().any(is_named), "{at} is named");

                let rescued = rescue(&wrong);
                scans += u64::from(rescued.was_scanned);
                let mut left: BTreeSet<&String> = world.model.volumes.keys().collect();
                for found in &rescued.volumes {
                    let name = &found.info.name;
                    let what = format!("seed {seed}, {} at {at}: `{name}`", page.kind.name());
                    assert!(left.remove(name), "{what} is no volume");
                    let (cells, lost, _) = read(&wrong, found);
                    let of = describes.get(&at).filter(|names| names.contains(name));
                    assert_eq!(lost.is_empty(), of.is_none(), "{what}");
                    assert!(lost.iter().all(|lost| lost.damage.address == at), "{what}");
                    compare(&cells, &lost, &world.model.volumes[name], &what);
                    partly += u64::from(!lost.is_empty());
                }
                // If a volume's block is destroyed, only that volume is missing.
                let missing: Vec<String> = left.into_iter().cloned().collect();
                match &page.body {
                    PageBody::Volume(body) => {
                        let name = tenmil_volume::format::unpadded(&body.name);
                        let is_gone = !world.model.volumes.contains_key(&name);
                        assert!(is_gone || missing == [name], "{missing:?}");
                    }
                    _ => assert_eq!(missing, [""; 0], "seed {seed}, {} at {at}", page.kind.name()),
                }
            }
        }
    }
    assert!(partly > 10 && scans > 3, "{partly} in part, {scans} scans");
}

#[test]
fn without_any_superblock_all_volumes_are_found_by_looking_at_every_block() {
    for seed in [18, 33, 35, 36] {
        let mut world = world(seed);
        for name in world.model.volumes.keys().cloned().collect::<Vec<_>>() {
            // Deleted volumes must not reappear.
            if name.as_str() > "h" {
                let change = VolumeOp::Delete { name: name.clone(), orphan: true };
                world.model = world.model.after(&change).unwrap();
                world.rig.ask(PoolRequest::Change(change)).unwrap();
            }
        }
        world.compare();
        let mut image = world.rig.disk.image().clone();
        for at in [0, 1, BLOCKS - 2, BLOCKS - 1] {
            image.insert(at, [0x5a; 4096].into());
        }
        assert!(open(&image, BLOCKS).is_err());
        let rescued = rescue(&image);
        assert!(rescued.was_scanned && rescued.damaged.len() == 4, "{:?}", rescued.damaged);
        assert_eq!(rescued.store, world.rig.store.uuid());
        for (name, expected) in &world.model.volumes {
            let found = rescued.volumes.iter().filter(|found| found.info.name == *name);
            let found: Vec<&FoundVolume> = found.collect();
            let [found] = found[..] else { panic!("`{name}` is found {} times", found.len()) };
            let (cells, lost, _) = read(&image, found);
            assert_eq!(lost, []);
            compare(&cells, &lost, expected, &format!("seed {seed}: `{name}`"));
        }
    }
}

#[test]
fn what_a_transaction_that_came_to_nothing_has_left_is_not_taken_for_a_volume() {
    let mut rig = Rig::plain(new_store(BLOCKS), BLOCKS, Random::new(1)).unwrap();
    let names = ["a", "b", "c", "d", "e", "f", "g", "h"];
    for name in names {
        let create =
            VolumeOp::Create { name: name.into(), blocks: 10, unit: 1, uuid: 1, checksums: false };
        rig.ask(PoolRequest::Change(create)).unwrap();
    }
    let resize =
        |name: &str| PoolRequest::Change(VolumeOp::Resize { name: name.into(), blocks: 20 });
    rig.holds_flushes = true;
    let first = rig.submit(resize("a"));
    rig.settle();
    // While that is committed, the others accumulate; their pages are written, and nothing more.
    let tokens: Vec<u64> = names[1..].iter().map(|name| rig.submit(resize(name))).collect();
    rig.settle();
    rig.holds_flushes = false;
    while !rig.responses.contains_key(&first) {
        assert!(rig.step());
    }
    rig.fails_flushes = true;
    rig.settle();
    assert!(tokens.iter().all(|token| rig.responses[token].is_err()));

    let mut rig = Rig::plain(rig.disk.image().clone(), BLOCKS, Random::new(2)).unwrap();
    let create =
        VolumeOp::Create { name: "z".into(), blocks: 10, unit: 1, uuid: 1, checksums: false };
    rig.ask(PoolRequest::Change(create)).unwrap();
    let mut image = rig.disk.image().clone();
    let at = Superblock::places(rig.store.generation(), BLOCKS)[0];
    let (_, _, superblock, _) = decode_superblock(&image[&at], at).unwrap();
    image.insert(superblock.catalogue.address, [0; 4096].into());
    let rescued = rescue(&image);
    let sizes: Vec<u64> = rescued.volumes.iter().map(|found| found.info.blocks).collect();
    assert_eq!(sizes, [20, 10, 10, 10, 10, 10, 10, 10, 10]);
}

#[test]
fn a_store_that_is_whole_is_not_looked_through() {
    let world = world(34);
    let image = world.rig.disk.image();
    let rescued = rescue(image);
    assert!(!rescued.was_scanned && rescued.damaged.is_empty());
    let names: Vec<&String> = rescued.volumes.iter().map(|found| &found.info.name).collect();
    assert_eq!(names.len(), world.model.volumes.len());
    let store = open(image, BLOCKS).unwrap().store;
    assert_eq!((rescued.store, rescued.name), (store.uuid(), store.name()));
    let root = image.values().filter(|block| block[4] == Kind::Volume.code());
    assert!(root.count() >= names.len());
}
