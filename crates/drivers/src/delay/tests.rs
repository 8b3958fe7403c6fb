//! Delays, in simulated time.

use std::sync::Arc;

use tenmil_base::{
    BlockDevice, CompletionBatch, Histogram, Instant, IoChannel, Operation, Random, Request,
    RequestFlags, Span,
};

use super::{Curve, Delay, Delays, LatencySpec, PARTS};
use crate::NullDevice;

const READS: LatencySpec = LatencySpec { mean: Span::from_us(80), p99: Some(Span::from_us(1_000)) };
const WRITES: LatencySpec = LatencySpec { mean: Span::from_us(20), p99: None };
const DELAYS: Delays = Delays { read: READS, write: WRITES };

fn delay(delays: Delays, seed: u64) -> Delay {
    Delay::new(Arc::new(NullDevice::new(512, 1 << 20).unwrap()), delays, seed).unwrap()
}

fn request(operation: Operation, token: u64) -> Request {
    Request {
        token,
        lba: 0,
        operand: 0,
        segment_first: 0,
        blocks: u32::from(operation != Operation::Flush),
        segment_count: 0,
        metadata_count: 0,
        operation,
        flags: RequestFlags::NONE,
    }
}

/// Submits `count` requests one after the other and returns their completion times.
fn latencies(channel: &mut dyn IoChannel, operation: Operation, count: u64) -> Vec<u64> {
    let mut completions = CompletionBatch::with_capacity(1);
    let mut now = Instant { ns: 1_000 };
    let one = |token| {
        let submitted = now;
        assert_eq!(channel.submit(now, &[request(operation, token)], &[]), 1);
        // The first poll takes the completion from below; then only the deadline is left.
        channel.poll(now, &mut completions);
        now = now.max(channel.wake_at());
        channel.poll(now, &mut completions);
        assert_eq!(
            completions.drain().map(|completion| completion.token).collect::<Vec<_>>(),
            [token]
        );
        now.since(submitted).ns
    };
    (0..count).map(one).collect()
}

#[test]
fn a_curve_has_the_mean_and_the_p99_it_was_asked_for() {
    for (mean, p99) in [(80, 1_000), (80, 80), (80, 100), (100, 199), (100, 4_000), (1, 3)] {
        let (mean, p99) = (Span::from_us(mean), Span::from_us(p99));
        let curve = Curve::of(LatencySpec { mean, p99: Some(p99) });
        assert_eq!(curve.at(PARTS / 100 * 99), p99);
        let times: Vec<u64> = (0..PARTS).step_by(10).map(|part| curve.at(part).ns).collect();
        assert!(times.is_sorted(), "{mean} {p99}");
        let shown = times.iter().sum::<u64>() / times.len() as u64;
        assert!(shown.abs_diff(mean.ns) <= mean.ns / 1_000 + 2, "{mean} {p99}: {shown}");
    }
    let even = Curve::of(WRITES);
    assert!((0..PARTS).step_by(1_000).all(|part| even.at(part) == WRITES.mean));
}

#[test]
fn reads_and_writes_take_their_own_times() {
    let delay = delay(DELAYS, 1);
    let mut channel = delay.channel().unwrap();
    for (operation, spread) in [
        (Operation::Read, READS),
        (Operation::Compare, READS),
        (Operation::Verify, READS),
        (Operation::Write, WRITES),
        (Operation::Flush, WRITES),
        (Operation::Deallocate, WRITES),
    ] {
        let mut shown = Histogram::new();
        let drawn = latencies(&mut *channel, operation, 50_000);
        drawn.iter().for_each(|ns| shown.record(*ns));
        let sum: u64 = drawn.iter().sum();
        let mean = sum / 50_000;
        assert!(mean.abs_diff(spread.mean.ns) < spread.mean.ns / 30, "{operation:?}: {mean}");
        let (p99, expected) = (shown.percentile(990_000), spread.p99.unwrap_or(spread.mean).ns);
        assert!(p99.abs_diff(expected) < expected / 10, "{operation:?}: {p99}");
    }
}

#[test]
fn a_seed_repeats_its_delays_and_another_does_not() {
    let run = |seed| {
        let delay = delay(DELAYS, seed);
        let channels = [delay.channel().unwrap(), delay.channel().unwrap()];
        channels.map(|mut channel| latencies(&mut *channel, Operation::Read, 50))
    };
    assert_eq!(run(7), run(7));
    assert_ne!(run(7), run(8));
    let [one, other] = run(7);
    assert_ne!(one, other, "channels have streams of their own");
}

#[test]
fn a_change_is_for_what_comes_after_it() {
    let delay = delay(DELAYS, 1);
    let handle = delay.handle();
    let mut channel = delay.channel().unwrap();
    let mut completions = CompletionBatch::with_capacity(4);
    let now = Instant { ns: 5_000 };
    assert_eq!(channel.submit(now, &[request(Operation::Write, 1)], &[]), 1);
    let slow = LatencySpec { mean: Span::from_ms(3), p99: None };
    handle.set(Delays { write: slow, ..DELAYS }).unwrap();
    assert_eq!(handle.delays().write, slow);
    assert_eq!(channel.submit(now, &[request(Operation::Write, 2)], &[]), 1);
    for (after, token) in [(WRITES.mean, 1), (slow.mean, 2)] {
        let due = now.after(after);
        assert_eq!(channel.poll(Instant { ns: due.ns - 1 }, &mut completions), 0);
        assert_eq!(channel.wake_at(), due);
        assert_eq!(channel.poll(due, &mut completions), 1);
        assert_eq!(completions.drain().next().unwrap().token, token);
    }
}

#[test]
fn times_that_no_distribution_has_are_refused_and_change_nothing() {
    let handle = delay(DELAYS, 1).handle();
    let spread =
        |mean, p99| LatencySpec { mean: Span::from_us(mean), p99: Some(Span::from_us(p99)) };
    for bad in [spread(100, 99), spread(100, 4_001), spread(0, 1)] {
        let error = handle.set(Delays { read: bad, ..DELAYS }).unwrap_err().to_string();
        assert!(error.starts_with("delay: read-p99 is "), "{error}");
        assert!(error.contains("expected from the mean of "), "{error}");
        assert_eq!(handle.delays(), DELAYS);
    }
    handle.set(Delays { read: spread(0, 0), ..DELAYS }).unwrap();
}

#[test]
fn no_delay_is_lost_however_many_are_under_way() {
    let delay = delay(DELAYS, 3);
    let mut channel = delay.channel().unwrap();
    let mut random = Random::new(4);
    let mut completions = CompletionBatch::with_capacity(64);
    let (mut now, mut put, mut got) = (Instant { ns: 1 }, 0_u64, Vec::new());
    while got.len() < 5_000 {
        let count = random.below(40).min(5_000 - put);
        let batch: Vec<Request> = (put..put + count)
            .map(|token| {
                request(
                    [Operation::Read, Operation::Write][usize::from(random.chance(1, 2))],
                    token,
                )
            })
            .collect();
        put += channel.submit(now, &batch, &[]) as u64;
        channel.poll(now, &mut completions);
        now = now.max(channel.wake_at().min(now.after(Span::from_us(5))));
        got.extend(completions.drain().map(|completion| completion.token));
    }
    got.sort_unstable();
    assert!(got.into_iter().eq(0..5_000));
}
