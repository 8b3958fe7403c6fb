//! Fused compare and write.

use std::sync::Arc;

use tenmil_base::{Operation, RequestFlags, Span};
use tenmil_wire::{Command, Fuse, IoOpcode, Status};

use super::fixture::{
    BLOCKS, COPIED, DATA, FixtureConfig, LATER, QueueFixture, SHARED, create_queue,
    fixture_namespace, fixture_ram, io_command,
};
use crate::fuzz::block_device::FakeDevice;
use crate::fuzz::fake_host::{FakeHost, HostBehavior};
use crate::namespace::NamespaceSnapshot;
use crate::queue::Queue;

const NEW: u64 = DATA + 0x4000;

fn fused_pair(lba: u64, blocks: u32) -> [Command; 2] {
    [
        io_command(IoOpcode::Compare, lba, blocks).with_fuse(Fuse::First),
        io_command(IoOpcode::Write, lba, blocks)
            .with_fuse(Fuse::Second)
            .with_prp(NEW, NEW + 0x1000),
    ]
}

fn fixture_with_host_behavior(behavior: HostBehavior, seed: u64) -> QueueFixture {
    let ram = fixture_ram();
    let device = FakeDevice::new(&ram, BLOCKS);
    let device = if seed == 0 { device } else { device.with_random_delays(seed) };
    QueueFixture::new(&FixtureConfig { behavior, seed, ..FixtureConfig::default() }, &ram, device)
}

/// Runs the commands and returns their statuses in submission order.
fn run_for_statuses(rig: &mut QueueFixture, commands: &[Command]) -> Vec<Status> {
    let cids: Vec<u16> = commands.iter().map(|command| rig.push_command(*command)).collect();
    rig.ring_submission_doorbell();
    let completions = rig.collect_completions(commands.len());
    let status_of = |cid| completions.iter().find(|completion| completion.cid() == cid);
    cids.into_iter().map(|cid| status_of(cid).unwrap().status()).collect()
}

#[test]
fn fused_write_happens_only_if_the_compare_succeeds() {
    for (behavior, seed) in [(SHARED, 0), (COPIED, 0), (SHARED, 1), (LATER, 2), (LATER, 3)] {
        let mut rig = fixture_with_host_behavior(behavior, seed);
        let new = rig.fill_with_random_bytes(NEW, 4096, 1);
        let good = run_for_statuses(&mut rig, &fused_pair(8, 8));
        assert_eq!(good, [Status::SUCCESS; 2]);
        assert_eq!(rig.device.contents().bytes[8 * 512..16 * 512], new);
        // The host still expects zeroes.
        rig.write_host_memory(NEW, &[9; 4096]);
        let bad = run_for_statuses(&mut rig, &fused_pair(8, 8));
        assert!(bad[0].has_same_code_as(Status::COMPARE_FAILURE));
        assert_eq!(bad[1], Status::ABORTED_FAILED_FUSED);
        assert_eq!(rig.device.contents().bytes[8 * 512..16 * 512], new);
        assert!(run_for_statuses(&mut rig, &[io_command(IoOpcode::Read, 0, 1)])[0].is_success());
    }
}

#[test]
fn fused_half_without_its_counterpart_is_aborted() {
    let [first, second] = fused_pair(0, 1);
    let read = io_command(IoOpcode::Read, 0, 1);
    let missing = Status::ABORTED_MISSING_FUSED;
    let ok = Status::SUCCESS;
    for behavior in [SHARED, LATER] {
        let mut rig = fixture_with_host_behavior(behavior, 5);
        assert_eq!(run_for_statuses(&mut rig, &[second]), [missing]);
        assert_eq!(run_for_statuses(&mut rig, &[first, read]), [missing, ok]);
        let [a, b, c] = run_for_statuses(&mut rig, &[first, first, second])[..] else { panic!() };
        assert_eq!([a, b, c], [missing, ok, ok]);
        assert_eq!(run_for_statuses(&mut rig, &[second, read]), [missing, ok]);
    }
}

#[test]
fn first_fused_half_is_idle_and_is_paired_after_exclusivity_ends() {
    let mut rig = fixture_with_host_behavior(SHARED, 0);
    let [first, second] = fused_pair(0, 1);
    rig.push_command(first);
    rig.ring_submission_doorbell();
    rig.poll();
    rig.queue.set_paused(true);
    assert!(rig.queue.is_idle_except_fused_halves() && !rig.queue.is_drained());
    rig.push_command(second);
    rig.ring_submission_doorbell();
    rig.poll();
    assert!(rig.queue.is_idle_except_fused_halves(), "nothing is taken");
    rig.queue.set_paused(false);
    rig.device.contents().is_stuck = true;
    rig.poll();
    assert!(!rig.queue.is_idle_except_fused_halves(), "both are under way");
    rig.device.contents().is_stuck = false;
    let completions = rig.collect_completions(2);
    assert!(completions.iter().all(|completion| completion.status().is_success()));
}

#[test]
fn second_fused_half_may_be_submitted_later() {
    let mut rig = fixture_with_host_behavior(SHARED, 0);
    let [first, second] = fused_pair(0, 1);
    rig.push_command(first);
    rig.ring_submission_doorbell();
    for _ in 0..10 {
        rig.poll();
    }
    assert!(rig.peek_completion().is_none());
    assert_eq!(submit_second_for_statuses(&mut rig, second), [Status::SUCCESS; 2]);
}

fn submit_second_for_statuses(rig: &mut QueueFixture, second: Command) -> Vec<Status> {
    rig.push_command(second);
    rig.ring_submission_doorbell();
    rig.collect_completions(2).iter().map(|completion| completion.status()).collect()
}

#[test]
fn mismatched_fused_halves_are_rejected_together() {
    let [first, second] = fused_pair(4, 2);
    let field = Status::INVALID_FIELD.with_dnr();
    let failed = Status::ABORTED_FAILED_FUSED;
    let range = Status::LBA_OUT_OF_RANGE.with_dnr();
    let [far_first, far_second] = fused_pair(BLOCKS, 1);
    let cases: [([Command; 2], [Status; 2]); 6] = [
        ([first, fused_pair(5, 2)[1]], [field; 2]),
        ([first, fused_pair(4, 1)[1]], [field; 2]),
        ([first, second.with_nsid(2)], [field; 2]),
        ([second.with_fuse(Fuse::First), second], [field; 2]),
        ([far_first, far_second], [range, failed]),
        ([first, second.with_cdw12(1 | 1 << 20)], [failed, field]),
    ];
    for (commands, expected) in cases {
        let mut rig = fixture_with_host_behavior(SHARED, 0);
        assert_eq!(run_for_statuses(&mut rig, &commands), expected, "{commands:?}");
        assert!(rig.device.contents().log.is_empty());
        assert_eq!(
            run_for_statuses(&mut rig, &fused_pair(4, 2)),
            [Status::SUCCESS; 2],
            "and the next pair runs"
        );
    }
}

#[test]
fn fused_pair_is_exclusive_in_the_subsystem() {
    for seed in 1..30 {
        let ram = fixture_ram();
        let setup = FixtureConfig { seed, ..FixtureConfig::default() };
        let mut rig =
            QueueFixture::new(&setup, &ram, FakeDevice::new(&ram, BLOCKS).with_random_delays(seed));
        let mut other =
            create_queue(&rig.host, &setup, (&rig.doorbells, &rig.shared), &rig.published, 2);
        other.add_submission_queue(2, 16, 0x3000).unwrap();
        // Both queues write blocks 0 to 7; the pair of the first expects the contents that it finds.
        for index in 0..6_usize {
            let write = io_command(IoOpcode::Write, 0, 8).with_prp(DATA + 0x8000, 0);
            let bytes = write.with_cid(u16::try_from(index).unwrap()).to_bytes();
            rig.write_host_memory(0x3000 + index as u64 * 64, &bytes);
        }
        rig.push_command(io_command(IoOpcode::Write, 0, 8));
        let [compare, write] = fused_pair(0, 8);
        rig.push_command(compare);
        // Limited Retry marks this write among the others.
        rig.push_command(write.with_cdw12(7 | 1 << 31));
        rig.push_command(io_command(IoOpcode::Write, 0, 8));
        rig.ring_submission_doorbell();
        rig.doorbells.write_doorbell(4, 6);
        for _ in 0..400 {
            rig.poll();
            let now = rig.now;
            other.poll(now);
        }
        assert!(rig.queue.is_drained() && other.is_drained(), "seed {seed}");
        assert!(rig.events.is_empty(), "every byte is zero, so every comparison holds");
        let log = rig.device.contents().log.clone();
        assert_eq!(log.len(), 10);
        let compare = log.iter().position(|request| request.operation == Operation::Compare);
        let next = log[compare.unwrap() + 1];
        assert!(next.flags.has(RequestFlags::LIMITED_RETRY), "seed {seed}: {next:?} came between");
        let statuses: Vec<Status> = core::iter::from_fn(|| rig.peek_completion())
            .map(|completion| completion.status())
            .collect();
        assert_eq!(statuses.len(), 4);
    }
}

#[test]
fn fused_pairs_of_two_queues_alternate() {
    let ram = fixture_ram();
    let setup = FixtureConfig::default();
    let mut rig =
        QueueFixture::new(&setup, &ram, FakeDevice::new(&ram, BLOCKS).with_random_delays(4));
    let mut other =
        create_queue(&rig.host, &setup, (&rig.doorbells, &rig.shared), &rig.published, 2);
    other.add_submission_queue(2, 16, 0x3000).unwrap();
    for (index, command) in fused_pair(0, 1).into_iter().enumerate() {
        rig.write_host_memory(0x3000 + index as u64 * 64, &command.to_bytes());
        rig.push_command(command);
    }
    rig.doorbells.write_doorbell(4, 2);
    rig.ring_submission_doorbell();
    for _ in 0..300 {
        rig.poll();
        let now = rig.now;
        other.poll(now);
    }
    assert!(rig.queue.is_drained() && other.is_drained());
    assert_eq!(rig.device.contents().log.len(), 4, "two comparisons and two writes");
}

/// Another queue of the same subsystem, with its submission ring at 3000h, and 15 entries available.
fn second_queue(rig: &QueueFixture) -> Queue<FakeHost> {
    let mut other = create_queue(
        &rig.host,
        &FixtureConfig::default(),
        (&rig.doorbells, &rig.shared),
        &rig.published,
        2,
    );
    other.add_submission_queue(2, 16, 0x3000).unwrap();
    other
}

/// Submits the first commands to the other queue.
fn submit_to_second_queue(rig: &mut QueueFixture, commands: &[Command]) {
    for (at, command) in (0..).zip(commands) {
        let cid = u16::try_from(at).unwrap();
        rig.write_host_memory(0x3000 + at * 64, &command.with_cid(cid).to_bytes());
    }
    rig.doorbells.write_doorbell(4, u32::try_from(commands.len()).unwrap());
}

fn poll_both_queues(rig: &mut QueueFixture, other: &mut Queue<FakeHost>, times: usize) {
    for _ in 0..times {
        rig.poll();
        other.poll(rig.now);
    }
}

/// Completed commands of the other queue, in order.
fn second_queue_completions(rig: &QueueFixture) -> Vec<u16> {
    let entry = |index: u64| rig.read_host_memory(0x9000 + index * 16, 16);
    let entries = (0..16).map(entry).take_while(|entry| entry[14] & 1 == 1);
    entries.map(|entry| u16::from_le_bytes([entry[12], entry[13]])).collect()
}

#[test]
fn waiting_fused_pair_does_not_block_other_namespaces() {
    let mut rig = fixture_with_host_behavior(SHARED, 0);
    let calm = Arc::new(FakeDevice::new(&rig.ram, BLOCKS));
    let mut namespaces = NamespaceSnapshot::new(4);
    namespaces.insert(Arc::new(fixture_namespace(1, &rig.device)));
    namespaces.insert(Arc::new(fixture_namespace(2, &calm)));
    rig.published.publish(Arc::new(namespaces));
    let mut other = second_queue(&rig);
    let read = io_command(IoOpcode::Read, 0, 1);
    let there = read.with_nsid(2);
    // One command of the other queue is stuck in the block device, so the pair cannot become exclusive.
    rig.device.contents().is_stuck = true;
    submit_to_second_queue(&mut rig, &[read]);
    poll_both_queues(&mut rig, &mut other, 3);
    let pair = fused_pair(0, 1);
    let cids = pair.map(|command| rig.push_command(command));
    rig.ring_submission_doorbell();
    poll_both_queues(&mut rig, &mut other, 3);
    assert!(
        rig.queue.arm_wakeup() && rig.queue.has_pending_without_wakeup(),
        "no event would wake it"
    );
    submit_to_second_queue(&mut rig, &[read, there, there, read, there]);
    poll_both_queues(&mut rig, &mut other, 10);
    assert_eq!(
        second_queue_completions(&rig),
        [1, 2],
        "all that come before one for the namespace that is taken"
    );
    assert!(other.arm_wakeup() && other.has_pending_without_wakeup(), "no event would wake it");
    // The pair times out, and its host may retry.
    rig.now = rig.now.after(Span::from_secs(4));
    poll_both_queues(&mut rig, &mut other, 10);
    assert!(rig.peek_completion().is_none());
    rig.now = rig.now.after(Span::from_secs(1));
    poll_both_queues(&mut rig, &mut other, 10);
    let ends = [(); 2].map(|()| rig.peek_completion().unwrap());
    assert_eq!(ends.map(|end| end.cid()), cids);
    let given_up = [Status::COMMAND_INTERRUPTED, Status::ABORTED_FAILED_FUSED];
    assert_eq!(ends.map(|end| end.status()), given_up);
    assert_eq!(second_queue_completions(&rig), [1, 2, 4], "the floor is everybody's again");
    rig.device.contents().is_stuck = false;
    poll_both_queues(&mut rig, &mut other, 10);
    assert_eq!(second_queue_completions(&rig), [1, 2, 4, 0, 3]);
    // A stuck command elsewhere blocks no pair.
    calm.contents().is_stuck = true;
    submit_to_second_queue(&mut rig, &[read, there, there, read, there, there]);
    rig.ring_completion_doorbell();
    for command in pair {
        rig.push_command(command);
    }
    rig.ring_submission_doorbell();
    poll_both_queues(&mut rig, &mut other, 10);
    let ends = [(); 2].map(|()| rig.peek_completion().unwrap().status());
    assert_eq!((ends, second_queue_completions(&rig).len()), ([Status::SUCCESS; 2], 5));
}

#[test]
fn continuous_fused_pairs_do_not_starve_other_queues() {
    let mut rig = fixture_with_host_behavior(SHARED, 0);
    let mut other = second_queue(&rig);
    let write = io_command(IoOpcode::Write, 0, 1).with_prp(DATA + 0x8000, 0);
    submit_to_second_queue(&mut rig, &[write; 12]);
    let mut pairs = 0;
    for _ in 0..200 {
        if rig.queue.is_drained() {
            for command in fused_pair(0, 1) {
                rig.push_command(command);
            }
            rig.ring_submission_doorbell();
            pairs += 1;
        }
        // The other queue is never polled between the end of a pair and the next one.
        rig.poll();
        poll_both_queues(&mut rig, &mut other, 1);
        while rig.peek_completion().is_some() {
            rig.ring_completion_doorbell();
        }
    }
    assert_eq!(second_queue_completions(&rig).len(), 12);
    assert!(pairs > 20, "{pairs} pairs");
}

/// A third queue delays a pair, and all commands of the other one wait for that pair.
#[test]
fn queue_stays_awake_while_it_waits_for_or_must_acknowledge_exclusivity() {
    let mut rig = fixture_with_host_behavior(SHARED, 0);
    let mut other = second_queue(&rig);
    let mut third = create_queue(
        &rig.host,
        &FixtureConfig::default(),
        (&rig.doorbells, &rig.shared),
        &rig.published,
        3,
    );
    third.add_submission_queue(3, 16, 0x4000).unwrap();
    for command in fused_pair(0, 1) {
        rig.push_command(command);
    }
    rig.ring_submission_doorbell();
    rig.poll();
    let read = io_command(IoOpcode::Read, 0, 1);
    submit_to_second_queue(&mut rig, &[read]);
    assert!(!other.executor.wants_iteration());
    other.poll(rig.now);
    assert_eq!(second_queue_completions(&rig), [0], "what has come before it hears is taken");
    assert!(
        other.executor.wants_iteration()
            && other.arm_wakeup()
            && other.has_pending_without_wakeup(),
        "it has not said so"
    );
    other.poll(rig.now);
    assert!(
        !other.executor.wants_iteration()
            && !other.arm_wakeup()
            && !other.has_pending_without_wakeup()
    );
    submit_to_second_queue(&mut rig, &[read, read]);
    other.poll(rig.now);
    assert_eq!(second_queue_completions(&rig), [0]);
    assert!(other.arm_wakeup() && other.has_pending_without_wakeup(), "no event would wake it");
    other.set_paused(true);
    third.poll(rig.now);
    for _ in 0..5 {
        rig.poll();
    }
    assert!(rig.peek_completion().is_some() && rig.peek_completion().is_some(), "all are quiet");
    other.poll(rig.now);
    assert_eq!(second_queue_completions(&rig), [0], "on hold");
    other.set_paused(false);
    other.poll(rig.now);
    assert_eq!(second_queue_completions(&rig), [0, 1]);
}

/// A paused queue fetches nothing, whichever queue has exclusivity.
#[test]
fn paused_queue_acknowledges_exclusivity_and_fetches_nothing() {
    let mut rig = fixture_with_host_behavior(SHARED, 0);
    let mut other = second_queue(&rig);
    other.set_paused(true);
    for command in fused_pair(0, 1) {
        rig.push_command(command);
    }
    rig.ring_submission_doorbell();
    rig.poll();
    submit_to_second_queue(&mut rig, &[io_command(IoOpcode::Read, 0, 1)]);
    poll_both_queues(&mut rig, &mut other, 3);
    assert!(rig.peek_completion().is_some() && second_queue_completions(&rig).is_empty());
    other.set_paused(false);
    poll_both_queues(&mut rig, &mut other, 3);
    assert_eq!(second_queue_completions(&rig), [0]);
}

#[test]
fn stopped_queue_is_awaited_until_its_device_requests_complete() {
    // One request, and a command that needs a context.
    for blocks in [1, 16] {
        check_exclusivity_waits_for_stopped_queue(io_command(IoOpcode::Write, 0, blocks));
    }
}

fn check_exclusivity_waits_for_stopped_queue(write: Command) {
    let mut rig = fixture_with_host_behavior(SHARED, 0);
    let mut other = second_queue(&rig);
    rig.device.contents().is_stuck = true;
    submit_to_second_queue(&mut rig, &[write]);
    poll_both_queues(&mut rig, &mut other, 3);
    other.stop(rig.now);
    for command in fused_pair(0, 1) {
        rig.push_command(command);
    }
    rig.ring_submission_doorbell();
    poll_both_queues(&mut rig, &mut other, 10);
    assert!(
        rig.queue.executor.waiting_pair_context().is_some(),
        "what was stopped may still be written"
    );
    rig.device.contents().is_stuck = false;
    poll_both_queues(&mut rig, &mut other, 10);
    assert!(other.is_drained() && rig.queue.is_drained());
}
