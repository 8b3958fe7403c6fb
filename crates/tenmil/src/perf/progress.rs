//! How far a run has come, for whoever watches it.
//!
//! Each submitting thread stores its own sums, on a cache line of its own, now and then; the thread
//! that waits for them loads all. Nothing is ordered by these values, so every access is relaxed.

use core::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering::Relaxed};
use std::io::{self, Write};
use std::sync::{Mutex, PoisonError};

use base::{Instant, Span};
use control::Running;
use reactor::balance::Steering;

use super::outcome::Counts;
use super::report::figures::{show_bytes_per_second, show_rate};

/// What the threads of a run and its watcher share.
#[derive(Debug)]
pub struct Progress {
    threads: Box<[ThreadProgress]>,
    phase: AtomicU8,
    stop: AtomicBool,
    /// Locked when reactors start and when somebody asks, never on the way of an I/O.
    reactors: Mutex<Option<Running>>,
    steering: Mutex<Option<Steering>>,
    notes: Mutex<Notes>,
}

/// What a run has to say before its report. Nothing is said twice.
#[derive(Debug, Default)]
struct Notes {
    all: Vec<String>,
    told: usize,
}

/// One thread's sums since the run began.
#[derive(Debug, Default)]
#[repr(align(64))]
pub struct ThreadProgress {
    ios: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
}

/// What a run is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    /// Starting the SSDs.
    BringUp,
    /// Running, not yet measuring.
    WarmUp,
    /// Measuring.
    Measure,
    /// Measuring the bare ring.
    Ceiling,
    /// Running over memory.
    Ram,
    /// Comparing the modes of the block layer.
    NullBlk,
}

/// The line on a terminal that says how far a run has come.
#[derive(Debug)]
pub struct LiveLine {
    shown: bool,
    next: Instant,
    last: (Instant, Counts),
    began: (Phase, Instant),
}

/// The line is drawn anew at most so often.
const REDRAW: Span = Span::from_ms(100);

const BAR_CELLS: u64 = 24;

impl Progress {
    /// Progress of so many submitting threads, none of which has begun.
    pub fn new(threads: usize) -> Self {
        let threads = (0..threads).map(|_| ThreadProgress::default()).collect();
        Self {
            threads,
            phase: AtomicU8::new(Phase::BringUp as u8),
            stop: AtomicBool::new(false),
            reactors: Mutex::default(),
            steering: Mutex::default(),
            notes: Mutex::default(),
        }
    }

    /// The place of one thread.
    pub fn thread(&self, index: usize) -> &ThreadProgress {
        &self.threads[index]
    }

    /// The sums of all threads.
    pub fn sums(&self) -> Counts {
        let mut sums = Counts::default();
        for thread in &self.threads {
            sums.ios += thread.ios.load(Relaxed);
            sums.bytes += thread.bytes.load(Relaxed);
            sums.errors += thread.errors.load(Relaxed);
        }
        sums
    }

    /// Says what the run is doing now.
    pub fn enter(&self, phase: Phase) {
        self.phase.store(phase as u8, Relaxed);
    }

    /// What the run is doing.
    pub fn phase(&self) -> Phase {
        Phase::ALL[usize::from(self.phase.load(Relaxed)).min(Phase::ALL.len() - 1)]
    }

    /// Says on which reactors the run runs now, for whoever asks the process.
    pub fn show_reactors(&self, running: Running) {
        *self.reactors.lock().unwrap_or_else(PoisonError::into_inner) = Some(running);
    }

    /// The reactors that the run runs on, or ran on last.
    pub fn reactors(&self) -> Option<Running> {
        self.reactors.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Says by what the threads' balancer is steered now, for whoever asks the process.
    pub fn show_steering(&self, steering: Steering) {
        *self.steering.lock().unwrap_or_else(PoisonError::into_inner) = Some(steering);
    }

    /// Says that nothing is balanced any more.
    pub fn hide_steering(&self) {
        *self.steering.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// What the balancer is steered by, if there is one.
    pub fn steering(&self) -> Option<Steering> {
        self.steering.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Says something that does not wait for the report, unless it has been said.
    pub fn note(&self, text: String) {
        let mut notes = self.notes.lock().unwrap_or_else(PoisonError::into_inner);
        if !notes.all.contains(&text) {
            notes.all.push(text);
        }
    }

    /// What has been said and nobody has taken yet.
    fn take_notes(&self) -> Vec<String> {
        let mut notes = self.notes.lock().unwrap_or_else(PoisonError::into_inner);
        let new = notes.all[notes.told..].to_vec();
        notes.told = notes.all.len();
        new
    }

    /// Asks the threads to come to an end, with what they have so far.
    pub fn ask_to_stop(&self) {
        self.stop.store(true, Relaxed);
    }

    /// Whether the threads were asked to come to an end. To be looked at once per turn at most.
    #[inline]
    pub fn is_stopping(&self) -> bool {
        self.stop.load(Relaxed)
    }
}

impl ThreadProgress {
    /// Says how far this thread has come since it began.
    #[inline]
    pub fn set(&self, ios: u64, bytes: u64, errors: u64) {
        self.ios.store(ios, Relaxed);
        self.bytes.store(bytes, Relaxed);
        self.errors.store(errors, Relaxed);
    }
}

impl Phase {
    const ALL: [Self; 6] =
        [Self::BringUp, Self::WarmUp, Self::Measure, Self::Ceiling, Self::Ram, Self::NullBlk];

    /// The phase in words.
    pub const fn words(self) -> &'static str {
        match self {
            Self::BringUp => "bringing up",
            Self::WarmUp => "warming up",
            Self::Measure => "measuring",
            Self::Ceiling => "bare ring",
            Self::Ram => "over ram",
            Self::NullBlk => "block layer",
        }
    }
}

impl LiveLine {
    /// A line that is drawn if `shown`: if standard error is a terminal.
    pub fn new(shown: bool, now: Instant) -> Self {
        let last = (now, Counts::default());
        Self { shown, next: now, last, began: (Phase::BringUp, now) }
    }

    /// Draws the line if it is time to, where the phase takes `length`. To be called as often as
    /// one likes.
    pub fn turn(
        &mut self,
        now: Instant,
        progress: &Progress,
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
        let sums = progress.sums();
        let line = self.line(now, sums, length);
        self.last = (now, sums);
        write!(out, "\r\x1b[2K{line}")?;
        out.flush()
    }

    /// Tells what the run has said, above the line.
    pub fn tell(&mut self, progress: &Progress, out: &mut dyn Write) -> io::Result<()> {
        for note in progress.take_notes() {
            self.clear(out)?;
            writeln!(out, "note: {note}")?;
        }
        Ok(())
    }

    /// Takes the line away.
    pub fn clear(&mut self, out: &mut dyn Write) -> io::Result<()> {
        if !self.shown {
            return Ok(());
        }
        write!(out, "\r\x1b[2K")?;
        out.flush()
    }

    fn line(&self, now: Instant, sums: Counts, length: Span) -> String {
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
            phase.words(),
            elapsed.as_secs_f64(),
            length.as_secs_f64(),
            show_rate(ios, window),
            show_bytes_per_second(bytes, window),
        )
    }
}

#[cfg(test)]
mod tests {
    use base::{Instant, Span};

    use super::{LiveLine, Phase, Progress};

    const LENGTH: Span = Span::from_secs(10);

    fn at_ms(ms: u64) -> Instant {
        Instant { ns: ms * 1_000_000 }
    }

    #[test]
    fn the_line_shows_the_rate_of_the_last_tenth_of_a_second_over_all_threads() {
        let progress = Progress::new(2);
        let mut line = LiveLine::new(true, at_ms(0));
        progress.enter(Phase::Measure);
        let mut out = Vec::new();
        line.turn(at_ms(0), &progress, LENGTH, &mut out).unwrap();
        progress.thread(0).set(2_000_000, 2_000_000 * 4096, 0);
        progress.thread(1).set(1_000_000, 1_000_000 * 4096, 3);
        out.clear();
        line.turn(at_ms(100), &progress, LENGTH, &mut out).unwrap();
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "\r\x1b[2Kmeasuring   ░░░░░░░░░░░░░░░░░░░░░░░░   0.1 / 10.0 s  30.0 M IOPS  \
             122.9 GB/s  3 errors"
        );
    }

    #[test]
    fn the_line_is_drawn_ten_times_a_second_at_most() {
        let progress = Progress::new(1);
        let mut line = LiveLine::new(true, at_ms(0));
        let drawn = (0..1000).filter(|ms| {
            let mut out = Vec::new();
            line.turn(at_ms(*ms), &progress, LENGTH, &mut out).unwrap();
            !out.is_empty()
        });
        assert_eq!(drawn.count(), 10);
    }

    #[test]
    fn where_there_is_no_terminal_nothing_is_written() {
        let mut line = LiveLine::new(false, at_ms(0));
        let mut out = Vec::new();
        line.turn(at_ms(500), &Progress::new(1), LENGTH, &mut out).unwrap();
        line.clear(&mut out).unwrap();
        assert!(out.is_empty());
    }

    #[test]
    fn a_note_is_told_once_and_leaves_room_for_the_line() {
        let progress = Progress::new(1);
        let said = |line: &mut LiveLine| {
            let mut out = Vec::new();
            line.tell(&progress, &mut out).unwrap();
            String::from_utf8(out).unwrap()
        };
        let (mut shown, mut hidden) =
            (LiveLine::new(true, at_ms(0)), LiveLine::new(false, at_ms(0)));
        assert_eq!(said(&mut shown), "");
        progress.note("one".into());
        assert_eq!(said(&mut shown), "\r\x1b[2Knote: one\n");
        ["one", "two"].into_iter().for_each(|text| progress.note(text.into()));
        assert_eq!(said(&mut hidden), "note: two\n");
        assert_eq!(said(&mut hidden), "");
    }

    #[test]
    fn a_phase_is_told_to_the_watcher_and_a_stop_to_the_threads() {
        let progress = Progress::new(1);
        for phase in Phase::ALL {
            progress.enter(phase);
            assert_eq!(progress.phase(), phase);
        }
        assert!(!progress.is_stopping());
        progress.ask_to_stop();
        assert!(progress.is_stopping());
    }
}
