//! Cost of a message between two polling reactors, compared with the cost of moving a cache line:
//! `cargo bench -p tenmil-reactor --bench message`.
//!
//! The cache line and the messages are measured in alternating rounds, between the same cores.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, OnceLock};

use tenmil_base::{Instant, Span};
use tenmil_linux::{Clock, CpuList, NamedThread};
use tenmil_reactor::{
    Context, Message, PollMode, PollResult, Poller, PollerBuilder, PollerId, PollerWake,
    ReactorOptions, Reactors, ThreadBuilder, ThreadHandle,
};

/// Counter that shares its cache lines with nothing.
#[derive(Default)]
#[repr(align(128))]
struct PaddedCounter(AtomicU64);

const ROUNDS: usize = 60;
const TRIPS: u64 = 5_000;
const MESSAGES: u64 = 1_000_000;
const BATCH: usize = 128;

fn main() {
    let cores: Vec<u32> = CpuList::allowed_cpus().iter().collect();
    let &[here, there, ..] = &cores[..] else {
        println!("message: two cores are wanted, this process may use {}", cores.len());
        return;
    };
    let clock = Clock::start();
    let (mut bare, mut messages, mut one_way) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        bare.push(bench_mailbox(here, there, &clock).ns / TRIPS);
        let (trips, stream) = bench_reactor_messages(&[here, there], &clock);
        messages.push(trips.ns / TRIPS);
        one_way.push(stream.ns * 1_000 / MESSAGES);
    }
    let (bare, message, one_way) = (median_ns(bare), median_ns(messages), median_ns(one_way));
    println!("medians of {ROUNDS} rounds, cores {here} and {there}");
    println!("round trip, bare line                {bare} ns");
    println!("round trip, message and its answer   {message} ns");
    println!(
        "ratio                                {:.2} (wanted: below 3)",
        ns_per_message(message, bare)
    );
    println!(
        "one way, batches of {BATCH}              {:.1} ns a message, {:.1} M/s",
        ns_per_message(one_way, 1_000),
        ns_per_message(1_000_000, one_way)
    );
}

fn bench_mailbox(here: u32, there: u32, clock: &Clock) -> Span {
    let lines: Arc<[PaddedCounter; 2]> = Arc::default();
    let theirs = Arc::clone(&lines);
    let echo = NamedThread::spawn("echo", Some(there), move |_| {
        for count in 1..=TRIPS {
            await_count(&theirs[0], count);
            theirs[1].0.store(count, Ordering::Release);
        }
    });
    let clock = *clock;
    let ask = NamedThread::spawn("ask", Some(here), move |_| {
        // The first round trip waits for the other thread to start.
        bench_cache_line_round_trip(&lines, 1);
        let begun = clock.now();
        (2..=TRIPS).for_each(|count| bench_cache_line_round_trip(&lines, count));
        clock.now().since(begun)
    });
    echo.expect("a thread").join();
    ask.expect("a thread").join()
}

fn bench_cache_line_round_trip(lines: &[PaddedCounter; 2], count: u64) {
    lines[0].0.store(count, Ordering::Release);
    await_count(&lines[1], count);
}

fn await_count(line: &PaddedCounter, count: u64) {
    while line.0.load(Ordering::Acquire) != count {
        spin_loop();
    }
}

/// The receiver, once it is known.
type MessageTarget = Arc<OnceLock<ThreadHandle>>;

/// Sends requests, and measures the time from the first request to the last reply.
struct RequestPoller {
    whom: MessageTarget,
    left: u64,
    begun: Instant,
    clock: Clock,
    tell: Sender<Span>,
}

/// Replies, or counts one-way messages and measures the time from the first to the last.
struct ReplyPoller {
    whom: MessageTarget,
    counted: u64,
    begun: Instant,
    clock: Clock,
    tell: Sender<Span>,
}

/// Sends as many messages as fit.
struct OneWayPoller {
    whom: ThreadHandle,
    left: u64,
    run: Vec<Message>,
}

const ONLY: PollerId = PollerId::of_builder_index(0);
const QUESTION: u64 = 0;
const STREAMED: u64 = 1;

fn data_message(kind: u64) -> Message {
    Message::Data { poller: ONLY, words: [kind, 0] }
}

impl Poller for RequestPoller {
    fn poll(&mut self, _: &mut Context<'_>) -> PollResult {
        PollResult::Idle
    }

    fn handle_message(&mut self, _: [u64; 2], _: &mut Context<'_>) {
        match self.left {
            0 => {
                let _ = self.tell.send(self.clock.now().since(self.begun));
                return;
            }
            TRIPS => self.begun = self.clock.now(),
            _ => {}
        }
        self.left -= 1;
        send_single_message(&self.whom);
    }
}

impl Poller for ReplyPoller {
    fn poll(&mut self, _: &mut Context<'_>) -> PollResult {
        PollResult::Idle
    }

    fn handle_message(&mut self, [kind, _]: [u64; 2], _: &mut Context<'_>) {
        if kind == QUESTION {
            return send_single_message(&self.whom);
        }
        if self.counted == 0 {
            self.begun = self.clock.now();
        }
        self.counted += 1;
        if self.counted == MESSAGES {
            let _ = self.tell.send(self.clock.now().since(self.begun));
        }
    }
}

impl Poller for OneWayPoller {
    fn poll(&mut self, _: &mut Context<'_>) -> PollResult {
        while self.run.len() < BATCH && self.left > 0 {
            self.run.push(data_message(STREAMED));
            self.left -= 1;
        }
        PollResult::from_count(self.whom.send_many(&mut self.run))
    }

    fn is_busy(&self) -> Option<bool> {
        Some(self.left > 0 || !self.run.is_empty())
    }
}

fn send_single_message(whom: &MessageTarget) {
    let sent = whom.get().map(|whom| whom.send(data_message(QUESTION)));
    assert!(matches!(sent, Some(Ok(()))), "there is room for one");
}

/// Total time of all round trips, and of all one-way messages.
fn bench_reactor_messages(cores: &[u32; 2], clock: &Clock) -> (Span, Span) {
    let options = ReactorOptions { poll: PollMode::Always, ..ReactorOptions::default() };
    let cores: CpuList = cores.iter().copied().collect();
    let reactors = Reactors::start_on_cores(&cores, &options, clock).expect("two reactors");
    let places: Vec<_> = reactors.registry().reactors().collect();
    let spawn = |name, place: usize, poller: PollerBuilder| {
        let plan = ThreadBuilder::new(name)
            .on_reactor(places[place])
            .mailbox_size(4096)
            .add_poller(poller);
        reactors.spawn(plan).expect("a light thread")
    };
    let (tell, reported) = channel();
    let (clock, begun) = (*clock, Instant::default());
    let (asker, answerer) = (MessageTarget::default(), MessageTarget::default());
    let ask = RequestPoller {
        whom: Arc::clone(&answerer),
        left: TRIPS,
        begun,
        clock,
        tell: tell.clone(),
    };
    let asking =
        spawn("ask", 0, PollerBuilder::polled_each_iteration("ask", PollerWake::Messages, ask));
    let answer = ReplyPoller { whom: Arc::clone(&asker), counted: 0, begun, clock, tell };
    let answering = spawn(
        "answer",
        1,
        PollerBuilder::polled_each_iteration("answer", PollerWake::Messages, answer),
    );
    let is_new = asker.set(asking.clone()).is_ok() && answerer.set(answering.clone()).is_ok();
    assert!(is_new && asking.send(data_message(QUESTION)).is_ok());
    let trips = reported.recv().expect("answers");
    let stream = OneWayPoller { whom: answering, left: MESSAGES, run: Vec::with_capacity(BATCH) };
    spawn(
        "stream",
        0,
        PollerBuilder::polled_each_iteration(
            "stream",
            PollerWake::OnlyWhileBusy("it is all its own"),
            stream,
        ),
    );
    let one_way = reported.recv().expect("a count");
    reactors.stop();
    (trips, one_way)
}

fn median_ns(mut values: Vec<u64>) -> u64 {
    values.sort_unstable();
    values[values.len() / 2]
}

#[expect(clippy::cast_precision_loss, reason = "shown to people")]
fn ns_per_message(value: u64, by: u64) -> f64 {
    value as f64 / by as f64
}
