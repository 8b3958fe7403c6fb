//! Process log: `tracing` events as lines on standard error, or entries of the journal.
//!
//! ```text
//!   tracing::info!(cause = %uri, "{uri} was removed")  ->  note: disk0 was removed
//! ```
//!
//! Events are rate-limited by source location and `cause`. So `cause` names an object that the operator
//! configured, such as a device, and nothing that a peer sent. An event that an operator may want to count or
//! search has a field `event` with a stable name, a message that is complete for people, and a field for each
//! value in it; [docs/operator/logs.md](../../../docs/operator/logs.md) lists them.

mod log_filter;
mod log_format;

use std::backtrace::{Backtrace, BacktraceStatus};
use std::fmt::{self, Write};
use std::panic::PanicHookInfo;
use std::sync::{OnceLock, PoisonError, RwLock};

use clap::Args;
use tenmil_base::{Error, Span};
use tenmil_linux::Clock;
use tenmil_linux::clock::utc_now;
use tenmil_linux::journal::JournalSocket;
use tenmil_linux::process_log::{
    LogField, LogLevel, LogOutput, LogRecord, LogValue, ProcessLog, StandardError, write_within,
};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span;
use tracing::{Event, Level, Metadata, Subscriber};

pub(crate) use self::log_filter::LogFilter;
pub(crate) use self::log_format::LogFormat;
use self::log_format::{JournalEntries, JsonLines, TextLines};

// Options of the log, which every command has. Not a documentation comment: it would be the description of the program.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Log")]
pub(crate) struct LogArguments {
    /// What to log: off, error, warn, info, debug or trace; with levels of single modules:
    /// info,devices=debug [default: $TENMIL_LOG, else info]
    #[arg(long, global = true, value_name = "FILTER")]
    pub(crate) log: Option<LogFilter>,

    /// Format of the log: text, json (an object in each line) or journald (fields in systemd's journal)
    /// [default: $TENMIL_LOG_FORMAT, else journald if standard error leads there, else text]
    #[arg(long, global = true, value_name = "FORMAT")]
    #[arg(value_parser = LogFormat::parse)]
    pub(crate) log_format: Option<LogFormat>,
}

/// Subscriber that submits events to the log.
struct LogSubscriber(ProcessLog);

/// Parts of an event.
#[derive(Default)]
struct EventParts {
    message: String,
    cause: String,
    fields: Vec<LogField>,
}

static LOG: OnceLock<ProcessLog> = OnceLock::new();
static FILTER: RwLock<LogFilter> = RwLock::new(LogFilter::standard());
/// Format of the log, once the options are known.
static FORMAT: OnceLock<LogFormat> = OnceLock::new();

/// Time limit for writing pending lines at process exit.
const DRAIN_MAX: Span = Span::from_ms(250);
/// Time limit for writing the error that ends the process.
const ERROR_MAX: Span = Span::from_secs(1);

/// Starts the process log once. If its thread cannot be started, nothing is logged.
pub(crate) fn start_process_log() {
    let output = || Box::new(TextLines { output: StandardError, has_time: false });
    if LOG.get().is_none()
        && let Ok(log) = ProcessLog::start(output(), Clock::start())
        && LOG.set(log.clone()).is_ok()
    {
        // An embedding program may have set a subscriber, which then receives the events instead.
        let _ = tracing::subscriber::set_global_default(LogSubscriber(log));
    }
}

/// Applies the options of the log and the variables of the environment. Of a command that `runs_long` the
/// lines have times.
///
/// # Errors
///
/// If a variable is wrong, or the journal cannot be reached although it is asked for.
pub(crate) fn configure_process_log(
    arguments: &LogArguments,
    runs_long: bool,
) -> Result<(), Error> {
    let filter = match &arguments.log {
        Some(filter) => Some(filter.clone()),
        None => value_of_variable("TENMIL_LOG", str::parse)?,
    };
    if let Some(filter) = filter {
        *FILTER.write().unwrap_or_else(PoisonError::into_inner) = filter;
        tracing::callsite::rebuild_interest_cache();
    }
    let asked = match arguments.log_format {
        Some(format) => Some(format),
        None => value_of_variable("TENMIL_LOG_FORMAT", LogFormat::parse)?,
    };
    let format = asked.unwrap_or_else(LogFormat::standard);
    let text = || Box::new(TextLines { output: StandardError, has_time: runs_long });
    let output: Box<dyn LogOutput> = match format {
        LogFormat::Text => text(),
        LogFormat::Json => Box::new(JsonLines(StandardError)),
        LogFormat::Journald => match JournalSocket::connect() {
            Ok(socket) => Box::new(JournalEntries(socket)),
            Err(error) if asked.is_some() => {
                let text = format!(
                    "log to the journal: connect to /run/systemd/journal/socket: {error}, expected the \
                     socket of systemd-journald"
                );
                return Err(Error::environment(text).with_hint("log with --log-format text"));
            }
            Err(_) => text(),
        },
    };
    if let Some(log) = LOG.get() {
        log.replace_output(output);
        let _ = FORMAT.set(format);
    }
    Ok(())
}

/// Value of a variable of the environment, if it is set and not empty.
fn value_of_variable<T>(
    name: &str,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<Option<T>, Error> {
    let text = std::env::var(name).unwrap_or_default();
    if text.is_empty() {
        return Ok(None);
    }
    parse(&text).map(Some).map_err(|why| Error::usage(format!("${name}: {why}")))
}

/// The process log, if it was started.
pub(crate) fn process_log() -> Option<&'static ProcessLog> {
    LOG.get()
}

/// Waits until pending lines are written, for a limited time if standard error is blocked.
pub(crate) fn drain_process_log() {
    if let Some(log) = LOG.get() {
        log.wait_until_written(DRAIN_MAX);
    }
}

/// Writes the error that ends the process, for a limited time: a process whose standard error is not read
/// ends all the same. It is `text` on standard error, or a record in another format.
pub(crate) fn write_final_error(error: &Error, text: String) {
    match (LOG.get(), FORMAT.get()) {
        (Some(log), Some(LogFormat::Json | LogFormat::Journald)) => {
            let fields = [
                ("event", "exit".to_owned()),
                ("category", format!("{:?}", error.category).to_lowercase()),
                ("hint", error.hint.clone().unwrap_or_default()),
            ];
            let fields = fields.into_iter().filter(|(_, text)| !text.is_empty());
            let field = |(name, text)| LogField { name, value: LogValue::Text(text) };
            log.submit(LogRecord {
                cause: "exit".into(),
                at: utc_now(),
                level: LogLevel::Error,
                module: module_path!(),
                message: error.text.clone(),
                fields: fields.map(field).collect(),
            });
            log.wait_until_written(ERROR_MAX);
        }
        // A failed write has nowhere to be reported.
        _ => drop(write_within(StandardError, text, ERROR_MAX)),
    }
}

/// Reports panics as lines of the process log. The standard hook writes on the thread that panics, and
/// blocks it while standard error is not read.
pub(crate) fn install_panic_hook() {
    std::panic::set_hook(Box::new(|info| {
        start_process_log();
        let Some(log) = LOG.get() else { return };
        for (index, line) in panic_lines(info).into_iter().enumerate() {
            log.submit(LogRecord {
                // Each line is a cause of its own: none is suppressed by the others.
                cause: format!("panic {index}"),
                at: utc_now(),
                level: LogLevel::Error,
                module: module_path!(),
                message: line,
                fields: Vec::new(),
            });
        }
        // The process may end with this thread.
        drain_process_log();
    }));
}

/// The message of a panic with thread and location, and the backtrace if the environment enables it.
fn panic_lines(info: &PanicHookInfo<'_>) -> Vec<String> {
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("without a name");
    let place = info.location().map(|at| format!(" at {at}")).unwrap_or_default();
    let message = info.payload_as_str().unwrap_or("no message");
    let message = tenmil_base::text::escape(message);
    let mut text = format!("thread {name} panicked{place}: {message}");
    let backtrace = Backtrace::capture();
    if backtrace.status() == BacktraceStatus::Captured {
        // Writing to a string does not fail.
        let _ = write!(text, "\n{backtrace}");
    }
    text.lines().map(str::to_owned).collect()
}

impl Subscriber for LogSubscriber {
    /// Called once for each place that logs, and again after a change of the filter: a place that is not
    /// logged costs a load.
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        let filter = FILTER.read().unwrap_or_else(PoisonError::into_inner);
        metadata.is_event() && filter.admits(*metadata.level(), metadata.target())
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(FILTER.read().unwrap_or_else(PoisonError::into_inner).most_detailed())
    }

    fn event(&self, event: &Event<'_>) {
        self.0.submit(log_record_of(event));
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

fn log_record_of(event: &Event<'_>) -> LogRecord {
    let metadata = event.metadata();
    let mut parts = EventParts::default();
    event.record(&mut parts);
    let EventParts { message, cause, fields } = parts;
    let place = (metadata.file().unwrap_or_default(), metadata.line().unwrap_or_default());
    LogRecord {
        cause: format!("{}:{} {cause}", place.0, place.1),
        at: utc_now(),
        level: level_of(*metadata.level()),
        module: metadata.module_path().unwrap_or_default(),
        message,
        fields,
    }
}

const fn level_of(level: Level) -> LogLevel {
    match level {
        Level::ERROR => LogLevel::Error,
        Level::WARN => LogLevel::Warning,
        Level::INFO => LogLevel::Info,
        Level::DEBUG => LogLevel::Debug,
        Level::TRACE => LogLevel::Trace,
    }
}

impl EventParts {
    fn add(&mut self, field: &Field, value: LogValue) {
        self.fields.push(LogField { name: field.name(), value });
    }
}

impl Visit for EventParts {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let text = format!("{value:?}");
        match field.name() {
            "message" => self.message = text,
            "cause" => self.cause = text,
            _ => self.add(field, LogValue::Text(text)),
        }
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            "message" => value.clone_into(&mut self.message),
            "cause" => value.clone_into(&mut self.cause),
            _ => self.add(field, LogValue::Text(value.to_owned())),
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, LogValue::Unsigned(value));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, LogValue::Signed(value));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, LogValue::Float(value));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, LogValue::Bool(value));
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use tenmil_linux::process_log::{LogField, LogLevel, LogRecord, LogValue};
    use tracing::{Event, Metadata, Subscriber, span};

    use super::log_record_of;

    struct Keeper(Arc<Mutex<Vec<LogRecord>>>);

    impl Subscriber for Keeper {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }

        fn event(&self, event: &Event<'_>) {
            self.0.lock().unwrap().push(log_record_of(event));
        }

        fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
            span::Id::from_u64(1)
        }

        fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

        fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

        fn enter(&self, _: &span::Id) {}

        fn exit(&self, _: &span::Id) {}
    }

    #[test]
    fn event_becomes_a_record_with_its_level_cause_and_fields() {
        let kept = Arc::new(Mutex::new(Vec::new()));
        tracing::subscriber::with_default(Keeper(Arc::clone(&kept)), || {
            tracing::info!("{} was removed", "disk0");
            let host = Some("nqn.2026-01.example:db");
            let missing: Option<&str> = None;
            tracing::warn!(cause = %"disk1", blocks = 8_u64, up = true, host, missing, "medium error");
            tracing::debug!(change = -1_i64, uri = %"ram:1m", "details");
        });
        let kept = kept.lock().unwrap();
        let heads: Vec<_> = kept.iter().map(|record| (record.level, &*record.message)).collect();
        let expected = [
            (LogLevel::Info, "disk0 was removed"),
            (LogLevel::Warning, "medium error"),
            (LogLevel::Debug, "details"),
        ];
        assert_eq!(heads, expected);
        let field = |name, value| LogField { name, value };
        let text = |text: &str| LogValue::Text(text.to_owned());
        let expected = [
            field("blocks", LogValue::Unsigned(8)),
            field("up", LogValue::Bool(true)),
            field("host", text("nqn.2026-01.example:db")),
        ];
        assert_eq!(kept[1].fields, expected, "a value that is missing is no field");
        let expected = [field("change", LogValue::Signed(-1)), field("uri", text("ram:1m"))];
        assert_eq!(kept[2].fields, expected);
        assert!(kept[1].cause.ends_with(" disk1"), "{}", kept[1].cause);
        assert_ne!(kept[0].cause, kept[1].cause, "each place is a cause of its own");
    }
}
