//! Termination and reload signals as flags.
//!
//! The first SIGINT or SIGTERM sets a flag, so that a run can stop in order and print its results.
//! The second ends the process at once, with the conventional exit code: 128 plus the signal
//! number. With a [limit](limit_stop_time) the process exits after a fixed time from the first signal.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use tenmil_base::Span;

static INTERRUPTED: AtomicBool = AtomicBool::new(false);
static RELOAD: AtomicBool = AtomicBool::new(false);
static STOP_LIMIT: OnceLock<StopLimit> = OnceLock::new();

/// Upper bound for the time of an orderly stop.
struct StopLimit {
    span: Span,
    /// Text written to standard error when the limit expires.
    message: String,
    exit_code: u8,
}

/// Limits an orderly stop to `span` after the first SIGINT or SIGTERM.
///
/// If the process still runs then, `message` is written to standard error, if that does not block,
/// and the process exits at once with `exit_code`, whatever its threads wait for. Only the first
/// call has an effect.
///
/// # Errors
///
/// If the kernel refuses to install the handler.
pub fn limit_stop_time(span: Span, message: String, exit_code: u8) -> io::Result<()> {
    install_handler(libc::SIGALRM, handle_stop_limit)?;
    let _ = STOP_LIMIT.set(StopLimit { span, message, exit_code });
    Ok(())
}

/// Makes the first SIGINT or SIGTERM set [`is_stop_requested`] instead of ending the process.
pub fn request_stop_on_sigint_or_sigterm() -> io::Result<()> {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        install_handler(signal, handle_stop_signal)?;
    }
    Ok(())
}

/// Ignores SIGXFSZ, so that a write past the file size limit (RLIMIT_FSIZE) fails with EFBIG
/// instead of ending the process.
pub fn ignore_file_size_signal() -> io::Result<()> {
    // SAFETY: the call sets the action of one signal to "ignore"; no code of this process runs.
    let before = unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
    if before == libc::SIG_ERR { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Makes SIGHUP (terminal closed) set [`is_stop_requested`], unless SIGHUP is ignored, as under `nohup`.
pub fn request_stop_on_sighup() -> io::Result<()> {
    // SAFETY: all zeroes is a valid `sigaction`.
    let mut old: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: `old` is a local that outlives the call; the action is only read.
    let result = unsafe { libc::sigaction(libc::SIGHUP, std::ptr::null(), &raw mut old) };
    match result {
        0 if old.sa_sigaction == libc::SIG_IGN => Ok(()),
        0 => install_handler(libc::SIGHUP, handle_stop_signal),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Delivers SIGTERM to this process when its parent exits (PR_SET_PDEATHSIG; precisely: when the
/// parent thread that created this process exits).
pub fn end_with_parent() -> io::Result<()> {
    Ok(rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM))?)
}

/// Makes SIGHUP set [`take_reload_request`] instead of ending the process.
pub fn request_reload_on_sighup() -> io::Result<()> {
    install_handler(libc::SIGHUP, handle_reload)
}

/// Whether a reload was requested since the last call. Clears the request.
pub fn take_reload_request() -> bool {
    RELOAD.swap(false, Ordering::Relaxed)
}

/// Whether a stop was requested.
#[inline]
pub fn is_stop_requested() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

fn install_handler(signal: libc::c_int, handler: extern "C" fn(libc::c_int)) -> io::Result<()> {
    // SAFETY: all zeroes is a valid `sigaction`: no flags, an empty mask, the default action.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = handler as libc::sighandler_t;
    // SA_RESTART: interrupted system calls are restarted; the flag is polled between iterations.
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: `action` is initialized and outlives the call; the handler is a `'static` function
    // that is async-signal-safe; the old action is not requested.
    let result = unsafe { libc::sigaction(signal, &raw const action, std::ptr::null_mut()) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Handler of SIGINT, SIGTERM and SIGHUP. Async-signal-safe: atomics, a timer and `_exit` only.
extern "C" fn handle_stop_signal(signal: libc::c_int) {
    if INTERRUPTED.swap(true, Ordering::Relaxed) {
        // SAFETY: `_exit` is async-signal-safe (signal-safety(7)) and does not return.
        unsafe { libc::_exit(128 + signal) };
    }
    // A lock-free load: `STOP_LIMIT` was set before the handler was installed, or never.
    if let Some(limit) = STOP_LIMIT.get() {
        start_stop_timer(limit.span);
    }
}

/// Arms a one-shot SIGALRM after `span`.
fn start_stop_timer(span: Span) {
    // SAFETY: all zeroes is a valid `itimerval`: no interval and no first expiry.
    let mut timer: libc::itimerval = unsafe { std::mem::zeroed() };
    let micros = (span.ns / 1_000).max(1);
    timer.it_value.tv_sec = i64::try_from(micros / 1_000_000).unwrap_or(i64::MAX);
    timer.it_value.tv_usec = i64::try_from(micros % 1_000_000).unwrap_or(0);
    // SAFETY: `timer` is initialized and outlives the call; the old value is not requested. On
    // Linux setitimer(2) is a plain system call, so a signal handler may call it.
    unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const timer, std::ptr::null_mut()) };
}

/// Handler of SIGALRM: the orderly stop exceeded its limit. Async-signal-safe.
extern "C" fn handle_stop_limit(_: libc::c_int) {
    let Some(limit) = STOP_LIMIT.get() else { return };
    let mut ready = libc::pollfd { fd: libc::STDERR_FILENO, events: libc::POLLOUT, revents: 0 };
    // SAFETY: `ready` is one entry and outlives the call; poll(2) is async-signal-safe.
    let count = unsafe { libc::poll(&raw mut ready, 1, 0) };
    if count == 1 && ready.revents & libc::POLLOUT != 0 {
        let bytes = limit.message.as_bytes();
        // SAFETY: the bytes are initialized and live as long as the process; write(2) is
        // async-signal-safe. A failure is ignored: the process exits anyway.
        unsafe { libc::write(libc::STDERR_FILENO, bytes.as_ptr().cast(), bytes.len()) };
    }
    // SAFETY: `_exit` is async-signal-safe (signal-safety(7)) and does not return.
    unsafe { libc::_exit(i32::from(limit.exit_code)) };
}

/// Handler of the reload signal. Async-signal-safe: one atomic store.
extern "C" fn handle_reload(_: libc::c_int) {
    RELOAD.store(true, Ordering::Relaxed);
}
