//! Order and time of the requests below, step by step.

use tenmil_base::{
    ChannelWakeup, Instant, IoChannel, IoCompletion, IoStatus, Operation, RegionId, Request,
    RequestFlags, Segment, Span,
};

use crate::adapt::tests::scripted_channel::{ScriptedChannel, limits, poll, request};
use crate::scheduler::{
    DeadlineOptions, DeadlineScheduler, MergeScheduler, StreamBatchOptions, StreamBatchScheduler,
};

const NOW: Instant = Instant { ns: 0 };

fn read_request(token: u64, lba: u64) -> Request {
    Request { segment_count: 1, ..request(Operation::Read, token, lba, 2) }
}

fn write_request(token: u64, lba: u64) -> Request {
    Request { operation: Operation::Write, ..read_request(token, lba) }
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
fn submitted_ranges(below: &ScriptedChannel) -> Vec<(u64, u32)> {
    below.take_accepted().iter().map(|(request, _)| (request.lba, request.blocks)).collect()
}

fn completed_tokens(below: &ScriptedChannel) -> Vec<u64> {
    below.take_accepted().iter().map(|(request, _)| request.token).collect()
}

fn success_completion(token: u64) -> IoCompletion {
    IoCompletion { token, status: IoStatus::SUCCESS, result: 0 }
}

/// Completes requests below.
fn completion(below: &ScriptedChannel, channel: &mut impl IoChannel, tokens: &[u64], now: Instant) {
    tokens.iter().for_each(|token| below.complete_request(*token, IoStatus::SUCCESS, 0));
    assert_eq!(poll(channel, now).len(), tokens.len());
}

#[test]
fn schedulers_forward_loss_acknowledgments() {
    let below = || ScriptedChannel::new(limits(), 1);
    let channels: [Box<dyn IoChannel>; 3] = [
        Box::new(MergeScheduler::new(below())),
        Box::new(DeadlineScheduler::new(below(), &DeadlineOptions::default())),
        Box::new(StreamBatchScheduler::new(below(), &StreamBatchOptions::default())),
    ];
    for mut channel in channels {
        assert_eq!(channel.accept_write_losses().unwrap_err().text, "on purpose");
    }
}

#[test]
fn adjacent_requests_are_merged_and_complete_separately() {
    let below = ScriptedChannel::new(limits(), 100);
    let mut merge = MergeScheduler::new(below.clone());
    assert_eq!(
        submit(
            &mut merge,
            NOW,
            &[read_request(1, 50), read_request(2, 10), read_request(3, 12), read_request(4, 20)]
        ),
        4
    );
    let taken = below.take_accepted();
    let ranges: Vec<_> = taken.iter().map(|(part, _)| (part.lba, part.blocks)).collect();
    assert_eq!(ranges, [(50, 2), (10, 4), (20, 2)]);
    let offsets: Vec<u64> = taken[1].1.iter().map(|segment| segment.offset).collect();
    assert_eq!(offsets, [20_000, 30_000]);
    below.complete_request(taken[1].0.token, IoStatus::SUCCESS, 0);
    assert_eq!(poll(&mut merge, NOW), [success_completion(2), success_completion(3)]);
    below.complete_request(4, IoStatus::SUCCESS, 0);
    assert_eq!(poll(&mut merge, NOW), [success_completion(4)]);
}

#[test]
fn incompatible_requests_are_not_merged() {
    let forced = |token, lba| Request { flags: RequestFlags::FUA, ..write_request(token, lba) };
    let flush = request(Operation::Flush, 9, 0, 0);
    let lost = |token, lba| Request { segment_count: 2, ..read_request(token, lba) };
    for batch in [
        vec![read_request(1, 0), write_request(2, 2)],
        vec![forced(1, 0), forced(2, 2)],
        vec![write_request(1, 0), flush, write_request(2, 2)],
        vec![write_request(1, 0), write_request(2, 1)],
        vec![write_request(1, 0), write_request(2, 3)],
        // More segments, and more blocks, than one request may have.
        vec![lost(1, 0), read_request(2, 2)],
        vec![Request { blocks: 7, ..read_request(1, 0) }, read_request(2, 7)],
    ] {
        let below = ScriptedChannel::new(limits(), 100);
        let mut merge = MergeScheduler::new(below.clone());
        assert_eq!(submit(&mut merge, NOW, &batch), batch.len());
        assert_eq!(below.take_accepted().len(), batch.len(), "{batch:?}");
    }
}

#[test]
fn any_caller_token_is_preserved() {
    let below = ScriptedChannel::new(limits(), 100);
    let mut merge = MergeScheduler::new(below.clone());
    let segments = [Segment { len_bytes: 1024, ..Segment::default() }];
    assert_eq!(
        merge.submit(NOW, &[read_request(u64::MAX, 10), read_request(u64::MAX - 1, 12)], &segments),
        2
    );
    let sent = completed_tokens(&below);
    below.complete_request(sent[1], IoStatus::INTERNAL_ERROR, 3);
    below.complete_request(sent[0], IoStatus::SUCCESS, 0);
    let bad = IoCompletion { token: u64::MAX - 1, status: IoStatus::INTERNAL_ERROR, result: 3 };
    assert_eq!(poll(&mut merge, NOW), [bad, success_completion(u64::MAX)]);
}

#[test]
fn failed_merged_reads_are_retried_separately_and_writes_are_not() {
    let below = ScriptedChannel::new(limits(), 100);
    let mut merge = MergeScheduler::new(below.clone());
    assert_eq!(submit(&mut merge, NOW, &[read_request(1, 10), read_request(2, 12)]), 2);
    below.complete_request(completed_tokens(&below)[0], IoStatus::UNRECOVERED_READ, 0);
    assert_eq!(poll(&mut merge, NOW), []);
    let again = below.take_accepted();
    let places: Vec<_> = again.iter().map(|(one, memory)| (one.token, memory[0].offset)).collect();
    assert_eq!(places, [(1, 10_000), (2, 20_000)]);
    below.complete_request(1, IoStatus::UNRECOVERED_READ, 7);
    below.complete_request(2, IoStatus::SUCCESS, 0);
    let bad = |token, status, result| IoCompletion { token, status, result };
    assert_eq!(
        poll(&mut merge, NOW),
        [bad(1, IoStatus::UNRECOVERED_READ, 7), success_completion(2)]
    );

    assert_eq!(submit(&mut merge, NOW, &[write_request(1, 10), write_request(2, 12)]), 2);
    below.complete_request(completed_tokens(&below)[0], IoStatus::WRITE_FAULT, 0);
    let fault = |token| bad(token, IoStatus::WRITE_FAULT, 0);
    assert_eq!(poll(&mut merge, NOW), [fault(1), fault(2)]);
    assert_eq!(below.take_accepted().len(), 0);
}

fn deadline_scheduler(
    room: usize,
    options: DeadlineOptions,
) -> (ScriptedChannel, DeadlineScheduler<ScriptedChannel>) {
    let below = ScriptedChannel::new(limits(), room);
    (below.clone(), DeadlineScheduler::new(below, &options))
}

#[test]
fn deadline_dispatches_reads_first_in_lba_order() {
    let options = DeadlineOptions { depth: 2, ..DeadlineOptions::default() };
    let (below, mut channel) = deadline_scheduler(100, options);
    let batch = [
        write_request(1, 70),
        read_request(2, 50),
        read_request(3, 10),
        write_request(4, 60),
        read_request(5, 30),
        read_request(6, 40),
    ];
    assert_eq!(submit(&mut channel, NOW, &batch), 6);
    assert_eq!(submitted_ranges(&below), [(10, 2), (30, 2)]);
    assert_eq!(channel.submit(NOW, &[request(Operation::Flush, 9, 0, 0)], &[]), 1);
    assert_eq!(completed_tokens(&below), [9]);
    completion(&below, &mut channel, &[3, 5, 9], NOW);
    assert_eq!(submitted_ranges(&below), [(40, 2), (50, 2)]);
    completion(&below, &mut channel, &[6, 2], NOW);
    assert_eq!(submitted_ranges(&below), [(60, 2), (70, 2)]);
    assert_eq!(below.flush_count(), 2, "what a poll sends is made visible");
}

#[test]
fn deadline_passes_requests_while_the_device_has_space() {
    let (below, mut channel) = deadline_scheduler(100, DeadlineOptions::default());
    assert_eq!(submit(&mut channel, NOW, &[read_request(1, 70), read_request(2, 50)]), 2);
    assert_eq!(below.batch_sizes(), [2]);
    assert_eq!(submitted_ranges(&below), [(70, 2), (50, 2)]);
}

#[test]
fn conflicting_requests_are_dispatched_in_order() {
    let options = DeadlineOptions { depth: 1, ..DeadlineOptions::default() };
    let (below, mut channel) = deadline_scheduler(0, options);
    // The read would be first, but must see both writes, the second of which covers the first.
    let batch =
        [write_request(1, 21), write_request(2, 20), read_request(3, 20), read_request(4, 50)];
    assert_eq!(submit(&mut channel, NOW, &batch), 4);
    for expected in 1..=4 {
        below.add_free_entries(1);
        let before: Vec<u64> = (expected > 1).then_some(expected - 1).into_iter().collect();
        completion(&below, &mut channel, &before, NOW);
        assert_eq!(completed_tokens(&below), [expected]);
    }
}

#[test]
fn deadline_prevents_starvation() {
    let batch = 4;
    let (read_late, write_late) = (Span::from_ms(1), Span::from_ms(3));
    let options = DeadlineOptions { read: read_late, write: write_late, batch, depth: 1 };
    let (below, mut channel) = deadline_scheduler(1, options);
    // A read at a high address, and a write, against reads that always precede them.
    let first =
        [read_request(1, 0), read_request(2, 990), write_request(3, 500), read_request(4, 10)];
    assert_eq!(submit(&mut channel, NOW, &first), 4);
    let mut sent = completed_tokens(&below);
    let (mut now, mut next) = (NOW, 10_u64);
    while !(sent.contains(&2) && sent.contains(&3)) {
        now = now.after(Span::from_us(100));
        let more = [0, 1, 2].map(|step| read_request(next + step, (next + step) * 3));
        submit(&mut channel, now, &more);
        next += 3;
        below.add_free_entries(1);
        completion(&below, &mut channel, &[*sent.last().unwrap()], now);
        sent.extend(completed_tokens(&below));
        assert!(sent.len() < 100, "{sent:?}");
    }
    let place = |token: u64| sent.iter().position(|one| *one == token).unwrap();
    // Two batches of reads pass over a write.
    assert!(place(3) <= 2 * usize::from(batch) + 1, "{sent:?}");
    // Late after ten, it follows the current batch and one for each request that was late before.
    assert!((9..=10 + 3 * usize::from(batch)).contains(&place(2)), "{sent:?}");
}

fn stream_batch_scheduler(
    room: usize,
    options: StreamBatchOptions,
) -> (ScriptedChannel, StreamBatchScheduler<ScriptedChannel>) {
    let below = ScriptedChannel::new(limits(), room);
    (below.clone(), StreamBatchScheduler::new(below, &options))
}

#[test]
fn stream_batch_holds_requests_until_count_or_timeout() {
    let options = StreamBatchOptions { count: 3, bytes: 1 << 20, time: Span::from_us(50) };
    let (below, mut channel) = stream_batch_scheduler(100, options);
    for token in 0..3 {
        assert_eq!(below.batch_sizes(), []);
        assert_eq!(submit(&mut channel, NOW, &[read_request(token, token * 9)]), 1);
        channel.flush_submissions();
    }
    assert_eq!(below.batch_sizes(), [3], "enough");
    assert_eq!(submitted_ranges(&below), [(0, 2), (9, 2), (18, 2)]);
    below.flush_count();

    assert_eq!(submit(&mut channel, NOW, &[read_request(5, 0)]), 1);
    assert_eq!(channel.wake_at(), Instant { ns: 50_000 });
    assert_eq!(poll(&mut channel, Instant { ns: 49_999 }), []);
    assert_eq!(below.batch_sizes(), []);
    assert_eq!(poll(&mut channel, Instant { ns: 50_000 }), []);
    assert_eq!((below.batch_sizes(), below.flush_count()), (vec![1], 1), "time, and sent off");
    assert_eq!(channel.wake_at(), Instant::NEVER);
}

#[test]
fn flush_and_large_requests_are_not_held() {
    let options = StreamBatchOptions { count: 3, bytes: 1 << 20, time: Span::from_us(50) };
    let (below, mut channel) = stream_batch_scheduler(100, options);
    assert_eq!(submit(&mut channel, NOW, &[read_request(6, 0)]), 1);
    assert_eq!(channel.submit(NOW, &[request(Operation::Flush, 7, 0, 0)], &[]), 1);
    assert_eq!(below.batch_sizes(), [2]);
    let batch = [read_request(6, 0), read_request(7, 9), read_request(8, 18), read_request(9, 30)];
    assert_eq!(submit(&mut channel, NOW, &batch), 4);
    assert_eq!(below.batch_sizes(), [4]);
    let (below, mut channel) =
        stream_batch_scheduler(100, StreamBatchOptions { bytes: 2048, ..options });
    assert_eq!(submit(&mut channel, NOW, &[read_request(1, 0), read_request(2, 0)]), 2);
    assert_eq!(below.batch_sizes(), [2], "bytes enough");
}

#[test]
fn held_requests_are_dispatched_in_order_when_space_is_free() {
    let options = StreamBatchOptions { count: 2, ..StreamBatchOptions::default() };
    let (below, mut channel) = stream_batch_scheduler(1, options);
    assert_eq!(submit(&mut channel, NOW, &[read_request(1, 0)]), 1);
    assert_eq!(submit(&mut channel, NOW, &[read_request(2, 2)]), 1);
    assert_eq!(submitted_ranges(&below), [(0, 2)]);
    let more = [read_request(3, 4), read_request(4, 6), read_request(5, 8)];
    assert_eq!(submit(&mut channel, NOW, &more), 0);
    below.add_free_entries(9);
    completion(&below, &mut channel, &[1], NOW);
    assert_eq!(submitted_ranges(&below), [(2, 2)]);
    assert_eq!(submit(&mut channel, NOW, &more), 3);
}
