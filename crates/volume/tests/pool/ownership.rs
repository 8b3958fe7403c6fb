//! Two instances open one pool: its owner writes to it, the other one is rejected or finds out, and a
//! pool that is taken over keeps the state that the new owner has written.

use crate::fixture::fake_disk::{DiskImage, FakeDisk, PowerLoss};
use crate::fixture::{PoolFixture, check_pool, new_pool_image, open_for_writing, owner};
use tenmil_base::Random;
use tenmil_volume::format::{decode_superblock, features};
use tenmil_volume::{
    ClaimCondition, DeviceAction, InjectedBugs, PoolError, PoolOpening, PoolRequest, PoolResponse,
    VolumeOp,
};

const BLOCKS: u64 = 700;

fn create_volume_request(name: &str) -> PoolRequest {
    let (blocks, unit, uuid) = (64, 4, 1);
    PoolRequest::Change(VolumeOp::Create {
        name: name.into(),
        blocks,
        unit,
        uuid,
        checksums: false,
    })
}

/// An instance that opens the pool on this disk, which stays in place.
fn open_instance(
    image: &DiskImage,
    id: u64,
    claim: ClaimCondition,
    bugs: InjectedBugs,
) -> PoolFixture {
    let mut rig = PoolFixture::with_normal_trees(image.clone(), BLOCKS, Random::new(id)).unwrap();
    let mut opening = PoolOpening::new(BLOCKS, 1 << 20).for_writing(owner(id)).with_bugs(bugs);
    while let Some(at) = opening.next_read() {
        opening.handle_read(Ok(&rig.disk.read(at)));
    }
    rig.store = opening.finish().unwrap().store;
    rig.store.set_claim_condition(claim);
    rig
}

/// Exchanges the disks of two instances.
fn exchange_disks(one: &mut PoolFixture, other: &mut PoolFixture) {
    std::mem::swap(&mut one.disk, &mut other.disk);
}

fn is_rejected_by_owner(response: &Result<PoolResponse, PoolError>) -> bool {
    matches!(response, Err(PoolError::TakenOver { .. } | PoolError::Owned { .. }))
}

#[test]
fn owned_pool_is_opened_read_only() {
    let none = InjectedBugs::default();
    let mut first = open_instance(&new_pool_image(BLOCKS), 1, ClaimCondition::Free, none);
    first.run_request(create_volume_request("a")).unwrap();
    assert_eq!((first.store.owner(), first.store.claim_epoch()), (Some(owner(1)), 1));
    let image = first.disk.image().clone();
    let mut second = open_instance(&image, 2, ClaimCondition::Free, none);
    let refused = second.run_request(create_volume_request("b"));
    assert_eq!(refused, Err(PoolError::Owned { by: Box::new(owner(1)) }));
    assert!(refused.unwrap_err().to_string().contains("process 1 on host `host` since 1970-"));
    assert!(matches!(
        second.run_request(PoolRequest::Find("a".into())),
        Ok(PoolResponse::Volume(_))
    ));
    assert_eq!(second.disk.image(), &image, "nothing was written");
    let mut other = open_instance(&image, 2, ClaimCondition::Over(owner(3).id), none);
    assert!(
        is_rejected_by_owner(&other.run_request(create_volume_request("b"))),
        "it is not that one who is known to be gone"
    );

    first.run_request(PoolRequest::Release).unwrap();
    assert_eq!(first.store.owner(), None);
    assert_eq!(first.run_request(create_volume_request("c")), Err(PoolError::ReadOnlyAfterError));
    let mut third = open_instance(first.disk.image(), 3, ClaimCondition::Free, none);
    third.run_request(create_volume_request("b")).unwrap();
    assert_eq!(third.store.claim_epoch(), 2);
}

#[test]
fn former_owner_detects_the_takeover_before_writing() {
    let none = InjectedBugs::default();
    let mut first = open_instance(&new_pool_image(BLOCKS), 1, ClaimCondition::Free, none);
    let Ok(PoolResponse::Volume(info)) = first.run_request(create_volume_request("a")) else {
        panic!()
    };
    let mut second = open_instance(first.disk.image(), 2, ClaimCondition::Force, none);
    exchange_disks(&mut first, &mut second);
    // It writes to the disk as the other one has left it.
    second.disk = FakeDisk::new(first.disk.image().clone());
    let before = second.disk.writes;
    second.run_request(create_volume_request("b")).unwrap();
    assert!(second.disk.writes > before);
    first.disk = FakeDisk::new(second.disk.image().clone());
    let response = first.run_request(create_volume_request("c"));
    assert_eq!(response, Err(PoolError::TakenOver { by: Some(Box::new(owner(2))) }));
    assert_eq!(first.disk.writes, 0, "it has written nothing");
    for ask in [
        PoolRequest::Read { volume: info.id, block: 0, blocks: 1 },
        PoolRequest::Flush,
        PoolRequest::List,
        PoolRequest::Release,
        create_volume_request("d"),
    ] {
        let token = first.submit(ask.clone());
        first.run_until_idle();
        assert!(is_rejected_by_owner(&first.responses[&token]), "{ask:?}");
    }
    assert_eq!((first.disk.writes, first.store.is_taken_over()), (0, true));
}

/// A file system created on the device of an open pool overwrites the superblocks at the start.
#[test]
fn overwritten_pool_is_not_committed_to() {
    let none = InjectedBugs::default();
    for lost in [[true, false], [false, true], [true, true]] {
        let mut first = open_instance(&new_pool_image(BLOCKS), 1, ClaimCondition::Free, none);
        first.run_request(create_volume_request("a")).unwrap();
        for at in (0..).zip(lost).filter_map(|(at, is_lost)| is_lost.then_some(at)) {
            first.disk.replace_block(at, std::sync::Arc::new([0x5a; 4096]));
        }
        let before = first.disk.writes;
        let response = first.run_request(create_volume_request("b"));
        if lost == [true, true] {
            assert_eq!(response, Err(PoolError::TakenOver { by: None }));
            assert_eq!(first.disk.writes, before, "it has written nothing");
        } else {
            // One superblock may be torn or corrupt.
            assert!(response.is_ok(), "{lost:?}: {response:?}");
        }
    }
}

/// The second instance takes the pool over by force after some steps of the first, which then continues.
/// Returns whether the first had become idle before, or `None` if it was between its check and the end of
/// its commit, which a device without reservations cannot reject.
fn run_takeover_interleaved(
    seed: u64,
    steps: usize,
    bugs: InjectedBugs,
) -> Result<Option<bool>, String> {
    let mut random = Random::new(seed);
    let mut first = open_instance(&new_pool_image(BLOCKS), 1, ClaimCondition::Free, bugs);
    let Ok(PoolResponse::Volume(info)) = first.run_request(create_volume_request("a")) else {
        panic!()
    };
    first.submit_write(info.id, 0, 4, 5);
    first.run_until_idle();
    first.submit(create_volume_request("late"));
    let is_over = (0..steps).any(|_| !first.execute_random_action());
    first.start_pool_actions();
    let writes = |action: &DeviceAction| {
        matches!(
            action,
            DeviceAction::WritePages { .. }
                | DeviceAction::WriteData { .. }
                | DeviceAction::Flush { .. }
        )
    };
    if first.in_flight().iter().any(writes) {
        return Ok(None);
    }
    let mut second = open_instance(first.disk.image(), 2, ClaimCondition::Force, bugs);
    second.disk = std::mem::replace(&mut first.disk, FakeDisk::new(DiskImage::new()));
    if second.run_request(create_volume_request("b")).is_err() {
        return Err("the second was refused at once".into());
    }
    exchange_disks(&mut first, &mut second);
    first.run_until_idle();
    let refused = first.run_request(create_volume_request("later"));
    if !is_rejected_by_owner(&refused) {
        return Err(format!("the first was not refused: {refused:?}"));
    }
    exchange_disks(&mut first, &mut second);
    if second.run_request(create_volume_request("c")).is_err() {
        return Err("the second was refused".into());
    }
    let cut = if random.chance(1, 2) { PowerLoss::Nothing } else { PowerLoss::Random };
    let image = second.disk.image_after_power_loss(cut, &mut random);
    let opened = open_for_writing(&image, BLOCKS, owner(4)).map_err(|error| error.to_string())?;
    let report = check_pool(&opened.store, &image);
    if !report.findings.is_empty() {
        return Err(format!("{:?}", report.findings));
    }
    let mut last = PoolFixture::with_normal_trees(image, BLOCKS, Random::new(9)).unwrap();
    for name in ["a", "b", "c"] {
        if last.run_request(PoolRequest::Find(name.into())).is_err() {
            return Err(format!("`{name}` is gone"));
        }
    }
    Ok(Some(is_over))
}

#[test]
fn takeover_at_any_step_keeps_the_new_owners_changes() {
    let mut proved = 0;
    for seed in 0..8 {
        for steps in 0..40 {
            let found = run_takeover_interleaved(seed, steps, InjectedBugs::default());
            let found = found.unwrap_or_else(|error| panic!("seed {seed}, {steps} steps: {error}"));
            proved += u32::from(found.is_some());
            if found == Some(true) {
                break;
            }
        }
    }
    assert!(proved > 20, "only {proved}");
}

#[test]
fn missing_ownership_check_is_detected() {
    let bugs = InjectedBugs { ignore_fence: true };
    assert!((0..20).any(|steps| run_takeover_interleaved(7, steps, bugs).is_err()));
}

#[test]
fn commit_reads_the_superblocks_once() {
    let mut rig =
        open_instance(&new_pool_image(BLOCKS), 1, ClaimCondition::Free, InjectedBugs::default());
    let Ok(PoolResponse::Volume(info)) = rig.run_request(create_volume_request("a")) else {
        panic!()
    };
    for round in 0..5 {
        let (before, generation) = (rig.slot_reads, rig.store.generation());
        rig.submit_write(info.id, 4 * round, 4, 5);
        rig.run_until_idle();
        rig.run_request(PoolRequest::Flush).unwrap();
        assert_eq!(rig.store.generation(), generation + 1);
        assert_eq!(rig.slot_reads, before + 1, "round {round}");
    }
}

#[test]
fn claiming_an_unowned_pool_survives_power_loss_at_any_step() {
    let steps = |limit: usize| {
        // Created by a version without owners.
        let mut old =
            PoolFixture::with_normal_trees(new_pool_image(BLOCKS), BLOCKS, Random::new(3)).unwrap();
        let mut opening = PoolOpening::new(BLOCKS, 1 << 20);
        while let Some(at) = opening.next_read() {
            opening.handle_read(Ok(&old.disk.read(at)));
        }
        old.store = opening.finish().unwrap().store;
        old.run_request(create_volume_request("a")).unwrap();
        let image = old.disk.image_after_power_loss(PowerLoss::Nothing, &mut Random::new(1));
        let (_, _, superblock, _) = decode_superblock(&image[&1], 1).unwrap();
        assert_eq!((superblock.read_only_compatible, superblock.owner), (0, 0));
        let mut new = open_instance(&image, 1, ClaimCondition::Free, InjectedBugs::default());
        new.submit(PoolRequest::Claim);
        let is_over = (0..limit).any(|_| !new.execute_random_action());
        for seed in 0..20 {
            let cut = if seed == 0 { PowerLoss::Nothing } else { PowerLoss::Random };
            let image = new.disk.image_after_power_loss(cut, &mut Random::new(seed));
            let mut again =
                PoolFixture::with_normal_trees(image, BLOCKS, Random::new(seed)).unwrap();
            assert!(
                again.run_request(PoolRequest::Find("a".into())).is_ok(),
                "after {limit} steps, seed {seed}"
            );
            again.run_request(create_volume_request("b")).unwrap();
            assert_eq!(check_pool(&again.store, again.disk.image()).findings, []);
        }
        if is_over {
            let image = new.disk.image_after_power_loss(PowerLoss::Nothing, &mut Random::new(1));
            let found = [0, 1].map(|at| decode_superblock(&image[&at], at).unwrap().2);
            let is_owned = |one: &tenmil_volume::format::Superblock| {
                one.read_only_compatible & features::OWNED != 0 && one.epoch == 1
            };
            assert!(found.iter().any(is_owned), "an older program does not write to it");
        }
        is_over
    };
    assert!((0..40).any(steps), "the claim ends");
}
