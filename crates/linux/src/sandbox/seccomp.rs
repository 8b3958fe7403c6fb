//! Installing a seccomp filter on all threads, and the count of the calls that it denies.

use std::sync::atomic::{AtomicU32, Ordering};

use libc::{c_int, c_void, siginfo_t, sock_filter, sock_fprog};
use rustix::io::Errno;

use super::filter_program::NUMBER_LAST;
use super::raw_call;

/// Denied calls by number.
static DENIED: [AtomicU32; NUMBER_LAST as usize + 1] =
    [const { AtomicU32::new(0) }; NUMBER_LAST as usize + 1];

/// The part of them that was reported.
static REPORTED: [AtomicU32; NUMBER_LAST as usize + 1] =
    [const { AtomicU32::new(0) }; NUMBER_LAST as usize + 1];

/// Flags of the filter, from the newest kernel to the oldest. Without SPEC_ALLOW kernels before 5.16
/// would slow down all threads by mitigations (SSBD) that this process does not need: it runs no
/// foreign code.
const FLAGS: [libc::c_ulong; 3] = [
    libc::SECCOMP_FILTER_FLAG_TSYNC
        | libc::SECCOMP_FILTER_FLAG_LOG
        | libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW,
    libc::SECCOMP_FILTER_FLAG_TSYNC | libc::SECCOMP_FILTER_FLAG_LOG,
    libc::SECCOMP_FILTER_FLAG_TSYNC,
];

/// Installs a filter on all threads of the process, or on none. Needs no_new_privs.
pub(super) fn install_on_all_threads(program: &[sock_filter]) -> Result<(), Errno> {
    install_denied_handler()?;
    let mut result = Err(Errno::INVAL);
    for flags in FLAGS {
        result = install_program(program, flags);
        if result != Err(Errno::INVAL) {
            break;
        }
    }
    result
}

/// Installs a filter on the current thread.
pub(super) fn install_on_this_thread(program: &[sock_filter]) -> Result<(), Errno> {
    install_program(program, 0)
}

fn install_program(program: &[sock_filter], flags: libc::c_ulong) -> Result<(), Errno> {
    let Ok(len) = u16::try_from(program.len()) else { return Err(Errno::INVAL) };
    let program = sock_fprog { len, filter: program.as_ptr().cast_mut() };
    let flags = usize::try_from(flags).unwrap_or(0);
    let mode = libc::SECCOMP_SET_MODE_FILTER as usize;
    let arguments = [mode, flags, (&raw const program).addr(), 0, 0];
    // SAFETY: the kernel reads the program, of which pointer and length are given, and copies it; both
    // outlive the call.
    match unsafe { raw_call(libc::SYS_seccomp, arguments)? } {
        0 => Ok(()),
        // The identifier of a thread that has another filter and cannot get this one.
        _ => Err(Errno::BUSY),
    }
}

/// Denied calls by number, since the start of the process.
pub(super) fn denied_calls() -> Vec<(u32, u32)> {
    let counts = (0..).zip(&DENIED).map(|(number, count)| (number, count.load(Ordering::Relaxed)));
    counts.filter(|(_, count)| *count > 0).collect()
}

/// Denied calls by number, since the last call of this function.
pub(super) fn new_denied_calls() -> Vec<(u32, u32)> {
    let new = |(number, count): (u32, u32)| {
        let before = REPORTED[number as usize].swap(count, Ordering::Relaxed);
        (number, count.wrapping_sub(before))
    };
    denied_calls().into_iter().map(new).filter(|(_, count)| *count > 0).collect()
}

fn install_denied_handler() -> Result<(), Errno> {
    // SAFETY: all zeroes is a valid `sigaction`: no flags, an empty mask, the default action.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler = deny_call as extern "C" fn(c_int, *mut siginfo_t, *mut c_void);
    action.sa_sigaction = handler as libc::sighandler_t;
    action.sa_flags = libc::SA_SIGINFO | libc::SA_RESTART;
    // SAFETY: `action` is initialized and outlives the call; the handler is a `'static` function that
    // is async-signal-safe; the old action is not requested.
    let result = unsafe { libc::sigaction(libc::SIGSYS, &raw const action, std::ptr::null_mut()) };
    if result == 0 { Ok(()) } else { Err(Errno::INVAL) }
}

/// Handler of SIGSYS: counts the call and makes it return EPERM. Async-signal-safe: atomics, and the
/// registers of the interrupted thread.
extern "C" fn deny_call(_: c_int, _: *mut siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes a valid `ucontext_t` to a handler with SA_SIGINFO, which nothing else
    // accesses while the handler runs.
    let Some(context) = (unsafe { context.cast::<libc::ucontext_t>().as_mut() }) else { return };
    let number = take_number_and_return(context, -i64::from(libc::EPERM));
    if let Some(count) = DENIED.get(number) {
        count.fetch_add(1, Ordering::Relaxed);
    }
}

/// The number of the system call that the thread was to make; it will see `result` instead.
#[cfg(target_arch = "x86_64")]
fn take_number_and_return(context: &mut libc::ucontext_t, result: i64) -> usize {
    // The kernel has restored the number into RAX (SECCOMP_RET_TRAP rolls the call back).
    let rax = &mut context.uc_mcontext.gregs[libc::REG_RAX as usize];
    usize::try_from(std::mem::replace(rax, result)).unwrap_or(usize::MAX)
}

/// The number of the system call that the thread was to make; it will see `result` instead.
#[cfg(target_arch = "aarch64")]
fn take_number_and_return(context: &mut libc::ucontext_t, result: i64) -> usize {
    let number = context.uc_mcontext.regs[8];
    context.uc_mcontext.regs[0] = result.cast_unsigned();
    usize::try_from(number).unwrap_or(usize::MAX)
}

/// No filter is made for other architectures.
#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn take_number_and_return(_: &mut libc::ucontext_t, _: i64) -> usize {
    usize::MAX
}
