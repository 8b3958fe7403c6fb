//! Cost of a message between two polling threads, compared with the cost of moving a cache line:
//! `cargo bench -p tenmil-linux --bench mailbox [-- CORES]`.
//!
//! Both are measured alternately by the same pair of threads, so that disturbances affect both.

#![expect(clippy::unwrap_used, reason = "a benchmark may")]

use std::hint::spin_loop;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tenmil_base::Span;
use tenmil_linux::{Clock, CpuList, NamedThread, Receiver, Sender, mailbox};

/// Size of a reactor message.
type BenchMessage = [u64; 3];

/// Counter that shares its cache lines with nothing.
#[derive(Default)]
#[repr(align(128))]
struct SharedCounter(AtomicU64);

/// Rounds are short compared with scheduler time slices, so that most of them are undisturbed.
const ROUNDS: usize = 1_000;
const TRIPS: u64 = 500;
const MESSAGES: u64 = 20_000;
const CAPACITY: usize = 1_024;
const BATCHES: [usize; 5] = [1, 4, 8, 32, 128];

fn main() {
    let asked = std::env::args().skip(1).find_map(|text| CpuList::parse(&text).ok());
    let cores: Vec<u32> = asked.unwrap_or_else(CpuList::allowed_cpus).iter().collect();
    let &[here, there, ..] = &cores[..] else {
        println!("mailbox: two cores are wanted, this process may use {}", cores.len());
        return;
    };
    println!("cores {here} and {there}, messages of {} bytes", size_of::<BenchMessage>());
    let clock = Clock::start();
    bench_round_trips(&clock, here, there);
    for batch in BATCHES {
        bench_one_way(&clock, here, there, batch);
    }
}

/// Starts a thread on a core, and prints a note if it could not be pinned.
fn start_thread<T: Send + 'static>(
    name: &str,
    core: u32,
    body: impl FnOnce() -> T + Send + 'static,
) -> NamedThread<T> {
    let thread = NamedThread::spawn(name, Some(core), move |_| body()).unwrap();
    if let Err(error) = thread.pin_result() {
        println!("mailbox: {error}");
    }
    thread
}

fn bench_round_trips(clock: &Clock, here: u32, there: u32) {
    let lines: Arc<[SharedCounter; 2]> = Arc::default();
    let (to_there, from_here) = mailbox(64);
    let (to_here, from_there) = mailbox(64);
    let theirs = Arc::clone(&lines);
    let echo = start_thread("echo", there, move || {
        let mut from_here = from_here;
        for round in 0..ROUNDS as u64 {
            echo_counts(&theirs, round * TRIPS);
            echo_messages(&to_here, &mut from_here);
        }
    });
    let clock = *clock;
    let measure = start_thread("measure", here, move || {
        let mut from_there = from_there;
        let mut bare = Vec::with_capacity(ROUNDS);
        let mut message = Vec::with_capacity(ROUNDS);
        for round in 0..ROUNDS as u64 {
            let begun = clock.now();
            exchange_counts(&lines, round * TRIPS);
            let middle = clock.now();
            exchange_messages(&to_there, &mut from_there);
            message.push(clock.now().since(middle));
            bare.push(middle.since(begun));
        }
        (bare, message)
    });
    let (bare, message) = measure.join();
    echo.join();
    let (bare, message) = (median_and_range(bare, TRIPS), median_and_range(message, TRIPS));
    println!("round trip, bare line   {bare}");
    println!("round trip, message     {message}");
    println!("ratio of medians        {:.2} (wanted: below 3)", message.median / bare.median);
}

fn exchange_counts(lines: &[SharedCounter; 2], first: u64) {
    for count in first + 1..=first + TRIPS {
        lines[0].0.store(count, Ordering::Release);
        while lines[1].0.load(Ordering::Acquire) != count {
            spin_loop();
        }
    }
}

fn echo_counts(lines: &[SharedCounter; 2], first: u64) {
    for count in first + 1..=first + TRIPS {
        while lines[0].0.load(Ordering::Acquire) != count {
            spin_loop();
        }
        lines[1].0.store(count, Ordering::Release);
    }
}

fn receive_blocking(from: &mut Receiver<BenchMessage>) -> BenchMessage {
    loop {
        match from.receive() {
            Some(message) => return message,
            None => spin_loop(),
        }
    }
}

fn exchange_messages(to: &Sender<BenchMessage>, from: &mut Receiver<BenchMessage>) {
    for number in 0..TRIPS {
        to.send([number, 0, 0]).unwrap();
        assert_eq!(receive_blocking(from)[0], number);
    }
}

fn echo_messages(to: &Sender<BenchMessage>, from: &mut Receiver<BenchMessage>) {
    for _ in 0..TRIPS {
        to.send(receive_blocking(from)).unwrap();
    }
}

fn bench_one_way(clock: &Clock, here: u32, there: u32, batch: usize) {
    let (to_there, from_here) = mailbox(CAPACITY);
    let sender = start_thread("sender", here, move || {
        for _ in 0..ROUNDS {
            send_numbers(&to_there, batch);
        }
    });
    let clock = *clock;
    let receiver = start_thread("receiver", there, move || {
        let mut from_here = from_here;
        let mut rounds = Vec::with_capacity(ROUNDS);
        let mut last = clock.now();
        for _ in 0..ROUNDS {
            receive_numbers(&mut from_here, batch);
            let now = clock.now();
            rounds.push(now.since(last));
            last = now;
        }
        rounds
    });
    let rounds = receiver.join();
    sender.join();
    let each = median_and_range(rounds, MESSAGES);
    println!("one way, batches of {batch:<3} {each}, {:.1} M/s", 1e3 / each.median);
}

fn send_numbers(to: &Sender<BenchMessage>, batch: usize) {
    let mut run = Vec::with_capacity(batch);
    let mut next = 0;
    while next < MESSAGES || !run.is_empty() {
        let end = MESSAGES.min(next + (batch - run.len()) as u64);
        run.extend((next..end).map(|number| [number, 0, 0]));
        next = end;
        if to.send_many(&mut run) == 0 {
            spin_loop();
        }
    }
}

fn receive_numbers(from: &mut Receiver<BenchMessage>, batch: usize) {
    let mut next = 0;
    let mut batch = Vec::with_capacity(batch);
    while next < MESSAGES {
        let left = usize::try_from(MESSAGES - next).unwrap();
        let max = batch.capacity().min(left);
        if from.receive_many(&mut batch, max) == 0 {
            spin_loop();
        }
        for [number, ..] in batch.drain(..) {
            assert_eq!(number, next);
            next += 1;
        }
    }
}

/// Nanoseconds per operation: interquartile range of the rounds, and the minimum.
struct MedianAndRange {
    median: f64,
    quarters: [f64; 2],
    best: f64,
}

#[expect(clippy::cast_precision_loss, reason = "shown to people")]
fn median_and_range(mut rounds: Vec<Span>, count: u64) -> MedianAndRange {
    rounds.sort_unstable();
    let at = |part: usize| rounds[(rounds.len() - 1) * part / 4].ns as f64 / count as f64;
    MedianAndRange { median: at(2), quarters: [at(1), at(3)], best: at(0) }
}

impl std::fmt::Display for MedianAndRange {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { median, quarters: [low, high], best } = self;
        write!(out, "{median:6.1} ns (half in {low:.1}..{high:.1}, best {best:.1})")
    }
}
