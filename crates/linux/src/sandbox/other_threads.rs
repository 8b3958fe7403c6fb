//! Running a job on the other threads of the process.
//!
//! Credentials and Landlock belong to a thread, so each thread has to change its own; a signal makes it
//! do so, as the C libraries do for setuid(2) (nptl(7)). Threads that start meanwhile inherit what the
//! thread that starts them has, so the list of threads is read until it has no new one.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::raw_call;

/// Job of each thread. It must be async-signal-safe: system calls, atomics and arithmetic only.
pub(super) type ThreadJob = Box<dyn Fn() -> Result<(), Errno> + Sync>;

/// Result of a job on all threads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ThreadJobResult {
    /// Threads that have done it.
    pub(super) threads: usize,
    /// Kernel threads of io_uring, which cannot.
    pub(super) kernel_threads: usize,
    /// Threads that have not: name and reason.
    pub(super) failed: Vec<(String, String)>,
}

struct PublishedJob {
    run: ThreadJob,
    /// Thread that has finished the job, 0 before.
    finished: AtomicI32,
    /// Its error number, 0 for none.
    errno: AtomicI32,
}

/// The job that the signal handler runs; null if none.
static JOB: AtomicPtr<PublishedJob> = AtomicPtr::new(std::ptr::null_mut());
/// One job at a time.
static JOBS: Mutex<()> = Mutex::new(());

/// Time in which a thread has to run the signal handler. A thread in an uninterruptible call to a
/// device does not.
const THREAD_MAX: Duration = Duration::from_secs(2);
const THREAD_PAUSE: Duration = Duration::from_micros(50);
/// Lists of threads that are read at most.
const ROUNDS_MAX: usize = 100;
/// Prefix of the names of io_uring's kernel threads, which take no signals. They have the credentials of
/// the time at which they were started.
const KERNEL_WORKER_PREFIX: &str = "iou-";

/// Runs the job on all threads but this one, which has done it already: threads that it starts inherit
/// what it has.
///
/// # Errors
///
/// If the kernel refuses to install the signal handler. Errors of threads are in the result.
pub(super) fn run_on_other_threads(run: ThreadJob) -> Result<ThreadJobResult, Errno> {
    let _one_at_a_time = JOBS.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    install_handler()?;
    // Never freed: a thread that does not respond in time may still run it later. A process does this
    // a few times.
    let job: &'static PublishedJob = Box::leak(Box::new(PublishedJob {
        run,
        finished: AtomicI32::new(0),
        errno: AtomicI32::new(0),
    }));
    JOB.store(std::ptr::from_ref(job).cast_mut(), Ordering::Release);
    let mut result = ThreadJobResult::default();
    let mut known = BTreeSet::from([current_thread()]);
    for _ in 0..ROUNDS_MAX {
        let new: Vec<i32> =
            process_threads().into_iter().filter(|thread| known.insert(*thread)).collect();
        if new.is_empty() {
            break;
        }
        for thread in new {
            let name = thread_name(thread);
            if name.starts_with(KERNEL_WORKER_PREFIX) {
                result.kernel_threads += 1;
                continue;
            }
            match run_on_thread(job, thread) {
                Ok(true) => result.threads += 1,
                Ok(false) => {}
                Err(why) => result.failed.push((name, why)),
            }
        }
    }
    JOB.store(std::ptr::null_mut(), Ordering::Release);
    Ok(result)
}

/// Whether the thread has run the job; false if it has ended.
fn run_on_thread(job: &PublishedJob, thread: i32) -> Result<bool, String> {
    if blocks_job_signal(thread) {
        return Err("it blocks signals, as the threads of librados do".to_owned());
    }
    job.finished.store(0, Ordering::Relaxed);
    match send_signal(thread) {
        Ok(()) => {}
        Err(Errno::SRCH) => return Ok(false),
        Err(errno) => return Err(errno.to_string()),
    }
    let start = Instant::now();
    // Acquire: pairs with the release store of the handler, which wrote `errno` before.
    while job.finished.load(Ordering::Acquire) != thread {
        if !process_threads().contains(&thread) {
            return Ok(false);
        }
        if start.elapsed() > THREAD_MAX {
            return Err(format!("it does not respond within {} s", THREAD_MAX.as_secs()));
        }
        std::thread::sleep(THREAD_PAUSE);
    }
    match job.errno.load(Ordering::Relaxed) {
        0 => Ok(true),
        errno => Err(Errno::from_raw_os_error(errno).to_string()),
    }
}

/// Handler of the signal. Async-signal-safe as the job is; keeps `errno` of the interrupted code.
extern "C" fn run_published_job(_: libc::c_int) {
    // Acquire: pairs with the release store that published the job.
    let job = JOB.load(Ordering::Acquire);
    // SAFETY: the pointer is null or comes from `Box::leak`, so it is valid for the rest of the process;
    // a job is shared by its atomics and by `run`, which is `Sync`.
    let Some(job) = (unsafe { job.as_ref() }) else { return };
    // SAFETY: the function has no premises.
    let errno_of_thread = unsafe { libc::__errno_location() };
    // SAFETY: the location of this thread's `errno` is valid for as long as the thread runs.
    let interrupted = unsafe { *errno_of_thread };
    let errno = (job.run)().map_or_else(Errno::raw_os_error, |()| 0);
    job.errno.store(errno, Ordering::Relaxed);
    job.finished.store(current_thread(), Ordering::Release);
    // SAFETY: as above; no reference to it exists.
    unsafe { *errno_of_thread = interrupted };
}

/// The signal of this module: a real-time signal that neither the C libraries nor this program use.
fn job_signal() -> libc::c_int {
    libc::SIGRTMIN() + 6
}

fn install_handler() -> Result<(), Errno> {
    // SAFETY: all zeroes is a valid `sigaction`: no flags, an empty mask, the default action.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = run_published_job as extern "C" fn(libc::c_int) as libc::sighandler_t;
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: `action` is initialized and outlives the call; the handler is a `'static` function that
    // is async-signal-safe; the old action is not requested.
    let result = unsafe { libc::sigaction(job_signal(), &raw const action, std::ptr::null_mut()) };
    if result == 0 { Ok(()) } else { Err(Errno::INVAL) }
}

fn send_signal(thread: i32) -> Result<(), Errno> {
    let numbers = [
        std::process::id() as usize,
        thread.unsigned_abs() as usize,
        job_signal().unsigned_abs() as usize,
        0,
        0,
    ];
    // SAFETY: tgkill has numbers as its arguments and reads no memory.
    unsafe { raw_call(libc::SYS_tgkill, numbers) }.map(drop)
}

/// Whether a thread blocks the signal. One that does would be waited for in vain.
fn blocks_job_signal(thread: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/self/task/{thread}/status"));
    let status = status.unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask >> (job_signal() - 1) & 1 != 0
}

fn current_thread() -> i32 {
    // SAFETY: gettid has no arguments and does not fail.
    let thread = unsafe { raw_call(libc::SYS_gettid, [0; 5]) };
    thread.ok().and_then(|thread| i32::try_from(thread).ok()).unwrap_or(0)
}

/// The threads of this process.
fn process_threads() -> BTreeSet<i32> {
    let Ok(entries) = std::fs::read_dir("/proc/self/task") else { return BTreeSet::new() };
    entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

fn thread_name(thread: i32) -> String {
    let name = std::fs::read_to_string(format!("/proc/self/task/{thread}/comm"));
    name.map_or_else(|_| thread.to_string(), |name| name.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use rustix::io::Errno;

    use super::{current_thread, process_threads, run_on_other_threads};
    use crate::NamedThread;

    /// The tests share the threads of their process.
    static ONE_TEST: Mutex<()> = Mutex::new(());

    #[test]
    fn job_runs_once_on_each_thread_whether_it_computes_or_sleeps() {
        let _one = ONE_TEST.lock();
        static RUNS: AtomicUsize = AtomicUsize::new(0);
        static THREADS: [AtomicUsize; 4] = [const { AtomicUsize::new(0) }; 4];
        let sleeps = NamedThread::spawn("sleeps", None, |stop| {
            while !stop.is_stopped() {
                std::thread::park_timeout(std::time::Duration::from_secs(1));
            }
        });
        let computes = NamedThread::spawn("computes", None, |stop| {
            THREADS[0].store(current_thread().unsigned_abs() as usize, Ordering::Release);
            while !stop.is_stopped() {
                std::hint::spin_loop();
            }
        });
        let before = process_threads();
        let result = run_on_other_threads(Box::new(|| {
            RUNS.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }));
        let result = result.unwrap();
        assert!(result.failed.is_empty(), "{:?}", result.failed);
        assert_eq!(RUNS.load(Ordering::Relaxed), result.threads);
        let after: BTreeSet<i32> = process_threads();
        assert!(result.threads + 1 >= before.intersection(&after).count(), "{result:?}");
        computes.unwrap().stop();
        sleeps.unwrap().stop();
    }

    #[test]
    fn thread_that_blocks_signals_is_reported_at_once() {
        let _one = ONE_TEST.lock();
        let start = std::time::Instant::now();
        let (blocks, blocked) = std::sync::mpsc::channel();
        let deaf = NamedThread::spawn("deaf", None, move |stop| {
            // SAFETY: all zeroes is a valid set of signals, and `sigfillset` replaces it.
            let mut all: libc::sigset_t = unsafe { std::mem::zeroed() };
            // SAFETY: the set outlives the call.
            unsafe { libc::sigfillset(&raw mut all) };
            // SAFETY: the set is initialized; the old one is not requested.
            unsafe {
                libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut())
            };
            blocks.send(()).unwrap();
            while !stop.is_stopped() {
                std::thread::park_timeout(std::time::Duration::from_millis(10));
            }
        });
        blocked.recv().unwrap();
        let result = run_on_other_threads(Box::new(|| Ok(()))).unwrap();
        let deaf_thread = result.failed.iter().find(|(name, _)| name == "deaf");
        assert!(deaf_thread.unwrap().1.contains("blocks signals"), "{:?}", result.failed);
        assert!(start.elapsed() < super::THREAD_MAX, "it is not waited for");
        deaf.unwrap().stop();
    }

    #[test]
    fn error_of_another_thread_is_reported_with_its_name() {
        let _one = ONE_TEST.lock();
        let sleeps = NamedThread::spawn("refusing", None, |stop| {
            while !stop.is_stopped() {
                std::thread::park_timeout(std::time::Duration::from_secs(1));
            }
        });
        let result = run_on_other_threads(Box::new(|| Err(Errno::PERM))).unwrap();
        let refusing = result.failed.iter().find(|(name, _)| name == "refusing");
        assert_eq!(refusing.unwrap().1, Errno::PERM.to_string());
        assert_eq!(result.threads, 0);
        sleeps.unwrap().stop();
    }
}
