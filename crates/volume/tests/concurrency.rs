//! Concurrency: transfers in flight while volumes change.

#![expect(clippy::unwrap_used, reason = "a test may")]

mod rig;

use rig::{Rig, check, new_store, open};
use tenmil_base::Random;
use tenmil_volume::{DeviceAction, PoolError, PoolRequest, PoolResponse, VolumeInfo, VolumeOp};

const BLOCKS: u64 = 2048;

fn rig() -> Rig {
    Rig::plain(new_store(BLOCKS), BLOCKS, Random::new(4)).unwrap()
}

fn change(rig: &mut Rig, change: VolumeOp) -> VolumeInfo {
    match rig.ask(PoolRequest::Change(change)).unwrap() {
        PoolResponse::Volume(info) => info,
        other => panic!("{other:?}"),
    }
}

fn create(rig: &mut Rig, name: &str, blocks: u64) -> VolumeInfo {
    change(rig, VolumeOp::Create { name: name.into(), blocks, unit: 16, uuid: 1, checksums: false })
}

fn write(rig: &mut Rig, volume: u64, block: u64, blocks: u64, value: u64) {
    let token = rig.submit_write(volume, block, blocks, value);
    rig.settle();
    assert_eq!(rig.responses.remove(&token), Some(Ok(PoolResponse::Done)));
}

fn snapshot(volume: &str, name: &str) -> PoolRequest {
    PoolRequest::Change(VolumeOp::Snapshot { volume: volume.into(), name: name.into(), uuid: 2 })
}

#[test]
fn a_snapshot_waits_for_writes_under_way_and_those_behind_it_wait_for_the_snapshot() {
    let mut rig = rig();
    let info = create(&mut rig, "v", 64);
    write(&mut rig, info.id, 0, 64, 1);
    rig.holds_data = true;
    let before = rig.submit_write(info.id, 3, 1, 2);
    rig.settle();
    let taken = rig.submit(snapshot("v", "s"));
    rig.settle();
    let behind = rig.submit_write(info.id, 3, 1, 3);
    rig.settle();
    assert!(rig.responses.is_empty(), "{:?}", rig.responses);
    assert_eq!(rig.under_way().len(), 1, "the first write alone is under way");
    rig.holds_data = false;
    rig.settle();
    for token in [before, taken, behind] {
        assert!(rig.responses.remove(&token).unwrap().is_ok());
    }
    let PoolResponse::Volume(kept) = rig.ask(PoolRequest::Find("s".into())).unwrap() else {
        panic!()
    };
    assert_eq!(rig.read(kept.id, 3, 1).unwrap(), [[2; 8]]);
    assert_eq!(rig.read(info.id, 3, 1).unwrap(), [[3; 8]]);
}

#[test]
fn blocks_that_a_read_may_still_touch_are_not_given_out() {
    let mut rig = rig();
    let (one, two) = (create(&mut rig, "one", 600), create(&mut rig, "two", 1500));
    write(&mut rig, one.id, 0, 600, 1);
    rig.ask(PoolRequest::Flush).unwrap();
    rig.holds_data = true;
    let token = rig.submit(PoolRequest::Read { volume: one.id, block: 0, blocks: 600 });
    rig.settle();
    rig.holds_data = false;
    let held: Vec<(u64, u64)> = rig.under_way().iter().filter_map(place).collect();
    assert!(!held.is_empty());
    rig.holds_data = true;
    rig.ask(PoolRequest::Trim { volume: one.id, block: 0, blocks: 600 }).unwrap();
    for _ in 0..4 {
        rig.ask(PoolRequest::Flush).unwrap();
    }
    for block in (0..1500).step_by(100) {
        rig.submit_write(two.id, block, 100, 9);
        rig.settle();
    }
    let written: Vec<(u64, u64)> = rig.under_way().iter().filter_map(place).collect();
    assert!(written.len() > held.len(), "some writes have found room elsewhere");
    for (at, blocks) in &written[held.len()..] {
        let meets = |(other, count): &(u64, u64)| *at < other + count && *other < at + blocks;
        assert!(!held.iter().any(meets), "{at} is still being read");
    }
    rig.holds_data = false;
    rig.settle();
    assert!(rig.responses.remove(&token).unwrap().is_ok());
    let data = rig.buffers.remove(&token).unwrap();
    assert!(data.iter().all(|block| rig::disk::values(block) == [1; 8]), "what was there");
    rig.ask(PoolRequest::Flush).unwrap();
    assert_eq!(check(&rig.store, rig.disk.image()).findings, []);
}

fn place(action: &DeviceAction) -> Option<(u64, u64)> {
    match action {
        DeviceAction::ReadData { at, blocks, .. } | DeviceAction::WriteData { at, blocks, .. } => {
            Some((*at, *blocks))
        }
        _ => None,
    }
}

/// A volume with two written clusters and a clone of it, both durable.
fn volume_and_clone(rig: &mut Rig) -> (VolumeInfo, VolumeInfo) {
    let one = create(rig, "one", 32);
    write(rig, one.id, 0, 32, 1);
    let clone = VolumeOp::Clone { from: "one".into(), name: "two".into(), uuid: 3 };
    let two = change(rig, clone);
    (one, two)
}

/// Contents of the volume `two` after a power loss now, with all completed writes on the device.
fn two_after_a_cut(rig: &mut Rig) -> Vec<[u64; 8]> {
    let image = rig.disk.cut(rig::disk::Cut::AsSeen, &mut Random::new(1));
    let mut again = Rig::plain(image, BLOCKS, Random::new(1)).unwrap();
    let PoolResponse::Volume(info) = again.ask(PoolRequest::Find("two".into())).unwrap() else {
        panic!()
    };
    again.read(info.id, 0, info.blocks).unwrap()
}

#[test]
fn what_a_clone_has_trimmed_is_not_written_over_until_that_is_durable() {
    let mut rig = rig();
    let (one, two) = volume_and_clone(&mut rig);
    rig.ask(PoolRequest::Trim { volume: two.id, block: 0, blocks: 32 }).unwrap();
    write(&mut rig, one.id, 0, 20, 2);
    assert_eq!(two_after_a_cut(&mut rig), [[1; 8]; 32], "the trim was never flushed");
}

#[test]
fn what_a_deleted_clone_held_is_not_written_over_until_that_is_durable() {
    let mut rig = rig();
    let (one, _) = volume_and_clone(&mut rig);
    rig.holds_flushes = true;
    let delete = VolumeOp::Delete { name: "two".into(), orphan: false };
    let token = rig.submit(PoolRequest::Change(delete));
    rig.settle();
    // The first of these makes the map's node exclusive to the volume; the second finds it exclusive.
    write(&mut rig, one.id, 3, 1, 2);
    write(&mut rig, one.id, 19, 1, 3);
    assert_eq!(two_after_a_cut(&mut rig), [[1; 8]; 32], "the deletion was never answered");
    assert!(!rig.responses.contains_key(&token));
}

#[test]
fn a_volume_that_is_cut_and_grown_again_at_once_has_zeroes_behind_the_cut() {
    let mut rig = rig();
    let info = create(&mut rig, "v", 64);
    write(&mut rig, info.id, 0, 64, 1);
    let resize = |blocks| PoolRequest::Change(VolumeOp::Resize { name: "v".into(), blocks });
    let read = PoolRequest::Read { volume: info.id, block: 0, blocks: 64 };
    let tokens = [rig.submit(resize(10)), rig.submit(resize(64)), rig.submit(read)];
    rig.settle();
    for token in tokens {
        assert!(rig.responses.remove(&token).unwrap().is_ok());
    }
    let found = rig.buffers.remove(&tokens[2]).unwrap();
    for (block, data) in found.iter().enumerate() {
        assert_eq!(rig::disk::values(data), [u64::from(block < 10); 8], "block {block}");
    }
    let PoolResponse::Volume(info) = rig.ask(PoolRequest::Find("v".into())).unwrap() else {
        panic!()
    };
    assert_eq!((info.blocks, info.mapped), (64, 10));
}

#[test]
fn a_flush_of_a_store_in_which_nothing_has_changed_still_reaches_the_device() {
    let mut rig = rig();
    let info = create(&mut rig, "v", 16);
    write(&mut rig, info.id, 0, 16, 1);
    rig.ask(PoolRequest::Flush).unwrap();
    let generation = rig.store.generation();
    write(&mut rig, info.id, 0, 16, 2);
    rig.ask(PoolRequest::Flush).unwrap();
    assert_eq!(rig.store.generation(), generation, "in place: no commit");
    let image = rig.disk.cut(rig::disk::Cut::Nothing, &mut Random::new(1));
    let mut again = Rig::new(image, BLOCKS, Random::new(1)).unwrap();
    assert_eq!(again.read(info.id, 0, 16).unwrap(), [[2; 8]; 16]);
}

/// Keeps everything in flight until the test resumes it.
fn hold(rig: &mut Rig) {
    rig.holds_data = true;
    rig.settle();
    rig.holds_data = false;
    let io = |action: &DeviceAction| match action {
        DeviceAction::ReadData { io, .. } | DeviceAction::WriteData { io, .. } => Some(*io),
        _ => None,
    };
    rig.held = rig.under_way().iter().filter_map(io).collect();
}

#[test]
fn what_a_killed_program_left_in_a_volatile_cache_is_not_built_upon() {
    let mut rig = rig();
    let (one, two) = volume_and_clone(&mut rig);
    rig.ask(PoolRequest::Trim { volume: two.id, block: 0, blocks: 32 }).unwrap();
    rig.submit(PoolRequest::Flush);
    while open(rig.disk.image(), BLOCKS).unwrap().store.generation() == rig.store.generation() {
        assert!(rig.step(), "the commit comes to its superblock");
    }
    let image = rig.disk.image().clone();
    let mut again = Rig::plain(image.clone(), BLOCKS, Random::new(1)).unwrap();
    again.disk = rig.disk.unflushed(image);
    write(&mut again, one.id, 0, 20, 2);
    for seed in 0..200 {
        let image = again.disk.cut(rig::disk::Cut::Random, &mut Random::new(seed));
        let mut last = Rig::plain(image, BLOCKS, Random::new(1)).unwrap();
        for found in last.read(two.id, 0, 32).unwrap() {
            assert!(found == [0; 8] || found == [1; 8], "{found:?} is the other volume's");
        }
    }
}

#[test]
fn pages_of_a_transaction_that_came_to_nothing_are_of_no_later_generation() {
    let mut rig = rig();
    create(&mut rig, "v", 64);
    let generation = rig.store.generation();
    let mut again = Rig::plain(rig.disk.image().clone(), BLOCKS, Random::new(1)).unwrap();
    assert_eq!(again.store.generation(), generation, "nothing is written before it must be");
    let read = again.ask(PoolRequest::List).unwrap();
    assert_eq!((again.store.generation(), again.disk.writes), (generation, 0), "{read:?}");
    create(&mut again, "w", 64);
    // One generation is skipped, and the pool is taken over from its owner: both slots name the new
    // owner.
    assert_eq!(again.store.generation(), generation + 3);
}

#[test]
fn a_unit_that_a_read_may_still_touch_is_not_written_over_by_who_has_it_now() {
    let mut rig = rig();
    let (one, two) = volume_and_clone(&mut rig);
    let token = rig.submit(PoolRequest::Read { volume: two.id, block: 0, blocks: 16 });
    hold(&mut rig);
    write(&mut rig, two.id, 0, 16, 5);
    rig.ask(PoolRequest::Flush).unwrap();
    rig.ask(PoolRequest::Flush).unwrap();
    write(&mut rig, one.id, 0, 16, 2);
    rig.held.clear();
    rig.settle();
    assert!(rig.responses.remove(&token).unwrap().is_ok());
    let data = rig.buffers.remove(&token).unwrap();
    assert!(data.iter().all(|block| rig::disk::values(block) == [1; 8]), "what the clone held");
    write(&mut rig, one.id, 0, 32, 3);
    let used = |rig: &mut Rig| match rig.ask(PoolRequest::Usage).unwrap() {
        PoolResponse::Usage(usage) => usage.used,
        other => panic!("{other:?}"),
    };
    rig.ask(PoolRequest::Flush).unwrap();
    let before = used(&mut rig);
    write(&mut rig, one.id, 0, 32, 4);
    rig.ask(PoolRequest::Flush).unwrap();
    assert_eq!(used(&mut rig), before, "once the read has ended, writes are in place again");
}

#[test]
fn a_change_that_waited_quiets_the_volume_that_has_the_name_now() {
    let mut rig = rig();
    let (a, c) = (create(&mut rig, "a", 16), create(&mut rig, "c", 16));
    write(&mut rig, a.id, 0, 16, 1);
    write(&mut rig, c.id, 0, 16, 3);
    rig.submit_write(a.id, 0, 16, 2);
    hold(&mut rig);
    let to_a = rig.held.clone();
    let taken = rig.submit(snapshot("a", "s"));
    rig.settle();
    for (name, to) in [("a", "b"), ("c", "a")] {
        change(&mut rig, VolumeOp::Rename { name: name.into(), to: to.into() });
    }
    rig.submit_write(c.id, 0, 16, 4);
    hold(&mut rig);
    rig.held.retain(|io| !to_a.contains(io));
    rig.settle();
    assert!(!rig.responses.contains_key(&taken), "a write to what is called `a` now is under way");
    rig.held.clear();
    rig.settle();
    let PoolResponse::Volume(kept) = rig.responses.remove(&taken).unwrap().unwrap() else {
        panic!()
    };
    assert_eq!(kept.origin, c.id);
    write(&mut rig, a.id, 0, 1, 7);
    assert_eq!(rig.read(kept.id, 0, 16).unwrap(), [[4; 8]; 16]);
}

#[test]
fn a_store_stops_when_a_flush_fails_though_nothing_of_its_own_was_changed() {
    let mut rig = rig();
    let info = create(&mut rig, "v", 16);
    write(&mut rig, info.id, 0, 16, 1);
    rig.ask(PoolRequest::Flush).unwrap();
    write(&mut rig, info.id, 0, 16, 2);
    rig.fails_flushes = true;
    assert!(matches!(rig.ask(PoolRequest::Flush), Err(PoolError::Device { .. })));
    assert_eq!(
        rig.ask(PoolRequest::Flush),
        Err(PoolError::ReadOnlyAfterError),
        "what was lost stays lost"
    );
    assert_eq!(
        rig.read(info.id, 0, 1),
        Err(PoolError::ReadInterrupted),
        "the device may have blocks from before, of any volume"
    );
}

#[test]
fn a_store_that_has_stopped_has_nothing_more_to_do() {
    let mut rig = rig();
    let info = create(&mut rig, "v", 64);
    rig.holds_flushes = true;
    let mut tokens = Vec::new();
    for block in [0, 32] {
        write(&mut rig, info.id, block, 16, 1);
        tokens.push(rig.submit(PoolRequest::Flush));
        rig.settle();
    }
    (rig.holds_flushes, rig.fails_flushes) = (false, true);
    rig.settle();
    for token in tokens {
        assert!(matches!(rig.responses.remove(&token), Some(Err(_))));
    }
    assert!(rig.store.is_idle());
}

#[test]
fn a_unit_to_which_a_write_has_failed_is_given_to_nobody() {
    let mut rig = rig();
    let info = create(&mut rig, "v", 64);
    write(&mut rig, info.id, 0, 16, 1);
    let free = |rig: &mut Rig| match rig.ask(PoolRequest::Usage).unwrap() {
        PoolResponse::Usage(usage) => usage.free,
        other => panic!("{other:?}"),
    };
    let before = free(&mut rig);
    rig.fails_writes = true;
    let token = rig.submit_write(info.id, 16, 16, 1);
    rig.settle();
    assert!(matches!(rig.responses.remove(&token), Some(Err(PoolError::Device { .. }))));
    assert_eq!(free(&mut rig), before - 16, "the write may still come to pass");
    write(&mut rig, info.id, 16, 16, 2);
    assert_eq!(rig.read(info.id, 16, 16).unwrap(), [[2; 8]; 16]);
}

#[test]
fn a_write_that_failed_beside_another_in_its_unit_and_comes_late_meets_nothing_newer() {
    for other_ends_first in [true, false] {
        let mut rig = rig();
        let info = create(&mut rig, "v", 64);
        let other = rig.submit_write(info.id, 0, 4, 1);
        hold(&mut rig);
        let others = rig.held.clone();
        let failing = rig.submit_write(info.id, 4, 4, 2);
        hold(&mut rig);
        if other_ends_first {
            rig.held.retain(|io| !others.contains(io));
            rig.settle();
            assert_eq!(rig.responses.remove(&other), Some(Ok(PoolResponse::Done)));
        }
        (rig.held, rig.fails_late) = (others, true);
        rig.settle();
        assert!(matches!(rig.responses.remove(&failing), Some(Err(PoolError::Device { .. }))));
        write(&mut rig, info.id, 4, 4, 3);
        write(&mut rig, info.id, 8, 2, 4);
        rig.land_late();
        rig.held.clear();
        rig.settle();
        let [old, new, last] = [(0, 4), (4, 4), (8, 2)]
            .map(|(block, blocks)| rig.read(info.id, block, blocks).unwrap());
        assert_eq!((old, new, last), (vec![[1; 8]; 4], vec![[3; 8]; 4], vec![[4; 8]; 2]));
        rig.ask(PoolRequest::Flush).unwrap();
        assert_eq!(check(&rig.store, rig.disk.image()).findings, []);
    }
}

#[test]
fn blocks_to_which_a_write_in_place_has_failed_are_given_to_nobody_else() {
    let mut rig = rig();
    let (one, two) = (create(&mut rig, "one", 600), create(&mut rig, "two", 1800));
    write(&mut rig, one.id, 0, 600, 1);
    rig.ask(PoolRequest::Flush).unwrap();
    rig.fails_late = true;
    let token = rig.submit_write(one.id, 0, 600, 2);
    rig.settle();
    assert!(matches!(rig.responses.remove(&token), Some(Err(PoolError::Device { .. }))));
    rig.ask(PoolRequest::Trim { volume: one.id, block: 0, blocks: 600 }).unwrap();
    for _ in 0..3 {
        rig.ask(PoolRequest::Flush).unwrap();
    }
    let fill = |rig: &mut Rig| -> Vec<u64> {
        (0..1800)
            .step_by(100)
            .filter(|block| {
                let token = rig.submit_write(two.id, *block, 100, 9);
                rig.settle();
                rig.responses.remove(&token).unwrap().is_ok()
            })
            .collect()
    };
    let written = fill(&mut rig);
    assert!(written.len() > 3 && written.len() < 18, "there is room for some: {written:?}");
    // Space freed behind them restarts the search.
    rig.ask(PoolRequest::Trim { volume: two.id, block: 0, blocks: 400 }).unwrap();
    for _ in 0..3 {
        rig.ask(PoolRequest::Flush).unwrap();
    }
    let written = fill(&mut rig);
    assert!(written.len() > 3 && written.len() < 18, "and for some again: {written:?}");
    rig.land_late();
    for block in written {
        assert_eq!(rig.read(two.id, block, 100).unwrap(), [[9; 8]; 100], "from {block} on");
    }
    rig.ask(PoolRequest::Flush).unwrap();
    assert_eq!(check(&rig.store, rig.disk.image()).findings, []);
    let mut again = Rig::plain(rig.disk.image().clone(), BLOCKS, Random::new(1)).unwrap();
    assert!(fill(&mut again).len() == 18, "once it is opened anew they are free");
}

#[test]
fn blocks_that_a_kept_run_still_reads_are_not_given_out() {
    let mut rig = rig();
    let (one, two) = (create(&mut rig, "one", 600), create(&mut rig, "two", 1500));
    write(&mut rig, one.id, 0, 600, 1);
    rig.ask(PoolRequest::Flush).unwrap();
    let run = rig.store.mapped_run(one.id, 300).unwrap();
    assert_eq!((run.block, run.blocks), (0, 600));
    assert_eq!(rig.store.next_remapped(), None);
    rig.store.note_oldest_read(rig.store.transaction());
    rig.ask(PoolRequest::Trim { volume: one.id, block: 0, blocks: 600 }).unwrap();
    assert_eq!(rig.store.next_remapped(), Some(one.id));
    assert_eq!((rig.store.next_remapped(), rig.store.mapped_run(one.id, 300)), (None, None));
    let fill = |rig: &mut Rig| {
        let writes: Vec<u64> =
            (0..1500).step_by(100).map(|block| rig.submit_write(two.id, block, 100, 9)).collect();
        rig.ask(PoolRequest::Flush).unwrap();
        writes.iter().filter(|token| rig.responses.remove(token).unwrap().is_err()).count()
    };
    assert!(fill(&mut rig) > 0, "the room of the trimmed blocks is missing");
    for at in run.at..run.at + run.blocks {
        assert_eq!(rig::disk::values(&rig.disk.read(at)), [1; 8], "block {at}");
    }
    rig.store.note_oldest_read(u64::MAX);
    assert_eq!(fill(&mut rig), 0, "and is there when the read has ended");
    assert_eq!(check(&rig.store, rig.disk.image()).findings, []);
}

#[test]
fn whatever_moves_or_takes_away_mapped_blocks_says_so_and_nothing_else_does() {
    let mut rig = rig();
    let v = create(&mut rig, "v", 256);
    let said = |rig: &mut Rig| std::iter::from_fn(|| rig.store.next_remapped()).collect::<Vec<_>>();
    write(&mut rig, v.id, 0, 64, 1);
    write(&mut rig, v.id, 8, 8, 2);
    write(&mut rig, v.id, 64, 64, 1);
    rig.ask(snapshot("v", "s")).unwrap();
    assert_eq!(said(&mut rig), [], "first writes, writes in place, a snapshot");
    write(&mut rig, v.id, 8, 1, 3);
    assert_eq!(said(&mut rig), [v.id], "a write after a snapshot");
    rig.ask(PoolRequest::Trim { volume: v.id, block: 200, blocks: 50 }).unwrap();
    assert_eq!(said(&mut rig), [], "nothing was mapped there");
    let steps = [
        VolumeOp::Resize { name: "v".into(), blocks: 100 },
        VolumeOp::Rollback { volume: "v".into(), snapshot: "s".into() },
        VolumeOp::Delete { name: "v".into(), orphan: true },
    ];
    for step in steps {
        rig.ask(PoolRequest::Change(step.clone())).unwrap();
        assert!(said(&mut rig).contains(&v.id), "{step:?}");
    }
}

#[test]
fn a_page_or_superblock_that_cannot_be_written_stops_the_store_and_loses_nothing_durable() {
    for failing in 0..20 {
        let mut rig = rig();
        let info = create(&mut rig, "v", 256);
        write(&mut rig, info.id, 0, 64, 1);
        rig.ask(PoolRequest::Flush).unwrap();
        rig.fails_pages = Some(failing);
        let writes: Vec<u64> =
            (0..8).map(|part| rig.submit_write(info.id, 64 + part * 16, 16, 2)).collect();
        let changes =
            [snapshot("v", "s"), PoolRequest::Flush, snapshot("v", "t"), PoolRequest::Flush];
        let responses: Vec<_> = changes.into_iter().map(|ask| rig.ask(ask)).collect();
        assert!(writes.iter().all(|token| rig.responses.contains_key(token)), "all are answered");
        if rig.fails_pages.is_some() {
            assert!(failing > 5 && responses.iter().all(Result::is_ok), "{failing}: {responses:?}");
            return;
        }
        let failed = responses.iter().position(Result::is_err).unwrap();
        assert!(matches!(responses[failed], Err(PoolError::Device { .. })), "{responses:?}");
        assert!(
            responses[failed + 1..].iter().all(|one| *one == Err(PoolError::ReadOnlyAfterError))
        );
        assert_eq!(rig.read(info.id, 63, 1).unwrap(), [[1; 8]], "it is still read from");
        assert!(rig.store.is_idle());
        let again = open(rig.disk.image(), BLOCKS).unwrap();
        assert_eq!(check(&again.store, rig.disk.image()).findings, [], "{failing}");
        let mut rig = Rig::plain(rig.disk.image().clone(), BLOCKS, Random::new(4)).unwrap();
        for (name, response) in [("s", &responses[0]), ("t", &responses[2])] {
            let found = rig.ask(PoolRequest::Find(name.into())).is_ok();
            assert!(found || response.is_err(), "{failing}: {name} was answered");
        }
        assert_eq!(rig.read(info.id, 0, 64).unwrap(), [[1; 8]; 64], "{failing}");
    }
    panic!("there is no end of pages");
}

#[test]
fn extents_are_told_by_the_map() {
    let mut rig = rig();
    let info = create(&mut rig, "v", 256);
    write(&mut rig, info.id, 10, 20, 1);
    for (block, blocks, is_mapped) in
        [(0, 10, false), (10, 20, true), (29, 1, true), (30, 226, false), (256, 0, false)]
    {
        let found = rig.ask(PoolRequest::Extent { volume: info.id, block });
        let Ok(PoolResponse::Extent { blocks: alike, at, .. }) = found else { panic!("{found:?}") };
        assert_eq!((alike, at.is_some()), (blocks, is_mapped), "{block}");
    }
}

#[test]
fn a_flush_writes_nothing_to_a_store_in_which_nothing_was_changed() {
    let mut rig = rig();
    create(&mut rig, "v", 64);
    let mut again = Rig::plain(rig.disk.image().clone(), BLOCKS, Random::new(4)).unwrap();
    again.holds_flushes = true;
    let token = again.submit(PoolRequest::Flush);
    again.settle();
    assert!(!again.responses.contains_key(&token), "the device is flushed all the same");
    again.holds_flushes = false;
    again.settle();
    assert_eq!(
        (again.responses.remove(&token), again.disk.writes),
        (Some(Ok(PoolResponse::Done)), 0)
    );
}
