//! Log lines: accepted without blocking, limited per cause, written by a thread of their own.
//!
//! ```text
//!   any thread ── submit ──> bounded queue ──> log thread: rate limits ──> descriptor
//!                   │ full: counted              │ refused: counted          │ fails: counted
//! ```
//!
//! A thread that logs neither waits nor fails. A descriptor that nobody reads blocks the log thread
//! alone; one that cannot be written costs lines, which are counted.

mod limiter;

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::Duration;

use base::Span;

use self::limiter::{Limiter, Summary};
use crate::Clock;

/// The log of a process: a queue and the thread that writes it. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Log {
    queue: SyncSender<Message>,
    counters: Arc<Counters>,
}

/// A line of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogRecord {
    /// What lines are limited by: the place in the program, and the device or export concerned. No
    /// part of it is chosen by a peer.
    pub cause: String,
    /// The line, without its end.
    pub text: String,
}

/// What became of lines so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogCounters {
    /// Lines that were written.
    pub written: u64,
    /// Lines that a rate limit kept back; a later line says how many.
    pub suppressed: u64,
    /// Lines that were lost: the queue was full, or the descriptor could not be written.
    pub dropped: u64,
}

#[derive(Debug, Default)]
struct Counters {
    written: AtomicU64,
    suppressed: AtomicU64,
    dropped: AtomicU64,
}

#[derive(Debug)]
enum Message {
    Record(LogRecord),
    /// Everything submitted before is written once the other end is gone.
    Drain(SyncSender<()>),
}

/// Lines that wait for the log thread. A line has at most [`LINE_BYTES_MAX`] bytes.
const QUEUE_LINES: usize = 1024;
/// A longer line is cut.
const LINE_BYTES_MAX: usize = 2048;
/// How often kept-back lines are looked at.
const SUMMARY_INTERVAL: Duration = Duration::from_secs(1);
/// How often a full queue is tried again by `drain`.
const DRAIN_INTERVAL: Span = Span::from_ms(1);

impl Log {
    /// Starts the thread that writes to `output`. It ends when the last handle is gone; nothing
    /// waits for it, since `output` may block for ever.
    ///
    /// # Errors
    ///
    /// If no thread can be started.
    pub fn start(output: impl Write + Send + 'static, clock: Clock) -> io::Result<Self> {
        let (queue, records) = sync_channel(QUEUE_LINES);
        let counters = Arc::new(Counters::default());
        let writer = Writer {
            output,
            clock,
            limiter: Limiter::default(),
            counters: Arc::clone(&counters),
            dropped_reported: 0,
        };
        std::thread::Builder::new().name("log".into()).spawn(move || writer.run(&records))?;
        Ok(Self { queue, counters })
    }

    /// Accepts a line, or counts it as dropped if the queue is full.
    pub fn submit(&self, record: LogRecord) {
        if self.queue.try_send(Message::Record(record)).is_err() {
            self.counters.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Waits until what was submitted before is written, at most for `limit`. Returns whether it is.
    pub fn drain(&self, limit: Span) -> bool {
        let (done, is_done) = sync_channel(1);
        let mut message = Message::Drain(done);
        let mut left = limit;
        loop {
            match self.queue.try_send(message) {
                Ok(()) => break,
                Err(TrySendError::Disconnected(_)) => return false,
                Err(TrySendError::Full(_)) if left.ns < DRAIN_INTERVAL.ns => return false,
                Err(TrySendError::Full(again)) => message = again,
            }
            crate::thread::rest(DRAIN_INTERVAL);
            left = Span { ns: left.ns - DRAIN_INTERVAL.ns };
        }
        is_done.recv_timeout(Duration::from_nanos(left.ns)) == Err(RecvTimeoutError::Disconnected)
    }

    /// What became of lines so far.
    pub fn counters(&self) -> LogCounters {
        let Counters { written, suppressed, dropped } = &*self.counters;
        LogCounters {
            written: written.load(Ordering::Relaxed),
            suppressed: suppressed.load(Ordering::Relaxed),
            dropped: dropped.load(Ordering::Relaxed),
        }
    }
}

/// What the log thread owns.
struct Writer<W> {
    output: W,
    clock: Clock,
    limiter: Limiter,
    counters: Arc<Counters>,
    /// Dropped lines that a line was written about.
    dropped_reported: u64,
}

impl<W: Write> Writer<W> {
    fn run(mut self, records: &Receiver<Message>) {
        loop {
            let received = if self.limiter.has_suppressed() {
                records.recv_timeout(SUMMARY_INTERVAL)
            } else {
                records.recv().map_err(|_| RecvTimeoutError::Disconnected)
            };
            match received {
                Ok(Message::Record(record)) => self.handle(&record),
                Ok(Message::Drain(done)) => {
                    self.summarize_all();
                    drop(done);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return self.summarize_all(),
            }
            let now = self.clock.now();
            while let Some(summary) = self.limiter.next_summary(now) {
                self.summarize(&summary);
            }
            self.report_dropped();
        }
    }

    fn handle(&mut self, record: &LogRecord) {
        if self.limiter.admit(record, self.clock.now()) {
            self.write(&record.text);
        } else {
            self.counters.suppressed.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Writes what was kept back without waiting for its interval.
    fn summarize_all(&mut self) {
        while let Some(summary) = self.limiter.take_summary() {
            self.summarize(&summary);
        }
    }

    fn summarize(&mut self, Summary { lines, last }: &Summary) {
        self.write(&format!("note: {lines} more lines like this one were suppressed: {last}"));
    }

    fn report_dropped(&mut self) {
        let dropped = self.counters.dropped.load(Ordering::Relaxed);
        if dropped != self.dropped_reported {
            let lines = dropped - self.dropped_reported;
            self.dropped_reported = dropped;
            self.write(&format!(
                "note: {lines} log lines were dropped: the log was not read in time"
            ));
        }
    }

    fn write(&mut self, text: &str) {
        let mut line = Vec::with_capacity(text.len() + 1);
        line.extend_from_slice(&text.as_bytes()[..text.floor_char_boundary(LINE_BYTES_MAX)]);
        line.push(b'\n');
        let is_written = self.output.write_all(&line).and_then(|()| self.output.flush());
        match is_written {
            Ok(()) => self.counters.written.fetch_add(1, Ordering::Relaxed),
            Err(_) => {
                // Another line about it could not be written either.
                self.dropped_reported += 1;
                self.counters.dropped.fetch_add(1, Ordering::Relaxed)
            }
        };
    }
}

/// Standard error without the lock of `std::io::stderr`, which a blocked log thread would hold
/// while others want it.
#[derive(Clone, Copy, Debug, Default)]
pub struct StandardError;

impl Write for StandardError {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::write(rustix::stdio::stderr(), bytes)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Write};
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::sync::{Arc, Mutex};

    use base::Span;

    use super::{Log, LogRecord, QUEUE_LINES};
    use crate::Clock;

    const LONG: Span = Span::from_secs(20);

    fn record(cause: &str, text: impl Into<String>) -> LogRecord {
        LogRecord { cause: cause.into(), text: text.into() }
    }

    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<u8>>>);

    impl Kept {
        fn text(&self) -> String {
            String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
        }
    }

    impl Write for Kept {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Says when it is written to, and blocks until its sender is gone.
    struct Blocked {
        is_reached: Sender<()>,
        until: Receiver<()>,
        kept: Kept,
    }

    impl Write for Blocked {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let _ = self.is_reached.send(());
            let _ = self.until.recv();
            self.kept.write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    struct Full;

    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::StorageFull.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn lines_are_written_in_order_once_drained() {
        let kept = Kept::default();
        let log = Log::start(kept.clone(), Clock::start()).unwrap();
        log.submit(record("a", "note: one"));
        log.submit(record("b", "note: two"));
        assert!(log.drain(LONG));
        assert_eq!(kept.text(), "note: one\nnote: two\n");
        assert_eq!(log.counters().written, 2);
    }

    #[test]
    fn a_flood_of_one_cause_is_suppressed_counted_and_summarized() {
        let kept = Kept::default();
        let log = Log::start(kept.clone(), Clock::start()).unwrap();
        // Slower than the queue, so that nothing is dropped.
        for round in 0..100 {
            for index in 0..100 {
                log.submit(record("flood", format!("note: refused {}", round * 100 + index)));
            }
            assert!(round == 99 || log.drain(LONG));
        }
        log.submit(record("other", "note: something else"));
        assert!(log.drain(LONG));
        let text = kept.text();
        assert!(text.contains("note: something else\n"), "another cause is not silenced");
        assert!(
            text.len() < 100_000 && text.lines().count() < 600,
            "{} lines",
            text.lines().count()
        );
        let counters = log.counters();
        assert_eq!(counters.dropped, 0);
        assert!(counters.suppressed > 9_000, "{counters:?}");
        assert!(text.contains("more lines like this one were suppressed: note: refused "));
    }

    #[test]
    fn an_output_that_is_not_read_blocks_nobody_and_is_counted() {
        let (is_reached, reached) = channel();
        let (keep, until) = channel::<()>();
        let kept = Kept::default();
        let blocked = Blocked { is_reached, until, kept: kept.clone() };
        let log = Log::start(blocked, Clock::start()).unwrap();
        log.submit(record("first", "note: blocks the log thread"));
        reached.recv().unwrap();
        for index in 0..QUEUE_LINES + 10 {
            log.submit(record("more", format!("note: {index}")));
        }
        assert_eq!(log.counters().dropped, 10);
        assert!(!log.drain(Span::from_ms(2)), "the queue is full");
        drop(keep);
        assert!(log.drain(LONG));
        log.submit(record("last", "note: the last"));
        assert!(log.drain(LONG));
        assert_eq!(kept.text().matches("note: 10 log lines were dropped").count(), 1);
    }

    #[test]
    fn an_output_that_cannot_be_written_costs_lines_and_nothing_else() {
        let log = Log::start(Full, Clock::start()).unwrap();
        for _ in 0..3 {
            log.submit(record("a", "note: lost"));
        }
        assert!(log.drain(LONG));
        assert_eq!((log.counters().written, log.counters().dropped), (0, 3));
    }

    #[test]
    fn a_long_line_is_cut_at_a_character() {
        let kept = Kept::default();
        let log = Log::start(kept.clone(), Clock::start()).unwrap();
        log.submit(record("a", "é".repeat(4000)));
        assert!(log.drain(LONG));
        assert!(kept.text().len() <= super::LINE_BYTES_MAX + 1);
    }
}
