//! Any metadata block destroyed: every volume that it does not describe is rescued byte for byte, and the
//! others as far as they are described.

use std::collections::{BTreeMap, BTreeSet};

use crate::fixture::fake_disk::{DiskImage, ZEROES, sector_values};
use crate::fixture::pool_model::{VolumeModel, parent_value};
use crate::fixture::pool_with_model::PoolWithModel;
use crate::fixture::{PoolFixture, check_pool, new_pool_image, open_read_only};
use tenmil_base::Random;
use tenmil_volume::format::{BlockKind, Page, PageBody, Superblock, decode_superblock};
use tenmil_volume::rescue::{FoundVolume, LostRange, PoolRescue, RescueResult};
use tenmil_volume::{CheckFinding, ConsistencyCheck, PoolRequest, VolumeOp};

const BLOCKS: u64 = 4096;

fn pool_after_random_work(seed: u64) -> PoolWithModel {
    let mut world = PoolWithModel::new(BLOCKS, seed);
    world.changes = 15;
    while world.operations < 1500 {
        world.run_random_operation();
    }
    world.compare_contents();
    world
}

/// All metadata blocks in use.
fn metadata_block_addresses(image: &DiskImage) -> Vec<u64> {
    let store = open_read_only(image, BLOCKS).unwrap().store;
    let mut walk = ConsistencyCheck::of_pool(&store);
    let mut metadata = Vec::new();
    while let Some(at) = walk.next_read() {
        metadata.push(at);
        walk.handle_read(Ok(&image[&at]));
    }
    metadata
}

fn image_block(image: &DiskImage, at: u64) -> &[u8; 4096] {
    image.get(&at).map_or(&ZEROES, |block| block)
}

fn rescue_image(image: &DiskImage) -> RescueResult {
    let mut rescue = PoolRescue::new(BLOCKS);
    while let Some(at) = rescue.next_read().unwrap() {
        rescue.handle_read(Ok(image_block(image, at)));
    }
    rescue.into_result()
}

/// Contents of a volume's blocks, the lost ranges, and the metadata blocks that describe them.
fn read_rescued_volume(
    image: &DiskImage,
    found: &FoundVolume,
) -> (Vec<[u64; 8]>, Vec<LostRange>, BTreeSet<u64>) {
    let (mut walk, mut reported) = (found.map_walk(), BTreeSet::new());
    while let Some(at) = walk.next_read() {
        reported.insert(at);
        walk.handle_read(Ok(image_block(image, at)));
    }
    let (records, mut lost) = walk.into_records_and_lost_ranges();
    let mut cells = vec![[0; 8]; usize::try_from(found.info.blocks).unwrap()];
    if let Some(at) = found.parent_address() {
        reported.insert(at);
        for (index, cell) in (0..found.info.reach).zip(&mut cells) {
            *cell = [parent_value(index); 8];
        }
        match found.decode_parent(Ok(image_block(image, at))) {
            Ok(parent) => assert_eq!(parent.uri, "ram:1m"),
            Err(damage) => lost.push(LostRange { keys: 0..found.info.reach, damage }),
        }
    }
    for run in records {
        for index in 0..run.extra {
            if let Some(cell) = cells.get_mut(usize::try_from(run.key + index).unwrap()) {
                let is_hole = run.is_hole();
                *cell = if is_hole {
                    [0; 8]
                } else {
                    sector_values(image_block(image, run.value + index))
                };
            }
        }
    }
    (cells, lost, reported)
}

/// Compares the rescued contents of a volume with the model, except for lost ranges.
fn assert_rescued_matches(
    cells: &[[u64; 8]],
    lost: &[LostRange],
    expected: &VolumeModel,
    what: &str,
) {
    assert_eq!(cells.len(), expected.cells.len(), "{what}");
    for (index, (found, cell)) in (0..).zip(cells.iter().zip(&expected.cells)) {
        if !lost.iter().any(|lost| lost.keys.contains(&index)) {
            assert_eq!(*found, [cell.current_value(); 8], "{what}: block {index}");
        }
    }
}

#[test]
fn any_metadata_block_may_be_destroyed_and_the_rest_is_rescued() {
    let (mut partly, mut scans) = (0, 0);
    for seed in [18, 31, 32] {
        let world = pool_after_random_work(seed);
        let image = world.rig.disk.image();
        // The volumes that each block describes.
        let mut describes: BTreeMap<u64, BTreeSet<String>> = BTreeMap::new();
        for found in rescue_image(image).volumes {
            for at in read_rescued_volume(image, &found).2 {
                describes.entry(at).or_default().insert(found.info.name.clone());
            }
        }
        let store = open_read_only(image, BLOCKS).unwrap().store;
        let generation = store.generation();
        let superblocks = Superblock::superblock_addresses(generation, BLOCKS);
        for at in metadata_block_addresses(image).into_iter().chain(superblocks) {
            for byte in [0, 0xa5] {
                let mut wrong = image.clone();
                let page = Page::decode(&image[&at], store.uuid(), at).unwrap();
                wrong.insert(at, [byte; 4096].into());
                let opened = open_read_only(&wrong, BLOCKS).unwrap();
                let found = check_pool(&opened.store, &wrong).findings;
                let is_named = |finding: &CheckFinding| matches!(finding, CheckFinding::Damaged(damage) if damage.address == at);
                let is_superblock = opened.damaged.iter().any(|damage| damage.address == at);
                assert!(is_superblock || found.iter().any(is_named), "{at} is named");

                let rescued = rescue_image(&wrong);
                scans += u64::from(rescued.was_scanned);
                let mut left: BTreeSet<&String> = world.model.volumes.keys().collect();
                for found in &rescued.volumes {
                    let name = &found.info.name;
                    let what = format!("seed {seed}, {} at {at}: `{name}`", page.kind.name());
                    assert!(left.remove(name), "{what} is no volume");
                    let (cells, lost, _) = read_rescued_volume(&wrong, found);
                    let of = describes.get(&at).filter(|names| names.contains(name));
                    assert_eq!(lost.is_empty(), of.is_none(), "{what}");
                    assert!(lost.iter().all(|lost| lost.damage.address == at), "{what}");
                    assert_rescued_matches(&cells, &lost, &world.model.volumes[name], &what);
                    partly += u64::from(!lost.is_empty());
                }
                // If a volume's block is destroyed, only that volume is missing.
                let missing: Vec<String> = left.into_iter().cloned().collect();
                match &page.body {
                    PageBody::Volume(body) => {
                        let name = tenmil_volume::format::decode_name(&body.name);
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
fn volumes_are_rescued_without_superblocks_by_a_full_scan() {
    for seed in [18, 33, 35, 36] {
        let mut world = pool_after_random_work(seed);
        for name in world.model.volumes.keys().cloned().collect::<Vec<_>>() {
            // Deleted volumes must not reappear.
            if name.as_str() > "h" {
                let change = VolumeOp::Delete { name: name.clone(), orphan: true };
                world.model = world.model.after_operation(&change).unwrap();
                world.rig.run_request(PoolRequest::Change(change)).unwrap();
            }
        }
        world.compare_contents();
        let mut image = world.rig.disk.image().clone();
        for at in [0, 1, BLOCKS - 2, BLOCKS - 1] {
            image.insert(at, [0x5a; 4096].into());
        }
        assert!(open_read_only(&image, BLOCKS).is_err());
        let rescued = rescue_image(&image);
        assert!(rescued.was_scanned && rescued.damaged.len() == 4, "{:?}", rescued.damaged);
        assert_eq!(rescued.store, world.rig.store.uuid());
        for (name, expected) in &world.model.volumes {
            let found = rescued.volumes.iter().filter(|found| found.info.name == *name);
            let found: Vec<&FoundVolume> = found.collect();
            let [found] = found[..] else { panic!("`{name}` is found {} times", found.len()) };
            let (cells, lost, _) = read_rescued_volume(&image, found);
            assert_eq!(lost, []);
            assert_rescued_matches(&cells, &lost, expected, &format!("seed {seed}: `{name}`"));
        }
    }
}

#[test]
fn pages_of_an_abandoned_transaction_are_not_rescued_as_a_volume() {
    let mut rig =
        PoolFixture::with_normal_trees(new_pool_image(BLOCKS), BLOCKS, Random::new(1)).unwrap();
    let names = ["a", "b", "c", "d", "e", "f", "g", "h"];
    for name in names {
        let create =
            VolumeOp::Create { name: name.into(), blocks: 10, unit: 1, uuid: 1, checksums: false };
        rig.run_request(PoolRequest::Change(create)).unwrap();
    }
    let resize =
        |name: &str| PoolRequest::Change(VolumeOp::Resize { name: name.into(), blocks: 20 });
    rig.holds_flushes = true;
    let first = rig.submit(resize("a"));
    rig.run_until_idle();
    // While that is committed, the others accumulate; their pages are written, and nothing more.
    let tokens: Vec<u64> = names[1..].iter().map(|name| rig.submit(resize(name))).collect();
    rig.run_until_idle();
    rig.holds_flushes = false;
    while !rig.responses.contains_key(&first) {
        assert!(rig.execute_random_action());
    }
    rig.fails_flushes = true;
    rig.run_until_idle();
    assert!(tokens.iter().all(|token| rig.responses[token].is_err()));

    let mut rig =
        PoolFixture::with_normal_trees(rig.disk.image().clone(), BLOCKS, Random::new(2)).unwrap();
    let create =
        VolumeOp::Create { name: "z".into(), blocks: 10, unit: 1, uuid: 1, checksums: false };
    rig.run_request(PoolRequest::Change(create)).unwrap();
    let mut image = rig.disk.image().clone();
    let at = Superblock::superblock_addresses(rig.store.generation(), BLOCKS)[0];
    let (_, _, superblock, _) = decode_superblock(&image[&at], at).unwrap();
    image.insert(superblock.catalogue.address, [0; 4096].into());
    let rescued = rescue_image(&image);
    let sizes: Vec<u64> = rescued.volumes.iter().map(|found| found.info.blocks).collect();
    assert_eq!(sizes, [20, 10, 10, 10, 10, 10, 10, 10, 10]);
}

#[test]
fn rescue_of_an_intact_pool_does_not_scan() {
    let world = pool_after_random_work(34);
    let image = world.rig.disk.image();
    let rescued = rescue_image(image);
    assert!(!rescued.was_scanned && rescued.damaged.is_empty());
    let names: Vec<&String> = rescued.volumes.iter().map(|found| &found.info.name).collect();
    assert_eq!(names.len(), world.model.volumes.len());
    let store = open_read_only(image, BLOCKS).unwrap().store;
    assert_eq!((rescued.store, rescued.name), (store.uuid(), store.name()));
    let root = image.values().filter(|block| block[4] == BlockKind::Volume.code());
    assert!(root.count() >= names.len());
}
