//! Order and time of the requests below, step by step.

use tenmil_base::{
    ChannelWakeup, Instant, IoChannel, IoCompletion, IoStatus, Operation, RegionId, Request,
    RequestFlags, Segment, Span,
};

use crate::adapt::tests::scripted::{Scripted, limits, poll, request};
use crate::schedule::{Deadline, DeadlineOptions, Merge, StreamBatch, StreamBatchOptions};

const NOW: Instant = Instant { ns: 0 };

fn read(token: u64, lba: u64) -> Request {
    Request { segment_count: 1, ..request(Operation::Read, token, lba, 2) }
}

fn write(token: u64, lba: u64) -> Request {
    Request { operation: Operation::Write, ..read(token, lba) }
}

/// Submits requests with one segment each, which identifies the request.
fn submit(channel: &mut impl IoChannel, now: Instant, requests: &[Request]) -> usize {
    let memory = |request: &Request| Segment {
        region: RegionId(0),
        offset: request.token * 10_000,
        len_bytes: request.blocks * 512,
    };
    let segments: Vec<Segment> = requests.iter().map(memory).collect();
    let place = |(segment_first, request): (u32, &Request)| Request { segment_first, ..*request };
    let requests: Vec<Request> = (0..).zip(requests).map(place).collect();
    channel.submit(now, &requests, &segments)
}

/// First block and number of blocks of each accepted request.
fn ranges(below: &Scripted) -> Vec<(u64, u32)> {
    below.taken().iter().map(|(request, _)| (request.lba, request.blocks)).collect()
}

fn tokens(below: &Scripted) -> Vec<u64> {
    below.taken().iter().map(|(request, _)| request.token).collect()
}

fn good(token: u64) -> IoCompletion {
    IoCompletion { token, status: IoStatus::SUCCESS, result: 0 }
}

/// Completes requests below.
fn completion(below: &Scripted, channel: &mut impl IoChannel, tokens: &[u64], now: Instant) {
    tokens.iter().for_each(|token| below.completion(*token, IoStatus::SUCCESS, 0));
    assert_eq!(poll(channel, now).len(), tokens.len());
}

#[test]
fn schedulers_acknowledge_lost_writes_of_the_device_below() {
    let below = || Scripted::new(limits(), 1);
    let channels: [Box<dyn IoChannel>; 3] = [
        Box::new(Merge::new(below())),
        Box::new(Deadline::new(below(), &DeadlineOptions::default())),
        Box::new(StreamBatch::new(below(), &StreamBatchOptions::default())),
    ];
    for mut channel in channels {
        assert_eq!(channel.acknowledge_losses().unwrap_err().text, "on purpose");
    }
}

#[test]
fn neighbours_go_down_as_one_and_are_answered_each() {
    let below = Scripted::new(limits(), 100);
    let mut merge = Merge::new(below.clone());
    assert_eq!(submit(&mut merge, NOW, &[read(1, 50), read(2, 10), read(3, 12), read(4, 20)]), 4);
    let taken = below.taken();
    let ranges: Vec<_> = taken.iter().map(|(part, _)| (part.lba, part.blocks)).collect();
    assert_eq!(ranges, [(50, 2), (10, 4), (20, 2)]);
    let offsets: Vec<u64> = taken[1].1.iter().map(|segment| segment.offset).collect();
    assert_eq!(offsets, [20_000, 30_000]);
    below.completion(taken[1].0.token, IoStatus::SUCCESS, 0);
    assert_eq!(poll(&mut merge, NOW), [good(2), good(3)]);
    below.completion(4, IoStatus::SUCCESS, 0);
    assert_eq!(poll(&mut merge, NOW), [good(4)]);
}

#[test]
fn nothing_is_merged_that_must_not_be() {
    let forced = |token, lba| Request { flags: RequestFlags::FUA, ..write(token, lba) };
    let flush = request(Operation::Flush, 9, 0, 0);
    let lost = |token, lba| Request { segment_count: 2, ..read(token, lba) };
    for batch in [
        vec![read(1, 0), write(2, 2)],
        vec![forced(1, 0), forced(2, 2)],
        vec![write(1, 0), flush, write(2, 2)],
        vec![write(1, 0), write(2, 1)],
        vec![write(1, 0), write(2, 3)],
        // More segments, and more blocks, than one request may have.
        vec![lost(1, 0), read(2, 2)],
        vec![Request { blocks: 7, ..read(1, 0) }, read(2, 7)],
    ] {
        let below = Scripted::new(limits(), 100);
        let mut merge = Merge::new(below.clone());
        assert_eq!(submit(&mut merge, NOW, &batch), batch.len());
        assert_eq!(below.taken().len(), batch.len(), "{batch:?}");
    }
}

#[test]
fn a_caller_may_use_any_token() {
    let below = Scripted::new(limits(), 100);
    let mut merge = Merge::new(below.clone());
    let segments = [Segment { len_bytes: 1024, ..Segment::default() }];
    assert_eq!(merge.submit(NOW, &[read(u64::MAX, 10), read(u64::MAX - 1, 12)], &segments), 2);
    let sent = tokens(&below);
    below.completion(sent[1], IoStatus::INTERNAL_ERROR, 3);
    below.completion(sent[0], IoStatus::SUCCESS, 0);
    let bad = IoCompletion { token: u64::MAX - 1, status: IoStatus::INTERNAL_ERROR, result: 3 };
    assert_eq!(poll(&mut merge, NOW), [bad, good(u64::MAX)]);
}

#[test]
fn no_read_fails_for_the_sake_of_another_and_no_write_is_written_twice() {
    let below = Scripted::new(limits(), 100);
    let mut merge = Merge::new(below.clone());
    assert_eq!(submit(&mut merge, NOW, &[read(1, 10), read(2, 12)]), 2);
    below.completion(tokens(&below)[0], IoStatus::UNRECOVERED_READ, 0);
    assert_eq!(poll(&mut merge, NOW), []);
    let again = below.taken();
    let places: Vec<_> = again.iter().map(|(one, memory)| (one.token, memory[0].offset)).collect();
    assert_eq!(places, [(1, 10_000), (2, 20_000)]);
    below.completion(1, IoStatus::UNRECOVERED_READ, 7);
    below.completion(2, IoStatus::SUCCESS, 0);
    let bad = |token, status, result| IoCompletion { token, status, result };
    assert_eq!(poll(&mut merge, NOW), [bad(1, IoStatus::UNRECOVERED_READ, 7), good(2)]);

    assert_eq!(submit(&mut merge, NOW, &[write(1, 10), write(2, 12)]), 2);
    below.completion(tokens(&below)[0], IoStatus::WRITE_FAULT, 0);
    let fault = |token| bad(token, IoStatus::WRITE_FAULT, 0);
    assert_eq!(poll(&mut merge, NOW), [fault(1), fault(2)]);
    assert_eq!(below.taken().len(), 0);
}

fn deadline(room: usize, options: DeadlineOptions) -> (Scripted, Deadline<Scripted>) {
    let below = Scripted::new(limits(), room);
    (below.clone(), Deadline::new(below, &options))
}

#[test]
fn reads_go_first_and_in_ascending_order_and_a_flush_waits_for_nobody() {
    let options = DeadlineOptions { depth: 2, ..DeadlineOptions::default() };
    let (below, mut channel) = deadline(100, options);
    let batch = [write(1, 70), read(2, 50), read(3, 10), write(4, 60), read(5, 30), read(6, 40)];
    assert_eq!(submit(&mut channel, NOW, &batch), 6);
    assert_eq!(ranges(&below), [(10, 2), (30, 2)]);
    assert_eq!(channel.submit(NOW, &[request(Operation::Flush, 9, 0, 0)], &[]), 1);
    assert_eq!(tokens(&below), [9]);
    completion(&below, &mut channel, &[3, 5, 9], NOW);
    assert_eq!(ranges(&below), [(40, 2), (50, 2)]);
    completion(&below, &mut channel, &[6, 2], NOW);
    assert_eq!(ranges(&below), [(60, 2), (70, 2)]);
    assert_eq!(below.flushes(), 2, "what a poll sends is made visible");
}

#[test]
fn what_fits_below_passes_as_it_is() {
    let (below, mut channel) = deadline(100, DeadlineOptions::default());
    assert_eq!(submit(&mut channel, NOW, &[read(1, 70), read(2, 50)]), 2);
    assert_eq!(below.batches(), [2]);
    assert_eq!(ranges(&below), [(70, 2), (50, 2)]);
}

#[test]
fn who_conflicts_with_an_elder_lets_it_go_first() {
    let options = DeadlineOptions { depth: 1, ..DeadlineOptions::default() };
    let (below, mut channel) = deadline(0, options);
    // The read would be first, but must see both writes, the second of which covers the first.
    let batch = [write(1, 21), write(2, 20), read(3, 20), read(4, 50)];
    assert_eq!(submit(&mut channel, NOW, &batch), 4);
    for expected in 1..=4 {
        below.make_space(1);
        let before: Vec<u64> = (expected > 1).then_some(expected - 1).into_iter().collect();
        completion(&below, &mut channel, &before, NOW);
        assert_eq!(tokens(&below), [expected]);
    }
}

#[test]
fn nobody_starves_behind_an_endless_stream() {
    let batch = 4;
    let (read_late, write_late) = (Span::from_ms(1), Span::from_ms(3));
    let options = DeadlineOptions { read: read_late, write: write_late, batch, depth: 1 };
    let (below, mut channel) = deadline(1, options);
    // A read at a high address, and a write, against reads that always precede them.
    let first = [read(1, 0), read(2, 990), write(3, 500), read(4, 10)];
    assert_eq!(submit(&mut channel, NOW, &first), 4);
    let mut sent = tokens(&below);
    let (mut now, mut next) = (NOW, 10_u64);
    while !(sent.contains(&2) && sent.contains(&3)) {
        now = now.after(Span::from_us(100));
        let more = [0, 1, 2].map(|step| read(next + step, (next + step) * 3));
        submit(&mut channel, now, &more);
        next += 3;
        below.make_space(1);
        completion(&below, &mut channel, &[*sent.last().unwrap()], now);
        sent.extend(tokens(&below));
        assert!(sent.len() < 100, "{sent:?}");
    }
    let place = |token: u64| sent.iter().position(|one| *one == token).unwrap();
    // Two batches of reads pass over a write.
    assert!(place(3) <= 2 * usize::from(batch) + 1, "{sent:?}");
    // Late after ten, it follows the current batch and one for each request that was late before.
    assert!((9..=10 + 3 * usize::from(batch)).contains(&place(2)), "{sent:?}");
}

fn stream(room: usize, options: StreamBatchOptions) -> (Scripted, StreamBatch<Scripted>) {
    let below = Scripted::new(limits(), room);
    (below.clone(), StreamBatch::new(below, &options))
}

#[test]
fn requests_are_held_until_there_are_enough_or_it_is_time() {
    let options = StreamBatchOptions { count: 3, bytes: 1 << 20, time: Span::from_us(50) };
    let (below, mut channel) = stream(100, options);
    for token in 0..3 {
        assert_eq!(below.batches(), []);
        assert_eq!(submit(&mut channel, NOW, &[read(token, token * 9)]), 1);
        channel.flush();
    }
    assert_eq!(below.batches(), [3], "enough");
    assert_eq!(ranges(&below), [(0, 2), (9, 2), (18, 2)]);
    below.flushes();

    assert_eq!(submit(&mut channel, NOW, &[read(5, 0)]), 1);
    assert_eq!(channel.wake_at(), Instant { ns: 50_000 });
    assert_eq!(poll(&mut channel, Instant { ns: 49_999 }), []);
    assert_eq!(below.batches(), []);
    assert_eq!(poll(&mut channel, Instant { ns: 50_000 }), []);
    assert_eq!((below.batches(), below.flushes()), (vec![1], 1), "time, and sent off");
    assert_eq!(channel.wake_at(), Instant::NEVER);
}

#[test]
fn a_flush_and_what_is_enough_by_itself_are_not_kept_waiting() {
    let options = StreamBatchOptions { count: 3, bytes: 1 << 20, time: Span::from_us(50) };
    let (below, mut channel) = stream(100, options);
    assert_eq!(submit(&mut channel, NOW, &[read(6, 0)]), 1);
    assert_eq!(channel.submit(NOW, &[request(Operation::Flush, 7, 0, 0)], &[]), 1);
    assert_eq!(below.batches(), [2]);
    let batch = [read(6, 0), read(7, 9), read(8, 18), read(9, 30)];
    assert_eq!(submit(&mut channel, NOW, &batch), 4);
    assert_eq!(below.batches(), [4]);
    let (below, mut channel) = stream(100, StreamBatchOptions { bytes: 2048, ..options });
    assert_eq!(submit(&mut channel, NOW, &[read(1, 0), read(2, 0)]), 2);
    assert_eq!(below.batches(), [2], "bytes enough");
}

#[test]
fn what_finds_no_room_goes_when_there_is_some_and_nothing_overtakes_it() {
    let options = StreamBatchOptions { count: 2, ..StreamBatchOptions::default() };
    let (below, mut channel) = stream(1, options);
    assert_eq!(submit(&mut channel, NOW, &[read(1, 0)]), 1);
    assert_eq!(submit(&mut channel, NOW, &[read(2, 2)]), 1);
    assert_eq!(ranges(&below), [(0, 2)]);
    let more = [read(3, 4), read(4, 6), read(5, 8)];
    assert_eq!(submit(&mut channel, NOW, &more), 0);
    below.make_space(9);
    completion(&below, &mut channel, &[1], NOW);
    assert_eq!(ranges(&below), [(2, 2)]);
    assert_eq!(submit(&mut channel, NOW, &more), 3);
}
