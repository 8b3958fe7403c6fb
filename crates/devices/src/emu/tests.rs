//! Emulated SSDs whose both sides sleep.

mod harness;
mod on_reactor;
mod virtual_time;

use tenmil_base::{
    CompletionBatch, Instant, IoChannel, IoStatus, Operation, Random, Request, RequestFlags,
    Segment, Span, WakeSource,
};
use tenmil_linux::{Clock, Sleeper};

use super::{EmuPlan, EmulatedSsds};
use crate::EmuSpec;
use crate::fast_path_switches::FastPathSwitches;

/// One SSD, and this thread, which sleeps on its only queue pair.
struct SleepHarness {
    emulated: EmulatedSsds,
    queue: Box<dyn IoChannel>,
    buffer: Segment,
    sleeper: Sleeper,
    clock: Clock,
    completions: CompletionBatch,
    /// Number of sleeps of the host thread.
    sleeps: u32,
}

/// Time after which a completion counts as lost.
const LOST_AFTER: Span = Span::from_secs(5);

impl SleepHarness {
    fn new(uri: &str, techniques: &FastPathSwitches) -> Self {
        let (specs, clock) = ([uri.parse::<EmuSpec>().unwrap()], Clock::start());
        let plan = EmuPlan {
            specs: &specs,
            queue_pairs: 1,
            depth: 8,
            buffer_bytes: 4096,
            techniques,
            device_cores: &[None],
            yields: true,
            interrupts: true,
            fills: false,
            seed: 1,
        };
        let mut emulated = EmulatedSsds::start(&plan, &clock).unwrap();
        let queue = emulated.create_queue_pair(0, 8, techniques, &clock).unwrap();
        let buffer = emulated.allocate(0, 4096).unwrap();
        let sleeper = Sleeper::new().unwrap();
        let WakeSource::Descriptor(vector) = queue.wake_source() else { panic!("no vector") };
        sleeper.sources().add_source(vector, 0).unwrap();
        let completions = CompletionBatch::with_capacity(8);
        Self { emulated, queue, buffer, sleeper, clock, completions, sleeps: 0 }
    }

    /// Reads or flushes, and returns the time it took. `sleeps`: whether the host sleeps as well.
    fn run(&mut self, operation: Operation, sleeps: bool) -> Span {
        let begun = self.clock.now();
        let data = u16::from(operation == Operation::Read);
        let request = Request {
            token: 7,
            lba: 0,
            operand: 0,
            blocks: 8 * u32::from(data),
            segment_first: 0,
            segment_count: data,
            metadata_count: 0,
            operation,
            flags: RequestFlags::NONE,
        };
        assert_eq!(self.queue.submit(begun, &[request], &[self.buffer]), 1);
        self.queue.flush_submissions();
        loop {
            let now = self.clock.now();
            if self.queue.poll(now, &mut self.completions) > 0 {
                let statuses: Vec<_> =
                    self.completions.drain().map(|completion| completion.status).collect();
                assert_eq!(statuses, [IoStatus::SUCCESS]);
                return now.since(begun);
            }
            assert!(now.since(begun) < LOST_AFTER, "{operation:?} was forgotten");
            match sleeps {
                true => self.sleep(now),
                false => tenmil_linux::named_thread::yield_cpu(),
            }
        }
    }

    fn sleep(&mut self, now: Instant) {
        if !self.queue.arm() {
            self.sleeps += 1;
            let until = self.queue.wake_at().min(now.after(LOST_AFTER));
            self.sleeper.sleep_until_ready(until.since(now), &mut Vec::new());
        }
        self.queue.disarm();
    }

    /// Thousands of commands with gaps of one microsecond to five milliseconds, so that the device
    /// is polling, arming, or asleep.
    fn run_with_gaps(mut self, name: &str, count: u32) {
        let mut random = Random::new(3);
        let mut latest = Span::default();
        for number in 0..count {
            // Log-uniform: from 2^10 to 2^22.3 ns.
            let scale = 1_u64 << (10 + random.below(12));
            let gap = Span { ns: scale + random.below(scale) };
            tenmil_linux::named_thread::sleep(gap);
            let flushes = random.chance(1, 8);
            let operation = if flushes { Operation::Flush } else { Operation::Read };
            latest = latest.max(self.run(operation, random.chance(3, 4)));
            if number % 64 == 0 {
                self.emulated.poll_controllers(self.clock.now()).unwrap();
            }
        }
        println!("{name}: slept {} times for {count} answers, latest {latest}", self.sleeps);
        assert!(latest < Span::from_ms(100), "{name}: {latest}");
        assert!(self.sleeps > count / 20, "{name}: {} sleeps are no test", self.sleeps);
        drop(self.queue);
        self.emulated.shut_down(&self.clock);
    }
}

#[test]
fn neither_side_sleeps_with_a_command_pending() {
    let techniques = FastPathSwitches::default();
    SleepHarness::new("emu:null", &techniques).run_with_gaps("null", 3000);
}

#[test]
fn neither_side_sleeps_with_a_command_pending_in_shadow_doorbells() {
    let techniques = FastPathSwitches { shadow_doorbells: true, ..FastPathSwitches::default() };
    SleepHarness::new("emu:ram?size=1m", &techniques).run_with_gaps("shadow", 2000);
}

#[test]
fn host_does_not_sleep_over_a_completion_of_a_slow_medium() {
    let directory = tempfile::tempdir().unwrap();
    let file = format!("emu:file:{}?size=1m", directory.path().join("ssd").display());
    for uri in [file.as_str(), "emu:model:p4800x?size=1m"] {
        SleepHarness::new(uri, &FastPathSwitches::default()).run_with_gaps(uri, 1000);
    }
}
