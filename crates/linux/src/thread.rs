//! Threads: named, optionally pinned, stopped by a flag, joined on drop.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;

use tenmil_base::Span;

use crate::cpu_list::{PinError, pin_current};

/// Running thread. Dropping the handle stops and joins it; a panic in the thread is propagated to
/// the joining thread.
#[derive(Debug)]
pub struct Thread<T> {
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
    pub fn stop(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether the flag is set. It carries no data and orders nothing.
    #[inline]
    pub fn is_stopped(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl<T: Send + 'static> Thread<T> {
    /// Starts a thread. With a `core` it is pinned there first; the result is known on return, from
    /// [`pinned`](Self::pinned).
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
            let _ = report.send(core.map_or(Ok(()), pin_current));
            body(&theirs)
        })?;
        let pinned = reported.recv().unwrap_or(Ok(()));
        Ok(Self { stop, pinned, handle: Some(handle) })
    }

    /// Whether the thread is pinned to its CPU. `Ok` if no CPU was requested.
    pub fn pinned(&self) -> Result<(), &PinError> {
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
        self.stop.stop();
        self.join()
    }
}

impl<T> Drop for Thread<T> {
    fn drop(&mut self) {
        let Some(handle) = self.handle.take() else { return };
        self.stop.stop();
        if let Err(panic) = handle.join()
            && !std::thread::panicking()
        {
            resume_unwind(panic);
        }
    }
}

/// Yields the CPU to another runnable thread (sched_yield). For polling loops whose peer shares the
/// CPU.
pub fn yield_now() {
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

    use super::{StopFlag, Thread};
    use crate::CpuList;

    fn spin(stop: &StopFlag) {
        while !stop.is_stopped() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_thread_has_its_name_and_returns_its_value() {
        let name = |_: &StopFlag| std::thread::current().name().map(str::to_owned);
        let thread = Thread::spawn("device-0", None, name).unwrap();
        assert_eq!(thread.pinned(), Ok(()));
        assert_eq!(thread.join().as_deref(), Some("device-0"));
    }

    #[test]
    fn stopping_ends_a_thread_that_watches_its_flag() {
        let thread = Thread::spawn("spinner", None, |stop| {
            spin(stop);
            7
        });
        assert_eq!(thread.unwrap().stop(), 7);
    }

    #[test]
    fn a_thread_runs_where_it_was_bound() {
        let core = CpuList::allowed().iter().last().unwrap();
        let thread = Thread::spawn("bound", Some(core), |_| CpuList::allowed()).unwrap();
        assert_eq!(thread.pinned(), Ok(()));
        assert_eq!(thread.join().iter().collect::<Vec<_>>(), [core]);
    }

    #[test]
    fn a_core_that_does_not_exist_is_reported_and_the_thread_runs_anyway() {
        let thread = Thread::spawn("astray", Some(1023), |_| 7).unwrap();
        assert_eq!(thread.pinned().unwrap_err().core, 1023);
        assert_eq!(thread.join(), 7);
    }

    #[test]
    fn a_panic_reaches_whoever_joins() {
        let thread = Thread::spawn("doomed", None, |_| panic!("on purpose")).unwrap();
        let caught = catch_unwind(AssertUnwindSafe(|| thread.join())).unwrap_err();
        assert_eq!(caught.downcast_ref(), Some(&"on purpose"));

        let thread = Thread::spawn("doomed", None, |_| panic!("again")).unwrap();
        let caught = catch_unwind(AssertUnwindSafe(|| drop(thread))).unwrap_err();
        assert_eq!(caught.downcast_ref(), Some(&"again"));
    }

    #[test]
    fn dropping_the_handle_waits_for_the_end() {
        let ended = Arc::new(AtomicBool::new(false));
        let theirs = Arc::clone(&ended);
        drop(Thread::spawn("dropped", None, move |stop| {
            spin(stop);
            theirs.store(true, Ordering::Release);
        }));
        assert!(ended.load(Ordering::Acquire));
    }
}
