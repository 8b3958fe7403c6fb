//! Delays, in simulated time.

use std::sync::Arc;

use tenmil_base::{
    BlockDevice, CompletionBatch, Histogram, Instant, IoChannel, Operation, Random, Request,
    RequestFlags, Span,
};

use super::{DelayCurve, DelayDevice, DelaySettings, LatencySpec, PARTS};
use crate::NullDevice;

const READS: LatencySpec = LatencySpec { mean: Span::from_us(80), p99: Some(Span::from_us(1_000)) };
const WRITES: LatencySpec = LatencySpec { mean: Span::from_us(20), p99: None };
const DELAYS: DelaySettings = DelaySettings { read: READS, write: WRITES };

fn delay_device(delays: DelaySettings, seed: u64) -> DelayDevice {
    DelayDevice::new(Arc::new(NullDevice::new(512, 1 << 20).unwrap()), delays, seed).unwrap()
}

fn read_request(operation: Operation, token: u64) -> Request {
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
fn measure_latencies(channel: &mut dyn IoChannel, operation: Operation, count: u64) -> Vec<u64> {
    let mut completions = CompletionBatch::with_capacity(1);
    let mut now = Instant { ns: 1_000 };
    let one = |token| {
        let submitted = now;
        assert_eq!(channel.submit(now, &[read_request(operation, token)], &[]), 1);
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
fn delay_curve_has_the_requested_mean_and_p99() {
    for (mean, p99) in [(80, 1_000), (80, 80), (80, 100), (100, 199), (100, 4_000), (1, 3)] {
        let (mean, p99) = (Span::from_us(mean), Span::from_us(p99));
        let curve = DelayCurve::from_spec(LatencySpec { mean, p99: Some(p99) });
        assert_eq!(curve.delay_at_quantile(PARTS / 100 * 99), p99);
        let times: Vec<u64> =
            (0..PARTS).step_by(10).map(|part| curve.delay_at_quantile(part).ns).collect();
        assert!(times.is_sorted(), "{mean} {p99}");
        let shown = times.iter().sum::<u64>() / times.len() as u64;
        assert!(shown.abs_diff(mean.ns) <= mean.ns / 1_000 + 2, "{mean} {p99}: {shown}");
    }
    let even = DelayCurve::from_spec(WRITES);
    assert!((0..PARTS).step_by(1_000).all(|part| even.delay_at_quantile(part) == WRITES.mean));
}

#[test]
fn reads_and_writes_have_separate_delays() {
    let delay = delay_device(DELAYS, 1);
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
        let drawn = measure_latencies(&mut *channel, operation, 50_000);
        drawn.iter().for_each(|ns| shown.record(*ns));
        let sum: u64 = drawn.iter().sum();
        let mean = sum / 50_000;
        assert!(mean.abs_diff(spread.mean.ns) < spread.mean.ns / 30, "{operation:?}: {mean}");
        let (p99, expected) = (shown.percentile(990_000), spread.p99.unwrap_or(spread.mean).ns);
        assert!(p99.abs_diff(expected) < expected / 10, "{operation:?}: {p99}");
    }
}

#[test]
fn same_seed_gives_the_same_delays() {
    let run = |seed| {
        let delay = delay_device(DELAYS, seed);
        let channels = [delay.channel().unwrap(), delay.channel().unwrap()];
        channels.map(|mut channel| measure_latencies(&mut *channel, Operation::Read, 50))
    };
    assert_eq!(run(7), run(7));
    assert_ne!(run(7), run(8));
    let [one, other] = run(7);
    assert_ne!(one, other, "channels have streams of their own");
}

#[test]
fn delay_change_applies_to_later_requests() {
    let delay = delay_device(DELAYS, 1);
    let handle = delay.control();
    let mut channel = delay.channel().unwrap();
    let mut completions = CompletionBatch::with_capacity(4);
    let now = Instant { ns: 5_000 };
    assert_eq!(channel.submit(now, &[read_request(Operation::Write, 1)], &[]), 1);
    let slow = LatencySpec { mean: Span::from_ms(3), p99: None };
    handle.set_delays(DelaySettings { write: slow, ..DELAYS }).unwrap();
    assert_eq!(handle.delays().write, slow);
    assert_eq!(channel.submit(now, &[read_request(Operation::Write, 2)], &[]), 1);
    for (after, token) in [(WRITES.mean, 1), (slow.mean, 2)] {
        let due = now.after(after);
        assert_eq!(channel.poll(Instant { ns: due.ns - 1 }, &mut completions), 0);
        assert_eq!(channel.wake_at(), due);
        assert_eq!(channel.poll(due, &mut completions), 1);
        assert_eq!(completions.drain().next().unwrap().token, token);
    }
}

#[test]
fn invalid_delay_specs_are_rejected() {
    let handle = delay_device(DELAYS, 1).control();
    let spread =
        |mean, p99| LatencySpec { mean: Span::from_us(mean), p99: Some(Span::from_us(p99)) };
    for bad in [spread(100, 99), spread(100, 4_001), spread(0, 1)] {
        let error =
            handle.set_delays(DelaySettings { read: bad, ..DELAYS }).unwrap_err().to_string();
        assert!(error.starts_with("delay: read-p99 is "), "{error}");
        assert!(error.contains("expected from the mean of "), "{error}");
        assert_eq!(handle.delays(), DELAYS);
    }
    handle.set_delays(DelaySettings { read: spread(0, 0), ..DELAYS }).unwrap();
}

#[test]
fn every_delayed_request_completes() {
    let delay = delay_device(DELAYS, 3);
    let mut channel = delay.channel().unwrap();
    let mut random = Random::new(4);
    let mut completions = CompletionBatch::with_capacity(64);
    let (mut now, mut put, mut got) = (Instant { ns: 1 }, 0_u64, Vec::new());
    while got.len() < 5_000 {
        let count = random.below(40).min(5_000 - put);
        let batch: Vec<Request> = (put..put + count)
            .map(|token| {
                read_request(
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
