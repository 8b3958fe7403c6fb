//! Non-blocking log, rate-limited per cause and written by a thread of its own.
//!
//! ```text
//!   any thread ── submit ──> bounded queue ──> log thread: rate limits ──> LogOutput
//!                   │ full: counted              │ suppressed: counted       │ fails: counted
//! ```
//!
//! A thread that logs neither blocks nor fails. An output without a reader blocks the log thread
//! only; a write error costs records, which are counted. What a record looks like (a line, JSON, an entry
//! of the journal) is the output's affair.

mod log_limiter;

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::time::Duration;

use tenmil_base::{Span, UtcTime};

use self::log_limiter::{LogLimiter, SuppressedSummary};
use crate::Clock;
use crate::clock::utc_now;

/// Log of a process: a queue and the thread that writes it. Cheap to clone.
#[derive(Clone, Debug)]
pub struct ProcessLog {
    queue: SyncSender<LogMessage>,
    counters: Arc<SharedCounters>,
}

/// Record of the log.
#[derive(Clone, Debug, PartialEq)]
pub struct LogRecord {
    /// Key of the rate limit: source location, and the device or export concerned. Contains nothing
    /// that a peer controls.
    pub cause: String,
    /// Time of the event.
    pub at: UtcTime,
    /// How severe it is.
    pub level: LogLevel,
    /// Module that reports it.
    pub module: &'static str,
    /// One sentence for people.
    pub message: String,
    /// Values for programs.
    pub fields: Vec<LogField>,
}

/// Named value of a record.
#[derive(Clone, Debug, PartialEq)]
pub struct LogField {
    /// Name.
    pub name: &'static str,
    /// Value. Text may come from a peer.
    pub value: LogValue,
}

/// Value of a field.
#[derive(Clone, Debug, PartialEq)]
pub enum LogValue {
    /// Text, as it was found.
    Text(String),
    /// Whole number.
    Unsigned(u64),
    /// Negative number.
    Signed(i64),
    /// Number.
    Float(f64),
    /// Yes or no.
    Bool(bool),
}

/// Severity, the most severe first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LogLevel {
    /// Something does not work.
    Error,
    /// Something needs attention.
    Warning,
    /// Something has happened that an operator wants to know.
    Info,
    /// Details for finding the cause of a problem.
    Debug,
    /// More of them.
    Trace,
}

/// Destination of the records.
pub trait LogOutput: Send {
    /// Writes a record. It may block; it is called by the log thread only.
    ///
    /// # Errors
    ///
    /// The error of the system call. The record is counted as dropped then.
    fn write_record(&mut self, record: &LogRecord) -> io::Result<()>;
}

/// Line counters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogCounters {
    /// Lines written.
    pub written: u64,
    /// Lines suppressed by a rate limit; a summary line reports their number.
    pub suppressed: u64,
    /// Lines lost: the queue was full, or the write failed.
    pub dropped: u64,
}

#[derive(Debug, Default)]
struct SharedCounters {
    written: AtomicU64,
    suppressed: AtomicU64,
    dropped: AtomicU64,
}

enum LogMessage {
    Record(LogRecord),
    /// Everything submitted later goes to this output.
    SetOutput(Box<dyn LogOutput>),
    /// Requests a signal when everything submitted before is written: the sender is dropped then.
    Drain(SyncSender<()>),
}

/// Capacity of the queue.
const QUEUE_LINES: usize = 1024;
/// Longer messages are truncated.
const MESSAGE_BYTES_MAX: usize = 2048;
/// Longer values of fields are truncated. An NQN has up to 223 bytes.
const VALUE_BYTES_MAX: usize = 512;
/// Interval at which suppressed lines are checked.
const SUMMARY_INTERVAL: Duration = Duration::from_secs(1);
/// Interval at which `drain` retries a full queue.
const DRAIN_INTERVAL: Span = Span::from_ms(1);

impl ProcessLog {
    /// Starts the thread that writes to `output`. It ends when the last handle is dropped and is
    /// never joined, since `output` may block forever.
    ///
    /// # Errors
    ///
    /// If no thread can be started.
    pub fn start(output: Box<dyn LogOutput>, clock: Clock) -> io::Result<Self> {
        let (queue, records) = sync_channel(QUEUE_LINES);
        let counters = Arc::new(SharedCounters::default());
        let writer = LogWriter {
            output,
            clock,
            limiter: LogLimiter::default(),
            counters: Arc::clone(&counters),
            dropped_reported: 0,
        };
        std::thread::Builder::new()
            .name("log".into())
            .spawn(move || writer.run_log_thread(&records))?;
        Ok(Self { queue, counters })
    }

    /// Queues a record, or counts it as dropped if the queue is full.
    pub fn submit(&self, mut record: LogRecord) {
        truncate_text(&mut record.message, MESSAGE_BYTES_MAX);
        for field in &mut record.fields {
            if let LogValue::Text(text) = &mut field.value {
                truncate_text(text, VALUE_BYTES_MAX);
            }
        }
        if self.queue.try_send(LogMessage::Record(record)).is_err() {
            self.counters.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Has everything that is submitted from now on written to `output`. Does nothing if the queue is full.
    pub fn replace_output(&self, output: Box<dyn LogOutput>) {
        // The thread that writes is alive as long as a handle.
        let _ = self.queue.try_send(LogMessage::SetOutput(output));
    }

    /// Waits until everything submitted before is written, up to `limit`. Returns whether it is.
    pub fn wait_until_written(&self, limit: Span) -> bool {
        let (done, is_done) = sync_channel(1);
        let mut message = LogMessage::Drain(done);
        let mut left = limit;
        loop {
            match self.queue.try_send(message) {
                Ok(()) => break,
                Err(TrySendError::Disconnected(_)) => return false,
                Err(TrySendError::Full(_)) if left.ns < DRAIN_INTERVAL.ns => return false,
                Err(TrySendError::Full(again)) => message = again,
            }
            crate::named_thread::sleep(DRAIN_INTERVAL);
            left = Span { ns: left.ns - DRAIN_INTERVAL.ns };
        }
        is_done.recv_timeout(Duration::from_nanos(left.ns)) == Err(RecvTimeoutError::Disconnected)
    }

    /// Line counters.
    pub fn counters(&self) -> LogCounters {
        let SharedCounters { written, suppressed, dropped } = &*self.counters;
        LogCounters {
            written: written.load(Ordering::Relaxed),
            suppressed: suppressed.load(Ordering::Relaxed),
            dropped: dropped.load(Ordering::Relaxed),
        }
    }
}

/// Writes `text` to `output` on a thread of its own, and waits for that up to `limit`. Returns whether
/// it is written. The thread is not joined, since `output` may block forever.
pub fn write_within(output: impl Write + Send + 'static, text: String, limit: Span) -> bool {
    let (done, is_done) = sync_channel(1);
    let write = move || {
        let mut output = output;
        let is_written = output.write_all(text.as_bytes()).and_then(|()| output.flush()).is_ok();
        // The receiver may have given up.
        let _ = done.send(is_written);
    };
    let started = std::thread::Builder::new().name("log end".into()).spawn(write);
    started.is_ok() && is_done.recv_timeout(Duration::from_nanos(limit.ns)).unwrap_or(false)
}

/// State of the log thread.
struct LogWriter {
    output: Box<dyn LogOutput>,
    clock: Clock,
    limiter: LogLimiter,
    counters: Arc<SharedCounters>,
    /// Dropped lines already reported.
    dropped_reported: u64,
}

impl LogWriter {
    fn run_log_thread(mut self, records: &Receiver<LogMessage>) {
        loop {
            // The timeout is needed only while suppressed lines wait for their summary.
            let received = if self.limiter.has_suppressed() {
                records.recv_timeout(SUMMARY_INTERVAL)
            } else {
                records.recv().map_err(|_| RecvTimeoutError::Disconnected)
            };
            match received {
                Ok(LogMessage::Record(record)) => self.handle_record(record),
                Ok(LogMessage::SetOutput(output)) => self.output = output,
                Ok(LogMessage::Drain(done)) => {
                    self.write_all_summaries();
                    drop(done);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return self.write_all_summaries(),
            }
            let now = self.clock.now();
            while let Some(summary) = self.limiter.take_due_summary(now) {
                self.write_summary(summary);
            }
            self.report_dropped();
        }
    }

    fn handle_record(&mut self, record: LogRecord) {
        match self.limiter.admit(record, self.clock.now()) {
            Some(record) => self.write_record(&record),
            None => {
                self.counters.suppressed.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    /// Writes all summaries without waiting for their interval.
    fn write_all_summaries(&mut self) {
        while let Some(summary) = self.limiter.take_any_summary() {
            self.write_summary(summary);
        }
    }

    fn write_summary(&mut self, summary: SuppressedSummary) {
        let SuppressedSummary { lines, last } = summary;
        let message = format!("{lines} more lines like this one were suppressed: {}", last.message);
        self.write_record(&counted_record(last.level, message, "suppressed", lines));
    }

    fn report_dropped(&mut self) {
        let dropped = self.counters.dropped.load(Ordering::Relaxed);
        if dropped != self.dropped_reported {
            let lines = dropped - self.dropped_reported;
            self.dropped_reported = dropped;
            let message = format!("{lines} log lines were dropped: the log was not read in time");
            self.write_record(&counted_record(LogLevel::Warning, message, "dropped", lines));
        }
    }

    fn write_record(&mut self, record: &LogRecord) {
        match self.output.write_record(record) {
            Ok(()) => self.counters.written.fetch_add(1, Ordering::Relaxed),
            Err(_) => {
                // A report about this record could not be written either.
                self.dropped_reported += 1;
                self.counters.dropped.fetch_add(1, Ordering::Relaxed)
            }
        };
    }
}

/// Record of the log about itself.
fn counted_record(level: LogLevel, message: String, name: &'static str, count: u64) -> LogRecord {
    LogRecord {
        cause: String::new(),
        at: utc_now(),
        level,
        module: module_path!(),
        message,
        fields: vec![LogField { name, value: LogValue::Unsigned(count) }],
    }
}

/// Cuts a text at a character boundary.
fn truncate_text(text: &mut String, bytes_max: usize) {
    text.truncate(text.floor_char_boundary(bytes_max));
}

impl LogLevel {
    /// Word before a line. It is the word that messages of other commands have.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warning => "warning",
            Self::Info => "note",
            Self::Debug => "debug",
            Self::Trace => "trace",
        }
    }

    /// Name, as in filters and JSON.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warning => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        }
    }

    /// Priority of syslog(3).
    #[must_use]
    pub const fn syslog_priority(self) -> u8 {
        match self {
            Self::Error => 3,
            Self::Warning => 4,
            Self::Info => 6,
            Self::Debug | Self::Trace => 7,
        }
    }
}

/// Standard error without the lock of `std::io::stderr`, which a blocked log thread would hold
/// against other threads.
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

    use tenmil_base::Span;

    use super::{
        LogField, LogLevel, LogOutput, LogRecord, LogValue, ProcessLog, QUEUE_LINES, write_within,
    };
    use crate::Clock;

    const LONG: Span = Span::from_secs(20);

    fn test_record(cause: &str, text: impl Into<String>) -> LogRecord {
        LogRecord {
            cause: cause.into(),
            at: crate::clock::utc_now(),
            level: LogLevel::Info,
            module: "test",
            message: text.into(),
            fields: Vec::new(),
        }
    }

    #[derive(Clone, Default)]
    struct Kept(Arc<Mutex<Vec<u8>>>);

    impl Kept {
        fn written_text(&self) -> String {
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

    /// Reports when it is written to, and blocks until its sender is dropped.
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

    /// The messages of the records, one in a line.
    struct Messages<W>(W);

    impl<W: Write + Send> LogOutput for Messages<W> {
        fn write_record(&mut self, record: &LogRecord) -> io::Result<()> {
            self.0.write_all(format!("{}\n", record.message).as_bytes())
        }
    }

    fn start_log(output: impl Write + Send + 'static) -> ProcessLog {
        ProcessLog::start(Box::new(Messages(output)), Clock::start()).unwrap()
    }

    #[test]
    fn lines_are_written_in_order_after_a_drain() {
        let kept = Kept::default();
        let log = start_log(kept.clone());
        log.submit(test_record("a", "note: one"));
        log.submit(test_record("b", "note: two"));
        assert!(log.wait_until_written(LONG));
        assert_eq!(kept.written_text(), "note: one\nnote: two\n");
        assert_eq!(log.counters().written, 2);
    }

    #[test]
    fn repeated_lines_of_one_cause_are_suppressed_counted_and_summarized() {
        let kept = Kept::default();
        let log = start_log(kept.clone());
        // Slower than the queue drains, so that nothing is dropped.
        for round in 0..100 {
            for index in 0..100 {
                log.submit(test_record("flood", format!("note: refused {}", round * 100 + index)));
            }
            assert!(round == 99 || log.wait_until_written(LONG));
        }
        log.submit(test_record("other", "note: something else"));
        assert!(log.wait_until_written(LONG));
        let text = kept.written_text();
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
    fn output_that_is_not_read_blocks_no_thread_and_lines_are_counted() {
        let (is_reached, reached) = channel();
        let (keep, until) = channel::<()>();
        let kept = Kept::default();
        let blocked = Blocked { is_reached, until, kept: kept.clone() };
        let log = start_log(blocked);
        log.submit(test_record("first", "note: blocks the log thread"));
        reached.recv().unwrap();
        for index in 0..QUEUE_LINES + 10 {
            log.submit(test_record("more", format!("note: {index}")));
        }
        assert_eq!(log.counters().dropped, 10);
        assert!(!log.wait_until_written(Span::from_ms(2)), "the queue is full");
        drop(keep);
        assert!(log.wait_until_written(LONG));
        log.submit(test_record("last", "note: the last"));
        assert!(log.wait_until_written(LONG));
        assert_eq!(kept.written_text().matches("10 log lines were dropped").count(), 1);
    }

    #[test]
    fn write_within_returns_at_its_limit() {
        let kept = Kept::default();
        assert!(write_within(kept.clone(), "error: last\n".into(), LONG));
        assert_eq!(kept.written_text(), "error: last\n");
        assert!(!write_within(Full, "error: lost\n".into(), LONG), "it cannot be written");
        let (is_reached, reached) = channel();
        let (keep, until) = channel::<()>();
        let blocked = Blocked { is_reached, until, kept: Kept::default() };
        assert!(!write_within(blocked, "error: late\n".into(), Span::from_ms(1)));
        reached.recv().unwrap();
        drop(keep);
    }

    #[test]
    fn unwritable_output_only_loses_lines() {
        let log = start_log(Full);
        for _ in 0..3 {
            log.submit(test_record("a", "note: lost"));
        }
        assert!(log.wait_until_written(LONG));
        assert_eq!((log.counters().written, log.counters().dropped), (0, 3));
    }

    #[test]
    fn long_texts_are_cut_at_a_character_boundary() {
        let kept = Arc::new(Mutex::new(Vec::new()));
        let log = ProcessLog::start(Box::new(Records(Arc::clone(&kept))), Clock::start()).unwrap();
        let mut record = test_record("a", "é".repeat(4000));
        let value = LogValue::Text("é".repeat(4000));
        record.fields.push(LogField { name: "host", value });
        log.submit(record);
        assert!(log.wait_until_written(LONG));
        let kept = kept.lock().unwrap();
        assert_eq!(kept[0].message, "é".repeat(super::MESSAGE_BYTES_MAX / 2));
        let value = LogValue::Text("é".repeat(super::VALUE_BYTES_MAX / 2));
        assert_eq!(kept[0].fields, [LogField { name: "host", value }]);
    }

    struct Records(Arc<Mutex<Vec<LogRecord>>>);

    impl LogOutput for Records {
        fn write_record(&mut self, record: &LogRecord) -> io::Result<()> {
            self.0.lock().unwrap().push(record.clone());
            Ok(())
        }
    }

    #[test]
    fn replaced_output_receives_what_is_submitted_later() {
        let (first, second) = (Kept::default(), Kept::default());
        let log = start_log(first.clone());
        log.submit(test_record("a", "one"));
        log.replace_output(Box::new(Messages(second.clone())));
        log.submit(test_record("a", "two"));
        assert!(log.wait_until_written(LONG));
        assert_eq!((first.written_text(), second.written_text()), ("one\n".into(), "two\n".into()));
    }
}
