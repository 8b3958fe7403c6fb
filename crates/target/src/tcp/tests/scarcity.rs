//! Little memory: the budget holds, and everybody gets on.

use base::Random;
use tcp::Data;
use wire::{IoOpcode, Status};

use super::rig::{Rig, limits, pattern, transfer};
use crate::tcp::Limits;

/// The block that is kept back and little more than three connections' own pages and rings for two
/// of them.
fn scarce() -> Limits {
    Limits { memory_bytes: 280 << 10, connections_max: 3, ..limits() }
}

/// Two connections that have many commands under way, in memory for a few.
fn crowd(rig: &mut Rig, seed: u64, rounds: usize) {
    let (_, cntlid) = rig.admin();
    let lines = [rig.io(cntlid, 1), rig.io(cntlid, 2)];
    let mut random = Random::new(seed);
    let mut draw = |bound: u64| usize::try_from(random.below(bound)).unwrap();
    for round in 0..rounds {
        let mut asked = Vec::new();
        for number in 0..60_u32 {
            let line = lines[draw(2)];
            let blocks = [1, 8, 16, 17, 64, 256][draw(6)];
            let len = u32::try_from(blocks * 512).unwrap();
            let lba = u64::try_from(draw(3800)).unwrap();
            let blocks = u32::try_from(blocks).unwrap();
            let tag = if draw(2) == 0 {
                let bytes = pattern(number, len as usize);
                let write = transfer(IoOpcode::Write.code(), lba, blocks);
                rig.lines[line].submit(&write, Data::FromHost(len), &bytes)
            } else {
                let read = transfer(IoOpcode::Read.code(), lba, blocks);
                rig.lines[line].submit(&read, Data::ToHost(len), &[])
            };
            asked.push((line, tag));
        }
        rig.run();
        for (line, tag) in asked {
            let ended = rig.lines[line].done.remove(&tag);
            let (completion, _) = ended.unwrap_or_else(|| panic!("round {round}: {line} {tag}"));
            assert_eq!(completion.status(), Status::SUCCESS);
        }
    }
}

#[test]
fn many_commands_end_in_memory_for_one_of_the_largest() {
    for seed in 0..4 {
        let limits = scarce();
        let mut rig = Rig::with(limits, |plan| plan);
        crowd(&mut rig, seed, 3);
        rig.lines.clear();
        rig.assert_empty();
    }
}

#[test]
fn streams_that_bring_little_and_take_little_change_nothing() {
    let mut rig = Rig::with(scarce(), |plan| plan);
    rig.narrow = Some(1500);
    crowd(&mut rig, 9, 2);
    rig.lines.clear();
    rig.assert_empty();
}

#[test]
fn too_little_memory_is_refused_and_says_how_much_is_needed() {
    let regions = dma::Regions::new(8);
    let limits = Limits { memory_bytes: 128 << 10, ..limits() };
    let refused = crate::tcp::Service::new(&regions, limits).unwrap_err();
    assert!(refused.contains("131072 bytes, expected 393216"), "{refused}");
}

#[test]
fn a_host_that_owes_data_for_too_long_is_sent_away_and_others_get_on() {
    let mut rig = Rig::with(scarce(), |plan| plan);
    let (_, cntlid) = rig.admin();
    let lines = [rig.io(cntlid, 1), rig.io(cntlid, 2)];
    let (bytes, len) = (pattern(1, 128 << 10), 128 << 10);
    let write = transfer(IoOpcode::Write.code(), 0, 256);
    rig.lines[lines[0]].submit(&write, Data::FromHost(len), &bytes);
    // It has asked, and does not answer when it is asked in turn.
    let capsule = rig.lines[lines[0]].sent.len() + 72;
    rig.lines[lines[0]].mute_after = Some(capsule);
    let other = rig.lines[lines[1]].submit(&write, Data::FromHost(len), &bytes);
    rig.run();
    assert!(!rig.lines[lines[1]].done.contains_key(&other), "there is memory for one");
    rig.pass(base::Span::from_secs(31));
    assert!(rig.lines[lines[1]].done.contains_key(&other), "it comes back");
    let gone = rig.news.iter().any(|news| news.to_string().contains("send what it was asked for"));
    assert!(gone, "{:?}", rig.news);
    rig.lines.clear();
    rig.assert_empty();
}

#[test]
fn a_full_house_is_refused_and_has_room_again_when_somebody_leaves() {
    let mut rig = Rig::with(scarce(), |plan| plan);
    let (admin, cntlid) = rig.admin();
    rig.io(cntlid, 1);
    rig.io(cntlid, 2);
    let (_, far) = super::rig::Pipe::pair(&rig.regions);
    let refused = rig.service.accept(Box::new(far), 1, rig.now).unwrap_err();
    assert!(refused.contains("3 are connected, expected fewer"), "{refused}");
    rig.lines[admin].pipe = None;
    rig.run();
    rig.admin();
}

#[test]
fn a_host_that_takes_nothing_is_sent_away_and_its_memory_comes_back() {
    let mut rig = Rig::new();
    let (_, cntlid) = rig.admin();
    let io = rig.io(cntlid, 1);
    rig.lines[io].is_deaf = true;
    for _ in 0..60 {
        let read = transfer(IoOpcode::Read.code(), 0, 64);
        rig.lines[io].submit(&read, Data::ToHost(64 * 512), &[]);
    }
    rig.run();
    assert!(rig.service.budget().free_bytes() < rig.service.budget().bytes() - (512 << 10));
    rig.pass(base::Span::from_secs(31));
    let gone = rig.news.iter().any(|news| news.to_string().contains("take what it asked for"));
    assert!(gone, "{:?}", rig.news);
    rig.lines.clear();
    rig.assert_empty();
}
