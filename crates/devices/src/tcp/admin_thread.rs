//! Admin thread of remote controllers.

use std::fmt::Display;
use std::sync::Arc;

use tenmil_base::{Instant, SharedWaker, Span};
use tenmil_linux::{Clock, EventLoop, NamedThread, Notifier, Sleeper, StopFlag};

use super::tcp_uri::TcpUri;
use super::wait_set::WaitSet;
use tenmil_base::Error;

/// A running admin thread.
pub(super) struct AdminThread {
    thread: Option<NamedThread<()>>,
    waker: Notifier,
}

/// An admin thread before its start.
pub(super) struct AdminThreadBuilder {
    sleeper: Sleeper,
    idle_wait: WaitSet,
}

/// Timeout of a shutdown.
const SHUTDOWN: Span = Span::from_secs(2);

impl AdminThreadBuilder {
    pub(super) fn new(name: &TcpUri) -> Result<Self, Error> {
        let sleeper = Sleeper::new().map_err(|error| setup_error(name, THREAD, &error))?;
        let idle_wait = WaitSet::new().map_err(|error| setup_error(name, DESCRIPTOR, &error))?;
        let added = sleeper.sources().add_source(idle_wait.descriptor(), 1);
        added.map_err(|error| setup_error(name, DESCRIPTOR, &error))?;
        Ok(Self { sleeper, idle_wait })
    }

    /// Waker of the thread.
    pub(super) fn waker(&self) -> SharedWaker {
        Arc::new(self.sleeper.notifier())
    }

    /// Wait set for the sockets. The thread clears its waker.
    pub(super) fn wait_set(&self) -> &WaitSet {
        &self.idle_wait
    }

    /// Starts the thread.
    pub(super) fn begin<T: EventLoop>(
        self,
        name: &TcpUri,
        clock: Clock,
        make_loop: impl FnOnce(StopFlag, WaitSet) -> T + Send + 'static,
    ) -> Result<AdminThread, Error> {
        let Self { mut sleeper, idle_wait } = self;
        let waker = sleeper.notifier();
        let body = move |stop: &StopFlag| {
            let mut event_loop = make_loop(stop.clone(), idle_wait);
            tenmil_linux::event_loop::run_event_loop(&mut event_loop, &clock, &mut sleeper);
        };
        let thread = NamedThread::spawn("tend", None, body);
        let thread = thread.map_err(|error| setup_error(name, THREAD, &error))?;
        Ok(AdminThread { thread: Some(thread), waker })
    }
}

impl AdminThread {
    /// Wakes the thread.
    pub(super) fn wake(&self) {
        self.waker.notify();
    }

    /// Stops the thread and waits until it has ended.
    pub(super) fn end(&mut self) {
        if let Some(thread) = self.thread.take() {
            thread.stop_flag().set();
            self.waker.notify();
            // Joins the thread.
            drop(thread);
        }
    }
}

/// Polls until a shutdown is complete or has timed out. `is_going_on` does the work and returns
/// whether the shutdown is still in progress.
pub(super) fn wait_for_shutdown(clock: &Clock, mut is_going_on: impl FnMut(Instant) -> bool) {
    let end = clock.now().after(SHUTDOWN);
    while is_going_on(clock.now()) && clock.now() < end {
        tenmil_linux::named_thread::yield_cpu();
    }
}

const THREAD: &str = "a thread to tend it";
const DESCRIPTOR: &str = "a descriptor to wait for";

fn setup_error(name: &TcpUri, what: &str, error: &dyn Display) -> Error {
    Error::environment(format!("connect to tcp://{}: {what}: {error}", name.address))
}
