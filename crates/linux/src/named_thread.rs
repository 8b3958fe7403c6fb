//! Threads: named, optionally pinned, stopped by a flag, joined on drop.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;

use tenmil_base::Span;

use crate::cpu_list::{PinError, pin_current_thread};

/// Running thread. Dropping the handle stops and joins it; a panic in the thread is propagated to
/// the joining thread.
#[derive(Debug)]
pub struct NamedThread<T> {
    stop: StopFlag,
    pinned: Result<(), PinError>,
    handle: Option<JoinHandle<T>>,
}

/// Stop flag. Cheap to clone and to read: one relaxed load.
#[derive(Clone, Debug, Default)]
pub struct StopFlag(Arc<AtomicBool>);

impl StopFlag {
    /// Creates a flag that is not set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the flag.
    pub fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether the flag is set. It carries no data and orders nothing.
    #[inline]
    pub fn is_stopped(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl<T: Send + 'static> NamedThread<T> {
    /// Starts a thread. With a `core` it is pinned there first; the result is known on return, from
    /// [`pin_result`](Self::pin_result).
    pub fn spawn(
        name: &str,
        core: Option<u32>,
        body: impl FnOnce(&StopFlag) -> T + Send + 'static,
    ) -> std::io::Result<Self> {
        let stop = StopFlag::new();
        let theirs = stop.clone();
        let (report, reported) = mpsc::channel();
        let handle = std::thread::Builder::new().name(name.into()).spawn(move || {
            // The receiver waits below until this is sent, so sending cannot fail.
            let _ = report.send(core.map_or(Ok(()), pin_current_thread));
            body(&theirs)
        })?;
        let pinned = reported.recv().unwrap_or(Ok(()));
        Ok(Self { stop, pinned, handle: Some(handle) })
    }

    /// Whether the thread is pinned to its CPU. `Ok` if no CPU was requested.
    pub fn pin_result(&self) -> Result<(), &PinError> {
        self.pinned.as_ref().copied()
    }

    /// Stop flag of the thread.
    pub fn stop_flag(&self) -> &StopFlag {
        &self.stop
    }

    /// Whether the thread has ended, by return or panic.
    pub fn is_finished(&self) -> bool {
        self.handle.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits for the thread to end and returns its result.
    ///
    /// # Panics
    ///
    /// If the thread panicked, with the same message.
    pub fn join(mut self) -> T {
        match self.handle.take().map(JoinHandle::join) {
            Some(Ok(value)) => value,
            Some(Err(panic)) => resume_unwind(panic),
            None => unreachable!("the handle is taken here and in drop, and both end its life"),
        }
    }

    /// Sets the stop flag, waits for the thread to end, and returns its result.
    ///
    /// # Panics
    ///
    /// If the thread panicked, with the same message.
    pub fn stop(self) -> T {
        self.stop.set();
        self.join()
    }
}

impl<T> Drop for NamedThread<T> {
    fn drop(&mut self) {
        let Some(handle) = self.handle.take() else { return };
        self.stop.set();
        if let Err(panic) = handle.join()
            && !std::thread::panicking()
        {
            resume_unwind(panic);
        }
    }
}

/// Yields the CPU to another runnable thread (sched_yield). For polling loops whose peer shares the
/// CPU.
pub fn yield_cpu() {
    std::thread::yield_now();
}

/// Sleeps. For supervising loops, never for a loop on which others depend.
pub fn sleep(span: Span) {
    std::thread::sleep(std::time::Duration::from_nanos(span.ns));
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::{NamedThread, StopFlag};
    use crate::CpuList;

    fn spin_until_stopped(stop: &StopFlag) {
        while !stop.is_stopped() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn thread_has_its_name_and_returns_its_value() {
        let name = |_: &StopFlag| std::thread::current().name().map(str::to_owned);
        let thread = NamedThread::spawn("device-0", None, name).unwrap();
        assert_eq!(thread.pin_result(), Ok(()));
        assert_eq!(thread.join().as_deref(), Some("device-0"));
    }

    #[test]
    fn stop_ends_a_thread_that_checks_its_flag() {
        let thread = NamedThread::spawn("spinner", None, |stop| {
            spin_until_stopped(stop);
            7
        });
        assert_eq!(thread.unwrap().stop(), 7);
    }

    #[test]
    fn pinned_thread_runs_on_its_cpu() {
        let core = CpuList::allowed_cpus().iter().last().unwrap();
        let thread = NamedThread::spawn("bound", Some(core), |_| CpuList::allowed_cpus()).unwrap();
        assert_eq!(thread.pin_result(), Ok(()));
        assert_eq!(thread.join().iter().collect::<Vec<_>>(), [core]);
    }

    #[test]
    fn nonexistent_core_is_reported_and_the_thread_runs_unpinned() {
        let thread = NamedThread::spawn("astray", Some(1023), |_| 7).unwrap();
        assert_eq!(thread.pin_result().unwrap_err().core, 1023);
        assert_eq!(thread.join(), 7);
    }

    #[test]
    fn thread_panic_reaches_join() {
        let thread = NamedThread::spawn("doomed", None, |_| panic!("on purpose")).unwrap();
        let caught = catch_unwind(AssertUnwindSafe(|| thread.join())).unwrap_err();
        assert_eq!(caught.downcast_ref(), Some(&"on purpose"));

        let thread = NamedThread::spawn("doomed", None, |_| panic!("again")).unwrap();
        let caught = catch_unwind(AssertUnwindSafe(|| drop(thread))).unwrap_err();
        assert_eq!(caught.downcast_ref(), Some(&"again"));
    }

    #[test]
    fn dropping_the_handle_joins_the_thread() {
        let ended = Arc::new(AtomicBool::new(false));
        let theirs = Arc::clone(&ended);
        drop(NamedThread::spawn("dropped", None, move |stop| {
            spin_until_stopped(stop);
            theirs.store(true, Ordering::Release);
        }));
        assert!(ended.load(Ordering::Acquire));
    }
}
