//! I/Os with gaps between them from a microsecond to 50 milliseconds, each scale as likely as the
//! next, on reactors that sleep when they have nothing to do: so host and device are found at work,
//! falling asleep and asleep. None may be late.

#![expect(clippy::unwrap_used, reason = "a test may")]

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use tenmil_base::{
    CompletionBatch, Histogram, Instant, IoChannel, IoStatus, Operation, Random, Request,
    RequestFlags, Segment, Span,
};
use tenmil_bench::perf::perf_options::FastPathSwitches;
use tenmil_devices::EmuSpec;
use tenmil_devices::emu::{EmuPlan, EmulatedSsds};
use tenmil_linux::{Clock, CpuList, NamedThread, StopFlag};
use tenmil_reactor::{
    Context, PollResult, Poller, PollerBuilder, PollerWake, ReactorOptions, Reactors, ThreadBuilder,
};

/// One SSD and one light thread each.
const URIS: [&str; 4] =
    ["emu:null", "emu:ram?size=1m", "emu:model:p4800x?size=1m", "emu:model:p4600?size=1m"];

/// The shortest gap, and how many times as long the longest one is.
const GAP_MIN: Span = Span::from_us(1);
const GAP_SCALE: f64 = 50_000.0;

/// What comes later than this after it was due was forgotten for a while.
const LATE: Span = Span::from_ms(100);

/// How often progress is told, and how often it may be told in vain.
const TELL: Duration = Duration::from_secs(1);
const STUCK: u32 = 20;

/// How long the bystander rests.
const BYSTANDER: Span = Span::from_ms(1);

const BUFFER_BYTES: u32 = 4096;

#[test]
fn no_io_is_late_for_any_preceding_gap() {
    run_ios_with_random_gaps(2_000);
}

/// Two minutes: `.ci/nightly gaps`; with `short`, a hundredth of it.
#[test]
#[ignore = "takes two minutes"]
fn none_of_a_hundred_thousand_ios_is_late() {
    let is_short = std::env::var_os("TENMIL_GAPS_SHORT").is_some();
    run_ios_with_random_gaps(if is_short { 1_000 } else { 100_000 });
}

fn run_ios_with_random_gaps(count: u64) {
    let clock = Clock::start();
    let specs: Vec<EmuSpec> = URIS.map(|uri| uri.parse().unwrap()).into();
    let techniques = &FastPathSwitches::default();
    let plan = EmuPlan {
        specs: &specs,
        queue_pairs: 1,
        depth: 1,
        buffer_bytes: u64::from(BUFFER_BYTES),
        techniques,
        device_cores: &[None, None],
        yields: true,
        interrupts: true,
        fills: false,
        seed: 1,
    };
    let mut emulated = EmulatedSsds::start(&plan, &clock).unwrap();
    let cores: CpuList = CpuList::allowed_cpus().iter().take(2).collect();
    let reactors = Reactors::start_on_cores(&cores, &ReactorOptions::default(), &clock).unwrap();
    let witness = NamedThread::spawn("witness", None, move |stop: &StopFlag| {
        measure_worst_oversleep(stop, clock)
    });
    let (tell, reported) = channel();
    let done = Arc::new(AtomicU64::new(0));
    for (seed, uri) in (0..).zip(URIS) {
        let ssd = usize::try_from(seed).unwrap();
        let queue = emulated.create_queue_pair(ssd, 1, techniques, &clock).unwrap();
        let woken_by = PollerWake::from_source(queue.wake_source()).unwrap();
        let lane = LatencyPoller {
            queue,
            buffer: emulated.allocate(ssd, BUFFER_BYTES).unwrap(),
            random: Random::new(seed),
            due: clock.now(),
            is_pending: false,
            left: count / URIS.len() as u64,
            lateness: Histogram::new(),
            completions: CompletionBatch::with_capacity(1),
            done: Arc::clone(&done),
            tell: tell.clone(),
        };
        let plan = ThreadBuilder::new(uri)
            .add_poller(PollerBuilder::polled_each_iteration("gaps", woken_by, lane));
        reactors.spawn(plan).unwrap();
    }
    drop(tell);

    let (mut lateness, mut progress) = (Histogram::new(), GapProgress::new(&done, count));
    loop {
        match reported.recv_timeout(TELL) {
            Ok(lane) => lateness.merge(&lane),
            Err(RecvTimeoutError::Timeout) => progress.print_or_fail_if_stuck(),
            Err(RecvTimeoutError::Disconnected) => break,
        }
        emulated.poll_controllers(clock.now()).unwrap();
    }
    let sleeps: u64 = reactors.sample().reactors.iter().map(|reactor| reactor.sleeps).sum();
    reactors.stop();
    emulated.shut_down(&clock);
    let overslept = witness.unwrap().stop();
    let [half, most, nearly_all] =
        [500_000, 990_000, 999_900].map(|part| Span { ns: lateness.percentile(part) });
    let latest = Span { ns: lateness.max() };
    println!(
        "\n{count} I/Os, from when each was due: p50 {half}, p99 {most}, p99.99 {nearly_all}, \
         max {latest}; reactors slept {sleeps} times; a thread that only rests overslept by up to \
         {overslept}"
    );
    assert_eq!(lateness.count(), count, "some were never answered");
    // What the machine does to anybody is no fault of ours.
    let limit = LATE.ns + overslept.ns;
    assert!(latest.ns < limit, "one came {latest} after it was due, {overslept} for a bystander");
    assert!(sleeps > count / 4, "{sleeps} sleeps are no test");
}

/// A bystander, who tells what the machine does to anybody: rests until it is stopped, and returns by
/// how much it has overslept at most.
fn measure_worst_oversleep(stop: &StopFlag, clock: Clock) -> Span {
    let mut worst = Span::default();
    while !stop.is_stopped() {
        let due = clock.now().after(BYSTANDER);
        tenmil_linux::named_thread::sleep(BYSTANDER);
        worst = worst.max(clock.now().since(due));
    }
    worst
}

/// One I/O at a time, each a gap after the answer to the one before.
struct LatencyPoller {
    queue: Box<dyn IoChannel>,
    buffer: Segment,
    random: Random,
    /// When the next I/O begins, or the one in flight was to begin.
    due: Instant,
    is_pending: bool,
    left: u64,
    /// From when an I/O was due to when its answer was seen.
    lateness: Histogram,
    completions: CompletionBatch,
    done: Arc<AtomicU64>,
    tell: Sender<Histogram>,
}

impl LatencyPoller {
    fn submit(&mut self, now: Instant) {
        let request = Request {
            token: self.left,
            lba: 0,
            operand: 0,
            blocks: BUFFER_BYTES / self.queue.limits().block_size,
            segment_first: 0,
            segment_count: 1,
            metadata_count: 0,
            operation: if self.random.chance(1, 2) { Operation::Read } else { Operation::Write },
            flags: RequestFlags::NONE,
        };
        assert_eq!(self.queue.submit(now, &[request], &[self.buffer]), 1);
        self.is_pending = true;
    }

    /// Takes the answer, and draws the gap after it.
    fn take(&mut self, context: &mut Context<'_>) {
        let now = context.now();
        let completions: Vec<_> = self
            .completions
            .drain()
            .map(|completion| (completion.token, completion.status))
            .collect();
        assert_eq!(completions, [(self.left, IoStatus::SUCCESS)]);
        self.is_pending = false;
        self.left -= 1;
        self.done.fetch_add(1, Ordering::Relaxed);
        self.lateness.record(now.since(self.due).ns);
        self.due = now.after(gap(self.random.next_f64()));
        if self.left == 0 {
            self.tell.send(std::mem::take(&mut self.lateness)).unwrap();
            context.request_thread_end();
        }
    }
}

impl Poller for LatencyPoller {
    fn poll(&mut self, context: &mut Context<'_>) -> PollResult {
        let completed =
            self.is_pending && self.queue.poll(context.now(), &mut self.completions) > 0;
        if completed {
            self.take(context);
        }
        let begins = !self.is_pending && self.left > 0 && context.now() >= self.due;
        if begins {
            self.submit(context.now());
        }
        PollResult::from_count(usize::from(completed || begins))
    }

    fn flush(&mut self) {
        self.queue.flush_submissions();
    }

    fn arm(&mut self) -> PollResult {
        // In any case: an old signal that was not cleared would end every sleep at once.
        let is_behind = self.queue.arm();
        PollResult::from_count(usize::from(self.is_pending && is_behind))
    }

    fn disarm(&mut self) {
        self.queue.disarm();
    }

    fn wake_at(&self) -> Instant {
        if self.is_pending { self.queue.wake_at() } else { self.due }
    }
}

/// The gap at this part of the scale, from 0 to 1.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "it is 1 to 50 000")]
fn gap(part: f64) -> Span {
    // In thousandths of the shortest, which are nanoseconds.
    Span { ns: (GAP_SCALE.powf(part) * 1_000.0) as u64 * GAP_MIN.ns / 1_000 }
}

/// A line that tells how far it is, and a failure if that is no further than it was long ago.
struct GapProgress<'a> {
    done: &'a AtomicU64,
    count: u64,
    reported: u64,
    in_vain: u32,
}

impl<'a> GapProgress<'a> {
    fn new(done: &'a AtomicU64, count: u64) -> Self {
        Self { done, count, reported: 0, in_vain: 0 }
    }

    fn print_or_fail_if_stuck(&mut self) {
        let done = self.done.load(Ordering::Relaxed);
        self.in_vain = if done > self.reported { 0 } else { self.in_vain + 1 };
        assert!(self.in_vain < STUCK, "nothing was answered for {STUCK} s after {done} I/Os");
        self.reported = done;
        print!("\r{done} of {} I/Os", self.count);
        std::io::stdout().flush().unwrap();
    }
}
