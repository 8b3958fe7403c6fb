//! The thread that tends remote SSDs: how it begins, is woken, and ends.

use std::fmt::Display;
use std::sync::Arc;

use base::{Instant, Span, Wake};
use host::{Bell, Clock, Sleeper, Stop, Thread, Turn};

use super::name::TcpName;
use super::sleep::Pillow;
use crate::Refused;

/// A thread that tends.
pub(super) struct TendingThread {
    thread: Option<Thread<()>>,
    bell: Bell,
}

/// What such a thread will sleep in.
pub(super) struct TenderBed {
    sleeper: Sleeper,
    pillow: Pillow,
}

/// How long a shutdown is waited for.
const SHUTDOWN: Span = Span::from_secs(2);

impl TenderBed {
    pub(super) fn make(name: &TcpName) -> Result<Self, Refused> {
        let sleeper = Sleeper::new().map_err(|error| refused(name, THREAD, &error))?;
        let pillow = Pillow::new().map_err(|error| refused(name, DESCRIPTOR, &error))?;
        let added = sleeper.sources().add(pillow.descriptor(), 1);
        added.map_err(|error| refused(name, DESCRIPTOR, &error))?;
        Ok(Self { sleeper, pillow })
    }

    /// What wakes the thread.
    pub(super) fn bell(&self) -> Arc<dyn Wake + Send + Sync> {
        Arc::new(self.sleeper.bell())
    }

    /// What wakes it as well, and is cleared by it.
    pub(super) fn pillow(&self) -> &Pillow {
        &self.pillow
    }

    /// Begins to tend.
    pub(super) fn begin<T: Turn>(
        self,
        name: &TcpName,
        clock: Clock,
        tender: impl FnOnce(Stop, Pillow) -> T + Send + 'static,
    ) -> Result<TendingThread, Refused> {
        let Self { mut sleeper, pillow } = self;
        let bell = sleeper.bell();
        let body = move |stop: &Stop| {
            let mut tender = tender(stop.clone(), pillow);
            host::turn::run(&mut tender, &clock, &mut sleeper);
        };
        let thread = Thread::spawn("tend", None, body);
        let thread = thread.map_err(|error| refused(name, THREAD, &error))?;
        Ok(TendingThread { thread: Some(thread), bell })
    }
}

impl TendingThread {
    /// There is something to do.
    pub(super) fn wake(&self) {
        self.bell.ring();
    }

    /// Waits until it has ended.
    pub(super) fn end(&mut self) {
        if let Some(thread) = self.thread.take() {
            thread.stop_flag().stop();
            self.bell.ring();
            // Its own drop waits for the end.
            drop(thread);
        }
    }
}

/// Waits for the end of a shutdown, but not for long. `is_going_on` does what there is to do.
pub(super) fn wait_for_shutdown(clock: &Clock, mut is_going_on: impl FnMut(Instant) -> bool) {
    let end = clock.now().after(SHUTDOWN);
    while is_going_on(clock.now()) && clock.now() < end {
        host::thread::give_way();
    }
}

const THREAD: &str = "a thread to tend it";
const DESCRIPTOR: &str = "a descriptor to wait for";

fn refused(name: &TcpName, what: &str, error: &dyn Display) -> Refused {
    Refused::machine(format!("call tcp://{}: {what}: {error}", name.address))
}
