//! Rate limits in simulated time.

use std::num::NonZeroU64;

use tenmil_base::{
    BlockDevice, CompletionBatch, Instant, IoChannel, Operation, Random, Request, RequestFlags,
    Span,
};

use crate::NullDevice;
use tenmil_block::{IoClass, QosLimiter, QosLimits, RECHECK_INTERVAL, RateLimit};

const START: Instant = Instant { ns: 3_000_000_000 };
const SECONDS: u64 = 5;

/// A client with more requests than its limits allow: it submits batches and sleeps until the time it is
/// given.
struct QosClient {
    channel: Box<dyn IoChannel>,
    random: Random,
    batch: usize,
    blocks: Vec<u32>,
    operations: Vec<Operation>,
    /// Requests that the channel has not accepted yet.
    waiting: Vec<Request>,
    wake_at: Instant,
    requests: u64,
    bytes: u64,
    completed: u64,
}

fn iops_limit(count: u64) -> RateLimit {
    RateLimit { iops: NonZeroU64::new(count), bytes: None }
}

fn bandwidth_limit(count: u64) -> RateLimit {
    RateLimit { iops: None, bytes: NonZeroU64::new(count) }
}

fn total_limit(rate: RateLimit) -> QosLimits {
    QosLimits { total: rate, ..QosLimits::default() }
}

impl QosClient {
    fn new(limiter: &QosLimiter, class: IoClass, seed: u64) -> Self {
        let null = NullDevice::new(512, 1 << 30).unwrap().channel().unwrap();
        Self {
            channel: Box::new(limiter.wrap_channel(null, class)),
            random: Random::new(seed),
            batch: 32,
            blocks: vec![8],
            operations: vec![Operation::Read],
            waiting: Vec::new(),
            wake_at: START,
            requests: 0,
            bytes: 0,
            completed: 0,
        }
    }

    fn random_request(&mut self) -> Request {
        let mut one_of = |count: usize| usize::try_from(self.random.below(count as u64)).unwrap();
        let blocks = self.blocks[one_of(self.blocks.len())];
        let operation = self.operations[one_of(self.operations.len())];
        Request {
            token: 0,
            lba: 0,
            operand: 0,
            segment_first: 0,
            blocks,
            segment_count: 0,
            metadata_count: 0,
            operation,
            flags: RequestFlags::NONE,
        }
    }

    /// One iteration: submits as long as any request is accepted, and computes when to wake.
    fn poll_and_submit(&mut self, now: Instant) {
        let mut completions = CompletionBatch::with_capacity(self.batch);
        loop {
            self.completed += self.channel.poll(now, &mut completions) as u64;
            completions.clear();
            while self.waiting.len() < self.batch {
                let request = self.random_request();
                self.waiting.push(request);
            }
            let taken = self.channel.submit(now, &self.waiting, &[]);
            for request in self.waiting.drain(..taken) {
                self.requests += 1;
                self.bytes += u64::from(request.blocks) * 512;
            }
            if taken == 0 {
                break;
            }
        }
        self.wake_at = self.channel.wake_at();
        assert!(
            self.wake_at > now && self.wake_at <= now.after(RECHECK_INTERVAL),
            "told when to wake"
        );
    }
}

/// Runs clients until `end`; each wakes at its time or a little later.
fn run_clients(programs: &mut [QosClient], end: Instant) {
    let mut jitter = Random::new(7);
    loop {
        let next =
            programs.iter().enumerate().min_by_key(|(_, program)| program.wake_at).unwrap().0;
        let now = programs[next].wake_at;
        if now >= end {
            return;
        }
        programs[next].poll_and_submit(now);
        let late = jitter.below(50_000);
        programs[next].wake_at = programs[next].wake_at.after(Span { ns: late });
    }
}

fn run_end() -> Instant {
    START.after(Span::from_secs(SECONDS))
}

/// Asserts that `found` is within three per cent of `expected`.
#[track_caller]
fn assert_close(found: u64, expected: u64, what: &str) {
    assert!(found.abs_diff(expected) * 100 <= expected * 3, "{what}: {found} of {expected}");
}

#[test]
fn iops_limit_holds_for_any_number_of_channels() {
    for rate in [1, 7, 40, 1_000, 50_000] {
        for channels in [1, 2, 8] {
            let limiter = QosLimiter::new(total_limit(iops_limit(rate)));
            let program = |seed| QosClient::new(&limiter, IoClass::Foreground, seed);
            let mut programs: Vec<QosClient> = (0..channels).map(program).collect();
            run_clients(&mut programs, run_end());
            let sum = programs.iter().map(|program| program.requests).sum();
            assert_close(sum, rate * SECONDS, &format!("{rate} by {channels}"));
            let fair = sum / channels;
            for program in programs.iter().filter(|_| fair > 50) {
                let share = program.requests;
                assert!(share.abs_diff(fair) * 10 <= fair, "{rate} by {channels}: {share}, {fair}");
            }
        }
    }
}

#[test]
fn bandwidth_limit_holds_for_mixed_sizes() {
    for (rate, blocks) in [
        (10_000_000, vec![8]),
        (10_000_000, vec![1, 8, 64, 256]),
        // A request of a megabyte exceeds every slice, and is admitted all the same.
        (10_000_000, vec![2048]),
        (3_000_000_000, vec![1, 8, 2048]),
        (500_000, vec![1, 8]),
    ] {
        for channels in [1, 3, 8] {
            let limiter = QosLimiter::new(total_limit(bandwidth_limit(rate)));
            let mut programs: Vec<QosClient> = (0..channels)
                .map(|seed| {
                    let program = QosClient::new(&limiter, IoClass::Foreground, seed);
                    QosClient { blocks: blocks.clone(), ..program }
                })
                .collect();
            run_clients(&mut programs, run_end());
            let sum: u64 = programs.iter().map(|program| program.bytes).sum();
            assert_close(sum, rate * SECONDS, &format!("{rate} by {channels} of {blocks:?}"));
        }
    }
}

#[test]
fn read_and_write_limits_apply_beside_the_total_limit() {
    let both = vec![Operation::Read, Operation::Write];
    for (reads, writes, most, expected) in [
        // Reads and writes alternate evenly and in order, so the tighter limit determines both rates.
        (1_000, 3_000, None, 2_000),
        (4_000, 4_000, NonZeroU64::new(3_000), 3_000),
        (10_000, 500, None, 1_000),
    ] {
        let total = RateLimit { iops: most, bytes: None };
        let limiter = QosLimiter::new(QosLimits {
            total,
            reads: iops_limit(reads),
            writes: iops_limit(writes),
            ..QosLimits::default()
        });
        let program = QosClient::new(&limiter, IoClass::Foreground, 1);
        let mut programs = [QosClient { operations: both.clone(), ..program }];
        run_clients(&mut programs, run_end());
        let found = programs[0].requests;
        assert!(
            found.abs_diff(expected * SECONDS) * 20 <= expected * SECONDS,
            "{found} {expected}"
        );
    }
    let limiter = QosLimiter::new(QosLimits { reads: iops_limit(100), ..QosLimits::default() });
    let mut writer = QosClient::new(&limiter, IoClass::Foreground, 1);
    writer.operations = vec![Operation::Write];
    let batch = [writer.random_request(); 64];
    assert_eq!(writer.channel.submit(START, &batch, &[]), 64, "no limit on writes");
}

#[test]
fn flush_is_not_rate_limited() {
    let limiter = QosLimiter::new(total_limit(iops_limit(1)));
    let mut program = QosClient::new(&limiter, IoClass::Foreground, 1);
    program.poll_and_submit(START);
    let flush = Request { operation: Operation::Flush, ..program.random_request() };
    assert_eq!(program.channel.submit(START, &[flush; 3], &[]), 3);
}

#[test]
fn limit_change_takes_effect_within_100_ms() {
    for (before, after) in
        [(iops_limit(1), iops_limit(1_000)), (bandwidth_limit(1_000), bandwidth_limit(100_000_000))]
    {
        let limiter = QosLimiter::new(total_limit(before));
        let program = |seed| QosClient::new(&limiter, IoClass::Foreground, seed);
        let mut programs: Vec<QosClient> = (0..4).map(program).collect();
        let change = START.after(Span::from_ms(2_345));
        run_clients(&mut programs, change);
        limiter.set(change, total_limit(after));
        assert_eq!(limiter.limits(), total_limit(after));
        let count = |programs: &[QosClient]| programs.iter().map(|one| one.requests).sum::<u64>();
        let old = count(&programs);
        run_clients(&mut programs, change.after(Span::from_ms(100)));
        assert!(programs.iter().all(|program| program.requests > old / 4 + 5), "all are awake");
        let settled = count(&programs);
        run_clients(&mut programs, change.after(Span::from_ms(1_100)));
        let expected = if after.iops.is_some() { 1_000 } else { 100_000_000 / 4096 };
        assert_close(count(&programs) - settled, expected, "the new rate");

        limiter.set(change.after(Span::from_ms(1_100)), total_limit(before));
        let fast = count(&programs);
        run_clients(&mut programs, change.after(Span::from_ms(1_200)));
        let since = count(&programs) - fast;
        assert!(since <= 4 + expected / 500, "{since} after the limit was lowered");

        limiter.set(change.after(Span::from_ms(1_200)), QosLimits::default());
        let free = programs[0].channel.submit(change.after(Span::from_ms(1_250)), &[], &[]);
        assert_eq!(free, 0);
        let request = programs[0].random_request();
        let late = change.after(Span::from_ms(1_251));
        assert_eq!(programs[0].channel.submit(late, &[request; 100], &[]), 100, "no limit");
    }
}

#[test]
fn limit_changes_under_load_keep_the_rate_exact() {
    let limiter = QosLimiter::new(total_limit(iops_limit(500)));
    let program = |seed| QosClient::new(&limiter, IoClass::Foreground, seed);
    let mut programs: Vec<QosClient> = (0..3).map(program).collect();
    let mut now = START;
    let mut expected = 0;
    for change in 0..1_000_u64 {
        let rate = [500, 3_000, 1_000, 400][usize::try_from(change % 4).unwrap()];
        limiter.set(now, total_limit(iops_limit(rate)));
        now = now.after(Span::from_ms(5));
        expected += rate * 5;
        run_clients(&mut programs, now);
    }
    let taken: u64 = programs.iter().map(|program| program.requests).sum();
    let expected = expected / 1_000;
    // A client that waits at the old rate sees the new one when it wakes.
    let bounds = expected * 90 / 100..expected * 102 / 100;
    assert!(bounds.contains(&taken), "{taken} of {expected}");
    for program in &mut programs {
        let mut completions = CompletionBatch::with_capacity(64);
        program.completed += program.channel.poll(now, &mut completions) as u64;
        assert_eq!(program.completed, program.requests, "each is answered once");
    }
}

#[test]
fn background_class_gets_the_surplus_and_a_minimum() {
    let limiter = QosLimiter::new(total_limit(iops_limit(1_000)));
    let mut programs = vec![
        QosClient::new(&limiter, IoClass::Background, 1),
        QosClient::new(&limiter, IoClass::Foreground, 2),
        QosClient::new(&limiter, IoClass::Foreground, 3),
    ];
    run_clients(&mut programs, run_end());
    let [background, one, two] = [0, 1, 2].map(|index: usize| programs[index].requests);
    assert_close(background + one + two, 1_000 * SECONDS, "the limit holds for all together");
    assert!((200..=300).contains(&background), "{background}: the floor, and no more");

    // Alone, it gets the whole rate.
    programs.truncate(1);
    let before = programs[0].requests;
    run_clients(&mut programs, run_end().after(Span::from_secs(SECONDS)));
    assert_close(programs[0].requests - before, 1_000 * SECONDS, "what is left");
}

#[test]
fn background_class_yields_to_a_light_foreground() {
    let limiter = QosLimiter::new(total_limit(iops_limit(1_000)));
    let mut background = [QosClient::new(&limiter, IoClass::Background, 1)];
    let mut foreground = QosClient::new(&limiter, IoClass::Foreground, 2);
    let mut waited = 0;
    for step in 1..=500_u64 {
        let now = START.after(Span::from_us(step * 10_007));
        run_clients(&mut background, now);
        // An occasional request waits for at most one slice of the background.
        let request = [foreground.random_request()];
        let mut at = now;
        while foreground.channel.submit(at, &request, &[]) == 0 {
            at = foreground.channel.wake_at();
            waited += 1;
        }
        assert!(at <= now.after(Span::from_ms(2)), "{at:?}");
        let mut completions = CompletionBatch::with_capacity(4);
        foreground.channel.poll(at, &mut completions);
    }
    assert!(waited > 0, "the background was there");
    assert_close(background[0].requests + 500, 1_000 * SECONDS, "the rest");
}
