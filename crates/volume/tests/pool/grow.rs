//! A pool uses the space that its device has gained and devices that are added, during other I/O, and
//! survives a power loss at any step of that.

use crate::fixture::fake_disk::{DiskImage, PowerLoss};
use crate::fixture::model_comparison::compare_with_model;
use crate::fixture::pool_with_model::PoolWithModel;
use crate::fixture::{PoolFixture, check_pool, open_read_only};
use tenmil_base::Random;
use tenmil_volume::device_table::{DeviceTable, SecondaryDevice};
use tenmil_volume::format::Superblock;
use tenmil_volume::{DeviceAction, PoolError, PoolRequest, PoolResponse, VolumeOp};

const BEFORE: u64 = 1000;

fn pool_after_random_work(seed: u64) -> PoolWithModel {
    let mut world = PoolWithModel::new(BEFORE, seed);
    while world.operations < 500 {
        world.run_random_operation();
    }
    world.compare_contents();
    world
}

fn second_device(uuid: u128) -> SecondaryDevice {
    SecondaryDevice { uuid, uri: "ram:1m".into() }
}

/// The device grows to `front` blocks, and another one of `more` blocks is added unless that is zero.
fn grown_devices(front: u64, more: u64) -> DeviceTable {
    let mut devices = DeviceTable::single(front);
    if more > 0 {
        devices.add_device(second_device(7), more + 1);
    }
    devices
}

/// Grows the pool to these devices, and returns the possible contents after a power loss at each step.
fn images_while_growing(
    rig: &mut PoolFixture,
    devices: &DeviceTable,
    random: &mut Random,
) -> Vec<DiskImage> {
    rig.disk.runs = devices.spans_with_start().map(|(begin, run)| (begin, run.device)).collect();
    let token = rig.submit(PoolRequest::Grow(devices.clone()));
    let mut cuts = Vec::new();
    loop {
        rig.start_pool_actions();
        for cut in [PowerLoss::AsSeen, PowerLoss::Nothing, PowerLoss::Random, PowerLoss::Random] {
            cuts.push(rig.disk.image_after_power_loss(cut, random));
        }
        if !rig.execute_random_action() {
            break;
        }
    }
    assert_eq!(rig.responses.remove(&token).unwrap(), Ok(PoolResponse::Done));
    cuts
}

/// Writes one block after the other until no space is left.
fn fill_until_full(rig: &mut PoolFixture) -> u64 {
    let (name, blocks) = ("new".into(), 3000);
    rig.run_request(PoolRequest::Change(VolumeOp::Create {
        name,
        blocks,
        unit: 1,
        uuid: 1,
        checksums: false,
    }))
    .unwrap();
    let PoolResponse::Volume(info) = rig.run_request(PoolRequest::Find("new".into())).unwrap()
    else {
        panic!()
    };
    for block in 0..info.blocks {
        let token = rig.submit_write(info.id, block, 1, 99);
        rig.run_until_idle();
        if rig.responses.remove(&token).unwrap().is_err() {
            return block;
        }
    }
    info.blocks
}

#[test]
fn growing_keeps_contents_at_any_power_loss() {
    let ways = [(1001, 0), (1002, 0), (1003, 0), (1300, 0), (1000, 1), (1000, 300), (1001, 40)];
    for (seed, (front, more)) in (1..).zip(ways) {
        let mut world = pool_after_random_work(seed);
        let mut random = Random::new(seed);
        let devices = grown_devices(front, more);
        let cuts = images_while_growing(&mut world.rig, &devices, &mut random);
        assert!(cuts.len() > 20);
        let done = world.rig.disk.image().clone();
        let mut sizes = [0; 2];
        for (index, image) in cuts.into_iter().chain([done]).enumerate() {
            let mut rig = PoolFixture::new(image, front, random.fork()).unwrap();
            let is_grown = *rig.store.devices() == devices;
            assert!(is_grown || rig.store.devices() == &DeviceTable::single(BEFORE));
            sizes[usize::from(is_grown)] += 1;
            let report = check_pool(&rig.store, rig.disk.image());
            assert_eq!(report.findings, [], "seed {seed}, cut {index}");
            compare_with_model(&mut rig, &world.model).unwrap();
            // It accepts writes, also in its new space, and passes the check afterwards.
            if index % 7 == 0 {
                fill_until_full(&mut rig);
                rig.run_request(PoolRequest::Change(VolumeOp::Delete {
                    name: "new".into(),
                    orphan: true,
                }))
                .unwrap();
                compare_with_model(&mut rig, &world.model).unwrap();
                rig.run_request(PoolRequest::Flush).unwrap();
                let image = rig.disk.image().clone();
                let opened = open_read_only(&image, front).unwrap();
                assert_eq!(opened.damaged, [], "seed {seed}, cut {index}");
                assert_eq!(
                    check_pool(&opened.store, &image).findings,
                    [],
                    "seed {seed}, cut {index}"
                );
            }
        }
        assert!(sizes[0] > 5 && sizes[1] > 5, "seed {seed}: {sizes:?}");
    }
}

#[test]
fn full_pool_has_space_after_growing() {
    for (front, more) in [(1400, 0), (1000, 400)] {
        let mut rig = PoolFixture::with_normal_trees(
            crate::fixture::new_pool_image(BEFORE),
            front,
            Random::new(1),
        )
        .unwrap();
        let before = fill_until_full(&mut rig);
        assert!((700..1000).contains(&before), "{before}");
        images_while_growing(&mut rig, &grown_devices(front, more), &mut Random::new(2));
        let PoolResponse::Volume(info) = rig.run_request(PoolRequest::Find("new".into())).unwrap()
        else {
            panic!()
        };
        let mut block = before;
        loop {
            let token = rig.submit_write(info.id, block, 1, 98);
            rig.run_until_idle();
            if rig.responses.remove(&token).unwrap().is_err() {
                break;
            }
            block += 1;
        }
        assert!(block > before + 350, "{before} and then {block}");
        rig.run_request(PoolRequest::Flush).unwrap();
        // All four superblocks are valid, whatever is between them.
        let opened = open_read_only(rig.disk.image(), front).unwrap();
        assert_eq!(opened.damaged, []);
        assert_eq!(opened.store.blocks(), 1400);
        let [one, other] = [0, 1].map(|slot| Superblock::superblock_addresses(slot, front));
        for at in [one, other].concat() {
            assert_eq!(rig.disk.read(at)[4], 1, "block {at} is a superblock");
        }
        assert_eq!(check_pool(&opened.store, rig.disk.image()).findings, []);
    }
}

#[test]
fn repeated_grow_writes_nothing() {
    let mut world = pool_after_random_work(3);
    let devices = grown_devices(1000, 500);
    images_while_growing(&mut world.rig, &devices, &mut Random::new(4));
    let (writes, generation) = (world.rig.disk.writes, world.rig.store.generation());
    assert_eq!(world.rig.run_request(PoolRequest::Grow(devices.clone())), Ok(PoolResponse::Done));
    assert_eq!((world.rig.disk.writes, world.rig.store.generation()), (writes, generation));
    let mut again = open_read_only(world.rig.disk.image(), 1000).unwrap();
    assert_eq!((again.damaged, again.store.devices()), (Vec::new(), &devices));
    again.store.submit(0, PoolRequest::Grow(devices));
    assert_eq!(again.store.next_action(), None);
}

#[test]
fn multi_device_pool_opens_with_any_superblock_destroyed() {
    let mut world = pool_after_random_work(6);
    let devices = grown_devices(1000, 500);
    images_while_growing(&mut world.rig, &devices, &mut Random::new(4));
    let image = world.rig.disk.image();
    let generation = world.rig.store.generation();
    for pair in [[0, 1], [998, 999], Superblock::superblock_addresses(generation, 1000)] {
        let mut wrong = image.clone();
        wrong.extend(pair.map(|at| (at, [0xa5; 4096].into())));
        let opened = open_read_only(&wrong, 1000).unwrap();
        assert_eq!(opened.store.devices(), &devices, "without {pair:?}");
        assert_eq!(opened.damaged.len(), 2);
    }
}

#[test]
fn device_table_that_moves_blocks_is_rejected() {
    let mut world = pool_after_random_work(5);
    images_while_growing(&mut world.rig, &grown_devices(1000, 500), &mut Random::new(4));
    let mut refused =
        |devices: DeviceTable| world.rig.run_request(PoolRequest::Grow(devices)).unwrap_err();
    let blocks = 1500;
    for (devices, found) in [
        (DeviceTable::single(1500), 1500),
        (grown_devices(1000, 499), 1499),
        (grown_devices(1001, 500), 1501),
        (grown_devices(999, 501), 1500),
    ] {
        assert_eq!(refused(devices), PoolError::NotGrown { blocks, found });
    }
    let mut foreign = grown_devices(1000, 500);
    foreign.others[0].uuid = 8;
    assert_eq!(refused(foreign), PoolError::NotGrown { blocks, found: 1500 });
    let mut beyond = grown_devices(1000, 500);
    beyond.add_device(second_device(9), 1 << 48);
    assert_eq!(refused(beyond), PoolError::DeviceTooLarge { blocks: (1 << 48) + 1499 });
    let mut nameless = grown_devices(1000, 500);
    nameless.others[0].uri = String::new();
    assert_eq!(refused(nameless), PoolError::BadDevice { uri: String::new() });
    let image = world.rig.disk.image();
    let smaller = open_read_only(image, 999).unwrap_err();
    assert_eq!(smaller, PoolError::DeviceTooSmall { blocks: 999, needed: 1000 });
}

#[test]
fn previous_superblock_location_is_not_allocated_while_in_use() {
    let mut rig = PoolFixture::with_normal_trees(
        crate::fixture::new_pool_image(BEFORE),
        1400,
        Random::new(1),
    )
    .unwrap();
    let before = fill_until_full(&mut rig);
    let PoolResponse::Volume(info) = rig.run_request(PoolRequest::Find("new".into())).unwrap()
    else {
        panic!()
    };
    let grow = rig.submit(PoolRequest::Grow(DeviceTable::single(1400)));
    while rig.store.uncommitted_devices().first < 1400 {
        assert!(rig.execute_random_action());
    }
    // All need space at once.
    let tokens: Vec<u64> =
        (before..before + 300).map(|block| rig.submit_write(info.id, block, 1, 9)).collect();
    let (mut since, mut seen) = (None, 0);
    loop {
        rig.start_pool_actions();
        if rig.store.devices().first == 1400 {
            since = since.or(Some(rig.store.generation()));
        }
        let is_over = since.is_some_and(|since| rig.store.generation() > since);
        for action in rig.in_flight() {
            if let DeviceAction::WriteData { at, blocks, .. } = action {
                let meets = *at < BEFORE && BEFORE - 2 < at + blocks;
                assert!(is_over || !meets, "{action:?}");
                seen += 1;
            }
        }
        if !rig.execute_random_action() {
            break;
        }
    }
    assert!(seen > 100 && rig.responses.remove(&grow).unwrap().is_ok());
    let done = tokens.iter().filter(|token| rig.responses[token].is_ok()).count();
    assert!(done > 250, "{done} of {} writes", tokens.len());
}
