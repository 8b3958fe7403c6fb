//! Two instances open one pool: its owner writes to it, the other one is rejected or finds out, and a
//! pool that is taken over keeps the state that the new owner has written.

#![expect(clippy::unwrap_used, reason = "a test may")]

mod rig;

use rig::disk::{Cut, Disk, Image};
use rig::{Rig, check, new_store, open_as, owner};
use tenmil_base::Random;
use tenmil_volume::format::{decode_superblock, features};
use tenmil_volume::{
    Claim, DeviceAction, InjectedBugs, Opening, PoolError, PoolRequest, PoolResponse, VolumeOp,
};

const BLOCKS: u64 = 700;

fn create(name: &str) -> PoolRequest {
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
fn opener(image: &Image, id: u64, claim: Claim, bugs: InjectedBugs) -> Rig {
    let mut rig = Rig::plain(image.clone(), BLOCKS, Random::new(id)).unwrap();
    let mut opening = Opening::new(BLOCKS, 1 << 20).to_write(owner(id)).with_bugs(bugs);
    while let Some(at) = opening.next_read() {
        opening.handle_read(Ok(&rig.disk.read(at)));
    }
    rig.store = opening.finish().unwrap().store;
    rig.store.claim_as(claim);
    rig
}

/// Exchanges the disks of two instances.
fn swap(one: &mut Rig, other: &mut Rig) {
    std::mem::swap(&mut one.disk, &mut other.disk);
}

fn fenced(response: &Result<PoolResponse, PoolError>) -> bool {
    matches!(response, Err(PoolError::TakenOver { .. } | PoolError::Owned { .. }))
}

#[test]
fn a_pool_that_somebody_has_is_read_and_not_written_to() {
    let none = InjectedBugs::default();
    let mut first = opener(&new_store(BLOCKS), 1, Claim::Free, none);
    first.ask(create("a")).unwrap();
    assert_eq!((first.store.owner(), first.store.epoch()), (Some(owner(1)), 1));
    let image = first.disk.image().clone();
    let mut second = opener(&image, 2, Claim::Free, none);
    let refused = second.ask(create("b"));
    assert_eq!(refused, Err(PoolError::Owned { by: Box::new(owner(1)) }));
    assert!(refused.unwrap_err().to_string().contains("process 1 on host `host` since 1970-"));
    assert!(matches!(second.ask(PoolRequest::Find("a".into())), Ok(PoolResponse::Volume(_))));
    assert_eq!(second.disk.image(), &image, "nothing was written");
    let mut other = opener(&image, 2, Claim::Over(owner(3).id), none);
    assert!(fenced(&other.ask(create("b"))), "it is not that one who is known to be gone");

    first.ask(PoolRequest::Release).unwrap();
    assert_eq!(first.store.owner(), None);
    assert_eq!(first.ask(create("c")), Err(PoolError::ReadOnlyAfterError));
    let mut third = opener(first.disk.image(), 3, Claim::Free, none);
    third.ask(create("b")).unwrap();
    assert_eq!(third.store.epoch(), 2);
}

#[test]
fn a_former_owner_finds_out_before_it_writes_and_refuses_everything() {
    let none = InjectedBugs::default();
    let mut first = opener(&new_store(BLOCKS), 1, Claim::Free, none);
    let Ok(PoolResponse::Volume(info)) = first.ask(create("a")) else { panic!() };
    let mut second = opener(first.disk.image(), 2, Claim::Force, none);
    swap(&mut first, &mut second);
    // It writes to the disk as the other one has left it.
    second.disk = Disk::new(first.disk.image().clone());
    let before = second.disk.writes;
    second.ask(create("b")).unwrap();
    assert!(second.disk.writes > before);
    first.disk = Disk::new(second.disk.image().clone());
    let response = first.ask(create("c"));
    assert_eq!(response, Err(PoolError::TakenOver { by: Some(Box::new(owner(2))) }));
    assert_eq!(first.disk.writes, 0, "it has written nothing");
    for ask in [
        PoolRequest::Read { volume: info.id, block: 0, blocks: 1 },
        PoolRequest::Flush,
        PoolRequest::List,
        PoolRequest::Release,
        create("d"),
    ] {
        let token = first.submit(ask.clone());
        first.settle();
        assert!(fenced(&first.responses[&token]), "{ask:?}");
    }
    assert_eq!((first.disk.writes, first.store.is_taken_over()), (0, true));
}

/// A file system created on the device of an open pool overwrites the superblocks at the start.
#[test]
fn a_pool_that_something_else_was_written_over_is_not_committed_to() {
    let none = InjectedBugs::default();
    for lost in [[true, false], [false, true], [true, true]] {
        let mut first = opener(&new_store(BLOCKS), 1, Claim::Free, none);
        first.ask(create("a")).unwrap();
        for at in (0..).zip(lost).filter_map(|(at, is_lost)| is_lost.then_some(at)) {
            first.disk.put(at, std::sync::Arc::new([0x5a; 4096]));
        }
        let before = first.disk.writes;
        let response = first.ask(create("b"));
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
fn interleaved(seed: u64, steps: usize, bugs: InjectedBugs) -> Result<Option<bool>, String> {
    let mut random = Random::new(seed);
    let mut first = opener(&new_store(BLOCKS), 1, Claim::Free, bugs);
    let Ok(PoolResponse::Volume(info)) = first.ask(create("a")) else { panic!() };
    first.submit_write(info.id, 0, 4, 5);
    first.settle();
    first.submit(create("late"));
    let is_over = (0..steps).any(|_| !first.step());
    first.begin();
    let writes = |action: &DeviceAction| {
        matches!(
            action,
            DeviceAction::WritePages { .. }
                | DeviceAction::WriteData { .. }
                | DeviceAction::Flush { .. }
        )
    };
    if first.under_way().iter().any(writes) {
        return Ok(None);
    }
    let mut second = opener(first.disk.image(), 2, Claim::Force, bugs);
    second.disk = std::mem::replace(&mut first.disk, Disk::new(Image::new()));
    if second.ask(create("b")).is_err() {
        return Err("the second was refused at once".into());
    }
    swap(&mut first, &mut second);
    first.settle();
    let refused = first.ask(create("later"));
    if !fenced(&refused) {
        return Err(format!("the first was not refused: {refused:?}"));
    }
    swap(&mut first, &mut second);
    if second.ask(create("c")).is_err() {
        return Err("the second was refused".into());
    }
    let cut = if random.chance(1, 2) { Cut::Nothing } else { Cut::Random };
    let image = second.disk.cut(cut, &mut random);
    let opened = open_as(&image, BLOCKS, owner(4)).map_err(|error| error.to_string())?;
    let report = check(&opened.store, &image);
    if !report.findings.is_empty() {
        return Err(format!("{:?}", report.findings));
    }
    let mut last = Rig::plain(image, BLOCKS, Random::new(9)).unwrap();
    for name in ["a", "b", "c"] {
        if last.ask(PoolRequest::Find(name.into())).is_err() {
            return Err(format!("`{name}` is gone"));
        }
    }
    Ok(Some(is_over))
}

#[test]
fn whatever_the_former_owner_was_about_to_do_the_new_one_keeps_what_it_made() {
    let mut proved = 0;
    for seed in 0..8 {
        for steps in 0..40 {
            let found = interleaved(seed, steps, InjectedBugs::default());
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
fn a_fence_that_nobody_looks_at_is_found_missing() {
    let bugs = InjectedBugs { ignore_fence: true };
    assert!((0..20).any(|steps| interleaved(7, steps, bugs).is_err()));
}

#[test]
fn a_commit_costs_one_look_at_the_superblocks() {
    let mut rig = opener(&new_store(BLOCKS), 1, Claim::Free, InjectedBugs::default());
    let Ok(PoolResponse::Volume(info)) = rig.ask(create("a")) else { panic!() };
    for round in 0..5 {
        let (before, generation) = (rig.slot_reads, rig.store.generation());
        rig.submit_write(info.id, 4 * round, 4, 5);
        rig.settle();
        rig.ask(PoolRequest::Flush).unwrap();
        assert_eq!(rig.store.generation(), generation + 1);
        assert_eq!(rig.slot_reads, before + 1, "round {round}");
    }
}

#[test]
fn a_pool_that_has_no_owner_yet_is_claimed_without_a_loss_at_any_step() {
    let steps = |limit: usize| {
        // Created by a version without owners.
        let mut old = Rig::plain(new_store(BLOCKS), BLOCKS, Random::new(3)).unwrap();
        let mut opening = Opening::new(BLOCKS, 1 << 20);
        while let Some(at) = opening.next_read() {
            opening.handle_read(Ok(&old.disk.read(at)));
        }
        old.store = opening.finish().unwrap().store;
        old.ask(create("a")).unwrap();
        let image = old.disk.cut(Cut::Nothing, &mut Random::new(1));
        let (_, _, superblock, _) = decode_superblock(&image[&1], 1).unwrap();
        assert_eq!((superblock.read_only_compatible, superblock.owner), (0, 0));
        let mut new = opener(&image, 1, Claim::Free, InjectedBugs::default());
        new.submit(PoolRequest::Claim);
        let is_over = (0..limit).any(|_| !new.step());
        for seed in 0..20 {
            let cut = if seed == 0 { Cut::Nothing } else { Cut::Random };
            let image = new.disk.cut(cut, &mut Random::new(seed));
            let mut again = Rig::plain(image, BLOCKS, Random::new(seed)).unwrap();
            assert!(
                again.ask(PoolRequest::Find("a".into())).is_ok(),
                "after {limit} steps, seed {seed}"
            );
            again.ask(create("b")).unwrap();
            assert_eq!(check(&again.store, again.disk.image()).findings, []);
        }
        if is_over {
            let image = new.disk.cut(Cut::Nothing, &mut Random::new(1));
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
