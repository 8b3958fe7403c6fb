//! Claims, events, quiesced ranges and removal.

mod qos;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tenmil_base::{
    BlockDevice, CompletionBatch, Error, ErrorCategory, Instant, IoChannel, IoStatus, Operation,
    Request, Span,
};
use tenmil_linux::Clock;
use tenmil_linux::named_thread::{NamedThread, yield_cpu};

use super::{Bdev, BdevEvent, BdevOptions, ChannelMode, Claim};
use crate::channel::tests::late_device::{BLOCKS, LateDevice, LateLog, REFUSED, request};
use crate::channel::tests::{bdev_over_late_device, would_wake};
use crate::{PER_CHANNEL, QueueMap};

const CLAIMS: [Claim; 3] = [Claim::ReadShared, Claim::WriteOnce, Claim::Exclusive];

#[test]
fn claim_compatibility_matches_the_table() {
    let table = [[true, true, false], [true, false, false], [false, false, false]];
    for (row, requested) in table.iter().zip(CLAIMS) {
        for (granted, held) in row.iter().zip(CLAIMS) {
            let (device, _) = bdev_over_late_device(4, |_| {});
            let first = device.open(held, "first").unwrap();
            let second = device.open(requested, "second");
            assert_eq!(second.is_ok(), *granted, "{requested} beside {held}");
            drop((first, second));
            assert!(device.list_holders().is_empty());
            device.open(Claim::Exclusive, "third").unwrap();
        }
    }
}

#[test]
fn claim_error_names_device_requester_and_holder() {
    let (device, _) = bdev_over_late_device(4, |_| {});
    let reader = device.open(Claim::ReadShared, "copy").unwrap();
    let writer = device.open(Claim::WriteOnce, "serve").unwrap();
    let refused = device.open(Claim::Exclusive, "mirror").unwrap_err();
    assert_eq!(refused.category(), ErrorCategory::Usage);
    assert_eq!(
        refused.to_string(),
        "open late0 exclusive for mirror: held by copy (read-shared), serve (write-once), expected \
         no other holder"
    );
    let refused = device.open(Claim::WriteOnce, "mirror").unwrap_err();
    assert_eq!(
        refused.to_string(),
        "open late0 write-once for mirror: held by serve (write-once), expected readers at most"
    );
    drop((reader, writer));
    device.remove();
    let refused = device.open(Claim::ReadShared, "copy").unwrap_err().to_string();
    assert!(refused.ends_with("it has been removed, expected a device that is there"), "{refused}");
}

#[test]
fn claim_is_held_while_a_channel_is_open() {
    let (device, _) = bdev_over_late_device(4, |_| {});
    let channel = device.open(Claim::WriteOnce, "first").unwrap().channel().unwrap();
    assert!(device.open(Claim::WriteOnce, "second").is_err());
    drop(channel);
    device.open(Claim::WriteOnce, "second").unwrap();
}

#[test]
fn every_holder_receives_events() {
    let (device, _) = bdev_over_late_device(4, |_| {});
    let holders = ["one", "other"].map(|name| device.open(Claim::ReadShared, name).unwrap());
    device.set_resized_block_count(77);
    device.notify_holders(&BdevEvent::MediumError { lba: 5, blocks: 2 });
    device.remove();
    device.remove();
    for holder in &holders {
        assert_eq!(holder.next_event(), Some(BdevEvent::Resized { block_count: 77 }));
        assert_eq!(holder.next_event(), Some(BdevEvent::MediumError { lba: 5, blocks: 2 }));
        assert_eq!(holder.next_event(), Some(BdevEvent::Removed));
        assert_eq!(holder.next_event(), None);
        assert_eq!(holder.limits().block_count, 77);
    }
}

#[test]
fn each_descriptor_of_a_claim_has_every_event() {
    let (device, _) = bdev_over_late_device(4, |_| {});
    let first = device.open(Claim::Exclusive, "library").unwrap();
    let second = first.open_with_same_claim().unwrap();
    device.set_resized_block_count(77);
    for descriptor in [&first, &second] {
        assert_eq!(descriptor.next_event(), Some(BdevEvent::Resized { block_count: 77 }));
        assert_eq!(descriptor.next_event(), None);
    }
    drop(first);
    assert_eq!(device.list_holders().len(), 1, "the other one has the claim");
    device.remove();
    assert_eq!(second.next_event(), Some(BdevEvent::Removed));
    let late = second.open_with_same_claim().unwrap();
    assert_eq!(late.next_event(), Some(BdevEvent::Removed), "it was removed before");
    drop((second, late));
    assert!(device.list_holders().is_empty());
}

#[test]
fn invalid_queue_map_is_rejected() {
    struct Few(LateDevice);
    impl BlockDevice for Few {
        fn limits(&self) -> tenmil_base::Limits {
            self.0.limits()
        }
        fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
            self.0.channel()
        }
        fn channels_max(&self) -> u32 {
            3
        }
    }
    let make = |map, channels_max| {
        let options = BdevOptions::new(Clock::on_kernel_clock(), 1);
        let options = BdevOptions { map, channels_max, ..options };
        Bdev::new("few0", Arc::new(Few(LateDevice::with_depth(1))), options)
    };
    let (two, three) = (
        QueueMap { read: 1, ..QueueMap::with_default_contexts(2) },
        QueueMap { read: 2, ..QueueMap::with_default_contexts(2) },
    );
    assert!(make(two, 8).is_ok() && make(QueueMap::with_default_contexts(PER_CHANNEL), 3).is_ok());
    let refused = make(three, 8).unwrap_err().to_string();
    assert_eq!(
        refused,
        "few0: the queue map has 4 contexts, expected at most the 3 channels of its medium"
    );
    assert!(make(QueueMap::with_default_contexts(PER_CHANNEL), 4).is_err());
    assert!(
        make(QueueMap::with_default_contexts(0), 4)
            .unwrap_err()
            .to_string()
            .contains("0 default contexts")
    );
    let shared =
        make(QueueMap::with_default_contexts(3), 8).unwrap().open(Claim::Exclusive, "x").unwrap();
    let channels: Vec<_> = (0..8).map(|_| shared.channel().unwrap()).collect();
    assert!(shared.channel().is_err_and(|text| text.text.contains("8 channels are open")));
    assert_eq!(shared.channels_max(), 8);
    drop(channels);
}

#[test]
fn quiesced_range_waits_and_other_io_continues() {
    let (device, log) = bdev_over_late_device(8, |_| {});
    let descriptor = device.open(Claim::Exclusive, "test").unwrap();
    let mut channel = descriptor.channel().unwrap();
    let mut idle = descriptor.channel().unwrap();
    let now = Instant::default();
    log.is_stuck.store(true, Ordering::SeqCst);
    assert_eq!(channel.submit(now, &[request(Operation::Write, 1, 10)], &[]), 1);
    let hold = device.begin_quiesce(10..12, None);
    assert!(!hold.has_drained(), "one is in flight, and the idle channel is not asked");
    let mut completions = CompletionBatch::with_capacity(8);
    assert!(channel.arm(), "there is something to look at");
    channel.disarm();
    let batch = [
        request(Operation::Read, 2, 9),
        request(Operation::Read, 3, 11),
        request(Operation::Read, 4, 12),
    ];
    assert_eq!(channel.submit(now, &batch, &[]), 1, "the order is kept");
    assert_eq!(idle.submit(now, &[request(Operation::Flush, 5, 0)], &[]), 0);
    let copy = Request { operand: 10, ..request(Operation::Copy, 6, 500) };
    assert_eq!(idle.submit(now, &[copy], &[]), 0, "its source is held");
    assert!(!hold.has_drained());
    log.is_stuck.store(false, Ordering::SeqCst);
    while completions.as_slice().len() < 2 {
        channel.poll(now, &mut completions);
    }
    assert!(hold.has_drained());
    let text = device.quiesce(0..11, Span::from_ms(1)).unwrap_err().to_string();
    assert!(text.contains("blocks 0 to 11") && text.contains("an earlier hold"), "{text}");
    let other = device.begin_quiesce(12..13, None);
    assert!(other.has_drained() && other.blocks() == (12..13));
    drop(hold);
    assert!(channel.arm(), "what was held back may go on");
    assert_eq!(channel.submit(now, &batch[1..], &[]), 1, "12 is held by the other");
    drop(other);
    assert_eq!(channel.submit(now, &batch[2..], &[]), 1);
}

#[test]
fn shrinking_waits_for_requests_beyond_the_new_end() {
    let (device, log) = bdev_over_late_device(8, |_| {});
    let descriptor = device.open(Claim::WriteOnce, "test").unwrap();
    let mut channel = descriptor.channel().unwrap();
    let (now, mut completions) = (Instant::default(), CompletionBatch::with_capacity(8));
    log.is_stuck.store(true, Ordering::SeqCst);
    let batch = [request(Operation::Write, 1, 100), request(Operation::Write, 2, 600)];
    assert_eq!(channel.submit(now, &batch, &[]), 2);
    let descriptor = Arc::new(descriptor);
    let requested = Arc::clone(&descriptor);
    let shrinking = NamedThread::spawn("shrink", None, move |_| requested.resize(500)).unwrap();
    while descriptor.limits().block_count != 500 {
        yield_cpu();
    }
    assert!(log.sizes.lock().unwrap().is_empty(), "one is past the new end");
    log.is_stuck.store(false, Ordering::SeqCst);
    while log.sizes.lock().unwrap().is_empty() {
        channel.poll(now, &mut completions);
        yield_cpu();
    }
    assert_eq!(shrinking.join(), Ok(()));
    while completions.as_slice().len() < 2 {
        channel.poll(now, &mut completions);
    }
    completions.clear();
    assert_eq!(channel.submit(now, &batch[1..], &[]), 1);
    while channel.poll(now, &mut completions) == 0 {}
    assert_eq!(completions.as_slice()[0].status, IoStatus::LBA_OUT_OF_RANGE);
    let said = device.resize_and_wait(REFUSED).unwrap_err().to_string();
    assert_eq!(said, "late0: it does not want to");
    assert_eq!(device.current_limits().block_count, 500, "it is as long as it was");
    device.resize_and_wait(BLOCKS * 2).unwrap();
    assert_eq!(descriptor.limits().block_count, BLOCKS * 2);
    let (sizes, in_flight): (Vec<u64>, Vec<usize>) =
        log.sizes.lock().unwrap().iter().copied().unzip();
    assert_eq!(sizes, [500, REFUSED, BLOCKS * 2]);
    assert!(in_flight[0] < 2, "what was past the new end has come to its end first");
}

#[test]
fn resize_requires_write_access_and_no_conflicting_claim() {
    let (device, log) = bdev_over_late_device(8, |_| {});
    let reader = device.open(Claim::ReadShared, "copy").unwrap();
    assert!(!reader.is_resizable());
    let said = reader.resize(10).unwrap_err();
    assert_eq!(said, Error::environment("late0: copy may read it, expected a claim to write it"));
    let mut channel = device.open(Claim::WriteOnce, "serve").unwrap().channel().unwrap();
    log.is_stuck.store(true, Ordering::SeqCst);
    let last = request(Operation::Write, 1, BLOCKS - 1);
    assert_eq!(channel.submit(Instant::default(), &[last], &[]), 1);
    let said = device.resize_and_wait(10).unwrap_err().to_string();
    assert!(said.contains("blocks 10 to 1000") && said.contains("serve"), "{said}");
    assert_eq!(device.current_limits().block_count, BLOCKS);
    assert!(log.sizes.lock().unwrap().is_empty(), "the medium was not asked");
    let (bypassed, _) = bdev_over_late_device(8, |options| options.mode = ChannelMode::Bypass);
    assert!(bypassed.resize_and_wait(10).unwrap_err().to_string().contains("its mode is bypass"));
}

#[test]
fn quiescing_channel_continues_and_quiesces_are_granted_in_order() {
    let (device, _) = bdev_over_late_device(8, |_| {});
    let descriptor = device.open(Claim::Exclusive, "test").unwrap();
    let mut mine = descriptor.open_channel().unwrap();
    let mut other = descriptor.open_channel().unwrap();
    let first = device.begin_quiesce(0..8, Some(mine.id()));
    let second = device.begin_quiesce(4..5, Some(other.id()));
    assert!(first.has_drained() && !second.has_drained());
    let now = Instant::default();
    let write = request(Operation::Write, 1, 4);
    assert_eq!(other.submit(now, &[write], &[]), 0, "the first decides");
    assert_eq!(mine.submit(now, &[write], &[]), 1);
    drop(first);
    assert!(!second.has_drained(), "the write is still in flight");
    let mut completions = CompletionBatch::with_capacity(1);
    while mine.poll(now, &mut completions) == 0 {}
    assert!(second.has_drained());
    assert_eq!((mine.submit(now, &[write], &[]), other.submit(now, &[write], &[])), (0, 1));
}

/// Runs two threads that write to the whole device until `until` returns, for each map and mode.
fn run_until_under_write_load(
    options: &[(QueueMap, ChannelMode)],
    mut until: impl FnMut(&Bdev, &LateLog),
) {
    for (map, mode) in options {
        let (device, log) = bdev_over_late_device(16, |options| {
            (options.map, options.mode, options.channels_max) = (*map, *mode, 2);
        });
        let descriptor = Arc::new(device.open(Claim::Exclusive, "load").unwrap());
        let is_over = Arc::new(AtomicBool::new(false));
        let threads: Vec<_> = (0..2_u64)
            .map(|thread| {
                let mut channel = descriptor.channel().unwrap();
                let is_over = Arc::clone(&is_over);
                let run = move |_: &_| {
                    let (clock, mut token, mut good) = (Clock::on_kernel_clock(), 0, 0_u64);
                    let mut completions = CompletionBatch::with_capacity(8);
                    while !is_over.load(Ordering::SeqCst) {
                        let lba = (token * 13 + thread) % BLOCKS;
                        let write = request(Operation::Write, token, lba);
                        token += channel.submit(clock.now(), &[write], &[]) as u64;
                        channel.poll(clock.now(), &mut completions);
                        let ended = completions
                            .drain()
                            .map(|completion| u64::from(completion.status.is_success()));
                        good += ended.sum::<u64>();
                    }
                    good
                };
                NamedThread::spawn("load", None, run).unwrap()
            })
            .collect();
        // Both threads are writing.
        while device.statistics().operation_stats(Operation::Write).count < 500 {
            yield_cpu();
        }
        until(&device, &log);
        is_over.store(true, Ordering::SeqCst);
        let good: u64 = threads.into_iter().map(NamedThread::join).sum();
        assert!(good > 0, "{map:?} {mode:?}");
    }
}

#[test]
fn no_request_is_in_a_quiesced_range_under_load() {
    let shapes = [
        (QueueMap::with_default_contexts(PER_CHANNEL), ChannelMode::Mq),
        (QueueMap::with_default_contexts(1), ChannelMode::Mq),
        (QueueMap::with_default_contexts(1), ChannelMode::SingleQueue),
    ];
    run_until_under_write_load(&shapes, |device, log| {
        for round in 0..300 {
            let range = if round % 3 == 0 { 0..BLOCKS } else { 100..700 };
            let hold = device.quiesce(range.clone(), Span::from_secs(20)).unwrap();
            for _ in 0..20 {
                let in_flight = log.in_flight.lock().unwrap();
                let inside = in_flight.iter().find(|(_, sent)| range.contains(&sent.lba));
                assert!(inside.is_none(), "{inside:?} in round {round}");
            }
            drop(hold);
        }
    });
}

#[test]
fn channel_of_a_removed_device_completes_all_requests() {
    for (map, mode) in [
        (QueueMap::with_default_contexts(PER_CHANNEL), ChannelMode::Mq),
        (QueueMap::with_default_contexts(1), ChannelMode::Mq),
        (QueueMap { default: 1, read: 2, poll: 0 }, ChannelMode::Mq),
        (QueueMap::with_default_contexts(1), ChannelMode::SingleQueue),
    ] {
        let (device, log) = bdev_over_late_device(16, |options| {
            (options.map, options.mode, options.channels_max) = (map, mode, 2);
        });
        let descriptor = device.open(Claim::Exclusive, "test").unwrap();
        log.is_stuck.store(true, Ordering::SeqCst);
        let mut channels = [descriptor.channel().unwrap(), descriptor.channel().unwrap()];
        let now = Instant::default();
        let requests: Vec<Request> = (0..6)
            .map(|token| {
                request(
                    [Operation::Read, Operation::Write][usize::from(token % 2 == 1)],
                    token,
                    token,
                )
            })
            .collect();
        for channel in &mut channels {
            assert_eq!(channel.submit(now, &requests, &[]), 6);
        }
        assert_eq!(device.open_channel_count(), 2);
        for channel in &mut channels {
            assert!(!channel.arm() && !would_wake(&**channel));
        }
        device.remove();
        for channel in &mut channels {
            assert!(would_wake(&**channel));
            assert!(channel.arm(), "there is something to look at");
            channel.disarm();
            let mut completions = CompletionBatch::with_capacity(9);
            assert_eq!(channel.submit(now, &[request(Operation::Read, 99, 0)], &[]), 1);
            assert_eq!(channel.poll(now, &mut completions), 7);
            let mut ended: Vec<_> = completions
                .drain()
                .map(|completion| (completion.token, completion.status))
                .collect();
            ended.sort_by_key(|(token, _)| *token);
            let mut expected: Vec<_> =
                (0..6).map(|token| (token, IoStatus::ABORTED_BY_HOST)).collect();
            expected.push((99, IoStatus::NO_DEVICE));
            assert_eq!(ended, expected);
            assert_eq!(channel.wake_at(), Instant::NEVER);
            assert!(!channel.arm(), "nothing will come any more");
        }
        assert_eq!((device.open_channel_count(), log.open.load(Ordering::SeqCst)), (0, 0));
        assert!(descriptor.channel().is_err() && descriptor.block_status(0).is_err());
        assert_eq!(device.statistics().operation_stats(Operation::Read).errors, 8);
        assert_eq!(device.statistics().operation_stats(Operation::Write).errors, 6);
    }
}

#[test]
fn device_removal_reaches_every_thread_within_a_second() {
    let shapes = [
        (QueueMap::with_default_contexts(PER_CHANNEL), ChannelMode::Mq),
        (QueueMap::with_default_contexts(1), ChannelMode::Mq),
    ];
    run_until_under_write_load(&shapes, |device, log| {
        let clock = Clock::on_kernel_clock();
        device.remove();
        let began = clock.now();
        while device.open_channel_count() > 0 || log.open.load(Ordering::SeqCst) > 0 {
            assert!(clock.now().since(began) < Span::from_secs(1));
        }
    });
}
