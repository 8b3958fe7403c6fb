//! Fused compare and write.

use std::sync::Arc;

use tenmil_base::{Operation, RequestFlags, Span};
use tenmil_wire::{Command, Fuse, IoOpcode, Status};

use super::rig::{BLOCKS, COPIED, DATA, LATER, Rig, SHARED, Setup, io, make, namespace, ram};
use crate::fuzz::block_device::FakeDevice;
use crate::fuzz::host::{FakeHost, HostBehavior};
use crate::namespace::Namespaces;
use crate::queue::Queue;

const NEW: u64 = DATA + 0x4000;

fn pair(lba: u64, blocks: u32) -> [Command; 2] {
    [
        io(IoOpcode::Compare, lba, blocks).with_fuse(Fuse::First),
        io(IoOpcode::Write, lba, blocks).with_fuse(Fuse::Second).with_prp(NEW, NEW + 0x1000),
    ]
}

fn rig(behavior: HostBehavior, seed: u64) -> Rig {
    let ram = ram();
    let device = FakeDevice::new(&ram, BLOCKS);
    let device = if seed == 0 { device } else { device.later(seed) };
    Rig::new(&Setup { behavior, seed, ..Setup::default() }, &ram, device)
}

/// Runs the commands and returns their statuses in submission order.
fn statuses(rig: &mut Rig, commands: &[Command]) -> Vec<Status> {
    let cids: Vec<u16> = commands.iter().map(|command| rig.push(*command)).collect();
    rig.ring();
    let completions = rig.collect(commands.len());
    let status_of = |cid| completions.iter().find(|completion| completion.cid() == cid);
    cids.into_iter().map(|cid| status_of(cid).unwrap().status()).collect()
}

#[test]
fn the_write_happens_if_and_only_if_the_bytes_are_the_same() {
    for (behavior, seed) in [(SHARED, 0), (COPIED, 0), (SHARED, 1), (LATER, 2), (LATER, 3)] {
        let mut rig = rig(behavior, seed);
        let new = rig.scribble(NEW, 4096, 1);
        let good = statuses(&mut rig, &pair(8, 8));
        assert_eq!(good, [Status::SUCCESS; 2]);
        assert_eq!(rig.device.blocks().bytes[8 * 512..16 * 512], new);
        // The host still expects zeroes.
        rig.fill(NEW, &[9; 4096]);
        let bad = statuses(&mut rig, &pair(8, 8));
        assert!(bad[0].is(Status::COMPARE_FAILURE));
        assert_eq!(bad[1], Status::ABORTED_FAILED_FUSED);
        assert_eq!(rig.device.blocks().bytes[8 * 512..16 * 512], new);
        assert!(statuses(&mut rig, &[io(IoOpcode::Read, 0, 1)])[0].is_success());
    }
}

#[test]
fn a_half_without_its_other_half_is_aborted() {
    let [first, second] = pair(0, 1);
    let read = io(IoOpcode::Read, 0, 1);
    let missing = Status::ABORTED_MISSING_FUSED;
    let ok = Status::SUCCESS;
    for behavior in [SHARED, LATER] {
        let mut rig = rig(behavior, 5);
        assert_eq!(statuses(&mut rig, &[second]), [missing]);
        assert_eq!(statuses(&mut rig, &[first, read]), [missing, ok]);
        let [a, b, c] = statuses(&mut rig, &[first, first, second])[..] else { panic!() };
        assert_eq!([a, b, c], [missing, ok, ok]);
        assert_eq!(statuses(&mut rig, &[second, read]), [missing, ok]);
    }
}

#[test]
fn half_a_pair_is_at_rest_and_becomes_whole_after_a_hold() {
    let mut rig = rig(SHARED, 0);
    let [first, second] = pair(0, 1);
    rig.push(first);
    rig.ring();
    rig.poll();
    rig.queue.set_paused(true);
    assert!(rig.queue.is_at_rest() && !rig.queue.is_drained());
    rig.push(second);
    rig.ring();
    rig.poll();
    assert!(rig.queue.is_at_rest(), "nothing is taken");
    rig.queue.set_paused(false);
    rig.device.blocks().is_stuck = true;
    rig.poll();
    assert!(!rig.queue.is_at_rest(), "both are under way");
    rig.device.blocks().is_stuck = false;
    let completions = rig.collect(2);
    assert!(completions.iter().all(|completion| completion.status().is_success()));
}

#[test]
fn the_second_half_may_be_rung_for_later() {
    let mut rig = rig(SHARED, 0);
    let [first, second] = pair(0, 1);
    rig.push(first);
    rig.ring();
    for _ in 0..10 {
        rig.poll();
    }
    assert!(rig.peek().is_none());
    assert_eq!(statuses_of_two(&mut rig, second), [Status::SUCCESS; 2]);
}

fn statuses_of_two(rig: &mut Rig, second: Command) -> Vec<Status> {
    rig.push(second);
    rig.ring();
    rig.collect(2).iter().map(|completion| completion.status()).collect()
}

#[test]
fn halves_that_do_not_fit_are_refused_together() {
    let [first, second] = pair(4, 2);
    let field = Status::INVALID_FIELD.with_dnr();
    let failed = Status::ABORTED_FAILED_FUSED;
    let range = Status::LBA_OUT_OF_RANGE.with_dnr();
    let [far_first, far_second] = pair(BLOCKS, 1);
    let cases: [([Command; 2], [Status; 2]); 6] = [
        ([first, pair(5, 2)[1]], [field; 2]),
        ([first, pair(4, 1)[1]], [field; 2]),
        ([first, second.with_nsid(2)], [field; 2]),
        ([second.with_fuse(Fuse::First), second], [field; 2]),
        ([far_first, far_second], [range, failed]),
        ([first, second.with_cdw12(1 | 1 << 20)], [failed, field]),
    ];
    for (commands, expected) in cases {
        let mut rig = rig(SHARED, 0);
        assert_eq!(statuses(&mut rig, &commands), expected, "{commands:?}");
        assert!(rig.device.blocks().log.is_empty());
        assert_eq!(statuses(&mut rig, &pair(4, 2)), [Status::SUCCESS; 2], "and the next pair runs");
    }
}

#[test]
fn a_pair_runs_alone_among_all_queues_of_the_subsystem() {
    for seed in 1..30 {
        let ram = ram();
        let setup = Setup { seed, ..Setup::default() };
        let mut rig = Rig::new(&setup, &ram, FakeDevice::new(&ram, BLOCKS).later(seed));
        let mut other = make(&rig.host, &setup, (&rig.doorbells, &rig.shared), &rig.published, 2);
        other.add_submission_queue(2, 16, 0x3000).unwrap();
        // Both queues write blocks 0 to 7; the pair of the first expects the contents that it finds.
        for index in 0..6_usize {
            let write = io(IoOpcode::Write, 0, 8).with_prp(DATA + 0x8000, 0);
            let bytes = write.with_cid(u16::try_from(index).unwrap()).to_bytes();
            rig.fill(0x3000 + index as u64 * 64, &bytes);
        }
        rig.push(io(IoOpcode::Write, 0, 8));
        let [compare, write] = pair(0, 8);
        rig.push(compare);
        // Limited Retry marks this write among the others.
        rig.push(write.with_cdw12(7 | 1 << 31));
        rig.push(io(IoOpcode::Write, 0, 8));
        rig.ring();
        rig.doorbells.ring(4, 6);
        for _ in 0..400 {
            rig.poll();
            let now = rig.now;
            other.poll(now);
        }
        assert!(rig.queue.is_drained() && other.is_drained(), "seed {seed}");
        assert!(rig.events.is_empty(), "every byte is zero, so every comparison holds");
        let log = rig.device.blocks().log.clone();
        assert_eq!(log.len(), 10);
        let compare = log.iter().position(|request| request.operation == Operation::Compare);
        let next = log[compare.unwrap() + 1];
        assert!(next.flags.has(RequestFlags::LIMITED_RETRY), "seed {seed}: {next:?} came between");
        let statuses: Vec<Status> =
            core::iter::from_fn(|| rig.peek()).map(|completion| completion.status()).collect();
        assert_eq!(statuses.len(), 4);
    }
}

#[test]
fn two_queues_with_a_pair_each_take_turns() {
    let ram = ram();
    let setup = Setup::default();
    let mut rig = Rig::new(&setup, &ram, FakeDevice::new(&ram, BLOCKS).later(4));
    let mut other = make(&rig.host, &setup, (&rig.doorbells, &rig.shared), &rig.published, 2);
    other.add_submission_queue(2, 16, 0x3000).unwrap();
    for (index, command) in pair(0, 1).into_iter().enumerate() {
        rig.fill(0x3000 + index as u64 * 64, &command.to_bytes());
        rig.push(command);
    }
    rig.doorbells.ring(4, 2);
    rig.ring();
    for _ in 0..300 {
        rig.poll();
        let now = rig.now;
        other.poll(now);
    }
    assert!(rig.queue.is_drained() && other.is_drained());
    assert_eq!(rig.device.blocks().log.len(), 4, "two comparisons and two writes");
}

/// Another queue of the same subsystem, with its submission ring at 3000h, and 15 entries available.
fn another(rig: &Rig) -> Queue<FakeHost> {
    let mut other =
        make(&rig.host, &Setup::default(), (&rig.doorbells, &rig.shared), &rig.published, 2);
    other.add_submission_queue(2, 16, 0x3000).unwrap();
    other
}

/// Submits the first commands to the other queue.
fn give(rig: &mut Rig, commands: &[Command]) {
    for (at, command) in (0..).zip(commands) {
        let cid = u16::try_from(at).unwrap();
        rig.fill(0x3000 + at * 64, &command.with_cid(cid).to_bytes());
    }
    rig.doorbells.ring(4, u32::try_from(commands.len()).unwrap());
}

fn poll(rig: &mut Rig, other: &mut Queue<FakeHost>, times: usize) {
    for _ in 0..times {
        rig.poll();
        other.poll(rig.now);
    }
}

/// Completed commands of the other queue, in order.
fn ended(rig: &Rig) -> Vec<u16> {
    let entry = |index: u64| rig.bytes(0x9000 + index * 16, 16);
    let entries = (0..16).map(entry).take_while(|entry| entry[14] & 1 == 1);
    entries.map(|entry| u16::from_le_bytes([entry[12], entry[13]])).collect()
}

#[test]
fn a_pair_that_waits_stands_in_nobodys_way_in_other_namespaces() {
    let mut rig = rig(SHARED, 0);
    let calm = Arc::new(FakeDevice::new(&rig.ram, BLOCKS));
    let mut namespaces = Namespaces::new(4);
    namespaces.insert(Arc::new(namespace(1, &rig.device)));
    namespaces.insert(Arc::new(namespace(2, &calm)));
    rig.published.publish(Arc::new(namespaces));
    let mut other = another(&rig);
    let read = io(IoOpcode::Read, 0, 1);
    let there = read.with_nsid(2);
    // One command of the other queue is stuck in the block device, so the pair cannot become exclusive.
    rig.device.blocks().is_stuck = true;
    give(&mut rig, &[read]);
    poll(&mut rig, &mut other, 3);
    let pair = pair(0, 1);
    let cids = pair.map(|command| rig.push(command));
    rig.ring();
    poll(&mut rig, &mut other, 3);
    assert!(rig.queue.arm() && rig.queue.lacks_wakeup(), "no event would wake it");
    give(&mut rig, &[read, there, there, read, there]);
    poll(&mut rig, &mut other, 10);
    assert_eq!(ended(&rig), [1, 2], "all that come before one for the namespace that is taken");
    assert!(other.arm() && other.lacks_wakeup(), "no event would wake it");
    // The pair times out, and its host may retry.
    rig.now = rig.now.after(Span::from_secs(4));
    poll(&mut rig, &mut other, 10);
    assert!(rig.peek().is_none());
    rig.now = rig.now.after(Span::from_secs(1));
    poll(&mut rig, &mut other, 10);
    let ends = [(); 2].map(|()| rig.peek().unwrap());
    assert_eq!(ends.map(|end| end.cid()), cids);
    let given_up = [Status::COMMAND_INTERRUPTED, Status::ABORTED_FAILED_FUSED];
    assert_eq!(ends.map(|end| end.status()), given_up);
    assert_eq!(ended(&rig), [1, 2, 4], "the floor is everybody's again");
    rig.device.blocks().is_stuck = false;
    poll(&mut rig, &mut other, 10);
    assert_eq!(ended(&rig), [1, 2, 4, 0, 3]);
    // A stuck command elsewhere blocks no pair.
    calm.blocks().is_stuck = true;
    give(&mut rig, &[read, there, there, read, there, there]);
    rig.give_back();
    for command in pair {
        rig.push(command);
    }
    rig.ring();
    poll(&mut rig, &mut other, 10);
    let ends = [(); 2].map(|()| rig.peek().unwrap().status());
    assert_eq!((ends, ended(&rig).len()), ([Status::SUCCESS; 2], 5));
}

#[test]
fn whoever_sends_pairs_without_end_lets_others_get_on() {
    let mut rig = rig(SHARED, 0);
    let mut other = another(&rig);
    let write = io(IoOpcode::Write, 0, 1).with_prp(DATA + 0x8000, 0);
    give(&mut rig, &[write; 12]);
    let mut pairs = 0;
    for _ in 0..200 {
        if rig.queue.is_drained() {
            for command in pair(0, 1) {
                rig.push(command);
            }
            rig.ring();
            pairs += 1;
        }
        // The other queue is never polled between the end of a pair and the next one.
        rig.poll();
        poll(&mut rig, &mut other, 1);
        while rig.peek().is_some() {
            rig.give_back();
        }
    }
    assert_eq!(ended(&rig).len(), 12);
    assert!(pairs > 20, "{pairs} pairs");
}

/// A third queue delays a pair, and all commands of the other one wait for that pair.
#[test]
fn a_queue_that_waits_for_the_end_of_a_pair_or_owes_its_word_stays_awake() {
    let mut rig = rig(SHARED, 0);
    let mut other = another(&rig);
    let mut third =
        make(&rig.host, &Setup::default(), (&rig.doorbells, &rig.shared), &rig.published, 3);
    third.add_submission_queue(3, 16, 0x4000).unwrap();
    for command in pair(0, 1) {
        rig.push(command);
    }
    rig.ring();
    rig.poll();
    let read = io(IoOpcode::Read, 0, 1);
    give(&mut rig, &[read]);
    assert!(!other.executor.wants_iteration());
    other.poll(rig.now);
    assert_eq!(ended(&rig), [0], "what has come before it hears is taken");
    assert!(
        other.executor.wants_iteration() && other.arm() && other.lacks_wakeup(),
        "it has not said so"
    );
    other.poll(rig.now);
    assert!(!other.executor.wants_iteration() && !other.arm() && !other.lacks_wakeup());
    give(&mut rig, &[read, read]);
    other.poll(rig.now);
    assert_eq!(ended(&rig), [0]);
    assert!(other.arm() && other.lacks_wakeup(), "no event would wake it");
    other.set_paused(true);
    third.poll(rig.now);
    for _ in 0..5 {
        rig.poll();
    }
    assert!(rig.peek().is_some() && rig.peek().is_some(), "all are quiet");
    other.poll(rig.now);
    assert_eq!(ended(&rig), [0], "on hold");
    other.set_paused(false);
    other.poll(rig.now);
    assert_eq!(ended(&rig), [0, 1]);
}

/// A paused queue fetches nothing, whichever queue has exclusivity.
#[test]
fn a_queue_on_hold_hears_of_a_pair_and_takes_nothing() {
    let mut rig = rig(SHARED, 0);
    let mut other = another(&rig);
    other.set_paused(true);
    for command in pair(0, 1) {
        rig.push(command);
    }
    rig.ring();
    rig.poll();
    give(&mut rig, &[io(IoOpcode::Read, 0, 1)]);
    poll(&mut rig, &mut other, 3);
    assert!(rig.peek().is_some() && ended(&rig).is_empty());
    other.set_paused(false);
    poll(&mut rig, &mut other, 3);
    assert_eq!(ended(&rig), [0]);
}

#[test]
fn a_queue_that_is_stopped_is_waited_for_as_long_as_its_medium_works_for_it() {
    // One request, and a command that needs a context.
    for blocks in [1, 16] {
        waits_for_stopped(io(IoOpcode::Write, 0, blocks));
    }
}

fn waits_for_stopped(write: Command) {
    let mut rig = rig(SHARED, 0);
    let mut other = another(&rig);
    rig.device.blocks().is_stuck = true;
    give(&mut rig, &[write]);
    poll(&mut rig, &mut other, 3);
    other.stop(rig.now);
    for command in pair(0, 1) {
        rig.push(command);
    }
    rig.ring();
    poll(&mut rig, &mut other, 10);
    assert!(rig.queue.executor.waiting_pair().is_some(), "what was stopped may still be written");
    rig.device.blocks().is_stuck = false;
    poll(&mut rig, &mut other, 10);
    assert!(other.is_drained() && rig.queue.is_drained());
}
