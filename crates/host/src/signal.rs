//! Ctrl-C as a flag.
//!
//! The first SIGINT or SIGTERM sets a flag, so that a run can end in order and print what it has.
//! The second ends the process at once, with the exit code the shell expects: 128 plus the number.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);
static RELOAD: AtomicBool = AtomicBool::new(false);

/// From now on the first SIGINT or SIGTERM sets [`interrupted`] instead of ending the process.
pub fn catch_interrupts() -> io::Result<()> {
    for signal in [libc::SIGINT, libc::SIGTERM] {
        install(signal, on_signal)?;
    }
    Ok(())
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

/// Runs on top of whatever was going on: an atomic exchange and `_exit` are all it may do.
extern "C" fn on_signal(signal: libc::c_int) {
    if INTERRUPTED.swap(true, Ordering::Relaxed) {
        // SAFETY: `_exit` is async-signal-safe (signal-safety(7)) and does not return.
        unsafe { libc::_exit(128 + signal) };
    }
}

/// Runs on top of whatever was going on.
extern "C" fn on_reload(_: libc::c_int) {
    RELOAD.store(true, Ordering::Relaxed);
}
