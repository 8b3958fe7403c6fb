//! Flight-recorder files: what the reactors did before a panic or a stall.
//!
//! ```text
//!   panic, stalled reactor ─▶ DIRECTORY/flight-recorder-PID-N.txt       mode 0600, at most 8 of a process
//! ```
//!
//! The directory is the state directory of the server, or else that of the control sockets.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::panic;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

use tenmil_linux::clock::utc_now;
use tenmil_linux::runtime_directory::RuntimeDirectory;
use tenmil_reactor::flight_recorder::{
    FlightEventKind, FlightLog, flight_text, record_now, recorded_events,
};

/// State directory of the server, if it has one.
static STATE_DIRECTORY: Mutex<Option<PathBuf>> = Mutex::new(None);
/// Number of files written.
static WRITTEN: AtomicU32 = AtomicU32::new(0);

/// Largest number of files of a process.
const FILES_MAX: u32 = 8;

/// Sets the directory of the files.
pub(crate) fn set_state_directory(path: PathBuf) {
    *STATE_DIRECTORY.lock().unwrap_or_else(PoisonError::into_inner) = Some(path);
}

/// Writes what the recorder has to a file, and returns its path. `None` if this process has no reactors, or has
/// written as many files as it may.
pub(crate) fn write_flight_record(reason: &str) -> io::Result<Option<PathBuf>> {
    let logs = recorded_events();
    if logs.is_empty() {
        return Ok(None);
    }
    let number = WRITTEN.fetch_add(1, Ordering::Relaxed) + 1;
    if number > FILES_MAX {
        return Ok(None);
    }
    // A panic may have interrupted the owner of the lock.
    let state = STATE_DIRECTORY.try_lock().ok().and_then(|directory| directory.clone());
    let directory = match state {
        Some(directory) => directory,
        None => {
            let found = RuntimeDirectory::of_user();
            found.map_err(|error| io::Error::other(error.to_string()))?.path().to_owned()
        }
    };
    let path = directory.join(format!("flight-recorder-{}-{number}.txt", std::process::id()));
    let text = file_text(reason, &logs);
    // A process that has ended may have had this number.
    let _ = fs::remove_file(&path);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path)?;
    file.write_all(text.as_bytes())?;
    record_now(FlightEventKind::Written, [number.into(), 0]);
    Ok(Some(path))
}

/// Has a panic write the file, once it is in the log.
pub(crate) fn extend_panic_hook() {
    let before = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        before(panic);
        record_now(FlightEventKind::Panicked, [0, 0]);
        if let Some(line) = log_line(write_flight_record(&panic.to_string())) {
            tracing::error!("{line}");
            // The process may end with this thread.
            crate::process_log::drain_process_log();
        }
    }));
}

/// Line of the log about a written file.
pub(crate) fn log_line(written: io::Result<Option<PathBuf>>) -> Option<String> {
    match written {
        Ok(path) => path.map(|path| format!("the flight recorder is in {}", path.display())),
        Err(error) => Some(format!("the flight recorder cannot be written: {error}")),
    }
}

fn file_text(reason: &str, logs: &[FlightLog]) -> String {
    let now = utc_now();
    let mut text = format!(
        "flight recorder of tenmil {}, process {}\nwritten: {now}\nreason: {}\n",
        env!("CARGO_PKG_VERSION"),
        std::process::id(),
        tenmil_base::text::escape(reason),
    );
    for log in logs {
        let place =
            log.reactor.map_or("other threads".to_owned(), |number| format!("reactor {number}"));
        let line =
            format!("{place}: {} events, {} overwritten\n", log.events.len(), log.overwritten);
        text.push_str(&line);
    }
    text.push('\n');
    // Names may come from a peer.
    text.push_str(&tenmil_base::text::escape_lines(&flight_text(logs, now)));
    text
}
