//! Progress of a run, shared with its observers.
//!
//! Each submitting thread stores its own sums from time to time, on a cache line of its own;
//! observers load all of them. The values order no other memory access, so every access is relaxed.

use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed};
use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};

use tenmil_base::{Instant, Span};
use tenmil_reactor::ReactorsHandle;
use tenmil_reactor::load_balancer::BalancerHandle;

use super::perf_result::IoCounts;
use super::report::number_format::{show_bytes_per_second, show_rate};

/// Progress of a run, shared by its threads and its observers.
#[derive(Debug)]
pub struct RunProgress {
    threads: Box<[ThreadProgress]>,
    phase: AtomicU8,
    stop: AtomicBool,
    /// Locked when reactors start and by RPC methods, never on the I/O path.
    reactors: Mutex<Option<ReactorsHandle>>,
    steering: Mutex<Option<BalancerHandle>>,
    notes: Mutex<RunNotes>,
}

/// Notes of a run, shown before its report. Each is shown once.
#[derive(Debug, Default)]
struct RunNotes {
    all: Vec<String>,
    reported: usize,
}

/// Sums of one thread since the run began.
#[derive(Debug, Default)]
#[repr(align(64))]
pub struct ThreadProgress {
    ios: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
}

/// Phase of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum RunPhase {
    /// Starting the devices.
    BringUp,
    /// Warm-up before the measurement.
    WarmUp,
    /// Measurement.
    Measure,
    /// Measuring the baseline.
    Baseline,
    /// Run over RAM.
    Ram,
    /// Comparing the modes of the block layer.
    NullBlk,
}

/// Progress line on a terminal.
#[derive(Debug)]
pub struct ProgressLine {
    shown: bool,
    next: Instant,
    last: (Instant, IoCounts),
    began: (RunPhase, Instant),
}

/// Minimum interval between two drawings of the line.
const REDRAW: Span = Span::from_ms(100);

const BAR_CELLS: u64 = 24;

impl RunProgress {
    /// Creates the progress of `threads` submitting threads.
    pub fn new(threads: usize) -> Self {
        let threads = (0..threads).map(|_| ThreadProgress::default()).collect();
        Self {
            threads,
            phase: AtomicU8::new(RunPhase::BringUp as u8),
            stop: AtomicBool::new(false),
            reactors: Mutex::default(),
            steering: Mutex::default(),
            notes: Mutex::default(),
        }
    }

    /// Sums of one thread.
    pub fn thread_progress(&self, index: usize) -> &ThreadProgress {
        &self.threads[index]
    }

    /// Sums over all threads.
    pub fn total_counts(&self) -> IoCounts {
        let mut sums = IoCounts::default();
        for thread in &self.threads {
            sums.ios += thread.ios.load(Relaxed);
            sums.bytes += thread.bytes.load(Relaxed);
            sums.errors += thread.errors.load(Relaxed);
        }
        sums
    }

    /// Sets the phase.
    pub fn set_phase(&self, phase: RunPhase) {
        self.phase.store(phase as u8, Relaxed);
    }

    /// Current phase.
    pub fn phase(&self) -> RunPhase {
        RunPhase::ALL[usize::from(self.phase.load(Relaxed)).min(RunPhase::ALL.len() - 1)]
    }

    /// Publishes the reactors of the run for RPC methods.
    pub fn publish_reactors(&self, running: ReactorsHandle) {
        *self.reactors.lock().unwrap_or_else(PoisonError::into_inner) = Some(running);
    }

    /// Current or last reactors of the run.
    pub fn reactors(&self) -> Option<ReactorsHandle> {
        self.reactors.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Publishes the control of the balancer for RPC methods.
    pub fn publish_scheduler(&self, steering: BalancerHandle) {
        *self.steering.lock().unwrap_or_else(PoisonError::into_inner) = Some(steering);
    }

    /// Withdraws the control of the balancer.
    pub fn withdraw_scheduler(&self) {
        *self.steering.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Control of the balancer, while there is one.
    pub fn scheduler_handle(&self) -> Option<BalancerHandle> {
        self.steering.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Adds a note that is shown at once. A note that was added before is ignored.
    pub fn add_note(&self, text: String) {
        let mut notes = self.notes.lock().unwrap_or_else(PoisonError::into_inner);
        if !notes.all.contains(&text) {
            notes.all.push(text);
        }
    }

    /// Notes added since the previous call.
    fn drain_notes(&self) -> Vec<String> {
        let mut notes = self.notes.lock().unwrap_or_else(PoisonError::into_inner);
        let new = notes.all[notes.reported..].to_vec();
        notes.reported = notes.all.len();
        new
    }

    /// Requests the threads to stop early, with the results so far.
    pub fn request_stop(&self) {
        self.stop.store(true, Relaxed);
    }

    /// Whether the threads should stop. Called once per iteration at most.
    #[inline]
    pub fn is_stopping(&self) -> bool {
        self.stop.load(Relaxed)
    }
}

impl ThreadProgress {
    /// Stores the sums of this thread since it began.
    #[inline]
    pub fn store_sums(&self, ios: u64, bytes: u64, errors: u64) {
        self.ios.store(ios, Relaxed);
        self.bytes.store(bytes, Relaxed);
        self.errors.store(errors, Relaxed);
    }
}

impl RunPhase {
    const ALL: [Self; 6] =
        [Self::BringUp, Self::WarmUp, Self::Measure, Self::Baseline, Self::Ram, Self::NullBlk];

    /// Description of the phase.
    pub const fn text(self) -> &'static str {
        match self {
            Self::BringUp => "bringing up",
            Self::WarmUp => "warming up",
            Self::Measure => "measuring",
            Self::Baseline => "ring micro-benchmark",
            Self::Ram => "over ram",
            Self::NullBlk => "block layer",
        }
    }
}

impl ProgressLine {
    /// Creates the line. It is drawn only if `shown`, which is set if standard error is a terminal.
    pub fn new(shown: bool, now: Instant) -> Self {
        let last = (now, IoCounts::default());
        Self { shown, next: now, last, began: (RunPhase::BringUp, now) }
    }

    /// Draws the line if the redraw interval has passed, for a phase of duration `length`. May be
    /// called at any rate.
    pub fn update(
        &mut self,
        now: Instant,
        progress: &RunProgress,
        length: Span,
        out: &mut dyn Write,
    ) -> io::Result<()> {
        if !self.shown || now < self.next {
            return Ok(());
        }
        self.next = now.after(REDRAW);
        let phase = progress.phase();
        if phase != self.began.0 {
            self.began = (phase, now);
        }
        let sums = progress.total_counts();
        let line = self.format_line(now, sums, length);
        self.last = (now, sums);
        write!(out, "\r\x1b[2K{line}")?;
        out.flush()
    }

    /// Prints new notes above the line.
    pub fn print_notes(&mut self, progress: &RunProgress, out: &mut dyn Write) -> io::Result<()> {
        for note in progress.drain_notes() {
            self.clear(out)?;
            writeln!(out, "note: {note}")?;
        }
        Ok(())
    }

    /// Erases the line.
    pub fn clear(&mut self, out: &mut dyn Write) -> io::Result<()> {
        if !self.shown {
            return Ok(());
        }
        write!(out, "\r\x1b[2K")?;
        out.flush()
    }

    fn format_line(&self, now: Instant, sums: IoCounts, length: Span) -> String {
        let (phase, since) = self.began;
        let elapsed = now.since(since);
        let filled = (elapsed.ns.saturating_mul(BAR_CELLS) / length.ns.max(1)).min(BAR_CELLS);
        let bar: String =
            (0..BAR_CELLS).map(|cell| if cell < filled { '█' } else { '░' }).collect();
        let window = now.since(self.last.0);
        let ios = sums.ios.saturating_sub(self.last.1.ios);
        let bytes = sums.bytes.saturating_sub(self.last.1.bytes);
        let errors = match sums.errors {
            0 => String::new(),
            count => format!("  {count} errors"),
        };
        format!(
            "{:<11} {bar} {:>5.1} / {:.1} s  {}  {}{errors}",
            phase.text(),
            elapsed.as_secs_f64(),
            length.as_secs_f64(),
            show_rate(ios, window),
            show_bytes_per_second(bytes, window),
        )
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{Instant, Span};

    use super::{ProgressLine, RunPhase, RunProgress};

    const LENGTH: Span = Span::from_secs(10);

    fn instant_at_ms(ms: u64) -> Instant {
        Instant { ns: ms * 1_000_000 }
    }

    #[test]
    fn line_shows_the_rate_of_the_last_interval_over_all_threads() {
        let progress = RunProgress::new(2);
        let mut line = ProgressLine::new(true, instant_at_ms(0));
        progress.set_phase(RunPhase::Measure);
        let mut out = Vec::new();
        line.update(instant_at_ms(0), &progress, LENGTH, &mut out).unwrap();
        progress.thread_progress(0).store_sums(2_000_000, 2_000_000 * 4096, 0);
        progress.thread_progress(1).store_sums(1_000_000, 1_000_000 * 4096, 3);
        out.clear();
        line.update(instant_at_ms(100), &progress, LENGTH, &mut out).unwrap();
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "\r\x1b[2Kmeasuring   ░░░░░░░░░░░░░░░░░░░░░░░░   0.1 / 10.0 s  30.0 M IOPS  \
             122.9 GB/s  3 errors"
        );
    }

    #[test]
    fn line_is_drawn_ten_times_a_second_at_most() {
        let progress = RunProgress::new(1);
        let mut line = ProgressLine::new(true, instant_at_ms(0));
        let drawn = (0..1000).filter(|ms| {
            let mut out = Vec::new();
            line.update(instant_at_ms(*ms), &progress, LENGTH, &mut out).unwrap();
            !out.is_empty()
        });
        assert_eq!(drawn.count(), 10);
    }

    #[test]
    fn nothing_is_written_without_a_terminal() {
        let mut line = ProgressLine::new(false, instant_at_ms(0));
        let mut out = Vec::new();
        line.update(instant_at_ms(500), &RunProgress::new(1), LENGTH, &mut out).unwrap();
        line.clear(&mut out).unwrap();
        assert!(out.is_empty());
    }

    #[test]
    fn note_is_printed_once_above_the_line() {
        let progress = RunProgress::new(1);
        let said = |line: &mut ProgressLine| {
            let mut out = Vec::new();
            line.print_notes(&progress, &mut out).unwrap();
            String::from_utf8(out).unwrap()
        };
        let (mut shown, mut hidden) =
            (ProgressLine::new(true, instant_at_ms(0)), ProgressLine::new(false, instant_at_ms(0)));
        assert_eq!(said(&mut shown), "");
        progress.add_note("one".into());
        assert_eq!(said(&mut shown), "\r\x1b[2Knote: one\n");
        ["one", "two"].into_iter().for_each(|text| progress.add_note(text.into()));
        assert_eq!(said(&mut hidden), "note: two\n");
        assert_eq!(said(&mut hidden), "");
    }

    #[test]
    fn observers_see_the_phase_and_threads_see_a_stop_request() {
        let progress = RunProgress::new(1);
        for phase in RunPhase::ALL {
            progress.set_phase(phase);
            assert_eq!(progress.phase(), phase);
        }
        assert!(!progress.is_stopping());
        progress.request_stop();
        assert!(progress.is_stopping());
    }
}
