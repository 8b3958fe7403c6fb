//! Guarantees of channels, over a device that completes late and out of order.

mod fences;
pub(crate) mod late_device;
mod losses;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tenmil_base::{
    BlockDevice, CompletionBatch, Instant, IoChannel, IoCompletion, IoStatus, Operation, Random,
    Request, RequestFlags, Span, WakeSource,
};
use tenmil_linux::Clock;
use tenmil_linux::poll_set::{Interest, PollSet};

use self::late_device::{BLOCKS, LateDevice, LateLog, expected_result, request};
use crate::{
    Bdev, BdevDescriptor, BdevOptions, ChannelMode, Claim, IoStats, PER_CHANNEL, QueueMap,
};

/// A device over a [`Late`] medium, and the log of the medium.
pub(crate) fn bdev_over_late_device(
    depth: u32,
    change: impl FnOnce(&mut BdevOptions),
) -> (Bdev, Arc<LateLog>) {
    let medium = LateDevice::with_depth(depth);
    let log = Arc::clone(&medium.log);
    let mut options = BdevOptions::new(Clock::on_kernel_clock(), 1);
    change(&mut options);
    (Bdev::new("late0", Arc::new(medium), options).unwrap(), log)
}

fn bdev_with_map(depth: u32, map: QueueMap, channels_max: u32) -> (Bdev, Arc<LateLog>) {
    bdev_over_late_device(depth, |options| {
        (options.map, options.channels_max) = (map, channels_max)
    })
}

fn open(device: &Bdev) -> BdevDescriptor {
    device.open(Claim::Exclusive, "test").unwrap()
}

/// A channel and its requests in flight.
struct TestClient {
    channel: Box<dyn IoChannel>,
    waiting: BTreeMap<u64, Request>,
    completed: u64,
}

impl TestClient {
    fn open(descriptor: &BdevDescriptor) -> Self {
        let channel = descriptor.channel().unwrap();
        Self { channel, waiting: BTreeMap::new(), completed: 0 }
    }

    fn submit(&mut self, now: Instant, requests: &[Request]) -> usize {
        let taken = self.channel.submit(now, requests, &[]);
        self.waiting.extend(requests[..taken].iter().map(|request| (request.token, *request)));
        taken
    }

    /// Polls, and checks every completion against its request.
    fn poll(&mut self, now: Instant, room: usize) -> Vec<IoCompletion> {
        let mut completions = CompletionBatch::with_capacity(room);
        self.channel.flush_submissions();
        assert_eq!(self.channel.poll(now, &mut completions), completions.as_slice().len());
        let completions: Vec<IoCompletion> = completions.drain().collect();
        for completion in &completions {
            let request = self.waiting.remove(&completion.token);
            let request =
                request.expect("an answer is to a request of this channel, and the only one");
            let is_good = request.lba % 10 != 9;
            assert_eq!(completion.status.is_success(), is_good);
            assert_eq!(completion.result, expected_result(&request));
            self.completed += 1;
        }
        completions
    }
}

#[test]
fn every_request_completes_once_on_its_own_channel() {
    let maps = [
        (QueueMap::with_default_contexts(PER_CHANNEL), ChannelMode::Mq),
        (QueueMap::with_default_contexts(1), ChannelMode::Mq),
        (QueueMap::with_default_contexts(2), ChannelMode::Mq),
        (QueueMap { default: 2, read: 1, poll: 3 }, ChannelMode::Mq),
        (QueueMap { default: 1, read: 5, poll: 1 }, ChannelMode::Mq),
        (QueueMap::with_default_contexts(1), ChannelMode::SingleQueue),
    ];
    for (seed, (map, mode)) in (0..60).zip(maps.iter().cycle()) {
        let mut random = Random::new(seed);
        let depth = u32::try_from(random.below(9) + 1).unwrap();
        let (device, log) = bdev_over_late_device(depth, |options| {
            (options.map, options.mode, options.channels_max) = (*map, *mode, 5);
        });
        let descriptor = open(&device);
        let mut users: Vec<TestClient> = (0..5).map(|_| TestClient::open(&descriptor)).collect();
        let mut token = 0;
        for turn in 0..400 {
            let now = Instant { ns: turn * 1_000 };
            let index = usize::try_from(random.below(5)).unwrap();
            if random.chance(1, 60) {
                // A channel is dropped with its requests in flight, and another one replaces it.
                users.remove(index);
                users.insert(index, TestClient::open(&descriptor));
            }
            let user = &mut users[index];
            let requests: Vec<Request> = (0..random.below(6))
                .map(|_| {
                    token += 1;
                    let operation = Operation::ALL[usize::try_from(random.below(2)).unwrap()];
                    let flags =
                        if random.chance(1, 4) { RequestFlags::POLLED } else { RequestFlags::NONE };
                    Request { flags, ..request(operation, token, random.below(BLOCKS)) }
                })
                .collect();
            user.submit(now, &requests);
            assert!(user.waiting.len() <= depth as usize);
            user.poll(now, usize::try_from(random.below(5)).unwrap());
            assert!(log.in_flight.lock().unwrap().iter().all(|(_, sent)| sent.flags.0 == 0));
        }
        for turn in 400..4_000 {
            users.iter_mut().for_each(|user| drop(user.poll(Instant { ns: turn * 1_000 }, 3)));
        }
        assert!(users.iter().all(|user| user.waiting.is_empty()), "seed {seed}: all is answered");
        assert!(users.iter().map(|user| user.completed).sum::<u64>() > 20);
        drop((users, descriptor));
        assert_eq!(log.open.load(Ordering::SeqCst), 0, "seed {seed}");
    }
}

#[test]
fn channels_share_a_single_tag_fairly() {
    let (device, _) = bdev_with_map(1, QueueMap::with_default_contexts(1), 3);
    let descriptor = open(&device);
    let mut users: Vec<TestClient> = (0..3).map(|_| TestClient::open(&descriptor)).collect();
    for turn in 0..600 {
        let now = Instant { ns: turn };
        // Each channel always has more requests than the depth, and the first one submits most often.
        for index in [0, 0, 1, 0, 0, 2] {
            let wanted = [request(Operation::Write, turn * 10, 1), request(Operation::Read, 5, 2)];
            if users[index].waiting.is_empty() {
                users[index].submit(now, &wanted[..1]);
            }
            users[index].poll(now, 4);
        }
    }
    let completed: Vec<u64> = users.iter().map(|user| user.completed).collect();
    // Channels that submit once a round are served at least every other time.
    assert!(completed.iter().all(|completed| *completed > 300), "{completed:?}");
}

#[test]
fn closed_waiting_channel_does_not_block_others() {
    let (device, _) = bdev_with_map(1, QueueMap::with_default_contexts(1), 2);
    let descriptor = open(&device);
    let (mut stays, mut goes) = (TestClient::open(&descriptor), TestClient::open(&descriptor));
    let start = Instant::default();
    assert_eq!(stays.submit(start, &[request(Operation::Read, 1, 1)]), 1);
    assert_eq!(goes.submit(start, &[request(Operation::Read, 2, 2)]), 0);
    while stays.poll(start, 1).is_empty() {}
    assert_eq!(stays.submit(start, &[request(Operation::Read, 3, 3)]), 0, "the other was first");
    let later = start.after(Span::from_ms(100));
    assert_eq!(stays.submit(later, &[request(Operation::Read, 3, 3)]), 1);
    while stays.poll(later, 1).is_empty() {}
    assert_eq!(goes.submit(later, &[request(Operation::Read, 4, 4)]), 1);
}

/// Whether a thread that sleeps on this channel would wake.
pub(crate) fn would_wake(channel: &dyn IoChannel) -> bool {
    let WakeSource::Descriptor(descriptor) = channel.wake_source() else { return false };
    let watch = PollSet::new().unwrap();
    watch.add(descriptor, 0, Interest { readable: true, writable: false }).unwrap();
    let mut found = Vec::new();
    watch.wait(Some(Span::default()), &mut found).unwrap();
    !found.is_empty()
}

#[test]
fn completion_polled_by_another_channel_wakes_its_sleeping_owner() {
    let (device, log) = bdev_with_map(8, QueueMap::with_default_contexts(1), 2);
    let descriptor = open(&device);
    let (mut sleeps, mut polls) = (TestClient::open(&descriptor), TestClient::open(&descriptor));
    let now = Instant::default();
    for token in 0..20 {
        log.is_stuck.store(true, Ordering::SeqCst);
        assert_eq!(sleeps.submit(now, &[request(Operation::Read, token, 1)]), 1);
        assert!(!sleeps.channel.arm() && !would_wake(&*sleeps.channel));
        log.is_stuck.store(false, Ordering::SeqCst);
        while !log.in_flight.lock().unwrap().is_empty() {
            assert!(polls.poll(now, 4).is_empty(), "it is not his");
        }
        assert!(would_wake(&*sleeps.channel));
        sleeps.channel.disarm();
        assert_eq!(sleeps.poll(now, 4).len(), 1);
    }
}

#[test]
fn channel_sleeping_for_a_free_tag_is_woken() {
    let (device, log) = bdev_with_map(1, QueueMap::with_default_contexts(1), 2);
    let descriptor = open(&device);
    let (mut has, mut wants) = (TestClient::open(&descriptor), TestClient::open(&descriptor));
    let now = Instant::default();
    log.is_stuck.store(true, Ordering::SeqCst);
    assert_eq!(has.submit(now, &[request(Operation::Read, 1, 1)]), 1);
    assert_eq!(wants.submit(now, &[request(Operation::Read, 2, 2)]), 0);
    assert!(!wants.channel.arm() && !would_wake(&*wants.channel));
    log.is_stuck.store(false, Ordering::SeqCst);
    while has.poll(now, 1).is_empty() {}
    assert!(would_wake(&*wants.channel));
    wants.channel.disarm();
    assert_eq!(wants.submit(now, &[request(Operation::Read, 2, 2)]), 1);
}

#[test]
fn channel_queued_behind_an_inactive_one_is_woken() {
    let (device, log) = bdev_with_map(1, QueueMap::with_default_contexts(1), 3);
    let descriptor = open(&device);
    let mut users = [
        TestClient::open(&descriptor),
        TestClient::open(&descriptor),
        TestClient::open(&descriptor),
    ];
    let [has, goes, sleeps] = &mut users;
    let now = Instant::default();
    log.is_stuck.store(true, Ordering::SeqCst);
    assert_eq!(has.submit(now, &[request(Operation::Read, 1, 1)]), 1);
    assert_eq!(goes.submit(now, &[request(Operation::Read, 2, 2)]), 0);
    assert_eq!(sleeps.submit(now, &[request(Operation::Read, 3, 3)]), 0);
    assert!(!sleeps.channel.arm());
    log.is_stuck.store(false, Ordering::SeqCst);
    while has.poll(now, 1).is_empty() {}
    assert!(!would_wake(&*sleeps.channel), "the room is for another");
    let later = now.after(Span::from_ms(100));
    assert_eq!(has.submit(later, &[request(Operation::Read, 4, 4)]), 0);
    assert!(would_wake(&*sleeps.channel), "now it is for this one");
    sleeps.channel.disarm();
    assert_eq!(sleeps.submit(later, &[request(Operation::Read, 3, 3)]), 1);
}

#[test]
fn requests_use_the_context_of_their_type() {
    let (device, log) = bdev_with_map(8, QueueMap { default: 1, read: 1, poll: 1 }, 1);
    let descriptor = open(&device);
    let mut user = TestClient::open(&descriptor);
    let polled = Request {
        flags: RequestFlags::POLLED.union(RequestFlags::FUA),
        ..request(Operation::Write, 3, 3)
    };
    let requests = [
        request(Operation::Write, 0, 0),
        request(Operation::Read, 1, 1),
        request(Operation::Verify, 2, 2),
        polled,
        request(Operation::Read, 4, 4),
    ];
    assert_eq!(user.submit(Instant::default(), &requests), 5);
    let mut sent: Vec<(u64, u32, RequestFlags)> = log
        .in_flight
        .lock()
        .unwrap()
        .iter()
        .map(|(context, request)| (request.lba, *context, request.flags))
        .collect();
    sent.sort_by_key(|(lba, ..)| *lba);
    let none = RequestFlags::NONE;
    assert_eq!(
        sent,
        [(0, 0, none), (1, 1, none), (2, 0, none), (3, 2, RequestFlags::FUA), (4, 1, none)]
    );
    assert!(user.channel.arm(), "what is polled for keeps its thread awake");
}

#[test]
fn read_only_claim_rejects_writes() {
    for mode in [ChannelMode::Mq, ChannelMode::SingleQueue, ChannelMode::Bypass] {
        let (device, log) = bdev_over_late_device(8, |options| options.mode = mode);
        let reader = device.open(Claim::ReadShared, "reader").unwrap();
        let mut channel = reader.channel().unwrap();
        for operation in Operation::ALL {
            let may = reader.limits().operations.has(operation);
            let reads = matches!(
                operation,
                Operation::Read | Operation::Flush | Operation::Compare | Operation::Verify
            );
            assert_eq!(may, reads, "{operation:?}");
            let taken = channel.submit(Instant::default(), &[request(operation, 5, 1)], &[]);
            assert_eq!(taken, 1);
            let mut completions = CompletionBatch::with_capacity(1);
            while channel.poll(Instant::default(), &mut completions) == 0 {}
            let expected = if reads { IoStatus::SUCCESS } else { IoStatus::WRITE_PROTECTED };
            assert_eq!(completions.as_slice()[0].status, expected, "{operation:?}");
            assert_eq!(completions.as_slice()[0].token, 5);
        }
        assert!(log.in_flight.lock().unwrap().is_empty());
    }
}

#[test]
fn out_of_range_and_unsupported_requests_are_not_submitted() {
    let (device, log) = bdev_over_late_device(8, |_| {});
    let descriptor = open(&device);
    log.is_stuck.store(true, Ordering::SeqCst);
    let mut channel = descriptor.channel().unwrap();
    let copy = Request { operand: BLOCKS, ..request(Operation::Copy, 4, 0) };
    let bad = [
        request(Operation::Read, 1, BLOCKS),
        request(Operation::Write, 2, u64::MAX),
        Request { blocks: 2, ..request(Operation::Read, 3, BLOCKS - 1) },
        copy,
    ];
    let good = request(Operation::Read, 5, BLOCKS - 1);
    let flush = Request { lba: u64::MAX, ..request(Operation::Flush, 6, 0) };
    let all: Vec<Request> = bad.iter().copied().chain([good, flush]).collect();
    assert_eq!(channel.submit(Instant::default(), &all, &[]), all.len());
    assert_eq!(channel.wake_at(), Instant::default(), "answers lie ready");
    let mut completions = CompletionBatch::with_capacity(8);
    assert_eq!(channel.poll(Instant::default(), &mut completions), bad.len());
    for (completion, request) in completions.drain().zip(&bad) {
        assert_eq!(
            (completion.token, completion.status),
            (request.token, IoStatus::LBA_OUT_OF_RANGE)
        );
    }
    assert_eq!(log.in_flight.lock().unwrap().len(), 2);
    device.set_resized_block_count(BLOCKS - 1);
    let taken = channel.submit(Instant::default(), &[Request { token: 7, ..good }], &[]);
    assert_eq!((taken, channel.limits().block_count), (1, BLOCKS - 1));
    assert_eq!(channel.poll(Instant::default(), &mut completions), 1);
    assert_eq!(completions.as_slice()[0].status, IoStatus::LBA_OUT_OF_RANGE);
}

#[test]
fn mixed_batch_is_submitted_together_in_order() {
    let (device, log) = bdev_with_map(32, QueueMap::with_default_contexts(PER_CHANNEL), 1);
    let mut user = TestClient::open(&open(&device));
    let operations = [Operation::Write, Operation::Flush, Operation::Deallocate, Operation::Copy];
    let mut requests: Vec<Request> =
        (0..).zip(operations).map(|(token, of)| request(of, token, token)).collect();
    // Past the end: completed here, without delaying others.
    requests.push(request(Operation::WriteZeroes, 4, BLOCKS));
    requests.extend((5..7).map(|token| request(Operation::Verify, token, token)));
    assert_eq!(user.channel.submit(Instant::default(), &requests, &[]), 7);
    assert_eq!(*log.batches.lock().unwrap(), [4, 2]);
    let sent = log.in_flight.lock().unwrap().iter().map(|(_, sent)| sent.lba).collect::<Vec<_>>();
    assert_eq!(sent, [0, 1, 2, 3, 5, 6]);
}

#[test]
fn requests_behind_a_quiesced_one_wait() {
    let (device, log) = bdev_with_map(32, QueueMap::with_default_contexts(PER_CHANNEL), 1);
    let mut user = TestClient::open(&open(&device));
    let hold = device.begin_quiesce(10..11, None);
    let requests = [1, 2, 10, 3].map(|lba| request(Operation::Deallocate, lba, lba));
    assert_eq!(user.submit(Instant::default(), &requests), 2);
    assert_eq!(*log.batches.lock().unwrap(), [2], "and the two before it went together");
    drop(hold);
    assert_eq!(user.submit(Instant::default(), &requests[2..]), 2);
}

#[test]
fn single_request_is_handled_like_a_batch() {
    let (device, log) = bdev_with_map(2, QueueMap { default: 1, read: 1, poll: 1 }, 1);
    let mut user = TestClient::open(&open(&device));
    let now = Instant { ns: 5 };
    let polled = Request { flags: RequestFlags::POLLED, ..request(Operation::Read, 1, 1) };
    assert_eq!(user.submit(now, &[polled]), 1);
    assert_eq!(user.submit(now, &[request(Operation::Write, 2, 9)]), 1);
    assert_eq!(user.submit(now, &[request(Operation::Read, 3, 3)]), 0, "there is no tag left");
    let contexts: Vec<u32> = log.in_flight.lock().unwrap().iter().map(|(of, _)| *of).collect();
    assert_eq!(contexts, [2, 0], "that of what is polled for, and the default one");
    while !user.waiting.is_empty() {
        user.poll(Instant { ns: 105 }, 1);
    }
    let hold = device.begin_quiesce(7..8, None);
    assert_eq!(user.submit(now, &[request(Operation::Read, 4, 7)]), 0);
    drop(hold);
    let past_the_end = request(Operation::Read, 5, BLOCKS);
    assert_eq!(user.channel.submit(now, &[past_the_end], &[]), 1);
    let mut completions = CompletionBatch::with_capacity(4);
    assert_eq!(user.channel.poll(now, &mut completions), 1);
    assert_eq!(completions.as_slice()[0].status, IoStatus::LBA_OUT_OF_RANGE);
    let counted = device.statistics();
    let reads = counted.operation_stats(Operation::Read);
    assert_eq!((reads.count, reads.bytes, reads.errors), (1, 512, 1));
    assert_eq!(reads.latency.max(), 100);
    assert_eq!(
        counted.operation_stats(Operation::Write).errors,
        1,
        "its medium refuses every tenth block"
    );
}

#[test]
fn statistics_include_closed_channels() {
    for (map, channels_max) in
        [(QueueMap::with_default_contexts(PER_CHANNEL), 4), (QueueMap::with_default_contexts(1), 4)]
    {
        let (device, _) = bdev_with_map(64, map, channels_max);
        let descriptor = open(&device);
        let mut random = Random::new(7);
        let mut expected: BTreeMap<Operation, (u64, u64, u64)> = BTreeMap::new();
        for round in 0..12 {
            let mut users: Vec<TestClient> =
                (0..4).map(|_| TestClient::open(&descriptor)).collect();
            for turn in 0..40 {
                let now = Instant { ns: 1 + turn * 1_000 };
                let user = &mut users[usize::try_from(random.below(4)).unwrap()];
                let requests: Vec<Request> = (0..random.below(9))
                    .map(|index| {
                        let operation = Operation::ALL[usize::try_from(random.below(4)).unwrap()];
                        let plain =
                            request(operation, turn * 100 + index, random.below(BLOCKS - 8));
                        let blocks = if plain.blocks > 0 {
                            1 + u32::try_from(random.below(7)).unwrap()
                        } else {
                            0
                        };
                        Request { blocks, ..plain }
                    })
                    .collect();
                let taken = user.submit(now, &requests);
                for request in &requests[..taken] {
                    let of = expected.entry(request.operation).or_default();
                    let is_good = request.lba % 10 != 9;
                    of.0 += u64::from(is_good);
                    of.1 += if is_good { u64::from(request.blocks) * 512 } else { 0 };
                    of.2 += u64::from(!is_good);
                }
                user.poll(now.after(Span { ns: 500 }), 16);
            }
            while users.iter().any(|user| !user.waiting.is_empty()) {
                users.iter_mut().for_each(|user| drop(user.poll(Instant { ns: 50_000 }, 16)));
            }
            let counted = device.statistics();
            assert_operation_stats(&counted, &expected, round);
            let mut sum = IoStats::default();
            device.channel_statistics().iter().for_each(|(_, _, of)| sum.merge(of));
            assert!(
                sum.operation_stats(Operation::Read).count
                    < counted.operation_stats(Operation::Read).count
                    || round == 0
            );
        }
        assert_operation_stats(&device.statistics(), &expected, 99);
        assert!(device.statistics().depth.mean() >= 1.0);
    }
}

fn assert_operation_stats(
    counted: &IoStats,
    expected: &BTreeMap<Operation, (u64, u64, u64)>,
    round: u64,
) {
    for (operation, of) in expected {
        let done = counted.operation_stats(*operation);
        assert_eq!((done.count, done.bytes, done.errors), *of, "{operation:?} in round {round}");
        assert_eq!(done.latency.count(), done.count);
        assert!(done.latency.max() >= 500 && done.latency.max() < 50_000);
    }
}

#[test]
fn latencies_are_measured_per_batch() {
    let (device, log) = bdev_over_late_device(8, |options| options.timing = false);
    let descriptor = open(&device);
    let mut user = TestClient::open(&descriptor);
    let one = |user: &mut TestClient, at: u64| {
        log.is_stuck.store(true, Ordering::SeqCst);
        user.submit(Instant { ns: at }, &[request(Operation::Read, at, 1)]);
        user.poll(Instant { ns: at + 10 }, 1);
        log.is_stuck.store(false, Ordering::SeqCst);
        while user.poll(Instant { ns: at + 77 }, 1).is_empty() {}
        device.statistics().operation_stats(Operation::Read).latency.clone()
    };
    assert_eq!(one(&mut user, 1_000).count(), 0, "latency recording is off");
    device.set_latency_recording(true);
    let latency = one(&mut user, 2_000);
    assert_eq!((latency.count(), latency.max()), (1, 77));
    device.set_latency_recording(false);
    assert_eq!(one(&mut user, 3_000).count(), 1);
}
