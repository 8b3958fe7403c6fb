//! Ctrl-C as a flag.
//!
//! The first SIGINT or SIGTERM sets a flag, so that a run can end in order and print what it has.
//! The second ends the process at once, with the exit code the shell expects: 128 plus the number.
//! With a [limit](limit_stop) the process ends by itself that long after the first.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use base::Span;

static INTERRUPTED: AtomicBool = AtomicBool::new(false);
static RELOAD: AtomicBool = AtomicBool::new(false);
static STOP_LIMIT: OnceLock<StopLimit> = OnceLock::new();

/// How long an orderly stop may take.
struct StopLimit {
    span: Span,
    /// What standard error gets when it took longer.
    message: String,
    exit_code: u8,
}

/// From the first SIGINT or SIGTERM on, the process has `span` to stop in order. A process that is
/// there after it writes `message` to standard error, if that takes it without waiting, and ends at
/// once with `exit_code`, whatever its threads wait for. Counts from the first call.
///
/// # Errors
///
/// If the kernel refuses the handler.
pub fn limit_stop(span: Span, message: String, exit_code: u8) -> io::Result<()> {
    install(libc::SIGALRM, on_stop_limit)?;
    let _ = STOP_LIMIT.set(StopLimit { span, message, exit_code });
    Ok(())
}

/// From now on the first SIGINT or SIGTERM sets [`interrupted`] instead of ending the process.
pub fn catch_interrupts() -> io::Result<()> {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        install(signal, on_signal)?;
    }
    Ok(())
}

/// From now on a write past the largest size of a file (RLIMIT_FSIZE) fails with EFBIG, and SIGXFSZ does
/// not end the process.
pub fn ignore_file_size() -> io::Result<()> {
    // SAFETY: it changes the action of one signal to one that runs no code of ours.
    let before = unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    if before == libc::SIG_ERR { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The same for SIGHUP, which says that the terminal is gone; unless it is ignored, as under
/// `nohup`.
pub fn catch_hangup() -> io::Result<()> {
    // SAFETY: all zeroes is a valid `sigaction`.
    let mut old: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: `old` is ours and lives through the call; nothing is changed.
    let result = unsafe { libc::sigaction(libc::SIGHUP, std::ptr::null(), &raw mut old) };
    match result {
        0 if old.sa_sigaction == libc::SIG_IGN => Ok(()),
        0 => install(libc::SIGHUP, on_signal),
        _ => Err(io::Error::last_os_error()),
    }
}

/// From now on the end of the process that started this one counts as SIGTERM: more exactly, of the
/// thread that did.
pub fn end_with_parent() -> io::Result<()> {
    Ok(rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM))?)
}

/// From now on SIGHUP sets [`reload_asked`] instead of ending the process.
pub fn catch_reload() -> io::Result<()> {
    install(libc::SIGHUP, on_reload)
}

/// Whether somebody has asked since this was last called that what was read at start be read again.
pub fn reload_asked() -> bool {
    RELOAD.swap(false, Ordering::Relaxed)
}

/// Whether somebody wants this to end.
#[inline]
pub fn interrupted() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

fn install(signal: libc::c_int, handler: extern "C" fn(libc::c_int)) -> io::Result<()> {
    // SAFETY: all zeroes is a valid `sigaction`: no flags, an empty mask, the default action.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as libc::sighandler_t;
    // A system call that was waiting starts again; the flag is looked at between turns.
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: `action` is initialised and lives through the call, the handler is a function that
    // lives for ever and does only what a handler may, and the old action is not asked for.
    let result = unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Runs on top of whatever was going on: atomics, a timer and `_exit` are all it may use.
extern "C" fn on_signal(signal: libc::c_int) {
    if INTERRUPTED.swap(true, Ordering::Relaxed) {
        // SAFETY: `_exit` is async-signal-safe (signal-safety(7)) and does not return.
        unsafe { libc::_exit(128 + signal) };
    }
    // A lock-free load: it was set before, or there is no limit.
    if let Some(limit) = STOP_LIMIT.get() {
        start_stop_timer(limit.span);
    }
}

/// SIGALRM comes once after `span`.
fn start_stop_timer(span: Span) {
    // SAFETY: all zeroes is a valid `itimerval`: no interval, and no first expiry yet.
    let mut timer: libc::itimerval = unsafe { std::mem::zeroed() };
    let micros = (span.ns / 1_000).max(1);
    timer.it_value.tv_sec = i64::try_from(micros / 1_000_000).unwrap_or(i64::MAX);
    timer.it_value.tv_usec = i64::try_from(micros % 1_000_000).unwrap_or(0);
    // SAFETY: `timer` is initialised and lives through the call, and the old one is not asked for.
    // On Linux setitimer(2) is a system call and nothing else, so a handler may make it.
    unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut()) };
}

/// Runs on top of whatever was going on, when an orderly stop has taken too long.
extern "C" fn on_stop_limit(_: libc::c_int) {
    let Some(limit) = STOP_LIMIT.get() else { return };
    let mut ready = libc::pollfd { fd: libc::STDERR_FILENO, events: libc::POLLOUT, revents: 0 };
    // SAFETY: `ready` is one entry and lives through the call; poll(2) is async-signal-safe.
    let count = unsafe { libc::poll(&raw mut ready, 1, 0) };
    if count == 1 && ready.revents & libc::POLLOUT != 0 {
        let bytes = limit.message.as_bytes();
        // SAFETY: the bytes are initialised and live as long as the process; write(2) is
        // async-signal-safe. That it fails changes nothing: the process ends.
        unsafe { libc::write(libc::STDERR_FILENO, bytes.as_ptr().cast(), bytes.len()) };
    }
    // SAFETY: `_exit` is async-signal-safe (signal-safety(7)) and does not return.
    unsafe { libc::_exit(i32::from(limit.exit_code)) };
}

/// Runs on top of whatever was going on.
extern "C" fn on_reload(_: libc::c_int) {
    RELOAD.store(true, Ordering::Relaxed);
}
