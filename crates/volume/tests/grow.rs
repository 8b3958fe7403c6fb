//! A store whose device has become larger takes the new room, and comes back from a cut of the power
//! while it does.

#![expect(clippy::unwrap_used, reason = "a test may")]

mod rig;

use base::Random;
use rig::disk::{Cut, Disk, Image};
use rig::world::{World, compare};
use rig::{Rig, check, open};
use tenmil_volume::{Ask, Change, Step, StoreError};

const BEFORE: u64 = 1000;

fn world(seed: u64) -> World {
    let mut world = World::new(BEFORE, seed);
    while world.operations < 500 {
        world.work();
    }
    world.compare();
    world
}

/// Carries steps out, and says what is on the medium after each of them if the power fails then.
fn grow(image: &Image, blocks: u64, random: &mut Random) -> (Image, Vec<Image>) {
    let steps = open(image, blocks).unwrap().store.growing(blocks).unwrap();
    let (mut disk, mut cuts) = (Disk::new(image.clone()), Vec::new());
    for (io, step) in (0..).zip(steps) {
        match step {
            Step::Write { at, bytes } => {
                disk.issue_write(io, at, (*bytes).into());
                cuts.push(disk.cut(Cut::Random, random));
                disk.end_write(io);
            }
            Step::Flush => {
                disk.issue_flush(io);
                disk.end_flush(io);
            }
        }
        for cut in [Cut::AsSeen, Cut::Nothing, Cut::Random, Cut::Random] {
            cuts.push(disk.cut(cut, random));
        }
    }
    (disk.image().clone(), cuts)
}

#[test]
fn a_store_that_grows_holds_what_it_held_and_is_cut_at_no_wrong_moment() {
    for (seed, after) in (1..=6).zip([1001, 1002, 1003, 1004, 1100, 1300]) {
        let world = world(seed);
        let image = world.rig.disk.image();
        let mut random = Random::new(seed);
        let (grown, cuts) = grow(image, after, &mut random);
        assert!(cuts.len() > 20);
        for (index, image) in cuts.into_iter().chain([grown]).enumerate() {
            let mut rig = Rig::new(image, after, random.fork()).unwrap();
            let report = check(&rig.store, rig.disk.image());
            assert_eq!(report.findings, [], "seed {seed}, cut {index}");
            compare(&mut rig, &world.model).unwrap();
            // It takes writes, in its new room too, and is clean then.
            let create = Change::Create {
                name: "new".into(),
                blocks: 1200,
                unit: 1,
                uuid: 1,
                checksums: false,
            };
            rig.ask(Ask::Change(create)).unwrap();
            let volumes = rig.ask(Ask::Find("new".into())).unwrap();
            let tenmil_volume::Answer::Volume(info) = volumes else { panic!("{volumes:?}") };
            for block in 0..1200 {
                let token = rig.submit_write(info.id, block, 1, 99);
                rig.settle();
                if rig.answers.remove(&token).unwrap().is_err() {
                    break;
                }
            }
            rig.ask(Ask::Flush).unwrap();
            compare_without(&mut rig, &world);
            let image = rig.disk.image().clone();
            let opened = open(&image, after).unwrap();
            assert_eq!(opened.damaged, [], "seed {seed}, cut {index}");
            assert_eq!(check(&opened.store, &image).findings, [], "seed {seed}, cut {index}");
        }
    }
}

/// The volumes of the model hold what they held.
fn compare_without(rig: &mut Rig, world: &World) {
    rig.ask(Ask::Change(Change::Delete { name: "new".into(), orphan: true })).unwrap();
    compare(rig, &world.model).unwrap();
}

#[test]
fn the_new_room_is_there_and_to_grow_twice_is_to_grow() {
    let world = world(3);
    let mut random = Random::new(4);
    let (grown, _) = grow(world.rig.disk.image(), 5000, &mut random);
    let opened = open(&grown, 5000).unwrap();
    assert_eq!(opened.damaged, []);
    assert_eq!(opened.store.growing(5000).unwrap(), []);
    let mut rig = Rig::new(grown, 5000, random).unwrap();
    let tenmil_volume::Answer::Usage(usage) = rig.ask(Ask::Usage).unwrap() else { panic!() };
    assert!(usage.blocks == 5000 && usage.free > 4000, "{usage:?}");
}

#[test]
fn a_device_that_is_smaller_or_beyond_all_limits_is_refused() {
    let world = world(5);
    let store = open(world.rig.disk.image(), BEFORE).unwrap().store;
    let smaller = StoreError::DeviceTooSmall { blocks: 999, needed: BEFORE };
    assert_eq!(store.growing(999).unwrap_err(), smaller);
    let beyond = (1 << 48) + 1;
    assert_eq!(store.growing(beyond).unwrap_err(), StoreError::DeviceTooLarge { blocks: beyond });
}
