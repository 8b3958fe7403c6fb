//! Blocks that stay fenced while writes of a departed client are in flight.

use std::sync::atomic::Ordering;

use tenmil_base::{
    BlockDevice, CompletionBatch, Instant, IoChannel, IoStatus, Operation, Random, Request,
    Segment, Span,
};

use super::late_device::{LateLog, request};
use super::{bdev_over_late_device, open, would_wake};
use crate::write_fence::WAIT_MAX;
use crate::{ChannelMode, PER_CHANNEL, QueueMap};

const NOW: Instant = Instant { ns: 1_000 };

fn request_of_blocks(operation: Operation, token: u64, lba: u64, blocks: u32) -> Request {
    Request { blocks, ..request(operation, token, lba) }
}

/// First blocks of the requests in flight in the device below, in order of their tags.
fn lbas_in_flight_below(log: &LateLog) -> Vec<u64> {
    let mut found: Vec<u64> =
        log.in_flight.lock().unwrap().iter().map(|(_, request)| request.lba).collect();
    found.sort_unstable();
    found
}

/// All available completions of a channel.
fn poll(channel: &mut dyn IoChannel, now: Instant) -> Vec<(u64, IoStatus)> {
    let mut completions = CompletionBatch::with_capacity(64);
    (0..64).for_each(|_| {
        channel.poll(now, &mut completions);
    });
    completions.drain().map(|completion| (completion.token, completion.status)).collect()
}

#[test]
fn fenced_blocks_are_closed_until_the_device_completes() {
    for (map, mode) in [
        (QueueMap::with_default_contexts(PER_CHANNEL), ChannelMode::Mq),
        (QueueMap::with_default_contexts(1), ChannelMode::Mq),
        (QueueMap { read: 1, ..QueueMap::with_default_contexts(1) }, ChannelMode::Mq),
        (QueueMap::with_default_contexts(1), ChannelMode::SingleQueue),
    ] {
        let (device, log) = bdev_over_late_device(16, |options| {
            (options.map, options.mode, options.channels_max) = (map, mode, 4);
        });
        let descriptor = open(&device);
        let [mut old, mut new] = [(); 2].map(|()| descriptor.channel().unwrap());
        log.is_stuck.store(true, Ordering::SeqCst);
        assert_eq!(old.submit(NOW, &[request_of_blocks(Operation::Write, 1, 10, 4)], &[]), 1);
        old.fence_writes();
        assert!(matches!(&device.fenced_ranges()[..], [it] if *it == (10..14)));

        let copy = Request { operand: 11, ..request(Operation::Copy, 5, 600) };
        let batch = [
            request_of_blocks(Operation::Write, 2, 8, 3),
            request(Operation::Write, 3, 14),
            request(Operation::Read, 4, 13),
            copy,
            request(Operation::Flush, 6, 0),
            request(Operation::Read, 7, 8),
        ];
        assert_eq!(new.submit(NOW, &batch, &[]), 6, "none holds up another");
        new.flush_submissions();
        assert_eq!(
            lbas_in_flight_below(&log),
            [0, 8, 10, 14],
            "{map:?}: a flush is for what was answered"
        );
        assert_eq!(poll(&mut *new, NOW), []);
        assert_eq!(lbas_in_flight_below(&log), [0, 8, 10, 14]);
        assert!(!new.arm(), "it may sleep");

        log.is_stuck.store(false, Ordering::SeqCst);
        assert_eq!(poll(&mut *old, NOW), [(1, IoStatus::SUCCESS)]);
        assert!(device.fenced_ranges().is_empty());
        assert!(would_wake(&*new) || new.arm(), "the waiting request wakes its thread");
        new.disarm();
        let mut ended: Vec<u64> = poll(&mut *new, NOW).iter().map(|(token, _)| *token).collect();
        ended.sort_unstable();
        assert_eq!(ended, [2, 3, 4, 5, 6, 7]);
    }
}

#[test]
fn request_waiting_too_long_for_a_fence_fails_retryably() {
    let (device, log) = bdev_over_late_device(8, |_| {});
    let descriptor = open(&device);
    let [mut old, mut new] = [(); 2].map(|()| descriptor.channel().unwrap());
    log.is_stuck.store(true, Ordering::SeqCst);
    assert_eq!(old.submit(NOW, &[request(Operation::Deallocate, 1, 10)], &[]), 1);
    old.fence_writes();
    let segment = [Segment { len_bytes: 512, ..Segment::default() }];
    let write = Request { segment_count: 1, ..request(Operation::Write, 2, 10) };
    assert_eq!(new.submit(NOW, &[write], &segment), 1);
    assert_eq!(new.wake_at(), NOW.after(WAIT_MAX));
    let before = Instant { ns: NOW.after(WAIT_MAX).ns - 1 };
    assert_eq!(poll(&mut *new, before), []);
    assert_eq!(poll(&mut *new, NOW.after(WAIT_MAX)), [(2, IoStatus::INTERRUPTED)]);
    assert_eq!(new.wake_at(), Instant::NEVER);
    // The device below never completes, and the blocks stay fenced even without the channel.
    drop(old);
    assert!(matches!(&device.fenced_ranges()[..], [it] if *it == (10..11)));
    assert_eq!(new.submit(NOW, &[request(Operation::Read, 3, 10)], &[]), 1);
    device.remove();
    assert_eq!(poll(&mut *new, NOW), [(3, IoStatus::NO_DEVICE)]);
}

#[test]
fn ended_clients_reads_fence_nothing_and_its_queued_requests_never_start() {
    let (device, log) = bdev_over_late_device(8, |_| {});
    let descriptor = open(&device);
    let [mut first, mut second, mut third] = [(); 3].map(|()| descriptor.channel().unwrap());
    log.is_stuck.store(true, Ordering::SeqCst);
    let batch = [request(Operation::Read, 1, 20), request(Operation::Flush, 2, 0)];
    assert_eq!(third.submit(NOW, &batch, &[]), 2);
    third.fence_writes();
    assert!(device.fenced_ranges().is_empty());
    assert_eq!(first.submit(NOW, &[request(Operation::Write, 3, 10)], &[]), 1);
    first.fence_writes();
    assert_eq!(second.submit(NOW, &[request(Operation::Write, 4, 10)], &[]), 1);
    second.fence_writes();
    assert_eq!(poll(&mut *second, NOW), [(4, IoStatus::ABORTED)]);
    log.is_stuck.store(false, Ordering::SeqCst);
    assert_eq!(poll(&mut *first, NOW), [(3, IoStatus::SUCCESS)]);
    assert!(device.fenced_ranges().is_empty());
    assert_eq!(poll(&mut *second, NOW), [], "it was given up");
}

/// In any order: while a write of a departed client is in flight, no request for its blocks is submitted,
/// and every request completes once.
#[test]
fn no_request_overlaps_an_ended_clients_write() {
    let maps = [
        QueueMap::with_default_contexts(PER_CHANNEL),
        QueueMap::with_default_contexts(2),
        QueueMap { read: 1, ..QueueMap::with_default_contexts(1) },
    ];
    for (seed, map) in (0..200).zip(maps.iter().cycle()) {
        let mut random = Random::new(seed);
        let (device, log) = bdev_over_late_device(4, |options| {
            (options.map, options.channels_max) = (*map, 64);
        });
        let descriptor = open(&device);
        let mut live: Vec<(Box<dyn IoChannel>, usize)> =
            (0..4).map(|_| (descriptor.channel().unwrap(), 0)).collect();
        let mut ended: Vec<Box<dyn IoChannel>> = Vec::new();
        let (mut token, mut given) = (0, 0);
        for turn in 0..400 {
            let now = Instant { ns: turn * 1_000_000 };
            log.is_stuck.store(random.chance(1, 2), Ordering::SeqCst);
            let index = usize::try_from(random.below(4)).unwrap();
            if random.chance(1, 20) && ended.len() < 8 {
                let (mut channel, _) =
                    core::mem::replace(&mut live[index], (descriptor.channel().unwrap(), 0));
                channel.fence_writes();
                ended.push(channel);
            }
            let closed = device.fenced_ranges();
            let before = log.in_flight.lock().unwrap().len();
            let (channel, owed) = &mut live[index];
            let operations = [Operation::Write, Operation::Read, Operation::WriteZeroes];
            let batch: Vec<Request> = (0..random.below(4))
                .map(|_| {
                    token += 1;
                    let operation = operations[usize::try_from(random.below(3)).unwrap()];
                    let count = u32::try_from(random.below(3)).unwrap() + 1;
                    request_of_blocks(operation, token, random.below(8), count)
                })
                .collect();
            *owed += channel.submit(now, &batch, &[]);
            channel.flush_submissions();
            for (_, request) in &log.in_flight.lock().unwrap()[before..] {
                let end = request.lba + u64::from(request.blocks);
                let is_open = closed.iter().all(|it| end <= it.start || it.end <= request.lba);
                assert!(is_open, "seed {seed}, turn {turn}: {request:?} beside {closed:?}");
            }
            let mut completions = CompletionBatch::with_capacity(8);
            let count = channel.poll(now, &mut completions);
            (*owed, given) = (*owed - count, given + count);
            ended.iter_mut().for_each(|channel| {
                channel.poll(now, &mut CompletionBatch::with_capacity(8));
            });
        }
        log.is_stuck.store(false, Ordering::SeqCst);
        let mut now = Instant { ns: 1_000_000_000 };
        for _ in 0..200 {
            now = now.after(Span::from_ms(1));
            ended.iter_mut().for_each(|channel| {
                channel.poll(now, &mut CompletionBatch::with_capacity(8));
            });
            for (channel, owed) in &mut live {
                *owed -= channel.poll(now, &mut CompletionBatch::with_capacity(8));
            }
        }
        assert!(device.fenced_ranges().is_empty(), "seed {seed}");
        assert!(live.iter().all(|(_, owed)| *owed == 0), "seed {seed}: all are answered");
        assert!(given > 0);
    }
}
