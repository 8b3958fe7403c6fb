//! Reactors that turn by themselves: an OS thread for each core.

use std::sync::Arc;

use host::{Clock, Cores, Thread, turn};

use crate::directory::{Directory, NotSpawned, ReactorId, Sample};
use crate::event::Event;
use crate::message::Handle;
use crate::reactor::{Assembly, ReactorOptions};
use crate::refused::Refused;
use crate::spell::PollMode;
use crate::thread::ThreadPlan;
use crate::watch::Stopwatch;

/// Running reactors. Dropping them stops them: all threads end, once their pollers have let go or a
/// while has passed.
#[derive(Debug)]
pub struct Reactors {
    directory: Arc<Directory>,
    threads: Vec<Thread<()>>,
    clock: Clock,
}

impl Reactors {
    /// Starts a reactor for each of `cores`, all of which this process must be allowed to use, and
    /// binds it there if it may. That it may not is an event.
    pub fn start(cores: &Cores, options: &ReactorOptions, clock: &Clock) -> Result<Self, Refused> {
        let allowed = Cores::allowed();
        if cores.is_empty() {
            return Err(Refused::NoCores);
        }
        if let Some(core) = cores.iter().find(|core| !allowed.contains(*core)) {
            return Err(Refused::UnknownCore { core, allowed });
        }
        let cores: Vec<u32> = cores.iter().collect();
        let stopwatch = Stopwatch::Clock(*clock);
        let assembly = Assembly::new(&cores, options, &stopwatch, clock.now())?;
        let Assembly { directory, reactors } = assembly;
        let mut started = Self { directory, threads: Vec::new(), clock: *clock };
        for ((mut reactor, mut sleeper), core) in reactors.into_iter().zip(cores) {
            let clock = *clock;
            let name = format!("reactor-{}", reactor.id());
            let id = reactor.id();
            let body = move |_: &host::Stop| turn::run(&mut reactor, &clock, &mut sleeper);
            let thread = Thread::spawn(&name, options.pin.then_some(core), body)
                .map_err(|error| Refused::machine("start a reactor", &error))?;
            if let Err(error) = thread.pinned() {
                let event = Event::NotPinned { reactor: id, error: error.to_string() };
                started.directory.note(clock.now(), event);
            }
            started.threads.push(thread);
        }
        Ok(started)
    }

    /// Who lives on them, and what can be asked of them.
    pub fn directory(&self) -> &Arc<Directory> {
        &self.directory
    }

    /// The clock that they turn by.
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Starts a light thread: [`Directory::spawn`].
    pub fn spawn(&self, plan: ThreadPlan) -> Result<Handle, NotSpawned> {
        self.directory.spawn(plan)
    }

    /// Changes how all of them poll: [`Directory::set_poll`].
    pub fn set_poll(&self, mode: PollMode) -> Result<(), Refused> {
        self.directory.reactors().try_for_each(|reactor| self.directory.set_poll(reactor, mode))
    }

    /// Looks at all books.
    pub fn sample(&self) -> Sample {
        self.directory.sample(self.clock.now())
    }

    /// Stops them: all threads end, once their pollers have let go or a while has passed.
    ///
    /// # Panics
    ///
    /// If a reactor itself panicked, which no poller or message can make it do.
    pub fn stop(mut self) {
        self.order_stop();
        self.threads.drain(..).for_each(Thread::join);
    }

    fn order_stop(&self) {
        for (reactor, thread) in self.directory.reactors().zip(&self.threads) {
            while self.is_deaf(reactor) && !thread.is_finished() {
                host::thread::give_way();
            }
        }
    }

    /// Whether the reactor has no room for the order to stop.
    fn is_deaf(&self, reactor: ReactorId) -> bool {
        matches!(self.directory.stop(reactor), Err(Refused::InboxFull(_)))
    }
}

impl Drop for Reactors {
    fn drop(&mut self) {
        self.order_stop();
    }
}
