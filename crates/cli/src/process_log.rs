//! Process log: `tracing` events as lines on standard error.
//!
//! ```text
//!   tracing::info!(cause = %uri, "{uri} was removed")  ->  note: disk0 was removed
//! ```
//!
//! Lines are rate-limited by source location and `cause`. So `cause` names an object that the operator
//! configured, such as a device, and nothing that a peer sent.

use std::backtrace::{Backtrace, BacktraceStatus};
use std::fmt::{self, Write};
use std::panic::PanicHookInfo;
use std::sync::OnceLock;

use tenmil_base::Span;
use tenmil_linux::Clock;
use tenmil_linux::process_log::{LogRecord, ProcessLog, StandardError, write_within};
use tracing::field::{Field, Visit};
use tracing::span;
use tracing::{Event, Level, Metadata, Subscriber};

/// Subscriber that writes events as lines.
struct LineSubscriber(ProcessLog);

/// Fields of an event.
#[derive(Default)]
struct EventFields {
    message: String,
    cause: String,
    /// All other fields, as ` name=value`.
    fields: String,
}

static LOG: OnceLock<ProcessLog> = OnceLock::new();

/// Time limit for writing pending lines at process exit.
const DRAIN_MAX: Span = Span::from_ms(250);
/// Time limit for writing the error that ends the process.
const ERROR_MAX: Span = Span::from_secs(1);

/// Starts the process log once. If its thread cannot be started, nothing is logged.
pub(crate) fn start_process_log() {
    if LOG.get().is_none()
        && let Ok(log) = ProcessLog::start(StandardError, Clock::start())
        && LOG.set(log.clone()).is_ok()
    {
        // An embedding program may have set a subscriber, which then receives the events instead.
        let _ = tracing::subscriber::set_global_default(LineSubscriber(log));
    }
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

/// Writes the error that ends the process to standard error, for a limited time: a process whose standard
/// error is not read ends all the same.
pub(crate) fn write_final_error(text: String) {
    // A failed write has nowhere to be reported.
    let _ = write_within(StandardError, text, ERROR_MAX);
}

/// Reports panics as lines of the process log. The standard hook writes on the thread that panics, and
/// blocks it while standard error is not read.
pub(crate) fn install_panic_hook() {
    std::panic::set_hook(Box::new(|info| {
        start_process_log();
        let Some(log) = LOG.get() else { return };
        for (index, line) in panic_lines(info).into_iter().enumerate() {
            // Each line is a cause of its own: none is suppressed by the others.
            log.submit_line(LogRecord { cause: format!("panic {index}"), text: line });
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
    let mut text = format!("error: thread {name} panicked{place}: {message}");
    let backtrace = Backtrace::capture();
    if backtrace.status() == BacktraceStatus::Captured {
        // Writing to a string does not fail.
        let _ = write!(text, "\n{backtrace}");
    }
    text.lines().map(tenmil_base::text::escape).collect()
}

impl Subscriber for LineSubscriber {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO
    }

    fn event(&self, event: &Event<'_>) {
        self.0.submit_line(log_record_of(event));
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
    let mut parts = EventFields::default();
    event.record(&mut parts);
    let EventFields { message, cause, fields } = parts;
    let place = (metadata.file().unwrap_or_default(), metadata.line().unwrap_or_default());
    LogRecord {
        cause: format!("{}:{} {cause}", place.0, place.1),
        // The text may contain data from a peer, so control characters are escaped.
        text: tenmil_base::text::escape(&format!(
            "{}: {message}{fields}",
            level_prefix(*metadata.level())
        )),
    }
}

const fn level_prefix(level: Level) -> &'static str {
    match level {
        Level::ERROR => "error",
        Level::WARN => "warning",
        _ => "note",
    }
}

impl Visit for EventFields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            "cause" => write!(self.cause, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use tenmil_linux::process_log::LogRecord;
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
    fn event_is_one_line_with_its_level_and_fields() {
        let kept = Arc::new(Mutex::new(Vec::new()));
        tracing::subscriber::with_default(Keeper(Arc::clone(&kept)), || {
            tracing::info!("{} was removed", "disk0");
            tracing::warn!(cause = %"disk1", blocks = 8, "medium error");
            tracing::info!("{} refused", "nqn.\u{1b}[2J\u{202e}");
        });
        let kept = kept.lock().unwrap();
        let texts: Vec<&str> = kept.iter().map(|record| record.text.as_str()).collect();
        let expected = [
            "note: disk0 was removed",
            "warning: medium error blocks=8",
            "note: nqn.\\u{1b}[2J\\u{202e} refused",
        ];
        assert_eq!(texts, expected, "and nothing in it acts on a terminal");
        assert!(kept[1].cause.ends_with(" disk1"), "{}", kept[1].cause);
        assert_ne!(kept[0].cause, kept[1].cause, "each place is a cause of its own");
    }
}
